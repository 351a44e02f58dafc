"""Parameters and columns become what the engine is set up with."""

import numpy as np
import pytest

from memoire.errors import ParameterError
from memoire.replay.columns import Column
from memoire.replay.conversion import checked_page_rows, cutting_of, limits_of, storage_of
from memoire.replay.parameters import Parameters


def test_pages_are_small_beside_the_memory_and_a_power_of_two() -> None:
    assert [checked_page_rows(None, capacity) for capacity in (1, 4096, 8192, 3 * 4096, 10**9)] == [1, 1, 2, 2, 256]
    assert checked_page_rows(64, 10) == 64
    for wrong in (0, -4, 3):
        with pytest.raises(ParameterError, match="page_rows must be a power of two"):
            checked_page_rows(wrong, 10)


@pytest.mark.parametrize("shape", [(), (3,), (None, 3)])
def test_the_room_of_a_column_begins_with_a_cache_line(shape: tuple[int | None, ...]) -> None:
    column = Column(np.float32, shape, "state")
    data, dtype, told, role, is_finite = storage_of(column, 7)
    assert data.shape == (7, 8 if column.is_ragged else column.nbytes) and data.dtype == np.uint8
    assert data.ctypes.data % 64 == 0 and not data.any()
    assert (dtype, told, role, is_finite) == (np.float32, shape, "state", True)


def test_one_number_of_a_vector_reward_is_that_of_all_dimensions() -> None:
    settings = cutting_of(Parameters(discount=0.5, reward_coeff=(1.0, 2.0)), 2)
    assert (settings["gamma"], settings["coeff"]) == ([0.5, 0.5], [1.0, 2.0])


def test_sequences_are_as_long_as_their_window_and_begin_where_the_overlap_does() -> None:
    steps = cutting_of(Parameters(multi_step=3), 1)
    assert (steps["multi_step"], steps["stride"]) == (3, 0)
    sequences = cutting_of(Parameters(sequence_length=8, sequence_overlap=3, burn_in=2), 1)
    assert (sequences["multi_step"], sequences["stride"], sequences["burn_in"]) == (8, 5, 2)


def test_the_engine_knows_every_setting_by_its_name() -> None:
    names = ["alpha", "lambda_", "frame_stack", "multi_step", "start", "most_episodes", "gamma", "coeff"]
    names += ["prioritization", "stratified", "stride", "burn_in", "max_share"]
    assert list(cutting_of(Parameters(), 1)) == names
    choices = cutting_of(Parameters(start="zero", prioritization="rank", stratified=True), 1)
    assert (choices["start"], choices["prioritization"], choices["stratified"]) == (2, 1, True)


def test_a_lag_of_no_models_is_a_limit_and_no_lag_is_none() -> None:
    assert limits_of(Parameters()) == (0, 0.0, -1)
    assert limits_of(Parameters(max_times_sampled=3, max_age=2.5, max_model_lag=0)) == (3, 2.5, 0)
