"""Environments whose observations encode (environment, episode, step)."""

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from memoire.replay.schema import Schema

KINDS = ("box", "discrete", "dict", "set")
Place = tuple[int, int, int]


def encode(kind: str, place: Place) -> Any:
    if kind == "box":
        return np.array(place, np.float32)
    if kind == "discrete":
        return np.int64(place[0] * 10_000 + place[1] * 100 + place[2])
    if kind == "set":
        return {"rows": (np.array(place, np.float32),) * (1 + place[2] % 3)}
    return {
        "image": np.full((2, 3), place[2], np.uint8),
        "where": (np.int64(place[0]), np.array([place[1], -place[1]], np.float64)),
    }


def decode(kind: str, leaves: Sequence[Any]) -> Place:
    """Return the place that stored state columns encode; assert that all parts agree. Rows of a set may be padded."""
    if kind == "box":
        (place,) = leaves
        return tuple(int(x) for x in place)
    if kind == "discrete":
        (code,) = leaves
        return int(code) // 10_000, int(code) // 100 % 100, int(code) % 100
    if kind == "set":
        rows = np.reshape(leaves[0], (-1, 3))
        count = 1 + int(rows[0, 2]) % 3
        assert len(rows) >= count and (rows[:count] == rows[0]).all() and not rows[count:].any()
        return tuple(int(x) for x in rows[0])
    image, environment, episode = leaves
    assert (image == image[0, 0]).all()
    assert episode[0] == -episode[1]
    return int(environment), int(episode[0]), int(image[0, 0])


def action_at(place: Place) -> int:
    return (place[0] * 7 + place[1] * 3 + place[2]) % 5


def reward_at(place: Place) -> float:
    return place[0] + place[1] / 10 + place[2] / 1000


def drive(envs: Any, writer: Any, schema: Schema, kind: str, steps: int) -> Iterator[None]:
    """Step a vector of coded environments as a user's loop does; yield after each step."""
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
    """Environment whose episode k has lengths[k % len] steps and ends as ends[k % len]: "terminated", "truncated",
    "both".
    """

    def __init__(self, environment: int, lengths: Sequence[int], ends: Sequence[str], kind: str = "box") -> None:
        self.environment, self.lengths, self.ends, self.kind = environment, lengths, ends, kind
        self.episode, self.t = -1, 0
        self.action_space = gym.spaces.Discrete(5)
        box = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        nested = {
            "image": gym.spaces.Box(0, 255, (2, 3), np.uint8),
            "where": gym.spaces.Tuple([gym.spaces.Discrete(100), gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)]),
        }
        rows = gym.spaces.Dict(rows=gym.spaces.Sequence(box))
        spaces = {"box": box, "discrete": gym.spaces.Discrete(10**6), "dict": gym.spaces.Dict(nested), "set": rows}
        self.observation_space = spaces[kind]

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


def part_of(value: Any, chosen: Any) -> Any:
    """Return the part of nested results of several environments for `chosen`, one environment or a slice."""
    if isinstance(value, dict):
        return {name: part_of(part, chosen) for name, part in value.items()}
    return tuple(part_of(part, chosen) for part in value) if isinstance(value, tuple) else value[chosen]


LENGTHS = ([1, 4, 2], [3, 7], [2], [5, 1, 8], [4])
ENDS = (["terminated", "truncated"], ["both", "truncated"], ["terminated"], ["truncated", "both"], ["both"])


class EnvironmentPool:
    """Environments of which any few step at once, as in EnvPool's asynchronous mode."""

    def __init__(self, kind: str, mode: str, lengths: Sequence[Sequence[int]] = LENGTHS) -> None:
        self.envs = [CodedEnv(i, *each, kind) for i, each in enumerate(zip(lengths, ENDS, strict=False))]
        self.schema, self.kind, self.mode = Schema.from_env(self.envs[0]), kind, mode
        self.last = [env.reset()[0] for env in self.envs]
        self.is_over = [False] * len(self.envs)

    def batch(self, values: Sequence[Any]) -> Any:
        leaves = zip(*(self.schema.flatten("obs", value) for value in values), strict=True)
        together = list if self.schema.ragged else np.stack
        return self.schema.nest("obs", dict(zip(self.schema.leaves("obs"), map(together, leaves), strict=True)))

    def step(self, members: Sequence[int]) -> dict[str, Any]:
        """Step these environments; return the arguments of `Writer.step`, with an item for each environment."""
        rows = []
        for i in members:
            env, obs = self.envs[i], self.last[i]
            final = None
            if self.is_over[i]:
                self.is_over[i] = False
                row = (env.reset()[0], 0.0, False, False)
            else:
                row = env.step(action_at(env.place))[:4]
                self.is_over[i] = self.mode == "next_step" and (row[2] or row[3])
            after = row[0]
            if self.mode != "next_step" and (row[2] or row[3]):
                final, after = row[0], env.reset()[0]
            self.last[i] = after
            successor = after if self.mode == "same_step" else row[0]
            rows.append(
                (obs, action_at(decode(self.kind, self.schema.flatten("obs", obs))), *row[1:], successor, final)
            )
        obs, action, reward, terminated, truncated, next_obs, final = zip(*rows, strict=True)
        finals = np.empty(len(rows), object)
        finals[:] = final
        return {
            "obs": self.batch(obs), "action": np.array(action), "reward": np.array(reward),
            "terminated": np.array(terminated), "truncated": np.array(truncated), "next_obs": self.batch(next_obs),
            "info": {"final_obs": finals, "env_id": np.array(members)},
        }  # fmt: skip
