"""Layouts of containers: their blocks and the arrays of a batch, as schema and parameters determine them."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from memoire.errors import ParameterError
from memoire.replay.batch import ID, GatheredSamples
from memoire.replay.columns import Column
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema

from . import _container
from .parts import (
    ALIGNMENT,
    BOOKKEEPING,
    FACTS,
    HEAD,
    INDICES,
    LENGTH,
    LENGTHS,
    LENGTHS_OF,
    MAX_ROW_BYTES,
    OF_DRAWN,
    OF_EPISODE,
    OF_FEEDBACK,
    OF_WINDOWS,
    ROW,
    WHOLE,
    BlockSpec,
    ContainerKind,
    Part,
    RowCount,
)


class BatchArray(NamedTuple):
    """Side, column name, shape and dtype of an array of a batch; the shape omits a ragged column's axis of lengths."""

    side: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    element: tuple[int, ...] | None = None
    """Axes behind the axis of lengths of a ragged column; None for a column without one."""


_Field: TypeAlias = tuple[int, int, int, int, int]


class ContainerLayout:
    """Layout of containers: their blocks, and the arrays of a batch of their samples. Unchangeable.

    Use `layout_of`, which creates each layout once. Two caches can be in one batch exactly if they share a layout.

    Args:
        schema: Columns of the entries.
        frame_stack: Frames of a sample's states.
        prev, next: Names of the columns of both sides.
        kind: CACHE or DRAWN (SEQUENCES or DRAWN_SEQUENCES: `SequenceLayout`); EPISODE (every column but the return, and
            with `final` the final state); FEEDBACK; ROWS (every column, without bookkeeping).
        final: True if an episode has a final state.
    """

    length: int = 0
    """Entries of a sequence; 0 if samples are transitions."""

    def __init__(
        self,
        schema: Schema,
        frame_stack: int = 1,
        prev: Iterable[str] = (),
        next: Iterable[str] = (),
        kind: ContainerKind = ContainerKind.CACHE,
        final: bool = False,
    ) -> None:
        self.schema, self.frame_stack, self.kind = schema, frame_stack, kind
        self.prev = tuple(name for name in schema.names if name in set(prev))
        self.next = tuple(name for name in schema.names if name in set(next))
        self.reward_shape = () if schema.reward is None else schema[schema.reward].shape
        self.blocks: tuple[BlockSpec, ...] = (*self._bookkeeping(), *self._columns(final))
        self._place = {(form.column, form.part): i for i, form in enumerate(self.blocks)}
        outputs, fields = self._fields()
        both = list(zip(outputs, fields, strict=False))
        plain = [output for output in outputs if output.element is None]
        self._sides = [[each[1:4] for each in plain if each.side == side] for side in ("prev", "next")]
        self.ragged_outputs = [output for output in outputs if output.element is not None]
        """Arrays of a batch for ragged columns, in the order of the ragged fields of `core`."""
        ragged_fields = [field for output, field in both if output.element is not None]
        fields = [field for output, field in both if output.element is None] + fields[len(outputs) :]
        forms = list(enumerate(self.blocks))
        self.facts = [(i, OF_WINDOWS[form.part]) for i, form in forms if form.part in OF_WINDOWS]
        """Blocks filled from `DrawnWindows` or `DrawnSequences`: (block, name of the attribute)."""
        self.columns = [(i, form.part, schema.names[form.column]) for i, form in forms if form.column != BOOKKEEPING]
        """Blocks that belong to a column: (block, part, column's name)."""
        self.indices = tuple(part for part in INDICES if (BOOKKEEPING, part) in self._place)
        """Parts of the layout that hold indices into the frames, or into the entries of sequences."""
        rewards = max(1, self.length) * prod(self.reward_shape)
        self.ragged = {i: self._lengths_of(form) for i, form in forms if self._is_ragged(form)}
        """Block of a ragged column's values -> block of their lengths, or WHOLE (-2) if the block is one value."""
        blocks = list(self.blocks)
        self.core = _container.Layout(
            kind, frame_stack, rewards, blocks, fields, self.length, self.ragged, ragged_fields
        )

    def block_number(self, part: Part, name: str | None = None) -> int | None:
        """Return the number of a block, or None if the layout does not have it; name None means bookkeeping."""
        column = BOOKKEEPING if name is None else self.schema.names.index(name)
        return self._place.get((column, part))

    def _is_ragged(self, form: BlockSpec) -> bool:
        if form.column == BOOKKEEPING or form.part in LENGTHS:
            return False
        return self.schema.names[form.column] in self.schema.ragged

    def _lengths_of(self, form: BlockSpec) -> int:
        return self._place[form.column, LENGTHS_OF[form.part]] if form.part in LENGTHS_OF else WHOLE

    def bookkeeping_block(self, part: Part) -> int:
        """Return the number of a block of bookkeeping that the layout has."""
        return self._place[BOOKKEEPING, part]

    def allocate(self, samples: int) -> GatheredSamples:
        """Allocate arrays for a batch of `samples`: both sides in the order of the fields of `core`."""
        return GatheredSamples.empty(samples, self._sides, self.reward_shape, ID, length=self.length)

    def _bookkeeping(self) -> list[BlockSpec]:
        own = self._row_bytes()
        facts = [(part, FACTS[part]) for part in sorted(self._parts())]
        return [BlockSpec(BOOKKEEPING, part, fact.extent, own.get(part, fact.row_bytes)) for part, fact in facts]

    def _row_bytes(self) -> dict[Part, int]:
        """Return the bytes of a row of each bookkeeping part that depends on schema and parameters."""
        per_reward = 4 * prod(self.reward_shape)
        return {
            Part.PREV_INDEX: 4 * self.frame_stack, Part.NEXT_INDEX: 4 * self.frame_stack,
            Part.REWARD_SUM: per_reward, Part.DISCOUNT: per_reward,
        }  # fmt: skip

    def _parts(self) -> set[Part]:
        if self.kind is ContainerKind.FEEDBACK:
            return set(OF_FEEDBACK)
        if self.kind is ContainerKind.EPISODE:
            return set(OF_EPISODE)
        if self.kind is ContainerKind.ROWS:
            return set()
        parts = {Part.NUMBER, Part.WEIGHT, Part.DISCOUNT, Part.STEPS, Part.AGE, Part.MODEL}
        if self.schema.reward is not None:
            parts.add(Part.REWARD_SUM)
        if not set(self.prev).isdisjoint(self.schema.states):
            parts.add(Part.PREV_INDEX)
        if not set(self.next).isdisjoint(self.schema.states):
            parts.add(Part.NEXT_INDEX)
        if self.kind is ContainerKind.DRAWN:
            parts |= OF_DRAWN
        return parts

    def _columns(self, final: bool) -> list[BlockSpec]:
        if self.kind is ContainerKind.FEEDBACK:
            return []
        forms: list[BlockSpec] = []
        for i, (name, column) in enumerate(self.schema.items()):
            sides = self._parts_of(name, column, final)
            own = [BlockSpec(i, part, extent, column.nbytes) for part, extent in sides]
            if column.is_ragged:
                own += [
                    BlockSpec(i, LENGTHS_OF[part], extent, LENGTH.itemsize)
                    for part, extent in sides
                    if part in LENGTHS_OF
                ]
            forms += sorted(own)
        return forms

    def _parts_of(self, name: str, column: Column, final: bool) -> list[tuple[Part, RowCount]]:
        """Return the parts of one column and the extent of their blocks, in order, without lengths."""
        if self.kind is ContainerKind.ROWS:
            return [(Part.PREV, RowCount.PER_SAMPLE)]
        if self.kind is ContainerKind.EPISODE:
            rows = [] if name == self.schema.qvest else [(Part.PREV, RowCount.PER_SAMPLE)]
            return rows + ([(Part.FINAL, RowCount.SINGLE)] if final and column.role == "state" else [])
        before, after = name in self.prev, name in self.next
        if column.role == "state":
            if before and after:
                return [(Part.FRAMES, RowCount.PER_FRAME)]
            alone = Part.PREV_FRAMES if before else Part.NEXT_FRAMES
            return [(alone, RowCount.PER_FRAME)] if before or after else []
        sides = ((Part.PREV, before), (Part.NEXT, after))
        return [(part, RowCount.PER_SAMPLE) for part, is_there in sides if is_there]

    def _fields(self) -> tuple[list[BatchArray], list[_Field]]:
        outputs: list[BatchArray] = []
        fields: list[_Field] = []
        if self.kind not in (ContainerKind.CACHE, ContainerKind.DRAWN):
            return outputs, fields
        for side, names, index in (("prev", self.prev, Part.PREV_INDEX), ("next", self.next, Part.NEXT_INDEX)):
            for name in names:
                column = self.schema[name]
                is_state = column.role == "state"
                block = self._rows_of(name, side, is_state)
                outputs.append(_output(side, name, (self.frame_stack,) if is_state else (), column))
                fields.append(
                    (block, self._place[BOOKKEEPING, index], self.frame_stack, self.frame_stack, column.nbytes)
                    if is_state
                    else (block, -1, 1, 1, column.nbytes)
                )
        return outputs, fields

    def _rows_of(self, name: str, side: str, is_state: bool) -> int:
        """Return the number of the block that holds a column's rows for one side."""
        alone = (Part.PREV_FRAMES, Part.PREV) if side == "prev" else (Part.NEXT_FRAMES, Part.NEXT)
        candidates = (Part.FRAMES, alone[0]) if is_state else (alone[1],)
        return next(place for part in candidates if (place := self.block_number(part, name)) is not None)


