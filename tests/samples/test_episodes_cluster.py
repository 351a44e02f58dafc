"""Clusters whose servers store episodes: the usual samples, an account of each episode, and feedback in place."""

from itertools import pairwise

import numpy as np
import pytest

from classic_help import templates
from memoire.classic.client import ReplayMemoryClient
from memoire.classic.server import ReplayMemoryServer
from memoire.errors import NotEnoughSamples, ParameterError
from memoire.limits import Limits
from memoire.replay.buffer import Buffer
from memoire.replay.columns import Column
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from netkit import QUICK, WIDE, pool_in, record, until

VALUED = Schema(
    {
        "obs": Column(np.float32, (3,), "state"),
        "action": Column(np.int32),
        "reward": Column(np.float32, (), "reward"),
        "value": Column(np.float32, (), "value"),
    }
)
EPISODE = {"obs": np.ones((5, 4), np.float32), "action": np.zeros(5, np.int32), "reward": np.ones(5, np.float32)}


def play(writers, steps=90, seed=0):
    """Record the same steps of two environments with each writer; the first number of an observation is unique."""
    rng = np.random.default_rng(seed)
    obs = np.zeros((2, 3), np.float32)
    number = 0

    def observe():
        nonlocal number
        number += 2
        return np.column_stack([[number, number + 1], rng.normal(size=(2, 2))]).astype(np.float32)

    obs = observe()
    for writer in writers:
        writer.reset(obs)
    for _ in range(steps):
        next_obs, reward = observe(), rng.normal(size=2)
        terminated, truncated = rng.random(2) < 0.08, rng.random(2) < 0.05
        values = {"value": rng.normal(size=2), "bootstrap_value": rng.normal(size=2), "model_version": 7}
        for writer in writers:
            writer.step(obs, rng.integers(0, 3, 2) * 0 + number % 5, reward, terminated, truncated, next_obs, **values)
        done = terminated | truncated
        obs = next_obs.copy()
        if done.any():
            fresh = observe()
            obs[done] = fresh[done]
            for writer in writers:
                writer.reset(obs, mask=done)
    for writer in writers:
        writer.close()


def by_name(batch):
    """Return each sample by the number of the newest observation in its window."""
    samples = {}
    stacks = batch.gathered.prev["obs"]
    for i, name in enumerate(stacks[:, -1, 0].tolist()):
        arrays = (batch.obs, batch.next_obs, batch.action, batch.reward, batch.discount, batch.steps, batch.qvest)
        samples[name] = [np.asarray(array[i]).tolist() for array in arrays] + [float(batch.gathered.weight[i])]
    return samples


