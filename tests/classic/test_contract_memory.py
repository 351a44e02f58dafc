"""The classic ReplayMemory, row by row of docs/development/contract.md: written from the API page alone, without a look at the engine."""

import inspect
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import memoire
from memoire import ReplayMemory
from memoire.errors import (
    EmptyEpisodeError,
    EmptyMemory,
    EntryError,
    EpisodeClosedError,
    EpisodeTooLong,
    MemoireError,
    ParameterError,
    SchemaError,
)

FIELDS = ("state", "action", "reward", "prob", "value", "qvest", "info")


def templates(state=(2,), reward=(), info=(0,), state_dtype=np.float32):
    """The seven buffers in the page's order."""
    return (
        np.zeros(state, state_dtype),
        np.zeros((), np.int64),
        np.zeros(reward, np.float32),
        np.zeros((), np.float32),
        np.zeros(reward, np.float32),
        np.zeros(reward, np.float32),
        np.zeros(info, np.uint8),
    )


def memory(max_step=64, *, seed=0, reward=(), state=(2,), **parameters):
    rem = ReplayMemory(*templates(state, reward), max_step, seed=seed)
    for name, value in parameters.items():
        setattr(rem, name, value)
    return rem


def fill(rem, rewards, values=None, init_w=1.0, **how):
    """One closed episode; state counts entries from where it starts, action is the position."""
    rewards = np.asarray(rewards, np.float32)
    values = np.zeros_like(rewards) if values is None else np.asarray(values, np.float32)
    weights = np.broadcast_to(np.asarray(init_w, np.float32), len(rewards))
    info = np.zeros(rem.info_buf.shape, np.uint8)
    rem.new_episode()
    for t, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        rem.add_entry(np.full(rem.state_buf.shape, t, np.float32), t, reward, 0.5, value, info, float(weights[t]))
    rem.close_episode(**how)


def weight_of(rem, position):
    """The weight of the only episode's entry at `position`, as a draw of everything reports it; 0 where it is never drawn."""
    return weights_by_position(rem).get(position, 0.0)


def weights_by_position(rem, draws=4096):
    try:
        prev, _, weight = rem.get_batch(draws)
    except EmptyMemory:
        return {}
    return dict(zip(prev.action.tolist(), weight.tolist(), strict=True))


def td_lambda(rewards, values, gamma, lam, bootstrap=0.0):
    """The return of each step in slow Python: [T, *reward] float64."""
    returns = np.zeros(np.shape(rewards))
    following = np.zeros(np.shape(rewards)[1:]) + bootstrap
    for t in reversed(range(len(rewards))):
        returns[t] = rewards[t] + gamma * following
        following = lam * returns[t] + (1 - lam) * values[t]
    return returns


# ------------------------------------------------------------------------------------------------ the three classes


# ------------------------------------------------------------------------------------------------ the three classes


def test_the_three_classes_are_in_the_module():
    for name in ("ReplayMemory", "ReplayMemoryServer", "ReplayMemoryClient"):
        assert inspect.isclass(getattr(memoire, name))
        assert name in vars(memoire)


# ---------------------------------------------------------------------------------------------- read-only properties


@pytest.mark.parametrize("field", FIELDS)
def test_templates_are_readable_and_cannot_be_assigned(field):
    given_templates = dict(zip(FIELDS, templates((4, 3), (2,), (5,)), strict=True))
    rem = ReplayMemory(*given_templates.values(), 8)
    found = getattr(rem, f"{field}_buf")
    assert found.shape == given_templates[field].shape
    assert found.dtype == given_templates[field].dtype
    with pytest.raises(AttributeError):
        setattr(rem, f"{field}_buf", given_templates[field])


def test_templates_cannot_be_written_through():
    with pytest.raises(ValueError):
        memory().state_buf[0] = 1.0


@pytest.mark.parametrize("name", ["entry_size", "max_step", "uuid"])
def test_sizes_and_uuid_cannot_be_assigned(name):
    with pytest.raises(AttributeError):
        setattr(memory(), name, 1)


def test_misspelt_properties_are_refused():
    with pytest.raises(AttributeError):
        memory().priority_exponnent = 0.5


@pytest.mark.parametrize("field", ["reward", "value", "qvest"])
def test_reward_value_and_qvest_must_be_float32(field):
    buffers = dict(zip(FIELDS, templates(), strict=True))
    buffers[field] = np.zeros((), np.float64)
    with pytest.raises(SchemaError, match=rf"{field}_buf.*float32.*float64"):
        ReplayMemory(*buffers.values(), 8)


@pytest.mark.parametrize("field", ["value", "qvest"])
def test_value_and_qvest_must_have_the_shape_of_reward(field):
    buffers = dict(zip(FIELDS, templates(reward=(2,)), strict=True))
    buffers[field] = np.zeros((3,), np.float32)
    with pytest.raises(SchemaError, match=rf"{field}_buf.*\(2,\).*\(3,\)"):
        ReplayMemory(*buffers.values(), 8)


