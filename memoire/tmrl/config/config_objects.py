"""`TRAINER`: what `Trainer` trains unless it is told otherwise: SAC, on the environment that the file names.

It is read and made when it is called: importing this asks nobody and needs no torch.
"""

from __future__ import annotations

from typing import Any, Final

import memoire.tmrl.config.config_constants as cfg
from memoire.rl.pipeline import partial

DEFAULT_ENV: Final = "Pendulum-v1"
GAMMA: Final = 0.99
"""Discount of the default agent."""


def env_id() -> str:
    """The environment that the file names: "ENV": {"id": ...}; Pendulum-v1 unless it does."""
    found = cfg.TMRL_CONFIG.get("ENV", {})
    return str(found.get("id", DEFAULT_ENV)) if isinstance(found, dict) else DEFAULT_ENV


def make_env() -> Any:
    """The configured environment."""
    from memoire.tmrl.envs import GenericGymEnv

    return GenericGymEnv(id=env_id())


def make_actor(observation_space: Any, action_space: Any) -> Any:
    """What acts in it."""
    from memoire.rl.sac import GaussianPolicy

    return GaussianPolicy(observation_space, action_space)


def make_agent(observation_space: Any, action_space: Any, device: Any) -> Any:
    """What learns to act in it."""
    from memoire.rl.sac import SAC

    return SAC(observation_space, action_space, device, gamma=GAMMA)


def make_training(**changes: Any) -> Any:
    """A `TrainingOffline` of SAC on the configured environment, with these fields changed."""
    from memoire.tmrl.memory import GenericMemory
    from memoire.tmrl.training_offline import TrainingOffline

    given = {"env_cls": make_env, "memory_cls": GenericMemory, "training_agent_cls": make_agent} | changes
    return TrainingOffline(**given)


TRAINER: Final = partial(make_training)
"""The default of `Trainer`'s training_cls."""
