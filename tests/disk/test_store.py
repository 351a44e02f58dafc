"""A server's files: what was acknowledged is there again, whatever ended the process and whatever happened to the files."""

import gc
import os
import socket
from itertools import pairwise

import numpy as np
import pytest

from memoire.accounting.runs import RunFacts
from memoire.disk.records import META
from memoire.disk.state_file import StateFile
from memoire.disk.state_folder import Store
from memoire.errors import Closed, StateCorrupt, StateForeign, StateLocked, StateUnusable
from memoire.limits import Limits
from memoire.models.model import make
from memoire.wire.rows import ACCOUNT
from netkit import until
from statekit import (
    CLIENTS,
    RUN,
    Keeper,
    account,
    contents,
    fork,
    inherited,
    keeper_of_all,
    lines_through,
    own_accounts,
    rows,
    text_of_log,
    transactions,
)

# ---------------------------------------------------------------------------------------------- what comes back


def test_everything_that_was_acknowledged_is_there_after_a_restart(tmp_path):
    with keeper_of_all(tmp_path / "state") as keeper:
        before = contents(keeper.store)
        epoch = keeper.store.epoch
    with Store(tmp_path / "state") as store:
        assert contents(store) == before
        assert store.name == "home" and store.epoch > epoch
        assert store.versions() == {"policy": 7, "note": 3}
        assert store.restored == 0 and store.is_healthy and store.trouble == ""
    assert before["accounts"][3].rejected == {"schema": 3} and before["accounts"][3].report.steps == 30
    assert [model.value for model in before["models"]] == ["hello", b"\x01" * 100_000]
    assert before["count"] == 24
    assert [one.lines_through for one in before["accounts"]] == [3] * 8
    assert before["inherited"] == rows(5, 6)


def test_a_folder_knows_since_when_it_has_forgotten_nothing(tmp_path):
    lives = []
    for _ in range(3):
        with Store(tmp_path) as store:
            lives.append((store.epoch, store.since))
    assert [since for _, since in lives] == [lives[0][0]] * 3


def test_a_life_of_a_program_that_does_not_know_since_when_is_the_one_since_when(tmp_path):
    with Store(tmp_path) as store:
        epoch = store.epoch + 5
    file = StateFile(tmp_path / "state.db", None)
    file.go_live(file.seal.generation + 1)
    file.save([(META, b"epoch", epoch.to_bytes(8, "big"))], [])
    file.close()
    for _ in range(2):
        with Store(tmp_path) as store:
            assert store.epoch > epoch == store.since


def test_epochs_grow_whatever_the_clock_does(tmp_path):
    """Back after a wrong time was set, standing still, and far on after its host slept."""
    clocks, epochs = [2000.0, 1000.0, 1000.0, 1999.0, 900_000.0, 0.0], []
    for now in clocks:
        with Store(tmp_path / "state", clock=lambda now=now: now) as store:
            epochs.append(store.epoch)
    assert all(former < epoch for former, epoch in pairwise(epochs))
    # No life is before its clock: the epochs of another folder in the place of a lost one go on above its last.
    assert all(epoch >= now * 1e9 for epoch, now in zip(epochs, clocks, strict=True))


def test_what_changes_replaces_what_was_there_and_nothing_else(tmp_path):
    with keeper_of_all(tmp_path) as keeper:
        keeper.save(
            accounts=[account(CLIENTS[2], 100, 1000)],
            inherited=[rows(6, episodes=9)],
            models=[make("note", "bye", 4)],
            runs=[RunFacts(RUN, finished=True, began=1.0)],
        )
        found = contents(keeper.store)
    with Store(tmp_path) as store:
        assert contents(store) == found
    assert [one.report.episodes for one in found["accounts"]] == [0, 1, 100, 3, 4, 5, 6, 7]
    assert np.frombuffer(found["inherited"], ACCOUNT)["episodes"].tolist() == [1, 9]
    assert [(model.topic, model.version) for model in found["models"]] == [("note", 4), ("policy", 7)]
    assert found["runs"] == [RunFacts(RUN, finished=True, began=1.0)]


def test_runs_are_kept_apart_and_in_their_order(tmp_path):
    with keeper_of_all(tmp_path) as keeper:
        before = contents(keeper.store)
        keeper.count, keeper.known = 0, {}
        keeper.save(
            runs=[RunFacts(RUN, began=1.0, ended=2.0), RunFacts("a later one", began=2.0)],
            run="a later one",
            accounts=[account(CLIENTS[0], 1)],
            lines=[(CLIENTS[0], 1, "new")],
        )
        assert [facts.name for facts in keeper.store.runs()] == [RUN, "a later one"]
        assert keeper.store.line_count("a later one") == 1 and len(own_accounts(keeper.store, "a later one")) == 1
        assert keeper.store.models("a later one") == [] and inherited(keeper.store, "a later one") == b""
        assert {**contents(keeper.store), "runs": before["runs"]} == before
        assert own_accounts(keeper.store, "nobody") == [] == keeper.store.search("nobody")


def test_the_log_file_has_the_documented_lines(tmp_path):
    with Keeper(tmp_path) as keeper:
        keeper.save(lines=[(CLIENTS[0], 1, "two\nlines"), (CLIENTS[1], 1, "and, a comma")])
    assert text_of_log(tmp_path) == (
        b"1970-01-01T00:00:01.000000+00:00,00000001,two\\nlines\n"
        b"1970-01-01T00:00:02.000000+00:00,00000002,and, a comma\n"
    )
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["ant_7.00000001.log"]


