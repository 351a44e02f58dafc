"""Server and client over real sockets: what arrives, what is counted, and what happens when things go wrong."""

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest
import zmq

from history.ports import address
from memoire.client.client import Client, connect
from memoire.errors import Closed, EndpointError, MemoireTimeout, NotEnoughSamples, ParameterError, SchemaMismatch
from memoire.limits import Limits
from memoire.replay.columns import Column
from memoire.replay.sampling import Prioritized
from memoire.replay.schema import Schema
from memoire.server.server import Server
from memoire.wire import messages as wire
from memoire.wire.frames import CODES, encode, parse, topic_frame
from netkit import DEADLINE, QUICK, SCHEMA, WIDE, FaultyWay, KeepingContext, in_thread, record, until


@pytest.fixture
def context():
    with KeepingContext() as made:
        yield made


@pytest.fixture
def serve(context):
    """Make servers that end with the test."""
    made = []

    def start(endpoint="tcp://127.0.0.1:0", schema=SCHEMA, **options):
        options.setdefault("context", context)
        options.setdefault("seed", 1)
        server = Server(endpoint, schema, **options)
        made.append(server)
        return server

    yield start
    for server in made:
        server.close()


@pytest.fixture
def join(context):
    """Connect clients that end with the test."""
    made = []

    def start(endpoint, **options):
        options.setdefault("context", context)
        options.setdefault("seed", 2)
        options.setdefault("capacity", 1000)
        client = (
            Client(endpoint, **options)
            if {"push", "subscribe", "live"} & set(options)
            else connect(endpoint, **options)
        )
        made.append(client)
        return client

    yield start
    for client in made:
        client.close(0.0)


@pytest.fixture(params=["tcp://127.0.0.1:0", "ipc", "inproc://server"])
def endpoint(request, tmp_path):
    return f"ipc://{tmp_path}/s" if request.param == "ipc" else request.param


# What arrives


def test_entries_come_out_as_a_batch_over_every_transport(serve, join, endpoint):
    server = serve(endpoint, sampler=Prioritized(0.6, beta=1.0), multi_step=3, discount=0.5)
    client = join(server.endpoint)
    assert client.schema == SCHEMA and client.parameters.multi_step == 3
    record(client, episodes=3, length=20)
    assert client.push_cache(100.0)
    batch = server.get_batch(64, timeout=100.0)
    t = batch["obs"][:, 0].astype(int)
    steps = np.minimum(3, 20 - t)
    np.testing.assert_array_equal(batch["steps"], steps)
    expected = [sum(0.5**s * (x + s) for s in range(n)) for x, n in zip(t, steps, strict=True)]
    np.testing.assert_allclose(batch["reward"], expected, rtol=1e-6)
    np.testing.assert_array_equal(batch["discount"] == 0.0, t >= 17)
    inside = t < 17
    np.testing.assert_array_equal(batch["next_obs"][inside, 0], t[inside] + 3)
    assert (batch["importance"] > 0).all() and (batch["importance"] <= 1).all()
    assert (batch["ids"]["client"] == np.frombuffer(client.client_id, "<u8")).all()


def test_a_batch_can_fill_the_callers_arrays(serve, join):
    server = serve()
    client = join(server.endpoint)
    record(client)
    assert client.push_cache(100.0)
    first = server.get_batch(16, 100.0)
    places = {name: np.empty_like(array) for name, array in first.items()}
    second = server.get_batch(16, 10.0, out=places)
    assert second["obs"] is places["obs"] and places["importance"].max() == 1.0


def test_totals_lines_and_scalars_are_there_when_update_returns(serve, join):
    server = serve()
    client = join(server.endpoint, input_uuid=0xABCD)
    record(client, episodes=3, length=20)
    client.log("first")
    client.log("second\nline")
    client.scalars({"loss": 0.5})
    client.update(100.0)
    assert (server.total_episodes, server.total_steps) == (3, 60)
    assert [(entry.line.label, entry.line.text) for entry in server.lines()] == [
        (0xABCD, "first"),
        (0xABCD, "second\nline"),
    ]
    [seen] = server.clients()
    assert (seen.client, seen.label, seen.scalars) == (client.client_id.hex(), 0xABCD, {"loss": 0.5})
    assert seen.positives == 60 and seen.total_weight == pytest.approx(client.memory.total_weight)
    assert seen.returns_mean == 20.0
    assert [(who, ended.length, ended.returned) for who, ended in server.episodes()] == [(seen.client, 20, 20.0)] * 3


def test_a_client_tells_by_itself(serve, join):
    server = serve()
    client = join(server.endpoint)
    record(client, episodes=2, length=5)
    client.log("by itself")
    until(lambda: server.total_episodes == 2 and server.lines())


