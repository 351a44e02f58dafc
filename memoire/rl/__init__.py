"""Learning programs and their parts: see docs/on-policy.md, docs/remote-policies.md and docs/trainers.md.

    Collector               steps environments by a policy, and fills a table of rollouts
    Collection              settings of a collector in a file, for `python -m memoire.rl collect URL FILE` and infer
    rollout_schema          schema of a table of rollouts
    Pipeline                a run in one file, which `python -m memoire.rl up FILE` starts: Training, Work, Goal, replay
    RolloutWorker, Trainer  processes of a Pipeline: one runs episodes by the newest policy, one trains on their samples
    TrainingAgent, SAC      interface of a learner: two methods; SAC in torch, with a GaussianPolicy
    try_policy              test episodes by a model in a file
    MlpPolicy, Policy       policy in NumPy, and the interface of policies
    RemoteActor             policy whose actions inference nodes compute, such as that of a learner
    ActorCritic, PPO        network and algorithm; need torch
    RecurrentActorCritic, RecurrentPPO      recurrent network and its algorithm; need torch
    OnPolicyLearner         server with a table of rollouts, paced by the models that it publishes; needs torch
    World                   several learners that learn as one, as torchrun starts them; needs torch
    Agent, Observer         episodes that a learner assigns to other processes, whose actions it computes in batches
    StartStates             start states of such episodes: the best states of former episodes
    sample_masked, ragged_minibatches, rollouts_of   batches of entries that observers recorded
    Moments                 running mean and variance
    RealTimeEnv             environment under a real clock, around a RealTimeInterface; DummyDrone is a device
    GenericMemory           samples of workers in rings of columns; a Codec restores them, with an ActionHistory
    partial                 a class with some of its arguments; the others follow later
    address_of_rank         address of the server of one of several learners
    weights                 named arrays as bytes and files

Names are imported on first use: `import memoire.rl` needs neither torch nor Gymnasium.
"""

from typing import TYPE_CHECKING, Any

from memoire.building import imports_of, lazy_imports
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
    from memoire.rl.starts import padded_columns as padded_columns
    from memoire.rl.starts import ragged_minibatches as ragged_minibatches
    from memoire.rl.starts import rollouts_of as rollouts_of
    from memoire.rl.starts import sample_masked as sample_masked
    from memoire.rl.trainer import Trainer as Trainer
    from memoire.rl.training import Training as Training
    from memoire.rl.training import TrainingAgent as TrainingAgent
    from memoire.rl.worker import EpisodeResult as EpisodeResult
    from memoire.rl.worker import RolloutWorker as RolloutWorker
    from memoire.rl.worker import try_policy as try_policy

__all__ = sorted(imports_of(__name__))  # noqa: PLE0605  (type checkers see the imports above)

_import_deferred, _ = lazy_imports(__name__)


def _import_name(name: str) -> Any:
    """Import a name on first use, as the module's `__getattr__`; raise NotInstalled if a requirement is missing."""
    with NotInstalled.explained("pip install 'memoire-rl[rl]'"):
        return _import_deferred(name)


if not TYPE_CHECKING:
    __getattr__ = _import_name  # type checkers see the imports above, and report missing names


def __dir__() -> list[str]:
    """Return all names that can be imported from this package."""
    return sorted({*__all__, *globals()})
