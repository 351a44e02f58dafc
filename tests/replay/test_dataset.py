"""Episodes that leave a memory and return, also as Minari data sets, without changes, and refusals of damaged files."""

import dataclasses
import io
import random
import zipfile
from contextlib import nullcontext

import gymnasium
import minari
import numpy as np
import pytest
from minari.data_collector import EpisodeBuffer

import memoire.minari
from memoire import Buffer, Prioritized, Schema, _core
from memoire.errors import DataError, EpisodeTooLong, MemoireError, ParameterError
from memoire.replay import datafile as dataset_reading
from memoire.replay import dataset
from memoire.replay import saving as dataset_writing
from memoire.replay.memory import Memory
from memory_checks import check_memory
from memory_walk import Walk
from mutations import blank, cut, flip


def walked(seed, steps=60):
    """Return a memory of a random schema, filled by a random walk."""
    walk = Walk(random.Random(seed).choice)
    for _ in range(steps):
        walk.step()
    walk.memory._walked_until = walk.model.now
    return walk.memory


COMPARED = {each.name for each in dataclasses.fields(dataset.Episode)} - {"bootstrap_value", "is_cut", "is_open"}


def alike(one, other):
    for name in COMPARED:
        np.testing.assert_equal(getattr(one, name), getattr(other, name), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12 if _core.CHECKED else 6))
def test_an_episode_inserted_as_a_whole_is_as_one_that_was_recorded(seed):
    """Inserted episodes equal recorded ones for all columns, models, ends and evictions, and have the inserted ages."""
    source, rng = walked(seed), np.random.default_rng(seed)
    names = source.schema.entry_names
    longest = max((len(each) for each in dataset.episodes(source)), default=1)
    whole, recorded = (Memory(source.schema, 2 * longest, source.parameters, seed=1) for _ in range(2))
    for each in (whole, recorded):
        each.set_clock(5000.0)
    for episode in dataset.episodes(source):
        model, age = rng.integers(1, 4, len(episode)), rng.integers(0, 9, len(episode)).astype(np.float32)
        values = [episode.columns[name] for name in names]
        whole.insert(values, episode.init_w, model, age, **episode.close_arguments)
        recorded.open()
        for step in range(len(episode)):
            row = [value[step : step + 1] for value in values]
            recorded.extend(0, row, episode.init_w[step : step + 1], int(model[step]))
        recorded.close(**episode.close_arguments)
        newest, other = [list(dataset.episodes(each))[-1] for each in (whole, recorded)]
        np.testing.assert_array_equal(newest.born, 5000.0 - age)
        np.testing.assert_array_equal(newest.model_version, model)
        alike(newest, dataclasses.replace(other, born=newest.born))
        assert whole.newest_model == recorded.newest_model and whole.sums() == recorded.sums()
        check_memory(whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12 if _core.CHECKED else 6))
def test_whatever_a_memory_holds_comes_back_as_it_was(seed, tmp_path):
    memory = walked(seed)
    path = tmp_path / "memory.npz"
    count = dataset_writing.save(memory, path)
    saved = dataset_reading.read_summary(path)
    before = list(dataset.episodes(memory))
    assert (saved.schema, saved.parameters, saved.episodes) == (memory.schema, memory.parameters, count)
    assert saved.entries == memory.num_entries == sum(map(len, before))
    read = list(dataset_reading.load(path))
    for one, other in zip(before, read, strict=True):
        alike(one, other)
    again = Memory(memory.schema, memory.capacity + 300, memory.parameters, live=memory.live, seed=1)
    again.set_clock(memory._walked_until)
    again.saw_model(memory.newest_model)
    assert dataset_reading.fill(again, path) == count
    check_memory(again)
    closed = [episode for episode in before if not episode.is_open]
    limit = memory.parameters.max_episode
    kept = list(dataset.episodes(again))
    for one, other in zip([*closed, *(e for e in before if e.is_open)][-limit if limit else 0 :], kept, strict=True):
        if not one.is_open:
            alike(one, other)
    if not limit and len(closed) == len(before):
        own, theirs = (np.sort(each.contents()["weights"]) for each in (memory, again))
        np.testing.assert_allclose(theirs[theirs > 0], own[own > 0], rtol=1e-6)
        assert again.num_positive == memory.num_positive


def cartpole(capacity=200, **options):
    schema = Schema({"obs": (np.float32, (4,)), "action": np.int64, "reward": np.float32})
    buffer = Buffer(schema, capacity, sampler=Prioritized(0.7, beta=0.6), multi_step=3, discount=0.9, seed=3, **options)
    writer = buffer.writer(num_envs=2, autoreset="disabled", check=False)
    rng = np.random.default_rng(0)
    for step in range(60):
        obs = rng.normal(size=(2, 4)).astype(np.float32)
        done = np.array([step % 13 == 12, step % 17 == 16])
        writer.step(obs, rng.integers(0, 2, 2), rng.normal(size=2), done, np.zeros(2, bool), obs + 1)
    batch = buffer.sample(64)
    batch.update_priorities(rng.normal(size=64))
    return buffer


