"""A worker's calls of a table of prompts: what it leases, and how its answers travel. No socket."""

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
"""Of answers in one request."""
Answers: TypeAlias = Mapping[int, Mapping[str, Any]]
"""Answers to one prompt, by their places in its group."""
LEASE_TIMEOUT = 3.0
"""Seconds for which a lease waits for the answer of one server, when there are others."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A prompt that is this worker's to answer until a moment."""

    key: Key
    """Data set, epoch and index."""
    number: int
    payload: bytes
    missing: tuple[int, ...]
    """Answers that are wanted, by their places in the group."""
    until: float
    """When it ends, by `time.monotonic`."""
    is_evaluation: bool
    """It is never trained on."""
    tags: Mapping[str, str]
    server: str = field(repr=False)

    @property
    def dataset(self) -> str:
        """The prompt's data set."""
        return self.key[0]

    @property
    def epoch(self) -> int:
        """The prompt's epoch."""
        return self.key[1]

    @property
    def index(self) -> int:
        """The prompt's place in its data set."""
        return self.key[2]


class WorkerCalls(TableCalls):
    """Leases prompts and answers them. Thread-safe."""

    def __init__(self, transport: Transport, rank: tuple[int, int], timeout: float, session: str) -> None:
        super().__init__(transport, rank, timeout, session)
        self._one_lease = threading.Lock()  # held while prompts are leased: what is `held` must be known by then
        # By the lock:
        self._held: dict[str, dict[int, set[int]]] = {}  # by server and lease: answers that are still wanted
        self._ends: dict[tuple[str, int], float] = {}  # of leases but those renewed for the table's time
        self._pieces: dict[tuple[int, int], int] = {}  # of answers that are not whole: pieces that were sent
        self._turn = 0

    @checked_names()
    def lease(
        self, count: int = 1, seconds: float | None = None, timeout: float | None = None, *, version: int | None = None
    ) -> list[Lease]:
        """Prompts for this worker: at least one, at most `count`.

        Args:
            seconds: For which they are leased, above 0; None is what the table says.
            timeout: Seconds to wait until there is one.
            version: Of the worker's model. With `max_model_lag`, one that is too old gets nothing.

        Raises:
            MemoireTimeout: none came in that time; it says why.
        """
        wanted, lasting = whole("count", count, 1, 1024), _lasting(seconds)
        acting, patience = None if version is None else model_version(version, "version"), self._patience(timeout)
        with Held(self._one_lease):
            return self._servers.wait(
                "lease", patience, lambda deadline: self._lease(wanted, lasting, acting, deadline)
            )

    def renew(self, lease: Lease, seconds: float | None = None, timeout: float | None = None) -> bool:
        """Go on with a prompt for so many seconds from now; False if it is not wanted of this worker any more."""
        return self._keep("renew", checked_lease(lease), _lasting(seconds), self._deadline(timeout))

    def release(self, lease: Lease, timeout: float | None = None) -> bool:
        """Give a prompt back, so that another worker gets it at once. Answers that are whole stay."""
        return self._keep("release", checked_lease(lease), 0.0, self._deadline(timeout))

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
        """Answer a prompt; whether this answer counts. It does not if the same one came before, from whoever had a
        lease of the prompt.

        Args:
            index: Which answer of the group, from 0.
            columns: Values by the schema's columns, not all of them. Of a ragged column an array [L, *F].
            version: Of the model that made it; 0 is unknown, which `max_model_lag` refuses. A group is as old as its
                oldest piece.
            piece: Number of a piece of an answer that comes in several; None counts them. Ragged columns are appended.
            last: Whether the answer is whole with this piece.

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
        """Several answers to one prompt in one request, by their places in the group; for each whether it counts."""
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
        """Answers to several prompts, each with its lease, in as few requests as they fit into: the quickest way if a
        worker has several groups at once. For each prompt whether its answers count.
        """
        deadline, flags = self._deadline(timeout), dict[tuple[int, int], bool]()
        given = [(checked_lease(lease), mapping("answers", each)) for lease, each in answers]
        for _, each in given:
            for index in each:
                whole("index", index, 0)
        facts: dict[str, Any] = {"version": model_version(version, "version"), "piece": piece, "is_last": last}
        schema = self.schema
        left = {
            name: self._requests([each for each in given if each[0].server == name], schema, **facts)
            for name in {lease.server for lease, _ in given}
        }
        while parts := {name: part for name, each in left.items() if (part := next(each, None)) is not None}:
            requests = {
                name: Request(messages.Answers(call="answer", pieces=pieces), data)
                for name, (pieces, data) in parts.items()
            }
            for name, reply in self._servers.all(requests, deadline).items():
                for sent, flag in zip(parts[name][0], reply.body.flags, strict=True):
                    flags[sent.lease, sent.answer] = flag < 2
                    self._pieces[sent.lease, sent.answer] = sent.piece + 1
        for lease, each in given if last else ():
            for index in each:
                self._pieces.pop((lease.number, index), None)
            self._settle(lease, each)
        return [[flags[lease.number, index] for index in each] for lease, each in given]

    def fail(self, lease: Lease, index: int, reason: str, *, again: bool = True, timeout: float | None = None) -> bool:
        """Tell that an answer does not come; whether it was still wanted.

        Args:
            again: Whether somebody may try once more. Without it the answer has failed for good, and its group is
                closed with the others, if those are `at_least` so many.
        """
        index, told = whole("index", index, 0), text("reason", str(reason))[:1000]
        piece = messages.AnswerPiece(*checked_lease(lease).key, lease.number, index, 0, True, 0, 0, [], 0, told, again)
        body = messages.Answers(call="fail", pieces=[piece])
        was_wanted = bool(self._servers.one(lease.server, Request(body), self._deadline(timeout)).body.flags[0] < 2)
        if not again:
            self._settle(lease, [index])
        return was_wanted

    def amend(self, key: Key, index: int, columns: Mapping[str, Any], timeout: float | None = None) -> bool:
        """Bring columns of an answer from elsewhere, such as a reward model; whether they came in time: before the
        group was ready.
        """
        (key,), index = checked_keys([key]), whole("index", index, 0)
        deadline, schema = self._deadline(timeout), self.schema
        made = packed(schema, raw_columns(schema, columns))
        piece = piece_of(key, 0, index, made)
        request = Request(messages.Answers(call="amend", pieces=[piece]), made.data)
        return bool(self._at_home(key, request, deadline).body.flags[0] < 2)

    # Leases

    def _lease(
        self, count: int, seconds: float, version: int | None, deadline: float
    ) -> tuple[list[Lease] | None, str]:
        names, reasons = self._servers.names, list[str]()
        self._turn += 1
        for place in range(len(names)):
            name = names[(self._turn + place) % len(names)]
            patience = deadline if len(names) == 1 else min(deadline, self._transport.now() + LEASE_TIMEOUT)
            having = self._having(name)
            body = messages.Answers(call="lease", count=count, seconds=seconds, version=version, leases=having)
            answer = self._servers.some({name: Request(body)}, patience)[name]
            if isinstance(answer, Refused):
                raise answer
            if isinstance(answer, MemoireError):
                reasons.append(f"server {name!r} does not answer")
                continue
            if answer.body.leases:
                return self._take(name, answer), ""
            reasons.append(answer.body.wait if len(names) == 1 else f"server {name!r}: {answer.body.wait}")
        return None, "; ".join(reasons) or "no server is known"

    def _take(self, name: str, answer: CallReply) -> list[Lease]:
        leases, begin, now = [], 0, self._transport.now()
        for told in answer.body.leases:
            payload = bytes(answer.payload[begin : begin + told.bytes])
            begin += told.bytes
            key, until = (told.dataset, told.epoch, told.index), now + told.seconds
            leases.append(
                Lease(key, told.lease, payload, tuple(told.missing), until, told.is_evaluation, told.tags, name)
            )
        with Held(self._lock):
            held = self._held.setdefault(name, {})
            for lease in leases:
                self._ends[name, lease.number] = lease.until  # first: one without an end would be held for good
                held[lease.number] = set(lease.missing)
        self._learn([lease.key for lease in leases], name)
        return leases

    def _let_go(self, lease: Lease) -> None:
        """A lease is over, as far as this worker is concerned."""
        with Held(self._lock):
            self._held.get(lease.server, {}).pop(lease.number, None)
            self._ends.pop((lease.server, lease.number), None)

    def _renewed(self, lease: Lease, seconds: float) -> None:
        """A lease goes on. Without `seconds` it does as long as the table says, which this worker does not know."""
        with Held(self._lock):
            if seconds:
                self._ends[lease.server, lease.number] = self._transport.now() + seconds
            else:
                self._ends.pop((lease.server, lease.number), None)

    def _having(self, name: str) -> list[int]:
        """Numbers of the leases at a server that this worker knows of, without those whose time has passed."""
        now = self._transport.now()
        with Held(self._lock):
            held = self._held.get(name, {})
            for number in [number for number in held if self._ends.get((name, number), math.inf) < now]:
                del held[number], self._ends[name, number]
            return sorted(held)

    def _settle(self, lease: Lease, indexes: Iterable[int]) -> None:
        """These answers are not wanted of this worker any more; a lease without others is over."""
        with Held(self._lock):
            wanted = self._held.get(lease.server, {}).get(lease.number)
            if wanted is not None:
                wanted.difference_update(indexes)
        if wanted is not None and not wanted:
            self._let_go(lease)

    def _keep(self, call: Literal["renew", "release"], lease: Lease, seconds: float, deadline: float) -> bool:
        """Renew a lease, or give it back; whether it was this worker's."""
        body = messages.Answers(call=call, leases=[lease.number], seconds=seconds)
        is_mine = bool(self._servers.one(lease.server, Request(body), deadline).body.flags[0])
        if call == "release" or not is_mine:
            self._let_go(lease)
        else:
            self._renewed(lease, seconds)
        return is_mine

    # Answers

    def _requests(
        self, given: Iterable[tuple[Lease, Answers]], schema: Schema, *, version: int, piece: int | None, is_last: bool
    ) -> Iterator[tuple[list[messages.AnswerPiece], bytes]]:
        """The pieces of each request, of about as many bytes as one may have."""
        limit = int(self._transport.limits.tuning.request_bytes * ANSWER_PART)
        pieces: list[messages.AnswerPiece] = []
        parts: list[bytes] = []
        size = 0
        for lease, index, columns in ((lease, *each) for lease, answers in given for each in answers.items()):
            cuts = list(cut_up(schema, raw_columns(schema, columns), limit))
            first = self._pieces.get((lease.number, index), 0) if piece is None else piece
            for place, raw in enumerate(cuts):
                made, is_end = packed(schema, raw), is_last and place == len(cuts) - 1
                if pieces and (size + len(made.data) > limit or len(pieces) >= MAX_PIECES):
                    yield pieces, b"".join(parts)
                    pieces, parts, size = [], [], 0
                pieces.append(piece_of(lease.key, lease.number, index, made, first + place, is_end, version))
                parts.append(made.data)
                size += len(made.data)
        if pieces:
            yield pieces, b"".join(parts)


