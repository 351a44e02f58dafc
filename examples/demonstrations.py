"""Two tables in one server: what an actor lives through, and what somebody has shown; every batch has some of both.

A corridor of 30 cells with a reward at its far end, which steps at random never reach. Five walks straight to it are
the demonstrations: few, so that their table is drawn from again and again, while what is online is drawn once.

    python examples/demonstrations.py
"""

import numpy as np

import memoire

CELLS, LEFT, RIGHT = 30, 0, 1
SCHEMA = memoire.Schema(
    {
        "obs": memoire.Column(np.float32, (1,), "state"),
        "action": memoire.Column(np.int64),
        "reward": memoire.Column(np.float32, (), "reward"),
    }
)
SMALL = memoire.Parameters(cache_size=32)
TABLES = {
    "online": memoire.Table(SCHEMA, parameters=SMALL),
    "demo": memoire.Table(SCHEMA, parameters=SMALL.replace(reuse_cache=True, samples_per_insert=4.0), byte_limit=1 << 20),
}


def walk(writer, choose, most=200):
    """One episode; returns how many steps it took."""
    cell = 0
    writer.reset(np.array([0.0], np.float32))
    for step in range(1, most + 1):
        action = choose(cell)
        following = max(0, cell + (1 if action == RIGHT else -1))
        done = following == CELLS - 1
        states = [np.array([each], np.float32) for each in (cell, following)]
        writer.step(states[0], action, float(done), done, step == most and not done, states[1], {})
        if done:
            break
        cell = following
    return step


def main() -> None:
    rng, values = np.random.default_rng(0), np.zeros((CELLS, 2))

    def choose(cell):
        unsure = rng.random() < 0.1 or values[cell, LEFT] == values[cell, RIGHT]
        return int(rng.integers(2)) if unsure else int(values[cell].argmax())

    with (
        memoire.Server("inproc://memoire", tables=TABLES, seed=0) as server,
        memoire.connect("inproc://memoire", table="demo", seed=1) as teacher,
        memoire.connect("inproc://memoire", table="online", seed=2) as actor,
    ):
        shown = teacher.writer()
        for _ in range(5):
            walk(shown, lambda cell: RIGHT)
        teacher.update()  # what it has counted is known when this returns
        lived = actor.writer()
        steps = walk(lived, choose)
        print(f"before: {steps} steps and no reward")
        batches = server.batches({"online": 48, "demo": 16}, timeout=30.0)
        for _ in range(60):
            for batch in (next(batches) for _ in range(3)):
                for part in batch.values():  # or all of it at once: batch.joined
                    cells, following = part.obs[:, 0].astype(int), part.next_obs[:, 0].astype(int)
                    target = part.reward + part.discount * values[following].max(axis=1)
                    error = target - values[cells, part.action]
                    np.add.at(values, (cells, part.action), 0.2 * part.importance * error)
                    part.update_priorities(error)
            steps = walk(lived, choose)
            if steps < 60:
                break
        print(f"after: {steps} steps to the reward; {server.stats().tables['demo'].steps} steps were shown")


if __name__ == "__main__":
    main()
