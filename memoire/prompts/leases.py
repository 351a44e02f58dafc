"""Leases of prompts to workers, and the answers that come under them. Pure: time is passed in.

    waiting ──take──▶ leased ──answer, answer, ...──▶ all answers settled ──▶ ready, answered or dropped
       ▲                 │  renew: another `lease` seconds
       └── attempts ─────┤  the lease expires, or its worker gives up: whole answers stay
                         └─ no attempts left: missing answers have failed, and the group is closed without them

The first whole answer for a place in the group counts, from any worker. A later one is acknowledged as late.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection
from typing import Literal

from memoire.errors import ProtocolError

from .book import PromptBook
from .rows import AnswerRow, PromptRow, PromptState

Outcome = Literal["taken", "repeated", "late"]
_OPEN = (PromptState.WAITING, PromptState.LEASED)
NO_SIGNAL = "no signal"


class PromptLeases:
    """Leases of one table. Not thread-safe.

    Args:
        score: Function that scores a complete group; called once for each group.
    """

    def __init__(self, book: PromptBook, score: Callable[[PromptRow], float]) -> None:
        self.counts: Counter[str] = Counter()
        """Number of expired leases, and of late, failed and amended answers."""
        self._book, self._score = book, score
        self._rows: dict[int, PromptRow] = {}  # rows by lease number
        self._held: dict[bytes, set[int]] = {}  # lease numbers by worker
        self._ends: list[tuple[float, int]] = []  # a heap; a renewed lease has several entries

    def restore(self, row: PromptRow, now: float) -> None:
        """Restore a prompt that was leased before a restart: its worker gets the time of a new lease."""
        if row.state is PromptState.LEASED:
            row.until, row.leased_at = now + self._book.rules.lease, now
            self._register(row)

    def has_unknown_lease(self, worker: bytes, having: Collection[int]) -> bool:
        """Return True if a worker has a lease that it does not know, because a reply was lost."""
        return bool(self._held.get(worker, set()).difference(having))

    def _register(self, row: PromptRow) -> None:
        self._rows[row.lease] = row
        self._held.setdefault(row.worker, set()).add(row.lease)
        heapq.heappush(self._ends, (row.until, row.lease))

    # Workers

    def peek_next(self, worker: bytes, having: Collection[int]) -> PromptRow | None:
        """Return the prompt that `lease_next` would lease, without a change."""
        forgotten = self._held.get(worker, set()).difference(having)
        return self._rows[min(forgotten)] if forgotten else self._book.waiting.first()

    def lease_next(
        self, worker: bytes, now: float, seconds: float | None = None, having: Collection[int] = ()
    ) -> PromptRow | None:
        """Lease the next prompt to a worker; return None if no prompt is waiting.

        Args:
            having: Lease numbers that the worker knows. A prompt whose lease it does not know is returned again first.
        """
        until = now + (self._book.rules.lease if seconds is None else seconds)
        if forgotten := self._held.get(worker, set()).difference(having):
            row = self._rows[min(forgotten)]
            self._extend(row, until)
            return row
        waiting = self._book.waiting.pop()
        if waiting is None:
            return None
        row = waiting
        row.attempts, row.lease, row.worker, row.until = row.attempts + 1, next(self._book.numbers), worker, until
        row.given_up, row.leased_at = [], now
        self._book.move(row, PromptState.LEASED)
        self._register(row)
        return row

    def lease_wait_reason(self, version: int | None = None) -> str:
        """Return the reason why a waiting prompt cannot be leased now, or "" if it can."""
        newest, lag = self._book.facts.newest_model, self._book.rules.max_model_lag
        if version is not None and lag is not None and version < newest - lag:
            return (
                f"the worker has model {version}, the newest is {newest}; a lease needs model {newest - lag} or newer "
                f"(max_model_lag={lag})"
            )
        if self._book.rules.on_stale != "pace" or lag is None:
            return ""
        step_groups = self._book.facts.step_groups
        if not step_groups:
            return "on_stale='pace' waits for the first draw, which sets the number of groups of a step"
        states = PromptState.LEASED, PromptState.ANSWERED, PromptState.READY
        ahead, most = sum(map(self._book.training_count, states)), (lag + 1) * step_groups
        if ahead < most:
            return ""
        return f"{ahead} groups are leased or ready; more would be too old to train on (max_model_lag={lag})"

    def renew(self, worker: bytes, number: int, now: float, seconds: float | None = None) -> float:
        """Extend a worker's lease; return its new end, or 0 if the prompt is not leased to this worker any more."""
        row = self._rows.get(number)
        if row is None or row.worker != worker:
            return 0.0
        self._extend(row, now + (self._book.rules.lease if seconds is None else seconds))
        return row.until

    def _extend(self, row: PromptRow, until: float) -> None:
        row.until = until
        heapq.heappush(self._ends, (until, row.lease))

    def release(self, worker: bytes, number: int) -> bool:
        """End a worker's lease early, without using up an attempt. Return False if the worker does not hold it."""
        row = self._rows.get(number)
        if row is None or row.worker != worker:
            return False
        row.attempts -= 1
        self.end(row)
        self._book.move(row, PromptState.WAITING)
        return True

    # Answers

    def answer(
        self, row: PromptRow, lease: int, index: int, columns: int, *,
        piece: int = 0, is_last: bool = True, version: int = 0, tokens: int = 0,
    ) -> Outcome:  # fmt: skip
        """Record a piece of an answer. The caller stores only a "taken" piece, then touches and settles the row.

        Raises:
            ProtocolError: (code "index") the prompt has no answer of this number, or an earlier piece is missing.
        """
        answer = _answer_of(row, index)
        if row.state not in _OPEN or answer.is_settled or lease < answer.lease:
            return self._reject(answer, lease, piece)
        if piece == 0 and lease > answer.lease:
            answer = self.reset_answer(row, index)
            answer.lease = lease
        if piece < answer.pieces:
            return self._reject(answer, lease, piece)
        if lease != answer.lease or piece > answer.pieces:
            received = f"{answer.pieces} pieces" if lease == answer.lease else "no piece"
            text = f"piece {piece} of answer {index} to prompt {row.index}, but {received} came under this lease"
            raise ProtocolError("index", text)
        answer.pieces, answer.is_whole = piece + 1, is_last
        answer.columns |= columns
        answer.version = version if answer.version < 0 else min(version, answer.version)
        answer.tokens += tokens
        return "taken"

    def reset_answer(self, row: PromptRow, index: int) -> AnswerRow:
        """Forget the pieces of an answer but amended columns, and return the answer."""
        kept = row.answers[index].amended
        row.answers[index] = AnswerRow(columns=kept, amended=kept)
        return row.answers[index]

    def _reject(self, answer: AnswerRow, lease: int, piece: int) -> Outcome:
        if lease == answer.lease and piece < answer.pieces:
            return "repeated"
        self.counts["late"] += 1
        return "late"

    def amend(self, row: PromptRow, index: int, columns: int) -> Outcome:
        """Record columns of an answer that came from elsewhere than its worker."""
        answer = _answer_of(row, index)
        if row.state not in (*_OPEN, PromptState.ANSWERED) or answer.failed:
            self.counts["late"] += 1
            return "late"
        answer.columns |= columns
        answer.amended |= columns
        self.counts["amended"] += 1
        return "taken"

    def fail(self, row: PromptRow, lease: int, index: int, reason: str, is_again: bool) -> Outcome:
        """Record that an answer will not come under this lease, or never.

        Args:
            is_again: True if another lease may give the answer.
        """
        answer = _answer_of(row, index)
        if row.state not in _OPEN or answer.is_settled:
            return "repeated" if answer.failed else "late"
        if is_again and lease != row.lease:
            return "late"
        if is_again:
            row.given_up = sorted({*row.given_up, index})
        else:
            self.counts["failed"] += 1
            row.answers[index] = AnswerRow(failed=reason[:200] or "failed", lease=answer.lease)
        return "taken"

    def update_state(self, row: PromptRow) -> None:
        """Move a prompt to its next state after one of its answers changed."""
        if row.state not in (*_OPEN, PromptState.ANSWERED):
            return
        if not row.is_settled:
            if row.given_up and set(row.missing) <= set(row.given_up):
                self._end_unfinished(row)
            return
        self.end(row)
        required = self._book.rules.required_mask
        if any(each.is_whole and each.columns & required != required for each in row.answers):
            if row.state is not PromptState.ANSWERED:
                self._book.move(row, PromptState.ANSWERED)
            return
        self._close(row)

    def _close(self, row: PromptRow) -> None:
        """Make a settled group ready, or drop it."""
        if sum(each.is_whole for each in row.answers) < min(self._book.rules.at_least, self._book.rules.group):
            reason = next((each.failed for each in row.answers if each.failed), "failed")
            self._book.move(row, PromptState.DROPPED, reason if reason == "attempts" else "failed")
            return
        row.score = self._score(row)
        if self._book.rules.drop_dead and row.score == 0.0 and not row.is_evaluation:
            self._book.move(row, PromptState.DROPPED, NO_SIGNAL)
            return
        self._book.put_last(row)
        self._book.move(row, PromptState.READY)

    # Ends of leases

    def next_time(self) -> float:
        """Return the time at which the next lease expires, inf without leases."""
        while self._ends:
            until, number = self._ends[0]
            row = self._rows.get(number)
            if row is not None and row.until <= until:
                return until
            heapq.heappop(self._ends)
        return math.inf

    def expire(self, now: float) -> list[PromptRow]:
        """End the leases whose time has passed, and return their prompts."""
        ended = []
        while self.next_time() <= now:
            row = self._rows[heapq.heappop(self._ends)[1]]
            self.counts["expired"] += 1
            self._end_unfinished(row)
            ended.append(row)
        return ended

    def _end_unfinished(self, row: PromptRow) -> None:
        """End a lease with missing answers: the prompt waits again, or they have failed if no attempt is left."""
        self.end(row)
        if row.attempts < self._book.rules.attempts:
            self._book.move(row, PromptState.WAITING)
            return
        for index in row.missing:
            row.answers[index] = AnswerRow(failed="attempts")
        self._book.move(row, PromptState.WAITING)  # the row has no lease: settle moves it on
        self.update_state(row)

    def end(self, row: PromptRow) -> None:
        """End the lease of a prompt if it has one. The caller changes the state."""
        if row.lease:
            del self._rows[row.lease]
            held = self._held[row.worker]
            held.discard(row.lease)
            if not held:
                del self._held[row.worker]
        row.lease, row.worker, row.until, row.given_up = 0, b"", math.inf, []

    def drop(self, row: PromptRow, reason: str) -> bool:
        """Drop a prompt. Return False if it is drawn, committed or dropped already."""
        if row.state >= PromptState.DRAWN:
            return False
        self.end(row)
        self._book.move(row, PromptState.DROPPED, reason)
        return True

    # Figures

    @property
    def leases(self) -> int:
        """Number of leases that have not ended."""
        return len(self._rows)

    def held(self) -> dict[bytes, list[PromptRow]]:
        """Return the leased prompts of each worker."""
        return {worker: [self._rows[number] for number in numbers] for worker, numbers in self._held.items()}

    def oldest(self) -> PromptRow | None:
        """Return the prompt with the oldest lease; None without leases."""
        return self._rows[min(self._rows)] if self._rows else None

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts disagree. For tests."""
        for number, row in self._rows.items():
            assert row.lease == number and row.state is PromptState.LEASED and number in self._held[row.worker]
            assert row.missing and row.attempts <= self._book.rules.attempts
            assert any(number == other and until <= row.until for until, other in self._ends)
        assert len(self._rows) == self._book.counts[PromptState.LEASED]
        assert sum(map(len, self._held.values())) == len(self._rows) and all(self._held.values())


def _answer_of(row: PromptRow, index: int) -> AnswerRow:
    if not 0 <= index < len(row.answers):
        raise ProtocolError(
            "index", f"the index of an answer is {index}; this prompt takes 0 to {len(row.answers) - 1}"
        )
    return row.answers[index]
