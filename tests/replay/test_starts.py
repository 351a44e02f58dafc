"""Checks of a writer: forgotten resets are refused, environments that reset are not, and values must be finite."""

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.toy_text.taxi import TaxiEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from memoire import Buffer, Column, Schema
from memoire._core import at_once
from memoire.errors import EpisodeOver, EpisodeTorn, NotFinite, SchemaError
from memoire.replay.memory import Memory
from memoire.replay.steps import PROOF_AT_ONCE, PROOF_AT_TERMINATION, ResetCheck
from memoire.replay.writer import Writer
from memory_checks import check_memory


class Repeats(gym.Env):
    """Environment that repeats its end at each later step, as CartPole does."""

    observation_space = gym.spaces.Box(-9.0, 9.0, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 5, how: str = "terminated") -> None:
        self.length, self.how, self.steps = length, how, 0

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.steps, self.place = 0, np.random.default_rng().uniform(size=2).astype(np.float32)
        return self.place.copy(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.place += 0.125
        is_over = self.steps >= self.length
        return self.place.copy(), 1.0, is_over and self.how == "terminated", is_over and self.how == "truncated", {}


def play(env: Any, writer: Any, steps: int, *, resets: bool = True, seed: int = 0) -> None:
    """Run a user's loop of steps; `resets=False` omits the calls of `env.reset`."""
    obs, _ = env.reset(seed=seed)
    for _ in range(steps):
        action = env.action_space.sample()
        after, reward, terminated, truncated, info = env.step(action)
        writer.step(obs, action, reward, terminated, truncated, after, info)
        obs = after
        if resets and (terminated or truncated):
            obs, _ = env.reset()


def buffer_for(env: Any) -> Buffer:
    return Buffer(Schema.from_env(env), 10_000, seed=0)


ROWS = {"terminated": PROOF_AT_TERMINATION, "truncated": PROOF_AT_ONCE}


@pytest.mark.parametrize("how", ROWS)
def test_a_forgotten_reset_is_refused_after_some_steps_that_repeat_an_end(how: str) -> None:
    env = Repeats(5, how)
    buffer = buffer_for(env)
    writer = buffer.writer(env)
    with pytest.raises(
        EpisodeOver, match=r"environment 0 was stepped again after its episode had ended.*Call env.reset"
    ):
        play(env, writer, 100, resets=False)
    assert len(buffer) == 5 + ROWS[how] - 1
    play(env, writer, 100)  # after a reset, all steps are accepted
    assert len(buffer) == 105 + ROWS[how] - 1


@pytest.mark.parametrize("lengths", [(5, 3, 4), (1, 1, 1), (4, *[1] * (PROOF_AT_TERMINATION - 1), 3)])
def test_at_a_termination_next_obs_may_be_the_first_observation_of_the_next_episode(lengths: Any, caplog: Any) -> None:
    buffer = buffer_for(Repeats())
    writer, random, wanted = buffer.writer(), np.random.default_rng(0), []
    obs = random.random(2, np.float32)
    for length in [*lengths, *[1, 1, 2] * 20]:
        for step in range(length):
            after, is_over = random.random(2, np.float32), step == length - 1
            writer.step(obs, 0, 1.0, is_over, False, after)
            wanted.append(is_over)
            obs = after
    assert len(buffer) == len(wanted) and len(caplog.records) == 1
    drawn = buffer.sample(512)
    np.testing.assert_array_equal(drawn["discount"] == 0, np.array(wanted)[drawn.ids])


class Bandit(gym.Env):
    """Environment of one-step episodes; each end draws the next context, which `reset` returns."""

    observation_space = gym.spaces.Box(-9.0, 9.0, (3,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, is_constant: bool) -> None:
        self.is_constant = is_constant
        self.context = np.zeros(3, np.float32)

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return self.context, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.context = self.context.copy() if self.is_constant else self.np_random.random(3, np.float32)
        return self.context, 1.0, True, False, {}


class Constant(Bandit):
    """Environment whose observation is constant, with episodes of four steps."""

    def __init__(self) -> None:
        super().__init__(True)
        self.steps = 0

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.context.copy(), 1.0, self.steps % 4 == 0, False, {}


class Anywhere(gym.Env):
    """Grid of 4 x 4 with random starts outside the goal; episodes are truncated after 8 steps."""

    observation_space = gym.spaces.Discrete(16)
    action_space = gym.spaces.Discrete(4)

    def reset(self, seed: int | None = None, **options: Any) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.place = 0, int(self.np_random.integers(15))
        return self.place, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        x, y = divmod(self.place, 4)
        dx, dy = ((0, 1), (0, -1), (1, 0), (-1, 0))[int(action)]
        self.place = 4 * min(max(x + dx, 0), 3) + min(max(y + dy, 0), 3)
        self.steps += 1
        return self.place, 0.0, self.place == 15, self.steps == 8, {}


PLAIN = {
    "bandit": lambda: Bandit(True),
    "contextual bandit": lambda: Bandit(False),
    "constant": Constant,
    "frozen lake": lambda: gym.make("FrozenLake-v1", max_episode_steps=6),
    "cliff walking": lambda: gym.make("CliffWalking-v1", max_episode_steps=30),
    "taxi": lambda: gym.wrappers.TimeLimit(TaxiEnv(), 5),
    "blackjack": lambda: gym.make("Blackjack-v1"),
    "grid": Anywhere,
    "cart pole": lambda: gym.make("CartPole-v1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_no_environment_that_is_reset_is_refused(name: str, caplog: Any) -> None:
    env = PLAIN[name]()
    for seed in range(20):
        env.action_space.seed(seed)
        play(env, buffer_for(env).writer(env), 150, seed=seed)
    if name in ("bandit", "contextual bandit", "constant"):  # the writer cannot tell, and warns once
        assert len(caplog.records) == 20


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("name", ["cart pole", "frozen lake", "bandit", "grid"])
def test_no_vector_that_is_reset_is_refused(name: str, mode: AutoresetMode) -> None:
    envs = SyncVectorEnv([PLAIN[name]] * 3, autoreset_mode=mode)
    writer = Buffer(Schema.from_env(envs), 5000).writer(envs)
    envs.action_space.seed(0)
    obs, _ = envs.reset(seed=0)
    for _ in range(200):
        action = envs.action_space.sample()
        after, reward, terminated, truncated, info = envs.step(action)
        writer.step(obs, action, reward, terminated, truncated, after, info)
        obs = after
        if mode is AutoresetMode.DISABLED and (done := terminated | truncated).any():
            obs, _ = envs.reset(options={"reset_mask": done})


@pytest.mark.slow
def test_chance_in_a_small_grid_refuses_one_run_in_hundreds_at_most() -> None:
    """Only three coincidences in a row at unseen cells are refused, with digests of cells and random cuts."""
    random, refused = np.random.default_rng(0), 0
    for _ in range(2000):
        starts = ResetCheck()
        for _ in range(100):
            final, first = random.integers(16, size=2).tolist()
            at_once(starts.record_end(0, final, 8))
            if starts.is_forgotten(0, first, bool(random.random() < 0.05)):
                refused += 1
                break
            starts.record_begin(0, first)
    assert refused <= 20


BAD = [math.nan, math.inf, -math.inf]
FLOATS = [np.float16, np.float32, np.float64]


def schema_of(dtype: Any, shape: Any = (3,), **options: Any) -> Schema:
    return Schema({"obs": Column(dtype, shape, "state", **options), "reward": np.float32})


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 64])
def test_a_state_that_is_not_finite_is_refused_wherever_it_is(dtype: Any, size: int) -> None:
    memory = Memory(schema_of(dtype, (size,)), 1000)
    memory.open()
    largest = np.full(size, np.finfo(dtype).max, dtype)
    for good in (largest, -largest, np.zeros(size, dtype), np.full(size, np.finfo(dtype).tiny, dtype)):
        memory.add(0, (good, 0.0))
    for place in range(size):
        for bad in BAD:
            state = largest.copy()
            state[place] = bad
            with pytest.raises(NotFinite, match=r"column 'obs' stores finite .*, but got -?(nan|inf).*nan='allow'"):
                memory.add(0, (state, 0.0))
            with pytest.raises(NotFinite):
                memory.extend(0, (np.stack([largest, state]), np.zeros(2, np.float32)))
            with pytest.raises(NotFinite):
                memory.add_many(np.zeros(1, np.int64), (state[None], np.zeros(1, np.float32)))
    assert memory.num_entries == 4
    memory.close(final_state=largest)


@pytest.mark.parametrize("environments", [None, 2])
def test_a_writer_stores_nothing_that_is_not_finite(environments: int | None) -> None:
    memory = Memory(schema_of(np.float32), 100, live=True)
    writer = Writer(memory, environments)
    lead = () if environments is None else (environments,)
    good = [np.full((*lead, 3), t, np.float32) for t in range(6)]
    bad = good[3].copy()
    bad.flat[-2] = np.nan
    flag = np.zeros(lead, bool)[()]

    def go(obs: Any, after: Any, over: bool = False) -> None:
        writer.step(obs, None, np.ones(lead)[()], flag | over, flag, after)

    go(good[0], good[1])
    go(good[1], bad)  # the entry is stored: only next_obs is not finite
    with pytest.raises(NotFinite, match="got nan"):
        go(bad, good[3])
    with pytest.raises(
        EpisodeTorn, match=r"step 3 of the episode of environment \d, was refused.*got nan.*writer.reset"
    ):
        go(good[3], good[4])
    writer.reset()  # the state at which the episode stopped is unknown
    go(good[3], good[4])
    with pytest.raises(NotFinite):  # a final state, which would be drawn as next_obs
        go(good[4], bad, over=True)
    go(good[4], good[5], over=True)
    assert memory.num_entries == 4 * (environments or 1)
    states = memory.contents()["columns"][0].view(np.float32)
    assert np.isfinite(states).all()
    check_memory(memory)


def test_a_column_says_what_it_allows() -> None:
    allowing = schema_of(np.float32, nan="allow")
    again = Schema.from_json(allowing.to_json())
    assert again == allowing and again["obs"].nan == "allow" and again.finite == ("reward",)
    assert '["obs","<f4",[3],"state","allow"]' in allowing.to_json() and "(state, allow)" in repr(allowing)
    plain = schema_of(np.float32)
    assert plain.finite == ("obs", "reward") and "refuse" not in plain.to_json()
    assert plain.fingerprint != allowing.fingerprint
    assert schema_of(np.uint8).finite == ("reward",)
    memory = Memory(allowing, 100)
    memory.open()
    memory.add(0, (np.full(3, np.nan, np.float32), 0.0))
    with pytest.raises(NotFinite, match="column 'reward' stores finite float32, but got inf"):
        memory.add(0, (np.zeros(3, np.float32), np.float32(np.inf)))
    memory.close(final_state=np.full(3, np.inf, np.float32))
    for wrong in ({"nan": "yes"}, {"nan": None}):
        with pytest.raises(SchemaError, match="Set 'refuse' or 'allow'"):
            Column(np.float32, (3,), "state", **wrong)
    with pytest.raises(SchemaError, match="nan='allow' is for states, not for role 'reward'"):
        Column(np.float32, (), "reward", nan="allow")
    with pytest.raises(SchemaError, match="after the role; only .allow. may stand there"):
        Schema.from_json(allowing.to_json().replace('"allow"', '"maybe"'))


def test_an_environments_schema_may_allow_it_in_every_observation() -> None:
    box = gym.spaces.Box(-1.0, 1.0, (2,))

    class Nested:
        observation_space = gym.spaces.Dict(
            {"a": box, "b": gym.spaces.Tuple((box, gym.spaces.Sequence(box, stack=True)))}
        )
        action_space = box

    schema = Schema.from_env(Nested(), nan="allow")
    assert {schema[name].nan for name in schema.states} == {"allow"} and schema["action"].nan == "refuse"
    assert Schema.from_env(Nested()).finite == ("obs.a", "obs.b.0", "obs.b.1", "reward")
