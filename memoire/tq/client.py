"""The client of rows by key, whose values are tensors and whatever TransferQueue's calls take."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDict

from memoire.building import Given, text
from memoire.errors import MemoireError
from memoire.keyed import messages as keyed
from memoire.keyed.calls import KeyedCalls
from memoire.kinds import FarCalls, Request, messages
from memoire.limits import Limits

from . import values
from .metadata import BatchMeta


class KeyedClient(KeyedCalls, FarCalls):
    """Reads and writes rows by key. From any thread.

    Args:
        servers: Addresses for requests. Each key lies at one of them, so all clients have to name the same ones; each
            leads to one server, whose rows are in its first table with storage="keyed".
        keys: This process' keys folder; None takes $MEMOIRE_KEYS.

    Raises:
        EndpointError: an address is malformed.
        KeyFileError: the keys cannot be used.
    """

    CALLED = "this client of keyed rows"

    def __init__(self, servers: Sequence[str], *, limits: Limits | None = None, keys: Given = None) -> None:
        self.servers = tuple(sorted(set(servers)))
        """Addresses of the servers."""
        FarCalls.__init__(self, self.servers, "keyed", keys=keys, role="actor", limits=limits, tune_process=False)
        KeyedCalls.__init__(self, self._far, self.servers)
        self._meet(None)

    # Rows by number, as TransferQueue's client has them and verl's workers ask for them. From any event loop

    async def async_kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """Numbers and tags of rows, and the fields that all of them have; keys that do not exist are left out.

        Raises:
            ValueError: there is no key, or `create` is True: `kv_put` and `kv_batch_put` make rows.
        """
        if create or not keys:
            raise ValueError("Received an empty list as keys." if not keys else "create=True: make rows by tq.kv_put.")
        return await asyncio.to_thread(self._meta, partition_id, [keys] if isinstance(keys, str) else keys)

    async def async_kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str]:
        """The keys of rows, by their numbers. Raises RuntimeError if a number has no row any more."""
        numbers = [global_indexes] if isinstance(global_indexes, int) else global_indexes
        return await asyncio.to_thread(self._keys, partition_id, numbers)

    async def async_get_data(self, metadata: BatchMeta) -> TensorDict:
        """The fields of a batch that `async_kv_retrieve_meta` gave, as `kv_batch_get` returns them.

        Raises:
            ValueError: its rows are of several partitions.
            RuntimeError: one of its rows, or of its fields, is not there any more.
        """
        if not metadata.size or not metadata.field_names:
            return TensorDict({}, batch_size=0)
        return await asyncio.to_thread(self._data, metadata)

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
        return await asyncio.to_thread(self._put_numbered, columns, metadata)

    def _meta(self, partition: str, names: Sequence[str]) -> BatchMeta:
        rows = self.facts(partition, names)
        shared = set.intersection(*(set(row.fields) for row in rows)) if rows else set()
        numbers, tags = [self._number(row) for row in rows], [decoded(row.tags) for row in rows]
        schema: dict[str, dict[str, Any]] = {name: {} for name in sorted(shared)}
        return BatchMeta(numbers, [partition] * len(rows), schema, [1] * len(rows), custom_meta=tags)

    def _keys(self, partition: str, numbers: Sequence[int]) -> list[str]:
        known = {self._number(row): row.key for row in self.rows(partition).get(partition, [])}
        if any(number not in known for number in numbers):
            raise RuntimeError("Some global_indexes have no corresponding keys!")
        return [known[number] for number in numbers]

    def _data(self, metadata: BatchMeta) -> TensorDict:
        partition, names = _partition_of(metadata), metadata.field_names
        keys = self._keys(partition, metadata.global_indexes)
        rows = [decoded(row.fields) for row in self.values(partition, keys, names)]
        for key, row in zip(keys, rows, strict=True):
            if missing := [name for name in names if name not in row]:
                raise RuntimeError(f"row {key!r} of {partition!r} has no {missing} any more: it was cleared meanwhile")
        return values.batch_of({name: [row[name] for row in rows] for name in names}, len(rows))

    def _put_numbered(self, columns: Mapping[str, Sequence[Any]], metadata: BatchMeta) -> BatchMeta:
        partition = _partition_of(metadata)
        keys = self._keys(partition, metadata.global_indexes)
        self.put(partition, put_rows(keys, metadata.custom_meta, columns))
        metadata.field_schema.update({name: {} for name in columns})
        metadata.production_status[:] = 1
        return metadata

    def _number(self, row: keyed.RowFacts) -> int:
        """The number of a row among all servers."""
        (url,) = self.by_home(row.partition, [row.key])
        return row.number * len(self.servers) + self.servers.index(url)

    def pages(self) -> str | None:
        """Where the first server shows its metrics, as HOST:PORT; None if it has no pages."""
        url, deadline = self.servers[0], self._far.now() + self._limits.request_timeout
        answer = self._far.ask({url: Request(messages.Hello(role=self._storage))}, deadline)[url]
        if isinstance(answer, MemoireError):
            raise answer
        return answer.body.pages[0] if isinstance(answer.body, messages.Welcome) and answer.body.pages else None


def put_rows(
    keys: Sequence[str], tags: Sequence[Mapping[str, Any]], columns: Mapping[str, Sequence[Any]]
) -> list[keyed.PutRow]:
    """Rows to be written, of the tags of each key and columns of as many values. Raises NotPlain."""
    return [
        keyed.PutRow(key, encoded(of_key), encoded({name: column[place] for name, column in columns.items()}))
        for place, (key, of_key) in enumerate(zip(keys, tags, strict=True))
    ]


def _partition_of(metadata: BatchMeta) -> str:
    if len(set(metadata.partition_ids)) != 1:
        raise ValueError(f"metadata has rows of several partitions: {sorted(set(metadata.partition_ids))}")
    return metadata.partition_ids[0]


def encoded(fields: Mapping[str, Any]) -> dict[str, bytes]:
    """Values as a server keeps them. Raises NotPlain."""
    return {text("fields", str(name)): values.encode(value) for name, value in fields.items()}


def decoded(fields: Mapping[str, bytes]) -> dict[str, Any]:
    """The values that a server keeps so. Raises ProtocolError."""
    return {name: values.decode(value) for name, value in fields.items()}
