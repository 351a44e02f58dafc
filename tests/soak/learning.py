"""Trials of programs that learn as users run them, in real time."""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import time

from _kit import CANNOT, ROOT, end, run_named, say, table

LATE = 1.0
"""Per cent of late steps from which the trial fails."""
NUMBER = r"(-?[\d.]+)"
SAID = re.compile(
    rf"idle {NUMBER}, controller {NUMBER}.*learned: {NUMBER} over five test episodes, goal {NUMBER}; "
    rf"late steps {NUMBER} %",
    re.DOTALL,
)


def drone() -> int:
    """Does a drone learn to fly under a real clock, with commands and positions that arrive 20 to 50 ms late?

    `examples/drone.py`: a server and a worker in one process, a trainer in another, a time step of 50 ms. The policy that does
    nothing, a controller that flies straight to the target, and the learned policy are measured in the same run. The
    learned policy has to come half way from the first to the second within ten minutes. Fewer than one in a hundred
    time steps may be late, if the machine has nothing else to do.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    args = parser.parse_args()
    tried = subprocess.run([sys.executable, "-c", "import torch, gymnasium"], capture_output=True, check=False)
    if tried.returncode:
        print("torch and gymnasium are needed: PYTHONPATH=build/torch, see `make setup-torch`.")
        return CANNOT
    load, began = os.getloadavg()[0], time.monotonic()
    command = [sys.executable, str(ROOT / "examples" / "drone.py"), str(args.seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - began
    say(done.stdout)
    match = SAID.search(done.stdout)
    if match is None:
        return end([f"it ended with {done.returncode}, and said {done.stdout!r}"])
    idle, controlled, learned, wanted, late = map(float, match.groups())
    print(table(["mean return of an episode", ""], [
        ("does nothing", idle), ("a controller", controlled), ("half way", wanted), ("learned", learned),
    ]))  # fmt: skip
    print(
        f"\n{seconds:.0f} s with all three measured; {late:.2f} % of the time steps were late; load before: {load:.1f}."
    )
    violations = [f"the learned policy returns {learned}, wanted {wanted}"] * (learned < wanted or done.returncode != 0)
    return end([*violations, *[f"{late} % of the time steps were late"] * (late >= LATE)])


SEEDS = range(3)
MINIGRID = ROOT / "build" / "minigrid"


def door_key() -> int:
    """Does PPO learn from pictures that collectors without torch send: MiniGrid's DoorKey-5x5, 95 of 100 episodes?

    `examples/learning/door_key.py` as a user runs it, with three seeds. MEMOIRE_TORCH is the folder of torch; minigrid
    and pygame are installed into build/minigrid if they are missing.
    """
    if not (MINIGRID / "minigrid").exists() and importlib.util.find_spec("minigrid") is None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(MINIGRID), "--no-deps"]
        if subprocess.run([*command, "minigrid==3.2.0", "pygame==2.6.1"], check=False).returncode:
            print("minigrid cannot be installed.")
            return CANNOT
    path = f"{MINIGRID}:{os.environ.get('MEMOIRE_TORCH', ROOT / 'build' / 'torch')}"
    rows, violations = [], []
    for seed in SEEDS:
        began = time.monotonic()
        command = [sys.executable, str(ROOT / "examples" / "learning" / "door_key.py"), f"--seed={seed}"]
        surroundings = os.environ | {"PYTHONPATH": path, "SDL_VIDEODRIVER": "dummy"}
        done = subprocess.run(command, env=surroundings, stdout=subprocess.PIPE, text=True, timeout=720.0, check=False)
        match = re.search(r"success ([0-9.]+) after (\d+) steps", done.stdout)
        success, steps = (float(match[1]), int(match[2])) if match else (0.0, 0)
        rows.append([seed, success, f"{steps:,}", f"{time.monotonic() - began:.0f}"])
        say(rows[-1])
        if success < 0.95:
            violations.append(f"seed {seed} ended with {done.returncode}: {success} succeeded, 0.95 are wanted")
    print(table(["seed", "success", "steps", "seconds"], rows))
    return end(violations)


if __name__ == "__main__":
    run_named(globals())
