"""Priorities that learners set: those of entries that are here are applied, the others wait for their owners. Pure.

learner     ids and TD errors ──▶ apply       entries of this server: set in the pool
                                              entries of client 7: piece 3, piece 4        until it says UPDATE
client 7    UPDATE ──▶ fetch(through=2)       pieces 3 and 4, which stay until it says that it has applied them
            UPDATE ──▶ fetch(through=4)       nothing is left
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire.accounting.account import Account
from memoire.accounting.runs import Run
from memoire.pool.tables import OpenTable
from memoire.replay.batch import ID, PriorityUpdate, grouped_by_client, td_errors_for
from memoire.server.reply import Reply
from memoire.server.state import ServerState
from memoire.wire import messages, pack, unpack
from memoire.wire.frames import MessageHeader

FEEDBACK_SAMPLES = 1 << 16
"""Samples of feedback that wait for one client; the oldest are lost (and counted) beyond."""
FEEDBACK_PER_REPLY = 1 << 14
"""Samples of feedback that one reply brings, unless its first piece has more."""

Pieces = Iterable[tuple[bytes, NDArray[np.int64], NDArray[np.float32]]]
"""Feedback by client: its id, numbers of entries [n], TD errors [n]."""


@dataclass(slots=True)
class _WaitingFeedback:
    """Feedback for one client: pieces of (number of the piece, entry numbers [n], TD errors [n])."""

    pieces: deque[tuple[int, NDArray[np.int64], NDArray[np.float32]]] = field(default_factory=deque)
    number: int = 0


def by_client(ids: NDArray[Any], td_errors: Any) -> list[tuple[bytes, NDArray[np.int64], NDArray[np.float32]]]:
    """TD errors of samples, sorted by the client that owns each of them. Needs no lock.

    Args:
        ids: `ID` [B], as a batch has them.
        td_errors: [B], finite.

    Raises:
        ParameterError: these are no ids, or no finite TD errors for them.
    """
    ids = np.asarray(ids)
    errors = td_errors_for(ids, td_errors)
    order, begins = grouped_by_client(ids)
    return [
        (ids["client"][rows[0]].astype("<u8").tobytes(), ids["number"][rows].astype(np.int64), errors[rows])
        for rows in np.split(order, begins[1:])
        if len(rows)
    ]


class FeedbackHandler:
    """Applies feedback, or keeps it for the clients that own the entries."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._waiting: dict[bytes, _WaitingFeedback] = {}
        self.given = 0
        """Priorities that learners have set."""
        self.lost = 0
        """Those whose client is not known here, or that waited too long for it."""

    def feedback(self, _: float, header: MessageHeader, body: messages.Feedback, payload: Any) -> Reply:
        """Apply or keep what a learner says from far away."""
        table = self._state.tables.numbered(header.table)
        found = unpack.read_feedback(payload, table.schema, self._state.limits)
        made = self.apply(
            (client, numbers.astype(np.int64), errors.astype(np.float32)) for client, (numbers, errors) in found.items()
        )
        samples = sum(len(numbers) for numbers, _ in found.values()) - made.lost
        return Reply(messages.Taken(samples=samples, lost=made.lost, parameters_version=table.parameters_version))

    def apply(self, pieces: Pieces) -> PriorityUpdate:
        """Set priorities of entries that are here, and keep TD errors of others for their owners, which fetch them
        with their next UPDATE.
        """
        made = PriorityUpdate()
        for client, numbers, errors in pieces:
            self.given += len(numbers)
            made = made.plus(self._apply(client, numbers, errors))
        self.lost += made.lost
        return made

    def _apply(self, client: bytes, numbers: NDArray[np.int64], errors: NDArray[np.float32]) -> PriorityUpdate:
        for table in self._state.tables:
            if client == table.pool.owner and (counts := table.pool.apply(client, numbers, errors)) is not None:
                return PriorityUpdate(*counts)
        return self._keep(client, numbers, errors)

    def _keep(self, client: bytes, numbers: NDArray[np.int64], errors: NDArray[np.float32]) -> PriorityUpdate:
        state = self._state
        account = state.ledger.find(client)
        if account is None or account.report.leaving or not state.ledger.is_counted(account):
            return PriorityUpdate(lost=len(numbers))
        waiting = self._waiting.setdefault(client, _WaitingFeedback())
        waiting.number += 1
        waiting.pieces.append((waiting.number, numbers, errors))
        account.waiting_feedback += len(numbers)
        lost = 0
        while account.waiting_feedback - lost > FEEDBACK_SAMPLES and len(waiting.pieces) > 1:
            lost += len(waiting.pieces.popleft()[1])
        if lost:
            self._count_lost(state.run, account, lost)
        return PriorityUpdate(sent=len(numbers), lost=lost)

    def _count_lost(self, run: Run, account: Account, samples: int) -> None:
        run.ledger.lost_feedback(account, samples)
        self._state.committer.touch(run.name, account)

    def give_up(self, run: Run, client: bytes) -> None:
        """Count as lost what waits for a client that will not fetch it any more."""
        if self._waiting.pop(client, None) is None:
            return
        account = run.ledger.find(client)
        if account is not None and account.waiting_feedback:
            self.lost += account.waiting_feedback
            self._count_lost(run, account, account.waiting_feedback)

    def give_up_all(self, run: Run) -> None:
        """Count as lost all TD errors that clients of this run have not fetched: another run is counted now."""
        for client in list(self._waiting):
            self.give_up(run, client)

    def fetch(self, table: OpenTable, account: Account, through: int, now: float) -> tuple[int, Any] | None:
        """Number and container of what waits for a client; None if nothing does.

        Args:
            through: Number of the newest piece that the client has applied; those up to it are dropped.
        """
        waiting = self._waiting.get(account.client)
        if waiting is None:
            return None
        while waiting.pieces and waiting.pieces[0][0] <= through:
            account.waiting_feedback -= len(waiting.pieces.popleft()[1])
        chosen: list[tuple[int, NDArray[np.int64], NDArray[np.float32]]] = []
        samples = 0
        for piece in waiting.pieces:
            samples += len(piece[1])
            if chosen and samples > FEEDBACK_PER_REPLY:
                break
            chosen.append(piece)
        if not chosen:
            return None
        numbers = np.concatenate([piece[1] for piece in chosen])
        errors = np.concatenate([piece[2] for piece in chosen])
        ids = np.empty(len(numbers), ID)
        ids["client"] = np.frombuffer(account.client, "<u8")
        ids["number"] = numbers
        return chosen[-1][0], pack.pack_feedback(table.schema, ids, errors, now=now)
