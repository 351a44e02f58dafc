"""Tests of wrong arguments to every public call: an error names the argument, and other calls go on."""

import contextlib
import gc
import importlib
import inspect
import itertools
import math
import pkgutil
import random
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import memoire
from classic_help import templates
from memoire.arguments import MAX_SECONDS, seconds
from memoire.classic.client import ReplayMemoryClient
from memoire.classic.server import ReplayMemoryServer
from memoire.client import reports as former_clients
from memoire.client.client import Client, connect
from memoire.dashboard.collect.history import History
from memoire.errors import Closed, MemoireError, MemoireTimeout, ParameterError, Refused
from memoire.inference.node import Inference
from memoire.limits import Limits
from memoire.loggers import JsonLines, TensorBoard
from memoire.nodes.local import LaunchOptions, Nodes
from memoire.nodes.roles import ServersFile
from memoire.nodes.supervision import ProcessOutput
from memoire.prompts.calls import Prompts
from memoire.proxy.proxy import Proxy
from memoire.reader.reader import Reader
from memoire.replay.buffer import Buffer
from memoire.replay.columns import Column
from memoire.replay.schema import RowSchema
from memoire.rl import weights
from memoire.rl.memory import GenericMemory
from memoire.rl.samples import SampleJournal
from memoire.rl.weights import ModelFiles
from memoire.security import keys as keypairs
from memoire.security import provision as key_writer
from memoire.security.access import Tokens
from memoire.security.keys import Keys
from memoire.server.server import Server
from memoire.server.table_handle import TableHandle
from memoire.tables.table import Table
from memoire.wire import messages
from netkit import SCHEMA, Cluster, in_thread, record, until

ODD = [
    None, True, -1, 0, 1, 7, 2**31, 2**64, -(2**63), 0.5, -0.0, math.nan, math.inf, -math.inf, 1e300, 1j, "", "x", "\n", "é" * 300,
    "\ud800", b"", b"\xff" * 9, [], [None], [1, 2], {}, {"a": 1}, {1: math.nan}, set(), object(), object, len, np.array(3), np.zeros(1),
    np.zeros((1, 1)), np.array(["x"]), np.array([math.nan]), np.datetime64("now"), range(3), Ellipsis,
]  # fmt: skip
SKIPPED = {"close", "__init__", "wait_closed"}
LOOPS = {"run_request_proxy", "run_pull_proxy", "rep_worker_main", "pull_worker_main", "rep_proxy_main", "pull_proxy_main"}  # fmt: skip
PATHS = {"set_logfile", "save", "snapshot"}  # parameters that take any path
REPORTED = {"on_entries", "on_episode"}  # a writer calls these with its own counts
CALLS_EACH = 40


@pytest.fixture(scope="module")
def nodes(shared_cluster):
    cluster = shared_cluster
    quick = Limits.of(request_timeout=0.05, log_timeout=0.0, resend_after=0.02, resend_most=0.05)
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


def methods(kind):
    left_out = SKIPPED | LOOPS | PATHS | REPORTED
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        if not name.startswith("_") and inspect.isfunction(member) and name not in left_out:
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
        args = {
            each.name: rng.choice(ODD)
            for each in parameters
            if each.kind is not each.VAR_POSITIONAL and (each.default is each.empty or rng.random() < 0.5)
        }
        waits = "timeout" in inspect.signature(call).parameters
        if waits and not isinstance(args.get("timeout"), (str, bytes, list, dict)):
            args["timeout"] = 0.0  # no call of this test waits
        began = time.monotonic()
        try:
            result = call(**args)
            if inspect.isgenerator(result):
                next(result, None)
        except (MemoireError, TypeError):  # Python itself rejects the type
            pass
        except Exception as error:
            strange.append((args, repr(error)))
        if time.monotonic() - began > 30.0:
            strange.append((args, "took long"))
    assert not strange, "\n".join(f"{error} for {args}" for args, error in strange[:10])


def test_afterwards_everything_works_as_before(nodes):
    """The other tests of the file run first in every order that keeps a file together."""
    for kind in (Client, Server, Proxy, Reader):
        assert nodes[kind].stats().faults == 0, kind
    client = nodes[Client]
    record(client)
    client.update(100.0)


def test_any_number_is_a_timeout_but_nan():
    assert seconds(None, 3.0) == 3.0 and seconds(None) == MAX_SECONDS
    assert seconds(-5) == 0.0 and seconds(np.float32(0.5)) == 0.5
    assert seconds(math.inf) == seconds(10**400 if False else 1e300) == MAX_SECONDS
    with pytest.raises(ParameterError, match="timeout must be"):
        seconds(math.nan)


def constructors(cluster, server, proxy):
    """Return the class and sound arguments of each node; tests replace each argument by odd ones."""
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
NOT_ODD = {"context", "clock", "limits", "process", "state", "name", "self", "input_uuid"}
"""Parameters for objects of other kinds, for files, and for any value."""


