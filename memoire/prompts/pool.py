"""Prompts of a table at the server, and what is saved of them: leased, answered, drawn in groups, committed.

    PROMPTS, ANSWERS, GROUPS ──▶ a handler, with `locked()` ──▶ PromptTable

The pool is the lock around one `PromptTable`, its clock, and what every pool has to be. No sample is drawn from it by
`get_batch`: a trainer draws groups, by `memoire.Prompts`.

A prompt that was drawn stays drawn by its step, wherever a snapshot puts it: which steps are committed, and what comes
back, is for the trainer to say by `rewind`. So a table into which something was put back refuses draws until then.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import msgspec
import numpy as np
from msgspec import Meta

from memoire import Parameters, Schema
from memoire.errors import ParameterError, ProtocolError
from memoire.kinds import (
    DEFAULT_TIMEOUT,
    DEFAULTS,
    MAX_INSPECTED,
    ByteBudget,
    Count,
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

from .book import TableFacts
from .columns import COLUMNS, FACTS, NOTHING, PAYLOAD, PLAN, ROW, STEP, Key, Packed, checked, chosen, packed_key
from .messages import StepPlan
from .rows import RESTORED, AnswerRow, PromptRow, PromptSettings, PromptState, StepRow
from .steps import NO_PLACE
from .table import PromptTable, stats_of, unfinished_of


class TableOrder(msgspec.Struct, frozen=True):
    """What leases and draws of a table follow from beside its prompts."""

    facts: TableFacts
    steps: list[StepRow]
    plans: dict[int, StepPlan]


class PromptRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt; the record's payload is the prompt's, followed by the columns of its answers."""

    kind: ClassVar = 7
    has_payload: ClassVar = True
    name: Annotated[bytes, Meta(max_length=2048)]
    """What decides to which of several servers it belongs."""
    row: bytes
    """Where it stands, in msgpack."""
    columns: Count = 0
    """Bytes of the columns."""

    def counted(self, payload_bytes: int) -> dict[str, int]:
        """One more prompt."""
        return {"rows": 1, "bytes": payload_bytes}

    def belongs_to(self, heading: RecordBody | None) -> bytes:
        """By its key."""
        return self.name

    def called(self, heading: RecordBody | None) -> str:
        """A prompt of a data set."""
        try:
            dataset, epoch, index = msgspec.msgpack.decode(self.name, type=Key)
        except msgspec.MsgspecError:
            return f"the prompt {self.name.hex()}"
        return f"prompt {index} of data set {dataset!r} in epoch {epoch}"


def record_of(table: PromptTable, row: PromptRow) -> tuple[PromptRecord, bytes] | None:
    """A prompt as a snapshot has it: body and payload; None if it has left the table."""
    if row.key not in table.book.rows:
        return None
    kept = ((index, table.store.packed(row.key, index)) for index in range(len(row.answers)))
    encode = msgspec.msgpack.encode
    columns = encode({index: made for index, made in kept if made.columns})
    record = PromptRecord(name=encode(row.key), row=encode(row), columns=len(columns))
    return record, table.store.payload(row.key) + columns


def order_of(table: PromptTable) -> TableOrder:
    """What a snapshot has of a table beside its prompts."""
    table.book.note_turns()
    return TableOrder(msgspec.structs.replace(table.book.facts), list(table.steps.steps.values()), dict(table.plans))


