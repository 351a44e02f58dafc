"""Kinds of tables, and inspection of their contents, which shows true values and takes no samples."""

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memoire.errors import ParameterError, ProtocolError
from memoire.limits import Limits
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables import base as interface
from memoire.tables import registry
from memoire.tables.caches.pool import Pool
from memoire.tables.episodes.pool import EpisodePool
from memoire.tables.inspection import PER_TEN, Histogram
from memoire.tables.registry import PoolPlace
from memoire.tables.table import OpenTable, Table
from memoire.wire import containers
from memoire.wire.layout import layout_of
from memoire.wire.parts import Part
from poolkit import Clock, name

# --- Inspection of held samples and entries

SCHEMA = Schema({"obs": (np.uint8, (4, 5)), "action": np.int32, "reward": np.float32})
SETTINGS = Parameters(priority_exponent=1.0, frame_stack=2, importance_exponent=0.5)


def memory_of(weights: Any, parameters: Parameters = SETTINGS, *, memory: Memory | None = None) -> Memory:
    """Return a memory of one episode with about these weights; the values of entry i are i % 200."""
    memory = memory or Memory(SCHEMA, len(weights) + 8, parameters, seed=0)
    memory.set_clock(50.0)
    memory.open()
    for number, weight in enumerate(weights):
        entry = np.full((4, 5), number % 200, np.uint8), np.int32(number), np.float32(0.0)
        memory.add(0, entry, float(weight), number % 3)
    memory.close(final_state=(np.zeros((4, 5), np.uint8),), terminated=True)
    return memory


def pool_of(memories: Any, *, caches: int = 40, clock: Any = None, **changes: Any) -> Pool:
    """Return a pool of caches that clients with these memories pushed."""
    parameters = SETTINGS.replace(**changes)
    pool = Pool(SCHEMA, parameters, seed=1, clock=clock or Clock())
    layout = layout_of(SCHEMA, parameters)
    for i, memory in enumerate(memories):
        for sequence in range(caches):
            pool.add(name(i), sequence, containers.check(containers.build(memory, 64, now=0.0), layout))
    return pool


def effective(*weights: Any) -> float:
    """Return 1 / sum p**2 over the entries of all memories."""
    chances = np.concatenate(weights) / sum(each.sum() for each in weights)
    return float(1.0 / np.square(chances).sum())


@settings(max_examples=60)
@given(st.lists(st.sampled_from([0.0, 1.0, 1e-20, 1e20]) | st.floats(1e-9, 1e9), max_size=40))
def test_every_value_is_in_the_bucket_that_its_power_of_ten_says(values: list[float]) -> None:
    histogram = Histogram.from_values(np.array(values))
    assert sum(histogram.counts) + histogram.zeros == len(values) and histogram.zeros == values.count(0.0)
    if values:
        assert (histogram.least, histogram.greatest) == (min(values), max(values))
    above = [np.clip(value, 10.0**-12, 10.0**12) for value in values if value > 0.0]
    for place, count in enumerate(histogram.counts):
        low, high = (10.0 ** ((histogram.first + place + more) / PER_TEN) for more in (0, 1))
        inside = sum(low * (1 + 1e-9) < value < high * (1 - 1e-9) for value in above)
        near = sum(low * (1 - 1e-9) <= value <= high * (1 + 1e-9) for value in above)
        assert inside <= count <= near


def test_the_effective_size_of_what_caches_stand_for_is_that_of_the_clients_memories() -> None:
    rng = np.random.default_rng(3)
    weights = [rng.gamma(0.5, size=200) + 1e-3, rng.gamma(0.5, size=600) * 3.0 + 1e-3]
    memories = [memory_of(each) for each in weights]
    held = [memory.weights(np.arange(len(each))) for memory, each in zip(memories, weights, strict=True)]
    distribution = pool_of(memories).distribution()
    assert distribution.effective == pytest.approx(effective(*held), rel=0.15)
    assert distribution.population == sum((each > 0).sum() for each in held)
    assert distribution.total_weight == pytest.approx(sum(each.sum() for each in held))
    assert distribution.looked == distribution.held == 2 * 40 * 64
    assert distribution.weights.greatest <= max(each.max() for each in held) and distribution.weights.zeros == 0
    assert pool_of([]).distribution().effective is None


