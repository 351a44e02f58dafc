"""What is saved of a table of prompts, and its way back into one. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from memoire.errors import ParameterError
from memoire.wire.messages import StepPlan

from .book import TableFacts
from .bytes import COLUMNS, FACTS, PAYLOAD, PLAN, ROW, STEP, Saved, packed_key
from .rows import PromptRow, StepRow
from .table import PromptTable


def take_changes(table: PromptTable) -> list[Saved]:
    """All that changed since the last call, to be saved together; nothing if the table saves nothing."""
    if table.store.saves is None:
        return []
    book, steps, encode = table.book, table.steps, msgspec.msgpack.encode
    book.note_turns()
    found: list[Saved] = [(kind, key, body) for (kind, key), body in table.store.saves.items()]
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


def restore(table: PromptTable, saved: Iterable[tuple[int, bytes, bytes]], now: float) -> None:
    """Take what was saved, into an empty table.

    Raises:
        ParameterError: it was saved by a table with another group.
        msgspec.MsgspecError: it is nothing of a table's.
    """
    facts = TableFacts()
    for kind, key, body in saved:
        if kind == FACTS:
            facts = msgspec.msgpack.decode(body, type=TableFacts)
        else:
            _restore_one(table, kind, key, body)
    table.book.go_on(facts)
    for row in table.book.rows.values():
        table.leases.restore(row, now)
    table.steps.restore()
    table.tidy()


def _restore_one(table: PromptTable, kind: int, key: bytes, body: bytes) -> None:
    decode = msgspec.msgpack.decode
    if kind == ROW:
        row = decode(body, type=PromptRow)
        if len(row.answers) != table.rules.group:
            raise ParameterError("group", table.rules.group, f"{len(row.answers)}, as when its prompts were saved")
        table.book.restore(row)
    elif kind in (PAYLOAD, COLUMNS):
        table.store.restore(kind, key, body)
    elif kind == STEP:
        step = decode(body, type=StepRow)
        table.steps.steps[step.step] = step
    elif kind == PLAN:
        table.plans[decode(key, type=tuple[int])[0]] = decode(body, type=StepPlan)
