"""Canonical names of object graphs: equivalent states have the same name.

The walk reads every attribute, so a new attribute becomes part of the name by itself. The walk leaves out types that
never change in a world, such as schemas and limits, and types that decide nothing, such as locks, pools and byte
budgets.
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
    """Return a hash of an object graph. Two states have the same hash if no walked attribute differs."""
    return hashlib.blake2b(repr(Walk().of(value)).encode(), digest_size=16).digest()


class Walk:
    """A walk over one object graph. Later references to an object are written as the number of its first visit."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}

    def of(self, value: Any) -> Any:
        """Return a value as nested lists and tuples of plain values."""
        kind = type(value)
        if kind in PLAIN:
            return value
        is_marked, walk = _way_of(kind)
        if is_marked:
            met = self._met.get(id(value))
            if met is not None:
                return "met", met
            self._met[id(value)] = len(self._met)
        return walk(self, value)

    def every(self, values: Any) -> list[Any]:
        return [each if type(each) in PLAIN else self.of(each) for each in values]


def _mapping(walk: Walk, value: Any) -> Any:
    keys = list(value) if len(value) < 2 else sorted(value, key=repr)
    return walk.every(keys), walk.every([value[key] for key in keys])


def _function(walk: Walk, value: Any) -> Any:
    return value.__qualname__, walk.every([cell.cell_contents for cell in value.__closure__ or ()])


def _object(walk: Walk, value: Any) -> Any:
    kind = type(value)
    names = _slots(kind)
    if hasattr(value, "__dict__"):
        names = (*names, *sorted(value.__dict__))
    return kind.__name__, names, walk.every([getattr(value, name, None) for name in names])


WAYS: Final[tuple[tuple[Any, bool, Callable[[Walk, Any], Any]], ...]] = (
    (LEFT_OUT, False, lambda walk, value: type(value).__name__),
    ((MethodType, BuiltinFunctionType), False, lambda walk, value: (value.__name__, walk.of(value.__self__))),
    (Counter, True, lambda walk, value: sorted((repr(key), count) for key, count in value.items() if count)),
    (dict, True, _mapping),
    ((set, frozenset), True, lambda walk, value: walk.every(sorted(value, key=repr))),
    ((Enum, PurePath, itertools.count), False, lambda walk, value: str(value)),
    ((np.ndarray, np.void), False, lambda walk, value: value.tobytes()),
    (tuple, False, Walk.every),
    ((list, deque), True, Walk.every),
    (functools.partial, True, lambda walk, value: walk.every([value.func, value.args, value.keywords])),
    (FunctionType, True, _function),
    (object, True, _object),
)
"""Types, whether the identity of a value matters (mutable values), and the function that walks a value. The first entry
that fits applies.
"""


@functools.cache
def _way_of(kind: type) -> tuple[bool, Callable[[Walk, Any], Any]]:
    return next((is_marked, walk) for kinds, is_marked, walk in WAYS if issubclass(kind, kinds))


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    names = {name for each in kind.__mro__ for name in _declared(each)}
    return tuple(sorted(names - {"__dict__", "__weakref__"}))


def _declared(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
