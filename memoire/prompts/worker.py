"""A worker's side of a table of prompts: what it has leased, and how its answers travel. No socket."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from memoire import Schema
from memoire.building import Held
from memoire.errors import EntryError, MemoireError, MemoireTimeout, Refused
from memoire.kinds import CallReply, Request

from . import messages
from .columns import ANSWER_PART, Packed, RawColumns, packed, raw_columns
from .rows import Key
from .servers import PromptServers

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


class PromptWorker:
    """Leases prompts and sends answers. Thread-safe."""

    def __init__(self, servers: PromptServers) -> None:
        self._servers = servers
        self._one_lease = threading.Lock()  # held while prompts are leased: what is `held` must be known by then
        self._lock = threading.Lock()  # for what follows
        self._held: dict[str, dict[int, set[int]]] = {}  # by server and lease: answers that are still wanted
        self._ends: dict[tuple[str, int], float] = {}  # of leases but those renewed for the table's time
        self._homes: dict[Key, str] = {}  # of prompts that were leased or listed
        self._pieces: dict[tuple[int, int], int] = {}  # of answers that are not whole: pieces that were sent
        self._turn = 0

    # Leases

    def lease(self, count: int, seconds: float, version: int | None, patience: float) -> list[Lease]:
        """At least one prompt, at most `count`. Raises MemoireTimeout."""
        with Held(self._one_lease):
            return self._servers.wait(
                "lease", patience, lambda deadline: self._lease(count, seconds, version, deadline)
            )

    def _lease(
        self, count: int, seconds: float, version: int | None, deadline: float
    ) -> tuple[list[Lease] | None, str]:
        names, reasons = self._servers.names, list[str]()
        self._turn += 1
        for place in range(len(names)):
            name = names[(self._turn + place) % len(names)]
            patience = deadline if len(names) == 1 else min(deadline, self._servers.transport.now() + LEASE_TIMEOUT)
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
        leases, begin, now = [], 0, self._servers.transport.now()
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
            self._homes.update((lease.key, name) for lease in leases)
        return leases

    def forget(self, lease: Lease) -> None:
        """A lease is over, as far as this worker is concerned."""
        with Held(self._lock):
            self._held.get(lease.server, {}).pop(lease.number, None)
            self._ends.pop((lease.server, lease.number), None)

    def _renewed(self, lease: Lease, seconds: float) -> None:
        """A lease goes on. Without `seconds` it does as long as the table says, which this worker does not know."""
        with Held(self._lock):
            if seconds:
                self._ends[lease.server, lease.number] = self._servers.transport.now() + seconds
            else:
                self._ends.pop((lease.server, lease.number), None)

    def _having(self, name: str) -> list[int]:
        """Numbers of the leases at a server that this worker knows of, without those whose time has passed."""
        now = self._servers.transport.now()
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
            self.forget(lease)

    def keep(self, call: str, leases: Sequence[Lease], seconds: float, patience: float) -> list[bool]:
        """Renew leases, or give them back ("release"); for each whether it was this worker's."""
        deadline = self._servers.transport.now() + patience
        found: dict[int, bool] = {}
        for name in {lease.server for lease in leases}:
            numbers = [lease.number for lease in leases if lease.server == name]
            body = messages.Answers(call=call, leases=numbers, seconds=seconds)  # type: ignore[arg-type]
            reply = self._servers.one(name, Request(body), deadline)
            found |= dict(zip(numbers, map(bool, reply.body.flags), strict=True))
        for lease in leases:
            if call == "release" or not found[lease.number]:
                self.forget(lease)
            else:
                self._renewed(lease, seconds)
        return [found[lease.number] for lease in leases]

    # Answers

    def answer(
        self, given: Sequence[tuple[Lease, Answers]], schema: Schema, *, version: int, piece: int | None,
        is_last: bool, patience: float,
    ) -> list[list[bool]]:  # fmt: skip
        """Send answers to prompts; for each prompt whether each of them counts.

        Args:
            piece: Number of this piece of each; None is the one after those that were sent.
        """
        deadline, flags = self._servers.transport.now() + patience, dict[tuple[int, int], bool]()
        facts: dict[str, Any] = {"version": version, "piece": piece, "is_last": is_last}
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
        for lease, answers in given if is_last else ():
            for index in answers:
                self._pieces.pop((lease.number, index), None)
            self._settle(lease, answers)
        return [[flags[lease.number, index] for index in answers] for lease, answers in given]

    def _requests(
        self, given: Iterable[tuple[Lease, Answers]], schema: Schema, *, version: int, piece: int | None, is_last: bool
    ) -> Iterator[tuple[list[messages.AnswerPiece], bytes]]:
        """The pieces of each request, of about as many bytes as one may have."""
        limit = int(self._servers.transport.limits.tuning.request_bytes * ANSWER_PART)
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

    def fail(self, lease: Lease, index: int, reason: str, is_again: bool, patience: float) -> bool:
        """Tell that an answer does not come; whether it was still wanted."""
        piece = messages.AnswerPiece(*lease.key, lease.number, index, 0, True, 0, 0, [], 0, reason[:1000], is_again)
        body = messages.Answers(call="fail", pieces=[piece])
        deadline = self._servers.transport.now() + patience
        was_wanted = bool(self._servers.one(lease.server, Request(body), deadline).body.flags[0] < 2)
        if not is_again:
            self._settle(lease, [index])
        return was_wanted

    def amend(self, key: Key, index: int, columns: Mapping[str, Any], schema: Schema, patience: float) -> bool:
        """Bring columns of an answer from elsewhere; whether they came in time."""
        made = packed(schema, raw_columns(schema, columns))
        request = Request(messages.Answers(call="amend", pieces=[piece_of(key, 0, index, made)]), made.data)
        return bool(self.at_home(key, request, self._servers.transport.now() + patience).body.flags[0] < 2)

    # Where a prompt is

    def learn(self, keys: Iterable[Key], server: str) -> None:
        """These prompts are at this server."""
        with Held(self._lock):
            if len(self._homes) > 1 << 18:
                self._homes.clear()  # for a prompt whose server is not known, each server is asked
            self._homes.update((key, server) for key in keys)

    def at_home(self, key: Key, request: Request, deadline: float) -> CallReply:
        """Ask the server that has a prompt: the one that is known, or else each of them."""
        with Held(self._lock):
            home = self._homes.get(key)
        if home in self._servers.names:
            assert home is not None
            answer = self._servers.some({home: request}, deadline)[home]
            if isinstance(answer, CallReply):
                return answer
            if not (isinstance(answer, Refused) and answer.code == "missing"):
                raise answer
        answers = self._servers.some(dict.fromkeys(self._servers.names, request), deadline)
        for name, answer in answers.items():
            if isinstance(answer, CallReply):
                self.learn([key], name)
                return answer
        errors = [answer for answer in answers.values() if isinstance(answer, MemoireError)]
        raise next((each for each in errors if isinstance(each, MemoireTimeout)), errors[0])


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
