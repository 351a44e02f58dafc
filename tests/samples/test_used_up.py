"""Entries with a maximum number of draws: however they are drawn, importance belongs to the moment of the draw."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.tables.episodes.pool import EpisodePool
from memoire.wire import containers
from memoire.wire.layout import layout_of
from memoire.wire.parts import ContainerKind, Part
from poolkit import far_away
from sequencekit import SCHEMA, record

FORMS = {"transitions": Parameters(), "sequences": Parameters(sequence_length=4, sequence_overlap=2, burn_in=1)}


def limited(form: str, times: int, **others: Any) -> Parameters:
    return FORMS[form].replace(max_times_sampled=times, priority_exponent=1.0, importance_exponent=1.0, **others)


def with_episodes(memory: Memory, lengths: list[int], seed: int) -> Memory:
    """Record episodes of these lengths, whose weights differ by a factor of a million, and return the memory."""
    for episode, length in enumerate(lengths):
        record(memory, length, 10 * episode, "terminated")
    rng = np.random.default_rng(seed)
    memory.update_priorities(np.arange(memory.num_entries), 10.0 ** rng.uniform(-3.0, 3.0, memory.num_entries))
    return memory


def truth(memory: Memory, numbers: Any, had: dict[int, tuple[float, int]]) -> np.ndarray:
    """Return N_j w / S_j of samples that are drawn in turn, with S_j and N_j of the entries available before draw j.

    `had` maps each available entry to its weight and its former draws.
    """
    left, times, expected = dict(had), memory.parameters.max_times_sampled, []
    for number in np.asarray(numbers).tolist():
        weight, drawn = left.pop(number)
        expected.append((len(left) + 1) * weight / (weight + sum(other for other, _ in left.values())))
        if drawn + 1 < times:
            left[number] = weight, drawn + 1
    return np.array(expected)


def standing(memory: Memory) -> dict[int, tuple[float, int]]:
    """Return weight and former draws of each entry that can be drawn."""
    inside = memory.contents()
    rows = np.flatnonzero(inside["weights"] > 0.0)
    numbers = inside["meta"]["number"][rows]
    facts = zip(memory.weights(numbers).tolist(), inside["meta"]["drawn"][rows].tolist(), strict=True)
    return dict(zip(numbers.tolist(), facts, strict=True))


def by_sample(memory: Memory, count: int) -> tuple[Any, Any]:
    drawn = memory.sample(count)
    return drawn.gathered.ids, drawn.weights / drawn.total_weight * drawn.num_positive


def by_places(memory: Memory, count: int) -> tuple[Any, Any]:
    drawn = memory.draw_sequences(count) if memory.parameters.sequence_length else memory.draw_windows(count)
    return drawn.numbers, drawn.weights / drawn.total_weight * drawn.num_positive


def by_cache(memory: Memory, count: int) -> tuple[Any, Any]:
    layout = layout_of(SCHEMA, memory.parameters)
    held = containers.check(containers.build(memory, count, now=1.0), layout)
    weights = np.frombuffer(held.part(Part.WEIGHT), "<f8")
    return np.frombuffer(held.part(Part.NUMBER), "<i8"), weights / held.total_weight * held.positives


def by_reader(memory: Memory, count: int) -> tuple[Any, Any]:
    layout = layout_of(SCHEMA, memory.parameters, ContainerKind.DRAWN)
    held = containers.check(containers.build_drawn(memory, b"o" * 16, count, now=1.0), layout)
    chance, population = (np.frombuffer(held.part(part), "<f8") for part in (Part.CHANCE, Part.POPULATION))
    return np.frombuffer(held.part(Part.NUMBER), "<i8"), chance * population


DRAWS = [by_sample, by_places, by_cache, by_reader]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.sampled_from(list(FORMS)),
    st.integers(1, 3),
    st.lists(st.integers(1, 9), max_size=4),
    st.integers(0, 9),
)
@example([9], "sequences", 1, [], 0)  # all entries in one draw
def test_by_every_door_the_chance_is_that_among_what_was_left(lengths, form, times, counts, seed):
    for draw in DRAWS:
        memory = with_episodes(Memory(SCHEMA, 64, limited(form, times), seed=seed), lengths, seed)
        for count in [*counts, 10**6]:
            if count := min(count, memory.draws_left):
                had = standing(memory)
                numbers, importance = draw(memory, count)
                np.testing.assert_allclose(importance, truth(memory, numbers, had), rtol=1e-9, err_msg=draw.__name__)
        assert memory.draws_left == 0


@pytest.mark.parametrize("form", FORMS)
def test_from_far_away_a_sample_is_corrected_as_it_is_in_the_servers_own_process(form):
    near, far = (EpisodePool(SCHEMA, limited(form, 2), capacity=64, seed=7) for _ in range(2))
    for pool in (near, far):
        with_episodes(pool.memory, [12, 1, 9], 3)
    while left := near.memory.draws_left:
        batches = near.get(min(left, 5)), far_away(far, min(left, 5), beta=1.0)[0]
        (expected, corrections), (numbers, received) = (
            (each.gathered.ids["number"], each.importance * each.divisor) for each in batches
        )
        np.testing.assert_array_equal(np.sort(numbers), np.sort(expected))
        np.testing.assert_allclose(np.sort(received), np.sort(corrections), rtol=1e-5)
    assert far.memory.draws_left == 0 and not len(far.reserve(b"r" * 16, 5))
