"""Draws over held caches: shares, counts, importance, plans and limits, compared with slow models."""

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import containerkit
from memoire.errors import Closed, NotEnoughSamples, ParameterError, ProtocolError
from memoire.replay.parameters import Parameters
from memoire.tables.caches import _draw
from memoire.tables.caches.pool import Pool
from memoire.tables.draws import build_batch, plan
from memoire.tables.episodes.pool import EpisodePool
from memoire.wire import _bytes, _container, containers
from memoire.wire.containers import ContainerHead
from memoire.wire.layout import layout_of
from memoire.wire.parts import ZERO_FRAME, ContainerKind, Part
from memoire.wire.rows import CLIENT_COUNTS, CLIENT_SUMS
from netkit import in_thread
from poolkit import PLAIN, SCHEMA, Clock, counts_of, held, held_of, made, name, pool_of

STACKED = Parameters(frame_stack=3, multi_step=2)
LAYOUT = layout_of(SCHEMA, PLAIN)


def clients_of(gathered: Any) -> Any:
    return gathered.ids["client"][:, 0]


def slow_shares(weight: Any, unused: Any, between: Any, batch: int) -> Any:
    """Return the shares of docs/sampling.md, by bisection on the water level and on the factor by which caps rise."""
    able = (unused > 0) & (weight > 0)
    cap = np.where(able, unused / np.maximum(between, batch), 0.0)
    if cap.sum() > 1.0:
        low, high = 0.0, 1.0
        while (np.minimum(high * weight, cap)).sum() < 1.0:
            high *= 2.0
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if np.minimum(middle * weight, cap).sum() < 1.0 else (low, middle)
        return np.minimum(high * weight, cap)
    most = np.where(able, unused / batch, 0.0)
    low, high = 1.0, 1.0
    while np.minimum(high * cap, most).sum() < 1.0 - 1e-12 and high < 1e30:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * cap, most).sum() < 1.0 else (low, middle)
    return np.minimum(high * cap, most)


clients = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1e-3, 1.0, 2.0, 50.0]) | st.floats(1e-6, 1e6), st.integers(0, 400), st.integers(0, 3000)
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(clients, st.integers(1, 256))
def test_shares_are_those_of_the_slow_model(rows: list[tuple[float, int, int]], batch: int) -> None:
    weight, unused, between = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    if unused[weight > 0].sum() < batch:
        return
    share = _draw.shares(weight, unused, between, batch)
    np.testing.assert_allclose(share, slow_shares(weight, unused, between, batch), rtol=1e-6, atol=1e-9)
    assert share.sum() == pytest.approx(1.0, abs=1e-12)
    assert (batch * share <= unused * (1 + 1e-9)).all()


@settings(max_examples=300)
@given(clients, st.integers(1, 256), st.floats(0.0, 1.0, exclude_max=True))
def test_counts_are_whole_add_up_and_never_exceed_what_is_there(rows: Any, batch: int, start: float) -> None:
    weight, unused, between = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    if unused[weight > 0].sum() < batch:
        return
    share = _draw.shares(weight, unused, between, batch)
    count = _draw.systematic_counts(share, unused, batch, start)
    assert count.sum() == batch
    assert (count <= unused).all()
    assert (np.abs(count - batch * share) <= 1.0 + 1e-6).all()


def test_counts_have_the_mean_of_their_shares() -> None:
    share, unused = np.array([0.07, 0.31, 0.005, 0.615]), np.full(4, 1000.0)
    starts = (np.arange(1000) + 0.5) / 1000
    mean = np.mean([_draw.systematic_counts(share, unused, 10, start) for start in starts], axis=0)
    np.testing.assert_allclose(mean, 10 * share, atol=2e-3)


def test_lengths_dtypes_and_sizes_that_do_not_fit_are_refused() -> None:
    one, two = np.ones(1), np.ones(2)
    for bad in (
        (one, two, one),
        (one, one, two),
        (np.ones(1, np.float32), one, one),
        (one, [1.0], one),
        (two[::-1], two, two),
    ):
        with pytest.raises(ValueError, match="expected"):
            _draw.shares(*bad, 1.0)
    with pytest.raises(ValueError, match="fewer unused"):
        _draw.systematic_counts(one, one, 5, 0.0)
    with pytest.raises(ValueError, match="start"):
        _draw.systematic_counts(one, one, 1, 1.0)
    for size in (-1, 2**31, 2**62):  # 2**62 picks of 56 bytes would be 0 bytes
        with pytest.raises(ValueError, match=f"at most 2147483647 samples, got {size}"):
            _draw.Picks(LAYOUT.core, size)


