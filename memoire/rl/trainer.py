"""Trainer of an agent: takes samples from servers, trains, publishes the actor's models and saves checkpoints.

server ──samples──▶ experience ──batch──▶ agent.train      end of an epoch: checkpoint, model file, figures
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
from memoire.building import ClosingContext, Condition, FileLock, KeysLike, lock_folder, one_of
from memoire.errors import Closed, MemoireError, MemoireTimeout, ParameterError
from memoire.loggers import Logger

from . import weights
from .policies import TOPIC
from .recording import connected
from .saving import form_of, load_agent, save_agent, unsaved, warn_of_changed_settings
from .spaces import with_actions
from .step_clock import TrainerStats
from .training import (
    MAX_LEAD_STEPS,
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
"""Seconds between two requests for the servers' count of steps."""
FIGURES_INTERVAL: Final = 1.0
"""Seconds between two reports of the trainer's figures to the servers."""
REPORT_DELAY: Final = 2.5
"""Seconds until servers have received figures: a reader sends them every two seconds."""
DRAW_TIMEOUT: Final = 60.0
"""Seconds to wait for a batch after enough samples have arrived."""
CONNECT_TIMEOUT: Final = 60.0


def body_of(actor: Any) -> bytes:
    """Encode an actor as a body: a torch module, a state_dict, arrays by name, or an object with `state_dict()`."""
    if isinstance(actor, Mapping) and all(isinstance(each, np.ndarray) for each in actor.values()):
        return weights.pack(actor)
    import memoire.torch

    return memoire.torch.body_of(actor)


class DrawnBatches:
    """Experience of a trainer that draws prioritized, prefetched batches from a table of servers.

    Args:
        reader: Reader of the table.
        batch_size: Samples of a batch.
        device: Device of the batches' tensors; None leaves batches in NumPy.
        on_parameters: Called with the table's parameters before the first batch, and when they have changed.
    """

    def __init__(
        self, reader: Reader, batch_size: int, device: Any = None,
        on_parameters: Callable[[Parameters], object] = lambda parameters: None,
    ) -> None:  # fmt: skip
        self._reader, self._size, self._device, self._on_parameters = reader, batch_size, device, on_parameters
        self._known: Parameters | None = None
        self._steps = self._first = -1  # steps of all workers, now and at first; -1 if unknown
        self._changed = Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._count, name="memoire-trainer-counts", daemon=True)
        self._thread.start()

    @property
    def received(self) -> int:
        """Steps of environments in this run, counted from the number that `begin_at` set."""
        return max(0, self._steps - max(0, self._first))

    def begin_at(self, steps: int) -> None:
        """Set the count of steps from which `received` counts: 0 for the first start of a run."""
        self._first = steps

    def update(self) -> None:
        """Do nothing: the servers draw the batches."""

    def __len__(self) -> int:
        return max(0, self._steps)

    def batch(self) -> Any:
        """Draw the next batch; waits at most DRAW_TIMEOUT."""
        batch = self._reader.get_batch(self._size, timeout=DRAW_TIMEOUT)
        if (parameters := self._reader.parameters) is not self._known:
            self._on_parameters(parameters)
            self._known = parameters
        return batch if self._device is None else batch.to(self._device)

    def give_priorities(self, batch: Any, priorities: Any) -> None:
        """Send TD errors [B] to the owners of these samples, if the table's draws depend on priorities."""
        if self._reader.parameters.priority_exponent > 0.0:
            batch.update_priorities(priorities)

    def wait(self, timeout: float) -> None:
        """Wait until the count of steps grows, for at most `timeout` seconds."""
        with self._changed.held():
            self._changed.wait(timeout)

    def close(self) -> None:
        """Have the thread end after its current request."""
        self._is_closing = True

    def await_count(self, timeout: float) -> int:
        """Wait for the servers' first count of steps and return it; -1 without one after `timeout` seconds."""
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
                _log.debug("cannot read the servers' count of steps: %s", error)
            else:
                with self._changed.held():
                    self._steps = max(self._steps, steps)
                    self._changed.notify_all()
            time.sleep(max(0.0, began + COUNT_INTERVAL - time.monotonic()))


