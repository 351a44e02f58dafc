"""The actors of a run: how many there are, how fast each one is, and where it is at home. Pure.

Also the newest returns of each one, and how they are spread over the actors.

What all servers have counted, kept also when a server is gone: totals that are exact and never go down. Pure.

client 7 at a, account opened in a's life 1     3 caches  ┐
a is killed, has forgotten everything, life 2             ├▶ 3 + 2 caches, the greater number of steps
client 7 at a, account opened in life 2         2 caches  ┘
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from memoire.accounting.account import Totals
from memoire.accounting.merge import Rows, by_client, key_of, merge, totals_of
from memoire.dashboard.settings import Settings
from memoire.wire.frames import name_hash
from memoire.wire.rows import ACCOUNT

from .answers import ActorLag, ActorRow, Actors, EpisodeRow
from .counters import WINDOW, NodeState
from .history import HistoryPoint

MAX_RUNS = 8
"""Runs whose ledgers are at hand; others are read from the history."""
NOTHING: Rows = np.empty(0, ACCOUNT)


class KeptRun:
    """The accounts of one run, as far as anybody ever said."""

    def __init__(self, rows: Rows = NOTHING) -> None:
        self.rows = merge(rows)
        """One for each account."""
        self.version = 0
        """Grows with each change."""
        self._totals: Totals | None = None  # of these rows

    def take(self, rows: Rows) -> None:
        """Add what a server says."""
        merged = merge(self.rows, rows)
        if merged.tobytes() != self.rows.tobytes():
            self.rows, self._totals = merged, None
            self.version += 1

    def totals(self) -> Totals:
        """Each client once, wherever it was at home."""
        if self._totals is None:
            self._totals = totals_of(self.rows)
        return self._totals

    def clients(self) -> Rows:
        """One row for each client (home and since 0)."""
        return by_client(self.rows)


class RunLedgers:
    """The ledgers of the newest runs that were asked for.

    Args:
        restore: The ledger of a run that was seen before: its rows, packed.
    """

    def __init__(self, restore: Callable[[str], bytes]) -> None:
        self._restore = restore
        self._kept: dict[str, KeptRun] = {}

    def of(self, run: str, counted: str) -> KeptRun:
        """The ledger of a run. That of the run that is counted now always stays."""
        if run not in self._kept:
            self._kept[run] = KeptRun(np.frombuffer(self._restore(run), ACCOUNT))
            while len(self._kept) > MAX_RUNS:
                del self._kept[next(name for name in self._kept if name not in (run, counted))]
        return self._kept[run]


def ids_of(rows: Rows) -> list[bytes]:
    """The client of each row."""
    return [key_of(row)[:16] for row in rows]


ACTORS_INTERVAL = 2.0
"""Seconds between two looks at the steps of each actor, for its rate."""
OUTDATED_AFTER = 75.0
"""Seconds after which an actor should have a model and have said so: a minute, and the time until it is read here."""
_MADE_OF = ("label", "flags", "returns_count", "returns_sum", "skipped")
_OF_ACTOR = sorted({each.name for each in fields(ActorRow)} & set(ACCOUNT.names or ()) - {"client", "home", "label"})
VERSION_SCALAR = "model_version"
"""What an actor that gets its actions from an inference node says in place of models: their version."""


RECENT_EPISODES = 20
"""Newest episodes of an actor whose mean return says how it plays now."""
RECENT_SECONDS = 600.0
"""An actor without an episode for so long is not counted among the others."""
QUANTILES = (10, 25, 50, 75, 90)


class RecentReturns:
    """What each actor's newest episodes returned."""

    def __init__(self) -> None:
        self._returns: dict[str, deque[float]] = {}  # of each actor
        self._ended: dict[str, float] = {}  # when its newest episode ended

    def add(self, episodes: Iterable[EpisodeRow]) -> None:
        """These episodes ended; of one actor the oldest first."""
        for row in episodes:
            if math.isfinite(row.returned):
                self._returns.setdefault(row.client, deque(maxlen=RECENT_EPISODES)).append(row.returned)
                self._ended[row.client] = max(row.time, self._ended.get(row.client, 0.0))

    def clear(self) -> None:
        """Another run is counted."""
        self._returns.clear()
        self._ended.clear()

    def mean_of(self, client: str) -> float | None:
        """Mean return of an actor's newest episodes; None where none has ended since somebody looks."""
        found = self._returns.get(client)
        return math.fsum(found) / len(found) if found else None

    def figures(self) -> dict[str, HistoryPoint]:
        """Quantiles over the actors of their mean returns, as the history keeps them: return_p10 to return_p90. None
        for a single actor.
        """
        newest = max(self._ended.values(), default=0.0)
        means = [
            math.fsum(returns) / len(returns)
            for client, returns in self._returns.items()
            if self._ended[client] >= newest - RECENT_SECONDS
        ]
        if len(means) < 2:
            return {}
        found = np.percentile(means, QUANTILES).tolist()
        return {
            f"return_p{part}": HistoryPoint(value, value, value) for part, value in zip(QUANTILES, found, strict=True)
        }


