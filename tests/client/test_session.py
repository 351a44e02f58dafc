"""Tests of a client's session, message by message: its home, run, lines and inserts."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire._core import at_once
from memoire.client.counts import InsertGrant, LineOutbox, RunCounts, truncate_text
from memoire.client.reports import LINES_PER_UPDATE, MemorySums, report_of, take_unacknowledged_report
from memoire.client.session import AWAY_TIMEOUT, HEARTBEAT_INTERVAL, PRESSED_INTERVAL, HomeWatch, Session
from memoire.errors import Closed, Refused, SchemaMismatch, UnknownName
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.wire import messages
from memoire.wire.frames import PASSING, name_hash, update_of
from netkit import CLIENT, SCHEMA, WIDE, reply

pytestmark = pytest.mark.usefixtures("without_io")

LIMITS = Limits.of(update_every=1.0, resend_after=0.5)
NEVER = float("inf")
ONE, TWO = name_hash("one"), name_hash("two")
RUN, NEXT = name_hash("run"), name_hash("next")


class Home:
    """A server that counts nothing; its attributes set its answers."""

    def __init__(self, name="one"):
        self.name, self.run, self.epoch, self.since, self.table = name, "run", 7, 7, 3
        self.facts = {}

    def welcome(self, schema=SCHEMA, **facts):
        body = messages.Welcome(
            schema=schema.to_json(), run_name=self.run, home_name=self.name, epoch=self.epoch, since=self.since,
            table=self.table, table_name="default", **{"parameters": Parameters().to_wire()} | facts,
        )  # fmt: skip
        return reply(body, run=name_hash(self.run), home=name_hash(self.name), fingerprint=5)

    def updated(self, **facts):
        return messages.Updated(**{"epoch": self.epoch, "run_name": self.run, "credit": 1000} | facts)


def new_session(table=""):
    return Session(CLIENT, "tcp://there", table=table, label=9, limits=LIMITS, rng=random.Random(1), now=0.0)


@pytest.fixture
def session():
    return new_session()


@pytest.fixture
def home():
    return Home()


def join(session, home, now=0.0, **facts):
    """Send HELLO and take its WELCOME; return the result of `enter`, or None if the client remains in its run."""
    assert session.hello("host", 1) is not None
    welcomed = session.parse_welcome(home.welcome(**facts), now)
    return None if session.stay_in_former_run(welcomed) else session.enter_home(welcomed, now)


def tell(session, home, now, **facts):
    """Send an UPDATE and take its answer; return the UPDATE and the session's next step."""
    update, asked = report_of(session, MemorySums(), {}), session.begin_update(now)
    session.schedule.is_open = False
    return update, session.apply_acknowledgement(home.updated(**facts), asked, now)


# HELLO and its answer


def test_hello_says_who_asks_and_is_not_asked_twice(session, home):
    assert session.update_due() == session.next_time() == NEVER, "nothing before an answer"
    hello = session.hello("host", 11)
    assert (hello.role, hello.table, hello.label, hello.host, hello.pid) == ("actor", "", 9, "host", 11)
    assert session.hello("host", 11) is None
    session.enter_home(session.parse_welcome(home.welcome(), 1.0), 1.0)
    assert session.hello("host", 11).table == "default", "the same table at each home"
    assert new_session(table="demo").hello("host", 1).table == "demo"


def test_a_welcome_says_where_the_client_belongs(session, home):
    entered = join(session, home, credit=777, granted_steps=40, limits={"message_bytes": 12345}, finished=True)
    assert entered == ("", False, False)
    assert (session.run, session.home, session.table, session.fingerprint) == (RUN, ONE, 3, 5)
    assert (session.schema, session.window.credit, session.inserts.remaining) == (SCHEMA, 777, 40)
    assert (session.most_bytes, session.is_finished, session.schedule.is_dirty) == (12345, True, True)
    at_once(session.recording_changes(10))
    assert session.counts.generated_bytes == 10 * SCHEMA.entry_bytes
    assert session.hello("host", 1).inserted == 10


