"""Networks of an on-policy learner in torch: a policy and a value, and how both see observations and rewards.

Its arrays have the names that `MlpPolicy` loads, so that collectors act by what `memoire.torch.publish` sends without
torch. Statistics are part of it: they travel with the weights, and lie in its checkpoints. `RecurrentActorCritic`
remembers, and is computed by the learner.

`World` is several learners as one: ranks that torchrun starts, their sums, and whether they agree before they learn.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributions import Categorical, Distribution, Independent, Normal

from memoire import Rollouts
from memoire.errors import ParameterError, RanksDiffer

from .codec import leaves_of
from .policies import CLIP, EPSILON, Moments


class RunningMoments(torch.nn.Module):
    """`Moments` whose numbers are buffers of a network."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        for name, array in Moments(shape).arrays("x").items():
            self.register_buffer(name.removeprefix("x."), torch.from_numpy(np.array(array)))

    def merge(self, other: Moments) -> None:
        """Take in what a part of the experience holds, of shape [*F] as these."""
        own = Moments(tuple(self.mean.shape))
        own.mean, own.variance, own.count = self.mean.cpu().numpy(), self.variance.cpu().numpy(), float(self.count)
        own.merge(other)
        for name, array in own.arrays("x").items():
            getattr(self, name.removeprefix("x.")).copy_(torch.from_numpy(np.array(array)))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Values [N, *F] as `Moments.normalize` gives them: float32 [N, *F]."""
        spread = torch.sqrt(self.variance + EPSILON).float()
        return ((values - self.mean.float()) / spread).clamp(-CLIP, CLIP)

    def scale(self, rewards: NDArray[Any]) -> NDArray[np.float32]:
        """Rewards [N] as `Moments.scale` gives them: float32 [N]."""
        own = Moments()
        own.variance = self.variance.cpu().numpy()
        return own.scale(rewards)


FUSED: Final = ("cpu", "cuda")
"""Kinds of devices on which Adam makes a step of all parameters at once; small networks learn a fifth faster by it."""


class ActorCritic(torch.nn.Module):
    """Two perceptrons with tanh: observations [N, *F] to a distribution of actions, and to values [N].

    Args:
        inputs: Numbers of an observation.
        outputs: Actions, or dimensions of a Box.
        is_continuous: Whether actions are in a Box: then the distribution is a Gaussian, whose spread is learned.
        hidden: Widths of the hidden layers of each.
        normalize_observations, normalize_rewards: Whether to scale them by what was seen so far.

    Attributes:
        version: Of the newest model that was published; 0 is none.
        correction: Of old rollouts, by name, as the learner was told; see `PPO`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        is_continuous: bool,
        hidden: Sequence[int] = (64, 64),
        normalize_observations: bool = False,
        normalize_rewards: bool = False,
    ) -> None:
        super().__init__()
        self.version, self.correction = 0, None  # type: int, str | None
        self.policy = _layers((inputs, *hidden, outputs), 0.01)
        self.value = _layers((inputs, *hidden, 1), 1.0)
        self.log_std = torch.nn.Parameter(torch.zeros(outputs)) if is_continuous else None
        self.observations = RunningMoments((inputs,)) if normalize_observations else None
        self.rewards = RunningMoments() if normalize_rewards else None

    @classmethod
    def mlp(cls, env: Any, hidden: Sequence[int] = (64, 64), **options: bool) -> Self:
        """One for an environment or vector environment with observations of numbers and discrete actions or a Box.

        Raises:
            ParameterError: it has other actions.
        """
        inputs, outputs, is_continuous = form_of(env)
        return cls(inputs, outputs, is_continuous=is_continuous, hidden=hidden, **options)

    def forward(self, observations: Any) -> tuple[Distribution, torch.Tensor]:
        """The distribution of actions [N, *A] and the values [N] of observations [N, *F], nested or not."""
        inputs = flat_tensor(observations)
        if self.observations is not None:
            inputs = self.observations(inputs)
        outputs, values = _through(self.policy, inputs), _through(self.value, inputs)[:, 0]
        return _distribution(outputs, self.log_std), values

    def merge(self, moments: Mapping[str, Moments]) -> None:
        """Take in what rollouts hold, by what `moments_of` calls it."""
        for name, part in moments.items():
            getattr(self, name).merge(part)

    def moments_of(self, rollouts: Rollouts) -> dict[str, Moments]:
        """What there is to merge of rollouts [N], by name; {} if nothing is normalized.

        Raises:
            NoSuchField: rewards are normalized, and the table does not store the discounted sums.
        """
        found = {}
        if self.observations is not None:
            found["observations"] = Moments.of(flat_tensor(rollouts["obs"]).numpy())
        if self.rewards is not None:
            found["rewards"] = Moments.of(rollouts["discounted"])
        return found