def check_row(gathered: Any, row: int, one: Any, j: int) -> None:
    """Check that a row of a batch is sample j of a container, in the columns of the batch."""
    if "obs" in gathered.prev:
        frames = np.concatenate([one.block(Part.FRAMES, "obs"), np.zeros((1, 3), np.float32)])
        for side, part in (("prev", Part.PREV_INDEX), ("next", Part.NEXT_INDEX)):
            index = np.minimum(one.block(part)[j], len(frames) - 1)
            np.testing.assert_array_equal(getattr(gathered, side)["obs"][row], frames[index])
    assert gathered.prev["action"][row] == one.block(Part.PREV, "action")[j]
    for field, part in (
        ("reward", Part.REWARD_SUM), ("discount", Part.DISCOUNT), ("steps", Part.STEPS), ("model_version", Part.MODEL),
    ):  # fmt: skip
        assert getattr(gathered, field)[row] == one.block(part)[j]


def test_every_sample_comes_out_exactly_once_and_as_it_was() -> None:
    pool, by_number = pool_of([17, 40, 3], STACKED, clock=(clock := Clock())), {}
    clock.now += 8.0
    for i, count in enumerate([17, 40, 3]):
        for first in range(0, count, 5):
            numbers = np.arange(first, min(first + 5, count))
            replace = {Part.NUMBER: numbers, Part.WEIGHT: np.ones(len(numbers))}
            head = ContainerHead(2, 10.0 * (i + 1), 50, 0.5)
            one = containerkit.make(layout_of(SCHEMA, STACKED), len(numbers), head=head, replace=replace)
            by_number |= {(i, number): (one, j) for j, number in enumerate(numbers.tolist())}
    seen = set()
    for size in (20, 1, 39):
        gathered = pool.get(size).gathered
        for row in range(size):
            key = (int(clients_of(gathered)[row]), int(gathered.ids["number"][row]))
            assert key not in seen
            seen.add(key)
            one, j = by_number[key]
            check_row(gathered, row, one, j)
            assert gathered.age[row] == one.block(Part.AGE)[j] + np.float32(8.0), "the time in the pool counts"
    assert len(seen) == 60
    assert pool.stats().unused == pool.stats().caches == pool.stats().bytes == 0


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("normalize", ["batch", "global"])
def test_importance_is_the_formula(beta: float, normalize: str) -> None:
    pool = Pool(SCHEMA, Parameters(importance_exponent=beta, normalize=normalize), seed=3)
    rng = np.random.default_rng(0)
    then = {0: (100.0, 50), 1: (10.0, 80)}  # S_k, N_k when the caches were made
    now = {0: (30.0, 90, 0.25), 1: (60.0, 20, 0.125)}
    for i in (0, 1):
        total, positives = then[i]
        pool.add(name(i), 1, made(40, weight=rng.random(40) + 0.1, total=total, positives=positives, minimum=0.05))
        assert pool.sums(name(i), 2, *now[i])
        assert not pool.sums(name(i), 1, 1e6, 10**6, 1.0)  # an older message
    result = pool.get(30)
    share = {0: 30.0 / 90.0, 1: 60.0 / 90.0}
    value = np.empty(30)
    for row, client in enumerate(clients_of(result.gathered).tolist()):
        total, positives = then[client]
        chance = share[client] * float(result.gathered.weight[row]) / total
        value[row] = (110 * chance * positives / now[client][1]) ** -beta
    largest = max((110 * share[i] * now[i][2] / now[i][0]) ** -beta for i in (0, 1))
    divisor = value.max() if normalize == "batch" else max(value.max(), largest)
    assert result.divisor == pytest.approx(divisor, rel=1e-6)
    np.testing.assert_allclose(result.importance, value / divisor, rtol=1e-5)
    assert result.importance.max() <= 1.0
    assert result.left_out == 0.0


