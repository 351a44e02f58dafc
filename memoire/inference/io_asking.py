"""Askers of inference nodes or agents, each with one thread of its own; closed alike, and checked alike after a fork.

Node choice: the inference node of a client by rendezvous hash; the next one while that is away. Pure.

order of client 7:  b ▶ c ▶ a        b is down: c is asked; b answers again: b is asked

Lent worker: a worker whose turns waiting callers take, too.

Without lending, a caller would wake the worker's thread for its request, and the thread would wake the caller for the
answer. Two wake-ups cost more than most turns do.

    thread   turn turn │ stands aside ..................... │ turn turn
    caller             │ turn turn │ (RETURN_INTERVAL) ...  │

A ZeroMQ socket may move from one thread to another if a lock moves with it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from memoire import _core
from memoire.arguments import seconds
from memoire.errors import EndpointError, MemoireError
from memoire.limits import Limits
from memoire.net import addresses
from memoire.net.channel import Channel, open_channels
from memoire.net.sockets import Context
from memoire.net.thread import END_TIMEOUT, Node, Worker, close_at_exit
from memoire.wire import messages
from memoire.wire.frames import Answer

PROBE_INTERVAL = 0.5
"""Seconds between two probes of a silent node."""


def rendezvous(client: bytes, urls: Sequence[str]) -> list[str]:
    """Return the addresses in the order for a client. Over many clients, each address is equally often the first."""

    def weight(url: str) -> bytes:
        return hashlib.blake2b(url.encode(), key=client, digest_size=8).digest()

    return sorted(dict.fromkeys(urls), key=weight)


class NodeChoice:
    """Order of the nodes of one client, and nodes that were silent."""

    def __init__(self, client: bytes, urls: Sequence[str]) -> None:
        self.order = rendezvous(client, urls)
        self.moves = 0
        """Number of requests that moved to another node."""
        self._probe_at: dict[str, float] = {}  # time of the next probe, by silent node

    def pick(self, is_down: Callable[[str], bool]) -> str:
        """Return the node to ask now: the first that is neither down nor silent, or else the first of all."""
        for url in self.order:
            if url not in self._probe_at and not is_down(url):
                return url
        return self.order[0]

    @property
    def first_if_none_silent(self) -> str:
        """First node, if no node was silent; else ""."""
        return "" if self._probe_at else self.order[0]

    def record_silence(self, url: str, now: float) -> None:
        """Record that a node did not answer in time."""
        self._probe_at.setdefault(url, now)

    def receive_answer(self, url: str) -> None:
        """Record that a node has answered, so that it is asked again."""
        self._probe_at.pop(url, None)

    def next_time(self) -> float:
        """Return the time of the next probe."""
        return min(self._probe_at.values(), default=float("inf"))

    def due_probes(self, now: float) -> list[str]:
        """Return the silent nodes that get a HELLO now."""
        due = [url for url, at in self._probe_at.items() if at <= now]
        for url in due:
            self._probe_at[url] = now + PROBE_INTERVAL
        return due


RETURN_INTERVAL = 0.05
"""Seconds after a caller's newest turn until the thread takes turns again: most callers return before."""
TURN_INTERVAL = 0.1
"""Seconds after the newest turn for which callers may wait for their answer without a turn."""
LOOK_INTERVAL = 0.01
"""Maximum seconds that a caller waits for its answer before it takes turns: most answers have come by then."""


def _never(deadline: float) -> bool:
    return False


