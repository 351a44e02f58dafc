"""Demo: a whole cluster on one machine that learns, with servers, proxies, actors, a learner and a progress display.

    memoire demo

The command's process starts all other processes, shows their reports, restarts dead ones, and ends all processes when
the goal is reached. `actor` and `learner` are the programs of the actors and the learner.
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
"""Parameters of the table. A learner on the same machine trains about 8 times on each entry."""
HELD_CACHES = 32
"""Caches that each server holds: few, so that samples are young."""
EPISODES = 20
"""Number of newest episodes whose mean return is compared with the goal."""
GOALS = {"CartPole-v1": 195.0}
"""Goals that replace the reward threshold of an environment."""
MAX_EPSILON = 0.05
FINISH_TIMEOUT = 60.0
"""Seconds that actors and learner have to end once the run is finished."""
ACTORS_NICE = 10
"""Niceness of actors: without it, on few cores, servers would wait for a core and the learner for servers."""
SHOW_INTERVAL = 0.25
PRINT_INTERVAL = 2.0
HINT_INTERVAL = 30.0
"""Seconds between two lines with the address of the dashboard."""


@dataclass(frozen=True)
class DemoOptions:
    """Options of the demo from the command line."""

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
            raise ParameterError("--seconds", self.seconds, "a number of seconds above 0")


@dataclass
class ClusterProgress:
    """Progress of the cluster, combined from the reports of its processes."""

    seconds: float = 0.0
    goal: float | None = None
    steps: int = 0
    step_rate: float = 0.0
    episodes: int = 0
    caches: int = 0
    held_caches: int = 0
    feedback: Counter[str] = field(default_factory=Counter)
    """Numbers of the learner's TD errors by outcome."""
    feedback_checks: int = 0
    """Number of checks whether these numbers add up."""
    unbalanced: str = ""
    """First report of TD errors whose numbers do not add up, with the owner of the entries; "" if all do."""
    learner: dict[str, Any] = field(default_factory=dict)
    dashboard: str | None = None
    """Address of the dashboard, once it answers."""
    solved_after: float | None = None
    """Seconds until the goal was reached."""
    returns: list[float] = field(default_factory=list)
    """Returns of the newest episodes of the cluster, oldest first, at most `EPISODES`."""
    clients: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def mean_return(self) -> float | None:
        """Mean of `returns`; None before the first episode."""
        return sum(self.returns) / len(self.returns) if self.returns else None

    @property
    def is_reached(self) -> bool:
        """True if `EPISODES` episodes have a mean return above the goal."""
        mean = self.mean_return
        return self.goal is not None and mean is not None and len(self.returns) == EPISODES and mean > self.goal

    def take(self, servers: tuple[Child, ...], learner: dict[str, Any], seconds: float) -> None:
        """Update all figures from the newest reports."""
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

    def _check_feedback(self, reports: list[tuple[str, dict[str, int]]]) -> None:
        self.feedback, self.feedback_checks = Counter(), self.feedback_checks + 1
        for owner, counts in reports:
            self.feedback.update(counts)
            if min(counts.values()) < 0 or 2 * counts["given"] != sum(counts.values()):
                self.unbalanced = self.unbalanced or f"{owner}: {counts}"

    def figures(self) -> list[tuple[str, str]]:
        """Return the figures as pairs of a label and a formatted value."""
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
        """Return the most important figures in one line of at most a hundred columns."""
        mean = "-" if self.mean_return is None else f"{self.mean_return:.1f}"
        return (
            f"{self.seconds:5.1f} s  return {mean:>5}  episodes {self.episodes:,}  "
            f"steps {self.steps:,} ({self.step_rate:,.0f}/s)  caches {self.caches:,}  "
            f"batches {self.learner.get('batch_rate', 0.0):,.0f}/s"
        )

    def hint(self) -> str:
        """Return the address of the dashboard, and how to end the demo, in one line."""
        parts = [f"solved after {self.solved_after:.1f} s"] if self.solved_after is not None else []
        parts += [f"dashboard: {self.dashboard}"] if self.dashboard else []
        return " | ".join([*parts, "Ctrl-C ends the demo"])


