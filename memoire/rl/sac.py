"""Soft actor-critic (SAC) in torch: a squashed Gaussian policy for a Box, twin critics, and their agent.

Haarnoja et al., Soft Actor-Critic Algorithms and Applications, 2018. Batches come from a table that a worker's writer
fills: `batch.discount` is gamma to the power of the sample's steps, and 0 after a terminal state.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from memoire.errors import ParameterError

from .networks import FUSED, flat_tensor, numbers_of
from .training import TrainingAgent

MAX_LOG_STD: Final = 2.0
MIN_LOG_STD: Final = -20.0


class GaussianPolicy(torch.nn.Module):
    """Gaussian policy for a Box: tanh of a Gaussian sample, scaled to the Box's bounds.

    Args:
        observation_space: Space of numbers; its parts are concatenated.
        action_space: A Box with finite bounds.
        hidden: Widths of the hidden layers.
        activation: Class of the module after each hidden layer.

    Raises:
        ParameterError: the action space is no Box with finite bounds.
    """

    low: torch.Tensor
    high: torch.Tensor

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        hidden: Sequence[int] = (256, 256),
        activation: Callable[[], torch.nn.Module] = torch.nn.ReLU,
    ) -> None:
        super().__init__()
        low, high = (np.asarray(getattr(action_space, name, np.inf), np.float32) for name in ("low", "high"))
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ParameterError("action_space", str(action_space), "a Box with finite bounds")
        self.shape = tuple(action_space.shape)
        self.register_buffer("low", torch.tensor(low.reshape(-1)))  # copies: loading a model writes into buffers
        self.register_buffer("high", torch.tensor(high.reshape(-1)))
        self.net = mlp((numbers_of(observation_space), *hidden), activation)
        self.mean = torch.nn.Linear(hidden[-1], low.size)
        self.log_std = torch.nn.Linear(hidden[-1], low.size)

    def forward(self, obs: Any, test: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions [B, A] for observations [B, *F], and their log probabilities [B]; `test` takes the means."""
        hidden = self.net(flat_tensor(obs))
        mean = self.mean(hidden)
        log_std = self.log_std(hidden).clamp(MIN_LOG_STD, MAX_LOG_STD)
        noise = torch.zeros_like(mean) if test else torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        # log N(raw) - log |d tanh(raw) / d raw|, the latter as 2 (log 2 - raw - softplus(-2 raw)), which is exact for
        # large values, too
        logp = -0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)
        logp = logp - 2.0 * (math.log(2.0) - raw - torch.nn.functional.softplus(-2.0 * raw))
        scale = 0.5 * (self.high - self.low)
        return 0.5 * (self.high + self.low) + scale * torch.tanh(raw), logp.sum(-1)

    def act(self, obs: Any, test: bool = False) -> np.ndarray[Any, Any]:
        """Return the action [*A] for one observation, which has a leading axis of 1."""
        with torch.no_grad():
            action, _ = self.forward(obs, test)
        values: np.ndarray[Any, Any] = action[0].reshape(self.shape).cpu().numpy()
        return values


class TwinCritic(torch.nn.Module):
    """Two critics of the same shape, which are computed in one pass."""

    def __init__(self, inputs: int, hidden: Sequence[int]) -> None:
        super().__init__()
        widths = (inputs, *hidden, 1)
        self.weights, self.biases = torch.nn.ParameterList(), torch.nn.ParameterList()
        for before, after in itertools.pairwise(widths):
            bound = 1.0 / math.sqrt(before)
            self.weights.append(torch.nn.Parameter(torch.empty(2, before, after).uniform_(-bound, bound)))
            self.biases.append(torch.nn.Parameter(torch.empty(2, 1, after).uniform_(-bound, bound)))

    def forward(self, obs: Any, action: torch.Tensor) -> torch.Tensor:
        """Return values [2, B] of observations [B, *F] and actions [B, *A]."""
        inputs = torch.cat([flat_tensor(obs), action.reshape(len(action), -1)], -1)
        hidden = inputs.expand(2, *inputs.shape)
        for depth, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True), start=1):
            hidden = torch.baddbmm(bias, hidden, weight)
            if depth < len(self.weights):
                hidden = torch.relu(hidden)
        return hidden[..., 0]


