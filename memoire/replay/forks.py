"""What a process that is forked finds: a copy of every memory, from a moment in which none was being changed."""

from __future__ import annotations

import os
import weakref

from memoire import _core

_memories: weakref.WeakSet[_core.EntryStore] = weakref.WeakSet()
_held_for_fork: list[_core.Moment] = []


def _before_fork() -> None:
    # A child gets a copy of every memory, from a moment in which none was being changed; and no lock that a thread
    # holds which the child does not have.
    for memory in list(_memories):
        moment = memory.held()
        moment.__enter__()
        _held_for_fork.append(moment)


def _after_fork() -> None:
    while _held_for_fork:
        _held_for_fork.pop().__exit__(None, None, None)


def survive_forks(memory: _core.EntryStore) -> None:
    """Hold this memory while a process is forked, as long as it lives."""
    _memories.add(memory)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
