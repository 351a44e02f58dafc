"""What a server answers, without a socket: each request may come any number of times."""

import numpy as np
import pytest

from dispatchkit import ME, YOU, Asker, arrive, cache_of, made_dispatcher
from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.replay.batch import ID
from memoire.replay.parameters import Parameters
from memoire.server.dispatch import Dispatcher
from memoire.server.handlers.accounts import FEEDBACK_SAMPLES
from memoire.tables.caches.pool import Pool
from memoire.tables.table import Table, Tables
from memoire.wire import _bytes, messages
from memoire.wire import containers as pack
from memoire.wire import containers as unpack
from memoire.wire.frames import name_hash
from memoire.wire.rows import ACCOUNT, CLIENT_COUNTS, unpack_accounts, unpack_sums
from netkit import SCHEMA


@pytest.fixture
def told():
    return {"lines": [], "models": []}


@pytest.fixture
def dispatcher(told):
    return made_dispatcher(told)


def made(parameters=None, epoch=1):
    """A dispatcher without a state folder."""
    settings = {"default": Table(SCHEMA, parameters=parameters or Parameters(cache_size=64))}
    tables = Tables(settings, lambda name, table: Pool(table.schema, table.parameters, seed=0))
    return Dispatcher(tables=tables, run="run", name="home", limits=Limits(), clock=lambda: 1000.0, epoch=epoch)


def test_a_server_without_a_folder_that_begins_before_its_former_life_takes_none_of_its_caches():
    lives = []
    for epoch in (5_000, 2_000, 9_000):
        me = Asker(made(epoch=epoch))
        told = me.ask(messages.Hello()).body
        assert told.epoch == epoch
        for former in lives:
            me.ask(messages.Update(epoch=former, episodes=1, steps=9, caches=7, cache_bytes=700))
        me.ask(messages.Update(epoch=told.epoch, episodes=2, steps=20, caches=1, cache_bytes=100))
        account = me.dispatcher.ledger.find(ME)
        assert (account.report.steps, account.pushed_caches, account.pushed_bytes) == (20, 1, 100)
        me.dispatcher.ledger.check_invariants()
        lives.append(epoch)


BAND = Parameters(cache_size=8, samples_per_insert=1.0, samples_per_insert_tolerance=30.0, min_size=0)


def test_another_run_begins_its_band_anew():
    """Learners were 25 samples behind, and one client held all that may be recorded: neither is the next run's."""
    dispatcher = made(parameters=BAND)
    me, limiter = Asker(dispatcher), dispatcher.tables.first.limiter
    told = me.ask(messages.Hello()).body
    assert told.granted_steps == 30
    me.ask(messages.Update(epoch=told.epoch, episodes=1, steps=25))
    assert (limiter.stats().surplus, limiter.stats().draws_wait) == (25.0, "")
    dispatcher.begin_run("next")
    assert (limiter.stats().surplus, limiter.stats().inserts_wait, limiter.standing().is_told) == (0.0, "", False)
    you = Asker(dispatcher, YOU)
    assert you.ask(messages.Hello()).body.granted_steps == 30, "what a client of the former run was granted is free"
    again = me.ask(messages.Hello(inserted=0)).body
    me.ask(messages.Update(epoch=again.epoch, steps=4), run=name_hash("next"))
    assert limiter.stats().surplus == 4.0


def test_hello_says_all_that_a_client_needs(dispatcher):
    reply = Asker(dispatcher).ask(messages.Hello(label=7, codecs=["zlib", "unheard of"]))
    told = reply.body
    assert (told.run_name, told.home_name, told.servers, told.codecs) == ("run", "home", ["home"], ["zlib"])
    assert Parameters.from_wire(told.parameters).cache_size == 64 and told.credit == Limits().credit
    assert reply.changed == {
        "run": name_hash("run"),
        "home": name_hash("home"),
        "fingerprint": SCHEMA.fingerprint,
        "table": 0,
    }


def test_an_update_that_comes_again_changes_nothing(dispatcher, told):
    me = Asker(dispatcher)
    line = messages.Line(number=1, time=0.0, label=7, text="x")
    update = messages.Update(episodes=3, steps=30, lines=[line])
    first, again = me.ask(update), me.ask(update, again=True)
    assert first == again and (first.body.episodes, first.body.lines_through) == (3, 1)
    assert len(told["lines"]) == 1 and dispatcher.ledger.episodes == 3
    dispatcher.ledger.check_invariants()


