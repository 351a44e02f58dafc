"""Pool of a table of prompts at a server, with the saving and restoring of its prompts.

    PROMPTS, ANSWERS, GROUPS ──▶ a handler, with `locked()` ──▶ PromptTable

The pool has the lock of one `PromptTable`, a clock, and the methods of every pool. `get_batch` does not draw from the
pool: a trainer draws groups, by `memoire.Prompts`.

A prompt that a step drew stays drawn after a snapshot is restored. The trainer decides by `rewind` which steps are
committed and which prompts come back, so a table with restored prompts refuses draws until then.
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
    RecordBody,
    RestoreOutcome,
    SavedRecord,
    SavedRow,
    SavesRows,
    Transport,
)
from memoire.limits import HELD_BYTES

from .book import TableFacts
from .columns import COLUMNS, FACTS, NOTHING, PAYLOAD, PLAN, ROW, STEP, Key, Packed, checked, packed_key, select_columns
from .messages import StepPlan
from .rows import RESTORED, AnswerRow, PromptRow, PromptSettings, PromptState, StepRow
from .steps import NO_PLACE
from .table import PromptTable, stats_of, unfinished_of


class SavedTableState(msgspec.Struct, frozen=True):
    """State of leases and draws of a table beside its prompts."""

    facts: TableFacts
    steps: list[StepRow]
    plans: dict[int, StepPlan]


class PromptRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """Saved prompt; the record's payload is the prompt's payload, followed by the columns of its answers."""

    kind: ClassVar = 7
    has_payload: ClassVar = True
    name: Annotated[bytes, Meta(max_length=2048)]
    """Key of the prompt, which selects one of several servers."""
    row: bytes
    """Row of the prompt, in msgpack."""
    columns: Count = 0
    """Bytes of the columns in the payload."""

    def count_contribution(self, payload_bytes: int) -> dict[str, int]:
        """Return the counts of one prompt."""
        return {"rows": 1, "bytes": payload_bytes}

    def routing_key(self, heading: RecordBody | None) -> bytes:
        """Return the key of the prompt, which selects its server."""
        return self.name

    def description(self, heading: RecordBody | None) -> str:
        """Return the description of the prompt for messages."""
        try:
            dataset, epoch, index = msgspec.msgpack.decode(self.name, type=Key)
        except msgspec.MsgspecError:
            return f"the prompt {self.name.hex()}"
        return f"prompt {index} of data set {dataset!r} in epoch {epoch}"


def record_of(table: PromptTable, row: PromptRow) -> tuple[PromptRecord, bytes] | None:
    """Return a prompt's record and payload for a snapshot; None if the prompt was removed."""
    if row.key not in table.book.rows:
        return None
    kept = ((index, table.store.packed(row.key, index)) for index in range(len(row.answers)))
    encode = msgspec.msgpack.encode
    columns = encode({index: answer for index, answer in kept if answer.columns})
    record = PromptRecord(name=encode(row.key), row=encode(row), columns=len(columns))
    return record, table.store.payload(row.key) + columns


def table_state_of(table: PromptTable) -> SavedTableState:
    """Return the state that a snapshot saves beside the prompts."""
    table.book.note_turns()
    return SavedTableState(
        msgspec.structs.replace(table.book.facts), list(table.steps.steps.values()), dict(table.plans)
    )


def restore_table_state(table: PromptTable, order: SavedTableState, *, is_heir: bool) -> None:
    """Take over the saved state beside the prompts, before they are restored.

    Args:
        is_heir: True if this empty table gets all prompts of the saved one: then it also leases and draws in the same
            order. With False, only state that holds for every table of a cluster is taken over.
    """
    book, saved = table.book, order.facts
    if is_heir:
        # Consumers list every prompt again, because restoring a prompt changes it.
        book.facts = msgspec.structs.replace(saved, cursors={}, listeners={}, former=list(saved.former))
        table.steps.ring.next = saved.replayable
        table.steps.steps |= {step.step: step for step in order.steps}
        table.steps.dirty |= table.steps.steps
        table.plans |= order.plans
        table.new_plans |= order.plans
    else:
        book.facts.finished += [epoch for epoch in saved.finished if epoch not in book.facts.finished]
        book.facts.newest_model = max(book.facts.newest_model, saved.newest_model)
        for dataset, epochs in saved.forgotten.items():  # only the saved table counts these prompts
            known = book.facts.forgotten.setdefault(dataset, {})
            known |= {epoch: 0 for epoch in epochs if epoch not in known}
    book.recount_facts()
    if is_heir or not book.facts.shares:
        book.set_shares(saved.shares)
    if is_heir:
        book.waiting.taken_counts, book.ready.taken_counts = saved.leased, saved.drawn
    book.has_new_facts = True


