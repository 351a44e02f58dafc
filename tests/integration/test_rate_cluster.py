"""Limits of drawing and recording through a cluster: who waits, why, and that nobody waits for ever."""

import contextlib
import dataclasses
import threading

import numpy as np
import pytest

from memoire.errors import MemoireTimeout, NotEnoughSamples, ParameterError
from memoire.replay.parameters import Parameters
from memoire.tables.table import Table
from netkit import QUICK, SCHEMA, in_thread, pool_in, until


def step(writer, number=0, ends=False, version=0):
    obs = np.full(4, number, np.float32)
    writer.step(obs, np.int32(number), 1.0, ends, False, obs + 1, {}, model_version=version)


def acting(client, stop, done):
    """Step an environment until told to stop, each episode 20 steps."""

    def run():
        writer, number = client.writer(check=False), 0
        while not stop.is_set():
            step(writer, number, number % 20 == 19)
            number += 1
            done[0] = number

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def band(ratio=1.0, tolerance=64.0, **others):
    return Parameters(cache_size=8, samples_per_insert=ratio, samples_per_insert_tolerance=tolerance, **others)


def test_actors_wait_for_a_learner_and_a_learner_for_actors(cluster):
    server = cluster.server(parameters=band(), limits=QUICK)
    client = cluster.client(server, on_full="block", limits=QUICK)
    stop, done = threading.Event(), [0]
    thread = acting(client, stop, done)
    try:
        reason = until(lambda: server.table("default").stats().rate.inserts_wait and client.stats().held_back)
        assert "more samples are drawn: learners are" in reason
        assert done[0] <= 64 + 1
        for _ in range(40):
            server.get_batch(32, timeout=100.0)
            assert -64 <= server.table("default").stats().rate.surplus <= 64
        rate = server.table("default").stats().rate
        assert rate.drawn == 40 * 32 and rate.inserted >= 40 * 32 - 64 and rate.forgiven == 0.0
        assert client.stats().held_back_for > 0.0 and client.stats().passed_steps <= 1
    finally:
        stop.set()
        thread.join(100.0)
    server.configure(samples_per_insert_tolerance=None)
    until(lambda: not client.stats().held_back)


