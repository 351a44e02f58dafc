"""Servers, proxies and a dashboard on this machine, as processes of a launcher.

A run on this machine: servers and proxies, a dashboard that shows them, and programs that learn and act.

`memoire up`, `memoire demo` and `memoire launch` are three uses of it. All processes are children of one `Launcher`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memoire.errors import ParameterError, StateUnusable
from memoire.replay.schema import Schema
from memoire.security.keys import Given, Keys

from .launcher import Child, Launcher, note, say

DASHBOARD_NEEDS = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True)
class LocalCluster:
    """A running cluster: its processes, and the addresses that actors and learners connect to (any of them)."""

    servers: tuple[Child, ...]
    proxies: tuple[Child, ...]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The proxies' addresses; the server's where there is no proxy."""
        return tuple(str((child.facts or {})["endpoint"]) for child in self.proxies or self.servers)

    @property
    def pages(self) -> tuple[str, ...]:
        """Where the nodes' pages are."""
        return tuple(str((child.facts or {})["http"]) for child in (*self.servers, *self.proxies))


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Which servers and proxies to run on this machine.

    Raises:
        ParameterError: counts that make no cluster.
    """

    schema: Schema | None = None
    """Of the servers' only table; None where `tables` says what there is."""
    settings: Sequence[str] = ()
    """Parameters as "name=value", see `roles.read_parameters`."""
    tables: str | None = None
    """Path of a file with the tables of each server, see `tables_file`."""
    servers: int = 1
    proxies: int = 1
    host: str = "127.0.0.1"
    """Address to listen at; "*" is all of the machine's."""
    port: int = 0
    """Of the first proxy (or of the server, without a proxy); each further one takes the next three free ports
    (requests, caches, notices). 0 takes any free ones."""
    run: str | None = None
    cache_limit: int = 0
    """Caches that each server holds, 0 for no limit but bytes."""
    state_dir: str | None = None
    """Folder with a folder for the state of each server; None keeps everything in memory."""
    insecure: bool = False
    """Whether `host` may be an address that everybody reaches."""
    keys: Given = None
    """A cluster's keys folder, or of one process that may do everything; None is $MEMOIRE_KEYS, or no keys."""

    def __post_init__(self) -> None:
        check_counts(self.servers, self.proxies)
        for name in ("tables", "state_dir", "keys"):  # programs that are started later may be started elsewhere
            if isinstance(path := getattr(self, name), str | os.PathLike):
                object.__setattr__(self, name, _found_anywhere(os.fspath(path)))

    def server_flags(self, number: int) -> tuple[str, ...]:
        """What the command of a server has beside its address."""
        return (
            *(("--schema", self.schema.to_json()) if self.schema else ("--tables", str(self.tables))),
            *("--name", f"server-{number}"),
            *with_keys(self.keys, "server"),
            *(() if self.run is None else ("--run", self.run)),
            *("--cache-limit", str(self.cache_limit)),
            *(() if self.state_dir is None else ("--state-dir", os.path.join(self.state_dir, f"server-{number}"))),
            *(part for setting in self.settings for part in ("--set", setting)),
        )


def start(launcher: Launcher, nodes: Nodes) -> LocalCluster | None:
    """Start servers, then proxies in front of them, and wait until all are ready; None when asked to end meanwhile.

    Raises:
        StateUnusable: the state folder is no folder, and cannot be made.
        ChildDied: a process could not start; why is in the message.
    """
    _make_folder(nodes.state_dir)
    fronts = [
        f"tcp://{nodes.host}:{nodes.port + 3 * number if nodes.port else 0}" for number in range(max(nodes.proxies, 1))
    ]
    inner = ["tcp://127.0.0.1:0"] * nodes.servers if nodes.proxies else fronts
    servers = _ready(
        launcher,
        [
            _node(launcher, "server", number, each, nodes, nodes.server_flags(number))
            for number, each in enumerate(inner)
        ],
    )
    if servers is None or not nodes.proxies:
        return None if servers is None else LocalCluster(servers, ())
    behind = (*with_keys(nodes.keys, "proxy"), *(str((child.facts or {})["endpoint"]) for child in servers))
    made = [_node(launcher, "proxy", number, each, nodes, behind) for number, each in enumerate(fronts)]
    proxies = _ready(launcher, made)
    return None if proxies is None else LocalCluster(servers, proxies)


def _make_folder(state_dir: str | None) -> None:
    try:
        if state_dir is not None:
            os.makedirs(state_dir, exist_ok=True)
    except OSError as error:
        advice = "Name a folder that is there or can be made (--state-dir)."
        raise StateUnusable(str(state_dir), error.strerror or str(error), advice) from error


def _node(launcher: Launcher, role: str, number: int, endpoint: str, nodes: Nodes, flags: tuple[str, ...]) -> Child:
    open_to_all = ("--insecure",) if nodes.insecure else ()
    return launcher.start(f"{role}-{number}", "memoire", role, "--endpoint", endpoint, *open_to_all, *flags)


def _ready(launcher: Launcher, made: list[Child]) -> tuple[Child, ...] | None:
    """These, once they are ready, and started again from then on; None when asked to end meanwhile."""
    if not launcher.await_ready(made):
        return None
    launcher.supervise(made, where_it_was)
    return tuple(made)


