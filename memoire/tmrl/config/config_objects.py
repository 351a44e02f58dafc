"""Default training of a `Trainer`, `TRAINER`: SAC on the environment that the configuration file names.

The file is read when the training is created. An import makes no request and needs no torch.
"""

from __future__ import annotations

from typing import Any, Final

import memoire.tmrl.config.config_constants as cfg
from memoire.rl.pipeline import partial

DEFAULT_ENV: Final = "Pendulum-v1"
GAMMA: Final = 0.99
"""Discount of the default agent."""


def env_id() -> str:
    """Return the id of the environment in the file, "ENV": {"id": ...}; by default Pendulum-v1."""
    entry = cfg.TMRL_CONFIG.get("ENV", {})
    return str(entry.get("id", DEFAULT_ENV)) if isinstance(entry, dict) else DEFAULT_ENV


def make_env() -> Any:
    """Make the environment that the configuration file names."""
    from memoire.tmrl.envs import GenericGymEnv

    return GenericGymEnv(id=env_id())


def make_actor(observation_space: Any, action_space: Any) -> Any:
    """Make the policy of the configured environment."""
    from memoire.rl.sac import GaussianPolicy

    return GaussianPolicy(observation_space, action_space)


def make_agent(observation_space: Any, action_space: Any, device: Any) -> Any:
    """Make the SAC agent of the configured environment."""
    from memoire.rl.sac import SAC

    return SAC(observation_space, action_space, device, gamma=GAMMA)


def make_training(**changes: Any) -> Any:
    """Make a `TrainingOffline` of SAC on the configured environment, with these fields changed."""
    from memoire.tmrl.memory import GenericMemory
    from memoire.tmrl.training_offline import TrainingOffline

    settings = {"env_cls": make_env, "memory_cls": GenericMemory, "training_agent_cls": make_agent} | changes
    return TrainingOffline(**settings)


TRAINER: Final = partial(make_training)
"""The default of `Trainer`'s training_cls."""
