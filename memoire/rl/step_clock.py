"""When each time step of a device begins and ends, and what became of them. Pure: the time is passed in.

    begin: the control goes out ─── capture: the observation is taken ─── end: the next step begins

A step that is late by at most `timeout` does not move the clock. A later one begins it anew.

How a worker and a trainer stand, for the pages of their processes: /metrics shows these figures.

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
"""Who made a step late: who computes the action; the device, or the machine that waited for it; a break."""
LATE_SHARE: Final = 0.1
"""A control that goes out later than this share of a time step after its time is late."""
PAUSE_STEPS: Final = 10.0
"""Time steps. Who was away for longer than that made a break, and did not compute an action."""
EDGES: Final = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 5.0)
"""Seconds: upper ends of the histogram's bins; one more bin has the rest."""
DURATIONS: Final = (
    "time_step_duration", "step_duration", "join_duration", "inference_duration", "send_control_duration",
    "get_obs_duration",
)  # fmt: skip
"""What is measured: from control to control; all of `step`, and its wait for the observation; what lies between two of
them; the two calls of the interface."""

CLOCKS: Final[Mapping[str, tuple[str, str]]] = {
    "step_duration": ("start_step", "end_step"), "join_duration": ("", "end_step_join"),
    "get_obs_duration": ("start_get_obs", "end_get_obs"),
    "send_control_duration": ("start_send_control", "end_send_control"),
}  # fmt: skip
"""Names of the times at which a duration begins and ends."""
MAX_TRACE: Final = 100_000
"""Durations of each kind that a trace keeps."""


class ElasticClock:
    """The times of the current step, in seconds of the caller's clock.

    Args:
        duration: Of a step.
        capture: From the begin of a step until its observation is taken.
        timeout: Seconds that a step may be late before the clock begins anew.
    """

    def __init__(self, duration: float, capture: float, timeout: float) -> None:
        self.duration, self._capture, self._timeout = duration, capture, timeout
        self.begin = self.capture_at = self.end = 0.0

    def change(self, duration: float, capture: float, timeout: float) -> None:
        """Have steps be like this from the next one on."""
        self.duration, self._capture, self._timeout = duration, capture, timeout

    def begin_anew(self, now: float) -> None:
        """A step begins now, whenever the last one ended."""
        self.begin, self.capture_at, self.end = now, now + self._capture, now + self.duration

    def begin_next(self, now: float) -> bool:
        """A step begins where the last one ended, if that is not too long ago; False if the clock begins anew."""
        is_in_time = now < self.end + self._timeout
        self.begin_anew(self.end if is_in_time else now)
        return is_in_time


@dataclass
class StepTimes:
    """How long steps took, and which were late."""

    steps: int = 0
    seconds: float = 0.0
    """Sum of all time steps, from control to control, without those after a pause."""
    late: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    """Late steps by cause."""
    timeouts: int = 0
    """Late steps after which the clock began anew."""
    counts: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))
    """Time steps by their length: bins that end at EDGES, and one for longer ones."""

    def add(self, seconds: float, cause: str, is_in_time: bool) -> None:
        """A time step of this length is over; its cause is "" unless it was late."""
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
        """Share of steps that the policy or the environment made late."""
        return (self.late["policy"] + self.late["environment"]) / self.steps if self.steps else 0.0

    def figures(self) -> dict[str, float]:
        """All of it by name, for a logger."""
        late = {f"late_steps_{cause}": float(count) for cause, count in self.late.items()}
        mean = self.seconds / self.steps if self.steps else 0.0
        return {"real_time_steps": float(self.steps), "step_seconds": mean, "late_share": self.late_share} | late


def cause_of(clock: ElasticClock, returned: float, called: float, began: float, *, is_paused: bool) -> str:
    """Why the step that begins now is late; "" if it is not.

    Args:
        clock: With the times of the step that is over.
        returned: When the caller had the last observation.
        called: When it came back with an action.
        began: When that action's control goes out.
        is_paused: Whether a break was announced.
    """
    latest = clock.end + LATE_SHARE * clock.duration
    if began <= latest:
        return ""
    if called <= latest:
        return "environment"
    is_away = is_paused or called - returned > PAUSE_STEPS * clock.duration
    return "pause" if is_away else "policy"