def restore_prompt(table: PromptTable, record: PromptRecord, payload: bytes, *, is_heir: bool = False) -> bool:
    """Restore a prompt of a snapshot. Return False if it is known here.

    Args:
        is_heir: As in `restore_table_state`.

    Raises:
        ProtocolError: (code "container") the record is malformed, or does not fit this table.
    """
    cut = max(0, len(payload) - record.columns)
    row, columns = _unpacked(table, record.row, payload[cut:])
    if table.book.was_added(row.key):
        return False
    if row.state is PromptState.LEASED:  # the lease belongs to another server
        row.state, row.attempts = PromptState.WAITING, max(0, row.attempts - 1)
    row.lease, row.worker, row.until, row.given_up = 0, b"", float("inf"), []
    row.place = row.place if is_heir else NO_PLACE
    row.reason = row.reason if row.state is PromptState.DROPPED else ""
    table.book.restore(row)
    table.steps.keep_restored_columns(row)
    table.store.add(row.key, payload[:cut])
    for index, answer in columns.items():
        amended = select_columns(table.schema, answer, row.answers[index].amended)
        sent = select_columns(table.schema, answer, ~row.answers[index].amended)
        if amended.columns:
            table.store.amend(row.key, index, amended)
        if sent.columns:
            table.store.put_first_piece(row.key, index, sent)
    table.book.touch(row)
    facts = table.book.facts
    if facts.session != RESTORED:
        facts.former = [*facts.former, facts.session] if facts.session else facts.former
        facts.session, table.book.has_new_facts = RESTORED, True
    return True


def _unpacked(table: PromptTable, body: bytes, columns: bytes) -> tuple[PromptRow, dict[int, Packed]]:
    try:
        row = msgspec.msgpack.decode(body, type=PromptRow)
        sent = msgspec.msgpack.decode(columns, type=dict[int, Packed])
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError("container", f"malformed record of a prompt: {error}") from None
    if len(row.answers) != table.book.rules.group or not set(sent) <= set(range(table.book.rules.group)):
        raise ProtocolError("container", f"a prompt of {len(row.answers)} answers, not group={table.book.rules.group}")
    answers = {i: checked(table.schema, each.columns, each.lengths, memoryview(each.data)) for i, each in sent.items()}
    for index, answer in enumerate(row.answers):
        held = answers.get(index, NOTHING).columns
        if held != (answer.columns if row.has_columns and not answer.failed else 0):
            raise ProtocolError("container", f"columns of answer {index} differ from its row")
    return row, answers


NO_PAYLOAD: Final = "payload is missing"
_PAYLOAD: Final = -1
"""Number for a lost payload among the numbers of lost answers."""


def take_changes(table: PromptTable) -> list[SavedRow]:
    """Return all rows that changed since the last call, to be saved together; none if the table saves nothing."""
    if table.store.unsaved_changes is None:
        return []
    book, steps, encode = table.book, table.steps, msgspec.msgpack.encode
    book.note_turns()
    if not (table.store.unsaved_changes or book.dirty or steps.dirty or table.new_plans or book.has_new_facts):
        return []
    rows: list[SavedRow] = [(kind, key, body) for (kind, key), body in table.store.unsaved_changes.items()]
    rows += [(ROW, packed_key(*row.key), encode(row)) for row in book.dirty.values()]
    rows += [(STEP, packed_key(step), None if row is None else encode(row)) for step, row in steps.dirty.items()]
    rows += [(PLAN, packed_key(step), None if plan is None else encode(plan)) for step, plan in table.new_plans.items()]
    if book.has_new_facts:
        rows.append((FACTS, b"", encode(book.facts)))
    table.store.unsaved_changes, book.dirty, steps.dirty, table.new_plans = {}, {}, {}, {}
    book.has_new_facts = False
    return rows


