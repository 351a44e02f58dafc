"""Conversion of plain values and arrays to bytes and back.

    (1, np.float32([2.0]))    Ext 3 with [1, Ext 1: "<f4", shape [1], bytes of the values]

The bytes are MessagePack. Arrays, NumPy numbers and tuples are extensions of MessagePack; the caller's `other` may add
more extensions. Unpacking runs no code from the bytes. Trainers' samples and fields of keyed rows have this form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from memoire.arguments import text
from memoire.errors import DataError, ParameterError

MAX_DEPTH: Final = 64
"""Deepest nesting of lists, tuples and dicts within each other."""
KINDS: Final = "biufcSUmM"
"""Kinds of dtypes (`dtype.kind`) that can be packed: no objects."""
MAX_HEADS: Final = 4096
"""Entries of each cache of array heads. A dtype and shape beyond them is packed and unpacked without the cache."""
ARRAY, SCALAR, TUPLE, WHOLE = 1, 2, 3, 4
"""MessagePack extension numbers of arrays, NumPy numbers, tuples and integers beyond 64 bits."""
_HEADS: Final[dict[tuple[np.dtype[Any], tuple[int, ...]], bytes]] = {}  # head bytes by dtype and shape
_PARSED_HEADS: Final[dict[bytes, tuple[np.dtype[Any], tuple[int, ...], int]]] = {}  # form by head bytes


Other: TypeAlias = Callable[[Any], Any]
"""Function that replaces a tuple or an unknown value by a plain value or an `Ext`, or returns the value unchanged."""
OtherExt: TypeAlias = Callable[[int, memoryview], Any]
"""Function that unpacks an `Ext` from its number and bytes. Raises ValueError if it does not know the number."""


def pack(value: Any, what: str = "sample", other: Other | None = None) -> bytes:
    """Pack None, booleans, numbers, text, bytes, arrays, and tuples, lists and dicts of these; types are kept.

    Tensors are packed as arrays, unless `other` replaces them.

    Args:
        what: Name of the value in errors.

    Raises:
        ParameterError: the value contains an object of another type; the error says where.
    """
    try:
        return ENCODER.encode(_Packing(other).plain(value, what, 0))
    except UnicodeEncodeError as error:
        text(what, error.object)  # raises an error that names the character
        raise


def unpack(body: bytes | memoryview, what: str = "a sample", other: OtherExt | None = None) -> Any:
    """Return the value that `pack` packed; its arrays are copies that belong to the caller.

    Args:
        what: Name of the bytes in errors.

    Raises:
        DataError: `pack` did not write these bytes.
    """
    try:
        return (_DECODER if other is None else _decoder(other)).decode(body)
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, RecursionError, IndexError) as error:
        raise DataError(what, f"cannot be read: {error}") from error


ENCODER: Final = msgspec.msgpack.Encoder()
_UNCHANGED_TYPES: Final = frozenset((type(None), bool, float, str, bytes))
_KEY_TYPES: Final = (type(None), bool, int, float, str, bytes, np.generic)


class _Packing:
    """Conversion of values to types that MessagePack has."""

    def __init__(self, other: Other | None) -> None:
        self._other = other

    def plain(self, value: Any, where: str, depth: int) -> Any:
        """Return the value as MessagePack values and extensions; `where` is its place in the packed value."""
        kind = type(value)
        if kind in _UNCHANGED_TYPES or (kind is int and -(2**63) <= value < 2**64):
            return value
        if kind is np.ndarray and value.dtype.kind in KINDS:
            return msgspec.msgpack.Ext(ARRAY, array_bytes(value, where))
        if isinstance(value, np.generic):
            return msgspec.msgpack.Ext(SCALAR, array_bytes(value, where))
        if depth >= MAX_DEPTH:
            raise ParameterError(where, f"{depth} containers within each other", f"at most {MAX_DEPTH}")
        if kind is list or kind is dict or (kind is tuple and self._other is None):
            return self._container(value, kind, where, depth + 1)
        result = value if self._other is None else self._other(value)
        return self._convert_rare(value, where, depth) if result is value else self._encode(result, where, depth)

    def _encode(self, result: Any, where: str, depth: int) -> Any:
        return result if isinstance(result, msgspec.msgpack.Ext) else self.plain(result, where, depth + 1)

    def _container(self, value: Any, kind: type, where: str, depth: int) -> Any:
        if kind is dict:
            if any(not isinstance(key, _KEY_TYPES) for key in value):
                key = next(key for key in value if not isinstance(key, _KEY_TYPES))
                raise ParameterError(where, f"the key {key!r}", "keys that are text, bytes or numbers")
            pairs = ((key, self.plain(each, f"{where}[{key!r}]", depth)) for key, each in value.items())
            return {key if type(key) is str else self.plain(key, where, depth): each for key, each in pairs}
        parts = [self.plain(each, where, depth) for each in value]
        return msgspec.msgpack.Ext(TUPLE, ENCODER.encode(parts)) if kind is tuple else parts

    def _convert_rare(self, value: Any, where: str, depth: int) -> Any:
        """Return a tensor, or an instance of a subclass of a container or number, as MessagePack values."""
        if hasattr(value, "detach"):
            return self.plain(np.asarray(value.detach().cpu()), where, depth)
        if isinstance(value, np.ndarray):
            return msgspec.msgpack.Ext(ARRAY, array_bytes(np.asarray(value), where))
        for base in (tuple, list, dict):
            if isinstance(value, base):
                return self._container(value, base, where, depth + 1)
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return msgspec.msgpack.Ext(WHOLE, str(int(value)).encode())
        for plain in (int, float, str, bytes):
            if isinstance(value, plain):
                return plain(value)  # type: ignore[arg-type]
        expected = "numbers, text, arrays, and tuples, lists and dicts of these. Have a compressor drop it"
        raise ParameterError(where, type(value).__name__, f"plain values: {expected}")


def array_bytes(array: NDArray[Any] | np.generic, where: str) -> bytes:
    """Return length of the dtype, dtype, dimensions, shape and values as bytes. Raises ParameterError for objects."""
    head = _HEADS.get((array.dtype, array.shape))
    if head is None:
        head = _new_head(array, where)
        if len(_HEADS) < MAX_HEADS:
            _HEADS[array.dtype, array.shape] = head
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("<"))
    return head + array.tobytes()


def _new_head(array: NDArray[Any] | np.generic, where: str) -> bytes:
    dtype = array.dtype.newbyteorder("<")
    if dtype.kind not in KINDS or dtype.names is not None:
        raise ParameterError(where, f"an array of {array.dtype}", "arrays of numbers, booleans or text")
    name = dtype.str.encode()
    return b"".join((bytes((len(name),)), name, bytes((array.ndim,)), np.array(array.shape, "<u4").tobytes()))


def array_of(data: memoryview) -> NDArray[Any]:
    """Return the array [*F] in the bytes of an `Ext`, as a copy. Raises ValueError or IndexError for other bytes."""
    dimensions = data[1 + data[0]]
    begin = 2 + data[0] + 4 * dimensions
    head = bytes(data[:begin])
    known = _PARSED_HEADS.get(head)
    if known is None:
        known = _read_head(head, dimensions)
        if len(_PARSED_HEADS) < MAX_HEADS:
            _PARSED_HEADS[head] = known
    dtype, shape, size = known
    if len(data) - begin != size:
        raise ValueError(f"an array of {dtype} and shape {shape} has {size} bytes, got {len(data) - begin}")
    return np.ndarray(shape, dtype, bytearray(data[begin:]))


def _read_head(head: bytes, dimensions: int) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return dtype, shape and number of bytes of the values."""
    name_end = 1 + head[0]
    dtype = np.dtype(head[1:name_end].decode())
    shape = tuple(np.frombuffer(head[name_end + 1 : name_end + 1 + 4 * dimensions], "<u4").tolist())
    if dtype.kind not in KINDS or not dtype.itemsize:
        raise ValueError(f"arrays of {dtype} cannot be unpacked")
    return dtype, shape, math.prod(shape) * dtype.itemsize


def _decoder(other: OtherExt | None) -> msgspec.msgpack.Decoder[Any]:
    def read(code: int, data: memoryview) -> Any:
        if code == ARRAY:
            return array_of(data)
        if code == TUPLE:
            return tuple(decoder.decode(data))
        if code == SCALAR:
            return array_of(data)[()]
        if code == WHOLE:
            return int(bytes(data))
        if other is None:
            raise ValueError(f"unknown MessagePack extension {code} of {len(data)} bytes")
        return other(code, data)

    decoder = msgspec.msgpack.Decoder(ext_hook=read)
    return decoder


_DECODER: Final = _decoder(None)