def go_on(table: PromptTable, order: TableOrder, *, is_heir: bool) -> None:
    """Take up what a snapshot has beside its prompts, before they are put back.

    Args:
        is_heir: Whether this empty table gets all that another one held: then it leases and draws as that one would
            have. Else only what is true of every table of a cluster comes along.
    """
    book, come = table.book, order.facts
    if is_heir:
        # Consumers see every prompt again: it has changed by being put back.
        book.facts = msgspec.structs.replace(come, cursors={}, listeners={}, former=list(come.former))
        table.steps.ring.next = come.replayable
        table.steps.steps |= {step.step: step for step in order.steps}
        table.steps.dirty |= table.steps.steps
        table.plans |= order.plans
        table.new_plans |= order.plans
    else:
        book.facts.finished += [epoch for epoch in come.finished if epoch not in book.facts.finished]
        book.facts.newest_model = max(book.facts.newest_model, come.newest_model)
        for dataset, epochs in come.forgotten.items():  # where they are counted is for the saved table to say
            mine = book.facts.forgotten.setdefault(dataset, {})
            mine |= {epoch: 0 for epoch in epochs if epoch not in mine}
    book.recount_facts()
    if is_heir or not book.facts.shares:
        book.share_out(come.shares)
    if is_heir:
        book.waiting.turns, book.ready.turns = come.leased, come.drawn
    book.has_new_facts = True


def put_back(table: PromptTable, record: PromptRecord, payload: bytes, *, is_heir: bool = False) -> bool:
    """Hold a prompt of a snapshot; whether it was not known here.

    Args:
        is_heir: As of `go_on`.

    Raises:
        ProtocolError: (code "container") that is no prompt, or none of this table's.
    """
    cut = max(0, len(payload) - record.columns)
    row, columns = _unpacked(table, record.row, payload[cut:])
    if table.book.knows(row.key):
        return False
    if row.state is PromptState.LEASED:  # its worker has its lease of another server
        row.state, row.attempts = PromptState.WAITING, max(0, row.attempts - 1)
    row.lease, row.worker, row.until, row.given_up = 0, b"", float("inf"), []
    row.place = row.place if is_heir else NO_PLACE
    row.reason = row.reason if row.state is PromptState.DROPPED else ""
    table.book.restore(row)
    table.steps.hold(row)
    table.store.add(row.key, payload[:cut])
    for index, made in columns.items():
        amended = chosen(table.schema, made, row.answers[index].amended)
        come = chosen(table.schema, made, ~row.answers[index].amended)
        if amended.columns:
            table.store.amend(row.key, index, amended)
        if come.columns:
            table.store.begin(row.key, index, come)
    table.book.touch(row)
    facts = table.book.facts
    if facts.session != RESTORED:
        facts.former = [*facts.former, facts.session] if facts.session else facts.former
        facts.session, table.book.has_new_facts = RESTORED, True
    return True


def _unpacked(table: PromptTable, body: bytes, columns: bytes) -> tuple[PromptRow, dict[int, Packed]]:
    try:
        row = msgspec.msgpack.decode(body, type=PromptRow)
        told = msgspec.msgpack.decode(columns, type=dict[int, Packed])
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError("container", f"a record that is no prompt: {error}") from None
    if len(row.answers) != table.book.rules.group or not set(told) <= set(range(table.book.rules.group)):
        raise ProtocolError("container", f"a prompt of {len(row.answers)} answers, not group={table.book.rules.group}")
    made = {i: checked(table.schema, each.columns, each.lengths, memoryview(each.data)) for i, each in told.items()}
    for index, answer in enumerate(row.answers):
        there = made.get(index, NOTHING).columns
        if there != (answer.columns if row.has_columns and not answer.failed else 0):
            raise ProtocolError("container", f"answer {index} has other columns than its row says")
    return row, made


NO_PAYLOAD: Final = "payload is missing"
_PAYLOAD: Final = -1
"""In the place of an answer's number."""


