"""Fetches the newest model for a worker on a thread of its own: the loop of steps only takes over what is ready."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from memoire.client.models import ModelHandle
from memoire.errors import Closed, MemoireTimeout, ParameterError, WrongModel
from memoire.replay.episode_store import Condition

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
        check: Called on the thread with each model's body. What it raises as ParameterError ends the thread, and
            `newest` and `wait` raise it.
    """

    def __init__(
        self,
        model: ModelHandle,
        actor: Learns,
        keep: Callable[[bytes, int], object],
        check: Callable[[bytes], object] = lambda body: None,
    ) -> None:
        self.version = 0
        """Of the model that acts; the worker sets it."""
        self.failures = 0
        """Models that did not fit, and were passed over."""
        self._model, self._actor, self._keep, self._check = model, actor, keep, check
        self._refused: ParameterError | WrongModel | None = None
        self._ready: PreparedModel | None = None  # replaced as a whole
        self._changed = Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="memoire-worker-models", daemon=True)
        self._thread.start()

    def newest(self) -> PreparedModel | None:
        """A model above the one that acts, if one is ready. Takes no lock.

        Raises:
            ParameterError: a model is of a learner that was told something else than this worker.
            WrongModel: the first model does not fit. A later one is passed over, and the log says so.
        """
        if self._refused is not None:
            raise self._refused
        ready = self._ready
        return ready if ready is not None and ready.version > self.version else None

    def wait(self, after: int, timeout: float) -> bool:
        """Wait until a model above `after` is ready; whether there is one. Raises as `newest` does."""

        def has_come() -> bool:
            return self._refused is not None or (self._ready is not None and self._ready.version > after)

        with self._changed.held():
            is_ready = bool(self._changed.wait_for(has_come, timeout))
        if self._refused is not None:
            raise self._refused
        return is_ready

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
            try:
                self._check(model.body)
                self._take(model.body, model.version)
            except (ParameterError, WrongModel) as error:
                with self._changed.held():
                    self._refused = error
                    self._changed.notify_all()
                return

    def _take(self, body: bytes, version: int) -> None:
        try:
            ready = PreparedModel(version, self._actor.prepare(body, version))
        except WrongModel as error:
            self.failures += 1
            if self._ready is None and not self.version:
                raise  # there is no model to act by, and never was
            _log.warning("the worker acts on by model %d: %s", self.version, error)
            return
        try:
            self._keep(body, version)
        except OSError as error:
            _log.warning("model %d cannot be saved: %s", version, error)
        with self._changed.held():
            self._ready = ready
            self._changed.notify_all()