class SAC(TrainingAgent):
    """SAC agent for an action space that is a Box.

    Args:
        observation_space, action_space, device: See `TrainingAgent`.
        policy: Called with both spaces; makes the policy, whose `forward(obs)` returns actions and log probabilities.
        critic: Called with both spaces; makes the twin critics, whose `forward(obs, action)` returns [2, B]. None makes
            a `TwinCritic`.
        hidden: Widths of the hidden layers of a `TwinCritic`.
        gamma: Discount; None takes the table's; another one raises ParameterError. Batches that are tuples need it.
        polyak: Share of the target critics' weights that is kept at each step.
        rate: Adam's step size for the policy, the critics and alpha.
        alpha: Weight of the entropy, or its first value.
        learn_entropy_coef: True if alpha is learned.
        target_entropy: Entropy for which alpha is learned; None is minus the dimensions of an action.
        seed: Seed of the first weights; None takes entropy from the system.

    A checkpoint of another alpha, learn_entropy_coef, seed or range of actions is refused.
    """

    fixed = frozenset({"action_bounds", "alpha", "learn_entropy_coef", "seed"})

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        device: Any = "cpu",
        *,
        policy: Callable[..., torch.nn.Module] = GaussianPolicy,
        critic: Callable[..., torch.nn.Module] | None = None,
        hidden: Sequence[int] = (256, 256),
        gamma: float | None = None,
        polyak: float = 0.995,
        rate: float = 3e-4,
        alpha: float = 0.2,
        learn_entropy_coef: bool = True,
        target_entropy: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(observation_space, action_space, device)
        self.seed = seed
        if seed is not None:
            torch.manual_seed(seed)
        self.gamma, self.polyak, self.alpha, self.learn_entropy_coef = gamma, polyak, alpha, learn_entropy_coef
        self._checked_gamma: float | None = None  # the gamma that was compared with a batch's
        self.action_bounds = [np.ravel(getattr(action_space, name)).tolist() for name in ("low", "high")]
        dimensions = math.prod(action_space.shape)
        self.target_entropy = -float(dimensions) if target_entropy is None else float(target_entropy)
        spaces = {"observation_space": observation_space, "action_space": action_space}
        self.policy = policy(**spaces).to(device)
        critics = TwinCritic(numbers_of(observation_space) + dimensions, hidden) if critic is None else critic(**spaces)
        self.critic = critics.to(device)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = torch.tensor([math.log(alpha)], device=device, requires_grad=learn_entropy_coef)
        adam = functools.partial(torch.optim.Adam, lr=rate, fused=torch.device(device or "cpu").type in FUSED)
        self.policy_optimizer = adam(self.policy.parameters())
        self.critic_optimizer = adam(self.critic.parameters())
        self.alpha_optimizer = adam([self.log_alpha])

    def get_actor(self) -> torch.nn.Module:
        """Return the policy, whose weights are published."""
        return self.policy

    def train(self, batch: Any) -> dict[str, Any]:
        """Make one training step; return figures by name, and `priorities` [B] for a batch from a table.

        The figures are loss_critic, loss_actor, entropy_coef, and loss_entropy_coef if alpha is learned.

        Args:
            batch: Batch from a table; or a tuple (obs, action, reward, next_obs, done) of tensors. A sixth one,
                truncated, is ignored.

        Raises:
            ParameterError: the batch has another discount than `gamma`, or is a tuple while `gamma` is None.
        """
        is_table = not isinstance(batch, tuple)
        if is_table and self.gamma != self._checked_gamma:
            self._checked_gamma = self._check_discount(batch)
        batch = batch if is_table else _with_names(batch, self.gamma)
        td, critic_loss = self._learn_critic(batch)
        policy_loss, logp = self._learn_policy(batch.obs)
        figures: dict[str, Any] = {"loss_critic": critic_loss, "loss_actor": policy_loss}
        if self.learn_entropy_coef:
            loss = -(self.log_alpha * (logp + self.target_entropy)).mean()
            self.alpha_optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.alpha_optimizer.step()
            figures["loss_entropy_coef"] = loss.detach()
        with torch.no_grad():
            critics, targets = list(self.critic.parameters()), list(self.target.parameters())
            torch._foreach_lerp_(targets, critics, 1.0 - self.polyak)
        figures["entropy_coef"] = self.log_alpha.detach().exp()[0]
        return figures | {"priorities": td} if is_table else figures

    def _check_discount(self, batch: Any) -> float | None:
        """Return `gamma` if the batch has it; None if no step shows a discount. Raises ParameterError otherwise."""
        assert self.gamma is not None
        has_next = batch.discount != 0.0
        steps = batch.steps[has_next].double() if hasattr(batch, "steps") else 1.0
        batch_gamma = batch.discount[has_next].double() ** (1.0 / steps)
        if not torch.allclose(batch_gamma, torch.full_like(batch_gamma, self.gamma), rtol=1e-5):
            expected = f"{float(batch_gamma.mean()):.6g}, the discount of the batches, or left out"
            raise ParameterError("gamma", self.gamma, expected)
        return self.gamma if len(batch_gamma) else None

    def _learn_critic(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Make a gradient step of the critics; return TD errors [B] and the loss."""
        with torch.no_grad():
            action, logp = self.policy(batch.next_obs)
            value = self.target(batch.next_obs, action).amin(0) - self.log_alpha.exp() * logp
            backup = batch.reward + batch.discount * value
        errors = self.critic(batch.obs, batch.action.float()) - backup
        loss = (batch.importance * errors.square().sum(0)).mean()
        self.critic_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.critic_optimizer.step()
        return errors.detach().mean(0), loss.detach()

    def _learn_policy(self, obs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Make a gradient step of the policy; return the loss, and log probabilities [B] of the actions."""
        action, logp = self.policy(obs)
        self.critic.requires_grad_(False)
        value = self.critic(obs, action).amin(0)
        self.critic.requires_grad_(True)
        loss = (self.log_alpha.detach().exp() * logp - value).mean()
        self.policy_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.policy_optimizer.step()
        return loss.detach(), logp.detach()


def _with_names(batch: tuple[Any, ...], gamma: float | None) -> SimpleNamespace:
    """Return a tuple of tensors under the names of a table's batch. Raises ParameterError if gamma is None."""
    if gamma is None:
        raise ParameterError("gamma", None, "a number in [0, 1]: batches that are tuples have no discount")
    obs, action, reward, next_obs, done = batch[:5]
    reward = reward.reshape(-1).float()
    discount = gamma * (1.0 - done.reshape(-1).float())
    return SimpleNamespace(
        obs=obs, action=action, reward=reward, next_obs=next_obs, discount=discount, importance=torch.ones_like(reward)
    )


def mlp(widths: Sequence[int], activation: Callable[[], torch.nn.Module]) -> torch.nn.Sequential:
    """Return linear layers of these widths, each followed by an activation."""
    layers: list[torch.nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [torch.nn.Linear(before, after), activation()]
    return torch.nn.Sequential(*layers)
