"""A pool that hands its entries out by calls of its own, and from which no batch can be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from memoire.errors import ParameterError
from memoire.replay.batch import GatheredSamples
from memoire.wire.parts import Payload
from memoire.wire.receivers import Page
from memoire.wire.rows import CLIENT_SUMS

from .draw import PooledBatch
from .inspection import PeekedSample
from .lasting import LastingPool


class BatchlessPool(LastingPool):
    """Refuses batches, and has no priorities and no samples. Thread-safe."""

    STORAGE: ClassVar[str]
    """What tables call it."""
    INSTEAD: ClassVar[str]
    """What a learner writes in place of `get_batch`."""

    def get(
        self,
        samples: int,
        *,
        timeout: float | None = None,
        out: GatheredSamples | Mapping[str, NDArray[Any]] | None = None,
    ) -> PooledBatch:
        """Refused, a batch [B, ...]. Raises ParameterError, which says what to call."""
        raise ParameterError("storage", self.STORAGE, f"'caches' or 'episodes' for a batch; here use {self.INSTEAD}")

    def reserve(
        self, reader: bytes, samples: int, elsewhere: int = 0, part: tuple[int, int] = (0, 1), wanted: int | None = None
    ) -> NDArray[np.void]:
        """[0] rows of `rows.CLIENT_SUMS`: a batch cannot be drawn here."""
        return np.empty(0, CLIENT_SUMS)

    def draw_counts(
        self,
        reader: bytes,
        counts: NDArray[np.void],
        *,
        now: float = 0.0,
        compression: str = "none",
        page: Page | None = None,
    ) -> Payload | None:
        """None for any rows [C] of `rows.CLIENT_COUNTS`: a batch cannot be drawn here."""
        return None

    def apply(self, owner: bytes, numbers: NDArray[np.int64], td_errors: NDArray[np.float32]) -> tuple[int, int] | None:
        """None: what is held has no priorities; both are [N]."""
        return None

    def saved_layout(self) -> None:
        """None: what is held leaves in an order that it says itself."""

    def peek(self, of: tuple[bytes, int] | None = None) -> PeekedSample | None:
        """None: what is held is no sample."""
        return None
