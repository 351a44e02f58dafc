"""The priority tree against cumulative sums."""

import threading

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from memoire._core import PriorityTree

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
    found = tree.find([tree.total, np.nextafter(tree.total, np.inf), 2 * tree.total, 1e300])
    np.testing.assert_array_equal(found, np.flatnonzero(weights)[-1])


@quick
@given(st.integers(1, 600), st.data())
def test_any_order_of_updates_leaves_what_was_written_last(size, data):
    tree, truth = PriorityTree(size), np.zeros(size)
    for _ in range(data.draw(st.integers(1, 6))):
        count = data.draw(st.integers(0, 40))
        indices = data.draw(arrays(np.int64, count, elements=st.integers(0, size - 1)))
        weights = data.draw(arrays(np.float64, count, elements=st.just(0.0) | st.floats(1e-3, 1e3)))
        tree.set(indices, weights)
        for index, weight in zip(indices, weights, strict=True):  # of duplicates the last counts
            truth[index] = weight
        np.testing.assert_array_equal(tree.get(np.arange(size)), truth)
        assert tree.total == pytest.approx(truth.sum(), rel=1e-12)
        assert tree.positive == (truth > 0).sum()
        assert tree.minimum == truth[truth > 0].min(initial=np.inf)


def test_sums_do_not_drift():
    rng = np.random.default_rng(0)
    tree, truth = PriorityTree(1000), np.zeros(1000)
    for _ in range(500):
        indices, weights = rng.integers(0, 1000, 20), rng.random(20) * 10.0 ** rng.integers(-12, 12, 20)
        tree.set(indices, weights)
        truth[indices] = 0.0
        for index, weight in zip(indices, weights, strict=True):
            truth[index] = weight
    tree.set(np.flatnonzero(truth > 1e-3), 0.0)  # what was absorbed by large sums is there again
    truth[truth > 1e-3] = 0.0
    assert tree.total == pytest.approx(truth.sum(), rel=1e-14)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 63, 64, 65, 511, 513, 4097, 100_003])
def test_every_leaf_can_be_drawn_whatever_the_size(size):
    tree = PriorityTree(size)
    tree.set(np.arange(size), 1.0)
    np.testing.assert_array_equal(tree.find(np.arange(size) + 0.5), np.arange(size))
    assert (tree.size, tree.total, tree.positive, tree.minimum) == (size, size, size, 1.0)


def test_an_empty_tree_has_nothing_to_draw():
    tree = PriorityTree(10)
    assert (tree.total, tree.positive, tree.minimum) == (0.0, 0, np.inf)
    with pytest.raises(ValueError, match="all weights are 0"):
        tree.draw([0.5])
    assert tree.draw([]).shape == (0,)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_a_weight_that_is_none_is_named_and_nothing_changes(bad):
    tree = tree_of(np.ones(4))
    with pytest.raises(ValueError, match="position 1 is not finite and at least 0. Nothing was changed"):
        tree.set([0, 1, 2], [5.0, bad, bad])
    np.testing.assert_array_equal(tree.get([0, 1, 2, 3]), 1.0)


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_an_index_outside_is_named_and_nothing_changes(bad):
    tree = tree_of(np.ones(4))
    with pytest.raises(IndexError, match=rf"index {bad} at position 1 is outside \[0, 4\)"):
        tree.set([0, bad], [5.0, 5.0])
    with pytest.raises(IndexError, match="position 0"):
        tree.get([bad])
    assert tree.total == 4.0


@pytest.mark.parametrize("bad", [-0.1, 1.0, np.nan, np.inf])
def test_a_fraction_outside_is_named(bad):
    with pytest.raises(ValueError, match=r"fractions must lie in \[0, 1\), got .* at position 1"):
        tree_of(np.ones(4)).draw([0.5, bad])
    with pytest.raises(ValueError, match="masses must be finite"):
        tree_of(np.ones(4)).find([0.5, -1.0])


def test_lengths_and_shapes_must_agree():
    tree = PriorityTree(4)
    with pytest.raises(ValueError, match="2 indices and 3 weights"):
        tree.set([0, 1], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="one dimension"):
        tree.set([[0]], [1.0])
    with pytest.raises(TypeError):
        tree.set([0.5], [1.0])
    for size in (0, -1):
        with pytest.raises(ValueError, match="size"):
            PriorityTree(size)


def test_threads_may_share_a_tree():
    tree = PriorityTree(10_000)
    errors = []

    def work(seed):
        try:
            rng = np.random.default_rng(seed)
            for _ in range(200):
                tree.set(rng.integers(0, 10_000, 500), rng.integers(1, 5, 500))
                assert (tree.get(tree.draw(rng.random(100))) > 0).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not errors
    weights = tree.get(np.arange(10_000))
    assert tree.total == weights.sum() and tree.positive == (weights > 0).sum()
