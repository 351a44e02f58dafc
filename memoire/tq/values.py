"""Values of rows as bytes and back: tensors, arrays, and what JSON has, in msgpack. Nothing is ever pickled.

torch.tensor([1, 2])     Ext 1: ["int64", [2]] and the raw bytes
{"turns": (1, 2)}        a map, with Ext 4 for the tuple

TensorDicts become rows, and rows a TensorDict: one value of each field for each key.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from memoire.arguments import text
from memoire.errors import NotPlain, ProtocolError

TENSOR, ARRAY, SCALAR, SET, WHOLE, OBJECTS = range(1, 7)
_LENGTH: Final = struct.Struct("<I")
_ENCODER: Final = msgspec.msgpack.Encoder()
_PLAIN = (type(None), bool, float, bytes)


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
    return _ENCODER.encode(_packed(value))


def decode(data: bytes) -> Any:
    """The value of these bytes; tensors and arrays have memory of their own. Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_unpacked)
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise ProtocolError("payload", f"a value cannot be read: {error}") from None


def _packed(value: Any) -> Any:
    """What msgpack can say of a value."""
    if type(value) is str:
        return text("value", value)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, bool | int):
        return int(value) if -(2**63) <= value < 2**64 else msgspec.msgpack.Ext(WHOLE, str(int(value)).encode())
    pack = next((pack for kind, pack in _PACKERS.items() if isinstance(value, kind)), None)
    if pack is None:
        raise NotPlain(type(value).__qualname__)
    return pack(value)


def _tensor(value: torch.Tensor) -> msgspec.msgpack.Ext:
    flat = value.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return _with_head(TENSOR, [str(value.dtype).removeprefix("torch."), list(value.shape)], raw)


def _array(value: np.ndarray[Any, Any]) -> msgspec.msgpack.Ext:
    if value.dtype.hasobject:
        content = [list(value.shape), [_packed(each) for each in value.ravel().tolist()]]
        return msgspec.msgpack.Ext(OBJECTS, _ENCODER.encode(content))
    flat = np.ascontiguousarray(value)
    return _with_head(ARRAY, [_dtype_name(value.dtype), list(value.shape)], flat.reshape(-1).view(np.uint8))


def _dtype_name(dtype: np.dtype[Any]) -> str:
    if dtype.names is not None:
        raise NotPlain(f"array of {dtype}")
    return dtype.str


def _with_head(code: int, head: list[Any], raw: np.ndarray[Any, Any]) -> msgspec.msgpack.Ext:
    said = _ENCODER.encode(head)
    return msgspec.msgpack.Ext(code, b"".join((_LENGTH.pack(len(said)), said, raw.tobytes())))


_PACKERS: Final[dict[Any, Callable[[Any], Any]]] = {
    torch.Tensor: _tensor,
    np.ndarray: _array,
    np.generic: lambda value: msgspec.msgpack.Ext(SCALAR, bytes(_array(np.asarray(value)).data)),
    str: lambda value: text("value", str(value)),
    bytes | bytearray | memoryview: bytes,
    float: float,
    NonTensorStack: lambda value: [_packed(each) for each in value.tolist()],
    NonTensorData: lambda value: _packed(value.data),
    list | tuple: lambda value: [_packed(each) for each in value],
    set | frozenset: lambda value: msgspec.msgpack.Ext(SET, _ENCODER.encode([_packed(each) for each in value])),
    dict: lambda value: {_packed(key): _packed(each) for key, each in value.items()},
}


def _unpacked(code: int, data: memoryview) -> Any:
    if code == WHOLE:
        return int(bytes(data))
    if code in (TENSOR, ARRAY, SCALAR):
        made = _tensor_of(data) if code == TENSOR else _array_of(data)
        return made[()] if code == SCALAR else made
    values = msgspec.msgpack.decode(data, ext_hook=_unpacked)
    if code == OBJECTS:
        made = np.empty(len(values[1]), object)
        made[:] = values[1]
        return made.reshape(values[0])
    if code != SET:
        raise ValueError(f"extension {code} is not known")
    return set(values)


def _head_of(data: memoryview) -> tuple[str, list[int], memoryview]:
    (length,) = _LENGTH.unpack_from(data)
    name, shape = msgspec.msgpack.decode(data[_LENGTH.size : _LENGTH.size + length], type=tuple[str, list[int]])
    return name, shape, data[_LENGTH.size + length :]


def _tensor_of(data: memoryview) -> torch.Tensor:
    name, shape, raw = _head_of(data)
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    if not len(raw):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


def _array_of(data: memoryview) -> np.ndarray[Any, Any]:
    name, shape, raw = _head_of(data)
    return np.frombuffer(bytearray(raw), np.dtype(name)).reshape(shape)
