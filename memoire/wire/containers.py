"""Packing and unpacking of containers: caches, drawn batches, episodes and feedback as one buffer
(docs/development/wire.md).

A container is a head, a table and 64-byte aligned blocks, one for each column. States are *unique frames and an
index*: overlapping stacks and entries that were drawn twice cross the wire once. Schema and parameters determine the
blocks, so their `ContainerLayout` defines the containers that are packed, the containers that are accepted, and the
arrays of a batch. Sequences for recurrent networks have a layout of their own, with unique entries and an index too.

A received container is checked completely before any value is used, and then read in place.
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
from .layout import ContainerLayout, content_settings_hash, layout_of
from .parts import ALIGNMENT, BOOKKEEPING, FACTS, HEAD, LENGTH, LENGTHS, ROW, BlockRow, ContainerKind, Part, Payload
from .receivers import ReplyPage

_BYTE: Final = np.dtype(np.uint8)


@dataclass(frozen=True)
class ContainerHead:
    """Fields of a container's first 64 bytes, without sizes and kind."""

    multi_step: int = 1
    total_weight: float = 0.0
    positives: int = 0
    minimum: float = 0.0
    making: int = 0
    made_at: float = 0.0


_DEFAULTS: Final = Parameters()
"""Parameters for the layouts of episodes and feedback, which do not depend on parameters."""


class ContainerWriter:
    """Writer of a container: allocates the payload once and returns views of the blocks, to be filled in place.

    Args:
        layout, head: Layout and head of the container.
        samples, frames, owners, entries: Rows of blocks of each extent.
        packed: Compressed blocks: number -> (codec, bytes).
        elements: Sum of the lengths of a ragged column's values, by number of the block that holds the values.
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
        """Return a view of the stored bytes of a block, to be filled."""
        begin, stored = self._row(block)[4:6]
        return self.payload[begin : begin + stored]

    def array(self, part: Part, dtype: Any, name: str | None = None) -> NDArray[Any] | None:
        """Return a view [N, W] of a block as `dtype`, to be filled: N rows of W values; None for a missing block."""
        block = self.layout.block_number(part, name)
        if block is None:
            return None
        rows: NDArray[Any] = self.view(block).view(dtype).reshape(self._row(block)[3], -1)
        return rows

    def fill(self, part: Part, values: Any, name: str | None = None) -> None:
        """Copy an array into a block that the layout must have."""
        block = self.layout.block_number(part, name)
        assert block is not None, part
        self.fill_blocks({block: np.ascontiguousarray(values)})

    def fill_blocks(self, arrays: dict[int, NDArray[Any]]) -> None:
        """Copy contiguous arrays of any shape into blocks, by number; each array has exactly its block's bytes."""
        _container.fill(self.layout.core, self.payload, arrays)


def build(
    memory: Any,
    samples: int | None = None,
    *,
    now: float,
    compression: str | None = None,
) -> Payload:
    """Draw a cache from a `Memory`, and return it as the payload of a CACHE message, aligned to 64 bytes.

    The memory does not change between the draw and the copy of the last sample.

    Args:
        memory: A `Memory`, or an object that draws and writes caches like a `Memory`.
        samples: Number of samples; None is the parameters' cache_size.
        now: Unix seconds, for the cache's age.
        compression: "none", "zlib" or "lz4", a codec of the home server; None is the parameters' compression, with
            "none" for "auto". A column that does not get smaller is stored as it is.

    Raises:
        EmptyMemory: no entry has a positive weight.
        ParameterError: this process does not have the compression.

    Cost: one pass over the needed frames. Meanwhile the memory is locked, and the GIL is released.
    """
    with memory.held():
        parameters: Parameters = memory.parameters
        layout = layout_of(memory.schema, parameters)
        wanted = parameters.compression if compression is None else compression
        codec = codec_of("none" if wanted == "auto" else wanted)
        split = _draw(memory, layout, parameters.cache_size if samples is None else samples, codec != 0)
        sums = split.drawn.total_weight, split.drawn.num_positive, split.drawn.min_weight
        making = content_settings_hash(memory.schema, parameters)
        head = ContainerHead(parameters.sequence_length or parameters.multi_step, *sums, making, now)
        return _pack_drawn(memory, layout, split, head, codec)


