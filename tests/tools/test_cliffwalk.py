"""The toy problem of the prioritized replay paper comes out as in the paper."""

import importlib.util
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def cliffwalk():
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("cliffwalk", FOLDER / "cliffwalk.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def test_the_memory_holds_every_sequence_of_actions_and_one_pays(cliffwalk):
    for length in (2, 5):
        steps = cliffwalk.walk(length)
        assert sum(last for *_, last in steps) == 2**length
        assert sum(reward for _, _, reward, _ in steps) == 1.0
        assert len(steps) == 2 ** (length + 1) - 2
    np.testing.assert_allclose(cliffwalk.truth(2), [[0.5, 0.0], [0.0, 1.0]])


def test_prioritized_draws_learn_in_fewer_updates_in_the_papers_order(cliffwalk):
    found = cliffwalk.measure([8], 3, lambda line: None)
    median = {name: statistics.median(by_length[8]) for name, by_length in found.items()}
    assert median["greedy"] < median["proportional"] < median["uniform"] / 2
    assert median["greedy"] < median["rank-based"] < median["uniform"] / 2
