"""The checksum is XXH64: its published vectors hold, whatever the size, alignment and seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.wire import _bytes

# Made with xxhash 3.5 from PyPI over bytes ((i * 2654435761) >> 13) & 255; sizes around each step of the algorithm.
DATA = bytes(((i * 2654435761) >> 13) & 255 for i in range(1024))
SEED = 0x9E3779B185EBCA8D
KNOWN = [
    (0, 0xEF46DB3751D8E999, 0x0B303D920EC349DF),
    (1, 0xE934A84ADB052768, 0x9C6678669FCD2E6D),
    (3, 0x28823E205E353F69, 0xFB08A801833D8042),
    (4, 0x91B65BBE720C34CF, 0x42F4226722325F62),
    (7, 0xE2400CDEA02EE3C5, 0xC93D837E41587387),
    (8, 0x521FD2878EA69D17, 0x9E8B49BD0E2E03D5),
    (12, 0x3FB737EA78F531BB, 0xBF6C4B7727D3479D),
    (15, 0x4EE77AB371D06E31, 0x7E276596CCE98CE7),
    (16, 0xB1A375C6BD6BA7AF, 0xD3E16B93145D7EE6),
    (31, 0xB74BAA9042B94DEE, 0x51C3FE9BC8A77309),
    (32, 0x4E13111CED6F735D, 0xB24DE0BF23E043DE),
    (33, 0xF7B9FAF20B3BCE63, 0xCDE2316CD87A899A),
    (63, 0x35F935E6044A08AD, 0x034B6DC1F68316D2),
    (64, 0xCD91DAEC2C21766F, 0xC289A92A157BBCB9),
    (100, 0xD61EA92C5AE13676, 0xE7BEE8D463101341),
    (127, 0x181CCDAFB569956C, 0xC916361BBF17EA39),
    (1000, 0xB260521730B6D8D9, 0xE1AF9A0F62226EF3),
    (1024, 0x36B9A9162057F968, 0xDB08E163DE147493),
]
TEXTS = [
    (b"", 0xEF46DB3751D8E999),
    (b"a", 0xD24EC4F1A98C6E5B),
    (b"abc", 0x44BC2CF5AD770999),
    (b"message digest", 0x066ED728FCEEB3BE),
    (b"abcdefghijklmnopqrstuvwxyz", 0xCFE1F278FA89835C),
    (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
]


@pytest.mark.parametrize(("size", "plain", "seeded"), KNOWN)
def test_known_sizes_give_known_sums(size: int, plain: int, seeded: int) -> None:
    assert _bytes.checksum(DATA[:size]) == plain
    assert _bytes.checksum(DATA[:size], SEED) == seeded


@pytest.mark.parametrize(("text", "expected"), TEXTS)
def test_known_texts_give_known_sums(text: bytes, expected: int) -> None:
    assert _bytes.checksum(text) == expected


@pytest.mark.parametrize("offset", range(1, 9))
def test_alignment_does_not_matter(offset: int) -> None:
    room = np.zeros(2000, np.uint8)
    room[offset : offset + 1024] = np.frombuffer(DATA, np.uint8)
    assert _bytes.checksum(room[offset : offset + 1024]) == 0x36B9A9162057F968


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_any_buffer_gives_the_sum_of_its_bytes(data: bytes, seed: int) -> None:
    expected = slow(data, seed)
    assert _bytes.checksum(data, seed) == expected
    assert _bytes.checksum(bytearray(data), seed) == expected
    assert _bytes.checksum(memoryview(data), seed) == expected


def test_a_long_buffer_is_summed_like_a_short_one() -> None:
    data = DATA * 40  # beyond the size at which the GIL is released
    assert _bytes.checksum(data) == slow(data, 0)


@pytest.mark.parametrize("bad", [1, "text", None, np.zeros((4, 4), np.uint8)[:, 1]])
def test_what_has_no_contiguous_bytes_is_refused(bad: object) -> None:
    with pytest.raises((TypeError, BufferError, ValueError)):
        _bytes.checksum(bad)


P = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
MASK = 2**64 - 1


def rotate(word: int, bits: int) -> int:
    word &= MASK
    return (word << bits | word >> (64 - bits)) & MASK


def turn(lane: int, word: int) -> int:
    return rotate(lane + word * P[1], 31) * P[0] & MASK


def slow(data: bytes, seed: int) -> int:
    """XXH64 in plain Python, from the description of the algorithm."""
    at, total = 0, seed + P[4]
    if len(data) >= 32:
        lanes = [seed + P[0] + P[1], seed + P[1], seed, seed - P[0]]
        while at + 32 <= len(data):
            for i in range(4):
                lanes[i] = turn(lanes[i], int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little"))
            at += 32
        total = sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            total = ((total ^ turn(0, lane)) * P[0] + P[3]) & MASK
    total += len(data)
    while at + 8 <= len(data):
        total = (rotate(total ^ turn(0, int.from_bytes(data[at : at + 8], "little")), 27) * P[0] + P[3]) & MASK
        at += 8
    if at + 4 <= len(data):
        total = (rotate(total ^ int.from_bytes(data[at : at + 4], "little") * P[0], 23) * P[1] + P[2]) & MASK
        at += 4
    for byte in data[at:]:
        total = rotate(total ^ byte * P[4], 11) * P[0] & MASK
    total &= MASK
    total = (total ^ total >> 33) * P[1] & MASK
    total = (total ^ total >> 29) * P[2] & MASK
    return total ^ total >> 32
