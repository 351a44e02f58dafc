"""Containers: `unpack.check` refuses them, or whatever is done with held samples goes well with what it took.

1 byte   which kind of container is asked for; the rest is the payload
"""

from pathlib import Path

import numpy as np

import make_vectors
from memoire.errors import EmptyMemory, NotEnoughSamples, ProtocolError
from memoire.limits import Limits
from memoire.replay.batch import GatheredSamples
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.tables.caches.pool import Pool
from memoire.tables.draws import PooledBatch, finish, plan
from memoire.tables.episodes.pool import EpisodePool
from memoire.wire import containers as pack
from memoire.wire import containers as unpack
from memoire.wire import messages, row_container
from memoire.wire.compression import codecs
from memoire.wire.frames import CODES
from memoire.wire.layout import layout_of
from memoire.wire.parts import ContainerKind, Part
from memoire.wire.rows import CLIENT_COUNTS, CLIENT_SUMS, unpack_sums

REACHED = {"cache", "drawn", "episode", "feedback", "rows", "container", "value", "index", "parameters", "schema"}
LIMITS = Limits(message_bytes=1 << 20)
VECTORS = Path(__file__).parent.parent / "vectors"
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
"""Golden container, and under which schema and parameters it is one."""
ME, READER = b"m" * 16, b"r" * 16


IN_PLACE = 0.8  # nearly every other length is wrong


def seeds() -> list[bytes]:
    """The golden containers, and caches with packed frames."""
    made = [bytes([i]) + (VECTORS / f"{kind[0]}.payload").read_bytes() for i, kind in enumerate(KINDS)]
    for compression in codecs():
        memory = Memory(make_vectors.SCHEMA, 64, WINDOWS.replace(cache_size=24, compression=compression), seed=0)
        memory.open()
        for step in range(40):
            memory.add(0, (np.full(2, step // 20, np.uint8), np.int32(step), np.float32(1.0)))
        memory.close()
        made.append(b"\0" + pack.build(memory, now=1.0).tobytes())
    return made


def one(data: bytes) -> str:
    """Hold it, draw all of it, send it on, read it back."""
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
        unpack.table(payload)
    except ProtocolError:
        pass  # it looks at sizes only: what it lets pass may still be refused below
    try:
        uses[kind](payload, schema, parameters)
    except ProtocolError as error:
        assert error.code in CODES and len(str(error)) < 1000
        return error.code
    return kind.name.lower()


def _use_rows(payload, schema, parameters):
    columns, rows = row_container.unpack_rows(payload, schema, LIMITS)
    made = row_container.pack_rows(schema, columns, rows)
    again, _ = row_container.unpack_rows(made, schema, LIMITS)
    for name, values in columns.items():
        one, other = (getattr(each, "values", each) for each in (values, again[name]))
        assert len(values) == rows and np.array_equal(one, other)


def _use_cache(payload, schema, parameters):
    pool = Pool(schema, parameters, seed=0, byte_limit=1 << 21)
    held = unpack.check(payload, pool.layout, LIMITS)
    samples = held.samples
    pool.add(ME, 1, held)
    rows = pool.reserve(READER, samples)
    assert len(unpack_sums(rows.tobytes())) == 1
    counts = np.zeros(1, CLIENT_COUNTS)
    counts["client"], counts["count"] = rows["client"], samples // 2
    drawn = pool.draw_counts(READER, counts)
    made = plan([rows], 1, 0.5)
    if drawn is not None:  # what goes to a reader is what a reader takes
        layout = layout_of(schema, parameters, ContainerKind.DRAWN)
        if made is not None:
            _look_at(finish(made, [unpack.check(drawn, layout)], layout, parameters, 0, 0.4), samples // 2)
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
    held = unpack.check(payload, layout, LIMITS)
    owners = held.part(Part.OWNERS)
    rows = np.zeros(len({owners[i : i + 16] for i in range(0, len(owners), 16)}), CLIENT_SUMS)
    rows["client"] = np.unique(np.frombuffer(owners, "<u8").reshape(-1, 2), axis=0)
    rows["total_weight"], rows["positives"], rows["minimum"], rows["reserved"] = 5.0, 3, 0.5, 100
    made = plan([rows], 2, 0.5)
    assert made is not None
    _look_at(finish(made, [held], layout, parameters, 7, 0.4), held.samples)


def _use_episode(payload, schema, parameters):
    pool = EpisodePool(schema, parameters, capacity=64, byte_limit=1 << 18, seed=0)
    body = messages.Episode(has_final=True, terminated=True)
    checked = pool.check(body, payload, limits=LIMITS)
    pool.add(ME, 1, checked)
    try:
        pooled = pool.get(8)
    except (NotEnoughSamples, EmptyMemory):
        return  # nothing in it weighs anything
    _look_at(pooled, 8)


def _use_feedback(payload, schema, parameters):
    for owner, (numbers, errors) in unpack.read_feedback(payload, schema, LIMITS).items():
        assert len(owner) == 16 and len(numbers) == len(errors) and np.isfinite(errors).all()
