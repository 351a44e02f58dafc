"""Options of a server, queries about its runs, uploads of models, and orders of snapshots, without sockets."""

import re
import time

import numpy as np
import pytest

from dispatchkit import Asker
from memoire.accounting.merge import key_of
from memoire.errors import ParameterError, ProtocolError, StateUnusable, WrongType
from memoire.limits import GiB, Limits, MiB
from memoire.models.model import make
from memoire.replay.parameters import Parameters
from memoire.server import build
from memoire.server.build import check_bytes
from memoire.server.handlers.control import MAX_UPLOADS, UPLOAD_TIMEOUT, Uploads
from memoire.server.io import limit_pushes
from memoire.server.io_requests import Announcer
from memoire.server.io_snapshots import MAX_ORDERS, SnapshotOrders, failed_result
from memoire.server.server import Server
from memoire.server.settings import State
from memoire.server.stats import Queries
from memoire.tables.table import Table
from memoire.wire import _bytes, messages
from memoire.wire.byte_budget import ByteBudget
from memoire.wire.frames import NEWS_FRAME, topic_frame
from netkit import SCHEMA
from serverkit import ME, dispatcher_of, server_options, store_of

# --- Options of a server, and tables that follow from options


def options(**changes):
    limits = Limits() if "byte_limit" in changes else Limits(held_bytes=1_000_000)
    return server_options(**{"limits": limits} | changes)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"schema": None}, WrongType, "schema must be a memoire.Schema, or tables="),
        ({"tables": {"a": Table(SCHEMA)}}, ParameterError, "schema= cannot be combined with tables="),
        (
            {"schema": None, "tables": {"a": Table(SCHEMA)}, "capacity": 5},
            ParameterError,
            "capacity= cannot be combined",
        ),
        ({"schema": None, "tables": [1]}, WrongType, "tables must be"),
        ({"schema": None, "tables": {"a": 1}}, WrongType, "a memoire.Table"),
        ({"storage": "episodes", "cache_limit": 5}, ParameterError, "cache_limit must be 0 with storage='episodes'"),
        ({"capacity": 5}, ParameterError, "capacity must be 0 with storage='caches'.*client_capacity.*cache_limit"),
        (
            {"schema": None, "tables": {"a": Table(SCHEMA)}, "min_size": 1},
            ParameterError,
            "min_size= cannot be combined",
        ),
        ({"seed": 1.5}, ParameterError, "seed must be a whole number"),
        ({"seed": 2**64 + 1}, ParameterError, "seed must be"),
        ({"byte_limit": 0}, ParameterError, "byte_limit must be"),
        (
            {"byte_limit": 9 << 20, "limits": Limits(held_bytes=8 << 20)},
            ParameterError,
            "byte_limit=9437184 differs from limits.held_bytes=8388608",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes, error, words):
    with pytest.raises(error, match=words):
        options(**changes)


def test_a_table_takes_any_seed_also_below_0_and_any_number_of_bytes_above_0():
    for seed in (build.MIN_SEED, -5, build.MAX_SEED):
        assert build.make_tables(options(storage="episodes", seed=seed)).first.storage == "episodes"
    for value in (0, -1, 1.5, True, "1"):
        with pytest.raises(ParameterError, match="credit must be a whole number from 1"):
            check_bytes("credit", value)


def test_a_state_folder_is_closed_if_no_dispatcher_can_be_made():
    run_options, store, closed = options(run="\n", state="x"), store_of(), []
    store.close = closed.append
    with pytest.raises(ParameterError, match="run"):
        build.make_dispatcher(run_options, build.make_tables(run_options), store, name="home", epoch=5)
    assert closed == [0.0]


