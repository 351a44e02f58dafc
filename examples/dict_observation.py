"""Observations of several parts, such as a camera image and a position, stored with a dtype for each part.

Each part is a column of its own (`obs.image`, `obs.position`), stored once, even if it appears in
several windows of frames. Run it with `python examples/dict_observation.py`; it needs gymnasium and takes a second.
"""

from typing import Any

import gymnasium as gym
import numpy as np

import memoire


class Corridor(gym.Env):
    """Corridor of 16 squares with a moving light; the camera shows its square, the odometer its distance."""

    def __init__(self) -> None:
        image, position = gym.spaces.Box(0, 255, (16, 16), np.uint8), gym.spaces.Box(0.0, 1.0, (1,), np.float64)
        self.observation_space = gym.spaces.Dict({"image": image, "position": position})
        self.action_space = gym.spaces.Discrete(2)
        self.square = 0

    def look(self) -> dict[str, np.ndarray]:
        image = np.zeros((16, 16), np.uint8)
        image[:, self.square] = 255
        return {"image": image, "position": np.array([self.square / 15])}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.square = 0
        return self.look(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.square = min(max(self.square + (1 if action else -1), 0), 15)
        return self.look(), float(self.square == 15), self.square == 15, False, {}


def main() -> None:
    rng = np.random.default_rng(0)
    env = Corridor()
    print(schema := memoire.Schema.from_env(env))  # float64 is stored as float32, unless keep_float64=True
    buffer = memoire.Buffer(schema, capacity=5_000, frame_stack=4, start="repeat", seed=0)
    writer = buffer.writer(env)
    obs, _ = env.reset(seed=0)
    for _ in range(2_000):
        action = int(rng.random() < 0.7)
        next_obs, reward, terminated, truncated, info = env.step(action)
        writer.step(obs, action, reward, terminated, truncated, next_obs, info)
        obs = env.reset()[0] if terminated else next_obs

    batch = buffer.sample(64)
    print(batch["obs.image"].shape, batch.obs["position"].dtype)  # flat keys; nested by name or attribute
    newest = batch.obs["image"][:, -1, 0].argmax(axis=1)
    assert np.array_equal(newest, (batch.obs["position"][:, -1, 0] * 15).round())
    print(f"a window moves by at most {abs(np.diff(batch.obs['position'][..., 0] * 15)).max():.0f} square a step")


if __name__ == "__main__":
    main()
