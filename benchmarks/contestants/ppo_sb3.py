"""Stable-Baselines3: its PPO over 16 environments in one process, as it is by default."""

import itertools

import settings
import torch
from sb3_watch import Watch
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
        DummyVecEnv([run.make] * settings.PPO_ENVS),
        settings.PPO_RATE,
        n_steps=settings.PPO_STEPS // settings.PPO_ENVS,
        batch_size=settings.PPO_MINIBATCH,
        n_epochs=settings.PPO_EPOCHS,
        gamma=settings.PPO_GAMMA,
        gae_lambda=settings.PPO_LAMBDA,
        ent_coef=settings.PPO_ENTROPY,
        vf_coef=settings.PPO_VALUE,
        clip_range=settings.PPO_CLIP,
        max_grad_norm=settings.PPO_MAX_GRAD_NORM,
        policy_kwargs={"net_arch": {"pi": list(settings.PPO_HIDDEN), "vf": list(settings.PPO_HIDDEN)}},
        seed=run.seed,
        device="cpu",
    )
    policy = model.policy

    def parameters():
        return itertools.chain(policy.mlp_extractor.policy_net.parameters(), policy.action_net.parameters())

    model.learn(STEPS, Watch(run, parameters))


if __name__ == "__main__":
    main()
