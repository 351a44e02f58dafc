"""Training loop of a trainer: epochs of rounds of steps, pauses with a reason; and the base class of agents.

    epoch = rounds x steps       steps: train(batch), publish a model every n, take new samples every m
      └ scheduler first, save and log last      pause: too few samples | too many steps for each sample

The clock is passed in; the caller's objects train, draw and publish.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Final, Protocol

import numpy as np

from memoire import Parameters
from memoire.errors import ParameterError

MAX_LEAD_STEPS: Final = 1000
"""Most steps that paced workers record ahead of the trainer, and that a restarted trainer still counts."""
REASONS: Final = ("start", "ratio")
"""Reasons of a pause: too few samples for the start, or too many training steps for the received samples."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training.

    Args:
        epochs: Number of epochs; may be infinite. After each epoch the state is saved and figures are logged.
        rounds, steps: Rounds of an epoch, and training steps of a round.
        batch_size: Samples of a training step.
        start_training: Samples that have to be available before the first step.
        max_training_steps_per_env_step: Most steps for each received sample; above that, training pauses.
        update_model_interval: Steps between two published models.
        update_model_seconds: Publish also after so many seconds; None does not.
        update_buffer_interval: Most steps between two updates of the experience.
        longest_wait: Most seconds for which a pause waits before it checks whether training goes on or ends.
        agent_scheduler: Called as f(agent, epoch) at the begin of each epoch.
        profiling: True writes a profile of each epoch.

    Raises:
        ParameterError: a number is out of its range.
    """

    epochs: float = 10
    rounds: int = 50
    steps: int = 2000
    batch_size: int = 256
    start_training: int = 0
    max_training_steps_per_env_step: float = 1.0
    update_model_interval: int = 100
    update_model_seconds: float | None = None
    update_buffer_interval: int = 100
    longest_wait: float = 0.1
    agent_scheduler: Callable[[Any, int], object] | None = None
    profiling: bool = False

    def __post_init__(self) -> None:
        least = {"epochs": 0, "rounds": 1, "steps": 1, "batch_size": 1, "start_training": 0,
                 "update_model_interval": 1, "update_buffer_interval": 1}  # fmt: skip
        for name, low in least.items():
            if not getattr(self, name) >= low:
                raise ParameterError(name, getattr(self, name), f"at least {low}")
        if not self.max_training_steps_per_env_step > 0.0:
            ratio = self.max_training_steps_per_env_step
            raise ParameterError("max_training_steps_per_env_step", ratio, "above 0")


class Experience(Protocol):
    """Source of a trainer's samples and batches."""

    @property
    def received(self) -> int:
        """Number of samples received by this object: steps of environments."""

    def update(self) -> None:
        """Store the samples that have arrived; returns at once."""

    def __len__(self) -> int:
        """Return the number of samples that can be drawn."""

    def batch(self) -> Any:
        """Return the next batch for the learner."""

    def give_priorities(self, batch: Any, priorities: Any) -> None:
        """Set the priorities of a batch's samples by TD errors [B]."""

    def wait(self, timeout: float) -> None:
        """Wait until samples arrive, for at most `timeout` seconds."""

    def close(self) -> None:
        """Stop receiving samples; the source is not used any more."""


class RatioGate:
    """Limit on training steps for each received sample.

    Counts of steps and samples begin with the gate. After a restart a trainer that draws from servers makes no steps
    for earlier samples, and evicted samples hold no step back. A trainer with its own memory restores both.

    Args:
        most: Most training steps for each sample.
    """

    def __init__(self, most: float) -> None:
        self._limit = most
        self.updates = 0
        """Training steps since the gate was created."""

    def is_open(self, received: int) -> bool:
        """Return True if the ratio allows another step, after `received` samples since the gate was created."""
        return self.updates + 1 <= self._limit * received

    def ratio(self, received: int) -> float:
        """Return the training steps for each sample so far."""
        return self.updates / received if received else 0.0


@dataclass
class TrainingState:
    """Progress of a training, as a checkpoint holds it."""

    epoch: int = 0
    """Number of epochs that are done."""
    updates: int = 0
    samples: int = 0
    """Number of samples that former processes received."""
    models: int = 0
    """Number of models that were published."""


