"""Tests of fifty common mistakes: each error says which value, what was expected, and what to do now."""

import contextlib
import io
import logging
import re
import socket
from types import SimpleNamespace

import numpy as np
import pytest

import memoire
from memoire import errors
from memoire.cli import drain
from memoire.cli.main import main
from memoire.replay.parameters import Parameters
from netkit import DEADLINE, QUICK, record, until

FLOATS = memoire.Schema({"obs": (np.float32, (4,)), "action": np.int32, "reward": np.float32})
BYTES = memoire.Schema({"obs": (np.uint8, (4,)), "action": np.int8, "reward": np.float32, "logp": np.float32})
ZEROS, ONES = np.zeros(4, np.float32), np.ones(4, np.float32)
SEEN, NEXT = np.zeros(4, np.uint8), np.ones(4, np.uint8)
STEP = {"action": 0, "reward": 0.0, "terminated": False, "truncated": False}
ORDER = "The order is step(obs, action, reward, terminated, truncated, next_obs, info)."
ASKED = (
    "Give the address of a memoire server, proxy or relay, such as 'tcp://proxy:5560' or 'ipc:///run/memoire/relay'."
)
CONVERT = "The entry was not added. Convert the value, or change the column's declaration."
FIELDS = "It has obs, action, reward, discount, next_obs, importance, ids, steps, age, model_version."


def buffer(**options):
    return memoire.Buffer(FLOATS, 1000, **{"seed": 1} | options)


def step(**changes):
    """Take the second step of an episode after a good first one."""
    writer = buffer().writer()
    writer.step(ZEROS, 0, 0.0, False, False, ONES)
    return writer.step(**{"obs": ONES, "next_obs": 2 * ONES} | STEP | changes)


def step_bytes(**changes):
    writer = memoire.Buffer(BYTES, 1000).writer()
    return writer.step(**{"obs": SEEN, "next_obs": NEXT, "logp": 0.0} | STEP | changes)


def vector_step(writer, count=3, **changes):
    many = {name: np.full(count, value) for name, value in STEP.items()}
    return writer.step(**many | {"obs": np.zeros((count, 4)), "next_obs": np.ones((count, 4))} | changes)


def batch():
    filled = buffer()
    with filled.writer() as writer:
        for k in range(20):
            writer.step(np.full(4, k, np.float32), 0, 1.0, k == 19, False, np.full(4, k + 1, np.float32))
    return filled, filled.sample(8)


def reported(errors, ids=None):
    filled, drawn = batch()
    return filled.update_priorities(drawn.ids if ids is None else ids, errors)


def closed(node):
    node.close()
    return node


