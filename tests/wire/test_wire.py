"""Messages as frames: round trips, golden vectors, and a parser that raises nothing but ProtocolError."""

import copy
import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import make_vectors
from memoire.errors import Closed, MemoireTimeout, ParameterError, ProtocolError, Refused
from memoire.limits import Limits
from memoire.security.roles import ROLES
from memoire.wire import _bytes, messages, types
from memoire.wire.frames import (
    CODES,
    encode,
    parse,
    parse_header,
    parse_notice,
    refusal,
    reply,
    topic_frame,
    welcome_of,
)
from memoire.wire.rows import CLIENT_COUNTS, CLIENT_SUMS
from wirekit import BODIES, VECTORS, changed, golden, refused, with_tail

MESSAGES = make_vectors.messages()
NAMES = sorted(MESSAGES)


def test_each_type_and_each_field_of_each_body_is_in_a_vector():
    bodies = [body for body, _ in make_vectors.bodies().values()]

    def written_as(kind, field):
        value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        return field.required or any(type(body) is kind and getattr(body, field.name) != value for body in bodies)

    missing = [
        f"{kind.__name__}.{field.name}"
        for kind in messages.BODIES.values()
        for field in msgspec.structs.fields(kind)
        if not written_as(kind, field)
    ]
    assert missing == []
    assert {BODIES[name][0].type for name in NAMES} == set(types.TYPES.values()) == set(messages.BODIES)


def test_the_vectors_on_disk_are_what_the_script_writes(tmp_path: Path) -> None:
    make_vectors.write(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_bytes() for path in VECTORS.iterdir() if path.is_file()}
    assert written == kept


def test_the_types_are_those_of_the_list() -> None:
    """`types.txt` has a line for each type: number, name, payload rule, payload limit, kept replies, and senders.

    A number in use never changes.
    """
    lines = [
        f"{kind.number} {kind.name} {kind.payload.name} {'message_bytes' if kind.large else 'request_bytes'} {kind.kept} "
        + " ".join(["pushed"] * kind.pushed + [role for role in ROLES if role in kind.sent_by])
        for kind in types.TYPES.values()
    ]
    assert "\n".join(map(str.rstrip, lines)) + "\n" == Path(__file__).with_name("types.txt").read_text()
    assert all(getattr(types, kind.name) is copy.deepcopy(kind) is kind for kind in types.TYPES.values())


def test_a_number_and_a_name_belong_to_one_type_and_a_type_has_one_body() -> None:
    for number, name, expected in (
        (16, "NEW", "a number and a name that differ from those of the type DRAW (16)"),
        (130, "DRAW", "a number and a name that differ from those of the type DRAW (16)"),
        (4096, "NEW", "1 to 4095 for the type NEW"),
    ):
        with pytest.raises(ParameterError) as caught:
            types.Type(number, name)
        assert caught.value.expected == expected
    with pytest.raises(ParameterError, match="the only body of DRAW, which has"):
        messages.body(types.DRAW)(messages.Draw)


