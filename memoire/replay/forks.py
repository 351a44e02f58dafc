"""What a forked process finds: copies of memories and generators, from a moment in which none was being changed.

    a process, seed 7          SeedSequence(7)
      first child              SeedSequence(7, spawn_key=(0,))
      second child             SeedSequence(7, spawn_key=(1,))
        its first child        SeedSequence(7, spawn_key=(1, 0))

So workers draw different batches, and the same ones in the next run of a program that forks in the same order.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from typing import Any, Protocol

import numpy as np

_held_for_fork: list[Any] = []


class _Child(threading.local):
    """Which child of this process a thread is about to fork."""

    number = 0


_child = _Child()
_children = itertools.count()  # of this process
_path: tuple[int, ...] = ()  # this process among the children of the first one, then of its child, and so on


class ForkedCopy(Protocol):
    """An object that a forked process gets a copy of."""

    def held(self) -> Any:
        """A context in which no other thread changes it."""

    def reseed(self, seeds: np.random.SeedSequence) -> None:
        """Draw from now on by these seeds."""


_seeds: weakref.WeakKeyDictionary[ForkedCopy, tuple[np.random.SeedSequence, int]] = weakref.WeakKeyDictionary()
"""The seeds of each one in this process, and how long `_path` was when it got them."""


def seed_here(copied: ForkedCopy, seed: int | np.random.SeedSequence | None) -> None:
    """Have it draw by this seed, and its copies in processes that are forked from this one by seeds of their own.

    It is held while a process is forked, as long as it lives.

    Args:
        seed: None takes entropy from the system.
    """
    seeds = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    _seeds[copied] = seeds, len(_path)
    copied.reseed(seeds)


class ForkedGenerator(np.random.Generator):
    """A `numpy.random.Generator` whose copy in a forked process draws other numbers: a child's, see above.

    Args:
        seed: As of `numpy.random.default_rng`; None takes entropy from the system.
    """

    def __init__(self, seed: int | np.random.SeedSequence | None = None) -> None:
        super().__init__(np.random.PCG64())
        seed_here(self, seed)

    def held(self) -> Any:
        """A context in which no other thread draws."""
        return self.bit_generator.lock

    def reseed(self, seeds: np.random.SeedSequence) -> None:
        """Draw from now on as `numpy.random.default_rng(seeds)`."""
        self.bit_generator.state = np.random.PCG64(seeds).state

    def __reduce__(self) -> Any:
        seeds = _seeds[self][0]
        return _copied, (type(self), seeds.entropy, seeds.spawn_key, self.bit_generator.state)


def _copied(kind: type[ForkedGenerator], entropy: Any, spawn_key: tuple[int, ...], state: Any) -> ForkedGenerator:
    """A generator out of its pickle or copy, which goes on where that one was."""
    made = kind(np.random.SeedSequence(entropy, spawn_key=spawn_key))
    made.bit_generator.state = state
    return made


def _before_fork() -> None:
    # A child gets a copy of everything from a moment in which nothing was being changed; and no lock that a thread
    # holds which the child does not have.
    _child.number = next(_children)
    # Memories first: a thread that holds one may draw from a generator, and none holds a generator and waits for one.
    for copied in sorted(_seeds, key=lambda each: isinstance(each, ForkedGenerator)):
        moment = copied.held()
        moment.__enter__()
        _held_for_fork.append(moment)


def _after_fork() -> None:
    while _held_for_fork:
        _held_for_fork.pop().__exit__(None, None, None)


def _after_in_child() -> None:
    global _children, _path
    _after_fork()
    _children, _path = itertools.count(), (*_path, _child.number)
    for copied, (seeds, length) in list(_seeds.items()):
        copied.reseed(np.random.SeedSequence(seeds.entropy, spawn_key=(*seeds.spawn_key, *_path[length:])))


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_in_child)
