"""A buffer can be copied and pickled, a batch without its memory; whatever cannot says what to do."""

import copy
import io
import pickle

import numpy as np
import pytest

import memoire
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
    assert (len(made), made.num_episodes, buffer.num_episodes) == (1, 1, 0)


def test_a_pickle_that_is_cut_short_is_refused():
    kind, arguments = buffer_of().__reduce_ex__(4)
    with pytest.raises(DataError, match="in memory"):
        kind(arguments[0], arguments[1][:-100], arguments[2])


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
