"""A login of the dashboard ends: after its time, when somebody logs out, when its token goes, when there are too many."""

import pytest

from memoire.errors import ProtocolError
from memoire.security.access import Tokens
from poolkit import Clock

gate = pytest.importorskip("memoire.dashboard.web.access", reason="starlette is not installed")
Headers = pytest.importorskip("starlette.datastructures").Headers

OLD, NEW = "old-token-old-token", "new-token-new-token"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{OLD}\n{NEW}\n")
    return path


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
def door(path, clock):
    return gate.Logins(Tokens(path), clock)


HERE = gate.RequestOrigin("10.0.0.1", "10.0.0.1")


def by(number):
    """A browser that keeps this number."""
    return Headers({"cookie": f"other=1; {gate.COOKIE}={number}"})


def is_in(door, number):
    found = {door.has_login(by(number)), door.admits(by(number), HERE), door.still_admits(by(number))}
    assert len(found) == 1
    return found.pop()


def test_a_login_holds_for_a_week_and_not_a_moment_longer(door, clock):
    number = door.log_in(OLD, HERE)
    clock.now += 7 * 86_400 - 0.001
    assert is_in(door, number)
    clock.now += 0.001
    assert not is_in(door, number)


def test_who_logs_out_ends_that_login_alone(door):
    mine, other = door.log_in(OLD, HERE), door.log_in(OLD, HERE)
    door.log_out(by(mine))
    assert (is_in(door, mine), is_in(door, other)) == (False, True)
    door.log_out(by("of nobody"))
    door.log_out(Headers({}))
    assert is_in(door, other)


def test_a_login_ends_with_the_token_it_was_made_with_and_with_no_other(door, path):
    by_old, by_new = door.log_in(OLD, HERE), door.log_in(NEW, HERE)
    path.write_text(f"{NEW}\n")
    assert (is_in(door, by_old), is_in(door, by_new)) == (False, True)


def test_a_login_too_many_ends_none_that_is_used_and_the_page_says_so(door, path, clock):
    numbers = [door.log_in(number % 2 and OLD or NEW, HERE) for number in range(gate.MAX_LOGINS)]
    clock.now += gate.LOGIN_IDLE_TIMEOUT
    path.write_text(f"{NEW}\n")
    assert [is_in(door, number) for number in numbers[:4]] == [True, False, True, False]
    used = [door.log_in(NEW, HERE) for _ in range(gate.MAX_LOGINS - 2)]
    with pytest.raises(ProtocolError, match="1000 logins are known here, the most"):
        door.log_in(NEW, HERE)
    assert [is_in(door, number) for number in (*numbers[:4], *used)] == [True, False] * 2 + [True] * len(used)


def test_a_login_ends_with_the_process_that_made_it(door, path, clock):
    number = door.log_in(OLD, HERE)
    assert is_in(door, number) and not is_in(gate.Logins(Tokens(path), clock), number)


def test_nobody_is_let_in_without_a_number_or_by_a_wrong_one(door):
    assert door.log_in("wrong-token-wrong", HERE) is None
    for headers in ({}, {"cookie": ""}, {"cookie": f"{gate.COOKIE}="}, {"cookie": f"{gate.COOKIE}={OLD}"}):
        assert not door.has_login(Headers(headers)) and not door.still_admits(Headers(headers))
    assert door.refused["http_token"] == 1  # a wrong number is no guess at a token


def test_whoever_came_with_a_token_in_a_header_stays_as_long_as_it_holds(door, path):
    mine = Headers({"authorization": f"Bearer {OLD}"})
    assert door.admits(mine, HERE) and door.still_admits(mine)
    path.write_text(f"{NEW}\n")
    assert not door.still_admits(mine)
