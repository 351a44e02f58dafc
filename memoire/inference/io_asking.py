"""What asks inference nodes or agents by one thread of its own: closed alike, and found alike after a fork.

Which inference node a client asks: its own by rendezvous hash, the next one while that is away. Pure.

order of client 7:  b ▶ c ▶ a        b is down: c is asked; b answers again: b is asked

The thread of an observer: requests to one of several agents, and word that a job goes on while it is done.

observer ──WORK, INFER, RESULT──▶ its agent by rendezvous hash    down or silent: the next one, until it returns

A worker whose turns are also taken by callers that wait for what they bring.

Otherwise a caller would wake the thread for its request, and be woken by it for the answer, which costs more than most
turns do.

    thread   turn turn │ stands aside ..................... │ turn turn
    caller             │ turn turn │ (RETURN_INTERVAL) ...  │

A ZeroMQ socket may go from one thread to another if they pass a lock on with it.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from memoire import _core
from memoire.arguments import seconds
from memoire.errors import Closed, EndpointError, MemoireError, MemoireTimeout
from memoire.limits import Limits
from memoire.net import addresses
from memoire.net.channel import Channel, open_channels
from memoire.net.context import Context
from memoire.net.thread import END_TIMEOUT, Node, Worker, close_at_exit
from memoire.security.keys import Keys
from memoire.wire import messages
from memoire.wire.frames import Answer

PROBE_INTERVAL = 0.5
"""Seconds between two looks whether a silent node answers again."""


def rendezvous(client: bytes, urls: Sequence[str]) -> list[str]:
    """Addresses in the order in which this client asks them: of many clients, each address is first for as many."""

    def weight(url: str) -> bytes:
        return hashlib.blake2b(url.encode(), key=client, digest_size=8).digest()

    return sorted(dict.fromkeys(urls), key=weight)


class NodeChoice:
    """The nodes of one client, and which of them were silent when they were asked."""

    def __init__(self, client: bytes, urls: Sequence[str]) -> None:
        self.order = rendezvous(client, urls)
        self.moves = 0
        """How often a request went on to another node."""
        self._probe_at: dict[str, float] = {}  # silent nodes, and when to look again

    def pick(self, is_down: Callable[[str], bool]) -> str:
        """The node to ask now: the first that is neither down nor silent; the first of all where none is."""
        for url in self.order:
            if url not in self._probe_at and not is_down(url):
                return url
        return self.order[0]

    @property
    def undisturbed(self) -> str:
        """The first node of all, while none was silent; "" otherwise."""
        return "" if self._probe_at else self.order[0]

    def silent(self, url: str, now: float) -> None:
        """A node did not answer in time."""
        self._probe_at.setdefault(url, now)

    def answered(self, url: str) -> None:
        """A node has answered: it is asked again."""
        self._probe_at.pop(url, None)

    def next_time(self) -> float:
        """When `probes` has something to do."""
        return min(self._probe_at.values(), default=float("inf"))

    def probes(self, now: float) -> list[str]:
        """Silent nodes to say HELLO to now."""
        due = [url for url, at in self._probe_at.items() if at <= now]
        for url in due:
            self._probe_at[url] = now + PROBE_INTERVAL
        return due


RETURN_INTERVAL = 0.05
"""Seconds after a caller's newest turn until the thread takes turns again: most callers are back before."""
TURN_INTERVAL = 0.1
"""Seconds after the newest turn for which callers may only look whether their answer is there."""
LOOK_INTERVAL = 0.01
"""Seconds for which one does so before it takes turns: most answers are there by then."""


def _never(deadline: float) -> bool:
    return False


