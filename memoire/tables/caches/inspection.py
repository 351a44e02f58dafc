"""Records of a snapshot: clients that have entries, and their held caches. Pure.

Held caches, looked at without taking anything: how their samples are spread, and a copy of one. Pure.

Each look is two steps. `choose_caches` and `choose_sample` are quick, and need the queues to stand still;
`distribution_of` and `copied` read and copy what was chosen while the queues go on.
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
    """A client with its newest sums, whose caches follow."""

    kind: ClassVar = RecordKind.CLIENT
    id: Identity
    sequence: Word = 0
    total_weight: Weight = 0.0
    positives: Annotated[float, Meta(ge=0.0, le=2.0**53)] = 0.0
    minimum: Weight = 0.0
    between: Weight = 0.0
    """D_c: samples that were drawn between two of its caches."""
    since: Word = 0
    """Samples that were drawn since its newest cache came."""
    has_caches: bool = True
    """Whether caches of it follow; else only its sums are known."""

    is_heading: ClassVar = True

    @property
    def is_alone(self) -> bool:
        """Its caches bring its sums along."""
        return not self.has_caches

    def counted(self, payload_bytes: int) -> dict[str, int]:
        """One more client."""
        return {"clients": 1}

    def belongs_to(self, heading: RecordBody | None) -> bytes:
        """Each client goes whole to one server."""
        return self.id

    @classmethod
    def of(cls, client: HeldClient, since: int) -> ClientRecord:
        """A client as it is now; `since` is of its pool."""
        return cls(
            id=client.id, sequence=client.sequence, total_weight=client.total_weight, positives=client.positives,
            minimum=client.minimum, between=client.between, since=since, has_caches=client.caches > 0,
        )  # fmt: skip


class CacheRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """A cache of the client before; the payload is as it came."""

    kind: ClassVar = RecordKind.CACHE
    has_payload: ClassVar = True
    samples: Count
    used: Count = 0
    """Samples of it that can be drawn no more."""
    age: Weight = 0.0
    """Seconds since it came to the server."""
    left: bytes | None = None
    """uint32: places of the samples that are left; None: all but the first `used` ones."""
    times: bytes = b""
    """uint32: how often each sample was drawn; empty if that is not counted."""
    eldest: Moment | None = None
    """Seconds since the eldest entry of those that are left was recorded; None is not known."""
    least_model: Annotated[int, Meta(ge=1 - 2**63)] = 1 - 2**63
    positives: Weight = 1.0
    """Entries that those that are left stand for."""

    def counted(self, payload_bytes: int) -> dict[str, int]:
        """One more cache, and its samples."""
        return {"caches": 1, "samples": self.samples, "unused": self.samples - self.used, "bytes": payload_bytes}

    def older(self, seconds: float) -> CacheRecord:
        """So much later its samples are older."""
        eldest = None if self.eldest is None else self.eldest + seconds
        return msgspec.structs.replace(self, age=self.age + seconds, eldest=eldest)

    def belongs_to(self, heading: RecordBody | None) -> bytes | None:
        """To its client."""
        return heading.id if isinstance(heading, ClientRecord) else None

    def called(self, heading: RecordBody | None) -> str:
        """A cache of a client."""
        return f"a cache of client {heading.id.hex()}" if isinstance(heading, ClientRecord) else "a cache"

    def go_on(self, cache: HeldCache, now: float) -> None:
        """Have the cache be drawn from as it was when it was saved. Raises ProtocolError: that cannot be.

        Args:
            now: In seconds of the pool's clock.
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
    """What is saved of a held cache beside its bytes; `now` is in seconds of the pool's clock."""
    age, over = now - cache.arrived, cache.left_over()
    if over is None:
        return CacheRecord(samples=cache.samples, used=cache.drawn, age=age)
    left, times, eldest, least_model, positives = over
    return CacheRecord(
        samples=cache.samples,
        used=cache.samples - len(left) // 4,
        age=age,
        left=left,
        times=times,
        eldest=now - eldest if math.isfinite(eldest) else None,
        least_model=least_model,
        positives=positives,
    )


class HeldOnce:
    """Knows a cache that is put back twice. A client's caches come one after the other: what they look like is noted,
    and only one that looks like another is compared.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[float, ...]] = set()  # what caches of one client look like
        self._of: tuple[HeldClient | None, int] = None, 0  # which client's, when it had pushed so many

    def is_new(self, client: HeldClient, cache: HeldCache) -> bool:
        """Whether the client has no cache of the same bytes."""
        if self._of != (client, client.pushed):
            self._seen, self._of = set(map(_looks_of, client.queued())), (client, client.pushed)
        looks = _looks_of(cache)
        alike = [other for other in client.queued() if _looks_of(other) == looks] if looks in self._seen else []
        return not any(_bytes.checksum(cache.payload) == _bytes.checksum(other.payload) for other in alike)

    def pushed(self, client: HeldClient, cache: HeldCache) -> None:
        """The client has this one from now on."""
        self._seen.add(_looks_of(cache))
        self._of = client, client.pushed


def _looks_of(cache: HeldCache) -> tuple[float, ...]:
    return cache.made_at, cache.samples, cache.total_weight, cache.nbytes


MAX_CLIENTS: Final = 512
"""Clients whose caches are looked at for a histogram."""


class ChosenCaches(NamedTuple):
    """Some of the held caches, and what is known of all of them."""

    caches: list[tuple[float, list[HeldCache]]]
    """Of some clients, each with its share of all clients' weight."""
    reuse: bool
    held: int
    """Samples that can be drawn, of all caches."""
    population: float
    total_weight: float
    clock: float


