"""Ragged columns in a cluster: caches carry values of any length without padding, and each value is checked."""

import numpy as np
import pytest

from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables.caches.pool import Pool
from memoire.tables.table import Table
from memoire.wire import containers
from memory_checks import filled
from netkit import pool_in, until
from poolkit import assert_same_samples, far_away

SCHEMA = Schema(
    {
        "obs": {"cloud": Column(np.float32, (None, 3), "state"), "speed": np.float32},
        "action": np.int32,
        "reward": np.float32,
        "words": Column(np.int16, (None,)),
    }
)
CHOICES = [
    Parameters(),
    Parameters(frame_stack=3, multi_step=2, start="zero", next=("obs.cloud", "words")),
    Parameters(prev=("words", "action"), next=("obs.cloud",)),
    Parameters(prev=("obs.cloud",), next=()),
    Parameters(frame_stack=2, sequence_length=4, sequence_overlap=1, start="zero"),
    Parameters(sequence_length=3, sequence_first=("words",)),
]


def entry(rng, step: int):
    cloud = rng.integers(0, 4, (rng.integers(0, 6), 3)).astype(np.float32)
    return cloud, float(step), step, 1.0, np.arange(step % 5)


def memory_of(parameters: Parameters, seed: int = 0) -> Memory:
    memory, rng = Memory(SCHEMA, 200, parameters, seed=seed), np.random.default_rng(seed)
    ends = {"final": lambda: entry(rng, 99)[:2], "terminated": True}
    return filled(memory, lambda step: entry(rng, step), episodes=4, length=15, **ends)


@pytest.mark.parametrize("parameters", CHOICES)
def test_what_a_reader_draws_is_what_the_pool_holds(parameters) -> None:
    memory = memory_of(parameters)
    pool = Pool(SCHEMA, parameters, seed=1)
    pool.add(b"client-number-01", 1, containers.check(containers.build(memory, 60, now=1.0), pool.layout))
    gathered = far_away(pool, 25)[0].gathered
    assert len(gathered.ids) == 25
    assert_same_samples(gathered, memory.gather(gathered.ids["number"]))


def play(client, episodes: int = 3, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    writer = client.writer()
    state = {"cloud": entry(rng, 0)[0], "speed": 0.0}
    for step in range(1, 20 * episodes + 1):
        after = {"cloud": entry(rng, 0)[0], "speed": float(step)}
        writer.step(state, step, 1.0, step % 20 == 0, False, after, words=np.full(step % 5, step % 100))
        state = after


def right(batch) -> None:
    """Check that values of one step stay together: the cloud fits the speed, and the words name the step."""
    assert len(np.unique(batch["obs.speed"])) > 5
    for i in range(len(batch.ids)):
        words = batch.words[i, : batch.words_length[i]]
        assert batch.words_length[i] == batch.action[i] % 5 and (words == batch.action[i] % 100).all()
        assert not batch.words[i, batch.words_length[i] :].any()
        assert not batch["obs.cloud"][i, batch["obs.cloud_length"][i] :].any()
    assert batch["obs.cloud"].shape[1] == batch["next_obs.cloud"].shape[1]


@pytest.mark.parametrize("storage", ["caches", "episodes"])
def test_servers_proxies_and_readers_carry_ragged_columns(cluster, storage) -> None:
    table = Table(SCHEMA, parameters=Parameters(cache_size=512, compression="zlib"), storage=storage)
    server = cluster.server(schema=None, tables={"clouds": table, "more": Table(SCHEMA)})
    proxy = cluster.proxy([server])
    reader = cluster.reader([proxy], table="clouds")
    for name, seed in (("clouds", 0), ("more", 1)):
        client = cluster.client(proxy, table=name)
        play(client, seed=seed)
        assert client.storage == "episodes" or client.push_cache(100.0)
        until(lambda client=client: client.update(100.0) is None and client.stats().in_flight_caches == 0)
        if name == "clouds":
            own = client.memory if storage == "caches" else pool_in(server, "clouds").memory
    assert own.num_entries == 60
    for batch in (server.table("clouds").get_batch(16, 100.0), next(reader.batches(16, 100.0))):
        right(batch)
        expected = own.gather(batch.ids["number"])
        np.testing.assert_array_equal(batch["obs.cloud_length"], expected.prev_lengths["obs.cloud"][:, 0])
        np.testing.assert_array_equal(batch["obs.cloud"], expected.prev["obs.cloud"][:, 0])
        batch.update_priorities(np.ones(16))
    mixed = next(server.batches({"clouds": 8, "more": 8}, 100.0))
    right(mixed.joined)
    np.testing.assert_array_equal(
        mixed.joined["obs.cloud_length"], np.concatenate([part["obs.cloud_length"] for part in mixed.values()])
    )
