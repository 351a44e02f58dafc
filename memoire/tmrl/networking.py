"""Server, RolloutWorker and Trainer: three ends of a pipeline, on as many machines as one likes.

    RolloutWorker ──samples──▶ Server ──samples──▶ Trainer       all connect to the server: only its ports have to be
                  ◀──models───        ◀──models───               reachable; the order of their starts does not matter

Nothing is pickled, nothing is downloaded, and nothing is made at import. See docs/tmrl.md.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

import memoire.tmrl.config.config_constants as cfg
import memoire.tmrl.config.config_objects as cfg_obj
from memoire import Client, Endpoints, loggers
from memoire import Server as NativeServer
from memoire.building import ClosingContext, Keys, whole
from memoire.errors import DataError, ParameterError
from memoire.limits import Limits
from memoire.rl.crc import Marks
from memoire.rl.recording import Packets
from memoire.rl.samples import TABLE, MemoryExperience, Sample, SampleJournal, SampleTaker, samples_table
from memoire.rl.saving import SETTINGS, form_of, readable, restore, state_of, warn_of_told
from memoire.rl.trainer import Trainer as NativeTrainer
from memoire.rl.trainer import checked_resume, put_aside
from memoire.rl.training import Experience, RoundStats, Training, TrainingState
from memoire.rl.worker import RolloutWorker as NativeWorker
from memoire.rl.worker import run_synchronous, step_seconds

from .addresses import check_paths, port_of, urls_of

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT: Final = 600.0
"""Seconds that workers and trainers wait for their server, with a line each ten seconds."""
LOADED: Final = "the loaded training"
"""What errors call what the user's own function has loaded."""
MEMORY_SIZE: Final = 1_000_000
"""Samples of a memory that does not say its size."""
TOPIC: Final = "actor"
"""Topic of the models; the run's name follows."""


def topic() -> str:
    """Of the models of the configured run."""
    return f"{TOPIC}/{cfg.RUN_NAME}"


def _check_run(run: str) -> None:
    """Refuse a server of another run, whose workers and trainer have another topic. Raises ParameterError."""
    if run != cfg.RUN_NAME:
        raise ParameterError("RUN_NAME", cfg.RUN_NAME, f"{run!r}, as at the server: one configuration for all")


class Buffer:
    """Samples in order, as `append_buffer` of a memory gets them.

    Attributes:
        memory: Tuples (act, new_obs, rew, done, info), as the compressor left them. A sample that a reset gave is one
            of them, with the action that the device did meanwhile. `done` is False if the episode was truncated; then
            `info` has "__no_done".
        samples: The same with all that travelled: see `memoire.rl.samples.Sample`.
        continues: Whether the first one follows the last sample that the memory got.
        stat_train_return, stat_test_return, stat_train_steps, stat_test_steps: Of the newest episodes.
    """

    def __init__(self, samples: list[Sample] | None = None, continues: bool = False) -> None:
        self.memory: list[tuple[Any, Any, Any, Any, Any]] = []
        self.samples: list[Sample] = []
        self.continues = continues
        self.stat_train_return = self.stat_test_return = 0.0
        self.stat_train_steps = self.stat_test_steps = 0
        for sample in samples or ():
            self.append_sample(sample)

    def append_sample(self, sample: Sample) -> None:
        """Take in one more."""
        self.samples.append(sample)
        self.memory.append((sample.act, sample.obs, sample.rew, sample.terminated, sample.info))
        if sample.is_reset:
            self.stat_train_return = 0.0
        if sample.test_length:
            self.stat_test_steps, self.stat_test_return = sample.test_length, sample.test_return
        self.stat_train_steps = sample.step
        self.stat_train_return += sample.reward

    @property
    def starts(self) -> list[bool]:
        """For each sample, whether a reset gave it."""
        return [sample.is_reset for sample in self.samples]

    def clear(self) -> None:
        """Begin empty again; the statistics stay."""
        self.memory, self.samples = [], []

    def __len__(self) -> int:
        return len(self.memory)

    def __iadd__(self, other: Buffer) -> Buffer:
        for sample in other.samples:
            self.append_sample(sample)
        return self


