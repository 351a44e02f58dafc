"""What is inside of a writer when its client ends: it is stored and counted, and steps that come later are refused."""

import gc
import logging
import threading

import numpy as np
import pytest

from memoire.client.local_memory import SIDES, side_of
from memoire.errors import Closed, ParameterError
from memoire.limits import Limits
from netkit import DEADLINE, QUICK, in_thread, until

pytestmark = pytest.mark.slow

STORAGES = ["caches", "episodes"]


def step(writer, t, *, terminated=False, environments=None):
    lead = () if environments is None else (environments,)
    obs, after = (np.full((*lead, 4), value, np.float32) for value in (t, t + 1))
    ended, going = np.full(lead, terminated)[()], np.zeros(lead, np.bool_)[()]
    writer.step(obs, np.zeros(lead, np.int32)[()], np.ones(lead)[()], ended, going, after)


def held(server):
    stats = server.stats().tables["default"]
    return stats.held_caches, stats.held_samples


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("environments", [None, 3])
def test_open_episodes_are_stored_at_close_and_later_steps_are_refused(cluster, storage, environments):
    server = cluster.server(storage=storage, limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    writers = [client.writer(num_envs=environments, autoreset="disabled") for _ in range(2)]
    count = 2 * (environments or 1)
    for t in range(5):
        for writer in writers:
            step(writer, t, environments=environments)
    memory = client.memory
    assert client.close(DEADLINE)
    assert (server.total_steps, server.total_episodes) == (5 * count, 0)  # as `reset`: their returns are not whole
    if storage == "episodes":
        until(lambda: held(server) == (count, 5 * count))
        assert set(server.get_batch(100).next_obs[:, 0].tolist()) == {1.0, 2.0, 3.0, 4.0, 5.0}
    else:
        assert (memory.num_episodes, memory.num_entries) == (count, 5 * count)
    for writer in writers:
        for call in (lambda each: step(each, 5, environments=environments), lambda each: each.reset()):
            with pytest.raises(Closed, match="this client is closed"):
                call(writer)
        writer.close()  # as at the end of a with statement
    for count_it in (lambda: client.on_entries(1), lambda: client.on_episode(0, 1, 1.0)):
        with pytest.raises(Closed):
            count_it()
    assert client.stats().steps == 5 * count


def test_an_episode_whose_writer_is_gone_is_stored_too(cluster):
    server = cluster.server(storage="episodes", limits=QUICK)
    client = cluster.client(server, limits=QUICK)

    def play():
        writer = client.writer()
        for t in range(4):
            step(writer, t)

    play()
    gc.collect()
    play()  # takes the lane of the first, whose episode it must not discard
    until(lambda: held(server) == (1, 4))
    gc.collect()
    assert client.close(DEADLINE)
    until(lambda: held(server) == (2, 8))


def test_what_a_memory_that_is_replaced_holds_is_stored(cluster):
    server = cluster.server(storage="episodes", limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    writer = client.writer()
    step(writer, 0)
    client.sync(50, timeout=DEADLINE)
    until(lambda: held(server) == (1, 1))
    with pytest.raises(Closed, match="the writer is closed"):
        step(writer, 1)


def test_an_episode_that_waits_for_room_leaves_when_its_client_is_closed(cluster):
    server = cluster.server(storage="episodes", limits=Limits(credit=1))
    way = cluster.way(server, drop=0.0, double=0.0)
    client = cluster.client(way.endpoint, limits=QUICK, on_full="block")
    client.configure_limits(block_timeout=DEADLINE)
    writer = client.writer()
    way.drop = 1.0
    step(writer, 0, terminated=True)
    waiting, box = in_thread(lambda: step(writer, 1, terminated=True))
    until(lambda: client._session.schedule.pressed)
    closing, closed = in_thread(client.close, DEADLINE)
    until(lambda: client.closed)
    way.drop = 0.0
    for thread in (waiting, closing):
        thread.join(DEADLINE)
    assert (box, closed) == ({"value": None}, {"value": True})
    until(lambda: (server.total_steps, held(server)) == (2, (2, 2)))
    with pytest.raises(Closed):
        step(writer, 2)


def test_a_client_that_cannot_store_what_is_open_says_so(cluster, caplog):
    server = cluster.server(storage="episodes", limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    writer = client.writer()
    step(writer, 0)
    entered, leave = threading.Event(), threading.Event()

    def stay():
        with writer._inside:
            entered.set()
            leave.wait(DEADLINE)

    inside, _ = in_thread(stay)
    assert entered.wait(DEADLINE)
    with caplog.at_level(logging.WARNING, "memoire.client.client"):
        client.close(0.1)
    leave.set()
    inside.join(DEADLINE)
    assert "does not store 1 entries: a thread is still inside of their writer" in caplog.text
    with pytest.raises(Closed, match="this client"):
        step(writer, 1)


def test_a_kind_of_table_that_actors_cannot_fill_is_refused_by_name():
    """It was taken for episodes, and its home refused each of them."""
    with pytest.raises(
        ParameterError, match=r"storage must be one of 'caches', 'episodes', 'rollouts'.* got 'prompts'"
    ):
        side_of("prompts")
    for kind in SIDES:
        assert side_of(kind).STORED
