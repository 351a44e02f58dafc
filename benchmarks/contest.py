"""Contest of memoire, other libraries and a plain loop: seconds until a task is learned, on the same machine.

    python benchmarks/contest.py --game breakout --seeds 3 --write docs/development/records
    python benchmarks/contest.py --game breakout --sides memoire,sb3 --seeds 1 --minutes 8

Sides take turns: all sides with seed 0, then all with seed 1 in the reverse order. Each run writes a record to
build/contest, and a run with a record is not repeated: an interrupted contest resumes. If `--seconds` is larger than
before, only runs that did not reach the score are repeated. MEMOIRE_TORCH names the folder with torch.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contestants import page
from contestants.page import Record, Records, memory_of, merged
from contestants.settings import GAMES
from measure import machine, record
from peers import QUIET, PeerUnavailable, described, environment_of

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parent / "build" / "contest"
PROGRAMS = HERE / "contestants"
END_TIMEOUT = 60.0
"""Seconds that a side has to end by itself when its time is up."""
EVALUATION_TIMEOUT = 600.0
"""Seconds that the evaluation of one run may take."""
MEMORY_INTERVAL = 2.0
"""Seconds between two measurements of a side's memory, of games in which only rates are compared."""
SHARED = ("gymnasium", "mujoco", "minatar", "torch")
"""Distributions whose versions the page names, since all sides share them."""


@dataclass(frozen=True)
class Side:
    """Participant of the contest: a program of benchmarks/contestants, its environment and its options."""

    environment: str
    """Name of an environment in peers/versions.toml."""
    distribution: str = ""
    """Distribution whose version the page shows; "" shows none."""
    program: str = ""
    """Prefix of the program's file name; "" stands for the side's key."""
    options: dict[str, str] = field(default_factory=dict)
    prepare: str = ""
    """Program that runs before the side's program, or ""."""
    algorithms: tuple[str, ...] = ("dqn", "sac", "ppo")
    """Algorithms that the side implements."""
    on_gpu: bool = True
    """True if the side can learn on a GPU."""


SIDES = {
    "memoire": Side("contest-memoire"),
    "sb3": Side("contest-sb3", "stable-baselines3"),
    "torchrl": Side("contest-torchrl", "torchrl", prepare="torchrl_extension.py"),
    "rllib": Side("contest-rllib", "ray"),
    "plain": Side("contest-plain", algorithms=("dqn",), on_gpu=False),
    "uniform": Side("contest-memoire", "", "memoire", {"sampler": "uniform"}, algorithms=("dqn",)),
    "inference": Side("contest-memoire", "", "memoire", {"policy": "remote"}, algorithms=("ppo",)),
}


def sides_of(game: str, wanted: str) -> list[str]:
    """Return the sides that have a program for the game; `wanted` selects some sides, with commas between."""
    algorithm = GAMES[game].algorithm
    keys = [key for key, side in SIDES.items() if algorithm in side.algorithms]
    keys = [key for key in keys if SIDES[key].on_gpu or not GAMES[game].on_gpu]
    if GAMES[game].score is None:  # games without a score have only rates
        keys = [key for key in keys if not SIDES[key].options]
    if unknown := set(filter(None, wanted.split(","))) - set(keys):
        sys.exit(f"{game} has no side {', '.join(sorted(unknown))}: --sides takes {', '.join(keys)}")
    return [key for key in keys if not wanted or key in wanted.split(",")]


