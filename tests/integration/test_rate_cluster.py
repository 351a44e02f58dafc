"""Tests of limits on drawing and recording through a cluster: reasons of waits, and no deadlock."""

import contextlib
import dataclasses
import threading

import numpy as np
import pytest

from memoire.errors import NotEnoughSamples, ParameterError
from memoire.replay.parameters import Parameters
from memoire.tables.table import Table
from netkit import DEADLINE, QUICK, SCHEMA, in_thread, until


def step(writer, number=0, ends=False, version=0):
    obs = np.full(4, number, np.float32)
    writer.step(obs, np.int32(number), 1.0, ends, False, obs + 1, {}, model_version=version)


@contextlib.contextmanager
def acting(servers, *clients):
    """Step an environment for each client, in episodes of 20 steps; yield the number of steps of each."""
    stop, done = threading.Event(), [0] * len(clients)

    def act(place):
        writer, number = clients[place].writer(check=False), 0
        while not stop.is_set():
            step(writer, number, number % 20 == 19)
            number += 1
            done[place] = number

    threads = [in_thread(act, place) for place in range(len(clients))]
    try:
        yield done
    finally:
        stop.set()
        for server in servers:
            server.configure(samples_per_insert_tolerance=None)  # ends every wait
        for thread, box in threads:
            thread.join(DEADLINE)
            assert "error" not in box, box


def band(ratio=1.0, tolerance=64.0, **others):
    return Parameters(cache_size=8, samples_per_insert=ratio, samples_per_insert_tolerance=tolerance, **others)


def test_actors_wait_for_a_learner_and_a_learner_for_actors(cluster):
    server = cluster.server(parameters=band(), limits=QUICK)
    client = cluster.client(server, on_full="block", limits=QUICK)
    with acting([server], client) as done:
        reason = until(lambda: server.table("default").stats().rate.inserts_wait and client.stats().held_back)
        assert "more samples: draws are" in reason
        assert done[0] <= 64 + 1
        for _ in range(40):
            server.get_batch(32, timeout=100.0)
            assert -64 <= server.table("default").stats().rate.surplus <= 64
        rate = server.table("default").stats().rate
        assert rate.drawn == 40 * 32 and rate.inserted >= 40 * 32 - 64 and rate.forgiven == 0.0
        assert client.stats().held_back_for > 0.0 and client.stats().passed_steps <= 1
    until(lambda: not client.stats().held_back)


@pytest.mark.parametrize("learner", ["server", "reader"])
def test_a_batch_that_can_never_be_drawn_is_refused_and_one_that_has_to_wait_says_for_what(cluster, learner):
    server = cluster.server(parameters=band(min_size=50), limits=QUICK)
    source = server if learner == "server" else cluster.reader([server], limits=QUICK)
    with pytest.raises(ParameterError, match="batch_size must be at most 127"):
        source.get_batch(128, timeout=1.0)
    with pytest.raises(NotEnoughSamples, match="a batch of 8 has to wait: waiting for 50 more entries .0 of"):
        source.get_batch(8, timeout=1.0)


def test_a_reader_holds_several_servers_to_one_band_though_one_has_no_actors(cluster):
    parameters = band(ratio=1.0, tolerance=128.0)
    servers = [cluster.server(parameters=parameters, limits=QUICK, name=f"s{i}") for i in range(3)]
    actors = [cluster.client(server, on_full="block", limits=QUICK) for server in (servers[0], servers[0], servers[1])]
    reader = cluster.reader(servers, limits=QUICK)
    with acting(servers, *actors):
        drawn = sum(len(reader.get_batch(32, timeout=100.0)) for _ in range(40))
        rates = [server.table("default").stats().rate for server in servers]
        inserted, handed = sum(rate.inserted for rate in rates), sum(rate.drawn for rate in rates)
        # Servers learn of a batch at other servers with the reader's next message; a starving learner's draws beyond
        # the band are forgiven.
        forgiven = sum(rate.forgiven for rate in rates)
        assert -128 - 3 * 32 <= inserted - handed <= 128 + 3 * 32 + forgiven and handed >= drawn
        # The server without actors knows of the other servers' entries.
        assert rates[2].inserted == rates[2].drawn == 0 and rates[2].entries > 128


def test_whole_episodes_wait_or_are_skipped_and_none_is_half_counted(cluster):
    parameters = Parameters(samples_per_insert=4.0, samples_per_insert_tolerance=200.0)
    table = Table(SCHEMA, storage="episodes", parameters=parameters)
    server = cluster.server(tables={"default": table}, limits=QUICK, schema=None)
    patient = cluster.client(server, on_full="block", limits=QUICK)
    with acting([server], patient):
        until(lambda: patient.stats().held_back)
        rate = server.table("default").stats().rate
        assert rate.inserted <= 50 + 20 and rate.inserted % 20 == 0, "entries count as their episode leaves"
        for _ in range(20):
            server.get_batch(64, timeout=100.0)
        rate = server.table("default").stats().rate
        assert -200 <= rate.surplus <= 200 + 4 * 20 and rate.drawn == 20 * 64
        until(lambda: patient.stats().held_back)
        hasty = cluster.client(server, limits=QUICK)
        writer = hasty.writer(check=False)
        for number in range(60):
            step(writer, number, number % 20 == 19)
        stats = hasty.stats()
        assert stats.not_pushed["held back"] >= 1 and stats.steps == 60
        assert stats.passed_steps == 20 * stats.not_pushed["held back"]
        assert hasty.push_reason.startswith("held back")


def test_an_actor_that_leaves_caches_out_hears_soon_that_they_are_wanted_again(cluster):
    """An actor learns of the need for caches before its next report, which may come long after the stock is used up."""
    more = dataclasses.replace(QUICK, credit=1 << 16)  # few bytes, so that a few caches on the way bring no report
    server = cluster.server(parameters=Parameters(cache_size=8), limits=more)
    rarely = more.replace(update_every=1000.0)
    client = cluster.client(server, on_full="skip", limits=rarely)
    writer = client.writer(check=False)
    for number in range(60):
        step(writer, number, number % 20 == 19)

    def draw_if_there():
        if server.stats().unused_samples >= 8:
            server.get_batch(8, timeout=0.0)

    def push_until_held():
        draw_if_there()
        for _ in range(2):
            client.push_cache(timeout=0.0)
        client.update(timeout=100.0)
        return "waits until more is drawn" in client.stats().held_back

    client.push_cache(timeout=100.0)
    until(push_until_held)
    assert not client.push_cache(timeout=0.0)

    def draw_until_wanted():
        draw_if_there()
        step(writer)  # the step makes the news come without a heartbeat
        return client.push_cache(timeout=0.0)

    until(draw_until_wanted)
