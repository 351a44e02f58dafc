"""Tests of inference nodes and their clients on real sockets, also in separate processes."""

import contextlib
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import memoire
import observer_child
from memoire.cli import doctor, main
from memoire.errors import Closed, EntryError, MemoireTimeout, ParameterError, Refused, WrongType
from memoire.limits import Limits
from memoire.replay.columns import Column
from memoire.replay.schema import RowSchema
from netkit import until

INPUTS = {"obs": (np.float32, (2,))}
OUTPUTS = {"action": np.int64, "value": np.float32}
HERE = "tcp://127.0.0.1:0"


def double(columns, weights=1):
    return {"action": np.arange(len(columns["obs"])), "value": columns["obs"].sum(1) * np.float32(weights)}


@pytest.fixture
def open_node(keep):
    def start(function=double, endpoint=HERE, inputs=INPUTS, outputs=OUTPUTS, **options):
        return keep(memoire.Inference(endpoint, inputs, outputs, function, **options))

    return start


@pytest.fixture
def open_policy(keep):
    def start(*nodes, inputs=INPUTS, outputs=OUTPUTS, **options):
        return keep(memoire.RemotePolicy([node.endpoint for node in nodes], inputs, outputs, **options))

    return start


def after(event, seen):
    """Return a function that records the first numbers of its rows and waits for an event."""

    def function(columns):
        seen.extend(columns["obs"][:, 0].tolist())
        event.wait(20)
        return double(columns)

    return function


def obs(*rows):
    return {"obs": np.array(rows, np.float32)}


def test_rows_go_there_and_outputs_come_back(open_node, open_policy):
    node = open_node()
    policy = open_policy(node)
    outputs = policy.act(obs([1, 2], [3, 4]))
    np.testing.assert_array_equal(outputs["value"], np.float32([3, 7]))
    assert outputs["action"].dtype == np.int64 and list(outputs["action"]) == [0, 1]
    stats = node.stats()
    assert (stats.rows, stats.clients, stats.failures) == (2, 1, 0)
    assert stats.batches == {"full": 0, "everyone": 1, "wait": 0}
    assert node.readiness() == node.liveness() == []


def test_ragged_columns_are_padded_for_the_function_and_not_on_the_way(open_node, open_policy):
    graph = {"nodes": Column(np.int32, (None, 2)), "last": np.int32}

    def function(columns):
        assert columns["nodes"].shape == (3, 4, 2) and list(columns["nodes_length"]) == [1, 4, 0]
        return {"nodes": columns["nodes"] * 2, "nodes_length": columns["nodes_length"], "last": columns["last"]}

    policy = open_policy(open_node(function, inputs=graph, outputs=graph), inputs=graph, outputs=graph)
    values = [np.full((length, 2), length + 1, np.int32) for length in (1, 4, 0)]
    outputs = policy.act({"nodes": values, "last": np.int32([5, 6, 7])})
    assert list(outputs["nodes_length"]) == [1, 4, 0] and outputs["nodes"].shape == (3, 4, 2)
    assert outputs["nodes"][1, 3, 0] == 10 and outputs["nodes"][0, 1, 0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True])
def test_many_threads_share_batches_or_a_policy_and_each_gets_its_own_rows(open_node, open_policy, is_shared):
    node = open_node(max_wait=0.05)
    policies = [open_policy(node)] * 4 if is_shared else [open_policy(node) for _ in range(4)]
    wrong = []

    def act(policy, number):
        for step in range(30):
            outputs = policy.act(obs([number, step], [number, 0]))
            if list(outputs["value"]) != [number + step, number]:
                wrong.append((number, step))

    threads = [threading.Thread(target=act, args=each) for each in zip(policies, range(4), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    stats = node.stats()
    assert not wrong and stats.batched_rows == 240 and (is_shared or sum(stats.batches.values()) < 100)
    answered = {reason: timing.count for reason, timing in stats.durations.items()}
    assert sum(answered.values()) == 120 and all(stats.batches[reason] for reason, count in answered.items() if count)
    for reason, timing in stats.durations.items():  # an answer's time is its wait and the function's time
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
        (None, "expected a mapping of arrays, got NoneType"),
    ],
)
def test_outputs_that_do_not_fit_are_an_error_that_names_them(open_node, open_policy, outputs, text):
    policy = open_policy(open_node(lambda columns: outputs))
    with pytest.raises(Refused, match=text) as caught:
        policy.act(obs([1, 0]))
    assert caught.value.code == "failed"


