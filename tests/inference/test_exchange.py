"""Requests that are made and answered in the shortest way, and who may ask an inference node."""

import threading
import time

import numpy as np
import pytest
import zmq

import memoire
from memoire.errors import AuthError, KeyFileError, MemoireTimeout, Refused
from memoire.inference.policy import Exchange
from memoire.limits import Limits
from memoire.net import sockets
from memoire.replay.schema import RowSchema, row_schema_from
from memoire.security.keys import Keys
from memoire.security.provision import write_cluster
from memoire.wire import _bytes, messages
from memoire.wire.frames import encode, parse
from memoire.wire.row_container import exact_rows, pack_rows, unpack_rows

pytestmark = pytest.mark.slow

# --- Requests that are made and answered in the shortest way: the same bytes, and whatever is unusual is left to others

INPUTS, OUTPUTS = {"obs": (np.float32, (2,))}, {"value": np.float32}
CLIENT = bytes(range(16))
ROWS = {"obs": np.float32([[1, 2], [3, 4]])}


def schemas():
    return row_schema_from("inputs", INPUTS), row_schema_from("outputs", OUTPUTS)


@pytest.fixture
def exchange():
    inputs, outputs = schemas()
    for schema, columns in ((inputs, ROWS), (outputs, {"value": np.float32([5, 6])})):
        unpack_rows(pack_rows(schema, columns, 2), schema)
    return Exchange.of(inputs, outputs, 2, client=CLIENT, patience=3.0, limits=Limits())


def answer(body=None, values=(5, 6), **changed):
    outputs = schemas()[1]
    payload = pack_rows(outputs, {"value": np.float32(values)}, len(values))
    facts = {"client": CLIENT, "sequence": 7, "fingerprint": outputs.fingerprint, "payload": payload}
    return [b"", *encode(body or messages.Inferred(version=9, batch=2, waited=0.25), **facts | changed)]


def test_a_request_has_the_bytes_of_any_other(exchange):
    frames = exchange.request(ROWS, 7)
    inputs = schemas()[0]
    payload = pack_rows(inputs, ROWS, 2)
    facts = {"client": CLIENT, "sequence": 7, "fingerprint": inputs.fingerprint, "payload": payload}
    assert frames == [b"", *encode(messages.Infer(patience=3.0), **facts)]
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
        [],
        [b""],
        answer()[:2],
        answer()[1:],
        [*answer(), b""],
        [b"x", *answer()[1:]],
        answer(sequence=8),
        answer(client=bytes(16)),
        answer(fingerprint=1),
        answer(values=(1, 2, 3)),
        answer(messages.Infer(patience=1.0)),
        [b"", *encode(messages.Refused(code="busy", text=""), client=CLIENT, sequence=7)],
    ],
)
def test_what_is_another_message_is_left_to_others(exchange, frames):
    assert exchange.outputs(frames, 7) is None


@pytest.mark.parametrize(
    "call", [lambda: _bytes.renumbered(b"x", 1, b""), lambda: _bytes.is_answer(b"", b"", b"x", 1, 1)]
)
def test_what_has_no_header_is_an_error(call):
    with pytest.raises(ValueError, match="a header has 96 bytes"):
        call()


# Over sockets


@pytest.fixture
def open_pair():
    made = []

    def start(function, timeout=10.0, **options):
        made.append(memoire.Inference("tcp://127.0.0.1:0", INPUTS, OUTPUTS, function, max_wait=0.0))
        made.append(memoire.RemotePolicy(made[0].endpoint, INPUTS, OUTPUTS, timeout, **options))
        return made

    yield start
    for each in reversed(made):
        each.close()


def sums(columns):
    return {"value": columns["obs"].sum(1)}


def test_an_answer_that_came_too_late_is_not_taken_for_the_next_one(open_pair):
    is_slow = threading.Event()

    def function(columns):
        if is_slow.is_set():
            time.sleep(0.3)
        return sums(columns)

    _, policy = open_pair(function, timeout=0.1)
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


