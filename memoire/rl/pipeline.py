"""A run in one file: environment, what acts, what learns, and how; `python -m memoire.rl up FILE` starts it.

    pipeline = rl.Pipeline(run="a", env=..., policy=..., agent=..., training=rl.Training(...))

Every process of the run reads the file, and takes what it needs: a server the table, workers the environment and the
policy, the trainer the agent.

Collectors, inference nodes and observers of an on-policy run take from a file:

collection = rl.Collection(envs=...)      collect steps these; infer acts for collectors that have no policy
def run_episode(start, ask, options)      observe runs it for an agent

`up` starts a pipeline's processes on this machine, again when they die, until the goal:

server ◀── trainer        workers say what their test episodes returned; this process ends the run when the goal is
   ▲────── workers        reached, the trainer's epochs are over, or time is up
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
from memoire.building import Given, Keys, Sampler, whole
from memoire.errors import ParameterError, WrongType
from memoire.launching import Child, Launcher, LocalRun, Nodes, say, with_keys

from .policies import TOPIC, MlpPolicy, Policy, observations_of, policy_rows, rollout_schema
from .training import LEAD, Training, check_gamma

TABLE: Final = "replay"


@dataclass(frozen=True, kw_only=True)
class Collection:
    """How collectors of an on-policy learner act; see docs/on-policy.md.

    Args:
        envs: Makes a vector environment that resets itself.
        policy: Makes what acts, with `load(body, version)`; see `Policy`.
        groups: Vector environments of one collector. Others step while one waits for its actions.
        columns: What the policy returns beside action and logp, as the learner's table has it.
        seed: Of environments and samples; None takes entropy from the system.
    """

    envs: Callable[[], Any]
    policy: Callable[[], Policy] = MlpPolicy
    groups: int = 1
    columns: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        whole("groups", self.groups, 1)

    def make_envs(self) -> list[Any]:
        """The vector environments of a collector."""
        return [self.envs() for _ in range(self.groups)]

    def schema(self) -> Schema:
        """Of the learner's table."""
        with contextlib.closing(self.envs()) as envs:
            return rollout_schema(envs, self.columns)

    def node(self, endpoint: str, url: str, *, topic: str = TOPIC, keys: Given = None) -> Inference:
        """An inference node that acts by the models that a server, or a proxy, has."""
        inputs, outputs = policy_rows(self.schema())

        def load(body: bytes) -> Any:
            policy: Any = self.policy()
            policy.load(body, 0)
            return policy

        def act(columns: Mapping[str, Any], policy: Any) -> dict[str, Any]:
            found = policy.act(observations_of(inputs, columns))
            return {root: found[root] for root in outputs.roots}

        return Inference(endpoint, inputs, outputs, act, load, topic, url, keys=keys)


