"""How many steps of CartPole-v1 does learning take, with samples drawn by priority and uniformly?

One process: a memoire.Buffer and the Q-learning in NumPy of `memoire demo`, n-step 3, a batch of 512 after every 8
steps of the environment. The curve is the mean return of the last 20 episodes, as the policy explores.
"""

import json
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # matrices this small lose by being shared out
import statistics
from collections import deque
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from measure import arguments, cells, head, machine, write_page

import memoire
from memoire.rl.demo import qlearning

ENV = "CartPole-v1"
SOLVED = 475.0
"""Mean return that the environment's authors ask for."""
LEARN_EVERY, BEGIN = 8, 1_000
RECORD_EVERY, EPISODES = 500, 20
SAMPLERS = {"by priority": memoire.Prioritized(0.6, beta=0.4), "uniformly": memoire.Uniform()}
Curve = list[list[float]]
"""Steps of the environment, and the mean return of the last episodes then."""


def train(sampler: Any, seed: int, steps: int) -> Curve:
    """Learn once, from nothing."""
    env = gymnasium.make(ENV)
    schema = memoire.Schema.from_env(env)
    buffer = memoire.Buffer(schema, capacity=steps + 500, sampler=sampler, multi_step=3, discount=0.99, seed=seed)
    writer, learner = buffer.writer(env), qlearning.DoubleQ(4, 2, seed=seed)
    random, returns, curve, total = np.random.default_rng(seed), deque[float](maxlen=EPISODES), [], 0.0
    obs, _ = env.reset(seed=seed)
    for step in range(1, steps + 1):
        epsilon = max(0.02, 1.0 - step / 4_000)
        action = int(qlearning.act(learner.network, obs[None], epsilon, random)[0])
        after, reward, terminated, truncated, info = env.step(action)
        writer.step(obs, action, reward, terminated, truncated, after, info)
        obs, total = after, total + float(reward)
        if terminated or truncated:
            returns.append(total)
            (obs, _), total = env.reset(), 0.0
        if step % LEARN_EVERY == 0 and step >= BEGIN:
            batch = buffer.sample(learner.settings.batch_size)
            buffer.update_priorities(batch.ids, learner.learn(batch))
        if step % RECORD_EVERY == 0:
            curve.append([step, round(statistics.mean(returns), 1) if returns else 0.0])
    return curve


def steps_until(curve: Curve, goal: float = SOLVED) -> float:
    """Steps until the mean return first reaches the goal; infinity if it never does."""
    return next((step for step, mean in curve if mean >= goal), float("inf"))


def lines(found: dict[str, list[Curve]]) -> list[str]:
    """What the page says of each way to draw."""
    rows = [head("drawn", "seeds that reach 475", "median of the steps until then", "median return at the end")]
    for name, curves in found.items():
        needed = [steps_until(curve) for curve in curves]
        reached = [steps for steps in needed if steps < float("inf")]
        middle = f"{statistics.median(reached):.0f}" if reached else "-"
        end = statistics.median(curve[-1][1] for curve in curves)
        rows.append(cells(name, f"{len(reached)} of {len(curves)}", middle, f"{end:.0f}"))
    return rows


def main() -> None:
    given = arguments(__doc__, seeds=7, steps=30_000)
    print(__doc__, machine(), sep="\n", flush=True)
    found = {
        name: [train(sampler, seed, given.steps) for seed in range(given.seeds)]
        for name, sampler in SAMPLERS.items()
        if given.only in name
    }
    print(*lines(found), sep="\n")
    if given.write:
        write_page(given.write, "cartpole", __doc__, "\n".join(lines(found)), "![curves](../pictures/learning.svg)")
        record = json.dumps({"machine": machine(), "solved": SOLVED, "curves": found})
        Path(given.write, "cartpole.json").write_text(record.replace("]], ", "]],\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
