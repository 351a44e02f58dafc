"""Conversion of messages to frames and back, by pure functions: one parser checks every byte that is received.

Frame 0 is a header of 96 bytes and a msgpack tail; frame 1 is the payload, if the message has one.
docs/development/wire.md has the layout bit by bit, and `tests/vectors/` an example of every message. The module uses no
socket, clock or file.

Schedule of HELLO for the sender, and the check of its answer. Pure: time is passed in.

HELLO ──▶ open ──▶ WELCOME, or an error ──▶ HELLO again when it is due

Hashes of names for the wire: runs and homes, tables, topics; and the id for messages without a client.

Codes of REFUSED, and the codes after which a client retries.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from memoire import errors
from memoire import limits as _limits
from memoire.errors import MemoireError, ProtocolError
from memoire.limits import Limits

from . import _bytes, messages, types
from .messages import DECODERS, VERSION, WITH_PAYLOAD, Body, News, Notice, Refusal, Update
from .types import ALWAYS, NEVER, TYPES, Type, find

NO_CLIENT: Final = bytes(16)


def name_hash(name: str) -> int:
    """Return the number of a run or home in headers: 8 bytes of BLAKE2b of its name, never 0 (0: not assigned)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") or 1


DEFAULT_TABLE: Final = "default"
"""Name of a server's only table if the server was started without a name for it."""
ROUNDTRIP: Final = "memoire:roundtrip"
"""Name of a small table that every server has beside its own, for `memoire doctor --roundtrip`. Learners do not draw
from it. The table can be addressed by name and number, but a server does not list, show or save it."""


def table_number(name: str) -> int:
    """Return the number of a table in headers: 0 for `DEFAULT_TABLE`, else 4 bytes of BLAKE2b of its name, never 0.

    All servers of a cluster give a name the same number, in whatever order they have their tables.
    """
    if name == DEFAULT_TABLE:
        return 0
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") or 1


NEWS_FRAME: Final = b"\x00"
"""Subscription and first frame of NEWS. No topic has this frame: a topic has at least one character before its zero."""


def topic_frame(topic: str) -> bytes:
    """Return the subscription and first frame of a topic; the zero byte keeps "a" from matching "ab"."""
    return topic.encode() + b"\x00"


MAGIC: Final = b"MEMR"
HEADER_BYTES: Final = _limits.HEADER_BYTES

Buffer: TypeAlias = Any
"""Object with the buffer protocol and contiguous bytes: bytes, memoryview, zmq.Frame, a NumPy array."""


class MessageHeader(msgspec.Struct, frozen=True, gc=False):
    """Header of a message: its fields in the order of the 96 bytes."""

    type: Type
    table: int
    client: bytes
    """Id of the client that sent the message or receives the reply; 16 zero bytes in a notice, which has no client."""
    run: int
    home: int
    sequence: int
    """Number of the message, which counts up over all messages of a client; a reply has the request's number."""
    fingerprint: int
    """Fingerprint of the table's schema; 0 if the message does not depend on a schema."""
    payload_bytes: int
    payload_checksum: int


class Message(msgspec.Struct, frozen=True):
    """Parsed message. `payload` is the frame as received, or None; `parse` may have left its checksum to the caller."""

    header: MessageHeader
    body: Body
    payload: Buffer | None

    @property
    def type(self) -> Type:
        """Type of the message, of its header and of its body."""
        return self.header.type


Answer = Message | MemoireError
"""Result of a request: the reply, or the error that ended the request."""

_HEADER: Final = struct.Struct("<4sHHII16sQQQQQQII")
_CHECKED_HEADER: Final = struct.Struct(_HEADER.format + "Q")  # header with its checksum
_ENCODER: Final = msgspec.msgpack.Encoder()
_UNDECODED: Final = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
_DEFAULTS: Final = Limits()


