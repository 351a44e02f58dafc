"""Many threads with one client, server or reader: exact counts, and a close that ends each waiting call at once.

Waiting calls that other files already end by a close: tests/samples/test_server_client.py, tests/reader/test_reader.py.
"""

import threading

import numpy as np
import pytest

from memoire.errors import Closed
from netkit import DEADLINE, QUICK, in_thread, record, until


def test_everything_that_a_client_does_may_be_done_at_once(cluster):
    server = cluster.server()
    client = cluster.client(server, limits=QUICK, capacity=5000)
    zeros, none = np.zeros((2, 4), np.float32), np.zeros(2, bool)

    def act():
        with client.writer(num_envs=2, autoreset="disabled") as writer:
            for step in range(600):
                ends = np.full(2, step % 20 == 19)
                writer.step(zeros, np.zeros(2, np.int32), np.ones(2, np.float32), none, ends, zeros.copy(), {})

    def push(number):
        until(lambda: client.memory.num_positive)
        return sum(client.push_cache(100.0) for _ in range(15))

    def tell(number):
        for step in range(40):
            client.log(f"{number} {step}")
            client.scalars({f"thread {number}": step})
            if step % 10 == 0:
                client.update(100.0)

    def hear():
        receiver, model = client.subscribe("news"), client.model("policy")
        first = model.wait(100.0)
        heard = [receiver.receive_model(100.0).version]
        while heard[-1] < 60:
            heard.append(receiver.receive_model(100.0).version)
        assert model.wait(20.0, after=first.version).version > first.version
        return heard

    def publish():
        for number in range(30):
            server.publish("news", f"{number}")
            server.publish("policy", bytes(20_000 + number))
            client.update(100.0)

    def change():
        for beta in np.linspace(0.1, 0.9, 9):
            server.configure(importance_exponent=float(beta))
            client.update(100.0)

    def learn():
        batches = 0
        while batches < 20:
            batch = server.get_batch(64, 100.0)
            batch.update_priorities(np.ones(64))
            batches += 1
        return batches

    threads = [in_thread(act), in_thread(push, 0), in_thread(push, 1), in_thread(tell, 0), in_thread(tell, 1)]
    threads += [in_thread(work) for work in (hear, publish, publish, change, learn)]
    for thread, _ in threads:
        thread.join(DEADLINE)
    assert all(box.keys() == {"value"} for _, box in threads), threads
    done = [box["value"] for _, box in threads]
    assert done[1:3] == [15, 15] and done[9] == 20
    assert done[5] == sorted(set(done[5]))  # versions only grow
    client.update(100.0)
    assert (server.total_steps, server.total_episodes) == (1200, 60)
    assert (client.stats().steps, client.stats().episodes) == (1200, 60)
    until(lambda: server.total_caches == client.stats().pushed_caches)
    texts = [entry.line.text for entry in server.lines(most=5000)]
    for number in range(2):
        assert [text for text in texts if text.startswith(f"{number} ")] == [f"{number} {step}" for step in range(40)]
    (seen,) = server.clients()
    assert seen.scalars == {"thread 0": 39.0, "thread 1": 39.0}
    assert client.parameters.importance_exponent == server.parameters.importance_exponent == pytest.approx(0.9)
    assert not client.stats().faults and not server.stats().faults
    assert set(server.stats().refused) <= {"missing"}  # a newer model has already replaced the fetched model


@pytest.mark.parametrize("moment", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("first", ["client", "server", "reader"])
def test_whatever_is_going_on_a_close_ends_it_at_once(cluster, first, moment):
    server = cluster.server()
    client = cluster.client(server, limits=QUICK)
    reader = cluster.reader([server], limits=QUICK)
    record(client, episodes=5)
    for _ in range(4):
        assert client.push_cache(100.0)
    client.update(100.0)
    calls = {
        "client": [
            lambda: client.push_cache(300.0), lambda: client.update(300.0), lambda: client.log("x"),
            lambda: client.scalars({"x": 1.0}), lambda: client.model("t").newest(), lambda: client.finished,
            lambda: client.sync(timeout=100.0),
        ],
        "server": [
            lambda: server.get_batch(16, 100.0).update_priorities(np.ones(16)), lambda: server.publish("t", b"x" * 10),
            lambda: server.configure(importance_exponent=0.5),
        ],
        "reader": [lambda: reader.get_batch(8, 300.0), lambda: reader.publish("r", b"x"), lambda: reader.configure(cache_size=256)],
    }[first]  # fmt: skip
    started = threading.Barrier(len(calls) + 1)

    def again(call):
        started.wait(100.0)
        while True:
            call()

    threads = [in_thread(again, call) for call in calls]
    started.wait(100.0)
    threading.Event().wait(moment)  # calls are running; any moment must do
    node = {"client": client, "server": server, "reader": reader}[first]
    node.close(1.0)
    for thread, box in threads:
        thread.join(DEADLINE)
        assert isinstance(box.get("error"), Closed), box
    assert node.closed
