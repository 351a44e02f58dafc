"""Server and proxy as processes, and processes of clients that answer questions over pipes."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from _kit import ROOT

from memoire.replay.schema import Schema

SPAWN = multiprocessing.get_context("spawn")


class Command:
    """Process of `memoire server` or `memoire proxy`."""

    def __init__(self, role: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "memoire", role, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.pid, self.endpoint = self.process.pid, line.partition(": ")[2].strip().replace("*", "127.0.0.1")
        assert self.endpoint, f"memoire {role} said {line!r}"

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def nodes(schema: Schema, *settings: str) -> Iterator[tuple[Command, Command]]:
    """Start a server, and a proxy in front of it."""
    with ExitStack() as stack:
        server = Command("server", "--endpoint", "tcp://127.0.0.1:0", "--schema", schema.to_json(), *settings)
        stack.callback(server.end)
        proxy = Command("proxy", "--endpoint", "tcp://127.0.0.1:0", server.endpoint)
        stack.callback(proxy.end)
        yield server, proxy


class Peers:
    """Processes with several clients each; `ask` puts one question to all processes and gathers the answers.

    Args:
        work: Runs in each process; gets its first client's number, a number of clients, a pipe, and `arguments`.
    """

    def __init__(self, work: Callable[..., None], clients: int, each: int, *arguments: Any) -> None:
        self._pipes, self._processes = [], []
        for first in range(0, clients, each):
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(
                target=work, args=(first, min(each, clients - first), theirs, *arguments), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [int(process.pid or 0) for process in self._processes]

    def ask(self, question: Any, seconds: float = 300.0) -> list[Any]:
        """Ask all processes the same question; return their answers."""
        for pipe in self._pipes:
            pipe.send(question)
        return self.answers(seconds)

    def answers(self, seconds: float = 300.0) -> list[Any]:
        replies = []
        for pipe in self._pipes:
            if not pipe.poll(seconds):
                raise TimeoutError("a process with clients did not answer")
            replies.append(pipe.recv())
        return replies

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10.0)