def encode(
    body: Body,
    *,
    client: bytes = NO_CLIENT,
    sequence: int = 0,
    run: int = 0,
    home: int = 0,
    table: int = 0,
    fingerprint: int = 0,
    payload: Buffer | None = None,
    payload_checksum: int | None = None,
) -> list[Buffer]:
    """Return the frames of a message: the header with its tail, and the payload (not copied), unless it is empty.

    Args:
        payload_checksum: `_bytes.checksum(payload)` if the caller knows it (a forwarded message); None computes it.
    """
    size = 0 if payload is None else len(payload) if type(payload) is bytes else memoryview(payload).nbytes
    kind = body.type
    if (kind.payload is NEVER and size) or (kind.payload is ALWAYS and not size):
        raise ValueError(f"{kind.name} {'has no' if size else 'needs a'} payload")
    facts = table, client, run, home, sequence, fingerprint, payload, payload_checksum
    frame = _bytes.write_header(MAGIC, VERSION, kind.number, *facts, _ENCODER.encode(body))
    return [frame, payload] if size else [frame]


def reply(
    request: MessageHeader,
    body: Body,
    *,
    payload: Buffer | None = None,
    fingerprint: int | None = None,
    **changed: int,
) -> list[Buffer]:
    """Return the frames of a reply, with the client, sequence, run, home, table and fingerprint of the request."""
    facts: dict[str, Any] = {"client": request.client, "run": request.run, "home": request.home, "table": request.table}
    return encode(
        body,
        sequence=request.sequence,
        fingerprint=request.fingerprint if fingerprint is None else fingerprint,
        payload=payload,
        **(facts | changed if changed else facts),
    )


def parse(frames: Sequence[Buffer], limits: Limits = _DEFAULTS, *, verify_payload: bool = True) -> Message:
    """Check one or two frames (without envelope or topic) completely, and return the message in them.

    Allocates no memory for a size that a message only declares. `containers.check` checks the content of containers.

    Args:
        frames: Frames as received; frame 1 becomes `Message.payload` without a copy.
        limits: `tail_bytes`, `message_bytes` and `request_bytes` that this node allows.
        verify_payload: Compare the payload's checksum (one pass over it, GIL released). A proxy leaves the checksum to
            the receiver, a server to `containers.check`, and a channel to the code that copies a chunk of a model.

    Raises:
        ProtocolError: the message is invalid; `code` is one of `CODES`. No bytes raise any other error.
    """
    whole = _parse_whole(frames, limits) if verify_payload and len(frames) == 2 else None
    if whole is not None:
        return whole
    header, tail = parse_header(frames, limits)
    if header.payload_bytes and verify_payload and _bytes.checksum(frames[1]) != header.payload_checksum:
        check_payload(frames[1], header.payload_checksum)
    return Message(header, _decode(header.type, tail), frames[1] if header.payload_bytes else None)


def _parse_whole(frames: Sequence[Buffer], limits: Limits) -> Message | None:
    """Return the message in two frames, checked in one step, or None if a check fails or the payload is large."""
    most = min(limits.tuning.request_bytes, limits.message_bytes)
    parts = _bytes.read_message(frames[0], frames[1], MAGIC, VERSION, limits.tuning.tail_bytes, most)
    if parts is None or (known := WITH_PAYLOAD.get(parts[0][0])) is None:
        return None
    (facts, tail), (kind, decode) = parts, known
    try:
        return Message(MessageHeader(kind, *facts[1:]), decode(tail), frames[1])
    except _UNDECODED:
        return None


def check_payload(payload: Buffer, checksum: int) -> None:
    """Raise ProtocolError if a payload's checksum differs from the header's. Reads the bytes once, without the GIL."""
    compare_checksum(_bytes.checksum(payload), checksum)


def compare_checksum(computed: int, checksum: int) -> None:
    """Raise ProtocolError if the computed checksum of a payload differs from the header's."""
    if computed != checksum:
        text = f"the payload's checksum is {computed:#x}, but its header says {checksum:#x}; it changed on the way"
        raise ProtocolError("payload", text)


