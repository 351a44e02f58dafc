"""Batches: arrays and targets, prefetch in the order of the calls, and reuse of the memory of large arrays."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memoire
import netkit
from memoire import _core
from memoire.errors import EmptyMemory, ParameterError
from memoire.replay.batch import Batch
from memoire.replay.mixing import MAX_PREFETCH, drawn_ahead
from memoire.replay.schema import Schema
from memory_checks import with_episode
from netkit import Cluster, fill, in_thread, until

B = 3
SCHEMA = Schema(
    {
        "obs": {"image": (np.uint8, (2, 2)), "arm": (np.int64, np.float32)},
        "action": np.int64,
        "reward": np.float32,
        "logp": np.float32,
    }
)


def batch_of(schema: Schema = SCHEMA, **options: Any) -> Batch:
    """Return a batch of B entries with ascending values, drawn from one open episode."""
    buffer = memoire.Buffer(schema, 10, seed=0, **options)
    columns = [schema[name] for name in schema.entry_names]
    values = [np.arange(7 * np.prod(each.shape, dtype=int)).reshape(7, *each.shape) for each in columns]
    with_episode(buffer.memory, [value.astype(each.dtype) for value, each in zip(values, columns, strict=True)])
    return buffer.sample(B)


def test_keys_are_the_columns_and_what_a_learner_needs() -> None:
    batch = batch_of()
    assert list(batch) == [
        "obs.image", "obs.arm.0", "obs.arm.1", "action", "logp", "reward", "discount",
        "next_obs.image", "next_obs.arm.0", "next_obs.arm.1", "importance", "ids", "steps", "age", "model_version",
    ]  # fmt: skip
    assert len(batch) == 15 and "weight" not in batch and "obs" not in set(batch)


def test_nested_observations_are_nested_again() -> None:
    batch = batch_of()
    assert batch["obs"].keys() == {"image", "arm"} and isinstance(batch.obs["arm"], tuple)
    assert batch.next_obs["arm"][1] is batch["next_obs.arm.1"]
    assert np.shares_memory(batch["obs.image"], batch.gathered.prev["obs.image"])


@pytest.mark.parametrize("frame_stack", [1, 4])
def test_the_stack_axis_is_there_only_where_frames_are_stacked(frame_stack: int) -> None:
    batch = batch_of(Schema({"obs": (np.uint8, (2, 2)), "reward": np.float32}), frame_stack=frame_stack)
    shape = (B, 2, 2) if frame_stack == 1 else (B, frame_stack, 2, 2)
    assert batch.obs.shape == batch.next_obs.shape == shape
    assert batch.obs.flags.c_contiguous


def test_a_name_that_is_not_there_is_told_with_those_that_are() -> None:
    batch = batch_of()
    with pytest.raises(KeyError, match="weights"):
        batch["weights"]
    with pytest.raises(
        AttributeError, match=r"this batch has no 'weight'\. Did you mean 'importance'\? It has obs\.image, "
    ):
        batch.weight
    assert not hasattr(batch, "next_action") and "obs.image" in batch and batch.get("nothing") is None


def test_out_is_filled_and_becomes_the_batchs() -> None:
    batch = batch_of()
    expected = {name: array.copy() for name, array in batch.items()}
    out = {name: np.empty_like(batch[name]) for name in ("obs.image", "reward", "ids")}
    assert batch.copy_into(out) is batch
    for name, array in expected.items():
        np.testing.assert_array_equal(batch[name], array)
    assert all(batch[name] is array for name, array in out.items())


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({"weight": np.zeros(B)}, r"out\['weight'\] cannot be given: the batch has no array of this name"),
        ({"reward": np.zeros(B)}, r"out\['reward'\] must be an array float32\[3\], got 'float64\[3\]'"),
        ({"reward": np.zeros(4, np.float32)}, r"out\['reward'\] must be an array float32\[3\], got 'float32\[4\]'"),
        ({"reward": [0, 0, 0]}, r"out\['reward'\] must be an array float32\[3\], got 'list'"),
    ],
)
def test_an_out_that_does_not_fit_is_refused_and_nothing_is_copied(out: dict[str, Any], message: str) -> None:
    batch = batch_of()
    ids = np.full(B, -1)
    with pytest.raises(ParameterError, match=message):
        batch.copy_into({"ids": ids, **out})
    assert ids.tolist() == [-1] * B and batch.ids is not ids


def test_it_prints_its_arrays() -> None:
    assert repr(batch_of()).startswith("Batch(obs.image: uint8[3, 2, 2], obs.arm.0: int64[3], ")


# --- Prefetched batches: order, end of the run, and threads that end


class Numbers:
    """Source of the numbers 0, 1, 2 ..., which counts the taken ones and notes the end of their iterator."""

    def __init__(self, most: int = 1000) -> None:
        self.most, self.taken, self.is_ended = most, 0, False

    def make(self, is_over: Callable[[], bool]) -> Iterator[int]:
        try:
            while self.taken < self.most and not is_over():
                self.taken += 1
                yield self.taken - 1
        finally:
            self.is_ended = True


def test_whoever_stops_early_leaves_nobody_who_draws() -> None:
    numbers = Numbers()
    for value in drawn_ahead(numbers.make, lambda: False, 2):
        if value == 5:
            break
    del value
    until(lambda: numbers.is_ended, 30)
    assert numbers.taken <= 9


def test_an_error_comes_in_its_turn() -> None:
    def make(_: Callable[[], bool]) -> Iterator[int]:
        yield 1
        yield 2
        raise EmptyMemory

    drawn = drawn_ahead(make, lambda: False, 8)
    assert [next(drawn), next(drawn)] == [1, 2]
    with pytest.raises(EmptyMemory):
        next(drawn)
    assert list(drawn) == []


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_whatever_is_made_of_values_is_made_ahead_of_the_calls_and_comes_in_order(ahead: int) -> None:
    numbers, threads = Numbers(10), set[int]()

    def squared(number: int) -> int:
        threads.add(threading.get_ident())
        return number * number

    squares = memoire.prefetch(map(squared, numbers.make(lambda: False)), ahead)
    assert numbers.taken == 0
    assert next(squares) == 0
    until(lambda: numbers.taken == 1 + ahead)
    assert (threading.get_ident() in threads) == (ahead == 0)
    assert list(squares) == [number * number for number in range(1, 10)]


@pytest.mark.parametrize("ahead", [-1, MAX_PREFETCH + 1, 1.0, True, None])
def test_a_number_that_is_none_is_refused_at_once(ahead: object) -> None:
    with memoire.Server(None, netkit.SCHEMA) as server, pytest.raises(ParameterError, match="ahead"):
        server.batches(4, ahead=ahead)  # type: ignore[call-overload]
    with pytest.raises(ParameterError, match="ahead"):
        memoire.prefetch([1], ahead)  # type: ignore[arg-type]


def test_a_server_draws_ahead_until_the_run_is_over(cluster: Cluster) -> None:
    server = cluster.server()
    fill(cluster.client(server), caches=4)
    batches = server.batches(32, timeout=100, ahead=2)
    first = next(batches)
    assert first.obs.shape == (32, 4)
    until(lambda: server.stats().batches == 3)  # a call took one batch, and two batches wait
    first.update_priorities(np.ones(32))
    server.finish()
    assert list(batches) == []


def test_a_server_that_closes_ends_what_is_drawn_ahead() -> None:
    with memoire.Server(None, netkit.SCHEMA) as server:
        thread, box = in_thread(list, server.batches(8, timeout=100, ahead=1))
        until(lambda: any(each.name == "memoire-ahead" for each in threading.enumerate()))
    thread.join(100)
    assert box == {"value": []}


# --- Memory of large arrays: reused after release, never while in use

LARGE = 1 << 20
MAX_SPARE = 1 << 27
BYTE = np.dtype(np.uint8)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "f4", "f8", "i8"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (7,), (100_000,), (256, 4, 84, 84), (64, 1, 333, 1)])
def test_arrays_are_as_numpy_makes_them(shape: tuple[int, ...], dtype: str) -> None:
    array = _core.empty(shape, np.dtype(dtype))
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert array.flags.c_contiguous and array.flags.writeable and array.flags.aligned
    array[...] = 1
    assert array.all() and array.sum(dtype=np.int64) == array.size


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from([40_000, 41_000, 65_536, 300_000, LARGE])),
        max_size=60,
    )
)
@settings(deadline=None, max_examples=50)
def test_no_two_arrays_share_memory(turns: list[tuple[bool, int, int]]) -> None:
    held: list[np.ndarray] = []
    for number, (is_made, which, size) in enumerate(turns):
        if is_made or not held:
            held.append(_core.empty((size,), BYTE))
            held[-1][:] = number
            assert len(held[-1]) == size
        else:
            held.pop(which % len(held))
        ends = sorted((address(each), address(each) + each.size) for each in held)
        assert all(end <= begin for (_, end), (begin, _) in zip(ends, ends[1:], strict=False))
    for each in held:
        assert (each == each[0]).all()


def test_what_is_kept_is_bounded() -> None:
    held = [_core.empty((10 * LARGE + i * 2 * LARGE,), BYTE) for i in range(12)]
    assert sum(each.size for each in held) > MAX_SPARE
    del held
    assert 0 < _core.spare_bytes() <= MAX_SPARE
    too_large = _core.empty((MAX_SPARE + 1,), BYTE)
    del too_large
    assert _core.spare_bytes() <= MAX_SPARE  # the memory goes back to the system


def test_the_longest_unused_memory_goes_back_first() -> None:
    for sixteenths in (15, 8, 4, 6):  # the first array drives out all blocks before it, and the last the array of 8
        array = _core.empty((MAX_SPARE // 16 * sixteenths,), BYTE)
        del array
    assert _core.spare_bytes() == pytest.approx(MAX_SPARE // 16 * (4 + 6), abs=LARGE // 2)


def test_a_batch_takes_the_memory_of_the_one_before() -> None:
    schema = memoire.Schema({"obs": memoire.Column("uint8", (84, 84), "state"), "reward": np.float32})
    buffer = memoire.Buffer(schema, 100, frame_stack=4, seed=0)
    with_episode(buffer.memory, (np.ones((50, 84, 84), np.uint8), np.ones(50, np.float32)), terminated=True)
    places = set()
    for _ in range(10):
        batch = buffer.sample(32)
        assert (batch["obs"] == 1).all()
        places |= {address(batch["obs"]), address(batch["next_obs"])}
        del batch
    assert len(places) <= 4  # memory of each side, and blocks of arrays of other sizes
