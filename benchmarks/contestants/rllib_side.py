"""Side of RLlib: its DQN, its SAC, its PPO; Ray with its cores, and Adam with the settings of the other sides."""

from collections.abc import Callable, Iterable

import ray
import settings
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn.dqn import DQNConfig, calculate_rr_weights
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.algorithms.ppo.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.algorithms.sac.sac import SACConfig
from ray.rllib.algorithms.sac.torch.default_sac_torch_rl_module import DefaultSACTorchRLModule
from ray.rllib.core.models.base import ENCODER_OUT
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.schedules.scheduler import Scheduler
from ray.tune.registry import register_env
from tasks import Run, q_network, tanh_network

ENVIRONMENT = "contest"
"""Name under which the environment of the run is registered."""


def train(
    run: Run, config: AlgorithmConfig, batch: int, parameters: Callable[[TorchRLModule], Iterable], eps: float = 1e-8
) -> AlgorithmConfig:
    """Learn until the time is up; return the settings that RLlib has then.

    RLlib has no setting for the eps of its optimisers or for a fused step, so both are set afterwards.

    Args:
        batch: Rows of one update.
        parameters: Returns the parameters of the network that acts, in the order of the other sides.
    """
    ray.init(num_cpus=run.task.players + run.task.on_gpu, include_dashboard=False, log_to_driver=False)
    register_env(ENVIRONMENT, lambda config: run.make())
    algorithm = config.debugging(seed=run.seed, log_level="ERROR").build_algo()
    learner = algorithm.learner_group._learner  # the learner is in this process
    for optimizer in learner._named_optimizers.values():
        for group in optimizer.param_groups:
            group.update(eps=eps, fused=True)
    module, steps, updates = learner.module["default_policy"], 0, 0
    while run.goes_on(steps, lambda: parameters(module), updates):
        result = algorithm.train()
        steps = int(result["env_runners"]["num_env_steps_sampled_lifetime"])
        learned = result.get("learners", {}).get("default_policy", {})
        updates = int(learned.get("num_module_steps_trained_lifetime", 0)) // batch
    run.report(updates=updates)
    ray.shutdown()
    return algorithm.config


ENVS, DQN_STEPS = 8, 8
EPSILON = [[0, 1.0], [settings.EPSILON_STEPS, settings.EPSILON]]


class DqnEncoder(torch.nn.Module):
    """Shared network of all sides without its last layer."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        *layers, last = q_network(shape, 1)
        self.net, self.width = torch.nn.Sequential(*layers), last.in_features

    def forward(self, batch):
        return {ENCODER_OUT: self.net(batch["obs"].float())}


class DqnModule(DefaultDQNTorchRLModule):
    """RLlib's own DQN around the network of all sides."""

    def setup(self) -> None:
        self.uses_dueling, self.uses_double_q, self.num_atoms = False, True, 1
        self.epsilon_schedule = Scheduler(self.model_config["epsilon"], framework=self.framework)
        self.encoder = DqnEncoder(self.observation_space.shape)
        self.af = torch.nn.Linear(self.encoder.width, int(self.action_space.n))


def dqn(run: Run) -> None:
    """RLlib's DQN with its prioritized buffer of episodes; an environment runner beside the learner, or eight."""
    runners = 8 if run.task.on_gpu else 1
    config = (
        DQNConfig()
        .environment(ENVIRONMENT)
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=ENVS, rollout_fragment_length=DQN_STEPS)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=DqnModule, model_config={"epsilon": EPSILON}))
        .training(
            lr=settings.RATE,
            gamma=settings.GAMMA,
            n_step=settings.MULTI_STEP,
            double_q=True,
            dueling=False,
            train_batch_size_per_learner=settings.BATCH,
            # RLlib counts one runner more than the algorithm has
            training_intensity=settings.BATCH / settings.UPDATE_INTERVAL * runners / (runners + 1),
            target_network_update_freq=settings.TARGET_INTERVAL,
            num_steps_sampled_before_learning_starts=run.first_update,
            grad_clip=settings.MAX_GRAD_NORM,
            epsilon=EPSILON,
            replay_buffer_config={
                "type": "PrioritizedEpisodeReplayBuffer",
                "capacity": run.capacity,
                "alpha": settings.ALPHA,
                "beta": settings.BETA,
            },
        )
        .learners(num_gpus_per_learner=int(run.task.on_gpu))
        .reporting(min_sample_timesteps_per_iteration=200)
    )
    config = train(run, config, settings.BATCH, lambda each: [*each.encoder.parameters(), *each.af.parameters()])
    rounds, updates = calculate_rr_weights(config)
    assert updates * settings.UPDATE_INTERVAL == rounds * runners * ENVS * DQN_STEPS, (rounds, updates)


