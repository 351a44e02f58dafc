"""What the WELCOMEs of one address behind a proxy change, and the parts of what passes it."""

import pytest

from memoire.errors import Closed, Refused
from memoire.proxy.backend import MAX_SERVERS, BackendChange
from memoire.security.roles import OPEN, EnvelopedRequest, opened
from memoire.wire import messages
from memoire.wire.frames import name_hash
from proxykit import HOME, RUN, Back, header, welcome

pytestmark = pytest.mark.usefixtures("without_io")

OTHER = name_hash("two")
PLACES = messages.Endpoints(push="tcp://p", publish="tcp://n")


def learn(back, told, run=RUN):
    return back.learn(header(messages.Welcome, run=run), told)


# -------------------------------------------------------------------------------------------------------- WELCOME


def test_the_first_welcome_says_who_is_there_and_where_caches_go():
    back = Back()
    told = welcome("a", servers=["a", "b"], leaving=["b"], unmet=["tcp://x"], endpoints=PLACES, epoch=5)
    assert learn(back, told) == BackendChange(has_moved=True, has_restarted=False, is_new_run=False)
    assert (back.names, back.leaving, back.unmet) == (("a", "b"), ("b",), ("tcp://x",))
    assert back.endpoints == PLACES and back.run == RUN


def test_a_server_that_names_no_list_is_alone():
    back = Back()
    learn(back, welcome("a"))
    assert back.names == ("a",)


def test_a_first_welcome_moves_its_sockets_even_if_it_names_no_addresses():
    assert learn(Back(), welcome("a")).has_moved


@pytest.mark.parametrize("places", [PLACES, messages.Endpoints(push="tcp://p")])
def test_sockets_move_when_other_addresses_are_said(places):
    back = Back()
    learn(back, welcome(endpoints=PLACES))
    assert learn(back, welcome(endpoints=places)).has_moved == (places != PLACES)


def test_only_the_same_server_can_have_begun_again():
    back = Back()
    assert not learn(back, welcome("a", epoch=5)).has_restarted
    assert not learn(back, welcome("b", epoch=9)).has_restarted  # behind another proxy there are several
    assert not learn(back, welcome("a", epoch=5)).has_restarted
    assert learn(back, welcome("a", epoch=6)).has_restarted
    assert not learn(back, welcome("a", epoch=6)).has_restarted


def test_the_epochs_of_servers_that_are_not_heard_of_any_more_are_forgotten():
    back = Back()
    learn(back, welcome("stays", epoch=5))
    for number in range(2 * MAX_SERVERS):
        learn(back, welcome(f"server-{number}", epoch=5))
        if number % 1000 == 0:
            assert not learn(back, welcome("stays", epoch=5)).has_restarted
    assert learn(back, welcome("stays", epoch=6)).has_restarted, "heard of lately"
    assert learn(back, welcome(f"server-{number}", epoch=6)).has_restarted
    assert not learn(back, welcome("server-0", epoch=6)).has_restarted, "forgotten: another life is not seen"


def test_a_server_that_is_heard_of_again_is_not_the_oldest():
    back = Back()
    for name in ("stays", *(f"server-{number}" for number in range(MAX_SERVERS - 1)), "stays", "one more"):
        learn(back, welcome(name, epoch=5))
    assert learn(back, welcome("stays", epoch=6)).has_restarted
    assert not learn(back, welcome("server-0", epoch=6)).has_restarted, "forgotten in its place"


def test_another_run_is_one_if_there_was_a_run_before():
    back = Back()
    assert not learn(back, welcome()).is_new_run and not learn(back, welcome()).is_new_run
    assert learn(back, welcome(), run=OTHER).is_new_run and back.run == OTHER


def test_why_the_proxy_there_is_not_let_in_is_known_until_something_else_is_said():
    back = Back()
    for answer, said in [
        (Refused("tcp://a", "denied", "No key."), "No key."),
        (Refused("tcp://a", "busy", "not now"), ""),
        (Refused("tcp://a", "denied", "No key."), "No key."),
        (Refused("tcp://a", "version", "version 1 of the protocol"), "version 1 of the protocol"),
        (Refused("tcp://a", "too_large", "a long WELCOME"), "a long WELCOME"),
        (Closed("this proxy"), ""),
    ]:
        back.hello.begin()
        back.answered(answer)
        assert back.refusal == said and not back.hello.is_open
        assert back.is_too_small == (said == "a long WELCOME")


# -------------------------------------------------------------------------------------------------------- notices


def test_a_notice_of_another_run_is_not_taken_and_has_hello_ask():
    back = Back("a")
    back.hello.due = 99.0
    assert back.hears(header(messages.Notice)) and back.hears(header(messages.Notice, run=0))
    assert not back.hello.is_due(98.0)
    assert not back.hears(header(messages.Notice, run=OTHER))
    assert back.hello.is_due(0.0)


def test_news_has_hello_ask():
    back = Back("a")
    back.hello.due = 99.0
    back.heard_news()
    assert back.hello.is_due(0.0)


def test_a_model_of_the_only_server_there_is_that_servers_in_its_newest_life():
    back = Back()
    assert back.publisher((3, 4)) == (3, 4)
    learn(back, welcome("a", epoch=7))
    assert back.publisher((3, 4)) == (HOME("a"), 7) and back.publisher((3, 8)) == (HOME("a"), 8)
    learn(back, welcome("b", servers=["a", "b"], epoch=9))
    assert back.publisher((3, 4)) == (3, 4)


# ------------------------------------------------------------------------------------------------------- envelope


def test_the_first_empty_frame_parts_addresses_from_the_message():
    assert opened([b"relay", b"client", b"", b"head", b""]) == ([b"relay", b"client", b""], [b"head", b""])
    assert opened([b"", b"head"]) == ([b""], [b"head"])
    assert opened([b"a", b""]) == ([b"a", b""], [])
    assert opened([b"a", b"b"]) is None and opened([]) is None


def test_a_request_is_handed_on_as_it_came():
    assert EnvelopedRequest(OPEN, [b"a", b""], [b"head"], True).frames == [b"a", b"", b"head"]
