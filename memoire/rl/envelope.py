"""Samples of any pipeline in one table of rollouts: what workers of `memoire.tmrl` send, and its trainers take.

    sample    (act, obs, rew, terminated, truncated, info)     plain values and arrays, as a compressor left them
    entry     obs: its bytes, ragged | reward | is_reset | episode, step

A server needs no schema of the environment for that. The bytes are MessagePack; arrays, numbers of NumPy and tuples are
extensions of it. Nothing in them can run anything. Pure: no socket, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from memoire.arguments import whole
from memoire.errors import DataError, ParameterError
from memoire.pool.tables import Table
from memoire.replay.columns import Column
from memoire.replay.ragged import Ragged
from memoire.replay.rollouts import Rollouts
from memoire.replay.schema import Schema

TABLE: Final = "samples"
"""Name of the table."""
CAPACITY: Final = 100_000
"""Samples that the table holds unless told otherwise; the oldest leave."""
MAX_DEPTH: Final = 32
"""Containers within each other."""
KINDS: Final = "biufcSU"
"""Kinds of dtypes that travel: no objects."""
MAX_HEADS: Final = 4096
"""Forms of arrays that are remembered: further ones take longer."""
_ARRAY, _SCALAR, _TUPLE = 1, 2, 3  # numbers of the extensions
_HEADS: Final[dict[tuple[np.dtype[Any], tuple[int, ...]], bytes]] = {}  # what arrays of a form begin with
_READ: Final[dict[bytes, tuple[np.dtype[Any], tuple[int, ...], int]]] = {}  # the same, from bytes to form

SCHEMA: Final = Schema(
    {
        "obs": Column(np.uint8, (None,), "state"),
        "reward": np.float32,
        "is_reset": np.bool_,
        "episode": np.int64,
        "step": np.int64,
        "test_length": np.int64,
        "test_return": np.float64,
    }
)


def samples_table(capacity: int = CAPACITY, least: int = 1) -> Table:
    """A table that holds so many samples of any pipeline; the oldest leave, and no worker ever waits.

    Args:
        least: Samples that a trainer should wait for before it takes some: it reads that off `cache_size`.
    """
    return Table(SCHEMA, storage="rollouts", capacity=capacity, full="oldest", cache_size=whole("least", least, 1))


class Sample(NamedTuple):
    """What a step gave, as the compressor left it."""

    act: Any
    obs: Any
    rew: Any
    terminated: Any
    truncated: bool
    info: Any
    is_reset: bool = False
    """Whether it is what `reset` gave: no step, and the first sample of an episode."""
    episode: int = 0
    step: int = 0
    """Which episode of its worker, and which step of that; 0 is the reset."""
    reward: float = 0.0
    """As the environment gave it, whatever the compressor made of it."""
    test_length: int = 0
    test_return: float = 0.0
    """Of a reset: of the test episode that the worker ran before it. Length 0 is none."""
    client: bytes = b""
    """Who sent it; b"" before it is sent."""


def columns_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Columns [T, ...] of an episode for `Client.push_episode`.

    Raises:
        ParameterError: a sample holds a value that does not travel; says where.
    """
    rows = [pack(tuple(each[:6])) for each in samples]
    return {
        "obs": Ragged(np.frombuffer(b"".join(rows), np.uint8), list(map(len, rows))),
        "reward": np.nan_to_num(np.array([each.reward for each in samples], np.float32)),
        "is_reset": np.array([each.is_reset for each in samples]),
        "episode": np.array([each.episode for each in samples], np.int64),
        "step": np.array([each.step for each in samples], np.int64),
        "test_length": np.array([each.test_length for each in samples], np.int64),
        "test_return": np.array([each.test_return for each in samples], np.float64),
    }


def samples_of(rollouts: Rollouts) -> list[Sample]:
    """The samples that a learner took, in order.

    Raises:
        DataError: an entry is none.
    """
    facts = (
        rollouts[name].tolist() for name in ("is_reset", "episode", "step", "reward", "test_length", "test_return")
    )
    packed: Ragged = rollouts["obs"]
    bodies, end = memoryview(packed.values.tobytes()), 0
    found = []
    for length, *each in zip(packed.lengths.tolist(), *facts, strict=True):
        found.append(_sample(bodies[end : end + length], *each))
        end += length
    return found


