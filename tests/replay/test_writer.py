"""Stored transitions, identified by their content: none crosses a reset, and final states are the true ones."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from coded_env import KINDS, CodedEnv, EnvironmentPool, Place, action_at, decode, drive, part_of, reward_at
from memoire.client.episodes import RolloutWriter
from memoire.errors import (
    EntryError,
    EpisodeTorn,
    FinalObservationMissing,
    MemoireError,
    NotFinite,
    ObservationReused,
    ParameterError,
    SchemaError,
)
from memoire.replay import dataset
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.schema import Schema
from memoire.replay.steps import AUTORESET, autoreset_mode, layout
from memoire.replay.writer import Writer
from memory_checks import LongWay, RecordingObserver

ENDS = ("terminated", "truncated", "both")
MODES = tuple(AutoresetMode)


def coded_fns(
    kind: str, lengths: Sequence[Sequence[int]], ends: Sequence[Sequence[str]]
) -> list[Callable[[], gym.Env]]:
    return [partial(CodedEnv, i, *each, kind) for i, each in enumerate(zip(lengths, ends, strict=True))]


def by_environment(memory: Memory, kind: str) -> dict[int, list[tuple[dataset.Episode, list[Place]]]]:
    """Return the episodes of each environment, oldest first, with the places of their entries."""
    episodes = defaultdict(list)
    for episode in dataset.episodes(memory):
        leaves = [episode.columns[name] for name in memory.schema.leaves("obs")]
        places = [decode(kind, entry) for entry in zip(*leaves, strict=True)]
        episodes[places[0][0]].append((episode, places))
    return episodes


def check_by_content(
    memory: Memory, observer: RecordingObserver, kind: str, lengths: Any, ends: Any, steps: int, mode: str
) -> None:
    """Check each environment's episodes: 0, 1, 2 ..., whole, in order, with true ends, and reported to the observer."""
    episodes = by_environment(memory, kind)
    for lane in range(len(lengths)):
        left, expected = steps, []
        for k, (episode, places) in enumerate(episodes[lane]):
            length, end = lengths[lane][k % len(lengths[lane])], ends[lane][k % len(ends[lane])]
            assert places == [(lane, k, t) for t in range(left if episode.is_open else length)]
            rewards = [reward_at(place) for place in places]
            np.testing.assert_array_equal(episode.columns["action"], [action_at(place) for place in places])
            np.testing.assert_array_equal(episode.columns["reward"], np.float32(rewards))
            left -= len(places) + (mode == "next_step" and left > len(places))
            if not episode.is_open:
                assert decode(kind, list(episode.final_state.values())) == (lane, k, length)
                assert episode.terminated is (end != "truncated")
                expected.append((lane, length, pytest.approx(sum(rewards), abs=1e-12)))
        assert left == 0, "a step was lost or made up"
        assert [each for each in observer.episodes if each[0] == lane] == expected
    assert observer.entries == memory.num_entries


some_episodes = st.lists(st.tuples(st.integers(1, 4), st.sampled_from(ENDS)), min_size=1, max_size=5)


def check_steps(vector: Any, mode: Any, kind: str, episodes: Any, steps: int) -> None:
    """Drive environments whose episodes have these lengths and ends, and check the stored episodes."""
    lengths, ends = ([[each[part] for each in own] for own in episodes] for part in (0, 1))
    envs = vector(coded_fns(kind, lengths, ends), autoreset_mode=mode)
    try:
        memory, observer = Memory(Schema.from_env(envs), 1000, live=True), RecordingObserver()
        writer = Writer(memory, *layout(envs), observer=observer)
        assert writer.autoreset == autoreset_mode(mode)
        for _ in drive(envs, writer, memory.schema, kind, steps):
            pass
        check_by_content(memory, observer, kind, lengths, ends, steps, writer.autoreset)
    finally:
        envs.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "set"])  # sets cannot lie in shared memory
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_every_stored_transition_of_processes_is_a_true_one(mode: AutoresetMode, kind: str) -> None:
    one = [(1, "terminated"), (1, "truncated"), (3, "terminated"), (2, "truncated")]
    other = [(2, "both"), (2, "truncated"), (1, "terminated"), (4, "both")]
    check_steps(AsyncVectorEnv, mode, kind, [one, other], 40)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MODES), st.sampled_from(KINDS), st.lists(some_episodes, min_size=1, max_size=4), st.integers(1, 25)
)
def test_any_pattern_of_ends_is_stored_right(mode: Any, kind: str, episodes: list[Any], steps: int) -> None:
    check_steps(SyncVectorEnv, mode, kind, episodes, steps)


