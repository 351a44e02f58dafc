"""The same keyword means the same thing, whether a buffer, a server or a table takes it."""

import inspect

import numpy as np
import pytest

import memoire
from memoire import errors

FACES = (memoire.Buffer, memoire.Server, memoire.Table)
OF_ONE = {
    memoire.Buffer: {"ragged_limit"},
    memoire.Server: {
        "endpoint", "full", "tables", "storage", "cache_limit", "client_capacity", "byte_limit", "run", "push_endpoint",
        "pub_endpoint", "name", "state_dir", "snapshot_caches", "snapshot_every", "context", "limits", "clock", "keys",
        "tune_process", "inference", "discard_mismatched",
    },
    memoire.Table: {"full", "length", "storage", "cache_limit", "client_capacity", "byte_limit"},
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
        assert (chosen.min_size, chosen.max_age, chosen.discount_factor, chosen.start) == (7, 5.0, (0.9,), "repeat")
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
