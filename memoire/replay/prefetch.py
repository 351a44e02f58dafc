"""Batches drawn ahead of time, on a thread of their own: while a learner computes, the next ones are copied.

    thread   draw ▶ [batch] [batch] ▶ waits for room          learner   takes one ▶ trains ▶ takes one

Samples are copied without the GIL, so that a learner that waits for a GPU, or computes in NumPy or torch, loses no time
by it. `prefetch` does the same for whatever is made of batches. `batches_until_over` is the loop below it: one batch
after the other, until the run ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from memoire import _core
from memoire.arguments import seconds, whole
from memoire.errors import Closed, MemoireTimeout, NotEnoughSamples

T = TypeVar("T")
IsOver = Callable[[], bool]
MAX_PREFETCH = 1024
WAIT_INTERVAL = 0.25
"""Seconds of one stretch of waiting for a batch: the run may end meanwhile."""


def prefetch(values: Iterable[T], ahead: int = 1) -> Iterator[T]:
    """What an iterator gives, computed on a thread of its own, up to `ahead` values before they are asked for.

    A learner has its next batch moved, augmented, or valued by its target network while it computes:

        def prepared(batch):
            return batch, target_values(batch.next_obs)

        for batch, values in memoire.prefetch(map(prepared, server.batches(256))):

    The thread begins when the first value is asked for. What the iterator raises is raised in its turn. Whoever stops
    early loses what was taken for him; the thread ends with the next value, or when the iterator ends.

    Args:
        ahead: How many; 0 takes each one when it is asked for, in the caller's thread. At most 1,024.

    Raises:
        ParameterError: `ahead` is out of its range; at once.
    """
    return drawn_ahead(lambda is_over: iter(values), lambda: False, ahead)


def drawn_ahead(make: Callable[[IsOver], Iterator[T]], is_over: IsOver, ahead: int) -> Iterator[T]:
    """What an iterator gives, taken from it up to `ahead` values before they are asked for, from the first one on.

    Raises what it raises, in its turn. Whoever stops early, or outlives the end, loses what was taken for him.

    Args:
        make: Makes the iterator, which is to end when what it is given says so.
        is_over: Whether nothing is to be given any more; asked before each value.
        ahead: How many; 0 takes each one when it is asked for, in the caller's thread.

    Raises:
        ParameterError: `ahead` is out of its range; at once.
    """
    ahead = whole("ahead", ahead, 0, MAX_PREFETCH)
    return _taken(_DrawThread(make, is_over, ahead), is_over) if ahead else make(is_over)


def _taken(drawer: _DrawThread[T], is_over: IsOver) -> Iterator[T]:
    drawer.start()
    try:
        while (drawn := drawer.take()) is not None and not is_over():
            yield drawn[0]
    finally:
        drawer.leave()


class _DrawThread(Generic[T]):
    """The thread, and what it has ready."""

    def __init__(self, make: Callable[[IsOver], Iterator[T]], is_over: IsOver, ahead: int) -> None:
        self._ahead = ahead
        self._values = make(lambda: self._is_left or is_over())
        # One lock for all below; notified when any of it changes.
        self._changed = _core.Condition()
        self._ready: deque[tuple[T]] = deque()
        self._failed: BaseException | None = None
        self._is_done = False  # the thread gives nothing any more
        self._is_left = False  # nobody takes anything any more
        self._thread = threading.Thread(target=self._run, name="memoire-ahead", daemon=True)

    def start(self) -> None:
        """Begin to draw."""
        self._thread.start()

    def take(self) -> tuple[T] | None:
        """The next value as soon as it is there; None at the end."""
        with self._changed.held():
            self._changed.wait_for(lambda: self._ready or self._is_done)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._failed is not None:
                raise self._failed
            return None

    def leave(self) -> None:
        """Have the thread end soon, and let go of what it has."""
        with self._changed.held():
            self._is_left = True
            self._ready.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            for value in self._values:
                with self._changed.held():
                    self._ready.append((value,))
                    self._changed.notify_all()
                    del value  # or the thread would hold it while it waits
                    self._changed.wait_for(lambda: self._is_left or len(self._ready) < self._ahead)
                    if self._is_left:
                        return
        except BaseException as error:
            self._failed = error
        finally:
            self._values = iter(())  # the iterator refers to this object: without this it would end some time
            with self._changed.held():
                self._is_done = True
                self._changed.notify_all()


def batches_until_over(
    get_batch: Callable[[float], T],
    is_over: Callable[[], bool],
    what: str,
    timeout: float,
    where: str,
    advice: Callable[[], str],
) -> Iterator[T]:
    """Batches of a server or reader until the run is over; each waits at most `timeout` seconds, in stretches.

    Args:
        get_batch: Its own, given how long to wait.
        what, where, advice: For the error: what is waited for, whom it comes from, and what to look at when none comes.

    Raises:
        MemoireTimeout: not enough samples came in that time, or nobody answered.
    """
    timeout = seconds(timeout)
    deadline = time.monotonic() + timeout
    while not is_over():
        try:
            batch = get_batch(max(0.0, min(WAIT_INTERVAL, deadline - time.monotonic())))
        except Closed:
            return
        except (NotEnoughSamples, MemoireTimeout) as error:
            if time.monotonic() < deadline or is_over():
                continue
            if isinstance(error, MemoireTimeout):
                raise MemoireTimeout(error.waited_for, error.endpoint, timeout, error.advice) from None
            short = NotEnoughSamples(error.wanted, error.unused, error.caches, error.clients, timeout, error.reason)
            raise MemoireTimeout(what, where, timeout, f"{short} {advice()}") from error
        yield batch
        deadline = time.monotonic() + timeout
