"""Runs that were saved within an episode and resumed, compared with uninterrupted runs, and locks of buffers."""

import copy
import io
import itertools
import json
import os
import pickle
import shutil
import signal
import threading
import zipfile

import numpy as np
import pytest

import memoire
from coded_env import CodedEnv, EnvironmentPool, part_of
from memoire.errors import (
    BufferLocked,
    BufferSaveConflict,
    DataError,
    EpisodeTorn,
    ForkedError,
    ParameterError,
    TwoThreads,
)
from memoire.replay.memory_state import ABOUT, ARRAYS, STATE
from memory_checks import RecordingObserver, check_memory
from netkit import in_thread, switching_often

KIND_OF = {"plain": "box", "ragged": "set", "nested": "dict", "lambda": "box"}
"""Kind of environment for each form, see `coded_env`."""
EXTRA = {
    "v": memoire.Column(np.float32, (2,), "value"),
    "q": memoire.Column(np.float32, (2,), "return"),
    "carry": (np.float64, (4,)),
}


def schema_of(form):
    env = CodedEnv(0, [1], ["both"], KIND_OF[form])
    return memoire.Schema.from_env(env, **({"extra": EXTRA, "reward_shape": (2,)} if form == "lambda" else {}))


FORMS = {form: schema_of(form) for form in KIND_OF}
SAMPLERS = {
    "prioritized": {"sampler": memoire.Prioritized(0.7, beta=memoire.Linear(0.2, 1.0, 30))},
    "stratified": {"sampler": memoire.Prioritized(0.5, stratified=True)},
    "rank": {"sampler": memoire.RankBased(0.7)},
    "greedy": {"sampler": memoire.Greedy()},
    "uniform": {"sampler": memoire.Uniform(stratified=True)},
    "n-step": {"multi_step": 3, "discount": 0.9, "frame_stack": 2},
    "skip": {"multi_step": 2, "frame_stack": 3, "start": "skip"},
    "sequences": {"sequence_length": 4, "sequence_overlap": 2, "burn_in": 1},
    "limited": {"max_times_sampled": 9, "max_model_lag": 3, "samples_per_insert_tolerance": 1e6, "min_size": 5},
    "times": {"max_times_sampled": 3},
    "age": {"max_age": 5000.0},
    "lag": {"max_model_lag": 1},
    "lambda": {"mix_lambda": 0.8, "discount": (0.9, 0.5), "multi_step": 2},
}
WRITERS = {
    "single": {},
    "cut": {"longest": 4},
    "unchecked": {"check": False},
    "next_step": {"num_envs": 3, "autoreset": "next_step"},
    "same_step": {"num_envs": 3, "autoreset": "same_step"},
    "disabled": {"num_envs": 3, "autoreset": "disabled"},
    "members": {"num_envs": 3, "autoreset": "disabled"},
}


