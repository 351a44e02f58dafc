"""A usual step takes one call of the engine: it stores, counts and refuses just what the long way does."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memoire.errors import MemoireError
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.schema import Schema
from memoire.replay.writer import Writer

N = 3
STATE = (2,)


class LongWay:
    """A memory that the engine does not know: its writer takes every step the long way."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)


class Heard(list):
    def on_entries(self, count: int) -> None:
        self.append(count)

    def on_episode(self, lane: int, length: int, return_: Any) -> None:
        self.append((lane, length, return_.tolist()))


class Both:
    """The same steps into two memories."""

    def __init__(self, schema: Schema, environments: int | None, *, check: bool = True, capacity: int = 24) -> None:
        self.memories = [Memory(schema, capacity, live=True, seed=0) for _ in range(2)]
        stores = [self.memories[0], LongWay(self.memories[1])]
        self.heard = [Heard(), Heard()]
        self.writers = [
            Writer(store, environments, "disabled", heard, longest=5, check=check)
            for store, heard in zip(stores, self.heard, strict=True)
        ]
        for memory in self.memories:
            memory.set_clock(0.0)
        assert self.writers[0]._usual is not None and self.writers[1]._usual is None

    def step(self, arguments: dict[str, Any]) -> str:
        """Both writers' answer: what was refused, or nothing."""
        answers = []
        for writer in self.writers:
            try:
                writer.step(**arguments)
                answers.append("")
            except (MemoireError, ValueError, TypeError) as error:
                answers.append(f"{type(error).__name__}: {error}")
        assert answers[0] == answers[1]
        self.compare()
        return answers[0]

    def reset(self, obs: Any) -> None:
        for writer in self.writers:
            writer.reset(obs)
        self.compare()

    def compare(self) -> None:
        one, two = (memory.contents() for memory in self.memories)
        for name in ("meta", "pages", "lanes", "episodes", "bootstraps", "weights"):
            np.testing.assert_array_equal(one[name], two[name], name)
        for name in ("columns", "finals"):
            for a, b in zip(one[name], two[name], strict=True):
                np.testing.assert_array_equal(a, b)
        for name in ("_clock", "_room", "_owned", "_began", "_opened", "_returns"):
            np.testing.assert_array_equal(*(getattr(writer, name) for writer in self.writers), err_msg=name)
        assert self.writers[0]._last is self.writers[1]._last
        assert self.heard[0] == self.heard[1]


def schema_of(reward: tuple[int, ...]) -> Schema:
    return Schema(
        {
            "obs": Column("float32", STATE, "state"),
            "action": np.int64,
            "reward": Column("float32", reward, "reward"),
            "terminated": np.bool_,
            "note": np.uint8,
        }
    )


REWARDS: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "int": np.int64,
    "list": lambda values: np.asarray(values).tolist(),
    "axes": lambda values: np.asarray(values)[..., None],
    "strided": lambda values: np.stack([values, values], axis=-1)[..., 0],
    "huge": lambda values: np.float64(values) * 1e300,
    "nan": lambda values: np.float32(values) * np.float32(np.nan),
    "wrong": lambda values: np.zeros((2, 2)),
}
OBSERVATIONS: dict[str, Any] = {
    "exact": np.float32,
    "double": np.float64,
    "strided": lambda values: np.asfortranarray(np.float32(values)),
    "text": lambda values: "obs",
    "wide": lambda values: np.zeros((7, 7), np.float32),
}
FLAGS: dict[str, Any] = {"array": np.bool_, "list": lambda values: np.bool_(values).tolist(), "int": np.uint8}
STEPS = st.fixed_dictionaries(
    {
        "reward": st.sampled_from([*["float64"] * 4, *REWARDS]),
        "obs": st.sampled_from([*["exact"] * 6, *OBSERVATIONS]),
        "flags": st.sampled_from([*["array"] * 4, *FLAGS]),
        "terminated": st.sampled_from([0, 0, 0, 0, 0, 1, 5]),
        "truncated": st.sampled_from([0, 0, 0, 0, 0, 2, 7]),
        "how": st.sampled_from([*["fresh"] * 6, "same", "copied", "torn", "view", "reset"]),
        "init_w": st.sampled_from([1.0, 1.0, 1.0, 2, 0.0, -1.0, np.float32(3.0), np.inf]),
        "model_version": st.sampled_from([0, 0, 7, np.int64(3)]),
        "note": st.sampled_from(["array", "array", "wide", "missing", "extra"]),
    }
)


