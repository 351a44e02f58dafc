"""The reader's thread: it carries what the other files decide to the servers, and the answers back.

                         ┌ directory    HELLO      WELCOME ┐
    calls ── post ──▶    │ rounds       SUMS, DRAW         │ ◀──▶ channels, one for each address
                         │ sides        TAKE               │
          ◀── notify ──  │ publishing   PUBLISH            │
        (monitor)        └ feedback     FEEDBACK           ┘

The parts in the middle decide, and belong to the thread; what calls read of them while it goes on is replaced as a
whole, or changed under the monitor's lock.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from memoire._core import Held
from memoire.errors import (
    AuthError,
    Closed,
    MemoireError,
    MemoireTimeout,
    NotEnoughSamples,
    ParameterError,
    SchemaMismatch,
)
from memoire.limits import Limits
from memoire.models.model import Model
from memoire.net.channel import Channel
from memoire.net.sockets import Context, shared_context
from memoire.net.thread import NodeLock, Worker
from memoire.replay.parameters import Parameters, check_batch
from memoire.security.keys import Keys
from memoire.tables import registry
from memoire.tables.base import DrawsBatches, TakeRequest
from memoire.tables.calls import FarRequest, FarServer, FarSide
from memoire.tables.draws import PooledBatch
from memoire.wire import messages
from memoire.wire.frames import Answer, Message, MessageHeader, welcome_of

from .directory import Address, Directory, FeedbackRouter, RemoteServer, RunChange
from .publishing import Publishing, PublishOrder, Send
from .rounds import BatchQueue, DrawRequest, Rounds

_log = logging.getLogger(__name__)

ANSWER_GRACE = 1.0
"""Seconds beyond a request's deadline in which the thread has to say that nobody answered."""
K = TypeVar("K")


