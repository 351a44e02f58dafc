"""Proximal policy optimization (PPO) on rollouts, in torch.

Schulman et al., Proximal Policy Optimization Algorithms, 2017. Corrections for rollouts of older models, by name:

    "vtrace"      targets and advantages by V-trace (Espeholt et al., IMPALA, ICML 2018); ratios are clipped around
                  the policy at the update's start
    "decoupled"   ratios are clipped around the policy at the update's start, and weighted by its ratio to the acting
                  policy, up to 1 (Hilton et al., Batch size-invariance for policy optimization, NeurIPS 2022)
    "none"        ratios are clipped around the policy that acted

`RecurrentPPO` trains a recurrent network: each fragment is unrolled from the memory at its start.

    entry      0        1        2          the column memory holds the policy's memory before each entry, so that a
    memory   ▶ m0       m1       m2         fragment, or the rest of a fragment that was split, begins with its own m0
               └─ GRU ──┴─ GRU ──┴─ GRU ──▶ gradients flow back to the start of the fragment, and not beyond

Memory is zero at the start of an episode. A fragment is a part of one episode.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributions import Distribution

from memoire import Rollouts
from memoire.building import ForkedGenerator, checked_names, one_of
from memoire.building import rollouts as advantages
from memoire.errors import NoSuchField, ParameterError

from .codec import mapped
from .networks import FUSED
from .policies import MEMORY

CORRECTIONS: Final = ("vtrace", "decoupled", "none")
KL_MARGIN: Final = 1.5
"""An epoch is the last of its update if its divergence exceeds this factor times `target_kl`."""


def check_correction(correction: str | None) -> str | None:
    """Return the correction, which may be None. Raises ParameterError if the name is unknown."""
    if correction not in (*CORRECTIONS, None):
        raise ParameterError("correction", correction, one_of(correction, CORRECTIONS))
    return correction


@dataclass
class PreparedBatch:
    """Inputs of the gradient steps of one update: N entries."""

    obs: Any
    action: torch.Tensor
    logp: torch.Tensor
    """[N] log probability of each action under the policy around which ratios are clipped."""
    weight: torch.Tensor
    """[N] weight of each entry in the policy's loss."""
    advantage: torch.Tensor
    returns: torch.Tensor
    explained: float

    def rows(self, index: NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
        """Return rows [B] of action, logp, weight, advantage and returns."""
        rows = torch.from_numpy(index).to(self.logp.device)
        return tuple(array[rows] for array in (self.action, self.logp, self.weight, self.advantage, self.returns))


class PPO:
    """PPO learner, which updates its network in place, on the network's device.

    Args:
        net: Network: called with observations [N, *F], it returns a distribution of actions and values [N].
            `ActorCritic`, or a module of your own, also inside of DistributedDataParallel.
        rate: Adam's step size; `ppo.rate` may be set between updates.
        epochs: Times that each entry is used.
        minibatch: Entries of one gradient step.
        clip: Ratios of probabilities are clipped to 1 - clip .. 1 + clip.
        value_coef, entropy_coef: Weights of the value's loss and of the entropy beside the policy's loss.
        gamma: Discount; None takes the table's; another one raises ParameterError. Rollouts without a table need it.
        lam: lambda of generalized advantages.
        max_grad_norm: Limit of the gradient's norm; a longer gradient is scaled down to it.
        target_kl: The update ends early after an epoch with much more divergence; None never ends it early.
        correction: Correction for rollouts of older models, see above. None takes the `correction` of `net`; without
            one, such rollouts raise ParameterError.
        seed: Seed of the order of entries; None takes entropy from the system. A checkpoint of another seed is refused.

    Raises:
        ParameterError: the correction is unknown.
    """

    fixed = frozenset({"seed"})

    @checked_names()
    def __init__(
        self,
        net: torch.nn.Module,
        rate: float = 3e-4,
        epochs: int = 4,
        minibatch: int = 256,
        *,
        clip: float = 0.2,
        value_coef: float = 0.5,
        entropy_coef: float = 0.0,
        gamma: float | None = None,
        lam: float = 0.95,
        max_grad_norm: float = 0.5,
        target_kl: float | None = None,
        correction: str | None = None,
        seed: int | None = None,
    ) -> None:
        self.net = net
        self._plain = getattr(net, "module", net)
        self.correction = check_correction(correction) or getattr(self._plain, "correction", None)
        self.epochs, self.minibatch, self.clip = epochs, minibatch, clip
        self.value_coef, self.entropy_coef, self.gamma, self.lam = value_coef, entropy_coef, gamma, lam
        self.max_grad_norm, self.target_kl = max_grad_norm, target_kl
        self.optimizer = torch.optim.Adam(net.parameters(), lr=rate, eps=1e-5, fused=self.device.type in FUSED)
        self.seed, self.random = seed, ForkedGenerator(seed)

    @property
    def device(self) -> torch.device:
        """Device of torch that holds the network."""
        return next(self._plain.parameters()).device

    def _tensors(self, arrays: Any) -> Any:
        """Return tensors on the network's device, nested as the arrays are. On the CPU they share memory with them."""
        return mapped(lambda array: torch.from_numpy(array).to(self.device), arrays)

    @property
    def rate(self) -> float:
        """Step size of the optimizer, Adam; may be set."""
        return float(self.optimizer.param_groups[0]["lr"])

    @rate.setter
    def rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def update(self, rollouts: Rollouts) -> dict[str, float]:
        """Learn from rollouts [N] and return figures by name.

        Means over minibatches are policy_loss, value_loss, entropy, approx_kl, clip_fraction and grad_norm.
        explained_variance is of the network before the update; lag_mean and lag_max are in versions.

        Raises:
            ParameterError: older models made some entries, and there is no correction; or `gamma` is not the table's.
            NoSuchField: the table stores no logp.
        """
        lag = self._lag(rollouts)
        batch = self.prepared(rollouts)
        rows: list[torch.Tensor] = []
        for _ in range(self.epochs):
            epoch = [self._step(batch, index) for index in self.minibatches(rollouts)]
            rows += epoch
            if self.target_kl is not None and self._divergence(epoch) > KL_MARGIN * self.target_kl:
                break
        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
        figures = dict(zip(names, torch.stack(rows).cpu().double().mean(0).tolist(), strict=True))
        return figures | {
            "explained_variance": batch.explained, "lag_mean": float(lag.mean()), "lag_max": float(lag.max())
        }  # fmt: skip

    def minibatches(self, rollouts: Rollouts) -> Iterator[NDArray[np.int64]]:
        """Yield indices [B] of entries; each entry is in one minibatch."""
        return rollouts.minibatches(self.minibatch, 1, self.random)

    def evaluate(self, rollouts: Rollouts) -> tuple[Distribution, torch.Tensor, torch.Tensor]:
        """Return the network's distribution and values of all entries [N], and its values of the final states [F]."""
        distribution, values = self._plain(self._tensors(rollouts["obs"]))
        return distribution, values, self._plain(self._tensors(final_of(rollouts)))[1]

    def forward(self, batch: PreparedBatch, index: NDArray[np.int64]) -> tuple[Distribution, torch.Tensor]:
        """Return the distribution and the values of entries [B], with gradients."""
        distribution, values = self.net(self._rows(batch.obs, index))
        return distribution, values

    def _rows(self, observations: Any, index: NDArray[np.int64]) -> Any:
        """Return rows [B] of tensors [N, *F], nested as the tensors are."""
        rows = self._tensors(index)
        return mapped(lambda tensor: tensor[rows], observations)

    def _divergence(self, epoch: list[torch.Tensor]) -> float:
        """Return the mean approx_kl of an epoch. The mean is averaged over all ranks, which therefore stop together."""
        mean = float(torch.stack(epoch)[:, 3].cpu().double().mean())
        sums = torch.tensor([mean, 1.0], dtype=torch.float64)  # on the CPU: gloo
        if self._plain is not self.net:
            torch.distributed.all_reduce(sums)
        return float(sums[0] / sums[1])

    def _lag(self, rollouts: Rollouts) -> NDArray[np.int64]:
        """Return [N] by how many versions the model of each entry is older than the newest one."""
        newest = getattr(self._plain, "version", 0) or int(rollouts.model_version.max())
        lag: NDArray[np.int64] = np.maximum(newest - rollouts.model_version, 0)
        if lag.any() and self.correction is None:
            received = f"None, for entries up to {int(lag.max())} versions old"
            raise ParameterError("correction", received, f"one of {', '.join(CORRECTIONS)}")
        return lag

    def prepared(self, rollouts: Rollouts) -> PreparedBatch:
        """Compute the inputs of an update from rollouts [N], by the network before the update."""
        if "logp" not in rollouts:
            raise NoSuchField("rollouts", "'logp'", (), tuple(rollouts.columns))
        action, acted_logp = self._tensors(rollouts["action"]), self._tensors(rollouts["logp"])
        with torch.no_grad():
            distribution, predicted, final = self.evaluate(rollouts)
            start_logp = distribution.log_prob(action)
        values = predicted.cpu().numpy()
        ends = self._ends(rollouts, values, final.cpu().numpy())
        advantage, returns = self._targets(rollouts, values, ends, (start_logp - acted_logp).cpu().numpy())
        reference, weight = acted_logp, torch.ones_like(acted_logp)
        if self.correction == "decoupled":
            reference, weight = start_logp, (start_logp - acted_logp).exp().clamp(max=1.0)
        elif self.correction == "vtrace":  # V-trace advantages contain the ratio
            reference = start_logp
        spread = float(np.var(returns))
        explained = 1.0 - float(np.var(returns - values)) / spread if spread > 0.0 else 0.0
        tensors = self._tensors(advantage), self._tensors(returns)
        return PreparedBatch(self._tensors(rollouts["obs"]), action, reference, weight, *tensors, explained)

    def _targets(
        self, rollouts: Rollouts, values: NDArray[Any], ends: NDArray[Any], log_ratios: NDArray[Any]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        name, scaler = rollouts.schema.reward, getattr(self._plain, "rewards", None)
        if name is None or rollouts.schema.reward_shape != ():
            raise ParameterError("schema", f"rewards of shape {rollouts.schema.reward_shape}", "one number per entry")
        rewards = rollouts.columns[name] if scaler is None else scaler.scale(rollouts.columns[name])
        gamma = rollouts.gamma(self.gamma, "gamma")
        if self.correction != "vtrace":
            return advantages.gae(rewards, values, ends, rollouts.lengths, gamma, self.lam)
        inputs = rewards, values, ends, rollouts.lengths, log_ratios, gamma
        targets, corrected = advantages.vtrace(*inputs, lam=self.lam)
        return corrected, targets

    def _ends(self, rollouts: Rollouts, values: NDArray[Any], final: NDArray[Any]) -> NDArray[np.float32]:
        """Return [F] values after each fragment: 0 if terminated, else of the final state, or of the last entry."""
        last = values[np.cumsum(rollouts.lengths) - 1]
        ends = np.where(rollouts.has_final, final, last)
        return np.where(rollouts.terminated, 0.0, ends).astype(np.float32)

    def _step(self, batch: PreparedBatch, index: NDArray[np.int64]) -> torch.Tensor:
        """Make one gradient step; return the means [6] of `update`, in its order, on the network's device."""
        action, old, weight, advantage, returns = batch.rows(index)
        distribution, values = self.forward(batch, index)
        log_ratio = distribution.log_prob(action) - old
        ratio = log_ratio.exp()
        if len(index) > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = ratio.clamp(1.0 - self.clip, 1.0 + self.clip)
        policy_loss = -(weight * torch.minimum(ratio * advantage, clipped * advantage)).mean()
        value_loss = 0.5 * (values - returns).square().mean()
        entropy = distribution.entropy().mean()
        self.optimizer.zero_grad()
        (policy_loss + self.value_coef * value_loss - self.entropy_coef * entropy).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            kl = ((ratio - 1.0) - log_ratio).mean()
            outside = ((ratio - 1.0).abs() > self.clip).float().mean()
            return torch.stack((policy_loss, value_loss, entropy, kl, outside, norm))


def final_of(rollouts: Rollouts) -> Any:
    """Return the final observations [F, *S], nested as the observations are."""
    schema = rollouts.schema
    return schema.nest("obs", {leaf: rollouts.final[leaf] for leaf in schema.leaves("obs")})


class RecurrentPPO(PPO):
    """PPO learner of a `RecurrentActorCritic`, or of another module with the same call.

    A minibatch has whole fragments of at least `minibatch` entries; only the last one of an epoch may have fewer.
    """

    def minibatches(self, rollouts: Rollouts) -> Iterator[NDArray[np.int64]]:
        """Yield indices [B] of the entries of whole fragments; each entry is in one minibatch."""
        ends = np.cumsum(rollouts.lengths)
        indices: list[NDArray[np.int64]] = []
        for fragment in self.random.permutation(len(ends)):
            indices.append(np.arange(ends[fragment] - rollouts.lengths[fragment], ends[fragment]))
            if sum(map(len, indices)) >= self.minibatch:
                yield np.concatenate(indices)
                indices = []
        if indices:
            yield np.concatenate(indices)

    def evaluate(self, rollouts: Rollouts) -> tuple[Distribution, torch.Tensor, torch.Tensor]:
        """Return the network's distribution and values of all entries [N], and its values of the final states [F]."""
        memory, ends = self._tensors(rollouts[MEMORY]), np.cumsum(rollouts.lengths)
        starts = self._tensors(ends - rollouts.lengths)
        distribution, values, remembered = self._plain(
            self._tensors(rollouts["obs"]), memory[starts], rollouts.lengths.tolist()
        )
        final = self._plain(self._tensors(final_of(rollouts)), remembered[self._tensors(ends - 1)])[1]
        return distribution, values, final

    def prepared(self, rollouts: Rollouts) -> PreparedBatch:
        """Compute the inputs of an update from rollouts [N], with the memory before each entry."""
        batch = super().prepared(rollouts)
        batch.obs = {"obs": batch.obs, MEMORY: self._tensors(rollouts[MEMORY])}
        self._fragment = np.repeat(np.arange(len(rollouts.lengths)), rollouts.lengths)
        return batch

    def forward(self, batch: PreparedBatch, index: NDArray[np.int64]) -> tuple[Distribution, torch.Tensor]:
        """Return the distribution and the values of the entries [B] of whole fragments, with gradients."""
        inputs, lengths = self._rows(batch.obs, index), _runs(self._fragment[index])
        starts = self._tensors(np.array([0, *itertools.accumulate(lengths[:-1])]))
        distribution, values, _ = self.net(inputs["obs"], inputs[MEMORY][starts], lengths)
        return distribution, values


def _runs(fragments: NDArray[np.int64]) -> list[int]:
    """Return the lengths of runs of equal numbers in fragments [B]."""
    places = np.flatnonzero(np.diff(fragments, prepend=-1, append=-1))
    return [int(each) for each in np.diff(places)]
