"""Handlers of a server's messages about prompts: PROMPTS, ANSWERS and GROUPS. Pure.

    PROMPTS  counts, list, fetch, payloads                      read-only
    ANSWERS  lease, renew, answer, amend, fail, release         from workers and reward models
    GROUPS   add, ..., draw, commit, rewind                     from programs that add prompts, and from trainers

Every call may be repeated: names of prompts, answers, pieces and steps identify it. Handlers change nothing that the
dispatcher's lock guards: a pool has its own lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from memoire.errors import ProtocolError
from memoire.kinds import Body, Handler, HandlerContext, MessageHeader, Reply, ReplyPage, encoded_bytes, too_large

from . import messages
from .columns import NOTHING, PIECE_BYTES, Key, Packed, checked
from .pool import PromptPool
from .rows import PromptRow, PromptState
from .table import PromptTable, draw_wait_reason, figures_of

UNKNOWN: Final = 1 << 40
"""Number of a lease in the size of its row before the lease begins."""
MAX_LISTED = 2000
"""Largest number of prompts in one reply."""
OUTCOMES: Final = {"taken": 0, "repeated": 1, "late": 2}
"""Codes of a piece's outcomes in replies."""


def request_handlers(context: HandlerContext) -> dict[type[Body], Handler]:
    """Return the handlers of messages about prompts, by message type."""
    handler = PromptsHandler(context)
    return {
        messages.PromptsRequest: handler.handle_prompts,
        messages.Answers: handler.handle_answers,
        messages.Groups: handler.handle_groups,
    }


