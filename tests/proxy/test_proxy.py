"""Proxies and relays over sockets: homes of clients, servers that are down, and counts of lost messages."""

import itertools
import multiprocessing

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from history.ports import address
from memoire.errors import EndpointError, MemoireTimeout
from memoire.keyed import messages as keyed
from memoire.limits import Limits
from memoire.net import sockets
from memoire.net.poller import SendQueue
from memoire.proxy.proxy import Proxy
from memoire.proxy.router import rendezvous
from memoire.wire import messages
from memoire.wire.frames import encode, name_hash, parse
from netkit import DEADLINE, QUICK, in_thread, record, until

pytestmark = pytest.mark.slow

NAMES = [f"server-{number}" for number in range(4)]
MANY = 20
"""Number of clients: each of two homes gets at least one, except once in half a million runs."""


def settled(*proxies, servers):
    """Wait until each proxy knows this number of servers."""
    for proxy in proxies:
        until(lambda proxy=proxy: len(proxy.servers) == servers)


@given(st.lists(st.integers(0, 160), max_size=40))
def test_a_lane_keeps_the_newest_within_its_bytes_and_counts_the_rest(steps):
    lane, kept, lost = SendQueue(100), [], []
    for number, size in enumerate(steps):
        lane.put([number], size)
        kept.append((number, size))
        while sum(size for _, size in kept) > 100 and len(kept) > 1:
            lost.append(kept.pop(0)[1])
        assert (lane.bytes, lane.lost, lane.lost_bytes) == (sum(s for _, s in kept), len(lost), sum(lost))
        assert [frames[0] for _, frames in lane._messages] == [number for number, _ in kept]
    assert lane.send(None) == (not kept)
    sent = []
    assert lane.send("a connection", lambda _, frames: not sent.append(frames))
    assert sent == [[number] for number, _ in kept] and (len(lane), lane.bytes) == (0, 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_clients_work_through_any_number_of_proxies(cluster, tmp_path, depth):
    servers = [cluster.server(name=name) for name in NAMES[:3]]
    node = cluster.proxy(servers)
    for level in range(1, depth):
        node = cluster.proxy([node], front=f"ipc://{tmp_path}/relay{level}")
    settled(node, servers=3)
    clients = [cluster.client(node) for _ in range(9)]
    for client in clients:
        assert client.home == rendezvous(client.client_id, NAMES[:3])
        record(client, episodes=2)
        assert client.push_cache(100.0)
        client.log("through")
        client.update(100.0)
    for server in servers:
        mine = [client for client in clients if client.home == server.name]
        assert server.total_episodes == 2 * len(mine) and len(server.lines()) == len(mine)
        until(lambda server=server, mine=mine: server.total_caches == len(mine))
        if mine:
            assert server.get_batch(16, 100.0)["obs"].shape == (16, 4)
    until(lambda: node.stats().caches == 9)
    assert not node.stats().refused
    assert set(node.servers) == set(NAMES[:3])


def test_actors_that_come_before_the_servers_are_shared_out_when_these_are_there(cluster):
    place = address()
    proxy = cluster.proxy([place])
    thread, box = in_thread(lambda: cluster.client(proxy))
    until(lambda: proxy._thread.requests.pending)
    cluster.server(place, push_endpoint="tcp://127.0.0.1:0", pub_endpoint="tcp://127.0.0.1:0", name="late")
    thread.join(100.0)
    assert box["value"].home == "late"


@pytest.mark.parametrize("is_behind_proxy", [False, True])
def test_an_address_that_was_somebody_elses_for_a_moment_is_found_again(cluster, times, is_behind_proxy):
    times(channel_renewed=0.3)
    stranger = cluster.context.socket(zmq.PULL)  # a PULL's greeting does not fit a DEALER's greeting: ZeroMQ gives up
    place = f"tcp://127.0.0.1:{stranger.bind_to_random_port('tcp://127.0.0.1')}"
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED)
    node = cluster.proxy([place]) if is_behind_proxy else place
    thread, box = in_thread(lambda: cluster.client(node, limits=QUICK))
    assert monitor.poll(30_000)
    stranger.disable_monitor()
    stranger.close(0)
    server = cluster.server(place, push_endpoint="tcp://127.0.0.1:0", pub_endpoint="tcp://127.0.0.1:0", name="late")
    thread.join(100.0)
    client = box["value"]
    record(client)
    assert client.push_cache(100.0)
    until(lambda: server.total_caches == 1)


