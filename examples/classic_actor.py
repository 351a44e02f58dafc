"""Actor with the classic client: receives tables, sends caches. Any number of actors run with classic_learner.py."""

import sys

import numpy as np

from memoire import ReplayMemoryClient

CELLS, START = 9, 4


def play(client: ReplayMemoryClient, table: np.ndarray, rng: np.random.Generator) -> None:
    """Play and record one episode in the corridor: epsilon-greedy, at most 40 steps."""
    memory = client.rem
    cell, state = START, np.array([START], np.int32)
    memory.new_episode()
    for _ in range(40):
        action = int(rng.integers(2)) if rng.random() < 0.2 else int(table[cell].argmax())
        after = cell + (1 if action else -1)
        reward = float(after == CELLS - 1)
        memory.add_entry(state, action, reward, 1.0, table[cell].max(), memory.info_buf, 1.0)
        cell, state = after, np.array([after], np.int32)
        if cell in (0, CELLS - 1):
            break
    memory.close_episode(final_state=state, terminated=cell in (0, CELLS - 1))


def main(port: int = 5570, seed: int = 0) -> None:
    """Play until the learner publishes a text instead of a table."""
    rng = np.random.default_rng(seed)
    endpoints = [f"tcp://127.0.0.1:{port + k}" for k in range(3)]
    with ReplayMemoryClient(*endpoints, timeout=20.0, seed=seed) as client:
        client.write_log("an actor begins")
        episodes, message = 0, client.sub_bytes("table", timeout=20.0)
        while isinstance(message, bytes):
            table = np.frombuffer(message).reshape(CELLS, 2)
            for _ in range(10):
                play(client, table, rng)
                client.update_counter()
                client.push_cache()
            episodes += 10
            message = client.sub_bytes("table", timeout=20.0)
    print(f"{episodes} episodes played")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