def test_a_type_without_a_body_is_passed_on_and_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("take", "drawn"):  # each message comes without and with a payload
        frames = golden(name)
        header, _ = parse_header(frames)
        monkeypatch.delitem(messages.DECODERS, header.type)
        monkeypatch.delitem(messages.WITH_PAYLOAD, header.type.number, raising=False)
        assert parse_header(frames)[0] == header and refused(frames) == "type"


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_message_parses_to_what_the_json_says_and_encodes_to_its_bytes(name: str) -> None:
    expected = json.loads((VECTORS / "vectors.json").read_text())["messages"][name]
    message = parse(golden(name))
    assert message.type.name == expected["type"]
    assert message.header.client.hex() == expected["header"]["client"]["hex"]
    for field in ("sequence", "run", "home", "table", "fingerprint"):
        assert getattr(message.header, field) == expected["header"][field]
    assert make_vectors._hex(make_vectors._plain(message.body)) == expected["tail"]
    assert message.header.payload_bytes == expected["payload_bytes"]
    assert (message.payload or b"") == BODIES[name][1]
    assert encode(message.body, payload=message.payload, **make_vectors.header_of(name)) == golden(name)
    assert reply(message.header, message.body, payload=message.payload) == golden(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_message_cut_anywhere_is_refused(name: str) -> None:
    frames = golden(name)
    for i, frame in enumerate(frames):
        for size in range(len(frame)):
            assert refused([*frames[:i], frame[:size], *frames[i + 1 :]])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_anywhere_is_refused(name: str) -> None:
    frames = golden(name)
    for i, frame in enumerate(frames):
        room = bytearray(frame)
        for at in range(len(frame)):
            for bit in range(8) if i == 0 else (at % 8,):
                room[at] ^= 1 << bit
                assert refused([*frames[:i], bytes(room), *frames[i + 1 :]])
                room[at] ^= 1 << bit


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_frame_and_one_too_many_are_refused(name: str) -> None:
    frames = golden(name)
    assert refused([]) == refused([*frames, b"x", b"y"]) == "frames"
    assert refused([*frames, b""]) == refused([*frames, b"x"]) == "frames"
    assert refused(frames[1:])
    if len(frames) == 2:
        assert refused(frames[:1]) == "frames"
        assert refused(frames[::-1])
    assert refused([frames[0] + b"x", *frames[1:]]) == "long"


@pytest.mark.parametrize("name", NAMES)
def test_absurd_payload_sizes_allocate_nothing(name: str) -> None:
    tracemalloc.start()
    for size in (1, 2**31, 2**32, 2**63 - 1, 2**64 - 1):
        frames = changed(name, 64, size.to_bytes(8, "little"))
        assert refused(frames) in ("frames", "size", "too_large", "payload")
        assert refused([frames[0], b"x"]) in ("frames", "size", "too_large", "payload")
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


@pytest.mark.parametrize("version", [1, 3])
def test_an_older_or_newer_version_is_refused_politely(version: int) -> None:
    with pytest.raises(
        ProtocolError, match=f"version {version} of the protocol; this node speaks 2. Upgrade the older"
    ):
        parse(changed("hello", 4, version.to_bytes(2, "little")))


@pytest.mark.parametrize(
    ("offset", "value", "code"),
    [
        (0, b"MEMQ", "magic"),
        (6, b"\x00\x00", "type"),
        (6, b"\xff\x00", "type"),
        (8, b"\x01", "flags"),
        (84, b"\x01", "flags"),
        (72, b"\x01", "size"),
    ],
)
def test_what_this_version_does_not_know_is_refused_by_its_name(offset: int, value: bytes, code: str) -> None:
    assert refused(changed("hello", offset, value)) == code


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b"\xc0",
        b"\x90",
        b"\x80\x80",
        b"\xc1",
        b"\x81\xa6codecs\xdd\x7f\xff\xff\xff",  # a list of 2**31 - 1 in no bytes
        b"\x81\xa6codecs\xdf\xff\xff\xff\xff",
        b"\x81\xa6codecs\xc6\xff\xff\xff\xff",
        b"\x81\xa4host\xdb\xff\xff\xff\xff",
        b"\x81\xa4host\xa2\xff\xfe",  # no UTF-8
        b"\x81\xa6codecs\xd4\x00\x00",  # an extension
        b"\x81\xa4what" + b"\x91" * 500 + b"\xc0",  # deep nesting, in a field that is ignored
    ],
)
def test_tails_that_are_not_the_map_of_their_type_are_refused(tail: bytes) -> None:
    assert refused(with_tail("hello", tail)) == "tail"


def test_rows_cut_short_and_clients_named_twice_are_refused() -> None:
    assert refused(with_tail("summed", msgspec.msgpack.encode({"clients": b"x" * 63}))) == "tail"
    twice = np.zeros(2, CLIENT_COUNTS)
    assert refused(with_tail("draw", msgspec.msgpack.encode({"counts": twice.tobytes()}))) == "tail"
    twice["client"][1] = 5
    assert refused(with_tail("draw", msgspec.msgpack.encode({"counts": twice.tobytes()}))) == ""
    twice["zero"] = 1
    assert refused(with_tail("draw", msgspec.msgpack.encode({"counts": twice.tobytes()}))) == "tail"


def test_payloads_beyond_this_nodes_limits_are_refused() -> None:
    assert refused(golden("cache"), Limits(message_bytes=1000)) == "too_large"
    assert refused(golden("chunk"), Limits.of(request_bytes=4)) == "too_large"
    assert refused(golden("rollouts"), Limits.of(request_bytes=4)) == ""  # rollouts that a learner takes are no request
    assert refused(golden("rollouts"), Limits(message_bytes=4)) == "too_large"
    assert refused(golden("update"), Limits.of(tail_bytes=100)) == "too_large"


def test_a_payload_that_is_checked_later_is_handed_on_as_it_is() -> None:
    frames = golden("cache")
    frames[1] = bytes(len(frames[1]))
    message = parse(frames, verify_payload=False)
    assert message.payload is frames[1]
    assert refused(frames) == "payload"
    header, tail = parse_header(frames)
    assert header == message.header
    assert bytes(tail) == frames[0][96:]