class PromptsHandler:
    """Handlers of the calls on all tables of prompts of a server."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    def handle_prompts(self, _: float, header: MessageHeader, body: messages.PromptsRequest, __: Any) -> Reply:
        """Handle a PROMPTS message: list prompts, fetch answers and payloads, forget a consumer."""
        pool = self._pool_of(header)
        with pool.locked(header.client) as table:
            if body.call == "counts":
                return self._reply(table, counts=figures_of(table))
            if body.call == "forget":
                table.book.forget_consumer(body.consumer)
                return self._reply(table)
            if body.call == "list":
                return self._list(table, body, header.client)
            page = self._page(header.client)
            return self._fetch(table, body, page) if body.call == "fetch" else self._payloads(table, body, page)

    def handle_answers(self, _: float, header: MessageHeader, body: messages.Answers, payload: Any) -> Reply:
        """Handle an ANSWERS message: lease prompts, store answers, renew and end leases."""
        pool, worker = self._pool_of(header), header.client
        with pool.locked(worker) as table:
            if body.call == "lease":
                return self._lease(table, worker, body, pool.now())
            if body.call in ("renew", "release"):
                return self._keep_leases(table, worker, body, pool.now())
            return self._answer(table, body, memoryview(payload or b"").cast("B"))

    def handle_groups(self, _: float, header: MessageHeader, body: messages.Groups, payload: Any) -> Reply:
        """Handle a GROUPS message: add prompts, draw groups, commit and rewind steps."""
        pool = self._pool_of(header)
        with pool.locked(header.client) as table:
            if body.call == "add":
                return self._add(table, body, memoryview(payload or b"").cast("B"))
            if body.call == "draw":
                return self._draw(table, body, header.client, pool.now())
            return self._order(table, body)

    # PROMPTS

    def _list(self, table: PromptTable, body: messages.PromptsRequest, client: bytes) -> Reply:
        since = body.since
        if body.consumer:
            since = table.book.move_cursor(body.consumer, client, None if body.is_going_on else since)
        infos, most, page = list[messages.PromptFacts](), min(body.most, MAX_LISTED), self._page(client)
        is_whole = body.most <= MAX_LISTED
        for row in table.rows(body.states, body.tags, since):
            facts = _facts_of(row)
            if len(infos) >= most or not page.count_row(f"prompt {row.key}", facts):
                return self._reply(table, prompts=infos, cursor=since, is_whole=is_whole and len(infos) >= most)
            infos.append(facts)
            since = row.changed
        return self._reply(table, prompts=infos, cursor=since)

    def _fetch(self, table: PromptTable, body: messages.PromptsRequest, page: ReplyPage) -> Reply:
        """Return columns of answers, as many as a page has room for, or a part of an answer that alone is too long.
        If a prompt has changed since a part of its answer was sent, the client has to begin again.
        """
        if (body.after or body.offset) and _changed(table, body, 0) != body.changed:
            return self._reply(table, changed=_changed(table, body, 0))
        columns, parts, answered, rest = list[messages.AnswerColumns](), list[bytes](), 0, 0
        for place, key in enumerate(body.keys):
            row = table.book.rows.get(_key_of(key))
            indexes = [] if row is None or not row.has_columns else row.group
            if body.after is None:  # whole prompts alone
                answers = [_columns_of(table, row, place, index, body.columns) for index in indexes if row]
                if not page.count_row(f"all answers to prompt {_key_of(key)}", *_sums(answers)):
                    break
            else:
                answers = []
                for index in indexes[0 if place else body.after :]:
                    assert row is not None
                    facts, data = _columns_of(table, row, place, index, body.columns)
                    data = data if answers or place else data[body.offset :]
                    part = data if columns or answers else data[: max(1, page.payload_room)]
                    facts = msgspec.structs.replace(facts, bytes=len(part))
                    if not page.count_row(f"answer {index} to prompt {row.key}", facts, len(part)):
                        break
                    answers.append((facts, part))
                    if rest := len(data) - len(part):
                        break
            columns += [facts for facts, _ in answers]
            parts += [data for _, data in answers]
            if body.after is not None and (rest or len(answers) < len(indexes) - (0 if place else body.after)):
                break
            if row is not None:
                table.count_tokens(row, body.rank, body.ranks)
            answered = place + 1
        changed = _changed(table, body, answered)
        return self._reply(
            table, payload=b"".join(parts), columns=columns, answered=answered, rest=rest, changed=changed
        )

    def _payloads(self, table: PromptTable, body: messages.PromptsRequest, page: ReplyPage) -> Reply:
        parts: list[bytes] = []
        for key in body.keys:
            payload = table.store.payload(table.book.find(_key_of(key)).key)
            if not page.count_row(f"the payload of prompt {_key_of(key)}", len(payload), len(payload)):
                break
            parts.append(payload)
        return self._reply(table, payload=b"".join(parts), sizes=list(map(len, parts)), answered=len(parts))

    # ANSWERS

    def _lease(self, table: PromptTable, worker: bytes, body: messages.Answers, now: float) -> Reply:
        facts: dict[str, Any] = {"count": min(body.count, MAX_LISTED), "seconds": body.seconds, "version": body.version}
        page = self._page(worker)

        def fits(row: PromptRow) -> bool:
            size = len(table.store.payload(row.key))
            return page.count_row(f"the lease of prompt {row.key}", _lease_of(row, now, size, UNKNOWN), size)

        rows, why = table.lease(worker, now, having=body.leases, fits=fits, **facts)
        payloads = [table.store.payload(row.key) for row in rows]
        leases = [_lease_of(row, now, len(data)) for row, data in zip(rows, payloads, strict=True)]
        return self._reply(table, payload=b"".join(payloads), leases=leases, wait=why, done=len(rows), is_saved=True)

    def _keep_leases(self, table: PromptTable, worker: bytes, body: messages.Answers, now: float) -> Reply:
        flags = bytearray()
        for number in body.leases:
            if body.call == "renew":
                flags.append(table.leases.renew(worker, number, now, body.seconds or None) > 0.0)
            else:
                flags.append(table.leases.release(worker, number))
        return self._reply(table, flags=bytes(flags), done=sum(flags), is_saved=body.call == "renew")

    def _answer(self, table: PromptTable, body: messages.Answers, data: memoryview) -> Reply:
        _check_size([piece.bytes for piece in body.pieces], data)
        rows = [table.book.find((piece.dataset, piece.epoch, piece.index)) for piece in body.pieces]
        if body.call != "fail":
            table.make_room(len(data) + PIECE_BYTES * len(rows))
        pieces, begin = list[Packed](), 0
        for piece in body.pieces:  # check all pieces before the first one is stored
            part = data[begin : begin + piece.bytes]
            begin += piece.bytes
            if body.call == "answer":
                self._check_version(table, rows[len(pieces)], piece.version)
            pieces.append(NOTHING if body.call == "fail" else checked(table.schema, piece.columns, piece.lengths, part))
        flags, taken = bytearray(), dict[Key, PromptRow]()
        try:
            for row, sent, columns in zip(rows, body.pieces, pieces, strict=True):
                if body.call == "fail":
                    outcome = table.fail(row, sent.lease, sent.answer, sent.failed, sent.is_again)
                elif body.call == "amend":
                    outcome = table.amend(row, sent.answer, columns)
                else:
                    outcome = table.answer(
                        row, sent.lease, sent.answer, columns, piece=sent.piece, is_last=sent.is_last,
                        version=sent.version,
                    )  # fmt: skip
                    if outcome == "taken":
                        taken[row.key] = row
                flags.append(OUTCOMES[outcome])
        finally:  # pieces before a refused piece count
            for row in taken.values():
                table.update_state(row)
        return self._reply(table, flags=bytes(flags), done=flags.count(0))

    def _check_version(self, table: PromptTable, row: PromptRow, version: int) -> None:
        lag = table.book.rules.max_model_lag
        if lag is not None and version == 0 and not row.is_evaluation:
            text = f"max_model_lag={lag} needs each answer's model version, which is 0: pass version= to answer()"
            raise ProtocolError("value", text)

    # GROUPS

    def _add(self, table: PromptTable, body: messages.Groups, data: memoryview) -> Reply:
        sizes = [each.bytes for each in body.new]
        _check_size(sizes, data)
        ends = itertools.accumulate(sizes)
        payloads = [bytes(data[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        keys = [(body.dataset, body.epoch, each.index) for each in body.new]
        facts: dict[str, Any] = {"is_evaluation": body.is_evaluation, "tags": body.tags}
        new = table.add(keys, payloads, priority=body.priority, **facts)
        return self._reply(table, flags=bytes(new), done=sum(new))

    def _order(self, table: PromptTable, body: messages.Groups) -> Reply:
        if body.call == "known":
            return self._reply(table, flags=bytes(map(table.book.was_added, _keys_of(body))), is_saved=True)
        return self._reply(table, done=ORDERS[body.call](table, body) or 0)

    def _draw(self, table: PromptTable, body: messages.Groups, client: bytes, now: float) -> Reply:
        facts: dict[str, Any] = {"wanted": body.wanted, "replay": body.replay, "plan": body.plan}
        page = self._page(client)
        if body.replay and not table.book.rules.replay_limit:
            text = f"replay={body.replay:g}, but replay_limit of this table is 0: it keeps no committed groups"
            raise ProtocolError("value", f"{text}. Draw with replay=0.0, or set Table(replay_limit=...)")
        if body.after is None:
            self._check_drawn(table, body, client)
        drawn = table.draw(body.step, body.count, body.session, is_last=body.is_last, **facts)
        plan = table.plans.get(body.step)
        if drawn is None:
            why = draw_wait_reason(table, body.count or body.wanted, now, body.replay)
            return self._reply(table, wait=why, plan=plan, counts=_drawable(table), is_saved=body.plan is None)
        if not table.steps.is_kept(drawn):
            text = f"the columns of step {body.step} were dropped: step {table.book.facts.committed} is committed"
            raise ProtocolError("missing", text)
        keys = [*((key, None) for key in drawn.keys), *zip(drawn.replayed, drawn.importance, strict=True)]
        groups = list[messages.GroupFacts]()
        for key, importance in keys[body.after or 0 :]:
            group = _group_of(table.book.rows[key], importance)
            if not page.count_row(f"group {key}", group):
                break
            groups.append(group)
        is_whole = (body.after or 0) + len(groups) >= len(keys)
        if not is_whole and body.after is None:
            size = sum(map(encoded_bytes, (_group_of(table.book.rows[key], importance) for key, importance in keys)))
            raise too_large(f"the {len(keys)} groups of step {body.step}", size, page.tail_room, "tail_bytes", client)
        return self._reply(
            table, groups=groups, plan=plan, is_closed=drawn.is_closed, counts=_drawable(table), done=len(keys),
            is_whole=is_whole,
        )  # fmt: skip

    def _check_drawn(self, table: PromptTable, body: messages.Groups, client: bytes) -> None:
        """Raise before a draw whose reply would not fit, if the trainer does not ask for pages."""
        sizes = [encoded_bytes(_group_of(row, 1.0)) for row in table.book.ready.rows()] if body.count else []
        page = self._page(client)
        if sizes and max(sizes) * body.count > page.tail_room:
            raise too_large(f"{body.count} groups", max(sizes) * body.count, page.tail_room, "tail_bytes", client)

    # Replies

    def _page(self, client: bytes) -> ReplyPage:
        """Return an empty reply to a client, with the room that its limits leave."""
        return self._context.empty_page(client, messages.Prompted.type)

    def _reply(self, table: PromptTable, *, payload: bytes = b"", is_saved: bool = False, **fields: Any) -> Reply:
        committed = table.book.facts.committed
        facts: dict[str, Any] = {"epoch": self._context.epoch, "committed": None if committed < 0 else committed}
        is_empty = not table.book.rows and not table.book.forgotten
        body = messages.Prompted(**facts, is_over=table.is_over, is_empty=is_empty, **fields)
        return Reply(body, payload or None, until_saved=table.store.is_durable and not is_saved)

    def _pool_of(self, header: MessageHeader) -> PromptPool:
        return self._context.table(header).require_for(PromptPool, header.type.name)


def _key_of(key: messages.PromptKey) -> Key:
    return key.dataset, key.epoch, key.index


def _changed(table: PromptTable, body: messages.PromptsRequest, place: int) -> int:
    """Return the number of the newest change of the request's key in this place; 0 if its prompt is unknown."""
    row = table.book.rows.get(_key_of(body.keys[place])) if place < len(body.keys) else None
    return 0 if row is None else row.changed


