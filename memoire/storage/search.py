"""A search of log lines as a condition of SQLite's."""

from __future__ import annotations

from typing import Any, Final

from memoire.accounting.logbook import LineFilter
from memoire.errors import escape

from .records import INDEX_BITS

MAX_TEXT: Final = 4096
"""Characters of a text that is looked for: SQLite takes patterns of 50000 bytes, and a character may become twelve."""
_LAST_INDEX: Final = (1 << INDEX_BITS) - 1


def condition(run: int, wanted: LineFilter) -> tuple[str, list[Any]] | None:
    """Which lines of the run of this number are wanted, as a condition and its values; None where no line can be."""
    if len(wanted.text) > MAX_TEXT or not 0 <= (wanted.label or 0) < 1 << 32:
        return None
    low = max(0, wanted.after) + 1
    high = _LAST_INDEX if wanted.before is None else min(wanted.before - 1, _LAST_INDEX)
    where = ["id BETWEEN ? AND ?"]
    values: list[Any] = [run << INDEX_BITS | min(low, _LAST_INDEX), (run << INDEX_BITS) + max(-1, high)]
    for part, value in (
        ("client = ?", wanted.client),
        ("label = ?", wanted.label),
        ("received >= ?", wanted.since),
        ("received < ?", wanted.until),
        ("text LIKE ? ESCAPE '\\'", _pattern(escape(wanted.text)) if wanted.text else None),
    ):
        if value is not None:
            where.append(part)
            values.append(value)
    return " AND ".join(where), values


def _pattern(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"
