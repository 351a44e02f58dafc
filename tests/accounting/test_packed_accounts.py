"""Accounts packed into a few bytes and back: nothing changes on the way, and damage is an error and never an account."""

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memoire.accounting.account import FEEDBACK_OUTCOMES, Account, FeedbackCounts, FoldedSums, counts_of
from memoire.accounting.merge import GONE, key_of, merge, row_of, rows_of
from memoire.accounting.packing import AccountPacker, MemoryAccounts, NumberedTexts, StoredAccounts
from memoire.wire import _bytes
from memoire.wire.frames import name_hash
from memoire.wire.messages import Update
from memoire.wire.rows import ACCOUNT, unpack_accounts

HOME = name_hash("home")
CLIENTS = [bytes([n]) * 16 for n in range(1, 6)]
counts = st.integers(0, 2**53 - 1) | st.integers(0, 200)
moments = st.integers(0, 2**41).map(lambda milliseconds: milliseconds / 1000.0)


@st.composite
def accounts(draw, client=CLIENTS[0]):
    """An account as a server may have one: what arrived is not more than what was pushed."""
    rejected = draw(st.dictionaries(st.sampled_from(["size", "schema", "run"]), st.integers(1, 10**6), max_size=3))
    accepted, lost, flying = (draw(st.integers(0, 10**9)) for _ in range(3))
    received = accepted + sum(rejected.values())
    report = Update(
        **{name: draw(counts) for name in ("episodes", "steps", "skipped", "generated_bytes", "applied", "stale")},
        dropped_lines=draw(counts),
        caches=received + lost + flying,
        cache_bytes=10 * (received + lost + flying),
        leaving=draw(st.booleans()),
    )
    feedback = draw(st.lists(st.integers(0, 2**50), min_size=5, max_size=5))
    return Account(
        client=client,
        first_seen=draw(moments),
        last_seen=draw(moments),
        since=draw(st.integers(0, 2**63 - 1)),
        report=report,
        sequence=draw(st.integers(-1, 2**53)),
        lines_through=draw(counts),
        ended_through=draw(counts),
        returns_count=draw(counts),
        returns_sum=draw(st.floats(-1e300, 1e300)),
        received_caches=received,
        received_bytes=10 * received,
        seen_caches=received + lost,
        seen_bytes=10 * (received + lost),
        accepted_caches=accepted,
        accepted_bytes=10 * accepted,
        accepted_samples=draw(counts),
        rejected=rejected,
        lost_feedback=feedback[4],
        given_feedback=sum(feedback),
        **{f"{name}_feedback": count for name, count in zip(FEEDBACK_OUTCOMES[1:], feedback, strict=False)},
        label=draw(st.integers(0, 2**32 - 1)),
        table=draw(st.integers(0, 2**32 - 1)),
        owner=draw(st.sampled_from(["", "actor/me", "actor/a.b-c d"])),
    )


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 300), max_size=64), st.binary(max_size=5))
@example([127, 128, 2**14 - 1, 2**14, 2**63, 2**64 - 1], b"")  # the ends of what so many bytes hold
def test_counts_come_back_as_they_were_whatever_follows_them(numbers, rest):
    packed = _bytes.pack_counts(numbers)
    assert _bytes.unpack_counts(packed + rest, len(numbers)) == (numbers, len(packed))
    assert len(packed) <= 8 + 10 * len(numbers)


@given(st.binary(max_size=40), st.integers(0, 64))
@example(b"\x01\x00", 1)  # a count that is said to be above 0, and is not
@example(b"\x01" + b"\xff" * 9 + b"\x02", 1)  # of 65 bits
def test_bytes_that_nobody_packed_are_refused_or_pack_to_the_same(packed, number):
    try:
        numbers, used = _bytes.unpack_counts(packed, number)
    except ValueError as error:
        assert "cut short" in str(error)
    else:
        assert _bytes.unpack_counts(_bytes.pack_counts(numbers), number)[0] == numbers and used <= len(packed)


@pytest.mark.parametrize("number", [-1, 65])
def test_more_counts_than_there_is_room_for_are_refused(number):
    with pytest.raises(ValueError, match="at most 64"):
        _bytes.unpack_counts(b"", number)
    with pytest.raises(ValueError, match="at most 64"):
        _bytes.pack_counts([0] * 65)


@pytest.mark.slow
@given(accounts())
@settings(max_examples=200)
def test_an_account_comes_back_as_it_was(account):
    packing = AccountPacker(HOME, NumberedTexts())
    found = packing.unpack(account.client, packing.pack(account))
    assert row_of(found, HOME)[1:] == row_of(account, HOME)[1:]
    if account.report.leaving:  # nothing is on the way any more
        account.seen_caches, account.seen_bytes = account.pushed_caches, account.pushed_bytes
    assert found == account


