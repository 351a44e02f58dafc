"""memoire: a distributed prioritized replay memory for reinforcement learning."""

__version__ = "0.1.0"