def test_prob_must_have_shape_nothing():
    buffers = dict(zip(FIELDS, templates(), strict=True))
    buffers["prob"] = np.zeros((1,), np.float32)
    with pytest.raises(SchemaError, match=r"prob_buf.*\(\).*\(1,\)"):
        ReplayMemory(*buffers.values(), 8)


def test_what_is_no_template_is_refused_by_name():
    with pytest.raises(SchemaError, match="action"):
        ReplayMemory(templates()[0], "left or right", *templates()[2:], 8)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float64, np.bool_])
def test_info_may_have_any_dtype_and_no_size(dtype):
    for shape in ((), (0,), (3, 0), (7,)):
        buffers = (*templates()[:6], np.zeros(shape, dtype))
        rem = ReplayMemory(*buffers, 8)
        assert rem.info_buf.dtype == dtype
        info = np.ones(shape, dtype)
        rem.new_episode()
        for _ in range(3):
            rem.add_entry(np.zeros(2, np.float32), 0, 1.0, 1.0, 0.0, info, 1.0)
        rem.close_episode()
        prev, _, _ = rem.get_batch(4)
        np.testing.assert_array_equal(prev.info, np.broadcast_to(info, (4, *shape)))


@given(
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.lists(st.integers(1, 3), max_size=2).map(tuple),
    st.integers(0, 9),
    st.sampled_from([np.uint8, np.float32, np.int64, np.float64]),
)
def test_entry_size_is_the_sum_of_the_seven_buffers(state, reward, info, dtype):
    buffers = templates(state, reward, (info,), dtype)
    assume(buffers[0].size > 0)
    rem = ReplayMemory(*buffers, 4)
    assert rem.entry_size == sum(each.nbytes for each in buffers)


@settings(max_examples=40)
@given(st.integers(1, 131))
def test_exactly_max_step_entries_fit_for_any_number(max_step):
    rem = ReplayMemory(*templates(), max_step)
    assert rem.max_step == max_step
    rem.new_episode()
    for t in range(max_step):
        rem.add_entry(np.zeros(2, np.float32), t, 0.0, 1.0, 0.0, rem.info_buf, 1.0)
    with pytest.raises(EpisodeTooLong):
        rem.add_entry(np.zeros(2, np.float32), 0, 0.0, 1.0, 0.0, rem.info_buf, 1.0)
    rem.close_episode()
    assert rem.num_episode() == 1


@pytest.mark.parametrize("max_step", [0, -1, 2.5, True, "many"])
def test_max_step_must_be_a_positive_whole_number(max_step):
    with pytest.raises(ParameterError, match="max_step"):
        ReplayMemory(*templates(), max_step)


def test_uuid_is_32_bits_and_client_id_128():
    first, second = memory(), memory()
    assert 0 < first.uuid < 2**32
    assert len(f"{first.uuid:08x}") == 8
    assert len(first.client_id) == 16
    assert first.client_id != second.client_id
    assert first.uuid != second.uuid  # fails once in 4 billion runs


def test_uuid_can_be_given_as_a_number_or_an_address():
    assert ReplayMemory(*templates(), 4, input_uuid=0x0A000001).uuid == 0x0A000001
    assert ReplayMemory(*templates(), 4, input_uuid="10.0.0.1").uuid == 0x0A000001
    for wrong in (-1, 2**32, "10.0.0", 1.5, True):
        with pytest.raises(ParameterError, match="input_uuid"):
            ReplayMemory(*templates(), 4, input_uuid=wrong)


# ------------------------------------------------------------------------------------------------- templates of A1


def test_templates_may_be_gym_spaces():
    spaces = pytest.importorskip("gymnasium").spaces
    buffers = (spaces.Box(0, 255, (4, 4), np.uint8), spaces.Discrete(3), *templates()[2:])
    rem = ReplayMemory(*buffers, 8)
    assert rem.state_buf.shape == (4, 4)
    assert rem.state_buf.dtype == np.uint8
    assert rem.action_buf.shape == ()
    rem.new_episode()
    for t in range(4):
        rem.add_entry(np.full((4, 4), t, np.uint8), np.int64(t % 3), 1.0, 1.0, 0.0, rem.info_buf, 1.0)
    rem.close_episode()
    prev, _, _ = rem.get_batch(8)
    np.testing.assert_array_equal(prev.state[:, 0, 0, 0] % 3, prev.action)


def test_templates_may_be_nested():
    state = {"image": np.zeros((2, 2), np.uint8), "arm": {"joint": np.zeros(3, np.float32)}}
    rem = ReplayMemory(state, *templates()[1:], 8)
    assert rem.entry_size == 4 + 12 + sum(each.nbytes for each in templates()[1:])
    assert rem.state_buf["arm"]["joint"].shape == (3,)
    rem.new_episode()
    for t in range(4):
        image, joint = np.full((2, 2), t, np.uint8), np.full(3, t, np.float32)
        rem.add_entry({"image": image, "arm": {"joint": joint}}, t, 1.0, 1.0, 0.0, rem.info_buf, 1.0)
    rem.close_episode()
    prev, following, _ = rem.get_batch(8)
    np.testing.assert_array_equal(prev.state["image"][:, 0, 0, 0], prev.action)
    np.testing.assert_array_equal(following.state["arm"]["joint"][:, 0, 0], prev.action + 1)


