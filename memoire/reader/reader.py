"""The reader: a learner's batches from any number of servers, drawn as if from all clients' memories at once.

    each server says   who its clients are, what they weigh, and how many samples it keeps for this reader
    the reader decides how many samples of which client (pool.plan: the rule that a server follows for itself)
    each server sends  those samples, and what it says now
    the reader weighs  them together and shuffles (pool.finish)

Requests are numbered and a server keeps its reply to the newest, so that one that was lost is sent again and eats no
samples. A server that does not answer is left out until it does, after a batch has waited `LEFT_OUT_AFTER` for it, or
at once when its connection ends:
`stats().away` names it, while a batch's `left_out` only knows the clients of servers that answered. Behind a proxy
every server is reached through the proxy, by the home in the header: that works where only the proxy has an address,
as behind a Kubernetes service. Addresses of several servers or proxies may be given; a server that two of them lead to
is asked once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from memoire import arguments
from memoire.accounting.merge import ClusterTotals, Rows, ServerAccounts, key_of, merge, totals_of
from memoire.arguments import mapping, seconds, table_name, text, whole
from memoire.errors import (
    AuthError,
    Closed,
    EndpointError,
    MemoireError,
    MemoireTimeout,
    NotEnoughSamples,
    ParameterError,
    ProtocolError,
    Refused,
    SchemaMismatch,
    WrongType,
)
from memoire.limits import Limits
from memoire.models.model import Model, check_topic, make
from memoire.net import sockets
from memoire.net.channel import Channel
from memoire.net.sockets import Context
from memoire.net.thread import ENDING, UNDO_TIMEOUT, Node, Worker, close_at_exit
from memoire.pool import caches
from memoire.pool.freshness import Freshness, Looks
from memoire.replay.batch import Batch, td_errors_for
from memoire.replay.limiter import check_batch
from memoire.replay.mixing import MixedBatch, Mixer, sizes_of
from memoire.replay.parameters import Parameters
from memoire.replay.prefetch import batches_until_over
from memoire.replay.sampling import Annealing
from memoire.replay.schema import Schema
from memoire.security.keyfolder import Given, Keys
from memoire.suggestions import checked_names
from memoire.version import SOFTWARE
from memoire.wire import container, messages

from .balance import Balance

_log = logging.getLogger(__name__)

LOOK = 2.0
"""Seconds between two HELLO messages to each address: which servers are there, which parameters hold."""
ASK_AGAIN = 0.05
"""Seconds before servers that had too few samples are asked again."""
FRESH = 1.0
"""Seconds for which what a server said of its clients is believed."""
FORGET_AFTER = 12.0
"""Seconds for which a server stands on no proxy's list before it is forgotten. A proxy that has just started does not
know all of its servers yet (see `proxy.GRACE`), and orders and totals that leave one out would be wrong without a word.
"""
LEFT_OUT_AFTER = 3.0
"""Seconds that a batch waits for a server before it is left out."""
SNAPSHOT_LOOK = 0.1
"""Seconds between two questions how a snapshot stands."""
FEEDBACK_PIECE = 1 << 14
"""Samples in one FEEDBACK message: below the longest request, whatever the size of a batch."""
BATCHES_AHEAD = 3
NOTHING: NDArray[np.void] = np.empty(0, messages.CLIENT_COUNTS)


@dataclass(frozen=True, slots=True)
class ReaderStats:
    """A reader at one moment; for whoever watches."""

    reader: str
    """Its id in hex."""
    servers: tuple[str, ...]
    """Names of the servers that answer."""
    away: tuple[str, ...]
    """Names of those that do not, and are left out."""
    batches: int
    samples: int
    short: int
    """Samples that a server was asked for and no longer had."""
    waited: float
    """Seconds that calls waited for a batch."""
    waits_for: str
    """Why the next batch has to wait for entries to be recorded; "" when it has not."""
    prefetched: int
    freshness: Freshness | None
    """Of a recent batch; None before the first one."""
    scalars: dict[str, float]
    """What `scalars` set."""
    resends: int
    refused: dict[str, int]
    feedback_given: int
    feedback_lost: int
    parameters_version: int
    finished: bool
    faults: int


class _Remote:
    """One server, reached over one channel. Belongs to the reader's thread."""

    def __init__(self, name: str, link: _Link) -> None:
        self.name, self.home, self.link = name, messages.name_hash(name), link
        self.table: NDArray[np.void] | None = None  # what it said last; None where that does not hold any more
        self.heard_at = 0.0  # when it said that
        self.clients: NDArray[np.uint64] = np.empty(0, np.uint64)  # who was in its newest table
        self.epoch = 0
        self.open: dict[int, NDArray[np.void]] = {}  # SUMS and DRAWs on their way: number -> what was asked for
        self.asked_at = 0.0
        self.again_at = 0.0  # when to ask an idle server again
        self.is_away = False
        self.is_finished = False
        self.listed_at = time.monotonic()  # when an address named it last
        self.drawn = 0  # samples that it was asked for
        self.started = 0  # its epoch, as its newest WELCOME said
        self.sending: dict[str, _Sending] = {}  # models on their way to it, by topic
        # Newest version of each topic that it was given and answered, and why it did not take it; under the lock.
        self.taken: dict[str, int] = {}
        self.wrong: dict[str, MemoireError] = {}

    @property
    def is_asked(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self.open)

    def is_silent(self, topic: str) -> bool:
        """Whether a model is on its way there, and not a word about it has come. From any thread."""
        sending = self.sending.get(topic)
        return sending is not None and not sending.is_heard

    def said(self, table: NDArray[np.void], now: float) -> None:
        """What it has; draws that it had not seen when it said so are taken off."""
        self.table, self.heard_at, self.clients = table.copy(), now, _clients(table)
        for counts in self.open.values():
            self.take(counts)

    def take(self, counts: NDArray[np.void]) -> None:
        """Take samples that are asked for off what is there for the next draw; with reuse_cache they stay."""
        if self.table is None or not len(counts):
            return
        names = _clients(counts)
        order = np.argsort(names)
        place = order[np.minimum(np.searchsorted(names, self.clients, sorter=order), len(counts) - 1)]
        asked = np.where(names[place] == self.clients, counts["count"][place], 0)
        limited = self.table["flags"] & 1 == 0
        self.table["reserved"] -= np.where(limited, np.minimum(asked, self.table["reserved"]), 0).astype(np.uint32)


class _Sending:
    """A model on its way to one server."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.is_heard = False  # the server said something about it


class _Link:
    """One of the addresses that the reader was given."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.is_looking = False
        self.look_at = 0.0
        self.names: tuple[str, ...] = ()
        self.unmet: tuple[str, ...] = ()  # addresses behind it where nobody has answered yet


