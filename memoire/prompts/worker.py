"""Calls of a worker on a table of prompts: leases and answers. No socket."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from memoire import Schema
from memoire.building import Held, checked_names, mapping, model_version, seconds, text, whole
from memoire.errors import EntryError, MemoireError, ParameterError, Refused, WrongType
from memoire.kinds import CallReply, Request, Transport

from . import messages
from .columns import ANSWER_PART, Key, Packed, RawColumns, packed, raw_columns
from .servers import TableCalls, checked_keys

MAX_PIECES = 1024
"""Largest number of answers in one request."""
Answers: TypeAlias = Mapping[int, Mapping[str, Any]]
"""Answers to one prompt, by their places in the group."""
LEASE_TIMEOUT = 3.0
"""Seconds that a lease waits for the reply of one server if there are other servers."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Lease of a prompt, which this worker has to answer in time."""

    key: Key
    """Name of the prompt: data set, epoch and index."""
    number: int
    payload: bytes
    missing: tuple[int, ...]
    """Places in the group of the missing answers."""
    until: float
    """Time at which the lease ends, in seconds of `time.monotonic`."""
    is_evaluation: bool
    """True if the prompt is never trained on."""
    tags: Mapping[str, str]
    server: str = field(repr=False)

    @property
    def dataset(self) -> str:
        """Data set of the prompt."""
        return self.key[0]

    @property
    def epoch(self) -> int:
        """Epoch of the prompt in its data set."""
        return self.key[1]

    @property
    def index(self) -> int:
        """Index of the prompt in its data set."""
        return self.key[2]


