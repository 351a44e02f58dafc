"""Client session: HELLO, WELCOME, UPDATE and UPDATED, and the home, run and next message of a client that follow.

    HELLO ──▶ WELCOME ──▶ UPDATE ──▶ UPDATED ──▶ UPDATE ──▶ UPDATED ...
      ▲                                            │
      └── another run has begun, and the former one's counts are acknowledged; the home restarted; the client moves

Pure: no lock, no socket, no clock; time and chance are passed in. Methods take received messages and return those to
send. HELLO is sent only between an answer and the next UPDATE, so that a former server counts or logs nothing twice.

`HomeWatch` decides when to log that the home server is away or back, `UpdateSchedule` when the next UPDATE is due.
"""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

from memoire._core import setting
from memoire.errors import Refused, SchemaMismatch
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.replay.writing import Changes
from memoire.version import SOFTWARE
from memoire.wire import messages
from memoire.wire.compression import codecs
from memoire.wire.frames import PASSING, Answer, HelloAnswer, HelloSchedule, MessageHeader, welcome_of

from .counts import AccountWindows, ClientCounts, InsertGrant, LineOutbox, PushWindow, RunBoundary, RunCounts

AWAY_TIMEOUT = 10.0
"""Seconds without an acknowledgement after which a home server is reported as away: two heartbeats of a client."""

Change = Literal["away", "back", ""]


class HomeWatch:
    """Detector of an absent server: reports absence after `AWAY_TIMEOUT` without acknowledgement, and the return.

        acknowledged     10 s later: away                 acknowledged: back
    ───────●────────────────────●─────────────────────────────●──────────────▶
    """

    def __init__(self, now: float) -> None:
        self.acknowledged_at = now
        """Time of the home server's newest acknowledgement."""
        self.is_away = False

    @property
    def away_at(self) -> float:
        """Time when `check_away` returns "away" if nothing is acknowledged before; infinity once the server is away."""
        return float("inf") if self.is_away else self.acknowledged_at + AWAY_TIMEOUT

    def acknowledged(self, now: float) -> Change:
        """Record an acknowledgement; returns "back" if the home server was reported as away."""
        self.acknowledged_at = now
        was_away, self.is_away = self.is_away, False
        return "back" if was_away else ""

    def check_away(self, now: float) -> Change:
        """Return "away" once, as soon as it is due; else ""."""
        if now < self.away_at:
            return ""
        self.is_away = True
        return "away"


HEARTBEAT_INTERVAL = 5.0
"""Seconds between two UPDATE messages of a client that has no news."""
PRESSED_INTERVAL = 0.01
"""Seconds between two UPDATE messages while the byte window is half used, or TD errors wait at the home."""
REPORT_DELAY = 0.3
"""Most seconds until UPDATE follows NEWS; the delay is random, since thousands of clients get NEWS at the same time."""


