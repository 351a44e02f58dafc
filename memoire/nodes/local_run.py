"""A run on this machine: servers and proxies, a dashboard that shows them, and programs that learn and act.

`memoire up`, `memoire demo` and `memoire launch` are three uses of it. All processes are children of one `Launcher`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from . import local_cluster
from .child import Child
from .launcher import Launcher
from .local_cluster import LocalCluster, Nodes
from .output import note, say

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
            self.cluster = local_cluster.start(self._launcher, self._nodes)
        return self.cluster is not None or self._nodes is None

    def show(self, pages: Sequence[str] = (), history: str | None = None) -> None:
        """Start the dashboard, of the nodes and of these pages; it is announced when it is ready.

        Args:
            history: File that keeps its curves over a restart.
        """
        pages = (*(self.cluster.pages if self.cluster else ()), *pages)
        if self._wants_dashboard and pages:
            self._board = local_cluster.show(self._launcher, pages, history)

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
