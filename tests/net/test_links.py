"""Tests of the way to a peer: names that hang or move, failing addresses, resent calls, and a node's feed."""

import contextlib
import os
import random
import socket
import threading
import time
from unittest.mock import Mock

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from history.ports import address, block
from memoire.errors import EndpointError, MemoireTimeout
from memoire.limits import Limits
from memoire.models import model
from memoire.models import model as notices
from memoire.models.io import NOTICES_PER_TURN, Feed
from memoire.net import addresses as resolver
from memoire.net import link as links
from memoire.net import sockets
from memoire.net.addresses import NameResolver
from memoire.net.channel import LARGE_PAYLOAD, Channel, PendingRequests
from memoire.net.poller import Poller
from memoire.replay.parameters import Parameters
from memoire.wire import messages
from memoire.wire.frames import NEWS_FRAME, encode, parse, peek
from netkit import Book, KeepingContext, record, until

pytestmark = pytest.mark.slow


@pytest.fixture
def context():
    with KeepingContext() as keeping:
        yield keeping


@pytest.fixture
def book():
    new_book = Book()
    yield new_book
    new_book.released.set()


@pytest.fixture
def poller():
    new_poller = Poller()
    yield new_poller
    new_poller.close()


class Answering:
    """ROUTER on one address that echoes every request."""

    def __init__(self, context, host="127.0.0.1", port=0):
        port = port or block(1)  # free on all addresses: no other test's node answers at a further address of a name
        self.socket = sockets.request_server(context, 1000)
        host = f"[{host}]" if ":" in host else host
        self.endpoint = sockets.bind(self.socket, f"tcp://{host}:{port}")
        self.port = int(self.endpoint.rpartition(":")[2])

    def answer(self):
        while (frames := sockets.receive(self.socket)) is not None:
            sockets.send(self.socket, frames)

    def close(self):
        self.socket.close(0)


def dial(context, poller, endpoint, book=None, **options):
    client = poller.add(sockets.request_client(context, 1000))
    known = NameResolver(book, fresh=0.0) if book is not None else None
    return client, links.dial(poller, client, endpoint, watch=True, known=known, **options)


def turning(poller, condition):
    """Run `until` while this thread waits on the poller."""

    def turned():
        poller.wait(time.monotonic() + 0.01)
        return condition()

    return until(turned)


def echoes(poller, client, answering):
    def once():
        if sockets.send(client, [b"", b"hello"]):
            answering.socket.poll(200)
            answering.answer()
            client.poll(200)
        return sockets.receive(client) is not None

    return turning(poller, once)


def test_an_address_that_does_not_answer_is_followed_by_the_next_one(context, poller, book):
    answering = Answering(context, "127.0.0.3")
    book.known["proxy"] = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    client, link = dial(context, poller, f"tcp://proxy:{answering.port}", book)
    turning(poller, lambda: link.is_connected)
    assert link.address == answering.endpoint
    echoes(poller, client, answering)


def test_addresses_that_all_fail_are_not_tried_in_a_spin(context, poller, book):
    book.known["proxy"] = ["127.0.0.1", "127.0.0.2"]
    port = block(1)
    _, link = dial(context, poller, f"tcp://proxy:{port}", book)
    began = time.monotonic()
    turning(poller, lambda: time.monotonic() - began > 1.5 and link.failures >= 2)
    seconds = time.monotonic() - began  # more than requested on a busy machine
    assert link.failures <= 20 * seconds
    assert len(book.asked) <= 2 + 4 * seconds


@pytest.mark.parametrize("later", ["127.0.0.1", "127.0.0.2"])
def test_a_server_that_restarts_or_moves_is_found_while_the_answer_about_its_name_is_fresh(
    context, poller, book, later
):
    port = block(1)
    former = Answering(context, "127.0.0.1", port)
    book.known["proxy"] = ["127.0.0.1"]
    client = poller.add(sockets.request_client(context, 1000))
    link = links.dial(poller, client, f"tcp://proxy:{port}", known=NameResolver(book))
    echoes(poller, client, former)
    former.close()
    turning(poller, lambda: link.failures)  # reported under another spelling of the address
    book.known["proxy"] = [later]
    again = Answering(context, later, port)
    turning(poller, lambda: link.connections == 2)
    assert link.address == again.endpoint
    echoes(poller, client, again)


