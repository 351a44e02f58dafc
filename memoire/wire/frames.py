"""Messages to frames and back: pure functions, one parser, so that every byte from outside is checked in one place.

Frame 0 is a header of 96 bytes and a msgpack tail, frame 1 the payload where a message has one; docs/wire.md has the
layout bit by bit, `tests/vectors/` holds an example of every message. No socket, clock or file is touched here.

HELLO as the side that says it sees it: when the next one is due, and what its answer is. Pure: time is passed in.

HELLO ──▶ open ──▶ WELCOME, or an error ──▶ HELLO again when it is due

What names become on the wire: runs and homes, tables, topics, and the client that is nobody.

Why a message is refused: the codes of REFUSED, and which of them end by themselves.
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
from .messages import DECODERS, VERSION, WITH_PAYLOAD, Body, News, Notice, Refused, Update
from .types import ALWAYS, NEVER, TYPES, Type, find

NO_CLIENT: Final = bytes(16)


def name_hash(name: str) -> int:
    """What headers say for a run or a home: the first 8 bytes of BLAKE2b of its name, never 0 (0: not assigned)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") or 1


DEFAULT_TABLE: Final = "default"
"""Name of the table of a server that has one and was told no name."""
ROUNDTRIP: Final = "memoire:roundtrip"
"""A small table that every server has beside its own, for `memoire doctor --roundtrip`: no learner meets what is pushed
there. It is found by name and number, but is none of the tables that a server lists, shows and saves."""


def table_number(name: str) -> int:
    """What headers say for a table: 0 for `DEFAULT_TABLE`, else 4 bytes of BLAKE2b of its name, never 0. All servers of
    a cluster agree on it, whatever the order of their tables.
    """
    if name == DEFAULT_TABLE:
        return 0
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") or 1


NEWS_FRAME: Final = b"\x00"
"""Subscription and first frame of NEWS: no topic has it, since a topic has at least one character before its zero."""


def topic_frame(topic: str) -> bytes:
    """The subscription and first frame of a topic; the zero byte keeps "a" from matching "ab"."""
    return topic.encode() + b"\x00"


MAGIC: Final = b"MEMR"
HEADER_BYTES: Final = _limits.HEADER_BYTES

Buffer: TypeAlias = Any
"""Anything with the buffer protocol and contiguous bytes: bytes, memoryview, zmq.Frame, a NumPy array."""


class MessageHeader(msgspec.Struct, frozen=True, gc=False):
    """What stands in front of every message, in the order of its 96 bytes."""

    type: Type
    table: int
    client: bytes
    """Id of the client that sent it; in a reply, that it is for. 16 zero bytes: nobody's (a notice)."""
    run: int
    home: int
    sequence: int
    """Counts up over all messages of a client; a reply has its request's."""
    fingerprint: int
    """Of the schema of the table; 0 where none is meant."""
    payload_bytes: int
    payload_checksum: int


class Message(msgspec.Struct, frozen=True):
    """A message that `parse` found whole, but for a payload that it left to others. `payload` is the frame as it was
    received, or None.
    """

    header: MessageHeader
    body: Body
    payload: Buffer | None

    @property
    def type(self) -> Type:
        """Which message it is: the header's type, and its body's."""
        return self.header.type


Answer = Message | MemoireError
"""How a request ends: its reply, or why there is none."""

