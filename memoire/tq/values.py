"""Values of rows as bytes and back: plain values (`wire.values`), and what torch and Python have beside.

TensorDicts become rows, and rows a TensorDict: one value of each field for each key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from memoire.errors import DataError, NotPlain, ProtocolError
from memoire.kinds import values as plain

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
