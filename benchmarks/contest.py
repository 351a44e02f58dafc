"""How many seconds until a task is learned, with memoire and with what one would use instead, on the same machine?

    python benchmarks/contest.py --game breakout --seeds 3 --write docs/benchmarks
    python benchmarks/contest.py --game breakout --sides memoire,sb3 --seeds 1 --minutes 8

Sides take turns: all of them with seed 0, then all with seed 1 in the other order. Each run leaves a record in
build/contest, and what has one is not run again: a contest that was cut off goes on. If `--seconds` are more than
before, only runs that did not reach the score are run again. Torch is looked for where MEMOIRE_TORCH says.
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
GRACE = 60.0
"""Seconds that a side has to end by itself when its time is up."""
EVALUATION = 600.0
"""Seconds that the evaluation of one run may take."""
LOOK = 2.0
"""Seconds between two looks at a side's memory, where only rates are compared."""
SHARED = ("gymnasium", "mujoco", "minatar", "torch")
"""Distributions whose versions the page names: they are the same for all sides."""


@dataclass(frozen=True)
class Side:
    """Who takes part: programs of benchmarks/contestants, and what they are told."""

    environment: str
    """Of peers/versions.toml."""
    distribution: str = ""
    """Whose version is shown."""
    program: str = ""
    """What the program's name begins with; "" is the side's key."""
    options: dict[str, str] = field(default_factory=dict)
    prepare: str = ""
    """A program that is run once before."""
    algorithms: tuple[str, ...] = ("dqn", "sac", "ppo")
    """Those that it learns by."""
    on_gpu: bool = True
    """Whether it can learn on a GPU."""


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
    """Those that have a program for the game, or those of them that are wanted, with commas between."""
    algorithm = GAMES[game].algorithm
    there = [key for key, side in SIDES.items() if algorithm in side.algorithms]
    there = [key for key in there if SIDES[key].on_gpu or not GAMES[game].on_gpu]
    if GAMES[game].score is None:  # how well it learns is not looked at
        there = [key for key in there if not SIDES[key].options]
    if unknown := set(filter(None, wanted.split(","))) - set(there):
        sys.exit(f"{game} has no side {', '.join(sorted(unknown))}: --sides takes {', '.join(there)}")
    return [key for key in there if not wanted or key in wanted.split(",")]


