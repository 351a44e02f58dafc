"""Side of TorchRL: its DQN, its SAC, its PPO."""

import copy
from functools import partial

import gymnasium as gym
import numpy as np
import settings
import torch
from tasks import MAKERS, Run, q_network, tanh_network
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import (
    LazyTensorStorage,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.postprocs import MultiStep
from torchrl.envs import GymWrapper, SerialEnv
from torchrl.modules import MLP, EGreedyModule, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, DQNLoss, HardUpdate, SACLoss, SoftUpdate
from torchrl.objectives.value import GAE

ENVS = 8
DQN_STEPS = 32
"""Steps of each environment in a batch of a collector's process."""


def minimize(loss: torch.Tensor, optimizer: torch.optim.Optimizer, limit: float = float("inf")) -> None:
    """Make one step of the optimizer, with gradients clipped to a limit of their norm."""
    optimizer.zero_grad()
    loss.backward()
    if limit < float("inf"):
        torch.nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], limit)
    optimizer.step()


class Floats(torch.nn.Module):
    """Layer that converts frames to floats."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs.float()


def dqn_environment(game: str):
    return GymWrapper(MAKERS[game][0](), categorical_action_encoding=True)


def dqn(run: Run) -> None:
    """TorchRL: an asynchronous collector of as many processes as memoire has actors, and its prioritized buffer."""
    env = dqn_environment(run.game)
    net = torch.nn.Sequential(Floats(), q_network(env.observation_spec["observation"].shape, int(env.action_spec.n)))
    actor = QValueActor(net, in_keys=["observation"], spec=env.action_spec, action_space="categorical")
    player = copy.deepcopy(actor) if run.task.on_gpu else actor
    actor.to(run.task.device)
    exploration = EGreedyModule(
        env.action_spec, eps_init=1.0, eps_end=settings.EPSILON, annealing_num_steps=settings.EPSILON_STEPS
    )
    storage = LazyTensorStorage(run.capacity, device=run.task.device)
    replay = TensorDictPrioritizedReplayBuffer(
        alpha=settings.ALPHA, beta=settings.BETA, storage=storage, batch_size=settings.BATCH
    )
    loss = DQNLoss(actor, loss_function="smooth_l1", delay_value=True, double_dqn=True)
    loss.make_value_estimator(gamma=settings.GAMMA)
    updater = HardUpdate(loss, value_network_update_interval=settings.TARGET_INTERVAL // settings.UPDATE_INTERVAL)
    optimizer = torch.optim.Adam(loss.parameters(), settings.RATE, fused=True)
    collector = MultiAsyncCollector(
        [partial(SerialEnv, ENVS, partial(dqn_environment, run.game))] * run.task.players,
        TensorDictSequential(player, exploration),
        frames_per_batch=ENVS * DQN_STEPS,
        total_frames=-1,
        device="cpu",
        postproc=MultiStep(settings.GAMMA, settings.MULTI_STEP),
    )
    collector.set_seed(run.seed)
    steps = updates = 0
    for data in collector:
        steps += data.numel()
        exploration.step(data.numel())
        replay.extend(data.reshape(-1))
        for _ in range(data.numel() // settings.UPDATE_INTERVAL if steps >= run.first_update else 0):
            batch = replay.sample()
            minimize(loss(batch)["loss"], optimizer, settings.MAX_GRAD_NORM)
            updater.step()
            replay.update_tensordict_priority(batch)
            updates += 1
            run.goes_on(steps, net.parameters, updates)
        if player is not actor:
            player.load_state_dict(actor.state_dict())
        collector.update_policy_weights_()
        if not run.goes_on(steps, net.parameters, updates):
            break
    run.report(updates=updates)
    collector.shutdown()


SAC_STEPS = 25
"""Steps of a batch of a collector's process, and updates between two versions of the policy."""


