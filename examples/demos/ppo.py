"""`make demo-ppo`: a learner that computes the actions and two collectors without torch, until the goal is reached.

    python examples/demos/ppo.py

Half way one collector is killed on purpose and started again. The exit status is 0 if the mean return of the newest 50
episodes reaches the goal in time, and all ranks end with the same parameters. The processes are

    memoire launch "examples/demos/ppo.py learn" "examples/demos/ppo.py collect" --actors 2

With --learners 2, the learner is two ranks by torchrun, and collector r gets its actions from rank r. The learner finds
torch in its own environment, or in the folder that $MEMOIRE_TORCH names.
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import time
from typing import Any

from memoire.nodes.launcher import Launcher
from memoire.nodes.local import LaunchedRun, LaunchOptions
from memoire.nodes.supervision import ProcessOutput, print_note
from memoire.rl.collector import BETWEEN_RANKS, address_of_rank

PROGRAM = os.path.abspath(__file__)
COLLECTORS = 2
PROGRESS = re.compile(r"return (-?[0-9.]+),")
PARAMETERS = re.compile(r"rank (\d+) has parameters ([0-9a-f]+)")
GROUPS = 1
"""Vector environments of a collector. With two, one environment steps while the other one waits for its actions. On two
cores, one vector environment makes a fifth more steps, since it sends half as many requests.
"""


@dataclasses.dataclass(frozen=True)
class Task:
    """Goal and hyperparameters of an environment; the goal is the mean return of 50 episodes."""

    goal: float
    seconds: float
    """Seconds that the run may take."""
    steps: int
    """Environment steps in an iteration, over all ranks."""
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
    """Step environments until the run is over; the rank `MEMOIRE_RANK % learners` computes the actions."""
    import gymnasium

    from memoire.rl.collector import Collector

    rank = int(os.environ["MEMOIRE_RANK"])
    url = address_of_rank(os.environ["MEMOIRE_ENDPOINT"], rank % learners)
    envs = [gymnasium.make_vec(env, num_envs=num_envs // GROUPS) for _ in range(GROUPS)]
    with Collector(url, envs, seed=int(os.environ["MEMOIRE_SEED"])) as collector:
        counts = collector.run()
    has_torch = importlib.util.find_spec("torch") is not None
    print(f"{counts.steps:,} steps, {'with torch' if has_torch else 'without torch'}", flush=True)


def learn(env: str, seed: int) -> None:
    """Learn until the mean return of the newest 50 episodes reaches the goal, or the time is up."""
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
        settings: dict[str, Any] = {
            "lam": task.lam,
            "entropy_coef": task.entropy_coef,
            "seed": seed + rank,
        }
        ppo = learner.keep(PPO(learner.net, task.rate, task.epochs, task.minibatch, **settings))
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
    """Run this program as several ranks by torchrun and return its exit status."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={learners}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, PROGRAM, *arguments], env=environment, check=False).returncode


class PpoDemo:
    """A run of all processes, and the results that the learner prints."""

    def __init__(self, env: str, learners: int, seed: int) -> None:
        self.task, self.learners, self.began = TASKS[env], learners, time.monotonic()
        arguments = ("--env", env, "--learners", str(learners))
        self.options = LaunchOptions(
            learner=(PROGRAM, "learn", *arguments),
            actor=(PROGRAM, "collect", *arguments),
            actors=COLLECTORS,
            port=0,
            ports=BETWEEN_RANKS * learners,
            seed=seed,
            dashboard=False,  # a dashboard would take its share of two cores
        )
        self.returned, self.reached_after = float("-inf"), float("inf")
        self.parameters: dict[int, str] = {}
        """Checksum of the parameters at the end, by rank."""
        self.has_killed = False

    def run(self) -> int:
        """Run all processes and return the exit status: 128 + n if signal n ended the run."""
        shown = ProcessOutput(self.options.names, None, sys.stdout)

        def heard(name: str, line: str) -> None:
            shown(name, line)
            self.hear(line)

        with shown, Launcher(heard, say=print_note) as launcher:
            run = LaunchedRun(launcher, self.options, lambda: self.look(run))
            run.run()
            signalled = launcher.stop_signal
        return 128 + signalled if signalled else self.sum_up()

    def hear(self, line: str) -> None:
        """Parse a line that a process has printed."""
        if match := PROGRESS.search(line):
            self.returned = float(match[1])
            if self.returned >= self.task.goal:
                self.reached_after = time.monotonic() - self.began
        if match := PARAMETERS.search(line):
            self.parameters[int(match[1])] = match[2]

    def look(self, run: LaunchedRun) -> None:
        """Kill the last collector half way."""
        if not self.has_killed and self.returned >= 0.5 * self.task.goal:
            self.has_killed = True
            print_note(f"half way, at a return of {self.returned:.1f}: {run.actors[-1].name} is killed on purpose")
            run.actors[-1].kill()

    def sum_up(self) -> int:
        """Print the result and return the exit status."""
        task, checksums = self.task, set(self.parameters.values())
        is_reached, is_same = self.reached_after <= task.seconds, len(checksums) == 1
        print(
            f"the last 50 episodes returned {self.returned:.1f} on average, the goal is {task.goal:g}: "
            + (f"reached after {self.reached_after:.0f} s" if is_reached else f"not reached within {task.seconds:g} s")
        )
        if self.learners > 1:
            print(f"parameters of {len(self.parameters)} ranks are {'equal bit by bit' if is_same else 'not equal'}")
        if not self.has_killed:
            print("no collector was killed: the run ended before it was half way")
        is_good = is_reached and is_same and len(self.parameters) == self.learners and self.has_killed
        return 0 if is_good else 1


def main() -> int:
    """Run one of the roles, or all processes, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=("learn", "collect"), help="one of the processes; by default, all")
    parser.add_argument("--env", default="LunarLander-v3", choices=sorted(TASKS))
    parser.add_argument("--num-envs", type=int, default=8, help="environments of a collector")
    parser.add_argument("--learners", type=int, default=1, help="ranks, by torchrun")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.role is None:
        return PpoDemo(args.env, args.learners, args.seed).run()
    if args.role == "collect":
        collect(args.env, args.num_envs, args.learners)
        return 0
    if folder := os.environ.get("MEMOIRE_TORCH"):
        sys.path.append(folder)
    if args.learners > 1 and "WORLD_SIZE" not in os.environ:
        return start_ranks(["learn", "--env", args.env, "--learners", str(args.learners)], args.learners)
    learn(args.env, int(os.environ["MEMOIRE_SEED"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
