"""Calls of a kind of table far away, and how their users reach its servers over the network: through proxies, directly,
or both.
"""

from __future__ import annotations

import functools
import random
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from memoire.arguments import process_name, table_name
from memoire.errors import MemoireError, MemoireTimeout, ParameterError
from memoire.limits import Limits
from memoire.net.sockets import Context
from memoire.replay.schema import Schema
from memoire.security.keys import Given, Keys
from memoire.tables import registry
from memoire.tables.calls import FarServer, Request
from memoire.wire.frames import Answer

from .io import ANSWER_GRACE, FarNode, ReaderThread
from .rounds import BatchQueue


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