# ------------------------------------------------------------------------------------------- steps by hand

N = 3
HAND = Schema(
    {"obs": (np.float32, (2,)), "action": np.int64, "reward": np.float32, "value": np.float32, "note": np.uint8}
)


class Hand:
    """Vector environment of three, whose ends a test chooses and whose obs counts the steps."""

    def __init__(self, mode: str = "disabled", schema: Schema = HAND, **options: Any) -> None:
        self.memory, self.observer = Memory(schema, 1000, live=True), RecordingObserver()
        self.writer = Writer(self.memory, N, mode, self.observer, **options)
        self.t = 0
        self.obs = self.at(0)

    @property
    def open_lengths(self) -> list[int]:
        return [self.memory.open_length(lane) for lane in range(N)]

    @property
    def closed(self) -> list[dataset.Episode]:
        return [episode for episode in dataset.episodes(self.memory) if not episode.is_open]

    def at(self, t: int) -> np.ndarray:
        return np.stack([np.full(2, 100 * i + t, np.float32) for i in range(N)])

    def step(self, terminal: Sequence[int] = (), cut: Sequence[int] = (), **changes: Any) -> None:
        flags = [np.isin(np.arange(N), which) for which in (terminal, cut)]
        next_obs = self.at(self.t + 1)
        args = {"obs": self.obs, "action": np.arange(N), "reward": np.full(N, 0.5), "terminated": flags[0]}
        args |= {"truncated": flags[1], "next_obs": next_obs, "info": {}}
        args |= {"value": np.full(N, self.t, np.float32), "note": [1, 2, 3]}
        args |= changes
        for name in [name for name, value in args.items() if value is None]:
            del args[name]
        self.writer.step(**args)
        self.t, self.obs = self.t + 1, args["next_obs"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"note": None},
            "step() needs note=..., a value of uint8. The entry was not added.",
        ),
        ({"note": None, "notes": 1}, "step() needs note=..., a value of uint8 ('notes' is not a column)."),
        ({"logp": 1.0}, "step() got logp=..., but 'logp' is not a column; the extra columns are note, value."),
        ({"note": [1, 2, 256]}, "column 'note' stores uint8[3] from 0 to 255, but got int64[3] with 256 at [2]"),
        ({"note": [0.5, 1, 2]}, "column 'note' stores uint8[3], but got float64[3]"),
        ({"obs": np.zeros((3, 4))}, "column 'obs' stores float32[3, 2], but got float64[3, 4]"),
        ({"obs": np.zeros((2, 2))}, "column 'obs' stores float32[3, 2], but got float64[2, 2]"),
        ({"action": "left"}, "column 'action' stores int64[3], but got 'left'"),
        ({"reward": [1, 2, None]}, "column 'reward' stores float32[3], but got object[3]"),
        (
            {"reward": [1, 2, 1e40]},
            "column 'reward' stores float32[3] from -3.40282347e+38 to 3.40282347e+38, but got float64[3] with 1e+40 at [2]",
        ),
        ({"reward": [[1, 2], [3]]}, "column 'reward' stores float32[3], but got a list that is not an array"),
        *(
            ({flag: wrong}, f"column '{flag}' stores True or False for each of 3 environments, but got")
            for flag in ("terminated", "truncated")
            for wrong in (True, [1, 2, 0], [True], ["a", "b", "c"], [[1], [2, 3]])
        ),
    ],
)
def test_a_value_that_does_not_fit_is_named_and_nothing_is_added(changes: dict[str, Any], message: str) -> None:
    hand = Hand()
    with pytest.raises(EntryError) as caught:
        hand.step(**changes)
    assert str(caught.value).startswith(message)
    assert hand.memory.num_entries == hand.observer.entries == 0
    hand.step()
    assert hand.open_lengths == [1, 1, 1]


