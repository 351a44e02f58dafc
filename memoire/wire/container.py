"""Samples as one checked buffer: what a cache, a drawn batch, an episode or feedback is on the wire (docs/wire.md).

A container is a head, a table and 64-byte aligned blocks, one for each column. States are *unique frames and an
index*: stacks that overlap and entries that were drawn twice cross the wire once. Which blocks there are follows from
the schema and the parameters, so a `Layout` of them decides what is made here, what is accepted, and what a batch is.
Sequences for recurrent networks have a layout of their own, in which entries are unique and indexed too.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from importlib import import_module
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from memoire import _core
from memoire.errors import ParameterError, ProtocolError
from memoire.limits import Limits
from memoire.replay.batch import ID, Gathered, sequence_mask
from memoire.replay.columns import Column
from memoire.replay.parameters import Parameters
from memoire.replay.ragged import Ragged
from memoire.replay.schema import Schema

from . import _container

Payload: TypeAlias = NDArray[np.uint8]
HEAD: Final = struct.Struct("<IHHdQdQIIdQ")
ROW: Final = struct.Struct("<HBBIQQQ")
ALIGNMENT: Final = _container.ALIGNMENT
BOOKKEEPING: Final = _container.BOOKKEEPING
ZERO_FRAME: Final = 0xFFFFFFFF
EPISODE_FACTS: Final = 16
"""Bytes of bookkeeping that an episode's container has for each entry."""
CODECS: Final = {"none": 0, "zlib": 1, "lz4": 2}
MOST_PACKED: Final = 1 << 26
"""Bytes of frames that a server packs at most when it answers a draw: other readers wait meanwhile."""
_DEFAULTS: Final = Limits()


class Kind(IntEnum):
    """What a container holds."""

    CACHE = _container.KIND_CACHE
    EPISODE = _container.KIND_EPISODE
    FEEDBACK = _container.KIND_FEEDBACK
    DRAWN = _container.KIND_DRAWN
    SEQUENCES = _container.KIND_SEQUENCES
    DRAWN_SEQUENCES = _container.KIND_DRAWN_SEQUENCES


class Part(IntEnum):
    """What a block holds; the number is on the wire. docs/wire.md says shape and range of each."""

    PREV = _container.PART_PREV
    NEXT = _container.PART_NEXT
    FRAMES = _container.PART_FRAMES
    PREV_INDEX = _container.PART_PREV_INDEX
    NEXT_INDEX = _container.PART_NEXT_INDEX
    PREV_LENGTHS = _container.PART_PREV_LENGTHS
    NEXT_LENGTHS = _container.PART_NEXT_LENGTHS
    PREV_FRAMES = _container.PART_PREV_FRAMES
    NEXT_FRAMES = _container.PART_NEXT_FRAMES
    FRAMES_LENGTHS = _container.PART_FRAMES_LENGTHS
    ENTRIES = _container.PART_ENTRIES
    ENTRY_INDEX = _container.PART_ENTRY_INDEX
    BURN_IN = _container.PART_BURN_IN
    ENTRIES_LENGTHS = _container.PART_ENTRIES_LENGTHS
    NUMBER = _container.PART_NUMBER
    WEIGHT = _container.PART_WEIGHT
    REWARD_SUM = _container.PART_REWARD_SUM
    DISCOUNT = _container.PART_DISCOUNT
    STEPS = _container.PART_STEPS
    AGE = _container.PART_AGE
    MODEL = _container.PART_MODEL
    CHANCE = _container.PART_CHANCE
    POPULATION = _container.PART_POPULATION
    OWNER = _container.PART_OWNER
    OWNERS = _container.PART_OWNERS
    INIT_WEIGHT = _container.PART_INIT_WEIGHT
    FINAL = _container.PART_FINAL
    TD_ERROR = _container.PART_TD_ERROR


class Extent(IntEnum):
    """How many rows a block has."""

    PER_SAMPLE = _container.PER_SAMPLE
    PER_FRAME = _container.PER_FRAME
    PER_OWNER = _container.PER_OWNER
    SINGLE = _container.SINGLE
    PER_ENTRY = _container.PER_ENTRY


class BlockForm(NamedTuple):
    """A block that a container must have."""

    column: int
    part: Part
    extent: Extent
    row_bytes: int


class _Output(NamedTuple):
    """An array of a batch; of a ragged column without the axis of its values' lengths."""

    side: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    element: tuple[int, ...] | None = None
    """Of a ragged column: the end of its shape, behind the lengths' axis."""


_BOOKKEEPING: Final = {
    Part.PREV_INDEX: Extent.PER_SAMPLE, Part.NEXT_INDEX: Extent.PER_SAMPLE, Part.NUMBER: Extent.PER_SAMPLE,
    Part.WEIGHT: Extent.PER_SAMPLE, Part.REWARD_SUM: Extent.PER_SAMPLE, Part.DISCOUNT: Extent.PER_SAMPLE,
    Part.STEPS: Extent.PER_SAMPLE, Part.AGE: Extent.PER_SAMPLE, Part.MODEL: Extent.PER_SAMPLE,
    Part.CHANCE: Extent.PER_SAMPLE, Part.POPULATION: Extent.PER_SAMPLE, Part.OWNER: Extent.PER_SAMPLE,
    Part.ENTRY_INDEX: Extent.PER_SAMPLE, Part.BURN_IN: Extent.PER_SAMPLE,
    Part.OWNERS: Extent.PER_OWNER, Part.INIT_WEIGHT: Extent.PER_SAMPLE, Part.TD_ERROR: Extent.PER_SAMPLE,
}  # fmt: skip
_OF_WINDOWS: Final = {
    Part.NUMBER: "numbers", Part.WEIGHT: "weights", Part.REWARD_SUM: "reward", Part.DISCOUNT: "discount",
    Part.STEPS: "steps", Part.AGE: "ages", Part.MODEL: "model_versions", Part.BURN_IN: "burn_in",
}  # fmt: skip
_WIDTHS: Final = {
    Part.NUMBER: 8, Part.WEIGHT: 8, Part.STEPS: 4, Part.AGE: 4, Part.MODEL: 8, Part.CHANCE: 8, Part.POPULATION: 8,
    Part.OWNER: 4, Part.OWNERS: 16, Part.INIT_WEIGHT: 4, Part.TD_ERROR: 4, Part.BURN_IN: 4,
}  # fmt: skip