def command(*words):
    """Run a command line, and raise its exit status and last message as `Said`."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            status = main(list(words))
    except SystemExit as error:
        status = error.code
    last = [line for line in output.getvalue().splitlines() if line.startswith(("memoire", "FAIL", "     Give"))]
    raise CommandOutput(f"{status}: {last[-1]}")


class CommandOutput(Exception):
    """Exit status and message of a command."""


@pytest.fixture(scope="module")
def world(shared_cluster):
    """Yield a working cluster, and an address without a listener."""
    cluster = shared_cluster
    tables = {name: memoire.Table(FLOATS) for name in ("online", "demo")}
    server = cluster.server("tcp://127.0.0.1:0", None, tables=tables, name="well")
    server.publish("policy", b"one")
    client, reader = cluster.client(server, limits=QUICK), cluster.reader([server])
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        yield SimpleNamespace(cluster=cluster, server=server, client=client, reader=reader, dead=dead)


def drained(world, leaving, to):
    return drain.drain(leaving, [to], timeout=20.0, say=lambda line: None, context=world.cluster.context)


def published_to_nobody(world):
    with memoire.Reader([world.dead], timeout=None) as reader:
        reader.publish("policy", b"x", timeout=0.3)


CONSTRUCTORS = [
    ("another library's name", lambda: memoire.Buffer(FLOATS, 9, n_step=3), errors.UnknownName,
     "Buffer takes no 'n_step'. Did you mean 'multi_step'? Nothing was changed."),
    ("the name of a sampler's field", lambda: memoire.Prioritized(alpha=0.6), errors.UnknownName,
     "Prioritized takes no 'alpha'. Did you mean 'exponent'? Nothing was changed."),
    ("a misspelt setting of a table", lambda: memoire.Table(FLOATS, capasity=3), errors.UnknownName,
     "Table takes no 'capasity'. Did you mean 'capacity' or 'client_capacity'? Nothing was changed."),
    ("a misspelt argument of connect", lambda: memoire.connect("tcp://proxy:5560", tble="demo"), errors.UnknownName,
     "connect takes no 'tble'. Did you mean 'table'? Nothing was changed."),
    ("an unknown parameter", lambda: Parameters(colour=3), errors.UnknownName,
     re.compile(r"Parameters takes no 'colour'\. It takes burn_in, cache_size, .*, stratified\. Nothing was changed\.")),
    ("a writer's argument", lambda: buffer().writer(n_envs=4), errors.UnknownName,
     "Buffer.writer takes no 'n_envs'. Did you mean 'num_envs' or 'envs'? Nothing was changed."),
    ("a value that is misspelt", lambda: buffer(start="repeet"), errors.ParameterError,
     "start must be one of 'skip', 'repeat', 'zero' (did you mean 'repeat'?), got 'repeet'. Nothing was changed."),
    ("a discount in percent", lambda: buffer(discount=99), errors.ParameterError,
     "discount must be a number in [0, 1], got 99. Nothing was changed."),
    ("a capacity in floats", lambda: memoire.Buffer(FLOATS, 1e6), errors.ParameterError,
     "capacity must be a whole number from 1 to 2147483392, got 1000000.0. Nothing was changed."),
    ("a sampler's class", lambda: buffer(sampler=memoire.Prioritized), errors.WrongType,
     "sampler must be a sampler such as Prioritized(0.6) or Uniform(), got <class 'memoire.replay.sampling.Prioritized'>. Nothing "
     "was changed."),
    ("capacity and schema swapped", lambda: memoire.Buffer(100, FLOATS), errors.WrongType,
     "schema must be a memoire.Schema, got int. Make one: memoire.Schema({...}), or memoire.Schema.from_env(env)."),
    ("address and schema swapped", lambda: memoire.Server(FLOATS, "tcp://127.0.0.1:0"), errors.EndpointError,
     f"cannot bind {str(FLOATS)[:80]!r}: an address must be of type str, not Schema. Give 'tcp://127.0.0.1:5560', or "
     "'tcp://*:5560' for other machines."),
    ("a shape without a dtype", lambda: memoire.Schema({"obs": (4,)}), errors.SchemaError,
     "column 'obs.0' was declared as 4, a value of type int. Give a Column, a dtype, (dtype, shape) such as (np.float32, "
     "(4,)), an array, a Gymnasium space, or a dict or tuple of these."),
    ("no state", lambda: memoire.Schema({"observation": np.float32}), errors.SchemaError,
     "no column is a state (the columns are observation). Call one 'obs' or 'state', or declare it as Column(dtype, shape, "
     "'state')."),
]  # fmt: skip

STEPS = [
    ("a wrong shape", lambda: step(action=np.zeros(2, np.int32)), errors.EntryError,
     f"column 'action' stores int32, but got int32[2]. {CONVERT}"),
    ("a wrong kind of number", lambda: step(action=0.5), errors.EntryError,
     f"column 'action' stores int32, but got 0.5. {CONVERT}"),
    ("an action out of range", lambda: step_bytes(action=300), errors.EntryError,
     f"column 'action' stores int8 from -128 to 127, but got 300. {CONVERT}"),
    ("a reward that is no number", lambda: step(reward=float("nan")), errors.EntryError,
     "column 'reward' stores finite float32, but got nan. The entry was not added: one number that is not finite makes all weights "
     "of a network NaN. Find out where it comes from."),
    ("a pixel out of range", lambda: step_bytes(obs=np.array([0, 1, 256, 3])), errors.EntryError,
     f"column 'obs' stores uint8[4] from 0 to 255, but got int64[4] with 256 at [2]. {CONVERT}"),
    ("reward and next_obs swapped", lambda: step(reward=2 * ONES, next_obs=0.0), errors.EntryError,
     "column 'reward' stores float32, but got float32[4]. The entry was not added. It looks like an observation is "
     f"passed as another argument. {ORDER}"),
    ("next_obs before terminated", lambda: step(terminated=2 * ONES, truncated=False, next_obs=False), errors.EntryError,
     "column 'terminated' stores True or False, but got float32[4]. The entry was not added. It looks like an observation "
     f"is passed as another argument. {ORDER}"),
    ("info before next_obs", lambda: step(truncated={}), errors.EntryError,
     f"column 'truncated' stores True or False, but got a dict. The entry was not added. {ORDER}"),
    ("a vector step into a single writer", lambda: vector_step(buffer().writer()), errors.EntryError,
     "column 'reward' stores float32, but got float64[3]. The entry was not added. This writer records one environment, "
     "but obs has 3: make the writer with writer(envs), or with num_envs=3 and autoreset=."),
    ("a single step into a vector writer",
     lambda: buffer().writer(num_envs=3, autoreset="disabled").step(ZEROS, 0, 0.0, False, False, ONES), errors.EntryError,
     "column 'obs' stores float32[3, 4], but got float32[4]. The entry was not added. This writer records 3 environments, "
     "but obs has one: pass the observations of all, or make a writer without num_envs."),
    ("a column that is misspelt", lambda: memoire.Buffer(BYTES, 9).writer().step(obs=SEEN, next_obs=NEXT, log_p=0.1, **STEP),
     errors.EntryError, "step() needs logp=..., a value of float32 ('log_p' is not a column). "
     "The entry was not added."),
    ("a column that is not declared", lambda: step(value=0.1), errors.EntryError,
     "step() got value=..., but 'value' is not a column; the extra columns are none. The entry was not added. Leave it out, "
     "or declare it: Schema({..., 'value': dtype})."),
    ("one array for both observations", lambda: step(next_obs=ONES), errors.ObservationReused,
     re.compile("obs and next_obs are the same array.*Create vector environments with copy=True, or copy obs.*")),
    ("a step after the writer's end", lambda: closed(buffer().writer()).step(ZEROS, 0, 0.0, False, False, ONES),
     errors.Closed, "the writer is closed. Create a new one to go on."),
]  # fmt: skip

BATCHES = [
    ("a batch size that is no whole number", lambda: batch()[0].sample(32.0), errors.ParameterError,
     "batch_size must be a whole number from 1 to 2147483392, got 32.0. Nothing was changed."),
    ("a field by another library's name", lambda: batch()[1]["weights"], errors.NoSuchField,
     f"this batch has no 'weights'. Did you mean 'importance'? {FIELDS}"),
    ("an attribute that is misspelt", lambda: batch()[1].next_observations, AttributeError,
     f"this batch has no 'next_observations'. Did you mean 'next_obs'? {FIELDS}"),
    ("a column of the schema", lambda: FLOATS["rewards"], errors.NoSuchField,
     "this schema has no 'rewards'. Did you mean 'reward'? It has obs, action, reward."),
    ("too few TD errors", lambda: reported(np.zeros(7)), errors.ParameterError,
     "td_errors must be as many as the ids, shape (8,), got 'shape (7,)'. Nothing was changed."),
    ("ids and TD errors swapped", lambda: reported(np.arange(8), np.zeros(8)), errors.ParameterError,
     "ids must be whole numbers in one dimension, like a batch's ids, got 'float64[8]'. Nothing was changed."),
]  # fmt: skip

ADDRESSES = [
    ("no transport", lambda: memoire.connect("proxy:5560"), errors.EndpointError,
     "cannot connect to 'proxy:5560': the transport is missing. Give 'tcp://proxy:5560'."),
    ("a path", lambda: memoire.connect("/run/memoire/relay"), errors.EndpointError,
     "cannot connect to '/run/memoire/relay': the transport is missing. Give 'ipc:///run/memoire/relay'."),
    ("a web address", lambda: memoire.connect("http://proxy:5560/"), errors.EndpointError,
     "cannot connect to 'http://proxy:5560/': the transport must be tcp://, ipc:// or inproc://. Give 'tcp://proxy:5560'."),
    ("no port", lambda: memoire.connect("tcp://proxy"), errors.EndpointError,
     "cannot connect to 'tcp://proxy': it has no port. Give 'tcp://proxy:5560'."),
    ("a port above 65535", lambda: memoire.connect("tcp://127.0.0.1:99999"), errors.EndpointError,
     f"cannot connect to 'tcp://127.0.0.1:99999': the port must be a number from 1 to 65535. {ASKED}"),
    ("what follows the port", lambda: memoire.connect("tcp://proxy:5560/"), errors.EndpointError,
     "cannot connect to 'tcp://proxy:5560/': nothing may follow the port, but '/' does. Give 'tcp://proxy:5560'."),
    ("the host of those who listen", lambda: memoire.connect("tcp://*:5560"), errors.EndpointError,
     "cannot connect to 'tcp://*:5560': the host '*' is valid only for binding. Give the name of the machine that "
     "listens, such as 'tcp://localhost:5560'."),
    ("a server without transport", lambda: memoire.Server("*:5560", FLOATS), errors.EndpointError,
     "cannot bind '*:5560': the transport is missing. Give 'tcp://*:5560'."),
    ("one server of a proxy", lambda: memoire.Proxy("tcp://127.0.0.1:0", "tcp://a:5560"), errors.EndpointError,
     "cannot connect to 'tcp://a:5560': a proxy needs a list of at least one server. Give ['tcp://a:5560']."),
]  # fmt: skip

COMMANDS = [
    ("a flag that is misspelt", lambda: command("top", "node:8080", "--onec"), CommandOutput,
     "2: memoire top: there is no option --onec (did you mean '--once'?)"),
    ("a setting without a value", lambda: command("plan", "--set", "multi_step"), CommandOutput,
     "1: memoire: --set must be NAME=VALUE, such as multi_step=3, got 'multi_step'. Nothing was changed."),
    ("a doctor without transport", lambda: command("doctor", "127.0.0.1:5560"), CommandOutput, "1:      Give 'tcp://127.0.0.1:5560'."),
    ("everybody's address", lambda: command("relay", "tcp://a:5560", "--endpoint", "tcp://*:5560"), CommandOutput,
     "1: memoire: --endpoint must be an address of this machine only, such as 127.0.0.1, or keys (--keys), or --insecure for "
     "open access, got 'tcp://*:5560'. Nothing was changed."),
]  # fmt: skip

ALONE = [*CONSTRUCTORS, *STEPS, *BATCHES, *ADDRESSES, *COMMANDS]
NOBODY = "The machine is there, but nothing listens at DEAD: start memoire's server or proxy there. Try `memoire doctor DEAD`."
OTHER_PORT = re.compile(
    "no welcome from PUSH within 1.0 s. Something accepts connections at PUSH, but (hangs up at once|takes no requests). "
    "Is it (another service, or )?the port for caches or notices. Requests go to the port below, or two below. Try `memoire doctor PUSH`."
)

TOGETHER = [
    ("an address without a listener", lambda w: memoire.connect(w.dead, timeout=0.2), errors.MemoireTimeout,
     f"no welcome from DEAD within 0.2 s. {NOBODY}"),
    ("the port for caches",
     lambda w: memoire.connect(w.server.push_endpoint, timeout=1.0, context=w.cluster.context), errors.MemoireTimeout, OTHER_PORT),
    ("a handle that is misspelt", lambda w: w.server.table("dmeo"), errors.ParameterError,
     "table must be one of 'online', 'demo' (did you mean 'demo'?), got 'dmeo'. Nothing was changed."),
    ("a parameter far away", lambda w: w.reader.configure(n_step=3), errors.UnknownName,
     "Reader.configure takes no 'n_step'. Did you mean 'multi_step'? Nothing was changed."),
    ("a model as a dict", lambda w: w.reader.publish("policy", {"w": 1}), errors.WrongType,
     re.compile("a model must be bytes or str, got dict.*Serialize it first.*")),
    ("a topic that is misspelt", lambda w: w.client.model("polizy").wait(timeout=0.1), errors.MemoireTimeout,
     "no model of topic 'polizy' from SERVER within 0.1 s. The server has no model of this topic, or cannot be "
     "reached: see client.stats().silent. It has models of 'policy' (did you mean 'policy'?)."),
    ("a model without a server", published_to_nobody,
     errors.MemoireTimeout, re.compile("no answer to a model of topic 'policy' from DEAD within 0.3 s. Is a memoire server .*memoire doctor DEAD"
     ".*The reader keeps sending it while it is open; a server that is back gets the newest model.")),
    ("ids of another batch", lambda w: w.reader.update_priorities(np.zeros(3), np.zeros(3)), errors.WrongType,
     "ids must be the ids of a batch, got float64[3]. Nothing was changed."),
    ("a server's taken address", lambda w: memoire.Server(w.server.endpoint, FLOATS, process=memoire.Process(context=w.cluster.context)),
     errors.EndpointError,
     "cannot bind 'SERVER': Address already in use. Give a free address, or close what listens there, such as the "
     "server of a notebook's cell that ran before."),
    ("a client after its end", lambda w: closed(w.cluster.client(w.server)).update(), errors.Closed,
     "this client is closed. Create a new one to go on."),
    ("a drain without an heir", lambda w: drained(w, w.server.endpoint, w.dead), errors.MemoireTimeout,
     f"no answer from DEAD within 3.0 s. {NOBODY} Nothing was drained: well's accounts need a "
     "server that keeps them."),
    ("a drain of a server that is gone", lambda w: drained(w, w.dead, w.server.endpoint), errors.MemoireTimeout,
     f"no answer from DEAD within 3.0 s. {NOBODY} Only a running server can hand over its accounts: "
     "start it again, then drain it."),
]  # fmt: skip


def check(call, kind, expected, names=()):
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    for address, name in names:
        text = text.replace(address, name)
    matches = expected.fullmatch(text) if isinstance(expected, re.Pattern) else expected == text
    assert matches, f"\nsaid     {text}\nexpected {getattr(expected, 'pattern', expected)}"
    assert isinstance(caught.value, (errors.MemoireError, AttributeError, CommandOutput))


@pytest.mark.parametrize(
    ("call", "kind", "expected"), [row[1:] for row in ALONE], ids=[row[0].replace(" ", "-") for row in ALONE]
)
def test_a_mistake_in_one_process_is_told_what_is_wrong_and_what_to_do(call, kind, expected):
    check(call, kind, expected)


@pytest.mark.parametrize(
    ("call", "kind", "expected"), [row[1:] for row in TOGETHER], ids=[row[0].replace(" ", "-") for row in TOGETHER]
)
def test_a_mistake_in_a_cluster_is_told_what_is_wrong_and_what_to_do(world, call, kind, expected, times):
    times(left_out=0.3)
    names = ((world.dead, "DEAD"), (world.server.push_endpoint, "PUSH"), (world.server.endpoint, "SERVER"))
    check(lambda: call(world), kind, expected, names)


def test_there_are_fifty_mistakes_and_more():
    titles = [row[0] for row in (*ALONE, *TOGETHER)]
    assert len(titles) == len(set(titles)) >= 50


def test_a_drain_goes_on_without_an_address_that_does_not_answer(world, times):
    times(left_out=0.3)
    leaving, heir = world.cluster.server(name="leaving"), world.cluster.server(name="heir")
    client = world.cluster.client(leaving, limits=QUICK)
    record(client)
    client.update(DEADLINE)
    client.close()
    lines = []
    to = [world.dead, heir.endpoint]
    assert drain.drain(leaving.endpoint, to, timeout=DEADLINE, say=lines.append, context=world.cluster.context) == 1
    assert lines[0].startswith(
        f"no server answers at {world.dead}, so that it gets no accounts. The machine is there, but nothing"
    )


@pytest.mark.parametrize("name", ["sequence_length", "multi_step", "frame_stack"])
def test_writers_whose_episodes_are_cut_shorter_than_samples_are_refused_by_name(name, cluster, caplog):
    schema, vector = {"obs": np.float32, "action": np.float32, "reward": np.float32}, {"autoreset": "disabled"}
    refused = pytest.raises(
        errors.ParameterError, match=f"{name} must be at most .* members share half .* longest=.* got 8"
    )
    server = cluster.server(schema=memoire.Schema(schema), **{name: 8})
    near, far = memoire.Buffer(schema, 100, **{name: 8}), cluster.client(server, capacity=100)
    for writer in (near.writer, far.writer):
        with refused:
            writer(num_envs=7, **vector)
        kept = [writer(num_envs=6, **vector)]  # eight entries per environment suffice
        with refused:
            writer()
        with refused:
            writer(longest=50)  # the first writer would cut earlier
        kept.clear()
        kept.append(writer(num_envs=6, **vector))  # writers in the same lanes
        assert kept[0].longest == 8
    explicit = memoire.Buffer(schema, 100)
    kept.append(explicit.writer(num_envs=7, longest=30, **vector))
    explicit.configure(**{name: 8})  # an explicit `longest` is accepted
    shared = memoire.Buffer(schema, 100)
    kept.append(shared.writer(num_envs=7, **vector))
    with refused:
        shared.configure(**{name: 8})
    assert getattr(shared.parameters, name) == getattr(memoire.Parameters(), name)
    with caplog.at_level(logging.WARNING, "memoire.client.pushes"):
        server.configure(**{name: 9})
        until(lambda: caplog.records)
    assert f"sets {name}=9; writers here need at most 8" in caplog.text
