"""What containers are made of: kinds, parts, the head and the table, each with its number on the wire."""

import struct
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import _container

Payload: TypeAlias = NDArray[np.uint8]
HEAD: Final = struct.Struct("<IHHdQdQIIdQ")
"""The first 64 bytes: samples, frame_stack, multi_step, total weight, positives, minimum, what its samples were made
with (`layout.making_of`), blocks, kind, when it was made, zero.
"""
ROW: Final = struct.Struct("<HBBIQQQ")
"""A row of the table behind the head, as `BlockRow`."""
ALIGNMENT: Final = _container.ALIGNMENT
"""Each block begins at a multiple of it."""
BOOKKEEPING: Final = _container.BOOKKEEPING
"""In place of a column's number."""
ZERO_FRAME: Final = 0xFFFFFFFF
"""In place of an index: a frame of zeros."""


class ContainerKind(IntEnum):
    """What a container holds."""

    CACHE = _container.KIND_CACHE
    EPISODE = _container.KIND_EPISODE
    FEEDBACK = _container.KIND_FEEDBACK
    DRAWN = _container.KIND_DRAWN
    SEQUENCES = _container.KIND_SEQUENCES
    DRAWN_SEQUENCES = _container.KIND_DRAWN_SEQUENCES
    ROWS = _container.KIND_ROWS


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


class RowCount(IntEnum):
    """How many rows a block has."""

    PER_SAMPLE = _container.PER_SAMPLE
    PER_FRAME = _container.PER_FRAME
    PER_OWNER = _container.PER_OWNER
    SINGLE = _container.SINGLE
    PER_ENTRY = _container.PER_ENTRY


class BlockSpec(NamedTuple):
    """A block that a container must have."""

    column: int
    part: Part
    extent: RowCount
    row_bytes: int


class BookkeepingBlock(NamedTuple):
    """What a part of the bookkeeping looks like in every container that has it."""

    dtype: str
    values: int = 1
    """Values in a row; 0 means that schema and parameters say how many."""
    extent: RowCount = RowCount.PER_SAMPLE

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; 0 as for `values`."""
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
"""Bookkeeping: dtypes and rows, said here alone. docs/wire.md has the same table."""

LENGTH: Final = np.dtype("<u4")
"""Of how many elements a value of a ragged column has."""

OF_WINDOWS: Final = {
    Part.NUMBER: "numbers", Part.WEIGHT: "weights", Part.REWARD_SUM: "reward", Part.DISCOUNT: "discount",
    Part.STEPS: "steps", Part.AGE: "ages", Part.MODEL: "model_versions", Part.BURN_IN: "burn_in",
}  # fmt: skip
"""Parts that hold what a memory says of each sample, and the name that it has there."""
LENGTHS_OF: Final = {
    Part.PREV: Part.PREV_LENGTHS, Part.NEXT: Part.NEXT_LENGTHS, Part.FRAMES: Part.FRAMES_LENGTHS,
    Part.PREV_FRAMES: Part.FRAMES_LENGTHS, Part.NEXT_FRAMES: Part.FRAMES_LENGTHS, Part.ENTRIES: Part.ENTRIES_LENGTHS,
}  # fmt: skip
"""Parts of ragged columns, and the part that has their lengths."""
LENGTHS: Final = frozenset(LENGTHS_OF.values())
WHOLE: Final = _container.WHOLE
"""In place of a block of lengths: the one value is as long as its block."""
INDICES: Final = (Part.PREV_INDEX, Part.NEXT_INDEX, Part.ENTRY_INDEX)
"""Parts that are indices into the frames, or into the entries of sequences."""
OF_FEEDBACK: Final = frozenset({Part.NUMBER, Part.OWNER, Part.OWNERS, Part.TD_ERROR})
"""Bookkeeping of the containers of FEEDBACK messages."""
OF_EPISODE: Final = frozenset({Part.AGE, Part.MODEL, Part.INIT_WEIGHT})
"""Bookkeeping of the containers of episodes."""
EPISODE_FACTS: Final = sum(FACTS[part].row_bytes for part in OF_EPISODE)
"""Bytes of bookkeeping that an episode's container has for each entry."""
OF_DRAWN: Final = frozenset({Part.CHANCE, Part.POPULATION, Part.OWNER, Part.OWNERS})
"""Bookkeeping that only containers of drawn samples have."""
MAX_ROW_BYTES: Final = 1 << 27
"""Bytes of a block that belong to one sample."""


class BlockRow(NamedTuple):
    """A row of a block table."""

    column: int
    part: int
    codec: int
    rows: int
    offset: int
    stored: int
    raw: int
