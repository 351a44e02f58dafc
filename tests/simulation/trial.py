"""A trial of tests/history in a simulated world: the same actors, learner, faults and checks, in one thread.

python -m simulation.trial SEED [name=value ...]      one trial by hand, with its faults
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, TextIO
from unittest import mock

from history import checks
from history.players import LAST, PLAYS, ask_totals, learn
from history.trial import SCHEMA, Fault, faults, figures, kept_in, names
from memoire.accounting.packing import StoredAccounts
from memoire.errors import InsecureWarning
from memoire.limits import Limits
from memoire.nodes.roles import _server_report
from memoire.proxy.proxy import Proxy
from memoire.reader.reader import Reader
from memoire.replay import files as file_lock
from memoire.server.server import Server
from statekit import folder_in_memory

from . import network, prompts
from .installed import installed
from .jobs import Playing
from .prompts import Prompting
from .rarely import Rarely
from .world import Process, Stuck, World

PORT: Final = 5560
LOOK: Final = 5.0
"""Seconds between two checks of the TD errors that a server received."""
END: Final = 120.0
"""Seconds of the world's time for all processes to deliver and leave after the last fault."""
TERM: Final = 20.0
"""Seconds for a node to end after SIGTERM."""
HOSTS: Final = {"server": 1, "proxy": 2, "actor": 3, "learner": 4, "giver": 5}
CALM: Final = {
    name: type(play.__name__, (play,), {"limits": Limits.of(update_every=2.0)}) for name, play in PLAYS.items()
}
"""Actors with the update interval of users."""


