"""Trial of a cluster of real processes under load: faults from a seed, repair of all processes, and checks."""

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memoire.accounting.runs import LineFilter, format_line
from memoire.disk.state_folder import Store
from memoire.errors import ChildDied
from memoire.nodes.launcher import Child, Launcher
from memoire.reader.reader import Reader
from memoire.replay.columns import Column
from memoire.replay.schema import Schema
from statekit import own_accounts

from . import checks, players, ports

TESTS = Path(__file__).resolve().parent.parent
SUPPORT = TESTS / "support"
SCHEMA = Schema(
    {"obs": Column(np.float32, (4,), "state"), "action": Column(np.int32), "reward": Column(np.float32, (), "reward")}
)
SETTINGS = ("--set", "cache_size=16", "--set", "priority_exponent=0.0")
"""Settings of the servers' table."""
READY = 60.0
TERM_GRACE = 20.0
"""Seconds for a node to end with status 0 after SIGTERM; more on a busy machine."""
WORK = 20
"""Lines that actors write before the next fault, so that every fault meets a working cluster."""
END_GRACE = 60.0
"""Seconds for actors to deliver and leave after the end of the run."""


SETTLE = 1.0
"""Seconds without a fault at the beginning."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of one process, with its beginning and duration."""

    at: float  # seconds after the trial's beginning
    kind: str
    """"kill" (SIGKILL, then started again), "term" (SIGTERM, then started again), "stop" (SIGSTOP, then SIGCONT) or
    "cut" (its address is unreachable, then back).
    """
    target: str  # name such as "server-1"
    seconds: float  # duration

    @property
    def until(self) -> float:
        return self.at + self.seconds

    def __str__(self) -> str:
        return f"{self.at:6.2f} s {self.kind} {self.target} for {self.seconds:.2f} s"


AWAY = {
    "kill": (0.05, 1.5, 1.0), "term": (0.3, 1.5, 4.0), "stop": (0.3, 3.0, 0.2), "cut": (0.5, 8.0, 1.0),
    # Faults of a simulated network: cut in one direction, slow, and all connections of a host reset.
    "in": (0.5, 8.0, 1.0), "out": (0.5, 8.0, 1.0), "slow": (0.5, 5.0, 0.0), "reset": (0.0, 0.1, 0.2),
    # Faults of a simulated disk: full, broken until its server is killed and started again, and without power.
    "full": (0.5, 8.0, 1.0), "eio": (0.5, 3.0, 1.0), "power": (0.5, 3.0, 1.0),
}  # fmt: skip
"""Least and most seconds of each kind of fault, and seconds after it without a fault of the same target, which must
come up in between.
"""
DISK = ("full", "eio", "power")


def faults(seed: int, seconds: float, targets: Sequence[str], counts: Mapping[str, int]) -> list[Fault]:
    """Spread `counts` of each kind of fault over the time, in turns over the kinds of processes.

    Each kind of process ("server", "proxy", "actor") gets an equal share, independent of its number of processes.
    """
    rng = random.Random(f"faults of {seed}")
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(kinds)
    span = (seconds - SETTLE) / max(1, len(kinds))
    free_at = dict.fromkeys(targets, 0.0)
    turns: dict[str, list[str]] = {}
    schedule = []
    for place, kind in enumerate(kinds):
        at = SETTLE + span * (place + rng.random())
        least, most, recovers = AWAY[kind]
        away = rng.uniform(least, most)
        able = [target for target in targets if kind != "cut" or not target.startswith("actor")]
        able = [target for target in able if kind not in DISK or target.startswith("server")]
        classes = sorted({target.partition("-")[0] for target in able})
        if not turns.get(kind):
            turns[kind] = rng.sample(classes, len(classes))
        wanted = turns[kind].pop()
        free = [target for target in able if free_at[target] <= at]
        of_class = [target for target in free if target.startswith(wanted + "-")]
        if not (of_class or free):
            continue  # all targets are down: skip this fault
        target = rng.choice(of_class or free)
        free_at[target] = at + away + recovers
        schedule.append(Fault(round(at, 3), kind, target, round(away, 3)))
    return sorted(schedule, key=lambda fault: fault.at)


@dataclasses.dataclass(frozen=True)
class Settings:
    seed: int
    seconds: float
    servers: int = 2
    proxies: int = 1
    actors: int = 3  # processes
    clients: int = 4  # clients of each actor
    rate: float = 10.0  # operations per second and client
    kills: int = 6
    stops: int = 2
    terms: int = 0
    runs: int = 1  # experiments, one after the other


@dataclasses.dataclass
class Outcome:
    violations: list[str]
    figures: dict[str, Any]

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {value}" for name, value in self.figures.items())
        return "\n".join([figures, *self.violations[:40]])


