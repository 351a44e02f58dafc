"""Episodes at an actor: those that are open, until they are closed and leave for the server, which stores them.

    writer ──add──▶ OpenEpisodes ──close──▶ Shipment ──▶ the byte window; or counted as skipped

`OpenEpisodes` is a `Memory` whose closed episodes are elsewhere: nothing can be drawn from it, and an episode's room is
given back as soon as it is closed.

Rollouts are parts of episodes of one length, each made only while there is room for it. An entry is granted at its
own step, so that a step waits before it is made by a model whose share is there. Fragments leave at the step that
fills them.
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
from memoire.replay.conversion import ending, exact, finite, init_weights
from memoire.replay.memory import MAX_ROWS, Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.replay.writer import Writer
from memoire.replay.writers import WriterRegistry
from memoire.replay.writing import AfterStep, Changes, putting
from memoire.wire import containers as pack
from memoire.wire import messages
from memoire.wire.layout import episode_bytes, most_fitting
from memoire.wire.parts import Payload

from .pushes import HELD_BACK, WINDOW_FULL, ActorSide, WriterObserver


class Shipment(NamedTuple):
    """An episode on its way: its container, and what its message says of it."""

    payload: Payload
    facts: dict[str, Any]
    """Fields of `messages.Episode`."""
    entries: int
    returned: NDArray[np.float64]
    """Sum of its rewards, not discounted: [*R]; 0 where there is no reward."""

    def message(self, since: int, number: int, pushed_bytes: int) -> messages.Episode:
        """The message of a client's account that was opened `since`; see docs/wire.md."""
        return messages.Episode(since=since, number=number, pushed_bytes=pushed_bytes, **self.facts)


class OpenEpisodes(Memory):
    """Open episodes, one for each lane; `close` hands an episode over and leaves its lane empty, open for the next.

    Args:
        pack: Makes a container: called as pack(fill, init_w, age, model_version, lengths, final), see
            `pack.pack_episode`.
        ship: Called with each closed episode, in the thread that closed it, and with the changes by which it has left;
            nothing is held meanwhile.
        The others: as of `Memory`.
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
        """Send a lane's open episode to the server, which stores it as `Memory.close` would: same arguments and errors.

        States of `final_state` are [*F], each in its column's shape; `bootstrap_value` is a number or [*R], the
        shape of a reward. An episode that finds no room in the byte window is skipped, whole, and counted.
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

    def closing(
        self,
        lane: int,
        *,
        final_state: Any = None,
        terminated: bool | None = None,
        bootstrap_value: ArrayLike | None = None,
        is_cut: bool = False,
    ) -> Changes:
        """The changes that have a lane's entries leave with the next `flush`, as `close` would send them.

        States of `final_state` are [*F]; `bootstrap_value` is a number or [*R].

        Args:
            is_cut: They are a part of an episode that goes on.
        """
        facts, final = self._facts_of(1.0, True, True, final_state, terminated, bootstrap_value)
        return self._handing_over(lane, facts | {"cut": True} if is_cut else facts, final)

    def _handing_over(self, lane: int, facts: dict[str, Any], final: dict[str, NDArray[Any]] | None) -> Changes:
        with self.held():
            payload, length, returned = self._packed(lane, final), self.open_length(lane), self.open_return(lane)
        shipment = Shipment(payload, facts, length, returned)
        return [*putting((lane, shipment), next(self._numbers), self.leaving), *self.opening(lane)]

    def flush(self, first_lane: int, lanes: int) -> None:
        """Push what these lanes have closed, or count it as skipped."""
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

    def whole(
        self, columns: Mapping[str, Any], init_w: ArrayLike, model_version: ArrayLike, ending: Mapping[str, Any]
    ) -> Shipment:
        """An episode of a caller's arrays, checked as if its entries had been added one by one.

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
            raise ParameterError("columns", "no entries", "at least one entry in each column, [T, ...]")
        arrays = {name: exact(name, schema[name], value, (count,)) for name, value in values.items()}
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
        """What a message says of an episode, and the final state, from the arguments of `close`."""
        factor, bootstrap, states = ending(self.schema, multiplier, final_state, terminated, bootstrap_value)
        facts = {
            "has_final": states is not None,
            "multiplier": factor,
            "update_value": bool(update_value),
            "update_weight": bool(update_weight),
            "terminated": None if terminated is None else bool(terminated),
            "bootstrap": None if bootstrap_value is None else bootstrap.tolist(),
        }
        return facts, None if states is None else dict(zip(self.schema.states, states, strict=True))


def _versions(memory: Memory, given: Any, count: int) -> NDArray[np.int64]:
    """`model_version` of `count` entries, int64 [count]. Raises ParameterError."""
    if isinstance(given, Sequence | np.ndarray) and np.shape(given) == (count,):
        return np.array([memory.checked_version(version) for version in given], np.int64)
    return np.full(count, memory.checked_version(given), np.int64)


def by_column(schema: Schema, given: Mapping[str, Any]) -> dict[str, Any]:
    """A value for each column but the return, out of nested values or such by the columns' names.

    Raises:
        EntryError: one is missing, or of no column.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in schema.entry_names:
            found[name] = value
        elif name in schema.roots and name != schema.qvest:
            found.update(zip(schema.leaves(name), schema.flatten(name, value), strict=True))
        else:
            raise EntryError(name, f"nothing: the columns are {', '.join(schema.entry_names)}", f"{name}=...")
    if missing := [name for name in schema.entry_names if name not in found]:
        raise EntryError(missing[0], f"[T] of {schema[missing[0]]}", "nothing")
    return {name: found[name] for name in schema.entry_names}


