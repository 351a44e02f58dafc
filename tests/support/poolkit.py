"""Helpers for tests of pools: a schema, a clock that stands still, and clients' ids."""

import functools
from typing import Any

import numpy as np

import containerkit
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables.caches.pool import Pool
from memoire.tables.draws import build_batch, plan
from memoire.wire import containers
from memoire.wire.containers import ContainerHead
from memoire.wire.layout import layout_of
from memoire.wire.parts import ContainerKind, Part
from memoire.wire.rows import CLIENT_COUNTS

SCHEMA = Schema({"obs": (np.float32, (3,)), "action": np.int32, "reward": np.float32})
PLAIN = Parameters(importance_exponent=1.0)


class Clock:
    """Clock that shows `now` until a test changes it."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def name(i: int) -> bytes:
    """Return the id of client i."""
    return i.to_bytes(16, "little")


def made(samples=8, first=0, *, weight=1.0, action=None, ages=None, models=None, parameters=PLAIN, seed=0, **sums):
    """Return a checked cache of samples numbered from `first`, from a memory with these sums."""
    replace = {Part.NUMBER: np.arange(first, first + samples), Part.WEIGHT: np.broadcast_to(weight, samples)}
    replace |= {part: array for part, array in ((Part.AGE, ages), (Part.MODEL, models)) if array is not None}
    layout = layout_of(SCHEMA, parameters)
    sums = {"total": 100.0, "positives": 50, "minimum": 0.5} | sums
    head = ContainerHead(parameters.multi_step, *sums.values())
    container = containerkit.make(layout, samples, seed=seed, head=head, replace=replace)
    if action is not None:
        place = layout.block_number(Part.PREV, "action")
        row = containers.table(container.payload)[place]
        container.payload[row.offset : row.offset + row.stored] = np.asarray(action, "<i4").view(np.uint8)
    return container.held()


cache_of = functools.partial(made, total=10.0)


def held(ages: Any, models: Any, parameters: Parameters, **more: Any) -> Any:
    return made(len(ages), ages=ages, models=models, parameters=parameters, **more)


def pool_of(unused: list[int], parameters: Parameters = PLAIN, **options: Any) -> Pool:
    """Return a pool in which client i holds `unused[i]` samples, in numbered caches of at most 5."""
    pool = Pool(SCHEMA, parameters, seed=1, **options)
    for i, count in enumerate(unused):
        for first in range(0, count, 5):
            held = made(min(5, count - first), first=first, total=10.0 * (i + 1), parameters=parameters)
            pool.add(name(i), first, held)
    return pool


def counts_of(wanted: dict[bytes, int]) -> Any:
    """Return the request of a reader: a row (client, count) for each client."""
    rows = np.zeros(len(wanted), CLIENT_COUNTS)
    for row, (client, count) in zip(rows, wanted.items(), strict=True):
        row["client"], row["count"] = np.frombuffer(client, "<u8"), count
    return rows


def held_of(pool: Pool) -> list[Any]:
    """Return the samples that a pool of caches holds, client by client."""
    return list(pool.held)


def far_away(pool: Any, samples: int, *, beta: float = 0.4, compression: str = "none") -> tuple[Any, Any]:
    """Draw a batch from one server's pool as a remote reader does; return the batch and the bytes that crossed."""
    chosen = plan([pool.reserve(b"r" * 16, samples)], samples, 0.5)
    assert chosen is not None
    layout = layout_of(pool.schema, pool.parameters, ContainerKind.DRAWN)
    payload = pool.draw_counts(b"r" * 16, chosen.counts[0], now=1.0, compression=compression)
    held = containers.check(payload, layout)
    return build_batch(chosen, [held], layout, pool.parameters, seed=3, beta=beta), payload


def assert_same_samples(one: Any, other: Any) -> None:
    """Assert that samples gathered in two ways have the same columns, lengths and facts."""
    for side in ("prev", "next", "prev_lengths", "next_lengths"):
        left, right = getattr(one, side), getattr(other, side)
        assert sorted(left) == sorted(right)
        for name, array in left.items():
            assert array.dtype == right[name].dtype
            np.testing.assert_array_equal(array, right[name], err_msg=f"{side} {name}")
    for name in ("reward", "discount", "steps", "weight", "mask", "max_share", "model_version"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
