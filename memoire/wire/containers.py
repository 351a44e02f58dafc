"""Samples as one buffer: caches, drawn batches, episodes and feedback, packed into containers (docs/wire.md).

A container is a head, a table and 64-byte aligned blocks, one for each column. States are *unique frames and an
index*: stacks that overlap and entries that were drawn twice cross the wire once. Which blocks there are follows from
the schema and the parameters, so a `ContainerLayout` of them decides what is made here, what is accepted, and what a
batch is. Sequences for recurrent networks have a layout of their own, in which entries are unique and indexed too.

Received containers: checked completely before anything in them is believed, then read in place.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from memoire import _core
from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.replay.batch import grouped_by_client
from memoire.replay.columns import Ragged
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema

from . import _container
from .compression import codec_of, may_pack, pack_block, unpack_block
from .frames import check_payload
from .layout import ContainerLayout, layout_of, making_of
from .parts import ALIGNMENT, BOOKKEEPING, FACTS, HEAD, LENGTH, LENGTHS, ROW, BlockRow, ContainerKind, Part, Payload
from .receivers import Page

_BYTE: Final = np.dtype(np.uint8)


@dataclass(frozen=True)
class ContainerHead:
    """What a container says of itself in its first 64 bytes, beside sizes."""

    multi_step: int = 1
    total_weight: float = 0.0
    positives: int = 0
    minimum: float = 0.0
    making: int = 0
    made_at: float = 0.0


_DEFAULTS: Final = Parameters()
"""Containers of whole episodes are the same whatever the parameters are; making them costs more than packing one."""


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
        layout: ContainerLayout,
        head: ContainerHead,
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
            head.minimum, head.making, len(layout.blocks), layout.kind, head.made_at, 0,
        )  # fmt: skip

    def _row(self, block: int) -> tuple[int, ...]:
        return ROW.unpack_from(self.payload.data, HEAD.size + ROW.size * block)

    def view(self, block: int) -> Payload:
        """The stored bytes of a block, to be filled."""
        begin, stored = self._row(block)[4:6]
        return self.payload[begin : begin + stored]

    def array(self, part: Part, dtype: Any, name: str | None = None) -> NDArray[Any] | None:
        """A block as an array [N, W] of `dtype`, to be filled: N rows of W values. None where the layout has none."""
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
        """Copy contiguous arrays of any shape into blocks, by number: each has just its block's bytes."""
        _container.fill(self.layout.core, self.payload, arrays)


def build(
    memory: Any,
    samples: int | None = None,
    *,
    now: float,
    compression: str | None = None,
) -> Payload:
    """Draw a cache from a `Memory`, and return it as the payload of a CACHE message, aligned to 64 bytes. All samples
    are of one moment.

    Args:
        memory: Where to draw: a `Memory`, or an object that draws and writes caches as it does.
        samples: How many; None is the parameters' cache_size.
        now: Unix seconds, for the cache's age.
        compression: "none", "zlib" or "lz4" (which the home must have); None is the parameters', without what "auto"
            would choose. A column that does not get smaller is stored as it is.

    Raises:
        EmptyMemory: nothing has a positive weight.
        ParameterError: a compression that is not there.

    Cost: one pass over the frames that are needed. Meanwhile the memory is locked, and the GIL is released.
    """
    with memory.held():
        parameters: Parameters = memory.parameters
        layout = layout_of(memory.schema, parameters)
        wanted = parameters.compression if compression is None else compression
        codec = codec_of("none" if wanted == "auto" else wanted)
        cut = _cut(memory, layout, parameters.cache_size if samples is None else samples, codec != 0)
        sums = cut.drawn.total_weight, cut.drawn.num_positive, cut.drawn.min_weight
        making = making_of(memory.schema, parameters)
        head = ContainerHead(parameters.sequence_length or parameters.multi_step, *sums, making, now)
        return _pack_cut(memory, layout, cut, head, codec)


