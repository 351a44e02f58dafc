"""Programs that learn as users run them, in real time."""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from _kit import CANNOT, ROOT, TESTS, end, folder, run_named, say, table

from history.ports import held

LATE = 1.0
"""Per cent."""
NUMBER = r"(-?[\d.]+)"
SAID = re.compile(
    rf"idle: {NUMBER}; a controller: {NUMBER}.*learned: {NUMBER} over five test episodes, wanted {NUMBER}; "
    rf"late steps {NUMBER} %",
    re.DOTALL,
)


def drone() -> int:
    """Does a drone learn to fly under a real clock, with commands and positions that arrive 20 to 50 ms late?

    `examples/drone.py`: a server and a worker in one process, a trainer in another, a time step of 50 ms. The policy that does
    nothing, a controller that flies straight to the target, and the learned policy are measured in the same run. It has to
    come half way from the first to the second within ten minutes. Fewer than one in a hundred time steps may be late, if the
    machine has nothing else to do.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args()
    tried = subprocess.run([sys.executable, "-c", "import torch, gymnasium"], capture_output=True, check=False)
    if tried.returncode:
        print("torch and gymnasium are needed: PYTHONPATH=build/torch, see `make setup-torch`.")
        return CANNOT
    load, began = os.getloadavg()[0], time.monotonic()
    command = [sys.executable, str(ROOT / "examples" / "drone.py"), str(given.seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - began
    say(done.stdout)
    found = SAID.search(done.stdout)
    if found is None:
        return end([f"it ended with {done.returncode}, and said {done.stdout!r}"])
    idle, controlled, learned, wanted, late = map(float, found.groups())
    print(table(["mean return of an episode", ""], [
        ("does nothing", idle), ("a controller", controlled), ("half way", wanted), ("learned", learned),
    ]))  # fmt: skip
    print(
        f"\n{seconds:.0f} s with all three measured; {late:.2f} % of the time steps were late; load before: {load:.1f}."
    )
    violations = [f"the learned policy returns {learned}, wanted {wanted}"] * (learned < wanted or done.returncode != 0)
    return end([*violations, *[f"{late} % of the time steps were late"] * (late >= LATE)])


SCRIPT = TESTS / "frameworks" / "tutorial.py"
ROLES = ("server", "worker", "trainer")


def start(role: str, place: Path, port: int, given: argparse.Namespace) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ, "MEMOIRE_TMRL": str(place), "OMP_NUM_THREADS": "1", "TUTORIAL_STEP": str(given.step),
        "TUTORIAL_EPOCHS": str(given.epochs), "TUTORIAL_STEPS": str(given.steps),
        "MEMOIRE_TMRL_PORT_TRAINER": str(port), "MEMOIRE_TMRL_PORT_ROLLOUT": str(port + 1),
    }  # fmt: skip
    command = [sys.executable, "-m", "memoire.tmrl", "run", str(SCRIPT), role]
    with (place / f"{role}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def epochs_of(place: Path) -> list[dict[str, float]]:
    """Figures of each epoch."""
    path = place / "checkpoints" / "tutorial_t.cpt_metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def watch(trainer: subprocess.Popen[bytes], place: Path, seconds: float) -> None:
    """Until the trainer ends."""
    deadline, told = time.monotonic() + seconds, 0
    while trainer.poll() is None and time.monotonic() < deadline:
        time.sleep(1.0)
        for figures in epochs_of(place)[told:]:
            told += 1
            say(f"epoch {told}: test return {figures.get('return_test', float('nan')):.1f}")


def tutorial() -> int:
    """Does the script of TMRL's tutorial run unchanged in three processes, learn, and end as its text says?

    `python -m memoire.tmrl run tutorial.py server`, `worker` and `trainer`, with the numbers of the text: a time step of 50 ms,
    ten epochs of ten rounds of 1000 training steps, at most two of them for each step of the drone. That takes 47 minutes:
    `python tests/soak/tutorial.py --epochs 2` takes ten. The trainer ends when its epochs are over, and the worker at
    Ctrl-C. Test episodes of the last epoch have to return more than half way from those of the first one to 0, which is the
    most that there is.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a time step (0.05)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1000, help="training steps of a round (1000)")
    parser.add_argument("--seconds", type=float, default=5400.0, help="for all of it (5400)")
    given = parser.parse_args()
    tried = subprocess.run([sys.executable, "-c", "import torch, gymnasium"], capture_output=True, check=False)
    if tried.returncode:
        print("torch and gymnasium are needed: PYTHONPATH=build/torch, see `make setup-torch`.")
        return CANNOT
    with folder() as place, held(3) as port:
        began = time.monotonic()
        made = {role: start(role, place, port, given) for role in ROLES}
        try:
            watch(made["trainer"], place, given.seconds)
            seconds, trained, is_working = (
                time.monotonic() - began,
                made["trainer"].poll(),
                made["worker"].poll() is None,
            )
            made["worker"].send_signal(signal.SIGINT)
            made["worker"].wait(30.0)
        finally:
            for process in made.values():
                process.kill()
                process.wait()
        found, weights = epochs_of(place), sorted(path.name for path in (place / "weights").glob("*.pth"))
        if trained != 0:
            say("\n".join(path.read_text()[-2000:] for path in place.glob("*.log")))
    return report(
        given, found, weights, seconds, trained=trained, is_working=is_working, worked=made["worker"].returncode
    )


def report(given: argparse.Namespace, found: list[dict[str, float]], weights: list[str], seconds: float, *,
           trained: int | None, is_working: bool, worked: int | None) -> int:  # fmt: skip
    names = {"return_test": "test return", "return_train": "training return", "loss_critic": "loss of the critic",
             "memory_len": "samples"}  # fmt: skip
    shown = [
        [number, *(f"{each.get(name, float('nan')):.4g}" for name in names)] for number, each in enumerate(found, 1)
    ]
    print(table(["epoch", *names.values()], shown))
    print(f"\n{seconds:.0f} s, a time step of {given.step:g} s. Files: {', '.join(weights)}.")
    returns = [each["return_test"] for each in found if "return_test" in each]
    violations = [f"the trainer ended with {trained}"] * (trained != 0)
    violations += [f"{len(found)} epochs of {given.epochs}"] * (len(found) != given.epochs)
    violations += ["the worker ended before Ctrl-C"] * (not is_working) + [f"the worker ended with {worked}"] * (
        worked != 130
    )
    if len(returns) < 2 or returns[-1] < returns[0] / 2:
        violations.append(f"test episodes return {returns}: they are not half way from the first to 0")
    return end(violations)


SEEDS = range(3)
MINIGRID = ROOT / "build" / "minigrid"


def door_key() -> int:
    """Does PPO learn from pictures that collectors without torch send: MiniGrid's DoorKey-5x5, 95 of 100 episodes?

    `examples/learning/door_key.py` as a user runs it, with three seeds. torch lies where MEMOIRE_TORCH says; minigrid and
    pygame are installed into build/minigrid if they are not there.
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
        found = re.search(r"success ([0-9.]+) after (\d+) steps", done.stdout)
        success, steps = (float(found[1]), int(found[2])) if found else (0.0, 0)
        rows.append([seed, success, f"{steps:,}", f"{time.monotonic() - began:.0f}"])
        say(rows[-1])
        if success < 0.95:
            violations.append(f"seed {seed} ended with {done.returncode}: {success} succeeded, 0.95 are wanted")
    print(table(["seed", "success", "steps", "seconds"], rows))
    return end(violations)


if __name__ == "__main__":
    run_named(globals())