def test_bootstrap_values_need_a_value_column() -> None:
    schema = Schema({"obs": (np.float32, (2,)), "action": np.int64, "reward": np.float32})
    with pytest.raises(EntryError, match="the schema has no value column"):
        Hand(schema=schema).step(value=None, note=None, bootstrap_value=np.zeros(3))


@pytest.mark.parametrize(
    "info",
    [
        None,
        {},
        {"final_obs": np.full(3, None, object)},
        {"final_obs": np.zeros((3, 2)), "_final_obs": np.zeros(3, bool)},
    ],
)
def test_same_step_without_the_final_observation_is_refused(info: Any) -> None:
    hand = Hand("same_step")
    hand.step()
    with pytest.raises(FinalObservationMissing, match="environment 2 ended an episode and was reset in the same step"):
        hand.step(terminal=[2], **({"info": info} if info is not None else {}))
    assert hand.open_lengths == [1, 1, 1]


def test_an_observation_that_the_step_wrote_over_is_refused() -> None:
    envs = SyncVectorEnv(coded_fns("box", [[3]] * 2, [ENDS] * 2), copy=False)
    writer = Writer(Memory(Schema.from_env(envs), 100), *layout(envs))
    obs, _ = envs.reset()
    action = np.array([action_at((0, 0, 0)), action_at((1, 0, 0))])
    before = obs.copy()
    next_obs, *rest = envs.step(action)
    with pytest.raises(ObservationReused, match=r"the same array \(column 'obs'\).*copy=True"):
        writer.step(obs, action, *rest[:3], next_obs, rest[3])
    writer.step(before, action, *rest[:3], next_obs, rest[3])


@pytest.mark.parametrize("mode", AUTORESET)
def test_a_reset_that_nobody_told_of_is_noticed(mode: str) -> None:
    hand = Hand(mode)
    hand.step()
    hand.step()
    other = hand.obs.copy()
    other[1] = 0
    with pytest.raises(
        EpisodeTorn, match=r"environment 1 is 2 steps into an episode, but obs is not the next_obs.*writer\.reset"
    ):
        hand.step(obs=other)
    hand.step(obs=hand.obs.astype(np.float64))  # an equal observation is no reset
    assert hand.open_lengths == [3, 3, 3]


def test_endless_episodes_are_cut_with_their_true_next_state() -> None:
    hand = Hand(longest=4)
    for t in range(10):
        hand.step(cut=[2] if t == 2 else [])
    finals = [(len(each), each.final_state["obs"][0], each.bootstrap_value) for each in hand.closed]
    assert finals == [(3, 203, 0.0), (4, 4, 4.0), (4, 104, 4.0), (4, 207, 7.0), (4, 8, 8.0), (4, 108, 8.0)]
    assert not any(each.terminated for each in hand.closed)
    hand.step(terminal=[0, 1, 2])
    assert hand.observer.episodes == [(2, 3, 1.5), (0, 11, 5.5), (1, 11, 5.5), (2, 8, 4.0)]


def test_an_episode_that_is_abandoned_adds_nothing_to_the_return_of_the_next() -> None:
    hand = Hand()
    hand.step()
    hand.writer.reset(hand.obs)
    hand.step(terminal=[0, 1, 2])
    assert hand.observer.episodes == [(0, 1, 0.5), (1, 1, 0.5), (2, 1, 0.5)]


def test_longest_can_be_set_between_steps() -> None:
    hand = Hand()
    assert hand.writer.longest == 1000 // 6
    for _ in range(5):
        hand.step()
    hand.writer.longest = 2
    hand.step()
    assert [len(each) for each in hand.closed] == [5, 5, 5]
    with pytest.raises(ParameterError, match="longest must be a whole number from 1, got 0"):
        hand.writer.longest = 0


