"""Which way a message goes, and what clients are told of servers: addresses are plain facts, and time is passed in."""

from dataclasses import dataclass

import pytest

from memoire.limits import Limits
from memoire.proxy.router import MAX_REMOVED, RETIRE_TIMEOUT, SETTLE_INTERVAL, START_GRACE, Router, rendezvous
from memoire.wire import messages
from memoire.wire.frames import name_hash

pytestmark = pytest.mark.usefixtures("without_io")


@dataclass(eq=False)
class Back:
    """An address, and what was answered there."""

    endpoint: str
    names: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    inference: tuple[str, ...] = ()
    is_away: bool = False
    denied: str = ""
    is_too_small: bool = False


def router(*names, now=100.0):
    """One address for each name, called as the server there is; "" has not answered."""
    made = Router(now)
    made.backs = [Back(f"tcp://{place}", (name,) if name else ()) for place, name in enumerate(names)]
    for back in made.backs:
        made.learn(back)
    return made


def relist(made, *endpoints, now=100.0):
    opened = []
    changed = made.relist([f"tcp://{each}" for each in endpoints], lambda url: opened.append(url) or Back(url), now)
    return changed, opened


def clients(count):
    return [number.to_bytes(16, "little") for number in range(count)]


def chosen(made, count=60):
    return {made.assign(client).names[0] for client in clients(count)}


HOME = name_hash

# ----------------------------------------------------------------------------------------------------- new clients


def test_new_clients_are_shared_out_when_all_have_answered_or_had_their_time():
    made = router("a", "")
    assert (
        not made.is_ready(100.0)
        and not made.is_ready(100.0 + SETTLE_INTERVAL)
        and made.is_ready(100.1 + SETTLE_INTERVAL)
    )
    assert made.ready_at() == 100.0 + SETTLE_INTERVAL
    made.backs[1].names = ("b",)
    assert made.is_ready(100.0)
    nobody = router("", "")
    assert not nobody.is_ready(999.0) and nobody.ready_at() == float("inf")


def test_new_clients_go_to_servers_that_are_there_and_stay_as_far_as_there_are_any():
    made = router("a", "b", "c")
    assert chosen(made) == {"a", "b", "c"}
    made.backs[0].is_away = True
    assert chosen(made) == {"b", "c"}
    made.backs[1].leaving = ("b",)
    assert chosen(made) == {"c"}
    made.backs[2].is_away = True
    assert chosen(made) == {"b"}  # it is about to leave, and there
    made.backs[1].is_away = True
    assert chosen(made) == {"a", "b", "c"}  # one of them may come back


def test_a_name_more_moves_only_the_clients_that_it_gets():
    before, after = (["a", "b"], ["a", "b", "c"])
    moved = [(rendezvous(client, before), rendezvous(client, after)) for client in clients(300)]
    assert {new for old, new in moved if old != new} == {"c"} and 60 < sum(old != new for old, new in moved) < 140


# ------------------------------------------------------------------------------------------------------- the ways


def test_a_home_is_unknown_when_every_server_was_met_or_had_its_time():
    made = router("a", "")
    assert not made.is_unknown(HOME("x"), 100.0 + START_GRACE) and made.is_unknown(HOME("x"), 100.1 + START_GRACE)
    made.backs[1].names = ("b",)
    assert made.is_unknown(HOME("x"), 100.0)


def test_the_ways_to_homes_follow_what_is_said_and_those_that_leave_keep_theirs():
    made = router("a", "b")
    first, second = made.backs
    assert made.homes == {HOME("a"): first, HOME("b"): second}
    first.names, first.leaving = ("c", "b"), ("a",)
    made.learn(first)
    assert made.homes == {HOME("a"): first, HOME("b"): second, HOME("c"): first}
    first.leaving = ()
    made.learn(first)
    assert HOME("a") not in made.homes


def test_a_home_that_answers_before_it_was_listed_is_reached_by_the_way_of_its_answer():
    made = router("a", "b")
    made.answered(HOME("new"), made.backs[1])
    made.answered(HOME("a"), made.backs[1])
    assert made.homes[HOME("new")] is made.backs[1] and made.homes[HOME("a")] is made.backs[0]


def test_nobody_lets_it_in_only_if_all_say_so():
    made = router("a", "b")
    made.backs[0].denied = "No key."
    assert made.denied == ""
    made.backs[1].denied = "No key."
    assert made.denied == "No key."


