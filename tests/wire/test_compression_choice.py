"""Frames are packed while that brings samples sooner to whoever waits, and only then."""

import pytest

from memoire.wire.compression import TRIAL, WHILE, CompressionChoice

SAMPLES = 32


def send(choice, messages, *, link, pack=0.0, ratio=1.0):
    """Messages of a caller that waits for the link alone: seconds for a plain message, to pack one, and what is left."""
    packed = 0
    for _ in range(messages):
        packed += choice.packs
        if choice.packs:
            choice.spend(pack)
        waited = link * (ratio if choice.packs else 1.0)
        choice.spend(waited, waited)
        choice.carried(SAMPLES)
    return packed


def test_a_caller_that_never_waits_sends_plain_and_tries_nothing():
    choice = CompressionChoice()
    for _ in range(3 * WHILE):
        choice.spend(0.01)
        choice.carried(SAMPLES)
        assert not choice.packs


def test_a_slow_link_and_frames_that_shrink_are_packed_from_the_first_trial_on():
    choice = CompressionChoice()
    assert send(choice, TRIAL, link=1.0) == 0 and choice.packs
    assert send(choice, WHILE, link=1.0, pack=0.05, ratio=0.1) == WHILE


def test_a_link_that_becomes_slow_later_is_noticed_at_once():
    choice = CompressionChoice()
    for _ in range(3 * WHILE + 1):
        choice.spend(0.01)
        choice.carried(SAMPLES)
    send(choice, 2 * TRIAL, link=1.0)
    assert choice.packs


@pytest.mark.parametrize(("pack", "ratio"), [(0.95, 0.1), (0.0, 1.0), (0.05, 0.9)])
def test_what_gains_too_little_stays_plain_until_the_next_trial(pack, ratio):
    choice = CompressionChoice()
    packed = send(choice, 3 * TRIAL + WHILE, link=1.0, pack=pack, ratio=ratio)
    assert packed == 2 * TRIAL and not choice.packs
    assert send(choice, 3 * TRIAL, link=1.0, pack=pack, ratio=ratio) == 2 * TRIAL, "it is tried again"


def test_a_link_that_becomes_fast_is_found_by_the_next_trial():
    choice = CompressionChoice()
    send(choice, 3 * TRIAL, link=1.0, pack=0.05, ratio=0.1)
    assert choice.packs
    send(choice, WHILE + TRIAL, link=0.0001, pack=0.05, ratio=0.1)
    assert not choice.packs
    send(choice, 5 * TRIAL, link=0.0001, pack=0.05, ratio=0.1)
    assert not choice.packs


def test_what_the_former_way_left_on_the_link_is_not_counted():
    choice = CompressionChoice()
    send(choice, TRIAL, link=1.0)
    send(choice, TRIAL, link=10.0)  # the window is full of plain messages: the first packed ones wait for them
    send(choice, TRIAL, link=0.1)
    assert choice.packs
