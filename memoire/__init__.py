"""memoire: a distributed prioritized replay memory for reinforcement learning."""

from . import built as built
from .batch import Batch
from .buffer import Buffer
from .classic import Bind, Conn, ReplayMemory, ReplayMemoryClient, ReplayMemoryServer
from .client import Client, connect
from .errors import InsecureWarning, MemoireError
from .memory import Memory
from .mixed import MixedBatch
from .parameters import Parameters
from .prioritized import PrioritizedReplayBuffer, Transition
from .proxy import Proxy
from .ragged import Ragged
from .reader import Reader
from .sampling import Greedy, Linear, Prioritized, RankBased, Uniform
from .schema import Column, Schema
from .server import Server
from .table import Table
from .version import VERSION
from .writer import Writer

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
