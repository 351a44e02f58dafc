"""Peers in processes and environments of their own, whose sides take turns with memoire's as if in one process."""

import json
import os
import select
import subprocess
import sys
import tempfile
import tomllib
import venv
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VERSIONS = HERE / "versions.toml"
ROOT = Path(os.environ.get("MEMOIRE_PEERS", HERE.parent.parent / "build" / "peers"))
NAMES = {"cpprb": "cpprb", "sb3": "Stable-Baselines3", "torchrl": "TorchRL", "reverb": "Reverb", "ray": "Ray",
         "tlspyo": "tlspyo", "torchrl_ray": "TorchRL over Ray"}  # fmt: skip
"""Title of each peer in tables, by its name in --peers."""
ANSWER_TIMEOUT = 300.0
"""Seconds that a peer has for an answer, such as filling a memory or taking a turn."""


class PeerUnavailable(RuntimeError):
    """A peer cannot be installed here, does not start, or ends: the page has the reason in place of its rows."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{NAMES.get(name, name)}: {reason}")
        self.name = name


class Peer:
    """Process in a peer's environment, which creates sides by name and runs their turns."""

    def __init__(self, name: str, patience: float = ANSWER_TIMEOUT) -> None:
        self.name, self._patience = name, patience
        environment, self.version = environment_of(name)
        self.log = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        command = [environment / "bin" / "python", HERE / "child.py", f"with_{name}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        self.process = subprocess.Popen(command, **pipes, env=os.environ | QUIET | packages_beside(name))
        self.ask("start")

    def __str__(self) -> str:
        return f"{NAMES[self.name]} {self.version}"

    def side(self, make: str, *arguments: object, **settings: Any) -> "RemoteSide":
        """Create a side in the peer's process by its function `make`; the arguments are plain values of JSON."""
        return RemoteSide(self, int(self.ask("make", make, arguments)), **settings)

    def ask(self, *question: object) -> Any:
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        answered, *_ = select.select([self.process.stdout], [], [], self._patience)
        if answered and (line := self.process.stdout.readline()):
            return json.loads(line)
        if not answered:
            self.process.kill()
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()[-12:]
        self.close()
        ended = "its process ended" if answered else f"no answer within {self._patience:g} s"
        raise PeerUnavailable(self.name, "\n".join([f"{ended}; the last lines of its log:", *lines]))

    def close(self) -> None:
        """End the process, and so free its memory."""
        if self.process.stdin.closed:
            return
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()


class RemoteSide:
    """Side of a comparison that runs and is timed in the peer's process."""

    def __init__(self, peer: Peer, number: int, most: int | None = None) -> None:
        self.peer, self.number, self.most = peer, number, most

    def __call__(self) -> None:
        self.clock(1)

    def clock(self, count: int) -> float:
        """Return the seconds that the peer took for `count` calls."""
        return float(self.peer.ask("clock", self.number, count))

    def times(self) -> list[float]:
        """Return the seconds of each call of the newest turn, if the side records them."""
        return [float(each) for each in self.peer.ask("times", self.number)]


QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "RL_LOGGING_LEVEL": "WARNING", "CUDA_VISIBLE_DEVICES": ""}
"""Environment variables that silence peers, so that the last lines of a log show the error, and hide GPUs."""


def described(name: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the row in versions.toml of the environment of a peer."""
    with VERSIONS.open("rb") as file:
        return next(each for each in tomllib.load(file).items() if name in each[1]["sides"])


def packages_beside(name: str) -> dict[str, str]:
    """Return PYTHONPATH with the packages of the environment that `beside` names, which is created first; or {}."""
    other = described(name)[1].get("beside")
    if other is None:
        return {}
    (folder,) = environment_of(other)[0].glob("lib/python3.*/site-packages")
    return {"PYTHONPATH": str(folder)}


@cache
def environment_of(name: str) -> tuple[Path, str]:
    """Return the peer's environment and version; create the environment if it is missing or has other versions."""
    chosen, facts = described(name)
    packages = facts["packages"]
    environment, mark = ROOT / chosen, ROOT / chosen / "installed.json"
    if not (mark.exists() and json.loads(mark.read_text()) == packages):
        print(f"installing {', '.join(packages)} into {environment}", file=sys.stderr, flush=True)
        venv.create(environment, with_pip=True, clear=True)
        command = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps"] * facts.get("complete", False)
        done = subprocess.run([*command, *packages], check=False, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise PeerUnavailable(name, "pip cannot install it here: " + " ".join(lines or [done.stderr[-300:]]))
        mark.write_text(json.dumps(packages))
    title = NAMES.get(name, name).partition(" ")[0].lower()
    shared = described(facts["beside"])[1]["packages"] if "beside" in facts else []
    return environment, next((each.split("==")[1] for each in [*packages, *shared] if title in each.split("==")[0]), "")


class PeerGroup:
    """Peers of a benchmark, each started at its first use; unavailable peers are printed and reported on the page."""

    def __init__(self, wanted: str, patience: float = ANSWER_TIMEOUT) -> None:
        self._patience = patience
        self.names = [] if wanted == "none" else wanted.split(",")
        if unknown := set(self.names) - set(NAMES):
            sys.exit(
                f"unknown peer {', '.join(sorted(unknown))}: --peers takes {', '.join(NAMES)}, and none for no peer"
            )
        self.running: dict[str, Peer] = {}
        self.absent: dict[str, str] = {}

    def sides(self, makes: dict[str, tuple[Any, ...]], most: int | None = None) -> dict[str, RemoteSide]:
        """Return the sides of the available peers, by their titles in a table.

        Args:
            makes: Function that creates the side, and its arguments, by the peer's name.
            most: Number of calls of a turn; None lets the measurement choose it.
        """
        sides = {}
        for name, (make, *arguments) in makes.items():
            if name not in self.names or name in self.absent:
                continue
            try:
                if name not in self.running:
                    self.running[name] = Peer(name, self._patience)
                sides[str(self.running[name])] = self.running[name].side(make, *arguments, most=most)
            except PeerUnavailable as error:
                self.leave_out(error)
        return sides

    def leave_out(self, error: PeerUnavailable) -> None:
        """Continue without a peer, and print the reason."""
        self.running.pop(error.name, None)
        self.absent[error.name] = str(error)
        print(f"left out: {error}", flush=True)

    def stop(self) -> None:
        """End the peers' processes, so that the next comparison begins with free memory."""
        for peer in self.running.values():
            peer.close()
        self.running.clear()

    def facts(self) -> list[str]:
        """Return a paragraph for the page for each peer that was left out."""
        return [f"Left out: {reason}" for reason in self.absent.values()]
