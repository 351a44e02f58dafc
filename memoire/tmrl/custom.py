"""Ready-made agent, networks and memory of TMRL 0.7, over `memoire.rl`: soft actor-critic on flat observations.

    SpinupSacAgent              the agent, for any model_cls with `actor`, `q1` and `q2`
    MLPActorCritic              a model_cls, of SquashedGaussianMLPActor and MLPQFunction
    GenericTorchMemory          memory for samples of any form
    copy_shared, no_grad        tools for networks

TMRL has these names in four modules of `tmrl.custom`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from memoire.building import one_of
from memoire.errors import NotInstalled, ParameterError

with NotInstalled.explained("pip install 'memoire-rl[rl]'"):
    import torch

    from memoire.rl.networks import flat_tensor, numbers_of
    from memoire.rl.sac import SAC, GaussianPolicy, mlp

    from .memory import GenericMemory
    from .nn import copy_shared, no_grad
    from .training_offline import usable_device

__all__ = [
    "GenericTorchMemory", "MLPActorCritic", "MLPQFunction", "SpinupSacAgent", "SquashedGaussianMLPActor",
    "copy_shared", "no_grad",
]  # fmt: skip

OPTIMIZERS: Final = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
"""Optimizer classes by the names that an agent accepts."""


class SquashedGaussianMLPActor(GaussianPolicy):
    """Gaussian policy for a Box; see `memoire.rl.GaussianPolicy`.

    Args:
        observation_space: Space of numbers; its parts are concatenated.
        action_space: A Box with finite bounds, not necessarily symmetric.
        hidden_sizes: Widths of the hidden layers.
        activation: Class of the module after each hidden layer.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: Callable[[], torch.nn.Module] = torch.nn.ReLU,
    ) -> None:
        super().__init__(observation_space, action_space, hidden_sizes, activation)

    def forward(
        self, obs: Any, test: bool = False, with_logprob: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return actions [B, A] for observations [B, *F], and log probabilities [B], or None without `with_logprob`."""
        action, logp = super().forward(obs, test)
        return action, logp if with_logprob else None


class MLPQFunction(torch.nn.Module):
    """Critic: the value of an observation and an action.

    Args:
        obs_space, act_space, hidden_sizes, activation: See `SquashedGaussianMLPActor`.
    """

    def __init__(
        self,
        obs_space: Any,
        act_space: Any,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: Callable[[], torch.nn.Module] = torch.nn.ReLU,
    ) -> None:
        super().__init__()
        hidden = mlp((numbers_of(obs_space) + numbers_of(act_space), *hidden_sizes), activation)
        self.q = hidden.append(torch.nn.Linear(hidden_sizes[-1], 1))

    def forward(self, obs: Any, act: torch.Tensor) -> torch.Tensor:
        """Return values [B] of observations [B, *F] and actions [B, *A]."""
        values: torch.Tensor = self.q(flat_tensor((obs, act)))
        return values.squeeze(-1)


class MLPActorCritic(torch.nn.Module):
    """Model of SAC: an actor and two critics.

    Args:
        observation_space, action_space, hidden_sizes, activation: See `SquashedGaussianMLPActor`.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: Callable[[], torch.nn.Module] = torch.nn.ReLU,
    ) -> None:
        super().__init__()
        self.actor = SquashedGaussianMLPActor(observation_space, action_space, hidden_sizes, activation)
        self.q1 = MLPQFunction(observation_space, action_space, hidden_sizes, activation)
        self.q2 = MLPQFunction(observation_space, action_space, hidden_sizes, activation)

    def act(self, obs: Any, test: bool = False) -> Any:
        """Return the action [*A] for one observation, which has a leading axis of 1, as an array."""
        return self.actor.act(obs, test)


class _BothValues(torch.nn.Module):
    """The two critics as `memoire.rl.SAC` calls them; returns [2, B]."""

    def __init__(self, q1: torch.nn.Module, q2: torch.nn.Module) -> None:
        super().__init__()
        self.q1, self.q2 = q1, q2

    def forward(self, obs: Any, action: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.q1(obs, action), self.q2(obs, action)])


