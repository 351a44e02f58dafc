"""A server's own table of prompts, used in the server's process: the calls of `memoire.Prompts` without a network."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from memoire.errors import Closed, MemoireTimeout, Refused
from memoire.replay.schema import Schema
from memoire.tables.base import AnswersPrompts
from memoire.tables.prompts.calls import PromptCalls, checked_rank
from memoire.tables.prompts.servers import PromptRequest
from memoire.tables.registry import Reply
from memoire.tables.table import OpenTable
from memoire.wire import messages
from memoire.wire.frames import Answer, Message, MessageHeader
from memoire.wire.receivers import Receiver

from .dispatch import Dispatcher

DEFAULT_TIMEOUT = 30.0
UNBOUNDED = Receiver(*[1 << 53] * 3)


class DirectPrompts:
    """A `PromptTransport` to one server, in its process. Replies wait for the disk here, too."""

    def __init__(self, dispatcher: Dispatcher, table: OpenTable, check_open: Callable[[], None]) -> None:
        self.limits = dispatcher.limits
        self._dispatcher, self._table, self._check_open = dispatcher, table, check_open
        self._client, self._numbers = secrets.token_bytes(16), itertools.count(1)
        dispatcher.receivers.register(self._client, UNBOUNDED)  # its replies stay in this process

    def table(self, deadline: float) -> tuple[str, Schema]:
        """Name and columns of the table."""
        return self._table.name, self._table.schema

    def servers(self) -> Sequence[str]:
        """The only one."""
        return [self._dispatcher.name]

    def unmet(self) -> Sequence[str]:
        """None: it is here."""
        return []

    def leaving(self) -> Sequence[str]:
        """None: there is no other one."""
        return []

    def where(self) -> str:
        """What errors call it."""
        return f"table {self._table.name!r} of this server"

    def trouble(self) -> str:
        """Nothing: it is here."""
        return ""

    def now(self) -> float:
        """The clock of deadlines."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """Wait so long. Raises Closed."""
        time.sleep(seconds)
        self._check_open()

    def ask(self, requests: Mapping[str, PromptRequest], deadline: float) -> dict[str, Answer]:
        """The answer of the server."""
        self._check_open()
        return {name: self._ask(request, deadline) for name, request in requests.items()}

    def _ask(self, request: PromptRequest, deadline: float) -> Answer:
        number, is_there, box = next(self._numbers), threading.Event(), list[Reply]()
        size = len(request.payload or b"")
        header = MessageHeader(request.body.type, self._table.number, self._client, 0, 0, number, 0, size, 0)

        def send(reply: Reply) -> None:
            box.append(reply)
            is_there.set()

        try:
            reply = self._dispatcher.answer(Message(header, request.body, request.payload))
        except Closed:
            self._check_open()
            raise
        self._dispatcher.send(header, reply, send)
        patience = max(0.0, deadline - time.monotonic()) + 1.0
        if not is_there.wait(patience):
            self._check_open()
            return MemoireTimeout("disk", self.where(), patience, "The state folder has not saved it yet.")
        if isinstance(box[0].body, messages.Refused):
            return Refused(self.where(), box[0].body.code, box[0].body.text)
        return Message(header, box[0].body, box[0].payload)


class LocalPrompts(PromptCalls):
    """See `Server.prompts`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        table: OpenTable,
        check_open: Callable[[], None],
        rank: tuple[int, int],
        session: str,
    ) -> None:
        table.offered(AnswersPrompts)
        super().__init__(
            DirectPrompts(dispatcher, table, check_open), checked_rank(rank, session), DEFAULT_TIMEOUT, session
        )
