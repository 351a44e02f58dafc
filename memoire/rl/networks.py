"""Networks of an on-policy learner in torch: policy, value, and normalization of observations and rewards.

An `ActorCritic` names its arrays as `MlpPolicy` loads them, so that collectors act by a published model without torch.
Running statistics are buffers of the network: models and checkpoints contain them. A `RecurrentActorCritic` has a
memory, and the learner computes its actions.

`World` joins several learners: ranks that torchrun starts, sums over all ranks, and checks that the ranks agree.
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
    """Running mean and variance (`Moments`) as buffers of a network."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        for name, array in Moments(shape).arrays("x").items():
            self.register_buffer(name.removeprefix("x."), torch.from_numpy(np.array(array)))

    def merge(self, other: Moments) -> None:
        """Merge the moments [*F] of further values into these."""
        moments = Moments(tuple(self.mean.shape))
        moments.mean, moments.variance = self.mean.cpu().numpy(), self.variance.cpu().numpy()
        moments.count = float(self.count)
        moments.merge(other)
        for name, array in moments.arrays("x").items():
            getattr(self, name.removeprefix("x.")).copy_(torch.from_numpy(np.array(array)))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return values [N, *F] normalized as by `Moments.normalize`: float32 [N, *F]."""
        spread = torch.sqrt(self.variance + EPSILON).float()
        return ((values - self.mean.float()) / spread).clamp(-CLIP, CLIP)

    def scale(self, rewards: NDArray[Any]) -> NDArray[np.float32]:
        """Return rewards [N] scaled as by `Moments.scale`: float32 [N]."""
        moments = Moments()
        moments.variance = self.variance.cpu().numpy()
        return moments.scale(rewards)


FUSED: Final = ("cpu", "cuda")
"""Types of devices on which Adam updates all parameters in one fused step; small networks learn a fifth faster."""


class ActorCritic(torch.nn.Module):
    """Two perceptrons with tanh: observations [N, *F] to a distribution of actions, and to values [N].

    Args:
        inputs: Number of values in an observation.
        outputs: Number of actions, or of dimensions of a Box.
        is_continuous: True for actions in a Box: the distribution is a Gaussian with a learned standard deviation.
        hidden: Widths of the hidden layers of each perceptron.
        normalize_observations, normalize_rewards: True scales them by running statistics.

    Attributes:
        version: Version of the newest published model; 0 before the first one.
        correction: Name of the learner's correction of old rollouts; see `PPO`.
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
        """Return a network for an environment or vector environment with discrete actions or a Box of floats.

        Raises:
            ParameterError: the environment has other actions, or observations without a fixed shape.
        """
        inputs, outputs, is_continuous = form_of(env)
        return cls(inputs, outputs, is_continuous=is_continuous, hidden=hidden, **options)

    def forward(self, observations: Any) -> tuple[Distribution, torch.Tensor]:
        """Return the distribution of actions [N, *A] and the values [N] for observations [N, *F], nested or not."""
        inputs = flat_tensor(observations)
        if self.observations is not None:
            inputs = self.observations(inputs)
        outputs, values = _apply_layers(self.policy, inputs), _apply_layers(self.value, inputs)[:, 0]
        return _distribution(outputs, self.log_std), values

    def merge(self, moments: Mapping[str, Moments]) -> None:
        """Merge the result of `moments_of` into the running statistics."""
        for name, part in moments.items():
            getattr(self, name).merge(part)

    def moments_of(self, rollouts: Rollouts) -> dict[str, Moments]:
        """Return the moments of rollouts [N] for `merge`, by name; {} without normalization.

        Raises:
            NoSuchField: rewards are normalized, and the table does not store the discounted sums.
        """
        moments = {}
        if self.observations is not None:
            moments["observations"] = Moments.from_values(flat_tensor(rollouts["obs"]).numpy())
        if self.rewards is not None:
            moments["rewards"] = Moments.from_values(rollouts["discounted"])
        return moments