class SequenceLayout(ContainerLayout):
    """Layout of sequences of `length` entries: kinds SEQUENCES and DRAWN_SEQUENCES.

    State columns have the states of `prev` and the state after the last entry. The other columns are unique entries and
    an index; columns in `first` are the values of the first entries alone. The reward is always included, whatever
    `prev` says.
    """

    def __init__(
        self,
        schema: Schema,
        frame_stack: int,
        prev: Iterable[str],
        kind: ContainerKind,
        length: int,
        first: tuple[str, ...],
    ) -> None:
        self.length, self.first = length, first
        super().__init__(schema, frame_stack, prev, (), kind)
        if any(form.row_bytes > MAX_ROW_BYTES for form in self.blocks):
            most = f"a length at which a sequence takes at most {MAX_ROW_BYTES:,} bytes in each block"
            raise ParameterError("sequence_length", length, most)

    def _row_bytes(self) -> dict[Part, int]:
        return {
            Part.PREV_INDEX: 4 * (self.frame_stack + self.length), Part.ENTRY_INDEX: 4 * self.length,
            Part.DISCOUNT: 4 * self.length * prod(self.reward_shape),
        }  # fmt: skip

    def _parts(self) -> set[Part]:
        parts = super()._parts() - {Part.REWARD_SUM} | {Part.BURN_IN}
        if any(self._parts_of(name, column, False)[:1] == _ENTRIES for name, column in self.schema.items()):
            parts.add(Part.ENTRY_INDEX)
        return parts | OF_DRAWN if self.kind is ContainerKind.DRAWN_SEQUENCES else parts

    def _parts_of(self, name: str, column: Column, final: bool) -> list[tuple[Part, RowCount]]:
        if column.role == "state" or name in self.first or not (name in self.prev or column.role == "reward"):
            return super()._parts_of(name, column, final)
        return _ENTRIES

    def _fields(self) -> tuple[list[BatchArray], list[_Field]]:
        outputs: list[BatchArray] = []
        fields: list[_Field] = []
        for name in self.prev:
            column = self.schema[name]
            if column.role == "state":
                frames = self.length + 1
                outputs.append(_output("prev", name, (frames, self.frame_stack), column))
                places = self._rows_of(name, "prev", True), self.bookkeeping_block(Part.PREV_INDEX)
                fields.append((*places, frames * self.frame_stack, self.frame_stack, column.nbytes))
            elif name in self.first:
                outputs.append(_output("prev", name, (), column))
                fields.append((self._rows_of(name, "prev", False), -1, 1, 1, column.nbytes))
            elif column.role != "reward":
                outputs.append(_output("prev", name, (self.length,), column))
                fields.append(self._entries(name, column))
        if self.schema.reward is not None:
            fields.append(self._entries(self.schema.reward, self.schema[self.schema.reward]))
        fields.append((self.bookkeeping_block(Part.BURN_IN), -1, 1, 1, 4))
        return outputs, fields

    def _entries(self, name: str, column: Column) -> _Field:
        block = self._place[self.schema.names.index(name), Part.ENTRIES]
        return block, self.bookkeeping_block(Part.ENTRY_INDEX), self.length, self.length, column.nbytes


