"""Writes into the history what runs came to, and what happened to them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec

from memoire.errors import MemoireError

from .answers import EventRow, Overview
from .cluster import Cluster
from .history import FLUSH_INTERVAL, PRUNE_INTERVAL, History

_log = logging.getLogger(__name__)

LEDGER_INTERVAL = 10.0
"""Seconds between two savings of the ledger in the history."""
MAX_KEPT_ACTORS = 1_000
"""Actors of a run that are listed when it is opened from a file."""


class RunRecorder:
    """Keeps runs. Methods belong to the aggregator's thread.

    Args:
        lock: The cluster's.
    """

    def __init__(self, history: History, cluster: Cluster, lock: threading.RLock) -> None:
        self._history, self._cluster, self._lock = history, cluster, lock
        self._kept_at = self._flushed_at = self._pruned_at = 0.0
        self.trouble = ""
        """Why the history cannot be written; "" if it can."""

    def record(self, newest: Overview, former: Overview | None, events: list[EventRow], now: float) -> None:
        """Keep what the last look saw: of the run that it ended, what it came to; of its own, what is due.

        Args:
            former: What the look before saw; None for the first.
            events: What happened between the two.
        """
        before, self.trouble = self.trouble, ""
        if former is not None and former.run != newest.run:
            self.keep(former, now)
            self._kept_at = 0.0
        for write in (lambda: self._note(newest.run, events), lambda: self._save(newest, now)):
            self._attempt(write)
        if self.trouble and not before:
            _log.error("%s", self.trouble)

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except MemoireError as error:
            self.trouble = str(error)

    def _note(self, run: str, events: list[EventRow]) -> None:
        """Write what happened to a run; of one that was seen before, its beginning is known."""
        if not run or not events:
            return
        known = {msgspec.json.decode(body, type=EventRow).kind for body in self._history.events(run)}
        for event in events:
            if event.kind not in ("run_began", "run_finished") or event.kind not in known:
                self._history.add_event(run, msgspec.json.encode(event))

    def _save(self, newest: Overview, now: float) -> None:
        """Write to the disk what is due."""
        if now >= self._kept_at + LEDGER_INTERVAL:
            self._kept_at = now
            self.keep(newest, now)
        if now >= self._flushed_at + FLUSH_INTERVAL:
            self._flushed_at = now
            self._history.flush()
        if now >= self._pruned_at + PRUNE_INTERVAL:
            self._pruned_at = now
            self._history.prune(now)

    def keep(self, newest: Overview | None, now: float) -> None:
        """Keep totals, ledger, actors and settings of this run as they are."""
        if newest is None or not newest.run:
            return
        with self._lock:
            kept = self._cluster.kept(newest.run)
            documents = self._documents(newest)
        facts = {
            "totals": kept.totals(),
            "finished": newest.finished,
            "return_mean": newest.learning.return_mean,
            "length_mean": newest.learning.length_mean,
            "actors": newest.actors,
        }

        def write() -> None:
            self._history.keep_run(newest.run, now, msgspec.json.encode(facts), kept.rows.tobytes())
            for kind, body in documents.items():
                self._history.keep_document(newest.run, kind, body)

        self._attempt(write)

    def _documents(self, newest: Overview) -> dict[str, bytes]:
        """What a run that is opened from a file shows beside its curves, as JSON."""
        documents = {"overview": newest, "actors": self._cluster.actors()[:MAX_KEPT_ACTORS]}
        settings = {node.name: node.settings for node in self._cluster.servers if node.settings}
        if settings:
            documents["settings"] = {
                name: {key: value for key, value in told.items() if key not in ("run", "runs")}
                for name, told in settings.items()
            }
        return {kind: msgspec.json.encode(value) for kind, value in documents.items()}