class RecurrentActorCritic(torch.nn.Module):
    """A linear layer and a gated recurrent unit, and on what they remember a policy and a value.

    Collectors ask the learner for its actions: `OnPolicyLearner(policy="remote")`.

    Args:
        inputs: Numbers of an observation.
        outputs: Actions, or dimensions of a Box.
        is_continuous: Whether actions are in a Box.
        hidden: Width of the layer, and numbers that are remembered.

    Attributes:
        version, correction: As of `ActorCritic`.
        memory_shape: Of what is remembered, one environment's.
    """

    observations, rewards = None, None
    """Nothing is normalized."""

    def __init__(self, inputs: int, outputs: int, *, is_continuous: bool, hidden: int = 64) -> None:
        super().__init__()
        self.version, self.correction = 0, None  # type: int, str | None
        self.memory_shape = (hidden,)
        self.encoder, self.unit = torch.nn.Linear(inputs, hidden), torch.nn.GRU(hidden, hidden, batch_first=True)
        self.policy, self.value = torch.nn.Linear(hidden, outputs), torch.nn.Linear(hidden, 1)
        self.log_std = torch.nn.Parameter(torch.zeros(outputs)) if is_continuous else None
        for layer, size in ((self.encoder, math.sqrt(2.0)), (self.policy, 0.01), (self.value, 1.0)):
            torch.nn.init.orthogonal_(layer.weight, size)
            torch.nn.init.zeros_(layer.bias)

    @classmethod
    def of(cls, env: Any, hidden: int = 64) -> Self:
        """One for an environment or vector environment, as `ActorCritic.mlp`. ParameterError: it has other actions."""
        inputs, outputs, is_continuous = form_of(env)
        return cls(inputs, outputs, is_continuous=is_continuous, hidden=hidden)

    def forward(
        self, observations: Any, memory: torch.Tensor, lengths: Sequence[int] | None = None
    ) -> tuple[Distribution, torch.Tensor, torch.Tensor]:
        """The distribution of actions [N, *A], the values [N], and what is remembered after each entry [N, H].

        Args:
            observations: [N, *F], nested or not: entries of F fragments, one after the other.
            memory: [F, H] before the first entry of each fragment.
            lengths: Entries of each fragment; None: each entry is one.
        """
        inputs = torch.tanh(self.encoder(flat_tensor(observations)))
        mask = _mask([1] * len(inputs) if lengths is None else lengths, inputs.device)
        padded = inputs.new_zeros(*mask.shape, inputs.shape[1])
        padded[mask] = inputs
        remembered = self.unit(padded, memory[None].contiguous())[0][mask]
        return _distribution(self.policy(remembered), self.log_std), self.value(remembered)[:, 0], remembered

    def merge(self, moments: Any) -> None:
        """There is nothing to take in."""

    def moments_of(self, rollouts: Rollouts) -> dict[str, Any]:
        """Nothing is normalized."""
        return {}


def _distribution(outputs: torch.Tensor, log_std: torch.Tensor | None) -> Distribution:
    """Of actions [N, *A]: by logits [N, A], or a Gaussian by its means."""
    if log_std is None:
        return Categorical(logits=outputs, validate_args=False)
    gaussian = Normal(outputs, log_std.exp().expand_as(outputs), validate_args=False)
    return Independent(gaussian, 1, validate_args=False)


def form_of(env: Any) -> tuple[int, int, bool]:
    """Numbers of an observation, actions or dimensions of a Box of actions, and whether actions are in a Box.

    Raises:
        ParameterError: the environment has other actions.
    """
    actions = getattr(env, "single_action_space", None) or env.action_space
    inputs = numbers_of(getattr(env, "single_observation_space", None) or env.observation_space)
    if hasattr(actions, "low") and np.issubdtype(actions.dtype, np.floating):
        return inputs, math.prod(actions.shape), True
    if not hasattr(actions, "n") or actions.shape != ():
        raise ParameterError("env", str(actions), "an environment with discrete actions, or a Box of floats")
    return inputs, int(actions.n), False


