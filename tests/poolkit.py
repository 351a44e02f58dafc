"""What the tests of held samples share: a schema, a clock that stands still, and clients' ids."""

import numpy as np

from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema

SCHEMA = Schema({"obs": (np.float32, (3,)), "action": np.int32, "reward": np.float32})
PLAIN = Parameters(importance_exponent=1.0)


class Clock:
    """Stands still until somebody changes `now`."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def name(i: int) -> bytes:
    """The id of client i."""
    return i.to_bytes(16, "little")