@pytest.mark.parametrize(
    ("changes", "name", "most"),
    [
        ({"storage": "caches"}, "cache_size", 67),
        ({"storage": "caches", "parameters": Parameters(sequence_length=8, sequence_overlap=4)}, "cache_size", 14),
        ({"storage": "caches", "limits": Limits(message_bytes=64 * MiB)}, "cache_size", 16),
        ({"storage": "caches", "byte_limit": 40_000_000}, "cache_size", 9),
        (
            {"storage": "rollouts", "parameters": Parameters(rollout_length=200), "byte_limit": 4 * GiB},
            "rollout_length",
            133,
        ),
    ],
)
def test_sizes_that_only_an_actor_would_find_too_large_for_a_message_are_refused_before_a_server_is_made(
    changes, name, most
):
    """The state has 2 MB; the maximum in the error fits, and one more does not."""
    arguments = {"limits": Limits(), **changes, "schema": {"obs": (np.uint8, (2_000_000,)), "reward": np.float32}}
    parameters = arguments.pop("parameters", Parameters())
    with pytest.raises(
        ParameterError, match=rf"^{name} must be at most {most} \(.* bytes, and (message_bytes|byte_limit) "
    ):
        build.make_tables(options(**arguments, parameters=parameters))
    tables = build.make_tables(options(**arguments, parameters=parameters.replace(**{name: most})))
    with pytest.raises(ParameterError, match=f"^{name} must be at most {most}"):
        build.make_tables(options(**arguments, parameters=parameters.replace(**{name: most + 1})))
    if "byte_limit" not in arguments:
        with pytest.raises(ParameterError, match=f"^{name} must be at most {most}"):
            tables.first.check_parameters(parameters.replace(**{name: most + 1}))


def test_a_server_that_began_with_small_caches_refuses_a_cache_size_whose_pushes_it_would_not_take():
    """ZeroMQ counts messages and not bytes: of pushes with 1 kB, 64 may queue for a connection."""
    small_options = options(
        schema={"obs": (np.uint8, (100,)), "reward": np.float32}, parameters=Parameters(cache_size=4)
    )
    tables = build.make_tables(small_options)
    table = tables.first
    limit_pushes(tables, small_options.limits.message_bytes)
    assert table.push_bytes == 2 * small_options.limits.message_bytes // 64
    with pytest.raises(
        ParameterError, match="^cache_size .* a push to this server .* the server must start with "
    ) as caught:
        table.check_parameters(table.parameters.replace(cache_size=1 << 20))
    fitting = int(re.search(r"at most (\d+)", str(caught.value))[1])
    table.check_parameters(table.parameters.replace(cache_size=fitting))
    larger = Parameters(cache_size=fitting + 1)
    build.make_tables(options(schema=table.schema, parameters=larger, byte_limit=1 << 30))


@pytest.mark.parametrize("storage", ["caches", "episodes", "rollouts"])
def test_a_single_entry_that_fits_no_message_is_refused_before_a_server_is_made(storage):
    schema = {"obs": (np.uint8, (2_000_000,)), "reward": np.float32}
    with pytest.raises(
        ParameterError, match=r"^message_bytes must be at least 400\d{4}, the bytes of one (entry|sample)"
    ):
        build.make_tables(options(storage=storage, schema=schema, limits=Limits(message_bytes=3_000_000)))


def test_announcements_wake_who_tells_them_and_are_told_once():
    class Telling(Announcer):
        def _send(self, frames):
            sent.append(frames)

    announcer, woken, sent = Telling(), [], []
    announcer.add_model(make("a", b"1", 1))  # no thread sends the model yet
    announcer.wake = lambda: woken.append(announcer.next_time() <= time.monotonic())
    announcer.add_model(make("b", b"2", 1))
    announcer.add_news()
    assert woken == [True, True]
    dispatcher = dispatcher_of()
    announcer.tick(dispatcher, {})
    assert [bytes(frames[0]) for frames in sent] == [topic_frame("a"), topic_frame("b"), NEWS_FRAME]
    announcer.tick(dispatcher, {})
    assert len(sent) == 3 and announcer.next_time() > time.monotonic()


# --- Queries about the runs of a server, and figures that follow from runs

ACTORS = [bytes([number]) * 16 for number in (3, 1, 2)]


