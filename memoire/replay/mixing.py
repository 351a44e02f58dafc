"""Mixed batches of several tables, and batches drawn ahead in a thread.

    batches({"online": 192, "demo": 64}) ──▶ MixedBatch: batch["online"] [192], batch["demo"] [64], batch.joined [256]

Each part is drawn from its table as if alone, with that table's importance. A loss over the joined rows estimates
`sum over tables of size / total * mean over that table`: a table counts in proportion to its size.

Batches can be drawn ahead of time, by another thread: while a learner computes, the next ones are copied.

    thread   draw ▶ [batch] [batch] ▶ waits for room          learner   takes one ▶ trains ▶ takes one

Samples are copied without the GIL, so a learner that waits for a GPU, or computes in NumPy or torch, loses no time.
`prefetch` does the same for values computed from batches. `batches_until_over` is the loop that draws: one batch after
the other, until the run ends.
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
from memoire.arguments import mapping, no_such_field_error, seconds, text, whole
from memoire.errors import Closed, MemoireTimeout, NotEnoughSamples, ParameterError

from .batch import Batch, GatheredSamples, PriorityUpdate
from .conversion import real_errors
from .schema import Schema

MAX_BATCH = (1 << 31) - 1


class MixedBatch(Mapping[str, Batch]):
    """Samples of several tables: a mapping from a table's name to its `Batch`, in the order of the request.

    Example:
        mixed = memoire.MixedBatch({"online": buffer.sample(6), "demo": buffer.sample(2)})
        mixed.update_priorities({"online": np.ones(6), "demo": np.ones(2)})

    Args:
        parts: Batches by table, at least one.
    """

    def __init__(self, parts: Mapping[str, Batch]) -> None:
        if not parts:
            raise ParameterError.with_text("parts is empty: a mixed batch has at least one batch.")
        self._parts = dict(parts)

    @property
    def rows(self) -> dict[str, slice]:
        """Rows of each table's samples in `joined`."""
        ends = np.cumsum([len(part.ids) for part in self._parts.values()]).tolist()
        return {name: slice(begin, end) for name, begin, end in zip(self._parts, [0, *ends], ends, strict=False)}

    @functools.cached_property
    def joined(self) -> Batch:
        """All samples as one batch, the tables one after the other, in new arrays that are made once.

        The batch has only the columns that are equal in all tables (name, dtype, shape, role and stack). Importance is
        that of each part, all divided by one number, so that tables count in proportion to their sizes.

        Raises:
            ParameterError: the parts mix transitions and sequences, or rewards of different shapes.
        """
        return _JoinedParts(self)

    def update_priorities(self, td_errors: Any) -> PriorityUpdate:
        """Set the priorities of each table's samples. Returns the counts of all tables together.

        Args:
            td_errors: By table, [b] each (some tables may be missing); or for all samples in the order of `joined`,
                [B]. Sequences as in `Batch.update_priorities`.

        Raises:
            ParameterError: a table is not in this batch, or the number of errors is wrong. Nothing was changed.
        """
        if isinstance(td_errors, Mapping):
            errors = dict(td_errors)
            for name in errors.keys() - self._parts.keys():
                raise ParameterError(
                    "td_errors", name, f"keyed by this batch's tables: {', '.join(map(repr, self._parts))}"
                )
        else:
            rows, array = self.rows, real_errors(td_errors)
            total = sum(len(part.ids) for part in self._parts.values())
            if array.ndim == 0 or len(array) != total:
                raise ParameterError("td_errors", array.shape, f"as many TD errors as samples, {total}")
            errors = {name: array[rows[name]] for name in self._parts}
        updates = (self._parts[name].update_priorities(errors_of_table) for name, errors_of_table in errors.items())
        return functools.reduce(PriorityUpdate.plus, updates, PriorityUpdate())

    def to(self, device: Any = None, *, pin_memory: bool = True, non_blocking: bool = True) -> Any:
        """Return the joined rows as torch tensors on a device: see `Batch.to`."""
        return self.joined.to(device, pin_memory=pin_memory, non_blocking=non_blocking)

    def __getitem__(self, name: str) -> Batch:
        try:
            return self._parts[name]
        except (KeyError, TypeError):  # TypeError: the name is not hashable
            raise no_such_field_error("this batch of several tables", name, self._parts) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        """Return the number of tables; the number of samples is `len(batch.joined.ids)`."""
        return len(self._parts)

    def __repr__(self) -> str:
        return f"MixedBatch({', '.join(f'{name}: {len(part.ids)} samples' for name, part in self.items())})"