class LentWorker(Worker):
    """A worker that lends its turns. Its functions never run at the same time.

    Args:
        soon: Waits for what callers mostly wait for, a moment and not beyond the deadline that it gets, and takes it
            in; returns whether to call it again. It costs less than a turn, which does everything else.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[dict[object, int]], None],
        next_time: Callable[[], float],
        at_end: Callable[[], None],
        soon: Callable[[float], bool] = _never,
    ) -> None:
        super().__init__(name, turn, next_time, at_end)
        self._soon = soon
        self._taking = threading.Lock()  # held by whoever takes a turn
        self._given_back = float("-inf")  # when a caller took the newest turn
        self._needs = _core.Condition()  # of the next one
        self._is_needed = False  # the thread has something to do that no caller waits for
        self._lending = threading.Lock()  # held by the caller that takes turns while it waits
        self._turned_over = _core.Condition()  # notified after turns, if callers wait for others'
        self._waiting = 0  # callers that wait, also those that take turns meanwhile

    # From any thread but the worker's

    def wake(self) -> None:
        """Have somebody take a turn now."""
        super().wake()
        self._need()

    def _need(self) -> None:
        with self._needs.held():
            self._is_needed = True
            self._needs.notify_all()

    @property
    def _others(self) -> int:
        """Callers that wait for others' turns."""
        return self._waiting - self._lending.locked()

    def run(self, function: Callable[..., None], *given: object) -> None:
        """Call this now, if nobody takes a turn at this moment; as `post` does, otherwise."""
        with self._mine() as is_mine:
            if is_mine and not self._stopping:
                function(*given)
        if not is_mine:
            self.post(lambda: function(*given))

    @contextmanager
    def _mine(self, seconds: float = 0.0) -> Iterator[bool]:
        """Be the one that takes a turn, if nobody else does, or not any more within these seconds."""
        with _core.Held.within(self._taking, seconds) as is_mine:
            try:
                yield is_mine
            finally:
                if is_mine:
                    self._given_back = time.monotonic()

    def run_and_look(
        self, function: Callable[[Any], None], given: Any, is_done: Callable[[], bool], deadline: float
    ) -> None:
        """As `run`, and wait a moment for what this brings about, before anybody else takes turns: for a caller that
        goes on with `wait_for`, to which mostly nothing is left.
        """
        with self._mine() as is_mine:
            if is_mine and not self._stopping:
                function(given)
                self._look(lambda: is_done() or self._waiting > 0, deadline)
        if not is_mine:
            self.post(lambda: function(given))

    def run_alone(self, function: Callable[..., Any], *given: object) -> Any:
        """Call this, which waits a moment at most, and return what it returns. None, without a call, if anybody else
        takes a turn or waits for one, or if a turn is due.
        """
        if self._posted or self._waiting or time.monotonic() >= self._turned + TURN_INTERVAL:
            return None
        with self._mine() as is_mine:
            return function(*given) if is_mine and not self._stopping else None

    def wait_for(self, is_done: Callable[[], bool], deadline: float) -> bool:
        """Wait until turns have brought something about; False if they have not at `deadline`, by time.monotonic().

        The caller's thread takes the turns. If several wait, then the worker's thread does. KeyboardInterrupt may end a
        turn half way: what it would have sent or received is sent again then.
        """
        if is_done():
            return True
        _core.while_more(self, "_waiting", self._wait, is_done, deadline)
        return is_done()

    def _wait(self, is_done: Callable[[], bool], deadline: float) -> None:
        with _core.Held.within(self._lending, 0.0) as is_lent:
            if is_lent and self._waiting == 1:
                self._take_turns(is_done, deadline)
                return
        self._need()
        with self._turned_over.held():
            self._turned_over.wait_for(is_done, max(0.0, deadline - time.monotonic()))

    def _take_turns(self, is_done: Callable[[], bool], deadline: float) -> None:
        if self._taking.locked():
            self.doors.waker.wake()
        with self._mine(max(0.0, deadline - time.monotonic())) as is_mine:
            if is_mine:
                self._look(is_done, deadline)
            while is_mine and not (is_done() or self._stopping):
                super()._step(deadline)
                if self._others:
                    self._tell()
                if time.monotonic() >= deadline:
                    break
        if self._stopping:  # the thread ends what is open
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _look(self, is_done: Callable[[], bool], deadline: float) -> None:
        """Wait a moment for what most callers wait for, unless a turn is due that does the rest."""
        try:
            last = min(self._turned + TURN_INTERVAL, time.monotonic() + LOOK_INTERVAL)
            while not (is_done() or self._posted) and time.monotonic() < last:
                if not self._soon(deadline):
                    break
        except Exception:
            self._failed()
        if self._others:
            self._tell()

    def _tell(self) -> None:
        with self._turned_over.held():
            self._turned_over.notify_all()

    # The thread's own turns

    def _step(self, until: float = float("inf")) -> None:
        while self._lending.locked() or time.monotonic() - self._given_back < RETURN_INTERVAL:
            with self._needs.held():
                if self._others or self._needs.wait_for(lambda: self._is_needed, RETURN_INTERVAL):
                    break
        with self._needs.held():
            self._is_needed = False
        with self._taking:
            if not self._stopping:
                super()._step(until)
        if self._others:
            self._tell()

    def _finish(self) -> None:
        with self._taking:
            super()._finish()
        self._tell()


