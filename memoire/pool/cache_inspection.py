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
from memoire.wire.layout import Layout
from memoire.wire.parts import Part

from . import picked
from ._draw import HeldClient, HeldPool
from .inspection import Distribution, Histogram, Peeked
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
    """Caches to look at: those of some clients, and of each of these some, for so many samples together."""
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


class _LookedAt(NamedTuple):
    """What is seen of some caches of a client: of each sample, [n]."""

    weights: NDArray[np.float64]
    chances: NDArray[np.float64]
    """In the client's memory: w / S_k."""
    ages: NDArray[np.float64]


def _looked_at(caches: Sequence[HeldCache], reuse: bool, clock: float, most: int) -> _LookedAt:
    """Of these caches of one client, `most` samples: those of a cache lie in random order, so any will do."""
    found = []
    for held in caches:
        left = slice(0 if reuse else held.drawn, None)
        weights = np.frombuffer(held.part(Part.WEIGHT), "<f8")[left]
        ages = np.frombuffer(held.part(Part.AGE), "<f4")[left] + max(0.0, clock - held.arrived)
        found.append((weights, weights / held.total_weight, ages))
    return _LookedAt(*(np.concatenate([np.empty(0), *parts])[:most] for parts in zip(*found, strict=True)))


class ChosenSample(NamedTuple):
    """A cache out of which a sample is shown, and what is known of its client."""

    cache: HeldCache
    layout: Layout
    client: bytes
    sums: tuple[int, float, float, float]
    """The client's newest: sequence, total_weight, positives, minimum."""
    share: float
    """Of all clients' weight."""
    population: float
    seed: int
    """Of the draw of a sample."""
    clock: float


def choose_sample(queues: CacheQueues, now: float, rng: random.Random) -> ChosenSample | None:
    """Where to take a sample: of a client by its share of the weight, out of any of its caches. None where nothing is
    held.
    """
    clients = _able(queues)
    if not clients:
        return None
    most = max(client.total_weight for client in clients)
    parts = [client.total_weight / most for client in clients]  # sums of what clients say could overflow
    client = rng.choices(clients, parts)[0]
    return ChosenSample(
        cache=rng.choice(client.queued()),
        layout=queues.layout,
        client=client.id,
        sums=(client.sequence, client.total_weight, float(client.positives), client.minimum),
        share=client.total_weight / most / math.fsum(parts),
        population=float(queues.held.entries()),
        seed=rng.getrandbits(64),
        clock=now,
    )


def copied(chosen: ChosenSample, beta: float) -> Peeked:
    """A copy of one sample of the chosen cache: drawn from a pool of its own, with a cache of its own out of the same
    bytes, so that nothing is taken.
    """
    layout = chosen.layout
    alone, owner = HeldPool(chosen.seed), HeldClient(chosen.client)
    owner.hear(*chosen.sums)
    alone.enter(owner)
    alone.push(owner, unpack.copy_of(chosen.cache, layout))
    picks = alone.draw(layout.core, 1, True)
    assert picks is not None, "a held cache has a sample"
    gathered = layout.allocate(1)
    layout.gather(picks, gathered)
    gathered.age += picked.waits_of(picks, chosen.clock)
    chance = chosen.share * min(1.0, float(gathered.weight[0]) / chosen.cache.total_weight)
    newest = max(1.0, chosen.sums[2])
    return Peeked(gathered, chance, chosen.population * chosen.cache.positives / newest, beta)
