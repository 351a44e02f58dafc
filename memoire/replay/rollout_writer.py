"""The writer of rollouts: fragments leave at the step that fills them, and a step waits until there is room."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .writer import Writer


class RolloutWriter(Writer):
    """A `Writer` whose fragments have `longest` entries: shipped at once, so that no entry waits for a step that does.

    Arguments are those of `Writer`.
    """

    __slots__ = ()
    _cuts_at_once: ClassVar[bool] = True

    def discard(self) -> int:
        """Drop the entries of open episodes, and go on in them; returns how many were dropped."""
        with self._alone("discard"):
            lengths, self._room = self._clock - self._opened, 0
            for i in np.flatnonzero(lengths).tolist():
                self._memory.open(int(self.lanes[i]))
            self._opened[:] = self._clock
            return int(lengths.sum())

    def _between(self, waits: object) -> None:
        """Cut what is long enough, and have the observer wait if it is to."""
        if self._room == 0:
            self._cut_here(self._longest)
        if waits and self._observer is not None:
            self._observer.pause(self)
