"""Clusters whose servers store episodes: samples as elsewhere, every episode accounted for, feedback in place."""

from itertools import pairwise

import numpy as np
import pytest

from memoire.errors import NotEnoughSamples, ParameterError
from memoire.limits import Limits
from memoire.replay.buffer import Buffer
from memoire.replay.columns import Column
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables.table import Table
from netkit import QUICK, SCHEMA, WIDE, in_thread, pool_in, record, until

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
    """The same steps of two environments for every writer; the first number of an observation names it."""
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
        given = {"value": rng.normal(size=2), "bootstrap_value": rng.normal(size=2), "model_version": 7}
        for writer in writers:
            writer.step(obs, rng.integers(0, 3, 2) * 0 + number % 5, reward, terminated, truncated, next_obs, **given)
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
    """Each sample under the name of the newest observation in its window."""
    found = {}
    stacks = batch.gathered.prev["obs"]
    for i, name in enumerate(stacks[:, -1, 0].tolist()):
        arrays = (batch.obs, batch.next_obs, batch.action, batch.reward, batch.discount, batch.steps, batch.qvest)
        found[name] = [np.asarray(array[i]).tolist() for array in arrays] + [float(batch.gathered.weight[i])]
    return found


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


def test_arrays_are_pushed_by_hand_and_counted_once(cluster):
    server = cluster.server(storage="episodes", limits=QUICK, multi_step=2)
    client = cluster.client(server, limits=QUICK)
    assert client.push_episode(EPISODE, terminated=True, model_version=4)
    assert client.push_episode(EPISODE, final_state=np.full(4, 2.0, np.float32), init_w=2.0)
    until(lambda: settled(client))
    assert (client.stats().episodes, client.stats().steps, server.total_steps) == (2, 10, 10)
    assert [ended.returned for _, ended in server.episodes()] == [5.0, 5.0]
    batch = server.get_batch(200)
    assert set(batch.model_version.tolist()) == {0, 4}
    assert set(batch.next_obs[:, 0].tolist()) == {0.0, 1.0, 2.0}  # what is behind a terminal entry is zeros


def test_each_storage_says_what_it_does_not_take(cluster):
    episodes, caches = cluster.server(storage="episodes", name="e"), cluster.server(name="c")
    shipping, drawing = cluster.client(episodes), cluster.client(caches)
    with pytest.raises(ParameterError, match="must be 'caches' for push_cache; server 'e' stores whole episodes"):
        shipping.push_cache()
    with pytest.raises(
        ParameterError, match="must be 'episodes' or 'rollouts' for push_episode; server 'c' stores caches"
    ):
        drawing.push_episode(EPISODE)
    with pytest.raises(NotEnoughSamples):
        episodes.get_batch(1)


def test_without_room_an_episode_is_skipped_whole_and_counted(cluster):
    limits = Limits(credit=1, update_every=0.02, resend_after=0.05)
    server = cluster.server(schema=WIDE, storage="episodes", limits=limits)
    way = cluster.way(server, drop=0.0, double=0.0)
    client = cluster.client(way.endpoint, limits=limits)
    record(client, episodes=1, length=5)
    until(lambda: settled(client))
    way.drop = 1.0  # nobody says what arrived
    record(client, episodes=3, length=5)
    stats = client.stats()
    assert (stats.pushed_caches, stats.skipped_caches, stats.episodes) == (2, 2, 4)
    assert stats.not_pushed == {"window full": 2}
    assert not client.push_episode(
        {"obs": np.zeros((3, 4000), np.float32), "reward": np.zeros(3, np.float32)}, timeout=0.01
    )
    assert client.push_reason == "window full"
    assert client.stats().episodes == 4  # counted when it is pushed
    client.configure_limits(on_full="block", block_timeout=10.0)
    thread, box = in_thread(record, client, 1, 5)
    until(lambda: client._session.schedule.pressed)
    way.drop = 0.0
    thread.join(100.0)
    assert "error" not in box
    until(lambda: settled(client))
    assert client.stats().accepted_caches == 3
    until(lambda: server.totals().skipped_caches == 3)
    assert server.stats().tables["default"].held_samples == 15


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