@pytest.mark.parametrize("changes", [{}, {"sequence_length": 4}, {"reuse_cache": True}])
def test_a_held_sample_is_shown_and_not_taken(changes: dict[str, Any]) -> None:
    clock, parameters, weights = Clock(), SETTINGS.replace(**changes), np.linspace(0.5, 2.0, 100)
    memory = memory_of(weights, parameters)
    caches = [containers.build(memory, 64, now=0.0) for _ in range(2)]
    pool, untouched = (Pool(SCHEMA, parameters, seed=1, clock=clock) for _ in range(2))
    for each in (pool, untouched):
        for sequence, payload in enumerate(caches):
            each.add(name(0), sequence, containers.check(payload, layout_of(SCHEMA, parameters)))
    held, entries = memory.weights(np.arange(100)), memory.num_positive
    clock.now += 5.0
    before = pool.stats()
    for _ in range(20):
        seen = pool.peek()
        assert seen is not None
        shown = seen.display_sample(SCHEMA, newest=4)
        assert shown is not None and (shown.client, shown.place.episode) == (name(0).hex(), None)
        frames, axes = shown.arrays["obs"], shown.axes["obs"]
        newest = frames[0, 1] if axes == 2 else frames[1]
        assert newest.shape == (4, 5) and (newest == shown.number % 200).all()
        assert shown.probability == pytest.approx(held[shown.number] / memory.total_weight, rel=1e-5)
        assert shown.importance == pytest.approx((entries * shown.probability) ** -0.5)
        version = shown.number % 3
        assert (shown.model_version, shown.model_lag) == (version, 4 - version if version else None)
        assert shown.age >= 5.0
    assert pool.stats() == before
    np.testing.assert_array_equal(pool.get(16).gathered.ids, untouched.get(16).gathered.ids)
    assert pool_of([]).peek() is None


def walked(pool: Any, start: Any) -> list[Any]:
    """Return the samples on a walk from `start` to its first neighbour, and from there to the last one."""
    shown = start
    while shown.place.earlier is not None:
        shown = pool.peek((bytes.fromhex(shown.client), shown.place.earlier)).display_sample(SCHEMA, 0)
    samples = [shown]
    while shown.place.later is not None:
        shown = pool.peek((bytes.fromhex(shown.client), shown.place.later)).display_sample(SCHEMA, 0)
        samples.append(shown)
    return samples


@pytest.mark.parametrize("changes", [{}, {"sequence_length": 4}, {"reuse_cache": True}])
def test_one_steps_through_what_is_held_of_a_client_without_taking_it(changes: dict[str, Any]) -> None:
    parameters = SETTINGS.replace(**changes)
    memory, pool = memory_of(np.linspace(0.5, 2.0, 100), parameters), Pool(SCHEMA, parameters, seed=1, clock=Clock())
    held: dict[bytes, set[int]] = {name(0): set(), name(1): set()}
    for client in held:
        for sequence in range(2):
            cache = containers.check(containers.build(memory, 64, now=0.0), layout_of(SCHEMA, parameters))
            held[client].update(np.frombuffer(cache.part(Part.NUMBER), "<i8").tolist())
            pool.add(client, sequence, cache)
    pool.get(8)  # drawn samples are still held and shown
    before, first = pool.stats(), pool.peek()
    assert first is not None
    steps = walked(pool, first.display_sample(SCHEMA, 0))
    assert [each.number for each in steps] == sorted(held[bytes.fromhex(steps[0].client)])
    for each in steps:
        frames = each.arrays["obs"]
        newest = frames[0, 1] if each.axes["obs"] == 2 else frames[1]
        assert (newest == each.number % 200).all() and (each.place.step, each.place.td_error) == (None, None)
    assert pool.stats() == before
    assert pool.peek((name(0), 12_345)) is None and pool.peek((name(7), steps[0].number)) is None


def episodes_of(weights: Any, parameters: Parameters = SETTINGS) -> EpisodePool:
    pool = EpisodePool(SCHEMA, parameters, capacity=len(weights) + 8, seed=1)
    memory_of(weights, memory=pool.memory).set_clock(60.0)
    return pool


def test_the_effective_size_of_episodes_is_that_of_their_entries() -> None:
    weights = np.random.default_rng(0).gamma(0.5, size=1000) + 1e-3
    pool = episodes_of(weights)
    held = pool.memory.weights(np.arange(1000))
    distribution = pool.distribution()
    assert distribution.effective == pytest.approx(effective(held), rel=1e-9)
    assert (distribution.looked, distribution.held, distribution.population) == (1000, 1000, (held > 0).sum())
    assert (distribution.ages.least, distribution.ages.greatest) == (10.0, 10.0)
    assert (distribution.weights.zeros, distribution.weights.greatest) == ((held == 0).sum(), held.max())
    some = pool.distribution(300)
    assert 200 <= some.looked <= 300 and some.effective == pytest.approx(effective(held), rel=0.6)
    assert EpisodePool(SCHEMA, capacity=10).distribution().effective is None


