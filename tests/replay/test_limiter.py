"""The limiter decides alone: every message and the time are given to it, and nobody waits."""

import pytest

from memoire.limits import NO_LIMIT
from memoire.replay.limiter import (
    FORGET_TIMEOUT,
    MAX_WAITING_READERS,
    STARVING_TIMEOUT,
    UNHEARD_TIMEOUT,
    ClusterSurplus,
    Limiter,
    check_batch,
    check_size,
    why_not_draw,
)
from memoire.replay.parameters import Parameters

A, B = b"a" * 16, b"b" * 16
ENTRIES = 10**6


def made(tolerance: float | None = 50.0, ratio: float = 1.0, **fields) -> Limiter:
    return Limiter(Parameters(samples_per_insert=ratio, samples_per_insert_tolerance=tolerance, **fields))


def test_what_has_no_band_and_no_least_size_limits_nothing():
    limiter = made(None)
    assert not limiter.is_active and not limiter.has_band and limiter.standing() is None
    assert limiter.grant(A, 1, 0, 0.0) == (NO_LIMIT, "")
    assert limiter.why_not_draw(10**6, 0, 0.0) == ""
    limiter.met(A, 0, 1)
    assert limiter.reported(A, 10**6, 2, 0, 0.0)
    assert limiter.stats(0, 0.0).inserts_wait == ""


def test_a_least_size_alone_is_a_limit_of_draws_and_not_of_inserts():
    limiter = made(None, min_size=5)
    assert limiter.is_active and not limiter.has_band
    assert "waits for 5 more entries" in limiter.why_not_draw(1, 0, 0.0)
    assert limiter.grant(A, 1, 0, 0.0) == (NO_LIMIT, "")
    assert limiter.why_not_draw(10**6, 5, 0.0) == ""


def test_a_message_that_is_older_than_what_is_known_changes_nothing():
    limiter = made()
    limiter.met(A, 100, 5)
    limiter.met(A, 0, 5)
    limiter.met(A, 0, 4)
    assert limiter.reported(A, 110, 6, ENTRIES, 0.0)
    assert not limiter.reported(A, 150, 6, ENTRIES, 0.0), "the same message again"
    assert not limiter.reported(A, 110, 7, ENTRIES, 0.0), "nothing new in it"
    assert not limiter.reported(A, 90, 8, ENTRIES, 0.0), "fewer than before"
    assert limiter.stats(ENTRIES, 0.0).inserted == 10


def test_the_first_word_of_a_client_that_never_said_hello_is_where_it_begins():
    limiter = made()
    assert not limiter.reported(A, 10_000, 3, ENTRIES, 0.0)
    assert limiter.reported(A, 10_007, 4, ENTRIES, 0.0)
    assert limiter.stats(ENTRIES, 0.0).surplus == 7.0


def test_a_client_that_says_hello_again_gives_back_what_it_was_granted():
    limiter = made()
    limiter.met(A, 0, 1)
    assert limiter.grant(A, 1, ENTRIES, 0.0)[0] == 50
    assert limiter.grant(B, 1, ENTRIES, 0.0)[0] == 0
    limiter.met(A, 20, 2)
    assert limiter.grant(B, 1, ENTRIES, 0.0)[0] == 50
    limiter.left(b"c" * 16)  # nobody knows it
    limiter.left(B)
    assert limiter.grant(A, 1, ENTRIES, 0.0)[0] == 70


def test_what_is_reported_of_a_grant_frees_nothing_of_the_band():
    limiter = made()
    limiter.met(A, 0, 1)
    limiter.met(B, 0, 2)
    assert limiter.grant(A, 2, ENTRIES, 0.0)[0] == 25
    limiter.reported(A, 25, 3, ENTRIES, 0.0)
    assert limiter.grant(B, 1, ENTRIES, 0.0)[0] == 25
    limiter.drew(10)
    assert limiter.grant(A, 1, ENTRIES, 0.0)[0] == 25 + 10


def test_a_grant_never_goes_back():
    limiter = made()
    assert limiter.grant(A, 1, ENTRIES, 0.0)[0] == 50
    limiter.configure(limiter.parameters.replace(samples_per_insert_tolerance=2.0))
    assert limiter.grant(A, 1, ENTRIES, 0.0)[0] == 50


