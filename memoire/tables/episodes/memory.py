"""Memory of a table's episodes: checks of received episodes, draws, and read-only inspection. Pure.

    limit of 1 MB, entries of 100 bytes     plain columns: room for 10,000 entries
                                            ragged columns: 5,000 entries, and 0.5 MB for their values

sampled        batch for a local learner, with ids that name the memory ──▶ `pooled` adds importance
sums_of        sums for a remote reader, as if the memory were one client
drawn_for      samples that a remote reader requests
copied         copy of one sample for inspection
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.errors import EmptyMemory, EpisodeTooLong, NoDrawsLeft, ParameterError, ProtocolError, StaleEntry
from memoire.limits import Limits
from memoire.replay import dataset
from memoire.replay.batch import ID, GatheredSamples
from memoire.replay.conversion import ENTRY_OVERHEAD, is_finite
from memoire.replay.memory import MAX_ROWS, Memory
from memoire.replay.parameters import Parameters, reward_size
from memoire.replay.schema import Schema
from memoire.tables.base import MAX_INSPECTED
from memoire.tables.draws import PooledBatch, check_count
from memoire.tables.inspection import Distribution, EntryPlace, Histogram, PeekedSample
from memoire.wire import _bytes, containers, messages
from memoire.wire.layout import layout_of
from memoire.wire.parts import ContainerKind, Payload
from memoire.wire.receivers import ReplyPage
from memoire.wire.rows import CLIENT_SUMS


@dataclass(frozen=True, slots=True)
class CheckedEpisode:
    """Received episode that passed all checks; its arrays may be views of the received buffer."""

    episode: dataset.Episode
    age: NDArray[np.float32]
    """[T] seconds since the entries were recorded."""
    samples: int


def checked_episode(
    body: messages.Body,
    payload: Any,
    schema: Schema,
    parameters: Parameters,
    capacity: int,
    *,
    limits: Limits,
    checksum: int | None,
    stays: bool = False,
) -> CheckedEpisode:
    """Return a received episode that fits into an empty memory, after all checks; see `containers.check`.

    Args:
        capacity: Maximum number of entries in the memory.
        stays: True if the arrays are kept: they are then views of a copy of the received bytes.

    Raises:
        ProtocolError: the episode is invalid. No other error is raised, whatever the bytes.
    """
    if not isinstance(body, messages.EpisodePush):
        raise ProtocolError("unexpected", f"{body.type.name} was pushed; this table stores whole episodes")
    layout = layout_of(schema, parameters, ContainerKind.EPISODE, final=body.has_final)
    if checksum is None or stays:
        held = containers.check(payload, layout, limits, checksum=checksum)
    else:
        held = containers.check_in_place(payload, layout, limits, checksum=checksum)
    entries = int(held.samples)
    if entries > capacity:
        raise ProtocolError("too_large", f"the episode has {entries} entries; the table has room for {capacity}")
    rows = containers.read_episode(held, layout)
    _check_finite(schema, rows.columns, rows.final)
    episode = dataset.Episode(
        columns=rows.columns,
        init_w=rows.init_w,
        priority=None,
        learned=np.zeros(entries, np.bool_),
        born=None,
        model_version=rows.model_version,
        multiplier=body.multiplier,
        terminated=body.terminated,
        final_state=rows.final,
        bootstrap_value=_bootstrap(body, schema),
        update_value=body.update_value,
        update_weight=body.update_weight,
        is_cut=body.cut,
    )
    return CheckedEpisode(episode, rows.age, entries)


def _check_finite(schema: Schema, columns: dict[str, Any], final: dict[str, Any] | None) -> None:
    for name in schema.finite:
        for values in (columns[name], None if final is None else final.get(name)):
            if values is not None and not is_finite(values):
                raise ProtocolError("value", f"column {name!r} is not finite")


def _bootstrap(body: messages.EpisodePush, schema: Schema) -> NDArray[np.float32] | None:
    """Return the value of the state after the last entry, in the reward's shape, or None."""
    if body.bootstrap is None:
        return None
    shape = () if schema.reward is None else schema[schema.reward].shape
    with np.errstate(over="ignore"):
        value = np.array(body.bootstrap, np.float32)
    if value.size != reward_size(schema) or not np.isfinite(value).all():
        raise ProtocolError("value", f"the final state's value must be {reward_size(schema)} finite numbers")
    if body.terminated and value.any():
        raise ProtocolError("value", "the value of a terminal state must be 0")
    return value.reshape(shape)


MAX_DEFAULT_ENTRIES: Final = 1_000_000
"""Maximum number of entries without the setting `capacity`, because bookkeeping memory is allocated at once."""


class NamedMemory(NamedTuple):
    """Memory with its 16-byte owner id. Entry numbers are never reused under one owner id."""

    memory: Memory
    owner: bytes


