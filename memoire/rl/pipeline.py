"""Pipeline of a run in one file: environment, policy, agent, training. `python -m memoire.rl up FILE` starts the run.

    pipeline = rl.Pipeline(run="a", env=..., policy=..., agent=..., training=rl.Training(...))

Every process of the run reads the file and takes its part. The server takes the table, workers take the environment and
the policy, and the trainer takes the agent.

A file of an on-policy run has these names, for collectors, inference nodes and observers:

collection = rl.Collection(envs=...)      `add_page` steps its environments; `infer` acts for collectors without a
policy def run_episode(start, ask, options)      `observe` calls it for an agent

`run_cluster` starts the processes of a pipeline on this machine, and restarts a process that dies, until the run ends:

server ◀── trainer        workers report the returns of their test episodes; the launcher ends the run if the goal
   ▲────── workers        is reached, the trainer's epochs are over, or the time limit has passed
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from memoire import Inference, Schema, Table, Uniform
from memoire.building import Keys, KeysLike, Sampler, whole
from memoire.errors import ParameterError, WrongType
from memoire.launching import Child, Launcher, LocalRun, Nodes, print_line, with_keys

from .policies import TOPIC, MlpPolicy, Policy, observations_of, policy_rows, rollout_schema
from .training import MAX_LEAD_STEPS, Training, check_gamma

TABLE: Final = "replay"


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Settings of the collectors of an on-policy learner; see docs/on-policy.md.

    Args:
        envs: Function that makes a vector environment, which resets itself.
        policy: Function that makes the policy, an object with `load(body, version)`; see `Policy`.
        groups: Vector environments of one collector. While one waits for its actions, the other groups step.
        columns: Columns of the learner's table that the policy returns beside action and logp.
        seed: Seed of environments and sampled actions; None takes entropy from the system.
    """

    envs: Callable[[], Any]
    policy: Callable[[], Policy] = MlpPolicy
    groups: int = 1
    columns: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        whole("groups", self.groups, 1)

    def make_envs(self) -> list[Any]:
        """Make the vector environments of one collector."""
        return [self.envs() for _ in range(self.groups)]

    def schema(self) -> Schema:
        """Return the schema of the learner's table; makes a vector environment for it, and closes that."""
        with contextlib.closing(self.envs()) as envs:
            return rollout_schema(envs, self.columns)

    def node(self, endpoint: str, url: str, *, topic: str = TOPIC, keys: KeysLike = None) -> Inference:
        """Make an inference node that acts by the newest model of the server or proxy at `url`."""
        inputs, outputs = policy_rows(self.schema())

        def load(body: bytes) -> Any:
            policy: Any = self.policy()
            policy.load(body, 0)
            return policy

        def act(columns: Mapping[str, Any], policy: Any) -> dict[str, Any]:
            actions = policy.act(observations_of(inputs, columns))
            return {root: actions[root] for root in outputs.roots}

        return Inference(endpoint, inputs, outputs, act, load, topic, url, keys=keys)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Settings of the workers of a pipeline.

    Args:
        workers: Number of worker processes on this machine.
        test_episode_interval: Training episodes between two test episodes; 0 runs no test episodes.
        test_pause: Seconds after a test episode until a worker that waits for the trainer runs another one.
        max_samples_per_episode: Steps after which an episode is truncated.
        obs_preprocessor: Called with each observation before the policy sees it.
        device: Device of torch on which the policy acts.
        model_history: One in `model_history` models is kept as a file beside the worker's newest; 0 keeps none.
        is_paced: True if a worker waits between two episodes while the trainer is behind. Choose False for devices and
            for environments that are as slow as the trainer.
    """

    workers: int = 1
    test_episode_interval: int = 0
    test_pause: float = np.inf
    max_samples_per_episode: float = np.inf
    obs_preprocessor: Callable[[Any], Any] | None = None
    device: str = "cpu"
    model_history: int = 0
    is_paced: bool = True

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ParameterError("workers", self.workers, "at least 0")
        if not self.test_pause >= 0.0:
            raise ParameterError("test_pause", self.test_pause, "at least 0 seconds")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Goal of a run: the mean return that the newest test episodes of all workers have to reach.

    Args:
        test_return: Mean return that ends the run.
        episodes: Number of the newest test episodes in this mean.
    """

    test_return: float
    episodes: int = 5

    def is_reached(self, returns: list[float]) -> bool:
        """Return True if the newest of these test returns, ordered oldest first, reach the goal."""
        return len(returns) >= self.episodes and float(np.mean(returns[-self.episodes :])) >= self.test_return


