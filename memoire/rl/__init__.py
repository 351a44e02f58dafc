"""Programs that learn, and what they are made of: see docs/on-policy.md, docs/trainers.md and docs/real-time.md.

    Collector               environments and a policy fill a table of rollouts
    Collection              the same in a file, for `python -m memoire.rl collect URL FILE` and infer
    rollout_schema          of such a table
    Pipeline                a run in one file, which `python -m memoire.rl up FILE` starts: Training, Work, Goal, replay
    RolloutWorker, Trainer  its two ends: episodes by the newest policy; training steps of what they send
    TrainingAgent, SAC      what learns: two methods, and one of these in torch, with a GaussianPolicy
    try_policy              test episodes by a model in a file
    MlpPolicy, Policy       what acts: in NumPy, or anything with the same method
    RemoteActor             or inference nodes, that of a learner for instance
    ActorCritic, PPO        the network and the algorithm; these need torch
    RecurrentActorCritic, RecurrentPPO      the same with a memory
    OnPolicyLearner         a server with a table of rollouts, paced by the models that it publishes; needs torch
    World                   several learners that learn as one, as torchrun starts them; needs torch
    Agent, Observer         episodes that a learner gives to other processes, whose actions it computes in batches
    StartStates             where such episodes begin: the best states that were found
    masked, ragged_minibatches, rollouts_of    of what observers record
    Moments                 running mean and variance
    RealTimeEnv             an environment under a real clock, around a RealTimeInterface; DummyDrone is a device for it
    GenericMemory           samples of workers in rings of columns; a Codec restores them, ActionHistory is a part of it
    partial                 a class of which some arguments are given later
    address_of_rank         where the server of one of several learners is
    weights                 named arrays as bytes and files

Names are imported when they are used: `import memoire.rl` needs neither torch nor Gymnasium.
"""

import importlib
from typing import TYPE_CHECKING, Any

from memoire.errors import NotInstalled

if TYPE_CHECKING:
    from memoire.rl import weights as weights
    from memoire.rl.codec import ActionHistory as ActionHistory
    from memoire.rl.codec import Codec as Codec
    from memoire.rl.drone import DummyDrone as DummyDrone
    from memoire.rl.memory import GenericMemory as GenericMemory
    from memoire.rl.observers.observer import Ask as Ask
    from memoire.rl.observers.observer import Observer as Observer
    from memoire.rl.pipeline import Collection as Collection
    from memoire.rl.pipeline import Goal as Goal
    from memoire.rl.pipeline import Pipeline as Pipeline
    from memoire.rl.pipeline import Work as Work
    from memoire.rl.pipeline import partial as partial
    from memoire.rl.pipeline import replay as replay
    from memoire.rl.policies import MlpPolicy as MlpPolicy
    from memoire.rl.policies import Policy as Policy
    from memoire.rl.realtime import RealTimeEnv as RealTimeEnv
    from memoire.rl.realtime import RealTimeInterface as RealTimeInterface
    from memoire.rl.sac import SAC as SAC
    from memoire.rl.sac import GaussianPolicy as GaussianPolicy

    from .addresses import address_of_rank as address_of_rank
    from .networks import ActorCritic as ActorCritic
    from .observers.observers import Agent as Agent
    from .observers.starts import ObservedEpisode as ObservedEpisode
    from .observers.starts import Start as Start
    from .observers.starts import StartStates as StartStates
    from .observers.starts import masked as masked
    from .observers.starts import padded_columns as padded_columns
    from .observers.starts import ragged_minibatches as ragged_minibatches
    from .observers.starts import rollouts_of as rollouts_of
    from .onpolicy.checkpoint import World as World
    from .onpolicy.collector import Collected as Collected
    from .onpolicy.collector import Collector as Collector
    from .onpolicy.collector import RemoteActor as RemoteActor
    from .onpolicy.learner import OnPolicyLearner as OnPolicyLearner
    from .onpolicy.ppo import PPO as PPO
    from .onpolicy.ppo import RecurrentActorCritic as RecurrentActorCritic
    from .onpolicy.ppo import RecurrentPPO as RecurrentPPO
    from .policies import Moments as Moments
    from .policies import rollout_schema as rollout_schema
    from .trainer.trainer import Trainer as Trainer
    from .trainer.training import Training as Training
    from .trainer.training import TrainingAgent as TrainingAgent
    from .trainer.worker import EpisodeResult as EpisodeResult
    from .trainer.worker import RolloutWorker as RolloutWorker
    from .trainer.worker import try_policy as try_policy

