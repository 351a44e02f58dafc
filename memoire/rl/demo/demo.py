"""The whole of memoire on one machine, learning something: servers, proxies, actors and a learner, and how they fare.

    memoire demo

This process only starts the others, hears their reports and shows them (see `launch`); it starts those again that die,
and ends them all when the goal is reached. What actors and the learner do is in `actor` and `learner`.
"""

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memoire import Schema
from memoire.errors import ParameterError
from memoire.launching import (
    Child,
    Launcher,
    LocalCluster,
    LocalRun,
    Nodes,
    check_counts,
    make_envs,
    sizes,
    with_keys,
)  # fmt: skip

PARAMETERS = ("multi_step=3", "discount=[0.99]", "samples_per_insert=8", "cache_size=1024")
"""Samples of each entry are pushed often: a learner on the same machine trains on each about that many times."""
HELD_CACHES = 32
"""Caches that each server holds: few, so that samples are young."""
EPISODES = 20
"""Newest episodes whose mean return is compared with the goal."""
GOALS = {"CartPole-v1": 195.0}
"""Where the environment's own threshold is not what the demo waits for."""
MAX_EPSILON = 0.05
FINISH_TIMEOUT = 60.0
"""Seconds that actors and learner have to end once the run is finished."""
ACTORS_NICE = 10
"""Actors use whatever the others leave: on few cores the learner would else wait for servers that wait for a core."""
SHOW_INTERVAL = 0.25
PRINT_INTERVAL = 2.0
HINT_INTERVAL = 30.0
"""Seconds after which lines say again where the dashboard is."""


@dataclass(frozen=True)
class Options:
    """What the command line chooses."""

    env: str = "CartPole-v1"
    actors: int = 2
    servers: int = 1
    proxies: int = 1
    num_envs: int = 4
    seed: int = 0
    keep: bool = False
    seconds: float = 60.0
    goal: float | None = None
    dashboard: bool = True
    keys: str | None = None

    def __post_init__(self) -> None:
        check_counts(self.servers, self.proxies)
        for name, value in (("--actors", self.actors), ("--num-envs", self.num_envs)):
            if value < 1:
                raise ParameterError(name, value, "at least 1")
        if not self.seconds > 0:
            raise ParameterError("--seconds", self.seconds, "above 0")


