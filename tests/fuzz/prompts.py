"""Requests about prompts and keyed rows: any row of such messages leaves the ledger consistent.

The bytes are decisions (see `choices`): up to twenty messages of a few clients. At the end the ledger's invariants
hold, the counts of states add up, and the saved rows restore an equal table.
"""

import random

import msgspec
import numpy as np

from fuzz.choices import Choices
from memoire.errors import ProtocolError
from memoire.keyed import messages as keyed
from memoire.keyed.pool import KeyedPool
from memoire.limits import Limits
from memoire.prompts import messages as prompt_messages
from memoire.prompts.pool import PromptPool
from memoire.prompts.rows import PromptState
from memoire.prompts.table import counts_of
from memoire.server.dispatch import Dispatcher
from memoire.tables.table import Table, Tables
from memoire.wire import messages
from memoire.wire.frames import encode, parse, table_number
from memoire.wire.frames import reply as encode_reply

REACHED = {"both"}
LIMITS = Limits.of(message_bytes=1 << 16, request_bytes=1 << 15)
TABLE = Table(
    {"tokens": (np.int32, (None,)), "logprob": (np.float32, (None,)), "reward": np.float32}, storage="prompts",
    group=2, at_least=1, attempts=2, keep=1, replay_limit=2, score="variance", max_model_lag=2,
)  # fmt: skip
CLIENTS = (b"a" * 16, b"b" * 16)
SESSIONS = ("one", "one", "one", "two", "three")
ORDERS = (
    "add", "add", "draw", "draw", "draw", "commit", "rewind", "finish", "cancel", "prioritise", "forget", "shares",
    "model", "score", "known",
)  # fmt: skip


def seeds() -> list[bytes]:
    rng = random.Random(1)
    return [rng.randbytes(1500) for _ in range(32)]


def _key(choices: Choices) -> tuple[str, int, int]:
    return choices.pick(("d", "d", "e")), choices.below(2), choices.below(6)


def _keys(choices: Choices) -> list[prompt_messages.PromptKey]:
    return [prompt_messages.PromptKey(*_key(choices)) for _ in range(choices.below(4))]


def _add(choices: Choices) -> tuple[prompt_messages.Groups, bytes]:
    new = [prompt_messages.NewPrompt(choices.below(6), choices.below(9)) for _ in range(choices.below(5))]
    size = sum(each.bytes for each in new) + (not choices.below(16))
    dataset, epoch, _ = _key(choices)
    facts = {"is_evaluation": not choices.below(6), "priority": choices.real(), "tags": {"kind": choices.text(20)}}
    return prompt_messages.Groups(call="add", dataset=dataset, epoch=epoch, new=new, **facts), bytes(size)


def _order(choices: Choices) -> tuple[prompt_messages.Groups, bytes | None]:
    call = choices.pick(ORDERS)
    if call == "add":
        return _add(choices)
    dataset, epoch, _ = _key(choices)
    keys, plan = _keys(choices), None
    if call == "draw" and not choices.below(4):
        plan = prompt_messages.StepPlan(choices.below(3), {choices.pick(("home", "b")): choices.below(4)})
    body = prompt_messages.Groups(
        call=call, dataset=dataset, epoch=epoch, keys=keys, values=[choices.real() for _ in keys], plan=plan,
        session=choices.pick(SESSIONS), step=choices.below(6), is_before_first=not choices.below(4),
        count=choices.below(4), wanted=choices.below(8), replay=choices.pick((0.0, 0.0, 0.5, 1.0)),
        is_last=not choices.below(4), version=choices.pick((None, 0, 1, 5, 2**53 - 1)), priority=choices.real(),
        shares={choices.pick(("d", "e")): choices.real(0.0) for _ in range(choices.below(3))},
    )  # fmt: skip
    return body, None


def _lease(choices: Choices, pool: PromptPool) -> int:
    with pool.locked() as table:
        known = [row.lease for rows in table.leases.held().values() for row in rows]
    return choices.pick((*known, *known, 0, 1, 2**64 - 1))


def _work(choices: Choices, pool: PromptPool) -> tuple[prompt_messages.Answers, bytes | None]:
    call = choices.pick(("lease", "answer", "answer", "answer", "amend", "fail", "renew", "release"))
    if call == "lease":
        facts = {
            "count": 1 + choices.below(4),
            "seconds": choices.pick((0.0, 1.0, 1e9)),
            "version": choices.pick((None, 0)),
        }
        return prompt_messages.Answers(
            call=call, leases=[_lease(choices, pool) for _ in range(choices.below(3))], **facts
        ), None
    if call in ("renew", "release"):
        return prompt_messages.Answers(call=call, leases=[_lease(choices, pool) for _ in range(choices.below(3))]), None
    pieces, size = [], 0
    for _ in range(1 + choices.below(5)):
        columns, long = choices.below(9), choices.below(4)
        lengths = [long for place in range(2) if columns >> place & 1]
        own = 4 * sum(lengths) + 4 * bool(columns & 4) + (not choices.below(16))
        with pool.locked() as table:
            leased = [row for rows in table.leases.held().values() for row in rows]
        row = choices.pick((*leased, None))
        key, lease = (_key(choices), _lease(choices, pool)) if row is None else (row.key, row.lease)
        pieces.append(
            prompt_messages.AnswerPiece(
                *key, lease, choices.below(3), choices.below(2), bool(choices.below(4)), choices.below(4), columns,
                lengths, own, choices.text(20), bool(choices.below(2)),
            )
        )  # fmt: skip
        size += own
    return prompt_messages.Answers(call=call, pieces=pieces), choices.take(size).ljust(size, b"\x00") or None


