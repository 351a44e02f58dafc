"""A network that remembers, and PPO of it: fragments are unrolled from what was remembered at their start.

    entry      0        1        2          the column memory has what the policy knew before each entry, so that
    memory   ▶ m0       m1       m2         a fragment, or what is left of one that was split, begins with its own m0
               └─ GRU ──┴─ GRU ──┴─ GRU ──▶ gradients go back to the fragment's start, and not beyond it

Memory is zero where an episode begins. A fragment never crosses that, since it is a part of one episode.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributions import Categorical, Distribution, Independent, Normal

from memoire.replay.rollouts import Rollouts

from .actor_critic import flat_tensor, form_of
from .columns import MEMORY
from .ppo import PPO, PreparedBatch, final_of, rows_of


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
        outputs, values = self.policy(remembered), self.value(remembered)[:, 0]
        if self.log_std is None:
            return Categorical(logits=outputs, validate_args=False), values, remembered
        gaussian = Normal(outputs, self.log_std.exp().expand_as(outputs), validate_args=False)
        return Independent(gaussian, 1, validate_args=False), values, remembered

    def merge(self, moments: Any) -> None:
        """There is nothing to take in."""

    def moments_of(self, rollouts: Rollouts) -> dict[str, Any]:
        """Nothing is normalized."""
        return {}


class RecurrentPPO(PPO):
    """`PPO` of a `RecurrentActorCritic`, or of another module that is called in the same way.

    A minibatch has whole fragments: at least `minibatch` entries, but for an epoch's last one.
    """

    def minibatches(self, rollouts: Rollouts) -> Iterator[NDArray[np.int64]]:
        """Indices [B] of the entries of whole fragments, each once."""
        ends = np.cumsum(rollouts.lengths)
        chosen: list[NDArray[np.int64]] = []
        for fragment in self.random.permutation(len(ends)):
            chosen.append(np.arange(ends[fragment] - rollouts.lengths[fragment], ends[fragment]))
            if sum(map(len, chosen)) >= self.minibatch:
                yield np.concatenate(chosen)
                chosen = []
        if chosen:
            yield np.concatenate(chosen)

    def evaluate(self, rollouts: Rollouts) -> tuple[Distribution, torch.Tensor, torch.Tensor]:
        """The network as it is: of all entries [N] the distribution and the values, and of final states [F] values."""
        memory, ends = self._tensors(rollouts[MEMORY]), np.cumsum(rollouts.lengths)
        starts = self._tensors(ends - rollouts.lengths)
        distribution, values, remembered = self._plain(
            self._tensors(rollouts["obs"]), memory[starts], rollouts.lengths.tolist()
        )
        final = self._plain(self._tensors(final_of(rollouts)), remembered[self._tensors(ends - 1)])[1]
        return distribution, values, final

    def prepared(self, rollouts: Rollouts) -> PreparedBatch:
        """What an update learns from rollouts [N], with what was remembered before each entry."""
        batch = super().prepared(rollouts)
        batch.obs = {"obs": batch.obs, MEMORY: self._tensors(rollouts[MEMORY])}
        self._fragment = np.repeat(np.arange(len(rollouts.lengths)), rollouts.lengths)
        return batch

    def forward(self, batch: PreparedBatch, index: NDArray[np.int64]) -> tuple[Distribution, torch.Tensor]:
        """Distribution and values of the entries [B] of whole fragments."""
        inputs, lengths = rows_of(batch.obs, self._tensors(index)), _runs(self._fragment[index])
        starts = self._tensors(np.array([0, *itertools.accumulate(lengths[:-1])]))
        distribution, values, _ = self.net(inputs["obs"], inputs[MEMORY][starts], lengths)
        return distribution, values


def _runs(fragments: NDArray[np.int64]) -> list[int]:
    """How many entries [B] in a row are of the same fragment."""
    places = np.flatnonzero(np.diff(fragments, prepend=-1, append=-1))
    return [int(each) for each in np.diff(places)]


def _mask(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """[F, T] where there is an entry; T is the longest fragment."""
    known = torch.tensor(lengths, device=device)
    return torch.arange(int(known.max()), device=device) < known[:, None]
