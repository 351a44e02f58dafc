"""Writer of environment steps: it takes the values of `env.step` unchanged and stores them as episodes.

`steps` converts the values of a step, and detects ends and resets of vector environments; `writers` registers the
writers of a memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire._core import setting
from memoire.arguments import ClosingContext, whole
from memoire.errors import (
    Closed,
    EntryError,
    EpisodeTooLong,
    EpisodeTorn,
    NotFinite,
    ObservationReused,
    TwoThreads,
)

from .memory import Memory
from .parameters import never_copied
from .steps import End, ResetCheck, State, StepConverter, autoreset_mode, digest
from .writing import AfterStep, Changes, EntryObserver, ExactObserver, OnceObserver, WriterState, packed, put_changes


class Writer(_core.StepCounter, ClosingContext):
    """Recorder of the steps of an environment, or of all members of a vector environment, with one open episode each.

    Example:
        writer, (obs, info) = memoire.Buffer(memoire.Schema.from_env(env), 1000).writer(env), env.reset()
        for _ in range(100):
            action = env.action_space.sample()  # your policy
            next_obs, reward, terminated, truncated, info = env.step(action)
            writer.step(obs, action, reward, terminated, truncated, next_obs, info)
            obs = env.reset()[0] if terminated or truncated else next_obs

    A writer is used by one thread at a time; several writers with separate lanes can share a memory. A call that is
    interrupted (Ctrl+C) takes effect as a whole or not at all; the next call completes the work that follows from it.

    Args:
        memory: Memory that stores the episodes.
        num_envs: Members of the vector environment; None is a single environment, whose values have no batch axis.
        autoreset: "next_step", "same_step" or "disabled" (you call reset), or a gymnasium.vector.AutoresetMode.
        observer: Object that is notified of entries and episodes.
        first_lane: First of the writer's lanes in the memory: first_lane .. first_lane + num_envs - 1.
        longest: Entries after which an endless episode is cut: the part so far is stored as truncated, with its true
            next state, and the rest as another episode. None is capacity // (2 * num_envs). Observers are notified of
            whole episodes only. If values of ragged columns do not fit, open episodes are cut earlier.
        check: True to compare each obs with the next_obs of the step before (free if both are the same object). In
            mode disabled it also rejects a step from the end of an episode, as far as `ResetCheck` detects it.
        stamp: Function from the `model_version` of a step to the version of the model that acted; None is identity.
        resumed: Saved state of the writer of these lanes; the new writer continues its open episodes.

    Raises:
        ParameterError: the mode is unknown, or a count is below 1.
        SchemaError: the schema has several states, or a column whose value `step` cannot take.
    """

    num_envs: int
    """Number of members of the vector environment; 1 for a single environment."""
    autoreset: str
    """Autoreset mode, an item of `AUTORESET`."""
    _cuts_at_once: ClassVar[bool] = False
    lanes: NDArray[np.int64]
    """[num_envs] lanes of the memory that this writer fills."""

    # Slots are fixed, so that an unknown setting is rejected, and fast, since a step sets several attributes.
    __slots__ = (
        "__weakref__", "_began", "_check", "_closed", "_converter", "_converters", "_ends", "_episodes", "_extras",
        "_id", "_leave", "_longest", "_memory", "_observer", "_opened", "_refused", "_resumed", "_returns", "_saving",
        "_schema", "_single", "_stamp", "_starts", "_usual_steps", "autoreset", "lanes", "num_envs",
    )  # fmt: skip
    __reduce__ = never_copied("Writer", "Make another one, for each thread and process: buffer.writer(...).")

    def __init__(
        self,
        memory: Memory,
        num_envs: int | None = None,
        autoreset: Any = "disabled",
        observer: EntryObserver | ExactObserver | None = None,
        *,
        first_lane: int = 0,
        longest: int | None = None,
        check: bool = True,
        stamp: Callable[[Any], int] | None = None,
        resumed: WriterState | None = None,
    ) -> None:
        self._single = num_envs is None
        self.num_envs = count = 1 if num_envs is None else whole("num_envs", num_envs, 1)
        self.autoreset = autoreset_mode(autoreset)
        self.longest = max(1, memory.capacity // (2 * count)) if longest is None else longest
        self.lanes = np.arange(first_lane, first_lane + count, dtype=np.int64)
        self._memory, self._check, self._stamp = memory, check, stamp
        self._observer: ExactObserver | None = None
        if observer is not None:
            is_exact = hasattr(observer, "take_entries")
            self._observer = cast(ExactObserver, observer) if is_exact else OnceObserver(cast(EntryObserver, observer))
        self._schema = schema = memory.schema
        self._converter = StepConverter(schema, None if self._single else count)
        self._extras = self._converter.extras  # an attribute, since each step compares it
        # Lengths are differences of a clock, so that a step costs the same for any number of environments.
        self._began = np.zeros(count, np.int64)  # clock at the start of each environment's episode
        self._opened = np.zeros(count, np.int64)  # clock at the start of the memory's episode: later after a cut
        self._returns = np.zeros((count, *schema.reward_shape))
        self._id: Any = None  # `env_id` of a single environment
        self._converters: dict[int, StepConverter] = {}  # converters by number of a part of the members
        self._ends: deque[End] = deque()  # ends of the last step that are not stored yet
        self._episodes: deque[tuple[int, int, NDArray[np.float64]]] = deque()  # episodes to notify the observer of
        self._answer: AfterStep = ""
        self._starts = ResetCheck() if check and self.autoreset == "disabled" else None
        self._refused = (-1, "")  # clock and reason of the last rejected step
        self._closed = ""  # name of the object that was closed, once steps are rejected
        self._inside = threading.RLock()  # held during a call: calls of other threads raise, and never wait
        self._saving = threading.Lock()  # held by a thread that saves the memory: steps wait
        self._leave: Callable[[], object] | None = None  # called when the lanes become free
        self._usual_steps = self._converter.usual_steps(memory, self.lanes, self._returns, check)
        self._resumed = resumed is not None  # True until the first step
        if resumed is None:
            for lane in self.lanes.tolist():
                memory.open(lane)
        else:
            self._go_on_from(resumed)

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
        members: Any = None,
        **extras: Any,
    ) -> None:
        """Record one step of every environment, as `env.step(action)` returned it from `obs`; all or nothing on error.

        Shapes: N num_envs or len(members) is the first axis of every value, absent for a single environment; F is the
        column's own shape.

        Args:
            obs: [N, *F], or dicts and tuples of such arrays, nested as the schema is.
            action: [N, *F]. In mode next_step the action of a resetting environment is ignored.
            reward: [N, *R].
            terminated: [N] True if the episode ended in a terminal state, after which no reward can follow.
            truncated: [N] True if the episode ended otherwise. If both are True, it terminated.
            next_obs: Like obs.
            info: The info of `env.step`; required in mode same_step, for `final_obs`.
            bootstrap_value: [N, *R] the critic's estimates of the states after the step, used if an episode is
                truncated. Without it the return of a truncated episode ends at its last reward. The schema must have a
                value column.
            init_w: Factor of these entries' priorities: a number, or [N].
            model_version: Version of the model that acted; 0 is unknown. A client's writer replaces 0 by the version
                last returned by `newest` or `wait`, of the table's `model_topic` or else of the only topic.
            members: [N] distinct members of the vector environment that made this step, in the order of all other
                arguments: `info["env_id"]` of EnvPool. Required if some members are missing or their order changes.
                None is all members in order.
            extras: [N, *F] a value for each further column, by name.

        Raises:
            EntryError: a value is missing, or does not match its column.
            ParameterError: members are unknown or repeated, or missing although `info["env_id"]` shows that the step is
                not one of all members in order.
            NotFinite: a reward, value or observation is NaN or infinite, and its column does not allow that.
            ParameterError: init_w or model_version is invalid.
            ModelUnknown: model_version is unknown while `max_model_lag` is set, or the client follows several topics.
            EpisodeTorn: obs differs from the next_obs of the step before, in the middle of an episode.
            EpisodeOver: obs is the state in which an episode ended, several times in a row: the environment was not
                reset. If the episodes terminated, each episode must have ended after one step.
            ObservationReused: the step overwrote obs.
            FinalObservationMissing: info lacks the observation in which an episode ended.
            Closed: after `close`.
            TwoThreads: another thread is using this writer.
        """
        try:
            if self._closed:
                raise Closed(self._closed)
            if extras.keys() != self._extras:
                self._converter.check_extras(extras)
            if bootstrap_value is not None and self._schema.value is None:
                raise EntryError.with_text(
                    "step() got bootstrap_value=, but the schema has no value column. The entry was not added."
                )
            if self._stamp is not None:
                model_version = self._stamp(model_version)
            usual = self._usual_steps if members is None and bootstrap_value is None else None
            if usual is not None and not (info and "env_id" in info):
                step = (obs, action, reward, terminated, truncated, next_obs)
                if usual.add(self, *step, extras, init_w, model_version):
                    if self._observer is not None or (self._room == 0 and self._cuts_at_once):
                        with self._alone("step"):
                            self._settle(is_after=True, waits=True)
                    return
            with self._alone("step"):
                self._settle(waits=True)
                if self._closed:
                    raise Closed(self._closed)
                subset = None
                if members is not None or self._apart is not None:
                    subset = self._converter.members(members, always_all=self._apart is None)
                if members is None and info and "env_id" in info:
                    self._id = self._converter.checked_id(info["env_id"], self._id)
                args = {"action": action, "reward": reward, "terminated": terminated, "truncated": truncated, **extras}
                try:
                    self._record(args, obs, next_obs, info, bootstrap_value, init_w, model_version, subset)
                except EntryError as error:
                    if advice := self._converter_for(subset).advice(obs, reward, terminated, truncated, next_obs):
                        raise EntryError(error.column, error.expected, error.received, advice) from None
                    raise
                self._settle(is_after=True, waits=True)
        except TwoThreads:
            raise
        except Exception as error:
            if not isinstance(error, EpisodeTorn):  # a torn episode follows from an earlier error
                self._refused = (self._clock, str(error))
            self._room = 0  # the next step takes the path with all checks
            raise

    def reset(self, obs: Any = None, info: Any = None, *, mask: Any = None, bootstrap_value: Any = None) -> None:
        """Record that environments were reset in the middle of an episode: call it right after `env.reset()`.

        Open episodes are stored as truncated, with the next_obs of their last step as final state. If the environment
        has overwritten that array, the final state is lost, and the last `multi_step` entries of the episode cannot be
        drawn. Observers are not notified of these incomplete episodes. Without an open episode, nothing happens.

        Args:
            obs: The observation of `env.reset()`.
            info: Ignored, so that `writer.reset(*env.reset())` works.
            mask: [N] True for environments that were reset; None is all.
            bootstrap_value: [N, *R] the critic's estimates of the states in which the episodes stopped.
        """
        with self._alone("reset"):
            self._settle()
            if self._closed:
                raise Closed(self._closed)
            everyone = np.ones(self.num_envs, np.bool_)
            chosen = everyone if mask is None else np.asarray(mask, np.bool_) & everyone
            changes = self._abandoning(chosen, bootstrap_value)
            if self._apart is not None and not chosen.all():
                last_states = [None if reset else state for reset, state in zip(chosen, self._apart, strict=True)]
                changes += setting(self, _apart=last_states)
            else:
                is_owned = self._apart is None and self._owned and obs is self._last
                changes += setting(self, _owned=is_owned, _apart=None, _last=obs)
            self._commit(changes)

    def cut(self) -> int:
        """Store open episodes, ended by the next_obs of the last step, and continue the same episodes: tables of
        rollouts get fragments. Returns the number of entries. Call it before the environment's next step.
        """
        with self._alone("cut"):
            self._settle()
            if self._closed:
                raise Closed(self._closed)
            return self._cut_here(1)

    def last_states(self) -> dict[int, State]:
        """Return the state after the last step of each episode with entries, by lane, for `Memory.cut_for_now`. Unknown
        states are left out.
        """
        with self._alone("last_states"):
            going = np.flatnonzero(self._opened < self._clock).tolist()
            return {int(self.lanes[i]): state for i in going if (state := self._last_state(i)) is not None}

    def close(self) -> None:
        """Store open episodes as `reset` does, and reject later steps. A second call does nothing."""
        with self._alone("close"):
            self._settle()
            if not self._closed:
                changes = self._abandoning(np.ones(self.num_envs, np.bool_), None)
                changes += setting(self, _closed="the writer", _room=0, _last=None)
                self._commit(changes)
            if self._leave is not None:
                self._leave()  # a finalizer, which runs once

    def end(self, closed: str, patience: float) -> int:
        """Close from another thread because `closed` was closed; wait at most `patience` seconds for a running step.

        Returns:
            Entries of open episodes that were not stored, because the step took longer.
        """
        if self._closed and not self._memory.leaving:
            return 0
        is_alone = self._inside.acquire(timeout=patience)
        try:
            if is_alone:
                self.close()
                return 0
            return int((self._clock - self._opened).sum())
        finally:
            self._closed, self._room = closed, 0
            if is_alone:
                self._inside.release()

    def _alone(self, call: str) -> _core.Held:
        """Return a context that holds this writer's lock; it raises TwoThreads if another thread holds it."""
        return _core.Held(self._inside, self._await_save, call)

    def _await_save(self, call: str) -> None:
        """Wait for a thread that saves the memory; raise TwoThreads if another thread is in a call."""
        if self._saving.locked():
            with _core.Held(self._saving):
                return
        if not self._inside.acquire(False):
            raise TwoThreads("this writer", call)
        self._inside.release()

    @contextmanager
    def steps_blocked(self) -> Iterator[None]:
        """Block steps within the context, after the running one has ended."""
        with _core.Held(self._saving), _core.Held(self._inside):
            if self._ends or self._episodes:
                self._settle()  # complete a step that was interrupted
            yield

    def state(self, *, is_shared: bool) -> WriterState | None:
        """Return the state for a writer that is `resumed`; None after `close`. Call it within `still`."""
        if self._closed:
            return None
        states: list[Any] = [None] * self.num_envs
        with suppress(EntryError):  # the last step returned an invalid observation
            states = list(self._apart) if self._apart is not None else self._last_states()
        return WriterState(
            first_lane=int(self.lanes[0]),
            num_envs=None if self._single else self.num_envs,
            autoreset=self.autoreset,
            longest=self._longest,
            is_shared=is_shared,
            clock=self._clock,
            began=self._began.tolist(),
            opened=self._opened.tolist(),
            returns=self._returns.tolist(),
            pending=None if self._pending is None else self._pending.tolist(),
            left=[None if each is None else packed(self._schema, self._converter.root, each) for each in states],
            is_apart=self._apart is not None,
            is_owned=bool(self._owned),
            env_id=None if self._id is None else int(self._id),
            starts=None if self._starts is None else self._starts.state(),
        )

    def _go_on_from(self, state: WriterState) -> None:
        self._clock, self._id, self._room = state.clock, state.env_id, 0
        self._began[:], self._opened[:], self._returns[:] = state.began, state.opened, state.returns
        self._pending = None if state.pending is None else np.array(state.pending)
        states = state.observations(self._schema, self._converter.root)
        if state.is_apart:
            self._apart = states
        elif all(each is not None for each in states):
            self._last = self._converter.join_observations(states)
        self._owned = state.is_owned
        if self._starts is not None:
            self._starts.restore_state(state.starts, self.num_envs)

    @property
    def longest(self) -> int:
        """Entries after which an endless episode is cut; can be set between steps."""
        return self._longest

    @longest.setter
    def longest(self, entries: int) -> None:
        longest = whole("longest", entries, 1)
        self._room = 0  # steps until an episode can be too long; the next step counts again
        self._longest = longest

    def _record(
        self,
        args: dict[str, Any],
        obs: Any,
        next_obs: Any,
        info: Mapping[str, Any] | None,
        bootstrap_value: Any,
        init_w: Any,
        model_version: int,
        subset: NDArray[np.int64] | None,
    ) -> None:
        """Record a step of any kind: convert its values, store them, and close the episodes that ended.

        Args:
            subset: [n] members that made the step; None is all, in order.
        """
        model_version = self._memory.checked_version(model_version)
        converter = self._converter_for(subset)
        reward, terminated, truncated = args["reward"], args["terminated"], args["truncated"]
        args[converter.root] = obs
        values = converter.values(args, reward)
        count = self.num_envs if subset is None else len(subset)
        rewards = converter.rewards(reward, (count, *self._returns.shape[1:]))
        self._check_order(obs, next_obs, subset)
        last_states = None if subset is None else self._last_states_apart(converter, next_obs, subset)
        ends: list[End] = []
        if not (self._single and terminated is False and truncated is False):
            states = partial(converter.final_state, next_obs, info, self.autoreset)
            resetting = self._pending if subset is None or self._pending is None else self._pending[subset]
            ends = converter.ends(terminated, truncated, bootstrap_value, resetting, states)
            if subset is not None:
                ends = [end._replace(environment=int(subset[end.environment])) for end in ends]
        begins = self._begins(obs, ends, subset)
        stepping = np.arange(self.num_envs) if subset is None else subset
        rows = np.arange(count) if self._pending is None else np.flatnonzero(~self._pending[stepping])
        changes: Changes = []
        if rows.size == self.num_envs and subset is None:
            changes += self._adding(self.lanes, values, init_w, model_version)
            changes.append((self._returns.__iadd__, (rewards,)))
        elif rows.size:
            stepped = stepping[rows]
            weights = np.asarray(init_w)[rows] if np.ndim(init_w) else init_w
            changes += self._adding(self.lanes[stepped], [value[rows] for value in values], weights, model_version)
            still = np.ones(self.num_envs, np.bool_)
            still[stepped] = False
            changes += put_changes(self._began[still] + 1, still, self._began)
            changes.append((self._opened.__iadd__, (still,)))
            changes += put_changes(self._returns[stepped] + rewards[rows], stepped, self._returns)
        changes += setting(self, _pending=self._resetting(stepping, ends), _ends=deque(ends))
        if last_states is None:
            first, last = converter.first, next_obs
            is_owned = self._last is not None and not _core.same_place(first(self._last), first(next_obs))
            if self._resumed and is_owned:  # the environment may overwrite the array that it returned
                last = self._converter.join_observations(self._converter.parts(next_obs))
            changes += setting(self, _owned=is_owned)
        else:
            last = None
            changes += setting(self, _apart=last_states, _owned=True)
        if begins and self._starts is not None:
            starts, rest = self._starts.with_recorded_begins(begins, {end.environment for end in ends})
            changes += [*setting(self, _starts=starts), *rest]
        counts = {"_clock": self._clock + bool(rows.size), "_untold": self._untold + rows.size}
        changes += setting(self, **counts, _last=last, _resumed=False)
        cuts, room = self._cutting(args, self._longest, subset) if self._room <= 0 else ([], self._room)
        try:
            self._commit([*cuts, *changes, *setting(self, _room=room - 1)])
        except EpisodeTooLong as error:
            if not error.ragged_limit:
                raise
            cuts, room = self._cutting(args, 1, subset)  # closed episodes and their ragged values can be evicted
            self._commit([*cuts, *changes, *setting(self, _room=room - 1)])

    def _adding(self, lanes: NDArray[np.int64], values: list[Any], init_w: Any, model_version: int) -> Changes:
        """Return the changes that add an entry for each environment that made a step rather than a reset."""
        if self._single:
            return self._memory.add_entry_changes(
                int(lanes[0]), self._converter.exact_entry(values), init_w, model_version
            )
        return self._memory.add_many_changes(lanes, tuple(values), init_w, model_version)

    def _resetting(self, stepping: NDArray[np.int64], ends: list[End]) -> NDArray[np.bool_] | None:
        """Return a mask of the members whose next step is a reset; None if no member's is."""
        if self._pending is None and not (ends and self.autoreset == "next_step"):
            return None
        pending = np.zeros(self.num_envs, np.bool_) if self._pending is None else self._pending.copy()
        pending[stepping] = False
        if self.autoreset == "next_step":
            pending[[end.environment for end in ends]] = True
        return pending if pending.any() else None

    def _commit(self, changes: Changes) -> None:
        """Make all changes or, after an interrupt, none; then send the episodes that were closed."""
        try:
            with self._memory.held():  # the memory first: an interrupt may come during the wait
                _core.at_once(changes)
        except _core.NotAdded as refused:
            self._memory.explain(refused)
        self._send()

    def _send(self) -> None:
        """Send closed episodes of these lanes if the memory sends them on."""
        if self._memory.leaving:
            self._memory.flush(int(self.lanes[0]), self.num_envs)

    def _settle(self, *, is_after: bool = False, waits: bool = False) -> None:
        """Complete the work that follows from a step, also from an interrupted one: each part is done once.

        Args:
            is_after: True while the step is still being made.
            waits: True if the observer may wait.
        """
        observer = self._observer
        if observer is not None and (self._untold or observer.is_behind):
            observer.take_entries(self, waits)
        if self._answer == "discard":
            self._discard()  # discarded before the end of this episode is stored
        self._send()
        while self._ends or self._episodes:
            if self._episodes and observer is not None:
                observer.take_episode(self._episodes)
            else:
                self._finish(self._ends[0])
        if self._cuts_at_once and (self._answer or self._room == 0):
            self._between(is_after, waits)

    def _between(self, is_after: bool, waits: bool) -> None:
        """Do the work that is due between two steps; subclasses override it."""

    def _discard(self) -> None:
        """Drop entries that did not fit; subclasses override it."""

    def _begins(self, obs: Any, ends: list[End], subset: NDArray[np.int64] | None) -> dict[int, int]:
        """Return a digest of the first state of each episode that this step begins, by member. Raises EpisodeOver."""
        if self._starts is None or not (subset is not None or self._starts.awaited or self._clock == 0):
            return {}
        ending = {end.environment for end in ends}
        if subset is None:
            beginning = self._starts.awaited if self._clock else range(self.num_envs)
            return self._starts.check(beginning, partial(self._converter.member_state, obs), ending)
        rows = {member: row for row, member in enumerate(subset.tolist()) if self._began[member] == self._clock}
        return self._starts.check(rows, lambda member: self._converter.member_state(obs, rows[member]), ending)

    def _finish(self, end: End) -> None:
        """Close an episode that a step has ended, and open the next one."""
        i, is_terminal, final, bootstrap = end
        lane, length = int(self.lanes[i]), self._clock - int(self._began[i])
        changes: Changes = []
        if self._opened[i] < self._clock:  # False if the episode's entries were dropped
            facts = {"final_state": final, "terminated": is_terminal, "bootstrap_value": bootstrap}
            changes += self._memory.closing_changes(lane, **facts)
        changes += put_changes(self._clock, i, self._began, self._opened)
        if self._starts is not None:  # the first step of the next episode takes the path with all checks
            changes += self._starts.record_end(i, digest(final), length, terminated=is_terminal) + setting(
                self, _room=0
            )
        if self._observer is not None:
            changes.append((self._episodes.append, ((lane, length, np.array(self._returns[i])),)))
        self._commit([*changes, *put_changes(0.0, i, self._returns), (self._ends.popleft, ())])

    def _cutting(self, args: Mapping[str, Any], least: int, subset: NDArray[np.int64] | None) -> tuple[Changes, int]:
        """Return (changes, room): changes that store open episodes of at least `least` entries as cut, ended by the new
        observation, or by the last one of members without a step; and the number of steps until the next cut.
        """
        rows = range(self.num_envs) if subset is None else {member: row for row, member in enumerate(subset.tolist())}
        value = args[self._schema.value] if self._schema.value is not None else None
        bootstrap, obs = self._converter_for(subset).bootstrap(value), args[self._converter.root]
        lengths = self._clock - self._opened
        cut = lengths >= least

        def final_state_and_value(i: int) -> tuple[State | None, Any]:
            return (
                (self._converter.member_state(obs, rows[i]), bootstrap[rows[i]])
                if i in rows
                else (self._last_state(i), None)
            )

        return self._storing(cut, final_state_and_value, is_cut=True), self._longest - int(lengths[~cut].max(initial=0))

    def _cut_here(self, least: int) -> int:
        """Store open episodes of at least `least` entries, ended by the last step's next_obs; return their entries."""
        lengths = self._clock - self._opened
        lengths[lengths < least] = 0
        stored = self._storing(lengths > 0, lambda i: (self._last_state(i), None), is_cut=True)
        self._commit(setting(self, _room=0) + stored)
        return int(lengths.sum())

    def _storing(
        self, which: NDArray[np.bool_], end_of: Callable[[int], tuple[State | None, Any]], *, is_cut: bool
    ) -> Changes:
        """Return the changes that close the open episodes under `which` and open new ones. `end_of` returns the final
        state of an environment's episode, and the value of that state.
        """
        changes: Changes = []
        for i in np.flatnonzero(which).tolist():
            final, bootstrap = end_of(i)
            facts: dict[str, Any] = {}
            if final is not None:
                facts = {"final_state": final, "terminated": False, "bootstrap_value": bootstrap, "is_cut": is_cut}
            changes += self._memory.closing_changes(int(self.lanes[i]), **facts) + put_changes(
                self._clock, i, self._opened
            )
        return changes

    def _abandoning(self, mask: NDArray[np.bool_], bootstrap_value: Any) -> Changes:
        """Return the changes that close the open episodes under `mask` at the states after the last step."""
        bootstrap = self._converter.bootstrap(bootstrap_value)

        def final_state_and_value(i: int) -> tuple[State | None, Any]:
            return self._last_state(i) if self._owned else None, bootstrap[i]

        changes = self._storing(mask & (self._opened < self._clock), final_state_and_value, is_cut=False)
        changes += put_changes(self._clock, mask, self._began, self._opened) + put_changes(0.0, mask, self._returns)
        if self._pending is not None:
            changes += setting(self, _pending=self._pending & ~mask)
        if self._starts is not None:
            for i in self._starts.awaited:
                if mask[i]:
                    changes += self._starts.reset(i)
        return changes

    def _check_order(self, obs: Any, next_obs: Any, subset: NDArray[np.int64] | None) -> None:
        """Raise ObservationReused if obs was overwritten, EpisodeTorn if it differs from the next_obs before."""
        after = self._converter.first(next_obs)
        if _core.same_place(self._converter.first(obs), after):
            raise ObservationReused(self._schema.states[0])
        last, apart = self._last, self._apart
        if not self._check or (apart is None and (last is None or obs is last)):
            return
        if last is not None and _core.same_place(self._converter.first(last), after):
            return  # this step overwrote the observation to compare with
        going = self._began < self._clock
        if self._pending is not None:
            going |= self._pending
        members = np.arange(self.num_envs) if subset is None else subset
        converter = self._converter_for(subset)
        torn = going[members]
        if torn.any():
            if subset is not None:
                last_states = self._last_states() if apart is None else apart
                torn &= [last_states[i] is not None for i in subset]
                new = converter.parts(obs)
                last = converter.join_observations(
                    [last_states[i] if torn[row] else new[row] for row, i in enumerate(subset)]
                )
            torn &= converter.differing_rows(obs, last)
        if torn.any():
            environment = int(members[torn.argmax()])
            refused = self._refused[1] if self._refused[0] == self._clock else ""
            raise EpisodeTorn(environment, self._clock - int(self._began[environment]), refused)

    # Steps of a part of the members

    def _converter_for(self, subset: NDArray[np.int64] | None) -> StepConverter:
        if subset is None or len(subset) == self.num_envs:
            return self._converter
        count = len(subset)
        if count not in self._converters:
            self._converters[count] = StepConverter(self._schema, count)
        return self._converters[count]

    def _last_states(self) -> list[Any]:
        """Return the state of each member after the last step of all; None if unknown."""
        return [None] * self.num_envs if self._last is None else self._converter.parts(self._last)

    def _last_states_apart(self, converter: StepConverter, next_obs: Any, subset: NDArray[np.int64]) -> list[Any]:
        first = converter.first
        if self._apart is not None:
            last_states = list(self._apart)
        elif self._last is not None and not _core.same_place(first(self._last), first(next_obs)):
            last_states = self._last_states()
        else:
            last_states = [None] * self.num_envs
        for member, state in zip(subset.tolist(), converter.parts(next_obs), strict=True):
            last_states[member] = state
        return last_states

    def _last_state(self, environment: int) -> State | None:
        """Return the state of an environment after the last step; None if it is unknown or not finite."""
        try:
            if self._apart is None:
                return self._converter.member_state(self._last, environment)
            obs = self._apart[environment]
            return None if obs is None else self._converter.state(obs, None)
        except NotFinite:
            return None
