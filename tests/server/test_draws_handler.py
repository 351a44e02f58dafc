"""What readers draw, message by message."""

import numpy as np
import pytest

from memoire.errors import ProtocolError
from memoire.server.handlers.draws import DrawsHandler
from memoire.tables.table import Table
from memoire.wire import compression, messages
from memoire.wire import containers as pack
from memoire.wire.rows import CLIENT_COUNTS, unpack_sums
from netkit import SCHEMA
from serverkit import ME, PARAMETERS, READER, ask, cache_of, state_of, tables_of

pytestmark = pytest.mark.usefixtures("without_io")

BAND = PARAMETERS.replace(samples_per_insert=1.0, samples_per_insert_tolerance=30.0, min_size=0)


def state_with_cache(parameters=PARAMETERS):
    state = state_of(tables_of(default=Table(SCHEMA, parameters=parameters)))
    pool = state.tables.first.pool
    pool.add(ME, 1, pool.check(messages.Cache(), cache_of(parameters=parameters)))
    return state


def handler_of(state, codecs=()):
    return DrawsHandler(state, lambda reader, codec: reader == READER and codec in codecs)


def sums(handler, **facts):
    header = facts.pop("header", {})
    return ask(handler.sums, messages.Sums(reserve=64, **facts), READER, **header)


def draw(handler, count, client=ME, **facts):
    counts = np.zeros(1, CLIENT_COUNTS)
    counts["client"], counts["count"] = np.frombuffer(client, "<u8"), count
    return ask(handler.draw, messages.Draw(counts=counts.tobytes(), reserve=64, **facts), READER)


def codec_of(asked, codecs, here=None, **facts):
    """By what a drawn batch's frames are compressed, at a server that has `here`."""
    state, seen = state_with_cache(), []
    table = state.tables.first
    table.parameters = PARAMETERS.replace(compression=asked)

    def draw_counts(reader, counts, *, now, compression, page):
        seen.append(compression)

    table.pool.draw_counts = draw_counts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "codecs", lambda: here)
        draw(handler_of(state, codecs), 3, **facts)
    return seen[0]


def test_a_reader_hears_what_there_is_of_each_client():
    state = state_with_cache()
    told = sums(handler_of(state)).body
    rows = unpack_sums(told.clients)
    assert [row["client"].tobytes() for row in rows] == [ME] and rows["reserved"].tolist() == [8]
    assert (told.epoch, told.finished, told.standing) == (7, False, None)
    state.run.finished = True
    assert sums(handler_of(state)).body.finished


def test_samples_are_drawn_and_the_rest_is_told():
    state = state_with_cache()
    handler = handler_of(state)
    sums(handler)
    reply = draw(handler, 5)
    assert pack.samples_of(reply.payload) == 5 and (reply.body.epoch, reply.body.finished) == (7, False)
    assert unpack_sums(reply.body.clients)["reserved"].tolist() == [3]
    assert state.tables.first.limiter.stats().drawn == 5
    nothing = draw(handler, 5, client=b"x" * 16)
    assert nothing.payload is None and state.tables.first.limiter.stats().drawn == 5


def test_a_table_of_another_schema_is_refused_if_the_reader_names_one():
    handler = handler_of(state_with_cache())
    sums(handler, header={"fingerprint": SCHEMA.fingerprint})
    for header, code in (({"fingerprint": 1}, "schema"), ({"table": 5}, "table")):
        with pytest.raises(ProtocolError) as caught:
            sums(handler, header=header)
        assert caught.value.code == code


def test_a_reader_tells_how_drawing_stands_with_all_servers():
    state = state_with_cache(BAND)
    handler, limiter = handler_of(state), state.tables.first.limiter
    standing = sums(handler).body.standing
    assert (standing.surplus, standing.ratio, standing.tolerance) == (0.0, 1.0, 30.0)
    assert not limiter.standing().is_told
    band = messages.ClusterRate(surplus=12.0, inserted=0, drawn=0, entries=5, share=0.5, ratio=1.0, tolerance=30.0)
    standing = sums(handler, band=band).body.standing
    assert standing.surplus == 12.0 and limiter.standing().is_told
    assert draw(handler, 4, band=messages.ClusterRate(12.0, 0, 0, 5, 0.5, 1.0, 30.0)).body.standing.surplus == 8.0
    assert draw(handler, 4).body.standing.surplus == 8.0, "it knows of no band: others need not make that good"


def test_a_reader_that_waits_is_waited_for():
    state = state_with_cache(BAND)
    limiter = state.tables.first.limiter
    sums(handler_of(state), wanted=5)
    assert READER in limiter._limiter._hungry
    sums(handler_of(state))
    assert READER not in limiter._limiter._hungry


@pytest.mark.parametrize(
    ("asked", "codecs", "here", "used"),
    [
        ("lz4", ("lz4",), ("zlib", "lz4"), "lz4"),
        ("lz4", ("lz4",), ("zlib",), "none"),
        ("lz4", (), ("zlib", "lz4"), "none"),
        ("zlib", ("zlib", "lz4"), ("zlib", "lz4"), "none"),
        ("none", ("lz4",), ("zlib", "lz4"), "none"),
    ],
)
def test_frames_are_compressed_as_both_can(asked, codecs, here, used):
    assert codec_of(asked, codecs, here) == used


def test_a_reader_chooses_where_the_table_leaves_it_to_it():
    both = ("zlib", "lz4")
    assert codec_of("auto", both, both) == "none" and codec_of("auto", both, both, packed=True) == "lz4"
    assert codec_of("auto", (), both, packed=True) == "none"
    assert codec_of("none", both, both, packed=True) == "none"