def test_a_learner_that_draws_again_and_again_waits_for_entries(cluster):
    server = cluster.server(parameters=band(ratio=2.0, tolerance=40.0, reuse_cache=True), limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    writer = client.writer(check=False)
    for number in range(9):
        step(writer, number)
    until(lambda: server.table("default").stats().rate.inserted == 9)
    for _ in range(5):
        server.get_batch(10, timeout=100.0)
    assert server.table("default").stats().rate.surplus == -32.0
    with pytest.raises(NotEnoughSamples, match="a batch of 10 has to wait: waits for 1 more entries") as caught:
        server.get_batch(10)
    assert caught.value.reason == server.table("default").stats().rate.draws_wait
    with pytest.raises(MemoireTimeout, match="waits for 1 more entries"):
        next(server.batches(10, timeout=0.05))
    reader = cluster.reader([server], limits=QUICK)

    def hears_why():
        with pytest.raises((NotEnoughSamples, MemoireTimeout)) as caught:
            reader.get_batch(10, timeout=0.2)
        return "has to wait: waits for 1 more entries" in str(caught.value)

    until(hears_why)
    assert reader.stats().waits_for.startswith("waits for 1 more entries")
    step(writer, 9)
    client.update()
    assert len(reader.get_batch(10, timeout=100.0)) > 0
    with pytest.raises(ParameterError, match="batch_size must be at most 78"):
        reader.get_batch(79)


@pytest.mark.parametrize("change", ["run", "band"])
def test_a_reader_forgets_its_balance_with_the_run_and_the_band_that_it_is_of(cluster, change):
    """A learner that was 25 samples behind begins the next run, or the next band, at nothing, as its server does."""
    server = cluster.server(parameters=band(tolerance=40.0, reuse_cache=True), limits=QUICK)
    client, reader = cluster.client(server, limits=QUICK), cluster.reader([server], limits=QUICK, ahead=1)
    writer, limiter = client.writer(check=False), server._tables.first.limiter

    def go_on(steps):
        """Record, draw, and wait until the reader has told the server how it stands with all."""
        for number in range(steps):
            step(writer, number)
        client.update(60.0)
        assert len(reader.get_batch(5, 60.0)) > 0
        until(lambda: (standing := limiter.standing()) is not None and standing.is_told)
        until(lambda: reader.stats().prefetched == 1)  # and no draw is on its way
        return limiter.stats()

    before = go_on(35)
    assert before.surplus == before.inserted - before.drawn >= 25.0
    if change == "run":
        server.begin_run("next")
    else:
        server.configure(samples_per_insert_tolerance=41.0)
    begun = limiter.stats()
    assert begun.surplus == 0.0
    if change == "run":
        until(lambda: client.run == "next" and reader._directory.run == server._dispatcher.run)
    else:
        until(lambda: client.parameters == reader.parameters == server.parameters)
    after = go_on(10)
    assert after.surplus == (after.inserted - begun.inserted) - (after.drawn - begun.drawn) > -20.0


def test_an_actor_that_does_not_wait_goes_on_acting_and_pushes_nothing(cluster):
    server = cluster.server(parameters=band(tolerance=16.0), limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    writer = client.writer(check=False)
    for number in range(200):
        step(writer, number)
    stats = client.stats()
    assert stats.passed_steps == 200 - 16 and stats.steps == 200
    assert stats.not_pushed["held back"] == 200 - 16
    assert client.push_reason.startswith(("held back: waits until", "held back: learners are behind"))
    assert stats.pushed_caches == 2
    assert client.push_cache(0.0) is False and client.push_reason.startswith("held back")
    client.update()
    assert server.totals().steps == 200
    assert server.table("default").stats().rate.inserted == 16


def test_nothing_is_drawn_before_enough_is_there_and_the_error_says_so(cluster):
    server = cluster.server(parameters=Parameters(cache_size=8, min_size=50), limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    writer = client.writer(check=False)
    for number in range(40):
        step(writer, number)
    client.update()
    with pytest.raises(NotEnoughSamples, match=r"has to wait: waits for \d+ more entries: \d+ can be drawn, and 50"):
        server.get_batch(8)
    assert server.table("default").stats().rate.draws_wait.startswith("waits for")
    for number in range(30):
        step(writer, number)
    client.update()
    assert len(server.get_batch(8, timeout=100.0)) > 0


def test_a_batch_that_can_never_be_drawn_is_refused(cluster):
    server = cluster.server(parameters=band(tolerance=64.0))
    with pytest.raises(ParameterError, match="batch_size must be at most 127"):
        server.get_batch(128)
    with pytest.raises(ParameterError, match="samples_per_insert_tolerance"):
        server.configure(samples_per_insert_tolerance=0.1)
    assert server.parameters.samples_per_insert_tolerance == 64.0


def test_samples_that_are_lost_do_not_stop_a_cluster(cluster):
    server = cluster.server(parameters=band(tolerance=40.0), limits=QUICK)
    client = cluster.client(server, on_full="block", limits=QUICK)
    stop, done = threading.Event(), [0]
    thread = acting(client, stop, done)
    try:
        until(lambda: client.stats().held_back)
        pool_in(server).clear()  # as if its caches had been lost
        for _ in range(6):
            server.get_batch(32, timeout=100.0)
    finally:
        stop.set()
        server.configure(samples_per_insert_tolerance=None)
        thread.join(100.0)


def test_held_samples_that_are_too_old_are_passed_over_and_counted(cluster):
    server = cluster.server(parameters=Parameters(cache_size=8, max_model_lag=1), limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    writer = client.writer(check=False)
    for number in range(9):
        step(writer, number, version=1)
    until(lambda: server.stats().unused_samples == 8)
    for _ in range(3):
        server.publish("policy", b"weights")
    with pytest.raises(NotEnoughSamples):
        server.get_batch(1)
    assert server.table("default").stats().passed_over_samples == 8
    until(lambda: client.memory.num_positive == 0 or (client.update(), False)[1])
    for number in range(9):
        step(writer, number, version=3)
    assert set(server.get_batch(8, timeout=100.0).model_version.tolist()) == {3}


def test_a_reader_holds_several_servers_to_one_band_though_one_has_no_actors(cluster):
    parameters = band(ratio=1.0, tolerance=128.0)
    servers = [cluster.server(parameters=parameters, limits=QUICK, name=f"s{i}") for i in range(3)]
    actors = [cluster.client(server, on_full="block", limits=QUICK) for server in (servers[0], servers[0], servers[1])]
    reader = cluster.reader(servers, limits=QUICK)
    stop = threading.Event()
    dones = [[0] for _ in actors]
    threads = [acting(client, stop, done) for client, done in zip(actors, dones, strict=True)]
    try:
        drawn = 0
        for _ in range(40):
            drawn += len(reader.get_batch(32, timeout=100.0))
        rates = [server.table("default").stats().rate for server in servers]
        inserted, handed = sum(rate.inserted for rate in rates), sum(rate.drawn for rate in rates)
        # Each server hears of a batch at the others with the reader's next message; what a learner that had waited too
        # long was given beyond the band is forgiven.
        forgiven = sum(rate.forgiven for rate in rates)
        assert -128 - 3 * 32 <= inserted - handed <= 128 + 3 * 32 + forgiven and handed >= drawn
        # The one without actors has been told of the others' entries.
        assert rates[2].inserted == rates[2].drawn == 0 and rates[2].entries > 128
    finally:
        stop.set()
        reader.configure(samples_per_insert_tolerance=None, timeout=100.0)
        for thread in threads:
            thread.join(100.0)


def test_whole_episodes_wait_or_are_skipped_and_none_is_half_counted(cluster):
    parameters = Parameters(samples_per_insert=4.0, samples_per_insert_tolerance=200.0)
    server = cluster.server(
        tables={"default": Table(SCHEMA, storage="episodes", parameters=parameters)}, limits=QUICK, schema=None
    )
    patient = cluster.client(server, on_full="block", limits=QUICK)
    stop, done = threading.Event(), [0]
    thread = acting(patient, stop, done)
    try:
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
    finally:
        stop.set()
        server.configure(samples_per_insert_tolerance=None)
        thread.join(100.0)


def test_the_end_of_a_run_frees_an_actor_that_is_held_back_at_once(cluster):
    server = cluster.server(parameters=band(), limits=QUICK)
    client = cluster.client(server, on_full="block", limits=dataclasses.replace(QUICK, block_timeout=100.0))
    stop, done = threading.Event(), [0]
    thread = acting(client, stop, done)
    until(lambda: client.stats().held_back)
    server.finish()
    stop.set()
    thread.join(100.0)
    assert not thread.is_alive() and client.finished


def test_who_waits_for_a_batch_that_can_never_be_drawn_any_more_is_told(cluster):
    server = cluster.server(parameters=band(), limits=QUICK)
    cluster.client(server, limits=QUICK)
    reader = cluster.reader([server], limits=QUICK)
    waiting = [in_thread(source.get_batch, 100, 120.0) for source in (server, reader)]
    until(lambda: server.table("default").stats().rate.draws_wait and reader.stats().waits_for)
    server.configure(samples_per_insert_tolerance=10.0)
    for thread, box in waiting:
        thread.join(100.0)
        assert isinstance(box.get("error"), ParameterError) and "batch_size must be at most 19" in str(box["error"])


def test_what_a_reader_draws_before_it_has_heard_of_a_band_is_not_to_be_made_good(cluster):
    server = cluster.server(parameters=Parameters(cache_size=8, reuse_cache=True), limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    writer = client.writer(check=False)
    for number in range(40):
        step(writer, number)
    reader = cluster.reader([server], limits=QUICK)
    assert client.push_cache(100.0) and len(reader.get_batch(8, 100.0).ids) == 8
    server.configure(samples_per_insert=1.0, samples_per_insert_tolerance=16.0)
    step(writer, 40)
    client.update(100.0)  # the band begins
    while reader.parameters.samples_per_insert_tolerance is None:
        reader.get_batch(8, 100.0)
    rate = server.table("default").stats().rate
    assert rate.surplus >= -16.0 and rate.drawn >= 8


# ------------------------------------------------------------------------------------------------- undrawn caches

LITTLE = dataclasses.replace(QUICK, credit=4096)
"""Of which a quarter may be undrawn: some caches of eight samples."""


@pytest.fixture
def free_actor(cluster):
    """A server, and an actor that steps as fast as it may beside a learner that draws."""

    def make(on_full):
        server = cluster.server(parameters=Parameters(cache_size=8), limits=LITTLE)
        client = cluster.client(server, on_full=on_full, limits=LITTLE)
        stop, done = threading.Event(), [0]
        threads.append((stop, acting(client, stop, done)))
        server.get_batch(8, timeout=100.0)
        return server, client, done

    threads = []
    yield make
    for stop, thread in threads:
        stop.set()
        thread.join(100.0)


def test_an_actor_that_may_wait_keeps_the_pace_of_a_learner_and_goes_on_when_nobody_draws(free_actor):
    server, client, done = free_actor("block")

    def draw_until_held():
        """A learner that takes its time: one that draws whatever comes, as soon as it comes, holds nobody back."""
        server.get_batch(8, timeout=100.0)
        with contextlib.suppress(AssertionError):
            return until(lambda: client.stats().held_back, 1.0)
        return ""

    assert "waits until more is drawn" in until(draw_until_held)
    for _ in range(300):
        server.get_batch(8, timeout=100.0)  # never waits for somebody who waits
    assert client.stats().held_back_for > 0.0
    before = done[0]
    until(lambda: not client.stats().held_back and done[0] > before + 10_000)  # nobody draws any more


def test_an_actor_that_may_not_wait_goes_on_recording_and_pushes_less(free_actor):
    server, client, done = free_actor("skip")

    def draw_until_passed():
        """A learner that takes its time, as above."""
        server.get_batch(8, timeout=100.0)
        with contextlib.suppress(AssertionError):
            return until(lambda: client.stats().passed_steps > 1000, 1.0)
        return False

    until(draw_until_passed)
    assert client.stats().held_back_for < 1.0 and client.stats().not_pushed["held back"] > 0
    assert client.stats().steps == pytest.approx(done[0], abs=100_000) and done[0] > 1000


def test_an_actor_that_leaves_caches_out_hears_soon_that_they_are_wanted_again(cluster):
    """Not with its next report, which may be long after its stock was used up."""
    more = dataclasses.replace(QUICK, credit=1 << 16)  # so much that a few caches on the way bring no report
    server = cluster.server(parameters=Parameters(cache_size=8), limits=more)
    rarely = dataclasses.replace(more, update_every=1000.0)
    client = cluster.client(server, on_full="skip", limits=rarely)
    writer = client.writer(check=False)
    for number in range(60):
        step(writer, number, number % 20 == 19)

    def draw_if_there():
        if server.stats().unused_samples >= 8:
            server.get_batch(8, timeout=0.0)

    def push_until_held():
        draw_if_there()
        client.push_cache(timeout=0.0)
        client.push_cache(timeout=0.0)
        client.update(timeout=100.0)
        return "waits until more is drawn" in client.stats().held_back

    client.push_cache(timeout=100.0)
    until(push_until_held)
    assert not client.push_cache(timeout=0.0)

    def draw_until_wanted():
        draw_if_there()
        step(writer)  # something to report, so that no heartbeat tells it the news
        return client.push_cache(timeout=0.0)

    until(draw_until_wanted)