@given(accounts())
def test_feedback_that_waits_in_memory_is_lost_with_it(account):
    account.given_feedback += 7 - account.lost_feedback
    account.lost_feedback, account.waiting_feedback = 3, 4
    packing = AccountPacker(HOME, NumberedTexts())
    found = packing.unpack(account.client, packing.pack(account))
    assert found.lost_feedback == 7 and found.feedback == dataclasses.replace(account.feedback, lost=7, waiting=0)
    sums = FoldedSums()
    packing.add_up(sums, [packing.pack(account)] * 2)
    assert FeedbackCounts(**sums.feedback) == found.feedback + found.feedback


@given(accounts(), st.data())
def test_a_body_that_was_changed_is_an_error_or_another_account_and_nothing_else(account, data):
    packing = AccountPacker(HOME, NumberedTexts(["5 0 actor/me", "6 7 "]))
    body = bytearray(packing.pack(account))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = packing.unpack(account.client, bytes(body[: data.draw(st.integers(0, len(body)))]))
    except ValueError:
        return
    assert unpack_accounts(rows_of([row_of(found, HOME)]).tobytes()) is not None


@pytest.mark.slow
@given(st.lists(accounts(), min_size=1, max_size=5))
def test_what_accounts_add_up_to_is_the_same_packed_or_not(found):
    packing, packed, plain = AccountPacker(HOME, NumberedTexts()), FoldedSums(), FoldedSums()
    packing.add_up(packed, [packing.pack(account) for account in found])
    for account in found:
        plain.add(account)
    assert +packed.counts == +plain.counts and packed.returns.value == plain.returns.value
    assert {name: +sums for name, sums in packed.tables.items()} == {n: +sums for n, sums in plain.tables.items()}
    for account in found:
        plain.add(account, -1)
    assert not +plain.counts and plain.returns.value == 0.0
    assert packed.counts["clients"] == sum(counts_of(account)["clients"] for account in found)


@pytest.mark.parametrize(("flags", "lost"), [(0, 0), (GONE, 5)])
def test_what_a_former_version_kept_of_a_client_that_is_gone_leaves_nothing_on_the_way(flags, lost):
    account = Account(CLIENTS[0], 1.0, 2.0, report=Update(caches=9, cache_bytes=900), since=3)
    account.received_caches, account.received_bytes, account.accepted_caches = 4, 400, 4
    kept = rows_of([(*row_of(account, HOME)[:-1], flags)])  # nothing was lost, it says
    packing = AccountPacker(HOME, NumberedTexts())
    rows = packing.rows([packing.pack_row(kept[0])])
    assert rows[["pushed_caches", "received_caches", "lost_caches", "lost_bytes"]].tolist() == [
        (9, 4, lost, 100 * lost)
    ]


def elsewhere(client, home, since=3, **facts):
    """A row of another server."""
    row = np.zeros(1, ACCOUNT)
    row["client"], row["home"], row["since"] = np.frombuffer(client, "<u8"), home, since
    for name, value in facts.items():
        row[name] = value
    return row


class Reader:
    """What is on disk of accounts that a dictionary holds."""

    def __init__(self, packed):
        self.packed = packed

    def body(self, key):
        return self.packed.get(key)

    def after(self, key, most, before=b"\xff" * 32):
        return [(each, self.packed[each]) for each in sorted(self.packed) if key <= each < before][:most]

    def reading(self):
        return nullcontext()


@given(
    st.lists(st.tuples(st.sampled_from(CLIENTS), st.integers(0, 4), st.integers(0, 99)), max_size=30),
    st.integers(1, 7),
)
def test_pages_of_kept_accounts_have_each_once_in_order(steps, most):
    kept, expected = MemoryAccounts(HOME), []
    for client, home, episodes in steps:
        if home == 0:
            account = Account(client, 1.0, 2.0, report=Update(episodes=episodes))
            kept.keep(account)
            expected = [row for row in expected if key_of(row[0]) != key_of(rows_of([row_of(account, HOME)])[0])]
            expected.append(rows_of([row_of(account, HOME)]))
        else:
            kept.inherit(elsewhere(client, home, episodes=episodes, returns_sum=0.5, last_seen=1.25))
            expected.append(elsewhere(client, home, episodes=episodes, returns_sum=0.5, last_seen=1.25))
    after, pages = b"", []
    while len(rows := kept.rows(after, most)):
        pages.append(rows)
        after = key_of(rows[-1])
        assert len(rows) <= most
    assert np.concatenate([merge(), *pages]).tobytes() == merge(*expected).tobytes()
    assert kept.has_others == any(home for _, home, _ in steps)


def test_what_another_server_brings_is_there_before_it_is_on_disk_and_while_it_is_saved():
    packing = AccountPacker(HOME, NumberedTexts())
    stored = StoredAccounts(packing, Reader({}))
    stored.inherit(elsewhere(CLIENTS[0], 7, episodes=3, lines_through=5))
    stored.taken()
    stored.inherit(elsewhere(CLIENTS[0], 8, episodes=2, ended_through=4))
    assert stored.numbers_elsewhere(CLIENTS[0]) == (5, 4) and stored.numbers_elsewhere(CLIENTS[1]) == (0, 0)
    assert stored.rows(b"", 10)["episodes"].tolist() == [3, 2] and stored.has_others
    stored.saved()
    assert stored.rows(b"", 10)["episodes"].tolist() == [2]