def estimates_of(pool: Pool, rounds: int, batch: int, seed: int) -> tuple[Any, Any, list[set[int]]]:
    """Draw while four unequal clients drift and push; one client pushes far less than its weight asks for.

    Returns three values for each batch: the estimate of the mean of `action` over all entries of positive weight at
    beta = 1; the mean that docs/sampling.md promises; and the clients in the batch. In the promised mean each client
    counts with its newest N_c, as it was when the drawn cache was made.
    """
    rng = np.random.default_rng(seed)
    size, every = (400, 300, 200, 100), (1, 2, 1, 9)
    values = [rng.integers(0, 10, n) + 40 * i for i, n in enumerate(size)]
    base = [(rng.random(n) + 0.1) * scale for n, scale in zip(size, (1.0, 2.0, 1.0, 40.0), strict=True)]
    means: dict[tuple[int, int], float] = {}
    newest, estimates, promised, served = [0] * 4, [], [], []
    for turn in range(rounds):
        for i in range(4):
            if turn % every[i] == 0:  # weights drift, entries come and go, values change
                alive = rng.random(size[i]) < 0.75 + 0.2 * np.sin(turn / 17 + i)
                weight = np.where(alive, base[i] * np.exp(0.8 * np.sin(turn / 29 + 2 * i)), 0.0)
                values[i] = (values[i] + rng.integers(0, 2, size[i])) % 97
                picked = rng.choice(size[i], 64, p=weight / weight.sum())
                means[i, turn], newest[i] = float(values[i][alive].mean()), int(alive.sum())
                one = made(
                    64, weight=weight[picked], total=weight.sum(), positives=newest[i], minimum=weight[alive].min(),
                    action=values[i][picked], first=turn * 1000,
                )  # fmt: skip
                pool.add(name(i), 2 * turn, one)
            else:  # a message without a cache: N_c and S_c differ from those of the held caches
                newest[i] = int(size[i] * (0.75 + 0.2 * np.sin(turn / 17 + i)))
                pool.sums(name(i), 2 * turn, base[i].sum() * np.exp(0.8 * np.sin(turn / 29 + 2 * i)), newest[i], 0.01)
        result = pool.get(batch)
        # importance * divisor is N_c / (N P N_k)
        estimates.append(np.mean(result.gathered.prev["action"] * result.importance.astype(float) * result.divisor))
        who, when = clients_of(result.gathered).astype(int), result.gathered.ids["number"] // 1000
        represented = {i: np.mean([means[i, turn] for turn in when[who == i].tolist()]) for i in set(who.tolist())}
        served.append(set(represented))
        population = sum(newest[i] for i in represented)
        promised.append(sum(newest[i] / population * mean for i, mean in represented.items()))
    return np.array(estimates), np.array(promised), served


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_weighted_mean_is_what_the_design_promises(seed: int) -> None:
    pool = Pool(SCHEMA, PLAIN, seed=seed, cache_limit=60)
    estimates, promised, served = estimates_of(pool, 1000, 96, seed)
    settled = slice(100, None)
    assert all(one == {0, 1, 2, 3} for one in served[settled])
    assert pool.stats().overwritten > 100  # old caches were held, and lost
    difference = (estimates - promised)[settled]
    error = difference.std() / np.sqrt(len(difference))
    assert error < 0.01 * promised[settled].mean()
    assert abs(difference.mean()) < 3.5 * error


def test_the_oldest_cache_of_the_largest_holder_makes_room() -> None:
    size = made(5).nbytes
    pool = Pool(SCHEMA, PLAIN, byte_limit=5 * size, seed=0)
    for turn in range(2):
        pool.add(name(0), turn, made(5, first=5 * turn))
    for turn in range(4):
        gone = pool.add(name(1), turn, made(5, first=5 * turn))
        assert gone == (turn == 3)
    assert {client.id: client.caches for client in held_of(pool)} == {name(0): 2, name(1): 3}
    stats = pool.stats()
    assert (stats.overwritten, stats.overwritten_samples, stats.bytes, stats.caches) == (1, 5, 5 * size, 5)
    gathered = pool.get(25).gathered
    assert sorted(gathered.ids["number"][clients_of(gathered) == 1]) == list(range(5, 20))


def test_silent_clients_leave_when_their_samples_are_used() -> None:
    clock = Clock()
    pool = pool_of([5, 5, 5], client_timeout=10.0, clock=clock)
    pool.sums(name(3), 1, 1e6, 5, 1.0)
    clock.now += 8.0
    pool.record_contact(name(0))
    clock.now += 4.0
    assert pool.expire() == 1  # client 3 has no samples; clients 1 and 2 still have some
    assert pool.get(15).left_out == 0.0
    assert pool.expire() == 2
    assert pool.stats().clients == 1
    assert pool.stats().left == 3


def test_with_reuse_silent_clients_leave_at_once() -> None:
    clock = Clock()
    pool = pool_of([5, 5], PLAIN.replace(reuse_cache=True), client_timeout=10.0, clock=clock)
    clock.now += 11.0
    pool.record_contact(name(0))
    assert set(clients_of(pool.get(100).gathered)) == {0}
    assert pool.stats().clients == 1


