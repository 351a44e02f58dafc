"""Two tables in one server: what an actor lives through, and what somebody has shown; every batch has some of both.

A corridor of 30 cells with a reward at its far end, which steps at random never reach. Five walks straight to it are
the demonstrations: few, so that their table is drawn from again and again.         python examples/demonstrations.py
"""

import numpy as np

import memoire

CELLS, LEFT, RIGHT = 30, 0, 1
REWARD = memoire.Column(np.float32, (), "reward")
SCHEMA = memoire.Schema({"obs": memoire.Column(np.float32, (1,), "state"), "action": np.int64, "reward": REWARD})
ONCE = memoire.Parameters(cache_size=32)
AGAIN = ONCE.replace(reuse_cache=True, samples_per_insert=4.0)
TABLES = {"online": memoire.Table(SCHEMA, parameters=ONCE), "demo": memoire.Table(SCHEMA, parameters=AGAIN)}


def walk(writer, choose, most=200):
    """One episode; returns how many steps it took."""
    writer.reset(obs := np.zeros(1, np.float32))
    for step in range(1, most + 1):
        action = choose(int(obs[0]))
        following = np.maximum(obs + (1 if action == RIGHT else -1), 0)
        done = bool(following[0] == CELLS - 1)
        writer.step(obs, action, float(done), done, step == most and not done, following, {})
        if done:
            break
        obs = following
    return step


rng, values = np.random.default_rng(0), np.zeros((CELLS, 2))


def choose(cell):
    unsure = rng.random() < 0.1 or values[cell, LEFT] == values[cell, RIGHT]
    return int(rng.integers(2)) if unsure else int(values[cell].argmax())


with memoire.Server("inproc://memoire", tables=TABLES, seed=0) as server:
    with memoire.connect("inproc://memoire", table="demo", seed=1) as teacher:
        shown = teacher.writer()
        for _ in range(5):
            walk(shown, lambda cell: RIGHT)
    with memoire.connect("inproc://memoire", table="online", seed=2) as actor:
        lived = actor.writer()
        steps = walk(lived, choose)
        print(f"before: {steps} steps and no reward")
        for turn, batch in enumerate(server.batches({"online": 48, "demo": 16}, timeout=30.0), 1):
            part = batch.joined  # or one table after the other: batch["online"], batch["demo"]
            cells, following = part.obs[:, 0].astype(int), part.next_obs[:, 0].astype(int)
            targets = part.reward + part.discount * values[following].max(axis=1)
            part.update_priorities(targets - values[cells, part.action])
            for *place, target, weight in zip(cells, part.action, targets, part.importance, strict=True):
                values[*place] += 0.2 * weight * (target - values[*place])
            steps = walk(lived, choose) if turn % 3 == 0 else steps
            if steps < 60 or turn == 180:
                break
    print(f"after: {steps} steps to the reward; {server.stats().tables['demo'].steps} steps were shown")
