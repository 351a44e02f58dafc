"""A client's thread and its three sockets: requests, pushes, notices. It carries out what the session decides.

Session: what to say ──▶ requests ──▶ home ──▶ answers ──▶ Session: what they mean
Pusher: frames       ──▶ pushes   ──▶ home
notices  ◀── home                 Topics: models

A client's sockets for caches and notices. They lead wherever the home says, and belong to the client's thread.

Tells what earlier clients have left: a channel of its own for each of them. Belongs to the client's thread.
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
from .session import BUSY_TIMEOUT, OUTDATED, AcceptedWelcome, Change, SentUpdate, Session, Step
from .waiting import ClientLock


class DataSockets:
    """One socket that sends pushes, and one that receives notices; none before `open`.

    Args:
        channel: Requests to the same home.
        given: Addresses for caches and notices if they are not those that the home names; None or "".
    """

    def __init__(
        self,
        doors: Poller,
        channel: Channel,
        given: tuple[str | None, str | None],
        *,
        context: Context,
        limits: Limits,
        keys: Keys | None,
    ) -> None:
        self._doors, self._channel, self._given, self._context, self._keys = doors, channel, given, context, keys
        self.feed = Feed(doors, channel, context=context, limits=limits, keys=keys)
        """Notices and models of the home."""
        self._push = Sender(doors, is_reading=False)

    def open(self, endpoints: messages.Endpoints, usual_bytes: int) -> bool:
        """Connect anew; returns whether notices are heard from now on.

        Args:
            usual_bytes: Of a push.
        """
        self._drop()
        address = self._channel.link.address  # for endpoints without a host
        push = self._given[0] or seen_from(address, endpoints.push)
        subscribe = self._given[1] or seen_from(address, endpoints.publish)
        if push:
            made = sockets.data_sender(self._context, usual_bytes)
            link.dial(self._doors, made, push, keys=self._keys)
            self._push.use(made)
        if subscribe:
            self.feed.open(subscribe)
        return self.feed.is_open

    def _drop(self) -> None:
        self._push.drop(sockets.DRAIN_TIMEOUT)
        self.feed.close()

    def send(self, queue: deque[list[Any]]) -> bool:
        """Send from the left as many messages as there is room for; returns whether all of them went."""

        def send(made: Socket) -> bool:
            while queue and sockets.send(made, queue[0]):
                queue.popleft()
            return not queue

        return self._push.turn(send)

    def subscribe(self, topic: str, wanted: bool) -> bool:
        """Start or stop hearing of a topic; False while there is no socket yet."""
        return self.feed.subscribe(topic_frame(topic), wanted)


class FormerClient:
    """One file that is told in the name of the client that left it.

    Args:
        channel: Requests as that client.
        done: Called once, when the file was told, or nobody will ever take it.
    """

    def __init__(self, channel: Channel, teller: UnreportedClient, done: Callable[[FormerClient], None]) -> None:
        self.channel = channel
        self._teller, self._done = teller, done

    def next_time(self) -> float:
        """When `turn` has something to do."""
        return min(self._teller.again_at, self.channel.next_time())

    def turn(self, ready: dict[object, int]) -> None:
        """Take the replies that came, and begin once it is time."""
        self.channel.turn(ready)
        if time.monotonic() >= self._teller.again_at:
            self._ask(self._teller.begin())

    def _ask(self, request: LateRequest) -> None:
        self.channel.ask(request.body, self._answered, run=request.run, home=request.home)

    def _answered(self, answer: Answer) -> None:
        request = self._teller.answered(answer, time.monotonic())
        if isinstance(answer, Message) and isinstance(answer.body, messages.Welcome):
            self.channel.learned(answer.header, answer.body)
        if request is not None:
            self._ask(request)
        elif self._teller.is_done:
            self._done(self)


_log = logging.getLogger(__name__)
WARN_INTERVAL = 60.0
"""Seconds between two warnings that lines are dropped."""


class Connection:
    """The thread of a client. Methods are called inside of it, but for those that say otherwise.

    Args:
        given: Addresses for caches and notices where they are not those that the home names; None or "".
        pusher: Queues messages to push; the thread takes them from the left.
        numbers: Sequence numbers of all messages of this client.
        folder: In which earlier clients have left what they could not tell.
        owner: Lives as long as the thread: somebody may have dropped the client, and use its memory or a model.
    """

    def __init__(
        self,
        session: Session,
        waiting: ClientLock,
        local: LocalMemory,
        pusher: Pusher,
        *,
        given: tuple[str | None, str | None],
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
        """Seconds that `log` waits for room, unless its caller says otherwise."""
        self._vain_line = 0.0  # oldest line that waited at the last wait in vain: while it is there, nobody waits
        self._warn_at = float("-inf")  # when a warning that lines are dropped may come again
        self.former: list[FormerClient] = []
        """What earlier clients have left, while it is told; changed under the lock."""
        self.worker = Worker("memoire-client", self._turn, self._next_time, self._at_end)
        waiting.wake = self.worker.wake
        try:
            self.channel = self._channel_of(session.client, numbers)
        except BaseException:
            self.worker.stop(0.0)
            raise
        self.data = DataSockets(self.worker.doors, self.channel, given, context=context, limits=self._limits, keys=keys)
        self.topics = Topics(self._limits, self.data.feed.fetch, self.data.subscribe, self.worker.post, self._took)
        self._renewals = 0  # of the channel, that the other sockets have followed
        self._connections = 0  # of the channel, that were noticed
        self.worker.post(self.hello)
        for path, content in () if folder is None else reports.found(folder):
            channel = self._channel_of(content.client)
            self.former.append(FormerClient(channel, reports.UnreportedClient(path, content), self._told_former))

    def _channel_of(self, client: bytes, numbers: Iterator[int] | None = None) -> Channel:
        return Channel(
            self.worker.doors,
            self._context,
            self._session.endpoint,
            client=client,
            limits=self._limits,
            rng=self._rng,
            numbers=numbers,
            keys=self._keys,
        )

    # From any thread

    def is_met(self) -> bool:
        """Whether a home has answered. Raises AuthError if none can, since this process is not let in."""
        is_met = self._session.welcome is not None
        if not is_met and (denied := self.channel.denied_for_good) is not None:
            raise denied
        return is_met

    @property
    def silent(self) -> float:
        """Seconds since the newest reply."""
        return time.monotonic() - self.channel.heard_at

    def advice(self, *, probe: bool = True) -> str:
        """What a person can look at; a proxy may be there while the client's home behind it is not.

        Args:
            probe: Try to connect, which waits 0.2 s at most.
        """
        session = self._session
        if session.trouble:
            return f"The home of this client, server {session.told.home_name!r}, says: {session.trouble}"
        where = self.channel.link.explain(probe=probe)
        if session.welcome is None:
            return where
        home = session.told.home_name
        return f"The home of this client, server {home!r}, was last heard {self.silent:.1f} s ago. {where}"

    def told_everything(self, deadline: float) -> bool:
        """Wait until the home has everything, and no client before this one has anything left; False at the deadline
        or if the thread ends.
        """
        session, changed = self._session, self._waiting.changed
        with changed:
            if session.welcome is None or not self.worker.is_alive or self._waiting.failed is not None:
                return False
            session.is_leaving = True
            ticket = session.schedule.ask(session.outbox.newest)
            self.worker.wake()
            while session.schedule.answered < ticket or session.has_remainder or self._pusher.queue or self.former:
                left = deadline - time.monotonic()
                if left <= 0 or not self.worker.is_alive:
                    return False
                changed.wait(min(left, 0.5))
            return True

    def log(self, line: str, timeout: float | None) -> bool:
        """Take a log line: at once while there is room, or after a wait that is not made twice. False, and once in a
        while a warning, if there is no room for it.

        Args:
            timeout: Seconds to wait for room; None waits for `log_timeout`, and not again until some lines left.

        Raises:
            Closed: the client was closed while this call waited.
        """
        session = self._session
        with self._waiting.changed:
            if self._add_line(line) or self._wait_for_room(line, timeout):
                session.schedule.is_dirty = True
                return True
            session.counts.dropped_lines += 1
            dropped, now = session.counts.dropped_lines, self._waiting.now()
            if now < self._warn_at:
                return False
            self._warn_at = now + WARN_INTERVAL
        # Never under the lock: a handler of the log may wait for somebody who waits for that.
        _log.warning(
            "client %s: %d lines in all were not taken by log(): %d wait for server %r at %s, last heard %.1f s ago",
            session.shown,
            dropped,
            len(session.outbox),
            session.told.home_name,
            session.endpoint,
            self.silent,
        )
        return False

    def _add_line(self, line: str) -> bool:
        return self._session.outbox.add(line, self._session.label, self._pusher.clock()) > 0

    def _wait_for_room(self, line: str, timeout: float | None) -> bool:
        outbox, schedule = self._session.outbox, self._session.schedule
        # Whoever logs each step would be as slow as one line a second while the server is away.
        if self.worker.is_here or (timeout is None and outbox.oldest == self._vain_line):
            return False

        def ask() -> None:
            schedule.asked_line = max(schedule.asked_line, outbox.newest)
            self._waiting.wake()

        deadline = self._waiting.now() + (self.log_timeout if timeout is None else timeout)
        if self._waiting.until(lambda: self._add_line(line), deadline, self._waiting.check_open, ask):
            return True
        if timeout is None:
            self._vain_line = outbox.oldest
        return False

    def stats(self) -> ClientStats:
        """All figures at this moment. Under the lock."""
        session, channel, topics, pusher = self._session, self.channel, self.topics, self._pusher
        told, counts, windows = session.told, session.counts, session.windows
        return ClientStats(
            client=session.client.hex(),
            name=session.name,
            label=session.label,
            endpoint=session.endpoint,
            home=told.home_name,
            table=told.table_name,
            run=told.run_name,
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
            held_back=session.inserts.held_back,
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
            refused=dict(channel.refused) | session.refused | dict(topics.refused),
            silent=self.silent,
            untold_steps=counts.missing.steps,
            trouble=session.trouble,
            applied=counts.applied,
            stale=counts.stale,
            finished=session.is_finished,
            faults=self.worker.errors,
        )

    # Turns

    def _next_time(self) -> float:
        own = (self.channel.next_time(), self._session.next_time(), self.topics.next_time())
        former = () if self._session.welcome is None else (each.next_time() for each in self.former)
        return min(*own, *former)

    def _turn(self, ready: dict[object, int]) -> None:
        session = self._session
        self.channel.turn(ready)
        if session.welcome is None and self.channel.link.denied is not None:
            self._notify()
        if self.channel.connections != self._connections:
            self._connections = self.channel.connections
            session.schedule.hear_news(time.monotonic())  # whoever is there again may have forgotten something
        if self.channel.renewals != self._renewals or session.hello_is_due(time.monotonic()):
            self.hello()  # its answer opens the other sockets anew
        self.data.feed.turn(ready, self._take_notice, session.refuse)
        self.topics.turn()
        if self.data.send(self._pusher.queue) and session.is_leaving:
            self._notify()
        now = time.monotonic()
        if now >= session.update_due():
            self._send_update()
        if session.welcome is not None:
            self._say(session.watch.look(now))
            for each in list(self.former):
                each.turn(ready)

    def _at_end(self) -> None:
        if hasattr(self, "channel"):  # not when its address is none
            for each in (self.channel, *(former.channel for former in self.former)):
                each.close(Closed("this client"))

    def _notify(self) -> None:
        with self._waiting.changed:
            self._waiting.changed.notify_all()

    def _say(self, change: Change) -> None:
        """One warning when the home is away, and one when it is back."""
        session = self._session
        who = f"client {session.shown}"
        if change == "back":
            home = session.told.home_name
            _log.warning("%s: server %r is back; what was recorded meanwhile is counted", who, home)
        elif change == "away":
            missing = session.counts.missing
            _log.warning(
                "%s: server %r at %s has acknowledged nothing for %.0f s. %d steps, %d episodes and %d log lines are "
                "kept until it is back. %s",
                who,
                session.told.home_name,
                session.endpoint,
                time.monotonic() - session.watch.acknowledged_at,
                missing.steps,
                missing.episodes,
                len(session.outbox),
                self.advice(probe=False),
            )

    def _told_former(self, former: FormerClient) -> None:
        def leave() -> None:
            former.channel.leave()
            with self._waiting.changed:
                self.former.remove(former)
                self._waiting.changed.notify_all()

        self.worker.post(leave)

    # HELLO and its answer

    def hello(self, home: int | None = None) -> None:
        """Ask for everything again; with home 0, for another home too."""
        with self._waiting.changed:
            hello = self._session.hello(socket.gethostname()[:256], os.getpid())
        if hello is not None:
            self.channel.ask(hello, self._welcomed, run=0, home=home)

    def _welcomed(self, answer: Answer) -> None:
        try:
            welcomed = self._session.welcomed(answer, time.monotonic())
            if welcomed is not None:
                self._learn(welcomed)
        except MemoireError as error:
            self._fail(error)

    def _fail(self, error: MemoireError) -> None:
        with self._waiting.changed:
            if not self._waiting.is_closing:
                self._waiting.failed = error
                self._session.end()
            self._waiting.changed.notify_all()

    def _learn(self, welcomed: AcceptedWelcome) -> None:
        session, told = self._session, welcomed.told
        with self._waiting.changed:
            if session.remains(welcomed):
                self.channel.home = session.home
                return
        self._follow_endpoints(welcomed)
        self._local.configure(welcomed.parameters, told.parameters_version)
        with self._waiting.changed:
            entered = session.enter(welcomed, time.monotonic())
            self.channel.learned(welcomed.header, told)
            self._waiting.changed.notify_all()
        self._say(entered.change)
        if entered.is_new_run:
            self.topics.begin_run()
        self.topics.is_kept = told.durable
        if entered.has_forgotten:
            self.topics.restarted()
        self._hear_of(told.models)

    def _hear_of(self, models: dict[str, int]) -> None:
        """The newest versions at the home. Never while holding the lock."""
        self.topics.announced(models)
        self._local.saw_models(models)

    def _follow_endpoints(self, welcomed: AcceptedWelcome) -> None:
        """Open the sockets for caches and notices anew where the home names others, or its address has changed."""
        former, told = self._session.welcome, welcomed.told
        if former is None or told.endpoints != former.endpoints or self.channel.renewals != self._renewals:
            self._renewals = self.channel.renewals
            usual = self._local.choose_side(told.storage).usual_bytes(welcomed.schema, welcomed.parameters)
            if self.data.open(told.endpoints, usual):
                self.topics.opened()

    # UPDATE and its answer

    def _send_update(self) -> None:
        session = self._session
        with self._waiting.changed:
            session.schedule.is_dirty = False  # before the sums are read: what changes from here on is told next time
        sums = self._local.sums()
        with self._waiting.changed:
            update = report_of(session, sums, self.topics.versions())
            asked = session.begin_update(time.monotonic())
        self.channel.ask(update, lambda answer: self._answered(answer, asked))

    def _answered(self, answer: Answer, asked: SentUpdate) -> None:
        self._session.schedule.is_open = False
        if isinstance(answer, Message) and isinstance(answer.body, messages.Updated):
            step = self._updated(answer.body, answer.payload, asked)
        else:
            with self._waiting.changed:
                step = self._session.update_refused(answer, time.monotonic())
            if isinstance(answer, Refused) and answer.code not in OUTDATED + BUSY_TIMEOUT:
                _log.warning("client %s: %s", self._session.shown, answer)
        if step != "update":
            self.hello(home=0 if step == "move" else None)

    def _updated(self, said: messages.Updated, payload: Any, asked: SentUpdate) -> Step:
        session = self._session
        self._say(session.watch.acknowledged(time.monotonic()))
        # Before anybody who waits for this answer goes on.
        if said.parameters is not None:
            self._take_parameters(said.parameters, said.parameters_version)
        if payload is not None and said.feedback_through > session.feedback_through and session.is_same_life(said):
            self._apply_feedback(payload, said.feedback_through, said.feedback_age)
        self._hear_of(said.models)
        with self._waiting.changed:
            step = session.updated(said, asked, time.monotonic())
            self._waiting.changed.notify_all()
        return step

    def _take_parameters(self, given: dict[str, Any], version: int) -> None:
        try:
            self._local.configure(Parameters.from_wire(given), version)
        except MemoireError as error:  # of another version: going on under the former ones would be wrong in silence
            self._session.refuse("parameters")
            self._fail(error)

    def _apply_feedback(self, payload: Any, through: int, age: float) -> None:
        session = self._session
        try:
            found = containers.read_feedback(payload, session.schema, self._limits)
        except ProtocolError as error:
            session.refuse(error.code)
            found = {}  # the home hears that it could not be used: the same would come again and again
        if (mine := found.get(session.client)) is not None:
            applied, stale, gone = self._local.update_priorities(*mine, age)
            session.counts.applied += applied
            session.counts.stale += stale
            session.counts.gone += gone
        session.feedback_through = through
        session.schedule.is_dirty = session.schedule.has_feedback = True

    # Models

    def _took(self, model: Model, is_renewed: bool, source: tuple[int, int]) -> None:
        """A model is here: the home is told which one is in use."""
        with self._waiting.changed:
            self._session.schedule.is_dirty = True

    def _take_notice(self, message: Message, frames: Sequence[Buffer]) -> None:
        if not isinstance(message.body, messages.Notice):
            self._session.schedule.hear_news(time.monotonic())
        elif message.header.run in (0, self._session.run):
            self.topics.noticed(message.body, message.payload, message.header.home)
            if self._local.side.waits_for_models:  # it may give the room back of what was taken
                with self._waiting.changed:
                    self._session.inserts.expect()