def parse_notice(frames: Sequence[Buffer], limits: Limits = _DEFAULTS) -> Message:
    """Parse the frames of a SUB socket, [topic, frame 0, frame 1?], to a `Notice` or `News`. Raises ProtocolError."""
    message = parse(frames[1:], limits)
    if isinstance(message.body, News):
        if bytes(frames[0]) != NEWS_FRAME:
            raise ProtocolError("topic", "NEWS was published on the topic of a model")
        return message
    if not isinstance(message.body, Notice):
        raise ProtocolError("unexpected", f"{message.type.name} was published; only NOTICE and NEWS may be")
    if topic_frame(message.body.topic) != bytes(frames[0]):
        raise ProtocolError("topic", f"a notice of {message.body.topic!r} was published on another topic")
    return message


def peek(frames: Sequence[Buffer]) -> MessageHeader | None:
    """Parse the sender from a rejected header, without validation, to address the refusal.

    Return None if the frame is too short or has another magic. The first 96 bytes mean the same in every version of the
    protocol, so that an old node can refuse the messages of a new one.
    """
    frame = memoryview(frames[0]) if frames else memoryview(b"")
    if frame.nbytes < HEADER_BYTES:
        return None
    magic, _, _, _, table, client, run, home, sequence, fingerprint, *_ = _HEADER.unpack_from(frame)
    return (
        MessageHeader(types.REFUSED, table, client, run, home, sequence, fingerprint, 0, 0) if magic == MAGIC else None
    )


def refusal(refused: Sequence[Buffer], body: Refusal) -> list[Buffer] | None:
    """Return the frames of a REFUSED for a message, or None if the message has no readable header."""
    header = peek(refused)
    return None if header is None else reply(header, body)


def parse_header(frames: Sequence[Buffer], limits: Limits = _DEFAULTS) -> tuple[MessageHeader, memoryview]:
    """Return header and undecoded tail, both checked against their checksum, as a proxy needs. Raises ProtocolError."""
    if not 1 <= len(frames) <= 2:
        raise ProtocolError("frames", f"a message has 1 or 2 frames, got {len(frames)}")
    frame = memoryview(frames[0])
    fields = _bytes.read_header(frame, MAGIC, VERSION, limits.tuning.tail_bytes)
    named = None if fields is None else TYPES.get(fields[0]) or find(fields[0])
    if fields is None or named is None:
        raise _header_error(frame, limits)
    header = MessageHeader(named, *fields[1:])
    size = header.payload_bytes
    is_small = 0 < size <= limits.tuning.request_bytes and named.payload is ALWAYS and not named.large
    if not is_small or len(frames) != 2 or len(frames[1]) != size:
        _check_payload(header, frames, limits)
    return header, frame[HEADER_BYTES:]


def _header_error(frame: memoryview, limits: Limits) -> ProtocolError:
    """Return the error of the first check that frame 0 fails."""
    try:
        _check_header(frame, limits)
    except ProtocolError as error:
        return error
    return ProtocolError("checksum", "frame 0 changed while it was read")


def _check_header(frame: memoryview, limits: Limits) -> None:
    if frame.nbytes < HEADER_BYTES:
        raise ProtocolError("short", f"frame 0 has {frame.nbytes} bytes, a header has {HEADER_BYTES}")
    magic, version, number, flags, *_, tail_bytes, reserved, checksum = _CHECKED_HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise ProtocolError("magic", f"expected {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise ProtocolError(
            "version", f"version {version} of the protocol; this node speaks {VERSION}. Upgrade the older of the two"
        )
    if tail_bytes > limits.tuning.tail_bytes:
        raise ProtocolError(
            "too_large", f"a tail of {tail_bytes} bytes; the limit is {limits.tuning.tail_bytes} (tail_bytes)"
        )
    if frame.nbytes != HEADER_BYTES + tail_bytes:
        code = "short" if frame.nbytes < HEADER_BYTES + tail_bytes else "long"
        raise ProtocolError(code, f"frame 0 has {frame.nbytes} bytes, but its header says {HEADER_BYTES + tail_bytes}")
    if _bytes.header_checksum(frame) != checksum:
        raise ProtocolError("checksum", "the header's checksum is wrong; it changed on the way")
    if number not in TYPES:
        raise ProtocolError("type", f"message type {number} is unknown to this node. Upgrade the older of the two")
    if flags or reserved:
        raise ProtocolError("flags", f"flags {flags:#x} and reserved {reserved:#x} must be 0 in version {VERSION}")


