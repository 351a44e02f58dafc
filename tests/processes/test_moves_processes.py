"""The same with processes that are killed, drained and taken off the list by the commands an operator has."""

import json
import os
import signal
import subprocess
import sys

import pytest

from history import ports
from memoire.cli import main
from memoire.client.client import connect
from memoire.limits import Limits
from netkit import SCHEMA, record, until

PATIENT = Limits(resend_after=0.05, resend_most=0.2, update_every=0.02, request_timeout=30.0)


class Server:
    """`memoire server` with a state folder, always at the same address under the same name."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder / name
        self.endpoint = f"tcp://127.0.0.1:{ports.block()}"
        self.process = None

    def start(self):
        arguments = ["--endpoint", self.endpoint, "--name", self.name, "--state-dir", str(self.folder), "--http", "off"]
        self.process = started("server", "--schema", SCHEMA.to_json(), *arguments)
        return self

    def kill(self):
        killed(self.process)

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(100.0) == 0


def started(*arguments):
    """A command of ours as a process that has said its address."""
    command = [sys.executable, "-u", "-m", "memoire", *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    process.endpoint = process.stdout.readline().split()[-1]
    return process


def killed(process):
    process.kill()
    process.wait(100.0)
    process.stdout.close()


@pytest.fixture
def processes():
    made = []
    yield made
    for one in made:
        killed(getattr(one, "process", one))


def totals_at(capsys, *endpoints, status=0):
    """What `memoire totals` prints for a script."""
    assert main.main(["totals", "--json", *endpoints]) == status
    return json.loads(capsys.readouterr().out)


def test_totals_are_exact_over_kills_a_drain_and_a_changed_list(processes, tmp_path, capsys):
    servers = [Server(name, tmp_path) for name in ("a", "b")]
    processes += servers
    for server in servers:
        server.start()
    listed = tmp_path / "servers"
    listed.write_text("# all of them\n" + "\n".join(server.endpoint for server in servers))
    proxy = started("proxy", "--endpoint", "tcp://127.0.0.1:0", "--http", "off", "--servers-file", str(listed))
    processes.append(proxy)
    clients = [connect(proxy.endpoint, seed=seed, capacity=1000, limits=PATIENT, timeout=100.0) for seed in range(6)]
    try:
        act(clients)
        assert main.main(["drain", servers[0].endpoint, "--to", servers[1].endpoint]) == 0
        assert "a may be stopped" in capsys.readouterr().out
        assert {client.home for client in clients} == {"b"}
        listed.write_text(servers[1].endpoint)
        servers[0].end()
        act(clients)
        servers[1].kill()  # it has what a had counted, on disk
        act(clients, wait=False)  # whose home is away keeps what it counts
        servers[1].start()
        act(clients)
        told = until(lambda: totals_at(capsys, proxy.endpoint))
        assert (told["missing"], told["servers"], told["durable"]) == ([], ["b"], True)
        assert told["totals"]["clients"] == len(clients)
        assert told["totals"]["episodes"] == sum(client.stats().episodes for client in clients)
        assert told["totals"]["steps"] == sum(client.stats().steps for client in clients)
    finally:
        for client in clients:
            client.close(0.2)


def act(clients, wait=True):
    for number, client in enumerate(clients):
        record(client, episodes=number + 1, length=5)
        client.push_cache(0.0)
        client.log("a line")
    for client in clients if wait else ():
        client.update(100.0)