@dataclass
class ClusterProgress:
    """How the cluster fares, put together from what its processes reported."""

    seconds: float = 0.0
    goal: float | None = None
    steps: int = 0
    step_rate: float = 0.0
    episodes: int = 0
    caches: int = 0
    held_caches: int = 0
    feedback: Counter[str] = field(default_factory=Counter)
    """What became of the learner's TD errors."""
    feedback_checks: int = 0
    """How often that was looked at."""
    unbalanced: str = ""
    """What a server once said of the TD errors for an owner's entries that does not add up."""
    learner: dict[str, Any] = field(default_factory=dict)
    dashboard: str | None = None
    """Its address, once it answers."""
    solved_after: float | None = None
    """Seconds until the goal was reached."""
    returns: list[float] = field(default_factory=list)
    """Of the newest episodes of the cluster, oldest first, at most `EPISODES`."""
    clients: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def mean_return(self) -> float | None:
        """Mean of `returns`; None while there are none."""
        return sum(self.returns) / len(self.returns) if self.returns else None

    @property
    def is_reached(self) -> bool:
        """Whether enough episodes are there, and their mean is above the goal."""
        mean = self.mean_return
        return self.goal is not None and mean is not None and len(self.returns) == EPISODES and mean > self.goal

    def take(self, servers: tuple[Child, ...], learner: dict[str, Any], seconds: float) -> None:
        """Take in the newest reports."""
        reports = [child.reports for child in servers if child.reports]
        steps = sum(report["totals"]["steps"] for report in reports)
        span = seconds - self.seconds
        if span > 0:  # smoothed over about two seconds
            blend = min(1.0, span / 2.0)
            self.step_rate += blend * ((steps - self.steps) / span - self.step_rate)
        self.seconds, self.steps, self.learner = seconds, steps, learner
        self.episodes = sum(report["totals"]["episodes"] for report in reports)
        self.caches = sum(report["totals"]["accepted_caches"] for report in reports)
        self.held_caches = sum(report["held_caches"] for report in reports)
        self._check_feedback([each for report in reports for each in report["feedback"].items()])
        recent = sorted((ended for report in reports for ended in report["recent"]), key=lambda ended: float(ended[0]))
        self.returns = [float(ended[1]) for ended in recent[-EPISODES:]]
        self.clients = merged([report["clients"] for report in reports])

    def _check_feedback(self, told: list[tuple[str, dict[str, int]]]) -> None:
        self.feedback, self.feedback_checks = Counter(), self.feedback_checks + 1
        for owner, counts in told:
            self.feedback.update(counts)
            if min(counts.values()) < 0 or 2 * counts["given"] != sum(counts.values()):
                self.unbalanced = self.unbalanced or f"{owner}: {counts}"

    def figures(self) -> list[tuple[str, str]]:
        """(what, value) as people read it."""
        learner, mean = self.learner, self.mean_return
        goal = "" if self.goal is None else f" (goal {self.goal:g})"
        return [
            ("time", f"{self.seconds:.1f} s"),
            ("steps", f"{self.steps:,} ({self.step_rate:,.0f}/s)"),
            ("episodes", f"{self.episodes:,}"),
            ("caches", f"{self.caches:,} ({self.held_caches} held)"),
            ("batches", f"{learner.get('batches', 0):,} ({learner.get('batch_rate', 0.0):,.0f}/s)"),
            (f"return of the last {EPISODES}", "-" if mean is None else f"{mean:.1f}{goal}"),
            ("TD errors", ", ".join(f"{self.feedback[name]:,} {name}" for name in ("given", "applied", "lost"))),
            ("sample age", f"{learner['age']:.2f} s" if "age" in learner else "-"),
            ("learner waits", f"{100.0 * learner['waiting']:.0f} %" if "waiting" in learner else "-"),
            ("model", f"version {learner.get('version', 0)}"),
        ]

    def brief(self) -> str:
        """The figures that matter most, in one line of at most a hundred columns."""
        mean = "-" if self.mean_return is None else f"{self.mean_return:.1f}"
        return (
            f"{self.seconds:5.1f} s  return {mean:>5}  episodes {self.episodes:,}  "
            f"steps {self.steps:,} ({self.step_rate:,.0f}/s)  caches {self.caches:,}  "
            f"batches {self.learner.get('batch_rate', 0.0):,.0f}/s"
        )

    def hint(self) -> str:
        """Where to look around, and how to end it."""
        parts = [f"solved after {self.solved_after:.1f} s"] if self.solved_after is not None else []
        parts += [f"dashboard: {self.dashboard}"] if self.dashboard else []
        return " | ".join([*parts, "Ctrl-C ends the demo"])


