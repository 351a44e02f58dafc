"""Sequences through a cluster: equal to those of a `Buffer`, drawn near or far, with their weights and corrections."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import containerkit
from memoire.errors import ParameterError
from memoire.replay.batch import Batch
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables.caches.pool import Pool
from memoire.tables.table import Table
from memoire.wire import containers
from memoire.wire.layout import layout_of
from memoire.wire.parts import ZERO_FRAME, Part
from netkit import until
from poolkit import assert_same_samples, far_away
from sequencekit import SCHEMA, record

CUT = Parameters(sequence_length=4, sequence_overlap=1, burn_in=2, frame_stack=2, start="zero", discount=0.5)
CLIENT = b"c" * 16


def pool_of(memory, samples, caches=1):
    pool = Pool(memory.schema, memory.parameters, seed=1)
    for number in range(caches):
        pool.add(CLIENT, number, containers.check(containers.build(memory, samples, now=0.0), pool.layout))
    return pool


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_sequences_that_crossed_the_wire_are_those_of_the_memory(data):
    draw = data.draw
    m = draw(st.integers(1, 6))
    parameters = Parameters(
        sequence_length=m, sequence_overlap=draw(st.integers(0, m - 1)), burn_in=draw(st.integers(0, m - 1)),
        start=draw(st.sampled_from(["skip", "repeat", "zero"])), frame_stack=draw(st.integers(1, 3)),
        prev=draw(st.sampled_from([None, ("obs",), ("hidden",), ("reward",), ()])), sequence_max_share=0.25,
        sequence_first=draw(st.sampled_from([(), ("hidden",)])),
        compression=draw(st.sampled_from(["none", "zlib"])), reuse_cache=draw(st.booleans()),
    )  # fmt: skip
    memory = Memory(SCHEMA, 64, parameters, seed=1)
    begin = 0
    for _ in range(draw(st.integers(1, 3))):
        length, ending = draw(st.integers(1, 15)), draw(st.sampled_from(["terminated", "truncated", "unknown"]))
        record(memory, length, begin, ending)
        begin += length
    if not memory.num_positive:
        return
    pool = pool_of(memory, 40)
    near = pool.get(20)
    assert_same_samples(near.gathered, memory.gather(near.gathered.ids["number"]))
    far, _ = far_away(pool, 20)
    assert_same_samples(far.gathered, memory.gather(far.gathered.ids["number"]))
    assert (far.gathered.ids["client"].tobytes(), len(far.gathered.ids)) == (CLIENT * 20, 20)


def test_priorities_of_sequences_go_home_and_come_back_as_chances(cluster):
    parameters = Parameters(sequence_length=5, sequence_overlap=2, burn_in=2, sequence_max_share=0.5, cache_size=64)
    server = cluster.server(schema=SCHEMA, parameters=parameters)
    client, reader = cluster.client(server), cluster.reader([server])
    record(client.memory, 23, 0, "terminated")
    client.on_entries(23)
    for _ in range(4):
        assert client.push_cache(100.0)
    for turn, batch in enumerate((server.get_batch(64, timeout=100.0), reader.get_batch(64, 100.0)), 1):
        assert batch.obs.shape == (64, 6, 1) and batch.hidden.shape == (64, 5, 2) and batch.mask.shape == (64, 5)
        numbers = batch.ids["number"]
        errors = np.where(batch.mask, numbers[:, None] % 7 + np.arange(5.0), np.nan)
        with pytest.raises(ParameterError, match="as the mask has"):
            batch.update_priorities(errors[:, :3])
        batch.update_priorities(errors)
        until(lambda turn=turn: server.stats().feedback_given == 64 * turn)
        client.update(100.0)
        for i, number in enumerate(numbers):
            own = errors[i][batch.mask[i]]
            assert client.memory.weights([number])[0] == pytest.approx(
                (0.5 * own.max() + 0.5 * own.mean() + 1e-6) ** 0.6, rel=1e-5
            )
    assert client.stats().applied == 128


SMALL = Schema({"obs": Column(np.float32, (2,), "state"), "reward": Column(np.float32, (), "reward")})


def test_a_stored_state_crosses_the_wire_once_for_each_sequence():
    schema = Schema({"obs": (np.float32, (2,)), "reward": np.float32, "hidden": (np.float32, (256,))})
    sizes = {}
    for first in ((), ("hidden",)):
        memory = Memory(schema, 500, CUT.replace(sequence_length=20, sequence_overlap=10, sequence_first=first), seed=1)
        memory.open()
        for t in range(400):
            memory.add(0, (np.ones(2, np.float32), np.float32(1), np.full(256, t, np.float32)))
        memory.close(final_state=np.ones(2, np.float32))
        payload = containers.build(memory, 20, now=0.0)
        sizes[first] = sum(row.stored for row in containers.table(payload) if row.column == 2)
    assert sizes["hidden",] == 20 * 1024 and sizes[()] > 10 * sizes["hidden",]


def test_arrays_of_the_caller_are_filled_with_sequences():
    memory = Memory(SCHEMA, 64, CUT, seed=1)
    record(memory, 30, 0, "terminated")
    pool = pool_of(memory, 60)
    first = pool.get(20)
    batch = Batch(SCHEMA, first.gathered, first.importance, lambda ids, errors: None)
    again = pool.get(20, out={"obs": batch.obs, "mask": batch.mask, "reward": batch.reward})
    for one, other in ((again.gathered.prev["obs"], batch.obs), (again.gathered.mask, batch.mask)):
        assert np.shares_memory(one, other)
    assert_same_samples(again.gathered, memory.gather(again.gathered.ids["number"]))
    with pytest.raises(ParameterError, match=r"out\['mask'\] must be an array bool\[20, 4\], got 'bool\[20, 5\]'"):
        pool.get(20, out={"mask": np.empty((20, 5), np.bool_)})


def test_sequences_of_several_tables_are_mixed_and_each_table_takes_its_errors(cluster):
    parameters = CUT.replace(cache_size=32, sequence_max_share=0.5, priority_exponent=1.0, sequence_first=("hidden",))
    tables = {"near": Table(SCHEMA, parameters=parameters), "far": Table(SCHEMA, parameters=parameters)}
    server = cluster.server(schema=None, tables=tables)
    clients = {name: cluster.client(server, table=name) for name in tables}
    for client in clients.values():
        record(client.memory, 40, 0, "terminated")
        client.on_entries(40)
        assert client.push_cache(100.0)
    mixed = next(server.batches({"near": 12, "far": 20}, 100.0))
    joined = mixed.joined
    assert joined.obs.shape == (32, 5, 2, 1) and joined.mask.shape == (32, 4) and joined.hidden.shape == (32, 2)
    errors = np.where(joined.mask, joined.ids["number"][:, None] + np.arange(4.0), np.nan)
    joined.update_priorities(errors)
    for name, client in clients.items():
        client.update(100.0)
        for row in range(*mixed.rows[name].indices(32)):
            own = errors[row][joined.mask[row]]
            weight = client.memory.weights([joined.ids["number"][row]])[0]
            assert weight == pytest.approx(0.5 * own.max() + 0.5 * own.mean() + 1e-6, rel=1e-5)


def test_a_cache_whose_indices_point_at_nothing_harms_no_reader():
    layout = layout_of(SMALL, CUT)
    cache = containerkit.make(layout, 6)
    nothing = {part: np.full_like(cache.block(part), ZERO_FRAME) for part in (Part.ENTRY_INDEX, Part.PREV_INDEX)}
    pool = Pool(SMALL, CUT, seed=1)
    pool.add(CLIENT, 1, containerkit.make(layout, 6, replace=nothing).held())
    drawn, _ = far_away(pool, 6)
    assert not drawn.gathered.prev["obs"].any() and not drawn.gathered.reward.any()
