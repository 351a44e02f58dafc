"""memoire: a distributed prioritized replay memory for reinforcement learning."""
