"""What RLlib's sides share: Ray with its cores, and Adam as the other sides have it."""

import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core.learner import Learner
from ray.tune.registry import register_env
from tasks import Run

ENVIRONMENT = "contest"
"""The name of the environment of the run."""


def begin(run: Run) -> None:
    """Start Ray, in which the run's environment has its name."""
    torch.set_num_threads(1)
    ray.init(num_cpus=run.task.players + run.task.on_gpu, include_dashboard=False, log_to_driver=False)
    register_env(ENVIRONMENT, lambda config: run.make())


def learner_of(algorithm: Algorithm, eps: float = 1e-8) -> Learner:
    """The learner, which is in this process. RLlib has no setting for its optimisers' eps, nor for a fused step."""
    learner = algorithm.learner_group._learner
    for optimizer in learner._named_optimizers.values():
        for group in optimizer.param_groups:
            group.update(eps=eps, fused=True)
    return learner