def build_drawn(
    memory: Any, owner: bytes, samples: int, *, now: float, compression: str = "none", page: Page | None = None
) -> Payload:
    """Draw from a `Memory` that readers know as `owner`: the payload of a DRAWN message, of one consistent moment.

    Args:
        memory, now: As of `build`.
        owner: 16 bytes.
        samples: At least 1.
        compression: As of `build`, which the reader must have.
        page: Of the reply that is to have them.

    Raises:
        EmptyMemory: nothing has a positive weight.
        ProtocolError: (code "too_large") the page has no room; no entry counts as drawn.
    """
    with memory.held():
        parameters: Parameters = memory.parameters
        layout = layout_of(memory.schema, parameters, ContainerKind.DRAWN)
        codec = codec_of(compression)
        cut = _cut(memory, layout, samples, ordered=codec != 0)
        carried = {
            Part.CHANCE: np.minimum(cut.drawn.weights / cut.drawn.total_weight, 1.0),
            Part.POPULATION: np.full(samples, cut.drawn.num_positive, np.float64),
            Part.OWNER: np.zeros(samples, np.uint32),
            Part.OWNERS: np.frombuffer(owner, np.uint8),
        }
        head = ContainerHead(parameters.sequence_length or parameters.multi_step, made_at=now)
        try:
            return _pack_cut(memory, layout, cut, head, codec, carried, page)
        except ProtocolError:
            memory.take_back(cut.drawn.numbers)
            raise


class _SplitSamples(NamedTuple):
    """Drawn samples taken apart: what is unique, and where each sample has its own."""

    drawn: Any
    """What the memory says of each sample: `DrawnWindows` or `DrawnSequences`."""
    frames: NDArray[np.int64]
    """Codes of the unique frames."""
    indices: dict[Part, NDArray[np.uint32]]
    """Into the frames, or the entries."""
    rows: dict[Part, NDArray[np.int64]]
    """Codes of the rows of blocks that do not hold frames."""


def _cut(memory: Any, layout: ContainerLayout, samples: int, ordered: bool) -> _SplitSamples:
    """Draw samples of the layout's form. The memory is held."""
    return (_cut_sequences if layout.length else _cut_transitions)(memory, layout, samples, ordered)


def _pack_cut(
    memory: Any,
    layout: ContainerLayout,
    cut: _SplitSamples,
    head: ContainerHead,
    codec: int,
    carried: Mapping[Part, NDArray[Any]] = MappingProxyType({}),
    page: Page | None = None,
) -> Payload:
    """The container of drawn samples, with what else each of them carries. The memory is held. Raises ProtocolError."""
    rows = {block: cut.rows.get(part, cut.frames) for block, part, _ in layout.columns}
    lengths = {block: memory.lengths(name, rows[block]) for block, _, name in layout.columns if block in layout.ragged}
    elements = {block: int(each.sum(dtype=np.int64)) for block, each in lengths.items()}
    samples, frames, entries = len(cut.drawn.numbers), len(cut.frames), len(cut.rows.get(Part.ENTRIES, ()))
    size = 0 if page is None else _container.container_bytes(layout.core, samples, frames, 1, entries, elements)
    if page is not None:
        page.takes(f"{samples} samples", payload=size)
    packed = _pack_frames(memory, layout, cut.frames, codec, elements) if codec else {}
    if page is not None and not page.may_expand(packed, size):
        packed = {}
    made = Container(layout, head, samples, frames, 1, packed, entries, elements)
    facts = {block: getattr(cut.drawn, name) for block, name in layout.facts}
    facts |= {layout.bookkeeping(part): cut.indices[part] for part in layout.indices}
    facts |= {layout.ragged[block]: each for block, each in lengths.items()}
    made.fill_blocks(facts | {layout.bookkeeping(part): values for part, values in carried.items()})
    for block, part, name in layout.columns:
        if block not in packed and part not in LENGTHS:
            memory.copy_frames(name, rows[block], made.view(block))
    return made.payload


def _cut_transitions(memory: Any, layout: ContainerLayout, samples: int, ordered: bool) -> _SplitSamples:
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
    return _SplitSamples(drawn, frames, {Part.PREV_INDEX: prev, Part.NEXT_INDEX: next}, rows)


def _cut_sequences(memory: Any, layout: ContainerLayout, samples: int, ordered: bool) -> _SplitSamples:
    drawn = memory.draw_sequences(samples)
    has_frames, has_entries = Part.PREV_INDEX in layout.indices, Part.ENTRY_INDEX in layout.indices
    frames, states, _ = memory.unique_frames(drawn.state_codes if has_frames else None, None, ordered=ordered)
    entries, places, _ = memory.unique_frames(drawn.codes if has_entries else None, None, ordered=False)
    rows = {Part.ENTRIES: entries, Part.PREV: np.ascontiguousarray(drawn.codes[:, 0])}
    return _SplitSamples(drawn, frames, {Part.PREV_INDEX: states, Part.ENTRY_INDEX: places}, rows)


