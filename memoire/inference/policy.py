"""A policy that acts far away: observations go to an inference node, actions come back. An actor needs no torch for it.

RemotePolicy ──INFER──▶ its node by rendezvous hash      down or silent: the next one, and back when it returns

All requests of a policy that acts step by step are the same but for a number and the values, and so are their answers:
few steps make and read them here, and compiled ones. Whatever is not just so is for the parser, which says what it is.
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
from memoire.security.keys import Given, Keys
from memoire.wire import _bytes, messages
from memoire.wire.frames import Answer, Message, encode
from memoire.wire.row_container import FORMS, Rows, unpack_rows

from .computation import packed_rows, padded
from .io_asking import Asker, AskingThread, checked_urls

MIN_BACKOFF, MAX_BACKOFF = 0.01, 0.2
"""Seconds before a node is asked again whose queue is full: at first, and at most."""

MAX_EXCHANGES = 256
"""Numbers of rows of which the frames are kept; others are made again."""


ANSWER_FRAMES: Final = 3
"""Of an answer: an empty one, the header, the rows."""


class Exchange:
    """Requests of so many rows, and the answers.

    Args:
        head: Frame 0 of one of them, with whatever number and payload.
    """

    def __init__(self, inputs: Any, outputs: Any, head: bytes, expected: bytes, tail_bytes: int) -> None:
        self._inputs, self._outputs, self._head = inputs, outputs, head
        self._expected, self._tail_bytes = expected, tail_bytes

    @classmethod
    def of(
        cls, inputs: RowSchema, outputs: RowSchema, rows: int, *, client: bytes, patience: float, limits: Limits
    ) -> Exchange | None:
        """The exchange of so many rows; None while the forms of both containers are not known."""
        asked, answered = FORMS.of(inputs, rows), FORMS.of(outputs, rows)
        if asked is None or answered is None:
            return None
        facts: dict[str, Any] = {"client": client, "payload": b"\0"}
        head = encode(messages.Infer(patience=patience), fingerprint=inputs.fingerprint, **facts)[0]
        expected = encode(messages.Inferred(), fingerprint=outputs.fingerprint, **facts)[0]
        return cls(asked, answered, head, expected, limits.tuning.tail_bytes)

    def request(self, columns: Mapping[str, Any], number: int) -> list[bytes] | None:
        """The frames of a request; None if the columns are not just as they should be."""
        payload = self._inputs.pack(columns) if type(columns) is dict else None
        return None if payload is None else [b"", _bytes.renumbered(self._head, number, payload), payload]

    def outputs(self, frames: Sequence[Any], number: int) -> Rows | None:
        """The columns of an answer; None if the frames are something else than the usual answer to this request."""
        if len(frames) != ANSWER_FRAMES or len(frames[0]):
            return None
        _, head, payload = frames
        if not _bytes.is_answer(head, payload, self._expected, number, self._tail_bytes):
            return None
        found: Rows | None = self._outputs.unpack(payload)
        return found


@dataclass(eq=False, slots=True)
class AskedRows:
    """One question until it is answered. `has_ended` is set after everything else."""

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
    """Where it is asked now; "" while it waits to be asked again."""
    move_at: float = 0.0
    """When the next node is asked, or this one again."""
    backoff: float = MIN_BACKOFF


class PolicyThread(AskingThread):
    """Asks for rows.

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
        self._open: set[AskedRows] = set()
        self._exchanges: dict[int, Exchange] = {}  # by rows
        self._numbers = itertools.count(1)
        facts: dict[str, Any] = {"limits": limits, "keys": keys, "numbers": self._numbers}
        super().__init__("memoire-policy", urls, client=client, context=context, soon=self._soon, **facts)
        for channel in self._channels.values():
            channel.fingerprint = inputs.fingerprint

    # From any thread

    def ask(self, asked: AskedRows) -> None:
        """Have it asked."""
        self.worker.run(self._begin, asked)

    def ask_and_look(self, asked: AskedRows) -> None:
        """Have it asked, and wait a moment for its answer: mostly it has ended then."""
        self.worker.run_and_look(self._begin, asked, lambda: asked.has_ended, asked.deadline)

    def act(self, columns: Any, timeout: float) -> Rows | AskedRows | None:
        """Ask for rows in the shortest way, for a caller that waits: if the first node is as it should be, and nothing
        else is asked. Returns the outputs; or, if they have not come at once, what waits for them; None if nothing was
        asked, and `ask_and_look` has to.
        """
        found: Rows | AskedRows | None = self.worker.run_alone(self._act, columns, timeout)
        return found

    def wait_for(self, asked: AskedRows, deadline: float) -> bool:
        """Wait until it has ended; False if it has not at `deadline`, by time.monotonic()."""
        return self.worker.wait_for(lambda: asked.has_ended, deadline)

    def drop(self, asked: AskedRows) -> None:
        """Its answer is not needed any more."""
        self.worker.post(lambda: self._drop(asked))

    def trouble(self) -> str:
        """Why the nodes may not answer, and what to do. Tries to connect, which takes 0.2 s at most."""
        return self._channels[self.choice.order[0]].link.explain()

    @property
    def denied(self) -> MemoireError | None:
        """Why no node lets this process in; None where one may."""
        found = [channel.link.denied for channel in self._channels.values()]
        return found[0] if all(found) else None

    # ------------------------------------------------------------------------- from here on: inside of the thread

    def _next_time(self) -> float:
        return min(super()._next_time(), *(asked.move_at for asked in self._open), math.inf)

    def _turn(self, ready: dict[object, int]) -> None:
        super()._turn(ready)
        now = time.monotonic()
        for asked in list(self._open):
            self._look_after(asked, now)

    def _soon(self, deadline: float) -> bool:
        """Wait a moment for the answer of the node that is asked. Returns whether that is one, and there is time."""
        url = ""
        for asked in self._open:
            if not asked.url or url not in ("", asked.url):
                return False
            url = asked.url
        if not url or deadline - time.monotonic() <= ANSWER_TIMEOUT:
            return False
        return self._channels[url].take_soon()

    def _look_after(self, asked: AskedRows, now: float) -> None:
        if now >= asked.deadline:
            self._end(asked)
        elif not asked.url:
            if now >= asked.move_at:
                self._send(asked, self.choice.pick(self._is_down), now)
        elif (is_down := self._is_down(asked.url)) or now >= asked.move_at:
            if not is_down:
                self.choice.silent(asked.url, now)
            best = self.choice.pick(self._is_down)
            asked.move_at = now + self._silence
            if best != asked.url:
                self.choice.moves += 1
                self._channels[asked.url].drop(asked.number)
                self._send(asked, best, now)

    def _act(self, columns: Any, timeout: float) -> Rows | AskedRows | None:
        url = self.choice.undisturbed
        if self._open or not url or type(columns) is not dict:
            return None
        channel, first = self._channels[url], columns.get(self._inputs.names[0])
        if type(first) is not np.ndarray or not first.ndim or not channel.is_free:
            return None
        rows = len(first)
        exchange = self._exchanges.get(rows) or self._learned(rows, timeout)
        number = next(self._numbers)
        frames = None if exchange is None else exchange.request(columns, number)
        if exchange is None or frames is None or len(frames[-1]) > channel.longest:
            return None
        now, opened = time.monotonic(), []

        def open_() -> tuple[float, Callable[[Answer], None]]:
            asked = AskedRows(frames[-1], rows, now + timeout, 0, number, url=url, move_at=now + self._silence)
            asked.tried.append(url)
            self._open.add(asked)
            opened.append(asked)
            return asked.deadline, self._answered(asked, url)

        found: Rows | None = channel.ask_at_once(number, frames, now, exchange.outputs, open_)
        return opened[0] if found is None else found

    def _learned(self, rows: int, timeout: float) -> Exchange | None:
        """The exchange of so many rows, kept for the next ones."""
        if timeout <= 2.0 * ANSWER_TIMEOUT or self._outputs.ragged:
            return None
        facts: dict[str, Any] = {"client": self._client, "patience": timeout, "limits": self._limits}
        made = Exchange.of(self._inputs, self._outputs, rows, **facts)
        if made is not None:
            if len(self._exchanges) >= MAX_EXCHANGES:
                self._exchanges.clear()
            self._exchanges[rows] = made
        return made

    def _begin(self, asked: AskedRows) -> None:
        if asked.has_ended:
            return
        asked.number = next(self._numbers)
        self._open.add(asked)
        self._send(asked, self.choice.pick(self._is_down), time.monotonic())

    def _send(self, asked: AskedRows, url: str, now: float) -> None:
        asked.url, asked.move_at = url, now + self._silence
        if url not in asked.tried:
            asked.tried.append(url)
        body = messages.Infer(patience=max(0.0, asked.deadline - now), min_version=asked.min_version)
        channel = self._channels[url]
        finish = self._answered(asked, url)
        channel.ask(body, finish, asked.deadline, payload=asked.payload, sequence=asked.number)

    def _answered(self, asked: AskedRows, url: str) -> Callable[[Answer], None]:
        def finish(answer: Answer) -> None:
            if asked.url != url or asked not in self._open:
                return
            if isinstance(answer, Message):
                self.choice.answered(url)
                self._take(asked, answer)
            elif isinstance(answer, Refused) and answer.code in ("busy", "closed"):
                self._back_off(asked)
            elif isinstance(answer, MemoireTimeout):
                self._end(asked)
            elif isinstance(answer, Refused) and answer.code == "schema":
                self._compare(asked, url, answer)
            else:
                self._end(asked, answer)

        return finish

    def _back_off(self, asked: AskedRows) -> None:
        asked.url, asked.move_at = "", time.monotonic() + asked.backoff * random.uniform(0.5, 1.0)
        asked.backoff = min(MAX_BACKOFF, 2.0 * asked.backoff)

    def _take(self, asked: AskedRows, answer: Message) -> None:
        try:
            if not isinstance(answer.body, messages.Inferred):
                raise ProtocolError("unexpected", f"INFER was answered by {answer.type.name}")
            if answer.header.fingerprint != self._outputs.fingerprint:
                self._compare(asked, asked.url, Refused(asked.url, "schema", "its outputs have another schema"))
                return
            columns, rows = unpack_rows(answer.payload, self._outputs, self._limits)
            if rows != asked.rows:
                raise ProtocolError("value", f"{rows} rows came for {asked.rows}")
        except ProtocolError as error:
            self._end(asked, Refused(asked.url, error.code, error.detail))
            return
        asked.columns, asked.version = columns, answer.body.version
        self._end(asked)

    def _compare(self, asked: AskedRows, url: str, refused: Refused) -> None:
        """Ask a node for its columns, and end with both sides' ones; if it does not say them, as it was refused."""

        def finish(answer: Answer) -> None:
            if asked.url != url or asked not in self._open:
                return
            said = answer.body if isinstance(answer, Message) else None
            sides = {} if not isinstance(said, messages.Welcome) else {"inputs": said.schema, "outputs": said.outputs}
            text = differing_columns(sides, {"inputs": self._inputs, "outputs": self._outputs})
            self._end(asked, Refused(url, "schema", text) if text else refused)

        asked.move_at = asked.deadline
        self._channels[url].ask(messages.Hello(role="actor"), finish, asked.deadline)

    def _end(self, asked: AskedRows, error: MemoireError | None = None) -> None:
        """It is over: it has its columns, an error, or neither, which is that its time has passed."""
        self._open.discard(asked)
        if asked.url:
            self._channels[asked.url].drop(asked.number)
        asked.error = error
        asked.has_ended = True

    def _drop(self, asked: AskedRows) -> None:
        if asked in self._open:
            self._end(asked, Closed("this request"))

    def _at_end(self) -> None:
        for asked in list(self._open):
            self._end(asked, Closed("this policy"))


def differing_columns(node: Mapping[str, str], policy: Mapping[str, RowSchema]) -> str:
    """What a node says of its columns, by name, beside a policy's, where they differ; "" if they do not."""
    texts = []
    for name, text in node.items():
        with contextlib.suppress(MemoireError, ValueError):
            theirs = RowSchema.from_json(text)
            if theirs.fingerprint != policy[name].fingerprint:
                texts.append(f"{name} of the node are {theirs!r:.400}, and those of this policy {policy[name]!r:.400}")
    return f"{'; '.join(texts)}. Give Inference and RemotePolicy the same columns" if texts else ""


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
