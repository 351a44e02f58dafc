"""Sizes in bytes as people write them: 1GiB, 500MB, 64Ki, 4096. Every option, setting and file takes them alike."""

from __future__ import annotations

import argparse
import re

EXPECTED = "a size in bytes, such as 1GiB, 500MB or 4096"
_PREFIXES: dict[str, int] = {"": 1, **{letter: 1000**power for power, letter in enumerate("kmgt", 1)}}
_PREFIXES |= {f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)}
_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))?(?:e\+?([0-9]{1,2}))? ?([kmgt]?i?)b?", re.IGNORECASE)


class NotASize(argparse.ArgumentTypeError, ValueError):
    """A text is no size."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{EXPECTED}, got {text!r}")
        self.expected = EXPECTED


def size(text: str) -> int:
    """Bytes of a size: Ki, Mi, Gi and Ti are powers of 1024, k, M, G and T of 1000; "B" may follow either.

    Raises:
        NotASize: it is none, or no whole number of bytes.
    """
    found = _SIZE.fullmatch(text.strip())
    factor = _PREFIXES.get(found[4].lower()) if found else None
    if found is None or factor is None:
        raise NotASize(text)
    whole, part, power = found[1], found[2] or "", int(found[3] or 0)
    bytes_, rest = divmod(int(whole + part) * factor * int(10**power), int(10 ** len(part)))
    if rest and factor == 1:
        raise NotASize(text)
    return bytes_