class Server(ClosingContext):
    """Where workers and the trainer meet. It works on threads of its own, until `close`.

    Args:
        min_samples_per_server_packet: Samples that the trainer waits for before it takes some.
        port: For requests; the next two are for samples and notices. None takes the configured ones; 0 free ones.
        keys: Keys folder of a server; None takes $MEMOIRE_KEYS. With keys it listens at all addresses of this machine;
            without, at 127.0.0.1.
        insecure: Whether to listen at all addresses without keys.
        capacity: Samples that wait for a trainer; beyond, the oldest leave.
        state_dir: Folder in which models and totals outlive the server; None keeps them in memory.
        max_workers: Workers at once; further ones wait until one leaves. None is no bound.
        security: "TLS" of TMRL: needs keys, which encrypt and authenticate. None says nothing.
        password: Of TMRL: not used, with a warning unless there are keys.

    Raises:
        EndpointError: a port is in use.
    """

    def __init__(
        self,
        min_samples_per_server_packet: int = 1,
        *,
        port: int | None = None,
        keys: Any = None,
        insecure: bool = False,
        capacity: int | None = None,
        state_dir: str | Path | None = None,
        max_workers: int | None = None,
        security: str | None = None,
        password: str = "",
    ) -> None:
        port = port_of(port, None, security=security, password=password, keys=keys, role="server")
        host = "*" if insecure or Keys.of(keys, "server") is not None else "127.0.0.1"
        request = cfg.PORT_TRAINER if port is None else port
        is_apart = port is None and request and request + 1 != cfg.PORT_ROLLOUT
        push = f"tcp://{host}:{cfg.PORT_ROLLOUT}" if is_apart else None
        table = samples_table(cfg.BUFFERS_MAXLEN if capacity is None else capacity, min_samples_per_server_packet)
        limits = Limits(max_actors=0 if max_workers is None else whole("max_workers", max_workers, 1))
        self.server = NativeServer(
            Endpoints(f"tcp://{host}:{request}", push=push), tables={TABLE: table}, limits=limits, run=cfg.RUN_NAME,
            name="server", keys=keys, state=state_dir,
        )  # fmt: skip
        """The server itself: pages, totals, and what else it can do."""
        _log.info("serving at %s", self.server.endpoint)

    @property
    def port(self) -> int:
        """Of requests: what workers and trainers connect to."""
        return int(self.server.endpoint.rpartition(":")[2])

    def wait(self, timeout: float | None = None) -> bool:
        """Return when it is closed, or after so many seconds; whether it is closed."""
        return self.server.wait_closed(timeout)

    def close(self) -> None:
        """End it."""
        self.server.close()


