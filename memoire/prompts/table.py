"""One table of prompts, with its figures and the reasons of waits. Pure: time is passed in.

PromptBook    prompts and their states              PromptSteps   draws, commits and rewinds of a trainer
PromptLeases  leases of workers, answers            PromptBytes   payloads, columns
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final

import numpy as np

from memoire import Schema
from memoire.errors import ProtocolError
from memoire.kinds import adding, counter, gauge, shown

from .book import PromptBook, nothing_waits
from .columns import PIECE_BYTES, ROW, Key, Packed, PromptBytes, gather_column, packed_key, select_columns
from .leases import Outcome, PromptLeases
from .messages import StepPlan
from .rows import PromptRow, PromptRules, PromptState, StepRow, column_of, scorer
from .servers import needed_ready_groups
from .steps import PromptSteps

ANSWERS_PART: Final = 4
"""Divisor of the byte limit: one part in so many is reserved for answers."""
MAX_COUNTED_RANKS: Final = 1024
"""Largest number of a trainer's ranks whose tokens are counted."""


class PromptTable:
    """Prompts, leases, steps and bytes of one table at a server. Not thread-safe.

    Args:
        score: See `PromptSettings`.
        capacity: Largest number of prompts that are neither committed nor dropped; 0 limits only their bytes.
        byte_limit: Bytes of prompts, payloads and columns.
        is_bounded: True drops the oldest ready groups to make room; False lets clients wait for room.
        first: First number of changes and leases.
    """

    def __init__(
        self, schema: Schema, rules: PromptRules, *, score: str | None = None, capacity: int = 0,
        byte_limit: int = 1 << 30, is_bounded: bool = False, first: int = 1,
    ) -> None:  # fmt: skip
        self.schema, self.capacity, self.byte_limit = schema, capacity, byte_limit
        self.is_bounded = is_bounded
        self._score, self._scored = score, -1 if score is None else schema.names.index(column_of(score))
        self._scorer = scorer(score)
        self.book = PromptBook(rules, first)
        self.leases = PromptLeases(self.book, self._score_of)
        self.steps = PromptSteps(self.book)
        self.store = PromptBytes(schema)
        self.plans: dict[int, StepPlan] = {}
        """Plans of the steps that were planned here: groups of each server, by step."""
        self.new_plans: dict[int, StepPlan | None] = {}
        """Plans that changed since the last save; None for a removed plan."""
        self.full = 0
        """Number of groups that were dropped to make room."""
        self.incomplete = 0
        """Number of prompts with lost parts in the last restore."""
        self.free: Callable[[], int] = lambda: byte_limit
        """Function that returns the bytes that other tables leave."""
        self.tokens_drawn = 0
        self.rank_tokens: list[int] = []
        """Tokens of the groups that each rank of the trainer has fetched."""
        self.lag = 0
        """Versions by which the oldest token of the newest step was older than the newest model."""

    def _score_of(self, row: PromptRow) -> float:
        if self._score is None:
            return 1.0
        parts = [self.store.columns(row.key, index).get(self._scored) for index in row.group]
        score = self._scorer(gather_column(self.schema, self._scored, parts).astype(np.float64))
        return score if math.isfinite(score) else 0.0

    # Adding and removing prompts

    def add(
        self, keys: Sequence[Key], payloads: Sequence[bytes], *, priority: float = 0.0, is_evaluation: bool = False,
        tags: Mapping[str, str] | None = None,
    ) -> list[bool]:  # fmt: skip
        """Add prompts. Return for each whether it is new here.

        Raises:
            ProtocolError: (code "busy") there is no room for them; (code "value") their epoch is finished.
        """
        fresh = [(key, data) for key, data in zip(keys, payloads, strict=True) if not self.book.was_added(key)]
        size = sum(PIECE_BYTES + len(data) + self.book.size_of(key, tags or {}) for key, data in fresh)
        if size > self.byte_limit - self.byte_limit // ANSWERS_PART:
            text = f"{len(keys)} prompts take {size} bytes, more than prompts may take of byte_limit={self.byte_limit}"
            raise ProtocolError("too_large", f"{text}, which also has room for answers. Add fewer at a time")
        if why := self._no_room(len(keys), size + self._reserved_bytes if fresh else 0):
            raise ProtocolError("busy", why)
        new = []
        for key, payload in zip(keys, payloads, strict=True):
            new.append(self.book.add(key, len(payload), priority, is_evaluation, tags))
            if new[-1]:
                self.store.add(key, payload)
        return new

    def _no_room(self, prompts: int, size: int) -> str:
        over = self.book.counts[PromptState.COMMITTED] + self.book.counts[PromptState.DROPPED]
        held = len(self.book.rows) - over
        if self.capacity and held + prompts > max(self.capacity, prompts):
            return f"waiting for room: {held} prompts are held, and capacity={self.capacity}"
        if size > self.room:
            return (
                f"waiting for room: {size} bytes are needed and {self.room} are free; the table holds "
                f"{self.memory_bytes} of byte_limit={self.byte_limit}, and all tables share held_bytes"
            )
        return ""

    @property
    def memory_bytes(self) -> int:
        """Bytes of prompts, payloads and answers, and of their unsaved changes."""
        return self.book.bytes + self.store.bytes

    @property
    def _reserved_bytes(self) -> int:
        """Bytes that added prompts leave free for answers: a table full of unanswered prompts could never empty."""
        answers = self.store.bytes - self.store.payload_bytes
        return max(0, self.byte_limit // ANSWERS_PART - answers)

    @property
    def room(self) -> int:
        """Bytes that the table may still take."""
        return max(0, min(self.byte_limit - self.memory_bytes, self.free()))

    def finish(self, dataset: str, epoch: int) -> None:
        """Mark an epoch as finished. Raise ProtocolError (code "busy") if there is no room for its name."""
        self.book.finish(dataset, epoch, self.room)

    def cancel(self, keys: Iterable[Key]) -> int:
        """Drop prompts that are not drawn yet, and return how many."""
        rows = [self.book.rows[key] for key in keys if key in self.book.rows]
        done = sum(self.leases.drop(row, "cancelled") for row in rows if row.state is not PromptState.DROPPED)
        self.free_removed()
        return done

    def forget(self, dataset: str, epoch: int) -> int:
        """Remove an epoch's prompts and return how many. Raise ProtocolError (code "busy") if some are unfinished."""
        self.steps.check_not_replayed(dataset, epoch)
        rows = self.book.forget(dataset, epoch)
        for row in rows:
            self.leases.end(row)
        self.free_removed()
        return len(rows)

    # Leases and answers

    def lease(
        self, worker: bytes, now: float, *, count: int = 1, seconds: float = 0.0, version: int | None = None,
        having: Iterable[int] = (), fits: Callable[[PromptRow], bool] = lambda row: True,
    ) -> tuple[list[PromptRow], str]:  # fmt: skip
        """Lease prompts to a worker. Return them, and the reason why they are not `count` many, or "".

        Args:
            fits: Function that returns False if the reply has no room for a prompt, which then is not leased.
        """
        known, rows = set(having), list[PromptRow]()
        while len(rows) < count:
            is_forgotten = self.leases.has_unknown_lease(worker, known)
            why = "" if is_forgotten else self.leases.lease_wait_reason(version) or self._wait_reason()
            row = None if why else self.leases.peek_next(worker, known)
            if row is None:
                return rows, why or nothing_waits(self.book)
            if not fits(row):
                return rows, ""
            row = self.leases.lease_next(worker, now, seconds or None, known)
            assert row is not None
            known.add(row.lease)
            rows.append(row)
        return rows, ""

    def _wait_reason(self) -> str:
        """Return the reason why there is no room for answers now, or ""."""
        self._make_room(1)
        return self._no_room(0, 1)

    def _make_room(self, size: int) -> None:
        """Drop unfinished answers without a lease, then the oldest ready groups if `is_bounded`, to make room."""
        if size <= self.room:
            return
        for row in [row for row in self.book.waiting.rows() if row.attempts]:
            for index in [i for i, answer in enumerate(row.answers) if answer.pieces and not answer.is_settled]:
                self.leases.reset_answer(row, index)
                self.store.drop_pieces(row.key, index)
                self.book.touch(row)
        while self.is_bounded and size > self.room and (oldest := self.book.ready.pop()) is not None:
            self.leases.drop(oldest, "full")
            self.full += 1
            self.free_removed()

    def make_room(self, size: int) -> None:
        """Make room for bytes of answers. Raise ProtocolError (code "busy") if there is too little."""
        if size <= self.byte_limit - self.book.bytes - self.store.bytes and size <= self.free():
            return
        self._make_room(size)
        if size > self.room:
            raise ProtocolError("busy", self._no_room(0, size))

    def answer(
        self, row: PromptRow, lease: int, index: int, columns: Packed, *, piece: int = 0, is_last: bool = True,
        version: int = 0,
    ) -> Outcome:  # fmt: skip
        """Store a piece of an answer. If it was taken, the caller calls `update_state` for the prompt.

        Raises:
            ProtocolError: see `PromptLeases.answer`.
        """
        outcome = self.leases.answer(
            row, lease, index, columns.columns, piece=piece, is_last=is_last, version=version,
            tokens=max(columns.lengths, default=1 if is_last else 0),
        )  # fmt: skip
        if outcome == "taken":
            put = self.store.append if piece else self.store.put_first_piece
            put(row.key, index, columns)
            if is_last:
                self.store.join_pieces(row.key, index)
        return outcome

    def amend(self, row: PromptRow, index: int, columns: Packed) -> Outcome:
        """Store columns of an answer that came from elsewhere than its worker."""
        outcome = self.leases.amend(row, index, columns.columns)
        if outcome == "taken":
            self.store.amend(row.key, index, columns)
            self.update_state(row)
        return outcome

    def fail(self, row: PromptRow, lease: int, index: int, reason: str, is_again: bool) -> Outcome:
        """Record that an answer will not come. See `PromptLeases.fail`."""
        outcome = self.leases.fail(row, lease, index, reason, is_again)
        if outcome == "taken":
            if not is_again:
                self.store.release(row.key, index)
                self.book.update_bytes(row)
            self.update_state(row)
        return outcome

    def update_state(self, row: PromptRow) -> None:
        """Move a prompt to its next state after its answers changed."""
        self.book.touch(row)
        self.leases.update_state(row)
        if self.book.released:
            self.free_removed()

    def expire(self, now: float) -> int:
        """End expired leases, and return how many."""
        ended = len(self.leases.expire(now))
        if ended:
            self.free_removed()
        return ended

    # Steps

    def draw(
        self, step: int, count: int, session: str, *, wanted: int = 0, replay: float = 0.0, is_last: bool = False,
        plan: StepPlan | None = None,
    ) -> StepRow | None:  # fmt: skip
        """Return this server's groups of a step; None while they are not fixed. See `PromptSteps.draw`.

        Args:
            count: Groups to draw from this server; 0 only returns fixed groups.
            wanted: Groups of the whole step, which pace the workers.
            plan: Plan to keep here if its version is newer than the kept one.
        """
        self.steps.admit_session(session)
        if wanted and wanted != self.book.facts.step_groups:
            self.book.facts.step_groups, self.book.has_new_facts = wanted, True
        if plan is not None and (step not in self.plans or self.plans[step].version < plan.version):
            self.plans[step] = self.new_plans[step] = plan
        if not count and not is_last:
            return self.steps.find(step, session)
        before = self.book.counts[PromptState.DRAWN]
        drawn = self.steps.draw(step, count, session, replay=replay, is_last=is_last)
        if drawn is not None and self.book.counts[PromptState.DRAWN] > before:
            rows = [self.book.rows[key] for key in drawn.keys]
            self.tokens_drawn += sum(row.tokens for row in rows)
            self.lag = max(0, self.book.facts.newest_model - min((row.version for row in rows), default=0))
        self.free_removed()
        return drawn

    def count_tokens(self, row: PromptRow, rank: int, ranks: int) -> None:
        """Count a group that a rank of the trainer has fetched. Another number of ranks resets all counts."""
        if rank < ranks <= MAX_COUNTED_RANKS:
            if len(self.rank_tokens) != ranks:
                self.rank_tokens = [0] * ranks
            self.rank_tokens[rank] += row.tokens

    def commit(self, step: int, session: str) -> int:
        """Commit the steps up to `step`. See `PromptSteps.commit`."""
        done = self.steps.commit(step, session)
        self.free_removed()
        return done

    def rewind(self, step: int, session: str, newest_model: int | None = None) -> int:
        """Go back to a step. See `PromptSteps.rewind`."""
        done = self.steps.rewind(step, session, newest_model)
        for number in [number for number in self.plans if number > step]:
            del self.plans[number]
            self.new_plans[number] = None
        self.free_removed()
        return done

    def saw_model(self, version: int) -> None:
        """Record the version of a published model if it is the newest."""
        if version > self.book.facts.newest_model:
            self.book.facts.newest_model, self.book.has_new_facts = version, True

    def free_removed(self) -> None:
        """Free the bytes of removed prompts, released columns and old plans."""
        book = self.book
        while book.released:
            row = book.released.pop()
            self.store.release(row.key)
        while book.removed:
            key = book.removed.pop()
            self.store.forget(key)
            self.steps.ring.discard(key)
            if self.store.unsaved_changes is not None:
                self.store.unsaved_changes[ROW, packed_key(*key)] = None
        if not self.store.is_durable:
            for each in (book.dirty, self.steps.dirty, self.new_plans):
                each.clear()
        least = book.facts.committed - self.book.rules.keep
        for number in [number for number in self.plans if number <= least]:
            del self.plans[number]
            self.new_plans[number] = None

    # Figures

    @property
    def is_over(self) -> bool:
        """True if no more groups become ready."""
        return self.book.is_finished and not self.book.pending

    def columns(self, row: PromptRow, index: int, mask: int) -> Packed:
        """Return only those columns of an answer that are in the mask."""
        return select_columns(self.schema, self.store.packed(row.key, index), mask)

    def rows(self, states: Sequence[int], tags: Mapping[str, str], since: int) -> Iterator[PromptRow]:
        """Yield prompts that changed after a cursor, with these states (empty for any) and tags."""
        for row in self.book.changed_since(since):
            if (not states or row.state in states) and all(row.tags.get(name) == value for name, value in tags.items()):
                yield row

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts disagree. For tests."""
        self.book.check_invariants()
        self.leases.check_invariants()
        self.steps.check_invariants()
        self.store.check_invariants()
        for row in self.book.rows.values():
            for index, answer in enumerate(row.answers):
                held = self.store.packed(row.key, index).columns
                assert held == (answer.columns if row.has_columns and not answer.failed else 0), (row, index, held)


MAX_HOLDERS: Final = 32
"""Largest number of workers in the list of lease holders."""


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """Worker that holds leases of prompts."""

    worker: str
    """Id of the worker in hex."""
    leases: int
    oldest: float
    """Seconds since the oldest lease began."""
    left: float
    """Seconds until the first lease ends."""


PROMPTS: Final = gauge("prompts", "Prompts", "Prompts of the table, by state.", label="state", curve=True)


@dataclass(frozen=True, slots=True)
class PromptStats:
    """Statistics of a table of prompts at one moment. The first eight figures add up to `given`."""

    # fmt: off
    waiting: Annotated[int, PROMPTS("waiting", "Prompts by state", "Prompts by state. Waiting: no "
        "worker has it. Leased: a worker has it. Answered: its answers lack a required column. Ready: its group can be "
        "drawn. Drawn: a trainer received it and has not committed. Committed: it was trained on. Dropped: it is not "
        "trained on. Forgotten: its epoch was removed.", formula="Σ states = prompts given", docs="language-models.md")]
    leased: Annotated[int, PROMPTS("leased")]
    answered: Annotated[int, PROMPTS("answered")]
    ready: Annotated[int, PROMPTS("ready")]
    drawn: Annotated[int, PROMPTS("drawn")]
    committed: Annotated[int, PROMPTS("committed")]
    dropped: Annotated[int, PROMPTS("dropped")]
    forgotten: Annotated[int, PROMPTS("forgotten")]
    given: Annotated[int, gauge("prompts_known", "Prompts given", "All prompts: the sum of their states.")]
    evaluation: Annotated[int, adding("sum")]
    """Number of prompts that are never drawn."""
    workers: Annotated[int, gauge("prompts_workers", "Workers", "Workers that have a lease.")]
    oldest_lease: Annotated[float, gauge("prompts_oldest_lease_seconds", "Oldest lease",
        "Seconds since the oldest current lease began. The prompt of a dead worker waits again when its lease ends.",
        docs="language-models.md", adds="max", curve=True)]
    expired: Annotated[int, counter("prompts_expired_leases", "Leases that ended", "Leases that ended unfinished, "
        "since the server started.")]
    late: Annotated[int, counter("prompts_late_answers", "Late answers", "Answers that arrived after another one, or "
        "after their group was ready.")]
    failed: Annotated[int, counter("prompts_failed_answers", "Failed answers", "Answers that failed and are not "
        "tried again.")]
    dead: Annotated[int, counter("prompts_dead", "Groups without signal", "Groups dropped because of the score 0, "
        "which teaches nothing; others replaced them (drop_dead).",
        docs="language-models.md")]
    stale: Annotated[int, counter("prompts_stale", "Too old", "Groups that were too old at their draw.")]
    full: Annotated[int, counter("prompts_full", "No room", "Groups dropped because the table was full.")]
    incomplete: Annotated[int, counter("prompts_incomplete", "Incomplete", "Prompts whose saved parts were missing at "
        "a start. Prompts without answers wait again, unless they are committed or dropped; prompts without payload "
        "are dropped.")]
    replayable: Annotated[int, gauge("prompts_replayable", "Can be replayed", "Committed groups whose answers are "
        "kept, so that steps with replay draw from them.", docs="language-models.md")]
    tokens_drawn: Annotated[int, counter("prompts_tokens_drawn", "Tokens drawn",
        "Tokens of the groups that were drawn.")]
    lag: Annotated[int, gauge("prompts_model_lag", "Models behind", "Versions by which the oldest token of the newest "
        "step was behind the newest model.", formula="newest version - version of the oldest token",
        docs="language-models.md", adds="max", curve=True)]
    reasons: Annotated[dict[str, int], shown("Dropped, by reason", "Prompts that are not trained on, by reason.",
        docs="language-models.md")]
    holders: Annotated[tuple[LeaseHolder, ...], shown("Lease holders", "Workers with leases now, at most 32, those "
        "with the most leases first.", docs="language-models.md", adds="join")]
    rank_tokens: Annotated[tuple[int, ...], shown("Tokens of each rank", "Tokens of the groups that each rank of the "
        "trainer has fetched. Ranks with more tokens take longer, and the others wait for them.",
        formula="tokens of a rank ÷ mean of all ranks", docs="language-models.md")]
    # fmt: on


def stats_of(table: PromptTable, now: float) -> PromptStats:
    """Return frozen statistics of a table."""
    figures, oldest = figures_of(table), table.leases.oldest()
    counts: dict[str, Any] = {each.name: figures[each.name] for each in fields(PromptStats) if each.name in figures}
    return PromptStats(
        **counts,
        incomplete=table.incomplete,
        oldest_lease=0.0 if oldest is None else max(0.0, now - oldest.leased_at),
        lag=table.lag,
        reasons=dict(table.book.reasons),
        holders=tuple(holders_of(table, now)),
        rank_tokens=tuple(table.rank_tokens),
    )


def holders_of(table: PromptTable, now: float) -> Iterator[LeaseHolder]:
    """Yield the workers that have leases, those with the most first."""
    for worker, rows in heapq.nlargest(MAX_HOLDERS, table.leases.held().items(), key=lambda each: len(each[1])):
        oldest, end = min(row.leased_at for row in rows), min(row.until for row in rows)
        yield LeaseHolder(worker.hex(), len(rows), max(0.0, now - oldest), max(0.0, end - now))


def counts_of(book: PromptBook) -> dict[str, int]:
    """Return the number of prompts in each state, and of removed ones; their sum is all prompts ever added."""
    return {state.name.lower(): count for state, count in book.counts.items()} | {"forgotten": book.forgotten}


def unfinished_of(book: PromptBook) -> int:
    """Return the number of prompts that are still to be answered, drawn or committed."""
    to_answer = (PromptState.WAITING, PromptState.LEASED, PromptState.ANSWERED)
    to_train_on = (PromptState.READY, PromptState.DRAWN)
    return sum(book.counts[state] for state in to_answer) + sum(map(book.training_count, to_train_on))


def figures_of(table: PromptTable) -> dict[str, int]:
    """Return the number of prompts in each state, and other figures, by name."""
    book, leases = table.book, table.leases
    return counts_of(book) | {
        "given": len(book.rows) + book.forgotten,
        "evaluation": sum(book.evaluations.values()),
        "pending": book.pending,
        "drawable": len(book.ready),
        "leases": leases.leases,
        "workers": len(leases.held()),
        "expired": leases.counts["expired"],
        "late": leases.counts["late"],
        "failed": leases.counts["failed"],
        "amended": leases.counts["amended"],
        "stale": table.steps.stale,
        "dead": book.reasons["no signal"],
        "full": table.full,
        "replayable": len(table.steps.ring),
        "tokens_drawn": table.tokens_drawn,
        "bytes": table.memory_bytes,
        "newest_model": book.facts.newest_model,
    }


def draw_wait_reason(table: PromptTable, count: int, now: float, replay: float = 0.0) -> str:
    """Return the reason why a draw of `count` groups waits, if the share `replay` of the groups may be replayed."""
    book, text = table.book, []
    for state in (PromptState.LEASED, PromptState.ANSWERED, PromptState.WAITING):
        if number := book.training_count(state):
            text.append(f"{number} {state.name.lower()}{_detail(table, state, now)}")
    stale = (
        f"; {table.steps.stale} were too old (max_model_lag={table.book.rules.max_model_lag})"
        if table.steps.stale
        else ""
    )
    others = ", ".join(text) or ("no more are added" if book.is_finished else "no others were added")
    wanted = needed_ready_groups(count, len(table.steps.ring), replay)
    again = f" ({count - wanted} more are replayed)" if wanted < count else ""
    return f"{len(book.ready)} of {wanted} groups ready{again}: {others}{stale}"


def _detail(table: PromptTable, state: PromptState, now: float) -> str:
    if state is PromptState.LEASED and (row := table.leases.oldest()) is not None:
        remaining = max(0.0, row.until - now)
        return f", the oldest by worker {row.worker.hex()[:8]} for another {remaining:.0f} s"
    if state is PromptState.ANSWERED:
        names = [name for place, name in enumerate(table.schema.names) if table.book.rules.required_mask >> place & 1]
        return f" without all required columns ({', '.join(names)})"
    return ""