def test_templates_may_be_structured():
    state = np.zeros((), [("x", np.float32), ("id", np.int32)])
    rem = ReplayMemory(state, *templates()[1:], 8)
    assert rem.entry_size == 8 + sum(each.nbytes for each in templates()[1:])
    rem.new_episode()
    for t in range(4):
        state["x"], state["id"] = t, -t
        rem.add_entry(state, t, 1.0, 1.0, 0.0, rem.info_buf, 1.0)
    rem.close_episode()
    prev, _, _ = rem.get_batch(8)
    np.testing.assert_array_equal(prev.state["x"][:, 0], prev.action)
    np.testing.assert_array_equal(prev.state["id"][:, 0], -prev.action)


# --------------------------------------------------------------------------------------------- read-write properties

DEFAULTS = {
    "priority_exponent": 0.6,
    "importance_exponent": 0.4,
    "mix_lambda": 1.0,
    "frame_stack": 1,
    "multi_step": 1,
    "cache_size": 256,
    "max_episode": 0,
    "reuse_cache": False,
    "discount_factor": (0.99,),
    "reward_coeff": (1.0,),
    "cache_flags": (True,) * 14,
    "start": "skip",
}
OTHERS = {
    "priority_exponent": 0.25,
    "importance_exponent": 1.0,
    "mix_lambda": 0.5,
    "frame_stack": 3,
    "multi_step": 2,
    "cache_size": 17,
    "max_episode": 5,
    "reuse_cache": True,
    "discount_factor": (0.5,),
    "reward_coeff": (2.0,),
    "cache_flags": (True, False) * 7,
    "start": "zero",
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_properties_have_defaults_and_keep_what_is_set(name):
    rem = memory()
    assert getattr(rem, name) == DEFAULTS[name]
    setattr(rem, name, OTHERS[name])
    assert getattr(rem, name) == OTHERS[name]
    for other in DEFAULTS.keys() - {name}:
        assert getattr(rem, other) == DEFAULTS[other]


REFUSED = [
    ("priority_exponent", -0.1),
    ("priority_exponent", math.nan),
    ("priority_exponent", math.inf),
    ("priority_exponent", "0.6"),
    ("importance_exponent", 1.5),
    ("importance_exponent", -0.5),
    ("mix_lambda", 1.01),
    ("mix_lambda", -0.01),
    ("mix_lambda", math.nan),
    ("frame_stack", 0),
    ("frame_stack", -2),
    ("frame_stack", 1.5),
    ("frame_stack", True),
    ("multi_step", 0),
    ("multi_step", -1),
    ("multi_step", 2.0),
    ("cache_size", 0),
    ("cache_size", -4),
    ("cache_size", None),
    ("max_episode", -1),
    ("max_episode", 1.5),
    ("reuse_cache", "yes"),
    ("reuse_cache", 2),
    ("discount_factor", math.nan),
    ("discount_factor", -0.5),
    ("discount_factor", 1.5),
    ("discount_factor", [0.9, 0.9, 0.9]),
    ("discount_factor", []),
    ("reward_coeff", [-1.0]),
    ("reward_coeff", [1.0, math.inf]),
    ("reward_coeff", [1.0, 1.0, 1.0]),
    ("reward_coeff", []),
    ("cache_flags", [True] * 13),
    ("cache_flags", [True] * 15),
    ("cache_flags", [2] * 14),
    ("cache_flags", ["prev_states"]),
    ("cache_flags", ["prev_state", "prev_state"]),
    ("cache_flags", 1),
    ("start", "pad"),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_wrong_parameter_is_refused_by_name_and_nothing_changes(name, value):
    rem = memory(reward=(2,))
    before = rem.info()
    with pytest.raises(ParameterError, match=name) as error:
        setattr(rem, name, value)
    shown = [value, *value, tuple(value)] if type(value) is list else [value]  # the whole error, or the wrong number
    assert any(f"got {each!r}." in str(error.value) for each in shown)
    assert isinstance(error.value, ValueError)
    assert rem.info() == before


def test_priority_exponent_is_applied_to_what_is_stored():
    rem = memory(multi_step=1)
    fill(rem, [4.0, 9.0, 0.0], do_update_value=True)
    rem.discount_factor = 0.0
    for exponent in (0.0, 0.5, 1.0):
        rem.priority_exponent = exponent
        assert weight_of(rem, 0) == pytest.approx(4.0**exponent)
        assert weight_of(rem, 1) == pytest.approx(9.0**exponent)


def test_frame_stack_stacks_states_oldest_first_on_both_sides():
    rem = memory(frame_stack=3, multi_step=2)
    fill(rem, np.ones(9))
    prev, following, _ = rem.get_batch(64)
    assert prev.state.shape == following.state.shape == (64, 3, 2)
    newest = prev.action[:, None]
    np.testing.assert_array_equal(prev.state[:, :, 0], newest + np.array([-2, -1, 0]))
    np.testing.assert_array_equal(following.state[:, :, 0], newest + np.array([0, 1, 2]))
    np.testing.assert_array_equal(following.action, prev.action + 2)


@pytest.mark.parametrize(("start", "frames"), [("repeat", [0, 0, 0]), ("zero", [0, 0, 7])])
def test_windows_at_the_start_are_padded_as_asked(start, frames):
    rem = ReplayMemory(*templates(), 16, seed=0)
    rem.frame_stack, rem.start = 3, start
    rem.new_episode()
    for t in range(4):
        rem.add_entry(np.full(2, 7 + t, np.float32), t, 1.0, 1.0, 0.0, rem.info_buf, 1.0)
    rem.close_episode()
    prev, _, _ = rem.get_batch(64)
    first = prev.state[prev.action == 0][0, :, 0]
    np.testing.assert_array_equal(first, [7, 7, 7] if start == "repeat" else frames)


def test_start_skip_leaves_the_first_windows_out():
    rem = memory(frame_stack=3)
    fill(rem, np.ones(6))
    assert set(weights_by_position(rem)) == {2, 3, 4}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.booleans(), st.booleans(), st.data())
def test_multi_step_rewards_discounts_and_steps_reach_the_learner(stack, steps, length, ended, terminated, data):
    """Against slow Python, with and without knowledge of how the episode ended."""
    rewards = np.array(data.draw(st.lists(st.integers(-3, 3), min_size=length, max_size=length)), np.float32)
    rem = memory(frame_stack=stack, multi_step=steps, discount_factor=0.5, priority_exponent=0.0)
    final = {"final_state": np.full(2, length, np.float32), "terminated": terminated} if ended else {}
    fill(rem, rewards, **final)
    last = length if ended else length - steps
    expected = set(range(stack - 1, last))
    assert set(weights_by_position(rem)) == expected
    if not expected:
        return
    batch = rem.get_batch(64)
    prev, following, _ = batch
    for b, position in enumerate(prev.action.tolist()):
        taken = min(steps, length - position)
        at_end = ended and position + taken == length
        assert batch.steps[b] == taken
        assert batch.reward[b] == pytest.approx(sum(0.5**j * rewards[position + j] for j in range(taken)))
        assert batch.discount[b] == (0.0 if at_end and terminated else 0.5**taken)
        assert following.state[b, -1, 0] == position + taken
        np.testing.assert_array_equal(prev.state[b, :, 0], np.arange(position - stack + 1, position + 1))
        if not at_end:
            assert following.reward[b] == rewards[position + taken]


def test_max_episode_zero_is_no_limit_and_both_limits_apply():
    rem = memory(max_step=20)
    for _ in range(10):
        fill(rem, np.ones(2))
    assert rem.num_episode() == 10
    rem.max_episode = 3
    assert rem.num_episode() == 3
    for _ in range(4):
        fill(rem, np.ones(2))
        assert rem.num_episode() == 3
    fill(rem, np.ones(19))
    assert rem.num_episode() == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 40), st.integers(0, 4), st.lists(st.integers(1, 12), max_size=20))
