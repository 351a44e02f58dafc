"""On-policy learner: a server with one table of rollouts, paced by the models that it publishes.

    collect ──▶ rollouts ──▶ PPO.update ──▶ log ──▶ publish ──▶ collectors continue with the new model

With policy="remote", an inference node of the learner computes the actions: one forward pass for the rows of many
collectors, which send observations and need no network. With max_lag=0, a model records no entries after its share was
taken. Each rank has its own server, and takes the same number of entries.

The inference node computes an `ActorCritic` on the CPU in NumPy, as collectors do: torch takes several times as long
for so few rows.

`evaluate` runs test episodes, which are neither stored nor learned from.

A checkpoint is one file of named arrays for each rank, written atomically; the newest two of each rank are kept.

    net.*     parameters and statistics            NAME...    arrays of the algorithm's attributes, see `saving`
    :facts    counters, settings, forms of the new and the trained algorithm, generators of the process
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Final, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray

import memoire.torch
from memoire import Inference, Rollouts, Schema, Server, Table
from memoire.building import KeysLike, checked_names, lock_folder, one_of, remove_abandoned_in, whole
from memoire.building import seconds as checked_seconds
from memoire.errors import DataError, ParameterError
from memoire.kinds import unpack
from memoire.loggers import Logger

from . import weights
from .codec import mapped
from .collector import address_of_rank, for_space, inference_address
from .networks import ActorCritic, RecurrentActorCritic, World, flat_tensor
from .policies import MEMORY, TOPIC, MlpPolicy, Moments, observations_of, policy_rows, rollout_schema
from .ppo import PPO, check_correction
from .saving import FACTS, form_of, packed_tree, raise_data_errors, restore, state_of, unsaved, warn_of_changed_settings
from .spaces import with_actions
from .training import check_gamma

_log = logging.getLogger(__name__)

Network = ActorCritic | RecurrentActorCritic
Acting = Literal["local", "remote"]
"""Place where actions are computed: in collectors, or in an inference node of the learner."""
REMOTE_LAG_ADVICE: Final = (
    'with policy="remote" and max_lag above 0, actors wait while this process learns. Run a memoire.Inference that '
    "connects to this server in its own process instead"
)
RECENT_EPISODES: Final = 50
"""Number of newest episodes of each rank whose returns `recent_return` averages."""
TABLE: Final = "rollouts"
_ANY_RANKS: Final = 1 << 62  # number of ranks that a rank without a checkpoint allows


def evaluate(net: torch.nn.Module, env: Any, episodes: int = 10, *, seed: int | None = None) -> list[float]:
    """Return the returns of episodes with the network's most probable actions, or the mean actions in a Box.

    Args:
        net: Network whose `forward` is that of `ActorCritic` or of `RecurrentActorCritic`.
        env: One Gymnasium environment. The environment is reset first, and stays open.
        episodes: Number of episodes.
        seed: Seed of the first episode; the seeds of other episodes follow from it.
    """
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        memory, total, is_over = _initial_memory(net), 0.0, False
        while not is_over:
            with torch.inference_mode():
                action, memory = _best_action(net, obs, memory)
            obs, reward, terminated, truncated, _ = env.step(for_space(env.action_space, action))
            total, is_over = total + float(reward), bool(terminated or truncated)
        returns.append(total)
    return returns


def _initial_memory(net: Any) -> torch.Tensor | None:
    shape = getattr(net, "memory_shape", None)
    return None if shape is None else torch.zeros((1, *shape), device=next(net.parameters()).device)


def _best_action(net: Any, obs: Any, memory: torch.Tensor | None) -> tuple[Any, torch.Tensor | None]:
    inputs = flat_tensor(mapped(lambda part: np.asarray(part)[None], obs)).to(next(net.parameters()).device)
    distribution, _, *memories = net(inputs) if memory is None else net(inputs, memory)
    action = distribution.mode[0].cpu().numpy()
    return (action.item() if action.shape == () else action), (memories[0] if memories else None)


class ActingNode:
    """Inference node that samples actions from copies of a network.

    Args:
        endpoint: Address to listen at.
        schema: Schema of the table that collectors fill.
        keys: As of `Inference`.
    """

    def __init__(self, endpoint: str, schema: Schema, *, keys: KeysLike = None) -> None:
        self._inputs, self._outputs = policy_rows(schema)
        self._device = torch.device("cpu")
        self.node = Inference(endpoint, self._inputs, self._outputs, self._act, keys=keys)
        """Inference node; `node.stats()` returns its figures."""

    def use(self, net: torch.nn.Module, version: int) -> None:
        """Act by a copy of the network from the next batch on; returns when the node uses the copy."""
        self._device = next(net.parameters()).device
        if type(net) is ActorCritic and self._device.type == "cpu":
            # The value network is left out: the table stores no values of the policy.
            acting = {name: array for name, array in net.state_dict().items() if not name.startswith("value.")}
            self.node.update(MlpPolicy(memoire.torch.body_of(acting), version), version)
        else:
            frozen = copy.deepcopy(net).requires_grad_(requires_grad=False)
            self.node.update(frozen.eval(), version)
        self.node.wait_version(version)

    def close(self) -> None:
        """Close the inference node, which then answers no collector."""
        self.node.close()

    def _act(self, columns: Mapping[str, Any], acting: MlpPolicy | torch.nn.Module) -> dict[str, Any]:
        """Return sampled actions for rows [B] and the other columns that the table stores of a policy."""
        if isinstance(acting, MlpPolicy):
            results = acting.act(observations_of(self._inputs, columns))
        else:
            results = self._act_by_torch({name: self._tensor(columns[name]) for name in self._inputs.names}, acting)
        column, action = self._outputs["action"], results["action"]
        outputs = {name: results[name] for name in self._outputs.roots}
        return outputs | {"action": action.astype(column.dtype).reshape(-1, *column.shape)}

    def _act_by_torch(self, columns: Mapping[str, torch.Tensor], net: torch.nn.Module) -> dict[str, Any]:
        obs = observations_of(self._inputs, columns)
        with torch.inference_mode():
            if MEMORY in columns:
                distribution, _, memory = net(obs, columns[MEMORY])
                memories = {MEMORY: memory.cpu().numpy()}
            else:
                (distribution, _), memories = net(obs), {}
            action = distribution.sample()
            logp = distribution.log_prob(action)
        return memories | {"action": action.cpu().numpy(), "logp": logp.cpu().numpy()}

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.require(array, requirements="W")).to(self._device)


SAVED_APART: Final = ("net", "_plain")
"""Attributes of an algorithm that the learner saves itself."""


class Checkpoints:
    """Checkpoint files of one rank in a folder, which is created; the files are locked until `close`.

    Raises:
        StateLocked: another learner uses the files of this rank.
        StateForeign: the path of the lock file holds another kind of file.
    """

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.folder = Path(folder).absolute()
        self._files = weights.NumberedFiles(self.folder, f"rank-{rank}-")
        self.folder.mkdir(parents=True, exist_ok=True)
        files = f"rank {rank} of the checkpoint folder"
        self._lock = lock_folder(self.folder, files, "learner", name=f"rank-{rank}.lock")
        remove_abandoned_in(self.folder, ".safetensors")

    def close(self) -> None:
        """Release the lock, so that another learner may use the files."""
        self._lock.release()

    def newest(self) -> int:
        """Return the iteration of the newest checkpoint; -1 without checkpoints."""
        newest = self._files.newest()
        return -1 if newest is None else newest

    def save(self, iteration: int, net: torch.nn.Module, algorithm: Any, form: Any, facts: Mapping[str, Any]) -> Path:
        """Write a checkpoint to disk and return its path; checkpoints before the last two are removed.

        Args:
            algorithm: Algorithm to save, or None.
            form: `form_of` the algorithm before training.
            facts: Counters and settings of the learner.
        """
        arrays, tree = state_of(SimpleNamespace(net=net))
        algorithm_arrays, state = ({}, {"agent": None}) if algorithm is None else state_of(algorithm, SAVED_APART)
        tree |= {"algorithm": state["agent"], "made": form, "facts": dict(facts)}
        return self._files.save(iteration, arrays | algorithm_arrays | {FACTS: packed_tree(tree)})

    def load(self, iteration: int) -> SavedLearner:
        """Return the checkpoint of an iteration. Raises OSError, DataError: the file is missing or damaged."""
        return SavedLearner(self._files.path(iteration))


class SavedLearner:
    """Contents of a checkpoint: arrays, counters and settings of a learner.

    Raises:
        OSError: the file cannot be read.
        DataError: the file is damaged, or not a checkpoint of a learner.
    """

    def __init__(self, path: Path) -> None:
        self._arrays, self._path = weights.load(path), str(path)
        with raise_data_errors(self._path, "is not a checkpoint of a learner"):
            self._tree = unpack(self._arrays.pop(FACTS).tobytes(), self._path)
            self.facts: dict[str, Any] = dict(self._tree["facts"])
            """Counters and settings of the learner."""
            self.has_algorithm = self._tree["algorithm"] is not None
            self.settings: dict[str, Any] = dict(self.facts["settings"])
            """Settings of the learner that wrote the checkpoint."""
            self.ranks, self.every = int(self.settings["ranks"]), int(self.settings["checkpoint_every"])
            self.steps, self.iterations = int(self.facts["steps"]), int(self.facts["iterations"])
            self.version = int(self.facts["version"])

    def restore_net(self, net: torch.nn.Module) -> None:
        """Restore parameters, statistics and the process' generators. Raises DataError: the network does not fit."""
        with raise_data_errors(self._path, "does not fit this network"):
            restore(SimpleNamespace(net=net), self._arrays, self._tree, {}, self._path)

    def restore_algorithm(self, algorithm: Any) -> None:
        """Restore an algorithm's attributes and the process' generators; do nothing if no algorithm was saved.

        Raises:
            DataError, ParameterError: see `saving.restore`.
        """
        if self.has_algorithm:
            tree = {"agent": self._tree["algorithm"], "random": self._tree["random"]}
            with raise_data_errors(self._path, "does not fit this algorithm"):
                restore(algorithm, self._arrays, tree, self._tree["made"], self._path, SAVED_APART)


