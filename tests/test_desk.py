"""What a server answers, without a socket: each request may come any number of times."""

import hashlib

import numpy as np
import pytest

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.pool.caches import Pool
from memoire.pool.tables import Table, Tables
from memoire.replay.batch import ID
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.server.dispatch import Dispatcher
from memoire.server.handlers.feedback import FEEDBACK_SAMPLES
from memoire.wire import messages, pack, unpack
from memoire.wire.frames import encode, parse
from memoire.wire.identity import name_hash
from memoire.wire.rows import ACCOUNT, CLIENT_COUNTS, unpack_accounts, unpack_sums
from netkit import SCHEMA

ME, YOU = b"m" * 16, b"y" * 16


class Asker:
    """Asks a desk as a client would: through the wire's own frames, and again where it is told to."""

    def __init__(self, desk, client=ME):
        self.dispatcher, self.client, self.number = desk, client, 0

    def ask(self, body, *, again=False, run=0, payload=None):
        self.number += not again
        frames = encode(body, client=self.client, sequence=self.number, run=run, payload=payload)
        return self.dispatcher.answer(parse(frames))


@pytest.fixture
def told():
    return {"lines": [], "models": []}


@pytest.fixture
def desk(told):
    parameters = Parameters(cache_size=64)
    settings = {"default": Table(SCHEMA, parameters=parameters)}
    tables = Tables(settings, lambda name, table: Pool(table.schema, table.parameters, seed=0))
    return Dispatcher(
        tables=tables,
        run="run",
        name="home",
        limits=Limits(model_chunk=10, model_bytes=1000),
        on_lines=told["lines"].extend,
        on_model=told["models"].append,
        clock=lambda: 1000.0,
        epoch=1,
    )


def cache_of(entries=20):
    memory = Memory(SCHEMA, 100, Parameters(cache_size=64), seed=0)
    memory.open()
    for step in range(entries):
        memory.add(0, (np.full(4, step, np.float32), np.int32(0), np.float32(1)))
    memory.close(terminated=True)
    return pack.build(memory, now=0.0)


def arrive(desk, payload, **changed):
    facts = {"client": ME, "fingerprint": SCHEMA.fingerprint, "sequence": 1} | changed
    message = parse(encode(messages.Cache(number=1, pushed_bytes=payload.nbytes), payload=payload, **facts))
    return desk.arrived(message.header, message.body, message.payload)


def made(parameters=None, epoch=1):
    """A desk without a state folder."""
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
    desk = made(parameters=BAND)
    me, limiter = Asker(desk), desk.tables.first.limiter
    told = me.ask(messages.Hello()).body
    assert told.granted_steps == 30
    me.ask(messages.Update(epoch=told.epoch, episodes=1, steps=25))
    assert (limiter.stats().surplus, limiter.stats().draws_wait) == (25.0, "")
    desk.begin_run("next")
    assert (limiter.stats().surplus, limiter.stats().inserts_wait, limiter.standing().is_told) == (0.0, "", False)
    you = Asker(desk, YOU)
    assert you.ask(messages.Hello()).body.granted_steps == 30, "what a client of the former run was granted is free"
    again = me.ask(messages.Hello(inserted=0)).body
    me.ask(messages.Update(epoch=again.epoch, steps=4), run=name_hash("next"))
    assert limiter.stats().surplus == 4.0


def test_hello_says_all_that_a_client_needs(desk):
    reply = Asker(desk).ask(messages.Hello(label=7, codecs=["zlib", "unheard of"]))
    told = reply.body
    assert (told.run_name, told.home_name, told.servers, told.codecs) == ("run", "home", ["home"], ["zlib"])
    assert Parameters.from_wire(told.parameters).cache_size == 64 and told.credit == Limits().credit
    assert reply.changed == {
        "run": name_hash("run"),
        "home": name_hash("home"),
        "fingerprint": SCHEMA.fingerprint,
        "table": 0,
    }


