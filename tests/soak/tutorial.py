"""Does the script of TMRL's tutorial run unchanged in three processes, learn, and end as its text says?

`python -m memoire.tmrl run tutorial.py server`, `worker` and `trainer`, with the numbers of the text: a time step of 50 ms,
ten epochs of ten rounds of 1000 training steps, at most two of them for each step of the drone. That takes 47 minutes:
`python tests/soak/tutorial.py --epochs 2` takes ten. The trainer ends when its epochs are over, and the worker at
Ctrl-C. Test episodes of the last epoch have to return more than half way from those of the first one to 0, which is the
most that there is.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from _kit import CANNOT, TESTS, end, folder, say, table

from history.ports import held

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
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


if __name__ == "__main__":
    sys.exit(main())
