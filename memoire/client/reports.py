"""Reports of a client: the body of each UPDATE, the file of undelivered reports, and the client's figures. No sockets.

If an actor ends before its server has acknowledged everything, a file keeps the rest. The next client that has the same
folder delivers it:

    client 7 ends without an answer  ──▶  untold-07...07.msgpack   its sums, its lines, its closed episodes
    client 8 begins, same folder     ──▶  HELLO and UPDATE in the name of client 7  ──▶  the file is removed

Sums count from a client's beginning and lines are numbered. If a file is delivered several times, also by two clients
at once, nothing counts twice.
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
"""Most bytes of a file that is read; a client's largest report is far smaller."""
RETRY_INTERVAL = 5.0
"""Seconds until a busy home is asked again."""
TRANSIENT_CODES = (*PASSING, "client")
"""Codes of refusals after which the report is tried again later, beginning with HELLO."""
_PREFIX, _SUFFIX = "untold-", ".msgpack"


class ReportPart(msgspec.Struct, frozen=True):
    """One UPDATE of a kept report, for one run."""

    run: int
    """Hash of the run's name; 0 stands for the server's run at delivery."""
    update: bytes
    """Encoded body of the UPDATE (the message's tail)."""


class FinalCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Report that a client could not deliver before its end, as its file holds it."""

    client: bytes
    label: int
    table: str
    home: str
    """Name of the server that counted the client."""
    steps: int
    """Number of steps that no home server has acknowledged, for messages; also `episodes` and `lines`."""
    episodes: int
    lines: int
    parts: list[ReportPart]


def save(folder: Path, untold: FinalCounts, *, at: Fault = no_fault) -> Path:
    """Write a report file for the next client with this folder; returns its path. Atomic: whole and on disk, or absent.

    Args:
        folder: An existing folder.
        untold: Content of the file.
        at: Called before each step, so that a test may let it fail: see `replacing`.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / f"{_PREFIX}{untold.client.hex()}{_SUFFIX}"
    content = msgspec.msgpack.encode(untold)
    record_file.write(path, KIND, [(0, content)], mode=mode_in(folder), at=at)
    return path


def keep_final_report(folder: Path | None, untold: FinalCounts) -> str:
    """Keep the report in the folder, if there is one; returns a phrase on what was not acknowledged and is kept."""
    counts = f"{untold.steps} steps, {untold.episodes} episodes and {untold.lines} log lines were acknowledged"
    if folder is None:
        return f"{counts}: they are not counted"
    try:
        path = save(folder, untold)
    except OSError as error:
        return f"{counts}: they are not counted, and could not be kept in {folder}: {error}"
    return f"{counts}: they are in {path}, and the next client with this folder reports them"


def read_reports(folder: Path) -> list[tuple[Path, FinalCounts]]:
    """Return path and content of each readable report file. A damaged file is logged, and stays. Drafts of processes
    that have ended are removed.
    """
    files = []
    with contextlib.suppress(OSError):
        remove_abandoned_in(folder, _SUFFIX)
    for path in sorted(folder.glob(f"{_PREFIX}*{_SUFFIX}")):
        try:
            if path.stat().st_size > MAX_BYTES:
                raise ValueError(f"the file is larger than {MAX_BYTES} bytes")
            with CheckedFile(path, KIND) as file:
                (record,) = file.records()
            content = msgspec.msgpack.decode(record.payload, type=FinalCounts)
            for part in content.parts:
                update_of(part.update)
        except FileNotFoundError:
            continue  # another client of this folder has delivered the file
        except (OSError, ValueError, msgspec.MsgspecError, MemoireError) as error:
            _log.warning("%s cannot be read, and its report is not delivered: %s", path, error)
        else:
            files.append((path, content))
    return files


def folder_at(place: str | Path) -> Path:
    """Return the folder's path; make the folder if it is missing. Raises StateUnusable if it is not writable."""
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
    """Request to send in the name of the client that left a report file."""

    body: messages.Body
    run: int = 0
    home: int | None = None
    """Hash of the home server's name; None addresses the server that sent the WELCOME."""


