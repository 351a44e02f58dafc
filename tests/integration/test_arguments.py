"""Wrong arguments of every public call: an error that says which, and nothing else is disturbed."""

import gc
import inspect
import math
import random
import threading
import time

import numpy as np
import pytest

from classic_help import templates
from memoire.arguments import FOR_EVER, seconds
from memoire.classic.client import ReplayMemoryClient
from memoire.classic.server import ReplayMemoryServer
from memoire.client.client import Client
from memoire.errors import Closed, MemoireError, ParameterError, WrongType
from memoire.limits import Limits
from memoire.proxy.proxy import Proxy
from memoire.reader.reader import Reader
from memoire.replay.buffer import Buffer
from memoire.server.server import Server
from memoire.server.table_handle import TableHandle
from netkit import SCHEMA, Cluster, in_thread, record, until

ODD = [
    None, True, -1, 0, 1, 7, 2**31, 2**64, -(2**63), 0.5, -0.0, math.nan, math.inf, -math.inf, 1e300, 1j, "", "x", "\n", "é" * 300,
    "\ud800", b"", b"\xff" * 9, [], [None], [1, 2], {}, {"a": 1}, {1: math.nan}, set(), object(), object, len, np.array(3), np.zeros(1),
    np.zeros((1, 1)), np.array(["x"]), np.array([math.nan]), np.datetime64("now"), range(3), Ellipsis,
]  # fmt: skip
SKIPPED = {"close", "__init__", "wait_closed"}
LOOPS = {"run_request_proxy", "run_pull_proxy", "rep_worker_main", "pull_worker_main", "rep_proxy_main", "pull_proxy_main"}  # fmt: skip
PATHS = {"set_logfile", "save", "snapshot"}  # anything is a path
TOLD = {"on_entries", "on_episode"}  # called by a writer, with what it counted itself
CALLS_EACH = 40


@pytest.fixture(scope="module")
def nodes():
    cluster = Cluster()
    quick = Limits(request_timeout=0.05, log_timeout=0.0, resend_after=0.02, resend_most=0.05)
    server = cluster.server(limits=quick)
    proxy = cluster.proxy([server])
    client = cluster.client(proxy, limits=quick)
    reader = cluster.reader([proxy], limits=quick)
    classic_server = ReplayMemoryServer(*templates(), 100, "inproc://pub", 4, context=cluster.context)
    worker, _ = in_thread(classic_server.rep_worker_main, "inproc://req", "Bind")
    classic = ReplayMemoryClient("inproc://pub", "inproc://req", "inproc://push", context=cluster.context, limits=quick)
    record(client)
    yield {
        Cluster: cluster, Client: client, Server: server, Proxy: proxy, Reader: reader, ReplayMemoryServer: classic_server, ReplayMemoryClient: classic,
        Buffer: Buffer(SCHEMA, 100), TableHandle: cluster.server().table("default"),
    }  # fmt: skip
    for node in (classic, classic_server):
        node.close(0.2)
    worker.join(100.0)
    cluster.close()


def methods(kind):
    left_out = SKIPPED | LOOPS | PATHS | TOLD
    for name in dir(kind):
        found = inspect.getattr_static(kind, name)
        if not name.startswith("_") and inspect.isfunction(found) and name not in left_out:
            yield name


KINDS = [Client, Server, TableHandle, Proxy, Reader, ReplayMemoryServer, ReplayMemoryClient, Buffer]
CASES = [(kind, name) for kind in KINDS for name in methods(kind)]


@pytest.mark.parametrize("case", CASES, ids=[f"{kind.__name__}.{name}" for kind, name in CASES])
def test_odd_arguments_are_taken_or_refused_with_an_error_of_ours(nodes, case):
    kind, name = case
    call, rng = getattr(nodes[kind], name), random.Random(name)
    parameters = [each for each in inspect.signature(call).parameters.values() if each.kind is not each.VAR_KEYWORD]
    strange = []
    calls = 5 if name == "batches" else CALLS_EACH if parameters else 1
    for _ in range(calls):
        given = {
            each.name: rng.choice(ODD)
            for each in parameters
            if each.kind is not each.VAR_POSITIONAL and (each.default is each.empty or rng.random() < 0.5)
        }
        if "timeout" in inspect.signature(call).parameters and not isinstance(
            given.get("timeout"), (str, bytes, list, dict)
        ):
            given["timeout"] = 0.0  # nobody waits here
        began = time.monotonic()
        try:
            result = call(**given)
            if inspect.isgenerator(result):
                next(result, None)
        except (MemoireError, TypeError):  # a type so wrong that Python itself says so
            pass
        except Exception as error:
            strange.append((given, repr(error)))
        if time.monotonic() - began > 30.0:
            strange.append((given, "took long"))
    assert not strange, "\n".join(f"{error} for {given}" for given, error in strange[:10])


