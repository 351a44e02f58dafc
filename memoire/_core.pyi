"""Kernels of a memory: large arrays, priority trees, entry store, TD(lambda), windows, importance, locks."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import disjoint_base

__pyx_capi__: dict[str, object]
"""C functions that other compiled modules call, by name."""

CHECKED: bool
"""True if bounds checks and assertions were compiled in (MEMOIRE_CHECKED=1)."""

def is_finite(numbers: NDArray[Any]) -> bool: ...

class Guarded:
    def __setattr__(self, name: str, value: Any, /) -> None: ...

@disjoint_base
class Room:
    def __new__(cls, size: int) -> Self: ...

def spare_bytes() -> int: ...
def keep_freed_memory() -> bool: ...
def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]: ...

NOT_OPEN: int
TOO_LONG: int
NOT_EXACT: int
NOT_FINITE: int
BAD_WEIGHT: int
REPEATED: int
NO_MEMORY: int
TOO_MANY_BYTES: int
"""Status that is returned in place of an entry's number if the entry was not added."""

META: np.dtype[Any]
EPISODE: np.dtype[Any]
LANE: np.dtype[Any]
PAGE: np.dtype[Any]
"""Dtypes of the arrays of `EntryStore.contents`."""

@disjoint_base
class PriorityTree:
    def __new__(cls, size: int) -> Self: ...
    @property
    def size(self) -> int: ...
    @property
    def total(self) -> float: ...
    @property
    def positive(self) -> int: ...
    @property
    def minimum(self) -> float: ...
    def set(self, indices: ArrayLike, weights: ArrayLike) -> None: ...
    def get(self, indices: ArrayLike) -> NDArray[np.float64]: ...
    def find(self, masses: ArrayLike) -> NDArray[np.int64]: ...
    def draw(self, fractions: ArrayLike) -> NDArray[np.int64]: ...

@disjoint_base
class EntryStore:
    def __new__(cls, *args: Any, **kwargs: Any) -> Self: ...
    @property
    def capacity(self) -> int: ...
    @property
    def num_entries(self) -> int: ...
    @property
    def num_episodes(self) -> int: ...
    @property
    def generated(self) -> int: ...
    @property
    def max_priority(self) -> float: ...
    def add(self, lane: int, values: tuple[Any, ...], init_w: float = 1.0, model_version: Any = 0) -> int: ...
    def _seed(self, seeds: list[int]) -> None: ...
    def _setup(
        self,
        columns: list[tuple[NDArray[np.uint8], np.dtype[Any], tuple[int, ...], str, bool]],
        capacity: int,
        page_rows: int,
        dimensions: int,
        live: bool,
        seeds: list[int],
    ) -> None: ...
    def held(self) -> Moment: ...
    def _open(self, index: int) -> None: ...
    def _open_length(self, index: int) -> int: ...
    def _open_return(self, index: int, out: Any) -> None: ...
    def _close(
        self,
        index: int,
        multiplier: float,
        update_value: bool,
        update_weight: bool,
        ended: bool,
        terminated: bool,
        final_states: list[NDArray[Any]] | None,
        bootstrap: NDArray[np.float32],
    ) -> None: ...
    def _end_for_now(self, index: int, final_states: list[NDArray[Any]], bootstrap: NDArray[np.float32]) -> None: ...
    def _end_no_more(self, index: int) -> None: ...
    def _configure(
        self,
        alpha: float,
        lambda_: float,
        frame_stack: int,
        multi_step: int,
        start: int,
        most_episodes: int,
        gamma: list[float],
        coeff: list[float],
        prioritization: int,
        stratified: bool,
        stride: int,
        burn_in: int,
        max_share: float,
        are_limits_new: bool,
    ) -> None: ...
    def _limit(self, most_drawn: int, most_age: float, most_lag: int) -> bool: ...
    def saw_model(self, version: int) -> None: ...
    @property
    def newest_model(self) -> int: ...
    @property
    def draws_left(self) -> int: ...
    def _set_facts(
        self,
        numbers: NDArray[np.int64],
        priorities: NDArray[np.float32],
        learned: NDArray[np.uint8],
        born: NDArray[np.float64],
        drawn: NDArray[np.uint32] | None = None,
    ) -> int: ...
    def _count_draws(self, numbers: NDArray[np.int64], is_back: bool = False) -> int: ...
    def _sequences(
        self,
        numbers: NDArray[np.int64],
        m: int,
        state_codes: NDArray[np.int64],
        codes: NDArray[np.int64],
        steps: NDArray[np.int32],
        discount: NDArray[np.float32],
        positions: NDArray[np.int64],
    ) -> int: ...
    def _ranked(self) -> NDArray[np.int64]: ...
    def _add_status(self, lane: int, values: tuple[Any, ...], init_w: float, model_version: int) -> int: ...
    def _add_many(
        self,
        lanes: NDArray[np.int64],
        arrays: list[Any],
        init_w: NDArray[np.float32],
        numbers: NDArray[np.int64],
        model_version: int,
    ) -> None: ...
    def _add_one(self, lane: int, values: tuple[Any, ...], init_w: float, model_version: int) -> None: ...
    def _extend(
        self,
        lane: int,
        arrays: list[Any],
        init_w: NDArray[np.float32],
        numbers: NDArray[np.int64],
        model_version: int,
        is_checked: bool = False,
    ) -> int: ...
    def _tell(self, lane: int, model_version: NDArray[np.int64], age: NDArray[np.float32]) -> None: ...
    def _sums(self, with_least: bool = True) -> tuple[float, int, float]: ...
    def _draw(
        self, count: int, fractions: NDArray[np.float64] | None, weights: NDArray[np.float64] | None = None
    ) -> NDArray[np.int64] | None: ...
    def _weights(self, numbers: NDArray[np.int64], weights: NDArray[np.float64]) -> int: ...
    def _update_priorities(
        self, numbers: NDArray[np.int64], td_errors: NDArray[np.float64], epsilon: float
    ) -> tuple[int, int]: ...
    def _count_replaced(self, numbers: NDArray[np.int64], seconds: float) -> int: ...
    def _gather(
        self,
        numbers: NDArray[np.int64],
        prev: list[tuple[int, NDArray[Any]]],
        next: list[tuple[int, NDArray[Any]]],
        reward: NDArray[np.float32],
        discount: NDArray[np.float32],
        steps: NDArray[np.int32],
        weights: NDArray[np.float32],
        ages: NDArray[np.float32],
        versions: NDArray[np.int64],
    ) -> int: ...
    def _windows(
        self,
        rows: NDArray[np.int64],
        prev_codes: NDArray[np.int64] | None,
        next_codes: NDArray[np.int64] | None,
        next_rows: NDArray[np.int64] | None,
        steps: NDArray[np.int32] | None,
        reward: NDArray[np.float32] | None,
        discount: NDArray[np.float32] | None,
    ) -> int: ...
    def _copy_column(self, index: int, codes: NDArray[np.int64], out: NDArray[Any]) -> int: ...
    def _copy_ragged(
        self, index: int, codes: NDArray[np.int64], lengths: NDArray[np.int32], out: NDArray[Any] | None, longest: int
    ) -> int: ...
    def _limit_ragged(self, limit: int) -> None: ...
    def _heaps(self) -> list[tuple[int, int, int, int, int]]: ...
    @property
    def ragged_bytes(self) -> int: ...
    @property
    def ragged_room(self) -> int: ...
    def _facts(
        self,
        rows: NDArray[np.int64],
        ages: NDArray[np.float32] | None,
        versions: NDArray[np.int64] | None,
        weights: NDArray[np.float64] | None,
    ) -> int: ...
    def _open_entries(
        self, index: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]: ...
    def contents(self) -> dict[str, Any]: ...
    def _counters(self) -> dict[str, Any]: ...
    def _take_over(
        self, arrays: dict[str, NDArray[Any]], counters: dict[str, Any], entries: int, closed: int
    ) -> None: ...
    def _set_weights(self, weights: NDArray[np.float64]) -> None: ...
    def _go_on(self, max_priority: float) -> None: ...
    def _put_values(
        self, index: int, codes: NDArray[np.int64], lengths: NDArray[np.int64], values: NDArray[Any]
    ) -> None: ...
    def set_clock(self, seconds: float | None) -> None: ...

