"""How many bytes a client may have on the way, and what became of those that it has pushed. Pure: time is passed in."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memoire._core import setting
from memoire.replay.episode_store import Changes

MAX_HOMES = 4096
"""Accounts that a client remembers of homes it has left, should it come back: as many servers as a WELCOME can name."""


class PushWindow:
    """A client's side of its account at one home: how many bytes may be on the way there, and what became of each.

    Always: pushed == received + lost + in flight, in caches and in bytes. Lost is what a later cache has overtaken (the
    server says so), and what was pushed long before an answered request and had not arrived by then; when it arrives
    after all, it is no longer lost.

    Not thread-safe: the owner locks.
    """

    def __init__(self, credit: int, *, lost_after: float = 15.0) -> None:
        self.credit = credit
        """Bytes that may be in flight; one cache may always go when nothing is."""
        self.pushed_caches = 0
        self.pushed_bytes = 0
        self.accepted_caches = 0
        self.received_caches = 0
        """Accepted and rejected ones."""
        self.received_bytes = 0
        self.rejected: dict[str, int] = {}
        self._lost_after = lost_after
        self._through = (0, 0)  # caches and bytes pushed: what lies before was received or is lost
        self._waiting: deque[tuple[float, tuple[int, int]]] = deque()  # (time, caches and bytes then) beyond it

    @property
    def lost_caches(self) -> int:
        """Caches that were pushed and are given up."""
        return max(0, self._through[0] - self.received_caches)

    @property
    def lost_bytes(self) -> int:
        """Bytes that were pushed and are given up."""
        return max(0, self._through[1] - self.received_bytes)

    @property
    def in_flight_caches(self) -> int:
        """Caches of which nobody knows yet."""
        return self.pushed_caches - self.received_caches - self.lost_caches

    @property
    def in_flight(self) -> int:
        """Bytes of which nobody knows yet."""
        return self.pushed_bytes - self.received_bytes - self.lost_bytes

    def has_room(self, byte_count: int) -> bool:
        """Whether a cache of this size may go now."""
        return self.in_flight == 0 or self.in_flight + byte_count <= self.credit

    @property
    def is_half_used(self) -> bool:
        """Whether it is time to ask the server what arrived."""
        return 2 * self.in_flight >= self.credit

    def pushing(self, byte_count: int, now: float) -> Changes:
        """The changes by which a cache of this size was handed to the socket."""
        caches, pushed = self.pushed_caches + 1, self.pushed_bytes + byte_count
        waits: Changes = [(self._waiting.append, ((now, (caches, pushed)),))]
        return setting(self, pushed_caches=caches, pushed_bytes=pushed) + waits

    def answered(
        self,
        accepted: int,
        received: int,
        lost: int,
        rejected: Mapping[str, int],
        asked_at: float,
        *,
        lost_caches: int = 0,
    ) -> None:
        """The account's sums, in answer to a request that was first sent at `asked_at`; `received`, `lost` in bytes."""
        # Never more than was pushed, though somebody may use this client's id.
        received, accepted = min(received, self.pushed_bytes), min(accepted, self.pushed_caches)
        came = min(accepted + sum(rejected.values()), self.pushed_caches)
        # An answer may be late, and a server that was killed may have forgotten its newest caches: those are lost.
        if came >= self.received_caches:
            self.accepted_caches, self.received_caches, self.rejected = accepted, came, dict(rejected)
        self.received_bytes = max(self.received_bytes, received)
        if lost or lost_caches:
            self._reach(min(self.pushed_caches, came + lost_caches), min(self.pushed_bytes, received + lost))
        while self._waiting:
            pushed_at, (caches, byte_count) = self._waiting[0]
            is_known = caches <= max(self._through[0], self.received_caches) and byte_count <= max(
                self._through[1], self.received_bytes
            )
            if not is_known and pushed_at > asked_at - self._lost_after:
                break
            self._waiting.popleft()
            if not is_known:
                self._reach(caches, byte_count)

    def _reach(self, caches: int, byte_count: int) -> None:
        self._through = max(self._through[0], caches), max(self._through[1], byte_count)

    def give_up(self) -> None:
        """Nobody will say any more what became of what is on the way: it is lost, unless the home is asked again."""
        self._through = self.pushed_caches, self.pushed_bytes
        self._waiting.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError where bytes or caches are not accounted for."""
        assert min(self.in_flight, self.lost_bytes, self.in_flight_caches, self.lost_caches) >= 0
        assert self.pushed_bytes == self.received_bytes + self.lost_bytes + self.in_flight
        assert self.pushed_caches == self.received_caches + self.lost_caches + self.in_flight_caches
        assert self.received_caches == min(self.pushed_caches, self.accepted_caches + sum(self.rejected.values()))


@dataclass(slots=True)
class PushSums:
    """What became of the caches that a client pushed, to all of its homes."""

    pushed_caches: int = 0
    pushed_bytes: int = 0
    accepted_caches: int = 0
    received_bytes: int = 0
    lost_caches: int = 0
    lost_bytes: int = 0
    in_flight_caches: int = 0
    in_flight_bytes: int = 0
    rejected: dict[str, int] = field(default_factory=dict)

    def add(self, window: PushWindow) -> None:
        """Add those of one account."""
        self.pushed_caches += window.pushed_caches
        self.pushed_bytes += window.pushed_bytes
        self.accepted_caches += window.accepted_caches
        self.received_bytes += window.received_bytes
        self.lost_caches += window.lost_caches
        self.lost_bytes += window.lost_bytes
        self.in_flight_caches += window.in_flight_caches
        self.in_flight_bytes += window.in_flight
        for code, count in window.rejected.items():
            self.rejected[code] = self.rejected.get(code, 0) + count


class AccountWindows:
    """A client's windows, one for each account that a home has opened for it. Not thread-safe: the owner locks.

    home a ──▶ home b ──▶ home a      back at a, its numbers go on, since a says that it knows this client `since` then
                                      as before; an a that has forgotten everything says a later `since`: from zero

    What is on the way when a client moves is lost, unless it comes back and hears otherwise.
    """

    def __init__(self, credit: int, *, lost_after: float = 15.0) -> None:
        self.now = PushWindow(credit, lost_after=lost_after)
        """The one towards the present home."""
        self.granted = credit
        """Bytes that the home grants."""
        self._own = 0  # bytes that the client allows itself; 0: as much as is granted
        self._lost_after = lost_after
        self._key = (0, 0, 0)  # run, home and since of `now`; zeros before the first WELCOME
        self._left: OrderedDict[tuple[int, int, int], PushWindow] = OrderedDict()  # the newest last
        self._forgotten = PushSums()  # of accounts that were left so long ago that only their sums are kept

    def grant(self, granted: int) -> None:
        """The home grants so many bytes; 0: as before."""
        self.granted = granted or self.granted
        self.now.credit = min(self.granted, self._own or self.granted)

    def limit(self, credit: int) -> None:
        """The client allows itself no more than this, whatever is granted; 0: as much as that."""
        self._own = credit
        self.grant(0)

    def belong(self, run: int, home: int, since: int) -> None:
        """From now on caches go to this account."""
        key = (run, home, since)
        if key == self._key:
            return
        self.now.give_up()
        self._left[self._key] = self.now
        credit = self.now.credit
        self.now = self._left.pop(key) if key in self._left else PushWindow(credit, lost_after=self._lost_after)
        self.now.credit, self._key = credit, key
        while len(self._left) > MAX_HOMES:
            self._forgotten.add(self._left.popitem(last=False)[1])

    def sums(self) -> PushSums:
        """Over all accounts."""
        sums = replace(self._forgotten, rejected=dict(self._forgotten.rejected))
        for window in (*self._left.values(), self.now):
            sums.add(window)
        return sums

    def check_invariants(self) -> None:
        """Raise AssertionError where bytes or caches are not accounted for."""
        for window in (*self._left.values(), self.now):
            window.check_invariants()
        assert not any(window.in_flight or window.in_flight_caches for window in self._left.values())
