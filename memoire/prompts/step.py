"""What a trainer gets of one step: the groups of its rank, with their columns packed or padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire.errors import NoSuchField, ParameterError
from memoire.replay.ragged import Ragged
from memoire.replay.schema import Schema

from .columns import RawColumns, gathered
from .rows import Key


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Answers one behind the other, without padding."""

    columns: Mapping[str, NDArray[Any]]
    """Ragged columns [T, *F], the T elements of all answers; plain ones [R, *F], one for each answer."""
    lengths: NDArray[np.int64]
    """[R], elements of each answer."""
    positions: NDArray[np.int64]
    """[T], place of each element in its answer."""
    segment: NDArray[np.int64]
    """[T], answer of each element."""

    @property
    def starts(self) -> NDArray[np.int64]:
        """[R + 1], where each answer begins, and the end: what attention over packed sequences is given."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A column: [T, *F] or [R, *F]."""
        return self.columns[name]


@dataclass(frozen=True, slots=True)
class Step:
    """The groups of one rank at one step: G groups of R answers together. `step["tokens"]` is a column of theirs."""

    step: int
    keys: list[Key]
    """[G], data set, epoch and index of each group's prompt."""
    group: NDArray[np.int64]
    """[R], group of each answer, a place in `keys`."""
    answer: NDArray[np.int64]
    """[R], place of each answer in its prompt's group."""
    version: NDArray[np.int64]
    """[R], of the model that made each answer's oldest token."""
    columns: dict[str, Any]
    """By name: `Ragged` of R values, or an array [R, *F]."""
    scores: NDArray[np.float64]
    """[G]"""
    weights: NDArray[np.float64]
    """[G], importance of each group: 1, or less for one that is replayed."""
    is_replayed: NDArray[np.bool_]
    """[G]"""
    total_groups: int
    """Of all ranks."""
    rank_tokens: tuple[int, ...] = ()
    """Tokens of each rank."""
    _update: Callable[[Mapping[Key, float]], int] = field(default=lambda scores: 0, repr=False)

    def __getitem__(self, name: str) -> Any:
        """A column of all R answers: `Ragged`, or [R, *F]."""
        if name not in self.columns:
            raise NoSuchField("step", repr(name), (), tuple(self.columns))
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def packed(self) -> PackedStep:
        """All answers one behind the other. Ragged columns whose answers have the lengths of the first one are packed
        with it; others are left out.
        """
        lengths = self._lengths()
        ends = np.cumsum(lengths)
        segment = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
        columns = {name: value.values if isinstance(value, Ragged) else value for name, value in self._even(lengths)}
        return PackedStep(columns, lengths, positions, segment)

    def padded(self) -> dict[str, NDArray[Any]]:
        """Ragged columns side by side [R, L, *F], zeros behind; plain ones [R, *F]; "is_token", bool [R, L]."""
        lengths = self._lengths()
        longest = max(1, int(lengths.max(initial=0)))
        columns = {
            name: value.padded(longest) if isinstance(value, Ragged) else value for name, value in self._even(lengths)
        }
        return columns | {"is_token": np.arange(longest) < lengths[:, None]}

    def _lengths(self) -> NDArray[np.int64]:
        for value in self.columns.values():
            if isinstance(value, Ragged):
                return value.lengths
        raise ParameterError("columns", ", ".join(self.columns), "a ragged column, such as tokens")

    def _even(self, lengths: NDArray[np.int64]) -> Iterator[tuple[str, Any]]:
        for name, value in self.columns.items():
            if not isinstance(value, Ragged) or np.array_equal(value.lengths, lengths):
                yield name, value

    @property
    def tokens(self) -> int:
        """Elements of the first ragged column, of all answers."""
        return int(self._lengths().sum())

    def update_scores(self, values: Sequence[float] | NDArray[np.float64]) -> int:
        """Set the scores [G] of these groups, by which committed ones are replayed; returns how many are known."""
        scores = np.asarray(values, np.float64).reshape(-1)
        if len(scores) != len(self.keys) or not np.isfinite(scores).all() or (scores < 0).any():
            raise ParameterError("values", values, f"{len(self.keys)} finite numbers, 0 or more: one for each group")
        return self._update(dict(zip(self.keys, scores.tolist(), strict=True)))


@dataclass(slots=True)
class StepAnswer:
    """One answer on its way into a step."""

    group: int
    """Place of its group among the rank's."""
    index: int
    version: int
    raw: RawColumns


def step_of(schema: Schema, answers: Sequence[StepAnswer], places: Sequence[int], **facts: Any) -> Step:
    """The step of these answers.

    Args:
        places: Of the columns that are handed out.
        facts: The other fields of `Step`.
    """
    columns = {
        schema.names[place]: gathered(schema, place, [each.raw.get(place) for each in answers]) for place in places
    }
    return Step(
        group=np.array([each.group for each in answers], np.int64),
        answer=np.array([each.index for each in answers], np.int64),
        version=np.array([each.version for each in answers], np.int64),
        columns=columns,
        **facts,
    )
