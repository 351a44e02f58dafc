"""Fields of messages at their bounds in wire.md: values at a bound are taken, and values beyond are refused."""

import math

import msgspec
import numpy as np
import pytest

from memoire.errors import ParameterError, ProtocolError
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.server.state import Learners
from memoire.wire import messages
from memoire.wire.rows import ACCOUNT, CLIENT_COUNTS, CLIENT_SUMS, unpack_accounts, unpack_counts, unpack_sums
from wirekit import BODIES, refused, with_tail

MOST = 1.7976931348623157e308
ROOMY = Limits.of(tail_bytes=1 << 24)
NUMBERLESS = [math.nan, math.inf, -math.inf, "1", None]
"""Values that are no finite numbers."""


def after(value, towards):
    return float(np.nextafter(value, towards))


def texts(least, most):
    return ["x" * least, "x" * most, "\u2713" * most], ["x" * (most + 1), b"x", None] + ["x" * (least - 1)] * (
        least > 0
    )


def counts(least, most):
    return [least, most], [least - 1, most + 1, 0.5, "1", None, True]


def sizes(least, most):
    return [bytes(least), bytes(most)], [bytes(most + 1), "x" * most, None] + ([bytes(least - 1)] if least else [])


def several(most, one, other=None, length=1):
    """Return lists of `one` that are taken (empty, longest) and refused (too long, no list, with `other`)."""
    return [[], [one] * most], [[one] * (most + 1), one, None] + [[one, other]] * (other is not None)


def named(most, one, other):
    """Return maps by name that are taken, and values that are refused."""
    good = {f"name {number}": one for number in range(most)}
    return [{}, good, {"x" * 256: one}], [good | {"one more": one}, {"x" * 257: one}, {"name": other}, {1: one}, []]


def reals(least, most):
    beyond = [after(value, way) for value, way in ((least, -math.inf), (most, math.inf)) if abs(value) < MOST]
    return [least, most, 5e-324], [*beyond, *NUMBERLESS]


PARAMETERS = named(64, "a", {"no": "map"})
KINDS = {
    "bool": ([True, False], [0, 1, None, "true"]),
    "count": counts(0, 2**53 - 1),
    "small": counts(0, 2**32 - 1),
    "parts": counts(1, 2**32 - 1),
    "word": counts(0, 2**63 - 1),
    "hash": ([0, 2**64 - 1], [-1, 0.5, "1", None]),  # msgpack has no larger integers
    "weight": reals(0.0, MOST),
    "signed": reals(-MOST, MOST),
    "share": reals(0.0, 1.0),
    "seconds": reals(0.0, 2.0**40),
    "name": texts(0, 256),
    "process name": (["", "a", "7", "A.b_c-9", "x" * 253], ["x" * 254, "a b", "a\n", ".a", "\u2713", b"x", None]),
    "word of 16": texts(0, 16),
    "code": texts(0, 64),
    "status": (["done", "failed"], ["", "Done", "cancelled", 1, None]),
    "address": texts(0, 1024),
    "text": texts(0, 16384),
    "schema": texts(0, 262144),
    "topic": (texts(1, 256)[0], [*texts(1, 256)[1], "a\0b"]),
    "order": sizes(16, 16),
    "key": sizes(0, 32),
    "8 names": several(8, "a", "x" * 257),
    "64 names": several(64, "a", "x" * 257),
    "1024 names": several(1024, "a", "x" * 257),
    "4096 names": several(4096, "a", "x" * 257),
    "16 small": several(16, 1, 2**32),
    "4096 lines": several(4096, [1, 1.0, 1, "a"], [2**53, 1.0, 1, "a"]),
    "4096 ended": several(4096, [1, 1.0, 1, 1.0], [2**53, 1.0, 1, 1.0]),
    "65536 floats or nothing": ([None, [], [1.0] * 65536], [[1.0] * 65537, ["a"], 1.0]),
    "32 counts": named(32, 1, 2**53),
    "64 counts": named(64, 1, 2**53),
    "1024 counts": named(1024, 1, 2**53),
    "32 floats": named(32, 1.0, "1"),
    "64 floats": named(64, 1.0, "1"),
    "parameters": (
        [*PARAMETERS[0], {"a": [1.0] * 1024}, {"a": None, "b": True, "c": 1, "d": 0.5}],
        [*PARAMETERS[1], {"a": [1.0] * 1025}, {"a": [None]}],
    ),
    "any float": ([-MOST, MOST, math.nan], ["1", None]),  # checked where the value is used: see below
}
"""Values that are taken, and values that are refused, by kind of field."""
KEY, PLAN = ["a", 0, 1], [1, {"a": 1}]
KINDS |= {
    "16 bytes or nothing": ([None, bytes(0), bytes(16)], [bytes(17), "x", 1]),
    "small or nothing": ([None, *counts(0, 2**32 - 1)[0]], [-1, 2**32, 0.5, "1"]),
    "count or nothing": ([None, *counts(0, 2**53 - 1)[0]], [-1, 0.5, "1"]),
    "32 tags": ([{}, {"a": "b"}, {str(i): "b" for i in range(32)}], [{str(i): "b" for i in range(33)}, {"a": 1}, None]),
    "65536 words": several(65536, 1, -1),
    "65536 floats": several(65536, 1.0, "a"),
    "65536 counts": several(65536, 1, 2**53),
    "1024 weights": named(1024, 1.0, -1.0),
    "65536 bytes": sizes(0, 65536),
    "65536 keys": several(65536, KEY, ["a", 0]),
    "65536 new": several(65536, [1, 1], [1, -1]),
    "plan or nothing": ([None, PLAN, [0, {}]], [[1], [-1, {}], [1, {"a": -1}], {}]),
}
KINDS["bool or nothing"] = ([True, False, None], [0, "no"])
KINDS["parameters or nothing"] = [*KINDS["parameters"][0], None], [each for each in KINDS["parameters"][1] if each]