class DispatcherQueries(Queries):
    """Queries of a server, answered by a dispatcher alone."""

    def __init__(self, dispatcher, store=None):
        self._dispatcher, self._store = dispatcher, store


@pytest.fixture
def clock():
    return [1000.0]


@pytest.fixture
def dispatcher(clock):
    return dispatcher_of(clock=lambda: clock[0])


def report(dispatcher, client, **facts):
    Asker(dispatcher, client).ask(messages.Update(**facts))


@pytest.mark.parametrize(
    "ask",
    [
        lambda queries: queries.totals("three"),
        lambda queries: queries.accounts("three"),
        lambda queries: queries.account_page("three"),
        lambda queries: queries.lines(run="three"),
        lambda queries: queries.search(run="three"),
    ],
)
def test_a_run_that_there_is_not_is_refused_with_those_that_there_are(dispatcher, ask):
    dispatcher.begin_run("two")
    with pytest.raises(ParameterError, match="one of 'run', 'two'"):
        ask(DispatcherQueries(dispatcher))


def test_accounts_come_in_pages_in_the_order_of_their_keys(dispatcher):
    for actor in ACTORS:
        report(dispatcher, actor, steps=1, episodes=1)
    first, more = DispatcherQueries(dispatcher).account_page(most=2)
    assert more and [row["client"].tobytes()[0] for row in first.rows] == [1, 2]
    rest, more = DispatcherQueries(dispatcher).account_page(after=key_of(first.rows[-1]), most=2)
    assert not more and [row["client"].tobytes()[0] for row in rest.rows] == [3]


def test_accounts_that_were_heard_lately_come_whole(dispatcher, clock):
    report(dispatcher, ACTORS[0], steps=1, episodes=1)
    clock[0] += 10.0
    for actor in ACTORS[1:]:
        report(dispatcher, actor, steps=1, episodes=1)
    accounts, more = DispatcherQueries(dispatcher).account_page(seen=1005.0, most=1)
    assert not more and sorted(row["client"].tobytes()[0] for row in accounts.rows) == [1, 2]
    accounts, more = DispatcherQueries(dispatcher).account_page(seen=clock[0] - Limits().client_timeout, most=1)
    assert more and len(accounts.rows) == 1  # some accounts may have left memory since then: page by page


def test_closed_episodes_come_with_their_client_and_from_a_number_on(dispatcher):
    ended = [messages.Ended(number=n, time=1.0, length=n, returned=0.0) for n in (1, 2, 3)]
    report(dispatcher, ACTORS[0], episodes=3, steps=6, ended=ended)
    newest = [(client, each.length) for client, each in DispatcherQueries(dispatcher).episodes(2)]
    assert newest == [(ACTORS[0].hex(), 2), (ACTORS[0].hex(), 3)]
    with pytest.raises(ParameterError, match="after"):
        DispatcherQueries(dispatcher).episodes_after(-1, 1)


# --- Uploads of models end, and other uploads wait for an open upload

LIMITS = Limits(model_bytes=1000)


def publish(topic, size=500, offset=0, checksum=0):
    return messages.Publish(topic=topic, size=size, checksum=checksum, offset=offset)


def uploads_of():
    return Uploads(LIMITS, ByteBudget(0).add_holder("uploads", own=LIMITS.model_bytes))


def receive(uploads, body, chunk, client=ME, now=0.0):
    return uploads.receive(client, body, chunk, now)


def goes_on(uploads, topic, offset, size=500):
    """Return True if the server takes the next byte of an upload."""
    try:
        return receive(uploads, publish(topic, size, offset), b"x") == (offset + 1, None)
    except ProtocolError as error:
        assert error.code == "missing"
        return False


