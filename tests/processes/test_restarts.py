"""Tests of servers as processes with a state folder: killed, terminated and restarted, they count exactly."""

import contextlib
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memoire
from history import trial
from history.ports import block
from memoire.errors import MemoireTimeout
from netkit import QUICK, SCHEMA, Load, program, until
from tcpkit import flood, place


class Process:
    """`memoire server` on its own folder and ports, which can be killed and started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options = folder, options
        self.endpoint = f"tcp://127.0.0.1:{block(3)}"
        self.process: subprocess.Popen[str] | None = None

    def start(self, program: tuple[str, ...] = ("-m", "memoire")) -> None:
        command = [sys.executable, "-u", *program, "server", "--http", "off", "--name", "home"]
        command += ["--endpoint", self.endpoint, "--schema", SCHEMA.to_json(), "--state-dir", str(self.folder)]
        self.process = subprocess.Popen(
            [*command, *self.options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.endpoint.rpartition(":")[2] in self.process.stdout.readline()

    def end(self, number: int) -> int:
        """Send a signal, and return the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(100.0)
        self.process.communicate()
        return status

    def saved(self) -> memoire.Server:
        """Return a server without addresses that shows the folder's content."""
        return memoire.Server(None, SCHEMA, name="home", state=self.folder)


@contextlib.contextmanager
def node(folder: Path, *options: str) -> Iterator[Process]:
    server = Process(folder, *options)
    server.start()
    try:
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.end(signal.SIGKILL)


def test_nothing_is_lost_or_doubled_while_processes_are_killed(tmp_path: Path) -> None:
    """Simulated trials have the other faults and storages; `make soak SOAK=killed_cluster` is the long form."""
    outcome = trial.run(trial.Settings(seed=1, seconds=6, kills=3, stops=1, terms=1, runs=2), tmp_path)
    print(outcome)
    assert not outcome.violations, outcome
    assert sum(outcome.figures["killed"].values()) == 3
    assert outcome.figures["delivered"] >= 12
    assert outcome.figures["caches_accepted"] > 0 < outcome.figures["samples_drawn"]


def test_a_server_that_a_raw_peer_ends_from_outside_goes_on_exactly_when_it_is_started_again(tmp_path: Path) -> None:
    with node(tmp_path / "state") as server:
        client = memoire.connect(server.endpoint, seed=1, capacity=1000, limits=QUICK, timeout=100.0)
        load = Load([client], pause=0.01)
        until(lambda: client.stats().updates > 3)
        for _ in range(10):  # a fixed libzmq survives ten rounds
            with contextlib.suppress(OSError):
                flood(place(server.endpoint), b"DEALER")
        assert server.end(signal.SIGKILL) in (-signal.SIGABRT, -signal.SIGKILL)
        server.start()
        (lines,), stats = load.stop(), client.stats()
        assert server.end(signal.SIGTERM) == 0
        with server.saved() as saved:
            assert (saved.total_episodes, saved.total_steps) == (stats.episodes, stats.steps)
            texts = [entry.line.text for entry in saved.search(most=10_000)]
            assert texts == [f"line {number}" for number in range(lines)]
        client.close()


def test_a_second_signal_ends_a_process_that_is_still_saying_goodbye(tmp_path: Path) -> None:
    """The process waits for a stopped client, which has not learned that the run is over."""
    with node(tmp_path / "state") as server:
        server.end(signal.SIGKILL)
        server.start(("-c", PATIENT))
        with program("-c", LISTENER, server.endpoint) as stopped:
            assert stopped.stdout.readline() == "ready\n"
            stopped.send_signal(signal.SIGSTOP)
            with memoire.Reader([server.endpoint]) as reader:
                reader.finish()
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                server.process.wait(0.7)
            assert server.end(signal.SIGTERM) == 128 + signal.SIGTERM
        server.start()  # the folder is intact
        assert server.end(signal.SIGTERM) == 0


PATIENT = """
import sys, memoire.cli.main, memoire.server.io_requests
memoire.server.io_requests.UNREPORTED_TIMEOUT = 300.0  # it does not matter how long ago the client was heard
sys.exit(memoire.cli.main.main(sys.argv[1:]))
"""
LISTENER = """
import sys, time, memoire
with memoire.connect(sys.argv[1]) as client:
    client.on_episode(0, 1, 1.0)
    client.update()
    print("ready", flush=True)
    time.sleep(60.0)
"""


def test_a_server_whose_disk_fails_says_so_and_ends_and_its_clients_heal_the_next_one(tmp_path: Path) -> None:
    with node(tmp_path / "state") as server, memoire.connect(server.endpoint, seed=1, limits=QUICK) as client:
        client.update()
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (0, 0))  # each write fails from now on, for good
        client.on_episode(0, 10, 1.0)
        with pytest.raises(MemoireTimeout):
            client.update(timeout=0.4)
        _, words = server.process.communicate(timeout=100.0)
        assert server.process.returncode == 1 and "Traceback" not in words.splitlines()[-1]
        assert "could not be saved" in words and "start the server again" in words
        server.start()
        client.update(100.0)
        assert server.end(signal.SIGTERM) == 0
        with server.saved() as saved:
            assert saved.total_episodes == 1


def test_a_run_is_begun_and_ended_from_the_command_line() -> None:
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA, name="home") as server:
        for options, words in ([], "the current run at home"), (["--finish"], "finished at home"):
            command = [sys.executable, "-m", "memoire", "run", "next", server.endpoint, *options]
            output = subprocess.run(command, capture_output=True, text=True, timeout=100.0, check=True).stdout
            assert f"run 'next' is {words}" in output
            assert (server.run, server.finished) == ("next", bool(options))
