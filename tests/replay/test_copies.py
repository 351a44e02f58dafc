"""A buffer can be copied and pickled, a batch without its memory; whatever cannot says what to do."""

import copy
import io
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest

import memoire
from memoire.classic.notebook import PrioritizedReplayBuffer
from memoire.errors import DataError, NotCopied, ParameterError

SCHEMA = {"obs": (np.float32, (3,)), "action": np.int64, "reward": np.float32}
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
}


def buffer_of(steps=25, **options):
    buffer = memoire.Buffer(SCHEMA, 100, seed=1, **{"sampler": memoire.Prioritized(1.0)} | options)
    with buffer.writer() as writer:
        for step in range(steps):
            place = step + 1000 * (step // 10)  # an episode begins where none has ended
            obs = np.full(3, place, np.float32)
            writer.step(obs, place, float(step), step % 10 == 9, False, obs + 1)
    return buffer


@pytest.mark.parametrize("way", COPIES)
def test_a_copied_buffer_holds_the_same_and_goes_its_own_way(way):
    buffer = buffer_of(multi_step=2, discount=0.9)
    buffer.update_priorities(buffer.sample(64).ids, np.linspace(1.0, 9.0, 64))
    made = COPIES[way](buffer)
    assert (len(made), made.num_episodes, made.parameters, made.schema) == (25, 3, buffer.parameters, buffer.schema)
    mine, its = (np.sort(each.memory.contents()["weights"]) for each in (buffer, made))
    np.testing.assert_allclose(mine, its)
    batch = made.sample(32)
    assert (batch.obs[:, 0] == batch.action).all()
    batch.update_priorities(np.full(32, 100.0))
    assert buffer.memory.total_weight == pytest.approx(mine.sum()) and made.memory.total_weight > 2 * mine.sum()
    with made.writer() as writer:
        writer.step(np.zeros(3), 0, 0.0, True, False, np.ones(3))
    assert (len(made), len(buffer)) == (26, 25)


@pytest.mark.parametrize("way", COPIES)
def test_beta_goes_on_where_it_was(way):
    buffer = buffer_of(sampler=memoire.Prioritized(1.0, beta=memoire.Linear(0.0, 1.0, 10)))
    for _ in range(10):
        buffer.update_priorities(buffer.sample(64).ids, np.linspace(1.0, 9.0, 64))
    importance = COPIES[way](buffer).sample(64).importance
    assert importance.min() < 0.5, "beta is 1 from the tenth batch on"
    assert buffer.sample(64).importance.min() < 0.5


@pytest.mark.parametrize("way", COPIES)
def test_an_empty_buffer_and_one_with_an_open_episode_are_copied(way):
    assert len(COPIES[way](memoire.Buffer(SCHEMA, 10))) == 0
    buffer = memoire.Buffer(SCHEMA, 10)
    writer = buffer.writer()
    writer.step(np.zeros(3), 0, 0.0, False, False, np.ones(3))
    made = COPIES[way](buffer)
    assert (len(made), made.num_episodes) == (1, 0)
    made.writer()
    assert (len(made), made.num_episodes, buffer.num_episodes) == (1, 1, 0)


def test_a_pickle_that_is_cut_short_is_refused():
    kind, arguments = buffer_of().__reduce_ex__(4)
    with pytest.raises(DataError, match="in memory"):
        kind(arguments[0], arguments[1][:-100])


def test_a_buffer_is_loaded_from_a_file_that_is_open(tmp_path):
    buffer_of().save(tmp_path / "replay.npz")
    with open(tmp_path / "replay.npz", "rb") as file:
        assert len(memoire.Buffer.load(file)) == 25
    assert len(memoire.Buffer.load(io.BytesIO((tmp_path / "replay.npz").read_bytes()), capacity=12)) <= 12


def test_a_pickled_batch_has_its_arrays_and_not_the_memory():
    buffer = buffer_of(steps=60)
    batch = buffer.sample(4)
    content = pickle.dumps(batch)
    assert len(content) < 5_000
    made = pickle.loads(content)
    assert list(made) == list(batch) and all(np.array_equal(made[name], batch[name]) for name in batch)
    assert repr(made) == repr(batch) and made.next_obs.shape == (4, 3)
    with pytest.raises(ParameterError, match="handed to update_priorities of the memory that they are from"):
        made.update_priorities(np.ones(4))
    assert buffer.update_priorities(made.ids, np.ones(4)).applied == 4


@pytest.mark.parametrize("way", ["copy", "deepcopy"])
def test_a_copied_batch_reports_to_the_same_memory(way):
    buffer = buffer_of()
    batch = buffer.sample(4)
    made = COPIES[way](batch)
    assert made.update_priorities(np.full(4, 7.0)).applied == 4
    assert buffer.memory.weights(batch.ids) == pytest.approx(7.0)
    assert (made.obs is batch.obs) == (way == "copy")
    assert made.gathered.ids is made.ids, "no array is copied twice"


@pytest.mark.parametrize("way", COPIES)
def test_whatever_cannot_be_copied_says_what_to_do(way):
    with memoire.Server(None, SCHEMA) as server:
        for made, said in (
            (buffer_of().memory, "a Memory can neither be copied nor pickled. Write memoire.dataset.save"),
            (buffer_of().writer(), r"a Writer can .* Make another one, .*buffer.writer\(\.\.\.\)"),
            (server, "a Server can neither be copied nor pickled. Make one in each process"),
            (server.table("default"), r"a TableHandle can .*server.table\(name\)"),
        ):
            with pytest.raises(NotCopied, match=said):
                COPIES[way](made)


def by_file(buffer):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved.npz"
        buffer.save(path)
        return memoire.Buffer.load(path)


SAVED = {**COPIES, "file": by_file}
SAMPLERS = {
    "prioritized": {"sampler": memoire.Prioritized(0.7, beta=memoire.Linear(0.2, 1.0, 30))},
    "rank": {"sampler": memoire.RankBased(0.7)},
    "greedy": {"sampler": memoire.Greedy()},
    "uniform": {"sampler": memoire.Uniform(stratified=True)},
    "n-step": {"multi_step": 3, "discount": 0.9, "frame_stack": 2},
    "sequences": {"sequence_length": 4, "sequence_overlap": 2, "burn_in": 1},
    "drawn 40 times": {"max_times_sampled": 40},
    "any age": {"max_age": 5000.0},
    "limited": {"max_times_sampled": 40, "max_model_lag": 3, "samples_per_insert_tolerance": 1e6, "min_size": 5},
}
FORMS = {
    "plain": SCHEMA,
    "ragged": SCHEMA | {"words": memoire.Column(np.int32, (None, 2))},
    "ragged states": {"obs": memoire.Column(np.float32, (None,), "state"), "action": np.int64, "reward": np.float32},
}


def fill(buffer, start, steps, rng):
    with buffer.writer() as writer:
        for step in range(start, start + steps):
            extras = {"words": rng.integers(0, 9, (step % 4, 2))} if "words" in buffer.schema else {}
            sizes = (step % 3 + 1, (step + 1) % 3 + 1) if buffer.schema["obs"].is_ragged else (3, 3)
            place = step + 1000 * (step // 7)
            obs, after = (np.full(size, place + i, np.float32) for i, size in enumerate(sizes))
            ends = step % 7 == 6 and step % 14 != 13, step % 14 == 13
            writer.step(obs, step, step / 9, *ends, after, model_version=1 + step // 50, **extras)


@pytest.mark.parametrize("way", SAVED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_buffer_that_goes_on_from_a_saved_form_draws_what_it_would_have_drawn(kind, form, way):
    buffer = memoire.Buffer(FORMS[form], 60, seed=3, ragged_limit=4000 if "ragged" in form else 0, **SAMPLERS[kind])
    buffer.memory.set_clock(1000.0)
    fill(buffer, 0, 150, np.random.default_rng(1))  # wraps
    for _ in range(3):
        batch = buffer.sample(8)
        batch.update_priorities(np.arange(len(batch.ids)) ** 2.0)
    made = SAVED[way](buffer)
    made.memory.set_clock(1000.0)
    made.memory.check_invariants()
    for start in (200, 230):
        for _ in range(3):
            one, other = buffer.sample(8), made.sample(8)
            assert list(one) == list(other)
            for name in one:
                np.testing.assert_array_equal(one[name], other[name], err_msg=name)
            assert np.array_equal(one.ids, other.ids)
            for each in (one, other):
                each.update_priorities(np.arange(len(each.ids)) * 1.5)
        episodes, others = buffer.sample_episodes(2), made.sample_episodes(2)
        np.testing.assert_array_equal(episodes.mask, others.mask)
        assert buffer.memory.sums() == made.memory.sums() and buffer.rate.surplus == made.rate.surplus
        for each in (buffer, made):
            fill(each, start, 20, np.random.default_rng(start))


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("stratified", [False, True])
def test_the_notebooks_buffer_goes_on_from_a_copy_as_it_would_have_and_on_its_own(way, stratified):
    one = PrioritizedReplayBuffer(5, 0.6, seed=1, stratified=stratified)
    one.extend(range(7))
    one.update_priorities(np.arange(5), np.array([0.1, 0.7, 3.0, 1.0, 0.3]))
    other = COPIES[way](one)
    for step in range(4):
        mine, its = one.sample(6, 0.4), other.sample(6, 0.4)
        assert all(np.array_equal(mine[name], its[name]) for name in mine)
        for each in (one, other):
            each.update_priorities(mine["indexes"], mine["weights"] + step)
    other.add("its own")
    assert "its own" not in one.data


def test_a_loaded_buffer_draws_by_the_seed_that_it_is_given(tmp_path):
    path = tmp_path / "replay.npz"
    buffer = buffer_of(sampler=memoire.Prioritized(0.7, stratified=True))
    buffer.sample(5)
    buffer.save(path)

    def drawn(**options):
        made = memoire.Buffer.load(path, **options)
        made.close()
        return [made.sample(16).ids.tolist() for _ in range(3)] + [made.sample_episodes(1).steps.tolist()]

    same = drawn()
    assert same == drawn(resume=True) == drawn(seed=None)
    assert drawn(seed=4) == drawn(seed=4, resume=True) == drawn(seed=np.int64(4))
    assert len({str(each) for each in (same, drawn(seed=4), drawn(seed=5), drawn(seed=1))}) == 4
    with pytest.raises(ParameterError, match="seed"):
        memoire.Buffer.load(path, seed=-1)


@pytest.mark.parametrize("capacity", [40, 26, 300])
def test_a_buffer_that_is_loaded_with_another_capacity_holds_the_newest_episodes_and_all_that_is_known_of_them(
    capacity, tmp_path
):
    path = tmp_path / "replay.npz"
    buffer = memoire.Buffer(SCHEMA, 60, seed=3, sampler=memoire.Prioritized(0.7, beta=memoire.Linear(0.0, 1.0, 10)))
    fill(buffer, 0, 150, np.random.default_rng(1))
    writer = buffer.writer()
    for step in range(3):
        writer.step(np.full(3, 9000 + step), 9000 + step, 0.0, False, False, np.full(3, 9001 + step))
    batch = buffer.sample(32)
    batch.update_priorities(np.linspace(1.0, 9.0, 32))
    buffer.save(path)
    made = memoire.Buffer.load(path, capacity=capacity)
    made.memory.check_invariants()
    assert (made.capacity, made.writer(resume=True).lanes.tolist()) == (capacity, [0])

    def known(memory):
        meta = memory.contents()["meta"]
        facts = zip(
            *(meta[name].tolist() for name in ("born", "model_version", "priority", "learned", "drawn")), strict=True
        )
        held = meta["episode"] >= 0
        actions = memory.contents()["columns"][memory.schema.names.index("action")].reshape(-1).view(np.int64)
        return {int(action): fact for action, fact, is_held in zip(actions, facts, held, strict=True) if is_held}

    mine, its = known(buffer.memory), known(made.memory)
    assert its.items() <= mine.items() and len(its) > min(capacity, 50) - 8
    assert max(its) == max(mine) == 9002 and made.num_episodes == len({a // 7 for a in its if a < 9000}) + 1
    smallest = [each.sample(32).importance.min() for each in (buffer, made)]
    assert max(smallest) < 1.0, "beta has begun its way"


def test_a_saved_memory_draws_what_it_would_have_drawn_in_a_loaded_buffer(tmp_path):
    buffer = memoire.Buffer(SCHEMA, 60, seed=3, sampler=memoire.RankBased(0.7))
    fill(buffer, 0, 150, np.random.default_rng(1))
    buffer.sample(4)
    memoire.dataset.save(buffer.memory, tmp_path / "memory.npz")
    made = memoire.Buffer.load(tmp_path / "memory.npz")
    one, other = buffer.sample(16), made.sample(16)
    assert all(np.array_equal(one[name], other[name]) for name in one if name != "age")
    assert np.array_equal(one.ids, other.ids) and np.array_equal(one.importance, other.importance)