def test_a_model_with_a_wrong_chunk_is_forgotten_and_can_be_sent_again():
    uploads, body = uploads_of(), b"fifteen bytes.."
    checksum = _bytes.checksum(body)
    for wrong_at in (0, 10):
        chunks = {0: body[:10], 10: body[10:]}
        chunks[wrong_at] = bytes(len(chunks[wrong_at]))
        assert receive(uploads, publish("t", 15, 0, checksum), chunks[0]) == (10, None)
        with pytest.raises(ProtocolError, match="another XXH3 than announced"):
            receive(uploads, publish("t", 15, 10, checksum), chunks[10])
        assert len(uploads) == 0
        with pytest.raises(ProtocolError, match="belongs to no upload"):
            receive(uploads, publish("t", 15, 10, checksum), body[10:])
    receive(uploads, publish("t", 15, 0, checksum), body[:10])
    assert receive(uploads, publish("t", 15, 10, checksum), body[10:])[1].body == body


def test_uploads_are_bounded_in_number_and_a_further_one_waits_without_harm_to_them():
    uploads = uploads_of()
    for number in range(MAX_UPLOADS):
        assert receive(uploads, publish(f"t{number}", 50), b"x") == (1, None)
    for _ in range(2):
        with pytest.raises(ProtocolError, match=r"16 models of 800 bytes .* at most 16 uploads") as caught:
            receive(uploads, publish("new", 50), b"x")
        assert caught.value.code == "busy" and len(uploads) == MAX_UPLOADS
    assert all(goes_on(uploads, f"t{number}", 1, 50) for number in range(MAX_UPLOADS))
    assert receive(uploads, publish("whole", 1, checksum=_bytes.checksum(b"x")), b"x")[1].body == b"x"
    uploads.drop(ME, "t3")
    assert receive(uploads, publish("new", 50), b"x") == (1, None)


def test_an_upload_without_a_chunk_for_a_while_is_given_up_and_leaves_its_place():
    uploads = uploads_of()
    receive(uploads, publish("dead", 1000), b"x", now=0.0)
    receive(uploads, publish("dead", 1000, 1), b"x", now=10.0)
    with pytest.raises(ProtocolError, match="expires after 60 s"):
        receive(uploads, publish("next", 1000), b"x", now=9.9 + UPLOAD_TIMEOUT)
    assert receive(uploads, publish("next", 1000), b"x", now=10.0 + UPLOAD_TIMEOUT) == (1, None)
    assert not goes_on(uploads, "dead", 2, 1000) and len(uploads) == 1


# --- Orders of snapshots, message by message: one order at a time, each carried out once


def order(number, name="a"):
    return messages.TakeSnapshot(name=name, order=number.to_bytes(16, "big"))


def done(body):
    return messages.SnapshotReply(name=body.name, state="done", path="x")


def test_an_order_is_carried_out_once_however_often_it_is_asked_for():
    orders = SnapshotOrders()
    state, is_new = orders.receive(order(1))
    assert (state.name, state.state, is_new) == ("a", "writing", True)
    assert orders.receive(order(1)) == (state, False)
    orders.finish(order(1), done(order(1)))
    assert orders.receive(order(1)) == (done(order(1)), False)


def test_a_second_order_waits_until_the_first_is_done_or_failed():
    orders = SnapshotOrders()
    orders.receive(order(1))
    with pytest.raises(ProtocolError, match="snapshot 'a' is being written") as refused:
        orders.receive(order(2, "b"))
    assert refused.value.code == "busy"
    orders.finish(order(1), failed_result(order(1), "the disk is full"))
    assert orders.receive(order(2, "b"))[1]


def test_the_newest_orders_are_remembered():
    orders = SnapshotOrders()
    for number in range(MAX_ORDERS + 1):
        orders.receive(order(number))
        orders.finish(order(number), done(order(number)))
    assert not orders.receive(order(1))[1]
    assert orders.receive(order(0))[1]


def test_a_state_folder_that_has_to_be_there_and_is_not_is_refused_and_not_made(tmp_path):
    folder = tmp_path / "volume"
    with pytest.raises(StateUnusable, match="it does not exist. Mount it"):
        Server(None, SCHEMA, state=State(folder, must_exist=True))
    assert not folder.exists()
