"""Several tables in a server: each has its own schema, parameters and limits, and is drawn apart or mixed."""

import numpy as np
import pytest

import memoire
from memoire.errors import ParameterError, Refused, WrongType
from memoire.limits import Limits
from memoire.replay.buffer import Buffer
from memoire.replay.columns import Column
from memoire.replay.mixing import MixedBatch
from memoire.replay.sampling import Prioritized, Uniform
from memoire.replay.schema import Schema
from memoire.tables.table import Table, table_byte_limits
from netkit import QUICK, SCHEMA, entry, fill, pool_in, until

OTHER = Schema({"obs": Column(np.uint8, (8, 8), "state"), "reward": Column(np.float32, (), "reward")})
WITH_VALUE = Schema({**{name: SCHEMA[name] for name in SCHEMA}, "value": np.float32})


def two(schema=OTHER, **options):
    return {"online": Table(SCHEMA, multi_step=2), "demo": Table(schema, **options)}


def with_tables(cluster, tables=None, **options):
    return cluster.server(schema=None, tables=tables or two(), **options)


def test_each_table_has_clients_schema_and_batches_of_its_own(cluster):
    server = with_tables(cluster)
    online, demo = cluster.client(server, table="online"), cluster.client(server, table="demo")
    assert (online.schema, demo.schema, online.table, demo.table) == (SCHEMA, OTHER, "online", "demo")
    assert (online.parameters.multi_step, demo.parameters.multi_step) == (2, 1)
    fill(online, value=3)
    fill(demo, value=7)
    assert set(np.unique(server.get_batch(64).obs)) == {3.0}  # the first table is the default
    batch = server.table("demo").get_batch(64)
    assert batch.obs.shape == (64, 8, 8) and set(np.unique(batch.obs)) == {7}
    stats = server.stats()
    assert {name: (each.clients, each.steps, each.samples) for name, each in stats.tables.items()} == {
        "online": (1, 20, 64),
        "demo": (1, 20, 64),
    }
    assert {client.client: client.table for client in server.clients()} == {
        client.client_id.hex(): client.table for client in (online, demo)
    }
    assert stats.samples == 128 and stats.held_caches == 4 and server.tables == ("online", "demo")
    assert server.total_steps == 40 == cluster.reader([server]).totals().totals.steps and server.schema == SCHEMA
    demo.close()
    assert (server.stats().tables["demo"].clients, server.stats().tables["demo"].steps) == (0, 20)


def test_who_names_no_table_gets_the_first(cluster):
    server = with_tables(cluster)
    assert cluster.client(server).table == cluster.reader([server]).table == "online"
    plain = cluster.server()
    assert cluster.client(plain).table == "default" and plain.tables == ("default",)
    assert cluster.client(plain, table="default").schema == SCHEMA


def test_a_table_that_is_not_there_is_refused_at_once_with_those_that_are(cluster):
    server = with_tables(cluster)
    for make in (lambda: cluster.client(server, table="dmeo"), lambda: cluster.reader([server], table="dmeo")):
        with pytest.raises(
            Refused, match=r"\(table\): this server has no table 'dmeo'; its tables are 'online', 'demo'"
        ):
            make()
    with pytest.raises(ParameterError, match="'online', 'demo'"):
        server.table("dmeo")
    with pytest.raises(ParameterError, match="'online', 'demo'"):
        next(server.batches({"online": 8, "dmeo": 8}))
    with pytest.raises(Refused, match="no table 'dmeo'"):
        next(cluster.reader([server]).batches({"online": 8, "dmeo": 8}, timeout=100.0))
    with pytest.raises(WrongType, match="text"):
        cluster.client(server, table=3)
    with pytest.raises(ParameterError, match="1 to 256 characters"):
        cluster.client(server, table="x" * 257)


def test_feedback_reaches_the_clients_of_each_table(cluster):
    server = with_tables(cluster, limits=QUICK)
    clients = {name: cluster.client(server, table=name, limits=QUICK) for name in ("online", "demo")}
    for client in clients.values():
        fill(client)
    here = next(server.batches({"online": 24, "demo": 8}, timeout=100.0))
    assert here.update_priorities({"online": np.ones(24), "demo": np.full(8, 5.0)}) == (0, 0, 32, 0)
    far = next(cluster.reader([server]).batches({"demo": 16, "online": 16}, timeout=100.0))
    assert list(far) == ["demo", "online"]
    far.update_priorities(np.arange(32.0))

    def applied(name):
        clients[name].update(100.0)
        return clients[name].stats().applied

    until(lambda: (applied("online"), applied("demo")) == (40, 24))


