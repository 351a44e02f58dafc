"""The checksum is XXH3, and frames are packed while that brings samples sooner."""

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
TEXTS = [
    (b"", 0x2D06800538D394C2),
    (b"a", 0xE6C632B61E964E1F),
    (b"abc", 0x78AF5F94892F3950),
    (b"message digest", 0x160D8E9329BE94F9),
    (b"abcdefghijklmnopqrstuvwxyz", 0x810F9CA067FBB90C),
    (b"Nobody inspects the spammish repetition", 0x6CB00603B5CC47E9),
]


@pytest.mark.parametrize(("size", "plain", "seeded"), KNOWN)
def test_known_sizes_give_known_sums(size: int, plain: int, seeded: int) -> None:
    assert _bytes.checksum(SUMMED[:size]) == plain
    assert _bytes.checksum(SUMMED[:size], SEED) == seeded


@pytest.mark.parametrize(("text", "expected"), TEXTS)
def test_known_texts_give_known_sums(text: bytes, expected: int) -> None:
    assert _bytes.checksum(text) == expected


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1))
def test_any_buffer_gives_the_sum_of_its_bytes(data: bytes, seed: int) -> None:
    expected = slow(data, seed)
    assert _bytes.checksum(data, seed) == expected
    assert _bytes.checksum(bytearray(data), seed) == expected
    assert _bytes.checksum(memoryview(data), seed) == expected


@pytest.mark.parametrize("size", [*range(0, 1100, 37), 1024, 1025, 2048, 4097])
def test_every_way_of_this_processor_gives_the_same(size: int) -> None:
    data = (SUMMED * 3)[:size]
    found = _bytes.checksums(data, SEED)
    assert len(found) >= 1
    assert set(found) == {slow(data, SEED)}


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


WORD = 2**64 - 1
P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
MIX = (0x165667919E3779F9, 0x9FB21C651E98DF25)
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def read(data: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(data[at : at + size], "little")


def rotate(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & WORD


def fold(left: int, right: int) -> int:
    product = (left & WORD) * (right & WORD)
    return product & WORD ^ product >> 64


def avalanche(total: int) -> int:
    total &= WORD
    total = (total ^ total >> 37) * MIX[0] & WORD
    return total ^ total >> 32


def strong_avalanche(total: int) -> int:
    total &= WORD
    total = (total ^ total >> 33) * P64[1] & WORD
    total = (total ^ total >> 29) * P64[2] & WORD
    return total ^ total >> 32


def swapped(word: int) -> int:
    return int.from_bytes(word.to_bytes(8, "little"), "big")


def slow(data: bytes, seed: int) -> int:
    """XXH3 in plain Python, from the description of the algorithm."""
    if len(data) <= 16:
        return slow_to_16(data, seed)
    return slow_to_240(data, seed) if len(data) <= 240 else slow_long(data, seed)


def slow_to_16(data: bytes, seed: int) -> int:
    size = len(data)
    if size > 8:
        low = read(data, 0) ^ ((read(SECRET, 24) ^ read(SECRET, 32)) + seed & WORD)
        high = read(data, size - 8) ^ ((read(SECRET, 40) ^ read(SECRET, 48)) - seed & WORD)
        return avalanche(size + swapped(low) + high + fold(low, high))
    if size >= 4:
        seed ^= swapped(seed & 0xFFFFFFFF)
        word = (read(data, 0, 4) << 32) + read(data, size - 4, 4)
        word ^= (read(SECRET, 8) ^ read(SECRET, 16)) - seed & WORD
        word = (word ^ rotate(word, 49) ^ rotate(word, 24)) * MIX[1] & WORD
        word = (word ^ (word >> 35) + size) * MIX[1] & WORD
        return word ^ word >> 28
    if size:
        word = data[0] << 16 | data[size // 2] << 24 | data[-1] | size << 8
        return strong_avalanche(word ^ (read(SECRET, 0, 4) ^ read(SECRET, 4, 4)) + seed)
    return strong_avalanche(seed ^ read(SECRET, 56) ^ read(SECRET, 64))


def slow_to_240(data: bytes, seed: int) -> int:
    def mix(at: int, key: int) -> int:
        return fold(
            read(data, at) ^ (read(SECRET, key) + seed & WORD),
            read(data, at + 8) ^ (read(SECRET, key + 8) - seed & WORD),
        )

    size, total = len(data), len(data) * P64[0]
    if size <= 128:
        for pair in range((size - 1) // 32 + 1):
            total += mix(16 * pair, 32 * pair) + mix(size - 16 * pair - 16, 32 * pair + 16)
        return avalanche(total)
    total = avalanche(total + sum(mix(16 * piece, 16 * piece) for piece in range(8)))
    total += sum(mix(16 * piece, 16 * (piece - 8) + 3) for piece in range(8, size // 16))
    return avalanche(total + mix(size - 16, 119))


def slow_long(data: bytes, seed: int) -> int:
    parts = ((read(SECRET, at) + (-seed if at % 16 else seed)) & WORD for at in range(0, 192, 8))
    secret = b"".join(part.to_bytes(8, "little") for part in parts)
    sums = [P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]]

    def take(at: int, key: int) -> None:
        for lane in range(8):
            word = read(data, at + 8 * lane)
            keyed = word ^ read(secret, key + 8 * lane)
            sums[lane ^ 1] = (sums[lane ^ 1] + word) & WORD
            sums[lane] = (sums[lane] + (keyed & 0xFFFFFFFF) * (keyed >> 32)) & WORD

    for stripe in range((len(data) - 1) // 64):
        take(64 * stripe, stripe % 16 * 8)
        if stripe % 16 == 15:
            sums[:] = [
                (one ^ one >> 47 ^ read(secret, 128 + 8 * lane)) * P32[0] & WORD for lane, one in enumerate(sums)
            ]
    take(len(data) - 64, 121)
    pairs = (fold(sums[i] ^ read(secret, 11 + 8 * i), sums[i + 1] ^ read(secret, 19 + 8 * i)) for i in range(0, 8, 2))
    return avalanche(len(data) * P64[0] + sum(pairs))


# --- Frames are packed while that brings samples sooner to whoever waits, and only then

SAMPLES = 32


def send(choice, messages, *, link, pack=0.0, ratio=1.0):
    """Messages of a caller that waits for the link alone: seconds for a plain message, to pack one, and what is left."""
    packed = 0
    for _ in range(messages):
        packed += choice.packs
        if choice.packs:
            choice.spend(pack)
        waited = link * (ratio if choice.packs else 1.0)
        choice.spend(waited, waited)
        choice.carried(SAMPLES)
    return packed


def test_a_caller_that_never_waits_sends_plain_and_tries_nothing():
    choice = CompressionChoice()
    for _ in range(3 * WHILE):
        choice.spend(0.01)
        choice.carried(SAMPLES)
        assert not choice.packs


def test_a_link_that_becomes_slow_later_is_noticed_at_once():
    choice = CompressionChoice()
    for _ in range(3 * WHILE + 1):
        choice.spend(0.01)
        choice.carried(SAMPLES)
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
