"""Log lines of all servers as one list, newest first, a page at a time. Pure: whoever asks the servers is passed in.

Each server numbers its lines. A cursor is where every server's lines were left off, "12@server-0,7@server-1": with
direction "older" the lines before it, with "newer" those after it, which may not have been written yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal
from urllib.parse import quote, unquote, urlencode

from memoire.errors import ParameterError

from .answers import LogPage, LogRow
from .nodes import NodeError

CURSOR = r"([0-9]{1,15}@[A-Za-z0-9_.~%-]{1,800}(,[0-9]{1,15}@[A-Za-z0-9_.~%-]{1,800})*)?"

Direction = Literal["older", "newer"]
AskServers = Callable[[dict[str, str]], dict[str, Any]]


def read_cursor(text: str) -> dict[str, int]:
    """What `LogPage.older` and `newer` say.

    Raises:
        ParameterError: it is none of them.
    """
    if not re.fullmatch(CURSOR, text):
        raise ParameterError("cursor", text[:80], "as a page of lines gave it, in `older` or `newer`")
    pairs = (part.split("@") for part in text.split(",") if part)
    return {unquote(name): int(index) for index, name in pairs}


def write_cursor(places: Mapping[str, int]) -> str:
    """What `read_cursor` reads."""
    return ",".join(f"{index}@{quote(name, safe='')}" for name, index in sorted(places.items()))


def search(
    ask: AskServers,
    servers: list[str],
    wanted: Mapping[str, str],
    cursor: Mapping[str, int],
    direction: Direction,
    most: int,
) -> LogPage:
    """A page of lines.

    Raises:
        ParameterError: the servers do not take what is wanted; says why.

    Args:
        wanted: text, client, label, since, until, run: as the servers' /logs takes them, which search themselves.
        cursor: Where a page before left off; a server that is not in it begins at its newest line (older), or at its
            oldest one (newer).
    """
    edge = {"older": "before", "newer": "after"}[direction]
    asked = {name: dict(wanted) | {"most": str(most)} for name in servers}
    for name, query in asked.items():
        if name in cursor:
            query[edge] = str(max(0, cursor[name]))
        if direction == "older":
            query["newest"] = "1"
    answers = ask({name: f"/logs?{urlencode(query)}" for name, query in asked.items()})
    found: dict[str, list[LogRow]] = {}
    missing, more = [], False
    for name, told in answers.items():
        if isinstance(told, NodeError):
            if told.status == 400 and "run" not in wanted:
                raise ParameterError("logs", dict(wanted), told.text)
            if told.status != 400:  # else it has never heard of this run, and has no line of it
                missing.append(name)
            continue
        found[name] = [LogRow(server=name, **row) for row in told["rows"]]
        more = more or not told["is_all"]
    rows = _together(found.values(), direction)
    more, rows = more or len(rows) > most, rows[:most]
    older, newer = (write_cursor(dict(cursor) | edge) for edge in _edges(found, rows, cursor, direction))
    rows.sort(key=_place, reverse=True)  # a page shows the newest first, however it was found
    return LogPage(rows, older, newer, more, missing)


def _together(found: Iterable[list[LogRow]], direction: Direction) -> list[LogRow]:
    """All in the order of their times, yet each server's in the order of their numbers, also where its clock was set
    back: a page that ends in between leaves none out.
    """
    placed: list[tuple[tuple[float, str, int], LogRow]] = []
    for each in found:
        sign, latest = -1 if direction == "older" else 1, float("-inf")
        for number, row in enumerate(each):
            latest = max(latest, sign * row.received)
            placed.append(((latest, row.server, number), row))
    return [row for _, row in sorted(placed, key=lambda pair: pair[0])]


def _place(row: LogRow) -> tuple[float, str, int]:
    return row.received, row.server, row.index


def _edges(
    found: Mapping[str, list[LogRow]], rows: list[LogRow], cursor: Mapping[str, int], direction: Direction
) -> tuple[dict[str, int], dict[str, int]]:
    """Where to go on, in both directions: a server whose lines did not get onto the page goes on where it was."""
    older, newer = {}, {}
    for name, came in found.items():
        shown = [row.index for row in rows if row.server == name]
        seen = [row.index for row in came]
        if direction == "older":
            older[name] = min(shown, default=max(seen, default=-1) + 1)
            newer[name] = max(seen, default=max(0, cursor.get(name, 1) - 1))
        else:
            older[name] = min(shown, default=cursor.get(name, 0) + 1)
            newer[name] = max(shown, default=cursor.get(name, 0))
    return older, newer
