"""Learning from states of variable size: sets of points, with a different number of points at every step.

A Gymnasium Sequence becomes a ragged column; batches are padded and have lengths. Needs gymnasium, takes two seconds.
"""

from typing import Any

import gymnasium as gym
import numpy as np

import memoire


class Crumbs(gym.Env):
    """Bird with crumbs around it: pecking west (0) or east (1) eats the crumbs on that side."""

    observation_space = gym.spaces.Sequence(gym.spaces.Box(-1.0, 1.0, (2,), np.float32), stack=True)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.crumbs, self.pecks = np.zeros((0, 2), np.float32), 0
        return self.crumbs, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        eaten, self.pecks = (self.crumbs[:, 0] > 0) == action, self.pecks + 1
        fallen = self.np_random.uniform(-1.0, 1.0, (self.np_random.integers(0, 9), 2)).astype(np.float32)
        self.crumbs = np.concatenate([self.crumbs[~eaten][:2], fallen])  # the wind takes all but two
        return self.crumbs, float(eaten.sum()), False, self.pecks == 20, {}


def pooled(points: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return features [B, 3] of sets [B, L, 2]: sums that neither order nor padding changes. Zaheer et al., 2017."""
    return np.concatenate([count[:, None], np.sign(points).sum(axis=1)], axis=1)  # the padding is zeros


def main() -> None:
    rng, env, weights, eaten = np.random.default_rng(0), Crumbs(), np.zeros((3, 2)), np.zeros(3_000)
    buffer = memoire.Buffer(memoire.Schema.from_env(env), capacity=2_000, discount=0.5, seed=0)
    writer, (obs, _) = buffer.writer(env), env.reset(seed=0)
    for step in range(3_000):
        values = rng.random(2) if step < 2_000 else pooled(obs[None], np.array([len(obs)]))[0] @ weights
        action = int(values.argmax())
        next_obs, eaten[step], terminated, truncated, info = env.step(action)
        writer.step(obs, action, eaten[step], terminated, truncated, next_obs, info)
        obs = env.reset()[0] if terminated or truncated else next_obs
        if 200 <= step < 2_000:
            batch = buffer.sample(32)
            features, ahead = pooled(batch.obs, batch.obs_length), pooled(batch.next_obs, batch.next_obs_length)
            target = batch.reward + batch.discount * (ahead @ weights).max(axis=1)
            td_errors = target - (features @ weights)[np.arange(32), batch.action]
            for action in range(2):
                weights[:, action] += 0.01 * features.T @ ((batch.action == action) * batch.importance * td_errors) / 32
            batch.update_priorities(td_errors)
    before, now = eaten[:2_000].mean(), eaten[2_000:].mean()
    print(f"a peck eats {before:.2f} crumbs at random, {now:.2f} now: learned" if now > 1.2 * before else "not learned")


if __name__ == "__main__":
    main()