def test_a_name_that_hangs_stalls_no_other_socket_of_the_context(context, poller, book):
    """ZeroMQ by itself stops all sockets of a context for ten seconds while it waits for a name server."""
    book.hanging.add("dead")
    answering = Answering(context)
    hung, its_link = dial(context, poller, "tcp://dead:5560", book)
    client, link = dial(context, poller, answering.endpoint)
    began = time.monotonic()
    echoes(poller, client, answering)
    assert time.monotonic() - began < 8.0
    assert its_link.address == "" and "no answer from the name server" in its_link.explain()
    poller.drop(hung)  # the poller drops a late answer
    book.known["dead"] = ["127.0.0.1"]
    book.released.set()
    echoes(poller, client, answering)


def test_a_socket_that_joined_follows_the_link_until_it_is_dropped(context, poller, book):
    port = block(1)
    former, later = Answering(context, "127.0.0.1", port), Answering(context, "127.0.0.2", port)
    book.known["proxy"] = ["127.0.0.1"]
    _, link = dial(context, poller, f"tcp://proxy:{port}", book)
    joined = poller.add(link.add_socket(sockets.request_client(context, 1000)))
    echoes(poller, joined, former)
    book.known["proxy"] = ["127.0.0.2"]
    former.close()
    echoes(poller, joined, later)
    poller.drop(joined)
    assert not link._followers


def test_localhost_is_reached_by_whichever_address_is_listened_at(context, poller):
    answering = Answering(context, "127.0.0.1")
    client, _ = dial(context, poller, f"tcp://localhost:{answering.port}")
    echoes(poller, client, answering)


@pytest.mark.parametrize(
    "endpoint", ["tcp://[::1]:5560", "tcp://[fe80::1%lo]:5560", "tcp://10.0.0.1:5560", "ipc:///no/where"]
)
def test_addresses_are_connected_to_as_they_are(context, poller, endpoint):
    _, link = dial(context, poller, endpoint)
    assert link.address == endpoint and not link.is_named


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://", "tcp://proxy", "tcp://proxy:0", "tcp://proxy:65536", "tcp://*:5560", "tcp://a b:1"]
)
def test_what_is_no_address_is_refused_at_once(context, poller, endpoint):
    client = sockets.request_client(context, 1000)
    with pytest.raises(EndpointError, match="cannot connect to"):
        links.dial(poller, client, endpoint, watch=True)
    assert client.closed


@pytest.mark.parametrize("endpoint", ["tcp://proxy:5560", "tcp://127.0.0.1:0;proxy:5560"])
def test_a_socket_is_never_given_a_name(context, endpoint):
    with pytest.raises(EndpointError, match="looked up first"):
        sockets.connect(sockets.request_client(context, 1000), endpoint)


