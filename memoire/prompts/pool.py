"""Prompts of a table at the server: leased, answered, drawn in groups, committed.

    PROMPTS, ANSWERS, GROUPS ──▶ a handler, with `locked()` ──▶ PromptTable

The pool is the lock around one `PromptTable`, its clock, and what every pool has to be. No sample is drawn from it by
`get_batch`: a trainer draws groups, by `memoire.Prompts`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from memoire import Parameters, Schema
from memoire.errors import ProtocolError
from memoire.kinds import (
    DEFAULT_TIMEOUT,
    DEFAULTS,
    MAX_INSPECTED,
    ByteBudget,
    Distribution,
    HasCalls,
    HasRoom,
    Histogram,
    LastingPool,
    PoolStats,
    PutBack,
    RecordBody,
    SavedRecord,
    SavedRow,
    SavesRows,
    Transport,
)
from memoire.limits import HELD_BYTES

from .rows import PromptState
from .saving import NO_PAYLOAD, PromptRecord, TableOrder, go_on, order_of, put_back, record_of, restore, take_changes
from .settings import PromptSettings
from .table import PromptTable, stats_of, unfinished_of

if TYPE_CHECKING:
    from .calls import PromptCalls


class PromptPool(LastingPool, HasRoom, HasCalls, SavesRows):
    """The prompts of one table. Thread-safe.

    Args:
        schema, parameters, settings: Of the answers; `configure` changes the parameters.
        capacity: Prompts there is room for that are not over; 0: bytes alone limit them.
        is_bounded: Whether the oldest ready groups are dropped for want of room; else workers and givers wait.
        byte_limit: Bytes that payloads and columns may take.
        client_timeout: Seconds of silence after which a client is not counted any more.
        clock: Seconds that only grow.
    """

    parameters: Parameters
    byte_limit: int
    least_bytes: int
    capacity: int

    def __init__(
        self,
        schema: Schema,
        parameters: Parameters | None = None,
        settings: PromptSettings | None = None,
        *,
        capacity: int = 0,
        is_bounded: bool = False,
        byte_limit: int = HELD_BYTES,
        client_timeout: float = DEFAULTS.client_timeout,
        clock: Callable[[], float] = time.monotonic,
        first: int | None = None,
    ) -> None:
        super().__init__(client_timeout, clock)
        self.schema, self.parameters = schema, parameters or Parameters()
        self.settings = settings or PromptSettings()
        self.settings.check(schema, self.parameters)
        self.capacity, self.least_bytes, self.byte_limit = capacity, 1, byte_limit
        first = time.time_ns() if first is None else first
        rules = self.settings.rules(schema, self.parameters)
        facts: dict[str, Any] = {"score": self.settings.score, "capacity": capacity, "is_bounded": is_bounded}
        # Belongs to the waiter's lock.
        self._table = PromptTable(schema, rules, byte_limit=byte_limit, first=first, **facts)
        self._is_heir = False  # whether what is put back is all that another table held

    def join(self, budget: ByteBudget, name: str) -> None:
        """Be a holder of that name from now on: prompts and answers wait if others leave no room."""
        table = self._table
        budget.holder(name, measure=lambda: table.memory_bytes)
        table.free = lambda: budget.free

    @contextlib.contextmanager
    def locked(self, client: bytes = b"") -> Iterator[PromptTable]:
        """The table, with the lock, after the leases whose time has passed have ended.

        Raises:
            Closed: `close` was called.
        """
        with self._waiter.lock:
            self._waiter.check_open()
            if client:
                self._hear(client)
            self._table.expire(self._clock())
            yield self._table

    def now(self) -> float:
        """The clock of leases."""
        return self._clock()

    def calls(self, transport: Transport, *, rank: tuple[int, int] = (0, 1), session: str = "") -> PromptCalls:
        """Those of `memoire.Prompts`."""
        from .calls import PromptCalls, checked_rank

        return PromptCalls(transport, checked_rank(rank, session), DEFAULT_TIMEOUT, session)

    # What is saved

    def keep_changes(self) -> None:
        """Remember from now on what is to be saved."""
        with self._waiter.lock:
            self._table.store.saves = {}

    def take_changes(self) -> list[SavedRow]:
        """All that changed since the last call."""
        with self._waiter.lock:
            return take_changes(self._table)

    def restore(self, saved: Iterable[SavedRow]) -> str:
        """Go on from what was saved; what is missing of it, in words.

        Raises:
            msgspec.MsgspecError, ValueError: that is nothing of this table.
        """
        with self._waiter.lock:
            incomplete = restore(self._table, saved, self._clock())
        dropped = sum(row.reason == NO_PAYLOAD for row in incomplete)
        text = (
            f"answers of {len(incomplete) - dropped} prompts are missing, which wait for them again if they are not "
            f"over; {dropped} prompts were dropped, because their payload is missing"
        )
        return text if incomplete else ""

    # What every pool does

    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Follow new parameters from now on; returns 0: nothing goes by that."""
        with self._waiter.lock:
            self.parameters = parameters
            self._table.book.rules = self.settings.rules(self.schema, parameters)
        return 0

    def limit(self, byte_limit: int) -> int:
        """Hold at most this many bytes from now on. What is held stays, and workers wait; returns 0."""
        with self._waiter.lock:
            self.byte_limit = self._table.byte_limit = byte_limit
        return 0

    def saw_model(self, version: int) -> None:
        """There is a model of this version, from which `Parameters.max_model_lag` counts."""
        with self._waiter.lock:
            self._table.saw_model(version)

    def entries(self) -> int:
        """Groups that can be drawn."""
        with self._waiter.lock:
            return len(self._table.book.ready)

    def distribution(self, most: int = MAX_INSPECTED) -> Distribution:
        """How the scores of groups that are ready are spread."""
        with self._waiter.lock:
            rows = [row for row, _ in zip(self._table.book.ready.rows(), range(most), strict=False)]
            scores, count = np.array([row.score for row in rows], np.float64), len(self._table.book.ready)
        spread = Histogram.of(np.abs(scores))
        return Distribution(len(rows), count, float(count), float(count), None, spread, Histogram.of(np.empty(0)))

    def state(self) -> dict[str, Any]:
        """Return what leases and draws follow from beside the prompts: fields of a snapshot's `TableRecord`."""
        with self._waiter.lock:
            return {"own": msgspec.msgpack.encode(order_of(self._table))}

    def go_on_from(self, state: Any, *, is_same: bool) -> None:
        """Take up what `state` said; before anything is put back."""
        with self._waiter.lock:
            self._is_heir = is_same
            if state.own:
                go_on(self._table, msgspec.msgpack.decode(state.own, type=TableOrder), is_heir=is_same)

    @property
    def is_untouched(self) -> bool:
        """Whether no prompt was ever given."""
        with self._waiter.lock:
            return not (self._table.book.rows or self._table.book.forgotten)

    def records(self) -> Iterator[tuple[RecordBody, bytes]]:
        """Every prompt that is held at the beginning, in the order in which they were given: body and payload."""
        with self._waiter.lock:
            rows = sorted(self._table.book.rows.values(), key=lambda row: row.number)
        for row in rows:
            with self._waiter.lock:
                found = record_of(self._table, row)
            if found is not None:
                yield found

    def put_record(self, record: SavedRecord) -> PutBack:
        """Hold a prompt of a snapshot, of here or elsewhere."""
        if not isinstance(record.body, PromptRecord):
            raise ProtocolError("container", "a record of a kind that is not known here")
        with self._waiter.lock:
            self._waiter.check_open()
            is_new = put_back(self._table, record.body, record.payload, is_heir=self._is_heir)
        return PutBack(is_new, 0, {"rows": 1})

    def stats(self) -> PoolStats:
        """A frozen picture; what is called caches elsewhere are prompts here, and samples are groups."""
        with self._waiter.lock:
            counts, steps = self._table.book.counts, self._table.steps
            over = counts[PromptState.COMMITTED] + counts[PromptState.DROPPED]
            return PoolStats(
                clients=len(self._clients), caches=len(self._table.book.rows) - over, bytes=self._table.memory_bytes,
                unused=counts[PromptState.READY], held=counts[PromptState.READY] + counts[PromptState.DRAWN],
                added=len(self._table.book.rows) + self._table.book.forgotten,
                drawn=counts[PromptState.DRAWN] + counts[PromptState.COMMITTED], overwritten=self._table.full,
                overwritten_samples=self._table.full, left=0, misses=0, passed_over=steps.stale,
                own=stats_of(self._table, self._clock()),
            )  # fmt: skip

    @property
    def unfinished(self) -> int:
        """Prompts that somebody has yet to answer, to draw or to commit."""
        with self._waiter.lock:
            return unfinished_of(self._table.book)
