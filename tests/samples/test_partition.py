"""Learners that divide the clients: each draws as if only its own clients existed."""

from collections import defaultdict

import numpy as np

from memoire.replay.parameters import Parameters
from netkit import SCHEMA, entry, until

EXACT = Parameters(importance_exponent=1.0, priority_exponent=1.0, cache_size=256)


def test_learners_that_part_the_clients_are_exact_for_their_own(cluster):
    """Each learner has some of the clients, which differ in size and weight at each of three servers."""
    names = [f"s{number}" for number in range(3)]
    servers = [
        cluster.server(name=name, parameters=EXACT.replace(reuse_cache=True), seed=index)
        for index, name in enumerate(names)
    ]
    clients = [cluster.client(server) for server in servers for _ in range(2)]
    size, value = {}, {}
    for index, client in enumerate(clients):
        size[client.client_id], value[client.client_id] = 30 + 20 * index, float(index)
        client.memory.open()
        for step in range(30 + 20 * index):
            client.memory.add(0, entry(SCHEMA, float(index)), 0.1 + index + step % 7)
        client.memory.close(terminated=True)
        for _ in range(3):
            assert client.push_cache(100.0)
        client.update(100.0)
    until(lambda: sum(server.total_caches for server in servers) == 18)
    readers = [cluster.reader(servers, seed=number, partition=(number, 2)) for number in range(2)]
    means, owners = defaultdict(list), defaultdict(set)
    for _ in range(30):
        for number, reader in enumerate(readers):
            batch = reader.get_batch(128, 100.0)
            undivided = batch["importance"].astype(np.float64) * batch.divisor
            means[number].append((undivided * batch["obs"][:, 0]).mean())
            owners[number] |= {owner.tobytes() for owner in batch["ids"]["client"]}
    assert not owners[0] & owners[1] and owners[0] | owners[1] == size.keys()
    assert len(owners[0]) == len(owners[1]) == 3
    for number, mine in owners.items():
        expected = sum(size[owner] * value[owner] for owner in mine) / sum(size[owner] for owner in mine)
        batch_means = np.array(means[number])
        assert (
            abs(batch_means.mean() - expected)
            < 5.0 * batch_means.std(ddof=1) / np.sqrt(len(batch_means)) + 2e-3 * expected
        )