@pytest.mark.parametrize("which", ["Server", "Proxy", "Reader", "Client", "ReplayMemoryServer", "Buffer"])
def test_a_node_that_cannot_be_made_says_why_and_leaves_nothing_behind(nodes, which):
    kind, sound = constructors(nodes[Cluster], nodes[Server], nodes[Proxy])[which]
    parameters = inspect.signature(kind).parameters.values()
    names = [each.name for each in parameters if each.name not in NOT_ODD and each.kind is not each.VAR_KEYWORD]
    rng, before, strange = random.Random(which), threading.active_count(), []
    for name in names:
        for odd in rng.sample(ODD, 8):
            args = sound | {name: odd}
            if "timeout" in args:
                args["timeout"] = odd if name == "timeout" and not isinstance(odd, (int, float)) else 0.05
            try:
                node = kind(**args)
            except (MemoireError, TypeError):
                pass
            except Exception as error:
                strange.append(f"{error!r} for {name}={odd!r}")
            else:
                node.close(*([] if kind is Buffer else [0.1]))
    gc.collect()
    until(lambda: threading.active_count() <= before)
    assert not strange, "\n".join(strange)


LONE = "weights-\udcff.bin"
"""Text that UTF-8 cannot encode, as Python reads from the name of a file."""
ROWS = RowSchema({"tokens": Column(np.int32, (None,)), "reward": Column(np.float32)})
NO_TEXT = {
    "out", "bodies", "batch_size", "keys", "prompts", "answers", "path", "paths", "logfile_path", "mode", "columns",
    "of",
}  # fmt: skip
"""Parameters whose text is neither sent nor saved; `columns` are compared with the schema."""
IN_MEMORY_ONLY = {
    "Server.clients", "Server.lines", "Server.model", "Server.search", "Server.totals", "Server.accounts", "Server.account_page",
    "Server.table", "Server.sample_episodes",
    "Client.report", "Client.writer",
    "Reader.accounts servers", "Reader.ask", "Reader.tell", "Reader.servers_at", "Reader.trouble_at",
    "Prompts.list state", "Prompts.draw balance",
}  # fmt: skip
"""Calls and parameters whose text is only compared with existing names."""
ADDRESSES = {
    "Server.add_pull_worker", "Server.add_request_worker", "Server.run_pull_proxy", "Server.run_request_proxy",
    "Server.show_pages",
}  # fmt: skip
TEXTS = {
    "Server.begin_run name": lambda it: it.server.begin_run(LONE),
    "Server.publish topic": lambda it: it.server.publish(LONE, b"x"),
    "Server.publish content": lambda it: it.server.publish("policy", LONE),
    "Server.scalars values": lambda it: it.server.scalars({LONE: 1.0}),
    "TableHandle.calls session": lambda it: it.server.table("p").calls(session=LONE),
    "Client.model topic": lambda it: it.client.model(LONE),
    "Client.subscribe topic": lambda it: it.client.subscribe(LONE),
    "Client.scalars values": lambda it: it.client.scalars({LONE: 1.0}),
    "Reader.accounts run": lambda it: it.reader.accounts(LONE),
    "Reader.totals run": lambda it: it.reader.totals(LONE),
    "Reader.begin_run name": lambda it: it.reader.begin_run(LONE),
    "Reader.publish topic": lambda it: it.reader.publish(LONE, b"x"),
    "Reader.publish content": lambda it: it.reader.publish("policy", LONE),
    "Reader.scalars values": lambda it: it.reader.scalars({LONE: 1.0}),
    "Reader.snapshot name": lambda it: it.reader.snapshot(LONE),
    "Prompts.add prompts": lambda it: it.prompts.add({5: LONE}),
    "Prompts.add dataset": lambda it: it.prompts.add({5: b"x"}, LONE),
    "Prompts.add tags": lambda it: it.prompts.add({5: b"x"}, tags={"split": LONE}),
    "Prompts.add tags, their names": lambda it: it.prompts.add({5: b"x"}, tags={LONE: "train"}),
    "Prompts.finish dataset": lambda it: it.prompts.finish(LONE),
    "Prompts.forget dataset": lambda it: it.prompts.forget(LONE),
    "Prompts.shares shares": lambda it: it.prompts.shares({LONE: 1.0}),
    "Prompts.list tags": lambda it: it.prompts.list(tags={"split": LONE}),
    "Prompts.list consumer": lambda it: it.prompts.list(consumer=LONE),
    "Prompts.forget_consumer": lambda it: it.prompts.forget_consumer(LONE),
    "Prompts.payload key": lambda it: it.prompts.payload((LONE, 0, 0)),
    "Prompts.cancel keys": lambda it: it.prompts.cancel([(LONE, 0, 0)]),
    "Prompts.fail reason": lambda it: it.prompts.fail(it.lease, 0, LONE),
    "Server name": lambda it: Server(None, SCHEMA, name=LONE),
    "Server run": lambda it: Server(None, SCHEMA, run=LONE),
    "Server endpoint": lambda it: Server(f"tcp://{LONE}:0", SCHEMA),
    "Client request": lambda it: connect(f"tcp://{LONE}:5560", timeout=0.0),
    "Client table": lambda it: connect(it.server.endpoint, table=LONE, timeout=0.0),
    "Client name": lambda it: connect(it.server.endpoint, name=LONE, timeout=0.0),
    "Reader urls": lambda it: Reader([f"tcp://{LONE}:5560"], timeout=0.0),
    "Prompts rank": lambda it: it.server.table("p").calls(rank=(0, 2), session=LONE),
    "Prompts session": lambda it: Prompts(it.server.endpoint, table="p", session=LONE),
    "Inference topic": lambda it: Inference("inproc://node", SCHEMA, SCHEMA, lambda columns: columns, topic=LONE),
}  # fmt: skip
"""Public calls that send or save a text, by the parameter of the text."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory, shared_cluster):
    """Return the users of a server with a state folder, with remote and local prompts."""
    folder, cluster = tmp_path_factory.mktemp("state"), shared_cluster
    tables = {"t": Table(SCHEMA), "p": Table(ROWS, storage="prompts", group=1)}
    server = cluster.server(schema=None, tables=tables, state=folder)
    far = cluster.keep(Prompts(server.endpoint, table="p", context=cluster.context))
    far.add({0: "a", 1: "b"})
    users = SimpleNamespace(server=server, client=cluster.client(server), reader=cluster.reader([server]))
    near = server.table("p").calls()
    return [SimpleNamespace(prompts=each, lease=each.lease(1)[0], **vars(users)) for each in (far, near)]


@pytest.mark.parametrize("which", TEXTS)
def test_a_text_that_cannot_travel_is_refused_by_name_and_nothing_else_ends(texts, which):
    for it in texts:  # remote and local prompts
        with pytest.raises(MemoireError) as caught:
            TEXTS[which](it)
        assert not isinstance(caught.value, (MemoireTimeout, Closed))
        assert "udcff" in str(caught.value) and str(caught.value).isprintable()


def test_a_body_that_cannot_be_encoded_is_dropped_and_its_caller_hears_of_it(texts):
    """After a body that no check refused, the I/O thread goes on with messages of other callers."""
    reader, server = texts[0].reader, texts[0].server
    answer = reader.ask({server.name: messages.Control(run=LONE)}, 20.0)[server.name]
    assert isinstance(answer, Refused) and "CONTROL was not sent, since it cannot be encoded" in str(answer)
    assert reader.totals(timeout=20.0).run == server.run


def test_after_refused_texts_everybody_is_served(texts):
    """Log lines, and reasons of other programs, are sent with characters that UTF-8 lacks escaped."""
    for it in texts:
        assert it.prompts.counts()["leased"] == 2
        assert it.prompts.add({7: "ok"}, tags={"split": "é"}) + it.prompts.add({7: "ok"}) <= 1
    it = texts[0]
    assert it.client.log(f"read {LONE}")
    it.client.update(20.0)
    assert it.reader.totals().run == it.server.run
    assert [line.line.text for line in it.server.lines()] == [r"read weights-\udcff.bin"]
    for node in (it.client, it.server, it.reader):
        assert node.stats().faults == 0


def test_every_text_that_a_public_call_takes_is_tried():
    tried = {which.split(",")[0] for which in TEXTS}
    for kind in (Server, Client, Reader, Prompts):
        for name in methods(kind):
            for each in inspect.signature(getattr(kind, name)).parameters.values():
                call = f"{kind.__name__}.{name}"
                known = {call, f"{call} {each.name}"} & (tried | IN_MEMORY_ONLY | ADDRESSES)
                if "str" in str(each.annotation) and each.name not in NO_TEXT - {"prompts", "keys"}:
                    assert known or call == "Client.log", f"{call} {each.name}: if it is sent or saved, add it to TEXTS"


def of_a_server(path, leave, _):
    with Server("inproc://leaves", SCHEMA, state=path, name="s") as server:
        leave()
        server.publish("policy", bytes(100_000))

    def is_kept(absolute):
        with Server("inproc://leaves", SCHEMA, state=absolute, name="s") as again:
            return again.model("policy") is not None

    return is_kept


def of_tokens(path, leave, absolute):
    absolute.write_text("a" * 40)
    tokens = Tokens(path)
    leave()
    absolute.write_text("b" * 41)
    return lambda _: tokens.accepted() == ("b" * 41,)


def of_curves(path, leave, _):
    history = History(path)
    leave()
    history.flush()
    history.close()
    return lambda absolute: absolute.stat().st_size


def of_output(path, leave, _):
    with ProcessOutput(["a"], path) as output:
        leave()
        output("a", "line")
    return lambda absolute: (absolute / "a.log").read_text() == "line\n"


def of_programs(path, leave, absolute):
    key_writer.write_one(absolute, keypairs.make("server", "s"))
    nodes = Nodes(schema=SCHEMA, state_dir=path, keys=path)
    leave()
    flags = nodes.server(0)
    folders = [flags[flags.index(name) + 1] for name in ("--state-dir", "--keys")]
    return lambda _: folders == [f"{absolute}/server-0", str(absolute)]


def of_samples(path, leave, _):
    with SampleJournal(path, 64) as journal:
        leave()
        journal.keep(SimpleNamespace(memory=[(0, 0.0, False, {})]))
        journal.commit()
    return lambda absolute: list(absolute.glob("*.samples"))


def of_columns(path, leave, _):
    memory = GenericMemory(10, folder=path)
    leave()
    memory.append([(np.zeros(2), np.zeros(2), 0.0, False, False, {})] * 3)
    return lambda absolute: list(absolute.glob("*.npy"))


def of_model_files(path, leave, _):
    files = ModelFiles(path, f"{path}-", 1, role="trainer")
    leave()
    files.keep(weights.pack({"w": np.zeros(3)}))
    files.close()
    return lambda absolute: len(list(absolute.parent.glob("relative*.pth"))) == 1 and absolute.exists()


def keys_in(path):
    key_writer.write_one(Path(path), keypairs.make("server", "s"))
    return Keys(path).folder


SHOWN = {
    "Client.state": former_clients.folder_at, "Keys.folder": keys_in,
    "ServersFile.path": lambda path: ServersFile(path).path, "JsonLines.path": lambda path: JsonLines(path).path,
    "TensorBoard.folder": lambda path: TensorBoard(path).path.parent,
    "LaunchOptions.state_dir": lambda path: LaunchOptions(learner=("x",), actor=(), state_dir=path).state_dir,
    "LaunchOptions.logs": lambda path: LaunchOptions(learner=("x",), actor=(), logs=path).logs,
    "LaunchOptions.keys": lambda path: LaunchOptions(learner=("x",), actor=(), keys=path).keys,
}  # fmt: skip
"""Objects that show their path."""
LEAVES = {
    "Server.state": of_a_server, "Tokens.path": of_tokens, "History.path": of_curves, "ProcessOutput.folder": of_output,
    "Nodes.state_dir": of_programs, "Nodes.keys": of_programs, "SampleJournal.folder": of_samples,
    "GenericMemory.folder": of_columns, "ModelFiles.path": of_model_files, "ModelFiles.history": of_model_files,
}  # fmt: skip
"""Uses of a path after construction that no attribute shows."""
THROUGH = {
    "ModelFiles": ["Trainer.model_path", "RolloutWorker.model_path", "RolloutWorker.model_path_history"],
    "Server": ["State.folder"],
    "JsonLines": ["Wandb.fallback"],
    "Nodes": ["PipelineNodes.state_dir"],
    "absolute beside these": ["Trainer.checkpoint_path", "Trainer.profile_folder", "Pipeline.folder"],
}


def test_each_path_that_a_class_takes_is_tried_or_goes_through_one_that_is():
    known, paths = {*SHOWN, *LEAVES, *itertools.chain(*THROUGH.values())}, set()
    folders = r"memoire\.(client|dashboard|inference|loggers|nodes|proxy|reader|rl|security|server)"
    for module in pkgutil.walk_packages(memoire.__path__, "memoire."):
        if re.match(folders, module.name):
            with contextlib.suppress(ImportError):
                paths |= set(paths_of(importlib.import_module(module.name)))
    assert paths <= known, paths - known


def paths_of(module):
    for name, kind in vars(module).items():
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and not name.startswith("_"):
            with contextlib.suppress(TypeError, ValueError):
                for each in inspect.signature(kind).parameters.values():
                    if re.search(r"str \| [a-z.]*Path", str(each.annotation)) or each.name == "state_dir":
                        yield f"{name}.{each.name}"


@pytest.mark.parametrize("which", SHOWN)
def test_a_relative_path_is_shown_as_that_of_the_folder_in_which_its_object_was_made(which, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(SHOWN[which]("relative")) == str(tmp_path / "relative")


@pytest.mark.parametrize("use", dict.fromkeys(LEAVES.values()), ids=lambda use: use.__name__)
def test_a_relative_path_is_of_the_folder_in_which_its_object_was_made(use, tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    monkeypatch.chdir(here)
    is_kept = use("relative", lambda: monkeypatch.chdir(there), here / "relative")
    assert is_kept(here / "relative") and not list(there.iterdir())