class RolloutWorker(NativeWorker):
    """Runs episodes and sends samples; see `memoire.rl.RolloutWorker`.

    Args:
        env_cls: Class of the environment, or a partial of one.
        actor_module_cls: Class of what acts, or a partial of one; called with both spaces.
        sample_compressor: Called as f(act, obs, rew, done, info) with each sample, or as f(act, obs, rew, terminated,
            truncated, info) if it takes six values; returns what travels.
        device: Where the actor acts.
        server_ip: Of the server: a name, an address or a URL; of several in a list the first one that answers. None
            takes the configured one.
        min_samples_per_worker_packet: Samples that are sent together, at an episode's end.
        max_samples_per_episode: Steps after which an episode is given up: `done` stays False, and `info` has
            "__no_done".
        model_path: File of the newest model.
        obs_preprocessor: Called with each observation before the actor sees it.
        crc_debug: Send each transition as it was, too, for a memory with the same argument; a number n: one in n.
        model_path_history, model_history: What names of kept models begin with, and each how many one is kept; 0 and -1
            keep none.
        standalone: Connect to nobody.
        keys: Keys folder of an actor; None takes $MEMOIRE_KEYS.
        port, insecure: Of the server; see `Server`.
        stream: Send within episodes, too, as soon as there are enough samples.
        name: That pages show.
        cpus: Processors that the thread which runs episodes runs on; None leaves that to the system.
        connect_timeout: Seconds to wait for the server.
        server_port: Another name of port.
        security, password: See `Server`.

    Raises:
        ParameterError: the server is elsewhere and there are no keys, a class is missing, or the server's
            configuration has another RUN_NAME.
        MemoireTimeout: no server answered.
    """

    def __init__(
        self,
        env_cls: Any = None,
        actor_module_cls: Any = None,
        sample_compressor: Callable[..., Any] | None = None,
        device: str | None = "cpu",
        server_ip: str | Sequence[str] | None = None,
        min_samples_per_worker_packet: int = 1,
        max_samples_per_episode: float = np.inf,
        model_path: str | Path | None = cfg.MODEL_PATH_WORKER,
        obs_preprocessor: Callable[[Any], Any] | None = None,
        crc_debug: bool | int = False,
        model_path_history: str | Path | None = cfg.MODEL_PATH_SAVE_HISTORY,
        model_history: int = cfg.MODEL_HISTORY,
        standalone: bool = False,
        *,
        keys: Any = None,
        port: int | None = None,
        insecure: bool = False,
        stream: bool = False,
        name: str | None = None,
        cpus: Collection[int] | None = None,
        connect_timeout: float = CONNECT_TIMEOUT,
        server_port: int | None = None,
        security: str | None = None,
        password: str = "",
    ) -> None:
        check_paths(model_path=model_path, model_path_history=model_path_history)
        port = port_of(port, server_port, security=security, password=password, keys=keys, role="actor")
        for what, given in (("env_cls", env_cls), ("actor_module_cls", actor_module_cls)):
            if given is None:
                raise ParameterError(what, None, "a class, or a partial of one")
        where = urls_of(server_ip, cfg.SERVER_IP_FOR_WORKER, role="actor", keys=keys, port=port, insecure=insecure)

        def recording(client: Client) -> Packets:
            _check_run(client.run)
            return Packets(
                client, sample_compressor, min_samples_per_worker_packet, stream=stream, preprocessor=obs_preprocessor,
                marks=Marks(crc_debug, client.name or client.client_id.hex()[:8]) if crc_debug else None,
            )  # fmt: skip

        super().__init__(
            env_cls, actor_module_cls, None if standalone else where, table=TABLE, topic=topic(), recording=recording,
            keys=keys, name=name, device=device, max_samples_per_episode=max_samples_per_episode,
            model_path=model_path, model_path_history=model_path_history,
            model_history=0 if model_history == -1 else model_history,
            obs_preprocessor=obs_preprocessor, cpus=cpus, timeout=connect_timeout,
        )  # fmt: skip
        self.crc_debug = crc_debug

    def run(  # type: ignore[override]
        self, test_episode_interval: int = 0, nb_episodes: float = np.inf, verbose: bool = True, expert: bool = False
    ) -> None:
        """Training episodes for ever: see `memoire.rl.RolloutWorker.run`.

        Args:
            test_episode_interval: A test episode comes before the training episodes 0, n, 2 n and so on; 0 is none.
            nb_episodes: Training episodes to run.
            verbose: Log each episode.
            expert: Send samples, but run no test episodes, and keep the model.
        """
        self.is_verbose = verbose
        super().run(test_episode_interval, nb_episodes, is_expert=expert)

    def run_episodes(
        self, max_samples_per_episode: float | None = None, nb_episodes: float = np.inf, train: bool = False
    ) -> None:
        """Episodes one after the other; `train` says whether their samples are sent."""
        with self.until_stopped():
            count = 0
            while count < nb_episodes and not self.is_stopping:
                self.follow()
                self.run_episode(max_samples_per_episode, train)
                count += 1

    def run_synchronous(
        self,
        test_episode_interval: int = 0,
        nb_steps: float = np.inf,
        initial_steps: int = 1,
        max_steps_per_update: float = np.inf,
        end_episodes: bool = True,
        verbose: bool = False,
    ) -> None:
        """Training steps that wait for the trainer's models: see `memoire.rl.worker.run_synchronous`."""
        self.is_verbose = verbose
        run_synchronous(self, test_episode_interval, nb_steps, initial_steps, max_steps_per_update, end_episodes)

    def run_env_benchmark(self, nb_steps: int, test: bool = False, verbose: bool = True) -> dict[str, float]:
        """Steps without samples: how many, and the seconds of each, in the mean and at most."""
        return step_seconds(self, nb_steps, test)

    def update_actor_weights(self, verbose: bool = True, blocking: bool = False) -> bool:
        """Act by the newest model; whether there was a newer one. `blocking` waits for one."""
        before = self.version
        while blocking and not self.is_stopping and not self.await_model(0.5):
            pass
        self.follow()
        return self.version != before


