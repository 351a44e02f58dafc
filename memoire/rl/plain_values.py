"""Plain values and arrays as bytes, and back.

The bytes are MessagePack; arrays, numbers of NumPy and tuples are extensions of it. Nothing in them can run anything.
Pure: no socket, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from memoire.errors import DataError, ParameterError

MAX_DEPTH: Final = 32
"""Containers within each other."""
KINDS: Final = "biufcSU"
"""Kinds of dtypes that travel: no objects."""
MAX_HEADS: Final = 4096
"""Forms of arrays that are remembered: further ones take longer."""
ARRAY, SCALAR, TUPLE = 1, 2, 3
"""Numbers of the extensions."""
_HEADS: Final[dict[tuple[np.dtype[Any], tuple[int, ...]], bytes]] = {}  # what arrays of a form begin with
_READ: Final[dict[bytes, tuple[np.dtype[Any], tuple[int, ...], int]]] = {}  # the same, from bytes to form


def pack(value: Any, what: str = "sample") -> bytes:
    """None, booleans, numbers, text, bytes, arrays, and tuples, lists and dicts of these, as bytes; types stay.

    Tensors travel as arrays.

    Args:
        what: What errors call it.

    Raises:
        ParameterError: something else is in it; says where.
    """
    try:
        return ENCODER.encode(_plain(value, what, 0))
    except (OverflowError, UnicodeEncodeError) as error:
        raise ParameterError(what, str(error), "whole numbers of at most 64 bits, and text in UTF-8") from error


def unpack(body: bytes | memoryview) -> Any:
    """What `pack` packed; arrays are the caller's own.

    Raises:
        DataError: these are other bytes.
    """
    try:
        return DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, UnicodeDecodeError) as error:
        raise DataError("a sample", f"cannot be read: {error}") from error


ENCODER: Final = msgspec.msgpack.Encoder()
_SAME: Final = frozenset((type(None), bool, int, float, str, bytes))


def _plain(value: Any, where: str, depth: int) -> Any:
    """The value as MessagePack has it."""
    kind = type(value)
    if kind in _SAME:
        return value
    if kind is np.ndarray:
        return msgspec.msgpack.Ext(ARRAY, _array_bytes(value, where))
    if depth >= MAX_DEPTH:
        raise ParameterError(where, f"{depth} containers within each other", f"at most {MAX_DEPTH}")
    found = _PLAIN.get(kind)
    return _other(value, where, depth) if found is None else found(value, where, depth + 1)


def _plain_tuple(value: tuple[Any, ...], where: str, depth: int) -> Any:
    parts = [_plain(each, where, depth) for each in value]
    return msgspec.msgpack.Ext(TUPLE, ENCODER.encode(parts))


def _plain_list(value: list[Any], where: str, depth: int) -> Any:
    return [_plain(each, where, depth) for each in value]


def _plain_dict(value: dict[Any, Any], where: str, depth: int) -> Any:
    for key in value:
        if type(key) not in (str, int):
            raise ParameterError(where, f"the key {key!r}", "keys that are text or whole numbers")
    return {key: _plain(each, f"{where}[{key!r}]", depth) for key, each in value.items()}


_PLAIN: Final[dict[type, Callable[[Any, str, int], Any]]] = {
    tuple: _plain_tuple, list: _plain_list, dict: _plain_dict
}  # fmt: skip


def _other(value: Any, where: str, depth: int) -> Any:
    """Numbers of NumPy, tensors, and subclasses of containers and numbers."""
    if isinstance(value, np.generic):
        return msgspec.msgpack.Ext(SCALAR, _array_bytes(np.asarray(value), where))
    if hasattr(value, "detach"):
        return _plain(np.asarray(value.detach().cpu()), where, depth)
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(ARRAY, _array_bytes(np.asarray(value), where))
    for base, plain in _PLAIN.items():
        if isinstance(value, base):
            return plain(value, where, depth + 1)
    for base in (int, float, str, bytes):
        if isinstance(value, base):
            return base(value)  # type: ignore[arg-type]
    expected = "plain values: numbers, text, arrays, and tuples, lists and dicts of these. Have a compressor drop it"
    raise ParameterError(where, type(value).__name__, expected)


def _array_bytes(array: NDArray[Any], where: str) -> bytes:
    """Dtype's length, dtype, dimensions, shape, values."""
    head = head_of(array, where)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("<"))
    return head + array.tobytes()


def head_of(array: NDArray[Any], where: str = "array") -> bytes:
    """Dtype's length, dtype, dimensions, shape. Raises ParameterError: such arrays do not travel."""
    head = _HEADS.get((array.dtype, array.shape))
    if head is None:
        head = _new_head(array, where)
        if len(_HEADS) < MAX_HEADS:
            _HEADS[array.dtype, array.shape] = head
    return head


def _new_head(array: NDArray[Any], where: str) -> bytes:
    dtype = array.dtype.newbyteorder("<")
    if dtype.kind not in KINDS or dtype.names is not None:
        raise ParameterError(where, f"an array of {array.dtype}", "arrays of numbers, booleans or text")
    name = dtype.str.encode()
    return b"".join((bytes((len(name),)), name, bytes((array.ndim,)), np.array(array.shape, "<u4").tobytes()))


def form_of(data: bytes | memoryview) -> tuple[int, np.dtype[Any], tuple[int, ...]]:
    """Of the bytes of an array: where its values begin, its dtype, and its shape.

    Raises:
        ValueError: they are none, or too few or too many.
    """
    dimensions = data[1 + data[0]]
    begin = 2 + data[0] + 4 * dimensions
    head = bytes(data[:begin])
    known = _READ.get(head)
    if known is None:
        known = _read_head(head, dimensions)
        if len(_READ) < MAX_HEADS:
            _READ[head] = known
    dtype, shape, size = known
    if len(data) - begin != size:
        raise ValueError(f"an array of {dtype} and shape {shape} has other bytes")
    return begin, dtype, shape


def _array(data: memoryview) -> NDArray[Any]:
    begin, dtype, shape = form_of(data)
    return np.ndarray(shape, dtype, bytearray(data[begin:]))


def _read_head(head: bytes, dimensions: int) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Dtype, shape and bytes of the values."""
    name_end = 1 + head[0]
    dtype = np.dtype(head[1:name_end].decode())
    shape = tuple(np.frombuffer(head[name_end + 1 : name_end + 1 + 4 * dimensions], "<u4").tolist())
    if dtype.kind not in KINDS or not dtype.itemsize:
        raise ValueError(f"an array of {dtype}")
    return dtype, shape, math.prod(shape) * dtype.itemsize


def _extension(code: int, data: memoryview) -> Any:
    if code == TUPLE:
        return tuple(DECODER.decode(data))
    if code not in (ARRAY, SCALAR) or not len(data):
        raise ValueError(f"extension {code} of {len(data)} bytes")
    found = _array(data)
    return found[()] if code == SCALAR else found


DECODER: Final = msgspec.msgpack.Decoder(ext_hook=_extension)
