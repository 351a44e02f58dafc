"""Models: numbered when they come, shown when they are on disk."""

import pytest

from fake_store import Disk
from memoire.errors import ParameterError, ProtocolError, WrongType
from memoire.limits import Limits
from memoire.models.model import StaleVersion
from memoire.replay.parameters import Parameters
from memoire.server.handlers.control import made
from memoire.tables.table import Table
from memoire.wire import _bytes, messages
from netkit import SCHEMA
from serverkit import ME, NEXT, NOW, YOU, Ends, ask, save, state_of, store_of, tables_of

pytestmark = pytest.mark.usefixtures("without_io")

LIMITS = Limits(model_bytes=1000, model_chunk=10)
BODY = b"twenty-five bytes of model"


@pytest.fixture
def ends():
    return Ends(state_of(limits=LIMITS))


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def durable(disk):
    return Ends(state_of(store=store_of(disk), limits=Limits(model_bytes=16 << 20)))


def publish(ends, body=BODY, client=ME, topic="t", offset=0, version=0):
    """The reply to a chunk of ten bytes of a model."""
    checksum = _bytes.checksum(body)
    said = messages.Publish(topic=topic, size=len(body), checksum=checksum, offset=offset, version=version)
    return ask(ends.models.receive, said, client, payload=body[offset : offset + 10] or None)


def publish_all(ends, body=BODY, **facts):
    for offset in range(0, max(1, len(body)), 10):
        reply = publish(ends, body, offset=offset, **facts)
    return reply


def fetch(ends, **facts):
    return ask(ends.models.fetch, messages.Fetch(topic="t", **facts))


def shown(ends):
    return [(model.version, model.body) for model in ends.shown]


def test_what_cannot_be_a_model_is_refused():
    with pytest.raises(WrongType, match="serialize it first"):
        made("t", 5, LIMITS)
    with pytest.raises(ParameterError, match=r"at most 1000 bytes .*1001 bytes"):
        made("t", bytes(1001), LIMITS)
    with pytest.raises(ParameterError):
        made("", b"x", LIMITS)
    model = made("t", "text", LIMITS)
    assert (model.version, model.value) == (0, "text")


def test_a_model_is_shown_with_the_next_version_and_versions_never_go_back(ends):
    assert [ends.models.publish(made("t", b"x", LIMITS)).version for _ in range(2)] == [1, 2]
    assert ends.models.publish(made("t", b"y", LIMITS), 9).version == 9
    with pytest.raises(StaleVersion):
        ends.models.publish(made("t", b"z", LIMITS), 9)
    assert shown(ends) == [(1, b"x"), (2, b"x"), (9, b"y")]


def test_tables_hear_how_old_the_models_of_their_entries_are():
    parameters = Parameters(cache_size=8, max_model_lag=2)
    ends, seen = Ends(state_of(tables_of(default=Table(SCHEMA, parameters=parameters)))), []
    ends.state.tables.first.pool.saw_model = seen.append
    ends.models.publish(made("t", b"x", LIMITS), 5)
    assert seen == [5]


@pytest.mark.parametrize("body", [b"", b"x", BODY])
def test_a_model_from_far_away_is_published_when_it_is_whole(ends, body):
    reply = publish_all(ends, body)
    assert (reply.body.received, reply.body.version, reply.until_saved) == (len(body), 1, True)
    assert shown(ends) == [(1, body)]


def test_a_chunk_alone_promises_nothing(ends):
    reply = publish(ends)
    assert (reply.body.received, reply.body.version, reply.until_saved) == (10, 0, False) and ends.shown == []


def test_a_version_that_is_here_is_taken_again_at_once(ends):
    """A reader publishes what it has to a server that comes back, which may have it from its disk."""
    publish(ends)
    ends.models.publish(made("t", BODY, LIMITS), 4)
    reply = publish(ends, version=4)
    assert (reply.body.received, reply.body.version, reply.until_saved) == (len(BODY), 4, True)
    with pytest.raises(ProtocolError, match="beginning is not here"):
        publish(ends, offset=10)
    with pytest.raises(ProtocolError) as caught:
        publish_all(ends, b"y", client=YOU, version=4)
    assert caught.value.code == "topic" and shown(ends) == [(4, BODY)]


