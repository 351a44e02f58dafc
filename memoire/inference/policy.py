"""Remote policy: sends observations to an inference node and receives actions. An actor needs no torch for this.

RemotePolicy ──INFER──▶ its node by rendezvous hash      down or silent: the next one, and back when it returns

Requests of a policy that acts step by step differ only in a number and in the values, and so do their answers. A few
compiled steps write and read them here. Every other message goes to the parser, which explains what is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from memoire.arguments import checked_names, seconds, whole
from memoire.errors import Closed, MemoireError, MemoireTimeout, ProtocolError, Refused
from memoire.limits import Limits
from memoire.net.sockets import ANSWER_TIMEOUT, Context, shared_context
from memoire.replay.schema import RowSchema, row_schema_from
from memoire.security.keys import Keys, KeysLike
from memoire.wire import _bytes, messages
from memoire.wire.frames import Answer, Message, encode
from memoire.wire.row_container import FORMS, Rows, unpack_rows

from .computation import packed_rows, padded
from .io_asking import Asker, AskingThread, checked_urls

MIN_BACKOFF, MAX_BACKOFF = 0.01, 0.2
"""Seconds before a retry at a node whose queue is full: at first, and at most."""

MAX_EXCHANGES = 256
"""Maximum row counts whose prepared frames are kept; all are dropped beyond."""


ANSWER_FRAMES: Final = 3
"""Frames of an answer: an empty one, the header, the rows."""


class Exchange:
    """Prepared requests for a number of rows, and reader of their answers.

    Args:
        head: Frame 0 of a request for that number of rows, with any request number and payload.
    """

    def __init__(self, inputs: Any, outputs: Any, head: bytes, expected: bytes, tail_bytes: int) -> None:
        self._inputs, self._outputs, self._head = inputs, outputs, head
        self._expected, self._tail_bytes = expected, tail_bytes

    @classmethod
    def for_rows(
        cls, inputs: RowSchema, outputs: RowSchema, rows: int, *, client: bytes, patience: float, limits: Limits
    ) -> Exchange | None:
        """Return the exchange for a number of rows; None if the forms of the containers are not known yet."""
        request, answered = FORMS.form_of(inputs, rows), FORMS.form_of(outputs, rows)
        if request is None or answered is None:
            return None
        facts: dict[str, Any] = {"client": client, "payload": b"\0"}
        head = encode(messages.Infer(patience=patience), fingerprint=inputs.fingerprint, **facts)[0]
        expected = encode(messages.Inferred(), fingerprint=outputs.fingerprint, **facts)[0]
        return cls(request, answered, head, expected, limits.tuning.tail_bytes)

    def request(self, columns: Mapping[str, Any], number: int) -> list[bytes] | None:
        """Return the frames of a request; None if the columns do not fit the prepared form exactly."""
        payload = self._inputs.pack(columns) if type(columns) is dict else None
        return None if payload is None else [b"", _bytes.renumbered(self._head, number, payload), payload]

    def outputs(self, frames: Sequence[Any], number: int) -> Rows | None:
        """Return the columns of an answer; None if the frames are not the usual answer to this request."""
        if len(frames) != ANSWER_FRAMES or len(frames[0]):
            return None
        _, head, payload = frames
        if not _bytes.is_answer(head, payload, self._expected, number, self._tail_bytes):
            return None
        columns: Rows | None = self._outputs.unpack(payload)
        return columns


@dataclass(eq=False, slots=True)
class RowsRequest:
    """Request of rows until its answer. `has_ended` is set after all other fields."""

    payload: Any
    rows: int
    deadline: float
    min_version: int
    number: int = 0
    has_ended: bool = False
    error: MemoireError | None = None
    columns: Rows | None = None
    version: int = 0
    tried: list[str] = field(default_factory=list)
    url: str = ""
    """Address of the node that is asked now; "" while the request waits for a retry."""
    move_at: float = 0.0
    """Time at which the next node is asked, or the present node again."""
    backoff: float = MIN_BACKOFF


class PolicyThread(AskingThread):
    """Thread that asks inference nodes for the outputs of rows.

    Args:
        silence: Seconds without an answer after which the next node is asked.
    """

    def __init__(
        self,
        urls: Sequence[str],
        inputs: RowSchema,
        outputs: RowSchema,
        *,
        client: bytes,
        silence: float,
        limits: Limits,
        keys: Keys | None,
        context: Context,
    ) -> None:
        self._inputs, self._outputs, self._limits, self._silence = inputs, outputs, limits, silence
        self._client = client
        self._open: set[RowsRequest] = set()
        self._exchanges: dict[int, Exchange] = {}  # exchanges by number of rows
        self._numbers = itertools.count(1)
        facts: dict[str, Any] = {"limits": limits, "keys": keys, "numbers": self._numbers}
        super().__init__("memoire-policy", urls, client=client, context=context, soon=self._soon, **facts)
        for channel in self._channels.values():
            channel.fingerprint = inputs.fingerprint

    # Calls from any thread

    def ask(self, request: RowsRequest) -> None:
        """Send a request without a wait for its answer."""
        self.worker.run(self._begin, request)

    def ask_and_look(self, request: RowsRequest) -> None:
        """Send a request and wait a moment for its answer, which has usually come then."""
        self.worker.run_and_look(self._begin, request, lambda: request.has_ended, request.deadline)

    def act(self, columns: Any, timeout: float) -> Rows | RowsRequest | None:
        """Send rows in the shortest way for a waiting caller, if the first node is available and no request is open.
        Return the outputs, or the open request if they have not come at once; None if nothing was sent.
        """
        outcome: Rows | RowsRequest | None = self.worker.run_alone(self._act, columns, timeout)
        return outcome

    def wait_for(self, request: RowsRequest, deadline: float) -> bool:
        """Wait until a request has ended; return False if `deadline`, by time.monotonic(), passes first."""
        return self.worker.wait_for(lambda: request.has_ended, deadline)

    def drop(self, request: RowsRequest) -> None:
        """Drop a request whose answer is not needed any more."""
        self.worker.post(lambda: self._drop(request))

    def problem(self) -> str:
        """Return the reason why the nodes may not answer, and what to do. Tries to connect, for at most 0.2 s."""
        return self._channels[self.choice.order[0]].link.explain()

    @property
    def denied(self) -> MemoireError | None:
        """Error of access if all nodes refuse this process's key; else None."""
        denials = [channel.link.denied for channel in self._channels.values()]
        return denials[0] if all(denials) else None

    # ------------------------------------------------------------------------- from here on: in the thread

    def _next_time(self) -> float:
        return min(super()._next_time(), *(request.move_at for request in self._open), math.inf)

    def _turn(self, ready: dict[object, int]) -> None:
        super()._turn(ready)
        now = time.monotonic()
        for request in list(self._open):
            self._look_after(request, now)

    def _soon(self, deadline: float) -> bool:
        """Wait a moment for an answer of the only node that is asked; return True if a further wait makes sense."""
        url = ""
        for request in self._open:
            if not request.url or url not in ("", request.url):
                return False
            url = request.url
        if not url or deadline - time.monotonic() <= ANSWER_TIMEOUT:
            return False
        return self._channels[url].take_soon()

    def _look_after(self, request: RowsRequest, now: float) -> None:
        if now >= request.deadline:
            self._end(request)
        elif not request.url:
            if now >= request.move_at:
                self._send(request, self.choice.pick(self._is_down), now)
        elif (is_down := self._is_down(request.url)) or now >= request.move_at:
            if not is_down:
                self.choice.record_silence(request.url, now)
            best = self.choice.pick(self._is_down)
            request.move_at = now + self._silence
            if best != request.url:
                self.choice.moves += 1
                self._channels[request.url].drop(request.number)
                self._send(request, best, now)

    def _act(self, columns: Any, timeout: float) -> Rows | RowsRequest | None:
        url = self.choice.first_if_none_silent
        if self._open or not url or type(columns) is not dict:
            return None
        channel, first = self._channels[url], columns.get(self._inputs.names[0])
        if type(first) is not np.ndarray or not first.ndim or not channel.is_free:
            return None
        rows = len(first)
        exchange = self._exchanges.get(rows) or self._exchange_for(rows, timeout)
        number = next(self._numbers)
        frames = None if exchange is None else exchange.request(columns, number)
        if exchange is None or frames is None or len(frames[-1]) > channel.longest:
            return None
        now, opened = time.monotonic(), []

        def open_() -> tuple[float, Callable[[Answer], None]]:
            request = RowsRequest(frames[-1], rows, now + timeout, 0, number, url=url, move_at=now + self._silence)
            request.tried.append(url)
            self._open.add(request)
            opened.append(request)
            return request.deadline, self._answered(request, url)

        outputs: Rows | None = channel.ask_at_once(number, frames, now, exchange.outputs, open_)
        return opened[0] if outputs is None else outputs

    def _exchange_for(self, rows: int, timeout: float) -> Exchange | None:
        """Return the exchange for a number of rows, and keep it for later requests."""
        if timeout <= 2.0 * ANSWER_TIMEOUT or self._outputs.ragged:
            return None
        facts: dict[str, Any] = {"client": self._client, "patience": timeout, "limits": self._limits}
        exchange = Exchange.for_rows(self._inputs, self._outputs, rows, **facts)
        if exchange is not None:
            if len(self._exchanges) >= MAX_EXCHANGES:
                self._exchanges.clear()
            self._exchanges[rows] = exchange
        return exchange

    def _begin(self, request: RowsRequest) -> None:
        if request.has_ended:
            return
        request.number = next(self._numbers)
        self._open.add(request)
        self._send(request, self.choice.pick(self._is_down), time.monotonic())

    def _send(self, request: RowsRequest, url: str, now: float) -> None:
        request.url, request.move_at = url, now + self._silence
        if url not in request.tried:
            request.tried.append(url)
        body = messages.Infer(patience=max(0.0, request.deadline - now), min_version=request.min_version)
        channel = self._channels[url]
        finish = self._answered(request, url)
        channel.ask(body, finish, request.deadline, payload=request.payload, sequence=request.number)

    def _answered(self, request: RowsRequest, url: str) -> Callable[[Answer], None]:
        def finish(answer: Answer) -> None:
            if request.url != url or request not in self._open:
                return
            if isinstance(answer, Message):
                self.choice.receive_answer(url)
                self._take(request, answer)
            elif isinstance(answer, Refused) and answer.code in ("busy", "closed"):
                self._back_off(request)
            elif isinstance(answer, MemoireTimeout):
                self._end(request)
            elif isinstance(answer, Refused) and answer.code == "schema":
                self._compare(request, url, answer)
            else:
                self._end(request, answer)

        return finish

    def _back_off(self, request: RowsRequest) -> None:
        request.url, request.move_at = "", time.monotonic() + request.backoff * random.uniform(0.5, 1.0)
        request.backoff = min(MAX_BACKOFF, 2.0 * request.backoff)

    def _take(self, request: RowsRequest, answer: Message) -> None:
        try:
            if not isinstance(answer.body, messages.Inferred):
                raise ProtocolError("unexpected", f"INFER was answered by {answer.type.name}")
            if answer.header.fingerprint != self._outputs.fingerprint:
                self._compare(request, request.url, Refused(request.url, "schema", "its outputs have another schema"))
                return
            columns, rows = unpack_rows(answer.payload, self._outputs, self._limits)
            if rows != request.rows:
                raise ProtocolError("value", f"the node answered {request.rows} rows by {rows} rows")
        except ProtocolError as error:
            self._end(request, Refused(request.url, error.code, error.detail))
            return
        request.columns, request.version = columns, answer.body.version
        self._end(request)

    def _compare(self, request: RowsRequest, url: str, refused: Refused) -> None:
        """Ask a node for its columns, and end the request with an error that names the columns of both sides. If the
        node does not report its columns, the error is `refused`.
        """

        def finish(answer: Answer) -> None:
            if request.url != url or request not in self._open:
                return
            body = answer.body if isinstance(answer, Message) else None
            sides = {} if not isinstance(body, messages.Welcome) else {"inputs": body.schema, "outputs": body.outputs}
            text = differing_columns(sides, {"inputs": self._inputs, "outputs": self._outputs})
            self._end(request, Refused(url, "schema", text) if text else refused)

        request.move_at = request.deadline
        self._channels[url].ask(messages.Hello(role="actor"), finish, request.deadline)

    def _end(self, request: RowsRequest, error: MemoireError | None = None) -> None:
        """End a request: it has its columns, an error, or neither if its deadline has passed."""
        self._open.discard(request)
        if request.url:
            self._channels[request.url].drop(request.number)
        request.error = error
        request.has_ended = True

    def _drop(self, request: RowsRequest) -> None:
        if request in self._open:
            self._end(request, Closed("this request"))

    def _at_end(self) -> None:
        for request in list(self._open):
            self._end(request, Closed("this policy"))


