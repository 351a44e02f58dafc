"""The memory under a pool of episodes, call by call: room, replacement, what comes back once, and draws for a reader."""

import random
from typing import Any

import numpy as np
import pytest

from memoire.errors import EmptyMemory, ParameterError, ProtocolError, UsedUp
from memoire.replay import dataset
from memoire.replay.columns import Column
from memoire.replay.dataset import KeptEpisode
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables.caches.queues import MAX_DRAWN
from memoire.tables.episodes.draw import ANY_NUMBER, copied, distribution_of, drawn_for, sampled, sums_of, why_nothing
from memoire.tables.episodes.memory import (
    ENTRY_OVERHEAD,
    MAX_DEFAULT_ENTRIES,
    ByteRoom,
    CheckedEpisode,
    EpisodeMemory,
    NamedMemory,
)
from memoire.wire import containers as unpack
from memoire.wire.layout import layout_of
from memoire.wire.parts import ContainerKind
from memoire.wire.rows import CLIENT_COUNTS

SCHEMA = Schema({"obs": (np.float32, (3,)), "reward": np.float32})
RAGGED = Schema({"obs": Column(np.float32, (None, 3), "state"), "reward": np.float32})
SIZE = SCHEMA.entry_bytes + ENTRY_OVERHEAD


def episode_of(length: int, schema: Schema = SCHEMA) -> CheckedEpisode:
    """An episode whose rewards count its steps."""
    columns: dict[str, Any] = {
        "obs": np.ones((length, 3), np.float32),
        "reward": np.arange(length, dtype=np.float32),
    }
    made = dataset.Episode(
        columns=columns,
        init_w=np.ones(length, np.float32),
        priority=None,
        learned=np.zeros(length, np.bool_),
        born=None,
        model_version=np.zeros(length, np.int64),
        terminated=True,
    )
    return CheckedEpisode(made, np.zeros(length, np.float32), length)


def stored(*lengths: int, capacity: int = 20, parameters: Parameters | None = None) -> EpisodeMemory:
    made = EpisodeMemory(ByteRoom(SCHEMA, capacity), parameters, 1 << 20, seed=1)
    for length in lengths:
        made.add(episode_of(length))
    return made


def kept_of(made: EpisodeMemory) -> list[KeptEpisode]:
    return [KeptEpisode(made.now.owner, number, episode) for number, episode in dataset.walk(made.now.memory)]


def test_entries_are_as_old_as_they_came_wherever_they_lie() -> None:
    """Rows of an episode lie side by side, or go on at the memory's begin; those of former episodes keep their age."""
    made = stored(capacity=10)
    memory, expected = made.now.memory, dict[int, float]()
    memory.set_clock(1000.0)
    for turn, length in enumerate((4, 3, 5, 4, 6, 10, 1)):
        checked, first = episode_of(length), max(expected, default=-1) + 1
        age = np.arange(length, dtype=np.float32) + np.float32(turn)
        made.add(CheckedEpisode(checked.episode, age, length))
        meta = memory.contents()["meta"]
        here = {int(number): float(born) for number, born in zip(meta["number"], meta["born"], strict=True)}
        new = sorted(number for number in here if number >= first)
        expected |= dict(zip(new, (1000.0 - age).tolist(), strict=True))
        held = [number for each in kept_of(made) for number in range(each.number, each.number + len(each.episode))]
        assert {number: here[number] for number in held} == {number: expected[number] for number in held}


# Room


def test_room_is_as_many_entries_as_fit_or_as_were_asked_for() -> None:
    assert ByteRoom(SCHEMA, 0).entries(7 * SIZE + 1) == 7 and ByteRoom(SCHEMA, 5).entries(7 * SIZE) == 5
    assert (
        ByteRoom(SCHEMA, 0).entries(1 << 40)
        == MAX_DEFAULT_ENTRIES
        < ByteRoom(SCHEMA, 2 * MAX_DEFAULT_ENTRIES).entries(1 << 40)
    )
    assert (ByteRoom(SCHEMA, 0).least_bytes, ByteRoom(SCHEMA, 8).least_bytes) == (SIZE, 8 * SIZE)
    with pytest.raises(ParameterError, match=f"byte_limit must be at least {8 * SIZE} for 8 entries of {SIZE} bytes"):
        ByteRoom(SCHEMA, 8).entries(8 * SIZE - 1)


