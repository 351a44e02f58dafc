"""The writer of rollouts: fragments leave at the step that fills them, and a step waits until there is room."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from memoire._core import setting

from .episode_store import putting
from .writer import Writer


class RolloutWriter(Writer):
    """A `Writer` whose fragments have `longest` entries: shipped at once, so that no entry waits for a step that does.

    Arguments are those of `Writer`.
    """

    __slots__ = ()
    _cuts_at_once: ClassVar[bool] = True

    def _between(self, is_after: bool, waits: bool) -> None:
        """Cut what is long enough, or all so that a learner has it while the observer waits, if it is to."""
        if is_after or self._owned:  # else the environment may have written over where the step ended
            self._cut_here(1 if self._answer else self._longest)
        if self._answer and waits and self._observer is not None:
            self._observer.pause(self)

    def _discard(self) -> None:
        """Drop the entries of open episodes, and go on in these; then wait."""
        changes = putting(self._clock, slice(None), self._opened) + setting(self, _room=0, _answer="wait")
        for i in np.flatnonzero(self._opened < self._clock).tolist():
            changes += self._memory.opening(int(self.lanes[i]))
        self._commit(changes)