def test_an_update_that_comes_again_changes_nothing(desk, told):
    me = Asker(desk)
    line = messages.Line(number=1, time=0.0, label=7, text="x")
    update = messages.Update(episodes=3, steps=30, lines=[line])
    first, again = me.ask(update), me.ask(update, again=True)
    assert first == again and (first.body.episodes, first.body.lines_through) == (3, 1)
    assert len(told["lines"]) == 1 and desk.ledger.episodes == 3
    desk.ledger.check_invariants()


def test_parameters_are_sent_to_those_that_have_others(desk):
    me = Asker(desk)
    assert me.ask(messages.Update(parameters_version=1)).body.parameters is None
    desk.configure(desk.tables.first, {"cache_size": 32})
    assert me.ask(messages.Update(parameters_version=1)).body.parameters["cache_size"] == 32
    assert me.ask(messages.Update(parameters_version=2)).body.parameters is None


def test_a_draw_that_is_asked_for_again_takes_no_samples(desk):
    arrive(desk, cache_of())
    reader = Asker(desk, YOU)
    rows = unpack_sums(reader.ask(messages.Sums(reserve=64)).body.clients)
    counts = np.zeros(1, CLIENT_COUNTS)
    counts["client"], counts["count"] = rows["client"], 10
    first = reader.ask(messages.Draw(counts=counts.tobytes(), reserve=64))
    again = reader.ask(messages.Draw(counts=counts.tobytes(), reserve=64), again=True)
    assert again.payload is first.payload and desk.tables.first.pool.stats().drawn == 10
    for _ in range(2):
        reader.ask(messages.Draw(counts=counts.tobytes(), reserve=64))
    reader.number -= 3
    overtaken = reader.ask(messages.Draw(counts=counts.tobytes(), reserve=64))
    assert overtaken.body.code == "missing" and desk.tables.first.pool.stats().drawn == 30


@pytest.mark.parametrize("body", [b"", b"x", b"twenty-five bytes of model"])
def test_a_model_is_published_once_however_often_its_stretches_come(desk, told, body):
    me = Asker(desk)
    digest = hashlib.sha256(body).digest()
    for offset in range(0, max(1, len(body)), 10):
        publish = messages.Publish(topic="t", size=len(body), sha256=digest, offset=offset)
        chunk = body[offset : offset + 10] or None
        first = me.ask(publish, payload=chunk)
        assert me.ask(publish, payload=chunk, again=True) == first
    assert first.body.version == 1 and [model.body for model in told["models"]] == [body]
    publish = messages.Publish(topic="t", size=1, sha256=hashlib.sha256(b"n").digest(), version=1)
    assert me.ask(publish, payload=b"n").body.code == "topic"
    late = messages.Publish(topic="t", size=30, sha256=digest, offset=10)
    assert me.ask(late, payload=b"0123456789").body.code == "missing"
    huge = messages.Publish(topic="t", size=1001, sha256=digest)
    assert me.ask(huge, payload=b"0").body.code == "too_large"


def test_a_version_that_is_here_is_taken_again_at_once(desk, told):
    """A reader publishes what it has to a server that comes back, which may have it from its disk."""
    model = desk.publish("t", b"x" * 30, 4)
    publish = messages.Publish(topic="t", size=30, sha256=model.digest, version=4)
    said = Asker(desk).ask(publish, payload=b"x" * 10).body
    assert (said.received, said.version) == (30, 4) and told["models"] == [model]
    other = messages.Publish(topic="t", size=1, sha256=hashlib.sha256(b"y").digest(), version=4)
    assert Asker(desk, YOU).ask(other, payload=b"y").body.code == "topic"


def test_a_model_is_fetched_in_stretches(desk):
    desk.publish("t", b"fifteen bytes..")
    me = Asker(desk)
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