def test_one_steps_through_an_episode_sees_what_learners_said_and_counts_as_no_draw() -> None:
    pool = episodes_of(np.ones(30), SETTINGS.replace(max_times_sampled=1))
    first = pool.peek()
    assert first is not None and first.display_sample(SCHEMA, 0).importance == pytest.approx(1.0)
    pool.apply(pool.owner, np.array([7], np.int64), np.array([-2.5], np.float32))
    steps = walked(pool, first.display_sample(SCHEMA, 0))
    able = np.flatnonzero(pool.memory.weights(np.arange(30)) > 0)  # the first entry has no window of two frames
    assert [each.number for each in steps] == able.tolist()
    assert [each.place.step for each in steps] == (1 + able).tolist()
    for each in steps:
        assert (each.client, each.place.episode, each.model_lag) == (pool.owner.hex(), 30, None)
        assert (each.arrays["obs"][1] == each.number % 200).all() and (each.axes["obs"], each.age) == (1, 10.0)
    errors = {each.number: each.place.td_error for each in steps}
    assert errors.pop(7) == pytest.approx(2.5) and set(errors.values()) == {None}
    assert pool.memory.draws_left == 29
    assert pool.peek((pool.owner, 30)) is None and pool.peek((name(0), 7)) is None
    assert EpisodePool(SCHEMA, capacity=10).peek() is None


def test_what_is_too_large_to_be_looked_at_is_not_shown() -> None:
    seen = episodes_of(np.ones(30)).peek()
    assert seen is not None and seen.display_sample(SCHEMA, 0) is not None
    assert seen.display_sample(SCHEMA, 0, byte_limit=50) is None


# --- Kinds of tables: a pool offers exactly the calls that its kind declares

STORAGES = tuple(kind.name for kind in registry.built_in())


def declared_by(kind: registry.Kind) -> set[type]:
    """Return the capabilities that a kind declares for its pool, with those that they derive from."""
    pool = kind.pool_class().__mro__
    named = [next(each for each in pool if each.__name__ == name) for name in kind.offers]
    bases = {base for each in named for base in each.__mro__ if not issubclass(base, interface.TablePool)}
    return {base for base in bases if inspect.isabstract(base)}


CAPABILITIES = set().union(*map(declared_by, registry.known_kinds()))
USUAL = {"obs": np.float32, "action": np.int64, "reward": np.float32}
COLUMNS = {"prompts": {"answer": np.float32}, "keyed": None}


def opened(storage: str) -> OpenTable:
    settings = Table(COLUMNS.get(storage, USUAL), storage=storage)
    place = PoolPlace("own", 1 << 24, Limits(), seed=1)
    return OpenTable("own", settings, settings.kind.make_pool(settings, place))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_pool_offers_what_its_kind_says_and_nothing_else(storage: str) -> None:
    table = opened(storage)
    offered = {each for each in CAPABILITIES if isinstance(table.pool, each)}
    assert offered == declared_by(table.kind) and type(table.pool) is table.kind.pool_class()
    others = {name for each in CAPABILITIES if each not in offered for name in vars(each) if not name.startswith("_")}
    owned = {name for each in offered for name in vars(each)} | set(vars(interface.TablePool))
    lies = {name for name in others - owned if callable(getattr(table.pool, name, None))}
    assert not lies, "members of what it does not do"


@pytest.mark.parametrize("storage", STORAGES)
def test_what_a_table_does_not_do_is_refused_with_the_kinds_that_do(storage: str) -> None:
    table = opened(storage)
    for capability in (each for each in CAPABILITIES if hasattr(each, "WANTED")):
        if isinstance(table.pool, capability):
            assert table.require(capability) is table.require_for(capability, "THIS") is table.pool
            continue
        names = registry.names_of(capability)
        with pytest.raises(ParameterError, match=" or ".join(map(repr, names))) as refused:
            table.require(capability)
        assert refused.value.value == storage and "{" not in str(refused.value)
        with pytest.raises(ProtocolError, match=f"has storage='{storage}'; THIS is for {' and '.join(names)}"):
            table.require_for(capability, "THIS")


def test_a_kind_that_takes_no_pushes_says_what_to_use() -> None:
    for storage in STORAGES:
        table = opened(storage)
        assert (table.pushes is None) == bool(table.kind.no_pushes)