@dataclass(slots=True)
class _Round:
    """A batch on its way: what was planned, and what came of it."""

    plan: caches.Plan
    open: set[int]
    parts: list[Any]
    wanted: int
    layout: container.Layout
    parameters: Parameters


class Reader(Node):
    """Draws batches from all servers behind its addresses, ahead of time on a thread of its own. Methods are
    thread-safe.

    Args:
        urls: Addresses of servers, proxies or both.
        table: Name of the table that it draws from; "" is the servers' first.
        timeout: Seconds to wait until one of them answers; None does not wait: schema and parameters come later.
        seed: Of counts and order; the servers' samples are drawn by the clients.
        ahead: Batches that are drawn before they are asked for.
        partition: (i, n): this is learner i, from 0, of n that part the clients: each draws from about every n-th one,
            as if there were no others, and importance corrects for those alone. None draws from all clients; learners
            that do so never get the same sample of a cache either. Episodes at a server are one memory: who parts the
            clients draws from all of it all the same.
        context: ZeroMQ context; one for the process by default.
        keys: This process' keys folder (or a cluster's), for tcp:// addresses; None takes $MEMOIRE_KEYS, and without it
            none. See docs/operations.md.

    Raises:
        MemoireTimeout: nobody answered.
        AuthError: the other side does not let this process in.
        KeyFileError: the keys cannot be used.
        EndpointError: an address is none.
        Refused: there is no such table.
    """

    CALLED = "this reader"
    CLOSED_AT_EXIT = 0

    @checked_names()
    def __init__(
        self,
        urls: Sequence[str],
        *,
        table: str = "",
        timeout: float | None = 10.0,
        seed: int | None = None,
        ahead: int = BATCHES_AHEAD,
        partition: tuple[int, int] | None = None,
        context: Context | None = None,
        limits: Limits | None = None,
        keys: Given = None,
    ) -> None:
        if isinstance(urls, str):
            urls = [urls]
        if not urls:
            raise EndpointError("", "connect to", "a reader needs at least one address")
        if ahead < 1:
            raise ParameterError("ahead", ahead, "at least 1")
        self.urls = tuple(urls)
        self._asked_table, self._table = table_name(table), ""
        self._partners: dict[str, Reader] = {}  # of the other tables of mixed batches; under `_changed`
        self._options: dict[str, Any] = {"seed": seed, "ahead": ahead, "partition": partition}
        self._keys = Keys.of(keys, "learner")
        self._options |= {"context": context, "limits": limits, "keys": self._keys}
        self.reader_id = secrets.token_bytes(16)
        self._limits = limits or Limits()
        self._pid = os.getpid()
        self._started = time.monotonic()
        self._ahead = ahead
        self._part, self._of = _checked_partition(partition)
        self._rng = random.Random(seed)
        self._closing = False
        self._close_lock = threading.Lock()
        # One lock for what both sides use; notified at each batch, answer, failure and at close.
        self._changed = threading.Condition()
        self._ready: deque[caches.Pooled] = deque()
        self._batch_size = 0  # what is being drawn ahead; 0 is nothing
        self._failed: MemoireError | None = None
        self._schema: Schema | None = None
        self._parameters, self._parameters_version = Parameters(), 0
        self._finished = False
        self._batches = self._samples = self._short = 0
        self._annealing = Annealing()
        self._waited = 0.0
        self._looks = Looks()
        self._scalars: dict[str, float] = {}
        self._feedback_given = self._feedback_lost = 0
        self._last_shortage = (0, 0)  # samples kept for this reader, clients
        # What belongs to the thread alone.
        self._numbers = itertools.count(1)
        self._worker = Worker("memoire-reader", self._turn, self._next_time, self._at_end)
        self._links: list[_Link] = []
        self._remotes: dict[str, _Remote] = {}
        self._rounds: list[_Round] = []  # on their way, oldest first; their batches come in this order
        self._drawn = 0  # samples that all servers were asked for
        self._balance = Balance()
        self._waits_for = ""  # why the next batch waits for entries
        self._wanted = 0  # samples of a batch that could not be drawn when that was tried last
        self._wrong: dict[str, int] = {}
        self._versions: dict[str, int] = {}  # newest version of each topic at any server
        self._run = 0  # hash of the run that was named last
        self._published: dict[str, Model] = {}  # newest of each topic that was published here, in this run
        try:
            self._links += [self._open(url, context or sockets.shared_context()) for url in self.urls]
        except BaseException:
            self._worker.stop(0.0)
            raise
        self._worker.start()
        close_at_exit(self)
        if timeout is None:
            return
        try:
            self._await(self._has_met, self._seconds(timeout), "welcome")
        except BaseException:
            self.close(UNDO_TIMEOUT)
            raise

    def _has_met(self) -> bool:
        """Whether every address has answered, or had its time. Raises AuthError where nobody lets this process in."""
        denied = [link.channel.denied_for_good for link in self._links]
        if self._schema is None and denied[0] is not None and all(denied):
            raise denied[0]
        return self._schema is not None and not self._is_meeting

    def _open(self, url: str, context: Context) -> _Link:
        channel = Channel(
            self._worker.doors,
            context,
            url,
            client=self.reader_id,
            limits=self._limits,
            rng=self._rng,
            numbers=self._numbers,
            keys=self._keys,
        )
        return _Link(channel)

    # ------------------------------------------------------------------------------------------------- batches

    @property
    def schema(self) -> Schema:
        """What an entry is, as the servers say."""
        assert self._schema is not None
        return self._schema

    @property
    def table(self) -> str:
        """Name of the table that it draws from."""
        return self._table

    @property
    def parameters(self) -> Parameters:
        """Everything that shapes sampling, as the servers said last."""
        return self._parameters

    @property
    def finished(self) -> bool:
        """Whether the run was declared over."""
        return self._finished

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers that are known."""
        return tuple(self._remotes)

    def get_batch(
        self, batch_size: int, timeout: float = 30.0, *, out: Mapping[str, Any] | Batch | None = None
    ) -> Batch:
        """The next batch; from here on batches of this size are drawn ahead.

        Args:
            batch_size: Samples, at least 1.
            timeout: Seconds that it may take.
            out: Arrays of the caller (by name, or an earlier batch) that are filled in place of new ones.

        Raises:
            ParameterError: an array of `out` does not fit; the batch is there for the next call.
            NotEnoughSamples: the servers had too few for `timeout` seconds.
            MemoireTimeout: no server answered in that time.
            Closed: the reader was closed, also from another thread while waiting.
        """
        batch_size = whole("batch_size", batch_size, 1, caches.MOST_BATCH)
        began, patience = time.monotonic(), self._seconds(timeout)
        with self._changed:
            try:
                drawn = self._await_batch(batch_size, began, patience)
            finally:
                now = time.monotonic()
                self._waited += now - began
            batch = drawn.batch(self.schema, self.update_priorities)
            if out is not None:
                batch.copy_into(out)
            self._ready.popleft()
            self._batches += 1
        self._worker.wake()
        if self._looks.is_due(now):
            newest = max(self._versions.values(), default=0)
            self._looks.saw(drawn.gathered, drawn.importance, drawn.left_out, newest)
        return batch

    def _await_batch(self, batch_size: int, began: float, patience: float) -> caches.Pooled:
        """The next batch as soon as it is there; it stays the next one. Under the lock, given up while waiting."""
        self._check_open()
        check_batch(self._parameters, batch_size)
        if batch_size != self._batch_size:
            self._batch_size = batch_size
            self._ready.clear()
        self._worker.wake()
        while not self._ready:
            left = began + patience - time.monotonic()
            if left <= 0:
                raise self._shortage(batch_size, patience)
            self._changed.wait(left)
            self._check_open()
            check_batch(self._parameters, batch_size)
            if self._batch_size != batch_size:  # somebody else asked for another size meanwhile
                self._batch_size = batch_size
                self._ready.clear()
                self._worker.wake()
        return self._ready[0]

    def _shortage(self, batch_size: int, timeout: float) -> MemoireError:
        answering = [remote for remote in self._remotes.values() if not remote.is_away]
        if not answering:
            return MemoireTimeout("batch", ", ".join(self.urls), timeout, self._links[0].channel.trouble())
        samples, clients = self._last_shortage
        return NotEnoughSamples(batch_size, samples, 0, clients, timeout, self._waits_for)

    @overload
    def batches(self, batch_size: int, timeout: float = ...) -> Iterator[Batch]: ...
    @overload
    def batches(self, batch_size: Mapping[str, int], timeout: float = ...) -> Iterator[MixedBatch]: ...
    @overload
    def batches(
        self, batch_size: int | Mapping[str, int], timeout: float = ...
    ) -> Iterator[Batch] | Iterator[MixedBatch]: ...
    def batches(
        self, batch_size: int | Mapping[str, int], timeout: float = 30.0
    ) -> Iterator[Batch] | Iterator[MixedBatch]:
        """Batches until the run is over or `close`; each waits at most `timeout` seconds.

        Args:
            batch_size: Samples of this reader's table; or of several, mixed: `{"online": 192, "demo": 64}`.

        Raises:
            MemoireTimeout: not enough samples came in that time.
            Refused: there is no such table.
        """
        where, advice = ", ".join(self.urls), "Are actors running?"
        if not isinstance(batch_size, Mapping):
            what, draw = f"batch of {batch_size}", functools.partial(self.get_batch, batch_size)
            return batches_until_over(draw, self._is_over, what, timeout, where, lambda: advice)
        sizes = sizes_of(batch_size)
        mixer = Mixer(sizes, {name: self._of_table(name).get_batch for name in sizes})
        lacking = lambda: f"Table {mixer.lacking!r} has too few. {advice}"  # noqa: E731
        return batches_until_over(mixer.get, self._is_over, f"batch of {sizes}", timeout, where, lacking)

    def _of_table(self, name: str) -> Reader:
        """The reader of a table: this one, or one beside it that lives as long."""
        with self._changed:
            self._check_open()
            if name in (self._table, self._asked_table):
                return self
            former = self._partners.get(name)
            if former is not None and former._failed is None:
                return former
            if former is not None:
                former.close(0.0)  # its table was not there; it may be now
            self._partners[name] = Reader(self.urls, table=name, timeout=None, **self._options)
            return self._partners[name]

    def _is_over(self) -> bool:
        return self._closing or self._finished

    def update_priorities(self, ids: NDArray[Any], td_errors: Any) -> int:
        """Send TD errors on their way to the clients that own the samples; returns at once, with how many were
        given.
        """
        self._check_open()
        errors = td_errors_for(np.asarray(ids), td_errors)
        if len(errors):
            rows = np.array(ids)
            self._feedback_given += len(errors)
            self._worker.post(lambda: self._send_feedback(rows, errors))
        return len(errors)

    # ------------------------------------------------------------------------------------------- what it tells

    def publish(self, topic: str, content: bytes | bytearray | memoryview | str, timeout: float | None = None) -> int:
        """Publish a model at every server, under one version; returns it when all that answer have it.

        A server that is away gets the newest model of each topic when it is back, and one that began anew gets it
        again: the reader keeps it for that. One that says nothing for three seconds is away, where another one answers.

        Raises:
            MemoireTimeout: a server that was there did not take it in time, or none came; it goes on being sent.
            Refused: a server has that version already: somebody else publishes this topic.
        """
        self._check_open()
        patience, began = self._seconds(timeout), time.monotonic()
        made = make(check_topic(topic), content, 0)
        asked: list[tuple[Model, list[_Remote]]] = []

        def start() -> None:
            self._versions[topic] = self._versions.get(topic, 0) + 1
            model = self._published[topic] = replace(made, version=self._versions[topic])
            there = [remote for remote in self._remotes.values() if not remote.is_away]
            for remote in self._remotes.values():
                remote.wrong.pop(topic, None)
                self._offer(remote, topic)
            with self._changed:
                asked.append((model, there))
                self._changed.notify_all()

        def lacking() -> list[_Remote]:
            model, there = asked[0]
            listed = [one for one in there if one.name in one.link.names]
            return [one for one in listed if one.taken.get(topic, 0) < model.version and topic not in one.wrong]

        def is_there() -> bool:
            """Whether all that answer have it: a host that is gone says no goodbye."""
            if not asked:
                return False
            model, there = asked[0]
            if not there:  # nobody was: the first server that comes
                return any(one.taken.get(topic, 0) >= model.version for one in list(self._remotes.values()))
            missing = lacking()
            if len(missing) < len(there) and time.monotonic() >= began + LEFT_OUT_AFTER:
                missing = [one for one in missing if not one.is_silent(topic)]
            return not missing

        self._worker.post(start)
        is_taken = self._wait(is_there, patience)
        if missing := lacking() if asked else []:
            self._worker.post(lambda: self._leave_silent(missing, topic))
        if not is_taken:
            raise self._not_published(topic, missing, patience)
        model, there = asked[0]
        for remote in there or list(self._remotes.values()):
            if topic in remote.wrong:
                raise remote.wrong[topic]
        return model.version

    def _not_published(self, topic: str, lacking: list[_Remote], patience: float) -> MemoireTimeout:
        names = ", ".join(repr(remote.name) for remote in lacking)
        what = f"model of topic {topic!r} at server {names}" if lacking else f"answer to a model of topic {topic!r}"
        advice = "It goes on being sent while this reader is open; a server that is back gets the newest."
        trouble = "" if lacking else f"{self._links[0].channel.trouble(probe=False)} "
        return MemoireTimeout(what, ", ".join(self.urls), patience, trouble + advice)

    def _leave_silent(self, lacking: list[_Remote], topic: str) -> None:
        """The next model does not wait for those that said nothing at all about this one."""
        for remote in lacking:
            if remote.is_silent(topic):
                self._leave_out(remote)

    def _offer(self, remote: _Remote, topic: str) -> None:
        """Begin to send a server the newest model of a topic that was published here, unless it has it."""
        model = self._published.get(topic)
        if model is not None and topic not in remote.sending and remote.taken.get(topic, 0) < model.version:
            remote.sending[topic] = sending = _Sending(model)
            self._send_model(remote, sending, 0)

    def _offer_all(self, remote: _Remote) -> None:
        for topic in self._published:
            self._offer(remote, topic)

    def _send_model(self, remote: _Remote, sending: _Sending, offset: int) -> None:
        chunk = memoryview(sending.model.body)[offset : offset + self._limits.model_chunk]
        # Without a deadline: whoever waits for it gives up by himself, and the server may come back.
        remote.link.channel.ask(
            _publish_body(sending.model, offset),
            lambda answer: self._sent(remote, sending, offset, answer),
            payload=chunk if len(chunk) else None,
            home=remote.home,
        )

    def _sent(self, remote: _Remote, sending: _Sending, offset: int, answer: messages.Answer) -> None:
        topic = sending.model.topic
        if isinstance(answer, Closed) or remote.sending.get(topic) is not sending:
            return  # or another run has begun
        sending.is_heard, remote.is_away = True, False
        said = answer.body if isinstance(answer, messages.Message) else None
        if isinstance(said, messages.Published) and not said.version and said.received > offset:
            self._send_model(remote, sending, said.received)
            return
        del remote.sending[topic]
        if isinstance(answer, Refused) and answer.code == "missing" and offset:
            self._offer(remote, topic)  # it began anew meanwhile, and forgot the beginning
        elif isinstance(answer, Refused) and answer.code in ("run", "client", "closed", "busy"):
            self._look_soon()  # not now: the next look at it begins again
        else:
            with self._changed:
                remote.taken[topic] = sending.model.version
                if isinstance(answer, MemoireError):
                    remote.wrong[topic] = answer
                    self._look_soon()  # at its version, where somebody else published
                self._changed.notify_all()
            self._offer(remote, topic)  # a newer one may have been published meanwhile

    def configure(self, timeout: float | None = None, **changes: Any) -> None:
        """Change parameters at every known server, and so at all clients; returns when the servers have them.

        Raises:
            MemoireTimeout: a server did not answer in time; names it. The others have the change: servers that are read
                together need the same parameters, so call again when it is back.
            Refused: a server does not take them.
        """
        self._control(messages.Control(parameters=_plain(changes)), timeout, needs_all=True)

    def finish(self, timeout: float | None = None) -> None:
        """Declare the run over at every server; returns when those that are there know it.

        Raises:
            MemoireTimeout: none of them answered in time.
        """
        self._control(messages.Control(finish=True), timeout, needs_all=False)

    def begin_run(self, name: str, timeout: float | None = None) -> None:
        """Count this run from now on at every server: from zero, or where it ended; see `Server.begin_run`.

        Raises:
            MemoireTimeout: a server did not answer in time; names it. Call again when it is back.
            Refused: that is no name.
        """
        name = text("name", name)
        self._control(messages.Control(run=name), timeout, needs_all=True)
        self._worker.post(lambda: self._enter(messages.name_hash(name)))

    def _enter(self, run: int) -> None:
        """All servers count this run now: what is published from here on belongs to it."""
        for link in self._links:
            self._look_at_run(link, run)
            link.channel.run = run

    def _control(self, body: messages.Control, timeout: float | None, *, needs_all: bool) -> None:
        self._check_open()
        patience = self._seconds(timeout)
        deadline = time.monotonic() + patience
        if needs_all and not self._wait(lambda: not self._unmet(), patience):
            raise self._nobody_at_all(patience)
        box: dict[str, messages.Answer | None] = {}
        started: list[bool] = []
        # The end is of one run; the rest is taken whichever a server counts: behind one proxy they may count several.
        run = None if body.finish else 0

        def start() -> None:
            known = list(self._remotes.values())
            with self._changed:
                box.update({remote.name: None for remote in known if needs_all or not remote.is_away})
                started.append(True)
                self._changed.notify_all()
            for remote in known:
                taken = functools.partial(settle, remote.name)
                remote.link.channel.ask(body, taken, deadline, home=remote.home, run=run)

        def settle(name: str, answer: messages.Answer) -> None:
            self._look_soon()  # see what came of it
            with self._changed:
                if name in box:
                    box[name] = answer
                if isinstance(answer, messages.Message) and isinstance(answer.body, messages.Taken):
                    self._finished = self._finished or answer.body.finished
                self._changed.notify_all()

        self._worker.post(start)
        self._await(lambda: bool(started) and None not in box.values(), patience + 1.0, "answer")
        silent = [name for name, answer in box.items() if isinstance(answer, MemoireTimeout)]
        for name, answer in box.items():
            if isinstance(answer, MemoireTimeout):
                if not needs_all and len(silent) < len(box):
                    continue
                advice = f"{answer.advice} The other servers have the change; call again when {name!r} is back."
                raise MemoireTimeout(f"answer of server {name!r}", answer.endpoint, answer.seconds, advice)
            if isinstance(answer, MemoireError):
                raise answer

    def scalars(self, values: Mapping[str, float]) -> None:
        """Set figures to be shown for this learner, by name: finite numbers, at most 64 names. Servers hear of them
        every two seconds.
        """
        self._check_open()
        with self._changed:
            self._scalars = arguments.scalars(values, self._scalars)

    # ------------------------------------------------------------------------------------------ what was counted

    def totals(self, run: str | None = None, timeout: float | None = None) -> ClusterTotals:
        """What all servers together have counted, each client once, wherever it was at home.

        A server that does not answer in time is named in `missing`, and so is an address on a proxy's list where nobody
        has answered since the proxy began. Exact for what clients have told; they tell it twice a second.

        Args:
            run: Name of the experiment; None is the one that is counted now.

        Raises:
            MemoireTimeout: no server answered.
            Refused: the servers that answered know no such run.
        """
        deadline = time.monotonic() + self._seconds(timeout)
        told = self.accounts(run, deadline - time.monotonic())
        found = {name: answer for name, answer in told.items() if isinstance(answer, ServerAccounts)}
        if not found:
            nobody = MemoireTimeout("server", ", ".join(self.urls), self._seconds(timeout), "None has answered yet.")
            raise next((error for error in told.values() if isinstance(error, MemoireError)), nobody)
        # Servers hear of a new run one after the other: the one that most of them count.
        names = Counter(answer.run for answer in found.values())
        chosen = max(names, key=lambda name: names[name])
        mine = [answer for answer in found.values() if answer.run == chosen]
        if len(names) > 1:  # the others may have counted it before
            left = deadline - time.monotonic()
            rest = self.accounts(chosen, left, [name for name, answer in found.items() if answer.run != chosen])
            mine += [answer for answer in rest.values() if isinstance(answer, ServerAccounts)]
        missing = {name for name, answer in told.items() if isinstance(answer, MemoireTimeout)}
        totals = totals_of(merge(*(answer.rows for answer in mine)))
        return ClusterTotals(
            run=chosen,
            totals=replace(
                totals,
                applied=totals.applied + sum(answer.applied for answer in mine),
                stale=totals.stale + sum(answer.stale for answer in mine),
            ),
            finished=all(answer.finished for answer in mine),
            durable=all(answer.durable for answer in mine),
            runs=tuple(dict.fromkeys(name for answer in found.values() for name in answer.runs)),
            servers=tuple(sorted(found)),
            missing=tuple(sorted(missing | self._unmet())),
        )

    def accounts(
        self, run: str | None = None, timeout: float | None = None, servers: Sequence[str] | None = None
    ) -> dict[str, ServerAccounts | MemoireError]:
        """Every server's accounts of a run, by its name, or why there are none.

        Args:
            run: Name of the experiment; None is the one that each server counts now.
            servers: Names of those to ask; None asks all.
        """
        run = None if run is None else text("run", run)
        deadline = time.monotonic() + self._seconds(timeout)
        told: dict[str, ServerAccounts | MemoireError] = {}
        pages: dict[str, list[Rows]] = {name: [] for name in ([*self._remotes] if servers is None else servers)}
        asked: dict[str, messages.Body] = {name: messages.Ledger(run=run or "") for name in pages}
        while asked:  # a page of each server at a time
            answers, asked = self.ask(asked, deadline - time.monotonic()), {}
            for name, answer in answers.items():
                if not isinstance(answer, messages.Accounts):
                    unexpected = Refused(self._remotes[name].link.channel.endpoint, "unexpected", f"answered {answer}")
                    told[name] = answer if isinstance(answer, MemoireError) else unexpected
                    continue
                pages[name].append(messages.unpack_accounts(answer.accounts))
                if answer.more and len(pages[name][-1]):
                    asked[name] = messages.Ledger(run=answer.run_name, after=key_of(pages[name][-1][-1:]))
                else:
                    told[name] = _server_accounts(answer, merge(*pages[name]))
        return told

    def ask(
        self, bodies: Mapping[str, messages.Body], timeout: float | None = None
    ) -> dict[str, messages.Body | MemoireError]:
        """One request to each of some servers, by their names, all at once; the answers, or why there are none.

        Raises:
            ParameterError: a name is none of the servers'.
            Closed: the reader was closed.
        """
        patience = self._seconds(timeout)
        deadline = time.monotonic() + patience
        box: dict[str, messages.Answer] = {}
        for name, body in mapping("bodies", bodies).items():
            if text("server", name) not in self._remotes:
                raise ParameterError("server", name, f"one of {', '.join(sorted(self._remotes))}")
            if not isinstance(body, messages.Body):
                raise WrongType("body", "one of wire's requests", type(body).__name__)

        def start() -> None:
            for name, body in bodies.items():
                settled = functools.partial(settle, name)
                remote = self._remotes.get(name)
                if remote is None:
                    settled(ParameterError("server", name, "a server that is still listed"))
                    continue
                remote.link.channel.ask(body, settled, deadline, home=remote.home, run=0)  # whatever run it counts

        def settle(name: str, answer: messages.Answer) -> None:
            with self._changed:
                box[name] = answer
                self._changed.notify_all()

        self._worker.post(start)
        self._await(lambda: len(box) == len(bodies), patience + 1.0, "answer")
        return {name: answer if isinstance(answer, MemoireError) else answer.body for name, answer in box.items()}

    def snapshot(self, name: str, timeout: float | None = 600.0) -> dict[str, messages.Snapshot | MemoireError]:
        """Have every server write what it holds into its own state folder, as `snapshots/NAME.snapshot`, while it goes
        on; each server's answer when its file is on disk, or why it is not there.

        Args:
            name: Letters, digits, "_", "." and "-", at most 100. A file of this name is replaced.

        Raises:
            MemoireTimeout: an address leads to nobody, so that a server would not hear of it; nothing was ordered.
        """
        self._check_open()
        deadline = time.monotonic() + self._seconds(timeout)
        patience = min(self._limits.request_timeout, self._seconds(timeout))
        if not self._wait(lambda: not self._unmet(), patience):
            raise self._nobody_at_all(patience)
        body = messages.TakeSnapshot(name=text("name", name), order=secrets.token_bytes(16))
        told: dict[str, messages.Snapshot | MemoireError] = {}
        asked = dict.fromkeys(self.servers, body)
        while asked:
            left = deadline - time.monotonic()
            for server, answer in self.ask(asked, min(self._limits.request_timeout, max(0.0, left))).items():
                if isinstance(answer, messages.Snapshot) and answer.state == "writing" and left > 0:
                    continue
                told[server] = _told(server, answer, self._seconds(timeout))
                del asked[server]
            with self._changed:
                self._check_open()
                self._changed.wait(SNAPSHOT_LOOK if asked else 0.0)
        return told

    def tell(self, name: str, body: messages.Body, timeout: float | None = None) -> messages.Taken:
        """One request that is answered by TAKEN to one server.

        Raises:
            MemoireTimeout: it did not answer in time.
            Refused: it does not do it.
        """
        answer = self.ask({name: body}, timeout)[name]
        if isinstance(answer, MemoireError):
            raise answer
        if not isinstance(answer, messages.Taken):
            raise Refused(self._remotes[name].link.channel.endpoint, "unexpected", f"answered {answer}")
        return answer

    def _nobody_at_all(self, patience: float) -> MemoireTimeout:
        where = ", ".join(sorted(self._unmet()))
        advice = "A server there would not hear of it, so nothing was changed. Start it, or take it off the list."
        return MemoireTimeout("server", where, patience, advice)

    def _unmet(self) -> set[str]:
        """Addresses, this reader's own and those on proxies' lists, where nobody has answered yet."""
        own = {link.channel.endpoint for link in self._links if not link.names}
        return own.union(*(link.unmet for link in self._links))

    def servers_at(self, url: str) -> tuple[str, ...]:
        """Names of the servers behind one of this reader's addresses, as it said last; none before it has answered."""
        return next((link.names for link in self._links if link.channel.endpoint == url), ())

    def trouble_at(self, url: str) -> str:
        """Why one of this reader's addresses may not answer and what to do, in a sentence or two; "" once it has.

        Tries to connect, which takes 0.2 s at most.
        """
        return next(
            (link.channel.trouble() for link in self._links if link.channel.endpoint == url and not link.names), ""
        )

    def _seconds(self, timeout: float | None) -> float:
        return seconds(timeout, self._limits.request_timeout)

    # ------------------------------------------------------------------------------------------------- its end

    def stats(self) -> ReaderStats:
        """All figures at this moment."""
        remotes = list(self._remotes.values())
        refused = dict(self._wrong)
        for link in self._links:
            for code, count in link.channel.refused.items():
                refused[code] = refused.get(code, 0) + count
        return ReaderStats(
            reader=self.reader_id.hex(),
            servers=tuple(remote.name for remote in remotes if not remote.is_away),
            away=tuple(remote.name for remote in remotes if remote.is_away),
            batches=self._batches,
            samples=self._samples,
            short=self._short,
            waited=self._waited,
            waits_for=self._waits_for,
            prefetched=len(self._ready),
            freshness=self._looks.newest,
            scalars=dict(self._scalars),
            resends=sum(link.channel.resends for link in self._links),
            refused=refused,
            feedback_given=self._feedback_given,
            feedback_lost=self._feedback_lost,
            parameters_version=self._parameters_version,
            finished=self._finished,
            faults=self._worker.errors,
        )

    def liveness(self) -> list[str]:
        """What only a restart can mend, a sentence each. Empty while all is well."""
        return self._worker.trouble()

    def readiness(self) -> list[str]:
        """Why no batch can come just now, a sentence each; empty while one can."""
        if self._closing:
            return ["closing: this reader is about to end"]
        if any(not remote.is_away for remote in list(self._remotes.values())):
            return []
        return [f"servers: none answers. {self._links[0].channel.trouble()}"]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    def close(self, timeout: float | None = None) -> None:
        """End the thread and its sockets within `timeout` seconds; calls that wait raise `Closed`. May be called
        again.
        """
        patience = seconds(timeout, self._limits.close_timeout)
        deadline = time.monotonic() + patience
        with self._changed:
            self._closing = True
            self._ready.clear()
            self._changed.notify_all()
            partners = list(self._partners.values())
        for partner in partners:
            partner.close(max(0.0, deadline - time.monotonic()))
        with self._closer(deadline) as is_mine:
            if is_mine and not self._worker.stop(max(ENDING, patience), linger=min(patience, 0.5)):
                _log.warning("reader %s: its thread did not end in time", self.reader_id.hex()[:8])

    def __repr__(self) -> str:
        return f"<memoire.Reader {self.reader_id.hex()[:8]} of {', '.join(self.urls)}>"

    def _check_open(self) -> None:
        if self._closing:
            raise Closed("this reader")
        if self._failed is not None:
            raise self._failed

    def _wait(self, is_done: Callable[[], bool], patience: float) -> bool:
        """Wait for a condition; False when it has not come true after these seconds."""
        deadline = time.monotonic() + patience
        with self._changed:
            while True:
                self._check_open()
                if is_done():
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.1))

    def _await(self, is_done: Callable[[], bool], patience: float, what: str) -> None:
        if not self._wait(is_done, patience):
            raise self._denied or MemoireTimeout(what, ", ".join(self.urls), patience, self._links[0].channel.trouble())

    @property
    def _denied(self) -> AuthError | None:
        """Why nobody can answer: every address that is not away does not let this process in."""
        found = [link.channel.denied for link in self._links]
        return found[0] if all(found) else None

    # ----------------------------------------------------------------- from here on: inside of the thread alone

    def _next_time(self) -> float:
        times = [link.channel.next_time() for link in self._links]
        times += [link.look_at for link in self._links if not link.is_looking]
        times += [remote.asked_at + LEFT_OUT_AFTER for remote in self._remotes.values() if self._is_awaited(remote)]
        if self._is_hungry:
            if self._is_meeting:
                return min(*times, self._started + LEFT_OUT_AFTER)
            # One that has said what it has waits for the others, not for a time.
            times += [
                remote.again_at for remote in self._remotes.values() if not remote.is_asked and remote.table is None
            ]
        return min(times)

    @property
    def _is_meeting(self) -> bool:
        """Whether an address has not answered yet, and still has its time: a batch without it would leave it out."""
        waits = time.monotonic() < self._started + LEFT_OUT_AFTER
        return waits and not all(link.names for link in self._links)

    @property
    def _is_hungry(self) -> bool:
        """Whether another batch is to be drawn, and none is on its way."""
        drawing = len(self._rounds)
        wanted = self._batch_size > 0 and len(self._ready) + drawing < self._ahead and not self._closing
        return wanted and drawing < messages.DRAWS_IN_FLIGHT

    def _is_awaited(self, remote: _Remote) -> bool:
        return remote.is_asked and not remote.is_away

    def _turn(self, ready: dict[object, int]) -> None:
        for link in self._links:
            link.channel.turn(ready)
        now = time.monotonic()
        for link in self._links:
            if not link.is_looking and now >= link.look_at:
                self._look(link, now)
        for remote in self._remotes.values():
            is_late = now >= remote.asked_at + LEFT_OUT_AFTER or remote.link.channel.is_down
            if self._is_awaited(remote) and is_late:
                self._leave_out(remote)
        if self._is_hungry:
            self._begin(now)

    # Who is there

    def _look(self, link: _Link, now: float) -> None:
        link.is_looking = True
        link.look_at = now + LOOK
        hello = messages.Hello(
            role="reader",
            table=self._asked_table or self._table,
            software=SOFTWARE,
            host=socket.gethostname()[:256],
            pid=os.getpid(),
            codecs=container.codecs(),
            scalars=self._scalars,
            figures=self._figures(),
        )
        # To any home: behind a proxy another server answers where the former one is away.
        link.channel.ask(hello, lambda answer: self._welcomed(link, answer), now + LOOK, home=0)
        for remote in list(self._remotes.values()) if self._published else ():
            if remote.link is link:  # each by itself: has it begun anew, and lost what was published?
                met = functools.partial(self._looked_at, remote)
                link.channel.ask(hello, met, now + LOOK, home=remote.home)

    def _figures(self) -> dict[str, float]:
        """What servers show of this reader."""
        fresh = self._looks.newest
        figures = {} if fresh is None else dataclasses.asdict(fresh)
        figures |= {"batches": self._batches, "samples": self._samples, "waited": self._waited}
        return {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}

    def _looked_at(self, remote: _Remote, answer: messages.Answer) -> None:
        said = answer.body if isinstance(answer, messages.Message) else None
        if isinstance(said, messages.Welcome) and said.home_name == remote.name:
            self._met(remote, said.epoch)

    def _met(self, remote: _Remote, epoch: int) -> None:
        """A server is there: it gets what was published and it does not have, all of it after a restart."""
        if remote.started != epoch:
            remote.started = epoch
            remote.taken.clear()
        self._offer_all(remote)

    def _welcomed(self, link: _Link, answer: messages.Answer) -> None:
        link.is_looking = False
        if isinstance(answer, (Closed, MemoireTimeout)):
            return
        try:
            if isinstance(answer, MemoireError):
                raise answer
            self._learn(link, answer)
        except MemoireError as error:
            with self._changed:
                # The first answer decides whether this reader can be used at all; later ones may be a server in
                # between.
                if self._schema is None or isinstance(error, SchemaMismatch):
                    self._failed = error
                    self._changed.notify_all()
                else:
                    _log.warning("reader %s: %s", self.reader_id.hex()[:8], error)

    def _learn(self, link: _Link, message: messages.Message) -> None:
        told = message.body
        if not isinstance(told, messages.Welcome):
            raise Refused(link.channel.endpoint, "unexpected", f"HELLO was answered by {message.type.name}")
        if told.table_name != self._table and self._schema is not None:
            link.look_at = 0.0  # whoever names no table is given each server's first: it keeps the one that came first
            return
        schema, parameters = Schema.from_json(told.schema), Parameters.from_wire(told.parameters)
        if self._schema is not None and schema != self._schema:
            raise SchemaMismatch(self.reader_id.hex()[:8], "schema", str(schema), f"batches of {self._schema}")
        self._look_at_run(link, message.header.run)
        link.channel.run, link.channel.fingerprint = message.header.run, message.header.fingerprint
        link.channel.home, link.channel.table = message.header.home, told.table
        link.channel.learned(told)
        link.names = tuple(told.servers or [told.home_name])
        link.unmet = tuple(told.unmet)
        for name in link.names:
            if name not in self._remotes:
                self._remotes[name] = _Remote(name, link)
            elif self._remotes[name].is_away:
                self._remotes[name].link = link  # perhaps there is another way to it
        self._drop_unlisted()
        for topic, version in told.models.items():
            self._versions[topic] = max(version, self._versions.get(topic, 0))
        if told.home_name in self._remotes:
            self._met(self._remotes[told.home_name], told.epoch)
        with self._changed:
            if parameters != self._parameters and self._schema is not None:
                self._ready.clear()
                self._rounds.clear()
                self._balance.reset()
            self._schema, self._parameters, self._table = schema, parameters, told.table_name
            self._parameters_version = told.parameters_version
            self._finished = self._finished or told.finished
            self._changed.notify_all()

    def _drop_unlisted(self) -> None:
        """Servers that were taken off every list are no longer asked, waited for or named, after a while."""
        ways, now = {name: link for link in self._links for name in link.names}, time.monotonic()
        for remote in list(self._remotes.values()):
            if remote.name in ways:
                remote.listed_at = now
            if remote.name not in remote.link.names and remote.name in ways:
                remote.link = ways[remote.name]
            elif remote.name not in ways and now - remote.listed_at > FORGET_AFTER:
                self._leave_out(remote)
                del self._remotes[remote.name]

    def _look_at_run(self, link: _Link, run: int) -> None:
        """Models belong to a run: those of the former one are not published in the next."""
        if link.channel.run in (0, run):
            self._run = self._run or run
            return
        if self._run != run:  # the first link to say so
            self._run = run
            self._balance.reset()
            self._published.clear()
        for remote in self._remotes.values():
            if remote.link is link:
                remote.sending.clear()
                remote.taken.clear()

    def _look_soon(self) -> None:
        for link in self._links:
            link.look_at = 0.0

    def _leave_out(self, remote: _Remote) -> None:
        """It did not answer in time: batches go on without it, while the question stays open."""
        remote.is_away = True
        remote.table = None
        for made in self._rounds:
            made.open.difference_update(remote.open)
        self._finish_rounds()

    # Drawing

    def _begin(self, now: float) -> None:
        """Plan a batch over the servers that answered; ask those first that have not said what they have."""
        if self._is_meeting:
            return
        there = [remote for remote in self._remotes.values() if not remote.is_away]
        for remote in self._remotes.values():
            if not remote.is_asked and (remote.table is None or now - remote.heard_at > FRESH):
                remote.table = None
                self._ask(remote, self._sums_of(remote), now)
        if any(remote.table is None for remote in there) or not there:
            return
        tables = [remote.table for remote in there if remote.table is not None]
        size = self._batch_size
        on_way = sum(int(counts["count"].sum()) for remote in there for counts in remote.open.values())
        self._waits_for = self._balance.why_not_draw(self._parameters, [remote.name for remote in there], size, on_way)
        plan = None if self._waits_for else caches.plan(tables, size, self._rng.random())
        self._wanted = size if plan is None else 0
        if plan is None:
            self._wait_for_more(there, tables, now)
            return
        layout = container.layout_of(self.schema, self._parameters, container.Kind.DRAWN)
        made = _Round(plan, set(), [], size, layout, self._parameters)
        self._rounds.append(made)
        for remote, counts in zip(there, plan.counts, strict=True):
            remote.again_at = 0.0
            remote.take(counts)
            if len(counts):
                drawn = int(counts["count"].sum())
                self._drawn += drawn
                remote.drawn += drawn
                sums = self._sums_of(remote)
                asked = messages.Draw(
                    counts=counts.tobytes(),
                    reserve=sums.reserve,
                    elsewhere=sums.elsewhere,
                    part=sums.part,
                    of=sums.of,
                    band=sums.band,
                )
                made.open.add(self._ask(remote, asked, now, counts))
            elif not remote.is_asked:  # it gives nothing, and is to say what it has by the next draw but one
                self._ask(remote, self._sums_of(remote), now)
        if self._is_hungry:
            self._begin(now)

    def _sums_of(self, remote: _Remote) -> messages.Sums:
        # Of few clients at each of several servers, the first ones belong to different learners.
        part = (self._part + sorted(self._remotes).index(remote.name)) % self._of if self._of > 1 else 0
        return messages.Sums(
            reserve=self._reserve,
            elsewhere=self._drawn - remote.drawn,
            part=part,
            of=self._of,
            wanted=min(self._wanted, (1 << 32) - 1),
            band=self._balance.band(remote.name, [other.name for other in self._remotes.values() if not other.is_away]),
        )

    @property
    def _reserve(self) -> int:
        """Samples that each server is to keep for this reader: enough for the batches ahead, wherever they come
        from.
        """
        return self._batch_size * (self._ahead + 1)

    def _wait_for_more(self, there: list[_Remote], tables: list[NDArray[np.void]], now: float) -> None:
        self._last_shortage = (
            int(sum(int(table["reserved"].sum()) for table in tables)),
            sum(len(table) for table in tables),
        )
        for remote in there:
            remote.table = None
            remote.again_at = now + ASK_AGAIN

    def _ask(
        self, remote: _Remote, body: messages.Sums | messages.Draw, now: float, counts: NDArray[np.void] = NOTHING
    ) -> int:
        if now < remote.again_at:
            return 0
        if not remote.open:
            remote.asked_at = now
        number = next(self._numbers)
        remote.open[number] = counts
        answered = functools.partial(self._answered, remote, number)
        return remote.link.channel.ask(body, answered, home=remote.home, sequence=number)

    def _answered(self, remote: _Remote, number: int, answer: messages.Answer) -> None:
        remote.open.pop(number, None)
        remote.asked_at = time.monotonic()
        if isinstance(answer, Closed):
            return
        was_away, remote.is_away = remote.is_away, False
        said = answer.body if isinstance(answer, messages.Message) else None
        if isinstance(said, (messages.Summed, messages.Drawn)):
            remote.said(messages.unpack_sums(said.clients), time.monotonic())
            remote.epoch = said.epoch
            if remote.table is not None:
                entries = int(remote.table["positives"].sum())
                self._balance.heard(remote.name, said.epoch, said.standing, entries, len(remote.table))
            remote.is_finished = said.finished
            self._finished = all(other.is_finished for other in self._remotes.values()) or self._finished
        else:
            # It does not know this reader's run or home (any more): HELLO says what is true now.
            remote.again_at = time.monotonic() + ASK_AGAIN * 10
            self._look_soon()
        if was_away:
            _log.info("reader %s: server %s is back", self.reader_id.hex()[:8], remote.name)
        for made in self._rounds:
            if number in made.open:
                made.open.discard(number)
                if (
                    isinstance(said, messages.Drawn)
                    and isinstance(answer, messages.Message)
                    and answer.payload is not None
                ):
                    made.parts.append(answer.payload)
        self._finish_rounds()
        if self._is_hungry:
            self._begin(time.monotonic())

    def _finish_rounds(self) -> None:
        while self._rounds and not self._rounds[0].open:
            self._finish_round(self._rounds.pop(0))

    def _finish_round(self, made: _Round) -> None:
        """Weigh and shuffle what came: all of it is there."""
        try:
            held = [container.check(payload, made.layout, self._limits) for payload in made.parts]
            samples = sum(part.samples for part in held)
            self._short += max(0, made.wanted - samples)
            if samples < made.wanted:
                return  # a server had less than it said, or went away: these samples are lost, the next round is whole
            beta, seed = self._annealing.next(made.parameters), self._rng.getrandbits(64)
            drawn = caches.finish(made.plan, held, made.layout, made.parameters, seed, beta)
        except ProtocolError as error:
            self._wrong[error.code] = self._wrong.get(error.code, 0) + 1
            self._look_soon()  # perhaps parameters changed
            return
        with self._changed:
            if len(drawn.importance) == self._batch_size:
                self._ready.append(drawn)
                self._samples += samples
            self._changed.notify_all()

    # Telling

    def _send_feedback(self, ids: NDArray[Any], errors: NDArray[np.float32]) -> None:
        """To each server those of its own clients."""
        owners, left = _clients(ids), np.ones(len(ids), bool)
        deadline = time.monotonic() + self._limits.request_timeout
        for remote in self._remotes.values():
            mine = left & np.isin(owners, remote.clients)
            left &= ~mine
            if mine.any():
                for piece in np.array_split(np.flatnonzero(mine), -(-mine.sum() // FEEDBACK_PIECE)):
                    payload = container.pack_feedback(self.schema, ids[piece], errors[piece])
                    taken = functools.partial(self._feedback_taken, len(piece))
                    remote.link.channel.ask(messages.Feedback(), taken, deadline, payload=payload, home=remote.home)
        self._feedback_lost += int(left.sum())

    def _feedback_taken(self, samples: int, answer: messages.Answer) -> None:
        said = answer.body if isinstance(answer, messages.Message) else None
        self._feedback_lost += said.lost if isinstance(said, messages.Taken) else samples

    def _at_end(self) -> None:
        for link in self._links:
            link.channel.close(Closed("this reader"))


def _checked_partition(given: Any) -> tuple[int, int]:
    """Which learner of how many; the only one where nothing is given.

    Raises:
        ParameterError: it is none.
    """
    if given is None:
        return 0, 1
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2
    if not is_pair or type(given[0]) is not int or type(given[1]) is not int or not 0 <= given[0] < given[1] < 1 << 32:
        raise ParameterError("partition", given, "(i, n): learner i, counted from 0, of n")
    return given[0], given[1]


def _server_accounts(said: messages.Accounts, rows: Rows) -> ServerAccounts:
    return ServerAccounts(
        said.run_name,
        rows,
        said.finished,
        said.durable,
        tuple(said.runs),
        said.epoch,
        said.time,
        applied=said.applied,
        stale=said.stale,
    )


def _clients(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """Client ids of rows as numbers that compare: half of their random bits, which is enough to tell clients apart."""
    return np.ascontiguousarray(rows["client"][:, 0], np.uint64)


def _publish_body(model: Model, offset: int) -> messages.Publish:
    """The facts of a model that is on its way to a server."""
    return messages.Publish(
        topic=model.topic,
        size=model.size,
        sha256=model.digest,
        text=model.is_text,
        version=model.version,
        offset=offset,
    )


def _plain(changes: dict[str, Any]) -> dict[str, Any]:
    """Parameters as they travel: tuples and arrays become lists, and lists are copies."""
    return {
        name: np.asarray(value).tolist() if isinstance(value, (tuple, np.ndarray)) else copy.deepcopy(value)
        for name, value in changes.items()
    }


def _told(server: str, answer: messages.Body | MemoireError, timeout: float) -> messages.Snapshot | MemoireError:
    """What came of the order of a snapshot at a server."""
    if isinstance(answer, MemoireError):
        return answer
    if not isinstance(answer, messages.Snapshot):
        return Refused(server, "unexpected", f"answered {answer}")
    if answer.state == "writing":
        advice = "It goes on writing; `memoire snapshot --show FILE` reads the file when it is there."
        return MemoireTimeout(f"snapshot {answer.name!r}", server, timeout, advice)
    return answer if answer.state == "done" else Refused(server, answer.state, answer.text)
