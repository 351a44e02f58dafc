"""Minari data sets go in and come out unchanged."""

import gymnasium
import minari
import numpy as np
import pytest
from minari.data_collector import EpisodeBuffer

import memoire.minari
from memoire import Buffer, Prioritized, Schema
from memoire.errors import DataError, ParameterError
from memoire.replay.memory import Memory
from memory_checks import check_memory

ABOUT = {
    "data_format": "hdf5", "description": "made by a test", "author": "memoire", "author_email": "a@b.c",
    "code_permalink": "https://example.invalid", "algorithm_name": "random",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


class Walled(gymnasium.Env):
    """Nested observations of three dtypes, a vector action, and episodes that end in either way."""

    observation_space = gymnasium.spaces.Dict(
        {
            "image": gymnasium.spaces.Box(0, 255, (2, 3), np.uint8),
            "arm": gymnasium.spaces.Tuple(
                (gymnasium.spaces.Box(-9, 9, (2,), np.float64), gymnasium.spaces.Discrete(50))
            ),
        }
    )
    action_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.stop = 0, int(self.np_random.integers(3, 12))
        return self._seen(), {}

    def step(self, action):
        self.at += 1
        over = self.at == self.stop
        return self._seen(), float(action.sum()), over and self.stop % 2 == 0, over and self.stop % 2 == 1, {}

    def _seen(self):
        return {
            "image": np.full((2, 3), self.at, np.uint8),
            "arm": (self.np_random.uniform(-9, 9, 2), np.int64(self.at)),
        }


class Told(Walled):
    """Text beside numbers."""

    observation_space = gymnasium.spaces.Dict({"words": gymnasium.spaces.Text(20), "at": gymnasium.spaces.Discrete(50)})

    def _seen(self):
        return {"words": "größer " * (self.at % 3), "at": np.int64(self.at)}


def collected(env, episodes, dataset_id):
    made = []
    env.action_space.seed(0)
    for seed in range(episodes):
        seen, _ = env.reset(seed=seed)
        buffer = EpisodeBuffer(id=seed, seed=seed, observations=opened(seen), actions=[])
        over = False
        while not over:
            action = env.action_space.sample()
            seen, reward, terminated, truncated, _ = env.step(action)
            add(buffer.observations, seen)
            buffer.actions.append(action)
            buffer.rewards.append(reward)
            buffer.terminations.append(terminated)
            buffer.truncations.append(truncated)
            over = terminated or truncated
        made.append(buffer)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    return minari.create_dataset_from_buffers(dataset_id, made, **spaces, **ABOUT)


def opened(seen):
    """Lists in the nesting of an observation, with it as their first element."""
    if isinstance(seen, dict):
        return {key: opened(part) for key, part in seen.items()}
    return tuple(map(opened, seen)) if isinstance(seen, tuple) else [seen]


def add(lists, seen):
    if isinstance(lists, list):
        lists.append(seen)
        return
    for key in lists if isinstance(lists, dict) else range(len(lists)):
        add(lists[key], seen[key])


def same(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return [same(one[key], other[key]) for key in one]
    if isinstance(one, tuple):
        return [same(*pair) for pair in zip(one, other, strict=True)]
    np.testing.assert_array_equal(one, other)
    assert np.asarray(one).dtype == np.asarray(other).dtype
    return None


@pytest.mark.filterwarnings("ignore")  # of minari and gymnasium, about what a made-up environment does not say
@pytest.mark.parametrize("kind", ["CartPole-v1", "nested", "text"])
def test_a_data_set_of_a_real_environment_goes_in_and_out_unchanged(kind):
    env = Walled() if kind == "nested" else Told() if kind == "text" else gymnasium.make(kind)
    data = collected(env, 6, "test/in-v0")
    schema = memoire.minari.schema(data)
    memory = Memory(schema, int(data.total_steps) + 5, seed=1)
    assert memoire.minari.fill(memory, data) == 6
    check_memory(memory)
    assert memory.num_entries == memory.num_positive == data.total_steps
    again = memoire.minari.write(
        memory, "test/out-v0", observation_space=data.observation_space, action_space=data.action_space, **ABOUT
    )
    assert (again.total_episodes, again.total_steps) == (data.total_episodes, data.total_steps)
    for one, other in zip(data.iterate_episodes(), again.iterate_episodes(), strict=True):
        same(one.observations, other.observations)
        same(one.actions, other.actions)
        np.testing.assert_array_equal(np.float32(one.rewards), np.float32(other.rewards))
        np.testing.assert_array_equal(one.terminations, other.terminations)
        np.testing.assert_array_equal(one.truncations, other.truncations)


@pytest.mark.filterwarnings("ignore")
def test_a_learner_draws_right_targets_from_a_data_set():
    data = collected(gymnasium.make("CartPole-v1"), 5, "test/learn-v0")
    buffer = Buffer(memoire.minari.schema(data), 1000, sampler=Prioritized(0.6), discount=0.9, seed=1)
    memoire.minari.fill(buffer.memory, data)
    batch = buffer.sample(256)
    ends = {tuple(e.observations[-1]) for e in data.iterate_episodes() if e.terminations[-1]}
    for seen, discount in zip(batch.next_obs, batch.discount, strict=True):
        assert discount == (0.0 if tuple(seen) in ends else np.float32(0.9))


class Made:
    def __init__(self, **parts):
        self.id, self.infos = 7, parts.pop("infos", None)
        vars(self).update(parts)


def test_episodes_that_are_not_whole_are_named():
    memory = Memory(Schema({"obs": np.float32, "action": np.int64, "reward": np.float32, "logp": np.float32}), 20)
    whole = {"observations": np.zeros(4), "actions": np.zeros(3, int), "rewards": np.ones(3), "terminations": [0, 0, 1]}
    for wrong, said in (
        ({"observations": np.zeros(3)}, "3 values of 'obs' and 3 rewards"),
        ({"rewards": np.ones(0)}, "0 rewards"),
        ({"infos": {"other": 1}}, "has no info 'logp', but 'other'"),
    ):
        with pytest.raises(DataError, match=f"episode 7, .*{said}"):
            memoire.minari.fill(memory, [Made(**{"infos": {"logp": np.zeros(3)}} | whole | wrong)])
    assert memory.num_entries == 0
    assert memoire.minari.fill(memory, [Made(**whole, infos={"logp": np.arange(3.0)})]) == 1
    assert memory.num_episodes == 1
    with pytest.raises(ParameterError, match="final state is known"):
        memoire.minari.write(Memory(memory.schema, 4), "test/none-v0")
    with pytest.raises(ParameterError, match="obs, action and a scalar reward"):
        memoire.minari.write(Memory(Schema({"state": np.float32}), 4), "test/none-v0")
    for column, value in (((np.int16, (None,)), [1, 2]), ((np.uint8, (None,)), [255, 0])):
        buffer = Buffer({"obs": column, "action": np.int64, "reward": np.float32}, 9)
        buffer.writer().step(value, 0, 1.0, True, False, value)
        with pytest.raises(ParameterError, match="ragged columns are text in UTF-8.*got \"one with 'obs'"):
            memoire.minari.write(buffer.memory, "test/none-v0")
