"""Accounts handler: sends pages of a run's accounts, and keeps accounts of drained servers. Pure.

Feedback handler: sets priorities of entries stored here, and queues TD errors for owners of other entries. Pure.

learner     ids and TD errors ──▶ apply       entries of this server: set in the pool
                                              entries of client 7: wait until its UPDATE, the newest of each entry
client 7    UPDATE ──▶ fetch(through=0)       piece 1 is sent, and kept until client 7 reports it as applied
            UPDATE ──▶ fetch(through=1)       piece 2, of what has come since

At every moment each TD error is in one place of `FeedbackCounts`. A sent TD error is never dropped, since its owner may
have applied it. Of unsent TD errors only the newest of an entry is needed.

Accounts in memory: accounts of clients that are gone, or silent for long, leave memory. Pure.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from memoire import arguments
from memoire._core import at_once, setting
from memoire.accounting.account import Account, FeedbackCounts
from memoire.accounting.ledger import SILENCE_TIMEOUT
from memoire.accounting.merge import PAGE_ROWS, Rows, merge
from memoire.accounting.runs import RunState
from memoire.errors import ParameterError, ProtocolError
from memoire.figures import Timing, Timings
from memoire.replay.batch import PriorityUpdate, grouped_by_client, newest_of_each
from memoire.replay.conversion import td_errors_for
from memoire.replay.writing import Changes, adding_changes
from memoire.server.state import ServerState
from memoire.tables.registry import Reply
from memoire.tables.table import OpenTable
from memoire.wire import containers, messages
from memoire.wire.frames import MessageHeader, encoded_bytes
from memoire.wire.rows import ACCOUNT, unpack_accounts

MAX_RUNS = 1024
"""Maximum names of runs in one reply; the newest are sent."""
MAX_FORMER_RUNS = 1 << 14
"""Maximum runs of this server and of other servers together."""
MAX_ACCOUNT_READINGS = 4
"""Maximum paged readings of accounts at the same time. A further reading ends the oldest. The next pages of an ended
reading show the accounts as they are then, each account once, since pages follow the keys.
"""
FEW_LEFT = 0.25
"""Fraction of the allowed new clients below which the server warns and is not ready."""
CROWD = 1 << 16
"""Accounts in memory above which silent clients' accounts leave memory sooner."""


