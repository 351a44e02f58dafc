"""What does a step cost in Stable-Baselines3's replay buffer, and what in memoire's that takes its place?

Run it where memoire, torch and Stable-Baselines3 are: `pip install '.[sb3]'`. A step is one call of `add`, of all
environments, in the forms that an algorithm has them: episodes of 200 steps that end, in a buffer that is full.
"""

import itertools
import sys
import time

import numpy as np
from measure import Report, arguments, race

QUESTION = str(__doc__).splitlines()[0]
EPISODE = 200
BYTES = 20_000_000
"""Of observations in each buffer, and twice that in one that keeps the next ones, too."""
FLOOR = 1 / 1.5
"""A step may take 1.5 times as long as in Stable-Baselines3's own buffer."""
SHAPES = ((1, (64,), np.float32), (8, (64,), np.float32), (1, (4,), np.float32), (1, (4, 84, 84), np.uint8))
"""Environments, and an observation's shape and dtype."""


class Run:
    """An endless run, step by step into a replay buffer that is full. Timed by the processor's time, as nothing waits.

    Args:
        kind: Of the buffer.
        count: Environments.
        shape, dtype: Of an observation.
    """

    def __init__(self, kind: type, count: int, shape: tuple[int, ...], dtype: type) -> None:
        from gymnasium import spaces

        low, high = (0, 255) if dtype is np.uint8 else (-1, 1)
        observation, action = spaces.Box(low, high, shape, dtype), spaces.Discrete(4)  # type: ignore[arg-type]
        capacity = min(20_000, BYTES // (int(np.prod(shape)) * np.dtype(dtype).itemsize))
        self.buffer = kind(capacity, observation, action, device="cpu", n_envs=count)
        random = np.random.default_rng(0)
        seen = [(random.random((count, *shape)) * high).astype(dtype) for _ in range(EPISODE + 1)]
        going, over = np.zeros(count, np.bool_), np.ones(count, np.bool_)
        infos = [{"TimeLimit.truncated": False} for _ in range(count)]
        actions, rewards = random.integers(0, 4, count), random.random(count).astype(np.float32)
        self.steps = [(*pair, actions, rewards, going, infos) for pair in itertools.pairwise(seen[:-1])]
        self.steps.append((seen[-2], seen[-1], actions, rewards, over, infos))
        self.at = 0
        self.clock(capacity // count)

    def clock(self, count: int) -> float:
        add, steps, at = self.buffer.add, self.steps, self.at
        began = time.process_time()
        for _ in range(count):
            add(*steps[at])
            at = at + 1 if at + 1 < len(steps) else 0
        taken = time.process_time() - began
        self.at = at
        return taken

    def __call__(self) -> None:
        self.clock(1)


def main() -> None:
    given = arguments(QUESTION)
    try:
        from stable_baselines3.common.buffers import ReplayBuffer as Theirs
        from torch import set_num_threads

        from memoire.sb3 import ReplayBuffer as Ours
    except ImportError as error:
        sys.exit(f"{error}. Install it beside memoire: pip install '.[sb3]'")
    set_num_threads(1)
    report = Report(QUESTION, [str(__doc__).partition("\n\n")[2].strip()])
    report.heading()
    for count, shape, dtype in SHAPES:
        what = f"add, {count} environments, {np.dtype(dtype).name}{list(shape)}"
        if given.only not in what:
            continue
        ours, theirs = Run(Ours, count, shape, dtype), Run(Theirs, count, shape, dtype)
        rounds = 3 if given.quick else 25
        report.add(race(what, ours, theirs, baseline="SB3's ReplayBuffer", unit=" steps/s", rounds=rounds, floor=FLOOR))
    report.finish(given.write, "sb3_add")
    if any(result.is_below for result in report.results):
        sys.exit(1)


if __name__ == "__main__":
    main()