def build_drawn(
    memory: Any, owner: bytes, samples: int, *, now: float, compression: str = "none", page: ReplyPage | None = None
) -> Payload:
    """Draw samples from a `Memory`, and return them as the payload of a DRAWN message. The memory is locked meanwhile.

    Args:
        memory, now: As in `build`.
        owner: Id of the memory for readers, 16 bytes.
        samples: Number of samples, at least 1.
        compression: "none", "zlib" or "lz4", a codec that the reader must have.
        page: Page of the reply that is to hold the samples.

    Raises:
        EmptyMemory: no entry has a positive weight.
        ProtocolError: (code "too_large") the page has no room; no entry counts as drawn.
    """
    with memory.held():
        parameters: Parameters = memory.parameters
        layout = layout_of(memory.schema, parameters, ContainerKind.DRAWN)
        codec = codec_of(compression)
        split = _draw(memory, layout, samples, ordered=codec != 0)
        carried = {
            Part.CHANCE: np.minimum(split.drawn.weights / split.drawn.total_weight, 1.0),
            Part.POPULATION: np.full(samples, split.drawn.num_positive, np.float64),
            Part.OWNER: np.zeros(samples, np.uint32),
            Part.OWNERS: np.frombuffer(owner, np.uint8),
        }
        head = ContainerHead(parameters.sequence_length or parameters.multi_step, made_at=now)
        try:
            return _pack_drawn(memory, layout, split, head, codec, carried, page)
        except ProtocolError:
            memory.take_back(split.drawn.numbers)
            raise


class _SplitSamples(NamedTuple):
    """Drawn samples as unique frames and rows, and indices of each sample into them."""

    drawn: Any
    """Facts of each sample from the memory: `DrawnWindows` or `DrawnSequences`."""
    frames: NDArray[np.int64]
    """Codes of the unique frames."""
    indices: dict[Part, NDArray[np.uint32]]
    """Indices of each sample into the frames or the entries, by part."""
    rows: dict[Part, NDArray[np.int64]]
    """Codes of the rows of blocks that do not hold frames, by part."""


def _draw(memory: Any, layout: ContainerLayout, samples: int, ordered: bool) -> _SplitSamples:
    """Draw transitions, or sequences if the layout is one of sequences. The caller holds the memory's lock."""
    return (_draw_sequences if layout.length else _draw_transitions)(memory, layout, samples, ordered)


def _pack_drawn(
    memory: Any,
    layout: ContainerLayout,
    split: _SplitSamples,
    head: ContainerHead,
    codec: int,
    carried: Mapping[Part, NDArray[Any]] = MappingProxyType({}),
    page: ReplyPage | None = None,
) -> Payload:
    """Pack drawn samples and the bookkeeping in `carried`; raise ProtocolError if `page` has no room for them."""
    rows = {block: split.rows.get(part, split.frames) for block, part, _ in layout.columns}
    lengths = {block: memory.lengths(name, rows[block]) for block, _, name in layout.columns if block in layout.ragged}
    elements = {block: int(each.sum(dtype=np.int64)) for block, each in lengths.items()}
    samples, frames, entries = len(split.drawn.numbers), len(split.frames), len(split.rows.get(Part.ENTRIES, ()))
    size = 0 if page is None else _container.container_bytes(layout.core, samples, frames, 1, entries, elements)
    if page is not None:
        page.count_row(f"{samples} samples", payload=size)
    packed = _pack_frames(memory, layout, split.frames, codec, elements) if codec else {}
    if page is not None and not page.may_expand(packed, size):
        packed = {}
    container = ContainerWriter(layout, head, samples, frames, 1, packed, entries, elements)
    facts = {block: getattr(split.drawn, name) for block, name in layout.facts}
    facts |= {layout.bookkeeping_block(part): split.indices[part] for part in layout.indices}
    facts |= {layout.ragged[block]: each for block, each in lengths.items()}
    container.fill_blocks(facts | {layout.bookkeeping_block(part): values for part, values in carried.items()})
    for block, part, name in layout.columns:
        if block not in packed and part not in LENGTHS:
            memory.copy_frames(name, rows[block], container.view(block))
    return container.payload


