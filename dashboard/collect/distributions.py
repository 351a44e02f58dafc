"""How things are spread: what a table holds, over all servers, out of what each says at /distribution; and actors by a
figure. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memoire.pool.inspection import PER_TEN

from .answers import ActorSpread, ClusterDistribution, ClusterHistogram


def merged(table: str, told: Mapping[str, Mapping[str, Any]], missing: Sequence[str]) -> ClusterDistribution:
    """All servers' parts as one.

    Args:
        told: What each server says, by name.
        missing: Servers that did not answer.
    """
    parts = list(told.values())
    most = max((part["total_weight"] for part in parts), default=0.0)
    weights = [part["total_weight"] / most if most > 0.0 else 0.0 for part in parts]  # their sum could overflow
    total = math.fsum(weights)
    # p of an entry is its chance at its server, times that server's share of the whole weight.
    twice = math.fsum(
        (weight / total) ** 2 / part["effective"]
        for weight, part in zip(weights, parts, strict=True)
        if part["effective"]
    )
    return ClusterDistribution(
        table=table,
        storage=parts[0]["storage"] if parts else "",
        looked=sum(part["looked"] for part in parts),
        held=sum(part["held"] for part in parts),
        population=math.fsum(part["population"] for part in parts),
        effective=1.0 / twice if twice > 0.0 else None,
        weights=_added([part["weights"] for part in parts]),
        ages=_added([part["ages"] for part in parts]),
        servers=sorted(told),
        missing=sorted(missing),
    )


def _added(parts: Sequence[Mapping[str, Any]]) -> ClusterHistogram:
    """Histograms of the same buckets as one. A part stands for what it looked at."""
    some = [part for part in parts if part["counts"]]
    seen = [part for part in parts if part["counts"] or part["zeros"]]
    first = min((part["first"] for part in some), default=0)
    end = max((part["first"] + len(part["counts"]) for part in some), default=first)
    counts = [0] * (end - first)
    for part in some:
        for place, count in enumerate(part["counts"], part["first"] - first):
            counts[place] += count
    return ClusterHistogram(
        bounds=[10.0 ** (bucket / PER_TEN) for bucket in range(first, end + 1)] if counts else [],
        counts=counts,
        zeros=sum(part["zeros"] for part in parts),
        least=min((part["least"] for part in seen), default=None),
        greatest=max((part["greatest"] for part in seen), default=None),
    )


def spread_of(figure: str, values: Sequence[float], bins: int) -> ActorSpread:
    """How actors are spread by the values of one figure, in so many buckets of equal width."""
    if not values:
        return ActorSpread(figure, 0, None, None, ClusterHistogram([], [], 0, None, None))
    counts, bounds = np.histogram(values, bins)
    return ActorSpread(
        figure=figure,
        actors=len(values),
        median=float(np.median(values)),
        mean=float(np.mean(values)),
        histogram=ClusterHistogram(bounds.tolist(), counts.tolist(), 0, min(values), max(values)),
    )
