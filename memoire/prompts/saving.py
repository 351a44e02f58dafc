"""What is saved of a table of prompts, and its way back into one. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec

from memoire.errors import ParameterError

from .book import TableFacts
from .bytes import COLUMNS, FACTS, PAYLOAD, PLAN, ROW, STEP, Saved, packed_key
from .messages import StepPlan
from .rows import AnswerRow, Key, PromptRow, PromptState, StepRow
from .table import PromptTable

NO_PAYLOAD: Final = "payload is missing"
_PAYLOAD: Final = -1
"""In the place of an answer's number."""


def take_changes(table: PromptTable) -> list[Saved]:
    """All that changed since the last call, to be saved together; nothing if the table saves nothing."""
    if table.store.saves is None:
        return []
    book, steps, encode = table.book, table.steps, msgspec.msgpack.encode
    book.note_turns()
    if not (table.store.saves or book.dirty or steps.dirty or table.new_plans or book.has_new_facts):
        return []
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


def restore(table: PromptTable, saved: Iterable[Saved], now: float) -> list[PromptRow]:
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
    if len(row.answers) != table.rules.group:
        raise ParameterError("group", table.rules.group, f"{len(row.answers)}, as when its prompts were saved")
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