def names(**counts: int) -> dict[str, list[str]]:
    """Return so many names of each kind of process: server-0, server-1, and so on."""
    return {kind: [f"{kind}-{number}" for number in range(count)] for kind, count in counts.items()}


class Trial:
    """A trial in a folder of its own, which keeps all files. Runs once."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        for name in ("history", "state"):
            (folder / name).mkdir()
        self.record = players.Recorder(folder / "history" / "nemesis.jsonl", "nemesis")
        self.kinds = names(server=settings.servers, proxy=settings.proxies, actor=settings.actors)
        nodes = self.kinds["server"] + self.kinds["proxy"]
        self.endpoints = {name: f"tcp://127.0.0.1:{ports.block()}" for name in nodes}
        targets = [name for names in self.kinds.values() for name in names]
        wanted = {"kill": settings.kills, "stop": settings.stops, "term": settings.terms}
        self.faults = faults(settings.seed, settings.seconds, targets, wanted)
        self.runs = [f"trial-{number}" for number in range(1, settings.runs + 1)]
        self.undo: list[tuple[float, Fault, float]] = []
        """End, fault and beginning of each lasting fault."""
        self.running: dict[str, Child] = {}
        self.lives: Counter[str] = Counter()
        self.final: dict[str, dict[str, Any]] = {}
        self._worked = 0
        """Lines that actors had written at the last fault."""
        self.slower = 1.0
        """Greatest measured slowdown of this machine, as a factor."""
        self.output = (folder / "output.txt").open("w", encoding="utf-8", buffering=1)

    def run(self) -> Outcome:
        began = time.monotonic()
        with contextlib.closing(self.output), Launcher(on_output=self._heard) as launcher:
            self.launcher = launcher
            self._start_all()
            self._torment()
            self._heal()
            self._finish()
        self.record.close()
        events = players.read(self.folder / "history")
        kept = kept_in(self.folder / "state", self.kinds["server"], self.runs, self.final)
        violations = [*checks.check(events, kept), *self._traces()]
        spent = {"seed": self.settings.seed, "seconds": round(time.monotonic() - began, 1)}
        return Outcome(violations, spent | figures(events, kept))

    def _arguments(self, name: str) -> tuple[str, ...]:
        """Return the module and arguments of a process."""
        history = str(self.folder / "history" / f"{name}.{self.lives[name]}.jsonl")
        match name.partition("-")[0]:
            case "server":
                schema = ("--schema", SCHEMA.to_json(), "--name", name, "--run", self.runs[0])
                state = ("--state-dir", str(self.folder / "state" / name))
                return "memoire", "server", "--endpoint", self.endpoints[name], *schema, *state, *SETTINGS
            case "proxy":
                behind = [self.endpoints[server] for server in self.kinds["server"]]
                return "memoire", "proxy", "--endpoint", self.endpoints[name], *behind
            case "actor":
                options = {
                    "--name": name,
                    "--history": history,
                    "--clients": self.settings.clients,
                    "--rate": self.settings.rate,
                    "--seed": f"{self.settings.seed}/{name}/{self.lives[name]}",
                }
                words = [str(word) for option in options.items() for word in option]
                return "history.players", "actor", *self._fronts, *words
            case _:
                every = self.settings.seconds / self.settings.runs
                runs = [word for run in self.runs[1:] for word in ("--run", run)]
                return "history.players", "learner", self._fronts[0], "--history", history, "--every", str(every), *runs

    @property
    def _fronts(self) -> list[str]:
        """Endpoints that actors and learner connect to."""
        return [self.endpoints[name] for name in self.kinds["proxy"] or self.kinds["server"]]

    def _start(self, name: str) -> Child:
        self.lives[name] += 1
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(TESTS), str(SUPPORT)]))
        child = self.launcher.start(name, *self._arguments(name), environment={"PYTHONPATH": path})
        self.running[name] = child
        self.record("started", target=name, life=self.lives[name])
        return child

    def _start_all(self) -> None:
        for kind in ("server", "proxy", "actor"):
            children = [self._start(name) for name in self.kinds[kind]]
            self.launcher.await_ready(children, READY)
        self.launcher.await_ready([self._start("learner-0")], READY)

    def _heard(self, name: str, line: str) -> None:
        self.output.write(f"{time.monotonic():.3f} {name}: {line}\n")

    def _pump(self, until: float) -> None:
        """Read the processes' output until then, and record each process that died by itself once."""
        while True:
            self._undo_due()
            for name, child in list(self.running.items()):
                if child.status not in (None, 0) and not child.is_stopping:
                    child.is_stopping = True
                    self.record("died", target=name, status=child.status, tail=list(child.tail)[-8:])
            left = until - time.monotonic()
            idle = min([left, 0.1, *(at - time.monotonic() for at, _, _ in self.undo)])
            with contextlib.suppress(ChildDied):  # a child may die; the next pass of the loop records the death
                self.launcher.pump(max(0.0, idle))
            if left <= 0:
                return

    def _torment(self) -> None:
        """Strike each fault of the schedule. Each ends at its time, also while a node that was asked to end still
        delivers.
        """
        began = time.monotonic()
        for fault in self.faults:
            self._pump(began + fault.at)
            began += self._await_work(fault.target)
            since = self._strike(fault)
            self.undo.append((max(began + fault.until, since), fault, since))
        self._pump(max([began + self.settings.seconds, *(at for at, _, _ in self.undo)]))

    def _await_work(self, name: str) -> float:
        """Wait until a target is up and actors have worked since the last fault. Return the seconds of the delay."""
        began = time.monotonic()
        self._measure()
        wanted = self._worked + WORK
        while time.monotonic() < began + READY:
            is_away = any(name == other.target for _, other, _ in self.undo)
            is_up = self.running[name].facts is not None or self.running[name].status is not None
            self._worked = self._lines_of_actors()
            if not is_away and is_up and self._worked >= wanted:
                break
            self._pump(time.monotonic() + 0.05)
        return time.monotonic() - began

    def _lines_of_actors(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in (self.folder / "history").glob("actor-*.jsonl"))

    def _measure(self) -> None:
        """Record the ratio of wall time to CPU time on this machine now; limits in seconds grow with it."""
        began, worked = time.monotonic(), time.thread_time()
        while time.thread_time() < worked + 0.02:
            pass
        slower = (time.monotonic() - began) / 0.02
        self.slower = max(self.slower, slower)
        self.record("measured", slower=round(slower, 1))

    def _undo_due(self) -> None:
        for due in sorted(self.undo, key=lambda entry: entry[0]):
            if due[0] <= time.monotonic():
                self.undo.remove(due)
                self._relieve(due[1], due[2])

    def _strike(self, fault: Fault) -> float:
        child, name = self.running[fault.target], fault.target
        facts = {"target": name, "life": self.lives[name]}
        if fault.kind == "stop":
            child.process.send_signal(signal.SIGSTOP)
            return self.record("stopped", **facts)
        child.is_stopping = True
        if fault.kind == "kill":
            child.process.kill()
            child.process.wait()
            return self.record("killed", **facts)
        since = time.monotonic()
        self._end([name])
        return since

    def _relieve(self, fault: Fault, since: float) -> None:
        if fault.kind == "stop":
            self.running[fault.target].process.send_signal(signal.SIGCONT)
            self.record("continued", target=fault.target, since=since)
        else:
            self._start(fault.target)

    def _end(self, names: list[str]) -> None:
        """Send SIGTERM and wait; record and kill processes that take too long."""
        self._await_up([self.running[name] for name in names])
        began = time.monotonic()
        for name in names:
            self.running[name].is_stopping = True
            self.running[name].process.terminate()
        waiting = set(names)
        grace = self._grace(TERM_GRACE)
        while waiting and time.monotonic() < began + grace:
            self._pump(time.monotonic() + 0.02)
            for name in [name for name in waiting if self.running[name].status is not None]:
                waiting.remove(name)
                self._ended(name, time.monotonic() - began)
        for name in waiting:
            self.running[name].process.kill()
            self.running[name].process.wait()
            self._ended(name, time.monotonic() - began)

    def _grace(self, seconds: float) -> float:
        """Return a limit in seconds, longer on a slow machine, but at most 90 s so that a hang is reported."""
        return min(90.0, seconds * max(1.0, self.slower / 4.0))

    def _await_up(self, children: list[Child]) -> None:
        """Wait until starting processes are ready; before, SIGTERM kills them like any other process."""
        deadline = time.monotonic() + READY
        while any(child.facts is None and child.status is None for child in children) and time.monotonic() < deadline:
            self._pump(time.monotonic() + 0.05)

    def _ended(self, name: str, took: float) -> None:
        child = self.running[name]
        self.launcher.stop([child], 0.0)  # the method reads the last output
        facts = {"target": name, "life": self.lives[name], "status": child.status}
        self.record("ended", took=took, grace=self._grace(TERM_GRACE), tail=list(child.tail)[-8:], **facts)

    def _heal(self) -> None:
        """Start all servers and proxies that are down."""
        for name, child in list(self.running.items()):
            if name.startswith(("server", "proxy")) and child.status is not None:
                self._start(name)
        nodes = [self.running[name] for name in self.kinds["server"] + self.kinds["proxy"]]
        self.launcher.await_ready([child for child in nodes if child.status is None], READY)
        self.record("healed")

    def _finish(self) -> None:
        """End the run: every actor delivers and leaves by itself. Afterwards proxies and servers are asked to end."""
        self.running["learner-0"].send_order("finish")
        leaving = ["learner-0", *self.kinds["actor"]]
        self._measure()
        deadline = time.monotonic() + self._grace(END_GRACE)
        while any(self.running[name].status is None for name in leaving):
            self._pump(time.monotonic() + 0.05)
            if time.monotonic() > deadline:
                for name in leaving:
                    if self.running[name].status is None:
                        self.record("late", target=name, what=f"did not leave within {END_GRACE:g} s after the end")
                        self.running[name].is_stopping = True
                        self.running[name].process.kill()
                break
        with Reader([self._fronts[-1]], timeout=READY) as reader:
            players.ask_totals(reader, self.record, self.runs, READY)
        self._end(self.kinds["proxy"])
        self._end([name for name in self.kinds["server"] if self.running[name].status is None])
        self.final = {name: self.running[name].reports for name in self.kinds["server"]}

    def _traces(self) -> list[str]:
        """Return a violation if the output has a traceback."""
        text = (self.folder / "output.txt").read_text(encoding="utf-8")
        tracebacks = [line for line in text.splitlines() if "Traceback (most recent call last)" in line]
        return [f"output: {len(tracebacks)} tracebacks, the first: {tracebacks[0]}"] if tracebacks else []


