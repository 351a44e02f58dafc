"""Decisions of learners and operators, published models, and draws, message by message."""

import numpy as np
import pytest

from fake_store import Disk
from memoire.errors import ParameterError, ProtocolError
from memoire.limits import Limits
from memoire.models.model import StaleVersion
from memoire.replay.parameters import Parameters
from memoire.server.handlers.clients import DrawsHandler
from memoire.server.handlers.control import model_from
from memoire.tables.table import Table
from memoire.wire import _bytes, compression, containers, messages
from memoire.wire.rows import unpack_sums
from netkit import SCHEMA
from poolkit import counts_of
from serverkit import ME, NOW, PARAMETERS, READER, YOU, Ends, ask, cache_of, save, state_of, store_of, tables_of

pytestmark = pytest.mark.usefixtures("without_io")

# --- Decisions of learners and operators, and the recipients of decisions

BAND = Parameters(cache_size=8, samples_per_insert=1.0, samples_per_insert_tolerance=30.0, min_size=0)


@pytest.fixture
def ends():
    return Ends(state_of())


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def durable(disk):
    return Ends(state_of(store=store_of(disk)))


def control(ends, **facts):
    return ask(ends.control.control, messages.Control(**facts))


def test_parameters_change_for_everyone(ends):
    reply = control(ends, parameters={"cache_size": 4})
    assert (reply.body.parameters_version, reply.body.finished, reply.until_saved) == (2, False, True)
    assert ends.state.tables.first.parameters.cache_size == 4 and ends.news == [1]
    assert ends.state.tables["whole"].parameters_version == 1
    control(ends, parameters={"cache_size": 4})
    assert ends.state.tables.first.parameters_version == 2 and ends.news == [1], "they are the same"


@pytest.mark.parametrize("wrong", [{"parameters": {"cache_size": 0}}, {"parameters": {"none": 1}}, {"run": "\n"}])
def test_a_mistake_ends_an_order_and_what_comes_after_it_is_not_done(ends, wrong):
    with pytest.raises(ProtocolError) as caught:
        control(ends, **wrong, finish=True, drain=True)
    assert caught.value.code == "parameters" and ends.news == []
    assert (ends.state.run.finished, ends.state.leaving, ends.state.run.name) == (False, False, "run")


def test_the_end_of_a_run_is_said_once(ends, disk):
    ends.control.finish(False)
    assert ends.news == []
    ends.control.finish()
    ends.control.finish()
    assert ends.state.run.finished and ends.news == [1]
    ends.control.finish(False)
    assert not ends.state.run.finished and ends.news == [1, 1]


def test_everything_is_told_when_it_is_on_disk(durable, disk):
    durable.control.configure(durable.state.tables.first, {"cache_size": 4})
    durable.control.begin_run("next", NOW)
    durable.control.finish()
    assert durable.news == []
    save(durable.state, disk)
    assert durable.news == [1, 1, 1] and '"cache_size":4' in disk.texts["parameters"]
    assert {name: (facts.finished, facts.ended) for name, facts in disk.runs.items()} == {
        "run": (False, NOW),
        "next": (True, 0.0),
    }


def test_another_run_begins_with_nothing_of_the_former_one():
    ends = Ends(state_of(tables_of(default=Table(SCHEMA, parameters=BAND))))
    ends.hello()
    ends.update(steps=25, finished=True)
    ends.update(YOU, steps=1, finished=True)
    numbers = np.arange(3, dtype=np.int64)
    ends.feedback.apply([(ME, numbers, np.ones(3, np.float32)), (YOU, numbers, np.ones(3, np.float32))], NOW)
    cleared, ends.state.tables.first.pool.clear = [], lambda: cleared.append(1)
    ends.control.finish()
    ends.state.informed.add(ME)
    publish(ends)
    ends.control.begin_run("next", NOW + 5)
    with pytest.raises(ProtocolError, match="belongs to no upload"):
        publish(ends, offset=10)
    former, limiter = ends.state.runs.named("run"), ends.state.tables.first.limiter
    assert (former.ended, former.finished, former.ledger.steps) == (NOW + 5, True, 26)
    assert (ends.state.run.began, ends.state.run.finished, ends.state.ledger.steps) == (NOW + 5, False, 0)
    assert cleared == [1] and ends.state.informed == set() and limiter.stats().surplus == 0.0
    assert ends.feedback.lost == 6 and former.ledger.totals().lost_feedback == 6
    assert ends.hello(bytes(15) + b"x").body.granted_steps == 30


