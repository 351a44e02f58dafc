"""What all calls of a table of prompts share: its servers, and how long a call may take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memoire.arguments import seconds, whole
from memoire.errors import ParameterError
from memoire.replay.schema import Schema

from .rows import Key
from .servers import PromptServers, PromptTransport
from .trainer import PromptTrainer
from .worker import PromptWorker


class TableCalls:
    """A table of prompts, as one process uses it.

    Args:
        rank: Which trainer of how many.
        timeout: Seconds that a call takes at most if it is given no other number.
        session: See `memoire.Prompts`.
    """

    def __init__(self, transport: PromptTransport, rank: tuple[int, int], timeout: float, session: str) -> None:
        self._timeout = timeout
        self._transport = transport
        self._servers = PromptServers(transport)
        self._worker = PromptWorker(self._servers)
        self._trainer = PromptTrainer(self._servers, rank, session)

    @property
    def schema(self) -> Schema:
        """The columns of an answer, as the servers say."""
        return self._transport.table(self._deadline(None))[1]

    @property
    def table(self) -> str:
        """Name of the table."""
        return self._transport.table(self._deadline(None))[0]

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers that are known."""
        return tuple(self._servers.names)

    def _deadline(self, timeout: float | None) -> float:
        return self._transport.now() + seconds(timeout, self._timeout)

    def _patience(self, timeout: float | None) -> float:
        patience = seconds(timeout, self._timeout)
        self._transport.table(self._transport.now() + patience)
        return patience


def checked_dataset(name: Any) -> str:
    """The name of a data set. Raises ParameterError."""
    if not isinstance(name, str) or len(name) > 200:
        raise ParameterError("dataset", name, "a text of at most 200 characters")
    return name


def checked_keys(keys: Iterable[Any]) -> list[Key]:
    """Names of prompts. Raises ParameterError."""
    found: list[Key] = []
    for key in keys:
        if not isinstance(key, tuple) or len(key) != 3:
            raise ParameterError("keys", key, "tuples of data set, epoch and index")
        found.append((checked_dataset(key[0]), whole("epoch", key[1], 0), whole("index", key[2], 0)))
    return found
