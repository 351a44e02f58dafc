"""The actors of a run: how many there are, how fast each one is, and where it is at home. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from memoire.dashboard.settings import Settings
from memoire.wire.identity import name_hash
from memoire.wire.rows import ACCOUNT

from .answers import ActorRow, Actors
from .ledgers import Kept, ids_of
from .node_state import NodeState
from .rates import WINDOW

ACTORS_INTERVAL = 2.0
"""Seconds between two looks at the steps of each actor, for its rate."""
_OF_ACTOR = (
    "first_seen", "last_seen", "episodes", "steps", "generated_bytes", "pushed_caches", "accepted_caches",
    "rejected_caches", "lost_caches", "received_bytes", "dropped_lines",
)  # fmt: skip
_MADE_OF = ("label", "flags", "returns_count", "returns_sum", "skipped")


class ActorList:
    """What is known of actors beside their accounts, which `Kept` has."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._facts: dict[str, dict[str, dict[str, Any]]] = {}  # url of a node, client in hex -> as this home says it
        self._homes: dict[int, str] = {}  # hash of its name in accounts -> name
        self._ring: deque[tuple[float, dict[bytes, int]]] = deque()  # when, steps of each actor
        self._listed: tuple[tuple[int, int], list[ActorRow]] | None = None

    def name_home(self, name: str) -> None:
        """There is a server of this name: accounts have its hash alone."""
        self._homes[name_hash(name)] = name

    def take_facts(self, url: str, clients: Iterable[dict[str, Any]]) -> None:
        """What a server says of its clients, in place of what it said before."""
        self._facts[url] = {row["client"]: row for row in clients}

    def forget(self, url: str) -> None:
        """A node is not there any more."""
        self._facts.pop(url, None)

    def clear(self) -> None:
        """Another run is counted."""
        self._ring.clear()
        self._listed = None  # ledgers of two runs may have the same version

    def remember(self, now: float, kept: Kept) -> None:
        """How far each actor is, whether anybody looks or not: rates must not begin with the first who asks."""
        ring = self._ring
        if ring and now < ring[-1][0] + ACTORS_INTERVAL:
            return
        clients = kept.clients()
        ring.append((now, dict(zip(ids_of(clients), clients["steps"].tolist(), strict=True))))
        while len(ring) > 2 and ring[1][0] <= now - WINDOW:
            ring.popleft()

    def presence(self, kept: Kept, servers: Iterable[NodeState], now: float) -> Actors:
        """How many there are, by state."""
        rows = kept.clients()
        gone = int((rows["flags"] & 1).sum())
        heard = rows["last_seen"] >= now - self._settings.silent_after
        counted = int((heard & (rows["flags"] & 1 == 0)).sum())
        idle = sum(node.stats.get("guests", 0) for node in servers if node.is_up)
        active, expected = counted + idle, self._settings.expected_actors
        return Actors(active, len(rows) - gone - counted, gone, expected, max(0, expected - active), idle)

    def rows(self, kept: Kept, now: float) -> list[ActorRow]:
        """Every actor with an account, as of `now`. Made once a second at most."""
        key = kept.version, int(now)
        if self._listed is None or self._listed[0] != key:
            self._listed = key, self._rows(kept, now)
        return self._listed[1]

    def _rows(self, kept: Kept, now: float) -> list[ActorRow]:
        clients = kept.clients()
        # Columns as lists: a hundred times quicker to read one by one than the rows of an array.
        columns = {name: clients[name].tolist() for name in (*_OF_ACTOR, *_MADE_OF)}
        ids = ids_of(clients)
        then, before = self._ring[0] if self._ring else (now, {})
        homes, heard = self._newest_homes(kept), now - self._settings.silent_after
        rows = []
        for place, client in enumerate(ids):
            facts = self.facts_of(client.hex())
            label, flags, count, total, skipped = (columns[name][place] for name in _MADE_OF)
            gained = columns["steps"][place] - before.get(client, 0) if now > then else 0
            is_heard = columns["last_seen"][place] >= heard
            rows.append(
                ActorRow(
                    client=client.hex(),
                    label=f"{label:08x}",
                    host=str(facts.get("host", "")),
                    table=str(facts.get("table", "")),
                    home=homes.get(client, ""),
                    state="gone" if flags & 1 else "active" if is_heard else "silent",
                    steps_per_second=gained / max(now - then, 1e-9),
                    return_mean=total / count if count else None,
                    skipped_caches=skipped,
                    **{name: columns[name][place] for name in _OF_ACTOR},
                )
            )
        return rows

    def _newest_homes(self, kept: Kept) -> dict[bytes, str]:
        rows = kept.rows[np.argsort(kept.rows["last_seen"], kind="stable")]
        names = (self._homes.get(home, "") for home in rows["home"].tolist())
        return dict(zip(ids_of(rows), names, strict=True))

    def homes_of(self, kept: Kept, client: bytes) -> list[dict[str, Any]]:
        """The accounts of one actor, one for each home."""
        rows = kept.rows
        mine = rows[(rows["client"] == np.frombuffer(client, "<u8")).all(axis=1)]
        names = [name for name in ACCOUNT.names or () if name != "client"]
        return [
            {name: row[name].item() for name in names}
            | {"home": self._homes.get(int(row["home"]), f"former life {int(row['home']):016x}")}
            for row in mine
        ]

    def facts_of(self, client: str) -> dict[str, Any]:
        """What its newest home says of an actor beside its account."""
        found = [rows[client] for rows in self._facts.values() if client in rows]
        return max(found, key=lambda row: float(row["last_seen"]), default={})
