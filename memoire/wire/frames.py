"""Messages to frames and back: pure functions, one parser, so that every byte from outside is checked in one place.

Frame 0 is a header of 96 bytes and a msgpack tail, frame 1 the payload where a message has one; docs/wire.md has the
layout bit by bit, `tests/vectors/` holds an example of every message. No socket, clock or file is touched here.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec

from memoire import limits as _limits
from memoire.errors import MemoireError, ProtocolError
from memoire.limits import Limits

from . import _bytes, former, types
from .identity import NEWS_FRAME, NO_CLIENT, topic_frame
from .messages import DECODERS, VERSION, WITH_PAYLOAD, Body, News, Notice, Refused, Update
from .types import ALWAYS, NEVER, TYPES, Type

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
    most = min(limits.request_bytes, limits.message_bytes)
    found = _bytes.read_message(frames[0], frames[1], MAGIC, VERSION, limits.tail_bytes, most)
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
    """Frames that tell why a message was refused, in that message's version; None if it does not say who it is from."""
    header = peek(refused)
    if header is None:
        return None
    frames = reply(header, body)
    version = int.from_bytes(memoryview(refused[0])[4:6], "little")
    return [former.in_former_version(frames[0])] if version == former.VERSION else frames


def parse_header(frames: Sequence[Buffer], limits: Limits = _DEFAULTS) -> tuple[MessageHeader, memoryview]:
    """Header and undecoded tail, both checked against their checksum: all that a proxy needs. Raises ProtocolError."""
    if not 1 <= len(frames) <= 2:
        raise ProtocolError("frames", f"a message has 1 or 2 frames, got {len(frames)}")
    frame = memoryview(frames[0])
    found = _bytes.read_header(frame, MAGIC, VERSION, limits.tail_bytes)
    named = None if found is None else TYPES.get(found[0])
    if found is None or named is None:
        raise _wrong_header(frame, limits)
    header = MessageHeader(named, *found[1:])
    size = header.payload_bytes
    is_small = 0 < size <= limits.request_bytes and named.payload is ALWAYS and not named.large
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
    if tail_bytes > limits.tail_bytes:
        raise ProtocolError("too_large", f"a tail of {tail_bytes} bytes; {limits.tail_bytes} are allowed (tail_bytes)")
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
    allowed = limits.message_bytes if header.type.large else limits.request_bytes
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
