"""Nodes that reach servers by a reader's thread; calls of a kind of table far away, and how their users reach its
servers over the network: through proxies, directly, or both.
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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from memoire.arguments import process_name, seconds, table_name
from memoire.errors import EndpointError, MemoireError, MemoireTimeout, ParameterError
from memoire.limits import Limits
from memoire.net import process
from memoire.net.sockets import Context
from memoire.net.thread import END_TIMEOUT, UNDO_TIMEOUT, Node, close_at_exit
from memoire.replay.schema import Schema
from memoire.security.keys import Given, Keys
from memoire.tables import registry
from memoire.tables.calls import FarServer, Request
from memoire.version import SOFTWARE
from memoire.wire import messages
from memoire.wire.frames import Answer

from .io import ANSWER_GRACE, ReaderThread
from .rounds import BatchQueue

_log = logging.getLogger(__name__)


class FarNode(Node):
    """A node that reaches servers by a `ReaderThread`."""

    def _connect(
        self,
        addresses: str | Sequence[str],
        node_id: bytes,
        *,
        limits: Limits | None,
        tune_process: bool,
        hello: Callable[[], messages.Hello],
        **facts: Any,
    ) -> None:
        """Open the sockets; the thread begins when its worker is started.

        Args:
            node_id: 16 bytes, its own.
            hello, facts: As of `ReaderThread`.
        """
        if tune_process:
            process.tune()
        self.urls = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self.urls:
            raise EndpointError("", "connect to", f"{self.CALLED} needs at least one address")
        self._id, self._limits = node_id, limits or Limits()
        self._pid, self._close_lock = os.getpid(), threading.Lock()
        facts |= {"reader_id": node_id, "limits": self._limits, "called": self.CALLED}
        self._thread = ReaderThread(self.urls, hello=hello, **facts)
        self._monitor, self._directory = self._thread.monitor, self._thread.directory

    def _begin(self, meet: Callable[[], object] | None) -> None:
        """Start the thread, and wait for servers by `meet`: if that raises, it is closed."""
        self._thread.worker.start()
        close_at_exit(self)
        try:
            if meet is not None:
                meet()
        except BaseException:
            self.close(UNDO_TIMEOUT)
            raise

    def _said(self, role: str, table: str, name: str, **facts: Any) -> messages.Hello:
        """What it says of itself to servers. Called inside of the thread."""
        host = socket.gethostname()[:256]
        return messages.Hello(role=role, table=table, name=name, software=SOFTWARE, host=host, pid=self._pid, **facts)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._monitor.is_closing

    def close(self, timeout: float | None = None) -> bool:
        """End the thread and its sockets within `timeout` seconds; calls that wait raise `Closed`. False if it has not
        ended in time. May be called again.
        """
        patience = seconds(timeout, self._limits.close_timeout)
        deadline = time.monotonic() + patience
        for partner in self._refuse_calls():
            partner.close(max(0.0, deadline - time.monotonic()))
        with self._closer(deadline) as is_mine:
            has_ended = not is_mine or self._thread.worker.stop(max(END_TIMEOUT, patience), linger=min(patience, 0.5))
        if not has_ended:
            _log.warning("%s %s: its thread did not end in time", self.CALLED.removeprefix("this "), self._id.hex()[:8])
        return has_ended

    def _refuse_calls(self) -> list[FarNode]:
        """Calls raise `Closed` from now on, those that wait too; nodes that end with this one."""
        with self._monitor.changed:
            self._monitor.is_closing = True
            self._thread.prefetch.close()
            self._monitor.changed.notify_all()
        return []


class FarTransport:
    """A `Transport` over a reader's thread.

    Args:
        storage: Kind that the table has to be of.
    """

    def __init__(self, thread: ReaderThread, limits: Limits, storage: str) -> None:
        self.limits, self._thread, self._storage = limits, thread, storage
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
        if terms.storage != self._storage:
            mine, kind = registry.named(self._storage), registry.find(terms.storage)
            use = kind.instead if kind is not None and kind.no_pushes else "memoire.connect"
            expected = f"{mine.name!r} for {mine.instead}; table {terms.table!r} is for {use}"
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
        return self._thread.where

    def trouble(self) -> str:
        """Why servers may not answer and what to do."""
        return self._thread.trouble(probe=False)

    def now(self) -> float:
        """The clock of deadlines."""
        return self._monitor.now()

    def pause(self, seconds: float) -> None:
        """Wait so long. Raises Closed."""
        deadline = self._monitor.now() + seconds
        with self._monitor.changed:
            self._monitor.until(lambda: False, deadline, before=lambda: None)

    def ask(self, requests: Mapping[Any, Request], deadline: float) -> dict[Any, Answer]:
        """The answers to these, or the errors that ended them. What is for an address waits until it has answered."""
        self._monitor.check_open()
        names = {key: request.server or str(key) for key, request in requests.items()}
        if silent := set(names.values()) & self._directory.unmet():
            left = max(0.0, deadline - self._monitor.now())
            self._monitor.wait(lambda: not silent & self._directory.unmet(), left)
        began = self._monitor.now()

        def begin(settle: Callable[[Any, Answer], None]) -> Collection[Any]:
            for key, request in requests.items():
                settled = functools.partial(settle, key)
                try:
                    server = self._named(names[key])
                    if server is None:
                        why = self._thread.trouble(probe=False)
                        settled(MemoireTimeout("welcome", names[key], self._monitor.now() - began, why))
                        continue
                    self._thread.ask(server, request.body, settled, deadline, payload=request.payload, run=0)
                except (MemoireError, ValueError) as error:
                    settled(error if isinstance(error, MemoireError) else ParameterError("request", "", str(error)))
            return requests

        patience = max(0.0, deadline - began) + ANSWER_GRACE
        answers, _ = self._thread.gather(begin, patience)
        with self._monitor.changed:
            silence: MemoireError = self._thread.denied or MemoireTimeout("answer", self.where(), patience, "")
            return {key: answers.get(key, silence) for key in requests}

    def _named(self, name: str) -> FarServer | None:
        """The server of this name or at this address of its own; None where nobody has answered there.

        Raises:
            ParameterError: there is none any more, or the address leads to several.
        """
        if name in self._directory.servers:
            return self._directory.servers[name]
        found = next((each.servers for each in self._directory.addresses if each.endpoint == name), None)
        if found is None:
            raise ParameterError("server", name, "a server that is still listed")
        if len(found) > 1:
            raise ParameterError("server", name, f"the own address of one server; it leads to {', '.join(found)}")
        return self._directory.servers.get(found[0]) if found else None


class FarCalls(FarNode):
    """A user of one table's own calls, at one or several servers far away, on a thread of its own.

    Args:
        addresses: Of servers, proxies or both.
        storage: Kind of the table: where no name is given, the first of this kind.
        table: Its name; None is the first table of this kind, or the first of all.
        keys: This process' keys folder. None takes $MEMOIRE_KEYS, and without it no key.
        role: Whose keys it takes of a cluster's folder.
        name: What people see of this process.
    """

    CALLED = "this user of a table"
    CLOSED_AT_EXIT = 1

    def __init__(
        self,
        addresses: str | Sequence[str],
        storage: str,
        *,
        table: str | None = None,
        keys: Given = None,
        role: str = "learner",
        name: str = "",
        limits: Limits | None = None,
        context: Context | None = None,
        tune_process: bool = True,
    ) -> None:
        self.name, self._storage, asked = process_name(name), storage, table_name(table or "")
        self.client_id = secrets.token_bytes(16)
        """What servers know this process by: a worker's leases belong to it."""
        self._connect(
            addresses,
            self.client_id,
            limits=limits,
            tune_process=tune_process,
            hello=lambda: self._said(storage, asked, self.name),
            prefetch=BatchQueue(1, may_grow=False),
            partition=(0, 1),
            rng=random.Random(),
            keys=Keys.of(keys, role),
            context=context,
        )
        self._far = FarTransport(self._thread, self._limits, storage)

    def _meet(self, timeout: float | None) -> None:
        """Begin, and wait so long for a server; None does not wait. Without one it is closed again."""
        self._begin(None if timeout is None else lambda: self._far.table(self._monitor.now() + timeout))
        self._guard()
