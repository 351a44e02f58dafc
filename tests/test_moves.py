"""Clients that change their home: whatever list of servers their proxy has, the merged totals are what they counted."""

import threading

import pytest

from memoire import accounts, wire
from memoire.errors import Closed, EndpointError, MemoireTimeout, ParameterError, Refused
from netkit import QUICK, Cluster, in_thread, record, until


@pytest.fixture
def cluster():
    made = Cluster()
    yield made
    made.close()


def rows_of(*servers):
    """What these servers have counted, merged."""
    tables = []
    for server in servers:
        desk = server._desk
        with desk.lock:
            rows = [
                accounts.row_of(account, desk.home, desk.logbook.through(account.client)) for account in desk.ledger
            ]
        tables.append(accounts.rows_of(rows))
    return accounts.merge(*tables)


def lines_of(*servers):
    """(client, number) of every log line that these servers took, in their order."""
    return [(entry.client, entry.line.number) for server in servers for entry in server.lines(most=100_000)]


class Load:
    """Clients that record, push and log all the time, each in a thread."""

    def __init__(self, clients):
        self.clients, self.stopped = clients, threading.Event()
        self.threads = [in_thread(self._work, client) for client in clients]

    def _work(self, client):
        number = 0
        while not self.stopped.wait(0.002):
            record(client, length=3)
            client.log(f"line {number}")
            client.push_cache(0.0)
            number += 1
        client.update(20.0)
        return number

    def stop(self):
        """Lines that each client logged."""
        self.stopped.set()
        for thread, _ in self.threads:
            thread.join(30.0)
        assert not [box["error"] for _, box in self.threads if "error" in box]
        return [box["value"] for _, box in self.threads]


def check_exact(load, servers):
    """Totals and lines are what the clients counted, each line once and in order; every cache is accounted for."""
    logged = load.stop()
    clients = [client.stats() for client in load.clients]
    totals = accounts.totals_of(rows_of(*servers))
    assert totals.episodes == sum(stats.episodes for stats in clients)
    assert totals.steps == sum(stats.steps for stats in clients)
    assert totals.returns_count == totals.episodes
    lines = lines_of(*servers)
    assert sorted(lines) == sorted(set(lines))
    assert len(lines) == sum(logged)
    for stats in clients:
        received = stats.accepted_caches + sum(stats.rejected.values())
        assert stats.pushed_caches == received + stats.lost_caches + stats.in_flight_caches
        assert stats.pushed_bytes == stats.received_bytes + stats.lost_bytes + stats.in_flight_bytes
    return totals


def test_clients_of_a_server_that_is_taken_off_the_list_go_elsewhere_and_nothing_is_counted_twice(cluster):
    servers = [cluster.server(name=name) for name in ("a", "b", "c")]
    urls = [server.endpoint for server in servers]
    proxy = cluster.proxy(urls[:2])
    load = Load([cluster.client(proxy, limits=QUICK, seed=seed) for seed in range(6)])
    until(lambda: all(client.stats().updates for client in load.clients))
    for wanted in ([urls[1], urls[2]], [urls[2]], [urls[2], urls[0]], urls):
        proxy.set_servers(wanted)
        names = {name for name, url in zip("abc", urls, strict=True) if url in wanted}
        until(lambda names=names: set(proxy.servers) == names)
        until(lambda names=names: all(client.home in names for client in load.clients))
    check_exact(load, servers)
    assert proxy.stats().faults == 0


def test_an_address_that_is_added_gets_new_clients_and_the_others_stay(cluster):
    first, second = cluster.server(name="first"), cluster.server(name="second")
    proxy = cluster.proxy([first])
    former = [cluster.client(proxy, seed=seed) for seed in range(3)]
    proxy.set_servers([first.endpoint, second.endpoint])
    until(lambda: set(proxy.servers) == {"first", "second"})
    newer = [cluster.client(proxy, seed=seed) for seed in range(12)]
    assert {client.home for client in former} == {"first"}
    assert {client.home for client in newer} == {"first", "second"}
    proxy.set_servers([first.endpoint, second.endpoint])  # the same list again changes nothing
    assert {client.home for client in former} == {"first"}