_LENGTHS_OF: Final = {
    Part.PREV: Part.PREV_LENGTHS, Part.NEXT: Part.NEXT_LENGTHS, Part.FRAMES: Part.FRAMES_LENGTHS,
    Part.PREV_FRAMES: Part.FRAMES_LENGTHS, Part.NEXT_FRAMES: Part.FRAMES_LENGTHS, Part.ENTRIES: Part.ENTRIES_LENGTHS,
}  # fmt: skip
_LENGTHS: Final = frozenset(_LENGTHS_OF.values())
_WHOLE: Final = _container.WHOLE  # in place of a block of lengths: the one value is as long as its block
_INDICES: Final = (Part.PREV_INDEX, Part.NEXT_INDEX, Part.ENTRY_INDEX)
OF_DRAWN: Final = frozenset({Part.CHANCE, Part.POPULATION, Part.OWNER, Part.OWNERS})
"""Bookkeeping that only containers of drawn samples have."""
_Field: TypeAlias = tuple[int, int, int, int, int]
_BYTE: Final = np.dtype(np.uint8)
MOST_ROW_BYTES: Final = 1 << 27


class Picked(Protocol):
    """Samples that a draw took from held containers, B of them: what a layout needs of `pool._draw.Picks`."""

    @property
    def size(self) -> int:
        """B."""
        ...

    def gather(
        self,
        arrays: list[NDArray[Any]],
        reward: NDArray[np.float32] | None,
        discount: NDArray[np.float32],
        steps: NDArray[np.int32],
        weight: NDArray[np.float32],
        ids: NDArray[Any],
        age: NDArray[np.float32],
        model: NDArray[np.int64],
    ) -> None:
        """Copy each sample's rows into `arrays` [B, ...], one for each field, and what it carries [B]."""

    def gather_lengths(self, index: int, target: NDArray[np.int32]) -> int:
        """Fill in how many elements each value of a ragged field has [B, rows]; returns the most."""
        ...

    def gather_padded(self, index: int, longest: int, target: NDArray[Any]) -> None:
        """Copy the values of a ragged field [B, rows, longest, ...], zeros behind each."""


