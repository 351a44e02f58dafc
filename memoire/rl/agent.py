"""A learner's side of observers, which run whole episodes for it, and whose actions it computes in one batch.

    Agent (in the learner)                                  Observer (as many as there are cores)
    run_episode ──▶ job ──────────JOB: a start──────────▶   run_episode(start, ask, options)
    function(columns, weights) ◀──INFER── batches ◀─────      ask(columns) for each step
    collect ◀── futures ◀─────────RESULT: the entries───      yield each entry

Only the agent needs an address: observers ask it for jobs, and nobody is called who may be dead.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire import Inference, Rollouts, Schema
from memoire.building import (
    ClosingContext,
    Condition,
    Function,
    Given,
    checked_names,
    packed_row,
    schema_from,
    seconds,
    whole,
)
from memoire.errors import Closed, DataError, JobFailed, MemoireTimeout, ObserverLost, ParameterError
from memoire.kinds import InferenceStats

from .jobs import JobContent, Jobs, JobService
from .starts import ObservedEpisode, Start, StartStates, rollouts_of

_log = logging.getLogger(__name__)

LEASE: Final = 10.0
"""Seconds after which a silent observer has lost its job."""
OPTIONS: Final = (
    "weights", "topic", "connect", "max_batch", "max_wait", "alive", "queue_rows", "sizes", "limits", "context", "name",
)  # fmt: skip
"""Arguments of `Inference` that an agent hands on."""


class Agent(ClosingContext):
    """A learner's side of observers: an inference node that also gives jobs.

    Args:
        endpoint: Address to listen at, such as "tcp://*:5570".
        inputs, outputs, function: As of `Inference`: what observers ask for each step.
        entries: Columns of what observers record, as `Schema` takes them: those of the state, a reward, and whatever
            the learner needs of an action.
        starts: Origins of episodes, which are drawn from in turn. All have the same columns.
        lease: Seconds that a silent observer keeps its job.
        attempts: How many observers may begin a job; 1 ends it with `ObserverLost` if the first one falls silent.
        max_lag: Versions that the oldest entry of an episode may be behind the weights; None: any.
        keys: As of `Inference`.
        options: More arguments of `Inference`: weights, connect, topic, max_batch, max_wait, alive, sizes, limits,
            name.
    """

    @checked_names(also=OPTIONS)
    def __init__(
        self,
        endpoint: str,
        inputs: Any,
        outputs: Any,
        function: Function,
        entries: Any,
        starts: Sequence[StartStates] = (),
        *,
        lease: float = LEASE,
        attempts: int = 2,
        max_lag: int | None = None,
        keys: Given = None,
        **options: Any,
    ) -> None:
        self.starts = tuple(starts)
        """Origins of episodes."""
        self.turn = 0
        """Episodes that were begun from an origin so far: the next origin follows from it."""
        self.entries: Schema = schema_from(entries)
        """What observers record."""
        self.max_lag = None if max_lag is None else whole("max_lag", max_lag, 0)
        schemas = {each.schema.fingerprint: each.schema for each in self.starts}
        if len(schemas) > 1:
            raise ParameterError("starts", [each.name for each in self.starts], "origins with the same columns")
        # Numbers of an agent that was started again must not be those of its former jobs.
        jobs = Jobs(seconds(lease, name="lease"), whole("attempts", attempts, 1), secrets.randbits(48) << 4 | 1)
        origins = [each.stats for each in self.starts]
        self._jobs = JobService(jobs, next(iter(schemas.values()), None), self.entries, origins)
        self.node = Inference(endpoint, inputs, outputs, function, keys=keys, service=self._jobs, **options)
        """The inference node; `node.endpoint` is where observers connect to."""
        self._changed = Condition()
        self._pending: list[Future[ObservedEpisode]] = []  # that `collect` began, and that have not been returned

    @property
    def endpoint(self) -> str:
        """Where observers connect to."""
        return self.node.endpoint

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.node.version

    def update(self, weights: Any, version: int | None = None) -> int:
        """Act with these weights from the next batch on; returns their version, by default one above the former."""
        version = self.version + 1 if version is None else version
        self.node.update(weights, version)
        return self.node.wait_version(version)

    def run_episode(
        self, start: Mapping[str, Any] | Start | None = None, observer: str | None = None, **options: Any
    ) -> Future[ObservedEpisode]:
        """Have an observer run an episode.

        Args:
            start: State [*F] to begin with. None draws one from the next origin, if there is any.
            observer: Name or id of the only observer that may run it.
            options: Given to the observer's function: plain values.

        Raises:
            Closed: the agent was closed.

        Returns:
            A future, whose `cancel` reaches a running observer with its next message. Its exception is `JobFailed`,
            `ObserverLost` or `Closed`.
        """
        return self._begin([], start, observer, options)

    def _begin(
        self,
        pending: list[Future[ObservedEpisode]],
        start: Mapping[str, Any] | Start | None,
        observer: str | None,
        options: Mapping[str, Any],
    ) -> Future[ObservedEpisode]:
        """Have an observer run an episode, whose future is put at the end of these. Interrupted, it is cancelled."""
        if self.node.closed:
            raise Closed("this agent")
        source: StartStates | None = None
        if start is None and self.starts:
            source = self.starts[self.turn % len(self.starts)]
            self.turn += 1
            start = source.sample()
        columns = start.columns if isinstance(start, Start) else start
        content = JobContent(None if columns is None else self._start_of(columns), dict(options))
        drawn = start if isinstance(start, Start) else None
        made: Future[ObservedEpisode] = Future()
        inner: Future[Any] = Future()
        inner.add_done_callback(lambda done: self._settle(made, done, options, drawn, source))
        made.add_done_callback(lambda done: inner.cancel() if done.cancelled() else None)
        made.add_done_callback(self._notify)
        try:
            self._jobs.run(content, observer or "", future=inner)
            pending.append(made)
            return made
        except BaseException:
            made.cancel()
            raise

    def wait(
        self, futures: Iterable[Future[Any]], min_done: int | None = None, timeout: float | None = None
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        """Wait until so many futures are done, all by default, or the time is over.

        Returns:
            Those that are done, failed ones too, and the late ones, which go on.
        """
        watched = list(futures)
        least = len(watched) if min_done is None else whole("min_done", min_done, 0, len(watched))
        for future in watched:
            future.add_done_callback(self._notify)  # also of a future that somebody else made
        with self._changed.held():
            self._changed.wait_for(lambda: sum(each.done() for each in watched) >= least, seconds(timeout))
        done = [each for each in watched if each.done()]
        return done, [each for each in watched if not each.done()]

    def collect(
        self, episodes: int, *, min_done: int | None = None, timeout: float | None = None, **options: Any
    ) -> list[ObservedEpisode]:
        """Run so many episodes at a time, and return those that are done as soon as there are `min_done` of them.

        Those that are late go on, and count for the next call, unless `max_lag` rules them out. An episode that fails
        is begun again.

        Args:
            episodes: That run at the same time.
            min_done: All of them by default.
            timeout: Seconds.
            options: As of `run_episode`.

        Raises:
            MemoireTimeout: fewer came in time. They are kept for the next call.
            JobFailed: more episodes failed than were asked for.
            Closed: the agent was closed.
        """
        wanted = whole("episodes", episodes, 1)
        least = wanted if min_done is None else whole("min_done", min_done, 1, wanted)
        deadline, failures = time.monotonic() + seconds(timeout), 0
        given = options.pop("start", None), options.pop("observer", None)
        while True:
            failures += self._drop_unusable(failures < wanted)
            while len(self._pending) < wanted:
                self._begin(self._pending, *given, options)
            done, late = self.wait(self._pending, least, max(0.0, deadline - time.monotonic()))
            usable = [each for each in done if _is_usable(each)]
            if len(usable) >= least:
                results = [each.result() for each in usable]
                self._pending = late
                return results
            if time.monotonic() >= deadline:
                text = f"{len(usable)} of {least} episodes are done, {len(late)} go on ({self._observers()})"
                raise MemoireTimeout("episodes", self.endpoint, seconds(timeout), text)

    def keep(self, episodes: Iterable[ObservedEpisode], where: Callable[[ObservedEpisode], bool] | None = None) -> int:
        """Keep the states of these episodes as starts, each at its origin; returns how many are new."""
        chosen = [each for each in episodes if each.source is not None and (where is None or where(each))]
        return sum(each.source.take_in(each) for each in chosen if each.source is not None)

    def rollouts(self, episodes: Sequence[ObservedEpisode]) -> Rollouts:
        """All entries of these episodes, one after the other: for `gae`, and for `rl.ragged_minibatches`."""
        return rollouts_of(self.entries, episodes)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Turn and start states as named arrays [*F], for a checkpoint."""
        made = {f"{each.name}.{name}": array for each in self.starts for name, array in each.arrays().items()}
        return made | {"turn": np.array(self.turn, np.int64)}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Go on from arrays [*F] that `arrays` made. Raises DataError, ParameterError: see `StartStates.restore`."""
        if "turn" not in arrays:
            raise DataError("a checkpoint", "has no turn, as an agent's has")
        for each in self.starts:
            head = f"{each.name}."
            each.restore({name.removeprefix(head): arrays[name] for name in arrays if name.startswith(head)})
        self.turn = int(arrays["turn"])

    def stats(self) -> InferenceStats:
        """All figures at this moment; `jobs` has those of episodes, `starts` those of start states."""
        return self.node.stats()

    def close(self, timeout: float | None = None) -> None:
        """End: observers ask other agents, and futures that wait raise Closed."""
        self.node.close(timeout)

    def _start_of(self, columns: Mapping[str, Any]) -> Any:
        if self._jobs.starts is None:
            raise ParameterError("start", list(columns), "None, for an agent without start states (starts=)")
        return packed_row(self._jobs.starts, columns)

    def _settle(
        self,
        made: Future[ObservedEpisode],
        done: Future[Any],
        options: Mapping[str, Any],
        start: Start | None,
        source: StartStates | None,
    ) -> None:
        """In the node's thread: an observer's result becomes an episode."""
        if done.cancelled() or not made.set_running_or_notify_cancel():
            made.cancel()
            return
        if (error := done.exception()) is not None:
            made.set_exception(error)
            return
        fragments = done.result()
        if not fragments:
            made.set_exception(JobFailed(0, "an observer", "it recorded no entry"))
            return
        made.set_result(ObservedEpisode(fragments[0].number, fragments[0], options, start, source))

    def _notify(self, _: Future[Any]) -> None:
        with self._changed.held():
            self._changed.notify_all()

    def _drop_unusable(self, may_fail: bool) -> int:
        """Forget episodes that failed, and those that are too old; returns how many failed."""
        failed = [each for each in self._pending if each.done() and not _is_usable(each)]
        for each in failed:
            error = None if each.cancelled() else each.exception()
            if error is not None and not (may_fail and isinstance(error, JobFailed | ObserverLost)):
                self._pending.remove(each)
                raise error
            _log.warning("an episode is begun again: %s", error or "it was cancelled")
        old = [each for each in self._pending if each.done() and _is_usable(each) and self._is_old(each.result())]
        if old:
            _log.info("%d late episodes are older than max_lag=%s allows", len(old), self.max_lag)
        self._jobs.passed_over(len(old))
        self._pending = [each for each in self._pending if each not in failed and each not in old]
        return len(failed)

    def _is_old(self, episode: ObservedEpisode) -> bool:
        return self.max_lag is not None and self.version - episode.version > self.max_lag

    def _observers(self) -> str:
        jobs = self.stats().jobs
        return f"{jobs.observers} observers, {jobs.leased} jobs that they have, {jobs.open} that nobody has"

    def __repr__(self) -> str:
        return f"<rl.Agent at {self.endpoint}, {self._observers()}>"


def _is_usable(future: Future[Any]) -> bool:
    try:
        return future.exception(0) is None
    except (CancelledError, TimeoutError):
        return False
