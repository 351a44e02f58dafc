"""Does the engine keep up with plain NumPy copying the same bytes, in one process and one thread?"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
from measure import Report, Result, Side, arguments, distinct, race
from workloads import BATCH, EPISODE, NumpyGather, Workload, six_columns, w1, w2

from memoire import _core
from memoire.replay.batch import GatheredSamples
from memoire.replay.memory import Memory
from memoire.tables.caches.pool import Pool
from memoire.wire import _bytes, containers

MiB = 1 << 20
SLOTS = "column[row] = value for each column, a ring"
SLICES = "column[a:b] = values for each column, a ring"
GATHER = "NumPy fancy indexing of as many rows, row numbers given"
TAKE = "np.take of as many rows, out="

Sides = tuple[Side, Side]
Row = tuple[str, Callable[[], Sides], dict[str, Any]]


@cache
def filled(workload: Workload) -> Memory:
    """One memory and one baseline for all rows of a workload: 1 M entries take their time to write."""
    return workload.filled()


@cache
def gather_of(workload: Workload) -> NumpyGather:
    return NumpyGather(workload)


class Ring:
    """The least that storing an entry takes in Python: one assignment for each column."""

    def __init__(self, workload: Workload, entries: int) -> None:
        self.columns = [np.zeros((entries, *column.shape), column.dtype) for column in stored(workload)]
        self.entries = entries
        self.row = 0

    def add(self, values: tuple[np.ndarray, ...]) -> None:
        row = self.row
        for column, value in zip(self.columns, values, strict=True):
            column[row] = value
        self.row = (row + 1) % self.entries

    def extend(self, values: tuple[np.ndarray, ...]) -> None:
        begin = self.row if self.row + EPISODE <= self.entries else 0
        for column, block in zip(self.columns, values, strict=True):
            column[begin : begin + EPISODE] = block
        self.row = begin + EPISODE


def stored(workload: Workload) -> list[Any]:
    """The columns that a caller gives a value for: all but the computed return."""
    return [column for column in workload.schema.values() if column.role != "return"]


def adding(workload: Workload) -> Sides:
    """One call an entry; ours also closes an episode, weighs it and makes it drawable, every EPISODE entries."""
    entries = workload.ring
    memory = Memory(workload.schema, entries, workload.parameters, seed=0)
    memory.open(0)
    block = workload.episode(np.random.default_rng(0))
    steps = [tuple(column[step] for column in block) for step in range(EPISODE)]
    ring = Ring(workload, entries)

    def ours() -> None:
        memory.open(0)
        add = memory.add
        for values in steps:
            add(0, values)
        memory.close(0)

    def theirs() -> None:
        for values in steps:
            ring.add(values)

    return ours, theirs


def extending(workload: Workload) -> Sides:
    memory = Memory(workload.schema, workload.ring, workload.parameters, seed=0)
    block = workload.episode(np.random.default_rng(0))
    ring = Ring(workload, workload.ring)

    def ours() -> None:
        memory.open(0)
        memory.extend(0, block)
        memory.close(0)

    return ours, partial(ring.extend, block)


def drawing(workload: Workload) -> Sides:
    memory = filled(workload)

    def ours() -> object:
        return memory.sample(BATCH)

    return ours, gather_of(workload).fresh


def updating(workload: Workload) -> Sides:
    memory = filled(workload)
    random = np.random.default_rng(3)
    errors = [random.uniform(0.1, 2.0, BATCH).astype(np.float32) for _ in range(64)]
    numbers = [memory.draw(BATCH) for _ in range(64)]
    weights = np.zeros(memory.capacity)
    calls = iter_forever(list(zip(numbers, errors, strict=True)))

    def ours() -> None:
        memory.update_priorities(*next(calls))

    def theirs() -> None:
        ids, error = next(calls)
        weights[ids % len(weights)] = (np.abs(error) + 1e-6) ** 0.6

    return ours, theirs


def iter_forever(items: list[Any]) -> Iterator[Any]:
    while True:
        yield from items


def drawing_from_tree(leaves: int) -> Sides:
    tree, weights = tree_of(leaves)
    cumulative = np.cumsum(weights)
    random = np.random.default_rng(5)
    fractions = iter_forever([random.random(BATCH) for _ in range(64)])

    def ours() -> object:
        return tree.draw(next(fractions))

    def theirs() -> object:
        return np.searchsorted(cumulative, next(fractions) * cumulative[-1], side="right")

    return ours, theirs


def updating_tree(leaves: int) -> Sides:
    tree, weights = tree_of(leaves)
    random = np.random.default_rng(6)
    turns = [(random.integers(0, leaves, BATCH), random.uniform(0.1, 2.0, BATCH)) for _ in range(64)]
    calls = iter_forever(turns)

    def ours() -> None:
        tree.set(*next(calls))

    def theirs() -> None:
        rows, values = next(calls)
        weights[rows] = values

    return ours, theirs


def tree_of(leaves: int) -> tuple[Any, np.ndarray]:
    weights = np.random.default_rng(4).uniform(0.1, 2.0, leaves)
    tree = _core.PriorityTree(leaves)
    tree.set(np.arange(leaves), weights)
    return tree, weights


def building_caches(workload: Workload) -> Sides:
    memory = filled(workload)

    def ours() -> object:
        return containers.build(memory, BATCH, now=0.0)

    return ours, gather_of(workload).fresh


@cache
def received(workload: Workload) -> list[np.ndarray]:
    """Cache payloads as they come off the wire; more bytes than a processor's caches hold."""
    return [containers.build(filled(workload), BATCH, now=0.0) for _ in range(workload.held)]


