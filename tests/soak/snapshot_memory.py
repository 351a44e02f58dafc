"""How much memory does it take to save and restore what a server holds, and a buffer, of 1 GiB?

Each in a process of its own; its resident memory is looked at a hundred times a second while it works. A server is
saved while caches come in and batches are drawn, so that most of what it held is overwritten meanwhile. What was restored
is counted, and is what is in the memory at the end; the growth beyond that is what it took.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from _kit import end, folder, memory, say, table

MIB = 1 << 20
MOST = 64
"""MiB that saving or restoring may take beside what is held."""


class Watched:
    """The greatest growth of this process' memory meanwhile, in MiB, and the seconds that it took."""

    def __enter__(self):
        self._done, self.before = threading.Event(), memory()
        self.peak, self._began = 0, time.monotonic()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self):
        while not self._done.wait(0.01):
            self.peak = max(self.peak, memory())

    def __exit__(self, *_):
        self.seconds = time.monotonic() - self._began
        self._done.set()
        self._thread.join()
        self.growth = (max(self.peak, memory()) - self.before) / MIB
        self.stays = (memory() - self.before) / MIB


def frames():
    import numpy as np

    from memoire.replay.columns import Column
    from memoire.replay.schema import Schema

    return Schema({"obs": Column(np.uint8, (84, 84), "state"), "reward": Column(np.float32, (), "reward")})


def caches_of(schema, size):
    """Caches with contents of their own, of about 1 MiB each."""
    import containers
    from memoire.replay.parameters import Parameters
    from memoire.wire.layout import layout_of

    layout = layout_of(schema, Parameters())
    return [containers.make(layout, 70, seed=number) for number in range(size)]


def server_of(schema, mib):
    from memoire import Server
    from memoire.limits import Limits

    return Server(None, schema, limits=Limits(held_bytes=mib * MIB))


def save_caches(path, mib):
    import numpy as np

    from memoire.wire import containers as unpack

    schema = frames()
    made = caches_of(schema, 64)
    with server_of(schema, mib) as server:
        pool = server._tables.first.pool
        done = threading.Event()

        def push(number):  # a payload of its own each, as from the network
            payload = np.array(made[number % len(made)].payload)
            payload[48:56] = np.array([1e9 + number]).view(np.uint8)  # made at another time
            held = unpack.check(payload, pool.layout)
            return pool.add((number % 50).to_bytes(16, "little"), number, held)

        number = 0
        while not push(number):
            number += 1
        pushed = SimpleNamespace(caches=0)

        def load():
            while not done.is_set():
                push(number + pushed.caches)
                pushed.caches += 1
                if pushed.caches % 8 == 0:
                    server.get_batch(64)

        held = server.stats().held_bytes
        thread = threading.Thread(target=load)
        thread.start()
        while pushed.caches < 2 * number:  # until the load takes no more memory than it will
            time.sleep(0.05)
        before = pushed.caches
        with Watched() as watched:
            told = server.snapshot(path)
        meanwhile = pushed.caches - before
        done.set()
        thread.join()
        return {"held": held / MIB, "growth": watched.growth, "seconds": watched.seconds, "items": told.caches,
                "bytes": told.bytes / MIB, "meanwhile": meanwhile}  # fmt: skip


def restore_caches(path, mib):
    with server_of(frames(), 2 * mib) as server:
        with Watched() as watched:
            done = server.restore([path])
        held = server.stats().held_bytes / MIB
        return {"held": held, "growth": watched.growth - held, "seconds": watched.seconds, "items": done.caches}


def fill_up(memory):
    import numpy as np

    from memories import with_episode

    rng = np.random.default_rng(1)
    frame = rng.integers(0, 255, (200, 84, 84), np.uint8)
    while memory.num_entries + 200 <= memory.capacity:
        with_episode(memory, [frame, np.ones(200, np.float32)], terminated=True)


def tables(mib):
    import memoire

    capacity = mib * MIB // (84 * 84 + 4)
    return {"whole": memoire.Table(frames(), storage="episodes", capacity=capacity, byte_limit=2 * mib * MIB)}


def save_episodes(path, mib):
    from memoire import Server

    with Server(None, tables=tables(mib)) as server:
        pool = server._tables.first.pool
        fill_up(pool.memory)
        with Watched() as watched:
            told = server.snapshot(path)
        held = pool.memory.num_entries * (84 * 84 + 4) / MIB
        return {"held": held, "growth": watched.growth, "seconds": watched.seconds, "items": told.episodes,
                "bytes": told.bytes / MIB}  # fmt: skip


def restore_episodes(path, mib):
    import gc

    from memoire import Server

    with Server(None, tables=tables(mib)) as server:
        gc.collect()
        with Watched() as watched:
            done = server.restore([path])
        held = done.entries * (84 * 84 + 4) / MIB
        return {"held": held, "growth": watched.growth - held, "seconds": watched.seconds, "items": done.episodes}


def save_buffer(path, mib):
    from memoire import Buffer

    buffer = Buffer(frames(), mib * MIB // (84 * 84 + 4))
    fill_up(buffer.memory)
    with Watched() as watched:
        items = buffer.save(path)
    return {"held": len(buffer) * (84 * 84 + 4) / MIB, "growth": watched.growth, "seconds": watched.seconds,
            "items": items, "bytes": Path(path).stat().st_size / MIB}  # fmt: skip


def load_buffer(path, mib):
    from memoire import Buffer

    with Watched() as watched:
        buffer = Buffer.load(path)
    held = len(buffer) * (84 * 84 + 4) / MIB
    return {"held": held, "growth": watched.growth - held, "seconds": watched.seconds, "items": buffer.num_episodes}


WORK = {
    work.__name__: work
    for work in (save_caches, restore_caches, save_episodes, restore_episodes, save_buffer, load_buffer)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="what is held")
    parser.add_argument("--do", nargs=2, help="in a child: what, and with which file")
    given = parser.parse_args()
    if given.do:
        print(json.dumps(WORK[given.do[0]](given.do[1], given.mib)))
        return 0
    rows, violations = [], []
    with folder() as place:
        for number, name in enumerate(WORK):
            file = place / f"{number // 2}"
            command = [sys.executable, __file__, "--mib", str(given.mib), "--do", name, str(file)]
            said = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            say(name, said)
            words = name.replace("_", " ") + (f", {said['meanwhile']} came meanwhile" if "meanwhile" in said else "")
            cells = (said["items"], f"{said['held']:.0f}", f"{said['growth']:.1f}", f"{said['seconds']:.1f}")
            rows.append((words, *cells))
            if said["growth"] > MOST:
                violations.append(f"{name} took {said['growth']:.0f} MiB beside what is held, {MOST} are allowed")
    print(table(["", "caches or episodes", "held, MiB", "growth beside it, MiB", "seconds"], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
