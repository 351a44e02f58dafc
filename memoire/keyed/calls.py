"""The calls of those who use rows by key: which server has a key, and requests that are no longer than a message.

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
"""A request's rows take this part of `limits.tuning.request_bytes` at most."""
KEYS_PER_REQUEST = 8192
PASSING_TIMEOUT = 120.0
"""Seconds for which what a server has no room for yet is sent again: it keeps an upload whose sender died for less."""


@dataclass(slots=True)
class _Request:
    """Rows of one request, and the bytes that come before it in pieces."""

    rows: list[keyed.PutRow] = field(default_factory=list)
    size: int = 0
    upload: bytearray = field(default_factory=bytearray)


class KeyedCalls:
    """Reads and writes rows by key. From any thread.

    Args:
        homes: What keys are shared out over: addresses of servers, or the name of the only one. Each key lies at one of
            them, so all users have to name the same ones.
    """

    def __init__(self, transport: Transport, homes: Sequence[str]) -> None:
        self._transport, self._servers = transport, CalledServers(transport, keyed.KeyedRows)
        self._homes = tuple(sorted(set(homes)))
        self._hashes = {home: checksum(home.encode()) for home in self._homes}
        self._uploads, self._making = itertools.count(1), threading.Lock()
        self._newest_made = 0  # microseconds, of the newest row that was written: none is older than one before it

    def put(self, partition: str, rows: Sequence[keyed.PutRow]) -> list[keyed.RowFacts]:
        """Write rows; returns them in this order, as they are then.

        Raises:
            Refused: a server is full (code "full"), or one of its rows is too large; rows of others may be written.
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
        """Rows of these keys that exist, in this order, without values."""
        works = [
            (home, self._facts(partition, some))
            for home, places in self.by_home(partition, names).items()
            for some in _some([names[place] for place in places], KEYS_PER_REQUEST)
        ]
        found = {row.key: row for rows in self._done(works) for row in rows}
        return [found[name] for name in names if name in found]

    def values(self, partition: str, names: Sequence[str], fields: Sequence[str] = ()) -> list[keyed.RowValues]:
        """Values of these fields (none: of all), of these keys, in this order."""
        return self._over(
            partition,
            names,
            lambda places: [
                self._values(partition, some, fields)
                for some in _some([names[place] for place in places], KEYS_PER_REQUEST)
            ],
        )

    def rows(self, partition: str | None = None) -> dict[str, list[keyed.RowFacts]]:
        """Rows without values by partition, of one or of all, in the order in which they were made: as the server has
        numbered them, or, over several servers, by the clocks of those that made them.
        """
        found: dict[str, list[keyed.RowFacts]] = {}
        for names, rows in self._done([(home, self._list(partition)) for home in self._homes]):
            for name in names:
                found.setdefault(name, [])
            for row in rows:
                found.setdefault(row.partition, []).append(row)
        if len(self._homes) > 1:  # each server has numbers of its own
            found = {name: sorted(rows, key=lambda row: (row.made, row.number)) for name, rows in found.items()}
        return found

    def clear(self, partition: str, names: Sequence[str]) -> None:
        """Take rows away; keys that do not exist are ignored."""
        body = keyed.ChangeRows(call="clear", partition=partition)
        self._done(
            [
                (home, _one(body, keyed.pack(some)))
                for home, places in self.by_home(partition, names).items()
                for some in _some([names[place] for place in places], KEYS_PER_REQUEST)
            ]
        )

    def reset(self) -> None:
        """Take all rows of all servers away."""
        self._done([(home, _one(keyed.ChangeRows(call="reset"))) for home in self._homes])

    def by_home(self, partition: str, names: Sequence[str]) -> dict[str, list[int]]:
        """Places of the keys in the call, by the server that has them: the one with the highest hash of both."""
        text("partition_id", partition)
        for name in names:
            text("keys", name)
        if len(self._homes) == 1:
            return {self._homes[0]: list(range(len(names)))}
        found: dict[str, list[int]] = {}
        for place, name in enumerate(names):
            content = f"{partition}\0{name}".encode()
            best = max(self._homes, key=lambda home: checksum(content, self._hashes[home]))
            found.setdefault(best, []).append(place)
        return found

    # Requests

    def _done(self, works: Sequence[tuple[str, Work[T]]]) -> list[T]:
        self._transport.table(self._transport.now() + self._transport.limits.request_timeout)
        return self._servers.done(works, PASSING_TIMEOUT, self._transport.limits.request_timeout)

    def _over(
        self, partition: str, names: Sequence[str], works_of: Callable[[list[int]], Sequence[Work[list[T]]]]
    ) -> list[T]:
        """What each server says of the keys that it has, in the order of the keys."""
        by_home = self.by_home(partition, names)
        works = [(home, work) for home, places in by_home.items() for work in works_of(places)]
        rows = iter([row for part in self._done(works) for row in part])
        found = {place: row for places in by_home.values() for place, row in zip(places, rows, strict=False)}
        return [found[place] for place in range(len(names))]

    def _requests(self, rows: Sequence[tuple[int, keyed.PutRow]]) -> list[_Request]:
        """Rows, each with the time when it was made, in requests of a message's length. A longer value comes before
        its request, in pieces.
        """
        most, made = self._most, [_Request()]
        for made_at, row in rows:
            inline, long = dict(row.fields), list[tuple[str, bytes]]()
            while inline and sum(map(len, inline.values())) > most:
                name = max(inline, key=lambda each: len(inline[each]))
                long.append((name, inline.pop(name)))
            size = sum(map(len, inline.values())) + sum(map(len, row.tags.values())) + len(row.key) + 64
            if made[-1].rows and made[-1].size + size > most:
                made.append(_Request())
            staged = _staged(made[-1].upload, long)
            made[-1].rows.append(msgspec.structs.replace(row, fields=inline, staged=staged, made=made_at))
            made[-1].size += size
        return [request for request in made if request.rows]

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
        found, after, is_whole, content = list[keyed.RowFacts](), 0, False, keyed.pack(names)
        while not is_whole:
            body = keyed.FindRows(call="facts", partition=partition, after=after, known=0)
            reply = yield Request(body, content)
            found += keyed.unpack_facts(_payload(reply))
            after, is_whole = reply.body.after, reply.body.is_whole
        return found

    def _values(self, partition: str, names: Sequence[str], fields: Sequence[str]) -> Work[list[keyed.RowValues]]:
        found, reading, content = list[keyed.RowValues](), keyed.ValuesReading(partition, fields), keyed.pack(names)
        while not reading.is_whole:
            reply = yield Request(reading.request, content)
            found += reading.take(reply.body, _payload(reply))
        return found

    def _list(self, partition: str | None) -> Work[tuple[list[str], list[keyed.RowFacts]]]:
        names, found, after, is_whole = list[str](), list[keyed.RowFacts](), 0, False
        while not is_whole:
            body = keyed.FindRows(
                call="tags", partition=partition or "", is_everywhere=partition is None, after=after, known=len(names)
            )
            reply = yield Request(body)
            found += keyed.unpack_facts(_payload(reply))
            names += reply.body.partitions
            after, is_whole = reply.body.after, reply.body.is_whole
        return names, found


def _one(body: Body, payload: bytes | None = None) -> Work[None]:
    yield Request(body, payload)


def _payload(reply: CallReply) -> memoryview | None:
    return reply.payload if len(reply.payload) else None


def _some(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + most] for start in range(0, len(items), most))


def _staged(upload: bytearray, long: Sequence[tuple[str, bytes]]) -> list[keyed.StagedValue]:
    made = []
    for name, value in long:
        made.append(keyed.StagedValue(name, len(upload), len(value)))
        upload += value
    return made