class UpdateSchedule:
    """Schedule of the next UPDATE, from events since the newest one. The owner locks.

    Args:
        interval: Seconds between two UPDATE messages of a client that has news.
    """

    def __init__(self, interval: float, rng: random.Random) -> None:
        self.is_open = False
        """True if an UPDATE was sent that has no answer yet."""
        self.is_dirty = False
        """True if something has changed since the newest UPDATE."""
        self.asked = 0
        """Number of calls of update() so far; the number of a call is its ticket."""
        self.answered = 0
        """Ticket of the newest call that an answer covers."""
        self.asked_line = 0
        """Number of the newest log line that a call waits for."""
        self.pressed = 0
        """Number of calls that wait for room in the byte window."""
        self.has_feedback = False
        """True if TD errors were applied and no UPDATE has reported that."""
        self.awaits_feedback = False
        """True if the home server has more TD errors than one reply brings."""
        self._interval, self._rng = interval, rng
        self._sent_at = 0.0
        self._news_at = float("inf")  # time of the UPDATE that follows NEWS

    def add_waiting_call(self, line: int) -> int:
        """Register a call that waits until everything is acknowledged, lines up to `line` too; returns its ticket."""
        self.asked, self.asked_line = self.asked + 1, line
        return self.asked

    def make_due(self) -> None:
        """Make an UPDATE due at once, even if nothing has changed."""
        self._news_at = 0.0

    def schedule_after_news(self, now: float) -> None:
        """Make an UPDATE due at a random time within `REPORT_DELAY` seconds, since a server has sent NEWS. The reply to
        the UPDATE has the news.
        """
        self._news_at = min(self._news_at, now + self._rng.uniform(0.0, REPORT_DELAY))

    def begin(self, now: float) -> None:
        """Record that an UPDATE is sent at `now`."""
        self.is_open, self._sent_at, self._news_at = True, now, float("inf")
        self.has_feedback = self.awaits_feedback = False

    def put_off(self, until: float) -> None:
        """Make the next UPDATE due no earlier than `until`, since the newest one was refused."""
        self.is_dirty, self._sent_at = True, until

    @property
    def earliest(self) -> float:
        """Earliest time of the next UPDATE if a call waits for it: at once, unless the newest one was refused."""
        return self._sent_at

    def due_at(self, outbox: LineOutbox, window: PushWindow, inserts: InsertGrant) -> float:
        """Return the time when the next UPDATE is due, if no UPDATE is open."""
        # A call waits for lines that did not fit the last UPDATE, or so many lines are queued that log() soon waits.
        has_backlog = outbox.oldest <= self.asked_line or outbox.is_half_full
        if self.asked > self.answered or has_backlog:
            return self._sent_at
        if inserts.waiting or inserts.is_short:
            return self._sent_at + inserts.pause
        if self.pressed or window.is_half_used or inserts.is_half_used or self.awaits_feedback:
            return self._sent_at + PRESSED_INTERVAL
        if self.has_feedback:  # a learner is at work and soon sends more TD errors
            return min(self._news_at, self._sent_at + self._interval / 2)
        return min(self._news_at, self._sent_at + (self._interval if self.is_dirty else HEARTBEAT_INTERVAL))


MOVE_INTERVAL = 2.0
"""Seconds, times 0.5 to 1.5, between two HELLO of a client whose home is drained, until another server takes it."""
OUTDATED = ("run", "schema", "table", "client")
"""Codes of refusals of an UPDATE after which the client sends HELLO to learn the present run, schema and home."""
BUSY_CODES = ("disk", "busy")
"""Codes of refusals of an UPDATE that end without action of the client; it sends UPDATE again."""

Step = Literal["update", "hello", "move"]
"""Next message after an answer: UPDATE, HELLO to the same home, or HELLO for another home."""


class AcceptedWelcome(NamedTuple):
    """WELCOME that was parsed and fits this client."""

    header: MessageHeader
    welcome: messages.Welcome
    schema: Schema
    parameters: Parameters


class WelcomeChanges(NamedTuple):
    """Changes that a WELCOME brings to a session."""

    change: Change
    is_new_run: bool
    has_forgotten: bool
    """True if this home server has restarted and lost the models that it had published."""


class SentUpdate(NamedTuple):
    """Contents of an UPDATE when it was sent, which its answer acknowledges."""

    ticket: int
    """Ticket of the newest call of update() that the UPDATE covers."""
    counts: ClientCounts
    at: float
    boundary: RunBoundary | None


