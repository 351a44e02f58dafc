"""Values of rows as bytes and back: tensors, arrays, and what JSON has, in msgpack. Nothing is ever pickled.

torch.tensor([1, 2])     Ext 1: ["int64", [2]] and the raw bytes
{"turns": (1, 2)}        a map, with Ext 4 for the tuple
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack

from memoire.arguments import text
from memoire.errors import NotPlain, ProtocolError

TENSOR, ARRAY, SCALAR, SET, WHOLE, OBJECTS = range(1, 7)
_LENGTH: Final = struct.Struct("<I")
_ENCODER: Final = msgspec.msgpack.Encoder()
_PLAIN = (type(None), bool, float, bytes)


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
