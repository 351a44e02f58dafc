"""memoire: a distributed prioritized replay memory for reinforcement learning."""

from memoire import built as built
from memoire.classic.client import ReplayMemoryClient
from memoire.classic.memory import ReplayMemory
from memoire.classic.notebook import PrioritizedReplayBuffer, PriorityExperienceReplayBuffer, Transition
from memoire.classic.server import Bind, Conn, ReplayMemoryServer
from memoire.client.client import Client, connect
from memoire.errors import InsecureWarning, MemoireError
from memoire.pool.tables import Table
from memoire.proxy.proxy import Proxy
from memoire.reader.reader import Reader
from memoire.replay.batch import Batch
from memoire.replay.buffer import Buffer
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.mixing import MixedBatch
from memoire.replay.parameters import Parameters
from memoire.replay.ragged import Ragged
from memoire.replay.sampling import Greedy, Linear, Prioritized, RankBased, Uniform
from memoire.replay.schema import Schema
from memoire.replay.writer import Writer
from memoire.server.server import Server
from memoire.version import VERSION

__version__ = VERSION

__all__ = [
    "Batch",
    "Bind",
    "Buffer",
    "Client",
    "Column",
    "Conn",
    "Greedy",
    "InsecureWarning",
    "Linear",
    "Memory",
    "MemoireError",
    "MixedBatch",
    "Parameters",
    "Prioritized",
    "PrioritizedReplayBuffer",
    "PriorityExperienceReplayBuffer",
    "Proxy",
    "Ragged",
    "RankBased",
    "Reader",
    "ReplayMemory",
    "ReplayMemoryClient",
    "ReplayMemoryServer",
    "Schema",
    "Server",
    "Table",
    "Transition",
    "Uniform",
    "Writer",
    "__version__",
    "connect",
]
