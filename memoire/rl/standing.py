"""How a worker and a trainer stand, for the pages of their processes: /metrics shows these figures.

NodePages("*:8080", worker)       a `RolloutWorker` or `Trainer`, or its client or reader
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .step_clock import EDGES, StepTimes


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Time steps of a real-time environment, in buckets."""

    seconds: float
    """Of all of them."""
    counts: tuple[int, ...]
    """In each bucket: up to each of `bounds`, and beyond."""

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper ends of the buckets, in seconds."""
        return EDGES


@dataclass(frozen=True, slots=True)
class WorkerStanding:
    """What a worker has done, and how its clock went."""

    episodes: int
    steps: int
    tests: int
    """Test episodes."""
    version: int
    """Of the model that acts; 0 is none."""
    step_times: StepTimings | None
    """None without a real-time environment."""
    late: dict[str, int]
    """Late steps by cause; {} without a real-time environment."""
    role: str = "worker"


@dataclass(frozen=True, slots=True)
class TrainerStanding:
    """How training goes, and what it waits for."""

    updates: int
    samples: int
    epoch: int
    ratio: float
    """Training steps for each sample that came to this process."""
    idle: dict[str, float]
    """Seconds of pauses, by reason."""
    waits: dict[str, float]
    """By reason 1 while it pauses for it, else 0."""
    crc_passed: int
    crc_failed: int
    """Transitions that were compared with what their worker recorded."""
    role: str = "trainer"


def timings_of(times: StepTimes | None) -> StepTimings | None:
    """A copy for pages."""
    return None if times is None else StepTimings(times.seconds, tuple(times.counts))


def times_of(env: Any) -> StepTimes | None:
    """The figures of a real-time environment; None of another one."""
    times = getattr(getattr(env, "unwrapped", env), "times", None)
    return times if isinstance(times, StepTimes) else None