@dataclass(frozen=True, kw_only=True)
class Work:
    """How workers work.

    Args:
        workers: How many there are on this machine.
        test_episode_interval: Training episodes between two test episodes; 0 is no test episodes.
        test_pause: Seconds after a test episode until a worker that waits for the trainer runs another one.
        max_samples_per_episode: Steps after which an episode is truncated.
        obs_preprocessor: Called with each observation before the policy sees it.
        device: Where the policy acts.
        model_history: Each so many models one is kept beside a worker's; 0 keeps none.
        is_paced: Whether a worker waits between two episodes while the trainer is behind. False for devices, and for
            environments that are as slow as the trainer.
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
    """When a run is won: the newest test episodes of all workers return so much, in the mean.

    Args:
        test_return: The mean.
        episodes: Of how many.
    """

    test_return: float
    episodes: int = 5

    def is_reached(self, returns: list[float]) -> bool:
        """Whether these returns of test episodes, oldest first, are enough."""
        return len(returns) >= self.episodes and float(np.mean(returns[-self.episodes :])) >= self.test_return


@dataclass(frozen=True)
class ReplayTable:
    """A table of whole episodes, from which a trainer draws; its schema is read off the environment."""

    capacity: int
    sampler: Sampler
    fields: dict[str, Any]

    @property
    def discount(self) -> Any:
        """The discount that was given: a number, or one per reward dimension; None if none was."""
        parameters = self.fields.get("parameters")
        told = [self.fields.get("discount"), None if parameters is None else parameters.discount]
        found = next((each for each in told if each is not None), None)
        return found[0] if isinstance(found, tuple) and len(found) == 1 else found

    def table(self, env: Any, discount: Any, training: Training, is_paced: bool) -> Table:
        """The table for an environment. If workers are paced, they record `LEAD` steps at most for which no training
        steps were made yet.

        Args:
            discount: None takes that of `fields`, or a table's own.
        """
        fields = self.fields if discount is None else {**self.fields, "discount": discount}
        if is_paced:
            ratio = training.batch_size * training.max_training_steps_per_env_step
            fields = {
                "min_size": training.start_training, "samples_per_insert": ratio,
                "samples_per_insert_tolerance": ratio * LEAD + 4 * training.batch_size,
            } | fields  # fmt: skip
        return Table(Schema.from_env(env), storage="episodes", capacity=self.capacity, sampler=self.sampler, **fields)


def replay(capacity: int = 1_000_000, sampler: Sampler | None = None, **fields: Any) -> ReplayTable:
    """The table of a run: room for so many steps, and how they are drawn (all alike, if nothing is said).

    Args:
        fields: What else `memoire.Table` takes, such as multi_step=3.
    """
    return ReplayTable(capacity, sampler or Uniform(), fields)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Everything about a run.

    Args:
        run: Its name; names the folder of its files, too.
        folder: Where that folder is made.
        env: Makes the environment; a class, a function, or a `partial`. Called with what `try` is told, too.
        policy: Called with observation_space and action_space, makes what acts.
        agent: Called with observation_space, action_space and device, makes what learns. `policy=` is handed on to an
            agent that takes it, and so are `seed=` and, as `gamma=`, the table's discount.
        table: What the server holds. Its discount is the agent's `gamma`, unless it was told one.
        training, work, goal: How to train and work, and when the run is won; no goal is until all epochs are over.
        keys: A cluster's keys folder, see docs/security.md.
        device: Where the agent learns.
        seed: Of the first weights, environments and draws; None takes entropy from the system.

    Raises:
        ParameterError: table and agent were told different discounts.
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
        told = getattr(self.agent, "keywords", {}).get("gamma")
        if self.table.discount is not None:
            check_gamma(SimpleNamespace(gamma=told), np.ravel(self.table.discount).tolist())

    @property
    def path(self) -> Path:
        """The folder of this run's files."""
        return Path(self.folder) / self.run

    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space, of an environment that is made for it and closed."""
        with contextlib.closing(self.env()) as env:
            return env.observation_space, env.action_space

    def make_agent(self) -> Any:
        """What learns."""
        observations, actions = self.spaces()
        given = {"observation_space": observations, "action_space": actions, "device": self.device}
        if takes(self.agent, "policy"):
            given["policy"] = self.policy
        if takes(self.agent, "seed") and self.seed is not None:
            given["seed"] = self.seed
        if takes(self.agent, "gamma") and self.table.discount is not None:
            given["gamma"] = self.table.discount
        return self.agent(**given)

    def make_table(self) -> Table:
        """What the server holds."""
        parameter = inspect.signature(self.agent).parameters.get("gamma")
        gamma = None if parameter is None or not isinstance(parameter.default, Real) else parameter.default
        with contextlib.closing(self.env()) as env:
            discount = gamma if self.table.discount is None else None
            return self.table.table(env, discount, self.training, self.work.is_paced)


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether it takes a keyword that a `partial` has not given yet."""
    if isinstance(function, functools.partial) and name in function.keywords:
        return False
    return name in inspect.signature(function).parameters


def seed_process(seed: int | None) -> None:
    """Have Python's, NumPy's and torch's generators begin by this seed; None leaves them as they are."""
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
"""What processes take from a Python file, by name: of which class, and how a file makes it."""


def read_file(path: str | os.PathLike[str], name: str) -> Any:
    """What a Python file, which is run for that, has under a name of `IN_FILES`.

    Raises:
        ParameterError: there is no such file, or it has no such thing.
    """
    kind, line = IN_FILES[name]
    found = runpy.run_path(os.fspath(path), run_name="__memoire__").get(name) if Path(path).is_file() else None
    if not isinstance(found, kind):
        raise ParameterError("FILE", os.fspath(path), f"a Python file that has `{line}`")
    return found


MAX_SHOWN: Final = 60
"""Characters of a value that an error shows."""