_HEADER: Final = struct.Struct("<4sHHII16sQQQQQQII")
_SUMMED_HEADER: Final = struct.Struct(_HEADER.format + "Q")  # with its checksum
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
    """Frames of a message: the header with its tail, and the payload as it is (not copied), unless it is empty.

    Args:
        payload_checksum: `_bytes.checksum(payload)` if it is known already (a message handed on); computed otherwise.
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
    """Frames of the answer to a request: its client, sequence, run, home, table and fingerprint, unless `changed`."""
    facts: dict[str, Any] = {"client": request.client, "run": request.run, "home": request.home, "table": request.table}
    return encode(
        body,
        sequence=request.sequence,
        fingerprint=request.fingerprint if fingerprint is None else fingerprint,
        payload=payload,
        **(facts | changed if changed else facts),
    )


def parse(frames: Sequence[Buffer], limits: Limits = _DEFAULTS, *, verify_payload: bool = True) -> Message:
    """The message in one or two frames (envelope or topic taken off), completely checked.

    Nothing is allocated for a size that a message only declares. The insides of containers are for `unpack.check`.

    Args:
        frames: As received; frame 1 becomes `Message.payload` without a copy.
        limits: `tail_bytes`, `message_bytes` and `request_bytes` that this node allows.
        verify_payload: Compare the payload's checksum (one pass over it, GIL released). A proxy that hands it on leaves
            that to the end, a server to `unpack.check`, which is told the checksum, and a channel to whoever copies
            the chunk of a model.

    Raises:
        ProtocolError: and nothing else, whatever the bytes; `code` is one of `CODES`.
    """
    whole = _whole(frames, limits) if verify_payload and len(frames) == 2 else None
    if whole is not None:
        return whole
    header, tail = parse_header(frames, limits)
    if header.payload_bytes and verify_payload and _bytes.checksum(frames[1]) != header.payload_checksum:
        check_payload(frames[1], header.payload_checksum)
    return Message(header, _decode(header.type, tail), frames[1] if header.payload_bytes else None)


def _whole(frames: Sequence[Buffer], limits: Limits) -> Message | None:
    """The message in two frames, checked in one step; None if anything is wrong or large, which `parse` looks into."""
    most = min(limits.tuning.request_bytes, limits.message_bytes)
    found = _bytes.read_message(frames[0], frames[1], MAGIC, VERSION, limits.tuning.tail_bytes, most)
    if found is None or (known := WITH_PAYLOAD.get(found[0][0])) is None:
        return None
    (facts, tail), (kind, decode) = found, known
    try:
        return Message(MessageHeader(kind, *facts[1:]), decode(tail), frames[1])
    except _UNDECODED:
        return None


def check_payload(payload: Buffer, checksum: int) -> None:
    """Raise ProtocolError if the checksum of a payload is not the one in its header. Reads it once, without the GIL."""
    compare_checksum(_bytes.checksum(payload), checksum)


def compare_checksum(found: int, checksum: int) -> None:
    """Raise ProtocolError if the checksum that was found is not the one in the header."""
    if found != checksum:
        text = f"the payload's checksum is {found:#x}, the header says {checksum:#x}; it changed on the way"
        raise ProtocolError("payload", text)


def parse_notice(frames: Sequence[Buffer], limits: Limits = _DEFAULTS) -> Message:
    """`parse` for what a SUB socket received: [topic, frame 0, frame 1?]; its body is a `Notice` or `News`."""
    message = parse(frames[1:], limits)
    if isinstance(message.body, News):
        if bytes(frames[0]) != NEWS_FRAME:
            raise ProtocolError("topic", "NEWS came on the topic of a model")
        return message
    if not isinstance(message.body, Notice):
        raise ProtocolError("unexpected", f"{message.type.name} was published; only NOTICE and NEWS are")
    if topic_frame(message.body.topic) != bytes(frames[0]):
        raise ProtocolError("topic", f"a notice of {message.body.topic!r} came on another topic")
    return message


def peek(frames: Sequence[Buffer]) -> MessageHeader | None:
    """Who a refused message says it is from, unchecked: enough to answer that it was refused. None where it says
    nothing.

    The first 96 bytes mean the same in every version of the protocol, so that an old node can refuse a new one
    politely.
    """
    frame = memoryview(frames[0]) if frames else memoryview(b"")
    if frame.nbytes < HEADER_BYTES:
        return None
    magic, _, _, _, table, client, run, home, sequence, fingerprint, *_ = _HEADER.unpack_from(frame)
    return (
        MessageHeader(types.REFUSED, table, client, run, home, sequence, fingerprint, 0, 0) if magic == MAGIC else None
    )


def refusal(refused: Sequence[Buffer], body: Refused) -> list[Buffer] | None:
    """Frames that tell why a message was refused; None if it does not say who it is from."""
    header = peek(refused)
    return None if header is None else reply(header, body)


def parse_header(frames: Sequence[Buffer], limits: Limits = _DEFAULTS) -> tuple[MessageHeader, memoryview]:
    """Header and undecoded tail, both checked against their checksum: all that a proxy needs. Raises ProtocolError."""
    if not 1 <= len(frames) <= 2:
        raise ProtocolError("frames", f"a message has 1 or 2 frames, got {len(frames)}")
    frame = memoryview(frames[0])
    found = _bytes.read_header(frame, MAGIC, VERSION, limits.tuning.tail_bytes)
    named = None if found is None else TYPES.get(found[0]) or find(found[0])
    if found is None or named is None:
        raise _wrong_header(frame, limits)
    header = MessageHeader(named, *found[1:])
    size = header.payload_bytes
    is_small = 0 < size <= limits.tuning.request_bytes and named.payload is ALWAYS and not named.large
    if not is_small or len(frames) != 2 or len(frames[1]) != size:
        _check_payload(header, frames, limits)
    return header, frame[HEADER_BYTES:]


def _wrong_header(frame: memoryview, limits: Limits) -> ProtocolError:
    """What is wrong with frame 0, the first thing that is."""
    try:
        _check_header(frame, limits)
    except ProtocolError as error:
        return error
    return ProtocolError("checksum", "frame 0 changed while it was read")


def _check_header(frame: memoryview, limits: Limits) -> None:
    if frame.nbytes < HEADER_BYTES:
        raise ProtocolError("short", f"frame 0 has {frame.nbytes} bytes, a header has {HEADER_BYTES}")
    magic, version, number, flags, *_, tail_bytes, reserved, checksum = _SUMMED_HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise ProtocolError("magic", f"expected {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise ProtocolError(
            "version", f"version {version} of the protocol; this node speaks {VERSION}. Upgrade the older of the two"
        )
    if tail_bytes > limits.tuning.tail_bytes:
        raise ProtocolError(
            "too_large", f"a tail of {tail_bytes} bytes; {limits.tuning.tail_bytes} are allowed (tail_bytes)"
        )
    if frame.nbytes != HEADER_BYTES + tail_bytes:
        code = "short" if frame.nbytes < HEADER_BYTES + tail_bytes else "long"
        raise ProtocolError(code, f"frame 0 has {frame.nbytes} bytes, its header says {HEADER_BYTES + tail_bytes}")
    if _bytes.header_checksum(frame) != checksum:
        raise ProtocolError("checksum", "the header's checksum is wrong; it changed on the way")
    if number not in TYPES:
        raise ProtocolError("type", f"type {number}, which this node does not know. Upgrade the older of the two")
    if flags or reserved:
        raise ProtocolError("flags", f"flags {flags:#x} and reserved {reserved:#x} must be 0 in version {VERSION}")


def _check_payload(header: MessageHeader, frames: Sequence[Buffer], limits: Limits) -> None:
    wants, size = header.type.payload, header.payload_bytes
    if (wants is NEVER and size) or (wants is ALWAYS and not size) or bool(size) != (len(frames) == 2):
        raise ProtocolError("frames", f"{header.type.name} with {len(frames)} frames and a payload of {size} bytes")
    if not size:
        if header.payload_checksum:
            raise ProtocolError("size", f"{header.type.name} has a checksum for a payload it does not have")
        return
    allowed = limits.message_bytes if header.type.large else limits.tuning.request_bytes
    if size > allowed:
        raise ProtocolError("too_large", f"{header.type.name} with a payload of {size} bytes; {allowed} are allowed")
    if (given := memoryview(frames[1]).nbytes) != size:
        raise ProtocolError("size", f"frame 1 has {given} bytes, the header says {size}")


def encoded_bytes(part: Any) -> int:
    """Bytes that a part of a body takes in its tail."""
    return len(_ENCODER.encode(part))


def check_bounds(kind: Type, frame: Buffer) -> None:
    """Raise ProtocolError (code "too_large") if a list, map or text of a tail that was made here is beyond its bound:
    its receiver would throw it away.
    """
    try:
        DECODERS[kind].decode(memoryview(frame)[HEADER_BYTES:])
    except _UNDECODED as problem:
        raise ProtocolError("too_large", f"a reply of {kind.name} is beyond what it may hold: {problem}") from None


def tail_of(body: Body) -> bytes:
    """A body without its header, to be kept."""
    return _ENCODER.encode(body)


def update_of(tail: bytes) -> Update:
    """The UPDATE whose tail was kept. Raises ProtocolError."""
    update = _decode(types.UPDATE, memoryview(tail))
    assert isinstance(update, Update)
    return update


def _decode(kind: Type, tail: memoryview) -> Body:
    decoder = DECODERS.get(kind)
    if decoder is None:
        raise ProtocolError("type", f"{kind.name}, which this node passes on, but does not read")
    if not _bytes.is_plain_msgpack(tail):
        raise ProtocolError("tail", f"{kind.name}: the tail is not one plain msgpack value")
    try:
        return decoder.decode(tail)
    except _UNDECODED as problem:
        raise ProtocolError("tail", f"{kind.name}: {problem}") from None


class HelloSchedule:
    """When the next HELLO to one address is due: one at a time."""

    def __init__(self, due: float = 0.0) -> None:
        self.is_open = False
        """Whether one is on its way that has no answer yet."""
        self.due = due
        """When the next one is due, unless one is open then; infinity: not by itself."""

    def next_time(self) -> float:
        """When `is_due` becomes true by itself."""
        return float("inf") if self.is_open else self.due

    def is_due(self, now: float) -> bool:
        """Whether one is to be sent now."""
        return now >= self.next_time()

    def begin(self, due: float = float("inf")) -> None:
        """One is sent, and the next one is due then."""
        self.is_open, self.due = True, due

    def answered(self) -> None:
        """It has its answer, or the error that ends it."""
        self.is_open = False

    def hurry(self) -> None:
        """Something may have changed: the next one is due at once, or as soon as the one that is open has ended."""
        self.due = 0.0


class HelloAnswer(NamedTuple):
    """The answer to a HELLO that was taken."""

    header: MessageHeader
    told: messages.Welcome


def welcome_of(answer: Answer, endpoint: str) -> HelloAnswer:
    """What a HELLO was answered.

    Args:
        endpoint: Of whoever answered, for errors.

    Raises:
        MemoireError: it was refused, or not answered, or by something else than WELCOME.
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
    "too_large": "larger than this node, or the client that asks, allows",
    "topic": "topic frame and notice disagree",
    "unexpected": "a type of message that does not belong on this channel",
    "schema": "made for another schema",
    "table": "a table that this node does not have",
    "run": "made for another run",
    "container": "a payload whose head, table or blocks are not as docs/wire.md says",
    "index": "an index, count or step outside of what it points into",
    "value": "a weight, total or discount that is not finite or not in its range",
    "codec": "a compression that this node does not have, or compressed bytes that are damaged",
    "client": "a client id that this node does not know, or that may not be used here",
    "owner": "in the name of a client id that belongs to another key",
    "role": "sent by the key of a role that may not send this",
    "denied": "sent to a proxy that no server lets in",
    "revoked": "sent by a key that is not authorized any more",
    "passport": "passed on by a proxy that does not say for whom, or says it without being one",
    "parameters": "parameters that do not fit the schema",
    "busy": "too much is waiting already",
    "full": "no room among what stays here until it is cleared, such as keyed rows",
    "disk": "this node's state folder cannot be written, and nothing is acknowledged; the text says why and what to do",
    "closed": "this node is closing",
    "failed": "the function of this inference node raised an error, or its outputs do not fit their schema",
    "cancelled": "for a job that is not wanted any more, or that somebody else has",
    "session": "from a trainer whose place another one has taken, or that has not said where it goes on",
    "missing": "asked for something that is not stored here (any more)",
}
"""Every refusal code and what it says; a refusal's text adds which value and what was expected."""
PASSING: Final = ("busy", "closed", "denied", "disk")
"""Codes of refusals that end by themselves: what was asked is asked again."""
TOO_LARGE: Final = ("too_large", "tail")
"""Codes of refusals for a size: the same request would be refused again. "tail" is that of a list beyond its bound."""
FOR_INFERENCE: Final = frozenset({types.INFER, types.WORK, types.RESULT})
"""What only inference nodes and agents answer: nobody passes it on."""


def no_inference(kind: Type) -> ProtocolError:
    """Why a server or proxy refuses one of these."""
    text = f"{kind.name} was sent to a server or proxy. Ask the address of the inference node or agent itself"
    return ProtocolError("unexpected", text)
