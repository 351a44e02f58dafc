"""What the tests of the dashboard share: actors that have something to show."""

import numpy as np

from memoire.dashboard.collect.history import HistoryPoint
from memoire.wire.frames import name_hash
from memoire.wire.rows import ACCOUNT
from netkit import record, until


def three_actors(cluster, server, line):
    """Three clients: number n has n episodes of 20 steps, a scalar, a cache, and a line that ends `line`."""
    clients = [cluster.client(server, seed=n) for n in range(3)]
    for number, client in enumerate(clients, 1):
        record(client, episodes=number, length=20)
        client.scalars({"epsilon": number / 10})
        client.log(f"line of {number} {line}")
        assert client.push_cache(100.0)
        client.update(100.0)
    until(lambda: server.total_caches == 3)
    server.scalars({"loss": 0.5})
    server.get_batch(16, timeout=100.0)
    return clients


def account(client, home, *, steps, accepted, seen, since=0):
    """One row: this client's steps in all, and its caches that this account of this home has taken."""
    row = np.zeros(1, ACCOUNT)
    row["client"] = np.frombuffer(bytes([client]) * 16, "<u8")
    row["home"], row["since"] = name_hash(f"server-{home}"), since
    row["steps"], row["accepted_caches"], row["received_caches"], row["pushed_caches"] = steps, *[accepted] * 3
    row["first_seen"], row["last_seen"] = 1.0, seen
    return row


def one(value):
    return HistoryPoint(value, value, value)
