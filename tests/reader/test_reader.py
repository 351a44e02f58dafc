"""Readers over any number of servers: the draw is exact, nothing is eaten by losses, and servers may come and go."""

import gc
import weakref

import numpy as np
import pytest

from memoire.errors import (
    Closed,
    EndpointError,
    MemoireTimeout,
    NotEnoughSamples,
    ParameterError,
)
from memoire.limits import Limits
from memoire.reader.reader import Reader
from memoire.replay.batch import PriorityUpdate
from memoire.replay.parameters import Parameters
from netkit import DEADLINE, QUICK, SCHEMA, entry, fill, in_thread, until

pytestmark = pytest.mark.slow

NAMES = [f"server-{number}" for number in range(3)]


def clients_of_each(cluster, node, names, most=60):
    """Clients, at least one with each home."""
    clients = []
    while {client.home for client in clients} < set(names):
        clients.append(cluster.client(node))
        assert len(clients) < most
    return clients


def test_batches_come_from_every_server_behind_a_proxy(cluster):
    servers = [cluster.server(name=name, multi_step=2, discount=0.5) for name in NAMES]
    proxy = cluster.proxy(servers)
    until(lambda: len(proxy.servers) == 3)
    clients = clients_of_each(cluster, proxy, NAMES)
    for client in clients:
        fill(client, caches=4)
    reader = cluster.reader([proxy])
    assert reader.schema == SCHEMA and reader.parameters == servers[0].parameters
    seen = set()
    for _ in range(3):
        batch = reader.get_batch(256, 100.0)
        t = batch["obs"][:, 0].astype(int)
        steps = np.minimum(2, 20 - t)
        np.testing.assert_array_equal(batch["steps"], steps)
        np.testing.assert_allclose(batch["reward"], t + np.where(steps > 1, 0.5 * (t + 1), 0.0), rtol=1e-6)
        assert batch["importance"].max() == 1.0 and batch.left_out == pytest.approx(0.0, abs=1e-9)
        seen |= {owner.tobytes() for owner in np.unique(batch["ids"]["client"], axis=0)}
    assert seen == {client.client_id for client in clients}
    stats = reader.stats()
    assert (stats.batches, stats.short, stats.refused, stats.faults) == (3, 0, {}, 0)
    arrays = {name: array.nbytes for name, array in batch.items() if name != "importance"}
    assert stats.batch_bytes == 3 * (sum(arrays.values()) + 2 * 4 * 256), "weights and rewards of one step, too"
    assert set(stats.servers) == set(NAMES)


def test_the_weighted_mean_is_that_of_all_entries_over_three_servers(cluster):
    """Clients of different size and weight; at beta 1 the weighted mean of a quantity is its mean over all entries."""
    parameters = Parameters(importance_exponent=1.0, priority_exponent=1.0, cache_size=512, reuse_cache=True)
    servers = [cluster.server(name=name, parameters=parameters, seed=index) for index, name in enumerate(NAMES)]
    proxy = cluster.proxy(servers)
    until(lambda: len(proxy.servers) == 3)
    clients = clients_of_each(cluster, proxy, NAMES)
    entries, total = 0, 0.0
    for index, client in enumerate(clients):
        length = 50 * (1 + index % 3)
        memory = client.memory
        memory.open()
        for _ in range(length):
            memory.add(0, entry(SCHEMA, float(index)), 0.1 + index)  # the weight grows with the value
        memory.close(terminated=True)
        client.on_entries(length)
        entries += length
        total += length * index
        for _ in range(3):
            assert client.push_cache(100.0)
        client.update(100.0)
    until(lambda: sum(server.total_caches for server in servers) == 3 * len(clients))
    readers = [cluster.reader([proxy], seed=seed) for seed in (1, 2)]
    means = []
    for _ in range(40):
        for reader in readers:
            batch = reader.get_batch(256, 100.0)
            undivided = batch["importance"].astype(np.float64) * batch.divisor
            means.append((undivided.mean(), (undivided * batch["obs"][:, 0]).mean()))
    one, value = np.transpose(means)
    for found, expected in ((one, 1.0), (value, total / entries)):
        assert abs(found.mean() - expected) < 5.0 * found.std(ddof=1) / np.sqrt(len(found)) + 1e-3 * abs(expected)


