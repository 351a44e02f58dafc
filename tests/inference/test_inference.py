"""Inference nodes and their clients over real sockets, also in processes of their own."""

import gc
import inspect
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import memoire
import policy_child
from memoire.cli import doctor, main
from memoire.errors import Closed, EntryError, MemoireTimeout, ParameterError, Refused, WrongType
from memoire.limits import Limits
from memoire.replay.columns import Column
from memoire.replay.schema import RowSchema
from netkit import until

# --- Inference nodes and their clients over real sockets

INPUTS = {"obs": (np.float32, (2,))}
OUTPUTS = {"action": np.int64, "value": np.float32}
HERE = "tcp://127.0.0.1:0"


def double(columns, weights=1):
    return {"action": np.arange(len(columns["obs"])), "value": columns["obs"].sum(1) * np.float32(weights)}


@pytest.fixture
def open_node():
    made = []

    def start(function=double, endpoint=HERE, inputs=INPUTS, outputs=OUTPUTS, **options):
        made.append(memoire.Inference(endpoint, inputs, outputs, function, **options))
        return made[-1]

    yield start
    for node in reversed(made):
        node.close()


@pytest.fixture
def open_policy():
    made = []

    def start(*nodes, inputs=INPUTS, outputs=OUTPUTS, **options):
        made.append(memoire.RemotePolicy([node.endpoint for node in nodes], inputs, outputs, **options))
        return made[-1]

    yield start
    for policy in made:
        policy.close()


def obs(*rows):
    return {"obs": np.array(rows, np.float32)}


def test_rows_go_there_and_outputs_come_back(open_node, open_policy):
    node = open_node()
    policy = open_policy(node)
    found = policy.act(obs([1, 2], [3, 4]))
    np.testing.assert_array_equal(found["value"], np.float32([3, 7]))
    assert found["action"].dtype == np.int64 and list(found["action"]) == [0, 1]
    stats = node.stats()
    assert (
        stats.rows == 2
        and stats.batches == {"full": 0, "everyone": 1, "wait": 0}
        and stats.clients == 1
        and stats.failures == 0
    )
    assert node.readiness() == node.liveness() == []


def test_ragged_columns_are_padded_for_the_function_and_not_on_the_way(open_node, open_policy):
    graph = {"nodes": Column(np.int32, (None, 2)), "last": np.int32}

    def function(columns):
        assert columns["nodes"].shape == (3, 4, 2) and list(columns["nodes_length"]) == [1, 4, 0]
        return {"nodes": columns["nodes"] * 2, "nodes_length": columns["nodes_length"], "last": columns["last"]}

    policy = open_policy(open_node(function, inputs=graph, outputs=graph), inputs=graph, outputs=graph)
    values = [np.full((length, 2), length + 1, np.int32) for length in (1, 4, 0)]
    found = policy.act({"nodes": values, "last": np.int32([5, 6, 7])})
    assert list(found["nodes_length"]) == [1, 4, 0] and found["nodes"].shape == (3, 4, 2)
    assert found["nodes"][1, 3, 0] == 10 and found["nodes"][0, 1, 0] == 0


