"""Checksums by XXH3, and the choice to pack frames while packing delivers samples sooner."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.wire import _bytes
from memoire.wire.compression import TRIAL, WHILE, CompressionChoice
from wirekit import SEED, SUMMED

# --- The checksum is XXH3: known vectors hold, whatever the size, alignment and seed

# Made with xxhash 3.5 from PyPI over `SUMMED`; sizes around each step of the algorithm.
KNOWN = [
    (0, 0x2D06800538D394C2, 0xA8A6B918B2F0364A),
    (1, 0xC44BDFF4074EECDB, 0x032BE332DD766EF8),
    (3, 0xA1C4A8259B827291, 0xA98592DB68BD3408),
    (4, 0xBB4E3D89EE0B271D, 0xF72C63BF41E6849C),
    (7, 0xE8317720FF435ECE, 0xCB975EEAB0923603),
    (8, 0x79D02238B80E37B1, 0x452FF06A9B57B746),
    (9, 0xF64CECC4271FF461, 0x438304A991C0A62D),
    (16, 0x222E9AEAD6BDDD51, 0x737586751578FE8B),
    (17, 0x47AAD6B375EB4BBA, 0x0890D4C8B8FDEB95),
    (32, 0x774140158F21FF0A, 0x46E9DECB5CE100C0),
    (33, 0x537E7ED26D825E92, 0xCD505D269C51EB9D),
    (64, 0x70A70E66815E67E5, 0x2E2E2E2677490CD6),
    (65, 0x4B4CE7050EEB9559, 0xE33C22243840E6E5),
    (96, 0xA97F9AE93C0FF67A, 0x25EDC712D261A2DE),
    (97, 0x0DD88DB1BBAF7326, 0x53E270ADEE809A91),
    (128, 0x421A9C905C6E66BA, 0xB996798C9DA01F8B),
    (129, 0x9E2414800F83768A, 0x8E721C8F1EF25A4C),
    (144, 0xB851AACCA23EC7B6, 0xC0B252307B1AF896),
    (240, 0xB714C5FD22744964, 0x31693188DF3C6A2C),
    (241, 0xBC424A2C480DD281, 0xA8EB3585F433FBFF),
    (256, 0x2D040B1AB40F0D78, 0xC4FC297F514DCC0B),
    (1024, 0x1FD15E7D36F5E1BC, 0x92EB2E32C50902BF),
    (1025, 0xFE08E5A874D23FD2, 0x5E07F3F1E7A8D2A7),
    (2048, 0x81EC4A6A9EE23D55, 0xD6F82E0309E48B9E),
    (2049, 0x9156A1FD2D1A8C37, 0x020C5ECC34EC63B6),
]
SUMS_OF_SUMS = [(0, 0x117152434CBD257D), (SEED, 0x4B8F34D9B23AD5D7)]
"""Checksum of the checksums of all pieces shorter than `SUMMED`, by seed.

A model in plain Python, written from the description of the algorithm, computed these values.
"""


@pytest.mark.parametrize(("size", "plain", "seeded"), KNOWN)
def test_known_sizes_give_known_sums(size: int, plain: int, seeded: int) -> None:
    assert _bytes.checksum(SUMMED[:size]) == plain
    assert _bytes.checksum(SUMMED[:size], SEED) == seeded


@pytest.mark.parametrize(("seed", "expected"), SUMS_OF_SUMS)
def test_each_size_gives_the_sum_that_the_description_of_the_algorithm_gives(seed: int, expected: int) -> None:
    data = SUMMED * 2
    sums = (_bytes.checksum(data[size : 2 * size], seed) for size in range(len(SUMMED)))
    assert _bytes.checksum(b"".join(each.to_bytes(8, "little") for each in sums)) == expected


@given(st.binary(max_size=3000), st.integers(0, 2**64 - 1))
def test_any_buffer_gives_the_sum_of_its_bytes_by_every_way_of_this_processor(data: bytes, seed: int) -> None:
    ways = _bytes.checksums(data, seed)
    buffers = [_bytes.checksum(kind(data), seed) for kind in (bytes, bytearray, memoryview)]
    assert len(ways) >= 1 and len({*ways, *buffers}) == 1


@pytest.mark.parametrize("size", [0, 17, 241, 1024, 1025, 2111, 1 << 17, (1 << 17) + 63, (1 << 17) + 1087])
@pytest.mark.parametrize("skip", [0, 1])
def test_each_way_copies_what_it_sums_up(size: int, skip: int) -> None:
    data = (SUMMED * (1 + (size + skip) // len(SUMMED)))[skip : skip + size]
    for total, copy in _bytes.copies(data):
        assert total == _bytes.checksum(data)
        assert copy == data


@pytest.mark.parametrize("bad", [1, "text", None, np.zeros((4, 4), np.uint8)[:, 1]])
def test_what_has_no_contiguous_bytes_is_refused(bad: object) -> None:
    with pytest.raises((TypeError, BufferError, ValueError)):
        _bytes.checksum(bad)


# --- Frames are packed only while packing delivers samples sooner to a waiting caller

SAMPLES = 32


def send(choice, messages, *, link, pack=0.0, ratio=1.0):
    """Send messages for a caller that waits for the link alone, and return the number of packed messages.

    `link` is the time of a plain message and `pack` the time to pack one, in seconds; `ratio` is the part that is left.
    """
    packed = 0
    for _ in range(messages):
        packed += choice.packs
        if choice.packs:
            choice.record_time(pack)
        waited = link * (ratio if choice.packs else 1.0)
        choice.record_time(waited, waited)
        choice.record_sent(SAMPLES)
    return packed


def test_a_caller_that_never_waits_sends_plain_and_tries_nothing():
    choice = CompressionChoice()
    for _ in range(3 * WHILE):
        choice.record_time(0.01)
        choice.record_sent(SAMPLES)
        assert not choice.packs


def test_a_link_that_becomes_slow_later_is_noticed_at_once():
    choice = CompressionChoice()
    for _ in range(3 * WHILE + 1):
        choice.record_time(0.01)
        choice.record_sent(SAMPLES)
    send(choice, 2 * TRIAL, link=1.0)
    assert choice.packs


@pytest.mark.parametrize(("pack", "ratio"), [(0.95, 0.1), (0.0, 1.0), (0.05, 0.9)])
def test_what_gains_too_little_stays_plain_until_the_next_trial(pack, ratio):
    choice = CompressionChoice()
    packed = send(choice, 3 * TRIAL + WHILE, link=1.0, pack=pack, ratio=ratio)
    assert packed == 2 * TRIAL and not choice.packs
    assert send(choice, 3 * TRIAL, link=1.0, pack=pack, ratio=ratio) == 2 * TRIAL, "it is tried again"


def test_a_link_that_becomes_fast_is_found_by_the_next_trial():
    choice = CompressionChoice()
    send(choice, 3 * TRIAL, link=1.0, pack=0.05, ratio=0.1)
    assert choice.packs
    send(choice, WHILE + TRIAL, link=0.0001, pack=0.05, ratio=0.1)
    assert not choice.packs
    send(choice, 5 * TRIAL, link=0.0001, pack=0.05, ratio=0.1)
    assert not choice.packs
