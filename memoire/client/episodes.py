"""Actor side of episode and rollout tables: open episodes at the actor, pushed to the server when they are closed.

    writer ──add──▶ OpenEpisodes ──close──▶ Shipment ──▶ the byte window; or counted as skipped

`OpenEpisodes` is a `Memory` without closed episodes: nothing can be drawn from it, and a closed episode's room is free
at once.

Rollouts are fragments of episodes, all of one length. An entry is granted at its own step: a step waits if the table
has no room for more entries of the present model. A fragment is pushed at the step that fills it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memoire import _core
from memoire._core import setting
from memoire.arguments import mapping, whole
from memoire.errors import EmptyEpisodeError, EntryError, EpisodeClosedError, ParameterError
from memoire.limits import CONTAINER, Reservation
from memoire.replay.columns import Ragged
from memoire.replay.conversion import check_close, exact_array, finite, init_weights
from memoire.replay.memory import MAX_ROWS, Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.replay.writer import Writer
from memoire.replay.writers import WriterRegistry
from memoire.replay.writing import AfterStep, Changes, put_changes
from memoire.wire import containers as pack
from memoire.wire import messages
from memoire.wire.layout import episode_bytes, most_fitting
from memoire.wire.parts import Payload

from .pushes import HELD_BACK, WINDOW_FULL, ActorSide, WriterObserver


class Shipment(NamedTuple):
    """Closed episode, ready to be pushed: its container, and the other fields of its message."""

    payload: Payload
    facts: dict[str, Any]
    """Fields of `messages.EpisodePush` apart from its number and account."""
    entries: int
    returned: NDArray[np.float64]
    """Sum of the episode's rewards, not discounted: [*R]; 0 if the schema has no reward."""

    def message(self, since: int, number: int, pushed_bytes: int) -> messages.EpisodePush:
        """Return the message for a client's account that was opened `since`; see docs/development/wire.md."""
        return messages.EpisodePush(since=since, number=number, pushed_bytes=pushed_bytes, **self.facts)


