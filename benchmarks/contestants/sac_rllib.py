"""RLlib: its SAC with its buffer of episodes, eight environments in processes of their own that step together."""

import ray
import settings
import torch
from ray.rllib.algorithms.sac.sac import SACConfig
from ray.rllib.algorithms.sac.torch.default_sac_torch_rl_module import DefaultSACTorchRLModule
from ray.rllib.core.models.base import ENCODER_OUT
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from rllib_side import ENVIRONMENT, begin, learner_of
from tasks import Run

STEPS = 4
"""Of each environment before as many updates follow: it steps once more when an episode ends meanwhile."""


class Encoder(torch.nn.Module):
    """The hidden layers, of observations, or of observations and actions."""

    def __init__(self, inputs: int, *names: str) -> None:
        super().__init__()
        first, last = settings.SAC_HIDDEN
        layers = torch.nn.Linear(inputs, first), torch.nn.ReLU(), torch.nn.Linear(first, last), torch.nn.ReLU()
        self.names, self.net = names, torch.nn.Sequential(*layers)

    def forward(self, batch):
        return {ENCODER_OUT: self.net(torch.cat([batch[name].float() for name in self.names], -1))}


class Module(DefaultSACTorchRLModule):
    """Its own SAC around the networks of all sides."""

    def setup(self) -> None:
        self.twin_q = True
        inputs, outputs = self.observation_space.shape[0], self.action_space.shape[0]
        self.pi_encoder, self.pi = Encoder(inputs, "obs"), torch.nn.Linear(settings.SAC_HIDDEN[-1], 2 * outputs)
        if not self.inference_only:
            self.qf_encoder, self.qf_twin_encoder = (Encoder(inputs + outputs, "obs", "actions") for _ in range(2))
            self.qf, self.qf_twin = (torch.nn.Linear(settings.SAC_HIDDEN[-1], 1) for _ in range(2))


def main() -> None:
    run = Run.from_environment()
    begin(run)
    config = (
        SACConfig()
        .environment(ENVIRONMENT)
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=settings.SAC_ENVS,
            rollout_fragment_length=STEPS,
            gym_env_vectorize_mode="async",
        )
        .rl_module(rl_module_spec=RLModuleSpec(module_class=Module))
        .training(
            actor_lr=settings.SAC_RATE,
            critic_lr=settings.SAC_RATE,
            alpha_lr=settings.SAC_RATE,
            gamma=settings.GAMMA,
            tau=1.0 - settings.POLYAK,
            initial_alpha=settings.SAC_ALPHA,
            train_batch_size_per_learner=settings.SAC_BATCH,
            training_intensity=settings.SAC_BATCH,
            num_steps_sampled_before_learning_starts=settings.SAC_FIRST_UPDATE,
            replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": settings.CAPACITY},
        )
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=0)
        .debugging(seed=run.seed, log_level="ERROR")
    )
    algorithm = config.build_algo()
    module = learner_of(algorithm).module["default_policy"]
    steps = updates = 0

    def parameters():
        """Of the layer that gives means and deviations, each in its turn."""
        head = [half for pair in zip(*(each.chunk(2) for each in module.pi.parameters()), strict=True) for half in pair]
        return [*module.pi_encoder.parameters(), *head]

    while run.goes_on(steps, parameters):
        result = algorithm.train()
        steps = int(result["env_runners"]["num_env_steps_sampled_lifetime"])
        learned = result.get("learners", {}).get("default_policy", {})
        updates = int(learned.get("num_module_steps_trained_lifetime", 0)) // settings.SAC_BATCH
    run.report(updates=updates)
    ray.shutdown()


if __name__ == "__main__":
    main()
