"""Schemas and parameters: accepted values, and refusals by name."""

import json
import pickle
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import example, given
from hypothesis import strategies as st

from memoire import Buffer
from memoire.errors import MemoireError, ParameterError, SchemaError, UnknownName
from memoire.replay.columns import Column
from memoire.replay.conversion import checked_page_rows
from memoire.replay.parameters import ADDED, NAMES, Parameters
from memoire.replay.schema import Schema

# --- Schemas: equal descriptions in each process, and refusals of unsuitable columns by name

SEVEN = {
    "state": (np.float32, (4,)),
    "action": np.int64,
    "reward": (np.float32, (2,)),
    "prob": np.float32,
    "value": (np.float32, (2,)),
    "qvest": (np.float32, (2,)),
    "info": (np.uint8, (0,)),
}
NESTED = {
    "obs": spaces.Dict(
        image=spaces.Box(0, 255, (4, 4, 3), np.uint8),
        arm=spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(5)]),
    ),
    "action": spaces.MultiDiscrete([3, 4]),
    "reward": np.float32,
}


def test_roles_follow_from_names_unless_a_column_says_otherwise() -> None:
    schema = Schema(SEVEN)
    assert schema.names == tuple(SEVEN)
    assert schema.entry_names == ("state", "action", "reward", "prob", "value", "info")
    assert (schema.states, schema.reward, schema.value, schema.qvest) == (("state",), "reward", "value", "qvest")
    other = Schema({"x": Column(np.uint8, 3, "state"), "value": Column(np.int8), "r": Column(np.float32, (), "reward")})
    assert (other.states, other.reward, other.value, other.qvest) == (("x",), "r", None, None)
    assert other["x"].shape == (3,)