class RecurrentActorCritic(torch.nn.Module):
    """Recurrent network: a linear layer and a GRU, whose memory feeds a policy and a value layer.

    Collectors ask the learner for actions: `OnPolicyLearner(policy="remote")`.

    Args:
        inputs: Number of values in an observation.
        outputs: Number of actions, or of dimensions of a Box.
        is_continuous: True for actions in a Box.
        hidden: Width of the linear layer and of the memory.

    Attributes:
        version, correction: As of `ActorCritic`.
        memory_shape: Shape of one environment's memory.
    """

    observations, rewards = None, None
    """Statistics for normalization, which this network does not have."""

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
    def for_env(cls, env: Any, hidden: int = 64) -> Self:
        """Return a network for an environment or vector environment. Raises ParameterError as `ActorCritic.mlp`."""
        inputs, outputs, is_continuous = form_of(env)
        return cls(inputs, outputs, is_continuous=is_continuous, hidden=hidden)

    def forward(
        self, observations: Any, memory: torch.Tensor, lengths: Sequence[int] | None = None
    ) -> tuple[Distribution, torch.Tensor, torch.Tensor]:
        """Return the distribution of actions [N, *A], the values [N], and the memory after each entry [N, H].

        Args:
            observations: [N, *F], nested or not: the entries of all fragments, concatenated.
            memory: [fragments, H] memory before the first entry of each fragment.
            lengths: Number of entries of each fragment; None treats each entry as a fragment.
        """
        inputs = torch.tanh(self.encoder(flat_tensor(observations)))
        mask = _mask([1] * len(inputs) if lengths is None else lengths, inputs.device)
        padded = inputs.new_zeros(*mask.shape, inputs.shape[1])
        padded[mask] = inputs
        memories = self.unit(padded, memory[None].contiguous())[0][mask]
        return _distribution(self.policy(memories), self.log_std), self.value(memories)[:, 0], memories

    def merge(self, moments: Any) -> None:
        """Do nothing, because this network has no running statistics."""

    def moments_of(self, rollouts: Rollouts) -> dict[str, Any]:
        """Return {}, because this network has no running statistics."""
        return {}


def _distribution(outputs: torch.Tensor, log_std: torch.Tensor | None) -> Distribution:
    if log_std is None:
        return Categorical(logits=outputs, validate_args=False)
    gaussian = Normal(outputs, log_std.exp().expand_as(outputs), validate_args=False)
    return Independent(gaussian, 1, validate_args=False)


def form_of(env: Any) -> tuple[int, int, bool]:
    """Return `inputs`, `outputs` and `is_continuous` of a network for an environment: see `ActorCritic`.

    Raises:
        ParameterError: the environment has neither discrete actions nor a Box of floats.
    """
    actions = getattr(env, "single_action_space", None) or env.action_space
    inputs = numbers_of(getattr(env, "single_observation_space", None) or env.observation_space)
    if hasattr(actions, "low") and np.issubdtype(actions.dtype, np.floating):
        return inputs, math.prod(actions.shape), True
    if not hasattr(actions, "n") or actions.shape != ():
        raise ParameterError("env", str(actions), "an environment with discrete actions, or a Box of floats")
    return inputs, int(actions.n), False