class EpisodesObserver(WriterObserver):
    """Only counts: an episode is pushed when it is closed, and granted then."""

    def take_entries(self, writer: _core.StepCounter, waits: bool) -> None:
        """Take what was recorded: it is decided with its episode whether it is inserted."""
        self._waiting.check_process()
        self._pusher.record(writer._untold, setting(writer, _untold=0))


class EpisodesSide(ActorSide):
    """Open episodes, each of which is pushed when it is closed."""

    STORED = "whole episodes: closed ones are pushed, or push_episode pushes one"
    observer: ClassVar[type[WriterObserver]] = EpisodesObserver
    is_granted_at_once: ClassVar[bool] = False
    """Whether entries that a writer recorded were granted then."""
    fitting = MAX_ROWS
    """Entries of an episode that fit a message."""

    def make_memory(self, entries: int, *, ragged_bytes: int, live: bool, seed: int | None) -> Memory:
        """An `OpenEpisodes`, from which nothing is drawn."""
        # A writer cuts an endless episode when it fills half of this: what it cuts must fit a message and the server.
        schema, most_bytes = self.session.schema, self.session.most_bytes
        ragged = Reservation(CONTAINER).default("capacity", most_bytes // 2) if schema.ragged else 0
        self.fitting = max(1, most_fitting(partial(episode_bytes, schema), most_bytes - ragged))
        room, parameters = self._room(entries), self.session.parameters
        episodes = OpenEpisodes(schema, room, parameters, pack=self._pack, ship=self._ship)
        episodes.limit_ragged(ragged)
        return episodes

    def _room(self, entries: int) -> int:
        """Entries of open episodes, of which a writer cuts half off."""
        return min(entries, 2 * min(self.session.told.limits.get("episode_entries", entries), self.fitting))

    def writer_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """No episode is cut off so late that it fits no message."""
        self.memory()  # knows how much fits
        longest = options.get("longest")
        if longest is not None and whole("longest", longest, 1) > self.fitting:
            expected = f"at most {self.fitting}: more make a message above limits.message_bytes"
            raise ParameterError("longest", longest, f"{expected} ({self.session.most_bytes})")
        return dict(options)

    def _pack(self, *episode: Any) -> Payload:
        """The container of an episode, as of this moment; see `OpenEpisodes`."""
        pusher, (*columns, final) = self.pusher, episode
        began = pusher.waiting.now()
        payload = pack.pack_episode(
            self.session.schema,
            *columns,
            final=final,
            now=pusher.clock(),
            compression=pusher.codec(),
        )
        pusher.spend(began)
        return payload

    def _ship(self, shipment: Shipment, with_it: Changes) -> None:
        """Push an episode that a writer closed, or count it as skipped; `with_it` is changed together with that."""
        pusher = self.pusher
        pusher.waiting.check_process()
        left = pusher.waiting.closed_by - pusher.waiting.now()
        patience = max(0.0, min(pusher.patience, left))
        self._push(shipment, patience, lambda is_pushed: with_it, is_granted=self.is_granted_at_once)

    def message_of(self, shipment: Shipment) -> Callable[[int, int, int], messages.PushedBody]:
        """What makes an episode's message: called with since, its number and the bytes that were pushed by then."""
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
        """Push an episode, and count it with its steps if it was pushed.

        Args:
            entries: init_w and model_version.
            ending: The arguments of `Memory.close`.
        """
        memory = self.memory()
        assert isinstance(memory, OpenEpisodes)
        shipment = memory.whole(mapping("columns", columns), **entries, ending=ending)
        counted = shipment.entries if steps is None else whole("steps", steps, 0, shipment.entries)
        if is_cut:
            shipment.facts["cut"] = True
        returned = None if is_cut else shipment.returned

        def counting(is_pushed: bool) -> Changes:
            return self.pusher.counting(counted, returned) if is_pushed else []

        return self._push(shipment, patience, counting)

    def _push(
        self,
        shipment: Shipment,
        patience: float,
        with_it: Callable[[bool], Changes],
        *,
        is_granted: bool = False,
    ) -> bool:
        """Push an episode; False, after so many seconds, if there was no room for it.

        Args:
            with_it: The changes that go with it, under the lock; from whether it was pushed.
            is_granted: Whether its entries were granted when they were recorded.
        """
        pusher, entries, inserts = self.pusher, shipment.entries, self.session.inserts
        pusher.waiting.check_shipping()
        size, most_bytes = shipment.payload.nbytes, self.session.most_bytes
        if size > most_bytes:
            expected = f"at most {most_bytes} (limits.message_bytes) in an episode; close it earlier, or cut it"
            raise ParameterError("payload bytes", size, expected)
        deadline = pusher.waiting.now() + patience
        is_granted = is_granted or pusher.is_granted(deadline)
        if not (is_granted and pusher.has_room(size, deadline)):
            reason = WINDOW_FULL if is_granted else HELD_BACK
            return pusher.skip(reason, lambda: inserts.settling(entries, 0) + with_it(False))
        more = lambda: inserts.settling(entries, entries) + with_it(True)  # noqa: E731
        pusher.enqueue(shipment.payload, entries, self.message_of(shipment), more)
        return True


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
