"""TorchRL: its SAC over an asynchronous collector of eight forked processes of one environment each."""

from functools import partial

import gymnasium as gym
import numpy as np
import settings
import torch
from tasks import MAKERS, Run
from tensordict.nn import TensorDictModule
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymWrapper
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

STEPS = 25
"""Of an environment in what a process hands over, and updates between two versions of the policy."""


class Policy(torch.nn.Module):
    """Observations to means and deviations, by the layers that the other sides have."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        *first, last = settings.SAC_HIDDEN
        self.net = MLP(inputs, last, num_cells=first, activation_class=torch.nn.ReLU, activate_last_layer=True)
        self.mean, self.log_std = torch.nn.Linear(last, outputs), torch.nn.Linear(last, outputs)

    def forward(self, obs: torch.Tensor):
        hidden = self.net(obs)
        return self.mean(hidden), self.log_std(hidden).clamp(-20.0, 2.0).exp()


def environment(game: str):
    return GymWrapper(gym.wrappers.DtypeObservation(MAKERS[game][0](), np.float32), device="cpu")


def networks(env: GymWrapper) -> tuple[Policy, ProbabilisticActor, ValueOperator]:
    """The policy, what acts with it, and a value of observations and actions."""
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


def main() -> None:
    run = Run.from_environment()
    torch.manual_seed(run.seed)
    torch.set_num_threads(1)
    torch.multiprocessing.set_start_method("fork", force=True)  # nothing is imported eight times more
    policy, actor, value = networks(environment(run.game))
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(settings.CAPACITY), batch_size=settings.SAC_BATCH)
    loss = SACLoss(actor, value, loss_function="l2", alpha_init=settings.SAC_ALPHA)
    loss.make_value_estimator(gamma=settings.GAMMA)
    updater = SoftUpdate(loss, eps=settings.POLYAK)
    optimizer = torch.optim.Adam(loss.parameters(), settings.SAC_RATE, fused=True)
    collector = MultiAsyncCollector(
        [partial(environment, run.game)] * settings.SAC_ENVS,
        actor,
        frames_per_batch=STEPS,
        total_frames=-1,
        device="cpu",
    )
    collector.set_seed(run.seed)
    steps = updates = 0
    for data in collector:
        steps += data.numel()
        replay.extend(data)
        for _ in range(data.numel() if steps >= settings.SAC_FIRST_UPDATE else 0):
            found = loss(replay.sample())
            optimizer.zero_grad()
            (found["loss_actor"] + found["loss_qvalue"] + found["loss_alpha"]).backward()
            optimizer.step()
            updater.step()
            updates += 1
        collector.update_policy_weights_()
        if not run.goes_on(steps, policy.parameters):
            break
    run.report(updates=updates)
    collector.shutdown()


if __name__ == "__main__":
    main()