def test_a_notice_comes_under_its_own_topic_only() -> None:
    frames = golden("notice")
    assert parse_notice([topic_frame("policy"), *frames]).body == BODIES["notice"][0]
    for topic, others, code in (
        (b"polic\0", frames, "topic"),
        (b"policy", frames, "topic"),
        (b"\xff\0", frames, "topic"),
        (b"policy\0", golden("hello"), "unexpected"),
        (b"policy\0", [], "frames"),
    ):
        with pytest.raises(ProtocolError) as problem:
            parse_notice([topic, *others])
        assert problem.value.code == code
    with pytest.raises(ProtocolError):
        parse_notice([])


@given(st.lists(st.binary(max_size=300), max_size=3))
def test_random_frames_are_refused(frames: list[bytes]) -> None:
    assert refused(frames)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(PLAIN)
def test_whatever_msgpack_writes_is_plain_until_it_is_cut(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    assert _bytes.is_plain_msgpack(data)
    assert not _bytes.is_plain_msgpack(data + b"\xc0")
    for size in range(len(data)):
        assert not _bytes.is_plain_msgpack(data[:size])


@given(st.sampled_from(NAMES), st.data())
def test_tails_of_the_right_names_and_wrong_values_are_parsed_or_refused(name: str, data: Any) -> None:
    fields = [field.name for field in msgspec.structs.fields(type(BODIES[name][0]))]
    tail = data.draw(st.dictionaries(st.sampled_from(fields), PLAIN, max_size=4)) if fields else {}
    refused(with_tail(name, msgspec.msgpack.encode(tail)))


PAGE = (Path(__file__).parents[2] / "docs" / "development" / "wire.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [kind.name for kind in messages.BODIES])
def test_the_page_describes_every_message_and_field(name: str) -> None:
    kind = getattr(types, name)
    body = messages.BODIES[kind]
    assert f"| {kind.number} | {name} |" in PAGE
    section = PAGE[PAGE.index(f"**{name}**") :].split("\n\n")[0]
    for field in msgspec.structs.fields(body):
        assert f"`{field.name}`" in section, field.name


def test_the_page_lists_every_code_and_row() -> None:
    for code, meaning in CODES.items():
        assert f"| `{code}` | {meaning} |" in PAGE
    assert f"`clients`, {CLIENT_SUMS.itemsize} bytes a client" in PAGE
    assert f"`counts`, {CLIENT_COUNTS.itemsize} bytes a client" in PAGE
    for field, (_, at) in CLIENT_SUMS.fields.items():
        assert any(line.startswith(f"| {at} |") and f"| {field} |" in line for line in PAGE.splitlines())


def test_a_message_without_the_payload_it_needs_and_a_refusal_to_an_unnamed_sender_are_not_made() -> None:
    with pytest.raises(ValueError, match="CACHE needs a payload"):
        encode(messages.Cache())
    with pytest.raises(ValueError, match="HELLO has no payload"):
        encode(messages.Hello(), payload=b"x")
    assert len(encode(messages.Chunk(topic="t", version=1, size=0, checksum=0), payload=b"")) == 1
    for frames in ([], [b"MEMR"], [b"x" * 200]):
        assert refusal(frames, messages.Refusal(code="frames", text="")) is None


@pytest.mark.parametrize(
    ("place", "value", "error"),
    [(3, 2**32, OverflowError), (5, -1, OverflowError), (8, 2**64, OverflowError), (0, b"MEM", ValueError), (4, b"c" * 15, ValueError)],
)  # fmt: skip
def test_a_header_takes_only_numbers_that_have_room_and_ids_of_their_size(place, value, error):
    facts = (b"MEMR", 2, 26, 7, b"c" * 16, 1, 2, 3, 2**64 - 1, b"12345", 6)
    with pytest.raises(error, match="large|negative|expected 4"):
        _bytes.write_header(*facts[:place], value, *facts[place + 1 :], b"")


# --- A peer sends one HELLO at a time, and only a WELCOME answers HELLO


def answered(body):
    return parse(encode(body, client=b"c" * 16, home=7, run=8))


def test_whatever_else_answers_a_hello_is_an_error():
    for error in (Refused("tcp://a", "busy", "not now"), Closed("this reader"), MemoireTimeout("reply", "a", 1.0, "")):
        with pytest.raises(type(error)) as raised:
            welcome_of(error, "tcp://a")
        assert raised.value is error
    with pytest.raises(Refused, match=r"HELLO was answered by UPDATED") as raised:
        welcome_of(answered(messages.Updated()), "tcp://a")
    assert raised.value.code == "unexpected" and "tcp://a" in str(raised.value)
