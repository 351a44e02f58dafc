"""Data sets of Minari as samples of workers, so that any memory can begin with them.

    for buffer in offline.buffers_of(minari.load_dataset("D4RL/door/human-v2")):
        memory.append(buffer)

A data set of memoire becomes one of Minari by `memoire.minari.write`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from memoire.errors import DataError

from .memory import NO_DONE
from .sample_journal import KeptBuffer
from .trees import assembled, leaves_of, structure_of


def buffers_of(data: Any) -> Iterator[KeptBuffer]:
    """A buffer for each episode: the sample of its reset, with an action of zeros, and one for each step.

    An episode that was not terminated counts as truncated: its last observation is there.

    Args:
        data: A `minari.MinariDataset`, or an iterable of its episodes.

    Raises:
        DataError: an episode has no steps, or not one observation more than actions.
    """
    for episode in data.iterate_episodes() if hasattr(data, "iterate_episodes") else data:
        yield KeptBuffer(_samples(episode), None)


def _samples(episode: Any) -> list[Any]:
    steps = len(episode.rewards)
    act, obs = _Rows(episode.actions), _Rows(episode.observations)
    if not steps or act.least < steps or obs.least < steps + 1:
        found = f"{steps} rewards, {act.least} actions and {obs.least} observations"
        raise DataError(
            f"episode {episode.id} of the data set", f"has {found}: there is one observation more than steps"
        )
    rest = assembled(act.structure, [np.zeros_like(leaf) for leaf in leaves_of(act[0])])
    samples: list[Any] = [(rest, obs[0], 0.0, False, {})]
    for step in range(steps):
        done = bool(episode.terminations[step])
        info = {NO_DONE: True} if step == steps - 1 and not done else {}
        samples.append((act[step], obs[step + 1], float(episode.rewards[step]), done, info))
    return samples


class _Rows:
    """Nested columns [T, *F], row by row."""

    def __init__(self, columns: Any) -> None:
        self.structure = structure_of(columns) if isinstance(columns, dict | tuple) else None
        self._columns = [np.asarray(leaf) for leaf in leaves_of(columns)] if self.structure else [np.asarray(columns)]
        self.least = min(len(column) for column in self._columns)
        """Rows that all columns have."""

    def __getitem__(self, row: int) -> Any:
        return assembled(self.structure, [np.array(column[row]) for column in self._columns])
