"""What a client left is told by the next one, message by message."""

import logging

import pytest

from clientkit import CLIENT, reply
from memoire.client.unreported import AGAIN, Part, Request, Teller, Untold
from memoire.errors import Closed, Refused
from memoire.wire import messages

pytestmark = pytest.mark.usefixtures("without_io")

HOME = messages.name_hash("home")


def welcome(home_name="home"):
    return reply(messages.Welcome(schema="{}", home_name=home_name))


UPDATED = reply(messages.Updated())


@pytest.fixture
def teller(tmp_path):
    path = tmp_path / "untold.msgpack"
    path.touch()
    updates = [messages.Update(epoch=5, steps=10, caches=3, cache_bytes=99), messages.Update(epoch=5, steps=30)]
    parts = [Part(run, messages.tail_of(update)) for run, update in zip((7, 0), updates, strict=True)]
    return Teller(
        path,
        Untold(client=CLIENT, label=9, table="default", home="home", steps=30, episodes=2, lines=1, parts=parts),
    )


def test_each_part_is_told_in_order_and_then_the_file_goes(teller, caplog):
    caplog.set_level(logging.INFO)
    hello = teller.begin()
    assert (hello.body.role, hello.body.label, hello.body.table) == ("actor", 9, "default")
    assert (hello.run, hello.home, teller.again_at) == (0, HOME, float("inf"))
    first = teller.answered(welcome(), 1.0)
    assert first == Request(messages.Update(epoch=5, steps=10, caches=3, cache_bytes=99), run=7)
    assert teller.answered(UPDATED, 2.0) == Request(messages.Update(epoch=5, steps=30))
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
    assert (teller.again_at, teller.is_done) == (3.0 + AGAIN, False)
    assert isinstance(teller.begin().body, messages.Hello)
    assert teller.answered(welcome(), 4.0).body.steps == 10


@pytest.mark.parametrize("received", [UPDATED, welcome()])
def test_an_answer_to_something_else_is_no_answer(teller, received):
    teller.begin()
    if received is not UPDATED:
        teller.answered(welcome(), 1.0)
    assert teller.answered(received, 2.0) is None
    assert (teller.again_at, teller.is_done) == (2.0 + AGAIN, False)


def test_what_nobody_will_ever_take_stays_and_is_named(teller, caplog):
    teller.begin()
    assert teller.answered(Refused("there", "run", "never heard of it"), 1.0) is None
    assert teller.is_done and teller.path.exists() and "cannot be told, and stays" in caplog.text


def test_the_rest_is_left_to_the_next_client_when_this_one_ends(teller, caplog):
    teller.begin()
    assert teller.answered(Closed("this client"), 1.0) is None
    assert teller.is_done and teller.path.exists() and not caplog.records