def test_beyond_the_band_is_forgiven_only_where_nobody_could_help_it():
    limiter = made(10.0, min_size=100)
    limiter.met(A, 0, 1)
    limiter.reported(A, 60, 2, 60, 0.0)  # not begun: nothing counts beyond the tolerance
    assert (limiter.stats(60, 0.0).surplus, limiter.stats(60, 0.0).forgiven) == (10.0, 0.0)
    limiter.reported(A, 100, 3, 100, 0.0)  # begins here, from nothing
    assert limiter.stats(100, 0.0).surplus == 0.0
    limiter.reported(A, 115, 4, 100, 0.0)
    assert (limiter.stats(100, 0.0).surplus, limiter.stats(100, 0.0).forgiven) == (15.0, 0.0)
    limiter.reported(A, 117, 5, 99, 0.0)  # entries have left: more have to come, whatever the band says
    assert (limiter.stats(99, 0.0).surplus, limiter.stats(99, 0.0).forgiven) == (10.0, 7.0)


def test_a_learner_that_waits_is_helped_after_its_patience_and_forgotten_when_it_stops_asking():
    limiter = made(50.0, cache_size=8)
    limiter.met(A, 0, 1)
    limiter.reported(A, limiter.grant(A, 1, ENTRIES, 0.0)[0], 2, ENTRIES, 0.0)
    limiter.wants("learner", 16, 0.0)
    assert limiter.grant(A, 1, ENTRIES, STARVING_TIMEOUT - 0.01) == (50, limiter.stats(ENTRIES, 0.0).inserts_wait)
    limiter.wants("learner", 20, STARVING_TIMEOUT)  # asks again: waits since the first time
    assert limiter.grant(A, 1, ENTRIES, STARVING_TIMEOUT) == (50 + 20 + 8, "")
    assert limiter.grant(B, 1, ENTRIES, STARVING_TIMEOUT + FORGET_TIMEOUT)[0] == 28
    assert limiter.grant(b"c" * 16, 1, ENTRIES, STARVING_TIMEOUT + FORGET_TIMEOUT + 0.01)[0] == 0


def test_a_learner_that_goes_away_is_forgotten_at_once():
    limiter = made(50.0, cache_size=8)
    limiter.reported(A, 0, 1, ENTRIES, 0.0)
    limiter.reported(A, 50, 2, ENTRIES, 0.0)
    limiter.wants("learner", 16, 0.0)
    limiter.wants("learner", 0, 1.0)
    limiter.wants("nobody", 0, 1.0)
    assert limiter.grant(A, 1, ENTRIES, 1.0)[0] == 50


def test_the_waiting_of_so_many_is_looked_at_and_no_more():
    limiter = made(50.0, cache_size=8)
    limiter.reported(A, 0, 1, ENTRIES, 0.0)
    limiter.reported(A, 50, 2, ENTRIES, 0.0)
    for number in range(MAX_WAITING_READERS):
        limiter.wants(number, 5, 0.0)
    limiter.wants("one more", 500, 0.0)
    assert limiter.grant(A, 1, ENTRIES, 1.0)[0] == 50 + 5 + 8
    limiter.wants(3, 6, 1.0)  # one that is known goes on
    assert limiter.grant(A, 1, ENTRIES, 1.0)[0] == 50 + 6 + 8
    limiter.wants(3, 0, 1.0)
    limiter.wants("one more", 500, 1.0)
    assert limiter.grant(A, 1, ENTRIES, 1.0 + STARVING_TIMEOUT)[0] == 50 + 500 + 8


def test_draws_before_the_band_and_of_strangers_count_but_move_nothing():
    limiter = made(50.0, min_size=10)
    limiter.drew(30)
    assert (limiter.stats(0, 1.5).drawn, limiter.stats(0, 1.5).surplus, limiter.stats(0, 1.5).waited) == (30, 0.0, 1.5)
    assert limiter.why_not_draw(8, 10, 0.0) == ""
    limiter.drew(8, has_band=False)
    limiter.drew(5)
    limiter.drew(-1)
    assert (limiter.stats(10, 0.0).drawn, limiter.stats(10, 0.0).surplus) == (42, -4.0)


