"""Actor side of cache tables: a memory keeps recent episodes, and caches of samples drawn from them are pushed.

entries ──▶ granted? ──▶ samples_per_insert of them are owed ──▶ cache_size are owed: draw and push a cache
"""

from __future__ import annotations

from collections.abc import Callable

from memoire import _core
from memoire._core import setting
from memoire.errors import EmptyMemory, ParameterError
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.replay.writing import Changes
from memoire.wire import containers, messages
from memoire.wire.layout import usual_bytes
from memoire.wire.parts import Payload

from .pushes import HELD_BACK, WINDOW_FULL, ActorSide, WriterObserver

NOTHING_TO_DRAW = "nothing to draw"
"""Reason for a skipped push: no entry of the memory has a positive weight."""


class CachesObserver(_core.SampleDebt, WriterObserver):
    """Writer observer that pushes `samples_per_insert` samples for each granted entry, a cache at a time."""

    def __init__(self, side: CachesSide) -> None:
        WriterObserver.__init__(self, side)
        self._side, self._entry_bytes = side, side.session.schema.entry_bytes  # neither changes
        self._held, self._counts = self._waiting.condition, self._session.counts
        self._schedule = self._session.schedule

    @property
    def is_behind(self) -> bool:
        """True if entries of an earlier call still wait for a grant, or a cache for its push."""
        return self._is_due or self._asked > 0

    def take_entries(self, writer: _core.StepCounter, waits: bool) -> None:
        """Count the writer's new entries, and push a cache if `cache_size` samples are owed."""
        self._waiting.check_process()
        count, pusher, parameters = writer._untold, self._pusher, self._session.parameters
        if not self._take_granted(writer, parameters.samples_per_insert, self._entry_bytes):
            pusher.record(count, setting(writer, _untold=0) + setting(self, _asked=self._asked + count))
            self._insert(pusher.room_timeout if waits else 0.0)
        if self._is_due or self._owed >= parameters.cache_size:
            self._push(pusher.room_timeout if waits else 0.0)

    def _insert(self, patience: float) -> None:
        """Insert the entries that wait for a grant; after `patience` seconds, other entries stay passed steps."""
        pusher, parameters = self._pusher, self._session.parameters

        def admitting(count: int) -> Changes:
            owed = self._owed + count * parameters.samples_per_insert
            return setting(self, _asked=self._asked - count, _owed=owed)

        if not pusher.insert_when_granted(lambda: self._asked, admitting, patience):
            inserts = self._session.inserts
            pusher.skip(HELD_BACK, lambda: inserts.insert_changes(self._asked, 0) + setting(self, _asked=0))

    def _push(self, patience: float) -> None:
        """Push one cache, and subtract its samples from those owed."""
        if not self._is_due:
            # The loop pushes one cache at a time: after a pause, such as a full window, owed samples come in no burst.
            size = self._session.parameters.cache_size
            _core.at_once(setting(self, _owed=min(self._owed - size, size), _is_due=True))
        try:
            self._side.push_granted(patience, lambda: setting(self, _is_due=False))
        except Exception:
            self._is_due = False
            raise


class CachesSide(ActorSide):
    """Actor side of a table of caches: a memory of recent episodes, from which caches are drawn."""

    STORED = "caches: record with a writer, or call push_cache"
    observer = CachesObserver
    leaves_open = False

    def make_memory(self, entries: int, *, ragged_bytes: int, live: bool, seed: int | None) -> Memory:
        """Return a `Memory` of closed and open episodes."""
        schema, parameters = self.session.schema, self.session.parameters
        memory = Memory(schema, entries, parameters, live=live, seed=seed)
        memory.limit_ragged(ragged_bytes if schema.ragged else 0)
        memory.saw_model(parameters.newest_model(self.session.models))
        return memory

    def usual_bytes(self, schema: Schema, parameters: Parameters) -> int:
        """Return the usual size of a cache in bytes."""
        return usual_bytes(schema, parameters)

    def push_cache(self, patience: float) -> bool:
        """Draw a cache and push it, as soon as the home server grants an entry; False after `patience` seconds."""
        pusher = self.pusher
        deadline = pusher.waiting.now() + patience
        if not pusher.wait_for_grant(deadline):
            return pusher.skip(HELD_BACK)
        return self.push_granted(pusher.waiting.remaining(deadline))

    def push_granted(self, patience: float, with_it: Callable[[], Changes] = list) -> bool:
        """Draw and push a cache of granted entries; the changes of `with_it` are made together with a push or skip."""
        pusher, memory = self.pusher, self.memory()
        deadline = pusher.waiting.now() + patience
        if memory.num_positive == 0:
            return pusher.skip(NOTHING_TO_DRAW, with_it)
        if not pusher.has_room(pusher.last_size or 1, deadline):
            return pusher.skip(WINDOW_FULL, with_it)
        try:
            payload = self._build(memory)
        except EmptyMemory:
            return pusher.skip(NOTHING_TO_DRAW, with_it)
        if not pusher.has_room(payload.nbytes, deadline):
            return pusher.skip(WINDOW_FULL, with_it)
        pusher.enqueue(payload, self.session.parameters.cache_size, _message, with_it)
        return True

    def _build(self, memory: Memory) -> Payload:
        session, pusher, began = self.session, self.pusher, self.pusher.waiting.now()
        payload = containers.build(memory, now=pusher.clock(), compression=pusher.codec())
        pusher.record_time(began)
        if payload.nbytes > session.most_bytes:
            raise ParameterError.with_text(
                f"A cache of cache_size={session.parameters.cache_size} samples takes {payload.nbytes} bytes; the "
                f"limit is {session.most_bytes} bytes (limits.message_bytes). Set a smaller cache_size. The cache was "
                f"not pushed."
            )
        return payload


def _message(since: int, number: int, pushed_bytes: int) -> messages.Cache:
    return messages.Cache(since=since, number=number, pushed_bytes=pushed_bytes)
