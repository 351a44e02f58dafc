"""Tests of prepared inference requests and their answers, and of the roles that may ask a node."""

import threading
import time

import numpy as np
import pytest

import memoire
from memoire.errors import AuthError, KeyFileError, MemoireTimeout, Refused
from memoire.inference.policy import Exchange
from memoire.limits import Limits
from memoire.replay.schema import RowSchema, row_schema_from
from memoire.security.keys import Keys
from memoire.security.provision import write_cluster
from memoire.wire import _bytes, messages
from memoire.wire.frames import encode, parse
from memoire.wire.row_container import exact_rows, pack_rows, unpack_rows
from netkit import dealer

pytestmark = pytest.mark.slow

INPUTS, OUTPUTS = {"obs": (np.float32, (2,))}, {"value": np.float32}
HERE = "tcp://127.0.0.1:0"
CLIENT = bytes(range(16))
ROWS = {"obs": np.float32([[1, 2], [3, 4]])}
ASKED, ANSWERED = row_schema_from("inputs", INPUTS), row_schema_from("outputs", OUTPUTS)


@pytest.fixture
def exchange():
    for schema, columns in ((ASKED, ROWS), (ANSWERED, {"value": np.float32([5, 6])})):
        unpack_rows(pack_rows(schema, columns, 2), schema)
    return Exchange.for_rows(ASKED, ANSWERED, 2, client=CLIENT, patience=3.0, limits=Limits())


def answer(body=None, values=(5, 6), **changed):
    payload = pack_rows(ANSWERED, {"value": np.float32(values)}, len(values))
    facts = {"client": CLIENT, "sequence": 7, "fingerprint": ANSWERED.fingerprint, "payload": payload}
    return [b"", *encode(body or messages.Inferred(version=9, batch=2, waited=0.25), **facts | changed)]


def test_a_request_has_the_bytes_of_any_other(exchange):
    frames = exchange.request(ROWS, 7)
    facts = {"fingerprint": ASKED.fingerprint, "payload": pack_rows(ASKED, ROWS, 2)}
    assert frames == [b"", *encode(messages.Infer(patience=3.0), client=CLIENT, sequence=7, **facts)]
    assert parse(frames[1:]).header.sequence == 7


def test_no_answer_with_another_byte_is_read(exchange):
    whole = answer()
    for place in (1, 2):
        for at in range(len(whole[place])):
            broken = bytearray(whole[place])
            broken[at] ^= 1
            frames = [*whole]
            frames[place] = bytes(broken)
            assert exchange.outputs(frames, 7) is None, (place, at)
            frames[place] = whole[place][:at]
            assert exchange.outputs(frames, 7) is None, (place, at)


@pytest.mark.parametrize(
    "frames",
    [
        [], [b""], answer()[:2], answer()[1:], [*answer(), b""], [b"x", *answer()[1:]],
        answer(sequence=8), answer(client=bytes(16)), answer(fingerprint=1), answer(values=(1, 2, 3)),
        answer(messages.Infer(patience=1.0)),
        [b"", *encode(messages.Refusal(code="busy", text=""), client=CLIENT, sequence=7)],
    ],
)  # fmt: skip
def test_what_is_another_message_is_left_to_others(exchange, frames):
    assert exchange.outputs(frames, 7) is None


@pytest.mark.parametrize(
    "call", [lambda: _bytes.renumbered(b"x", 1, b""), lambda: _bytes.is_answer(b"", b"", b"x", 1, 1)]
)
def test_what_has_no_header_is_an_error(call):
    with pytest.raises(ValueError, match="a header has 96 bytes"):
        call()


# Over sockets


def test_an_answer_that_came_too_late_is_not_taken_for_the_next_one(keep):
    is_slow = threading.Event()

    def function(columns):
        if is_slow.is_set():
            time.sleep(0.3)
        return {"value": columns["obs"].sum(1)}

    node = keep(memoire.Inference(HERE, INPUTS, OUTPUTS, function, max_wait=0.0))
    policy = keep(memoire.RemotePolicy(node.endpoint, INPUTS, OUTPUTS, 0.1))
    for _ in range(3):
        policy.act({"obs": np.float32([[0, 1]])})
    is_slow.set()
    with pytest.raises(MemoireTimeout):
        policy.act({"obs": np.float32([[1, 1]])})
    is_slow.clear()
    deadline = time.monotonic() + 10.0
    while True:
        try:
            assert policy.act({"obs": np.float32([[6, 1]])})["value"][0] == 7
            return
        except MemoireTimeout:
            assert time.monotonic() < deadline


# --- Roles that may ask an inference node, and frames that are no requests

ECHO = RowSchema(INPUTS)
"""Inputs and outputs of nodes that return their inputs."""
OBS = {"obs": np.float32([[1, 2]])}


@pytest.fixture
def open_node(keep):
    def start(function=lambda columns: {"obs": columns["obs"]}, **options):
        return keep(memoire.Inference(HERE, ECHO, ECHO, function, **options))

    return start


def act(node, keys=None, timeout=20.0):
    """Ask a node, a server or a proxy once."""
    with memoire.RemotePolicy(node.endpoint, ECHO, ECHO, timeout, keys=keys) as policy:
        return policy.act(OBS)["obs"]


