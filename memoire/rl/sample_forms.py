"""Samples of one form, packed and read together: a call for each leaf of them, in place of one for each sample.

    (act [2], (obs [1], obs [1]), 0.5, False, False, {})   T of them ──▶ a matrix of bytes [T, n]

The bytes are those that `plain_values` makes of one sample at a time. Samples of a form of their own, such as that of a
reset, take that way. Pure.
"""

from __future__ import annotations

import itertools
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from memoire.errors import ParameterError

from .plain_values import ARRAY, DECODER, ENCODER, MAX_DEPTH, SCALAR, TUPLE, form_of, head_of, pack, unpack

LEAST: Final = 4
"""Samples of one form from which on they are packed, or read, together."""
MAX_LENGTHS: Final = 8
"""Different lengths of samples of which forms are looked for."""

Bytes = NDArray[np.uint8]


class _Differ(Exception):
    """They have no form in common."""


# From samples to bytes


def packed_rows(rows: Sequence[Sequence[Any]]) -> tuple[Bytes, list[int]]:
    """The bytes of all rows behind each other, and how many each one has.

    Raises:
        ParameterError: a row holds a value that does not travel; says where.
    """
    parts: list[Bytes] = []
    lengths: list[int] = []
    for alike in _groups(rows):
        matrix = _packed_alike(alike) if len(alike) >= LEAST else None
        if matrix is not None:
            parts.append(matrix.reshape(-1))
            lengths += [matrix.shape[1]] * len(alike)
        else:
            bodies = [pack(tuple(each)) for each in alike]
            parts.append(np.frombuffer(b"".join(bodies), np.uint8))
            lengths += map(len, bodies)
    return np.concatenate(parts) if parts else np.empty(0, np.uint8), lengths


def _groups(rows: Sequence[Sequence[Any]]) -> list[Sequence[Sequence[Any]]]:
    """Rows, parted where the types of their parts, or the names in the last one, change."""
    columns = list(zip(*rows, strict=True))
    names = [tuple(each) if type(each) is dict else None for each in columns[-1]] if columns else []
    outlines = list(zip(*(map(type, column) for column in columns), names, strict=True))
    cuts = itertools.compress(range(1, len(rows)), map(operator.ne, outlines, outlines[1:]))
    return [rows[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(rows)])]


def _packed_alike(rows: Sequence[Sequence[Any]]) -> Bytes | None:
    """Bytes [T, n] of rows of one form; None if they have none."""
    try:
        parts = _tuple([tuple(each) for each in rows], 0)
    except (_Differ, ParameterError):
        return None
    count = len(rows)
    columns = [
        np.broadcast_to(np.frombuffer(each, np.uint8), (count, len(each))) if isinstance(each, bytes) else each
        for each in parts
    ]
    matrix = np.concatenate(columns, axis=1)
    return matrix if matrix[0].tobytes() == pack(tuple(rows[0])) else None


_Parts = list[bytes | Bytes]
"""Of a value of each row: bytes that all have, and matrices [T, n] of others."""


def _parts(values: Sequence[Any], depth: int) -> _Parts:
    if depth > MAX_DEPTH or len(set(map(type, values))) != 1:
        raise _Differ
    kind = type(values[0])
    found = _BY_TYPE.get(kind)
    if found is not None:
        return found(values, depth)
    if issubclass(kind, np.number | np.bool_):
        return _array(np.array(values), SCALAR, values[0])
    if kind not in (type(None), int, str, bytes) or any(each != values[0] for each in values):
        raise _Differ  # text and whole numbers take as many bytes as they need
    return [pack(values[0])]


def _arrays(values: Sequence[Any], depth: int) -> _Parts:
    if len(set(map(_DTYPE_AND_SHAPE, values))) != 1:
        raise _Differ
    # Many small arrays are put together three times as fast by `concatenate` as by `stack`.
    column = np.concatenate(values) if values[0].ndim else np.stack(values)
    return _array(column.reshape(len(values), *values[0].shape), ARRAY, values[0])


def _array(column: NDArray[Any], code: int, first: Any) -> _Parts:
    head, dtype = head_of(np.asarray(first)), column.dtype.newbyteorder("<")
    data = np.ascontiguousarray(column, dtype).reshape(len(column), -1)
    size = len(head) + column.nbytes // len(column)
    matrix = data.view(np.uint8) if data.size else np.empty((len(column), 0), np.uint8)
    return [_extension_head(code, size) + head, matrix]


def _floats(values: Sequence[float], depth: int) -> _Parts:
    return [b"\xcb", np.array(values, ">f8").reshape(-1, 1).view(np.uint8)]


def _bools(values: Sequence[bool], depth: int) -> _Parts:
    return [np.array(values, np.uint8).reshape(-1, 1) + np.uint8(_FALSE)]


