"""Jobs that one side gives and others do: each is leased, given again if it must be, and done once. Pure: time is
passed in.

    submit ──▶ open ──take──▶ leased ──finish──▶ done, or failed
                ▲                │  renew: whoever has it is heard of, and has it for another `lease`
                └───attempts─────┤  the lease has ended: somebody else may take it, or nobody: ObserverLost
                                 └─cancel──▶ gone; its worker learns so when it says something next

The first result counts, also of a worker whose lease has ended meanwhile: what is done need not be done again. A later
one is counted as late, and is nobody's.

What an agent's thread does for observers: questions that wait for a job, leases, results.

WORK ──▶ waits ──job──▶ JOB         INFER of a job ──▶ renews its lease, or is refused        RESULT ──▶ future, TAKEN

It has no socket and no thread of its own: the thread of the inference node calls it, and sends what it answers.
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
    Receiver,
    Receivers,
    StartsStats,
    messages,
    reply,
    types,
)
from memoire.kinds import fragments as rollout_fragments
from memoire.limits import HELD_BYTES, Limits

RECONNECT_TIMEOUT = 2.0
"""Seconds that a worker whose connection has ended keeps its lease: it may connect again."""

_SETTLING = threading.RLock()


@dataclass(eq=False, slots=True)
class LeasedJob:
    """One job. It belongs to the thread of its `Jobs`, but for the future."""

    number: int
    content: Any
    """What whoever does it is given."""
    future: Future[Any]
    """Gets the result, or why there is none."""
    only: str
    """Name or id of the only worker that may take it; "": anybody."""
    attempts: int
    """Leases that may still begin."""
    holder: bytes = b""
    """Whoever has it now; b"" while it is open."""
    expires: float = math.inf
    """When the lease ends."""
    held_by: set[bytes] = field(default_factory=set)
    """Everybody who has had it: their results may come."""


class Jobs:
    """The jobs of one giver.

    Args:
        lease: Seconds for which a job is its worker's, from the last time that it was heard of.
        attempts: Leases of a job: 1 ends it with its first one.
        first: Number of the first job. Numbers of a giver that was started again must not be those of before.
    """

    def __init__(self, lease: float, attempts: int = 2, first: int = 1) -> None:
        self.lease, self.attempts = lease, attempts
        self.counts: Counter[str] = Counter()
        """Jobs by how they ended (done, failed, cancelled, lost), leases that ended (expired), results that came after
        their job was over (late).
        """
        self._numbers = itertools.count(first)
        self._jobs: dict[int, LeasedJob] = {}  # that are not over
        self._open: dict[int, LeasedJob] = {}  # those of them that nobody has, in the order in which they are given
        self._leased: dict[bytes, set[int]] = {}  # numbers by holder

    @property
    def open(self) -> int:
        """Jobs that are leased to no worker."""
        return len(self._open)

    @property
    def leased(self) -> int:
        """Jobs that workers have."""
        return len(self._jobs) - len(self._open)

    # The giver

    def submit(self, content: Any, future: Future[Any] | None = None, only: str = "") -> LeasedJob:
        """Have it done."""
        job = LeasedJob(next(self._numbers), content, future or Future(), only, self.attempts)
        self._jobs[job.number] = self._open[job.number] = job
        return job

    def cancel(self, job: LeasedJob) -> None:
        """A job is not wanted any more; whoever has it learns so when it is heard of next."""
        if job.number in self._jobs:
            self._end(job, "cancelled")
            job.future.cancel()

    def close(self) -> None:
        """No job is given or taken any more: every future that waits gets Closed."""
        for job in list(self._jobs.values()):
            self._end(job, "cancelled")
            settle(job.future, error=Closed("the giver of this job"))

    # Those who do them

    def take(self, worker: bytes, now: float, name: str = "", having: frozenset[int] = frozenset()) -> LeasedJob | None:
        """The oldest job that this worker may do, leased to it; None if there is none.

        Args:
            name: That people call it.
            having: Numbers of jobs that it is at: what else is leased to it comes first, once more.
        """
        if forgotten := self._leased.get(worker, set()) - having:
            job = self._jobs[min(forgotten)]
            job.expires = now + self.lease
            return job
        mine = ("", name, worker.hex()) if name else ("", worker.hex())
        for job in self._open.values():
            if job.only in mine:
                job.attempts -= 1
                job.held_by.add(worker)
                self._lease(job, worker, now)
                return job
        return None

    def give_back(self, job: LeasedJob) -> None:
        """A job that was taken could not be handed over: it is as if it had not been taken."""
        job.attempts += 1
        job.held_by.discard(job.holder)
        self._reopen(job)

    def renew(self, worker: bytes, number: int, now: float) -> bool:
        """A worker is still at a job; False if that is not wanted of it any more."""
        job = self._jobs.get(number)
        if job is None or worker not in job.held_by or job.holder not in (worker, b""):
            return False
        if job.holder:
            job.expires = now + self.lease
        else:  # its lease had ended, and nobody else has it yet
            self._lease(job, worker, now)
        return True

    def finish(self, worker: bytes, number: int, result: Any = None, failed: str | None = None) -> bool:
        """The result of a worker. False if it came too late: the job is over, and this is counted.

        Args:
            failed: Why there is no result.

        Raises:
            ProtocolError: it is the job of others (code "owner").
        """
        job = self._jobs.get(number)
        if job is None:
            self.counts["late"] += 1
            return False
        if worker not in job.held_by:
            raise ProtocolError("owner", f"job {number} was never given to this client")
        self._end(job, "done" if failed is None else "failed")
        error = None if failed is None else JobFailed(number, worker.hex()[:8], failed)
        settle(job.future, result, error)
        return True

    def left(self, worker: bytes, now: float) -> None:
        """A worker's connection has ended: its leases end soon, unless it is heard of again."""
        for number in self._leased.get(worker, ()):
            job = self._jobs[number]
            job.expires = min(job.expires, now + RECONNECT_TIMEOUT)

    # Time

    def next_time(self) -> float:
        """When `expire` has something to do."""
        leased = (number for numbers in self._leased.values() for number in numbers)
        return min((self._jobs[number].expires for number in leased), default=math.inf)

    def expire(self, now: float) -> list[LeasedJob]:
        """End the leases whose time has passed; returns jobs that are lost, whose futures have `ObserverLost` now."""
        lost = []
        for job in [job for job in self._jobs.values() if job.expires <= now]:
            self.counts["expired"] += 1
            if job.attempts > 0:
                self._reopen(job)
                continue
            lost.append(job)
            worker = job.holder.hex()[:8]
            self._end(job, "lost")
            settle(job.future, error=ObserverLost(job.number, worker, self.lease))
        return lost

    def _lease(self, job: LeasedJob, worker: bytes, now: float) -> None:
        del self._open[job.number]
        job.holder, job.expires = worker, now + self.lease
        self._leased.setdefault(worker, set()).add(job.number)

    def _release(self, job: LeasedJob) -> None:
        if job.holder:
            held = self._leased[job.holder]
            held.discard(job.number)
            if not held:
                del self._leased[job.holder]
        job.holder, job.expires = b"", math.inf

    def _reopen(self, job: LeasedJob) -> None:
        self._release(job)
        self._open = {job.number: job} | self._open

    def _end(self, job: LeasedJob, how: str) -> None:
        self._release(job)
        self._open.pop(job.number, None)
        del self._jobs[job.number]
        self.counts[how] += 1

    def check_invariants(self) -> None:
        """Raise AssertionError where the parts disagree. For tests."""
        for number, job in self._jobs.items():
            assert number == job.number and (number in self._open) == (not job.holder)
            assert (job.expires == math.inf) == (not job.holder) and job.attempts >= 0
            assert not job.holder or (job.holder in job.held_by and number in self._leased[job.holder])
        assert self._open.keys() <= self._jobs.keys()
        assert sum(map(len, self._leased.values())) == self.leased and all(self._leased.values())