def test_parameters_are_sent_to_those_that_have_others(dispatcher):
    me = Asker(dispatcher)
    assert me.ask(messages.Update(parameters_version=1)).body.parameters is None
    dispatcher.configure(dispatcher.tables.first, {"cache_size": 32})
    assert me.ask(messages.Update(parameters_version=1)).body.parameters["cache_size"] == 32
    assert me.ask(messages.Update(parameters_version=2)).body.parameters is None


def test_a_draw_that_is_asked_for_again_takes_no_samples(dispatcher):
    arrive(dispatcher, cache_of())
    reader = Asker(dispatcher, YOU)
    rows = unpack_sums(reader.ask(messages.Sums(reserve=64)).body.clients)
    counts = np.zeros(1, CLIENT_COUNTS)
    counts["client"], counts["count"] = rows["client"], 10
    first = reader.ask(messages.Draw(counts=counts.tobytes(), reserve=64))
    again = reader.ask(messages.Draw(counts=counts.tobytes(), reserve=64), again=True)
    assert again.payload is first.payload and dispatcher.tables.first.pool.stats().drawn == 10
    for _ in range(2):
        reader.ask(messages.Draw(counts=counts.tobytes(), reserve=64))
    reader.number -= 3
    overtaken = reader.ask(messages.Draw(counts=counts.tobytes(), reserve=64))
    assert overtaken.body.code == "missing" and dispatcher.tables.first.pool.stats().drawn == 30


@pytest.mark.parametrize("body", [b"", b"x", b"twenty-five bytes of model"])
def test_a_model_is_published_once_however_often_its_stretches_come(dispatcher, told, body):
    me = Asker(dispatcher)
    checksum = _bytes.checksum(body)
    for offset in range(0, max(1, len(body)), 10):
        publish = messages.Publish(topic="t", size=len(body), checksum=checksum, offset=offset)
        chunk = body[offset : offset + 10] or None
        first = me.ask(publish, payload=chunk)
        assert me.ask(publish, payload=chunk, again=True) == first
    assert first.body.version == 1 and [model.body for model in told["models"]] == [body]
    publish = messages.Publish(topic="t", size=1, checksum=_bytes.checksum(b"n"), version=1)
    assert me.ask(publish, payload=b"n").body.code == "topic"
    late = messages.Publish(topic="t", size=30, checksum=checksum, offset=10)
    assert me.ask(late, payload=b"0123456789").body.code == "missing"
    huge = messages.Publish(topic="t", size=1001, checksum=checksum)
    assert me.ask(huge, payload=b"0").body.code == "too_large"


def test_a_version_that_is_here_is_taken_again_at_once(dispatcher, told):
    """A reader publishes what it has to a server that comes back, which may have it from its disk."""
    model = dispatcher.publish("t", b"x" * 30, 4)
    publish = messages.Publish(topic="t", size=30, checksum=model.checksum, version=4)
    said = Asker(dispatcher).ask(publish, payload=b"x" * 10).body
    assert (said.received, said.version) == (30, 4) and told["models"] == [model]
    other = messages.Publish(topic="t", size=1, checksum=_bytes.checksum(b"y"), version=4)
    assert Asker(dispatcher, YOU).ask(other, payload=b"y").body.code == "topic"


def test_a_model_is_fetched_in_stretches(dispatcher):
    dispatcher.publish("t", b"fifteen bytes..")
    me = Asker(dispatcher)
    first = me.ask(messages.Fetch(topic="t"))
    assert (first.body.version, first.body.size, bytes(first.payload)) == (1, 15, b"fifteen by")
    assert bytes(me.ask(messages.Fetch(topic="t", version=1, offset=10)).payload) == b"tes.."
    assert bytes(me.ask(messages.Fetch(topic="t", version=1, offset=2, size=3)).payload) == b"fte"
    for wrong in (
        messages.Fetch(topic="t", version=2),
        messages.Fetch(topic="u"),
        messages.Fetch(topic="t", offset=16),
    ):
        assert me.ask(wrong).body.code == "missing"


def test_a_model_that_was_overtaken_while_it_was_asked_for_is_missing_and_nothing_to_worry_about(dispatcher):
    for body in range(20):
        dispatcher.publish("t", bytes([body]) * dispatcher.limits.model_bytes)
    me = Asker(dispatcher)
    assert me.ask(messages.Fetch(topic="t", version=1)).body.code == "missing"
    assert dispatcher.refused == {}
    assert me.ask(messages.Fetch(topic="t", version=21)).body.code == "missing"
    assert dispatcher.refused == {"missing": 1}