def same_place(one: Any, two: Any) -> bool: ...

class NotAdded(Exception): ...

def at_once(calls: Iterable[tuple[Callable[..., object], tuple[Any, ...]]]) -> None: ...
def setting(owner: object, **attributes: Any) -> list[tuple[Callable[..., object], tuple[Any, ...]]]: ...
def while_more(owner: object, name: str, function: Callable[..., Any], *arguments: object) -> Any: ...

@disjoint_base
class Held:
    def __new__(cls, lock: Any, *refusal: Any) -> Self: ...
    @staticmethod
    def within(lock: Any, seconds: float) -> AbstractContextManager[bool]: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def notify_all(self) -> None: ...

@disjoint_base
class Condition:
    def __new__(cls) -> Self: ...
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def wait_for(self, is_done: Callable[[], Any], timeout: float | None = None) -> Any: ...
    def held(self) -> Held: ...
    def notify_all(self) -> None: ...

@disjoint_base
class EntryCounts:
    steps: int
    generated_bytes: int
    passed: int
    granted: int
    _elsewhere: int
    @property
    def inserted(self) -> int: ...

@disjoint_base
class SampleDebt:
    _held: Held
    _counts: EntryCounts
    _schedule: Any
    _owed: float
    _asked: int
    _is_due: bool
    def _take_granted(self, writer: StepCounter, samples: float, entry_bytes: int) -> bool: ...

@disjoint_base
class Moment:
    def __new__(cls, store: EntryStore) -> Self: ...
    def __enter__(self) -> None: ...
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...

@disjoint_base
class StepCounter:
    def __new__(cls, *args: Any, **kwargs: Any) -> Self: ...
    _inside: Any
    _last: Any
    _apart: list[Any] | None
    _pending: NDArray[np.bool_] | None
    _answer: str
    _clock: int
    _room: int
    _untold: int
    _owned: bool
    def _tell(self, on_entries: Callable[[int], object]) -> None: ...

@disjoint_base
class UsualSteps:
    def __new__(
        cls,
        store: EntryStore,
        lanes: NDArray[np.int64],
        returns: NDArray[np.float64],
        sources: tuple[str, ...],
        is_single: bool,
        is_checked: bool,
    ) -> Self: ...
    def add(
        self,
        writer: StepCounter,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        next_obs: Any,
        extras: dict[str, Any],
        init_w: Any,
        model_version: Any,
    ) -> bool: ...

def newest_of_each(numbers: NDArray[np.int64]) -> NDArray[np.int64]: ...
def by_owner(ids: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None: ...
def unique_frames(
    prev_codes: NDArray[np.int64] | None, next_codes: NDArray[np.int64] | None, ordered: bool
) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint32]]: ...
def importance(
    weight: NDArray[np.float64], total: float, population: float, smallest: float, exponent: float, by_largest: bool
) -> tuple[NDArray[np.float32], float]: ...