@pytest.fixture
def keys(tmp_path):
    write_cluster(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.mark.parametrize("role", ["actor", "learner", "reader", "server"])
def test_every_role_that_acts_may_ask(keys, open_node, role):
    node = open_node(keys=keys / "inference")
    assert act(node, keys / role)[0, 1] == 2 and node.stats().refused == {}


def test_a_cluster_s_folder_is_enough_and_strangers_stay_outside(keys, open_node, tmp_path):
    write_cluster(tmp_path / "others")
    node = open_node(keys=keys)
    act(node, keys)
    for strange in (tmp_path / "others" / "actor", None):
        with pytest.raises((AuthError, MemoireTimeout)):
            act(node, strange, 1.0)
    assert node.stats().requests == 1
    assert node.keys is not None and node.keys.own.role == "inference"


def test_a_node_listens_with_a_key_that_was_made_for_it(keys, open_node):
    with pytest.raises(KeyFileError, match="inference node"):
        open_node(keys=keys / "actor")


def test_weights_come_by_the_key_of_an_inference_node_which_may_push_nothing(keys, keep, open_node):
    server = keep(memoire.Server(HERE, {"obs": np.float32, "reward": np.float32}, keys=keys / "server"))
    server.publish("policy", b"3")
    scale = lambda columns, weights: {"obs": columns["obs"] * np.float32(weights)}  # noqa: E731
    node = open_node(scale, connect=server.endpoint, weights=int, keys=keys / "inference")
    assert act(node, keys / "actor")[0, 1] == 6
    with pytest.raises((Refused, AuthError)):
        memoire.connect(server.endpoint, keys=keys / "inference", timeout=5.0).close()


def test_servers_and_proxies_say_whom_to_ask(keep):
    server = keep(memoire.Server(HERE, {"obs": np.float32, "reward": np.float32}))
    for node in (server, keep(memoire.Proxy(HERE, [server.endpoint]))):
        with pytest.raises(Refused, match="Send it to the address of the inference node") as caught:
            act(node)
        assert caught.value.code == "unexpected"


def infer(schema=ECHO, columns=OBS, **changed):
    payload = pack_rows(schema, exact_rows(schema, columns, 1), 1)
    facts = {"client": b"c" * 16, "sequence": 1, "fingerprint": ECHO.fingerprint, "payload": payload} | changed
    return encode(messages.Infer(patience=5.0), **facts)


def test_hostile_frames_are_refused_and_the_next_one_is_answered(open_node):
    damaged = infer()
    damaged[1] = bytearray(damaged[1])
    damaged[1][-1] ^= 1
    bad = {
        "payload": damaged,
        "value": infer(columns={"obs": np.float32([[np.nan, 1]])}),
        "container": infer(RowSchema({"obs": (np.float32, (3,))}), {"obs": np.zeros((1, 3), np.float32)}),
        "schema": infer(fingerprint=7),
        "client": infer(client=bytes(16)),
        "unexpected": encode(messages.Fetch(topic="policy"), client=b"c" * 16, sequence=2),
        "magic": [b"x" * 200],
        "short": [b"x"],
    }
    node = open_node()
    with dealer(node.endpoint) as socket:
        for frames in (*bad.values(), infer(sequence=9)):
            socket.send_multipart([b"", *frames])
        replies = {}
        deadline = time.monotonic() + 10.0
        while 9 not in replies and time.monotonic() < deadline:
            if socket.poll(100):
                answer = parse(socket.recv_multipart()[1:])
                replies[answer.header.sequence] = answer.body
    assert isinstance(replies[9], messages.Inferred)
    refused = node.stats().refused
    assert set(refused) <= {*bad, "parameters", "schema"} and sum(refused.values()) == len(bad)
    assert refused["value"] == refused["unexpected"] == refused["client"] == refused["payload"] == 1
    assert node.stats().faults == 0 and node.stats().failures == 0


def test_a_request_that_comes_twice_is_computed_once_and_answered_twice(open_node):
    seen = []

    def function(columns):
        seen.append(len(columns["obs"]))
        return {"obs": columns["obs"]}

    node = open_node(function)
    with dealer(node.endpoint) as socket:
        for _ in range(3):
            socket.send_multipart([b"", *infer()])
            assert socket.poll(10_000)
            assert parse(socket.recv_multipart()[1:]).header.sequence == 1
    assert seen == [1] and node.stats().resends == 2 and node.stats().rows == 1


def test_an_answer_belongs_to_the_key_that_asked(keys, open_node):
    """Another key that uses a client's id gets neither the client's answer nor a place in the client's queue."""
    node, bodies = open_node(keys=keys / "inference"), []
    listening = Keys(keys / "inference").own.public
    for role in ("actor", "learner"):
        own = Keys(keys / role).own
        with dealer(node.endpoint, own.public, own.secret, listening) as socket:
            socket.send_multipart([b"", *infer()])
            assert socket.poll(10_000)
            bodies.append(parse(socket.recv_multipart()[1:]).body)
    assert isinstance(bodies[0], messages.Inferred)
    assert isinstance(bodies[1], messages.Refusal) and bodies[1].code == "owner"
