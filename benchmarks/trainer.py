"""Costs of a trainer's samples in its memory and in its checkpoints, beside the storage of TMRL."""

import pickle
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from measure import Report, Result, Spread, resident

from memoire.rl.codec import ActionHistory, Codec
from memoire.rl.memory import GenericMemory
from memoire.rl.samples import SampleJournal
from memoire.tmrl.memory import GenericMemory as TmrlMemory
from memoire.tmrl.memory_dataloading import MemoryDataloading

SAMPLES, EPISODE, ACTIONS, BATCH = 100_000, 100, 4, 256
DATA = 8 + 16 + 4 + 1
"""Bytes of a sample: action, observation, reward, done."""
BOUND = 60.0
"""Seconds within which a trainer has to resume."""
FACTS = f"""Samples are a drone's: four numbers, an action of two, a reward, and whether the episode is over.

*Batches* come out of two memories with the same {SAMPLES} samples, each with the last {ACTIONS} actions,
which are not sent but rebuilt. Batches have {BATCH} samples, as arrays of NumPy. *Item by item* is the
memory of TMRL's tutorial: lists of parts, `get_transition` for each item, then one array of each part.

In a *checkpoint*, one sample in a hundred is new. The baseline pickles the lists of parts that the memory of
TMRL's tutorial keeps, as TMRL's checkpoints do. *Data* are the arrays of all samples, without anything beside them. A
trainer resumes when its memory has all samples again, by its own `append`; its peak is compared with the final size of
that memory."""


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


def buffers(count: int, values: np.random.Generator) -> Iterator[Any]:
    """Yield so many samples as the buffers that workers send."""
    for _ in range(count // EPISODE):
        acts, obs = values.random((EPISODE, 2), np.float32), values.random((EPISODE, 4, 1), np.float32)
        rewards = values.random(EPISODE, np.float32)
        rows = [(acts[i], tuple(obs[i]), rewards[i], i == EPISODE - 1, {}) for i in range(EPISODE)]
        yield SimpleNamespace(memory=rows)


def item_by_item(count: int) -> tuple[ItemByItem, list[Any]]:
    """Return the memory of the tutorial with so many samples, and the buffers of these samples."""
    memory, rows = ItemByItem(device=None, nb_steps=1, batch_size=BATCH), list(buffers(count, np.random.default_rng(0)))
    for buffer in rows:
        memory.append(buffer)
    return memory, rows


def row(what: str, unit: str, ours: float, theirs: float, baseline: str, aim: str, *, share: bool = False) -> Result:
    """Return the row of one measurement: the ratio of the baseline to memoire, or memoire's share of the baseline."""
    ratio = ours / theirs if share else theirs / ours
    return Result(what, unit, *map(Spread.one, (ours, theirs, ratio)), baseline, aim)


def checkpoints(samples: int, folder: str) -> Iterator[Result]:
    values, held = np.random.default_rng(0), f"{samples} samples held"
    journal, sizes = SampleJournal(folder, samples), []
    for count in (samples, samples // 100):
        for buffer in buffers(count, values):
            journal.keep(buffer)
        journal.commit()
        sizes.append(journal.size)
    del journal
    began, base = time.perf_counter(), resident("self")
    memory = GenericMemory(samples)
    for kept in SampleJournal(folder, samples).buffers():
        memory.append(kept.memory)
    seconds, grown = time.perf_counter() - began, resident("self") - base
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - base
    before, on_disk = sizes
    pickled = 10 * len(pickle.dumps(item_by_item(samples // 10)[0].data))  # measured with a tenth of the samples
    what, disk = f"bytes of a checkpoint, {held}, 1 % new", f"bytes on disk, {held}: their share"
    yield row(what, "B", on_disk - before, pickled, "pickling all", "checkpoint-written")
    yield row(disk, "B", on_disk, DATA * samples, "the data", "checkpoint-disk", share=True)
    yield row(f"seconds until a trainer goes on, {held}", "s", seconds, BOUND, "a minute", "checkpoint-seconds")
    what = f"peak of memory meanwhile, {held}: its share"
    yield row(what, "B", peak, grown, "held then", "checkpoint-memory", share=True)


def main() -> None:
    report = Report.begin(__doc__, FACTS, better="better")
    if report.wants("checkpoint"):  # first: a peak is that of the process' whole life
        with tempfile.TemporaryDirectory() as folder:
            report.add(*checkpoints(50_000 if report.quick else 1_000_000, folder))
    if report.wants(f"batches of {BATCH}"):
        random.seed(0)
        theirs, packets = item_by_item(SAMPLES)
        ours = TmrlMemory(batch_size=BATCH, memory_size=SAMPLES, codec=Codec(history=ActionHistory(ACTIONS)))
        for buffer in packets:
            ours.append(buffer)
        rounds, aims = 5 if report.quick else 15, {"item by item": "generic-memory"}
        sides = ours.sample, {"item by item": theirs.sample}
        report.compare(f"batches of {BATCH}", *sides, unit=" batches/s", rounds=rounds, aims=aims)
    report.finish("trainer")


if __name__ == "__main__":
    main()