def pool_of(workload: Workload, *, reuse: bool) -> Pool:
    """A pool that holds those caches, of four clients."""
    parameters = workload.parameters.replace(reuse_cache=reuse)
    pool = Pool(workload.schema, parameters, byte_limit=1 << 40, seed=0)
    for sequence, payload in enumerate(received(workload)):
        pool.add(bytes([sequence % 4 + 1]) * 16, sequence, containers.check(payload, pool.layout))
    return pool


class Drawn:
    """Batches of samples that are used once: the pool is filled anew before each turn, which is not timed."""

    def __init__(self, workload: Workload, out: GatheredSamples | None = None) -> None:
        self.workload = workload
        self.out = out
        self.most = workload.held
        """Batches until the pool is empty."""
        self.prepare()

    def prepare(self) -> None:
        self.pool = pool_of(self.workload, reuse=False)

    def __call__(self) -> object:
        return self.pool.get(BATCH, out=self.out)


def getting_batches(workload: Workload) -> Sides:
    return Drawn(workload), gather_of(workload).fresh


def getting_again(workload: Workload) -> Sides:
    """With reuse_cache: drawn with replacement from all that is held."""
    return partial(pool_of(workload, reuse=True).get, BATCH), gather_of(workload).fresh


def getting_over(workload: Workload) -> Sides:
    """Into the arrays of an earlier batch."""
    out = pool_of(workload, reuse=True).get(BATCH).gathered
    return Drawn(workload, out), gather_of(workload).over


def checking(workload: Workload) -> Sides:
    """What a server does with a cache when it came: every size, index and weight, and the checksum."""
    payload = received(workload)[0]
    pool = pool_of(workload, reuse=False)
    checksum = _bytes.checksum(payload)
    target = np.empty_like(payload)

    def ours() -> object:
        return containers.check(payload, pool.layout, checksum=checksum)

    return ours, partial(np.copyto, target, payload)


def summing(size: int) -> Sides:
    data = distinct(np.random.default_rng(0), (size,), "uint8")
    target = np.empty_like(data)
    return partial(_bytes.checksum, data), partial(np.copyto, target, data)


def rows(workloads: list[Workload], leaves: int) -> Iterator[Row]:
    """Every row of the table: its name, what makes its two sides, and how they are counted."""
    for workload in [*workloads, six_columns()]:
        settings = {"per_call": EPISODE, "baseline": SLOTS, "floor_rate": None if workload.name == "W2" else 1e6}
        yield f"add one entry, {workload.name}", partial(adding, workload), settings
    for workload in workloads:
        name = f"extend and close episodes of {EPISODE} entries, {workload.name}"
        yield name, partial(extending, workload), {"per_call": EPISODE, "baseline": SLICES}
    for workload in workloads:
        name = f"draw + gather {BATCH}, {workload.name}"
        settings = {"baseline": GATHER, "floor": 0.5, "aim": f"draw-{workload.name}-numpy"}
        yield name, partial(drawing, workload), settings
    for workload in workloads:
        name = f"get_batch of {BATCH} from held caches, {workload.name}"
        settings = {"baseline": GATHER, "floor": 0.5, "aim": f"batch-{workload.name}-numpy"}
        yield name, partial(getting_batches, workload), settings
        name = f"the same with out=, {workload.name}"
        yield name, partial(getting_over, workload), {"baseline": TAKE, "floor": 0.5}
        name = f"the same with reuse_cache, {workload.name}"
        yield name, partial(getting_again, workload), {"baseline": GATHER}
    for workload in workloads:
        name = f"build a cache of {BATCH}, {workload.name}"
        yield name, partial(building_caches, workload), {"baseline": GATHER}
    for workload in workloads:
        name = f"check a cache of {BATCH} that came in, {workload.name}"
        yield name, partial(checking, workload), {"baseline": "np.copyto of its bytes"}
    for workload in workloads:
        name = f"update {BATCH} priorities, {workload.name}"
        yield name, partial(updating, workload), {"baseline": "weights[rows] = abs(td) ** alpha, no tree"}
    name = f"draw {BATCH} from a tree of {leaves} leaves"
    yield name, partial(drawing_from_tree, leaves), {"baseline": "searchsorted over a ready cumulative sum"}
    name = f"update {BATCH} of {leaves} leaves"
    yield name, partial(updating_tree, leaves), {"baseline": "weights[rows] = values, no tree"}
    for size in (157_000, 14 * MiB):
        settings = {"unit": "B/s", "per_call": size, "baseline": "np.copyto of the same bytes"}
        yield f"checksum of {size} bytes", partial(summing, size), settings


def main() -> None:
    chosen = arguments(__doc__)
    workloads = [w1(20_000), w2(2_000)] if chosen.quick else [w1(), w2()]
    leaves = 100_000 if chosen.quick else 1_000_000
    pace: dict[str, Any] = {"rounds": 3, "seconds": 0.01} if chosen.quick else {"rounds": 15, "seconds": 0.05}
    report = Report(__doc__, [workload.described for workload in workloads])
    report.heading()
    for what, make, settings in rows(workloads, leaves):
        if chosen.only not in what:
            continue
        result: Result = race(what, *make(), **settings, **pace)
        report.add(result)
    report.finish(chosen.write, "core")


if __name__ == "__main__":
    main()
