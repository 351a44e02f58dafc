"""Base class of agents under TMRL's name: `TrainingAgent`."""

from memoire.rl.training import TrainingAgent

__all__ = ["TrainingAgent"]