def test_a_writer_counts_and_pushes_by_itself(serve, join):
    server = serve(parameters=None)
    server.configure(cache_size=16, samples_per_insert=2.0)
    client = join(server.endpoint)
    writer = client.writer(num_envs=2, autoreset="next_step")
    zeros = np.zeros((2, 4), np.float32)
    writer.reset(zeros)
    rewards, flags = np.ones(2, np.float32), np.zeros(2, bool)
    for step in range(60):
        writer.step(zeros, np.zeros(2, np.int32), rewards, flags, np.full(2, step % 20 == 19), zeros.copy(), {})
    client.update(100.0)
    until(lambda: server.total_caches >= 10)
    assert server.total_steps > 100 and server.total_episodes >= 4
    assert server.get_batch(16, 100.0)["reward"].shape == (16,)


def test_many_threads_may_use_one_client(serve, join):
    server = serve(schema=WIDE)
    client = join(server.endpoint, on_full="block")
    record(client, episodes=2)

    def work(number):
        for step in range(20):
            assert client.push_cache(100.0)
            client.on_episode(0, 1, 1.0)
            client.log(f"{number} {step}")
            client.update(100.0)

    threads = [in_thread(work, number) for number in range(4)]
    for thread, box in threads:
        thread.join(100.0)
        assert box == {"value": None}
    assert server.total_episodes == 82
    until(lambda: server.total_caches == 80)
    texts = [entry.line.text for entry in server.lines()]
    for number in range(4):
        assert [text for text in texts if text.startswith(f"{number} ")] == [f"{number} {step}" for step in range(20)]
    assert server.stats().totals.lost_bytes == 0


def _actor(endpoint, number, steps):
    with connect(endpoint, seed=number, capacity=1000) as client:
        record(client, episodes=number + 1, length=steps)
        assert client.push_cache(100.0)
        client.log(f"actor {number}")


def test_clients_in_processes_are_counted_exactly(serve):
    server = serve()
    spawn = multiprocessing.get_context("spawn")
    actors = [spawn.Process(target=_actor, args=(server.endpoint, number, 10)) for number in range(3)]
    for actor in actors:
        actor.start()
    for actor in actors:
        actor.join(100.0)
        assert actor.exitcode == 0
    assert (server.total_episodes, server.total_steps) == (6, 60)
    until(lambda: server.total_caches == 3)
    assert {entry.line.text for entry in server.lines()} == {"actor 0", "actor 1", "actor 2"}
    owners = server.get_batch(300, 100.0)["ids"]["client"]
    assert len(np.unique(owners, axis=0)) == 3


# What is lost, doubled, late


def test_totals_and_lines_are_exact_over_a_way_that_loses_and_doubles(serve, join, context):
    server = serve()
    way = FaultyWay(context, server.endpoint, drop=0.3, double=0.3, seed=5)
    try:
        clients = [join(way.endpoint, limits=QUICK, timeout=100.0) for _ in range(3)]
        for number in range(15):
            for client in clients:
                client.on_entries(7)
                client.on_episode(0, 7, 1.0)
                client.log(f"line {number}")
        for client in clients:
            client.update(100.0)
        assert (server.total_episodes, server.total_steps) == (45, 315)
        for client in clients:
            mine = [entry.line.text for entry in server.lines() if entry.client == client.client_id]
            assert mine == [f"line {number}" for number in range(15)]
        assert server.stats().totals.returns_count == 45
        assert way.done["dropped"] and way.done["doubled"]
        assert sum(client.stats().resends for client in clients) > 0
    finally:
        way.close()


def test_a_server_that_begins_anew_is_told_everything_again(serve, join):
    place = address()
    first = serve(place, push_endpoint="tcp://127.0.0.1:0", pub_endpoint="tcp://127.0.0.1:0", name="one")
    push, publish = first.push_endpoint, first.pub_endpoint
    client = join(place, limits=QUICK)
    record(client, episodes=2)
    assert client.push_cache(100.0)
    client.update(100.0)
    first.publish("policy", b"old")
    first.publish("policy", b"old 2")
    model = client.model("policy")
    assert model.wait(10.0, after=1).body == b"old 2"
    until(lambda: first.total_caches == 1)
    first.close()
    record(client, episodes=1)
    client.log("while it was away")
    second = serve(place, push_endpoint=push, pub_endpoint=publish, name="one")
    client.update(100.0)
    assert (second.total_episodes, second.total_steps) == (3, 60)
    assert [entry.line.text for entry in second.lines()] == ["while it was away"]
    until(lambda: client.push_cache(1.0), 100.0)
    until(lambda: second.total_caches >= 1)
    second.publish("policy", b"new")  # version 1 of its epoch
    until(lambda: model.newest().body == b"new")
    stats = client.stats()
    assert stats.pushed_bytes == stats.received_bytes + stats.lost_bytes + stats.in_flight_bytes


def test_a_client_of_another_run_is_counted_for_the_new_one_from_then_on(serve, join):
    place = address()
    first = serve(place, run="ant-1", push_endpoint="tcp://127.0.0.1:0", pub_endpoint="tcp://127.0.0.1:0")
    client = join(place, limits=QUICK)
    record(client, episodes=2)
    client.update(100.0)
    first.close()
    second = serve(place, run="ant-2", push_endpoint="tcp://127.0.0.1:0", pub_endpoint="tcp://127.0.0.1:0")
    record(client, episodes=0)
    client.update(100.0)
    record(client, episodes=3)
    client.update(100.0)
    assert second.total_episodes == 3 and client.run == "ant-2"


