"""What a node says to peers of the former protocol: that they are refused, in bytes that they can read.

Version 1 has the same header, but its checksums are XXH64. Nothing else of it is spoken. Only frame 0 of a REFUSED is
made here, a few hundred bytes, so plain Python is fast enough.
"""

from collections.abc import Iterator
from typing import Final

VERSION: Final = 1

_MASK: Final = 2**64 - 1
_PRIMES: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def in_former_version(frame: bytes) -> bytes:
    """Frame 0 of a message without payload, as a peer of version 1 expects it."""
    head, tail = frame[:4] + VERSION.to_bytes(2, "little") + frame[6:88], frame[96:]
    return head + xxh64(tail, xxh64(head)).to_bytes(8, "little") + tail


def xxh64(data: bytes, seed: int = 0) -> int:
    """The former checksum, from the public description of the algorithm."""
    first, second, third, fourth, fifth = _PRIMES
    whole = len(data) & ~31
    total = seed + fifth
    if whole:
        lanes = [seed + first + second, seed + second, seed, seed - first]
        for at, word in enumerate(_words(data[:whole], 8)):
            lanes[at % 4] = _turn(lanes[at % 4], word)
        total = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            total = (total ^ _turn(0, lane)) * first + fourth & _MASK
    total += len(data)
    words, quads = len(data) & ~7, len(data) & ~3
    for word in _words(data[whole:words], 8):
        total = _rotate(total ^ _turn(0, word), 27) * first + fourth
    for word in _words(data[words:quads], 4):
        total = _rotate(total ^ word * first & _MASK, 23) * second + third
    for byte in data[quads:]:
        total = _rotate(total ^ byte * fifth, 11) * first
    total &= _MASK
    total = (total ^ total >> 33) * second & _MASK
    total = (total ^ total >> 29) * third & _MASK
    return total ^ total >> 32


def _words(data: bytes, size: int) -> Iterator[int]:
    return (int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size))


def _rotate(word: int, bits: int) -> int:
    word &= _MASK
    return (word << bits | word >> (64 - bits)) & _MASK


def _turn(lane: int, word: int) -> int:
    return _rotate(lane + word * _PRIMES[1], 31) * _PRIMES[0] & _MASK
