"""The demo's learner and player in one process around a plain Buffer: prints steps and mean return.

A process of its own, since numerical libraries must be told before they are loaded to keep to one thread: with one per
core, each small matrix product would wait for whoever else uses the cores.
"""

import sys
from collections import deque

import numpy as np

import memoire
from memoire.nodes.settings import make_envs, sizes
from memoire.rl.demo import demo
from memoire.rl.demo.actor import Player
from memoire.rl.demo.qlearning import DoubleQ


class Returns:
    """Hears of episodes from a writer."""

    def __init__(self) -> None:
        self.newest: deque[float] = deque(maxlen=demo.EPISODES)

    def on_entries(self, count: int) -> None:
        pass

    def on_episode(self, lane: int, length: int, return_: np.ndarray) -> None:
        self.newest.append(float(return_))

    @property
    def is_solved(self) -> bool:
        return len(self.newest) == demo.EPISODES and float(np.mean(self.newest)) > demo.GOALS["CartPole-v1"]


def main(seed: int) -> int:
    envs, returns = make_envs("CartPole-v1", 8), Returns()
    buffer = memoire.Buffer(memoire.Schema.from_env(envs), capacity=20_000, multi_step=3, discount=0.99, seed=seed)
    learner = DoubleQ(*sizes(envs), seed=seed)
    player = Player(envs, buffer.writer(envs, observer=returns), learner.network, epsilon=0.03, seed=seed)
    while not returns.is_solved and player.steps < 60_000:
        player.step()
        if player.steps > 500 and player.steps % 16 == 0:
            batch = buffer.sample(learner.settings.batch_size)
            batch.update_priorities(learner.learn(batch))
    envs.close()
    print(player.steps, float(np.mean(returns.newest)))
    return 0 if returns.is_solved else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