class WorkerCalls(TableCalls):
    """Calls that lease prompts and answer them. Thread-safe."""

    def __init__(self, transport: Transport, rank: tuple[int, int], timeout: float, session: str) -> None:
        super().__init__(transport, rank, timeout, session)
        self._one_lease = threading.Lock()  # only one request for leases is open: a request sends all held leases
        # Guarded by the lock:
        self._held: dict[str, dict[int, set[int]]] = {}  # missing answers by server and lease
        self._ends: dict[tuple[str, int], float] = {}  # ends of leases, but for those renewed for the table's time
        self._pieces: dict[tuple[int, int], int] = {}  # sent pieces of unfinished answers
        self._turn = 0

    @checked_names()
    def lease(
        self, count: int = 1, seconds: float | None = None, timeout: float | None = None, *, version: int | None = None
    ) -> list[Lease]:
        """Lease prompts: at least one, at most `count`.

        Args:
            seconds: Duration of the lease, above 0; None is the table's setting.
            timeout: Seconds to wait for a prompt.
            version: Version of the worker's model. With `max_model_lag`, a model that is too old gets no prompts.

        Raises:
            MemoireTimeout: no prompt could be leased in time; the message has the reason.
        """
        wanted, duration = whole("count", count, 1, 1024), _duration(seconds)
        acting, patience = None if version is None else model_version(version, "version"), self._patience(timeout)
        with Held(self._one_lease):
            return self._servers.wait(
                "lease", patience, lambda deadline: self._lease(wanted, duration, acting, deadline)
            )

    def renew(self, lease: Lease, seconds: float | None = None, timeout: float | None = None) -> bool:
        """Extend a lease to so many seconds from now. Return False if this worker does not hold it any more."""
        return self._renew_or_release("renew", checked_lease(lease), _duration(seconds), self._deadline(timeout))

    def release(self, lease: Lease, timeout: float | None = None) -> bool:
        """Give a prompt back to other workers; whole answers stay. Return False if this worker does not hold it."""
        return self._renew_or_release("release", checked_lease(lease), 0.0, self._deadline(timeout))

    @checked_names()
    def answer(
        self,
        lease: Lease,
        index: int,
        columns: Mapping[str, Any],
        version: int = 0,
        *,
        piece: int | None = None,
        last: bool = True,
        timeout: float | None = None,
    ) -> bool:
        """Send an answer, or a piece of one. Return False if it is late: after another lease's.

        Args:
            index: Place of the answer in the group, from 0.
            columns: Values by column, any part of the schema's columns. A ragged column takes an array [L, *F].
            version: Version of the model that made the answer; 0 is unknown, which `max_model_lag` refuses. A group is
                as old as its oldest piece.
            piece: Number of the piece, if an answer is sent in several; None counts them. Ragged columns are appended.
            last: True if the answer is whole with this piece.

        Raises:
            EntryError, NoSuchField: a value does not fit its column.
        """
        return self.answers(lease, {index: columns}, version, piece=piece, last=last, timeout=timeout)[0]

    @checked_names()
    def answers(
        self,
        lease: Lease,
        answers: Mapping[int, Mapping[str, Any]],
        version: int = 0,
        *,
        piece: int | None = None,
        last: bool = True,
        timeout: float | None = None,
    ) -> list[bool]:
        """Send several answers to one prompt, by their places in the group. Return whether each counts."""
        return self.answer_all([(lease, answers)], version, piece=piece, last=last, timeout=timeout)[0]

    @checked_names()
    def answer_all(
        self,
        answers: Iterable[tuple[Lease, Mapping[int, Mapping[str, Any]]]],
        version: int = 0,
        *,
        piece: int | None = None,
        last: bool = True,
        timeout: float | None = None,
    ) -> list[list[bool]]:
        """Send answers to several prompts, each with its lease, in as few requests as possible: the fastest way for
        several groups. Return for each prompt whether its answers count.
        """
        deadline, flags = self._deadline(timeout), dict[tuple[int, int], bool]()
        leased = [(checked_lease(lease), mapping("answers", each)) for lease, each in answers]
        for _, each in leased:
            for index in each:
                whole("index", index, 0)
        facts: dict[str, Any] = {"version": model_version(version, "version"), "piece": piece, "is_last": last}
        schema = self.schema
        batches = {
            name: self._requests([each for each in leased if each[0].server == name], schema, **facts)
            for name in {lease.server for lease, _ in leased}
        }
        while parts := {name: part for name, each in batches.items() if (part := next(each, None)) is not None}:
            requests = {
                name: Request(messages.Answers(call="answer", pieces=pieces), data)
                for name, (pieces, data) in parts.items()
            }
            for name, reply in self._servers.replies_by_server(requests, deadline).items():
                for sent, flag in zip(parts[name][0], reply.body.flags, strict=True):
                    flags[sent.lease, sent.answer] = flag < 2
                    self._pieces[sent.lease, sent.answer] = sent.piece + 1
        for lease, each in leased if last else ():
            for index in each:
                self._pieces.pop((lease.number, index), None)
            self._settle(lease, each)
        return [[flags[lease.number, index] for index in each] for lease, each in leased]

    def fail(self, lease: Lease, index: int, reason: str, *, again: bool = True, timeout: float | None = None) -> bool:
        """Report that an answer does not come. Return True if it was still wanted.

        Args:
            again: True if another lease may give the answer. With False the answer has failed for good; once the other
                answers are settled, its group is ready if at least `at_least` answers are whole.
        """
        index, reason = whole("index", index, 0), text("reason", str(reason))[:1000]
        key = checked_lease(lease).key
        piece = messages.AnswerPiece(*key, lease.number, index, 0, True, 0, 0, [], 0, reason, again)
        body = messages.Answers(call="fail", pieces=[piece])
        was_wanted = bool(
            self._servers.reply_of(lease.server, Request(body), self._deadline(timeout)).body.flags[0] < 2
        )
        if not again:
            self._settle(lease, [index])
        return was_wanted

    def amend(self, key: Key, index: int, columns: Mapping[str, Any], timeout: float | None = None) -> bool:
        """Add columns of an answer from elsewhere, such as a reward model. Return False if the group was ready."""
        (key,), index = checked_keys([key]), whole("index", index, 0)
        deadline, schema = self._deadline(timeout), self.schema
        added = packed(schema, raw_columns(schema, columns))
        piece = piece_of(key, 0, index, added)
        request = Request(messages.Answers(call="amend", pieces=[piece]), added.data)
        return bool(self._ask_home(key, request, deadline).body.flags[0] < 2)

    # Leases

    def _lease(
        self, count: int, seconds: float, version: int | None, deadline: float
    ) -> tuple[list[Lease] | None, str]:
        names, reasons = self._servers.names, list[str]()
        self._turn += 1
        for place in range(len(names)):
            name = names[(self._turn + place) % len(names)]
            patience = deadline if len(names) == 1 else min(deadline, self._transport.now() + LEASE_TIMEOUT)
            having = self._known_leases(name)
            body = messages.Answers(call="lease", count=count, seconds=seconds, version=version, leases=having)
            answer = self._servers.replies_or_errors({name: Request(body)}, patience)[name]
            if isinstance(answer, Refused):
                raise answer
            if isinstance(answer, MemoireError):
                reasons.append(f"server {name!r} does not answer")
                continue
            if answer.body.leases:
                return self._add_leases(name, answer), ""
            reasons.append(answer.body.wait if len(names) == 1 else f"server {name!r}: {answer.body.wait}")
        return None, "; ".join(reasons) or "no server is known"

    def _add_leases(self, name: str, answer: CallReply) -> list[Lease]:
        leases, begin, now = [], 0, self._transport.now()
        for leased in answer.body.leases:
            payload = bytes(answer.payload[begin : begin + leased.bytes])
            begin += leased.bytes
            key, until = (leased.dataset, leased.epoch, leased.index), now + leased.seconds
            leases.append(
                Lease(key, leased.lease, payload, tuple(leased.missing), until, leased.is_evaluation, leased.tags, name)
            )
        with Held(self._lock):
            held = self._held.setdefault(name, {})
            for lease in leases:
                self._ends[name, lease.number] = lease.until  # set first: a lease without an end would be held for good
                held[lease.number] = set(lease.missing)
        self._learn([lease.key for lease in leases], name)
        return leases

    def _forget_lease(self, lease: Lease) -> None:
        """Forget a lease that has ended for this worker."""
        with Held(self._lock):
            self._held.get(lease.server, {}).pop(lease.number, None)
            self._ends.pop((lease.server, lease.number), None)

    def _record_renewal(self, lease: Lease, seconds: float) -> None:
        """Record the new end of a lease. Without `seconds` it is unknown, because the table sets it."""
        with Held(self._lock):
            if seconds:
                self._ends[lease.server, lease.number] = self._transport.now() + seconds
            else:
                self._ends.pop((lease.server, lease.number), None)

    def _known_leases(self, name: str) -> list[int]:
        """Return the numbers of this worker's leases at a server, without expired ones."""
        now = self._transport.now()
        with Held(self._lock):
            held = self._held.get(name, {})
            for number in [number for number in held if self._ends.get((name, number), math.inf) < now]:
                del held[number], self._ends[name, number]
            return sorted(held)

    def _settle(self, lease: Lease, indexes: Iterable[int]) -> None:
        """Record that answers are settled; forget a lease without missing answers."""
        with Held(self._lock):
            wanted = self._held.get(lease.server, {}).get(lease.number)
            if wanted is not None:
                wanted.difference_update(indexes)
        if wanted is not None and not wanted:
            self._forget_lease(lease)

    def _renew_or_release(
        self, call: Literal["renew", "release"], lease: Lease, seconds: float, deadline: float
    ) -> bool:
        """Renew a lease, or give it back. Return True if it was this worker's."""
        body = messages.Answers(call=call, leases=[lease.number], seconds=seconds)
        is_mine = bool(self._servers.reply_of(lease.server, Request(body), deadline).body.flags[0])
        if call == "release" or not is_mine:
            self._forget_lease(lease)
        else:
            self._record_renewal(lease, seconds)
        return is_mine

    # Answers

    def _requests(
        self, leased: Iterable[tuple[Lease, Answers]], schema: Schema, *, version: int, piece: int | None, is_last: bool
    ) -> Iterator[tuple[list[messages.AnswerPiece], bytes]]:
        """Yield the pieces of each request and their bytes, which fill a request as far as possible."""
        limit = int(self._transport.limits.tuning.request_bytes * ANSWER_PART)
        pieces: list[messages.AnswerPiece] = []
        parts: list[bytes] = []
        size = 0
        for lease, index, columns in ((lease, *each) for lease, answers in leased for each in answers.items()):
            cuts = list(split_answer(schema, raw_columns(schema, columns), limit))
            first = self._pieces.get((lease.number, index), 0) if piece is None else piece
            for place, raw in enumerate(cuts):
                part, is_end = packed(schema, raw), is_last and place == len(cuts) - 1
                if pieces and (size + len(part.data) > limit or len(pieces) >= MAX_PIECES):
                    yield pieces, b"".join(parts)
                    pieces, parts, size = [], [], 0
                pieces.append(piece_of(lease.key, lease.number, index, part, first + place, is_end, version))
                parts.append(part.data)
                size += len(part.data)
        if pieces:
            yield pieces, b"".join(parts)


