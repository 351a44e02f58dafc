"""TMRL's server, rollout worker and trainer over memoire: the three kinds of processes of a pipeline.

    RolloutWorker ──samples──▶ Server ──samples──▶ Trainer       all connect to the server, whose ports have to be
                  ◀──models───        ◀──models───               reachable; they may start in any order

Nothing is pickled or downloaded, and an import makes no file. See docs/tmrl.md.
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
from memoire.rl.saving import SETTINGS, form_of, raise_data_errors, restore, state_of, warn_of_changed_settings
from memoire.rl.trainer import Trainer as NativeTrainer
from memoire.rl.trainer import checked_resume, put_aside
from memoire.rl.training import Experience, RoundStats, Training, TrainingState
from memoire.rl.worker import RolloutWorker as NativeWorker
from memoire.rl.worker import run_synchronous, step_seconds

from .addresses import check_paths, port_of, urls_of

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT: Final = 600.0
"""Seconds that workers and trainers wait for their server, with a log line each ten seconds."""
LOADED: Final = "the loaded training"
"""Name in errors of a training that the user's own function loaded."""
MEMORY_SIZE: Final = 1_000_000
"""Samples of a journal if the memory has no `memory_size`."""
TOPIC: Final = "actor"
"""First part of the models' topic; the run's name follows."""


def topic() -> str:
    """Return the topic of the configured run's models."""
    return f"{TOPIC}/{cfg.RUN_NAME}"


def _check_run(run: str) -> None:
    """Raise ParameterError if the server belongs to another run, whose topic would differ."""
    if run != cfg.RUN_NAME:
        raise ParameterError("RUN_NAME", cfg.RUN_NAME, f"{run!r}, as at the server: use one configuration for all")


