"""An agent's state by its attributes, without torch: what is saved is what comes back, and what was told stays."""

import functools
import logging
import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memoire.errors import DataError, ParameterError
from memoire.rl.trainer.saving import KEPT, form_of, load_agent, save_agent, unsaved


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


def test_arrays_numbers_and_random_generators_come_back(tmp_path: Path) -> None:
    agent = Agent()
    agent.weights[:], agent.rate, agent.names = 7.0, 0.25, ["b", "c"]
    agent.random.random(5)
    saved(tmp_path, agent, epoch=3)
    drawn = agent.random.random()
    again = Agent()
    assert load_agent(tmp_path, again) == {"epoch": 3}
    assert again.weights.tolist() == [7.0] * 3 and (again.rate, again.names) == (0.25, ["b", "c"])
    assert again.random.random() == drawn


MADE: dict[str, Any] = {
    "an array": np.arange(3.0), "one without numbers": np.zeros((0, 2)), "of texts": np.array(["a", "bc"]),
    "of complex numbers": np.array([1j]), "a number of NumPy": np.float32(0.1), "bytes": b"\0a", "a tuple": (1, (2.5, "x")),
    "a set": {1, 2}, "a queue": deque([1.0, np.ones(2)], 5), "a dict": {1: np.ones(2), "a": {"b": [True, None]}},
    "infinity": float("inf"),
}  # fmt: skip


@pytest.mark.parametrize("start", ["absent", "None"])
@pytest.mark.parametrize("name", MADE)
def test_what_an_agent_makes_while_training_comes_back(start: str, name: str, tmp_path: Path) -> None:
    """Attributes that were None when it was made, and those that `train` sets first."""
    place = "best" if start == "None" else "fresh"
    agent = Agent()
    setattr(agent, place, MADE[name])
    saved(tmp_path, agent)
    again = Agent()
    load_agent(tmp_path, again)
    found = getattr(again, place)
    assert type(found) is type(MADE[name]) and str(found) == str(MADE[name])
    assert getattr(found, "dtype", None) == getattr(MADE[name], "dtype", None)
    assert getattr(found, "maxlen", None) == getattr(MADE[name], "maxlen", None)


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


def test_the_generators_of_the_process_go_on(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    np.random.standard_normal()  # noqa: NPY002
    saved(tmp_path, Agent())
    drawn = random.gauss(0, 1), np.random.standard_normal()  # noqa: NPY002
    random.seed(2)
    np.random.seed(2)  # noqa: NPY002
    load_agent(tmp_path, Agent())
    assert (random.gauss(0, 1), np.random.standard_normal()) == drawn  # noqa: NPY002


SETTINGS = {"rate": (0.5, 0.1), "names": (["a"], ["b"]), "gamma": (0.99, 0.9), "layers": ([64, 64], [32, 32, 32])}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_an_agent_was_told_stays_and_the_log_names_both(name: str, tmp_path: Path, caplog: Any) -> None:
    """Told another value than the checkpoint's, an agent goes on with it: training has not changed this one."""
    former, told = SETTINGS[name]
    agent = Agent()
    agent.epsilon, agent.config["step"] = 0.1, 5
    saved(tmp_path, agent)
    again = Agent(**{name: told})
    with caplog.at_level(logging.WARNING):
        load_agent(tmp_path, again)
    found = again.config[name] if name in again.config else getattr(again, name)
    assert found == told and again.epsilon == 0.1 and again.config["step"] == 5
    (line,) = caplog.messages
    assert name in line and all(str(each)[1:-1] in line for each in (former, told))


def test_a_setting_that_training_has_changed_cannot_be_told_otherwise(tmp_path: Path) -> None:
    agent = Agent()
    agent.epsilon = 0.1
    saved(tmp_path, agent)
    again = Agent(epsilon=0.5)
    with pytest.raises(ParameterError, match=r"epsilon must be 1\.0, .* changed it to 0\.1 .*, got 0\.5"):
        load_agent(tmp_path, again)
    assert again.epsilon == 0.5 and not again.weights.any()


def test_a_fixed_setting_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, Agent())
    with pytest.raises(ParameterError, match="kind must be 'sac', .* it cannot be changed, got 'td3'"):
        load_agent(tmp_path, Agent(kind="td3"))


def test_without_a_checkpoint_nothing_changes(tmp_path: Path) -> None:
    assert load_agent(tmp_path / "none", Agent()) is None


def test_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    agent = Agent()
    for number in range(5):
        agent.rate = float(number)
        saved(tmp_path, agent, epoch=number)
    again = Agent()
    assert len(list(tmp_path.iterdir())) == KEPT
    assert load_agent(tmp_path, again) == {"epoch": 4} and again.rate == 4.0


def test_another_agents_checkpoint_is_refused_with_its_path(tmp_path: Path) -> None:
    saved(tmp_path, Agent())
    with pytest.raises(DataError, match=r"agent-1\.safetensors holds 'weights' as float64\[3\] .* float64\[4\]"):
        load_agent(tmp_path, Agent(4))
    with pytest.raises(DataError, match="has no 'more', which this agent has as float64"):
        load_agent(tmp_path, Agent(more=np.zeros(2)))


def test_what_is_not_saved_is_named() -> None:
    assert unsaved(Agent()) == ["socket (object)"]