def test_a_home_that_is_down_delays_its_clients_and_loses_none(cluster):
    servers = [cluster.server(name=name) for name in NAMES[:2]]
    proxy = cluster.proxy(servers)
    settled(proxy, servers=2)
    clients = [cluster.client(proxy, limits=QUICK) for _ in range(MANY)]
    for client in clients:
        record(client)
        client.update(100.0)
    homes = [client.home for client in clients]
    victim = servers[0]
    theirs = [client for client in clients if client.home == victim.name]
    others = [client for client in clients if client.home != victim.name]
    assert theirs and others, homes
    victim.close()
    for client in clients:
        record(client, episodes=2)
        client.log("meanwhile")
    for client in others:
        client.update(100.0)
    with pytest.raises(MemoireTimeout):
        theirs[0].update(0.2)
    again = cluster.restart(victim)
    for client in theirs:
        client.update(100.0)
    assert [client.home for client in clients] == homes
    assert again.total_episodes == 3 * len(theirs) and len(again.lines()) == len(theirs)
    assert servers[1].total_episodes == 3 * len(others)


def test_a_client_whose_server_is_no_longer_listed_moves_with_its_totals(cluster):
    servers = [cluster.server(name=name) for name in NAMES[:2]]
    first = cluster.proxy(servers)
    settled(first, servers=2)
    clients = [cluster.client(first, limits=QUICK) for _ in range(MANY)]
    for client in clients:
        record(client, episodes=2)
        client.update(100.0)
    assert {client.home for client in clients} == set(NAMES[:2])
    places = (first.endpoint, first.push_endpoint, first.pub_endpoint)
    first.close()
    cluster.proxy(servers[1:], front=places[0], push_front=places[1], pub_front=places[2])
    for client in clients:
        client.update(100.0)
    until(lambda: {client.home for client in clients} == {NAMES[1]})
    for client in clients:
        client.update(100.0)
    assert servers[1].total_episodes == 2 * len(clients)
    record(clients[0])
    assert until(lambda: clients[0].push_cache(1.0))
    until(lambda: servers[1].total_caches == 1)


def test_caches_for_a_server_that_takes_none_are_bounded_and_the_others_go_on(cluster):
    servers = [cluster.server(name=name) for name in NAMES[:2]]
    proxy = cluster.proxy(servers, queue_bytes=60_000)
    settled(proxy, servers=2)
    clients = []
    while {client.home for client in clients} != set(NAMES[:2]):
        clients.append(cluster.client(proxy))
    stuck = next(client for client in clients if client.home == NAMES[0])
    free = next(client for client in clients if client.home == NAMES[1])
    servers[0]._io.pullers[0].stop(5.0)  # the server stops reading caches, but still answers requests
    for client in (stuck, free):
        record(client)
    for number in range(1, 21):
        assert stuck.push_cache(100.0)
        assert free.push_cache(100.0)
        until(lambda number=number: servers[1].total_caches == number)
    until(lambda: proxy.stats().caches == 40)
    back = proxy.stats().backs[0]
    assert back.queued_bytes <= 60_000 and back.lost_caches > 0 and back.lost_bytes > 0
    stuck.update(100.0)
    stats = stuck.stats()
    assert stats.pushed_bytes == stats.received_bytes + stats.lost_bytes + stats.in_flight_bytes
    servers[0].close(0.2)
    proxy.set_servers([servers[1].endpoint])
    until(lambda: proxy.stats().homeless > 0)


def _proxy_process(front, servers):
    Proxy(front, servers).wait_closed()


def test_totals_and_lines_are_exact_while_a_proxy_is_killed_again_and_again(cluster):
    servers = [cluster.server(name=name) for name in NAMES[:2]]
    place = address(3)
    spawn = multiprocessing.get_context("spawn")

    def start():
        process = spawn.Process(target=_proxy_process, args=(place, [server.endpoint for server in servers]))
        process.start()
        return process

    process = start()
    try:
        clients = [cluster.client(place, limits=QUICK, timeout=100.0) for _ in range(4)]
        for number in range(3):
            for client in clients:
                for _ in range(10):
                    client.on_episode(0, 1, 1.0)
                client.log(f"round {number}")
            process.kill()
            process.join(100.0)
            process = start()
        for client in clients:
            client.update(100.0)
        assert sum(server.total_episodes for server in servers) == 120
        for server in servers:
            lines = [(entry.client, entry.line.text) for entry in server.lines()]
            assert len(lines) == len(set(lines))
        assert sum(len(server.lines()) for server in servers) == 12
        for number, client in enumerate(clients, 1):
            record(client)
            assert until(lambda client=client: client.push_cache(1.0))
            until(lambda number=number: sum(server.total_caches for server in servers) >= number)
    finally:
        process.kill()
        process.join(100.0)


