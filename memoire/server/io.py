"""All that a server does outside of its callers' threads: how it begins, and in which order it ends.

Requests      one thread: answers, notices, log file      Intake        one thread for each address
Archive       a timer's thread, and one for each order    PlainProxies  in their callers' threads
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from memoire.accounting.runs import StateStore
from memoire.net import link, sockets
from memoire.net import process as descriptors
from memoire.net.addresses import beside
from memoire.net.admission import Admission
from memoire.net.context import ConnectionWatcher, Context
from memoire.net.curve_server import Gate
from memoire.net.poller import SendQueues
from memoire.net.thread import END_TIMEOUT, Worker
from memoire.security.keys import Keys
from memoire.wire import messages

from . import build
from .build import ServerOptions
from .dispatch import Dispatcher
from .durability import Announcements
from .io_addresses import BoundAddresses, IntakeThreads, WorkerProxies
from .io_requests import Announcer, LineFile, RequestThread
from .io_snapshots import Archive, Restorer

_log = logging.getLogger(__name__)

LINGER_TIMEOUT = 2.0
"""Seconds for which closed sockets go on sending replies at most."""
MIN_LINGER = 0.2
LAST_REPLY_DELAY = 0.3
"""Seconds between the last replies of a server that saves or is finished and its end: a client's socket forgets what
its thread has not read when the connection ends.
"""
MIN_SAVING = 0.1
"""Seconds that a state folder has to save what is left, also if there is no time."""
MEMORY_SHARE = 0.75
"""Of the time that is left, for saving what the tables hold; the rest is for the state folder."""


class ServerThreads:
    """The threads of a server, with their sockets. Methods may be called from any thread.

    Args:
        addresses: The server's addresses; none is bound yet.
        lines: The file for log lines; closed with the server.
        is_closing: Set when the server begins to close.
        owner: Kept alive as long as the threads run.
    """

    def __init__(
        self,
        options: ServerOptions,
        dispatcher: Dispatcher,
        store: StateStore | None,
        *,
        gate: Gate,
        addresses: BoundAddresses,
        announcements: Announcements,
        lines: LineFile,
        is_closing: threading.Event,
        owner: object,
    ) -> None:
        self.name, self.dispatcher, self.store, self.gate = dispatcher.name, dispatcher, store, gate
        self.addresses, self.lines = addresses, lines
        self._options, self._limits, self._is_closing = options, options.limits, is_closing
        self._context: Context = options.process.context
        state = options.state
        self._saves_memory = state is not None and state.saves_memory
        admission = Admission(gate, options.limits, count=dispatcher.refuse, own=dispatcher.own)
        self._announcer = Announcer(dispatcher, announcements, options.limits, gate.admits)
        self.requests = RequestThread(dispatcher, admission, store, self._announcer, lines, owner)
        announcements.wake = self.requests.worker.wake
        facts: dict[str, Any] = {"context": options.process.context, "limits": options.limits, "is_closing": is_closing}
        self.intake = IntakeThreads(dispatcher, admission, addresses, keys=gate.keys, **facts)
        self.proxies = WorkerProxies(gate, admission, addresses, dispatcher.replies, **facts)
        self.archive = Archive(
            dispatcher,
            store=store,
            every=None if state is None else state.snapshot_every,
            is_closing=is_closing,
            clock=options.process.clock,
        )
        self.restorer = Restorer(
            dispatcher,
            store,
            limits=options.limits,
            is_timed=state is not None and state.snapshot_every is not None,
            keeps_generators=options.seed is not None,
            clock=options.process.clock,
        )
        dispatcher.answer_with(messages.TakeSnapshot, self.archive.order)

    # Its begin

    def open(self) -> None:
        """Bind the addresses. What was bound before one that fails stays open until `close`."""
        at = self._options.endpoint
        endpoint, push, pub = at.request, at.push, at.publish
        if endpoint is not None:
            near = beside(endpoint)
            push, pub = push or near[0], pub or near[1]
        # First the address that errors should name.
        requested = "" if endpoint is None else self.add_request_worker(endpoint, True)
        pushed = "" if push is None else self.intake.add(push, True)
        published = "" if pub is None else self._open_pub(pub)
        self.addresses.endpoints = messages.Endpoints(request=requested, push=pushed, publish=published)
        self.addresses.warn_open()
        if endpoint is not None and (trouble := descriptors.too_few(self._limits.tuning.expected_clients)):
            _log.warning("server %s: %s", self.name, trouble)

    def _open_pub(self, endpoint: str) -> str:
        made = sockets.publisher(self._context)
        bound, way = self.addresses.bind(made, endpoint)
        self._announcer.open(self.requests.worker.doors.add(made, way=way))
        return bound

    def add_request_worker(self, endpoint: str, bind: bool) -> str:
        """Answer requests at one more address; see `Server.add_request_worker`."""
        made = sockets.request_server(self._context, self._limits.tuning.request_bytes)
        way: ConnectionWatcher | None
        if bind:
            bound, way = self.addresses.bind(made, endpoint)
        else:
            doors = self.requests.worker.doors
            bound, way = endpoint, link.dial(doors, made, endpoint, follow=False, keys=self.gate.keys)
        self.requests.add(made, way)
        return bound

    def load(self) -> None:
        """Hold again what the former life held. Raises SnapshotMismatch or DataError; then nothing is saved."""
        if self.store is None:
            return
        saves, self._saves_memory = self._saves_memory, False  # a file that is refused stays
        state = self._options.state
        self.archive.is_kept = self.restorer.load(state is not None and state.discard_mismatched)
        self._saves_memory = saves

    def start(self) -> None:
        """Begin to answer and to save."""
        self.requests.worker.start()
        self.archive.start()
        self.requests.saving.start()
        self.restorer.wait_noted()

    # What is seen of it

    @property
    def lost(self) -> Exception | None:
        """Why nothing can be saved any more; None while all is well."""
        return self.requests.saving.lost

    @property
    def lanes(self) -> Iterator[SendQueues]:
        """Replies that wait for room, by thread."""
        yield self.requests.lanes
        yield from self.proxies.lanes

    def _workers(self) -> list[Worker]:
        return [self.requests.worker, *self.intake.workers]

    def trouble(self) -> list[str]:
        """What is wrong with threads and disk that only a restart can mend, a sentence each."""
        stuck = [trouble for worker in self._workers() for trouble in worker.trouble()]
        return stuck if self.lost is None else [f"state: {self.lost}", *stuck]

    def unready(self) -> list[str]:
        """Why no new clients should come just now, a sentence each; see `Server.readiness`."""
        if self._is_closing.is_set():
            return ["closing: this server is about to end"]
        if self.store is not None and not self.store.is_healthy:
            return [f"state: {self.store.trouble}"]
        if self.dispatcher.leaving:
            return ["leaving: this server is being drained; others count its clients from now on"]
        trouble = [descriptors.shared_guard().trouble(), self.dispatcher.trouble()]
        return [*self.gate.trouble(), *filter(None, trouble)]

    def figures(self) -> dict[str, Any]:
        """Its part of `ServerStats`."""
        return {
            "restored": 0 if self.store is None else self.store.restored,
            "missing": (*(() if self.store is None else self.store.missing), *self.restorer.missing),
            "dropped_replies": sum(lanes.dropped for lanes in self.lanes),
            "requests": self.requests.timings.now(),
            "snapshots": self.archive.taken,
            "snapshot_trouble": self.archive.trouble,
            "folder": None if self.store is None else self.store.space(),
            "descriptors": descriptors.used(),
            "most_descriptors": descriptors.limit(),
            "security": self.gate.security(),
            "faults": sum(worker.errors for worker in self._workers()),
        }

    # Its end

    def begin_close(self) -> None:
        """Have waiting calls raise `Closed`, at once unless what the tables hold has to be saved first."""
        self._is_closing.set()
        if not self._saves_memory:
            self._close_pools()

    def close(self, deadline: float) -> None:
        """End everything: what comes in first, then what is saved, then what answers. By one caller at a time."""
        self._stop(self.intake.workers, deadline)
        self.requests.tell_finished(deadline - LAST_REPLY_DELAY)
        if self.store is not None:
            self.requests.drain(deadline)
            self._save_memory(deadline)
            self.requests.saving.close(max(MIN_SAVING, deadline - time.monotonic()))
        if self.store is not None or self.dispatcher.finished:
            time.sleep(max(0.0, min(LAST_REPLY_DELAY, deadline - time.monotonic())))
        self._stop([self.requests.worker], deadline)
        self.proxies.wait_ended(deadline)
        self.lines.close()
        self.gate.close()
        self.addresses.wait_unbound(deadline)

    def _save_memory(self, deadline: float) -> None:
        if self._saves_memory:
            left = max(0.0, deadline - time.monotonic())
            self.archive.save(deadline - (1.0 - MEMORY_SHARE) * left)
            self._close_pools()
            self._saves_memory = False  # closed again, it would write over what a later life has saved

    def _close_pools(self) -> None:
        for table in self.dispatcher.tables:
            table.pool.close()

    def _stop(self, workers: Sequence[Worker], deadline: float) -> None:
        for worker in workers:
            left = deadline - time.monotonic()
            # A moment also where there is no time: a thread that waits for a cache notices the end only then.
            if not worker.stop(max(END_TIMEOUT, left), linger=max(MIN_LINGER, min(LINGER_TIMEOUT, left))):
                _log.warning("%s: a thread did not end in time", self.name)


def make_threads(options: ServerOptions, is_closing: threading.Event, owner: object) -> ServerThreads:
    """A server's threads and what they serve; nothing is bound, and none has begun.

    Raises:
        KeyFileError, ParameterError, StateError: an option cannot be had.
    """
    gate = Gate(options.process.context, Keys.of(options.keys, "server"))
    tables = build.make_tables(options)
    name = options.name or default_name(options.endpoint.request)
    store = build.make_store(options, name)
    name = name if store is None else store.name
    addresses, announcements, lines = BoundAddresses(name, gate), Announcements(), LineFile()
    dispatcher = build.make_dispatcher(
        options,
        tables,
        store,
        announcements,
        name=name,
        epoch=time.time_ns(),  # whatever clock is given: no two lives have the same number
        endpoints=lambda: addresses.endpoints,
        on_lines=lines.write,
    )
    return ServerThreads(
        options,
        dispatcher,
        store,
        gate=gate,
        addresses=addresses,
        announcements=announcements,
        lines=lines,
        is_closing=is_closing,
        owner=owner,
    )


def default_name(endpoint: str | None) -> str:
    """What a server is called that was given no name: its host, and its port or what else tells it from others."""
    port = (endpoint or "").rpartition(":")[2]
    if endpoint and endpoint.startswith("tcp://") and port.isdigit() and port != "0":
        return f"{socket.gethostname()}:{port}"
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
