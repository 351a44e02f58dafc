"""What networks do: connections reset again and again, strangers that connect and say nothing, hundreds of clients at once."""

import contextlib
import socket
import time

import zmq

from memoire.client.client import Client
from memoire.net import process as descriptors
from memoire.net import sockets
from memoire.wire import messages
from memoire.wire.frames import encode, parse
from netkit import DEADLINE, QUICK, record, until
from tcpkit import CutWay, place


def test_nothing_is_lost_or_counted_twice_while_connections_are_reset_ten_times_a_second(cluster):
    server = cluster.server(limits=QUICK)
    ways = [cluster.keep(CutWay(place(end))) for end in (server.endpoint, server.push_endpoint, server.pub_endpoint)]
    request, push, subscribe = (way.endpoint for way in ways)
    client = Client(
        request,
        push=push,
        subscribe=subscribe,
        context=cluster.context,
        seed=1,
        capacity=1000,
        limits=QUICK,
        timeout=100.0,
    )
    cluster.keep(client)
    lines, began, cut_at = 0, time.monotonic(), 0.0
    while (now := time.monotonic()) < began + 1.5 or (ways[0].resets <= 5 and now < began + DEADLINE):
        if now >= cut_at:
            cut_at = now + 0.1
            for way in ways:
                way.reset()
        record(client)
        client.push_cache(0.01)
        client.log(f"line {lines}")
        lines += 1
        with client._waiting.changed:
            client._waiting.changed.wait(0.01)
    assert ways[0].resets > 5
    client.update(100.0)
    assert (server.total_episodes, server.total_steps) == (lines, 20 * lines)
    assert [entry.line.text for entry in server.lines(most=10_000)] == [f"line {k}" for k in range(lines)]

    def is_settled():
        client.update(100.0)
        return client.stats().in_flight_bytes == 0

    until(is_settled)
    stats = client.stats()
    assert server.total_caches == stats.accepted_caches <= stats.pushed_caches
    assert stats.received_bytes + stats.lost_bytes == stats.pushed_bytes


def test_strangers_that_connect_and_say_nothing_are_in_nobodys_way_and_soon_gone(cluster, times):
    times(handshake=1.0)
    server = cluster.server()
    descriptors.raise_limit()
    many = min(500, (descriptors.limit() - descriptors.used() - 200) // 6)
    held = []
    with contextlib.ExitStack() as stack:
        for endpoint in (server.endpoint, server.push_endpoint, server.pub_endpoint):
            for number in range(many):
                made = stack.enter_context(socket.create_connection(place(endpoint), DEADLINE))
                if number % 2:
                    made.sendall(b"\xff\x00\x00")  # a ZeroMQ greeting that never ends
                held.append(made)
        client = cluster.client(server)
        record(client)
        assert client.push_cache()
        client.update()
        until(lambda: server.total_caches == 1)
        for made in held:
            made.settimeout(DEADLINE)
            with contextlib.suppress(ConnectionResetError):
                while made.recv(1000):  # its own greeting, and then the end
                    pass


class Simulated:
    """A client without threads: HELLO, then UPDATE after UPDATE, one at a time."""

    def __init__(self, context, endpoint, number):
        self.id = number.to_bytes(16, "little")
        self.socket = sockets.request_client(context, 1 << 20)
        sockets.connect(self.socket, endpoint)
        self.sequence, self.facts, self.epoch, self.done = 0, {}, 0, 0
        self.ask(messages.Hello(role="actor"))

    def ask(self, body):
        self.sequence += 1
        self.frames = [b"", *encode(body, client=self.id, sequence=self.sequence, **self.facts)]
        self.is_sent = False

    def turn(self):
        """Send what is not sent yet, take an answer."""
        self.is_sent = self.is_sent or sockets.send(self.socket, self.frames)
        frames = sockets.receive(self.socket)
        if frames is None:
            return
        message = parse(frames[1:])
        assert message.header.client == self.id and message.header.sequence == self.sequence
        header, body = message.header, message.body
        if isinstance(body, messages.Welcome):
            self.facts = {
                "run": header.run,
                "home": header.home,
                "fingerprint": header.fingerprint,
                "table": body.table,
            }
            self.epoch = body.epoch
        else:
            assert isinstance(body, messages.Updated) and body.episodes == self.done
        self.done += 1
        self.ask(messages.Update(epoch=self.epoch, episodes=self.done, steps=10 * self.done))


def test_three_hundred_clients_of_one_proxy_are_counted_exactly(cluster):
    servers = [cluster.server(name=name) for name in "abc"]
    proxy = cluster.proxy(servers)
    until(lambda: len(proxy.servers) == 3)
    crowd = [Simulated(cluster.context, proxy.endpoint, number) for number in range(1, 301)]
    poller = zmq.Poller()
    for simulated in crowd:
        poller.register(simulated.socket, zmq.POLLIN)

    def is_done():
        poller.poll(5)
        for simulated in crowd:
            if simulated.done < 5:
                simulated.turn()
        return all(simulated.done == 5 for simulated in crowd)

    until(is_done)
    assert sum(server.total_episodes for server in servers) == 4 * 300
    assert sum(server.total_steps for server in servers) == 40 * 300
    assert all(server.total_episodes > 0 for server in servers)
    assert proxy.stats().homeless == 0 and not proxy.stats().refused
