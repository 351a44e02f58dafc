"""Snapshot records of clients and their caches, and read-only inspection of held caches. Pure.

Inspection shows the distribution of samples, or a copy of one sample, and has two steps. `choose_caches` and
`choose_sample` are quick, and the queues must not change meanwhile; `distribution_of` and `copied` read and copy the
chosen caches while the queues are in use.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from memoire.errors import ProtocolError
from memoire.tables import draws
from memoire.tables.base import Count, Identity, Moment, RecordBody, RecordKind, Weight, Word
from memoire.tables.inspection import Distribution, EntryPlace, Histogram, PeekedSample
from memoire.wire import _bytes, containers
from memoire.wire._container import HeldCache
from memoire.wire.layout import ContainerLayout
from memoire.wire.parts import Part

from ._draw import HeldClient, HeldPool


class ClientRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """Snapshot record of a client with its newest sums; its caches follow."""

    kind: ClassVar = RecordKind.CLIENT
    id: Identity
    sequence: Word = 0
    total_weight: Weight = 0.0
    positives: Annotated[float, Meta(ge=0.0, le=2.0**53)] = 0.0
    minimum: Weight = 0.0
    between: Weight = 0.0
    """D_c: number of samples drawn between the client's last two caches."""
    since: Word = 0
    """Number of samples drawn since the client's newest cache arrived."""
    has_caches: bool = True
    """True if caches of the client follow; False if only its sums are saved."""

    is_heading: ClassVar = True

    @property
    def is_alone(self) -> bool:
        """True for a client without caches; a client with caches is restored with them."""
        return not self.has_caches

    def count_contribution(self, payload_bytes: int) -> dict[str, int]:
        """Return the client's contribution to the file's counts."""
        return {"clients": 1}

    def routing_key(self, heading: RecordBody | None) -> bytes:
        """Return the client's id, so that a client and its caches go to the same server."""
        return self.id

    @classmethod
    def from_state(cls, client: HeldClient, since: int) -> ClientRecord:
        """Return the record of a client's current state; `since` comes from the pool."""
        return cls(
            id=client.id, sequence=client.sequence, total_weight=client.total_weight, positives=client.positives,
            minimum=client.minimum, between=client.between, since=since, has_caches=client.caches > 0,
        )  # fmt: skip


class CacheRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """Snapshot record of a cache of the client before; the payload has the received bytes."""

    kind: ClassVar = RecordKind.CACHE
    has_payload: ClassVar = True
    samples: Count
    used: Count = 0
    """Number of samples that can no longer be drawn."""
    age: Weight = 0.0
    """Seconds since the cache arrived at the server."""
    left: bytes | None = None
    """uint32: places of the samples that can still be drawn; None: all but the first `used` ones."""
    times: bytes = b""
    """uint32: number of draws of each sample; empty if draws are not counted."""
    eldest: Moment | None = None
    """Seconds since the oldest drawable entry was recorded; None if unknown."""
    least_model: Annotated[int, Meta(ge=1 - 2**63)] = 1 - 2**63
    positives: Weight = 1.0
    """Number of entries that the drawable samples represent."""

    def count_contribution(self, payload_bytes: int) -> dict[str, int]:
        """Return the contribution of the cache and its samples to the file's counts."""
        return {"caches": 1, "samples": self.samples, "unused": self.samples - self.used, "bytes": payload_bytes}

    def older(self, seconds: float) -> CacheRecord:
        """Return the record with ages increased by this many seconds."""
        eldest = None if self.eldest is None else self.eldest + seconds
        return msgspec.structs.replace(self, age=self.age + seconds, eldest=eldest)

    def routing_key(self, heading: RecordBody | None) -> bytes | None:
        """Return the id of the client that the cache belongs to."""
        return heading.id if isinstance(heading, ClientRecord) else None

    def description(self, heading: RecordBody | None) -> str:
        """Return the description of the cache for error messages."""
        return f"a cache of client {heading.id.hex()}" if isinstance(heading, ClientRecord) else "a cache"

    def restore_draw_state(self, cache: HeldCache, now: float) -> None:
        """Restore the state of draws in a cache. Raise ProtocolError if the record does not fit the cache.

        Args:
            now: Time on the pool's clock.
        """
        cache.arrived = now - self.age
        if self.left is None:
            cache.go_on_at(self.used)
            return
        eldest = -math.inf if self.eldest is None else now - self.eldest
        try:
            cache.go_on_with(self.left, self.times, eldest, self.least_model, self.positives)
        except ValueError as error:
            raise ProtocolError("container", str(error)) from error