@pytest.mark.parametrize(
    ("fact", "wrong"),
    [
        ("model_version", -1), ("model_version", 1 << 53), ("priority", np.inf), ("born", np.nan), ("init_w", -1.0),
    ],
)  # fmt: skip
def test_facts_that_no_entry_can_have_are_refused_when_an_episode_is_put(fact, wrong):
    memory = cartpole().memory
    episode, before = next(iter(dataset.episodes(memory))), memory.info()
    values = np.array(getattr(episode, fact))
    values[-1] = wrong
    with pytest.raises(ParameterError, match=fact):
        dataset.put(memory, dataclasses.replace(episode, **{fact: values}), lane=7)
    assert memory.info() == before


OWN_NAMES = [
    *dataset.FACTS, "about", "bootstrap", "columns", "engine", "episodes", "final.obs", "group", "mask", "memory", "next",
    "number", "obs_length", "owner", "prev", "slots",
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in OWN_NAMES if name not in ("init_w", "model_version")])
@pytest.mark.parametrize("options", [{}, {"sequence_length": 3}])
def test_a_column_is_saved_and_drawn_whatever_files_and_batches_have_beside_it_or_is_refused(name, options, tmp_path):
    root, _, leaf = name.partition(".")
    schema = Schema({"obs": np.float32, "action": np.int64, "reward": np.float32, root: {leaf: int} if leaf else int})
    refused = pytest.raises(ParameterError, match="'mask'.*Rename the column")
    with refused if name == "mask" and options else nullcontext():
        buffer = Buffer(schema, 100, seed=0, **options)
        writer = buffer.writer()
        for step in range(10):
            value = {leaf: 100 + step} if leaf else 100 + step
            writer.step(step, step, 1.0, step == 9, False, step + 1, **{root: value})
        buffer.save(tmp_path / "b.npz")
        again = Buffer.load(tmp_path / "b.npz")
        np.testing.assert_array_equal(np.load(tmp_path / "b.npz")[name], np.arange(100, 110))
        for batch in (buffer.sample(16), again.sample(16)):
            there = batch["action"] if batch.gathered.mask is None else batch["action"][:, :1]
            np.testing.assert_array_equal(batch[name] if there.ndim == 1 else batch[name][:, :1], there + 100)
        with pytest.raises(ParameterError, match="Rename") if name in ("mask", "group") else nullcontext():
            np.testing.assert_array_equal(again.sample_episodes(1)[name][0], np.arange(100, 110))


def test_a_file_appears_whole_and_replaces_the_one_before(tmp_path):
    path = tmp_path / "b.npz"
    path.write_bytes(b"before")
    buffer = cartpole()

    def fail(*_):
        raise OSError("no space")

    original = dataset_writing._write
    dataset_writing._write = fail
    try:
        with pytest.raises(OSError, match="no space"):
            buffer.save(path)
    finally:
        dataset_writing._write = original
    assert path.read_bytes() == b"before"
    (tmp_path / "b.npz.new").write_bytes(b"the user's")
    (tmp_path / "link").symlink_to(path)
    buffer.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and len(Buffer.load(path)) == len(buffer)
    assert (tmp_path / "b.npz.new").read_bytes() == b"the user's"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["b.npz", "b.npz.new", "link"]


def test_what_does_not_fit_is_refused(tmp_path):
    buffer = cartpole()
    path = tmp_path / "b.npz"
    buffer.save(path)
    other = Memory(Schema({"obs": np.float32, "reward": np.float32}), 10)
    with pytest.raises(ParameterError, match="has the schema .*, but the memory has"):
        dataset_reading.fill(other, path)
    with pytest.raises(ParameterError, match="priority_exponent"):
        Buffer.load(path, priority_exponent=-1)
    with pytest.raises(EpisodeTooLong):
        Buffer.load(path, capacity=8)
    with pytest.raises(FileNotFoundError):
        Buffer.load(tmp_path / "none.npz")


def test_a_damaged_file_is_refused_or_read_as_it_was(tmp_path):
    buffer = cartpole()
    path = tmp_path / "b.npz"
    buffer.save(path)
    whole, episodes = path.read_bytes(), list(dataset_reading.load(path))
    rng, refused = random.Random(4), 0
    for _ in range(250):
        path.write_bytes(rng.choice((flip, cut, blank))(whole, rng))
        try:
            dataset_reading.read_summary(path)
            read = list(dataset_reading.load(path))
            Buffer.load(path)
        except MemoireError as error:
            assert str(path) in str(error) or isinstance(error, ParameterError)
            refused += 1
            continue
        for one, other in zip(episodes, read, strict=True):
            alike(one, other)
    assert refused > 200