def drawn(server):
    return server.stats().samples


def test_a_lossy_way_eats_no_samples(cluster):
    server = cluster.server(parameters=Parameters(cache_size=512))
    fill(cluster.client(server), caches=8)
    way = cluster.way(server, drop=0.25, double=0.25, seed=3)
    reader = cluster.reader([way], limits=QUICK, ahead=2, timeout=100.0)
    for _ in range(20):
        assert len(reader.get_batch(64, 100.0)["ids"]) == 64
    until(lambda: (ready := reader.stats().prefetched) >= 2 and drawn(server) == (20 + ready) * 64)
    assert reader.stats().resends > 0 and reader.stats().short == 0 and way.done["dropped"] > 0


def test_two_readers_share_the_samples_and_none_is_drawn_twice(cluster):
    servers = [cluster.server(name=name) for name in NAMES[:2]]
    proxy = cluster.proxy(servers)
    until(lambda: len(proxy.servers) == 2)
    clients = clients_of_each(cluster, proxy, NAMES[:2])
    for client in clients:
        fill(client, caches=4)
    pushed = 4 * 256 * len(clients)
    until(lambda: sum(server.total_caches for server in servers) == 4 * len(clients))
    readers = [cluster.reader([proxy], ahead=1) for _ in range(2)]
    counts = [0, 0]

    def is_all_drawn():
        for number, reader in enumerate(readers):
            try:
                counts[number] += len(reader.get_batch(50, 0.1)["ids"])
            except (MemoireTimeout, NotEnoughSamples):
                continue
        return sum(server.stats().unused_samples for server in servers) < 200 and not any(
            reader.stats().prefetched for reader in readers
        )

    until(is_all_drawn)
    assert min(counts) > 0

    def adds_up():  # a batch that was drawn may still be on its way to its reader
        on_the_way = 50 * sum(reader.stats().prefetched for reader in readers)
        unused = sum(server.stats().unused_samples for server in servers)
        return sum(counts) + on_the_way == sum(map(drawn, servers)) == pushed - unused

    until(adds_up)


def test_a_server_that_goes_is_left_out_and_comes_back(cluster):
    servers = [cluster.server(name=name, parameters=Parameters(reuse_cache=True)) for name in NAMES[:2]]
    clients = [cluster.client(server, limits=QUICK) for server in servers]
    for client in clients:
        fill(client, caches=4)
    reader = cluster.reader(servers, ahead=1)
    assert len(np.unique(reader.get_batch(128, 100.0)["ids"]["client"], axis=0)) == 2
    servers[0].close()
    left = np.frombuffer(clients[1].client_id, "<u8")

    def is_left_out():
        batch = reader.get_batch(128, 100.0)
        return (batch["ids"]["client"] == left).all() and reader.stats().away == (NAMES[0],)

    until(is_left_out)
    cluster.restart(servers[0], parameters=Parameters(reuse_cache=True))
    clients[0].update(100.0)
    until(lambda: clients[0].push_cache(1.0))
    until(lambda: len(np.unique(reader.get_batch(128, 100.0)["ids"]["client"], axis=0)) == 2)
    until(lambda: reader.stats().away == ())


