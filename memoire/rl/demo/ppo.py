"""`make demo-ppo`: a learner with inference and two collectors without torch, as processes, until the goal is reached.

Half way one collector is killed on purpose; it is started again. The exit status is 0 if the newest 50 episodes return
as much as the goal on average in time, and all ranks end with the same parameters.
"""

import argparse
import re
import sys
import time

from memoire.nodes.launch import LaunchedRun, Options
from memoire.nodes.launcher import Launcher, ProcessOutput, note
from memoire.rl.addresses import BETWEEN_RANKS

from .lander import TASKS

PROGRAM = "memoire.rl.demo.lander"
COLLECTORS = 2
PROGRESS = re.compile(r"return (-?[0-9.]+),")
PARAMETERS = re.compile(r"rank (\d+) has parameters ([0-9a-f]+)")


class PpoDemo:
    """One run, and what its learner says."""

    def __init__(self, env: str, learners: int, seed: int) -> None:
        self.task, self.learners, self.began = TASKS[env], learners, time.monotonic()
        arguments = (env, "--learners", str(learners))
        self.options = Options(
            learner=(PROGRAM, "learn", *arguments),
            actor=(PROGRAM, "collect", *arguments),
            actors=COLLECTORS,
            port=0,
            ports=BETWEEN_RANKS * learners,
            seed=seed,
            dashboard=False,  # it would take its share of two cores
        )
        self.returned, self.reached_after = float("-inf"), float("inf")
        self.parameters: dict[int, str] = {}
        """Checksums of what each rank has at the end."""
        self.has_killed = False

    def run(self) -> int:
        """Run it; its exit status, 128 + n when signal n ended it before."""
        shown = ProcessOutput(self.options.names, None, sys.stdout)

        def heard(name: str, line: str) -> None:
            shown(name, line)
            self.hear(line)

        with shown, Launcher(heard, say=note) as launcher:
            run = LaunchedRun(launcher, self.options, lambda: self.look(run))
            run.run()
            signalled = launcher.stop_signal
        return 128 + signalled if signalled else self.sum_up()

    def hear(self, line: str) -> None:
        """Take in what a process has printed."""
        if found := PROGRESS.search(line):
            self.returned = float(found[1])
            if self.returned >= self.task.goal:
                self.reached_after = time.monotonic() - self.began
        if found := PARAMETERS.search(line):
            self.parameters[int(found[1])] = found[2]

    def look(self, run: LaunchedRun) -> None:
        """Kill the last collector half way."""
        if not self.has_killed and self.returned >= 0.5 * self.task.goal:
            self.has_killed = True
            note(f"half way, at a return of {self.returned:.1f}: {run.actors[-1].name} is killed on purpose")
            run.actors[-1].kill()

    def sum_up(self) -> int:
        """Print what came of it; the exit status."""
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
    """Run it as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="LunarLander-v3", choices=sorted(TASKS))
    parser.add_argument("--learners", type=int, default=1, help="ranks, by torchrun")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    return PpoDemo(given.env, given.learners, given.seed).run()


if __name__ == "__main__":
    sys.exit(main())