@pytest.mark.slow
def test_many_clients_share_batches_and_each_gets_its_own_rows(open_node, open_policy):
    node = open_node(max_wait=0.05)
    policies = [open_policy(node) for _ in range(4)]
    wrong = []

    def act(policy, number):
        for step in range(30):
            found = policy.act(obs([number, step], [number, 0]))
            if list(found["value"]) != [number + step, number]:
                wrong.append((number, step))

    threads = [threading.Thread(target=act, args=each) for each in zip(policies, range(4), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    stats = node.stats()
    assert not wrong and stats.batched_rows == 240 and sum(stats.batches.values()) < 100
    answered = {reason: timing.count for reason, timing in stats.durations.items()}
    assert sum(answered.values()) == 120 and all(stats.batches[reason] for reason, count in answered.items() if count)
    for reason, timing in stats.durations.items():  # an answer takes its wait and the function
        assert timing.count == stats.waits[reason].count and timing.seconds >= stats.waits[reason].seconds
    assert stats.waited_seconds == sum(timing.seconds for timing in stats.waits.values()) and stats.topic == ""


def test_an_error_of_the_function_is_the_answer_and_the_node_lives_on(open_node, open_policy):
    def function(columns):
        if columns["obs"][0, 0] < 0:
            raise ValueError("a negative speed\nand more")
        return double(columns)

    node = open_node(function)
    policy = open_policy(node)
    with pytest.raises(Refused, match="failed: ValueError: a negative speed") as caught:
        policy.act(obs([-1, 0]))
    assert caught.value.code == "failed" and "and more" not in str(caught.value)
    assert policy.act(obs([1, 0]))["value"][0] == 1
    assert node.stats().failures == 1 and node.stats().refused == {"failed": 1}


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"action": np.zeros(1, np.int64)}, "column 'value' is missing"),
        ({"action": np.zeros(2, np.int64), "value": np.zeros(1, np.float32)}, "action"),
        ({"action": np.zeros(1), "value": np.zeros(1, np.float32)}, "action"),
        (None, "a mapping of arrays was expected, got NoneType"),
    ],
)
def test_outputs_that_do_not_fit_are_an_error_that_names_them(open_node, open_policy, outputs, text):
    policy = open_policy(open_node(lambda columns: outputs))
    with pytest.raises(Refused, match=text) as caught:
        policy.act(obs([1, 0]))
    assert caught.value.code == "failed"


def test_outputs_that_are_larger_than_a_reply_are_refused_and_smaller_ones_come(open_node, open_policy):
    outputs = {"picture": (np.uint8, (1 << 19,))}
    node = open_node(lambda columns: {"picture": np.zeros((len(columns["obs"]), 1 << 19), np.uint8)}, outputs=outputs)
    policy = open_policy(node, outputs=outputs, timeout=10.0)
    with pytest.raises(Refused, match=r"too_large.*the outputs of 3 rows have 15\d+ bytes; 1048576 are allowed"):
        policy.act(obs(*[[0, 0]] * 3))
    assert policy.act(obs([0, 0]))["picture"].shape == (1, 1 << 19)
    until(lambda: node.stats().refused == {"too_large": 1})


def test_a_batch_whose_answers_are_refused_leaves_memory_without_a_collection_of_garbage(open_node, open_policy):
    made = []

    def function(columns):
        values = np.zeros((len(columns["obs"]), 100_000), np.float32)
        made.append(weakref.ref(values))
        return {"values": values}

    outputs = {"values": (np.float32, (100_000,))}
    node = open_node(function, outputs=outputs, limits=Limits.of(request_bytes=1 << 20))
    policy = open_policy(node, outputs=outputs)
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(Refused, match="too_large"):
                policy.act(obs(*[(1, 2)] * 3))
        until(lambda: not any(each() is not None for each in made))
    finally:
        gc.enable()


def test_a_batch_that_fails_outside_of_the_function_is_answered_and_the_node_lives_on(open_node, open_policy):
    node = open_node(sizes=[1 << 44])  # no machine has room for so many rows
    policy = open_policy(node, timeout=10.0)
    for _ in range(2):
        with pytest.raises(Refused, match=r"failed.*a batch of 1 rows failed: \w*MemoryError"):
            policy.act(obs([1, 2]))
    assert node.stats().failures == 2 and node.liveness() == []


def test_a_batch_is_filled_up_to_one_of_the_sizes(open_node, open_policy):
    seen = []

    def function(columns):
        seen.append(columns["obs"].copy())
        return double(columns)

    policy = open_policy(open_node(function, max_batch=8, sizes=(8, 4)))
    assert len(policy.act(obs([1, 1], [2, 2], [3, 3], [4, 4], [5, 5]))["value"]) == 5
    policy.act(obs([1, 1]))
    assert [len(each) for each in seen] == [8, 4] and not seen[0][5:].any()


def test_rows_wait_for_their_version(open_node, open_policy):
    node = open_node()
    node.update(1, 1)
    policy = open_policy(node, timeout=10.0)
    pending = policy.ask(obs([2, 0]), min_version=5)
    assert policy.act(obs([2, 0]))["value"][0] == 2
    assert not pending.done
    node.update(10, 5)
    assert pending.result()["value"][0] == 20 and pending.version == 5
    assert node.wait_version(5, 1.0) == 5
    with pytest.raises(MemoireTimeout, match=r"version 6 .*It has version 5\. Call update"):
        node.wait_version(6, 0.05)