def _pack_frames(
    memory: Any, layout: ContainerLayout, sources: Any, codec: int, elements: dict[int, int]
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
    layout = layout_of(schema, _DEFAULTS, ContainerKind.EPISODE, final=final is not None)
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
    head = ContainerHead(made_at=now)
    made = Container(layout, head, entries, packed=packed, elements=elements)
    facts: dict[Part, NDArray[Any]] = {Part.INIT_WEIGHT: init_w, Part.AGE: age, Part.MODEL: model_version}
    made.fill_blocks({layout.bookkeeping(fact): values for fact, values in facts.items()})
    for block, part, name in layout.columns:
        if part is Part.FINAL:
            assert final is not None
            made.fill(part, final[name], name)
        elif part in LENGTHS:
            made.fill(part, lengths[name].astype(LENGTH), name)
        elif block not in packed:
            fill(name, made.view(block))
    return made.payload


def samples_of(payload: Payload) -> int:
    """How many samples a container holds that was made here."""
    return int(payload[:4].view("<u4")[0])


def pack_feedback(schema: Schema, ids: NDArray[Any], td_errors: NDArray[np.float32], *, now: float = 0.0) -> Payload:
    """The container of a FEEDBACK message: ids of dtype `batch.ID` [B] and their TD errors [B], finite."""
    order, begins = grouped_by_client(ids)
    owner = np.empty(len(ids), np.uint32)
    owner[order] = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(ids)))
    return _pack_errors(schema, ids["number"], owner, ids["client"][order[begins]], td_errors, now)


def pack_client_feedback(
    schema: Schema, client: bytes, numbers: NDArray[np.int64], td_errors: NDArray[np.float32], *, now: float
) -> Payload:
    """The same of one client's entries: their numbers [B] and TD errors [B]."""
    owner = np.zeros(len(numbers), np.uint32)
    return _pack_errors(schema, numbers, owner, np.frombuffer(client, "<u8"), td_errors, now)