def test_a_run_that_is_counted_already_does_not_begin_again(ends):
    ends.update(steps=3)
    ends.control.begin_run("run", NOW + 5)
    assert ends.news == [] and ends.state.run.ended == 0.0 and ends.state.ledger.steps == 3
    ends.control.begin_run("next", NOW)
    ends.control.begin_run("run", NOW)
    assert ends.state.ledger.steps == 3, "it goes on where it ended"
    for wrong in ("", 3, "x" * 257):
        with pytest.raises(ParameterError, match="run"):
            ends.control.begin_run(wrong, NOW)


# --- Models get numbers on arrival, and clients see a model after the model is on disk

LIMITS = Limits.of(model_bytes=1000, model_chunk=10)
BODY = b"twenty-five bytes of model"


@pytest.fixture
def roomy(disk):
    return Ends(state_of(store=store_of(disk), limits=Limits(model_bytes=16 << 20)))


def publish(ends, body=BODY, client=ME, topic="t", offset=0, version=0):
    """Send ten bytes of a model, and return the reply."""
    checksum = _bytes.checksum(body)
    chunk = messages.Publish(topic=topic, size=len(body), checksum=checksum, offset=offset, version=version)
    return ask(ends.models.receive, chunk, client, payload=body[offset : offset + 10] or None)


def publish_all(ends, body=BODY, **facts):
    for offset in range(0, max(1, len(body)), 10):
        reply = publish(ends, body, offset=offset, **facts)
    return reply


def fetch(ends, **facts):
    return ask(ends.models.fetch, messages.Fetch(topic="t", **facts))


def shown(ends):
    return [(model.version, model.body) for model in ends.shown]


def test_a_model_that_is_too_large_is_refused():
    with pytest.raises(ParameterError, match=r"The model has 1001 bytes; the limit is 1000"):
        model_from("t", bytes(1001), LIMITS)


def test_a_model_is_shown_with_the_next_version_and_versions_never_go_back(ends):
    assert [ends.models.publish(model_from("t", b"x", LIMITS)).version for _ in range(2)] == [1, 2]
    assert ends.models.publish(model_from("t", b"y", LIMITS), 9).version == 9
    with pytest.raises(StaleVersion):
        ends.models.publish(model_from("t", b"z", LIMITS), 9)
    assert shown(ends) == [(1, b"x"), (2, b"x"), (9, b"y")]


@pytest.mark.parametrize("body", [b"", b"x", BODY])
def test_a_model_from_far_away_is_published_when_it_is_whole(ends, body):
    reply = publish_all(ends, body)
    assert (reply.body.received, reply.body.version, reply.until_saved) == (len(body), 1, True)
    assert shown(ends) == [(1, body)]


def test_a_version_that_is_here_is_taken_again_at_once(ends):
    """A reader publishes its models to a restarted server, which may already have them from its disk."""
    publish(ends)
    ends.models.publish(model_from("t", BODY, LIMITS), 4)
    reply = publish(ends, version=4)
    assert (reply.body.received, reply.body.version, reply.until_saved) == (len(BODY), 4, True)
    with pytest.raises(ProtocolError, match="belongs to no upload"):
        publish(ends, offset=10)
    with pytest.raises(ProtocolError) as caught:
        publish_all(ends, b"y", client=YOU, version=4)
    assert caught.value.code == "topic" and shown(ends) == [(4, BODY)]


def test_what_is_published_while_a_group_is_saved_waits_for_the_next_one(roomy, disk):
    roomy.models.publish(model_from("t", b"x", LIMITS))
    group = roomy.state.committer.collect(roomy.state.runs)
    roomy.models.clear_unsaved_models()
    roomy.models.publish(model_from("t", b"y", LIMITS))
    for ticket in group.tickets:
        ticket()
    roomy.state.committer.mark_saved(roomy.state.runs)
    assert shown(roomy) == [(1, b"x")]
    save(roomy.state, disk)
    assert shown(roomy) == [(1, b"x"), (2, b"y")]


def test_models_that_wait_for_the_disk_are_bounded(roomy, disk):
    limits = roomy.state.limits
    for _ in range(6):
        roomy.models.publish(model_from("t", bytes(1 << 20), limits))
    roomy.models.publish(model_from("large", bytes(9 << 20), limits))
    save(roomy.state, disk)
    assert [(model.topic, model.version) for model in roomy.shown] == [("large", 1)]
    roomy.models.clear_unsaved_models()
    for _ in range(6):
        roomy.models.publish(model_from("t", bytes(1 << 20), limits))
    save(roomy.state, disk)
    assert [model.version for model in roomy.shown[1:]] == [9, 10, 11, 12]