def test_steps_and_episodes_stay_within_both_limits_after_each_call(max_step, max_episode, lengths):
    rem = memory(max_step=max_step, max_episode=max_episode)
    stored: list[int] = []  # lengths of closed episodes, oldest first
    for length in lengths:
        before = rem.num_episode()
        rem.new_episode()
        assert rem.num_episode() == before == len(stored)
        for t in range(min(length, max_step)):
            rem.add_entry(np.zeros(2, np.float32), t, 0.0, 1.0, 0.0, rem.info_buf, 1.0)
            while stored and (sum(stored) + t + 1 > max_step or max_episode and len(stored) >= max_episode):
                stored.pop(0)
            assert rem.num_episode() == len(stored)
        rem.close_episode()
        stored.append(min(length, max_step))
        assert rem.num_episode() == len(stored)
        assert not max_episode or rem.num_episode() <= max_episode


@pytest.mark.parametrize("value", [0.5, [0.5], np.array([0.5]), (0.5,), np.float32(0.5), np.array(0.5)])
def test_one_discount_counts_for_every_dimension_of_the_reward(value):
    rem = memory(reward=(3,), discount_factor=value)
    assert rem.discount_factor == (0.5, 0.5, 0.5)
    rem.reward_coeff = value
    assert rem.reward_coeff == (0.5, 0.5, 0.5)


def test_discounts_and_coefficients_may_differ_by_dimension():
    rem = memory(reward=(2, 2), discount_factor=np.array([[0.1, 0.2], [0.3, 0.4]]))
    assert rem.discount_factor == (0.1, 0.2, 0.3, 0.4)
    rem = memory(reward=(2,), discount_factor=[0.0, 0.5], reward_coeff=[1.0, 10.0], priority_exponent=1.0)
    fill(rem, [[1, 2], [4, 8], [0, 0]])
    prev, _, weight = rem.get_batch(64)
    np.testing.assert_allclose(prev.qvest[prev.action == 0][0], [1, 2 + 0.5 * 8])
    np.testing.assert_allclose(weight[prev.action == 0][0], 1 + 10 * 6)