@dataclass(frozen=True)
class ReplayTable:
    """Settings of a table of whole episodes, from which a trainer draws. The environment gives the table's schema."""

    capacity: int
    sampler: Sampler
    fields: dict[str, Any]

    @property
    def discount(self) -> Any:
        """The user's discount: a number, or one per reward dimension; None if the user set none."""
        parameters = self.fields.get("parameters")
        candidates = [self.fields.get("discount"), None if parameters is None else parameters.discount]
        discount = next((each for each in candidates if each is not None), None)
        return discount[0] if isinstance(discount, tuple) and len(discount) == 1 else discount

    def table(self, env: Any, discount: Any, training: Training, is_paced: bool) -> Table:
        """Make the table for an environment. Paced workers record at most `MAX_LEAD_STEPS` untrained steps.

        Args:
            discount: Discount of the table; None takes the one in `fields`, or else the default of `Table`.
        """
        fields = self.fields if discount is None else {**self.fields, "discount": discount}
        if is_paced:
            ratio = training.batch_size * training.max_training_steps_per_env_step
            fields = {
                "min_size": training.start_training, "samples_per_insert": ratio,
                "samples_per_insert_tolerance": ratio * MAX_LEAD_STEPS + 4 * training.batch_size,
            } | fields  # fmt: skip
        return Table(Schema.from_env(env), storage="episodes", capacity=self.capacity, sampler=self.sampler, **fields)


def replay(capacity: int = 1_000_000, sampler: Sampler | None = None, **fields: Any) -> ReplayTable:
    """Return the settings of a run's table: room for `capacity` steps, and the sampler (None samples uniformly).

    Args:
        fields: Further arguments of `memoire.Table`, such as multi_step=3.
    """
    return ReplayTable(capacity, sampler or Uniform(), fields)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Description of a whole run: environment, policy, agent, table, training, workers and goal.

    Args:
        run: Name of the run and of the folder of its files.
        folder: Folder in which the run's folder is made.
        env: Makes the environment; a class, a function, or a `partial`. `memoire.rl try` adds its own arguments.
        policy: Called with observation_space and action_space; makes the policy.
        agent: Called with observation_space, action_space and device; makes the agent. An agent that takes `policy=`,
            `seed=` or `gamma=` also gets the policy, the seed and the table's discount.
        table: Settings of the server's table. Without a discount in them, the agent's default `gamma` is used.
        training: Settings of the trainer.
        work: Settings of the workers.
        goal: Goal that ends the run; None runs until all epochs are over.
        keys: Folder of the cluster's keys; see docs/security.md.
        device: Device of torch on which the agent learns.
        seed: Seed of the first weights, environments and draws; None takes entropy from the system.

    Raises:
        ParameterError: table and agent have different discounts.
    """

    run: str
    env: Callable[..., Any]
    policy: Callable[..., Any]
    agent: Callable[..., Any]
    folder: str = "runs"
    table: ReplayTable = field(default_factory=replay)
    training: Training = field(default_factory=Training)
    work: Work = field(default_factory=Work)
    goal: Goal | None = None
    keys: str | None = None
    device: str = "cpu"
    seed: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", os.path.abspath(self.folder))
        gamma = getattr(self.agent, "keywords", {}).get("gamma")
        if self.table.discount is not None:
            check_gamma(SimpleNamespace(gamma=gamma), np.ravel(self.table.discount).tolist())

    @property
    def path(self) -> Path:
        """Folder of this run's files."""
        return Path(self.folder) / self.run

    def spaces(self) -> tuple[Any, Any]:
        """Return the observation space and the action space; makes an environment for it, and closes that."""
        with contextlib.closing(self.env()) as env:
            return env.observation_space, env.action_space

    def make_agent(self) -> Any:
        """Make the agent; makes and closes an environment for its spaces."""
        observations, actions = self.spaces()
        arguments = {"observation_space": observations, "action_space": actions, "device": self.device}
        if takes_keyword(self.agent, "policy"):
            arguments["policy"] = self.policy
        if takes_keyword(self.agent, "seed") and self.seed is not None:
            arguments["seed"] = self.seed
        if takes_keyword(self.agent, "gamma") and self.table.discount is not None:
            arguments["gamma"] = self.table.discount
        return self.agent(**arguments)

    def make_table(self) -> Table:
        """Make the server's table; makes and closes an environment for its schema."""
        parameter = inspect.signature(self.agent).parameters.get("gamma")
        gamma = None if parameter is None or not isinstance(parameter.default, Real) else parameter.default
        with contextlib.closing(self.env()) as env:
            discount = gamma if self.table.discount is None else None
            return self.table.table(env, discount, self.training, self.work.is_paced)


