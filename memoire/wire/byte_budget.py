"""Budget for the bytes that a process holds for its peers: each holder reserves bytes before it allocates a size that a
peer chose. And bounded tables with one value for each peer.
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
    """Budget of bytes that a process holds for its peers. Thread-safe; callbacks run without its lock.

        budget 64 MiB ─┬─ holder "table default"   40 MiB   overwrites its oldest if there is no room
                       ├─ holder "keyed rows"      20 MiB   `take` raises "busy" before anything is copied
                       └─ free                      4 MiB

    Args:
        limit: Bytes that all holders may have together, beside the holders' `own` bytes.
    """

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._limit = limit
        self._holders: dict[str, ByteHolder] = {}
        # Holders that count bytes, and holders that measure bytes, for `_free`, which runs for each message.
        self._counted_holders: list[ByteHolder] = []
        self._measured_holders: list[tuple[Callable[[], int], int]] = []
        self._reclaimers: list[Callable[[int], object]] = []

    def add_holder(
        self, name: str, *, own: int = 0, code: str = "busy", measure: Callable[[], int] | None = None
    ) -> ByteHolder:
        """Add a holder.

        Args:
            own: Bytes of the holder that do not count towards the limit.
            code: Code of the holder's refusals.
            measure: Returns the holder's bytes, without a lock. A holder with a measure does not call `take`.
        """
        holder = ByteHolder(self, name, own, code, measure)
        with _core.Held(self._lock):
            assert name not in self._holders, name
            self._holders[name] = holder
            if measure is None:
                self._counted_holders.append(holder)
            else:
                self._measured_holders.append((measure, own))
        return holder

    def add_reclaimer(self, reclaim: Callable[[int], object]) -> None:
        """Add a function that is called with the number of missing bytes if there is no room, and frees old data."""
        self._reclaimers.append(reclaim)

    def set_limit(self, limit: int) -> None:
        """Set the bytes that all holders may have together. Bytes that are held already stay."""
        with _core.Held(self._lock):
            self._limit = limit

    @property
    def max_bytes(self) -> int:
        """Bytes that all holders may have together, beside their `own` bytes."""
        return self._limit

    @property
    def limit(self) -> int:
        """Bytes that all holders may have together, with their `own` bytes."""
        with _core.Held(self._lock):
            return self._limit + sum(holder.own for holder in self._holders.values())

    @property
    def used(self) -> int:
        """Bytes that all holders have together."""
        return sum(self.holders().values())

    def holders(self) -> dict[str, int]:
        """Return the bytes of each holder, by name."""
        with _core.Held(self._lock):
            return {name: holder.bytes for name, holder in self._holders.items()}

    @property
    def free(self) -> int:
        """Bytes that may still be held; below 0 if holders with a measure exceed the limit.

        Read without the lock: `take` compares again under the lock.
        """
        return self._free()

    def _free(self) -> int:
        free = self._limit
        for holder in self._counted_holders:  # runs for each message: a generator and max() would take twice as long
            if (beyond := holder.count - holder.own) > 0:
                free -= beyond
        for measure, own in self._measured_holders:
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
    """Holder of bytes of a budget, such as a table or a queue of requests. Thread-safe."""

    __slots__ = ("_budget", "_measure", "code", "count", "name", "own")

    def __init__(self, budget: ByteBudget, name: str, own: int, code: str, measure: Callable[[], int] | None) -> None:
        self._budget, self.name, self.own, self.code, self._measure = budget, name, own, code, measure
        self.count = 0
        """Bytes that were taken. Guarded by the budget's lock; any thread may read it."""

    @property
    def bytes(self) -> int:
        """Bytes that the holder has, by its count or its measure."""
        return self.count if self._measure is None else self._measure()

    @property
    def room(self) -> int:
        """Further bytes that the holder could take."""
        return max(0, self._budget.free) + max(0, self.own - self.bytes)

    def take(self, size: int) -> None:
        """Take `size` further bytes, before they are allocated; a negative size returns bytes.

        Raises:
            ProtocolError: there is no room now (the holder's code), or the size exceeds the whole limit (code
                "too_large"). Nothing was taken.
        """
        with _core.Held(self._budget._lock):
            if size <= self.own - self.count:  # nearly always true of pushed messages
                self.count += size
                return
        if not self._budget._take(self, size):
            self._budget._reclaim(self, size)
            if not self._budget._take(self, size):
                raise self.no_room(size)

    def add(self, size: int, also: Iterable[tuple[Callable[..., object], tuple[Any, ...]]] = ()) -> None:
        """Take `size` further bytes, or return some, also if there is no room: for bytes that exist or were checked.

        Args:
            also: Calls that are made in the same step, without a switch of threads.
        """
        with _core.Held(self._budget._lock):
            _core.at_once([*_core.setting(self, count=self.count + size), *also])

    def check(self, size: int) -> None:
        """Raise ProtocolError, as `take`, if `size` further bytes have no room, but take none: `add` may follow."""
        if size > self.room:
            self._budget._reclaim(self, size)
            if size > self.room:
                raise self.no_room(size)

    def try_take(self, size: int) -> bool:
        """Take `size` further bytes if there is room, without calling reclaimers; return True if they were taken."""
        return self._budget._take(self, size)

    def no_room(self, size: int) -> ProtocolError:
        """Return the refusal of `size` further bytes; its text names the four largest holders."""
        holders = sorted(self._budget.holders().items(), key=lambda each: -each[1])
        held = ", ".join(f"{name} {held:,}" for name, held in holders[:4] if held) or "nothing"
        text = (
            f"{size:,} more bytes of {self.name} have no room: the limit is {self._budget.max_bytes:,} (held_bytes), "
            f"and the largest holders have: {held}. Consume or clear data that you do not need, or set a larger "
            f"held_bytes"
        )
        return ProtocolError("too_large" if size > self._budget.max_bytes + self.own else self.code, text)

    @contextmanager
    def reserved(self, size: int) -> Iterator[None]:
        """Take `size` further bytes for the duration of a `with` block. Raises ProtocolError, as `take`."""
        self.take(size)
        try:
            yield
        finally:
            self.take(-size)