@pytest.mark.parametrize("mode", ["next_step", "disabled"])
def test_a_memory_that_refuses_leaves_the_writer_as_it_was(mode: str) -> None:
    hand = Hand(mode)
    hand.step(terminal=[1])
    with pytest.raises(NotFinite):
        hand.step(reward=np.full(N, np.nan))
    hand.step()
    assert hand.open_lengths == ([2, 0, 2] if mode == "next_step" else [2, 1, 2])
    assert hand.observer.entries == 3 + (2 if mode == "next_step" else 3)


def test_modes_are_known_in_every_spelling() -> None:
    assert [autoreset_mode(mode) for mode in AutoresetMode] == list(AUTORESET)
    assert autoreset_mode("SAME_STEP") == autoreset_mode("SameStep") == autoreset_mode("same-step") == "same_step"
    with pytest.raises(
        ParameterError, match="autoreset must be one of 'next_step', 'same_step', 'disabled', got 'never'"
    ):
        autoreset_mode("never")


def test_the_layout_is_read_from_the_environment() -> None:
    envs = SyncVectorEnv(coded_fns("box", [[1]] * 2, [ENDS] * 2), autoreset_mode=AutoresetMode.SAME_STEP)
    assert layout(envs) == layout(gym.wrappers.vector.RecordEpisodeStatistics(envs)) == (2, "same_step")
    assert layout(CodedEnv(0, [1], ENDS)) == layout() == (None, "disabled")
    assert layout(num_envs=8, autoreset="same_step") == (8, "same_step")
    with pytest.raises(
        ParameterError, match="autoreset must be 'same_step', as the environment declares, got 'next_step'"
    ):
        layout(envs, autoreset="next_step")
    with pytest.raises(ParameterError, match="num_envs must be 2, as the environment declares, got 3"):
        layout(envs, num_envs=3)
    with pytest.raises(ParameterError, match="autoreset must be set for vector environments"):
        layout(num_envs=8)


def test_schemas_that_step_cannot_fill_are_refused() -> None:
    two = Schema({"obs": np.float32, "state": np.float32})
    with pytest.raises(SchemaError, match="stores one observation, but the schema has the states obs, state"):
        Writer(Memory(two, 100))
    with pytest.raises(SchemaError, match=r"column 'info': Writer\.step\(\) has a parameter of this name"):
        Writer(Memory(Schema({"obs": np.float32, "info": np.float32}), 100))
    with pytest.raises(ParameterError, match="num_envs must be a whole number from 1, got 0"):
        Writer(Memory(HAND, 100), 0)


# ------------------------------------------------------------------------------------------- members that step apart


def stored(memory: Memory, kind: str, environment: int) -> str:
    return repr([episode for episode, _ in by_environment(memory, kind)[environment]])