@dataclass(frozen=True, slots=True)
class ByteRoom:
    """Number of entries that fit into a byte limit.

    Args:
        capacity: Requested number of entries; 0: as many as fit, at most `MAX_DEFAULT_ENTRIES`.
    """

    schema: Schema
    capacity: int

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry, except the values of ragged columns."""
        return self.schema.entry_bytes + ENTRY_OVERHEAD

    @property
    def least_bytes(self) -> int:
        """Smallest byte limit: for the requested capacity, or for one entry."""
        return self.entry_bytes * max(1, self.capacity)

    def entries(self, byte_limit: int) -> int:
        """Return the number of entries that fit. Raise ParameterError if the limit is too small."""
        most = min(byte_limit // self.entry_bytes, MAX_ROWS)
        if byte_limit < self.least_bytes:
            expected = f"at least {self.least_bytes} for {max(1, self.capacity)} entries of {self.entry_bytes} bytes"
            raise ParameterError("byte_limit", byte_limit, expected)
        if self.schema.ragged:
            most = max(1, most // 2)
        return self.capacity or min(most, MAX_DEFAULT_ENTRIES)

    def value_bytes(self, entries: int, byte_limit: int) -> int:
        """Return the bytes left for values of ragged columns beside this many entries; 0 without ragged columns."""
        return max(1, byte_limit - entries * self.entry_bytes) if self.schema.ragged else 0


def seed_of(seed: int | None, life: int) -> int | None:
    """Return a distinct seed for each life, that is each restart or memory, of a pool with this seed."""
    if seed is None or life == 0:
        return seed
    return int(np.random.SeedSequence(seed & (2**64 - 1), spawn_key=(life,)).generate_state(1, np.uint64)[0])


def move_episodes(old: Memory, fresh: Memory) -> dict[int, int]:
    """Copy all episodes that fit into a fresh memory; return the new number of each by its old number."""
    numbers = {}
    with old.held():
        for number, episode in dataset.walk(old):
            if len(episode) <= fresh.capacity:
                with suppress(EpisodeTooLong):  # the episode's ragged values do not fit
                    numbers[number] = int(dataset.put(fresh, episode)[0])
    return numbers


def episode_checksum(owner: bytes, number: int) -> int:
    """Return the checksum that identifies an episode permanently."""
    return _bytes.checksum(owner + number.to_bytes(8, "little", signed=True))


def holds(memory: Memory, number: int) -> bool:
    """Return True if the memory still holds the entry."""
    try:
        memory.weights([number])
    except StaleEntry:
        return False
    return True


ANY_NUMBER: Final = 1
"""Flag of a row of `rows.CLIENT_SUMS`: an unlimited number of samples can be drawn."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Samples drawn from a memory, with the memory's sums at the moment of the draw."""

    gathered: GatheredSamples
    weights: NDArray[np.float64]
    """Weight of each sample, [B]."""
    total_weight: float
    population: int
    smallest: float
    parameters: Parameters

    def pooled(self, beta: float) -> PooledBatch:
        """Return the batch, with importance by this exponent."""
        importance, divisor = _core.importance(
            self.weights,
            self.total_weight,
            self.population,
            self.smallest,
            beta,
            self.parameters.normalize == "global",
        )
        return PooledBatch(self.gathered, importance, divisor, 0.0)


def sampled(named: NamedMemory, samples: int, places: Mapping[str, NDArray[Any]] | None) -> Sampled:
    """Draw samples with replacement; the GIL is released while samples are copied.

    Args:
        places: Arrays [B, ...] to copy into, B = `samples`, by their names in a batch.

    Raises:
        EmptyMemory: nothing can be drawn.
    """
    memory = named.memory
    with memory.held():
        gathered, weights, total, population, smallest = memory.sample(samples, places)
        parameters = memory.parameters
    gathered.ids = ids_of(named, gathered.ids)
    return Sampled(gathered, weights, total, population, smallest, parameters)


def ids_of(named: NamedMemory, numbers: Any) -> NDArray[Any]:
    """Return the ids [B] of entries, made of their numbers [B]."""
    ids = np.empty(len(numbers), ID)
    ids["client"], ids["number"] = np.frombuffer(named.owner, "<u8"), numbers
    return ids


def wait_reason(error: EmptyMemory, episodes: int, clients: int) -> str:
    """Return the reason why a draw must wait."""
    if isinstance(error, NoDrawsLeft):
        return f"max_times_sampled={error.times} limits draws of an entry, and {error.left} draws remain in all"
    if error.reason:
        return f"{error.reason}. Wait for actors to ship more"
    return f"none of the {error.entries} entries in {episodes} episodes of {clients} clients can be drawn"


def sums_of(named: NamedMemory, sequence: int) -> NDArray[np.void]:
    """Return one row of `rows.CLIENT_SUMS` for all episodes, [1], or no row, [0], if nothing can be drawn.

    Args:
        sequence: Higher than in all earlier rows; of two rows the one with the higher sequence is newer.
    """
    memory = named.memory
    total, positives, minimum = memory.sums()
    rows = np.zeros(1 if positives and total > 0.0 and math.isfinite(total) else 0, CLIENT_SUMS)
    for row in rows:
        row["client"], row["sequence"] = np.frombuffer(named.owner, "<u8"), sequence
        row["total_weight"], row["positives"], row["minimum"] = total, positives, minimum
        row["reserved"], row["flags"] = min(positives, (1 << 32) - 1), ANY_NUMBER
        if memory.parameters.max_times_sampled:
            row["reserved"], row["flags"] = min(memory.draws_left, (1 << 32) - 1), 0
    return rows


