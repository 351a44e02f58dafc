"""Tests of trouble around a client: forks, two threads in one writer, a full log, and the end of a program."""

import contextlib
import inspect
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from types import SimpleNamespace

import numpy as np
import pytest

from classic_help import templates
from memoire.classic.client import ReplayMemoryClient
from memoire.classic.server import ReplayMemoryServer
from memoire.client.waiting import ModelHandle, Receiver
from memoire.errors import ForkedError, TwoThreads
from memoire.limits import Limits
from memoire.net.sockets import _context_lock
from memoire.replay.buffer import Buffer
from memoire.server.server import Server
from netkit import DEADLINE, QUICK, SCHEMA, in_thread, pool_in, until

# Forks


def in_child(check):
    """Return the result of a check in a forked process, or its traceback; a child that hangs is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(int(DEADLINE))
            try:
                text = str(check())
            except BaseException:
                text = traceback.format_exc()
            os.write(writer, text.encode()[:60_000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child was ended by {status}: it hung"
    return text


HARMLESS = {"close", "closed", "CALLED", "CLOSED_AT_EXIT"}
HARMLESS_OF = {ModelHandle: {"topic"}, Receiver: {"topic", "skipped"}, ReplayMemoryClient: {"client", "rem"}, ReplayMemoryServer: {"server", "rem"}}  # fmt: skip
ANY = {
    "batch_size": 8, "count": 1, "lane": 0, "length": 1, "returned": 0.0, "text": "x", "topic": "x", "values": {}, "name": "x",
    "ids": np.empty(0, np.int64), "td_errors": np.empty(0), "content": b"x", "endpoint": "inproc://x", "front": "inproc://x",
    "back": "inproc://y", "logfile_path": "x", "servers": ["inproc://x"], "bodies": {}, "body": None, "url": "inproc://x", "max_step": 9,
    "address": "x", "client": b"x", "log_message": "x", "front_ep": "inproc://x", "back_ep": "inproc://y", "mode": "Bind", "message": b"x",
}  # fmt: skip
"""Value for each parameter without a default, which no call reads."""


def used(node):
    """Return the names of members that did not raise ForkedError, each with its outcome."""
    kind = type(node)
    wrong = []
    for name in dir(kind):
        if name.startswith("_") or name in HARMLESS | HARMLESS_OF.get(kind, set()):
            continue
        try:
            member = getattr(node, name)
            if callable(member):
                asked = inspect.signature(getattr(kind, name)).parameters.values()
                args = {
                    each.name: ANY[each.name]
                    for each in asked
                    if each.default is each.empty and each.kind is not each.VAR_KEYWORD and each.name != "self"
                }
                result = member(**args)
                if inspect.isgenerator(result):
                    next(result)
            wrong.append((name, "nothing"))
        except ForkedError as error:
            if "spawn" not in str(error):
                wrong.append((name, str(error)))
        except Exception as error:
            wrong.append((name, repr(error)))
    return wrong


def test_everything_used_in_a_forked_process_says_so_and_the_parent_goes_on(cluster):
    server = cluster.server()
    proxy = cluster.proxy([server])
    client = cluster.client(proxy, limits=QUICK)
    reader = cluster.reader([proxy])
    classic_server = ReplayMemoryServer(*templates(), 100, "inproc://pub", 4, context=cluster.context)
    worker, _ = in_thread(classic_server.rep_worker_main, "inproc://req", "Bind")
    classic = ReplayMemoryClient("inproc://pub", "inproc://req", "inproc://push", context=cluster.context)
    handle, receiver = client.model("m"), client.subscribe("m")
    nodes = [server, proxy, client, reader, handle, receiver, classic, classic_server]
    writer = client.writer()
    bound = client.update  # a method bound before the fork

    def child():
        wrong = {str(node): members for node in nodes if (members := used(node))}
        for call in (bound, lambda: next(client.batches(8, 1.0)), lambda: classic.rem.get_batch(1)):
            with pytest.raises(ForkedError, match="forked from it"):
                call()
        with pytest.raises(ForkedError):
            writer.step(np.zeros(4, np.float32), 0, 0.0, True, False, np.ones(4, np.float32), {})
        for node in nodes:
            if hasattr(node, "close"):
                assert not node.close()
        with client as entered, server:
            assert entered is client and isinstance(client, type(client)) and "forked" in repr(client)
        fresh = Server("tcp://127.0.0.1:0", SCHEMA)  # a child can create new nodes
        fresh.close()
        return wrong

    try:
        assert in_child(child) == "{}"
        client.update(100.0)
        assert reader.totals(timeout=100.0).totals.episodes == 0 and not client.closed
    finally:
        for node in (classic, classic_server):
            node.close(0.2)
        worker.join(DEADLINE)


def test_a_lock_that_a_thread_holds_at_the_fork_stops_nobody_in_the_child(cluster):
    server = cluster.server()
    client = cluster.client(server)
    reader = cluster.reader([server])
    locks = [
        client._waiting._changed, client._io.topics._changed, client._local.lock, client._close_lock, server._dispatcher.lock, pool_in(server)._waiter.lock,
        server._close_lock, reader._monitor._changed, _context_lock,
    ]  # fmt: skip
    held, release = threading.Event(), threading.Event()

    def hold():
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock.held() if hasattr(lock, "held") else lock)
            held.set()
            release.wait(DEADLINE)

    thread, _ = in_thread(hold)
    assert held.wait(DEADLINE)

    def child():
        wrong = [used(node) for node in (client, server, reader)]
        for node in (client, server, reader):
            node.close()
        Server("tcp://127.0.0.1:0", SCHEMA).close()
        return wrong

    try:
        assert in_child(child) == "[[], [], []]"
    finally:
        release.set()
        thread.join(DEADLINE)
    client.update(100.0)


# Threads


def test_two_threads_in_one_writer_are_told_apart_from_two_writers(cluster):
    client = cluster.client(cluster.server())
    obs, none = np.zeros((1, 4), np.float32), np.zeros(1, bool)

    def step(writer):
        writer.step(obs, np.zeros(1, np.int32), np.ones(1, np.float32), none, none, obs.copy(), {})

    inside, leave = threading.Event(), threading.Event()

    def on_entries(count):
        inside.set()
        leave.wait(DEADLINE)

    buffer, slow = Buffer(SCHEMA, 100), SimpleNamespace(on_entries=on_entries, on_episode=lambda *_: None)
    writer = buffer.writer(num_envs=1, autoreset="disabled", observer=slow)
    thread, box = in_thread(step, writer)
    assert inside.wait(DEADLINE)
    for call, name in ((lambda: step(writer), "step"), (writer.reset, "reset"), (writer.close, "close")):
        with pytest.raises(
            TwoThreads, match=rf"{name}\(\) was called while another thread.*Create one for each thread"
        ):
            call()
    assert len(buffer) == 1  # the refused step left no entry
    leave.set()
    thread.join(DEADLINE)
    assert box == {"value": None}
    step(writer)
    assert len(buffer) == 2

    writers = [client.writer(num_envs=1, autoreset="disabled") for _ in range(4)]
    assert [writer.lanes.tolist() for writer in writers] == [[0], [1], [2], [3]]
    threads = [in_thread(lambda each: [step(each) for _ in range(25)], each) for each in writers]
    for each, box in threads:
        each.join(DEADLINE)
        assert "error" not in box, box
    assert client.stats().steps == client.memory.num_entries == 100


# The log


def test_a_line_that_was_taken_arrives_and_one_that_was_not_is_said(cluster, caplog):
    server = cluster.server()
    way = cluster.way(server, drop=0.0, double=0.0)
    limits = Limits.of(log_lines=5, log_timeout=1.0, update_every=0.02, resend_after=0.05, resend_most=0.2)
    client = cluster.client(way.endpoint, limits=limits)
    client.update(100.0)
    way.drop = 1.0
    taken = [f"line {k}" for k in range(100) if client.log(f"line {k}", 0.0)]
    assert 5 <= len(taken) < 100
    before = client.stats()
    assert before.dropped_lines == 100 - len(taken) and before.waiting_lines == 5
    began = time.monotonic()
    assert not client.log("waits")
    assert 1.0 <= time.monotonic() - began < DEADLINE
    began = time.monotonic()
    assert not any(client.log("does not wait again") for _ in range(int(DEADLINE)))
    assert time.monotonic() - began < DEADLINE
    with caplog.at_level(logging.WARNING, "memoire.client.client"):
        assert not client.log("one more", 0.0)
    assert len([each for each in caplog.records if "log()" in each.getMessage()]) == 1  # one warning a minute
    waiting, box = in_thread(client.log, "waited for", 20.0)
    waiting.join(0.1)
    assert waiting.is_alive()
    way.drop = 0.0
    waiting.join(DEADLINE)
    assert box == {"value": True}
    client.update(DEADLINE)
    assert client.log("afterwards") and client.log("also")
    client.update(DEADLINE)
    lines = [line.line.text for line in server.lines()]
    assert lines == [*taken, "waited for", "afterwards", "also"]
    until(lambda: server.stats().totals.dropped_lines == client.stats().dropped_lines)


def test_stats_say_why_nothing_was_pushed(cluster):
    client = cluster.client(cluster.server())
    assert not client.push_cache(0.0)
    assert client.stats().not_pushed == {"nothing to draw": 1} and client.stats().skipped_caches == 0


# The end of a program

HEAD = """
    import os, sys, threading, time
    import numpy as np
    import memoire
    from memoire import Server, Reader, Proxy, connect
    from memoire.replay.columns import Column
    from memoire.replay.schema import Schema
    schema = Schema({"obs": Column(np.float32, (4,), "state")})

    def thread(function, *arguments, **options):
        started = threading.Event()
        def run():
            started.set()
            function(*arguments, **options)
        threading.Thread(target=run, daemon=True).start()
        started.wait(100.0)

    def gone():
        server = Server("tcp://127.0.0.1:0", schema)
        return server, server.endpoint
