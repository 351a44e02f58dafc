"""Fetches the newest model for a worker on a thread of its own: the loop of steps only takes over what is ready."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from memoire.client.models import ModelHandle
from memoire.errors import Closed, MemoireTimeout, WrongModel

from .actors import Learns

_log = logging.getLogger(__name__)

WAIT_INTERVAL: Final = 0.5
"""Seconds after which the thread sees whether it is to end."""


@dataclass(frozen=True)
class PreparedModel:
    """A model that can be adopted between two steps."""

    version: int
    prepared: Any


class ModelFollower:
    """The newest model of a topic, prepared for an actor.

    Args:
        model: Of a client.
        actor: What prepares it.
        keep: Called on the thread with each model's body and version: for files.
    """

    def __init__(self, model: ModelHandle, actor: Learns, keep: Callable[[bytes, int], object]) -> None:
        self.version = 0
        """Of the model that acts; the worker sets it."""
        self.failures = 0
        """Models that did not fit, and were passed over."""
        self._model, self._actor, self._keep = model, actor, keep
        self._ready: PreparedModel | None = None  # replaced as a whole
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="memoire-worker-models", daemon=True)
        self._thread.start()

    def newest(self) -> PreparedModel | None:
        """A model above the one that acts, if one is ready. Takes no lock."""
        ready = self._ready
        return ready if ready is not None and ready.version > self.version else None

    def wait(self, after: int, timeout: float) -> bool:
        """Wait until a model above `after` is ready; whether there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ready is not None and self._ready.version > after, timeout)

    def close(self) -> None:
        """End the thread."""
        self._is_closing = True
        self._thread.join(2 * WAIT_INTERVAL)

    def _run(self) -> None:
        seen = 0
        while not self._is_closing:
            try:
                model = self._model.wait(WAIT_INTERVAL, after=seen)
            except MemoireTimeout:
                continue
            except Closed:
                return
            seen = model.version
            self._take(model.body, model.version)

    def _take(self, body: bytes, version: int) -> None:
        try:
            ready = PreparedModel(version, self._actor.prepare(body, version))
        except WrongModel as error:
            self.failures += 1
            _log.warning("the worker acts on by model %d: %s", self.version, error)
            return
        try:
            self._keep(body, version)
        except OSError as error:
            _log.warning("model %d cannot be saved: %s", version, error)
        with self._changed:
            self._ready = ready
            self._changed.notify_all()
