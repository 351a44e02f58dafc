"""Buffers in one process: targets, transitions, several threads, seeds, copies and files."""

import copy
import gc
import pickle
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import memoire
from coded_env import KINDS, CodedEnv, action_at, decode, drive, reward_at
from memoire.classic.notebook import PrioritizedReplayBuffer
from memoire.errors import EmptyMemory, NotCopied, ParameterError
from memoire.replay.buffer import Buffer
from memoire.replay.sampling import Prioritized, Uniform
from memoire.replay.schema import Schema
from memory_checks import check_memory
from netkit import in_thread, switching_often


def chain_value(t: int, length: int, gamma: float) -> float:
    """Return the value of square t of a chain of `length` steps, where the step from square s earns s + 1.

    The value is the sum over s < k of gamma**s * (t + 1 + s), with k = length - t, computed by the sums of the
    geometric series and of its derivative.
    """
    k = length - t
    if gamma == 1.0:
        return k * (t + 1) + k * (k - 1) / 2
    geometric = (1 - gamma**k) / (1 - gamma)
    derivative = gamma * (1 - k * gamma ** (k - 1) + (k - 1) * gamma**k) / (1 - gamma) ** 2
    return (t + 1) * geometric + derivative


def walk_chain(buffer: Buffer, length: int, stop: int) -> None:
    """Walk to square `stop`; the chain's end terminates, any other stop truncates."""
    with buffer.writer() as writer:
        for t in range(stop):
            at_end = t + 1 == stop
            writer.step(
                np.float32([t]), t, t + 1.0, at_end and stop == length, at_end and stop < length, np.float32([t + 1])
            )


CHAIN = Schema({"obs": (np.float32, (1,)), "action": np.int64, "reward": np.float32})


