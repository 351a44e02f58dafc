"""memoire: a distributed prioritized replay memory for reinforcement learning."""

from .batch import Batch
from .classic import ReplayMemory
from .errors import MemoireError
from .parameters import Parameters
from .schema import Column, Schema

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Column",
    "MemoireError",
    "Parameters",
    "ReplayMemory",
    "Schema",
    "__version__",
]