def drawn_for(
    named: NamedMemory, counts: NDArray[np.void], *, now: float, compression: str, page: ReplyPage | None = None
) -> tuple[Payload | None, int]:
    """Draw for rows [C] of `rows.CLIENT_COUNTS`, C clients; return a DRAWN payload and its number of samples.

    The payload is None if nothing can be drawn, or the rows do not name this memory.

    Raises:
        ProtocolError: more samples than `MAX_DRAWN`, or than the page has room for; no draw is counted.
    """
    memory = named.memory
    mine = (counts["client"] == np.frombuffer(named.owner, "<u8")).all(axis=1)
    wanted = int(counts["count"][mine].sum())
    check_count(wanted)
    with memory.held():
        if memory.parameters.max_times_sampled:
            wanted = min(wanted, memory.draws_left)
        if not (wanted and memory.num_positive):
            return None, 0
        try:
            container = containers.build_drawn(memory, named.owner, wanted, now=now, compression=compression, page=page)
            return container, wanted
        except EmptyMemory:  # all entries became too old
            return None, 0


class _SeenEntries(NamedTuple):
    """Every n-th entry of a locked memory."""

    rows: NDArray[np.int64]
    weights: NDArray[np.float64]
    ages: NDArray[np.float32]

    @classmethod
    def of(cls, memory: Memory, rng: random.Random, most: int = MAX_INSPECTED) -> _SeenEntries:
        every = -(-memory.capacity // most)
        rows = np.arange(rng.randrange(every), memory.capacity, every)
        rows = rows[memory.contents()["meta"]["episode"][rows] >= 0]
        ages, weights = np.empty(len(rows), np.float32), np.empty(len(rows), np.float64)
        memory._facts(rows, ages, None, weights)
        return cls(rows, weights, ages)


def distribution_of(memory: Memory, rng: random.Random, most: int = MAX_INSPECTED) -> Distribution:
    """Return the distribution of all entries, or of at most `most` evenly spaced ones."""
    with memory.held():
        seen = _SeenEntries.of(memory, rng, most)
        total, positives, _ = memory.sums()
        entries = memory.num_entries
    is_known = len(seen.rows) > 0 and 0.0 < total < math.inf
    squares = float(np.square(seen.weights / total).mean()) * entries if is_known else 0.0
    return Distribution(
        looked=len(seen.rows),
        held=entries,
        population=float(positives),
        total_weight=min(total, sys.float_info.max),
        effective=1.0 / squares if squares > 0.0 else None,
        weights=Histogram.from_values(seen.weights),
        ages=Histogram.from_values(seen.ages),
    )


def copied(named: NamedMemory, beta: float, rng: random.Random, number: int | None = None) -> PeekedSample | None:
    """Return a copy of the sample of an entry: of this number, or random by weight among evenly spaced entries. Return
    None if the memory has no such entry, or the entry has no weight.
    """
    memory = named.memory
    with memory.held():
        chosen = _random_entry(memory, rng) if number is None else number
        weight = 0.0 if chosen is None else _weight_of(memory, chosen)
        if chosen is None or not weight > 0.0:
            return None
        total, positives, _ = memory.sums()
        place = _place_of(memory, chosen)
        gathered = memory.gather([chosen])
    gathered.ids = ids_of(named, [chosen])
    return PeekedSample(gathered, weight / total, float(positives), beta, place)


def _random_entry(memory: Memory, rng: random.Random) -> int | None:
    """Return the number of a random entry of a locked memory, drawn by weight, or None without any weight."""
    seen = _SeenEntries.of(memory, rng)
    most = float(seen.weights.max(initial=0.0))
    if not most > 0.0:
        return None
    at = rng.choices(range(len(seen.rows)), (seen.weights / most).tolist())[0]
    return int(memory.contents()["meta"]["number"][seen.rows[at]])


def _weight_of(memory: Memory, number: int) -> float:
    try:
        return float(memory.weights([number])[0])
    except StaleEntry:
        return 0.0


def _place_of(memory: Memory, number: int) -> EntryPlace:
    """Return an entry's place in its episode and its last TD error. The memory must be locked."""
    inside = memory.contents()
    meta = inside["meta"]
    one = meta[number % memory.capacity]
    rows = np.flatnonzero(meta["episode"] == one["episode"])
    weights = np.empty(len(rows), np.float64)
    memory._facts(rows, None, None, weights)
    numbers = np.sort(meta["number"][rows])
    drawable = np.sort(meta["number"][rows[weights > 0.0]])
    at = int(np.searchsorted(drawable, number))
    error = max(0.0, float(one["priority"]) - memory.parameters.priority_epsilon) if one["learned"] else None
    return EntryPlace(
        earlier=int(drawable[at - 1]) if at else None,
        later=int(drawable[at + 1]) if at + 1 < len(drawable) else None,
        step=1 + int(np.searchsorted(numbers, number)),
        episode=int(inside["episodes"]["length"][one["episode"]]),
        td_error=error,
    )