class _Thread(Protocol):
    worker: LentWorker
    choice: NodeChoice


class Asker(Node):
    """A node that asks others, one at a time of several addresses."""

    CLOSED_AT_EXIT = 0

    def __init__(self, limits: Limits | None) -> None:
        self._limits, self._client = limits or Limits(), secrets.token_bytes(16)
        self._pid = os.getpid()
        self._closing, self._close_lock = threading.Event(), threading.Lock()

    @property
    def _asking(self) -> _Thread:
        """The thread, which has the sockets."""
        raise NotImplementedError

    def _start(self) -> None:
        self._asking.worker.start()
        close_at_exit(self)

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses, in the order in which they are asked."""
        return tuple(self._asking.choice.order)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def close(self, timeout: float | None = None) -> None:
        """End the thread within `timeout` seconds: what is open raises Closed, or is given up. May be called again."""
        patience = seconds(timeout, self._limits.close_timeout)
        self._closing.set()
        with self._closer(time.monotonic() + patience) as is_mine:
            if is_mine:
                self._asking.worker.stop(max(END_TIMEOUT, patience))


def checked_urls(urls: str | Sequence[str]) -> list[str]:
    """Addresses to connect to, or one. Raises EndpointError: there is none, or one is malformed."""
    given = [urls] if isinstance(urls, str) else list(urls)
    if not given:
        raise EndpointError("[]", "connect to", "a policy needs the address of an inference node", "tcp://host:5570")
    for url in given:
        addresses.check(url, "connect to")
    return given


GRACE = 0.5
"""Seconds after a deadline in which the thread still says how a request has ended."""
RENEWALS = 3
"""Times that an agent hears of a job during one lease."""


@dataclass(eq=False)
class _Call:
    """One request until it is answered."""

    url: str
    number: int = 0
    is_watched: bool = False
    """Whether there was a connection when it was sent: the request ends with it."""
    answer: Answer | None = None


@dataclass(eq=False)
class HeldJob:
    """A job that an observer is at. `is_over` is set by the thread."""

    url: str
    number: int
    lease: float
    renew_at: float = 0.0
    is_over: bool = False
    """Whether its agent does not want it any more, or is gone."""


class ObserverThread:
    """Owns the channels.

    Raises:
        EndpointError: an address is malformed.
        KeyFileError: the keys cannot be used.
    """

    def __init__(
        self, urls: Sequence[str], *, client: bytes, limits: Limits, keys: Keys | None, context: Context
    ) -> None:
        self.choice = NodeChoice(client, urls)
        self.worker = LentWorker("memoire-observer", self._turn, self._next_time, self._at_end)
        self._open: set[_Call] = set()
        self._held: set[HeldJob] = set()
        self._channels: dict[str, Channel] = {}
        facts: dict[str, Any] = {"client": client, "limits": limits, "keys": keys}
        open_channels(self._channels, self.choice.order, self.worker, context, **facts)

    # From any thread

    def pick(self) -> str:
        """The agent to ask now."""
        return self.choice.pick(lambda url: self._channels[url].is_down)

    def silent(self, url: str) -> None:
        """An agent did not answer: ask others until it does."""
        self.worker.post(lambda: self.choice.silent(url, time.monotonic()))

    def connections(self, url: str) -> int:
        """How often a connection to this agent came about: after a new one it may be another process."""
        return self._channels[url].connections

    def denied(self, url: str) -> MemoireError | None:
        """Why this process is not let in there, once that has been so for a while."""
        return self._channels[url].denied_for_good

    def request(
        self, url: str, body: messages.Body, seconds: float, *, payload: Any = None, fingerprint: int = 0
    ) -> Answer:
        """Ask, and wait for the answer: these seconds at most, and no longer than the connection lasts.

        Returns:
            The reply, or `Refused`, `MemoireTimeout`, `Closed`.
        """
        call, began = _Call(url), time.monotonic()
        facts: dict[str, Any] = {"payload": payload}
        if isinstance(body, messages.Work):  # which is answered late
            facts["patience"] = body.patience

        def begin() -> None:
            channel = self._channels[url]
            channel.fingerprint, call.is_watched = fingerprint, not channel.is_down
            self._open.add(call)
            call.number = channel.ask(body, lambda answer: self._end(call, answer), began + seconds, **facts)

        self.worker.run(begin)
        self.worker.wait_for(lambda: call.answer is not None, began + seconds + GRACE)
        took = time.monotonic() - began
        return call.answer or MemoireTimeout("answer", url, took, self._channels[url].trouble(probe=False))

    def hold(self, job: HeldJob) -> None:
        """Tell its agent from time to time that this job goes on."""
        job.renew_at = time.monotonic() + job.lease / RENEWALS
        self.worker.post(lambda: self._held.add(job))

    def release(self, job: HeldJob) -> None:
        """A job is done, or given up."""
        self.worker.post(lambda: self._held.discard(job))

    # ------------------------------------------------------------------------- from here on: inside of the thread

    def _next_time(self) -> float:
        channels = (channel.next_time() for channel in self._channels.values())
        return min(self.choice.next_time(), *channels, *(job.renew_at for job in self._held))

    def _turn(self, ready: dict[object, int]) -> None:
        for channel in self._channels.values():
            channel.turn(ready)
        now = time.monotonic()
        for url in self.choice.probes(now):
            self._probe(url, now)
        down = {url for url, channel in self._channels.items() if channel.is_down}
        for call in [call for call in self._open if call.is_watched and call.url in down]:
            self._channels[call.url].drop(call.number)
            why = self._channels[call.url].trouble(probe=False)
            self._end(call, MemoireTimeout("answer", call.url, 0.0, why))
        for job in self._held:
            if job.url in down:  # nobody is told that it goes on: nothing is due for it any more
                job.is_over, job.renew_at = True, math.inf
            elif now >= job.renew_at:
                self._renew(job, now)

    def _renew(self, job: HeldJob, now: float) -> None:
        def heard(answer: Answer) -> None:
            if not isinstance(answer, MemoireError) and isinstance(answer.body, messages.Job):
                job.is_over = job.is_over or answer.body.cancelled

        job.renew_at = now + job.lease / RENEWALS
        self._channels[job.url].ask(messages.Work(patience=0.0, job=job.number), heard, now + job.lease)

    def _probe(self, url: str, now: float) -> None:
        def heard(answer: Answer) -> None:
            if not isinstance(answer, MemoireError):
                self.choice.answered(url)

        self._channels[url].ask(messages.Hello(role="actor"), heard, now + PROBE_INTERVAL)

    def _end(self, call: _Call, answer: Answer) -> None:
        self._open.discard(call)
        call.answer = answer

    def _at_end(self) -> None:
        for call in list(self._open):
            self._end(call, Closed("this observer"))
        for job in self._held:
            job.is_over = True
