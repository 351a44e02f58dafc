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

from memoire.building import deferred, imports_of
from memoire.errors import NotInstalled

if TYPE_CHECKING:
    from memoire.rl import weights as weights
    from memoire.rl.agent import Agent as Agent
    from memoire.rl.codec import ActionHistory as ActionHistory
    from memoire.rl.codec import Codec as Codec
    from memoire.rl.collector import Collected as Collected
    from memoire.rl.collector import Collector as Collector
    from memoire.rl.collector import RemoteActor as RemoteActor
    from memoire.rl.collector import address_of_rank as address_of_rank
    from memoire.rl.learner import OnPolicyLearner as OnPolicyLearner
    from memoire.rl.memory import GenericMemory as GenericMemory
    from memoire.rl.networks import ActorCritic as ActorCritic
    from memoire.rl.networks import RecurrentActorCritic as RecurrentActorCritic
    from memoire.rl.networks import World as World
    from memoire.rl.observer import Ask as Ask
    from memoire.rl.observer import Observer as Observer
    from memoire.rl.pipeline import Collection as Collection
    from memoire.rl.pipeline import Goal as Goal
    from memoire.rl.pipeline import Pipeline as Pipeline
    from memoire.rl.pipeline import Work as Work
    from memoire.rl.pipeline import partial as partial
    from memoire.rl.pipeline import replay as replay
    from memoire.rl.policies import MlpPolicy as MlpPolicy
    from memoire.rl.policies import Moments as Moments
    from memoire.rl.policies import Policy as Policy
    from memoire.rl.policies import rollout_schema as rollout_schema
    from memoire.rl.ppo import PPO as PPO
    from memoire.rl.ppo import RecurrentPPO as RecurrentPPO
    from memoire.rl.realtime import DummyDrone as DummyDrone
    from memoire.rl.realtime import RealTimeEnv as RealTimeEnv
    from memoire.rl.realtime import RealTimeInterface as RealTimeInterface
    from memoire.rl.sac import SAC as SAC
    from memoire.rl.sac import GaussianPolicy as GaussianPolicy
    from memoire.rl.starts import ObservedEpisode as ObservedEpisode
    from memoire.rl.starts import Start as Start
    from memoire.rl.starts import StartStates as StartStates
    from memoire.rl.starts import masked as masked
    from memoire.rl.starts import padded_columns as padded_columns
    from memoire.rl.starts import ragged_minibatches as ragged_minibatches
    from memoire.rl.starts import rollouts_of as rollouts_of
    from memoire.rl.trainer import Trainer as Trainer
    from memoire.rl.training import Training as Training
    from memoire.rl.training import TrainingAgent as TrainingAgent
    from memoire.rl.worker import EpisodeResult as EpisodeResult
    from memoire.rl.worker import RolloutWorker as RolloutWorker
    from memoire.rl.worker import try_policy as try_policy

__all__ = sorted(imports_of(__name__))  # noqa: PLE0605  (type checkers see the imports above)

_found, _ = deferred(__name__)


def _imported(name: str) -> Any:
    """Called as `__getattr__` for what is not here yet."""
    with NotInstalled.explained("pip install 'memoire-rl[rl]'"):
        return _found(name)


if not TYPE_CHECKING:
    __getattr__ = _imported  # type checkers see the imports above, and what is missing


def __dir__() -> list[str]:
    """What can be imported from here."""
    return sorted({*__all__, *globals()})
