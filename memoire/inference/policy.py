"""A policy that acts far away: observations go to an inference node, actions come back. An actor needs no torch for it.

RemotePolicy ──INFER──▶ its node by rendezvous hash      down or silent: the next one, and back when it returns
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from memoire.arguments import checked_names, seconds, whole
from memoire.errors import Closed, MemoireTimeout
from memoire.limits import Limits
from memoire.net.sockets import Context, shared_context
from memoire.replay.schema import RowSchema, row_schema_from
from memoire.security.keys import Given, Keys

from .computation import packed_rows, padded
from .io_asking import Asker, checked_urls
from .io_policy import AskedRows, PolicyThread

GRACE = 0.25
"""Seconds after a deadline in which its thread still says how a request has ended."""
NOW = 0.0
"""A deadline that has passed."""


class Policy(Protocol):
    """Whatever acts: rows of observations to rows of outputs."""

    def act(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """The outputs of these rows."""


class Pending:
    """Rows that were asked for; `RemotePolicy.ask` makes them."""

    def __init__(
        self,
        thread: PolicyThread,
        outputs: RowSchema,
        timeout: float,
        fallback: Callable[[], Mapping[str, Any]] | None,
        asked: AskedRows,
    ) -> None:
        self._thread, self._outputs, self._timeout = thread, outputs, timeout
        self._fallback, self._asked = fallback, asked

    @property
    def done(self) -> bool:
        """Whether `result` returns or raises without waiting."""
        return self._thread.wait_for(self._asked, NOW)

    @property
    def version(self) -> int:
        """Of the weights that the result was computed with; 0 before, or if nobody said one."""
        return self._asked.version

    def result(self, timeout: float | None = None) -> Mapping[str, Any]:
        """The outputs: an array [n, *F] for each, a ragged one padded with zeros, and beside it NAME_length [n].

        Args:
            timeout: Seconds to wait; None waits for as long as the policy does.

        Raises:
            MemoireTimeout: there is no answer in time, and no fallback. The text says which nodes were asked.
            Refused: a node has refused it, for instance since its function failed (code "failed").
            Closed: it was cancelled, or the policy was closed.
        """
        asked, now = self._asked, time.monotonic()
        last = max(now, asked.deadline) + GRACE
        has_ended = self._thread.wait_for(asked, last if timeout is None else min(last, now + seconds(timeout)))
        if asked.error is not None:
            raise asked.error
        if asked.columns is not None:
            return padded(self._outputs, asked.columns)
        is_given_up = has_ended or time.monotonic() >= asked.deadline
        if is_given_up and self._fallback is not None:
            return self._fallback()
        raise self._too_late(self._timeout if is_given_up else seconds(timeout))

    def _too_late(self, patience: float) -> Exception:
        tried = ", ".join(self._asked.tried or self._thread.choice.order)
        return self._thread.denied or MemoireTimeout("outputs", tried, patience, self._thread.trouble())

    def cancel(self) -> None:
        """The result is not needed any more."""
        self._thread.drop(self._asked)


class RemotePolicy(Asker):
    """Asks inference nodes for the outputs of rows. Any thread may; several requests may be on their way.

    Args:
        urls: Addresses of inference nodes that compute the same; or one. Each client has its own order of them.
        inputs, outputs: Columns of rows, just as the nodes have them; see `Inference`.
        timeout: Seconds until a request is given up.
        fallback: A policy whose `act` is called, in the caller's thread, where no node has answered in time.
        keys: This process' keys folder; see docs/operations.md.

    Raises:
        EndpointError: an address is malformed, or there is none.
        KeyFileError: the keys cannot be used.
    """

    CALLED = "this policy"

    @checked_names()
    def __init__(
        self,
        urls: str | Sequence[str],
        inputs: Any,
        outputs: Any,
        timeout: float = 2.0,
        *,
        fallback: Policy | None = None,
        keys: Given = None,
        limits: Limits | None = None,
        context: Context | None = None,
    ) -> None:
        self._timeout, self._fallback = seconds(timeout), fallback
        self._inputs, self._outputs = row_schema_from("inputs", inputs), row_schema_from("outputs", outputs)
        super().__init__(limits)
        self._thread = PolicyThread(
            checked_urls(urls),
            self._inputs,
            self._outputs,
            client=self._client,
            silence=min(1.0, max(0.05, self._timeout / 4.0)),
            limits=self._limits,
            keys=Keys.of(keys, "actor"),
            context=context or shared_context(),
        )
        self._start()

    @property
    def _asking(self) -> PolicyThread:
        return self._thread

    @property
    def moves(self) -> int:
        """How often a request went on to another node."""
        return self._thread.choice.moves

    def ask(self, columns: Mapping[str, Any], min_version: int = 0) -> Pending:
        """Send rows, and return at once.

        Args:
            columns: An array [n, *F] for each input, or nested as they were declared; a ragged one as a list of n
                arrays.
            min_version: Of the weights: the rows wait at the node until these are there.

        Raises:
            EntryError, ParameterError, SchemaError: a value has another form, or is missing.
            Closed: the policy was closed.
        """
        asked = self._asked(columns, min_version)
        self._thread.ask(asked)
        return self._pending(asked, columns)

    def act(self, columns: Mapping[str, Any], min_version: int = 0) -> Mapping[str, Any]:
        """Send rows and wait for their outputs: `ask(columns).result()`."""
        if type(min_version) is int and not min_version:
            found = self._thread.act(columns, self._timeout)
            if isinstance(found, AskedRows):
                return self._pending(found, columns).result()
            if found is not None:
                return found
        asked = self._asked(columns, min_version)
        self._thread.ask_and_look(asked)
        if asked.columns is not None and not self._outputs.ragged:
            return asked.columns
        return self._pending(asked, columns).result()

    def _asked(self, columns: Mapping[str, Any], min_version: int) -> AskedRows:
        if self._closing.is_set():
            raise Closed(self.CALLED)
        rows, payload = packed_rows(self._inputs, columns)
        wanted = whole("min_version", min_version, 0, 2**53 - 1)
        return AskedRows(payload, rows, time.monotonic() + self._timeout, wanted)

    def _pending(self, asked: AskedRows, columns: Mapping[str, Any]) -> Pending:
        fallback = None if self._fallback is None else functools.partial(self._fallback.act, columns)
        return Pending(self._thread, self._outputs, self._timeout, fallback, asked)

    def __repr__(self) -> str:
        return f"<memoire.RemotePolicy of {', '.join(self.urls)}>"