def take_changes(table: PromptTable) -> list[SavedRow]:
    """All that changed since the last call, to be saved together; nothing if the table saves nothing."""
    if table.store.saves is None:
        return []
    book, steps, encode = table.book, table.steps, msgspec.msgpack.encode
    book.note_turns()
    if not (table.store.saves or book.dirty or steps.dirty or table.new_plans or book.has_new_facts):
        return []
    found: list[SavedRow] = [(kind, key, body) for (kind, key), body in table.store.saves.items()]
    found += [(ROW, packed_key(*row.key), encode(row)) for row in book.dirty.values()]
    found += [(STEP, packed_key(step), None if row is None else encode(row)) for step, row in steps.dirty.items()]
    found += [
        (PLAN, packed_key(step), None if plan is None else encode(plan)) for step, plan in table.new_plans.items()
    ]
    if book.has_new_facts:
        found.append((FACTS, b"", encode(book.facts)))
    table.store.saves, book.dirty, steps.dirty, table.new_plans = {}, {}, {}, {}
    book.has_new_facts = False
    return found


def restore(table: PromptTable, saved: Iterable[SavedRow], now: float) -> list[PromptRow]:
    """Take what was saved, into an empty table. A payload or a piece of an answer without a body is missing.

    Returns:
        The prompts of which something is missing. Those that lack answers wait for them again, unless they are over;
        they leave their step. Those that lack their payload are dropped (`NO_PAYLOAD`).

    Raises:
        ParameterError: it was saved by a table with another group.
        msgspec.MsgspecError: it is nothing of a table's.
    """
    facts, rows, lost = TableFacts(), list[PromptRow](), dict[Key, set[int]]()
    for kind, key, body in saved:
        if body is None:
            table.store.lose(kind, key)
            dataset, epoch, index, *answer = msgspec.msgpack.decode(key)
            lost.setdefault((dataset, epoch, index), set()).update(answer[:1] or [_PAYLOAD])
        elif kind == FACTS:
            facts = msgspec.msgpack.decode(body, type=TableFacts)
        elif kind == ROW:
            rows.append(_row(table, body))
        else:
            _restore_one(table, kind, key, body)
    incomplete = [row for row in rows if _is_incomplete(table, row, lost.get(row.key, set()))]
    for row in rows:
        table.book.restore(row)
    table.book.go_on(facts)
    for row in rows:
        table.leases.restore(row, now)
    table.incomplete += len(incomplete)
    for row in incomplete:
        table.book.touch(row)
    table.steps.restore()
    table.tidy()
    return incomplete


def _row(table: PromptTable, body: bytes) -> PromptRow:
    row = msgspec.msgpack.decode(body, type=PromptRow)
    if len(row.answers) != table.book.rules.group:
        raise ParameterError("group", table.book.rules.group, f"{len(row.answers)}, as when its prompts were saved")
    return row


def _is_incomplete(table: PromptTable, row: PromptRow, lost: set[int]) -> bool:
    """Whether bytes of a prompt are missing; then it becomes what can still be."""
    store, has_payload = table.store, _PAYLOAD not in lost
    missing = [i for i, each in enumerate(row.answers) if i in lost and row.has_columns and not each.failed]
    if has_payload and not missing:
        return False
    for index in missing:
        store.let_go(row.key, index)
    if not has_payload:
        row.state, row.reason, row.size = PromptState.DROPPED, NO_PAYLOAD, 0
    is_over = row.state in (PromptState.COMMITTED, PromptState.DROPPED)
    table.steps.lose(row, is_over=row.state is PromptState.COMMITTED)
    row.lease, row.worker, row.until, row.given_up = 0, b"", math.inf, []
    if is_over:
        row.has_columns = False
        store.let_go(row.key)
    else:
        for index in missing:
            row.answers[index] = AnswerRow()
        row.state, row.attempts, row.score = PromptState.WAITING, 0, 0.0
    return True


def _restore_one(table: PromptTable, kind: int, key: bytes, body: bytes) -> None:
    decode = msgspec.msgpack.decode
    if kind in (PAYLOAD, COLUMNS):
        table.store.restore(kind, key, body)
    elif kind == STEP:
        step = decode(body, type=StepRow)
        table.steps.steps[step.step] = step
    elif kind == PLAN:
        table.plans[decode(key, type=tuple[int])[0]] = decode(body, type=StepPlan)


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
        from .calls import PromptCalls
        from .servers import checked_rank

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