def test_a_batch_is_all_or_nothing() -> None:
    pool = pool_of([5, 7])
    with pytest.raises(NotEnoughSamples) as problem:
        pool.get(13)
    assert str(problem.value) == (
        "a batch of 13 needs 13 unused samples, but 12 are held in 3 caches of 2 clients. No sample was taken. "
        "Wait for actors to push (timeout=), or set reuse_cache."
    )
    assert (pool.stats().unused, pool.stats().drawn, pool.stats().misses) == (12, 0, 1)
    assert len(pool.get(12).importance) == 12
    for samples in (0, -1, 2**31, 2**62):
        with pytest.raises(ValueError, match="batch_size must be from 1 to 2147483647"):
            pool.get(samples)


def test_an_out_that_does_not_fit_takes_no_sample() -> None:
    pool = pool_of([20])
    with pytest.raises(ValueError, match=r"out\['steps'\] must be an array int32\[5\], got 'float32\[5\]'"):
        pool.get(5, out={"steps": np.zeros(5, np.float32)})  # the array has as many bytes
    with pytest.raises(ParameterError, match=r"out\['action'\] must be an array int32\[5\]"):
        pool.get(5, out={"action": np.zeros(6, np.int32)})
    with pytest.raises(ParameterError, match=r"out\['weight'\] cannot be given"):
        pool.get(5, out={"weight": np.zeros(5, np.float32)})
    assert pool.stats().unused == 20


