"""Base classes of workers' policies: torch modules with `act`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from memoire.errors import NotInstalled

with NotInstalled.explained("pip install 'memoire-rl[rl]'"):
    import torch


class ActorModule(torch.nn.Module):
    """Base class of policy networks: implement `act`, and `forward` if you like.

    Args:
        observation_space, action_space: Spaces of the environment.
    """

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.observation_space = observation_space
        self.action_space = action_space

    @abstractmethod
    def act(self, obs: Any, test: bool = False) -> Any:
        """Return the action for one observation, as a NumPy array.

        Args:
            obs: Nested as the environment's, with tensors [1, *F] on the worker's device as leaves.
            test: True in test episodes, which do not explore.
        """
        raise NotImplementedError


class TorchActorModule(ActorModule):
    """Policy network under the name of TMRL 0.7.

    Args:
        observation_space, action_space: Spaces of the environment.
        device: Device on which the network acts.
    """

    def __init__(self, observation_space: Any, action_space: Any, device: Any = "cpu") -> None:
        super().__init__(observation_space, action_space)
        self.device = device

    def to(self, *args: Any, **kwargs: Any) -> TorchActorModule:
        """Move the module as `torch.nn.Module.to` does, update `device`, and return the module."""
        super().to(*args, **kwargs)
        self.device = next((each.device for each in self.parameters()), self.device)
        return self

    def to_device(self, device: Any) -> TorchActorModule:
        """Move the module to a device and return it."""
        return self.to(device)
