"""Frames of a message: `frames.parse` takes them or raises ProtocolError, and what it took can be sent on as it is.

1 byte   what is set right before they are parsed: 1 lengths, 2 checksums; 4 as a notice, with its topic in front
2 bytes  length of frame 0, little endian; then frame 0, and frame 1 where anything is left
"""

import struct
from pathlib import Path

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.wire import _bytes
from memoire.wire.frames import CODES, HEADER_BYTES, encode, parse, parse_notice, refusal
from memoire.wire.messages import Refused

REACHED = {"taken", "tail", "checksum", "short", "long", "magic", "size", "frames", "type", "flags", "payload"}
LIMITS = Limits(tail_bytes=1 << 15, request_bytes=1 << 15, message_bytes=1 << 16)
VECTORS = Path(__file__).parent.parent / "vectors"


def seeds() -> list[bytes]:
    """The golden messages, each with everything set right."""
    made = []
    for path in sorted(VECTORS.glob("*.0")):
        head, second = path.read_bytes(), path.with_suffix(".1")
        payload = second.read_bytes() if second.exists() else b""
        made += [bytes([flags]) + struct.pack("<H", len(head)) + head + payload for flags in (0, 2, 3)]
    return made


def frames_of(data: bytes) -> tuple[list[bytes], int]:
    """Frames and flags of an input."""
    flags, (size,) = data[0], struct.unpack_from("<H", data, 1)
    head, payload = bytearray(data[3 : 3 + size]), data[3 + size :]
    if len(head) >= HEADER_BYTES:
        if flags & 1:
            struct.pack_into("<Q", head, 64, len(payload))
            struct.pack_into("<I", head, 80, len(head) - HEADER_BYTES)
        if flags & 2:
            struct.pack_into("<Q", head, 72, _bytes.checksum(payload) if payload else 0)
            tail = memoryview(head)[HEADER_BYTES:]
            struct.pack_into("<Q", head, 88, _bytes.checksum(tail, _bytes.checksum(memoryview(head)[:88])))
            del tail
    return [bytes(head), *([payload] if payload else [])], flags


def one(data: bytes) -> str:
    """Parse, encode what was found, parse that: the same message."""
    if len(data) < 3:
        return "too short to be one"
    frames, flags = frames_of(data)
    refusal(frames, Refused(code="version"))
    try:
        if flags & 4:
            topic = b"policy\x00"
            message = parse_notice([topic, *frames], LIMITS)
        else:
            message = parse(frames, LIMITS)
    except ProtocolError as error:
        assert error.code in CODES and len(str(error)) < 2000
        return error.code
    header = message.header
    names = ("client", "sequence", "run", "home", "table", "fingerprint")
    made = encode(message.body, payload=message.payload, **{name: getattr(header, name) for name in names})
    again = parse(made)
    assert again.header.client == header.client and again.type is message.type
    assert encode(again.body, payload=again.payload)[0] == encode(message.body, payload=message.payload)[0]
    return "taken"
