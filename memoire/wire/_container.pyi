"""Kernels for containers: write a payload in place, and check a received one completely before any value is used."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

# Numbers of the wire; `parts` describes them.
ALIGNMENT: int
BOOKKEEPING: int
WHOLE: int
KIND_CACHE: int
KIND_EPISODE: int
KIND_FEEDBACK: int
KIND_DRAWN: int
KIND_SEQUENCES: int
KIND_DRAWN_SEQUENCES: int
KIND_ROWS: int
PART_PREV: int
PART_NEXT: int
PART_FRAMES: int
PART_PREV_INDEX: int
PART_NEXT_INDEX: int
PART_PREV_LENGTHS: int
PART_NEXT_LENGTHS: int
PART_PREV_FRAMES: int
PART_NEXT_FRAMES: int
PART_FRAMES_LENGTHS: int
PART_ENTRIES: int
PART_ENTRY_INDEX: int
PART_BURN_IN: int
PART_ENTRIES_LENGTHS: int
PART_NUMBER: int
PART_WEIGHT: int
PART_REWARD_SUM: int
PART_DISCOUNT: int
PART_STEPS: int
PART_AGE: int
PART_MODEL: int
PART_CHANCE: int
PART_POPULATION: int
PART_OWNER: int
PART_OWNERS: int
PART_INIT_WEIGHT: int
PART_FINAL: int
PART_TD_ERROR: int
PER_SAMPLE: int
PER_FRAME: int
PER_OWNER: int
SINGLE: int
PER_ENTRY: int

def container(
    layout: Layout,
    samples: int,
    frames: int,
    owners: int,
    entries: int,
    packed: dict[int, tuple[int, bytes]],
    elements: dict[int, int],
) -> NDArray[np.uint8]: ...
def container_bytes(
    layout: Layout, samples: int, frames: int, owners: int, entries: int, elements: dict[int, int]
) -> int: ...
def fill(layout: Layout, payload: NDArray[np.uint8], arrays: dict[int, NDArray[Any]]) -> None: ...

@disjoint_base
class Layout:
    def __new__(
        cls,
        kind: int,
        frame_stack: int,
        reward_size: int,
        blocks: Sequence[tuple[int, int, int, int]],
        fields: Sequence[tuple[int, int, int, int, int]],
        length: int,
        ragged: dict[int, int],
        ragged_fields: Sequence[tuple[int, int, int, int, int]],
    ) -> Self: ...
    @property
    def kind(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def fields(self) -> int: ...
    @property
    def ragged_fields(self) -> int: ...
    @property
    def frame_stack(self) -> int: ...
    @property
    def reward_size(self) -> int: ...
    @property
    def length(self) -> int: ...

@disjoint_base
class HeldCache:
    def __new__(
        cls,
        payload: Any,
        layout: Layout,
        expected: int | None,
        limit: int,
        unpack: Callable[[int, bytes, int], bytes],
    ) -> Self: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def making(self) -> int: ...
    @property
    def made_at(self) -> float: ...
    @property
    def minimum(self) -> float: ...
    @property
    def multi_step(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def drawn(self) -> int: ...
    @property
    def payload(self) -> memoryview: ...
    def go_on_at(self, drawn: int) -> None: ...
    def left_over(self) -> tuple[bytes, bytes, float, int, float] | None: ...
    def go_on_with(self, samples: bytes, times: bytes, eldest: float, least_model: int, positives: float) -> None: ...
    @property
    def arrived(self) -> float: ...
    @arrived.setter
    def arrived(self, seconds: float) -> None: ...
    @property
    def total_weight(self) -> float: ...
    @property
    def positives(self) -> int: ...
    def part(self, part: int) -> Any: ...
    def block(self, i: int) -> bytes: ...

@disjoint_base
class RowForm:
    def __new__(
        cls, blank: bytes, columns: Sequence[tuple[str, int, np.dtype[Any], tuple[int, ...], bool]]
    ) -> Self: ...
    def pack(self, columns: dict[str, Any], first: int = -1) -> bytes | None: ...
    def unpack(self, payload: Any) -> dict[str, NDArray[Any]] | None: ...
