"""What RLlib's sides share: Ray with two cores, and Adam as the other sides have it."""

from collections.abc import Callable

import gymnasium as gym
import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core.learner import Learner
from ray.tune.registry import register_env
from tasks import Run

ENVIRONMENT = "contest"
"""The name of the environment of the run."""


def begin(run: Run, make: Callable[[], gym.Env] | None = None) -> None:
    """Start Ray, in which the run's environment has its name."""
    torch.set_num_threads(1)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    register_env(ENVIRONMENT, lambda config: (make or run.make)())


def learner_of(algorithm: Algorithm, eps: float = 1e-8, fused: bool = True) -> Learner:
    """The learner in this process. Its optimisers become those of the other sides."""
    learner = algorithm.learner_group._learner
    for optimizer in learner._named_optimizers.values():
        for group in optimizer.param_groups:
            group.update(eps=eps, fused=fused)
    return learner