_HOMES = {
    "ActorCritic": "memoire.rl.networks",
    "OnPolicyLearner": "memoire.rl.onpolicy.learner",
    "PPO": "memoire.rl.onpolicy.ppo",
    "World": "memoire.rl.onpolicy.checkpoint",
    "ActionHistory": "memoire.rl.codec",
    "Codec": "memoire.rl.codec",
    "address_of_rank": "memoire.rl.addresses",
    "Agent": "memoire.rl.observers.observers",
    "Ask": "memoire.rl.observers.observer",
    "Observer": "memoire.rl.observers.observer",
    "ObservedEpisode": "memoire.rl.observers.starts",
    "masked": "memoire.rl.observers.starts",
    "padded_columns": "memoire.rl.observers.starts",
    "ragged_minibatches": "memoire.rl.observers.starts",
    "rollouts_of": "memoire.rl.observers.starts",
    "Start": "memoire.rl.observers.starts",
    "StartStates": "memoire.rl.observers.starts",
    "Collected": "memoire.rl.onpolicy.collector",
    "Collection": "memoire.rl.pipeline",
    "Collector": "memoire.rl.onpolicy.collector",
    "rollout_schema": "memoire.rl.policies",
    "DummyDrone": "memoire.rl.drone",
    "GenericMemory": "memoire.rl.memory",
    "Moments": "memoire.rl.policies",
    "MlpPolicy": "memoire.rl.policies",
    "Policy": "memoire.rl.policies",
    "RealTimeEnv": "memoire.rl.realtime",
    "RealTimeInterface": "memoire.rl.realtime",
    "RecurrentActorCritic": "memoire.rl.onpolicy.ppo",
    "RecurrentPPO": "memoire.rl.onpolicy.ppo",
    "RemoteActor": "memoire.rl.onpolicy.collector",
    "partial": "memoire.rl.pipeline",
    "EpisodeResult": "memoire.rl.trainer.worker",
    "GaussianPolicy": "memoire.rl.sac",
    "Goal": "memoire.rl.pipeline",
    "Pipeline": "memoire.rl.pipeline",
    "RolloutWorker": "memoire.rl.trainer.worker",
    "SAC": "memoire.rl.sac",
    "Trainer": "memoire.rl.trainer.trainer",
    "Training": "memoire.rl.trainer.training",
    "TrainingAgent": "memoire.rl.trainer.training",
    "Work": "memoire.rl.pipeline",
    "replay": "memoire.rl.pipeline",
    "try_policy": "memoire.rl.trainer.worker",
}
"""Where each name is made."""
_MODULES = ("weights",)

__all__ = [
    "ActionHistory",
    "ActorCritic",
    "Agent",
    "Ask",
    "Codec",
    "Collected",
    "Collection",
    "Collector",
    "DummyDrone",
    "EpisodeResult",
    "GaussianPolicy",
    "GenericMemory",
    "Goal",
    "MlpPolicy",
    "Moments",
    "ObservedEpisode",
    "Observer",
    "PPO",
    "Pipeline",
    "Policy",
    "RealTimeEnv",
    "RealTimeInterface",
    "RemoteActor",
    "RolloutWorker",
    "SAC",
    "Start",
    "StartStates",
    "Trainer",
    "Training",
    "TrainingAgent",
    "Work",
    "address_of_rank",
    "masked",
    "padded_columns",
    "partial",
    "ragged_minibatches",
    "replay",
    "rollout_schema",
    "rollouts_of",
    "try_policy",
    "weights",
]


def _imported(name: str) -> Any:
    """Called as `__getattr__` for what is not here yet."""
    if name in _HOMES:
        with NotInstalled.explained("pip install 'memoire-rl[rl]'"):
            found = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        found = importlib.import_module(f"memoire.rl.{name}")
    else:
        raise AttributeError(f"module 'memoire.rl' has no attribute {name!r}")
    globals()[name] = found
    return found


if not TYPE_CHECKING:
    __getattr__ = _imported  # type checkers see the imports above, and what is missing


def __dir__() -> list[str]:
    """What can be imported from here."""
    return sorted({*__all__, *globals()})