def _duration(duration: float | None) -> float:
    """Return seconds of a lease for a message: 0 for the table's setting. Raise ParameterError."""
    if duration is None:
        return 0.0
    if not (checked := seconds(duration, 0.0)):
        raise ParameterError("seconds", duration, "above 0, or None for the table's setting (lease)")
    return checked


def checked_lease(lease: Any) -> Lease:
    """Return the lease itself. Raise WrongType for any other object."""
    if not isinstance(lease, Lease):
        raise WrongType("lease", "a Lease that lease() returned", type(lease).__name__)
    return lease


def piece_of(
    key: Key, lease: int, index: int, packed_columns: Packed, number: int = 0, is_last: bool = True, version: int = 0
) -> messages.AnswerPiece:
    """Return the row of a piece of an answer for a message; its bytes follow separately."""
    columns, lengths, size = packed_columns.columns, list(packed_columns.lengths), len(packed_columns.data)
    return messages.AnswerPiece(*key, lease, index, number, is_last, version, columns, lengths, size, "", False)


def split_answer(schema: Schema, raw: RawColumns, limit: int) -> Iterator[RawColumns]:
    """Split the columns of one answer into pieces of at most `limit` bytes. Only ragged columns are split.

    Raises:
        EntryError: a plain column, or one element of a ragged one, is larger. Nothing was sent.
    """
    if sum(map(len, raw.values())) <= limit:
        yield raw
        return
    for place in raw:
        column = schema[name := schema.names[place]]
        if column.nbytes > limit:
            what = "elements" if column.is_ragged else "values"
            text = f"{what} of at most {limit} bytes, because each has to fit into one request (request_bytes)"
            raise EntryError(name, text, f"{column.nbytes} bytes")
    room, piece = limit, RawColumns()
    for place, data in raw.items():
        step, begin, is_left = schema[schema.names[place]].nbytes, 0, True
        while is_left:
            take = min(room // step * step, len(data) - begin)
            if take or not data:  # an empty column is sent, too
                piece = {**piece, place: data[begin : begin + take]}
                begin, room = begin + take, room - take
            is_left = begin < len(data)
            if is_left or room < 8:
                yield piece
                piece, room = RawColumns(), limit
    if piece:
        yield piece
