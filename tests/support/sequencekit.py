"""Episodes whose entries say their number, for the tests of sequences."""

import numpy as np

from memoire import Schema

SCHEMA = Schema({"obs": (np.float32, (1,)), "hidden": (np.float32, (2,)), "reward": np.float32, "value": np.float32})


def record(memory, length, begin, ending):
    """An episode whose k-th entry is made of begin + k, and whose final state is begin + length."""
    memory.open()
    numbers = []
    for t in range(begin, begin + length):
        obs, hidden = np.full(1, t, np.float32), np.array([t, -t], np.float32)
        numbers.append(memory.add(0, (obs, hidden, np.float32(t / 8), np.float32(t % 3))))
    final = np.full(1, begin + length, np.float32) if ending != "unknown" else None
    memory.close(final_state=final, terminated={"terminated": True, "truncated": False, "unknown": None}[ending])
    return numbers