def test_threads_that_share_a_policy_get_their_own_rows(open_pair):
    _, policy = open_pair(sums)
    wrong = []

    def act(own):
        for number in range(100):
            found = policy.act({"obs": np.float32([[own, number]])})["value"][0]
            if found != own + number:
                wrong.append((own, number, found))

    threads = [threading.Thread(target=act, args=(1000 * own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not wrong and not any(thread.is_alive() for thread in threads)


# --- Who may ask an inference node, and what becomes of frames that are no requests

HERE = "tcp://127.0.0.1:0"
ROWS_INFERENCE_KEYS = RowSchema({"obs": (np.float32, (2,))})
OBS = {"obs": np.float32([[1, 2]])}


def same(columns):
    return {"obs": columns["obs"]}


@pytest.fixture
def keys(tmp_path):
    write_cluster(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.mark.parametrize("role", ["actor", "learner", "reader", "server"])
def test_every_role_that_acts_may_ask(keys, role):
    with memoire.Inference(HERE, ROWS_INFERENCE_KEYS, ROWS_INFERENCE_KEYS, same, keys=keys / "inference") as node:
        with memoire.RemotePolicy(
            node.endpoint, ROWS_INFERENCE_KEYS, ROWS_INFERENCE_KEYS, 20.0, keys=keys / role
        ) as policy:
            assert policy.act(OBS)["obs"][0, 1] == 2
        assert node.stats().refused == {}


def test_a_cluster_s_folder_is_enough_and_strangers_stay_outside(keys, tmp_path):
    write_cluster(tmp_path / "others")
    with memoire.Inference(HERE, ROWS_INFERENCE_KEYS, ROWS_INFERENCE_KEYS, same, keys=keys) as node:
        with memoire.RemotePolicy(node.endpoint, ROWS_INFERENCE_KEYS, ROWS_INFERENCE_KEYS, 20.0, keys=keys) as policy:
            policy.act(OBS)
        for strange in (tmp_path / "others" / "actor", None):
            with memoire.RemotePolicy(
                node.endpoint, ROWS_INFERENCE_KEYS, ROWS_INFERENCE_KEYS, 1.0, keys=strange
            ) as policy:
                with pytest.raises((AuthError, MemoireTimeout)):
                    policy.act(OBS)
        assert node.stats().requests == 1
        assert node.keys is not None and node.keys.own.role == "inference"


def test_a_node_listens_with_a_key_that_was_made_for_it(keys):
    with pytest.raises(KeyFileError, match="inference node"):
        memoire.Inference(HERE, ROWS_INFERENCE_KEYS, ROWS_INFERENCE_KEYS, same, keys=keys / "actor")


def test_weights_come_by_the_key_of_an_inference_node_which_may_push_nothing(keys):
    schema = memoire.Schema({"obs": np.float32, "reward": np.float32})
    with memoire.Server(HERE, schema, keys=keys / "server") as server:
        server.publish("policy", b"3")
        options = {"connect": server.endpoint, "weights": int, "keys": keys / "inference"}
        scale = lambda columns, weights: {"obs": columns["obs"] * np.float32(weights)}  # noqa: E731
        with memoire.Inference(HERE, ROWS_INFERENCE_KEYS, ROWS_INFERENCE_KEYS, scale, **options) as node:
            with memoire.RemotePolicy(
                node.endpoint, ROWS_INFERENCE_KEYS, ROWS_INFERENCE_KEYS, 20.0, keys=keys / "actor"
            ) as policy:
                assert policy.act(OBS)["obs"][0, 1] == 6
        with pytest.raises((Refused, AuthError)):
            memoire.connect(server.endpoint, keys=keys / "inference", timeout=5.0).close()


def test_servers_and_proxies_say_whom_to_ask():
    schema = memoire.Schema({"obs": np.float32, "reward": np.float32})
    with memoire.Server(HERE, schema) as server, memoire.Proxy(HERE, [server.endpoint]) as proxy:
        for endpoint in (server.endpoint, proxy.endpoint):
            with memoire.RemotePolicy(endpoint, ROWS_INFERENCE_KEYS, ROWS_INFERENCE_KEYS, 10.0) as policy:
                with pytest.raises(Refused, match="Ask the address of the inference node") as caught:
                    policy.act(OBS)
                assert caught.value.code == "unexpected"


def infer(**changed):
    payload = pack_rows(ROWS_INFERENCE_KEYS, exact_rows(ROWS_INFERENCE_KEYS, OBS, 1), 1)
    facts = {
        "client": b"c" * 16,
        "sequence": 1,
        "fingerprint": ROWS_INFERENCE_KEYS.fingerprint,
        "payload": payload,
    } | changed
    return encode(messages.Infer(patience=5.0), **facts)


def test_hostile_frames_are_refused_and_the_next_one_is_answered():
    damaged = infer()
    damaged[1] = bytearray(damaged[1])
    damaged[1][-1] ^= 1
    not_finite = pack_rows(
        ROWS_INFERENCE_KEYS, exact_rows(ROWS_INFERENCE_KEYS, {"obs": np.float32([[np.nan, 1]])}, 1), 1
    )
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
    with memoire.Inference(HERE, ROWS_INFERENCE_KEYS, ROWS_INFERENCE_KEYS, same) as node, zmq.Context() as context:
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

    with memoire.Inference(HERE, ROWS_INFERENCE_KEYS, ROWS_INFERENCE_KEYS, function) as node, zmq.Context() as context:
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
    with (
        memoire.Inference(HERE, ROWS_INFERENCE_KEYS, ROWS_INFERENCE_KEYS, same, keys=keys / "inference") as node,
        zmq.Context() as context,
    ):
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
