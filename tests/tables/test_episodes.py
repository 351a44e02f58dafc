"""Episodes at the server: shipped episodes are stored, checked, drawn and named as in a memory."""

from typing import Any

import numpy as np
import pytest

from containerkit import SCHEMA
from memoire import _core
from memoire.client.episodes import OpenEpisodes
from memoire.errors import (
    Closed,
    EmptyEpisodeError,
    EmptyMemory,
    EntryError,
    EpisodeClosedError,
    NoDrawsLeft,
    NotEnoughSamples,
    ParameterError,
    ProtocolError,
)
from memoire.limits import Limits
from memoire.replay import dataset
from memoire.replay.batch import ID, GatheredSamples
from memoire.replay.columns import Column
from memoire.replay.conversion import ENTRY_OVERHEAD
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables.draws import MAX_DRAWN, build_batch, plan
from memoire.tables.episodes.memory import CheckedEpisode, NamedMemory, drawn_for, wait_reason
from memoire.tables.episodes.pool import EpisodePool
from memoire.wire import _bytes, containers, messages
from memoire.wire.containers import pack_episode
from memoire.wire.layout import layout_of
from memoire.wire.parts import ContainerKind, Part
from memoire.wire.rows import CLIENT_COUNTS
from memory_checks import check_memory
from netkit import in_thread, until
from poolkit import counts_of

EVERY = {
    "plain": Parameters(),
    "stacked": Parameters(frame_stack=3, multi_step=2, discount=(0.5, 0.9), start="zero"),
    "some columns": Parameters(frame_stack=2, multi_step=3, prev=("state.image", "qvest"), next=("value",)),
    "by rank": Parameters(prioritization="rank", mix_lambda=0.8),
    "sequences": Parameters(sequence_length=4, sequence_overlap=2, burn_in=1),
}
ENDINGS: tuple[dict[str, Any], ...] = (
    {"terminated": True, "final_state": 1},
    {"terminated": False, "final_state": 1, "bootstrap_value": (0.5, -2.0), "multiplier": 3.0},
    {},
    {"terminated": True, "update_weight": False},
    {"final_state": 1, "update_value": False},
)
CLIENT = b"client-number-01"


class Actor:
    """Actor that ships episodes into a list, and adds the same entries to a reference memory."""

    def __init__(self, parameters: Parameters, *, compression: str = "none", capacity: int = 300) -> None:
        self.shipped: list[Any] = []
        self.reference = Memory(SCHEMA, capacity, parameters, seed=1)

        def pack(*columns: Any) -> Any:
            *parts, final = columns
            return pack_episode(SCHEMA, *parts, final=final, now=5.0, compression=compression)

        def ship(shipment: Any, changes: Any) -> None:
            self.shipped.append(shipment)
            _core.at_once(changes)

        self.open = OpenEpisodes(SCHEMA, capacity, parameters, pack=pack, ship=ship)
        for memory in (self.reference, self.open):
            memory.set_clock(1000.0)

    def play(self, seed: int = 0, lanes: int = 3, steps: int = 17) -> None:
        """Record episodes of several lengths side by side, with every kind of ending."""
        rng = np.random.default_rng(seed)
        for memory in (self.reference, self.open):
            for lane in range(lanes):
                memory.open(lane)
        for step in range(steps):
            for lane in range(lanes):
                entry = (
                    rng.integers(0, 9, (3, 2)).astype(np.uint8),
                    np.float32(rng.normal()),
                    *(rng.normal(size=2).astype(np.float32) for _ in range(3)),
                    bool(rng.integers(2)),
                )
                weight, version = float(rng.integers(0, 3)), int(rng.integers(5, 7))
                for memory in (self.reference, self.open):
                    memory.add(lane, entry, weight, version)
                if rng.random() < 0.3 and step < steps - 1:
                    self.close(lane, rng)
        for lane in range(lanes):
            self.close(lane, rng)

    def close(self, lane: int, rng: Any) -> None:
        """Close the episode of a lane in both memories, with a random ending."""
        ending = dict(ENDINGS[rng.integers(len(ENDINGS))])
        if "final_state" in ending:
            ending["final_state"] = rng.integers(0, 9, (3, 2)).astype(np.uint8), np.float32(rng.normal())
        for memory in (self.reference, self.open):
            memory.close(lane, **ending)
            memory.open(lane)