KINDS["65536 names"] = several(65536, "a", "x" * 257)
KINDS["call that finds"] = (["tags", "facts", "values"], ["", "put", 1, None])
KINDS["call that changes"] = (["put", "stage", "clear", "reset"], ["", "tags", 1, None])

FIELDS = {
    "65536 names": "KEYED_ROWS.partitions",
    "call that finds": "FIND_ROWS.call",
    "call that changes": "CHANGE_ROWS.call",
    "word of 16": "HELLO.role WELCOME.storage SNAPSHOT.state TAKE.release",
    "name": "PROMPTS.consumer GROUPS.dataset GROUPS.session FIND_ROWS.partition CHANGE_ROWS.partition HELLO.table HELLO.software HELLO.host WELCOME.run_name WELCOME.home_name WELCOME.table_name "
    "WELCOME.software UPDATED.run_name CONTROL.run REFUSED.field LEDGER.run ACCOUNTS.run_name INHERIT.run_name "
    "TAKE_SNAPSHOT.name SNAPSHOT.name",
    "small or nothing": "PROMPTS.after GROUPS.after FIND_ROWS.known",
    "16 bytes or nothing": "SUMS.after",
    "small": "KEYED_ROWS.known PROMPTS.most PROMPTS.rank PROMPTS.ranks ANSWERS.count GROUPS.epoch GROUPS.count GROUPS.wanted PROMPTED.answered "
    "HELLO.label WELCOME.table SUMS.reserve SUMS.wanted DRAW.reserve DRAW.wanted Line.label "
    "TAKE.steps TAKE.least TAKE.wanted INFERRED.batch Ended.kind",
    "count": "PROMPTS.offset PROMPTED.rest GROUPS.step PROMPTED.done ACCOUNTS.guests CHANGE_ROWS.offset KEYED_ROWS.rows KEYED_ROWS.bytes HELLO.pid HELLO.inserted WELCOME.parameters_version WELCOME.max_step WELCOME.credit WELCOME.granted_steps "
    "UPDATE.episodes UPDATE.steps UPDATE.passed_steps UPDATE.caches UPDATE.cache_bytes UPDATE.skipped "
    "UPDATE.generated_bytes UPDATE.positives UPDATE.parameters_version UPDATE.dropped_lines UPDATE.applied UPDATE.stale "
    "UPDATE.gone UPDATE.entries UPDATED.feedback_waiting UPDATE.feedback_through UPDATED.episodes UPDATED.steps UPDATED.lines_through UPDATED.ended_through UPDATED.caches "
    "UPDATED.received_bytes UPDATED.lost UPDATED.lost_bytes UPDATED.credit UPDATED.parameters_version "
    "UPDATED.feedback_through UPDATED.granted_steps CACHE.number CACHE.pushed_bytes EPISODE.number EPISODE.pushed_bytes "
    "TAKEN.samples TAKEN.lost TAKEN.parameters_version NOTICE.version NOTICE.size FETCH.version FETCH.offset FETCH.size "
    "CHUNK.version CHUNK.size CHUNK.offset PUBLISH.size ACCOUNTS.unfinished PUBLISH.offset PUBLISH.version PUBLISHED.received "
    "PUBLISHED.version INFER.min_version INFER.job WORK.job JOB.number RESULT.job INFERRED.version ROLLOUTS.held ROLLOUTS.clients ROLLOUTS.capacity SUMS.elsewhere DRAW.elsewhere REFUSED.limit ACCOUNTS.applied ACCOUNTS.stale SNAPSHOT.bytes "
    "SNAPSHOT.caches SNAPSHOT.samples SNAPSHOT.episodes SNAPSHOT.entries ServerRate.inserted ServerRate.drawn ClusterRate.inserted "
    "ClusterRate.drawn ClusterRate.entries Line.number Ended.number Ended.length",
    "8 names": "HELLO.codecs WELCOME.codecs",
    "64 floats": "HELLO.scalars UPDATE.scalars",
    "32 floats": "HELLO.figures",
    "schema": "WELCOME.schema WELCOME.outputs WELCOME.starts WELCOME.entries",
    "parameters": "WELCOME.parameters CONTROL.parameters JOB.options",
    "parameters or nothing": "UPDATED.parameters",
    "word": "PROMPTS.since PROMPTS.changed PROMPTED.changed PROMPTS.columns PROMPTED.epoch PROMPTED.cursor FIND_ROWS.after CHANGE_ROWS.upload KEYED_ROWS.epoch KEYED_ROWS.after FIND_ROWS.version KEYED_ROWS.version WELCOME.epoch WELCOME.since UPDATE.epoch UPDATED.epoch CACHE.since EPISODE.since NOTICE.epoch CHUNK.epoch "
    "SUMMED.epoch DRAWN.epoch NEWS.epoch ACCOUNTS.epoch ROLLOUTS.epoch",
    "hash": "NOTICE.checksum CHUNK.home CHUNK.checksum PUBLISH.checksum SUMMED.parameters DRAWN.parameters",
    "4096 names": "WELCOME.servers WELCOME.leaving WELCOME.unmet WELCOME.pages",
    "1024 names": "FIND_ROWS.fields ACCOUNTS.runs",
    "64 names": "WELCOME.inference",
    "1024 counts": "WELCOME.models UPDATE.models UPDATED.models",
    "32 counts": "WELCOME.limits HELLO.takes",
    "64 counts": "PROMPTED.counts UPDATED.rejected",
    "bool": "PROMPTED.is_whole SUMMED.is_whole DRAWN.is_whole DRAW.in_pages PROMPTS.is_going_on GROUPS.is_evaluation GROUPS.is_before_first GROUPS.is_last PROMPTED.is_closed PROMPTED.is_over PROMPTED.is_empty FIND_ROWS.is_everywhere KEYED_ROWS.is_whole WELCOME.finished WELCOME.durable UPDATE.leaving UPDATE.finished UPDATED.durable UPDATED.finished "
    "UPDATED.leaving EPISODE.cut EPISODE.has_final EPISODE.update_value EPISODE.update_weight TAKEN.finished NOTICE.text CHUNK.text "
    "PUBLISH.text SUMMED.finished DRAWN.finished CONTROL.finish CONTROL.drain CONTROL.discard_mismatched ROLLOUTS.finished TAKE.exact ACCOUNTS.finished ACCOUNTS.durable "
    "ACCOUNTS.more INHERIT.finished ServerRate.is_told JOB.cancelled JOB.leaving DRAW.packed",
    "bool or nothing": "EPISODE.terminated",
    "weight": "UPDATE.total_weight UPDATE.minimum EPISODE.multiplier ServerRate.ratio ServerRate.tolerance ClusterRate.ratio "
    "ClusterRate.tolerance",
    "signed": "GROUPS.priority ServerRate.surplus ClusterRate.surplus",
    "share": "GROUPS.replay ClusterRate.share",
    "seconds": "ANSWERS.seconds "
    "UPDATED.time UPDATED.feedback_age INFER.patience INFERRED.waited WORK.patience JOB.lease ACCOUNTS.time SNAPSHOT.seconds Line.time Ended.time",
    "4096 lines": "UPDATE.lines",
    "4096 ended": "UPDATE.ended",
    "65536 floats or nothing": "EPISODE.bootstrap",
    "text": "PROMPTED.wait UPDATED.wait REFUSED.text RESULT.text SNAPSHOT.text SNAPSHOT.path Line.text",
    "topic": "NOTICE.topic FETCH.topic CHUNK.topic PUBLISH.topic PUBLISHED.topic",
    "order": "TAKE_SNAPSHOT.order",
    "key": "LEDGER.after",
    "parts": "SUMS.of DRAW.of",
    "code": "REFUSED.code",
    "status": "RESULT.status",
    "16 small": "PROMPTS.states REFUSED.versions",
    "process name": "HELLO.name",
    "address": "NodeEndpoints.request NodeEndpoints.push NodeEndpoints.publish",
    "any float": "Ended.returned",
    "count or nothing": "ANSWERS.version GROUPS.version PROMPTED.committed",
    "32 tags": "PROMPTS.tags GROUPS.tags",
    "65536 words": "ANSWERS.leases",
    "65536 floats": "GROUPS.values",
    "65536 counts": "PROMPTED.sizes",
    "1024 weights": "GROUPS.shares",
    "65536 bytes": "PROMPTED.flags",
    "65536 keys": "PROMPTS.keys GROUPS.keys",
    "65536 new": "GROUPS.new",
    "plan or nothing": "GROUPS.plan PROMPTED.plan",
}
"""Fields by their kind, as their page gives it."""
OTHERS = "SUMS.part DRAW.part SUMMED.clients DRAW.counts DRAWN.clients ACCOUNTS.accounts INHERIT.accounts " \
    "WELCOME.endpoints SUMS.band DRAW.band SUMMED.standing DRAWN.standing ROLLOUTS.fragments RESULT.fragments " \
    "PROMPTS.call ANSWERS.call GROUPS.call ANSWERS.pieces PROMPTED.leases PROMPTED.prompts PROMPTED.columns " \
    "PROMPTED.groups"  # fmt: skip
