"""TorchRL: its PPO over a collector of two forked processes, which step eight environments each at a time."""

from functools import partial

import gymnasium as gym
import settings
import torch
from tasks import MAKERS, Run, tanh_network
from tensordict.nn import TensorDictModule
from torchrl.collectors import MultiSyncCollector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import GymWrapper
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

WORKERS = 2


def environments(game: str, count: int):
    """Of a worker. TorchRL resets those whose episodes are over."""
    envs = gym.vector.SyncVectorEnv([MAKERS[game][0]] * count, autoreset_mode=gym.vector.AutoresetMode.DISABLED)
    return GymWrapper(envs, categorical_action_encoding=True, device="cpu")


def networks(env: GymWrapper) -> tuple[ProbabilisticActor, ValueOperator]:
    """What acts, and a value of observations."""
    inputs, spec = env.observation_spec["observation"].shape[-1], env.action_spec_unbatched
    policy = tanh_network(inputs, settings.PPO_HIDDEN, int(spec.n), 0.01)
    actor = ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=spec,
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    return actor, ValueOperator(tanh_network(inputs, settings.PPO_HIDDEN, 1, 1.0), in_keys=["observation"])


def loss_of(actor: ProbabilisticActor, value: ValueOperator) -> ClipPPOLoss:
    return ClipPPOLoss(
        actor,
        value,
        clip_epsilon=settings.PPO_CLIP,
        entropy_coeff=settings.PPO_ENTROPY,
        critic_coeff=settings.PPO_VALUE,
        loss_critic_type="l2",
        normalize_advantage=True,
    )


def main() -> None:
    run = Run.from_environment()
    torch.manual_seed(run.seed)
    torch.set_num_threads(1)
    torch.multiprocessing.set_start_method("fork", force=True)  # nothing is imported once more
    make = partial(environments, run.game, settings.PPO_ENVS // WORKERS)
    actor, value = networks(make())
    advantage = GAE(gamma=settings.PPO_GAMMA, lmbda=settings.PPO_LAMBDA, value_network=value)
    loss = loss_of(actor, value)
    optimizer = torch.optim.Adam(loss.parameters(), settings.PPO_RATE, eps=settings.PPO_EPS, fused=True)
    storage, sampler = LazyTensorStorage(settings.PPO_STEPS), SamplerWithoutReplacement()
    batches = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=settings.PPO_MINIBATCH)
    collector = MultiSyncCollector(
        [make] * WORKERS, actor, frames_per_batch=settings.PPO_STEPS, total_frames=-1, device="cpu", cat_results="stack"
    )
    collector.set_seed(run.seed)
    steps = updates = 0
    for data in collector:
        steps += data.numel()
        with torch.no_grad():
            data = advantage(data)
        batches.extend(data.reshape(-1))
        for _ in range(settings.PPO_EPOCHS):
            for batch in batches:
                found = loss(batch)
                optimizer.zero_grad()
                (found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]).backward()
                torch.nn.utils.clip_grad_norm_(loss.parameters(), settings.PPO_MAX_GRAD_NORM)
                optimizer.step()
                updates += 1
        collector.update_policy_weights_()
        if not run.goes_on(steps, actor.module[0].parameters):
            break
    run.report(updates=updates * settings.PPO_MINIBATCH // settings.PPO_EPOCHS // settings.PPO_STEPS)
    collector.shutdown()


if __name__ == "__main__":
    main()