def settle(future: Future[Any], result: Any = None, error: MemoireError | None = None) -> None:
    """Give a future what it waits for, unless it was cancelled or has it. From any thread."""
    with Held(_SETTLING):
        if future.done() or not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


MAX_WORKERS = 4096
"""Clients whose newest answers are kept; a further one is refused until one of them is silent for `IDLE_TIMEOUT`."""
IDLE_TIMEOUT = 60.0
"""Seconds of silence after which a client may be forgotten. Resends come sooner."""
KEPT_ANSWERS = 4
"""Newest answers to each client that are kept for resends; a client asks for one job at a time."""


_NOBODY: Final = MessageHeader(types.WORK, 0, bytes(16), 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class JobContent:
    """What an observer is given."""

    start: NDArray[np.uint8] | None
    """Container of one row; None begins anywhere."""
    options: Mapping[str, Any]


@dataclass(slots=True)
class _Worker:
    """A client that has asked for work."""

    name: str = ""
    descriptor: int = -1
    """Of its connection."""
    heard_at: float = -math.inf
    """When it asked for work last."""
    waits: tuple[list[Buffer], MessageHeader] = ([], _NOBODY)
    """Whom to give a job, while it waits: the envelope and header of its WORK."""
    until: float = 0.0
    """When it is told that there is none."""
    answers: OrderedDict[int, list[Buffer]] = field(default_factory=OrderedDict)


class JobService:
    """Jobs as clients ask for them, a `NodeService`. All but `run` and what tells stats belongs to the node's thread.

    Args:
        starts: Columns of where episodes begin; None: anywhere.
        entries: Columns of what observers record.
        origins: Who tells of the states that episodes begin with; called in any thread.
    """

    def __init__(
        self, jobs: Jobs, starts: RowSchema | None, entries: Schema, origins: Sequence[Callable[[], StartsStats]] = ()
    ) -> None:
        self.node = "an agent"
        self.jobs, self.starts, self.entries, self._origins = jobs, starts, entries, tuple(origins)
        self.limits, self.receivers = Limits(), Receivers()
        """The node's, as the following ones, once it begins."""
        self.room = ByteBudget(HELD_BYTES).holder("requests")
        """What a result takes while it is unpacked."""
        self._waiting: dict[bytes, _Worker] = {}  # those that are to be told of a job, or that there is none
        self._workers: PeerTable[bytes, _Worker] = PeerTable(
            "clients that ask for jobs", MAX_WORKERS, IDLE_TIMEOUT, lambda client, _: self._waiting.pop(client, None)
        )
        self._is_leaving = False
        self.send: Callable[[list[Buffer]], None] = lambda frames: None
        """Sends an answer."""
        self.post: Callable[[Callable[[], None]], None] = lambda function: None
        """Has the node's thread call something."""

    def begin(self, thread: InferenceThread, room: ByteHolder) -> None:
        """Answer WORK and RESULT at this node."""
        self.send, self.post, self.limits = thread.send, thread.worker.post, thread.limits
        self.receivers, self.room = thread.receivers, room

        def work(request: EnvelopedRequest, message: Message, body: messages.Work, descriptor: int, now: float) -> None:
            thread.check_patience(body.patience)
            self.work(request.envelope, message.header, body, descriptor)

        thread.answer_with(messages.Work, work)
        thread.answer_with(
            messages.Result, lambda request, message, body, *_: self.result(request.envelope, message, body)
        )

    def welcome(self) -> dict[str, Any]:
        """What observers are told of the columns of episodes."""
        return {"starts": "" if self.starts is None else self.starts.to_json(), "entries": self.entries.to_json()}

    # From any thread

    def run(self, content: JobContent, only: str = "", future: Future[Any] | None = None) -> Future[Any]:
        """Have an observer do this. The future gets a list of `Fragment`; cancelling it reaches the observer.

        Args:
            future: It gets the result; None makes one.

        Raises:
            ParameterError: start and options are more than an observer takes in one message.
        """
        try:
            self._packed(_NOBODY, 0, content, Receiver())
        except ProtocolError as error:
            raise ParameterError("options", f"{len(content.options)} options and a start", error.detail) from None
        made = future or Future()

        def submit() -> None:
            job = self.jobs.submit(content, made, only)
            made.add_done_callback(lambda done: self.post(lambda: self.jobs.cancel(job)))
            self._give()

        self.post(submit)
        if self._is_leaving:  # perhaps nobody looks at what is posted any more
            settle(made, error=Closed("this agent"))
        return made

    def passed_over(self, results: int) -> None:
        """So many results came in time, and were too old to be used: they are late, too."""
        if results:
            self.post(lambda: self.jobs.counts.update(late=results))

    def stats(self) -> JobStats:
        """All figures at this moment."""
        counts, now = self.jobs.counts, time.monotonic()
        heard = [worker.heard_at for _, worker in self._workers.items()]
        ends = {name: counts[name] for name in ("done", "failed", "cancelled", "lost", "expired", "late")}
        workers = sum(now - at < self.jobs.lease for at in heard)
        return JobStats(open=self.jobs.open, leased=self.jobs.leased, observers=workers, **ends)

    def starts_stats(self) -> tuple[StartsStats, ...]:
        """Of the states that episodes begin with, by origin."""
        return tuple(stats() for stats in self._origins)

    # ------------------------------------------------------------------------- from here on: inside of the thread

    def hello(self, client: bytes, name: str) -> None:
        """A client says what people call it; "" says nothing."""
        worker = self._worker(client)
        worker.name = name or worker.name

    def check(self, client: bytes, number: int, now: float) -> None:
        """Rows came for a job: it goes on. Raises ProtocolError (code "cancelled") if it should not."""
        if not self.jobs.renew(client, number, now):
            raise ProtocolError("cancelled", f"job {number} is not wanted of this client any more")

    def work(self, envelope: list[Buffer], header: MessageHeader, body: messages.Work, descriptor: int) -> None:
        """A client asks for a job, or is still at one."""
        now = time.monotonic()
        worker = self._worker(header.client)
        worker.descriptor, worker.heard_at = descriptor, now
        if (kept := worker.answers.get(header.sequence)) is not None:
            self.send([*envelope, *kept])
        elif body.job:
            goes_on = self.jobs.renew(header.client, body.job, now)
            told = messages.Job(cancelled=not goes_on, leaving=self._is_leaving)
            self.send([*envelope, *reply(header, told)])
        else:
            worker.waits, worker.until = (envelope, header), now + body.patience
            self._waiting[header.client] = worker
            self._offer(header.client, worker, now)

    def result(self, envelope: list[Buffer], message: Message, body: messages.Result) -> None:
        """A client brings what became of a job."""
        header, now = message.header, time.monotonic()
        worker = self._worker(header.client)
        kept = worker.answers.get(header.sequence)
        if kept is None:
            if header.fingerprint != self.entries.fingerprint:
                raise ProtocolError("schema", f"entries of another schema; this agent takes {self.entries!r}"[:1000])
            with self.room.taken(rollout_fragments.unpacked_size(body.fragments, message.payload)):
                # The frames are ZeroMQ's: what is kept has to be a copy.
                payload = None if message.payload is None else bytes(message.payload)
                facts: dict[str, Any] = {"now": now, "limits": self.limits}
                fragments = rollout_fragments.unpacked(body.fragments, payload, self.entries, **facts)
            found = [dataclasses.replace(each, client=header.client, number=body.job) for each in fragments]
            failed = body.text if body.status == "failed" else None
            counts = self.jobs.finish(header.client, body.job, found, failed)
            kept = reply(header, messages.Taken(samples=int(counts), lost=int(not counts)))
            self._keep(worker, header.sequence, kept)
        self.send([*envelope, *kept])

    def left(self, descriptor: int) -> None:
        """A connection has ended."""
        now = time.monotonic()
        for client, worker in self._workers.items():
            if worker.descriptor == descriptor:
                worker.descriptor = -1
                self._waiting.pop(client, None)
                self.jobs.left(client, now)

    def next_time(self) -> float:
        """When `turn` has something to do."""
        return min(self.jobs.next_time(), *(worker.until for worker in self._waiting.values()), float("inf"))

    def turn(self) -> None:
        """End leases whose time has passed, and answer those who have waited long enough."""
        now = time.monotonic()
        if now >= self.jobs.next_time():
            self.jobs.expire(now)
            self._give()
        for client, worker in list(self._waiting.items()):
            if now >= worker.until:
                self._no_job(client, worker)

    def close(self) -> None:
        """Tell everybody who waits that there is nothing more."""
        self._is_leaving = True
        for client, worker in list(self._waiting.items()):
            self._no_job(client, worker)
        self.jobs.close()

    def _worker(self, client: bytes) -> _Worker:
        """What is known of a client. Raises ProtocolError (code "busy"): as many others as may be have not gone."""
        worker = self._workers.get(client) or _Worker()
        self._workers.put(client, worker, time.monotonic())
        return worker

    def _give(self) -> None:
        """Give open jobs to those who wait, whoever began to first."""
        now = time.monotonic()
        for client, worker in list(self._waiting.items()) if self.jobs.open else ():
            self._offer(client, worker, now)

    def _offer(self, client: bytes, worker: _Worker, now: float) -> None:
        job = None if self._is_leaving else self.jobs.take(client, now, worker.name)
        if job is not None:
            self._hand_over(client, worker, job)
        elif now >= worker.until or self._is_leaving:
            self._no_job(client, worker)

    def _hand_over(self, client: bytes, worker: _Worker, job: LeasedJob) -> None:
        del self._waiting[client]
        envelope, header = worker.waits
        try:
            frames = self._packed(header, job.number, job.content, self.receivers.of(client))
        except ProtocolError as error:
            self.jobs.give_back(job)
            frames = reply(header, messages.Refused(code=error.code, text=error.detail))
        else:
            self._keep(worker, header.sequence, frames)
        self.send([*envelope, *frames])

    def _packed(self, header: MessageHeader, number: int, content: JobContent, receiver: Receiver) -> list[Buffer]:
        """Frames that give a job. Raises ProtocolError (code "too_large"): its receiver does not take them."""
        body = messages.Job(number=number, lease=self.jobs.lease, options=dict(content.options))
        facts: dict[str, Any] = {"fingerprint": 0}
        if self.starts is not None and content.start is not None:
            facts = {"fingerprint": self.starts.fingerprint, "payload": content.start}
        frames = reply(header, body, **facts)
        receiver.check(header.client, body, frames)
        return frames

    def _no_job(self, client: bytes, worker: _Worker) -> None:
        del self._waiting[client]
        envelope, header = worker.waits
        self.send([*envelope, *reply(header, messages.Job(leaving=self._is_leaving))])

    def _keep(self, worker: _Worker, sequence: int, frames: list[Buffer]) -> None:
        worker.answers[sequence] = frames
        while len(worker.answers) > KEPT_ANSWERS:
            worker.answers.popitem(last=False)