"""Fields that have tests of their own below."""
PLACES = {"Line": ("UPDATE", "lines"), "Ended": ("UPDATE", "ended"), "ServerRate": ("SUMMED", "standing"),
          "ClusterRate": ("SUMS", "band"), "NodeEndpoints": ("WELCOME", "endpoints")}  # fmt: skip
"""Message and field in which a part stands, by name of the part."""
VECTOR = {body.type.name: name for name, (body, _) in sorted(BODIES.items(), reverse=True)}
PARTS = [messages.ServerRate, messages.ClusterRate, messages.Line, messages.Ended, messages.NodeEndpoints]


def test_every_field_has_a_kind():
    known = {f"{body.type.name}.{field}" for body in messages.BODIES.values() for field in body.__struct_fields__}
    known |= {f"{part.__name__}.{field}" for part in PARTS for field in part.__struct_fields__}
    listed = [field for fields in FIELDS.values() for field in fields.split()]
    assert len(listed) == len(set(listed)) and known == {*listed, *OTHERS.split()}


def tail_with(owner, field, value):
    """Return a golden vector's name, and the tail of its message with this value in a field or in a part."""
    kind, place = PLACES.get(owner, (owner, field))
    tail = msgspec.to_builtins(BODIES[VECTOR[kind]][0], builtin_types=(bytes,))
    if owner == "NodeEndpoints":
        value = {field: value}
    elif owner in PLACES:
        part = next(each for each in PARTS if each.__name__ == owner)
        plain = {"text": "a", "is_told": True}
        row = [value if name == field else plain.get(name, 1) for name in part.__struct_fields__]
        value = [row] if owner in ("Line", "Ended") else row
    if field == "of":
        tail["part"] = 0
    return VECTOR[kind], msgspec.msgpack.encode(tail | {place: value})