def test_half_of_the_bytes_are_for_values_of_ragged_columns_unless_a_capacity_says_otherwise() -> None:
    room, size = ByteRoom(RAGGED, 0), ByteRoom(RAGGED, 0).entry_bytes
    assert room.entries(10 * size) == 5 and room.value_bytes(5, 10 * size) == 5 * size
    assert room.entries(size) == 1 and room.value_bytes(1, size) == 1, "a limit of 0 bytes would be none"
    assert ByteRoom(RAGGED, 9).entries(10 * size) == 9
    assert ByteRoom(SCHEMA, 0).value_bytes(5, 10 * SIZE) == 0


# What comes in


def test_the_oldest_episodes_make_room() -> None:
    made = stored(8, 8)
    assert made.add(episode_of(3)) == (0, 0)
    assert made.add(episode_of(10)) == (2, 16)
    assert made.now.memory.num_entries == 13
    with pytest.raises(ProtocolError, match="room for 20 in all"):
        made.add(episode_of(21))
    assert made.now.memory.num_episodes == 2


def test_only_what_is_not_here_is_put_back() -> None:
    made = stored(5, 6)
    kept = kept_of(made)
    assert [made.put_back(each) for each in kept] == [(False, 0)] * 2
    other = stored(18)
    assert [other.put_back(each) for each in kept] == [(True, 1), (True, 0)]
    assert [other.put_back(each) for each in kept] == [(False, 0)] * 2, "its new number is known by its old name"
    assert other.add(episode_of(19))[0] == 2
    assert other.put_back(kept[0]) == (True, 1), "it has left again"


def test_names_of_episodes_that_have_left_are_forgotten() -> None:
    source, made = stored(1), stored(capacity=4)
    (kept,) = kept_of(source)
    for number in range(500):
        assert made.put_back(kept._replace(number=number))[0]
        assert len(made._put_back) <= 2 * made.now.memory.num_episodes + 100
    assert not made.put_back(kept._replace(number=499))[0]


# Another memory


def test_another_limit_of_bytes_moves_the_newest_episodes_into_a_memory_with_another_name() -> None:
    made = EpisodeMemory(ByteRoom(SCHEMA, 0), None, 20 * SIZE, seed=1)
    for length in (8, 8, 2):
        made.add(episode_of(length))
    first = made.now
    first.memory.saw_model(7)
    kept = kept_of(made)
    assert made.limit(12 * SIZE) == 1 and made.byte_limit == 12 * SIZE
    assert made.now.owner != first.owner and (made.now.memory.capacity, made.now.memory.num_entries) == (12, 10)
    assert made.now.memory.newest_model == 7
    assert made.limit(4 * SIZE) == 1 and made.now.memory.num_entries == 2, "one of 8 entries has no room at all"
    with pytest.raises(ParameterError, match="byte_limit"):
        made.limit(SIZE - 1)
    assert made.byte_limit == 4 * SIZE
    again = made.now
    assert made.limit(4 * SIZE + 1) == 0 and made.now is again, "the same number of entries"
    assert made.put_back(kept[2]) == (True, 0), "what came by the wire has no name from before"


def test_episodes_that_were_put_back_keep_their_names_when_they_move() -> None:
    made = EpisodeMemory(ByteRoom(SCHEMA, 0), None, 20 * SIZE, seed=1)
    kept = kept_of(stored(5, 6))
    for each in kept:
        made.put_back(each)
    assert made.limit(8 * SIZE) == 1
    assert [made.put_back(each)[0] for each in reversed(kept)] == [False, True]


def test_a_memory_that_is_emptied_begins_with_another_name_and_the_same_settings() -> None:
    parameters = Parameters(discount=(0.5,))
    made = stored(5, 6, parameters=parameters)
    first, kept = made.now, kept_of(made)
    first.memory.saw_model(3)
    assert made.clear() == 2 and made.now.memory.num_entries == 0 and made.now.owner != first.owner
    assert (made.now.memory.parameters, made.now.memory.newest_model, made.now.memory.capacity) == (parameters, 3, 20)
    assert made.put_back(kept[0]) == (True, 0)
    made.clear()
    made.add(episode_of(5))
    assert made.put_back(kept[0]) == (True, 0), "under the number that it had there is another one now"