def _list(values: Sequence[Sequence[Any]], depth: int) -> _Parts:
    counts = set(map(len, values))
    if len(counts) != 1:
        raise _Differ
    inner = [_parts(column, depth + 1) for column in zip(*values, strict=True)]
    return [_array_head(counts.pop()), *itertools.chain.from_iterable(inner)]


def _tuple(values: Sequence[Any], depth: int) -> _Parts:
    inner = _list(values, depth)
    size = sum(len(each) if isinstance(each, bytes) else each.shape[1] for each in inner)
    return [_extension_head(TUPLE, size), *inner]


def _dict(values: Sequence[dict[Any, Any]], depth: int) -> _Parts:
    names = tuple(values[0])
    if set(map(tuple, values)) != {names}:
        raise _Differ
    found: _Parts = [_map_head(len(names))]
    for name in names:
        found += [pack(name), *_parts([each[name] for each in values], depth + 1)]
    return found


_BY_TYPE: Final[dict[type, Callable[[Any, int], _Parts]]] = {
    np.ndarray: _arrays, float: _floats, bool: _bools, list: _list, tuple: _tuple, dict: _dict,
}  # fmt: skip
_DTYPE_AND_SHAPE: Final = operator.attrgetter("dtype", "shape")
_FALSE, _TRUE = 0xC2, 0xC3


def _extension_head(code: int, size: int) -> bytes:
    encoded: bytes = ENCODER.encode(msgspec.msgpack.Ext(code, bytes(size)))
    return encoded[: len(encoded) - size]


def _array_head(count: int) -> bytes:
    return ENCODER.encode([None] * count)[: -count or None]


def _map_head(count: int) -> bytes:
    if count < 16:
        return bytes((0x80 | count,))
    return struct.pack(">BH", 0xDE, count) if count < 1 << 16 else struct.pack(">BI", 0xDF, count)


# From bytes to samples


def unpacked_rows(values: Bytes, lengths: NDArray[np.int64]) -> list[Any]:
    """What was packed, in order. Arrays are the caller's own; those of samples of one form lie in one block.

    Args:
        values: Bytes of all rows behind each other.
        lengths: [T], how many each row has.

    Raises:
        DataError: these are other bytes.
    """
    found: list[Any] = [None] * len(lengths)
    ends = np.cumsum(lengths)
    begins, is_open = ends - lengths, np.ones(len(lengths), np.bool_)
    for length in np.unique(lengths)[:MAX_LENGTHS].tolist():
        places = np.flatnonzero(lengths == length)
        if len(places) < LEAST or length == 0:
            continue
        matrix = _gathered(values, begins[places], length)
        fits, made = _read_alike(matrix)
        for place, each in zip(places[fits].tolist(), made, strict=True):
            found[place] = each
        is_open[places[fits]] = False
    body = memoryview(values.tobytes()) if is_open.any() else memoryview(b"")
    for place in np.flatnonzero(is_open).tolist():
        found[place] = unpack(body[begins[place] : ends[place]])
    return found


def _gathered(values: Bytes, begins: NDArray[np.int64], length: int) -> Bytes:
    """Rows [T, length] that begin there."""
    first, count = int(begins[0]), len(begins)
    if int(begins[-1]) - first == (count - 1) * length:  # one behind the other
        return values[first : first + count * length].reshape(count, length)
    found: Bytes = values[begins[:, None] + np.arange(length)]
    return found


