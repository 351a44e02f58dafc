"""Prompts as a snapshot has them, and their way back into the same table, another one, or several. Pure.

A prompt that was drawn stays drawn by its step, wherever it is put: which steps are committed, and what comes back, is
for the trainer to say by `rewind`. So a table into which something was put back refuses draws until then.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from memoire.errors import ProtocolError

from .book import TableFacts
from .columns import NOTHING, Packed, checked, chosen
from .messages import StepPlan
from .rows import RESTORED, PromptRow, PromptState, StepRow
from .steps import NO_PLACE
from .table import PromptTable


class TableOrder(msgspec.Struct, frozen=True):
    """What leases and draws of a table follow from beside its prompts."""

    facts: TableFacts
    steps: list[StepRow]
    plans: dict[int, StepPlan]


class KeptPrompt(NamedTuple):
    """One prompt of a snapshot."""

    row: bytes
    """msgpack of its `PromptRow`."""
    payload: bytes
    columns: bytes
    """msgpack of the columns of each answer: their places, lengths and bytes."""

    @property
    def name(self) -> bytes:
        """What decides to which part of several servers it belongs."""
        row = msgspec.msgpack.decode(self.row, type=PromptRow)
        return msgspec.msgpack.encode(row.key)


def kept_of(table: PromptTable, row: PromptRow) -> KeptPrompt | None:
    """A prompt as a snapshot has it; None if it has left the table."""
    if row.key not in table.book.rows:
        return None
    kept = ((index, table.store.packed(row.key, index)) for index in range(len(row.answers)))
    answers = {index: made for index, made in kept if made.columns}
    encode = msgspec.msgpack.encode
    return KeptPrompt(encode(row), table.store.payload(row.key), encode(answers))


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


def put_back(table: PromptTable, kept: KeptPrompt, *, is_heir: bool = False) -> bool:
    """Hold a prompt of a snapshot; whether it was not known here.

    Args:
        is_heir: As of `go_on`.

    Raises:
        ProtocolError: (code "container") that is no prompt, or none of this table's.
    """
    row, columns = _unpacked(table, kept)
    if table.book.knows(row.key):
        return False
    if row.state is PromptState.LEASED:  # its worker has its lease of another server
        row.state, row.attempts = PromptState.WAITING, max(0, row.attempts - 1)
    row.lease, row.worker, row.until, row.given_up = 0, b"", float("inf"), []
    row.place = row.place if is_heir else NO_PLACE
    row.reason = row.reason if row.state is PromptState.DROPPED else ""
    table.book.restore(row)
    table.steps.hold(row)
    table.store.add(row.key, kept.payload)
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


def _unpacked(table: PromptTable, kept: KeptPrompt) -> tuple[PromptRow, dict[int, Packed]]:
    try:
        row = msgspec.msgpack.decode(kept.row, type=PromptRow)
        told = msgspec.msgpack.decode(kept.columns, type=dict[int, Packed])
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError("container", f"a record that is no prompt: {error}") from None
    if len(row.answers) != table.rules.group or not set(told) <= set(range(table.rules.group)):
        raise ProtocolError("container", f"a prompt of {len(row.answers)} answers, not group={table.rules.group}")
    columns = {i: checked(table.schema, each.columns, each.lengths, memoryview(each.data)) for i, each in told.items()}
    for index, answer in enumerate(row.answers):
        there = columns.get(index, NOTHING).columns
        if there != (answer.columns if row.has_columns and not answer.failed else 0):
            raise ProtocolError("container", f"answer {index} has other columns than its row says")
    return row, columns
