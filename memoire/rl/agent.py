"""Learner's side of observers: assigns whole episodes to them, and computes their actions in batches.

    Agent (in the learner)                                  Observer (as many as there are cores)
    run_episode ──▶ job ──────────JOB: a start──────────▶   run_episode(start, ask, options)
    function(columns, weights) ◀──INFER── batches ◀─────      ask(columns) for each step
    collect ◀── futures ◀─────────RESULT: the entries───      yield each entry

Only the agent needs an address: observers connect to the agent and ask for jobs, so that the agent calls no process.
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
    KeysLike,
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
"""Seconds of silence after which an observer loses its job."""
OPTIONS: Final = (
    "weights", "topic", "connect", "max_batch", "max_wait", "alive", "queue_rows", "sizes", "limits", "context", "name",
)  # fmt: skip
"""Arguments of `Inference` that an agent passes on."""


class Agent(ClosingContext):
    """Learner's side of observers: an inference node that also assigns episodes as jobs.

    Args:
        endpoint: Address to listen at, such as "tcp://*:5570".
        inputs, outputs, function: As of `Inference`: the request of an observer in each step, and its answer.
        entries: Columns of the entries that observers record, as `Schema` takes them: those of the state, a reward,
            and the columns that the learner needs of an action.
        starts: Sources of start states, from which episodes are drawn in turn. All have the same columns.
        lease: Seconds that a silent observer keeps its job.
        attempts: Number of observers that may begin a job; 1 ends the job with `ObserverLost` if the first one falls
            silent.
        max_lag: Versions that the oldest entry of an episode may be behind the weights; None allows any number.
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
        keys: KeysLike = None,
        **options: Any,
    ) -> None:
        self.starts = tuple(starts)
        """Sources of start states of episodes."""
        self.turn = 0
        """Number of episodes begun from a source so far; modulo their number, it gives the next source."""
        self.entries: Schema = schema_from(entries)
        """Schema of the entries that observers record."""
        self.max_lag = None if max_lag is None else whole("max_lag", max_lag, 0)
        schemas = {each.schema.fingerprint: each.schema for each in self.starts}
        if len(schemas) > 1:
            raise ParameterError("starts", [each.name for each in self.starts], "StartStates with the same columns")
        # A restarted agent must not reuse the numbers of jobs of its former life.
        jobs = Jobs(seconds(lease, name="lease"), whole("attempts", attempts, 1), secrets.randbits(48) << 4 | 1)
        origins = [each.stats for each in self.starts]
        self._jobs = JobService(jobs, next(iter(schemas.values()), None), self.entries, origins)
        self.node = Inference(endpoint, inputs, outputs, function, keys=keys, service=self._jobs, **options)
        """Inference node; observers connect to `node.endpoint`."""
        self._changed = Condition()
        self._pending: list[Future[ObservedEpisode]] = []  # begun by `collect`, not yet returned

    @property
    def endpoint(self) -> str:
        """Address that observers connect to."""
        return self.node.endpoint

    @property
    def version(self) -> int:
        """Version of the current weights."""
        return self.node.version

    def update(self, weights: Any, version: int | None = None) -> int:
        """Use these weights from the next batch on, and return their version, by default one above the former."""
        version = self.version + 1 if version is None else version
        self.node.update(weights, version)
        return self.node.wait_version(version)

    def run_episode(
        self, start: Mapping[str, Any] | Start | None = None, observer: str | None = None, **options: Any
    ) -> Future[ObservedEpisode]:
        """Start an episode at an observer.

        Args:
            start: State [*F] to begin with. None draws one from the next of `starts`, if the agent has any.
            observer: Name or id of the only observer that may run the episode.
            options: Plain values that the observer's function is called with.

        Raises:
            Closed: the agent was closed.

        Returns:
            A future, whose `cancel` reaches a running observer with its next message. The future's exception is
            `JobFailed`, `ObserverLost` or `Closed`.
        """
        return self._begin([], start, observer, options)

    def _begin(
        self,
        pending: list[Future[ObservedEpisode]],
        start: Mapping[str, Any] | Start | None,
        observer: str | None,
        options: Mapping[str, Any],
    ) -> Future[ObservedEpisode]:
        """Start an episode and append its future to `pending`; an interrupt cancels the future."""
        if self.node.closed:
            raise Closed("this agent")
        source: StartStates | None = None
        if start is None and self.starts:
            source = self.starts[self.turn % len(self.starts)]
            self.turn += 1
            start = source.sample()
        columns = start.columns if isinstance(start, Start) else start
        content = JobContent(None if columns is None else self._start_of(columns), dict(options))
        drawn_start = start if isinstance(start, Start) else None
        episode: Future[ObservedEpisode] = Future()
        job: Future[Any] = Future()
        job.add_done_callback(lambda done: self._finish_episode(episode, done, options, drawn_start, source))
        episode.add_done_callback(lambda done: job.cancel() if done.cancelled() else None)
        episode.add_done_callback(self._notify)
        try:
            self._jobs.run(content, observer or "", future=job)
            pending.append(episode)
            return episode
        except BaseException:
            episode.cancel()
            raise

    def wait(
        self, futures: Iterable[Future[Any]], min_done: int | None = None, timeout: float | None = None
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        """Wait until `min_done` futures are done, all by default, or the timeout is over.

        Returns:
            Two lists: futures that are done, failed ones too, and the others, which continue.
        """
        watched = list(futures)
        threshold = len(watched) if min_done is None else whole("min_done", min_done, 0, len(watched))
        for future in watched:
            future.add_done_callback(self._notify)  # other sources make futures, too
        with self._changed.held():
            self._changed.wait_for(lambda: sum(each.done() for each in watched) >= threshold, seconds(timeout))
        done = [each for each in watched if each.done()]
        return done, [each for each in watched if not each.done()]

    def collect(
        self, episodes: int, *, min_done: int | None = None, timeout: float | None = None, **options: Any
    ) -> list[ObservedEpisode]:
        """Run episodes in parallel, and return the finished ones as soon as `min_done` episodes are finished.

        Late episodes continue and count for the next call, unless they are older than `max_lag` allows. A failed
        episode is replaced by another one.

        Args:
            episodes: Number of episodes that run at the same time.
            min_done: Number of episodes to wait for; all by default.
            timeout: Seconds to wait; None sets no limit.
            options: As of `run_episode`.

        Raises:
            MemoireTimeout: fewer episodes finished in time. Finished episodes are kept for the next call.
            JobFailed: at least `episodes` episodes had failed, and another one failed.
            Closed: the agent was closed.
        """
        parallel = whole("episodes", episodes, 1)
        threshold = parallel if min_done is None else whole("min_done", min_done, 1, parallel)
        deadline, failures = time.monotonic() + seconds(timeout), 0
        place = options.pop("start", None), options.pop("observer", None)
        while True:
            failures += self._drop_unusable(failures < parallel)
            while len(self._pending) < parallel:
                self._begin(self._pending, *place, options)
            done, late = self.wait(self._pending, threshold, max(0.0, deadline - time.monotonic()))
            usable = [each for each in done if _is_usable(each)]
            if len(usable) >= threshold:
                results = [each.result() for each in usable]
                self._pending = late
                return results
            if time.monotonic() >= deadline:
                text = f"{len(usable)} of {threshold} episodes are done, {len(late)} are running ({self._count_jobs()})"
                raise MemoireTimeout("episodes", self.endpoint, seconds(timeout), text)

    def keep(self, episodes: Iterable[ObservedEpisode], where: Callable[[ObservedEpisode], bool] | None = None) -> int:
        """Add states of the episodes that `where` selects to their `StartStates`; return the number of new states."""
        selected = [each for each in episodes if each.source is not None and (where is None or where(each))]
        return sum(each.source.take_in(each) for each in selected if each.source is not None)

    def rollouts(self, episodes: Sequence[ObservedEpisode]) -> Rollouts:
        """Return all entries of episodes, concatenated, for `gae` and `rl.ragged_minibatches`."""
        return rollouts_of(self.entries, episodes)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return `turn` and all start states as named arrays [*F], for a checkpoint."""
        states = {f"{each.name}.{name}": array for each in self.starts for name, array in each.arrays().items()}
        return states | {"turn": np.array(self.turn, np.int64)}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore `turn` and start states from arrays [*F]. Raises DataError, ParameterError: see `StartStates`."""
        if "turn" not in arrays:
            raise DataError("a checkpoint", "has no array 'turn', which an agent's checkpoint has")
        for each in self.starts:
            head = f"{each.name}."
            each.restore({name.removeprefix(head): arrays[name] for name in arrays if name.startswith(head)})
        self.turn = int(arrays["turn"])

    def stats(self) -> InferenceStats:
        """Return all figures of the node; `jobs` has those of episodes, `starts` those of start states."""
        return self.node.stats()

    def close(self, timeout: float | None = None) -> None:
        """Close the node: observers move to other agents, and pending futures raise Closed."""
        self.node.close(timeout)

    def _start_of(self, columns: Mapping[str, Any]) -> Any:
        if self._jobs.starts is None:
            raise ParameterError("start", list(columns), "None, because this agent has no start states (starts=)")
        return packed_row(self._jobs.starts, columns)

    def _finish_episode(
        self,
        episode: Future[ObservedEpisode],
        done: Future[Any],
        options: Mapping[str, Any],
        start: Start | None,
        source: StartStates | None,
    ) -> None:
        if done.cancelled() or not episode.set_running_or_notify_cancel():
            episode.cancel()
            return
        if (error := done.exception()) is not None:
            episode.set_exception(error)
            return
        fragments = done.result()
        if not fragments:
            episode.set_exception(JobFailed(0, "an observer", "it recorded no entry"))
            return
        episode.set_result(ObservedEpisode(fragments[0].number, fragments[0], options, start, source))

    def _notify(self, _: Future[Any]) -> None:
        with self._changed.held():
            self._changed.notify_all()

    def _drop_unusable(self, may_fail: bool) -> int:
        """Remove failed and too old episodes; return the number of failed ones, or raise an error of one episode."""
        failed = [each for each in self._pending if each.done() and not _is_usable(each)]
        for each in failed:
            error = None if each.cancelled() else each.exception()
            if error is not None and not (may_fail and isinstance(error, JobFailed | ObserverLost)):
                self._pending.remove(each)
                raise error
            _log.warning("an episode is replaced by another one: %s", error or "it was cancelled")
        old = [each for each in self._pending if each.done() and _is_usable(each) and self._is_old(each.result())]
        if old:
            _log.info("%d late episodes are discarded: they are older than max_lag=%s allows", len(old), self.max_lag)
        self._jobs.count_stale_results(len(old))
        self._pending = [each for each in self._pending if each not in failed and each not in old]
        return len(failed)

    def _is_old(self, episode: ObservedEpisode) -> bool:
        return self.max_lag is not None and self.version - episode.version > self.max_lag

    def _count_jobs(self) -> str:
        jobs = self.stats().jobs
        return f"{jobs.observers} observers, {jobs.leased} assigned jobs, {jobs.open} waiting jobs"

    def __repr__(self) -> str:
        return f"<rl.Agent at {self.endpoint}, {self._count_jobs()}>"


def _is_usable(future: Future[Any]) -> bool:
    try:
        return future.exception(0) is None
    except (CancelledError, TimeoutError):
        return False
