"""Transitions are compared bit by bit: a changed pixel, dtype or shape is found, and where it is."""

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.errors import CrcFailed, CrcOneSided, ParameterError
from memoire.rl.crc import SAMPLE, SENDER, SUMS, Checks, Marks, first_difference, first_different_sum, sums_of

PICTURE = np.random.default_rng(0).integers(0, 256, (84, 84), np.uint8)


HALF = np.float32(0.5)


def transition(picture=PICTURE, rew=HALF, done=False):
    last_obs = {"image": PICTURE.copy(), "pose": (np.float32([1, 2]), np.int64(3))}
    new_obs = {"image": np.array(picture), "pose": (np.float32([1, 2]), np.int64(3))}
    return last_obs, np.float32([0.1, -0.1]), rew, new_obs, done


def with_pixel():
    changed = PICTURE.copy()
    changed[40, 41] ^= 1
    return changed


def test_a_changed_pixel_passes_where_texts_are_compared_and_fails_here():
    before, after = transition(), transition(with_pixel())
    assert [str(part) for part in before] == [str(part) for part in after]  # the control: as TMRL compares
    found = first_difference(before, after)
    assert found.path == "new_obs['image'], index (40, 41)"
    assert (int(found.expected), int(found.received)) == (PICTURE[40, 41], PICTURE[40, 41] ^ 1)
    assert first_different_sum(sums_of(before), sums_of(after)).path == "new_obs['image']"
    assert first_difference(before, transition()) is None
    assert first_different_sum(sums_of(before), sums_of(transition())) is None


@pytest.mark.parametrize(
    ("changed", "path", "received"),
    [
        (transition(PICTURE.astype(np.int16)), "new_obs['image']", "int16[84, 84]"),
        (transition(PICTURE[:83]), "new_obs['image']", "uint8[83, 84]"),
        (transition(PICTURE[:, ::-1][:, ::-1]), None, ""),
        (transition(rew=0.5), None, ""),
        (transition(rew=np.float64(0.5)), None, ""),
        (transition(rew=np.float32(0.25)), "rew", "0.25"),
        (transition(done=np.bool_(False)), None, ""),
        (transition(done=True), "done", "True"),
        (transition(rew=np.float32(-0.0) + np.float32(0.5)), None, ""),
    ],
)
def test_dtype_shape_and_values_count_and_whose_numbers_they_are_does_not(changed, path, received):
    found = first_difference(transition(), changed)
    assert (found is None) == (path is None)
    if found is not None:
        assert (found.path, found.received) == (path, received)
    assert (first_different_sum(sums_of(transition()), sums_of(changed)) is None) == (path is None)


def test_not_a_number_equals_itself_and_zeros_have_signs():
    assert first_difference(transition(rew=np.float32("nan")), transition(rew=np.float32("nan"))) is None
    assert first_difference(transition(rew=np.float32(0.0)), transition(rew=np.float32(-0.0))).path == "rew"


def test_lists_count_as_tuples_and_missing_leaves_are_named():
    last_obs, act, rew, new_obs, done = transition()
    as_list = {**new_obs, "pose": list(new_obs["pose"])}
    assert first_difference(transition(), (last_obs, act, rew, as_list, done)) is None
    less = (last_obs, act, rew, {"image": PICTURE}, done)
    assert tuple(first_difference(transition(), less)) == ("new_obs['pose'][0]", "there", "not there")
    assert tuple(first_difference(less, transition())) == ("new_obs['pose'][0]", "not there", "there")
    assert first_different_sum(sums_of(less), sums_of(transition())).expected == "not there"


@given(st.integers(0, 84 * 84 * 8 - 1))
def test_every_bit_counts(bit):
    changed = PICTURE.copy()
    changed.reshape(-1)[bit // 8] ^= 1 << bit % 8
    index = tuple(map(int, np.unravel_index(bit // 8, (84, 84))))
    assert first_difference(transition(), transition(changed)).path == f"new_obs['image'], index {index}"
    assert first_different_sum(sums_of(transition()), sums_of(transition(changed))) is not None


def test_texts_bytes_and_empty_arrays_are_compared():
    assert sums_of(("a", b"a", 0, np.zeros((0, 2)), False)) != sums_of(("b", b"a", 0, np.zeros((0, 3)), False))
    with pytest.raises(ParameterError, match="transition must be of numbers"):
        sums_of((object(), 0, 0, 0, False))


def test_marks_travel_and_are_checked(caplog):
    caplog.set_level(logging.INFO)
    marks, checks = Marks(True, "drone-1"), Checks(True, "MyMemory")
    reset, info = marks.mark({}, None, 3, 0), marks.mark({"x": 1}, transition(), 3, 12)
    assert info["x"] == 1 and SAMPLE in info and SAMPLE not in reset
    checks.take([reset, info])
    checks.check(transition(), info, 17)
    assert (checks.passed, checks.failed) == (1, 0) and "CRC check passed: transition 17" in caplog.text
    with pytest.raises(CrcFailed) as caught:
        checks.check(transition(with_pixel()), info, 17)
    text = str(caught.value)
    assert "transition 17 of MyMemory" in text and "drone-1 in episode 3, step 12" in text
    assert "new_obs['image'], index (40, 41)" in text
    assert (checks.passed, checks.failed) == (1, 1)


def test_what_travels_is_a_copy():
    given = transition()
    info = Marks(True).mark({}, given, 1, 1)
    given[3]["image"][:] = 0
    assert first_difference(info[SAMPLE], transition()) is None


def test_the_cheap_mode_sends_checksums_of_one_in_n():
    marks, checks = Marks(3, "w"), Checks(3)
    infos = [marks.mark({}, transition(), 1, step) for step in range(1, 10)]
    assert [SUMS in info for info in infos] == [False, False, True] * 3 and not any(SAMPLE in info for info in infos)
    checks.take(infos)
    for item, info in enumerate(infos):
        checks.check(transition(), info, item)
    assert checks.passed == 3
    with pytest.raises(CrcFailed, match=r"at new_obs\['image'\]: recorded as uint8\[84, 84\] with checksum"):
        checks.check(transition(with_pixel()), infos[2], 2)


def test_one_side_alone_is_refused_with_both_names():
    info = Marks(True, "drone-1").mark({}, transition(), 2, 5)
    with pytest.raises(CrcOneSided, match="set for drone-1 in episode 2, step 5, but not for MyMemory"):
        Checks(False, "MyMemory").take([info])
    with pytest.raises(CrcOneSided, match="set for MyMemory, but not for the worker"):
        Checks(True, "MyMemory").take([{}])
    Checks(False).take([{}])
    off = Marks(False)
    assert off.mark({"a": 1}, transition(), 1, 1) == {"a": 1}
    Checks(False).check(transition(), {}, 0)


@pytest.mark.parametrize("value", [-1, 0.5, "yes"])
def test_other_values_of_crc_debug_are_refused(value):
    with pytest.raises(ParameterError, match="crc_debug must be True or False, or n"):
        Marks(value)


def test_the_mark_of_each_sample_says_who_made_it():
    assert Marks(True, "w").mark({}, None, 4, 0)[SENDER] == ["w", 4, 0]
