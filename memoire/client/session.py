"""What HELLO, WELCOME, UPDATE and UPDATED mean for a client: its home, its run, when it moves, what it says next.

    HELLO ──▶ WELCOME ──▶ UPDATE ──▶ UPDATED ──▶ UPDATE ──▶ UPDATED ...
      ▲                                            │
      └── another run has begun, and the former one has been told everything; the home began again; it is left

Pure: no lock, no socket, no clock. Messages and the time come in; what is to be sent goes out. Nothing is counted or
logged twice at a home that is left: HELLO goes out only between an answer and the next UPDATE.

Whether a client's home answers: when to say that it does not, and when to say that it does again. Pure.

When a client sends its next UPDATE. Pure: time and chance are passed in.
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
"""Seconds without an acknowledgement after which a home is said to be away: two heartbeats of a client."""

Change = Literal["away", "back", ""]


class HomeWatch:
    """One word when a home has been away for `AWAY_TIMEOUT`, and one when it is back.

        acknowledged     10 s later: away                 acknowledged: back
    ───────●────────────────────●─────────────────────────────●──────────────▶
    """

    def __init__(self, now: float) -> None:
        self.acknowledged_at = now
        """When the home acknowledged something last."""
        self.is_away = False

    @property
    def due(self) -> float:
        """When `look` has something to say, unless an acknowledgement comes before."""
        return float("inf") if self.is_away else self.acknowledged_at + AWAY_TIMEOUT

    def acknowledged(self, now: float) -> Change:
        """The home has acknowledged something; "back" where it was said to be away."""
        self.acknowledged_at = now
        was_away, self.is_away = self.is_away, False
        return "back" if was_away else ""

    def look(self, now: float) -> Change:
        """Once, as soon as it is due: "away"."""
        if now < self.due:
            return ""
        self.is_away = True
        return "away"


HEARTBEAT_INTERVAL = 5.0
"""Seconds between two UPDATE messages of a client that has no news."""
PRESSED_INTERVAL = 0.01
"""Seconds between two UPDATE messages while the byte window is half used, or TD errors wait at the home."""
REPORT_DELAY = 0.3
"""Seconds within which NEWS is answered by UPDATE, at random: a thousand clients hear of it in the same instant."""


class UpdateSchedule:
    """When the next UPDATE is due, from what has happened since the newest one. The owner locks.

    Args:
        interval: Seconds between two UPDATE messages of a client that has news.
    """

    def __init__(self, interval: float, rng: random.Random) -> None:
        self.is_open = False
        """Whether an UPDATE is on its way that has no answer yet."""
        self.is_dirty = False
        """Whether there is something to say."""
        self.asked = 0
        """Calls of update() until now; the number of one is its ticket."""
        self.answered = 0
        """The newest of these calls that an answer covers."""
        self.asked_line = 0
        """Newest log line that somebody waits for."""
        self.pressed = 0
        """Calls that wait for room in the byte window."""
        self.has_feedback = False
        """Whether TD errors were applied that the home does not know of."""
        self.awaits_feedback = False
        """Whether more of them wait at the home than one reply brings."""
        self._interval, self._rng = interval, rng
        self._sent_at = 0.0
        self._news_at = float("inf")  # when to answer NEWS

    def ask(self, line: int) -> int:
        """Somebody waits until everything is acknowledged, log lines up to `line` too; returns the ticket."""
        self.asked, self.asked_line = self.asked + 1, line
        return self.asked

    def hurry(self) -> None:
        """Send one at once, whatever there is to say."""
        self._news_at = 0.0

    def hear_news(self, now: float) -> None:
        """The home has sent NEWS: an UPDATE is due at a random time within `REPORT_DELAY` seconds. Its reply has the
        news.
        """
        self._news_at = min(self._news_at, now + self._rng.uniform(0.0, REPORT_DELAY))

    def begin(self, now: float) -> None:
        """One is sent."""
        self.is_open, self._sent_at, self._news_at = True, now, float("inf")
        self.has_feedback = self.awaits_feedback = False

    def put_off(self, until: float) -> None:
        """The newest one was refused: send none before."""
        self.is_dirty, self._sent_at = True, until

    @property
    def soonest(self) -> float:
        """When to send the next one to whoever waits for it: at once, unless the newest one was refused."""
        return self._sent_at

    def due(self, outbox: LineOutbox, window: PushWindow, inserts: InsertGrant) -> float:
        """When the next one is due, provided that none is open."""
        # Lines wait that somebody waits for and that did not fit the last one, or so many that log() soon waits.
        has_backlog = outbox.oldest <= self.asked_line or outbox.is_half_full
        if self.asked > self.answered or has_backlog:
            return self._sent_at
        if inserts.waiting or inserts.is_short:
            return self._sent_at + inserts.pause
        if self.pressed or window.is_half_used or inserts.is_half_used or self.awaits_feedback:
            return self._sent_at + PRESSED_INTERVAL
        if self.has_feedback:  # a learner is at work: what it says next is fetched soon, too
            return min(self._news_at, self._sent_at + self._interval / 2)
        return min(self._news_at, self._sent_at + (self._interval if self.is_dirty else HEARTBEAT_INTERVAL))


MOVE_INTERVAL = 2.0
"""Seconds between two HELLO messages of a client whose home is being drained, while nobody else takes it; times 0.5 to
1.5."""
OUTDATED = ("run", "schema", "table", "client")
"""Codes of refusals of an UPDATE after which HELLO asks what run, schema and home are now."""
BUSY_TIMEOUT = ("disk", "busy")
"""Codes of those that end by themselves."""

Step = Literal["update", "hello", "move"]
"""What comes after an answer: the next UPDATE, or HELLO to the same home, or HELLO for another home."""


class AcceptedWelcome(NamedTuple):
    """A WELCOME that was read and fits this client."""

    header: MessageHeader
    told: messages.Welcome
    schema: Schema
    parameters: Parameters


class WelcomeChanges(NamedTuple):
    """What is new with a WELCOME."""

    change: Change
    is_new_run: bool
    has_forgotten: bool
    """Whether this home began again and knows nothing of what it had published."""


class SentUpdate(NamedTuple):
    """What an UPDATE covered when it was sent, for its answer."""

    ticket: int
    """Newest call of update() that it answers."""
    counts: ClientCounts
    at: float
    boundary: RunBoundary | None


class Session:
    """One client's standing at its home. Not thread-safe: the owner locks, except for what its thread alone uses.

    Args:
        client: Id of the client.
        endpoint: For errors.
        table: Name of the table that it asks for; "" takes the first.
        now: The time, as all other times here are counted.
        name: That a person gave to it; "" for none.
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
        """What people call it: its name, or else the beginning of its id."""
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
        self.welcome: messages.Welcome | None = None
        """The newest one."""
        self.put_off: Refused | None = None
        """What a home said that had no time for HELLO."""
        self.run = self.home = self.table = self.fingerprint = 0
        """What headers say."""
        self.parameters, self.parameters_version = Parameters(), 0
        self.models: dict[str, int] = {}
        """Newest versions at the home, by topic."""
        self.scalars: dict[str, float] = {}
        self.feedback_through = 0
        """Number of the newest feedback that was applied."""
        self.is_between = False
        """Until HELLO is answered: what is pushed now would count for nobody."""
        self.is_finished = False
        self.is_leaving = False
        self.trouble = ""
        """Why the home acknowledges nothing, as it says."""
        self.updates = 0
        """UPDATE messages that were answered."""
        self.refused: dict[str, int] = {}
        """What came in and was not taken, by code."""
        self.limits = limits
        self._table, self._rng = table, rng
        self._schema: Schema | None = None
        self._hello = HelloSchedule(due=float("inf"))  # due by itself where a home had no time
        self._is_over = False  # the client cannot go on
        self._is_moving = False  # while HELLO is to bring another home
        self._move_at = 0.0  # when to ask for another home again

    @property
    def schema(self) -> Schema:
        """What an entry is, as the home says."""
        assert self._schema is not None
        return self._schema

    @property
    def told(self) -> messages.Welcome:
        """The newest WELCOME; there is one once `connect` has returned."""
        assert self.welcome is not None
        return self.welcome

    @property
    def window(self) -> PushWindow:
        """What is on the way to the present home."""
        return self.windows.now

    @property
    def most_bytes(self) -> int:
        """Of the payload of one message."""
        return self.told.limits.get("message_bytes", self.limits.message_bytes)

    @property
    def has_remainder(self) -> bool:
        """Whether lines or episodes wait until a home has them."""
        return bool(len(self.outbox) or self.counts.waiting_episodes)

    def refuse(self, code: str) -> None:
        """Count something that came in and was not taken."""
        self.refused[code] = self.refused.get(code, 0) + 1

    # What is counted

    def recording(self, entries: int) -> Changes:
        """The changes by which so many entries were recorded."""
        changes, schedule = self.counts.recording(entries, self.schema.entry_bytes), self.schedule
        return changes if schedule.is_dirty else changes + setting(schedule, is_dirty=True)

    def closing_episode(self, length: int, returned: float, now: float, kind: int = messages.TRAIN) -> Changes:
        """The changes by which an episode was closed at `now`, in seconds since 1970."""
        return self.counts.closing_episode(length, returned, now, kind) + setting(self.schedule, is_dirty=True)

    def end(self) -> None:
        """The client cannot go on, for good: no home is told anything more."""
        self._is_over = True

    # When something is to be sent

    def next_time(self) -> float:
        """When `hello_is_due`, an UPDATE or a word about the home is due."""
        return min(self._hello.next_time(), self.update_due(), float("inf") if self.welcome is None else self.watch.due)

    def hello_is_due(self, now: float) -> bool:
        """Whether to ask a home again that had no time."""
        return self._hello.is_due(now)

    def update_due(self) -> float:
        """When the next UPDATE is due; never while one is open, or while HELLO is to bring another home or run: what
        the former home is told after its last answer, it might count without our hearing of it.
        """
        if self.schedule.is_open or self._is_moving or self.welcome is None or self._is_over:
            return float("inf")
        if (boundary := self.counts.boundary) is not None:
            return float("inf") if boundary.is_told else self.schedule.soonest
        return self.schedule.due(self.outbox, self.window, self.inserts)

    # HELLO and its answer

    def hello(self, host: str, pid: int) -> messages.Hello | None:
        """Ask for everything again; None while such a request is open."""
        if self._hello.is_open:
            return None
        self._hello.begin()
        return messages.Hello(
            role="actor",
            table=self._table or ("" if self.welcome is None else self.told.table_name),  # the same at each home
            inserted=0 if self.counts.boundary is not None else self.counts.inserted,
            label=self.label,
            software=SOFTWARE,
            host=host,
            name=self.name,
            pid=pid,
            codecs=codecs(),
        )

    def welcomed(self, answer: Answer, now: float) -> AcceptedWelcome | None:
        """HELLO was answered; None if the home had no time. Changes nothing that other threads use.

        Raises:
            MemoireError: the client cannot go on.
        """
        self._hello.answered()
        self._is_moving = False
        if isinstance(answer, Refused) and answer.code in PASSING:
            self._hello.due = now + self.limits.tuning.resend_after * self._rng.uniform(1.0, 2.0)
            self.put_off = answer
            return None
        self.put_off = None
        return self._read(welcome_of(answer, self.endpoint))

    def _read(self, answer: HelloAnswer) -> AcceptedWelcome:
        told, who = answer.told, self.shown
        schema = Schema.from_json(told.schema)
        if self._schema is not None and schema != self._schema:
            raise SchemaMismatch(who, "schema", str(schema), f"memory of {self._schema}")
        if self.welcome is not None and told.storage != self.welcome.storage:
            raise SchemaMismatch(who, "storage", told.storage, self.welcome.storage)
        return AcceptedWelcome(answer.header, told, schema, Parameters.from_wire(told.parameters))

    def remains(self, welcomed: AcceptedWelcome) -> bool:
        """Whether it stays in its former run for now, since that has not been told everything; HELLO comes again."""
        if self.welcome is None or welcomed.told.run_name == self.welcome.run_name or self.end_run().is_told:
            return False
        self.home = welcomed.header.home  # who hears the rest
        self.is_between = True
        return True

    def enter(self, welcomed: AcceptedWelcome, now: float) -> WelcomeChanges:
        """Belong to this home and run from now on."""
        header, told, former = welcomed.header, welcomed.told, self.welcome
        self._schema, self.is_between = welcomed.schema, False
        self.counts.enter_run(header.run)
        self.inserts.grant(told.granted_steps, "")
        self.windows.belong(header.run, header.home, told.since)
        self.windows.grant(told.credit)
        self.run, self.home, self.table, self.fingerprint = header.run, header.home, told.table, header.fingerprint
        self.is_finished, self.welcome, self.schedule.is_dirty = told.finished, told, True
        change = self.watch.acknowledged(now)
        if former is None:
            self.feedback_through = 0
            return WelcomeChanges(change, False, False)
        if (told.epoch, told.home_name) != (former.epoch, former.home_name):
            self.feedback_through = 0  # pieces are numbered from 1 at each start of each home
        if told.home_name != former.home_name:
            self._move_at = 0.0
        self.schedule.hurry()  # a home that is new, or was away, is told at once
        is_other_life = told.epoch != former.epoch and told.home_name == former.home_name
        has_forgotten = not told.durable or told.since > former.epoch  # the latter: its state folder is a new one
        return WelcomeChanges(change, told.run_name != former.run_name, is_other_life and has_forgotten)

    # UPDATE and its answer

    def begin_update(self, now: float) -> SentUpdate:
        """An UPDATE is sent now, see `reports.report_of`; returns what its answer will acknowledge."""
        boundary = self.counts.boundary
        ticket = self.schedule.asked if boundary is None else boundary.asked
        self.schedule.begin(now)
        return SentUpdate(ticket, self.counts.reach, now, boundary)

    def updated(self, said: messages.Updated, asked: SentUpdate, now: float) -> Step:
        """An UPDATE was acknowledged; returns what comes next."""
        is_same = self.is_same_life(said)
        self.updates += 1
        self.counts.acknowledged, self.trouble = asked.counts, ""
        self.schedule.answered = max(self.schedule.answered, asked.ticket)
        self.outbox.acknowledge(said.lines_through)
        self.counts.acknowledge_episodes(said.ended_through)
        if is_same:
            self.window.answered(
                said.caches, said.received_bytes, said.lost_bytes, said.rejected, asked.at, lost_caches=said.lost
            )
        self.windows.grant(said.credit)
        self.schedule.awaits_feedback = is_same and said.feedback_waiting > 0
        self.schedule.is_dirty = self.schedule.is_dirty or self.has_remainder or bool(self.window.in_flight_bytes)
        self._follow_run(said, asked)
        if is_same and self.counts.boundary is None:  # a grant of another run does not count this one's entries
            self.inserts.grant(said.granted_steps, said.wait)
        step = self._next_step(is_same, said.leaving, now)
        self.is_between = self.counts.boundary is not None or step != "update"
        return step

    def is_same_life(self, said: messages.Updated) -> bool:
        """Whether the home has not begun again; if it has, only HELLO says what continues there."""
        return said.epoch == self.told.epoch

    def _follow_run(self, said: messages.Updated, asked: SentUpdate) -> None:
        if said.run_name in ("", self.told.run_name):
            if said.finished and not self.is_finished:
                self.schedule.hurry()  # a server that ends waits until its clients say that they know
            self.is_finished = said.finished
            if said.run_name and asked.boundary is not None and asked.boundary is self.counts.boundary:
                self.counts.resume_run()  # the other run was over before this client was in it
        elif (boundary := self.end_run()) is asked.boundary:  # this answers what was said after the run had ended
            self.counts.acknowledge_run(boundary, self.outbox.oldest)

    def _next_step(self, is_same: bool, is_home_leaving: bool, now: float) -> Step:
        # All that this home was sent is in its answer: nothing will be counted or logged twice.
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
        """The home did not take an UPDATE, or something else than UPDATED came; returns what comes next."""
        self.schedule.put_off(now + self.limits.tuning.resend_after)
        if not isinstance(answer, Refused):
            return "update"
        if answer.code == "run":
            self.end_run().is_told = True
        if answer.code in BUSY_TIMEOUT:
            self.trouble = answer.text  # said when the home has acknowledged nothing for a while, and where it matters
        return "hello" if answer.code in OUTDATED else "update"

    def end_run(self) -> RunBoundary:
        """Another run has begun: what comes from now on does not belong to the former one."""
        return self.counts.end_run(self.outbox.newest, self.schedule.asked)
