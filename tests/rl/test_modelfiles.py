"""Models in files are whole, checked, and each path is held by one process; a history keeps each n-th."""

import datetime
import io
import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from memoire.errors import DataError, ParameterError, PathHeld
from memoire.rl import weights
from memoire.rl.trainer.saving import ModelFiles, read_model


def body(number):
    return weights.pack({"layer.weight": np.full((2, 3), number, np.float32)})


def number_in(path):
    return int(weights.load(path)["layer.weight"][0, 0])


def test_the_newest_model_is_there_again_at_the_next_start(tmp_path):
    files = ModelFiles(tmp_path / "weights" / "a.pth", role="worker")
    assert files.read() is None
    for number in (1, 2):
        files.keep(body(number))
    files.close()
    files.close()
    assert ModelFiles(tmp_path / "weights" / "a.pth", role="worker").read() == body(2)


@pytest.mark.parametrize(("every", "expected"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6])])
def test_the_history_has_each_nth_since_the_last_that_was_kept(every, expected, tmp_path):
    files = ModelFiles(tmp_path / "a.pth", tmp_path / "h" / "drone_", every, role="worker")
    for number in range(1, 8):
        files.keep(body(number))
    found = sorted((tmp_path / "h").glob("drone_*.pth")) if every else []
    assert sorted(number_in(path) for path in found) == expected
    assert number_in(tmp_path / "a.pth") == 7


def test_models_of_the_same_moment_have_names_of_their_own(tmp_path):
    moment = datetime.datetime(2026, 11, 26, 14, 3, 59, 120000)
    files = ModelFiles(None, str(tmp_path / "h_"), 1, role="worker", now=lambda: moment)
    for number in (1, 2):
        files.keep(body(number))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["h_2026-11-26_14-03-59.120000-1.pth", "h_2026-11-26_14-03-59.120000.pth"]
    assert files.read() is None
    with pytest.raises(ParameterError, match="model_history must be a whole number from 0"):
        ModelFiles(None, "h_", -1, role="worker")


def test_a_second_holder_is_refused_and_told_the_first(tmp_path):
    path = tmp_path / "a.pth"
    code = (
        f"from memoire.rl.trainer.saving import ModelFiles; files = ModelFiles({str(path)!r}, role='trainer'); "
        "print('held', flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(PathHeld, match=rf"a.pth is in use by a trainer, process {other.pid} on host .*model_path"):
            ModelFiles(path, role="worker")
    finally:
        other.kill()
        other.communicate(timeout=60)
    mine = ModelFiles(path, role="worker")  # the lock leaves with a process, however it ended
    with pytest.raises(PathHeld, match="a worker, process"):
        ModelFiles(path, role="trainer")
    mine.close()
    lock = tmp_path / "a.pth.lock"
    held = ModelFiles(path, role="worker")
    lock.write_text("[]")
    with pytest.raises(PathHeld, match="in use by another process"):
        ModelFiles(path, role="trainer")
    held.close()
    assert json.loads(lock.read_text() or "[]") == []


def test_no_changed_byte_of_a_file_changes_an_array(tmp_path):
    path = tmp_path / "a.pth"
    weights.save(path, weights.unpack(body(1)))
    whole = path.read_bytes()
    for place in range(len(whole)):
        if whole[place : place + 1] == b" ":
            continue  # padding between header and data
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = weights.load(path)
        except DataError:
            continue
        # What is damaged may also be the mark that says there is a checksum: then the arrays are whole.
        assert place < 40 and found["layer.weight"].tolist() == [[1.0] * 3] * 2, (place, found)
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError):
        weights.load(path)
    path.write_bytes(body(1))  # as other tools of safetensors write it
    assert number_in(path) == 1


def test_a_file_of_something_else_is_named(tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(b"no model")
    with pytest.raises(DataError, match="a.pth"):
        ModelFiles(path, role="worker").read()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("x/data.pkl", b"cos\nsystem\n.")
    path.write_bytes(archive.getvalue())
    with pytest.raises(DataError, match="is a file of torch"):
        read_model(path)