def _read_alike(matrix: Bytes) -> tuple[NDArray[np.bool_], list[Any]]:
    """Which rows [T] have the form of the middle one, and what they are; none if that has no form."""
    nothing = np.zeros(len(matrix), np.bool_), list[Any]()
    holes: list[tuple[int, int]] = []
    middle = matrix[len(matrix) // 2]
    try:
        form, end = _form(middle.tobytes(), 0, holes, 0)
    except (_Differ, ValueError, IndexError, TypeError, struct.error, UnicodeDecodeError, msgspec.MsgspecError):
        return nothing
    if end != len(middle):
        return nothing
    is_fixed = np.ones(len(middle), np.bool_)
    for begin, stop in holes:
        is_fixed[begin:stop] = False
    fits = (matrix[:, is_fixed] == middle[is_fixed]).all(1)
    for begin, stop in holes:
        if stop - begin == 1 and middle[begin] in (_FALSE, _TRUE):
            fits &= (matrix[:, begin] | 1) == _TRUE
    alike = matrix if fits.all() else matrix[fits]
    return (fits, form.values(alike)) if len(alike) else nothing


class _Form(NamedTuple):
    """How to make a value of each row [T, n]."""

    values: Callable[[Bytes], list[Any]]


def _form(data: bytes, at: int, holes: list[tuple[int, int]], depth: int) -> tuple[_Form, int]:
    """The form of the value that begins there, and where it ends. What differs between rows goes into `holes`.

    Raises:
        _Differ, ValueError, IndexError: there is none.
    """
    code = data[at]
    if depth > 2 * MAX_DEPTH:
        raise _Differ
    if code in (_FALSE, _TRUE):
        holes.append((at, at + 1))
        return _Form(lambda rows: (rows[:, at] == _TRUE).tolist()), at + 1
    if code == 0xCB:
        holes.append((at + 1, at + 9))
        return _Form(lambda rows: _viewed(rows, at + 1, at + 9, np.dtype(">f8"), ()).tolist()), at + 9
    if 0x90 <= code < 0xA0 or code in (0xDC, 0xDD):
        count, begin = _count(data, at, 0x90, 0xDC)
        return _sequence(data, begin, count, holes, depth, list)
    if 0x80 <= code < 0x90 or code in (0xDE, 0xDF):
        return _mapping(data, at, holes, depth)
    if 0xD4 <= code <= 0xD8 or 0xC7 <= code <= 0xC9:
        return _extension(data, at, holes, depth)
    end = _end_of_constant(data, at)
    constant = DECODER.decode(data[at:end])
    return _Form(lambda rows: [constant] * len(rows)), end


def _count(data: bytes, at: int, small: int, large: int) -> tuple[int, int]:
    """Of an array or map: how many it has, and where the first one begins."""
    if data[at] < small + 16 and data[at] >= small:
        return data[at] - small, at + 1
    width = 2 if data[at] == large else 4
    return int.from_bytes(data[at + 1 : at + 1 + width], "big"), at + 1 + width


def _sequence(
    data: bytes, at: int, count: int, holes: list[tuple[int, int]], depth: int, kind: type
) -> tuple[_Form, int]:
    forms: list[_Form] = []
    for _ in range(min(count, len(data))):
        form, at = _form(data, at, holes, depth + 1)
        forms.append(form)
    if not forms:
        return _Form(lambda rows: [kind() for _ in range(len(rows))]), at

    def made(rows: Bytes) -> list[Any]:
        found = zip(*(form.values(rows) for form in forms), strict=True)
        return list(found) if kind is tuple else list(map(list, found))

    return _Form(made), at


def _mapping(data: bytes, at: int, holes: list[tuple[int, int]], depth: int) -> tuple[_Form, int]:
    count, at = _count(data, at, 0x80, 0xDE)
    names: list[Any] = []
    forms: list[_Form] = []
    for _ in range(min(count, len(data))):
        end = _end_of_constant(data, at)
        names.append(DECODER.decode(data[at:end]))
        form, at = _form(data, end, holes, depth + 1)
        forms.append(form)
    if not names:
        return _Form(lambda rows: [{} for _ in range(len(rows))]), at

    def made(rows: Bytes) -> list[Any]:
        columns = zip(*(form.values(rows) for form in forms), strict=True)
        return [dict(zip(names, each, strict=True)) for each in columns]

    return _Form(made), at


def _extension(data: bytes, at: int, holes: list[tuple[int, int]], depth: int) -> tuple[_Form, int]:
    if data[at] >= 0xD4:
        size, begin = 1 << (data[at] - 0xD4), at + 2
    else:
        width = 1 << (data[at] - 0xC7)
        size, begin = int.from_bytes(data[at + 1 : at + 1 + width], "big"), at + 2 + width
    code, end = data[begin - 1], begin + size
    if end > len(data):
        raise _Differ
    if code == TUPLE:
        count, first = _count(data, begin, 0x90, 0xDC)
        form, stop = _sequence(data, first, count, holes, depth, tuple)
        if stop != end or not 0x90 <= data[begin] <= 0xDD:
            raise _Differ
        return form, end
    if code not in (ARRAY, SCALAR):
        raise _Differ
    offset, dtype, shape = form_of(data[begin:end])
    holes.append((begin + offset, end))
    if code == ARRAY and not shape:
        return _Form(lambda rows: [each.reshape(()) for each in _viewed(rows, begin + offset, end, dtype, (1,))]), end
    return _Form(lambda rows: list(_viewed(rows, begin + offset, end, dtype, shape))), end


def _viewed(rows: Bytes, begin: int, end: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Values [T, *shape] of a stretch of all rows, in an array of their own."""
    if begin == end:
        return np.empty((len(rows), *shape), dtype)
    return rows[:, begin:end].copy().view(dtype).reshape(len(rows), *shape)


def _end_of_constant(data: bytes, at: int) -> int:
    """Where nothing, a whole number, a text or bytes end.

    Raises:
        _Differ: it is something else.
    """
    code = data[at]
    if code < 0x80 or code >= 0xE0 or code == 0xC0:
        return at + 1
    if 0xA0 <= code < 0xC0:
        return at + 1 + code - 0xA0
    if code in _NUMBERS:
        return at + 1 + _NUMBERS[code]
    if code in _SIZED:
        width = _SIZED[code]
        return at + 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "big")
    raise _Differ


_NUMBERS: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
