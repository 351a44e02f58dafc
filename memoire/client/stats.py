"""The figures of a client at one moment, for whoever watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .pushes import Pusher, WhenFull
from .session import Session


@dataclass(frozen=True, slots=True)
class ClientStats:
    """A client at one moment; for whoever watches."""

    client: str
    """Its id in hex."""
    name: str
    """That a person or Kubernetes gave it; "" for none."""
    label: int
    endpoint: str
    home: str
    """Name of the server that counts it."""
    table: str
    run: str
    episodes: int
    steps: int
    generated_bytes: int
    pushed_caches: int
    """Where the server stores episodes, these; so with all counts of caches."""
    pushed_bytes: int
    accepted_caches: int
    received_bytes: int
    rejected: dict[str, int]
    lost_caches: int
    lost_bytes: int
    in_flight_caches: int
    in_flight_bytes: int
    credit: int
    """Bytes that may be on the way: what the home grants, or less where `configure_limits` says so."""
    granted: int
    """Bytes that the home grants."""
    on_full: WhenFull
    """What the writer does with a cache or episode when the window is full."""
    waited: float
    """Seconds that calls waited for room in the window."""
    compression: str
    """How frames are packed now: what the parameters say, or what "auto" has chosen, if the home can undo it."""
    passed_steps: int
    """Of the steps, those that were recorded while the home told this client to wait, and that count for no pushes."""
    held_back: str
    """Why it is to wait now; "" when it is not. See `samples_per_insert_tolerance`."""
    held_back_for: float
    """Seconds that calls waited for that."""
    skipped_caches: int
    """Caches or episodes that were not pushed because the window was full."""
    not_pushed: dict[str, int]
    """Calls of push_cache and push_episode, the writer's too, that pushed nothing, by reason."""
    waiting_lines: int
    waiting_line_bytes: int
    dropped_lines: int
    """Lines that log() did not take."""
    dropped_returns: int
    """Episodes that count, but whose return was given up: not finite, or thousands closed while the home was away."""
    parameters_version: int
    models: dict[str, int]
    skipped_models: int
    """Versions between two that came, over all topics: passed over, because newer ones were there."""
    fetched_bytes: int
    """Of models, asked for beyond what notices brought."""
    resubscribed: int
    """Topics subscribed to again, because their notices did not come."""
    updates: int
    """UPDATE messages that were answered."""
    resends: int
    refused: dict[str, int]
    """Messages that came in and were refused, by code."""
    silent: float
    """Seconds since the newest reply."""
    untold_steps: int
    """Of the steps, those that no home has acknowledged yet."""
    trouble: str
    """Why the home acknowledges nothing, as it says; "" where all is well."""
    applied: int
    stale: int
    finished: bool
    faults: int


def figures_of(session: Session, pusher: Pusher) -> dict[str, Any]:
    """Those that the session and what it pushes know, by their names in `ClientStats`. Under the lock."""
    return _identity(session) | _counted(session) | _pushed(session) | _held_back(session, pusher)


def _identity(session: Session) -> dict[str, Any]:
    told = session.told
    return {
        "client": session.client.hex(),
        "name": session.name,
        "label": session.label,
        "endpoint": session.endpoint,
        "home": told.home_name,
        "table": told.table_name,
        "run": told.run_name,
        "finished": session.is_finished,
        "trouble": session.trouble,
        "updates": session.updates,
        "parameters_version": session.parameters_version,
    }


def _counted(session: Session) -> dict[str, Any]:
    counts = session.counts
    return {
        "episodes": counts.episodes,
        "steps": counts.steps,
        "generated_bytes": counts.generated_bytes,
        "passed_steps": counts.passed,
        "skipped_caches": counts.skipped,
        "dropped_lines": counts.dropped_lines,
        "dropped_returns": counts.dropped_returns,
        "applied": counts.applied,
        "stale": counts.stale,
        "untold_steps": counts.missing.steps,
        "waiting_lines": len(session.outbox),
        "waiting_line_bytes": session.outbox.bytes,
    }


def _pushed(session: Session) -> dict[str, Any]:
    sums, windows = session.windows.sums(), session.windows
    return {name: getattr(sums, name) for name in sums.__slots__} | {
        "credit": windows.now.credit,
        "granted": windows.granted,
    }


def _held_back(session: Session, pusher: Pusher) -> dict[str, Any]:
    return {
        "held_back": session.inserts.held_back,
        "held_back_for": session.inserts.waited,
        "waited": pusher.waited,
        "compression": pusher.codec(),
        "on_full": pusher.on_full,
        "not_pushed": dict(pusher.not_pushed),
    }
