"""Nodes and clients of two versions of the protocol: each side is told at once that the other has to be upgraded."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from memoire.client.client import connect
from memoire.errors import Refused
from memoire.net import sockets
from memoire.wire import former
from memoire.wire.messages import VERSION

FORMER = Path(__file__).parents[1] / "vectors" / "former"


@pytest.mark.parametrize("where", ["server", "proxy"])
def test_a_client_of_the_former_version_reads_why_it_is_refused(cluster, where):
    node = cluster.server()
    if where == "proxy":
        node = cluster.proxy([node])
    asked = (FORMER / "hello.0").read_bytes()
    with cluster.context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 60_000
        sockets.connect(dealer, node.endpoint)
        dealer.send_multipart([b"", asked])
        _, answer = dealer.recv_multipart()
    assert answer[:6] == b"MEMR\x01\x00" and answer[16:56] == asked[16:56]
    assert former.xxh64(answer[96:], former.xxh64(answer[:88])).to_bytes(8, "little") == answer[88:96]
    assert b"version 1 of the protocol; this node speaks 2. Upgrade the older of the two" in answer[96:]
    assert node.stats().refused["version"] == 1


@pytest.mark.parametrize("version", [1, VERSION + 1])
def test_a_client_is_told_that_the_other_side_speaks_another_version(cluster, version):
    """The other side answers by a REFUSED of its own version, whose checksum nobody has to know here."""
    with cluster.context.socket(zmq.ROUTER) as router, ThreadPoolExecutor(1) as threads:
        router.linger, router.rcvtimeo = 0, 60_000
        endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        connecting = threads.submit(connect, endpoint, timeout=60.0, context=cluster.context)
        way, empty, asked = router.recv_multipart()
        said = (FORMER / "refused.0").read_bytes()
        router.send_multipart(
            [way, empty, said[:4] + version.to_bytes(2, "little") + said[6:16] + asked[16:56] + said[56:]]
        )
        with pytest.raises(Refused, match=f"version {version} of the protocol; this node speaks 2") as raised:
            connecting.result(60.0)
    assert (raised.value.code, raised.value.endpoint) == ("version", endpoint)
