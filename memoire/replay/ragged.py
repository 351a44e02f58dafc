"""Values of different lengths as one array: what a ragged column has of several entries.

A ragged column's first axis is free: a set of points, the tokens of a sentence, the nodes of a graph. Its values are
kept one after the other, without padding; a batch hands them out padded with zeros, with their lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from memoire.errors import ParameterError


class Ragged:
    """n values, each an array [its length, *F]: `ragged[i]` is one of them, without a copy. Unchangeable.

    Args:
        values: All elements, one value after the other: [sum of lengths, *F].
        lengths: How many elements each value has: int64 [n].

    Raises:
        ParameterError: the lengths are not those of the values.
    """

    __slots__ = ("_ends", "lengths", "values")

    values: NDArray[Any]
    lengths: NDArray[np.int64]

    def __init__(self, values: NDArray[Any], lengths: Any) -> None:
        self.values = values
        self.lengths = np.ascontiguousarray(lengths, np.int64)
        self._ends = np.cumsum(self.lengths)
        total = int(self._ends[-1]) if len(self._ends) else 0
        if self.lengths.ndim != 1 or (self.lengths < 0).any() or values.ndim < 1 or total != len(values):
            found = f"{len(self.lengths)} lengths that add up to {total}, for {np.shape(values)}"
            expected = "one for each value, at least 0, that add up to the elements there are"
            raise ParameterError("lengths", found, expected)

    @classmethod
    def of(cls, values: Iterable[NDArray[Any]], dtype: Any = None, element: tuple[int, ...] = ()) -> Ragged:
        """Arrays [L, *F], each of its own L, copied together; `dtype` and `element` (F) are those if there is none."""
        parts = list(values)
        lengths = [len(part) for part in parts]
        return cls(np.concatenate([np.empty((0, *element), dtype), *parts], dtype=dtype), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int | np.integer) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice | NDArray[Any]) -> Ragged: ...
    def __getitem__(self, index: Any) -> Any:
        """One value [its length, *F], or those of a slice, of integers or of a mask [n] as `Ragged`."""
        if isinstance(index, int | np.integer):
            end = int(self._ends[index])
            return self.values[end - int(self.lengths[index]) : end]
        if isinstance(index, slice) and index.step in (None, 1):
            start, stop, _ = index.indices(len(self))
            ends = np.concatenate([[0], self._ends])
            return Ragged(self.values[ends[start] : ends[max(start, stop)]], self.lengths[start:stop])
        chosen = np.arange(len(self))[index]
        return Ragged.of((self[i] for i in chosen), self.values.dtype, self.values.shape[1:])

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.values.shape[1:]))
        return f"Ragged({len(self)} values of {self.values.dtype}[any{', ' * bool(shape)}{shape}])"

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.values.nbytes

    def padded(self, longest: int | None = None) -> NDArray[Any]:
        """The N values side by side, zeros behind each: [N, L, *F].

        L is `longest`; None is the longest there is, at least 1.
        """
        width = max(1, int(self.lengths.max(initial=0))) if longest is None else longest
        made = np.zeros((len(self), width, *self.values.shape[1:]), self.values.dtype)
        made[np.arange(width) < self.lengths[:, None]] = self.values
        return made
