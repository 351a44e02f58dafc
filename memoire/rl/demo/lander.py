"""What `make demo-ppo` starts: a learner that computes the actions, and collectors that have no torch.

    memoire launch "memoire.rl.demo.lander learn" "memoire.rl.demo.lander collect" --actors 2

With --learners 2, the learner is two ranks by torchrun, and collector r asks rank r. The learner finds torch in its own
environment, or in the folder that $MEMOIRE_TORCH names.
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from typing import Any

from memoire.rl.addresses import address_of_rank

GROUPS = 1
"""Vector environments of a collector. With two, one steps while the other one waits for its actions; on two cores, one
group makes a fifth more steps, since there are half as many requests.
"""


@dataclasses.dataclass(frozen=True)
class Task:
    """An environment, the mean return of 50 episodes that ends it, and how it is learned."""

    goal: float
    seconds: float
    """That it may take."""
    steps: int
    """Of an iteration, over all ranks."""
    length: int
    rate: float
    epochs: int
    minibatch: int
    gamma: float
    lam: float
    entropy_coef: float


TASKS = {
    "LunarLander-v3": Task(200.0, 360.0, 8192, 256, 1e-3, 6, 256, 0.995, 0.95, 0.005),
    "CartPole-v1": Task(475.0, 120.0, 2048, 128, 1e-3, 10, 128, 0.99, 0.95, 0.0),
}


def collect(env: str, num_envs: int, learners: int) -> None:
    """Step environments until the run is over; the learner of a rank computes the actions."""
    import gymnasium

    from memoire.rl.onpolicy.collector import Collector

    rank = int(os.environ["MEMOIRE_RANK"])
    url = address_of_rank(os.environ["MEMOIRE_ENDPOINT"], rank % learners)
    envs = [gymnasium.make_vec(env, num_envs=num_envs // GROUPS) for _ in range(GROUPS)]
    with Collector(url, envs, seed=int(os.environ["MEMOIRE_SEED"])) as collector:
        found = collector.run()
    has_torch = importlib.util.find_spec("torch") is not None
    print(f"{found.steps:,} steps, {'torch is here' if has_torch else 'without torch'}", flush=True)


def learn(env: str, seed: int) -> None:
    """Learn until the newest 50 episodes return as much as the goal on average, or the time is up."""
    import gymnasium
    import torch

    from memoire.rl import PPO, ActorCritic, OnPolicyLearner

    task, began = TASKS[env], time.monotonic()
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    space = gymnasium.make(env)
    net = ActorCritic.mlp(space, hidden=(64, 64))
    options: dict[str, Any] = {"policy": "remote", "discount": task.gamma, "seconds": task.seconds}
    with OnPolicyLearner(os.environ["MEMOIRE_LISTEN"], space, net, task.steps, task.length, **options) as learner:
        rank = learner.world.rank
        given: dict[str, Any] = {
            "lam": task.lam,
            "entropy_coef": task.entropy_coef,
            "seed": seed + rank,
        }
        ppo = learner.keep(PPO(learner.net, task.rate, task.epochs, task.minibatch, **given))
        while learner.recent_return < task.goal and not learner.is_over:
            figures = ppo.update(learner.collect(timeout=60.0))
            learner.log(figures)
            learner.publish()
            if rank == 0:
                seconds, kl = time.monotonic() - began, figures["approx_kl"]
                print(
                    f"{seconds:4.0f} s {learner.steps:9,} steps, return {learner.recent_return:.1f}, kl {kl:.3f}",
                    flush=True,
                )
    content = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
    print(f"rank {rank} has parameters {hashlib.sha256(content).hexdigest()}", flush=True)


def start_ranks(arguments: list[str], learners: int) -> int:
    """Run this program as several ranks by torchrun; its exit status."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={learners}"]
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(  # noqa: S603
        [*launcher, "-m", "memoire.rl.demo.lander", *arguments], env=surroundings, check=False
    ).returncode


def main() -> int:
    """Run one of the roles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("learn", "collect"))
    parser.add_argument("env", nargs="?", default="LunarLander-v3", choices=sorted(TASKS))
    parser.add_argument("--num-envs", type=int, default=8, help="environments of a collector")
    parser.add_argument("--learners", type=int, default=1, help="ranks")
    given = parser.parse_args()
    if given.role == "collect":
        collect(given.env, given.num_envs, given.learners)
        return 0
    if folder := os.environ.get("MEMOIRE_TORCH"):
        sys.path.append(folder)
    if given.learners > 1 and "WORLD_SIZE" not in os.environ:
        return start_ranks(["learn", given.env, "--learners", str(given.learners)], given.learners)
    learn(given.env, int(os.environ["MEMOIRE_SEED"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
