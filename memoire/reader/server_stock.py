"""What one server has for a reader, as far as the reader knows: what the server said last, less what was asked of it
since. Pure: no lock, no socket, no clock.

    the server says     client 7: 20 samples     client 9: 4 samples
    on the way to it    client 7:  5 samples                            (a draw that it had not seen when it said so)
    the next draw has   client 7: 15 samples     client 9: 4 samples
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memoire.pool import far
from memoire.pool._draw import take_counts
from memoire.wire.rows import CLIENT_COUNTS

NOTHING: NDArray[np.void] = np.empty(0, CLIENT_COUNTS)
"""What a request asks for that takes no samples."""


class ServerStock:
    """What one server has, and which requests to it are open. Belongs to the reader's thread."""

    def __init__(self, server: far.FarServer) -> None:
        self.server = server
        self.table: NDArray[np.void] | None = None  # [C] rows of CLIENT_SUMS; None if it has to say so again
        self.clients: NDArray[np.uint64] = np.empty(0, np.uint64)  # [C] who was in its newest table
        self.drawn = 0  # samples that it was asked for, over all time
        self.again_at = 0.0  # when to ask it again: before, it would say the same
        self._pages: list[NDArray[np.void]] = []  # rows of a table that has not come whole
        self._heard_at = 0.0  # when it said what is in `table`
        self._open: dict[int, NDArray[np.void]] = {}  # number of each open request -> what it asks for
        self._asked_at = 0.0  # since when an answer is awaited

    @property
    def is_asked(self) -> bool:
        """Whether a request is open."""
        return bool(self._open)

    @property
    def open(self) -> frozenset[int]:
        """Numbers of the open requests."""
        return frozenset(self._open)

    @property
    def on_way(self) -> int:
        """Samples that were asked for and have not come."""
        return sum(int(counts["count"].sum()) for counts in self._open.values())

    @property
    def late_at(self) -> float:
        """When a batch no longer waits for its answer; infinity while no batch does."""
        is_awaited = self.is_asked and not self.server.is_away
        return self._asked_at + far.LEFT_OUT_TIMEOUT if is_awaited else float("inf")

    def is_older(self, age: float, now: float) -> bool:
        """Whether it has said nothing for this many seconds, or what it said does not hold."""
        return self.table is None or now - self._heard_at > age

    def ask(self, number: int, counts: NDArray[np.void], now: float) -> None:
        """A request goes out under this number; `counts` are [C] rows of CLIENT_COUNTS that it takes."""
        if not self._open:
            self._asked_at = now
        self._open[number] = counts

    def answered(self, number: int, now: float) -> float:
        """A request has ended; those that are open are awaited from now on. Returns for how long this one was."""
        self._open.pop(number, None)
        waited, self._asked_at = now - self._asked_at, now
        return waited

    @property
    def after(self) -> bytes:
        """Client of the last row of the page that came last; b"" if the next page is the first one."""
        return bytes(self._pages[-1]["client"][-1].tobytes()) if self._pages and len(self._pages[-1]) else b""

    def collect(self, rows: NDArray[np.void], after: bytes, *, is_whole: bool) -> NDArray[np.void] | None:
        """A page of its table came: [C] rows behind those of client `after`. The whole table, if it is the last one;
        None: the next page is to be asked for.
        """
        if after != self.after and after:
            self._pages.clear()  # the pages before it were given up meanwhile
            return None
        self._pages = [*self._pages, rows] if after else [rows]
        if not is_whole:
            self.table = None
            return None
        pages, self._pages = self._pages, []
        return pages[0] if len(pages) == 1 else np.concatenate(pages)

    def give_up_pages(self) -> None:
        """The next page that is asked for is the first one."""
        self._pages.clear()

    def report(self, table: NDArray[np.void], now: float) -> int:
        """The server says what it has, [C] rows of CLIENT_SUMS; returns its entries.

        Draws that it had not seen then are taken off.
        """
        self.table, self._heard_at, self.clients = table.copy(), now, clients_of(table)
        for counts in self._open.values():
            self.take(counts)
        return int(table["positives"].sum())

    def take(self, counts: NDArray[np.void]) -> None:
        """Take samples that are asked for, [C] rows of CLIENT_COUNTS, off what is there for the next draw.

        With reuse_cache they stay.
        """
        if self.table is not None:
            take_counts(self.table, counts)


def clients_of(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """Client ids of rows as numbers that compare: [B] -> [B]; half of their random bits, enough to tell them apart."""
    return np.ascontiguousarray(rows["client"][:, 0], np.uint64)
