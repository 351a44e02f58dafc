"""Tests of names and settings, from the call that takes them to the object that holds or refuses them."""

import functools
import inspect
import json
import re
import urllib.request

import numpy as np
import pytest

import memoire
from classic_help import templates
from memoire import (
    Buffer,
    Memory,
    Parameters,
    PrioritizedReplayBuffer,
    PriorityExperienceReplayBuffer,
    arguments,
    errors,
)
from memoire.arguments import process_name
from memoire.classic.client import ReplayMemoryClient
from memoire.classic.memory import ReplayMemory
from memoire.classic.server import ReplayMemoryServer
from memoire.errors import MemoireError, NotSettable, ParameterError
from memoire.limits import Limits
from memoire.nodes.http import NodePages
from memoire.replay.writers import WriterRegistry
from memoire.server.state import ClientNames
from memoire.tables.table import TABLE_NAMES, table_settings
from memoire.wire.byte_budget import ByteBudget
from netkit import SCHEMA, in_thread, record, until

CLASSES = (memoire.Buffer, memoire.Table)
OF_ONE = {
    memoire.Buffer: {"ragged_limit"},
    memoire.Table: {"on_full", "storage", "cache_limit", "client_capacity", "byte_limit"},
}  # fmt: skip
"""Keywords of one class that the other class lacks."""


def keywords(cls):
    return {each.name: each for each in inspect.signature(cls).parameters.values() if each.name not in OF_ONE[cls]}


def test_a_buffer_and_a_table_take_the_same_keywords_and_a_server_those_of_its_table():
    buffer, table = map(keywords, CLASSES)
    assert set(table) == set(buffer) - {"seed"}
    assert set(table) - {"schema", "fields"} <= table_settings({})
    for name in set(buffer) - {"schema", "capacity"}:
        parameters = [each[name] for each in (buffer, table) if name in each]
        same = {(each.kind, each.default, each.annotation) for each in parameters}
        assert len(same) == 1, (name, same)


def test_all_fields_of_parameters_are_keywords_of_each_and_mean_the_same():
    settings = {"sampler": memoire.Prioritized(0.7), "multi_step": 3, "discount": 0.9, "min_size": 7, "max_age": 5.0}
    schema = {"obs": (np.float32, (2,)), "reward": np.float32}
    with memoire.Server(None, schema, **settings) as server:
        assert server.schema == memoire.Buffer(schema, 100).schema == memoire.Table(schema).schema
        table, buffer = memoire.Table(schema, **settings), memoire.Buffer(schema, 100, **settings)
        (chosen,) = {server.parameters, table.parameters, buffer.parameters}
        assert (chosen.min_size, chosen.max_age, chosen.discount, chosen.start) == (7, 5.0, (0.9,), "repeat")
        changes = {"sampler": memoire.RankBased(0.5), "discount": 0.8, "max_times_sampled": 2}
        assert buffer.configure(**changes) == server.configure(**changes) == server.table("default").parameters
    everything = memoire.Parameters(frame_stack=2, min_size=3)
    for create in (functools.partial(memoire.Buffer, schema, 100), functools.partial(memoire.Table, schema)):
        assert create(parameters=everything).parameters == everything
        assert create(parameters=everything, multi_step=2).parameters == everything.replace(multi_step=2)
        with pytest.raises(errors.WrongType, match=r"parameters must be memoire\.Parameters or None"):
            create(parameters={"min_size": 3})


@pytest.mark.parametrize("former", arguments.FORMER)
def test_a_former_name_is_refused_and_the_error_says_the_name_that_it_has_now(former):
    new, instead = arguments.FORMER[former]
    faces = {
        memoire.Server: (None, {}), memoire.Table: ({},), memoire.Parameters: (), memoire.connect: ("tcp://h:1",), Limits: ()
    }  # fmt: skip
    also = {memoire.Server: table_settings({}), memoire.Table: TABLE_NAMES}
    taking = [face for face in faces if new in {*inspect.signature(face).parameters, *also.get(face, ())}]
    assert taking, "a former name of something that there is"
    for face in taking:
        with pytest.raises(errors.UnknownName, match=re.escape(instead) if instead else f"Did you mean '{new}'"):
            face(*faces[face], **{former: 1})


