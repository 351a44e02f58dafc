"""What a client says of itself: in each UPDATE, and in the file of what it could not tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memoire.wire import messages
from memoire.wire.frames import tail_of
from memoire.wire.identity import name_hash

from .former_clients import FinalCounts, ReportPart
from .session import Session

LINES_PER_UPDATE = 512
ENDED_PER_UPDATE = 1024


class MemorySums(NamedTuple):
    """What the memory weighs at one moment, zeros if nothing can be drawn; and entries that it holds."""

    weight: float = 0.0
    positives: int = 0
    minimum: float = 0.0
    entries: int = 0


def report_of(session: Session, sums: MemorySums, models: Mapping[str, int]) -> messages.Update:
    """Everything that the home does not know yet, of the run that is told now.

    Args:
        models: Version of each topic in use.
    """
    boundary, counts, told = session.counts.boundary, session.counts.told, session.told
    is_home = session.home == name_hash(told.home_name)
    last_line = None if boundary is None else boundary.line
    return messages.Update(
        epoch=told.epoch if is_home else 0,
        episodes=counts.episodes,
        steps=counts.steps,
        passed_steps=counts.passed,
        caches=session.window.pushed_caches if is_home else 0,
        cache_bytes=session.window.pushed_bytes if is_home else 0,
        skipped=counts.skipped,
        generated_bytes=counts.generated_bytes,
        total_weight=sums.weight,
        positives=sums.positives,
        minimum=sums.minimum,
        parameters_version=session.parameters_version,
        models=dict(models),
        scalars=session.scalars,
        lines=session.outbox.waiting(LINES_PER_UPDATE, session.limits.tail_bytes // 4, through=last_line),
        dropped_lines=counts.dropped_lines,
        ended=session.counts.oldest_episodes(ENDED_PER_UPDATE),
        applied=counts.applied,
        stale=counts.stale,
        gone=counts.gone,
        entries=sums.entries,
        feedback_through=session.feedback_through,
        leaving=session.is_leaving,
        finished=session.is_finished,
    )


def remainder_of(session: Session, models: Mapping[str, int]) -> FinalCounts | None:
    """All that a home has not acknowledged, for a file; None if there is nothing. Takes lines and episodes away: the
    client has ended.
    """
    counts, lines = session.counts, len(session.outbox)
    episodes = max(counts.missing.episodes, counts.waiting_episodes)
    if not (counts.missing.steps or episodes or lines):
        return None
    return FinalCounts(
        client=session.client,
        label=session.label,
        table=session.told.table_name,
        home=session.told.home_name,
        steps=counts.missing.steps,
        episodes=episodes,
        lines=lines,
        parts=_all_parts(session, models),
    )


def _all_parts(session: Session, models: Mapping[str, int]) -> list[ReportPart]:
    boundary = session.counts.boundary
    if boundary is None:
        return _parts(session, session.run, models)
    former = [] if boundary.is_told else _parts(session, session.run, models)
    session.counts.enter_unknown_run()
    return former + _parts(session, 0, models)


def _parts(session: Session, run: int, models: Mapping[str, int]) -> list[ReportPart]:
    """The UPDATEs that tell all of one run: the last one has no line and no episode left."""
    parts = []
    while True:
        body = report_of(session, MemorySums(), models)
        parts.append(ReportPart(run, tail_of(body)))
        if not (body.lines or body.ended):
            return parts
        session.outbox.acknowledge(body.lines[-1].number if body.lines else 0)
        session.counts.acknowledge_episodes(body.ended[-1].number if body.ended else 0)
