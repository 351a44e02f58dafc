"""Readers of one or several servers: exact draws, no samples lost with messages, and servers that join and leave."""

import gc
import weakref

import numpy as np
import pytest

from memoire.errors import Closed, EndpointError, MemoireTimeout, NotEnoughSamples, ParameterError
from memoire.reader.reader import Reader
from memoire.replay.batch import PriorityUpdate
from memoire.replay.parameters import Parameters
from netkit import QUICK, fill, until

pytestmark = pytest.mark.slow

NAMES = [f"server-{number}" for number in range(3)]


def clients_of_each(cluster, node, names, most=60):
    """Return clients of a node; each of these homes has at least one client."""
    clients = []
    while {client.home for client in clients} < set(names):
        clients.append(cluster.client(node))
        assert len(clients) < most
    return clients


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

    def adds_up():  # a drawn batch may still be on its way to its reader
        on_the_way = 50 * sum(reader.stats().prefetched for reader in readers)
        unused = sum(server.stats().unused_samples for server in servers)
        return sum(counts) + on_the_way == sum(map(drawn, servers)) == pushed - unused

    until(adds_up)


def test_priorities_find_their_owners_at_every_server(cluster):
    servers = [cluster.server(name=name) for name in NAMES[:2]]
    clients = [cluster.client(server) for server in servers]
    for client in clients:
        fill(client, caches=4)
    reader = cluster.reader(servers)
    batch = reader.get_batch(128, 100.0)
    stats = reader.stats()
    assert (stats.batches, stats.short, stats.refused, stats.faults) == (1, 0, {}, 0)
    arrays = sum(array.nbytes for name, array in batch.items() if name != "importance")
    assert stats.batch_bytes == arrays + 2 * 4 * 128, "weights and rewards of one step, too"
    assert set(stats.servers) == set(NAMES[:2])
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


def test_a_reader_that_nobody_holds_goes_on_until_it_is_closed(cluster):
    """The reader's thread uses sockets, so the interpreter must still find the reader at exit."""
    reference = weakref.ref(Reader([cluster.server().endpoint], context=cluster.context))
    gc.collect()
    assert reference() is not None and reference().servers
    reference().close()


def test_a_closed_reader_refuses_every_call(cluster):
    reader = cluster.reader([cluster.server()])
    for _ in range(2):
        reader.close()
    for call in (lambda: reader.get_batch(1), lambda: reader.publish("t", b""), lambda: reader.finish()):
        with pytest.raises(Closed, match="this reader is closed"):
            call()


def test_wrong_arguments_and_addresses_are_refused(cluster):
    server = cluster.server()
    with pytest.raises(EndpointError, match="at least one address"):
        cluster.reader([])
    with pytest.raises(ParameterError, match="ahead"):
        cluster.reader([server], ahead=0)
    with pytest.raises(ValueError, match="from 1 to"):
        cluster.reader([server]).get_batch(0)