@dataclasses.dataclass(frozen=True)
class Settings:
    seed: int
    seconds: float = 120.0
    servers: int = 2
    proxies: int = 2
    actors: int = 2
    clients: int = 2
    rate: float = 0.5
    kills: int = 6
    stops: int = 3
    terms: int = 2
    cuts: int = 2
    resets: int = 2
    one_way: int = 2
    slow: int = 2
    full: int = 2
    eio: int = 1
    power: int = 2
    pause: float = 5.0
    """Seconds between two draws or takes of the learner; each is some twenty messages."""
    runs: int = 1
    storage: str = "caches"
    preempt: float = 0.02
    rarely: float = 0.1
    """Probability of each tight limit in `rarely`."""
    stop_at: float = 0.0
    """Seconds after which a debugger starts; 0 for never."""
    plant: str = ""

    @property
    def wanted(self) -> dict[str, int]:
        ways = {"in": (self.one_way + 1) // 2, "out": self.one_way // 2}
        disks = {} if self.storage == "jobs" else {"full": self.full, "eio": self.eio, "power": self.power}
        return {
            "kill": self.kills, "stop": self.stops, "term": self.terms, "cut": self.cuts, "reset": self.resets,
            "slow": self.slow, **disks, **ways,
        }  # fmt: skip


@dataclasses.dataclass
class Outcome:
    seed: int
    violations: list[str]
    digest: str
    virtual: float
    seconds: float
    turns: int
    figures: dict[str, Any]
    faults: list[Fault]
    rare: str

    def __str__(self) -> str:
        facts = (
            f"seed {self.seed}: {self.virtual:.0f} s in {self.seconds:.2f} s, {self.turns} turns, {self.digest[:16]}"
        )
        figures = ", ".join(f"{name} {value}" for name, value in self.figures.items())
        return "\n".join([facts, figures, f"rare: {self.rare}", *self.violations[:20]])


class Line:
    """Stand-in for the line on which a learner waits for its order to finish."""

    def __init__(self, world: World) -> None:
        self._world, self.stopping, self.is_over = world, False, False

    def wait(self, seconds: float) -> bool:
        """Wait so long; return False once the learner is to finish."""
        self._world.park(seconds)
        return not self.is_over


class Trial:
    def __init__(
        self, settings: Settings, folder: Path, chosen: list[Fault] | None = None, trace: TextIO | None = None
    ) -> None:
        self.settings, self.folder = settings, folder
        self.rarely = Rarely(settings.seed, settings.rarely)
        self.world = World(settings.seed, preempt=self.rarely.preempt or settings.preempt)
        self.world.on_error = self._failed
        if trace is not None:
            self.world.log = lambda line: trace.write(line + "\n")
        self.net = network.Network(self.world)
        self.events: list[dict[str, Any]] = []
        self.running: dict[str, Process] = {}
        self.nodes: dict[str, Any] = {}  # servers and proxies, by process
        self.lives: Counter[str] = Counter()
        self.ending: list[Process] = []  # nodes that were asked to end
        self.over: set[str] = set()  # processes that have ended by themselves
        self.final: dict[str, dict[str, Any]] = {}
        """Last report of each server that was asked to end."""
        self.errors: list[str] = []
        self.runs = [f"trial-{number}" for number in range(1, settings.runs + 1)]
        is_apart = settings.storage == "jobs"  # an agent and its observers need no server
        nodes = {} if is_apart else {"server": settings.servers, "proxy": settings.proxies}
        self.names = {"server": [], "proxy": []} | names(**nodes, actor=settings.actors)
        self.line = Line(self.world)
        play_class = {"prompts": Prompting, "jobs": Playing}.get(settings.storage)
        self.play: Prompting | Playing | None = None if play_class is None else play_class(self)
        """Work of actors and learner, if it is not that of tests/history."""
        targets = [name for names in self.names.values() for name in names]
        targets += ["learner-0"] if self.play else []
        self.faults = faults(settings.seed, settings.seconds, targets, settings.wanted) if chosen is None else chosen

    @property
    def users(self) -> list[str]:
        """Processes that leave at the end of a trial."""
        return [*self.names["actor"], "learner-0", *(self.play.others if self.play else ())]

    def host(self, name: str) -> str:
        kind, _, number = name.partition("-")
        return f"10.0.{HOSTS[kind]}.{int(number) + 1}"

    def endpoint(self, name: str) -> str:
        return f"tcp://{self.host(name)}:{PORT}"

    @property
    def fronts(self) -> list[str]:
        """Endpoints that actors and learner connect to."""
        return [self.endpoint(name) for name in self.names["proxy"] or self.names["server"]]

    def record(self, by: str, life: Process | None = None) -> Callable[..., float]:
        """Return a function that records events of a process until its end."""

        def write(do: str, **facts: Any) -> float:
            now = self.world.now
            if life is None or life.is_alive:
                self.events.append({"t": now, "by": by, "do": do, **facts})
                self.world.note(by, do)
            return now

        return write

    def start(self, name: str) -> Process:
        """Start a process, with its former disk."""
        self.lives[name] += 1
        process = Process(name, self.host(name), self.lives[name])
        process.at_kill.append(lambda: self.net.killed(process))
        self.running[name] = process
        self.over.discard(name)
        self.record("nemesis")("started", target=name, life=process.life)
        begin = getattr(self, f"_{name.partition('-')[0]}")
        self.world.spawn(process, "main", lambda: begin(name, process))
        return process

    def _server(self, name: str, process: Process) -> None:
        options: dict[str, Any] = {
            "caches": {"schema": SCHEMA, "cache_size": 16, "priority_exponent": 0.0},
            "rollouts": {"schema": SCHEMA, "storage": "rollouts", "rollout_length": 8, "capacity": 4096},
            "prompts": {"tables": {"t": prompts.table()}},
        }[self.settings.storage]
        self.nodes[name] = server = Server(
            self.endpoint(name),
            name=name,
            run=self.runs[0],
            state=Path(name),
            seed=self.settings.seed,
            limits=self.rarely.limits,
            **options,
        )
        while self.nodes.get(name) is server:
            self._look(name, server)
            self.world.park(LOOK)

    def _look(self, name: str, server: Server) -> None:
        """Record an error unless each TD error has exactly one state, for each owner and in total."""
        stats = server.stats()
        counters = (stats.feedback, *stats.feedback_owners.values(), *(each.feedback for each in server.clients()))
        self.errors += [f"feedback: {name} says {counts}" for counts in counters if not counts.is_balanced][:1]

    def _proxy(self, name: str, process: Process) -> None:
        self.nodes[name] = Proxy(self.endpoint(name), [self.endpoint(server) for server in self.names["server"]])

    def _actor(self, name: str, process: Process) -> None:
        record = self.record(name, process)
        left = [self.settings.clients]

        def play(number: int) -> None:
            seed = f"{self.settings.seed}/{name}/{process.life}/{number}"
            try:
                if self.play:
                    self.play.work(name, number, process)
                    return
                endpoint = self.fronts[(number + process.life) % len(self.fronts)]
                event = threading.Event()
                played = CALM[self.settings.storage](record, endpoint, seed, self.settings.rate, event)  # type: ignore[arg-type]
                played.updates_last = not self.rarely.leaves_at_once()
                played.run()
            except Exception as error:  # noqa: BLE001
                record("failed", error=repr(error))
            finally:
                left[0] -= 1
                if not left[0]:
                    self.over.add(name)

        for number in range(self.settings.clients):
            self.world.spawn(process, f"client-{number}", lambda number=number: play(number))

    def _giver(self, name: str, process: Process) -> None:
        assert isinstance(self.play, Prompting)
        self.play.give(name, process)

    def _learner(self, name: str, process: Process) -> None:
        if self.play:
            self.play.lead(name, process)
            return
        every = self.settings.seconds / self.settings.runs
        with Reader([self.fronts[0]], timeout=LAST, seed=0, limits=Limits()) as reader:
            record: Any = self.record(name, process)
            learn(self.line, reader, record, self.runs[1:], every, self.settings.storage, self.settings.pause)
        self.over.add(name)

    def run(self) -> Outcome:
        began = time.process_time()
        # Servers report paths of state folders, which must not depend on the trial's folder.
        with warnings.catch_warnings(), installed(self.world, self.net, self.rarely), chdir(self.folder):
            warnings.simplefilter("ignore", InsecureWarning)
            try:
                self._run()
            except Stuck as error:
                self.errors.append(f"stuck: {error}")
            finally:
                for process in self.running.values():
                    if process.is_alive:
                        self.world.kill(process)
                digest = self.world.digest
                kept_at = self.folder / "kept"  # a killed process cleans nothing up; the next must find no file
                kept_at.mkdir()
                for server in self.names["server"]:
                    (self.folder / server).rename(kept_at / server)
                (nowhere := self.folder / "nowhere").mkdir()
                with chdir(nowhere):
                    self.world.end()
        violations = [
            *self.errors,
            *(f"spins: {name} polls for what it never takes" for name in sorted(self.world.spinning)),
        ]
        with as_it_is():
            kept = kept_in(kept_at, self.names["server"], self.runs, self.final)
        events = json.loads(json.dumps(self.events))
        violations += checks.check(events, kept)
        if self.play:
            violations += self.play.violations()
        return Outcome(
            self.settings.seed, violations, digest, self.world.now - 1000.0, time.process_time() - began,
            self.world.turns, self.play.figures_of(events) if self.play else figures(events, kept), self.faults,
            str(self.rarely),
        )  # fmt: skip

    def _run(self) -> None:
        for kind in ("server", "proxy"):
            for name in self.names[kind]:
                self.start(name)
            self._await(lambda kind=kind: all(name in self.nodes for name in self.names[kind]))
        for name in self.users:
            self.start(name)
        began = self.world.now
        if self.settings.stop_at:
            self.world.at(began + self.settings.stop_at, breakpoint)
        for fault in self.faults:
            self.world.at(began + fault.at, lambda fault=fault: self._strike(fault))
            self.world.at(began + fault.until, lambda fault=fault: self._relieve(fault))
        end = max([began + self.settings.seconds, *(began + fault.until for fault in self.faults)])
        self._await(lambda: self.world.now >= end + 0.01, end + 1.0)
        self._heal()
        self._finish()

    def _await(self, until: Callable[[], bool], most: float = 60.0) -> None:
        self.world.run(until, most=most)

    def _strike(self, fault: Fault) -> None:
        name, say = fault.target, self.record("nemesis")
        process = self.running[name]
        match fault.kind:
            case "kill":
                self._kill(name)
            case "stop":
                say("stopped", target=name, life=process.life)
                process.is_stopped = True
            case "term":
                self._term(name)
            case "cut" | "in" | "out":
                say("cut", target=name, how=fault.kind)
                self.net.isolate(process.host, self._hosts(name), "both" if fault.kind == "cut" else fault.kind)
            case "reset":
                self.net.reset(process.host)
            case "slow":
                self.net.slow = 0.3
            case "full" | "eio":
                process.disk = fault.kind
            case "power":
                process.disk, process.on_failure = "power", lambda: self._kill(name)

    def _kill(self, name: str) -> None:
        process = self.running[name]
        self.record("nemesis")("killed", target=name, life=process.life)
        self.nodes.pop(name, None)
        self.world.kill(process)

    def _hosts(self, name: str) -> list[str]:
        processes = {each for names in self.names.values() for each in names}.union(self.users)
        return [self.host(each) for each in sorted(processes) if each != name]

    def _relieve(self, fault: Fault) -> None:
        name, process = fault.target, self.running[fault.target]
        match fault.kind:
            case "kill":
                self.start(name)
            case "term":
                if not process.is_alive:
                    self.start(name)
            case "stop":
                process.is_stopped = False
                since = self.world.now - fault.seconds
                self.record("nemesis")("continued", target=name, since=since)
            case "cut" | "in" | "out":
                self.net.heal(process.host)
                self.record("nemesis")("mended", target=name)
            case "slow":
                self.net.slow = 0.0
            case "full":
                process.disk = ""
            case "eio":  # the server acknowledges nothing until it starts again
                self._kill(name)
                self.start(name)
            case "power":
                if process.is_alive:  # the process wrote nothing meanwhile
                    self._kill(name)
                self.start(name)

    def _term(self, name: str) -> None:
        """Ask a node to end: the node closes, and its process ends. Actors are killed instead."""
        process, node, began = self.running[name], self.nodes.pop(name, None), self.world.now
        if node is None:  # SIGTERM kills a process that has not started its node yet
            self.record("nemesis")("killed", target=name, life=process.life)
            self.world.kill(process)
            return

        def end() -> None:
            node.close(TERM - 5.0)
            if isinstance(node, Server):
                self._look(name, node)
                self.final[name] = _server_report(node)
            took = self.world.now - began
            self.record("nemesis")("ended", target=name, life=process.life, status=0, took=took, grace=TERM, tail=[])
            self.world.after(0.0, lambda: self.world.kill(process))

        self.ending.append(process)
        self.world.spawn(process, "term", end)

    def _heal(self) -> None:
        self.net.cut.clear()
        self._await(lambda: not any(process.is_alive for process in self.ending), TERM + 5)
        for name in [*self.names["server"], *self.names["proxy"]]:
            self.net.heal(self.host(name))
            if not self.running[name].is_alive:
                self.start(name)
        nodes = [*self.names["server"], *self.names["proxy"]]
        self._await(lambda: all(name in self.nodes for name in nodes))
        self.record("nemesis")("healed")

    def _finish(self) -> None:
        self.line.is_over = True
        leaving = self.users
        try:
            self._await(lambda: all(name in self.over for name in leaving), END)
        except Stuck:
            for name in leaving:
                if name not in self.over:
                    what = f"did not leave within {END:g} s after the end ({self.world.waiting()})"
                    self.record("nemesis")("late", target=name, what=what)
        if not self.play:
            self._ask_totals()
        for kind in ("proxy", "server"):
            for name in self.names[kind]:
                self._term(name)
            self._await(lambda kind=kind: not any(self.running[name].is_alive for name in self.names[kind]), TERM + 5)

    def _ask_totals(self) -> None:
        process, asked = Process("asker-0", "10.0.9.1"), []

        def ask() -> None:
            with Reader([self.fronts[-1]], timeout=20.0) as reader:
                ask_totals(reader, self.record("asker-0"), self.runs, 20.0)  # type: ignore[arg-type]
            asked.append(True)

        self.world.spawn(process, "main", ask)
        self._await(lambda: bool(asked) or bool(self.errors))

    def _failed(self, task: Any, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error)).strip().replace("\n", "\n    ")
        self.errors.append(f"endings: {task.process.name}/{task.name} failed: {error!r}\n    {text}")


