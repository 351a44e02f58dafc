"""One buffer at a time goes on as a saved one, and none writes over steps that it does not have."""

import copy
import os
import shutil
import signal
import sys
import threading

import numpy as np
import pytest

import memoire
from memoire.errors import BufferLocked, ForkedError, NotItsPast, ParameterError

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
    """A forked process that does one thing, says how that ended, and lives until it is killed."""

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
        self.told = os.read(reading, 10_000).decode()
        os.close(reading)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_a_second_process_that_resumes_a_buffer_is_refused_and_told_by_whom(tmp_path):
    path = tmp_path / "replay.npz"
    origin = saved(path).client_id
    first = Child(lambda: resume(path))
    try:
        assert first.told == "done"
        with pytest.raises(BufferLocked, match=rf"process {first.pid} on host '{os.uname().nodename}' has resumed"):
            resume(path)
        assert memoire.Buffer.load(path).client_id != origin, "another buffer of it can be made all the same"
    finally:
        first.kill()
    assert resume(path).client_id == origin, "a process that was killed holds nothing"


def test_of_two_buffers_of_a_process_one_goes_on(tmp_path):
    path = tmp_path / "replay.npz"
    saved(path)
    first = resume(path)
    with pytest.raises(BufferLocked, match=r"that this process has resumed: only one may .* \(or call its close\(\)\)"):
        resume(path)
    first.close()
    second = resume(str(path))
    assert second.client_id == first.client_id
    del second
    assert len(resume(path)) == 5, "a buffer that is gone holds nothing"


def test_a_copy_of_the_file_beside_it_is_the_same_buffer(tmp_path):
    path, other = tmp_path / "replay.npz", tmp_path / "copy.npz"
    saved(path)
    shutil.copy(path, other)
    link = tmp_path / "folder" / "link.npz"
    link.parent.mkdir()
    link.symlink_to(path)
    kept = resume(path)
    for each in (other, link):
        with pytest.raises(BufferLocked):
            resume(each)
    kept.close()
    assert resume(other).client_id == kept.client_id


def test_a_copy_and_a_load_are_other_buffers(tmp_path):
    path = tmp_path / "replay.npz"
    buffer = saved(path)
    ids = {buffer.client_id, copy.copy(buffer).client_id, memoire.Buffer.load(path).client_id}
    assert len(ids) == 3 and {len(each) for each in ids} == {16}


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
            buffer.save(tmp_path / "beside.npz")  # it would be resumed as a buffer that goes on
        memoire.Buffer.load(path).save(tmp_path / "own.npz")
    finally:
        first.kill()
    buffer.save(path)  # nothing was saved meanwhile


def test_a_buffer_writes_over_its_past_and_over_nothing_else(tmp_path):
    path, older = tmp_path / "replay.npz", tmp_path / "older.npz"
    origin = saved(path)
    shutil.copy(path, older)
    origin.save(path)
    buffer = resume(path)
    add(buffer, 7)
    buffer.save(path)
    buffer.save(older)  # as a run does that keeps its last two
    buffer.close()
    assert len(resume(older)) == 12
    with pytest.raises(NotItsPast, match="steps that this buffer does not have. Nothing was written. Save to another"):
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
    with pytest.raises(NotItsPast):
        back.save(paths[1])


def test_a_fork_of_a_resumed_buffer_writes_nothing_and_holds_nothing(tmp_path):
    path = tmp_path / "replay.npz"
    saved(path)
    before = path.read_bytes()

    def both():
        buffer = resume(path)
        inner = Child(lambda: (add(buffer, 3), buffer.save(tmp_path / "fork.npz")))
        raise RuntimeError(f"{inner.pid} {inner.told}")

    outer = Child(both)
    inner, told = outer.told.removeprefix("RuntimeError: ").split(maxsplit=1)
    try:
        assert told.startswith(ForkedError.__name__) and f"belongs to process {outer.pid}" in told
        assert path.read_bytes() == before and not (tmp_path / "fork.npz").exists()
        outer.kill()
        assert len(resume(path)) == 5, "its child lives, and does not keep the lock"
    finally:
        os.kill(int(inner), signal.SIGKILL)


def test_a_fork_is_another_buffer(tmp_path):
    path = tmp_path / "replay.npz"
    buffer = memoire.Buffer(SCHEMA, 100)
    add(buffer, 5)
    child = Child(lambda: buffer.save(path))
    child.kill()
    assert child.told == "done" and resume(path).client_id != buffer.client_id


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"capacity": 50}, "capacity .*100, as it was: with another one ids are new"), ({"alpha": 3}, "takes no 'alpha'")],
)
def test_a_buffer_that_cannot_be_resumed_so_is_not_locked(tmp_path, changes, said):
    path = tmp_path / "replay.npz"
    saved(path)
    with pytest.raises((ParameterError, TypeError), match=said):
        resume(path, **changes)
    with open(path, "rb") as file, pytest.raises(ParameterError, match="False for a file that is open"):
        resume(file)
    assert len(resume(path, multi_step=2, seed=5)) == 5


def test_a_saved_memory_is_no_buffer_to_go_on_as(tmp_path):
    path = tmp_path / "replay.npz"
    memoire.dataset.save(saved(path).memory, path)
    with pytest.raises(ParameterError, match="which holds a memory and not a buffer"):
        resume(path)
    assert len(memoire.Buffer.load(path)) == 5


def test_two_threads_save_a_resumed_buffer_to_another_folder_at_once(tmp_path):
    saved(tmp_path / "b.npz")
    buffer, both, errors = resume(tmp_path / "b.npz"), threading.Barrier(2), []

    def save(name):
        for turn in range(20):
            (tmp_path / f"other-{turn}").mkdir(exist_ok=True)
            both.wait(20)
            try:
                buffer.save(tmp_path / f"other-{turn}" / name)
            except BufferLocked as error:
                errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=save, args=(name,)) for name in ("c.npz", "d.npz")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    sys.setswitchinterval(interval)
    assert not errors and len(list(tmp_path.glob("other-*/*.npz"))) == 40
    buffer.close()