def test_a_server_that_comes_back_with_another_schema_ends_its_clients(serve, join):
    place = address()
    serve(place, push_endpoint="tcp://127.0.0.1:0", pub_endpoint="tcp://127.0.0.1:0").close()
    first = serve(place, push_endpoint="tcp://127.0.0.1:0", pub_endpoint="tcp://127.0.0.1:0")
    client = join(place, limits=QUICK)
    first.close()
    serve(place, schema=WIDE, push_endpoint="tcp://127.0.0.1:0", pub_endpoint="tcp://127.0.0.1:0")

    def is_refused():
        try:
            client.update(0.2)
        except MemoireTimeout:
            return False
        except SchemaMismatch as error:
            return str(error)
        return False

    assert "Restart the client" in until(is_refused, 100.0)


def test_the_window_bounds_what_is_on_the_way(serve, join, context):
    server = serve(schema=WIDE, limits=Limits(credit=9_000_000, close_timeout=1.0))
    stalled = context.socket(zmq.PULL)
    stalled.rcvhwm = 1
    port = stalled.bind_to_random_port("tcp://127.0.0.1")
    client = join(server.endpoint, push=f"tcp://127.0.0.1:{port}")
    record(client, length=300)
    pushed = 0
    while client.push_cache(0.2):
        pushed += 1
        assert pushed < 10
    stats = client.stats()
    assert client.push_reason == "window full" and stats.skipped_caches >= 1
    assert pushed == 2 and stats.in_flight_bytes <= 9_000_000
    began = time.monotonic()
    assert not client.push_cache(0.3)
    assert 0.25 < time.monotonic() - began < DEADLINE
    assert not client.push_cache(0.0)


def test_the_window_opens_as_caches_arrive(serve, join):
    server = serve(schema=WIDE, limits=Limits(credit=2_500_000))
    client = join(server.endpoint, on_full="block")
    record(client, length=300)
    for _ in range(20):
        assert client.push_cache(100.0)
    until(lambda: server.total_caches == 20)
    client.update(100.0)
    stats = client.stats()
    assert (stats.accepted_caches, stats.in_flight_bytes, stats.lost_bytes) == (20, 0, 0)
    assert stats.received_bytes == stats.pushed_bytes == server.stats().totals.received_bytes


def test_nothing_to_draw_is_a_reason_not_to_push(serve, join):
    client = join(serve().endpoint)
    assert not client.push_cache(1.0) and client.push_reason == "nothing to draw"
    record(client)
    assert client.push_cache(1.0) and client.push_reason == ""


def test_a_cache_larger_than_the_server_takes_is_refused_before_it_is_sent(serve, join):
    """Of values whose lengths nobody knows before; the others are known when the server is made."""
    schema = {"obs": Column(np.float32, (None,), "state"), "reward": np.float32}
    client = join(serve(schema=schema, limits=Limits(message_bytes=100_000)).endpoint)
    client.memory.open()
    for step in range(200):
        client.memory.add(0, (np.full(1000, step, np.float32), 0.0))
    client.memory.close()
    with pytest.raises(ParameterError, match=r"cache_size must be such that .* \(limits.message_bytes\)"):
        client.push_cache(1.0)
    client.update(100.0)


# What the server says


def test_finished_reaches_clients(serve, join):
    server = serve()
    client = join(server.endpoint, limits=QUICK)
    assert not client.finished
    server.finish()
    until(lambda: client.finished)
    assert list(server.batches(8)) == []
    assert join(server.endpoint).finished


def test_new_parameters_reach_clients_that_keep_their_data(serve, join):
    server = serve()
    client = join(server.endpoint)
    record(client, episodes=2)
    before = client.memory
    server.configure(cache_size=32, priority_exponent=0.0, frame_stack=2)
    client.update(100.0)
    assert client.parameters == server.parameters and client.parameters.cache_size == 32
    assert client.memory is before and before.num_entries == 40 and before.parameters.frame_stack == 2
    assert client.push_cache(100.0)
    assert server.get_batch(32, 100.0)["obs"].shape == (32, 2, 4)
    with pytest.raises(NotEnoughSamples):
        server.get_batch(1)


def test_a_wrong_parameter_changes_nothing(serve):
    server = serve()
    before = server.parameters
    with pytest.raises(ParameterError, match="cache_size"):
        server.configure(cache_size=0, multi_step=2)
    assert server.parameters == before and server.stats().parameters_version == 1