def test_only_what_is_on_disk_is_acknowledged(tmp_path):
    reached = []
    with Keeper(tmp_path, at=reached.append) as keeper:
        reached.clear()
        keeper.acknowledged = Watched(reached)
        keeper.save(accounts=[account(CLIENTS[0], 1)], lines=[(CLIENTS[0], 1, "x")])
    assert reached[:6] == ["before begin", "before commit", "after commit", "before text", "after text", "acknowledged"]


class Watched(list):
    def __init__(self, reached):
        super().__init__()
        self.reached = reached

    def extend(self, tickets):
        super().extend(tickets)
        self.reached.append("acknowledged")


def test_what_gathers_while_a_group_is_saved_is_the_next_group(tmp_path):
    with Keeper(tmp_path) as keeper:
        before = transactions(tmp_path)
        keeper.hold.clear()
        tickets = [keeper.post(accounts=[account(client, 1)]) for client in CLIENTS for _ in range(5)]
        keeper.hold.set()
        until(lambda: set(tickets) <= set(keeper.acknowledged))
        assert transactions(tmp_path) - before <= 2


def test_a_group_of_tickets_alone_is_acknowledged_without_touching_the_disk(tmp_path):
    with Keeper(tmp_path) as keeper:
        before = transactions(tmp_path)
        keeper.save()
        assert transactions(tmp_path) == before


def test_what_nobody_waits_for_is_saved_soon(tmp_path):
    with Keeper(tmp_path) as keeper:
        with keeper.lock:
            keeper.journal.touch(RUN, account(CLIENTS[0], 5))
        until(lambda: [one.report.episodes for one in own_accounts(keeper.store)] == [5])


# ------------------------------------------------------------------------------------------------ whose folder


def test_a_second_server_is_refused_and_told_by_whom(tmp_path):
    with Store(tmp_path, "a"):
        with pytest.raises(StateLocked) as caught:
            Store(tmp_path, "a")
        assert (caught.value.pid, caught.value.host) == (os.getpid(), socket.gethostname())
        assert "only one server may write it" in str(caught.value)
    Store(tmp_path, "a").close()


def test_the_folder_knows_its_servers_name(tmp_path):
    Store(tmp_path, default_name="first").close()
    with Store(tmp_path, default_name="second") as store:
        assert store.name == "first"
    with pytest.raises(StateForeign, match="is the state of server 'first', not of 'other'"):
        Store(tmp_path, "other")


def test_a_closed_store_says_so(tmp_path):
    store = Store(tmp_path, "a")
    assert store.close() and store.close()
    with pytest.raises(Closed):
        store.settings()
    with pytest.raises(Closed):
        store.search(RUN)
    assert not store.is_healthy


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateUnusable, match="not a folder"):
        Store(tmp_path / "file", "a")
    with pytest.raises(StateUnusable, match="Make its parent folder first"):
        Store(tmp_path / "nowhere" / "state", "a")
    with pytest.raises(StateUnusable):
        Store(tmp_path / "file" / "state", "a")


def test_a_missing_database_beside_other_files_is_no_empty_folder(tmp_path):
    keeper_of_all(tmp_path).close()
    (tmp_path / "state.db").unlink()
    with pytest.raises(StateCorrupt, match=r"it is missing, while .*state.db.backup-1 are there.*Put a backup back"):
        Store(tmp_path, "home")


def test_old_text_goes_when_there_is_too_much_and_leaves_the_search_with_it(tmp_path):
    with Keeper(tmp_path, limits=Limits(log_bytes=16_000)) as keeper:
        for n in range(1, 41):
            keeper.save(lines=[(CLIENTS[0], n, f"{n:03d} " + "x" * 950)])

        def is_small():
            try:
                return sum(path.stat().st_size for path in (tmp_path / "log").iterdir()) <= 17_100
            except FileNotFoundError:  # it has gone in this moment
                return False

        until(is_small)
        found = keeper.store.search(RUN, most=100)
        assert keeper.store.line_count(RUN) == 40 and lines_through(keeper.store) == {CLIENTS[0]: 40}
    assert [entry.line.number for entry in found] == list(range(41 - len(found), 41)) and 10 <= len(found) <= 17
    assert [line.split(b",")[2][:3] for line in text_of_log(tmp_path).splitlines()] == [
        b"%03d" % entry.line.number for entry in found
    ]


def test_backups_are_made_now_and_then_while_something_changes(tmp_path):
    with Keeper(tmp_path, limits=Limits(backup_every=0.01)) as keeper:
        keeper.save(settings={"n": "1"})
        until(lambda: (tmp_path / "state.db.backup-1").exists())
        keeper.save(settings={"n": "2"})
        until(lambda: (tmp_path / "state.db.backup-2").exists())


def test_a_closed_folder_is_free_though_a_child_has_not_yet_closed_what_it_was_forked_with(tmp_path):
    keeper = keeper_of_all(tmp_path)
    still_open = os.dup(keeper.store._opened._lock.opened)
    with pytest.raises(StateLocked):
        Store(tmp_path)
    keeper.close()
    with Store(tmp_path) as store:
        assert store.settings()
    os.close(still_open)


def test_a_forked_child_neither_holds_the_folder_nor_writes_it(tmp_path):
    """What SQLite has open must not be closed by a child, and the child outlives its parent's store."""
    keeper = keeper_of_all(tmp_path)
    reading, writing = os.pipe()
    child = fork()
    if not child:
        os.close(writing)
        try:
            keeper.store.settings()
        except Closed:
            os.read(reading, 1)  # until the parent is done
            del keeper
            gc.collect()
            os._exit(7)
        os._exit(1)
    os.close(reading)
    keeper.save(settings={"n": "2"})
    keeper.close()
    with Store(tmp_path) as store:
        assert store.settings()["n"] == "2"
        os.close(writing)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert store.settings()["n"] == "2"
    with Store(tmp_path) as store:
        assert store.settings()["n"] == "2"
