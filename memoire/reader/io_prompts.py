"""How a user of prompts reaches their servers over the network: through proxies, directly, or both."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from memoire.errors import MemoireError, MemoireTimeout, ParameterError
from memoire.limits import Limits
from memoire.pool import kinds
from memoire.pool.interface import AnswersPrompts
from memoire.prompts.servers import PromptRequest
from memoire.replay.schema import Schema
from memoire.wire.frames import Answer

from .io import ReaderThread

ANSWER_GRACE = 1.0
"""Seconds beyond a request's deadline in which the thread has to say that nobody answered."""


class RemotePrompts:
    """A `PromptTransport` over a reader's thread."""

    def __init__(self, thread: ReaderThread, limits: Limits) -> None:
        self.limits, self._thread = limits, thread
        self._monitor, self._directory = thread.monitor, thread.directory

    def table(self, deadline: float) -> tuple[str, Schema]:
        """Name and columns of the table.

        Raises:
            MemoireTimeout, AuthError: no server has said them until the deadline.
            ParameterError: the table stores something else.
        """
        if self._directory.terms is None or not self._directory.has_met(self._monitor.now()):
            self._thread.expect(self._thread.has_met, max(0.0, deadline - self._monitor.now()), "welcome")
        self._monitor.check_open()
        terms = self._directory.terms
        assert terms is not None
        if not kinds.offers(terms.storage, AnswersPrompts):
            expected = f"'prompts' for memoire.Prompts; table {terms.table!r} is for memoire.connect"
            raise ParameterError("storage", terms.storage, expected)
        return terms.table, terms.schema

    def servers(self) -> Sequence[str]:
        """Names of all servers that are known."""
        return tuple(self._directory.servers)

    def unmet(self) -> Sequence[str]:
        """Addresses, also those on proxies' lists, where nobody has answered yet."""
        return sorted(self._directory.unmet())

    def leaving(self) -> Sequence[str]:
        """Those that are being drained."""
        return self._directory.leaving

    def where(self) -> str:
        """The addresses."""
        return self._thread.channels.where

    def trouble(self) -> str:
        """Why servers may not answer and what to do."""
        return self._thread.channels.trouble(probe=False)

    def now(self) -> float:
        """The clock of deadlines."""
        return self._monitor.now()

    def pause(self, seconds: float) -> None:
        """Wait so long. Raises Closed."""
        deadline = self._monitor.now() + seconds
        with self._monitor.changed:
            self._monitor.until(lambda: False, deadline, before=lambda: None)

    def ask(self, requests: Mapping[str, PromptRequest], deadline: float) -> dict[str, Answer]:
        """The answers of these servers, or the errors that ended the requests."""
        self._monitor.check_open()
        box: dict[str, Answer] = {}

        def start() -> None:
            for name, request in requests.items():
                server = self._directory.servers.get(name)
                settled = functools.partial(settle, name)
                if server is None:
                    settled(ParameterError("server", name, "a server that is still listed"))
                else:
                    self._thread.channels.ask(server, request.body, settled, deadline, payload=request.payload, run=0)

        def settle(name: str, answer: Answer) -> None:
            with self._monitor.changed:
                box[name] = answer
                self._monitor.changed.notify_all()

        self._thread.post(start)
        patience = max(0.0, deadline - self._monitor.now()) + ANSWER_GRACE
        self._monitor.wait(lambda: len(box) == len(requests), patience)
        with self._monitor.changed:
            silent: MemoireError = self._thread.channels.denied or MemoireTimeout("answer", self.where(), patience, "")
            return {name: box.get(name, silent) for name in requests}
