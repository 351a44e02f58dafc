"""Pipeline without torch for tests of processes: the environment and the agent count their steps."""

import os

import gymnasium
import numpy as np

from memoire import rl
from memoire.rl import weights


class Steps(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1e6, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.full(1, self.count, np.float32), float(action[0]), self.count == 20, False, {}


class Acts:
    def __init__(self, observation_space, action_space):
        self.value = 0.0

    def act(self, obs, test=False):
        return np.full(1, self.value, np.float32)

    def load(self, body, version):
        self.value = float(weights.unpack(body)["value"][0])


class Agent(rl.TrainingAgent):
    """Agent whose actors improve with each training step, up to the value 1 after 400 steps."""

    def __init__(self, observation_space, action_space, device):
        super().__init__(observation_space, action_space, None)
        self.count = 0

    def train(self, batch):
        self.count += 1
        return {"loss": float(batch.reward.mean())}

    def get_actor(self):
        return {"value": np.array([min(1.0, self.count / 400)], np.float32)}


pipeline = rl.Pipeline(
    run="test",
    folder=os.environ["RL_TEST_RUNS"],
    env=lambda **options: Steps(),
    policy=Acts,
    agent=Agent,
    table=rl.replay(capacity=10_000),
    training=rl.Training(epochs=100, rounds=1, steps=50, batch_size=8, start_training=20, update_model_interval=10),
    work=rl.Work(workers=2, test_episode_interval=2),
    goal=rl.Goal(test_return=19.9, episodes=3),
)