@pytest.mark.parametrize("kind", FIELDS)
def test_a_field_takes_what_lies_at_its_bounds_and_refuses_what_lies_beyond(kind):
    taken, turned_away = KINDS[kind]
    for owner, field in (name.split(".") for name in FIELDS[kind].split()):
        for expected, values in (("", taken), ("tail", turned_away)):
            for value in values:
                code = refused(with_tail(*tail_with(owner, field, value)), ROOMY)
                assert code == expected, (owner, field, repr(value)[:80])


@pytest.mark.parametrize("owner", ["SUMS", "DRAW"])
def test_a_part_is_below_the_number_of_parts(owner):
    for part, of, expected in ((0, 1, ""), (1, 1, "tail"), (6, 7, ""), (7, 7, "tail"), (2**32 - 2, 2**32 - 1, "")):
        name, _ = tail_with(owner, "part", part)
        assert refused(with_tail(name, msgspec.msgpack.encode({"part": part, "of": of}))) == expected, (part, of)


# ---------------------------------------------------------------------------------------------- rows inside of tails

ROWS = {
    "sums": (unpack_sums, CLIENT_SUMS),
    "counts": (unpack_counts, CLIENT_COUNTS),
    "accounts": (unpack_accounts, ACCOUNT),
}
TIMES = ([0.0, -1.0, MOST], [math.nan, math.inf, -math.inf])
BOUNDS = {
    "sums": dict.fromkeys(("total_weight", "minimum", "drawn_between"),
                          ([0.0, 5e-324, MOST], [-5e-324, math.nan, math.inf, -math.inf])),
    "counts": {"zero": ([0], [1])},
    "accounts": {
        **dict.fromkeys([name for name in ACCOUNT.names if ACCOUNT[name] == np.uint64],
                        ([0, 2**53 - 1], [2**53, 2**64 - 1])),
        "home": ([0, 2**64 - 1], []), "since": ([0, 2**63 - 1], [2**63]),
        "returns_sum": ([-1e300, 1e300], [after(1e300, math.inf), after(-1e300, -math.inf), math.nan, math.inf]),
        "first_seen": TIMES, "last_seen": TIMES, "flags": ([0, 1], [2, 2**32 - 1]),
    },
}  # fmt: skip