_ENTRIES: Final = [(Part.ENTRIES, RowCount.PER_ENTRY)]


def _output(side: str, name: str, axes: tuple[int, ...], column: Column) -> BatchArray:
    if column.is_ragged:
        return BatchArray(side, name, axes, column.dtype, column.element)
    return BatchArray(side, name, axes + column.shape, column.dtype)


@lru_cache(maxsize=64)
def _layout(
    schema: Schema, stack: int, prev: tuple[str, ...], next: tuple[str, ...], kind: ContainerKind, final: bool
) -> ContainerLayout:
    return ContainerLayout(schema, stack, prev, next, kind, final)


@lru_cache(maxsize=64)
def _sequence_layout(
    schema: Schema, stack: int, prev: tuple[str, ...], kind: ContainerKind, length: int, first: tuple[str, ...]
) -> SequenceLayout:
    return SequenceLayout(schema, stack, prev, kind, length, first)


def layout_of(
    schema: Schema, parameters: Parameters, kind: ContainerKind = ContainerKind.CACHE, *, final: bool = False
) -> ContainerLayout:
    """Return the layout of containers for `parameters`; cached, so that equal arguments give the same object.

    Kinds CACHE and DRAWN become SEQUENCES and DRAWN_SEQUENCES if the parameters set `sequence_length`.
    """
    if kind in (ContainerKind.EPISODE, ContainerKind.FEEDBACK, ContainerKind.ROWS):
        return _layout(schema, 1, (), (), kind, final)
    prev = schema.names if parameters.prev is None else tuple(parameters.prev)
    if parameters.sequence_length:
        whose = ContainerKind.DRAWN_SEQUENCES if kind is ContainerKind.DRAWN else ContainerKind.SEQUENCES
        cut = parameters.sequence_length, parameters.sequence_first
        return _sequence_layout(schema, parameters.frame_stack, prev, whose, *cut)
    next = schema.states if parameters.next is None else tuple(parameters.next)
    return _layout(schema, parameters.frame_stack, prev, next, kind, False)


