"""How a trainer's time goes: epochs of rounds of steps, pauses with a reason, and what is done between steps.

    epoch = rounds x steps       steps: train(batch), publish each n, look for new samples each m
      └ scheduler first, save and log last      pause: too few samples | too many steps for each sample

Pure but for the clock that is passed in: what trains, draws and publishes are objects of the caller's.

What learns, for a `Trainer`: any algorithm with two methods.
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

LEAD: Final = 1000
"""Steps that paced workers record ahead of the trainer, and that a trainer which goes on after a restart still counts.
"""
REASONS: Final = ("start", "ratio")
"""Why a trainer pauses: too few samples to begin with, or too many steps for the samples that came."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How to train.

    Args:
        epochs: Until the end; may be infinite. After each the state is saved and figures are logged.
        rounds, steps: Rounds of an epoch, and training steps of a round.
        batch_size: Samples of a step.
        start_training: Samples that have to be there before the first step.
        max_training_steps_per_env_step: Steps for each sample that came; above that, training pauses.
        update_model_interval: Steps between two models that are published.
        update_model_seconds: Publish after so many seconds, too; None does not.
        update_buffer_interval: Steps after which new samples are looked for, at the latest.
        longest_wait: Seconds after which a pause looks whether it is to end, unless samples come before.
        agent_scheduler: Called as f(agent, epoch) first in each epoch.
        profiling: Write a profile of each epoch.

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
            found = self.max_training_steps_per_env_step
            raise ParameterError("max_training_steps_per_env_step", found, "above 0")


class Experience(Protocol):
    """Where samples come from."""

    @property
    def received(self) -> int:
        """Samples that came, since this was made: steps of environments."""

    def update(self) -> None:
        """Take in what came; returns at once."""

    def __len__(self) -> int:
        """Samples that can be drawn."""

    def batch(self) -> Any:
        """The next batch for the learner."""

    def give_priorities(self, batch: Any, priorities: Any) -> None:
        """Set the priorities of a batch's samples by TD errors [B]."""

    def wait(self, timeout: float) -> None:
        """Return when samples came, or after so many seconds."""

    def close(self) -> None:
        """No more samples are wanted."""


class RatioGate:
    """Whether another training step may be made, by the samples that came.

    Counts from where it was made: a trainer that draws from servers owes no steps for samples that came before a
    restart, and samples that are gone hold no step back. One with a memory of its own puts both counts back.

    Args:
        most: Steps for each sample.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self.updates = 0
        """Steps since this was made."""

    def is_open(self, received: int) -> bool:
        """Whether a step more is within the ratio, with so many samples since this was made."""
        return self.updates + 1 <= self._most * received

    def ratio(self, received: int) -> float:
        """Steps for each sample so far."""
        return self.updates / received if received else 0.0


@dataclass
class TrainingState:
    """Where training is; what a checkpoint holds."""

    epoch: int = 0
    """Epochs that are over."""
    updates: int = 0
    samples: int = 0
    """Samples that came before this process began."""
    models: int = 0
    """Models that were published."""


@dataclass
class RoundStats:
    """What a round came to: the agent's figures, and where the time went."""

    steps: int = 0
    seconds: float = 0.0
    sampling: float = 0.0
    """Seconds of draws."""
    training: float = 0.0
    """Seconds of training steps."""
    idle: dict[str, float] = field(default_factory=lambda: dict.fromkeys(REASONS, 0.0))
    """Seconds of pauses, by reason."""
    memory: int = 0
    """Samples that can be drawn, at its end."""
    _sums: dict[str, Any] = field(default_factory=dict)  # of the agent's figures
    _counts: Counter[str] = field(default_factory=Counter)

    def add(self, figures: Mapping[str, Any]) -> None:
        """A training step gave these figures."""
        # Tensors are added up where they are: reading each one would wait for the device.
        for name, value in figures.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._counts.update(figures.keys())

    def rows(self) -> dict[str, float]:
        """All of it as figures by name: those of the agent, draws and steps in the mean."""
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
    """Trains by a plan.

    Args:
        agent: What trains.
        experience: Where samples come from.
        publish: Called each so many steps: publishes the actor.
        plan: How to train.
        is_over: Whether to end at once.
        clock: Monotonic seconds.
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
        """Why it pauses now; "" while it trains."""
        self.idle = dict.fromkeys(REASONS, 0.0)
        """Seconds of all pauses, by reason."""
        self._publish, self._is_over, self._clock = publish, is_over, clock
        self._has_begun = False
        self._published_at = clock()
        self._stats = RoundStats()  # of the present round

    @property
    def samples(self) -> int:
        """Samples that came, former processes included."""
        return self.state.samples + self.experience.received

    @property
    def is_done(self) -> bool:
        """Whether all epochs are over."""
        return self.state.epoch >= self.plan.epochs

    def run_epoch(self, on_round: Callable[[RoundStats], object] = lambda stats: None) -> list[RoundStats]:
        """One epoch; what each round came to. Ends early if `is_over` says so; then the epoch does not count."""
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
        """Whether all of its steps were made."""
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
        drawn = self._clock()
        figures = dict(self.agent.train(batch) or {})
        priorities = figures.pop("priorities", None)
        if priorities is not None:
            self.experience.give_priorities(batch, priorities)
        stats = self._stats
        stats.add(figures)
        stats.steps += 1
        stats.sampling += drawn - began
        stats.training += self._clock() - drawn
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
        """Publish what acts now."""
        self._publish()
        self.state.models += 1
        self._published_at = self._clock()

    def _await_turn(self) -> bool:
        """Pause while there are too few samples; False if training is to end."""
        while (reason := self._why_wait()) and not self._is_over():
            began, self.reason = self._clock(), reason
            self.experience.wait(self.plan.longest_wait)
            self.experience.update()
            waited = self._clock() - began
            self.idle[reason] += waited
            self._stats.idle[reason] += waited
        is_over = self._is_over()
        self.reason = ""
        return not is_over

    def _why_wait(self) -> str:
        if not self._has_begun:
            self._has_begun = len(self.experience) >= max(1, self.plan.start_training)
        if not self._has_begun:
            return "start"
        return "" if self.gate.is_open(self.experience.received) else "ratio"

    def explain(self) -> str:
        """Why it pauses, as a sentence; "" while it trains."""
        if self.reason == "start":
            return (
                f"waiting for samples: {len(self.experience)} of start_training={max(1, self.plan.start_training)} "
                "are there"
            )
        if self.reason == "ratio":
            return (
                f"waiting for samples: {self.gate.updates} training steps were made for {self.experience.received} "
                f"samples, and max_training_steps_per_env_step={self.plan.max_training_steps_per_env_step:g}"
            )
        return ""


def finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Those figures that are finite numbers."""
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}