def _keys_of(body: messages.Groups) -> Iterator[Key]:
    return map(_key_of, body.keys)


def _prioritise(table: PromptTable, body: messages.Groups) -> int:
    rows = [table.book.rows[key] for key in _keys_of(body) if key in table.book.rows]
    for row in rows:
        table.book.prioritise(row, body.priority)
    return len(rows)


ORDERS: Final[dict[str, Callable[[PromptTable, messages.Groups], int | None]]] = {
    "cancel": lambda table, body: table.cancel(_keys_of(body)),
    "prioritise": _prioritise,
    "finish": lambda table, body: table.finish(body.dataset, body.epoch),
    "forget": lambda table, body: table.forget(body.dataset, body.epoch),
    "shares": lambda table, body: table.book.set_shares(body.shares),
    "model": lambda table, body: table.saw_model(body.version or 0),
    "commit": lambda table, body: table.commit(body.step, body.session),
    "rewind": lambda table, body: table.rewind(-1 if body.is_before_first else body.step, body.session, body.version),
    "score": lambda table, body: table.steps.update_scores(dict(zip(_keys_of(body), body.values, strict=False))),
}
"""Calls of GROUPS that change state; they return the number of changed prompts or groups, or None."""


def _check_size(sizes: list[int], data: memoryview) -> None:
    if sum(sizes) != len(data):
        raise ProtocolError("container", f"the rows take {sum(sizes)} bytes, but the payload has {len(data)}")


