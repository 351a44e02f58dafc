"""Caches beside plain NumPy that copies the same bytes, in one process and one thread.

learner.py measures the own memory of an actor and of a learner, beside NumPy and beside every peer.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from measure import Report, Side
from peers.tasks import BATCH, distinct
from workloads import NumpyRing, Workload, pool_of, received, w1, w2

from memoire.wire import _bytes, containers

GATHER = "NumPy fancy indexing of as many rows, row numbers given"
TAKE = "np.take of as many rows, out="
COPY = "np.copyto of its bytes"


def ring_of(workload: Workload) -> NumpyRing:
    parameters, values = workload.parameters, workload.episode(np.random.default_rng(1))
    return NumpyRing(values, workload.entries, parameters.frame_stack, parameters.multi_step)


class Drawn:
    """Side that draws batches of samples that are used once. Refilling the pool before each turn is not timed."""

    def __init__(self, workload: Workload, out: dict[str, np.ndarray] | None = None) -> None:
        self.workload = workload
        self.out = out
        self.most = workload.held
        """Number of batches until the pool is empty."""

    def prepare(self) -> None:
        self.pool = pool_of(self.workload, reuse=False)

    def __call__(self) -> object:
        return self.pool.get(BATCH, out=self.out)


def copying(data: np.ndarray) -> Side:
    return partial(np.copyto, np.empty_like(data), data)


def out_of(workload: Workload) -> dict[str, np.ndarray]:
    """Return the arrays of a batch, in the form of the argument `out`."""
    batch = pool_of(workload, reuse=True).get(BATCH).gathered
    states = workload.schema.states
    sides = (("", batch.prev), ("next_", batch.next))
    rows = {before + name: (name, array) for before, side in sides for name, array in side.items() if name != "reward"}
    return {key: batch.unstacked(array) if name in states else array for key, (name, array) in rows.items()}


def of_workload(workload: Workload) -> Iterator[tuple[str, Side, str]]:
    """Yield a row for each operation on caches: its name, memoire's side, and the baseline."""
    yield "get_batch of 256 from held caches", Drawn(workload), GATHER
    yield "the same with out=", Drawn(workload, out_of(workload)), TAKE
    yield "the same with reuse_cache", partial(pool_of(workload, reuse=True).get, BATCH), GATHER
    yield "build a cache of 256", partial(containers.build, workload.filled(), BATCH, now=0.0), GATHER
    payload, layout = received(workload)[0], pool_of(workload, reuse=False).layout
    check = partial(containers.check, payload, layout, checksum=_bytes.checksum(payload))
    yield "check a cache of 256 that came in", check, COPY


def main() -> None:
    report = Report.begin(__doc__)
    workloads = [w1(20_000), w2(2_000)] if report.quick else [w1(), w2()]
    report.facts += [workload.described for workload in workloads]
    pace: dict[str, Any] = {"rounds": 3, "seconds": 0.01} if report.quick else {"rounds": 15, "seconds": 0.05}
    for each in workloads:
        ring, payload = ring_of(each), received(each)[0]
        sides = {GATHER: ring.gather, TAKE: ring.over, COPY: copying(payload)}
        for what, ours, baseline in of_workload(each):
            if report.wants(f"{what}, {each.name}"):
                aims = {GATHER: f"batch-{each.name}-numpy"} if what.startswith("get_batch") else {}
                report.compare(f"{what}, {each.name}", ours, {baseline: sides[baseline]}, aims=aims, **pace)
    for size in (157_000, 14 << 20):
        if report.wants(f"checksum of {size} bytes"):
            data = distinct(np.random.default_rng(0), (size,), "uint8")
            ours, theirs = partial(_bytes.checksum, data), {COPY: copying(data)}
            report.compare(f"checksum of {size} bytes", ours, theirs, unit="B/s", per_call=size, **pace)
    report.finish("core")


if __name__ == "__main__":
    main()