def steps_for(form, writer):
    """Yield positional and keyword arguments for each step of the environments of a form."""
    options = WRITERS[writer]
    count, mode = options.get("num_envs", 1), options.get("autoreset", "disabled")
    pool = EnvironmentPool(KIND_OF[form], mode, [[3, 7, 4], [5, 3], [6, 4, 7]][:count])
    for number in range(STEPS):
        members = [i for i in range(count) if writer != "members" or (number + i) % 3]
        args, n, rng = pool.step(members), len(members), np.random.default_rng(number)
        info, named = args.pop("info"), {}
        if form == "lambda":
            args["reward"] = rng.normal(size=(n, 2))
            named = {"v": rng.normal(size=(n, 2)), "carry": rng.normal(size=(n, 4))}
        if "num_envs" not in options:
            args, named = part_of(args, 0), part_of(named, 0)
        elif writer == "members":
            named["members"] = np.array(members)
        named |= {"model_version": 1 + number // 20, "info": info if mode == "same_step" else None}
        yield tuple(args.values()), named


def play(buffer, writer, number, arguments):
    """Make a step; return the arrays of the batch that is drawn afterwards."""
    positional, named = arguments
    if number % 13 == 12 and writer.autoreset == "disabled" and writer.num_envs == 1:
        writer.reset()
    writer.step(*positional, **named)
    if number % 2 or buffer.memory.num_positive < 6:
        return []
    batch = buffer.sample(4)
    batch.update_priorities(np.random.default_rng(number).normal(size=np.shape(batch.ids)))
    return [*(batch[name] for name in batch), batch.ids, batch.importance]


def content_of(buffer):
    """Return the saved parts of a buffer except its lineage."""
    with zipfile.ZipFile(io.BytesIO(buffer.__reduce_ex__(4)[1][1])) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    about = json.loads(parts.pop(f"{ABOUT}.npy")[np.lib.format.MAGIC_LEN :].split(b"\n", 1)[1])
    del about["owner"]["lineage"]
    for name, dtype in ARRAYS.items():  # arrays leave out the padding between fields
        part = io.BytesIO(parts[f"{STATE}{name}.npy"])
        parts[f"{STATE}{name}.npy"] = np.load(part).view(dtype).tolist()
    return parts | {"about": about}


def by_file(buffer, path):
    buffer.save(path)
    loaded = memoire.Buffer.load(path, resume=True)
    loaded.close()  # the former buffer also continues
    return loaded


SAVED = {
    "file": by_file,
    "pickle": lambda buffer, path: pickle.loads(pickle.dumps(buffer)),
    "copy": lambda buffer, path: copy.copy(buffer),
    "deepcopy": lambda buffer, path: copy.deepcopy(buffer),
}
CASES = [
    ("prioritized", form, writer)
    for number, form in enumerate(form for form in FORMS if form != "lambda")
    for writer in list(WRITERS)[number % 2 :: 2]
]
CASES += [(sampler, "plain", "next_step") for sampler in SAMPLERS if sampler not in ("lambda", "prioritized")]
CASES += [("lambda", "lambda", writer) for writer in ("single", "same_step", "members")]
CASES += [("sequences", "ragged", "single")]
STEPS, AFTER = 40, 7


def buffer_and_writer(sampler, form, writer):
    """Return a small buffer with a fixed time, its writer and the writer's observer."""
    capacity, limit = (60, 3000) if "num_envs" in WRITERS[writer] else (26, 800)
    buffer = memoire.Buffer(
        FORMS[form], capacity, seed=3, ragged_limit=limit if form == "ragged" else 0, **SAMPLERS[sampler]
    )
    buffer.memory.set_clock(1000.0)
    log = RecordingObserver()
    return buffer, buffer.writer(observer=log, **WRITERS[writer]), log


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "form", "writer"), CASES)
def test_a_run_that_was_saved_in_an_episode_and_went_on_equals_one_that_was_not_interrupted(
    sampler, form, writer, tmp_path
):
    steps = list(steps_for(form, writer))
    buffer, mine, log = buffer_and_writer(sampler, form, writer)
    going, ways = [], itertools.cycle(SAVED.values())
    for number, arguments in enumerate(steps):
        if number % 3 == 0 or number == 1:
            other, its = next(ways)(buffer, tmp_path / "replay.npz"), RecordingObserver()
            other.memory.set_clock(1000.0)
            resumed = other.writer(observer=its, resume=True, **WRITERS[writer])
            going.append((other, resumed, its, number, len(log)))
        drawn = play(buffer, mine, number, arguments)
        for one, resumed, its, since, log_start in going:
            again = play(one, resumed, number, arguments)
            assert len(drawn) == len(again)
            for expected, actual in zip(drawn, again, strict=True):
                np.testing.assert_array_equal(expected, actual, err_msg=f"saved before step {since}")
            assert its == log[log_start:]
            if number == since + AFTER:
                check_memory(one.memory)
                assert content_of(buffer) == content_of(one), f"saved before step {since}"
        going = [each for each in going if each[3] > number - AFTER]
    assert log.episodes, "some episodes ended"
    assert buffer.memory.generated > buffer.capacity, "some have left"


def steps_of(buffer, count, **options):
    """Return a writer after `count` steps of one episode."""
    writer = buffer.writer(**options)
    for step in range(count):
        one_step(writer, step)
    return writer


def one_step(writer, step, *, ends=False):
    shape = (3,) if writer.autoreset == "disabled" and writer.num_envs == 1 else (writer.num_envs, 3)
    flags = np.full(shape[:-1], ends) if len(shape) > 1 else ends
    values = np.full(shape[:-1], step)
    obs = np.full(shape, step, np.float32)
    writer.step(obs, values, values / 2, flags & False, flags, obs + 1)


def plain(capacity=100, **options):
    return memoire.Buffer(FORMS["plain"], capacity, seed=1, **options)