# -------------------------------------------------------------------------------------------------- another list


def test_the_same_list_in_another_order_changes_nothing():
    made = router("a", "b")
    assert relist(made, 1, 0, now=200.0) == (False, []) and made.listed_at == 100.0


def test_an_address_that_was_taken_off_serves_its_clients_for_a_while_and_is_known_to_be_gone_then():
    made = router("a", "b")
    old = made.backs[0]
    assert relist(made, 1, 2, now=200.0) == (True, ["tcp://2"]) and made.listed_at == 200.0
    assert made.servers == ("b",) and made.retiring == {old: 200.0 + RETIRE_TIMEOUT} and old in made.all
    assert made.retire(200.0 + RETIRE_TIMEOUT - 0.1) == set() and made.homes[HOME("a")] is old
    assert not made.is_unknown(HOME("a"), 200.0)  # tcp://2 has not answered
    assert made.retire(200.0 + RETIRE_TIMEOUT) == {old}
    assert HOME("a") not in made.homes and made.retiring == {} and old not in made.all
    assert made.is_unknown(HOME("a"), 200.0) and not made.is_unknown(HOME("x"), 200.0)


def test_an_address_that_was_taken_off_while_it_is_away_is_gone_at_once():
    made = router("a", "b")
    made.backs[0].is_away = True
    old = made.backs[0]
    relist(made, 1)
    assert made.retire(100.0) == {old}


def test_an_address_that_comes_back_in_time_goes_on_and_one_that_comes_later_is_opened_again():
    made = router("a", "b")
    old = made.backs[0]
    relist(made, 1)
    assert relist(made, 0, 1)[1] == [] and made.backs[0] is old and made.retiring == {}
    relist(made, 1)
    relist(made, 1, 5, now=101.0)
    assert made.retiring[old] == 100.0 + RETIRE_TIMEOUT  # its time goes on
    made.retire(200.0)
    assert relist(made, 0, 1, now=201.0)[1] == ["tcp://0"]


def test_a_home_that_was_removed_and_is_reached_by_another_address_goes_on():
    made = router("a", "b")
    relist(made, 1)
    made.backs[0].names = ("b", "a")
    made.retire(200.0)
    assert made.homes == {HOME("a"): made.backs[0], HOME("b"): made.backs[0]}
    made.backs[0].names = ("b",)
    made.learn(made.backs[0])
    assert HOME("a") not in made.homes
    made.backs.append(Back("tcp://late"))
    assert not made.is_unknown(HOME("a"), 100.0)  # it was there, by another way


def test_of_very_many_homes_that_were_removed_only_the_newest_are_known():
    made = router("a")
    made.backs[0].names = ("a", *(f"old-{number}" for number in range(MAX_REMOVED)))
    made.learn(made.backs[0])
    relist(made, 1)
    made.retire(200.0)
    unknown = [made.is_unknown(HOME(name), 100.0) for name in ("a", "old-0", f"old-{MAX_REMOVED - 1}")]
    assert unknown == [False, True, True]  # tcp://1 has not answered: a home that is forgotten may be there


# ------------------------------------------------------------------------------------------------ what clients hear


def test_a_welcome_on_its_way_to_a_client_has_this_proxys_addresses_list_and_limits():
    made = router("a", "b", "")
    made.backs[0].leaving, made.backs[1].unmet = ("a",), ("tcp://further",)
    relist(made, 0, 2)
    told = messages.Welcome(
        schema="{}", servers=["b"], leaving=["z"], models={"policy": 5, "old": 2}, home_name="b", unmet=["tcp://x"],
        limits={"request_bytes": 10, "message_bytes": 1 << 50, "unheard_of": 7},
    )  # fmt: skip
    own = messages.Endpoints(request="tcp://me")
    said = made.welcome(told, own, {"policy": 4, "new": 1}, Limits())
    assert said.endpoints == own and said.servers == ["a"] and said.leaving == ["z", "a", "b"]
    assert said.models == {"policy": 5, "old": 2, "new": 1} and said.unmet == ["tcp://2"]
    assert said.limits == {"request_bytes": 10, "message_bytes": Limits().message_bytes, "unheard_of": 7}
    assert (said.home_name, said.schema) == ("b", "{}")


def test_addresses_where_nobody_has_answered_are_named_with_those_further_on():
    made = router("a", "")
    made.backs[0].unmet = ("tcp://further",)
    assert made.unmet() == ["tcp://1", "tcp://further"]
