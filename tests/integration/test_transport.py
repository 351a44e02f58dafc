"""What bytes cost on their way: large frames are not copied, and connections are kept."""

from pathlib import Path

import numpy as np
import pytest
import zmq

import memoire
from memoire.net import sockets
from netkit import QUICK, SCHEMA, record, until

CONNECTIONS = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
ESTABLISHED = "01"


@pytest.fixture
def pair():
    """(sender, receiver), connected inside of this process, without other threads of ZeroMQ between them."""
    context = zmq.Context()
    receiver = sockets.data_receiver(context, 1 << 24)
    sockets.bind(receiver, "inproc://pair")
    sender = sockets.data_sender(context)
    sockets.connect(sender, "inproc://pair")
    yield sender, receiver
    context.destroy(0)


def test_large_frames_are_sent_as_they_lie_and_small_ones_are_copied(pair):
    sender, receiver = pair
    for size, is_large in ((sockets.COPY_BELOW - 1, False), (sockets.COPY_BELOW + 1, True)):
        sent = np.zeros(size, np.uint8)
        assert sockets.send(sender, [sent])
        (frame,) = sockets.receive(receiver)
        assert len(frame) == size
        assert np.shares_memory(np.frombuffer(frame.buffer, np.uint8), sent) is is_large


def test_a_client_keeps_its_connections():
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA, limits=QUICK) as server:
        ports = {
            int(address.rpartition(":")[2]) for address in (server.endpoint, server.push_endpoint, server.pub_endpoint)
        }
        with memoire.connect(server.endpoint, seed=0, limits=QUICK) as client:
            record(client)
            client.model("policy")
            assert client.push_cache(100.0)
            until(lambda: server.total_caches == 1)
            until(lambda: {port for _, port in connections_to(ports)} == ports)
            before = connections_to(ports)
            for number in range(20):
                record(client)
                client.log(str(number))
                client.update(100.0)
                assert client.push_cache(100.0)
                server.publish("policy", str(number))
            until(lambda: server.total_caches == 21)
            assert connections_to(ports) == before


def connections_to(ports):
    """(own port, port at the other end) of each open connection of this machine to one of these ports."""
    found = set()
    for table in CONNECTIONS:
        for line in table.read_text().splitlines()[1:]:
            _, own, other, state = line.split()[:4]
            here, there = (int(address.rpartition(":")[2], 16) for address in (own, other))
            if state == ESTABLISHED and there in ports:
                found.add((here, there))
    return found