class OnPolicyLearner:
    """On-policy learner: takes rollouts from its server and publishes models.

    Args:
        endpoint: Address of the server; rank r of a machine adds 10 r to the port. The inference node adds 3 to that.
        env: An environment or vector environment, or an object with its two spaces.
        net: Network to train; it is changed in place.
        steps: Entries of each iteration, of all ranks together.
        rollout_length: Entries of a full fragment.
        max_lag: Versions that entries may be older than the newest model; 0 is strict.
        correction: Name of the correction of old entries, as of `PPO`; required if max_lag is above 0.
        policy: "local": collectors act by published models. "remote": they ask an inference node in this process,
            whose address the server tells them; the node acts by any `net`, and answers between two updates.
        seconds: Time limit after which `is_over` is True; None sets no limit.
        checkpoint: Folder of checkpoints; the learner continues from an existing one. None saves nothing.
        checkpoint_every: Iterations between two checkpoints.
        discount: Discount of the table, for advantages and for the sums by whose spread a network scales rewards.
        keys, run: As of `Server`.
        logger: Logger that receives the logged figures, too.
        world: Rank and number of ranks; None takes those of torchrun.

    Raises:
        ParameterError: a setting is out of its range, the correction is missing, or a checkpoint has fewer ranks.
        DataError: the checkpoint is damaged, or belongs to another network.
        EndpointError: the address is in use or malformed.

    Example:
        learner = OnPolicyLearner("tcp://127.0.0.1:5560", envs, ActorCritic.mlp(envs), seconds=600.0)
        ppo = PPO(learner.net)
        with learner:
            while not learner.is_over:
                learner.log(ppo.update(learner.collect()))
                learner.publish()
    """

    @checked_names()
    def __init__(
        self,
        endpoint: str,
        env: Any,
        net: Network,
        steps: int = 8192,
        rollout_length: int = 512,
        *,
        max_lag: int = 0,
        correction: str | None = None,
        policy: Acting = "local",
        seconds: float | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 1,
        discount: float = 0.99,
        keys: KeysLike = None,
        run: str | None = None,
        logger: Logger | None = None,
        world: World | None = None,
    ) -> None:
        self.world = World.from_environment() if world is None else world
        self.max_lag = whole("max_lag", max_lag, 0)
        net.correction = check_correction(correction)
        if max_lag and correction is None:
            raise ParameterError("correction", None, "'vtrace', 'decoupled' or 'none', because max_lag is above 0")
        if whole("steps", steps, 1) % self.world.size:
            raise ParameterError("steps", steps, f"a multiple of the {self.world.size} ranks")
        if policy not in get_args(Acting):
            raise ParameterError("policy", policy, one_of(policy, get_args(Acting)))
        if policy == "local" and _memory_of(net):
            raise ParameterError("policy", policy, "'remote', because collectors cannot compute a recurrent network")
        if max_lag and policy == "remote":
            _log.warning(REMOTE_LAG_ADVICE)
        self._share, self._all = steps // self.world.size, steps
        self._env, self._plain, self._ppo = env, net, None  # type: Any, Network, PPO | None
        self._form: Any = None  # form of the algorithm before training
        self._every = whole("checkpoint_every", checkpoint_every, 1)
        self._logger = logger
        self._deadline = time.monotonic() + checked_seconds(seconds)
        self._pending: dict[str, Moments] = {}
        self.steps = self.iterations = 0
        """Numbers of entries that all ranks have taken, and of models published after them."""
        self.recent_return = -math.inf
        """Mean return of the newest episodes at the last `collect`; -inf below `RECENT_EPISODES` episodes."""
        self.settings: dict[str, Any] = {
            "steps": steps, "rollout_length": rollout_length, "max_lag": max_lag, "correction": correction,
            "policy": policy, "checkpoint_every": checkpoint_every, "discount": discount, "ranks": self.world.size,
        }  # fmt: skip
        """Settings of the learner, as checkpoints store them."""
        self._files = None if checkpoint is None else Checkpoints(checkpoint, self.world.rank)
        self._acting: ActingNode | None = None
        table = Table(
            rollout_schema(env, _memory_of(net), discounted=net.rewards is not None), storage="rollouts",
            rollout_length=rollout_length, capacity=self._share, max_model_lag=max_lag, discount=discount,
        )  # fmt: skip
        try:
            self._restored = self._resume()
            self.net = self.world.wrap(net)
            """Network to train: `net`, or DistributedDataParallel around `net` for several ranks."""
            place = address_of_rank(endpoint, self.world.port_offset)
            if policy == "remote":
                self._acting = ActingNode(inference_address(place), table.schema, keys=keys)
            nodes = [] if self._acting is None else [self._acting.node.endpoint]
            self.server = Server(place, tables={TABLE: table}, keys=keys, run=run, inference=nodes)
            """Server of the learner; collectors connect to `server.endpoint`."""
            self._publish(net.version + 1)
        except BaseException:
            self._close_others()
            raise

    @property
    def inference(self) -> Inference | None:
        """Inference node that acts for collectors; None with policy="local"."""
        return None if self._acting is None else self._acting.node

    def keep(self, ppo: PPO) -> PPO:
        """Save this algorithm's state in checkpoints, restore it from the last one, and return the algorithm.

        Settings that differ from those in the checkpoint keep their new values, and the log names both.

        Raises:
            ParameterError: the algorithm has another discount than the table, or another value of an attribute that
                training has changed since.
            DataError: the checkpoint belongs to another algorithm.
        """
        check_gamma(ppo, self.server.table(TABLE).parameters.discount)
        form = form_of(ppo, SAVED_APART)
        if self._restored is not None:
            self._restored.restore_algorithm(ppo)
        self._ppo, self._form = ppo, form
        if self._files is not None and (names := unsaved(ppo, SAVED_APART)):
            _log.warning("checkpoints do not hold these attributes of the algorithm: %s", ", ".join(names))
        return ppo

    def collect(self, timeout: float = 60.0) -> Rollouts:
        """Take the next `steps` / ranks entries, all or nothing; each entry is taken once.

        Raises:
            NotEnoughSamples: too few entries came within `timeout` seconds; the error says how many.
            RanksDiffer: the ranks have different numbers of entries, or different versions.
        """
        release: Any = "now" if self.max_lag else "publish"
        rollouts = self.server.table(TABLE).take(self._share, timeout, release=release)
        self.world.check_equal(entries=len(rollouts), version=self._plain.version)
        for name, part in self._plain.moments_of(rollouts).items():
            self._pending.setdefault(name, Moments(part.mean.shape)).merge(part)
        self.steps += self._all
        newest = [ended.returned for _, ended in self.server.episodes(RECENT_EPISODES)]
        total, count = self.world.sums([sum(newest), len(newest)])
        self.recent_return = float(total / count) if count >= RECENT_EPISODES else -math.inf
        return rollouts

    def evaluate(self, env: Any, episodes: int = 10, *, seed: int | None = None) -> float:
        """Run test episodes by the most probable actions; return their mean return, and log it as `test_return`.

        Test episodes are not stored, and no total counts them. Collectors wait meanwhile if max_lag is 0.

        Args:
            env: One Gymnasium environment, which no collector uses.
            episodes: Number of episodes.
            seed: Seed of the first episode.
        """
        returned = float(np.mean(evaluate(self._plain, env, episodes, seed=seed)))
        self.log({"test_return": returned})
        return returned

    def log(self, figures: Mapping[str, float]) -> None:
        """Show figures on the server's pages, with steps and the recent return, and pass them to the logger."""
        recent = {"recent_return": self.recent_return} if math.isfinite(self.recent_return) else {}
        values = {name: value for name, value in figures.items() if math.isfinite(value)} | recent
        self.server.scalars(values | {"learner_steps": float(self.steps)})
        if self._logger is not None:
            self._logger.log(values, self.steps)

    def publish(self) -> int:
        """Publish the network as the next model and return its version.

        Before that, the network merges the statistics of the rollouts, and a checkpoint is saved if it is due.
        """
        self._merge()
        self.iterations += 1
        version = self._plain.version + 1
        if self._files is not None and self.iterations % self._every == 0:
            facts = {"steps": self.steps, "iterations": self.iterations, "version": version, "settings": self.settings}
            if self._ppo is None and self._restored is not None and self._restored.has_algorithm:
                _log.warning("the new checkpoint lacks the algorithm's state, which the former one has: call keep(...)")
            self._files.save(self.iterations, self._plain, self._ppo, self._form, facts)
        return self._publish(version)

    @property
    def is_over(self) -> bool:
        """True if the time limit has passed, or the run was declared finished."""
        return time.monotonic() >= self._deadline or self.server.finished

    def close(self, timeout: float | None = None) -> None:
        """Close the server and the inference node. The run does not finish: `server.finish()` ends its collectors."""
        self.server.close(timeout)
        self._close_others()  # closed after the server: collectors know of the end and ask no more

    def _close_others(self) -> None:
        if self._acting is not None:
            self._acting.close()
        if self._files is not None:
            self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after an error, collectors wait until the learner restarts
            self.server.finish()
        self.close()

    def _publish(self, version: int) -> int:
        self._plain.version = version
        if self._acting is not None:  # set first: actors continue as soon as a reply names the new version
            self._acting.use(self._plain, version)
        body = with_actions(memoire.torch.body_of(self._plain), self._env)
        return self.server.publish(TOPIC, body, version=version)

    def _merge(self) -> None:
        for name, part in self._pending.items():
            sums = self.world.sums(np.stack([part.mean, part.variance + part.mean**2]) * part.count)
            count = self.world.sums([part.count])[0]
            merged = Moments(part.mean.shape)
            merged.mean, merged.count = sums[0] / count, float(count)
            merged.variance = np.maximum(sums[1] / count - merged.mean**2, 0.0)
            self._plain.merge({name: merged})
        self._pending = {}

    def _resume(self) -> SavedLearner | None:
        """Restore the newest checkpoint that all ranks have, and return it; None without a common checkpoint."""
        if self._files is None:
            return None
        local = self._files.newest()
        newest = self.world.minimum([local])[0]
        saved: SavedLearner | None = None
        problem: Exception | None = None
        try:
            if local >= 0:
                saved = self._files.load(local if newest < 0 else newest)
        except (OSError, DataError) as error:
            problem = error
        # All ranks raise the error of one rank: otherwise the other ranks would wait for it.
        ranks, is_read = self.world.minimum([_ANY_RANKS if saved is None else saved.ranks, int(problem is None)])
        if problem is not None:
            raise problem
        if not is_read:
            raise DataError(str(self._files.folder), "cannot be restored: another rank cannot read its checkpoint")
        if ranks < self.world.size:
            expected = f"at most {ranks}, the number of ranks that {self._files.folder} has checkpoints of"
            raise ParameterError("ranks", self.world.size, expected)
        if newest < 0 or saved is None:  # a rank died before it had written its first checkpoint
            return None
        warn_of_changed_settings(self.settings, saved.settings, "learner")
        saved.restore_net(self._plain)
        self.steps, self.iterations = saved.steps, saved.iterations
        # Models published after the checkpoint are unknown here: at most checkpoint_every - 1 models.
        self._plain.version = saved.version + saved.every - 1
        return saved


def _memory_of(net: torch.nn.Module) -> dict[str, Any]:
    shape = getattr(net, "memory_shape", None)
    return {} if shape is None else {MEMORY: (np.float32, shape)}