def flat_tensor(observations: Any) -> torch.Tensor:
    """Return observations [N, *F] as float32 [N, I], nested parts concatenated; one float32 array is not copied."""
    parts = [torch.as_tensor(leaf) for leaf in leaves_of(observations)]
    flat = [part.reshape(len(part), -1).float() for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def numbers_of(space: Any) -> int:
    """Return the number of values in an observation of this space.

    Raises:
        ParameterError: the space has no fixed shape.
    """
    parts = getattr(space, "spaces", None)
    if parts is not None:
        return sum(numbers_of(part) for part in (parts.values() if isinstance(parts, Mapping) else parts))
    if space.shape is None:
        raise ParameterError("observation_space", str(space), "a space whose observations have a fixed shape")
    return math.prod(space.shape)


def _layers(widths: Sequence[int], last: float) -> torch.nn.ModuleList:
    """Return linear layers with orthogonal weights of gain sqrt(2), the last layer with gain `last`."""
    layers = torch.nn.ModuleList(torch.nn.Linear(i, o) for i, o in itertools.pairwise(widths))
    for depth, layer in enumerate(layers, start=1):
        torch.nn.init.orthogonal_(layer.weight, last if depth == len(layers) else math.sqrt(2.0))
        torch.nn.init.zeros_(layer.bias)
    return layers


def _apply_layers(layers: torch.nn.ModuleList, inputs: torch.Tensor) -> torch.Tensor:
    for depth, layer in enumerate(layers, start=1):
        inputs = layer(inputs)
        if depth < len(layers):
            inputs = torch.tanh(inputs)
    return inputs


def _mask(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    sizes = torch.tensor(lengths, device=device)
    return torch.arange(int(sizes.max()), device=device) < sizes[:, None]


# Several learners

TIMEOUT: Final = 300.0
"""Seconds that a rank waits for the other ranks in one collective operation."""


GLOO: Final = "gloo"
NCCL: Final = "cpu:gloo,cuda:nccl"
"""Backend for ranks with GPUs: counts and sums stay on the CPU."""


@dataclass(frozen=True)
class World:
    """Rank of this learner and number of ranks."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    """Device for the network: a GPU such as "cuda:0" if each rank of the machine has its own, else "cpu"."""
    local_rank: int | None = field(default=None, compare=False)
    """Number of this rank on its machine or in its Pod; None means `rank`."""

    @classmethod
    def from_environment(cls, surroundings: Mapping[str, str] = os.environ, timeout: float = TIMEOUT) -> Self:
        """Return the rank that torchrun's environment variables describe.

        With several ranks, create the process group unless it exists, and block until all ranks have joined. The
        group's backend is NCCL for tensors on GPUs if each rank has a GPU, and gloo for all other tensors.

        Args:
            timeout: Seconds that a rank waits for the other ranks, now and in each collective operation; then torch
                raises an error.

        Raises:
            ParameterError: RANK and WORLD_SIZE do not fit.
        """
        has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        world, backend = cls.rank_and_backend(surroundings, torch.cuda.device_count() if has_nccl else 0)
        if world.size > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
        return world

    @classmethod
    def rank_and_backend(cls, surroundings: Mapping[str, str], devices: int) -> tuple[Self, str]:
        """Return the rank from environment variables, and the backend for a machine with `devices` GPUs for NCCL.

        Raises:
            ParameterError: RANK and WORLD_SIZE do not fit.
        """
        try:
            rank, size = int(surroundings.get("RANK", "0")), int(surroundings.get("WORLD_SIZE", "1"))
            place, places = int(surroundings.get("LOCAL_RANK", rank)), int(surroundings.get("LOCAL_WORLD_SIZE", size))
        except ValueError:
            rank = size = place = places = 0
        if not 0 <= rank < size:
            value = f"{surroundings.get('RANK')} of WORLD_SIZE={surroundings.get('WORLD_SIZE')}"
            raise ParameterError("$RANK", value, "a number below $WORLD_SIZE, as torchrun sets them")
        has_own = devices >= places  # NCCL refuses two ranks on one GPU
        return cls(rank, size, f"cuda:{place}" if has_own else "cpu", place), NCCL if has_own else GLOO

    @property
    def port_offset(self) -> int:
        """Number by which the addresses of ranks on one machine differ: `local_rank`, or else `rank`."""
        return self.rank if self.local_rank is None else self.local_rank

    def wrap(self, net: torch.nn.Module) -> torch.nn.Module:
        """Return the network with gradients averaged over all ranks and parameters of rank 0; unchanged for 1 rank."""
        if self.size == 1:
            return net
        parallel = torch.nn.parallel.DistributedDataParallel
        # `OnPolicyLearner` merges statistics, so that all ranks have equal ones; newer torch renamed this argument.
        has_new = "forward_sync_buffers" in inspect.signature(parallel.__init__).parameters
        return parallel(net, **{"forward_sync_buffers" if has_new else "broadcast_buffers": False})

    def sums(self, values: Any) -> NDArray[np.float64]:
        """Return the sum of values [*F] over all ranks, float64 [*F], with the same bits on each rank."""
        tensor = torch.tensor(np.asarray(values, np.float64))
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        summed: NDArray[np.float64] = tensor.numpy()
        return summed

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the minimum of each number over all ranks."""
        tensor = torch.tensor(list(values), dtype=torch.int64)
        if self.size > 1:
            torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN)
        return [int(each) for each in tensor]

    def check_equal(self, **numbers: int) -> None:
        """Raise RanksDiffer on all ranks if a number differs between ranks."""
        values = list(numbers.values())
        lows, negated_highs = self.minimum(values), self.minimum([-each for each in values])
        for name, value, low, high in zip(numbers, values, lows, negated_highs, strict=True):
            if low != -high:
                raise RanksDiffer(name, low, -high, self.rank, value)