def test_weights_come_from_a_server_and_bad_ones_leave_the_former(open_node, open_policy):
    schema = memoire.Schema({"obs": np.float32, "reward": np.float32})
    with memoire.Server(HERE, schema) as server:
        node = open_node(weights=lambda content: int(content), connect=server.endpoint)
        assert node.readiness() == ["starting: no weights of topic 'policy' have come yet"]
        policy = open_policy(node, timeout=20.0)
        pending = policy.ask(obs([1, 0]))
        version = server.publish("policy", b"3")
        assert pending.result()["value"][0] == 3 and pending.version == version
        server.publish("policy", b"no number")
        until(lambda: node.stats().weights_failures == 1)
        assert policy.act(obs([1, 0]))["value"][0] == 3
        newest = server.publish("policy", b"7")
        assert node.wait_version(newest, 10.0) == newest
        assert policy.act(obs([1, 0]))["value"][0] == 7 and node.readiness() == []


def test_a_full_queue_is_answered_when_there_is_room(open_node, open_policy):
    go = threading.Event()

    def function(columns):
        go.wait(10)
        return double(columns)

    node = open_node(function, max_batch=2, queue_rows=2, max_wait=0.0)
    policy = open_policy(node, timeout=20.0)
    pending = [policy.ask(obs([number, 0])) for number in range(8)]
    until(lambda: node.stats().refused.get("busy", 0) > 3)
    go.set()
    assert [each.result()["value"][0] for each in pending] == list(range(8))


def test_an_overdue_request_never_reaches_the_function(open_node, open_policy):
    seen, go = [], threading.Event()

    def function(columns):
        seen.extend(columns["obs"][:, 0].tolist())
        go.wait(10)
        return double(columns)

    node = open_node(function, max_wait=0.0)
    first = open_policy(node, timeout=20.0).ask(obs([1, 0]))
    until(lambda: seen == [1])
    with pytest.raises(MemoireTimeout):
        open_policy(node, timeout=0.1).act(obs([2, 0]))
    go.set()
    assert first.result()["value"][0] == 1
    until(lambda: node.stats().expired == 1)
    assert seen == [1] and node.stats().queue_rows == 0


def test_clients_move_when_a_node_closes_and_come_back_when_it_returns(open_node, open_policy):
    nodes = {}
    for name in "ab":
        made = open_node(lambda columns, name=name: double(columns, ord(name)), name=name)
        nodes[made.endpoint] = name, made
    policy = open_policy(*(made for _, made in nodes.values()), timeout=10.0)

    def asked():
        return chr(int(policy.act(obs([1, 0]))["value"][0]))

    own, other = (nodes[url] for url in policy.urls)
    until(lambda: asked() == own[0])
    own[1].close()
    assert asked() == other[0]
    open_node(lambda columns: double(columns, ord(own[0])), endpoint=own[1].endpoint)
    until(lambda: asked() == own[0])


@pytest.mark.slow
def test_a_silent_node_is_passed_over(open_node, open_policy):
    stuck = threading.Event()

    def function(columns):
        stuck.wait(20)
        return double(columns)

    nodes = [open_node(function), open_node(function)]
    policy = open_policy(*nodes, timeout=4.0)
    own = next(node for node in nodes if node.endpoint == policy.urls[0])
    until(lambda: own.stats().requests or not policy.ask(obs([0, 0])).cancel())
    pending = policy.ask(obs([1, 0]))
    until(lambda: policy.moves)
    stuck.set()
    assert pending.result()["value"][0] == 1


def test_without_a_node_the_fallback_acts_or_the_error_says_who_was_tried(open_policy, open_node):
    node = open_node()
    endpoint = node.endpoint
    node.close()

    class Still:
        def act(self, columns):
            return {"action": np.zeros(len(columns["obs"]), np.int64)}

    with memoire.RemotePolicy(endpoint, INPUTS, OUTPUTS, 0.2, fallback=Still()) as policy:
        assert policy.act(obs([1, 0]))["action"][0] == 0
    with memoire.RemotePolicy([endpoint], INPUTS, OUTPUTS, 0.2) as policy:
        with pytest.raises(MemoireTimeout, match=endpoint):
            policy.act(obs([1, 0]))


