"""Files of a trainer: the state of an agent by its attributes, models, and files of a former run."""

import datetime
import functools
import io
import json
import logging
import os
import random
import zipfile
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memoire.errors import DataError, ParameterError, PathHeld, StateLocked
from memoire.rl import weights
from memoire.rl.saving import form_of, load_agent, save_agent, unsaved
from memoire.rl.trainer import RESUMES, begin_fresh, checked_resume, lock_checkpoint, put_aside
from memoire.rl.weights import KEPT_FILES, ModelFiles, read_model

# --- State of an agent by attributes, without torch: trained values are restored, and settings stay


class Agent:
    fixed = frozenset({"kind"})

    def __init__(self, size: int = 3, **settings: Any) -> None:
        self.observation_space = object()
        self.weights, self.rate, self.names = np.zeros(size), 0.5, ["a"]
        self.random = np.random.default_rng(1)
        self.socket, self.layer, self.half = object(), Path, functools.partial(int)
        self.config: dict[str, Any] = {"gamma": 0.99, "layers": [64, 64]}
        self.epsilon, self.kind, self.best = 1.0, "sac", None
        self.config |= {name: settings.pop(name) for name in list(settings) if name in self.config}
        vars(self).update(settings)


def saved(folder: Path, agent: Agent, **facts: Any) -> Agent:
    save_agent(folder, agent, form_of(Agent()), facts)
    return agent


MADE: dict[str, Any] = {
    "an array": np.arange(3.0), "one without numbers": np.zeros((0, 2)), "of texts": np.array(["a", "bc"]),
    "of complex numbers": np.array([1j]), "a number of NumPy": np.float32(0.1), "bytes": b"\0a", "a tuple": (1, (2.5, "x")),
    "a set": {1, 2}, "a queue": deque([1.0, np.ones(2)], 5), "a dict": {1: np.ones(2), "a": {"b": [True, None]}},
    "infinity": float("inf"),
}  # fmt: skip


@pytest.mark.parametrize("start", ["absent", "None"])
@pytest.mark.parametrize("name", MADE)
def test_what_an_agent_makes_while_training_comes_back(start: str, name: str, tmp_path: Path) -> None:
    """The attribute is None in a new agent, or `train` sets the attribute first."""
    place = "best" if start == "None" else "fresh"
    agent = Agent()
    setattr(agent, place, MADE[name])
    saved(tmp_path, agent)
    again = Agent()
    load_agent(tmp_path, again)
    restored = getattr(again, place)
    assert type(restored) is type(MADE[name]) and str(restored) == str(MADE[name])
    assert getattr(restored, "dtype", None) == getattr(MADE[name], "dtype", None)
    assert getattr(restored, "maxlen", None) == getattr(MADE[name], "maxlen", None)


BITS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


@pytest.mark.parametrize("start", ["absent", "None"])
@pytest.mark.parametrize("make", [*(lambda bits=bits: np.random.Generator(bits(3)) for bits in BITS),
                                  lambda: np.random.RandomState(3), lambda: random.Random(3)])  # fmt: skip
def test_generators_go_on_wherever_they_were_made(start: str, make: Any, tmp_path: Path) -> None:
    agent, again = Agent(), Agent()
    agent.best = make()
    agent.best.random()
    if start == "absent":
        del again.best
    saved(tmp_path, agent)
    load_agent(tmp_path, again)
    assert type(again.best) is type(agent.best) and again.best.random() == agent.best.random()


def test_generators_that_attributes_share_are_shared_again(tmp_path: Path) -> None:
    agent, again = Agent(), Agent()
    agent.best, agent.other = agent.random, [agent.random]
    saved(tmp_path, agent)
    load_agent(tmp_path, again)
    assert again.best is again.random is again.other[0]


SETTINGS = {"rate": (0.5, 0.1), "names": (["a"], ["b"]), "gamma": (0.99, 0.9), "layers": ([64, 64], [32, 32, 32])}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_an_agent_was_told_stays_and_the_log_names_both(name: str, tmp_path: Path, caplog: Any) -> None:
    """An agent keeps a setting that differs from the checkpoint's, because training has not changed the setting."""
    former, current = SETTINGS[name]
    agent = Agent()
    agent.epsilon, agent.config["step"] = 0.1, 5
    saved(tmp_path, agent)
    again = Agent(**{name: current})
    with caplog.at_level(logging.WARNING):
        load_agent(tmp_path, again)
    kept = again.config[name] if name in again.config else getattr(again, name)
    assert kept == current and again.epsilon == 0.1 and again.config["step"] == 5
    (line,) = caplog.messages
    assert name in line and all(str(each)[1:-1] in line for each in (former, current))


def test_a_setting_that_is_fixed_or_that_training_has_changed_cannot_be_told_otherwise(tmp_path: Path) -> None:
    agent, again = Agent(), Agent(epsilon=0.5)
    agent.epsilon = 0.1
    saved(tmp_path, agent)
    with pytest.raises(ParameterError, match=r"epsilon must be 1\.0, .* changed it to 0\.1 .*, got 0\.5"):
        load_agent(tmp_path, again)
    assert again.epsilon == 0.5 and not again.weights.any()
    with pytest.raises(ParameterError, match="kind must be 'sac', .* it cannot be changed, got 'td3'"):
        load_agent(tmp_path, Agent(kind="td3"))


