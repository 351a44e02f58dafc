"""Batches drawn ahead of the calls that take them: how many there are to be, of which size, and those that are ready.
Pure: no lock, no socket, no clock.

    a call finds none ready ──▶ twice as many ahead, half of them in one round       the round trip is shared by more
    enough are ready        ──▶ half as many after a while                           batches are no older than they must

A round trip costs about as much for eight small batches as for one, and for two large ones less than twice as much.
A learner that computes for longer than a round trip takes never waits, and has only as many ahead as its reader was
given.
"""

from __future__ import annotations

from collections import deque

from memoire.errors import MemoireError
from memoire.limits import MiB
from memoire.pool.draw import PooledBatch

MAX_AHEAD = 16
"""Batches ahead for a learner that waits, at most."""
MAX_AHEAD_BYTES = 64 * MiB
"""Bytes of them, at most: two rounds of two batches of 256 Atari stacks. Larger rounds are in no processor's cache when
they are copied."""
CALM_TAKES = 64
"""Batches that are taken while more are ready, before there are fewer ahead."""


class BatchQueue:
    """The queue between the reader's thread, which puts batches in, and the calls that take them. The owner locks.

    Args:
        ahead: Batches that are drawn before they are asked for, at least 1.
        may_grow: Whether there are more for a learner that waits.
        most_bytes: Bytes of them, at most, if there are more. A round, half of them, is one reply of a server.
    """

    def __init__(self, ahead: int, *, may_grow: bool = True, most_bytes: int = MAX_AHEAD_BYTES) -> None:
        self.batch_size = 0
        """Samples of the batches that are drawn ahead; 0 draws none."""
        self.samples = 0
        """Samples of all batches that were put in."""
        self.drawing = 0
        """Batches that are on their way; the thread sets it, and calls may read it without the lock."""
        self.depth = ahead
        """Batches that are to be ready or on their way."""
        self.failed: MemoireError | None = None
        """Why no batch of this size can come; the next call raises it."""
        self._ahead, self._most, self._calm = ahead, MAX_AHEAD if may_grow else ahead, 0
        self._most_bytes = min(most_bytes, MAX_AHEAD_BYTES)
        self._is_starved = False  # a call found none ready since the newest round began
        self._batch_bytes = 0  # of a batch of this size; 0 before there was one
        self._ready: deque[PooledBatch] = deque()
        self.former: deque[PooledBatch] = deque()
        """Batches of a former size: the thread takes them, and makes others of their samples."""

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def reserve(self) -> int:
        """Samples that each server is to keep for this reader: enough for the batches ahead, wherever they come
        from.
        """
        return self.batch_size * (self.depth + 1)

    @property
    def round(self) -> int:
        """Batches that are drawn in one round."""
        return max(1, self.depth // 2) if self.depth > self._ahead else 1

    @property
    def has_room(self) -> bool:
        """Whether another round is wanted."""
        return (
            self.failed is None and self.batch_size > 0 and len(self._ready) + self.drawing + self.round <= self.depth
        )

    def check(self) -> None:
        """Raise what has ended the newest round, once: the next call has it drawn again."""
        failed, self.failed = self.failed, None
        if failed is not None:
            raise failed

    def starve(self) -> None:
        """A call finds no batch ready."""
        self._is_starved, self._calm = self._batch_bytes > 0, 0

    def begin(self, available: int) -> int:
        """A round begins while there are so many samples; returns how many batches it is to draw, at least 1.

        Where a call waits although there is plenty, the next rounds are larger.
        """
        if self._is_starved and available >= 2 * self.round * self.batch_size:
            most = max(self._ahead, min(self._most, self._most_bytes // self._batch_bytes))
            self.depth = min(2 * self.depth, most)
        self._is_starved = False
        return max(1, min(self.round, available // self.batch_size))

    def resize(self, batch_size: int) -> bool:
        """From now on batches have this size; whether they had another one, so that those that are ready are former."""
        if batch_size == self.batch_size:
            return False
        self.batch_size, self.depth, self.failed = batch_size, self._ahead, None
        self._calm, self._batch_bytes, self._is_starved = 0, 0, False
        self.samples -= sum(len(each.importance) for each in self._ready)
        self.former += self._ready
        self._ready.clear()
        return True

    def put(self, drawn: PooledBatch) -> None:
        """Keep a batch."""
        if len(drawn.importance) != self.batch_size:
            self.former.append(drawn)
            return
        self._ready.append(drawn)
        self.samples += self.batch_size
        self._batch_bytes = self._batch_bytes or drawn.nbytes

    def first(self) -> PooledBatch:
        """The next batch, which there has to be; it stays the next one until `take`."""
        return self._ready[0]

    def take(self) -> None:
        """Give the next batch away."""
        self._ready.popleft()
        self._calm = self._calm + 1 if self._ready else 0
        if self._calm >= CALM_TAKES:
            self._calm, self.depth = 0, max(self._ahead, self.depth // 2)

    def clear(self) -> None:
        """Drop what is there: it was drawn by parameters that no longer hold."""
        self._ready.clear()
        self.former.clear()

    def close(self) -> None:
        """Nothing is drawn ahead any more."""
        self.resize(0)
        self.former.clear()