def test_sync_begins_with_an_empty_memory_and_totals_go_on(serve, join):
    server = serve(client_capacity=500)
    client = join(server.endpoint, capacity=None)
    assert client.memory.capacity == 500
    record(client)
    server.configure(multi_step=2)
    with pytest.raises(ParameterError, match="^capacity must be 500, the client_capacity of the table"):
        client.sync(77, timeout=100.0)
    assert (client.memory.capacity, client.memory.num_entries) == (500, 20)  # nothing was changed
    client.sync(77, timeout=100.0, overrides=True)
    assert (client.memory.capacity, client.memory.num_entries, client.memory.parameters.multi_step) == (77, 0, 2)
    record(client)
    client.update(100.0)
    assert server.total_steps == 40


def test_priorities_go_to_their_owner_and_what_is_gone_is_counted(serve, join):
    server = serve()
    client = join(server.endpoint, capacity=40)
    record(client, length=20)
    assert client.push_cache(100.0)
    batch = server.get_batch(64, 100.0)
    assert batch.update_priorities(np.full(64, 3.0)) == (0, 0, 64, 0)
    client.update(100.0)
    numbers = np.unique(batch["ids"]["number"])
    np.testing.assert_allclose(client.memory.weights(numbers), (3.0 + 1e-6) ** 0.6, rtol=1e-5)
    record(client, episodes=3, length=20)  # everything is overwritten
    batch.update_priorities(np.ones(64))
    client.update(100.0)
    client.update(100.0)
    stats = server.stats()
    assert (stats.feedback_given, stats.totals.applied, stats.totals.stale) == (128, 64, 64)
    strangers = batch["ids"].copy()
    strangers["client"] += np.uint64(1)
    assert server.update_priorities(strangers, np.ones(64)) == (0, 0, 0, 64)
    assert server.stats().feedback_lost == 64
    for wrong in (np.ones(3), np.full(64, np.nan)):
        with pytest.raises(ValueError, match="td_errors must be"):
            batch.update_priorities(wrong)


# Models


