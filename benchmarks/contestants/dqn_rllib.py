"""RLlib: its DQN with its prioritized buffer of episodes; an environment runner beside the learner, or eight."""

import ray
import settings
import torch
from ray.rllib.algorithms.dqn.dqn import DQNConfig, calculate_rr_weights
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.core.models.base import ENCODER_OUT
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.schedules.scheduler import Scheduler
from rllib_side import ENVIRONMENT, begin, learner_of
from tasks import Run, q_network

ENVS, STEPS = 8, 8


class Encoder(torch.nn.Module):
    """All of the network but its last layer."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        *layers, last = q_network(shape, 1)
        self.net, self.width = torch.nn.Sequential(*layers), last.in_features

    def forward(self, batch):
        return {ENCODER_OUT: self.net(batch["obs"].float())}


class Module(DefaultDQNTorchRLModule):
    """Its own DQN around the network of all sides."""

    def setup(self) -> None:
        self.uses_dueling, self.uses_double_q, self.num_atoms = False, True, 1
        self.epsilon_schedule = Scheduler(self.model_config["epsilon"], framework=self.framework)
        self.encoder = Encoder(self.observation_space.shape)
        self.af = torch.nn.Linear(self.encoder.width, int(self.action_space.n))


def main() -> None:
    run = Run.from_environment()
    begin(run)
    runners = 8 if run.task.on_gpu else 1
    config = (
        DQNConfig()
        .environment(ENVIRONMENT)
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=ENVS, rollout_fragment_length=STEPS)
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=Module, model_config={"epsilon": [[0, 1.0], [settings.EPSILON_STEPS, settings.EPSILON]]}
            )
        )
        .training(
            lr=settings.RATE,
            gamma=settings.GAMMA,
            n_step=settings.MULTI_STEP,
            double_q=True,
            dueling=False,
            train_batch_size_per_learner=settings.BATCH,
            # RLlib counts one runner more than there are
            training_intensity=settings.BATCH / settings.UPDATE_INTERVAL * runners / (runners + 1),
            target_network_update_freq=settings.TARGET_INTERVAL,
            num_steps_sampled_before_learning_starts=run.first_update,
            grad_clip=settings.MAX_GRAD_NORM,
            epsilon=[[0, 1.0], [settings.EPSILON_STEPS, settings.EPSILON]],
            replay_buffer_config={
                "type": "PrioritizedEpisodeReplayBuffer",
                "capacity": run.capacity,
                "alpha": settings.ALPHA,
                "beta": settings.BETA,
            },
        )
        .learners(num_gpus_per_learner=int(run.task.on_gpu))
        .reporting(min_sample_timesteps_per_iteration=200)
        .debugging(seed=run.seed, log_level="ERROR")
    )
    algorithm = config.build_algo()
    module = learner_of(algorithm).module["default_policy"]
    steps = updates = 0

    def parameters():
        return [*module.encoder.parameters(), *module.af.parameters()]

    while run.goes_on(steps, parameters, updates):
        result = algorithm.train()
        steps = int(result["env_runners"]["num_env_steps_sampled_lifetime"])
        learned = result.get("learners", {}).get("default_policy", {})
        updates = int(learned.get("num_module_steps_trained_lifetime", 0)) // settings.BATCH
    run.report(updates=updates)
    rounds, updates = calculate_rr_weights(algorithm.config)
    assert updates * settings.UPDATE_INTERVAL == rounds * runners * ENVS * STEPS, (rounds, updates)
    ray.shutdown()


if __name__ == "__main__":
    main()