@dataclass
class RoundStats:
    """Figures of a round: sums of the agent's figures, and the seconds of each activity."""

    steps: int = 0
    seconds: float = 0.0
    sampling: float = 0.0
    """Seconds that draws of batches took."""
    training: float = 0.0
    """Seconds that training steps took."""
    idle: dict[str, float] = field(default_factory=lambda: dict.fromkeys(REASONS, 0.0))
    """Seconds of pauses, by reason."""
    memory: int = 0
    """Samples that can be drawn at the end of the round."""
    _sums: dict[str, Any] = field(default_factory=dict)  # sums of the agent's figures
    _counts: Counter[str] = field(default_factory=Counter)

    def add(self, figures: Mapping[str, Any]) -> None:
        """Add the figures of a training step."""
        # Tensors are summed on their device, since reading a tensor would wait for the device.
        for name, value in figures.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._counts.update(figures.keys())

    def rows(self) -> dict[str, float]:
        """Return all figures by name; those of the agent, of draws and of steps are means."""
        sums = {name: value.item() if hasattr(value, "item") else value for name, value in self._sums.items()}
        means = {name: float(value) / self._counts[name] for name, value in sums.items()}
        idle = {f"idle_time_{name}": value for name, value in self.idle.items()}
        steps = max(1, self.steps)
        return means | {
            "round_time": self.seconds, "idle_time": sum(self.idle.values()),
            "sampling_duration": self.sampling / steps, "training_step_duration": self.training / steps,
            "memory_len": float(self.memory),
        } | idle  # fmt: skip


class TrainingLoop:
    """Training loop that follows a plan.

    Args:
        agent: The agent.
        experience: Source of the samples.
        publish: Called to publish the actor, at the intervals of the plan.
        plan: Settings of the training.
        is_over: Returns True to end the loop at once.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        agent: TrainingAgent,
        experience: Experience,
        publish: Callable[[], object],
        plan: Training,
        *,
        is_over: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.agent, self.experience, self.plan, self.state = agent, experience, plan, TrainingState()
        self.gate = RatioGate(plan.max_training_steps_per_env_step)
        self.reason = ""
        """Reason of the present pause, one of REASONS; "" while the loop trains."""
        self.idle = dict.fromkeys(REASONS, 0.0)
        """Seconds of all pauses, by reason."""
        self._publish, self._is_over, self._clock = publish, is_over, clock
        self._has_begun = False
        self._published_at = clock()
        self._stats = RoundStats()  # figures of the present round

    @property
    def samples(self) -> int:
        """Number of received samples, with those of former processes."""
        return self.state.samples + self.experience.received

    @property
    def is_done(self) -> bool:
        """True if all epochs are done."""
        return self.state.epoch >= self.plan.epochs

    def run_epoch(self, on_round: Callable[[RoundStats], object] = lambda stats: None) -> list[RoundStats]:
        """Run one epoch and return its rounds' figures. An epoch that `is_over` ends early is not counted."""
        if self.plan.agent_scheduler is not None:
            self.plan.agent_scheduler(self.agent, self.state.epoch)
        stats: list[RoundStats] = []
        for _ in range(self.plan.rounds):
            if not self._round():
                return stats
            stats.append(self._stats)
            on_round(self._stats)
        self.state.epoch += 1
        return stats

    def _round(self) -> bool:
        """Run one round. Return False if `is_over` ended it early."""
        began, self._stats = self._clock(), RoundStats()
        for _ in range(self.plan.steps):
            if self.state.updates % self.plan.update_buffer_interval == 0:
                self.experience.update()
            if not self._await_turn():
                return False
            self._step()
        self._stats.seconds, self._stats.memory = self._clock() - began, len(self.experience)
        return True

    def _step(self) -> None:
        began = self._clock()
        batch = self.experience.batch()
        drawn_at = self._clock()
        figures = dict(self.agent.train(batch) or {})
        priorities = figures.pop("priorities", None)
        if priorities is not None:
            self.experience.give_priorities(batch, priorities)
        stats = self._stats
        stats.add(figures)
        stats.steps += 1
        stats.sampling += drawn_at - began
        stats.training += self._clock() - drawn_at
        self.state.updates += 1
        self.gate.updates += 1
        if self._is_due():
            self.publish()

    def _is_due(self) -> bool:
        if self.state.updates % self.plan.update_model_interval == 0:
            return True
        seconds = self.plan.update_model_seconds
        return seconds is not None and self._clock() - self._published_at >= seconds

    def publish(self) -> None:
        """Publish the actor's present model."""
        self._publish()
        self.state.models += 1
        self._published_at = self._clock()

    def _await_turn(self) -> bool:
        """Pause while there are too few samples. Return False if training has to end."""
        while (reason := self._wait_reason()) and not self._is_over():
            began, self.reason = self._clock(), reason
            self.experience.wait(self.plan.longest_wait)
            self.experience.update()
            waited = self._clock() - began
            self.idle[reason] += waited
            self._stats.idle[reason] += waited
        is_over = self._is_over()
        self.reason = ""
        return not is_over

    def _wait_reason(self) -> str:
        if not self._has_begun:
            self._has_begun = len(self.experience) >= max(1, self.plan.start_training)
        if not self._has_begun:
            return "start"
        return "" if self.gate.is_open(self.experience.received) else "ratio"

    def explain(self) -> str:
        """Return the reason of the pause as a sentence; "" while the loop trains."""
        if self.reason == "start":
            return (
                f"waiting for samples: {len(self.experience)} of start_training={max(1, self.plan.start_training)} "
                "available"
            )
        if self.reason == "ratio":
            return (
                f"waiting for samples: {self.gate.updates} training steps made for {self.experience.received} "
                f"samples, the limit is max_training_steps_per_env_step={self.plan.max_training_steps_per_env_step:g}"
            )
        return ""


def finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that are finite numbers."""
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}


GAMMA: Final = ("gamma", "discount")
"""Names of attributes that hold an agent's discount, if they are numbers."""


class TrainingAgent(ABC):
    """Base class of agents: learns from batches and returns the actor.

    Args:
        observation_space, action_space: Spaces of the environment.
        device: Device of the batches and of the learning; None leaves batches in NumPy.

    Attributes:
        fixed: Names of attributes that must have the checkpoint's value when an agent continues from a checkpoint; None
            takes the checkpoint's value.
        gamma: Optional: the agent's discount. A `Trainer` sets the table's on an agent with None, and refuses another.
    """

    fixed: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, observation_space: Any, action_space: Any, device: Any) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.device = device

    @abstractmethod
    def train(self, batch: Any) -> dict[str, Any]:
        """Make one training step and return its figures.

        Args:
            batch: Batch of a table: .obs, .action, .reward, .discount, .next_obs, .importance and .ids, each [B, ...].

        Returns:
            Figures by name, as numbers or tensors of one element. "priorities" is not a figure but TD errors [B], which
            set the priorities of these samples.
        """
        raise NotImplementedError

    @abstractmethod
    def get_actor(self) -> Any:
        """Return the actor whose weights are published: a torch module, a state_dict, or arrays by name."""
        raise NotImplementedError


def check_gamma(owner: Any, discount: Sequence[float]) -> None:
    """Raise ParameterError if an agent or algorithm has another discount than the table that makes its batches.

    Args:
        discount: Discount of the table: one per reward dimension, or one for all.
    """
    for name in GAMMA:
        value: Any = getattr(owner, name, None)
        is_number = isinstance(value, Real | list | tuple | np.ndarray)
        numbers = np.ravel(value if is_number else ())
        if numbers.size and not np.all(numbers == (discount if numbers.size == len(discount) else discount[0])):
            table_discount = discount[0] if len(set(discount)) == 1 else tuple(discount)
            raise ParameterError(name, value, f"{table_discount}, which the table has, or left out")


def check_model_topic(parameters: Parameters, topic: str) -> None:
    """Raise ParameterError for models of another topic than the table's, if the table limits models' age.

    Raises:
        ParameterError: the topics differ; names both.
    """
    if parameters.max_model_lag is not None and parameters.model_topic not in (None, topic):
        expected = (
            f"{parameters.model_topic!r}, the model_topic of the table, which has "
            f"max_model_lag={parameters.max_model_lag}"
        )
        raise ParameterError("topic", topic, expected)