class Layout:
    """Which blocks the containers of a schema and parameters have, and the arrays their samples become. Unchangeable.

    Use `layout_of`, which makes each once. Two caches can be in one batch exactly if they have the same layout.

    Args:
        schema: The columns.
        frame_stack: Frames of a sample's states.
        prev, next: Names of the columns of both sides.
        kind: CACHE or DRAWN (SEQUENCES or DRAWN_SEQUENCES: `SequenceLayout`); EPISODE (every column but the return, and
            with `final` the final state); FEEDBACK.
        final: Whether an episode has a final state.
    """

    length: int = 0
    """Entries of a sequence; 0 where samples are transitions."""

    def __init__(
        self,
        schema: Schema,
        frame_stack: int = 1,
        prev: Iterable[str] = (),
        next: Iterable[str] = (),
        kind: Kind = Kind.CACHE,
        final: bool = False,
    ) -> None:
        self.schema, self.frame_stack, self.kind = schema, frame_stack, kind
        self.prev = tuple(name for name in schema.names if name in set(prev))
        self.next = tuple(name for name in schema.names if name in set(next))
        self.reward_shape = () if schema.reward is None else schema[schema.reward].shape
        self.blocks: tuple[BlockForm, ...] = (*self._bookkeeping(), *self._columns(final))
        self._place = {(form.column, form.part): i for i, form in enumerate(self.blocks)}
        outputs, fields = self._fields()
        both = list(zip(outputs, fields, strict=False))
        self._outputs = [output for output in outputs if output.element is None]
        self._ragged = [output for output in outputs if output.element is not None]
        ragged_fields = [field for output, field in both if output.element is not None]
        fields = [field for output, field in both if output.element is None] + fields[len(outputs) :]
        forms = list(enumerate(self.blocks))
        self.facts = [(i, _OF_WINDOWS[form.part]) for i, form in forms if form.part in _OF_WINDOWS]
        """Blocks that hold what a memory says of each sample, with its name in `Windows` or `Sequences`."""
        self.columns = [(i, form.part, schema.names[form.column]) for i, form in forms if form.column != BOOKKEEPING]
        """Blocks that hold a column's values: (block, part, column)."""
        self.indices = tuple(part for part in _INDICES if (BOOKKEEPING, part) in self._place)
        """Parts that are indices into the frames, or into the entries of sequences."""
        rewards = max(1, self.length) * prod(self.reward_shape)
        self.ragged = {i: self._lengths_of(form) for i, form in forms if self._is_ragged(form)}
        """Number of each block that has a ragged column's values -> that of their lengths, or -2: it is one value."""
        blocks = list(self.blocks)
        self.core = _container.Layout(
            kind, frame_stack, rewards, blocks, fields, self.length, self.ragged, ragged_fields
        )

    def place(self, part: Part, name: str | None = None) -> int | None:
        """Number of a block, or None where there is none; `name` is a column's, None means bookkeeping."""
        column = BOOKKEEPING if name is None else self.schema.names.index(name)
        return self._place.get((column, part))

    def _is_ragged(self, form: BlockForm) -> bool:
        if form.column == BOOKKEEPING or form.part in _LENGTHS:
            return False
        return self.schema.names[form.column] in self.schema.ragged

    def _lengths_of(self, form: BlockForm) -> int:
        return self._place[form.column, _LENGTHS_OF[form.part]] if form.part in _LENGTHS_OF else _WHOLE

    def bookkeeping(self, part: Part) -> int:
        """Number of a block of bookkeeping that is there."""
        return self._place[BOOKKEEPING, part]

    def allocate(self, samples: int) -> Gathered:
        """Arrays for a batch of `samples`; those of ragged columns are made when it is gathered."""
        sides: dict[str, dict[str, NDArray[Any]]] = {"prev": {}, "next": {}}
        for side, name, shape, dtype, _ in self._outputs:
            sides[side][name] = _core.empty((samples, *shape), dtype)
        reward = np.empty if self.schema.reward is not None else np.zeros
        return Gathered(
            prev=sides["prev"],
            next=sides["next"],
            reward=reward((samples, *self.reward_shape), np.float32),
            discount=np.empty((samples, *self.reward_shape), np.float32),
            steps=np.empty(samples, np.int32),
            weight=np.empty(samples, np.float32),
            ids=np.empty(samples, ID),
            age=np.empty(samples, np.float32),
            model_version=np.empty(samples, np.int64),
        )

    def gather(self, picks: Picked, out: Gathered) -> None:
        """Fill the arrays of `out`, which `allocate` made or `check_out` found fit, with the picked samples."""
        picks.gather(
            [(out.prev if output.side == "prev" else out.next)[output.name] for output in self._outputs],
            out.reward if self.schema.reward is not None else None,
            out.discount, out.steps, out.weight, out.ids, out.age, out.model_version,
        )  # fmt: skip
        self._gather_ragged(picks, out)

    def _gather_ragged(self, picks: Picked, out: Gathered) -> None:
        """Add the ragged columns to `out`: both sides as wide as the longest value of both, and at least 1."""
        longest: dict[str, int] = {}
        lengths_of = {"prev": out.prev_lengths, "next": out.next_lengths}
        for i, (side, name, shape, _, _) in enumerate(self._ragged):
            lengths = lengths_of[side][name] = np.empty((picks.size, *shape), np.int32)
            longest[name] = max(longest.get(name, 1), picks.gather_lengths(i, lengths))
        for i, (side, name, shape, dtype, element) in enumerate(self._ragged):
            made = _core.empty((picks.size, *shape, longest[name], *(element or ())), dtype)
            picks.gather_padded(i, longest[name], made)
            (out.prev if side == "prev" else out.next)[name] = made

    def check_out(self, out: Gathered, samples: int) -> None:
        """Raise ValueError unless every array is what `allocate` would make."""
        for side, name, shape, dtype, _ in self._outputs:
            array = (out.prev if side == "prev" else out.next).get(name)
            _check_out(f"out.{side}[{name!r}]", array, (samples, *shape), dtype)
        per_reward = (samples, *self._per_reward())
        _check_out("out.reward", out.reward, per_reward, np.float32)
        _check_out("out.discount", out.discount, per_reward, np.float32)
        _check_out("out.steps", out.steps, (samples,), np.int32)
        _check_out("out.weight", out.weight, (samples,), np.float32)
        _check_out("out.ids", out.ids, (samples,), ID)
        _check_out("out.age", out.age, (samples,), np.float32)
        _check_out("out.model_version", out.model_version, (samples,), np.int64)

    def _per_reward(self) -> tuple[int, ...]:
        """Shape of what a sample has of the reward and of the discount."""
        return self.reward_shape

    def _bookkeeping(self) -> list[BlockForm]:
        widths = _WIDTHS | self._widths()
        return [BlockForm(BOOKKEEPING, part, _BOOKKEEPING[part], widths[part]) for part in sorted(self._parts())]

    def _widths(self) -> dict[Part, int]:
        """Bytes of a row of the bookkeeping that depends on schema and parameters."""
        per_reward = 4 * prod(self.reward_shape)
        return {
            Part.PREV_INDEX: 4 * self.frame_stack, Part.NEXT_INDEX: 4 * self.frame_stack,
            Part.REWARD_SUM: per_reward, Part.DISCOUNT: per_reward,
        }  # fmt: skip

    def _parts(self) -> set[Part]:
        if self.kind is Kind.FEEDBACK:
            return {Part.NUMBER, Part.OWNER, Part.OWNERS, Part.TD_ERROR}
        if self.kind is Kind.EPISODE:
            return {Part.AGE, Part.MODEL, Part.INIT_WEIGHT}
        parts = {Part.NUMBER, Part.WEIGHT, Part.DISCOUNT, Part.STEPS, Part.AGE, Part.MODEL}
        if self.schema.reward is not None:
            parts.add(Part.REWARD_SUM)
        if not set(self.prev).isdisjoint(self.schema.states):
            parts.add(Part.PREV_INDEX)
        if not set(self.next).isdisjoint(self.schema.states):
            parts.add(Part.NEXT_INDEX)
        if self.kind is Kind.DRAWN:
            parts |= OF_DRAWN
        return parts

    def _columns(self, final: bool) -> list[BlockForm]:
        if self.kind is Kind.FEEDBACK:
            return []
        forms: list[BlockForm] = []
        for i, (name, column) in enumerate(self.schema.items()):
            sides = self._sides(name, column, final)
            own = [BlockForm(i, part, extent, column.nbytes) for part, extent in sides]
            if column.is_ragged:
                own += [BlockForm(i, _LENGTHS_OF[part], extent, 4) for part, extent in sides if part in _LENGTHS_OF]
            forms += sorted(own)
        return forms

    def _sides(self, name: str, column: Column, final: bool) -> list[tuple[Part, Extent]]:
        """The blocks of one column, in order."""
        if self.kind is Kind.EPISODE:
            rows = [] if name == self.schema.qvest else [(Part.PREV, Extent.PER_SAMPLE)]
            return rows + ([(Part.FINAL, Extent.SINGLE)] if final and column.role == "state" else [])
        before, after = name in self.prev, name in self.next
        if column.role == "state":
            if before and after:
                return [(Part.FRAMES, Extent.PER_FRAME)]
            alone = Part.PREV_FRAMES if before else Part.NEXT_FRAMES
            return [(alone, Extent.PER_FRAME)] if before or after else []
        sides = ((Part.PREV, before), (Part.NEXT, after))
        return [(part, Extent.PER_SAMPLE) for part, is_there in sides if is_there]

    def _fields(self) -> tuple[list[_Output], list[_Field]]:
        outputs: list[_Output] = []
        fields: list[_Field] = []
        if self.kind not in (Kind.CACHE, Kind.DRAWN):
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
        """Block of a column's rows for one side."""
        alone = (Part.PREV_FRAMES, Part.PREV) if side == "prev" else (Part.NEXT_FRAMES, Part.NEXT)
        candidates = (Part.FRAMES, alone[0]) if is_state else (alone[1],)
        return next(place for part in candidates if (place := self.place(part, name)) is not None)