class _JoinedParts(Batch):
    """All parts of a mixed batch as one batch."""

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
        return self._mixed.update_priorities(td_errors)


def joined(parts: list[GatheredSamples]) -> GatheredSamples:
    """Concatenate the rows of all parts in new arrays, with the columns that all have in the same form.

    Raises:
        ParameterError: the parts mix transitions and sequences, or rewards of different shapes.
    """
    if len({part.mask is None for part in parts}) > 1:
        raise ParameterError.with_text(
            "The batches mix transitions and sequences: tables need the same sequence_length to be joined."
        )
    shapes = {part.reward.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise ParameterError.with_text(
            f"The batches have rewards of the shapes {sorted(shapes)}: tables need rewards of one shape to be joined."
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
    """Return the width of each ragged column in the widest part."""
    widths: dict[str, int] = {}
    for part in parts:
        for columns, lengths in ((part.prev, part.prev_lengths), (part.next, part.next_lengths)):
            for name in lengths:
                widths[name] = max(widths.get(name, 1), columns[name].shape[lengths[name].ndim])
    return widths


def _padded(
    columns: dict[str, NDArray[Any]], lengths: dict[str, NDArray[np.int32]], longest: dict[str, int]
) -> dict[str, NDArray[Any]]:
    """Return one side of a part with its ragged columns padded to the widest part."""
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
    """Concatenate the columns that all sides have in the same form."""
    common = {}
    for name in sides[0]:
        arrays = [side[name] for side in sides if name in side]
        forms = {(array.dtype, array.shape[1:]) for array in arrays}
        if len(arrays) == len(sides) and len(forms) == 1:
            common[name] = np.concatenate(arrays)
    return common


def _common(schemas: list[Schema], gathered: GatheredSamples) -> Schema:
    """Return the columns of the first schema that all have, whole roots only; remove other columns from `gathered`."""
    first = schemas[0]
    kept = [root for root in first.roots if all(_is_alike(root, first, other) for other in schemas[1:])]
    roles = {root: first[first.leaves(root)[0]].role for root in first.roots}
    if not {"value", "return"}.isdisjoint(roles[root] for root in first.roots if root not in kept):
        kept = [root for root in kept if roles[root] not in ("value", "return")]  # each needs the other
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
    """Check a mapping from tables to numbers of samples, and return it as a dict.

    Raises:
        WrongType, ParameterError: the argument is not a mapping from names to sizes of at least 1.
    """
    sizes = {text("table", name): size for name, size in mapping("batch_size", batch_size).items()}
    if not sizes:
        raise ParameterError.with_text("batch_size is empty: give at least one table and its number of samples.")
    return {name: whole(f"batch_size[{name!r}]", size, 1, MAX_BATCH) for name, size in sizes.items()}


class Mixer:
    """Source of mixed batches: it waits for one table after the other, and keeps the parts drawn so far.

    Args:
        sizes: Samples of each table.
        draw: Function for each table that draws a number of samples within a number of seconds, or raises.
    """

    def __init__(self, sizes: Mapping[str, int], draw: Mapping[str, Callable[[int, float], Batch]]) -> None:
        self._sizes, self._draw = sizes, draw
        self._parts: dict[str, Batch] = {}
        self.lacking = ""
        """Table that the newest call waited for last; "" before the first wait."""

    def get(self, timeout: float) -> MixedBatch:
        """Return the next batch within `timeout` seconds; raise the error of the table that has too few samples."""
        deadline = time.monotonic() + timeout
        for name in self._missing():  # ask all tables before waiting for one, so that remote tables draw meanwhile
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
"""Seconds of one wait for a batch, between checks for the end of the run."""


def prefetch(values: Iterable[T], ahead: int = 1) -> Iterator[T]:
    """Return an iterator over values that another thread computes, at most `ahead` values before they are requested.

    The thread moves or augments the next batch, or values it by a target network, while the learner computes:

        def prepared(batch):
            return batch, target_values(batch.next_obs)

        for batch, values in memoire.prefetch(map(prepared, server.batches(256))):

    The thread starts with the first request. An error of the iterator is raised in its turn. Values computed ahead are
    lost if the caller stops early; the thread then ends with the next value, or with the iterator.

    Args:
        ahead: Number of values, at most 1,024; 0 computes each value at its request, in the caller's thread.

    Raises:
        ParameterError: `ahead` is out of its range; raised at once.
    """
    return drawn_ahead(lambda is_over: iter(values), lambda: False, ahead)


def drawn_ahead(make: Callable[[IsOver], Iterator[T]], is_over: IsOver, ahead: int) -> Iterator[T]:
    """Return an iterator over values that another thread draws, at most `ahead` values before they are requested.

    An error of the iterator is raised in its turn. Values taken ahead are lost if the caller stops early, or if
    `is_over` becomes true.

    Args:
        make: Function that makes the iterator, which should end once its argument returns True.
        is_over: Function that returns True to end; called before each value.
        ahead: Number of values; 0 takes each value at its request, in the caller's thread.

    Raises:
        ParameterError: `ahead` is out of its range; raised at once.
    """
    ahead = whole("ahead", ahead, 0, MAX_PREFETCH)
    return _yield_drawn(_DrawThread(make, is_over, ahead), is_over) if ahead else make(is_over)


def _yield_drawn(drawer: _DrawThread[T], is_over: IsOver) -> Iterator[T]:
    drawer.start()
    try:
        while (drawn := drawer.take()) is not None and not is_over():
            yield drawn[0]
    finally:
        drawer.stop()


class _DrawThread(Generic[T]):
    """Thread that draws values, and the queue of those that are ready."""

    def __init__(self, make: Callable[[IsOver], Iterator[T]], is_over: IsOver, ahead: int) -> None:
        self._ahead = ahead
        self._values = make(lambda: self._is_left or is_over())
        # One lock guards all attributes below; each change of an attribute notifies the condition.
        self._changed = _core.Condition()
        self._ready: deque[tuple[T]] = deque()
        self._failed: BaseException | None = None
        self._is_done = False  # True once the thread yields no more values
        self._is_left = False  # True once the caller takes no more values
        self._thread = threading.Thread(target=self._run, name="memoire-ahead", daemon=True)

    def start(self) -> None:
        """Start the thread, which begins to draw."""
        self._thread.start()

    def take(self) -> tuple[T] | None:
        """Return the next value in a tuple as soon as it is ready; None at the end."""
        with self._changed.held():
            self._changed.wait_for(lambda: self._ready or self._is_done)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._failed is not None:
                raise self._failed
            return None

    def stop(self) -> None:
        """Stop the thread after its current value, and drop the values that are ready."""
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
                    del value  # otherwise the thread holds value
                    self._changed.wait_for(lambda: self._is_left or len(self._ready) < self._ahead)
                    if self._is_left:
                        return
        except BaseException as error:
            self._failed = error
        finally:
            self._values = iter(())  # breaks a cycle: the iterator closes now
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
    """Yield batches of a server or reader until the run is over; each waits at most `timeout` seconds.

    Args:
        get_batch: Function that draws a batch within a number of seconds.
        what, where, advice: Parts of the error: the expected batch, its source, and what to check if none comes.

    Raises:
        MemoireTimeout: too few samples came in that time, or the source did not answer.
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
            short = NotEnoughSamples(
                error.wanted, error.unused, error.caches, error.clients, timeout, error.reason, error.advice
            )
            raise MemoireTimeout(what, where, timeout, f"{short} {advice()}") from error
        yield batch
        deadline = time.monotonic() + timeout