def record_of(cache: HeldCache, now: float) -> CacheRecord:
    """Return the snapshot record of a held cache, without its bytes; `now` is on the pool's clock."""
    age, rest = now - cache.arrived, cache.left_over()
    if rest is None:
        return CacheRecord(samples=cache.samples, used=cache.drawn, age=age)
    places, times, eldest, least_model, positives = rest
    return CacheRecord(
        samples=cache.samples,
        used=cache.samples - len(places) // 4,
        age=age,
        left=places,
        times=times,
        eldest=now - eldest if math.isfinite(eldest) else None,
        least_model=least_model,
        positives=positives,
    )


class DuplicateDetector:
    """Detector of caches that are restored twice. Caches of a client are restored in sequence; the detector keeps a
    summary of each, and compares the bytes only of caches with equal summaries.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[float, ...]] = set()  # summaries of the caches of one client
        self._of: tuple[HeldClient | None, int] = None, 0  # the client, and its count of pushed caches

    def is_new(self, client: HeldClient, cache: HeldCache) -> bool:
        """Return True if the client has no cache of the same bytes."""
        if self._of != (client, client.pushed):
            self._seen, self._of = set(map(_summary_of, client.queued())), (client, client.pushed)
        summary = _summary_of(cache)
        alike = [other for other in client.queued() if _summary_of(other) == summary] if summary in self._seen else []
        return not any(_bytes.checksum(cache.payload) == _bytes.checksum(other.payload) for other in alike)

    def add_summary(self, client: HeldClient, cache: HeldCache) -> None:
        """Add the summary of a cache that was pushed to the client's queue."""
        self._seen.add(_summary_of(cache))
        self._of = client, client.pushed


def _summary_of(cache: HeldCache) -> tuple[float, ...]:
    return cache.made_at, cache.samples, cache.total_weight, cache.nbytes


MAX_CLIENTS: Final = 512
"""Maximum number of clients whose caches are examined for a histogram."""


class ChosenCaches(NamedTuple):
    """Random part of the held caches, with totals of all held caches."""

    caches: list[tuple[float, list[HeldCache]]]
    """Share of all clients' weight, and caches, for each chosen client."""
    reuse: bool
    held: int
    """Number of drawable samples in all caches."""
    population: float
    total_weight: float
    clock: float


def choose_caches(held: HeldPool, reuse: bool, now: float, rng: random.Random, most_samples: int) -> ChosenCaches:
    """Choose random clients, and caches of each, with about `most_samples` samples in all, for a histogram. `now` is on
    the pool's clock.
    """
    # Relative to the largest weight, because a sum of reported weights could overflow.
    most = max((client.total_weight for client in held), default=0.0)
    parts = math.fsum(client.total_weight / most for client in held) if most > 0.0 else 0.0
    chosen = _some_caches(held, rng, most_samples)
    return ChosenCaches(
        caches=[(client.total_weight / most / parts, caches) for client, caches in chosen],
        reuse=reuse,
        held=held.held if reuse else held.unused,
        population=float(held.entries()),
        total_weight=min(most * parts, sys.float_info.max),
        clock=now,
    )


