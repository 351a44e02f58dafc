"""An agent's state by its attributes, without torch: what is saved is what comes back."""

from pathlib import Path

import numpy as np
import pytest

from memoire.errors import DataError
from memoire.rl.agent_state import KEPT, load_agent, save_agent, unsaved


class Agent:
    def __init__(self, size: int = 3) -> None:
        self.observation_space = object()
        self.weights, self.rate, self.names = np.zeros(size), 0.5, ["a"]
        self.random = np.random.default_rng(1)
        self.socket = object()


def test_arrays_numbers_and_random_generators_come_back(tmp_path: Path) -> None:
    agent = Agent()
    agent.weights[:], agent.rate, agent.names = 7.0, 0.25, ["b", "c"]
    agent.random.random(5)
    save_agent(tmp_path, agent, {"epoch": 3})
    drawn = agent.random.random()
    again = Agent()
    assert load_agent(tmp_path, again) == {"epoch": 3}
    assert again.weights.tolist() == [7.0] * 3 and (again.rate, again.names) == (0.25, ["b", "c"])
    assert again.random.random() == drawn


def test_without_a_checkpoint_nothing_changes(tmp_path: Path) -> None:
    assert load_agent(tmp_path / "none", Agent()) is None


def test_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    agent = Agent()
    for number in range(5):
        agent.rate = float(number)
        save_agent(tmp_path, agent, {"epoch": number})
    assert len(list(tmp_path.iterdir())) == KEPT
    assert load_agent(tmp_path, agent) == {"epoch": 4} and agent.rate == 4.0


def test_another_agents_checkpoint_is_refused_with_its_path(tmp_path: Path) -> None:
    save_agent(tmp_path, Agent(3), {})
    with pytest.raises(DataError, match=r"agent-1\.safetensors"):
        load_agent(tmp_path, Agent(4))


def test_what_is_not_saved_is_named() -> None:
    assert unsaved(Agent()) == ["socket (object)"]
