"""Training of a trainer under TMRL's name: `TrainingOffline`, with its memory, agent and settings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from memoire.rl.training import Training

from .envs import GenericGymEnv
from .memory_dataloading import MemoryDataloading
from .training import TrainingAgent


@dataclass(eq=False)
class TrainingOffline:
    """Training on samples of workers; creates its memory and its agent.

    Args:
        env_cls: Class of an environment whose spaces are read; or (observation_space, action_space).
        memory_cls: Class of the memory: called with nb_steps and device.
        training_agent_cls: Class of the agent: called with observation_space, action_space and device.
        epochs, rounds, steps: Epochs in all, rounds of an epoch, training steps of a round.
        update_model_interval: Training steps between two published models.
        update_buffer_interval: Most training steps between two updates of the memory.
        max_training_steps_per_env_step: Training pauses above this ratio of training steps to samples.
        sleep_between_buffer_retrieval_attempts: Most seconds of a pause between two updates of the memory.
        profiling: True writes a profile of each epoch.
        agent_scheduler: Called as f(agent, epoch) at the begin of each epoch.
        start_training: Samples that the memory needs before training starts.
        device: Device of the training; None takes a usable GPU, else the CPU.

    Attributes:
        agent, memory: The created agent and memory.
        epoch, total_updates, total_samples: Progress of the training at the end of the last epoch.
    """

    env_cls: Any = GenericGymEnv
    memory_cls: Any = MemoryDataloading
    training_agent_cls: Any = TrainingAgent
    epochs: float = 10
    rounds: int = 50
    steps: int = 2000
    update_model_interval: int = 100
    update_buffer_interval: int = 100
    max_training_steps_per_env_step: float = 1.0
    sleep_between_buffer_retrieval_attempts: float = 0.1
    profiling: bool = False
    agent_scheduler: Callable[[Any, int], object] | None = None
    start_training: int = 0
    device: str | None = None

    def __post_init__(self) -> None:
        self.device = usable_device() if self.device is None else self.device
        observations, actions = self._spaces()
        self.memory = self.memory_cls(nb_steps=self.steps, device=self.device)
        self.agent = self.training_agent_cls(observation_space=observations, action_space=actions, device=self.device)
        self.epoch = self.total_updates = self.total_samples = 0

    def _spaces(self) -> tuple[Any, Any]:
        """Return observation and action space; creates an environment for it, without a reset, and closes that."""
        if isinstance(self.env_cls, tuple):
            observations, actions = self.env_cls
            return observations, actions
        env = self.env_cls()
        try:
            return env.observation_space, env.action_space
        finally:
            env.close()

    def plan(self) -> Training:
        """Return the settings of the training."""
        names, training_names = ({each.name for each in fields(cls)} for cls in (TrainingOffline, Training))
        settings: dict[str, Any] = {name: getattr(self, name) for name in names & training_names}
        return Training(longest_wait=self.sleep_between_buffer_retrieval_attempts, **settings)


TorchTrainingOffline = TrainingOffline
"""Name of TMRL 0.7 for a training whose device torch chooses; `TrainingOffline` asks torch, too."""


def usable_device() -> str:
    """Return "cuda" if torch is imported and can use a GPU, else "cpu"."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"