class Buffer:
    """Buffer of samples in order, for a memory's `append_buffer`.

    Attributes:
        memory: Tuples (act, new_obs, rew, done, info), compressed by the worker. The sample of a reset has the device's
            action during the reset. `done` is False if the episode was truncated; then `info` has "__no_done".
        samples: The same samples with all their fields; see `memoire.rl.samples.Sample`.
        continues: True if the first sample directly follows the memory's last one.
        stat_train_return, stat_test_return, stat_train_steps, stat_test_steps: Return and length of the newest
            episodes.
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
        """Add a sample and update the statistics."""
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
        """Flag of each sample, True if the sample is of a reset."""
        return [sample.is_reset for sample in self.samples]

    def clear(self) -> None:
        """Remove all samples; the statistics stay."""
        self.memory, self.samples = [], []

    def __len__(self) -> int:
        return len(self.memory)

    def __iadd__(self, other: Buffer) -> Buffer:
        for sample in other.samples:
            self.append_sample(sample)
        return self


class Server(ClosingContext):
    """Server of a pipeline, to which workers and the trainer connect. The server runs on its own threads until `close`.

    Args:
        min_samples_per_server_packet: Samples for which the trainer waits before it takes some.
        port: Port for requests; the next two are for samples and notices. None takes the configured ports, 0 free ones.
        keys: Folder of a server's keys; None takes $MEMOIRE_KEYS. With keys it listens at all addresses of this
            machine; without keys, at 127.0.0.1.
        insecure: True listens at all addresses without keys.
        capacity: Samples that may wait for a trainer; above that, the oldest are evicted.
        state_dir: Folder in which models and totals outlive the server; None keeps them in memory.
        max_workers: Most workers at the same time; further workers wait until one leaves. None sets no limit.
        security: "TLS" of TMRL; it needs keys, by which memoire encrypts and authenticates. None requires nothing.
        password: TMRL's password. The password is not used; without keys a warning says so.

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
        host = "*" if insecure or Keys.from_setting(keys, "server") is not None else "127.0.0.1"
        request = cfg.PORT_TRAINER if port is None else port
        is_apart = port is None and request and request + 1 != cfg.PORT_ROLLOUT
        push = f"tcp://{host}:{cfg.PORT_ROLLOUT}" if is_apart else None
        table = samples_table(cfg.BUFFERS_MAXLEN if capacity is None else capacity, min_samples_per_server_packet)
        limits = Limits(max_actors=0 if max_workers is None else whole("max_workers", max_workers, 1))
        self.server = NativeServer(
            Endpoints(f"tcp://{host}:{request}", push=push), tables={TABLE: table}, limits=limits, run=cfg.RUN_NAME,
            name="server", keys=keys, state=state_dir,
        )  # fmt: skip
        """The native server, with its pages and totals."""
        _log.info("serving at %s", self.server.endpoint)

    @property
    def port(self) -> int:
        """Port for requests, to which workers and trainers connect."""
        return int(self.server.endpoint.rpartition(":")[2])

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server is closed, or for `timeout` seconds. Return True if it is closed."""
        return self.server.wait_closed(timeout)

    def close(self) -> None:
        """Stop the server and release its ports."""
        self.server.close()


class RolloutWorker(NativeWorker):
    """Worker that runs episodes and sends samples; see `memoire.rl.RolloutWorker`.

    Args:
        env_cls: Class of the environment, or a partial of one.
        actor_module_cls: Class of the policy, or a partial of one; called with both spaces.
        sample_compressor: Called as f(act, obs, rew, done, info) with each sample, or as f(act, obs, rew, terminated,
            truncated, info) if it takes six values; its result is sent.
        device: Device of the policy.
        server_ip: Name, address or URL of the server; of a list the first one that answers. None takes the configured
            one.
        min_samples_per_worker_packet: Samples that are sent together, at an episode's end.
        max_samples_per_episode: Steps after which an episode is truncated: `done` stays False, and `info` has
            "__no_done".
        model_path: File of the newest model.
        obs_preprocessor: Called with each observation before the policy sees it.
        crc_debug: Also send each transition uncompressed, for a memory with the same argument; n > 1 does so for one in
            n.
        model_path_history, model_history: Prefix of kept models' names, and one of how many is kept; 0 and -1 keep
            none.
        standalone: True connects to no server.
        keys: Folder of an actor's keys; None takes $MEMOIRE_KEYS.
        port, insecure: Settings of the server; see `Server`.
        stream: True sends within episodes, too, as soon as there are enough samples.
        name: Name on status pages.
        cpus: Processors for the thread that runs episodes; None leaves that to the system.
        connect_timeout: Seconds to wait for the server.
        server_port: Another name of port.
        security, password: See `Server`.

    Raises:
        ParameterError: the server is on another machine and there are no keys, a class is missing, or the server's
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
        for argument, value in (("env_cls", env_cls), ("actor_module_cls", actor_module_cls)):
            if value is None:
                raise ParameterError(argument, None, "a class, or a partial of one")
        urls = urls_of(server_ip, cfg.SERVER_IP_FOR_WORKER, role="actor", keys=keys, port=port, insecure=insecure)

        def recording(client: Client) -> Packets:
            _check_run(client.run)
            return Packets(
                client, sample_compressor, min_samples_per_worker_packet, stream=stream, preprocessor=obs_preprocessor,
                marks=Marks(crc_debug, client.name or client.client_id.hex()[:8]) if crc_debug else None,
            )  # fmt: skip

        super().__init__(
            env_cls, actor_module_cls, None if standalone else urls, table=TABLE, topic=topic(), recording=recording,
            keys=keys, name=name, device=device, max_samples_per_episode=max_samples_per_episode,
            model_path=model_path, model_path_history=model_path_history,
            model_history=0 if model_history == -1 else model_history,
            obs_preprocessor=obs_preprocessor, cpus=cpus, timeout=connect_timeout,
        )  # fmt: skip
        self.crc_debug = crc_debug

    def run(  # type: ignore[override]
        self, test_episode_interval: int = 0, nb_episodes: float = np.inf, verbose: bool = True, expert: bool = False
    ) -> None:
        """Run training episodes until the run is finished; see `memoire.rl.RolloutWorker.run`.

        Args:
            test_episode_interval: A test episode runs before the training episodes 0, n, 2 n and so on; 0 runs none.
            nb_episodes: Training episodes to run.
            verbose: True logs each episode.
            expert: True sends samples, but runs no test episodes, and keeps the model.
        """
        self.is_verbose = verbose
        super().run(test_episode_interval, nb_episodes, is_expert=expert)

    def run_episodes(
        self, max_samples_per_episode: float | None = None, nb_episodes: float = np.inf, train: bool = False
    ) -> None:
        """Run episodes one after the other; with `train` their samples are sent."""
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
        """Run training steps that wait for the trainer's models; see `memoire.rl.worker.run_synchronous`."""
        self.is_verbose = verbose
        run_synchronous(self, test_episode_interval, nb_steps, initial_steps, max_steps_per_update, end_episodes)

    def run_env_benchmark(self, nb_steps: int, test: bool = False, verbose: bool = True) -> dict[str, float]:
        """Measure steps without samples: their number, and the mean and greatest seconds of a step."""
        return step_seconds(self, nb_steps, test)

    def update_actor_weights(self, verbose: bool = True, blocking: bool = False) -> bool:
        """Switch to the newest model; return True if the model changed. `blocking` waits for a newer one."""
        before = self.version
        while blocking and not self.is_stopping and not self.await_model(0.5):
            pass
        self.follow()
        return self.version != before


