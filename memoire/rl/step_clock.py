"""Clock of a device's time steps, durations and lateness of steps, and the figures of workers and trainers.

    begin: the control is sent ─── capture: the observation is taken ─── end: the next step begins

If a step is late by at most `timeout`, the clock goes on; else it restarts. No function reads a clock: times are passed
in. /metrics shows the figures of a worker or trainer:

NodePages("*:8080", worker)       a `RolloutWorker` or `Trainer`, or its client or reader
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire.kinds import counter, gauge, histogram

CAUSES: Final = ("policy", "environment", "pause")
"""Causes of a late step: the policy was slow; the device or this machine was slow; the caller made a pause."""
LATE_SHARE: Final = 0.1
"""A step is late if its control is sent later than this share of a time step after its time."""
PAUSE_STEPS: Final = 10.0
"""Time steps without a call after which the caller counts as paused, not as a slow policy."""
EDGES: Final = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 5.0)
"""Upper ends of the histogram's bins, in seconds; one more bin holds longer steps."""
DURATIONS: Final = (
    "time_step_duration", "step_duration", "join_duration", "inference_duration", "send_control_duration",
    "get_obs_duration",
)  # fmt: skip
"""Names of the measured durations: between two controls; the whole of `step`; its wait for the observation; between two
calls of `step`; the interface's two calls."""

CLOCKS: Final[Mapping[str, tuple[str, str]]] = {
    "step_duration": ("start_step", "end_step"), "join_duration": ("", "end_step_join"),
    "get_obs_duration": ("start_get_obs", "end_get_obs"),
    "send_control_duration": ("start_send_control", "end_send_control"),
}  # fmt: skip
"""Names of the times at which a duration begins and ends."""
MAX_TRACE: Final = 100_000
"""Most durations of each kind that a trace keeps."""


class ElasticClock:
    """Clock of one time step after the other, in seconds of the caller's clock.

    Args:
        duration: Seconds of a step.
        capture: Seconds from the begin of a step until its observation is taken.
        timeout: Seconds that a step may be late before the clock restarts.
    """

    def __init__(self, duration: float, capture: float, timeout: float) -> None:
        self.duration, self._capture, self._timeout = duration, capture, timeout
        self.begin = self.capture_at = self.end = 0.0

    def change(self, duration: float, capture: float, timeout: float) -> None:
        """Set these times from the next step on."""
        self.duration, self._capture, self._timeout = duration, capture, timeout

    def restart(self, now: float) -> None:
        """Begin a step at `now`."""
        self.begin, self.capture_at, self.end = now, now + self._capture, now + self.duration

    def begin_next(self, now: float) -> bool:
        """Begin a step at the end of the last one and return True; if that is too old, begin now, return False."""
        is_in_time = now < self.end + self._timeout
        self.restart(self.end if is_in_time else now)
        return is_in_time


@dataclass
class StepTimes:
    """Durations of time steps, and counts of late steps."""

    steps: int = 0
    seconds: float = 0.0
    """Sum of all time steps, from control to control, without those after a pause."""
    late: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    """Number of late steps by cause."""
    timeouts: int = 0
    """Number of late steps that restarted the clock."""
    counts: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))
    """Histogram of durations: bins that end at EDGES, and one for longer steps."""

    def add(self, seconds: float, cause: str, is_in_time: bool) -> None:
        """Add a time step of this length; the cause is "" if it was not late."""
        if cause != "pause":
            self.steps += 1
            self.seconds += seconds
            self.counts[bisect_left(EDGES, seconds)] += 1
        if cause:
            self.late[cause] += 1
            self.timeouts += not is_in_time

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper ends of the bins, in seconds."""
        return EDGES

    @property
    def late_share(self) -> float:
        """Share of steps that were late because of the policy or the environment."""
        return (self.late["policy"] + self.late["environment"]) / self.steps if self.steps else 0.0

    def figures(self) -> dict[str, float]:
        """Return the figures by name, for a logger."""
        late = {f"late_steps_{cause}": float(count) for cause, count in self.late.items()}
        mean = self.seconds / self.steps if self.steps else 0.0
        return {"real_time_steps": float(self.steps), "step_seconds": mean, "late_share": self.late_share} | late


def cause_of(clock: ElasticClock, returned: float, called: float, began: float, *, is_paused: bool) -> str:
    """Return the cause of a late step that begins now, one of CAUSES; "" if it is not late.

    Args:
        clock: Clock with the times of the step that ended.
        returned: Time at which the caller got the last observation.
        called: Time at which the caller called `step` with the action.
        began: Time at which the action's control is sent.
        is_paused: True if the caller announced a pause.
    """
    latest = clock.end + LATE_SHARE * clock.duration
    if began <= latest:
        return ""
    if called <= latest:
        return "environment"
    is_away = is_paused or called - returned > PAUSE_STEPS * clock.duration
    return "pause" if is_away else "policy"


class MovingAverages:
    """Moving averages of durations and of their absolute deviations.

    Args:
        share: Share of the newest value in the average.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._averages: dict[str, tuple[float, float]] = {}

    def add(self, name: str, began: float, ended: float) -> None:
        """Add a duration, from its two times in seconds."""
        seconds = ended - began
        average, deviation = self._averages.get(name, (seconds, 0.0))
        difference = seconds - average
        deviation += self._share * (abs(difference) - deviation)
        self._averages[name] = average + self._share * difference, deviation

    def rows(self) -> Mapping[str, tuple[float, float] | None]:
        """Return (average, mean deviation) in seconds by name; None without durations."""
        return {name: self._averages.get(name) for name in DURATIONS}


