"""Do caches keep up with plain NumPy copying the same bytes, in one process and one thread?

What an actor's and a learner's own memory do is in learner.py, beside NumPy and beside every peer.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
from measure import Report, Side, arguments, race
from peers.tasks import BATCH, distinct
from workloads import NumpyGather, Workload, pool_of, received, w1, w2

from memoire.wire import _bytes, containers

GATHER = "NumPy fancy indexing of as many rows, row numbers given"
TAKE = "np.take of as many rows, out="

Sides = tuple[Side, Side]
Row = tuple[str, Callable[[], Sides], dict[str, Any]]


@cache
def gather_of(workload: Workload) -> NumpyGather:
    """One baseline for all rows of a workload: 1 M entries take their time to write."""
    return NumpyGather(workload)


def building_caches(workload: Workload) -> Sides:
    memory = workload.filled()

    def ours() -> object:
        return containers.build(memory, BATCH, now=0.0)

    return ours, gather_of(workload).fresh


class Drawn:
    """Batches of samples that are used once: the pool is filled again before each turn, which is not timed."""

    def __init__(self, workload: Workload, out: dict[str, np.ndarray] | None = None) -> None:
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
    made = pool_of(workload, reuse=True).get(BATCH).gathered
    states = workload.schema.states
    sides = (("", made.prev), ("next_", made.next))
    rows = {before + name: (name, array) for before, side in sides for name, array in side.items() if name != "reward"}
    out = {key: made.unstacked(array) if name in states else array for key, (name, array) in rows.items()}
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


def rows(workloads: list[Workload]) -> Iterator[Row]:
    """Every row of the table: its name, what makes its two sides, and how they are counted."""
    for workload in workloads:
        name = f"get_batch of {BATCH} from held caches, {workload.name}"
        settings: dict[str, Any] = {"baseline": GATHER, "floor": 0.5, "aim": f"batch-{workload.name}-numpy"}
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
    for size in (157_000, 14 << 20):
        settings = {"unit": "B/s", "per_call": size, "baseline": "np.copyto of the same bytes"}
        yield f"checksum of {size} bytes", partial(summing, size), settings


def main() -> None:
    chosen = arguments(__doc__)
    workloads = [w1(20_000), w2(2_000)] if chosen.quick else [w1(), w2()]
    pace: dict[str, Any] = {"rounds": 3, "seconds": 0.01} if chosen.quick else {"rounds": 15, "seconds": 0.05}
    report = Report(__doc__, [workload.described for workload in workloads])
    report.heading()
    for what, make, settings in rows(workloads):
        if chosen.only in what:
            report.add(race(what, *make(), **settings, **pace))
    report.finish(chosen.write, "core")


if __name__ == "__main__":
    main()