def merged(tables: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Counts of each client over all servers: cumulative ones by maximum, accepted caches by sum.

    A client has one home, and so normally stands in one table; after a move it stands in two.
    """
    clients: dict[str, dict[str, int]] = {}
    for table in tables:
        for client, counts in table.items():
            known = clients.setdefault(client, {"episodes": 0, "steps": 0, "caches": 0})
            known["episodes"] = max(known["episodes"], counts["episodes"])
            known["steps"] = max(known["steps"], counts["steps"])
            known["caches"] += counts["caches"]
    return clients


class Lines:
    """Progress as plain lines, one every `PRINT_INTERVAL` seconds: for files, pipes and logs. Where the dashboard is
    follows every `HINT_INTERVAL` seconds, so that it stays in sight.
    """

    def __init__(self, write: Callable[[str], object] = print) -> None:
        self._write = write
        self._next = 0.0
        self._hint_at = HINT_INTERVAL

    def show(self, progress: ClusterProgress) -> None:
        """A line, if it is time for one."""
        if progress.seconds >= self._next:
            self._next = progress.seconds + PRINT_INTERVAL
            self._write(progress.brief())
        if progress.dashboard and progress.seconds >= self._hint_at:
            self._hint_at = progress.seconds + HINT_INTERVAL
            self._write(progress.hint())

    def close(self) -> None:
        """Nothing to tidy."""


class ProgressPanel:
    """Progress as a small table that stays in its place on a terminal; the dashboard's address is its last line."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._live = Live(console=Console(), auto_refresh=False)
        self._live.start()

    def show(self, progress: ClusterProgress) -> None:
        """Draw the table again."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self._title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        table.add_column(justify="right", style="dim")
        table.add_column(justify="left", min_width=30)
        for what, value in progress.figures():
            table.add_row(what, value)
        self._live.update(Group(table, Text(f"\n{progress.hint()}", style="bold")), refresh=True)

    def close(self) -> None:
        """Leave the last table where it is."""
        self._live.stop()


def display(title: str) -> Lines | ProgressPanel:
    """A table on a terminal (with rich), lines elsewhere."""
    if sys.stdout.isatty():
        try:
            return ProgressPanel(title)
        except ImportError:
            pass
    print(title, flush=True)
    return Lines(lambda line: print(line, flush=True))


class Demo:
    """One run of the demo: starts the processes, watches them until the goal, the limit or a signal, and sums up."""

    def __init__(self, options: Options, began: float | None = None) -> None:
        """`began` is the monotonic time from which seconds count; now by default."""
        self.options = options
        self.began = time.monotonic() if began is None else began
        envs = make_envs(options.env, 1)
        try:
            _, self.actions = sizes(envs)
            self.schema = Schema.from_env(envs)
            threshold = envs.spec.reward_threshold if envs.spec else None
        finally:
            envs.close()
        goal = options.goal if options.goal is not None else GOALS.get(options.env, threshold)
        self.progress = ClusterProgress(goal=goal)
        self.solved_return: float | None = None
        self.stopped_by: int | None = None
        self.own_counts: dict[str, dict[str, Any]] = {}

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    def run(self) -> int:
        """Run it; 0 when the goal was reached, 1 when not, 130 or 143 when a signal came before."""
        options = self.options
        nodes = Nodes(
            schema=self.schema, settings=PARAMETERS, servers=options.servers, proxies=options.proxies,
            run=f"demo-{options.env}-{options.seed}", cache_limit=HELD_CACHES, keys=options.keys,
        )  # fmt: skip
        with (
            tempfile.TemporaryDirectory(prefix="memoire-demo-") as folder,
            Launcher(say=lambda line: print(f"memoire: {line}", flush=True)) as launcher,
        ):
            run = LocalRun(launcher, nodes, dashboard=options.dashboard)
            is_complete = False
            if run.begin() and run.cluster is not None:
                workers = self._start_workers(launcher, run.cluster.endpoints, os.path.join(folder, "network"))
                run.show(history=os.path.join(folder, "history"))
                self._watch(run, run.cluster, workers)
                is_complete = self._finish(launcher, run, run.cluster, workers)
            signalled = launcher.stop_signal or self.stopped_by
        status = self._sum_up(is_complete)
        return 128 + signalled if signalled and status else status

    def _start_workers(self, launcher: Launcher, endpoints: tuple[str, ...], checkpoint: str) -> list[Child]:
        """The learner first: actors act at random until it has published. One that is started again has its network."""
        options = self.options
        flags = {"actions": self.actions, "seed": options.seed, "checkpoint": checkpoint}
        workers = [_started(launcher, "learner", "learner", endpoints[0], flags, options.keys)]
        for number in range(options.actors):
            flags = {
                "env": options.env, "num-envs": options.num_envs, "nice": ACTORS_NICE,
                "epsilon": MAX_EPSILON * (number + 1) / options.actors, "seed": 1000 * options.seed + number,
            }  # fmt: skip
            endpoint = endpoints[number % len(endpoints)]
            workers.append(_started(launcher, f"actor-{number}", "actor", endpoint, flags, options.keys))
        launcher.supervise(workers)
        return workers

    def _watch(self, run: LocalRun, cluster: LocalCluster, workers: list[Child]) -> None:
        """Show how things stand until the goal is reached (with `keep`, beyond), time is up or a signal came."""
        parts = (
            counted(len(cluster.servers), "server", "servers"),
            counted(len(cluster.proxies), "proxy", "proxies"),
            counted(self.options.actors, "actor", "actors"),
        )
        shown = display(
            f"memoire demo: {self.options.env}, {', '.join(parts)} of "
            f"{counted(self.options.num_envs, 'environment', 'environments')}, 1 learner, seed {self.options.seed}"
        )

        def turn() -> bool:
            self.progress.dashboard = run.dashboard
            self.progress.take(cluster.servers, workers[0].reports, self.seconds)
            shown.show(self.progress)
            if self.progress.is_reached and not self._is_solved:
                self.progress.solved_after, self.solved_return = self.seconds, self.progress.mean_return
            return self.options.keep or not (self._is_solved or self.seconds >= self.options.seconds)

        try:
            run.watch(turn, SHOW_INTERVAL)
        finally:
            shown.close()

    @property
    def _is_solved(self) -> bool:
        return self.progress.solved_after is not None

    def _finish(self, launcher: Launcher, run: LocalRun, cluster: LocalCluster, workers: list[Child]) -> bool:
        """End the run: the learner declares it finished, actors say their last counts, then servers theirs.

        False when that did not work out, or when a signal asked for a quick end.
        """
        if launcher.stop_signal not in (None, signal.SIGINT):
            return False
        self.stopped_by = launcher.stop_signal
        learner, *actors = workers
        if late := run.finish(workers, FINISH_TIMEOUT):
            print(
                f"the run did not end within {FINISH_TIMEOUT:g} s: {', '.join(late)} still at work; "
                "counts are not final"
            )
            return False
        launcher.stop(cluster.proxies)
        launcher.stop(cluster.servers)  # which report once more at their end
        self.progress.take(cluster.servers, learner.reports, self.seconds)
        told = [actor.reports for actor in actors if "client" in actor.reports]  # not by one that died just before
        self.own_counts = {str(reports["client"]): reports for reports in told}
        return True

    def _sum_up(self, is_complete: bool) -> int:
        """Print what came of it; the exit status."""
        options, progress = self.options, self.progress
        if progress.solved_after is not None:
            print(
                f"solved {options.env} in {progress.solved_after:.1f} s: the last {EPISODES} episodes returned "
                f"{self.solved_return:.1f} on average (goal {progress.goal:g})"
            )
        elif progress.goal is not None:
            mean = "nothing yet" if progress.mean_return is None else f"{progress.mean_return:.1f} on average"
            print(
                f"not solved: after {progress.seconds:.1f} s the last {len(progress.returns)} episodes returned "
                f"{mean}, and the goal is {progress.goal:g}. Give it more time (--seconds), or a less busy machine."
            )
        for line in summary(progress):
            print(line)
        faults = differences(progress, self.own_counts) if is_complete else []
        faults += [f"a server said of TD errors for {progress.unbalanced}"] if progress.unbalanced else []
        for fault in faults:
            print(f"counts do not add up: {fault}")
        if is_complete and not faults:
            print("what the actors counted is what the servers counted, and sums to the cluster's totals")
        if options.dashboard and not options.keep:
            again = "make demo DEMO_ARGS=--keep" if "MAKELEVEL" in os.environ else "memoire demo --keep"
            print(f"to look around in its dashboard, let it go on: {again}")
        is_good = not faults and (self._is_solved or progress.goal is None)
        return 0 if is_good else 1


def _started(launcher: Launcher, name: str, role: str, endpoint: str, flags: dict[str, Any], keys: str | None) -> Child:
    told = [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
    return launcher.start(name, f"memoire.rl.demo.{role}", endpoint, *told, *with_keys(keys, role))


def counted(number: int, one: str, many: str) -> str:
    """Such as "1 server" or "2 servers"."""
    return f"{number} {one if number == 1 else many}"


def summary(progress: ClusterProgress) -> list[str]:
    """Totals of the cluster, and each client's share of them, as lines of text."""
    learner, told = progress.learner, progress.feedback
    parts = " + ".join(f"{count:,} {name}" for name, count in told.items() if name != "given") or "0"
    lines = [
        f"  time {progress.seconds:.1f} s, steps {progress.steps:,}, episodes {progress.episodes:,}, "
        f"caches {progress.caches:,}, batches {learner.get('batches', 0):,}, samples {learner.get('samples', 0):,}, "
        f"models {learner.get('version', 0):,}",
        f"  TD errors: {told['given']:,} given = {parts}; looked at {progress.feedback_checks} times",
        f"  {'client':<34}{'steps':>10}{'episodes':>10}{'caches':>10}",
    ]
    rows = [(client, *counts.values()) for client, counts in sorted(progress.clients.items())]
    rows.append(("cluster", progress.episodes, progress.steps, progress.caches))
    return lines + [
        f"  {client:<34}{steps:>10,}{episodes:>10,}{caches:>10,}" for client, episodes, steps, caches in rows
    ]


def differences(progress: ClusterProgress, own: dict[str, dict[str, Any]]) -> list[str]:
    """Where the cluster's totals, its clients' counts and what the actors counted themselves differ."""
    totals = {"steps": progress.steps, "episodes": progress.episodes, "caches": progress.caches}
    found = []
    for name, total in totals.items():
        parts = sum(counts[name] for counts in progress.clients.values())
        if parts != total:
            found.append(f"{total} {name} in all, but the clients have {parts}")
    for client, counts in own.items():
        for name in ("steps", "episodes"):
            known = progress.clients.get(client, {}).get(name, 0)
            if known != counts[name]:
                found.append(f"actor {client} made {counts[name]} {name}, but the servers have {known}")
    return found
