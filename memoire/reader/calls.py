"""Prompts far away: one face for those who give prompts, answer them, train on the groups, and listen.

  giver ──add──▶                        ──lease, answer──  worker
                   Table(storage="prompts")
trainer ◀─draw──                        ──list, amend────  reward model

How a user of prompts reaches their servers over the network: through proxies, directly, or both.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from memoire.arguments import checked_names, process_name, seconds, table_name
from memoire.errors import EndpointError, MemoireError, MemoireTimeout, ParameterError
from memoire.limits import Limits
from memoire.net import process
from memoire.net.context import Context
from memoire.net.thread import END_TIMEOUT, UNDO_TIMEOUT, Node, close_at_exit
from memoire.replay.schema import Schema
from memoire.security.keys import Given, Keys
from memoire.tables import registry as kinds
from memoire.tables.base import AnswersPrompts
from memoire.tables.prompts.calls import PromptCalls, checked_rank
from memoire.tables.prompts.servers import PromptRequest
from memoire.version import SOFTWARE
from memoire.wire import messages
from memoire.wire.frames import Answer

from .io import ReaderThread
from .rounds import BatchQueue, ClientPartition

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


_log = logging.getLogger(__name__)


class Prompts(PromptCalls, Node):
    """A table of prompts at one or several servers. All methods may be called from any thread, those of a trainer by
    one at a time.

    What each process may call is for its key: an actor's key leases, answers and amends; a reader's lists and fetches;
    a learner's may do everything.

    Args:
        addresses: Of servers, proxies or both.
        table: Its name; None is the first table.
        keys: This process' keys folder. None takes $MEMOIRE_KEYS, and without it no key.
        rank: Which one of how many trainers that learn as one: each draws its part of a step.
        timeout: Seconds that a call takes at most if it is given no other number; also this one.
        session: What all ranks of one start of the trainer call it, such as a text that rank 0 made and sent to them.
            "" makes one, for a single rank.
        name: What people see of this process.

    Raises:
        MemoireTimeout, AuthError: no server answered in `timeout` seconds.
        ParameterError: the table stores something else.
        Refused: there is no such table.
    """

    CALLED = "this user of prompts"
    CLOSED_AT_EXIT = 1

    @checked_names()
    def __init__(
        self,
        addresses: str | Sequence[str],
        table: str | None = None,
        *,
        keys: Given = None,
        rank: tuple[int, int] = (0, 1),
        timeout: float = 30.0,
        session: str = "",
        name: str = "",
        limits: Limits | None = None,
        context: Context | None = None,
        tune_process: bool = True,
    ) -> None:
        if tune_process:
            process.tune()
        self.urls = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self.urls:
            raise EndpointError("", "connect to", "prompts need at least one address")
        self.rank = checked_rank(rank, session)
        self.name = process_name(name)
        self.client_id = secrets.token_bytes(16)
        """What servers know this process by: a worker's leases belong to it."""
        self._asked_table, self._limits, self._pid = table_name(table or ""), limits or Limits(), os.getpid()
        self._close_lock = threading.Lock()
        self._thread = ReaderThread(
            self.urls,
            reader_id=self.client_id,
            hello=lambda: _hello(self),
            prefetch=BatchQueue(1, may_grow=False),
            partition=ClientPartition((0, 1)),
            rng=random.Random(),
            limits=self._limits,
            keys=Keys.of(keys, "learner"),
            context=context,
        )
        self._monitor = self._thread.monitor
        transport = RemotePrompts(self._thread, self._limits)
        super().__init__(transport, self.rank, seconds(timeout, 30.0), session)
        self._thread.worker.start()
        close_at_exit(self)
        try:
            transport.table(self._monitor.now() + seconds(timeout, 30.0))
        except BaseException:
            self.close(UNDO_TIMEOUT)
            raise
        self._guard()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._monitor.is_closing

    def close(self, timeout: float | None = None) -> None:
        """End the thread and its sockets; calls that wait raise `Closed`. Leases last until their time."""
        patience = seconds(timeout, self._limits.close_timeout)
        with self._monitor.changed:
            self._monitor.is_closing = True
            self._monitor.changed.notify_all()
        with self._closer(time.monotonic() + patience) as is_mine:
            if is_mine and not self._thread.worker.stop(max(END_TIMEOUT, patience), linger=min(patience, 0.5)):
                _log.warning("prompts %s: the thread did not end in time", self.client_id.hex()[:8])

    def __repr__(self) -> str:
        return f"<memoire.Prompts {self.client_id.hex()[:8]} of {', '.join(self.urls)}>"


def _hello(prompts: Prompts) -> messages.Hello:
    """What a user of prompts says of itself. Called inside of its thread."""
    return messages.Hello(
        role="prompts",
        table=prompts._asked_table,
        software=SOFTWARE,
        host=socket.gethostname()[:256],
        name=prompts.name,
        pid=os.getpid(),
    )