@pytest.mark.parametrize("code", PASSING)
def test_a_home_that_has_no_time_is_asked_again_later(session, home, code):
    session.hello("host", 1)
    refusal = Refused("tcp://there", code, "later")
    assert session.parse_welcome(refusal, 10.0) is None and session.put_off is refusal
    at = session.next_time()
    assert 10.5 <= at <= 11.0
    assert not session.hello_is_due(at - 0.1) and session.hello_is_due(at)
    join(session, home)
    assert session.put_off is None and not session.hello_is_due(1e9)


def test_a_client_that_is_refused_or_misunderstood_cannot_go_on(session, home):
    session.hello("host", 1)
    with pytest.raises(Refused, match="no such table"):
        session.parse_welcome(Refused("tcp://there", "table", "no such table"), 0.0)
    session.hello("host", 1)
    with pytest.raises(Refused, match="HELLO was answered by UPDATED"):
        session.parse_welcome(reply(home.updated()), 0.0)


def test_another_schema_or_storage_is_refused_and_changes_nothing(session, home):
    join(session, home)
    for answer in (home.welcome(schema=WIDE), home.welcome(storage="episodes")):
        session.hello("host", 1)
        with pytest.raises(SchemaMismatch):
            session.parse_welcome(answer, 1.0)
    assert (session.schema, session.welcome.storage) == (SCHEMA, "caches")


# A home server that restarts, or another home server


@pytest.mark.parametrize(
    ("epoch", "since", "durable", "has_forgotten"),
    [(8, 8, True, True), (9, 8, True, True), (8, 7, True, False), (8, 7, False, True), (7, 7, False, False)],
)
def test_a_home_that_begins_again_may_have_forgotten_what_was_published(
    session, home, epoch, since, durable, has_forgotten
):
    join(session, home)
    session.feedback_through = 4
    home.epoch, home.since = epoch, since
    entered = join(session, home, now=2.0, durable=durable)
    assert entered == ("", False, has_forgotten)
    assert session.feedback_through == (4 if epoch == 7 else 0)
    assert session.update_due() == 0.0, "it is told at once"


# UPDATE and its answer


def test_an_update_says_everything_and_its_answer_acknowledges_it(session, home):
    join(session, home)
    at_once(session.recording_changes(30))
    at_once(session.inserts.recording_changes(10))
    at_once(session.episode_changes(30, 4.5, now=99.0))
    session.outbox.add("a line", 9, 99.0)
    at_once(session.window.push_changes(120, now=0.5))
    session.scalars, session.feedback_through, session.is_leaving = {"loss": 1.0}, 6, True
    ticket = session.schedule.add_waiting_call(session.outbox.newest)
    update = report_of(session, MemorySums(2.5, 3, 0.5), {"policy": 4})
    asked = session.begin_update(1.0)
    assert (update.epoch, update.steps, update.passed_steps, update.episodes) == (7, 30, 10, 1)
    assert (update.caches, update.cache_bytes, update.generated_bytes) == (1, 120, 30 * SCHEMA.entry_bytes)
    assert (update.total_weight, update.positives, update.minimum, update.models) == (2.5, 3, 0.5, {"policy": 4})
    assert [line.text for line in update.lines] == ["a line"] and update.ended[0].returned == 4.5
    assert (update.scalars, update.feedback_through, update.leaving) == ({"loss": 1.0}, 6, True)
    assert session.counts.unacknowledged_counts.steps == 30 and session.update_due() == NEVER
    at_once(session.recording_changes(5))
    session.schedule.is_open = False
    answer = home.updated(lines_through=1, ended_through=1, caches=1, received_bytes=120, credit=500, granted_steps=90)
    assert session.apply_acknowledgement(answer, asked, 2.0) == "update"
    assert session.counts.unacknowledged_counts.steps == 5 and not session.has_remainder
    assert (session.schedule.answered, session.updates, session.trouble) == (ticket, 1, "")
    assert (session.window.in_flight_bytes, session.window.credit, session.inserts.remaining) == (0, 500, 90 - 25)


def test_a_home_that_began_again_is_asked_before_it_is_told_more(session, home):
    join(session, home, credit=50)
    at_once(session.window.push_changes(50, now=0.0))
    home.epoch = 8
    _, step = tell(session, home, 1.0, caches=1, received_bytes=50, granted_steps=3)
    assert step == "hello" and session.is_between
    assert session.window.in_flight_bytes == 50 and session.inserts.remaining > 3, "its account of caches differs"
    join(session, home, now=2.0)
    assert not session.is_between


