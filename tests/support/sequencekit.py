"""Episodes whose entries hold their number, for tests of sequences."""

import numpy as np

from memoire import Schema
from memoire.replay.columns import Column

SCHEMA = Schema({
    "obs": (np.float32, (1,)), "hidden": (np.float32, (2,)), "reward": np.float32, "value": np.float32,
    "words": Column(np.int32, (None,)),
})  # fmt: skip


def record(memory, length, begin, ending):
    """Record an episode whose k-th entry holds begin + k, and whose final state holds begin + length."""
    memory.open()
    numbers = []
    for t in range(begin, begin + length):
        hidden, words = np.array([t, -t], np.float32), np.arange(t, t + t % 4)
        entry = np.full(1, t, np.float32), hidden, np.float32(t / 8), np.float32(t % 3), words
        numbers.append(memory.add(0, entry))
    final = np.full(1, begin + length, np.float32) if ending != "unknown" else None
    memory.close(final_state=final, terminated={"terminated": True, "truncated": False, "unknown": None}[ending])
    return numbers