class LentWorker(Worker):
    """Worker that lends its turns to waiting callers. The worker's functions never run at the same time.

    Args:
        soon: Waits a moment, at most until the given deadline, for the usual event, and processes it; returns True
            if it should be called again. Costs less than a turn, which does everything else.
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
        self._taking = threading.Lock()  # held by the thread that takes a turn
        self._lent_at = float("-inf")  # time of the newest turn of a caller
        self._turn_needed = _core.Condition()  # notified if a turn is needed
        self._is_needed = False  # the thread has work that no caller waits for
        self._lending = threading.Lock()  # held by the caller that takes turns while it waits
        self._turned_over = _core.Condition()  # notified after turns, if callers wait for turns of other threads
        self._waiting = 0  # waiting callers, including the one that takes turns

    # Calls from any thread except the worker's

    def wake(self) -> None:
        """Request a turn now, of the thread or of a caller."""
        super().wake()
        self._need()

    def _need(self) -> None:
        with self._turn_needed.held():
            self._is_needed = True
            self._turn_needed.notify_all()

    @property
    def _other_waiters(self) -> int:
        return self._waiting - self._lending.locked()

    def run(self, function: Callable[..., None], *args: object) -> None:
        """Call a function now if no turn runs at this moment; else post it to the thread."""
        with self._turn_lock() as is_mine:
            if is_mine and not self._stopping:
                function(*args)
        if not is_mine:
            self.post(lambda: function(*args))

    @contextmanager
    def _turn_lock(self, seconds: float = 0.0) -> Iterator[bool]:
        """Acquire the right to take a turn within `seconds`; yield True if acquired."""
        with _core.Held.within(self._taking, seconds) as is_mine:
            try:
                yield is_mine
            finally:
                if is_mine:
                    self._lent_at = time.monotonic()

    def run_and_look(
        self, function: Callable[[Any], None], argument: Any, is_done: Callable[[], bool], deadline: float
    ) -> None:
        """Call `run`, and wait a moment for the result before other callers take turns. For callers that go on with
        `wait_for`, which usually finds the result.
        """
        with self._turn_lock() as is_mine:
            if is_mine and not self._stopping:
                function(argument)
                self._wait_briefly(lambda: is_done() or self._waiting > 0, deadline)
        if not is_mine:
            self.post(lambda: function(argument))

    def run_alone(self, function: Callable[..., Any], *args: object) -> Any:
        """Call a function that waits at most a moment, and return its result. None, without a call, if another thread
        takes a turn or waits for one, or if a turn is due.
        """
        if self.poller.posted or self._waiting or time.monotonic() >= self._turned + TURN_INTERVAL:
            return None
        with self._turn_lock() as is_mine:
            return function(*args) if is_mine and not self._stopping else None

    def wait_for(self, is_done: Callable[[], bool], deadline: float) -> bool:
        """Wait until turns make `is_done` true; return False if `deadline`, by time.monotonic(), passes first.

        The caller's thread takes the turns; if several callers wait, the worker's thread does. KeyboardInterrupt may
        interrupt a turn: its messages are sent or received again later.
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
            self.poller.waker.wake()
        with self._turn_lock(max(0.0, deadline - time.monotonic())) as is_mine:
            if is_mine:
                self._wait_briefly(is_done, deadline)
            while is_mine and not (is_done() or self._stopping):
                super()._step(deadline)
                if self._other_waiters:
                    self._notify()
                if time.monotonic() >= deadline:
                    break
        if self._stopping:  # the thread ends open requests
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _wait_briefly(self, is_done: Callable[[], bool], deadline: float) -> None:
        """Wait a moment for the usual event, unless a turn is due for other events."""
        try:
            last = min(self._turned + TURN_INTERVAL, time.monotonic() + LOOK_INTERVAL)
            while not (is_done() or self.poller.posted) and time.monotonic() < last:
                if not self._soon(deadline):
                    break
        except Exception:
            self._failed()
        if self._other_waiters:
            self._notify()

    def _notify(self) -> None:
        with self._turned_over.held():
            self._turned_over.notify_all()

    # Turns of the thread

    def _step(self, until: float = float("inf")) -> None:
        while self._lending.locked() or time.monotonic() - self._lent_at < RETURN_INTERVAL:
            with self._turn_needed.held():
                if self._other_waiters or self._turn_needed.wait_for(lambda: self._is_needed, RETURN_INTERVAL):
                    break
        with self._turn_needed.held():
            self._is_needed = False
        with self._taking:
            if not self._stopping:
                super()._step(until)
        if self._other_waiters:
            self._notify()

    def _finish(self) -> None:
        with self._taking:
            super()._finish()
        self._notify()


class AskingThread:
    """Thread that asks one of several nodes: it has a channel to each node, and probes silent nodes.

    Args:
        name: Name of the thread.
        soon: As in `LentWorker`.
        facts: Further arguments of `open_channels`.

    Raises:
        EndpointError: an address is malformed.
        KeyFileError: the keys cannot be used.
    """

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        *,
        client: bytes,
        context: Context,
        soon: Callable[[float], bool] = _never,
        **facts: Any,
    ) -> None:
        self.choice = NodeChoice(client, urls)
        self.worker = LentWorker(name, self._turn, self._next_time, self._at_end, soon)
        self._channels: dict[str, Channel] = {}
        open_channels(self._channels, self.choice.order, self.worker, context, client=client, **facts)

    def _is_down(self, url: str) -> bool:
        return self._channels[url].link.is_down

    # Calls in the thread

    def _next_time(self) -> float:
        return min(self.choice.next_time(), *(channel.next_time() for channel in self._channels.values()))

    def _turn(self, ready: dict[object, int]) -> None:
        for channel in self._channels.values():
            channel.tick(ready)
        now = time.monotonic()
        for url in self.choice.due_probes(now):
            self._channels[url].ask(messages.Hello(role="actor"), self._probed(url), now + PROBE_INTERVAL)

    def _probed(self, url: str) -> Callable[[Answer], None]:
        def record_answer(answer: Answer) -> None:
            if not isinstance(answer, MemoireError):
                self.choice.receive_answer(url)

        return record_answer

    def _at_end(self) -> None:
        raise NotImplementedError


class Asker(Node):
    """Node that asks other nodes, one of several addresses at a time."""

    CLOSED_AT_EXIT = 0

    def __init__(self, limits: Limits | None) -> None:
        self._limits, self._client = limits or Limits(), secrets.token_bytes(16)
        self._pid = os.getpid()
        self._closing, self._close_lock = threading.Event(), threading.Lock()

    @property
    def _asking(self) -> AskingThread:
        raise NotImplementedError

    def _start(self) -> None:
        self._asking.worker.start()
        close_at_exit(self)

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses, in the order in which they are asked."""
        return tuple(self._asking.choice.order)

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._closing.is_set()

    def close(self, timeout: float | None = None) -> None:
        """End the thread within `timeout` seconds; open requests raise Closed or are dropped. May be called again."""
        patience = seconds(timeout, self._limits.close_timeout)
        self._closing.set()
        with self._closer(time.monotonic() + patience) as is_mine:
            if is_mine:
                self._asking.worker.stop(max(END_TIMEOUT, patience))


def checked_urls(urls: str | Sequence[str]) -> list[str]:
    """Return a list of addresses to connect to, from one or several. Raises EndpointError if none or malformed."""
    endpoints = [urls] if isinstance(urls, str) else list(urls)
    if not endpoints:
        raise EndpointError("[]", "connect to", "a policy needs the address of an inference node", "tcp://host:5570")
    for url in endpoints:
        addresses.check(url, "connect to")
    return endpoints