WAYS = {
    "plain": {},
    "windows": {"frame_stack": 2, "multi_step": 3, "start": "repeat"},
    "skipped starts": {"frame_stack": 3, "multi_step": 2, "start": "skip", "compression": "zlib"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_caches_and_episodes_give_the_same_samples_of_the_same_entries(cluster, way):
    chosen = Parameters(priority_exponent=0.7, discount=0.9, mix_lambda=0.8, cache_size=256, **WAYS[way])
    buffer = Buffer(
        VALUED,
        1000,
        seed=3,
        discount=0.9,
        **{k: v for k, v in chosen.to_wire().items() if k not in ("discount",)},
    )
    caches = cluster.server(schema=VALUED, parameters=chosen, limits=QUICK)
    episodes = cluster.server(schema=VALUED, parameters=chosen, limits=QUICK, storage="episodes", capacity=1000)
    clients = [cluster.client(server, limits=QUICK) for server in (caches, episodes)]
    play([each.writer(num_envs=2, autoreset="disabled") for each in (buffer, *clients)])
    for _ in range(4):
        assert clients[0].push_cache(100.0)
    for client in clients:
        client.update(100.0)
    reader = cluster.reader([episodes], limits=QUICK)
    drawn = [
        by_name(buffer.sample(1500)),
        by_name(caches.get_batch(1000, timeout=100.0)),
        by_name(until(lambda: episodes.get_batch(1500, timeout=100.0))),
        by_name(reader.get_batch(1500, 100.0)),
    ]
    until(lambda: episodes.stats().tables["default"].held_samples == 180)
    truth = drawn[0]
    assert min(map(len, drawn)) > 0.7 * len(truth)
    for other in drawn[1:]:
        assert set(other) <= set(range(1000))
        for name in set(other) & set(truth):
            assert other[name] == truth[name], name
    pool = pool_in(episodes)
    np.testing.assert_allclose(pool.memory.sums(), buffer.memory.sums(), rtol=1e-12)


def settled(client):
    client.update(100.0)
    return client.stats().in_flight_caches == 0


def test_each_storage_says_what_it_does_not_take(cluster):
    episodes, caches = cluster.server(storage="episodes", name="e"), cluster.server(name="c")
    shipping, drawing = cluster.client(episodes), cluster.client(caches)
    with pytest.raises(ParameterError, match=r"push_cache\(\) cannot be called: server 'e' stores whole episodes"):
        shipping.push_cache()
    with pytest.raises(ParameterError, match=r"push_episode\(\) cannot be called: server 'c' stores caches"):
        drawing.push_episode(EPISODE)
    with pytest.raises(NotEnoughSamples):
        episodes.get_batch(1)


@pytest.mark.parametrize("storage", ["episodes", "rollouts"])
def test_endless_episodes_are_cut_so_that_each_part_fits_a_message(cluster, storage):
    server = cluster.server(schema=WIDE, storage=storage, limits=Limits(message_bytes=100_000), capacity=1000)
    client = cluster.client(server)
    with pytest.raises(ParameterError, match=r"^longest must be at most 5: .* limits.message_bytes \(100000\), got 6"):
        client.writer(longest=6)
    writer, obs = client.writer(), np.zeros((30, 4000), np.float32)
    for before, after in pairwise(obs):
        writer.step(before, None, 0.0, False, False, after)
    until(lambda: (client.update(100.0), client.stats().accepted_caches == 5)[1])


def test_sequences_and_other_samplers_are_drawn_from_stored_episodes(cluster):
    server = cluster.server(storage="episodes", limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    record(client, episodes=4, length=9)
    until(lambda: settled(client))
    reader = cluster.reader([server], limits=QUICK)
    assert reader.get_batch(8, 100.0).obs.shape == (8, 4)
    server.configure(sequence_length=4, sequence_overlap=2)
    assert server.get_batch(8).obs.shape == (8, 5, 4)
    until(lambda: reader.get_batch(8, 100.0).obs.shape == (8, 5, 4))
    server.configure(sequence_length=0, sequence_overlap=0, prioritization="rank")
    assert server.get_batch(8).obs.shape == (8, 4)


def test_the_classic_classes_store_episodes_as_well(cluster):
    zeros = templates()
    shared = {"context": cluster.context, "limits": QUICK}
    with ReplayMemoryServer(*zeros, 100, "inproc://pub", 2, storage="episodes", **shared) as server:
        server.server.add_request_worker("inproc://req")
        server.server.add_pull_worker("inproc://push", bind=True)
        with ReplayMemoryClient("inproc://pub", "inproc://req", "inproc://push", **shared) as client:
            for _ in range(3):
                client.rem.new_episode()
                for step in range(5):
                    client.rem.add_entry(*(np.full_like(each, step) for each in (*zeros[:5], zeros[6])))
                client.rem.close_episode(final_state=zeros[0])
            client.update_counter()
            until(lambda: server.total_caches == 3)
            assert (server.total_episodes, server.total_steps) == (3, 15)
            assert server.server.stats().held_caches == 2
            assert client.push_cache() == -1
            assert "push_cache() cannot be called" in client.push_failure
            prev, _, weight = server.get_batch(10)
            assert prev.state.shape[0] == len(weight) == 10
