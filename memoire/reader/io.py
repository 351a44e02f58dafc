"""The reader's thread: it carries what the other files decide to the servers, and the answers back.

                         ┌ directory    HELLO      WELCOME ┐
    calls ── post ──▶    │ rounds       SUMS, DRAW         │ ◀──▶ channels, one for each address
                         │ takes        TAKE               │
          ◀── notify ──  │ publishing   PUBLISH            │      (io_channels)
        (monitor)        └ feedback     FEEDBACK           ┘

The parts in the middle decide, and belong to the thread; what calls read of them while it goes on is replaced as a
whole, or changed under the monitor's lock.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire.errors import Closed, MemoireError, MemoireTimeout, NotEnoughSamples, ParameterError, SchemaMismatch
from memoire.limits import Limits
from memoire.net.context import Context
from memoire.net.thread import NodeLock, Worker
from memoire.replay.parameters import Parameters, check_batch
from memoire.security.keys import Keys
from memoire.tables import registry as kinds
from memoire.tables.base import HandsOutOnce
from memoire.tables.draws import PooledBatch
from memoire.tables.far import FarServer
from memoire.tables.rollouts.far import Takes
from memoire.wire import messages
from memoire.wire.frames import Answer, Message, MessageHeader, welcome_of

from .directory import Address, Directory, FeedbackRouter, RemoteServer, RunChange
from .io_channels import Channels, Finish, Taker
from .publishing import Publisher, Publishing
from .rounds import BatchQueue, ClientPartition, DrawRequest, Rounds

_log = logging.getLogger(__name__)


class ReaderThread:
    """Owns the thread and the parts that decide.

    Args:
        urls: Addresses of servers, proxies or both.
        reader_id: 16 bytes, the reader's own.
        hello: Makes what the reader says of itself. Called inside of the thread, which keeps the reader alive by it:
            one that nobody holds goes on, and the interpreter closes it at its end.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        reader_id: bytes,
        hello: Callable[[], messages.Hello],
        prefetch: BatchQueue,
        partition: ClientPartition,
        rng: random.Random,
        limits: Limits,
        keys: Keys | None,
        context: Context | None,
    ) -> None:
        numbers = itertools.count(1)
        self.monitor, self.prefetch = NodeLock("this reader"), prefetch
        self.directory = Directory(urls, reader_id.hex()[:8], self.monitor.now())
        self.rounds = Rounds(self.directory, prefetch, partition, limits=limits, numbers=numbers, rng=rng)
        self.publishing = Publishing(
            self.directory, min(limits.tuning.model_chunk, limits.tuning.request_bytes * 31 // 32)
        )
        self.takes = Takes(self.directory, limits)
        self.feedback = FeedbackRouter()
        self.worker = Worker("memoire-reader", self._turn, self._next_time, self._at_end)
        self._hello, self._name, self._limits = hello, reader_id.hex()[:8], limits
        self.channels = Channels(self.worker.doors, reader_id=reader_id, numbers=numbers, rng=rng, limits=limits)
        self.publisher = Publisher(self.publishing, self.worker, self.channels, self.monitor, self._leave_out)
        self.taker = Taker(self.takes, self.worker, self.channels, self.monitor, lambda: dict(self.publishing.versions))
        try:
            self.channels.open(self.directory.addresses, keys, context)
        except BaseException:
            self.worker.stop(0.0)
            raise

    # From any thread

    def post(self, function: Callable[[], None]) -> None:
        """Have the thread call this soon."""
        self.worker.post(function)

    def expect(self, is_done: Callable[[], bool], patience: float, what: str) -> None:
        """Wait for a condition, which is asked under the lock.

        Raises:
            AuthError: no address lets this process in.
            MemoireTimeout: it has not come true after these seconds.
        """
        if not self.monitor.wait(is_done, patience):
            channels = self.channels
            raise channels.denied or MemoireTimeout(what, channels.where, patience, channels.trouble())

    def await_batch(self, batch_size: int, patience: float) -> PooledBatch:
        """The next batch as soon as it is there; it stays the next one. Under the lock, given up while waiting."""
        self.monitor.check_open()
        if not len(self.prefetch):
            self.prefetch.starve()
            self.worker.wake()
        if not self.monitor.wait(lambda: self._is_ready(batch_size), patience, interval=float("inf")):
            raise self._shortage(batch_size, patience)
        return self.prefetch.first()

    def _is_ready(self, batch_size: int) -> bool:
        """Whether a batch of this size is there; if another size was asked for before, this one is drawn from now."""
        if (terms := self.directory.terms) is not None:
            if kinds.offers(terms.storage, HandsOutOnce):
                expected = "'caches' or 'episodes' for a batch: entries of rollouts are taken by take(steps)"
                raise ParameterError("storage", terms.storage, f"{expected}, table {terms.table!r}")
            check_batch(terms.parameters, batch_size)
        if self.prefetch.resize(batch_size):
            self.worker.wake()
        self.prefetch.check()
        return len(self.prefetch) > 0

    def taken(self) -> None:
        """A batch was given away: the thread looks whether to draw more."""
        if self.prefetch.has_room:
            self.worker.wake()

    @property
    def newest_model(self) -> int:
        """Version of the newest model of the table's topic, or of any if it has none; 0: there is none."""
        terms, versions = self.directory.terms, dict(self.publishing.versions)
        return 0 if terms is None else terms.parameters.newest_model(versions)

    def _shortage(self, batch_size: int, patience: float) -> MemoireError:
        if not self.directory.there:
            return MemoireTimeout("batch", self.channels.where, patience, self.channels.trouble())
        if (difference := self.directory.difference()) is not None:
            return difference
        samples, clients = self.rounds.shortage
        why, old = self.rounds.waits_for, ""
        if (terms := self.directory.terms) is not None:
            old = terms.parameters.lag_in_words(self.newest_model)
        if old and not why:
            why = f"{samples} unused samples of {clients} clients are held"
        return NotEnoughSamples(batch_size, samples, 0, clients, patience, why + old)

    def has_met(self) -> bool:
        """Whether every address has answered, or had its time. Raises AuthError where nobody lets this process in."""
        denied = self.channels.denied_for_good
        if self.directory.terms is None and denied is not None:
            raise denied
        return self.directory.has_met(self.monitor.now())

    # ----------------------------------------------------------------- from here on: inside of the thread alone

    def send(self, server: RemoteServer, body: messages.Body, finish: Finish, deadline: float, run: int | None) -> None:
        """Send a request to one server; see `Channels.ask`."""
        self.channels.ask(server, body, finish, deadline, run=run)

    def _next_time(self) -> float:
        parts = self.channels.next_time(), self.directory.next_time(), self.taker.next_time()
        return min(*parts, self.rounds.next_time(self.monitor.now()))

    def _turn(self, ready: dict[object, int]) -> None:
        self.channels.turn(ready)
        now = self.monitor.now()
        for address in self.directory.due(now):
            self._greet(address)
        down = self.channels.down()
        for server in (*self.rounds.late(now, down), *self.takes.late(now, down)):
            self._leave_out(server)
        self._deliver()  # batches of a former size make others
        self._begin(now)
        self.taker.turn()

    def _at_end(self) -> None:
        self.channels.close()

    # Who is there

    def _greet(self, address: Address) -> None:
        hello, deadline = self._hello(), address.hello.due  # when the next one is due
        self.channels.greet(address, hello, functools.partial(self._welcomed, address), deadline)
        # Each by itself: has it restarted, and lost what was published? If its parameters differ: in which one?
        for server in self.directory.known if self.publishing.is_used else self.directory.differing():
            if server.address is address:
                self.channels.ask(server, hello, functools.partial(self._greeted, server), deadline)

    def _greeted(self, server: RemoteServer, answer: Answer) -> None:
        said = answer.body if isinstance(answer, Message) else None
        if isinstance(said, messages.Welcome) and said.home_name == server.name:
            server.parameters = Parameters.from_wire(said.parameters)
            self._met(server, said.epoch)

    def _met(self, server: RemoteServer, epoch: int) -> None:
        self.publisher.met(server, has_restarted=self.directory.met(server, epoch))

    def _welcomed(self, address: Address, answer: Answer) -> None:
        address.hello.answered()
        if isinstance(answer, (Closed, MemoireTimeout)):
            return
        try:
            self._learn(address, *welcome_of(answer, address.endpoint))
        except MemoireError as error:
            self._not_welcome(error)

    def _not_welcome(self, error: MemoireError) -> None:
        """The first answer decides whether this reader can be used at all; later ones may be a server in between."""
        with self.monitor.changed:
            if self.directory.terms is None or isinstance(error, SchemaMismatch):
                self.monitor.failed = error
                self.monitor.changed.notify_all()
            else:
                _log.warning("reader %s: %s", self._name, error)

    def _learn(self, address: Address, header: MessageHeader, told: messages.Welcome) -> None:
        news = self.directory.learn(address, header, told, self.monitor.now())
        if news is None:
            return
        self._change_run(news.run)
        self.channels.learn(address, header, told)
        for server in news.dropped:
            self.rounds.forget(server)
            with self.monitor.changed:
                self.takes.forget(server)
        self._deliver()
        self.publishing.observe(news.models)
        if news.home is not None:
            self._met(news.home, news.epoch)
        with self.monitor.changed:
            if self.directory.agree(news.terms):
                self.prefetch.clear()
                self.rounds.give_up()
            self.directory.is_finished = self.directory.is_finished or told.finished
            self.monitor.changed.notify_all()

    def enter(self, run: int) -> None:
        """All servers count this run now: what is published from here on belongs to it."""
        for address, channel in self.channels.of.items():
            self._change_run(self.directory.enter(address, run))
            channel.run = run

    def _change_run(self, change: RunChange | None) -> None:
        if change is not None:
            with self.monitor.changed:
                self.publishing.enter(change)
                if change.is_first:
                    self.takes.clear()
            if change.is_first:
                self.rounds.balance.reset()

    def _leave_out(self, server: FarServer) -> None:
        self.rounds.leave_out(server)
        with self.monitor.changed:
            self.takes.leave_out(server)
        self._deliver()

    # Drawing, and what comes of it

    def _begin(self, now: float) -> None:
        for ask in self.rounds.begin(now):
            self.channels.ask(ask.server, ask.body, functools.partial(self._answered, ask), sequence=ask.number)

    def _answered(self, ask: DrawRequest, answer: Answer) -> None:
        if isinstance(answer, Closed):
            return
        was_away, now = ask.server.is_away, self.monitor.now()
        self.rounds.answered(ask, answer, now)
        if was_away:
            _log.info("reader %s: server %s is back", self._name, ask.server.name)
        if self.prefetch.failed is not None:
            with self.monitor.changed:
                self.monitor.changed.notify_all()
        self._deliver()
        self._begin(now)

    def _deliver(self) -> None:
        """Hand over the batches that are whole."""
        for drawn in self.rounds.finished():
            with self.monitor.changed:
                self.prefetch.put(drawn)
                self.monitor.changed.notify_all()

    def give_feedback(self, ids: NDArray[Any], errors: NDArray[np.float32]) -> None:
        """Send TD errors to the servers of their samples: [B] ids and [B] errors."""
        terms, deadline = self.directory.terms, self.monitor.now() + self._limits.request_timeout
        schema = None if terms is None else terms.schema
        for piece in self.feedback.route(ids, errors, schema, self.rounds.clients()):
            answered = functools.partial(self.feedback.answered, piece)
            self.channels.ask(piece.server, messages.Feedback(), answered, deadline, payload=piece.payload)