def test_a_field_switched_off_comes_back_with_batch_dimension_zero():
    rem = memory(
        cache_flags=[True, False, True, False, True, True, False, False, True, False, True, False, False, False]
    )
    fill(rem, np.ones(5))
    prev, following, _ = rem.get_batch(6)
    assert [len(each) for each in prev] == [6, 0, 6, 0, 6, 6, 0]
    assert [len(each) for each in following] == [0, 6, 0, 6, 0, 0, 0]
    assert prev.action.shape == (0,)
    assert following.state.shape == (0, 1, 2)
    assert following.state.dtype == np.float32


@pytest.mark.parametrize("switch", range(14))
def test_each_of_the_14_switches_moves_one_field(switch):
    flags = [False] * 14
    flags[switch] = True
    names = [f"{side}_{field}" for side in ("prev", "next") for field in FIELDS]
    for value in (flags, np.array(flags), [int(each) for each in flags], [names[switch]]):
        rem = memory(cache_flags=value)
        assert rem.cache_flags == tuple(flags)
        fill(rem, np.ones(5))
        batch = rem.get_batch(6)
        assert [len(each) for side in batch[:2] for each in side] == [6 if each else 0 for each in flags]


# --------------------------------------------------------------------------------------------------------- methods


def arguments_of(function):
    return [each.name for each in inspect.signature(function).parameters.values() if each.kind is not each.KEYWORD_ONLY]


def test_methods_take_the_arguments_of_the_page_in_its_order():
    buffers = [f"{field}_buf" for field in FIELDS]
    assert arguments_of(ReplayMemory.__init__) == ["self", *buffers, "max_step"]
    assert arguments_of(ReplayMemory.new_episode) == ["self"]
    assert arguments_of(ReplayMemory.num_episode) == ["self"]
    assert arguments_of(ReplayMemory.print_info) == ["self"]
    assert arguments_of(ReplayMemory.pub_bytes) == ["self", "topic", "message"]
    assert arguments_of(ReplayMemory.add_entry) == ["self", "s", "a", "r", "p", "v", "i", "init_w"]
    close = ["self", "episodic_weight_multiplier", "do_update_value", "do_update_weight"]
    assert arguments_of(ReplayMemory.close_episode) == close
    defaults = [inspect.signature(ReplayMemory.close_episode).parameters[name].default for name in close[1:]]
    assert defaults == [1.0, True, True]


def test_construction_takes_keywords():
    named = {f"{field}_buf": each for field, each in zip(FIELDS, templates(), strict=True)}
    assert ReplayMemory(**named, max_step=5).max_step == 5


def test_print_info_prints_every_parameter_and_changes_nothing(capsys):
    rem = memory()
    fill(rem, np.ones(4))
    before = rem.info()
    assert rem.print_info() is None
    printed = capsys.readouterr().out
    for name in (*DEFAULTS, "max_step", "entry_size", "uuid", "num_episode"):
        assert name in printed
        assert name in before
    assert rem.info() == before


def test_pub_bytes_of_a_memory_of_its_own_says_who_publishes():
    with pytest.raises(MemoireError, match="ReplayMemoryServer"):
        memory().pub_bytes("topic", "message")


def test_new_episode_leaves_the_count_and_closing_adds_one():
    rem = memory()
    for count in range(3):
        rem.new_episode()
        assert rem.num_episode() == count
        rem.add_entry(np.zeros(2, np.float32), 0, 0.0, 1.0, 0.0, rem.info_buf, 1.0)
        assert rem.num_episode() == count
        rem.close_episode()
        assert rem.num_episode() == count + 1


def test_a_second_new_episode_gives_the_room_of_the_first_back():
    rem = memory(max_step=10)
    for _ in range(5):
        rem.new_episode()
        for t in range(10):
            rem.add_entry(np.zeros(2, np.float32), t, 0.0, 1.0, 0.0, rem.info_buf, 1.0)
    rem.new_episode()
    assert rem.num_episode() == 0
    assert rem.info()["num_entries"] == 0
    fill(rem, np.ones(4))
    prev, _, _ = rem.get_batch(64)
    assert set(prev.action.tolist()) == {0, 1, 2}


def test_the_episode_limit_evicts_at_the_first_entry_not_at_new_episode():
    rem = memory(max_episode=2)
    fill(rem, np.ones(3))
    fill(rem, np.ones(3))
    rem.new_episode()
    assert rem.num_episode() == 2
    rem.add_entry(np.zeros(2, np.float32), 0, 0.0, 1.0, 0.0, rem.info_buf, 1.0)
    assert rem.num_episode() == 1
    rem.close_episode()
    assert rem.num_episode() == 2