def test_a_version_that_was_overtaken_is_missing_and_nothing_is_wrong(ends):
    ends.models.publish(model_from("t", b"x", LIMITS), 4)
    missing = fetch(ends, version=3).body
    assert (missing.code, missing.text) == ("missing", "version 3 of topic 't' was replaced by version 4")
    with pytest.raises(ProtocolError):
        fetch(ends, version=5)


def test_a_chunk_says_the_checksum_of_the_body_and_one_of_all_of_it_is_not_summed_again(ends):
    for body in (BODY, b"ten bytes!"):
        publish_all(ends, body)
        reply = fetch(ends)
        is_whole = len(body) == 10
        assert reply.body.checksum == _bytes.checksum(body)
        assert dict(reply.changed) == ({"payload_checksum": _bytes.checksum(body)} if is_whole else {})


# --- Draws of readers, message by message


def state_with_cache(parameters=PARAMETERS):
    state = state_of(tables_of(default=Table(SCHEMA, parameters=parameters)))
    pool = state.tables.first.pool
    pool.add(ME, 1, pool.check(messages.Cache(), cache_of(parameters=parameters)))
    return state


def handler_of(state, codecs=()):
    return DrawsHandler(state, lambda reader, codec: reader == READER and codec in codecs)


def sums(handler, **facts):
    return ask(handler.sums, messages.Sums(reserve=64, **facts), READER)


def draw(handler, count, client=ME, **facts):
    return ask(handler.draw, messages.Draw(counts=counts_of({client: count}).tobytes(), reserve=64, **facts), READER)


def test_a_reader_hears_what_there_is_of_each_client():
    state = state_with_cache()
    summed = sums(handler_of(state)).body
    rows = unpack_sums(summed.clients)
    assert [row["client"].tobytes() for row in rows] == [ME] and rows["reserved"].tolist() == [8]
    assert (summed.epoch, summed.finished, summed.standing) == (7, False, None)
    state.run.finished = True
    assert sums(handler_of(state)).body.finished


def test_samples_are_drawn_and_the_rest_is_told():
    state = state_with_cache()
    handler = handler_of(state)
    sums(handler)
    reply = draw(handler, 5)
    assert containers.samples_of(reply.payload) == 5 and (reply.body.epoch, reply.body.finished) == (7, False)
    assert unpack_sums(reply.body.clients)["reserved"].tolist() == [3]
    assert state.tables.first.limiter.stats().drawn == 5
    nothing = draw(handler, 5, client=b"x" * 16)
    assert nothing.payload is None and state.tables.first.limiter.stats().drawn == 5


def test_a_reader_tells_how_drawing_stands_with_all_servers():
    state = state_with_cache(BAND)
    handler, limiter = handler_of(state), state.tables.first.limiter
    standing = sums(handler).body.standing
    assert (standing.surplus, standing.ratio, standing.tolerance) == (0.0, 1.0, 30.0)
    assert not limiter.server_surplus().is_cluster_wide
    band = messages.ClusterRate(surplus=12.0, inserted=0, drawn=0, entries=5, share=0.5, ratio=1.0, tolerance=30.0)
    standing = sums(handler, band=band).body.standing
    assert standing.surplus == 12.0 and limiter.server_surplus().is_cluster_wide
    assert draw(handler, 4, band=messages.ClusterRate(12.0, 0, 0, 5, 0.5, 1.0, 30.0)).body.standing.surplus == 8.0
    assert draw(handler, 4).body.standing.surplus == 8.0, "it knows of no band: others need not make that good"


BOTH = ("zlib", "lz4")


@pytest.mark.parametrize(
    ("asked", "codecs", "here", "packed", "used"),
    [
        ("lz4", ("lz4",), BOTH, False, "lz4"),
        ("lz4", ("lz4",), ("zlib",), False, "none"),
        ("lz4", (), BOTH, False, "none"),
        ("zlib", BOTH, BOTH, False, "none"),
        ("none", ("lz4",), BOTH, False, "none"),
        ("auto", BOTH, BOTH, False, "none"),
        ("auto", BOTH, BOTH, True, "lz4"),
        ("auto", (), BOTH, True, "none"),
        ("none", BOTH, BOTH, True, "none"),
    ],
)
def test_frames_are_compressed_as_both_can_and_as_a_reader_asks_if_the_table_leaves_it_to_it(
    monkeypatch, asked, codecs, here, packed, used
):
    state, seen = state_with_cache(), []
    table = state.tables.first
    table.parameters = PARAMETERS.replace(compression=asked)
    table.pool.draw_counts = lambda *counts, compression, **_: seen.append(compression)
    monkeypatch.setattr(compression, "codecs", lambda: here)
    draw(handler_of(state, codecs), 3, packed=packed)
    assert seen == [used]
