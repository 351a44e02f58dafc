"""The client of rows by key, whose values are tensors and whatever TransferQueue's calls take.

Values are bytes at the servers: plain values (`wire.values`), and what torch and Python have beside. TensorDicts become
rows, and rows a TensorDict: one value of each field for each key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from memoire.building import Given, text
from memoire.errors import DataError, MemoireError, NotPlain, ProtocolError
from memoire.keyed import messages as keyed
from memoire.keyed.calls import KeyedCalls
from memoire.kinds import FarCalls, Request, messages
from memoire.kinds import values as plain
from memoire.limits import Limits

from .metadata import BatchMeta

TENSOR, NAMED, SET, OBJECTS = range(5, 9)
"""Extensions beside those of `wire.values`: a tensor as its array; one of a dtype that NumPy lacks; a set; an
array of objects.
"""
_KNOWN: Final = (int, float, str, bytes, list, dict, np.generic, np.ndarray)
"""Types whose subclasses are packed as they are."""
Ext = msgspec.msgpack.Ext

Parser = Callable[[dict[str, Any]], Any]
"""Changes columns of a batch before they are stored, such as addresses into what lies there."""


def columns_of(fields: TensorDict) -> dict[str, list[Any]]:
    """The values of each field, one for each row: a tensor [n, ...] gives n tensors, an array [n, ...] or a list n
    elements, and any other value is that of each row.

    Raises:
        ValueError: a column has another number of rows.
    """
    return {name: _values(_column_of(fields, name)) for name in fields.keys()}  # noqa: SIM118 (a TensorDict)


def _column_of(fields: TensorDict, name: str) -> Any:
    """A tensor, an array or a list of as many rows as the batch."""
    column, rows = fields.get(name), len(fields)
    if isinstance(column, torch.Tensor):
        return column
    if not isinstance(column, NonTensorData):
        return column.tolist() if isinstance(column, NonTensorStack) else list(column)
    value = column.data  # what TensorDict has made of texts, bytes, objects and arrays that torch does not have
    if not isinstance(value, list | tuple) and not (isinstance(value, np.ndarray) and value.ndim):
        return [value] * rows
    if len(value) != rows:
        raise ValueError(
            f"field {name!r} has {len(value)} values for {rows} rows. Nothing was written. Give one for each row; if "
            f"all of it is the value of each row, repeat it in a NonTensorStack."
        )
    return value if isinstance(value, np.ndarray) else list(value)


def _values(column: Any) -> list[Any]:
    """The value of each row; texts and bytes of NumPy are Python's."""
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    return [each.item() if isinstance(each, np.str_ | np.bytes_) else each for each in column]


def _copied(column: Any) -> Any:
    """A copy: a parser changes what it gets in place, and the caller's batch stays."""
    return column.clone() if isinstance(column, torch.Tensor) else column.copy()


def single_row(fields: TensorDict | Mapping[str, Any]) -> TensorDict:
    """The fields of one row as a batch of one.

    Raises:
        ValueError: it is neither, or has a nested tensor, which is a batch.
    """
    if isinstance(fields, TensorDict):
        return fields
    if not isinstance(fields, Mapping):
        raise ValueError("`fields` can only be dict or TensorDict")
    if any(isinstance(value, torch.Tensor) and value.is_nested for value in fields.values()):
        raise ValueError("Please use (async)kv_batch_put for batch operation")
    made = {
        name: value.unsqueeze(0) if isinstance(value, torch.Tensor) else NonTensorStack(value)
        for name, value in fields.items()
    }
    return TensorDict(made, batch_size=[1])


def parsed(fields: TensorDict, parser: Parser) -> dict[str, list[Any]]:
    """The columns of a batch, as a parser has left them.

    Raises:
        ValueError: a column has another number of rows.
        RuntimeError: it returned something else than a mapping, or other fields or rows.
    """
    before = {
        name: [each.clone() for each in column.unbind()]
        if isinstance(column := _column_of(fields, name), torch.Tensor) and column.is_nested
        else _copied(column)
        for name in fields.keys()  # noqa: SIM118 (a TensorDict)
    }
    after = parser(dict(before))
    if not isinstance(after, Mapping):
        raise RuntimeError(f"data_parser must return a dict, got {type(after).__name__}")
    if set(after) != set(before) or any(len(after[name]) != len(fields) for name in before):
        raise RuntimeError(
            f"data_parser must keep fields and rows: it got {sorted(before)} of {len(fields)} rows and returned "
            f"{ {name: len(value) for name, value in after.items()} }"
        )
    return {name: _values(after[name]) for name in before}


