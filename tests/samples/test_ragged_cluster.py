"""Ragged columns in a cluster: caches carry values of any length without padding, and are checked to the last of them."""

import struct
import tracemalloc

import numpy as np
import pytest

import containers
from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables import draws as picked
from memoire.tables.caches import _draw
from memoire.tables.caches.pool import Pool
from memoire.tables.table import Table
from memoire.wire import _bytes
from memoire.wire import containers as pack
from memoire.wire import containers as unpack
from memoire.wire.compression import _COMPRESS
from memoire.wire.layout import ContainerLayout, layout_of
from memoire.wire.parts import ContainerKind, Part
from memories import filled
from netkit import pool_in, until
from poolkit import held_of

SCHEMA = Schema(
    {
        "obs": {"cloud": Column(np.float32, (None, 3), "state"), "speed": np.float32},
        "action": np.int32,
        "reward": np.float32,
        "words": Column(np.int16, (None,)),
    }
)
CHOICES = [
    Parameters(),
    Parameters(frame_stack=3, multi_step=2, start="zero", next=("obs.cloud", "words")),
    Parameters(prev=("words", "action"), next=("obs.cloud",)),
    Parameters(prev=("obs.cloud",), next=()),
    Parameters(frame_stack=2, sequence_length=4, sequence_overlap=1, start="zero"),
    Parameters(sequence_length=3, sequence_first=("words",)),
]


def entry(rng, step: int):
    cloud = rng.integers(0, 4, (rng.integers(0, 6), 3)).astype(np.float32)
    return cloud, float(step), step, 1.0, np.arange(step % 5)


def memory_of(parameters: Parameters, seed: int = 0) -> Memory:
    memory, rng = Memory(SCHEMA, 200, parameters, seed=seed), np.random.default_rng(seed)
    ends = {"final": lambda: entry(rng, 99)[:2], "terminated": True}
    return filled(memory, lambda step: entry(rng, step), episodes=4, length=15, **ends)