class AccountsHandler:
    """Handler of accounts: sends them in pages, keeps those of other servers, and moves accounts of clients that have
    left, and former runs without requests, out of memory. Warns if too many new clients come.

    Args:
        max_runs: Maximum names of runs in one reply.
        max_former_runs: Maximum runs, including those of other servers.
        page_rows: Accounts in a page.
        crowd: Accounts in memory above which silent clients' accounts leave memory sooner.
    """

    def __init__(
        self,
        state: ServerState,
        *,
        max_runs: int = MAX_RUNS,
        max_former_runs: int = MAX_FORMER_RUNS,
        page_rows: int = PAGE_ROWS,
        crowd: int = CROWD,
    ) -> None:
        self._state, self._crowd, self._warned_at = state, crowd, float("-inf")
        self._max_runs, self._max_former_runs, self._page_rows = max_runs, max_former_runs, page_rows
        # Accounts in memory at the begin of a reading, by reader and run.
        self._readings: OrderedDict[tuple[bytes, str], Rows] = OrderedDict()

    def page(self, now: float, header: MessageHeader, body: messages.LedgerRequest, _: Any) -> Reply:
        """Return a page of a run's accounts and facts about the run."""
        state = self._state
        run = state.runs.named(body.run) if body.run else state.run
        if run is None:
            raise ProtocolError("run", f"this server knows no run {body.run!r}")
        tail = state.receivers.limits_of(header.client).tail_bytes
        rows, has_more = self._read(header.client, run, body.after, max(1, tail // 2 // ACCOUNT.itemsize))
        pools = [table.pool.stats() for table in state.tables if run is state.run]
        return Reply(
            messages.Accounts(
                run_name=run.name,
                epoch=state.epoch,
                finished=run.finished,
                durable=state.committer.is_durable,
                runs=_newest([facts.name for facts in state.runs.facts()][-self._max_runs :], tail // 4),
                accounts=rows.tobytes(),
                more=has_more,
                time=max(0.0, now),
                applied=sum(pool.applied for pool in pools),
                stale=sum(pool.stale for pool in pools),
                guests=state.ledger.guests_since(now - SILENCE_TIMEOUT),
                unfinished=sum(table.pool.unfinished for table in state.tables),
            )
        )

    def _read(self, reader: bytes, run: RunState, after: bytes, most: int) -> tuple[Rows, bool]:
        """Return the rows after a key, as they were at the begin of the reading, and True if there are more."""
        key = reader, run.name
        live = self._readings.get(key)
        if not after or live is None:
            live = self._readings[key] = run.rows_in_memory(self._state.home)
        rows, has_more = run.page(live, after, min(most, self._page_rows))
        if not has_more:
            del self._readings[key]
        while len(self._readings) > MAX_ACCOUNT_READINGS:
            self._readings.popitem(last=False)
        return rows, has_more

    def store_drained_accounts(self, now: float, _: MessageHeader, body: messages.Inherit, payload: Any) -> Reply:
        """Keep the accounts that a drained server sends."""
        rows = merge(unpack_accounts(body.accounts))
        run = self.store_inherited(body.run_name, body.finished, rows, now)
        return Reply(messages.Taken(samples=len(rows), finished=run.finished), until_saved=True)

    def store_inherited(self, name: str, finished: bool, rows: Rows, now: float) -> RunState:
        """Keep a run's accounts of other servers, in rows as of `merge`; return the run.

        Raises:
            ProtocolError: the run's name is invalid, or too many runs are kept.
        """
        run = self._state.runs.named(name) or self._former(name, finished, now)
        run.store_inherited(rows)
        self._state.committer.add_inherited(run.name, rows)
        return run

    def _former(self, name: str, finished: bool, now: float) -> RunState:
        try:
            arguments.name("run", name)
        except ParameterError as error:
            raise ProtocolError("parameters", str(error)) from error
        if len(self._state.runs.facts()) >= self._max_former_runs:
            raise ProtocolError("busy", f"this server keeps {self._max_former_runs} runs already, the maximum")
        run = self._state.runs.add_former_run(name, finished, now)
        self._state.committer.add_run(run.facts)
        return run

    # Accounts in memory

    def store_gone_accounts(self, now: float, feedback: FeedbackHandler) -> None:
        """Move accounts of gone or long silent clients out of memory, after a durable server has saved them. Move
        former runs without requests out of memory, too. Cost: one check of each account in memory.
        """
        committer, runs = self._state.committer, self._state.runs
        for run in runs:
            self._fold_run(run, now, feedback)
        # Silent clients that only probed the server lose their accounts: the sums stay.
        probes, since = self._state.probes, now - self._state.limits.client_timeout
        for account in list(probes):
            if account.last_seen < since:
                probes.store_account(account)
        probes.expire(since)
        runs.evict_saved(lambda run: committer.is_run_saved(run.name))

    def _fold_run(self, run: RunState, now: float, feedback: FeedbackHandler) -> None:
        limits, committer = self._state.limits, self._state.committer
        silent = limits.client_timeout if len(run.ledger) > self._crowd else limits.tuning.account_timeout
        for account in list(run.ledger):
            patience = limits.client_timeout if account.report.leaving else silent
            if account.last_seen < now - patience:
                feedback.give_up(run, account.client)
                if committer.is_saved(run.name, account.client):
                    run.ledger.store_account(account)
        run.ledger.expire(now - limits.client_timeout)

    def problem(self, now: float) -> str:
        """Return a sentence that says why new clients may soon have to wait; "" if they need not wait."""
        newcomers = self._state.newcomers
        tokens = newcomers.fewest_tokens(now)
        if tokens > FEW_LEFT * newcomers.burst:
            return ""
        return (
            f"clients: {tokens:.0f} of {newcomers.burst} new clients with the same key may still register at once; "
            f"further ones have to wait: {newcomers.rate:g} may register a second (new_clients, new_clients_rate)"
        )

    def warning(self, now: float) -> str:
        """Return `trouble` at most every `WARN_INTERVAL` seconds; "" otherwise."""
        trouble = self.problem(now)
        if not trouble or now <= self._warned_at + WARN_INTERVAL:
            return ""
        self._warned_at = now
        return trouble


def _newest(names: list[str], size: int) -> list[str]:
    """Return the last names that fit into `size` bytes together."""
    first = len(names)
    while first and (size := size - encoded_bytes(names[first - 1])) >= 0:
        first -= 1
    return names[first:]


FEEDBACK_SAMPLES = 1 << 19
"""Maximum TD errors that wait for one client; beyond that the oldest are counted as lost."""
MERGED_SAMPLES = 1 << 15
"""Minimum unmerged TD errors for a merge, if they are also half of all unsent TD errors. A reply carries as many."""
MOST_UNMERGED = FEEDBACK_SAMPLES // 4
"""Unmerged TD errors that make a merge due in any case."""
ERROR = np.dtype([("number", np.int64), ("error", np.float32), ("given", np.float64)])
"""A waiting TD error: number of the entry, error, and time of arrival in seconds since 1970. Arrays of this dtype are
never changed.
"""
PIECE_BYTES = 640
"""Bytes of a piece of TD errors, in addition to the rows."""
SAMPLE_BYTES = 16
"""Bytes of a TD error in a reply: number, error and owner."""
READ_COPIES = 3
"""Memory that a FEEDBACK message takes while it is read, as a multiple of its unpacked size."""
CONTAINER_BYTES = 1024
"""Maximum bytes of a reply in addition to its TD errors."""
WARN_INTERVAL = 60.0
"""Seconds between two warnings that clients fetch TD errors too slowly."""

_Errors: TypeAlias = NDArray[np.void]
"""TD errors of one client's entries: [n] rows of `ERROR`."""
Pieces = Iterable[tuple[bytes, NDArray[np.int64], NDArray[np.float32]]]
"""Feedback by client: its id, numbers of entries [n], TD errors [n]."""


def _bytes_of(errors: int, clients: int) -> int:
    """Return the maximum bytes that newly arrived TD errors take."""
    return ERROR.itemsize * errors + 2 * PIECE_BYTES * clients


@dataclass(slots=True)
class _Waiting:
    """TD errors that wait for one client."""

    pieces: list[_Errors] = field(default_factory=list)
    """Unsent TD errors, in order of arrival."""
    unsent: int = 0
    """Number of TD errors in `pieces`."""
    unmerged: int = 0
    """Number of TD errors that arrived since the last merge."""
    sent: _Errors | None = None
    """The piece that was sent and is not acknowledged."""
    number: int = 0
    """Number of the sent piece."""
    counted: int = 0
    """Bytes that the holder `td_errors` counts for this client."""

    @property
    def bytes(self) -> int:
        """Bytes that the waiting TD errors take."""
        errors = self.unsent + (0 if self.sent is None else len(self.sent))
        return ERROR.itemsize * errors + PIECE_BYTES * (len(self.pieces) + 1)

    @property
    def is_long(self) -> bool:
        """True if enough TD errors have come that a merge pays."""
        return self.unmerged >= max(MERGED_SAMPLES, min(self.unsent // 2, MOST_UNMERGED))

    def adding_changes(self, piece: _Errors) -> Changes:
        """Return the changes that append a piece."""
        count = len(piece)
        return [
            (self.pieces.append, (piece,)),
            (setattr, (self, "unsent", self.unsent + count)),
            (setattr, (self, "unmerged", self.unmerged + count)),
        ]

    def replace_pieces(self, count: int, result: _Errors) -> Changes:
        """Return the changes that replace the first `count` pieces by their merged result."""
        unmerged = self.unsent - sum(map(len, self.pieces[:count]))
        pieces = [result, *self.pieces[count:]]
        return setting(self, unmerged=unmerged, unsent=unmerged + len(result), pieces=pieces)

    def first_unsent(self, most: int) -> tuple[list[_Errors], Changes]:
        """Return the first `most` unsent TD errors, and the changes that remove them."""
        chosen, pieces, room = [], list(self.pieces), most
        while pieces and room:
            piece = pieces.pop(0)
            if len(piece) > room:
                pieces.insert(0, piece[room:])
                piece = piece[:room]
            chosen.append(piece)
            room -= len(piece)
        unsent = self.unsent - (most - room)
        return chosen, setting(self, pieces=pieces, unsent=unsent, unmerged=min(self.unmerged, unsent))


class Merge:
    """Merge of TD errors of one client: the newest of each entry stays, in the place of the oldest.

    `compute` needs no lock.
    """

    def __init__(self, client: bytes, pieces: list[_Errors]) -> None:
        self.client, self.pieces = client, pieces
        self.result: _Errors | None = None

    def compute(self) -> None:
        """Compute `result`: the TD errors that stay."""
        joined = np.concatenate(self.pieces)
        rows = newest_of_each(np.ascontiguousarray(joined["number"]))
        self.result = joined if len(rows) == len(joined) else joined[rows]


class TDErrorPiece(NamedTuple):
    """Piece of TD errors that is sent to a client."""

    number: int
    """Number of the piece, ascending over all clients."""
    payload: Any
    """Container with the piece's TD errors."""
    age: float
    """Seconds since the arrival of the oldest TD error in the piece."""
    waiting: int
    """Number of TD errors that wait for a later piece."""


def by_client(ids: NDArray[Any], td_errors: Any) -> list[tuple[bytes, NDArray[np.int64], NDArray[np.float32]]]:
    """Return TD errors of samples grouped by the client that owns each entry. Needs no lock.

    Args:
        ids: `ID` [B], as in a batch.
        td_errors: [B], finite.

    Raises:
        ParameterError: `ids` are not sample ids, or `td_errors` are not finite numbers, one for each id.
    """
    ids = np.asarray(ids)
    errors = td_errors_for(ids, td_errors)
    order, begins = grouped_by_client(ids)
    numbers, errors, owners = ids["number"][order], errors[order], ids["client"][order[begins]].tobytes()
    ends = [*begins.tolist(), len(ids)]
    return [
        (owners[16 * at : 16 * at + 16], numbers[begin:end], errors[begin:end])
        for at, (begin, end) in enumerate(itertools.pairwise(ends))
    ]


class FeedbackHandler:
    """Handler of TD errors: applies them to entries of this server, or keeps them for the owners of other entries."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._waiting: dict[bytes, _Waiting] = {}
        self._merge_due: set[bytes] = set()  # clients whose waiting TD errors should be merged
        self._number = 0  # number of the newest piece sent to any client
        self._delays = Timings(["delay"])
        self._warned_at, self._warned_overflow = float("-inf"), 0
        self.given = 0
        """TD errors that learners have reported."""
        self.lost = 0
        """TD errors whose client is unknown here, or never fetched them."""
        self.overflowed = 0
        """Lost TD errors for which there was no room: too many waited for one client, or for all clients."""

    @property
    def delays(self) -> Timing:
        """Seconds from the arrival of each TD error until its owner reported it as applied or stale."""
        return self._delays.durations()["delay"]

    def read(self, header: MessageHeader, payload: Any) -> list[tuple[bytes, NDArray[np.int64], NDArray[np.float32]]]:
        """Return TD errors of a FEEDBACK message by client: its id, numbers of entries [N], TD errors [N]. Needs no
        lock. Raises ProtocolError.
        """
        table = self._state.tables.numbered(header.table)
        with self._state.requests.reserved(READ_COPIES * containers.unpacked_bytes(payload)):
            by_owner = containers.read_feedback(payload, table.schema, self._state.limits)
            return [
                (client, numbers.astype(np.int64), errors.astype(np.float32))
                for client, (numbers, errors) in by_owner.items()
            ]

    def feedback_reply(self, header: MessageHeader, update: PriorityUpdate) -> Reply:
        """Return the reply to a FEEDBACK message that was applied with this result."""
        table = self._state.tables.numbered(header.table)
        samples = update.applied + update.stale + update.sent
        return Reply(messages.Taken(samples=samples, lost=update.lost, parameters_version=table.parameters_version))

    def apply(self, pieces: Pieces, now: float) -> PriorityUpdate:
        """Set priorities of entries of this server, and queue TD errors of other entries for their owners. An owner
        fetches its TD errors with its next UPDATE. The caller then runs `due_merges`.
        """
        pieces = list(pieces)
        known = [len(numbers) for client, numbers, _ in pieces if client in self._waiting]
        has_room = len(known) > 1 and self._has_room(_bytes_of(sum(known), len(known)))  # one check covers all clients
        updates = [self._apply(client, numbers, errors, now, has_room) for client, numbers, errors in pieces]
        return PriorityUpdate(*map(sum, zip(*updates, strict=True)))

    def _apply(
        self, client: bytes, numbers: NDArray[np.int64], errors: NDArray[np.float32], now: float, has_room: bool
    ) -> PriorityUpdate:
        """Apply TD errors of one client. `has_room`: all of the call's TD errors for waiting clients fit the budget."""
        ledger = self._state.ledger
        for table in self._state.tables:
            own = table.priorities
            if own is not None and client == own.owner and (counts := own.apply(client, numbers, errors)) is not None:
                applied, gone = counts
                own_feedback = ledger.own_feedback + FeedbackCounts(given=applied + gone, applied=applied, gone=gone)
                at_once(setting(ledger, own_feedback=own_feedback) + adding_changes(self, given=len(numbers)))
                return PriorityUpdate(applied, gone)
        account, count = ledger.find(client), len(numbers)
        if account is None or not ledger.is_counted(account):
            unknown = ledger.unknown_feedback + FeedbackCounts(given=count, lost=count)
            at_once(setting(ledger, unknown_feedback=unknown) + adding_changes(self, given=count, lost=count))
            return PriorityUpdate(lost=count)
        self._touch(self._state.run, account)
        waiting = self._waiting.get(client)
        has_room = (has_room and waiting is not None) or account.report.leaving or self._has_room(_bytes_of(count, 1))
        if account.report.leaving or not has_room:
            changes = adding_changes(account, given_feedback=count) + ledger.lost_feedback_calls(account, count)
            at_once(changes + adding_changes(self, given=count, lost=count, overflowed=count * (not has_room)))
            return PriorityUpdate(lost=count)
        if waiting is None:
            waiting = self._waiting[client] = _Waiting()
        rows = np.empty(count, ERROR)
        rows["number"], rows["error"], rows["given"] = numbers, errors, now
        # All or nothing: a waiting count below the number of waiting TD errors would make each reply invalid.
        at_once(
            [
                (setattr, (account, "given_feedback", account.given_feedback + count)),
                (setattr, (account, "waiting_feedback", account.waiting_feedback + count)),
                (setattr, (self, "given", self.given + count)),
                *waiting.adding_changes(rows),
            ]
        )
        self._recount(waiting)
        if waiting.is_long:
            self._merge_due.add(client)
        else:
            self._drop_overflow(account, waiting)
        return PriorityUpdate(0, 0, count)

    def _touch(self, run: RunState, account: Account) -> None:
        self._state.committer.mark_changed(run.name, account)

    def _lose(self, run: RunState, account: Account, samples: int, gone: Changes) -> None:
        """Count TD errors of a client as lost, and apply the changes that remove them."""
        self._state.committer.mark_changed(run.name, account)
        losing = run.ledger.lost_feedback_calls(account, samples) + adding_changes(account, waiting_feedback=-samples)
        at_once(gone + losing + adding_changes(self, lost=samples))

    def _has_room(self, size: int) -> bool:
        try:
            self._state.td_errors.check(size)
        except ProtocolError:
            return False
        return True

    def _recount(self, waiting: _Waiting, size: int | None = None) -> None:
        size = waiting.bytes if size is None else size
        self._state.td_errors.add(size - waiting.counted, setting(waiting, counted=size))

    # Bounds of the waiting TD errors

    def _drop_overflow(self, account: Account, waiting: _Waiting) -> None:
        overflow = waiting.unsent - FEEDBACK_SAMPLES
        if overflow > 0:
            _, cut = waiting.first_unsent(overflow)
            self._lose(self._state.run, account, overflow, cut + adding_changes(self, overflowed=overflow))
            self._recount(waiting)

    def due_merges(self) -> list[Merge]:
        """Return the merges that are due: the caller runs `Merge.compute` without a lock, then `apply_merge`."""
        if not self._merge_due:
            return []
        candidates = [(client, self._waiting.get(client)) for client in self._merge_due]
        self._merge_due.clear()
        return [Merge(client, list(waiting.pieces)) for client, waiting in candidates if waiting and waiting.pieces]

    def apply_merge(self, merge: Merge) -> None:
        """Use the result of a merge, unless a piece of it was sent or given up meanwhile; then drop overflow."""
        waiting, account = self._waiting.get(merge.client), self._state.ledger.find(merge.client)
        if waiting is None or account is None:
            return
        former, result = merge.pieces, merge.result
        same = waiting.pieces[: len(former)]
        if result is not None and len(same) == len(former) and all(map(operator.is_, same, former)):
            superseded = sum(map(len, former)) - len(result)
            self._touch(self._state.run, account)
            counts = adding_changes(account, superseded_feedback=superseded, waiting_feedback=-superseded)
            at_once(counts + waiting.replace_pieces(len(former), result))
            self._recount(waiting)
        self._drop_overflow(account, waiting)

    def warning(self, now: float) -> str:
        """Return a warning if clients fetch TD errors too slowly, at most every `WARN_INTERVAL` seconds; else ""."""
        lost = self.overflowed - self._warned_overflow
        if not lost or now <= self._warned_at + WARN_INTERVAL:
            return ""
        self._warned_at, self._warned_overflow = now, self.overflowed
        return (
            f"{lost} TD errors were dropped: more than {FEEDBACK_SAMPLES} waited for one actor, which fetches them "
            "with its UPDATE messages, or held_bytes had no room. Use more actors, draw fewer samples, or store "
            "episodes, whose priorities the server sets itself"
        )

    def give_up(self, run: RunState, client: bytes) -> None:
        """Count as lost the TD errors of a client that will not fetch them any more."""
        waiting = self._waiting.get(client)
        if waiting is None:
            return
        self._recount(waiting, 0)
        gone: Changes = [(self._waiting.pop, (client, None))]
        account = run.ledger.find(client)
        if account is None or not account.waiting_feedback:
            at_once(gone)
        else:
            self._lose(run, account, account.waiting_feedback, gone)

    def give_up_all(self, run: RunState) -> None:
        """Count as lost all waiting TD errors: the run that they belong to has ended."""
        for client in list(self._waiting):
            self.give_up(run, client)

    # Replies to a client

    def fetch(self, table: OpenTable, account: Account, through: int, now: float) -> TDErrorPiece | None:
        """Return the piece of TD errors to send to a client now; None if none waits.

        Args:
            account: The client's account, with the report of the present UPDATE.
            through: Number of the newest piece that the client has applied.
        """
        waiting = self._waiting.get(account.client)
        report, seen = account.report, account.seen_feedback
        account.seen_feedback = report.applied, report.gone
        if waiting is None:
            return None
        if waiting.sent is not None and waiting.number <= through:
            self._acknowledged(account, waiting.sent, report.applied - seen[0], report.gone - seen[1], now)
            waiting.sent = None
        if waiting.sent is None and waiting.pieces:
            self._number += 1
            most = max(1, (self._state.limits.tuning.request_bytes // 2 - CONTAINER_BYTES) // SAMPLE_BYTES)
            pieces, cut = waiting.first_unsent(most)
            at_once([*cut, *setting(waiting, sent=np.concatenate(pieces), number=self._number)])
        self._recount(waiting)
        if waiting.sent is None:
            return None
        age = max(0.0, now - float(waiting.sent["given"].min()))
        numbers, errors = (np.ascontiguousarray(waiting.sent[name]) for name in ("number", "error"))
        payload = containers.pack_client_feedback(table.schema, account.client, numbers, errors, now=now)
        return TDErrorPiece(waiting.number, payload, age, waiting.unsent)

    def _acknowledged(self, account: Account, sent: _Errors, applied: int, gone: int, now: float) -> None:
        """Record that a client has received a piece, applied some of its TD errors, and found some entries gone."""
        count = len(sent)
        applied = min(count, max(0, applied))
        gone = min(count - applied, max(0, gone))
        account.waiting_feedback -= count
        account.applied_feedback += applied
        account.gone_feedback += gone
        account.stale_feedback += count - applied - gone
        self._touch(self._state.run, account)
        self._delays.record_many("delay", np.maximum(0.0, now - sent["given"]))
