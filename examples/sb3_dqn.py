"""Stable-Baselines3's DQN with prioritized replay on CartPole; needs pip install 'memoire-rl[sb3]'."""

import warnings

import memoire
from memoire.sb3 import DQN


def main() -> None:
    warnings.filterwarnings("ignore", module="stable_baselines3")
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=2e-3,
        learning_starts=500,
        train_freq=64,
        gradient_steps=64,
        batch_size=64,
        exploration_fraction=0.3,
        exploration_final_eps=0.04,
        target_update_interval=100,
        seed=1,
        gamma=0.99,
        n_steps=3,
        replay_buffer_kwargs={"sampler": memoire.Prioritized(0.6, beta=memoire.Linear(0.4, 1.0, 5000))},
    )
    model.learn(6000)
    returns = [info["r"] for info in model.ep_info_buffer][-10:]
    print(f"mean return of the last {len(returns)} episodes: {sum(returns) / len(returns):.0f}")


if __name__ == "__main__":
    main()
