"""Held caches, looked at without taking anything: how their samples are spread, and a copy of one. Pure.

Each look is two steps. `choose_caches` and `choose_sample` are quick, and need the queues to stand still;
`distribution_of` and `copied` read and copy what was chosen while the queues go on.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire.wire import unpack
from memoire.wire._container import HeldCache
from memoire.wire.layout import ContainerLayout
from memoire.wire.parts import Part

from . import picked
from ._draw import HeldClient, HeldPool
from .inspection import Distribution, EntryPlace, Histogram, PeekedSample
from .queues import CacheQueues

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
    copy = unpack.copy_of(cache, layout)
    copy.go_on_at(at)
    alone.push(owner, copy)
    picks = alone.draw(layout.core, 1, False)
    assert picks is not None, "a held cache has a sample"
    gathered = layout.allocate(1)
    layout.gather(picks, gathered)
    gathered.age += picked.waits_of(picks, chosen.clock)
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