def where_it_was(facts: dict[str, Any]) -> tuple[str, ...]:
    """Flags with which a server or proxy that is started again has its former addresses: others know them."""
    ports = ",".join(str(endpoint).rpartition(":")[2] for endpoint in facts["beside"])
    pages = str(facts["http"]).partition("://")[2]
    return ("--endpoint", str(facts["endpoint"]), "--beside", ports, "--http", pages)


def with_keys(keys: Given, role: str) -> tuple[str, ...]:
    """The flag that gives a child its role's keys."""
    found = Keys.of(keys, role)
    return () if found is None else ("--keys", str(found.folder))


def show(launcher: Launcher, pages: Sequence[str], history: str | None = None) -> Child | None:
    """Start a dashboard of these nodes' pages on a free port of this machine; its address is the fact "http" once it is
    ready. It is started again at that address when it dies, with its curves if `history` names a file for them.

    None where what it needs (the extra [dashboard]) is not installed. The cluster goes on without it.
    """
    if any(importlib.util.find_spec(module) is None for module in DASHBOARD_NEEDS):
        return None
    keeps = () if history is None else ("--history", history)
    board = launcher.start("dashboard", "memoire", "dashboard", *pages, "--listen", "127.0.0.1:0", *keeps)
    board.may_die = True
    launcher.supervise([board], where_it_showed)
    return board


def where_it_showed(facts: dict[str, Any]) -> tuple[str, ...]:
    """Flags with which a dashboard that is started again has its former address: a browser has it open."""
    return ("--listen", str(facts["http"]).partition("://")[2].rstrip("/"))


def check_counts(servers: int, proxies: int) -> None:
    """Refuse counts that make no cluster."""
    if servers < 1:
        raise ParameterError("--servers", servers, "at least 1")
    if proxies < 0 or (proxies == 0 and servers > 1):
        raise ParameterError("--proxies", proxies, "at least 1 where there are several servers, at least 0 otherwise")


def _found_anywhere(path: str) -> str:
    """A path as from any folder; or the JSON that tables are in place of one."""
    return path if path.lstrip().startswith("{") else os.path.abspath(path)


IDLE = 60.0
"""Seconds between two looks at a run that shows nothing."""


class LocalRun:
    """What runs together, until somebody ends it.

    Args:
        launcher: Whose children all of it are; it ends them.
        nodes: Servers and proxies of this run; None has none of its own.
        dashboard: Whether to start one, where what it needs is installed.

    Attributes:
        cluster: The nodes, once they are ready.
        dashboard: Address of the dashboard, once it answers.
    """

    def __init__(self, launcher: Launcher, nodes: Nodes | None, *, dashboard: bool = True) -> None:
        self.cluster: LocalCluster | None = None
        self.dashboard: str | None = None
        self._launcher, self._nodes, self._wants_dashboard = launcher, nodes, dashboard
        self._board: Child | None = None  # until its address was printed

    def begin(self) -> bool:
        """Start the nodes, and wait until they are ready; False when this process is asked to end meanwhile.

        Raises:
            ChildDied: one of them could not start.
        """
        if self._nodes is not None:
            self.cluster = start(self._launcher, self._nodes)
        return self.cluster is not None or self._nodes is None

    def show(self, pages: Sequence[str] = (), history: str | None = None) -> None:
        """Start the dashboard, of the nodes and of these pages; it is announced when it is ready.

        Args:
            history: File that keeps its curves over a restart.
        """
        pages = (*(self.cluster.pages if self.cluster else ()), *pages)
        if self._wants_dashboard and pages:
            self._board = show(self._launcher, pages, history)

    def watch(self, turn: Callable[[], bool] = lambda: True, every: float = IDLE) -> None:
        """Keep everything running until `turn`, called each `every` seconds, is False, or this process is asked to end.

        Raises:
            ChildDied: a process died, and it is of no use to start it again.
        """
        due = time.monotonic()
        while self._launcher.pump(max(0.0, due - time.monotonic())):
            self._announce()
            if time.monotonic() >= due:
                due = time.monotonic() + every
                if not turn():
                    return

    def _announce(self) -> None:
        """Print where the dashboard is, once."""
        if self._board is not None and self._board.facts is not None:
            self.dashboard = str(self._board.facts["http"])
            self._board = None
            say(f"memoire: dashboard: {self.dashboard}")


def up(nodes: Nodes, *, dashboard: bool = True) -> int:
    """Run a cluster until SIGINT or SIGTERM; its exit status. Prints the addresses, then whatever a process prints.

    A process that dies is started again.
    """
    with Launcher(lambda name, line: say(f"{name}: {line}", sys.stderr), say=note) as launcher:
        run = LocalRun(launcher, nodes, dashboard=dashboard)
        if run.begin() and run.cluster is not None:
            _announce_nodes(run.cluster)
            run.show()
            run.watch()
    return 0


def _announce_nodes(cluster: LocalCluster) -> None:
    for endpoint in cluster.endpoints:
        say(f"memoire: actors and learners connect to {endpoint}")
    for child, page in zip((*cluster.servers, *cluster.proxies), cluster.pages, strict=True):
        say(f"memoire: how {child.name} stands: {page}/status")
    say("Ctrl-C ends the cluster.", sys.stderr)
