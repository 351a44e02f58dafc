"""The same keyword means the same thing, whether a buffer, a server or a table takes it; and what a client and its table
are both told is equal, or refused."""

import inspect
import re

import numpy as np
import pytest

import memoire
from memoire import arguments, errors
from memoire.replay.writers import WriterRegistry
from memoire.tables.table import TABLE_NAMES

FACES = (memoire.Buffer, memoire.Server, memoire.Table)
OF_ONE = {
    memoire.Buffer: {"ragged_limit"},
    memoire.Server: {
        "endpoint", "on_full", "tables", "storage", "cache_limit", "client_capacity", "byte_limit", "run", "push_endpoint",
        "pub_endpoint", "name", "state_dir", "snapshot_caches", "snapshot_every", "context", "limits", "clock", "keys",
        "tune_process", "inference", "discard_mismatched",
    },
    memoire.Table: {"on_full", "storage", "cache_limit", "client_capacity", "byte_limit"},
}  # fmt: skip
"""What a face takes that a buffer, or a buffer alone, has nothing like."""


def keywords(face):
    return {each.name: each for each in inspect.signature(face).parameters.values() if each.name not in OF_ONE[face]}


def test_a_buffer_a_server_and_a_table_take_the_same_keywords():
    buffer, server, table = map(keywords, FACES)
    assert set(server) == set(buffer) and set(table) == set(buffer) - {"seed"}
    for name in set(buffer) - {"schema", "capacity"}:
        same = {
            (each[name].kind, each[name].default, each[name].annotation)
            for each in (buffer, server, table)
            if name in each
        }
        assert len(same) == 1, (name, same)


def test_all_fields_of_parameters_are_keywords_of_each_and_mean_the_same():
    given = {"sampler": memoire.Prioritized(0.7), "multi_step": 3, "discount": 0.9, "min_size": 7, "max_age": 5.0}
    schema = {"obs": (np.float32, (2,)), "reward": np.float32}
    with memoire.Server(None, schema, **given) as server:
        assert server.schema == memoire.Buffer(schema, 100).schema == memoire.Table(schema).schema
        found = {
            server.parameters,
            memoire.Table(schema, **given).parameters,
            memoire.Buffer(schema, 100, **given).parameters,
        }
        assert len(found) == 1
        chosen = found.pop()
        assert (chosen.min_size, chosen.max_age, chosen.discount, chosen.start) == (7, 5.0, (0.9,), "repeat")
        changes = {"sampler": memoire.RankBased(0.5), "discount": 0.8, "max_times_sampled": 2}
        buffer = memoire.Buffer(schema, 100, **given)
        assert buffer.configure(**changes) == server.configure(**changes) == server.table("default").parameters
    everything = memoire.Parameters(frame_stack=2, min_size=3)
    for made in (memoire.Buffer(schema, 100, parameters=everything), memoire.Table(schema, parameters=everything)):
        assert made.parameters == everything
    assert memoire.Buffer(schema, 100, parameters=everything, multi_step=2).parameters == everything.replace(
        multi_step=2
    )
    for face in (lambda **all: memoire.Buffer(schema, 100, **all), lambda **all: memoire.Table(schema, **all)):
        with pytest.raises(errors.WrongType, match=r"parameters must be memoire\.Parameters or None"):
            face(parameters={"min_size": 3})


@pytest.mark.parametrize("former", arguments.FORMER)
def test_a_former_name_is_refused_and_the_error_says_the_name_that_it_has_now(former):
    new, instead = arguments.FORMER[former]
    faces = {memoire.Server: (None, {}), memoire.Table: ({},), memoire.Parameters: (), memoire.connect: ("tcp://h:1",)}
    also = {memoire.Server: TABLE_NAMES, memoire.Table: TABLE_NAMES}
    taking = [face for face in faces if new in {*inspect.signature(face).parameters, *also.get(face, ())}]
    assert taking, "a former name of something that there is"
    for face in taking:
        with pytest.raises(errors.UnknownName, match=re.escape(instead) if instead else f"Did you mean '{new}'"):
            face(*faces[face], **{former: 1})


CLIENT_AND_TABLE = {"capacity": "client_capacity", "longest": "rollout_length"}
"""By their names at a client or its writer, what the table has of it: equal, or refused."""
OF_EACH_PROCESS = {"seed", "name", "context", "limits", "clock", "keys", "state_dir", "on_full"}
"""What client and server each have for themselves under the same name: of a client, `on_full` is about bytes on their
way, and of a table about entries held."""
CLIENT_ALONE = {
    "url", "request", "push", "subscribe", "table", "timeout", "input_uuid", "live",
    "envs", "num_envs", "autoreset", "check", "overrides",
}  # fmt: skip
"""Number and mode of environments are compared with what the environments say."""
INSIDE = {"self", "options", "observer", "stamp", "made_by", "resume"}


def test_every_setting_of_client_and_table_is_listed():
    calls = (memoire.connect, memoire.Client, memoire.Client.sync, memoire.Client.writer, WriterRegistry.make)
    client = set().union(*(inspect.signature(call).parameters for call in calls)) - INSIDE
    server = {*inspect.signature(memoire.Server).parameters, *inspect.signature(memoire.Table).parameters, *TABLE_NAMES}
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
    ("connected", "table", "says"),
    [
        (with_capacity, {"client_capacity": 50}, "^capacity must be 50, the client_capacity of the table, .* got 7"),
        (
            with_capacity,
            {"storage": "episodes", "client_capacity": 50},
            "^capacity must be 50, the client_capacity of the table, .* got 7",
        ),
        (
            with_capacity_of_sync,
            {"client_capacity": 50},
            "^capacity must be 50, the client_capacity of the table, .* got 7",
        ),
        (
            with_longest,
            {"storage": "rollouts", "rollout_length": 50},
            "^longest must be 50, the length of the table's rollouts, .* got 7",
        ),
    ],
)
def test_a_client_that_was_told_otherwise_than_its_table_is_refused_by_both_values(cluster, connected, table, says):
    schema = {"obs": (np.float32, (2,)), "reward": np.float32}
    free = {name: value for name, value in table.items() if name == "storage"}
    server, other = (cluster.server(schema=schema, **each) for each in (table, free))
    assert connected(server, None) == connected(server, 50) == 50 and connected(other, 7) == 7
    with pytest.raises(errors.ParameterError, match=says):
        connected(server, 7)
    assert server.totals().steps == 0
