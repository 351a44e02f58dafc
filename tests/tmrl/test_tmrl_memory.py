"""Memory of the tutorial as written, compared with a complete memory that gives the same transitions without code."""

import random
from types import SimpleNamespace

import gymnasium
import minari
import numpy as np
import pytest
from minari.data_collector import EpisodeBuffer

from memoire.errors import CrcFailed, DataError, NotEnoughSamples, ParameterError
from memoire.rl.codec import ActionHistory, Codec
from memoire.rl.crc import Marks
from memoire.rl.samples import Sample
from memoire.tmrl.memory import GenericMemory, TorchMemory, buffers_of
from memoire.tmrl.memory_dataloading import MemoryDataloading
from memoire.tmrl.networking import Buffer

ACTIONS = 4


class MyMemoryDataloading(MemoryDataloading):
    """Memory of the tutorial: lists of parts, and last actions that are rebuilt when a transition is drawn."""

    def __init__(self, nb_steps=None, batch_size=32, act_buf_len=ACTIONS, **options):
        self.act_buf_len = act_buf_len
        super().__init__(device=None, nb_steps=nb_steps, batch_size=batch_size, **options)

    def append_buffer(self, buffer):
        rows = [(b[0], b[1][0], b[1][1], b[2], b[3], b[4]) for b in buffer.memory]
        columns = [list(column) for column in zip(*rows, strict=True)]
        self.data = [old + new for old, new in zip(self.data, columns, strict=True)] if self.data else columns
        to_trim = len(self) - self.memory_size
        if to_trim > 0:
            self.data = [column[to_trim:] for column in self.data]

    def __len__(self):
        return max(0, len(self.data[0]) - self.act_buf_len - 1) if self.data else 0

    def get_transition(self, item):
        last, now = item + self.act_buf_len - 1, item + self.act_buf_len
        actions = self.data[0][item : item + self.act_buf_len + 1]
        last_obs = (self.data[1][last], self.data[2][last], *actions[:-1])
        new_obs = (self.data[1][now], self.data[2][now], *actions[1:])
        return last_obs, self.data[0][now], np.float32(self.data[3][now]), new_obs, self.data[4][now], self.data[5][now]


def buffers(count=3, steps=20, crc=False, done=False):
    """Yield buffers of an environment without an end of its own, whose observations end with the last actions."""
    marks = Marks(crc, "drone-1")
    codec = Codec(history=ActionHistory(ACTIONS, "skip"))
    actions, values = [np.zeros(2, np.float32)] * ACTIONS, np.random.default_rng(0)

    def obs():
        return tuple(values.random((2, 1), np.float32)) + tuple(actions[-ACTIONS:])

    for episode in range(1, count + 1):
        actions.append(np.zeros(2, np.float32))
        last, samples = obs(), []
        samples.append(codec(actions[-1], last, 0.0, False, marks.mark({}, None, episode, 0)))
        for step in range(1, steps + 1):
            actions.append(values.random(2, np.float32))
            new, rew, end = obs(), float(values.random()), done and step == steps
            info = marks.mark({}, (last, actions[-1], rew, new, end), episode, step)
            samples.append(codec(actions[-1], new, rew, end, info))
            last = new
        yield SimpleNamespace(memory=samples)


def filled(memory, **options):
    for buffer in buffers(**options):
        memory.append(buffer)
    return memory


def test_the_memory_of_the_tutorial_gives_its_batches():
    memory = filled(MyMemoryDataloading(nb_steps=5))
    assert len(memory) == 3 * 21 - ACTIONS - 1 and len(filled(MyMemoryDataloading(nb_steps=1, memory_size=30))) == 30
    batches = list(memory)
    assert len(batches) == 5
    obs, act, rew, new_obs, done = batches[0]
    assert len(obs) == len(new_obs) == 2 + ACTIONS
    assert (obs[0].shape, obs[2].shape, act.shape, rew.shape, done.shape) == ((32, 1), (32, 2), (32, 2), (32,), (32,))
    assert rew.dtype == done.dtype == np.float32
    assert (new_obs[-1] == act).all() and (obs[-1] == new_obs[-2]).all()