def restore(table: PromptTable, saved: Iterable[SavedRow], now: float) -> list[PromptRow]:
    """Restore saved rows into an empty table. A row without a body was lost.

    Returns:
        Prompts with lost parts. If answers are lost, the prompt leaves its step, and waits for them again unless it is
        committed or dropped. If the payload is lost, the prompt is dropped (`NO_PAYLOAD`).

    Raises:
        ParameterError: a table with another group size saved the rows.
        msgspec.MsgspecError: a row cannot be decoded.
    """
    facts, rows, lost = TableFacts(), list[PromptRow](), dict[Key, set[int]]()
    for kind, key, body in saved:
        if body is None:
            table.store.delete_damaged(kind, key)
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
    table.book.restore_facts(facts)
    for row in rows:
        table.leases.restore(row, now)
    table.incomplete += len(incomplete)
    for row in incomplete:
        table.book.touch(row)
    table.steps.restore()
    table.free_removed()
    return incomplete


def _row(table: PromptTable, body: bytes) -> PromptRow:
    row = msgspec.msgpack.decode(body, type=PromptRow)
    if len(row.answers) != table.book.rules.group:
        raise ParameterError("group", table.book.rules.group, f"{len(row.answers)}, the group of its saved prompts")
    return row


def _is_incomplete(table: PromptTable, row: PromptRow, lost: set[int]) -> bool:
    """Return True if parts of a prompt are lost, after moving it to the state that the remaining parts allow."""
    store, has_payload = table.store, _PAYLOAD not in lost
    missing = [i for i, each in enumerate(row.answers) if i in lost and row.has_columns and not each.failed]
    if has_payload and not missing:
        return False
    for index in missing:
        store.release(row.key, index)
    if not has_payload:
        row.state, row.reason, row.size = PromptState.DROPPED, NO_PAYLOAD, 0
    is_over = row.state in (PromptState.COMMITTED, PromptState.DROPPED)
    table.steps.remove_damaged(row, is_over=row.state is PromptState.COMMITTED)
    row.lease, row.worker, row.until, row.given_up = 0, b"", math.inf, []
    if is_over:
        row.has_columns = False
        store.release(row.key)
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
    """Prompts of one table, with their lock. Thread-safe.

    Args:
        schema, parameters, settings: Values of the table; `configure` changes the parameters.
        capacity: Largest number of prompts that are neither committed nor dropped; 0 limits only their bytes.
        is_bounded: True drops the oldest ready groups to make room; False lets clients wait for room.
        byte_limit: Bytes that prompts, payloads and columns may take.
        client_timeout: Seconds of silence after which a client is not counted any more.
        clock: Function that returns monotonic seconds.
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
        # Guarded by the waiter's lock.
        self._table = PromptTable(schema, rules, byte_limit=byte_limit, first=first, **facts)
        self._is_heir = False  # True while all prompts of another table are restored

    def join_budget(self, budget: ByteBudget, name: str) -> None:
        """Join a byte budget under this name: prompts and answers wait if other tables leave no room."""
        table = self._table
        budget.add_holder(name, measure=lambda: table.memory_bytes)
        table.free = lambda: budget.free

    @contextlib.contextmanager
    def locked(self, client: bytes = b"") -> Iterator[PromptTable]:
        """Hold the lock, end expired leases, and yield the table.

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
        """Return the time of the leases' clock."""
        return self._clock()

    def calls(self, transport: Transport, *, rank: tuple[int, int] = (0, 1), session: str = "") -> PromptCalls:
        """Return the calls of `memoire.Prompts` over a transport."""
        from .calls import PromptCalls
        from .servers import checked_rank

        return PromptCalls(transport, checked_rank(rank, session), DEFAULT_TIMEOUT, session)

    # Saving

    def keep_changes(self) -> None:
        """Record changes to be saved from now on."""
        with self._waiter.lock:
            self._table.store.unsaved_changes = {}

    def take_changes(self) -> list[SavedRow]:
        """Return all rows that changed since the last call."""
        with self._waiter.lock:
            return take_changes(self._table)

    def restore(self, saved: Iterable[SavedRow]) -> str:
        """Restore saved rows. Return a sentence about lost parts, or "".

        Raises:
            msgspec.MsgspecError, ValueError: the rows do not fit this table.
        """
        with self._waiter.lock:
            incomplete = restore(self._table, saved, self._clock())
        dropped = sum(row.reason == NO_PAYLOAD for row in incomplete)
        text = (
            f"{len(incomplete) - dropped} prompts lost answers, and wait for them again unless they are committed or "
            f"dropped; {dropped} prompts lost their payload and were dropped"
        )
        return text if incomplete else ""

    # Methods of every pool

    def configure(self, parameters: Parameters, *, discard_mismatched: bool = False) -> int:
        """Replace the parameters. Return 0: no prompt is discarded."""
        with self._waiter.lock:
            self.parameters = parameters
            self._table.book.rules = self.settings.rules(self.schema, parameters)
        return 0

    def limit_bytes(self, byte_limit: int) -> int:
        """Set the byte limit. Return 0: held prompts stay, and clients wait for room."""
        with self._waiter.lock:
            self.byte_limit = self._table.byte_limit = byte_limit
        return 0

    def saw_model(self, version: int) -> None:
        """Report a published model, from whose version `Parameters.max_model_lag` counts."""
        with self._waiter.lock:
            self._table.saw_model(version)

    def entries(self) -> int:
        """Return the number of groups that can be drawn."""
        with self._waiter.lock:
            return len(self._table.book.ready)

    def distribution(self, most: int = MAX_INSPECTED) -> Distribution:
        """Return the distribution of the scores of ready groups."""
        with self._waiter.lock:
            rows = [row for row, _ in zip(self._table.book.ready.rows(), range(most), strict=False)]
            scores, count = np.array([row.score for row in rows], np.float64), len(self._table.book.ready)
        spread = Histogram.from_values(np.abs(scores))
        return Distribution(
            len(rows), count, float(count), float(count), None, spread, Histogram.from_values(np.empty(0))
        )

    def state(self) -> dict[str, Any]:
        """Return the state of leases and draws beside the prompts, as fields of a snapshot's `TableRecord`."""
        with self._waiter.lock:
            return {"own": msgspec.msgpack.encode(table_state_of(self._table))}

    def restore_state(self, state: Any, *, is_same: bool) -> None:
        """Take over the saved state beside the prompts, before they are restored."""
        with self._waiter.lock:
            self._is_heir = is_same
            if state.own:
                restore_table_state(
                    self._table, msgspec.msgpack.decode(state.own, type=SavedTableState), is_heir=is_same
                )

    @property
    def is_untouched(self) -> bool:
        """True if no prompt was ever added."""
        with self._waiter.lock:
            return not (self._table.book.rows or self._table.book.forgotten)

    def records(self) -> Iterator[tuple[RecordBody, bytes]]:
        """Yield body and payload of every prompt that is held at the beginning, in the order of their addition."""
        with self._waiter.lock:
            rows = sorted(self._table.book.rows.values(), key=lambda row: row.number)
        for row in rows:
            with self._waiter.lock:
                record = record_of(self._table, row)
            if record is not None:
                yield record

    def put_record(self, record: SavedRecord) -> RestoreOutcome:
        """Restore a prompt of a snapshot of this or another server."""
        if not isinstance(record.body, PromptRecord):
            raise ProtocolError("container", "a record of another kind in a table of prompts")
        with self._waiter.lock:
            self._waiter.check_open()
            is_new = restore_prompt(self._table, record.body, record.payload, is_heir=self._is_heir)
        return RestoreOutcome(is_new, 0, {"rows": 1})

    def stats(self) -> PoolStats:
        """Return frozen statistics; `caches` counts prompts here, and samples are groups."""
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
        """Number of prompts that are still to be answered, drawn or committed."""
        with self._waiter.lock:
            return unfinished_of(self._table.book)
