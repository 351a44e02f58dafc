"""Samples that a draw took: how long they waited, and the container in which a server sends them to a reader."""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire.wire.compression import codec_of, may_pack, pack_block
from memoire.wire.layout import ContainerLayout
from memoire.wire.pack import Container, ContainerHead
from memoire.wire.parts import BOOKKEEPING, OF_DRAWN, BlockSpec, Part, Payload, RowCount

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


def pack_drawn(
    picks: Picks,
    layout: ContainerLayout,
    drawn: ContainerLayout,
    *,
    now: float,
    clock: float | None = None,
    compression: str = "none",
) -> Payload:
    """Picked samples as the container of a DRAWN message: frames once, each sample with its chance and its owner.

    Args:
        picks: From a pool of `layout`, not shuffled: a client's samples are side by side.
        layout, drawn: Those of caches and of drawn containers under the same schema and parameters.
        clock: The pool's now, so that ages are those of now; None: as they came.
        compression: As of `build`, which the reader must have.
    """
    samples = picks.size
    indices = {
        part: np.empty((samples, layout.blocks[layout.bookkeeping(part)].row_bytes // 4), np.uint32)
        for part in layout.indices
    }
    frames = picks.distinct({part: index for part, index in indices.items() if part is not Part.ENTRY_INDEX})
    entries = picks.distinct({part: index for part, index in indices.items() if part is Part.ENTRY_INDEX})
    owner, chance, population = np.empty(samples, np.uint32), np.empty(samples), np.empty(samples)
    owners = np.frombuffer(picks.pack_owners(owner, chance, population), np.uint8)
    head = ContainerHead(picks.multi_step, made_at=now)
    of_extent: dict[RowCount, Any] = {
        RowCount.PER_SAMPLE: picks,
        RowCount.PER_FRAME: frames,
        RowCount.PER_ENTRY: entries,
    }
    forms = [(i, drawn.blocks[i]) for i in drawn.ragged]
    elements = {
        i: of_extent[form.extent].bytes_of(_same_block(layout, drawn, form)) // form.row_bytes for i, form in forms
    }
    packed = _pack_picked(frames, layout, drawn, elements, codec_of(compression))
    counts = (samples, max(1, frames.size), len(owners) // 16, packed, max(1, entries.size), elements)
    made = Container(drawn, head, *counts)
    carried: dict[Part, NDArray[Any]] = {**indices, Part.OWNER: owner, Part.OWNERS: owners}
    carried |= {Part.CHANCE: chance, Part.POPULATION: population}
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
