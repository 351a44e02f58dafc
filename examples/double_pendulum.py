"""Double pendulum balanced with SAC: a server, two workers and a trainer as processes of this machine.

    python -m memoire.rl up examples/double_pendulum.py
    python -m memoire.rl try examples/double_pendulum.py --render-mode human

Needs gymnasium[mujoco] and torch.
"""

import os

import gymnasium
import torch

from memoire import rl

SEED = int(os.environ.get("MEMOIRE_SEED", "0"))
torch.set_num_threads(1)  # small networks are slower on several threads, and four processes share the machine

pipeline = rl.Pipeline(
    run=f"double-pendulum-{SEED}",
    folder=os.environ.get("MEMOIRE_RUNS", "runs"),
    env=lambda **options: gymnasium.make("InvertedDoublePendulum-v5", **options),
    policy=rl.partial(rl.GaussianPolicy, hidden=(64, 64)),
    agent=rl.partial(rl.SAC, hidden=(64, 64), gamma=0.99, polyak=0.995, rate=1e-3),
    table=rl.replay(capacity=1_000_000),
    training=rl.Training(
        epochs=100,
        rounds=1,
        steps=1000,
        batch_size=256,
        start_training=1000,
        max_training_steps_per_env_step=1.0,
        update_model_interval=50,
    ),
    work=rl.Work(workers=2, test_episode_interval=4, test_pause=1.0),
    goal=rl.Goal(test_return=9000, episodes=5),
    seed=SEED,
)
