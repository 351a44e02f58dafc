"""Memories with something in them, for tests of what is drawn, packed and copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from memoire.replay.memory import Memory


def filled(
    memory: Memory,
    entry: Callable[[int], Sequence[Any]],
    *,
    episodes: int = 1,
    length: int = 20,
    final: Callable[[], Any] | None = None,
    model_version: int = 0,
    **closing: Any,
) -> Memory:
    """The memory with closed episodes: entry t of each is `entry(t)`, and `final()` is the state in which it ended."""
    for _ in range(episodes):
        memory.open()
        for step in range(length):
            memory.add(0, entry(step), model_version=model_version)
        memory.close(final_state=None if final is None else final(), **closing)
    return memory


def with_episode(memory: Memory, values: Sequence[Any], init_w: Any = 1.0, **closing: Any) -> Memory:
    """The memory with one more closed episode, of these columns: each [T, *F]."""
    memory.open()
    memory.extend(0, values, init_w)
    memory.close(**closing)
    return memory