def _lasting(given: float | None) -> float:
    """Seconds of a lease as they travel: 0 for what the table says. Raises ParameterError."""
    if given is None:
        return 0.0
    if not (found := seconds(given, 0.0)):
        raise ParameterError("seconds", given, "above 0, or None for what the table says (`lease`)")
    return found


def checked_lease(lease: Any) -> Lease:
    """The lease itself. Raises WrongType."""
    if not isinstance(lease, Lease):
        raise WrongType("lease", "a Lease, as lease() returns them", type(lease).__name__)
    return lease


def piece_of(
    key: Key, lease: int, index: int, made: Packed, number: int = 0, is_last: bool = True, version: int = 0
) -> messages.AnswerPiece:
    """A piece of an answer as it travels, but for its bytes."""
    columns, lengths, size = made.columns, list(made.lengths), len(made.data)
    return messages.AnswerPiece(*key, lease, index, number, is_last, version, columns, lengths, size, "", False)


def cut_up(schema: Schema, raw: RawColumns, limit: int) -> Iterator[RawColumns]:
    """Columns of one answer in pieces of at most so many bytes. Ragged ones are cut; a plain one is in one piece.

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
            text = f"{what} of at most {limit} bytes, since each travels in one request (request_bytes)"
            raise EntryError(name, text, f"{column.nbytes} bytes")
    room, piece = limit, RawColumns()
    for place, data in raw.items():
        step, begin, is_left = schema[schema.names[place]].nbytes, 0, True
        while is_left:
            take = min(room // step * step, len(data) - begin)
            if take or not data:  # an empty one has to come, too
                piece = {**piece, place: data[begin : begin + take]}
                begin, room = begin + take, room - take
            is_left = begin < len(data)
            if is_left or room < 8:
                yield piece
                piece, room = RawColumns(), limit
    if piece:
        yield piece
