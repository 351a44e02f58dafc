"""Faults to plant: each replaces a piece of the product by a wrong one, in the process that it is named for.

The environment variable HISTORY_PLANT names one; only the wrappers in this folder read it. A check that has never
failed proves nothing: each of these must make one fail.
"""

import os
from collections.abc import Callable
from typing import Any

VARIABLE = "HISTORY_PLANT"
PLANTS: dict[str, Callable[[], None]] = {}


def plant() -> None:
    """Plant what the environment names; nothing by default."""
    name = os.environ.get(VARIABLE, "")
    if name:
        PLANTS[name]()


def planted(function: Callable[[], None]) -> Callable[[], None]:
    PLANTS[function.__name__] = function
    return function


@planted
def increments() -> None:
    """Clients report what is new since their last message, and servers add it up: a message that is sent again is
    counted again."""
    import msgspec

    from memoire.client import Client
    from memoire.ledger import Ledger

    body_of, report = Client._update_body, Ledger.report

    def new_since(self: Any, *sums: Any) -> Any:
        body = body_of(self, *sums)
        before = getattr(self, "_reported", (0, 0))
        self._reported = (body.episodes, body.steps)
        return msgspec.structs.replace(body, episodes=body.episodes - before[0], steps=body.steps - before[1])

    def add(self: Any, client: bytes, sequence: int, update: Any, now: float) -> Any:
        old = self.account(client, now).report
        added = msgspec.structs.replace(update, episodes=old.episodes + update.episodes, steps=old.steps + update.steps)
        return report(self, client, sequence, added, now)

    Client._update_body, Ledger.report = new_since, add  # type: ignore[method-assign]


@planted
def unnumbered_lines() -> None:
    """Servers take every line that comes, also one that they have."""
    from memoire.logbook import Entry, Logbook

    def take(self: Any, client: bytes, lines: Any, now: float) -> list[Entry]:
        taken = []
        for line in lines:
            self.count += 1
            taken.append(Entry(self.count, client, now, line))
            self._through[client] = max(self._through.get(client, 0), line.number)
        self._recent.extend(taken)
        return taken

    Logbook.take = take  # type: ignore[method-assign]