class PeerTable(Generic[K, V]):
    """Bounded table with one value for each peer. A new peer never evicts a peer that was heard recently.

        full, some were last heard 600 s ago:  these rows expire, and the new peer gets a row
        full, all were heard since then:       The new peer is refused ("busy"), and all rows stay.

    Not thread-safe: the owner locks.

    Args:
        what: Name of the rows' peers, in the plural, for refusals.
        most: Most rows.
        idle_timeout: Seconds without a message of the peer after which a row may expire.
        on_leave: Called with key and value of a row that expires.
    """

    def __init__(
        self, what: str, most: int, idle_timeout: float, on_leave: Callable[[K, V], object] = lambda key, value: None
    ) -> None:
        self._what, self._most, self._idle_timeout, self._on_leave = what, most, idle_timeout, on_leave
        self._rows: OrderedDict[K, tuple[V, float]] = OrderedDict()  # value, and time last heard; the idlest first

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def items(self) -> list[tuple[K, V]]:
        """Return all rows, the idlest first."""
        return [(key, value) for key, (value, _) in list(self._rows.items())]

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None if the key has no row."""
        row = self._rows.get(key)
        return None if row is None else row[0]

    def look_up(self, key: K, now: float) -> V | None:
        """Return the value of a key, or None if the key has no row; record that the peer was heard now."""
        row = self._rows.get(key)
        if row is None:
            return None
        self._rows[key] = row[0], now
        self._rows.move_to_end(key)
        return row[0]

    def put(self, key: K, value: V, now: float) -> None:
        """Set the value of a key, and record that the peer was heard now.

        Raises:
            ProtocolError: (code "busy") the table is full of peers that were heard recently. Nothing was changed.
        """
        if key not in self._rows and len(self._rows) >= self._most:
            self.expire(now)
            if len(self._rows) >= self._most:
                text = f"{self._most} {self._what} are known here, the most. Retry: an entry that is not heard for "
                raise ProtocolError("busy", f"{text}{self._idle_timeout:g} s expires")
        self._rows[key] = value, now
        self._rows.move_to_end(key)

    def expire(self, now: float) -> None:
        """Remove the rows whose peers were not heard for `idle_timeout` seconds before `now`."""
        while self._rows:
            idlest, (value, heard) = next(iter(self._rows.items()))
            if now < heard + self._idle_timeout:
                return
            del self._rows[idlest]
            self._on_leave(idlest, value)

    def pop(self, key: K) -> V | None:
        """Remove a row and return its value, or None if the key has no row."""
        row = self._rows.pop(key, None)
        return None if row is None else row[0]