@lru_cache(maxsize=256)
def content_settings_hash(schema: Schema, parameters: Parameters) -> int:
    """Return a hash of the parameters that shape samples of `schema` (`Parameters.content_settings`), for a container's
    head.
    """
    values = json.dumps(parameters.content_settings(schema), sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(values, digest_size=8).digest(), "little")


def max_frames_per_sample(layout: ContainerLayout, multi_step: int) -> int:
    """Return the most different frames that one sample of a cache has: both windows, or the whole sequence."""
    stack = layout.frame_stack
    if layout.length:
        return stack + layout.length
    return stack + min(multi_step, stack) if {Part.PREV_INDEX, Part.NEXT_INDEX} <= {*layout.indices} else stack


def cache_bytes(schema: Schema, parameters: Parameters, capacity: int, samples: int) -> int:
    """Return the bytes of the largest cache before compression: no two samples share a frame or an entry.

    Values of ragged columns are not included.

    Args:
        capacity: Entries that fit into the memory from which the cache is drawn; 0 is any number.
    """
    layout = layout_of(schema, parameters)
    frames, entries = samples * max_frames_per_sample(layout, parameters.multi_step), samples * layout.length
    if capacity:  # a memory has at most as many final states as entries
        frames, entries = min(frames, 2 * capacity), min(entries, capacity)
    return _bytes_of(layout, {RowCount.PER_SAMPLE: samples, RowCount.PER_FRAME: frames, RowCount.PER_ENTRY: entries})


def episode_bytes(schema: Schema, entries: int) -> int:
    """Return the bytes of an episode with its final state, before compression, without values of ragged columns."""
    layout = _layout(schema, 1, (), (), ContainerKind.EPISODE, bool(schema.states))
    return _bytes_of(layout, {RowCount.PER_SAMPLE: entries})


def rows_bytes(schema: Schema, rows: int) -> int:
    """Return the bytes of a container of `rows` rows, without values of ragged columns."""
    return _bytes_of(_layout(schema, 1, (), (), ContainerKind.ROWS, False), {RowCount.PER_SAMPLE: rows})


def most_fitting(size_of: Callable[[int], int], most: int) -> int:
    """Return the largest number up to `most` whose size, which grows with it, is at most `most` bytes, or 0."""
    return bisect_right(range(1, most + 1), most, key=size_of)


def _bytes_of(layout: ContainerLayout, rows: Mapping[RowCount, int]) -> int:
    size = HEAD.size + ROW.size * len(layout.blocks)
    for number, form in enumerate(layout.blocks):
        count = 0 if number in layout.ragged else rows.get(form.extent, 1)
        size = -(-size // ALIGNMENT) * ALIGNMENT + form.row_bytes * count
    return size


def usual_bytes(schema: Schema, parameters: Parameters) -> int:
    """Return the bytes of a cache of `cache_size` samples by `cache_bytes`; 0 if the schema has ragged columns."""
    return 0 if schema.ragged else cache_bytes(schema, parameters, 0, parameters.cache_size)