class Trainer(NativeTrainer):
    """Trains on samples that come from workers; see `memoire.rl.Trainer`.

    Args:
        training_cls: A `TrainingOffline`, or a partial of it.
        server_ip: Of the server: a name, an address or a URL; or of several in a list, of which it takes all samples.
        model_path: File of the newest model. Not a worker's.
        checkpoint_path: Folder of the state; with one that is there, training goes on. None saves nothing.
        dump_run_instance_fn: Called as f(training, checkpoint_path) in place of saving.
        load_run_instance_fn: Called as f(checkpoint_path), gives the training that goes on.
        keys: Keys folder of a learner; None takes $MEMOIRE_KEYS.
        port, insecure: Of the server; see `Server`.
        flush_every: Seconds after which samples are taken although they are fewer than the server's least packet.
        updater_fn: Called as f(old training, training_cls) with what was loaded, gives what goes on.
        connect_timeout: Seconds to wait for the server.
        resume: What of a checkpoint to go on with: "all", "memory", "weights" or "none". With the last two, what is
            not gone on with is put aside under another name. None is "none" if the configuration says RESET_TRAINING,
            else "all".
        server_port: Another name of port.
        security, password: See `Server`.

    Raises:
        ParameterError: the server is elsewhere and there are no keys; or a setting differs from that of the checkpoint
            or loaded training, and training has changed it; or the server's configuration has another RUN_NAME.
        MemoireTimeout: no server answered.
        DataError: the checkpoint is damaged, or of another agent.
    """

    def __init__(
        self,
        training_cls: Any = cfg_obj.TRAINER,
        server_ip: str | Sequence[str] | None = cfg.SERVER_IP_FOR_TRAINER,
        model_path: str | Path | None = cfg.MODEL_PATH_TRAINER,
        checkpoint_path: str | Path | None = cfg.CHECKPOINT_PATH,
        dump_run_instance_fn: Callable[..., Any] | None = None,
        load_run_instance_fn: Callable[..., Any] | None = None,
        *,
        keys: Any = None,
        port: int | None = None,
        insecure: bool = False,
        flush_every: float = 1.0,
        updater_fn: Callable[..., Any] | None = None,
        connect_timeout: float = CONNECT_TIMEOUT,
        resume: str | None = None,
        server_port: int | None = None,
        security: str | None = None,
        password: str = "",
    ) -> None:
        check_paths(model_path=model_path, checkpoint_path=checkpoint_path)
        port = port_of(port, server_port, security=security, password=password, keys=keys, role="learner")
        where = urls_of(server_ip, cfg.SERVER_IP_FOR_TRAINER, role="learner", keys=keys, port=port, insecure=insecure)
        self.training_cls, self._dump, self._flush_every = training_cls, dump_run_instance_fn, flush_every
        self._loaded = False
        self._journal: SampleJournal | None = None
        self._resume_as = checked_resume(resume or ("none" if cfg.RESET_TRAINING else "all"))
        if self._resume_as == "none" and checkpoint_path is not None:
            put_aside(checkpoint_path)
        self.training = self._made(training_cls, checkpoint_path, load_run_instance_fn, updater_fn)
        """The training: its agent and memory."""
        super().__init__(
            self.training.agent, where, self.training.plan(), table=TABLE, topic=topic(), keys=keys, name="trainer",
            model_path=model_path, checkpoint_path=checkpoint_path,
            profile_folder=None if checkpoint_path is None else f"{checkpoint_path}_profiles", timeout=connect_timeout,
        )  # fmt: skip

    def _made(self, training_cls: Any, path: Any, load: Callable[..., Any] | None, update: Any) -> Any:
        """The training that goes on: what the caller's function loads, or a new one."""
        if load is None or path is None or not os.path.exists(path):
            made = training_cls()
            if load is not None:
                made.made_as = form_of(made.agent)
            return made
        self._loaded = True
        found = load(path)
        if update is not None:
            return update(found, training_cls)
        _take_told(found, training_cls)
        return found

    def _make_experience(self, plan: Training) -> Experience:
        _check_run(self.reader.run)
        memory, least = self.training.memory, max(1, self.reader.parameters.cache_size)
        self._rebuild(memory)
        return MemoryExperience(SampleTaker(self.reader, least, self._flush_every), memory, Buffer, self._journal)

    def _lock_checkpoint(self) -> Any:
        return super()._lock_checkpoint() if self._dump is None and not self._loaded else None  # else it is a file

    def _rebuild(self, memory: Any) -> None:
        """Give a memory the samples that a former trainer had, and open the journal of those that come."""
        if self._checkpoint_path is None or self._dump is not None or self._loaded:
            return
        if self._resume_as == "weights":
            put_aside(self._checkpoint_path / "samples")
        capacity = int(getattr(memory, "memory_size", MEMORY_SIZE))
        try:
            journal = SampleJournal(self._checkpoint_path / "samples", capacity)
        except DataError as error:
            problem = f'{error.problem}. The trainer goes on without its former samples if it gets resume="weights"'
            raise DataError(error.path, problem) from error
        self._journal = journal
        take = getattr(memory, "append", None) or memory.append_buffer
        for buffer in journal.buffers():
            take(buffer)

    def _begin_count(self, facts: Mapping[str, Any] | None) -> None:
        """Go on with the samples, and the order of draws, that a former trainer had."""
        if self._resume_as == "weights":
            self.loop.state = TrainingState()
        elif facts is not None:
            self._check_journal(facts.get("journal"))
            assert isinstance(self.experience, MemoryExperience)
            self.experience.restore(facts["experience"], facts["received"])
            self.loop.gate.updates = facts["gate"]

    def _check_journal(self, series: Any) -> None:
        """Refuse samples that are of another run than the checkpoint's."""
        if self._journal is None or series == self._journal.series:
            return
        problem = (
            f"has the samples {self._journal.series}, and the checkpoint beside it was saved with {series}: one of the "
            'two is of another trainer. Bring the right one back. Or go on without the samples (resume="weights"), or '
            'with them and a new agent (resume="memory")'
        )
        raise DataError(str(self._journal.folder), problem)

    def _facts(self) -> dict[str, Any]:
        journal = None if self._journal is None else self._journal.series
        return super()._facts() | {"journal": journal}

    def _resume(self) -> None:
        if self._loaded:
            made = self.training
            self.loop.state = TrainingState(made.epoch, made.total_updates, made.total_samples)
        elif self._dump is None and self._resume_as in ("all", "weights"):
            super()._resume()

    def save(self) -> None:
        """Write the model's file and the checkpoint; by the caller's function if there is one."""
        state = self.loop.state
        self.training.epoch, self.training.total_updates = state.epoch, state.updates
        self.training.total_samples = self.loop.samples
        if self._dump is None:
            if self._journal is not None:
                self._journal.commit()
            super().save()
            return
        super().save_model()
        if self._checkpoint_path is not None:
            self._checkpoint_path.parent.mkdir(parents=True, exist_ok=True)
            self._dump(self.training, str(self._checkpoint_path))

    def close(self) -> None:
        """Say goodbye, and let another trainer have the journal; once is enough."""
        super().close()
        if self._journal is not None:
            self._journal.close()

    def run(self, *_: Any, **__: Any) -> None:
        """Train until all epochs are over. Figures are logged each round, and go into metrics.jsonl beside the
        checkpoint after each epoch.
        """
        if self.logger is None and self._checkpoint_path is not None:
            self.logger = loggers.JsonLines(f"{self._checkpoint_path}_metrics.jsonl")
        try:
            super().run(on_round=_tell_round, on_epoch=_tell_epoch)
        finally:
            if self.logger is not None:
                self.logger.close()

    def run_with_wandb(
        self,
        entity: str = cfg.WANDB_ENTITY,
        project: str = cfg.WANDB_PROJECT,
        run_id: str = cfg.WANDB_RUN_ID,
        key: str | None = None,
    ) -> None:
        """`run`, with the figures of each epoch at wandb, too.

        Raises:
            ParameterError: a partial of the training was given arguments without their names.
            NotInstalled: wandb is not there.
        """
        config = loggers.keywords_of(self.training_cls)
        lines = None if self._checkpoint_path is None else f"{self._checkpoint_path}_metrics.jsonl"
        self.logger = loggers.Wandb(project, entity=entity, run_id=run_id, key=key, config=config, fallback=lines)
        self.run()


