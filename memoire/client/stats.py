"""The figures of a client at one moment, for whoever watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from .pushes import Pusher, WhenFull
from .session import Session

if TYPE_CHECKING:
    from memoire.figures import FAULTS, REFUSED, counter, gauge


@dataclass(frozen=True, slots=True)
class ClientStats:
    """A client at one moment; for whoever watches."""

    # fmt: off
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
    episodes: Annotated[int, counter("client_episodes", "Episodes", "Episodes that this client closed.")]
    steps: Annotated[int, counter("client_steps", "Steps", "Entries that this client recorded.")]
    generated_bytes: Annotated[int, counter("client_generated_bytes", "Recorded", "Bytes of these entries.")]
    pushed_caches: Annotated[int, counter("client_pushed_caches", "Caches pushed", "Caches that were pushed.")]
    """Where the server stores episodes, these; so with all counts of caches."""
    pushed_bytes: Annotated[int, counter("client_pushed_bytes", "Bytes pushed", "Bytes of these caches.")]
    accepted_caches: Annotated[int, counter("client_accepted_caches", "Accepted",
        "Caches that the home says it has taken.")]
    received_bytes: int
    rejected: dict[str, int]
    lost_caches: Annotated[int, gauge("client_missing_caches", "Lost", "Caches that were pushed and are given up; "
        "fewer when they arrive after all.")]
    lost_bytes: int
    in_flight_caches: int
    in_flight_bytes: Annotated[int, gauge("client_in_flight_bytes", "On the way", "Bytes of caches of which no answer "
        "has come yet.")]
    credit: Annotated[int, gauge("client_credit_bytes", "Credit", "Bytes that may be on the way: what the home grants, "
        "or less where configure_limits says so.")]
    granted: int
    """Bytes that the home grants."""
    on_full: WhenFull
    """What the writer does with a cache or episode when the window is full."""
    waited: Annotated[float, counter("client_wait_seconds", "Waited", "Seconds that calls waited for room in the "
        "window.")]
    compression: str
    """How frames are packed now: what the parameters say, or what "auto" has chosen, if the home can undo it."""
    passed_steps: Annotated[int, counter("client_passed_steps", "Passed steps", "Entries recorded beyond what was "
        "granted, while the home told this client to wait, and not pushed.")]
    held_back: str
    """Why it is to wait now; "" when it is not. See `samples_per_insert_tolerance`."""
    held_back_for: Annotated[float, counter("client_held_back_seconds", "Held back", "Seconds that recording waited "
        "for draws.")]
    skipped_caches: Annotated[int, counter("client_skipped_caches", "Skipped", "Caches that were not pushed because "
        "the window was full.", docs="rate.md")]
    not_pushed: dict[str, int]
    """Calls of push_cache and push_episode, the writer's too, that pushed nothing, by reason."""
    waiting_lines: Annotated[int, gauge("client_waiting_lines", "Lines waiting", "Log lines that the home does not "
        "have yet.")]
    waiting_line_bytes: int
    dropped_lines: Annotated[int, counter("client_dropped_lines", "Lines dropped",
        "Log lines that log() did not take.")]
    dropped_returns: int
    """Episodes that count, but whose return was given up: not finite, or thousands closed while the home was away."""
    parameters_version: int
    models: Annotated[dict[str, int], gauge("client_model_version", "Models", "Newest version of each topic that this "
        "client has.", label="topic")]
    skipped_models: Annotated[int, counter("client_skipped_models", "Models skipped", "Versions of models that were "
        "passed over, because newer ones were there.")]
    fetched_bytes: int
    """Of models, asked for beyond what notices brought."""
    resubscribed: int
    """Topics subscribed to again, because their notices did not come."""
    updates: Annotated[int, counter("client_updates", "Updates", "UPDATE messages that were answered.")]
    resends: Annotated[int, counter("client_resends", "Resends", "Requests that were sent again.")]
    refused: Annotated[dict[str, int], REFUSED]
    silent: Annotated[float, gauge("client_silent_seconds", "Silent", "Seconds since the newest reply.")]
    untold_steps: int
    """Of the steps, those that no home has acknowledged yet."""
    trouble: str
    """Why the home acknowledges nothing, as it says; "" where all is well."""
    applied: int
    stale: int
    finished: bool
    faults: Annotated[int, FAULTS]
    # fmt: on


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
