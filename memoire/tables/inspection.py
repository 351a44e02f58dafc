"""Read-only inspection of a table: distributions of weights and ages, a sample as a learner gets it, and freshness.

No counters are kept for inspection while samples come and go. Each query examines at most `MAX_INSPECTED` samples, so
that a query takes milliseconds for a table of any size.

The effective size of a memory is 1 / sum p**2, p being the chances of its entries. The effective size is the size of a
memory with equal chances in which two draws meet in one entry equally often: the number of entries if all chances are
equal, and 1 if one entry has all of the chance. (The inverse of Simpson's index; Hill, Diversity and evenness, Ecology
1973, N_2. With p = w / sum w it is Kish's effective sample size, 1965.) The mean of p over drawn samples is sum p**2,
because each entry is drawn with chance p.

Freshness of drawn samples: ages, weights, and the number of newer models. Only a batch now and then is examined, so
that the cost is small.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.figures import gauge
from memoire.replay.batch import Batch, GatheredSamples, PriorityUpdate
from memoire.replay.schema import Schema

PER_TEN = 8
"""Histogram buckets per factor of ten."""
MAX_BUCKET = 12 * PER_TEN
"""Highest bucket number: values below 1e-12 or above 1e12 lie in the first or the last bucket."""
MAX_SPECIMEN_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Histogram:
    """Histogram over logarithmic buckets: bucket k begins at 10 ** (k / 8). Histograms of several tables can be added
    up.
    """

    first: int
    """Number k of the first bucket in `counts`."""
    counts: tuple[int, ...]
    zeros: int
    """Number of values that are 0."""
    least: float
    greatest: float

    @classmethod
    def from_values(cls, values: NDArray[Any]) -> Histogram:
        """Return the histogram of finite numbers [N] that are not negative."""
        some = np.asarray(values, np.float64)
        above = some[some > 0.0]
        ends = (float(some.min()), float(some.max())) if len(some) else (0.0, 0.0)
        if not len(above):
            return cls(0, (), len(some), *ends)
        buckets = np.clip(np.floor(np.log10(above) * PER_TEN), -MAX_BUCKET, MAX_BUCKET).astype(np.int64)
        first = int(buckets.min())
        return cls(first, tuple(np.bincount(buckets - first).tolist()), len(some) - len(above), *ends)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of weights and ages in a table."""

    looked: int
    """Number of samples, or entries of episodes, that were examined."""
    held: int
    """Number of samples or entries that could be drawn."""
    population: float
    """Number of entries that the samples represent: all of positive weight in the clients' memories, or in the table.
    """
    total_weight: float
    """Total weight of the population."""
    effective: float | None
    """Effective size of the population; None if nothing can be drawn."""
    weights: Histogram
    """Weights of the examined samples. Samples in caches were already drawn in proportion to their weights."""
    ages: Histogram
    """Seconds since the entries were recorded."""


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """Position of an entry in its episode or among its client's samples, and its last reported TD error."""

    earlier: int | None = None
    """Number of the previous entry in the episode, or of the client's previous sample if the episode is unknown."""
    later: int | None = None
    """Number of the next entry, as for `earlier`."""
    step: int | None = None
    """Position in the episode, from 1; None if the episode is unknown."""
    episode: int | None = None
    """Number of entries in the episode; None if the server does not know the number."""
    td_error: float | None = None
    """Absolute TD error that a learner reported last; None without a report, or if only the client knows the error."""


@dataclass(frozen=True, slots=True)
class InspectedSample:
    """One sample with its facts, prepared for display."""

    arrays: dict[str, NDArray[Any]]
    """The sample's part of each array, by the array's name in a batch."""
    axes: dict[str, int]
    """Number of axes in front of the column's own axes: frames of a stack, entries of a sequence."""
    client: str
    """Owner id in hex: the id of a client, or of the server's memory of episodes."""
    number: int
    """Number of the entry at its owner."""
    age: float
    """Seconds since the entry was recorded."""
    weight: float
    probability: float
    """P(i), the chance of the entry at each draw."""
    importance: float
    """(N P(i)) ** -beta, before the division by the batch's largest value; 1 for an entry of mean chance."""
    model_version: int
    """Version of the model that acted; 0 if the actor did not report a version."""
    model_lag: int | None
    """Versions between the acting model and the newest; None if either version is unknown."""
    place: EntryPlace


@dataclass(frozen=True, slots=True)
class PeekedSample:
    """Copy of a sample that remains in the pool."""

    gathered: GatheredSamples
    """Arrays of this one sample."""
    probability: float
    population: float
    """N, the number of entries of positive weight."""
    beta: float
    place: EntryPlace = EntryPlace()

    def display_sample(
        self, schema: Schema, newest: int, byte_limit: int = MAX_SPECIMEN_BYTES
    ) -> InspectedSample | None:
        """Return the sample prepared for display, or None if its arrays have more than `byte_limit` bytes.

        Args:
            newest: Newest version of a model; 0 if there is no model.
        """
        gathered, one = self.gathered, self.gathered.ids[0]
        batch = Batch(schema, gathered, np.ones(1, np.float32), _refuse)
        arrays = {name: array[0] for name, array in batch.items() if len(array) and name not in _NOT_ARRAYS}
        if sum(array.nbytes for array in arrays.values()) > byte_limit:
            return None
        version = int(gathered.model_version[0])
        return InspectedSample(
            arrays=arrays,
            axes={name: _axes(array, name, schema) for name, array in arrays.items()},
            client=one["client"].tobytes().hex(),
            number=int(one["number"]),
            age=float(gathered.age[0]),
            weight=float(gathered.weight[0]),
            probability=self.probability,
            importance=max(self.population * self.probability, sys.float_info.min) ** -self.beta,
            model_version=version,
            model_lag=newest - version if newest and version else None,
            place=self.place,
        )


