"""Large arrays take the memory that earlier ones have given back, and nobody's while it is in use."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memoire
from memoire import _core

LARGE = 1 << 20
MAX_SPARE = 1 << 27
BYTE = np.dtype(np.uint8)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "f4", "f8", "i8"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (7,), (100_000,), (256, 4, 84, 84), (64, 1, 333, 1)])
def test_arrays_are_as_numpy_makes_them(shape: tuple[int, ...], dtype: str) -> None:
    made = _core.empty(shape, np.dtype(dtype))
    assert (made.shape, made.dtype) == (shape, np.dtype(dtype))
    assert made.flags.c_contiguous and made.flags.writeable and made.flags.aligned
    made[...] = 1
    assert made.all() and made.sum(dtype=np.int64) == made.size


@pytest.mark.parametrize("dtype", [np.dtype(">f4"), np.dtype("O"), np.dtype([("a", "u1")]), np.dtype("U3")])
def test_what_is_no_plain_number_is_left_to_numpy(dtype: np.dtype[Any]) -> None:
    made = _core.empty((1_000_000,), dtype)
    assert made.dtype == dtype and made.flags.owndata


def test_memory_that_was_given_back_is_taken_again() -> None:
    taken = []
    for _ in range(5):  # a thread that an earlier test has left may be quicker once
        first = _core.empty((LARGE,), BYTE)
        place = address(first)
        del first
        taken.append(address(_core.empty((LARGE - 5,), BYTE)) == place)  # of about the same size
    assert any(taken)


def test_a_view_keeps_its_memory() -> None:
    view = _core.empty((LARGE,), BYTE)[10:20]
    view[:] = 7
    others = [_core.empty((LARGE,), BYTE) for _ in range(3)]
    for other in others:
        other[:] = 1
    assert (view == 7).all()


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
    assert _core.spare_bytes() <= MAX_SPARE  # went back to the system


def test_the_oldest_blocks_give_way_to_a_newer_one_that_does_not_fit_beside_them() -> None:
    large, newest = MAX_SPARE * 15 // 16, MAX_SPARE * 10 // 16
    for size in (LARGE, large, newest):
        made = _core.empty((size,), BYTE)
        del made
    assert newest <= _core.spare_bytes() < newest + LARGE, "whatever is older than the large one went before it"


def test_many_small_blocks_are_kept_to_a_number_too() -> None:
    del_me = [_core.empty((40_000,), BYTE) for _ in range(200)]
    del del_me
    before = _core.spare_bytes()
    again = [_core.empty((40_000,), BYTE) for _ in range(100)]
    assert before - _core.spare_bytes() <= 64 * 50_000
    del again


def test_a_batch_takes_the_memory_of_the_one_before() -> None:
    schema = memoire.Schema({"obs": memoire.Column("uint8", (84, 84), "state"), "reward": np.float32})
    buffer = memoire.Buffer(schema, 100, frame_stack=4, seed=0)
    buffer.memory.open()
    buffer.memory.extend(0, (np.ones((50, 84, 84), np.uint8), np.ones(50, np.float32)))
    buffer.memory.close(terminated=True)
    places = set()
    for _ in range(10):
        batch = buffer.sample(32)
        assert (batch["obs"] == 1).all()
        places |= {address(batch["obs"]), address(batch["next_obs"])}
        del batch
    assert len(places) <= 4  # the two sides, and what other sizes of this process had left
