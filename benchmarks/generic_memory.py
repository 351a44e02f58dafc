"""How fast is a batch out of a GenericMemory, beside a memory that builds and collates each transition?

    .venv/bin/python benchmarks/generic_memory.py

Both hold the same samples of a drone: four numbers and the last four actions of two numbers, which are left out on the
way and rebuilt. The baseline has the memory of TMRL's tutorial: lists of parts, `get_transition` for each item,
then one array of each part. Exit status 1 if the ratio is below the aim.
"""

import random
import statistics
import sys
import time
from types import SimpleNamespace

import numpy as np

from memoire.rl.codec import ActionHistory, Codec
from memoire.tmrl.memory import GenericMemory
from memoire.tmrl.memory_dataloading import MemoryDataloading

SAMPLES, EPISODE, ACTIONS, BATCH, REPEATS, AIM = 100_000, 100, 4, 256, 7, 20.0


class ItemByItem(MemoryDataloading):
    def append_buffer(self, buffer):
        rows = [(b[0], *b[1], b[2], b[3], b[4]) for b in buffer.memory]
        columns = [list(column) for column in zip(*rows, strict=True)]
        self.data = self.data or [[] for _ in columns]
        for old, new in zip(self.data, columns, strict=True):
            old += new

    def __len__(self):
        return max(0, len(self.data[0]) - ACTIONS - 1) if self.data else 0

    def get_transition(self, item):
        last, now = item + ACTIONS - 1, item + ACTIONS
        actions = self.data[0][item : item + ACTIONS + 1]
        last_obs = (*(self.data[part][last] for part in range(1, 5)), *actions[:-1])
        new_obs = (*(self.data[part][now] for part in range(1, 5)), *actions[1:])
        return last_obs, self.data[0][now], np.float32(self.data[5][now]), new_obs, self.data[6][now], self.data[7][now]


def buffers():
    values = np.random.default_rng(0)
    for _ in range(SAMPLES // EPISODE):
        acts = values.random((EPISODE, 2), np.float32)
        obs = values.random((EPISODE, 4, 1), np.float32)
        yield SimpleNamespace(memory=[(acts[i], tuple(obs[i]), 0.5, i == EPISODE - 1, {}) for i in range(EPISODE)])


def seconds_of(memory, batches):
    memory.sample()
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(batches):
            memory.sample()
        found.append((time.perf_counter() - began) / batches)
    return statistics.median(found), min(found), max(found)


def main():
    random.seed(0)
    codec = Codec(history=ActionHistory(ACTIONS))
    memories = {
        "item by item": ItemByItem(device=None, nb_steps=1, batch_size=BATCH),
        "GenericMemory": GenericMemory(batch_size=BATCH, memory_size=SAMPLES, codec=codec),
    }  # fmt: skip
    for buffer in buffers():
        for memory in memories.values():
            memory.append(buffer)
    print(f"{SAMPLES} samples, batches of {BATCH}, arrays of NumPy, one thread; median of {REPEATS} (least to most)")
    medians = {}
    for name, memory in memories.items():
        median, least, most = seconds_of(memory, 20 if name == "item by item" else 400)
        medians[name] = median
        print(f"{name:15} {1e6 * median:9.1f} us a batch ({1e6 * least:.1f} to {1e6 * most:.1f})")
    ratio = medians["item by item"] / medians["GenericMemory"]
    print(f"ratio {ratio:.1f}; aim {AIM:g}")
    return ratio < AIM


if __name__ == "__main__":
    sys.exit(main())