class Traces:
    """The newest `MAX_TRACE` durations of each kind, with their begins and ends."""

    def __init__(self) -> None:
        self._times: dict[str, deque[tuple[float, float]]] = {name: deque(maxlen=MAX_TRACE) for name in DURATIONS}

    def add(self, name: str, began: float, ended: float) -> None:
        """Add a duration, from its two times in seconds."""
        self._times[name].append((began, ended))

    def rows(self) -> Mapping[str, Mapping[str, NDArray[np.float64]]]:
        """Return seconds [T]: "clock" has begins and ends by the names in `CLOCKS`, "deltas" the durations."""
        times = {name: np.array(each, np.float64).reshape(-1, 2) for name, each in self._times.items()}
        clock = {key: times[name][:, index] for name, keys in CLOCKS.items() for index, key in enumerate(keys) if key}
        return {"clock": clock, "deltas": {name: each[:, 1] - each[:, 0] for name, each in times.items()}}


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Figures of a worker: its episodes, its model and its real-time clock."""

    # fmt: off
    episodes: Annotated[int, counter("worker_episodes", "Episodes", "Training episodes that ended.")]
    steps: Annotated[int, counter("worker_steps", "Steps", "Steps of training episodes.")]
    tests: Annotated[int, counter("worker_test_episodes", "Test episodes", "Test episodes.")]
    version: Annotated[int, gauge("worker_model_version", "Version", "Version of the model that acts; 0 without one.")]
    step_times: Annotated[StepTimes | None, histogram("client_step_seconds", "Time of a step",
        "Seconds of a time step of a real-time environment, from control to control.")]
    """None without a real-time environment."""
    late: Annotated[dict[str, int], counter("client_late_steps", "Late steps", "Late time steps by cause.",
        label="cause")]
    """{} without a real-time environment."""
    role: str = "worker"
    # fmt: on


@dataclass(frozen=True, slots=True)
class TrainerStats:
    """Figures of a trainer: its progress, and the reason for which it waits."""

    # fmt: off
    updates: Annotated[int, counter("trainer_updates", "Training steps", "Training steps, those of former processes "
        "included.")]
    samples: Annotated[int, counter("trainer_samples", "Samples", "Samples that the trainer received, those of former "
        "processes included.")]
    epoch: Annotated[int, gauge("trainer_epoch", "Epoch", "Epochs that are done.")]
    ratio: Annotated[float, gauge("trainer_ratio", "Steps per sample", "Training steps for each sample that this "
        "process received.", formula="training steps ÷ samples", docs="trainers.md", unit="")]
    idle: Annotated[dict[str, float], counter("trainer_idle_seconds", "Idle", "Seconds of pauses by reason.",
        label="reason")]
    waits: Annotated[dict[str, float], gauge("trainer_waits", "Trainer", "1 while training pauses for this reason, "
        "else 0. Training pauses until start_training samples have arrived, and after "
        "max_training_steps_per_env_step training steps for each sample.", label="reason", docs="trainers.md")]
    crc_passed: Annotated[int, counter("crc_passed", "Rebuilt correctly", "Transitions rebuilt equal to their worker's "
        "record.")]
    crc_failed: Annotated[int, counter("crc_failed", "Rebuilt wrongly", "Transitions rebuilt different from their "
        "worker's record.")]
    role: str = "trainer"
    # fmt: on


def times_of(env: Any) -> StepTimes | None:
    """Return the step times of a real-time environment; None for other environments."""
    times = getattr(getattr(env, "unwrapped", env), "times", None)
    return times if isinstance(times, StepTimes) else None