@contextlib.contextmanager
def stranger(reply):
    """Run a TCP server without ZeroMQ that sends `reply` and hangs up, or stays silent for None; yield its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    kept = []

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                kept.append(connection)
                if reply is not None:
                    connection.sendall(reply)
                    connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join(100.0)
    for connection in kept:
        connection.close()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100, "hangs up at once. Is it another service"),
        (None, "says nothing"),
    ],
)
def test_a_stranger_is_told_from_silence_and_from_a_server_that_is_not_there(context, poller, reply, words):
    with stranger(reply) as endpoint:
        client = poller.add(sockets.request_client(context, 1000))
        client.setsockopt(zmq.HANDSHAKE_IVL, 100)
        link = links.dial(poller, client, endpoint, watch=True)
        turning(poller, lambda: words in link.explain())
        assert not link.is_connected


def test_what_a_dropped_socket_held_is_given_back(context, poller):
    answering = Answering(context)

    def used():
        return len(os.listdir("/proc/self/fd"))

    def cycle():
        client, link = dial(context, poller, answering.endpoint)
        turning(poller, lambda: link.is_connected)
        poller.drop(client)

    cycle()
    before = used()
    for _ in range(30):
        cycle()
    until(lambda: used() <= before + 2)
    assert not poller._watchers and not poller._monitors


def test_a_node_that_begins_again_hears_what_a_client_takes_before_it_gets_what_is_sent_again(context, poller):
    answering = Answering(context, port=block(1))
    limits = Limits.of(resend_after=60.0, resend_most=60.0, message_bytes=4096)
    channel = Channel(poller, context, answering.endpoint, client=bytes(16), limits=limits, rng=random.Random(1))
    channel.ask(messages.Update(), lambda answer: None)

    def requests():
        came = []

        def turned():
            channel.tick(poller.wait(time.monotonic() + 0.01))
            if answering.socket.poll(0):
                came.append(parse(sockets.receive(answering.socket)[2:]).body)
            return len(came) == 2

        until(turned)
        return came

    expected = [messages.Hello(role="client", takes={"message_bytes": 4096}), messages.Update()]
    assert requests() == expected
    answering.close()
    until(lambda: channel.tick(poller.wait(time.monotonic() + 0.01)) or channel.link.is_down)
    answering = Answering(context, port=answering.port)
    assert requests() == expected  # resends come now; other resends wait a minute
    assert (channel.connections, channel.resends, channel.renewals) == (2, 1, 0)


def test_a_damaged_reply_is_refused_and_a_large_chunk_is_left_to_whoever_copies_it(context, poller):
    answering, answers = Answering(context), []
    channel = Channel(poller, context, answering.endpoint, client=bytes(16), limits=Limits(), rng=random.Random(1))

    def turn():
        channel.tick(poller.wait(time.monotonic() + 0.01))
        return answering.socket.poll(0)

    chunk = messages.Chunk(topic="t", version=1, size=LARGE_PAYLOAD, checksum=0)
    small, large = b"abc", bytes(LARGE_PAYLOAD)
    for body, payload in ((messages.Updated(), small), (messages.Updated(), large), (chunk, small), (chunk, large)):
        channel.ask(messages.Fetch(topic="t"), answers.append)
        until(turn)
        address, _, asked = sockets.receive(answering.socket)
        header, _ = encode(body, sequence=peek([asked]).sequence, payload=payload)
        sockets.send(answering.socket, [address, b"", header, b"x" + payload[1:]])
    until(lambda: turn() or answers)
    (message,) = answers
    assert message.body == chunk and bytes(message.payload) == b"x" + large[1:] and channel.refused == {"payload": 3}


def test_a_killed_server_is_away_for_its_proxy_at_once(cluster, times):
    times(server_away=300.0)  # longer than the test takes
    servers = [cluster.server(name="a"), cluster.server(name="b")]
    proxy = cluster.proxy(servers)
    until(lambda: len(proxy.servers) == 2)
    assert not any(back.is_away for back in proxy.stats().backs)
    servers[1].close(0.0)
    until(lambda: proxy.stats().backs[1].is_away)
    assert {cluster.client(proxy).home for _ in range(5)} == {"a"}


def test_a_client_of_a_wildcard_server_moves_with_its_name(cluster, book, resolve_by):
    """Requests, caches and notices follow a service's name to another address."""
    port = block(3)
    places = [[f"tcp://127.0.0.{host}:{port + k}" for k in range(3)] for host in (1, 2)]
    first = cluster.server(places[0][0], push_endpoint=places[0][1], pub_endpoint=places[0][2], name="s")
    book.known["service"] = ["127.0.0.1"]
    resolve_by(NameResolver(book, fresh=0.0))
    client = cluster.client(f"tcp://service:{port}")
    client.update()
    book.known["service"] = ["127.0.0.2"]
    second = cluster.server(places[1][0], push_endpoint=places[1][1], pub_endpoint=places[1][2], name="s")
    first.close(0.0)
    client.on_entries(3)
    client.update(timeout=100.0)
    assert second.total_steps == 3
    second.publish("policy", b"new")
    assert client.model("policy").wait(100.0).body == b"new"


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("tcp://nobody:5560", "'nobody' could not be resolved (Name or service not known)"),
        ("tcp://dead:5560", "no answer from the name server"),
    ],
)
def test_a_name_that_leads_nowhere_is_an_error_within_the_timeout(cluster, book, resolve_by, endpoint, reason):
    book.hanging.add("dead")
    resolve_by(NameResolver(book))
    began = time.monotonic()
    for connect, at in ((cluster.client, endpoint), (cluster.reader, [endpoint])):
        with pytest.raises(MemoireTimeout) as caught:
            connect(at, timeout=0.3)
        assert reason in str(caught.value) and endpoint in str(caught.value)
    assert time.monotonic() - began < 8.0