def test_nested_observations_become_one_column_for_each_leaf() -> None:
    schema = Schema(NESTED)
    assert schema.leaves("obs") == ("obs.image", "obs.arm.0", "obs.arm.1", "obs.arm.2")
    assert schema.states == schema.leaves("obs")
    assert schema.roots == ("obs", "action", "reward")
    assert [str(schema[name]) for name in schema.names] == [
        "uint8[4, 4, 3]", "int64", "float32[2]", "int8[5]", "int64[2]", "float32",
    ]  # fmt: skip
    sample = NESTED["obs"].sample()
    leaves = schema.flatten("obs", sample)
    assert leaves[1] is sample["arm"][0] and leaves[0] is sample["image"]
    back = schema.nest("obs", dict(zip(schema.leaves("obs"), leaves, strict=True)))
    assert back.keys() == sample.keys() and isinstance(back["arm"], tuple) and back["image"] is sample["image"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "no column is a state (the columns are none). Call one 'obs' or 'state'"),
        ({"action": np.int64}, "no column is a state (the columns are action)"),
        ({"obs": object}, "column 'obs' has dtype object, but only booleans, integers and floats"),
        ({"obs": "U5"}, "column 'obs' has dtype <U5"),
        ({"obs": np.complex64}, "column 'obs' has dtype complex64"),
        ({"obs": np.longdouble}, "column 'obs' has dtype"),
        ({"obs": "floaty"}, "column 'obs': 'floaty' is not a dtype"),
        ({"obs": 0.5}, "column 'obs' was declared as 0.5, a value of type float. Give a Column, a dtype"),
        ({"obs": None}, "column 'obs' was declared as None"),
        ({"obs": [np.float32]}, "a value of type list. Give a Column"),
        ({"obs": (np.float32, (-1,))}, "column 'obs.1.0' was declared as -1"),
        ({"obs": (np.float32, (1,) * 9)}, "column 'obs' has 9 axes, more than 8"),
        ({"obs": (np.float64, (3000, 3000))}, "an entry has 72000000 bytes, more than 67108864. The largest column is 'obs'"),
        ({"obs": {}}, "column 'obs' is nested but has nothing in it"),
        ({"obs": {"a.b": np.int8}}, "column 'a.b' (in 'obs'): dots separate nested names. Write {'a': {'b': ...}}, or"),
        ({"obs.x.y": np.int8}, "Write {'obs': {'x': {'y': ...}}}, or rename it 'obs_x_y'"),
        ({"obs": np.int8, "a.": np.int8}, "column 'a.': dots separate"),
        ({"obs": {3: np.int8}}, "column names are strings, got 3 (in 'obs')"),
        ({"obs": np.int8, "": np.int8}, "column '': a name is 1 to 200"),
        ({"obs": np.int8, 5: np.int8}, "column names are strings, got 5. Write '5'"),
        ({"obs": np.int8, "next_obs": np.int8}, "column 'next_obs': a batch uses this name itself"),
        ({"obs": np.int8, "weight": np.int8}, "column 'weight': a batch uses this name itself. Choose another"),
        ({"obs": np.int8, "reward": np.float64}, "column 'reward' has role 'reward' and dtype float64, but must be float32"),
        ({"obs": np.int8, "reward": Column(np.float64)}, "column 'reward' must have role 'reward'"),
        ({"obs": np.int8, "value": np.float32}, "column 'value' needs a reward column beside it"),
        ({"obs": np.int8, "reward": np.float32, "qvest": np.float32}, "column 'qvest' needs a value column beside it"),
        (
            {"obs": np.int8, "reward": np.float32, "value": (np.float32, (1,))},
            "column 'value' has shape (1,), but the reward 'reward' has ()",
        ),
        (
            {"obs": np.int8, "reward": np.float32, "value": np.float32, "qvest": Column(np.float32)},
            "column 'qvest' is plain, but a value column needs a return column",
        ),
        (
            {"obs": np.int8, "a": Column(np.float32, (), "reward"), "b": Column(np.float32, (), "reward")},
            "the columns 'a', 'b' all have role 'reward', but only one may have it",
        ),
        ({"obs": np.int8, "a": {"r": Column(np.float32, (), "reward")}}, "column 'a.r' has role 'reward', so it cannot be nested"),
        ({"obs": spaces.Dict(a=spaces.Sequence(spaces.Text(3)))}, "column 'obs.a': the space Sequence"),
        ({"obs": spaces.OneOf([spaces.Discrete(3)])}, "column 'obs': the space OneOf"),
        ({"obs": np.int8} | {f"c{i}": np.int8 for i in range(1024)}, "1025 columns are more than 1024"),
        ([("obs", np.int8)], "a schema is made of a mapping from name to column, got list"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_refused_by_name(columns: Any, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        Schema(columns)
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Column(np.int8, (2, -1)), r"\(2, -1\) is not a shape"),
        (lambda: Column(np.int8, 2.5), r"2\.5 is not a shape"),  # type: ignore[arg-type]
        (lambda: Column(np.int8, (True,)), r"\(True,\) is not a shape"),
        (lambda: Column(np.int8, (), "action"), "'action' is not a role of a column. The roles are state, reward, value, return, plain"),
        (lambda: Column("f3"), "'f3' is not a dtype"),
    ],
)  # fmt: skip
def test_a_column_that_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        make()


@pytest.mark.parametrize(
    ("names", "tuples", "words"),
    [
        (["obs", "obs.a"], [], "another column|contains other columns"),
        (["obs.a", "obs"], [], "another column|contains other columns"),
        (["a.0", "a.1", "b.x"], ["c"], "'c' is listed as a tuple, but no column"),
        (["a.0", "a.1", "b.x"], ["a.0"], "'a.0' is listed"),
        (["a.0", "a.1", "b.x"], ["b"], "its parts are named x"),
    ],
)
def test_names_that_do_not_make_one_nesting_are_refused(names: list[str], tuples: list[str], words: str) -> None:
    rows = [[name, "<f4", [], "state"] for name in names]
    with pytest.raises(SchemaError, match=words):
        Schema.from_json({"columns": rows, "tuples": tuples})


def test_flatten_says_what_is_missing() -> None:
    schema = Schema(NESTED)
    with pytest.raises(SchemaError, match=r"needs 'image' \(for 'obs\.image'\), but got a dict without 'image'"):
        schema.flatten("obs", {"arm": (1, 2, 3)})
    with pytest.raises(SchemaError, match=r"needs 2 \(for 'obs\.arm\.2'\), but got a tuple without 2"):
        schema.flatten("obs", {"arm": (1, 2), "image": 0})
    for value in ({"x": 1}, 7, None, np.zeros(2)):
        with pytest.raises(SchemaError, match="needs 'image'"):
            schema.flatten("obs", value)
    with pytest.raises(SchemaError, match="'state' is not in the schema, which has obs, action, reward"):
        schema.flatten("state", 0)


