"""Q-learning of FrozenLake with a table of action values and a prioritized replay buffer, in one process.

Run it with `python examples/single_process.py`; it needs gymnasium and takes a few seconds.
"""

import gymnasium as gym
import numpy as np

import memoire


def greedy_return(env: gym.Env, table: np.ndarray) -> float:
    """Play one episode with the best action in every state; return its total reward."""
    obs, _ = env.reset()
    total, done = 0.0, False
    while not done:
        obs, reward, terminated, truncated, _ = env.step(int(table[obs].argmax()))
        total, done = total + float(reward), terminated or truncated
    return total


def main() -> None:
    rng = np.random.default_rng(0)
    env = gym.make("FrozenLake-v1", is_slippery=False)  # 16 squares, 4 moves, reward 1 at the goal
    table = rng.uniform(0.0, 1e-3, (16, 4))

    # The columns of an entry follow from the environment: obs int64, action int64, reward float32.
    schema = memoire.Schema.from_env(env)
    sampler = memoire.Prioritized(0.6, beta=0.4)
    buffer = memoire.Buffer(schema, capacity=10_000, sampler=sampler, discount=0.95, seed=0)
    writer = buffer.writer(env)

    obs, _ = env.reset(seed=0)
    for step in range(6_000):
        action = int(rng.integers(4)) if rng.random() < 0.5 else int(table[obs].argmax())
        next_obs, reward, terminated, truncated, info = env.step(action)
        writer.step(obs, action, reward, terminated, truncated, next_obs, info)
        obs = env.reset()[0] if terminated or truncated else next_obs

        if step >= 500 and step % 4 == 0:
            batch = buffer.sample(32)
            # discount is 0 if the episode terminated: the target needs no other case, even with multi_step above 1.
            targets = batch.reward + batch.discount * table[batch.next_obs].max(axis=1)
            # Entries with a larger error are drawn more often.
            buffer.update_priorities(batch.ids, targets - table[batch.obs, batch.action])
            for *place, target, weight in zip(batch.obs, batch.action, targets, batch.importance, strict=True):
                table[*place] += 0.2 * weight * (target - table[*place])

    print(f"{len(buffer)} entries in {buffer.num_episodes} episodes")
    print(f"return of the greedy policy: {greedy_return(env, table)}")


if __name__ == "__main__":
    main()