def test_named_arrays_are_filled_where_they_are() -> None:
    pool, other = pool_of([20], STACKED), pool_of([20], STACKED)
    out = {
        "obs": np.empty((5, 3, 3), np.float32), "next_obs": np.empty((5, 3, 3), np.float32),
        "reward": np.empty(5, np.float32), "action": np.empty(10, np.int32)[::2],
    }  # fmt: skip
    gathered, fresh = pool.get(5, out=out).gathered, other.get(5).gathered
    assert np.shares_memory(gathered.reward, out["reward"])
    assert np.shares_memory(gathered.prev["obs"], out["obs"])
    assert np.shares_memory(gathered.next["obs"], out["next_obs"])
    assert not np.shares_memory(gathered.prev["action"], out["action"])  # the action array is not contiguous
    for ours, theirs in zip(gathered.prev.values(), fresh.prev.values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_sums_may_be_as_large_as_numbers_get() -> None:
    pool = Pool(SCHEMA, PLAIN, seed=1)
    for i in range(3):
        pool.add(name(i), 0, made(20, total=1.7e308))
    pool.sums(name(3), 1, 1.7e308, 5, 1.0)
    one = pool.get(30)
    np.testing.assert_array_equal(np.bincount(clients_of(one.gathered).astype(int)), [10, 10, 10])
    assert one.left_out == pytest.approx(0.25)
    chosen = plan([pool.reserve(b"r" * 16, 100)], 9, 0.5)
    assert chosen is not None
    assert [pi for pi, _ in chosen.asked.values()] == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    assert chosen.left_out == pytest.approx(0.25)


def test_a_weight_next_to_nothing_keeps_importance_finite() -> None:
    for normalize in ("batch", "global"):
        pool = Pool(SCHEMA, PLAIN.replace(normalize=normalize), seed=1)
        pool.add(name(0), 0, made(4, weight=[5e-324, 1.0, 1.0, 1.0], total=1e300, minimum=5e-324))
        one = pool.get(4)
        assert np.isfinite(one.importance).all() and np.isfinite(one.divisor)
        assert one.importance.max() == 1.0


def test_a_closed_pool_takes_nothing_in() -> None:
    pool = pool_of([5])
    pool.close()
    assert pool.add(name(0), 9, made(5)) == 0
    assert not pool.sums(name(1), 9, 1.0, 1, 1.0)
    assert (pool.stats().caches, pool.stats().clients) == (0, 0)


def wait_for(pool: Pool, samples: int, change: Any) -> Any:
    """Return the number of samples of a waiting draw after a call of `change`, or its error."""
    thread, box = in_thread(lambda: len(pool.get(samples, timeout=100.0).importance))
    while not pool._waiter.waiting:
        pass
    change()
    thread.join(100.0)
    return box.get("value", box.get("error"))


@pytest.mark.slow
def test_waiting_ends_when_there_is_enough_or_a_reader_gives_back_or_the_pool_is_closed() -> None:
    pool = pool_of([20])
    pool.reserve(b"r" * 16, 1000)
    assert wait_for(pool, 10, lambda: pool.reserve(b"r" * 16, 0)) == 10
    clock = Clock()
    pool = pool_of([20], client_timeout=10.0, clock=clock)
    pool.reserve(b"r" * 16, 1000)
    assert wait_for(pool, 20, lambda: setattr(clock, "now", clock.now + 11.0)) == 20
    pool = pool_of([5])
    assert wait_for(pool, 8, lambda: pool.add(name(1), 1, made(3))) == 8
    with pytest.raises(NotEnoughSamples, match=r"after waiting \d+\.\d s"):
        pool.get(1, timeout=0.01)
    pool = pool_of([5])
    assert isinstance(wait_for(pool, 8, pool.close), Closed) and pool.stats().caches == 0
    with pytest.raises(Closed):
        pool.get(1)
    pool.close()


def test_new_parameters_keep_caches_unless_their_samples_were_made_with_others() -> None:
    pool = pool_of([10])
    assert pool.configure(PLAIN.replace(importance_exponent=0.0)) == 0
    assert (pool.get(5).importance == 1.0).all()
    old = made(5)
    assert pool.configure(STACKED, discard_mismatched=True) == 1
    assert pool.stats().caches == 0
    with pytest.raises(ProtocolError, match="parameters that have changed since"):
        pool.add(name(0), 100, old)
    pool.add(name(0), 101, made(5, parameters=STACKED))
    assert pool.get(5).gathered.prev["obs"].shape == (5, 3, 3)
    with pytest.raises(ParameterError):
        pool.configure(PLAIN.replace(discount=(0.5, 0.5)))
    assert pool.parameters == STACKED


def test_what_is_overwritten_while_it_is_read_is_read_whole() -> None:
    """A thread overwrites caches without pause; the action and the obs of each row must belong to one cache."""
    pool = Pool(SCHEMA, PLAIN.replace(reuse_cache=True), cache_limit=4, seed=0)
    layout = layout_of(SCHEMA, PLAIN)

    def push(turn: int) -> None:
        buffer = containerkit.make(layout, 64, frames=8).payload
        for part, column in ((Part.FRAMES, "obs"), (Part.PREV, "action")):
            row = containers.table(buffer)[layout.block_number(part, column)]
            buffer[row.offset : row.offset + row.stored].view("<f4" if column == "obs" else "<i4")[:] = turn
        pool.add(name(turn % 3), turn, containers.check(buffer, layout))

    stop = threading.Event()

    def keep_pushing() -> None:
        for turn in itertools.takewhile(lambda _: not stop.is_set(), itertools.count(4)):
            push(turn)

    for turn in range(4):
        push(turn)
    thread, box = in_thread(keep_pushing)
    try:
        for _ in range(300):
            gathered = pool.get(256).gathered
            action = gathered.prev["action"].astype(np.float32)[:, None]
            for side in (gathered.prev["obs"][:, 0], gathered.next["obs"][:, 0]):
                assert ((side == action) | (side == 0.0)).all()
    finally:
        stop.set()
        thread.join(100.0)
    assert "error" not in box and pool.stats().overwritten > 0


@pytest.mark.parametrize("parameters", [PLAIN, STACKED, STACKED.replace(prev=("action",), next=())])
def test_a_reader_gets_the_samples_of_several_servers_as_they_are(parameters: Parameters) -> None:
    pools = [pool_of([40, 40], parameters), Pool(SCHEMA, parameters, seed=2)]
    for first in range(0, 40, 5):
        pools[1].add(name(9), first, made(5, first=first, total=30.0, parameters=parameters))
    tables = [pool.reserve(b"r" * 16, 1000) for pool in pools]
    assert [len(table) for table in tables] == [2, 1]
    chosen = plan([pool.reserve(b"r" * 16, 240) for pool in pools], 60, 0.3)
    assert chosen is not None
    drawn = layout_of(SCHEMA, parameters, ContainerKind.DRAWN)
    payloads = [pool.draw_counts(b"r" * 16, counts, now=5.0) for pool, counts in zip(pools, chosen.counts, strict=True)]
    helds = [containers.check(payload, drawn, checksum=_bytes.checksum(payload)) for payload in payloads]
    result = build_batch(chosen, helds, drawn, parameters, seed=9, beta=parameters.importance_exponent)
    gathered = result.gathered
    assert len(gathered.ids) == 60
    count = np.bincount(clients_of(gathered).astype(int), minlength=10)
    np.testing.assert_allclose(count[[0, 1, 9]], [10, 20, 30], atol=1)
    layout = layout_of(SCHEMA, parameters)
    one = containerkit.make(
        layout, 5, head=ContainerHead(parameters.multi_step, 1.0, 1, 0.5),
        replace={Part.NUMBER: np.arange(5), Part.WEIGHT: np.ones(5)},
    )  # fmt: skip
    for row, number in enumerate(gathered.ids["number"].tolist()):
        check_row(gathered, row, one, number % 5)


def test_samples_of_a_client_nobody_asked_for_and_more_than_a_server_can_give_are_refused() -> None:
    pool = pool_of([10, 10])
    chosen = plan([pool.reserve(b"r" * 16, 100)[:1]], 5, 0.5)
    assert chosen is not None
    other = name(0) if name(1) in chosen.asked else name(1)
    with pytest.raises(ProtocolError, match="not asked for"):
        chosen.checked(taken(pool, b"r" * 16, {other: 5}))
    pool = pool_of([7], PLAIN.replace(reuse_cache=True))
    with pytest.raises(ProtocolError, match="4294967295 samples in one request; the limit is 1048576"):
        taken(pool, b"r" * 16, {name(0): 2**32 - 1})


def test_each_client_is_named_once_in_what_a_reader_takes() -> None:
    wanted = {name(0): 3, name(1): 1, name(2): 2, name(3 << 64): 3, name(4 << 64): 2}  # the ids differ in either half
    pool = Pool(SCHEMA, PLAIN, seed=1, clock=(clock := Clock()))
    for client_id, count in wanted.items():
        pool.add(client_id, 1, made(count, ages=np.full(count, 2.0)))
    clock.now += 8.0
    drawn = taken(pool, b"r" * 16, wanted)
    assert bytes(drawn.part(Part.OWNERS)) == b"".join(wanted)
    assert set(np.frombuffer(drawn.part(Part.AGE), "<f4")) == {10.0}, "the time in the pool counts"


def test_a_frame_is_packed_once_for_a_reader() -> None:
    pool = pool_of([5], STACKED)
    pool.reserve(b"r" * 16, 100)
    rows = containers.table(pool.draw_counts(b"r" * 16, counts_of({name(0): 5})))
    used = containerkit.make(layout_of(SCHEMA, STACKED), 5)
    index = np.concatenate([used.block(Part.PREV_INDEX), used.block(Part.NEXT_INDEX)])
    assert next(row.rows for row in rows if row.part == Part.FRAMES) == len(np.unique(index[index != ZERO_FRAME]))


def test_more_than_a_cache_has_cannot_have_been_drawn() -> None:
    held = made(5)
    held.go_on_at(5)
    with pytest.raises(ValueError, match="drawn is 6, but the cache has 5 samples"):
        held.go_on_at(6)
    assert (held.drawn, held.samples) == (5, 5)


def test_a_smaller_limit_lets_the_oldest_go_at_once_and_limits_that_cannot_be_are_refused() -> None:
    pool = pool_of([10, 20])
    size = pool.stats().bytes
    assert pool.limit_bytes(size // 2) == 3 and pool.stats().bytes <= size // 2
    assert pool.limit_bytes(size) == 0
    with pytest.raises(ValueError, match="at least 1"):
        pool.limit_bytes(0)
    assert pool.clear() == 3 and pool.stats().held == 0
    bad: dict[str, Any]
    for bad in ({"byte_limit": 0}, {"cache_limit": -1}, {"client_timeout": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            Pool(SCHEMA, PLAIN, **bad)


def test_the_engine_refuses_what_is_not_its_own():
    layout = LAYOUT.core
    held, stranger = _draw.HeldPool(1), _draw.HeldClient(b"s" * 16)
    for call in (
        lambda: held.leave(stranger),
        lambda: held.take(layout, bytes(16), [(stranger, 1)], False),
        lambda: held.take(layout, bytes(16), [(stranger, 0)], True),
    ):
        with pytest.raises(ValueError, match="not in this pool"):
            call()


@pytest.mark.parametrize(
    "field", [(0, -1, 0, 1, 4), (0, -1, 3, 2, 4), (0, -1, 2, 1, 4), (1, -1, 1, 1, 4), (0, 1, 1, 1, 4)]
)
def test_a_layout_whose_fields_reach_behind_their_blocks_is_refused(field):
    rows = [(0, 0, 0, 4)]  # column, part, extent, bytes of a row
    _container.Layout(1, 1, 4, rows, [(0, -1, 1, 1, 4)], 0, {}, [])
    with pytest.raises(IndexError):
        _container.Layout(1, 1, 4, rows, [field], 0, {}, [])


# --- Requests and draws of distant learners, with slow models of plans and of samples reserved for each reader

READERS = [b"r" * 16, b"s" * 16]

row = st.fixed_dictionaries(
    {
        "client": st.integers(0, 5),
        "sequence": st.integers(0, 3),
        "total_weight": st.sampled_from([0.0, 1.0, 2.5, 40.0]),
        "positives": st.sampled_from([0, 1, 7, 50]),
        "minimum": st.sampled_from([0.0, 0.25, 1.0]),
        "drawn_between": st.sampled_from([0.0, 90.0]),
        "reserved": st.sampled_from([0, 1, 9, 40]),
        "flags": st.sampled_from([0, 0, 1]),
    }
)
tables = st.lists(st.lists(row, max_size=5, unique_by=lambda client_row: client_row["client"]), min_size=1, max_size=3)


def packed(client_rows: list[dict[str, Any]]) -> Any:
    rows = np.zeros(len(client_rows), CLIENT_SUMS)
    for at, each in enumerate(client_rows):
        rows[at]["client"] = np.frombuffer(name(each["client"]), "<u8")
        for field in each.keys() - {"client"}:
            rows[at][field] = each[field]
    return rows


def client(number: int, **facts: Any) -> dict[str, Any]:
    usual = {"sequence": 1, "total_weight": 2.5, "positives": 7, "minimum": 0.25, "drawn_between": 0.0}
    return usual | {"client": number, "reserved": 40, "flags": 0} | facts


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(tables, st.integers(1, 30), st.floats(0.0, 1.0, exclude_max=True))
@example([[client(0), client(1, total_weight=0.0)]], 8, 0.5)  # no entry can be drawn
@example([[client(0), client(1, positives=0)]], 8, 0.5)
@example([[client(0), client(1, reserved=0, positives=50, minimum=1.0)]], 8, 0.5)  # the client has no samples left
@example([[client(0, sequence=1), client(1)], [client(0, sequence=3, total_weight=40.0, positives=50)]], 8, 0.5)
def test_a_plan_is_the_slow_one(sums_of_servers, samples, fraction):
    """Each client counts by its newest report, with the samples that all servers keep for it.

    A client without weight, entries or samples serves no draw, and counts neither in N nor in the rarest chance; its
    weight is left out.
    """
    newest: dict[int, dict[str, Any]] = {}
    kept: dict[int, float] = {}
    between: dict[int, float] = {}
    for each in (each for table in sums_of_servers for each in table):
        who = each["client"]
        if who not in newest or each["sequence"] > newest[who]["sequence"]:
            newest[who] = each
        able = float("inf") if each["flags"] and each["reserved"] else float(each["reserved"])
        kept[who] = kept.get(who, 0.0) + able
        between[who] = between.get(who, 0.0) + each["drawn_between"]
    serving = [who for who in newest if newest[who]["total_weight"] and newest[who]["positives"] and kept[who]]
    chosen = plan([packed(table) for table in sums_of_servers], samples, fraction)
    if sum(kept[who] for who in serving) < samples:
        assert chosen is None
        return
    assert chosen is not None
    weight, unused, drawn = (
        np.array([float(each[who]) for who in serving])
        for each in ({who: newest[who]["total_weight"] for who in newest}, kept, between)
    )
    shares = _draw.shares(weight / max(each["total_weight"] for each in newest.values()), unused, drawn, float(samples))
    share = dict(zip(map(name, serving), shares, strict=True))
    assert {who: pi for who, (pi, _) in chosen.asked.items()} == pytest.approx(
        {who: share[who] for who in chosen.asked}
    )
    population = {name(who): float(newest[who]["positives"]) for who in newest}
    assert {who: n for who, (_, n) in chosen.asked.items()} == {who: population[who] for who in chosen.asked}
    assert chosen.population == sum(newest[who]["positives"] for who in serving)
    whole = sum(each["total_weight"] for each in newest.values())
    assert chosen.left_out == pytest.approx(1.0 - weight.sum() / whole, abs=1e-9)
    chances = [
        share * newest[who]["minimum"] / newest[who]["total_weight"]
        for who, share in zip(serving, shares, strict=True)
        if newest[who]["minimum"]
    ]
    assert chosen.rarest == pytest.approx(chosen.population * min(chances, default=float("inf")))
    asked: dict[bytes, int] = {}
    for table, counts in zip(sums_of_servers, chosen.counts, strict=True):
        there = {name(each["client"]): each for each in table}
        for who, count in zip(counts["client"], counts["count"].tolist(), strict=True):
            assert count > 0 and (there[who.tobytes()]["flags"] or count <= there[who.tobytes()]["reserved"])
            asked[who.tobytes()] = asked.get(who.tobytes(), 0) + count
    assert sum(asked.values()) == samples and asked.keys() == chosen.asked.keys()
    for who, pi in share.items():
        assert abs(asked.get(who, 0) - samples * pi) <= 1.0 + 1e-6


@pytest.mark.parametrize("facts", [{"total_weight": 0.0}, {"positives": 0}, {"reserved": 0}])
def test_a_client_without_weight_or_entries_or_samples_is_asked_for_nothing(facts):
    chosen = plan([packed([client(0), client(1, **facts)])], 8, 0.5)
    assert chosen.asked == {name(0): (1.0, 7.0)} and chosen.population == 7.0
    assert chosen.left_out == (0.0 if "total_weight" in facts else 0.5)


def test_a_plan_takes_rows_of_sums_and_nothing_else():
    table = packed([client(0), client(1)])
    for wrong in (np.zeros(2, CLIENT_COUNTS), np.zeros((2, 2), CLIENT_SUMS)[:, 0], [b"x" * 64]):
        with pytest.raises(ValueError, match="rows"):
            plan([wrong], 8, 0.5)
    for samples, fraction in ((0, 0.5), (8, 1.0)):
        with pytest.raises(ValueError, match="at least 1 sample"):
            plan([table], samples, fraction)
    table.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        _draw.take_counts(table, np.zeros(1, CLIENT_COUNTS))


def taken(pool: Pool, reader: bytes, wanted: dict[bytes, int]) -> Any:
    payload = pool.draw_counts(reader, counts_of(wanted), now=1.0)
    layout = layout_of(SCHEMA, pool.parameters, ContainerKind.DRAWN)
    return None if payload is None else containers.check(payload, layout)


walks = st.lists(
    st.tuples(
        st.sampled_from(["push", "reserve", "take", "draw"]), st.integers(0, 1), st.integers(0, 2), st.integers(1, 30)
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(walks)
@example([("push", 0, 0, 20), ("reserve", 0, 0, 15), ("take", 1, 0, 30), ("draw", 0, 0, 5), ("take", 0, 0, 30)])
@example([("push", 0, 0, 20), ("reserve", 0, 0, 9), ("reserve", 1, 0, 30), ("draw", 0, 0, 9)])
def test_nobody_takes_what_is_kept_for_another_reader(walk):
    """Two readers and the server's own learner draw from three clients; each leaves samples kept for other readers."""
    pool = Pool(SCHEMA, PLAIN, seed=1)
    unused = dict.fromkeys(map(name, range(3)), 0)
    kept = {reader: dict.fromkeys(unused, 0) for reader in READERS}
    for turn, (what, which, who, count) in enumerate(walk):
        reader, other = READERS[which], READERS[1 - which]
        if what == "push":
            pool.add(name(who), turn, made(count, total=10.0 * (who + 1)))
            unused[name(who)] += count
        elif what == "reserve":
            rows = pool.reserve(reader, count)
            kept[reader] = dict.fromkeys(unused, 0) | {each["client"].tobytes(): int(each["reserved"]) for each in rows}
            assert all(kept[reader][who] + kept[other][who] <= unused[who] for who in unused)
            free = sum(unused.values()) - sum(kept[other].values())
            assert sum(kept[reader].values()) >= min(count, free)
        elif what == "take":
            drawn = taken(pool, reader, {name(who): count})
            got = 0 if drawn is None else drawn.samples
            assert got == min(count, unused[name(who)] - kept[other][name(who)])
            unused[name(who)] -= got
            kept[reader][name(who)] = max(0, kept[reader][name(who)] - got)
        else:
            free = {who: unused[who] - sum(each[who] for each in kept.values()) for who in unused}
            if sum(free.values()) < count:
                with pytest.raises(NotEnoughSamples, match=f"but {sum(free.values())} are held"):
                    pool.get(count)
                continue
            owners = [who.tobytes() for who in pool.get(count).gathered.ids["client"]]
            for who in unused:
                assert owners.count(who) <= free[who]
                unused[who] -= owners.count(who)
        assert pool.stats().unused == sum(unused.values())


@pytest.mark.parametrize("kind", ["caches", "episodes"])
def test_the_newest_model_that_was_seen_never_goes_back(kind):
    """Models are seen in any order: an older model must not make older samples available again."""
    parameters = Parameters(max_model_lag=2, cache_size=8)
    pool: Any = (Pool if kind == "caches" else EpisodePool)(SCHEMA, parameters, clock=Clock(), seed=1)
    for version in (4, 9, 3, 0):
        pool.saw_model(version)
    if kind == "episodes":
        memory = pool.memory
        memory.open()
        for version in (5, 8):
            memory.add(0, (np.zeros(3, np.float32), np.int32(0), np.float32(0)), model_version=version)
        memory.close(terminated=True)
        assert memory.newest_model == 9 and memory.num_positive == 1
        pool.limit_bytes(pool.byte_limit // 2)
        pool.clear()
        assert pool.memory.newest_model == 9, "another memory in its place has seen it as well"
        return
    pool.add(name(1), 1, held([0.0] * 2, [5, 8], parameters))
    assert pool.reserve(READERS[0], 4)["reserved"].tolist() == [1]