# ------------------------------------------------------------------------------------------- environments


class Env:
    """Environment with the two attributes that `from_env` reads."""

    def __init__(self, observation: Any, action: Any) -> None:
        self.observation_space, self.action_space = observation, action


def test_the_schema_of_an_environment_has_its_spaces_and_a_reward() -> None:
    schema = Schema.from_env(gym.make("CartPole-v1"), extra={"logp": np.float32})
    assert {name: str(column) for name, column in schema.items()} == {
        "obs": "float32[4]", "action": "int64", "reward": "float32", "logp": "float32",
    }  # fmt: skip
    assert schema.reward == "reward" and schema.states == ("obs",)


def test_float64_is_stored_as_float32_unless_it_is_asked_for() -> None:
    box = spaces.Box(-1, 1, (2,), np.float64)
    env = Env(spaces.Dict(a=box, b=spaces.Tuple([box, spaces.Box(0, 9, (1,), np.int16)])), box)
    assert {str(column.dtype) for column in Schema.from_env(env).values()} == {"float32", "int16"}
    kept = Schema.from_env(env, extra={"note": np.float64}, keep_float64=True)
    assert [str(column.dtype) for column in kept.values()] == [
        "float64",
        "float64",
        "int16",
        "float64",
        "float32",
        "float64",
    ]
    assert Schema.from_env(env, extra={"note": np.float64})["note"].dtype == np.float64, "extras are as declared"


@pytest.mark.parametrize("root", ["obs", "action"])
@pytest.mark.parametrize("keys", [(0, 1), ("observation.state", "observation.images.top"), (("a", 0), "b")])
def test_keys_that_are_no_names_are_refused_with_the_line_that_renames_them(root: str, keys: Any) -> None:
    named = spaces.Dict(dict(zip(keys, (spaces.Box(0, 1, (2,)), spaces.Discrete(3)), strict=True)))
    obs_and_action: Any = (named, spaces.Discrete(2)) if root == "obs" else (spaces.Box(0, 1, (2,)), named)

    class Played(gym.Env[Any, Any]):
        observation_space, action_space = obs_and_action

        def reset(self, **_: Any) -> Any:
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> Any:
            assert self.action_space.contains(action)
            return self.observation_space.sample(), 1.0, True, False, {}

    with pytest.raises(SchemaError, match=f"column '{root}': the Dict space has the key .*text without dots") as caught:
        Schema.from_env(Played())
    names: dict[str, Any] = {"env": Played(), "gymnasium": gym}
    exec(str(caught.value).partition("Rename its keys: ")[2], names)  # noqa: S102
    env = names["env"]
    buffer = Buffer(Schema.from_env(env), 10)
    writer, (obs, _) = buffer.writer(env), env.reset()
    action = env.action_space.sample()
    writer.step(obs, action, *env.step(action)[1:4], env.reset()[0])
    assert len(buffer.sample(2).ids) == 2


def test_extras_make_values_and_vector_rewards_of_an_environment_and_of_nothing_else() -> None:
    env = Env(spaces.Box(0, 1, (2,)), spaces.Discrete(4))
    schema = Schema.from_env(env, extra={"value": (np.float32, (2,)), "mask": spaces.MultiBinary(4)}, reward_shape=(2,))
    assert (schema.value, schema.qvest, schema["reward"].shape) == ("value", "qvest", (2,))
    with pytest.raises(SchemaError, match="extra column 'action': the environment has one of this name already"):
        Schema.from_env(env, extra={"action": np.int8})
    with pytest.raises(SchemaError, match="int has no observation_space. Give a Gymnasium environment"):
        Schema.from_env(5)


# ------------------------------------------------------------------------------------- wire form, fingerprint


