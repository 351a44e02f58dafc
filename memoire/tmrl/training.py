"""`TrainingAgent`: what learns, with two methods."""

from memoire.rl.training import TrainingAgent

__all__ = ["TrainingAgent"]