@pytest.mark.parametrize("size", [100, 1_500_000])
def test_models_are_handed_out_by_the_proxy_also_without_their_server(cluster, size):
    servers = [cluster.server(name=name) for name in NAMES[:2]]
    proxy = cluster.proxy(servers)
    settled(proxy, servers=2)
    early = cluster.client(proxy).subscribe("policy")
    body = np.random.default_rng(1).bytes(size)
    servers[0].publish("policy", body)
    assert early.receive(100.0) == body
    until(lambda: proxy.stats().models == {"policy": 1})
    servers[0].close()
    until(lambda: not proxy.stats().backs[1].is_away)
    clients = []
    while not any(client.home == NAMES[1] for client in clients):
        try:
            clients.append(cluster.client(proxy, timeout=0.5))
        except MemoireTimeout:
            continue  # the proxy assigned the client to the closed server
    late = next(client for client in clients if client.home == NAMES[1])
    assert late.model("policy").wait(100.0).body == body


def test_a_proxy_fetches_the_rest_of_a_model_whose_first_part_came_late(cluster):
    server = cluster.server()
    way = cluster.way(server, drop=0.0, double=0.0)
    proxy = cluster.proxy([way.endpoint], limits=Limits.of(resend_after=0.1, model_spread=0.01))
    settled(proxy, servers=1)
    way.drop = 1.0
    server.publish("policy", bytes(2 << 20))
    until(lambda: way.done["dropped"] > 0)
    way.drop = 0.0
    until(lambda: proxy.stats().models == {"policy": 1})


def test_a_publisher_that_begins_anew_is_heard_through_proxies(cluster, tmp_path):
    server = cluster.server(name="publisher")
    other = cluster.server(name="other")
    proxy = cluster.proxy([server, other])
    relay = cluster.proxy([proxy], front=f"ipc://{tmp_path}/relay")
    settled(proxy, relay, servers=2)
    model = cluster.client(relay, limits=QUICK).model("policy")
    for number in range(3):
        server.publish("policy", f"old {number}")
    assert model.wait(100.0, after=2).value == "old 2"
    again = cluster.restart(server)
    again.publish("policy", "new")
    until(lambda: model.newest().value == "new", 100.0)


def test_ends_are_bounded_and_wrong_addresses_are_errors(cluster):
    proxy = cluster.proxy(["tcp://127.0.0.1:9"])
    with pytest.raises(EndpointError, match="in use"):
        cluster.proxy(["tcp://127.0.0.1:9"], front=proxy.endpoint)
    for servers in ([], "tcp://127.0.0.1:9"):
        with pytest.raises(EndpointError, match="list of at least one server"):
            Proxy("tcp://127.0.0.1:0", servers, context=cluster.context)
    with pytest.raises(EndpointError, match="cannot"):
        cluster.proxy(["nonsense"])
    thread, box = in_thread(proxy.wait_closed, None)
    assert not proxy.wait_closed(0.01)
    proxy.close()
    proxy.close()
    thread.join(DEADLINE)
    assert box == {"value": True} and proxy.closed


def test_a_server_that_begins_again_behind_a_proxy_hears_what_a_client_takes_before_its_requests(cluster):
    """The first reply of a restarted server keeps to the client's limit, although the client sends HELLO only once."""
    server = cluster.server(name="a", schema=None, storage="keyed")
    proxy = cluster.proxy([server])
    settled(proxy, servers=1)
    client, numbers = b"c" * 16, itertools.count(1)

    def ask(socket, body, payload=None):
        number = next(numbers)
        frames = [b"", *encode(body, client=client, sequence=number, home=name_hash("a"), payload=payload)]
        until(lambda: sockets.send(socket, frames) and socket.poll(200))
        while (message := parse(sockets.receive(socket)[1:])).header.sequence != number:
            until(lambda: socket.poll(200))  # the message was the reply to the proxy's HELLO
        return message.body

    far, near = (sockets.request_client(cluster.context, 1 << 20) for _ in range(2))
    sockets.connect(far, proxy.endpoint)
    for life in range(3):
        sockets.connect(near, server.endpoint)
        ask(
            near,
            keyed.ChangeRows(call="put", partition="p"),
            keyed.pack([keyed.PutRow("k", {"t": bytes(3000)}, {}, [])]),
        )
        near.disconnect(server.endpoint)
        if life == 0:
            hello = messages.Hello(role="client", takes={"message_bytes": 1000, "request_bytes": 1000})
            assert isinstance(ask(far, hello), messages.Welcome)
        answer = ask(far, keyed.FindRows(call="tags", partition="p", known=1))
        assert isinstance(answer, messages.Refusal) and answer.code == "too_large", life
        server = cluster.restart(server, storage="keyed")
    far.close(0)
    near.close(0)