_NOT_ARRAYS = ("ids", "age", "model_version", "importance")  # other fields of InspectedSample


def _refuse(ids: NDArray[Any], td_errors: Any) -> PriorityUpdate:
    raise AssertionError("the priority of an inspected sample cannot be set")


def _axes(array: NDArray[Any], name: str, schema: Schema) -> int:
    column = schema.get(name) or schema.get(name.removeprefix("next_"))
    return 0 if column is None else max(0, array.ndim - len(column.shape))


SAMPLE_INTERVAL = 0.5
"""Minimum seconds between two examined batches."""
PARTS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Quantiles of ages and weights that are kept of a batch."""


@dataclass(frozen=True, slots=True)
class SampleFreshness:
    """Freshness of the samples of recent batches; None if a figure is unknown."""

    # fmt: off
    age_median: Annotated[float | None, gauge("sample_age_median_seconds", "Age of samples",
        "Median age of the samples of a recent batch, in seconds since their entries were added.", adds="max",
        curve=True)] = None
    age_p90: Annotated[float | None, gauge("sample_age_p90_seconds", "Age of old samples",
        "90th percentile of the ages of a recent batch's samples.", adds="max", curve=True)] = None
    age_max: Annotated[float | None, gauge("sample_age_max_seconds", "Greatest age", "Age of the oldest sample of a "
        "recent batch.", adds="max", curve=True)] = None
    lag_mean: Annotated[float | None, gauge("sample_model_lag_mean", "Models behind", "Mean number of model versions "
        "between acting and learning, in a recent batch.", formula="newest version - version that acted",
        docs="on-policy.md", adds="max", curve=True)] = None
    """Mean lag in versions; None if no model was published."""
    lag_max: Annotated[float | None, gauge("sample_model_lag_max", "Most models behind",
        "Largest number of model versions between acting and learning, in a recent batch.", adds="max",
        curve=True)] = None
    left_out: Annotated[float | None, gauge("left_out_ratio", "Weight left out", "Share of all weight that a recent "
        "batch could not draw from, because the actors with that weight had no unused cache.",
        formula="1 - reachable weight ÷ all weight", docs="sampling.md", adds="max", curve=True),
        gauge("sample_left_out_ratio", "Weight left out", "Share of all weight that recent draws could not draw from; "
        "of several learners the largest.", of="cluster")] = None
    effective: Annotated[float | None, gauge("sample_effective_ratio", "Distinct weight of a batch",
        "Effective size of a recent batch as a share of its samples: 100 % means that all samples have the same "
        "importance.", formula="(Σ importance)² ÷ (B Σ importance²)", docs="sampling.md", adds="min",
        curve=True)] = None
    """Effective sample size over batch size (Kish, 1965)."""
    # fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness(SampleFreshness):
    """Freshness of the samples of one recent batch."""

    ages: tuple[float, ...]
    """Quantiles of the samples' ages in seconds, at `PARTS`."""
    weights: tuple[float, ...]
    """Quantiles at `PARTS` of the weights that the samples were drawn in proportion to."""


class FreshnessMonitor:
    """Monitor that examines at most one batch in `SAMPLE_INTERVAL` seconds, so that draws stay fast."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = float("-inf")
        self.newest: Freshness | None = None
        """Freshness of the last examined batch; None before the first."""

    def is_due(self, now: float) -> bool:
        """Return True if the caller must examine this batch now."""
        if now < self._next:
            return False
        with _core.Held.within(self._lock, 0.0) as is_mine:
            if is_mine:
                self._next = now + SAMPLE_INTERVAL
            return is_mine

    def record_batch(self, drawn: GatheredSamples, importance: NDArray[Any], left_out: float, newest: int) -> None:
        """Record the freshness of a batch: importance is [B], `newest` is the newest version of a model."""
        self._keep(drawn.age, drawn.model_version, drawn.weight, importance, left_out, newest)

    def record_rollouts(self, age: NDArray[Any], model_version: NDArray[Any], newest: int) -> None:
        """Record the freshness of taken rollouts from ages and versions of the entries [N]; each entry counts alike."""
        alike = np.ones(len(age), np.float32)
        self._keep(age, model_version, alike, alike, 0.0, newest)

    def _keep(
        self,
        age: NDArray[Any],
        model_version: NDArray[Any],
        weight: NDArray[Any],
        importance: NDArray[Any],
        left_out: float,
        newest: int,
    ) -> None:
        if not (len(age) and np.isfinite(age).all()):
            return
        lags = newest - model_version[model_version > 0]
        has_lag = newest > 0 and len(lags) > 0
        weights, ages = importance.astype(np.float64), _quantiles(age)
        self.newest = Freshness(
            age_median=ages[PARTS.index(0.5)],
            age_p90=ages[PARTS.index(0.9)],
            age_max=ages[-1],
            lag_mean=float(lags.mean()) if has_lag else None,
            lag_max=float(lags.max()) if has_lag else None,
            left_out=float(left_out),
            effective=float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())) if weights.any() else 0.0,
            ages=ages,
            weights=_quantiles(weight),
        )


def _quantiles(values: NDArray[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in np.quantile(values, PARTS))