def received(pool: EpisodePool, shipment: Any, client: bytes = CLIENT) -> int:
    """Check and add a shipment as a server does, from bytes at an odd address."""
    room = np.empty(shipment.payload.nbytes + 1, np.uint8)
    room[1:] = shipment.payload
    message = shipment.message(0, 1, shipment.payload.nbytes)
    checked = pool.check(message, room[1:].data, checksum=_bytes.checksum(room[1:].data))
    assert checked.samples == shipment.entries
    return pool.add(client, 1, checked)


def played(parameters: Parameters | None = None, *, seed: int = 0, **options: Any) -> tuple[EpisodePool, Memory]:
    """Return a pool with the episodes of an actor, and the actor's reference memory."""
    pool = EpisodePool(SCHEMA, parameters, seed=2, **options)
    pool.memory.set_clock(1000.0)
    actor = Actor(parameters or Parameters())
    actor.play(seed)
    for shipment in actor.shipped:
        received(pool, shipment)
    return pool, actor.reference


def alike(left: GatheredSamples, right: GatheredSamples) -> None:
    for side in ("prev", "next"):
        one, other = getattr(left, side), getattr(right, side)
        assert list(one) == list(other)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], name)
    for name in ("reward", "discount", "steps", "weight", "model_version", "age", "mask"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), name)


@pytest.mark.parametrize("compression", ["none", "zlib", "lz4"])
@pytest.mark.parametrize("name", EVERY)
def test_what_is_shipped_is_stored_as_the_memory_of_its_actor_would_have_it(name: str, compression: str) -> None:
    parameters = EVERY[name]
    actor, pool = Actor(parameters, compression=compression), EpisodePool(SCHEMA, parameters, capacity=300)
    pool.memory.set_clock(1000.0)
    actor.play(3)
    for shipment in actor.shipped:
        assert received(pool, shipment) == 0
    check_memory(pool.memory)
    np.testing.assert_allclose(pool.memory.sums(), actor.reference.sums(), rtol=1e-12)
    assert pool.memory.num_episodes == actor.reference.num_episodes == len(actor.shipped)
    drawn = pool.get(200).gathered
    numbers = drawn.ids["number"]  # ids are in the order of closing; the reference is in order of adding
    weights = [memory.contents()["weights"] for memory in (pool.memory, actor.reference)]
    np.testing.assert_array_equal(*map(np.sort, weights))
    alike(drawn, pool.memory.gather(numbers))
    single = Actor(parameters, compression=compression)
    single.play(4, lanes=1)
    alone = EpisodePool(SCHEMA, parameters, capacity=300)
    alone.memory.set_clock(1000.0)
    for shipment in single.shipped:
        received(alone, shipment)
    drawn = alone.get(200).gathered  # with one lane, pool and reference number entries alike
    alike(drawn, single.reference.gather(drawn.ids["number"]))


def test_an_episode_that_is_not_open_or_empty_is_not_shipped() -> None:
    actor = Actor(Parameters())
    with pytest.raises(EpisodeClosedError):
        actor.open.close(0)
    actor.open.open(0)
    with pytest.raises(EmptyEpisodeError):
        actor.open.close(0)
    with pytest.raises(ParameterError, match="multiplier"):
        actor.open.close(0, multiplier=-1.0)
    with pytest.raises(ParameterError, match="bootstrap_value"):
        actor.open.close(0, terminated=True, bootstrap_value=(1.0, 0.0))
    assert not actor.shipped