def test_learners_here_and_far_away_set_priorities_at_once(cluster):
    servers = [cluster.server(storage="episodes", limits=QUICK, name=name, seed=i) for i, name in enumerate("ab")]
    proxy = cluster.proxy(servers, limits=QUICK)
    clients = [cluster.client(server, limits=QUICK) for server in servers]
    for client in clients:
        record(client, episodes=3, length=10)
        until(lambda client=client: settled(client))
    memories = [pool_in(server).memory for server in servers]
    batch = servers[0].get_batch(16)
    assert batch.update_priorities(np.full(16, 9.0)) == (16, 0, 0, 0)
    assert {9.0} == set(
        np.round(memories[0].contents()["meta"]["priority"][batch.ids["number"] % memories[0].capacity], 4).tolist()
    )
    table = servers[0].stats().tables["default"]
    assert (table.applied, table.stale) == (16, 0)
    reader = cluster.reader([proxy], limits=QUICK)
    until(lambda: len(reader.servers) == 2)
    owners = {pool_in(server).owner: i for i, server in enumerate(servers)}
    seen = set()
    for round in range(100):
        batch = reader.get_batch(32, 100.0)
        batch.update_priorities(np.full(32, 20.0 + round))
        where = [owners[one.tobytes()] for one in batch.ids["client"]]
        for i, number in zip(where, batch.ids["number"].tolist(), strict=True):
            seen.add((i, number % memories[i].capacity))
        if {i for i, _ in seen} == {0, 1} and round > 3:
            break
    assert {i for i, _ in seen} == {0, 1}
    until(lambda: all(memories[i].contents()["meta"]["priority"][row] >= 19.9 for i, row in seen))
    assert sum(server.stats().tables["default"].stale for server in servers) == 0
    assert reader.stats().feedback_lost == 0
    assert sum(client.stats().applied for client in clients) == 0  # actors have nothing to do with it


def test_importance_from_unequal_servers_gives_the_plain_mean(cluster):
    """One server has 15 entries of small weight, the other 150 of a large one; a third has none."""
    chosen = Parameters(priority_exponent=1.0, importance_exponent=1.0)
    servers = [cluster.server(storage="episodes", limits=QUICK, parameters=chosen, seed=i) for i in range(3)]
    values, rng = [], np.random.default_rng(1)
    for server, (entries, weight) in zip(servers, ((15, 0.1), (150, 30.0)), strict=False):
        client = cluster.client(server, limits=QUICK)
        marks = rng.normal(weight, 1.0, entries).astype(np.float32)
        columns = {"obs": np.repeat(marks[:, None], 4, axis=1), "action": np.zeros(entries, np.int32)}
        columns["reward"] = np.zeros(entries, np.float32)
        assert client.push_episode(columns, terminated=True, init_w=rng.uniform(0.1, 1.0, entries) * weight)
        until(lambda client=client: settled(client))
        values.append(marks)
    reader = cluster.reader(servers, limits=QUICK)
    until(lambda: len(reader.servers) == 3)
    means = []
    for _ in range(80):
        batch = reader.get_batch(64, 100.0)
        assert batch.left_out == 0.0
        means.append(float((batch.importance * batch.divisor * batch.obs[:, 0]).mean()))
    truth, error = np.concatenate(values).mean(), np.std(means) / np.sqrt(len(means))
    assert abs(np.mean(means) - truth) < 5.0 * error


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


def test_episodes_stand_beside_caches_in_one_server(cluster):
    tables = {"online": Table(SCHEMA), "demo": Table(SCHEMA, storage="episodes", capacity=100)}
    server = cluster.server(tables=tables, schema=None, limits=QUICK)
    actor, teacher = (cluster.client(server, table=name, limits=QUICK) for name in tables)
    record(actor)
    assert actor.push_cache()
    record(teacher, episodes=2)
    for client in (actor, teacher):
        until(lambda client=client: settled(client))
    mixed = next(iter(server.batches({"online": 6, "demo": 2})))
    stats = server.stats().tables
    assert (stats["online"].storage, stats["demo"].storage) == ("caches", "episodes")
    assert len(server.table("demo").get_batch(50).ids) == 50
    assert mixed.update_priorities({"online": np.ones(6), "demo": np.ones(2)}) == (2, 0, 6, 0)
    assert server.stats().tables["demo"].applied == 2