def test_a_model_is_nobodys_before_it_is_on_disk(durable, disk):
    reply = publish_all(durable)
    assert (reply.body.version, reply.until_saved, durable.shown) == (1, True, [])
    assert durable.state.models.newest("t") is None
    again = publish_all(durable)
    assert again.body.version == 2, "nobody asked for version 1 again"
    assert publish(durable, version=2).body.version == 2, "it is about to be here"
    durable.models.collected()
    save(durable.state, disk)
    assert shown(durable) == [(1, BODY), (2, BODY)] and disk.models["run"]["t"].version == 2


def test_what_is_published_while_a_group_is_saved_waits_for_the_next_one(durable, disk):
    durable.models.publish(made("t", b"x", LIMITS))
    group = durable.state.committer.collect(durable.state.runs)
    durable.models.collected()
    durable.models.publish(made("t", b"y", LIMITS))
    for ticket in group.tickets:
        ticket()
    durable.state.committer.saved(durable.state.runs)
    assert shown(durable) == [(1, b"x")]
    save(durable.state, disk)
    assert shown(durable) == [(1, b"x"), (2, b"y")]


def test_models_that_wait_for_the_disk_are_bounded(durable, disk):
    limits = durable.state.limits
    for _ in range(6):
        durable.models.publish(made("t", bytes(1 << 20), limits))
    durable.models.publish(made("large", bytes(9 << 20), limits))
    save(durable.state, disk)
    assert [(model.topic, model.version) for model in durable.shown] == [("large", 1)]
    durable.models.collected()
    for _ in range(6):
        durable.models.publish(made("t", bytes(1 << 20), limits))
    save(durable.state, disk)
    assert [model.version for model in durable.shown[1:]] == [9, 10, 11, 12]


def test_another_run_has_no_models_and_counts_versions_on(ends):
    ends.models.publish(made("t", b"x", LIMITS), 4)
    publish(ends, topic="u")
    ends.control.begin_run("next", NOW)
    assert ends.state.models.versions() == {} and ends.state.run.number == NEXT
    with pytest.raises(ProtocolError, match="beginning is not here"):
        publish(ends, topic="u", offset=10)
    assert ends.models.publish(made("t", b"y", LIMITS)).version == 5


def test_a_model_is_fetched_in_chunks(ends):
    ends.models.publish(made("t", b"fifteen bytes..", LIMITS))
    first = fetch(ends)
    assert (first.body.version, first.body.size, bytes(first.payload)) == (1, 15, b"fifteen by")
    assert (first.body.home, first.body.epoch) == (ends.state.home, 7)
    assert bytes(fetch(ends, version=1, offset=10).payload) == b"tes.."
    for wrong in ({"version": 2}, {"offset": 16}):
        with pytest.raises(ProtocolError) as caught:
            fetch(ends, **wrong)
        assert caught.value.code == "missing"


def test_a_version_that_was_overtaken_is_missing_and_nothing_is_wrong(ends):
    ends.models.publish(made("t", b"x", LIMITS), 4)
    told = fetch(ends, version=3).body
    assert (told.code, told.text) == ("missing", "version 3 of topic 't' has made room for 4")
    with pytest.raises(ProtocolError):
        fetch(ends, version=5)


def test_a_chunk_says_the_checksum_of_the_body_and_one_of_all_of_it_is_not_summed_again(ends):
    for body in (BODY, b"ten bytes!"):
        publish_all(ends, body)
        reply = fetch(ends)
        is_whole = len(body) == 10
        assert reply.body.checksum == _bytes.checksum(body)
        assert dict(reply.changed) == ({"payload_checksum": _bytes.checksum(body)} if is_whole else {})


def test_a_body_with_another_hash_than_its_publisher_said_is_never_shown(ends):
    said = messages.Publish(topic="t", size=5, checksum=0)
    with pytest.raises(ProtocolError, match="XXH3"):
        ask(ends.models.receive, said, ME, payload=b"model")
    assert shown(ends) == []
