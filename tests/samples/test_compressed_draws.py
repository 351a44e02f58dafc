"""Batches for learners far away travel packed where the parameters say lz4, and are the same batches."""

from typing import Any

import numpy as np
import pytest

import memoire
from memoire.reader import reader
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables import draws as pooled_draw
from memoire.tables.caches.pool import Pool
from memoire.tables.episodes.pool import EpisodePool
from memoire.wire import containers as pack
from memoire.wire import containers as unpack
from memoire.wire.layout import layout_of
from memoire.wire.parts import ContainerKind, Part

SCHEMA = Schema(
    {
        "picture": Column("uint8", (12, 12), "state"),
        "words": Column("uint8", (None,), "state"),
        "action": Column("int32"),
        "reward": Column("float32", (), "reward"),
    }
)
PLAIN = Parameters(compression="lz4")
EVERY = {
    "plain": PLAIN,
    "stacks": PLAIN.replace(frame_stack=3, multi_step=2, start="zero"),
    "one side": PLAIN.replace(next=()),
    "no states": PLAIN.replace(prev=("action",), next=()),
    "sequences": PLAIN.replace(sequence_length=4),
}
READER, CLIENT = b"r" * 16, b"c" * 16
STEPS = 60


def episode() -> tuple[Any, ...]:
    """Frames that are much like each other, as those of a game are."""
    pictures = np.zeros((STEPS, 12, 12), np.uint8)
    pictures[np.arange(STEPS), np.arange(STEPS) % 12, 3] = 1 + np.arange(STEPS)
    words = [np.full(step % 7, step, np.uint8) for step in range(STEPS)]
    return pictures, words, np.arange(STEPS, dtype=np.int32), np.ones(STEPS, np.float32)


def pool_of(parameters: Parameters) -> Pool:
    memory = Memory(SCHEMA, STEPS, parameters, seed=1)
    memory.open(0)
    for row in zip(*episode(), strict=True):
        memory.add(0, row)
    memory.close(0)
    made = Pool(SCHEMA, parameters, seed=2)
    held = unpack.check(pack.build(memory, 50, now=0.0), made.layout)
    made.add(CLIENT, 0, held)
    return made


def far_away(made: Pool, compression: str) -> tuple[Any, Any]:
    """A batch as a reader puts it together, and the bytes that crossed."""
    chosen = pooled_draw.plan([made.reserve(READER, 40)], 40, 0.5)
    layout = layout_of(SCHEMA, made.parameters, ContainerKind.DRAWN)
    payload = made.draw_counts(READER, chosen.counts[0], compression=compression)
    held = unpack.check(payload, layout)
    return pooled_draw.finish(chosen, [held], layout, made.parameters, seed=3, beta=0.4).gathered, payload


@pytest.mark.parametrize("name", EVERY)
def test_samples_of_caches_are_the_same_however_they_travel(name: str) -> None:
    (plain, whole), (packed, fewer) = (far_away(pool_of(EVERY[name]), way) for way in ("none", "lz4"))
    for side in ("prev", "next"):
        assert list(getattr(plain, side)) == list(getattr(packed, side))
        for column, array in getattr(plain, side).items():
            np.testing.assert_array_equal(array, getattr(packed, side)[column])
    np.testing.assert_array_equal(plain.ids, packed.ids)
    np.testing.assert_array_equal(plain.reward, packed.reward)
    has_states = name != "no states"
    assert (fewer.nbytes < whole.nbytes) is has_states


def windows(memory: Memory, compression: str) -> tuple[Any, Any, int]:
    """Numbers and states of samples that a table of episodes draws, and the bytes that crossed."""
    payload = pack.build_drawn(memory, READER, 30, now=0.0, compression=compression)
    layout = layout_of(memory.schema, memory.parameters, ContainerKind.DRAWN)
    held = unpack.check(payload, layout)
    index = np.frombuffer(held.block(layout.bookkeeping(Part.PREV_INDEX)), "<u4")
    frames = np.frombuffer(held.block(layout.place(Part.FRAMES, "picture")), np.uint8).reshape(-1, 12, 12)
    numbers = np.frombuffer(held.block(layout.bookkeeping(Part.NUMBER)), "<i8")
    return numbers, frames[index], payload.nbytes


def test_samples_of_episodes_are_the_same_however_they_travel() -> None:
    pictures = Schema({"picture": SCHEMA["picture"], "reward": SCHEMA["reward"]})
    memories = [Memory(pictures, STEPS, PLAIN.replace(frame_stack=3), seed=5) for _ in range(2)]
    for memory in memories:
        memory.open(0)
        memory.extend(0, (episode()[0], np.ones(STEPS, np.float32)))
        memory.close(0)
    plain, packed = (windows(memory, way) for memory, way in zip(memories, ("none", "lz4"), strict=True))
    np.testing.assert_array_equal(plain[0], packed[0])
    np.testing.assert_array_equal(plain[1], packed[1])
    assert packed[2] < plain[2]


@pytest.mark.parametrize("storage", ["caches", "episodes"])
@pytest.mark.parametrize(
    ("compression", "has", "way"),
    [
        ("lz4", ["zlib", "lz4"], "lz4"),
        ("lz4", ["zlib"], "none"),
        ("zlib", ["zlib", "lz4"], "none"),
        ("none", ["lz4"], "none"),
    ],
)
def test_frames_are_packed_for_readers_that_can_undo_it_alone(storage, compression, has, way, monkeypatch) -> None:
    ways = []
    for place in (Pool, EpisodePool):
        plainly = place.draw_counts
        monkeypatch.setattr(
            place,
            "draw_counts",
            lambda *given, of=plainly, **named: ways.append(named["compression"]) or of(*given, **named),
        )
    schema = Schema({"picture": SCHEMA["picture"], "reward": SCHEMA["reward"]})
    parameters = Parameters(compression=compression, cache_size=16)
    with memoire.Server("tcp://127.0.0.1:0", schema, parameters=parameters, storage=storage, seed=0) as server:
        with memoire.connect(server.endpoint, seed=1, timeout=100.0) as client:
            columns = {"picture": episode()[0], "reward": np.ones(STEPS, np.float32)}
            if storage == "episodes":
                assert client.push_episode(columns, timeout=100.0)
            else:
                client.memory.open(0)
                client.memory.extend(0, tuple(columns.values()))
                client.memory.close(0)
                for _ in range(4):
                    assert client.push_cache(timeout=100.0)
            monkeypatch.setattr(reader, "codecs", lambda: has)
            with memoire.Reader([server.endpoint], seed=2, timeout=100.0) as learner:
                batch = learner.get_batch(16, timeout=100.0)
    assert set(ways) == {way}
    seen = batch["picture"]
    np.testing.assert_array_equal(seen, episode()[0][seen.reshape(16, -1).max(axis=1) - 1])
