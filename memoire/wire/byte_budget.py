"""The bytes that one process holds for its peers, in one budget: each holder asks it before it allocates a size that a
peer chose. And tables of what it keeps for each peer, which have a bound.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from memoire import _core
from memoire.errors import ProtocolError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteBudget:
    """Bytes that one process holds for its peers, in all and by holder. Thread-safe; its lock is held for no call.

        budget 64 MiB ─┬─ holder "table default"   40 MiB   overwrites its oldest if there is no room
                       ├─ holder "keyed rows"      20 MiB   asks: `take` raises "busy" before anything is copied
                       └─ free                      4 MiB

    Args:
        limit: Bytes that all holders may have together, beside what some bring with them (`own`).
    """

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._limit = limit
        self._holders: dict[str, ByteHolder] = {}
        # The same, for those who ask for each message: with a count, and with a measure.
        self._counting: list[ByteHolder] = []
        self._measuring: list[tuple[Callable[[], int], int]] = []
        self._reclaimers: list[Callable[[int], object]] = []

    def holder(
        self, name: str, *, own: int = 0, code: str = "busy", measure: Callable[[], int] | None = None
    ) -> ByteHolder:
        """A new holder of that name.

        Args:
            own: Bytes of it that do not count towards the limit.
            code: Of refusals.
            measure: Returns its bytes, without a lock, if it knows them itself; then it takes none.
        """
        made = ByteHolder(self, name, own, code, measure)
        with _core.Held(self._lock):
            assert name not in self._holders, name
            self._holders[name] = made
            if measure is None:
                self._counting.append(made)
            else:
                self._measuring.append((measure, own))
        return made

    def add_reclaimer(self, reclaim: Callable[[int], object]) -> None:
        """Ask this for bytes, with how many are missing, if there is no room: it overwrites what may be overwritten."""
        self._reclaimers.append(reclaim)

    def set_limit(self, limit: int) -> None:
        """Let all holders have at most this many bytes from now on. What is held stays."""
        with _core.Held(self._lock):
            self._limit = limit

    @property
    def most(self) -> int:
        """Bytes that all holders may have together, beside what some bring with them."""
        return self._limit

    @property
    def limit(self) -> int:
        """The same, with those that some bring with them."""
        with _core.Held(self._lock):
            return self._limit + sum(holder.own for holder in self._holders.values())

    @property
    def used(self) -> int:
        """Bytes that all of them have."""
        return sum(self.holders().values())

    def holders(self) -> dict[str, int]:
        """Bytes of each holder, by name."""
        with _core.Held(self._lock):
            return {name: holder.bytes for name, holder in self._holders.items()}

    @property
    def free(self) -> int:
        """Bytes that may still be held; below 0 if some that measure themselves have more than there is room for.

        Without the lock: whoever takes some asks again, with it.
        """
        return self._free()

    def _free(self) -> int:
        free = self._limit
        for holder in self._counting:  # asked for each message: a generator and max() would take twice as long
            if (beyond := holder.count - holder.own) > 0:
                free -= beyond
        for measure, own in self._measuring:
            if (beyond := measure() - own) > 0:
                free -= beyond
        return free

    def _room(self, holder: ByteHolder) -> int:
        return max(0, self._free()) + max(0, holder.own - holder.bytes)

    def _take(self, holder: ByteHolder, size: int) -> bool:
        with _core.Held(self._lock):
            if size > 0 and size > self._room(holder):
                return False
            holder.count += size
            return True

    def _reclaim(self, holder: ByteHolder, size: int) -> None:
        for reclaim in self._reclaimers:
            with _core.Held(self._lock):
                missing = size - self._room(holder)
            if missing <= 0:
                return
            reclaim(missing)


class ByteHolder:
    """One of those who hold bytes of a budget. Thread-safe."""

    __slots__ = ("_budget", "_measure", "code", "count", "name", "own")

    def __init__(self, budget: ByteBudget, name: str, own: int, code: str, measure: Callable[[], int] | None) -> None:
        self._budget, self.name, self.own, self.code, self._measure = budget, name, own, code, measure
        self.count = 0
        """Bytes that were taken. Belongs to the budget's lock; any thread may read it."""

    @property
    def bytes(self) -> int:
        """That it has."""
        return self.count if self._measure is None else self._measure()

    @property
    def room(self) -> int:
        """Bytes that it could have more."""
        return max(0, self._budget.free) + max(0, self.own - self.bytes)

    def take(self, size: int) -> None:
        """Have so many bytes more; below 0 gives some back. Ask before they are allocated.

        Raises:
            ProtocolError: there is no room for them (the holder's code), nor ever will be (code "too_large"). Nothing
                was taken.
        """
        with _core.Held(self._budget._lock):
            if size <= self.own - self.count:  # nearly always, of what is pushed
                self.count += size
                return
        if not self._budget._take(self, size):
            self._budget._reclaim(self, size)
            if not self._budget._take(self, size):
                raise self.no_room(size)

    def add(self, size: int, also: Iterable[tuple[Callable[..., object], tuple[Any, ...]]] = ()) -> None:
        """Have so many bytes more, or fewer, also if there is no room: they are there already, or were asked for.

        Args:
            also: Changes that are made with it, as one.
        """
        with _core.Held(self._budget._lock):
            _core.at_once([*_core.setting(self, count=self.count + size), *also])

    def check(self, size: int) -> None:
        """Refuse so many bytes more if there is no room; for what measures itself, or is to `add` them. See `take`."""
        if size > self.room:
            self._budget._reclaim(self, size)
            if size > self.room:
                raise self.no_room(size)

    def try_take(self, size: int) -> bool:
        """Have so many bytes more if there is room for them, without asking others to make some."""
        return self._budget._take(self, size)

    def no_room(self, size: int) -> ProtocolError:
        """What a peer is answered whose bytes have no room, with the largest holders."""
        holders = sorted(self._budget.holders().items(), key=lambda each: -each[1])
        held = ", ".join(f"{name} {held:,}" for name, held in holders[:4] if held) or "nothing"
        text = (
            f"{size:,} more bytes of {self.name} have no room: {self._budget.most:,} may be held (held_bytes), and "
            f"these are: {held}. Use up or clear what is not needed any more, or set a larger held_bytes"
        )
        return ProtocolError("too_large" if size > self._budget.most + self.own else self.code, text)

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Have so many bytes more for a while. Raises ProtocolError, as `take`."""
        self.take(size)
        try:
            yield
        finally:
            self.take(-size)


class PeerTable(Generic[K, V]):
    """What a process keeps for each peer, as long as the peer is heard. A newcomer takes no place of one that is heard.

        full, some were heard 600 s ago   they leave, the newcomer gets a place
        full, all were heard since then   the newcomer is refused ("busy"); the others keep what they have

    Not thread-safe: the owner locks.

    Args:
        what: What a row stands for, in the plural, for refusals.
        most: Rows at most.
        idle_timeout: Seconds without a sign of life after which a row may leave.
        on_leave: Called with key and value of a row that leaves because it is idle.
    """

    def __init__(
        self, what: str, most: int, idle_timeout: float, on_leave: Callable[[K, V], object] = lambda key, value: None
    ) -> None:
        self._what, self._most, self._idle_timeout, self._on_leave = what, most, idle_timeout, on_leave
        self._rows: OrderedDict[K, tuple[V, float]] = OrderedDict()  # value, and when it was heard; the idlest first

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def items(self) -> list[tuple[K, V]]:
        """All rows, the idlest first."""
        return [(key, value) for key, (value, _) in list(self._rows.items())]

    def get(self, key: K) -> V | None:
        """The value of this key; None if it has none."""
        row = self._rows.get(key)
        return None if row is None else row[0]

    def hear(self, key: K, now: float) -> V | None:
        """The same, and this is a sign of life of its peer."""
        row = self._rows.get(key)
        if row is None:
            return None
        self._rows[key] = row[0], now
        self._rows.move_to_end(key)
        return row[0]

    def put(self, key: K, value: V, now: float) -> None:
        """Keep a value from now on, in place of the one that the key has.

        Raises:
            ProtocolError: (code "busy") the table is full of peers that are heard. Nothing was changed.
        """
        if key not in self._rows and len(self._rows) >= self._most:
            self.expire(now)
            if len(self._rows) >= self._most:
                text = f"{self._most} {self._what} are known here, the most. Ask again: one that is not heard for "
                raise ProtocolError("busy", f"{text}{self._idle_timeout:g} s leaves")
        self._rows[key] = value, now
        self._rows.move_to_end(key)

    def expire(self, now: float) -> None:
        """Let the idle rows leave."""
        while self._rows:
            idlest, (value, heard) = next(iter(self._rows.items()))
            if now < heard + self._idle_timeout:
                return
            del self._rows[idlest]
            self._on_leave(idlest, value)

    def pop(self, key: K) -> V | None:
        """Take a row out; None if there is none."""
        row = self._rows.pop(key, None)
        return None if row is None else row[0]
