"""Tests of network faults, oversized messages, other protocol versions, and the cost of bytes."""

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import zmq

from memoire.client.client import connect
from memoire.errors import ParameterError, Refused
from memoire.limits import Limits
from memoire.net import sockets
from memoire.net.channel import Channel
from memoire.net.poller import Poller
from memoire.replay.parameters import Parameters
from memoire.wire import messages
from memoire.wire.frames import name_hash, parse
from memoire.wire.messages import VERSION
from netkit import WIDE, record, until
from wirekit import golden


def in_version(frame: bytes, version: int) -> bytes:
    """Return frame 0 in another protocol version, with an unchanged checksum."""
    return frame[:4] + version.to_bytes(2, "little") + frame[6:]


@pytest.mark.parametrize("where", ["server", "proxy"])
def test_a_client_of_another_version_is_told_why_it_is_refused(cluster, where):
    node = cluster.server()
    if where == "proxy":
        node = cluster.proxy([node])
    (hello,) = golden("hello")
    asked = in_version(hello, VERSION + 1)
    with cluster.context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 60_000
        sockets.connect(dealer, node.endpoint)
        dealer.send_multipart([b"", asked])
        _, answer = dealer.recv_multipart()
    assert answer[16:56] == asked[16:56], "for the same client, run, home and number"
    refused = parse([answer]).body
    text = f"version {VERSION + 1} of the protocol; this node speaks {VERSION}. Upgrade the older of the two"
    assert refused.code == "version" and text in refused.text
    assert node.stats().refused["version"] == 1


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_client_is_told_that_the_other_side_speaks_another_version(cluster, version):
    """The server answers with a REFUSED of its own version."""
    with cluster.context.socket(zmq.ROUTER) as router, ThreadPoolExecutor(1) as threads:
        router.linger, router.rcvtimeo = 0, 60_000
        endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        connecting = threads.submit(connect, endpoint, timeout=60.0, context=cluster.context)
        way, empty, asked = router.recv_multipart()
        (refused,) = golden("refused")
        frame = in_version(refused, version)
        router.send_multipart([way, empty, frame[:16] + asked[16:56] + frame[56:]])
        with pytest.raises(Refused, match=f"version {version} of the protocol; this node speaks 2") as raised:
            connecting.result(60.0)
    assert (raised.value.code, raised.value.endpoint) == ("version", endpoint)


def test_a_cache_that_is_too_large_for_a_proxy_is_not_sent_and_its_neighbours_arrive(cluster):
    server = cluster.server(schema=WIDE, parameters=Parameters(cache_size=64))
    proxy = cluster.proxy([server], limits=Limits(message_bytes=200_000))
    client = cluster.client(proxy)
    record(client, length=4)
    assert client.push_cache()
    client.sync()
    record(client, length=64)
    with pytest.raises(
        ParameterError,
        match=r"A cache of cache_size=64 samples takes .* the limit is 200000 bytes \(limits.message_bytes\)",
    ):
        client.push_cache()
    client.sync()
    record(client, length=4)
    assert client.push_cache()
    until(lambda: server.total_caches == 2)
    client.update()
    stats = client.stats()
    assert stats.pushed_caches == stats.accepted_caches == 2 and stats.lost_bytes == 0


def test_feedback_of_a_batch_of_any_size_arrives(cluster):
    server = cluster.server(parameters=Parameters(reuse_cache=True))
    client = cluster.client(server)
    record(client, episodes=3)
    assert client.push_cache()
    reader = cluster.reader([server], limits=Limits.of(resend_after=300.0, resend_most=300.0))  # nothing was cut off
    batch = reader.get_batch(128)
    ids = np.tile(batch.ids, 1000)  # 2 MB of ids: more than the longest request
    assert reader.update_priorities(ids, np.ones(len(ids))).sent == 128_000
    until(lambda: server.stats().feedback_given == 128_000)
    assert reader.stats().resends == 0
    assert [channel.connections for channel in reader._thread.channels.values()] == [1]


class Asking:
    """Channel to a node without a client's thread; `answers` holds the replies."""

    def __init__(self, cluster, node, client=1, limits=None):
        limits = limits or Limits()
        self.poller, self.answers = Poller(), []
        self.channel = Channel(
            self.poller,
            cluster.context,
            node.endpoint,
            client=bytes([client] * 16),
            limits=limits,
            rng=random.Random(1),
        )

    def ask(self, body, **options):
        self.channel.ask(body, self.answers.append, **options)

    def wait(self, count):
        def answered():
            self.channel.tick(self.poller.wait(time.monotonic() + 0.01))
            return len(self.answers) == count

        until(answered)
        return self.answers


def test_a_request_that_is_too_long_ends_in_an_error_and_the_next_is_answered(cluster):
    asking = Asking(cluster, cluster.server())
    asking.ask(messages.Feedback(), payload=bytes((1 << 20) + 1))
    asking.ask(messages.Hello(role="actor"))
    refused, answer = asking.wait(2)
    assert isinstance(refused, Refused) and refused.code == "too_large"
    assert "FEEDBACK of 1048577 bytes was not sent; the limit is 1048576 (request_bytes)" in str(refused)
    assert isinstance(answer.body, messages.Welcome) and asking.channel.connections == 1
    asking.channel.apply_welcome(answer.header, msgspec.structs.replace(answer.body, limits={"request_bytes": 1000}))
    assert asking.channel.longest == 1000
    asking.poller.close()


def test_a_reply_that_is_too_large_ends_its_request_by_name_at_the_server_and_where_it_comes(cluster):
    server, small = cluster.server(), Limits.of(tail_bytes=4096)
    for number in range(60):
        server.publish(f"{number} {'t' * 100}", b"weights")
    asked = {"WELCOME": messages.Hello(role="actor"), "UPDATED": messages.Update(steps=1)}
    for number, (name, body) in enumerate(asked.items(), 1):
        asking = Asking(cluster, server, number, small)
        asking.ask(body, run=name_hash(server.run))
        (refused,) = asking.wait(1)
        assert isinstance(refused, Refused) and refused.code == "too_large" and asking.channel.resends == 0
        text = rf"{name}, whose tail takes \d{{4}} bytes; client .* has room for 4096 \(tail_bytes\)"
        assert re.search(text, str(refused)), refused
        asking.poller.close()


@pytest.fixture
def pair():
    """Yield a connected (sender, receiver) inside this process, without threads of ZeroMQ between them."""
    context = zmq.Context()
    receiver = sockets.data_receiver(context, 1 << 24)
    sockets.bind(receiver, "inproc://pair")
    sender = sockets.data_sender(context)
    sockets.connect(sender, "inproc://pair")
    yield sender, receiver
    context.destroy(0)


def test_large_frames_are_sent_as_they_lie_and_small_ones_are_copied(pair):
    sender, receiver = pair
    for size, is_large in ((sockets.COPY_BELOW - 1, False), (sockets.COPY_BELOW + 1, True)):
        sent = np.zeros(size, np.uint8)
        assert sockets.send(sender, [sent])
        (frame,) = sockets.receive(receiver)
        assert len(frame) == size
        assert np.shares_memory(np.frombuffer(frame.buffer, np.uint8), sent) is is_large