def test_workers_of_a_server_may_connect_to_a_name(cluster, book, resolve_by):
    server = cluster.server()
    front, back = address(), address()
    book.known["back"] = ["127.0.0.1"]
    resolve_by(NameResolver(book))
    proxying = threading.Thread(target=server.run_request_proxy, args=(front, back), daemon=True)
    proxying.start()
    server.add_request_worker(f"tcp://back:{back.rpartition(':')[2]}", bind=False)
    client = cluster.client(front)
    client.on_entries(5)
    client.update()
    assert server.total_steps == 5


def test_batches_go_on_at_once_without_a_server_that_was_killed(cluster, times):
    times(left_out=300.0)
    servers = [cluster.server(parameters=Parameters(reuse_cache=True), name=name) for name in "ab"]
    for server in servers:
        client = cluster.client(server)
        record(client)
        assert client.push_cache()
        until(lambda server=server: server.total_caches == 1)
    reader = cluster.reader(servers, ahead=1)
    reader.get_batch(64)
    servers[1].close(0.0)

    def goes_on():  # a reader learns of changes when a call takes a batch
        assert len(reader.get_batch(64, timeout=100.0).ids) == 64
        return reader.stats().away == ("b",)

    until(goes_on)
    for _ in range(5):
        assert len(reader.get_batch(64, timeout=100.0).ids) == 64


def test_a_cluster_may_have_addresses_of_ipv6_only(cluster):
    server = cluster.server("tcp://[::1]:0")
    proxy = cluster.proxy([server], "tcp://[::1]:0")
    client = cluster.client(proxy)
    record(client)
    assert client.push_cache() and client.log("hello")
    client.update()
    until(lambda: server.total_caches == 1)
    server.publish("policy", b"weights")
    assert client.model("policy").wait(100.0).body == b"weights"
    assert all(address.startswith("tcp://[::1]:") for address in (proxy.endpoint, proxy.push_endpoint, client.endpoint))
    assert cluster.reader([proxy]).totals().totals.episodes == 1


def test_a_poller_lets_go_of_what_it_has_dropped(poller):
    owned = poller.add(Mock(), reading=False)
    poller.drop(owned)
    poller.close()
    owned.close.assert_called_once_with(0)


# --- Names are resolved in the background, once, and without a delay of other names


@pytest.fixture
def book_of_names():
    known = Book(proxy=["10.0.0.7", "fd00::7"])
    yield known
    known.released.set()


@pytest.mark.parametrize("host", ["nobody", "no.such.name.", ""])
def test_a_name_without_addresses_says_why(book_of_names, host):
    names = NameResolver(book_of_names)
    assert ("Name or service not known" in names.problem(host, 10.0)) == bool(host)


def test_an_answer_that_is_still_fresh_is_not_asked_for_again(book_of_names):
    names = NameResolver(book_of_names)
    assert [names.problem("proxy", 10.0) for _ in range(3)] == [""] * 3 and book_of_names.asked == ["proxy"]


def test_what_is_remembered_is_bounded(book_of_names):
    names = NameResolver(book_of_names, max_known=3)
    for k in range(10):
        names.problem(f"host{k}", 10.0)
    assert len(names._known) == 3


def test_a_forked_child_looks_names_up_by_itself():
    """A forked child resolves names although its parent holds the lock of the shared names."""
    shared = resolver.shared_names()
    with shared._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if shared.problem("localhost", 10.0) == "" else 1)
    assert os.waitpid(child, 0)[1] == 0


# --- Resends and expiry of requests, with a clock that tests hold


def started(deadline=100.0, first=1.0, most=8.0, seed=0):
    calls, answers = PendingRequests(first, most, random.Random(seed)), []
    return calls, calls.start(1, [b"frame"], deadline, answers.append, now=0.0), answers


