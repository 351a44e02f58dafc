"""Targets for input from the wire: messages, containers of arrays, models."""

import random
import struct
from pathlib import Path

import numpy as np

import make_vectors
from fuzz.choices import Choices
from memoire.errors import EmptyMemory, NotEnoughSamples, ParameterError, ProtocolError, WrongModel
from memoire.limits import Limits
from memoire.models.model import ModelAssembly, ModelStore, StaleVersion, check_topic, make
from memoire.models.tensors import ITEM_BYTES, Array, pack, unpack
from memoire.models.topics import Topics
from memoire.replay.batch import GatheredSamples
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.tables.caches.pool import Pool
from memoire.tables.draws import PooledBatch, build_batch, plan
from memoire.tables.episodes.pool import EpisodePool
from memoire.wire import _bytes, containers, messages, row_container
from memoire.wire.compression import codecs
from memoire.wire.frames import CODES, HEADER_BYTES, encode, parse, parse_notice, refusal
from memoire.wire.layout import layout_of
from memoire.wire.messages import Refusal
from memoire.wire.parts import ContainerKind, Part
from memoire.wire.rows import CLIENT_COUNTS, CLIENT_SUMS, unpack_sums

from .engine import target

LIMITS = Limits.of(tail_bytes=1 << 15, request_bytes=1 << 15, message_bytes=1 << 16)
VECTORS = Path(__file__).parent.parent / "vectors"


def seeds_of_wire_message() -> list[bytes]:
    """Return the golden messages, each as it is and with corrections."""
    seeds = []
    for path in sorted(VECTORS.glob("*.0")):
        head, second = path.read_bytes(), path.with_suffix(".1")
        payload = second.read_bytes() if second.exists() else b""
        seeds += [bytes([flags]) + struct.pack("<H", len(head)) + head + payload for flags in (0, 2, 3)]
    return seeds


def frames_of(data: bytes) -> tuple[list[bytes], int]:
    flags, (size,) = data[0], struct.unpack_from("<H", data, 1)
    head, payload = bytearray(data[3 : 3 + size]), data[3 + size :]
    if len(head) >= HEADER_BYTES:
        if flags & 1:
            struct.pack_into("<Q", head, 64, len(payload))
            struct.pack_into("<I", head, 80, len(head) - HEADER_BYTES)
        if flags & 2:
            struct.pack_into("<Q", head, 72, _bytes.checksum(payload) if payload else 0)
            tail = memoryview(head)[HEADER_BYTES:]
            struct.pack_into("<Q", head, 88, _bytes.checksum(tail, _bytes.checksum(memoryview(head)[:88])))
            del tail
    return [bytes(head), *([payload] if payload else [])], flags


@target(
    seeds_of_wire_message,
    {"taken", "tail", "checksum", "short", "long", "magic", "size", "frames", "type", "flags", "payload"},
)
def wire_message(data: bytes) -> str:
    """Parse the frames of a message: ProtocolError, or a message that can be sent on unchanged.

    1 byte   corrections before the frames are parsed: 1 lengths, 2 checksums; 4: a notice, with its topic in front
    2 bytes  length of frame 0, little endian; then frame 0, and frame 1 if any bytes are left
    """
    if len(data) < 3:
        return "too short to be one"
    frames, flags = frames_of(data)
    refusal(frames, Refusal(code="version"))
    try:
        if flags & 4:
            topic = b"policy\x00"
            message = parse_notice([topic, *frames], LIMITS)
        else:
            message = parse(frames, LIMITS)
    except ProtocolError as error:
        assert error.code in CODES and len(str(error)) < 2000
        return error.code
    header = message.header
    names = ("client", "sequence", "run", "home", "table", "fingerprint")
    encoded = encode(message.body, payload=message.payload, **{name: getattr(header, name) for name in names})
    again = parse(encoded)
    assert again.header.client == header.client and again.type is message.type
    assert encode(again.body, payload=again.payload)[0] == encode(message.body, payload=message.payload)[0]
    return "taken"


