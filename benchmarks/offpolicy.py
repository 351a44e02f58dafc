"""How long until SAC balances MuJoCo's double pendulum: as processes of memoire, and as one of Stable-Baselines3?

Both have the same networks, batches, step sizes and warm-up, and one training step for each step of the environment.
A run is over when the mean of five test episodes is 9,000 or more. Its time is from the start of the first process to
that. Torch, MuJoCo and Stable-Baselines3 are needed: `make bench-offpolicy` sees to that.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Report, arguments, results

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1, 2)
GOAL, EPISODES = 9000.0, 5
SECONDS = 240.0
"""After so many a run is given up."""
TAKEN = ", ".join(map(str, SEEDS))
FACTS = f"""InvertedDoublePendulum-v5, networks of 64 and 64, batches of 256, step size 0.001, 1000 random or untrained
steps first, entropy weights that are learned from 0.2 on, one thread of torch in each process. Seeds {TAKEN}, one after
the other; the sides take turns. memoire is a server, two workers and a trainer (`memoire.rl up
examples/double_pendulum.py`). Its workers act by a model of up to 50 training steps before, record up to 1000 steps
ahead of the trainer, and send whole episodes. While they wait for the trainer, each runs a test episode every second;
the newest five of both count. Stable-Baselines3 is one process, which runs five test episodes after each 1000 steps.
Both times have the start of Python and the import of torch in them: of five processes there, of one here. memoire
tells every ten seconds of its training steps, Stable-Baselines3 of each thousand steps of the environment, the first
1000 of which are not trained on."""
SB3 = """
import sys
import gymnasium, numpy, torch
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy

torch.set_num_threads(1)
tested = gymnasium.make("InvertedDoublePendulum-v5")

class Test(BaseCallback):
    def _on_step(self):
        if self.num_timesteps % 1000:
            return True
        mean, _ = evaluate_policy(self.model, tested, {episodes}, warn=False)
        print(self.num_timesteps, "steps:", mean, flush=True)
        if mean >= {goal}:
            print("goal reached", flush=True)
        return mean < {goal}

SAC("MlpPolicy", gymnasium.make("InvertedDoublePendulum-v5"), learning_rate=1e-3, batch_size=256, learning_starts=1000,
    ent_coef="auto_0.2", seed=int(sys.argv[1]), device="cpu", policy_kwargs=dict(net_arch=[64, 64])
).learn(100_000, callback=Test())
"""


STEPS = re.compile(r"(\d+) (?:training )?steps[:,]")
"""Training steps in a line of memoire's, and those of the environment in one of Stable-Baselines3's."""


def told(line: str) -> int:
    """Steps that a line tells of; 0 where it tells of none."""
    found = STEPS.search(line)
    return int(found[1]) if found else 0


def seconds_until(command: list[str], environment: dict[str, str]) -> tuple[float, float, int]:
    """Until a program says that the goal was reached, SECONDS if it does not in that time; until it told of its first
    steps; and how many it told of last.
    """
    began, first, steps = time.monotonic(), 0.0, 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
    ) as process:
        assert process.stdout is not None
        took = SECONDS
        for line in process.stdout:
            steps = told(line) or steps
            first = first or (time.monotonic() - began if steps else 0.0)
            if re.match("goal reached", line):
                took = time.monotonic() - began
                break
            if time.monotonic() - began > SECONDS:
                process.terminate()
        process.communicate()
    return took, first, steps


def ours(seed: int) -> tuple[float, float, int]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MEMOIRE_SEED": str(seed), "MEMOIRE_RUNS": folder, "OMP_NUM_THREADS": "1"}
        program = [sys.executable, "-m", "memoire.rl", "up", "examples/double_pendulum.py", "--no-dashboard"]
        return seconds_until([*program, "--seconds", str(SECONDS)], environment)


def theirs(seed: int) -> tuple[float, float, int]:
    program = SB3.format(goal=GOAL, episodes=EPISODES)
    return seconds_until([sys.executable, "-c", program, str(seed)], {**os.environ, "OMP_NUM_THREADS": "1"})


def main() -> None:
    chosen = arguments(__doc__)
    report = Report(__doc__, [FACTS])
    report.heading()
    found: list[list[tuple[float, float, int]]] = [[], []]
    for seed in SEEDS[:1] if chosen.quick else SEEDS:
        for place, side in enumerate((ours, theirs)):
            found[place].append(side(seed))
            print(f"seed {seed}, {('memoire', 'Stable-Baselines3')[place]}: {found[place][-1][0]:.1f} s", flush=True)
    rates = [[1.0 / seconds for seconds, *_ in side] for side in found]
    name = "Stable-Baselines3 2.9.2"
    report.add(*results("runs until 9,000", rates, [name], unit=" runs/s", aims={name: "double-pendulum"}))
    for who, runs_of in zip(("memoire", name), found, strict=True):
        runs = "; ".join(f"{seconds:.1f} s, {first:.1f} s, {steps}" for seconds, first, steps in runs_of)
        report.facts.append(
            f"{who}: seconds until the goal, until it told of its first steps, and steps told of last: {runs}."
        )
    report.finish(chosen.write, "offpolicy")


if __name__ == "__main__":
    main()