@pytest.mark.parametrize("kind", ["server", "server, ahead", "reader", "client"])
def test_mixed_batches_have_so_many_samples_of_each_table(cluster, kind):
    server = with_tables(cluster, {"online": Table(SCHEMA), "demo": Table(WITH_VALUE)})
    online, demo = cluster.client(server, table="online"), cluster.client(server, table="demo")
    fill(online, value=3)
    fill(demo, value=7)
    source = cluster.reader([server], table="demo") if kind == "reader" else online if kind == "client" else server
    options = {"ahead": 1} if kind == "server, ahead" else {}
    for _, batch in zip(range(3), source.batches({"online": 24, "demo": 8}, timeout=100.0, **options), strict=False):
        assert {name: len(part.ids) for name, part in batch.items()} == {"online": 24, "demo": 8}
        assert set(np.unique(batch["online"].obs)) == {3.0} and set(np.unique(batch["demo"].obs)) == {7.0}
        assert batch.joined.obs.shape == (32, 4) and "value" not in batch.joined and batch.joined.action.shape == (32,)


def test_both_storages_live_in_one_server_and_one_batch(cluster):
    tables = {"online": Table(SCHEMA), "demo": Table(SCHEMA, storage="episodes", capacity=1000)}
    server = with_tables(cluster, tables, limits=QUICK)
    online, demo = (cluster.client(server, table=name, limits=QUICK) for name in ("online", "demo"))
    fill(online, value=3)
    length = 30
    columns = {name: np.full((length, *SCHEMA[name].shape), 7, SCHEMA[name].dtype) for name in SCHEMA}
    demo.push_episode(columns, terminated=True, final_state=np.full(4, 7, np.float32))
    for source in (server, cluster.reader([server])):
        batch = next(source.batches({"online": 24, "demo": 8}, timeout=100.0))
        assert set(np.unique(batch["online"].obs)) == {3.0} and set(np.unique(batch["demo"].obs)) == {7.0}
        batch.update_priorities(np.full(32, 2.0))
    owner = pool_in(server, "demo").owner
    assert {bytes(each) for each in batch["demo"].ids["client"].astype("<u8").view("V16").ravel()} == {owner}
    until(lambda: server.stats().tables["demo"].applied == 16)  # applied in the server
    until(lambda: (online.update(100.0), online.stats().applied == 48)[1])  # applied at the actor


def test_a_table_with_a_limit_of_its_own_has_that_and_the_others_share_the_rest(cluster):
    tables = {"a": Table(SCHEMA), "b": Table(SCHEMA, byte_limit=60_000), "c": Table(SCHEMA)}
    with pytest.raises(ParameterError, match="more than the 60000 bytes that byte_limit reserves for 'b'"):
        table_byte_limits({"a": None, "b": 60_000}, 60_000)
    server = cluster.server(schema=None, tables=tables, limits=Limits(held_bytes=1_060_000))
    assert {name: table.byte_limit for name, table in server.stats().tables.items()} == {
        "a": 500_000,
        "b": 60_000,
        "c": 500_000,
    }
    server.configure_limits(held_bytes=62_000)
    limits = {name: table.byte_limit for name, table in server.stats().tables.items()}
    assert limits == {"a": 1000, "b": 60_000, "c": 1000}
    server.table("b").limit_bytes(700)
    server.configure_limits(held_bytes=2700)
    assert {name: table.byte_limit for name, table in server.stats().tables.items()} == {"a": 1000, "b": 700, "c": 1000}
    with pytest.raises(ParameterError, match="more than the 700"):
        server.configure_limits(held_bytes=700)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": {}}, "1 to 256 tables"),
        ({"tables": {"": Table(SCHEMA)}}, "tables must be printable text"),
        ({"tables": {"a": SCHEMA}}, "memoire.Table"),
        ({"tables": 7}, "mapping"),
        ({}, "memoire.Schema, or tables="),
        ({"tables": {"a": Table(SCHEMA)}, "multi_step": 3}, "cannot be combined with tables="),
        ({"tables": {"a": Table(SCHEMA)}, "sampler": Uniform()}, "cannot be combined with tables="),
    ],
)
def test_settings_of_tables_that_cannot_be_are_refused(options, message):
    with pytest.raises((ParameterError, WrongType), match=message):
        memoire.Server(None, **options)


def buffer_of(schema, entries, *, seed=0, beta=1.0, **options):
    """Return a buffer with entries of priorities 1, 2, ...; the values of an entry are its number."""
    buffer = Buffer(schema, 100, sampler=Prioritized(1.0, beta=beta), seed=seed, **options)
    memory = buffer.memory
    memory.open()
    numbers = [memory.add(0, entry(schema, number)) for number in range(entries)]
    memory.close(terminated=True)
    buffer.update_priorities(numbers, np.arange(1.0, entries + 1))
    return buffer


def test_a_joined_batch_has_the_rows_of_all_parts_in_order():
    a, b = buffer_of(SCHEMA, 10).sample(5), buffer_of(SCHEMA, 20, seed=1).sample(3)
    mixed = MixedBatch({"a": a, "b": b})
    assert (list(mixed), len(mixed), mixed["b"] is b) == (["a", "b"], 2, True)
    assert (
        mixed.rows == {"a": slice(0, 5), "b": slice(5, 8)} and repr(mixed) == "MixedBatch(a: 5 samples, b: 3 samples)"
    )
    assert list(mixed.joined) == list(a) and mixed.joined is mixed.joined
    for name in a:
        if name != "importance":
            np.testing.assert_array_equal(mixed.joined[name], np.concatenate([a[name], b[name]]))