CONTAINER_LIMITS = Limits(message_bytes=1 << 20)
WINDOWS, SEQUENCES = Parameters(frame_stack=2, multi_step=2), Parameters(sequence_length=3)
RAGGED = Parameters(multi_step=2)
KINDS = (
    ("cache", make_vectors.SCHEMA, WINDOWS, ContainerKind.CACHE),
    ("drawn", make_vectors.SCHEMA, WINDOWS, ContainerKind.DRAWN),
    ("episode", make_vectors.SCHEMA, Parameters(), ContainerKind.EPISODE),
    ("feedback", make_vectors.SCHEMA, Parameters(), ContainerKind.FEEDBACK),
    ("sequences", make_vectors.SCHEMA, SEQUENCES, ContainerKind.CACHE),
    ("drawn_sequences", make_vectors.SCHEMA, SEQUENCES, ContainerKind.DRAWN),
    ("ragged", make_vectors.RAGGED, RAGGED, ContainerKind.CACHE),
    ("ragged_drawn", make_vectors.RAGGED, RAGGED, ContainerKind.DRAWN),
    ("ragged_episode", make_vectors.RAGGED, Parameters(), ContainerKind.EPISODE),
    ("ragged_sequences", make_vectors.RAGGED, SEQUENCES, ContainerKind.CACHE),
    ("rows", make_vectors.ROWS, Parameters(), ContainerKind.ROWS),
)
"""Golden containers, each with its schema, parameters and kind."""
ME, READER = b"m" * 16, b"r" * 16


