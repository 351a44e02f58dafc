"""Models on their way to a server: they end, and others wait for them."""

import pytest

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.server.handlers.control import MAX_UPLOADS, UPLOAD_TIMEOUT, Uploads
from memoire.wire import _bytes, messages
from memoire.wire.byte_budget import ByteBudget
from serverkit import ME, YOU

LIMITS = Limits(model_bytes=1000)


def publish(topic, size=500, offset=0, checksum=0):
    return messages.Publish(topic=topic, size=size, checksum=checksum, offset=offset)


def uploads_of():
    return Uploads(LIMITS, ByteBudget(0).holder("uploads", own=LIMITS.model_bytes))


def receive(uploads, body, chunk, client=ME, now=0.0):
    return uploads.receive(client, body, chunk, now)


def goes_on(uploads, topic, offset, size=500):
    """Whether the next byte of an upload is taken."""
    try:
        return receive(uploads, publish(topic, size, offset), b"x") == (offset + 1, None)
    except ProtocolError as error:
        assert error.code == "missing"
        return False


def test_a_model_is_whole_with_its_last_chunk():
    uploads, body = uploads_of(), b"fifteen bytes.."
    checksum = _bytes.checksum(body)
    assert receive(uploads, publish("t", 15, 0, checksum), body[:10]) == (10, None)
    assert receive(uploads, publish("t", 15, 0, checksum), body[:10]) == (10, None), "a resend"
    offset, model = receive(uploads, publish("t", 15, 10, checksum), body[10:])
    assert (offset, model.body, model.version, len(uploads)) == (15, body, 0, 0)


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
        with pytest.raises(ProtocolError, match="beginning is not here"):
            receive(uploads, publish("t", 15, 10, checksum), body[10:])
    receive(uploads, publish("t", 15, 0, checksum), body[:10])
    assert receive(uploads, publish("t", 15, 10, checksum), body[10:])[1].body == body


def test_a_chunk_that_does_not_fit_leaves_the_upload_as_it_was():
    uploads = uploads_of()
    receive(uploads, publish("t"), b"xxx")
    for offset, chunk in ((5, b"x"), (3, bytes(498)), (3, b"")):
        with pytest.raises(ProtocolError) as caught:
            receive(uploads, publish("t", offset=offset), chunk)
        assert caught.value.code == "index"
    assert goes_on(uploads, "t", 3)


def test_a_model_without_a_byte_is_whole_at_once():
    offset, model = receive(uploads_of(), publish("t", 0, checksum=_bytes.checksum(b"")), None)
    assert (offset, model.body) == (0, b"")


def test_another_body_under_the_same_topic_begins_again():
    uploads = uploads_of()
    receive(uploads, publish("t"), b"xxx")
    with pytest.raises(ProtocolError, match="a stretch at 3 of a model whose beginning is not here"):
        receive(uploads, publish("t", offset=3, checksum=1), b"x")
    assert receive(uploads, publish("t", checksum=1), b"y") == (1, None)
    assert not goes_on(uploads, "t", 3) and len(uploads) == 1


def test_two_clients_send_models_of_one_topic_side_by_side():
    uploads = uploads_of()
    receive(uploads, publish("t"), b"xxx")
    receive(uploads, publish("t"), b"y", YOU)
    assert receive(uploads, publish("t", offset=3), b"x") == (4, None)
    uploads.drop(YOU, "t")
    uploads.drop(YOU, "t")
    assert goes_on(uploads, "t", 4) and len(uploads) == 1
    uploads.clear()
    assert not goes_on(uploads, "t", 5)


def test_a_model_that_is_too_large_is_refused_before_anything_is_kept():
    uploads = uploads_of()
    with pytest.raises(ProtocolError) as caught:
        receive(uploads, publish("t", 1001), b"x")
    assert caught.value.code == "too_large" and len(uploads) == 0


def test_uploads_are_bounded_in_number_and_a_further_one_waits_without_harm_to_them():
    uploads = uploads_of()
    for number in range(MAX_UPLOADS):
        assert receive(uploads, publish(f"t{number}", 50), b"x") == (1, None)
    for _ in range(2):
        with pytest.raises(ProtocolError, match=r"16 models of 800 bytes .* 16 at a time may") as caught:
            receive(uploads, publish("new", 50), b"x")
        assert caught.value.code == "busy" and len(uploads) == MAX_UPLOADS
    assert all(goes_on(uploads, f"t{number}", 1, 50) for number in range(MAX_UPLOADS))
    assert receive(uploads, publish("whole", 1, checksum=_bytes.checksum(b"x")), b"x")[1].body == b"x"
    uploads.drop(ME, "t3")
    assert receive(uploads, publish("new", 50), b"x") == (1, None)


def test_whole_sizes_of_uploads_are_within_the_bytes_of_models():
    uploads = uploads_of()
    receive(uploads, publish("first", 600), b"x")
    with pytest.raises(ProtocolError, match="one of 500 bytes was to come; 16 at a time may, of 1000 bytes") as caught:
        receive(uploads, publish("second", 500), b"x")
    assert caught.value.code == "busy"
    assert receive(uploads, publish("first", 990, checksum=1), b"x") == (1, None), "the same publisher's next one"
    assert len(uploads) == 1


def test_an_upload_without_a_chunk_for_a_while_is_given_up_and_leaves_its_place():
    uploads = uploads_of()
    receive(uploads, publish("dead", 1000), b"x", now=0.0)
    receive(uploads, publish("dead", 1000, 1), b"x", now=10.0)
    with pytest.raises(ProtocolError, match="given up after 60 s"):
        receive(uploads, publish("next", 1000), b"x", now=9.9 + UPLOAD_TIMEOUT)
    assert receive(uploads, publish("next", 1000), b"x", now=10.0 + UPLOAD_TIMEOUT) == (1, None)
    assert not goes_on(uploads, "dead", 2, 1000) and len(uploads) == 1


@pytest.mark.parametrize("publishers", [MAX_UPLOADS, MAX_UPLOADS + 1, 2 * MAX_UPLOADS, 5 * MAX_UPLOADS])
def test_every_one_of_many_publishers_that_send_side_by_side_ends(publishers):
    uploads, body = uploads_of(), b"chunks of eight bytes..."
    offsets = dict.fromkeys(range(publishers), 0)
    for turn in range(100):
        for number in [*offsets]:
            offset = offsets[number]
            said = publish("t", len(body), offset, _bytes.checksum(body))
            try:
                offsets[number], whole = receive(uploads, said, body[offset : offset + 8], bytes([number]) * 16, turn)
            except ProtocolError as error:
                assert (error.code, offset) == ("busy", 0), "what was taken is never lost"
            else:
                if whole is not None:
                    del offsets[number]
    assert not offsets