def merged(tables: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Merge the counts of each client over all servers: cumulative ones by maximum, accepted caches by sum.

    A client has one home server, and is normally in one table; after a move, the client is in two.
    """
    clients: dict[str, dict[str, int]] = {}
    for table in tables:
        for client, counts in table.items():
            totals = clients.setdefault(client, {"episodes": 0, "steps": 0, "caches": 0})
            totals["episodes"] = max(totals["episodes"], counts["episodes"])
            totals["steps"] = max(totals["steps"], counts["steps"])
            totals["caches"] += counts["caches"]
    return clients


class Lines:
    """Progress as plain lines, for files, pipes and logs: one every `PRINT_INTERVAL` seconds.

    The address of the dashboard is repeated every `HINT_INTERVAL` seconds.
    """

    def __init__(self, write: Callable[[str], object] = print) -> None:
        self._write = write
        self._next = 0.0
        self._hint_at = HINT_INTERVAL

    def show(self, progress: ClusterProgress) -> None:
        """Write a line of progress, and one with the dashboard's address, if they are due."""
        if progress.seconds >= self._next:
            self._next = progress.seconds + PRINT_INTERVAL
            self._write(progress.brief())
        if progress.dashboard and progress.seconds >= self._hint_at:
            self._hint_at = progress.seconds + HINT_INTERVAL
            self._write(progress.hint())

    def close(self) -> None:
        """Do nothing, because lines need no cleanup."""


class ProgressPanel:
    """Progress as a table in a fixed place on a terminal; the last line is the dashboard's address."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._live = Live(console=Console(), auto_refresh=False)
        self._live.start()

    def show(self, progress: ClusterProgress) -> None:
        """Redraw the table with new figures."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self._title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        table.add_column(justify="right", style="dim")
        table.add_column(justify="left", min_width=30)
        for label, value in progress.figures():
            table.add_row(label, value)
        self._live.update(Group(table, Text(f"\n{progress.hint()}", style="bold")), refresh=True)

    def close(self) -> None:
        """Stop redrawing; the last table stays on the terminal."""
        self._live.stop()


def display(title: str) -> Lines | ProgressPanel:
    """Return a `ProgressPanel` on a terminal if rich is installed, else `Lines` after printing the title."""
    if sys.stdout.isatty():
        try:
            return ProgressPanel(title)
        except ImportError:
            pass
    print(title, flush=True)
    return Lines(lambda line: print(line, flush=True))


class Demo:
    """One run of the demo: starts processes, watches them until goal, time limit or signal, and prints a summary."""

    def __init__(self, options: DemoOptions, began: float | None = None) -> None:
        """Measure the environment. `began` is the monotonic time from which seconds count; now by default."""
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
        """Seconds since the start of the demo."""
        return time.monotonic() - self.began

    def run(self) -> int:
        """Run the demo; return 0 if the goal was reached, 1 if not, and 130 or 143 if a signal came before."""
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
        status = self._print_summary(is_complete)
        return 128 + signalled if signalled and status else status

    def _start_workers(self, launcher: Launcher, endpoints: tuple[str, ...], checkpoint: str) -> list[Child]:
        """Start the learner, whose restarts load its checkpoint, and then the actors; return the learner first."""
        options = self.options
        flags = {"actions": self.actions, "seed": options.seed, "checkpoint": checkpoint}
        workers = [_start(launcher, "learner", "learner", endpoints[0], flags, options.keys)]
        for number in range(options.actors):
            flags = {
                "env": options.env, "num-envs": options.num_envs, "nice": ACTORS_NICE,
                "epsilon": MAX_EPSILON * (number + 1) / options.actors, "seed": 1000 * options.seed + number,
            }  # fmt: skip
            endpoint = endpoints[number % len(endpoints)]
            workers.append(_start(launcher, f"actor-{number}", "actor", endpoint, flags, options.keys))
        launcher.supervise(workers)
        return workers

    def _watch(self, run: LocalRun, cluster: LocalCluster, workers: list[Child]) -> None:
        parts = (
            count_with_noun(len(cluster.servers), "server", "servers"),
            count_with_noun(len(cluster.proxies), "proxy", "proxies"),
            count_with_noun(self.options.actors, "actor", "actors"),
        )
        progress_display = display(
            f"memoire demo: {self.options.env}, {', '.join(parts)} of "
            f"{count_with_noun(self.options.num_envs, 'environment', 'environments')}, 1 learner, "
            f"seed {self.options.seed}"
        )

        def tick() -> bool:
            self.progress.dashboard = run.dashboard
            self.progress.take(cluster.servers, workers[0].reports, self.seconds)
            progress_display.show(self.progress)
            if self.progress.is_reached and not self._is_solved:
                self.progress.solved_after, self.solved_return = self.seconds, self.progress.mean_return
            return self.options.keep or not (self._is_solved or self.seconds >= self.options.seconds)

        try:
            run.watch(tick, SHOW_INTERVAL)
        finally:
            progress_display.close()

    @property
    def _is_solved(self) -> bool:
        return self.progress.solved_after is not None

    def _finish(self, launcher: Launcher, run: LocalRun, cluster: LocalCluster, workers: list[Child]) -> bool:
        """End the run: the learner declares it finished, actors report their last counts, then servers theirs.

        Returns False if a process is late, or a signal asked for a quick end.
        """
        if launcher.stop_signal not in (None, signal.SIGINT):
            return False
        self.stopped_by = launcher.stop_signal
        learner, *actors = workers
        if late := run.finish(workers, FINISH_TIMEOUT):
            print(
                f"the run did not end within {FINISH_TIMEOUT:g} s: {', '.join(late)} still running; "
                "counts are not final"
            )
            return False
        launcher.stop(cluster.proxies)
        launcher.stop(cluster.servers)  # servers report once more at their end
        self.progress.take(cluster.servers, learner.reports, self.seconds)
        last_reports = [actor.reports for actor in actors if "client" in actor.reports]  # an actor may have died
        self.own_counts = {str(reports["client"]): reports for reports in last_reports}
        return True

    def _print_summary(self, is_complete: bool) -> int:
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
                f"{mean}, and the goal is {progress.goal:g}. Allow more time (--seconds), or use a less busy machine."
            )
        for line in summary(progress):
            print(line)
        faults = differences(progress, self.own_counts) if is_complete else []
        faults += [f"a server reported for TD errors of {progress.unbalanced}"] if progress.unbalanced else []
        for fault in faults:
            print(f"counts do not add up: {fault}")
        if is_complete and not faults:
            print("the counts of the actors equal those of the servers, and sum to the cluster's totals")
        if options.dashboard and not options.keep:
            command = "make demo DEMO_ARGS=--keep" if "MAKELEVEL" in os.environ else "memoire demo --keep"
            print(f"to explore the dashboard, run the demo without an end: {command}")
        is_good = not faults and (self._is_solved or progress.goal is None)
        return 0 if is_good else 1


