"""Elements of containers: kinds, parts, the head and the block table, each with its number on the wire."""

import struct
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import _container

Payload: TypeAlias = NDArray[np.uint8]
HEAD: Final = struct.Struct("<IHHdQdQIIdQ")
"""First 64 bytes of a container: samples, frame_stack, multi_step, total weight, positives, minimum, hash of the
parameters behind the samples (`layout.content_settings_hash`), blocks, kind, Unix time of packing, zero.
"""
ROW: Final = struct.Struct("<HBBIQQQ")
"""Row of the block table behind the head, in the order of `BlockRow`."""
ALIGNMENT: Final = _container.ALIGNMENT
"""Each block begins at a multiple of this number of bytes."""
BOOKKEEPING: Final = _container.BOOKKEEPING
"""Value in place of a column's number, for a block of bookkeeping."""
ZERO_FRAME: Final = 0xFFFFFFFF
"""Value in place of an index, for a frame of zeros."""


class ContainerKind(IntEnum):
    """Kind of a container; the number is on the wire."""

    CACHE = _container.KIND_CACHE
    EPISODE = _container.KIND_EPISODE
    FEEDBACK = _container.KIND_FEEDBACK
    DRAWN = _container.KIND_DRAWN
    SEQUENCES = _container.KIND_SEQUENCES
    DRAWN_SEQUENCES = _container.KIND_DRAWN_SEQUENCES
    ROWS = _container.KIND_ROWS


class Part(IntEnum):
    """Content of a block; the number is on the wire. docs/development/wire.md has the shape and range of each part."""

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


class RowCount(IntEnum):
    """Number of rows of a block: one for each sample, frame, owner or entry, or a single one."""

    PER_SAMPLE = _container.PER_SAMPLE
    PER_FRAME = _container.PER_FRAME
    PER_OWNER = _container.PER_OWNER
    SINGLE = _container.SINGLE
    PER_ENTRY = _container.PER_ENTRY


class BlockSpec(NamedTuple):
    """Column, part, number of rows and bytes of a row of a block that a container must have."""

    column: int
    part: Part
    extent: RowCount
    row_bytes: int


class BookkeepingBlock(NamedTuple):
    """Dtype and rows of a part of the bookkeeping, the same in every container that has the part."""

    dtype: str
    values: int = 1
    """Values in a row; 0 if the number depends on schema and parameters."""
    extent: RowCount = RowCount.PER_SAMPLE

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; 0 if the number depends on schema and parameters."""
        return self.values * np.dtype(self.dtype).itemsize


FACTS: Final = {
    Part.PREV_INDEX: BookkeepingBlock("<u4", 0),
    Part.NEXT_INDEX: BookkeepingBlock("<u4", 0),
    Part.ENTRY_INDEX: BookkeepingBlock("<u4", 0),
    Part.BURN_IN: BookkeepingBlock("<u4"),
    Part.NUMBER: BookkeepingBlock("<i8"),
    Part.WEIGHT: BookkeepingBlock("<f8"),
    Part.REWARD_SUM: BookkeepingBlock("<f4", 0),
    Part.DISCOUNT: BookkeepingBlock("<f4", 0),
    Part.STEPS: BookkeepingBlock("<u4"),
    Part.AGE: BookkeepingBlock("<f4"),
    Part.MODEL: BookkeepingBlock("<i8"),
    Part.CHANCE: BookkeepingBlock("<f8"),
    Part.POPULATION: BookkeepingBlock("<f8"),
    Part.OWNER: BookkeepingBlock("<u4"),
    Part.OWNERS: BookkeepingBlock("<u8", 2, RowCount.PER_OWNER),  # the 16 bytes of a client's id
    Part.INIT_WEIGHT: BookkeepingBlock("<f4"),
    Part.TD_ERROR: BookkeepingBlock("<f4"),
}
"""Dtypes and rows of the bookkeeping, by part. docs/development/wire.md has the same table."""

LENGTH: Final = np.dtype("<u4")
"""Dtype of the lengths of a ragged column's values, in elements."""

OF_WINDOWS: Final = {
    Part.NUMBER: "numbers", Part.WEIGHT: "weights", Part.REWARD_SUM: "reward", Part.DISCOUNT: "discount",
    Part.STEPS: "steps", Part.AGE: "ages", Part.MODEL: "model_versions", Part.BURN_IN: "burn_in",
}  # fmt: skip
"""Attribute of `DrawnWindows` or `DrawnSequences` that fills each part that has one."""
LENGTHS_OF: Final = {
    Part.PREV: Part.PREV_LENGTHS, Part.NEXT: Part.NEXT_LENGTHS, Part.FRAMES: Part.FRAMES_LENGTHS,
    Part.PREV_FRAMES: Part.FRAMES_LENGTHS, Part.NEXT_FRAMES: Part.FRAMES_LENGTHS, Part.ENTRIES: Part.ENTRIES_LENGTHS,
}  # fmt: skip
"""Part that holds the lengths of a ragged column's values, by the part that holds the values."""
LENGTHS: Final = frozenset(LENGTHS_OF.values())
WHOLE: Final = _container.WHOLE
"""Value in place of the number of a block of lengths, for a block that holds a single value."""
INDICES: Final = (Part.PREV_INDEX, Part.NEXT_INDEX, Part.ENTRY_INDEX)
"""Parts that hold indices into the frames, or into the entries of sequences."""
OF_FEEDBACK: Final = frozenset({Part.NUMBER, Part.OWNER, Part.OWNERS, Part.TD_ERROR})
"""Bookkeeping of the containers of FEEDBACK messages."""
OF_EPISODE: Final = frozenset({Part.AGE, Part.MODEL, Part.INIT_WEIGHT})
"""Bookkeeping of the containers of episodes."""
EPISODE_FACTS: Final = sum(FACTS[part].row_bytes for part in OF_EPISODE)
"""Bytes of bookkeeping that an episode's container has for each entry."""
OF_DRAWN: Final = frozenset({Part.CHANCE, Part.POPULATION, Part.OWNER, Part.OWNERS})
"""Bookkeeping that containers of kind DRAWN and DRAWN_SEQUENCES have beside that of caches."""
MAX_ROW_BYTES: Final = 1 << 27
"""Most bytes that one sample may have in one block."""


class BlockRow(NamedTuple):
    """Row of a block table: column, part, codec, rows, offset and stored bytes of a block, and its raw bytes."""

    column: int
    part: int
    codec: int
    rows: int
    offset: int
    stored: int
    raw: int
