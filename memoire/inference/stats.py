"""What an inference node counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from memoire.accounting.timings import Timing, Timings
from memoire.security.exposure import Security

from .batching import REASONS

MAX_LINEAGE = 200
"""Ancestors of a start state that stats tell."""


@dataclass(slots=True)
class InferenceCounts:
    """Counted by the node's thread; any thread may read."""

    requests: int = 0
    rows: int = 0
    batched_rows: int = 0
    failures: int = 0
    weights_failures: int = 0
    computed: float = 0.0
    waits: Timings = field(default_factory=lambda: Timings(REASONS))
    """From a request's arrival to its batch."""
    durations: Timings = field(default_factory=lambda: Timings(REASONS))
    """From a request's arrival to its answer."""
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class JobStats:
    """The jobs of an agent at one moment. A node that gives none has zeros."""

    open: int = 0
    """Jobs that no observer has."""
    leased: int = 0
    """Jobs that an observer has."""
    observers: int = 0
    """Observers that were heard of within the time of a lease."""
    done: int = 0
    failed: int = 0
    """Jobs of which the observer's function raised an error."""
    cancelled: int = 0
    lost: int = 0
    """Jobs whose last lease ended without a result."""
    expired: int = 0
    """Leases that ended without a result."""
    late: int = 0
    """Results that came after their job was over."""


@dataclass(frozen=True, slots=True)
class StartsStats:
    """The start states of one origin at one moment; `rl.StartStates` keeps them."""

    name: str
    """Of the origin."""
    kept: int
    """States that episodes can begin with."""
    draws: int
    """Episodes that were begun from one of them."""
    best: float
    """Cost of the best state that was ever there."""
    first: float
    """Cost of the first state."""
    lineage: tuple[tuple[float, int], ...]
    """How the best state came about, from the first one on: the cost of each ancestor that is still kept, and how many
    steps it is from the first one. The newest `MAX_LINEAGE` of them.
    """


@dataclass(frozen=True, slots=True)
class InferenceStats:
    """An inference node at one moment; for whoever watches."""

    name: str
    endpoint: str
    topic: str
    """Of the models that it follows; "" if it follows none."""
    uptime: float
    requests: int
    """That were answered or refused, resends too."""
    rows: int
    """That were asked for."""
    batches: dict[str, int]
    """Calls of the function, by what made them due: full, everyone, wait."""
    batched_rows: int
    """Rows that the function was given, without those that fill a batch up."""
    expired: int
    """Requests that were dropped before the function saw them: nobody needed the answer any more."""
    resends: int
    failures: int
    """Batches for which the function raised, or whose outputs did not fit."""
    weights_failures: int
    """Models of which no weights could be made; the former ones are still used."""
    refused: dict[str, int]
    """Requests that were refused, by code."""
    queue_rows: int
    """Rows that wait now."""
    holders: dict[str, int]
    """Bytes that are held for clients, by holder."""
    budget: int
    """Bytes that all holders may have together, with those that some have of their own."""
    clients: int
    """That asked within `alive` seconds."""
    version: int
    """Of the weights."""
    waited_seconds: float
    """That requests waited for others, in all."""
    computed_seconds: float
    """That the function took, in all."""
    waits: dict[str, Timing]
    """From the arrival of requests to their batch, by what made the batch due."""
    durations: dict[str, Timing]
    """From their arrival to their answer, which waits for its turn to be sent; the same."""
    security: Security
    faults: int
    jobs: JobStats = field(default_factory=JobStats)
    """Of the agent that it belongs to, if there is one."""
    starts: tuple[StartsStats, ...] = ()
    """Of each origin of that agent."""