class ReaderThread:
    """Owns the thread and the parts that decide.

    Args:
        urls: Addresses of servers, proxies or both.
        reader_id: 16 bytes, the reader's own.
        hello: Makes what the reader says of itself. Called inside of the thread, which keeps the reader alive by it:
            one that nobody holds goes on, and the interpreter closes it at its end.
        called: What errors call it.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        reader_id: bytes,
        hello: Callable[[], messages.Hello],
        prefetch: BatchQueue,
        partition: tuple[int, int],
        rng: random.Random,
        limits: Limits,
        keys: Keys | None,
        context: Context | None,
        called: str = "this reader",
    ) -> None:
        numbers = itertools.count(1)
        self.monitor, self.prefetch = NodeLock(called), prefetch
        self.directory = Directory(urls, reader_id.hex()[:8], self.monitor.now())
        self.rounds = Rounds(self.directory, prefetch, partition, limits=limits, numbers=numbers, rng=rng)
        self.publishing = Publishing(
            self.directory, min(limits.tuning.model_chunk, limits.tuning.request_bytes * 31 // 32)
        )
        self.feedback = FeedbackRouter()
        self.worker = Worker("memoire-reader", self._turn, self._next_time, self._at_end)
        self._hello, self._name, self.limits = hello, reader_id.hex()[:8], limits
        self.publisher, self.sides = Publisher(self), Sides(self)
        facts: dict[str, Any] = {"client": reader_id, "limits": limits, "rng": rng, "numbers": numbers, "keys": keys}
        self.channels: dict[Address, Channel] = {}
        """The channel of each address."""
        try:
            for address in self.directory.addresses:
                endpoint = address.endpoint
                self.channels[address] = Channel(self.worker.doors, context or shared_context(), endpoint, **facts)
        except BaseException:
            self.worker.stop(0.0)
            raise

    # From any thread

    @property
    def where(self) -> str:
        """The addresses, as errors name them."""
        return ", ".join(address.endpoint for address in self.channels)

    def trouble(self, *, probe: bool = True) -> str:
        """Why the first address may not answer and what to do. Tries to connect, which takes 0.2 s at most."""
        return next(iter(self.channels.values())).link.explain(probe=probe)

    @property
    def denied(self) -> AuthError | None:
        """Why nobody can answer: every address that is not away does not let this process in."""
        found = [channel.link.denied for channel in self.channels.values()]
        return found[0] if all(found) else None

    def gather(
        self, begin: Callable[[Callable[[K, Answer], None]], Collection[K]], patience: float
    ) -> tuple[dict[K, Answer], bool]:
        """The answers to some requests, by their keys, and whether all are there.

        Args:
            begin: Called inside of the thread: sends the requests, and returns their keys. It is called with what
                takes the answer to each.
            patience: Seconds that it may take.
        """
        answers: dict[K, Answer] = {}
        asked: list[Collection[K]] = []

        def settle(key: K, answer: Answer) -> None:
            with self.monitor.changed:
                answers[key] = answer
                self.monitor.changed.notify_all()

        def start() -> None:
            keys = begin(settle)
            with self.monitor.changed:
                asked.append(keys)
                self.monitor.changed.notify_all()

        self.worker.post(start)
        is_whole = self.monitor.wait(lambda: bool(asked) and len(answers) == len(asked[0]), patience)
        return answers, is_whole

    def expect(self, is_done: Callable[[], bool], patience: float, what: str) -> None:
        """Wait for a condition, which is asked under the lock.

        Raises:
            AuthError: no address lets this process in.
            MemoireTimeout: it has not come true after these seconds.
        """
        if not self.monitor.wait(is_done, patience):
            raise self.silence(what, patience)

    def silence(self, what: str, patience: float) -> MemoireError:
        """Why nothing came in so many seconds."""
        return self.denied or MemoireTimeout(what, self.where, patience, self.trouble())

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
            if not registry.offers(terms.storage, DrawsBatches):
                names, kind = registry.names_of(DrawsBatches), registry.named(terms.storage)
                expected = f"{' or '.join(map(repr, names))} for a batch; of table {terms.table!r} use {kind.instead}"
                raise ParameterError("storage", terms.storage, expected)
            check_batch(terms.parameters, batch_size)
        if self.prefetch.resize(batch_size):
            self.worker.wake()
        self.prefetch.check()
        return len(self.prefetch) > 0

    @property
    def newest_model(self) -> int:
        """Version of the newest model of the table's topic, or of any if it has none; 0: there is none."""
        terms, versions = self.directory.terms, dict(self.publishing.versions)
        return 0 if terms is None else terms.parameters.newest_model(versions)

    def _shortage(self, batch_size: int, patience: float) -> MemoireError:
        if not self.directory.there:
            return MemoireTimeout("batch", self.where, patience, self.trouble())
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
        denied = [channel.denied_for_good for channel in self.channels.values()]
        if self.directory.terms is None and denied[0] is not None and all(denied):
            raise denied[0]
        return self.directory.has_met(self.monitor.now())

    # ----------------------------------------------------------------- from here on: inside of the thread alone

    def ask(
        self,
        server: FarServer,
        body: messages.Body,
        finish: Callable[[Answer], None],
        deadline: float = math.inf,
        **facts: Any,
    ) -> None:
        """Send a request to one server; `finish` gets its reply, or the error that ends it.

        Args:
            facts: As of `Channel.ask`: `run` is the hash of the run that it is about, 0 whichever the server counts.
        """
        self.channels[server.address].ask(body, finish, deadline, home=server.home, **facts)

    def _next_time(self) -> float:
        times = [channel.next_time() for channel in self.channels.values()]
        times += [self.directory.next_time(), self.sides.next_time(), self.rounds.next_time(self.monitor.now())]
        return min(times)

    def _turn(self, ready: dict[object, int]) -> None:
        for channel in self.channels.values():
            channel.turn(ready)
        now = self.monitor.now()
        for address in self.directory.due(now):
            self._greet(address)
        down = [address for address, channel in self.channels.items() if channel.link.is_down]
        for server in (*self.rounds.late(now, down), *self.sides.late(now, down)):
            self.leave_out(server)
        self._deliver()  # batches of a former size make others
        self._begin(now)
        self.sides.turn()

    def _at_end(self) -> None:
        for channel in self.channels.values():
            channel.close(Closed("this reader"))

    # Who is there

    def _greet(self, address: Address) -> None:
        hello, deadline = self._hello(), address.hello.due  # when the next one is due
        # Any server there may answer: behind a proxy another one does where the former one is away.
        self.channels[address].ask(hello, functools.partial(self._welcomed, address), deadline, home=0)
        # Each by itself: has it restarted, and lost what was published? If its parameters differ: in which one?
        for server in self.directory.known if self.publishing.is_used else self.directory.differing():
            if server.address is address:
                self.ask(server, hello, functools.partial(self._greeted, server), deadline)

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
        terms, run, dropped = news
        self._change_run(run)
        self.channels[address].learned(header, told)
        for server in dropped:
            self.rounds.forget(server)
            self.sides.forget(server)
        self._deliver()
        self.publishing.observe(told.models)
        if (home := self.directory.servers.get(told.home_name)) is not None:
            self._met(home, told.epoch)
        with self.monitor.changed:
            if self.directory.agree(terms):
                self.prefetch.clear()
                self.rounds.give_up()
            self.directory.is_finished = self.directory.is_finished or told.finished
            self.monitor.changed.notify_all()

    def enter(self, run: int) -> None:
        """All servers count this run now: what is published from here on belongs to it."""
        for address, channel in self.channels.items():
            self._change_run(self.directory.enter(address, run))
            channel.run = run

    def _change_run(self, change: RunChange | None) -> None:
        if change is not None:
            with self.monitor.changed:
                self.publishing.enter(change)
                if change.is_first:
                    self.sides.clear()
            if change.is_first:
                self.rounds.balance.reset()

    def leave_out(self, server: FarServer) -> None:
        """It did not answer in time."""
        self.rounds.leave_out(server)
        self.sides.leave_out(server)
        self._deliver()

    # Drawing, and what comes of it

    def _begin(self, now: float) -> None:
        for ask in self.rounds.begin(now):
            self.ask(ask.stock.server, ask.body, functools.partial(self._answered, ask), sequence=ask.number)

    def _answered(self, ask: DrawRequest, answer: Answer) -> None:
        if isinstance(answer, Closed):
            return
        was_away, now = ask.stock.server.is_away, self.monitor.now()
        self.rounds.answered(ask, answer, now)
        if was_away:
            _log.info("reader %s: server %s is back", self._name, ask.stock.server.name)
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
        terms, deadline = self.directory.terms, self.monitor.now() + self.limits.request_timeout
        schema = None if terms is None else terms.schema
        clients = ((server, self.rounds.stock(server).clients) for server in self.directory.known)
        for piece in self.feedback.route(ids, errors, schema, clients):
            answered = functools.partial(self.feedback.answered, piece)
            self.ask(piece.server, messages.Feedback(), answered, deadline, payload=piece.payload)


