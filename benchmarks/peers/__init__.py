"""Peers in processes and environments of their own, whose sides take turns with memoire's as if they were here."""

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
"""By the side what a reader calls it."""
PATIENCE = 300.0
"""Seconds for one answer: a memory is filled, a turn is taken."""


class PeerUnavailable(RuntimeError):
    """A peer cannot be installed here, does not start or ends: its rows are left out, and the page says why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{NAMES.get(name, name)}: {reason}")
        self.name = name


class Peer:
    """A process in a peer's environment: it makes sides by name and takes their turns."""

    def __init__(self, name: str, patience: float = PATIENCE) -> None:
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
        """What the peer's function `make` returns there for these arguments, which are plain values."""
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
        said = self.log.read().decode(errors="replace").strip().splitlines()[-12:]
        self.close()
        ended = "it ended" if answered else f"no answer within {self._patience:g} s"
        raise PeerUnavailable(self.name, "\n".join([f"{ended}; its last lines:", *said]))

    def close(self) -> None:
        """End the process, and with it all that it holds."""
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
    """A side of a comparison that runs, and is timed, in the peer's process."""

    def __init__(self, peer: Peer, number: int, most: int | None = None) -> None:
        self.peer, self.number, self.most = peer, number, most

    def __call__(self) -> None:
        self.clock(1)

    def clock(self, count: int) -> float:
        """Seconds that the peer took for `count` calls."""
        return float(self.peer.ask("clock", self.number, count))

    def times(self) -> list[float]:
        """Seconds of each call of the newest turn, of a side that keeps them."""
        return [float(each) for each in self.peer.ask("times", self.number)]


QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "RL_LOGGING_LEVEL": "WARNING", "CUDA_VISIBLE_DEVICES": ""}
"""Peers that greet would fill the log in which an error is looked for."""


def described(name: str) -> tuple[str, dict[str, Any]]:
    """A peer's environment as versions.toml names and describes it."""
    with VERSIONS.open("rb") as file:
        return next(each for each in tomllib.load(file).items() if name in each[1]["sides"])


def packages_beside(name: str) -> dict[str, str]:
    """Where an environment finds what it shares with another peer's, which is made first."""
    other = described(name)[1].get("beside")
    if other is None:
        return {}
    (folder,) = environment_of(other)[0].glob("lib/python3.*/site-packages")
    return {"PYTHONPATH": str(folder)}


@cache
def environment_of(name: str) -> tuple[Path, str]:
    """The peer's environment, made now where it is not there or of other versions; and the peer's version."""
    chosen, facts = described(name)
    packages = facts["packages"]
    made, mark = ROOT / chosen, ROOT / chosen / "installed.json"
    if not (mark.exists() and json.loads(mark.read_text()) == packages):
        print(f"installing {', '.join(packages)} into {made}", file=sys.stderr, flush=True)
        venv.create(made, with_pip=True, clear=True)
        command = [made / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps"] * facts.get("complete", False)
        done = subprocess.run([*command, *packages], check=False, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise PeerUnavailable(name, "it cannot be installed here: " + " ".join(said or [done.stderr[-300:]]))
        mark.write_text(json.dumps(packages))
    title = NAMES.get(name, name).partition(" ")[0].lower()
    shared = described(facts["beside"])[1]["packages"] if "beside" in facts else []
    return made, next((each.split("==")[1] for each in [*packages, *shared] if title in each.split("==")[0]), "")


class Company:
    """The peers that a benchmark asks for, each started when it is first needed; those that cannot be are told of."""

    def __init__(self, wanted: str, patience: float = PATIENCE) -> None:
        self._patience = patience
        self.names = [] if wanted == "none" else wanted.split(",")
        if unknown := set(self.names) - set(NAMES):
            sys.exit(f"there is no peer {', '.join(sorted(unknown))}: --peers takes {', '.join(NAMES)}, or none")
        self.running: dict[str, Peer] = {}
        self.absent: dict[str, str] = {}

    def sides(self, makes: dict[str, tuple[Any, ...]], most: int | None = None) -> dict[str, RemoteSide]:
        """By what a peer is called in a table its side.

        Args:
            makes: By the peer's name the function that makes its side, and that function's arguments.
            most: The calls of a turn, where they are not for the clock to find.
        """
        found = {}
        for name, (make, *arguments) in makes.items():
            if name not in self.names or name in self.absent:
                continue
            try:
                if name not in self.running:
                    self.running[name] = Peer(name, self._patience)
                found[str(self.running[name])] = self.running[name].side(make, *arguments, most=most)
            except PeerUnavailable as error:
                self.leave_out(error)
        return found

    def leave_out(self, error: PeerUnavailable) -> None:
        """Go on without a peer, and tell."""
        self.running.pop(error.name, None)
        self.absent[error.name] = str(error)
        print(f"left out: {error}", flush=True)

    def part(self) -> None:
        """End their processes: what comes next begins with free memory."""
        for peer in self.running.values():
            peer.close()
        self.running.clear()

    def facts(self) -> list[str]:
        """Who is missing, for the page."""
        return [f"Left out: {reason}" for reason in self.absent.values()]
