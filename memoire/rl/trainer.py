"""A trainer: takes samples from servers, trains an agent, publishes what acts, and saves where it is.

server ──samples──▶ experience ──batch──▶ agent.train      epoch over: checkpoint, model file, figures
▲                                          │
└───────────────models─────────────────────┘
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from memoire import Parameters, Reader
from memoire.building import ClosingContext, Condition, FileLock, Given, lock_folder, one_of
from memoire.errors import Closed, MemoireError, MemoireTimeout, ParameterError
from memoire.loggers import Logger

from . import weights
from .policies import TOPIC
from .recording import connected
from .saving import form_of, load_agent, save_agent, unsaved, warn_of_told
from .spaces import with_actions
from .step_clock import TrainerStanding
from .training import (
    LEAD,
    REASONS,
    Experience,
    RoundStats,
    Training,
    TrainingAgent,
    TrainingLoop,
    TrainingState,
    check_gamma,
    check_model_topic,
    finite,
)
from .weights import ModelFiles

_log = logging.getLogger(__name__)

COUNT_INTERVAL: Final = 0.25
"""Seconds between two questions to the servers how many steps were made."""
FIGURES_INTERVAL: Final = 1.0
"""Seconds between two times that a trainer tells servers how it stands."""
HEARD_WITHIN: Final = 2.5
"""Seconds until servers have heard figures: a reader tells them every two seconds."""
DRAW_TIMEOUT: Final = 60.0
"""Seconds that a batch may take once there were enough samples."""
CONNECT_TIMEOUT: Final = 60.0


def body_of(actor: Any) -> bytes:
    """What is published of an actor: a torch module, a state_dict, arrays by name, or an object with `state_dict()`."""
    if isinstance(actor, Mapping) and all(isinstance(each, np.ndarray) for each in actor.values()):
        return weights.pack(actor)
    import memoire.torch

    return memoire.torch.body_of(actor)


class DrawnBatches:
    """The experience of a trainer that draws from a table of servers: prioritized, prefetched.

    Args:
        reader: Of the table.
        batch_size: Samples of a batch.
        device: Where batches go as tensors; None leaves them in NumPy.
        on_parameters: Called with the table's parameters before the first batch, and when they have changed.
    """

    def __init__(
        self, reader: Reader, batch_size: int, device: Any = None,
        on_parameters: Callable[[Parameters], object] = lambda parameters: None,
    ) -> None:  # fmt: skip
        self._reader, self._size, self._device, self._on_parameters = reader, batch_size, device, on_parameters
        self._known: Parameters | None = None
        self._steps = self._first = -1  # of all workers, as servers said; -1 before they did
        self._changed = Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._count, name="memoire-trainer-counts", daemon=True)
        self._thread.start()

    @property
    def received(self) -> int:
        """Steps that were made since this trainer began."""
        return max(0, self._steps - max(0, self._first))

    def begin_at(self, steps: int) -> None:
        """Count samples above so many steps: a first start counts those that were there before, from 0."""
        self._first = steps

    def update(self) -> None:
        """Nothing: batches are drawn by the servers."""

    def __len__(self) -> int:
        return max(0, self._steps)

    def batch(self) -> Any:
        """The next batch."""
        batch = self._reader.get_batch(self._size, timeout=DRAW_TIMEOUT)
        if (parameters := self._reader.parameters) is not self._known:
            self._on_parameters(parameters)
            self._known = parameters
        return batch if self._device is None else batch.to(self._device)

    def give_priorities(self, batch: Any, priorities: Any) -> None:
        """Send TD errors [B] to the owners of these samples, if draws depend on them."""
        if self._reader.parameters.priority_exponent > 0.0:
            batch.update_priorities(priorities)

    def wait(self, timeout: float) -> None:
        """Return when more steps were made."""
        with self._changed.held():
            self._changed.wait(timeout)

    def close(self) -> None:
        """End the thread."""
        self._is_closing = True

    def await_count(self, timeout: float) -> int:
        """Steps that servers have counted, as soon as they say so; -1 if they do not."""
        with self._changed.held():
            self._changed.wait_for(lambda: self._steps >= 0, timeout)
        return self._steps

    def _count(self) -> None:
        while not self._is_closing:
            began = time.monotonic()
            try:
                steps = self._reader.totals().totals.steps
            except Closed:
                return
            except MemoireError as error:
                _log.debug("no counts: %s", error)
            else:
                with self._changed.held():
                    self._steps = max(self._steps, steps)
                    self._changed.notify_all()
            time.sleep(max(0.0, began + COUNT_INTERVAL - time.monotonic()))


class Trainer(ClosingContext):
    """Trains an agent of samples that workers send to servers.

    Args:
        agent: What learns; see `TrainingAgent`.
        url: Address of a server or proxy, or several.
        training: How to train.
        table: That batches are drawn from; "" is the first.
        topic: Of the models.
        keys, name: As of `Reader`.
        model_path: File of the newest model, written after each epoch; None is none.
        checkpoint_path: Folder of the state; one that is there is gone on from. It is locked until `close`. None saves
            nothing.
        logger: Gets the figures of each epoch.
        profile_folder: Where profiles go, if `training.profiling`.
        timeout: Seconds to wait for the server; a line each ten seconds says so meanwhile.

    Raises:
        MemoireTimeout: no server answered.
        DataError: the checkpoint is damaged, or of another agent.
        StateLocked: another trainer has the checkpoint.
        ParameterError: the agent has another discount than the table; or versions of another topic's models limit what
            is drawn. `run` raises it, too, if the table is configured so.
    """

    def __init__(
        self,
        agent: TrainingAgent,
        url: str | list[str],
        training: Training | None = None,
        *,
        table: str = "",
        topic: str = TOPIC,
        keys: Given = None,
        name: str | None = None,
        model_path: str | Path | None = None,
        checkpoint_path: str | Path | None = None,
        logger: Logger | None = None,
        profile_folder: str | Path | None = None,
        timeout: float = CONNECT_TIMEOUT,
    ) -> None:
        self.agent, self.topic, self.logger = agent, topic, logger
        plan = training or Training()
        urls = [url] if isinstance(url, str) else list(url)
        self._stopped = threading.Event()
        self._over = threading.Event()  # of the newest run
        self._checkpoint_path = None if checkpoint_path is None else Path(checkpoint_path).absolute()
        self._made_as: Any = None  # form of the agent before it was trained; None where nothing is saved
        self._said: set[str] = set()  # attributes that the log has named
        self._profiles = Path(profile_folder or ".").absolute()
        self._held = contextlib.ExitStack()  # what `close` gives back
        try:
            self._files = ModelFiles(model_path, role="trainer")
            self._held.callback(self._files.close)
            if (lock := self._lock_checkpoint()) is not None:
                self._held.callback(lock.release)
            self.reader = connected(
                lambda patience: Reader(urls, table=table, keys=keys, name=name, timeout=patience), urls[0], timeout
            )
            self._held.callback(self.reader.close)
            self.experience = self._make_experience(plan)
            self._held.callback(self.experience.close)
            self.loop = TrainingLoop(agent, self.experience, self._publish, plan, is_over=lambda: self.is_stopping)
            self._resume()
            self.reader.program = self.standing
        except BaseException:
            self.close()
            raise

    def _make_experience(self, plan: Training) -> Experience:
        self._takes_gamma = getattr(self.agent, "gamma", 0.0) is None
        self._agree_with(self.reader.parameters)
        return DrawnBatches(self.reader, plan.batch_size, self.agent.device, self._agree_with)

    def _agree_with(self, parameters: Parameters) -> None:
        """Give an agent that was told no discount the table's. Raises ParameterError: a setting of both differs."""
        discount = parameters.discount
        if self._takes_gamma:
            vars(self.agent)["gamma"] = discount[0] if len(set(discount)) == 1 else discount
        check_gamma(self.agent, discount)
        check_model_topic(parameters, self.topic)

    # ------------------------------------------------------------------------------------------------- the run

    @property
    def is_stopping(self) -> bool:
        """Whether training is to end: `stop` was called, or the run was declared finished."""
        return self._stopped.is_set() or self.reader.finished

    def stop(self) -> None:
        """End after the present step. From any thread, and from handlers of signals."""
        self._stopped.set()

    def run(
        self,
        on_round: Callable[[RoundStats], object] = lambda stats: None,
        on_epoch: Callable[[int, dict[str, float]], object] = lambda epoch, figures: None,
    ) -> None:
        """Train until all epochs are over, `stop` was called, or the run is finished. Blocks.

        Args:
            on_round: Called with what each round came to.
            on_epoch: Called with the number of epochs that are over, and their last figures.
        """
        _log.info("training on %s, from epoch %d", self.agent.device or "the CPU", self.loop.state.epoch)
        with self._told():
            self.loop.publish()
            while not (self.loop.is_done or self.is_stopping):
                rows = self._epoch(on_round)
                if rows:
                    on_epoch(self.loop.state.epoch, rows)
            self.save()

    def _epoch(self, on_round: Callable[[RoundStats], object]) -> dict[str, float]:
        """Train for an epoch, save, and log; the figures of its rounds, {} if it was ended early."""
        epoch = self.loop.state.epoch
        with self._profile(epoch):
            stats = self.loop.run_epoch(on_round)
        if self.loop.state.epoch == epoch:
            return {}
        rows = mean_rows([each.rows() for each in stats]) | self._episode_figures()
        self.save()
        if self.logger is not None:
            self.logger.log(finite(rows), self.loop.state.epoch)
        return rows

    def _episode_figures(self) -> dict[str, float]:
        """Of the episodes that came within the epoch, if the experience knows them."""
        returns = getattr(self.experience, "returns", None)
        return {} if returns is None else dict(returns.figures())

    @contextlib.contextmanager
    def _profile(self, epoch: int) -> Iterator[None]:
        """Around an epoch: writes what it spent its time on, by torch's profiler for torch agents."""
        if not self.loop.plan.profiling:
            yield
            return
        self._profiles.mkdir(parents=True, exist_ok=True)
        if self.agent.device is None:
            import cProfile

            profile = cProfile.Profile()
            with profile:
                yield
            profile.dump_stats(self._profiles / f"epoch-{epoch}.prof")
            return
        import torch

        with torch.profiler.profile() as traced:
            yield
        traced.export_chrome_trace(str(self._profiles / f"epoch-{epoch}.json"))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """While this lasts, servers hear how training stands, and the log what it waits for."""
        self._over = is_over = threading.Event()
        thread = threading.Thread(target=self._tell, args=(is_over,), name="memoire-trainer-figures", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            self._tell_last()

    def _tell(self, is_over: threading.Event) -> None:
        said = 0.0
        while not is_over.wait(FIGURES_INTERVAL) and self._over is is_over:  # that of a run which was interrupted
            try:
                self.reader.scalars(self.figures())
            except Closed:
                return
            except MemoireError as error:
                _log.debug("no figures: %s", error)
            reason = self.loop.explain()
            if reason and time.monotonic() - said >= 10.0:
                said = time.monotonic()
                _log.info("%s", reason)

    @property
    def node(self) -> Reader:
        """What pages are about: the reader."""
        reader: Reader = self.reader
        return reader

    @property
    def _checks(self) -> Any:
        """What compares transitions with what workers recorded; None where nothing does."""
        return getattr(getattr(self.experience, "memory", None), "checks", None)

    def standing(self) -> TrainerStanding:
        """How training goes, and what it waits for."""
        loop, checks = self.loop, self._checks
        return TrainerStanding(
            loop.state.updates, loop.samples, loop.state.epoch, loop.gate.ratio(self.experience.received),
            dict(loop.idle), {reason: float(loop.reason == reason) for reason in REASONS},
            getattr(checks, "passed", 0), getattr(checks, "failed", 0),
        )  # fmt: skip

    def _tell_last(self) -> None:
        """Have servers hear of a transition that was wrong: this process ends by it, and nobody can ask it later."""
        if self._checks is not None and self._checks.failed:
            with contextlib.suppress(MemoireError):
                self.reader.scalars(self.figures())
                time.sleep(HEARD_WITHIN)

    def figures(self) -> dict[str, float]:
        """How training stands, by name."""
        loop = self.loop
        idle = {f"trainer_idle_{name}_seconds": value for name, value in loop.idle.items()}
        if self._checks is not None and self._checks.every:
            idle |= {"trainer_crc_passed": self._checks.passed, "trainer_crc_failed": self._checks.failed}
        return idle | {
            "trainer_updates": float(loop.state.updates),
            "trainer_samples": float(loop.samples),
            "trainer_ratio": loop.gate.ratio(self.experience.received),
            "trainer_epoch": float(loop.state.epoch),
            "trainer_waits": float(("", *REASONS).index(loop.reason)),
        }

    def _publish(self) -> None:
        """Publish the actor; a server that is away gets it when it is back."""
        try:
            self.reader.publish(self.topic, self._body())
        except MemoireTimeout as error:
            _log.warning("the model waits for its server: %s", error)

    # ------------------------------------------------------------------------------------------------ its state

    def save(self) -> None:
        """Write the model's file and the checkpoint, each there as a whole or as it was."""
        self.save_model()
        if self._checkpoint_path is not None:
            self._warn_of_unsaved()
            made = save_agent(self._checkpoint_path, self.agent, self._made_as, self._facts())
            if new := set(made) - self._said:
                self._said |= new
                _log.warning("the agent has made %s while it was trained: a restart will be refused. Make them in "
                             "its __init__", ", ".join(sorted(new)))  # fmt: skip

    def _facts(self) -> dict[str, Any]:
        """What training goes on with beside the agent."""
        remember = getattr(self.experience, "state", dict)
        return {
            "state": dataclasses.asdict(self.loop.state), "received": self.experience.received,
            "gate": self.loop.gate.updates, "experience": remember(), "plan": _settings(self.loop.plan),
        }  # fmt: skip

    def _warn_of_unsaved(self) -> None:
        if new := set(unsaved(self.agent)) - self._said:
            self._said |= new
            _log.warning("checkpoints do not hold these attributes of the agent: %s", ", ".join(sorted(new)))

    def save_model(self) -> None:
        """Write the model's file."""
        self._files.keep(self._body())

    def _body(self) -> bytes:
        """What acts now, and for which actions it was trained."""
        return with_actions(body_of(self.agent.get_actor()), self.agent)

    def _lock_checkpoint(self) -> FileLock | None:
        """The lock of the checkpoint's folder, if there is one."""
        return None if self._checkpoint_path is None else lock_checkpoint(self._checkpoint_path)

    def _resume(self) -> None:
        """Go on from the checkpoint, if there is one; samples that came before are owed no steps."""
        facts = None
        if self._checkpoint_path is not None:
            self._warn_of_unsaved()
            self._made_as = form_of(self.agent)
            facts = load_agent(self._checkpoint_path, self.agent)
        if facts is not None:
            self.loop.state = TrainingState(**facts["state"])
            _log.info("going on from epoch %d, after %d training steps", self.loop.state.epoch, self.loop.state.updates)
            warn_of_told(_settings(self.loop.plan), facts["plan"], "trainer")
        self._begin_count(facts)

    def _begin_count(self, facts: Mapping[str, Any] | None) -> None:
        """Count samples from the start of the run; after a restart from now on, but for the newest ones, which paced
        workers wait for to be trained on.

        Args:
            facts: Of the checkpoint that training goes on from, as `_facts` makes them.
        """
        experience, first = self.experience, 0
        assert isinstance(experience, DrawnBatches)
        if facts is not None:
            steps = max(0, experience.await_count(DRAW_TIMEOUT))
            untrained = steps - self.loop.state.updates / self.loop.plan.max_training_steps_per_env_step
            first = steps - max(0, min(LEAD, int(untrained)))
        experience.begin_at(first)
        self.loop.state.samples = first

    def close(self) -> None:
        """End the connection; the run stays as it is."""
        self.stop()
        self._held.close()


def mean_rows(rows: list[dict[str, float]]) -> dict[str, float]:
    """Means of figures over rounds, by name; those that some rounds lack over the others."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}


def _settings(plan: Training) -> dict[str, Any]:
    """The numbers of a plan, by name."""
    values = dataclasses.asdict(dataclasses.replace(plan, agent_scheduler=None))
    return {name: value for name, value in values.items() if name != "agent_scheduler"}


# What a trainer goes on with of the files of a former one


RESUMES: Final = ("all", "memory", "weights", "none")
"""Everything; its samples alone; its agent alone; nothing, and its files are put aside."""


def checked_resume(value: Any) -> str:
    """One of RESUMES. Raises ParameterError: it is none of them."""
    if value not in RESUMES:
        raise ParameterError("resume", value, one_of(value, RESUMES))
    return str(value)


def put_aside(path: str | Path) -> Path | None:
    """Give a file or folder another name beside it, so that a run begins anew; the name, or None if there is nothing.

    Nothing is deleted: the name is the former one with ".former-1", or the next number that is free.

    Raises:
        StateLocked: a trainer that runs has the folder.
    """
    place, number = Path(path), 1
    if not place.exists():
        return None
    while (other := place.with_name(f"{place.name}.former-{number}")).exists():
        number += 1
    lock = lock_checkpoint(place) if place.is_dir() else None
    try:
        return place.rename(other)
    finally:
        if lock is not None:
            lock.release()


def lock_checkpoint(folder: Path) -> FileLock:
    """Lock the folder of a checkpoint, which is made if it is not there: one trainer at a time has it.

    Raises:
        StateError: another one has it, or it cannot be locked.
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return lock_folder(folder, "the checkpoint folder", "trainer")


def begin_fresh(paths: Iterable[str | Path], *, is_sure: bool = False, ask: Callable[[str], str] = input) -> None:
    """Put a run's files aside, so that it begins anew, after a question.

    Args:
        paths: Files and folders; those that are not there are passed over.
        is_sure: Do so without a question.
        ask: Gets the question, gives the answer.

    Raises:
        ParameterError: the answer was not yes; nothing was changed.
    """
    there = [Path(path) for path in paths if Path(path).exists()]
    if not there:
        return
    names = "\n".join(f"  {path}" for path in there)
    question = f"These files of a former run are given other names:\n{names}\nGo on? [yes/no] "
    try:
        answer = "yes" if is_sure else ask(question)
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise ParameterError("--fresh", answer.strip(), "the answer yes at a terminal, or --yes beside it")
    for path in there:
        put_aside(path)
