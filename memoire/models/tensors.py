"""Named arrays as the body of a model, in the format of a network's weights. Pure; a body holds no code.

    8 bytes    length of the header, little-endian
    header     JSON, padded with spaces: {"fc.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    data       the arrays in that order, each row by row, without gaps

The format is the file format of safetensors (https://github.com/huggingface/safetensors), whose tools can read a body.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from memoire.errors import ParameterError, WrongModel

ITEM_BYTES: Final = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one number, by the dtype's name in safetensors; BF16 has no counterpart in NumPy."""
MAX_ARRAYS: Final = 1 << 16
MAX_HEADER_BYTES: Final = 1 << 24
MAX_DIMENSIONS: Final = 32
_ALIGNMENT: Final = 64
_METADATA: Final = "__metadata__"
"""Name that safetensors reserves for metadata."""


class Array(NamedTuple):
    """One array in row-major order."""

    dtype: str
    """Name of the dtype, a key of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    data: memoryview
    """Bytes of the array: prod(shape) times the bytes of a number."""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class _ArrayFacts(msgspec.Struct, forbid_unknown_fields=True):
    """Description of an array in the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Header(msgspec.Struct):
    """Metadata of a header, without its arrays."""

    facts: dict[str, str] = msgspec.field(name=_METADATA, default_factory=dict)


def pack(arrays: Mapping[Any, Array]) -> bytes:
    """Return a body with these arrays, by name.

    Raises:
        ParameterError: there are no arrays, or too many, or a name is not allowed.
    """
    if not 0 < len(arrays) <= MAX_ARRAYS:
        raise ParameterError.with_text(
            f"net has {len(arrays)} arrays; a model has 1 to {MAX_ARRAYS}. Nothing was published."
        )
    facts, offset = {}, 0
    for name, array in arrays.items():
        if not isinstance(name, str) or name == _METADATA:
            raise ParameterError("net", name, f"a state_dict whose names are text other than {_METADATA!r}")
        facts[name] = _ArrayFacts(array.dtype, list(array.shape), (offset, offset + array.data.nbytes))
        offset += array.data.nbytes
    header = msgspec.json.encode(facts)
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    if len(header) > MAX_HEADER_BYTES:
        raise ParameterError.with_text(
            f"The names of net's arrays take {len(header)} bytes; the limit is {MAX_HEADER_BYTES}. Nothing was "
            f"published."
        )
    return b"".join([len(header).to_bytes(8, "little"), header, *(array.data for array in arrays.values())])


def with_facts(body: bytes, facts: Mapping[str, str]) -> bytes:
    """Return a body of `pack` with metadata: texts by name, which other programs may ignore."""
    if not facts:
        return body
    size = int.from_bytes(body[:8], "little")
    header = b'{"%s":%s,%s' % (_METADATA.encode(), msgspec.json.encode(dict(facts)), body[9 : 8 + size].rstrip(b" "))
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    return b"".join([len(header).to_bytes(8, "little"), header, body[8 + size :]])


def facts_of(body: bytes) -> dict[str, str]:
    """Return the metadata of a body: texts by name, or {} if there is none or the body is damaged."""
    size = int.from_bytes(body[:8], "little")
    try:
        return msgspec.json.decode(body[8 : 8 + min(size, MAX_HEADER_BYTES)], type=_Header).facts
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}


def unpack(body: bytes, what: str = "this model") -> dict[str, Array]:
    """Return the arrays in a body, by name, in its order; they share the body's memory.

    Args:
        what: Name of the model in errors.

    Raises:
        WrongModel: the body holds no arrays, is cut short, or has a malformed header.
    """
    size = int.from_bytes(body[:8], "little")
    if len(body) < 8 or not 2 <= size <= min(MAX_HEADER_BYTES, len(body) - 8) or body[8:9] != b"{":
        raise WrongModel(
            what, "holds no named arrays", "Publish it with memoire.torch.publish, or decode its body yourself."
        )
    try:
        rows = msgspec.json.decode(body[8 : 8 + size], type=dict[str, msgspec.Raw])
        facts = {name: msgspec.json.decode(row, type=_ArrayFacts) for name, row in rows.items() if name != _METADATA}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _damaged(what, f"its header cannot be read: {error}") from error
    return _arrays(what, facts, memoryview(body)[8 + size :])


def _arrays(what: str, facts: Mapping[str, _ArrayFacts], data: memoryview) -> dict[str, Array]:
    """Return the arrays, whose data must follow each other without gaps up to the last byte."""
    if not 0 < len(facts) <= MAX_ARRAYS:
        raise _damaged(what, f"it has {len(facts)} arrays")
    arrays, end = {}, 0
    for name, each in sorted(facts.items(), key=lambda item: item[1].data_offsets):
        if each.dtype not in ITEM_BYTES:
            raise _damaged(what, f"{name!r} has dtype {each.dtype[:20]!r}, which is not one of {', '.join(ITEM_BYTES)}")
        if len(each.shape) > MAX_DIMENSIONS or any(length < 0 for length in each.shape):
            raise _damaged(what, f"{name!r} has the invalid shape {each.shape[:MAX_DIMENSIONS]}")
        begin, following = each.data_offsets
        if begin != end or following - begin != math.prod(each.shape) * ITEM_BYTES[each.dtype] or following > len(data):
            raise _damaged(what, f"the offsets of {name!r} do not fit its shape or the data")
        part, end = data[begin:following], following
        if each.dtype == "BOOL" and not set(part) <= {0, 1}:
            raise _damaged(what, f"{name!r} has a bool that is neither 0 nor 1")
        arrays[name] = Array(each.dtype, tuple(each.shape), part)
    if end != len(data):
        raise _damaged(what, f"{len(data) - end} bytes at the end belong to no array")
    return {name: arrays[name] for name in facts}


def _damaged(what: str, problem: str) -> WrongModel:
    return WrongModel(what, f"is damaged: {problem}", "Publish it again with memoire.torch.publish.")


def check_fit(what: str, arrays: Mapping[str, Array], wanted: Mapping[str, Any], free_dtypes: bool = False) -> None:
    """Raise WrongModel if arrays do not fit those of a network in names, dtypes and shapes.

    Args:
        wanted: (dtype, shape) of the network's arrays, by name.
        free_dtypes: True accepts floats of another width.

    Raises:
        WrongModel: the first three differences are in the message.
    """
    problems = [f"lacks {name!r}" for name in wanted if name not in arrays]
    problems += [f"has {name!r}, which the network lacks" for name in arrays if name not in wanted]
    for name, array in arrays.items():
        if name not in wanted:
            continue
        dtype, shape = wanted[name]
        is_alike = array.dtype == dtype or (free_dtypes and "F" in array.dtype and "F" in dtype)
        if array.shape != tuple(shape) or not is_alike:
            problems.append(f"has {name!r} as {array}, but the network has {dtype}{list(shape)}")
    if problems:
        rest = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        advice = "Build the network as its publisher does; load(..., cast=True) takes floats of another width."
        raise WrongModel(what, "; ".join(problems[:3]) + rest, advice)