def test_a_model_that_was_overtaken_while_it_was_asked_for_is_missing_and_nothing_to_worry_about(desk):
    for body in range(20):
        desk.publish("t", bytes([body]) * desk.limits.model_bytes)
    me = Asker(desk)
    assert me.ask(messages.Fetch(topic="t", version=1)).body.code == "missing"
    assert desk.refused == {}
    assert me.ask(messages.Fetch(topic="t", version=21)).body.code == "missing"
    assert desk.refused == {"missing": 1}


def test_feedback_waits_for_its_owner_and_is_given_until_it_is_applied(desk):
    me = Asker(desk)
    me.ask(messages.Update(steps=5))
    ids = np.zeros(5, ID)
    ids["client"], ids["number"] = np.frombuffer(ME, "<u8"), np.arange(5)
    assert desk.hand_on(ids, np.arange(5.0)) == 0
    for _ in range(2):
        reply = me.ask(messages.Update(steps=5))
        numbers, errors = unpack.read_feedback(reply.payload, SCHEMA)[ME]
        assert numbers.tolist() == errors.tolist() == [0, 1, 2, 3, 4]
    account = desk.ledger.find(ME)
    assert account.waiting_feedback == 5
    done = messages.Update(epoch=reply.body.epoch, feedback_through=reply.body.feedback_through, applied=4, stale=1)
    assert me.ask(done).payload is None
    assert (account.waiting_feedback, account.report.applied, account.report.stale) == (0, 4, 1)