def python_of(environment: str) -> Path:
    """Return the interpreter of an environment, which also imports torch, and for memoire's sides this checkout."""
    folder, _ = environment_of(environment)
    paths = [os.environ.get("MEMOIRE_TORCH", str(HERE.parent / "build" / "torch"))]
    paths += [str(HERE.parent)] * (environment == "contest-memoire")
    for packages in folder.glob("lib/python*/site-packages"):
        (packages / "contest.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def packages_of(environment: str) -> list[Path]:
    """Return the package folders of an environment; no folders for ""."""
    return list(environment_of(environment)[0].glob("lib/python*/site-packages")) if environment else []


def versions(python: Path, names: list[str], paths: dict[str, str]) -> dict[str, str]:
    """Return the versions of distributions in an environment, with `paths` as environment variables."""
    asked = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    done = subprocess.run([python, "-c", asked, *names], check=True, stdout=subprocess.PIPE, text=True, env=paths)
    return dict(zip(names, done.stdout.split(), strict=True))


def run(game: str, key: str, seed: int, seconds: float, where: Path = RECORDS) -> Record:
    """Run a side in a folder below `where`, then evaluate its networks. Raise PeerUnavailable if a program fails."""
    side, task, folder = SIDES[key], GAMES[game], where / game / f"{key}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    python, player = python_of(side.environment), python_of("contest-plain")
    settings: dict[str, Any] = {"game": game, "seed": seed, "seconds": seconds, "folder": str(folder)}
    programs = os.pathsep.join(map(str, [PROGRAMS, *packages_of(task.packages)]))
    quiet = {name: value for name, value in QUIET.items() if name != "CUDA_VISIBLE_DEVICES" or not task.on_gpu}
    paths, sizes = os.environ | quiet | {"OMP_NUM_THREADS": "1", "PYTHONPATH": programs}, [0]
    look = (lambda process: sizes.append(memory_of(process))) if task.score is None else None
    with (folder / "log.txt").open("wb") as log:
        status = ended([python, PROGRAMS / side.prepare], END_TIMEOUT * 5, log, paths) if side.prepare else 0
        program = PROGRAMS / f"{side.program or key}_side.py"
        settings |= {"options": side.options, "began": time.monotonic()}
        status = status or ended(
            [python, program], seconds + END_TIMEOUT, log, paths | {"CONTEST": json.dumps(settings)}, look
        )
        if task.score is not None:
            status = status or ended([player, PROGRAMS / "evaluate.py", game, folder], EVALUATION_TIMEOUT, log, paths)
    if status:
        lines = (folder / "log.txt").read_text(errors="replace").strip().splitlines()[-12:]
        raise PeerUnavailable(
            key, "\n".join([f"a program ended with status {status}; the last lines of its log:", *lines])
        )
    path = folder / "facts.json"
    facts = json.loads(path.read_text()) if path.exists() else {}
    beside = [each.partition("==")[0] for each in described(task.packages)[1]["packages"]] if task.packages else []
    version_of = versions(python, [*SHARED, *beside, *filter(None, [side.distribution])], paths)
    facts |= {"machine": re.sub(r", load [\d.]+", "", machine()), "version": version_of.get(side.distribution, "")}
    facts |= {"memory": max(sizes)} if look else {}
    facts["shared"] = ", ".join(f"{name} {version_of[name]}" for name in SHARED)
    if beside:
        named = [f"{name} {version_of[name]}" for name in beside]
        facts["packages"] = ", ".join([*named, facts["shared"], facts.pop("gpu")] if "gpu" in facts else named)
    curve = sorted(json.loads((folder / "curve.json").read_text()).values())
    return Record.of({"game": game, "side": key, "seed": seed, "limit": seconds, "curve": curve, "facts": facts})


def ended(command: list[Any], patience: float, log: Any, paths: dict[str, str], look: Any = None) -> int:
    """Run a program and return its exit status, or -9 after `patience` seconds. The program's process group is killed.

    Args:
        look: Called with the id of the process every MEMORY_INTERVAL seconds.
    """
    kind = {"stdout": log, "stderr": subprocess.STDOUT, "env": paths, "start_new_session": True}
    with subprocess.Popen(command, **kind) as process:
        until = time.monotonic() + patience
        try:
            while (remaining := until - time.monotonic()) > 0.0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(min(remaining, MEMORY_INTERVAL) if look else remaining)
                if look:
                    look(process.pid)
            return -9
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--game", default="breakout", choices=GAMES)
    parser.add_argument("--part", default="", help="A, B, C or D: fail if the game is of another part")
    parser.add_argument("--sides", default="", metavar="NAMES", help="sides with commas between; by default all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="seconds of a run, instead of the game's")
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="do not start a run that would end after so many minutes"
    )
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="also write contest.md and its pictures there")
    args = parser.parse_args()
    game, records = GAMES[args.game], Records(RECORDS)
    if args.part not in ("", game.part):
        sys.exit(f"{args.game} is of part {game.part}, not {args.part}")
    seconds, until = args.seconds or game.seconds, time.monotonic() + 60.0 * args.minutes
    failed: set[str] = set()

    def is_enough(result: Record) -> bool:
        return result.limit >= seconds or (game.score is not None and result.reached(game.score) is not None)

    for seed, side in records.missing(args.game, sides_of(args.game, args.sides), args.seeds, is_enough):
        if side in failed or time.monotonic() + seconds > until:
            continue
        try:
            result = run(args.game, side, seed, seconds)
            records.keep(result)
        except PeerUnavailable as error:
            failed.add(side)
            print(f"left out: {error}", flush=True)
            continue
        reached = result.rates() if game.score is None else result.reached(game.score)
        print(f"{side}, seed {seed}: {reached}; at the end {result.curve[-1:]}; {result.facts}", flush=True)
    if args.write:  # records of this run and of the former page
        runs = merged(page.read(args.write), records.all())
        page.write(args.write, runs, lambda aims: record(str(args.write), "contest", aims))
        print(f"written to {args.write}/contest.md")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