class Trainer(NativeTrainer):
    """Trainer on samples of workers; see `memoire.rl.Trainer`.

    Args:
        training_cls: A `TrainingOffline`, or a partial of it.
        server_ip: Name, address or URL of the server; with a list, the trainer takes samples from all its servers.
        model_path: File of the newest model; must not be a worker's.
        checkpoint_path: Folder of the checkpoint; a checkpoint in it is continued. None saves nothing.
        dump_run_instance_fn: Called as f(training, checkpoint_path) in place of saving.
        load_run_instance_fn: Called as f(checkpoint_path), returns the training to continue.
        keys: Folder of a learner's keys; None takes $MEMOIRE_KEYS.
        port, insecure: Settings of the server; see `Server`.
        flush_every: Seconds after which samples are taken even if they are fewer than the server's least packet.
        updater_fn: Called as f(loaded training, training_cls), returns the training to continue.
        connect_timeout: Seconds to wait for the server.
        resume: Parts of a checkpoint to continue: "all", "memory", "weights" or "none". "weights" and "none" rename the
            files of the rest. None is "none" if the configuration sets RESET_TRAINING, else "all".
        server_port: Another name of port.
        security, password: See `Server`.

    Raises:
        ParameterError: the server is on another machine and there are no keys; or a setting differs from the
            checkpoint's or loaded training's, and training has changed it; or the server's configuration has another
            RUN_NAME.
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
        self.training = self._make_training(training_cls, checkpoint_path, load_run_instance_fn, updater_fn)
        """The training, with its agent and memory."""
        super().__init__(
            self.training.agent, where, self.training.plan(), table=TABLE, topic=topic(), keys=keys, name="trainer",
            model_path=model_path, checkpoint_path=checkpoint_path,
            profile_folder=None if checkpoint_path is None else f"{checkpoint_path}_profiles", timeout=connect_timeout,
        )  # fmt: skip

    def _make_training(self, training_cls: Any, path: Any, load: Callable[..., Any] | None, update: Any) -> Any:
        """Return the training to continue, which the caller's function loads, or a new one."""
        if load is None or path is None or not os.path.exists(path):
            training = training_cls()
            if load is not None:
                training.made_as = form_of(training.agent)
            return training
        self._loaded = True
        training = load(path)
        if update is not None:
            return update(training, training_cls)
        _apply_settings(training, training_cls)
        return training

    def _make_experience(self, plan: Training) -> Experience:
        _check_run(self.reader.run)
        memory, least = self.training.memory, max(1, self.reader.parameters.cache_size)
        self._rebuild(memory)
        return MemoryExperience(SampleTaker(self.reader, least, self._flush_every), memory, Buffer, self._journal)

    def _lock_checkpoint(self) -> Any:
        return super()._lock_checkpoint() if self._dump is None and not self._loaded else None  # otherwise read a file

    def _rebuild(self, memory: Any) -> None:
        """Fill a memory with a former trainer's samples, and open the journal for new ones."""
        if self._checkpoint_path is None or self._dump is not None or self._loaded:
            return
        if self._resume_as == "weights":
            put_aside(self._checkpoint_path / "samples")
        capacity = int(getattr(memory, "memory_size", MEMORY_SIZE))
        try:
            journal = SampleJournal(self._checkpoint_path / "samples", capacity)
        except DataError as error:
            problem = f'{error.problem}. resume="weights" starts the trainer without its former samples'
            raise DataError(error.path, problem) from error
        self._journal = journal
        take = getattr(memory, "append", None) or memory.append_buffer
        for buffer in journal.buffers():
            take(buffer)

    def _begin_count(self, facts: Mapping[str, Any] | None) -> None:
        """Continue the counts, the samples and the order of draws of a former trainer."""
        if self._resume_as == "weights":
            self.loop.state = TrainingState()
        elif facts is not None:
            self._check_journal(facts.get("journal"))
            assert isinstance(self.experience, MemoryExperience)
            self.experience.restore(facts["experience"], facts["received"])
            self.loop.gate.updates = facts["gate"]

    def _check_journal(self, series: Any) -> None:
        """Raise DataError if the samples and the checkpoint belong to different runs."""
        if self._journal is None or series == self._journal.series:
            return
        problem = (
            f"has the samples {self._journal.series}, but the checkpoint beside it was saved with {series}: one of the "
            'two is of another trainer. Restore the right one. Or continue without the samples (resume="weights"), or '
            'with the samples and a new agent (resume="memory")'
        )
        raise DataError(str(self._journal.folder), problem)

    def _facts(self) -> dict[str, Any]:
        journal = None if self._journal is None else self._journal.series
        return super()._facts() | {"journal": journal}

    def _resume(self) -> None:
        if self._loaded:
            training = self.training
            self.loop.state = TrainingState(training.epoch, training.total_updates, training.total_samples)
        elif self._dump is None and self._resume_as in ("all", "weights"):
            super()._resume()

    def save(self) -> None:
        """Write the model's file and the checkpoint; the caller's function replaces the checkpoint's."""
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
        """Disconnect from the server, and release the journal for another trainer; may be called twice."""
        super().close()
        if self._journal is not None:
            self._journal.close()

    def run(self, *_: Any, **__: Any) -> None:
        """Train until all epochs are done. Log the figures of each round, and append each epoch's to metrics.jsonl."""
        if self.logger is None and self._checkpoint_path is not None:
            self.logger = loggers.JsonLines(f"{self._checkpoint_path}_metrics.jsonl")
        try:
            super().run(on_round=_log_round, on_epoch=_log_epoch)
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
        """Train like `run`, and log the figures of each epoch to wandb, too.

        Raises:
            ParameterError: a partial of the training has positional arguments.
            NotInstalled: wandb is not installed.
        """
        config = loggers.keywords_of(self.training_cls)
        lines = None if self._checkpoint_path is None else f"{self._checkpoint_path}_metrics.jsonl"
        self.logger = loggers.Wandb(project, entity=entity, run_id=run_id, key=key, config=config, fallback=lines)
        self.run()