def figures(events: list[players.Event], kept: checks.Kept) -> dict[str, Any]:
    histories = checks.stories(events).values()
    merged = checks.merge(kept.counted).values()
    done = Counter(event["do"] for event in events)
    killed = Counter(event["target"].partition("-")[0] for event in events if event["do"] == "killed")
    took = [event["took"] for event in events if event["do"] == "updated" and event["ok"]]
    return {
        "clients": len(histories),
        "killed": dict(killed), "stopped": done["stopped"], "cut": done["cut"], "ended": done["ended"],
        "operations": sum(done[name] for name in ("count", "log", "update", "push", "saw")),
        "episodes": sum(episodes for episodes, _ in merged),
        "steps": sum(steps for _, steps in merged),
        "lines": sum(map(len, kept.lines.values())),
        "delivered": sum(story.delivered for story in histories),
        "caches_pushed": sum(story.pushed_after for story in histories),
        "caches_accepted": sum(sum(rows.values()) for rows in kept.accepted.values()),
        "samples_drawn": sum(event["samples"] for event in events if event["do"] in ("drew", "took")),
        "slowest_update": round(max(took, default=0.0), 2),
    }  # fmt: skip


def kept_in(folder: Path, servers: list[str], runs: list[str], final: dict[str, dict[str, Any]]) -> checks.Kept:
    """Return the servers' accounts, log lines and index from their state folders, and their last reports."""
    kept = checks.Kept({run: {} for run in runs}, {}, {}, {}, {})
    pushed, settled = Counter[str](), Counter[str]()
    for server in servers:
        kept.indexed[server], kept.lines[server], kept.accepted[server] = [], [], Counter()
        with Store(folder / server) as store:
            for run in runs:
                accounts = {account.client.hex(): account for account in own_accounts(store, run)}
                kept.counted[run][server] = {
                    client: (account.report.episodes, account.report.steps) for client, account in accounts.items()
                }
                kept.accepted[server].update({client: account.accepted_caches for client, account in accounts.items()})
                for client, account in accounts.items():
                    pushed[client] += account.pushed_caches
                    # Caches on the way at the end of a run belong to no run, and are not counted as lost.
                    on_way = account.in_flight_caches if run == runs[-1] else 0
                    settled[client] += account.pushed_caches - on_way
                kept.indexed[server] += [line for page in pages(store, run) for line in page]
                files = sorted((folder / server / "log").glob(f"{run}.*.log"))
                texts = [path.read_text(encoding="utf-8") for path in files]
                kept.lines[server] += [line for text in texts for line in text.splitlines()]
        if server not in final:
            continue
        clients = final[server].get("clients", {})
        kept.folded[server] = final[server].get("accounts_folded", 0)
        kept.reported[server] = {client: (row["episodes"], row["steps"]) for client, row in clients.items()}
    kept.pushed = {client: (count, settled[client]) for client, count in pushed.items()}
    return kept


def pages(store: Store, run: str) -> Iterator[list[str]]:
    """Yield all lines in the index by page, oldest first, in the format of the log file."""
    after = 0
    while entries := store.search(run, LineFilter(after=after), most=1000):
        yield [format_line(entry.received, entry.line.label, entry.line.text).rstrip("\n") for entry in entries]
        after = entries[-1].index


def run(settings: Settings, folder: Path) -> Outcome:
    """Run one trial; `folder` must be empty."""
    return Trial(settings, folder).run()