class OpenEpisodes(Memory):
    """Open episodes, one for each lane; `close` hands an episode over and leaves its lane empty, open for the next.

    Args:
        pack: Makes a container: called as pack(fill, init_w, age, model_version, lengths, final), see
            `pack.pack_episode`.
        ship: Called with each closed episode and the changes that remove it from `leaving`, in the thread that closed
            it; the memory's lock is not held meanwhile.
        The other arguments are those of `Memory`.
    """

    def __init__(
        self,
        schema: Schema,
        capacity: int,
        parameters: Parameters,
        *,
        pack: Callable[..., Payload],
        ship: Callable[[Shipment, Changes], None],
    ) -> None:
        super().__init__(schema, capacity, parameters)
        self._pack, self._ship, self._numbers = pack, ship, itertools.count()
        self.leaving: dict[int, tuple[int, Shipment]] = {}

    def close(
        self,
        lane: int = 0,
        *,
        multiplier: float = 1.0,
        update_value: bool = True,
        update_weight: bool = True,
        final_state: Any = None,
        terminated: bool | None = None,
        bootstrap_value: ArrayLike | None = None,
    ) -> None:
        """Push a lane's open episode to the server, which stores it as `Memory.close` would: same arguments and errors.

        States of `final_state` are [*F], each in its column's shape; `bootstrap_value` is a number or [*R], the
        shape of a reward. If the byte window has no room, the whole episode is skipped and counted.
        """
        facts, final = self._facts_of(multiplier, update_value, update_weight, final_state, terminated, bootstrap_value)
        with self.held():
            length = self.open_length(lane)
            if length < 0:
                raise EpisodeClosedError("close the episode", lane)
            if length == 0:
                raise EmptyEpisodeError(lane)
            _core.at_once(self._handing_over(lane, facts, final))
        self.flush(lane, 1)

    def closing_changes(
        self,
        lane: int,
        *,
        final_state: Any = None,
        terminated: bool | None = None,
        bootstrap_value: ArrayLike | None = None,
        is_cut: bool = False,
    ) -> Changes:
        """Return the changes that make a lane's entries leave with the next `flush`, as `close` would push them.

        States of `final_state` are [*F]; `bootstrap_value` is a number or [*R].

        Args:
            is_cut: True if the entries are a part of an episode that goes on.
        """
        facts, final = self._facts_of(1.0, True, True, final_state, terminated, bootstrap_value)
        return self._handing_over(lane, facts | {"cut": True} if is_cut else facts, final)

    def _handing_over(self, lane: int, facts: dict[str, Any], final: dict[str, NDArray[Any]] | None) -> Changes:
        with self.held():
            payload, length, returned = self._packed(lane, final), self.open_length(lane), self.open_return(lane)
        shipment = Shipment(payload, facts, length, returned)
        return [*put_changes((lane, shipment), next(self._numbers), self.leaving), *self.opening_changes(lane)]

    def flush(self, first_lane: int, lanes: int) -> None:
        """Push the closed episodes of `lanes` lanes from `first_lane` on, or count them as skipped."""
        for number, (lane, shipment) in list(self.leaving.items()):
            if first_lane <= lane < first_lane + lanes:
                try:
                    self._ship(shipment, [(self.leaving.pop, (number, None))])
                except Exception:
                    self.leaving.pop(number, None)
                    raise

    def _packed(self, lane: int, final: Mapping[str, NDArray[Any]] | None) -> Payload:
        rows, weights, ages, versions = self._open_entries(lane)
        lengths = {name: self.lengths(name, rows) for name in self.schema.ragged}

        def fill(name: str, target: Payload) -> None:
            self.copy_frames(name, rows, target)

        return self._pack(fill, weights, ages, versions, lengths, final)

    def make_shipment(
        self, columns: Mapping[str, Any], init_w: ArrayLike, model_version: ArrayLike, ending: Mapping[str, Any]
    ) -> Shipment:
        """Return the shipment of a caller's arrays, checked as if the entries had been added one by one.

        Args:
            columns: For each column but the return [T, *F]; nested ones nested, or by their columns' names.
            init_w, model_version: A number, or [T].
            ending: Arguments of `close`.

        Raises: as `Memory.extend` and `Memory.close`.
        """
        schema = self.schema
        facts, final = self._facts_of(**ending)
        values = by_column(schema, columns)
        first = values[schema.entry_names[0]]
        count = len(first) if isinstance(first, list | tuple | Ragged) or np.ndim(first) else 0
        if count == 0:
            raise ParameterError.with_text(
                "An episode needs at least one entry: each column is an array [T, ...] with T of 1 or more."
            )
        arrays = {name: exact_array(name, schema[name], value, (count,)) for name, value in values.items()}
        for name in schema.finite:
            finite(name, schema[name], arrays[name])
        versions = _versions(self, model_version, count)

        def fill(name: str, target: Payload) -> None:
            array = arrays[name].values if name in schema.ragged else arrays[name]
            target[:] = array.reshape(-1).view(np.uint8)

        lengths = {name: arrays[name].lengths for name in schema.ragged}
        payload = self._pack(fill, init_weights(init_w, count), np.zeros(count, np.float32), versions, lengths, final)
        returned = np.zeros(()) if schema.reward is None else arrays[schema.reward].sum(axis=0, dtype=np.float64)
        return Shipment(payload, facts, count, np.asarray(returned))

    def _facts_of(
        self,
        multiplier: float = 1.0,
        update_value: bool = True,
        update_weight: bool = True,
        final_state: Any = None,
        terminated: bool | None = None,
        bootstrap_value: ArrayLike | None = None,
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]] | None]:
        """Return the fields of an episode's message, and the final state or None, from the arguments of `close`."""
        factor, bootstrap, states = check_close(self.schema, multiplier, final_state, terminated, bootstrap_value)
        facts = {
            "has_final": states is not None,
            "multiplier": factor,
            "update_value": bool(update_value),
            "update_weight": bool(update_weight),
            "terminated": None if terminated is None else bool(terminated),
            "bootstrap": None if bootstrap_value is None else bootstrap.tolist(),
        }
        return facts, None if states is None else dict(zip(self.schema.states, states, strict=True))


def _versions(memory: Memory, model_version: Any, count: int) -> NDArray[np.int64]:
    """Return the checked `model_version` of `count` entries, int64 [count]. Raises ParameterError."""
    if isinstance(model_version, Sequence | np.ndarray) and np.shape(model_version) == (count,):
        return np.array([memory.checked_version(version) for version in model_version], np.int64)
    return np.full(count, memory.checked_version(model_version), np.int64)