def arrays_of(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(count)
    return {
        "state": {"image": rng.integers(0, 9, (count, 3, 2)).astype(np.uint8), "speed": rng.normal(size=count)},
        "action": np.zeros((count, 2), np.float32),
        "reward": rng.normal(size=(count, 2)).astype(np.float32),
        "value": rng.normal(size=(count, 2)).astype(np.float32),
        "done": np.zeros(count, np.bool_),
    }


def test_arrays_become_the_episode_that_their_entries_would() -> None:
    actor, columns = Actor(Parameters()), arrays_of(6)
    weights, versions = np.arange(6, dtype=np.float32), np.arange(6)
    final = {"image": np.ones((3, 2), np.uint8), "speed": 2.0}
    ending = {"terminated": False, "final_state": final, "bootstrap_value": 0.25, "multiplier": 2.0}
    shipment = actor.open.make_shipment(columns, weights, versions, ending)
    np.testing.assert_allclose(shipment.returned, columns["reward"].sum(axis=0), rtol=1e-6)
    pool, reference = EpisodePool(SCHEMA, capacity=300, seed=0), actor.reference
    received(pool, shipment)
    reference.open(0)
    leaves = [*columns["state"].values(), *(columns[name] for name in ("action", "reward", "value", "done"))]
    for t in range(6):
        reference.extend(0, [leaf[t : t + 1] for leaf in leaves], weights[t : t + 1], t)
    reference.close(0, **ending)
    drawn = pool.get(50).gathered
    expected = reference.gather(drawn.ids["number"])
    drawn.age[:] = expected.age[:] = 0.0
    alike(drawn, expected)
    by_leaf = columns | {"state.image": columns["state"]["image"], "state.speed": columns["state"]["speed"]}
    del by_leaf["state"]
    np.testing.assert_array_equal(
        actor.open.make_shipment(by_leaf, weights, versions, ending).payload, shipment.payload
    )


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"reward": None}, EntryError, "Column 'reward' is missing"),
        ({"speed": np.zeros(6)}, EntryError, "There is no column 'speed'; the columns are"),
        ({"action": np.zeros((5, 2), np.float32)}, EntryError, r"float32\[6, 2\]"),
        ({"reward": np.full((6, 2), np.nan, np.float32)}, EntryError, "finite"),
        ({"qvest": np.zeros((6, 2), np.float32)}, EntryError, "There is no column 'qvest'"),
    ],
)
def test_arrays_that_do_not_fit_are_named(change: dict[str, Any], error: type[Exception], says: str) -> None:
    columns = {name: value for name, value in (arrays_of(6) | change).items() if value is not None}
    with pytest.raises(error, match=says):
        Actor(Parameters()).open.make_shipment(columns, 1.0, 0, {})


def test_an_episode_may_have_a_single_column_but_not_no_entries() -> None:
    schema = Schema({"level": Column(np.int64, (), "state")})
    episodes = OpenEpisodes(schema, 10, Parameters(), pack=lambda *columns: columns, ship=lambda *shipped: None)
    assert episodes.make_shipment({"level": np.arange(4)}, 1.0, 0, {}).entries == 4
    with pytest.raises(ParameterError, match="at least one entry"):
        Actor(Parameters()).open.make_shipment(arrays_of(0), 1.0, 0, {})
    with pytest.raises(ParameterError, match="init_w"):
        Actor(Parameters()).open.make_shipment(arrays_of(3), -1.0, 0, {})


def refused(pool: EpisodePool, body: messages.Body, payload: Any, **options: Any) -> str:
    with pytest.raises(ProtocolError) as caught:
        pool.check(body, payload, **options)
    return f"{caught.value.code}: {caught.value.detail}"


def test_episodes_that_cannot_be_are_refused_before_anything_is_stored() -> None:
    pool, _ = played(capacity=300)
    before = pool.stats()
    actor = Actor(Parameters())
    good = actor.open.make_shipment(
        arrays_of(5), 1.0, 0, {"final_state": {"image": np.ones((3, 2), np.uint8), "speed": 0.0}}
    )
    message = good.message(0, 1, 1)
    assert (
        refused(pool, messages.Cache(number=1, pushed_bytes=1), good.payload)
        == "unexpected: CACHE was pushed; this table stores whole episodes"
    )
    bare = messages.EpisodePush(number=1, pushed_bytes=1)
    assert refused(pool, bare, good.payload).startswith("parameters:")  # the message denies the final state
    assert refused(pool, message, good.payload, checksum=1).startswith("payload:")
    assert refused(pool, message, good.payload, limits=Limits(message_bytes=100)).startswith("too_large:")
    long = Actor(Parameters(), capacity=400).open.make_shipment(arrays_of(301), 1.0, 0, {})
    assert "the table has room for 300" in refused(pool, long.message(0, 1, 1), long.payload)
    for bootstrap, terminated in (([1.0], None), ([float("nan"), 0.0], None), ([1e300, 0.0], None), ([1.0, 0.0], True)):
        fields = {"has_final": True, "bootstrap": bootstrap, "terminated": terminated}
        assert refused(pool, messages.EpisodePush(**fields), good.payload).startswith("value:")  # type: ignore[arg-type]
    layout = layout_of(SCHEMA, Parameters(), ContainerKind.EPISODE, final=True)
    for name, value in (("reward", np.inf), ("value", np.nan)):
        broken = good.payload.copy()
        row = containers.table(broken)[layout.block_number(Part.PREV, name)]  # type: ignore[index]
        broken[row.offset : row.offset + 4] = np.array([value], np.float32).view(np.uint8)
        assert refused(pool, message, broken) == f"value: column {name!r} is not finite"
    assert pool.stats() == before