def seeds_of_container() -> list[bytes]:
    seeds = [bytes([i]) + (VECTORS / f"{kind[0]}.payload").read_bytes() for i, kind in enumerate(KINDS)]
    for compression in codecs():
        memory = Memory(make_vectors.SCHEMA, 64, WINDOWS.replace(cache_size=24, compression=compression), seed=0)
        memory.open()
        for step in range(40):
            memory.add(0, (np.full(2, step // 20, np.uint8), np.int32(step), np.float32(1.0)))
        memory.close()
        seeds.append(b"\0" + containers.build(memory, now=1.0).tobytes())
    return seeds


@target(
    seeds_of_container,
    {"cache", "drawn", "episode", "feedback", "rows", "container", "value", "index", "parameters", "schema"},
    IN_PLACE=0.8,
)
def container(data: bytes) -> str:
    """Check a container: ProtocolError, or samples with which all uses succeed.

    1 byte   expected kind of container; the rest is the payload
    """
    if not data:
        return "nothing"
    _, schema, parameters, kind = KINDS[data[0] % len(KINDS)]
    payload = data[1:]
    uses = {
        ContainerKind.CACHE: _use_cache,
        ContainerKind.DRAWN: _use_drawn,
        ContainerKind.EPISODE: _use_episode,
        ContainerKind.FEEDBACK: _use_feedback,
        ContainerKind.ROWS: _use_rows,
    }
    try:
        containers.table(payload)
    except ProtocolError:
        pass  # `table` checks sizes only: the payload may still be refused below
    try:
        uses[kind](payload, schema, parameters)
    except ProtocolError as error:
        assert error.code in CODES and len(str(error)) < 1000
        return error.code
    return kind.name.lower()


def _use_rows(payload, schema, parameters):
    columns, rows = row_container.unpack_rows(payload, schema, CONTAINER_LIMITS)
    packed = row_container.pack_rows(schema, columns, rows)
    again, _ = row_container.unpack_rows(packed, schema, CONTAINER_LIMITS)
    for name, values in columns.items():
        one, other = (getattr(each, "values", each) for each in (values, again[name]))
        assert len(values) == rows and np.array_equal(one, other)


def _use_cache(payload, schema, parameters):
    pool = Pool(schema, parameters, seed=0, byte_limit=1 << 21)
    held = containers.check(payload, pool.layout, CONTAINER_LIMITS)
    samples = held.samples
    pool.add(ME, 1, held)
    rows = pool.reserve(READER, samples)
    assert len(unpack_sums(rows.tobytes())) == 1
    counts = np.zeros(1, CLIENT_COUNTS)
    counts["client"], counts["count"] = rows["client"], samples // 2
    drawn = pool.draw_counts(READER, counts)
    planned = plan([rows], 1, 0.5)
    if drawn is not None:  # readers must accept all that servers send
        layout = layout_of(schema, parameters, ContainerKind.DRAWN)
        if planned is not None:
            _look_at(build_batch(planned, [containers.check(drawn, layout)], layout, parameters, 0, 0.4), samples // 2)
    pool.reserve(READER, 0)
    _look_at(pool.get(samples - samples // 2), samples - samples // 2)
    try:
        pool.get(1)
    except NotEnoughSamples:
        pass
    else:
        raise AssertionError("a sample was drawn twice")


def _look_at(pooled: PooledBatch, samples: int) -> None:
    gathered: GatheredSamples = pooled.gathered
    for side in (gathered.prev, gathered.next):
        for array in side.values():
            assert len(array) == samples
            array.tobytes()
    assert (gathered.weight >= 0.0).all() and (gathered.steps >= 1).all()  # a float64 may be infinite in float32
    assert np.isfinite(pooled.importance).all() and (pooled.importance >= 0.0).all()


def _use_drawn(payload, schema, parameters):
    layout = layout_of(schema, parameters, ContainerKind.DRAWN)
    held = containers.check(payload, layout, CONTAINER_LIMITS)
    owners = held.part(Part.OWNERS)
    rows = np.zeros(len({owners[i : i + 16] for i in range(0, len(owners), 16)}), CLIENT_SUMS)
    rows["client"] = np.unique(np.frombuffer(owners, "<u8").reshape(-1, 2), axis=0)
    rows["total_weight"], rows["positives"], rows["minimum"], rows["reserved"] = 5.0, 3, 0.5, 100
    planned = plan([rows], 2, 0.5)
    assert planned is not None
    _look_at(build_batch(planned, [held], layout, parameters, 7, 0.4), held.samples)


def _use_episode(payload, schema, parameters):
    pool = EpisodePool(schema, parameters, capacity=64, byte_limit=1 << 18, seed=0)
    body = messages.EpisodePush(has_final=True, terminated=True)
    checked = pool.check(body, payload, limits=CONTAINER_LIMITS)
    pool.add(ME, 1, checked)
    try:
        pooled = pool.get(8)
    except (NotEnoughSamples, EmptyMemory):
        return  # no entry has a weight
    _look_at(pooled, 8)


def _use_feedback(payload, schema, parameters):
    for owner, (numbers, errors) in containers.read_feedback(payload, schema, CONTAINER_LIMITS).items():
        assert len(owner) == 16 and len(numbers) == len(errors) and np.isfinite(errors).all()


MODEL_BODY_WORDS = (
    b'"F32"', b'"BF16"', b'"BOOL"', b'"shape"', b'"data_offsets"', b"[0,24]", b"[2,3]", b"[]", b"-1", b"9" * 300,
    b"NaN", b"{",
)  # fmt: skip


def _array(dtype: str, *shape: int) -> Array:
    size = ITEM_BYTES[dtype]
    for length in shape:
        size *= length
    return Array(dtype, shape, memoryview(bytes(size)))


def seeds_of_model_body() -> list[bytes]:
    deep = b"[" * 100_000
    return [
        pack({"w": _array("F32", 2, 3), "b": _array("BF16", 3), "seen": _array("I64")}),
        pack({name: _array(name, 2) for name in ITEM_BYTES}),
        pack({"none": _array("U8", 0, 2**40)}),
        pack({str(place): _array("U8") for place in range(500)}),
        len(deep).to_bytes(8, "little") + b"{" + deep,
        b"\x80\x04K\x01.",
    ]


@target(seeds_of_model_body, {"taken", "refused"}, MODEL_BODY_WORDS)
def model_body(data: bytes) -> str:
    """Unpack a model's body of named arrays: WrongModel, or arrays that pack into an equal body."""
    try:
        arrays = unpack(data)
    except WrongModel as error:
        str(error)
        return "refused"
    assert sum(each.data.nbytes for each in arrays.values()) <= len(data)
    try:
        again = unpack(pack(arrays))
    except ValueError:  # a name with half of a surrogate pair, which JSON can hold
        return "taken"
    assert {name: (a.dtype, a.shape, bytes(a.data)) for name, a in again.items()} == {
        name: (a.dtype, a.shape, bytes(a.data)) for name, a in arrays.items()
    }
    return "taken"


MODEL_TRANSFER_LIMITS = Limits.of(model_bytes=1000, inline_model=100, model_chunk=30, model_window=3, model_spread=0.0)
BODY = bytes(range(200))
CHECKSUM = _bytes.checksum(BODY)


def seeds_of_model_transfer() -> list[bytes]:
    rng = random.Random(1)
    return [rng.randbytes(500) for _ in range(32)]


def _assemble(choices: Choices) -> None:
    """Assemble a model from chunks in any order and of any size."""
    try:
        assembly = ModelAssembly(
            "policy", 1, choices.pick((200, 200, 0, 1001, 2**53)), choices.pick((CHECKSUM, CHECKSUM, 0)),
            bool(choices.below(2)), byte_limit=MODEL_TRANSFER_LIMITS.model_bytes, early=4,
        )  # fmt: skip
    except ProtocolError:
        return
    for _ in range(12):
        at = assembly.offset if choices.below(3) else choices.integer(0, 2**53 - 1)
        try:
            model = assembly.add(
                at, BODY[at : at + choices.below(60)] if choices.below(8) else b"x" * choices.below(60)
            )
        except ProtocolError:
            return
        if model is not None:
            assert _bytes.checksum(model.body) == model.checksum and len(model.body) == assembly.size
            return


def _store(choices: Choices) -> None:
    store = ModelStore(MODEL_TRANSFER_LIMITS.model_bytes, keep=2, clock=lambda: 1.0)
    for _ in range(10):
        topic = choices.pick(("a", "b", "c" * 255))
        try:
            model = make(topic, BODY[: choices.below(200)], 0)
            version = choices.integer(0, 2**53 - 1)
            (store.add(model, version), store.serve(topic, version)) if choices.below(3) else store.forget(topic)
        except (StaleVersion, ParameterError):
            pass
        store.check_invariants()
    try:
        check_topic(choices.text())
    except ParameterError:
        pass


def _follow(choices: Choices) -> str:
    """Follow a topic under arbitrary notices and chunks; return "delivered" or "nothing"."""
    asked = []
    now = [0.0]
    seen = []
    topics = Topics(
        MODEL_TRANSFER_LIMITS, lambda *question: asked.append(question), lambda topic, on: True, lambda function: function(),
        lambda model, *_: seen.append(model), lambda *_: None, rng=random.Random(0), clock=lambda: now[0],
    )  # fmt: skip
    topics.follow_topic("policy")
    for _ in range(40):
        now[0] += choices.pick((0.0, 0.0, 0.0, 0.01, 0.01, 1.0, 20.0))
        if asked and choices.below(8):
            topic, version, offset, _, done = asked.pop(0 if choices.below(6) else choices.below(len(asked)))
            done(_answer(choices, topic, version, offset))
        else:
            size = choices.pick((200, 200, 5, 0, 1001))
            fields = {
                "topic": "policy",
                "version": choices.pick((1, 1, 2, 3, 2**53 - 1)),
                "size": size,
                "checksum": CHECKSUM,
            }
            notice = messages.Notice(**fields, epoch=choices.below(3), text=bool(choices.below(2)))
            inline = BODY[:size] if choices.below(2) and size <= MODEL_TRANSFER_LIMITS.get("inline_model") else None
            try:
                message = parse(encode(notice, payload=inline or None))
                topics.receive_notice(message.body, message.payload, choices.below(3))
            except ProtocolError:
                pass
        topics.tick()
    for model in seen:
        assert _bytes.checksum(model.body) == model.checksum
    return "delivered" if seen else "nothing"


def _answer(choices: Choices, topic: str, version: int, offset: int) -> object:
    if not choices.below(30):
        return ProtocolError("missing", "gone")
    body = BODY[offset : offset + (30 if choices.below(20) else choices.pick((7, 0)))]
    fields = {
        "topic": topic,
        "version": version or choices.pick((1, 2, 2**53 - 1)),
        "size": 200 if choices.below(20) else 90,
    }
    chunk = messages.Chunk(
        **fields, checksum=CHECKSUM, offset=offset if choices.below(20) else choices.integer(0, 2**53 - 1)
    )
    return parse(encode(chunk, payload=body or None))


@target(seeds_of_model_transfer, {"delivered", "nothing"})
def model_transfer(data: bytes) -> str:
    """Transfer a model to a follower of its topic, under arbitrary notices and chunks of a server.

    The bytes are decisions (see `choices`). Only whole bodies with the announced hash are delivered, stores stay
    consistent, and limits of memory hold.
    """
    choices = Choices(data)
    _assemble(choices)
    _store(choices)
    return _follow(choices)