def by_column(schema: Schema, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value for each column but the return, from nested values or values by the columns' names.

    Raises:
        EntryError: a column is missing, or a name is not one of the schema's.
    """
    columns: dict[str, Any] = {}
    for name, value in values.items():
        if name in schema.entry_names:
            columns[name] = value
        elif name in schema.roots and name != schema.qvest:
            columns.update(zip(schema.leaves(name), schema.flatten(name, value), strict=True))
        else:
            raise EntryError.with_text(
                f"There is no column {name!r}; the columns are {', '.join(schema.entry_names)}. Nothing was added."
            )
    if missing := [name for name in schema.entry_names if name not in columns]:
        raise EntryError.with_text(
            f"Column {missing[0]!r} is missing: pass an array [T] of {schema[missing[0]]}. Nothing was added."
        )
    return {name: columns[name] for name in schema.entry_names}


class EpisodesObserver(WriterObserver):
    """Writer observer that only counts entries: an episode is granted and pushed when it is closed."""

    def take_entries(self, writer: _core.StepCounter, waits: bool) -> None:
        """Count the writer's new entries; the push or skip of their episode decides if they are inserts."""
        self._waiting.check_process()
        self._pusher.record(writer._untold, setting(writer, _untold=0))


class EpisodesSide(ActorSide):
    """Actor side of a table of episodes: open episodes, each pushed when it is closed."""

    STORED = "whole episodes: record with a writer, or call push_episode"
    observer: ClassVar[type[WriterObserver]] = EpisodesObserver
    is_granted_at_once: ClassVar[bool] = False
    """True if a writer's entries are granted when they are recorded, not when their episode is pushed."""
    fitting = MAX_ROWS
    """Most entries of an episode that fit a message."""

    def make_memory(self, entries: int, *, ragged_bytes: int, live: bool, seed: int | None) -> Memory:
        """Return an empty `OpenEpisodes`; `live` and `seed` have no effect, since nothing is drawn from it."""
        # A writer cuts an endless episode at half of this room: the fragment must fit a message and the server.
        schema, most_bytes = self.session.schema, self.session.most_bytes
        ragged = Reservation(CONTAINER).default("capacity", most_bytes // 2) if schema.ragged else 0
        self.fitting = max(1, most_fitting(partial(episode_bytes, schema), most_bytes - ragged))
        room, parameters = self._room(entries), self.session.parameters
        episodes = OpenEpisodes(schema, room, parameters, pack=self._pack, ship=self._ship)
        episodes.limit_ragged(ragged)
        return episodes

    def _room(self, entries: int) -> int:
        """Return the entries that open episodes may have together; a writer cuts an episode off at half of them."""
        return min(entries, 2 * min(self.session.welcome.limits.get("episode_entries", entries), self.fitting))

    def writer_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Check that `longest` entries fit a message; returns the options as they are."""
        self.memory()  # sets `fitting`
        longest = options.get("longest")
        if longest is not None and whole("longest", longest, 1) > self.fitting:
            expected = f"at most {self.fitting}: a longer episode exceeds limits.message_bytes"
            raise ParameterError("longest", longest, f"{expected} ({self.session.most_bytes})")
        return dict(options)

    def _pack(self, *episode: Any) -> Payload:
        """Return the container of an episode; ages count until now. See `OpenEpisodes`."""
        pusher, (*columns, final) = self.pusher, episode
        began = pusher.waiting.now()
        payload = pack.pack_episode(
            self.session.schema,
            *columns,
            final=final,
            now=pusher.clock(),
            compression=pusher.codec(),
        )
        pusher.record_time(began)
        return payload

    def _ship(self, shipment: Shipment, with_it: Changes) -> None:
        """Push an episode that a writer closed, or count it as skipped, together with the changes `with_it`."""
        pusher = self.pusher
        pusher.waiting.check_process()
        remaining = pusher.waiting.closed_by - pusher.waiting.now()
        patience = max(0.0, min(pusher.room_timeout, remaining))
        self._push(shipment, patience, lambda is_pushed: with_it, is_granted=self.is_granted_at_once)

    def message_of(self, shipment: Shipment) -> Callable[[int, int, int], messages.PushedBody]:
        """Return the function that makes an episode's message from `since`, its number and the bytes pushed with it."""
        return shipment.message

    def push_episode(
        self,
        columns: Mapping[str, Any],
        entries: Mapping[str, Any],
        ending: Mapping[str, Any],
        *,
        steps: int | None,
        is_cut: bool,
        patience: float,
    ) -> bool:
        """Push an episode of a caller's arrays, and count it with its steps if it was pushed.

        Args:
            entries: init_w and model_version.
            ending: Arguments of `Memory.close`.
            patience: Seconds to wait for a grant and for room in the byte window.
        """
        memory = self.memory()
        assert isinstance(memory, OpenEpisodes)
        shipment = memory.make_shipment(mapping("columns", columns), **entries, ending=ending)
        counted = shipment.entries if steps is None else whole("steps", steps, 0, shipment.entries)
        if is_cut:
            shipment.facts["cut"] = True
        returned = None if is_cut else shipment.returned

        def counting(is_pushed: bool) -> Changes:
            return self.pusher.episode_changes(counted, returned) if is_pushed else []

        return self._push(shipment, patience, counting)

    def _push(
        self,
        shipment: Shipment,
        patience: float,
        with_it: Callable[[bool], Changes],
        *,
        is_granted: bool = False,
    ) -> bool:
        """Push an episode; False if after `patience` seconds it is not granted, or the byte window has no room.

        Args:
            with_it: Called under the lock with True for a push, False for a skip; returns changes to make with either.
            is_granted: True if the entries were granted when they were recorded.
        """
        pusher, entries, inserts = self.pusher, shipment.entries, self.session.inserts
        pusher.waiting.check_can_push()
        size, most_bytes = shipment.payload.nbytes, self.session.most_bytes
        if size > most_bytes:
            raise ParameterError.with_text(
                f"The episode takes {size} bytes; the limit is {most_bytes} bytes (limits.message_bytes). Close or cut "
                f"episodes earlier. The episode was not pushed."
            )
        deadline = pusher.waiting.now() + patience
        is_granted = is_granted or pusher.wait_for_grant(deadline)
        if not (is_granted and pusher.has_room(size, deadline)):
            reason = WINDOW_FULL if is_granted else HELD_BACK
            return pusher.skip(reason, lambda: inserts.insert_changes(entries, 0) + with_it(False))
        changes = lambda: inserts.insert_changes(entries, entries) + with_it(True)  # noqa: E731
        pusher.enqueue(shipment.payload, entries, self.message_of(shipment), changes)
        return True


class RolloutWriter(Writer):
    """Writer of rollouts: a `Writer` that pushes a fragment as soon as it has `longest` entries.

    A full fragment is pushed before the next step, which may wait for a grant. Arguments are those of `Writer`.
    """

    __slots__ = ()
    _cuts_at_once: ClassVar[bool] = True

    def _between(self, is_after: bool, waits: bool) -> None:
        """Push full fragments, or all of them before a wait, so that a learner has them; then wait if necessary."""
        if is_after or self._owned:  # otherwise the environment may have overwritten the final state
            self._cut_here(1 if self._answer else self._longest)
        if self._answer and waits and self._observer is not None:
            self._observer.pause(self)

    def _discard(self) -> None:
        """Drop the entries of open episodes, which go on, and request a wait before the next step."""
        changes = put_changes(self._clock, slice(None), self._opened) + setting(self, _room=0, _answer="wait")
        for i in np.flatnonzero(self._opened < self._clock).tolist():
            changes += self._memory.opening_changes(int(self.lanes[i]))
        self._commit(changes)


class RolloutsObserver(WriterObserver):
    """Writer observer that waits for a grant before the next step; entries without a grant are discarded."""

    def take_entries(self, writer: _core.StepCounter, waits: bool) -> None:
        """Count the writer's new entries: inserts if the first of them was granted, else passed steps."""
        self._waiting.check_process()
        inserts, counts, session = self._session.inserts, self._session.counts, self._session
        with self._waiting.condition:
            entries, has_room = writer._untold, inserts.remaining > 0
            is_enough = inserts.remaining > entries or session.is_finished
            changes = session.recording_changes(entries) + setting(
                counts, passed=counts.passed + entries * (not has_room)
            )
            answer: AfterStep = "discard" if not has_room else "" if is_enough else "wait"
            _core.at_once(changes + setting(writer, _untold=0, _answer=answer))

    def pause(self, writer: _core.StepCounter) -> None:
        """Wait until another entry may be inserted, `block_timeout` seconds at most."""
        pusher, waiting, with_it = self._pusher, self._waiting, setting(writer, _answer="")
        waiting.wake()
        if not pusher.wait_for_grant(waiting.now() + pusher.block_timeout) and not self._session.is_finished:
            pusher.skip(HELD_BACK, lambda: with_it)
        else:
            _core.at_once(with_it)


class RolloutsSide(EpisodesSide):
    """Actor side of a table of rollouts: open episodes, pushed in fragments of one length."""

    STORED = "rollouts: record with a writer, or call push_episode"
    observer = RolloutsObserver
    waits_for_models = True
    is_granted_at_once = True

    def _room(self, entries: int) -> int:
        return entries

    def writer_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options with the fragments' length: the table's if set, no more than fit there and a message."""
        options, length = super().writer_options(options), self.session.parameters.rollout_length
        longest = options.get("longest")
        if longest is not None and length and longest != length:
            raise ParameterError("longest", longest, f"{length}, the length of the table's rollouts, or left out")
        return options | {"made_by": RolloutWriter, "longest": self._longest(longest)}

    def _longest(self, longest: int | None = None) -> int:
        most = self.session.welcome.limits.get("episode_entries", self.memory().capacity)
        return min(longest or self.session.parameters.rollout_length or most, most, self.fitting)

    def apply_parameters(self, writers: WriterRegistry, former: Parameters) -> None:
        """Set the length of the writers' fragments to the table's new one."""
        if former.rollout_length != self.session.parameters.rollout_length:
            writers.shorten(self._longest())