class UnreportedClient:
    """Delivery of one report file in the name of the client that left it: HELLO, then an UPDATE for each part.

    `begin` and `receive_answer` return the next request; None ends the delivery, or pauses it until `begin` is due.
    """

    def __init__(self, path: Path, untold: FinalCounts) -> None:
        self.path, self.untold = path, untold
        self.again_at = 0.0
        """Time of the next `begin`; infinity while requests are open."""
        self.is_done = False
        """True if the report was delivered, or was refused for good and is left to the next client."""
        self._unsent: list[ReportPart] = []
        self._awaited: type[messages.Body] = messages.Welcome  # type of the answer to the newest request
        self._is_home = False  # True if the answering server counted the client

    def begin(self) -> LateRequest:
        """Return HELLO in the name of the former client, for its former home."""
        self.again_at = float("inf")
        self._unsent, self._awaited = list(self.untold.parts), messages.Welcome
        hello = messages.Hello(role="actor", table=self.untold.table, label=self.untold.label, software=SOFTWARE)
        return LateRequest(hello, home=name_hash(self.untold.home))

    def receive_answer(self, answer: Answer, now: float) -> LateRequest | None:
        """Take the answer to HELLO or UPDATE, received at `now`; returns the next request, if any."""
        if isinstance(answer, MemoireError):
            self._refused(answer, now)
            return None
        if not isinstance(answer.body, self._awaited):
            self.again_at = now + RETRY_INTERVAL
            return None
        if isinstance(answer.body, messages.Welcome):
            self._is_home, self._awaited = answer.body.home_name == self.untold.home, messages.Updated
        else:
            del self._unsent[0]
        return self._next()

    def _next(self) -> LateRequest | None:
        if self._unsent:
            part = self._unsent[0]
            update = update_of(part.update)
            if not self._is_home:  # the counts belong to the account at another server
                update = msgspec.structs.replace(update, epoch=0, caches=0, cache_bytes=0)
            return LateRequest(update, run=part.run)
        self.path.unlink(missing_ok=True)
        facts = self.untold.steps, self.untold.episodes, self.untold.lines, self.untold.client.hex()[:8]
        _log.info("delivered %d steps, %d episodes and %d log lines that client %s had kept", *facts)
        self.is_done = True
        return None

    def _refused(self, error: MemoireError, now: float) -> None:
        if isinstance(error, Refused) and error.code in TRANSIENT_CODES:
            self.again_at = now + RETRY_INTERVAL
            return
        self.is_done = True  # except for a refusal, this client ends; the next one delivers the file
        if isinstance(error, Refused):
            _log.warning("the report in %s cannot be delivered, and stays: %s", self.path, error)


LINES_PER_UPDATE = 512
ENDED_PER_UPDATE = 1024


class MemorySums(NamedTuple):
    """Sums over the weights of a memory at one moment, zeros if nothing can be drawn; and its number of entries."""

    weight: float = 0.0
    positives: int = 0
    minimum: float = 0.0
    entries: int = 0


