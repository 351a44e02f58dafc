"""Learner with the classic server: draws batches, publishes a table of action values to classic_actor.py over TCP."""

import sys
import threading

import numpy as np

from memoire import ReplayMemoryServer

CELLS = 9


def main(port: int = 5570) -> None:
    """Learn until right is best everywhere; publish the table after every eighth batch, and a text at the end."""
    scalar = np.zeros((), np.float32)
    templates = (np.zeros(1, np.int32), np.zeros((), np.int64), scalar, scalar, scalar, scalar, np.zeros(0, np.uint8))
    with ReplayMemoryServer(*templates, 2000, f"tcp://127.0.0.1:{port}", 50) as server:
        server.rem.cache_size = 64
        server.rem.multi_step = 3
        server.rem.discount_factor = 0.9
        loops = [
            (server.rep_proxy_main, (f"tcp://127.0.0.1:{port + 1}", "inproc://requests")),
            (server.pull_proxy_main, (f"tcp://127.0.0.1:{port + 2}", "inproc://caches")),
            (server.rep_worker_main, ("inproc://requests", "Conn")),
            (server.pull_worker_main, ("inproc://caches", "Conn")),
        ]
        threads = [threading.Thread(target=loop, args=arguments) for loop, arguments in loops]
        for each in threads:
            each.start()

        table = np.array([[0.0] * 2, *[[0.5] * 2] * (CELLS - 2), [0.0] * 2])  # the ends give no more rewards
        server.pub_bytes("table", table.tobytes())
        for step in range(3000):
            prev, following, _ = batch = server.get_batch(64, timeout=30.0)
            cells, target_cells = prev.state[:, 0, 0], following.state[:, -1, 0]
            targets = batch.reward + batch.discount * table[target_cells].max(axis=1)
            for *place, target, weight in zip(cells, prev.action, targets, batch.importance, strict=True):
                table[*place] += 0.1 * weight * (target - table[*place])
            if step % 8 == 7:
                server.pub_bytes("table", table.tobytes())
            if learned := step >= 300 and bool(table[1:-1].argmax(axis=1).all()):
                break
        server.pub_bytes("table", "the run is over")
        print(f"{server.total_episodes} episodes, {server.total_steps} steps, {server.total_caches} caches")
        print("right of everywhere" if learned else "not learned yet", flush=True)
        wait_for_actors(server)
    for each in threads:
        each.join()


def wait_for_actors(server: ReplayMemoryServer) -> None:
    """Wait until no cache arrives for half a second, so that all actors have received the end of the run."""
    pause, seen = threading.Event(), -1
    while server.total_caches != seen:
        seen = server.total_caches
        pause.wait(0.5)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
