"""memoire: a distributed prioritized replay memory for reinforcement learning."""

from .batch import Batch
from .buffer import Buffer
from .classic import ReplayMemory
from .errors import MemoireError
from .memory import Memory
from .parameters import Parameters
from .sampling import Prioritized, Uniform
from .schema import Column, Schema
from .writer import Writer

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Buffer",
    "Column",
    "Memory",
    "MemoireError",
    "Parameters",
    "Prioritized",
    "ReplayMemory",
    "Schema",
    "Uniform",
    "Writer",
    "__version__",
]