def test_a_new_longest_episode_lets_the_longer_ones_go() -> None:
    made = stored(3, 9, 4)
    assert made.configure(Parameters(discount=(0.5,))) == 0
    assert made.configure(Parameters(max_episode=2)) == 1
    assert made.now.memory.num_episodes == 2


# What goes out


def counts_of(owner: bytes, count: int) -> Any:
    rows = np.zeros(2, CLIENT_COUNTS)
    rows["client"][0], rows["count"] = np.frombuffer(owner, "<u8"), count
    return rows


def test_samples_are_named_by_the_memory_and_weighed_by_its_sums() -> None:
    now = stored(5, 6).now
    made = sampled(now, 40, None)
    assert {client.tobytes() for client in made.gathered.ids["client"]} == {now.owner}
    assert set(made.gathered.ids["number"]) <= set(range(11)) and made.population == now.memory.num_positive
    drawn = made.pooled(0.0)
    assert (drawn.importance == 1.0).all() and drawn.left_out == 0.0
    with pytest.raises(EmptyMemory):
        sampled(stored().now, 1, None)


def test_a_reader_is_told_of_the_memory_as_of_one_client() -> None:
    now = stored(5, 6).now
    (row,) = sums_of(now, 9)
    assert (row["client"].tobytes(), row["sequence"], row["flags"]) == (now.owner, 9, ANY_NUMBER)
    assert row["reserved"] == row["positives"] == now.memory.num_positive
    assert row["total_weight"] == now.memory.total_weight
    assert len(sums_of(stored().now, 1)) == 0
    (row,) = sums_of(stored(5, parameters=Parameters(max_times_sampled=3)).now, 1)
    assert (row["reserved"], row["flags"]) == (3 * row["positives"], 0)


def test_a_reader_gets_what_it_asks_of_this_memory() -> None:
    now = stored(5, 6).now
    layout = layout_of(SCHEMA, now.memory.parameters, ContainerKind.DRAWN)
    payload, drawn = drawn_for(now, counts_of(now.owner, 7), now=0.0, compression="none")
    assert drawn == 7 and unpack.check(payload, layout).samples == 7
    nothing = (None, 0)
    assert drawn_for(now, counts_of(b"x" * 16, 7), now=0.0, compression="none") == nothing
    assert drawn_for(stored().now, counts_of(now.owner, 7), now=0.0, compression="none") == nothing
    empty = NamedMemory(stored().now.memory, now.owner)
    assert drawn_for(empty, counts_of(now.owner, 7), now=0.0, compression="none") == nothing
    with pytest.raises(ProtocolError, match="samples at once"):
        drawn_for(now, counts_of(now.owner, MAX_DRAWN + 1), now=0.0, compression="none")


def test_a_reader_gets_what_is_left_where_entries_are_used_up() -> None:
    now = stored(5, parameters=Parameters(max_times_sampled=1)).now
    left = now.memory.draws_left
    assert drawn_for(now, counts_of(now.owner, 100), now=0.0, compression="none")[1] == left
    assert drawn_for(now, counts_of(now.owner, 1), now=0.0, compression="none") == (None, 0)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UsedUp(5, 2, 3), "entries are drawn 3 times at most (max_times_sampled), and 2 times yet in all"),
        (EmptyMemory(0, "no group is complete"), "no group is complete. Wait for actors to ship more"),
        (EmptyMemory(4), "of 4 entries in 2 episodes of 1 clients none can be drawn"),
    ],
)
def test_why_a_draw_waits_is_said_in_words(error: EmptyMemory, words: str) -> None:
    assert why_nothing(error, 2, 1) == words


# Inspection


def test_a_look_at_a_memory_takes_nothing() -> None:
    now, rng = stored(5, 6, parameters=Parameters(max_times_sampled=1)).now, random.Random(1)
    left = now.memory.draws_left
    found = distribution_of(now.memory, rng)
    assert (found.looked, found.held, found.population) == (11, 11, float(now.memory.num_positive))
    seen = copied(now, 0.4, rng)
    assert seen is not None and seen.place.episode in (5, 6) and seen.gathered.ids["client"].tobytes() == now.owner
    assert now.memory.draws_left == left
    empty = stored().now
    assert copied(empty, 0.4, rng) is None and distribution_of(empty.memory, rng).effective is None