def test_feedback_that_nobody_fetches_is_bounded_and_counted(desk):
    asker = Asker(desk)
    asker.ask(messages.Update(steps=5))
    ids = np.zeros(FEEDBACK_SAMPLES // 4, ID)
    ids["client"] = np.frombuffer(ME, "<u8")
    lost = [desk.hand_on(ids, np.ones(len(ids))) for _ in range(6)]
    assert lost == [0, 0, 0, 0, len(ids), len(ids)] and desk.feedback_lost == 2 * len(ids)
    ids["client"] = np.frombuffer(YOU, "<u8")
    assert desk.hand_on(ids, np.ones(len(ids))) == len(ids)
    assert desk.ledger.totals().lost_feedback == 2 * len(ids)
    asker.ask(messages.Update(steps=5, leaving=True))  # it will fetch no more
    assert desk.ledger.totals().lost_feedback == 6 * len(ids) and desk.feedback_lost == 7 * len(ids)
    desk.ledger.check_invariants()


def test_feedback_over_the_wire_is_taken_once(desk):
    Asker(desk).ask(messages.Update(steps=3))
    ids = np.zeros(3, ID)
    ids["client"] = np.frombuffer(ME, "<u8")
    reader = Asker(desk, YOU)
    payload = pack.pack_feedback(SCHEMA, ids, np.ones(3, np.float32))
    for again in (False, True):
        reply = reader.ask(messages.Feedback(), payload=payload, again=again)
        assert (reply.body.samples, reply.body.lost) == (3, 0)
    assert desk.feedback_given == 3


@pytest.mark.parametrize(
    ("changed", "code"),
    [({"fingerprint": 1}, "schema"), ({"run": 1}, "run"), ({"client": bytes(16)}, "client")],
)
def test_a_cache_from_elsewhere_is_refused_by_code(desk, changed, code):
    with pytest.raises(ProtocolError) as caught:
        arrive(desk, cache_of(), **changed)
    assert caught.value.code == code and desk.refused == {code: 1}
    assert desk.ledger.accepted_caches == 0 and desk.tables.first.pool.stats().caches == 0


def test_a_cache_is_accounted_whether_it_is_taken_or_not(desk):
    good = cache_of()
    assert arrive(desk, good) == 64
    broken = good.copy()
    broken[100] ^= 1
    with pytest.raises(ProtocolError):
        arrive(desk, broken, sequence=2)
    account = desk.ledger.find(ME)
    assert (account.accepted_caches, sum(account.rejected.values())) == (1, 1)
    assert account.received_bytes == 2 * good.nbytes
    desk.ledger.check_invariants()


def test_a_learner_may_end_the_run_and_change_parameters_but_not_wrongly(desk):
    me = Asker(desk)
    assert me.ask(messages.Control(parameters={"cache_size": 8})).body.parameters_version == 2
    for wrong in ({"cache_size": 0}, {"no such parameter": 1}):
        assert me.ask(messages.Control(parameters=wrong, finish=True)).body.code == "parameters"
    assert not desk.finished and desk.tables.first.parameters.cache_size == 8
    assert me.ask(messages.Control(finish=True)).body.finished
    assert me.ask(messages.Update()).body.finished


def test_what_a_learner_says_again_undoes_nothing(desk):
    first, me = Asker(desk), Asker(desk, YOU)
    first.ask(messages.Control(run="one", parameters={"cache_size": 8}))
    me.ask(messages.Control(run="two", parameters={"cache_size": 9}))
    said = first.ask(messages.Control(run="one", parameters={"cache_size": 8}), again=True).body
    assert (desk.run_name, desk.tables.first.parameters.cache_size, said.parameters_version) == ("two", 9, 2)


def test_a_client_knows_that_the_run_is_over_when_it_says_so(desk):
    """The reply that tells it may be lost with the connection of a server that ends."""
    me, you = Asker(desk), Asker(desk, YOU)
    for asker in (me, you):
        asker.ask(messages.Hello())
    assert desk.untold(2.0) == 0
    desk.finish()
    assert me.ask(messages.Update(episodes=1)).body.finished and desk.untold(2.0) == 2
    me.ask(messages.Update(episodes=1, finished=True))
    assert desk.untold(2.0) == 1
    you.ask(messages.Update(leaving=True))
    assert desk.untold(2.0) == 0


def test_credit_is_shared_by_those_who_are_there(desk):
    desk.grant(1000)
    desk.tables.first.pool.limit(5000)
    now = [1000.0]
    desk._clock = lambda: now[0]
    askers = [Asker(desk, bytes([number + 1]) * 16) for number in range(10)]
    for asker in askers:
        asker.ask(messages.Hello())
    assert desk.credit(desk.tables.first) == 500
    askers[0].ask(messages.Update(leaving=True))
    askers[1].ask(messages.Update(leaving=True))
    assert desk.credit(desk.tables.first) == 5000 // 8  # at once
    now[0] += 59.0
    for asker in askers[2:8]:
        asker.ask(messages.Update())
    now[0] += 2.0  # two have been silent for too long
    assert desk.credit(desk.tables.first) == 5000 // 6
    askers[9].ask(messages.Update())
    now[0] += 1.0
    assert desk.credit(desk.tables.first) == 5000 // 7
    assert desk.ledger.gone == 0  # they have reported nothing that counts: nobody has to remember them


def test_credit_is_shared_when_many_ask(desk):
    desk.grant(1000)
    desk.tables.first.pool.limit(5000)
    for number in range(10):
        credit = Asker(desk, bytes([number + 1]) * 16).ask(messages.Hello()).body.credit
    assert credit == 500


def test_accounts_of_a_drained_server_are_kept_once(desk):
    def brought(count, steps, name="run"):
        rows = np.zeros(count, ACCOUNT)
        rows["client"][:, 0], rows["home"], rows["steps"] = range(count), 7, steps
        return Asker(desk, YOU).ask(messages.Inherit(run_name=name, accounts=rows.tobytes())).body

    assert brought(10, 5).samples == 10
    assert brought(10, 5).samples == 10  # again
    Asker(desk).ask(messages.Update(steps=3))
    told = Asker(desk).ask(messages.Ledger()).body
    rows = unpack_accounts(told.accounts)
    assert (len(rows), rows["steps"].sum(), told.run_name, told.runs) == (11, 53, "run", ["run"])
    assert brought(2, 5, "elsewhere").samples == 2
    assert Asker(desk).ask(messages.Ledger(run="elsewhere")).body.runs == ["elsewhere", "run"]
    assert Asker(desk).ask(messages.Ledger(run="never")).body.code == "run"
    assert brought(2, 5, "\n").code == "parameters"
