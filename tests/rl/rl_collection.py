"""What collect, infer and observe take of a file, for tests of processes."""

import numpy as np

from memoire import rl
from memoire.nodes.settings import make_envs

collection = rl.Collection(envs=lambda: make_envs("CartPole-v1", 2), groups=2, seed=0)


def run_episode(start, ask, options):
    for step in range(options["steps"]):
        found = ask({"obs": np.float32([step])})
        yield {"obs": np.float32([step]), "action": found["action"], "reward": 1.0}
