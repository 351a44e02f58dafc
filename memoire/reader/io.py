"""Reader's thread: carries requests of the deciding parts to the servers, and their answers back.

                         ┌ directory    HELLO      WELCOME ┐
    calls ── post ──▶    │ rounds       SUMS, DRAW         │ ◀──▶ channels, one for each address
                         │ sides        TAKE               │
          ◀── notify ──  │ publishing   PUBLISH            │
        (monitor)        └ feedback     FEEDBACK           ┘

The parts in the middle decide, and belong to the thread. State that calls read meanwhile is replaced as a whole, or
changed under the monitor's lock.
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
from memoire.tables.calls import LearnerSide, ServerRequest, TableServer
from memoire.tables.draws import PooledBatch
from memoire.wire import messages
from memoire.wire.frames import Answer, Message, MessageHeader, welcome_of

from .directory import Address, Directory, FeedbackRouter, RemoteServer, RunChange
from .publishing import Publishing, PublishOrder, Send
from .rounds import BatchQueue, DrawRequest, Rounds

_log = logging.getLogger(__name__)

ANSWER_GRACE = 1.0
"""Seconds after a request's deadline in which the thread has to report the timeout."""
K = TypeVar("K")


class ReaderThread:
    """Owner of the reader's thread, its channels and the deciding parts.

    Args:
        urls: Addresses of servers, proxies or both.
        reader_id: The reader's own 16 bytes.
        hello: Returns the reader's HELLO. Called in the thread, whose reference keeps the reader alive: an
            unreferenced reader continues until the interpreter closes it at exit.
        called: Name of the reader for errors.
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
        self.publisher, self.sides = ModelSender(self), TableKindCalls(self)
        facts: dict[str, Any] = {"client": reader_id, "limits": limits, "rng": rng, "numbers": numbers, "keys": keys}
        self.channels: dict[Address, Channel] = {}
        """Channels to the servers, by address."""
        try:
            for address in self.directory.addresses:
                endpoint = address.endpoint
                self.channels[address] = Channel(self.worker.poller, context or shared_context(), endpoint, **facts)
        except BaseException:
            self.worker.stop(0.0)
            raise

    # Calls from any thread

    @property
    def addresses_text(self) -> str:
        """Addresses of the reader, comma-separated, for errors."""
        return ", ".join(address.endpoint for address in self.channels)

    def problem(self, *, probe: bool = True) -> str:
        """Return why the first address may not answer, and advice. `probe` tries to connect, for at most 0.2 s."""
        return next(iter(self.channels.values())).link.explain(probe=probe)

    @property
    def denied(self) -> AuthError | None:
        """Error of access if every address that is not away refuses this process's key; else None."""
        denials = [channel.link.denied for channel in self.channels.values()]
        return denials[0] if all(denials) else None

    def gather(
        self, begin: Callable[[Callable[[K, Answer], None]], Collection[K]], patience: float
    ) -> tuple[dict[K, Answer], bool]:
        """Send requests; return their answers by key, and True if all have come.

        Args:
            begin: Called in the thread with a function that takes each answer: sends the requests, and returns their
                keys.
            patience: Maximum seconds to wait.
        """
        answers: dict[K, Answer] = {}
        asked: list[Collection[K]] = []

        def record_answer(key: K, answer: Answer) -> None:
            with self.monitor.condition:
                answers[key] = answer
                self.monitor.condition.notify_all()

        def start() -> None:
            keys = begin(record_answer)
            with self.monitor.condition:
                asked.append(keys)
                self.monitor.condition.notify_all()

        self.worker.post(start)
        is_whole = self.monitor.wait(lambda: bool(asked) and len(answers) == len(asked[0]), patience)
        return answers, is_whole

    def wait_until(self, is_done: Callable[[], bool], patience: float, what: str) -> None:
        """Wait for a condition, which is evaluated under the lock.

        Raises:
            AuthError: no address accepts this process's key.
            MemoireTimeout: the condition is false after `patience` seconds.
        """
        if not self.monitor.wait(is_done, patience):
            raise self.no_answer_error(what, patience)

    def no_answer_error(self, what: str, patience: float) -> MemoireError:
        """Return the error for a call that got no answer within `patience` seconds."""
        return self.denied or MemoireTimeout(what, self.addresses_text, patience, self.problem())

    def await_batch(self, batch_size: int, patience: float) -> PooledBatch:
        """Wait for the next batch and return it without removing it. Called with the lock held; a wait releases it."""
        self.monitor.check_open()
        if not len(self.prefetch):
            self.prefetch.record_empty_queue()
            self.worker.wake()
        if not self.monitor.wait(lambda: self._is_ready(batch_size), patience, interval=float("inf")):
            raise self._shortage(batch_size, patience)
        return self.prefetch.first()

    def _is_ready(self, batch_size: int) -> bool:
        """Return True if a batch of this size is ready; if the size is new, draw batches of this size from now on."""
        if (terms := self.directory.terms) is not None:
            if not registry.has_capability(terms.storage, DrawsBatches):
                names, kind = registry.names_of(DrawsBatches), registry.require_kind(terms.storage)
                raise ParameterError.with_text(
                    f"Batches are drawn from tables with storage={' or '.join(map(repr, names))}, but table "
                    f"{terms.table!r} has storage={terms.storage!r}: use {kind.instead}."
                )
            check_batch(terms.parameters, batch_size)
        if self.prefetch.resize(batch_size):
            self.worker.wake()
        self.prefetch.check()
        return len(self.prefetch) > 0

    @property
    def newest_model(self) -> int:
        """Version of the newest model of the table's topic, or of any topic if the table has none; 0: no model."""
        terms, versions = self.directory.terms, dict(self.publishing.versions)
        return 0 if terms is None else terms.parameters.newest_model(versions)

    def _shortage(self, batch_size: int, patience: float) -> MemoireError:
        if not self.directory.present_servers:
            return MemoireTimeout("batch", self.addresses_text, patience, self.problem())
        if (difference := self.directory.parameter_mismatch()) is not None:
            return difference
        samples, clients = self.rounds.shortage
        why, old = self.rounds.waits_for, ""
        if (terms := self.directory.terms) is not None:
            old = terms.parameters.lag_in_words(self.newest_model)
        if old and not why:
            why = f"{samples} unused samples of {clients} clients are held"
        return NotEnoughSamples(batch_size, samples, 0, clients, patience, why + old)

    def is_discovery_over(self) -> bool:
        """Return True if every address has answered or had its time. Raises AuthError if all refuse the key."""
        denied = [channel.denied_for_good for channel in self.channels.values()]
        if self.directory.terms is None and denied[0] is not None and all(denied):
            raise denied[0]
        return self.directory.is_discovery_over(self.monitor.now())

    # ----------------------------------------------------------------- from here on: in the thread only

    def ask(
        self,
        server: TableServer,
        body: messages.Body,
        finish: Callable[[Answer], None],
        deadline: float = math.inf,
        **facts: Any,
    ) -> None:
        """Send a request to one server; `finish` gets the reply, or the error that ends the request.

        Args:
            facts: Further arguments of `Channel.ask`, such as `run`: hash of the request's run; 0 is any run.
        """
        self.channels[server.address].ask(body, finish, deadline, home=server.home, **facts)

    def _next_time(self) -> float:
        times = [channel.next_time() for channel in self.channels.values()]
        times += [self.directory.next_time(), self.sides.next_time(), self.rounds.next_time(self.monitor.now())]
        return min(times)

    def _turn(self, ready: dict[object, int]) -> None:
        for channel in self.channels.values():
            channel.tick(ready)
        now = self.monitor.now()
        for address in self.directory.due_addresses(now):
            self._greet(address)
        down = [address for address, channel in self.channels.items() if channel.link.is_down]
        for server in (*self.rounds.late_servers(now, down), *self.sides.late_servers(now, down)):
            self.leave_out(server)
        self._deliver()  # samples of a former size make new batches
        self._begin(now)
        self.sides.tick()

    def _at_end(self) -> None:
        for channel in self.channels.values():
            channel.close(Closed("this reader"))

    # Servers

    def _greet(self, address: Address) -> None:
        hello, deadline = self._hello(), address.hello.due  # time of the next HELLO
        # Any server may answer: behind a proxy another server answers if the former server is away.
        self.channels[address].ask(hello, functools.partial(self._welcomed, address), deadline, home=0)
        # HELLO goes to each server: a restarted server may lack the published models, or have other parameters.
        for server in (
            self.directory.known_servers if self.publishing.has_published else self.directory.differing_servers()
        ):
            if server.address is address:
                self.ask(server, hello, functools.partial(self._greeted, server), deadline)

    def _greeted(self, server: RemoteServer, answer: Answer) -> None:
        welcome = answer.body if isinstance(answer, Message) else None
        if isinstance(welcome, messages.Welcome) and welcome.home_name == server.name:
            server.parameters = Parameters.from_wire(welcome.parameters)
            self._met(server, welcome.epoch)

    def _met(self, server: RemoteServer, epoch: int) -> None:
        self.publisher.send_missing(server, has_restarted=self.directory.record_epoch(server, epoch))

    def _welcomed(self, address: Address, answer: Answer) -> None:
        address.hello.receive_answer()
        if isinstance(answer, (Closed, MemoireTimeout)):
            return
        try:
            self._learn(address, *welcome_of(answer, address.endpoint))
        except MemoireError as error:
            self._reject_welcome(error)

    def _reject_welcome(self, error: MemoireError) -> None:
        """Fail the reader by an error of its first answer or schema; only log later errors."""
        with self.monitor.condition:
            if self.directory.terms is None or isinstance(error, SchemaMismatch):
                self.monitor.failed = error
                self.monitor.condition.notify_all()
            else:
                _log.warning("reader %s: %s", self._name, error)

    def _learn(self, address: Address, header: MessageHeader, welcome: messages.Welcome) -> None:
        news = self.directory.apply_welcome(address, header, welcome, self.monitor.now())
        if news is None:
            return
        terms, run, dropped = news
        self._change_run(run)
        self.channels[address].apply_welcome(header, welcome)
        for server in dropped:
            self.rounds.forget(server)
            self.sides.forget(server)
        self._deliver()
        self.publishing.observe(welcome.models)
        if (home := self.directory.servers.get(welcome.home_name)) is not None:
            self._met(home, welcome.epoch)
        with self.monitor.condition:
            if self.directory.set_terms(terms):
                self.prefetch.clear()
                self.rounds.drop_rounds()
            self.directory.is_finished = self.directory.is_finished or welcome.finished
            self.monitor.condition.notify_all()

    def enter_run(self, run: int) -> None:
        """Enter a run that all servers count now: later published models belong to it."""
        for address, channel in self.channels.items():
            self._change_run(self.directory.set_run(address, run))
            channel.run = run

    def _change_run(self, change: RunChange | None) -> None:
        if change is not None:
            with self.monitor.condition:
                self.publishing.enter_run(change)
                if change.is_first:
                    self.sides.clear()
            if change.is_first:
                self.rounds.balance.reset()

    def leave_out(self, server: TableServer) -> None:
        """Draw without a server that did not answer in time."""
        self.rounds.leave_out(server)
        self.sides.leave_out(server)
        self._deliver()

    # Draws and replies to draws

    def _begin(self, now: float) -> None:
        for ask in self.rounds.begin(now):
            self.ask(ask.stock.server, ask.body, functools.partial(self._answered, ask), sequence=ask.number)

    def _answered(self, ask: DrawRequest, answer: Answer) -> None:
        if isinstance(answer, Closed):
            return
        was_away, now = ask.stock.server.is_away, self.monitor.now()
        self.rounds.receive_answer(ask, answer, now)
        if was_away:
            _log.info("reader %s: server %s is back", self._name, ask.stock.server.name)
        if self.prefetch.failed is not None:
            with self.monitor.condition:
                self.monitor.condition.notify_all()
        self._deliver()
        self._begin(now)

    def _deliver(self) -> None:
        for drawn in self.rounds.finished():
            with self.monitor.condition:
                self.prefetch.put(drawn)
                self.monitor.condition.notify_all()

    def give_feedback(self, ids: NDArray[Any], errors: NDArray[np.float32]) -> None:
        """Send TD errors [B] of samples with these ids [B] to the samples' servers."""
        terms, deadline = self.directory.terms, self.monitor.now() + self.limits.request_timeout
        schema = None if terms is None else terms.schema
        clients = ((server, self.rounds.stock(server).clients) for server in self.directory.known_servers)
        for piece in self.feedback.route(ids, errors, schema, clients):
            answered = functools.partial(self.feedback.receive_answer, piece)
            self.ask(piece.server, messages.Feedback(), answered, deadline, payload=piece.payload)


