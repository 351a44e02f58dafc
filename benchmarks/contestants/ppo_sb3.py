"""Stable-Baselines3: its PPO over 16 environments in one process, as it is by default."""

import itertools

import torch
from sb3_watch import Watch
from settings import (
    PPO_ENTROPY,
    PPO_ENVS,
    PPO_EPOCHS,
    PPO_GAMMA,
    PPO_HIDDEN,
    PPO_LAMBDA,
    PPO_MINIBATCH,
    PPO_RATE,
    PPO_STEPS,
)
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv
from tasks import Run

STEPS = 10_000_000
"""More than there is time for."""


def main() -> None:
    run = Run.from_environment()
    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy",
        DummyVecEnv([run.make] * PPO_ENVS),
        PPO_RATE,
        n_steps=PPO_STEPS // PPO_ENVS,
        batch_size=PPO_MINIBATCH,
        n_epochs=PPO_EPOCHS,
        gamma=PPO_GAMMA,
        gae_lambda=PPO_LAMBDA,
        ent_coef=PPO_ENTROPY,
        policy_kwargs={"net_arch": {"pi": list(PPO_HIDDEN), "vf": list(PPO_HIDDEN)}},
        seed=run.seed,
        device="cpu",
    )
    policy = model.policy

    def parameters():
        return itertools.chain(policy.mlp_extractor.policy_net.parameters(), policy.action_net.parameters())

    model.learn(STEPS, Watch(run, parameters))


if __name__ == "__main__":
    main()