def _take_told(training: Any, training_cls: Any) -> None:
    """Give a training that was loaded the settings that the caller's partials name, and log what differs.

    Raises:
        ParameterError: the memory has another value, or the agent has one that training may have changed.
        DataError: the agent has other networks.
    """
    told = dict(getattr(training_cls, "keywords", {}))
    memory_cls, agent_cls = told.pop("memory_cls", None), told.pop("training_agent_cls", None)
    _refuse_others(getattr(training, "memory", None), memory_cls)
    if isinstance(agent_cls, functools.partial) and hasattr(training, "agent"):
        _tell_agent(training, agent_cls)
    known = {name: value for name, value in told.items() if hasattr(training, name)}
    plain = {name: value for name, value in known.items() if type(value) in SETTINGS}
    warn_of_told(plain, {name: getattr(training, name) for name in plain}, "trainer")
    for name, value in known.items():
        if name in plain or name == "agent_scheduler":
            setattr(training, name, value)


def _tell_agent(training: Any, agent_cls: Any) -> None:
    """Merge what an agent is told into one that was loaded, as a checkpoint is: by an agent that is made of it."""
    agent = training.agent
    if getattr(training, "made_as", None) is None:
        _refuse_others(agent, agent_cls)
        return
    loaded = state_of(agent)  # first: it has the generators of the process, from which a new agent draws
    new = agent_cls(
        observation_space=agent.observation_space, action_space=agent.action_space, device=agent.device
    )  # fmt: skip
    made = form_of(new)
    with readable(LOADED, "does not fit this agent"):
        restore(new, *loaded, training.made_as, LOADED)
        restore(agent, *state_of(new), form_of(agent), LOADED)
    training.made_as = made


def _refuse_others(owner: Any, cls: Any) -> None:
    """Refuse what a partial names if what was loaded has another value. Raises ParameterError."""
    for name, value in getattr(cls, "keywords", {}).items():
        found = getattr(owner, name, value)
        if type(value) in SETTINGS and found != value:
            raise ParameterError(name, value, f"{found!r}, as the loaded training has it; updater_fn can change it")


def _tell_round(stats: RoundStats) -> None:
    _log.info("round: %s", json.dumps({name: round(value, 6) for name, value in stats.rows().items()}))


def _tell_epoch(epoch: int, figures: dict[str, float]) -> None:
    _log.info("epoch %d is over: %s", epoch, json.dumps({name: round(value, 6) for name, value in figures.items()}))


__all__ = ["Buffer", "RolloutWorker", "Server", "Trainer", "topic"]
