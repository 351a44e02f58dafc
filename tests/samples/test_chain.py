"""Learning from batches: temporal differences on known chains converge to the true values.

A corridor of four states ends in a terminal state; a ring of four is endless, and truncated after every fifth step.
Corridor and ring are deterministic, so the true values have a closed form. Batches come from a buffer in one process,
and from a server that a client's writer feeds. The terminal state has a wrong value from the beginning, which is never
learned: a learner that bootstraps from it, treats a truncation as an end, or crosses a reset, converges to other
values.
"""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from memoire.limits import Limits
from memoire.replay.buffer import Buffer
from memoire.replay.sampling import Prioritized
from memoire.replay.schema import Schema

GAMMA = 0.8
REWARDS = np.array([1.0, -2.0, 3.0, 10.0, 5.0, 0.0, -1.0, 2.0])
TERMINAL = 8


def true_values():
    """Solve V = r + gamma P V (Sutton and Barto, Reinforcement Learning, 2nd edition, equation 4.4, deterministic)."""
    step = np.zeros((8, 8))
    for state in range(3):
        step[state, state + 1] = 1.0  # state 3 ends the corridor
    for state in range(4, 8):
        step[state, 4 + (state - 3) % 4] = 1.0
    return np.linalg.solve(np.eye(8) - GAMMA * step, REWARDS)


class Chain(gym.Env):
    """Corridor (first 0) or ring (first 4) with one-hot observations."""

    observation_space = gym.spaces.Box(0.0, 1.0, (9,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, first):
        self.first = self.state = first
        self.steps = 0

    def observation(self):
        return np.eye(9, dtype=np.float32)[self.state]

    def reset(self, *, seed=None, options=None):
        self.state, self.steps = self.first, 0
        return self.observation(), {}

    def step(self, action):
        reward = float(REWARDS[self.state])
        self.steps += 1
        if self.first == 0:
            self.state = self.state + 1 if self.state < 3 else TERMINAL
        else:
            self.state = 4 + (self.state - 3) % 4
        cut = self.first == 4 and self.steps % 5 == 0
        return self.observation(), reward, self.state == TERMINAL, cut, {}


class Learner:
    """Tabular TD learner, which moves each value half of the way to the mean of its targets."""

    def __init__(self):
        self.values = np.zeros(9)
        self.values[TERMINAL] = 100.0

    def learn(self, batch):
        """Learn from a batch and return its TD errors: Sutton and Barto, equation 7.5, weighted by importance."""
        obs = batch["obs"].astype(float)
        errors = batch["reward"] + batch["discount"] * (batch["next_obs"] @ self.values) - obs @ self.values
        weight = batch["importance"] @ obs
        moved = (batch["importance"] * errors) @ obs
        self.values += np.divide(0.5 * moved, weight, out=np.zeros(9), where=weight > 0.0)
        return errors

    def has_learned(self):
        np.testing.assert_allclose(self.values[:8], true_values(), atol=1e-3)
        assert self.values[TERMINAL] == 100.0


class Actor:
    """Actor in a corridor and a ring, whose writer records each step."""

    def __init__(self, envs, writer):
        self.envs, self.writer = envs, writer
        self.obs, _ = envs.reset(seed=0)

    def act(self, steps):
        for _ in range(steps):
            action = np.zeros(2, np.int64)
            stepped = self.envs.step(action)
            next_obs, reward, terminated, truncated, info = stepped
            self.writer.step(self.obs, action, reward, terminated, truncated, next_obs, info)
            self.obs = next_obs


@pytest.fixture(params=[AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=["next_step", "same_step"])
def envs(request):
    vector_env = SyncVectorEnv([lambda: Chain(0), lambda: Chain(4)], autoreset_mode=request.param)
    yield vector_env
    vector_env.close()


SAMPLER = Prioritized(0.6, beta=1.0)


@pytest.mark.parametrize("multi_step", [1, 3])
def test_learning_from_a_buffer_finds_the_true_values(envs, multi_step):
    buffer = Buffer(Schema.from_env(envs), capacity=500, sampler=SAMPLER, multi_step=multi_step, discount=GAMMA, seed=0)
    actor, learner = Actor(envs, buffer.writer(envs)), Learner()
    actor.act(30)
    for _ in range(300):
        actor.act(2)
        batch = buffer.sample(64)
        buffer.update_priorities(batch.ids, learner.learn(batch))
    learner.has_learned()


def test_learning_from_a_server_finds_the_true_values(envs, cluster):
    schema = Schema.from_env(envs)
    server = cluster.server(schema=schema, sampler=SAMPLER, multi_step=3, discount=GAMMA, cache_size=64, seed=0)
    client = cluster.client(server, seed=0, capacity=20_000, limits=Limits.of(update_every=0.02))
    actor, learner = Actor(envs, client.writer(envs)), Learner()
    actor.act(30)
    for _ in range(150):
        actor.act(32)  # the writer pushes a cache for at most 64 entries
        batch = server.get_batch(48, 100.0)
        batch.update_priorities(learner.learn(batch))
    client.update(100.0)
    client.update(100.0)
    assert client.stats().applied > 1000
    learner.has_learned()