@pytest.mark.slow
@pytest.mark.parametrize(("writes", "longest"), [(Writer, None), (RolloutWriter, 3)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", AUTORESET)
def test_members_that_step_apart_store_what_a_writer_of_each_alone_stores(
    mode: str, kind: str, writes: type[Writer], longest: int | None
) -> None:
    pool, random = EnvironmentPool(kind, mode), np.random.default_rng(0)
    together, *alone = (Memory(pool.schema, 2000, live=True) for _ in range(6))
    for memory in (together, *alone):
        memory.set_clock(0.0)
    writer = writes(together, 5, mode, longest=longest)
    singles = [writes(memory, 1, mode, longest=longest) for memory in alone]
    for turn in range(60):
        if turn == 60:
            chosen = np.arange(5) == 3
            pool.last[3] = pool.envs[3].reset()[0]
            pool.is_over[3] = False
            writer.reset(mask=chosen)
            singles[3].reset()
        members = random.permutation(5)[: random.integers(1, 6)]
        args = pool.step(members.tolist())
        writer.step(**args, members=args["info"]["env_id"])
        for row, member in enumerate(members):
            own = part_of(args, slice(row, row + 1))
            del own["info"]["env_id"]
            singles[member].step(**own)
    for last in (False, True):
        for number, memory in enumerate(alone):
            assert stored(together, kind, number) == stored(memory, kind, number)
            assert memory.num_episodes > 0
        if not last:
            writer.reset()
            for single in singles:
                single.reset()


def test_a_step_of_some_members_that_are_not_named_is_refused_and_changes_nothing() -> None:
    pool = EnvironmentPool("box", "next_step")
    memory = Memory(pool.schema, 100)
    writer = Writer(memory, 3, "next_step")
    for ids in ([0, 2, 4], [1, 0, 2], [0, 1], [0, 1, 2, 3]):
        args = pool.step([0, 1, 2]) | {"info": {"env_id": np.array(ids)}}
        with pytest.raises(ParameterError, match=r"members=info\[.env_id.\]"):
            writer.step(**args)
    assert memory.num_entries == 0
    for members in ([0, 1, 3], [0, 0, 1], [[0, 1, 2]], [], [0.0, 1.0], [-1, 0], "012", [True, False]):
        with pytest.raises(ParameterError, match="members must be"):
            writer.step(**args, members=members)
    assert memory.num_entries == 0
    writer.step(**EnvironmentPool("box", "next_step").step([0, 1, 2]))
    assert memory.num_episodes == 1 and memory.open_length(2) == 1


def test_a_single_environment_keeps_its_id_and_has_no_members() -> None:
    env = CodedEnv(0, [9], ["terminated"])
    writer = Writer(memory := Memory(Schema.from_env(env), 100), None)
    obs, _ = env.reset()

    def step(**more: Any) -> None:
        nonlocal obs
        after, *rest, _ = env.step(action := action_at(env.place))
        writer.step(obs, action, *rest, after, **more)
        obs = after

    step(info={"env_id": [4]})
    for more in ({"info": {"env_id": np.array([5])}}, {"members": [0]}):
        with pytest.raises(ParameterError):
            step(**more)
    assert memory.open_length() == 1


@pytest.mark.parametrize("name", [*inspect.signature(Writer.step).parameters])
def test_no_column_is_called_like_a_parameter_of_step_that_is_not_its_own(name: str) -> None:
    own = {"obs": "state", "reward": "reward"}
    columns: list[dict[str, Any]] = [
        {"s": Column(np.float32, (), "state"), name: np.int64, "r": Column(np.float32, (), "reward")},
        {name: Column(np.float32, (), "state"), "r": Column(np.float32, (), "reward")},
        {"s": Column(np.float32, (), "state"), name: Column(np.float32, (), "reward")},
    ]
    roles = ("plain", "state", "reward")
    for role, each in zip(roles, columns, strict=True):
        if own.get(name) == role or (role == "plain" and name in ("action", "terminated", "truncated", "extras")):
            Writer(Memory(Schema(each), 100), 2)
        elif name not in ("extras", "obs", "reward"):
            with pytest.raises(SchemaError, match=name):
                Writer(Memory(Schema(each), 100), 2)


# --- A usual step is one call of the engine, which stores, counts and refuses exactly as the long way does

STATE = (2,)


class Both:
    """Two memories that receive the same steps, one memory the long way."""

    def __init__(self, schema: Schema, environments: int | None, *, check: bool = True, capacity: int = 24) -> None:
        self.memories = [Memory(schema, capacity, live=True, seed=0) for _ in range(2)]
        stores = [self.memories[0], LongWay(self.memories[1])]
        self.heard = [RecordingObserver(), RecordingObserver()]
        self.writers = [
            Writer(store, environments, "disabled", heard, longest=5, check=check)
            for store, heard in zip(stores, self.heard, strict=True)
        ]
        for memory in self.memories:
            memory.set_clock(0.0)
        assert self.writers[0]._usual_steps is not None and self.writers[1]._usual_steps is None

    def step(self, arguments: dict[str, Any]) -> str:
        """Step both writers; return their common error, or "" without an error."""
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
    """Environment that returns the arguments of its steps in the requested forms."""

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


def test_a_step_waits_for_whoever_holds_the_memory() -> None:
    both = Both(schema_of(()), None)
    environment = Environment(None, ())
    usual = {"reward": "float64", "obs": "exact", "flags": "array", "terminated": 0, "truncated": 0, "how": "fresh"}
    usual |= {"init_w": 1.0, "model_version": 0, "note": "array"}
    with both.memories[0].held():
        assert both.step(environment.step(usual)) == ""  # this thread holds the memory, so the step goes the long way
    assert both.memories[0].num_entries == 1
