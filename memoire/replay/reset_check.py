"""Whether an environment was reset where its episode ended, or is being stepped on.

If `env.reset()` is forgotten, the next episode begins in the observation in which the last one ended. But so do the
episodes of a bandit and of an environment that always shows the same, and by chance those of a small environment that
begins anywhere. One such start proves nothing; a row of them in places where no episode began before does.

At a termination next_obs is never used, and some programs pass the first observation of the next episode. There only
episodes that all end at their first step say something, until one is longer: such a program, or one that is stepped on.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from copy import copy
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.errors import EpisodeOver

from .episode_store import Changes, putting

_log = logging.getLogger(__name__)

MAX_FIRST_OBSERVATIONS: Final = 4096
"""First observations that are remembered."""
PROOF: Final = 3
"""Suspicious starts in a row that are no chance any more."""
PROOF_AT_ONCE: Final = 2
"""The same where the episode is over after its first step, as it is where an environment repeats its end."""
PROOF_AT_TERMINATION: Final = 16
"""The same where the episode before terminated. Each of them is over after its first step."""
WORTH_A_WORD: Final = 2
"""Starts in a row where an episode has just ended, suspicious or not, of which somebody is told."""


State = tuple[NDArray[Any], ...]
"""A state: the state columns of one entry, in the schema's order, in their own dtypes and shapes."""


def digest(state: State) -> int:
    """Sixty-four bits that differ if states differ, the same in every process."""
    made = hashlib.blake2b(digest_size=8)
    for array in state:
        made.update(b"%d " % array.nbytes)
        made.update(np.ascontiguousarray(array).tobytes())
    return int.from_bytes(made.digest(), "little")


class _LastEnd(NamedTuple):
    """How an environment's last episode ended."""

    final: int
    """Digest of the observation in which it ended."""
    length: int
    is_terminal: bool = False


class ResetCheck:
    """The first observations of a writer's environments, as digests, and where their last episodes ended."""

    def __init__(self) -> None:
        self.is_warned = False
        """Whether somebody was told of a doubtful start."""
        self._ended: dict[int, _LastEnd] = {}  # by environment, until its next episode begins
        self._rows: dict[int, int] = {}  # by environment: suspicious starts in a row
        self._doubts: dict[int, int] = {}  # by environment: the same, suspicious or not
        self._firsts: set[int] = set()
        self._new: list[int] = []  # firsts that are no part of that set yet
        self._goes_on = False  # whether an episode that began where one terminated was longer than a step

    def state(self) -> dict[str, Any]:
        """All of it, as JSON carries it, for `go_on_from`."""
        tables = {name: list(getattr(self, name).items()) for name in ("_ended", "_rows", "_doubts")}
        return tables | {"firsts": sorted(self._firsts), "flags": [self.is_warned, self._goes_on]}

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Know what another one knew. Raises KeyError, TypeError or ValueError if that cannot be."""
        self._ended = {int(each): _LastEnd(int(end[0]), int(end[1]), bool(end[2])) for each, end in state["_ended"]}
        self._rows, self._doubts = ({int(each): int(row) for each, row in state[name]} for name in ("_rows", "_doubts"))
        self._firsts = set(map(int, state["firsts"]))
        self.is_warned, self._goes_on = map(bool, state["flags"])

    @property
    def awaited(self) -> tuple[int, ...]:
        """Environments whose episode has ended, so that their next step begins another one."""
        return tuple(self._ended)

    def ended(self, environment: int, final: int, length: int, *, terminated: bool = False) -> Changes:
        """The changes by which an episode of `length` steps ended in the observation `final`."""
        return putting(_LastEnd(final, length, terminated), environment, self._ended)

    def reset(self, environment: int) -> Changes:
        """The changes that follow if this environment was reset, as somebody says: its next start is not looked at."""
        return [(each.pop, (environment, None)) for each in (self._ended, self._rows, self._doubts)]

    def check(
        self, environments: Collection[int], state_of: Callable[[int], State], ending: Collection[int]
    ) -> dict[int, int]:
        """The digests of the states in which these environments begin an episode.

        Args:
            state_of: Gives the state of an environment.
            ending: Environments in which the step that begins the episode also ends it.

        Raises:
            EpisodeOver: one of them was surely not reset.
        """
        begins = {environment: digest(state_of(environment)) for environment in environments}
        for environment, first in begins.items():
            if self.is_forgotten(environment, first, environment in ending):
                raise EpisodeOver(environment, self._ended[environment].length)
        return begins

    def noted(self, begins: dict[int, int], ending: Collection[int] = ()) -> tuple[ResetCheck, Changes]:
        """Return the check that replaces this one after episodes begin, and the changes that complete it. Warns once.

        Args:
            begins: Digest of the first observation, by environment.
            ending: Environments whose episode ends with the same step.
        """
        made = copy(self)
        made._ended, made._rows, made._doubts, made._new = dict(self._ended), dict(self._rows), dict(self._doubts), []
        for environment, first in begins.items():
            if made.began(environment, first, environment in ending) >= WORTH_A_WORD and not self.is_warned:
                self.is_warned = made.is_warned = True
                _log.warning(
                    "episodes of environment %d begin in the observations in which the ones before ended. If "
                    "env.reset() was forgotten, call it after each end (terminated or truncated). If episodes do begin "
                    "there, all is well. This is said once for each writer.",
                    environment,
                )
        return made, [(self._firsts.update, (made._new,))]

    def is_forgotten(self, environment: int, first: int, ends: bool) -> bool:
        """Whether a start is the last of so many suspicious ones that the environment was surely not reset.

        Args:
            first: Digest of the observation in which the episode begins.
            ends: Whether the step that begins it also ends it.
        """
        if not self._is_repeated(environment, first):
            return False
        row = self._row(environment, first, ends)
        if self._ended[environment].is_terminal:
            return row >= PROOF_AT_TERMINATION
        return row >= (PROOF_AT_ONCE if ends else PROOF)

    def began(self, environment: int, first: int, ends: bool = False) -> int:
        """Note that an episode has begun in this environment; `first` is the hash of its first observation.

        Returns how many episodes of this environment in a row, this one included, began with the observation that
        ended the episode before.
        """
        if not self._is_repeated(environment, first):
            _core.at_once(self.reset(environment))
            if len(self._firsts) < MAX_FIRST_OBSERVATIONS:
                self._new.append(first)
            return 0
        self._rows[environment] = self._row(environment, first, ends)
        self._goes_on |= self._ended[environment].is_terminal and not ends
        del self._ended[environment]
        doubts = self._doubts[environment] = self._doubts.get(environment, 0) + 1
        return doubts

    def _is_repeated(self, environment: int, first: int) -> bool:
        before = self._ended.get(environment)
        return before is not None and before.final == first

    def _row(self, environment: int, first: int, ends: bool) -> int:
        """Suspicious starts in a row with this one: no episode was seen to begin here, and the row follows an episode
        of several steps, which bandits do not have.
        """
        row = self._rows.get(environment, 0)
        if self._ended[environment].is_terminal and (self._goes_on or not ends):
            return 0
        is_known = first in self._firsts or first in self._new
        is_suspicious = not is_known and (row > 0 or self._ended[environment].length > 1)
        return row + 1 if is_suspicious else 0