def test_a_client_that_comes_back_to_its_former_home_goes_on_there(cluster):
    first, second = cluster.server(name="first"), cluster.server(name="second")
    proxy = cluster.proxy([first])
    client = cluster.client(proxy, limits=QUICK)
    for wanted, home in ((second, "second"), (first, "first"), (second, "second"), (first, "first")):
        record(client)
        assert client.push_cache(10.0)
        client.update(10.0)
        until(lambda: client.stats().in_flight_caches == 0)
        proxy.set_servers([wanted.endpoint])
        until(lambda home=home: client.home == home)
    client.update(10.0)
    stats = client.stats()
    assert (stats.pushed_caches, stats.accepted_caches, stats.lost_caches) == (4, 4, 0)
    assert [server.total_caches for server in (first, second)] == [2, 2]
    assert [account.report.caches for server in (first, second) for account in server._desk.ledger] == [2, 2]
    assert accounts.totals_of(rows_of(first, second)).accepted_caches == 4


def test_a_list_of_servers_that_is_none_is_refused_and_changes_nothing(cluster):
    server = cluster.server(name="one")
    proxy = cluster.proxy([server])
    for wrong in ([], server.endpoint, ["udp://nowhere:1"], [server.endpoint, "here"]):
        with pytest.raises(EndpointError, match="at least one server|the transport must be"):
            proxy.set_servers(wrong)
    until(lambda: proxy.servers == ("one",))
    proxy.close()
    with pytest.raises(Closed):
        proxy.set_servers([server.endpoint])


# ------------------------------------------------------------------------------------------------- merged totals


def test_a_reader_says_what_all_servers_have_counted_together(cluster):
    servers = [cluster.server(name=name) for name in ("a", "b", "c")]
    proxy = cluster.proxy(servers)
    clients = [cluster.client(proxy, limits=QUICK, seed=seed) for seed in range(5)]
    for number, client in enumerate(clients):
        record(client, episodes=number + 1, length=10)
        client.update(10.0)
    totals = cluster.reader([proxy]).totals()
    assert (totals.totals.clients, totals.totals.episodes, totals.totals.steps) == (5, 15, 150)
    assert (totals.run, totals.servers, totals.missing, totals.finished) == ("default", ("a", "b", "c"), (), False)
    assert totals.is_complete and not totals.durable


def test_totals_name_the_servers_that_did_not_answer(cluster):
    servers = [cluster.server(name=name) for name in ("a", "b")]
    client = cluster.client(servers[1], limits=QUICK)
    record(client, episodes=2)
    client.update(10.0)
    reader = cluster.reader(servers)
    servers[0].close()
    totals = reader.totals(timeout=1.0)
    assert (totals.servers, totals.missing, totals.totals.episodes) == (("b",), ("a",), 2)
    assert not totals.is_complete
    servers[1].close()
    with pytest.raises(MemoireTimeout):
        reader.totals(timeout=0.5)
    with pytest.raises(ParameterError, match="one of a, b"):
        reader.ask({"nobody": wire.Ledger()})


def test_totals_of_more_clients_than_fit_a_message_are_whole(cluster):
    server = cluster.server(name="one")
    for number in range(2500):
        client = number.to_bytes(16, "little")
        server._desk.ledger.report(client, 1, wire.Update(episodes=1, steps=number), now=1.0)
    reader = cluster.reader([server])
    totals = reader.totals().totals
    assert (totals.clients, totals.episodes, totals.steps) == (2500, 2500, 2500 * 2499 // 2)


def test_totals_of_a_run_that_nobody_knows_are_refused(cluster):
    with pytest.raises(Refused, match="no run 'other'"):
        cluster.reader([cluster.server()]).totals("other")