def test_the_memory_is_empty_before_it_can_rebuild_a_transition_and_never_negative():
    memory = MyMemoryDataloading(nb_steps=1)
    memory.append(SimpleNamespace(memory=[]))
    assert len(memory) == 0 and memory.data == []
    filled(memory, count=1, steps=2)
    assert len(memory) == 0
    with pytest.raises(NotEnoughSamples):
        memory.sample()


def test_the_complete_memory_gives_what_the_environment_gave_and_the_tutorials_what_it_can():
    complete = filled(GenericMemory(codec=Codec(history=ActionHistory(ACTIONS, "skip")), crc_debug=True), crc=True)
    assert len(complete) == 3 * (20 - ACTIONS + 1)
    for item in range(len(complete)):
        complete[item]
    assert complete.checks.passed == len(complete)
    tutorial = filled(MyMemoryDataloading(crc_debug=True), crc=True)
    for item in range(20 - ACTIONS):
        tutorial[item]


def test_a_mistake_in_the_memory_is_found_at_its_first_draw():
    class Wrong(MyMemoryDataloading):
        def get_transition(self, item):
            last_obs, act, rew, new_obs, done, info = super().get_transition(item)
            return last_obs, act, rew, (*new_obs[:-2], new_obs[-1], new_obs[-2]), done, info

    memory = filled(Wrong(nb_steps=1, crc_debug=True), crc=True)
    says = r"transition \d+ of Wrong .*drone-1 in episode \d, step \d+.*new_obs\[4\], index"
    with pytest.raises(CrcFailed, match=says):
        memory.sample()


def test_preprocessors_come_after_decompression():
    calls = []

    def on_obs(obs):
        calls.append(len(obs))
        return (obs[0] * 0, *obs[1:])

    def on_sample(last_obs, act, rew, new_obs, done):
        assert last_obs[0] == 0 == new_obs[0]
        return last_obs, act, rew + 100, new_obs, done

    codec = Codec(history=ActionHistory(ACTIONS, "skip"))
    for memory in (
        MyMemoryDataloading(nb_steps=1, obs_preprocessor=on_obs, sample_preprocessor=on_sample),
        GenericMemory(nb_steps=1, obs_preprocessor=on_obs, sample_preprocessor=on_sample, codec=codec, batch_size=32),
    ):
        calls.clear()
        obs, _, rew, *_ = filled(memory).sample()
        assert (obs[0] == 0).all() and (rew >= 100).all()
        assert calls == [2 + ACTIONS] * 64


def test_ends_are_one_part_or_two():
    class Six(GenericMemory):
        sample_parts = 6

    assert len(filled(GenericMemory(batch_size=8)).sample()) == 5
    memory = filled(Six(batch_size=8), done=True)
    *_, terminated, truncated = memory.sample()
    assert terminated.dtype == truncated.dtype == np.float32 and not truncated.any()
    assert len(memory[0]) == 6
    assert len(GenericMemory.sample(memory)) == 6


def test_a_data_set_is_the_data_at_the_beginning(tmp_path):
    np.savez(tmp_path / "data.npz", np.arange(6), np.arange(12.0).reshape(6, 2))
    for path in (tmp_path, tmp_path / "data.npz", str(tmp_path)):
        memory = MyMemoryDataloading(dataset_path=path)
        assert [len(column) for column in memory.data] == [6, 6] and memory.data[1][1].tolist() == [2.0, 3.0]


