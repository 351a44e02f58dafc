"""One table of prompts: the ledger with the bytes that belong to it. Pure: no lock; time is passed in.

PromptBook    where each prompt stands              PromptSteps   what a trainer drew, commits, rewinds
PromptLeases  who answers what until when           PromptBytes   payloads, columns

What is seen of a table of prompts: counts, other figures, and why a call waits. Pure.
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
from .columns import PIECE_BYTES, ROW, Key, Packed, PromptBytes, chosen, gathered, packed_key
from .leases import Outcome, PromptLeases
from .messages import StepPlan
from .rows import PromptRow, PromptRules, PromptState, StepRow, column_of, scorer
from .servers import needed
from .steps import PromptSteps

ANSWERS_PART: Final = 4
"""The part of the bytes that givers of prompts leave to answers, one in so many."""
MAX_COUNTED_RANKS: Final = 1024
"""Ranks of a trainer whose tokens are counted."""


class PromptTable:
    """What a server holds of one table of prompts. Not thread-safe.

    Args:
        score: See `PromptSettings`.
        capacity: Prompts that there is room for that are neither committed nor dropped; 0: bytes alone limit them.
        byte_limit: Of prompts, payloads and columns.
        is_bounded: Whether the oldest ready groups are dropped for want of room; else workers and givers wait.
        first: Of numbers of changes and leases.
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
        """How many groups of a step each server gives, of steps that were planned here."""
        self.new_plans: dict[int, StepPlan | None] = {}
        """Plans that changed since they were saved; None: they are gone."""
        self.full = 0
        """Groups that were dropped for want of room."""
        self.incomplete = 0
        """Prompts of which something was missing when they were restored."""
        self.free: Callable[[], int] = lambda: byte_limit
        """Returns the bytes that others leave."""
        self.tokens_drawn = 0
        self.rank_tokens: list[int] = []
        """Tokens of the groups that each rank of the trainer has fetched."""
        self.lag = 0
        """Versions by which the oldest token of the newest step was behind the newest model."""

    def _score_of(self, row: PromptRow) -> float:
        if self._score is None:
            return 1.0
        parts = [self.store.columns(row.key, index).get(self._scored) for index in row.group]
        found = self._scorer(gathered(self.schema, self._scored, parts).astype(np.float64))
        return found if math.isfinite(found) else 0.0

    # Givers

    def add(
        self, keys: Sequence[Key], payloads: Sequence[bytes], *, priority: float = 0.0, is_evaluation: bool = False,
        tags: Mapping[str, str] | None = None,
    ) -> list[bool]:  # fmt: skip
        """Give prompts; for each whether it is new here.

        Raises:
            ProtocolError: (code "busy") there is no room for them; (code "value") their epoch is finished.
        """
        fresh = [(key, data) for key, data in zip(keys, payloads, strict=True) if not self.book.knows(key)]
        size = sum(PIECE_BYTES + len(data) + self.book.size_of(key, tags or {}) for key, data in fresh)
        if size > self.byte_limit - self.byte_limit // ANSWERS_PART:
            text = f"{len(keys)} prompts take {size} bytes, and may have a part of {self.byte_limit} (byte_limit)"
            raise ProtocolError("too_large", f"{text} that leaves room for answers. Give fewer at a time")
        if why := self._no_room(len(keys), size + self._kept_free if fresh else 0):
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
            return f"waiting for room: {held} prompts are held, and there is room for {self.capacity} (capacity)"
        if size > self.room:
            return (
                f"waiting for room: {self.memory_bytes} of {self.byte_limit} bytes are held (byte_limit), and "
                f"{self.room} are free on this server for {size} more (held_bytes)"
            )
        return ""

    @property
    def memory_bytes(self) -> int:
        """Bytes of prompts, payloads and answers, and of what of them is to be saved."""
        return self.book.bytes + self.store.bytes

    @property
    def _kept_free(self) -> int:
        """Bytes that givers leave to answers: without them no prompt would ever leave."""
        answers = self.store.bytes - self.store.payload_bytes
        return max(0, self.byte_limit // ANSWERS_PART - answers)

    @property
    def room(self) -> int:
        """Bytes that may still come."""
        return max(0, min(self.byte_limit - self.memory_bytes, self.free()))

    def finish(self, dataset: str, epoch: int) -> None:
        """No more prompts of this epoch come. Raises ProtocolError (code "busy") if there is no room for its name."""
        self.book.finish(dataset, epoch, self.room)

    def cancel(self, keys: Iterable[Key]) -> int:
        """Prompts are not wanted any more; returns how many. Those that are drawn go on."""
        rows = [self.book.rows[key] for key in keys if key in self.book.rows]
        done = sum(self.leases.drop(row, "cancelled") for row in rows if row.state is not PromptState.DROPPED)
        self.tidy()
        return done

    def forget(self, dataset: str, epoch: int) -> int:
        """Let the prompts of an epoch leave that is over; returns how many. Raises ProtocolError (code "busy")."""
        self.steps.check_not_replayed(dataset, epoch)
        rows = self.book.forget(dataset, epoch)
        for row in rows:
            self.leases.end(row)
        self.tidy()
        return len(rows)

    # Workers

    def lease(
        self, worker: bytes, now: float, *, count: int = 1, seconds: float = 0.0, version: int | None = None,
        having: Iterable[int] = (), fits: Callable[[PromptRow], bool] = lambda row: True,
    ) -> tuple[list[PromptRow], str]:  # fmt: skip
        """Prompts for a worker, and why there are no more.

        Args:
            fits: Whether the reply has room for a prompt that is next; else it is not leased.
        """
        known, rows = set(having), list[PromptRow]()
        while len(rows) < count:
            is_forgotten = self.leases.has_forgotten(worker, known)
            why = "" if is_forgotten else self.leases.why_not(version) or self._full()
            row = None if why else self.leases.next_of(worker, known)
            if row is None:
                return rows, why or nothing_waits(self.book)
            if not fits(row):
                return rows, ""
            row = self.leases.take(worker, now, seconds or None, known)
            assert row is not None
            known.add(row.lease)
            rows.append(row)
        return rows, ""

    def _full(self) -> str:
        """Why nothing more may be answered now."""
        self._make_room(1)
        return self._no_room(0, 1)

    def _make_room(self, size: int) -> None:
        """Let go, for want of room, of parts of answers that nobody goes on with, and of groups that are ready."""
        if size <= self.room:
            return
        for row in [row for row in self.book.waiting.rows() if row.attempts]:
            for index in [i for i, answer in enumerate(row.answers) if answer.pieces and not answer.is_settled]:
                self.leases.begin_again(row, index)
                self.store.begin_again(row.key, index)
                self.book.touch(row)
        while self.is_bounded and size > self.room and (oldest := self.book.ready.pop()) is not None:
            self.leases.drop(oldest, "full")
            self.full += 1
            self.tidy()

    def make_room(self, size: int) -> None:
        """Have room for so many bytes of answers. Raises ProtocolError (code "busy") if there is none."""
        if size <= self.byte_limit - self.book.bytes - self.store.bytes and size <= self.free():
            return
        self._make_room(size)
        if size > self.room:
            raise ProtocolError("busy", self._no_room(0, size))

    def answer(
        self, row: PromptRow, lease: int, index: int, come: Packed, *, piece: int = 0, is_last: bool = True,
        version: int = 0,
    ) -> Outcome:  # fmt: skip
        """A piece of an answer came; `bring_on` is to be called for its prompt when it was taken.

        Raises:
            ProtocolError: see `PromptLeases.answer`.
        """
        outcome = self.leases.answer(
            row, lease, index, come.columns, piece=piece, is_last=is_last, version=version,
            tokens=max(come.lengths, default=1 if is_last else 0),
        )  # fmt: skip
        if outcome == "taken":
            put = self.store.append if piece else self.store.begin
            put(row.key, index, come)
            if is_last:
                self.store.join(row.key, index)
        return outcome

    def amend(self, row: PromptRow, index: int, come: Packed) -> Outcome:
        """Columns of an answer came from elsewhere."""
        outcome = self.leases.amend(row, index, come.columns)
        if outcome == "taken":
            self.store.amend(row.key, index, come)
            self.bring_on(row)
        return outcome

    def fail(self, row: PromptRow, lease: int, index: int, reason: str, is_again: bool) -> Outcome:
        """An answer does not come. See `PromptLeases.fail`."""
        outcome = self.leases.fail(row, lease, index, reason, is_again)
        if outcome == "taken":
            if not is_again:
                self.store.let_go(row.key, index)
                self.book.recount(row)
            self.bring_on(row)
        return outcome

    def bring_on(self, row: PromptRow) -> None:
        """Answers to a prompt have changed: it may be ready now."""
        self.book.touch(row)
        self.leases.settle(row)
        if self.book.let_go:
            self.tidy()

    def expire(self, now: float) -> int:
        """End leases whose time has passed; returns how many."""
        ended = len(self.leases.expire(now))
        if ended:
            self.tidy()
        return ended

    # Trainers

    def draw(
        self, step: int, count: int, session: str, *, wanted: int = 0, replay: float = 0.0, is_last: bool = False,
        plan: StepPlan | None = None,
    ) -> StepRow | None:  # fmt: skip
        """The groups of a step that this server gives; None while they are not fixed. See `PromptSteps.draw`.

        Args:
            count: Groups of this server; 0 only asks.
            wanted: Groups that the whole step is to have, for the pace of workers.
            plan: To be kept here, unless one of a later version, or the same, is.
        """
        self.steps.enter(session)
        if wanted and wanted != self.book.facts.step_groups:
            self.book.facts.step_groups, self.book.has_new_facts = wanted, True
        if plan is not None and (step not in self.plans or self.plans[step].version < plan.version):
            self.plans[step] = self.new_plans[step] = plan
        if not count and not is_last:
            return self.steps.find(step, session)
        before = self.book.counts[PromptState.DRAWN]
        found = self.steps.draw(step, count, session, replay=replay, is_last=is_last)
        if found is not None and self.book.counts[PromptState.DRAWN] > before:
            rows = [self.book.rows[key] for key in found.keys]
            self.tokens_drawn += sum(row.tokens for row in rows)
            self.lag = max(0, self.book.facts.newest_model - min((row.version for row in rows), default=0))
        self.tidy()
        return found

    def count_tokens(self, row: PromptRow, rank: int, ranks: int) -> None:
        """A rank of the trainer has fetched a group. With another number of ranks all are counted from 0."""
        if rank < ranks <= MAX_COUNTED_RANKS:
            if len(self.rank_tokens) != ranks:
                self.rank_tokens = [0] * ranks
            self.rank_tokens[rank] += row.tokens

    def commit(self, step: int, session: str) -> int:
        """See `PromptSteps.commit`."""
        done = self.steps.commit(step, session)
        self.tidy()
        return done

    def rewind(self, step: int, session: str, newest_model: int | None = None) -> int:
        """See `PromptSteps.rewind`."""
        done = self.steps.rewind(step, session, newest_model)
        for number in [number for number in self.plans if number > step]:
            del self.plans[number]
            self.new_plans[number] = None
        self.tidy()
        return done

    def saw_model(self, version: int) -> None:
        """There is a model of this version."""
        if version > self.book.facts.newest_model:
            self.book.facts.newest_model, self.book.has_new_facts = version, True

    def tidy(self) -> None:
        """Let bytes go that nobody wants any more."""
        book = self.book
        while book.let_go:
            row = book.let_go.pop()
            self.store.let_go(row.key)
        while book.gone:
            key = book.gone.pop()
            self.store.forget(key)
            self.steps.ring.discard(key)
            if self.store.saves is not None:
                self.store.saves[ROW, packed_key(*key)] = None
        if self.store.saves is None:  # nobody takes what has changed
            for each in (book.dirty, self.steps.dirty, self.new_plans):
                each.clear()
        least = book.facts.committed - self.book.rules.keep
        for number in [number for number in self.plans if number <= least]:
            del self.plans[number]
            self.new_plans[number] = None

    # What is seen

    @property
    def is_over(self) -> bool:
        """Whether no more groups come."""
        return self.book.is_finished and not self.book.pending

    def columns(self, row: PromptRow, index: int, mask: int) -> Packed:
        """Those of these columns that an answer has."""
        return chosen(self.schema, self.store.packed(row.key, index), mask)

    def rows(self, states: Sequence[int], tags: Mapping[str, str], since: int) -> Iterator[PromptRow]:
        """Prompts that changed since, in these states (none: any), with these tags."""
        for row in self.book.changed_since(since):
            if (not states or row.state in states) and all(row.tags.get(name) == value for name, value in tags.items()):
                yield row

    def check_invariants(self) -> None:
        """Raise AssertionError where the parts disagree. For tests."""
        self.book.check_invariants()
        self.leases.check_invariants()
        self.steps.check_invariants()
        self.store.check_invariants()
        for row in self.book.rows.values():
            for index, answer in enumerate(row.answers):
                there = self.store.packed(row.key, index).columns
                assert there == (answer.columns if row.has_columns and not answer.failed else 0), (row, index, there)


MAX_HOLDERS: Final = 32
"""Workers that are named, those with the most leases."""


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """A worker that has leases."""

    worker: str
    """Its id in hex."""
    leases: int
    oldest: float
    """Seconds since the oldest of them began."""
    left: float
    """Seconds until the first of them ends."""


PROMPTS: Final = gauge("prompts", "Prompts", "Prompts of the table, by state.", label="state", curve=True)


@dataclass(frozen=True, slots=True)
class PromptStats:
    """A table of prompts at one moment, for those who watch. The first eight add up to `given`."""

    # fmt: off
    waiting: Annotated[int, PROMPTS("waiting", "Prompts by state", "Prompts by state. Waiting: no "
        "worker has it. Leased: a worker has it. Answered: its answers lack a required column. Ready: its group can be "
        "drawn. Drawn: a trainer got it and has not committed. Committed: it was trained on. Dropped: it is not "
        "trained on. Forgotten: its epoch was.", formula="Σ states = prompts given", docs="language-models.md")]
    leased: Annotated[int, PROMPTS("leased")]
    answered: Annotated[int, PROMPTS("answered")]
    ready: Annotated[int, PROMPTS("ready")]
    drawn: Annotated[int, PROMPTS("drawn")]
    committed: Annotated[int, PROMPTS("committed")]
    dropped: Annotated[int, PROMPTS("dropped")]
    forgotten: Annotated[int, PROMPTS("forgotten")]
    given: Annotated[int, gauge("prompts_known", "Prompts given", "All prompts: the sum of their states.")]
    evaluation: Annotated[int, adding("sum")]
    """Prompts that are never drawn."""
    workers: Annotated[int, gauge("prompts_workers", "Workers", "Workers that have a lease.")]
    oldest_lease: Annotated[float, gauge("prompts_oldest_lease_seconds", "Oldest lease",
        "Seconds since the lease that lasts longest began. A worker that died gives its prompt back when its lease "
        "ends.", docs="language-models.md", adds="max", curve=True)]
    expired: Annotated[int, counter("prompts_expired_leases", "Leases that ended", "Leases that ended unfinished, "
        "since the server began.")]
    late: Annotated[int, counter("prompts_late_answers", "Late answers", "Answers that came after another one, or "
        "after their group was ready.")]
    failed: Annotated[int, counter("prompts_failed_answers", "Failed answers", "Answers that failed for good.")]
    dead: Annotated[int, counter("prompts_dead", "Groups without signal", "Groups whose score was 0, so that nothing "
        "could be learned from them. They were dropped, and others came in their place (drop_dead).",
        docs="language-models.md")]
    stale: Annotated[int, counter("prompts_stale", "Too old", "Groups that were too old when they were to be drawn.")]
    full: Annotated[int, counter("prompts_full", "No room", "Groups dropped for want of room.")]
    incomplete: Annotated[int, counter("prompts_incomplete", "Incomplete", "Prompts of which a start did not find all "
        "bytes: those that lack answers wait again, unless they are over; those that lack their payload were dropped.")]
    replayable: Annotated[int, gauge("prompts_replayable", "Can be replayed", "Committed groups whose answers are "
        "kept, so that steps with replay draw from them.", docs="language-models.md")]
    tokens_drawn: Annotated[int, counter("prompts_tokens_drawn", "Tokens drawn",
        "Tokens of the groups that were drawn.")]
    lag: Annotated[int, gauge("prompts_model_lag", "Models behind", "Versions by which the oldest token of the newest "
        "step was behind the newest model.", formula="newest version - version of the oldest token",
        docs="language-models.md", adds="max", curve=True)]
    reasons: Annotated[dict[str, int], shown("Dropped, by reason", "Prompts that are not trained on, and why.",
        docs="language-models.md")]
    holders: Annotated[tuple[LeaseHolder, ...], shown("Who holds prompts", "Workers that have leases now, those with "
        "the most first, 32 at most.", docs="language-models.md", adds="join")]
    rank_tokens: Annotated[tuple[int, ...], shown("Tokens of each rank", "Tokens of the groups that each rank of the "
        "trainer has fetched. Ranks with more tokens take longer, and the others wait for them.",
        formula="tokens of a rank ÷ mean of all ranks", docs="language-models.md")]
    # fmt: on


def stats_of(table: PromptTable, now: float) -> PromptStats:
    """A frozen picture."""
    figures, oldest = figures_of(table), table.leases.oldest()
    shown_too: dict[str, Any] = {each.name: figures[each.name] for each in fields(PromptStats) if each.name in figures}
    return PromptStats(
        **shown_too,
        incomplete=table.incomplete,
        oldest_lease=0.0 if oldest is None else max(0.0, now - oldest.leased_at),
        lag=table.lag,
        reasons=dict(table.book.reasons),
        holders=tuple(holders_of(table, now)),
        rank_tokens=tuple(table.rank_tokens),
    )


def holders_of(table: PromptTable, now: float) -> Iterator[LeaseHolder]:
    """Who has leases, those with the most first."""
    for worker, rows in heapq.nlargest(MAX_HOLDERS, table.leases.held().items(), key=lambda each: len(each[1])):
        oldest, end = min(row.leased_at for row in rows), min(row.until for row in rows)
        yield LeaseHolder(worker.hex(), len(rows), max(0.0, now - oldest), max(0.0, end - now))


def counts_of(book: PromptBook) -> dict[str, int]:
    """Prompts in each state, by its name; and those that were forgotten. Their sum is what was given."""
    return {state.name.lower(): count for state, count in book.counts.items()} | {"forgotten": book.forgotten}


def unfinished_of(book: PromptBook) -> int:
    """Prompts that somebody has yet to answer, to draw or to commit."""
    to_answer = (PromptState.WAITING, PromptState.LEASED, PromptState.ANSWERED)
    to_train_on = (PromptState.READY, PromptState.DRAWN)
    return sum(book.counts[state] for state in to_answer) + sum(map(book.training, to_train_on))


def figures_of(table: PromptTable) -> dict[str, int]:
    """Prompts in each state, and other figures."""
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


def why_not(table: PromptTable, count: int, now: float, replay: float = 0.0) -> str:
    """What a draw of so many groups waits for, of which the share `replay` may be replayed."""
    book, text = table.book, []
    for state in (PromptState.LEASED, PromptState.ANSWERED, PromptState.WAITING):
        if number := book.training(state):
            text.append(f"{number} {state.name.lower()}{_detail(table, state, now)}")
    stale = (
        f"; {table.steps.stale} were too old (max_model_lag={table.book.rules.max_model_lag})"
        if table.steps.stale
        else ""
    )
    there = ", ".join(text) or ("no more come" if book.is_finished else "no others were given")
    wanted = needed(count, len(table.steps.ring), replay)
    again = f" ({count - wanted} more are replayed)" if wanted < count else ""
    return f"{len(book.ready)} of {wanted} groups ready{again}: {there}{stale}"


def _detail(table: PromptTable, state: PromptState, now: float) -> str:
    if state is PromptState.LEASED and (row := table.leases.oldest()) is not None:
        left = max(0.0, row.until - now)
        return f", the oldest by worker {row.worker.hex()[:8]} for another {left:.0f} s"
    if state is PromptState.ANSWERED:
        names = [name for place, name in enumerate(table.schema.names) if table.book.rules.required_mask >> place & 1]
        return f" without all required columns ({', '.join(names)})"
    return ""
