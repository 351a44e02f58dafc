"""Estimate of how long a random policy keeps a pole up, from eight environments that reset themselves.

The writer takes the results of `envs.step` unchanged: it finds the true final observations, so no transition crosses
a reset. Run it with `python examples/vector_env.py`; it needs gymnasium and takes a few seconds.
"""

import gymnasium as gym
import numpy as np

import memoire

DISCOUNT = 0.9


def features(obs: np.ndarray) -> np.ndarray:
    """Return features [B, 15] of observations [B, 4]: 1, the four numbers, and their products."""
    scaled = obs / np.array([2.4, 2.0, 0.21, 2.0], np.float32)
    products = [scaled[:, i] * scaled[:, j] for i in range(4) for j in range(i, 4)]
    return np.column_stack([np.ones(len(obs)), scaled, *products])


def main() -> None:
    rng = np.random.default_rng(0)
    envs = gym.make_vec(
        "CartPole-v1", num_envs=8, vectorization_mode="sync", vector_kwargs={"autoreset_mode": "SameStep"}
    )

    # "logp" is an extra column, which step() takes by name: the log-probability of the taken action.
    schema = memoire.Schema.from_env(envs, extra={"logp": np.float32})
    buffer = memoire.Buffer(schema, capacity=20_000, multi_step=5, discount=DISCOUNT, sampler=memoire.Uniform(), seed=0)

    with buffer.writer(envs) as writer:  # one open episode for each environment; the mode is read from envs
        obs, _ = envs.reset(seed=0)
        for _ in range(1_000):
            action = rng.integers(2, size=8)
            logp = np.full(8, np.log(0.5), np.float32)
            next_obs, reward, terminated, truncated, info = envs.step(action)
            writer.step(obs, action, reward, terminated, truncated, next_obs, info, logp=logp)
            obs = next_obs
    print(f"{len(buffer)} entries in {buffer.num_episodes} episodes")

    # The value of a state is the discounted number of remaining steps: linear TD, solved again for the targets of
    # each batch.
    weights = np.zeros(15)
    for _ in range(60):
        batch = buffer.sample(512)
        target = batch.reward + batch.discount * (features(batch.next_obs) @ weights)
        weights += 0.5 * (np.linalg.lstsq(features(batch.obs), target, rcond=None)[0] - weights)

    upright, falling = np.zeros((1, 4), np.float32), np.array([[0.0, 0.0, 0.2, 1.0]], np.float32)
    print(f"upright {(features(upright) @ weights)[0]:.1f}, falling {(features(falling) @ weights)[0]:.1f}")


if __name__ == "__main__":
    main()
