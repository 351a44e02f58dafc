"""Tests of memoire's changes to its process, and of processes that may open few files."""

import contextlib
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import memoire
from history.ports import block
from memoire.net import process as descriptors
from netkit import DEADLINE, SCHEMA, FakeSystem, in_thread, until
from tcpkit import GREETING, ready

pytestmark = pytest.mark.slow

START = """
import atexit, os, resource, threading
original = threading.excepthook

def report():  # runs after memoire has closed its nodes
    print("kept" if kept else "-", "hook" if threading.excepthook is not original else "-", "guard" if guarded else "-")

atexit.register(report)
import memoire
from memoire import _core
from memoire.net import process as descriptors

kept, guarded, soft = [], False, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
_core.keep_freed_memory = lambda: kept.append(True)
schema = {"obs": memoire.Column("float32", (3,), "state"), "reward": memoire.Column("float32", (), "reward")}

def look():
    global guarded
    guarded = resource.getrlimit(resource.RLIMIT_NOFILE)[0] < soft and bool(descriptors.shared_guard().reserved)
"""
SERVER = """
server = memoire.Server("tcp://127.0.0.1:0", schema, keys=None{option})
look()
"""
READER = """
reader = memoire.Reader(["tcp://127.0.0.1:9"], timeout=None{option})
look()
"""
PROXY = """
proxy = memoire.Proxy("tcp://127.0.0.1:0", ["tcp://127.0.0.1:9"]{option})
look()
"""
CLIENT = """
buffer = memoire.Buffer(memoire.Schema(schema), 100)
client = memoire.connect("{endpoint}")
look()
child = os.fork()
if child == 0:
    try:
        client.stats()
    except memoire.errors.ForkedError:
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.fixture
def endpoint():
    """Yield the endpoint of a server in this process, for a client in another process."""
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA) as server:
        yield server.endpoint


def effects(source):
    """Run a source in a process, and return its effects on the process, as words."""
    done = subprocess.run(
        [sys.executable, "-c", START + source], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (SERVER, ["kept", "hook", "guard"]),
        (PROXY, ["kept", "hook", "guard"]),
        (READER, ["kept", "hook", "-"]),
    ],
    ids=["server", "proxy", "reader"],
)
def test_a_node_tunes_its_process_unless_it_is_told_not_to(node, expected):
    assert effects(node.replace("{option}", "")) == expected
    off = ", process=memoire.Process(tune=False)" if node is SERVER else ", tune_process=False"
    assert effects(node.replace("{option}", off)) == ["-", "-", "-"]


BLOCKS = """
import ctypes, threading
from memoire import _core

SIZE, libc = 23 << 20, ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def is_mapped(address):
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)

def look():  # in the arena of a thread, where two such blocks fill a heap
    first, second, third = (libc.malloc(SIZE) for _ in range(3))
    libc.free(third)
    print("mapped" if is_mapped(third + SIZE // 2) else "unmapped")

print("kept" if _core.keep_freed_memory() else "left")
thread = threading.Thread(target=look)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep what was freed")
@pytest.mark.parametrize(
    ("variables", "expected"), [({}, ["kept", "mapped"]), ({"MALLOC_TOP_PAD_": "0"}, ["left", "unmapped"])]
)
def test_three_large_messages_at_a_time_find_the_memory_of_earlier_ones(variables, expected):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS], check=True, stdout=subprocess.PIPE, text=True, timeout=100,
        env=environment | variables,
    )  # fmt: skip
    assert done.stdout.split() == expected


def test_a_buffer_and_a_client_leave_their_process_as_it_is_and_a_forked_one_is_told(endpoint):
    assert effects(CLIENT.replace("{endpoint}", endpoint)) == ["-", "-", "-"]


def test_the_programs_of_nodes_are_tuned():
    source = """
from memoire.net import process
from memoire.nodes import roles
seen = []
former = roles.Server.__init__

def made(self, *arguments, **options):
    former(self, *arguments, **options)
    seen.append(process.is_tuned())
    look()
    self.close()
    raise SystemExit

roles.Server.__init__ = made
try:
    roles.serve("tcp://127.0.0.1:0", memoire.Schema(schema), [])
except SystemExit:
    assert seen == [True]
"""
    assert effects(source) == ["kept", "hook", "guard"]


# --- A process that may open few files warns at its start, and bears more clients than its files allow


def in_child(code, *arguments):
    """Run code in a process of its own, and return the JSON that the process prints."""
    command = [sys.executable, "-c", code, *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout)


def test_a_process_may_open_as_many_as_the_system_lets_it():
    code = (
        "import json, resource; from memoire.net import process as d;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 345));"
        "print(json.dumps([d.max_descriptors(), d.raise_limit(), d.max_descriptors()]))"
    )
    assert in_child(code) == [100, 345, 345]


def test_a_limit_that_is_too_low_is_explained_with_numbers():
    guard = descriptors.DescriptorGuard(FakeSystem(256, 256))
    assert guard.limit_advice(64) == ""
    text = guard.limit_advice(300)
    assert "256 file descriptors are not enough for the 300 clients expected" in text
    assert "enough for about 64 clients" in text and "ulimit -n 964" in text