GAMMA: Final = ("gamma", "discount")
"""Attributes that are an agent's discount, if they are numbers."""


class TrainingAgent(ABC):
    """Learns from batches, and gives what acts.

    Args:
        observation_space, action_space: Of the environment.
        device: Where batches are, and where it learns; None leaves batches as they are drawn, in NumPy.

    Attributes:
        fixed: Names of attributes that an agent which goes on from a checkpoint cannot be made with otherwise; None
            takes the checkpoint's.
        gamma: If there is one: its discount. A `Trainer` gives an agent that has None the table's, and refuses another.
    """

    fixed: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, observation_space: Any, action_space: Any, device: Any) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.device = device

    @abstractmethod
    def train(self, batch: Any) -> dict[str, Any]:
        """One training step.

        Args:
            batch: Of a table: .obs, .action, .reward, .discount, .next_obs, .importance and .ids, each [B, ...].

        Returns:
            Figures by name, as numbers or tensors of one. "priorities" is none: TD errors [B], which set the
            priorities of these samples.
        """
        raise NotImplementedError

    @abstractmethod
    def get_actor(self) -> Any:
        """What acts now: its weights are published. A torch module, a state_dict, or arrays by name."""
        raise NotImplementedError


def check_gamma(owner: Any, discount: Sequence[float]) -> None:
    """Refuse an agent or algorithm that discounts otherwise than its table, whose batches are made by that discount.

    Args:
        discount: Of the table: per reward dimension, or one number for all.

    Raises:
        ParameterError: names both values.
    """
    for name in GAMMA:
        value: Any = getattr(owner, name, None)
        is_number = isinstance(value, Real | list | tuple | np.ndarray)
        numbers = np.ravel(value if is_number else ())
        if numbers.size and not np.all(numbers == (discount if numbers.size == len(discount) else discount[0])):
            own = discount[0] if len(set(discount)) == 1 else tuple(discount)
            raise ParameterError(name, value, f"{own}, which the table has, or left out")


def check_model_topic(parameters: Parameters, topic: str) -> None:
    """Refuse models of another topic than the table's, if it limits how old the model of an entry may be.

    Raises:
        ParameterError: names both topics.
    """
    if parameters.max_model_lag is not None and parameters.model_topic not in (None, topic):
        expected = (
            f"{parameters.model_topic!r}, the model_topic of the table, which has "
            f"max_model_lag={parameters.max_model_lag}"
        )
        raise ParameterError("topic", topic, expected)
