"""Arrays that a caller overwrites at once: each call that hands arrays to a thread takes a copy."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest

from memoire.client.client import Client
from memoire.reader.reader import Reader
from memoire.replay.parameters import Parameters
from netkit import DEADLINE, QUICK, SCHEMA, in_thread, record, until

OTHER = 777


def worker_of(node):
    """Return the worker thread of a client, a reader or a server."""
    if isinstance(node, Client):
        return node._io.worker
    return node._thread.worker if isinstance(node, Reader) else node._worker


class Nodes:
    """Servers, clients and a reader, whose threads a test can hold."""

    def __init__(self, cluster):
        parameters = Parameters(priority_exponent=1.0, cache_size=64)
        self.server = cluster.server(limits=QUICK, parameters=parameters)
        self.episodes = cluster.server(limits=QUICK, storage="episodes")
        self.client = cluster.client(self.server, limits=QUICK)
        self.shipper = cluster.client(self.episodes, limits=QUICK)
        self.reader = cluster.reader([self.server], ahead=1, limits=QUICK)
        self.handed = 0
        for _ in range(8):
            record(self.client)
            assert self.client.push_cache(DEADLINE)

    @contextmanager
    def held(self, node):
        """Hold the thread of this node until the end of the block."""
        inside, leave = threading.Event(), threading.Event()
        worker_of(node).post(lambda: (inside.set(), leave.wait(DEADLINE)))
        assert inside.wait(DEADLINE)
        try:
            yield
        finally:
            leave.set()

    def handed_over(self, node, call, overwrite):
        """Call while the node's thread is held, overwrite the arguments, and return the result of the call."""
        with self.held(node):
            thread, box = in_thread(call)
            until(lambda: worker_of(node).poller.posted or not thread.is_alive())
            overwrite()
        thread.join(DEADLINE)
        assert "error" not in box, box
        return box["value"]


@pytest.fixture(scope="module")
def nodes(shared_cluster):
    return Nodes(shared_cluster)


def made_errors(kind, size):
    if kind == "tensor":
        import torch

        return torch.full((size,), 3.0)
    return np.full(size, 3.0, kind)


@pytest.mark.parametrize("learner", ["reader", "server"])
@pytest.mark.parametrize("kind", ["float32", "float64", pytest.param("tensor", marks=pytest.mark.torch)])
def test_td_errors_and_ids_are_those_that_were_given(nodes, learner, kind):
    source = getattr(nodes, learner)
    batch = source.get_batch(32, DEADLINE)
    errors, numbers = made_errors(kind, 32), batch.ids["number"].copy()
    if kind == "tensor":
        from memoire.torch import TorchBatch

        batch = TorchBatch(batch)

    def overwrite():
        errors[:] = OTHER
        batch.ids[:] = np.zeros(1, batch.ids.dtype)

    nodes.handed_over(nodes.reader, lambda: batch.update_priorities(errors), overwrite)
    nodes.handed += 32
    until(lambda: nodes.client.update(DEADLINE) or nodes.client.stats().applied == nodes.handed)
    np.testing.assert_allclose(nodes.client.memory.weights(numbers), 3.0, rtol=1e-5)


@pytest.mark.parametrize("learner", ["reader", "server"])
@pytest.mark.parametrize("view", [bytearray, memoryview], ids=["bytearray", "memoryview"])
def test_a_model_is_the_bytes_that_were_given(nodes, learner, view):
    content, topic = bytearray(b"weights" * 1000), f"{learner} {view.__name__}"
    body = content if view is bytearray else memoryview(content)

    def overwrite():
        content[:] = bytes(len(content))

    nodes.handed_over(nodes.reader, lambda: getattr(nodes, learner).publish(topic, body), overwrite)
    assert nodes.client.model(topic).wait(DEADLINE).body == b"weights" * 1000


def test_figures_are_those_that_were_given(nodes):
    figures = {name: {"loss": np.ones(1, np.float32)[0], name: 1.0} for name in ("reader", "server", "client")}
    for name, values in figures.items():
        node = getattr(nodes, name)
        held = nodes.client if name == "client" else nodes.reader
        nodes.handed_over(held, lambda node=node, values=values: node.scalars(values), values.clear)
        kept = node._session.scalars if node is nodes.client else node._scalars
        assert kept == {"loss": 1.0, name: 1.0}


def test_parameters_are_those_that_were_given(nodes):
    for coefficient in ([0.5], np.array([0.25])):
        expected = float(coefficient[0])

        def overwrite(coefficient=coefficient):
            coefficient[0] = OTHER

        nodes.handed_over(
            nodes.reader, lambda coefficient=coefficient: nodes.reader.configure(reward_coeff=coefficient), overwrite
        )
        assert nodes.server.parameters.reward_coeff == (expected,)


def test_entries_are_those_that_were_given(nodes):
    columns = {name: np.ones((5, *SCHEMA[name].shape), SCHEMA[name].dtype) for name in SCHEMA.entry_names}
    final = np.ones(4, np.float32)
    writer = nodes.shipper.writer()
    obs, after, action, reward = np.ones(4, np.float32), np.ones(4, np.float32), np.ones((), np.int32), np.ones(())

    def hand_over():
        nodes.shipper.push_episode(columns, final_state=final)
        writer.step(obs, action, reward, np.True_, np.False_, after)

    def overwrite():
        for array in (*columns.values(), final, obs, after, action, reward):
            array[...] = OTHER

    nodes.handed_over(nodes.shipper, hand_over, overwrite)
    until(lambda: nodes.episodes.stats().tables["default"].held_samples == 6)
    batch = nodes.episodes.get_batch(50)
    assert {float(number) for name in ("obs", "action", "reward") for number in batch[name].ravel()} == {1.0}
