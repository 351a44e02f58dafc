"""Rank-based and greedy draws: the order of the entries is exact at each draw, and so are the chances."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from memoire import Buffer, Greedy, Linear, Prioritized, RankBased, Schema, Uniform
from memoire.errors import EmptyMemory, ParameterError
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memories import with_episode

SCHEMA = Schema({"obs": (np.float32, (1,)), "reward": np.float32})


def weighted(entries, weights=None, **parameters):
    """A memory of one closed episode of `entries` entries, with these weights."""
    made = Memory(SCHEMA, entries, Parameters(multi_step=1, priority_epsilon=0.0, **parameters), seed=3)
    with_episode(made, (np.zeros((entries, 1), np.float32), np.ones(entries, np.float32)), terminated=True)
    if weights is not None:
        made.update_priorities(np.arange(entries), weights)
    return made


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
    # Where a fraction lies on an edge, rounding may put it on either side.
    masses = fractions * edges[-1]
    low = np.where(ranks == 0, 0.0, edges[np.maximum(ranks - 1, 0)])
    assert (low <= masses * (1 + 1e-12) + 1e-12).all() and (masses <= edges[ranks] * (1 + 1e-12) + 1e-12).all()


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.0 + 1e-13, 2.0])
def test_sums_of_a_million_ranks_are_exact_to_rounding(alpha):
    memory = weighted(1_000_000, prioritization="rank", priority_exponent=alpha)
    total, positive, least = memory.sums()
    assert positive == 1_000_000
    assert total == pytest.approx(powers(1_000_000, alpha).sum(), rel=1e-13)
    assert least == pytest.approx(1e6**-alpha, rel=1e-13)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1999), st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.5])), min_size=1, max_size=400),
    st.randoms(),
)
def test_the_order_is_exact_whatever_changes(changes, random):
    """Many equal weights, so that blocks split, empty and merge with ties on both sides of their edges."""
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
    assert batch["obs"].ravel() == [19.0], "what nobody has seen yet comes before what was"
    assert (batch.importance == 1.0).all()
    more = buffer.sample(40)
    assert (np.bincount(np.unique(more.ids, return_inverse=True)[1]) == 2).all()


@pytest.mark.parametrize(
    "sampler",
    [RankBased(0.7, beta=1.0), RankBased(1.2, beta=1.0, stratified=False), Prioritized(0.7, beta=1.0, stratified=True)],
)
def test_the_weighted_mean_is_the_uniform_mean(sampler):
    rng = np.random.default_rng(8)
    count, batches, size = 400, 3000, 64
    memory = weighted(count, rng.exponential(size=count) ** 2, **sampler.fields())
    values = rng.normal(size=count) + np.arange(count) / 100
    means = np.empty(batches)
    for batch in range(batches):
        numbers = memory.draw(size)
        chances = memory.weights(numbers) / memory.total_weight
        means[batch] = (values[numbers] / (count * chances)).mean()
    error = means.std() / np.sqrt(batches)
    assert abs(means.mean() - values.mean()) < 4.0 * error
    unweighted = np.mean([values[memory.draw(size)].mean() for _ in range(300)])
    assert abs(unweighted - values.mean()) > 8.0 * error or error > 0.01, "there was a bias to correct"


@pytest.mark.parametrize("prioritization", ["proportional", "rank"])
def test_an_exponent_of_zero_is_uniform(prioritization):
    memory = weighted(50, np.arange(1.0, 51.0), prioritization=prioritization, priority_exponent=0.0)
    np.testing.assert_array_equal(memory.weights(np.arange(50)), np.ones(50))
    assert chisquare(np.bincount(memory.draw(50_000), minlength=50)).pvalue > 1e-3


def test_what_is_added_to_an_error_of_zero_can_be_set():
    made = weighted(3, None, priority_exponent=1.0)
    made.update_priorities([0], [0.0])
    assert made.weights([0]) == 0.0 and made.num_positive == 2
    made.configure(priority_epsilon=0.25)
    made.update_priorities([0, 1], [0.0, -0.5])
    np.testing.assert_array_equal(made.weights([0, 1]), [0.25, 0.75])
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
    for wrong in ({"exponent": -1.0}, {"beta": Linear(0.0, 2.0, 1)}, {"beta": Linear(0.0, 1.0, -1)}):
        with pytest.raises(ParameterError):
            RankBased(**wrong)
    with pytest.raises(ParameterError, match="'proportional', 'rank', 'greedy'"):
        Parameters(prioritization="ranked")
    with pytest.raises(EmptyMemory):
        Memory(SCHEMA, 10, Parameters(prioritization="greedy")).draw(1)
