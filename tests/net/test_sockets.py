"""Tests of addresses, paths, and the options of every socket."""

import contextlib
import os
import re
import socket
import time
from collections import deque
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import zmq

import memoire
from memoire.errors import EndpointError, ParameterError
from memoire.limits import Limits
from memoire.net import addresses, sockets
from memoire.net import addresses as resolver
from memoire.net.poller import Sender
from memoire.net.sockets import shared_context, use_io_threads
from memoire.wire import layout
from netkit import DEADLINE, SCHEMA, KeepingContext, record, until


@pytest.fixture
def context():
    with KeepingContext() as keeping:
        yield keeping


@pytest.mark.parametrize(
    ("endpoint", "push", "publish"),
    [
        ("tcp://*:5560", "tcp://*:5561", "tcp://*:5562"),
        ("tcp://[::1]:5560", "tcp://[::1]:5561", "tcp://[::1]:5562"),
        ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("ipc:///run/relay", "ipc:///run/relay.push", "ipc:///run/relay.pub"),
        ("inproc://here", "inproc://here.push", "inproc://here.pub"),
    ],
)
def test_data_and_notices_have_addresses_beside_the_requests(endpoint, push, publish):
    assert addresses.derived_addresses(endpoint) == (push, publish)


@pytest.mark.parametrize("endpoint", ["tcp://*:65534", "tcp://*:x", "udp://*:1", "nonsense", ""])
def test_an_address_without_room_beside_it_is_refused(endpoint):
    with pytest.raises(EndpointError):
        addresses.derived_addresses(endpoint)


@pytest.mark.parametrize(
    ("dialled", "endpoint", "seen"),
    [
        ("tcp://proxy:5560", "tcp://*:5561", "tcp://proxy:5561"),
        ("tcp://proxy:5560", "tcp://0.0.0.0:5561", "tcp://proxy:5561"),
        ("tcp://[::1]:5560", "tcp://[::]:5561", "tcp://[::1]:5561"),
        ("tcp://proxy:5560", "tcp://10.0.0.7:5561", "tcp://10.0.0.7:5561"),
        ("ipc:///a", "ipc:///a.push", "ipc:///a.push"),
    ],
)
def test_a_wildcard_host_is_the_host_that_was_dialled(dialled, endpoint, seen):
    assert addresses.seen_from(dialled, endpoint) == seen


def test_a_taken_address_is_an_error_that_names_it(context, times):
    times(address_taken=0.05)
    first = sockets.data_receiver(context, 100)
    endpoint = sockets.bind(first, "tcp://127.0.0.1:0")
    assert endpoint.rpartition(":")[2] != "0"
    with pytest.raises(EndpointError, match="cannot bind 'tcp://127.0.0.1:.*in use"):
        sockets.bind(sockets.data_receiver(context, 100), endpoint)


@pytest.mark.parametrize("endpoint", ["", "tcp://", "tcp://127.0.0.1", "bogus://x", "ipc://" + "x" * 200])
def test_a_malformed_address_is_an_error(context, endpoint):
    with pytest.raises(EndpointError, match="cannot"):
        sockets.bind(sockets.data_receiver(context, 100), endpoint)


def test_no_subscription_is_lost_however_many_are_made_at_once(context):
    publisher, subscriber = sockets.publisher(context), sockets.subscriber(context, 1 << 20)
    address = sockets.bind(publisher, "tcp://127.0.0.1:0")
    sockets.connect(subscriber, address)
    wanted = {b"topic %d" % number for number in range(1000)}
    for topic in wanted:
        subscriber.setsockopt(zmq.SUBSCRIBE, topic)
    heard = set()
    deadline = time.monotonic() + DEADLINE
    while heard != wanted and time.monotonic() < deadline:
        publisher.poll(100)
        heard.update(sockets.subscribed(publisher))
    assert heard == wanted
    publisher.close()
    subscriber.close()


def test_frames_beyond_the_bound_are_not_kept(context):
    receiver, sender = sockets.data_receiver(context, 100), sockets.data_sender(context)
    sockets.bind(receiver, "inproc://many")
    sockets.connect(sender, "inproc://many")
    assert sockets.receive(receiver) is None
    assert sockets.send(sender, [b"x"] * 1000) and sockets.send(sender, [b"y"])
    assert receiver.poll(40_000)
    assert len(sockets.receive(receiver, most=2)) == 3
    assert [frame.bytes for frame in sockets.receive(receiver)] == [b"y"]


