"""What the tests of the dashboard share: actors that have something to show."""

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