SAC_STEPS = 4
"""Steps of each environment before as many updates; RLlib makes one more step if an episode ends meanwhile."""


class SacEncoder(torch.nn.Module):
    """Hidden layers over observations, or over observations and actions."""

    def __init__(self, inputs: int, *names: str) -> None:
        super().__init__()
        first, last = settings.SAC_HIDDEN
        layers = torch.nn.Linear(inputs, first), torch.nn.ReLU(), torch.nn.Linear(first, last), torch.nn.ReLU()
        self.names, self.net = names, torch.nn.Sequential(*layers)

    def forward(self, batch):
        return {ENCODER_OUT: self.net(torch.cat([batch[name].float() for name in self.names], -1))}


class SacModule(DefaultSACTorchRLModule):
    """RLlib's own SAC around the networks of all sides."""

    def setup(self) -> None:
        self.twin_q = True
        inputs, outputs = self.observation_space.shape[0], self.action_space.shape[0]
        self.pi_encoder, self.pi = SacEncoder(inputs, "obs"), torch.nn.Linear(settings.SAC_HIDDEN[-1], 2 * outputs)
        if not self.inference_only:
            self.qf_encoder, self.qf_twin_encoder = (SacEncoder(inputs + outputs, "obs", "actions") for _ in range(2))
            self.qf, self.qf_twin = (torch.nn.Linear(settings.SAC_HIDDEN[-1], 1) for _ in range(2))


def sac(run: Run) -> None:
    """RLlib's SAC with its buffer of episodes, eight environments in processes of their own that step together."""
    config = (
        SACConfig()
        .environment(ENVIRONMENT)
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=settings.SAC_ENVS,
            rollout_fragment_length=SAC_STEPS,
            gym_env_vectorize_mode="async",
        )
        .rl_module(rl_module_spec=RLModuleSpec(module_class=SacModule))
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
    )

    def parameters(module):
        """Return the parameters of the policy; the last layer is split into its means and its deviations."""
        head = [half for pair in zip(*(each.chunk(2) for each in module.pi.parameters()), strict=True) for half in pair]
        return [*module.pi_encoder.parameters(), *head]

    train(run, config, settings.SAC_BATCH, parameters)


RUNNERS = 2


class PpoModule(TorchRLModule, ValueFunctionAPI):
    """Networks of policy and value, which all sides share."""

    def setup(self) -> None:
        inputs, hidden = self.observation_space.shape[0], settings.PPO_HIDDEN
        self.policy = tanh_network(inputs, hidden, int(self.action_space.n), 0.01)
        self.value = tanh_network(inputs, hidden, 1, 1.0)

    def _forward(self, batch, **kwargs):
        return {"action_dist_inputs": self.policy(batch["obs"])}

    def compute_values(self, batch, embeddings=None):
        return self.value(batch["obs"])[..., 0]


class Learner(PPOTorchLearner):
    """RLlib's own loss, with advantages that are normalised in each minibatch."""

    def compute_loss_for_module(self, *, batch, **kwargs):
        advantage = batch["advantages"]
        mask = batch.get("loss_mask", advantage.new_ones(len(advantage), dtype=bool))
        batch["advantages"] = (advantage - advantage[mask].mean()) / (advantage[mask].std() + 1e-8)
        return super().compute_loss_for_module(batch=batch, **kwargs)


def ppo(run: Run) -> None:
    """RLlib's PPO with two environment runners in processes, as it is by default, of eight environments each."""
    config = (
        PPOConfig()
        .environment(ENVIRONMENT)
        .env_runners(num_env_runners=RUNNERS, num_envs_per_env_runner=settings.PPO_ENVS // RUNNERS)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=PpoModule))
        .learners(learner_class=Learner)
        .training(
            lr=settings.PPO_RATE,
            gamma=settings.PPO_GAMMA,
            lambda_=settings.PPO_LAMBDA,
            train_batch_size_per_learner=settings.PPO_STEPS,
            minibatch_size=settings.PPO_MINIBATCH,
            num_epochs=settings.PPO_EPOCHS,
            clip_param=settings.PPO_CLIP,
            vf_loss_coeff=settings.PPO_VALUE,
            vf_clip_param=float("inf"),
            entropy_coeff=settings.PPO_ENTROPY,
            grad_clip=settings.PPO_MAX_GRAD_NORM,
            use_kl_loss=False,
        )
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=0)
    )
    train(
        run,
        config,
        settings.PPO_EPOCHS * settings.PPO_STEPS,
        lambda module: module.policy.parameters(),
        settings.PPO_EPS,
    )


if __name__ == "__main__":
    Run.learn(dqn, sac, ppo)