def test_another_run_forgets_clients_grants_and_what_all_servers_said():
    limiter = made()
    limiter.told(ClusterSurplus(-20.0, 0, 0, 7, 0.5, 1.0, 50.0))
    assert limiter.grant(A, 1, 0, 0.0)[0] == 35 and limiter.stats(0, 0.0).entries == 7
    limiter.reset()
    assert not limiter.standing().is_told and limiter.stats(0, 0.0).entries == 0
    assert limiter.grant(B, 1, 0, 0.0)[0] == 50


def test_a_reader_with_other_parameters_is_not_believed():
    limiter = made()
    assert not limiter.told(ClusterSurplus(9.0, 0, 0, 0, 1.0, 2.0, 50.0))
    assert not limiter.told(ClusterSurplus(9.0, 0, 0, 0, 1.0, 1.0, 51.0))
    assert limiter.standing().surplus == 0.0
    limiter.drew(3)
    limiter.reported(A, 0, 1, 0, 0.0)
    limiter.reported(A, 10, 2, 0, 0.0)
    assert limiter.told(ClusterSurplus(9.0, 4, 1, 0, 1.0, 1.0, 50.0))
    assert limiter.standing().surplus == 9.0 + (10 - 4) - (3 - 1)


def test_a_band_that_has_begun_elsewhere_has_begun_here():
    limiter = made(50.0, min_size=10)
    assert limiter.told(ClusterSurplus(0.0, 0, 0, 0, 1.0, 1.0, 50.0))
    limiter.drew(5)
    assert limiter.standing().surplus == -5.0


def test_a_full_band_says_why_inserts_wait_until_something_is_drawn():
    limiter = made(50.0, min_size=20)
    limiter.reported(A, 0, 1, 20, 0.0)
    assert limiter.why_not_draw(1, 20, 0.0) == ""
    limiter.reported(A, 50, 2, 20, 0.0)
    assert limiter.stats(20, 0.0).inserts_wait.startswith("waits until 1 more samples")
    assert limiter.stats(19, 0.0).inserts_wait == "", "too few are there"
    limiter.drew(1)
    assert limiter.stats(20, 0.0).inserts_wait == ""
    assert limiter.stats(20, 0.0).draws_wait == ""


def test_sizes_that_can_never_be_met_are_refused():
    check_size(Parameters(min_size=10), 10)
    check_size(Parameters(min_size=10), 0)  # not known
    with pytest.raises(ValueError, match="min_size must be at most the capacity, 9 entries"):
        check_size(Parameters(min_size=10), 9)
    check_batch(Parameters(), 10**9)
    with pytest.raises(ValueError, match="batch_size must be at most 99"):
        check_batch(made(50.0).parameters, 100)


def test_a_draw_says_how_many_entries_it_waits_for():
    parameters = made(20.0, 2.0).parameters
    assert why_not_draw(parameters, 20, 0, 0.0) == ""
    assert why_not_draw(parameters, 25, 0, 0.0).startswith("waits for 3 more entries: drawing is")


def test_a_limiter_that_goes_on_grants_what_the_former_one_would_have():
    """What a client was granted stays its own until it says HELLO again, leaves, or says nothing for long."""
    former = made()
    former.met(A, 0, 1)
    former.met(B, 0, 1)
    assert former.grant(A, 2, ENTRIES, 0.0)[0] == 25
    former.reported(A, 10, 2, ENTRIES, 0.0)

    def heir():
        limiter = made()
        limiter.go_on_from(former.state())
        assert limiter.state() == former.state()
        return limiter

    assert heir().grant(B, 1, ENTRIES, 1.0) == former.grant(B, 1, ENTRIES, 1.0) == (25, "")
    again, late = heir(), heir()
    again.met(A, 10, 3)
    assert again.grant(B, 1, ENTRIES, 1.0)[0] == 40
    assert late.grant(B, 1, ENTRIES, 1.0)[0] == 25
    assert late.grant(B, 1, ENTRIES, 1.0 + UNHEARD_TIMEOUT)[0] == 40