def choose_caches(held: HeldPool, reuse: bool, now: float, rng: random.Random, most_samples: int) -> ChosenCaches:
    """Choose the caches that a histogram is made of: of clients chosen at random, some caches each, about
    `most_samples` samples in all. `now` is in seconds of the pool's clock.
    """
    # Over the largest: sums of what clients say could overflow.
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
    """Caches of clients that can be drawn from, of all or of some at random, for so many samples together."""
    able = _able(held)
    able = rng.sample(able, min(len(able), MAX_CLIENTS))
    chosen = []
    for client in able:
        caches = client.queued()
        wanted = -(-most_samples // (len(able) * max(1, caches[0].samples)))
        chosen.append((client, rng.sample(caches, min(len(caches), wanted))))
    return chosen


def _able(held: HeldPool) -> list[HeldClient]:
    """Clients that can be drawn from."""
    return [client for client in held if client.caches and client.total_weight > 0.0]


def distribution_of(chosen: ChosenCaches, most_samples: int) -> Distribution:
    """How the samples of chosen caches are spread, those that can be drawn yet."""
    each = most_samples // max(1, len(chosen.caches))
    looked = [(share, _looked_at(caches, chosen.reuse, chosen.clock, each)) for share, caches in chosen.caches]
    shares = [(share, found) for share, found in looked if len(found.chances)]
    whole = math.fsum(share for share, _ in shares)
    twice = math.fsum(share * share * float(found.chances.mean()) for share, found in shares)
    weights = np.concatenate([np.empty(0), *(found.weights for _, found in looked)])
    return Distribution(
        looked=len(weights),
        held=chosen.held,
        population=chosen.population,
        total_weight=chosen.total_weight,
        effective=whole / twice if twice > 0.0 else None,
        weights=Histogram.of(weights),
        ages=Histogram.of(np.concatenate([np.empty(0), *(found.ages for _, found in looked)])),
    )


class _SampleView(NamedTuple):
    """What is seen of some caches of a client: of each sample, [n]."""

    weights: NDArray[np.float64]
    chances: NDArray[np.float64]
    """In the client's memory: w / S_k."""
    ages: NDArray[np.float64]


def _looked_at(caches: Sequence[HeldCache], reuse: bool, clock: float, most: int) -> _SampleView:
    """Of these caches of one client, `most` samples: those of a cache lie in random order, so any will do."""
    found = []
    for held in caches:
        left = slice(0 if reuse else held.drawn, None)
        weights = np.frombuffer(held.part(Part.WEIGHT), "<f8")[left]
        ages = np.frombuffer(held.part(Part.AGE), "<f4")[left] + max(0.0, clock - held.arrived)
        found.append((weights, weights / held.total_weight, ages))
    return _SampleView(*(np.concatenate([np.empty(0), *parts])[:most] for parts in zip(*found, strict=True)))


class ChosenSample(NamedTuple):
    """The caches of a client out of which a sample is shown, and what is known of the client."""

    caches: list[HeldCache]
    """All that it has."""
    number: int | None
    """Of the entry that is wanted; None: any."""
    layout: ContainerLayout
    client: bytes
    sums: tuple[int, float, float, float]
    """The client's newest: sequence, total_weight, positives, minimum."""
    share: float
    """Of all clients' weight."""
    population: float
    seed: int
    """Of the draw of a sample."""
    clock: float


def choose_sample(
    held: HeldPool, layout: ContainerLayout, now: float, rng: random.Random, of: tuple[bytes, int] | None = None
) -> ChosenSample | None:
    """Where to take a sample: of a client by its share of the weight, or of the client and entry that are named. None
    where nothing is held, or of that client nothing.
    """
    clients = _able(held)
    most = max((client.total_weight for client in clients), default=0.0)
    parts = [client.total_weight / most for client in clients]  # sums of what clients say could overflow
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
    """A copy of one sample of the chosen caches: drawn from a pool of its own, with a cache of its own out of the same
    bytes, so that nothing is taken. None where the entry that is wanted is in no cache.
    """
    numbers = [np.frombuffer(held.part(Part.NUMBER), "<i8") for held in chosen.caches]
    where = _where(numbers, chosen.number, random.Random(chosen.seed))
    if where is None:
        return None
    cache, at = chosen.caches[where[0]], where[1]
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
    place = _place_of(numbers, int(numbers[where[0]][at]))
    return PeekedSample(gathered, chance, chosen.population * cache.positives / newest, beta, place)


def _where(numbers: Sequence[NDArray[np.int64]], wanted: int | None, rng: random.Random) -> tuple[int, int] | None:
    """Which cache has the entry that is wanted, the newest one first, and where; of any entry a random place."""
    if wanted is None:
        cache = rng.randrange(len(numbers))
        return cache, rng.randrange(len(numbers[cache]))
    for cache in reversed(range(len(numbers))):
        found = np.flatnonzero(numbers[cache] == wanted)
        if len(found):
            return cache, int(found[0])
    return None


def _place_of(numbers: Sequence[NDArray[np.int64]], number: int) -> EntryPlace:
    """An entry between its client's other held ones; which episode it is of, its client alone knows."""
    before = [int(low.max()) for each in numbers if len(low := each[each < number])]
    after = [int(high.min()) for each in numbers if len(high := each[each > number])]
    return EntryPlace(earlier=max(before, default=None), later=min(after, default=None))
