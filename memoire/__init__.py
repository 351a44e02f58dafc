"""memoire: a distributed prioritized replay memory for reinforcement learning."""

from .batch import Batch
from .buffer import Buffer
from .classic import Bind, Conn, ReplayMemory, ReplayMemoryClient, ReplayMemoryServer
from .client import Client, connect
from .errors import MemoireError
from .memory import Memory
from .parameters import Parameters
from .proxy import Proxy
from .reader import Reader
from .sampling import Prioritized, Uniform
from .schema import Column, Schema
from .server import Server
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
    "Memory",
    "MemoireError",
    "Parameters",
    "Prioritized",
    "Proxy",
    "Reader",
    "ReplayMemory",
    "ReplayMemoryClient",
    "ReplayMemoryServer",
    "Schema",
    "Server",
    "Uniform",
    "Writer",
    "__version__",
    "connect",
]