def _some_caches(held: HeldPool, rng: random.Random, most_samples: int) -> list[tuple[HeldClient, list[HeldCache]]]:
    """Choose caches of all drawable clients, or of a random part, with about `most_samples` samples."""
    clients = _drawable_clients(held)
    clients = rng.sample(clients, min(len(clients), MAX_CLIENTS))
    chosen = []
    for client in clients:
        caches = client.queued()
        wanted = -(-most_samples // (len(clients) * max(1, caches[0].samples)))
        chosen.append((client, rng.sample(caches, min(len(caches), wanted))))
    return chosen


def _drawable_clients(held: HeldPool) -> list[HeldClient]:
    return [client for client in held if client.caches and client.total_weight > 0.0]


def distribution_of(chosen: ChosenCaches, most_samples: int) -> Distribution:
    """Return the distribution of the drawable samples in the chosen caches."""
    each = most_samples // max(1, len(chosen.caches))
    looked = [(share, _view_of(caches, chosen.reuse, chosen.clock, each)) for share, caches in chosen.caches]
    shares = [(share, view) for share, view in looked if len(view.chances)]
    total_share = math.fsum(share for share, _ in shares)
    squares = math.fsum(share * share * float(view.chances.mean()) for share, view in shares)
    weights = np.concatenate([np.empty(0), *(view.weights for _, view in looked)])
    return Distribution(
        looked=len(weights),
        held=chosen.held,
        population=chosen.population,
        total_weight=chosen.total_weight,
        effective=total_share / squares if squares > 0.0 else None,
        weights=Histogram.from_values(weights),
        ages=Histogram.from_values(np.concatenate([np.empty(0), *(view.ages for _, view in looked)])),
    )


class _SampleView(NamedTuple):
    """Weights, chances and ages of samples in caches of one client, [n] each."""

    weights: NDArray[np.float64]
    chances: NDArray[np.float64]
    """Chance of a draw in the client's memory: w / S_k."""
    ages: NDArray[np.float64]


def _view_of(caches: Sequence[HeldCache], reuse: bool, clock: float, most: int) -> _SampleView:
    """Return weights, chances and ages of `most` samples of one client; the samples of a cache lie in random order."""
    parts = []
    for held in caches:
        rest = slice(0 if reuse else held.drawn, None)
        weights = np.frombuffer(held.part(Part.WEIGHT), "<f8")[rest]
        ages = np.frombuffer(held.part(Part.AGE), "<f4")[rest] + max(0.0, clock - held.arrived)
        parts.append((weights, weights / held.total_weight, ages))
    return _SampleView(*(np.concatenate([np.empty(0), *rows])[:most] for rows in zip(*parts, strict=True)))


class ChosenSample(NamedTuple):
    """Caches of one client from which a sample is shown, with the client's sums."""

    caches: list[HeldCache]
    """All held caches of the client."""
    number: int | None
    """Number of the wanted entry; None for any."""
    layout: ContainerLayout
    client: bytes
    sums: tuple[int, float, float, float]
    """Newest sums of the client: sequence, total_weight, positives, minimum."""
    share: float
    """The client's share of all clients' weight."""
    population: float
    seed: int
    clock: float


def choose_sample(
    held: HeldPool, layout: ContainerLayout, now: float, rng: random.Random, of: tuple[bytes, int] | None = None
) -> ChosenSample | None:
    """Choose a client by its share of the weight, or the client of a named entry, as the source of a sample. Return
    None if the pool is empty, or holds no sample of the named client.
    """
    clients = _drawable_clients(held)
    most = max((client.total_weight for client in clients), default=0.0)
    parts = [client.total_weight / most for client in clients]  # a sum of reported weights could overflow
    wanted = [client for client in clients if of is None or client.id == of[0]]
    if not wanted:
        return None
    client = rng.choices(clients, parts)[0] if of is None else wanted[0]
    return ChosenSample(
        caches=client.queued(),
        number=None if of is None else of[1],
        layout=layout,
        client=client.id,
        sums=(client.sequence, client.total_weight, float(client.positives), client.minimum),
        share=client.total_weight / most / math.fsum(parts),
        population=float(held.entries()),
        seed=rng.getrandbits(64),
        clock=now,
    )


def copied(chosen: ChosenSample, beta: float) -> PeekedSample | None:
    """Return a copy of one sample of the chosen caches, or None if no cache has the wanted entry. The copy is drawn
    from a temporary pool whose cache shares the bytes, so that nothing is taken from the held caches.
    """
    numbers = [np.frombuffer(held.part(Part.NUMBER), "<i8") for held in chosen.caches]
    place = _find_entry(numbers, chosen.number, random.Random(chosen.seed))
    if place is None:
        return None
    cache, at = chosen.caches[place[0]], place[1]
    layout = chosen.layout
    alone, owner = HeldPool(chosen.seed), HeldClient(chosen.client)
    owner.hear(*chosen.sums)
    alone.enter(owner)
    copy = containers.copy_of(cache, layout)
    copy.go_on_at(at)
    alone.push(owner, copy)
    picks = alone.draw(layout.core, 1, False)
    assert picks is not None, "a held cache has a sample"
    gathered = layout.allocate(1)
    draws.gather(picks, layout, gathered)
    gathered.age += draws.waits_of(picks, chosen.clock)
    chance = chosen.share * min(1.0, float(gathered.weight[0]) / cache.total_weight)
    newest = max(1.0, chosen.sums[2])
    neighbours = _place_of(numbers, int(numbers[place[0]][at]))
    return PeekedSample(gathered, chance, chosen.population * cache.positives / newest, beta, neighbours)


def _find_entry(numbers: Sequence[NDArray[np.int64]], wanted: int | None, rng: random.Random) -> tuple[int, int] | None:
    """Return cache and place of the wanted entry, from the newest cache that has it, or a random place."""
    if wanted is None:
        cache = rng.randrange(len(numbers))
        return cache, rng.randrange(len(numbers[cache]))
    for cache in reversed(range(len(numbers))):
        places = np.flatnonzero(numbers[cache] == wanted)
        if len(places):
            return cache, int(places[0])
    return None


def _place_of(numbers: Sequence[NDArray[np.int64]], number: int) -> EntryPlace:
    """Return an entry's place among its client's held entries. The episode is known to the client only."""
    before = [int(low.max()) for each in numbers if len(low := each[each < number])]
    after = [int(high.min()) for each in numbers if len(high := each[each > number])]
    return EntryPlace(earlier=max(before, default=None), later=min(after, default=None))
