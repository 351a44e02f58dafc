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

    def _between(self, waits: object) -> None:
        """Cut what is long enough, or drop what there was no room for; and have the observer wait if it is to."""
        if waits == "discard":
            self._discard()
        elif self._room == 0:
            self._cut_here(self._longest)
        if waits and self._observer is not None:
            self._observer.pause(self)

    def _discard(self) -> None:
        """Drop the entries of open episodes, and go on in these."""
        for i in np.flatnonzero(self._opened < self._clock).tolist():
            self._memory.open(int(self.lanes[i]))
        self._opened[:] = self._clock
        self._room = 0
