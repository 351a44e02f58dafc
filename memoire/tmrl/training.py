"""`TrainingAgent`: what learns, with two methods."""

from memoire.rl.trainer.training import TrainingAgent

__all__ = ["TrainingAgent"]
