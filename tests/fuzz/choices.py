"""Bytes as a row of decisions, for targets that make things instead of reading bytes.

Beyond the end of the bytes every choice is the first one, so that any bytes are an input, and fewer bytes make less.
"""

import math
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

_T = TypeVar("_T")
INTEGERS = (0, 1, 2, 3, 7, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 - 1, 2**53, 2**63 - 1, 2**64 - 1)
FLOATS = (
    0.0, 1.0, 0.5, -1.0, 0.0, 1.0, 1e-300, 5e-324, 1.5e308, -1.5e308, 1.5e308, 1e16, 1e5, math.nan, math.inf, -math.inf,
)  # fmt: skip
TEXTS = (
    "", "a", "x" * 255, "\n\x1b[2J", "../../etc/passwd", "\u202e\u2028", "é" * 40, "%00", "a\x00b", "<script>", "2",
)  # fmt: skip


class Choices:
    """Decisions that the bytes make, from the first byte to the last."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def below(self, count: int) -> int:
        """Return a number below `count`, which is at most 65536."""
        width = 1 if count <= 256 else 2
        number = int.from_bytes(self.take(width), "little")
        return number % max(1, count)

    def take(self, count: int) -> bytes:
        """Return so many bytes, or fewer at the end."""
        piece = self._data[self._at : self._at + count]
        self._at += count
        return piece

    def pick(self, values: Sequence[_T]) -> _T:
        return values[self.below(len(values))]

    def integer(self, low: int = 0, high: int = 2**64 - 1) -> int:
        """Return a whole number of this range, mostly one at its ends or another striking number."""
        if self.below(4) == 0:
            return low + int.from_bytes(self.take(2), "little") % (high - low + 1)
        return min(high, max(low, self.pick((*INTEGERS, low, high))))

    def real(self, low: float = -math.inf, high: float = math.inf) -> float:
        """Return a striking float, mostly one of this range."""
        number = self.pick(FLOATS)
        return number if math.isnan(number) or not self.below(16) else min(high, max(low, number))

    def text(self, most: int = 300) -> str:
        """Return text, which may be unsafe to print."""
        if self.below(3) == 0:
            return self.take(self.below(40)).decode("utf-8", "replace")[:most]
        return self.pick(TEXTS)[:most]

    def value(self, of: inspect.Type) -> Any:
        """Return a value that the wire accepts for this type, or now and then one that it refuses."""
        if isinstance(of, inspect.StructType):
            return self.struct(of.cls)
        if isinstance(of, inspect.UnionType):
            return self.value(self.pick(of.types))
        if isinstance(of, inspect.IntType):
            return self.integer(of.ge or 0, 2**64 - 1 if of.le is None else of.le)
        if isinstance(of, inspect.FloatType):
            return self.real(-math.inf if of.ge is None else of.ge, math.inf if of.le is None else of.le)
        if isinstance(of, inspect.BoolType):
            return bool(self.below(2))
        if isinstance(of, inspect.StrType):
            return self.text(of.max_length or 300).ljust(of.min_length or 0, "a")
        if isinstance(of, inspect.BytesType):
            return self.take(self.below(1 + min(of.max_length or 64, 250))).ljust(of.min_length or 0, b"\x01")
        if isinstance(of, inspect.ListType):
            return [self.value(of.item_type) for _ in range(self.below(5))]
        if isinstance(of, inspect.DictType):
            return {self.value(of.key_type): self.value(of.value_type) for _ in range(self.below(4))}
        return None

    def struct(self, kind: type[_T], **fixed: Any) -> _T:
        """Return a message body, or a row of one: some fields are chosen, the other fields have their defaults."""
        described = typing.cast(inspect.StructType, inspect.type_info(kind))
        values = dict(fixed)
        for each in described.fields:
            is_free = each.default is not msgspec.NODEFAULT or each.default_factory is not msgspec.NODEFAULT
            if each.name not in values and (described.array_like or not is_free or self.below(3)):
                values[each.name] = self.value(each.type)
        return kind(**values)