def test_flipped_bits_are_refused_or_make_an_episode_that_can_be_stored_and_drawn() -> None:
    pool, actor = EpisodePool(SCHEMA, Parameters(frame_stack=2), capacity=50, seed=1), Actor(Parameters())
    good = actor.open.make_shipment(
        arrays_of(5), 1.0, 0, {"final_state": {"image": np.ones((3, 2), np.uint8), "speed": 0.0}}
    )
    message, taken = good.message(0, 1, 1), 0
    for at in range(good.payload.nbytes):
        broken = good.payload.copy()
        broken[at] ^= 1 << at % 8
        try:
            checked = pool.check(message, broken)
        except ProtocolError:
            continue
        pool.add(CLIENT, 1, checked)
        taken += 1
    assert 0 < taken < good.payload.nbytes
    check_memory(pool.memory)
    assert np.isfinite(pool.get(100).importance).all()


def test_an_episode_for_which_the_memory_became_too_small_is_refused() -> None:
    pool, actor = EpisodePool(SCHEMA, byte_limit=100_000), Actor(Parameters())
    shipment = actor.open.make_shipment(arrays_of(20), 1.0, 0, {"terminated": True})
    checked = pool.check(shipment.message(0, 1, 1), shipment.payload)
    assert pool.limit_bytes(10 * (SCHEMA.entry_bytes + ENTRY_OVERHEAD)) == 0
    with pytest.raises(ProtocolError, match="too_large"):
        pool.add(CLIENT, 1, checked)
    assert pool.stats().held == 0
    check_memory(pool.memory)


def test_entries_that_become_too_old_while_a_reader_draws_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = played(Parameters(max_age=10.0))
    pool.reserve(b"r" * 16, 5)
    counts = counts_of({pool.owner: 5})

    def later(*arguments: Any, **options: Any) -> Any:
        pool.memory.set_clock(2000.0)
        return build_drawn(*arguments, **options)

    build_drawn = containers.build_drawn
    assert pool.draw_counts(b"r" * 16, counts) is not None
    monkeypatch.setattr(containers, "build_drawn", later)
    assert pool.draw_counts(b"r" * 16, counts) is None
    assert pool.stats().drawn == 5


def test_capacity_and_bytes_that_do_not_fit_each_other_are_refused() -> None:
    size = SCHEMA.entry_bytes + ENTRY_OVERHEAD
    assert EpisodePool(SCHEMA, byte_limit=7 * size + 1).capacity == 7
    assert EpisodePool(SCHEMA, byte_limit=7 * size, capacity=5).capacity == 5
    with pytest.raises(ParameterError, match=f"byte_limit must be at least {8 * size} for 8 entries"):
        EpisodePool(SCHEMA, byte_limit=8 * size - 1, capacity=8)
    with pytest.raises(ParameterError, match="byte_limit must be at least"):
        EpisodePool(SCHEMA, byte_limit=3)
    with pytest.raises(ParameterError, match="capacity"):
        EpisodePool(SCHEMA, capacity=-1)


def test_ids_name_the_memory_and_a_memory_that_begins_anew_has_another_name() -> None:
    pool, reference = played(capacity=300)
    drawn = pool.get(40).gathered
    assert drawn.ids.dtype == ID
    assert {drawn.ids["client"].tobytes()[i : i + 16] for i in range(0, 640, 16)} == {pool.owner}
    number = drawn.ids["number"][:1]
    assert pool.apply(pool.owner, number, np.array([3.5], np.float32)) == (1, 0)
    exponent = pool.parameters.priority_exponent
    at = np.flatnonzero(pool.memory.contents()["meta"]["number"] == number[0])
    assert pool.memory.contents()["meta"]["priority"][at] == np.float32(3.5 + 1e-6)
    assert exponent > 0
    assert pool.apply(b"x" * 16, number, np.array([9.0], np.float32)) is None
    former, held = pool.owner, pool.stats().caches
    assert pool.clear() == held
    assert pool.owner != former
    assert pool.apply(former, number, np.array([9.0], np.float32)) is None
    assert pool.apply(pool.owner, number, np.array([9.0], np.float32)) == (0, 1)
    assert (pool.stats().applied, pool.stats().stale) == (1, 1)
    assert pool.stats().held == 0