def flat_tensor(observations: Any) -> torch.Tensor:
    """Observations [N, *F] as float32 [N, I], nested parts side by side; of one float32 array the memory is its own."""
    parts = [torch.as_tensor(leaf) for leaf in leaves_of(observations)]
    flat = [part.reshape(len(part), -1).float() for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def numbers_of(space: Any) -> int:
    """How many numbers an observation of this space has.

    Raises:
        ParameterError: it has no fixed shape.
    """
    parts = getattr(space, "spaces", None)
    if parts is not None:
        return sum(numbers_of(part) for part in (parts.values() if isinstance(parts, Mapping) else parts))
    if space.shape is None:
        raise ParameterError("observation_space", str(space), "a space whose observations have a fixed shape")
    return math.prod(space.shape)


def _layers(widths: Sequence[int], last: float) -> torch.nn.ModuleList:
    """Linear layers with orthogonal weights: the last one's of this size, the others' sqrt(2)."""
    made = torch.nn.ModuleList(torch.nn.Linear(i, o) for i, o in itertools.pairwise(widths))
    for depth, layer in enumerate(made, start=1):
        torch.nn.init.orthogonal_(layer.weight, last if depth == len(made) else math.sqrt(2.0))
        torch.nn.init.zeros_(layer.bias)
    return made


def _through(layers: torch.nn.ModuleList, inputs: torch.Tensor) -> torch.Tensor:
    for depth, layer in enumerate(layers, start=1):
        inputs = layer(inputs)
        if depth < len(layers):
            inputs = torch.tanh(inputs)
    return inputs


def _mask(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """[F, T] where there is an entry; T is the longest fragment."""
    known = torch.tensor(lengths, device=device)
    return torch.arange(int(known.max()), device=device) < known[:, None]


# Several learners

TIMEOUT: Final = 300.0
"""Seconds that a rank waits for the others in one exchange."""


GLOO: Final = "gloo"
NCCL: Final = "cpu:gloo,cuda:nccl"
"""Counts and sums stay on the CPU."""


@dataclass(frozen=True)
class World:
    """Which of how many learners this process is."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    """Where its network may lie: a GPU of its own, "cuda:0" for instance, if each rank of the machine has one."""
    local_rank: int | None = field(default=None, compare=False)
    """Which of those on its own machine, or in its own Pod; None says the rank."""

    @classmethod
    def from_environment(cls, surroundings: Mapping[str, str] = os.environ, timeout: float = TIMEOUT) -> Self:
        """As torchrun says; of several ranks, the process group is made unless there is one: with NCCL for tensors on
        GPUs, if each rank has one, and with gloo for all others. Blocks until all ranks are there.

        Args:
            timeout: Seconds that a rank waits for the others, now and in each exchange; then torch raises an error.

        Raises:
            ParameterError: RANK and WORLD_SIZE do not fit.
        """
        has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        made, backend = cls.placed(surroundings, torch.cuda.device_count() if has_nccl else 0)
        if made.size > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
        return made

    @classmethod
    def placed(cls, surroundings: Mapping[str, str], devices: int) -> tuple[Self, str]:
        """Which rank this is, and the process group's backend, on a machine with so many GPUs that NCCL can use.

        Raises:
            ParameterError: RANK and WORLD_SIZE do not fit.
        """
        try:
            rank, size = int(surroundings.get("RANK", "0")), int(surroundings.get("WORLD_SIZE", "1"))
            place, places = int(surroundings.get("LOCAL_RANK", rank)), int(surroundings.get("LOCAL_WORLD_SIZE", size))
        except ValueError:
            rank = size = place = places = 0
        if not 0 <= rank < size:
            found = f"{surroundings.get('RANK')} of WORLD_SIZE={surroundings.get('WORLD_SIZE')}"
            raise ParameterError("$RANK", found, "a number below $WORLD_SIZE, as torchrun sets them")
        has_own = devices >= places  # NCCL refuses two ranks on one GPU
        return cls(rank, size, f"cuda:{place}" if has_own else "cpu", place), NCCL if has_own else GLOO

    @property
    def place(self) -> int:
        """By which the addresses of ranks on one machine differ."""
        return self.rank if self.local_rank is None else self.local_rank

    def wrap(self, net: torch.nn.Module) -> torch.nn.Module:
        """The network with gradients that all ranks share, and parameters of rank 0; itself if there is one rank."""
        if self.size == 1:
            return net
        parallel = torch.nn.parallel.DistributedDataParallel
        # Statistics are merged by `OnPolicyLearner`, and are the same everywhere; newer torch has another name for it.
        has_new = "forward_sync_buffers" in inspect.signature(parallel.__init__).parameters
        return parallel(net, **{"forward_sync_buffers" if has_new else "broadcast_buffers": False})

    def sums(self, values: Any) -> NDArray[np.float64]:
        """The sum of values [*F] over all ranks, float64 [*F]; the same bits on each of them."""
        found = torch.tensor(np.asarray(values, np.float64))
        if self.size > 1:
            torch.distributed.all_reduce(found)
        summed: NDArray[np.float64] = found.numpy()
        return summed

    def least(self, values: Sequence[int]) -> list[int]:
        """The least of each number over all ranks."""
        found = torch.tensor(list(values), dtype=torch.int64)
        if self.size > 1:
            torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN)
        return [int(each) for each in found]

    def check_equal(self, **numbers: int) -> None:
        """Raise RanksDiffer on all ranks unless each has these numbers."""
        own = list(numbers.values())
        low, negated = self.least(own), self.least([-each for each in own])
        for name, mine, least, most in zip(numbers, own, low, negated, strict=True):
            if least != -most:
                raise RanksDiffer(name, least, -most, self.rank, mine)
