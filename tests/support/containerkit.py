"""Containers with known contents for tests of caches and pools, as plain arrays and as bytes."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from memoire.replay.schema import Schema
from memoire.wire import containers
from memoire.wire.compression import _COMPRESS
from memoire.wire.containers import ContainerHead, ContainerWriter
from memoire.wire.layout import ContainerLayout
from memoire.wire.parts import BOOKKEEPING, ZERO_FRAME, ContainerKind, Part, RowCount

STATE, PAIR = {"image": (np.uint8, (3, 2)), "speed": np.float32}, (np.float32, (2,))
SCHEMA = Schema({"state": STATE, "action": PAIR, "reward": PAIR, "value": PAIR, "done": np.bool_})
"""Schema with a state of two parts and a column of each role."""
DTYPES = {
    Part.PREV_INDEX: "<u4", Part.NEXT_INDEX: "<u4", Part.NUMBER: "<i8", Part.WEIGHT: "<f8", Part.REWARD_SUM: "<f4",
    Part.DISCOUNT: "<f4", Part.STEPS: "<u4", Part.AGE: "<f4", Part.MODEL: "<i8", Part.CHANCE: "<f8",
    Part.ENTRY_INDEX: "<u4", Part.BURN_IN: "<u4",
    Part.POPULATION: "<f8", Part.OWNER: "<u4", Part.OWNERS: "u1", Part.INIT_WEIGHT: "<f4", Part.TD_ERROR: "<f4",
}  # fmt: skip
ENTRIES = 4


@dataclass
class Made:
    """A container and its contents by block: (part, column name or None) -> array [rows, ...]."""

    layout: ContainerLayout
    payload: Any
    blocks: dict[tuple[Part, str | None], Any]
    head: ContainerHead

    def block(self, part: Part, name: str | None = None) -> Any:
        return self.blocks[part, name]

    def held(self) -> Any:
        return containers.check(self.payload, self.layout)


def _values(rng, form, rows, samples, layout, frames, owners, steps) -> Any:
    part = form.part
    if part in (Part.PREV_INDEX, Part.NEXT_INDEX, Part.ENTRY_INDEX):
        most = ENTRIES if part is Part.ENTRY_INDEX else frames
        index = rng.integers(0, most, (samples, form.row_bytes // 4)).astype("<u4")
        index[rng.random(index.shape) < 0.1] = ZERO_FRAME
        return index
    ranges = {
        Part.NUMBER: (0, 2**62), Part.STEPS: (1, steps + 1), Part.BURN_IN: (0, layout.length), Part.MODEL: (0, 100)
    }  # fmt: skip
    if part in ranges:
        return rng.integers(*ranges[part], samples).astype(DTYPES[part])
    if part in (Part.WEIGHT, Part.INIT_WEIGHT, Part.AGE, Part.POPULATION):
        return (rng.random(samples) + 0.5).astype(DTYPES[part])
    if part is Part.CHANCE:
        return rng.random(samples) * 0.5 + 1e-3
    if part is Part.OWNER:
        return np.sort(rng.integers(0, owners, samples)).astype("<u4")
    if part is Part.OWNERS:
        return rng.integers(0, 256, (owners, 16)).astype("u1")
    if part in (Part.REWARD_SUM, Part.DISCOUNT):
        return rng.random((samples, form.row_bytes // 4)).astype("<f4")
    if part is Part.TD_ERROR:
        return rng.normal(size=samples).astype("<f4")
    column = layout.schema[layout.schema.names[form.column]]
    raw = rng.integers(0, 256, (rows, form.row_bytes)).astype("u1")
    if column.dtype.kind == "f":  # no NaN, because tests compare arrays
        raw = rng.normal(size=(rows, *column.element)).astype(column.dtype).reshape(rows, -1).view("u1")
    if column.dtype.kind == "b":
        raw &= 1
    return raw.view(column.dtype).reshape(rows, *column.element)


def make(layout, samples=8, *, seed=0, frames=5, owners=2, head=None, codec=0, replace=None) -> Made:
    """Return a valid container of `layout` with random contents; `replace` sets the values of bookkeeping blocks."""
    frames = min(frames, 2 * samples * layout.frame_stack)
    rng = np.random.default_rng(seed)
    steps = layout.length or (3 if layout.kind in (ContainerKind.CACHE, ContainerKind.DRAWN) else 1)
    if head is None:
        has_sums = layout.kind in (ContainerKind.CACHE, ContainerKind.SEQUENCES)
        head = ContainerHead(steps, 1000.0 + seed, 500, 0.25, 0, 1e9) if has_sums else ContainerHead(steps)
    counts = {
        RowCount.PER_SAMPLE: samples, RowCount.PER_FRAME: frames, RowCount.PER_OWNER: owners, RowCount.SINGLE: 1,
        RowCount.PER_ENTRY: ENTRIES,
    }  # fmt: skip
    blocks, packed = {}, {}
    lengths = {i: rng.integers(0, 4, counts[layout.blocks[i].extent]).astype("<u4") for i in layout.ragged}
    elements = {i: int(each.sum()) for i, each in lengths.items()}
    of_values = {place: lengths[i] for i, place in layout.ragged.items()}
    for i, form in enumerate(layout.blocks):
        rows = elements.get(i, counts[form.extent])
        name = None if form.column == BOOKKEEPING else layout.schema.names[form.column]
        values = of_values.get(i)
        if values is None:
            values = _values(rng, form, rows, samples, layout, frames, owners, head.multi_step)
        if name is None and replace and form.part in replace:
            values = np.asarray(replace[form.part]).astype(DTYPES[form.part]).reshape(values.shape)
        blocks[form.part, name] = values
        if codec and form.extent is RowCount.PER_FRAME and form.row_bytes and i not in of_values:
            raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            packed[i] = (codec, _COMPRESS[codec](raw))
    container = ContainerWriter(layout, head, samples, frames, owners, packed, ENTRIES, elements)
    for i, form in enumerate(layout.blocks):
        if i not in packed:
            name = None if form.column == BOOKKEEPING else layout.schema.names[form.column]
            container.fill(form.part, blocks[form.part, name], name)
    return Made(layout, container.payload, blocks, head)