def test_parameters_weigh_what_is_stored_anew() -> None:
    pool, reference = played(capacity=300)
    for changes in ({"priority_exponent": 1.0}, {"multi_step": 3, "frame_stack": 2}, {"discount": (0.5,)}):
        parameters = pool.parameters.replace(**changes)
        assert pool.configure(parameters) == 0
        reference.configure(parameters)
        np.testing.assert_allclose(pool.memory.sums(), reference.sums(), rtol=1e-9)
    assert pool.configure(pool.parameters.replace(max_episode=2)) == pool.stats().added - 2
    with pytest.raises(ParameterError):
        pool.configure(pool.parameters.replace(prev=("nothing",)))


def test_arrays_of_the_caller_are_filled() -> None:
    pool, _ = played(capacity=300)
    out = {"action": np.empty((8, 2), np.float32), "state.image": np.empty((8, 3, 2), np.uint8), "ids": np.empty(8, ID)}
    drawn = pool.get(8, out=out).gathered
    assert drawn.prev["action"] is out["action"] or drawn.prev["action"].base is out["action"]
    alike(drawn, pool.memory.gather(drawn.ids["number"]))
    with pytest.raises(ParameterError, match="action"):
        pool.get(8, out={"action": np.empty((7, 2), np.float32)})
    with pytest.raises(ParameterError, match="batch_size"):
        pool.get(0)


def test_a_draw_waits_for_the_first_episode_and_ends_with_the_pool() -> None:
    pool, actor = EpisodePool(SCHEMA, capacity=300), Actor(Parameters())
    with pytest.raises(NotEnoughSamples, match="none of the 0 entries in 0 episodes of 0 clients can be drawn"):
        pool.get(4)
    with pytest.raises(NotEnoughSamples, match=r"after waiting \d+\.\d s"):
        pool.get(4, timeout=0.01)
    assert pool.stats().misses == 2
    waiting, box = in_thread(lambda: pool.get(4, timeout=100.0))
    until(lambda: pool._waiter.waiting)
    received(pool, actor.open.make_shipment(arrays_of(4), 1.0, 0, {"terminated": True}))
    waiting.join(100.0)
    assert len(box["value"].gathered.ids) == 4
    pool.clear()
    for _ in range(2):
        pool.close()
    with pytest.raises(Closed):
        pool.draw_counts(b"r" * 16, np.zeros(0, CLIENT_COUNTS))
    shipment = actor.open.make_shipment(arrays_of(4), 1.0, 0, {"terminated": True})
    assert received(pool, shipment) == 0
    assert pool.stats().held == 0


def test_silent_clients_are_not_counted_and_what_they_sent_stays() -> None:
    now = [0.0]
    pool = EpisodePool(SCHEMA, capacity=300, client_timeout=10.0, clock=lambda: now[0])
    shipment = Actor(Parameters()).open.make_shipment(arrays_of(4), 1.0, 0, {"terminated": True})
    received(pool, shipment)
    pool.record_contact(b"2" * 16)
    pool.record_contact(b"3" * 16)
    pool.unregister(b"3" * 16)
    assert pool.stats().clients == 2
    now[0] = 11.0
    pool.record_contact(b"4" * 16)
    assert pool.stats().clients == 1
    assert pool.expire() == 0
    pool.unregister(b"4" * 16)
    assert (pool.stats().clients, pool.stats().held) == (0, 4)


@pytest.mark.parametrize("name", EVERY)
def test_a_reader_gets_the_samples_that_the_memory_has(name: str) -> None:
    parameters = EVERY[name].replace(importance_exponent=1.0)
    pool, _ = played(parameters, capacity=300)
    rows = pool.reserve(b"r" * 16, 64)
    assert rows["client"].tobytes() == pool.owner
    planned = plan([rows], 64, 0.5)
    assert planned is not None
    (counts,) = planned.counts
    payload = pool.draw_counts(b"r" * 16, counts, now=7.0)
    layout = layout_of(SCHEMA, parameters, ContainerKind.DRAWN)
    held = containers.check(payload, layout)
    drawn = build_batch(planned, [held], layout, parameters, 1, 1.0)
    gathered = drawn.gathered
    assert gathered.ids["client"].tobytes() == pool.owner * 64
    expected = pool.memory.gather(gathered.ids["number"])
    if gathered.mask is None:
        alike(gathered, expected)
    chance = pool.memory.weights(gathered.ids["number"]) / pool.memory.total_weight
    np.testing.assert_allclose(drawn.importance * drawn.divisor, 1.0 / (pool.memory.num_positive * chance), rtol=1e-5)


