"""`TrainingAgent`: what learns, with two methods."""

from memoire.rl.agent import TrainingAgent

__all__ = ["TrainingAgent"]
