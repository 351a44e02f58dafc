"""On-policy learning: collectors, the learner and PPO."""
