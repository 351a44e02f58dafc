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

from typing import TYPE_CHECKING, Any

from memoire.building import deferred
from memoire.errors import NotInstalled

if TYPE_CHECKING:
    from memoire.rl import weights as weights
    from memoire.rl.codec import ActionHistory as ActionHistory
    from memoire.rl.codec import Codec as Codec
    from memoire.rl.memory import GenericMemory as GenericMemory
    from memoire.rl.observer import Ask as Ask
    from memoire.rl.observer import Observer as Observer
    from memoire.rl.pipeline import Collection as Collection
    from memoire.rl.pipeline import Goal as Goal
    from memoire.rl.pipeline import Pipeline as Pipeline
    from memoire.rl.pipeline import Work as Work
    from memoire.rl.pipeline import partial as partial
    from memoire.rl.pipeline import replay as replay
    from memoire.rl.policies import MlpPolicy as MlpPolicy
    from memoire.rl.policies import Policy as Policy
    from memoire.rl.realtime import DummyDrone as DummyDrone
    from memoire.rl.realtime import RealTimeEnv as RealTimeEnv
    from memoire.rl.realtime import RealTimeInterface as RealTimeInterface
    from memoire.rl.sac import SAC as SAC
    from memoire.rl.sac import GaussianPolicy as GaussianPolicy

    from .agent import Agent as Agent
    from .collector import Collected as Collected
    from .collector import Collector as Collector
    from .collector import RemoteActor as RemoteActor
    from .collector import address_of_rank as address_of_rank
    from .learner import OnPolicyLearner as OnPolicyLearner
    from .networks import ActorCritic as ActorCritic
    from .networks import RecurrentActorCritic as RecurrentActorCritic
    from .networks import World as World
    from .policies import Moments as Moments
    from .policies import rollout_schema as rollout_schema
    from .ppo import PPO as PPO
    from .ppo import RecurrentPPO as RecurrentPPO
    from .starts import ObservedEpisode as ObservedEpisode
    from .starts import Start as Start
    from .starts import StartStates as StartStates
    from .starts import masked as masked
    from .starts import padded_columns as padded_columns
    from .starts import ragged_minibatches as ragged_minibatches
    from .starts import rollouts_of as rollouts_of
    from .trainer import Trainer as Trainer
    from .training import Training as Training
    from .training import TrainingAgent as TrainingAgent
    from .worker import EpisodeResult as EpisodeResult
    from .worker import RolloutWorker as RolloutWorker
    from .worker import try_policy as try_policy

HOMES = {
    "memoire.rl": "weights",
    "memoire.rl.codec": "ActionHistory Codec",
    "memoire.rl.memory": "GenericMemory",
    "memoire.rl.networks": "ActorCritic RecurrentActorCritic World",
    "memoire.rl.observer": "Ask Observer",
    "memoire.rl.agent": "Agent",
    "memoire.rl.starts": ("ObservedEpisode Start StartStates masked padded_columns ragged_minibatches rollouts_of"),
    "memoire.rl.collector": "Collected Collector RemoteActor address_of_rank",
    "memoire.rl.learner": "OnPolicyLearner",
    "memoire.rl.ppo": "PPO RecurrentPPO",
    "memoire.rl.pipeline": "Collection Goal Pipeline Work partial replay",
    "memoire.rl.policies": "MlpPolicy Moments Policy rollout_schema",
    "memoire.rl.realtime": "DummyDrone RealTimeEnv RealTimeInterface",
    "memoire.rl.sac": "GaussianPolicy SAC",
    "memoire.rl.trainer": "Trainer",
    "memoire.rl.training": "Training TrainingAgent",
    "memoire.rl.worker": "EpisodeResult RolloutWorker try_policy",
}
"""Which names each module has."""

__all__ = sorted(" ".join(HOMES.values()).split())  # noqa: PLE0605  (type checkers see the imports above)

_found, _ = deferred(__name__, HOMES)


def _imported(name: str) -> Any:
    """Called as `__getattr__` for what is not here yet."""
    with NotInstalled.explained("pip install 'memoire-rl[rl]'"):
        return _found(name)


if not TYPE_CHECKING:
    __getattr__ = _imported  # type checkers see the imports above, and what is missing


def __dir__() -> list[str]:
    """What can be imported from here."""
    return sorted({*__all__, *globals()})
