"""memoire: a distributed prioritized replay memory for reinforcement learning.

Most programs need these eight names:

    Schema, Column          what one step is made of
    Buffer                  a replay memory in this process
    Server, connect         a cluster: a learner opens a server, and actors connect to it
    Prioritized, Uniform    how entries are drawn
    Table                   one of several memories of a server

These can be imported from `memoire` too. Their own docstrings, and the pages named here, describe them:

    Batch, MixedBatch, Ragged           what a draw returns (docs/guide.md)
    RankBased, Greedy, Linear           other samplers, and a beta that grows (docs/sampling.md)
    Parameters, Memory, Writer          what `Buffer` is made of: settings, engine, recorder
    Client, Reader, Proxy               what `connect` makes, a learner far away, a node between
    MemoireError, InsecureWarning       every error is below the first one (docs/errors.md)
    ReplayMemory, ReplayMemoryServer,   the classes of the first design (docs/contract.md), with
    ReplayMemoryClient                  Bind, Conn, Transition, PrioritizedReplayBuffer and
                                        PriorityExperienceReplayBuffer

`memoire.torch`, `memoire.sb3`, `memoire.minari` and `memoire.dataset` are imported by their path.
"""

from memoire import built as built
from memoire.classic.client import ReplayMemoryClient as ReplayMemoryClient
from memoire.classic.memory import ReplayMemory as ReplayMemory
from memoire.classic.notebook import PrioritizedReplayBuffer as PrioritizedReplayBuffer
from memoire.classic.notebook import PriorityExperienceReplayBuffer as PriorityExperienceReplayBuffer
from memoire.classic.notebook import Transition as Transition
from memoire.classic.server import Bind as Bind
from memoire.classic.server import Conn as Conn
from memoire.classic.server import ReplayMemoryServer as ReplayMemoryServer
from memoire.client.client import Client as Client
from memoire.client.client import connect
from memoire.errors import InsecureWarning as InsecureWarning
from memoire.errors import MemoireError as MemoireError
from memoire.pool.tables import Table
from memoire.proxy.proxy import Proxy as Proxy
from memoire.reader.reader import Reader as Reader
from memoire.replay.batch import Batch as Batch
from memoire.replay.buffer import Buffer
from memoire.replay.columns import Column
from memoire.replay.memory import Memory as Memory
from memoire.replay.mixing import MixedBatch as MixedBatch
from memoire.replay.parameters import Parameters as Parameters
from memoire.replay.ragged import Ragged as Ragged
from memoire.replay.sampling import Greedy as Greedy
from memoire.replay.sampling import Linear as Linear
from memoire.replay.sampling import Prioritized, Uniform
from memoire.replay.sampling import RankBased as RankBased
from memoire.replay.schema import Schema
from memoire.replay.writer import Writer as Writer
from memoire.server.server import Server
from memoire.version import VERSION

__version__ = VERSION

__all__ = ["Schema", "Column", "Buffer", "Server", "connect", "Prioritized", "Uniform", "Table"]


def __dir__() -> list[str]:
    """The names of `__all__`, and what every module has: the others are found where they are described."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