"""
ENDS = {
    "a client whose server is gone": """
        server, at = gone()
        client = connect(at); client.log("x"); client.model("policy"); client.writer()
        server.close()
    """,
    "a client that was never answered": """
        thread(connect, "tcp://127.0.0.1:9", timeout=100.0)
    """,
    "threads that wait for an update and a message": """
        server, at = gone(); client = connect(at); server.close()
        thread(client.update, 60.0); thread(client.subscribe("x").receive)
    """,
    "a learner's thread that waits for a batch": """
        server, at = gone()
        thread(server.get_batch, 8, 60.0)
    """,
    "a reader whose servers are gone": """
        server, at = gone(); reader = Reader([at]); server.close()
        thread(reader.get_batch, 8, 60.0)
    """,
    "a proxy without servers": """
        proxy = Proxy("tcp://127.0.0.1:0", ["tcp://127.0.0.1:9"])
    """,
    "everything at once and a sys.exit in between": """
        server, at = gone(); proxy = Proxy("tcp://127.0.0.1:0", [at]); client = connect(proxy.endpoint); reader = Reader([proxy.endpoint])
        client.log("x")
        print("made", flush=True)
        sys.exit(0)
    """,
    "a forked child that ends as programs do": """
        server, at = gone(); client = connect(at); reader = Reader([at]); handle = client.model("x"); memory = client.memory
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        client.update(100.0)
    """,
}  # fmt: skip


LOSS = re.compile(r"client \w+ ends before .* were acknowledged: they are not counted\. .*\n")


@pytest.mark.parametrize("body", ENDS.values(), ids=[name.replace(" ", "-") for name in ENDS])
def test_a_program_ends_soon_and_with_no_word_but_of_what_is_lost_with(body):
    script = textwrap.dedent(HEAD) + textwrap.dedent(body)
    if "made" not in body:
        script += '\nprint("made", flush=True)\n'
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)  # threads would wait longer
    assert (done.returncode, done.stdout, LOSS.sub("", done.stderr)) == (0, "made\n", "")