class SpinupSacAgent(SAC):
    """Soft actor-critic (SAC) agent for any actor and two critics; see `memoire.rl.SAC`.

    Args:
        observation_space, action_space, device: See `TrainingAgent`; device None takes a GPU if there is one.
        model_cls: Called with both spaces; makes a module with `actor`, whose `forward(obs)` returns actions and log
            probabilities, and `q1` and `q2`, whose `forward(obs, act)` returns values [B].
        gamma, polyak, alpha, learn_entropy_coef, target_entropy: See `memoire.rl.SAC`.
        lr_actor, lr_critic, lr_entropy: Learning rates.
        optimizer_actor, optimizer_critic: "adam", "adamw" or "sgd".
        betas_actor, betas_critic: Betas of "adam" and "adamw"; None takes torch's default.
        l2_actor, l2_critic: Weight decay; None takes torch's default.

    Raises:
        ParameterError: an optimizer's name is unknown, or "sgd" has betas.
    """

    def __init__(
        self,
        observation_space: Any = None,
        action_space: Any = None,
        device: Any = None,
        model_cls: Callable[[Any, Any], Any] = MLPActorCritic,
        gamma: float = 0.99,
        polyak: float = 0.995,
        alpha: float = 0.2,
        lr_actor: float = 1e-3,
        lr_critic: float = 1e-3,
        lr_entropy: float = 1e-3,
        learn_entropy_coef: bool = True,
        target_entropy: float | None = None,
        optimizer_actor: str = "adam",
        optimizer_critic: str = "adam",
        betas_actor: tuple[float, float] | None = None,
        betas_critic: tuple[float, float] | None = None,
        l2_actor: float | None = None,
        l2_critic: float | None = None,
    ) -> None:
        model = model_cls(observation_space, action_space)
        super().__init__(
            observation_space, action_space, usable_device() if device is None else device,
            policy=lambda **_: model.actor, critic=lambda **_: _BothValues(model.q1, model.q2),
            gamma=gamma, polyak=polyak, alpha=alpha, rate=lr_entropy, learn_entropy_coef=learn_entropy_coef,
            target_entropy=target_entropy,
        )  # fmt: skip
        actor, critic = self.policy.parameters(), self.critic.parameters()
        self.policy_optimizer = _optimizer("actor", optimizer_actor, actor, lr_actor, betas_actor, l2_actor)
        self.critic_optimizer = _optimizer("critic", optimizer_critic, critic, lr_critic, betas_critic, l2_critic)


def _optimizer(
    role: str, name: str, parameters: Iterable[torch.nn.Parameter], rate: float, betas: Any, decay: float | None
) -> torch.optim.Optimizer:
    optimizer_class: Any = OPTIMIZERS.get(name.lower())
    if optimizer_class is None:
        raise ParameterError(f"optimizer_{role}", name, one_of(name, OPTIMIZERS))
    if betas is not None and optimizer_class is torch.optim.SGD:
        raise ParameterError(f"betas_{role}", betas, 'None: "sgd" has no betas')
    options = {"betas": None if betas is None else tuple(betas), "weight_decay": decay}
    optimizer: torch.optim.Optimizer = optimizer_class(
        parameters, lr=rate, **{name: value for name, value in options.items() if value is not None}
    )
    return optimizer


class GenericTorchMemory(GenericMemory):
    """`memoire.tmrl.memory.GenericMemory` with TMRL 0.7's order of arguments, and batches of six parts.

    Args:
        memory_size, batch_size, dataset_path, nb_steps, sample_preprocessor, crc_debug, device: See `GenericMemory`.
        obs_preprocessor: See `memoire.tmrl.memory.TorchMemory`.
    """

    sample_parts = 6

    def __init__(
        self,
        memory_size: float = 1e6,
        batch_size: int = 1,
        dataset_path: str | Path = "",
        nb_steps: int = 1,
        sample_preprocessor: Callable[..., Any] | None = None,
        crc_debug: bool | int = False,
        device: Any = "cpu",
        *,
        obs_preprocessor: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(
            device,
            nb_steps,
            obs_preprocessor,
            sample_preprocessor,
            int(memory_size),
            batch_size,
            dataset_path,
            crc_debug,
        )