def test_priorities_find_their_owners_at_every_server(cluster):
    servers = [cluster.server(name=name) for name in NAMES[:2]]
    clients = [cluster.client(server) for server in servers]
    for client in clients:
        fill(client, caches=4)
    reader = cluster.reader(servers)
    batch = reader.get_batch(128, 100.0)
    assert batch.update_priorities(np.full(128, 2.0)) == PriorityUpdate(sent=128)
    until(lambda: sum(server.stats().feedback_given for server in servers) == 128)
    for client, server in zip(clients, servers, strict=True):
        client.update(100.0)
        mine = batch["ids"]["client"] == np.frombuffer(client.client_id, "<u8")
        numbers = np.unique(batch["ids"]["number"][mine.all(axis=1)])
        np.testing.assert_allclose(client.memory.weights(numbers), (2.0 + 1e-6) ** 0.6, rtol=1e-5)
        assert server.stats().feedback_lost == 0
    strangers = batch["ids"].copy()
    strangers["client"] ^= np.uint64(1)
    reader.update_priorities(strangers, np.ones(128))
    until(lambda: reader.stats().feedback_lost == 128)
    with pytest.raises(ValueError, match="not finite"):
        reader.update_priorities(batch["ids"], np.full(128, np.inf))
    with pytest.raises(ValueError, match="as many TD errors"):
        reader.update_priorities(batch["ids"], np.ones(3))


def test_priorities_that_nobody_takes_are_counted_as_lost(cluster):
    """A client that is gone fetches none, and a server that is gone answers nothing: each sample that was given counts."""
    server = cluster.server()
    clients = [cluster.client(server) for _ in range(2)]
    for client in clients:
        fill(client, caches=4)
    reader = cluster.reader([server], limits=Limits(request_timeout=0.5))
    batch = reader.get_batch(64, 60.0)
    theirs = (batch["ids"]["client"] == np.frombuffer(clients[0].client_id, "<u8")).all(axis=1)
    clients[0].close()
    until(lambda: server.stats().presence["gone"] == 1)
    batch.update_priorities(np.ones(64))
    until(lambda: reader.stats().feedback_lost == theirs.sum() > 0)
    assert server.stats().feedback_lost == theirs.sum()
    server.close()
    batch.update_priorities(np.ones(64))
    until(lambda: reader.stats().feedback_lost == theirs.sum() + 64)
    assert reader.stats().feedback_given == 128


def test_a_reader_that_nobody_holds_goes_on_until_it_is_closed(cluster):
    """Its thread uses sockets: the interpreter has to find it at its end."""
    found = weakref.ref(Reader([cluster.server().endpoint], context=cluster.context))
    gc.collect()
    assert found() is not None and found().servers
    found().close()


def test_waiting_ends_with_closed_and_closing_is_bounded(cluster):
    reader = cluster.reader([cluster.server()])
    thread, box = in_thread(reader.get_batch, 10, 50.0)
    loop, ended = in_thread(lambda: list(reader.batches(10, 100.0)))
    thread.join(0.1)
    assert thread.is_alive() and loop.is_alive()
    reader.close()
    reader.close()
    thread.join(DEADLINE)
    loop.join(DEADLINE)
    assert isinstance(box["error"], Closed) and ended == {"value": []}
    for call in (lambda: reader.get_batch(1), lambda: reader.publish("t", b""), lambda: reader.finish()):
        with pytest.raises(Closed, match="this reader is closed"):
            call()


def test_wrong_arguments_and_addresses_are_refused(cluster):
    server = cluster.server()
    with pytest.raises(EndpointError, match="at least one address"):
        cluster.reader([])
    with pytest.raises(EndpointError, match="cannot"):
        cluster.reader(["nonsense"])
    with pytest.raises(ParameterError, match="ahead"):
        cluster.reader([server], ahead=0)
    with pytest.raises(MemoireTimeout, match="no welcome from"):
        cluster.reader(["tcp://127.0.0.1:9"], timeout=0.2)
    reader = cluster.reader([server])
    with pytest.raises(ValueError, match="from 1 to"):
        reader.get_batch(0)
    with pytest.raises(TypeError, match="serialize"):
        reader.publish("t", 17)