def test_fingerprints_and_the_wire_form_never_change() -> None:
    """Nodes of other versions must compute the same numbers."""
    assert Schema(SEVEN).fingerprint == 0x47BD97E00AF1B99C
    assert Schema(NESTED).fingerprint == 0x232C1DB7FC3AF032
    assert Schema(NESTED).to_json() == (
        '{"columns":[["obs.image","|u1",[4,4,3],"state"],["obs.arm.0","<i8",[],"state"],["obs.arm.1","<f4",[2],"state"],'
        '["obs.arm.2","|i1",[5],"state"],["action","<i8",[2],"plain"],["reward","<f4",[],"reward"]],"tuples":["obs.arm"]}'
    )


scalars = st.sampled_from(["?", "i1", "<u2", ">i4", "<u8", "<f2", ">f4", "<f8"])
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
plain = st.builds(Column, scalars, shapes)
names = st.text("abcXYZ_0é", min_size=1, max_size=4).filter(lambda name: name not in ("obs", "reward"))
nestings = st.recursive(
    plain, lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3) | st.tuples(inner, inner), max_leaves=5
)
schemas = st.builds(
    lambda state, more: Schema({"obs": state, **more}),
    nestings.map(lambda n: _with_state(n)),
    st.dictionaries(names, nestings, max_size=3),
)


def _with_state(nesting: Any) -> Any:
    if isinstance(nesting, Column):
        return Column(nesting.dtype, nesting.shape, "state")
    if isinstance(nesting, dict):
        return {key: _with_state(part) for key, part in nesting.items()}
    return tuple(map(_with_state, nesting))


@given(schemas)
def test_a_schema_survives_its_wire_form(schema: Schema) -> None:
    for again in (
        Schema.from_json(schema.to_json()),
        Schema.from_json(json.loads(schema.to_json())),
        pickle.loads(pickle.dumps(schema)),
    ):
        assert again == schema and hash(again) == hash(schema)
        assert list(again.items()) == list(schema.items())
        assert (again.states, again.roots, again.entry_bytes) == (schema.states, schema.roots, schema.entry_bytes)
        values = dict(zip(schema.names, range(len(schema.names)), strict=True))
        for root in schema.roots:
            nested = again.nest(root, values)
            assert nested == schema.nest(root, values)
            assert list(again.flatten(root, nested)) == [values[name] for name in schema.leaves(root)]


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["columns", "tuples"]), inner),
    max_leaves=12,
)
almost = st.fixed_dictionaries(
    {
        "columns": st.lists(
            st.tuples(
                names | st.just("obs.a"),
                scalars | st.text(max_size=5),
                st.lists(st.integers() | st.floats(), max_size=2),
                junk,
            ),
            max_size=3,
        )
    },
    optional={"tuples": junk},
)


@given(junk | almost | st.text() | junk.map(json.dumps) | st.binary(max_size=20))
@example({"columns": [["obs", "(9999999999999,)f4", [], "state"]]})
@example({"columns": [["obs", "a", [], "state"]]})
@example({"columns": [["obs", "f4,", [], "state"]]})
@example({"columns": [["obs", "<f4", [10**30], "state"]]})
@example({"columns": [["obs", "<f4", [], "state"], ["obs", "<f4", [], "state"]]})
@example({"columns": [["obs", "<f4", [], "state"]], "tuples": ["obs"]})
@example({"columns": [["obs.a", "<f4", [], "state"]], "tuples": ["obs"]})
@example("[" * 100_000)
def test_only_a_schema_error_comes_out_of_bad_json(text: Any) -> None:
    try:
        Schema.from_json(text)
    except MemoireError as error:
        assert isinstance(error, SchemaError)


# --- Parameters: accepted values, refused values, and texts of the refusals