class Environment:
    """Makes the arguments of steps that fit each other, in the form that is asked for."""

    def __init__(self, environments: int | None, reward: tuple[int, ...]) -> None:
        self.lead = () if environments is None else (environments,)
        self.reward = reward
        self.t = 0
        self.obs = self.at(0)

    def at(self, t: int) -> Any:
        return np.full((*self.lead, *STATE), t, np.float32)

    def flags(self, bits: int, form: str) -> Any:
        flags = FLAGS[form]((bits >> np.arange(N)) & 1 == 1)
        return flags if self.lead else bool(flags[0])

    def step(self, how: dict[str, Any]) -> dict[str, Any]:
        self.t += 1
        obs = OBSERVATIONS[how["obs"]](self.obs) if how["obs"] != "exact" else self.obs
        obs = {"copied": lambda: np.array(obs), "torn": lambda: self.at(-1)}.get(how["how"], lambda: obs)()
        self.obs = self.obs if how["how"] == "same" else self.at(self.t)
        if how["how"] == "view":
            self.obs = self.obs[...]
        rewards = REWARDS[how["reward"]](np.full((*self.lead, *self.reward), self.t + 0.1))
        note: Any = np.full(self.lead, self.t % 200, np.uint8)[()]
        extras = {"array": {"note": note}, "wide": {"note": np.int64(note)}, "extra": {"note": note, "more": 1}}
        return {
            "obs": obs,
            "action": np.full(self.lead, self.t)[()],
            "reward": rewards,
            "terminated": self.flags(how["terminated"], how["flags"]),
            "truncated": self.flags(how["truncated"], how["flags"]),
            "next_obs": self.obs,
            "init_w": how["init_w"],
            "model_version": how["model_version"],
            **extras.get(how["note"], {}),
        }


@pytest.mark.parametrize("environments", [None, 1, N])
@pytest.mark.parametrize("reward", [(), (2,)])
@given(steps=st.lists(STEPS, max_size=20), check=st.booleans())
@settings(deadline=None, max_examples=20)
def test_a_usual_step_does_what_the_long_way_does(environments: Any, reward: Any, steps: Any, check: bool) -> None:
    both, environment = Both(schema_of(reward), environments, check=check), Environment(environments, reward)
    for how in steps:
        if how["how"] == "reset":
            both.reset(environment.obs)
        both.step(environment.step(how))


@pytest.mark.parametrize("environments", [None, N])
def test_steps_of_a_plain_environment_are_usual(environments: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"reward": "float64", "obs": "exact", "flags": "array", "terminated": 0, "truncated": 0, "how": "fresh"}
    usual |= {"init_w": 1.0, "model_version": 0, "note": "array"}
    memory = Memory(schema_of(()), 100, live=True)
    writer, environment = Writer(memory, environments), Environment(environments, ())
    monkeypatch.setattr(Writer, "_record", None)  # nothing goes the long way
    writer.longest, writer._room = 50, 50
    for _ in range(20):
        writer.step(**environment.step(usual))
    assert memory.num_entries == 20 * (environments or 1)
    memory.check_invariants()


def test_large_steps_leave_the_memory_to_other_threads_while_they_are_copied() -> None:
    schema = Schema({"obs": Column("uint8", (300, 300), "state"), "action": np.int64, "reward": np.float32})
    both = Both(schema, N)
    frames = np.random.default_rng(0).integers(0, 256, (8, N, 300, 300), dtype=np.uint8)
    never = np.zeros(N, np.bool_)
    seen = [frame.copy() for frame in frames]
    for obs, following in zip(seen, seen[1:], strict=False):
        step = {"obs": obs, "next_obs": following, "action": np.arange(N), "reward": np.ones(N)}
        assert both.step(step | {"terminated": never, "truncated": never}) == ""
    assert both.memories[0].num_entries == 7 * N


def test_a_step_waits_for_whoever_holds_the_memory() -> None:
    both = Both(schema_of(()), None)
    environment = Environment(None, ())
    usual = {"reward": "float64", "obs": "exact", "flags": "array", "terminated": 0, "truncated": 0, "how": "fresh"}
    usual |= {"init_w": 1.0, "model_version": 0, "note": "array"}
    with both.memories[0].held():
        assert both.step(environment.step(usual)) == ""  # this thread's own hold: added the long way
    assert both.memories[0].num_entries == 1