def differing_columns(node: Mapping[str, str], policy: Mapping[str, RowSchema]) -> str:
    """Return in words how a node's columns differ from a policy's, by name; "" if they do not differ."""
    texts = []
    for name, text in node.items():
        with contextlib.suppress(MemoireError, ValueError):
            of_node = RowSchema.from_json(text)
            if of_node.fingerprint != policy[name].fingerprint:
                texts.append(f"{name} of the node are {of_node!r:.400}, those of this policy {policy[name]!r:.400}")
    return f"{'; '.join(texts)}. Give Inference and RemotePolicy the same columns" if texts else ""


GRACE = 0.25
"""Seconds after a deadline in which the thread still reports how a request has ended."""
NOW = 0.0
"""Deadline that has always passed, in seconds of the monotonic clock."""


class RowPolicy(Protocol):
    """Policy of any kind: computes rows of outputs from rows of observations."""

    def act(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the outputs of these rows."""


class Pending:
    """Pending outputs of rows, as returned by `RemotePolicy.ask`."""

    def __init__(
        self,
        thread: PolicyThread,
        outputs: RowSchema,
        timeout: float,
        fallback: Callable[[], Mapping[str, Any]] | None,
        request: RowsRequest,
    ) -> None:
        self._thread, self._outputs, self._timeout = thread, outputs, timeout
        self._fallback, self._request = fallback, request

    @property
    def done(self) -> bool:
        """True if `result` returns or raises without waiting."""
        return self._thread.wait_for(self._request, NOW)

    @property
    def version(self) -> int:
        """Version of the weights that computed the result; 0 before the result, or if the node reports none."""
        return self._request.version

    def result(self, timeout: float | None = None) -> Mapping[str, Any]:
        """Wait for the outputs and return them: an array [n, *F] for each output. A ragged output is padded with zeros,
        and has its lengths beside it as NAME_length [n].

        Args:
            timeout: Seconds to wait; None waits as long as the policy does.

        Raises:
            MemoireTimeout: no answer came in time, and there is no fallback. The error names the asked nodes.
            Refused: a node refused the request, for example because its function failed (code "failed").
            Closed: the request was cancelled, or the policy was closed.
        """
        request, now = self._request, time.monotonic()
        last = max(now, request.deadline) + GRACE
        has_ended = self._thread.wait_for(request, last if timeout is None else min(last, now + seconds(timeout)))
        if request.error is not None:
            raise request.error
        if request.columns is not None:
            return padded(self._outputs, request.columns)
        is_given_up = has_ended or time.monotonic() >= request.deadline
        if is_given_up and self._fallback is not None:
            return self._fallback()
        raise self._timeout_error(self._timeout if is_given_up else seconds(timeout))

    def _timeout_error(self, patience: float) -> Exception:
        tried = ", ".join(self._request.tried or self._thread.choice.order)
        return self._thread.denied or MemoireTimeout("outputs", tried, patience, self._thread.problem())

    def cancel(self) -> None:
        """Drop the request: its result is not needed any more."""
        self._thread.drop(self._request)


class RemotePolicy(Asker):
    """Policy that asks inference nodes for the outputs of rows. Thread-safe; several requests may be open.

    Example:
        policy = memoire.RemotePolicy("tcp://inference:5570", {"obs": (np.float32, (4,))}, {"action": np.int64})
        action = policy.act({"obs": observations})["action"]

    Args:
        urls: Address of an inference node, or of several that compute the same. Each client has its own order.
        inputs, outputs: Columns of rows, the same as at the nodes; see `Inference`.
        timeout: Seconds until a request is given up.
        fallback: Policy whose `act` is called in the caller's thread if no node has answered in time.
        keys: Keys folder of this process; see docs/operations.md.

    Raises:
        EndpointError: an address is malformed, or the list is empty.
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
        fallback: RowPolicy | None = None,
        keys: KeysLike = None,
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
            keys=Keys.from_setting(keys, "actor"),
            context=context or shared_context(),
        )
        self._start()

    @property
    def _asking(self) -> PolicyThread:
        return self._thread

    @property
    def moved_requests(self) -> int:
        """Number of requests that moved to another node."""
        return self._thread.choice.moves

    def ask(self, columns: Mapping[str, Any], min_version: int = 0) -> Pending:
        """Send rows, and return at once.

        Args:
            columns: An array [n, *F] for each input, or nested as declared; a ragged input as a list of n arrays.
            min_version: Minimum version of the weights: the rows wait at the node for it.

        Raises:
            EntryError, ParameterError, SchemaError: a value is missing, or does not fit its column.
            Closed: the policy was closed.
        """
        request = self._new_request(columns, min_version)
        self._thread.ask(request)
        return self._pending(request, columns)

    def act(self, columns: Mapping[str, Any], min_version: int = 0) -> Mapping[str, Any]:
        """Send rows and wait for their outputs: `ask(columns).result()`."""
        if type(min_version) is int and not min_version:
            outcome = self._thread.act(columns, self._timeout)
            if isinstance(outcome, RowsRequest):
                return self._pending(outcome, columns).result()
            if outcome is not None:
                return outcome
        request = self._new_request(columns, min_version)
        self._thread.ask_and_look(request)
        if request.columns is not None and not self._outputs.ragged:
            return request.columns
        return self._pending(request, columns).result()

    def _new_request(self, columns: Mapping[str, Any], min_version: int) -> RowsRequest:
        if self._closing.is_set():
            raise Closed(self.CALLED)
        rows, payload = packed_rows(self._inputs, columns)
        wanted = whole("min_version", min_version, 0, 2**53 - 1)
        return RowsRequest(payload, rows, time.monotonic() + self._timeout, wanted)

    def _pending(self, request: RowsRequest, columns: Mapping[str, Any]) -> Pending:
        fallback = None if self._fallback is None else functools.partial(self._fallback.act, columns)
        return Pending(self._thread, self._outputs, self._timeout, fallback, request)

    def __repr__(self) -> str:
        return f"<memoire.RemotePolicy of {', '.join(self.urls)}>"