def batch_of(columns: Mapping[str, Sequence[Any]], rows: int) -> TensorDict:
    """A batch of columns: tensors of no dimension are stacked [n], others become a nested tensor, which is jagged if
    that is possible, and what is no tensor a stack.
    """
    made = {name: _column(values) for name, values in sorted(columns.items())}
    return TensorDict(made, batch_size=[rows if made else 0])


def _column(values: Sequence[Any]) -> Any:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return NonTensorStack(*values)
    if all(value.dim() == 0 for value in values):
        return torch.stack(list(values))
    for layout in (torch.jagged, torch.strided):
        try:
            return torch.nested.as_nested_tensor(list(values), layout=layout)
        except (RuntimeError, TypeError):  # shapes that this layout does not have
            continue
    return NonTensorStack(*values)


def encode(value: Any) -> bytes:
    """The bytes of a value.

    Raises:
        NotPlain: it is of a type that no reader could make again without running code of the writer.
        ParameterError: a text in it has a lone surrogate.
    """
    return plain.pack(value, "value", _unusual)


def decode(data: bytes | memoryview) -> Any:
    """The value of these bytes; tensors and arrays have memory of their own. Raises ProtocolError."""
    try:
        return plain.unpack(data, "a value", _read)
    except DataError as error:
        raise ProtocolError("payload", f"a value {error.problem}") from None


def _unusual(value: Any) -> Any:
    """What a value is packed as that is no plain one."""
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
        return list(value)  # as TransferQueue has it
    if isinstance(value, _KNOWN):
        return value
    raise NotPlain(type(value).__qualname__)


def _tensor(value: torch.Tensor) -> Any:
    try:
        return Ext(TENSOR, plain.array_bytes(value.numpy(), "value"))
    except TypeError:  # NumPy has no such dtype
        raw = value.reshape(-1).view(torch.uint8).numpy() if value.numel() else np.empty(0, np.uint8)
        return Ext(NAMED, plain.pack([str(value.dtype).removeprefix("torch."), list(value.shape), raw]))


def _read(code: int, data: memoryview) -> Any:
    """What an extension holds. Raises ValueError and others that `plain.unpack` expects."""
    if code == TENSOR:
        return torch.from_numpy(plain.array_of(data))
    if code not in (NAMED, SET, OBJECTS):
        raise ValueError(f"extension {code} is not known")
    found = decode(data)
    if code == SET:
        return set(found)
    if code == OBJECTS:
        shape, values = found
        made = np.empty(len(values), object)
        made[:] = values
        return made.reshape(shape)
    name, shape, raw = found
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return torch.from_numpy(raw).view(dtype).reshape(shape) if len(raw) else torch.empty(shape, dtype=dtype)


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

    async def async_put(self, data: TensorDict, metadata: BatchMeta, data_parser: Parser | None = None) -> BatchMeta:
        """Write fields to the rows of a batch that `async_kv_retrieve_meta` gave; the batch, which has them then.

        Raises:
            ValueError: the batch is empty, has rows of several partitions, or another number of rows than the data.
            RuntimeError: one of its rows is not there any more.
            NotPlain, Refused: see `kv_batch_put`.
        """
        if not metadata.size or len(data) != metadata.size:
            raise ValueError(f"metadata has {metadata.size} rows, and the data {len(data)}")
        columns = columns_of(data) if data_parser is None else parsed(data, data_parser)
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
        return batch_of({name: [row[name] for row in rows] for name in names}, len(rows))

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
    return {text("fields", str(name)): encode(value) for name, value in fields.items()}


def decoded(fields: Mapping[str, bytes]) -> dict[str, Any]:
    """The values that a server keeps so. Raises ProtocolError."""
    return {name: decode(value) for name, value in fields.items()}