class TableKindCalls:
    """Carrier of requests and answers of the kinds of tables with calls of their own."""

    def __init__(self, thread: ReaderThread) -> None:
        self._thread, self._monitor, directory = thread, thread.monitor, thread.directory
        self.of: Mapping[str, LearnerSide] = {
            kind.name: registry.import_object(kind.far)(directory, thread.limits)
            for kind in registry.known_kinds()
            if kind.far
        }
        """Deciding parts, by kind of table."""
        self._one_call = threading.Lock()  # held while a call waits, so that calls wait one after another

    def side_with_capability(self, capability: type) -> LearnerSide:
        """Return the part of the kind of table that has a capability."""
        return next(side for storage, side in self.of.items() if registry.has_capability(storage, capability))

    def take(self, side: LearnerSide, wanted: TakeRequest, patience: float) -> list[Any]:
        """Return the entries that a call requests, oldest first, when all have come. See `Reader.take`."""
        deadline = self._monitor.now() + patience
        with Held.within(self._one_call, patience) as is_mine:
            if not is_mine:
                raise NotEnoughSamples(
                    wanted.steps, 0, 0, 0, patience, "another thread's take of this reader is waiting"
                )
            return self._take(side, wanted, patience, self._monitor.remaining(deadline))

    def _take(self, side: LearnerSide, wanted: TakeRequest, patience: float, remaining: float) -> list[Any]:
        taken: list[Any] = []

        def take_arrived() -> bool:
            taken.extend(side.take(dict(self._thread.publishing.versions)))
            return bool(taken)

        with self._monitor.condition:
            side.set_request(wanted)
        self._thread.worker.wake()
        try:
            if not self._monitor.wait(take_arrived, remaining):
                raise self._shortage(side, wanted, patience)
        finally:
            with self._monitor.condition:
                side.set_request(None)
        return taken

    def _shortage(self, side: LearnerSide, wanted: TakeRequest, patience: float) -> MemoireError:
        if not self._thread.directory.present_servers:
            return self._thread.no_answer_error(side.CALLED, patience)
        with self._monitor.condition:
            entries, parts, clients, why = side.describe_shortage()
        return NotEnoughSamples(wanted.steps, entries, parts, clients, patience, why)

    # Calls in the thread

    def next_time(self) -> float:
        """Return the time of the next request."""
        with self._monitor.condition:
            now = self._monitor.now()
            return min((side.next_time(now) for side in self.of.values()), default=math.inf)

    def tick(self) -> None:
        """Send the requests that are due."""
        for side in self.of.values():
            with self._monitor.condition:
                requests = side.due_requests(self._monitor.now())
            for request in requests:
                # The request has no deadline: a server keeps the entries of a reply only until the next request.
                self._thread.ask(request.server, request.body, functools.partial(self._answered, side, request))

    def _answered(self, side: LearnerSide, request: ServerRequest, answer: Answer) -> None:
        if isinstance(answer, Closed):
            return
        now, was_away = self._monitor.now(), request.server.is_away
        content = side.read(answer, now)
        with self._monitor.condition:
            side.receive_answer(request, answer, content, now)
            self._monitor.condition.notify_all()
        if was_away:
            _log.info("server %s is back", request.server.name)
        self.tick()

    def late_servers(self, now: float, down: Collection[object]) -> list[TableServer]:
        """Return servers for which no call should wait any longer; `down` are addresses without a connection."""
        return [server for side in self.of.values() for server in side.late_servers(now, down)]

    def leave_out(self, server: TableServer) -> None:
        """Continue without a server that did not answer in time."""
        with self._monitor.condition:
            for side in self.of.values():
                side.leave_out(server)

    def forget(self, server: TableServer) -> None:
        """Forget a server that is on no list any more."""
        with self._monitor.condition:
            for side in self.of.values():
                side.forget(server)

    def clear(self) -> None:
        """Clear the state of the former run. Under the lock."""
        for side in self.of.values():
            side.clear()