class SequenceLayout(Layout):
    """The layout of sequences of `length` entries: kinds SEQUENCES and DRAWN_SEQUENCES.

    States are `prev` ones with the state after the last entry; other columns are unique entries and an index, or those
    of the first entries alone. The reward is always there, whether it is among `prev` or not.
    """

    def __init__(
        self, schema: Schema, frame_stack: int, prev: Iterable[str], kind: Kind, length: int, first: tuple[str, ...]
    ) -> None:
        self.length, self.first = length, first
        super().__init__(schema, frame_stack, prev, (), kind)
        if any(form.row_bytes > MOST_ROW_BYTES for form in self.blocks):
            most = f"such that what belongs to a sequence takes at most {MOST_ROW_BYTES} bytes in each block"
            raise ParameterError("sequence_length", length, most)

    def allocate(self, samples: int) -> Gathered:
        """Arrays for a batch of `samples` sequences."""
        made = super().allocate(samples)
        per_entry = (samples, self.length, *self.reward_shape)
        made.reward, made.discount = np.zeros(per_entry, np.float32), np.empty(per_entry, np.float32)
        made.mask = np.empty((samples, self.length), np.bool_)
        return made

    def gather(self, picks: Picked, out: Gathered) -> None:
        """Fill the arrays of `out` with the picked sequences."""
        assert out.mask is not None
        burn_in = np.empty(picks.size, np.uint32)
        rewards = [] if self.schema.reward is None else [out.reward]
        picks.gather(
            [*(out.prev[output.name] for output in self._outputs), *rewards, burn_in],
            None, out.discount, out.steps, out.weight, out.ids, out.age, out.model_version,
        )  # fmt: skip
        self._gather_ragged(picks, out)
        sequence_mask(burn_in, out.steps, out.mask)

    def check_out(self, out: Gathered, samples: int) -> None:
        """Raise ValueError unless every array is what `allocate` would make."""
        super().check_out(out, samples)
        _check_out("out.mask", out.mask, (samples, self.length), np.bool_)

    def _per_reward(self) -> tuple[int, ...]:
        return (self.length, *self.reward_shape)

    def _widths(self) -> dict[Part, int]:
        return {
            Part.PREV_INDEX: 4 * (self.frame_stack + self.length), Part.ENTRY_INDEX: 4 * self.length,
            Part.DISCOUNT: 4 * self.length * prod(self.reward_shape),
        }  # fmt: skip

    def _parts(self) -> set[Part]:
        parts = super()._parts() - {Part.REWARD_SUM} | {Part.BURN_IN}
        if any(self._sides(name, column, False)[:1] == _ENTRIES for name, column in self.schema.items()):
            parts.add(Part.ENTRY_INDEX)
        return parts | OF_DRAWN if self.kind is Kind.DRAWN_SEQUENCES else parts

    def _sides(self, name: str, column: Column, final: bool) -> list[tuple[Part, Extent]]:
        if column.role == "state" or name in self.first or not (name in self.prev or column.role == "reward"):
            return super()._sides(name, column, final)
        return _ENTRIES

    def _fields(self) -> tuple[list[_Output], list[_Field]]:
        outputs: list[_Output] = []
        fields: list[_Field] = []
        for name in self.prev:
            column = self.schema[name]
            if column.role == "state":
                frames = self.length + 1
                outputs.append(_output("prev", name, (frames, self.frame_stack), column))
                places = self._rows_of(name, "prev", True), self.bookkeeping(Part.PREV_INDEX)
                fields.append((*places, frames * self.frame_stack, self.frame_stack, column.nbytes))
            elif name in self.first:
                outputs.append(_output("prev", name, (), column))
                fields.append((self._rows_of(name, "prev", False), -1, 1, 1, column.nbytes))
            elif column.role != "reward":
                outputs.append(_output("prev", name, (self.length,), column))
                fields.append(self._entries(name, column))
        if self.schema.reward is not None:
            fields.append(self._entries(self.schema.reward, self.schema[self.schema.reward]))
        fields.append((self.bookkeeping(Part.BURN_IN), -1, 1, 1, 4))
        return outputs, fields

    def _entries(self, name: str, column: Column) -> _Field:
        block = self._place[self.schema.names.index(name), Part.ENTRIES]
        return block, self.bookkeeping(Part.ENTRY_INDEX), self.length, self.length, column.nbytes


_ENTRIES: Final = [(Part.ENTRIES, Extent.PER_ENTRY)]