NAN, INF = float("nan"), float("inf")
OUTSIDE = [
    (("priority_exponent", "importance_exponent", "mix_lambda", "samples_per_insert"), [-0.1, NAN, INF, True, "1", None, [0.5]]),
    (("frame_stack", "multi_step", "cache_size"), [0, -1, 1.0, True, "2", 2**40]),
    (("max_episode", "max_model_lag", "min_size"), [-1]),
    (("max_times_sampled",), [1.5]),
    (("discount", "reward_coeff"), [[], -0.1, [0.5, NAN], "0.5", [0.5, None]]),
    (("prev",), ["state", 3, ["a", "a"], [1]]),
    (("start", "normalize", "compression"), ["other"]),
    (("samples_per_insert", "samples_per_insert_tolerance"), [1e300]),
    (("samples_per_insert_tolerance",), [0.5]),
    (("max_age",), [0.0, -1.0]),
    (("model_topic",), [""]),
]  # fmt: skip
"""Values that a parameter cannot have."""
APART = [
    ({"multi_step": 2, "sequence_length": 4}, "multi_step must be 1 if sequences are drawn"),
    ({"sequence_overlap": 4, "sequence_length": 4}, "sequence_overlap must be a whole number from 0 to 3"),
    ({"burn_in": 4, "sequence_length": 4}, "burn_in must be a whole number from 0 to 3"),
    ({"sequence_length": -1}, "sequence_length must be a whole number"),
    ({"sequence_length": 4, "sequence_max_share": 1.5}, "sequence_max_share must be"),
    ({"samples_per_insert": 1e-300, "samples_per_insert_tolerance": 3.0}, "samples_per_insert must be at least 1.1"),
    ({"samples_per_insert_tolerance": 3.0, "samples_per_insert": 4.0}, "at least 4"),
    ({"samples_per_insert_tolerance": 3.0, "samples_per_insert": 0.0}, "samples_per_insert must be at least 1.1"),
    ({"max_times_sampled": 2, "samples_per_insert": 3.0}, "samples_per_insert must be at most max_times_sampled, 2"),
]
"""Combinations of parameters that are refused, with the text of the error."""


@pytest.mark.parametrize(
    ("fields", "words"),
    [({name: value}, f"^{name} must be ") for names, values in OUTSIDE for name in names for value in values] + APART,
)
def test_parameters_that_cannot_be_are_refused_by_name(fields, words):
    with pytest.raises(ParameterError, match=rf"{words}.*, got .*\. Nothing was changed"):
        Parameters(**fields)


def test_replace_checks_and_refuses_unknown_names():
    assert Parameters().replace(multi_step=3).multi_step == 3
    with pytest.raises(ParameterError, match="multi_step"):
        Parameters().replace(multi_step=0)
    with pytest.raises(ParameterError, match="Parameters takes no .gamma.. Did you mean .discount"):
        Parameters().replace(gamma=0.9)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_setting_under_another_name_is_refused_by_name_and_does_not_fall_back_to_its_default(name):
    fields = Parameters().to_wire()
    fields[f"{name}_x"] = value = fields.pop(name)
    with pytest.raises(UnknownName, match=f"takes no '{name}_x'.*saved or sent it, as .*'{name}'") as refused:
        Parameters.from_wire(fields)
    assert repr(value) in str(refused.value)
    del fields[f"{name}_x"]
    with pytest.raises(ParameterError, match=f"The saved or sent settings lack {name}; they have"):
        Parameters.from_wire(fields)


@dataclass(frozen=True)
class Newer(Parameters):
    """Parameters of a later version with one more field."""

    horizon: int = field(default=0, metadata=ADDED)


def test_versions_work_together_until_a_setting_is_used_that_one_of_them_does_not_know():
    assert Parameters.from_wire(Newer(multi_step=3).to_wire()) == Parameters(multi_step=3)
    assert Newer.from_wire(Parameters(multi_step=3).to_wire()) == Newer(multi_step=3)
    with pytest.raises(UnknownName, match="horizon.*as 5"):
        Parameters.from_wire(Newer(horizon=5).to_wire())
    assert Newer.from_wire(Newer(horizon=5).to_wire()) == Newer(horizon=5)


# --- Settings of the engine that follow from parameters and columns


def test_pages_are_small_beside_the_memory_and_a_power_of_two() -> None:
    assert [checked_page_rows(None, capacity) for capacity in (1, 4096, 8192, 3 * 4096, 10**9)] == [1, 1, 2, 2, 256]
    assert checked_page_rows(64, 10) == 64
    for wrong in (0, -4, 3):
        with pytest.raises(ParameterError, match="page_rows must be a power of two"):
            checked_page_rows(wrong, 10)
