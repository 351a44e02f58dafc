"""Looking names up: in the background, once, and with nobody waiting for a name that is not theirs."""

import os
import time

import pytest

from memoire.net import addresses as resolver
from memoire.net.addresses import NameResolver
from namekit import Book
from netkit import DEADLINE, until


@pytest.fixture
def book():
    made = Book(proxy=["10.0.0.7", "fd00::7"])
    yield made
    made.released.set()


def answers(found, *hosts):
    box = {}
    for host in hosts:
        found.ask(host, lambda answer, host=host: box.update({host: answer}))
    return box


def test_a_name_has_its_addresses_in_order(book):
    box = answers(NameResolver(book), "proxy")
    assert until(lambda: box)["proxy"].addresses == ("10.0.0.7", "fd00::7")


def test_one_look_up_serves_all_who_ask_at_the_same_time(book):
    found, got = NameResolver(book, fresh=60.0), []
    for _ in range(50):
        found.ask("proxy", got.append)
    until(lambda: len(got) == 50)
    assert book.asked == ["proxy"]


def test_an_old_answer_is_not_used_again(book):
    found, got = NameResolver(book, fresh=0.0), []
    for expected in (["10.0.0.7"], ["10.0.0.8"]):
        book.known["proxy"] = expected
        found.ask("proxy", got.append)
        assert list(until(lambda: got).pop().addresses) == expected


def test_a_name_that_hangs_stalls_no_other(book):
    book.hanging.add("dead")
    found = NameResolver(book)
    box = answers(found, "dead", "proxy")
    assert until(lambda: "proxy" in box) and "dead" not in box
    assert "no answer from the name server" in found.trouble("dead")
    assert found.trouble("proxy") == ""


def test_asking_what_is_wrong_waits_no_longer_than_it_may(book):
    book.hanging.add("dead")
    began = time.monotonic()
    assert "no answer" in NameResolver(book).trouble("dead", 0.1)
    assert time.monotonic() - began < DEADLINE


@pytest.mark.parametrize("host", ["nobody", "no.such.name.", ""])
def test_a_name_without_addresses_says_why(book, host):
    found = NameResolver(book)
    assert ("Name or service not known" in found.trouble(host, 10.0)) == bool(host)


def test_a_name_that_no_name_can_be_is_trouble_too():
    assert "could not be resolved" in NameResolver().trouble("a" * 70 + ".example", 10.0)


def test_what_is_remembered_is_bounded(book):
    found = NameResolver(book, max_known=3)
    for k in range(10):
        found.trouble(f"host{k}", 10.0)
    assert len(found._known) == 3


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1%eth0", "::ffff:10.0.0.1"])
def test_addresses_are_told_from_names(host):
    assert resolver.is_numeric(host)
    assert not resolver.is_numeric("localhost") and not resolver.is_numeric("10.0.0.256")


def test_this_system_knows_its_own_name():
    assert {"127.0.0.1", "::1"} & set(resolver.look_up("localhost"))


def test_a_forked_child_looks_names_up_by_itself():
    """Whatever a thread of the parent was about to do with the lock: it does not go on in the child."""
    shared = resolver.shared_names()
    with shared._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if shared.trouble("localhost", 10.0) == "" else 1)
    assert os.waitpid(child, 0)[1] == 0
