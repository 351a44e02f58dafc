"""What is seen of a table of prompts: counts, other figures, and why a call waits. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from .book import PromptBook
from .plan import needed
from .rows import PromptState
from .table import PromptTable

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


@dataclass(frozen=True, slots=True)
class PromptStats:
    """A table of prompts at one moment, for those who watch. The first eight add up to `given`."""

    waiting: int
    leased: int
    answered: int
    ready: int
    drawn: int
    committed: int
    dropped: int
    forgotten: int
    given: int
    evaluation: int
    """Prompts that are never drawn."""
    workers: int
    """That have a lease."""
    oldest_lease: float
    """Seconds since the oldest lease that lasts began."""
    expired: int
    """Leases that ended unfinished, since the server began."""
    late: int
    """Answers that came after another one, or after their group was ready."""
    failed: int
    """Answers that failed for good."""
    dead: int
    """Prompts that were dropped because their score was 0."""
    stale: int
    """Groups that were too old when they were to be drawn."""
    full: int
    """Groups that were dropped for want of room."""
    incomplete: int
    """Prompts of which a start did not find all bytes: those that lack answers wait again, unless they are over; those
    that lack their payload were dropped.
    """
    replayable: int
    """Committed groups that may be replayed."""
    tokens_drawn: int
    lag: int
    """Versions by which the oldest token of the newest step was behind the newest model."""
    reasons: dict[str, int]
    """Prompts that were dropped, by reason."""
    holders: tuple[LeaseHolder, ...]
    """Workers that have leases, those with the most first, 32 at most."""
    rank_tokens: tuple[int, ...]
    """Tokens of the groups that each rank of the trainer has fetched here."""


def stats_of(table: PromptTable, now: float) -> PromptStats:
    """A frozen picture."""
    figures, oldest = figures_of(table), table.leases.oldest()
    names = ("given", "evaluation", "workers", "expired", "late", "failed", "dead", "stale", "full", "replayable")
    return PromptStats(
        **counts_of(table.book),
        **{name: figures[name] for name in names},
        tokens_drawn=figures["tokens_drawn"],
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
    """Other figures."""
    book, leases = table.book, table.leases
    return {
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
        f"; {table.steps.stale} were too old (max_model_lag={table.rules.max_model_lag})" if table.steps.stale else ""
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
        names = [name for place, name in enumerate(table.schema.names) if table.rules.required >> place & 1]
        return f" without all required columns ({', '.join(names)})"
    return ""