def _output(side: str, name: str, axes: tuple[int, ...], column: Column) -> _Output:
    if column.is_ragged:
        return _Output(side, name, axes, column.dtype, column.element)
    return _Output(side, name, axes + column.shape, column.dtype)


def _check_out(name: str, array: NDArray[Any] | None, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    if array is None or array.shape != shape or array.dtype != dtype:
        found = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
        raise ParameterError(name, found, f"{np.dtype(dtype)}{list(shape)}")


@lru_cache(maxsize=64)
def _layout(
    schema: Schema, stack: int, prev: tuple[str, ...], next: tuple[str, ...], kind: Kind, final: bool
) -> Layout:
    return Layout(schema, stack, prev, next, kind, final)


@lru_cache(maxsize=64)
def _sequence_layout(
    schema: Schema, stack: int, prev: tuple[str, ...], kind: Kind, length: int, first: tuple[str, ...]
) -> SequenceLayout:
    return SequenceLayout(schema, stack, prev, kind, length, first)


def layout_of(schema: Schema, parameters: Parameters, kind: Kind = Kind.CACHE, *, final: bool = False) -> Layout:
    """The layout of containers under `parameters`; the same object for equal arguments.

    kind: CACHE and DRAWN are of sequences where the parameters ask for them (`sequence_length`).
    """
    if kind is Kind.EPISODE or kind is Kind.FEEDBACK:
        return _layout(schema, 1, (), (), kind, final)
    prev = schema.names if parameters.prev is None else tuple(parameters.prev)
    if parameters.sequence_length:
        whose = Kind.DRAWN_SEQUENCES if kind is Kind.DRAWN else Kind.SEQUENCES
        cut = parameters.sequence_length, parameters.sequence_first
        return _sequence_layout(schema, parameters.frame_stack, prev, whose, *cut)
    next = schema.states if parameters.next is None else tuple(parameters.next)
    return _layout(schema, parameters.frame_stack, prev, next, kind, False)


def usual_bytes(schema: Schema, parameters: Parameters) -> int:
    """About how large caches are, where no two samples share a frame; 0 where values have lengths of their own."""
    if schema.ragged:
        return 0
    states = sum(schema[name].nbytes for name in schema.states)
    if length := parameters.sequence_length:
        sample = length * schema.entry_bytes + parameters.frame_stack * states
    else:
        sample = schema.entry_bytes + (2 * parameters.frame_stack - 1) * states
    return parameters.cache_size * max(1, sample)


@dataclass(frozen=True)
class Head:
    """What a container says of itself in its first 64 bytes, beside sizes."""

    multi_step: int = 1
    total_weight: float = 0.0
    positives: int = 0
    minimum: float = 0.0
    parameters_version: int = 0
    made_at: float = 0.0


class Container:
    """A payload while it is made: allocated once, its blocks handed out to be filled in place.

    Args:
        layout, head: What it holds.
        samples, frames, owners, entries: Rows of blocks of each extent.
        packed: Compressed blocks: number -> (codec, bytes).
        elements: Of each block of a ragged column's values: how many elements they have together.
    """

    def __init__(
        self,
        layout: Layout,
        head: Head,
        samples: int,
        frames: int = 0,
        owners: int = 0,
        packed: dict[int, tuple[int, bytes]] | None = None,
        entries: int = 0,
        elements: dict[int, int] | None = None,
    ) -> None:
        self.layout = layout
        rows = (samples, frames, owners, entries)
        self.payload: Payload = _container.container(layout.core, *rows, packed or {}, elements or {})
        HEAD.pack_into(
            self.payload.data, 0, samples, layout.frame_stack, head.multi_step, head.total_weight, head.positives,
            head.minimum, head.parameters_version, len(layout.blocks), layout.kind, head.made_at, 0,
        )  # fmt: skip

    def _row(self, block: int) -> tuple[int, ...]:
        return ROW.unpack_from(self.payload.data, HEAD.size + ROW.size * block)

    def view(self, block: int) -> Payload:
        """The stored bytes of a block, to be filled."""
        begin, stored = self._row(block)[4:6]
        return self.payload[begin : begin + stored]

    def array(self, part: Part, dtype: Any, name: str | None = None) -> NDArray[Any] | None:
        """A block as an array [rows, ...] of `dtype`, to be filled; None where the layout has none."""
        block = self.layout.place(part, name)
        if block is None:
            return None
        rows: NDArray[Any] = self.view(block).view(dtype).reshape(self._row(block)[3], -1)
        return rows

    def fill(self, part: Part, values: Any, name: str | None = None) -> None:
        """Copy an array into a block that the layout must have."""
        block = self.layout.place(part, name)
        assert block is not None, part
        self.fill_blocks({block: np.ascontiguousarray(values)})

    def fill_blocks(self, arrays: dict[int, NDArray[Any]]) -> None:
        """Copy contiguous arrays into blocks, by number."""
        _container.fill(self.layout.core, self.payload, arrays)


def build(
    memory: Any,
    samples: int | None = None,
    *,
    now: float,
    parameters_version: int = 0,
    compression: str | None = None,
) -> Payload:
    """Draw a cache from a `Memory`: the payload of a CACHE message, 64-byte aligned, of one consistent moment.

    Args:
        memory: Where to draw: `Memory`, or anything with its doors for caches.
        samples: How many; None is the parameters' cache_size.
        now: Unix seconds, for the cache's age.
        compression: "none", "zlib" or "lz4" (which the home must have); None is the parameters'. A column that does not
            get smaller is stored as it is.

    Raises:
        EmptyMemory: nothing has a positive weight.
        ParameterError: a compression that is not there.

    Cost: one pass over the frames that are needed; the memory is held meanwhile, the GIL is not.
    """
    with memory.held():
        parameters: Parameters = memory.parameters
        layout = layout_of(memory.schema, parameters)
        codec = codec_of(parameters.compression if compression is None else compression)
        cut = _cut(memory, layout, parameters.cache_size if samples is None else samples, codec != 0)
        sums = cut.drawn.total_weight, cut.drawn.num_positive, cut.drawn.min_weight
        head = Head(parameters.sequence_length or parameters.multi_step, *sums, parameters_version, now)
        return _pack_cut(memory, layout, cut, head, codec)


def build_drawn(memory: Any, owner: bytes, samples: int, *, now: float, compression: str = "none") -> Payload:
    """Draw from a `Memory` that readers know as `owner`: the payload of a DRAWN message, of one consistent moment.

    Args:
        memory, now: As of `build`.
        owner: 16 bytes.
        samples: At least 1.
        compression: As of `build`, which the reader must have.

    Raises:
        EmptyMemory: nothing has a positive weight.
    """
    with memory.held():
        parameters: Parameters = memory.parameters
        layout = layout_of(memory.schema, parameters, Kind.DRAWN)
        codec = codec_of(compression)
        cut = _cut(memory, layout, samples, ordered=codec != 0)
        carried = {
            Part.CHANCE: np.minimum(cut.drawn.weights / cut.drawn.total_weight, 1.0),
            Part.POPULATION: np.full(samples, cut.drawn.num_positive, np.float64),
            Part.OWNER: np.zeros(samples, np.uint32),
            Part.OWNERS: np.frombuffer(owner, np.uint8),
        }
        head = Head(parameters.sequence_length or parameters.multi_step, made_at=now)
        return _pack_cut(memory, layout, cut, head, codec, carried)


class _Cut(NamedTuple):
    """Drawn samples taken apart: what is unique, and where each sample has its own."""

    drawn: Any
    """What the memory says of each sample: `Windows` or `Sequences`."""
    frames: NDArray[np.int64]
    """Codes of the unique frames."""
    indices: dict[Part, NDArray[np.uint32]]
    """Into the frames, or the entries."""
    rows: dict[Part, NDArray[np.int64]]
    """Codes of the rows of blocks that do not hold frames."""


def _cut(memory: Any, layout: Layout, samples: int, ordered: bool) -> _Cut:
    """Draw samples of the layout's form. The memory is held."""
    return (_cut_sequences if layout.length else _cut_transitions)(memory, layout, samples, ordered)


def _pack_cut(
    memory: Any,
    layout: Layout,
    cut: _Cut,
    head: Head,
    codec: int,
    carried: Mapping[Part, NDArray[Any]] = MappingProxyType({}),
) -> Payload:
    """The container of drawn samples, with what else each of them carries. The memory is held."""
    rows = {block: cut.rows.get(part, cut.frames) for block, part, _ in layout.columns}
    lengths = {block: memory.lengths(name, rows[block]) for block, _, name in layout.columns if block in layout.ragged}
    elements = {block: int(each.sum(dtype=np.int64)) for block, each in lengths.items()}
    packed = _pack_frames(memory, layout, cut.frames, codec, elements) if codec else {}
    counts = (len(cut.drawn.numbers), len(cut.frames), 1, packed, len(cut.rows.get(Part.ENTRIES, ())), elements)
    made = Container(layout, head, *counts)
    facts = {block: getattr(cut.drawn, name) for block, name in layout.facts}
    facts |= {layout.bookkeeping(part): cut.indices[part] for part in layout.indices}
    facts |= {layout.ragged[block]: each for block, each in lengths.items()}
    made.fill_blocks(facts | {layout.bookkeeping(part): values for part, values in carried.items()})
    for block, part, name in layout.columns:
        if block not in packed and part not in _LENGTHS:
            memory.copy_frames(name, rows[block], made.view(block))
    return made.payload


def _cut_transitions(memory: Any, layout: Layout, samples: int, ordered: bool) -> _Cut:
    drawn = memory.draw_windows(samples)
    wanted = [
        codes if part in layout.indices else None
        for part, codes in ((Part.PREV_INDEX, drawn.prev_codes), (Part.NEXT_INDEX, drawn.next_codes))
    ]
    frames, prev, next = memory.unique_frames(*wanted, ordered=ordered)
    if not len(frames) and layout.indices:
        # Nothing but frames of zeros: an index still needs a row to point past.
        frames = np.full(1, -1, np.int64)
    rows = {Part.PREV: drawn.rows, Part.NEXT: drawn.next_rows}
    return _Cut(drawn, frames, {Part.PREV_INDEX: prev, Part.NEXT_INDEX: next}, rows)


def _cut_sequences(memory: Any, layout: Layout, samples: int, ordered: bool) -> _Cut:
    drawn = memory.draw_sequences(samples)
    has_frames, has_entries = Part.PREV_INDEX in layout.indices, Part.ENTRY_INDEX in layout.indices
    frames, states, _ = memory.unique_frames(drawn.state_codes if has_frames else None, None, ordered=ordered)
    entries, places, _ = memory.unique_frames(drawn.codes if has_entries else None, None, ordered=False)
    rows = {Part.ENTRIES: entries, Part.PREV: np.ascontiguousarray(drawn.codes[:, 0])}
    return _Cut(drawn, frames, {Part.PREV_INDEX: states, Part.ENTRY_INDEX: places}, rows)


def _pack_frames(
    memory: Any, layout: Layout, sources: Any, codec: int, elements: dict[int, int]
) -> dict[int, tuple[int, bytes]]:
    """The state columns, compressed: block -> (codec, bytes), without those that would not get smaller."""
    packed: dict[int, tuple[int, bytes]] = {}
    for i, form in enumerate(layout.blocks):
        size = elements.get(i, len(sources)) * form.row_bytes
        if may_pack(layout, form, size):
            raw: Payload = _core.empty((size,), _BYTE)
            memory.copy_frames(layout.schema.names[form.column], sources, raw)
            pack_block(packed, i, raw, codec)
    return packed


def may_pack(layout: Layout, form: BlockForm, size: int) -> bool:
    """Whether a block holds frames, of a size that whoever makes such a container has the time for."""
    is_frames = form.extent is Extent.PER_FRAME and form.part not in _LENGTHS
    return is_frames and (layout.kind not in (Kind.DRAWN, Kind.DRAWN_SEQUENCES) or size <= MOST_PACKED)


def pack_block(packed: dict[int, tuple[int, bytes]], block: int, raw: Payload, codec: int) -> None:
    """Compress a block, unless it would not get smaller."""
    data = _COMPRESS[codec](raw) if raw.nbytes else b""
    if len(data) < raw.nbytes:
        packed[block] = (codec, data)


def pack_episode(
    schema: Schema,
    fill: Callable[[str, Payload], None],
    init_w: NDArray[np.float32],
    age: NDArray[np.float32],
    model_version: NDArray[np.int64],
    lengths: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    *,
    final: Mapping[str, NDArray[Any]] | None = None,
    now: float,
    parameters_version: int = 0,
    compression: str = "none",
) -> Payload:
    """The container of an EPISODE message: T entries in order, each frame once.

    Args:
        fill: Called as fill(column, target) for each column but the return: writes its T values into just their bytes,
            those of a ragged one after the other.
        init_w, age, model_version: [T], as docs/wire.md says.
        lengths: Of each ragged column: how many elements each of its values has, [T].
        final: The state in which it ended, each state column [*F].
        compression: For state columns; one that does not get smaller is stored as it is.
    """
    layout = layout_of(schema, Parameters(), Kind.EPISODE, final=final is not None)
    codec, entries = codec_of(compression), len(init_w)
    packed: dict[int, tuple[int, bytes]] = {}
    elements = {
        block: int(lengths[name].sum(dtype=np.int64)) if part is Part.PREV else len((final or {})[name])
        for block, part, name in layout.columns
        if block in layout.ragged
    }
    for block, part, name in layout.columns if codec else ():
        if part is Part.PREV and name in schema.states:
            raw: Payload = _core.empty((elements.get(block, entries) * schema[name].nbytes,), _BYTE)
            fill(name, raw)
            pack_block(packed, block, raw, codec)
    head = Head(parameters_version=parameters_version, made_at=now)
    made = Container(layout, head, entries, packed=packed, elements=elements)
    for fact, values in ((Part.INIT_WEIGHT, init_w), (Part.AGE, age), (Part.MODEL, model_version)):
        made.fill(fact, values)
    for block, part, name in layout.columns:
        if part is Part.FINAL:
            assert final is not None
            made.fill(part, final[name], name)
        elif part in _LENGTHS:
            made.fill(part, lengths[name].astype("<u4"), name)
        elif block not in packed:
            fill(name, made.view(block))
    return made.payload


class EpisodeRows(NamedTuple):
    """What a received episode holds; arrays are read-only and may lie in the payload. T entries, F a column's shape."""

    columns: dict[str, Any]
    """Each column [T, *F] but the return; a ragged one as `Ragged`."""
    final: dict[str, NDArray[Any]] | None
    """Each state column [*F]."""
    init_w: NDArray[np.float32]
    age: NDArray[np.float32]
    model_version: NDArray[np.int64]


def read_episode(held: _container.HeldCache, layout: Layout) -> EpisodeRows:
    """The arrays of a container of kind EPISODE that `check` found fit `layout`."""

    def rows(block: int, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        row = BlockRow(*ROW.unpack_from(held.payload, HEAD.size + ROW.size * block))
        data = held.block(block) if row.codec else held.payload[row.offset : row.offset + row.stored]
        count = row.raw // layout.blocks[block].row_bytes if block in layout.ragged else row.rows
        array = np.frombuffer(data, dtype).reshape(count, *shape) if row.raw else np.zeros((count, *shape), dtype)
        return array if array.flags.aligned else array.copy()  # a small message lies wherever it was received

    facts = {Part.INIT_WEIGHT: "<f4", Part.AGE: "<f4", Part.MODEL: "<i8"}
    told = [rows(block, dtype, ()) for part, dtype in facts.items() if (block := layout.place(part)) is not None]
    columns: dict[str, Any] = {}
    final: dict[str, NDArray[Any]] = {}
    for block, part, name in layout.columns:
        column = layout.schema[name]
        if part in _LENGTHS:
            continue
        array = rows(block, column.dtype, column.element)
        if part is Part.FINAL:
            final[name] = array if column.is_ragged else array[0]
        elif column.is_ragged:
            columns[name] = Ragged(array, rows(layout.ragged[block], "<u4", ()))
        else:
            columns[name] = array
    return EpisodeRows(columns, final or None, *told)


def check(
    payload: Any, layout: Layout, limits: Limits = _DEFAULTS, *, checksum: int | None = None
) -> _container.HeldCache:
    """A received container, completely checked, ready for `Pool.add`. Keeps the buffer; gathering reads it in place.

    Sizes, order, alignment, padding and what indices, weights, discounts and counts may be; packed blocks are unpacked
    now, after their declared size was compared with the schema's. One pass without the GIL, with the checksum.

    Args:
        payload: The frame as it was received; it must not change afterwards.
        layout: What it must be: `layout_of(schema, parameters)`.
        checksum: The header's, where `wire.parse` was told not to compare it.

    Raises:
        ProtocolError: and nothing else, whatever the bytes.
    """
    size = memoryview(payload).nbytes
    if size > limits.message_bytes:
        raise ProtocolError("too_large", f"{size} bytes; {limits.message_bytes} are allowed (message_bytes)")
    return _container.HeldCache(payload, layout.core, checksum, limits.message_bytes, _unpack)


def copy_of(held: _container.HeldCache, layout: Layout) -> _container.HeldCache:
    """The same cache of that layout once more, none of its samples drawn; the bytes that came are shared."""
    copy = _container.HeldCache(held.payload, layout.core, None, 1 << 62, _unpack)
    copy.arrived = held.arrived
    return copy


def samples_of(payload: Payload) -> int:
    """How many samples a container holds that was made here."""
    return int(payload[:4].view("<u4")[0])


def pack_feedback(schema: Schema, ids: NDArray[Any], td_errors: NDArray[np.float32], *, now: float = 0.0) -> Payload:
    """The container of a FEEDBACK message: ids of dtype `batch.ID` [B] and their TD errors [B], finite."""
    layout = layout_of(schema, Parameters(), Kind.FEEDBACK)
    owners, owner = np.unique(ids["client"], axis=0, return_inverse=True)
    made = Container(layout, Head(made_at=now), len(ids), owners=len(owners))
    made.fill(Part.NUMBER, ids["number"].astype("<i8"))
    made.fill(Part.OWNER, owner.reshape(-1).astype("<u4"))
    made.fill(Part.OWNERS, owners.astype("<u8"))
    made.fill(Part.TD_ERROR, np.asarray(td_errors, "<f4"))
    return made.payload


def read_feedback(payload: Any, schema: Schema, limits: Limits = _DEFAULTS) -> dict[bytes, tuple[Any, Any]]:
    """Client id -> (numbers int64 [n], td_errors float32 [n]) of a received FEEDBACK container. ProtocolError."""
    held = check(payload, layout_of(schema, Parameters(), Kind.FEEDBACK), limits)
    numbers, errors = np.frombuffer(held.part(Part.NUMBER), "<i8"), np.frombuffer(held.part(Part.TD_ERROR), "<f4")
    owner, owners = np.frombuffer(held.part(Part.OWNER), "<u4"), held.part(Part.OWNERS)
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(len(owners) // 16 + 1))
    found = {}
    for i in range(len(ends) - 1):
        mine = order[ends[i] : ends[i + 1]]
        found[owners[16 * i : 16 * i + 16]] = (numbers[mine], errors[mine])
    return found


class BlockRow(NamedTuple):
    """A row of a block table."""

    column: int
    part: int
    codec: int
    rows: int
    offset: int
    stored: int
    raw: int


def table(payload: Any) -> list[BlockRow]:
    """The block table of any container, for tools; sizes are compared with the payload, contents are not looked at.

    Raises:
        ProtocolError: the table does not fit the bytes.
    """
    data = memoryview(payload).cast("B")
    if len(data) < HEAD.size or len(data) < HEAD.size + ROW.size * (blocks := HEAD.unpack_from(data)[7]):
        raise ProtocolError("container", f"{len(data)} bytes are too few for a head and its table")
    rows = [BlockRow(*ROW.unpack_from(data, HEAD.size + ROW.size * i)) for i in range(blocks)]
    end, order = HEAD.size + ROW.size * blocks, (-1, 0)
    for row in rows:
        key = (-1 if row.column == BOOKKEEPING else row.column, row.part)
        if key <= order or row.offset != -(-end // ALIGNMENT) * ALIGNMENT or any(data[end : row.offset]):
            raise ProtocolError("container", f"{row} is out of order or not where it belongs")
        end, order = row.offset + row.stored, key
        if end > len(data):
            break
    if end != len(data):
        raise ProtocolError("container", f"the blocks end at byte {end} of {len(data)}")
    return rows


# Compression. A peer offers the codecs it has in HELLO, and is told in WELCOME which of them its home has too.


def codecs() -> list[str]:
    """Names of the compressions that this process has."""
    return ["zlib", "lz4"] if _lz4 is not None else ["zlib"]


def _find_lz4() -> Any:
    """lz4.block, or None where the [lz4] extra is not installed."""
    try:
        return import_module("lz4.block")
    except ImportError:
        return None


_lz4: Any = _find_lz4()


def codec_of(name: str) -> int:
    """The number that a compression has on the wire. ParameterError: this process does not have it."""
    if name not in ("none", *codecs()):
        raise ParameterError("compression", name, f"one of none, {', '.join(codecs())}, which are available here")
    return CODECS[name]


def _unpack(codec: int, stored: bytes, raw: int) -> bytes:
    """Bytes of a packed block; `raw` was compared with the schema before, and nothing larger is ever allocated."""
    if codec == CODECS["zlib"]:
        return _unpack_zlib(stored, raw)
    return _unpack_lz4(stored, raw)


def _unpack_zlib(stored: bytes, raw: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(stored, raw + 1)
    except zlib.error as error:
        raise ProtocolError("codec", f"a zlib block is damaged: {error}") from None
    if len(data) != raw or not stream.eof or stream.unused_data:
        raise ProtocolError("codec", f"a zlib block is not the one stream of {raw} bytes that its table says")
    return data


def _unpack_lz4(stored: bytes, raw: int) -> bytes:
    if _lz4 is None:
        raise ProtocolError("codec", "an lz4 block, but lz4 is not installed here: pip install memoire-rl[lz4]")
    try:
        data: bytes = _lz4.decompress(stored, uncompressed_size=raw)
    except (_lz4.LZ4BlockError, ValueError, MemoryError, OverflowError) as error:
        raise ProtocolError("codec", f"an lz4 block is damaged: {error}") from None
    if len(data) != raw:
        raise ProtocolError("codec", f"an lz4 block unpacks to {len(data)} bytes, its table says {raw}")
    return data


_COMPRESS: Final[dict[int, Callable[[Payload], bytes]]] = {
    1: lambda raw: zlib.compress(raw.data, 1),
    2: lambda raw: _lz4.compress(raw, store_size=False),
}
