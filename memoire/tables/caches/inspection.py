"""What a snapshot keeps of held caches: a walk over them, a step at a time, and the way back. Pure.

CacheWalk    client 7, its caches, client 9, its caches, ...
CacheRestore puts each of these back once, here or at another server

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
from memoire.tables.inspection import Distribution, EntryPlace, Histogram, PeekedSample
from memoire.tables.saved import Count, Identity, Moment, RecordBody, RecordKind, Weight, Word
from memoire.wire import _bytes, containers
from memoire.wire._container import HeldCache
from memoire.wire.layout import ContainerLayout
from memoire.wire.parts import Part

from ._draw import HeldClient, HeldPool
from .queues import CacheQueues


class KeptClient(NamedTuple):
    """A client that has entries, as a snapshot keeps it."""

    id: bytes
    sequence: int
    """Of the message that its newest sums came with."""
    total_weight: float
    positives: float
    minimum: float
    between: float
    """D_c: samples that anyone drew between two of its caches."""
    since: int = 0
    """Samples that anyone drew since its newest cache came."""
    has_caches: bool = True
    """Whether caches of it are held, too."""


class LeftSamples(NamedTuple):
    """What is left of a held cache of which samples were passed over, or drawn as often as they may be."""

    samples: bytes
    """uint32: their places."""
    times: bytes
    """uint32 of all samples: how often each was drawn; empty if that is not counted."""
    eldest: float | None
    """Seconds since the eldest entry was recorded; None is not known."""
    least_model: int
    positives: float
    """N_k: entries that they stand for."""


class KeptCache(NamedTuple):
    """A held cache, as a snapshot keeps it."""

    samples: int
    used: int
    """Samples that can be drawn no more."""
    age: float
    """Seconds since it came."""
    payload: memoryview
    left: LeftSamples | None = None
    """None: all that come after those that were used."""


class ClientRecord(RecordBody, frozen=True, kw_only=True, omit_defaults=True):
    """A client with its newest sums, whose caches follow."""

    kind: ClassVar = RecordKind.CLIENT
    id: Identity
    sequence: Word = 0
    total_weight: Weight = 0.0
    positives: Annotated[float, Meta(ge=0.0, le=2.0**53)] = 0.0
    minimum: Weight = 0.0
    between: Weight = 0.0
    """Samples that were drawn between two of its caches."""
    since: Word = 0
    """And since its newest one came."""
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

    def kept(self) -> KeptClient:
        """The client of it."""
        return KeptClient(*(getattr(self, name) for name in KeptClient._fields))


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

    def left_samples(self) -> LeftSamples | None:
        """What is left of the cache, if not all but the first."""
        if self.left is None:
            return None
        return LeftSamples(self.left, self.times, self.eldest, self.least_model, self.positives)


def record_of(kept: KeptClient | KeptCache) -> tuple[RecordBody, memoryview | bytes]:
    """Body and payload of what is saved of caches."""
    if isinstance(kept, KeptClient):
        return ClientRecord(**kept._asdict()), b""
    left = {} if kept.left is None else {**kept.left._asdict(), "left": kept.left.samples}
    facts = {"samples": kept.samples, "used": kept.used, "age": kept.age}
    return CacheRecord(**left | facts), kept.payload


class CacheWalk:
    """Each client that has entries, followed by its caches, oldest first; the queues go on between two steps.

    Nothing is copied, and no cache lives longer for the walk but the one that was given last. So each client is as it
    is when its turn comes; of its caches there are as many as it had then at most. It ends early where caches of
    another form than at its beginning are held.
    """

    def __init__(self, queues: CacheQueues) -> None:
        self._queues, self._layout = queues, queues.layout
        self._clients = iter(queues.held)  # in the order in which a draw goes through them
        self._client: HeldClient | None = None
        self._left = 0  # caches of this client that may come yet
        self._place = 0  # of the next one, among all that the client ever pushed
        self.is_over = False
        """Whether no step gives anything any more."""

    def step(self, now: float) -> KeptClient | KeptCache | None:
        """What comes next; None where this step gives nothing."""
        return self._next_client() if self._client is None else self._next_cache(self._client, now)

    def _next_client(self) -> KeptClient | None:
        client = next(self._clients, None)
        self.is_over = client is None
        has_left = client is None or self._queues.clients.get(client.id) is not client
        if client is None or has_left or not (client.caches or client.positives):
            return None
        if client.caches:
            self._client, self._left, self._place = client, client.caches, client.pushed - client.caches
        return KeptClient(
            client.id, client.sequence, client.total_weight, client.positives, client.minimum, client.between,
            self._queues.held.since(client), client.caches > 0,
        )  # fmt: skip

    def _next_cache(self, client: HeldClient, now: float) -> KeptCache | None:
        gone = client.pushed - client.caches  # caches that it has had: the first in its queue has this place
        self._place = max(self._place, gone)
        queue = client.queued()[self._place - gone :]
        if not queue or self._queues.layout is not self._layout:
            self._client = None
            return None
        self._place, self._left = self._place + 1, self._left - 1
        if not self._left:
            self._client = None
        cache = queue[0]
        return _kept(cache, now)


class CacheRestore:
    """Puts caches back that were walked over, here or elsewhere, each once."""

    def __init__(self, queues: CacheQueues) -> None:
        self._queues = queues
        self._seen: set[tuple[float, ...]] = set()  # what caches of one client look like
        self._seen_of: tuple[HeldClient | None, int] = None, 0  # which client's, when it had pushed so many

    def put_back(
        self,
        kept: KeptClient,
        cache: HeldCache,
        *,
        age: float,
        stays: bool,
        now: float,
        left: LeftSamples | None = None,
    ) -> tuple[bool, int]:
        """Queue a checked cache: see `Pool.put_back`. Returns whether it was not held already, and how many were
        overwritten.
        """
        queues, client = self._queues, self.put_client(kept, math.inf if stays else now)
        if self._is_held(client, cache):
            return False, 0
        cache.arrived = now - age
        if left is not None:
            eldest = -math.inf if left.eldest is None else now - left.eldest
            try:
                cache.go_on_with(left.samples, left.times, eldest, left.least_model, left.positives)
            except ValueError as error:
                raise ProtocolError("container", str(error)) from error
        queues.held.push(client, cache)
        self._seen.add(_looks_of(cache))
        self._seen_of = client, client.pushed
        client.between = kept.between
        queues.held.set_since(client, kept.since)
        return True, queues.make_room()

    def put_client(self, kept: KeptClient, heard: float) -> HeldClient:
        """Know a client of a file, with its sums, which was heard then if it is new here."""
        queues = self._queues
        client = queues.clients.get(kept.id)
        if client is None:
            client = queues.enter(kept.id)
            client.heard = heard
        client.hear(kept.sequence, kept.total_weight, kept.positives, kept.minimum, queues.is_limited)
        return client

    def _is_held(self, client: HeldClient, cache: HeldCache) -> bool:
        """Whether a client's cache is held already. Its caches come one after the other: what they look like is noted,
        and only one that looks like another is compared.
        """
        if self._seen_of != (client, client.pushed):
            self._seen = set(map(_looks_of, client.queued()))
            self._seen_of = client, client.pushed
        return _looks_of(cache) in self._seen and any(_is_same(cache, other) for other in client.queued())


def _kept(cache: HeldCache, now: float) -> KeptCache:
    age, over = now - cache.arrived, cache.left_over()
    if over is None:
        return KeptCache(cache.samples, cache.drawn, age, cache.payload)
    samples, times, eldest, least_model, positives = over
    left = LeftSamples(samples, times, now - eldest if math.isfinite(eldest) else None, least_model, positives)
    return KeptCache(cache.samples, cache.samples - len(samples) // 4, age, cache.payload, left)


def _looks_of(cache: HeldCache) -> tuple[float, ...]:
    return cache.made_at, cache.samples, cache.total_weight, cache.nbytes


def _is_same(one: HeldCache, other: HeldCache) -> bool:
    """Whether two caches came as the same bytes."""
    return _looks_of(one) == _looks_of(other) and _bytes.checksum(one.payload) == _bytes.checksum(other.payload)


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


def choose_caches(queues: CacheQueues, now: float, rng: random.Random, most_samples: int) -> ChosenCaches:
    """Choose the caches that a histogram is made of: of clients chosen at random, some caches each, about
    `most_samples` samples in all. `now` is in seconds of the pool's clock.
    """
    held, reuse = queues.held, queues.parameters.reuse_cache
    # Over the largest: sums of what clients say could overflow.
    most = max((client.total_weight for client in queues.clients.values()), default=0.0)
    parts = math.fsum(client.total_weight / most for client in queues.clients.values()) if most > 0.0 else 0.0
    chosen = _some_caches(queues, rng, most_samples)
    return ChosenCaches(
        caches=[(client.total_weight / most / parts, caches) for client, caches in chosen],
        reuse=reuse,
        held=held.held if reuse else held.unused,
        population=float(held.entries()),
        total_weight=min(most * parts, sys.float_info.max),
        clock=now,
    )


def _some_caches(
    queues: CacheQueues, rng: random.Random, most_samples: int
) -> list[tuple[HeldClient, list[HeldCache]]]:
    """Caches of clients that can be drawn from, of all or of some at random, for so many samples together."""
    able = _able(queues)
    able = rng.sample(able, min(len(able), MAX_CLIENTS))
    chosen = []
    for client in able:
        caches = client.queued()
        wanted = -(-most_samples // (len(able) * max(1, caches[0].samples)))
        chosen.append((client, rng.sample(caches, min(len(caches), wanted))))
    return chosen


def _able(queues: CacheQueues) -> list[HeldClient]:
    """Clients that can be drawn from."""
    return [client for client in queues.clients.values() if client.caches and client.total_weight > 0.0]


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
    queues: CacheQueues, now: float, rng: random.Random, of: tuple[bytes, int] | None = None
) -> ChosenSample | None:
    """Where to take a sample: of a client by its share of the weight, or of the client and entry that are named. None
    where nothing is held, or of that client nothing.
    """
    clients = _able(queues)
    most = max((client.total_weight for client in clients), default=0.0)
    parts = [client.total_weight / most for client in clients]  # sums of what clients say could overflow
    wanted = [client for client in clients if of is None or client.id == of[0]]
    if not wanted:
        return None
    client = rng.choices(clients, parts)[0] if of is None else wanted[0]
    return ChosenSample(
        caches=client.queued(),
        number=None if of is None else of[1],
        layout=queues.layout,
        client=client.id,
        sums=(client.sequence, client.total_weight, float(client.positives), client.minimum),
        share=client.total_weight / most / math.fsum(parts),
        population=float(queues.held.entries()),
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
    layout.gather(picks, gathered)
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