def test_feedback_waits_for_its_owner_and_is_given_until_it_is_applied(dispatcher):
    me = Asker(dispatcher)
    me.ask(messages.Update(steps=5))
    ids = np.zeros(5, ID)
    ids["client"], ids["number"] = np.frombuffer(ME, "<u8"), np.arange(5)
    assert dispatcher.hand_on(ids, np.arange(5.0)).lost == 0
    for _ in range(2):
        reply = me.ask(messages.Update(steps=5))
        numbers, errors = unpack.read_feedback(reply.payload, SCHEMA)[ME]
        assert numbers.tolist() == errors.tolist() == [0, 1, 2, 3, 4]
    account = dispatcher.ledger.find(ME)
    assert account.waiting_feedback == 5
    done = messages.Update(epoch=reply.body.epoch, feedback_through=reply.body.feedback_through, applied=4, stale=1)
    assert me.ask(done).payload is None
    assert (account.waiting_feedback, account.report.applied, account.report.stale) == (0, 4, 1)


def test_feedback_that_nobody_fetches_is_bounded_and_counted(dispatcher, caplog):
    asker = Asker(dispatcher)
    asker.ask(messages.Update(steps=5))
    ids = np.zeros(FEEDBACK_SAMPLES // 4, ID)
    ids["client"] = np.frombuffer(ME, "<u8")
    for number in range(6):
        ids["number"] = np.arange(len(ids)) + number * len(ids)
        assert dispatcher.hand_on(ids, np.ones(len(ids))).lost == 0
    assert dispatcher.ledger.find(ME).waiting_feedback == FEEDBACK_SAMPLES
    assert dispatcher.feedback_lost == dispatcher.feedback_overflowed == 2 * len(ids)
    for _ in range(2):
        dispatcher.fold()
    assert [record.getMessage() for record in caplog.records] == [
        f"server home: {2 * len(ids)} TD errors were dropped: more than {FEEDBACK_SAMPLES} waited for one actor, which "
        "fetches them with its UPDATE messages, or held_bytes had no room for more. Use more actors, draw less, or "
        "store episodes, whose priorities the server sets"
    ]
    ids["client"] = np.frombuffer(YOU, "<u8")
    assert dispatcher.hand_on(ids, np.ones(len(ids))).lost == len(ids)
    assert dispatcher.ledger.totals().lost_feedback == 2 * len(ids)
    asker.ask(messages.Update(steps=5, leaving=True))  # it will fetch no more
    assert dispatcher.ledger.totals().lost_feedback == 6 * len(ids) and dispatcher.feedback_lost == 7 * len(ids)
    dispatcher.ledger.check_invariants()


def test_feedback_over_the_wire_is_taken_once(dispatcher):
    Asker(dispatcher).ask(messages.Update(steps=3))
    ids = np.zeros(3, ID)
    ids["client"] = np.frombuffer(ME, "<u8")
    reader = Asker(dispatcher, YOU)
    payload = pack.pack_feedback(SCHEMA, ids, np.ones(3, np.float32))
    for again in (False, True):
        reply = reader.ask(messages.Feedback(), payload=payload, again=again)
        assert (reply.body.samples, reply.body.lost) == (3, 0)
    assert dispatcher.feedback_given == 3


@pytest.mark.parametrize(
    ("changed", "code"),
    [({"fingerprint": 1}, "schema"), ({"run": 1}, "run"), ({"client": bytes(16)}, "client")],
)
def test_a_cache_from_elsewhere_is_refused_by_code(dispatcher, changed, code):
    with pytest.raises(ProtocolError) as caught:
        arrive(dispatcher, cache_of(), **changed)
    assert caught.value.code == code and dispatcher.refused == {code: 1}
    assert dispatcher.ledger.accepted_caches == 0 and dispatcher.tables.first.pool.stats().caches == 0


def test_a_cache_is_accounted_whether_it_is_taken_or_not(dispatcher):
    good = cache_of()
    assert arrive(dispatcher, good) == 64
    broken = good.copy()
    broken[100] ^= 1
    with pytest.raises(ProtocolError):
        arrive(dispatcher, broken, sequence=2)
    account = dispatcher.ledger.find(ME)
    assert (account.accepted_caches, sum(account.rejected.values())) == (1, 1)
    assert account.received_bytes == 2 * good.nbytes
    dispatcher.ledger.check_invariants()


def test_a_learner_may_end_the_run_and_change_parameters_but_not_wrongly(dispatcher):
    me = Asker(dispatcher)
    assert me.ask(messages.Control(parameters={"cache_size": 8})).body.parameters_version == 2
    for wrong in ({"cache_size": 0}, {"no such parameter": 1}):
        assert me.ask(messages.Control(parameters=wrong, finish=True)).body.code == "parameters"
    assert not dispatcher.finished and dispatcher.tables.first.parameters.cache_size == 8
    assert me.ask(messages.Control(finish=True)).body.finished
    assert me.ask(messages.Update()).body.finished


def test_what_a_learner_says_again_undoes_nothing(dispatcher):
    first, me = Asker(dispatcher), Asker(dispatcher, YOU)
    first.ask(messages.Control(run="one", parameters={"cache_size": 8}))
    me.ask(messages.Control(run="two", parameters={"cache_size": 9}))
    said = first.ask(messages.Control(run="one", parameters={"cache_size": 8}), again=True).body
    assert (dispatcher.run_name, dispatcher.tables.first.parameters.cache_size, said.parameters_version) == (
        "two",
        9,
        2,
    )


def test_a_client_knows_that_the_run_is_over_when_it_says_so(dispatcher):
    """The reply that tells it may be lost with the connection of a server that ends."""
    me, you = Asker(dispatcher), Asker(dispatcher, YOU)
    for asker in (me, you):
        asker.ask(messages.Hello())
    assert dispatcher.untold(2.0) == 0
    dispatcher.finish()
    assert me.ask(messages.Update(episodes=1)).body.finished and dispatcher.untold(2.0) == 2
    me.ask(messages.Update(episodes=1, finished=True))
    assert dispatcher.untold(2.0) == 1
    you.ask(messages.Update(leaving=True))
    assert dispatcher.untold(2.0) == 0


def test_credit_is_shared_by_those_who_are_there(told):
    now = [1000.0]
    dispatcher = made_dispatcher(told, clock=lambda: now[0])
    dispatcher.grant(1000)
    dispatcher.tables.first.pool.limit(5000)
    askers = [Asker(dispatcher, bytes([number + 1]) * 16) for number in range(10)]
    for asker in askers:
        asker.ask(messages.Hello())
    assert dispatcher.credit(dispatcher.tables.first) == 500
    askers[0].ask(messages.Update(leaving=True))
    askers[1].ask(messages.Update(leaving=True))
    assert dispatcher.credit(dispatcher.tables.first) == 5000 // 8  # at once
    now[0] += 59.0
    for asker in askers[2:8]:
        asker.ask(messages.Update())
    now[0] += 2.0  # two have been silent for too long
    assert dispatcher.credit(dispatcher.tables.first) == 5000 // 6
    askers[9].ask(messages.Update())
    now[0] += 1.0
    assert dispatcher.credit(dispatcher.tables.first) == 5000 // 7
    assert dispatcher.ledger.gone == 0  # they have reported nothing that counts: nobody has to remember them


def test_credit_is_shared_when_many_ask(dispatcher):
    dispatcher.grant(1000)
    dispatcher.tables.first.pool.limit(5000)
    for number in range(10):
        credit = Asker(dispatcher, bytes([number + 1]) * 16).ask(messages.Hello()).body.credit
    assert credit == 500


def test_accounts_of_a_drained_server_are_kept_once(dispatcher):
    def brought(count, steps, name="run"):
        rows = np.zeros(count, ACCOUNT)
        rows["client"][:, 0], rows["home"], rows["steps"] = range(count), 7, steps
        return Asker(dispatcher, YOU).ask(messages.Inherit(run_name=name, accounts=rows.tobytes())).body

    assert brought(10, 5).samples == 10
    assert brought(10, 5).samples == 10  # again
    Asker(dispatcher).ask(messages.Update(steps=3))
    told = Asker(dispatcher).ask(messages.Ledger()).body
    rows = unpack_accounts(told.accounts)
    assert (len(rows), rows["steps"].sum(), told.run_name, told.runs) == (11, 53, "run", ["run"])
    assert brought(2, 5, "elsewhere").samples == 2
    assert Asker(dispatcher).ask(messages.Ledger(run="elsewhere")).body.runs == ["elsewhere", "run"]
    assert Asker(dispatcher).ask(messages.Ledger(run="never")).body.code == "run"
    assert brought(2, 5, "\n").code == "parameters"