def takes_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function takes this keyword and is not a `partial` that already sets it."""
    if isinstance(function, functools.partial) and name in function.keywords:
        return False
    return name in inspect.signature(function).parameters


def seed_process(seed: int | None) -> None:
    """Seed the generators of Python, NumPy and torch (if imported); None leaves them unchanged."""
    if seed is None:
        return
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


IN_FILES: Final[dict[str, tuple[Any, str]]] = {
    "pipeline": (Pipeline, "pipeline = rl.Pipeline(...)"),
    "collection": (Collection, "collection = rl.Collection(...)"),
    "run_episode": (Callable, "def run_episode(start, ask, options)"),
}
"""Names that a Python file of a run may define: class and example line of each."""


def read_file(path: str | os.PathLike[str], name: str) -> Any:
    """Run a Python file and return its object of this name, one of `IN_FILES`.

    Raises:
        ParameterError: the file is missing, or does not define this name.
    """
    kind, line = IN_FILES[name]
    value = runpy.run_path(os.fspath(path), run_name="__memoire__").get(name) if Path(path).is_file() else None
    if not isinstance(value, kind):
        raise ParameterError("FILE", os.fspath(path), f"a Python file that has `{line}`")
    return value


MAX_SHOWN: Final = 60
"""Most characters of a value in an error message."""


class Partial(functools.partial[Any]):
    """Callable with some arguments already set. A call adds further arguments; errors of the call show all."""

    __slots__ = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the callable with all arguments.

        Raises:
            WrongType: an argument is missing, unknown or one too much.
        """
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as error:
            keywords = {**self.keywords, **kwargs}
            _check(self.func, (*self.args, *args), keywords, is_complete=True, cause=error)
            raise


