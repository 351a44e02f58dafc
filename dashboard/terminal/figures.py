"""Figures for people at a terminal: the same words, units and digits as in the pages (`static/format.js`). Pure."""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Decimal

NONE = "-"
"""What is not known: never a zero."""
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_BRIEF = ("", "K", "M", "B", "T")


def count(value: float | None) -> str:
    """1,234,567."""
    return NONE if value is None else f"{_rounded(value):,}"


def figure(value: float | None) -> str:
    """3.14, 5,123 or 1.23M."""
    if value is None or not math.isfinite(value):
        return NONE
    size = abs(value)
    if size != 0.0 and size < 1e-3:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits}e{int(power)}"
    if size >= 10_000.0:
        return _brief(value)
    return _exact(value) if size < 100.0 else count(value)


def bytes_of(value: float | None) -> str:
    """1.23 MB, 12.3 MB, 123 MB."""
    if value is None:
        return NONE
    unit = 0
    while abs(value) >= 1000.0 and unit < len(_BYTES) - 1:
        value /= 1000.0
        unit += 1
    digits = max(0, 2 - int(math.log10(max(1.0, abs(value))))) if unit else 0
    return f"{_fixed(value, digits)} {_BYTES[unit]}"


def share(value: float | None) -> str:
    """93 %."""
    return NONE if value is None else f"{_exact(_rounded(value * 1000.0) / 10.0)} %"


def duration(seconds: float | None) -> str:
    """340 ms, 12 s, 4 min, 3.1 h, 2.4 days."""
    if seconds is None:
        return NONE
    if seconds < 1.0:
        return f"{_exact(_rounded(seconds * 10_000.0) / 10.0)} ms"
    if seconds < 90.0:
        return f"{_fixed(seconds, 1)} s" if seconds < 10.0 else f"{_rounded(seconds)} s"
    if seconds < 5400.0:
        return f"{_exact(_rounded(seconds / 6.0) / 10.0) if seconds < 600.0 else _rounded(seconds / 60.0)} min"
    return f"{_fixed(seconds / 3600.0, 1)} h" if seconds < 172_800.0 else f"{_fixed(seconds / 86_400.0, 1)} days"


def ago(time: float, now: float) -> str:
    """12 s ago, or "just now"."""
    return "just now" if now - time < 1.0 else f"{duration(now - time)} ago"


def _rounded(value: float) -> int:
    return math.floor(value + 0.5)


def _fixed(value: float, digits: int) -> str:
    """So many digits behind the point, halves away from zero."""
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def _exact(value: float) -> str:
    """Three digits that count, halves away from zero, without zeros behind them."""
    whole = Decimal(value)
    digits = whole.quantize(Decimal(1).scaleb(whole.adjusted() - 2), ROUND_HALF_UP) if whole else whole
    return f"{digits.normalize():,f}"


def _brief(value: float) -> str:
    unit = 0
    while abs(value) >= 999.5 and unit < len(_BRIEF) - 1:
        value /= 1000.0
        unit += 1
    return f"{_exact(value)}{_BRIEF[unit]}"
