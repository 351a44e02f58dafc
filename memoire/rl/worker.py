"""Rollout worker: runs episodes of an environment with the newest policy, and sends the samples to a server.

    reset ─▶ act ─▶ step ─▶ act ─▶ step ...      a test episode every n training episodes: act(test=True), no samples
      │                       ▲ newest model     Ctrl-C, SIGTERM, errors: the step ends, samples are sent, and the
      └─▶ recorder ─▶ client  └ follower         device gets its default action

The loop of steps never waits for a socket or a disk.

The first signal lets the current step end; the second one interrupts at once.

`run_synchronous` is a loop that waits for the trainer; `step_seconds` measures the environment.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np

from memoire import Client, connect
from memoire.building import ClosingContext, KeysLike
from memoire.errors import MemoireError, ParameterError

from .actors import Acts, Learns, ModelFollower, PreparedModel, actor_of, send_default_action, shaped_action
from .policies import TOPIC
from .recording import CONNECT_INTERVAL, Columns, EnvStep, Recorder, connected, limit_of
from .spaces import check_actions, default_action, pin, reset_result, step_result
from .step_clock import WorkerStats, times_of
from .training import check_model_topic
from .weights import ModelFiles, read_model

_log = logging.getLogger(__name__)

PACE_INTERVAL: Final = 0.05
"""Seconds between two checks if learners have caught up."""
UPDATE_TIMEOUT: Final = 1.0
KEPT_RESULTS: Final = 100
"""Number of the newest episodes of each kind that a worker remembers."""

Recording = Callable[[Client], Recorder]
"""Function that makes a recorder for a client."""


@dataclass(frozen=True)
class EpisodeResult:
    """Result of one episode: length, return, model version and completeness."""

    length: int
    returned: float
    version: int
    """Version of the model that acted at the end; 0 without a published model."""
    is_complete: bool
    """False if the worker was stopped during the episode."""


class RolloutWorker(ClosingContext):
    """Worker that runs episodes of one environment.

    Args:
        env: The environment, or a class or function that makes it.
        policy: The policy: an object with `act(obs, test=False)`; or a class or function that makes one from
            `observation_space` and `action_space`. A torch module, or a policy with `load(body, version)`, gets the
            newest models.
        url: Address of a server or proxy; None connects to no server. The worker tries several addresses in random
            order and takes the first that answers.
        table, keys, name: Passed to `memoire.connect`.
        topic: Topic of the models.
        recording: Makes the recorder of the samples; by default a writer of the table's columns.
        device: Device of torch modules.
        max_samples_per_episode: Steps after which an episode is truncated.
        model_path: File of the newest model; loaded at the start if it exists, and updated with each model.
        model_path_history: Prefix of the names of former models' files.
        model_history: One in `model_history` models is kept in such a file; 0 keeps none.
        obs_preprocessor: Called with each observation before the policy sees it.
        is_paced: True waits between episodes while learners are behind (`samples_per_insert_tolerance`).
        cpus: Processors for the thread that runs episodes; None leaves that to the system.
        timeout: Seconds to wait for the server; a log line every ten seconds reports the wait.

    Raises:
        MemoireTimeout: no server answered.
        ParameterError: the worker has neither a server nor a model, a setting is out of its range, or the table limits
            the age of another topic's models; or (also from `run`) a model's action space is not the environment's.
        WrongModel: raised by `run` if the first model does not fit the policy.
        AuthError, Refused: as in `memoire.connect`.
    """

    def __init__(
        self,
        env: Any,
        policy: Any,
        url: str | Sequence[str] | None = None,
        *,
        table: str = "",
        topic: str = TOPIC,
        recording: Recording = Columns,
        keys: KeysLike = None,
        name: str | None = None,
        device: str | None = "cpu",
        max_samples_per_episode: float = np.inf,
        model_path: str | Path | None = None,
        model_path_history: str | Path | None = None,
        model_history: int = 0,
        obs_preprocessor: Callable[[Any], Any] | None = None,
        is_paced: bool = False,
        cpus: Collection[int] | None = None,
        timeout: float = 60.0,
    ) -> None:
        if not max_samples_per_episode >= 1:
            raise ParameterError("max_samples_per_episode", max_samples_per_episode, "at least 1")
        self.env = env() if isinstance(env, type) or not hasattr(env, "step") else env
        self.actor = self._actor_of(policy, device)
        self.version = 0
        """Version of the model that acts; 0 for no model, or for the model of the file."""
        self.episodes = self.steps = self.tests = 0
        """Training episodes that ended, steps of training episodes, and test episodes."""
        self.results: dict[str, deque[EpisodeResult]] = {kind: deque(maxlen=KEPT_RESULTS) for kind in ("train", "test")}
        """The newest episodes of each kind."""
        self.is_verbose = True
        """True if each episode is logged."""
        self.limit, self._preprocessor = limit_of(max_samples_per_episode), obs_preprocessor
        self._signal: int | None = None  # first signal during a loop
        self._cpus = cpus
        self._is_stopped, self._is_resting, self._is_paced, self._is_expert = False, True, is_paced, False
        paths = (None, None) if url is None else (model_path, model_path_history)
        self._files = ModelFiles(*paths, model_history, role="worker")  # a worker without a server only reads
        try:
            self._load_file(model_path, is_alone=url is None)
            self.client: Client | None = None
            """Client of the server; None for a worker without a server."""
            self._recorder = Recorder()
            self._follower: ModelFollower | None = None
            if url is not None:
                self._connect(url, timeout, topic, recording, table=table, keys=keys, name=name)
                self.node.program = self.stats
        except BaseException:
            self._files.close()
            raise

    def _actor_of(self, policy: Any, device: str | None) -> Acts:
        if callable(getattr(policy, "act", None)) and not isinstance(policy, type):
            return actor_of(policy, device)
        actor = policy(observation_space=self.env.observation_space, action_space=self.env.action_space)
        return actor_of(actor, device)

    def _load_file(self, path: str | Path | None, is_alone: bool) -> None:
        """Load the model of the file, if the file exists. Raises ParameterError if server and file are missing."""
        if path is None or not isinstance(self.actor, Learns):
            return
        if Path(path).exists():
            body = read_model(path)
            self._check_model(body)
            self.actor.adopt(self.actor.prepare(body, 0))
        elif is_alone:
            expected = "an existing file of a model, since this worker has no server (url=None)"
            raise ParameterError("model_path", str(path), expected)

    def _check_model(self, body: bytes) -> None:
        check_actions(body, self.env.action_space)

    def _connect(
        self, url: str | Sequence[str], timeout: float, topic: str, recording: Recording, **options: Any
    ) -> None:
        urls = [url] if isinstance(url, str) else random.sample(url, len(url))
        turns, interval = itertools.cycle(urls), min(CONNECT_INTERVAL, timeout / len(urls))
        on_full: Any = "block" if self._is_paced else "skip"
        self.client = connected(
            lambda patience: connect(next(turns), timeout=patience, on_full=on_full, **options),
            " or ".join(urls), timeout, interval,
        )  # fmt: skip
        try:
            if isinstance(self.actor, Learns):
                check_model_topic(self.client.parameters, topic)
            self._recorder = recording(self.client)
            if isinstance(self.actor, Learns):
                model = self.client.model(topic)
                self._follower = ModelFollower(model, self.actor, self._files.keep, self._check_model)
        except BaseException:
            self.client.close(0.0)
            raise

    @property
    def node(self) -> Client:
        """Node for pages of the process: the client."""
        assert self.client is not None, "a worker without a server has no pages"
        return self.client

    def stats(self) -> WorkerStats:
        """Return the worker's counts and step times, as /metrics shows them."""
        times = copy.deepcopy(times_of(self.env))
        late = {} if times is None else times.late
        return WorkerStats(self.episodes, self.steps, self.tests, self.version, times, late)

    # ---------------------------------------------------------------------------------------------- one episode

    def act(self, obs: Any, test: bool = False) -> Any:
        """Return the policy's action for an observation, in the form of the environment's action space."""
        seen = obs if self._preprocessor is None else self._preprocessor(obs)
        return shaped_action(self.actor.act(seen, test=test), self.env.action_space)

    def reset(self, collect_samples: bool) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; return its first observation and info."""
        action = default_action(self.env)
        self._is_resting = False
        obs, info = reset_result(self.env.reset())
        if collect_samples:
            self._recorder.begin(action, obs, info)
        return obs, info

    def step(
        self, obs: Any, test: bool, collect_samples: bool, last_step: bool = False
    ) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Act once. With `last_step` an episode that is not over is truncated.

        Returns:
            (obs, reward, terminated, truncated, info), as in Gymnasium.
        """
        action = self.act(obs, test=test)
        next_obs, reward, terminated, truncated, info = step_result(self.env.step(action))
        truncated = truncated or (last_step and not terminated)
        if collect_samples:
            self.steps += 1
            self._recorder.record(EnvStep(obs, action, reward, terminated, truncated, next_obs, info, self.version))
        return next_obs, reward, terminated, truncated, info

    def run_episode(
        self,
        max_samples: float | None = None,
        train: bool = False,
        before_step: Callable[[int], object] = lambda length: None,
    ) -> EpisodeResult:
        """Run one episode and return its result; with `train` its samples are recorded.

        `before_step` is called before each training step, with the number of steps so far.
        """
        limit = self.limit if max_samples is None else limit_of(max_samples)
        obs, _ = self.reset(train)
        length, returned, is_over = 0, 0.0, False
        while not (is_over or self.is_stopping):
            if train:
                before_step(length)
                self.follow()
            obs, reward, terminated, truncated, _ = self.step(obs, not train, train, length + 1 >= limit)
            length, returned, is_over = length + 1, returned + float(reward), terminated or truncated
        result = EpisodeResult(length, returned, self.version, is_over)
        self.end_recording(result, "train" if train else "test")
        return result

    def end_recording(self, result: EpisodeResult, kind: str) -> None:
        """End the recording of an episode, also of an incomplete one; log and report the result of a complete one."""
        if kind == "train":
            self._recorder.end()
            self.episodes += result.is_complete
        if not result.is_complete:
            return
        self.results[kind].append(result)
        if self.is_verbose:
            facts = (kind, result.returned, result.length, result.version)
            _log.info("%s episode: return %.2f in %d steps, by model %d", *facts)
        self.tests += kind == "test"
        if self.client is not None and kind == "test":
            self._recorder.record_test_episode(result.length, result.returned)
            self.client.report(result.length, result.returned, kind="test")

    def follow(self) -> None:
        """Switch to the newest model if a newer one is ready; returns at once."""
        if self._follower is not None and not self._is_expert:
            ready = self._follower.newest()
            if ready is not None:
                self._adopt(ready, self._follower)

    def _adopt(self, ready: PreparedModel, follower: ModelFollower) -> None:
        assert isinstance(self.actor, Learns)
        self.actor.adopt(ready.prepared)
        self.version = follower.version = ready.version

    # --------------------------------------------------------------------------------------------- many episodes

    def run(
        self,
        test_episode_interval: int = 0,
        nb_episodes: float = np.inf,
        *,
        test_pause: float = np.inf,
        is_expert: bool = False,
        on_episode: Callable[[str, EpisodeResult], object] = lambda kind, result: None,
    ) -> None:
        """Run training episodes until the run is finished, `close` is called or a signal arrives.

        Blocks. In the main thread SIGINT and SIGTERM end the loop in order: the step ends, samples are sent, and the
        device gets its default action; then the signal has its usual effect.

        Args:
            test_episode_interval: A test episode runs before the training episodes 0, n, 2 n and so on; 0 runs none.
            nb_episodes: Training episodes to run.
            test_pause: Seconds after a test episode until a worker that waits for learners runs another one.
            is_expert: True keeps the present model all the time, and runs no test episodes.
            on_episode: Called with "train" or "test", and the result of the episode.
        """
        self._is_expert, count, tested_at = is_expert, 0, time.monotonic()

        def test() -> None:
            nonlocal tested_at
            self.follow()
            on_episode("test", self.run_episode(train=False))
            tested_at = time.monotonic()

        with self.until_stopped():
            while count < nb_episodes and not self.is_stopping:
                if test_episode_interval and count % test_episode_interval == 0 and not is_expert:
                    test()
                for _ in self._pause():
                    if time.monotonic() - tested_at >= test_pause and not is_expert:
                        test()
                if not self.is_stopping:
                    on_episode("train", self.run_episode(train=True))
                    count += 1

    def _pause(self) -> Iterator[None]:
        """Yield between pauses of a paced worker while learners are behind; an episode without room would be wasted."""
        while self._is_paced and not self.is_stopping and self.client is not None and self.client.room <= 0:
            with contextlib.suppress(MemoireError):
                self.client.update(UPDATE_TIMEOUT)
            yield
            time.sleep(PACE_INTERVAL)

    def await_model(self, timeout: float) -> bool:
        """Wait for a newer model than the one that acts. Return True if one is ready, False after `timeout`."""
        return self._follower is not None and self._follower.wait(self.version, timeout)

    # ------------------------------------------------------------------------------------------------- the worker's end

    @property
    def is_stopping(self) -> bool:
        """True if the loop has to end: a signal arrived, `stop` was called, or the run is finished."""
        if self._is_stopped or self._signal is not None:
            return True
        client = self.client
        return client is not None and (client.closed or client.finished)

    def stop(self) -> None:
        """End the loop after the current step. Safe from any thread, and in signal handlers."""
        self._is_stopped = True

    @contextlib.contextmanager
    def until_stopped(self) -> Iterator[None]:
        """Run a loop in this block: signals end it in order. At its end samples are sent and the device rests."""
        if self._cpus is not None:
            pin(self._cpus)
        with self._delay_signals():
            try:
                yield
            finally:
                self.flush()

    @contextlib.contextmanager
    def _delay_signals(self) -> Iterator[None]:
        """Delay the first SIGINT or SIGTERM in the main thread to the end of the block, where it has its usual effect.

        Raises:
            KeyboardInterrupt: SIGINT arrived.
            SystemExit: SIGTERM arrived; the status is 143.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            raise SystemExit(128 + self._signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:  # the environment may never return
            raise KeyboardInterrupt
        self._signal = number

    def flush(self, *, is_end: bool = True) -> None:
        """Give the device its default action, and send the recorded samples; `is_end` also ends the current episode."""
        try:
            self._rest()
        finally:
            if self.client is None or not self.client.closed:
                if is_end:
                    self._recorder.end()
                self._recorder.flush()

    def _rest(self) -> None:
        if not self._is_resting:
            self._is_resting = True
            send_default_action(self.env)

    def close(self, timeout: float | None = None) -> bool:
        """Send all samples and close the client. Return True if all were delivered. The environment stays open."""
        self.stop()
        self.flush()
        try:
            return self.client is None or self.client.closed or self.client.close(timeout)
        finally:  # the thread that waits for models ends with the client
            if self._follower is not None:
                self._follower.close()
            self._files.close()


def try_policy(
    env: Any, policy: Any, path: str | Path, episodes: int = 10, *, device: str | None = "cpu"
) -> list[EpisodeResult]:
    """Run test episodes with a model from a file, without a server; return their results.

    Raises:
        ParameterError: the file does not exist.
        DataError, WrongModel: the file holds something else.
    """
    with RolloutWorker(env, policy, device=device, model_path=path) as worker, worker.until_stopped():
        return [worker.run_episode() for _ in range(episodes) if not worker.is_stopping]


WAIT_INTERVAL: Final = 0.1
"""Seconds after which a worker that waits for a model checks if it has to end."""


def run_synchronous(
    worker: RolloutWorker,
    test_episode_interval: int = 0,
    nb_steps: float = np.inf,
    initial_steps: int = 1,
    max_steps_per_update: float = np.inf,
    end_episodes: bool = True,
) -> None:
    """Run training steps that wait for the trainer: `initial_steps` first, then at most `max_steps_per_update` a model.

    Args:
        test_episode_interval: As in `RolloutWorker.run`.
        nb_steps: Training steps to make.
        end_episodes: True waits only between episodes; False also within them.
    """
    began, version, steps = worker.steps, 0, 0  # steps by the present model

    def before_step(length: int) -> None:
        nonlocal version, steps
        limit = max_steps_per_update if version else max(initial_steps, max_steps_per_update)
        if steps >= limit and not (end_episodes and length):
            _await_model(worker)
        worker.follow()
        if worker.version != version:
            version, steps = worker.version, 0
        steps += 1

    with worker.until_stopped():
        while worker.steps - began < nb_steps and not worker.is_stopping:
            if test_episode_interval and worker.episodes % test_episode_interval == 0:
                worker.run_episode(train=False)
            worker.run_episode(min(worker.limit, began + nb_steps - worker.steps), True, before_step)


def _await_model(worker: RolloutWorker) -> None:
    """Send the recorded samples, and wait for a newer model."""
    worker.flush(is_end=False)
    while not worker.is_stopping and not worker.await_model(WAIT_INTERVAL):
        pass


def step_seconds(worker: RolloutWorker, nb_steps: int, test: bool = False) -> dict[str, float]:
    """Measure steps of a worker's policy without samples: number ("steps") and seconds of each ("mean", "max")."""
    times: list[float] = []
    with worker.until_stopped():
        obs, _ = worker.reset(False)
        while len(times) < nb_steps and not worker.is_stopping:
            began = time.perf_counter()
            obs, _, terminated, truncated, _ = worker.step(obs, test, False)
            times.append(time.perf_counter() - began)
            if terminated or truncated:
                obs, _ = worker.reset(False)
    return {"steps": float(len(times)), "mean": float(np.mean(times or [np.nan])), "max": max(times, default=np.nan)}
