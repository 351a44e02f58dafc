"""Several learners part the clients among them: each is as if the others' clients were not there."""

from collections import defaultdict

import msgspec
import numpy as np
import pytest

from memoire.errors import ParameterError, ProtocolError
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.tables.caches.pool import Pool
from memoire.wire import containers as pack
from memoire.wire import containers as unpack
from memoire.wire import types
from memoire.wire.frames import _decode
from netkit import SCHEMA, entry, until
from poolkit import name

EXACT = Parameters(importance_exponent=1.0, priority_exponent=1.0, cache_size=256)


def pool_of(clients):
    pool = Pool(SCHEMA, EXACT, seed=1)
    memory = Memory(SCHEMA, 50, EXACT, seed=2)
    memory.open()
    for step in range(50):
        memory.add(0, entry(SCHEMA, step))
    memory.close(terminated=True)
    for number in range(1, clients + 1):
        pool.add(name(number), 1, unpack.check(pack.build(memory, 100, now=0.0), pool.layout))
    return pool


def clients_in(rows):
    return {row.tobytes() for row in rows["client"]}


def test_every_client_is_in_one_part_and_parts_are_alike_in_size():
    pool = pool_of(8)
    parts = [pool.reserve(name(100 + part), 30, 0, (part, 3)) for part in range(3)]
    assert [len(rows) for rows in parts] == [3, 3, 2]
    assert set.union(*map(clients_in, parts)) == {name(number) for number in range(1, 9)}
    assert clients_in(parts[1]) == {name(2), name(5), name(8)}
    for rows in parts:  # all that is asked for is kept among its own clients
        assert 30 <= rows["reserved"].sum() < 40
    pool.forget(name(2))
    assert clients_in(pool.reserve(name(101), 30, 0, (1, 3))) == {name(5), name(8)}, "the others stay where they are"


def test_a_learner_that_takes_another_part_gives_the_former_back():
    pool = pool_of(2)
    pool.reserve(name(100), 100, 0, (0, 2))
    rows = pool.reserve(name(100), 100, 0, (1, 2))
    assert clients_in(rows) == {name(2)} and rows["reserved"].sum() == 100
    assert pool.reserve(name(101), 100, 0, (0, 2))["reserved"].sum() == 100


def test_a_part_that_is_none_is_refused():
    pool = pool_of(1)
    for part in ((2, 2), (0, 0)):
        with pytest.raises(ValueError, match="part"):
            pool.reserve(name(100), 1, 0, part)
    for kind in (types.SUMS, types.DRAW):
        assert _decode(kind, memoryview(msgspec.msgpack.encode({"part": 1, "of": 2}))).of == 2
        for part, of in ((2, 2), (0, 0)):
            with pytest.raises(ProtocolError, match="of"):
                _decode(kind, memoryview(msgspec.msgpack.encode({"part": part, "of": of})))


@pytest.mark.parametrize("wrong", [(2, 2), (-1, 2), (0, 0), (0,), 1, ("0", 2), (True, 2), (0, 1 << 32)])
def test_a_partition_that_is_none_is_refused_before_anything_is_asked(cluster, wrong):
    with pytest.raises(ParameterError, match="partition.*learner i, counted from 0, of n"):
        cluster.reader(["tcp://127.0.0.1:9"], timeout=None, partition=wrong)


def test_learners_that_part_the_clients_are_exact_for_their_own(cluster):
    """Few clients at each of three servers, of different size and weight: every learner has some."""
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
        found = np.array(means[number])
        assert abs(found.mean() - expected) < 5.0 * found.std(ddof=1) / np.sqrt(len(found)) + 2e-3 * expected


def test_learners_that_part_the_clients_draw_from_all_episodes_that_a_server_stores(cluster):
    server = cluster.server(storage="episodes", capacity=1000)
    clients = [cluster.client(server) for _ in range(2)]
    for number, client in enumerate(clients):
        columns = {"obs": np.full((30, 4), number), "action": np.zeros(30, np.int32), "reward": np.ones(30)}
        assert client.push_episode(columns, terminated=True, final_state=np.zeros(4))
    readers = [cluster.reader([server], seed=number, partition=(number, 2)) for number in range(2)]
    until(lambda: server.stats().tables["default"].held_samples == 60)
    for reader in readers:
        assert set(reader.get_batch(128, 100.0)["obs"][:, 0]) == {0.0, 1.0}
