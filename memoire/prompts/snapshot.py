"""Prompts as a snapshot has them, and their way back into the same table, another one, or several. Pure.

A prompt that was drawn stays drawn by its step, wherever it is put: which steps are committed, and what comes back, is
for the trainer to say by `rewind`. So a table into which something was put back refuses draws until then.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from memoire.errors import ProtocolError

from .columns import NOTHING, Packed, checked
from .rows import PromptRow, PromptState
from .table import PromptTable

RESTORED: Final = "restored from a snapshot"
"""The session of a table that a snapshot was put into."""


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


def put_back(table: PromptTable, kept: KeptPrompt) -> bool:
    """Hold a prompt of a snapshot; whether it was not known here.

    Raises:
        ProtocolError: (code "container") that is no prompt, or none of this table's.
    """
    row, columns = _unpacked(table, kept)
    if table.book.knows(row.key):
        return False
    if row.state is PromptState.LEASED:  # its worker has its lease of another server
        row.state, row.attempts = PromptState.WAITING, max(0, row.attempts - 1)
    row.lease, row.worker, row.until, row.given_up = 0, b"", float("inf"), []
    row.reason = row.reason if row.state is PromptState.DROPPED else ""
    table.book.restore(row)
    table.steps.hold(row)
    table.store.add(row.key, kept.payload)
    for index, made in columns.items():
        table.store.begin(row.key, index, 0, made)
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
