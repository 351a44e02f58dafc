"""What a table holds, looked at without touching it: how weights and ages are spread, and one sample as a learner would
get it. Pure.

Nothing is counted for this while samples come and go: whoever asks has a part of what is held looked at, at most
`MAX_INSPECTED` samples, so that it takes milliseconds however much there is.

The effective size of a memory is 1 / sum p**2, p being the chances of its entries: as many entries as are alike in a
memory of the same chance to draw the same entry twice. It is the number of entries where all chances are alike, and 1
where one entry has all of them. (The inverse of Simpson's index; Hill, Diversity and evenness, Ecology 1973, N_2. With
p = w / sum w it is Kish's effective sample size, 1965.) Where only drawn samples are there, the mean of their p is
sum p**2: each entry comes with chance p.

How fresh drawn samples are: their ages and weights, and how many models ago they were recorded. A batch is looked at
now and then, so that it costs little.
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
"""Buckets of a histogram between 1 and 10, and so on."""
MAX_BUCKET = 12 * PER_TEN
"""Beyond 1e-12 and 1e12 everything lies in the last bucket."""
MAX_SPECIMEN_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values lie where: in bucket k from 10 ** (k / 8) up to where the next one begins. Those of several
    tables can be added up.
    """

    first: int
    """k of the first of `counts`."""
    counts: tuple[int, ...]
    zeros: int
    """Values that are 0."""
    least: float
    greatest: float

    @classmethod
    def of(cls, values: NDArray[Any]) -> Histogram:
        """Of finite numbers [N] that are not negative."""
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
    """How what is held is spread."""

    looked: int
    """Samples, or entries of episodes, that were looked at."""
    held: int
    """And that could be drawn."""
    population: float
    """Entries that they stand for: those of positive weight in the clients' memories, or here."""
    total_weight: float
    """Of the population."""
    effective: float | None
    """Effective size of the population; None where nothing can be drawn."""
    weights: Histogram
    """Of what was looked at: samples in caches came in proportion to them already."""
    ages: Histogram
    """Seconds since the entries were recorded."""


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """Where an entry stands among those that can be looked at, and what a learner said of it."""

    earlier: int | None = None
    """Number of the one before: in its episode, or of its client's held samples where no episode is known."""
    later: int | None = None
    """And of the one after."""
    step: int | None = None
    """Its place in its episode, from 1; None where no episode is known."""
    episode: int | None = None
    """Entries of its episode; None where the server does not know."""
    td_error: float | None = None
    """Size of the TD error that a learner reported last; None where none did, or its client alone knows."""


@dataclass(frozen=True, slots=True)
class InspectedSample:
    """One sample, to be looked at."""

    arrays: dict[str, NDArray[Any]]
    """A sample's part of each array, under its name in a batch."""
    axes: dict[str, int]
    """How many axes each has before those of its column: frames of a stack, entries of a sequence."""
    client: str
    """Whose it is, in hex: a client's, or that of the server's memory of episodes."""
    number: int
    """The entry's."""
    age: float
    """Seconds since the entry was recorded."""
    weight: float
    probability: float
    """P(i): its chance at each draw."""
    importance: float
    """(N P(i)) ** -beta, before it is divided by the batch's largest: 1 is an entry of the mean chance."""
    model_version: int
    """Of the model that acted; 0: nobody said."""
    model_lag: int | None
    """Versions between that one and the newest; None where no model was published, or nobody said."""
    place: EntryPlace
    """Among its neighbours."""


@dataclass(frozen=True, slots=True)
class PeekedSample:
    """A sample that was copied and not taken."""

    gathered: GatheredSamples
    """It alone."""
    probability: float
    population: float
    """N: entries of positive weight."""
    beta: float
    place: EntryPlace = EntryPlace()
    """Among its neighbours."""

    def specimen(self, schema: Schema, newest: int, byte_limit: int = MAX_SPECIMEN_BYTES) -> InspectedSample | None:
        """What there is to see of it; None if it has more than `byte_limit` bytes.

        Args:
            newest: Newest version of a model; 0: there is none.
        """
        gathered, one = self.gathered, self.gathered.ids[0]
        batch = Batch(schema, gathered, np.ones(1, np.float32), _refuse)
        arrays = {name: array[0] for name, array in batch.items() if len(array) and name not in _TOLD}
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


