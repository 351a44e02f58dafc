"""Nodes and clients of two versions of the protocol: each side is told at once that the other has to be upgraded."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from memoire.client.client import connect
from memoire.errors import Refused
from memoire.net import sockets
from memoire.wire.frames import parse
from memoire.wire.messages import VERSION
from wirekit import golden


def in_version(frame: bytes, version: int) -> bytes:
    """Frame 0 of another version, whose checksum nobody has to know here."""
    return frame[:4] + version.to_bytes(2, "little") + frame[6:]


@pytest.mark.parametrize("where", ["server", "proxy"])
def test_a_client_of_another_version_is_told_why_it_is_refused(cluster, where):
    node = cluster.server()
    if where == "proxy":
        node = cluster.proxy([node])
    (hello,) = golden("hello")
    asked = in_version(hello, VERSION + 1)
    with cluster.context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 60_000
        sockets.connect(dealer, node.endpoint)
        dealer.send_multipart([b"", asked])
        _, answer = dealer.recv_multipart()
    assert answer[16:56] == asked[16:56], "for the same client, run, home and number"
    refused = parse([answer]).body
    text = f"version {VERSION + 1} of the protocol; this node speaks {VERSION}. Upgrade the older of the two"
    assert refused.code == "version" and text in refused.text
    assert node.stats().refused["version"] == 1


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_client_is_told_that_the_other_side_speaks_another_version(cluster, version):
    """The other side answers by a REFUSED of its own version."""
    with cluster.context.socket(zmq.ROUTER) as router, ThreadPoolExecutor(1) as threads:
        router.linger, router.rcvtimeo = 0, 60_000
        endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        connecting = threads.submit(connect, endpoint, timeout=60.0, context=cluster.context)
        way, empty, asked = router.recv_multipart()
        (refused,) = golden("refused")
        said = in_version(refused, version)
        router.send_multipart([way, empty, said[:16] + asked[16:56] + said[56:]])
        with pytest.raises(Refused, match=f"version {version} of the protocol; this node speaks 2") as raised:
            connecting.result(60.0)
    assert (raised.value.code, raised.value.endpoint) == ("version", endpoint)
