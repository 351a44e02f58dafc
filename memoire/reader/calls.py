"""Remote nodes, which reach servers by a reader's thread. Calls that only one kind of table has, for a remote user of
one or several servers: through proxies, directly, or both.
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
from memoire.security.keys import Keys, KeysLike
from memoire.tables import registry
from memoire.tables.calls import Request, TableServer
from memoire.version import SOFTWARE
from memoire.wire import messages
from memoire.wire.frames import Answer

from .io import ANSWER_GRACE, ReaderThread
from .rounds import BatchQueue

_log = logging.getLogger(__name__)


class RemoteNode(Node):
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
        """Open the sockets; `_begin` starts the thread.

        Args:
            node_id: The node's own 16 bytes.
            hello, facts: Arguments of `ReaderThread`.
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
        """Start the thread, and wait for servers by `meet`; close the node if `meet` raises."""
        self._thread.worker.start()
        close_at_exit(self)
        try:
            if meet is not None:
                meet()
        except BaseException:
            self.close(UNDO_TIMEOUT)
            raise

    def _hello_of(self, role: str, table: str, name: str, **facts: Any) -> messages.Hello:
        host = socket.gethostname()[:256]
        return messages.Hello(role=role, table=table, name=name, software=SOFTWARE, host=host, pid=self._pid, **facts)

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._monitor.is_closing

    def close(self, timeout: float | None = None) -> bool:
        """End the thread and its sockets within `timeout` seconds; return False if that takes longer. Waiting calls
        raise `Closed`. May be called again.
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

    def _refuse_calls(self) -> list[RemoteNode]:
        """Make present and later calls raise `Closed`; return the nodes that are closed with this one."""
        with self._monitor.condition:
            self._monitor.is_closing = True
            self._thread.prefetch.close()
            self._monitor.condition.notify_all()
        return []


class RemoteTransport:
    """A `Transport` over a reader's thread.

    Args:
        storage: Required kind of the table.
    """

    def __init__(self, thread: ReaderThread, limits: Limits, storage: str) -> None:
        self.limits, self._thread, self._storage = limits, thread, storage
        self._monitor, self._directory = thread.monitor, thread.directory

    def table(self, deadline: float) -> tuple[str, Schema]:
        """Return the name and schema of the table.

        Raises:
            MemoireTimeout, AuthError: no server has answered before the deadline.
            ParameterError: the table is of another kind.
        """
        if self._directory.terms is None or not self._directory.is_discovery_over(self._monitor.now()):
            self._thread.wait_until(self._thread.is_discovery_over, max(0.0, deadline - self._monitor.now()), "welcome")
        self._monitor.check_open()
        terms = self._directory.terms
        assert terms is not None
        if terms.storage != self._storage:
            required, kind = registry.require_kind(self._storage), registry.find(terms.storage)
            use = kind.instead if kind is not None and kind.no_pushes else "memoire.connect"
            raise ParameterError.with_text(
                f"{required.instead} needs a table with storage={required.name!r}, but table {terms.table!r} has "
                f"storage={terms.storage!r}: use {use}."
            )
        return terms.table, terms.schema

    def servers(self) -> Sequence[str]:
        """Return names of all known servers."""
        return tuple(self._directory.servers)

    def unanswered_addresses(self) -> Sequence[str]:
        """Return addresses, also those on proxies' lists, that have not answered yet."""
        return sorted(self._directory.unanswered_addresses())

    def draining_servers(self) -> Sequence[str]:
        """Return names of servers that are being drained."""
        return self._directory.draining_servers

    def addresses_text(self) -> str:
        """Return the addresses, for errors."""
        return self._thread.addresses_text

    def problem(self) -> str:
        """Return the reason why servers may not answer, and advice."""
        return self._thread.problem(probe=False)

    def now(self) -> float:
        """Return the time by the clock of deadlines."""
        return self._monitor.now()

    def pause(self, seconds: float) -> None:
        """Sleep. Raises Closed if the node is closed."""
        deadline = self._monitor.now() + seconds
        with self._monitor.condition:
            self._monitor.wait_until(lambda: False, deadline, before=lambda: None)

    def ask(self, requests: Mapping[Any, Request], deadline: float) -> dict[Any, Answer]:
        """Send requests; return the answers or errors. A request to an address waits until the address has answered."""
        self._monitor.check_open()
        names = {key: request.server or str(key) for key, request in requests.items()}
        if silent := set(names.values()) & self._directory.unanswered_addresses():
            remaining = max(0.0, deadline - self._monitor.now())
            self._monitor.wait(lambda: not silent & self._directory.unanswered_addresses(), remaining)
        began = self._monitor.now()

        def begin(settle: Callable[[Any, Answer], None]) -> Collection[Any]:
            for key, request in requests.items():
                settled = functools.partial(settle, key)
                try:
                    server = self._named(names[key])
                    if server is None:
                        why = self._thread.problem(probe=False)
                        settled(MemoireTimeout("welcome", names[key], self._monitor.now() - began, why))
                        continue
                    self._thread.ask(server, request.body, settled, deadline, payload=request.payload, run=0)
                except (MemoireError, ValueError) as error:
                    settled(error if isinstance(error, MemoireError) else ParameterError("request", "", str(error)))
            return requests

        patience = max(0.0, deadline - began) + ANSWER_GRACE
        answers, _ = self._thread.gather(begin, patience)
        with self._monitor.condition:
            silence: MemoireError = self._thread.denied or MemoireTimeout("answer", self.addresses_text(), patience, "")
            return {key: answers.get(key, silence) for key in requests}

    def _named(self, name: str) -> TableServer | None:
        """Return the server of this name or at this address of its own; None if the address has not answered.

        Raises:
            ParameterError: the server is not listed any more, or the address leads to several servers.
        """
        if name in self._directory.servers:
            return self._directory.servers[name]
        servers = next((each.servers for each in self._directory.addresses if each.endpoint == name), None)
        if servers is None:
            raise ParameterError.with_text(f"Server {name!r} is no longer listed.")
        if len(servers) > 1:
            raise ParameterError("server", name, f"the address of one server; it leads to {', '.join(servers)}")
        return self._directory.servers.get(servers[0]) if servers else None


