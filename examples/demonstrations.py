"""Two tables in one server: an actor's own episodes, and demonstrations; every batch has samples of both.

A corridor of 30 cells has a reward at its far end, which random steps never reach. Five straight walks to the reward
are the demonstrations: few, so each is drawn many times.         python examples/demonstrations.py
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
    """Play and record one episode; return its number of steps."""
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
        teacher_writer = teacher.writer()
        for _ in range(5):
            walk(teacher_writer, lambda cell: RIGHT)
    with memoire.connect("inproc://memoire", table="online", seed=2) as actor:
        actor_writer = actor.writer()
        steps = walk(actor_writer, choose)
        print(f"before: {steps} steps and no reward")
        for turn, batch in enumerate(server.batches({"online": 48, "demo": 16}, timeout=30.0), 1):
            part = batch.joined  # or each table alone: batch["online"], batch["demo"]
            cells, following = part.obs[:, 0].astype(int), part.next_obs[:, 0].astype(int)
            targets = part.reward + part.discount * values[following].max(axis=1)
            part.update_priorities(targets - values[cells, part.action])
            for *place, target, weight in zip(cells, part.action, targets, part.importance, strict=True):
                values[*place] += 0.2 * weight * (target - values[*place])
            steps = walk(actor_writer, choose) if turn % 3 == 0 else steps
            if steps < 60 or turn == 180:
                break
    print(f"after: {steps} steps to the reward; {server.stats().tables['demo'].steps} steps were shown")