def test_entries_are_drawn_no_more_often_than_they_may_by_anybody() -> None:
    pool, _ = played(Parameters(max_times_sampled=2, priority_exponent=0.0), capacity=300)
    allowed = 2 * pool.memory.num_positive
    seen = pool.get(20).gathered.ids["number"].tolist()
    (row,) = pool.reserve(b"r" * 16, 10)
    assert (int(row["reserved"]), int(row["flags"])) == (allowed - 20, 0)
    planned = plan([pool.reserve(b"r" * 16, 10)], 10, 0.5)
    assert planned is not None
    counts = planned.counts[0].copy()
    layout = layout_of(SCHEMA, pool.parameters, ContainerKind.DRAWN)
    while (payload := pool.draw_counts(b"r" * 16, counts)) is not None:
        seen += np.frombuffer(containers.check(payload, layout).part(Part.NUMBER), "<i8").tolist()
        with pytest.raises(NotEnoughSamples, match=r"max_times_sampled=2 limits draws of an entry, and|none of the"):
            pool.get(allowed)
        counts["count"] = 17
    assert len(seen) == allowed
    assert np.unique(seen, return_counts=True)[1].max() == 2
    assert len(pool.reserve(b"r" * 16, 10)) == 0


def test_the_weighted_mean_over_unequal_pools_is_the_plain_mean() -> None:
    """Weights of the pools of 20, 60 and 200 entries differ a hundredfold; beta is 1, and shares are systematic."""
    parameters, rng = Parameters(importance_exponent=1.0, priority_exponent=1.0), np.random.default_rng(5)
    pools, truth = [], []
    for entries, scale in ((20, 1.0), (60, 100.0), (200, 0.5)):
        values = rng.normal(scale, 1.0, entries).astype(np.float32)
        pool = EpisodePool(SCHEMA_EPISODE_MEMORY, parameters, capacity=300, seed=entries)
        pool.add(CLIENT, 1, episode_of(values, rng.uniform(0.01, scale, entries)))
        pools.append(pool)
        truth.append(values)
    expected = np.concatenate(truth).mean()
    layout = layout_of(SCHEMA_EPISODE_MEMORY, parameters, ContainerKind.DRAWN)
    means = []
    for draw in range(300):
        planned = plan([pool.reserve(b"r" * 16, 32) for pool in pools], 32, float(rng.random()))
        assert planned is not None
        parts = [pool.draw_counts(b"r" * 16, c) for pool, c in zip(pools, planned.counts, strict=True) if len(c)]
        held = [containers.check(part, layout) for part in parts]
        drawn = build_batch(planned, held, layout, parameters, draw, 1.0)
        factor = drawn.importance.astype(np.float64) * drawn.divisor
        means.append((factor * drawn.gathered.prev["obs"][:, 0, 0]).mean())
    error = np.std(means) / np.sqrt(len(means))
    assert abs(np.mean(means) - expected) < 4.0 * error


# --- The memory of a pool of episodes: room, replacement, restored episodes, and draws for a reader

SCHEMA_EPISODE_MEMORY = Schema({"obs": (np.float32, (3,)), "reward": np.float32})
SIZE = SCHEMA_EPISODE_MEMORY.entry_bytes + ENTRY_OVERHEAD


def episode_of(values: Any, weights: Any = 1.0) -> CheckedEpisode:
    """Return an episode with these observations and rewards."""
    count = len(values)
    columns = {"obs": np.repeat(values[:, None], 3, axis=1).astype(np.float32), "reward": values.astype(np.float32)}
    weights = np.broadcast_to(weights, count).astype(np.float32)
    facts: dict[str, Any] = {"learned": np.zeros(count, np.bool_), "model_version": np.zeros(count, np.int64)}
    episode = dataset.Episode(columns=columns, init_w=weights, priority=None, born=None, terminated=True, **facts)
    return CheckedEpisode(episode, np.zeros(count, np.float32), count)


