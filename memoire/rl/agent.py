"""What learns, for a `Trainer`: any algorithm with two methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar


class TrainingAgent(ABC):
    """Learns from batches, and gives what acts.

    Args:
        observation_space, action_space: Of the environment.
        device: Where batches are, and where it learns; None leaves batches as they are drawn, in NumPy.

    Attributes:
        fixed: Names of attributes that an agent which goes on from a checkpoint cannot be made with otherwise.
    """

    fixed: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, observation_space: Any, action_space: Any, device: Any) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.device = device

    @abstractmethod
    def train(self, batch: Any) -> dict[str, Any]:
        """One training step.

        Args:
            batch: Of a table: .obs, .action, .reward, .discount, .next_obs, .importance and .ids, each [B, ...].

        Returns:
            Figures by name, as numbers or tensors of one. "priorities" is none: TD errors [B], which set the
            priorities of these samples.
        """
        raise NotImplementedError

    @abstractmethod
    def get_actor(self) -> Any:
        """What acts now: its weights are published. A torch module, a state_dict, or arrays by name."""
        raise NotImplementedError
