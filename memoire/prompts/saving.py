"""Prompts as a snapshot has them, and their way back into the same table, another one, or several. Pure.

A prompt that was drawn stays drawn by its step, wherever it is put: which steps are committed, and what comes back, is
for the trainer to say by `rewind`. So a table into which something was put back refuses draws until then.

What is saved of a table of prompts, and its way back into one. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta

from memoire.errors import ParameterError, ProtocolError
from memoire.kinds import Count, RecordBody, SavedRow

from .book import TableFacts
from .columns import COLUMNS, FACTS, NOTHING, PAYLOAD, PLAN, ROW, STEP, Packed, checked, chosen, packed_key
from .messages import StepPlan
from .rows import RESTORED, AnswerRow, Key, PromptRow, PromptState, StepRow
from .steps import NO_PLACE
from .table import PromptTable


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
