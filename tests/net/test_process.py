"""What memoire changes in the process that it runs in: each case in a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

import memoire

pytestmark = pytest.mark.slow

START = """
import atexit, resource, threading
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
"""
OFF = ", tune_process=False"


@pytest.fixture
def endpoint():
    """Of a server in this process, for a client in another."""
    schema = {"obs": memoire.Column("float32", (3,), "state"), "reward": memoire.Column("float32", (), "reward")}
    with memoire.Server("tcp://127.0.0.1:0", schema) as server:
        yield server.endpoint


def effects(source):
    """What a process that runs this does to itself."""
    done = subprocess.run(
        [sys.executable, "-c", START + source], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("node", "found"),
    [
        (SERVER, ["kept", "hook", "guard"]),
        (PROXY, ["kept", "hook", "guard"]),
        (READER, ["kept", "hook", "-"]),
    ],
    ids=["server", "proxy", "reader"],
)
def test_a_node_tunes_its_process_unless_it_is_told_not_to(node, found):
    assert effects(node.replace("{option}", "")) == found
    assert effects(node.replace("{option}", OFF)) == ["-", "-", "-"]


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
    ("told", "found"), [({}, ["kept", "mapped"]), ({"MALLOC_TOP_PAD_": "0"}, ["left", "unmapped"])]
)
def test_three_large_messages_at_a_time_find_the_memory_of_earlier_ones(told, found):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS], check=True, stdout=subprocess.PIPE, text=True, timeout=100,
        env=environment | told,
    )  # fmt: skip
    assert done.stdout.split() == found


def test_a_buffer_and_a_client_leave_their_process_as_it_is(endpoint):
    assert effects(CLIENT.replace("{endpoint}", endpoint)) == ["-", "-", "-"]


def test_the_readers_of_other_tables_do_as_the_first_one():
    other = READER.replace("{option}", OFF) + 'reader._of_table("another")\nlook()\n'
    assert effects(other) == ["-", "-", "-"]


def test_one_node_that_asks_for_it_is_enough():
    both = READER.replace("{option}", OFF) + SERVER.replace("{option}", "")
    assert effects(both) == ["kept", "hook", "guard"]


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
    roles.serve("tcp://127.0.0.1:0", memoire.Schema(schema), [], run=None, name=None, cache_limit=0, byte_limit=0)
except SystemExit:
    assert seen == [True]
"""
    assert effects(source) == ["kept", "hook", "guard"]


def test_a_client_in_a_forked_process_says_so_without_tuning(endpoint):
    source = """
import os
client = memoire.connect("{endpoint}")
child = os.fork()
if child == 0:
    try:
        client.stats()
    except memoire.errors.ForkedError:
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    assert effects(source.replace("{endpoint}", endpoint)) == ["-", "-", "-"]


def test_tuning_happens_once():
    source = """
from memoire.net import process
assert not process.is_tuned() and not kept
process.tune()
process.tune()
assert process.is_tuned() and kept == [True]
"""
    assert effects(source) == ["kept", "-", "-"]
