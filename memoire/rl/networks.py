"""The network of an on-policy learner in torch: a policy and a value, and how both see observations and rewards.

Its arrays have the names that `MlpPolicy` loads, so that collectors act by what `memoire.torch.publish` sends without
torch. Statistics are part of it: they travel with the weights, and lie in its checkpoints.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributions import Categorical, Distribution, Independent, Normal

from memoire import Rollouts
from memoire.errors import ParameterError

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
        if self.log_std is None:
            return Categorical(logits=outputs, validate_args=False), values
        gaussian = Normal(outputs, self.log_std.exp().expand_as(outputs), validate_args=False)
        return Independent(gaussian, 1, validate_args=False), values

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
    if isinstance(observations, Mapping):
        return torch.cat([flat_tensor(part) for part in observations.values()], 1)
    if isinstance(observations, tuple):
        return torch.cat([flat_tensor(part) for part in observations], 1)
    found = torch.from_numpy(observations) if isinstance(observations, np.ndarray) else observations
    return found.reshape(len(found), -1).float()


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