def test_outputs_larger_than_a_reply_are_refused_and_leave_memory_without_a_collection_of_garbage(
    open_node, open_policy
):
    pictures = []

    def function(columns):
        picture = np.zeros((len(columns["obs"]), 1 << 19), np.uint8)
        pictures.append(weakref.ref(picture))
        return {"picture": picture}

    outputs = {"picture": (np.uint8, (1 << 19,))}
    node = open_node(function, outputs=outputs)
    policy = open_policy(node, outputs=outputs, timeout=10.0)
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(Refused, match=r"too_large.*outputs of 3 rows have 15\d+ bytes; 1048576 are allowed"):
                policy.act(obs(*[(1, 2)] * 3))
        until(lambda: not any(each() is not None for each in pictures))
    finally:
        gc.enable()
    assert policy.act(obs([0, 0]))["picture"].shape == (1, 1 << 19)
    until(lambda: node.stats().refused == {"too_large": 2})


def test_a_batch_that_fails_outside_of_the_function_is_answered_and_the_node_lives_on(open_node, open_policy):
    node = open_node(sizes=[1 << 44])  # no machine has memory for so many rows
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
    with pytest.raises(MemoireTimeout, match=r"version 6 .*The node has version 5\. Call update"):
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
    node = open_node(after(go, []), max_batch=2, queue_rows=2, max_wait=0.0)
    policy = open_policy(node, timeout=20.0)
    pending = [policy.ask(obs([number, 0])) for number in range(8)]
    until(lambda: node.stats().refused.get("busy", 0) > 3)
    go.set()
    assert [each.result()["value"][0] for each in pending] == list(range(8))


def test_an_overdue_request_never_reaches_the_function(open_node, open_policy):
    seen, go = [], threading.Event()
    node = open_node(after(go, seen), max_wait=0.0)
    first = open_policy(node, timeout=20.0).ask(obs([1, 0]))
    until(lambda: seen == [1])
    late, tries = open_policy(node, timeout=0.1), []

    def has_come():  # a client may give up early on a busy machine
        with pytest.raises(MemoireTimeout):
            late.act(obs([2, 0]))
        tries.append(True)
        return node.stats().queue_rows or node.stats().expired

    until(has_come)
    due = time.monotonic() + 0.1  # the node measures patience from a request's arrival
    until(lambda: time.monotonic() > due)
    go.set()
    assert first.result()["value"][0] == 1
    until(lambda: 1 <= node.stats().expired <= len(tries))
    assert seen == [1] and node.stats().queue_rows == 0


def test_clients_move_when_a_node_closes_and_come_back_when_it_returns(open_node, open_policy):
    nodes = {}
    for name in "ab":
        node = open_node(lambda columns, name=name: double(columns, ord(name)), name=name)
        nodes[node.endpoint] = name, node
    policy = open_policy(*(node for _, node in nodes.values()), timeout=10.0)

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
    nodes = [open_node(after(stuck, [])) for _ in range(2)]
    policy = open_policy(*nodes, timeout=4.0)
    own = next(node for node in nodes if node.endpoint == policy.urls[0])
    until(lambda: own.stats().requests or not policy.ask(obs([0, 0])).cancel())
    pending = policy.ask(obs([1, 0]))
    until(lambda: policy.moved_requests)
    stuck.set()
    assert pending.result()["value"][0] == 1