def _check_payload(header: MessageHeader, frames: Sequence[Buffer], limits: Limits) -> None:
    wants, size = header.type.payload, header.payload_bytes
    if (wants is NEVER and size) or (wants is ALWAYS and not size) or bool(size) != (len(frames) == 2):
        raise ProtocolError("frames", f"{header.type.name} with {len(frames)} frames and a payload of {size} bytes")
    if not size:
        if header.payload_checksum:
            raise ProtocolError("size", f"{header.type.name} has the checksum of a payload, but no payload")
        return
    allowed = limits.message_bytes if header.type.large else limits.tuning.request_bytes
    if size > allowed:
        raise ProtocolError("too_large", f"{header.type.name} with a payload of {size} bytes; the limit is {allowed}")
    if (received := memoryview(frames[1]).nbytes) != size:
        raise ProtocolError("size", f"frame 1 has {received} bytes, but the header says {size}")


def encoded_bytes(part: Any) -> int:
    """Return the bytes that a part of a body takes in its tail."""
    return len(_ENCODER.encode(part))


def check_bounds(kind: Type, frame: Buffer) -> None:
    """Raise ProtocolError (code "too_large") if a list, map or text of an encoded tail exceeds its bound."""
    try:
        DECODERS[kind].decode(memoryview(frame)[HEADER_BYTES:])
    except _UNDECODED as problem:
        raise ProtocolError("too_large", f"a reply of {kind.name} exceeds a bound of its fields: {problem}") from None


def tail_of(body: Body) -> bytes:
    """Return the encoded tail of a body, without a header."""
    return _ENCODER.encode(body)


def update_of(tail: bytes) -> Update:
    """Decode the tail of an UPDATE that `tail_of` encoded. Raises ProtocolError."""
    update = _decode(types.UPDATE, memoryview(tail))
    assert isinstance(update, Update)
    return update


def _decode(kind: Type, tail: memoryview) -> Body:
    decoder = DECODERS.get(kind)
    if decoder is None:
        raise ProtocolError("type", f"{kind.name}: this node forwards messages of this type, but cannot read them")
    if not _bytes.is_plain_msgpack(tail):
        raise ProtocolError("tail", f"{kind.name}: the tail is not one plain msgpack value")
    try:
        return decoder.decode(tail)
    except _UNDECODED as problem:
        raise ProtocolError("tail", f"{kind.name}: {problem}") from None


class HelloSchedule:
    """Schedule of the HELLO messages to one address, of which at most one is open at a time."""

    def __init__(self, due: float = 0.0) -> None:
        self.is_open = False
        """True while a HELLO that was sent has no answer yet."""
        self.due = due
        """Time of the next HELLO, unless one is open then; infinity: none is scheduled."""

    def next_time(self) -> float:
        """Return the time at which `is_due` becomes true; infinity while a HELLO is open."""
        return float("inf") if self.is_open else self.due

    def is_due(self, now: float) -> bool:
        """Return True if a HELLO is to be sent now."""
        return now >= self.next_time()

    def begin(self, due: float = float("inf")) -> None:
        """Record that a HELLO is sent now, and schedule the next one."""
        self.is_open, self.due = True, due

    def receive_answer(self) -> None:
        """Record that the open HELLO has its answer, or ended with an error."""
        self.is_open = False

    def make_due(self) -> None:
        """Make the next HELLO due at once, or as soon as the open one has ended."""
        self.due = 0.0


