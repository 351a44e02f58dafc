"""Helpers for tests of sockets: a small schema, recorded entries, waits for conditions, and a lossy proxy."""

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import zmq

from history.ports import held
from memoire.client.client import connect
from memoire.limits import Limits, wall_clock
from memoire.net import sockets
from memoire.net.process import System
from memoire.proxy.proxy import Proxy
from memoire.reader.reader import Reader
from memoire.replay.schema import Schema
from memoire.server.server import Server
from memoire.server.settings import Endpoints, Process, State
from memoire.wire.frames import Message, MessageHeader

SCHEMA = Schema({"obs": (np.float32, (4,)), "action": np.int32, "reward": np.float32})
WIDE = Schema({"obs": (np.float32, (4000,)), "reward": np.float32})
QUICK = Limits.of(resend_after=0.05, resend_most=0.2, update_every=0.02)
"""Limits with quick resends, so that tests of losses are short."""


DEADLINE = 100.0
"""Seconds after which a test's wait has failed: far more than it takes, also on a busy machine."""


def until(condition, seconds=DEADLINE):
    """Wait until a condition is true, and return its value; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def is_alive(pid):
    """Return True if the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def program(*words, **options):
    """Run Python with these arguments as a process, which is killed at the end; stdout and stderr are one text."""
    command = [sys.executable, "-u", *map(str, words)]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **both | options) as process:
        try:
            yield process
        finally:
            process.kill()


def surroundings(**changes):
    """Return variables for a process that works in another folder: paths of imports are absolute."""
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **changes}


def entry(schema, value):
    """Return an entry whose every number is `value`."""
    return tuple(np.full(schema[name].shape, value, schema[name].dtype) for name in schema.entry_names)


def record(client, episodes=1, length=20, value=None):
    """Record episodes into a client's memory and count them; entry t of an episode holds t (or `value`)."""
    memory, schema = client.memory, client.schema
    for _ in range(episodes):
        memory.open()
        for step in range(length):
            memory.add(0, entry(schema, step if value is None else value))
        memory.close(terminated=True)
        client.on_entries(length)
        client.on_episode(0, length, float(length))


def fill(client, caches=2, **options):
    """Record episodes, and push caches of these episodes until all are at the server."""
    record(client, **options)
    for _ in range(caches):
        assert client.push_cache(100.0)

    def are_there():  # an UPDATE may overtake the caches
        client.update(100.0)
        return client.stats().in_flight_caches == 0

    until(are_there)


class FakeSystem(System):
    """Fake process with limits on descriptors (`soft`, `hard`), `open` descriptors, and the `filters` that were set."""

    def __init__(self, soft, hard):
        self.soft, self.hard, self.open, self.filters = soft, hard, 0, []

    def limits(self):
        return self.soft, self.hard

    def set_limits(self, soft, hard):
        self.soft, self.hard = soft, hard

    def open_descriptors(self):
        return self.open

    def filter_packets(self, fd, on):
        self.filters.append((fd, on))


def pool_in(server, table=None):
    """Return a server's pool of a table, by default the first, for tests that compare the pool with something else."""
    return table_in(server, table).pool


def table_in(server, table=None):
    """Return a server's table, by default the first, for tests that look at its limiter."""
    return server._tables[table or server.tables[0]]


def ports_of(node):
    """Return a node's addresses for requests, for pushes and of notices."""
    return [node.endpoint, node.push_endpoint, node.pub_endpoint]


class Load:
    """Clients that record, push and log all the time, each in a thread."""

    def __init__(self, clients, pause=0.002):
        self.clients, self.pause, self.stopped = clients, pause, threading.Event()
        self.threads = [in_thread(self._work, client) for client in clients]

    def _work(self, client):
        number = 0
        while not self.stopped.wait(self.pause):
            record(client, length=3)
            client.push_cache(0.0)
            number += client.log(f"line {number}")
        client.update(DEADLINE)
        return number

    def stop(self):
        """Stop the clients; return the number of lines that each client logged, all of which are acknowledged."""
        self.stopped.set()
        for thread, _ in self.threads:
            thread.join(DEADLINE)
        assert not [box["error"] for _, box in self.threads if "error" in box]
        return [box["value"] for _, box in self.threads]


def in_thread(function, *arguments):
    """Run a function in a daemon thread; return (thread, box), where box gets "value" or "error"."""
    box = {}

    def run():
        try:
            box["value"] = function(*arguments)
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, box


@contextlib.contextmanager
def switching_often():
    """Let threads take turns at any place, not after milliseconds."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@contextlib.contextmanager
def dealer(endpoint, *keys):
    """Open a bare socket to a node, for messages that no client sends; `keys` are arguments of `sockets.use_keys`."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if keys:
            sockets.use_keys(socket, *keys)
        socket.connect(endpoint)
        yield socket


WORKERS = tuple(f"memoire-{name}" for name in ("authenticator", "client", "proxy", "reader", "requests", "pull"))