def python_of(environment: str) -> Path:
    """The interpreter of an environment, which finds torch, and memoire's this checkout."""
    made, _ = environment_of(environment)
    paths = [os.environ.get("MEMOIRE_TORCH", str(HERE.parent / "build" / "torch"))]
    paths += [str(HERE.parent)] * (environment == "contest-memoire")
    for packages in made.glob("lib/python*/site-packages"):
        (packages / "contest.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    return made / "bin" / "python"


def packages_of(environment: str) -> list[Path]:
    """Where the packages of an environment are; none of none."""
    return list(environment_of(environment)[0].glob("lib/python*/site-packages")) if environment else []


def versions(python: Path, names: list[str], paths: dict[str, str]) -> dict[str, str]:
    """Of distributions in an environment, and where the environment variables `paths` say."""
    asked = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    done = subprocess.run([python, "-c", asked, *names], check=True, stdout=subprocess.PIPE, text=True, env=paths)
    return dict(zip(names, done.stdout.split(), strict=True))


def run(game: str, key: str, seed: int, seconds: float, where: Path = RECORDS) -> Record:
    """Let a side learn, in a folder below `where`, then play with its networks. Raises PeerUnavailable: it failed."""
    side, task, folder = SIDES[key], GAMES[game], where / game / f"{key}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    python, player = python_of(side.environment), python_of("contest-plain")
    told: dict[str, Any] = {"game": game, "seed": seed, "seconds": seconds, "folder": str(folder)}
    programs = os.pathsep.join(map(str, [PROGRAMS, *packages_of(task.packages)]))
    quiet = {name: value for name, value in QUIET.items() if name != "CUDA_VISIBLE_DEVICES" or not task.on_gpu}
    paths, sizes = os.environ | quiet | {"OMP_NUM_THREADS": "1", "PYTHONPATH": programs}, [0]
    look = (lambda process: sizes.append(memory_of(process))) if task.score is None else None
    with (folder / "log.txt").open("wb") as log:
        status = ended([python, PROGRAMS / side.prepare], GRACE * 5, log, paths) if side.prepare else 0
        program = PROGRAMS / f"{side.program or key}_side.py"
        told |= {"options": side.options, "began": time.monotonic()}
        status = status or ended([python, program], seconds + GRACE, log, paths | {"CONTEST": json.dumps(told)}, look)
        if task.score is not None:
            status = status or ended([player, PROGRAMS / "evaluate.py", game, folder], EVALUATION, log, paths)
    if status:
        said = (folder / "log.txt").read_text(errors="replace").strip().splitlines()[-12:]
        raise PeerUnavailable(key, "\n".join([f"it ended with status {status}; its last lines:", *said]))
    path = folder / "facts.json"
    facts = json.loads(path.read_text()) if path.exists() else {}
    beside = [each.partition("==")[0] for each in described(task.packages)[1]["packages"]] if task.packages else []
    found = versions(python, [*SHARED, *beside, *filter(None, [side.distribution])], paths)
    facts |= {"machine": re.sub(r", load [\d.]+", "", machine()), "version": found.get(side.distribution, "")}
    facts |= {"memory": max(sizes)} if look else {}
    facts["shared"] = ", ".join(f"{name} {found[name]}" for name in SHARED)
    if beside:
        named = [f"{name} {found[name]}" for name in beside]
        facts["packages"] = ", ".join([*named, facts["shared"], facts.pop("gpu")] if "gpu" in facts else named)
    curve = sorted(json.loads((folder / "curve.json").read_text()).values())
    return Record.of({"game": game, "side": key, "seed": seed, "limit": seconds, "curve": curve, "facts": facts})


def ended(command: list[Any], patience: float, log: Any, paths: dict[str, str], look: Any = None) -> int:
    """The exit status of a program, -9 if its patience ended. What it has started is killed with it.

    Args:
        look: Called with the number of its process every other second.
    """
    kind = {"stdout": log, "stderr": subprocess.STDOUT, "env": paths, "start_new_session": True}
    with subprocess.Popen(command, **kind) as process:
        until = time.monotonic() + patience
        try:
            while (left := until - time.monotonic()) > 0.0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(min(left, LOOK) if look else left)
                if look:
                    look(process.pid)
            return -9
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--game", default="breakout", choices=GAMES)
    parser.add_argument("--part", default="", help="A, B, C or D: the game has to be of it")
    parser.add_argument("--sides", default="", metavar="NAMES", help="with commas between; all, if it is left out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="of a run, in place of the game's")
    parser.add_argument("--minutes", type=float, default=40.0, help="no run is begun that would end later")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="also write contest.md and its pictures there")
    given = parser.parse_args()
    game, records = GAMES[given.game], Records(RECORDS)
    if given.part not in ("", game.part):
        sys.exit(f"{given.game} is of part {game.part}, not {given.part}")
    seconds, until = given.seconds or game.seconds, time.monotonic() + 60.0 * given.minutes
    failed: set[str] = set()

    def is_enough(found: Record) -> bool:
        return found.limit >= seconds or (game.score is not None and found.reached(game.score) is not None)

    for seed, side in records.missing(given.game, sides_of(given.game, given.sides), given.seeds, is_enough):
        if side in failed or time.monotonic() + seconds > until:
            continue
        try:
            found = run(given.game, side, seed, seconds)
            records.keep(found)
        except PeerUnavailable as error:
            failed.add(side)
            print(f"left out: {error}", flush=True)
            continue
        reached = found.rates() if game.score is None else found.reached(game.score)
        print(f"{side}, seed {seed}: {reached}; at the end {found.curve[-1:]}; {found.facts}", flush=True)
    if given.write:  # what is recorded here, and what the page was written from before
        found = merged(page.read(given.write), records.all())
        page.write(given.write, found, lambda aims: record(str(given.write), "contest", aims))
        print(f"written to {given.write}/contest.md")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
