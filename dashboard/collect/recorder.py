"""Writes into the history what runs came to, and what happened to them."""

from __future__ import annotations

import logging
import threading

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

    def note(self, run: str, events: list[EventRow]) -> None:
        """Keep what happened to a run; of one that was seen before, its beginning is known."""
        if not run or not events:
            return
        try:
            known = {msgspec.json.decode(body, type=EventRow).kind for body in self._history.events(run)}
            for event in events:
                if event.kind not in ("run_began", "run_finished") or event.kind not in known:
                    self._history.add_event(run, msgspec.json.encode(event))
        except MemoireError as error:
            self.trouble = str(error)

    def end(self, newest: Overview, now: float) -> None:
        """Keep what a run came to: another one is counted from now on."""
        self.keep(newest, now)
        self._kept_at = 0.0

    def save(self, newest: Overview, now: float) -> None:
        """Write to the disk what is due."""
        former, self.trouble = self.trouble, ""
        try:
            if now >= self._kept_at + LEDGER_INTERVAL:
                self._kept_at = now
                self.keep(newest, now)
            if now >= self._flushed_at + FLUSH_INTERVAL:
                self._flushed_at = now
                self._history.flush()
            if now >= self._pruned_at + PRUNE_INTERVAL:
                self._pruned_at = now
                self._history.prune(now)
        except MemoireError as error:
            self.trouble = str(error)
        if self.trouble and not former:
            _log.error("%s", self.trouble)

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
        try:
            self._history.keep_run(newest.run, now, msgspec.json.encode(facts), kept.rows.tobytes())
            for kind, body in documents.items():
                self._history.keep_document(newest.run, kind, body)
        except MemoireError as error:
            self.trouble = str(error)

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
