"""memoire: a distributed prioritized replay memory for reinforcement learning."""

from .batch import Batch
from .parameters import Parameters
from .schema import Column, Schema

__version__ = "0.1.0"

__all__ = ["Batch", "Column", "Parameters", "Schema", "__version__"]
