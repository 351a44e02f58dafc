"""Job queue with leases, and the service of an agent that assigns jobs to observers.

`Jobs` is pure: its methods take the time as an argument.

    submit ──▶ open ──take──▶ leased ──finish──▶ done, or failed
                ▲                │  renew: each message of the holder extends its lease
                └───attempts─────┤  lease expired: open again, or ObserverLost after the last attempt
                                 └─cancel──▶ removed; the holder learns of it in the answer to its next message

The first result counts, even from a worker whose lease has expired. Later results are counted as late and discarded.

`JobService` answers observers: requests for work wait for a job, requests for actions renew leases.

    WORK ──▶ waits ──job──▶ JOB      INFER of a job ──▶ renews its lease, or is refused      RESULT ──▶ future, TAKEN

The service has no socket and no thread: the thread of the inference node calls it and sends its answers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire import Schema
from memoire.building import Held, RowSchema
from memoire.errors import Closed, JobFailed, MemoireError, ObserverLost, ParameterError, ProtocolError
from memoire.kinds import (
    Buffer,
    ByteBudget,
    ByteHolder,
    EnvelopedRequest,
    InferenceThread,
    JobStats,
    Message,
    MessageHeader,
    PeerTable,
    Receivers,
    ReplyLimits,
    StartsStats,
    messages,
    reply,
    types,
)
from memoire.kinds import fragments as rollout_fragments
from memoire.limits import HELD_BYTES, Limits

RECONNECT_TIMEOUT = 2.0
"""Seconds that a worker keeps its lease after its connection has ended, so that it can reconnect."""

_FUTURES_LOCK = threading.RLock()


@dataclass(eq=False, slots=True)
class LeasedJob:
    """One job. All but the future belongs to the thread of its `Jobs`."""

    number: int
    content: Any
    """Start and options, as sent to the worker."""
    future: Future[Any]
    """Future of the job's result or error."""
    only: str
    """Name or id of the only worker that may take the job; "" allows any worker."""
    attempts: int
    """Number of leases that may still begin."""
    holder: bytes = b""
    """Id of the worker that holds the lease; b"" while the job is open."""
    expires: float = math.inf
    """Time at which the lease expires."""
    held_by: set[bytes] = field(default_factory=set)
    """Ids of all workers that have held the job, whose results are accepted."""


