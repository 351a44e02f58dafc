"""Newcomers by rate: so many at once, then so many a second, and whoever is known goes on; also over real connections."""

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from memoire.errors import MemoireTimeout, ProtocolError, Refused
from memoire.limits import Limits
from memoire.security.roles import ConnectionClients, TokenBuckets
from memoire.wire import messages
from memoire.wire.frames import encode, name_hash, parse
from netkit import QUICK, until

FEW = Limits(connection_clients=3, connection_clients_rate=0.5)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(-1.0, 3.0)), max_size=40))
def test_no_key_takes_more_than_its_burst_and_what_came_back_since(steps):
    buckets, now, taken, began = TokenBuckets(3, 0.5), 100.0, {"a": [], "b": []}, 100.0
    for key, seconds in steps:
        now += seconds
        if buckets.take(key, now):
            taken[key].append(now)
    for times in taken.values():
        latest = max([began, *times])
        assert len(times) <= 3 + 0.5 * (latest - began) + sum(max(0.0, -seconds) for _, seconds in steps) + 1e-6


def test_tokens_come_back_up_to_the_burst_and_each_key_has_its_own():
    buckets = TokenBuckets(2, 0.5)
    assert [buckets.take("a", 0.0) for _ in range(3)] == [True, True, False]
    assert buckets.take("b", 0.0) and buckets.least(0.0) == 0.0
    assert not buckets.take("a", 1.9) and buckets.take("a", 2.0) and not buckets.take("a", 2.0)
    assert buckets.left("a", 1000.0) == 2.0 and not buckets.take("a", 1.0), "a clock that goes back brings none"


def test_keys_are_bounded_and_the_one_that_took_nothing_for_longest_is_forgotten():
    buckets = TokenBuckets(1, 0.0, most=2)
    assert all(buckets.take(key, 0.0) for key in "abc")
    assert buckets.take("a", 0.0) and not buckets.take("c", 0.0)


def test_a_connection_brings_few_clients_and_those_it_brought_go_on():
    clients = ConnectionClients(2, 1.0)
    for client in (b"1", b"2", b"1"):
        clients.check(b"here", client, 0.0)
    with pytest.raises(ProtocolError, match=r"has brought 2 clients \(connection_clients\); 1 more may come a second"):
        clients.check(b"here", b"3", 0.0)
    clients.check(b"there", b"3", 0.0)
    clients.check(b"here", b"2", 0.0)
    clients.check(b"here", b"3", 1.0)


class Stranger:
    """One connection that speaks for any client."""

    def __init__(self, cluster, endpoint):
        self.socket = cluster.context.socket(zmq.DEALER)
        self.socket.linger, self.socket.rcvtimeo = 0, 30_000
        self.socket.connect(endpoint)

    def ask(self, client, body, number=1, home=0):
        self.socket.send_multipart([b"", *encode(body, client=client, sequence=number, home=home)])
        return parse(self.socket.recv_multipart()[1:]).body


@pytest.mark.parametrize("through", ["server", "proxy"])
def test_a_connection_that_makes_up_clients_is_stopped_where_it_ends(cluster, through):
    server = cluster.server(limits=FEW)
    node = server if through == "server" else cluster.proxy([server], limits=FEW)
    stranger, other = Stranger(cluster, node.endpoint), Stranger(cluster, node.endpoint)
    names = [bytes([number]) * 16 for number in range(1, 6)]
    said = [stranger.ask(name, messages.Hello(role="actor")) for name in names]
    assert [getattr(each, "code", "") for each in said] == ["", "", "", "busy", "busy"]
    assert "connection_clients" in said[-1].text
    home = name_hash(server.name)
    assert isinstance(stranger.ask(names[0], messages.Update(steps=1), 2, home), messages.Updated)
    assert isinstance(other.ask(names[4], messages.Hello(role="actor")), messages.Welcome)
    until(lambda: node.stats().refused.get("busy") == 2)
    other.socket.close()
    stranger.socket.close()


def test_a_proxy_brings_as_many_clients_as_come_to_it(cluster):
    server = cluster.server(limits=FEW)
    proxy = cluster.proxy([server], limits=FEW)
    for number in range(1, 8):
        stranger = Stranger(cluster, proxy.endpoint)
        assert isinstance(stranger.ask(bytes([number]) * 16, messages.Hello(role="actor")), messages.Welcome)
        stranger.socket.close()
    assert server.stats().guests == 7 and "busy" not in server.stats().refused


def test_a_client_that_comes_too_soon_says_so_or_gets_in_later(cluster):
    server = cluster.server(limits=Limits(new_clients=1, new_clients_rate=0.0, connection_clients=0))
    with pytest.raises(Refused, match="connection_clients") as refused:
        cluster.client(server, limits=QUICK, timeout=0.5)
    assert refused.value.code == "busy"


def test_what_a_newcomer_counts_is_told_when_its_turn_comes(cluster):
    server = cluster.server(limits=Limits(new_clients=1, new_clients_rate=2.0))
    first, second = (cluster.client(server, limits=QUICK) for _ in range(2))
    for client in (first, second):
        client.on_entries(5)
    first.update(100.0)
    second.update(100.0)
    assert server.total_steps == 10 and server.stats().totals.clients == 2


def test_steps_of_a_newcomer_that_has_to_wait_are_kept(cluster):
    server = cluster.server(limits=Limits(new_clients=1, new_clients_rate=0.0))
    first, second = (cluster.client(server, limits=QUICK) for _ in range(2))
    first.on_entries(5)
    first.update(100.0)
    second.on_entries(7)
    with pytest.raises(MemoireTimeout):
        second.update(0.3)
    assert server.total_steps == 5 and second.stats().steps == 7
    server._dispatcher.newcomers.burst = 10
    server._dispatcher.newcomers._buckets.clear()
    second.update(100.0)
    assert server.total_steps == 12
