"""Collection and episodes that `collect`, `infer` and `observe` load from a file in tests of processes."""

import numpy as np

from memoire import rl
from memoire.nodes.settings import make_envs

collection = rl.Collection(envs=lambda: make_envs("CartPole-v1", 2), groups=2, seed=0)


def run_episode(start, ask, options):
    for step in range(options["steps"]):
        answer = ask({"obs": np.float32([step])})
        yield {"obs": np.float32([step]), "action": answer["action"], "reward": 1.0}
