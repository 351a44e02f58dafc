"""Rows by key, for clients of `memoire.tq`. Pure; the rows have a lock of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memoire.pool.keyed_store import KeyedRow, KeyedStore, RowChange
from memoire.server.reply import Reply
from memoire.server.state import ServerState
from memoire.wire import keyed, messages
from memoire.wire.frames import MessageHeader

REPLY_PART = 4
"""A reply takes about this part of the bytes that a message may have."""
FACTS_PER_REPLY = 8192


class KeyedHandler:
    """Answers FIND_ROWS and CHANGE_ROWS.

    Args:
        facts_per_reply: Rows without values in one reply.
    """

    def __init__(self, state: ServerState, rows: KeyedStore, facts_per_reply: int = FACTS_PER_REPLY) -> None:
        self._state, self._rows, self._facts_per_reply = state, rows, facts_per_reply

    def find(self, _: float, header: MessageHeader, body: messages.FindRows, payload: Any) -> Reply:
        """Say what rows there are, or what some of them hold."""
        if body.call == "tags":
            return self._list(body)
        keys = keyed.unpack_keys(payload)
        found = self._rows.find(body.partition, keys)
        if body.call == "facts":
            return self._reply([_facts(body.partition, key, row) for key, row in zip(keys, found, strict=True) if row])
        return self._values(body, found)

    def _list(self, body: messages.FindRows) -> Reply:
        rows: list[keyed.RowFacts] = []
        partitions = self._rows.partitions(None if body.is_everywhere else body.partition)
        for partition, key, row in self._rows.walk(None if body.is_everywhere else body.partition, body.after):
            if len(rows) == self._facts_per_reply:
                return self._reply(rows, after=rows[-1].number, is_whole=False, partitions=partitions)
            rows.append(_facts(partition, key, row))
        return self._reply(rows, partitions=partitions)

    def _values(self, body: messages.FindRows, found: list[KeyedRow | None]) -> Reply:
        room, rows = self._state.limits.message_bytes // REPLY_PART, list[keyed.RowValues]()
        for row in found[body.after :]:
            fields = {} if row is None else _chosen(row, body.fields)
            room -= sum(len(value) for value in fields.values())
            if room < 0 and rows:
                return self._reply(rows, after=body.after + len(rows), is_whole=False)
            rows.append(keyed.RowValues(row is not None, list(row.fields) if row else [], fields))
        return self._reply(rows)

    def change(self, now: float, header: MessageHeader, body: messages.ChangeRows, payload: Any) -> Reply:
        """Write rows, or take them away."""
        self._rows.give_up(now)
        if body.call == "stage":
            self._rows.stage(header.client, body.upload, body.offset, b"" if payload is None else bytes(payload), now)
            return self._reply([])
        if body.call == "clear":
            self._rows.clear(body.partition, keyed.unpack_keys(payload))
            return self._reply([])
        if body.call == "reset":
            self._rows.reset()
            return self._reply([])
        return self._put(header.client, body, keyed.unpack_puts(payload))

    def _put(self, client: bytes, body: messages.ChangeRows, rows: list[keyed.PutRow]) -> Reply:
        changes = [
            RowChange(row.key, row.tags, {**row.fields, **self._staged(client, body, row)}, row.made) for row in rows
        ]
        written = self._rows.put(body.partition, changes)
        if body.upload:
            self._rows.unstage(client, body.upload)
        return self._reply([_facts(body.partition, row.key, made) for row, made in zip(rows, written, strict=True)])

    def _staged(self, client: bytes, body: messages.ChangeRows, row: keyed.PutRow) -> dict[str, bytes]:
        return {each.field: self._rows.staged(client, body.upload, each.start, each.bytes) for each in row.staged}

    def _reply(
        self, rows: list[Any], *, after: int = 0, is_whole: bool = True, partitions: Sequence[str] = ()
    ) -> Reply:
        held, size = self._rows.held
        said = messages.KeyedRows(
            epoch=self._state.epoch, after=after, is_whole=is_whole, partitions=list(partitions), rows=held, bytes=size
        )
        return Reply(said, keyed.pack(rows) if rows else None)


def _chosen(row: KeyedRow, names: list[str]) -> dict[str, bytes]:
    held = dict(row.fields)
    return {name: held[name] for name in names if name in held} if names else held


def _facts(partition: str, key: str, row: KeyedRow) -> keyed.RowFacts:
    return keyed.RowFacts(partition, key, row.number, dict(row.tags), list(row.fields), row.made)