@pytest.mark.parametrize("rows", BOUNDS)
def test_a_row_takes_what_lies_at_its_bounds_and_refuses_what_lies_beyond(rows):
    unpack, dtype = ROWS[rows]
    for name, (taken, turned_away) in BOUNDS[rows].items():
        for is_taken, values in ((True, taken), (False, turned_away)):
            for value in values:
                array = np.zeros(2, dtype)
                array["client"][1], array[name][1] = (1, 1), value
                if is_taken:
                    assert unpack(array.tobytes())[name][1] == value
                else:
                    with pytest.raises(ValueError):
                        unpack(array.tobytes())


# ------------------------------------------------------------------------------------------------ NaN behind the wire


@pytest.mark.parametrize("number", NUMBERLESS[:3])
def test_a_number_that_the_wire_leaves_open_is_refused_where_it_is_read(number):
    refusals = {
        "a learner's scalar": lambda: Learners().met(bytes(16), messages.Hello(scalars={"a": number}), 1.0),
        "a learner's figure": lambda: Learners().met(bytes(16), messages.Hello(figures={"a": number}), 1.0),
    }
    for what, refuse in refusals.items():
        with pytest.raises(ProtocolError) as caught:
            refuse()
        assert caught.value.code == "value", what
    for name in ("priority_exponent", "mix_lambda", "discount"):
        with pytest.raises(ParameterError, match=name):
            Parameters.from_wire({name: number})