def same(one, other) -> None:
    for side in ("prev", "next", "prev_lengths", "next_lengths"):
        left, right = getattr(one, side), getattr(other, side)
        assert sorted(left) == sorted(right)
        for name in left:
            assert left[name].dtype == right[name].dtype
            np.testing.assert_array_equal(left[name], right[name])
    for name in ("reward", "discount", "steps", "weight", "mask"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("compression", ["none", "zlib", "lz4"])
@pytest.mark.parametrize("parameters", CHOICES)
def test_a_built_cache_of_ragged_columns_holds_what_the_memory_gathers(parameters, compression) -> None:
    memory = memory_of(parameters.replace(compression=compression))
    payload = pack.build(memory, 100, now=1.0)
    pool = Pool(SCHEMA, parameters, seed=1)
    pool.add(b"client-number-01", 1, unpack.check(payload, pool.layout, checksum=_bytes.checksum(payload)))
    gathered = pool.get(40).gathered
    same(gathered, memory.gather(gathered.ids["number"]))


@pytest.mark.parametrize("parameters", CHOICES)
def test_what_a_reader_draws_is_what_the_pool_holds(parameters) -> None:
    memory = memory_of(parameters)
    pool = Pool(SCHEMA, parameters, seed=1)
    pool.add(b"client-number-01", 1, unpack.check(pack.build(memory, 60, now=1.0), pool.layout))
    layouts = [layout_of(SCHEMA, parameters, kind) for kind in (ContainerKind.CACHE, ContainerKind.DRAWN)]
    client = held_of(pool)[0]
    picks = pool._queues.held.take(layouts[0].core, b"reader", [(client, 25)], True)
    drawn = unpack.check(picked.pack_drawn(picks, *layouts, now=2.0), layouts[1])
    one = np.ones(1)
    assembled = _draw.assemble(layouts[1].core, [drawn], [one], [one], 1.0, 0.0, 1.0, 7)
    gathered = layouts[1].allocate(assembled.size)
    layouts[1].gather(assembled, gathered)
    assert assembled.size == 25
    same(gathered, memory.gather(gathered.ids["number"]))


def lengths_block(layout: ContainerLayout, part: Part = Part.FRAMES_LENGTHS) -> int:
    place = layout.place(part, "obs.cloud")
    assert place is not None
    return place


@pytest.mark.parametrize("value", [0, 5, 1 << 22, (1 << 32) - 1])
def test_lengths_that_do_not_add_up_to_the_values_are_refused(value) -> None:
    layout = layout_of(SCHEMA, Parameters())
    payload = bytearray(containers.make(layout, 6).payload)
    row = unpack.table(payload)[lengths_block(layout)]
    assert struct.unpack_from("<I", payload, row.offset + 4)[0] not in (value, 0)
    struct.pack_into("<I", payload, row.offset + 4, value)
    tracemalloc.start()
    with pytest.raises(ProtocolError, match=r"the lengths of block \d+ reach \d+ bytes") as caught:
        unpack.check(payload, layout)
    assert caught.value.code == "index"
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_values_larger_than_a_message_may_be_are_refused_before_they_are_unpacked() -> None:
    layout = layout_of(Schema({"obs": Column(np.uint8, (None,), "state")}), Parameters())
    zeros = np.zeros(40 << 20, np.uint8)
    place = layout.place(Part.FRAMES, "obs")
    assert place is not None
    packed = {place: (1, _COMPRESS[1](zeros))}
    made = pack.Container(layout, pack.ContainerHead(1, 1.0, 1, 0.5), 1, 2, packed=packed, elements={place: len(zeros)})
    for part, value, dtype in ((Part.WEIGHT, 0.5, "<f8"), (Part.STEPS, 1, "<u4")):
        array = made.array(part, dtype)
        assert array is not None
        array[:] = value
    for part in (Part.PREV_INDEX, Part.NEXT_INDEX, Part.NUMBER, Part.DISCOUNT, Part.AGE, Part.MODEL):
        array = made.array(part, "u1")
        assert array is not None
        array[:] = 0
    made.fill(Part.FRAMES_LENGTHS, np.array([20 << 20, 20 << 20], "<u4"), "obs")
    assert unpack.check(made.payload, layout).samples == 1
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="unpacked it has"):
        unpack.check(made.payload, layout, Limits(message_bytes=30 << 20))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def play(client, episodes: int = 3, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    writer = client.writer()
    state = {"cloud": entry(rng, 0)[0], "speed": 0.0}
    for step in range(1, 20 * episodes + 1):
        after = {"cloud": entry(rng, 0)[0], "speed": float(step)}
        writer.step(state, step, 1.0, step % 20 == 0, False, after, words=np.full(step % 5, step % 100))
        state = after


def right(batch) -> None:
    """What belongs together came together: the cloud of a speed is that of the same step, words say which step it is."""
    assert len(np.unique(batch["obs.speed"])) > 5
    for i in range(len(batch.ids)):
        words = batch.words[i, : batch.words_length[i]]
        assert batch.words_length[i] == batch.action[i] % 5 and (words == batch.action[i] % 100).all()
        assert not batch.words[i, batch.words_length[i] :].any()
        assert not batch["obs.cloud"][i, batch["obs.cloud_length"][i] :].any()
    assert batch["obs.cloud"].shape[1] == batch["next_obs.cloud"].shape[1]


@pytest.mark.parametrize("storage", ["caches", "episodes"])
def test_servers_proxies_and_readers_carry_ragged_columns(cluster, storage) -> None:
    table = Table(SCHEMA, parameters=Parameters(cache_size=512, compression="zlib"), storage=storage)
    server = cluster.server(schema=None, tables={"clouds": table, "more": Table(SCHEMA)})
    proxy = cluster.proxy([server])
    reader = cluster.reader([proxy], table="clouds")
    for name, seed in (("clouds", 0), ("more", 1)):
        client = cluster.client(proxy, table=name)
        play(client, seed=seed)
        assert client.storage == "episodes" or client.push_cache(100.0)
        until(lambda client=client: client.update(100.0) is None and client.stats().in_flight_caches == 0)
        if name == "clouds":
            own = client.memory if storage == "caches" else pool_in(server, "clouds").memory
    assert own.num_entries == 60
    for batch in (server.table("clouds").get_batch(16, 100.0), next(reader.batches(16, 100.0))):
        right(batch)
        expected = own.gather(batch.ids["number"])
        np.testing.assert_array_equal(batch["obs.cloud_length"], expected.prev_lengths["obs.cloud"][:, 0])
        np.testing.assert_array_equal(batch["obs.cloud"], expected.prev["obs.cloud"][:, 0])
        batch.update_priorities(np.ones(16))
    mixed = next(server.batches({"clouds": 8, "more": 8}, 100.0))
    right(mixed.joined)
    np.testing.assert_array_equal(
        mixed.joined["obs.cloud_length"], np.concatenate([part["obs.cloud_length"] for part in mixed.values()])
    )