AS_IT_IS: Final = [
    (home, name, getattr(home, name))
    for home, name in ((StoredAccounts, "find"), (StoredAccounts, "sums"), (file_lock, "_is_ours"))
]
"""Functions that read folders, before any fault is planted."""


@contextmanager
def as_it_is() -> Iterator[None]:
    """Read folders without planted faults, to check their true content."""
    with ExitStack() as stack:
        for home, name, way in AS_IT_IS:
            stack.enter_context(mock.patch.object(home, name, way))
        yield


def run(settings: Settings, chosen: list[Fault] | None = None, trace: TextIO | None = None) -> Outcome:
    """Run one trial.

    Args:
        chosen: Faults in place of the seed's.
        trace: File for a line about every event.
    """
    with folder_in_memory() as folder:
        return Trial(settings, folder, chosen, trace).run()


def value_of(word: str) -> tuple[str, Any]:
    """A setting as it is written: name=value."""
    name, _, text = word.partition("=")
    names = {field.name for field in dataclasses.fields(Settings)}
    if name not in names:
        sys.exit(f"there is no setting {name!r}; there are {', '.join(sorted(names))}")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


def main() -> int:
    seed, *words = (word for word in sys.argv[1:] if not word.startswith("--trace="))
    traces = [word.removeprefix("--trace=") for word in sys.argv[1:] if word.startswith("--trace=")]
    settings = Settings(int(seed), **dict(map(value_of, words)))
    if settings.plant:
        from .plants import PLANTS

        PLANTS[settings.plant].apply()
    with open(traces[0], "w", encoding="utf-8") if traces else nullcontext() as trace:
        outcome = run(settings, trace=trace)
    print(*outcome.faults, sep="\n")
    print(outcome)
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
