"""Stable-Baselines3: its DQN with its n-step buffer. It knows no priorities; the double estimate is added here."""

import settings
import torch
from gymnasium import spaces
from sb3_watch import FUSED, Watch
from stable_baselines3 import DQN
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from tasks import Run, q_network
from torch.nn import functional

STEPS = 10_000_000
"""More than there is time for."""


class Features(BaseFeaturesExtractor):
    """All of the network but its last layer."""

    def __init__(self, space: spaces.Box) -> None:
        net = q_network(space.shape, 1)
        super().__init__(space, net[-1].in_features)
        self.net = net[:-1]

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs)


class DoubleDQN(DQN):
    """Its own update, but for the action of the next state, which the network chooses and the target values."""

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


def main() -> None:
    run = Run.from_environment()
    torch.set_num_threads(1)
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
        exploration_fraction=settings.EPSILON_STEPS / STEPS,
        exploration_final_eps=settings.EPSILON,
        max_grad_norm=settings.MAX_GRAD_NORM,
        policy_kwargs={"features_extractor_class": Features, "net_arch": [], "normalize_images": False} | FUSED,
        seed=run.seed,
        device=run.task.device,
    )
    model.learn(STEPS, Watch(run, model.q_net.parameters, lambda: model._n_updates))
    run.report(updates=model._n_updates)


if __name__ == "__main__":
    main()
