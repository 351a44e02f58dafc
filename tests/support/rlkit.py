"""Helpers for tests of workers and trainers: environments that count, an actor and an agent without networks."""

import itertools
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from memoire.rl import RealTimeInterface, weights
from memoire.tmrl.training import TrainingAgent

SPACE = spaces.Box(-1e9, 1e9, (2,), np.float32)
ACTIONS = spaces.Box(-1.0, 1.0, (1,), np.float32)


class Numbered(gymnasium.Env[Any, Any]):
    """Environment whose observations hold its number and a count of observations, so that each is unique.

    Episodes terminate after `length` steps of reward 1. Each step records its action, then calls `on_step`.
    """

    numbers = itertools.count(1)
    observation_space, action_space = SPACE, ACTIONS

    def __init__(self, length: int = 10) -> None:
        self.number, self.length = next(self.numbers), length
        self.count = self.made = 0
        self.default_action = np.zeros(1, np.float32)
        self.actions: list[float] = []
        self.on_step = lambda: None

    def observe(self) -> Any:
        self.made += 1
        return np.array([self.number, self.made], np.float32)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self.actions.append(float(action[0]))
        self.on_step()
        return self.observe(), 1.0, self.count == self.length, False, {}


class Actor:
    """Actor whose action is the published number; `tests` holds the argument `test` of each call."""

    def __init__(self, observation_space: Any = None, action_space: Any = None) -> None:
        self.value, self.tests = 0.5, list[bool]()

    def act(self, obs: Any, test: bool = False) -> Any:
        self.tests.append(test)
        return np.array([self.value], np.float32)

    def load(self, body: bytes, version: int) -> None:
        self.value = float(weights.unpack(body)["value"][0])


class Counter(TrainingAgent):
    """Agent that publishes the number of its training steps."""

    def __init__(self, observation_space: Any, action_space: Any, device: Any) -> None:
        super().__init__(observation_space, action_space, None)
        self.count = 0

    def train(self, batch: Any) -> dict[str, Any]:
        self.count += 1
        return {"loss": float(self.count)}

    def get_actor(self) -> Any:
        return {"value": np.array([self.count], np.float32)}


class Arm(RealTimeInterface):
    """Device that records each control and its time; its observation is the number of its reads."""

    def __init__(self, clock: Any = time.monotonic, slow: Any = None, broken_at: int | None = None) -> None:
        self.clock, self.slow, self.broken_at = clock, slow or (lambda read: None), broken_at
        self.sent, self.read_at = list[Any](), list[float]()

    def get_observation_space(self) -> Any:
        return spaces.Tuple((spaces.Box(-1e6, 1e6, (1,), np.float32), spaces.Box(-1e6, 1e6, (2,), np.float32)))

    def get_action_space(self) -> Any:
        return spaces.Box(-2.0, 2.0, (1,), np.float32)

    def get_default_action(self) -> Any:
        return np.zeros(1, np.float32)

    def send_control(self, control: Any) -> None:
        self.sent.append((round(self.clock(), 6), float(control[0])))

    def reset(self) -> Any:
        return [-1.0, [0, 0]]

    def get_obs_rew_done_info(self) -> Any:
        self.read_at.append(round(self.clock(), 6))
        self.slow(len(self.read_at))
        if len(self.read_at) == self.broken_at:
            raise OSError("the cable is out")
        return [float(len(self.read_at)), [1, 2]], 0.5, False, {"reads": len(self.read_at)}


def same(one: Any, other: Any) -> bool:
    """Return True if two plain values are equal in all their parts, types and dtypes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
