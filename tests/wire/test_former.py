"""A peer of the former protocol is told why it is refused, in its own bytes: tests/vectors/former."""

from pathlib import Path

import pytest

from memoire.wire import former
from memoire.wire.frames import parse, refusal, reply
from memoire.wire.messages import VERSION, Refused
from wirekit import SEED, SUMMED, golden

FORMER = Path(__file__).parents[1] / "vectors" / "former"
"""hello.0 and refused.0 were made by protocol 1."""
NO = Refused(code="too_large", text="too large", field="payload", limit=1024, versions=[1])

# Made with xxhash 3.5 from PyPI over `SUMMED`; sizes around each step of the algorithm.
KNOWN = [
    (0, 0xEF46DB3751D8E999, 0x0B303D920EC349DF),
    (1, 0xE934A84ADB052768, 0x9C6678669FCD2E6D),
    (4, 0x91B65BBE720C34CF, 0x42F4226722325F62),
    (7, 0xE2400CDEA02EE3C5, 0xC93D837E41587387),
    (8, 0x521FD2878EA69D17, 0x9E8B49BD0E2E03D5),
    (15, 0x4EE77AB371D06E31, 0x7E276596CCE98CE7),
    (31, 0xB74BAA9042B94DEE, 0x51C3FE9BC8A77309),
    (32, 0x4E13111CED6F735D, 0xB24DE0BF23E043DE),
    (33, 0xF7B9FAF20B3BCE63, 0xCDE2316CD87A899A),
    (127, 0x181CCDAFB569956C, 0xC916361BBF17EA39),
    (1024, 0x36B9A9162057F968, 0xDB08E163DE147493),
]


@pytest.mark.parametrize(("size", "plain", "seeded"), KNOWN)
def test_the_former_checksum_is_that_of_known_vectors(size: int, plain: int, seeded: int) -> None:
    assert (former.xxh64(SUMMED[:size]), former.xxh64(SUMMED[:size], SEED)) == (plain, seeded)


def test_a_message_in_the_former_version_is_what_the_former_version_wrote() -> None:
    header = parse(golden("refused")).header
    (frame,) = reply(header, NO)
    assert former.in_former_version(frame) == (FORMER / "refused.0").read_bytes()


def test_a_refusal_is_told_in_the_version_of_what_is_refused() -> None:
    asked = (FORMER / "hello.0").read_bytes()
    (answer,) = refusal([asked], NO)
    assert answer[:6] == b"MEMR\x01\x00" and answer[16:56] == asked[16:56], "for the same client, run, home, number"
    assert former.xxh64(answer[96:], former.xxh64(answer[:88])).to_bytes(8, "little") == answer[88:96]
    for version in (VERSION, VERSION + 1):  # a newer node reads that the versions differ, and no more
        (answer,) = refusal([asked[:4] + version.to_bytes(2, "little") + asked[6:]], NO)
        assert parse([answer]).body == NO


@pytest.mark.parametrize("frames", [[], [b"MEMR"], [b"x" * 200]])
def test_nobody_is_told_of_what_does_not_say_who_it_is_from(frames: list[bytes]) -> None:
    assert refusal(frames, NO) is None