class MovingAverages:
    """Moving averages of durations, and of how far they lie from these.

    Args:
        share: Of the newest value in the average.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._averages: dict[str, tuple[float, float]] = {}

    def add(self, name: str, began: float, ended: float) -> None:
        """One more duration, by its two times in seconds."""
        seconds = ended - began
        average, deviation = self._averages.get(name, (seconds, 0.0))
        difference = seconds - average
        deviation += self._share * (abs(difference) - deviation)
        self._averages[name] = average + self._share * difference, deviation

    def rows(self) -> Mapping[str, tuple[float, float] | None]:
        """(average, mean deviation) in seconds by name; None where nothing came."""
        return {name: self._averages.get(name) for name in DURATIONS}


class Traces:
    """The newest `MAX_TRACE` durations of each kind, and when they began and ended."""

    def __init__(self) -> None:
        self._times: dict[str, deque[tuple[float, float]]] = {name: deque(maxlen=MAX_TRACE) for name in DURATIONS}

    def add(self, name: str, began: float, ended: float) -> None:
        """One more duration, by its two times in seconds."""
        self._times[name].append((began, ended))

    def rows(self) -> Mapping[str, Mapping[str, NDArray[np.float64]]]:
        """Seconds [T] of each kind: "clock" has when it began and ended, by `CLOCKS`, and "deltas" how long it took."""
        times = {name: np.array(each, np.float64).reshape(-1, 2) for name, each in self._times.items()}
        clock = {key: times[name][:, place] for name, keys in CLOCKS.items() for place, key in enumerate(keys) if key}
        return {"clock": clock, "deltas": {name: each[:, 1] - each[:, 0] for name, each in times.items()}}


@dataclass(frozen=True, slots=True)
class WorkerStanding:
    """What a worker has done, and how its clock went."""

    # fmt: off
    episodes: Annotated[int, counter("worker_episodes", "Episodes", "Training episodes that ended.")]
    steps: Annotated[int, counter("worker_steps", "Steps", "Steps of training episodes.")]
    tests: Annotated[int, counter("worker_test_episodes", "Test episodes", "Test episodes.")]
    version: Annotated[int, gauge("worker_model_version", "Version", "Version of the model that acts; 0 is none.")]
    step_times: Annotated[StepTimes | None, histogram("client_step_seconds", "Time of a step",
        "Seconds of a time step of a real-time environment, from control to control.")]
    """None without a real-time environment."""
    late: Annotated[dict[str, int], counter("client_late_steps", "Late steps", "Time steps that were late, by what "
        "made them so.", label="cause")]
    """{} without a real-time environment."""
    role: str = "worker"
    # fmt: on


@dataclass(frozen=True, slots=True)
class TrainerStanding:
    """How training goes, and what it waits for."""

    # fmt: off
    updates: Annotated[int, counter("trainer_updates", "Training steps", "Training steps, those of former processes "
        "included.")]
    samples: Annotated[int, counter("trainer_samples", "Samples", "Samples that came, those of former processes "
        "included.")]
    epoch: Annotated[int, gauge("trainer_epoch", "Epoch", "Epochs that are over.")]
    ratio: Annotated[float, gauge("trainer_ratio", "Steps per sample", "Training steps for each sample that came to "
        "this process.", formula="training steps ÷ samples", docs="trainers.md", unit="")]
    idle: Annotated[dict[str, float], counter("trainer_idle_seconds", "Idle", "Seconds of pauses, by what they waited "
        "for.", label="reason")]
    waits: Annotated[dict[str, float], gauge("trainer_waits", "Trainer", "1 while training pauses for this reason, "
        "else 0. It pauses until start_training samples have come, and while it has made "
        "max_training_steps_per_env_step steps for each sample.", label="reason", docs="trainers.md")]
    crc_passed: Annotated[int, counter("crc_passed", "Rebuilt alike", "Transitions that were rebuilt as their worker "
        "had recorded them.")]
    crc_failed: Annotated[int, counter("crc_failed", "Rebuilt otherwise", "Transitions that were rebuilt as something "
        "else.")]
    role: str = "trainer"
    # fmt: on


def times_of(env: Any) -> StepTimes | None:
    """The figures of a real-time environment; None of another one."""
    times = getattr(getattr(env, "unwrapped", env), "times", None)
    return times if isinstance(times, StepTimes) else None
