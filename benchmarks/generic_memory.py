"""How fast is a batch out of a `GenericMemory`, beside a memory that builds and collates each transition?"""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from measure import Report, arguments, contest

from memoire.rl.codec import ActionHistory, Codec
from memoire.tmrl.memory import GenericMemory
from memoire.tmrl.memory_dataloading import MemoryDataloading

SAMPLES, EPISODE, ACTIONS, BATCH = 100_000, 100, 4, 256
FACTS = f"""Both hold the same {SAMPLES} samples of a drone: four numbers and the last {ACTIONS} actions of two numbers,
which are left out on the way and rebuilt. Batches have {BATCH} samples, as arrays of NumPy. *Item by item* is the
memory of TMRL's tutorial: lists of parts, `get_transition` for each item, then one array of each part."""


class ItemByItem(MemoryDataloading):
    def append_buffer(self, buffer: Any) -> None:
        rows = [(b[0], *b[1], b[2], b[3], b[4]) for b in buffer.memory]
        columns = [list(column) for column in zip(*rows, strict=True)]
        self.data = self.data or [[] for _ in columns]
        for old, new in zip(self.data, columns, strict=True):
            old += new

    def __len__(self) -> int:
        return max(0, len(self.data[0]) - ACTIONS - 1) if self.data else 0

    def get_transition(self, item: int) -> Any:
        last, now = item + ACTIONS - 1, item + ACTIONS
        actions = self.data[0][item : item + ACTIONS + 1]
        last_obs = (*(self.data[part][last] for part in range(1, 5)), *actions[:-1])
        new_obs = (*(self.data[part][now] for part in range(1, 5)), *actions[1:])
        return last_obs, self.data[0][now], np.float32(self.data[5][now]), new_obs, self.data[6][now], self.data[7][now]


def buffers() -> Iterator[Any]:
    values = np.random.default_rng(0)
    for _ in range(SAMPLES // EPISODE):
        acts = values.random((EPISODE, 2), np.float32)
        obs = values.random((EPISODE, 4, 1), np.float32)
        yield SimpleNamespace(memory=[(acts[i], tuple(obs[i]), 0.5, i == EPISODE - 1, {}) for i in range(EPISODE)])


def main() -> None:
    chosen = arguments(__doc__)
    report = Report(__doc__, [FACTS])
    report.heading()
    random.seed(0)
    codec = Codec(history=ActionHistory(ACTIONS))
    theirs = ItemByItem(device=None, nb_steps=1, batch_size=BATCH)
    ours = GenericMemory(batch_size=BATCH, memory_size=SAMPLES, codec=codec)
    for buffer in buffers():
        ours.append(buffer)
        theirs.append(buffer)
    rounds, name = 5 if chosen.quick else 15, "item by item"
    aims = {name: "generic-memory"}
    report.add(
        *contest(f"batches of {BATCH}", ours.sample, {name: theirs.sample}, unit=" batches/s", rounds=rounds, aims=aims)
    )
    report.finish(chosen.write, "generic_memory")


if __name__ == "__main__":
    main()
