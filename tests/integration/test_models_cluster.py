"""Tests of models on real sockets: late, slow and absent clients, and processes killed in between."""

import functools
import hashlib
import threading
import time
from collections import Counter

import numpy as np
import pytest
import zmq

from history.ports import block
from memoire.limits import KiB, Limits, MiB
from memoire.wire import messages
from memoire.wire.frames import parse_notice, topic_frame
from netkit import QUICK, in_thread, until

NAMES = ["anna", "bert"]


CHUNK = Limits().tuning.model_chunk
PATIENT = Limits.of(resend_after=10.0, update_every=0.02)
"""Limits without resends, even on a busy machine."""


def body_of(number, size=2 * MiB):
    """Return a body that holds its SHA-256 and number, so that readers can verify the whole."""
    content = np.random.default_rng(number).bytes(size)
    return hashlib.sha256(content).digest() + number.to_bytes(8, "little") + content


def number_of(body):
    assert hashlib.sha256(body[40:]).digest() == body[:32]
    return int.from_bytes(body[32:40], "little")


def count_fetches(server):
    """Count the bytes of bodies that a server hands out from now on, by version."""
    served = Counter()

    def counted(answer, now, header, asked, payload):
        reply = answer(now, header, asked, payload)
        served[reply.body.version] += 0 if reply.payload is None else len(reply.payload)
        return reply

    handlers = server._dispatcher.handlers
    handlers[messages.Fetch] = functools.partial(counted, handlers[messages.Fetch])
    return served


class Watcher:
    """Thread that keeps checking a model: its body is whole, and its version never decreases."""

    def __init__(self, model):
        self.model, self.versions, self.stopped = model, [], threading.Event()
        self.thread, self.box = in_thread(self.run)

    def run(self):
        while not self.stopped.wait(0.002):
            self.look()

    def look(self):
        newest = self.model.newest()
        if newest is not None and [newest.version] != self.versions[-1:]:
            number_of(newest.body)
            self.versions.append(newest.version)

    def end(self):
        self.stopped.set()
        self.thread.join(100.0)
        assert "error" not in self.box
        self.look()
        assert self.versions == sorted(set(self.versions))
        return self.versions


def test_a_model_crosses_the_way_behind_a_proxy_once_however_many_take_it(cluster):
    server = cluster.server(name="anna")
    served = count_fetches(server)
    proxy = cluster.proxy([server], limits=PATIENT)
    clients = [cluster.client(proxy, limits=PATIENT) for _ in range(8)]
    models = [client.model("policy") for client in clients]
    for number in (1, 2):
        body = body_of(number)
        server.publish("policy", body)  # server replies name the model before the proxy has the model
        assert all(model.wait(100.0, after=number - 1).body == body for model in models)
    # The proxy fetches once, plus chunks requested before the proxy had the model. Separate fetches would be eight.
    shares = {version: sent / len(body) for version, sent in served.items()}
    assert shares.keys() == {1, 2} and all(1.0 <= share <= 4.0 for share in shares.values()), shares
    crossed = dict(served)
    late = [cluster.client(proxy) for _ in range(4)]
    assert all(client.model("policy").wait(100.0).body == body for client in late)
    fetched = [client.stats().fetched_bytes for client in clients + late]
    assert max(fetched[:8]) <= 2 * len(body) + 2 * CHUNK and max(fetched[8:]) <= len(body) + CHUNK
    assert served == crossed, "who comes late costs the way nothing"


def test_a_proxy_that_ends_in_the_middle_of_a_transfer_spoils_nothing(cluster):
    server = cluster.server()
    front = f"tcp://127.0.0.1:{block(3)}"
    proxy = cluster.proxy([server], front=front)
    limits = Limits.of(resend_after=0.05, resend_most=0.2, update_every=0.02, model_chunk=16 * KiB, model_spread=0.0)
    client = cluster.client(proxy, limits=limits)
    model = client.model("policy")
    watcher = Watcher(model)
    for number in range(1, 7):
        before = client.stats().fetched_bytes
        server.publish("policy", body_of(number, 4 * MiB))
        until(lambda before=before: client.stats().fetched_bytes > before + 32 * KiB)
        proxy.close(0.1)
        proxy = cluster.proxy([server], front=front)
    until(lambda: (newest := model.newest()) is not None and newest.version == 6, 30.0)
    assert watcher.end()[-1] == 6
    assert not client.stats().refused.get("payload")


