"""Server and client over real sockets: what arrives, what is counted, and what happens when things go wrong."""

import gc
import re
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest
import zmq

from history.ports import address
from memoire.client.client import Client, connect
from memoire.errors import Closed, MemoireTimeout, SchemaMismatch
from memoire.limits import Limits
from memoire.replay.sampling import Prioritized
from memoire.server.server import Server
from memoire.server.settings import Process
from memoire.wire.frames import topic_frame
from netkit import DEADLINE, QUICK, SCHEMA, WIDE, FaultyWay, KeepingContext, in_thread, record, server_of, until


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
        server = server_of(endpoint, schema, **options)
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


# What is lost, doubled, late


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


# What the server says


def test_finished_reaches_clients(serve, join):
    server = serve()
    client = join(server.endpoint, limits=QUICK)
    assert not client.finished
    server.finish()
    until(lambda: client.finished)
    assert list(server.batches(8)) == []
    assert join(server.endpoint).finished


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


# Waiting and ending


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


# Garbage


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
    found = weakref.ref(Server("tcp://127.0.0.1:0", SCHEMA, process=Process(context=context)))
    gc.collect()
    try:
        assert found() is not None
        join(found().endpoint).update(100.0)
    finally:
        found().close()


def test_many_lines_are_acknowledged_without_pauses(serve, join):
    server = serve()
    client = join(server.endpoint, limits=Limits.of(update_every=300.0))  # it does not wait for that
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
