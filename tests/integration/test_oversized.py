"""What is too long for the other side is refused where it is made: sent, it would cut the connection, and what is behind it is lost.

Replies, too: their receiver would throw them away, and hear that the other side hangs.
"""

import random
import re
import time

import msgspec
import numpy as np
import pytest

from memoire.errors import ParameterError, Refused
from memoire.limits import Limits
from memoire.net.channel import Channel
from memoire.net.poller import Poller
from memoire.replay.parameters import Parameters
from memoire.wire import messages
from memoire.wire.frames import name_hash
from netkit import WIDE, record, until


def test_a_cache_that_is_too_large_for_a_proxy_is_not_sent_and_its_neighbours_arrive(cluster):
    server = cluster.server(schema=WIDE, parameters=Parameters(cache_size=64))
    proxy = cluster.proxy([server], limits=Limits(message_bytes=200_000))
    client = cluster.client(proxy)
    record(client, length=4)
    assert client.push_cache()
    client.sync()
    record(client, length=64)
    with pytest.raises(ParameterError, match=r"cache_size must be .* into 200000 \(limits.message_bytes\)"):
        client.push_cache()
    client.sync()
    record(client, length=4)
    assert client.push_cache()
    until(lambda: server.total_caches == 2)
    client.update()
    stats = client.stats()
    assert stats.pushed_caches == stats.accepted_caches == 2 and stats.lost_bytes == 0


def test_feedback_of_a_batch_of_any_size_arrives(cluster):
    server = cluster.server(parameters=Parameters(reuse_cache=True))
    client = cluster.client(server)
    record(client, episodes=3)
    assert client.push_cache()
    reader = cluster.reader([server], limits=Limits(resend_after=300.0, resend_most=300.0))  # nothing was cut off
    batch = reader.get_batch(128)
    ids = np.tile(batch.ids, 1000)  # 2 MB of them: more than the longest request
    assert reader.update_priorities(ids, np.ones(len(ids))).sent == 128_000
    until(lambda: server.stats().feedback_given == 128_000)
    assert reader.stats().resends == 0
    assert [channel.connections for channel in reader._thread.channels.of.values()] == [1]


def test_a_request_that_is_too_long_ends_in_an_error_and_the_next_is_answered(cluster):
    server, doors, answers = cluster.server(), Poller(), []
    channel = Channel(
        doors, cluster.context, server.endpoint, client=bytes(range(16)), limits=Limits(), rng=random.Random(1)
    )
    channel.ask(messages.Feedback(), answers.append, payload=bytes((1 << 20) + 1))
    channel.ask(messages.Hello(role="actor"), answers.append)

    def answered():
        channel.turn(doors.wait(time.monotonic() + 0.01))
        return len(answers) == 2

    until(answered)
    assert isinstance(answers[0], Refused) and answers[0].code == "too_large"
    assert "FEEDBACK of 1048577 bytes was not sent; 1048576 are taken (request_bytes)" in str(answers[0])
    welcome = answers[1].body
    assert isinstance(welcome, messages.Welcome) and channel.connections == 1
    channel.learned(answers[1].header, msgspec.structs.replace(welcome, limits={"request_bytes": 1000}))
    assert channel.longest == 1000
    doors.close()


def test_a_reply_that_is_too_large_ends_its_request_by_name_at_the_server_and_where_it_comes(cluster):
    server, small = cluster.server(), Limits(tail_bytes=4096)
    for number in range(60):
        server.publish(f"{number} {'t' * 100}", b"weights")
    hello, update = messages.Hello(role="actor"), messages.Update(steps=1)
    cases = [
        (server, small, hello, r"WELCOME, whose tail takes \d{4} bytes; client .* has room for 4096 \(tail_bytes\)"),
        (server, small, update, r"UPDATED, whose tail takes \d{4} bytes; client .* has room for 4096 \(tail_bytes\)"),
    ]
    for place, (node, limits, body, text) in enumerate(cases):
        doors, answers, rng = Poller(), [], random.Random(1)
        channel = Channel(doors, cluster.context, node.endpoint, client=bytes([place + 1] * 16), limits=limits, rng=rng)
        channel.ask(body, answers.append, run=name_hash(server.run))

        def answered(channel=channel, doors=doors, answers=answers):
            channel.turn(doors.wait(time.monotonic() + 0.01))
            return len(answers) == 1

        until(answered)
        assert isinstance(answers[0], Refused) and answers[0].code == "too_large" and channel.resends == 0
        assert re.search(text, str(answers[0])), answers[0]
        doors.close()