def test_what_is_wrong_is_said_before_anything_is_sent(open_node, open_policy):
    node = open_node()
    policy = open_policy(node)
    with pytest.raises(EntryError, match="obs"):
        policy.ask({"obs": np.zeros((1, 3), np.float32)})
    with pytest.raises(ParameterError, match="'obs' is missing"):
        policy.ask({"observation": 1})
    with pytest.raises(MemoireTimeout, match="nobody|outputs|connected"):
        memoire.RemotePolicy(node.endpoint, INPUTS, OUTPUTS, 5.0).ask(obs([1, 0]), min_version=9).result(0.05)
    with pytest.raises(WrongType, match="function"):
        open_node("net")
    with pytest.raises(ParameterError, match="sizes"):
        open_node(sizes=(8,))
    large = {"obs": (np.uint8, (2_000_000,))}
    for sides in ({"inputs": large}, {"outputs": large}):
        (name,) = sides
        with pytest.raises(
            ParameterError, match=f"^request_bytes must be at least 2000\\d+, which one row of the {name}"
        ):
            open_node(**sides)


NODE_AND_POLICY = {"inputs": "inputs", "outputs": "outputs", "timeout": "patience of limits"}
"""By their names at a policy, what a node has of it: equal, or refused. Each has its own keys, limits and context."""
NODE_ALONE = {
    "endpoint", "function", "weights", "topic", "connect", "max_batch", "max_wait", "alive", "queue_rows", "sizes",
    "name", "service",
}  # fmt: skip


def test_every_setting_of_node_and_policy_is_listed():
    node, policy = (inspect.signature(made).parameters.keys() for made in (memoire.Inference, memoire.RemotePolicy))
    own = {"keys", "limits", "context"}
    assert policy == NODE_AND_POLICY.keys() | own | {"urls", "fallback"}, "list what both have"
    assert node == {"inputs", "outputs"} | own | NODE_ALONE, "list what both have"


@pytest.mark.parametrize(
    ("told", "rows", "says"),
    [
        ({"inputs": {"obs": np.float32}}, 1, r"inputs of the node are .*float32\[2\].* this policy .*\(obs: float32"),
        ({"inputs": {"obs": (np.float64, (2,))}}, 1, r"inputs of the node are .*float32\[2\].*float64\[2\]"),
        ({"outputs": {"action": np.int32}}, 1, r"outputs of the node are .*action.* this policy .*\(action: int32\)"),
        ({"timeout": 9.0}, 1, r"waits for [89].* s; 5 s are allowed \(patience\)"),
        ({}, 257, r"257 rows; a batch has at most 256 \(max_batch\)"),
    ],
)
def test_a_policy_that_was_told_otherwise_than_its_node_is_refused_by_both_values(
    open_node, open_policy, told, rows, says
):
    node = open_node(limits=Limits.of(patience=5.0))
    policy = open_policy(node, **{"timeout": 2.0} | told)
    column = RowSchema(told.get("inputs", INPUTS))["obs"]
    asked = {"obs": np.zeros((rows, *column.shape), column.dtype)}
    for ask in (policy.act, lambda columns: policy.ask(columns).result()):
        with pytest.raises(Refused, match=says) as caught:
            ask(asked)
    assert caught.value.code in ("schema", "too_large")


@pytest.mark.slow
def test_what_is_open_ends_when_the_policy_is_closed_or_the_request_is_cancelled(open_node, open_policy):
    node = open_node()
    policy = open_policy(node, timeout=20.0)
    first, second = (policy.ask(obs([1, 0]), min_version=9) for _ in range(2))
    first.cancel()
    with pytest.raises(Closed):
        first.result()
    policy.close()
    with pytest.raises(Closed):
        second.result()
    with pytest.raises(Closed):
        policy.ask(obs([1, 0]))
    node.close()
    assert node.closed and node.wait(0.0)
    with pytest.raises(Closed):
        node.update(1, 1)


