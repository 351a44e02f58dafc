"""Server and client over real sockets: entries, counts, losses, models, and ends."""

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest
import zmq

from memoire.client.client import Client, connect
from memoire.errors import Closed, MemoireTimeout, SchemaMismatch
from memoire.limits import Limits
from memoire.replay.sampling import Prioritized
from memoire.server.server import Server
from memoire.server.settings import Process
from memoire.wire.frames import topic_frame
from netkit import DEADLINE, QUICK, SCHEMA, WIDE, FaultyWay, in_thread, record, until


@pytest.fixture(params=["tcp://127.0.0.1:0", "ipc", "inproc://server"])
def endpoint(request, tmp_path):
    return f"ipc://{tmp_path}/s" if request.param == "ipc" else request.param


def test_entries_come_out_as_a_batch_over_every_transport(cluster, endpoint):
    server = cluster.server(endpoint, sampler=Prioritized(0.6, beta=1.0), multi_step=3, discount=0.5)
    client = cluster.client(server)
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


def test_totals_lines_and_scalars_are_there_when_update_returns(cluster):
    server = cluster.server()
    client = cluster.client(server, input_uuid=0xABCD)
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


def test_a_server_that_comes_back_with_another_schema_ends_its_clients(cluster):
    first = cluster.server()
    client = cluster.client(first, limits=QUICK)
    first.close()
    same = {"push_endpoint": first.push_endpoint, "pub_endpoint": first.pub_endpoint}
    cluster.server(first.endpoint, WIDE, **same)

    def is_refused():
        try:
            client.update(0.2)
        except MemoireTimeout:
            return False
        except SchemaMismatch as error:
            return str(error)
        return False

    assert "Restart the client" in until(is_refused, 100.0)


@pytest.mark.parametrize("size", [0, 10, 100_000, 3_000_000])
def test_a_model_arrives_whole_in_the_published_type(cluster, size):
    server = cluster.server()
    client = cluster.client(server)
    model, receiver = client.model("policy"), client.subscribe("policy")
    assert model.newest() is None and model.version == 0
    body = np.random.default_rng(0).bytes(size)
    assert server.publish("policy", body) == 1
    assert model.wait(100.0).value == body and model.version == 1
    assert receiver.receive(100.0) == body
    server.publish("policy", "ü" * (size // 2))
    assert receiver.receive(100.0) == "ü" * (size // 2)
    assert (model.newest().version, receiver.skipped) == (2, 0)


def test_everything_refuses_after_close_and_closing_again_is_nothing(cluster):
    server = cluster.server()
    client = cluster.client(server)
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


def test_garbage_replies_and_notices_do_not_disturb_a_client(cluster):
    """A relay between client and server adds garbage to replies and notices."""
    server = cluster.server()
    evil_pub = cluster.context.socket(zmq.PUB)
    evil_pub.linger = 0
    pub_port = evil_pub.bind_to_random_port("tcp://127.0.0.1")

    class EvilWay(FaultyWay):
        def carry(self, other, frames):
            other.send_multipart(frames)
            if other is self.front:
                junk = [b""] * 20, [b"", b"x" * 200], [b"", frames[-1][:50]], [b"junk"], [b"", *frames[2:], b"more"]
                for each in junk:
                    other.send_multipart([frames[0], *each])

    way, notices = cluster.keep(EvilWay(cluster.context, server.endpoint)), f"tcp://127.0.0.1:{pub_port}"
    client = cluster.keep(Client(way.endpoint, subscribe=notices, capacity=1000, seed=2, context=cluster.context))
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


def test_a_client_that_nobody_names_any_more_goes_on(cluster):
    server = cluster.server()
    client = connect(server.endpoint, limits=QUICK)
    named, model = weakref.ref(client), client.model("policy")
    del client
    gc.collect()
    try:
        server.publish("policy", b"1")
        assert model.wait(100.0).body == b"1"
    finally:
        assert named() is not None and named().close(100.0)


def test_a_server_that_nobody_holds_goes_on_until_it_is_closed(cluster):
    """The server's threads use sockets, so the interpreter must still find the server at exit."""
    reference = weakref.ref(Server("tcp://127.0.0.1:0", SCHEMA, process=Process(context=cluster.context)))
    gc.collect()
    try:
        assert reference() is not None
        cluster.client(reference()).update(100.0)
    finally:
        reference().close()


def test_many_lines_are_acknowledged_without_pauses(cluster):
    server = cluster.server()
    client = cluster.client(server, limits=Limits.of(update_every=300.0))  # lines are sent earlier
    for number in range(3000):
        client.log(f"{number}")
    client.update(100.0)
    assert [entry.line.text for entry in server.lines(most=5000)] == [f"{number}" for number in range(3000)][-2000:]


def test_nothing_published_after_the_first_message_is_lost(cluster):
    """A subscriber has the newest version before its subscription reaches the publisher, and fetches later ones."""
    server = cluster.server()
    server.publish("t", "0")
    for round_number in range(5):
        receiver = cluster.client(server).subscribe("t")
        assert receiver.receive(100.0) == f"{4 * round_number}"
        for number in range(1, 5):
            server.publish("t", f"{4 * round_number + number}")
        got = [receiver.receive(100.0) for _ in range(4)]
        assert got == [f"{4 * round_number + number}" for number in range(1, 5)]
        assert receiver.skipped == 0


def test_a_finished_server_tells_its_clients_before_it_closes(cluster):
    """Learners end with `finish`, and then leave the `with`; actors loop until `client.finished`."""
    server = cluster.server()
    client = cluster.client(server)
    stop = threading.Event()

    def act():
        while not client.finished and not stop.is_set():
            record(client)
            stop.wait(0.01)

    actor, box = in_thread(act)
    until(lambda: server.total_episodes)
    server.finish()
    assert cluster.client(server).finished, "also one that comes later"
    server.close()
    try:
        actor.join(100.0)
        assert not box.get("error")
        assert client.finished
    finally:
        stop.set()
        actor.join(100.0)