# Leaving a home server


def test_a_home_that_leaves_is_left_and_told_nothing_more(session, home):
    join(session, home)
    at_once(session.recording_changes(5))
    _, step = tell(session, home, 1.0, leaving=True)
    assert step == "move" and session.is_between
    assert session.hello("host", 1) is not None
    session.schedule.add_waiting_call(0)
    assert session.update_due() == NEVER, "what it is told now, it might count without our hearing of it"
    session.parse_welcome(Refused("tcp://there", "busy", "no room"), 1.1)
    assert session.update_due() < NEVER


# Another run


def test_a_run_is_told_to_its_end_before_the_next_one_begins(session, home):
    join(session, home)
    at_once(session.recording_changes(10))
    session.outbox.add("old", 9, 0.0)
    at_once(session.episode_changes(10, 1.0, now=0.0))
    ticket = session.schedule.add_waiting_call(session.outbox.newest)
    home.run = "next"
    update, step = tell(session, home, 1.0)
    assert (update.steps, step) == (10, "update"), "this was said before anybody knew of the other run"
    assert session.is_between and session.schedule.answered == ticket
    later = session.schedule.add_waiting_call(session.outbox.newest)
    at_once(session.recording_changes(7))
    session.outbox.add("new", 9, 0.0)
    assert session.update_due() == 1.0 and session.hello("host", 1).inserted == 0
    update, step = tell(session, home, 2.0, lines_through=1, ended_through=0)
    assert (update.steps, [line.text for line in update.lines], len(update.ended)) == (10, ["old"], 1)
    assert step == "update", "an episode is missing there"
    update, step = tell(session, home, 3.0, lines_through=1, ended_through=1)
    assert step == "hello" and session.schedule.answered == ticket < later
    assert session.update_due() == NEVER, "the next run has to be known first"
    welcomed = session.parse_welcome(home.welcome(), 4.0)
    assert not session.stay_in_former_run(welcomed) and session.enter_home(welcomed, 4.0).is_new_run
    update, _ = tell(session, home, 5.0, lines_through=2)
    assert (session.run, update.steps, [line.text for line in update.lines]) == (NEXT, 7, ["new"])
    assert session.schedule.answered == later and not session.is_between


def test_a_welcome_to_another_run_waits_until_the_former_one_is_told(session, home):
    join(session, home)
    at_once(session.recording_changes(10))
    home.run, home.name = "next", "two"
    assert join(session, home) is None
    assert (session.run, session.home, session.welcome.run_name) == (RUN, TWO, "run"), "that home hears the rest"
    assert session.is_between, "what was pushed now would count for no run"
    at_once(session.recording_changes(3))
    update, step = tell(session, home, 1.0)
    assert (update.steps, update.epoch, update.caches, step) == (10, 0, 0, "hello")
    assert join(session, home).is_new_run and session.counts.reported.steps == 3


def test_a_run_goes_on_if_the_next_one_was_over_before_the_client_was_in_it(session, home):
    join(session, home)
    at_once(session.recording_changes(10))
    home.run = "next"
    assert tell(session, home, 1.0)[1] == "update" and session.is_between
    asked = session.begin_update(2.0)
    at_once(session.recording_changes(5))
    home.run = "run"
    assert session.apply_acknowledgement(home.updated(), asked, 2.0) == "update"
    session.schedule.is_open = False
    assert not session.is_between and session.counts.reported.steps == 15
    assert session.update_due() > 2.0, "not again and again"


def test_a_run_that_nobody_knows_any_more_is_left_at_once(session, home):
    join(session, home)
    at_once(session.recording_changes(10))
    asked = session.begin_update(1.0)
    session.schedule.is_open = False
    assert session.update_refused(Refused("tcp://there", "run", "unknown"), 1.0) == "hello"
    assert session.update_due() == NEVER
    home.run = "next"
    assert join(session, home, now=2.0).is_new_run and session.counts.reported.steps == 0
    assert asked.boundary is None


# Refusals


@pytest.mark.parametrize("code", ["disk", "busy"])
def test_why_nothing_is_acknowledged_is_kept_until_something_is(session, home, code):
    join(session, home)
    session.schedule.add_waiting_call(0)
    assert session.update_refused(Refused("tcp://there", code, "the disk is full"), 5.0) == "update"
    assert session.trouble == "the disk is full" and session.update_due() == 5.5, "not at once again"
    tell(session, home, 6.0)
    assert session.trouble == ""


