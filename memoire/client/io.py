"""Client thread and its three sockets: requests, pushes and notices. The thread carries out the session's decisions.

Session: next message ──▶ requests ──▶ home ──▶ answers ──▶ Session: their meaning
Pusher: frames        ──▶ pushes   ──▶ home
notices  ◀── home                  Topics: models

The home names the addresses of the sockets for pushes and notices. Reports that earlier clients left in the folder are
delivered by the same thread, over a channel for each of those clients.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memoire.errors import Closed, MemoireError, ProtocolError, Refused
from memoire.limits import Limits
from memoire.models.io import Feed
from memoire.models.model import Model
from memoire.models.topics import Topics
from memoire.net import link, sockets
from memoire.net.addresses import seen_from
from memoire.net.channel import Channel
from memoire.net.poller import Poller, Sender
from memoire.net.sockets import Context, Socket
from memoire.net.thread import Worker
from memoire.replay.parameters import Parameters
from memoire.security.keys import Keys
from memoire.wire import containers, messages
from memoire.wire.frames import Answer, Buffer, Message, topic_frame

from . import reports
from .pushes import LocalMemory, Pusher
from .reports import ClientStats, LateRequest, UnreportedClient, report_of
from .session import BUSY_CODES, OUTDATED, AcceptedWelcome, Change, SentUpdate, Session, Step
from .waiting import ClientLock


class DataSockets:
    """A client's socket that sends pushes and socket that receives notices; `reconnect` opens the two sockets.

    Args:
        channel: Channel for requests to the same home.
        addresses: Addresses for caches and notices instead of the server's; None or "" takes the server's.
    """

    def __init__(
        self,
        poller: Poller,
        channel: Channel,
        addresses: tuple[str | None, str | None],
        *,
        context: Context,
        limits: Limits,
        keys: Keys | None,
    ) -> None:
        self._poller, self._channel, self._addresses = poller, channel, addresses
        self._context, self._keys = context, keys
        self.feed = Feed(poller, channel, context=context, limits=limits, keys=keys)
        """Feed of the home server's notices and models."""
        self._push = Sender(poller, is_reading=False)

    def reconnect(self, endpoints: messages.NodeEndpoints, usual_bytes: int) -> bool:
        """Close and reconnect both sockets; returns True if the one for notices is open.

        Args:
            usual_bytes: Usual size of a push, in bytes.
        """
        self._drop()
        address = self._channel.link.address  # address of endpoints without a host
        push = self._addresses[0] or seen_from(address, endpoints.push)
        subscribe = self._addresses[1] or seen_from(address, endpoints.publish)
        if push:
            push_socket = sockets.data_sender(self._context, usual_bytes)
            link.dial(self._poller, push_socket, push, keys=self._keys)
            self._push.use(push_socket)
        if subscribe:
            self.feed.subscribe_to(subscribe)
        return self.feed.is_open

    def _drop(self) -> None:
        self._push.drop(sockets.DRAIN_TIMEOUT)
        self.feed.close()

    def send(self, queue: deque[list[Any]]) -> bool:
        """Send messages from the left until the socket's buffer is full; returns True if the queue is empty."""

        def send(push_socket: Socket) -> bool:
            while queue and sockets.send(push_socket, queue[0]):
                queue.popleft()
            return not queue

        return self._push.tick(send)

    def subscribe(self, topic: str, wanted: bool) -> bool:
        """Subscribe to a topic, or unsubscribe if `wanted` is false; returns False if no socket is open yet."""
        return self.feed.subscribe(topic_frame(topic), wanted)


class FormerClient:
    """Delivery of one report file, in the name of the client that left it.

    Args:
        channel: Channel for requests with that client's id.
        teller: Decides what to send next.
        done: Called once, after the report was delivered or refused for good.
    """

    def __init__(self, channel: Channel, teller: UnreportedClient, done: Callable[[FormerClient], None]) -> None:
        self.channel = channel
        self._teller, self._done = teller, done

    def next_time(self) -> float:
        """Return the time when `tick` has something to do, in seconds of the monotonic clock."""
        return min(self._teller.again_at, self.channel.next_time())

    def tick(self, ready: dict[object, int]) -> None:
        """Take received replies, and begin with HELLO once that is due."""
        self.channel.tick(ready)
        if time.monotonic() >= self._teller.again_at:
            self._ask(self._teller.begin())

    def _ask(self, request: LateRequest) -> None:
        self.channel.ask(request.body, self._answered, run=request.run, home=request.home)

    def _answered(self, answer: Answer) -> None:
        request = self._teller.receive_answer(answer, time.monotonic())
        if isinstance(answer, Message) and isinstance(answer.body, messages.Welcome):
            self.channel.apply_welcome(answer.header, answer.body)
        if request is not None:
            self._ask(request)
        elif self._teller.is_done:
            self._done(self)


