"""Rules of examples/search/circuits.py: each rewrite keeps the unitary exactly, and masks show the applicable rules."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "search"))

import circuits  # noqa: E402

FIRST = circuits.canonical(circuits.FIRST)


def gates_of(columns):
    return [tuple(gate) for gate in columns["gates"].tolist()]


def test_the_textbooks_circuit_is_three_toffolis_of_45_gates():
    unitary, halves = circuits.unitary(FIRST)
    assert len(FIRST) == 45 and halves == 6
    bits = np.arange(32)
    for control, other, target in ((0, 1, 3), (3, 2, 4), (0, 1, 3)):
        bits = bits ^ ((bits >> control & bits >> other & 1) << target)
    expected = np.zeros_like(unitary)
    expected[bits, np.arange(32), 0] = 1 << halves // 2  # sqrt(2)**6
    np.testing.assert_array_equal(unitary, expected)


def walk(seed, steps=25):
    """Yield circuits along random rewrites, each with its mask and the result of each rule at each place."""
    rng, gates = np.random.default_rng(seed), FIRST
    for _ in range(steps):
        near = circuits.links(gates)
        mask = circuits.possible(gates, near)
        places = itertools.product(range(len(gates)), range(circuits.RULES))
        rewrites = {(i, rule): circuits.rewritten(gates, i, rule, near) for i, rule in places}
        yield gates, mask, rewrites
        i, rule = rng.permutation(np.argwhere(mask))[0]
        gates = rewrites[int(i), int(rule)]


@pytest.mark.parametrize("seed", range(4))
def test_every_rewrite_leaves_the_unitary_as_it_is(seed):
    for gates, mask, rewrites in walk(seed, steps=12):
        assert {place for place, each in rewrites.items() if each is not None} == {
            *map(tuple, np.argwhere(mask).tolist())
        }
        chosen = [each for each in rewrites.values() if each is not None][seed::5]
        assert all(circuits.are_equal(gates, each) for each in chosen)
        assert all(circuits.canonical(each) == each for each in chosen)


def test_a_wrong_rewrite_is_seen():
    assert not circuits.are_equal(FIRST, FIRST[1:])
    changed = [*FIRST[:5], (2, *FIRST[5][1:]) if FIRST[5][0] < circuits.H else (1, FIRST[5][1], -1), *FIRST[6:]]
    assert not circuits.are_equal(FIRST, changed)


def test_an_episode_has_its_columns_and_its_rewards_add_up():
    def ask(state):
        ask.version = 1
        return {"logits": np.zeros((len(state["gates"]), circuits.RULES), np.float32), "value": np.float32(0.5)}

    episode = circuits.run_episode(circuits.columns_of(FIRST), ask, {})
    entries = []
    while True:
        try:
            entries.append(next(episode))
        except StopIteration as stop:
            final = gates_of(stop.value)
            break
    assert len(entries) == circuits.STEPS and set(circuits.ENTRIES) == set(entries[0])
    assert sum(entry["reward"] for entry in entries) == len(FIRST) - len(final)
    assert all(entry["mask"].ravel()[entry["action"]] and entry["logp"] < 0 for entry in entries)
    assert circuits.are_equal(FIRST, final)


def test_greedy_descent_ends_where_no_rule_makes_the_circuit_shorter():
    gates = circuits.greedy([*FIRST, (circuits.H, 0, -1), (circuits.H, 0, -1)])
    assert len(gates) == 45 and circuits.are_equal(gates, FIRST)
