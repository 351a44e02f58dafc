"""The client of keyed rows: which server has a key, and requests that are no longer than a message.

Its thread has one channel to each server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tensordict import TensorDict

from memoire.building import Given, Held, Keys, checksum, text
from memoire.errors import Closed, MemoireError, ProtocolError, Refused
from memoire.kinds import (
    PASSING,
    Answer,
    Channel,
    Context,
    Message,
    Node,
    Worker,
    addresses,
    close_at_exit,
    messages,
    open_channels,
    shared_context,
)
from memoire.limits import Limits
from memoire.tables.keyed import messages as keyed

from . import values
from .metadata import BatchMeta

Result = TypeVar("Result")
REQUEST_PART = 0.75
"""A request's rows take this part of `limits.tuning.request_bytes` at most."""
KEYS_PER_REQUEST = 8192
IN_FLIGHT = 4
"""Requests of one call on their way to one server."""
PASSING_TIMEOUT = 120.0
"""Seconds for which what a server has no room for yet is sent again: it keeps an upload whose sender died for less."""
PAUSE, MOST_PAUSE = 0.02, 1.0
"""Seconds before it is sent again at first; doubles up to the most."""


class KeyedThread:
    """Owns the channels.

    Args:
        client: 16 bytes, the id of whoever asks.

    Raises:
        EndpointError: an address is malformed.
        KeyFileError: the keys cannot be used.
    """

    def __init__(
        self, urls: Sequence[str], *, client: bytes, limits: Limits, keys: Keys | None, context: Context
    ) -> None:
        self._limits = limits
        self._worker = Worker("memoire-tq", self._turn, self._next_time, self._at_end)
        self._channels: dict[str, Channel] = {}
        facts: dict[str, Any] = {"client": client, "limits": limits, "keys": keys, "numbers": itertools.count(1)}
        open_channels(self._channels, urls, self._worker, context, **facts)

    def start(self) -> None:
        """Begin."""
        self._worker.start()

    def ask(self, url: str, body: messages.Body, payload: Any = None) -> Future[Message]:
        """Send a request to one server. From any thread.

        The future has its reply, or MemoireTimeout after `limits.request_timeout`, or why it was refused.
        """
        made: Future[Message] = Future()

        def finish(answer: Answer) -> None:
            if made.cancelled():
                return
            if isinstance(answer, MemoireError):
                made.set_exception(answer)
            elif isinstance(answer.body, keyed.KeyedRows | messages.Welcome):
                made.set_result(answer)
            else:
                made.set_exception(Refused(url, "unexpected", f"{answer.type.name} came"))

        deadline = time.monotonic() + self._limits.request_timeout
        self._worker.post(lambda: self._send(url, body, finish, deadline, payload))
        return made

    def _send(self, url: str, body: messages.Body, finish: Any, deadline: float, payload: Any) -> None:
        try:
            self._channels[url].ask(body, finish, deadline, payload=payload)
        except (MemoireError, ValueError) as error:
            finish(ProtocolError("value", str(error)))

    def stop(self, timeout: float) -> bool:
        """End; False if it has not ended in these seconds."""
        return self._worker.stop(timeout)

    # ------------------------------------------------------------------------- from here on: inside of the thread

    def _next_time(self) -> float:
        return min(channel.next_time() for channel in self._channels.values())

    def _turn(self, ready: dict[object, int]) -> None:
        for channel in self._channels.values():
            channel.turn(ready)

    def _at_end(self) -> None:
        for channel in self._channels.values():
            channel.close(Closed("this client"))


@dataclass(frozen=True, slots=True)
class Row:
    """A row to be written, encoded."""

    key: str
    tags: Mapping[str, bytes]
    fields: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Stored:
    """A row as it is after it was written, or when it was listed."""

    partition: str
    key: str
    number: int
    tags: dict[str, Any]
    fields: tuple[str, ...]
    made: int


@dataclass(frozen=True, slots=True)
class Values:
    """What a row holds of the fields that were asked for."""

    values: dict[str, Any]
    names: tuple[str, ...]
    """All of its fields."""