_log = logging.getLogger(__name__)
WARN_INTERVAL = 60.0
"""Seconds between two warnings that lines are dropped."""


class Connection:
    """Thread of a client, with its channel and sockets. Methods under "From any thread" may be called outside of it.

    Args:
        pusher: Queues messages to push; the thread takes them from the left.
        addresses: Addresses for caches and notices instead of the server's; None or "" takes the server's.
        numbers: Sequence numbers of all messages of this client.
        folder: Folder in which earlier clients left reports that they could not deliver.
        owner: The client, kept alive by the thread: a caller may use its memory or a model without a reference to it.
    """

    def __init__(
        self,
        session: Session,
        waiting: ClientLock,
        local: LocalMemory,
        pusher: Pusher,
        *,
        addresses: tuple[str | None, str | None],
        context: Context,
        keys: Keys | None,
        rng: random.Random,
        numbers: Iterator[int],
        folder: Path | None,
        owner: object,
    ) -> None:
        self._owner = owner
        self._session, self._waiting, self._local, self._pusher = session, waiting, local, pusher
        self._context, self._limits, self._keys, self._rng = context, session.limits, keys, rng
        self.log_timeout = session.limits.log_timeout
        """Seconds that `log` waits for room if its caller sets no timeout."""
        self._blocking_line = 0.0  # oldest queued line at the last timeout of `log`: later calls do not wait
        self._warn_at = float("-inf")  # earliest time of the next warning that lines are dropped
        self.former: list[FormerClient] = []
        """Reports of earlier clients that are being delivered; changed under the lock."""
        self.worker = Worker("memoire-client", self._turn, self._next_time, self._at_end)
        waiting.wake = self.worker.wake
        try:
            self.channel = self._channel_of(session.client, numbers)
        except BaseException:
            self.worker.stop(0.0)
            raise
        poller, limits = self.worker.poller, self._limits
        self.data = DataSockets(poller, self.channel, addresses, context=context, limits=limits, keys=keys)
        self.topics = Topics(self._limits, self.data.feed.fetch, self.data.subscribe, self.worker.post, self._set_dirty)
        self._renewals = 0  # renewals of the channel that the other sockets have followed
        self._connections = 0  # connections of the channel that `_turn` has seen
        self.worker.post(self.hello)
        for path, content in () if folder is None else reports.read_reports(folder):
            channel = self._channel_of(content.client)
            self.former.append(FormerClient(channel, reports.UnreportedClient(path, content), self._remove_former))

    def _channel_of(self, client: bytes, numbers: Iterator[int] | None = None) -> Channel:
        return Channel(
            self.worker.poller,
            self._context,
            self._session.endpoint,
            client=client,
            limits=self._limits,
            rng=self._rng,
            numbers=numbers,
            keys=self._keys,
        )

    # Calls from any thread

    def has_server_answered(self) -> bool:
        """Return True if a server has answered. Raises AuthError if the server refuses this process' keys for good."""
        is_met = self._session.has_welcome
        if not is_met and (denied := self.channel.denied_for_good) is not None:
            raise denied
        return is_met

    @property
    def silent(self) -> float:
        """Seconds since the newest reply."""
        return time.monotonic() - self.channel.heard_at

    def advice(self, *, probe: bool = True) -> str:
        """Return what a person can check, in words: a proxy may be reachable while the client's home behind it is not.

        Args:
            probe: Try to connect, which waits 0.2 s at most.
        """
        session = self._session
        if session.trouble:
            return f"The home of this client, server {session.welcome.home_name!r}, says: {session.trouble}"
        advice = self.channel.link.explain(probe=probe)
        if not session.has_welcome:
            return advice
        home = session.welcome.home_name
        return f"The home of this client, server {home!r}, was last heard {self.silent:.1f} s ago. {advice}"

    def deliver_everything(self, deadline: float) -> bool:
        """Wait until a server has acknowledged all counts, with reports of earlier clients; False at the deadline."""
        session, changed = self._session, self._waiting.condition
        with changed:
            if not session.has_welcome or not self.worker.is_alive or self._waiting.failed is not None:
                return False
            session.is_leaving = True
            ticket = session.schedule.add_waiting_call(session.outbox.newest)
            self.worker.wake()
            while session.schedule.answered < ticket or session.has_remainder or self._pusher.queue or self.former:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self.worker.is_alive:
                    return False
                changed.wait(min(remaining, 0.5))
            return True

    def log(self, line: str, timeout: float | None) -> bool:
        """Queue a log line, after a wait for room if necessary. Returns False if there is no room, and logs a warning
        every `WARN_INTERVAL` seconds at most.

        Args:
            timeout: Seconds to wait for room; None waits for `log_timeout`, and then not again until lines were sent.

        Raises:
            Closed: the client was closed while this call waited.
        """
        session = self._session
        with self._waiting.condition:
            if self._add_line(line) or self._wait_for_room(line, timeout):
                session.schedule.is_dirty = True
                return True
            session.counts.dropped_lines += 1
            dropped, now = session.counts.dropped_lines, self._waiting.now()
            if now < self._warn_at:
                return False
            self._warn_at = now + WARN_INTERVAL
        # The warning comes without the lock: a log handler may wait for a thread that waits for the lock.
        _log.warning(
            "client %s: log() dropped %d lines so far; %d lines wait for server %r at %s, which answered %.1f s ago",
            session.shown,
            dropped,
            len(session.outbox),
            session.welcome.home_name,
            session.endpoint,
            self.silent,
        )
        return False

    def _add_line(self, line: str) -> bool:
        return self._session.outbox.add(line, self._session.label, self._pusher.clock()) > 0

    def _wait_for_room(self, line: str, timeout: float | None) -> bool:
        outbox, schedule = self._session.outbox, self._session.schedule
        # A second wait would slow down a caller that logs each step to a line a second while the server is away.
        if self.worker.is_here or (timeout is None and outbox.oldest == self._blocking_line):
            return False

        def ask() -> None:
            schedule.asked_line = max(schedule.asked_line, outbox.newest)
            self._waiting.wake()

        deadline = self._waiting.now() + (self.log_timeout if timeout is None else timeout)
        if self._waiting.wait_until(lambda: self._add_line(line), deadline, self._waiting.check_open, ask):
            return True
        if timeout is None:
            self._blocking_line = outbox.oldest
        return False

    def stats(self) -> ClientStats:
        """Return a snapshot of all figures. Called under the lock."""
        session, channel, topics, pusher = self._session, self.channel, self.topics, self._pusher
        welcome, counts, windows = session.welcome, session.counts, session.windows
        return ClientStats(
            client=session.client.hex(),
            name=session.name,
            label=session.label,
            endpoint=session.endpoint,
            home=welcome.home_name,
            table=welcome.table_name,
            run=welcome.run_name,
            episodes=counts.episodes,
            steps=counts.steps,
            generated_bytes=counts.generated_bytes,
            **asdict(windows.sums()),
            credit=windows.now.credit,
            granted=windows.granted,
            on_full=pusher.on_full,
            waited=pusher.waited,
            compression=pusher.codec(),
            passed_steps=counts.passed,
            held_back=session.inserts.block_reason,
            held_back_for=session.inserts.waited,
            skipped_caches=counts.skipped,
            not_pushed=dict(pusher.not_pushed),
            waiting_lines=len(session.outbox),
            waiting_line_bytes=session.outbox.bytes,
            dropped_lines=counts.dropped_lines,
            dropped_returns=counts.dropped_returns,
            parameters_version=session.parameters_version,
            models=topics.versions(),
            skipped_models=topics.skipped,
            fetched_bytes=topics.fetched_bytes,
            resubscribed=topics.resubscribed,
            updates=session.updates,
            resends=channel.resends,
            refused=dict(channel.refused) | session.refused | dict(topics.rejected_bodies),
            silent=self.silent,
            untold_steps=counts.unacknowledged_counts.steps,
            trouble=session.trouble,
            applied=counts.applied,
            stale=counts.stale,
            finished=session.is_finished,
            faults=self.worker.errors,
        )

    # Turns

    def _next_time(self) -> float:
        times = (self.channel.next_time(), self._session.next_time(), self.topics.next_time())
        former = (each.next_time() for each in self.former) if self._session.has_welcome else ()
        return min(*times, *former)

    def _turn(self, ready: dict[object, int]) -> None:
        session = self._session
        self.channel.tick(ready)
        if not session.has_welcome and self.channel.link.denied is not None:
            self._notify()
        if self.channel.connections != self._connections:
            self._connections = self.channel.connections
            session.schedule.schedule_after_news(time.monotonic())  # the server may have restarted and lost something
        if self.channel.renewals != self._renewals or session.hello_is_due(time.monotonic()):
            self.hello()  # the answer to HELLO reopens the other sockets
        self.data.feed.tick(ready, self._take_notice, session.count_refusal)
        self.topics.tick()
        if self.data.send(self._pusher.queue) and session.is_leaving:
            self._notify()
        now = time.monotonic()
        if now >= session.update_due():
            self._send_update()
        if session.has_welcome:
            self._log_change(session.watch.check_away(now))
            for each in list(self.former):
                each.tick(ready)

    def _at_end(self) -> None:
        if hasattr(self, "channel"):  # a malformed address leaves no channel
            for each in (self.channel, *(former.channel for former in self.former)):
                each.close(Closed("this client"))

    def _notify(self) -> None:
        with self._waiting.condition:
            self._waiting.condition.notify_all()

    def _log_change(self, change: Change) -> None:
        """Log a warning if the home server has gone away or has come back."""
        session = self._session
        label = f"client {session.shown}"
        if change == "back":
            home = session.welcome.home_name
            _log.warning("%s: server %r is back; steps recorded in the meantime are counted", label, home)
        elif change == "away":
            missing = session.counts.unacknowledged_counts
            _log.warning(
                "%s: server %r at %s has acknowledged nothing for %.0f s. The client keeps %d steps, %d episodes and "
                "%d log lines until the server is back. %s",
                label,
                session.welcome.home_name,
                session.endpoint,
                time.monotonic() - session.watch.acknowledged_at,
                missing.steps,
                missing.episodes,
                len(session.outbox),
                self.advice(probe=False),
            )

    def _remove_former(self, former: FormerClient) -> None:
        def leave() -> None:
            former.channel.close_socket()
            with self._waiting.condition:
                self.former.remove(former)
                self._waiting.condition.notify_all()

        self.worker.post(leave)

    # HELLO and its answer

    def hello(self, home: int | None = None) -> None:
        """Send HELLO, whose answer has schema, parameters, run and endpoints; home 0 asks for another server."""
        with self._waiting.condition:
            hello = self._session.hello(socket.gethostname()[:256], os.getpid())
        if hello is not None:
            self.channel.ask(hello, self._apply_welcome, run=0, home=home)

    def _apply_welcome(self, answer: Answer) -> None:
        try:
            welcomed = self._session.parse_welcome(answer, time.monotonic())
            if welcomed is not None:
                self._enter_home(welcomed)
        except MemoireError as error:
            self._fail(error)

    def _fail(self, error: MemoireError) -> None:
        with self._waiting.condition:
            if not self._waiting.is_closing:
                self._waiting.failed = error
                self._session.end()
            self._waiting.condition.notify_all()

    def _enter_home(self, welcomed: AcceptedWelcome) -> None:
        session, welcome = self._session, welcomed.welcome
        with self._waiting.condition:
            if session.stay_in_former_run(welcomed):
                self.channel.home = session.home
                return
        self._follow_endpoints(welcomed)
        self._local.configure(welcomed.parameters, welcome.parameters_version)
        with self._waiting.condition:
            entered = session.enter_home(welcomed, time.monotonic())
            self.channel.apply_welcome(welcomed.header, welcome)
            self._waiting.condition.notify_all()
        self._log_change(entered.change)
        if entered.is_new_run:
            self.topics.begin_run()
        self.topics.is_kept = welcome.durable
        if entered.has_forgotten:
            self.topics.accept_lower_versions()
        self._take_versions(welcome.models)

    def _take_versions(self, models: dict[str, int]) -> None:
        """Take the newest versions of models at the home. Never called under the lock."""
        self.topics.receive_versions(models)
        self._local.set_newest_versions(models)

    def _follow_endpoints(self, welcomed: AcceptedWelcome) -> None:
        """Reopen the sockets for caches and notices if the home server names other endpoints or has a new address."""
        former, welcome = self._session.welcome if self._session.has_welcome else None, welcomed.welcome
        if former is None or welcome.endpoints != former.endpoints or self.channel.renewals != self._renewals:
            self._renewals = self.channel.renewals
            usual = self._local.choose_side(welcome.storage).usual_bytes(welcomed.schema, welcomed.parameters)
            if self.data.reconnect(welcome.endpoints, usual):
                self.topics.subscribe_all()

    # UPDATE and its answer

    def _send_update(self) -> None:
        session = self._session
        with self._waiting.condition:
            session.schedule.is_dirty = False  # set before the sums are read: later changes go into the next UPDATE
        sums = self._local.sums()
        with self._waiting.condition:
            update = report_of(session, sums, self.topics.versions())
            asked = session.begin_update(time.monotonic())
        self.channel.ask(update, lambda answer: self._answered(answer, asked))

    def _answered(self, answer: Answer, asked: SentUpdate) -> None:
        self._session.schedule.is_open = False
        if isinstance(answer, Message) and isinstance(answer.body, messages.Updated):
            step = self._updated(answer.body, answer.payload, asked)
        else:
            with self._waiting.condition:
                step = self._session.update_refused(answer, time.monotonic())
            if isinstance(answer, Refused) and answer.code not in OUTDATED + BUSY_CODES:
                _log.warning("client %s: %s", self._session.shown, answer)
        if step != "update":
            self.hello(home=0 if step == "move" else None)

    def _updated(self, reply: messages.Updated, payload: Any, asked: SentUpdate) -> Step:
        session = self._session
        self._log_change(session.watch.acknowledged(time.monotonic()))
        # Parameters are applied before calls that wait for this answer return.
        if reply.parameters is not None:
            self._take_parameters(reply.parameters, reply.parameters_version)
        if payload is not None and reply.feedback_through > session.feedback_through and session.is_same_life(reply):
            self._apply_feedback(payload, reply.feedback_through, reply.feedback_age)
        self._take_versions(reply.models)
        with self._waiting.condition:
            step = session.apply_acknowledgement(reply, asked, time.monotonic())
            self._waiting.condition.notify_all()
        return step

    def _take_parameters(self, values: dict[str, Any], version: int) -> None:
        try:
            self._local.configure(Parameters.from_wire(values), version)
        except MemoireError as error:  # an unknown version: keeping the former parameters would be silently wrong
            self._session.count_refusal("parameters")
            self._fail(error)

    def _apply_feedback(self, payload: Any, through: int, age: float) -> None:
        session = self._session
        try:
            feedback = containers.read_feedback(payload, session.schema, self._limits)
        except ProtocolError as error:
            session.count_refusal(error.code)
            feedback = {}  # still acknowledged: otherwise the home server sends them again
        if (samples := feedback.get(session.client)) is not None:
            applied, stale, gone = self._local.update_priorities(*samples, age)
            session.counts.applied += applied
            session.counts.stale += stale
            session.counts.gone += gone
        session.feedback_through = through
        session.schedule.is_dirty = session.schedule.has_feedback = True

    # Models

    def _set_dirty(self, model: Model, is_renewed: bool, source: tuple[int, int]) -> None:
        """Mark the session dirty, so that the next UPDATE reports the model's version."""
        with self._waiting.condition:
            self._session.schedule.is_dirty = True

    def _take_notice(self, message: Message, frames: Sequence[Buffer]) -> None:
        if not isinstance(message.body, messages.Notice):
            self._session.schedule.schedule_after_news(time.monotonic())
        elif message.header.run in (0, self._session.run):
            self.topics.receive_notice(message.body, message.payload, message.header.home)
            if self._local.actor_side.waits_for_models:  # a new model may free room at the server
                with self._waiting.condition:
                    self._session.inserts.end_pause()