def test_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    agent = Agent()
    assert load_agent(tmp_path, agent) is None, "there is none"
    for number in range(5):
        agent.rate = float(number)
        saved(tmp_path, agent, epoch=number)
    again = Agent()
    assert len(list(tmp_path.iterdir())) == KEPT_FILES
    assert load_agent(tmp_path, again) == {"epoch": 4} and again.rate == 4.0


def test_another_agents_checkpoint_is_refused_with_its_path(tmp_path: Path) -> None:
    saved(tmp_path, Agent())
    with pytest.raises(DataError, match=r"agent-1\.safetensors holds 'weights' as float64\[3\], .* float64\[4\]"):
        load_agent(tmp_path, Agent(4))
    with pytest.raises(DataError, match="has no 'more', which this agent has as float64"):
        load_agent(tmp_path, Agent(more=np.zeros(2)))


def test_what_is_not_saved_is_named() -> None:
    assert unsaved(Agent()) == ["socket (object)"]


# --- Files of models: whole, checked, and with a lock for each path; a history keeps each n-th model


def body(number):
    return weights.pack({"layer.weight": np.full((2, 3), number, np.float32)})


def test_the_newest_model_is_there_again_at_the_next_start(tmp_path):
    files = ModelFiles(tmp_path / "weights" / "a.pth", role="worker")
    assert files.read() is None
    for number in (1, 2):
        files.keep(body(number))
    files.close()
    files.close()
    assert ModelFiles(tmp_path / "weights" / "a.pth", role="worker").read() == body(2)


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
    path, lock = tmp_path / "a.pth", tmp_path / "a.pth.lock"
    held = ModelFiles(path, role="trainer")
    with pytest.raises(PathHeld, match=rf"a.pth is in use by a trainer, process {os.getpid()} on host .*model_path"):
        ModelFiles(path, role="worker")
    lock.write_text("[]")
    with pytest.raises(PathHeld, match="in use by another process"):
        ModelFiles(path, role="worker")
    held.close()
    assert json.loads(lock.read_text() or "[]") == []


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


# --- The trainer puts files of a former run aside, and never deletes a file


def test_a_folder_that_a_trainer_has_is_not_put_aside(tmp_path):
    folder = tmp_path / "run.cpt"
    lock = lock_checkpoint(folder)
    for act in (lambda: put_aside(folder), lambda: lock_checkpoint(folder)):
        with pytest.raises(StateLocked, match=r"the checkpoint folder .* only one trainer may write it"):
            act()
    assert folder.is_dir() and [each.name for each in tmp_path.iterdir()] == ["run.cpt"]
    lock.release()
    assert put_aside(folder) == tmp_path / "run.cpt.former-1"


def test_a_folder_is_put_aside_under_the_next_free_name(tmp_path):
    for number in (1, 2):
        (tmp_path / "run.cpt").mkdir()
        (tmp_path / "run.cpt" / "samples").write_text(str(number))
        assert put_aside(tmp_path / "run.cpt") == tmp_path / f"run.cpt.former-{number}"
    assert (tmp_path / "run.cpt.former-1" / "samples").read_text() == "1"
    assert put_aside(tmp_path / "run.cpt") is None


def test_what_to_go_on_with_is_one_of_four():
    assert [checked_resume(each) for each in RESUMES] == ["all", "memory", "weights", "none"]
    with pytest.raises(ParameterError, match="resume must be one of 'all', 'memory', 'weights', 'none'"):
        checked_resume("everything")


def no_terminal(text):
    raise EOFError


@pytest.mark.parametrize("answer", [lambda text: "n", no_terminal])
def test_a_run_begins_anew_only_after_a_yes(tmp_path, answer):
    files, asked = [tmp_path / "run.cpt", tmp_path / "run.pth", tmp_path / "absent"], []
    for path in files[:2]:
        path.write_text("former")
    with pytest.raises(
        ParameterError, match="--fresh was not confirmed: answer yes, or add --yes. Nothing was renamed."
    ):
        begin_fresh(files, ask=lambda text: asked.append(text) or answer(text))
    assert len(asked) == 1 and "run.cpt" in asked[0] and "absent" not in asked[0]
    assert all(path.exists() for path in files[:2]), "nothing was changed"
    begin_fresh(files[:1], ask=lambda text: "yes")
    begin_fresh(files, is_sure=True, ask=no_terminal)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.cpt.former-1", "run.pth.former-1"]
    begin_fresh(files, ask=lambda text: pytest.fail("there is nothing to ask for"))


def test_no_changed_byte_of_a_file_changes_an_array(tmp_path):
    path = tmp_path / "a.pth"
    weights.save(path, weights.unpack(body(1)))
    whole = path.read_bytes()
    for place in range(len(whole)):
        if whole[place : place + 1] == b" ":
            continue  # padding between header and data
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            arrays = weights.load(path)
        except DataError:
            continue
        # Damage may hit the mark of the checksum: the file is then read without a check, and the arrays are whole.
        assert place < 40 and arrays["layer.weight"].tolist() == [[1.0] * 3] * 2, (place, arrays)
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError):
        weights.load(path)
    path.write_bytes(body(1))  # other tools write safetensors without a checksum
    assert weights.load(path)["layer.weight"][0, 0] == 1