def partial(func: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Return a callable with some of its arguments already set; a later call adds the other arguments.

    A keyword's value may be `partial(None, ...)`; its callable is then the default that `func` has for this keyword.
    The result can be pickled if its callable and arguments can.

    Raises:
        WrongType: `func` does not accept these arguments.
    """
    if func is None:
        return Partial(_Unnamed, *args, **kwargs)
    if not callable(func):
        raise WrongType("func", "a class or another callable", type(func).__name__)
    for name, value in kwargs.items():
        if isinstance(value, Partial) and value.func is _Unnamed:
            kwargs[name] = partial(_default_class(func, name), *value.args, **value.keywords)
    _check(func, args, kwargs, is_complete=False)
    return Partial(func, *args, **kwargs)


class _Unnamed:
    """Placeholder for the default class of a keyword of the outer partial."""


def _default_class(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the class that is a callable's default for an argument; raises WrongType if no class is."""
    parameter = inspect.signature(func).parameters.get(name)
    if parameter is None or not callable(parameter.default):
        raise WrongType(name, f"a partial of a class, since {_name(func)} has no class as its default", "partial(None)")
    default: Callable[..., Any] = parameter.default
    return default


def _check(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_complete: bool,
    cause: Exception | None = None,
) -> None:
    """Raise WrongType if the signature does not accept these arguments. A callable without signature is not checked."""
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        return
    try:
        (signature.bind if is_complete else signature.bind_partial)(*args, **kwargs)
    except TypeError as error:
        received = ", ".join([*map(_shorten, args), *(f"{name}={_shorten(value)}" for name, value in kwargs.items())])
        expected = f"called as {_name(func)}{signature} ({error})"
        raise WrongType(_name(func), expected, f"({received})", "No object was created.") from cause


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__qualname__", type(func).__qualname__)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


CHECK_INTERVAL: Final = 0.25
"""Seconds between two checks of the run."""
PRINT_INTERVAL: Final = 10.0
FINISH_TIMEOUT: Final = 30.0
"""Seconds that the trainer and the workers get for an orderly end."""
PROGRAM: Final = "memoire.rl"


@dataclass(frozen=True)
class PlannedKill:
    """Process that is killed on purpose, after `updates` training steps."""

    name: str
    updates: int


ACCIDENTS: Final = (PlannedKill("worker-0", 3000), PlannedKill("trainer", 4500))
"""Accidents of `--accidents`: about half way through a run of ten thousand training steps."""


@dataclass
class Progress:
    """Progress of a run, as its processes report it."""

    goal: Goal | None
    tests: list[tuple[float, float]] = field(default_factory=list)
    """Test episodes of all workers, oldest first: (seconds since the start, return)."""
    _seen: dict[str, int] = field(default_factory=dict)

    def take(self, workers: list[Child], now: float) -> None:
        """Add new returns of test episodes from the workers' reports. A restarted worker counts from 0 again."""
        for child in workers:
            reports = child.reports
            count, returns = int(reports.get("tests", 0)), list(reports.get("test_returns", ()))
            life = f"{child.name}:{reports.get('pid')}"
            new = count - self._seen.get(life, 0)
            if new > 0:
                self.tests += [(now, float(each)) for each in returns[-new:]]
            self._seen[life] = count

    @property
    def returns(self) -> list[float]:
        """Returns of all test episodes, oldest first."""
        return [each for _, each in self.tests]

    @property
    def is_won(self) -> bool:
        """True if the goal is reached."""
        return self.goal is not None and self.goal.is_reached(self.returns)

    def mean(self) -> str:
        """Return the mean return of the newest test episodes, as text."""
        count = self.goal.episodes if self.goal else 5
        newest = self.returns[-count:]
        return f"{np.mean(newest):.1f} over {len(newest)} episodes" if newest else "unknown"


@dataclass(frozen=True, kw_only=True)
class PipelineNodes(Nodes):
    """Server of a pipeline's cluster."""

    file: str
    """Path of the Python file that defines the pipeline."""

    def server(self, number: int) -> tuple[str, ...]:
        """Return the module and arguments of the server process."""
        return (PROGRAM, "serve", self.file)


class Run:
    """Launcher of a pipeline's server, trainer and workers on this machine.

    Args:
        path: Path of the Python file that defines the pipeline.
        seconds: Time limit after which the run stops; None sets no limit.
        accidents: Processes that are killed on purpose, in this order.
        dashboard: True if the cluster starts a dashboard.
        say: Function that prints a line.
    """

    def __init__(
        self,
        path: str,
        *,
        seconds: float | None = None,
        accidents: Sequence[PlannedKill] = (),
        dashboard: bool = True,
        say: Callable[[str], object] = print_line,
    ) -> None:
        self.path = os.path.abspath(path)
        self._limit = np.inf if seconds is None else seconds
        self._accidents = list(accidents)
        self._has_dashboard, self._say = dashboard, say
        self._workers: list[Child] = []

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline that the file defines; read at the first access."""
        pipeline: Pipeline = read_file(self.path, "pipeline")
        return pipeline

    @functools.cached_property
    def _progress(self) -> Progress:
        return Progress(self.pipeline.goal)

    def run(self) -> int:
        """Run all processes until the end; return 0 on success (goal or last epoch reached), 1, or 128 + n after signal
        n.
        """
        with Launcher(lambda name, line: self._say(f"{name}: {line}"), say=self._say) as launcher:
            began = time.monotonic()
            run = LocalRun(launcher, PipelineNodes(proxies=0, file=self.path), dashboard=self._has_dashboard)
            # This process and the server read the file at the same time, since each process may import torch.
            if not run.begin(lambda: self.pipeline) or run.cluster is None:
                return 128 + (launcher.stop_signal or signal.SIGTERM)
            (url,) = run.cluster.endpoints
            self._say(f"server at {url}")
            run.show()
            trainer = self._start(launcher, "trainer", "train", url)
            self._workers = [
                self._start(launcher, f"worker-{number}", "work", url, "--rank", str(number))
                for number in range(self.pipeline.work.workers)
            ]
            launcher.supervise([trainer, *self._workers])
            is_over = self._watch(run, launcher, trainer, began)
            status = self._sum_up(time.monotonic() - began, is_over, launcher.stop_signal)
            run.finish([trainer, *self._workers], FINISH_TIMEOUT)  # the trainer saves, and then the workers end
        return status

    def _start(self, launcher: Launcher, name: str, verb: str, url: str, *options: str) -> Child:
        role = {"train": "learner", "work": "actor"}[verb]
        return launcher.start(name, PROGRAM, verb, url, self.path, *options, *with_keys(self.pipeline.keys, role))

    def _watch(self, run: LocalRun, launcher: Launcher, trainer: Child, began: float) -> bool:
        """Watch the run until the end. Return False if a signal or the time limit ended the run too early."""
        printed, is_over = began, False

        def goes_on() -> bool:
            nonlocal printed, is_over
            now = time.monotonic()
            self._progress.take(self._workers, now - began)
            self._kill_by_accident(launcher, trainer)
            if now - printed >= PRINT_INTERVAL:
                printed = now
                self._say(self._line(trainer, now - began))
            is_whole = all(child.process.poll() is None for child in launcher.children)  # first restart the dead
            if self._progress.is_won and not self._accidents and is_whole:
                is_over = True
            elif trainer.status == 0:
                is_over = self.pipeline.goal is None
            else:
                return now - began < self._limit
            return False

        run.watch(goes_on, CHECK_INTERVAL)
        return is_over

    def _kill_by_accident(self, launcher: Launcher, trainer: Child) -> None:
        while self._accidents and int(trainer.reports.get("updates", 0)) >= self._accidents[0].updates:
            accident = self._accidents.pop(0)
            child = next(each for each in launcher.children if each.name == accident.name)
            self._say(f"killing {accident.name} on purpose, after {trainer.reports['updates']} training steps")
            child.process.kill()
            child.process.wait()

    def _line(self, trainer: Child, seconds: float) -> str:
        reports = trainer.reports
        return (
            f"{seconds:5.0f} s: {reports.get('samples', 0)} samples, {reports.get('updates', 0)} training steps, "
            f"mean test return {self._progress.mean()}, {len(self._progress.tests)} test episodes in all"
            + (f"; the trainer is {reports['waits']}" if reports.get("waits") else "")
        )

    def _sum_up(self, seconds: float, is_over: bool, stop_signal: int | None) -> int:
        goal, mean = self.pipeline.goal, self._progress.mean()
        if stop_signal:
            return 128 + stop_signal
        if goal is None:
            self._say(f"finished after {seconds:.1f} s: mean test return {mean}")
            return 0 if is_over else 1
        word = "reached" if is_over else "not reached"
        suffix = "" if not self._accidents else f"; {len(self._accidents)} planned accidents did not happen"
        if not is_over and not self._progress.tests:
            suffix += f". If run {self.pipeline.run!r} was already finished, start it again with --fresh"
        self._say(
            f"goal {word} after {seconds:.1f} s: mean test return {mean}, goal {goal.test_return:g} over "
            f"{goal.episodes} episodes{suffix}. Models: {self.pipeline.path / 'model.safetensors'}"
        )
        return 0 if is_over else 1


def keys_of(keys: str | None, pipeline: Pipeline, role: str) -> Any:
    """Return the keys of a process: `keys` if set, else the keys of its role in the pipeline's folder of keys."""
    return keys if keys is not None else Keys.from_setting(pipeline.keys, role)


def folder_of(pipeline: Pipeline) -> Path:
    """Make the folder of a run's files and return its path."""
    pipeline.path.mkdir(parents=True, exist_ok=True)
    return pipeline.path