CLIENT_AND_TABLE = {"capacity": "client_capacity", "longest": "rollout_length"}
"""Setting of the table by the name at a client or its writer: equal, or refused."""
OF_EACH_PROCESS = {"seed", "name", "limits", "keys", "state", "on_full"}
"""Names of both client and server; a client's `on_full` is about bytes in flight, a table's about held entries."""
CLIENT_ALONE = {
    "url", "context", "clock", "request", "push", "subscribe", "table", "timeout", "input_uuid", "live",
    "envs", "num_envs", "autoreset", "check", "overrides",
}  # fmt: skip
"""Settings of a client alone; number and mode of environments are compared with the environments' own."""
INSIDE = {"self", "options", "observer", "stamp", "made_by", "resume"}


def test_every_setting_of_client_and_table_is_listed():
    calls = (memoire.connect, memoire.Client, memoire.Client.sync, memoire.Client.writer, WriterRegistry.make)
    client = set().union(*(inspect.signature(call).parameters for call in calls)) - INSIDE
    server = {*inspect.signature(memoire.Server).parameters, *table_settings({})} - {"table"}
    assert client == CLIENT_AND_TABLE.keys() | OF_EACH_PROCESS | CLIENT_ALONE, "list what both have"
    assert set(CLIENT_AND_TABLE.values()) <= server and not CLIENT_ALONE & server
    assert not {"multi_step", "discount", "frame_stack", "start", "reward_coeff", "schema", "sampler"} & client


def with_capacity(server, value):
    with memoire.connect(server.endpoint, capacity=value) as client:
        return client.memory.capacity


def with_capacity_of_sync(server, value):
    with memoire.connect(server.endpoint) as client:
        client.sync(value, timeout=100.0)
        return client.memory.capacity


def with_longest(server, value):
    with memoire.connect(server.endpoint) as client:
        return client.writer(longest=value).longest


@pytest.mark.parametrize(
    ("connected", "storage", "setting", "says"),
    [
        (with_capacity, "caches", "client_capacity", "capacity must be 50, the client_capacity of the table,"),
        (with_capacity, "episodes", "client_capacity", "capacity must be 50, the client_capacity of the table,"),
        (with_capacity_of_sync, "caches", "client_capacity", "capacity must be 50, the client_capacity of the table,"),
        (with_longest, "rollouts", "rollout_length", "longest must be 50, the length of the table's rollouts,"),
    ],
)
def test_a_client_told_otherwise_than_its_table_is_refused_by_both_values(cluster, connected, storage, setting, says):
    schema = {"obs": (np.float32, (2,)), "reward": np.float32}
    server, other = (cluster.server(schema=schema, storage=storage, **each) for each in ({setting: 50}, {}))
    assert connected(server, None) == connected(server, 50) == 50 and connected(other, 7) == 7
    with pytest.raises(errors.ParameterError, match=f"^{says} .* got 7"):
        connected(server, 7)
    assert server.totals().steps == 0


POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "actor-7d9f-x2x"}


@pytest.mark.parametrize(
    ("chosen", "surroundings", "name"),
    [
        ("actor-3", {"MEMOIRE_NAME": "other"}, "actor-3"),
        ("", {"MEMOIRE_NAME": "other"}, ""),
        (None, {"MEMOIRE_NAME": "from.outside"}, "from.outside"),
        (None, POD | {"MEMOIRE_NAME": "from.outside"}, "from.outside"),
        (None, POD, "actor-7d9f-x2x"),
        (None, {"HOSTNAME": "laptop"}, ""),
        (None, {}, ""),
    ],
)
def test_a_name_is_the_one_that_was_given_or_that_of_the_pod(chosen, surroundings, name):
    assert process_name(chosen, surroundings) == name


@pytest.mark.parametrize("wrong", ["a b", "-a", "é", "a,b", "x" * 254, "a\n", 7, b"a"])
def test_a_name_that_could_not_stand_in_a_line_is_refused_with_what_is_expected(wrong):
    with pytest.raises(ParameterError, match="^name must be 1 to 253 letters, digits") as refused:
        process_name(wrong, {})
    assert refused.value.name == "name"
    with pytest.raises(ParameterError, match=r"^\$MEMOIRE_NAME must be"):
        process_name(None, {"MEMOIRE_NAME": "a b"})


