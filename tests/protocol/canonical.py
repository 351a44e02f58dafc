"""One name for all states of an object graph that nobody could tell apart.

It walks every attribute, so that a new one is part of the name without anybody's thinking of it. What never changes in a
world, such as schemas and limits, and what decides nothing there, such as locks, pools and what counts their bytes, is
left out by its type.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import msgspec
import numpy as np

from memoire._core import Condition
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables.table import OpenTable, Tables
from memoire.wire.byte_budget import ByteBudget, ByteHolder

LEFT_OUT: Final = (
    Tables, OpenTable, Limits, Schema, Parameters, random.Random, threading.Condition, threading.Event, ModuleType, type,
    type(threading.Lock()), type(threading.RLock()), Condition, weakref.WeakValueDictionary, ByteBudget,
    ByteHolder,
)  # fmt: skip
PLAIN: Final = frozenset({int, float, str, bytes, bool, type(None)})


def name_of(value: Any) -> bytes:
    """Two states have the same name if nothing that is walked differs."""
    return hashlib.blake2b(repr(Walk().of(value)).encode(), digest_size=16).digest()


class Walk:
    """One walk: an object that was met before is named by when that was."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}

    def of(self, value: Any) -> Any:
        """Nested lists of plain values."""
        kind = type(value)
        if kind in PLAIN:
            return value
        how = _way_of(kind)
        if how in UNMARKED:
            return how(self, value)
        met = self._met.get(id(value))
        if met is not None:
            return "met", met
        self._met[id(value)] = len(self._met)
        return how(self, value)

    def every(self, values: Any) -> list[Any]:
        """Of several values."""
        return [each if type(each) in PLAIN else self.of(each) for each in values]


def _left_out(walk: Walk, value: Any) -> Any:
    return type(value).__name__


def _method(walk: Walk, value: Any) -> Any:
    return value.__name__, walk.of(value.__self__)


def _mapping(walk: Walk, value: Any) -> Any:
    keys = list(value) if len(value) < 2 else sorted(value, key=repr)
    return walk.every(keys), walk.every([value[key] for key in keys])


def _counts(walk: Walk, value: Any) -> Any:
    return sorted((repr(key), count) for key, count in value.items() if count)


def _unordered(walk: Walk, value: Any) -> Any:
    return walk.every(sorted(value, key=repr))


def _text(walk: Walk, value: Any) -> Any:
    return str(value)


def _bytes(walk: Walk, value: Any) -> Any:
    return value.tobytes()


def _together(walk: Walk, value: Any) -> Any:
    return walk.every(value)


def _partial(walk: Walk, value: Any) -> Any:
    return walk.every([value.func, value.args, value.keywords])


def _function(walk: Walk, value: Any) -> Any:
    return value.__qualname__, walk.every([cell.cell_contents for cell in value.__closure__ or ()])


def _object(walk: Walk, value: Any) -> Any:
    kind = type(value)
    names = _slots(kind)
    if hasattr(value, "__dict__"):
        names = (*names, *sorted(value.__dict__))
    return kind.__name__, names, walk.every([getattr(value, name, None) for name in names])


WAYS: Final[dict[Any, Callable[[Walk, Any], Any]]] = {
    LEFT_OUT: _left_out,
    (MethodType, BuiltinFunctionType): _method,
    Counter: _counts,
    dict: _mapping,
    (set, frozenset): _unordered,
    (Enum, PurePath, itertools.count): _text,
    (np.ndarray, np.void): _bytes,
    tuple: _together,
    (list, deque): Walk.every,
    functools.partial: _partial,
    FunctionType: _function,
}
"""How values of each kind are walked; the first that fits."""
UNMARKED: Final = (_left_out, _method, _text, _bytes, _together)
"""Ways of values that nobody changes: whether two of them are the same one does not matter."""


@functools.cache
def _way_of(kind: type) -> Callable[[Walk, Any], Any]:
    return next((way for kinds, way in WAYS.items() if issubclass(kind, kinds)), _object)


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    names = {name for each in kind.__mro__ for name in _declared(each)}
    return tuple(sorted(names - {"__dict__", "__weakref__"}))


def _declared(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