@pytest.mark.parametrize(
    ("endpoint", "advice"),
    [
        ("tcp://no-such-host.invalid:1", "could not be resolved"),
        ("tcp://127.0.0.1:1", "memoire doctor"),
        ("ipc:///nowhere/at/all", "no socket file"),
        ("inproc://x", "one process"),
    ],
)
def test_an_address_that_does_not_answer_is_explained(endpoint, advice):
    assert advice in resolver.why_unreachable(endpoint)


@pytest.mark.parametrize("count", [0, 65])
def test_a_number_of_threads_that_cannot_be_is_refused(count):
    with pytest.raises(ParameterError, match="a number from 1 to 64"):
        use_io_threads(count)


def test_a_forked_child_gets_a_context_of_its_own_with_the_threads_that_it_asks_for():
    mine = shared_context()
    assert shared_context() is mine
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        use_io_threads(3)
        os.write(writer, f"{shared_context() is mine} {shared_context().get(zmq.IO_THREADS)}".encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "False 3"


def test_a_libzmq_that_can_be_told_to_reads_too_little_at_a_time_for_a_message_and_a_ping(context, monkeypatch):
    values = []
    monkeypatch.setattr(sockets.zmq, "has", lambda feature: feature == "draft")
    monkeypatch.setattr(
        zmq.Socket,
        "setsockopt",
        lambda router, option, value, real=zmq.Socket.setsockopt: (
            values.append(value) if option == zmq.IN_BATCH_SIZE else real(router, option, value)
        ),
    )
    router = sockets.request_server(context, 1000)
    sockets.ask_for_keys(router, zmq.curve_keypair()[1], "domain")
    ping = b"\x04PING"
    header = 2  # flags and size of a frame
    encrypted = len(b"\x07MESSAGE") + 8 + 16 + 1  # counter, checksum and flags
    assert values == [header + len(ping), header + encrypted + len(ping)]


def test_a_large_payload_that_goes_to_many_peers_is_one_frame(context):
    shared, body, other = sockets.SharedFrame(), bytes(sockets.COPY_BELOW), bytes(sockets.COPY_BELOW + 1)
    frame = shared.share(memoryview(body))
    assert isinstance(frame, zmq.Frame) and shared.share(memoryview(body)) is frame
    assert shared.share(memoryview(other)) is not frame and shared.share(memoryview(other)).bytes == other
    unshared = [None, body, memoryview(body)[1:], memoryview(bytearray(body)), memoryview(bytes(10))]
    assert all(shared.share(payload) is payload for payload in unshared)


# --- docs/development/wire.md lists the options of sockets, which are read back from each role and from nodes

ROOT = Path(__file__).parents[2]
LIMITS = Limits.of(request_bytes=700_000, message_bytes=5_000_000)


def table(heading):
    """Return the rows of the first table under a heading, each a dictionary by column."""
    text = (ROOT / "docs" / "development" / "wire.md").read_text(encoding="utf-8").partition(f"\n### {heading}\n")[2]
    rows = [
        [cell.strip() for cell in line.strip("| \n").split(" | ")]
        for line in re.findall(r"^\|.*$", text.partition("\n### ")[0], re.M)
    ]
    return [dict(zip(rows[0], row, strict=False)) for row in rows[2:]]


COMMON = {row["option"]: row["value"] for row in table("Options of every socket")}
ROLES = {row["role"]: row for row in table("Options of each role")}


def expected(text, usual=0):
    """Return the value of a text like "message_bytes + 65536", where usual pushes have `usual` bytes."""
    sizes = {
        "largest push": sockets.largest_push(usual, LIMITS.message_bytes),
        "reply_bytes": LIMITS.reply_bytes,
        **vars(LIMITS),
        **vars(LIMITS.tuning),
    }
    return sum(sizes[word] if word in sizes else int(word) for word in text.split(" + "))


def make(role, context):
    longest = expected(ROLES[role]["MAXMSGSIZE"])
    return getattr(sockets, role)(context, *([] if longest == 1024 else [longest]))


def check(opened, row, usual=(0,)):
    special = {option: row[option] for option in ("SNDHWM", "RCVHWM", "IMMEDIATE", "TCP_MAXRT")}
    for option, value in {**COMMON, **special}.items():
        low, _, high = value.partition("-")
        assert int(low) <= opened.getsockopt(getattr(zmq, option)) <= int(high or low), option
    assert opened.getsockopt(zmq.MAXMSGSIZE) in [expected(row["MAXMSGSIZE"], size) for size in usual]


def test_the_page_names_every_role_and_every_option():
    source = (ROOT / "memoire" / "net" / "sockets.py").read_text(encoding="utf-8")
    roles = set(re.findall(r"^def (\w+)\(context: Context.*\) -> Socket:", source, re.M))
    assert roles == set(ROLES) | {"authenticator"}  # only ZeroMQ uses "authenticator", inside the process
    options = set(re.findall(r"zmq\.([A-Z0-9_]+): ", source))
    assert options == set(COMMON) | {"SNDHWM", "RCVHWM", "MAXMSGSIZE", "IMMEDIATE", "TCP_MAXRT"}


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_what_the_page_says(context, role):
    opened = make(role, context)
    assert opened.getsockopt(zmq.TYPE) == getattr(zmq, ROLES[role]["type"])
    check(opened, ROLES[role])


def test_the_sockets_of_living_nodes_have_it_too(cluster):
    server = cluster.server(limits=LIMITS)
    usual = 0, layout.usual_bytes(server.schema, server.parameters)  # a proxy does not know its pushes
    proxy = cluster.proxy([server], limits=LIMITS)
    client = cluster.client(proxy, limits=LIMITS)
    record(client)
    assert client.push_cache()
    until(lambda: server.total_caches == 1)
    cluster.reader([proxy], limits=LIMITS)
    by_type = {getattr(zmq, row["type"]): row for role, row in ROLES.items() if role != "plain_dealer"}
    seen = set()
    for opened in cluster.context.__dict__["kept"]:
        if opened.closed or opened.getsockopt(zmq.TYPE) == zmq.PAIR:  # a monitor
            continue
        check(opened, by_type[opened.getsockopt(zmq.TYPE)], usual)
        seen.add(opened.getsockopt(zmq.TYPE))
    assert seen == set(by_type)


def test_no_other_module_makes_a_socket_or_sets_its_options():
    """Subscriptions and ZeroMQ's monitor sockets are left out."""
    counts = {}
    for path in (ROOT / "memoire").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        uses = [
            use
            for use in re.findall(r"setsockopt\((zmq[\w. ]+)|context\.(socket)\(", text)
            if not use[0].startswith("zmq.SUBSCRIBE")
        ]
        if uses and path.name not in ("sockets.py", "context.py"):
            counts[path.name] = len(uses)
    assert counts == {}


# --- The server examines the path of a Unix socket first, since ZeroMQ would remove a file at the path


def server(path: Path) -> memoire.Server:
    return memoire.Server(f"ipc://{path}", SCHEMA)


def proxy(path: Path) -> memoire.Proxy:
    return memoire.Proxy(f"ipc://{path}", ["tcp://127.0.0.1:9"])


@pytest.mark.parametrize("node", [server, proxy])
@pytest.mark.parametrize("ending", ["", ".push", ".pub"])
def test_a_file_at_the_path_is_refused_and_left(tmp_path: Path, node, ending: str, times) -> None:
    times(address_taken=0.05)
    path = tmp_path / f"relay{ending}"
    path.write_text("my thesis")
    with pytest.raises(EndpointError, match=r"relay\S* exists and is not a socket"):
        node(tmp_path / "relay")
    assert path.read_text() == "my thesis"


@pytest.mark.parametrize("node", [server, proxy])
def test_a_path_on_which_a_process_listens_is_kept(tmp_path: Path, node, times) -> None:
    with server(tmp_path / "relay") as first:
        times(address_taken=0.05)
        with pytest.raises(EndpointError, match="in use"):
            node(tmp_path / "relay")
        with memoire.connect(first.endpoint) as client:
            client.update(60.0)


def test_a_socket_of_another_kind_is_refused(tmp_path: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as other:
        other.bind(f"{tmp_path}/relay")
        with pytest.raises(EndpointError, match="cannot be probed for a process that listens"):
            server(tmp_path / "relay")


# --- A sending socket is watched for room only while messages wait


class Socket:
    """Fake socket that takes as many messages as it has room for."""

    def __init__(self, room):
        self.room, self.took = room, []

    def send_all(self, queue):
        while queue and self.room:
            self.room -= 1
            self.took.append(queue.popleft())
        return not queue


@pytest.mark.parametrize("is_reading", [True, False])
def test_room_is_awaited_while_something_waits(is_reading):
    poller, sending, queue = Mock(), Socket(room=2), deque([1, 2, 3])
    poller.add.return_value = sending
    sender = Sender(poller, is_reading=is_reading)
    sender.use(sending)
    expected = [call.add(sending, reading=is_reading)]
    assert poller.method_calls == expected
    for room, is_empty, watched in ((2, False, [True]), (0, False, []), (1, True, [False]), (0, True, [])):
        sending.room = room
        assert sender.tick(lambda sending: sending.send_all(queue)) is is_empty
        expected += [call.watch(sending, reading=is_reading, writing=writing) for writing in watched]
        assert poller.method_calls == expected
    assert sending.took == [1, 2, 3]
