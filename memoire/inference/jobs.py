"""Jobs that one side gives and others do: each is leased, given again if it must be, and done once. Pure: time is
passed in.

    submit ──▶ open ──take──▶ leased ──finish──▶ done, or failed
                ▲                │  renew: whoever has it is heard of, and has it for another `lease`
                └───attempts─────┤  the lease has ended: somebody else may take it, or nobody: ObserverLost
                                 └─cancel──▶ gone; its worker learns so when it says something next

The first result counts, also of a worker whose lease has ended meanwhile: what is done need not be done again. A later
one is counted as late, and is nobody's.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from memoire._core import Held
from memoire.errors import Closed, JobFailed, MemoireError, ObserverLost, ProtocolError

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
        attempts: Leases of a job, unless `submit` says otherwise: 1 ends it with its first one.
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
        """Jobs that nobody has."""
        return len(self._open)

    @property
    def leased(self) -> int:
        """Jobs that somebody has."""
        return len(self._jobs) - len(self._open)

    # The giver

    def submit(
        self, content: Any, future: Future[Any] | None = None, only: str = "", attempts: int | None = None
    ) -> LeasedJob:
        """Have somebody do this."""
        future = Future() if future is None else future
        job = LeasedJob(next(self._numbers), content, future, only, self.attempts if attempts is None else attempts)
        self._jobs[job.number] = self._open[job.number] = job
        return job

    def cancel(self, job: LeasedJob) -> None:
        """A job is not wanted any more; whoever has it learns so when it is heard of next."""
        if job.number in self._jobs:
            self._end(job, "cancelled")
            job.future.cancel()

    def close(self, closed: MemoireError | None = None) -> None:
        """Nobody gives or takes any more: every future that waits gets this error."""
        for job in list(self._jobs.values()):
            self._end(job, "cancelled")
            settle(job.future, error=closed or Closed("whoever gave this job"))

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
