"""Batches mixed of several tables: a part of each, drawn from it as if alone, and all of them as one batch.

    batches({"online": 192, "demo": 64}) ──▶ MixedBatch: batch["online"] [192], batch["demo"] [64], batch.joined [256]

Each part has the importance of its own table, so that a loss over the joined rows estimates
`sum over tables of size / total * mean over that table`, and every table counts as much as its size says.

Batches drawn ahead of time, on a thread of their own: while a learner computes, the next ones are copied.

    thread   draw ▶ [batch] [batch] ▶ waits for room          learner   takes one ▶ trains ▶ takes one

Samples are copied without the GIL, so that a learner that waits for a GPU, or computes in NumPy or torch, loses no time
by it. `prefetch` does the same for whatever is made of batches. `batches_until_over` is the loop below it: one batch
after the other, until the run ends.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.arguments import mapping, no_field, seconds, text, whole
from memoire.errors import Closed, MemoireTimeout, NotEnoughSamples, ParameterError

from .batch import Batch, GatheredSamples, PriorityUpdate
from .conversion import real_errors
from .schema import Schema

MAX_BATCH = (1 << 31) - 1


class MixedBatch(Mapping[str, Batch]):
    """Parts of several tables: a mapping from a table's name to its `Batch`, in the order in which they were asked for.

    Args:
        parts: At least one.
    """

    def __init__(self, parts: Mapping[str, Batch]) -> None:
        if not parts:
            raise ParameterError("parts", "{}", "at least one batch")
        self._parts = dict(parts)

    @property
    def rows(self) -> dict[str, slice]:
        """Where each table's samples are in `joined`."""
        ends = np.cumsum([len(part.ids) for part in self._parts.values()]).tolist()
        return {name: slice(begin, end) for name, begin, end in zip(self._parts, [0, *ends], ends, strict=False)}

    @functools.cached_property
    def joined(self) -> Batch:
        """All samples as one batch, the tables one after the other: new arrays, made once.

        It has the columns that are the same in all tables (name, dtype, shape, role and stack), and no others.
        Importance is that of each part, all divided by one number, so that the tables count as their sizes say.

        Raises:
            ParameterError: transitions and sequences, or rewards of different shapes, make no batch.
        """
        return _JoinedParts(self)

    def update_priorities(self, td_errors: Any) -> PriorityUpdate:
        """Tell each table how surprising its samples were. Returns what became of all of them together.

        Args:
            td_errors: By table, [b] each (some tables may be missing); or for all samples in the order of `joined`,
                [B]. Sequences as in `Batch.update_priorities`.

        Raises:
            ParameterError: a table that is not in this batch, or not as many as samples; nothing was changed.
        """
        if isinstance(td_errors, Mapping):
            errors = dict(td_errors)
            for name in errors.keys() - self._parts.keys():
                raise ParameterError("td_errors", name, f"tables of this batch: {', '.join(map(repr, self._parts))}")
        else:
            rows, array = self.rows, real_errors(td_errors)
            total = sum(len(part.ids) for part in self._parts.values())
            if array.ndim == 0 or len(array) != total:
                raise ParameterError("td_errors", array.shape, f"as many TD errors as samples, {total}")
            errors = {name: array[rows[name]] for name in self._parts}
        updates = (self._parts[name].update_priorities(given) for name, given in errors.items())
        return functools.reduce(PriorityUpdate.plus, updates, PriorityUpdate())

    def to(self, device: Any = None, *, pin_memory: bool = True, non_blocking: bool = True) -> Any:
        """The joined rows as torch tensors on a device: see `Batch.to`."""
        return self.joined.to(device, pin_memory=pin_memory, non_blocking=non_blocking)

    def __getitem__(self, name: str) -> Batch:
        try:
            return self._parts[name]
        except (KeyError, TypeError):  # the latter: it is no name at all
            raise no_field("this batch of several tables", name, self._parts) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        """How many tables there are; the number of samples is `len(batch.joined.ids)`."""
        return len(self._parts)

    def __repr__(self) -> str:
        return f"MixedBatch({', '.join(f'{name}: {len(part.ids)} samples' for name, part in self.items())})"