class HelloAnswer(NamedTuple):
    """Header and body of the WELCOME that answered a HELLO."""

    header: MessageHeader
    welcome: messages.Welcome


def welcome_of(answer: Answer, endpoint: str) -> HelloAnswer:
    """Return the WELCOME that answered a HELLO.

    Args:
        answer: Reply to the HELLO, or the error that ended the request.
        endpoint: Address that the HELLO was sent to, for errors.

    Raises:
        MemoireError: the HELLO was refused, not answered, or answered by a message other than WELCOME.
    """
    if isinstance(answer, MemoireError):
        raise answer
    if not isinstance(answer.body, messages.Welcome):
        raise errors.Refused(endpoint, "unexpected", f"HELLO was answered by {answer.type.name}")
    return HelloAnswer(answer.header, answer.body)


CODES: Final = {
    "frames": "not one or two frames, or a payload that this type of message must or must not have",
    "short": "frame 0 is shorter than its header and tail",
    "long": "frame 0 is longer than its header and tail",
    "magic": "not a memoire message",
    "version": "another version of the protocol",
    "checksum": "header or tail changed on the way",
    "type": "a type of message this version does not have",
    "flags": "flags this version does not have",
    "tail": "a tail that is not this type's msgpack map",
    "size": "a payload of another size than the header says",
    "payload": "payload changed on the way",
    "too_large": "larger than the limit of this node, or of the client that sent the request",
    "topic": "topic frame and notice disagree",
    "unexpected": "a type of message that does not belong on this channel",
    "schema": "made for another schema",
    "table": "a table that this node does not have",
    "run": "made for another run",
    "container": "a payload whose head, table or blocks are not as docs/development/wire.md describes",
    "index": "an index, count or step that is out of range",
    "value": "a weight, total or discount that is not finite or not in its range",
    "codec": "a compression that this node does not have, or compressed bytes that are damaged",
    "client": "a client id that this node does not know, or that may not be used here",
    "owner": "sent with a client id that belongs to another key",
    "role": "sent with a key whose role may not send this type of message",
    "denied": "sent to a proxy whose key no server accepts",
    "revoked": "sent with a key that is not authorized any more",
    "passport": "forwarded by a proxy without a passport, or sent with one by a process that is not a proxy",
    "parameters": "parameters that do not fit the schema",
    "busy": "too many requests or bytes are waiting already",
    "full": "no room for data that is kept until it is cleared, such as keyed rows",
    "disk": "this node's state folder cannot be written, and nothing is acknowledged; the text says why and what to do",
    "closed": "this node is closing",
    "failed": "the function of this inference node raised an error, or its outputs do not fit their schema",
    "cancelled": "for a job that was cancelled, or that another worker has",
    "session": "from a trainer that another trainer has replaced, or that has to call rewind or resume first",
    "missing": "a request for data that this node does not store (any more)",
}
"""Meaning of every refusal code; the text of a refusal adds the value and the expected values."""
PASSING: Final = ("busy", "closed", "denied", "disk")
"""Codes of temporary refusals: the client retries the request."""
TOO_LARGE: Final = ("too_large", "tail")
"""Codes of refusals for a size: a retry would be refused again. "tail" is the code of a list beyond its bound."""
FOR_INFERENCE: Final = frozenset({types.INFER, types.WORK, types.RESULT})
"""Types of messages that only inference nodes and agents answer; proxies do not forward them."""


def no_inference(kind: Type) -> ProtocolError:
    """Return the refusal of a message for an inference node or agent that a server or proxy received."""
    text = f"{kind.name} was sent to a server or proxy. Send it to the address of the inference node or agent"
    return ProtocolError("unexpected", text)