class Policy(torch.nn.Module):
    """Network from observations to means and deviations, with the layers of the other sides."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        *first, last = settings.SAC_HIDDEN
        self.net = MLP(inputs, last, num_cells=first, activation_class=torch.nn.ReLU, activate_last_layer=True)
        self.mean, self.log_std = torch.nn.Linear(last, outputs), torch.nn.Linear(last, outputs)

    def forward(self, obs: torch.Tensor):
        hidden = self.net(obs)
        return self.mean(hidden), self.log_std(hidden).clamp(-20.0, 2.0).exp()


def sac_environment(game: str):
    return GymWrapper(gym.wrappers.DtypeObservation(MAKERS[game][0](), np.float32), device="cpu")


def sac_networks(env: GymWrapper) -> tuple[Policy, ProbabilisticActor, ValueOperator]:
    """Return the policy, an actor with the policy, and a value of observations and actions."""
    inputs, spec = env.observation_spec["observation"].shape[-1], env.action_spec_unbatched
    policy = Policy(inputs, spec.shape[-1])
    actor = ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
        return_log_prob=False,
    )
    net = MLP(inputs + spec.shape[-1], 1, num_cells=list(settings.SAC_HIDDEN), activation_class=torch.nn.ReLU)
    return policy, actor, ValueOperator(net, in_keys=["observation", "action"])


def sac(run: Run) -> None:
    """TorchRL's SAC over an asynchronous collector of eight forked processes of one environment each."""
    torch.multiprocessing.set_start_method("fork", force=True)  # forked processes do not repeat the imports
    policy, actor, value = sac_networks(sac_environment(run.game))
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(settings.CAPACITY), batch_size=settings.SAC_BATCH)
    loss = SACLoss(actor, value, loss_function="l2", alpha_init=settings.SAC_ALPHA)
    loss.make_value_estimator(gamma=settings.GAMMA)
    updater = SoftUpdate(loss, eps=settings.POLYAK)
    optimizer = torch.optim.Adam(loss.parameters(), settings.SAC_RATE, fused=True)
    collector = MultiAsyncCollector(
        [partial(sac_environment, run.game)] * settings.SAC_ENVS,
        actor,
        frames_per_batch=SAC_STEPS,
        total_frames=-1,
        device="cpu",
    )
    collector.set_seed(run.seed)
    steps = updates = 0
    for data in collector:
        steps += data.numel()
        replay.extend(data)
        for _ in range(data.numel() if steps >= settings.SAC_FIRST_UPDATE else 0):
            losses = loss(replay.sample())
            minimize(losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"], optimizer)
            updater.step()
            updates += 1
        collector.update_policy_weights_()
        if not run.goes_on(steps, policy.parameters):
            break
    run.report(updates=updates)
    collector.shutdown()


WORKERS = 2


def ppo_environments(game: str, count: int):
    """Return the environments of a worker; TorchRL resets environments whose episodes are over."""
    envs = gym.vector.SyncVectorEnv([MAKERS[game][0]] * count, autoreset_mode=gym.vector.AutoresetMode.DISABLED)
    return GymWrapper(envs, categorical_action_encoding=True, device="cpu")


def ppo_networks(env: GymWrapper) -> tuple[ProbabilisticActor, ValueOperator]:
    """Return the actor, and a value of observations."""
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


def ppo(run: Run) -> None:
    """TorchRL's PPO over a collector of two forked processes, which step eight environments each at a time."""
    torch.multiprocessing.set_start_method("fork", force=True)  # forked processes do not repeat the imports
    make = partial(ppo_environments, run.game, settings.PPO_ENVS // WORKERS)
    actor, value = ppo_networks(make())
    advantage = GAE(gamma=settings.PPO_GAMMA, lmbda=settings.PPO_LAMBDA, value_network=value)
    loss = ClipPPOLoss(
        actor,
        value,
        clip_epsilon=settings.PPO_CLIP,
        entropy_coeff=settings.PPO_ENTROPY,
        critic_coeff=settings.PPO_VALUE,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
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
                losses = loss(batch)
                whole = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                minimize(whole, optimizer, settings.PPO_MAX_GRAD_NORM)
                updates += 1
        collector.update_policy_weights_()
        if not run.goes_on(steps, actor.module[0].parameters):
            break
    run.report(updates=updates * settings.PPO_MINIBATCH // settings.PPO_EPOCHS // settings.PPO_STEPS)
    collector.shutdown()


if __name__ == "__main__":
    Run.learn(dqn, sac, ppo)
