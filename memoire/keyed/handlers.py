"""Handlers for requests about rows by key: list, find, read and change rows. Pure; the pool has a lock of its own.

FIND_ROWS    tags, facts, values        CHANGE_ROWS    put, stage, clear, reset
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from memoire.errors import ProtocolError
from memoire.kinds import DEFAULTS, Body, Handler, HandlerContext, MessageHeader, Reply, ReplyPage, encoded_bytes, types

from . import messages as keyed
from .pool import KeyedPool, KeyedRow

FACTS_PER_REPLY = 8192
"""Maximum number of rows without values in a reply."""
MAX_PARTITIONS = 65536
"""Maximum number of partition names in a reply."""
HEAD_BYTES = 5
"""Bytes of the msgpack head of a long value."""
UNKNOWN = 1 << 40
"""Placeholder for the number of a row that is not written yet, as large as a real number."""


def request_handlers(context: HandlerContext) -> dict[type[Body], Handler]:
    """Return the handlers for requests about rows by key."""
    handler = KeyedHandler(context)
    return {keyed.FindRows: handler.find, keyed.ChangeRows: handler.change}


class KeyedHandler:
    """Handler of FIND_ROWS and CHANGE_ROWS."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    def _pool_of(self, header: MessageHeader) -> KeyedPool:
        """Return the pool of the requested table. Raise ProtocolError (code "table")."""
        pool: KeyedPool = (
            self._context.table(header).require_for(KeyedPool, header.type.name).pool_for_client(header.client)
        )
        return pool

    def find(self, _: float, header: MessageHeader, body: keyed.FindRows, payload: Any) -> Reply:
        """List rows, or return the facts or values of some."""
        pool, page = self._pool_of(header), self._page(header.client)
        if body.call == "tags":
            return self._list(pool, body, page)
        with self._context.requests.reserved(keyed.unpacked_size(payload)):
            keys = keyed.unpack_keys(payload)
            return (self._find if body.call == "facts" else self._values)(pool, body, keys, page)

    def _page(self, client: bytes) -> ReplyPage:
        return self._context.empty_page(client, types.KEYED_ROWS)

    def _list(self, pool: KeyedPool, body: keyed.FindRows, page: ReplyPage) -> Reply:
        of = None if body.is_everywhere else body.partition
        partitions, names = pool.partitions(of), list[str]()
        known = partitions if body.known is None else partitions[body.known :]
        for name in known[:MAX_PARTITIONS]:
            if body.known is not None and not page.count_row(f"partition {name!r}", name):
                break
            names.append(name)
        is_whole, after, rows = len(names) == len(known), body.after, list[keyed.RowFacts]()
        for partition, key, row in pool.walk(of, body.after):
            facts = _facts(partition, key, row)
            if len(rows) == FACTS_PER_REPLY or not page.count_row(f"row {key!r}", payload=encoded_bytes(facts)):
                is_whole = False
                break
            rows.append(facts)
            after = facts.number
        return self._reply(pool, rows, after=after, is_whole=is_whole, partitions=names)

    def _find(self, pool: KeyedPool, body: keyed.FindRows, keys: Sequence[str], page: ReplyPage) -> Reply:
        rows, held = list[keyed.RowFacts](), pool.find(body.partition, keys)
        for place in range(body.after, len(keys)):
            key, row = keys[place], held[place]
            facts = None if row is None else _facts(body.partition, key, row)
            if facts is not None and not page.count_row(f"row {key!r}", payload=encoded_bytes(facts)):
                if body.known is None:
                    raise page.too_large_refusal(f"{len(keys)} rows without values", encoded_bytes(facts))
                return self._reply(pool, rows, after=place, is_whole=False)
            if facts is not None:
                rows.append(facts)
        return self._reply(pool, rows)

    def _values(self, pool: KeyedPool, body: keyed.FindRows, keys: Sequence[str], page: ReplyPage) -> Reply:
        rows, held = list[keyed.RowValues](), pool.find(body.partition, keys)
        first = held[body.after] if body.after < len(held) else None
        version = 0 if first is None else first.version
        known = body.known or 0 if version == body.version else 0
        for key, row in itertools.islice(zip(keys, held, strict=True), body.after, None):
            fields = dict(itertools.islice(_chosen(row, body.fields).items(), known, None))
            values = keyed.RowValues(row is not None, list(row.fields) if row else [], fields)
            size = _size_of(values)
            if body.known is not None and page.is_empty and size > page.most_payload:
                part = _part_of(key, values, page)
                known += len(part.fields)
                return self._reply(pool, [part], after=body.after, known=known, version=version, is_whole=False)
            if not page.count_row(f"row {key!r}", payload=size):
                return self._reply(pool, rows, after=body.after + len(rows), version=version, is_whole=False)
            rows.append(values)
            known = 0
        return self._reply(pool, rows, version=version)

    def change(self, now: float, header: MessageHeader, body: keyed.ChangeRows, payload: Any) -> Reply:
        """Write or delete rows, or store a piece of an upload."""
        pool = self._pool_of(header)
        pool.expire_uploads(now)
        written = list[keyed.RowFacts]()
        if body.call == "stage":
            piece = memoryview(b"" if payload is None else payload).cast("B")
            pool.append_upload_piece(header.client, body.upload, body.offset, piece, now)
        elif body.call == "reset":
            pool.reset()
        else:
            with self._context.requests.reserved(keyed.unpacked_size(payload)):
                if body.call == "clear":
                    pool.remove(body.partition, keyed.unpack_keys(payload))
                else:
                    written = self._put(pool, header.client, body, keyed.unpack_puts(payload))
        return self._reply(pool, written)

    def _put(
        self, pool: KeyedPool, client: bytes, body: keyed.ChangeRows, rows: list[keyed.PutRow]
    ) -> list[keyed.RowFacts]:
        self._check(pool, client, body.partition, rows)
        written = pool.put(body.partition, rows, (client, body.upload))
        if body.upload:
            pool.discard_upload(client, body.upload)
        return [_facts(body.partition, row.key, new) for row, new in zip(rows, written, strict=True)]

    def _check(self, pool: KeyedPool, client: bytes, partition: str, changes: Sequence[keyed.PutRow]) -> None:
        """Raise ProtocolError for rows that would fit into no reply, before any row is written.

        Raises:
            ProtocolError: (code "too_large") too many fields or tags for a message, or a value or reply larger than
                one.
        """
        # All clients can read the rows, also clients with the default limits.
        page, most = self._page(client), min(self._context.limits.message_bytes, DEFAULTS.message_bytes)
        for change, row in zip(changes, pool.find(partition, [each.key for each in changes]), strict=True):
            tags = {**(row.tags if row else {}), **change.tags}
            fields = dict.fromkeys([*(row.fields if row else ()), *change.sizes])
            if max(len(tags), len(fields)) > keyed.MAX_FIELDS:
                count = max(len(tags), len(fields))
                text = f"row {change.key!r} would have {count} fields or tags; the limit is {keyed.MAX_FIELDS}"
                raise ProtocolError("too_large", text)
            for name, length in change.sizes.items():
                size = length + encoded_bytes([list(fields), name]) + HEAD_BYTES
                if size > most:
                    text = f"field {name!r} of row {change.key!r} makes a reply of {size} bytes; the limit is {most} "
                    raise ProtocolError("too_large", f"{text}(message_bytes of this server). Store it in parts")
            facts = keyed.RowFacts(partition, change.key, UNKNOWN, tags, list(fields), change.made)
            if (size := encoded_bytes(facts) + HEAD_BYTES) > most:
                text = f"tags and names of row {change.key!r} make a reply of {size} bytes; the limit is {most}"
                raise ProtocolError("too_large", f"{text} (message_bytes)")
            if not page.count_row(f"row {change.key!r}", payload=encoded_bytes(facts)):
                raise page.too_large_refusal(f"the reply to {len(changes)} written rows", encoded_bytes(facts))

    def _reply(
        self, pool: KeyedPool, rows: list[Any], *, is_whole: bool = True, partitions: Sequence[str] = (), **cursor: int
    ) -> Reply:
        held, size = pool.held
        facts: dict[str, Any] = {"partitions": list(partitions), "rows": held, "bytes": size, **cursor}
        reply = keyed.KeyedRows(epoch=self._context.epoch, is_whole=is_whole, **facts)
        return Reply(reply, keyed.pack(rows) if rows else None)


def _size_of(values: keyed.RowValues) -> int:
    """Return the maximum bytes of a row's values in a message."""
    size = (1 + len(values.fields)) * HEAD_BYTES + sum(map(len, values.fields.values()))
    return size + encoded_bytes([values.names, list(values.fields)])


def _part_of(key: str, values: keyed.RowValues, page: ReplyPage) -> keyed.RowValues:
    """Return as many of a row's values as fit on a page, at least one. Raise ProtocolError if no value ever fits."""
    part = keyed.RowValues(values.is_there, values.names, {})
    for name, value in values.fields.items():
        larger = keyed.RowValues(values.is_there, values.names, part.fields | {name: value})
        if part.fields and _size_of(larger) > page.payload_room:
            break
        part = larger
    page.count_row(f"field {next(iter(part.fields), '')!r} of row {key!r}", payload=_size_of(part))
    return part


def _chosen(row: KeyedRow | None, names: list[str]) -> dict[str, bytes]:
    if row is None:
        return {}
    held = dict(row.fields)
    return {name: held[name] for name in names if name in held} if names else held


def _facts(partition: str, key: str, row: KeyedRow) -> keyed.RowFacts:
    return keyed.RowFacts(partition, key, row.number, dict(row.tags), list(row.fields), row.made)
