"""Calls for rows by key: the choice of a key's server, and the division of rows into requests.

put 3,000 rows ──▶ by key 1,600 at a, 1,400 at b ──▶ requests of a message's length, long values in pieces before them
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from memoire.building import Held, checksum, text
from memoire.kinds import Body, CalledServers, CallReply, Request, Transport, Work

from . import messages as keyed

T = TypeVar("T")
REQUEST_PART = 0.75
"""Maximum part of `limits.tuning.request_bytes` for the rows of a request."""
KEYS_PER_REQUEST = 8192
PASSING_TIMEOUT = 120.0
"""Seconds for which refused rows are retried at a full server; longer than an upload of a dead client is kept."""


@dataclass(slots=True)
class _Request:
    """Rows of one request, and the upload that precedes the request in pieces."""

    rows: list[keyed.PutRow] = field(default_factory=list)
    size: int = 0
    upload: bytearray = field(default_factory=bytearray)


class KeyedCalls:
    """Calls that read and write rows by key. Thread-safe.

    Args:
        homes: Addresses of the servers, or the name of the only one. Each key belongs to one server, so all clients
            must name the same servers.
    """

    def __init__(self, transport: Transport, homes: Sequence[str]) -> None:
        self._transport, self._servers = transport, CalledServers(transport, keyed.KeyedRows)
        self._homes = tuple(sorted(set(homes)))
        self._hashes = {home: checksum(home.encode()) for home in self._homes}
        self._uploads, self._making = itertools.count(1), threading.Lock()
        self._newest_made = 0  # creation time of the newest written row, in microseconds; times never decrease

    def put(self, partition: str, rows: Sequence[keyed.PutRow]) -> list[keyed.RowFacts]:
        """Write rows; return their facts in the same order.

        Raises:
            Refused: a server is full (code "full"), or a row is too large; rows at other servers may be written.
            MemoireTimeout: a server does not answer.
        """
        with Held(self._making):
            first = max(time.time_ns() // 1000, self._newest_made + 1)
            self._newest_made = first + len(rows)
        names = [row.key for row in rows]
        return self._over(
            partition,
            names,
            lambda places: [
                self._put(partition, request)
                for request in self._requests([(first + place, rows[place]) for place in places])
            ],
        )

    def facts(self, partition: str, names: Sequence[str]) -> list[keyed.RowFacts]:
        """Return the facts of the existing rows of these keys, in the same order."""
        works = [
            (home, self._facts(partition, some))
            for home, places in self.by_home(partition, names).items()
            for some in _some([names[place] for place in places], KEYS_PER_REQUEST)
        ]
        rows_by_key = {row.key: row for rows in self._done(works) for row in rows}
        return [rows_by_key[name] for name in names if name in rows_by_key]

    def values(self, partition: str, names: Sequence[str], fields: Sequence[str] = ()) -> list[keyed.RowValues]:
        """Return the values of these fields, or of all fields if empty, for each key in the same order."""
        return self._over(
            partition,
            names,
            lambda places: [
                self._values(partition, some, fields)
                for some in _some([names[place] for place in places], KEYS_PER_REQUEST)
            ],
        )

    def rows(self, partition: str | None = None) -> dict[str, list[keyed.RowFacts]]:
        """Return the facts of rows by partition, of one or of all, in the order of creation. With one server the order
        is by number, with several servers by the writers' clocks.
        """
        rows_of: dict[str, list[keyed.RowFacts]] = {}
        for names, rows in self._done([(home, self._list(partition)) for home in self._homes]):
            for name in names:
                rows_of.setdefault(name, [])
            for row in rows:
                rows_of.setdefault(row.partition, []).append(row)
        if len(self._homes) > 1:  # each server numbers its own rows
            rows_of = {name: sorted(rows, key=lambda row: (row.made, row.number)) for name, rows in rows_of.items()}
        return rows_of

    def clear(self, partition: str, names: Sequence[str]) -> None:
        """Delete rows; keys without rows are ignored."""
        body = keyed.ChangeRows(call="clear", partition=partition)
        self._done(
            [
                (home, _one(body, keyed.pack(some)))
                for home, places in self.by_home(partition, names).items()
                for some in _some([names[place] for place in places], KEYS_PER_REQUEST)
            ]
        )

    def reset(self) -> None:
        """Delete all rows of all servers."""
        self._done([(home, _one(keyed.ChangeRows(call="reset"))) for home in self._homes])

    def by_home(self, partition: str, names: Sequence[str]) -> dict[str, list[int]]:
        """Return the places of the keys in the call, by the server with the highest hash for partition and key."""
        text("partition_id", partition)
        for name in names:
            text("keys", name)
        if len(self._homes) == 1:
            return {self._homes[0]: list(range(len(names)))}
        places_by_home: dict[str, list[int]] = {}
        for place, name in enumerate(names):
            content = f"{partition}\0{name}".encode()
            best = max(self._homes, key=lambda home: checksum(content, self._hashes[home]))
            places_by_home.setdefault(best, []).append(place)
        return places_by_home

    # Requests

    def _done(self, works: Sequence[tuple[str, Work[T]]]) -> list[T]:
        self._transport.table(self._transport.now() + self._transport.limits.request_timeout)
        return self._servers.run_generators(works, PASSING_TIMEOUT, self._transport.limits.request_timeout)

    def _over(
        self, partition: str, names: Sequence[str], works_of: Callable[[list[int]], Sequence[Work[list[T]]]]
    ) -> list[T]:
        """Run the works of each server for its keys; return the results in the order of the keys."""
        by_home = self.by_home(partition, names)
        works = [(home, work) for home, places in by_home.items() for work in works_of(places)]
        rows = iter([row for part in self._done(works) for row in part])
        results = {place: row for places in by_home.values() for place, row in zip(places, rows, strict=False)}
        return [results[place] for place in range(len(names))]

    def _requests(self, rows: Sequence[tuple[int, keyed.PutRow]]) -> list[_Request]:
        """Divide rows with creation times into requests of limited size. Larger values are uploaded first."""
        most, requests = self._most, [_Request()]
        for made_at, row in rows:
            inline, long = dict(row.fields), list[tuple[str, bytes]]()
            while inline and sum(map(len, inline.values())) > most:
                name = max(inline, key=lambda each: len(inline[each]))
                long.append((name, inline.pop(name)))
            size = sum(map(len, inline.values())) + sum(map(len, row.tags.values())) + len(row.key) + 64
            if requests[-1].rows and requests[-1].size + size > most:
                requests.append(_Request())
            staged = _staged(requests[-1].upload, long)
            requests[-1].rows.append(msgspec.structs.replace(row, fields=inline, staged=staged, made=made_at))
            requests[-1].size += size
        return [request for request in requests if request.rows]

    @property
    def _most(self) -> int:
        return int(self._transport.limits.tuning.request_bytes * REQUEST_PART)

    def _put(self, partition: str, request: _Request) -> Work[list[keyed.RowFacts]]:
        upload = next(self._uploads) if request.upload else 0
        for offset in range(0, len(request.upload), self._most):
            body = keyed.ChangeRows(call="stage", upload=upload, offset=offset)
            yield Request(body, bytes(request.upload[offset : offset + self._most]))
        change = keyed.ChangeRows(call="put", partition=partition, upload=upload)
        reply = yield Request(change, keyed.pack(request.rows))
        return keyed.unpack_facts(_payload(reply))

    def _facts(self, partition: str, names: Sequence[str]) -> Work[list[keyed.RowFacts]]:
        rows, after, is_whole, content = list[keyed.RowFacts](), 0, False, keyed.pack(names)
        while not is_whole:
            body = keyed.FindRows(call="facts", partition=partition, after=after, known=0)
            reply = yield Request(body, content)
            rows += keyed.unpack_facts(_payload(reply))
            after, is_whole = reply.body.after, reply.body.is_whole
        return rows

    def _values(self, partition: str, names: Sequence[str], fields: Sequence[str]) -> Work[list[keyed.RowValues]]:
        rows, reading, content = list[keyed.RowValues](), keyed.ValuesReading(partition, fields), keyed.pack(names)
        while not reading.is_whole:
            reply = yield Request(reading.request, content)
            rows += reading.take(reply.body, _payload(reply))
        return rows

    def _list(self, partition: str | None) -> Work[tuple[list[str], list[keyed.RowFacts]]]:
        names, rows, after, is_whole = list[str](), list[keyed.RowFacts](), 0, False
        while not is_whole:
            body = keyed.FindRows(
                call="tags", partition=partition or "", is_everywhere=partition is None, after=after, known=len(names)
            )
            reply = yield Request(body)
            rows += keyed.unpack_facts(_payload(reply))
            names += reply.body.partitions
            after, is_whole = reply.body.after, reply.body.is_whole
        return names, rows


def _one(body: Body, payload: bytes | None = None) -> Work[None]:
    yield Request(body, payload)


def _payload(reply: CallReply) -> memoryview | None:
    return reply.payload if len(reply.payload) else None


def _some(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + most] for start in range(0, len(items), most))


def _staged(upload: bytearray, long: Sequence[tuple[str, bytes]]) -> list[keyed.StagedValue]:
    values = []
    for name, value in long:
        values.append(keyed.StagedValue(name, len(upload), len(value)))
        upload += value
    return values