class Session:
    """State of one client at its home. Not thread-safe: the owner locks, except for attributes of its thread alone.

    Args:
        client: Id of the client.
        endpoint: Address of the server, for errors.
        table: Name of the table to ask for; "" takes the server's first.
        label: Label of the client's log lines.
        now: Present time, on the clock of all times of a session.
        name: Name of the client, for people; "" if it has no name.
    """

    def __init__(
        self,
        client: bytes,
        endpoint: str,
        *,
        table: str,
        label: int,
        limits: Limits,
        rng: random.Random,
        now: float,
        name: str = "",
    ) -> None:
        self.client, self.endpoint, self.label, self.name = client, endpoint, label, name
        self.shown = name or client.hex()[:8]
        """Name of the client in logs and errors: its name, or else the beginning of its id."""
        self.counts = RunCounts()
        self.inserts = InsertGrant(self.counts, limits.tuning.update_every)
        self.windows = AccountWindows(limits.credit)
        self.outbox = LineOutbox(
            most_lines=limits.log_lines,
            most_bytes=limits.tuning.log_buffer_bytes,
            line_bytes=limits.tuning.log_line_bytes,
        )
        self.schedule = UpdateSchedule(limits.tuning.update_every, rng)
        self.watch = HomeWatch(now)
        self.put_off: Refused | None = None
        """Refusal of the newest HELLO by a busy home; None otherwise."""
        self.run = self.home = self.table = self.fingerprint = 0
        """Fields of the client's message headers: hashes of run, home, table and schema."""
        self.parameters, self.parameters_version = Parameters(), 0
        self.models: dict[str, int] = {}
        """Newest versions of models at the home server, by topic."""
        self.scalars: dict[str, float] = {}
        self.feedback_through = 0
        """Number of the newest feedback that was applied."""
        self.is_between = False
        """True between two runs or homes, until HELLO is answered: a cache pushed now would count nowhere."""
        self.is_finished = False
        self.is_leaving = False
        self.trouble = ""
        """Reason that the home server gives for acknowledging nothing; "" if all is well."""
        self.updates = 0
        """Number of acknowledged UPDATE messages."""
        self.refused: dict[str, int] = {}
        """Number of received messages that were not accepted, by code."""
        self.limits = limits
        self._table, self._rng = table, rng
        self._welcome: messages.Welcome | None = None
        self._schema: Schema | None = None
        self._hello = HelloSchedule(due=float("inf"))  # HELLO is due without a call only if a server was busy
        self._is_over = False  # the client cannot go on
        self._is_moving = False  # HELLO for another home server is open
        self._move_at = 0.0  # earliest time of the next HELLO for another

    @property
    def has_welcome(self) -> bool:
        """True if a WELCOME was accepted: always once `connect` has returned."""
        return self._welcome is not None

    @property
    def welcome(self) -> messages.Welcome:
        """Newest accepted WELCOME; ask `has_welcome` before the first."""
        assert self._welcome is not None
        return self._welcome

    @property
    def schema(self) -> Schema:
        """Schema of the table's entries, from the home."""
        assert self._schema is not None
        return self._schema

    @property
    def window(self) -> PushWindow:
        """Byte window of the present home."""
        return self.windows.now

    @property
    def most_bytes(self) -> int:
        """Most bytes of one message's payload, as the home server limits them."""
        return self.welcome.limits.get("message_bytes", self.limits.message_bytes)

    @property
    def has_remainder(self) -> bool:
        """True if log lines or closed episodes wait for an acknowledgement."""
        return bool(len(self.outbox) or self.counts.waiting_episodes)

    def count_refusal(self, code: str) -> None:
        """Count a received message that was not accepted."""
        self.refused[code] = self.refused.get(code, 0) + 1

    # Counting

    def recording_changes(self, entries: int) -> Changes:
        """Return the changes that count `entries` recorded entries."""
        changes, schedule = self.counts.recording_changes(entries, self.schema.entry_bytes), self.schedule
        return changes if schedule.is_dirty else changes + setting(schedule, is_dirty=True)

    def episode_changes(self, length: int, returned: float, now: float, kind: int = messages.TRAIN) -> Changes:
        """Return the changes that count an episode closed at `now`, in seconds since 1970."""
        return self.counts.episode_changes(length, returned, now, kind) + setting(self.schedule, is_dirty=True)

    def end(self) -> None:
        """End the session for good: no UPDATE is due any more."""
        self._is_over = True

    # Times of the next messages

    def next_time(self) -> float:
        """Return the time when HELLO, an UPDATE or a log line about the home server is due."""
        return min(self._hello.next_time(), self.update_due(), self.watch.away_at if self.has_welcome else float("inf"))

    def hello_is_due(self, now: float) -> bool:
        """Return True if HELLO is due again, after a home server was busy."""
        return self._hello.is_due(now)

    def update_due(self) -> float:
        """Return the time when the next UPDATE is due. Never while an UPDATE is open, or HELLO for another server:
        the former home server might count a later UPDATE, but its answer would not be read.
        """
        if self.schedule.is_open or self._is_moving or not self.has_welcome or self._is_over:
            return float("inf")
        if (boundary := self.counts.boundary) is not None:
            return float("inf") if boundary.is_told else self.schedule.earliest
        return self.schedule.due_at(self.outbox, self.window, self.inserts)

    # HELLO and its answer

    def hello(self, host: str, pid: int) -> messages.Hello | None:
        """Return a HELLO, whose answer has schema, parameters, run and endpoints; None while another is open."""
        if self._hello.is_open:
            return None
        self._hello.begin()
        return messages.Hello(
            role="actor",
            table=self._table or (self.welcome.table_name if self.has_welcome else ""),  # the same at each server
            inserted=0 if self.counts.boundary is not None else self.counts.inserted,
            label=self.label,
            software=SOFTWARE,
            host=host,
            name=self.name,
            pid=pid,
            codecs=codecs(),
        )

    def parse_welcome(self, answer: Answer, now: float) -> AcceptedWelcome | None:
        """Parse the answer to HELLO; None if the home server is busy. Changes nothing that other threads use.

        Raises:
            MemoireError: HELLO was refused, or the WELCOME does not fit; the client cannot go on.
        """
        self._hello.receive_answer()
        self._is_moving = False
        if isinstance(answer, Refused) and answer.code in PASSING:
            self._hello.due = now + self.limits.tuning.resend_after * self._rng.uniform(1.0, 2.0)
            self.put_off = answer
            return None
        self.put_off = None
        return self._read(welcome_of(answer, self.endpoint))

    def _read(self, answer: HelloAnswer) -> AcceptedWelcome:
        welcome, client = answer.welcome, self.shown
        schema = Schema.from_json(welcome.schema)
        if self._schema is not None and schema != self._schema:
            raise SchemaMismatch(client, "schema", str(schema), f"memory of {self._schema}")
        if self.has_welcome and welcome.storage != self.welcome.storage:
            raise SchemaMismatch(client, "storage", welcome.storage, self.welcome.storage)
        return AcceptedWelcome(answer.header, welcome, schema, Parameters.from_wire(welcome.parameters))

    def stay_in_former_run(self, welcomed: AcceptedWelcome) -> bool:
        """Return True if the client stays in its former run until that run's counts are acknowledged; HELLO follows."""
        if not self.has_welcome or welcomed.welcome.run_name == self.welcome.run_name or self.end_run().is_told:
            return False
        self.home = welcomed.header.home  # the server that takes the remaining counts of the former run
        self.is_between = True
        return True

    def enter_home(self, welcomed: AcceptedWelcome, now: float) -> WelcomeChanges:
        """Enter the home server and run of a WELCOME; returns what changes with that."""
        header, welcome, former = welcomed.header, welcomed.welcome, self._welcome
        self._schema, self.is_between = welcomed.schema, False
        self.counts.enter_run(header.run)
        self.inserts.grant(welcome.granted_steps, "")
        self.windows.enter_account(header.run, header.home, welcome.since)
        self.windows.grant(welcome.credit)
        self.run, self.home, self.table, self.fingerprint = header.run, header.home, welcome.table, header.fingerprint
        self._welcome, self.is_finished, self.schedule.is_dirty = welcome, welcome.finished, True
        change = self.watch.acknowledged(now)
        if former is None:
            self.feedback_through = 0
            return WelcomeChanges(change, False, False)
        if (welcome.epoch, welcome.home_name) != (former.epoch, former.home_name):
            self.feedback_through = 0  # each start of a server numbers feedback from 1
        if welcome.home_name != former.home_name:
            self._move_at = 0.0
        self.schedule.make_due()  # a new or restarted home server gets UPDATE now
        is_other_life = welcome.epoch != former.epoch and welcome.home_name == former.home_name
        has_forgotten = not welcome.durable or welcome.since > former.epoch  # a later `since`: a new state folder
        return WelcomeChanges(change, welcome.run_name != former.run_name, is_other_life and has_forgotten)

    # UPDATE and its answer

    def begin_update(self, now: float) -> SentUpdate:
        """Record that an UPDATE (`reports.report_of`) is sent; returns the contents that its answer acknowledges."""
        boundary = self.counts.boundary
        ticket = self.schedule.asked if boundary is None else boundary.asked
        self.schedule.begin(now)
        return SentUpdate(ticket, self.counts.covered_counts, now, boundary)

    def apply_acknowledgement(self, reply: messages.Updated, asked: SentUpdate, now: float) -> Step:
        """Apply the home server's acknowledgement of an UPDATE; returns the next message to send."""
        is_same = self.is_same_life(reply)
        self.updates += 1
        self.counts.acknowledged, self.trouble = asked.counts, ""
        self.schedule.answered = max(self.schedule.answered, asked.ticket)
        self.outbox.acknowledge(reply.lines_through)
        self.counts.acknowledge_episodes(reply.ended_through)
        if is_same:
            self.window.receive_answer(
                reply.caches, reply.received_bytes, reply.lost_bytes, reply.rejected, asked.at, lost_caches=reply.lost
            )
        self.windows.grant(reply.credit)
        self.schedule.awaits_feedback = is_same and reply.feedback_waiting > 0
        self.schedule.is_dirty = self.schedule.is_dirty or self.has_remainder or bool(self.window.in_flight_bytes)
        self._follow_run(reply, asked)
        if is_same and self.counts.boundary is None:  # a grant for another run does not apply to this one
            self.inserts.grant(reply.granted_steps, reply.wait)
        step = self._next_step(is_same, reply.leaving, now)
        self.is_between = self.counts.boundary is not None or step != "update"
        return step

    def is_same_life(self, reply: messages.Updated) -> bool:
        """Return False if the home server has restarted: then only HELLO shows what continues there."""
        return reply.epoch == self.welcome.epoch

    def _follow_run(self, reply: messages.Updated, asked: SentUpdate) -> None:
        if reply.run_name in ("", self.welcome.run_name):
            if reply.finished and not self.is_finished:
                self.schedule.make_due()  # a server that ends waits until its clients have acknowledged that
            self.is_finished = reply.finished
            if reply.run_name and asked.boundary is not None and asked.boundary is self.counts.boundary:
                self.counts.resume_run()  # the other run was over before this client entered it
        elif (boundary := self.end_run()) is asked.boundary:  # the UPDATE was sent after the run had ended
            self.counts.acknowledge_run(boundary, self.outbox.oldest)

    def _next_step(self, is_same: bool, is_home_leaving: bool, now: float) -> Step:
        # The answer covers all messages to this home server, so that another server counts or logs nothing twice.
        if (boundary := self.counts.boundary) is not None:
            return "hello" if boundary.is_told else "update"
        if not is_same:
            return "hello"
        if is_home_leaving and not self.is_leaving and now >= self._move_at:
            self._move_at = now + MOVE_INTERVAL * self._rng.uniform(0.5, 1.5)
            self._is_moving = not self._hello.is_open
            return "move"
        return "update"

    def update_refused(self, answer: Answer, now: float) -> Step:
        """Apply a refusal of an UPDATE, or an answer that is not UPDATED; returns the next message to send."""
        self.schedule.put_off(now + self.limits.tuning.resend_after)
        if not isinstance(answer, Refused):
            return "update"
        if answer.code == "run":
            self.end_run().is_told = True
        if answer.code in BUSY_CODES:
            self.trouble = answer.text  # part of advice and readiness, until the home server acknowledges UPDATE
        return "hello" if answer.code in OUTDATED else "update"

    def end_run(self) -> RunBoundary:
        """Return the boundary between the former run and the next run; later counts belong to the next run."""
        return self.counts.end_run(self.outbox.newest, self.schedule.asked)