@pytest.mark.parametrize(
    "value", [object(), 2**64, 1j, "\ud800", (1, [2, 3])], ids=["object", "large", "complex", "surrogate", "ragged"]
)
def test_a_parameter_that_cannot_travel_is_refused_by_name(nodes, value):
    with pytest.raises(ParameterError, match="^multi_step must be a number"):
        nodes[Reader].configure(multi_step=value)


def test_afterwards_everything_works_as_before(nodes):
    """After the calls above, which run before this one in every order that keeps a file together."""
    for kind in (Client, Server, Proxy, Reader):
        assert nodes[kind].stats().faults == 0, kind
    client = nodes[Client]
    record(client)
    client.update(100.0)


@pytest.mark.parametrize("wrong", ["soon", [], object(), 1j])
def test_a_timeout_that_is_no_number_is_refused(nodes, wrong):
    with pytest.raises(WrongType, match="timeout must be a number of seconds or None"):
        nodes[Client].update(wrong)


def test_any_number_is_a_timeout_but_nan():
    assert seconds(None, 3.0) == 3.0 and seconds(None) == FOR_EVER
    assert seconds(-5) == 0.0 and seconds(np.float32(0.5)) == 0.5
    assert seconds(math.inf) == seconds(10**400 if False else 1e300) == FOR_EVER
    with pytest.raises(ParameterError, match="timeout must be"):
        seconds(math.nan)


def test_a_wait_without_an_end_ends_with_a_close(nodes):
    client = nodes[Cluster].client(nodes[Server])
    thread, box = in_thread(client.subscribe("x").receive, math.inf)
    thread.join(0.1)
    assert thread.is_alive()
    client.close(0.1)
    thread.join(100.0)
    assert isinstance(box["error"], Closed)


def constructors(cluster, server, proxy):
    """What makes a node, with sound arguments; each is replaced by odd ones in turn."""
    here = {"context": cluster.context}
    return {
        "Server": (Server, {"endpoint": "tcp://127.0.0.1:0", "schema": SCHEMA} | here),
        "Proxy": (Proxy, {"front": "tcp://127.0.0.1:0", "servers": [server.endpoint]} | here),
        "Reader": (Reader, {"urls": [proxy.endpoint], "timeout": 5.0} | here),
        "Client": (Client, {"request": server.endpoint, "timeout": 5.0} | here),
        "ReplayMemoryServer": (
            ReplayMemoryServer,
            dict(zip(NAMES, templates(), strict=True)) | {"max_step": 10, "pub_endpoint": "tcp://127.0.0.1:0", "n_caches": 2} | here,
        ),
        "Buffer": (Buffer, {"schema": SCHEMA, "capacity": 10}),
    }  # fmt: skip


NAMES = ("state_buf", "action_buf", "reward_buf", "prob_buf", "value_buf", "qvest_buf", "info_buf")
NOT_ODD = {"context", "clock", "limits", "state_dir", "name", "self", "input_uuid"}
"""Objects of other kinds, files, and what may be anything."""


@pytest.mark.parametrize("which", ["Server", "Proxy", "Reader", "Client", "ReplayMemoryServer", "Buffer"])
def test_a_node_that_cannot_be_made_says_why_and_leaves_nothing_behind(nodes, which):
    kind, sound = constructors(nodes[Cluster], nodes[Server], nodes[Proxy])[which]
    names = [
        each.name
        for each in inspect.signature(kind).parameters.values()
        if each.name not in NOT_ODD and each.kind is not each.VAR_KEYWORD
    ]
    rng, before, strange = random.Random(which), threading.active_count(), []
    for name in names:
        for odd in rng.sample(ODD, 8):
            given = sound | {name: odd}
            if "timeout" in given:
                given["timeout"] = odd if name == "timeout" and not isinstance(odd, (int, float)) else 0.05
            try:
                made = kind(**given)
            except (MemoireError, TypeError):
                pass
            except Exception as error:
                strange.append(f"{error!r} for {name}={odd!r}")
            else:
                if hasattr(made, "close"):
                    made.close(0.1)
    gc.collect()
    until(lambda: threading.active_count() <= before)
    assert not strange, "\n".join(strange)
