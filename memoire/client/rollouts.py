"""Rollouts at an actor: parts of episodes of one length, each made only while there is room for it.

An entry is granted at its own step, so that a step waits before it is made by a model whose share is there. Fragments
leave at the step that fills them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from memoire import _core
from memoire._core import setting
from memoire.errors import ParameterError
from memoire.replay.episode_store import AfterStep, putting
from memoire.replay.parameters import Parameters
from memoire.replay.writer import Writer
from memoire.replay.writers import WriterRegistry

from .episodes import EpisodesSide
from .pushes import HELD_BACK, WriterObserver


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


class RolloutsObserver(WriterObserver):
    """Waits if there is no room for more: before more is recorded. Entries without room are discarded."""

    def take_entries(self, writer: _core.StepCounter, waits: bool) -> None:
        """Take what was recorded: inserts if there was room for the first of them, else passed steps."""
        self._waiting.check_process()
        inserts, counts, session = self._session.inserts, self._session.counts, self._session
        with self._waiting.changed:
            entries, has_room = writer._untold, inserts.left > 0
            is_enough = inserts.left > entries or session.is_finished
            changes = session.recording(entries) + setting(counts, passed=counts.passed + entries * (not has_room))
            answer: AfterStep = "discard" if not has_room else "" if is_enough else "wait"
            _core.at_once(changes + setting(writer, _untold=0, _answer=answer))

    def pause(self, writer: _core.StepCounter) -> None:
        """Wait until another entry may be inserted: `block_timeout` seconds at most, so that a call ends."""
        pusher, waiting, with_it = self._pusher, self._waiting, setting(writer, _answer="")
        waiting.wake()
        if not pusher.is_granted(waiting.now() + pusher.block_timeout) and not self._session.is_finished:
            pusher.skip(HELD_BACK, lambda: with_it)
        else:
            _core.at_once(with_it)


class RolloutsSide(EpisodesSide):
    """Open episodes, of which fragments leave."""

    STORED = "rollouts: closed episodes are pushed, or push_episode pushes one"
    observer = RolloutsObserver
    waits_for_models = True
    is_granted_at_once = True

    def _room(self, entries: int) -> int:
        return entries

    def writer_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Fragments of the table's length, if it has one; no longer than fit there and into a message."""
        given, length = super().writer_options(options), self.session.parameters.rollout_length
        longest = given.get("longest")
        if longest is not None and length and longest != length:
            raise ParameterError("longest", longest, f"{length}, the length of the table's rollouts, or left out")
        return given | {"made_by": RolloutWriter, "longest": self._longest(longest)}

    def _longest(self, given: int | None = None) -> int:
        most = self.session.told.limits.get("episode_entries", self.memory().capacity)
        return min(given or self.session.parameters.rollout_length or most, most, self.fitting)

    def follow(self, writers: WriterRegistry, former: Parameters) -> None:
        """Have their fragments get the table's new length."""
        if former.rollout_length != self.session.parameters.rollout_length:
            writers.shorten(self._longest())