def test_a_check_of_descriptors_is_put_off_while_another_thread_changes_the_guard():
    guard = descriptors.DescriptorGuard(FakeSystem(256, 256))
    with guard._lock:
        thread, _ = in_thread(guard.tick, guard.due_at)
        thread.join(DEADLINE / 4)
        assert not thread.is_alive()


@pytest.mark.parametrize(("hard", "raised"), [(5000, 5000), (1 << 30, 1 << 20), (resource.RLIM_INFINITY, 1 << 20)])
def test_a_limit_is_raised_to_what_makes_sense(hard, raised):
    system = FakeSystem(100, hard)
    guard = descriptors.DescriptorGuard(system)
    assert guard.raise_limit() == raised and system.limits() == (raised, hard)
    system.soft = resource.RLIM_INFINITY
    assert guard.max_descriptors() == 1 << 20


SCARCE = """
import json, logging, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (900, 900))
from memoire import Proxy, Schema, Server
from memoire.limits import Limits
said = []
class Kept(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("memoire").addHandler(Kept())
schema = Schema.from_json(sys.argv[1])
with Server("tcp://127.0.0.1:0", schema, keys=None) as server, Proxy("tcp://127.0.0.1:0", [server.endpoint]) as proxy:
    shown = [(stats.descriptors, stats.most_descriptors) for stats in (server.stats(), proxy.stats())]
    before = len(said)
    Server("tcp://127.0.0.1:0", schema, limits=Limits.of(expected_clients=10)).close()
print(json.dumps([said[:before], said[before:], shown]))
"""


def test_servers_and_proxies_warn_at_their_start_and_show_the_figures():
    texts, of_few, shown = in_child(SCARCE, SCHEMA.to_json())
    warnings = [text for text in texts if "descriptors are not enough" in text]
    assert [text.split()[0] for text in warnings] == ["server", "proxy"]
    assert all(0 < used < most == 900 for used, most in shown)
    assert not of_few


PAGES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from memoire.cli.main import main
sys.exit(main())
"""


def answer(url, patience=DEADLINE / 4):
    """Return status and text of a page, or 0 and the error without an answer in `patience` seconds."""
    try:
        with urllib.request.urlopen(url, timeout=patience) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


KINDS = (b"DEALER", b"PUSH", b"SUB")
"""Types of sockets, in the order of the ports that they connect to."""


class Stranger:
    """Connection that greets and stays; a refused or ended connection is opened again."""

    def __init__(self, port, kind):
        self._address, self._greeting = ("127.0.0.1", port), GREETING + ready(kind)
        self._connect()

    def _connect(self):
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.connect_ex(self._address)
        self._has_greeted, self._until = False, time.monotonic() + 2.0

    def turn(self):
        try:
            if not self._has_greeted:
                self._socket.send(self._greeting)
                self._has_greeted = True
            is_lost = not self._socket.recv(1000)
            self._until = float("inf")  # greeted back: accepted
        except BlockingIOError:
            is_lost = time.monotonic() > self._until
        except OSError:
            is_lost = True
        if is_lost:
            self.close()
            self._connect()

    def close(self):
        self._socket.close()


def load(pid):
    """Return a process's share of a core over some time."""

    def cpu():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    began, before = time.monotonic(), cpu()
    until(lambda: time.monotonic() - began > 0.8)
    return (cpu() - before) / (time.monotonic() - began)


def test_a_flood_of_connections_leaves_descriptors_for_the_pages_and_clients_go_on(cluster, tmp_path):
    """Strangers, twice as many as there is room for, greet and stay: the server warns, does not spin, and recovers."""
    port = block(3)
    command = [sys.executable, "-u", "-c", PAGES, "server", "--endpoint", f"tcp://127.0.0.1:{port}"]
    command += ["--schema", SCHEMA.to_json(), "--http", "127.0.0.1:0"]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((tmp_path / "stderr").open("w+"))
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True))
        stack.callback(process.kill)
        process.stdout.readline()
        pages = process.stdout.readline().split()[-1].removesuffix("/status")
        client = cluster.client(f"tcp://127.0.0.1:{port}")
        strangers = [Stranger(port + number % 3, KINDS[number % 3]) for number in range(500)]
        leaving = stack.enter_context(contextlib.ExitStack())
        for stranger in strangers:
            leaving.callback(stranger.close)

        def is_full():
            for stranger in strangers:
                stranger.turn()
            return "all but a few of 256 are open; no new connection is accepted" in answer(f"{pages}/readyz", 2.0)[1]

        until(is_full)
        assert [answer(f"{pages}/livez")[0] for _ in range(3)] == [200] * 3
        client.on_entries(5)
        client.update()
        until(lambda: load(process.pid) < 0.1)
        assert load(process.pid) < 0.1  # the load stays low
        leaving.close()
        until(lambda: answer(f"{pages}/readyz")[0] == 200)
        late = cluster.client(client.endpoint)
        late.on_entries(7)
        late.update()
        assert cluster.reader([client.endpoint]).totals().totals.steps == 12
        for node in (client, late):
            node.close()
        log.seek(0)
        text = log.read()
    assert "a few of 256 are open" in text and "enough for about 64 clients" in text and "free again" in text