@dataclass(slots=True)
class _Request:
    """Rows of one request, and the bytes that come before it in pieces."""

    rows: list[keyed.PutRow] = field(default_factory=list)
    size: int = 0
    upload: bytearray = field(default_factory=bytearray)


class KeyedClient(Node):
    """Reads and writes keyed rows. Coroutines run on a loop of the client's own; `wait` and `on_any_loop` call them.

    Args:
        servers: Addresses for requests. Each key lies at one of them, so all clients have to name the same ones.
        keys: This process' keys folder; None takes $MEMOIRE_KEYS.

    Raises:
        EndpointError: an address is malformed.
        KeyFileError: the keys cannot be used.
    """

    CALLED = "this client of keyed rows"

    def __init__(self, servers: Sequence[str], *, limits: Limits | None = None, keys: Given = None) -> None:
        self.servers = tuple(sorted(set(servers)))
        """Addresses of the servers."""
        for address in self.servers:
            addresses.check(address, "connect to")
        self._limits, self._close_lock, self._pid = limits or Limits(), threading.Lock(), os.getpid()
        self._uploads = itertools.count(1)
        self._newest_made = 0  # microseconds, of the newest row that was written: none is older than one before it
        self._hashes = {url: checksum(url.encode()) for url in self.servers}
        self._thread = KeyedThread(
            self.servers,
            client=uuid.uuid4().bytes,
            limits=self._limits,
            keys=Keys.of(keys, "actor"),
            context=shared_context(),
        )
        self._loop = asyncio.new_event_loop()
        self._runner = threading.Thread(target=self._run, name="memoire-tq-loop", daemon=True)
        self.closed = False
        """Whether it was closed."""
        self._thread.start()
        self._runner.start()
        close_at_exit(self)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    # How coroutines are called

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and wait for its result. From any thread that is not the client's own."""
        if self.closed:
            work.close()
            raise Closed("this client of keyed rows")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def on_any_loop(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the client's loop and await it on the caller's."""
        if self.closed:
            work.close()
            raise Closed("this client of keyed rows")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self, timeout: float | None = None) -> bool:
        """End; requests that are open fail. False if its threads have not ended in time."""
        patience = self._limits.close_timeout if timeout is None else timeout
        with Held(self._close_lock):
            self.closed = True
            ended = self._thread.stop(patience)
            with contextlib.suppress(RuntimeError):  # it has stopped
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._runner.join(patience)
            return ended and not self._runner.is_alive()

    # Rows by number, as TransferQueue's client has them and verl's workers ask for them. From any event loop

    async def async_kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """Numbers and tags of rows, and the fields that all of them have; keys that do not exist are left out.

        Raises:
            ValueError: there is no key, or `create` is True: `kv_put` and `kv_batch_put` make rows.
        """
        if create or not keys:
            raise ValueError("Received an empty list as keys." if not keys else "create=True: make rows by tq.kv_put.")
        return await self.on_any_loop(self._meta(partition_id, [keys] if isinstance(keys, str) else keys))

    async def async_kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str]:
        """The keys of rows, by their numbers. Raises RuntimeError if a number has no row any more."""
        numbers = [global_indexes] if isinstance(global_indexes, int) else global_indexes
        return await self.on_any_loop(self._keys(partition_id, numbers))

    async def async_get_data(self, metadata: BatchMeta) -> TensorDict:
        """The fields of a batch that `async_kv_retrieve_meta` gave, as `kv_batch_get` returns them.

        Raises:
            ValueError: its rows are of several partitions.
            RuntimeError: one of its rows, or of its fields, is not there any more.
        """
        if not metadata.size or not metadata.field_names:
            return TensorDict({}, batch_size=0)
        return await self.on_any_loop(self._data(metadata))

    async def async_put(
        self, data: TensorDict, metadata: BatchMeta, data_parser: values.Parser | None = None
    ) -> BatchMeta:
        """Write fields to the rows of a batch that `async_kv_retrieve_meta` gave; the batch, which has them then.

        Raises:
            ValueError: the batch is empty, has rows of several partitions, or another number of rows than the data.
            RuntimeError: one of its rows is not there any more.
            NotPlain, Refused: see `kv_batch_put`.
        """
        if not metadata.size or len(data) != metadata.size:
            raise ValueError(f"metadata has {metadata.size} rows, and the data {len(data)}")
        columns = values.columns_of(data) if data_parser is None else values.parsed(data, data_parser)
        return await self.on_any_loop(self._put_numbered(columns, metadata))

    async def _meta(self, partition: str, names: Sequence[str]) -> BatchMeta:
        rows = await self.facts(partition, names)
        shared = set.intersection(*(set(row.fields) for row in rows)) if rows else set()
        numbers, tags = [self._number(row) for row in rows], [row.tags for row in rows]
        schema: dict[str, dict[str, Any]] = {name: {} for name in sorted(shared)}
        return BatchMeta(numbers, [partition] * len(rows), schema, [1] * len(rows), custom_meta=tags)

    async def _keys(self, partition: str, numbers: Sequence[int]) -> list[str]:
        known = {self._number(row): row.key for row in (await self.rows(partition)).get(partition, [])}
        if any(number not in known for number in numbers):
            raise RuntimeError("Some global_indexes have no corresponding keys!")
        return [known[number] for number in numbers]

    async def _data(self, metadata: BatchMeta) -> TensorDict:
        partition, names = _partition_of(metadata), metadata.field_names
        keys = await self._keys(partition, metadata.global_indexes)
        rows = [row.values if row else {} for row in await self.values(partition, keys, names)]
        for key, row in zip(keys, rows, strict=True):
            if missing := [name for name in names if name not in row]:
                raise RuntimeError(f"row {key!r} of {partition!r} has no {missing} any more: it was cleared meanwhile")
        return values.batch_of({name: [row[name] for row in rows] for name in names}, len(rows))

    async def _put_numbered(self, columns: Mapping[str, Sequence[Any]], metadata: BatchMeta) -> BatchMeta:
        partition = _partition_of(metadata)
        keys = await self._keys(partition, metadata.global_indexes)
        made = [encoded({name: values[place] for name, values in columns.items()}) for place in range(len(keys))]
        tags = [encoded(each) for each in metadata.custom_meta]
        await self.put(partition, [Row(*parts) for parts in zip(keys, tags, made, strict=True)])
        metadata.field_schema.update({name: {} for name in columns})
        metadata.production_status[:] = 1
        return metadata

    def _number(self, row: Stored) -> int:
        """The number of a row among all servers."""
        (url,) = self._by_server(row.partition, [row.key])
        return row.number * len(self.servers) + self.servers.index(url)

    # What it does, as coroutines of its own loop

    async def put(self, partition: str, rows: Sequence[Row]) -> list[Stored]:
        """Write rows; returns them in this order, as they are then."""
        names = [row.key for row in rows]
        first = max(time.time_ns() // 1000, self._newest_made + 1)
        self._newest_made = first + len(rows)

        def put(url: str, places: list[int]) -> Awaitable[list[Stored]]:
            return self._put(url, partition, [(first + place, rows[place]) for place in places])

        return await self._over(partition, names, put)

    async def facts(self, partition: str, names: Sequence[str]) -> list[Stored]:
        """Rows of these keys that exist, in this order, without values."""
        by_server = self._by_server(partition, names)
        made = await asyncio.gather(
            *(self._facts(url, partition, _at(names, places)) for url, places in by_server.items())
        )
        found = {row.key: row for rows in made for row in rows}
        return [found[name] for name in names if name in found]

    async def values(self, partition: str, names: Sequence[str], fields: Sequence[str]) -> list[Values | None]:
        """Values of these fields (none: of all), of these keys, in this order. None for a key that does not exist."""
        return await self._over(
            partition, names, lambda url, places: self._values(url, partition, _at(names, places), fields)
        )

    async def rows(self, partition: str | None) -> dict[str, list[Stored]]:
        """Rows without values by partition, of one or of all, in the order in which they were made: as the server has
        numbered them, or, over several servers, by the clocks of those that made them.
        """
        found: dict[str, list[Stored]] = {}
        for names, rows in await asyncio.gather(*(self._list(url, partition) for url in self.servers)):
            for name in names:
                found.setdefault(name, [])
            for row in rows:
                found.setdefault(row.partition, []).append(row)
        if len(self.servers) > 1:  # each server has numbers of its own
            found = {name: sorted(rows, key=lambda row: (row.made, row.number)) for name, rows in found.items()}
        return found

    async def clear(self, partition: str, names: Sequence[str]) -> None:
        """Take rows away; keys that do not exist are ignored."""
        for url, places in self._by_server(partition, names).items():
            for some in _some(places, KEYS_PER_REQUEST):
                body = keyed.ChangeRows(call="clear", partition=partition)
                await self._ask(url, body, keyed.pack([names[place] for place in some]))

    async def reset(self) -> None:
        """Take all rows of all servers away."""
        for url in self.servers:
            await self._ask(url, keyed.ChangeRows(call="reset"))

    async def pages(self) -> str | None:
        """Where the first server shows its metrics, as HOST:PORT; None if it has no pages."""
        answer = await asyncio.wrap_future(self._thread.ask(self.servers[0], messages.Hello(role="reader")))
        said = answer.body
        return said.pages[0] if isinstance(said, messages.Welcome) and said.pages else None

    async def _over(
        self, partition: str, names: Sequence[str], ask: Callable[[str, list[int]], Awaitable[Sequence[Any]]]
    ) -> list[Any]:
        """What each server says of the keys that it has, in the order of the keys."""
        by_server = self._by_server(partition, names)
        made = await asyncio.gather(*(ask(url, places) for url, places in by_server.items()))
        found: list[Any] = [None] * len(names)
        for places, rows in zip(by_server.values(), made, strict=True):
            for place, row in zip(places, rows, strict=True):
                found[place] = row
        return found

    # One server

    async def _put(self, url: str, partition: str, rows: Sequence[tuple[int, Row]]) -> list[Stored]:
        room = asyncio.Semaphore(IN_FLIGHT)

        async def send(request: _Request) -> list[Stored]:
            async with room:
                upload = await self._stage(url, request.upload)
                body = keyed.ChangeRows(call="put", partition=partition, upload=upload)
                _, payload = await self._ask(url, body, keyed.pack(request.rows))
            return [_stored(row) for row in keyed.unpack_facts(payload)]

        made = await asyncio.gather(*(send(request) for request in self._requests(rows)))
        return list(itertools.chain(*made))

    def _requests(self, rows: Sequence[tuple[int, Row]]) -> list[_Request]:
        """Rows, each with the time when it was made, in requests of a message's length. A longer value comes before
        its request, in pieces.
        """
        most, made = int(self._limits.tuning.request_bytes * REQUEST_PART), [_Request()]
        for made_at, row in rows:
            inline, long = dict(row.fields), list[tuple[str, bytes]]()
            while inline and sum(map(len, inline.values())) > most:
                name = max(inline, key=lambda each: len(inline[each]))
                long.append((name, inline.pop(name)))
            size = sum(map(len, inline.values())) + sum(map(len, row.tags.values())) + len(row.key) + 64
            if made[-1].rows and made[-1].size + size > most:
                made.append(_Request())
            staged = _staged(made[-1].upload, long)
            made[-1].rows.append(keyed.PutRow(row.key, dict(row.tags), inline, staged, made_at))
            made[-1].size += size
        return [request for request in made if request.rows]

    async def _stage(self, url: str, content: bytearray) -> int:
        if not content:
            return 0
        upload, piece = next(self._uploads), int(self._limits.tuning.request_bytes * REQUEST_PART)
        for offset in range(0, len(content), piece):
            body = keyed.ChangeRows(call="stage", upload=upload, offset=offset)
            await self._ask(url, body, bytes(content[offset : offset + piece]))
        return upload

    async def _facts(self, url: str, partition: str, names: Sequence[str]) -> list[Stored]:
        found: list[Stored] = []
        for some in _some(names, KEYS_PER_REQUEST):
            after, is_whole, content = 0, False, keyed.pack(some)
            while not is_whole:
                body = keyed.FindRows(call="facts", partition=partition, after=after, known=0)
                said, payload = await self._ask(url, body, content)
                found += [_stored(row) for row in keyed.unpack_facts(payload)]
                after, is_whole = said.after, said.is_whole
        return found

    async def _values(
        self, url: str, partition: str, names: Sequence[str], fields: Sequence[str]
    ) -> list[Values | None]:
        found: list[Values | None] = []
        for some in _some(names, KEYS_PER_REQUEST):
            reading, content = keyed.ValuesReading(partition, fields), keyed.pack(some)
            while not reading.is_whole:
                said, payload = await self._ask(url, reading.request, content)
                rows = reading.take(said, payload)
                found += [Values(_decoded(row.fields), tuple(row.names)) if row.is_there else None for row in rows]
        return found

    async def _list(self, url: str, partition: str | None) -> tuple[list[str], list[Stored]]:
        names, found, after, is_whole = list[str](), list[Stored](), 0, False
        while not is_whole:
            body = keyed.FindRows(
                call="tags", partition=partition or "", is_everywhere=partition is None, after=after, known=len(names)
            )
            said, payload = await self._ask(url, body)
            found += [_stored(row) for row in keyed.unpack_facts(payload)]
            names += said.partitions
            after, is_whole = said.after, said.is_whole
        return names, found

    async def _ask(self, url: str, body: messages.Body, payload: Any = None) -> tuple[keyed.KeyedRows, Any]:
        deadline, pause = time.monotonic() + PASSING_TIMEOUT, PAUSE
        while True:
            try:
                answer = await asyncio.wrap_future(self._thread.ask(url, body, payload))
                break
            except Refused as error:
                if error.code not in PASSING or time.monotonic() + pause > deadline:
                    raise
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(MOST_PAUSE, 2.0 * pause)
        said = answer.body
        assert isinstance(said, keyed.KeyedRows)
        return said, answer.payload

    def _by_server(self, partition: str, names: Sequence[str]) -> dict[str, list[int]]:
        """Places of the keys in the call, by the server that has them: the one with the highest hash of both."""
        text("partition_id", partition)
        for name in names:
            text("keys", name)
        if len(self.servers) == 1:
            return {self.servers[0]: list(range(len(names)))}
        found: dict[str, list[int]] = {}
        for place, name in enumerate(names):
            content = f"{partition}\0{name}".encode()
            best = max(self.servers, key=lambda url: checksum(content, self._hashes[url]))
            found.setdefault(best, []).append(place)
        return found


def _partition_of(metadata: BatchMeta) -> str:
    if len(set(metadata.partition_ids)) != 1:
        raise ValueError(f"metadata has rows of several partitions: {sorted(set(metadata.partition_ids))}")
    return metadata.partition_ids[0]


def _some(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + most] for start in range(0, len(items), most))


def encoded(fields: Mapping[str, Any]) -> dict[str, bytes]:
    """Values as a server keeps them. Raises NotPlain."""
    return {text("fields", str(name)): values.encode(value) for name, value in fields.items()}


def _decoded(fields: Mapping[str, bytes]) -> dict[str, Any]:
    return {name: values.decode(value) for name, value in fields.items()}


def _stored(row: keyed.RowFacts) -> Stored:
    return Stored(row.partition, row.key, row.number, _decoded(row.tags), tuple(row.fields), row.made)


def _staged(upload: bytearray, long: Sequence[tuple[str, bytes]]) -> list[keyed.StagedValue]:
    made = []
    for name, value in long:
        made.append(keyed.StagedValue(name, len(upload), len(value)))
        upload += value
    return made


def _at(items: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [items[place] for place in places]