def test_names_reach_servers_pages_and_lines(cluster):
    server = cluster.server()
    proxy = cluster.proxy([server], name="front-1")
    client = cluster.client(proxy, name="actor-3")
    other = cluster.client(proxy, name="")
    reader = cluster.reader([proxy], name="learner-0")
    record(client, episodes=1, length=5)
    client.log("hello")
    client.update(20.0)
    other.update(20.0)
    until(lambda: server.stats().log_lines == 1)
    until(lambda: server.stats().learners)
    names = {row.client: row.name for row in server.clients()}
    assert names == {client.client_id.hex(): "actor-3", other.client_id.hex(): ""}
    assert [learner.name for learner in server.stats().learners] == ["learner-0"]
    assert (client.stats().name, reader.stats().name, proxy.stats().name) == ("actor-3", "learner-0", "front-1")
    assert "actor-3" in repr(client) and "front-1" in repr(proxy)
    with NodePages("127.0.0.1:0", server) as pages:
        with urllib.request.urlopen(f"{pages.url}/logs", timeout=60) as answer:
            (row,) = json.load(answer)["rows"]
    assert (row["name"], row["text"]) == ("actor-3", "hello")
    client.close()
    assert server.client_name(client.client_id) == "actor-3"  # the client's lines are still present


def test_a_server_remembers_the_newest_names_of_many_clients():
    names = ClientNames(ByteBudget(1 << 30).add_holder("names"))
    for number in range(1 << 14):
        names.record(number.to_bytes(16, "big"), f"actor-{number}")
    first, second, new = (number.to_bytes(16, "big") for number in (0, 1, 1 << 14))
    names.record(first, "")  # an empty name changes nothing
    assert names.name_of(first) == "actor-0"
    names.record(first, "again")
    names.record(new, "newest")
    assert [names.name_of(each) for each in (first, second, new)] == ["again", "", "newest"]


MEANT = ("multi_step", "n_step", "gamma", "alpha", "beta", "discount", "batch_size", "multistep", "max_age", "nonsense")
"""Settings as users know them from other libraries."""
FROZEN = (
    memoire.Column(np.float32), memoire.Greedy(), Limits(), memoire.Linear(0.0, 1.0, 9), Parameters(),
    memoire.Uniform(), memoire.Prioritized(), memoire.RankBased(), memoire.Table(SCHEMA),
)  # fmt: skip
NO_SETTINGS = {"Batch", "Bind", "Conn", "Endpoints", "Process", "State", "InsecureWarning", "MemoireError", "MixedBatch", "Ragged", "Rollouts", "Schema", "Transition", "__version__", "connect"}  # fmt: skip


@pytest.fixture(scope="module")
def objects(shared_cluster):
    cluster = shared_cluster
    server = cluster.server()
    proxy = cluster.proxy([server])
    client = cluster.client(proxy)
    classic_server = ReplayMemoryServer(*templates(), 100, "inproc://pub", 4, context=cluster.context)
    worker, _ = in_thread(classic_server.rep_worker_main, "inproc://req", "Bind")
    classic = ReplayMemoryClient("inproc://pub", "inproc://req", "inproc://push", context=cluster.context)
    buffer = Buffer(SCHEMA, 100)
    rows = {"obs": np.float32}
    node = memoire.Inference("inproc://infer", rows, rows, dict, context=cluster.context)
    policy = memoire.RemotePolicy([node.endpoint], rows, rows, context=cluster.context)
    tables = {"t": memoire.Table({"reward": np.float32}, storage="prompts")}
    giver = memoire.Server("inproc://prompts", tables=tables, process=memoire.Process(context=cluster.context))
    prompts = memoire.Prompts("inproc://prompts", context=cluster.context)
    nodes = (
        buffer, client, node, Memory(SCHEMA, 100), PrioritizedReplayBuffer(8, 0.5), prompts, proxy, policy, server,
        cluster.reader([proxy]), ReplayMemory(*templates(), 100), classic, classic_server, buffer.writer(), *FROZEN,
    )  # fmt: skip
    parts = {"a table": server.table("default"), "a client's rem": classic.rem, "a server's rem": classic_server.rem}
    parts["PriorityExperienceReplayBuffer"] = PriorityExperienceReplayBuffer(8, 0.5)  # another name of that class
    yield {type(each).__name__: each for each in nodes} | parts | {"a client's writer": client.writer()}
    for each in (prompts, giver, policy, node, classic, classic_server):
        each.close(0.2)
    worker.join(30.0)