class _JoinedParts(Batch):
    """All parts of a mixed batch as one."""

    def __init__(self, mixed: MixedBatch) -> None:
        parts = list(mixed.values())
        divisor = max(part.divisor for part in parts)
        importance = [part["importance"] * np.float32(part.divisor / divisor) for part in parts]
        gathered = joined([part.gathered for part in parts])
        schema = _common([part.schema for part in parts], gathered)
        weights = [len(part.ids) for part in parts]
        left_out = float(np.average([part.left_out for part in parts], weights=weights))
        super().__init__(
            schema,
            gathered,
            np.concatenate(importance),
            lambda ids, errors: mixed.update_priorities(errors),
            divisor=divisor,
            left_out=left_out,
        )
        self._mixed = mixed

    def update_priorities(self, td_errors: Any) -> PriorityUpdate:
        """Tell each table how surprising its samples were: see `MixedBatch.update_priorities`."""
        return self._mixed.update_priorities(td_errors)


def joined(parts: list[GatheredSamples]) -> GatheredSamples:
    """Rows of all parts in new arrays, with the columns that all have in the same form.

    Raises:
        ParameterError: transitions and sequences, or rewards of different shapes, make no batch.
    """
    if len({part.mask is None for part in parts}) > 1:
        raise ParameterError("batch.joined", "transitions and sequences", "tables with the same sequence_length")
    shapes = {part.reward.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise ParameterError(
            "batch.joined", f"rewards of shapes {sorted(shapes)}", "tables whose rewards have one shape"
        )
    longest = _longest(parts)
    prev_lengths, next_lengths = (_lengths(parts, side) for side in ("prev_lengths", "next_lengths"))
    rows: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ROWS}
    return GatheredSamples(
        prev=_columns([_padded(part.prev, part.prev_lengths, longest) for part in parts]),
        next=_columns([_padded(part.next, part.next_lengths, longest) for part in parts]),
        mask=None if parts[0].mask is None else np.concatenate([part.mask for part in parts if part.mask is not None]),
        max_share=parts[0].max_share,
        prev_lengths=prev_lengths,
        next_lengths=next_lengths,
        **rows,
    )


_ROWS = ("reward", "discount", "steps", "weight", "ids", "age", "model_version")


def _longest(parts: list[GatheredSamples]) -> dict[str, int]:
    """How wide each ragged column is in the widest part."""
    found: dict[str, int] = {}
    for part in parts:
        for columns, lengths in ((part.prev, part.prev_lengths), (part.next, part.next_lengths)):
            for name in lengths:
                found[name] = max(found.get(name, 1), columns[name].shape[lengths[name].ndim])
    return found


def _padded(
    columns: dict[str, NDArray[Any]], lengths: dict[str, NDArray[np.int32]], longest: dict[str, int]
) -> dict[str, NDArray[Any]]:
    """One side of a part, its ragged columns as wide as the widest of them."""
    padded = dict(columns)
    for name, length in lengths.items():
        array, axis = columns[name], length.ndim
        missing = [(0, longest[name] - size if place == axis else 0) for place, size in enumerate(array.shape)]
        padded[name] = np.pad(array, missing)
    return padded


def _lengths(parts: list[GatheredSamples], side: str) -> dict[str, NDArray[np.int32]]:
    lengths: dict[str, NDArray[np.int32]] = _columns([getattr(part, side) for part in parts])
    return lengths