# --- `memoire doctor --inference`

ROWS = {"obs": {"speed": (np.float32, (2,))}, "nodes": Column(np.int32, (None, 3))}


def count(columns):
    return {"value": columns["nodes_length"].astype(np.float32)}


def test_the_doctor_asks_a_row(capsys):
    with memoire.Inference(HERE, ROWS, {"value": np.float32}, count) as node:
        assert main.main(["doctor", "--inference", node.endpoint]) == doctor.WELL
    said = capsys.readouterr().out
    assert "ok   inputs: obs.speed float32[2], nodes int32[any, 3]" in said and "ok   outputs: value float32" in said
    assert "a row is answered" in said and said.endswith("all is well\n")


def test_the_doctor_says_what_the_function_says(capsys):
    def function(columns):
        raise RuntimeError("no GPU")

    with memoire.Inference(HERE, ROWS, {"value": np.float32}, function) as node:
        assert main.main(["doctor", "--inference", node.endpoint]) == doctor.REFUSED
    assert "failed: RuntimeError: no GPU" in capsys.readouterr().out


def test_the_doctor_knows_a_server_from_an_inference_node(capsys):
    schema = memoire.Schema({"obs": np.float32, "reward": np.float32})
    with memoire.Server(HERE, schema) as server:
        assert main.main(["doctor", "--inference", server.endpoint]) == doctor.NOT_MEMOIRE
    assert "is no inference node" in capsys.readouterr().out


def test_the_doctor_says_that_nobody_listens(capsys):
    with memoire.Inference(HERE, ROWS, {"value": np.float32}, count) as node:
        endpoint = node.endpoint
    assert main.main(["doctor", "--inference", endpoint, "--timeout", "1"]) == doctor.NOTHING_LISTENS


# --- Actors in processes of their own: one is killed, one is stopped, and the others go on at once

CHILD = Path(policy_child.__file__)


def function(columns):
    return {"value": columns["obs"].sum(1)}


@pytest.fixture
def start():
    made = []

    def begin(*urls, rows=1):
        words = [sys.executable, str(CHILD), str(rows), *urls]
        made.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        return made[-1]

    yield begin
    for child in made:
        child.kill()
        child.wait(10)
        child.stdout.close()


def answers(child, count):
    """Read so many answers of a child; every one is right."""
    found = {child.stdout.readline() for _ in range(count)}
    assert found == {"answer\n"}, found


@pytest.mark.slow
def test_actors_move_when_their_node_is_killed_and_come_back(start):
    words = [sys.executable, "-c", NODE]
    nodes, urls = [], []
    try:
        for _ in range(2):
            nodes.append(subprocess.Popen([*words, "tcp://127.0.0.1:0"], stdout=subprocess.PIPE, text=True))
            urls.append(nodes[-1].stdout.readline().strip())
        with memoire.RemotePolicy(urls, policy_child.INPUTS, policy_child.OUTPUTS, 20.0) as policy:
            obs = {"obs": np.float32([[1, 2]])}
            assert policy.act(obs)["value"][0] == 3
            own = urls.index(policy.urls[0])
            nodes[own].kill()
            nodes[own].wait(10)
            child = start(*urls)
            began = time.monotonic()
            assert policy.act(obs)["value"][0] == 3 and time.monotonic() - began < 5.0
            answers(child, 20)
            nodes[own].stdout.close()
            nodes[own] = subprocess.Popen([*words, urls[own]], stdout=subprocess.PIPE, text=True)
            assert nodes[own].stdout.readline().strip() == urls[own]
            nodes[1 - own].send_signal(signal.SIGSTOP)
            assert policy.act(obs)["value"][0] == 3
    finally:
        for node in nodes:
            node.kill()
            node.wait(10)
            node.stdout.close()


NODE = """
import sys, numpy as np, memoire
function = lambda columns: {"value": columns["obs"].sum(1)}
inputs, outputs = {"obs": (np.float32, (2,))}, {"value": np.float32}
with memoire.Inference(sys.argv[1], inputs, outputs, function) as node:
    print(node.endpoint, flush=True)
    node.wait(60)
"""
