"""What all calls of a table of prompts share: its servers, and how long a call may take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from memoire.arguments import mapping, seconds, text, whole
from memoire.errors import ParameterError
from memoire.replay.schema import Schema

from .rows import Key
from .servers import PromptServers, PromptTransport
from .trainer import PromptTrainer
from .worker import PromptWorker

MAX_RANKS = 65_536
"""Ranks that one trainer can have."""


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
    return text("dataset", name)


def checked_tags(tags: Mapping[str, str] | None) -> dict[str, str]:
    """Words by name. Raises WrongType, ParameterError."""
    return {text("tags", name): text("tags", word) for name, word in mapping("tags", tags or {}).items()}


def checked_keys(keys: Iterable[Any]) -> list[Key]:
    """Names of prompts. Raises ParameterError."""
    found: list[Key] = []
    for key in keys:
        if not isinstance(key, tuple) or len(key) != 3:
            raise ParameterError("keys", key, "tuples of data set, epoch and index")
        found.append((checked_dataset(key[0]), whole("epoch", key[1], 0), whole("index", key[2], 0)))
    return found


def checked_rank(rank: tuple[int, int], session: str) -> tuple[int, int]:
    """Which trainer of how many, which need a session. Raises WrongType, ParameterError."""
    try:
        mine, ranks = rank
    except (TypeError, ValueError):
        raise ParameterError("rank", rank, "two numbers: which rank, of how many") from None
    text("session", session)
    ranks = whole("rank", ranks, 1, MAX_RANKS)
    mine = whole("rank", mine, 0, ranks - 1)
    if ranks > 1 and not session:
        expected = "a text that all ranks share, new at each start of the trainer, where there are several ranks"
        raise ParameterError("session", session, expected)
    return mine, ranks
