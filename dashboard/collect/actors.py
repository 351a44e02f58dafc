"""Actor list and account ledgers of a run. Pure: no clock, no network.

The list has the state, step rate, home server and newest returns of each actor. A ledger keeps the accounts of all
servers, also after a server is gone. The ledger's totals are exact and never decrease.

client 7 at a, account opened in a's life 1     3 caches  ┐
a is killed and loses its counts, life 2                  ├▶ 3 + 2 caches, the greater number of steps
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
"""Runs whose ledgers stay in memory; other ledgers are read from the history."""
NOTHING: Rows = np.empty(0, ACCOUNT)


class RunLedger:
    """Ledger of one run: all accounts that servers have reported."""

    def __init__(self, rows: Rows = NOTHING) -> None:
        self.rows = merge(rows)
        """Structured array with one row of dtype ACCOUNT for each account."""
        self.version = 0
        """Number of changes to `rows` so far."""
        self._totals: Totals | None = None  # totals of the rows

    def take(self, rows: Rows) -> None:
        """Merge account rows that a server reports."""
        merged = merge(self.rows, rows)
        if merged.tobytes() != self.rows.tobytes():
            self.rows, self._totals = merged, None
            self.version += 1

    def totals(self) -> Totals:
        """Return the totals of the run; each client counts once, even if several servers have counted it."""
        if self._totals is None:
            self._totals = totals_of(self.rows)
        return self._totals

    def clients(self) -> Rows:
        """Return one row for each client, with 0 as home and since."""
        return by_client(self.rows)


class RunLedgers:
    """Cache of run ledgers, at most `MAX_RUNS`; the ledger that was loaded first is evicted first.

    Args:
        restore: Returns the packed rows of the ledger of an earlier run.
    """

    def __init__(self, restore: Callable[[str], bytes]) -> None:
        self._restore = restore
        self._kept: dict[str, RunLedger] = {}

    def ledger_of(self, run: str, counted: str) -> RunLedger:
        """Return the ledger of `run`. The ledger of `counted`, the current run, is never evicted."""
        if run not in self._kept:
            self._kept[run] = RunLedger(np.frombuffer(self._restore(run), ACCOUNT))
            while len(self._kept) > MAX_RUNS:
                del self._kept[next(name for name in self._kept if name not in (run, counted))]
        return self._kept[run]


def ids_of(rows: Rows) -> list[bytes]:
    """Return the client id of each row, 16 bytes each."""
    return [key_of(row)[:16] for row in rows]


ACTORS_INTERVAL = 2.0
"""Seconds between two records of the steps of each actor, for its step rate."""
OUTDATED_AFTER = 75.0
"""Seconds in which an actor should load and report a model: a minute, and the time until the dashboard reads it."""
_SOURCE_COLUMNS = ("label", "flags", "returns_count", "returns_sum", "skipped")
_ROW_COLUMNS = sorted({each.name for each in fields(ActorRow)} & set(ACCOUNT.names or ()) - {"client", "home", "label"})
VERSION_SCALAR = "model_version"
"""Scalar that an actor of an inference node reports in place of models: the version of the answers."""


RECENT_EPISODES = 20
"""Newest episodes of an actor over which its recent mean return is taken."""
RECENT_SECONDS = 600.0
"""Seconds without an episode after which the return quantiles exclude an actor."""
QUANTILES = (10, 25, 50, 75, 90)


class RecentReturns:
    """Returns of the newest episodes of each actor."""

    def __init__(self) -> None:
        self._returns: dict[str, deque[float]] = {}  # returns of each actor
        self._ended: dict[str, float] = {}  # time of the end of the newest episode

    def add(self, episodes: Iterable[EpisodeRow]) -> None:
        """Add the returns of closed episodes, the oldest first for each actor; skip returns that are not finite."""
        for row in episodes:
            if math.isfinite(row.returned):
                self._returns.setdefault(row.client, deque(maxlen=RECENT_EPISODES)).append(row.returned)
                self._ended[row.client] = max(row.time, self._ended.get(row.client, 0.0))

    def clear(self) -> None:
        """Discard all returns, because another run is counted."""
        self._returns.clear()
        self._ended.clear()

    def mean_of(self, client: str) -> float | None:
        """Return the mean return of an actor's newest episodes; None if the dashboard has seen none."""
        returns = self._returns.get(client)
        return math.fsum(returns) / len(returns) if returns else None

    def figures(self) -> dict[str, HistoryPoint]:
        """Return quantiles of the actors' mean returns as points of history curves, return_p10 to return_p90; {} for
        fewer than two actors.
        """
        newest = max(self._ended.values(), default=0.0)
        means = [
            math.fsum(returns) / len(returns)
            for client, returns in self._returns.items()
            if self._ended[client] >= newest - RECENT_SECONDS
        ]
        if len(means) < 2:
            return {}
        quantiles = np.percentile(means, QUANTILES).tolist()
        return {
            f"return_p{percent}": HistoryPoint(value, value, value)
            for percent, value in zip(QUANTILES, quantiles, strict=True)
        }