@pytest.mark.parametrize("multi_step", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("stop", [1, 2, 4, 9])
def test_targets_are_the_true_values_at_both_kinds_of_end(multi_step: int, gamma: float, stop: int) -> None:
    length = 9
    buffer = Buffer(CHAIN, 50, sampler=Uniform(), multi_step=multi_step, discount=gamma, seed=0)
    walk_chain(buffer, length, stop)
    batch = buffer.sample(400)
    t, after = batch.obs[:, 0].astype(int), batch.next_obs[:, 0].astype(int)
    assert set(t) == set(range(stop)), "every step can be drawn, the last one too"
    np.testing.assert_array_equal(batch.action, t)
    np.testing.assert_array_equal(batch.steps, np.minimum(multi_step, stop - t))
    np.testing.assert_array_equal(after, t + batch.steps)
    np.testing.assert_allclose(batch.discount, np.where(after == length, 0.0, float(gamma) ** batch.steps), rtol=1e-6)
    value = np.array([chain_value(s, length, gamma) for s in range(length)] + [1e9])  # nothing may read the last value
    earned = value[t] - np.where(after == length, 0.0, gamma**batch.steps) * value[after]
    np.testing.assert_allclose(batch.reward, earned, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(batch.reward + batch.discount * value[after], value[t], rtol=1e-5)


def check_batch(
    batch: memoire.Batch, schema: Schema, kind: str, lengths: Any, ends: Any, multi_step: int, stack: int
) -> set[Any]:
    """Check each sample of a batch of coded observations; return the places that were drawn."""
    seen = set()
    for b in range(len(batch.ids)):
        sides = []
        for prefix in ("", "next_"):
            leaves = [batch[prefix + name][b] for name in schema.leaves("obs")]
            frames = [leaves] if stack == 1 else [[leaf[k] for leaf in leaves] for k in range(stack)]
            sides.append([decode(kind, frame) for frame in frames])
        environment, episode, t = place = sides[0][-1]
        length, end = (each[environment][episode % len(each[environment])] for each in (lengths, ends))
        steps = int(batch.steps[b])
        assert steps == min(multi_step, length - t)
        for side, newest in zip(sides, (t, t + steps), strict=True):
            assert side == [(environment, episode, max(newest - k, 0)) for k in reversed(range(stack))]
        is_terminal = t + steps == length and end != "truncated"
        assert batch.discount[b] == pytest.approx(0.0 if is_terminal else 0.9**steps)
        assert batch.action[b] == action_at(place)
        earned = sum(0.9**s * reward_at((environment, episode, t + s)) for s in range(steps))
        assert batch.reward[b] == pytest.approx(earned, rel=1e-5)
        seen.add(place)
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", tuple(AutoresetMode), ids=lambda mode: mode.value)
def test_batches_hold_true_transitions_while_the_buffer_overflows(mode: AutoresetMode, kind: str) -> None:
    lengths = [[1, 4, 2], [3, 1, 6], [5, 2, 1]]
    ends = [["terminated", "truncated"], ["both", "truncated"], ["truncated", "terminated", "both"]]
    fns = [lambda i=i: CodedEnv(i, lengths[i], ends[i], kind) for i in range(3)]
    envs = SyncVectorEnv(fns, autoreset_mode=mode)
    schema = Schema.from_env(envs)
    buffer = Buffer(schema, 53, multi_step=3, discount=0.9, frame_stack=2, sampler=Uniform(), seed=1)
    writer = buffer.writer(envs)
    seen = set()
    for t, _ in enumerate(drive(envs, writer, schema, kind, 60)):
        if t >= 3 and t % 3 == 0:
            batch = buffer.sample(16)
            seen |= check_batch(batch, schema, kind, lengths, ends, 3, 2)
            buffer.update_priorities(batch.ids, np.ones(16))
    assert len(buffer) <= 53 and len(seen) > 60
    with pytest.raises(AssertionError):  # the check must notice a wrong transition
        batch = buffer.sample(16)
        batch["reward"][:] += 1
        check_batch(batch, schema, kind, lengths, ends, 3, 2)


def test_entries_can_be_drawn_before_their_episode_ends() -> None:
    buffer = Buffer(CHAIN, 100, multi_step=3, seed=0)
    writer = buffer.writer()
    for t in range(3):
        writer.step(np.float32([t]), t, 1.0, False, False, np.float32([t + 1]))
        with pytest.raises(EmptyMemory):
            buffer.sample(1)
    writer.step(np.float32([3]), 3, 1.0, False, False, np.float32([4]))
    assert set(buffer.sample(20).action) == {0}
    assert buffer.num_episodes == 0 and len(buffer) == 4


def test_endless_episodes_are_cut_to_make_room() -> None:
    buffer = Buffer(CHAIN, 40, sampler=Uniform(), multi_step=2, seed=0)
    writer = buffer.writer()
    for t in range(500):
        writer.step(np.float32([t]), t, 1.0, False, False, np.float32([t + 1]))
    batch = buffer.sample(300)
    assert batch.obs.min() >= 460 and len(set(batch.action)) > 30
    np.testing.assert_array_equal(batch.next_obs[:, 0], batch.obs[:, 0] + batch.steps)
    assert (batch.discount > 0).all(), "a cut is no end"


def test_parameters_can_be_changed_and_apply_to_what_is_stored() -> None:
    buffer = Buffer(CHAIN, 32, sampler=Prioritized(1.0, beta=0.4), seed=0)
    walk_chain(buffer, 8, 8)
    batch = buffer.sample(64)
    batch.update_priorities(batch.action + 1.0)
    buffer.configure(importance_exponent=1.0, multi_step=4, discount=0.5)
    batch = buffer.sample(64)
    assert batch.steps.max() == 4 and set(batch.discount) <= {0.0, 0.0625}
    assert batch.importance.min() < 0.4
    buffer.configure(sampler=Uniform())
    assert (buffer.sample(64).importance == 1.0).all()
    before = buffer.parameters
    with pytest.raises(ParameterError, match="multi_step must be a whole number"):
        buffer.configure(multi_step=0, discount=0.1)
    with pytest.raises(ParameterError, match="discount must be 1 number"):
        buffer.configure(discount=(0.1, 0.2))
    with pytest.raises(ParameterError, match="takes no 'alpha'. Write sampler=memoire"):
        buffer.configure(alpha=1.0)
    assert buffer.parameters == before


def test_several_threads_write_draw_report_and_configure_at_once() -> None:
    """Each row holds a code of its origin, so that the test notices torn and overwritten samples."""
    schema = Schema({"obs": (np.float64, (64,)), "action": np.int64, "reward": np.float32})
    buffer = Buffer(schema, 300, sampler=Prioritized(0.6), frame_stack=2, multi_step=2, discount=1.0, seed=0)
    stop = threading.Event()

    def write(thread: int) -> None:
        with buffer.writer(num_envs=2, autoreset="disabled", check=False) as writer:  # the environments are never reset
            for t in range(400):
                code = np.array([thread * 100_000 + 10_000 * i + t for i in range(2)])
                obs, after = (np.repeat(code[:, None] + d, 64, axis=1).astype(np.float64) for d in (0, 1))
                done = np.full(2, t % 17 == 16)
                writer.step(obs, code, code.astype(np.float64) % 1000, done, ~done & (t % 5 == 0), after)

    def read() -> None:
        while not stop.is_set():
            with suppress(EmptyMemory):
                batch = buffer.sample(32)
                assert (batch.obs == batch.obs[..., :1]).all() and (batch.next_obs == batch.next_obs[..., :1]).all()
                assert (batch.obs[:, -1, 0] == batch.action).all()
                assert (batch.next_obs[:, -1, 0] == batch.action + batch.steps).all()
                assert np.isin(np.diff(batch.obs[..., 0]), (0, 1)).all(), "a stack is of one episode"
                batch.update_priorities(batch.importance)

    def tune() -> None:
        while not stop.is_set():
            buffer.configure(multi_step=2)
            buffer.configure(multi_step=3)

    with switching_often():
        writers = [in_thread(write, i) for i in range(2)]
        others = [in_thread(work) for work in (read, read, tune)]
        for thread, _ in writers:
            thread.join(100)
        stop.set()
        for thread, _ in others:
            thread.join(100)
    assert [box for _, box in writers + others] == [{"value": None}] * 5
    assert buffer.memory.generated == 2 * 2 * 400
    check_memory(buffer.memory)


def buffer_of(seed: int | None = 0, **options: Any) -> Buffer:
    buffer = Buffer(CHAIN, 100, seed=seed, **options)
    for stop in (9, 4, 7):
        walk_chain(buffer, 9, stop)
    return buffer


@pytest.mark.slow
def test_a_vector_environment_that_has_no_room_is_refused() -> None:
    buffer = Buffer(CHAIN, 10)
    for _ in range(4):  # each writer takes the lanes of the former writer
        buffer.writer(num_envs=3, autoreset="disabled")
        gc.collect()
    kept = buffer.writer(num_envs=3, autoreset="disabled")
    assert kept.lanes.tolist() == [0, 1, 2]
    with pytest.raises(ParameterError, match="num_envs must be at most 5 together with other writers"):
        buffer.writer(num_envs=3, autoreset="disabled")


def test_info_and_repr_say_what_is_there_and_an_empty_buffer_says_so() -> None:
    empty = Buffer(CHAIN, 10)
    assert empty and len(empty) == 0
    with pytest.raises(EmptyMemory, match="nothing to draw: 0 entries are stored"):
        empty.sample(4)
    buffer = buffer_of()
    assert buffer.info()["num_entries"] == len(buffer) == 20 and buffer.info()["live"]
    assert repr(buffer).startswith("Buffer(20 of 100 entries, 3 episodes, Schema(obs: float32[1] (state)")


# --- Copies and pickles of buffers and batches, and errors of objects that cannot be copied

SCHEMA = {"obs": (np.float32, (3,)), "action": np.int64, "reward": np.float32}
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda source: pickle.loads(pickle.dumps(source)),
}


def buffer_for_copies(steps=25, **options):
    buffer = memoire.Buffer(SCHEMA, 100, seed=1, **{"sampler": memoire.Prioritized(1.0)} | options)
    with buffer.writer() as writer:
        for step in range(steps):
            place = step + 1000 * (step // 10)  # no episode begins where another episode has ended
            obs = np.full(3, place, np.float32)
            writer.step(obs, place, float(step), step % 10 == 9, False, obs + 1)
    return buffer


def test_a_pickled_batch_has_its_arrays_and_not_the_memory():
    buffer = buffer_for_copies(steps=60)
    batch = buffer.sample(4)
    content = pickle.dumps(batch)
    assert len(content) < 5_000
    loaded = pickle.loads(content)
    assert list(loaded) == list(batch) and all(np.array_equal(loaded[name], batch[name]) for name in batch)
    assert repr(loaded) == repr(batch) and loaded.next_obs.shape == (4, 3)
    with pytest.raises(ParameterError, match="pass its ids to update_priorities of the memory that they come from"):
        loaded.update_priorities(np.ones(4))
    assert buffer.update_priorities(loaded.ids, np.ones(4)).applied == 4


@pytest.mark.parametrize("way", ["copy", "deepcopy"])
def test_a_copied_batch_reports_to_the_same_memory(way):
    buffer = buffer_for_copies()
    batch = buffer.sample(4)
    copied = COPIES[way](batch)
    assert copied.update_priorities(np.full(4, 7.0)).applied == 4
    assert buffer.memory.weights(batch.ids) == pytest.approx(7.0)
    assert (copied.obs is batch.obs) == (way == "copy")
    assert copied.gathered.ids is copied.ids, "no array is copied twice"


@pytest.mark.parametrize("way", COPIES)
def test_whatever_cannot_be_copied_says_what_to_do(way):
    with memoire.Server(None, SCHEMA) as server:
        for source, text in (
            (buffer_for_copies().memory, "a Memory can neither be copied nor pickled. Write memoire.dataset.save"),
            (buffer_for_copies().writer(), r"a Writer can .* Make another one, .*buffer.writer\(\.\.\.\)"),
            (server, "a Server can neither be copied nor pickled. Make one in each process"),
            (server.table("default"), r"a TableHandle can .*server.table\(name\)"),
        ):
            with pytest.raises(NotCopied, match=text):
                COPIES[way](source)


def fill(buffer, steps):
    """Record episodes of 7 steps, terminated and truncated in turn, with a new model version every 50 steps."""
    with buffer.writer() as writer:
        for step in range(steps):
            place = step + 1000 * (step // 7)
            obs, after = np.full(3, place), np.full(3, place + 1)
            ends = step % 7 == 6 and step % 14 != 13, step % 14 == 13
            writer.step(obs, step, step / 9, *ends, after, model_version=1 + step // 50)


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
    buffer = buffer_for_copies(sampler=memoire.Prioritized(0.7, stratified=True))
    buffer.sample(5)
    buffer.save(path)

    def drawn(**options):
        loaded = memoire.Buffer.load(path, **options)
        loaded.close()
        return [loaded.sample(16).ids.tolist() for _ in range(3)] + [loaded.sample_episodes(1).steps.tolist()]

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
    fill(buffer, 150)
    writer = buffer.writer()
    for step in range(3):
        writer.step(np.full(3, 9000 + step), 9000 + step, 0.0, False, False, np.full(3, 9001 + step))
    batch = buffer.sample(32)
    batch.update_priorities(np.linspace(1.0, 9.0, 32))
    assert buffer.save(path) == len(list(memoire.dataset.episodes(buffer.memory)))
    loaded = memoire.Buffer.load(path, capacity=capacity)
    check_memory(loaded.memory)
    assert (loaded.capacity, loaded.writer(resume=True).lanes.tolist()) == (capacity, [0])
    assert (loaded.schema, loaded.parameters) == (buffer.schema, buffer.parameters)
    assert memoire.Buffer.load(path, priority_exponent=0.0).parameters.priority_exponent == 0.0

    def known(memory):
        meta = memory.contents()["meta"]
        facts = zip(
            *(meta[name].tolist() for name in ("born", "model_version", "priority", "learned", "drawn")), strict=True
        )
        held = meta["episode"] >= 0
        actions = memory.contents()["columns"][memory.schema.names.index("action")].reshape(-1).view(np.int64)
        return {int(action): fact for action, fact, is_held in zip(actions, facts, held, strict=True) if is_held}

    mine, its = known(buffer.memory), known(loaded.memory)
    assert its.items() <= mine.items() and len(its) > min(capacity, 50) - 8
    assert max(its) == max(mine) == 9002 and loaded.num_episodes == len({a // 7 for a in its if a < 9000}) + 1
    smallest = [each.sample(32).importance.min() for each in (buffer, loaded)]
    assert max(smallest) < 1.0, "beta has begun its way"


def test_a_saved_memory_draws_what_it_would_have_drawn_in_a_loaded_buffer(tmp_path):
    buffer = memoire.Buffer(SCHEMA, 60, seed=3, sampler=memoire.RankBased(0.7))
    fill(buffer, 150)
    buffer.sample(4)
    memoire.dataset.save(buffer.memory, tmp_path / "memory.npz")
    loaded = memoire.Buffer.load(tmp_path / "memory.npz")
    one, other = buffer.sample(16), loaded.sample(16)
    assert all(np.array_equal(one[name], other[name]) for name in one if name != "age")
    assert np.array_equal(one.ids, other.ids) and np.array_equal(one.importance, other.importance)
