"""Samples that a draw took: how long they waited, and the container in which a server sends them to a reader."""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire.wire._container import container_bytes
from memoire.wire.compression import codec_of, may_pack, pack_block
from memoire.wire.layout import ContainerLayout
from memoire.wire.pack import Container, ContainerHead
from memoire.wire.parts import BOOKKEEPING, OF_DRAWN, BlockSpec, Part, Payload, RowCount
from memoire.wire.receivers import Page

from ._draw import Frames, Picks


def waits_of(picks: Picks, clock: float, *, in_order: bool = False) -> NDArray[np.float32]:
    """Seconds float32 [B] for which the samples have been held: a cache says how old its entries were when it was made.

    Args:
        clock: The pool's now.
        in_order: As they were drawn, not as they lie in the batch.
    """
    arrived = np.empty(picks.size, np.float64)
    picks.arrivals(arrived, in_order)
    return np.maximum(clock - arrived, 0.0).astype(np.float32)


@lru_cache(maxsize=64)
def most_bytes(drawn: ContainerLayout, samples: int) -> float:
    """Bytes of the largest container of so many samples: no two have a frame in common. Infinity where the length of
    values is theirs to say.
    """
    if drawn.ragged:
        return float("inf")
    frames = drawn.frame_stack + drawn.length if drawn.length else 2 * drawn.frame_stack
    return container_bytes(drawn.core, samples, samples * frames, samples, samples * max(1, drawn.length), {})


class DistinctRows:
    """Picked samples as they share frames and entries: each of these once, and where each sample has its own."""

    def __init__(self, picks: Picks, layout: ContainerLayout, drawn: ContainerLayout) -> None:
        samples = picks.size
        self.indices = {
            part: np.empty((samples, layout.blocks[layout.bookkeeping(part)].row_bytes // 4), np.uint32)
            for part in layout.indices
        }
        indices = self.indices.items()
        self.frames = picks.distinct({part: index for part, index in indices if part is not Part.ENTRY_INDEX})
        self.entries = picks.distinct({part: index for part, index in indices if part is Part.ENTRY_INDEX})
        self.owner, self.chance, self.population = np.empty(samples, np.uint32), np.empty(samples), np.empty(samples)
        self.owners = np.frombuffer(picks.pack_owners(self.owner, self.chance, self.population), np.uint8)
        of_extent: dict[RowCount, Any] = {
            RowCount.PER_SAMPLE: picks,
            RowCount.PER_FRAME: self.frames,
            RowCount.PER_ENTRY: self.entries,
        }
        forms = [(i, drawn.blocks[i]) for i in drawn.ragged]
        self.elements = {
            i: of_extent[form.extent].bytes_of(_same_block(layout, drawn, form)) // form.row_bytes for i, form in forms
        }
        self.rows = samples, max(1, self.frames.size), len(self.owners) // 16, max(1, self.entries.size)
        self._drawn = drawn

    @property
    def nbytes(self) -> int:
        """Bytes of the container that `pack_drawn` makes of them, without compression."""
        return container_bytes(self._drawn.core, *self.rows, self.elements)


def pack_drawn(
    picks: Picks,
    layout: ContainerLayout,
    drawn: ContainerLayout,
    *,
    now: float,
    clock: float | None = None,
    compression: str = "none",
    page: Page | None = None,
    parts: DistinctRows | None = None,
) -> Payload:
    """Picked samples as the container of a DRAWN message: frames once, each sample with its chance and its owner.

    Args:
        picks: From a pool of `layout`, not shuffled: a client's samples are side by side.
        layout, drawn: Those of caches and of drawn containers under the same schema and parameters.
        clock: The pool's now, so that ages are those of now; None: as they came.
        compression: As of `build`, which the reader must have.
        page: Of the reply, on which they have room without compression.
        parts: What `DistinctRows` makes of the picks, if it was made already.
    """
    parts = parts or DistinctRows(picks, layout, drawn)
    frames, entries = parts.frames, parts.entries
    head = ContainerHead(picks.multi_step, made_at=now)
    packed = _pack_picked(frames, layout, drawn, parts.elements, codec_of(compression))
    if page is not None and not page.may_expand(packed, parts.nbytes):
        packed = {}
    samples, frame_rows, owner_rows, entry_rows = parts.rows
    made = Container(drawn, head, samples, frame_rows, owner_rows, packed, entry_rows, parts.elements)
    carried: dict[Part, NDArray[Any]] = {**parts.indices, Part.OWNER: parts.owner, Part.OWNERS: parts.owners}
    carried |= {Part.CHANCE: parts.chance, Part.POPULATION: parts.population}
    made.fill_blocks({drawn.bookkeeping(part): values for part, values in carried.items()})
    for i, form, source in _copied_blocks(layout, drawn):
        if i not in packed:
            distinct = entries if form.extent is RowCount.PER_ENTRY else frames
            _fill_drawn(made.view(i), picks, distinct, source, form)
    ages = made.array(Part.AGE, "<f4")
    if clock is not None and ages is not None:
        ages[:, 0] += waits_of(picks, clock, in_order=True)
    return made.payload


def _pack_picked(
    frames: Frames, layout: ContainerLayout, drawn: ContainerLayout, elements: dict[int, int], codec: int
) -> dict[int, tuple[int, bytes]]:
    """The state columns of picked samples, compressed: block -> (codec, bytes)."""
    packed: dict[int, tuple[int, bytes]] = {}
    for i, form in enumerate(drawn.blocks if codec and frames.size else ()):
        size = elements.get(i, frames.size) * form.row_bytes
        if may_pack(drawn, form, size):
            raw: Payload = np.empty(size, np.uint8)
            frames.pack_frames(_same_block(layout, drawn, form), raw)
            pack_block(packed, i, raw, codec)
    return packed


@lru_cache(maxsize=64)
def _copied_blocks(layout: ContainerLayout, drawn: ContainerLayout) -> tuple[tuple[int, BlockSpec, int], ...]:
    """The blocks of drawn containers whose rows are those of caches: (block, what it is, block in caches)."""
    forms = enumerate(drawn.blocks)
    copied = [(i, form) for i, form in forms if form.part not in OF_DRAWN and form.part not in layout.indices]
    return tuple((i, form, _same_block(layout, drawn, form)) for i, form in copied)


def _same_block(layout: ContainerLayout, drawn: ContainerLayout, form: BlockSpec) -> int:
    """Number in caches of a block of drawn containers."""
    block = layout.place(form.part, None if form.column == BOOKKEEPING else drawn.schema.names[form.column])
    assert block is not None
    return block


def _fill_drawn(target: Payload, picks: Picks, distinct: Frames, source: int, form: BlockSpec) -> None:
    if form.extent is RowCount.PER_SAMPLE:
        picks.pack_rows(source, target)
    elif distinct.size:
        distinct.pack_frames(source, target)
    else:
        target[:] = 0
