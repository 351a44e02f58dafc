"""Several clients in the threads of one process, each with its machine's address as input_uuid, for the log."""

import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

from memoire import ReplayMemoryClient, ReplayMemoryServer

ACTORS, EPISODES, LENGTH = 4, 25, 40


def act(sub: str, req: str, push: str, address: str) -> None:
    """Run one actor of the machine `address`: play, count steps, push caches, and log a line at the end."""
    rng = np.random.default_rng()
    with ReplayMemoryClient(sub, req, push, input_uuid=address) as client:
        memory = client.rem
        for _ in range(EPISODES):
            memory.new_episode()
            for t in range(LENGTH):
                state = rng.normal(size=8).astype(np.float32)
                memory.add_entry(state, t % 2, rng.normal(), 0.5, 0.0, np.array([t], np.int32), 1.0)
            memory.close_episode()
            client.update_counter()
            client.push_cache()
        client.write_log(f"played {EPISODES} episodes")


def main(port: int = 5580) -> None:
    """Run a server whose workers bind their own ports and four actors in threads; print the actors' log."""
    scalar = np.zeros((), np.float32)
    templates = (np.zeros(8, np.float32), np.zeros((), np.int64), scalar, scalar, scalar, scalar, np.zeros(1, np.int32))
    sub, req, push = (f"tcp://127.0.0.1:{port + k}" for k in range(3))
    with tempfile.TemporaryDirectory() as folder, ReplayMemoryServer(*templates, 2000, sub, 200) as server:
        server.rem.cache_size = 32
        logfile = Path(folder, "actors.log")
        server.set_logfile(str(logfile), "w")
        loops = [
            threading.Thread(target=server.rep_worker_main, args=(req, "Bind")),
            threading.Thread(target=server.pull_worker_main, args=(push, "Bind")),
        ]
        actors = [threading.Thread(target=act, args=(sub, req, push, f"10.0.0.{k + 1}")) for k in range(ACTORS)]
        for each in loops + actors:
            each.start()
        prev, _, weight = server.get_batch(256, timeout=20.0)
        print(f"a batch of states {prev.state.shape}, weights {weight.min():.2f} to {weight.max():.2f}")
        for each in actors:
            each.join()
        print(f"{server.total_episodes} episodes, {server.total_steps} steps, {server.total_caches} caches")
        server.close()  # ends the loops and completes the log
        for each in loops:
            each.join()
        print(logfile.read_text(), end="")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