@pytest.mark.parametrize("answer", [Refused("tcp://there", "value", "a NaN"), Closed("this client")])
def test_any_other_refusal_changes_nothing(session, home, answer):
    join(session, home)
    assert session.update_refused(answer, 5.0) == "update"
    assert session.trouble == "" and session.update_due() == 5.5 + LIMITS.tuning.update_every
    session.count_refusal("value")
    session.count_refusal("value")
    assert session.refused == {"value": 2}


# When the next UPDATE is due


def wait_for_a_line(session):
    session.outbox.add("x", 9, 0.0)
    session.schedule.asked_line = 1


def press(session):
    session.schedule.pressed = 1


def use_half_the_grant(session):
    session.inserts.grant(0, "wait")
    session.inserts.grant(10, "")
    at_once(session.recording_changes(6))
    session.schedule.is_dirty = False


HAPPENS = {
    "nothing": (lambda session: None, HEARTBEAT_INTERVAL),
    "a step": (lambda session: at_once(session.recording_changes(1)), LIMITS.tuning.update_every),
    "half the window": (lambda session: at_once(session.window.push_changes(500, now=10.0)), PRESSED_INTERVAL),
    "half the grant": (use_half_the_grant, PRESSED_INTERVAL),
    "no room": (press, PRESSED_INTERVAL),
    "a question": (lambda session: session.schedule.add_waiting_call(0), 0.0),
    "a line that is waited for": (wait_for_a_line, 0.0),
    "many lines": (lambda session: [session.outbox.add("x", 9, 0.0) for _ in range(LIMITS.log_lines // 2)], 0.0),
}
"""Action and seconds until the next UPDATE, by the name of the event."""


@pytest.mark.parametrize("what", HAPPENS)
def test_an_update_is_due_the_sooner_the_more_depends_on_it(session, home, what):
    happens, pause = HAPPENS[what]
    join(session, home)
    tell(session, home, 10.0)
    session.watch.acknowledged(10.0)
    session.schedule.is_dirty = False
    happens(session)
    assert session.update_due() == session.next_time() == 10.0 + pause


# The remainder of a session


def parts_of(remainder):
    return [(part.run, update_of(part.update)) for part in remainder.parts]


def test_what_is_left_fits_messages_and_is_complete(session, home):
    join(session, home)
    at_once(session.recording_changes(5))
    for number in range(LINES_PER_UPDATE + 1):
        session.outbox.add(f"{number}", 9, 0.0)
    at_once(session.episode_changes(5, 2.0, now=1.0))
    remainder = take_unacknowledged_report(session, {"policy": 2})
    assert (remainder.client, remainder.label, remainder.table, remainder.home) == (CLIENT, 9, "default", "one")
    assert (remainder.steps, remainder.episodes, remainder.lines) == (5, 1, LINES_PER_UPDATE + 1)
    (_, first), (_, second), (_, last) = parts_of(remainder)
    assert (len(first.lines), len(first.ended), len(second.lines), len(last.lines)) == (LINES_PER_UPDATE, 1, 1, 0)
    assert {run for run, _ in parts_of(remainder)} == {RUN} and last.steps == 5 and last.models == {"policy": 2}


@pytest.mark.parametrize("is_told", [False, True])
def test_what_is_left_between_two_runs_belongs_to_both(session, home, is_told):
    join(session, home)
    at_once(session.recording_changes(5))
    session.end_run().is_told = is_told
    at_once(session.recording_changes(2))
    updates = [(run, update.steps) for run, update in parts_of(take_unacknowledged_report(session, {}))]
    assert updates == ([] if is_told else [(RUN, 5)]) + [(0, 2)]


def test_a_setting_that_this_version_does_not_know_is_refused_and_another_new_field_is_ignored():
    home, session = Home(), new_session()
    hello = session.hello("host", 1)
    assert hello is not None
    settings = Parameters().to_wire()
    renamed = {"discount_factor" if name == "discount" else name: value for name, value in settings.items()}
    with pytest.raises(UnknownName, match="takes no 'discount_factor'"):
        session.parse_welcome(home.welcome(parameters=renamed), 0.0)
    encoded = msgspec.to_builtins(home.welcome().body) | {"of_a_later_version": 1}
    welcome = msgspec.convert(encoded, messages.Welcome)
    assert session.parse_welcome(reply(welcome), 0.0).parameters == Parameters()


# --- Reports that a home server is away, and that the home server is back


@given(st.lists(st.tuples(st.floats(0.0, 8.0), st.booleans()), max_size=60))
def test_a_home_is_said_to_be_away_once_and_back_once(steps):
    watch, now, changes, last = HomeWatch(0.0), 0.0, [], 0.0
    for seconds, is_heard in steps:
        now += seconds
        change = watch.check_away(now)
        assert (change == "away") == (now >= last + AWAY_TIMEOUT and changes[-1:] != ["away"])
        changes += [change] if change else []
        if is_heard:
            change = watch.acknowledged(now)
            assert (change == "back") == (changes[-1:] == ["away"])
            changes += [change] if change else []
            last = now
        assert watch.away_at == (float("inf") if changes[-1:] == ["away"] else last + AWAY_TIMEOUT)
    assert changes == ["away", "back"] * (len(changes) // 2) + ["away"] * (len(changes) % 2)


# --- The limit on recording ahead of drawing


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.booleans()), max_size=30))
def test_no_more_is_inserted_than_was_granted_and_the_rest_is_passed(history):
    counts = RunCounts()
    inserts = InsertGrant(counts, 1.0)
    granted = inserted = total = 0
    inserts.grant(0, "learners are behind")
    for entries, more, is_settled in history:
        at_once(counts.recording_changes(entries, 1))
        at_once(inserts.recording_changes(entries))
        total += entries
        granted += more
        inserts.grant(granted, "")
        admitted = inserts.insertable_count(entries)
        at_once(inserts.insert_changes(admitted, admitted))
        assert admitted == min(entries, granted - inserted)
        inserted += admitted
        if is_settled:
            at_once(inserts.insert_changes(entries - admitted, 0))
        assert (counts.inserted, counts.passed) == (inserted, total - inserted)
        assert inserts.remaining == granted - inserted >= 0


def test_a_client_that_is_granted_nothing_more_asks_at_longer_intervals():
    inserts = InsertGrant(RunCounts(), 1.0)
    inserts.waiting, pauses = 1, []
    for _ in range(9):
        inserts.grant(0, "learners are behind")
        pauses.append(inserts.pause)
    assert pauses == sorted(pauses) and pauses[0] < pauses[-1] == 1.0
    inserts.grant(1, "")
    assert inserts.pause < pauses[0]


# --- A client's log lines until the client's home server has the lines


@given(st.text(), st.integers(0, 40))
def test_cutting_respects_the_limit_and_characters(text, limit):
    shorter = truncate_text(text, limit)
    assert len(shorter.encode()) <= max(limit, 3)
    if len(text.encode("utf-8", "backslashreplace")) <= limit:
        assert shorter == text.encode("utf-8", "backslashreplace").decode()


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3)), max_size=50), st.integers(1, 1000))
def test_an_outbox_is_bounded_in_bytes_and_holds_one_line_of_any_size(steps, most_bytes):
    outbox = LineOutbox(most_lines=1000, most_bytes=most_bytes, line_bytes=200)
    for length, acknowledged in steps:
        was_empty = not len(outbox)
        assert outbox.add("é" * length, 1, 0.0) or not was_empty
        assert outbox.bytes <= most_bytes or len(outbox) == 1
        outbox.acknowledge(int(min(outbox.oldest, outbox.newest)) + acknowledged - 1)
    outbox.acknowledge(outbox.newest)
    assert outbox.bytes == len(outbox) == 0


@pytest.mark.parametrize("most", [{"most_lines": 4}, {"most_bytes": 4 * 110}])
def test_an_outbox_says_when_it_is_half_full(most):
    outbox = LineOutbox(**{"most_lines": 100, "most_bytes": 1 << 20} | most, line_bytes=10)
    outbox.add("x" * 10, 1, 0.0)
    assert not outbox.is_half_full
    outbox.add("x" * 10, 1, 0.0)
    assert outbox.is_half_full
