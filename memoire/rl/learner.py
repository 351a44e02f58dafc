"""An on-policy learner: a server with one table of rollouts, paced by the models that it publishes.

    collect ──▶ rollouts ──▶ PPO.update ──▶ log ──▶ publish ──▶ collectors go on with the new model

With policy="remote" it computes the actions of its collectors, too: they send observations, and need no network. With
max_lag=0 no entry is recorded by a model whose share is taken already. Each rank of several has a server of its
own, and takes the same number of entries.

Its network is then the policy of an inference node: one forward pass for the rows of many collectors.

An `ActorCritic` on the CPU is computed in NumPy, as collectors do: torch takes several times as long for so few rows.

`evaluate` plays episodes to see how good a network is: apart from those of collectors, and never learned from.

A checkpoint has its state as named arrays in one file: written as a whole, one for each rank, the newest two of each.

    net.*     parameters and statistics            NAME...    arrays of the algorithm's attributes, see `saving`
    :facts    counters, settings, the algorithm as it was made and as it is, generators of the process
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
from memoire.building import Given, checked_names, lock_folder, one_of, remove_abandoned_in, whole
from memoire.building import seconds as checked_seconds
from memoire.errors import DataError, ParameterError
from memoire.kinds import unpack
from memoire.loggers import Logger

from . import weights
from .codec import mapped
from .collector import address_of_rank, beside, for_space
from .networks import ActorCritic, RecurrentActorCritic, World, flat_tensor
from .policies import MEMORY, TOPIC, MlpPolicy, Moments, observations_of, policy_rows, rollout_schema
from .ppo import PPO, check_correction
from .saving import FACTS, form_of, packed_tree, readable, restore, state_of, unsaved, warn_of_told
from .spaces import with_actions
from .training import check_gamma

_log = logging.getLogger(__name__)

Network = ActorCritic | RecurrentActorCritic
Acting = Literal["local", "remote"]
"""Where actions are computed: in collectors, or in an inference node of the learner."""
ADVICE: Final = (
    'with max_lag above 0, policy="remote" makes actors wait while this process learns. Run a memoire.Inference that '
    "connects to this server in a process of its own"
)
RECENT: Final = 50
"""Newest episodes of each rank whose returns `recent_return` averages."""
TABLE: Final = "rollouts"
_ANY_RANKS: Final = 1 << 62  # that a rank without a checkpoint allows


def evaluate(net: torch.nn.Module, env: Any, episodes: int = 10, *, seed: int | None = None) -> list[float]:
    """The returns of episodes in which the network takes its most probable action, or the mean in a Box.

    Args:
        net: Of which `forward` is that of `ActorCritic`, or of `RecurrentActorCritic`.
        env: One Gymnasium environment. It is reset at first, and stays open.
        episodes: How many.
        seed: Of the first episode; the others follow from it.
    """
    returns = []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed if episode == 0 else None)
        memory, total, is_over = _nothing(net), 0.0, False
        while not is_over:
            with torch.inference_mode():
                action, memory = _best(net, obs, memory)
            obs, reward, terminated, truncated, _ = env.step(for_space(env.action_space, action))
            total, is_over = total + float(reward), bool(terminated or truncated)
        returns.append(total)
    return returns


def _nothing(net: Any) -> torch.Tensor | None:
    """What a recurrent network remembers at first."""
    shape = getattr(net, "memory_shape", None)
    return None if shape is None else torch.zeros((1, *shape), device=next(net.parameters()).device)


def _best(net: Any, obs: Any, memory: torch.Tensor | None) -> tuple[Any, torch.Tensor | None]:
    """An action for one observation [*F], and what is remembered then."""
    inputs = flat_tensor(mapped(lambda part: np.asarray(part)[None], obs)).to(next(net.parameters()).device)
    distribution, _, *rest = net(inputs) if memory is None else net(inputs, memory)
    action = distribution.mode[0].cpu().numpy()
    return (action.item() if action.shape == () else action), (rest[0] if rest else None)


class ActingNode:
    """An inference node that samples actions from copies of a network.

    Args:
        endpoint: Where it listens.
        schema: Of the table that collectors fill.
        keys: As of `Inference`.
    """

    def __init__(self, endpoint: str, schema: Schema, *, keys: Given = None) -> None:
        self._inputs, self._outputs = policy_rows(schema)
        self._device = torch.device("cpu")
        self.node = Inference(endpoint, self._inputs, self._outputs, self._act, keys=keys)
        """Its figures are `node.stats()`."""

    def use(self, net: torch.nn.Module, version: int) -> None:
        """Act by the network as it is now from the next batch on; returns when that is so."""
        self._device = next(net.parameters()).device
        if type(net) is ActorCritic and self._device.type == "cpu":
            # The table stores no values of the policy that acted.
            acting = {name: array for name, array in net.state_dict().items() if not name.startswith("value.")}
            self.node.update(MlpPolicy(memoire.torch.body_of(acting), version), version)
        else:
            copied = copy.deepcopy(net).requires_grad_(requires_grad=False)
            self.node.update(copied.eval(), version)
        self.node.wait_version(version)

    def close(self) -> None:
        """Answer no more."""
        self.node.close()

    def _act(self, columns: Mapping[str, Any], acting: MlpPolicy | torch.nn.Module) -> dict[str, Any]:
        """Sampled actions for rows [B], and what else the table stores of a policy."""
        if isinstance(acting, MlpPolicy):
            found = acting.act(observations_of(self._inputs, columns))
        else:
            found = self._by_torch({name: self._tensor(columns[name]) for name in self._inputs.names}, acting)
        column, action = self._outputs["action"], found["action"]
        made = {name: found[name] for name in self._outputs.roots}
        return made | {"action": action.astype(column.dtype).reshape(-1, *column.shape)}

    def _by_torch(self, columns: Mapping[str, torch.Tensor], net: torch.nn.Module) -> dict[str, Any]:
        obs = observations_of(self._inputs, columns)
        with torch.inference_mode():
            if MEMORY in columns:
                distribution, _, memory = net(obs, columns[MEMORY])
                found = {MEMORY: memory.cpu().numpy()}
            else:
                (distribution, _), found = net(obs), {}
            action = distribution.sample()
            logp = distribution.log_prob(action)
        return found | {"action": action.cpu().numpy(), "logp": logp.cpu().numpy()}

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        """A tensor of an array [B, *F]; of a copy, if it lies in a message that is only to be read."""
        return torch.from_numpy(np.require(array, requirements="W")).to(self._device)


SAVED_APART: Final = ("net", "_plain")
"""Attributes of an algorithm that the learner saves by itself."""


class Checkpoints:
    """The files of one rank in a folder, which is made. They are locked until `close`.

    Raises:
        StateLocked: another learner has the files of this rank.
        StateForeign: the path of the lock file holds something else.
    """

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.folder = Path(folder).absolute()
        self._files = weights.NumberedFiles(self.folder, f"rank-{rank}-")
        self.folder.mkdir(parents=True, exist_ok=True)
        what = f"rank {rank} of the checkpoint folder"
        self._lock = lock_folder(self.folder, what, "learner", name=f"rank-{rank}.lock")
        remove_abandoned_in(self.folder, ".safetensors")

    def close(self) -> None:
        """Let another learner have the files; once is enough."""
        self._lock.release()

    def newest(self) -> int:
        """The newest iteration that was saved; -1 if there is none."""
        newest = self._files.newest()
        return -1 if newest is None else newest

    def save(self, iteration: int, net: torch.nn.Module, algorithm: Any, made: Any, facts: Mapping[str, Any]) -> Path:
        """Write what goes on after a restart; on disk when this returns; checkpoints before the last two are gone.

        Args:
            algorithm: None is none.
            made: `form_of` the algorithm as it was made.
            facts: What the learner counts, and its settings.
        """
        arrays, tree = state_of(SimpleNamespace(net=net))
        own, state = ({}, {"agent": None}) if algorithm is None else state_of(algorithm, SAVED_APART)
        tree |= {"algorithm": state["agent"], "made": made, "facts": dict(facts)}
        return self._files.save(iteration, arrays | own | {FACTS: packed_tree(tree)})

    def load(self, iteration: int) -> SavedLearner:
        """A checkpoint. Raises OSError, DataError: it is not there, or damaged."""
        return SavedLearner(self._files.path(iteration))


class SavedLearner:
    """What a checkpoint holds.

    Raises:
        OSError, DataError: it is not there, damaged, or no checkpoint of a learner.
    """

    def __init__(self, path: Path) -> None:
        self._arrays, self._path = weights.load(path), str(path)
        with readable(self._path, "is no checkpoint of a learner"):
            self._tree = unpack(self._arrays.pop(FACTS).tobytes(), self._path)
            self.facts: dict[str, Any] = dict(self._tree["facts"])
            """What the learner counts, and its settings."""
            self.has_algorithm = self._tree["algorithm"] is not None
            self.settings: dict[str, Any] = dict(self.facts["settings"])
            """The settings that the learner was made with."""
            self.ranks, self.every = int(self.settings["ranks"]), int(self.settings["checkpoint_every"])
            self.steps, self.iterations = int(self.facts["steps"]), int(self.facts["iterations"])
            self.version = int(self.facts["version"])

    def restore_net(self, net: torch.nn.Module) -> None:
        """Put parameters, statistics and the process' generators back. Raises DataError: it is another network's."""
        with readable(self._path, "does not fit this network"):
            restore(SimpleNamespace(net=net), self._arrays, self._tree, {}, self._path)

    def restore_algorithm(self, algorithm: Any) -> None:
        """Put an algorithm's attributes and the generators of the process back; as it is if nothing was saved.

        Raises:
            DataError, ParameterError: see `saving.restore`.
        """
        if self.has_algorithm:
            tree = {"agent": self._tree["algorithm"], "random": self._tree["random"]}
            with readable(self._path, "does not fit this algorithm"):
                restore(algorithm, self._arrays, tree, self._tree["made"], self._path, SAVED_APART)


class OnPolicyLearner:
    """Takes rollouts and publishes models.

    Args:
        endpoint: Of the server; rank r of a machine takes the port 10 r above. An inference node takes the port 3 above
            that.
        env: An environment or vector environment, or anything with its two spaces.
        net: What learns; it is changed in place.
        steps: Entries of each iteration, of all ranks together.
        rollout_length: Entries of a full fragment.
        max_lag: Versions that entries may be older than the newest model. 0 is strict.
        correction: Of old entries, by name, as of `PPO`; has to be given if max_lag is above 0.
        policy: "local": collectors act by the models that are published. "remote": they ask an inference node in this
            process, which the server tells them of; it acts by any `net`, and answers them between two updates.
        seconds: After so many `is_over` is true; None never.
        checkpoint: Folder of the state after iterations; with one that is there, the learner goes on. None saves
            nothing.
        checkpoint_every: Iterations between two checkpoints.
        discount: Of the table: of advantages, and of the sums by whose spread a network scales rewards.
        keys, run: As of `Server`.
        logger: Gets what is logged, too.
        world: Rank and number of ranks; None is what torchrun says.

    Raises:
        ParameterError: a setting is out of its range, or a correction is missing; or a checkpoint is of fewer ranks.
        DataError: the checkpoint is damaged, or of another network.
        EndpointError: the address is in use or malformed.
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
        keys: Given = None,
        run: str | None = None,
        logger: Logger | None = None,
        world: World | None = None,
    ) -> None:
        self.world = World.from_environment() if world is None else world
        self.max_lag = whole("max_lag", max_lag, 0)
        net.correction = check_correction(correction)
        if max_lag and correction is None:
            raise ParameterError("correction", None, "named if max_lag is above 0: vtrace, decoupled or none")
        if whole("steps", steps, 1) % self.world.size:
            raise ParameterError("steps", steps, f"a multiple of the {self.world.size} ranks")
        if policy not in get_args(Acting):
            raise ParameterError("policy", policy, one_of(policy, get_args(Acting)))
        if policy == "local" and _memory_of(net):
            raise ParameterError("policy", policy, "'remote' for a recurrent network: collectors cannot compute it")
        if max_lag and policy == "remote":
            _log.warning(ADVICE)
        self._share, self._all = steps // self.world.size, steps
        self._env, self._plain, self._ppo = env, net, None  # type: Any, Network, PPO | None
        self._made: Any = None  # form of the algorithm before it was trained
        self._every = whole("checkpoint_every", checkpoint_every, 1)
        self._logger = logger
        self._deadline = time.monotonic() + checked_seconds(seconds)
        self._pending: dict[str, Moments] = {}
        self.steps = self.iterations = 0
        """Entries that were taken by all ranks, and times that a model was published after them."""
        self.recent_return = -math.inf
        """Mean return of the newest episodes as of the last `collect`; -inf until there were `RECENT` of them."""
        self.settings: dict[str, Any] = {
            "steps": steps, "rollout_length": rollout_length, "max_lag": max_lag, "correction": correction,
            "policy": policy, "checkpoint_every": checkpoint_every, "discount": discount, "ranks": self.world.size,
        }  # fmt: skip
        """What it was told, as its checkpoint keeps it."""
        self._files = None if checkpoint is None else Checkpoints(checkpoint, self.world.rank)
        self._acting: ActingNode | None = None
        table = Table(
            rollout_schema(env, _memory_of(net), discounted=net.rewards is not None), storage="rollouts",
            rollout_length=rollout_length, capacity=self._share, max_model_lag=max_lag, discount=discount,
        )  # fmt: skip
        try:
            self._restored = self._resume()
            self.net = self.world.wrap(net)
            """What learns: `net`, or that inside of DistributedDataParallel."""
            place = address_of_rank(endpoint, self.world.place)
            if policy == "remote":
                self._acting = ActingNode(beside(place), table.schema, keys=keys)
            nodes = [] if self._acting is None else [self._acting.node.endpoint]
            self.server = Server(place, tables={TABLE: table}, keys=keys, run=run, inference=nodes)
            """Its server; `server.endpoint` is where collectors connect to."""
            self._publish(net.version + 1)
        except BaseException:
            self._close_others()
            raise

    @property
    def inference(self) -> Inference | None:
        """The node that acts for collectors; None with policy="local"."""
        return None if self._acting is None else self._acting.node

    def keep(self, ppo: PPO) -> PPO:
        """Have checkpoints hold this algorithm's state, and put back what the last one held; returns it.

        Settings that differ from those in the checkpoint stay as told, and the log names both.

        Raises:
            ParameterError: it has another discount than the table, or another value of something that training has
                changed since.
            DataError: the checkpoint is of another algorithm.
        """
        check_gamma(ppo, self.server.table(TABLE).parameters.discount)
        made = form_of(ppo, SAVED_APART)
        if self._restored is not None:
            self._restored.restore_algorithm(ppo)
        self._ppo, self._made = ppo, made
        if self._files is not None and (names := unsaved(ppo, SAVED_APART)):
            _log.warning("checkpoints do not hold these attributes of the algorithm: %s", ", ".join(names))
        return ppo

    def collect(self, timeout: float = 60.0) -> Rollouts:
        """The next `steps` / ranks entries, each taken once; all of them or none.

        Raises:
            NotEnoughSamples: too few came within `timeout` seconds; it says what was missing.
            RanksDiffer: the ranks do not agree about entries or version.
        """
        release: Any = "now" if self.max_lag else "publish"
        rollouts = self.server.table(TABLE).take(self._share, timeout, release=release)
        self.world.check_equal(entries=len(rollouts), version=self._plain.version)
        for name, part in self._plain.moments_of(rollouts).items():
            self._pending.setdefault(name, Moments(part.mean.shape)).merge(part)
        self.steps += self._all
        newest = [ended.returned for _, ended in self.server.episodes(RECENT)]
        total, count = self.world.sums([sum(newest), len(newest)])
        self.recent_return = float(total / count) if count >= RECENT else -math.inf
        return rollouts

    def evaluate(self, env: Any, episodes: int = 10, *, seed: int | None = None) -> float:
        """The mean return of episodes that are played here by the most probable actions, and shown as `test_return`.

        They are no samples, and count in no totals. Collectors wait meanwhile if max_lag is 0.

        Args:
            env: One Gymnasium environment, apart from the collectors'.
            seed: Of the first episode.
        """
        returned = float(np.mean(evaluate(self._plain, env, episodes, seed=seed)))
        self.log({"test_return": returned})
        return returned

    def log(self, figures: Mapping[str, float]) -> None:
        """Show figures on the server's pages, beside steps and the recent return, and hand them to the logger."""
        recent = {"recent_return": self.recent_return} if math.isfinite(self.recent_return) else {}
        shown = {name: value for name, value in figures.items() if math.isfinite(value)} | recent
        self.server.scalars(shown | {"learner_steps": float(self.steps)})
        if self._logger is not None:
            self._logger.log(shown, self.steps)

    def publish(self) -> int:
        """Publish the network as the next model, after it has taken in what rollouts say of observations and rewards,
        and save a checkpoint if it is time; returns the version.
        """
        self._merge()
        self.iterations += 1
        version = self._plain.version + 1
        if self._files is not None and self.iterations % self._every == 0:
            facts = {"steps": self.steps, "iterations": self.iterations, "version": version, "settings": self.settings}
            if self._ppo is None and self._restored is not None and self._restored.has_algorithm:
                _log.warning("the checkpoint before has the state of an algorithm, this one has none: call keep(...)")
            self._files.save(self.iterations, self._plain, self._ppo, self._made, facts)
        return self._publish(version)

    @property
    def is_over(self) -> bool:
        """Whether the time is up, or the run was declared finished."""
        return time.monotonic() >= self._deadline or self.server.finished

    def close(self, timeout: float | None = None) -> None:
        """Close the server and the inference node. The run stays as it is: `server.finish()` ends it for collectors."""
        self.server.close(timeout)
        self._close_others()  # collectors that have heard of the end ask no more

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
        if kind is None:  # a learner that fails is started again, and its collectors wait for it
            self.server.finish()
        self.close()

    def _publish(self, version: int) -> int:
        self._plain.version = version
        if self._acting is not None:  # first, since actors go on as soon as they hear of the new version
            self._acting.use(self._plain, version)
        body = with_actions(memoire.torch.body_of(self._plain), self._env)
        return self.server.publish(TOPIC, body, version=version)

    def _merge(self) -> None:
        """Let the network take in what all ranks have seen since the last model."""
        for name, part in self._pending.items():
            sums = self.world.sums(np.stack([part.mean, part.variance + part.mean**2]) * part.count)
            count = self.world.sums([part.count])[0]
            merged = Moments(part.mean.shape)
            merged.mean, merged.count = sums[0] / count, float(count)
            merged.variance = np.maximum(sums[1] / count - merged.mean**2, 0.0)
            self._plain.merge({name: merged})
        self._pending = {}

    def _resume(self) -> SavedLearner | None:
        """Go on after the newest checkpoint that all ranks have; None if there is none."""
        if self._files is None:
            return None
        own = self._files.newest()
        newest = self.world.least([own])[0]
        saved: SavedLearner | None = None
        problem: Exception | None = None
        try:
            if own >= 0:
                saved = self._files.load(own if newest < 0 else newest)
        except (OSError, DataError) as error:
            problem = error
        # What one rank finds, each of them raises: else the others wait for it.
        ranks, is_read = self.world.least([_ANY_RANKS if saved is None else saved.ranks, int(problem is None)])
        if problem is not None:
            raise problem
        if not is_read:
            raise DataError(str(self._files.folder), "cannot be gone on from: another rank cannot read its checkpoint")
        if ranks < self.world.size:
            expected = f"at most {ranks}, as in {self._files.folder}, which has the state of each rank"
            raise ParameterError("ranks", self.world.size, expected)
        if newest < 0 or saved is None:  # a rank died before it had written its first one
            return None
        warn_of_told(self.settings, saved.settings, "learner")
        saved.restore_net(self._plain)
        self.steps, self.iterations = saved.steps, saved.iterations
        # Models that were published since are unknown here: at most one less than lay between two checkpoints.
        self._plain.version = saved.version + saved.every - 1
        return saved


def _memory_of(net: torch.nn.Module) -> dict[str, Any]:
    """The column for what a recurrent network remembers; {} if it remembers nothing."""
    shape = getattr(net, "memory_shape", None)
    return {} if shape is None else {MEMORY: (np.float32, shape)}