@given(st.integers(0, 1000))
def test_the_pause_before_a_resend_doubles_up_to_the_most(seed):
    calls, call, _ = started(seed=seed, deadline=float("inf"))
    now, pauses = 0.0, []
    for _ in range(8):
        assert calls.due_requests(now) == [call]
        calls.sent(call, now)
        assert not calls.due_requests(now)
        pauses.append(call.next_send - now)
        now = calls.next_time()
    assert pauses[0] == 1.0
    for pause, bound in zip(pauses, [1, 2, 4, 8, 8, 8, 8, 8], strict=True):
        assert bound / 2 <= pause <= bound
    assert calls.resends == 7


def test_what_was_sent_on_a_connection_that_was_lost_is_due_at_once_and_nothing_else():
    calls, before, _ = started(first=50.0)
    calls.sent(before, 1.0)
    after = calls.start(2, [b"frame"], 100.0, lambda answer: None, now=2.0)
    calls.sent(after, 2.5)
    calls.resend_lost(2.0, now=3.0)
    assert calls.due_requests(3.0) == [before]
    calls.sent(before, 3.0)
    assert calls.resends == 1


# --- The feed of a node: published messages arrive whole, and the feed counts damaged messages

LIMITS = Limits()
NEWS = [NEWS_FRAME, *encode(messages.News())]


class Heard:
    """A feed, a publishing node, and the feed's messages and refusals."""

    def __init__(self, context):
        self.publisher = context.socket(zmq.XPUB)
        self.publisher.linger = 0
        self.endpoint = sockets.bind(self.publisher, "tcp://127.0.0.1:0")
        self.poller = Poller()
        self.feed = Feed(self.poller, Mock(), context=context, limits=LIMITS, keys=None)
        self.messages, self.refused = [], []

    def turn(self):
        take = lambda message, frames: self.messages.append(message)  # noqa: E731
        self.feed.tick(self.poller.wait(time.monotonic() + 0.01), take, self.refused.append)

    def until(self, condition):
        def turned():
            self.turn()
            return condition()

        until(turned)

    def subscriptions(self):
        frames = []
        while self.publisher.poll(200):
            frames.append(self.publisher.recv())
        return frames


@pytest.fixture
def heard():
    with KeepingContext() as context:
        receiving = Heard(context)
        yield receiving
        receiving.poller.close(0.0)


def notice(topic="policy", body=b"weights"):
    return notices.notice_of(model.make(topic, body, 1), LIMITS, epoch=1, run=2)


def test_what_is_damaged_is_counted_and_the_rest_comes(heard):
    heard.feed.subscribe_to(heard.endpoint)
    heard.feed.subscribe(b"", True)
    assert len(heard.subscriptions()) == 2
    for frames in ([b"x"], notice()[:1], [b"tother", *notice()[1:]], notice()):
        heard.publisher.send_multipart(frames)
    heard.until(lambda: heard.messages)
    assert len(heard.messages) == 1 and heard.refused == ["frames", "frames", "topic"]


def test_a_flood_does_not_keep_the_thread(heard):
    flood = 2 * NOTICES_PER_TURN + 1
    heard.feed.subscribe_to(heard.endpoint)
    assert heard.subscriptions()
    for _ in range(flood):
        heard.publisher.send_multipart(NEWS)
    counts = []

    def turned():
        before = len(heard.messages)
        heard.turn()
        counts.append(len(heard.messages) - before)
        return len(heard.messages) == flood

    until(turned)
    assert max(counts) <= NOTICES_PER_TURN


def test_a_feed_that_is_opened_elsewhere_hears_nothing_of_the_former_node(heard):
    heard.feed.subscribe_to(heard.endpoint)
    assert heard.subscriptions() == [b"\1" + NEWS_FRAME]
    other = Heard(heard.publisher.context)
    heard.feed.subscribe_to(other.endpoint)
    assert other.subscriptions() == [b"\1" + NEWS_FRAME]
    heard.poller.wait(time.monotonic() + 0.01)
    assert heard.subscriptions() == [b"\0" + NEWS_FRAME]
    heard.feed.close()
    assert not heard.feed.is_open
    heard.feed.close()
    other.poller.close(0.0)


def test_a_call_expires_at_its_deadline_and_is_not_sent_after_it():
    calls, call, _ = started(deadline=0.5)
    calls.sent(call, 0.0)
    assert calls.next_time() == 0.5
    assert not calls.expired(0.4)
    assert calls.expired(0.5) == [call]
    assert len(calls) == 0 and not calls.due_requests(10.0)