class KeepingContext(zmq.Context):
    """ZeroMQ context that closes all of its sockets at its end, also sockets that a test dropped."""

    def __init__(self):
        super().__init__()
        self.__dict__["kept"] = []
        self.__dict__["others"] = set(threading.enumerate())  # older threads use no sockets of this context

    def socket(self, *arguments, **options):
        socket = super().socket(*arguments, **options)
        self.__dict__["kept"].append(socket)
        return socket

    def __exit__(self, *_):
        # On a busy machine a thread may still use its sockets. Closing the sockets meanwhile ends the process with an
        # assertion of ZeroMQ.
        deadline = time.monotonic() + DEADLINE
        for thread in set(threading.enumerate()) - self.__dict__["others"]:
            if thread.name.startswith(WORKERS):
                until(lambda: thread.is_alive() or thread not in threading.enumerate())  # noqa: B023  it may be new
                thread.join(max(0.0, deadline - time.monotonic()))
        for socket in self.__dict__["kept"]:
            socket.close(0)
        self.term()


class FaultyWay:
    """Request proxy that drops, doubles and delays messages in both directions, by a seed."""

    def __init__(self, context, back, *, drop=0.3, double=0.2, seed=0):
        self.context, self.rng, self.drop, self.double = context, random.Random(seed), drop, double
        self.done = Counter()
        self.front = context.socket(zmq.ROUTER)
        self.front.linger = 0
        port = self.front.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.back = context.socket(zmq.DEALER)
        self.back.linger = 0
        self.back.connect(back)
        self.stopped = threading.Event()
        self.kept = []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        poller = zmq.Poller()
        for socket in (self.front, self.back):
            poller.register(socket, zmq.POLLIN)
        while not self.stopped.is_set():
            for socket, _ in poller.poll(20):
                other = self.back if socket is self.front else self.front
                self.carry(other, socket.recv_multipart())
        self.front.close(0)
        self.back.close(0)

    def carry(self, other, frames):
        chance = self.rng.random()
        if chance < self.drop:
            self.done["dropped"] += 1
            return
        if chance < self.drop + self.double:
            self.kept.append((other, frames))
        other.send_multipart(frames)
        if len(self.kept) > 3:  # old messages come again, out of order
            late, again = self.kept.pop(self.rng.randrange(len(self.kept)))
            late.send_multipart(again)

    def close(self):
        self.stopped.set()
        self.thread.join(DEADLINE)


KEPT = ("snapshot_caches", "snapshot_every", "discard_mismatched")


def server_of(endpoint, schema=None, **flat):
    """Return a server; settings of its state, its addresses and its process may be plain keywords."""
    if kept := {name: flat.pop(name) for name in KEPT if name in flat}:
        flat["state"] = State(flat["state"], **kept)
    at = Endpoints(endpoint, push=flat.pop("push_endpoint", None), publish=flat.pop("pub_endpoint", None))
    shared = Process(context=flat.pop("context", None), clock=flat.pop("clock", wall_clock))
    return Server(at, schema, process=shared, **flat)


class Cluster:
    """Servers, proxies, clients and readers of one test; all end with it."""

    def __init__(self):
        self.context = KeepingContext()
        self.made = []
        self.ports = ExitStack()

    def keep(self, node):
        self.made.append(node)
        return node

    def server(self, endpoint="", schema=SCHEMA, **options):
        endpoint = endpoint or self.address()
        return self.keep(server_of(endpoint, schema, **{"seed": 1, "context": self.context} | options))

    def address(self):
        """Return an address that stays reserved with the two ports after it, also while its server restarts."""
        return f"tcp://127.0.0.1:{self.ports.enter_context(held(3))}"

    def proxy(self, servers, front="", **options):
        urls = [server if isinstance(server, str) else server.endpoint for server in servers]
        return self.keep(Proxy(front or self.address(), urls, context=self.context, **options))

    def client(self, node, **options):
        url = node if isinstance(node, str) else node.endpoint
        return self.keep(connect(url, context=self.context, **{"seed": 2, "capacity": 1000, "timeout": 20.0} | options))

    def reader(self, nodes, **options):
        urls = [node if isinstance(node, str) else node.endpoint for node in nodes]
        return self.keep(Reader(urls, context=self.context, **{"seed": 3, "timeout": 20.0} | options))

    def way(self, node, **options):
        return self.keep(FaultyWay(self.context, node.endpoint, **options))

    def restart(self, server, **options):
        """Close a server and return a new one with the same addresses, name and run, but without any content."""
        server.close()
        same = {"push_endpoint": server.push_endpoint, "pub_endpoint": server.pub_endpoint, "run": server.run}
        return self.server(server.endpoint, server.schema, name=server.name, **same | options)

    def close(self):
        # A node closes before the nodes that receive its reports, as when the interpreter ends.
        self.made.reverse()
        self.made.sort(key=lambda node: getattr(node, "CLOSED_AT_EXIT", 1))
        for node in self.made:
            node.close() if isinstance(node, FaultyWay) else node.close(0.2)
        self.context.__exit__()
        self.ports.close()


CLIENT = b"\7" * 16


def reply(body, *, run=0, home=0, fingerprint=0, payload=None):
    """Return a message with this body, as a client receives it."""
    header = MessageHeader(
        type=body.type, table=0, client=CLIENT, run=run, home=home, sequence=1, fingerprint=fingerprint,
        payload_bytes=0, payload_checksum=0,
    )  # fmt: skip
    return Message(header, body, payload)


class Book:
    """Name server with addresses by `known` host, a list of `asked` hosts, and hosts for which it hangs."""

    def __init__(self, **known):
        self.known, self.asked, self.hanging = known, [], set()
        self.released = threading.Event()

    def __call__(self, host):
        self.asked.append(host)
        if host in self.hanging:
            self.released.wait(100.0)
        if host not in self.known:
            raise OSError(-2, "Name or service not known")
        return list(self.known[host])
