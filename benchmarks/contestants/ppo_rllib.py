"""RLlib: its PPO with two environment runners in processes, as it is by default, of eight environments each."""

import ray
import settings
from ray.rllib.algorithms.ppo.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from rllib_side import ENVIRONMENT, begin, learner_of
from tasks import Run, tanh_network

RUNNERS = 2


class Module(TorchRLModule, ValueFunctionAPI):
    """The networks of all sides."""

    def setup(self) -> None:
        inputs, hidden = self.observation_space.shape[0], settings.PPO_HIDDEN
        self.policy = tanh_network(inputs, hidden, int(self.action_space.n), 0.01)
        self.value = tanh_network(inputs, hidden, 1, 1.0)

    def _forward(self, batch, **given):
        return {"action_dist_inputs": self.policy(batch["obs"])}

    def compute_values(self, batch, embeddings=None):
        return self.value(batch["obs"])[..., 0]


class Learner(PPOTorchLearner):
    """Its own loss, of advantages that are normalised in each minibatch."""

    def compute_loss_for_module(self, *, batch, **given):
        advantage = batch["advantages"]
        mask = batch.get("loss_mask", advantage.new_ones(len(advantage), dtype=bool))
        batch["advantages"] = (advantage - advantage[mask].mean()) / (advantage[mask].std() + 1e-8)
        return super().compute_loss_for_module(batch=batch, **given)


def main() -> None:
    run = Run.from_environment()
    begin(run)
    config = (
        PPOConfig()
        .environment(ENVIRONMENT)
        .env_runners(num_env_runners=RUNNERS, num_envs_per_env_runner=settings.PPO_ENVS // RUNNERS)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=Module))
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
        .debugging(seed=run.seed, log_level="ERROR")
    )
    algorithm = config.build_algo()
    module = learner_of(algorithm, settings.PPO_EPS).module["default_policy"]
    steps = 0
    while run.goes_on(steps, module.policy.parameters):
        result = algorithm.train()
        steps = int(result["env_runners"]["num_env_steps_sampled_lifetime"])
    run.report(updates=algorithm.iteration)
    ray.shutdown()


if __name__ == "__main__":
    main()