def _facts_of(row: PromptRow) -> messages.PromptFacts:
    columns = [each.columns if each.is_whole or each.columns else 0 for each in row.answers]
    return messages.PromptFacts(
        *row.key, int(row.state), row.reason, row.step, row.priority, row.score, row.version, row.tokens, row.attempts,
        row.is_evaluation, row.tags, columns if row.state is not PromptState.DROPPED else [],
    )  # fmt: skip


def _lease_of(row: PromptRow, now: float, size: int, number: int | None = None) -> messages.LeasedPrompt:
    remaining = max(0.0, row.until - now)
    lease = row.lease if number is None else number
    return messages.LeasedPrompt(*row.key, lease, remaining, row.missing, row.is_evaluation, row.tags, size)


def _columns_of(
    table: PromptTable, row: PromptRow, place: int, index: int, mask: int
) -> tuple[messages.AnswerColumns, bytes]:
    """Return the description of an answer's columns for a reply, and their bytes."""
    answer, version = table.columns(row, index, mask), max(0, row.answers[index].version)
    facts = messages.AnswerColumns(place, index, version, answer.columns, list(answer.lengths), len(answer.data))
    return facts, answer.data


def _sums(answers: list[tuple[messages.AnswerColumns, bytes]]) -> tuple[list[messages.AnswerColumns], int]:
    return [facts for facts, _ in answers], sum(len(data) for _, data in answers)


def _drawable(table: PromptTable) -> dict[str, int]:
    return {"ready": len(table.book.ready), "replayable": len(table.steps.ring)}


def _group_of(row: PromptRow, importance: float | None) -> messages.GroupFacts:
    is_replayed = importance is not None
    weight = 1.0 if importance is None else importance
    return messages.GroupFacts(*row.key, row.group, row.tokens, row.version, row.score, weight, is_replayed)