class RemoteCalls(RemoteNode):
    """Remote user of the calls of one table, at one or several servers, on a thread of its own.

    Args:
        addresses: Addresses of servers, proxies or both.
        storage: Kind of the table.
        table: Name of the table; None is the first table of this kind, or else the servers' first table.
        keys: Keys folder of this process. None takes $MEMOIRE_KEYS, and without it no keys.
        role: Role whose keys to take from a cluster's folder.
        name: Name shown to people for this process.
    """

    CALLED = "this user of a table"
    CLOSED_AT_EXIT = 1

    def __init__(
        self,
        addresses: str | Sequence[str],
        storage: str,
        *,
        table: str | None = None,
        keys: KeysLike = None,
        role: str = "learner",
        name: str = "",
        limits: Limits | None = None,
        context: Context | None = None,
        tune_process: bool = True,
    ) -> None:
        self.name, self._storage, asked = process_name(name), storage, table_name(table or "")
        self.client_id = secrets.token_bytes(16)
        """Client id of this process at the servers: a worker's leases belong to it."""
        self._connect(
            addresses,
            self.client_id,
            limits=limits,
            tune_process=tune_process,
            hello=lambda: self._hello_of(storage, asked, self.name),
            prefetch=BatchQueue(1, may_grow=False),
            partition=(0, 1),
            rng=random.Random(),
            keys=Keys.from_setting(keys, role),
            context=context,
        )
        self._far = RemoteTransport(self._thread, self._limits, storage)

    def _meet(self, timeout: float | None) -> None:
        """Start, and wait up to `timeout` seconds for a server (None does not wait); close if none answers."""
        self._begin(None if timeout is None else lambda: self._far.table(self._monitor.now() + timeout))
        self._guard()
