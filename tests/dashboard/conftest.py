"""A small cluster with node pages, and a history in memory."""

import contextlib

import pytest

from memoire.dashboard.collect.history import History
from memoire.nodes.http import NodePages
from netkit import Cluster, record, until


@pytest.fixture(scope="module")
def cluster():
    """Two servers with one actor each, which has recorded 40 steps and logged lines; a proxy; and their pages."""
    small_cluster = Cluster()
    with contextlib.ExitStack() as stack:
        servers = [small_cluster.server(name=f"server-{n}", run="r-1") for n in range(2)]
        clients = [small_cluster.client(server, seed=n) for n, server in enumerate(servers)]
        proxy = small_cluster.proxy(servers)
        small_cluster.urls = [stack.enter_context(NodePages("127.0.0.1:0", node)).url for node in (*servers, proxy)]
        for turn in range(5):
            for number, client in enumerate(clients):
                client.log(f"line {turn} of {number}")
                client.update(100.0)
        clients[0].log("\x1b[2Jgone\r\nagain")
        for client in clients:
            record(client, episodes=2, length=20)
            assert client.push_cache(100.0)
            client.update(100.0)
        until(lambda: all(server.total_caches == 1 for server in servers))
        small_cluster.servers_there, small_cluster.clients_there = servers, clients
        yield small_cluster
        small_cluster.close()


@pytest.fixture
def history():
    with History(None) as memory_history:
        yield memory_history
