"""What does a trainer's checkpoint write, beside pickling all of a memory; and how long does it take to go on?"""

import pickle
import resource
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from measure import Report, Result, Spread, arguments, resident

from memoire.rl.memory import GenericMemory
from memoire.rl.samples import SampleJournal

EPISODE = 100
DATA = 8 + 16 + 4 + 1
"""Bytes of a sample: act, obs, rew, done."""
BOUND = 60.0
"""Seconds within which a trainer has to go on."""
FACTS = """A memory holds samples of a drone, of which one in a hundred is new. The baseline pickles the lists of parts
that the memory of TMRL's tutorial keeps, as TMRL's checkpoints do. *Data* are the arrays of all samples, without
anything beside them. A trainer goes on when its memory has all samples again, by its own `append`; its peak is beside
what that memory takes then."""


def buffers(count: int, values: np.random.Generator) -> Iterator[Any]:
    for _ in range(count // EPISODE):
        acts, obs = values.random((EPISODE, 2), np.float32), values.random((EPISODE, 4, 1), np.float32)
        rewards = values.random(EPISODE, np.float32)
        rows = [(acts[i], tuple(obs[i]), rewards[i], i == EPISODE - 1, {}) for i in range(EPISODE)]
        yield SimpleNamespace(memory=rows)


def pickled_bytes(samples: int) -> int:
    """Bytes of the lists of the tutorial's memory, counted for a tenth of them."""
    columns: list[list[Any]] = [[] for _ in range(8)]
    for buffer in buffers(samples // 10, np.random.default_rng(0)):
        for act, obs, rew, done, info in buffer.memory:
            for column, value in zip(columns, (act, *obs, rew, done, info), strict=True):
                column.append(value)
    return 10 * len(pickle.dumps(columns))


def row(what: str, unit: str, ours: float, theirs: float, baseline: str, aim: str, *, share: bool = False) -> Result:
    """A row of one measurement: how many times as much the baseline is, or which share of it memoire takes."""
    ratio = ours / theirs if share else theirs / ours
    return Result(what, unit, *map(Spread.one, (ours, theirs, ratio)), baseline, aim=aim)


def measured(samples: int, folder: str) -> Iterator[Result]:
    values, held = np.random.default_rng(0), f"{samples} samples held"
    journal = SampleJournal(folder, samples)
    for buffer in buffers(samples, values):
        journal.keep(buffer)
    journal.commit()
    before = journal.size
    for buffer in buffers(samples // 100, values):
        journal.keep(buffer)
    journal.commit()
    written, on_disk = journal.size - before, journal.size
    del journal
    began, base = time.perf_counter(), resident("self", ["VmRSS"])
    memory = GenericMemory(samples)
    for kept in SampleJournal(folder, samples).buffers():
        memory.append(kept.memory)
    seconds, grown = time.perf_counter() - began, resident("self", ["VmRSS"]) - base
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - base
    everything = pickled_bytes(samples)
    yield row(f"bytes of a checkpoint, {held}, 1 % new", "B", written, everything, "pickling all", "checkpoint-written")
    yield row(
        f"bytes on disk, {held}: their share", "B", on_disk, DATA * samples, "the data", "checkpoint-disk", share=True
    )
    yield row(f"seconds until a trainer goes on, {held}", "s", seconds, BOUND, "a minute", "checkpoint-seconds")
    yield row(
        f"peak of memory meanwhile, {held}: its share", "B", peak, grown, "held then", "checkpoint-memory", share=True
    )


def main() -> None:
    chosen = arguments(__doc__)
    report = Report(__doc__, [FACTS], better="smaller")
    report.heading()
    with tempfile.TemporaryDirectory() as folder:
        report.add(*measured(50_000 if chosen.quick else 1_000_000, folder))
    report.finish(chosen.write, "checkpoint")


if __name__ == "__main__":
    main()