class Jobs:
    """Job queue of one agent.

    Args:
        lease: Seconds that a worker holds a job after its last message.
        attempts: Number of leases of a job; 1 loses the job when its first lease expires.
        first: Number of the first job. A restarted agent must not reuse the numbers of its former jobs.
    """

    def __init__(self, lease: float, attempts: int = 2, first: int = 1) -> None:
        self.lease, self.attempts = lease, attempts
        self.counts: Counter[str] = Counter()
        """Numbers of ended jobs (done, failed, cancelled, lost), expired leases (expired), and results after the end of
        their job (late).
        """
        self._numbers = itertools.count(first)
        self._jobs: dict[int, LeasedJob] = {}  # open and leased jobs, by number
        self._open: dict[int, LeasedJob] = {}  # open jobs in order of assignment
        self._leased: dict[bytes, set[int]] = {}  # numbers by holder

    @property
    def unleased_jobs(self) -> int:
        """Number of jobs without a lease."""
        return len(self._open)

    @property
    def leased(self) -> int:
        """Number of jobs that workers hold."""
        return len(self._jobs) - len(self._open)

    # Called for the agent

    def submit(self, content: Any, future: Future[Any] | None = None, only: str = "") -> LeasedJob:
        """Add an open job to the queue and return it."""
        job = LeasedJob(next(self._numbers), content, future or Future(), only, self.attempts)
        self._jobs[job.number] = self._open[job.number] = job
        return job

    def cancel(self, job: LeasedJob) -> None:
        """Cancel a job; its worker learns of it in the answer to its next message."""
        if job.number in self._jobs:
            self._end(job, "cancelled")
            job.future.cancel()

    def close(self) -> None:
        """Cancel all jobs; their futures raise Closed."""
        for job in list(self._jobs.values()):
            self._end(job, "cancelled")
            finish_future(job.future, error=Closed("the agent of this job"))

    # Called for workers

    def take(self, worker: bytes, now: float, name: str = "", having: frozenset[int] = frozenset()) -> LeasedJob | None:
        """Lease the oldest open job that this worker may take; return None if no job fits.

        Args:
            name: Name of the worker.
            having: Numbers of jobs that the worker is running. Another job that it holds is returned first, again.
        """
        if forgotten := self._leased.get(worker, set()) - having:
            job = self._jobs[min(forgotten)]
            job.expires = now + self.lease
            return job
        names = ("", name, worker.hex()) if name else ("", worker.hex())
        for job in self._open.values():
            if job.only in names:
                job.attempts -= 1
                job.held_by.add(worker)
                self._lease(job, worker, now)
                return job
        return None

    def give_back(self, job: LeasedJob) -> None:
        """Undo `take`, because the job could not be sent to its worker."""
        job.attempts += 1
        job.held_by.discard(job.holder)
        self._reopen(job)

    def renew(self, worker: bytes, number: int, now: float) -> bool:
        """Extend the lease of a worker that still runs a job; False if the worker should stop."""
        job = self._jobs.get(number)
        if job is None or worker not in job.held_by or job.holder not in (worker, b""):
            return False
        if job.holder:
            job.expires = now + self.lease
        else:  # the lease has expired, and the job is still open
            self._lease(job, worker, now)
        return True

    def finish(self, worker: bytes, number: int, result: Any = None, failed: str | None = None) -> bool:
        """Set the result of a job; False if the job is over, which counts as late.

        Args:
            failed: Error text of a failed job; None for success.

        Raises:
            ProtocolError: the worker has never held this job (code "owner").
        """
        job = self._jobs.get(number)
        if job is None:
            self.counts["late"] += 1
            return False
        if worker not in job.held_by:
            raise ProtocolError("owner", f"job {number} was never assigned to this client")
        self._end(job, "done" if failed is None else "failed")
        error = None if failed is None else JobFailed(number, worker.hex()[:8], failed)
        finish_future(job.future, result, error)
        return True

    def disconnect_worker(self, worker: bytes, now: float) -> None:
        """Let the leases of a worker expire in RECONNECT_TIMEOUT seconds, because its connection has ended."""
        for number in self._leased.get(worker, ()):
            job = self._jobs[number]
            job.expires = min(job.expires, now + RECONNECT_TIMEOUT)

    # Time

    def next_time(self) -> float:
        """Return the time of the next expiring lease; infinity without leases."""
        leased = (number for numbers in self._leased.values() for number in numbers)
        return min((self._jobs[number].expires for number in leased), default=math.inf)

    def expire(self, now: float) -> list[LeasedJob]:
        """End expired leases; return the jobs without further attempts, whose futures raise `ObserverLost`."""
        lost = []
        for job in [job for job in self._jobs.values() if job.expires <= now]:
            self.counts["expired"] += 1
            if job.attempts > 0:
                self._reopen(job)
                continue
            lost.append(job)
            worker = job.holder.hex()[:8]
            self._end(job, "lost")
            finish_future(job.future, error=ObserverLost(job.number, worker, self.lease))
        return lost

    def _lease(self, job: LeasedJob, worker: bytes, now: float) -> None:
        del self._open[job.number]
        job.holder, job.expires = worker, now + self.lease
        self._leased.setdefault(worker, set()).add(job.number)

    def _release(self, job: LeasedJob) -> None:
        if job.holder:
            numbers = self._leased[job.holder]
            numbers.discard(job.number)
            if not numbers:
                del self._leased[job.holder]
        job.holder, job.expires = b"", math.inf

    def _reopen(self, job: LeasedJob) -> None:
        self._release(job)
        self._open = {job.number: job} | self._open

    def _end(self, job: LeasedJob, outcome: str) -> None:
        self._release(job)
        self._open.pop(job.number, None)
        del self._jobs[job.number]
        self.counts[outcome] += 1

    def check_invariants(self) -> None:
        """Raise AssertionError if the tables of jobs disagree. For tests."""
        for number, job in self._jobs.items():
            assert number == job.number and (number in self._open) == (not job.holder)
            assert (job.expires == math.inf) == (not job.holder) and job.attempts >= 0
            assert not job.holder or (job.holder in job.held_by and number in self._leased[job.holder])
        assert self._open.keys() <= self._jobs.keys()
        assert sum(map(len, self._leased.values())) == self.leased and all(self._leased.values())


