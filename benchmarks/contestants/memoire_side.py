"""What memoire's sides share: the server's pages, the dashboard's verdicts, and how long a learner waited."""

import json
import multiprocessing
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks import Run

from memoire import Server
from memoire.nodes.http import NodePages

SETTLED = 12.0
"""Seconds after the first batch from which verdicts count: rates are of the newest ten."""


class Actors:
    """Processes that call `act` with the server's address, their number and the run, until the run is over.

    They are made before there is a server: a fork has everything imported, and nothing has begun yet.
    """

    def __init__(self, act: Callable[[str, int, Run], None], count: int, run: Run) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for number in range(count):
            ours, theirs = fork.Pipe()
            self.pipes.append(ours)
            self.processes.append(fork.Process(target=self._call, args=(act, theirs, number, run), daemon=True))
            self.processes[-1].start()

    @staticmethod
    def _call(act: Callable[[str, int, Run], None], pipe: Any, number: int, run: Run) -> None:
        act(pipe.recv(), number, run)

    def begin(self, server: Server) -> None:
        for pipe in self.pipes:
            pipe.send(server.endpoint)

    def join(self) -> None:
        for process in self.processes:
            process.join(20.0)


class Observed:
    """Opens the server's pages, and has a process beside this one print what the dashboard makes of them."""

    def __init__(self, server: Server) -> None:
        self.server, self.pages = server, NodePages("127.0.0.1:0", server)
        watch = [sys.executable, Path(__file__).with_name("watch.py"), f"http://{self.pages.address}"]
        self.process = subprocess.Popen(watch, stdout=subprocess.PIPE, text=True)
        self.seen: list[tuple[float, float | None, list[str]]] = []
        """When, which share of its time the learner waits, and what is found: the worst first."""
        self._first: tuple[float, float] | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            share, *codes = json.loads(line)
            self.seen.append((time.monotonic(), share, codes))

    def begin(self) -> None:
        """From now on waiting counts: the first batch is here."""
        self._first = time.monotonic(), self.server.stats().waited

    @property
    def has_begun(self) -> bool:
        return self._first is not None

    def facts(self) -> dict[str, Any]:
        """The share of its time that the learner waited since `begin`, and what the dashboard said meanwhile."""
        assert self._first is not None
        began, waited = self._first
        share = (self.server.stats().waited - waited) / (time.monotonic() - began)
        shown = [each for each in self.seen if each[0] >= began + SETTLED]
        shares = [each[1] for each in shown if each[1] is not None]
        return {
            "waited": round(share, 4),
            "shown": [round(min(shares), 4), round(max(shares), 4)] if shares else None,
            "verdicts": dict(Counter(each[2][0] for each in shown if each[2])),
        }

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        self.pages.close()