def _columns(sides: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """The columns that all have, in the same form."""
    common = {}
    for name in sides[0]:
        arrays = [side[name] for side in sides if name in side]
        forms = {(array.dtype, array.shape[1:]) for array in arrays}
        if len(arrays) == len(sides) and len(forms) == 1:
            common[name] = np.concatenate(arrays)
    return common


def _common(schemas: list[Schema], gathered: GatheredSamples) -> Schema:
    """The part of the first schema that all have, declared name by declared name; the others leave `gathered`."""
    first = schemas[0]
    kept = [root for root in first.roots if all(_is_alike(root, first, other) for other in schemas[1:])]
    roles = {root: first[first.leaves(root)[0]].role for root in first.roots}
    if not {"value", "return"}.isdisjoint(roles[root] for root in first.roots if root not in kept):
        kept = [root for root in kept if roles[root] not in ("value", "return")]  # one is nothing without the other
    names = [leaf for root in kept for leaf in first.leaves(root)]
    for side in (gathered.prev, gathered.next, gathered.prev_lengths, gathered.next_lengths):
        for name in side.keys() - set(names):
            del side[name]
    described = json.loads(first.to_json())
    described["columns"] = [row for row in described["columns"] if row[0] in names]
    described["tuples"] = [path for path in described["tuples"] if path.split(".")[0] in kept]
    return Schema.from_json(described)


def _is_alike(root: str, first: Schema, other: Schema) -> bool:
    if root not in other.roots or first.leaves(root) != other.leaves(root):
        return False
    return all(first[leaf] == other[leaf] for leaf in first.leaves(root))


def sizes_of(batch_size: Any) -> dict[str, int]:
    """Samples of each table, checked.

    Raises:
        WrongType, ParameterError: it is no mapping from names to sizes of at least 1.
    """
    sizes = {text("table", name): size for name, size in mapping("batch_size", batch_size).items()}
    if not sizes:
        raise ParameterError("batch_size", "{}", "at least one table and its number of samples")
    return {name: whole(f"batch_size[{name!r}]", size, 1, MAX_BATCH) for name, size in sizes.items()}


class Mixer:
    """Draws mixed batches: waits for one table after the other, and keeps what it has until all is there.

    Args:
        sizes: Samples of each table.
        draw: For each table, what gives so many samples within so many seconds, or raises.
    """

    def __init__(self, sizes: Mapping[str, int], draw: Mapping[str, Callable[[int, float], Batch]]) -> None:
        self._sizes, self._draw = sizes, draw
        self._parts: dict[str, Batch] = {}
        self.lacking = ""
        """The table that the newest call waited for in vain."""

    def get(self, timeout: float) -> MixedBatch:
        """The next batch, within `timeout` seconds; raises what the table raises that has too few."""
        deadline = time.monotonic() + timeout
        for name in self._missing():  # all are asked before any is waited for: those far away draw ahead from then on
            with suppress(NotEnoughSamples, MemoireTimeout):
                self._take(name, 0.0)
        for name in self._missing():
            self.lacking = name
            self._take(name, max(0.0, deadline - time.monotonic()))
        mixed = MixedBatch({name: self._parts[name] for name in self._sizes})
        self._parts.clear()
        return mixed

    def _missing(self) -> list[str]:
        return [name for name in self._sizes if name not in self._parts]

    def _take(self, name: str, timeout: float) -> None:
        self._parts[name] = self._draw[name](self._sizes[name], timeout)


T = TypeVar("T")
IsOver = Callable[[], bool]
MAX_PREFETCH = 1024
WAIT_INTERVAL = 0.25
"""Seconds of one stretch of waiting for a batch: the run may end meanwhile."""


def prefetch(values: Iterable[T], ahead: int = 1) -> Iterator[T]:
    """What an iterator gives, computed on a thread of its own, up to `ahead` values before they are asked for.

    A learner has its next batch moved, augmented, or valued by its target network while it computes:

        def prepared(batch):
            return batch, target_values(batch.next_obs)

        for batch, values in memoire.prefetch(map(prepared, server.batches(256))):

    The thread begins when the first value is asked for. What the iterator raises is raised in its turn. Whoever stops
    early loses what was taken for him; the thread ends with the next value, or when the iterator ends.

    Args:
        ahead: How many; 0 takes each one when it is asked for, in the caller's thread. At most 1,024.

    Raises:
        ParameterError: `ahead` is out of its range; at once.
    """
    return drawn_ahead(lambda is_over: iter(values), lambda: False, ahead)


def drawn_ahead(make: Callable[[IsOver], Iterator[T]], is_over: IsOver, ahead: int) -> Iterator[T]:
    """What an iterator gives, taken from it up to `ahead` values before they are asked for, from the first one on.

    Raises what it raises, in its turn. Whoever stops early, or outlives the end, loses what was taken for him.

    Args:
        make: Makes the iterator, which is to end when what it is given says so.
        is_over: Whether nothing is to be given any more; asked before each value.
        ahead: How many; 0 takes each one when it is asked for, in the caller's thread.

    Raises:
        ParameterError: `ahead` is out of its range; at once.
    """
    ahead = whole("ahead", ahead, 0, MAX_PREFETCH)
    return _taken(_DrawThread(make, is_over, ahead), is_over) if ahead else make(is_over)


def _taken(drawer: _DrawThread[T], is_over: IsOver) -> Iterator[T]:
    drawer.start()
    try:
        while (drawn := drawer.take()) is not None and not is_over():
            yield drawn[0]
    finally:
        drawer.leave()


class _DrawThread(Generic[T]):
    """The thread, and what it has ready."""

    def __init__(self, make: Callable[[IsOver], Iterator[T]], is_over: IsOver, ahead: int) -> None:
        self._ahead = ahead
        self._values = make(lambda: self._is_left or is_over())
        # One lock for all below; notified when any of it changes.
        self._changed = _core.Condition()
        self._ready: deque[tuple[T]] = deque()
        self._failed: BaseException | None = None
        self._is_done = False  # the thread gives nothing any more
        self._is_left = False  # nobody takes anything any more
        self._thread = threading.Thread(target=self._run, name="memoire-ahead", daemon=True)

    def start(self) -> None:
        """Begin to draw."""
        self._thread.start()

    def take(self) -> tuple[T] | None:
        """The next value as soon as it is there; None at the end."""
        with self._changed.held():
            self._changed.wait_for(lambda: self._ready or self._is_done)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._failed is not None:
                raise self._failed
            return None

    def leave(self) -> None:
        """Have the thread end soon, and let go of what it has."""
        with self._changed.held():
            self._is_left = True
            self._ready.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            for value in self._values:
                with self._changed.held():
                    self._ready.append((value,))
                    self._changed.notify_all()
                    del value  # or the thread would hold it while it waits
                    self._changed.wait_for(lambda: self._is_left or len(self._ready) < self._ahead)
                    if self._is_left:
                        return
        except BaseException as error:
            self._failed = error
        finally:
            self._values = iter(())  # the iterator refers to this object: without this it would end some time
            with self._changed.held():
                self._is_done = True
                self._changed.notify_all()


def batches_until_over(
    get_batch: Callable[[float], T],
    is_over: Callable[[], bool],
    what: str,
    timeout: float,
    where: str,
    advice: Callable[[], str],
) -> Iterator[T]:
    """Batches of a server or reader until the run is over; each waits at most `timeout` seconds, in stretches.

    Args:
        get_batch: Its own, given how long to wait.
        what, where, advice: For the error: what is waited for, whom it comes from, and what to look at when none comes.

    Raises:
        MemoireTimeout: not enough samples came in that time, or nobody answered.
    """
    timeout = seconds(timeout)
    deadline = time.monotonic() + timeout
    while not is_over():
        try:
            batch = get_batch(max(0.0, min(WAIT_INTERVAL, deadline - time.monotonic())))
        except Closed:
            return
        except (NotEnoughSamples, MemoireTimeout) as error:
            if time.monotonic() < deadline or is_over():
                continue
            if isinstance(error, MemoireTimeout):
                raise MemoireTimeout(error.waited_for, error.endpoint, timeout, error.advice) from None
            short = NotEnoughSamples(error.wanted, error.unused, error.caches, error.clients, timeout, error.reason)
            raise MemoireTimeout(what, where, timeout, f"{short} {advice()}") from error
        yield batch
        deadline = time.monotonic() + timeout