def test_eviction_takes_as_many_of_the_oldest_as_the_room_needs():
    rem = memory(max_step=12)
    for start in range(4):
        rem.new_episode()
        for t in range(3):
            rem.add_entry(np.zeros(2, np.float32), 10 * start + t, 0.0, 1.0, 0.0, rem.info_buf, 1.0)
        rem.close_episode()
    rem.new_episode()
    for t in range(4):
        rem.add_entry(np.zeros(2, np.float32), 100 + t, 0.0, 1.0, 0.0, rem.info_buf, 1.0)
        assert rem.num_episode() == (3 if t < 3 else 2)
    rem.close_episode()
    rem.priority_exponent = 0.0
    prev, _, _ = rem.get_batch(256)
    assert set(prev.action.tolist()) == {20, 21, 30, 31, 100, 101, 102}


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(2, 15), st.sampled_from([(), (1,), (3,), (2, 2)]))
def test_returns_and_weights_agree_with_slow_python(data, length, reward):
    """TD(lambda) per reward dimension; weight = init_w * multiplier * (sum coeff |qvest - value|) ** priority_exponent."""
    size = math.prod(reward)
    halves = st.integers(-8, 8).map(lambda each: each / 2)
    numbers = st.lists(halves, min_size=length * size, max_size=length * size)
    rewards = np.reshape(data.draw(numbers), (length, *reward))
    values = np.reshape(data.draw(numbers), (length, *reward))
    init_w = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=length, max_size=length)))
    gamma = np.reshape(data.draw(st.lists(st.floats(0, 1), min_size=size, max_size=size)), reward)
    coeff = np.reshape(data.draw(st.lists(st.floats(0, 3), min_size=size, max_size=size)), reward)
    lam, alpha = data.draw(st.floats(0, 1)), data.draw(st.sampled_from([0.0, 0.4, 1.0, 2.0]))
    multiplier = data.draw(st.sampled_from([0.5, 1.0, 4.0]))
    bootstrap = data.draw(st.none() | st.floats(-4, 4))

    rem = memory(reward=reward, discount_factor=gamma, reward_coeff=coeff, mix_lambda=lam, priority_exponent=alpha)
    ends = {} if bootstrap is None else {"bootstrap_value": np.full(reward, bootstrap, np.float32)}
    fill(rem, rewards, values, init_w, episodic_weight_multiplier=multiplier, **ends)

    returns = td_lambda(rewards, values, gamma, lam, bootstrap or 0.0)
    priority = (coeff * np.abs(returns - values)).reshape(length, -1).sum(axis=1)
    weights = init_w * multiplier * priority**alpha
    weights[-1] = 0.0  # the last entry has no next entry
    # The memory keeps returns as float32, and a small difference of two returns has few digits left.
    rounding = 3e-7 * (1.0 + np.abs(returns).max()) * coeff.sum()
    least, most = (init_w * multiplier * np.maximum(0.0, priority + sign * rounding) ** alpha for sign in (-1.0, 1.0))
    found = weights_by_position(rem)
    # a drawn entry has the right weight; an entry that is never drawn has almost no weight
    for position, weight in found.items():
        assert least[position] * (1.0 - 1e-4) - 1e-5 <= weight <= most[position] * (1.0 + 1e-4) + 1e-5
    for position in set(range(length)) - set(found):
        assert min(weights[position], least[position]) <= 1e-2 * weights.sum() + 1e-5
    if found:
        prev, _, _ = rem.get_batch(64)
        np.testing.assert_allclose(prev.qvest, returns[prev.action], rtol=1e-4, atol=1e-4)


def test_the_multiplier_scales_an_episodes_share_of_the_draws():
    rem = memory(priority_exponent=0.0, max_step=128)
    fill(rem, np.ones(11))
    rem.new_episode()
    for t in range(11):
        rem.add_entry(np.zeros(2, np.float32), 100 + t, 1.0, 1.0, 0.0, rem.info_buf, 1.0)
    rem.close_episode(3.0)
    prev, _, _ = rem.get_batch(40_000)
    share = (prev.action >= 100).mean()
    assert abs(share - 0.75) < 5 * math.sqrt(0.75 * 0.25 / 40_000)


@pytest.mark.parametrize("multiplier", [-1.0, math.nan, math.inf])
def test_a_wrong_multiplier_is_refused_and_the_episode_stays_open(multiplier):
    rem = memory()
    rem.new_episode()
    rem.add_entry(np.zeros(2, np.float32), 0, 0.0, 1.0, 0.0, rem.info_buf, 1.0)
    with pytest.raises(ParameterError, match="multiplier"):
        rem.close_episode(multiplier)
    assert rem.num_episode() == 0
    rem.close_episode()
    assert rem.num_episode() == 1


def test_do_update_value_off_leaves_qvest_zero():
    rem = memory(priority_exponent=1.0)
    fill(rem, [1.0, 2.0, 3.0], [5.0, 7.0, 9.0], do_update_value=False)
    prev, _, weight = rem.get_batch(64)
    assert not prev.qvest.any()
    np.testing.assert_allclose(weight, prev.value)  # |0 - value|
    fill(rem, [1.0, 2.0, 3.0], do_update_value=True)
    assert rem.get_batch(64)[0].qvest.any()