def _pack_errors(
    schema: Schema, numbers: NDArray[np.int64], owner: NDArray[np.uint32], owners: NDArray[np.uint64],
    td_errors: NDArray[np.float32], now: float,
) -> Payload:  # fmt: skip
    layout = layout_of(schema, _DEFAULTS, ContainerKind.FEEDBACK)
    made = Container(layout, ContainerHead(made_at=now), len(numbers), owners=owners.size // 2)
    facts = {Part.NUMBER: numbers, Part.OWNER: owner, Part.OWNERS: owners, Part.TD_ERROR: td_errors}
    for part, values in facts.items():
        made.fill(part, np.asarray(values, FACTS[part].dtype))
    return made.payload


_UNPACK_DEFAULTS: Final = Limits()
_OF_ENTRIES: Final = (Part.INIT_WEIGHT, Part.AGE, Part.MODEL)


class EpisodeRows(NamedTuple):
    """What a received episode holds; arrays are read-only and may lie in the payload. T entries, F a column's shape."""

    columns: dict[str, Any]
    """Each column [T, *F] but the return; a ragged one as `Ragged`."""
    final: dict[str, NDArray[Any]] | None
    """Each state column [*F]."""
    init_w: NDArray[np.float32]
    age: NDArray[np.float32]
    model_version: NDArray[np.int64]


def read_episode(held: _container.HeldCache, layout: ContainerLayout) -> EpisodeRows:
    """The arrays of a container of kind EPISODE that `check` found fit `layout`."""
    rows = _Rows(held, layout)
    told = [rows.array(layout.bookkeeping(part), FACTS[part].dtype, ()) for part in _OF_ENTRIES]
    columns, final = rows.columns()
    return EpisodeRows(columns, final or None, *told)


def read_columns(held: _container.HeldCache, layout: ContainerLayout) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Each column [n, *F] of a container of kind EPISODE or ROWS that `check` found fit `layout`, a ragged one as
    `Ragged`; and each column of the final state [*F]. The arrays may lie in the payload.
    """
    return _Rows(held, layout).columns()


class _Rows:
    """A checked container whose blocks are read as arrays."""

    def __init__(self, held: _container.HeldCache, layout: ContainerLayout) -> None:
        self._held, self._layout, self._payload = held, layout, held.payload
        self._table = list(ROW.iter_unpack(self._payload[HEAD.size : HEAD.size + ROW.size * len(layout.blocks)]))

    def columns(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """See `read_columns`."""
        columns: dict[str, Any] = {}
        final: dict[str, NDArray[Any]] = {}
        for block, part, name in self._layout.columns:
            column = self._layout.schema[name]
            if part in LENGTHS:
                continue
            array = self.array(block, column.dtype, column.element)
            if part is Part.FINAL:
                final[name] = array if column.is_ragged else array[0]
            elif column.is_ragged:
                columns[name] = Ragged(array, self.array(self._layout.ragged[block], LENGTH, ()))
            else:
                columns[name] = array
        return columns, final

    def array(self, block: int, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        """The values of a block: [n, *shape]."""
        _, _, codec, count, offset, stored, raw = self._table[block]
        if block in self._layout.ragged:
            count = raw // self._layout.blocks[block].row_bytes
        if not raw:
            return np.zeros((count, *shape), dtype)
        data = self._held.block(block) if codec else self._payload[offset : offset + stored]
        array = np.frombuffer(data, dtype)
        if shape:
            array = array.reshape(count, *shape)
        return array if array.flags.aligned else array.copy()  # a small message lies wherever it was received


def unpacked_bytes(payload: Any) -> int:
    """Bytes of a received container and of its packed blocks, as its table says; nothing of it was checked yet."""
    data = memoryview(payload).cast("B")
    end = HEAD.size + ROW.size * (HEAD.unpack_from(data)[7] if len(data) >= HEAD.size else 0)
    if len(data) < end or not any(data[HEAD.size + 3 : end : ROW.size]):  # no block has a codec
        return len(data)
    packed: int = sum(raw for *_, codec, _, _, _, raw in ROW.iter_unpack(data[HEAD.size : end]) if codec)
    return len(data) + packed


def check(
    payload: Any, layout: ContainerLayout, limits: Limits = _UNPACK_DEFAULTS, *, checksum: int | None = None
) -> _container.HeldCache:
    """A received container, completely checked, ready for `Pool.add`; gathering reads it in place.

    With a checksum, the bytes are copied while they are checked. The buffer that they were received into can then take
    the next message while it is still in the processor's cache. Without a checksum, the result keeps the buffer.

    Checks sizes, order, alignment, padding, and the range of indices, weights, discounts and counts. Packed blocks are
    unpacked now, after their declared size was compared with the schema's. One pass without the GIL, with the checksum.

    Args:
        payload: The frame as it was received; it must not change afterwards.
        layout: What it must be: `layout_of(schema, parameters)`.
        checksum: The header's, where `frames.parse` was told not to compare it.

    Raises:
        ProtocolError: and nothing else, whatever the bytes.
    """
    _check_size(payload, limits)
    return _container.HeldCache(payload, layout.core, checksum, limits.message_bytes, unpack_block)


def _check_size(payload: Any, limits: Limits) -> None:
    size = memoryview(payload).nbytes
    if size > limits.message_bytes:
        raise ProtocolError("too_large", f"{size} bytes; {limits.message_bytes} are allowed (message_bytes)")


def check_making(held: _container.HeldCache, making: int) -> None:
    """Refuse samples that were made with other parameters than those that hold here, `layout.making_of`, although they
    look alike. 0 says nothing.

    Raises:
        ProtocolError: (code "parameters")
    """
    if held.making not in (0, making):
        raise ProtocolError(
            "parameters", "samples made with other parameters, such as another discount, than hold here"
        )


def check_in_place(payload: Any, layout: ContainerLayout, limits: Limits, *, checksum: int) -> _container.HeldCache:
    """`check` of what is read once, right away: it is summed up where it was received, and not copied.

    The buffer stays as long as what this returns, and must not change. Raises ProtocolError.
    """
    _check_size(payload, limits)
    check_payload(payload, checksum)
    return check(payload, layout, limits)


def copy_of(held: _container.HeldCache, layout: ContainerLayout) -> _container.HeldCache:
    """The same cache of that layout once more, none of its samples drawn; the bytes that came are shared."""
    copy = _container.HeldCache(held.payload, layout.core, None, 1 << 62, unpack_block)
    copy.arrived = held.arrived
    return copy


def read_feedback(payload: Any, schema: Schema, limits: Limits = _UNPACK_DEFAULTS) -> dict[bytes, tuple[Any, Any]]:
    """Client id -> (numbers int64 [n], td_errors float32 [n]) of a received FEEDBACK container. ProtocolError."""
    held = check(payload, layout_of(schema, Parameters(), ContainerKind.FEEDBACK), limits)
    numbers, errors, owner = (
        np.frombuffer(held.part(part), FACTS[part].dtype) for part in (Part.NUMBER, Part.TD_ERROR, Part.OWNER)
    )
    owners = held.part(Part.OWNERS)
    if len(owners) == 16:
        return {owners: (numbers, errors)}
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(len(owners) // 16 + 1))
    found = {}
    for i in range(len(ends) - 1):
        mine = order[ends[i] : ends[i + 1]]
        found[owners[16 * i : 16 * i + 16]] = (numbers[mine], errors[mine])
    return found


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
