"""Batches drawn ahead of the calls that take them: how many there are to be, of which size, and those that are ready.
Pure: no lock, no socket, no clock.
"""

from __future__ import annotations

from collections import deque

from memoire.pool.draw import Pooled


class Prefetch:
    """The queue between the reader's thread, which puts batches in, and the calls that take them. The owner locks.

    Args:
        ahead: Batches that are drawn before they are asked for, at least 1.
    """

    def __init__(self, ahead: int) -> None:
        self.batch_size = 0
        """Samples of the batches that are drawn ahead; 0 draws none."""
        self.samples = 0
        """Samples of all batches that were put in."""
        self._ahead = ahead
        self._ready: deque[Pooled] = deque()

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def reserve(self) -> int:
        """Samples that each server is to keep for this reader: enough for the batches ahead, wherever they come
        from.
        """
        return self.batch_size * (self._ahead + 1)

    def has_room(self, drawing: int) -> bool:
        """Whether another batch is wanted while this many are on their way."""
        return self.batch_size > 0 and len(self._ready) + drawing < self._ahead

    def resize(self, batch_size: int) -> bool:
        """From now on batches have this size; whether they had another one, so that those that are ready are gone."""
        if batch_size == self.batch_size:
            return False
        self.batch_size = batch_size
        self._ready.clear()
        return True

    def put(self, drawn: Pooled) -> None:
        """Keep a batch; one of a former size is dropped."""
        if len(drawn.importance) == self.batch_size:
            self._ready.append(drawn)
            self.samples += self.batch_size

    def first(self) -> Pooled:
        """The next batch, which there has to be; it stays the next one until `take`."""
        return self._ready[0]

    def take(self) -> None:
        """Give the next batch away."""
        self._ready.popleft()

    def clear(self) -> None:
        """Drop what is ready: it was drawn by parameters that no longer hold."""
        self._ready.clear()

    def close(self) -> None:
        """Nothing is drawn ahead any more."""
        self.resize(0)