def _look(choices: Choices) -> tuple[prompt_messages.PromptsRequest, bytes | None]:
    call = choices.pick(("counts", "list", "fetch", "payloads", "forget"))
    facts = {
        "states": [choices.below(9) for _ in range(choices.below(3))], "since": choices.integer(), "consumer": choices.text(20),
        "is_going_on": bool(choices.below(2)), "columns": choices.below(16), "rank": choices.below(4), "ranks": choices.below(4),
    }  # fmt: skip
    return prompt_messages.PromptsRequest(call=call, keys=_keys(choices), **facts), None


def _rows(choices: Choices) -> tuple[messages.Body, bytes | None]:
    """Return a request about keyed rows, with a list of rows or arbitrary bytes."""
    kind = choices.pick((keyed.FindRows, keyed.ChangeRows, keyed.ChangeRows))
    keys = [choices.pick(("k", "l", "m")) for _ in range(choices.below(3))]
    staged = [("f", choices.below(9), choices.below(9))] if not choices.below(4) else []
    puts = [(key, {"t": choices.take(3)}, {"f": choices.take(choices.below(30))}, staged) for key in keys]
    payload = choices.pick(
        (msgspec.msgpack.encode(keys), msgspec.msgpack.encode(puts), choices.take(choices.below(40)))
    )
    facts = {"partition": choices.pick(("p", "q", choices.text(20)))}
    if kind is keyed.ChangeRows:
        facts |= {"upload": choices.below(3), "offset": choices.pick((0, 3, 2**53 - 1))}
    return choices.struct(kind, **facts), payload or None


def _tell(dispatcher: Dispatcher, pool: PromptPool, choices: Choices) -> str:
    """Send one message as wire frames; return "answered" or "refused"."""
    make = choices.pick((_order, _order, _work, _work, _look, _rows))
    body, payload = _work(choices, pool) if make is _work else make(choices)  # type: ignore[operator]
    facts = {"client": choices.pick(CLIENTS), "sequence": choices.integer(0, 2**64 - 1), "run": 0}
    try:
        message = parse(
            encode(body, payload=payload, table=table_number("r" if make is _rows else "t"), **facts), LIMITS
        )
    except (ProtocolError, ValueError):
        return "refused"
    reply = dispatcher.answer(message)
    parse(encode_reply(message.header, reply.body, payload=reply.payload, **reply.changed))
    return "refused" if isinstance(reply.body, messages.Refusal) else "answered"


def pool_of(clock: list[float]) -> PromptPool:
    """Return an empty pool, whose leases follow this clock."""
    return PromptPool(
        TABLE.schema, TABLE.parameters, TABLE.own, capacity=12, byte_limit=2000, is_bounded=True, first=1,
        clock=lambda: clock[0],
    )  # fmt: skip


def one(data: bytes) -> str:
    """Send up to twenty messages, and check the ledger after each message."""
    choices, clock = Choices(data), [0.0]
    pool = pool_of(clock)
    pool.keep_changes()
    tables = Tables(
        {"t": TABLE, "r": Table(storage="keyed")}, lambda name, _: pool if name == "t" else KeyedPool(first=0)
    )
    dispatcher = Dispatcher(tables=tables, run="run", name="home", limits=LIMITS, clock=lambda: 1e9, epoch=1)
    verdicts, disk = set(), {}
    for _ in range(20):
        if not choices:
            break
        verdicts.add(_tell(dispatcher, pool, choices))
        clock[0] += choices.pick((0.0, 0.0, 1.0, 1e4))
        with pool.locked() as table:
            table.check_invariants()
            counts = counts_of(table.book)
            assert sum(counts.values()) == len(table.book.rows) + table.book.forgotten
        for kind, key, body in pool.take_changes():
            if body is None:
                disk.pop((kind, key), None)
            else:
                disk[kind, key] = body
    again = pool_of(clock)
    again.restore([(kind, key, body) for (kind, key), body in sorted(disk.items())])
    with pool.locked() as table, again.locked() as other:
        other.check_invariants()
        assert counts_of(other.book) == counts_of(table.book)
        assert {key: row.state for key, row in other.book.rows.items()} == {
            key: row.state for key, row in table.book.rows.items()
        }
        assert all(row.state is not PromptState.LEASED or row.until < float("inf") for row in other.book.rows.values())
    return "both" if len(verdicts) == 2 else next(iter(verdicts), "nothing")