@contextlib.contextmanager
def process_of_node(endpoint):
    """Run an agent, which answers rows as any node does, in its own process; yield the process."""
    command = [sys.executable, observer_child.__file__, "agent", endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        process.endpoint = process.stdout.readline().strip()
        yield process
        process.kill()


def stop(process):
    """Send SIGSTOP and wait until no thread of the child runs any more."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


@pytest.mark.slow
def test_clients_move_when_a_node_is_killed_or_stopped_and_come_back(keep, open_policy):
    nodes = [keep(process_of_node(HERE)) for _ in range(2)]
    policy = open_policy(*nodes, timeout=5.0)  # a link alone takes six seconds to give a stopped node up
    own, other = sorted(nodes, key=lambda node: policy.urls.index(node.endpoint))

    def answers():
        return policy.act(obs([1, 2]))["value"][0] == 3

    stop(other)
    assert answers(), "by its own node"
    other.send_signal(signal.SIGCONT)
    own.kill()
    own.wait(10)
    assert answers(), "by the other one"
    own = keep(process_of_node(own.endpoint))
    stop(other)
    assert own.endpoint == policy.urls[0] and answers(), "by its own node, which is another process"
    other.send_signal(signal.SIGCONT)
    stop(own)
    moves = policy.moved_requests
    assert answers() and policy.moved_requests > moves, "by the other one"
    own.send_signal(signal.SIGCONT)
    other.kill()
    assert answers(), "by its own node again"


def test_without_a_node_the_fallback_acts_or_the_error_says_who_was_tried(open_policy, open_node):
    node = open_node()
    endpoint = node.endpoint
    node.close()

    still = SimpleNamespace(act=lambda columns: {"action": np.zeros(len(columns["obs"]), np.int64)})
    with memoire.RemotePolicy(endpoint, INPUTS, OUTPUTS, 0.2, fallback=still) as policy:
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
        says = f"^request_bytes must be at least 2000\\d+, the bytes of one row of {name}"
        with pytest.raises(ParameterError, match=says):
            open_node(**sides)


NODE_AND_POLICY = {"inputs": "inputs", "outputs": "outputs", "timeout": "patience of limits"}
"""Setting of a node by the policy's name for the setting: equal, or refused. Keys, limits and context are separate."""
NODE_ALONE = {
    "endpoint", "function", "weights", "topic", "connect", "max_batch", "max_wait", "alive", "queue_rows", "sizes",
    "name", "service",
}  # fmt: skip


def test_every_setting_of_node_and_policy_is_listed():
    node, policy = (inspect.signature(side).parameters.keys() for side in (memoire.Inference, memoire.RemotePolicy))
    own = {"keys", "limits", "context"}
    assert policy == NODE_AND_POLICY.keys() | own | {"urls", "fallback"}, "list what both have"
    assert node == {"inputs", "outputs"} | own | NODE_ALONE, "list what both have"


@pytest.mark.parametrize(
    ("settings", "rows", "says"),
    [
        ({"inputs": {"obs": np.float32}}, 1, r"inputs of the node are .*float32\[2\].* this policy .*\(obs: float32"),
        ({"inputs": {"obs": (np.float64, (2,))}}, 1, r"inputs of the node are .*float32\[2\].*float64\[2\]"),
        ({"outputs": {"action": np.int32}}, 1, r"outputs of the node are .*action.* this policy .*\(action: int32\)"),
        ({"timeout": 9.0}, 1, r"a wait of [89].* s is too long; 5 s are allowed \(patience\)"),
        ({}, 257, r"the request has 257 rows; at most 256 \(max_batch\)"),
    ],
)
def test_a_policy_that_was_told_otherwise_than_its_node_is_refused_by_both_values(
    open_node, open_policy, settings, rows, says
):
    node = open_node(limits=Limits.of(patience=5.0))
    policy = open_policy(node, **{"timeout": 2.0} | settings)
    column = RowSchema(settings.get("inputs", INPUTS))["obs"]
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
WELL = ["ok   inputs: obs.speed float32[2], nodes int32[any, 3]", "ok   outputs: value float32", "a row was answered",
        "\nall is well\n"]  # fmt: skip


def count(columns):
    return {"value": columns["nodes_length"].astype(np.float32)}


def fail(columns):
    raise RuntimeError("no GPU")


@pytest.mark.parametrize(
    ("function", "status", "says"),
    [
        (count, doctor.WELL, WELL),
        (fail, doctor.REFUSED, ["failed: RuntimeError: no GPU"]),
        (None, doctor.NOT_MEMOIRE, ["is not an inference node"]),
    ],
)
def test_the_doctor_asks_a_row_and_says_what_came_of_it(capsys, keep, open_node, function, status, says):
    if function is None:
        node = keep(memoire.Server(HERE, {"obs": np.float32, "reward": np.float32}))
    else:
        node = open_node(function, inputs=ROWS, outputs={"value": np.float32})
    assert main.main(["doctor", "--inference", node.endpoint]) == status
    output = capsys.readouterr().out
    assert all(each in output for each in says)
    node.close()
    assert main.main(["doctor", "--inference", node.endpoint, "--timeout", "1"]) == doctor.NOTHING_LISTENS