def _apply_settings(training: Any, training_cls: Any) -> None:
    """Set the settings of the caller's partials on a loaded training, and log those that differ.

    Raises:
        ParameterError: the memory has another value, or the agent a value that training may have changed.
        DataError: the agent has other networks.
    """
    settings = dict(getattr(training_cls, "keywords", {}))
    memory_cls, agent_cls = settings.pop("memory_cls", None), settings.pop("training_agent_cls", None)
    _check_settings(getattr(training, "memory", None), memory_cls)
    if isinstance(agent_cls, functools.partial) and hasattr(training, "agent"):
        _apply_agent_settings(training, agent_cls)
    known = {name: value for name, value in settings.items() if hasattr(training, name)}
    plain = {name: value for name, value in known.items() if type(value) in SETTINGS}
    warn_of_changed_settings(plain, {name: getattr(training, name) for name in plain}, "trainer")
    for name, value in known.items():
        if name in plain or name == "agent_scheduler":
            setattr(training, name, value)


def _apply_agent_settings(training: Any, agent_cls: Any) -> None:
    """Merge the partial's settings into a loaded agent, as for a checkpoint, by means of a new agent."""
    agent = training.agent
    if getattr(training, "made_as", None) is None:
        _check_settings(agent, agent_cls)
        return
    loaded = state_of(agent)  # read before a new agent draws from the process's generators
    new = agent_cls(
        observation_space=agent.observation_space, action_space=agent.action_space, device=agent.device
    )  # fmt: skip
    form = form_of(new)
    with raise_data_errors(LOADED, "does not fit this agent"):
        restore(new, *loaded, training.made_as, LOADED)
        restore(agent, *state_of(new), form_of(agent), LOADED)
    training.made_as = form


def _check_settings(owner: Any, cls: Any) -> None:
    """Raise ParameterError if a partial names another value than the loaded object has."""
    for name, value in getattr(cls, "keywords", {}).items():
        loaded = getattr(owner, name, value)
        if type(value) in SETTINGS and loaded != value:
            raise ParameterError(name, value, f"{loaded!r}, as the loaded training has it; updater_fn can change it")


def _log_round(stats: RoundStats) -> None:
    _log.info("round: %s", json.dumps({name: round(value, 6) for name, value in stats.rows().items()}))


def _log_epoch(epoch: int, figures: dict[str, float]) -> None:
    _log.info("epoch %d is done: %s", epoch, json.dumps({name: round(value, 6) for name, value in figures.items()}))


__all__ = ["Buffer", "RolloutWorker", "Server", "Trainer", "topic"]