def report_of(session: Session, sums: MemorySums, models: Mapping[str, int]) -> messages.Update:
    """Return the body of an UPDATE: sums of the reported run, and lines and episodes that are not acknowledged.

    Args:
        models: Newest version of each topic that the client has.
    """
    boundary, counts, welcome = session.counts.boundary, session.counts.reported, session.welcome
    is_home = session.home == name_hash(welcome.home_name)
    last_line = None if boundary is None else boundary.line
    return messages.Update(
        epoch=welcome.epoch if is_home else 0,
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
        lines=session.outbox.next_lines(LINES_PER_UPDATE, session.limits.tuning.tail_bytes // 4, through=last_line),
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


def take_unacknowledged_report(session: Session, models: Mapping[str, int]) -> FinalCounts | None:
    """Return a report of all that no home has acknowledged; None if nothing is left. Removes the client's lines and
    episodes, so call it once, after the client has ended.
    """
    counts, lines = session.counts, len(session.outbox)
    episodes = max(counts.unacknowledged_counts.episodes, counts.waiting_episodes)
    if not (counts.unacknowledged_counts.steps or episodes or lines):
        return None
    return FinalCounts(
        client=session.client,
        label=session.label,
        table=session.welcome.table_name,
        home=session.welcome.home_name,
        steps=counts.unacknowledged_counts.steps,
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
    """Return the UPDATEs that report all of one run; the last has no lines and no episodes."""
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
    """Snapshot of a client's statistics, as `Client.stats` returns it."""

    # fmt: off
    client: str
    """Id of the client, in hex."""
    name: str
    """Name of the client, from its caller or Kubernetes; "" if it has no name."""
    label: int
    endpoint: str
    home: str
    """Name of the server that counts the client."""
    table: str
    run: str
    episodes: Annotated[int, counter("client_episodes", "Episodes", "Episodes that this client closed.")]
    steps: Annotated[int, counter("client_steps", "Steps", "Entries that this client recorded.")]
    generated_bytes: Annotated[int, counter("client_generated_bytes", "Recorded", "Bytes of these entries.")]
    pushed_caches: Annotated[int, counter("client_pushed_caches", "Caches pushed", "Caches that were pushed.")]
    """Number of caches pushed. If the server stores episodes, all counts of caches count episodes instead."""
    pushed_bytes: Annotated[int, counter("client_pushed_bytes", "Bytes pushed", "Bytes of these caches.")]
    accepted_caches: Annotated[int, counter("client_accepted_caches", "Accepted",
        "Caches that the home accepted.")]
    received_bytes: int
    rejected: dict[str, int]
    lost_caches: Annotated[int, gauge("client_missing_caches", "Lost", "Pushed caches that count as lost. The figure "
        "falls if they arrive later.")]
    lost_bytes: int
    in_flight_caches: int
    in_flight_bytes: Annotated[int, gauge("client_in_flight_bytes", "On the way", "Bytes of pushed caches that the "
        "home has not acknowledged yet.")]
    credit: Annotated[int, gauge("client_credit_bytes", "Credit", "Bytes that may be in flight: the home's grant, or "
        "less if configure_limits sets less.")]
    granted: int
    """Bytes that the home server grants."""
    on_full: str
    """Treatment of a cache or episode that the window has no room for: "skip" or "block"."""
    waited: Annotated[float, counter("client_wait_seconds", "Waited", "Seconds that calls waited for room in the "
        "window.")]
    compression: str
    """Compression in use: that of the parameters, or the choice of "auto", if the home server can decompress it."""
    passed_steps: Annotated[int, counter("client_passed_steps", "Passed steps", "Entries recorded beyond the grant "
        "while the home made this client wait; they are not pushed.")]
    held_back: str
    """Reason why the client has to wait now; "" if it need not. See `samples_per_insert_tolerance`."""
    held_back_for: Annotated[float, counter("client_held_back_seconds", "Held back", "Seconds that recording waited "
        "for draws.")]
    skipped_caches: Annotated[int, counter("client_skipped_caches", "Skipped", "Caches that were not pushed because "
        "the window was full.", docs="cluster.md")]
    not_pushed: dict[str, int]
    """Number of calls of push_cache and push_episode, the writer's included, that pushed nothing, by reason."""
    waiting_lines: Annotated[int, gauge("client_waiting_lines", "Lines waiting", "Log lines that the home has not "
        "acknowledged yet.")]
    waiting_line_bytes: int
    dropped_lines: Annotated[int, counter("client_dropped_lines", "Lines dropped",
        "Log lines that log() did not take.")]
    dropped_returns: int
    """Number of episodes without a reported return: not finite, or thousands closed while the home server was away."""
    parameters_version: int
    models: Annotated[dict[str, int], gauge("client_model_version", "Models", "Newest version of each topic that this "
        "client has.", label="topic")]
    skipped_models: Annotated[int, counter("client_skipped_models", "Models skipped", "Model versions that were "
        "skipped because newer ones existed.")]
    fetched_bytes: int
    """Bytes of models that were fetched by request, since no notice brought them."""
    resubscribed: int
    """Number of renewed subscriptions to topics whose notices did not come."""
    updates: Annotated[int, counter("client_updates", "Updates", "UPDATE messages that were answered.")]
    resends: Annotated[int, counter("client_resends", "Resends", "Requests that were sent again.")]
    refused: Annotated[dict[str, int], REFUSED]
    silent: Annotated[float, gauge("client_silent_seconds", "Silent", "Seconds since the newest reply.")]
    untold_steps: int
    """Number of steps that no home server has acknowledged yet."""
    trouble: str
    """Reason that the home server gives for acknowledging nothing; "" if all is well."""
    applied: int
    stale: int
    finished: bool
    faults: Annotated[int, FAULTS]
    # fmt: on
