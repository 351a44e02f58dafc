"""Draws by proportion and by rank, their importance, and the targets of policies, against slow models."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import chisquare

from memoire import Buffer, Greedy, Linear, Prioritized, RankBased, Schema, Uniform
from memoire._core import PriorityTree
from memoire.errors import EmptyMemory, ParameterError
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.rollouts import gae, vtrace
from memoire.replay.sampling import importance
from memory_checks import with_episode
from netkit import in_thread

# --- Rank-based and greedy draws: the order of the entries and the chances are exact at each draw

SCHEMA = Schema({"obs": (np.float32, (1,)), "reward": np.float32})


def weighted(entries, weights=None, **parameters):
    """Return a memory with one closed episode of `entries` entries that have these weights."""
    memory = Memory(SCHEMA, entries, Parameters(multi_step=1, priority_epsilon=0.0, **parameters), seed=3)
    with_episode(memory, (np.zeros((entries, 1), np.float32), np.ones(entries, np.float32)), terminated=True)
    if weights is not None:
        memory.update_priorities(np.arange(entries), weights)
    return memory


def in_order(memory):
    weights = memory.contents()["weights"]
    rows = np.flatnonzero(weights > 0.0)
    np.testing.assert_array_equal(memory._ranked(), rows[np.lexsort((rows, -weights[rows]))])


def powers(count, alpha):
    return np.arange(1, count + 1, dtype=np.float64) ** -alpha


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0, 1.5, 3.0]), st.integers(0, 2**32 - 1))
def test_a_fraction_of_the_total_gives_the_rank_whose_stretch_holds_it(count, alpha, seed):
    rng = np.random.default_rng(seed)
    weights = rng.permutation(count) + 1.0
    memory = weighted(count, weights, prioritization="rank", priority_exponent=alpha)
    fractions = np.append(rng.random(200), [0.0, 1.0 - 2.0**-53])
    edges = powers(count, alpha).cumsum()
    assert memory.total_weight == pytest.approx(edges[-1], rel=1e-12)
    got = memory.draw(len(fractions), fractions)
    ranks = np.argsort(-weights).argsort()[got]
    # Where a fraction lies on an edge, rounding may put the fraction on either side of the edge.
    masses = fractions * edges[-1]
    low = np.where(ranks == 0, 0.0, edges[np.maximum(ranks - 1, 0)])
    assert (low <= masses * (1 + 1e-12) + 1e-12).all() and (masses <= edges[ranks] * (1 + 1e-12) + 1e-12).all()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1999), st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.5])), min_size=1, max_size=400),
    st.randoms(),
)
def test_the_order_is_exact_whatever_changes(changes, random):
    """Many equal weights make blocks split, empty and merge with ties on both sides of their edges."""
    memory = weighted(2000, np.array([random.choice([0.0, 0.5, 1.0, 2.0]) for _ in range(2000)]), prioritization="rank")
    numbers, weights = zip(*changes, strict=True)
    memory.update_priorities(numbers, weights)
    in_order(memory)
    memory.update_priorities(np.arange(2000), np.full(2000, 1.0))
    in_order(memory)
    memory.update_priorities(np.arange(0, 2000), np.arange(2000) % 7)
    in_order(memory)


def test_draws_follow_the_ranks():
    rng = np.random.default_rng(5)
    weights = rng.exponential(size=300)
    memory = weighted(300, weights, prioritization="rank", priority_exponent=0.7)
    chances = powers(300, 0.7)
    counts = np.bincount(memory.draw(300_000), minlength=300)[np.argsort(-weights)]
    assert chisquare(counts, 300_000 * chances / chances.sum()).pvalue > 1e-3


def test_huge_priorities_change_ranks_but_not_chances():
    weights = np.arange(1.0, 11.0)
    memory = weighted(10, weights, prioritization="rank", priority_exponent=1.0)
    before = memory.weights(np.arange(10))
    memory.update_priorities([9], [1e30])
    np.testing.assert_array_equal(memory.weights(np.arange(10)), before)


@pytest.mark.parametrize("sampler", [RankBased(), Prioritized(0.7, stratified=True), Uniform(stratified=True)])
def test_a_stratified_draw_takes_one_sample_from_each_segment_and_shuffles_them(sampler):
    rng = np.random.default_rng(6)
    memory = weighted(5000, rng.exponential(size=5000), **sampler.fields())
    numbers = memory.draw(64)
    masses = memory.weights(np.arange(5000))
    order = np.arange(5000)
    if sampler.fields()["prioritization"] == "rank":
        order = np.argsort(-memory.contents()["weights"], kind="stable")
    ends = np.empty(5000)
    ends[order] = masses[order].cumsum() / masses.sum()
    starts = ends - masses / masses.sum()
    drawn = np.sort(np.stack([starts[numbers], ends[numbers]]), axis=1)
    edges = np.arange(65) / 64
    assert (drawn[0] <= edges[1:] + 1e-12).all() and (drawn[1] >= edges[:-1] - 1e-12).all()
    assert (np.diff(ends[numbers]) < 0).any(), "samples of a draw are in random order"


def test_greedy_takes_the_heaviest_each_once_and_new_ones_first():
    buffer = Buffer(SCHEMA, 100, sampler=Greedy(), seed=1)
    writer = buffer.writer(num_envs=1, autoreset="disabled")
    for step in range(20):
        obs = np.full((1, 1), step, np.float32)
        writer.step(obs, None, np.ones(1), np.zeros(1, bool), np.zeros(1, bool), obs + 1)
    ids = buffer.sample(19).ids
    assert sorted(ids) == sorted(set(ids))
    errors = np.linspace(0.0, 0.9, 19)
    buffer.update_priorities(ids, errors)
    assert set(buffer.sample(5).ids) == set(ids[-5:])
    obs = np.full((1, 1), 20, np.float32)
    writer.step(obs, None, np.ones(1), np.zeros(1, bool), np.zeros(1, bool), obs + 1)
    batch = buffer.sample(1)
    assert batch["obs"].ravel() == [19.0], "an entry without an error comes before entries with errors"
    assert (batch.importance == 1.0).all()
    more = buffer.sample(40)
    assert (np.bincount(np.unique(more.ids, return_inverse=True)[1]) == 2).all()


def test_what_is_added_to_an_error_of_zero_can_be_set():
    memory = weighted(3, None, priority_exponent=1.0)
    memory.update_priorities([0], [0.0])
    assert memory.weights([0]) == 0.0 and memory.num_positive == 2
    memory.configure(priority_epsilon=0.25)
    memory.update_priorities([0, 1], [0.0, -0.5])
    np.testing.assert_array_equal(memory.weights([0, 1]), [0.25, 0.75])
    ranked = weighted(3, [1.0, 0.0, 2.0], prioritization="rank", priority_exponent=1.0)
    np.testing.assert_allclose(ranked.weights([0, 1, 2]), [1 / 2, 1 / 3, 1.0])


def test_beta_is_annealed_over_batches_and_begins_anew_when_it_is_set():
    buffer = Buffer(SCHEMA, 100, sampler=Prioritized(1.0, beta=Linear(0.0, 1.0, 4), normalize="global"), seed=1)
    writer = buffer.writer(num_envs=1, autoreset="disabled")
    for step in range(11):
        obs = np.full((1, 1), step, np.float32)
        writer.step(obs, None, np.ones(1), np.zeros(1, bool), np.zeros(1, bool), obs + 1)
    buffer.update_priorities(np.arange(10), np.arange(1.0, 11.0))
    divisors = [buffer.sample(8).divisor for _ in range(6)]
    largest = divisors[-1]
    np.testing.assert_allclose(divisors, [largest**beta for beta in (0.0, 0.25, 0.5, 0.75, 1.0, 1.0)], rtol=1e-6)
    buffer.configure(sampler=Prioritized(1.0, beta=Linear(0.5, 1.0, 1), normalize="global"))
    np.testing.assert_allclose([buffer.sample(8).divisor for _ in range(2)], [largest**0.5, largest], rtol=1e-6)
    buffer.configure(sampler=Prioritized(1.0, beta=0.25, normalize="global"))
    assert buffer.sample(8).divisor == pytest.approx(largest**0.25)


def test_parameters_of_samplers_are_checked_and_told():
    fields = Parameters().replace(**RankBased(0.5, beta=Linear(0.4, 1.0, 10)).fields())
    assert (fields.prioritization, fields.stratified, fields.beta(5)) == ("rank", True, pytest.approx(0.7))
    assert Parameters.from_wire(fields.to_wire()) == fields
    assert Parameters().replace(**Greedy().fields()).beta(0) == 0.0
    with pytest.raises(ParameterError, match="'proportional', 'rank', 'greedy'"):
        Parameters(prioritization="ranked")
    with pytest.raises(EmptyMemory):
        Memory(SCHEMA, 10, Parameters(prioritization="greedy")).draw(1)


# --- Samplers as settings, and the formula of importance

chances = arrays(np.float64, st.integers(1, 20), elements=st.floats(1e-9, 1.0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"exponent": -1.0}, {"beta": 2}, {"normalize": "max"}, {"beta": Linear(0.0, 2.0, 1)}, {"beta": Linear(0.0, 1.0, -1)},
    ],
)  # fmt: skip
@pytest.mark.parametrize("sampler", [Prioritized, RankBased])
def test_a_sampler_refuses_a_field_outside_its_range(sampler, wrong):
    with pytest.raises(ParameterError, match=f"^{next(iter(wrong))}"):
        sampler(**wrong)


@given(chances, st.floats(1, 1e9), st.floats(0, 1))
def test_importance_is_the_formula_over_the_largest_of_the_batch(probability, population, beta):
    got, divisor = importance(probability, population, beta)
    truth = (population * probability) ** -beta
    assert got.dtype == np.float32 and got.max() == 1.0 and (got > 0).all()
    np.testing.assert_allclose(got * divisor, truth, rtol=1e-6)


@given(chances, st.floats(0.1, 1))
def test_global_importance_is_divided_by_what_the_least_chance_would_have(probability, beta):
    smallest = probability.min() / 2
    got, divisor = importance(probability, 100, beta, "global", smallest)
    assert divisor == pytest.approx((100 * smallest) ** -beta)
    assert (got <= 1.0).all()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        *((([0.5, wrong], 10, 0.5), "probability must be above 0") for wrong in (0.0, -0.1, np.nan, np.inf)),
        *((([0.5], wrong, 0.5), "population") for wrong in (0, -1, np.inf, np.nan)),
        (([0.5], 10, 0.5, "global"), "smallest"),
        (([0.5], 10, 0.5, "largest"), "normalize"),
    ],
)
def test_importance_of_what_cannot_be_is_refused_by_name(arguments, name):
    with pytest.raises(ParameterError, match=name):
        importance(*arguments)


# --- The priority tree against cumulative sums

fractions = arrays(np.float64, 32, elements=st.floats(0, 1, exclude_max=True))
whole_weights = arrays(np.float64, st.integers(1, 700), elements=st.integers(0, 9))
any_weights = arrays(np.float64, st.integers(1, 70), elements=st.just(0.0) | st.floats(1e-12, 1e12))
quick = settings(deadline=None, max_examples=60)


def tree_of(weights):
    tree = PriorityTree(len(weights))
    tree.set(np.arange(len(weights)), weights)
    return tree


@quick
@given(whole_weights, fractions)  # whole numbers add without rounding: compare exactly
def test_draw_agrees_with_cumulative_sum(weights, fractions):
    assume(weights.any())
    expected = np.searchsorted(weights.cumsum(), fractions * weights.sum(), side="right")
    np.testing.assert_array_equal(tree_of(weights).draw(fractions), expected)


@quick
@given(any_weights, fractions)
@example(np.array([1.5, 0.0, 2.0**52 + 2.0, 0.0]), np.array([1 - 2.0**-53]))
@example(np.array([0.1] * 9 + [0.0] * 7), np.array([1 - 2.0**-53]))
@example(np.array([5e-324, 0.0]), np.array([0.0, 1 - 2.0**-53]))
def test_empty_leaves_are_never_drawn(weights, fractions):
    assume(weights.any())
    assert (weights[tree_of(weights).draw(fractions)] > 0).all()


@quick
@given(any_weights)
@example(np.array([923377741e3, 1e12] + [5e-10] * 24))
def test_a_mass_at_or_beyond_the_total_finds_the_last_positive_leaf(weights):
    assume(weights.any())
    tree = tree_of(weights)
    leaves = tree.find([tree.total, np.nextafter(tree.total, np.inf), 2 * tree.total, 1e300])
    np.testing.assert_array_equal(leaves, np.flatnonzero(weights)[-1])


@quick
@given(st.integers(1, 600), st.data())
def test_any_order_of_updates_leaves_what_was_written_last(size, data):
    tree, truth = PriorityTree(size), np.zeros(size)
    for _ in range(data.draw(st.integers(1, 6))):
        count = data.draw(st.integers(0, 40))
        indices = data.draw(arrays(np.int64, count, elements=st.integers(0, size - 1)))
        weights = data.draw(arrays(np.float64, count, elements=st.just(0.0) | st.floats(1e-3, 1e3)))
        tree.set(indices, weights)
        for index, weight in zip(indices, weights, strict=True):  # the last duplicate counts
            truth[index] = weight
        np.testing.assert_array_equal(tree.get(np.arange(size)), truth)
        assert tree.total == pytest.approx(truth.sum(), rel=1e-12)
        assert tree.positive == (truth > 0).sum()
        assert tree.minimum == truth[truth > 0].min(initial=np.inf)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda tree: tree.set([0, 1, 2], [5.0, -1.0, -1.0]), ValueError, "position 1 is not finite and at least 0"),
        (lambda tree: tree.set([0, 1], [5.0, np.nan]), ValueError, "position 1 is not finite.*Nothing was changed"),
        (lambda tree: tree.set([0, 1], [5.0, np.inf]), ValueError, "position 1 is not finite"),
        (lambda tree: tree.set([0, -1], [5.0, 5.0]), IndexError, r"index -1 at position 1 is outside \[0, 4\)"),
        (lambda tree: tree.set([0, 4], [5.0, 5.0]), IndexError, r"index 4 at position 1 is outside \[0, 4\)"),
        (lambda tree: tree.get([2**40]), IndexError, "position 0"),
        (lambda tree: tree.set([0, 1], [1.0, 1.0, 1.0]), ValueError, "2 indices and 3 weights"),
        (lambda tree: tree.set([[0]], [1.0]), ValueError, "one dimension"),
        (lambda tree: tree.set([0.5], [1.0]), TypeError, None),
        (lambda tree: tree.draw([0.5, -0.1]), ValueError, r"fractions must lie in \[0, 1\), got .* at position 1"),
        (lambda tree: tree.draw([0.5, 1.0]), ValueError, "at position 1"),
        (lambda tree: tree.draw([0.5, np.nan]), ValueError, "at position 1"),
        (lambda tree: tree.find([0.5, -1.0]), ValueError, "masses must be finite"),
        (lambda tree: PriorityTree(4).draw([0.5]), ValueError, "all weights are 0"),
        (lambda tree: PriorityTree(0), ValueError, "size"),
        (lambda tree: PriorityTree(-1), ValueError, "size"),
    ],
)
def test_what_does_not_fit_a_tree_is_named_and_nothing_changes(call, error, words):
    tree = tree_of(np.ones(4))
    with pytest.raises(error, match=words):
        call(tree)
    np.testing.assert_array_equal(tree.get([0, 1, 2, 3]), 1.0)


def test_threads_may_share_a_tree():
    tree = PriorityTree(10_000)

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(200):
            tree.set(rng.integers(0, 10_000, 500), rng.integers(1, 5, 500))
            assert (tree.get(tree.draw(rng.random(100))) > 0).all()

    threads = [in_thread(work, seed) for seed in range(4)]
    for thread, _ in threads:
        thread.join(100)
    assert [box for _, box in threads] == [{"value": None}] * 4
    weights = tree.get(np.arange(10_000))
    assert tree.total == weights.sum() and tree.positive == (weights > 0).sum()


# --- Advantages and V-trace targets agree with definitions that the test writes as sums over all later entries


def parts_of(arrays: Any, lengths: Any) -> list[Any]:
    return np.split(arrays, np.cumsum(lengths)[:-1])


def slow_gae(rewards: Any, values: Any, last: Any, discount: float, lam: float) -> Any:
    """Return the advantages of one fragment by equation 16 as printed, in O(T^2)."""
    following = np.append(values[1:], last)
    deltas = rewards + discount * following - values
    count = len(rewards)
    return np.array([sum((discount * lam) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)])


def slow_vtrace(
    rewards: Any, values: Any, last: Any, logs: Any, discount: float, lam: float, rho_max: float, c_max: float
) -> Any:
    """Return the targets of one fragment by equation 1, with a product for each pair, in O(T^3)."""
    following, ratio = np.append(values[1:], last), np.exp(logs)
    rho, c = np.minimum(ratio, rho_max), lam * np.minimum(ratio, c_max)
    deltas = rho * (rewards + discount * following - values)
    count = len(rewards)
    sums = [sum(discount ** (k - t) * np.prod(c[t:k]) * deltas[k] for k in range(t, count)) for t in range(count)]
    return values + np.array(sums)


@st.composite
def fragments(draw: st.DrawFn) -> tuple[Any, Any, Any, Any, Any]:
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    count = sum(lengths)
    return (
        rng.normal(size=count),
        rng.normal(size=count),
        rng.normal(size=len(lengths)),
        lengths,
        rng.normal(size=count),
    )


fractions_of_advantages = st.floats(0, 1)


@given(fragments(), fractions_of_advantages, fractions_of_advantages)
def test_gae_is_the_sum_that_defines_it(case: Any, discount: float, lam: float) -> None:
    rewards, values, last, lengths, _ = case
    advantages, returns = gae(rewards, values, last, lengths, discount, lam)
    each = zip(parts_of(rewards, lengths), parts_of(values, lengths), last, strict=True)
    expected = np.concatenate([slow_gae(*one, discount, lam) for one in each])
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(returns, expected + values, rtol=1e-4, atol=1e-5)


@given(fragments(), fractions_of_advantages, fractions_of_advantages, st.floats(0.1, 3), st.floats(0.1, 3))
def test_vtrace_is_the_sum_that_defines_it(case: Any, discount: float, lam: float, rho: float, c: float) -> None:
    rewards, values, last, lengths, logs = case
    targets, advantages = vtrace(rewards, values, last, lengths, logs, discount, lam=lam, rho_max=rho, c_max=c)
    cut = (parts_of(each, lengths) for each in (rewards, values, logs))
    each = list(zip(*cut, last, strict=True))
    expected = [slow_vtrace(r, v, end, log, discount, lam, rho, c) for r, v, log, end in each]
    np.testing.assert_allclose(targets, np.concatenate(expected), rtol=1e-4, atol=1e-5)
    steps = [
        np.minimum(np.exp(log), rho) * (r + discount * np.append(target[1:], end) - v)
        for (r, v, log, end), target in zip(each, expected, strict=True)
    ]
    np.testing.assert_allclose(advantages, np.concatenate(steps), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"values": np.zeros(3)}, "values"),
        ({"bootstrap": np.zeros(1)}, "bootstrap"),
        ({"lengths": [5]}, "lengths"),
        ({"lengths": [4, 0]}, "lengths"),
        ({"values": np.array([0.0, np.nan, 0.0, 0.0])}, "values"),
        ({"discount": 1.5}, "discount"),
        ({"lam": -0.1}, "lam"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], name: str) -> None:
    args: dict[str, Any] = {"rewards": np.zeros(4), "values": np.zeros(4), "bootstrap": np.zeros(2)}
    args |= {"lengths": [3, 1], "discount": 0.9, "lam": 0.9}
    with pytest.raises(ParameterError, match=name):
        gae(**args | changes)
    with pytest.raises(ParameterError, match="log_ratios"):
        vtrace(**args, log_ratios=np.zeros(3))
