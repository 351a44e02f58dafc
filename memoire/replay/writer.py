"""Environment steps become episodes: the writer takes what `env.step` returned, as it is, and finds out what it means.

A vector environment that resets its members by itself shows, at the end of an episode, either the true final
observation followed by a step that is no step (next_step), or the first observation of the next episode and the true
one in `info` (same_step). Stored as it comes, either gives transitions that cross a reset. This is the one place that
knows the rules: https://farama.org/Vector-Autoreset-Mode.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from threading import Lock, RLock
from time import monotonic
from typing import Any, NamedTuple, NoReturn, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.errors import (
    Closed,
    EntryError,
    EpisodeError,
    EpisodeOver,
    EpisodeTooLong,
    EpisodeTorn,
    FinalObservationMissing,
    MemoireError,
    NotFinite,
    ObservationReused,
    ParameterError,
    SchemaError,
    TwoThreads,
)
from memoire.suggestions import checked_names, meant, one_of

from .columns import Column
from .episode_starts import WORTH_A_WORD, Starts
from .schema import Schema
from .values import exact, finite, form

_log = logging.getLogger(__name__)

AUTORESET = ("next_step", "same_step", "disabled")
ORDER = "The order is step(obs, action, reward, terminated, truncated, next_obs, info)."
_NOT_EXTRA = frozenset({"next_obs", "info", "bootstrap_value"})  # parameters of `step` that no column can be called


class EpisodeStore(Protocol):
    """What a writer needs of a memory; `memory.Memory` is one."""

    @property
    def schema(self) -> Schema:
        """The columns."""

    @property
    def capacity(self) -> int:
        """Entries it has room for."""

    def open(self, lane: int = 0) -> None:
        """Begin an episode, discarding one that was not closed."""

    def add(self, lane: int, values: tuple[Any, ...], init_w: float = 1.0, model_version: int = 0) -> Any:
        """Add one entry."""

    def add_many(
        self, lanes: NDArray[np.int64], values: tuple[Any, ...], init_w: Any = 1.0, model_version: int = 0
    ) -> Any:
        """Add one entry to each of several lanes."""

    def close(
        self,
        lane: int = 0,
        *,
        final_state: tuple[Any, ...] | None = None,
        terminated: bool | None = None,
        bootstrap_value: Any = None,
    ) -> Any:
        """End an episode, in `final_state` if that is known."""


class Observer(Protocol):
    """Who counts what a writer records: called in the writer's thread, after the memory has it."""

    def on_entries(self, count: int) -> None:
        """`count` entries were added."""

    def on_episode(self, lane: int, length: int, return_: NDArray[np.float64]) -> None:
        """An episode ended after `length` entries; its undiscounted return, in the shape of one reward."""