def stored(*lengths: int, capacity: int = 20, byte_limit: int = 1 << 20) -> EpisodePool:
    """Return a pool of episodes whose observations count their steps."""
    pool = EpisodePool(SCHEMA_EPISODE_MEMORY, capacity=capacity, byte_limit=byte_limit, seed=1)
    for length in lengths:
        pool.add(CLIENT, 1, episode_of(np.arange(length)))
    return pool


def test_names_of_episodes_that_have_left_are_forgotten() -> None:
    source, pool = stored(1), stored(capacity=4)
    (kept,) = source.walk()
    for number in range(500):
        assert pool.put_back(kept._replace(number=number))[0]
        assert len(pool._put_back) <= 2 * pool.now.memory.num_episodes + 100
    assert not pool.put_back(kept._replace(number=499))[0]


def test_another_limit_of_bytes_moves_the_newest_episodes_into_a_memory_with_another_name() -> None:
    pool = stored(8, 8, 2, capacity=0, byte_limit=20 * SIZE)
    first = pool.now
    first.memory.saw_model(7)
    kept = list(pool.walk())
    assert pool.limit_bytes(12 * SIZE) == 1 and pool.byte_limit == 12 * SIZE
    assert pool.now.owner != first.owner and (pool.now.memory.capacity, pool.now.memory.num_entries) == (12, 10)
    assert pool.now.memory.newest_model == 7
    assert pool.limit_bytes(4 * SIZE) == 1 and pool.now.memory.num_entries == 2, "one of 8 entries has no room at all"
    with pytest.raises(ParameterError, match="byte_limit"):
        pool.limit_bytes(SIZE - 1)
    assert pool.byte_limit == 4 * SIZE
    again = pool.now
    assert pool.limit_bytes(4 * SIZE + 1) == 0 and pool.now is again, "the same number of entries"
    assert pool.put_back(kept[2]) == (True, 0), "what came by the wire has no name from before"


def test_episodes_that_were_put_back_keep_their_names_when_they_move() -> None:
    pool = stored(capacity=0, byte_limit=20 * SIZE)
    kept = list(stored(5, 6).walk())
    for each in kept:
        pool.put_back(each)
    assert pool.limit_bytes(8 * SIZE) == 1
    assert [pool.put_back(each)[0] for each in reversed(kept)] == [False, True]


def test_a_reader_gets_what_it_asks_of_this_memory() -> None:
    now = stored(5, 6).now
    layout = layout_of(SCHEMA_EPISODE_MEMORY, now.memory.parameters, ContainerKind.DRAWN)
    payload, drawn = drawn_for(now, counts_of({now.owner: 7}), now=0.0, compression="none")
    assert drawn == 7 and containers.check(payload, layout).samples == 7
    nothing = (None, 0)
    assert drawn_for(now, counts_of({b"x" * 16: 7}), now=0.0, compression="none") == nothing
    assert drawn_for(stored().now, counts_of({now.owner: 7}), now=0.0, compression="none") == nothing
    empty = NamedMemory(stored().now.memory, now.owner)
    assert drawn_for(empty, counts_of({now.owner: 7}), now=0.0, compression="none") == nothing
    with pytest.raises(ProtocolError, match="samples in one request"):
        drawn_for(now, counts_of({now.owner: MAX_DRAWN + 1}), now=0.0, compression="none")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NoDrawsLeft(5, 2, 3), "max_times_sampled=3 limits draws of an entry, and 2 draws remain in all"),
        (EmptyMemory(0, "no group is complete"), "no group is complete. Wait for actors to ship more"),
        (EmptyMemory(4), "none of the 4 entries in 2 episodes of 1 clients can be drawn"),
    ],
)
def test_why_a_draw_waits_is_said_in_words(error: EmptyMemory, words: str) -> None:
    assert wait_reason(error, 2, 1) == words


def test_an_episode_whose_ragged_values_have_no_room_in_a_smaller_memory_goes() -> None:
    schema = Schema({"obs": Column(np.uint8, (None,), "state"), "reward": np.float32})
    pool = EpisodePool(schema, byte_limit=20_000)
    for length in (5000, 10):
        pool.memory.open()
        pool.memory.add(0, (np.ones(length, np.uint8), 1.0))
        pool.memory.close(terminated=True)
    assert pool.limit_bytes(4000) == 1
    assert pool.byte_limit == 4000 and pool.memory.num_episodes == 1 and pool.memory.ragged_bytes < 100
