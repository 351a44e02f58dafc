"""Episodes whose entries say their number, for the tests of sequences."""

import numpy as np

from memoire import Schema
from memoire.replay.columns import Column

SCHEMA = Schema(
    {
        "obs": Column(np.float32, (1,), "state"),
        "hidden": Column(np.float32, (2,)),
        "reward": Column(np.float32, (), "reward"),
        "value": Column(np.float32, (), "value"),
    }
)


def record(memory, length, begin, ending):
    """An episode whose k-th entry is made of begin + k, and whose final state is begin + length."""
    memory.open()
    numbers = []
    for t in range(begin, begin + length):
        numbers.append(
            memory.add(
                0, (np.full(1, t, np.float32), np.array([t, -t], np.float32), np.float32(t / 8), np.float32(t % 3))
            )
        )
    final = np.full(1, begin + length, np.float32) if ending != "unknown" else None
    memory.close(final_state=final, terminated={"terminated": True, "truncated": False, "unknown": None}[ending])
    return numbers