class Sides:
    """Carries what the sides of kinds of tables decide to and from the servers; one wait serves all."""

    def __init__(self, thread: ReaderThread) -> None:
        self._thread, self._monitor, directory = thread, thread.monitor, thread.directory
        self.of: Mapping[str, FarSide] = {
            kind.name: registry.loaded(kind.far)(directory, thread.limits) for kind in registry.known() if kind.far
        }
        """The sides, by kind of table."""
        self._one_call = threading.Lock()  # held for as long as a call waits: one after the other

    def offering(self, capability: type) -> FarSide:
        """The side of the kind of table that can do this."""
        return next(side for storage, side in self.of.items() if registry.offers(storage, capability))

    def take(self, side: FarSide, wanted: TakeRequest, patience: float) -> list[Any]:
        """What a call wants, oldest first, as soon as all is there. See `Reader.take`."""
        deadline = self._monitor.now() + patience
        with Held.within(self._one_call, patience) as is_mine:
            if not is_mine:
                raise NotEnoughSamples(wanted.steps, 0, 0, 0, patience, "another thread's take of this reader waits")
            return self._take(side, wanted, patience, self._monitor.left(deadline))

    def _take(self, side: FarSide, wanted: TakeRequest, patience: float, left: float) -> list[Any]:
        taken: list[Any] = []

        def is_whole() -> bool:
            taken.extend(side.take(dict(self._thread.publishing.versions)))
            return bool(taken)

        with self._monitor.changed:
            side.want(wanted)
        self._thread.worker.wake()
        try:
            if not self._monitor.wait(is_whole, left):
                raise self._shortage(side, wanted, patience)
        finally:
            with self._monitor.changed:
                side.want(None)
        return taken

    def _shortage(self, side: FarSide, wanted: TakeRequest, patience: float) -> MemoireError:
        if not self._thread.directory.there:
            return self._thread.silence(side.CALLED, patience)
        with self._monitor.changed:
            entries, parts, clients, why = side.why_not()
        return NotEnoughSamples(wanted.steps, entries, parts, clients, patience, why)

    # Inside of the thread

    def next_time(self) -> float:
        """When a turn has something to do."""
        with self._monitor.changed:
            now = self._monitor.now()
            return min((side.next_time(now) for side in self.of.values()), default=math.inf)

    def turn(self) -> None:
        """Ask what is to be asked."""
        for side in self.of.values():
            with self._monitor.changed:
                requests = side.begin(self._monitor.now())
            for request in requests:
                # Without a deadline: what a server hands out it keeps for this request alone, until the next one.
                self._thread.ask(request.server, request.body, functools.partial(self._answered, side, request))

    def _answered(self, side: FarSide, request: FarRequest, answer: Answer) -> None:
        if isinstance(answer, Closed):
            return
        now, was_away = self._monitor.now(), request.server.is_away
        came = side.read(answer, now)
        with self._monitor.changed:
            side.answered(request, answer, came, now)
            self._monitor.changed.notify_all()
        if was_away:
            _log.info("server %s is back", request.server.name)
        self.turn()

    def late(self, now: float, down: Collection[object]) -> list[FarServer]:
        """Servers that no call waits for any longer; `down` are addresses that surely have no connection."""
        return [server for side in self.of.values() for server in side.late(now, down)]

    def leave_out(self, server: FarServer) -> None:
        """It did not answer in time."""
        with self._monitor.changed:
            for side in self.of.values():
                side.leave_out(server)

    def forget(self, server: FarServer) -> None:
        """It is on no list any more."""
        with self._monitor.changed:
            for side in self.of.values():
                side.forget(server)

    def clear(self) -> None:
        """Another run is counted. Under the lock."""
        for side in self.of.values():
            side.clear()