def _sample(body: memoryview, *facts: Any) -> Sample:
    parts = unpack(body)
    if not isinstance(parts, tuple) or len(parts) != 6:
        raise DataError("a sample", "holds something else than act, obs, rew, terminated, truncated and info")
    return Sample(*parts, *facts)


# Plain values as bytes


def pack(value: Any, what: str = "sample") -> bytes:
    """None, booleans, numbers, text, bytes, arrays, and tuples, lists and dicts of these, as bytes; types stay.

    Tensors travel as arrays.

    Args:
        what: What errors call it.

    Raises:
        ParameterError: something else is in it; says where.
    """
    try:
        return _ENCODER.encode(_plain(value, what, 0))
    except (OverflowError, UnicodeEncodeError) as error:
        raise ParameterError(what, str(error), "whole numbers of at most 64 bits, and text in UTF-8") from error


def unpack(body: bytes | memoryview) -> Any:
    """What `pack` packed; arrays are the caller's own.

    Raises:
        DataError: these are other bytes.
    """
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, UnicodeDecodeError) as error:
        raise DataError("a sample", f"cannot be read: {error}") from error


_ENCODER: Final = msgspec.msgpack.Encoder()
_SAME: Final = frozenset((type(None), bool, int, float, str, bytes))


def _plain(value: Any, where: str, depth: int) -> Any:
    """The value as MessagePack has it."""
    kind = type(value)
    if kind in _SAME:
        return value
    if kind is np.ndarray:
        return msgspec.msgpack.Ext(_ARRAY, _array_bytes(value, where))
    if depth >= MAX_DEPTH:
        raise ParameterError(where, f"{depth} containers within each other", f"at most {MAX_DEPTH}")
    found = _PLAIN.get(kind)
    return _other(value, where, depth) if found is None else found(value, where, depth + 1)


def _plain_tuple(value: tuple[Any, ...], where: str, depth: int) -> Any:
    parts = [_plain(each, where, depth) for each in value]
    return msgspec.msgpack.Ext(_TUPLE, _ENCODER.encode(parts))


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
        return msgspec.msgpack.Ext(_SCALAR, _array_bytes(np.asarray(value), where))
    if hasattr(value, "detach"):
        return _plain(np.asarray(value.detach().cpu()), where, depth)
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, _array_bytes(np.asarray(value), where))
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
    head = _HEADS.get((array.dtype, array.shape))
    if head is None:
        head = _head_of(array, where)
        if len(_HEADS) < MAX_HEADS:
            _HEADS[array.dtype, array.shape] = head
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("<"))
    return head + array.tobytes()


def _head_of(array: NDArray[Any], where: str) -> bytes:
    dtype = array.dtype.newbyteorder("<")
    if dtype.kind not in KINDS or dtype.names is not None:
        raise ParameterError(where, f"an array of {array.dtype}", "arrays of numbers, booleans or text")
    name = dtype.str.encode()
    return b"".join((bytes((len(name),)), name, bytes((array.ndim,)), np.array(array.shape, "<u4").tobytes()))


def _array(data: memoryview) -> NDArray[Any]:
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
    if code == _TUPLE:
        return tuple(_DECODER.decode(data))
    if code not in (_ARRAY, _SCALAR) or not len(data):
        raise ValueError(f"extension {code} of {len(data)} bytes")
    found = _array(data)
    return found[()] if code == _SCALAR else found


_DECODER: Final = msgspec.msgpack.Decoder(ext_hook=_extension)


def episodes_of(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Samples by episode, in order: each begins with a reset, or in the middle of what was sent in parts."""
    found: list[list[Sample]] = []
    for sample in samples:
        if sample.is_reset or not found:
            found.append([])
        found[-1].append(sample)
    return found
