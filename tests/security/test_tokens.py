"""Tokens out of files that change while they are used, and what guessing them costs."""

import os

import pytest

from memoire.errors import ParameterError
from memoire.security.access import MAX_ADDRESSES, MAX_WRONG_TOKENS, PENALTY_INTERVAL, Tokens, WrongTokens, read_tokens
from poolkit import Clock

OLD, NEW = "old-token-old-token", "new-token-new-token"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "token"
    path.write_text(OLD + "\n")
    return path


@pytest.mark.parametrize(
    "text",
    ["", "\n\n", "short", "with a blank in the middle", f"{OLD}\nshort", "x" * 300, "ünprintable-token-x", "a\x00" * 16]
    + [f"{OLD}\n" * 17],
)
def test_a_file_that_holds_anything_but_tokens_is_refused(path, text):
    path.write_text(text)
    for read in (read_tokens, Tokens):
        with pytest.raises(
            ParameterError, match="a token on each line: 16 to 256 printable ASCII characters"
        ) as raised:
            read(path)
        assert OLD not in str(raised.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ParameterError, match="No such file"):
        Tokens(tmp_path / "none")


def test_any_token_of_a_file_lets_in_and_the_first_is_given(path):
    path.write_text(f"\n{OLD}\r\n  {NEW}  \n")
    found = Tokens(path)
    assert found.now() == (OLD, NEW) and found.first == OLD
    assert found.holds(OLD) and found.holds(NEW)
    assert not any(found.holds(text) for text in ("", OLD[:-1], OLD + "x", f"{OLD}\n{NEW}", "ü" * 19, "\ud800"))


def test_a_changed_file_holds_from_the_next_question_on(path):
    found = Tokens(path)
    path.write_text(f"{OLD}\n{NEW}\n")
    assert found.holds(OLD) and found.holds(NEW)
    path.write_text(f"{NEW}\n")
    assert found.holds(NEW) and not found.holds(OLD) and found.first == NEW


def test_a_link_that_is_swapped_as_kubelet_does_is_a_changed_file(tmp_path):
    for name, token in (("one", OLD), ("two", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(token)
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "token").symlink_to("..data/token")
    found = Tokens(tmp_path / "token")
    assert found.first == OLD
    (tmp_path / "..new").symlink_to("two")
    os.replace(tmp_path / "..new", tmp_path / "..data")
    assert found.first == NEW and not found.holds(OLD)


@pytest.mark.parametrize("damage", ["gone", "no token"])
def test_a_file_that_is_damaged_lets_nobody_in_until_it_is_mended(path, damage, caplog):
    found = Tokens(path)
    path.unlink() if damage == "gone" else path.write_text("short")
    assert not found.holds(OLD) and not found.holds("") and not found.holds("short") and found.first is None
    assert len(caplog.records) == 1 and "nobody is let in" in caplog.text and OLD not in caplog.text
    path.write_text(OLD)
    assert found.holds(OLD)


def test_tokens_are_never_shown(path):
    found = Tokens(path)
    assert OLD not in repr(found) and OLD not in str(found) and OLD not in repr(Tokens.of(OLD))
    assert Tokens.of(None) is None and Tokens.of(found) is found and Tokens.of(OLD).holds(OLD)


def test_nothing_is_no_token():
    with pytest.raises(ParameterError, match="some characters, or None"):
        Tokens.of("")
    assert not Tokens(given=("",)).holds("")


# ------------------------------------------------------------------------------------------------------------- guesses


def test_some_mistakes_are_free_and_then_each_costs_time():
    clock = Clock(1000.0)
    guesses = WrongTokens(clock)
    for _ in range(MAX_WRONG_TOKENS):
        assert guesses.wait("10.0.0.1") == 0.0
        guesses.wrong("10.0.0.1")
    assert guesses.wait("10.0.0.1") == pytest.approx(PENALTY_INTERVAL) and guesses.wait("10.0.0.2") == 0.0
    clock.now += PENALTY_INTERVAL
    assert guesses.wait("10.0.0.1") == 0.0
    guesses.wrong("10.0.0.1")
    assert guesses.wait("10.0.0.1") == pytest.approx(PENALTY_INTERVAL)
    clock.now += MAX_WRONG_TOKENS * PENALTY_INTERVAL
    guesses.wrong("10.0.0.1")
    assert guesses.wait("10.0.0.1") == 0.0  # the old ones are forgiven


def test_a_network_of_ipv6_is_one_guesser_and_an_ipv4_address_is_one_in_either_form():
    guesses = WrongTokens(Clock(1000.0))
    for last in range(MAX_WRONG_TOKENS):
        guesses.wrong(f"2001:db8::{last:x}")
    assert guesses.wait("2001:db8::ffff") > 0.0 and guesses.wait("2001:db8:0:1::1") == 0.0
    for _ in range(MAX_WRONG_TOKENS):
        guesses.wrong("::ffff:10.0.0.1")
    assert guesses.wait("10.0.0.1") > 0.0


def test_guessers_are_remembered_up_to_a_bound():
    guesses = WrongTokens(Clock(1000.0))
    addresses = [f"10.0.{number // 256}.{number % 256}" for number in range(MAX_ADDRESSES + 2)]
    for address in addresses:
        for _ in range(MAX_WRONG_TOKENS):
            guesses.wrong(address)
    waits = [guesses.wait(address) > 0.0 for address in addresses]
    assert waits == [False, False] + [True] * MAX_ADDRESSES
