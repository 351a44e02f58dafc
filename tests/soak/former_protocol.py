"""Are actors of the former protocol told why they are refused, and are their counts kept, when servers are upgraded?

$MEMOIRE_FORMER is a Python that has a memoire of the former protocol. Two servers, a proxy and actors of it work. Then
servers and proxy are replaced by those of this version, at the same addresses, and the actors stay. The servers refuse
the former state folders by name, and begin with new ones. Every actor has to end by itself, and to say which versions
meet, what to do, and how many steps were not acknowledged. `memoire doctor` of either version has to name the versions,
too. In the end the former servers open their folders again: all steps that they had counted have to be there.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from _kit import CANNOT, end, folder, say, table

from history import ports
from memoire.wire.messages import VERSION

ACTORS = 3
SCHEMA = '{"columns": [["obs", "<f4", [4], "state"], ["action", "<i8", [], "plain"], ["reward", "<f4", [], "reward"]]}'
SETTINGS = [f"--set={setting}" for setting in ("multi_step=3", "samples_per_insert=32", "cache_size=1024")]
REASON = "version {} of the protocol; this node speaks {}. Upgrade the older of the two"
UNTOLD = re.compile(r"ends before (\d+) steps")
SECONDS = 90.0
"""Within which whatever is waited for has to be there: much longer than it takes."""


class Program:
    """A command of memoire, of one version; all that it says is in a file."""

    def __init__(self, python: str, log: Path, *words: str) -> None:
        self.log = log
        with log.open("a", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                [python, "-u", "-m", *words], stdout=output, stderr=subprocess.STDOUT, cwd=log.parent
            )

    def end(self) -> int:
        """SIGTERM, then the exit status."""
        self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        """The exit status; a process that does not end is killed."""
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    @property
    def text(self) -> str:
        """All that it has said."""
        return self.log.read_text(encoding="utf-8")


class Upgrade:
    """The cluster of two versions, one after the other, and what is to be told of it."""

    def __init__(self, former: str, place: Path) -> None:
        self.former, self.place = former, place
        self.endpoints = {name: f"tcp://127.0.0.1:{ports.block()}" for name in ("server-0", "server-1", "proxy")}
        self.running: dict[str, Program] = {}
        self.rows: list[tuple[str, object]] = []
        self.violations: list[str] = []

    def check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.violations.append(otherwise)

    def start(self, python: str, name: str, state: str) -> Program:
        """A server or the proxy."""
        words = ["memoire", name.partition("-")[0], "--endpoint", self.endpoints[name], "--http", "off"]
        if name == "proxy":
            words += [self.endpoints["server-0"], self.endpoints["server-1"]]
        else:
            words += ["--name", name, "--schema", SCHEMA, "--state-dir", str(self.place / state / name), *SETTINGS]
        log = self.place / f"{name}.{state}.log"
        self.running[name] = made = Program(python, log, *words)
        return made

    def start_all(self, python: str, state: str) -> None:
        """Both servers and the proxy, which listen when this returns."""
        (self.place / state).mkdir(exist_ok=True)
        for name in self.endpoints:
            made = self.start(python, name, state)
            listens = f"memoire {name.partition('-')[0]}: "
            until(lambda made=made, listens=listens: listens in made.text, f"{listens} from {name}")

    def end_all(self) -> None:
        """Servers and proxy; each with status 0."""
        for name in self.endpoints:
            status = self.running[name].end()
            self.check(status == 0, f"{name} ended with {status}: {self.running[name].text[-500:]}")

    def told(self, python: str, *words: str) -> str:
        """What a command says."""
        command = [python, "-m", "memoire", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.place, timeout=SECONDS, check=False)
        return done.stdout + done.stderr

    def totals(self, python: str) -> dict[str, int]:
        """Of both servers."""
        said = self.told(python, "totals", "--json", self.endpoints["server-0"], self.endpoints["server-1"])
        return dict(json.loads(said)["totals"])

    # ------------------------------------------------------------------------------------------------ the trial

    def play(self) -> None:
        """All of it."""
        self.start_all(self.former, "former")
        actors = [
            Program(self.former, self.place / f"actor-{number}.log", "memoire.rl.demo.actor", self.endpoints["proxy"])
            for number in range(ACTORS)
        ]
        for number, actor in enumerate(actors):
            self.running[f"actor-{number}"] = actor
        until(lambda: self.totals(self.former)["accepted_caches"] >= 10 * ACTORS, "caches of all actors")
        counted = self.totals(self.former)["steps"]
        self.end_all()
        self.refuse_folders()
        self.start_all(sys.executable, "new")
        reason = REASON.format(1, VERSION)
        self.await_actors(actors, reason)
        self.ask_doctors(reason)
        self.check(self.totals(sys.executable)["clients"] == 0, "a server counts something of a refused client")
        self.end_all()
        self.read_again(counted)

    def refuse_folders(self) -> None:
        """Today's server says why it cannot use a former folder, and leaves it as it is."""
        database = self.place / "former" / "server-0" / "state.db"
        before = database.read_bytes()
        refused = self.start(sys.executable, "server-0", "former")
        status = refused.wait()
        said = refused.text
        self.check(status != 0, "a former state folder was opened")
        self.check("was written in form" in said and "Use the version of memoire that wrote it" in said, said[-500:])
        self.check(database.read_bytes() == before, "a former state folder was changed")
        self.rows.append(("former state folders", "refused by name, unchanged"))

    def ask_doctors(self, reason: str) -> None:
        """Each version's doctor, asked about a proxy of the new one, and ours about the former one."""
        said = self.told(self.former, "doctor", self.endpoints["proxy"])
        self.check(reason in said and "Give both sides the same release" in said, f"the former doctor: {said}")
        self.running["proxy"].end()
        self.start(self.former, "proxy", "former")
        theirs = REASON.format(1, VERSION)
        until(lambda: theirs in self.told(sys.executable, "doctor", self.endpoints["proxy"]), "the doctor's word")
        self.running["proxy"].end()
        self.start(sys.executable, "proxy", "new")
        self.rows.append(("doctors of both versions", "name the version, and what to do"))

    def await_actors(self, actors: list[Program], reason: str) -> None:
        """They end by themselves, and say why, and what was not acknowledged."""
        untold = []
        for number, actor in enumerate(actors):
            status, text = actor.wait(), actor.text
            last = text.strip().rpartition("\n")[2]
            self.check(status == 1 and reason in last, f"actor {number} ended with {status}: {text[-500:]}")
            found = UNTOLD.search(text)
            self.check(found is not None, f"actor {number} does not say what was not acknowledged: {text[-500:]}")
            untold.append(int(found[1]) if found else 0)
        self.rows.append(("actors that ended, and said which versions meet and what to do", len(actors)))
        self.rows.append(("steps that they recorded meanwhile, and said that they are not counted", f"{sum(untold):,}"))

    def read_again(self, counted: int) -> None:
        """The former servers still have what they acknowledged."""
        for name in ("server-0", "server-1"):
            self.start(self.former, name, "former")
        found: list[int] = []
        until(lambda: found.append(self.totals(self.former)["steps"]) is None, "totals of the former servers")
        self.rows.append(("steps that the former servers had counted", f"{counted:,}"))
        self.rows.append(("steps in their state folders, read again", f"{found[0]:,}"))
        self.check(found[0] >= counted, f"{found[0]} steps are in the former folders, {counted} were counted")

    def close(self) -> None:
        for program in self.running.values():
            program.process.kill()
            program.process.wait()


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that a process brings about."""
    deadline = time.monotonic() + SECONDS
    while True:
        with contextlib.suppress(ValueError):  # nobody answers yet
            if condition():
                return
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {SECONDS:g} s: {what}")
        time.sleep(0.2)


def why_not(former: str) -> str:
    """Why it cannot run here; "" if it can."""
    if not former:
        return "MEMOIRE_FORMER is not set; it is a Python that has a memoire of the former protocol"
    asked = [former, "-c", "from memoire.wire.messages import VERSION; print(VERSION)"]
    done = subprocess.run(asked, capture_output=True, text=True, cwd="/", check=False)
    if done.stdout.strip() != "1":
        return f"{former} has no memoire of protocol 1: {(done.stdout + done.stderr).strip()[-300:]}"
    return ""


def main() -> int:
    former = os.environ.get("MEMOIRE_FORMER", "")
    if why := why_not(former):
        print(f"It cannot run here: {why}.")
        return CANNOT
    with folder() as place:
        upgrade = Upgrade(former, place)
        try:
            upgrade.play()
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            upgrade.violations.append(str(error))
        finally:
            upgrade.close()
        say(*(f"{path.name}: {path.read_text(encoding='utf-8')[-800:]}\n" for path in sorted(place.glob("actor*.log"))))
    print(table(["from protocol 1", ""], upgrade.rows))
    return end(upgrade.violations)


if __name__ == "__main__":
    sys.exit(main())
