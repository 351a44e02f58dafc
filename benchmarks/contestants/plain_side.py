"""Side of a plain loop, written without a library.

The loop is vectorized if that is easy: a whole batch descends the tree at once.
"""

from collections import deque

import numpy as np
import settings
import torch
from tasks import DoubleDqn, Run, epsilon_at

ENVS = 8


class SumTree:
    """Sum tree over weights: node n has the children 2 n and 2 n + 1."""

    def __init__(self, capacity: int) -> None:
        self.leaves = 1 << (capacity - 1).bit_length()
        self.nodes = np.zeros(2 * self.leaves)

    def set(self, places, weights) -> None:
        nodes = places + self.leaves
        self.nodes[nodes] = weights
        while nodes[0] > 1:
            nodes = np.unique(nodes // 2)
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]

    def draw(self, count: int, random):
        """Draw places [count], one from each of `count` equal parts of the total weight."""
        mass = (np.arange(count) + random.random(count)) * (self.nodes[1] / count)
        nodes = np.ones(count, np.int64)
        while nodes[0] < self.leaves:
            nodes *= 2
            goes_right = mass >= self.nodes[nodes]
            mass -= np.where(goes_right, self.nodes[nodes], 0.0)
            nodes += goes_right
        return np.minimum(nodes - self.leaves, self.leaves - 1)


class Replay:
    """Ring of transitions with returns of three steps, drawn by priority."""

    def __init__(self, capacity: int, shape, seed: int) -> None:
        self.capacity = capacity
        self.obs, self.next_obs = (np.zeros((capacity, *shape), np.uint8) for _ in range(2))
        self.action, self.reward = np.zeros(capacity, np.int64), np.zeros(capacity, np.float32)
        self.discount = np.zeros(capacity, np.float32)
        self.tree, self.random = SumTree(capacity), np.random.default_rng(seed)
        self.added, self.largest = 0, 1.0

    def add(self, obs, action, reward, discount, next_obs) -> None:
        place = self.added % self.capacity
        self.obs[place], self.action[place], self.next_obs[place] = obs, action, next_obs
        self.reward[place], self.discount[place] = reward, discount
        self.tree.set(np.array([place]), self.largest**settings.ALPHA)
        self.added += 1

    def draw(self):
        """Draw a batch; return its places, its importance, and its columns."""
        places = self.tree.draw(settings.BATCH, self.random)
        chance = self.tree.nodes[places + self.tree.leaves] / self.tree.nodes[1]
        importance = (chance * min(self.added, self.capacity)) ** -settings.BETA
        columns = self.obs, self.action, self.reward, self.discount, self.next_obs
        tensors = [torch.from_numpy(each[places]) for each in columns]
        return places, torch.from_numpy((importance / importance.max()).astype(np.float32)), tensors

    def update(self, places, errors) -> None:
        priorities = np.abs(errors) + 1e-6
        self.largest = max(self.largest, float(priorities.max()))
        self.tree.set(places, priorities**settings.ALPHA)


class Window:
    """Newest steps of an environment, from which transitions are built."""

    def __init__(self) -> None:
        self.steps = deque()

    def step(self, replay: Replay, obs, action, reward, next_obs, terminated, truncated) -> None:
        self.steps.append((obs, action, reward))
        while self.steps and (len(self.steps) == settings.MULTI_STEP or terminated or truncated):
            first, taken, _ = self.steps[0]
            returned = sum(settings.GAMMA**place * each[2] for place, each in enumerate(self.steps))
            discount = 0.0 if terminated else settings.GAMMA ** len(self.steps)
            replay.add(first, taken, returned, discount, next_obs)
            self.steps.popleft()
            if not (terminated or truncated):
                break


def dqn(run: Run) -> None:
    """Eight environments in turns, a ring of NumPy arrays, a sum tree in NumPy."""
    random, envs = np.random.default_rng(run.seed), [run.make() for _ in range(ENVS)]
    dqn, replay = DoubleDqn(envs[0]), Replay(run.capacity, envs[0].observation_space.shape, run.seed)
    obs = np.stack([env.reset(seed=1000 * run.seed + place)[0] for place, env in enumerate(envs)])
    windows, steps, actions = [Window() for _ in envs], 0, int(envs[0].action_space.n)
    while run.goes_on(steps, dqn.net.parameters, dqn.updates):
        with torch.no_grad():
            chosen = dqn.net(torch.from_numpy(obs).float()).argmax(1).numpy()
        is_random = random.random(ENVS) < epsilon_at(steps)
        chosen = np.where(is_random, random.integers(actions, size=ENVS), chosen)
        after = np.empty_like(obs)
        for place, (env, window) in enumerate(zip(envs, windows, strict=True)):
            next_obs, reward, terminated, truncated, _ = env.step(chosen[place])
            window.step(replay, obs[place], chosen[place], reward, next_obs, terminated, truncated)
            after[place] = env.reset()[0] if terminated or truncated else next_obs
        obs, steps = after, steps + ENVS
        if steps >= run.first_update:
            for _ in range(ENVS // settings.UPDATE_INTERVAL):
                places, importance, columns = replay.draw()
                replay.update(places, dqn.update(importance, *columns).numpy())
    run.report(updates=dqn.updates)


if __name__ == "__main__":
    Run.learn(dqn)
