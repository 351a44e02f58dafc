"""What a worker acts by: a torch module with `act`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from memoire.errors import NotInstalled

with NotInstalled.explained("pip install 'memoire-rl[rl]'"):
    import torch


class ActorModule(torch.nn.Module):
    """A policy network. Complete `forward` as you like, and `act`.

    Args:
        observation_space, action_space: Of the environment.
    """

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.observation_space = observation_space
        self.action_space = action_space

    @abstractmethod
    def act(self, obs: Any, test: bool = False) -> Any:
        """The action for one observation, as an array of NumPy.

        Args:
            obs: Nested as the environment's, with tensors [1, *F] on the worker's device as leaves.
            test: In test episodes: act as well as possible, and do not explore.
        """
        raise NotImplementedError


class TorchActorModule(ActorModule):
    """A policy network by the name that it has in TMRL 0.7.

    Args:
        observation_space, action_space: Of the environment.
        device: Where it acts.
    """

    def __init__(self, observation_space: Any, action_space: Any, device: Any = "cpu") -> None:
        super().__init__(observation_space, action_space)
        self.device = device

    def to(self, *args: Any, **kwargs: Any) -> TorchActorModule:
        """The same module, as `torch.nn.Module.to` moves it; `device` follows."""
        super().to(*args, **kwargs)
        self.device = next((each.device for each in self.parameters()), self.device)
        return self

    def to_device(self, device: Any) -> TorchActorModule:
        """The same module, on a device."""
        return self.to(device)