def test_a_data_set_that_is_a_pickle_or_nothing_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read as arrays"):
        MyMemoryDataloading(dataset_path=tmp_path)
    np.savez(tmp_path / "data.npz", np.array([{}], object))
    with pytest.raises(DataError, match="cannot be read as arrays"):
        MyMemoryDataloading(dataset_path=tmp_path)
    (tmp_path / "data.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(DataError, match=r"data.pkl.*is a pickle, which can run anything.*numpy.savez"):
        MyMemoryDataloading(dataset_path=tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Minari warns of a data set without an environment
@pytest.mark.parametrize("codec", [None, Codec({"obs": lambda obs: obs * 2}, {"obs": lambda obs: obs / 2})])
def test_a_data_set_of_minari_is_in_the_memory_at_the_beginning(codec, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    values, lengths, episode_buffers = np.random.default_rng(0), (5, 1, 9), []
    for number, length in enumerate(lengths):
        episode_buffers.append(EpisodeBuffer(
            id=number, observations=list(values.random((length + 1, 2), np.float32)), actions=[*map(int, values.integers(2, size=length))],
            rewards=[1.0] * length, terminations=[False] * (length - 1) + [True], truncations=[False] * length,
        ))  # fmt: skip
    about = {"algorithm_name": "random", "code_permalink": "https://example.invalid", "author": "a",
             "author_email": "a@b.c", "description": "made by a test", "data_format": "hdf5"}  # fmt: skip
    spaces = {"observation_space": gymnasium.spaces.Box(0, 1, (2,)), "action_space": gymnasium.spaces.Discrete(2)}
    data_set = minari.create_dataset_from_buffers("memoire/numbers-v0", episode_buffers, **spaces, **about)
    memory = GenericMemory(dataset_path="minari:memoire/numbers-v0", codec=codec)
    assert len(memory) == sum(lengths)
    item = 0
    for episode in data_set.iterate_episodes():
        for step in range(len(episode.rewards)):
            last_obs, act, _, new_obs, terminated, truncated, _ = memory.rings.transition(item)
            assert (last_obs == episode.observations[step]).all() and (new_obs == episode.observations[step + 1]).all()
            assert act == episode.actions[step] and (terminated, truncated) == (step == len(episode.rewards) - 1, False)
            item += 1


def test_episodes_without_steps_are_refused():
    episode = SimpleNamespace(id=7, rewards=[], actions=np.zeros(0), observations=np.zeros(1), terminations=[])
    with pytest.raises(DataError, match="episode 7 of the data set has 0 rewards"):
        list(buffers_of([episode]))
    both = {"actions": (np.ones((1, 2)),), "observations": {"a": np.arange(2)}}
    (buffer,) = buffers_of([SimpleNamespace(id=1, rewards=[1.0], terminations=[False], **both)])
    assert buffer.memory[1][1] == {"a": 1} and buffer.memory[1][4] == {"__no_done": True}
    with pytest.raises(ParameterError, match="dataset_path must be 'minari:NAME'"):
        GenericMemory(dataset_path="data")


def test_a_memory_of_six_parts_gets_and_gives_terminated_and_truncated():
    class Six(TorchMemory):
        def append_buffer(self, buffer):
            self.data += buffer.memory

        def __len__(self):
            return max(0, len(self.data) - 1)

        def get_transition(self, item):
            act, obs, *more = self.data[item + 1]
            return self.data[item][1], act, more[0], obs, *more[1:]

    parts = [(0, i, 0.0, i == 2, i in (2, 3), {}) for i in range(4)]
    buffer = Buffer([Sample(*each) for each in parts])
    kept = SimpleNamespace(memory=[(*each[:4], {"__no_done": True} if i == 3 else {}) for i, each in enumerate(parts)])
    seen = []
    for source in (buffer, SimpleNamespace(memory=parts), kept):
        memory = Six(None, 1, lambda *six: seen.append(len(six)) or six, batch_size=8)
        memory.append(source)
        ends = [each[3:5] for each in memory.data]
        assert ends[:2] + ends[3:] == [(False, False), (False, False), (False, True)]
        assert ends[2] == (True, source is not kept), "five parts do not say that what terminated is truncated, too"
        assert [len(part) for part in memory.sample()] == [8] * 6 and memory[2][4:] == (0.0, 1.0)
    assert set(seen) == {6}
    with pytest.raises(TypeError, match="abstract"):
        MemoryDataloading(device=None, nb_steps=1)


def test_draws_follow_pythons_generator():
    memory = filled(MyMemoryDataloading(nb_steps=1))
    random.seed(3)
    first = memory.sample_indices()
    random.seed(3)
    assert memory.sample_indices() == first and len(set(first)) > 10
