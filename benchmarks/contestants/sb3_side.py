"""Side of Stable-Baselines3: its DQN, its SAC, its PPO."""

from collections.abc import Callable, Iterable

import settings
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from tasks import Run, q_network
from torch.nn import functional

MAX_STEPS = 10_000_000
"""Limit of steps that no run reaches in its time."""
FUSED = {"optimizer_kwargs": {"fused": True}}
"""Arguments of policies: fused Adam, as on the other sides."""


class Watch(BaseCallback):
    """Callback after each step of the environments, which ends the run when its time is up."""

    def __init__(self, run: Run, parameters: Callable[[], Iterable]) -> None:
        super().__init__()
        self.run, self.parameters = run, parameters

    def _on_step(self) -> bool:
        return self.run.goes_on(self.num_timesteps, self.parameters, self.model._n_updates)


def learn(run: Run, model: BaseAlgorithm, parameters: Callable[[], Iterable]) -> None:
    """Learn until the time is up, and report the number of updates."""
    model.learn(MAX_STEPS, Watch(run, parameters))
    run.report(updates=model._n_updates)


class Features(BaseFeaturesExtractor):
    """Shared network of all sides without its last layer."""

    def __init__(self, space: spaces.Box) -> None:
        net = q_network(space.shape, 1)
        super().__init__(space, net[-1].in_features)
        self.net = net[:-1]

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs)


class DoubleDQN(DQN):
    """DQN with double estimates: the network chooses the action of the next state, and the target evaluates it."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        self.policy.set_training_mode(True)
        for _ in range(gradient_steps):
            data = self.replay_buffer.sample(batch_size)
            with torch.no_grad():
                best = self.q_net(data.next_observations).argmax(1, keepdim=True)
                later = self.q_net_target(data.next_observations).gather(1, best)
                goal = data.rewards + (1 - data.dones) * data.discounts * later
            loss = functional.smooth_l1_loss(self.q_net(data.observations).gather(1, data.actions.long()), goal)
            self.policy.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
        self._n_updates += gradient_steps


def dqn(run: Run) -> None:
    """Stable-Baselines3's DQN with its n-step buffer, which knows no priorities; the double estimate is added here."""
    count, kind = (16, SubprocVecEnv) if run.task.on_gpu else (8, DummyVecEnv)
    envs = kind([run.make] * count)
    model = DoubleDQN(
        "CnnPolicy",
        envs,
        settings.RATE,
        run.capacity,
        run.first_update,
        settings.BATCH,
        tau=1.0,
        gamma=settings.GAMMA,
        train_freq=max(1, settings.UPDATE_INTERVAL // count),
        gradient_steps=max(1, count // settings.UPDATE_INTERVAL),
        n_steps=settings.MULTI_STEP,
        target_update_interval=settings.TARGET_INTERVAL,
        exploration_fraction=settings.EPSILON_STEPS / MAX_STEPS,
        exploration_final_eps=settings.EPSILON,
        max_grad_norm=settings.MAX_GRAD_NORM,
        policy_kwargs={"features_extractor_class": Features, "net_arch": [], "normalize_images": False} | FUSED,
        seed=run.seed,
        device=run.task.device,
    )
    learn(run, model, model.q_net.parameters)


def sac(run: Run) -> None:
    """Stable-Baselines3's SAC over SubprocVecEnv, eight environments in processes of their own that step together."""
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
        gradient_steps=-1,  # one update for each environment
        ent_coef=f"auto_{settings.SAC_ALPHA}",
        policy_kwargs={"net_arch": list(settings.SAC_HIDDEN)} | FUSED,
        seed=run.seed,
        device="cpu",
    )
    learn(run, model, model.policy.actor.parameters)


def ppo(run: Run) -> None:
    """Stable-Baselines3's PPO over 16 environments in one process, as it is by default."""
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
    layers = torch.nn.ModuleList([model.policy.mlp_extractor.policy_net, model.policy.action_net])
    learn(run, model, layers.parameters)


if __name__ == "__main__":
    Run.learn(dqn, sac, ppo)