def _draw_transitions(memory: Any, layout: ContainerLayout, samples: int, ordered: bool) -> _SplitSamples:
    drawn = memory.draw_windows(samples)
    wanted = [
        codes if part in layout.indices else None
        for part, codes in ((Part.PREV_INDEX, drawn.prev_codes), (Part.NEXT_INDEX, drawn.next_codes))
    ]
    frames, prev, next = memory.unique_frames(*wanted, ordered=ordered)
    if not len(frames) and layout.indices:
        # All frames are zeros: an index still needs a row to point past.
        frames = np.full(1, -1, np.int64)
    rows = {Part.PREV: drawn.rows, Part.NEXT: drawn.next_rows}
    return _SplitSamples(drawn, frames, {Part.PREV_INDEX: prev, Part.NEXT_INDEX: next}, rows)


def _draw_sequences(memory: Any, layout: ContainerLayout, samples: int, ordered: bool) -> _SplitSamples:
    drawn = memory.draw_sequences(samples)
    has_frames, has_entries = Part.PREV_INDEX in layout.indices, Part.ENTRY_INDEX in layout.indices
    frames, states, _ = memory.unique_frames(drawn.state_codes if has_frames else None, None, ordered=ordered)
    entries, places, _ = memory.unique_frames(drawn.codes if has_entries else None, None, ordered=False)
    rows = {Part.ENTRIES: entries, Part.PREV: np.ascontiguousarray(drawn.codes[:, 0])}
    return _SplitSamples(drawn, frames, {Part.PREV_INDEX: states, Part.ENTRY_INDEX: places}, rows)


def _pack_frames(
    memory: Any, layout: ContainerLayout, sources: Any, codec: int, elements: dict[int, int]
) -> dict[int, tuple[int, bytes]]:
    """Compress the blocks of frames: block -> (codec, bytes), without blocks that would not get smaller."""
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
    """Pack an episode as the payload of an EPISODE message: T entries in order, each frame once.

    Args:
        fill: Called as fill(column, target) for each column but the return: writes the column's T values into exactly
            their bytes, one value after the other.
        init_w, age, model_version: Arrays [T], as in docs/development/wire.md.
        lengths: Number of elements of each value of each ragged column, [T], by column.
        final: Final state: each state column [*F].
        now: Unix seconds, for the head.
        compression: Codec for state columns; a column that does not get smaller is stored as it is.
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
    container = ContainerWriter(layout, head, entries, packed=packed, elements=elements)
    facts: dict[Part, NDArray[Any]] = {Part.INIT_WEIGHT: init_w, Part.AGE: age, Part.MODEL: model_version}
    container.fill_blocks({layout.bookkeeping_block(fact): values for fact, values in facts.items()})
    for block, part, name in layout.columns:
        if part is Part.FINAL:
            assert final is not None
            container.fill(part, final[name], name)
        elif part in LENGTHS:
            container.fill(part, lengths[name].astype(LENGTH), name)
        elif block not in packed:
            fill(name, container.view(block))
    return container.payload


def samples_of(payload: Payload) -> int:
    """Return the number of samples of a container that this process packed; the bytes are not checked."""
    return int(payload[:4].view("<u4")[0])


def pack_feedback(schema: Schema, ids: NDArray[Any], td_errors: NDArray[np.float32], *, now: float = 0.0) -> Payload:
    """Pack ids of dtype `batch.ID` [B] and their finite TD errors [B] into the container of a FEEDBACK message."""
    order, begins = grouped_by_client(ids)
    owner = np.empty(len(ids), np.uint32)
    owner[order] = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(ids)))
    return _pack_errors(schema, ids["number"], owner, ids["client"][order[begins]], td_errors, now)


def pack_client_feedback(
    schema: Schema, client: bytes, numbers: NDArray[np.int64], td_errors: NDArray[np.float32], *, now: float
) -> Payload:
    """Pack the numbers [B] and TD errors [B] of one client's entries into the container of a FEEDBACK message."""
    owner = np.zeros(len(numbers), np.uint32)
    return _pack_errors(schema, numbers, owner, np.frombuffer(client, "<u8"), td_errors, now)