def test_do_update_weight_off_keeps_init_w_times_the_multiplier():
    rem = memory(multi_step=2, priority_exponent=1.0)
    fill(
        rem,
        [5.0, 6.0, 7.0, 8.0, 9.0],
        init_w=[0.5, 1.0, 2.0, 4.0, 8.0],
        episodic_weight_multiplier=3.0,
        do_update_weight=False,
    )
    expected = {0: 1.5, 1: 3.0, 2: 6.0}  # the last two entries have no entry two steps later
    assert weights_by_position(rem) == pytest.approx(expected)
    rem.priority_exponent = 0.3
    assert weights_by_position(rem) == pytest.approx(expected)
    rem.multi_step = 1
    assert set(weights_by_position(rem)) == {0, 1, 2, 3}


def test_closing_a_closed_episode_is_an_error():
    rem = memory()
    for _ in range(2):
        with pytest.raises(EpisodeClosedError, match=r"cannot close.*new_episode"):
            rem.close_episode()
        fill(rem, np.ones(2))


def test_closing_an_empty_episode_is_an_error():
    rem = memory()
    rem.new_episode()
    with pytest.raises(EmptyEpisodeError, match="no entries"):
        rem.close_episode()
    assert rem.num_episode() == 0
    rem.add_entry(np.zeros(2, np.float32), 0, 0.0, 1.0, 0.0, rem.info_buf, 1.0)
    rem.close_episode()
    assert rem.num_episode() == 1


def test_adding_to_a_closed_episode_is_an_error():
    rem = memory()
    entry = (np.zeros(2, np.float32), 0, 0.0, 1.0, 0.0, rem.info_buf, 1.0)
    with pytest.raises(EpisodeClosedError, match=r"cannot add.*new_episode"):
        rem.add_entry(*entry)
    fill(rem, np.ones(2))
    with pytest.raises(EpisodeClosedError):
        rem.add_entry(*entry)
    assert rem.num_episode() == 1


WRONG_ENTRIES = {
    "state": np.zeros(3, np.float32),
    "action": np.zeros(1, np.int64),
    "reward": "much",
    "prob": np.zeros(1, np.float32),
    "value": np.zeros(2, np.float32),
    "info": np.zeros(1, np.uint8),
}


@pytest.mark.parametrize("field", WRONG_ENTRIES)
def test_an_entry_that_does_not_match_is_refused_by_field(field):
    rem = memory()
    right = {"state": np.zeros(2, np.float32), "action": 0, "reward": 0.0, "prob": 1.0, "value": 0.0}
    right["info"] = rem.info_buf
    rem.new_episode()
    with pytest.raises(EntryError, match=f"'{field}'"):
        rem.add_entry(*{**right, field: WRONG_ENTRIES[field]}.values(), 1.0)
    assert rem.info()["num_entries"] == 0
    rem.add_entry(*right.values(), 1.0)
    rem.close_episode()


def test_an_episode_longer_than_max_step_is_refused_and_stays_as_it_was():
    rem = memory(max_step=5)
    rem.new_episode()
    for t in range(5):
        rem.add_entry(np.zeros(2, np.float32), t, 1.0, 1.0, 0.0, rem.info_buf, 1.0)
    with pytest.raises(EpisodeTooLong, match=r"5 entries.*memory larger"):
        rem.add_entry(np.zeros(2, np.float32), 5, 1.0, 1.0, 0.0, rem.info_buf, 1.0)
    rem.close_episode()
    prev, _, _ = rem.get_batch(64)
    assert set(prev.action.tolist()) == {0, 1, 2, 3}


def test_init_w_zero_is_never_drawn():
    rem = memory()
    fill(rem, np.ones(6), init_w=[1, 0, 1, 0, 1, 1])
    assert set(weights_by_position(rem)) == {0, 2, 4}


@pytest.mark.parametrize("init_w", [-1.0, math.nan, math.inf])
def test_a_wrong_init_w_is_refused(init_w):
    rem = memory()
    rem.new_episode()
    with pytest.raises((ParameterError, EntryError), match="init_w"):
        rem.add_entry(np.zeros(2, np.float32), 0, 0.0, 1.0, 0.0, rem.info_buf, init_w)
    assert rem.info()["num_entries"] == 0


def test_add_entries_is_the_same_as_one_by_one():
    rewards, values = np.arange(6, dtype=np.float32), np.arange(6, dtype=np.float32)[::-1].copy()
    one, many = memory(), memory()
    fill(one, rewards, values)
    many.new_episode()
    states = np.repeat(np.arange(6, dtype=np.float32)[:, None], 2, axis=1)
    many.add_entries(
        states, np.arange(6), rewards, np.full(6, 0.5, np.float32), values, np.zeros((6, 0), np.uint8), 1.0
    )
    many.close_episode()
    for each, other in zip(one.get_batch(32)[:2], many.get_batch(32)[:2], strict=True):
        for first, second in zip(each, other, strict=True):
            np.testing.assert_array_equal(first, second)
    assert one.num_episode() == many.num_episode() == 1


