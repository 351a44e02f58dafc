"""TorchRL: an asynchronous collector of as many processes as memoire has actors, and its prioritized buffer."""

import copy
from functools import partial

import settings
import torch
from tasks import MAKERS, Run, q_network
from tensordict.nn import TensorDictSequential
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
from torchrl.data.postprocs import MultiStep
from torchrl.envs import GymWrapper, SerialEnv
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate

ENVS = 8
STEPS = 32
"""Of each environment in what a process hands over."""


class Floats(torch.nn.Module):
    """Frames as floats."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs.float()


def environment(game: str):
    return GymWrapper(MAKERS[game][0](), categorical_action_encoding=True)


def environments(game: str):
    return SerialEnv(ENVS, partial(environment, game))


def main() -> None:
    run = Run.from_environment()
    torch.manual_seed(run.seed)
    torch.set_num_threads(1)
    env = environment(run.game)
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
        [partial(environments, run.game)] * run.task.players,
        TensorDictSequential(player, exploration),
        frames_per_batch=ENVS * STEPS,
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
            found = loss(batch)["loss"]
            optimizer.zero_grad()
            found.backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), settings.MAX_GRAD_NORM)
            optimizer.step()
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


if __name__ == "__main__":
    main()
