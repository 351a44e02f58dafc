"""memoire: a distributed prioritized replay memory for reinforcement learning.

Most programs need these eight names:

    Schema, Column          the columns of one step
    Buffer                  a replay memory in this process
    Server, connect         a cluster: a learner opens a server, and actors connect to it
    Prioritized, Uniform    samplers: how entries are drawn
    Table                   one of several memories of a server

Further names of `memoire`, which their docstrings and these pages describe:

    Batch, MixedBatch, Ragged           results of a draw (docs/guide.md)
    Rollouts                            result of a take (docs/on-policy.md)
    prefetch                            batches that a thread draws ahead of time (docs/one-process.md)
    RankBased, Greedy, Linear           other samplers, and a beta that grows (docs/sampling.md)
    Parameters, Memory, Writer          the parts of a `Buffer`: settings, engine, recorder
    Client, Reader, Proxy               an actor's connection (`connect` returns it), a learner in another process, a
                                        node between actors and servers
    State, Endpoints, Process           further settings of a server (docs/guide.md)
    Inference, RemotePolicy             a policy in another process, called in batches (docs/remote-policies.md)
    Prompts                             prompts for language models, and their groups of answers
                                        (docs/language-models.md)
    MemoireError, InsecureWarning       the base class of all errors, and a warning (docs/errors.md)
    ReplayMemory, ReplayMemoryServer,   the classes of the first design (docs/development/contract.md), with
    ReplayMemoryClient                  Bind, Conn, Transition, PrioritizedReplayBuffer and
                                        PriorityExperienceReplayBuffer

`memoire.torch`, `memoire.sb3`, `memoire.minari` and `memoire.dataset` are imported by their path, and so are
`memoire.building`, `memoire.kinds` and `memoire.launching`, for those who extend memoire.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from memoire import version as version
from memoire.version import VERSION, imports_of

if TYPE_CHECKING:
    from memoire.classic.client import ReplayMemoryClient as ReplayMemoryClient
    from memoire.classic.memory import ReplayMemory as ReplayMemory
    from memoire.classic.notebook import PrioritizedReplayBuffer as PrioritizedReplayBuffer
    from memoire.classic.notebook import PriorityExperienceReplayBuffer as PriorityExperienceReplayBuffer
    from memoire.classic.notebook import Transition as Transition
    from memoire.classic.server import Bind as Bind
    from memoire.classic.server import Conn as Conn
    from memoire.classic.server import ReplayMemoryServer as ReplayMemoryServer
    from memoire.client.client import Client as Client
    from memoire.client.client import connect as connect
    from memoire.errors import InsecureWarning as InsecureWarning
    from memoire.errors import MemoireError as MemoireError
    from memoire.inference.node import Inference as Inference
    from memoire.inference.policy import RemotePolicy as RemotePolicy
    from memoire.prompts.calls import Prompts as Prompts
    from memoire.proxy.proxy import Proxy as Proxy
    from memoire.reader.reader import Reader as Reader
    from memoire.replay.batch import Batch as Batch
    from memoire.replay.buffer import Buffer as Buffer
    from memoire.replay.columns import Column as Column
    from memoire.replay.columns import Ragged as Ragged
    from memoire.replay.memory import Memory as Memory
    from memoire.replay.mixing import MixedBatch as MixedBatch
    from memoire.replay.mixing import prefetch as prefetch
    from memoire.replay.parameters import Parameters as Parameters
    from memoire.replay.rollouts import Rollouts as Rollouts
    from memoire.replay.sampling import Greedy as Greedy
    from memoire.replay.sampling import Linear as Linear
    from memoire.replay.sampling import Prioritized as Prioritized
    from memoire.replay.sampling import RankBased as RankBased
    from memoire.replay.sampling import Uniform as Uniform
    from memoire.replay.schema import Schema as Schema
    from memoire.replay.writer import Writer as Writer
    from memoire.server.server import Server as Server
    from memoire.server.settings import Endpoints as Endpoints
    from memoire.server.settings import Process as Process
    from memoire.server.settings import State as State
    from memoire.tables.table import Table as Table

__version__ = VERSION

__all__ = ["Schema", "Column", "Buffer", "Server", "connect", "Prioritized", "Uniform", "Table"]

EXTENSIONS = ("classic", "keyed", "minari", "prompts", "rl", "sb3", "tmrl", "torch", "tq", "trl")
"""Extensions: modules that use only public names of the rest, and may be missing in an installation."""


def extension(name: str) -> Any:
    """Import and return a module, such as "memoire.rl.demo.demo".

    Raises:
        NotInstalled: The extension that contains the module is not installed.
    """
    package = ".".join(name.split(".")[:2])
    if package.partition(".")[2] in EXTENSIONS and importlib.util.find_spec(package) is None:
        from memoire.errors import NotInstalled

        raise NotInstalled(package, "pip install --force-reinstall memoire-rl")
    return importlib.import_module(name)


def _imported(name: str) -> Any:
    """Import a name of the list above, or a module such as `memoire.errors`, at its first use (`__getattr__`)."""
    homes = imports_of(__name__)  # imported at first use: an actor never needs the server
    if name in homes:
        value = getattr(extension(homes[name]), name)
    elif name in EXTENSIONS or (not name.startswith("_") and importlib.util.find_spec(f"memoire.{name}") is not None):
        value = extension(f"memoire.{name}")
    else:
        raise AttributeError(f"module 'memoire' has no attribute {name!r}")
    globals()[name] = value
    return value


if not TYPE_CHECKING:
    __getattr__ = _imported  # type checkers see the imports above, and names that are missing


def __dir__() -> list[str]:
    """Return `__all__` and the double-underscore names of every module; the module docstring lists further names."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