def _start(launcher: Launcher, name: str, role: str, endpoint: str, flags: dict[str, Any], keys: str | None) -> Child:
    words = [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
    return launcher.start(name, f"memoire.rl.demo.{role}", endpoint, *words, *with_keys(keys, role))


def count_with_noun(number: int, one: str, many: str) -> str:
    """Return a number with its noun, such as "1 server" or "2 servers"."""
    return f"{number} {one if number == 1 else many}"


def summary(progress: ClusterProgress) -> list[str]:
    """Return the totals of the cluster, and each client's share in these totals, as lines of text."""
    learner, feedback = progress.learner, progress.feedback
    parts = " + ".join(f"{count:,} {name}" for name, count in feedback.items() if name != "given") or "0"
    lines = [
        f"  time {progress.seconds:.1f} s, steps {progress.steps:,}, episodes {progress.episodes:,}, "
        f"caches {progress.caches:,}, batches {learner.get('batches', 0):,}, samples {learner.get('samples', 0):,}, "
        f"models {learner.get('version', 0):,}",
        f"  TD errors: {feedback['given']:,} given = {parts}; checked {progress.feedback_checks} times",
        f"  {'client':<34}{'steps':>10}{'episodes':>10}{'caches':>10}",
    ]
    rows = [(client, *counts.values()) for client, counts in sorted(progress.clients.items())]
    rows.append(("cluster", progress.episodes, progress.steps, progress.caches))
    return lines + [
        f"  {client:<34}{steps:>10,}{episodes:>10,}{caches:>10,}" for client, episodes, steps, caches in rows
    ]


def differences(progress: ClusterProgress, own: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each difference between the totals, the clients' counts and the actors' own counts."""
    totals = {"steps": progress.steps, "episodes": progress.episodes, "caches": progress.caches}
    lines = []
    for name, total in totals.items():
        parts = sum(counts[name] for counts in progress.clients.values())
        if parts != total:
            lines.append(f"{total} {name} in all, but the clients have {parts}")
    for client, counts in own.items():
        for name in ("steps", "episodes"):
            server_count = progress.clients.get(client, {}).get(name, 0)
            if server_count != counts[name]:
                lines.append(f"actor {client} counted {counts[name]} {name}, but the servers have {server_count}")
    return lines
