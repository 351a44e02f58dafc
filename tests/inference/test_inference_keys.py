"""Who may ask an inference node, and what becomes of frames that are no requests."""

import time

import numpy as np
import pytest
import zmq

import memoire
from memoire.errors import AuthError, KeyFileError, MemoireTimeout, Refused
from memoire.net import sockets
from memoire.replay.schema import RowSchema
from memoire.security.keys import Keys
from memoire.security.provision import write_cluster
from memoire.wire import messages
from memoire.wire.frames import encode, parse
from memoire.wire.row_container import exact_rows, pack_rows

HERE = "tcp://127.0.0.1:0"
ROWS = RowSchema({"obs": (np.float32, (2,))})
OBS = {"obs": np.float32([[1, 2]])}


def same(columns):
    return {"obs": columns["obs"]}


@pytest.fixture
def keys(tmp_path):
    write_cluster(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.mark.parametrize("role", ["actor", "learner", "reader", "server"])
def test_every_role_that_acts_may_ask(keys, role):
    with memoire.Inference(HERE, ROWS, ROWS, same, keys=keys / "inference") as node:
        with memoire.RemotePolicy(node.endpoint, ROWS, ROWS, 20.0, keys=keys / role) as policy:
            assert policy.act(OBS)["obs"][0, 1] == 2
        assert node.stats().refused == {}


def test_a_cluster_s_folder_is_enough_and_strangers_stay_outside(keys, tmp_path):
    write_cluster(tmp_path / "others")
    with memoire.Inference(HERE, ROWS, ROWS, same, keys=keys) as node:
        with memoire.RemotePolicy(node.endpoint, ROWS, ROWS, 20.0, keys=keys) as policy:
            policy.act(OBS)
        for strange in (tmp_path / "others" / "actor", None):
            with memoire.RemotePolicy(node.endpoint, ROWS, ROWS, 1.0, keys=strange) as policy:
                with pytest.raises((AuthError, MemoireTimeout)):
                    policy.act(OBS)
        assert node.stats().requests == 1
        assert node.keys is not None and node.keys.own.role == "inference"


def test_a_node_listens_with_a_key_that_was_made_for_it(keys):
    with pytest.raises(KeyFileError, match="inference node"):
        memoire.Inference(HERE, ROWS, ROWS, same, keys=keys / "actor")


def test_weights_come_by_the_key_of_an_inference_node_which_may_push_nothing(keys):
    schema = memoire.Schema({"obs": np.float32, "reward": np.float32})
    with memoire.Server(HERE, schema, keys=keys / "server") as server:
        server.publish("policy", b"3")
        options = {"connect": server.endpoint, "weights": int, "keys": keys / "inference"}
        scale = lambda columns, weights: {"obs": columns["obs"] * np.float32(weights)}  # noqa: E731
        with memoire.Inference(HERE, ROWS, ROWS, scale, **options) as node:
            with memoire.RemotePolicy(node.endpoint, ROWS, ROWS, 20.0, keys=keys / "actor") as policy:
                assert policy.act(OBS)["obs"][0, 1] == 6
        with pytest.raises((Refused, AuthError)):
            memoire.connect(server.endpoint, keys=keys / "inference", timeout=5.0).close()


def test_servers_and_proxies_say_whom_to_ask():
    schema = memoire.Schema({"obs": np.float32, "reward": np.float32})
    with memoire.Server(HERE, schema) as server, memoire.Proxy(HERE, [server.endpoint]) as proxy:
        for endpoint in (server.endpoint, proxy.endpoint):
            with memoire.RemotePolicy(endpoint, ROWS, ROWS, 10.0) as policy:
                with pytest.raises(Refused, match="Ask the address of the inference node") as caught:
                    policy.act(OBS)
                assert caught.value.code == "unexpected"


def infer(**changed):
    payload = pack_rows(ROWS, exact_rows(ROWS, OBS, 1), 1)
    facts = {"client": b"c" * 16, "sequence": 1, "fingerprint": ROWS.fingerprint, "payload": payload} | changed
    return encode(messages.Infer(patience=5.0), **facts)


def test_hostile_frames_are_refused_and_the_next_one_is_answered():
    damaged = infer()
    damaged[1] = bytearray(damaged[1])
    damaged[1][-1] ^= 1
    not_finite = pack_rows(ROWS, exact_rows(ROWS, {"obs": np.float32([[np.nan, 1]])}, 1), 1)
    other = RowSchema({"obs": (np.float32, (3,))})
    cut = pack_rows(other, exact_rows(other, {"obs": np.zeros((1, 3), np.float32)}, 1), 1)
    bad = {
        "payload": damaged,
        "value": infer(payload=not_finite),
        "container": infer(payload=cut),
        "schema": infer(fingerprint=7),
        "client": infer(client=bytes(16)),
        "unexpected": encode(messages.Fetch(topic="policy"), client=b"c" * 16, sequence=2),
        "magic": [b"x" * 200],
        "short": [b"x"],
    }
    with memoire.Inference(HERE, ROWS, ROWS, same) as node, zmq.Context() as context:
        with context.socket(zmq.DEALER) as made:
            made.linger = 0
            made.connect(node.endpoint)
            for frames in bad.values():
                made.send_multipart([b"", *frames])
            made.send_multipart([b"", *infer(sequence=9)])
            found = {}
            deadline = time.monotonic() + 10.0
            while 9 not in found and time.monotonic() < deadline:
                if made.poll(100):
                    answer = parse(made.recv_multipart()[1:])
                    found[answer.header.sequence] = answer.body
        assert isinstance(found[9], messages.Inferred)
        refused = node.stats().refused
        assert set(refused) <= {*bad, "parameters", "schema"} and sum(refused.values()) == len(bad)
        assert refused["value"] == refused["unexpected"] == refused["client"] == refused["payload"] == 1
        assert node.stats().faults == 0 and node.stats().failures == 0


def test_a_request_that_comes_twice_is_computed_once_and_answered_twice():
    seen = []

    def function(columns):
        seen.append(len(columns["obs"]))
        return same(columns)

    with memoire.Inference(HERE, ROWS, ROWS, function) as node, zmq.Context() as context:
        with context.socket(zmq.DEALER) as made:
            made.linger = 0
            made.connect(node.endpoint)
            for _ in range(3):
                made.send_multipart([b"", *infer()])
                assert made.poll(10_000)
                assert parse(made.recv_multipart()[1:]).header.sequence == 1
        assert seen == [1] and node.stats().resends == 2 and node.stats().rows == 1


def test_an_answer_belongs_to_the_key_that_asked(keys):
    """Another key that uses a client's id gets neither its answer nor a place in its queue."""
    with memoire.Inference(HERE, ROWS, ROWS, same, keys=keys / "inference") as node, zmq.Context() as context:
        listening = Keys(keys / "inference").own.public
        found = []
        for role in ("actor", "learner"):
            own = Keys(keys / role).own
            with context.socket(zmq.DEALER) as made:
                made.linger = 0
                sockets.use_keys(made, own.public, own.secret, listening)
                made.connect(node.endpoint)
                made.send_multipart([b"", *infer()])
                assert made.poll(10_000)
                found.append(parse(made.recv_multipart()[1:]).body)
    assert isinstance(found[0], messages.Inferred)
    assert isinstance(found[1], messages.Refused) and found[1].code == "owner"
