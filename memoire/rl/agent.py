"""What learns, for a `Trainer`: any algorithm with two methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import Any, ClassVar, Final

import numpy as np

from memoire.errors import ParameterError
from memoire.replay.parameters import Parameters

GAMMA: Final = ("gamma", "discount", "discount_factor")
"""Attributes that are an agent's discount, if they are numbers."""


class TrainingAgent(ABC):
    """Learns from batches, and gives what acts.

    Args:
        observation_space, action_space: Of the environment.
        device: Where batches are, and where it learns; None leaves batches as they are drawn, in NumPy.

    Attributes:
        fixed: Names of attributes that an agent which goes on from a checkpoint cannot be made with otherwise; None
            takes the checkpoint's.
        gamma: If there is one: its discount. A `Trainer` gives an agent that has None the table's, and refuses another.
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


def check_gamma(owner: Any, discount: Sequence[float]) -> None:
    """Refuse an agent or algorithm that discounts otherwise than its table, whose batches are made by that discount.

    Args:
        discount: Of the table: per reward dimension, or one number for all.

    Raises:
        ParameterError: names both values.
    """
    for name in GAMMA:
        value: Any = getattr(owner, name, None)
        is_number = isinstance(value, Real | list | tuple | np.ndarray)
        numbers = np.ravel(value if is_number else ())
        if numbers.size and not np.all(numbers == (discount if numbers.size == len(discount) else discount[0])):
            own = discount[0] if len(set(discount)) == 1 else tuple(discount)
            raise ParameterError(name, value, f"{own}, which the table has, or left out")


def check_model_topic(parameters: Parameters, topic: str) -> None:
    """Refuse models of another topic than the table's, if it limits how old the model of an entry may be.

    Raises:
        ParameterError: names both topics.
    """
    if parameters.max_model_lag is not None and parameters.model_topic not in (None, topic):
        expected = (
            f"{parameters.model_topic!r}, the model_topic of the table, which has "
            f"max_model_lag={parameters.max_model_lag}"
        )
        raise ParameterError("topic", topic, expected)