class Publisher:
    """Carries what `Publishing` decides to and from the servers."""

    def __init__(self, thread: ReaderThread) -> None:
        self._thread, self._publishing, self._monitor = thread, thread.publishing, thread.monitor

    def publish(self, made: Model, patience: float) -> int:
        """Publish a model at every server; its version when all that answer have it. See `Reader.publish`."""
        began, orders = self._monitor.now(), list[PublishOrder]()
        self._thread.worker.post(lambda: self._start(made, began, orders))
        is_taken = self._monitor.wait(
            lambda: bool(orders) and self._publishing.is_taken(orders[0], self._monitor.now()), patience
        )
        missing = self._give_up(orders, made.topic)
        if not is_taken:
            raise self._not_published(made.topic, missing, patience)
        with self._monitor.changed:
            refusal = self._publishing.refusal(orders[0])
            put_off = self._publishing.put_off(missing, made.topic)
        if refusal is not None:
            raise refusal
        for sentence in put_off:
            _log.warning("topic %r is published, but not everywhere yet. %s", made.topic, sentence)
        return orders[0].model.version

    def _give_up(self, orders: list[PublishOrder], topic: str) -> list[RemoteServer]:
        """Servers that do not have it. The next model does not wait for those that said nothing at all about this
        one.
        """
        with self._monitor.changed:
            missing = self._publishing.missing(orders[0]) if orders else []
        if missing:
            self._thread.worker.post(lambda: self._leave_silent(missing, topic))
        return missing

    def _not_published(self, topic: str, missing: list[RemoteServer], patience: float) -> MemoireTimeout:
        names = ", ".join(repr(server.name) for server in missing)
        what = f"model of topic {topic!r} at server {names}" if missing else f"answer to a model of topic {topic!r}"
        advice = "It goes on being sent while this reader is open; a server that is back gets the newest."
        with self._monitor.changed:
            put_off = self._publishing.put_off(missing, topic)
        why = put_off if missing else [self._thread.trouble(probe=False)]
        return MemoireTimeout(what, self._thread.where, patience, " ".join([*why, advice]))

    # Inside of the thread

    def met(self, server: RemoteServer, *, has_restarted: bool) -> None:
        """A server is there: send it what it does not have."""
        with self._monitor.changed:
            sends = self._publishing.met(server, has_restarted)
        self._send(sends)

    def _start(self, made: Model, began: float, orders: list[PublishOrder]) -> None:
        with self._monitor.changed:
            order, sends = self._publishing.publish(made, began)
            orders.append(order)
            self._monitor.changed.notify_all()
        self._send(sends)

    def _send(self, sends: list[Send]) -> None:
        for send in sends:
            # Without a deadline: a call that waits for it gives up by itself, and the server may come back.
            finish = functools.partial(self._sent, send)
            checksum = send.payload_checksum
            self._thread.ask(send.server, send.body, finish, payload=send.payload, payload_checksum=checksum)

    def _sent(self, send: Send, answer: Answer) -> None:
        with self._monitor.changed:
            sends = self._publishing.answered(send, answer)
            self._monitor.changed.notify_all()
        self._send(sends)

    def _leave_silent(self, servers: list[RemoteServer], topic: str) -> None:
        for server in self._publishing.silent(servers, topic):
            self._thread.leave_out(server)