def finish_future(future: Future[Any], result: Any = None, error: MemoireError | None = None) -> None:
    """Set the result or error of a future, unless it is done or cancelled. May be called from any thread."""
    with Held(_FUTURES_LOCK):
        if future.done() or not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


MAX_WORKERS = 4096
"""Maximum number of clients; a further client is refused until a client is silent for `IDLE_TIMEOUT`."""
IDLE_TIMEOUT = 60.0
"""Seconds of silence after which a client may be evicted. Resends come sooner."""
KEPT_ANSWERS = 4
"""Number of newest answers to each client that are kept for resends; a client asks for one job at a time."""


_NO_HEADER: Final = MessageHeader(types.WORK, 0, bytes(16), 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class JobContent:
    """Start state and options of an episode."""

    start: NDArray[np.uint8] | None
    """Container of one row; None leaves the start to the observer."""
    options: Mapping[str, Any]


@dataclass(slots=True)
class _Worker:
    """State of a client that has asked for work."""

    name: str = ""
    descriptor: int = -1
    """File descriptor of its connection; -1 if that has ended."""
    heard_at: float = -math.inf
    """Time of its last WORK."""
    waits: tuple[list[Buffer], MessageHeader] = ([], _NO_HEADER)
    """Envelope and header of its waiting WORK."""
    until: float = 0.0
    """Time at which its waiting WORK is answered without a job."""
    answers: OrderedDict[int, list[Buffer]] = field(default_factory=OrderedDict)


class JobService:
    """Service that assigns jobs to clients, a `NodeService`.

    All methods but `run`, `count_stale_results`, `stats` and `starts_stats` belong to the node's thread.

    Args:
        starts: Columns of start states; None for an agent without start states.
        entries: Columns of the entries that observers record.
        origins: Functions that return figures of start states, one for each source; called in any thread.
    """

    def __init__(
        self, jobs: Jobs, starts: RowSchema | None, entries: Schema, origins: Sequence[Callable[[], StartsStats]] = ()
    ) -> None:
        self.node = "an agent"
        self.jobs, self.starts, self.entries, self._origins = jobs, starts, entries, tuple(origins)
        self.limits, self.receivers = Limits(), Receivers()
        """Limits and receivers of the node, which `begin` sets, like the following attributes."""
        self.room = ByteBudget(HELD_BYTES).add_holder("requests")
        """Budget of bytes for unpacking results."""
        self._waiting: dict[bytes, _Worker] = {}  # clients whose WORK waits for a job
        self._workers: PeerTable[bytes, _Worker] = PeerTable(
            "clients that ask for jobs", MAX_WORKERS, IDLE_TIMEOUT, lambda client, _: self._waiting.pop(client, None)
        )
        self._is_leaving = False
        self.send: Callable[[list[Buffer]], None] = lambda frames: None
        """Function that sends the frames of an answer."""
        self.post: Callable[[Callable[[], None]], None] = lambda function: None
        """Function that runs another function on the node's thread."""

    def begin(self, thread: InferenceThread, room: ByteHolder) -> None:
        """Attach to the node's thread, and answer WORK and RESULT on it."""
        self.send, self.post, self.limits = thread.send, thread.worker.post, thread.limits
        self.receivers, self.room = thread.receivers, room

        def work(
            request: EnvelopedRequest, message: Message, body: messages.WorkRequest, descriptor: int, now: float
        ) -> None:
            thread.check_patience(body.patience)
            self.work(request.envelope, message.header, body, descriptor)

        thread.answer_with(messages.WorkRequest, work)
        thread.answer_with(
            messages.Result, lambda request, message, body, *_: self.result(request.envelope, message, body)
        )

    def welcome(self) -> dict[str, Any]:
        """Return the fields of WELCOME that describe start states and entries."""
        return {"starts": "" if self.starts is None else self.starts.to_json(), "entries": self.entries.to_json()}

    # Calls from any thread

    def run(self, content: JobContent, only: str = "", future: Future[Any] | None = None) -> Future[Any]:
        """Submit a job. The future's result is a list of `Fragment`; cancelling the future reaches the observer.

        Args:
            only: Name or id of the only observer that may take the job; "" allows any observer.
            future: Future of the result; None creates one.

        Raises:
            ParameterError: start and options exceed the size of a message.
        """
        try:
            self._packed(_NO_HEADER, 0, content, ReplyLimits())
        except ProtocolError as error:
            raise ParameterError.with_text(
                f"The options and the start do not fit into one message: {error.detail}."
            ) from None
        result = future or Future()

        def submit() -> None:
            job = self.jobs.submit(content, result, only)
            result.add_done_callback(lambda done: self.post(lambda: self.jobs.cancel(job)))
            self._assign()

        self.post(submit)
        if self._is_leaving:  # the thread may have ended, and run no posted function
            finish_future(result, error=Closed("this agent"))
        return result

    def count_stale_results(self, results: int) -> None:
        """Count results that came in time but were too old to be used; they count as late."""
        if results:
            self.post(lambda: self.jobs.counts.update(late=results))

    def stats(self) -> JobStats:
        """Return the figures of jobs and observers."""
        counts, now = self.jobs.counts, time.monotonic()
        times = [worker.heard_at for _, worker in self._workers.items()]
        ends = {name: counts[name] for name in ("done", "failed", "cancelled", "lost", "expired", "late")}
        workers = sum(now - at < self.jobs.lease for at in times)
        return JobStats(open=self.jobs.unleased_jobs, leased=self.jobs.leased, observers=workers, **ends)

    def starts_stats(self) -> tuple[StartsStats, ...]:
        """Return the figures of start states, by source."""
        return tuple(stats() for stats in self._origins)

    # ------------------------------------------------------------------------- from here on: inside of the thread

    def hello(self, client: bytes, name: str) -> None:
        """Record the name of a client; "" keeps the former name."""
        worker = self._worker(client)
        worker.name = name or worker.name

    def check(self, client: bytes, number: int, now: float) -> None:
        """Renew the lease of a job when its rows arrive; raise ProtocolError (code "cancelled") if it should stop."""
        if not self.jobs.renew(client, number, now):
            raise ProtocolError("cancelled", f"job {number} is cancelled for this client")

    def work(self, envelope: list[Buffer], header: MessageHeader, body: messages.WorkRequest, descriptor: int) -> None:
        """Answer WORK: renew the lease of the client's job, or offer a job to the client."""
        now = time.monotonic()
        worker = self._worker(header.client)
        worker.descriptor, worker.heard_at = descriptor, now
        if (cached := worker.answers.get(header.sequence)) is not None:
            self.send([*envelope, *cached])
        elif body.job:
            is_renewed = self.jobs.renew(header.client, body.job, now)
            answer = messages.Job(cancelled=not is_renewed, leaving=self._is_leaving)
            self.send([*envelope, *reply(header, answer)])
        else:
            worker.waits, worker.until = (envelope, header), now + body.patience
            self._waiting[header.client] = worker
            self._offer(header.client, worker, now)

    def result(self, envelope: list[Buffer], message: Message, body: messages.Result) -> None:
        """Answer RESULT: finish the client's job with its entries or its error."""
        header, now = message.header, time.monotonic()
        worker = self._worker(header.client)
        frames = worker.answers.get(header.sequence)
        if frames is None:
            if header.fingerprint != self.entries.fingerprint:
                raise ProtocolError("schema", f"entries of another schema; this agent takes {self.entries!r}"[:1000])
            with self.room.reserved(rollout_fragments.unpacked_size(body.fragments, message.payload)):
                # ZeroMQ owns the frames: kept data has to be a copy.
                payload = None if message.payload is None else bytes(message.payload)
                facts: dict[str, Any] = {"now": now, "limits": self.limits}
                fragments = rollout_fragments.unpacked(body.fragments, payload, self.entries, **facts)
            fragments = [dataclasses.replace(each, client=header.client, number=body.job) for each in fragments]
            failed = body.text if body.status == "failed" else None
            counts = self.jobs.finish(header.client, body.job, fragments, failed)
            frames = reply(header, messages.Taken(samples=int(counts), lost=int(not counts)))
            self._keep(worker, header.sequence, frames)
        self.send([*envelope, *frames])

    def handle_disconnect(self, descriptor: int) -> None:
        """Let the leases of a connection's clients expire soon, because the connection has ended."""
        now = time.monotonic()
        for client, worker in self._workers.items():
            if worker.descriptor == descriptor:
                worker.descriptor = -1
                self._waiting.pop(client, None)
                self.jobs.disconnect_worker(client, now)

    def next_time(self) -> float:
        """Return the time at which `tick` has to run next."""
        return min(self.jobs.next_time(), *(worker.until for worker in self._waiting.values()), float("inf"))

    def tick(self) -> None:
        """Expire leases, and answer waiting requests whose patience is over."""
        now = time.monotonic()
        if now >= self.jobs.next_time():
            self.jobs.expire(now)
            self._assign()
        for client, worker in list(self._waiting.items()):
            if now >= worker.until:
                self._send_no_job(client, worker)

    def close(self) -> None:
        """Answer all waiting requests without a job, and close the queue."""
        self._is_leaving = True
        for client, worker in list(self._waiting.items()):
            self._send_no_job(client, worker)
        self.jobs.close()

    def _worker(self, client: bytes) -> _Worker:
        """Return the state of a client, or a new one. Raises ProtocolError (code "busy") above MAX_WORKERS clients."""
        worker = self._workers.get(client) or _Worker()
        self._workers.put(client, worker, time.monotonic())
        return worker

    def _assign(self) -> None:
        now = time.monotonic()
        for client, worker in list(self._waiting.items()) if self.jobs.unleased_jobs else ():
            self._offer(client, worker, now)

    def _offer(self, client: bytes, worker: _Worker, now: float) -> None:
        job = None if self._is_leaving else self.jobs.take(client, now, worker.name)
        if job is not None:
            self._send_job(client, worker, job)
        elif now >= worker.until or self._is_leaving:
            self._send_no_job(client, worker)

    def _send_job(self, client: bytes, worker: _Worker, job: LeasedJob) -> None:
        del self._waiting[client]
        envelope, header = worker.waits
        try:
            frames = self._packed(header, job.number, job.content, self.receivers.limits_of(client))
        except ProtocolError as error:
            self.jobs.give_back(job)
            frames = reply(header, messages.Refusal(code=error.code, text=error.detail))
        else:
            self._keep(worker, header.sequence, frames)
        self.send([*envelope, *frames])

    def _packed(self, header: MessageHeader, number: int, content: JobContent, receiver: ReplyLimits) -> list[Buffer]:
        """Return the frames of JOB. Raises ProtocolError (code "too_large"): they exceed the receiver's limit."""
        body = messages.Job(number=number, lease=self.jobs.lease, options=dict(content.options))
        facts: dict[str, Any] = {"fingerprint": 0}
        if self.starts is not None and content.start is not None:
            facts = {"fingerprint": self.starts.fingerprint, "payload": content.start}
        frames = reply(header, body, **facts)
        receiver.check(header.client, body, frames)
        return frames

    def _send_no_job(self, client: bytes, worker: _Worker) -> None:
        del self._waiting[client]
        envelope, header = worker.waits
        self.send([*envelope, *reply(header, messages.Job(leaving=self._is_leaving))])

    def _keep(self, worker: _Worker, sequence: int, frames: list[Buffer]) -> None:
        worker.answers[sequence] = frames
        while len(worker.answers) > KEPT_ANSWERS:
            worker.answers.popitem(last=False)