class Partial(functools.partial[Any]):
    """A callable with some of its arguments. Calling it gives the others; what is wrong with them names all."""

    __slots__ = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """What the class makes of all arguments.

        Raises:
            WrongType: there are too many arguments, or too few, or an unknown one.
        """
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as error:
            given = {**self.keywords, **kwargs}
            _check(self.func, (*self.args, *args), given, is_complete=True, cause=error)
            raise


def partial(func: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """A class, or any callable, with some of its arguments; the others are given when it is called.

    A keyword's value may be `partial(None, ...)`: it is completed by the default that `func` has for this keyword.
    A partial can be pickled if its callable and arguments can.

    Raises:
        WrongType: `func` takes no such arguments.
    """
    if func is None:
        return Partial(_Unnamed, *args, **kwargs)
    if not callable(func):
        raise WrongType("func", "a class or another callable", type(func).__name__)
    for name, value in kwargs.items():
        if isinstance(value, Partial) and value.func is _Unnamed:
            kwargs[name] = partial(_default_of(func, name), *value.args, **value.keywords)
    _check(func, args, kwargs, is_complete=False)
    return Partial(func, *args, **kwargs)


class _Unnamed:
    """What stands for a class that the outer partial names."""


def _default_of(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    """What a callable has by default for an argument: a class that another partial completes."""
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
    """Refuse arguments that the callable does not take; whatever its signature cannot say is left to the call."""
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        return
    try:
        (signature.bind if is_complete else signature.bind_partial)(*args, **kwargs)
    except TypeError as error:
        received = ", ".join([*map(_shown, args), *(f"{name}={_shown(value)}" for name, value in kwargs.items())])
        expected = f"given arguments as in {_name(func)}{signature} ({error})"
        raise WrongType(_name(func), expected, f"({received})", "Nothing was made.") from cause


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__qualname__", type(func).__qualname__)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


TURN: Final = 0.25
"""Seconds between two looks at the run."""
PRINT_INTERVAL: Final = 10.0
FINISH_TIMEOUT: Final = 30.0
"""Seconds that the trainer and the workers have to end in order."""
PROGRAM: Final = "memoire.rl"


@dataclass(frozen=True)
class Accident:
    """A process that is killed on purpose, after so many training steps."""

    name: str
    updates: int


ACCIDENTS: Final = (Accident("worker-0", 3000), Accident("trainer", 4500))
"""Of `--accidents`: half way, about, of a run that takes ten thousand training steps."""


@dataclass
class Progress:
    """How a run stands, by what its processes report."""

    goal: Goal | None
    tests: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, return) of test episodes of all workers, in order."""
    _seen: dict[str, int] = field(default_factory=dict)

    def take(self, workers: list[Child], now: float) -> None:
        """Take in what workers report: the returns of their newest test episodes, and how many there were."""
        for child in workers:
            said = child.reports
            count, returns = int(said.get("tests", 0)), list(said.get("test_returns", ()))
            life = f"{child.name}:{said.get('pid')}"
            new = count - self._seen.get(life, 0)
            if new > 0:
                self.tests += [(now, float(each)) for each in returns[-new:]]
            self._seen[life] = count

    @property
    def returns(self) -> list[float]:
        """Of test episodes, oldest first."""
        return [each for _, each in self.tests]

    @property
    def is_won(self) -> bool:
        """Whether the goal is reached."""
        return self.goal is not None and self.goal.is_reached(self.returns)

    def mean(self) -> str:
        """The mean of the newest test episodes, as text."""
        count = self.goal.episodes if self.goal else 5
        newest = self.returns[-count:]
        return f"{np.mean(newest):.1f} over {len(newest)}" if newest else "none yet"


@dataclass(frozen=True, kw_only=True)
class PipelineNodes(Nodes):
    """The server of a pipeline."""

    file: str
    """That makes the pipeline."""

    def server(self, number: int) -> tuple[str, ...]:
        """Module and arguments of the server."""
        return (PROGRAM, "serve", self.file)


class Run:
    """A pipeline that runs on this machine.

    Args:
        path: Of the file that makes the pipeline.
        seconds: After so many the run is given up; None never.
        accidents: Processes to kill on purpose, in this order.
    """

    def __init__(
        self,
        path: str,
        *,
        seconds: float | None = None,
        accidents: Sequence[Accident] = (),
        dashboard: bool = True,
        say: Callable[[str], object] = say,
    ) -> None:
        self.path = os.path.abspath(path)
        self._limit = np.inf if seconds is None else seconds
        self._accidents = list(accidents)
        self._wants_dashboard, self._say = dashboard, say
        self._workers: list[Child] = []

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        """What the file makes."""
        pipeline: Pipeline = read_file(self.path, "pipeline")
        return pipeline

    @functools.cached_property
    def _progress(self) -> Progress:
        return Progress(self.pipeline.goal)

    def run(self) -> int:
        """Run it; 0 if the goal was reached (or all epochs are over, without one), 1 if not, 128 + n after signal n."""
        with Launcher(lambda name, line: self._say(f"{name}: {line}"), say=self._say) as launcher:
            began = time.monotonic()
            run = LocalRun(launcher, PipelineNodes(proxies=0, file=self.path), dashboard=self._wants_dashboard)
            # The pipeline is read while the server reads it, too: each of them imports torch for it, perhaps.
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
            run.finish([trainer, *self._workers], FINISH_TIMEOUT)  # the trainer saves, and workers end by that
        return status

    def _start(self, launcher: Launcher, name: str, verb: str, url: str, *more: str) -> Child:
        role = {"train": "learner", "work": "actor"}[verb]
        return launcher.start(name, PROGRAM, verb, url, self.path, *more, *with_keys(self.pipeline.keys, role))

    def _watch(self, run: LocalRun, launcher: Launcher, trainer: Child, began: float) -> bool:
        """Look on until it is over; whether it ended by itself."""
        printed, is_over = began, False

        def goes_on() -> bool:
            nonlocal printed, is_over
            now = time.monotonic()
            self._progress.take(self._workers, now - began)
            self._have_accidents(launcher, trainer)
            if now - printed >= PRINT_INTERVAL:
                printed = now
                self._say(self._line(trainer, now - began))
            is_whole = all(child.process.poll() is None for child in launcher.children)  # whoever died is started first
            if self._progress.is_won and not self._accidents and is_whole:
                is_over = True
            elif trainer.status == 0:
                is_over = self.pipeline.goal is None
            else:
                return now - began < self._limit
            return False

        run.watch(goes_on, TURN)
        return is_over

    def _have_accidents(self, launcher: Launcher, trainer: Child) -> None:
        while self._accidents and int(trainer.reports.get("updates", 0)) >= self._accidents[0].updates:
            accident = self._accidents.pop(0)
            child = next(each for each in launcher.children if each.name == accident.name)
            self._say(f"killing {accident.name} on purpose, after {trainer.reports['updates']} training steps")
            child.process.kill()
            child.process.wait()

    def _line(self, trainer: Child, seconds: float) -> str:
        said = trainer.reports
        return (
            f"{seconds:5.0f} s: {said.get('samples', 0)} samples, {said.get('updates', 0)} training steps, "
            f"test return {self._progress.mean()} episodes, {len(self._progress.tests)} test episodes in all"
            + (f"; the trainer is {said['waits']}" if said.get("waits") else "")
        )

    def _sum_up(self, seconds: float, is_over: bool, signalled: int | None) -> int:
        goal, mean = self.pipeline.goal, self._progress.mean()
        if signalled:
            return 128 + signalled
        if goal is None:
            self._say(f"over after {seconds:.1f} s; test return {mean} episodes")
            return 0 if is_over else 1
        word = "reached" if is_over else "not reached"
        left = "" if not self._accidents else f"; {len(self._accidents)} accidents did not happen in that time"
        if not is_over and not self._progress.tests:
            left += f". If {self.pipeline.run!r} was finished before, --fresh begins anew"
        self._say(
            f"goal {word} after {seconds:.1f} s: test return {mean} episodes, wanted {goal.test_return:g} over "
            f"{goal.episodes}{left}. Models: {self.pipeline.path / 'model.safetensors'}"
        )
        return 0 if is_over else 1


def keys_of(given: str | None, pipeline: Pipeline, role: str) -> Any:
    """Keys of a process: those it was told, or its role's in the pipeline's folder."""
    return given if given is not None else Keys.of(pipeline.keys, role)


def folder_of(pipeline: Pipeline) -> Path:
    """The folder of a run's files, which is made."""
    pipeline.path.mkdir(parents=True, exist_ok=True)
    return pipeline.path