def test_every_public_class_is_looked_at(objects):
    public = {name for name in re.findall(r"\b(?:[A-Z]\w+|connect)", str(memoire.__doc__)) if hasattr(memoire, name)}
    assert len(public) > 25 and public <= objects.keys() | NO_SETTINGS


def public_names(node):
    return {name for name in getattr(node, "__dict__", ()) if not name.startswith("_")}


def test_what_is_set_can_be_read_or_is_refused(objects):
    silent = []
    for called, node in objects.items():
        for name in MEANT:
            before = public_names(node)
            try:
                setattr(node, name, 0.25)
            except AttributeError:
                assert public_names(node) == before
                continue
            except MemoireError:  # such as multi_step of the classic memory
                continue
            is_setting = isinstance(getattr(type(node), name, None), property) or name in before
            if not (is_setting and getattr(node, name) == 0.25):
                silent.append(f"{called}.{name}")
    assert not silent


@pytest.mark.parametrize(
    ("called", "name", "text"),
    [
        ("Buffer", "multi_step", r"multi_step of a Buffer cannot be set.*Write configure\(multi_step=\.\.\.\)"),
        ("Buffer", "capacity", r"Pass it to the constructor: Buffer\(capacity=\.\.\.\)"),
        ("Buffer", "multistep", r"Did you mean multi_step\? Write configure"),
        ("Buffer", "zzz", "There is no setting of this name"),
        ("Memory", "gamma", r"Write configure\(discount=\.\.\.\)"),
        ("Server", "credit", r"Write configure_limits\(credit=\.\.\.\)"),
        ("Server", "run_name", "There is no setting of this name|Did you mean"),
        ("Reader", "beta", r"Write configure\(importance_exponent=\.\.\.\)"),
        ("Client", "on_full", r"Write configure_limits\(on_full=\.\.\.\)"),
        ("Client", "multi_step", "Parameters are the server's: write"),
        ("Client", "seed", r"Pass it to the constructor: Client\(seed=\.\.\.\)"),
        ("a table", "max_age", r"Write configure\(max_age=\.\.\.\)"),
        ("ReplayMemory", "gamma", r"Write rem\.discount_factor = "),
        ("ReplayMemoryServer", "n_caches", r"Pass it to the constructor: ReplayMemoryServer"),
        ("Parameters", "multi_step", r"It never changes. Write replace\(multi_step=\.\.\.\)"),
        ("Table", "capacity", r"Make another one: Table\(\.\.\., capacity=\.\.\.\)"),
    ],
)
def test_whoever_sets_it_is_told_what_to_write(objects, called, name, text):
    with pytest.raises(NotSettable, match=text):
        setattr(objects[called], name, 3)


@pytest.mark.parametrize("called", ["Buffer", "Memory", "Server", "a table"])
def test_what_they_are_told_works(objects, called):
    for name in ("multi_step", "discount", "priority_exponent", "importance_exponent", "mix_lambda"):
        objects[called].configure(**{name: 1})


def test_what_a_class_has_of_its_own_stays_settable(objects):
    objects["ReplayMemory"].multi_step = 3
    assert objects["ReplayMemory"].multi_step == 3
    objects["Writer"].longest = 7
    assert objects["Writer"].longest == 7
    objects["Client"].push_reason = ""

    class Mine(Buffer):
        def __init__(self):
            super().__init__(SCHEMA, 100)
            self.mine = 3

    mine = Mine()
    mine.mine, mine.other = 4, 5
    assert (mine.mine, mine.other) == (4, 5)