def acting_versions(facts: Mapping[str, Any], topics: Iterable[str]) -> dict[str, int]:
    """Return the versions, by topic, of the models that an actor acts with, as its home server reports them.

    Args:
        topics: Topics of all models.
    """
    models = {str(topic): int(version) for topic, version in (facts.get("models") or {}).items()}
    version, known = (facts.get("scalars") or {}).get(VERSION_SCALAR), list(topics)
    return models | (dict.fromkeys(known, int(version)) if version is not None and len(known) == 1 else {})


def versions_behind(facts: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return (version, versions behind the newest) of an actor's model; of several topics the one farthest behind.
    The newest version is that at the actor's last report: the actor may have updated since.
    """
    newest = facts.get("newest_models") or {}
    acting = acting_versions(facts, newest)
    known = [(newest[topic] - version, version) for topic, version in acting.items() if topic in newest]
    if not known:
        return max(acting.values(), default=None), None
    lag, version = max(known)
    return version, max(0, lag)


class NewestModels:
    """Recent record of the newest model versions, to find versions that every actor should have by now."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, int]]] = deque()  # time, newest version of each topic

    def update_expected_versions(self, now: float, newest: Mapping[str, int]) -> dict[str, int]:
        """Record `newest`; return by topic the newest version `OUTDATED_AFTER` seconds ago, or now if that is lower."""
        seen = self._seen
        if not seen or now >= seen[-1][0] + ACTORS_INTERVAL:
            seen.append((now, dict(newest)))
        while len(seen) > 1 and seen[1][0] <= now - OUTDATED_AFTER:
            seen.popleft()
        then, former = seen[0]
        is_old = then <= now - OUTDATED_AFTER
        return {topic: min(former[topic], newest[topic]) for topic in former.keys() & newest.keys()} if is_old else {}


class ActorList:
    """Names, homes, step rates and returns of actors: facts about actors that `RunLedger` does not hold."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lost_after = max(settings.lost_after, settings.silent_after)
        self._facts: dict[str, dict[str, dict[str, Any]]] = {}  # url of a server, client in hex -> report
        self._homes: dict[int, str] = {}  # hash of a server's name, as in accounts -> name
        self._ring: deque[tuple[float, dict[bytes, int]]] = deque()  # time, steps of each actor
        self._names: dict[str, str] = {}  # client in hex -> display name; also of clients that no server lists
        self._returns = RecentReturns()
        self._listed: tuple[tuple[int, int], list[ActorRow]] | None = None

    def name_home(self, name: str) -> None:
        """Register the name of a server, because accounts hold only a hash of the name."""
        self._homes[name_hash(name)] = name

    def take_facts(self, url: str, clients: Iterable[dict[str, Any]]) -> None:
        """Replace the facts that the node at `url` reports about its clients."""
        self._facts[url] = facts = {row["client"]: row for row in clients}
        self._names |= {client: str(row["name"]) for client, row in facts.items() if row.get("name")}

    def forget(self, url: str) -> None:
        """Discard the facts from a node that was removed."""
        self._facts.pop(url, None)

    def clear(self) -> None:
        """Discard steps, returns and unlisted names, because another run is counted."""
        self._ring.clear()
        self._names = {client: name for client, name in self._names.items() if self.facts_of(client)}
        self._returns.clear()
        self._listed = None  # ledgers of two runs may have equal versions

    def take_episodes(self, ended: Iterable[EpisodeRow]) -> None:
        """Add episodes of the run that ended since the last call."""
        self._returns.add(ended)

    def return_quantiles(self) -> dict[str, HistoryPoint]:
        """Return the quantiles of the actors' recent mean returns, for the history."""
        return self._returns.figures()

    def remember(self, now: float, ledger: RunLedger) -> None:
        """Record the steps of each actor at every update, so that step rates are known before the first request."""
        ring = self._ring
        if ring and now < ring[-1][0] + ACTORS_INTERVAL:
            return
        clients = ledger.clients()
        ring.append((now, dict(zip(ids_of(clients), clients["steps"].tolist(), strict=True))))
        while len(ring) > 2 and ring[1][0] <= now - WINDOW:
            ring.popleft()

    def state_counts(self, ledger: RunLedger, servers: Iterable[NodeState], now: float) -> Actors:
        """Return the number of actors in each state."""
        rows, settings = ledger.clients(), self._settings
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

    def rows(self, ledger: RunLedger, now: float) -> list[ActorRow]:
        """Return every actor with an account, as of `now`; cached for a second while the ledger does not change."""
        key = ledger.version, int(now)
        if self._listed is None or self._listed[0] != key:
            self._listed = key, self._rows(ledger, now)
        return self._listed[1]

    def _rows(self, ledger: RunLedger, now: float) -> list[ActorRow]:
        clients = ledger.clients()
        # Single elements of lists are read a hundred times faster than the rows of an array.
        columns = {name: clients[name].tolist() for name in (*_ROW_COLUMNS, *_SOURCE_COLUMNS)}
        ids = ids_of(clients)
        then, before = self._ring[0] if self._ring else (now, {})
        homes = self._newest_homes(ledger)
        rows = []
        for place, client in enumerate(ids):
            facts = self.facts_of(client.hex())
            label, flags, count, total, skipped = (columns[name][place] for name in _SOURCE_COLUMNS)
            gained = columns["steps"][place] - before.get(client, 0) if now > then else 0
            version, lag = versions_behind(facts)
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
                    **{name: columns[name][place] for name in _ROW_COLUMNS},
                )
            )
        return rows

    def _state(self, flags: int, silence: float) -> str:
        if flags & 1:
            return "gone"
        if silence <= self._settings.silent_after:
            return "active"
        return "silent" if silence <= self._lost_after else "lost"

    def outdated(self, ledger: RunLedger, versions: Mapping[str, int], now: float) -> int:
        """Return how many active actors report that they act with older models than `versions`.

        Args:
            versions: Version of each topic that every actor should have by now.
        """
        acting = (acting_versions(facts, versions) for facts in self._active_facts(ledger, now))
        return sum(any(used.get(topic, version) < version for topic, version in versions.items()) for used in acting)

    def lag(self, ledger: RunLedger, now: float) -> ActorLag | None:
        """Return how many versions active actors are behind the newest models; None if no actor reports its model."""
        known = [lag for facts in self._active_facts(ledger, now) if (lag := versions_behind(facts)[1]) is not None]
        return ActorLag(len(known), sum(known) / len(known), max(known)) if known else None

    def _active_facts(self, ledger: RunLedger, now: float) -> list[dict[str, Any]]:
        rows = ledger.clients()
        is_active = (rows["flags"] & 1 == 0) & (rows["last_seen"] >= now - self._settings.silent_after)
        return [self.facts_of(client.hex()) for client in ids_of(rows[is_active])]

    def name_of(self, client: str) -> str:
        """Return the display name of an actor; "" if it has no name."""
        return self._names.get(client, "")

    def _newest_homes(self, ledger: RunLedger) -> dict[bytes, str]:
        rows = ledger.rows[np.argsort(ledger.rows["last_seen"], kind="stable")]
        names = (self._homes.get(home, "") for home in rows["home"].tolist())
        return dict(zip(ids_of(rows), names, strict=True))

    def homes_of(self, ledger: RunLedger, client: bytes) -> list[dict[str, Any]]:
        """Return the accounts of one actor, one for each home server and server life."""
        rows = ledger.rows
        accounts = rows[(rows["client"] == np.frombuffer(client, "<u8")).all(axis=1)]
        names = [name for name in ACCOUNT.names or () if name != "client"]
        return [
            {name: row[name].item() for name in names}
            | {"home": self._homes.get(int(row["home"]), f"unknown server {int(row['home']):016x}")}
            for row in accounts
        ]

    def facts_of(self, client: str) -> dict[str, Any]:
        """Return the facts that an actor's newest home server reports beside the account; {} if no server lists it."""
        reports = [rows[client] for rows in self._facts.values() if client in rows]
        return max(reports, key=lambda row: float(row["last_seen"]), default={})
