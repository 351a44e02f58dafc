"""Episodes that are played to see how good a network is: apart from those of collectors, and never learned from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .actor_critic import flat_tensor
from .collector import for_space


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
    inputs = flat_tensor(_batched(obs)).to(next(net.parameters()).device)
    distribution, _, *rest = net(inputs) if memory is None else net(inputs, memory)
    action = distribution.mode[0].cpu().numpy()
    return (action.item() if action.shape == () else action), (rest[0] if rest else None)


def _batched(obs: Any) -> Any:
    if isinstance(obs, dict):
        return {name: _batched(part) for name, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_batched(part) for part in obs)
    return np.asarray(obs)[None]
