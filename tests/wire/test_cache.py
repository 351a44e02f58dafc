"""Containers: built ones hold the gathered entries of a memory, and received ones are checked to the last byte."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import containerkit
import make_vectors
from containerkit import SCHEMA
from memoire.errors import EmptyMemory, ProtocolError
from memoire.limits import Limits
from memoire.replay import batch
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables.caches.pool import Pool
from memoire.wire import _bytes, compression, containers
from memoire.wire.compression import _COMPRESS, codecs
from memoire.wire.layout import (
    ContainerLayout,
    cache_bytes,
    content_settings_hash,
    layout_of,
    usual_bytes,
)
from memoire.wire.parts import ALIGNMENT, BOOKKEEPING, ContainerKind, Part
from memory_checks import filled, with_episode

STACKED = Parameters(frame_stack=3, multi_step=2, discount=(0.5, 0.9), start="zero")
ONE_SIDED = STACKED.replace(prev=("state.image", "action", "qvest"), next=("state.speed", "reward", "value"))
SEQUENCES = Parameters(frame_stack=2, sequence_length=4, sequence_overlap=1, burn_in=2, start="zero")
KINDS = (ContainerKind.CACHE, ContainerKind.DRAWN, ContainerKind.EPISODE, ContainerKind.FEEDBACK)
GOLDEN = {
    "cache": ContainerKind.CACHE, "drawn": ContainerKind.DRAWN, "episode": ContainerKind.EPISODE, "feedback": ContainerKind.FEEDBACK,
    "sequences": ContainerKind.CACHE, "drawn_sequences": ContainerKind.DRAWN,
    "ragged": ContainerKind.CACHE, "ragged_drawn": ContainerKind.DRAWN, "ragged_episode": ContainerKind.EPISODE, "ragged_sequences": ContainerKind.CACHE,
    "rows": ContainerKind.ROWS,
}  # fmt: skip
VECTORS = Path(__file__).parents[1] / "vectors"


def golden(name: str) -> tuple[bytes, ContainerLayout]:
    data = (VECTORS / f"{name}.payload").read_bytes()
    return data, layout_of(*golden_settings(name), GOLDEN[name], final=True)


def golden_settings(name: str) -> tuple[Schema, Parameters]:
    if "sequences" in name:
        parameters = Parameters(sequence_length=3)
    else:
        parameters = Parameters(frame_stack=1 if "ragged" in name else 2, multi_step=2)
    if name == "rows":
        return make_vectors.ROWS, parameters
    return make_vectors.RAGGED if "ragged" in name else make_vectors.SCHEMA, parameters


def refused(payload: Any, layout: ContainerLayout, limits: Limits | None = None, **options: Any) -> str:
    try:
        containers.check(payload, layout, limits or Limits(), **options)
    except ProtocolError as problem:
        return problem.code
    return ""


def memory_of(parameters: Parameters, episodes: int = 4, steps: int = 15, seed: int = 0) -> Memory:
    rng, last = np.random.default_rng(seed), []

    def entry(_: int) -> tuple[Any, ...]:
        image, speed = rng.integers(0, 256, (3, 2)).astype(np.uint8), np.float32(rng.normal())
        last[:] = image, speed  # the last entry's state ends the episode
        return image, speed, *(rng.normal(size=2).astype(np.float32) for _ in range(3)), True

    memory = Memory(SCHEMA, 200, parameters, seed=seed)
    ends = {"final": lambda: tuple(last), "terminated": True}
    return filled(memory, entry, episodes=episodes, length=steps, model_version=3, **ends)


def same(left: batch.GatheredSamples, right: batch.GatheredSamples, ids: bool = False) -> None:
    for side in ("prev", "next"):
        one, other = getattr(left, side), getattr(right, side)
        assert list(one) == list(other)
        for name in one:
            assert one[name].dtype == other[name].dtype
            np.testing.assert_array_equal(one[name], other[name])
    for name in ("reward", "discount", "steps", "weight", "model_version", "mask", "max_share") + (
        ("ids",) if ids else ()
    ):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


@pytest.mark.parametrize("compression", ["none", "zlib", "lz4"])
@pytest.mark.parametrize(
    "parameters",
    [
        Parameters(), STACKED, ONE_SIDED, STACKED.replace(prev=(), next=()),
        SEQUENCES, SEQUENCES.replace(frame_stack=1, prev=("state.speed", "done")), SEQUENCES.replace(prev=()),
    ],
)  # fmt: skip
def test_a_built_cache_holds_what_the_memory_gathers(parameters: Parameters, compression: str) -> None:
    memory = memory_of(parameters.replace(compression=compression))
    payload = containers.build(memory, 100, now=123.5)
    held = containers.check(payload, layout_of(SCHEMA, parameters), checksum=_bytes.checksum(payload))
    total, positives, minimum = memory.sums()
    assert (held.samples, held.total_weight, held.positives, held.minimum) == (100, total, positives, minimum)
    assert (held.made_at, held.making, held.multi_step) == (
        123.5, content_settings_hash(SCHEMA, parameters), parameters.sequence_length or parameters.multi_step,
    )  # fmt: skip
    assert payload.ctypes.data % ALIGNMENT == 0
    pool = Pool(SCHEMA, parameters, seed=1)
    pool.add(b"client-number-01", 1, held)
    gathered = pool.get(100).gathered
    same(gathered, memory.gather(gathered.ids["number"]))
    assert gathered.ids["client"].tobytes() == b"client-number-01" * 100
    assert np.isfinite(gathered.age).all()


@pytest.mark.parametrize(
    "parameters",
    [Parameters(), Parameters(frame_stack=2, multi_step=3), SEQUENCES, SEQUENCES.replace(frame_stack=1)],
)
def test_a_cache_whose_samples_share_no_frame_is_about_as_large_as_usual(parameters: Parameters) -> None:
    """Columns are large compared with the other parts of a sample: index, weight, age and so on."""
    schema = Schema({"state": Column(np.float32, (500,), "state"), "action": Column(np.float32, (100,))})
    memory = Memory(schema, 20_000, parameters, seed=0)
    for _ in range(20):
        with_episode(memory, (np.ones((1000, 500), np.float32), np.ones((1000, 100), np.float32)))
    usual = usual_bytes(schema, parameters.replace(cache_size=50))
    assert 0.8 * usual < containers.build(memory, 50, now=0.0).nbytes < 1.2 * usual


@pytest.mark.parametrize(
    "parameters",
    [
        Parameters(),
        Parameters(frame_stack=3, multi_step=2),
        Parameters(frame_stack=2, multi_step=5),
        SEQUENCES,
        Parameters(next=("action",)),
        Parameters(prev=("action",)),
    ],
)
def test_the_largest_cache_has_just_as_many_bytes_as_is_known_before(parameters: Parameters) -> None:
    schema = Schema({"state": Column(np.float32, (3,), "state"), "action": Column(np.int16), "reward": np.float32})
    memory = Memory(schema, 20_000, parameters, seed=0)
    values = np.ones((50, 3), np.float32), np.ones(50, np.int16), np.ones(50, np.float32)
    for _ in range(400):
        with_episode(memory, values, terminated=True, final_state=np.ones(3, np.float32))
    largest = max(containers.build(memory, 4, now=0.0).nbytes for _ in range(40))
    assert largest == cache_bytes(schema, parameters, 0, 4)
    assert cache_bytes(schema, parameters, 1, 400) < cache_bytes(schema, parameters, 0, 400)


def test_blocks_take_just_their_bytes() -> None:
    layout = layout_of(SCHEMA, Parameters())
    container = containers.ContainerWriter(layout, containers.ContainerHead(), 4, 4)
    with pytest.raises(ValueError, match=r"takes 32 contiguous bytes, got 40"):
        container.fill(Part.NUMBER, np.zeros(5, np.int64))
    with pytest.raises(IndexError):
        container.fill_blocks({99: np.zeros(4)})
    with pytest.raises(ValueError, match="rows are more than an index of 32 bits"):
        containers.ContainerWriter(layout, containers.ContainerHead(), 2**32)
    large = Schema({"state": (np.uint8, (1 << 25,))})
    with pytest.raises(MemoryError, match="a container of 144115"):
        containers.ContainerWriter(layout_of(large, Parameters()), containers.ContainerHead(), 1, 2**32 - 1)


def test_an_empty_memory_builds_no_cache() -> None:
    with pytest.raises(EmptyMemory):
        containers.build(Memory(SCHEMA, 10), 5, now=0.0)


def test_a_compression_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = containers.build(memory_of(STACKED), 50, now=0.0, compression="lz4")
    assert any(row.codec == 2 for row in containers.table(payload))
    assert codecs() == ["zlib", "lz4"]
    monkeypatch.setattr(compression, "_lz4", None)
    assert codecs() == ["zlib"]
    with pytest.raises(ValueError, match="compression must be one of none, zlib, which are available here, got 'lz4'"):
        containers.build(memory_of(STACKED), 5, now=0.0, compression="lz4")
    with pytest.raises(ProtocolError, match="packed by lz4, which is not installed: pip install"):
        containers.check(payload, layout_of(SCHEMA, STACKED))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_containers_are_accepted_and_hold_what_the_json_says(name: str) -> None:
    data, layout = golden(name)
    held = containers.check(data, layout)
    expected = json.loads((VECTORS / "vectors.json").read_text())["containers"][name]
    assert expected["kind"] == layout.kind.name
    rows, blocks = containers.table(data), [block["hex"] for block in expected["blocks"]]
    assert [data[row.offset : row.offset + row.stored].hex() for row in rows] == blocks
    assert [held.block(i).hex() for i in range(len(layout.blocks))] == blocks
    assert [(form.column, form.part.name) for form in layout.blocks] == [
        (block["column"], block["part"]) for block in expected["blocks"]
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parameters", [Parameters(), ONE_SIDED, SEQUENCES, SEQUENCES.replace(prev=("done",))])
def test_containers_of_every_kind_hold_what_was_put_in(kind: ContainerKind, parameters: Parameters) -> None:
    layout = layout_of(SCHEMA, parameters, kind, final=True)
    built = containerkit.make(layout, 9, seed=4)
    held = built.held()
    for i, form in enumerate(layout.blocks):
        name = None if form.column == BOOKKEEPING else SCHEMA.names[form.column]
        assert held.block(i) == built.block(form.part, name).tobytes()


@pytest.mark.parametrize("name", GOLDEN)
def test_a_container_cut_or_lengthened_anywhere_is_refused(name: str) -> None:
    data, layout = golden(name)
    for size in range(len(data)):
        assert refused(data[:size], layout)
        with pytest.raises(ProtocolError):
            containers.table(data[:size])
    assert refused(data + b"\0", layout) == "container"


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_a_flipped_bit_is_found_by_the_checksum_and_never_breaks_the_check(name: str) -> None:
    data, layout = golden(name)
    right = _bytes.checksum(data)
    room = bytearray(data)
    for at in range(len(data)):
        for bit in range(8):
            room[at] ^= 1 << bit
            refused(bytes(room), layout)
            if bit == at % 8:
                assert refused(bytes(room), layout, checksum=right) == "payload"
            room[at] ^= 1 << bit


@pytest.mark.parametrize("value", [2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize("name", GOLDEN)
def test_absurd_sizes_allocate_nothing(name: str, value: int) -> None:
    data, layout = golden(name)
    tracemalloc.start()
    for i in range(len(layout.blocks)):
        for offset, width in ((4, 4), (8, 8), (16, 8), (24, 8)):
            room = bytearray(data)
            at = 64 + 32 * i + offset
            room[at : at + width] = (value & (2 ** (8 * width) - 1)).to_bytes(width, "little")
            assert refused(room, layout) in ("container", "schema"), (i, offset)
    for offset, width in ((0, 4), (40, 4)):
        room = bytearray(data)
        room[offset : offset + width] = (value & 0xFFFFFFFF).to_bytes(width, "little")
        assert refused(room, layout)
    assert tracemalloc.get_traced_memory()[1] < 300_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("part", "value", "code"),
    [
        (Part.CHANCE, 0.0, "value"),
        (Part.CHANCE, 1.1, "value"),
        (Part.POPULATION, 0.0, "value"),
        (Part.OWNER, 2, "index"),
    ],
)
def test_drawn_values_outside_their_range_are_refused(part: Part, value: float, code: str) -> None:
    layout = layout_of(SCHEMA, STACKED, ContainerKind.DRAWN)
    values = np.array(containerkit.make(layout, 6).block(part))
    values[3] = value
    assert refused(containerkit.make(layout, 6, replace={part: values}).payload, layout) == code


SUMS = {
    8: ("<d", (0.0, -1.0, np.nan, np.inf)),
    16: ("<Q", (0, 2**53)),
    24: ("<d", (0.0, np.nan, 2000.0)),
    48: ("<d", (np.nan, -1.0)),
}
"""Formats of numbers, and refused values, by offset."""


@pytest.mark.parametrize(
    ("offset", "form", "value"), [(at, form, value) for at, (form, values) in SUMS.items() for value in values]
)
def test_sums_outside_their_range_are_refused(offset: int, form: str, value: float) -> None:
    layout = layout_of(SCHEMA, STACKED)
    payload = containerkit.make(layout, 6).payload.copy()
    struct.pack_into(form, payload.data, offset, value)
    assert refused(payload, layout) == "value"


@pytest.mark.parametrize("codec", [1, 2])
def test_damaged_packed_blocks_are_refused(codec: int) -> None:
    layout = layout_of(SCHEMA, STACKED)
    data = bytes(containerkit.make(layout, 6, codec=codec).payload)
    row = next(row for row in containers.table(data) if row.codec)
    for at in range(row.offset, row.offset + row.stored):
        room = bytearray(data)
        room[at] ^= 0x55
        assert refused(room, layout) in ("codec", "")
    room = bytearray(data)
    room[row.offset : row.offset + row.stored] = bytes(row.stored)
    assert refused(room, layout) == "codec"


@pytest.mark.parametrize("codec", [1, 2])
def test_a_bomb_is_refused_before_it_is_unpacked(codec: int) -> None:
    schema = Schema({"obs": (np.uint8, (1 << 20,))})
    layout = layout_of(schema, Parameters())
    big = np.zeros((1, 40 << 20), np.uint8)
    packed = {len(layout.blocks) - 1: (codec, _COMPRESS[codec](big[0]))}
    form = containers.ContainerWriter(layout, containers.ContainerHead(1, 1.0, 1, 0.5), 20, 40, packed=packed)
    for part, value in ((Part.WEIGHT, 0.5), (Part.STEPS, 1)):
        array = form.array(part, "<f8" if part is Part.WEIGHT else "<u4")
        assert array is not None
        array[:] = value
    for part in (Part.PREV_INDEX, Part.NEXT_INDEX, Part.NUMBER, Part.DISCOUNT, Part.AGE, Part.MODEL):
        array = form.array(part, "u1")
        assert array is not None
        array[:] = 0
    del big
    assert refused(form.payload, layout) == ""
    tracemalloc.start()
    assert refused(form.payload, layout, Limits(message_bytes=30 << 20)) == "too_large"
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    place = next(i for i, row in enumerate(containers.table(form.payload)) if row.codec)
    # The row declares 20 frames, but packs 40 MiB: no more than the 20 MiB are unpacked.
    struct.pack_into("<I", form.payload.data, 64 + 32 * place + 4, 20)
    struct.pack_into("<Q", form.payload.data, 64 + 32 * place + 24, 20 << 20)
    assert refused(form.payload, layout) == "codec"
    assert tracemalloc.get_traced_memory()[1] < 45 << 20
    tracemalloc.stop()


@settings(max_examples=300)
@given(st.sampled_from(sorted(GOLDEN)), st.integers(0, 2000), st.binary(min_size=1, max_size=64))
def test_overwritten_bytes_are_accepted_or_refused(name: str, at: int, patch: bytes) -> None:
    data, layout = golden(name)
    at %= len(data)
    room = bytearray(data)
    room[at : at + len(patch)] = patch[: len(data) - at]
    if refused(room, layout) == "" and layout.kind in (ContainerKind.CACHE, ContainerKind.SEQUENCES):
        pool = Pool(*golden_settings(name), seed=0)
        try:
            pool.add(make_vectors.CLIENT, 1, containers.check(room, pool.layout))
        except ProtocolError as error:
            assert error.code == "parameters"  # the patch changes the parameters of the samples
            return
        picks = pool.get(2)  # accepted bytes can always be gathered
        assert np.isfinite(picks.importance).all()


@given(st.binary(max_size=2000))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert refused(data, golden("cache")[1])


def test_feedback_goes_to_each_client_by_its_own_numbers() -> None:
    ids = np.zeros(5, batch.ID)
    ids["client"] = [[1, 2], [3, 4], [1, 2], [3, 4], [3, 4]]
    ids["number"] = [10, 11, 12, 13, 14]
    payload = containers.pack_feedback(SCHEMA, ids, np.arange(5, dtype=np.float32), now=1.0)
    feedback = containers.read_feedback(payload, SCHEMA)
    one, other = (np.array(pair, "<u8").tobytes() for pair in ([1, 2], [3, 4]))
    assert {name: (numbers.tolist(), errors.tolist()) for name, (numbers, errors) in feedback.items()} == {
        one: ([10, 12], [0.0, 2.0]),
        other: ([11, 13, 14], [1.0, 3.0, 4.0]),
    }
    with pytest.raises(ProtocolError):
        containers.read_feedback(containers.pack_feedback(SCHEMA, ids, np.full(5, np.nan, np.float32)), SCHEMA)


@pytest.mark.parametrize("clients", [32, 33, 70])
def test_samples_of_any_number_of_clients_are_grouped_by_client(clients: int) -> None:
    ids = np.zeros(3 * clients, batch.ID)
    ids["client"][:, 1] = np.arange(3 * clients)[::-1] % clients
    order, begins = batch.grouped_by_client(ids)
    assert ids["client"][order, 1].tolist() == np.repeat(np.arange(clients), 3).tolist()
    assert begins.tolist() == list(range(0, 3 * clients, 3)) and (np.diff(order.reshape(-1, 3)) > 0).all()


def test_the_page_names_every_part_and_kind() -> None:
    page = (VECTORS.parent.parent / "docs" / "development" / "wire.md").read_text(encoding="utf-8")
    for part in Part:
        assert any(
            f"{part.value}" in line.split("|")[1] and part.name in line for line in page.splitlines() if "|" in line
        )
    for kind in ContainerKind:
        assert kind.name in page