@pytest.mark.parametrize("size", [0, 10, 100_000, 3_000_000])
def test_a_model_arrives_whole_in_the_published_type(serve, join, size):
    server = serve()
    client = join(server.endpoint)
    model, receiver = client.model("policy"), client.subscribe("policy")
    assert model.newest() is None and model.version == 0
    body = np.random.default_rng(0).bytes(size)
    assert server.publish("policy", body) == 1
    assert model.wait(100.0).value == body and model.version == 1
    assert receiver.receive(100.0) == body
    server.publish("policy", "ü" * (size // 2))
    assert receiver.receive(100.0) == "ü" * (size // 2)
    assert (model.newest().version, receiver.skipped) == (2, 0)


def test_who_comes_late_gets_the_newest_at_once(serve, join):
    server = serve()
    for number in range(5):
        server.publish("policy", f"{number}")
    client = join(server.endpoint)
    assert client.model("policy").wait(100.0).value == "4"
    receiver = client.subscribe("policy")
    assert receiver.receive(100.0) == "4"
    server.publish("policy", "5")
    assert receiver.receive(100.0) == "5"
    assert join(server.endpoint).subscribe("policy").receive(100.0) == "5"


def test_messages_of_a_topic_come_in_order_and_versions_never_go_back(serve, join):
    server = serve()
    client = join(server.endpoint)
    receiver = client.subscribe("steps")
    server.publish("steps", b"first")
    assert receiver.receive(100.0) == b"first"
    for number in range(40):
        server.publish("steps", bytes(30_000 if number % 3 == 0 else 10) + str(number).encode())
    versions, last = [], None
    while last != b"39":
        model = receiver.receive_model(100.0)
        versions.append(model.version)
        last = model.body.lstrip(b"\0")
    assert versions == sorted(set(versions)) and versions[-1] == 41
    assert len(versions) + receiver.skipped == 40


def test_topics_are_told_apart_exactly(serve, join):
    server = serve()
    client = join(server.endpoint)
    short, long = client.subscribe("a"), client.subscribe("ab")
    server.publish("ab", "long")
    server.publish("a", "short")
    assert (short.receive(100.0), long.receive(100.0)) == ("short", "long")
    with pytest.raises(MemoireTimeout, match="message on topic 'a'"):
        short.receive(0.05)
    with pytest.raises(ValueError, match="topic"):
        client.subscribe("")


def test_any_thread_may_publish(serve, join):
    server = serve()
    receiver = join(server.endpoint).subscribe("t")
    threads = [in_thread(server.publish, "t", f"{number}") for number in range(8)]
    for thread, box in threads:
        thread.join(100.0)
        assert "value" in box
    assert sorted(box["value"] for _, box in threads) == list(range(1, 9))
    until(lambda: receiver.receive_model(100.0).version == 8)


# Waiting and ending


@pytest.mark.parametrize(
    "call",
    [
        lambda server, client: server.get_batch(8, 100.0),
        lambda server, client: client.model("none").wait(100.0),
        lambda server, client: client.subscribe("none").receive(),
        lambda server, client: client.push_cache(100.0),
        lambda server, client: client.update(100.0),
    ],
    ids=["get_batch", "wait", "receive", "push_cache", "update"],
)
def test_a_call_that_waits_ends_with_closed(serve, join, context, call):
    server = serve(schema=WIDE, limits=Limits(credit=1))
    stalled = context.socket(zmq.PULL)
    port = stalled.bind_to_random_port("tcp://127.0.0.1")
    way = FaultyWay(context, server.endpoint, drop=0.0, double=0.0)
    try:
        client = join(way.endpoint, push=f"tcp://127.0.0.1:{port}")
        record(client, length=50)
        client.push_cache(0.0)
        way.drop = 1.0
        thread, box = in_thread(call, server, client)
        thread.join(0.2)
        assert thread.is_alive(), box
        client.close(0.2)
        server.close()
        thread.join(DEADLINE)
        assert isinstance(box.get("error"), Closed), box
    finally:
        way.close()


def test_batches_end_when_the_server_closes(serve):
    server = serve()
    thread, box = in_thread(list, server.batches(8, 100.0))
    assert not server.wait_closed(0.05)
    server.close()
    thread.join(100.0)
    assert box == {"value": []}
    assert server.wait_closed(0.0) and server.closed


def test_waiting_has_an_end_and_says_what_it_waited_for(serve, join):
    server = serve()
    with pytest.raises(NotEnoughSamples, match=r"after waiting \d+\.\d s"):
        server.get_batch(8, 0.1)
    assert 0.1 <= server.stats().waited < 100.0
    with pytest.raises(NotEnoughSamples, match="None was taken"):
        server.get_batch(8)
    with pytest.raises(MemoireTimeout, match=r"within 0\.6 s.*after waiting \d+\.\d s.*Are actors running"):
        next(server.batches(8, 0.6))
    client = join(server.endpoint)
    with pytest.raises(MemoireTimeout, match="model of topic 'x'"):
        client.model("x").wait(0.05)


def test_everything_refuses_after_close_and_closing_again_is_nothing(serve, join):
    server = serve()
    client = join(server.endpoint)
    receiver, model = client.subscribe("t"), client.model("t")
    assert client.close(100.0)
    client.close()
    for call in (
        client.update, client.push_cache, lambda: client.log("x"), lambda: client.scalars({}), lambda: client.finished,
        lambda: client.model("t"), lambda: receiver.receive(1.0), lambda: model.newest(), lambda: client.writer(num_envs=1),
    ):  # fmt: skip
        with pytest.raises(Closed, match="this client is closed"):
            call()
    server.close()
    server.close()
    for call in (
        lambda: server.get_batch(1), lambda: server.publish("t", b""), lambda: server.configure(cache_size=1),
        lambda: server.add_pull_worker("inproc://x"), lambda: server.set_logfile("x"),
    ):  # fmt: skip
        with pytest.raises(Closed, match="this server is closed"):
            call()


def test_close_delivers_what_the_server_does_not_know_yet(serve, context):
    server = serve()
    with connect(server.endpoint, context=context, limits=Limits(update_every=1000.0), capacity=100) as client:
        record(client)
        for number in range(2000):
            client.log(f"{number}")
        assert client.push_cache(100.0)
        assert client.close(100.0)
    assert server.total_steps == 20 and len(server.lines(most=5000)) == 2000
    until(lambda: server.total_caches == 1)


def test_a_timeout_names_the_home_that_is_silent(serve, join):
    server = serve(name="ant")
    client = join(server.endpoint)
    server.close()
    with pytest.raises(MemoireTimeout, match=r"home of this client, server 'ant', was last heard \d+\.\d s ago"):
        client.update(0.3)


def test_close_is_bounded_when_nobody_answers(serve, join):
    server = serve()
    client = join(server.endpoint)
    server.close()
    client.log("nobody hears it")
    began = time.monotonic()
    assert not client.close(0.5)
    assert time.monotonic() - began < DEADLINE


@pytest.mark.parametrize(
    ("place", "advice"),
    [("tcp://127.0.0.1:9", "memoire doctor"), ("tcp://no-such-host.invalid:9", "could not be resolved")],
)
def test_nobody_at_the_address_is_a_timeout_that_says_what_to_do(context, place, advice):
    began = time.monotonic()
    with pytest.raises(MemoireTimeout, match=advice) as caught:
        connect(place, timeout=0.3, context=context)
    assert time.monotonic() - began < DEADLINE
    assert re.search(r"no welcome from tcp://.* within 0\.3 s", str(caught.value))


def test_wrong_arguments_are_refused(serve, context):
    place = serve().endpoint
    for options in ({"on_full": "maybe"}, {"input_uuid": -1}, {"input_uuid": 1 << 32}):
        with pytest.raises(ParameterError, match=next(iter(options))):
            connect(place, context=context, **options)
    with pytest.raises(EndpointError, match="cannot"):
        connect("nonsense", context=context)
    client = connect(place, context=context)
    for values in ({"x": float("nan")}, {f"{n}": 1.0 for n in range(65)}):
        with pytest.raises(ParameterError, match="scalars"):
            client.scalars(values)
    client.close()
    with pytest.raises(EndpointError, match="in use"):
        Server(place, SCHEMA, context=context)
    with pytest.raises(ParameterError, match="client_capacity"):
        Server("inproc://a", SCHEMA, context=context, client_capacity=-1)


def test_the_interpreter_ends_with_a_live_client_and_no_server():
    script = """
        import memoire.server.server, memoire.client.client, numpy as np
        from memoire.replay.columns import Column
        from memoire.replay.schema import Schema
        schema = Schema({"obs": Column(np.float32, (4,), "state")})
        server = memoire.server.server.Server("tcp://127.0.0.1:0", schema)
        client = memoire.client.client.connect(server.endpoint)
        client.model("policy")
        client.log("x")
        print("made")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "made\n", "")


def test_sigterm_ends_a_waiting_learner(tmp_path):
    script = """
        import memoire.server.server, numpy as np, signal, sys
        from memoire.replay.columns import Column
        from memoire.replay.schema import Schema
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        schema = Schema({"obs": Column(np.float32, (4,), "state")})
        with memoire.server.server.Server("tcp://127.0.0.1:0", schema) as server:
            print("waiting", flush=True)
            for batch in server.batches(8, 100.0):
                pass
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 7


# Workers, plain proxies, log file


def test_several_workers_behind_plain_proxies_serve_clients_with_three_addresses(serve, join, context):
    server = serve(None, pub_endpoint="tcp://127.0.0.1:0")
    front, data = address(), address()
    loops = [
        in_thread(server.run_request_proxy, front, "inproc://requests"),
        in_thread(server.run_pull_proxy, data, "inproc://caches"),
    ]
    for _ in range(2):
        server.add_request_worker("inproc://requests", bind=False)
        server.add_pull_worker("inproc://caches", bind=False)
    clients = [join(front, push=data, subscribe=server.pub_endpoint, live=False) for _ in range(3)]
    receivers = [client.subscribe("t") for client in clients]
    for client in clients:
        record(client, episodes=2)
        for _ in range(4):
            assert client.push_cache(100.0)
        client.update(100.0)
    server.publish("t", "hello")
    assert [receiver.receive(100.0) for receiver in receivers] == ["hello"] * 3
    assert server.total_episodes == 6
    until(lambda: server.total_caches == 12)
    assert server.get_batch(64, 100.0)["obs"].shape == (64, 4)
    server.close()
    for thread, box in loops:
        thread.join(100.0)
        assert box == {"value": None}


def test_a_taken_address_of_a_worker_is_an_error_at_once(serve):
    server = serve()
    for add in (
        server.add_request_worker,
        server.add_pull_worker,
        lambda place: server.run_request_proxy(place, "inproc://back"),
        lambda place: server.run_pull_proxy("inproc://front", place),
    ):
        with pytest.raises(EndpointError, match="cannot bind"):
            add(server.push_endpoint)


def test_the_log_file_has_every_line_in_the_documented_form(serve, join, tmp_path):
    server = serve()
    assert server.logfile is None
    path = tmp_path / "actors.log"
    path.write_text("from before\n")
    server.set_logfile(path, "w")
    assert server.logfile == str(path)
    client = join(server.endpoint, input_uuid=0xBEEF)
    client.log("plain, with a comma")
    client.log("two\nlines")
    client.update(100.0)
    until(lambda: path.read_text().count("\n") == 2)
    first, second = path.read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00,0000beef,plain, with a comma", first)
    assert second.endswith(",0000beef,two\\nlines")
    server.set_logfile(path, "a")
    client.log("third")
    client.update(100.0)
    server.close()
    assert path.read_text().splitlines()[2].endswith(",third")
    with pytest.raises(Closed):
        server.set_logfile(path, "a")


def test_a_log_file_that_cannot_be_is_refused(serve, tmp_path):
    server = serve()
    with pytest.raises(ParameterError, match="mode"):
        server.set_logfile(tmp_path / "x", "r")
    with pytest.raises(OSError, match="nowhere"):
        server.set_logfile(tmp_path / "nowhere" / "x", "w")
    assert server.logfile is None


# Garbage


def golden(server, client_id=b"x" * 16):
    """One good message of every kind that a client sends, as frames."""
    dispatcher = {"client": client_id, "run": 0, "home": 0, "fingerprint": SCHEMA.fingerprint}
    bodies = [
        wire.Hello(), wire.Update(episodes=0), wire.Fetch(topic="t"), wire.Sums(), wire.Draw(), wire.Control(),
        wire.Publish(topic="t", size=0, checksum=0), wire.Welcome(schema="{}"), wire.Updated(),
    ]  # fmt: skip
    messages = [encode(body, sequence=number, **dispatcher) for number, body in enumerate(bodies, 1)]
    messages.append(encode(wire.Cache(), payload=b"\0" * 640, sequence=99, **dispatcher))
    return [[bytes(frame) for frame in message] for message in messages]


def garbage(rng, messages):
    """Endless messages that are none: random bytes, and good ones cut, flipped, lengthened and multiplied."""
    while True:
        message = list(messages[rng.integers(len(messages))])
        kind = rng.integers(7)
        if kind == 0:
            yield [rng.bytes(int(rng.integers(0, 300)))]
        elif kind == 1:
            yield [message[0][: rng.integers(len(message[0]))], *message[1:]]
        elif kind == 2:
            frame = bytearray(message[0])
            frame[rng.integers(len(frame))] ^= 1 << int(rng.integers(8))
            yield [bytes(frame), *message[1:]]
        elif kind == 3:
            yield message * int(rng.integers(2, 6))
        elif kind == 4:
            yield [message[0] + b"more", *message[1:]]
        elif kind == 5:
            yield [message[0][:64] + b"\xff" * 8 + message[0][72:], *message[1:]]  # an absurd length
        else:
            yield [b""] * int(rng.integers(1, 30))


def memory_of_process():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_garbage_on_every_port_is_counted_and_nobody_else_notices(serve, join, context):
    server = serve()
    good = join(server.endpoint)
    record(good, episodes=2)
    rng = np.random.default_rng(0)
    stream = garbage(rng, golden(server))
    dealer, pusher, subscriber = (context.socket(kind) for kind in (zmq.DEALER, zmq.PUSH, zmq.SUB))
    for made, place in ((dealer, server.endpoint), (pusher, server.push_endpoint), (subscriber, server.pub_endpoint)):
        made.linger = 0
        made.connect(place)

    def flood(count):
        for number, frames in zip(range(count), stream, strict=False):
            dealer.send_multipart(([b""] if number % 4 else []) + frames)
            pusher.send_multipart(frames)
            if number % 50 == 0:
                subscriber.setsockopt(zmq.SUBSCRIBE, rng.bytes(10))
                while dealer.poll(0):
                    dealer.recv_multipart()

    flood(2000)
    server.stats()
    until(lambda: sum(server.stats().refused.values()) > 3000)
    gc.collect()
    before = memory_of_process()
    flood(10_000)
    until(lambda: sum(server.stats().refused.values()) > 18_000)
    gc.collect()
    assert memory_of_process() - before < 30_000_000
    refused = server.stats().refused
    assert {"magic", "short", "checksum", "frames", "long"} <= set(refused)
    assert set(refused) <= {*CODES, "other"}
    record(good)
    good.update(100.0)
    assert good.push_cache(100.0)
    assert server.total_episodes == 3 and server.get_batch(8, 100.0)["obs"].shape == (8, 4)
    assert server.stats().faults == 0 and server.stats().totals.accepted_caches == 1


def test_a_cache_of_another_schema_is_refused_and_its_client_hears_of_it(serve, join, context):
    server = serve()
    client = join(server.endpoint)
    record(client)
    frames = encode(wire.Cache(number=1, pushed_bytes=640), client=client.client_id, payload=b"\0" * 640, fingerprint=7)
    pusher = context.socket(zmq.PUSH)
    pusher.linger = 0
    pusher.connect(server.push_endpoint)
    pusher.send_multipart(frames)
    until(lambda: server.stats().refused.get("schema") == 1)
    client.update(100.0)
    assert client.stats().rejected == {"schema": 1}
    assert client.push_cache(100.0)
    until(lambda: server.total_caches == 1)


def test_a_request_that_is_refused_says_why(serve, context):
    server = serve()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(server.endpoint)

    def ask(frames):
        dealer.send_multipart([b"", *frames])
        assert dealer.poll(30_000)
        body = parse(dealer.recv_multipart()[1:]).body
        assert isinstance(body, wire.Refused)
        return body.code

    me = {"client": b"m" * 16, "sequence": 5}
    assert ask(encode(wire.Updated(), **me)) == "unexpected"
    assert ask(encode(wire.Update(), sequence=5)) == "client"
    assert ask(encode(wire.Update(), run=123, **me)) == "run"
    assert ask(encode(wire.Fetch(topic="none"), **me)) == "missing"
    assert ask(encode(wire.Update(scalars={"x": float("inf")}), **me)) == "value"
    assert ask(encode(wire.Control(parameters={"cache_size": 0}), **me)) == "parameters"
    newer = bytearray(encode(wire.Hello(), **me)[0])
    newer[4] = 9
    assert ask([bytes(newer)]) == "version"
    assert server.stats().totals.clients == 0


def test_garbage_replies_and_notices_do_not_disturb_a_client(serve, join, context):
    """Between the client and its server somebody mixes garbage into replies and notices."""
    server = serve()
    evil_pub = context.socket(zmq.PUB)
    evil_pub.linger = 0
    pub_port = evil_pub.bind_to_random_port("tcp://127.0.0.1")

    class EvilWay(FaultyWay):
        def carry(self, other, frames):
            other.send_multipart(frames)
            if other is self.front:
                for junk in (
                    [b"junk"],
                    [b"", b"x" * 200],
                    [b"", frames[-1][:50]],
                    [b""] * 20,
                    [b"", *frames[2:], b"more"],
                ):
                    other.send_multipart([frames[0], *junk])

    way = EvilWay(context, server.endpoint)
    try:
        client = join(way.endpoint, subscribe=f"tcp://127.0.0.1:{pub_port}")
        receiver = client.subscribe("policy")

        def heard():
            for junk in ([b""], [b"x"], [b"\0" * 96], [b"\0"] * 9):
                evil_pub.send_multipart([topic_frame("policy"), *junk])
            return len(client.stats().refused) > 2

        record(client)
        client.update(100.0)
        until(heard)
        server.publish("policy", b"good")
        client.update(100.0)
        assert receiver.receive(100.0) == b"good"
        assert server.total_episodes == 1 and client.stats().faults == 0
    finally:
        way.close()


def test_stats_are_frozen(serve, join):
    server = serve()
    client = join(server.endpoint)
    for stats in (server.stats(), client.stats(), server.stats().totals):
        with pytest.raises((AttributeError, TypeError)):
            stats.run = "x"


def test_a_client_that_nobody_names_any_more_goes_on(serve):
    server = serve()
    client = connect(server.endpoint, limits=QUICK)
    named, model = weakref.ref(client), client.model("policy")
    del client
    gc.collect()
    try:
        server.publish("policy", b"1")
        assert model.wait(100.0).body == b"1"
    finally:
        assert named() is not None and named().close(100.0)


def test_a_server_that_nobody_holds_goes_on_until_it_is_closed(context, join):
    """Its threads use sockets: the interpreter has to find it at its end."""
    found = weakref.ref(Server("tcp://127.0.0.1:0", SCHEMA, context=context))
    gc.collect()
    try:
        assert found() is not None
        join(found().endpoint).update(100.0)
    finally:
        found().close()


def test_a_server_needs_no_schema_object():
    columns = {"obs": Column(np.float32, (2,), "state")}
    with Server("inproc://plain", columns) as server:
        assert server.schema == Schema(columns) and "inproc://plain" in repr(server)


def test_many_lines_are_acknowledged_without_pauses(serve, join):
    server = serve()
    client = join(server.endpoint, limits=Limits(update_every=300.0))  # it does not wait for that
    for number in range(3000):
        client.log(f"{number}")
    client.update(100.0)
    assert [entry.line.text for entry in server.lines(most=5000)] == [f"{number}" for number in range(3000)][-2000:]


def test_nothing_published_after_the_first_message_is_lost(serve, join):
    """A subscriber has the newest before its subscription has reached the publisher; what comes in between is
    fetched.
    """
    server = serve()
    server.publish("t", "0")
    for round_number in range(5):
        receiver = join(server.endpoint).subscribe("t")
        assert receiver.receive(100.0) == f"{4 * round_number}"
        for number in range(1, 5):
            server.publish("t", f"{4 * round_number + number}")
        got = [receiver.receive(100.0) for _ in range(4)]
        assert got == [f"{4 * round_number + number}" for number in range(1, 5)]
        assert receiver.skipped == 0


def test_only_bytes_and_text_can_be_published(serve):
    with pytest.raises(TypeError, match="content must be bytes or str, got int"):
        serve().publish("t", 17)


def test_a_finished_server_tells_its_clients_before_it_closes(serve, join):
    """The way that every learner ends: finish(), then out of the `with`; actors loop until client.finished."""
    server = serve()
    client = join(server.endpoint)
    stop = threading.Event()

    def act():
        while not client.finished and not stop.is_set():
            record(client)
            stop.wait(0.01)

    actor, box = in_thread(act)
    until(lambda: server.total_episodes)
    server.finish()
    server.close()
    try:
        actor.join(100.0)
        assert not box.get("error")
        assert client.finished
    finally:
        stop.set()
        actor.join(100.0)


def test_a_finished_server_waits_for_nobody_who_is_not_there(serve, join):
    server = serve()
    client = join(server.endpoint)
    record(client)
    server.finish()
    client.update(timeout=100.0)
    client.close()
    begin = time.monotonic()
    server.close(300.0)
    assert time.monotonic() - begin < DEADLINE


def test_byte_budgets_change_while_clients_go_on(serve, join):
    server = serve(limits=QUICK)
    client = join(server.endpoint)
    record(client)
    for number in range(4):
        assert client.push_cache()
        until(lambda number=number: server.total_caches == number + 1)
    size = server.stats().held_bytes // 4
    server.configure_limits(credit=2 * size)
    until(lambda: client.stats().credit == 2 * size == server.stats().credit)
    server.configure_limits(held_bytes=size)
    assert (server.stats().held_caches, server.stats().byte_limit) == (1, size)
    until(lambda: client.stats().credit == size)
    for wrong in ({"credit": 0}, {"held_bytes": -1}, {"credit": 1.5}):
        with pytest.raises(ParameterError, match=next(iter(wrong))):
            server.configure_limits(**wrong)


def test_a_life_without_a_state_folder_is_numbered_by_wall_time(serve, monkeypatch):
    """The clock may go back, and goes on while a host sleeps, as no other clock does."""
    for now in (5_000, 2_000, 9_000):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        monkeypatch.setattr(time, "monotonic_ns", lambda: 3_000)
        assert serve().epoch == now
