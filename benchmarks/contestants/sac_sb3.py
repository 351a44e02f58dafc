"""Stable-Baselines3: its SAC over SubprocVecEnv, eight environments in processes of their own that step together."""

import settings
import torch
from sb3_watch import FUSED, Watch
from stable_baselines3 import SAC
from stable_baselines3.common.vec_env import SubprocVecEnv
from tasks import Run

STEPS = 10_000_000
"""More than there is time for."""


def main() -> None:
    run = Run.from_environment()
    torch.set_num_threads(1)
    model = SAC(
        "MlpPolicy",
        SubprocVecEnv([run.make] * settings.SAC_ENVS),
        settings.SAC_RATE,
        settings.CAPACITY,
        settings.SAC_FIRST_UPDATE,
        settings.SAC_BATCH,
        tau=1.0 - settings.POLYAK,
        gamma=settings.GAMMA,
        train_freq=1,
        gradient_steps=-1,  # as many updates as there are environments
        ent_coef=f"auto_{settings.SAC_ALPHA}",
        policy_kwargs={"net_arch": list(settings.SAC_HIDDEN)} | FUSED,
        seed=run.seed,
        device="cpu",
    )
    model.learn(STEPS, Watch(run, model.policy.actor.parameters))
    run.report(updates=model._n_updates)


if __name__ == "__main__":
    main()
