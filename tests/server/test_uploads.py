"""Models on their way to a server: which of them give way to others."""

import pytest

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.server.handlers.uploads import MAX_UPLOADS, Uploads
from memoire.wire import _bytes, messages
from serverkit import ME, YOU

LIMITS = Limits(model_bytes=1000)


def publish(topic, size=500, offset=0, checksum=0):
    return messages.Publish(topic=topic, size=size, checksum=checksum, offset=offset)


def goes_on(uploads, topic, offset, size=500):
    """Whether the next byte of an upload is taken."""
    try:
        return uploads.receive(ME, publish(topic, size, offset), b"x") == (offset + 1, None)
    except ProtocolError as error:
        assert error.code == "missing"
        return False


def test_a_model_is_whole_with_its_last_chunk():
    uploads, body = Uploads(LIMITS), b"fifteen bytes.."
    checksum = _bytes.checksum(body)
    assert uploads.receive(ME, publish("t", 15, 0, checksum), body[:10]) == (10, None)
    assert uploads.receive(ME, publish("t", 15, 0, checksum), body[:10]) == (10, None), "a resend"
    offset, model = uploads.receive(ME, publish("t", 15, 10, checksum), body[10:])
    assert (offset, model.body, model.version, len(uploads)) == (15, body, 0, 0)


def test_a_model_with_a_wrong_chunk_is_forgotten_and_can_be_sent_again():
    uploads, body = Uploads(LIMITS), b"fifteen bytes.."
    checksum = _bytes.checksum(body)
    for wrong_at in (0, 10):
        chunks = {0: body[:10], 10: body[10:]}
        chunks[wrong_at] = bytes(len(chunks[wrong_at]))
        assert uploads.receive(ME, publish("t", 15, 0, checksum), chunks[0]) == (10, None)
        with pytest.raises(ProtocolError, match="another XXH3 than announced"):
            uploads.receive(ME, publish("t", 15, 10, checksum), chunks[10])
        assert len(uploads) == 0
        with pytest.raises(ProtocolError, match="beginning is not here"):
            uploads.receive(ME, publish("t", 15, 10, checksum), body[10:])
    uploads.receive(ME, publish("t", 15, 0, checksum), body[:10])
    assert uploads.receive(ME, publish("t", 15, 10, checksum), body[10:])[1].body == body


def test_a_chunk_that_does_not_fit_leaves_the_upload_as_it_was():
    uploads = Uploads(LIMITS)
    uploads.receive(ME, publish("t"), b"xxx")
    for offset, chunk in ((5, b"x"), (3, bytes(498)), (3, b"")):
        with pytest.raises(ProtocolError) as caught:
            uploads.receive(ME, publish("t", offset=offset), chunk)
        assert caught.value.code == "index"
    assert goes_on(uploads, "t", 3)


def test_a_model_without_a_byte_is_whole_at_once():
    offset, model = Uploads(LIMITS).receive(ME, publish("t", 0, checksum=_bytes.checksum(b"")), None)
    assert (offset, model.body) == (0, b"")


def test_another_body_under_the_same_topic_begins_again():
    uploads = Uploads(LIMITS)
    uploads.receive(ME, publish("t"), b"xxx")
    with pytest.raises(ProtocolError, match="a stretch at 3 of a model whose beginning is not here"):
        uploads.receive(ME, publish("t", offset=3, checksum=1), b"x")
    assert uploads.receive(ME, publish("t", checksum=1), b"y") == (1, None)
    assert not goes_on(uploads, "t", 3) and len(uploads) == 1


def test_two_clients_send_models_of_one_topic_side_by_side():
    uploads = Uploads(LIMITS)
    uploads.receive(ME, publish("t"), b"xxx")
    uploads.receive(YOU, publish("t"), b"y")
    assert uploads.receive(ME, publish("t", offset=3), b"x") == (4, None)
    uploads.drop(YOU, "t")
    uploads.drop(YOU, "t")
    assert goes_on(uploads, "t", 4) and len(uploads) == 1
    uploads.clear()
    assert not goes_on(uploads, "t", 5)


def test_a_model_that_is_too_large_is_refused_before_anything_is_kept():
    uploads = Uploads(LIMITS)
    with pytest.raises(ProtocolError) as caught:
        uploads.receive(ME, publish("t", 1001), b"x")
    assert caught.value.code == "too_large" and len(uploads) == 0


def test_uploads_are_bounded_in_number_and_the_oldest_gives_way():
    uploads = Uploads(LIMITS)
    for number in range(MAX_UPLOADS + 1):
        assert uploads.receive(ME, publish(f"t{number}"), b"x") == (1, None)
        assert len(uploads) == min(number + 1, MAX_UPLOADS)
    assert [goes_on(uploads, f"t{number}", 1) for number in range(3)] == [False, True, True]


def test_an_upload_that_goes_on_is_not_the_oldest_and_few_bytes_drop_nothing():
    uploads = Uploads(LIMITS)
    for number in range(3):
        uploads.receive(ME, publish(f"t{number}", 990), bytes(10))
    assert uploads.receive(ME, publish("t0", 990, 10), bytes(500)) == (510, None) and len(uploads) == 3
    assert uploads.receive(ME, publish("t1", 990, 10), bytes(475)) == (485, None) and len(uploads) == 3
    assert goes_on(uploads, "t0", 510, 990) and len(uploads) == 2  # more than a model's bytes lay there
    assert not goes_on(uploads, "t2", 10, 990) and goes_on(uploads, "t1", 485, 990)


def test_uploads_that_nobody_goes_on_with_are_bounded_in_bytes():
    uploads = Uploads(LIMITS)
    for number in range(10):
        assert uploads.receive(ME, publish(f"t{number}"), bytes(400)) == (400, None)
        assert len(uploads) <= 3
    assert [goes_on(uploads, f"t{number}", 400) for number in (0, 6, 9)] == [False, False, True]