class Writer:
    """Records the steps of an environment, or of all members of a vector environment, one open episode each.

        obs, info = envs.reset()
        while ...:
            action = policy(obs)
            next_obs, reward, terminated, truncated, info = envs.step(action)
            writer.step(obs, action, reward, terminated, truncated, next_obs, info)
            obs = next_obs          # of a single environment, and in mode disabled: reset first where an episode ended

    A writer belongs to one thread at a time; several writers may share a memory, with lanes of their own.

    Args:
        memory: Where episodes go.
        num_envs: Members of the vector environment; None is a single environment, whose values have no batch axis.
        autoreset: "next_step", "same_step" or "disabled" (you call reset), or a gymnasium.vector.AutoresetMode.
        observer: Told of entries and episodes.
        first_lane: The memory's lanes first_lane .. first_lane + num_envs - 1 are this writer's.
        longest: Entries after which an endless episode is cut: the part so far is stored as truncated, with its true
            next state, and the rest as an episode of its own. None is capacity // (2 * num_envs). Observers are told of
            whole episodes only. Where values of ragged columns have no more room, open episodes are cut earlier.
        check: Compare each obs with the next_obs of the step before, which is free where they are the same object; and
            in mode disabled refuse to go on from where an episode ended, as far as that can be known (see `starts`).

    Raises:
        ParameterError: no such mode, or a count below 1.
        SchemaError: the schema has several states, or a column that `step` cannot be given a value for.
    """

    num_envs: int
    """Members of the vector environment; 1 for a single environment."""
    autoreset: str
    """One of `AUTORESET`."""
    lanes: NDArray[np.int64]
    """[num_envs] the memory's lanes that this writer fills."""

    _room: int  # steps until an episode may be too long
    _longest: int

    # Fixed, so that a setting that a writer does not have is refused; in C, since a step sets several.
    __slots__ = (
        "__weakref__", "_began", "_check", "_clock", "_closed", "_columns", "_extras", "_inside", "_last", "_lead",
        "_longest", "_memory", "_nested", "_observer", "_opened", "_owned", "_pending", "_refused", "_returns", "_room",
        "_root", "_schema", "_single", "_starts", "_usual", "autoreset", "lanes", "num_envs",
    )  # fmt: skip

    def __init__(
        self,
        memory: EpisodeStore,
        num_envs: int | None = None,
        autoreset: Any = "disabled",
        observer: Observer | None = None,
        *,
        first_lane: int = 0,
        longest: int | None = None,
        check: bool = True,
    ) -> None:
        self._single = num_envs is None
        self.num_envs = count = 1 if num_envs is None else _at_least_one("num_envs", num_envs)
        self.autoreset = autoreset_mode(autoreset)
        self.longest = max(1, memory.capacity // (2 * count)) if longest is None else longest
        self.lanes = np.arange(first_lane, first_lane + count, dtype=np.int64)
        self._memory, self._observer, self._check = memory, observer, check
        self._schema = schema = memory.schema
        self._root, self._extras = _roots(schema)
        self._nested = tuple(root for root in schema.roots if schema.leaves(root) != (root,))
        self._lead = () if self._single else (count,)
        self._columns = [(name, schema[name], self._lead + schema[name].shape) for name in schema.entry_names]
        reward_shape = schema[schema.reward].shape if schema.reward is not None else ()
        # Lengths are differences of a clock, so that a step costs the same for any number of environments.
        self._clock = 0  # steps recorded
        self._began = np.zeros(count, np.int64)  # clock at the start of each environment's episode
        self._opened = np.zeros(count, np.int64)  # and of the memory's: later where the part before was cut off
        self._returns = np.zeros((count, *reward_shape))
        self._pending: NDArray[np.bool_] | None = None  # whose next step is their reset (next_step)
        self._last: Any = None  # the observation that the next step should start from, as it was given
        self._owned = False  # whether that is an array of its own, which a reset does not write over
        self._starts = Starts() if check and self.autoreset == "disabled" else None
        self._refused = (-1, "")  # clock when a step was refused, and why
        self._closed = ""  # what is closed, once no more steps are taken
        self._inside = RLock()  # held by the thread that is inside of a call: another one is refused, and never waits
        self._usual = self._usual_steps()
        for lane in self.lanes.tolist():
            memory.open(lane)

    def step(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        next_obs: Any,
        info: Mapping[str, Any] | None = None,
        *,
        bootstrap_value: Any = None,
        init_w: Any = 1.0,
        model_version: int = 0,
        **extras: Any,
    ) -> None:
        """Record one step of every environment, as `env.step(action)` returned it from `obs`; on error, nothing of it.

        Shapes: N num_envs in front of everything, nothing for a single environment; F the column's own shape.

        Args:
            obs: [N, *F], or dicts and tuples of such arrays, nested as the schema is.
            action: [N, *F]. In mode next_step the action of a resetting environment is ignored.
            reward: [N, *R].
            terminated: [N] whether the episode ended in a terminal state, after which nothing can be earned.
            truncated: [N] whether it ended otherwise. Where both are set, it terminated.
            next_obs: like obs.
            info: what `env.step` returned; needed in mode same_step, for `final_obs`.
            bootstrap_value: [N, *R] the critic's estimate of the states after the step, read where an episode is
                truncated; without it the return of such an episode counts nothing beyond its end. Only for schemas with
                a value column.
            init_w: What these entries' priorities are multiplied by: a number, or [N].
            model_version: The version of the model that acted.
            extras: [N, *F] a value for each further column, by name.

        Raises:
            EntryError: a value is missing, or does not match its column.
            NotFinite: a reward, value or observation is NaN or infinite, where its column does not allow that.
            EpisodeTorn: obs is not where the step before ended, in the middle of an episode.
            EpisodeOver: obs is where the episode ended: the environment was not reset.
            ObservationReused: the step wrote over obs.
            FinalObservationMissing: info lacks the observation in which an episode ended.
            Closed: after `close`.
            TwoThreads: another thread is inside of this writer.
        """
        if not self._inside.acquire(False):
            raise TwoThreads("this writer", "step")
        try:
            if self._closed:
                raise Closed(self._closed)
            if extras.keys() != self._extras:
                _explain_extras(self._schema, self._extras, extras)
            if bootstrap_value is not None and self._schema.value is None:
                raise EntryError("value", "nothing: the schema has no value column", "a bootstrap_value")
            if self._usual is not None and self._room > 0 and self._pending is None and bootstrap_value is None:
                step = (obs, action, reward, terminated, truncated, next_obs)
                if known := self._usual.add(*step, self._last, extras, init_w, model_version):
                    self._clock += 1
                    self._room -= 1
                    self._last, self._owned = next_obs, known == 2
                    if self._observer is not None:
                        self._observer.on_entries(self.num_envs)
                    return
            given = {"action": action, "reward": reward, "terminated": terminated, "truncated": truncated, **extras}
            try:
                self._record(given, obs, next_obs, info, bootstrap_value, init_w, model_version)
            except EntryError as error:
                if advice := self._advice(obs, reward, terminated, truncated, next_obs):
                    raise EntryError(error.column, error.expected, error.received, advice) from None
                raise
        except Exception as error:
            if not isinstance(error, EpisodeTorn):  # which follows from an earlier one
                self._refused = (self._clock, str(error))
            self._room = 0  # whatever comes next is looked at closely
            raise
        finally:
            self._inside.release()

    def reset(self, obs: Any = None, info: Any = None, *, mask: Any = None, bootstrap_value: Any = None) -> None:
        """Say that environments were reset in the middle of an episode: call it right after `env.reset()`.

        Open episodes are stored as truncated, ending in the next_obs of their last step. Where the environment has
        written over that array, the state is gone, and the last `multi_step` entries of the episode cannot be drawn.
        Observers are not told of these episodes: their returns are not whole. Where none is open, nothing happens.

        Args:
            obs: What `env.reset()` returned.
            info: Ignored, so that `writer.reset(*env.reset())` works.
            mask: [N] which environments were reset; None is all.
            bootstrap_value: [N, *R] the critic's estimates of the states in which the episodes stopped.
        """
        with self._alone("reset"):
            if self._closed:
                raise Closed(self._closed)
            everyone = np.ones(self.num_envs, np.bool_)
            self._abandon(everyone if mask is None else np.asarray(mask, np.bool_) & everyone, bootstrap_value)
            self._last, self._owned = obs, False

    def close(self) -> None:
        """Store open episodes as `reset` does, and take no more steps. A second call does nothing."""
        with self._alone("close"):
            if not self._closed:
                self._abandon(np.ones(self.num_envs, np.bool_), None)
                self._closed, self._last = "the writer", None

    def end(self, closed: str, patience: float) -> int:
        """`close` from another thread, because `closed` is: a step that is being taken has `patience` seconds.

        Returns:
            Entries of open episodes that were not stored, because the step took longer.
        """
        if self._closed:
            return 0
        is_alone = self._inside.acquire(timeout=patience)
        try:
            if is_alone:
                self.close()
                return 0
            return int((self._clock - self._opened).sum())
        finally:
            self._closed = closed
            if is_alone:
                self._inside.release()

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """Be the only thread inside of this writer, or refuse the call."""
        if not self._inside.acquire(False):
            raise TwoThreads("this writer", call)
        try:
            yield
        finally:
            self._inside.release()

    @property
    def longest(self) -> int:
        """Entries after which an endless episode is cut; may be set between steps."""
        return self._longest

    @longest.setter
    def longest(self, entries: int) -> None:
        self._longest = _at_least_one("longest", entries)
        self._room = 0  # steps until an episode may be too long: counted anew at the next step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _usual_steps(self) -> _core.UsualSteps | None:
        """What takes the usual step in one call; None where there is none: other memories, nested or ragged columns."""
        memory, schema = self._memory, self._schema
        if self._nested or schema.ragged or not isinstance(memory, _core.EntryStore):
            return None
        arguments = {self._root: "obs", schema.reward: "reward"}
        sources = tuple([arguments.get(name, name) for name in schema.entry_names])
        return _core.UsualSteps(memory, self.lanes, self._returns, sources, self._single, self._check)

    def _record(
        self,
        given: dict[str, Any],
        obs: Any,
        next_obs: Any,
        info: Mapping[str, Any] | None,
        bootstrap_value: Any,
        init_w: Any,
        model_version: int,
    ) -> None:
        """A step of any kind: find out what ends, convert, store, and close the episodes that ended."""
        reward, terminated, truncated = given["reward"], given["terminated"], given["truncated"]
        given[self._root] = obs
        values = self._values(given, reward)
        rewards = self._rewards(reward)
        self._check_order(obs, next_obs)
        ends = self._ends(terminated, truncated, next_obs, info, bootstrap_value)
        begins = self._begins(obs, ends)
        if self._room <= 0:
            self._cut(given, self._longest)
        self._room -= 1
        try:
            added = self._add(values, rewards, init_w, model_version)
        except EpisodeTooLong as error:
            if not error.ragged_limit:
                raise
            self._cut(given, 1)  # values of ragged columns leave with what is closed
            added = self._add(values, rewards, init_w, model_version)
        self._owned = self._last is not None and not _core.same_place(self._first(self._last), self._first(next_obs))
        self._last = next_obs
        if begins:
            self._begin(begins)
        if added and self._observer is not None:
            self._observer.on_entries(added)
        if ends:
            self._finish(ends)

    def _values(self, given: dict[str, Any], reward: Any) -> list[Any]:
        """A value for each column; of a vector environment in the column's dtype and shape, [N, *F]."""
        if self._schema.reward is not None:
            given[self._schema.reward] = reward
        for root in self._nested:
            given.update(zip(self._schema.leaves(root), self._flat(root, given[root]), strict=True))
        if self._single:  # the memory converts what it has to
            return [given[name] for name, _, _ in self._columns]
        return [
            value
            if type(value := given[name]) is np.ndarray and value.dtype == column.dtype and value.shape == shape
            else _convert(name, column, value, shape, self._lead)
            for name, column, shape in self._columns
        ]

    def _rewards(self, reward: Any) -> Any:
        """What is added to the returns: float64 [N, *R], not rounded to the column's float32."""
        if type(reward) is float and self._returns.shape == (1,):
            return reward
        try:
            return np.asarray(reward, np.float64).reshape(self._returns.shape)
        except (TypeError, ValueError) as error:
            name = self._schema.reward
            column = "a number" if name is None else str(self._schema[name])
            raise EntryError(name or "reward", column + _each(self._lead), form(reward)) from error

    def _add(self, values: list[Any], rewards: Any, init_w: Any, model_version: int) -> int:
        """Add an entry for each environment that made a step, and say how many did. Others were being reset."""
        resetting = self._pending
        if resetting is None:
            if self._single:
                self._add_one(values, init_w, model_version)
            else:
                self._memory.add_many(self.lanes, tuple(values), init_w, model_version)
            self._clock += 1
            self._returns += rewards
            return self.num_envs
        stepped = np.flatnonzero(~resetting)
        if stepped.size:
            weights = np.asarray(init_w)[stepped] if np.ndim(init_w) else init_w
            rows = tuple([value[stepped] for value in values])
            self._memory.add_many(self.lanes[stepped], rows, weights, model_version)
            self._clock += 1
            self._began[resetting] += 1
            self._opened[resetting] += 1
            self._returns[stepped] += rewards[stepped]
        self._pending = None
        return stepped.size

    def _add_one(self, values: list[Any], init_w: Any, model_version: int) -> None:
        try:
            self._memory.add(int(self.lanes[0]), tuple(values), init_w, model_version)
        except EntryError:  # such as a reward [1] for a scalar column
            exact_values = [
                _convert(name, column, value, shape, ())
                for value, (name, column, shape) in zip(values, self._columns, strict=True)
            ]
            self._memory.add(int(self.lanes[0]), tuple(exact_values), init_w, model_version)

    def _ends(
        self, terminated: Any, truncated: Any, next_obs: Any, info: Mapping[str, Any] | None, bootstrap_value: Any
    ) -> list[_End]:
        """What ended with this step, found out before anything is stored."""
        if self._single and terminated is False and truncated is False:
            return []
        terminal, stopped = self._flags("terminated", terminated), self._flags("truncated", truncated)
        if not np.count_nonzero(terminal) and not np.count_nonzero(stopped):
            return []
        done = terminal | stopped
        if self._pending is not None:
            done &= ~self._pending
        bootstrap = self._bootstrap(bootstrap_value)
        return [
            _End(i, bool(terminal[i]), self._final(i, next_obs, info), None if terminal[i] else bootstrap[i])
            for i in np.flatnonzero(done).tolist()
        ]

    def _begins(self, obs: Any, ends: list[_End]) -> dict[int, int]:
        """The environments whose episodes begin with this step, and digests of where. Raises EpisodeOver."""
        starts = self._starts
        if starts is None or not (starts.awaited or self._clock == 0):
            return {}
        beginning = starts.awaited if self._clock else range(self.num_envs)
        begins = {i: _digest(self._state(obs, None if self._single else i)) for i in beginning}
        over = {end.environment for end in ends}
        for i, first in begins.items():
            if starts.is_forgotten(i, first, i in over):
                raise EpisodeOver(i, starts.last_length(i))
        return begins

    def _begin(self, begins: dict[int, int]) -> None:
        """Episodes have begun, and their first steps are stored."""
        starts = self._starts
        assert starts is not None
        for i, first in begins.items():
            if starts.began(i, first) >= WORTH_A_WORD and not starts.is_warned:
                starts.is_warned = True
                _log.warning(
                    "episodes of environment %d begin in the observations in which the ones before ended. If "
                    "env.reset() was forgotten, call it after each end (terminated or truncated). If episodes do begin "
                    "there, all is well. This is said once for each writer.",
                    i,
                )

    def _flags(self, name: str, value: Any) -> NDArray[np.bool_]:
        try:
            given = np.asarray(value)
        except (TypeError, ValueError):
            given = np.empty(0)
        flags = given.astype(np.bool_)
        if flags.size != self.num_envs or given.dtype.kind not in "biuf" or (flags != given).any():
            raise EntryError(name, f"True or False{_each(self._lead)}", form(value), ORDER)
        return flags.reshape(self.num_envs)

    def _bootstrap(self, value: Any) -> Any:
        """[N, *R], or N times None."""
        name = self._schema.value
        if value is None or name is None:
            return [None] * self.num_envs
        column = self._schema[name]
        values = _convert("bootstrap_value", column, value, self._lead + column.shape, self._lead)
        return values.reshape(self.num_envs, *column.shape)

    def _final(self, environment: int, next_obs: Any, info: Mapping[str, Any] | None) -> _State:
        """The state in which an environment's episode ended."""
        if self.autoreset != "same_step":
            return self._state(next_obs, None if self._single else environment)
        # Gymnasium 1: an array of objects, one observation each, None where there is none, and a mask. Others give
        # one batched observation, and Gymnasium 0 had the longer name.
        name = "final_obs" if info is None or "final_obs" in info else "final_observation"
        final = None if info is None else info.get(name)
        if final is not None and not self._single:
            mask = info.get("_" + name) if info is not None else None
            if mask is not None and not mask[environment]:
                raise FinalObservationMissing(environment)
            if isinstance(final, np.ndarray) and final.dtype == object:
                final = final[environment]
            else:
                return self._state(final, environment)
        if final is None:
            raise FinalObservationMissing(environment)
        return self._state(final, None)

    def _state(self, obs: Any, environment: int | None) -> _State:
        """The state columns of one observation, in the schema's order; `environment` picks it out of a batch."""
        leaves = zip(self._schema.leaves(self._root), self._flat(self._root, obs), strict=True)
        picked = ((name, leaf if environment is None else leaf[environment]) for name, leaf in leaves)
        return tuple(
            finite(name, column, _convert(name, column, value, column.shape, ()))
            for name, value in picked
            if (column := self._schema[name]).role == "state"
        )

    def _finish(self, ends: list[_End]) -> None:
        """Close the episodes that a step ended, and open the next ones."""
        if self.autoreset == "next_step":
            self._pending = np.zeros(self.num_envs, np.bool_)
            self._pending[[end.environment for end in ends]] = True
        for i, is_terminal, final, bootstrap in ends:
            lane = int(self.lanes[i])
            self._memory.close(lane, final_state=final, terminated=is_terminal, bootstrap_value=bootstrap)
            self._memory.open(lane)
            length, return_ = self._clock - int(self._began[i]), np.array(self._returns[i])
            self._began[i] = self._opened[i] = self._clock
            self._returns[i] = 0.0
            if self._starts is not None:
                self._starts.ended(i, _digest(final), length)
                self._room = 0  # the step that begins the next episode is looked at closely
            if self._observer is not None:
                self._observer.on_episode(lane, length, return_)

    def _cut(self, given: Mapping[str, Any], least: int) -> None:
        """Store what has at least so many entries as truncated episodes: the observation that comes now is their true
        final one.
        """
        for i in np.flatnonzero(self._clock - self._opened >= least).tolist():
            value = given[self._schema.value] if self._schema.value is not None else None
            final = self._state(given[self._root], None if self._single else i)
            self._memory.close(
                int(self.lanes[i]), final_state=final, terminated=False, bootstrap_value=self._bootstrap(value)[i]
            )
            self._memory.open(int(self.lanes[i]))
            self._opened[i] = self._clock
        self._room = self._longest - (self._clock - int(self._opened.min()))

    def _abandon(self, mask: NDArray[np.bool_], bootstrap_value: Any) -> None:
        """Close the open episodes under `mask` where the last step left them."""
        bootstrap = self._bootstrap(bootstrap_value)
        for i in np.flatnonzero(mask & (self._opened < self._clock)).tolist():
            lane = int(self.lanes[i])
            if (final := self._left_in(i)) is not None:
                self._memory.close(lane, final_state=final, terminated=False, bootstrap_value=bootstrap[i])
            else:
                self._memory.close(lane)
            self._memory.open(lane)
        self._began[mask] = self._opened[mask] = self._clock
        self._returns[mask] = 0.0
        if self._pending is not None:
            self._pending &= ~mask
        if self._starts is not None:
            for i in self._starts.awaited:
                if mask[i]:
                    self._starts.reset(i)

    def _left_in(self, environment: int) -> _State | None:
        """Where the last step left an environment; None where that was written over, or is not finite."""
        if not self._owned:
            return None
        try:
            return self._state(self._last, None if self._single else environment)
        except NotFinite:
            return None

    def _flat(self, root: str, value: Any) -> list[Any]:
        try:
            return self._schema.flatten(root, value)
        except SchemaError as error:
            raise EntryError(root, ", ".join(self._schema.leaves(root)), f"{form(value)}: {error}") from error

    def _first(self, obs: Any) -> Any:
        return self._flat(self._root, obs)[0] if self._root in self._nested else obs

    def _check_order(self, obs: Any, next_obs: Any) -> None:
        """Refuse an observation that was overwritten, or that is not where its episode was left."""
        after = self._first(next_obs)
        if _core.same_place(self._first(obs), after):
            raise ObservationReused(self._schema.states[0])
        last = self._last
        if not self._check or last is None or obs is last:
            return
        if _core.same_place(self._first(last), after):
            return  # this very step has written over what the last one returned: nothing to compare with
        going = self._began < self._clock
        if self._pending is not None:
            going |= self._pending
        torn = going & self._differ(obs, last) if going.any() else going
        if torn.any():
            environment = int(torn.argmax())
            refused = self._refused[1] if self._refused[0] == self._clock else ""
            raise EpisodeTorn(environment, self._clock - int(self._began[environment]), refused)

    def _advice(self, obs: Any, reward: Any, terminated: Any, truncated: Any, next_obs: Any) -> str:
        """What somebody probably mistook whose step was refused; "" where nobody can tell."""
        try:
            shape, after = _shape(self._first(obs)), _shape(self._first(next_obs))
        except EntryError:
            return ""
        column = self._schema[self._schema.leaves(self._root)[0]]
        whole = self._lead + column.shape
        if whole != self._lead and whole in map(_shape, (reward, terminated, truncated)) and after != whole:
            return f"It looks like an observation at another argument's place. {ORDER}"
        if column.is_ragged or shape is None or shape == whole:
            return ""
        if self._single and shape[1:] == column.shape and len(shape) == len(whole) + 1:
            return (
                f"This writer records one environment, and obs is of {shape[0]}: make it with writer(envs), or with "
                f"num_envs={shape[0]} and autoreset=."
            )
        if not self._single and shape == column.shape:
            return (
                f"This writer records {self.num_envs} environments, and obs is of one: give all of them at once, or "
                f"make a writer without num_envs."
            )
        return ""

    def _differ(self, obs: Any, other: Any) -> NDArray[np.bool_]:
        """[N] whether two observations differ in what would be stored of them."""
        found = np.zeros(self.num_envs, np.bool_)
        leaves = self._schema.leaves(self._root)
        for name, one, two in zip(leaves, self._flat(self._root, obs), self._flat(self._root, other), strict=True):
            column = self._schema[name]
            shape = self._lead + column.shape
            a, b = (_convert(name, column, value, shape, self._lead) for value in (one, two))
            if column.is_ragged:
                pairs = zip(a, b, strict=True) if self._lead else ((a, b),)
                found |= [not np.array_equal(*pair, equal_nan=column.dtype.kind == "f") for pair in pairs]
                continue
            unequal = (a != b) & ((a == a) | (b == b))  # two NaN are no difference
            found |= unequal.reshape(self.num_envs, -1).any(axis=1)
        return found


class Writers:
    """The writers of one memory: each has lanes that no other living one has, and together they leave it room.

    Thread-safe.
    """

    def __init__(self, memory: EpisodeStore) -> None:
        self.memory = memory
        """Whose they are."""
        self._lock = Lock()  # of the three below, except that a dying writer appends to `_free` at any moment
        self._free: deque[tuple[int, int]] = deque()  # (first lane, lanes) of writers that are gone
        self._lanes = 0  # lanes ever given to a writer
        self._sharing: weakref.WeakSet[Writer] = weakref.WeakSet()  # writers whose `longest` is chosen here
        self._living: weakref.WeakSet[Writer] = weakref.WeakSet()

    @checked_names(called="writer()")
    def make(
        self,
        num_envs: int | None,
        autoreset: Any,
        observer: Observer | None,
        *,
        longest: int | None = None,
        check: bool = True,
    ) -> Writer:
        """A writer with lanes of its own; see `Writer`.

        Args:
            longest: None leaves half of the capacity to the open episodes of all writers.

        Raises:
            ParameterError: there is no room for so many environments.
        """
        lanes = num_envs or 1
        with self._lock:
            first = self._lane_for(lanes)
        self._store_left(first, lanes)
        with self._lock:
            share = max(1, self.memory.capacity // (2 * self._lanes))
            most = share if longest is None else longest
            writer = Writer(self.memory, num_envs, autoreset, observer, first_lane=first, longest=most, check=check)
            weakref.finalize(writer, self._free.append, (first, lanes))
            self._living.add(writer)
            for other in self._sharing:
                other.longest = share
            if longest is None:
                self._sharing.add(writer)
            return writer

    def end(self, closed: str, deadline: float) -> list[str]:
        """Store what is open in every writer, as `Writer.close` does. From now on steps raise that `closed` is closed.

        Args:
            deadline: Until then threads that are inside of a writer may leave it, as time.monotonic() counts.

        Returns:
            What could not be stored, and why: a sentence each.
        """
        with self._lock:
            living, free = list(self._living), list(self._free)
        problems = []
        for writer in living:
            try:
                if entries := writer.end(closed, max(0.0, deadline - monotonic())):
                    problems.append(f"{entries} entries: a thread is still inside of their writer")
            except MemoireError as error:
                problems.append(f"an open episode: {error}")
        for first, lanes in free:
            try:
                self._store_left(first, lanes)
            except MemoireError as error:
                problems.append(f"an open episode: {error}")
        return problems

    def _store_left(self, first: int, lanes: int) -> None:
        """Close the open episodes of a writer that is gone: nobody knows in which states they ended."""
        for lane in range(first, first + lanes):
            with suppress(EpisodeError):  # none is open, or without entries
                self.memory.close(lane)

    def _lane_for(self, lanes: int) -> int:
        """The first of so many consecutive lanes that no living writer has."""
        for free in tuple(self._free):
            if free[1] == lanes:
                self._free.remove(free)
                return free[0]
        most = self.memory.capacity // 2
        if self._lanes + lanes > most:
            expected = f"at most {most} with those of other writers: two entries of room for each"
            raise ParameterError("num_envs", lanes, expected)
        self._lanes += lanes
        return self._lanes - lanes


_State = tuple[NDArray[Any], ...]
"""A state: the state columns of one entry, in the schema's order, in their own dtypes and shapes."""


def _digest(state: _State) -> int:
    """Sixty-four bits that differ if states differ, within this process."""
    return hash(tuple(array.tobytes() for array in state))


class _End(NamedTuple):
    """The end of one environment's episode."""

    environment: int
    is_terminal: bool
    final: _State
    bootstrap: Any


def autoreset_mode(mode: Any) -> str:
    """One of `AUTORESET`, for its name in any spelling or for a member of gymnasium.vector.AutoresetMode."""
    text = str(getattr(mode, "value", mode))
    found = {name.replace("_", ""): name for name in AUTORESET}.get(text.lower().replace("_", "").replace("-", ""))
    if found is None:
        raise ParameterError("autoreset", mode, one_of(mode, AUTORESET))
    return found


def layout(envs: Any = None, num_envs: int | None = None, autoreset: Any = None) -> tuple[int | None, str]:
    """(num_envs, autoreset) for `Writer`, read from an environment as far as they are not given.

    Args:
        envs: A Gymnasium environment or vector environment, or None; nothing is called on it.
        num_envs: Members of a vector environment; None without `envs` is a single environment.
        autoreset: A mode; None reads `envs.metadata["autoreset_mode"]`. A single environment without it is "disabled".

    Raises:
        ParameterError: a vector environment that does not say its mode, or not what was given.
    """
    found = getattr(envs, "num_envs", None)
    if num_envs is None:
        num_envs = found
    elif envs is not None and found is not None and found != num_envs:
        raise ParameterError("num_envs", num_envs, f"{found}, as the environment says")
    said = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    if autoreset is None:
        autoreset = said
    elif said is not None and autoreset_mode(autoreset) != autoreset_mode(said):
        raise ParameterError("autoreset", autoreset, f"{autoreset_mode(said)!r}, as the environment says")
    if autoreset is None and num_envs is not None:
        raise ParameterError("autoreset", None, f"given for vector environments: one of {', '.join(AUTORESET)}")
    return num_envs, autoreset_mode("disabled" if autoreset is None else autoreset)


def _roots(schema: Schema) -> tuple[str, frozenset[str]]:
    """The state's root, and the roots that `step` takes as extras."""
    states = dict.fromkeys(name.partition(".")[0] for name in schema.states)
    if len(states) > 1:
        raise SchemaError(
            f"a writer stores one observation, but the schema has the states {', '.join(states)}. Nest them: one "
            f"column that is a dict of these."
        )
    (state,) = states
    given = {state, schema.reward, schema.qvest, "action", "terminated", "truncated"}
    extras = frozenset(root for root in schema.roots if root not in given)
    if taken := sorted(extras & _NOT_EXTRA):
        raise SchemaError(f"column {taken[0]!r}: Writer.step has a parameter of this name. Choose another.")
    return state, extras


def _explain_extras(schema: Schema, expected: frozenset[str], extras: Mapping[str, Any]) -> NoReturn:
    for name in sorted(expected - extras.keys()):
        columns = ", ".join(f"{schema[leaf]}" for leaf in schema.leaves(name))
        guess = [each for each in meant(name, extras) if each not in expected]
        wrong = f", and {guess[0]!r} is no column" if guess else ""
        raise EntryError(name, columns, f"nothing{wrong}", f"Give it to step() as {name}=...")
    name = min(extras.keys() - expected)
    columns = f"nothing: the extra columns are {', '.join(sorted(expected)) or 'none'}"
    raise EntryError(name, columns, f"{name}=...", f"Leave it out, or declare it: Schema({{..., {name!r}: dtype}}).")


def _convert(name: str, column: Column, value: Any, shape: tuple[Any, ...], lead: tuple[int, ...]) -> Any:
    """`value` as an exact array of `shape` = lead + column.shape, which it may have up to axes of length 1; several
    values of a ragged column become `Ragged`.

    Shapes that differ in more than that, and values that do not fit, are refused by `exact`.
    """
    found = getattr(value, "shape", shape)
    if found != shape and [axis for axis in found if axis != 1] == [axis for axis in shape if axis != 1]:
        value = np.asarray(value).reshape(shape)
    return exact(name, column, value, lead)


def _each(lead: tuple[int, ...]) -> str:
    return f" for each of {prod(lead)} environments" if lead else ""


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a value; None of what is no array."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return None
    return array.shape if array.dtype != object else None


def _at_least_one(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ParameterError(name, value, "a whole number of at least 1")
    return int(value)