@pytest.mark.parametrize("normalize", ["batch", "global"])
def test_joined_importance_has_one_divisor_for_all_tables(normalize):
    parts = {"a": buffer_of(SCHEMA, 10), "b": buffer_of(SCHEMA, 20, seed=1)}
    for buffer in parts.values():
        buffer.configure(normalize=normalize)
    mixed = MixedBatch({name: buffer.sample(50) for name, buffer in parts.items()})
    joined = mixed.joined
    assert joined.divisor == max(part.divisor for part in mixed.values()) and joined.importance.max() <= 1.0 + 1e-6
    for name, rows in mixed.rows.items():
        part = mixed[name]
        np.testing.assert_allclose(joined.importance[rows] * joined.divisor, part.importance * part.divisor, rtol=1e-6)


def test_columns_that_differ_are_left_out_of_the_joined_batch():
    nested = {"obs": {"image": Column(np.uint8, (2, 2), "state"), "speed": Column(np.float32, (), "state")}}
    reward = {"reward": Column(np.float32, (), "reward")}
    first = Schema({**nested, **reward, "action": np.int32, "value": np.float32})
    second = Schema({**nested, **reward, "action": np.int64, "value": Column(np.float32, (), "plain")})
    mixed = MixedBatch({"a": buffer_of(first, 5).sample(2), "b": buffer_of(second, 5).sample(2)})
    assert set(mixed.joined) == {
        "obs.image", "obs.speed", "next_obs.image", "next_obs.speed",
        "reward", "discount", "importance", "ids", "steps", "age", "model_version",
    }  # fmt: skip
    assert mixed.joined.obs["image"].shape == (4, 2, 2) and mixed.joined.next_obs["speed"].shape == (4,)
    stacked = MixedBatch({"a": buffer_of(SCHEMA, 5).sample(2), "b": buffer_of(SCHEMA, 5, frame_stack=2).sample(2)})
    assert "obs" not in stacked.joined and stacked.joined.action.shape == (4,)


def test_what_makes_no_batch_is_not_joined():
    plain = buffer_of(SCHEMA, 8).sample(2)
    sequences = buffer_of(SCHEMA, 8, sequence_length=4).sample(2)
    wide = buffer_of(Schema({"obs": np.float32, "reward": Column(np.float32, (3,), "reward")}), 8).sample(2)
    with pytest.raises(ParameterError, match="sequence_length"):
        MixedBatch({"a": plain, "b": sequences}).joined  # noqa: B018
    with pytest.raises(ParameterError, match="tables need rewards of one shape"):
        MixedBatch({"a": plain, "b": wide}).joined  # noqa: B018
    with pytest.raises(ParameterError, match="at least one"):
        MixedBatch({})
    joined = MixedBatch({"a": sequences, "b": buffer_of(SCHEMA, 9, sequence_length=4).sample(1)}).joined
    assert joined.mask.shape == (3, 4) and joined.obs.shape == (3, 5, 4)


def test_priorities_of_a_mix_reach_each_table_in_either_form():
    parts = {"a": buffer_of(SCHEMA, 10), "b": buffer_of(SCHEMA, 20, seed=1)}
    mixed = MixedBatch({"a": parts["a"].sample(4), "b": parts["b"].sample(3)})

    def weights():
        return {name: parts[name].memory.weights(batch.ids).round(3).tolist() for name, batch in mixed.items()}

    def last_of(ids, errors):
        return [float(errors[max(np.flatnonzero(ids == each))]) for each in ids]

    errors = np.arange(1.0, 8.0) * 10
    for outcome in (mixed.update_priorities(errors), mixed.joined.update_priorities(errors[::-1]) and None):
        assert outcome in ((7, 0, 0, 0), None)
    assert weights() == {"a": last_of(mixed["a"].ids, errors[::-1][:4]), "b": last_of(mixed["b"].ids, errors[::-1][4:])}
    mixed.update_priorities({"b": np.full(3, 2.5)})
    assert weights()["b"] == [2.5] * 3 and weights()["a"] == last_of(mixed["a"].ids, errors[::-1][:4])
    before = weights()
    for wrong, message in (
        (np.ones(6), "as many TD errors as samples, 7"),
        (1.0, "as many TD errors"),
        ({"c": np.ones(3)}, "keyed by this batch's tables: 'a', 'b'"),
    ):
        with pytest.raises(ParameterError, match=message):
            mixed.update_priorities(wrong)
    assert weights() == before


@pytest.mark.parametrize(
    "sizes", [{}, {"online": 0}, {"online": 1.5}, {3: 4}, {"online": True}], ids=["none", "0", "1.5", "3", "True"]
)
def test_sizes_of_a_mix_are_checked(cluster, sizes):
    server = with_tables(cluster)
    for source in (server, cluster.reader([server])):
        with pytest.raises((ParameterError, WrongType)):
            next(source.batches(sizes))
