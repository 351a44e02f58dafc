"""Environments whose observations say where they come from: (environment, episode, step)."""

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from memoire.replay.schema import Schema

KINDS = ("box", "discrete", "dict")
Place = tuple[int, int, int]


def encode(kind: str, place: Place) -> Any:
    """The observation of a place."""
    if kind == "box":
        return np.array(place, np.float32)
    if kind == "discrete":
        return np.int64(place[0] * 10_000 + place[1] * 100 + place[2])
    return {
        "image": np.full((2, 3), place[2], np.uint8),
        "where": (np.int64(place[0]), np.array([place[1], -place[1]], np.float64)),
    }


def decode(kind: str, leaves: Sequence[Any]) -> Place:
    """The place of stored state columns, checked to be whole."""
    if kind == "box":
        (place,) = leaves
        return tuple(int(x) for x in place)
    if kind == "discrete":
        (code,) = leaves
        return int(code) // 10_000, int(code) // 100 % 100, int(code) % 100
    image, environment, episode = leaves
    assert (image == image[0, 0]).all()
    assert episode[0] == -episode[1]
    return int(environment), int(episode[0]), int(image[0, 0])


def action_at(place: Place) -> int:
    return (place[0] * 7 + place[1] * 3 + place[2]) % 5


def reward_at(place: Place) -> float:
    """Of the step that leaves a place."""
    return place[0] + place[1] / 10 + place[2] / 1000


def drive(envs: Any, writer: Any, schema: Schema, kind: str, steps: int) -> Iterator[None]:
    """The loop that a user writes, over a vector of coded environments; it stops after each step."""
    obs, _ = envs.reset(seed=0)
    for _ in range(steps):
        leaves = schema.flatten("obs", obs)
        action = np.array([action_at(decode(kind, [leaf[i] for leaf in leaves])) for i in range(envs.num_envs)])
        next_obs, reward, terminated, truncated, info = envs.step(action)
        writer.step(obs, action, reward, terminated, truncated, next_obs, info)
        yield
        obs = next_obs
        if writer.autoreset == "disabled" and (done := terminated | truncated).any():
            obs, _ = envs.reset(options={"reset_mask": done})


class CodedEnv(gym.Env):
    """Episode k has lengths[k % len] steps and ends as ends[k % len] says: "terminated", "truncated" or "both"."""

    def __init__(self, environment: int, lengths: Sequence[int], ends: Sequence[str], kind: str = "box") -> None:
        self.environment, self.lengths, self.ends, self.kind = environment, lengths, ends, kind
        self.episode, self.t = -1, 0
        self.action_space = gym.spaces.Discrete(5)
        box = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        nested = {
            "image": gym.spaces.Box(0, 255, (2, 3), np.uint8),
            "where": gym.spaces.Tuple([gym.spaces.Discrete(100), gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)]),
        }
        self.observation_space = {"box": box, "discrete": gym.spaces.Discrete(10**6)}.get(kind, gym.spaces.Dict(nested))

    @property
    def place(self) -> Place:
        return self.environment, self.episode, self.t

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return encode(self.kind, self.place), {"episode": self.episode}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert 0 <= self.t < self.length, "stepped beyond the end"
        assert action == action_at(self.place), "an action for another observation"
        reward = reward_at(self.place)
        self.t += 1
        end = self.ends[self.episode % len(self.ends)] if self.t == self.length else ""
        info = {"episode": self.episode}
        return encode(self.kind, self.place), reward, end in ("terminated", "both"), end in ("truncated", "both"), info

    @property
    def length(self) -> int:
        return self.lengths[self.episode % len(self.lengths)]