def test_several_writers_go_on_in_their_order_and_others_are_refused():
    buffer = plain(capacity=400)
    kept = [steps_of(buffer, 3), steps_of(buffer, 4, num_envs=2, autoreset="same_step"), steps_of(buffer, 5)]
    for other in (copy.copy(buffer), copy.copy(copy.copy(buffer))):
        saved = "a single environment, num_envs=2 in mode same_step, a single environment"
        for options in ({"num_envs": 3, "autoreset": "same_step"}, {"num_envs": 2, "autoreset": "disabled"}):
            with pytest.raises(ParameterError, match=f"like those of a saved writer: {saved}"):
                other.writer(resume=True, **options)
        again = [other.writer(resume=True), other.writer(resume=True)]
        last = other.writer(resume=True, num_envs=2, autoreset="same_step")
        assert [each.lanes.tolist() for each in (*again, last)] == [[0], [3], [1, 2]]
        one_step(again[0], 3), one_step(again[1], 5), one_step(last, 4)
        assert {each.longest for each in (*again, last, *kept)} == {400 // 8}
        fresh = other.writer(resume=True)  # all saved writers are in use
        assert fresh.lanes.tolist() == [4] and other.num_episodes == 0


@pytest.mark.parametrize(
    "options", [{"longest": 0}, {"num_envs": 201, "autoreset": "same_step"}, {"autoreset": "none"}]
)
def test_a_writer_that_is_refused_ends_no_saved_episode_and_takes_no_lane(options):
    buffer = plain(capacity=400)
    kept = steps_of(buffer, 3)
    for other, resume in itertools.product([copy.copy(buffer), copy.copy(buffer)], [False, True]):
        with pytest.raises(ParameterError):
            other.writer(resume=resume, **options)
        if resume:
            again = other.writer(resume=True)
            assert (again.lanes.tolist(), other.memory.open_length(0), other.num_episodes) == (
                kept.lanes.tolist(),
                3,
                0,
            )
            assert other.writer().lanes.tolist() == [1]


def test_threads_that_configure_save_and_make_writers_do_not_wait_for_each_other_forever(tmp_path):
    buffer = plain(capacity=400)
    calls = [
        lambda: buffer.writer().close(), lambda: buffer.configure(discount=0.9), lambda: buffer.save(tmp_path / "b.npz"),
    ]  # fmt: skip
    counts = [200, 400, 5]
    threads = [
        threading.Thread(target=lambda call=call, n=n: [call() for _ in range(n)], daemon=True)
        for call, n in zip(calls, counts, strict=True)
    ]
    with switching_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_writer_that_was_closed_leaves_its_lanes_in_a_saved_buffer_too(is_kept):
    buffer = plain()
    kept = [steps_of(buffer, 3) for _ in range(2)]
    kept[0].close()
    if not is_kept:
        del kept[0]
    other = copy.copy(buffer)
    assert buffer.writer().lanes.tolist() == other.writer(resume=False).lanes.tolist() == [0]


@pytest.mark.slow
def test_a_buffer_that_is_saved_while_others_record_stops_no_step_and_can_be_resumed():
    buffer, saved = plain(capacity=3000), []
    writers = [buffer.writer(check=False), buffer.writer(num_envs=2, autoreset="same_step", longest=20)]

    def record():
        for step in range(800):
            one_step(writers[0], step, ends=step % 50 == 49)
            if step % 50 == 49:
                writers[0].reset()

    def record_two():
        for step in range(800):
            one_step(writers[1], step)

    with switching_often():  # saves happen at any point of a step
        recording = [in_thread(record), in_thread(record_two)]
        while any(thread.is_alive() for thread, _ in recording):
            saved.append(buffer.__reduce_ex__(4)[1][1])
    assert [box for _, box in recording] == [{"value": None}] * 2 and len(saved) > 2
    for content in saved[:: max(1, len(saved) // 20)]:
        other = memoire.Buffer.load(io.BytesIO(content))
        check_memory(other.memory)
        assert all(left.state is not None for left in other._writers._saved[:2])
        again = other.writer(resume=True, num_envs=2, autoreset="same_step")
        one_step(again, again._clock)
        with pytest.raises(EpisodeTorn):
            one_step(again, 9000)


def test_a_second_thread_is_refused_all_the_same_after_a_save():
    buffer = plain()
    inside, let_go = threading.Event(), threading.Event()

    class Slow(RecordingObserver):
        def on_entries(self, count):
            inside.set()
            let_go.wait(20)

    writer = buffer.writer(observer=Slow())
    thread = threading.Thread(target=lambda: one_step(writer, 0))
    thread.start()
    inside.wait(20)
    with pytest.raises(TwoThreads):
        one_step(writer, 1)
    let_go.set()
    thread.join()
    copy.copy(buffer)
    one_step(writer, 1)


@pytest.mark.parametrize("is_in_place", [False, True])
def test_the_first_step_after_a_restart_keeps_where_it_ended_whatever_the_environment_writes_over(is_in_place):
    buffer = plain(sampler=memoire.Uniform())
    kept = steps_of(buffer, 5)
    other = copy.copy(buffer)
    resumed, after = other.writer(resume=True), np.full(3, 6, np.float32)
    resumed.step(np.full(3, 5, np.float32), 5, 0.0, False, False, after)
    one_step(kept, 5)
    if is_in_place:
        after[:] = 777.0
    resumed.reset()
    kept.reset()
    assert other.memory.num_positive == buffer.memory.num_positive == 6
    assert other.sample(200).next_obs.max() == buffer.sample(200).next_obs.max() == 6.0


def test_an_episode_shorter_than_new_windows_goes_on_after_a_restart():
    buffer = plain()
    kept = steps_of(buffer, 2)
    buffer.configure(multi_step=3)
    other = copy.copy(buffer)
    for writer in (kept, other.writer(resume=True)):
        one_step(writer, 2), one_step(writer, 3), one_step(writer, 4)
    assert other.memory.num_positive == buffer.memory.num_positive == 2


def test_a_lane_whose_next_entry_would_lie_before_its_page_is_refused():
    buffer = plain()
    one_step(steps_of(buffer, 3), 3, ends=True)
    buffer.memory.contents()["lanes"]["offset"] = -1
    with pytest.raises(DataError, match="invalid layout"):
        copy.copy(buffer)


def test_writers_that_share_a_lane_are_refused():
    buffer = plain()
    kept = [steps_of(buffer, 3), steps_of(buffer, 3)]
    facts = buffer._writers.state(buffer.memory.open_length)
    facts["writers"].append(facts["writers"][1])
    buffer._writers.state = lambda length_of: facts
    with pytest.raises(DataError, match="two writers share a lane"):
        copy.copy(buffer)
    assert len(kept) == 2


# --- One buffer at a time continues a saved one, and no buffer overwrites steps that it lacks

SCHEMA = {"obs": (np.float32, (3,)), "action": np.int64, "reward": np.float32}


def saved(path):
    buffer = memoire.Buffer(SCHEMA, 100, seed=1)
    add(buffer, 5)
    buffer.save(path)
    return buffer


def add(buffer, steps):
    with buffer.writer() as writer:
        for step in range(steps):
            writer.step(np.full(3, step), step, 1.0, step == steps - 1, False, np.full(3, step + 1))


def resume(path, **changes):
    return memoire.Buffer.load(path, resume=True, **changes)


class Child:
    """Forked process that runs one function, reports its end, and lives until it is killed."""

    def __init__(self, what):
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                kept = what()  # noqa: F841
                os.write(writing, b"done")
            except BaseException as error:
                os.write(writing, f"{type(error).__name__}: {error}".encode())
            signal.pause()
        os.close(writing)
        self.report = os.read(reading, 10_000).decode()
        os.close(reading)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_a_second_process_that_resumes_a_buffer_is_refused_and_told_by_whom(tmp_path):
    path = tmp_path / "replay.npz"
    origin = saved(path).client_id
    first = Child(lambda: resume(path))
    try:
        assert first.report == "done"
        with pytest.raises(BufferLocked, match=rf"process {first.pid} on host '{os.uname().nodename}' has resumed"):
            resume(path)
        assert memoire.Buffer.load(path).client_id != origin, "another buffer of it can be made all the same"
    finally:
        first.kill()
    assert resume(path).client_id == origin, "a process that was killed holds nothing"


def test_nobody_writes_over_a_file_whose_buffer_somebody_resumed(tmp_path):
    path = tmp_path / "replay.npz"
    buffer = saved(path)
    first = Child(lambda: resume(path))
    try:
        for other in (buffer, memoire.Buffer.load(path), memoire.Buffer(SCHEMA, 10)):
            with pytest.raises(BufferLocked, match=f"process {first.pid} .* save to another path"):
                other.save(path)
        with pytest.raises(BufferLocked):
            memoire.dataset.save(buffer.memory, path)
        with pytest.raises(BufferLocked):
            buffer.save(tmp_path / "beside.npz")  # the other file could be resumed as well
        memoire.Buffer.load(path).save(tmp_path / "own.npz")
    finally:
        first.kill()
    buffer.save(path)


def test_a_buffer_writes_over_its_past_and_over_nothing_else(tmp_path):
    path, older = tmp_path / "replay.npz", tmp_path / "older.npz"
    origin = saved(path)
    shutil.copy(path, older)
    origin.save(path)
    buffer = resume(path)
    add(buffer, 7)
    buffer.save(path)
    buffer.save(older)  # a run that keeps its last two files saves so
    buffer.close()
    assert len(resume(older)) == 12
    with pytest.raises(
        BufferSaveConflict, match="steps that this buffer does not have. Nothing was written. Save to another"
    ):
        origin.save(path)
    assert len(resume(path)) == 12
    path.unlink()
    origin.save(path)
    assert len(resume(path)) == 5


def test_a_run_that_went_back_to_an_older_file_does_not_lose_the_newer_one(tmp_path):
    paths = [tmp_path / f"{number}.npz" for number in range(2)]
    buffer = saved(paths[0])
    buffer.save(paths[1])
    back = resume(paths[0])
    back.save(paths[0])
    with pytest.raises(BufferSaveConflict):
        back.save(paths[1])


def test_a_fork_of_a_resumed_buffer_writes_nothing_and_holds_nothing(tmp_path):
    path = tmp_path / "replay.npz"
    saved(path)
    before = path.read_bytes()

    def both():
        buffer = resume(path)
        inner = Child(lambda: (add(buffer, 3), buffer.save(tmp_path / "fork.npz")))
        raise RuntimeError(f"{inner.pid} {inner.report}")

    outer = Child(both)
    inner, message = outer.report.removeprefix("RuntimeError: ").split(maxsplit=1)
    try:
        assert message.startswith(ForkedError.__name__) and f"belongs to process {outer.pid}" in message
        assert path.read_bytes() == before and not (tmp_path / "fork.npz").exists()
        outer.kill()
        assert len(resume(path)) == 5, "its child lives, and does not keep the lock"
    finally:
        os.kill(int(inner), signal.SIGKILL)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"capacity": 50}, "capacity=50 cannot be combined with resume=True: the saved capacity is 100"),
        ({"alpha": 3}, "takes no 'alpha'"),
        ({"min_size": 101}, "min_size must be at most the capacity, 100 entries"),
    ],
)
def test_a_buffer_that_cannot_be_resumed_so_is_not_locked(tmp_path, changes, text):
    path = tmp_path / "replay.npz"
    saved(path)
    with pytest.raises((ParameterError, TypeError), match=text):
        resume(path, **changes)
    with open(path, "rb") as file, pytest.raises(ParameterError, match="an open file cannot be resumed"):
        resume(file)
    assert len(resume(path, multi_step=2, seed=5)) == 5


def test_a_saved_memory_is_no_buffer_to_go_on_as(tmp_path):
    path = tmp_path / "replay.npz"
    memoire.dataset.save(saved(path).memory, path)
    with pytest.raises(ParameterError, match="holds a memory that no buffer saved, so it cannot be resumed"):
        resume(path)
    assert len(memoire.Buffer.load(path)) == 5


def test_two_threads_save_a_resumed_buffer_to_another_folder_at_once(tmp_path):
    saved(tmp_path / "b.npz")
    buffer, both = resume(tmp_path / "b.npz"), threading.Barrier(2)

    def save(name):
        for turn in range(20):
            (tmp_path / f"other-{turn}").mkdir(exist_ok=True)
            both.wait(20)
            buffer.save(tmp_path / f"other-{turn}" / name)

    with switching_often():
        saving = [in_thread(save, name) for name in ("c.npz", "d.npz")]
        for thread, _ in saving:
            thread.join(20)
    assert [box for _, box in saving] == [{"value": None}] * 2 and len(list(tmp_path.glob("other-*/*.npz"))) == 40
    buffer.close()
