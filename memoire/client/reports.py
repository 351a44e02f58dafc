"""What a client says of itself: in each UPDATE, and in the file of what it could not tell. Pure.

What an actor could not tell before it ended: kept in a folder of its own, and told by the next client that has it.

    client 7 ends, nobody answers  ──▶  untold-07...07.msgpack   its sums, its lines, its closed episodes
    client 8 begins, same folder   ──▶  HELLO and UPDATE in the name of client 7  ──▶  the file goes

Sums count from a client's beginning and lines are numbered, so that a file may be told any number of times, also by two
clients at once, and nothing counts twice.

The figures of a client at one moment, for whoever watches.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from memoire.disk import record_file
from memoire.disk.files import make_folder, mode_in
from memoire.disk.record_file import CheckedFile, FileKind
from memoire.errors import MemoireError, Refused, StateUnusable
from memoire.replay.files import Fault, no_fault, remove_abandoned_in
from memoire.version import SOFTWARE
from memoire.wire import messages
from memoire.wire.frames import PASSING, Answer, name_hash, tail_of, update_of

from .session import Session

if TYPE_CHECKING:
    from memoire.figures import FAULTS, REFUSED, counter, gauge

_log = logging.getLogger(__name__)

KIND = FileKind(b"memorprt", 2, "a report that a client kept")
MAX_BYTES = 256 << 20
"""Of a file that is read: what a client keeps at most is far less."""
RETRY_INTERVAL = 5.0
"""Seconds before a home that had no time is asked again."""
TRANSIENT_CODES = (*PASSING, "client")
"""Codes of refusals that end by themselves, or by another HELLO."""
_PREFIX, _SUFFIX = "untold-", ".msgpack"


class ReportPart(msgspec.Struct, frozen=True):
    """What one UPDATE says of one run."""

    run: int
    """Hash of its name; 0: the one that is counted when it is told."""
    update: bytes
    """The tail of the message."""


class FinalCounts(msgspec.Struct, frozen=True, kw_only=True):
    """All that a client had to tell when it ended."""

    client: bytes
    label: int
    table: str
    home: str
    """Name of the server that counted it."""
    steps: int
    """Those that nobody has acknowledged, for messages."""
    episodes: int
    lines: int
    parts: list[ReportPart]


def save(folder: Path, untold: FinalCounts, *, at: Fault = no_fault) -> Path:
    """Write a file for the next client that has this folder; it is whole and on disk, or not there.

    Args:
        folder: It is there.
        untold: What the file says.
        at: Called before each step, so that a test may let it fail: see `replacing`.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / f"{_PREFIX}{untold.client.hex()}{_SUFFIX}"
    content = msgspec.msgpack.encode(untold)
    record_file.write(path, KIND, [(0, content)], mode=mode_in(folder), at=at)
    return path


def leave(folder: Path | None, untold: FinalCounts) -> str:
    """Leave it in the folder, if there is one; returns what was not acknowledged and what becomes of it, in words."""
    what = f"{untold.steps} steps, {untold.episodes} episodes and {untold.lines} log lines were acknowledged"
    if folder is None:
        return f"{what}: they are not counted"
    try:
        kept = save(folder, untold)
    except OSError as error:
        return f"{what}: they are not counted, and could not be kept in {folder}: {error}"
    return f"{what}: they are in {kept}, and the next client with this folder tells them"


def found(folder: Path) -> list[tuple[Path, FinalCounts]]:
    """The files of a folder that can be read; a damaged one is named in the log, and stays. Drafts of processes that
    have ended are removed.
    """
    files = []
    with contextlib.suppress(OSError):
        remove_abandoned_in(folder, _SUFFIX)
    for path in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")):
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES} bytes")
            with CheckedFile(path, KIND) as file:
                (record,) = file.records()
            content = msgspec.msgpack.decode(record.payload, type=FinalCounts)
            for part in content.parts:
                update_of(part.update)
        except FileNotFoundError:
            continue  # another client of this folder has told it
        except (OSError, ValueError, msgspec.MsgspecError, MemoireError) as error:
            _log.warning("%s cannot be read, and is not told: %s", path, error)
        else:
            files.append((path, content))
    return files


def folder_at(place: str | Path) -> Path:
    """The folder, made where it is not there. Raises StateUnusable."""
    path = Path(place).absolute()
    try:
        make_folder(path)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "it is not writable for this user")
    except OSError as error:
        raise StateUnusable(
            str(path), error.strerror or str(error), "Name a folder that this user may write."
        ) from error
    return path


class LateRequest(NamedTuple):
    """What is to be sent in the name of the client that left a file."""

    body: messages.Body
    run: int = 0
    home: int | None = None
    """Hash of the home's name; None: whichever welcomed it."""


class UnreportedClient:
    """Tells one file in the name of the client that left it: HELLO, then an UPDATE for each part.

    Each method returns what is to be sent next; None ends it, or leaves it to `begin` at `again_at`.
    """

    def __init__(self, path: Path, untold: FinalCounts) -> None:
        self.path, self.untold = path, untold
        self.again_at = 0.0
        """When to begin, or to begin again; infinity while it goes on."""
        self.is_done = False
        """Whether the file was told, or nobody will ever take it."""
        self._left: list[ReportPart] = []
        self._awaited: type[messages.Body] = messages.Welcome  # what answers the newest request
        self._is_home = False  # whether the server that answers is the one that counted the client

    def begin(self) -> LateRequest:
        """HELLO as the client said it."""
        self.again_at = float("inf")
        self._left, self._awaited = list(self.untold.parts), messages.Welcome
        hello = messages.Hello(role="actor", table=self.untold.table, label=self.untold.label, software=SOFTWARE)
        return LateRequest(hello, home=name_hash(self.untold.home))

    def answered(self, answer: Answer, now: float) -> LateRequest | None:
        """HELLO or UPDATE was answered at `now`."""
        if isinstance(answer, MemoireError):
            self._refused(answer, now)
            return None
        if not isinstance(answer.body, self._awaited):
            self.again_at = now + RETRY_INTERVAL
            return None
        if isinstance(answer.body, messages.Welcome):
            self._is_home, self._awaited = answer.body.home_name == self.untold.home, messages.Updated
        else:
            del self._left[0]
        return self._next()

    def _next(self) -> LateRequest | None:
        if self._left:
            part = self._left[0]
            update = update_of(part.update)
            if not self._is_home:  # what is counted per home was for another one
                update = msgspec.structs.replace(update, epoch=0, caches=0, cache_bytes=0)
            return LateRequest(update, run=part.run)
        self.path.unlink(missing_ok=True)
        facts = self.untold.steps, self.untold.episodes, self.untold.lines, self.untold.client.hex()[:8]
        _log.info("%d steps, %d episodes and %d lines were told that client %s had kept", *facts)
        self.is_done = True
        return None

    def _refused(self, error: MemoireError, now: float) -> None:
        if isinstance(error, Refused) and error.code in TRANSIENT_CODES:
            self.again_at = now + RETRY_INTERVAL
            return
        self.is_done = True  # for any other reason than a refusal this client ends: the next one tells it
        if isinstance(error, Refused):
            _log.warning("%s cannot be told, and stays: %s", self.path, error)


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
        lines=session.outbox.waiting(LINES_PER_UPDATE, session.limits.tuning.tail_bytes // 4, through=last_line),
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
    on_full: str
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