def test_a_subscription_that_was_lost_is_made_again(cluster, times):
    times(unheard=0.3)
    server = cluster.server()
    client = cluster.client(server, limits=QUICK)
    receiver = client.subscribe("policy")
    server.publish("policy", "first")
    assert receiver.receive(100.0) == "first"
    # The reconnected socket behaves as if it had no room for the subscription.
    client._io.worker.post(lambda: client._io.data.feed.subscribe(topic_frame("policy"), False))
    count = 1
    while not client.stats().resubscribed:
        count += 1
        client.scalars({"count": count})  # news makes the client ask soon
        server.publish("policy", f"{count}")
        assert receiver.receive(100.0) == f"{count}"  # a reply names the version without a notice
    heard = client._io.topics._topics["policy"]
    server.publish("policy", "last")
    assert receiver.receive(100.0) == "last"
    until(lambda: heard.watch._noticed == count + 1)


def test_one_subscriber_that_reads_nothing_hurts_no_other(cluster):
    server = cluster.server()
    stalled = cluster.context.socket(zmq.SUB)
    stalled.setsockopt(zmq.RCVHWM, 1)
    stalled.setsockopt(zmq.RCVBUF, 4096)
    stalled.setsockopt(zmq.SUBSCRIBE, b"")
    stalled.connect(server.pub_endpoint)
    client = cluster.client(server, limits=QUICK)
    receiver = client.subscribe("steps")
    server.publish("steps", b"first")
    assert receiver.receive(100.0) == b"first"
    assert stalled.poll(30_000)
    count, content = 2000, bytes(8 * KiB)
    received = []

    def receive():
        while received[-1:] != [count + 1]:
            received.append(receiver.receive_model(100.0).version)

    thread, _ = in_thread(receive)
    for number in range(count):
        server.publish("steps", content)
        if number % 100 == 0:
            time.sleep(0.005)
    thread.join(100.0)
    assert received == sorted(set(received)) and received[-1] == count + 1
    assert len(received) + receiver.skipped == count
    # The stalled subscriber's queue is bounded: the subscriber skips versions, and receives the newest at last.
    heard = []
    while stalled.poll(200):
        heard.append(parse_notice(stalled.recv_multipart()).body.version)
    assert len(heard) < count


def test_versions_go_on_over_a_restart_of_a_server_with_a_state_folder(cluster, tmp_path):
    place = f"tcp://127.0.0.1:{block(3)}"
    server = cluster.server(place, name="anna", state=tmp_path)
    proxy = cluster.proxy([server])
    client = cluster.client(proxy, limits=QUICK)
    model = client.model("policy")
    for number in range(1, 4):
        server.publish("policy", body_of(number))
    assert number_of(model.wait(100.0, after=2).body) == 3
    watcher = Watcher(model)
    until(lambda: watcher.versions)
    for number in range(4, 7):
        fetched = client.stats().fetched_bytes
        server.close()
        server = cluster.server(place, name="anna", state=tmp_path)
        assert server.model("policy").version == number - 1
        assert number_of(server.model("policy").body) == number - 1
        assert server.publish("policy", body_of(number)) == number
        assert number_of(model.wait(100.0, after=number - 1).body) == number
        until(lambda number=number: watcher.versions[-1] == number)
        # The client did not fetch the known version again: at most one chunk confirmed the version.
        assert client.stats().fetched_bytes - fetched <= len(body_of(number)) + 2 * CHUNK
    assert watcher.end() == [3, 4, 5, 6]


@pytest.mark.parametrize("far_away", [False, True], ids=["by its server", "by a learner far away"])
def test_a_new_run_begins_without_models_and_versions_go_on(cluster, far_away):
    servers = [cluster.server(name=name) for name in NAMES]
    proxy = cluster.proxy(servers)
    until(lambda: len(proxy.servers) == 2)
    client = cluster.client(proxy, limits=QUICK)
    model, receiver = client.model("policy"), client.subscribe("policy")
    reader = cluster.reader([proxy], limits=QUICK)
    until(lambda: len(reader.servers) == 2)
    publish = functools.partial((reader if far_away else servers[0]).publish, "policy")
    assert publish(body_of(1)) == 1 and publish(body_of(2)) == 2
    assert number_of(model.wait(100.0, after=1).body) == 2
    reader.begin_run("second")
    if far_away:  # at once
        assert publish(body_of(4)) == 3
        assert number_of(model.wait(100.0, after=2).body) == 4
        return
    until(lambda: client.run == "second" and model.newest() is None)
    until(lambda: proxy.stats().models == {})
    assert cluster.client(proxy).model("policy").newest() is None
    assert publish(body_of(3)) == 3
    assert number_of(model.wait(100.0).body) == 3
    until(lambda: receiver.receive_model(100.0).version == 3)
    assert model.newest().version == 3
