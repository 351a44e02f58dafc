"""Stable-Baselines3's PPO on LunarLander with the settings of `make demo-ppo`, until 50 episodes return 200 on average.

It steps its 16 environments in processes, so that it uses all cores, or in one process ("dummy").
"""

import sys
import time

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from memoire.rl.demo.lander import TASKS

ENV, ENVS, RECENT = "LunarLander-v3", 16, 50
TASK = TASKS[ENV]


class UntilSolved(BaseCallback):
    """Ends the training at the goal, or when the time is up."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.mean = time.monotonic(), float("-inf")

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        recent = self.model.ep_info_buffer
        self.mean = sum(each["r"] for each in recent) / max(1, len(recent))
        seconds = time.monotonic() - self.began
        print(f"{seconds:4.0f} s {self.num_timesteps:9,} steps, return {self.mean:.1f}", flush=True)
        if (len(recent) >= RECENT and self.mean >= TASK.goal) or seconds > TASK.seconds:
            raise StopIteration


def main(seed: int, how: str) -> None:
    torch.set_num_threads(1 if how == "processes" else 2)
    kind = SubprocVecEnv if how == "processes" else DummyVecEnv
    envs = make_vec_env(ENV, ENVS, seed=seed, vec_env_cls=kind)
    model = PPO(
        "MlpPolicy",
        envs,
        TASK.rate,
        TASK.steps // ENVS,
        TASK.minibatch,
        TASK.epochs,
        TASK.gamma,
        TASK.lam,
        ent_coef=TASK.entropy_coef,
        stats_window_size=RECENT,
        policy_kwargs={"net_arch": [64, 64]},
        seed=seed,
        device="cpu",
    )
    ending = UntilSolved()
    try:
        model.learn(10**9, ending)
    except StopIteration:
        pass
    print(f"the last {RECENT} episodes returned {ending.mean:.1f} on average", flush=True)
    envs.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