def test_several_episodes_may_be_open_side_by_side():
    rem = memory(max_step=512)
    for lane in range(3):
        rem.new_episode(lane=lane)
    for t in range(5):
        for lane in range(3):
            rem.add_entry(np.full(2, t, np.float32), 100 * lane + t, 1.0, 1.0, 0.0, rem.info_buf, 1.0, lane=lane)
    for lane in range(3):
        rem.close_episode(lane=lane)
    assert rem.num_episode() == 3
    prev, following, _ = rem.get_batch(256)
    np.testing.assert_array_equal(following.action, prev.action + 1)
    assert set((prev.action // 100).tolist()) == {0, 1, 2}


# ------------------------------------------------------------------------------------------ drawing from one process


def test_drawing_from_an_empty_memory_is_an_error():
    rem = memory()
    with pytest.raises(EmptyMemory, match="0 entries") as error:
        rem.get_batch(4)
    assert isinstance(error.value, RuntimeError)
    fill(rem, [1.0])  # an episode too short for one step
    with pytest.raises(EmptyMemory, match="frame_stack"):
        rem.get_batch(4)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5])
def test_the_batch_size_must_be_a_positive_whole_number(batch_size):
    rem = memory()
    fill(rem, np.ones(4))
    with pytest.raises(ParameterError, match="batch_size"):
        rem.get_batch(batch_size)


def test_a_batch_unpacks_in_three_and_carries_the_rest_as_attributes():
    rem = memory(importance_exponent=1.0, priority_exponent=1.0)
    fill(rem, [4.0, 2.0, 1.0, 1.0])
    batch = rem.get_batch(32)
    prev, following, weight = batch
    assert type(prev)._fields == type(following)._fields == FIELDS
    assert weight.shape == (32,)
    assert weight.dtype == np.float32
    for name in ("importance", "ids", "reward", "discount", "steps", "model_version", "age"):
        assert len(getattr(batch, name)) == 32
    np.testing.assert_allclose(batch.importance, weight.min() / weight, rtol=1e-5)  # beta 1: proportional to 1 / P
    assert (batch.age >= 0).all()


def test_an_entry_without_weight_is_never_drawn_whatever_the_rounding():
    rem = memory(max_step=4096, priority_exponent=0.0)
    rng = np.random.default_rng(3)
    init_w = np.where(rng.random(4000) < 0.5, 0.0, 10.0 ** rng.uniform(-6, 6, 4000))
    fill(rem, np.ones(4000), init_w=init_w)
    prev, _, weight = rem.get_batch(20_000)
    assert (weight > 0).all()
    assert (init_w[prev.action] > 0).all()


def test_weights_too_small_for_float32_are_drawn_and_corrected_like_others():
    rem = memory(priority_exponent=0.0, importance_exponent=1.0)
    fill(rem, np.ones(4), init_w=[1e-30, 2e-30, 4e-30, 1.0], episodic_weight_multiplier=1e-30)
    batch = rem.get_batch(256)
    assert set(batch.prev.action.tolist()) == {0, 1, 2}
    np.testing.assert_allclose(batch.importance, 0.5**batch.prev.action, rtol=1e-5)


def test_draws_are_proportional_to_weight():
    stats = pytest.importorskip("scipy.stats")
    rem = memory(priority_exponent=0.0, seed=11)
    init_w = np.array([1, 2, 3, 4, 0, 6, 7, 8, 1])
    fill(rem, np.ones(9), init_w=init_w)
    prev, _, _ = rem.get_batch(50_000)
    counts = np.bincount(prev.action, minlength=9)
    expected = np.where(np.arange(9) < 8, init_w, 0) / init_w[:8].sum() * 50_000
    assert counts[4] == counts[8] == 0
    drawn = expected > 0
    assert stats.chisquare(counts[drawn], expected[drawn]).pvalue > 1e-4


def test_learned_priorities_replace_the_ones_computed_at_close():
    rem = memory(priority_exponent=1.0)
    fill(rem, np.ones(5))
    batch = rem.get_batch(64)
    applied, stale = rem.update_priorities(batch.ids, np.where(batch[0].action == 2, 9.0, 1.0))
    assert applied + stale <= 64
    assert stale == 0
    assert weight_of(rem, 2) == pytest.approx(9.0, rel=1e-5)


def test_the_sum_of_an_open_episodes_rewards_is_known():
    rem = memory(reward=(2,))
    assert rem.memory.open_return().tolist() == [0.0, 0.0]
    rem.new_episode()
    for t in range(5):
        rem.add_entry(np.zeros(2, np.float32), t, np.array([t, -1], np.float32), 1.0, np.zeros(2), rem.info_buf, 1.0)
    assert rem.memory.open_return().tolist() == [10.0, -5.0]
    rem.close_episode()
    assert rem.memory.open_return().tolist() == [0.0, 0.0]
