"""Golden messages, and changed copies of these messages."""

from pathlib import Path
from typing import Any

import make_vectors
from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.wire import _bytes
from memoire.wire.frames import CODES, parse

VECTORS = Path(__file__).parents[1] / "vectors"

BODIES = make_vectors.bodies()

SUMMED = bytes(((i * 2654435761) >> 13) & 255 for i in range(2049))
"""Bytes whose checksums are known, with `SEED` and without a seed."""
SEED = 0x9E3779B185EBCA8D


def refused(frames: Any, limits: Limits | None = None) -> str:
    """Return the code with which frames are refused, or "" for a valid message."""
    try:
        parse(frames, limits or Limits())
    except ProtocolError as problem:
        assert problem.code in CODES
        return problem.code
    return ""


def golden(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(VECTORS.glob(f"{name}.[01]"))]


def sealed(head: bytes, tail: bytes) -> bytes:
    """Return frame 0 with its checksum corrected."""
    return head[:88] + _bytes.checksum(tail, _bytes.checksum(head[:88])).to_bytes(8, "little") + tail


def changed(name: str, offset: int, value: bytes) -> list[bytes]:
    """Return a message with changed bytes in its header, and a correct checksum."""
    frames = golden(name)
    head = bytearray(frames[0][:96])
    head[offset : offset + len(value)] = value
    return [sealed(bytes(head), frames[0][96:]), *frames[1:]]


def with_tail(name: str, tail: bytes) -> list[bytes]:
    """Return a message with another tail, and a header that fits."""
    frames = golden(name)
    head = bytearray(frames[0][:96])
    head[80:84] = len(tail).to_bytes(4, "little")
    return [sealed(bytes(head), tail), *frames[1:]]


MESSAGES = [
    [path.read_bytes() for path in (first, first.with_suffix(".1")) if path.exists()]
    for first in sorted(VECTORS.glob("*.0"))
]
