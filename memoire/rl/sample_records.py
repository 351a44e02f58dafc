"""Samples of workers as bytes, column by column, and back: what a trainer's journal is made of. Pure.

Samples that follow each other and are nested alike are a run: each of their leaves is one column, and a column whose
values are all the same is stored once. Nothing in a record can run anything.

    length of the header u32 | header: MessagePack [[samples, structure, [[kind, dtype, shape, values]]]] | columns
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from memoire.errors import DataError, ParameterError

from .trees import LEAF, Structure, assembled, leaves_of, paths_of, structure_of

PLAIN: Final[dict[type, tuple[str, str]]] = {bool: ("bool", "|b1"), int: ("int", "<i8"), float: ("float", "<f8")}
"""Kind and dtype of columns of Python's own numbers."""
UNREADABLE: Final = (
    msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError, OverflowError, StopIteration
)  # fmt: skip
"""What reading other bytes may raise."""
MAX_DEPTH: Final = 32
"""Containers within each other."""
KINDS: Final = "biufcSU"
"""Kinds of dtypes that can be stored: no objects."""


def packed(samples: Sequence[Any]) -> bytes:
    """Samples as bytes.

    Raises:
        ParameterError: one holds something else than plain values and arrays; says where.
    """
    runs, blocks = [], []
    for structure, rows in _runs(samples):
        columns = []
        for place, path in enumerate(paths_of(structure)):
            facts, block = _column([row[place] for row in rows], path)
            columns.append(facts)
            blocks.append(block)
        runs.append([len(rows), structure, columns])
    header = msgspec.msgpack.encode(runs)
    return b"".join([len(header).to_bytes(4, "little"), header, *blocks])


def unpacked(body: bytearray | bytes) -> list[Any]:
    """The samples in bytes; their arrays lie in this memory.

    Raises:
        DataError: these are other bytes.
    """
    try:
        return _unpacked(memoryview(body))
    except UNREADABLE as error:
        raise DataError("a record of samples", f"cannot be read: {error}") from error


def _runs(samples: Sequence[Any]) -> Iterator[tuple[Structure, list[list[Any]]]]:
    """(structure, leaves of each) of samples that follow each other and are alike in all but values."""
    current: Any = None
    rows: list[list[Any]] = []
    for sample in samples:
        leaves = leaves_of(sample)
        form = structure_of(sample), [_form(leaf) for leaf in leaves]
        if rows and form != current:
            yield current[0], rows
            rows = []
        current = form
        rows.append(leaves)
    if rows:
        yield current[0], rows


def _form(leaf: Any) -> Any:
    """What leaves of one column have in common."""
    return (type(leaf), leaf.dtype, leaf.shape) if isinstance(leaf, np.ndarray | np.generic) else type(leaf)


def _column(values: list[Any], path: str) -> tuple[list[Any], bytes]:
    """What the header says of a column, and its bytes."""
    first = values[0]
    if first is None or isinstance(first, str | bytes):
        return [type(first).__name__, "", [], values[:1] if values == values[:1] * len(values) else values], b""
    kind, dtype = PLAIN.get(type(first), ("", ""))
    if isinstance(first, np.ndarray | np.generic):
        kind, dtype = "array" if isinstance(first, np.ndarray) else "scalar", first.dtype.newbyteorder("<").str
    try:
        array = np.array(values, dtype or object)
    except OverflowError:
        array = np.array(values, object)
    if not dtype or array.dtype.kind not in KINDS or array.dtype.names is not None:
        expected = "plain values: numbers, text, arrays, and tuples, lists and dicts of these, to be kept in a journal"
        raise ParameterError(f"sample{path}", type(first).__name__, expected)
    shape, data = array.shape[1:], array.tobytes()
    width = len(data) // len(values)
    is_same = len(values) > 1 and data == data[:width] * len(values)
    return [kind, dtype, list(shape), is_same], data[:width] if is_same else data


def _unpacked(body: memoryview) -> list[Any]:
    size = int.from_bytes(body[:4], "little")
    runs, at, samples = msgspec.msgpack.decode(body[4 : 4 + size]), 4 + size, []
    for count, given, columns in runs:
        structure, leaves = _structure(given), []
        for kind, dtype, shape, values in columns:
            width = np.dtype(dtype).itemsize * math.prod(shape) if dtype else 0
            end = at + width * (1 if values is True else count)
            leaves.append(_values(kind, dtype, shape, values, body[at:end], count))
            at = end
        if any(len(column) != count for column in leaves):
            raise ValueError("a column has another length than its run")
        rows: Any = zip(*leaves, strict=True) if leaves else [()] * count
        samples += [assembled(structure, row) for row in rows]
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes belong to no column")
    return samples


def _values(kind: str, dtype: str, shape: list[int], values: Any, data: memoryview, count: int) -> list[Any]:
    """A column, one value for each sample."""
    if not dtype:
        return values * count if len(values) == 1 else list(values)
    found = np.dtype(dtype)
    if found.kind not in KINDS:
        raise ValueError(f"a column of {found}")
    array = np.frombuffer(data, found).reshape(-1, *shape)
    if kind == "array":
        if values is True:
            return [array.reshape(shape).copy() for _ in range(count)]
        return list(array) if shape else _dots(array)
    rows: list[Any] = list(array) if kind == "scalar" else array.tolist()
    return rows * count if values is True else rows


def _dots(array: Any) -> list[Any]:
    """Arrays without dimensions, which list() would make numbers."""
    return [array[place : place + 1].reshape(()) for place in range(len(array))]


def _structure(given: Any, depth: int = 0) -> Structure:
    if given is None:
        return LEAF
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} containers within each other")
    kind, names, parts = given
    if kind not in ("tuple", "list", "dict") or (names is None) != (kind != "dict"):
        raise ValueError(f"a container {kind!r}")
    return kind, None if names is None else tuple(names), tuple(_structure(part, depth + 1) for part in parts)
