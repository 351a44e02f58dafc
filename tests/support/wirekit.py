"""The golden messages, and how tests change them."""

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
"""What checksums are known for."""
SEED = 0x9E3779B185EBCA8D
"""With which they are known, too."""


def refused(frames: Any, limits: Limits | None = None) -> str:
    """The code with which frames are refused; "" when they are a message."""
    try:
        parse(frames, limits or Limits())
    except ProtocolError as problem:
        assert problem.code in CODES
        return problem.code
    return ""


def golden(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(VECTORS.glob(f"{name}.[01]"))]


def sealed(head: bytes, tail: bytes) -> bytes:
    """Frame 0 with a right checksum."""
    return head[:88] + _bytes.checksum(tail, _bytes.checksum(head[:88])).to_bytes(8, "little") + tail


def changed(name: str, offset: int, value: bytes) -> list[bytes]:
    """A message whose header says something else, with a right checksum."""
    frames = golden(name)
    head = bytearray(frames[0][:96])
    head[offset : offset + len(value)] = value
    return [sealed(bytes(head), frames[0][96:]), *frames[1:]]


def with_tail(name: str, tail: bytes) -> list[bytes]:
    """A message with another tail, its header right."""
    frames = golden(name)
    head = bytearray(frames[0][:96])
    head[80:84] = len(tail).to_bytes(4, "little")
    return [sealed(bytes(head), tail), *frames[1:]]


MESSAGES = [
    [path.read_bytes() for path in (first, first.with_suffix(".1")) if path.exists()]
    for first in sorted(VECTORS.glob("*.0"))
]