@pytest.mark.parametrize(
    "change",
    [
        ("memory..about", b'{"form": 2}'),
        ("memory..about", b"[1"),
        ("memory..about", b"[" * 100_000),
        ("memory..episodes", np.zeros(3, "<i8")),
        ("obs", np.zeros((3, 4), np.float32)),
        ("obs", np.zeros((3, 4), np.float64)),
        ("obs", None),
        ("reward", "nan"),
        ("memory..init_w", "nan"),
        ("memory..model_version", -1),
        ("memory..model_version", 1 << 53),
    ],
)
def test_a_part_that_is_not_as_it_must_be_is_named(change, tmp_path):
    name, value = change
    cartpole().save(tmp_path / "b.npz")
    parts = dict(np.load(tmp_path / "b.npz"))
    if value is None:
        del parts[name]
    elif isinstance(value, int):
        parts[name] = np.full_like(parts[name], value)
    elif isinstance(value, str):
        parts[name] = np.full_like(parts[name], np.nan)
    else:
        parts[name] = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        for key, array in parts.items():
            stream = io.BytesIO()
            np.lib.format.write_array(stream, array, version=(2, 0))
            archive.writestr(key + ".npy", stream.getvalue())
    with pytest.raises(DataError, match="b.npz"):
        list(dataset_reading.load(tmp_path / "b.npz"))


def test_pickles_and_bombs_are_not_read(tmp_path):
    path = tmp_path / "b.npz"
    np.savez(path, **{"memory..about": np.array([object()], dtype=object)})
    with pytest.raises(DataError):
        dataset_reading.read_summary(path)
    np.savez(path, about=np.frombuffer(b'{"form": 1}', np.uint8))
    with pytest.raises(DataError, match="version"):
        dataset_reading.read_summary(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("memory..about.npy", bytes(1 << 24))
    with pytest.raises(DataError, match="compressed"):
        dataset_reading.read_summary(path)
    stream = io.BytesIO()
    np.lib.format.write_array_header_2_0(stream, {"descr": "|u1", "fortran_order": False, "shape": (1 << 60,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("memory..about.npy", stream.getvalue())
    with pytest.raises(DataError, match="holds"):
        dataset_reading.read_summary(path)


# --- Minari data sets: import and export without changes

ABOUT = {
    "data_format": "hdf5", "description": "made by a test", "author": "memoire", "author_email": "a@b.c",
    "code_permalink": "https://example.invalid", "algorithm_name": "random",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


class Walled(gymnasium.Env):
    """Environment with nested observations of three dtypes and a vector action; episodes terminate or are truncated."""

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


class TextEnvironment(Walled):
    """Environment whose observations hold text and a number."""

    observation_space = gymnasium.spaces.Dict({"words": gymnasium.spaces.Text(20), "at": gymnasium.spaces.Discrete(50)})

    def _seen(self):
        return {"words": "größer " * (self.at % 3), "at": np.int64(self.at)}


def collected(env, episodes, dataset_id):
    buffers = []
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
        buffers.append(buffer)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    return minari.create_dataset_from_buffers(dataset_id, buffers, **spaces, **ABOUT)


def opened(seen):
    """Replace each leaf of an observation by a list of that leaf."""
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


@pytest.mark.filterwarnings("ignore")  # minari and gymnasium warn of facts that a hand-made environment lacks
@pytest.mark.parametrize("kind", ["CartPole-v1", "nested", "text"])
def test_a_data_set_of_a_real_environment_goes_in_and_out_unchanged(kind):
    env = Walled() if kind == "nested" else TextEnvironment() if kind == "text" else gymnasium.make(kind)
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


class MinariEpisode:
    def __init__(self, **parts):
        self.id, self.infos = 7, parts.pop("infos", None)
        vars(self).update(parts)


def test_episodes_that_are_not_whole_are_named():
    memory = Memory(Schema({"obs": np.float32, "action": np.int64, "reward": np.float32, "logp": np.float32}), 20)
    whole = {"observations": np.zeros(4), "actions": np.zeros(3, int), "rewards": np.ones(3), "terminations": [0, 0, 1]}
    for wrong, text in (
        ({"observations": np.zeros(3)}, "3 values of 'obs' and 3 rewards"),
        ({"rewards": np.ones(0)}, "0 rewards"),
        ({"infos": {"other": 1}}, "has no info 'logp'; its infos are 'other'"),
    ):
        with pytest.raises(DataError, match=f"episode 7, .*{text}"):
            memoire.minari.fill(memory, [MinariEpisode(**{"infos": {"logp": np.zeros(3)}} | whole | wrong)])
    assert memory.num_entries == 0
    assert memoire.minari.fill(memory, [MinariEpisode(**whole, infos={"logp": np.arange(3.0)})]) == 1
    assert memory.num_episodes == 1
    with pytest.raises(ParameterError, match="a final state"):
        memoire.minari.write(Memory(memory.schema, 4), "test/none-v0")
    with pytest.raises(ParameterError, match="obs, action and a scalar reward"):
        memoire.minari.write(Memory(Schema({"state": np.float32}), 4), "test/none-v0")
    for column, value in (((np.int16, (None,)), [1, 2]), ((np.uint8, (None,)), [255, 0])):
        buffer = Buffer({"obs": column, "action": np.int64, "reward": np.float32}, 9)
        buffer.writer().step(value, 0, 1.0, True, False, value)
        with pytest.raises(ParameterError, match="only if they are text in UTF-8; column 'obs'"):
            memoire.minari.write(buffer.memory, "test/none-v0")