_TOLD = ("ids", "age", "model_version", "importance")  # in words beside the arrays


def _refuse(ids: NDArray[Any], td_errors: Any) -> PriorityUpdate:
    raise AssertionError("a sample that is only looked at has no priority to be set")


def _axes(array: NDArray[Any], name: str, schema: Schema) -> int:
    column = schema.get(name) or schema.get(name.removeprefix("next_"))
    return 0 if column is None else max(0, array.ndim - len(column.shape))


SAMPLE_INTERVAL = 0.5
"""Seconds between two looks at how fresh a batch is."""
PARTS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Parts of a batch whose greatest age and weight are kept."""


@dataclass(frozen=True, slots=True)
class SampleFreshness:
    """How fresh the samples of recent batches are; None where that is not known."""

    # fmt: off
    age_median: Annotated[float | None, gauge("sample_age_median_seconds", "Age of samples",
        "Median age of the samples of a recent batch, in seconds since their entries were added.", adds="max",
        curve=True)] = None
    age_p90: Annotated[float | None, gauge("sample_age_p90_seconds", "Age of old samples",
        "Age that 90 % of a recent batch stay below.", adds="max", curve=True)] = None
    age_max: Annotated[float | None, gauge("sample_age_max_seconds", "Greatest age", "Age of the oldest sample of a "
        "recent batch.", adds="max", curve=True)] = None
    lag_mean: Annotated[float | None, gauge("sample_model_lag_mean", "Models behind", "Mean of model versions between "
        "acting and learning, in a recent batch.", formula="newest version - version that acted", docs="on-policy.md",
        adds="max", curve=True)] = None
    """None where no model was published."""
    lag_max: Annotated[float | None, gauge("sample_model_lag_max", "Most models behind",
        "Most model versions between acting and learning, in a recent batch.", adds="max", curve=True)] = None
    left_out: Annotated[float | None, gauge("left_out_ratio", "Weight left out", "Share of all weight that a recent "
        "batch could not draw from, because the actors that have it sent no cache that is still unused.",
        formula="1 - reachable weight ÷ all weight", docs="sampling.md", adds="max", curve=True),
        gauge("sample_left_out_ratio", "Weight left out", "Share of all weight that recent draws could not draw from; "
        "of several learners the largest.", of="cluster")] = None
    effective: Annotated[float | None, gauge("sample_effective_ratio", "Distinct weight of a batch",
        "Effective size of a recent batch as a share of its samples: 100 % means that all samples count alike by their "
        "importance.", formula="(Σ importance)² ÷ (B Σ importance²)", docs="sampling.md", adds="min",
        curve=True)] = None
    """Kish, 1965."""
    # fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness(SampleFreshness):
    """How fresh the samples of one recent batch were."""

    ages: tuple[float, ...]
    """Ages that `PARTS` of the samples stay below, in seconds."""
    weights: tuple[float, ...]
    """Weights that `PARTS` of the samples stay below: what they were drawn in proportion to."""


class FreshnessMonitor:
    """Looks at a batch now and then: at most one in `SAMPLE_INTERVAL` seconds, so that drawing is not slowed down."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = float("-inf")
        self.newest: Freshness | None = None
        """Of the newest batch that was looked at."""

    def is_due(self, now: float) -> bool:
        """Whether to look at this batch; the caller does, then."""
        if now < self._next:
            return False
        with _core.Held.within(self._lock, 0.0) as is_mine:
            if is_mine:
                self._next = now + SAMPLE_INTERVAL
            return is_mine

    def saw(self, drawn: GatheredSamples, importance: NDArray[Any], left_out: float, newest: int) -> None:
        """Keep what this batch shows: its importance is [B]; `newest` is the newest version of a model."""
        self._keep(drawn.age, drawn.model_version, drawn.weight, importance, left_out, newest)

    def took(self, age: NDArray[Any], model_version: NDArray[Any], newest: int) -> None:
        """Keep what a take of rollouts shows: ages and versions of its entries [N], each of which counts alike."""
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
