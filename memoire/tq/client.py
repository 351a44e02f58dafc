"""Client of keyed rows, whose values are tensors and the other values that TransferQueue's calls take.

Servers store values as bytes: plain values (`wire.values`), and further types of torch and Python. A TensorDict becomes
rows, and rows become a TensorDict: one value of each field for each key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from memoire.building import KeysLike, text
from memoire.errors import DataError, MemoireError, NotPlain, ProtocolError
from memoire.keyed import messages as keyed
from memoire.keyed.calls import KeyedCalls
from memoire.kinds import RemoteCalls, Request, messages
from memoire.kinds import values as plain
from memoire.limits import Limits

from .metadata import BatchMeta

TENSOR, NAMED, SET, OBJECTS = range(5, 9)
"""Codes of msgpack extensions beside those of `wire.values`: a tensor as its array; a tensor of a dtype that NumPy
lacks; a set; an array of objects.
"""
_PLAIN_TYPES: Final = (int, float, str, bytes, list, dict, np.generic, np.ndarray)
"""Types whose subclasses are packed like themselves."""
Ext = msgspec.msgpack.Ext

Parser = Callable[[dict[str, Any]], Any]
"""Function that changes columns of a batch before they are stored, such as addresses into the data behind them."""


def columns_of(fields: TensorDict) -> dict[str, list[Any]]:
    """Return the values of each field, one for each row.

    A tensor [n, ...] has n tensors, an array [n, ...] or a list has n elements; any other value is that of each row.

    Raises:
        ValueError: a column has another number of rows.
    """
    return {name: _values(_column_of(fields, name)) for name in fields.keys()}  # noqa: SIM118 (a TensorDict)


def _column_of(fields: TensorDict, name: str) -> Any:
    column, rows = fields.get(name), len(fields)
    if isinstance(column, torch.Tensor):
        return column
    if not isinstance(column, NonTensorData):
        return column.tolist() if isinstance(column, NonTensorStack) else list(column)
    value = column.data  # TensorDict wraps text, bytes, objects, and arrays of dtypes that torch lacks
    if not isinstance(value, list | tuple) and not (isinstance(value, np.ndarray) and value.ndim):
        return [value] * rows
    if len(value) != rows:
        raise ValueError(
            f"field {name!r} has {len(value)} values for {rows} rows. Nothing was written. Give one value for each "
            f"row; if the whole list is the value of each row, repeat it in a NonTensorStack."
        )
    return value if isinstance(value, np.ndarray) else list(value)


def _values(column: Any) -> list[Any]:
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    return [each.item() if isinstance(each, np.str_ | np.bytes_) else each for each in column]


def _copy(column: Any) -> Any:
    """Return a copy of a column, because a parser may change its argument in place."""
    return column.clone() if isinstance(column, torch.Tensor) else column.copy()


def single_row(fields: TensorDict | Mapping[str, Any]) -> TensorDict:
    """Return the fields of one row as a batch of one.

    Raises:
        ValueError: `fields` is neither a mapping nor a TensorDict, or has a nested tensor, which is a batch.
    """
    if isinstance(fields, TensorDict):
        return fields
    if not isinstance(fields, Mapping):
        raise ValueError("`fields` can only be dict or TensorDict")
    if any(isinstance(value, torch.Tensor) and value.is_nested for value in fields.values()):
        raise ValueError("Please use (async)kv_batch_put for batch operation")
    columns = {
        name: value.unsqueeze(0) if isinstance(value, torch.Tensor) else NonTensorStack(value)
        for name, value in fields.items()
    }
    return TensorDict(columns, batch_size=[1])


def parse_columns(fields: TensorDict, parser: Parser) -> dict[str, list[Any]]:
    """Return the columns of a batch after a parser has changed copies of the columns.

    Raises:
        ValueError: a column has another number of rows.
        RuntimeError: the parser did not return a mapping, or changed the fields or the number of rows.
    """
    originals = {
        name: [each.clone() for each in column.unbind()]
        if isinstance(column := _column_of(fields, name), torch.Tensor) and column.is_nested
        else _copy(column)
        for name in fields.keys()  # noqa: SIM118 (a TensorDict)
    }
    results = parser(dict(originals))
    if not isinstance(results, Mapping):
        raise RuntimeError(f"data_parser must return a dict, got {type(results).__name__}")
    if set(results) != set(originals) or any(len(results[name]) != len(fields) for name in originals):
        raise RuntimeError(
            f"data_parser must keep fields and rows: it got {sorted(originals)} of {len(fields)} rows and returned "
            f"{ {name: len(value) for name, value in results.items()} }"
        )
    return {name: _values(results[name]) for name in originals}


def batch_of(columns: Mapping[str, Sequence[Any]], rows: int) -> TensorDict:
    """Return columns as a batch.

    Scalar tensors are stacked [n]; other tensors become a nested tensor, jagged if possible; values that are not
    tensors become a NonTensorStack.
    """
    fields = {name: _column(values) for name, values in sorted(columns.items())}
    return TensorDict(fields, batch_size=[rows if fields else 0])


def _column(values: Sequence[Any]) -> Any:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return NonTensorStack(*values)
    if all(value.dim() == 0 for value in values):
        return torch.stack(list(values))
    for layout in (torch.jagged, torch.strided):
        try:
            return torch.nested.as_nested_tensor(list(values), layout=layout)
        except (RuntimeError, TypeError):  # the layout does not support these shapes
            continue
    return NonTensorStack(*values)


def encode(value: Any) -> bytes:
    """Return a value as bytes.

    Raises:
        NotPlain: the value has a type that a reader cannot restore without running code of the writer.
        ParameterError: a text in the value has a lone surrogate.
    """
    return plain.pack(value, "value", _replace_unusual)


def decode(data: bytes | memoryview) -> Any:
    """Return the value of encoded bytes; tensors and arrays are copies. Raises ProtocolError: the bytes are damaged."""
    try:
        return plain.unpack(data, "a value", _read)
    except DataError as error:
        raise ProtocolError("payload", f"a value {error.problem}") from None


def _replace_unusual(value: Any) -> Any:
    """Return a plain value or an extension for a value that is not plain; raise NotPlain for unsupported types."""
    if isinstance(value, torch.Tensor):
        return _tensor(value.detach().cpu().contiguous())
    if isinstance(value, NonTensorStack):
        return value.tolist()
    if isinstance(value, NonTensorData):
        return value.data
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return Ext(OBJECTS, encode([list(value.shape), value.ravel().tolist()]))
    if isinstance(value, np.ndarray) and value.dtype.kind not in plain.KINDS:
        raise NotPlain(f"array of {value.dtype}")
    if isinstance(value, set | frozenset):
        return Ext(SET, encode(list(value)))
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, tuple):
        return list(value)  # TransferQueue returns a list, too
    if isinstance(value, _PLAIN_TYPES):
        return value
    raise NotPlain(type(value).__qualname__)


def _tensor(value: torch.Tensor) -> Any:
    try:
        return Ext(TENSOR, plain.array_bytes(value.numpy(), "value"))
    except TypeError:  # NumPy lacks this dtype
        raw = value.reshape(-1).view(torch.uint8).numpy() if value.numel() else np.empty(0, np.uint8)
        return Ext(NAMED, plain.pack([str(value.dtype).removeprefix("torch."), list(value.shape), raw]))


def _read(code: int, data: memoryview) -> Any:
    """Return the value of an extension; raise ValueError, or another error that `plain.unpack` expects."""
    if code == TENSOR:
        return torch.from_numpy(plain.array_of(data))
    if code not in (NAMED, SET, OBJECTS):
        raise ValueError(f"extension {code} is not known")
    content = decode(data)
    if code == SET:
        return set(content)
    if code == OBJECTS:
        shape, values = content
        array = np.empty(len(values), object)
        array[:] = values
        return array.reshape(shape)
    name, shape, raw = content
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return torch.from_numpy(raw).view(dtype).reshape(shape) if len(raw) else torch.empty(shape, dtype=dtype)


class KeyedClient(KeyedCalls, RemoteCalls):
    """Client that reads and writes rows by key. May be used from any thread.

    Args:
        servers: Request addresses, the same addresses at all clients, because each key is stored at one server. Each
            address leads to one server, whose rows are in its first table with storage="keyed".
        keys: Keys folder of this process; None takes $MEMOIRE_KEYS.

    Raises:
        EndpointError: an address is malformed.
        KeyFileError: the keys cannot be used.
    """

    CALLED = "this client of keyed rows"

    def __init__(self, servers: Sequence[str], *, limits: Limits | None = None, keys: KeysLike = None) -> None:
        self.servers = tuple(sorted(set(servers)))
        """Request addresses of the servers, sorted."""
        RemoteCalls.__init__(self, self.servers, "keyed", keys=keys, role="actor", limits=limits, tune_process=False)
        KeyedCalls.__init__(self, self._far, self.servers)
        self._meet(None)

    # Rows by number, for TransferQueue's client and verl's workers, from any event loop

    async def async_kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """Return numbers and tags of rows, and the fields that all rows have; unknown keys are left out.

        Raises:
            ValueError: `keys` is empty, or `create` is True: `kv_put` and `kv_batch_put` create rows.
        """
        if create or not keys:
            raise ValueError(
                "Received an empty list as keys." if not keys else "create=True is not supported. Call tq.kv_put."
            )
        return await asyncio.to_thread(self._meta, partition_id, [keys] if isinstance(keys, str) else keys)

    async def async_kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str]:
        """Return the keys of rows by their numbers. Raises RuntimeError if a number has no row (any more)."""
        numbers = [global_indexes] if isinstance(global_indexes, int) else global_indexes
        return await asyncio.to_thread(self._keys, partition_id, numbers)

    async def async_get_data(self, metadata: BatchMeta) -> TensorDict:
        """Return the fields of a batch from `async_kv_retrieve_meta`, in the form of `kv_batch_get`.

        Raises:
            ValueError: the batch has rows of several partitions.
            RuntimeError: a row or a field of the batch has been cleared.
        """
        if not metadata.size or not metadata.field_names:
            return TensorDict({}, batch_size=0)
        return await asyncio.to_thread(self._data, metadata)

    async def async_put(self, data: TensorDict, metadata: BatchMeta, data_parser: Parser | None = None) -> BatchMeta:
        """Write fields to the rows of a batch from `async_kv_retrieve_meta`; return the batch with these fields.

        Raises:
            ValueError: the batch is empty, has rows of several partitions, or another number of rows than the data.
            RuntimeError: a row of the batch has been cleared.
            NotPlain, Refused: see `kv_batch_put`.
        """
        if not metadata.size or len(data) != metadata.size:
            raise ValueError(f"metadata has {metadata.size} rows, and the data {len(data)}")
        columns = columns_of(data) if data_parser is None else parse_columns(data, data_parser)
        return await asyncio.to_thread(self._put_numbered, columns, metadata)

    def _meta(self, partition: str, names: Sequence[str]) -> BatchMeta:
        rows = self.facts(partition, names)
        shared = set.intersection(*(set(row.fields) for row in rows)) if rows else set()
        numbers, tags = [self._number(row) for row in rows], [decoded(row.tags) for row in rows]
        schema: dict[str, dict[str, Any]] = {name: {} for name in sorted(shared)}
        return BatchMeta(numbers, [partition] * len(rows), schema, [1] * len(rows), custom_meta=tags)

    def _keys(self, partition: str, numbers: Sequence[int]) -> list[str]:
        keys = {self._number(row): row.key for row in self.rows(partition).get(partition, [])}
        if any(number not in keys for number in numbers):
            raise RuntimeError("Some global_indexes have no corresponding keys!")
        return [keys[number] for number in numbers]

    def _data(self, metadata: BatchMeta) -> TensorDict:
        partition, names = _partition_of(metadata), metadata.field_names
        keys = self._keys(partition, metadata.global_indexes)
        rows = [decoded(row.fields) for row in self.values(partition, keys, names)]
        for key, row in zip(keys, rows, strict=True):
            if missing := [name for name in names if name not in row]:
                raise RuntimeError(f"row {key!r} of partition {partition!r} lacks {missing}: the row was cleared")
        return batch_of({name: [row[name] for row in rows] for name in names}, len(rows))

    def _put_numbered(self, columns: Mapping[str, Sequence[Any]], metadata: BatchMeta) -> BatchMeta:
        partition = _partition_of(metadata)
        keys = self._keys(partition, metadata.global_indexes)
        self.put(partition, put_rows(keys, metadata.custom_meta, columns))
        metadata.field_schema.update({name: {} for name in columns})
        metadata.production_status[:] = 1
        return metadata

    def _number(self, row: keyed.RowFacts) -> int:
        (url,) = self.by_home(row.partition, [row.key])
        return row.number * len(self.servers) + self.servers.index(url)

    def pages(self) -> str | None:
        """Return HOST:PORT of the first server's pages, which show its metrics; None if it has no pages."""
        url, deadline = self.servers[0], self._far.now() + self._limits.request_timeout
        answer = self._far.ask({url: Request(messages.Hello(role=self._storage))}, deadline)[url]
        if isinstance(answer, MemoireError):
            raise answer
        return answer.body.pages[0] if isinstance(answer.body, messages.Welcome) and answer.body.pages else None


def put_rows(
    keys: Sequence[str], tags: Sequence[Mapping[str, Any]], columns: Mapping[str, Sequence[Any]]
) -> list[keyed.PutRow]:
    """Return rows to write, with the tags of each key and the values of each column. Raises NotPlain."""
    return [
        keyed.PutRow(key, encoded(key_tags), encoded({name: column[place] for name, column in columns.items()}))
        for place, (key, key_tags) in enumerate(zip(keys, tags, strict=True))
    ]


def _partition_of(metadata: BatchMeta) -> str:
    if len(set(metadata.partition_ids)) != 1:
        raise ValueError(f"metadata has rows of several partitions: {sorted(set(metadata.partition_ids))}")
    return metadata.partition_ids[0]


def encoded(fields: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the values as bytes, as servers store them, by name. Raises NotPlain."""
    return {text("fields", str(name)): encode(value) for name, value in fields.items()}


def decoded(fields: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the values of the bytes that servers store, by name. Raises ProtocolError."""
    return {name: decode(value) for name, value in fields.items()}