def acting_versions(facts: Mapping[str, Any], topics: Iterable[str]) -> dict[str, int]:
    """The versions, by topic, of the models that an actor acts with, as its home says.

    Args:
        topics: Of all models that there are.
    """
    models = {str(topic): int(version) for topic, version in (facts.get("models") or {}).items()}
    said, known = (facts.get("scalars") or {}).get(VERSION_SCALAR), list(topics)
    return models | (dict.fromkeys(known, int(said)) if said is not None and len(known) == 1 else {})


def behind(facts: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """(version, versions behind the newest) of the model that an actor acts with; of several topics the most behind.
    The newest one is that of the moment at which the actor said it: it may have followed since.
    """
    newest = facts.get("newest_models") or {}
    acting = acting_versions(facts, newest)
    known = [(newest[topic] - version, version) for topic, version in acting.items() if topic in newest]
    if not known:
        return max(acting.values(), default=None), None
    lag, version = max(known)
    return version, max(0, lag)


class NewestModels:
    """Which versions of models were the newest a while ago: by now every actor should have them."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, int]]] = deque()  # when, newest version of each topic

    def replaced(self, now: float, newest: Mapping[str, int]) -> dict[str, int]:
        """The versions that were the newest `OUTDATED_AFTER` seconds ago; of topics that are as new again or newer."""
        seen = self._seen
        if not seen or now >= seen[-1][0] + ACTORS_INTERVAL:
            seen.append((now, dict(newest)))
        while len(seen) > 1 and seen[1][0] <= now - OUTDATED_AFTER:
            seen.popleft()
        then, former = seen[0]
        is_old = then <= now - OUTDATED_AFTER
        return {topic: min(former[topic], newest[topic]) for topic in former.keys() & newest.keys()} if is_old else {}


class ActorList:
    """What is known of actors beside their accounts, which `KeptRun` has."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lost_after = max(settings.lost_after, settings.silent_after)
        self._facts: dict[str, dict[str, dict[str, Any]]] = {}  # url of a node, client in hex -> as this home says it
        self._homes: dict[int, str] = {}  # hash of its name in accounts -> name
        self._ring: deque[tuple[float, dict[bytes, int]]] = deque()  # when, steps of each actor
        self._names: dict[str, str] = {}  # client in hex -> what people call it; also of those that no home lists
        self._returns = RecentReturns()
        self._listed: tuple[tuple[int, int], list[ActorRow]] | None = None

    def name_home(self, name: str) -> None:
        """There is a server of this name: accounts have its hash alone."""
        self._homes[name_hash(name)] = name

    def take_facts(self, url: str, clients: Iterable[dict[str, Any]]) -> None:
        """What a server says of its clients, in place of what it said before."""
        self._facts[url] = facts = {row["client"]: row for row in clients}
        self._names |= {client: str(row["name"]) for client, row in facts.items() if row.get("name")}

    def forget(self, url: str) -> None:
        """A node is not there any more."""
        self._facts.pop(url, None)

    def clear(self) -> None:
        """Another run is counted."""
        self._ring.clear()
        self._names = {client: name for client, name in self._names.items() if self.facts_of(client)}
        self._returns.clear()
        self._listed = None  # ledgers of two runs may have the same version

    def take_episodes(self, ended: Iterable[EpisodeRow]) -> None:
        """These episodes of the run have ended since."""
        self._returns.add(ended)

    def return_quantiles(self) -> dict[str, HistoryPoint]:
        """How the newest returns are spread over the actors, for the history."""
        return self._returns.figures()

    def remember(self, now: float, kept: KeptRun) -> None:
        """How far each actor is, whether anybody looks or not: rates must not begin with the first who asks."""
        ring = self._ring
        if ring and now < ring[-1][0] + ACTORS_INTERVAL:
            return
        clients = kept.clients()
        ring.append((now, dict(zip(ids_of(clients), clients["steps"].tolist(), strict=True))))
        while len(ring) > 2 and ring[1][0] <= now - WINDOW:
            ring.popleft()

    def presence(self, kept: KeptRun, servers: Iterable[NodeState], now: float) -> Actors:
        """How many there are, by state."""
        rows, settings = kept.clients(), self._settings
        is_gone = rows["flags"] & 1 == 1
        is_heard = ~is_gone & (rows["last_seen"] >= now - settings.silent_after)
        is_lost = ~is_gone & (rows["last_seen"] < now - self._lost_after)
        gone, counted, lost = (int(each.sum()) for each in (is_gone, is_heard, is_lost))
        idle = sum(node.stats.get("guests", 0) for node in servers if node.is_up)
        active, expected = counted + idle, settings.expected_actors
        return Actors(
            active=active,
            silent=len(rows) - gone - counted - lost,
            lost=lost,
            gone=gone,
            expected=expected,
            missing=max(0, expected - active),
            idle=idle,
        )

    def rows(self, kept: KeptRun, now: float) -> list[ActorRow]:
        """Every actor with an account, as of `now`. Made once a second at most."""
        key = kept.version, int(now)
        if self._listed is None or self._listed[0] != key:
            self._listed = key, self._rows(kept, now)
        return self._listed[1]

    def _rows(self, kept: KeptRun, now: float) -> list[ActorRow]:
        clients = kept.clients()
        # Columns as lists: a hundred times quicker to read one by one than the rows of an array.
        columns = {name: clients[name].tolist() for name in (*_OF_ACTOR, *_MADE_OF)}
        ids = ids_of(clients)
        then, before = self._ring[0] if self._ring else (now, {})
        homes = self._newest_homes(kept)
        rows = []
        for place, client in enumerate(ids):
            facts = self.facts_of(client.hex())
            label, flags, count, total, skipped = (columns[name][place] for name in _MADE_OF)
            gained = columns["steps"][place] - before.get(client, 0) if now > then else 0
            version, lag = behind(facts)
            rows.append(
                ActorRow(
                    client=client.hex(),
                    name=self.name_of(client.hex()),
                    label=f"{label:08x}",
                    host=str(facts.get("host", "")),
                    table=str(facts.get("table", "")),
                    home=homes.get(client, ""),
                    state=self._state(flags, now - columns["last_seen"][place]),
                    steps_per_second=gained / max(now - then, 1e-9),
                    return_mean=total / count if count else None,
                    return_recent=self._returns.mean_of(client.hex()),
                    skipped_caches=skipped,
                    model_version=version,
                    model_lag=lag,
                    **{name: columns[name][place] for name in _OF_ACTOR},
                )
            )
        return rows

    def _state(self, flags: int, silence: float) -> str:
        if flags & 1:
            return "gone"
        if silence <= self._settings.silent_after:
            return "active"
        return "silent" if silence <= self._lost_after else "lost"

    def outdated(self, kept: KeptRun, versions: Mapping[str, int], now: float) -> int:
        """How many active actors say that they use an older model than these.

        Args:
            versions: Of each topic, one that every actor should have by now.
        """
        said = (acting_versions(facts, versions) for facts in self._active_facts(kept, now))
        return sum(any(models.get(topic, version) < version for topic, version in versions.items()) for models in said)

    def lag(self, kept: KeptRun, now: float) -> ActorLag | None:
        """How far the active actors are behind the newest models; None if none of them says."""
        known = [lag for facts in self._active_facts(kept, now) if (lag := behind(facts)[1]) is not None]
        return ActorLag(len(known), sum(known) / len(known), max(known)) if known else None

    def _active_facts(self, kept: KeptRun, now: float) -> list[dict[str, Any]]:
        rows = kept.clients()
        is_active = (rows["flags"] & 1 == 0) & (rows["last_seen"] >= now - self._settings.silent_after)
        return [self.facts_of(client.hex()) for client in ids_of(rows[is_active])]

    def name_of(self, client: str) -> str:
        """What people call an actor; "" if nobody gave it a name."""
        return self._names.get(client, "")

    def _newest_homes(self, kept: KeptRun) -> dict[bytes, str]:
        rows = kept.rows[np.argsort(kept.rows["last_seen"], kind="stable")]
        names = (self._homes.get(home, "") for home in rows["home"].tolist())
        return dict(zip(ids_of(rows), names, strict=True))

    def homes_of(self, kept: KeptRun, client: bytes) -> list[dict[str, Any]]:
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