class Trainer(ClosingContext):
    """Trainer of an agent, on samples that workers send to servers.

    Args:
        agent: The agent; see `TrainingAgent`.
        url: Address of a server or proxy, or several.
        training: Settings of the training.
        table: Table of the batches; "" is the first one.
        topic: Topic of the published models.
        keys, name: Passed to `Reader`.
        model_path: File of the newest model, written after each epoch; None writes no file.
        checkpoint_path: Folder of the checkpoints. A checkpoint in it is continued. The folder is locked until `close`.
            None saves nothing.
        logger: Receives the figures of each epoch.
        profile_folder: Folder of profiles, if `training.profiling`.
        timeout: Seconds to wait for the server; a log line every ten seconds reports the wait.

    Raises:
        MemoireTimeout: no server answered.
        DataError: the checkpoint is damaged, or of another agent.
        StateLocked: another trainer uses the checkpoint.
        ParameterError: the agent has another discount than the table; or the table limits the age of another topic's
            models. `run` raises it, too, if the table is configured so later.
    """

    def __init__(
        self,
        agent: TrainingAgent,
        url: str | list[str],
        training: Training | None = None,
        *,
        table: str = "",
        topic: str = TOPIC,
        keys: KeysLike = None,
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
        self._run_is_over = threading.Event()  # end of the newest call of `run`
        self._checkpoint_path = None if checkpoint_path is None else Path(checkpoint_path).absolute()
        self._first_form: Any = None  # form of the agent before training; None if nothing is saved
        self._warned: set[str] = set()  # attributes of which the log has warned
        self._profiles = Path(profile_folder or ".").absolute()
        self._resources = contextlib.ExitStack()  # resources that `close` releases
        try:
            self._files = ModelFiles(model_path, role="trainer")
            self._resources.callback(self._files.close)
            if (lock := self._lock_checkpoint()) is not None:
                self._resources.callback(lock.release)
            self.reader = connected(
                lambda patience: Reader(urls, table=table, keys=keys, name=name, timeout=patience), urls[0], timeout
            )
            self._resources.callback(self.reader.close)
            self.experience = self._make_experience(plan)
            self._resources.callback(self.experience.close)
            self.loop = TrainingLoop(agent, self.experience, self._publish, plan, is_over=lambda: self.is_stopping)
            self._resume()
            self.reader.program = self.stats
        except BaseException:
            self.close()
            raise

    def _make_experience(self, plan: Training) -> Experience:
        self._sets_gamma = getattr(self.agent, "gamma", 0.0) is None
        self._adopt_parameters(self.reader.parameters)
        return DrawnBatches(self.reader, plan.batch_size, self.agent.device, self._adopt_parameters)

    def _adopt_parameters(self, parameters: Parameters) -> None:
        """Set the table's discount on an agent without one. Raises ParameterError if a setting of both differs."""
        discount = parameters.discount
        if self._sets_gamma:
            vars(self.agent)["gamma"] = discount[0] if len(set(discount)) == 1 else discount
        check_gamma(self.agent, discount)
        check_model_topic(parameters, self.topic)

    # ------------------------------------------------------------------------------------------------- the run

    @property
    def is_stopping(self) -> bool:
        """True if training has to end: `stop` was called, or the run was declared finished."""
        return self._stopped.is_set() or self.reader.finished

    def stop(self) -> None:
        """End training after the current step. Safe from any thread, and in signal handlers."""
        self._stopped.set()

    def run(
        self,
        on_round: Callable[[RoundStats], object] = lambda stats: None,
        on_epoch: Callable[[int, dict[str, float]], object] = lambda epoch, figures: None,
    ) -> None:
        """Train until all epochs are done, `stop` is called, or the run is finished. Blocks.

        Args:
            on_round: Called with the figures of each round.
            on_epoch: Called with the number of epochs that are done, and the figures of the last one.
        """
        _log.info("training on %s, from epoch %d", self.agent.device or "the CPU", self.loop.state.epoch)
        with self._report_figures():
            self.loop.publish()
            while not (self.loop.is_done or self.is_stopping):
                rows = self._epoch(on_round)
                if rows:
                    on_epoch(self.loop.state.epoch, rows)
            self.save()

    def _epoch(self, on_round: Callable[[RoundStats], object]) -> dict[str, float]:
        """Train for an epoch, save, and log; return the means of its rounds' figures, {} if it ended early."""
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
        """Return the figures of this epoch's episodes; {} if the experience counts no episodes."""
        returns = getattr(self.experience, "returns", None)
        return {} if returns is None else dict(returns.figures())

    @contextlib.contextmanager
    def _profile(self, epoch: int) -> Iterator[None]:
        """Profile the epoch in this block if `profiling` is set; torch's profiler serves torch agents."""
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
    def _report_figures(self) -> Iterator[None]:
        """Report the trainer's figures to the servers, and log its waits, while the block runs."""
        self._run_is_over = is_over = threading.Event()
        thread = threading.Thread(target=self._report, args=(is_over,), name="memoire-trainer-figures", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            self._report_failure()

    def _report(self, is_over: threading.Event) -> None:
        logged_at = 0.0
        while not is_over.wait(FIGURES_INTERVAL) and self._run_is_over is is_over:  # false for an interrupted run
            try:
                self.reader.scalars(self.figures())
            except Closed:
                return
            except MemoireError as error:
                _log.debug("cannot report figures: %s", error)
            reason = self.loop.explain()
            if reason and time.monotonic() - logged_at >= 10.0:
                logged_at = time.monotonic()
                _log.info("%s", reason)

    @property
    def node(self) -> Reader:
        """Reader whose state the HTTP pages of this process show."""
        reader: Reader = self.reader
        return reader

    @property
    def _checks(self) -> Any:
        """Checks that compare rebuilt transitions with the recorded ones; None without checks."""
        return getattr(getattr(self.experience, "memory", None), "checks", None)

    def stats(self) -> TrainerStats:
        """Return the trainer's progress and the reason for its pause, as /metrics shows them."""
        loop, checks = self.loop, self._checks
        return TrainerStats(
            loop.state.updates, loop.samples, loop.state.epoch, loop.gate.ratio(self.experience.received),
            dict(loop.idle), {reason: float(loop.reason == reason) for reason in REASONS},
            getattr(checks, "passed", 0), getattr(checks, "failed", 0),
        )  # fmt: skip

    def _report_failure(self) -> None:
        """Report a failed check to the servers, since this process exits now and cannot be asked later."""
        if self._checks is not None and self._checks.failed:
            with contextlib.suppress(MemoireError):
                self.reader.scalars(self.figures())
                time.sleep(REPORT_DELAY)

    def figures(self) -> dict[str, float]:
        """Return the trainer's progress and pauses as figures by name."""
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
        """Publish the actor's model. If its server is away, the model is sent when the server is back."""
        try:
            self.reader.publish(self.topic, self._body())
        except MemoireTimeout as error:
            _log.warning("the model is not published yet, its server does not answer: %s", error)

    # ------------------------------------------------------------------------------------------------ trainer's state

    def save(self) -> None:
        """Write the model's file and the checkpoint; each is complete, or its former version is kept."""
        self.save_model()
        if self._checkpoint_path is not None:
            self._warn_of_unsaved()
            created = save_agent(self._checkpoint_path, self.agent, self._first_form, self._facts())
            if new := set(created) - self._warned:
                self._warned |= new
                _log.warning("the agent created %s during training, so a restart will fail. Create them in "
                             "its __init__", ", ".join(sorted(new)))  # fmt: skip

    def _facts(self) -> dict[str, Any]:
        """Return the state of the training beside the agent's, for a checkpoint."""
        remember = getattr(self.experience, "state", dict)
        return {
            "state": dataclasses.asdict(self.loop.state), "received": self.experience.received,
            "gate": self.loop.gate.updates, "experience": remember(), "plan": _settings(self.loop.plan),
        }  # fmt: skip

    def _warn_of_unsaved(self) -> None:
        if new := set(unsaved(self.agent)) - self._warned:
            self._warned |= new
            _log.warning("checkpoints do not hold these attributes of the agent: %s", ", ".join(sorted(new)))

    def save_model(self) -> None:
        """Write the newest model to `model_path`."""
        self._files.keep(self._body())

    def _body(self) -> bytes:
        """Return the actor's model, with the action space of its training."""
        return with_actions(body_of(self.agent.get_actor()), self.agent)

    def _lock_checkpoint(self) -> FileLock | None:
        return None if self._checkpoint_path is None else lock_checkpoint(self._checkpoint_path)

    def _resume(self) -> None:
        """Continue from the checkpoint, if there is one. Earlier samples require no training steps."""
        facts = None
        if self._checkpoint_path is not None:
            self._warn_of_unsaved()
            self._first_form = form_of(self.agent)
            facts = load_agent(self._checkpoint_path, self.agent)
        if facts is not None:
            self.loop.state = TrainingState(**facts["state"])
            _log.info("resuming at epoch %d, after %d training steps", self.loop.state.epoch, self.loop.state.updates)
            warn_of_changed_settings(_settings(self.loop.plan), facts["plan"], "trainer")
        self._begin_count(facts)

    def _begin_count(self, facts: Mapping[str, Any] | None) -> None:
        """Set the step from which samples count: 0 in a new run, the present one after a restart.

        After a restart the newest untrained steps, at most MAX_LEAD_STEPS, count, too: paced workers wait for them.

        Args:
            facts: State in the checkpoint, as `_facts` returns it; None in a new run.
        """
        experience, first = self.experience, 0
        assert isinstance(experience, DrawnBatches)
        if facts is not None:
            steps = max(0, experience.await_count(DRAW_TIMEOUT))
            untrained = steps - self.loop.state.updates / self.loop.plan.max_training_steps_per_env_step
            first = steps - max(0, min(MAX_LEAD_STEPS, int(untrained)))
        experience.begin_at(first)
        self.loop.state.samples = first

    def close(self) -> None:
        """End the connection to the servers; the run is not finished by this call."""
        self.stop()
        self._resources.close()


def mean_rows(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the means of figures over rounds, by name; a mean covers the rounds that have the figure."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}


def _settings(plan: Training) -> dict[str, Any]:
    """Return the numbers of a plan, by name."""
    values = dataclasses.asdict(dataclasses.replace(plan, agent_scheduler=None))
    return {name: value for name, value in values.items() if name != "agent_scheduler"}


# Files of a former trainer


RESUMES: Final = ("all", "memory", "weights", "none")
"""Parts of a former run that a trainer continues: all; only samples; only the agent; none, with files renamed."""


def checked_resume(value: Any) -> str:
    """Return `value` if it is one of RESUMES; else raise ParameterError."""
    if value not in RESUMES:
        raise ParameterError("resume", value, one_of(value, RESUMES))
    return str(value)


def put_aside(path: str | Path) -> Path | None:
    """Rename a file or folder, so that a new run can begin; return the new name, or None if the path does not exist.

    Nothing is deleted. The new name ends in ".former-1", or the next free number.

    Raises:
        StateLocked: a running trainer uses the folder.
    """
    former, number = Path(path), 1
    if not former.exists():
        return None
    while (aside := former.with_name(f"{former.name}.former-{number}")).exists():
        number += 1
    lock = lock_checkpoint(former) if former.is_dir() else None
    try:
        return former.rename(aside)
    finally:
        if lock is not None:
            lock.release()


def lock_checkpoint(folder: Path) -> FileLock:
    """Lock the folder of a checkpoint, made if it is missing, so that only one trainer uses it.

    Raises:
        StateError: another trainer uses the folder, or it cannot be locked.
        OSError: the folder cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return lock_folder(folder, "the checkpoint folder", "trainer")


def begin_fresh(paths: Iterable[str | Path], *, is_sure: bool = False, ask: Callable[[str], str] = input) -> None:
    """Rename a run's files after the user agrees, so that a new run can begin.

    Args:
        paths: Files and folders; missing ones are skipped.
        is_sure: True renames without a question.
        ask: Called with the question, returns the answer.

    Raises:
        ParameterError: the answer was not yes; nothing was changed.
    """
    present = [Path(path) for path in paths if Path(path).exists()]
    if not present:
        return
    names = "\n".join(f"  {path}" for path in present)
    question = f"These files of a former run will be renamed:\n{names}\nContinue? [yes/no] "
    try:
        answer = "yes" if is_sure else ask(question)
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise ParameterError.with_text("--fresh was not confirmed: answer yes, or add --yes. Nothing was renamed.")
    for path in present:
        put_aside(path)
