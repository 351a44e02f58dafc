"""What a client left is told by the next one, message by message."""

import logging
import os

import msgspec
import pytest

from clientkit import CLIENT, reply
from memoire.client import reports as former_clients
from memoire.client.reports import RETRY_INTERVAL, FinalCounts, LateRequest, ReportPart, UnreportedClient
from memoire.errors import Closed, Refused, StateUnusable
from memoire.wire import messages
from memoire.wire.frames import name_hash, tail_of

pytestmark = pytest.mark.usefixtures("without_io")

HOME = name_hash("home")


def welcome(home_name="home"):
    return reply(messages.Welcome(schema="{}", home_name=home_name))


UPDATED = reply(messages.Updated())


@pytest.fixture
def teller(tmp_path):
    path = tmp_path / "untold.msgpack"
    path.touch()
    updates = [messages.Update(epoch=5, steps=10, caches=3, cache_bytes=99), messages.Update(epoch=5, steps=30)]
    parts = [ReportPart(run, tail_of(update)) for run, update in zip((7, 0), updates, strict=True)]
    return UnreportedClient(
        path,
        FinalCounts(client=CLIENT, label=9, table="default", home="home", steps=30, episodes=2, lines=1, parts=parts),
    )


def test_each_part_is_told_in_order_and_then_the_file_goes(teller, caplog):
    caplog.set_level(logging.INFO)
    hello = teller.begin()
    assert (hello.body.role, hello.body.label, hello.body.table) == ("actor", 9, "default")
    assert (hello.run, hello.home, teller.again_at) == (0, HOME, float("inf"))
    first = teller.answered(welcome(), 1.0)
    assert first == LateRequest(messages.Update(epoch=5, steps=10, caches=3, cache_bytes=99), run=7)
    assert teller.answered(UPDATED, 2.0) == LateRequest(messages.Update(epoch=5, steps=30))
    assert teller.path.exists() and not teller.is_done
    assert teller.answered(UPDATED, 3.0) is None and teller.is_done
    assert not teller.path.exists() and "30 steps, 2 episodes and 1 lines were told" in caplog.text


def test_another_home_is_told_nothing_of_caches(teller):
    teller.begin()
    assert teller.answered(welcome("other"), 1.0).body == messages.Update(steps=10)


@pytest.mark.parametrize("code", ["busy", "client"])
def test_a_home_that_has_no_time_is_asked_again_from_the_beginning(teller, code):
    teller.begin()
    teller.answered(welcome(), 1.0)
    teller.answered(UPDATED, 2.0)
    assert teller.answered(Refused("there", code, "later"), 3.0) is None
    assert (teller.again_at, teller.is_done) == (3.0 + RETRY_INTERVAL, False)
    assert isinstance(teller.begin().body, messages.Hello)
    assert teller.answered(welcome(), 4.0).body.steps == 10


@pytest.mark.parametrize("received", [UPDATED, welcome()])
def test_an_answer_to_something_else_is_no_answer(teller, received):
    teller.begin()
    if received is not UPDATED:
        teller.answered(welcome(), 1.0)
    assert teller.answered(received, 2.0) is None
    assert (teller.again_at, teller.is_done) == (2.0 + RETRY_INTERVAL, False)


def test_what_nobody_will_ever_take_stays_and_is_named(teller, caplog):
    teller.begin()
    assert teller.answered(Refused("there", "run", "never heard of it"), 1.0) is None
    assert teller.is_done and teller.path.exists() and "cannot be told, and stays" in caplog.text


def test_the_rest_is_left_to_the_next_client_when_this_one_ends(teller, caplog):
    teller.begin()
    assert teller.answered(Closed("this client"), 1.0) is None
    assert teller.is_done and teller.path.exists() and not caplog.records


def whole(**change):
    parts = [ReportPart(0, tail_of(messages.Update(steps=1)))]
    facts = {"label": 1, "table": "default", "home": "home", "steps": 5, "episodes": 2, "lines": 0, "parts": parts}
    return FinalCounts(**{"client": CLIENT} | facts | change)


def test_what_is_left_is_found_in_order_of_the_clients(tmp_path):
    kept = [whole(client=bytes([number]) * 16) for number in (2, 1)]
    said = [former_clients.leave(tmp_path, untold) for untold in kept]
    assert "5 steps, 2 episodes and 0 log lines were acknowledged: they are in" in said[0]
    assert [content for _, content in former_clients.found(tmp_path)] == kept[::-1]
    assert former_clients.leave(None, kept[0]).endswith("they are not counted")
    assert former_clients.found(tmp_path / "nowhere") == []


def test_a_draft_of_a_client_that_was_killed_goes_and_one_that_is_written_stays(tmp_path):
    name = f".untold-{'07' * 16}.msgpack"
    (tmp_path / f"{name}.{'0' * 32}.draft").write_bytes(b"a part")

    def look(step):
        if step == "sync":
            assert former_clients.found(tmp_path) == [] and len(list(tmp_path.glob(f"{name}.*.draft"))) == 1

    former_clients.save(tmp_path, whole(client=b"\x07" * 16), at=look)
    assert len(former_clients.found(tmp_path)) == 1
    (tmp_path / f"{name}.{'1' * 32}.draft").write_bytes(b"a part")
    assert len(former_clients.found(tmp_path)) == 1 == len(list(tmp_path.iterdir()))


def test_a_folder_that_takes_nothing_is_named(tmp_path):
    said = former_clients.leave(tmp_path / "gone", whole())
    assert f"they are not counted, and could not be kept in {tmp_path / 'gone'}: " in said


DAMAGE = {
    "empty": b"",
    "none": b"\x80",
    "noise": b"\xff" * 30,
    "former form": msgspec.msgpack.encode(whole()),
    "tail": whole(parts=[ReportPart(0, b"\xc1")]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_stays(tmp_path, caplog, damage):
    path = former_clients.save(tmp_path, whole())
    if isinstance(DAMAGE[damage], bytes):
        path.write_bytes(DAMAGE[damage])
    else:
        former_clients.save(tmp_path, DAMAGE[damage])
    assert former_clients.found(tmp_path) == [] and path.exists()
    assert f"{path} cannot be read, and is not told" in caplog.text


def test_a_file_that_is_larger_than_any_client_leaves_is_not_read(tmp_path, caplog):
    path = former_clients.save(tmp_path, whole())
    os.truncate(path, former_clients.MAX_BYTES + 1)  # sparse: it takes no room
    assert former_clients.found(tmp_path) == [] and f"it has more than {former_clients.MAX_BYTES} bytes" in caplog.text


def test_a_file_that_another_client_has_told_meanwhile_is_no_loss(tmp_path, caplog):
    (tmp_path / f"untold-{'07' * 16}.msgpack").symlink_to(tmp_path / "nowhere")
    assert former_clients.found(tmp_path) == [] and not caplog.records


def test_a_folder_is_made_or_refused(tmp_path, monkeypatch):
    assert former_clients.folder_at(tmp_path / "made").is_dir()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(StateUnusable, match="not writable"):
        former_clients.folder_at(tmp_path / "made")