def _pack_errors(
    schema: Schema, numbers: NDArray[np.int64], owner: NDArray[np.uint32], owners: NDArray[np.uint64],
    td_errors: NDArray[np.float32], now: float,
) -> Payload:  # fmt: skip
    layout = layout_of(schema, _DEFAULTS, ContainerKind.FEEDBACK)
    container = ContainerWriter(layout, ContainerHead(made_at=now), len(numbers), owners=owners.size // 2)
    facts = {Part.NUMBER: numbers, Part.OWNER: owner, Part.OWNERS: owners, Part.TD_ERROR: td_errors}
    for part, values in facts.items():
        container.fill(part, np.asarray(values, FACTS[part].dtype))
    return container.payload


_UNPACK_DEFAULTS: Final = Limits()
_ENTRY_PARTS: Final = (Part.INIT_WEIGHT, Part.AGE, Part.MODEL)


class EpisodeRows(NamedTuple):
    """Arrays of a received episode of T entries; they are read-only and may lie in the payload. F: a column's shape."""

    columns: dict[str, Any]
    """Columns but the return by name: arrays [T, *F], or `Ragged` for a ragged column."""
    final: dict[str, NDArray[Any]] | None
    """Final state: each state column [*F], by name."""
    init_w: NDArray[np.float32]
    age: NDArray[np.float32]
    model_version: NDArray[np.int64]


def read_episode(held: _container.HeldCache, layout: ContainerLayout) -> EpisodeRows:
    """Return the arrays of a container of kind EPISODE that `check` has checked against `layout`."""
    rows = _BlockReader(held, layout)
    bookkeeping = [rows.array(layout.bookkeeping_block(part), FACTS[part].dtype, ()) for part in _ENTRY_PARTS]
    columns, final = rows.columns()
    return EpisodeRows(columns, final or None, *bookkeeping)


def read_columns(held: _container.HeldCache, layout: ContainerLayout) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the columns of a checked container of kind EPISODE or ROWS, and those of the final state, by name.

    Columns are arrays [n, *F] or `Ragged`, those of the final state [*F]. The arrays may lie in the payload.
    """
    return _BlockReader(held, layout).columns()


class _BlockReader:
    """Reader of the blocks of a checked container as arrays."""

    def __init__(self, held: _container.HeldCache, layout: ContainerLayout) -> None:
        self._held, self._layout, self._payload = held, layout, held.payload
        self._table = list(ROW.iter_unpack(self._payload[HEAD.size : HEAD.size + ROW.size * len(layout.blocks)]))

    def columns(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return the columns, and the columns of the final state, as `read_columns` does."""
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
        """Return the values of a block, [n, *shape]."""
        _, _, codec, count, offset, stored, raw = self._table[block]
        if block in self._layout.ragged:
            count = raw // self._layout.blocks[block].row_bytes
        if not raw:
            return np.zeros((count, *shape), dtype)
        data = self._held.block(block) if codec else self._payload[offset : offset + stored]
        array = np.frombuffer(data, dtype)
        if shape:
            array = array.reshape(count, *shape)
        return array if array.flags.aligned else array.copy()  # a small message may lie at any address


def unpacked_bytes(payload: Any) -> int:
    """Return the bytes of a received container plus the raw bytes of its packed blocks, by its unchecked table."""
    data = memoryview(payload).cast("B")
    end = HEAD.size + ROW.size * (HEAD.unpack_from(data)[7] if len(data) >= HEAD.size else 0)
    if len(data) < end or not any(data[HEAD.size + 3 : end : ROW.size]):  # no block has a codec
        return len(data)
    packed: int = sum(raw for *_, codec, _, _, _, raw in ROW.iter_unpack(data[HEAD.size : end]) if codec)
    return len(data) + packed


def check(
    payload: Any, layout: ContainerLayout, limits: Limits = _UNPACK_DEFAULTS, *, checksum: int | None = None
) -> _container.HeldCache:
    """Check a received container completely, and return the cache for `Pool.add`; gathering reads the cache in place.

    With a checksum, the bytes are copied while they are checked. The receive buffer can then take the next message
    while the buffer is still in the processor's cache. Without a checksum, the result keeps the buffer.

    Checks sizes, order, alignment, padding, and the range of indices, weights, discounts and counts. Packed blocks are
    unpacked now, after their declared size was compared with the schema's. One pass without the GIL, with the checksum.

    Args:
        payload: Frame as received; it must not change afterwards.
        layout: Expected layout: `layout_of(schema, parameters)`.
        checksum: Checksum in the header, if `frames.parse` did not compare it.

    Raises:
        ProtocolError: the container is invalid. No bytes raise any other error.
    """
    _check_size(payload, limits)
    return _container.HeldCache(payload, layout.core, checksum, limits.message_bytes, unpack_block)


def _check_size(payload: Any, limits: Limits) -> None:
    size = memoryview(payload).nbytes
    if size > limits.message_bytes:
        raise ProtocolError("too_large", f"a container of {size} bytes; message_bytes is {limits.message_bytes}")


def check_settings_hash(held: _container.HeldCache, making: int) -> None:
    """Raise ProtocolError (code "parameters") if samples of the same layout were made with other parameters.

    Args:
        making: Hash of the receiver's parameters, `layout.content_settings_hash`. A container with hash 0 is always
        accepted.
    """
    if held.making not in (0, making):
        raise ProtocolError(
            "parameters", "samples made with other parameters, such as another discount, than this node has"
        )


def check_in_place(payload: Any, layout: ContainerLayout, limits: Limits, *, checksum: int) -> _container.HeldCache:
    """Check a received container with `check`, but compute the checksum in place instead of copying the bytes.

    For containers that are read once, right away. The result keeps the buffer, which must not change.
    Raises ProtocolError, as `check`.
    """
    _check_size(payload, limits)
    check_payload(payload, checksum)
    return check(payload, layout, limits)


def copy_of(held: _container.HeldCache, layout: ContainerLayout) -> _container.HeldCache:
    """Return a second cache on the bytes of `held`, which has `layout`, with none of its samples drawn."""
    copy = _container.HeldCache(held.payload, layout.core, None, 1 << 62, unpack_block)
    copy.arrived = held.arrived
    return copy


def read_feedback(payload: Any, schema: Schema, limits: Limits = _UNPACK_DEFAULTS) -> dict[bytes, tuple[Any, Any]]:
    """Check a FEEDBACK container (ProtocolError); return client id -> (numbers int64 [n], td_errors float32 [n])."""
    held = check(payload, layout_of(schema, Parameters(), ContainerKind.FEEDBACK), limits)
    numbers, errors, owner = (
        np.frombuffer(held.part(part), FACTS[part].dtype) for part in (Part.NUMBER, Part.TD_ERROR, Part.OWNER)
    )
    owners = held.part(Part.OWNERS)
    if len(owners) == 16:
        return {owners: (numbers, errors)}
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(len(owners) // 16 + 1))
    feedback = {}
    for i in range(len(ends) - 1):
        mine = order[ends[i] : ends[i + 1]]
        feedback[owners[16 * i : 16 * i + 16]] = (numbers[mine], errors[mine])
    return feedback


def table(payload: Any) -> list[BlockRow]:
    """Return the block table of any container; sizes are compared with the payload, contents are not read.

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