class ModelSender:
    """Carrier of models and answers between `Publishing` and the servers."""

    def __init__(self, thread: ReaderThread) -> None:
        self._thread, self._publishing, self._monitor = thread, thread.publishing, thread.monitor

    def publish(self, model: Model, patience: float) -> int:
        """Publish a model at every server; return its version after all that answer have it. See `Reader.publish`."""
        began, orders = self._monitor.now(), list[PublishOrder]()
        self._thread.worker.post(lambda: self._start(model, began, orders))
        is_taken = self._monitor.wait(
            lambda: bool(orders) and self._publishing.is_taken(orders[0], self._monitor.now()), patience
        )
        missing = self._give_up(orders, model.topic)
        if not is_taken:
            raise self._not_published(model.topic, missing, patience)
        with self._monitor.condition:
            refusal = self._publishing.refusal(orders[0])
            put_off = self._publishing.postponement_reasons(missing, model.topic)
        if refusal is not None:
            raise refusal
        for sentence in put_off:
            _log.warning("topic %r is published, but some servers do not have the model yet. %s", model.topic, sentence)
        return orders[0].model.version

    def _give_up(self, orders: list[PublishOrder], topic: str) -> list[RemoteServer]:
        """Return the servers without the model. The next model does not wait for servers without any reply."""
        with self._monitor.condition:
            missing = self._publishing.undecided_servers(orders[0]) if orders else []
        if missing:
            self._thread.worker.post(lambda: self._leave_silent(missing, topic))
        return missing

    def _not_published(self, topic: str, missing: list[RemoteServer], patience: float) -> MemoireTimeout:
        names = ", ".join(repr(server.name) for server in missing)
        what = f"model of topic {topic!r} at server {names}" if missing else f"answer to a model of topic {topic!r}"
        advice = "The reader keeps sending it while it is open; a server that is back gets the newest model."
        with self._monitor.condition:
            put_off = self._publishing.postponement_reasons(missing, topic)
        why = put_off if missing else [self._thread.problem(probe=False)]
        return MemoireTimeout(what, self._thread.addresses_text, patience, " ".join([*why, advice]))

    # Calls in the thread

    def send_missing(self, server: RemoteServer, *, has_restarted: bool) -> None:
        """Send the models that a server lacks, after an answer of the server."""
        with self._monitor.condition:
            sends = self._publishing.missing_chunks(server, has_restarted)
        self._send(sends)

    def _start(self, model: Model, began: float, orders: list[PublishOrder]) -> None:
        with self._monitor.condition:
            order, sends = self._publishing.publish(model, began)
            orders.append(order)
            self._monitor.condition.notify_all()
        self._send(sends)

    def _send(self, sends: list[Send]) -> None:
        for send in sends:
            # The request has no deadline: the waiting call has a deadline, and the server may come back.
            finish = functools.partial(self._sent, send)
            checksum = send.payload_checksum
            self._thread.ask(send.server, send.body, finish, payload=send.payload, payload_checksum=checksum)

    def _sent(self, send: Send, answer: Answer) -> None:
        with self._monitor.condition:
            sends = self._publishing.receive_answer(send, answer)
            self._monitor.condition.notify_all()
        self._send(sends)

    def _leave_silent(self, servers: list[RemoteServer], topic: str) -> None:
        for server in self._publishing.silent_servers(servers, topic):
            self._thread.leave_out(server)
