"""Tests of damaged, restored and changed state folders: exact or refused, never reset without a request."""

import logging
import re
import shutil
import sqlite3
import struct

import pytest

import mutations
from memoire.accounting.runs import LineFilter
from memoire.disk.state_folder import Store
from memoire.errors import StateCorrupt, StateForeign
from memoire.models.model import make
from statekit import (
    CLIENTS,
    RUN,
    Keeper,
    account,
    contents,
    folder_in_memory,
    keeper_of_all,
    lines_through,
    own_accounts,
)


@pytest.fixture(scope="module")
def in_memory():
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture(scope="module")
def folders(in_memory):
    paths = mutations.make_folders(in_memory)
    assert (paths[0] / "state.db-wal").stat().st_size > 100_000
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_damaged_folder_is_exact_or_refused(folders, in_memory, seed):
    killed, older, closed, truth = folders
    verdicts = mutations.run(killed, older, truth, in_memory, 110, seed)
    verdicts += mutations.run(closed, older, truth, in_memory, 55, seed)
    assert sum(verdicts.values()) == 165
    assert verdicts["refused"] > 40 and verdicts["exact"] > 20, verdicts


def rows_of(folder, *commands):
    """Execute SQLite commands, each a text or a text with its values; return the rows of the last one."""
    connection = sqlite3.connect(folder / "state.db")
    with connection:
        for command in commands:
            rows = connection.execute(*(command if isinstance(command, tuple) else (command,))).fetchall()
    connection.close()
    return rows


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("DELETE FROM facts WHERE kind = 4 AND key = (SELECT max(key) FROM facts WHERE kind = 4)", "rows are missing"),
        ("DELETE FROM facts WHERE kind = 0", "rows are missing"),
        ("DELETE FROM lines WHERE id = (SELECT max(id) FROM lines)", "rows are missing"),
        ("UPDATE facts SET body = x'00' WHERE kind = 4", "wrong checksum"),
        ("UPDATE facts SET key = x'000000ff' || substr(key, 5) WHERE kind = 3", "SQLite says"),
        ("DELETE FROM accounts WHERE key = (SELECT max(key) FROM accounts)", "rows are missing"),
        ("UPDATE facts SET key = x'000000ff' WHERE kind = 4 AND key = x'00000001'", "a word is missing"),
        ("UPDATE accounts SET key = x'0f' || key WHERE key = (SELECT max(key) FROM accounts)", "rows are missing"),
        ("DROP TABLE lines", "the description of its tables has changed"),
    ],
)
def test_somebody_elses_change_of_a_row_is_found(folders, tmp_path, command, words):
    shutil.copytree(folders[2], tmp_path / "state")
    rows_of(tmp_path / "state", command)
    with pytest.raises(StateCorrupt, match=f"{words}.*left as it is.*state.db.backup-1.*empty folder"):
        Store(tmp_path / "state", "home")


def test_a_log_of_sqlite_that_was_removed_is_missed(folders, tmp_path):
    shutil.copytree(folders[0], tmp_path / "state")
    (tmp_path / "state" / "state.db-wal").unlink()
    with pytest.raises(StateCorrupt, match=r"its last \d+ transactions are missing"):
        Store(tmp_path / "state", "home")


def test_a_database_that_lacks_its_newest_transaction_is_refused(tmp_path):
    with Keeper(tmp_path / "state") as keeper:
        keeper.save(accounts=[account(CLIENTS[0], 1)])
        shutil.copytree(tmp_path / "state", tmp_path / "former")
        keeper.save(accounts=[account(CLIENTS[0], 2)])
        shutil.copy(tmp_path / "state" / "committed", tmp_path / "former")
    with pytest.raises(StateCorrupt, match="its last 1 transactions are missing"):
        Store(tmp_path / "former", "home")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("PRAGMA application_id = 7", "database of another program"),
        *[
            (
                f"PRAGMA user_version = {form}",
                f"was written in form {form}, this version of memoire reads and writes form 5",
            )
            for form in (0, 1, 2, 3, 4, 9)
        ],
    ],
)
def test_a_strangers_database_is_left_alone(folders, tmp_path, change, words):
    shutil.copytree(folders[2], tmp_path / "state")
    rows_of(tmp_path / "state", change)
    before = (tmp_path / "state" / "state.db").read_bytes()
    with pytest.raises(StateForeign, match=words):
        Store(tmp_path / "state", "home")
    assert (tmp_path / "state" / "state.db").read_bytes() == before


def put_back(folder, which=1):
    """Put a backup in place of the database, as the error's text advises."""
    (folder / "state.db").rename(folder / "state.db.damaged")
    for name in ("state.db-wal", "state.db-shm"):
        (folder / name).unlink(missing_ok=True)
    shutil.copy(folder / f"state.db.backup-{which}", folder / "state.db")


def test_a_backup_that_was_put_back_is_healed_by_clients_that_still_run(tmp_path):
    with Keeper(tmp_path) as keeper:
        keeper.save(accounts=[account(CLIENTS[0], 5), account(CLIENTS[1], 7)], lines=[(CLIENTS[0], 1, "one")])
        keeper.store.back_up()
        keeper.save(accounts=[account(CLIENTS[0], 9)], lines=[(CLIENTS[0], 2, "two")])
        epoch = keeper.store.epoch
        shutil.copytree(tmp_path, tmp_path / "copy")
    state = tmp_path / "copy"
    put_back(state)
    with Keeper(state) as keeper:
        assert keeper.store.restored == 1 and keeper.store.complete_since == keeper.store.epoch > epoch
        since = keeper.store.complete_since  # changes after the backup are lost
        assert [one.report.episodes for one in own_accounts(keeper.store)] == [5, 7]
        assert lines_through(keeper.store) == {CLIENTS[0]: 1}
        keeper.save(accounts=[account(CLIENTS[0], 10)], lines=[(CLIENTS[0], 3, "three")])
        assert [one.report.episodes for one in own_accounts(keeper.store)] == [10, 7]
        assert [entry.line.text for entry in keeper.store.search(RUN)] == ["three"]
        restored = contents(keeper.store)
    with Store(state) as store:
        assert contents(store) == restored and (store.restored, store.complete_since) == (1, since)
    text = b"".join(path.read_bytes() for path in sorted((state / "log").iterdir()))
    assert [line.rpartition(b",")[2] for line in text.splitlines()] == [b"one", b"two", b"three"]


def test_a_log_of_sqlite_beside_a_backup_is_set_aside(folders, tmp_path):
    """The log belongs to the former database: SQLite would write its pages into the backup."""
    shutil.copytree(folders[0], tmp_path / "state")
    shutil.copy(tmp_path / "state" / "state.db.backup-1", tmp_path / "state" / "state.db")
    with Store(tmp_path / "state", "home") as store:
        assert store.restored == 1
        assert [one.report.episodes for one in own_accounts(store)] == [39] * 8
    assert (tmp_path / "state" / "state.db-wal.set-aside").exists()


def test_two_backups_are_kept_and_another_is_made_when_it_is_closed(tmp_path):
    with Keeper(tmp_path) as keeper:
        for n in (1, 2, 3):
            keeper.save(settings={"n": str(n)})
            keeper.store.back_up()
        keeper.save(settings={"n": "4"})
    assert sorted(path.name for path in tmp_path.glob("state.db*")) == [
        "state.db", "state.db.backup-1", "state.db.backup-2",
    ]  # fmt: skip
    for which, n in ((1, "4"), (2, "3")):
        folder = tmp_path / f"restored {which}"
        folder.mkdir()
        shutil.copy(tmp_path / f"state.db.backup-{which}", folder / "state.db")
        with Store(folder) as store:
            assert store.settings() == {"n": n}


def test_a_damaged_database_never_replaces_a_good_backup(tmp_path, caplog):
    with Keeper(tmp_path) as keeper:
        keeper.save(settings={"n": "1"})
        good = keeper.store.back_up().read_bytes()
        rows_of(tmp_path, "UPDATE facts SET body = x'00' WHERE kind = 2")
        with pytest.raises(StateCorrupt):
            keeper.store.back_up()
        with caplog.at_level(logging.ERROR):
            keeper.store._backups.attempt()
        assert "no backup was made, the former ones stay" in caplog.text
        assert "wrong checksum" in keeper.store.problem
    assert (tmp_path / "state.db.backup-1").read_bytes() == good


COLUMNS = {
    "lines": ["id", "client", "number", "received", "label", "said", "text", "sum"],
    "accounts": ["part", "key", "body", "sum"],
}

DAMAGE = (
    "state.db is damaged: .*(wrong checksum|rows are missing|SQLite says|not in PRIMARY KEY order|an impossible value)"
)


def as_a_ledger(run):
    """Return a function that reads accounts as a server does: first all sums, then single accounts."""

    def read(store):
        kept = store.accounts(run)
        return kept.sums().counts, [kept.find(client) for client in CLIENTS]

    return read


READS = [
    as_a_ledger(RUN),
    as_a_ledger("former"),
    lambda store: own_accounts(store, RUN),
    lambda store: own_accounts(store, "former"),
    lambda store: store.line_count(RUN),
    lambda store: store.search(RUN),
    lambda store: store.search(RUN, most=2, newest_first=True),
    lambda store: store.search(RUN, LineFilter(after=1, before=4)),
    lambda store: store.search(RUN, LineFilter(text="line")),
    lambda store: store.search(RUN, LineFilter(client=CLIENTS[0])),
    lambda store: store.search(RUN, LineFilter(label=CLIENTS[0][0])),
    lambda store: store.search(RUN, LineFilter(since=1.0)),
    lambda store: store.search(RUN, LineFilter(until=4.0)),
]


def all_reads(folder):
    """Return each read's result, or the text of its error for damage."""

    def read_by(read):
        try:
            return read(store)
        except StateCorrupt as error:
            return str(error)

    try:
        with Store(folder) as store:
            return [read_by(read) for read in READS]
    except StateCorrupt as error:
        return [str(error)] * len(READS)


def flipped(value, bit):
    if isinstance(value, int):
        return value ^ 1 << bit
    data = bytearray(struct.pack("<d", value) if isinstance(value, float) else value)
    data[bit // 8] ^= 1 << bit % 8
    return struct.unpack("<d", data)[0] if isinstance(value, float) else bytes(data)


def bits_of(value):
    return 63 if isinstance(value, int) else 64 if isinstance(value, float) else 8 * len(value)


@pytest.mark.parametrize("stride", [61, pytest.param(13, marks=pytest.mark.slow)])
@pytest.mark.parametrize("table", COLUMNS)
def test_a_flipped_bit_of_a_line_or_an_account_is_refused_and_no_number_is_wrong(in_memory, tmp_path, table, stride):
    with Keeper(tmp_path, run="former") as keeper:
        keeper.save(accounts=[account(client, 3) for client in CLIENTS[:3]])
    with Keeper(tmp_path) as keeper:
        keeper.save(
            accounts=[account(client, n, n) for n, client in enumerate(CLIENTS[:4], 5)],
            lines=[(client, 1, f"line of {client[0]}") for client in CLIENTS[:4]],
        )
    truth, tried = all_reads(tmp_path), 0
    copy = in_memory / f"{table}-{stride}"
    shutil.copytree(tmp_path, copy)
    for row in range(2):
        for column in COLUMNS[table]:
            as_bytes = f"CAST({column} AS BLOB)" if column == "text" else column
            (value,) = rows_of(tmp_path, f"SELECT {as_bytes} FROM {table} LIMIT 1 OFFSET {row}")[0]
            for bit in range(row, bits_of(value), stride):
                shutil.rmtree(copy)
                shutil.copytree(tmp_path, copy)
                names = ("id",) if table == "lines" else ("part", "key")
                where = " AND ".join(f"{name} = (SELECT {name} FROM {table} LIMIT 1 OFFSET {row})" for name in names)
                change = "CAST(? AS TEXT)" if column == "text" else "?"
                try:
                    rows_of(copy, (f"UPDATE {table} SET {column} = {change} WHERE {where}", [flipped(value, bit)]))
                except sqlite3.IntegrityError:
                    continue  # SQLite refuses a second row of one key
                wrong = [result for result, right in zip(all_reads(copy), truth, strict=True) if result != right]
                assert wrong and all(re.search(DAMAGE, str(result)) for result in wrong), (column, bit, wrong)
                tried += 1
    shutil.rmtree(copy)
    shutil.copytree(tmp_path, copy)
    assert all_reads(copy) == truth and tried > 10


def texts(folder):
    return {path.name: path.read_bytes() for path in (folder / "log").iterdir()}


@pytest.mark.parametrize("how", ["rename", "truncate", "remove", "edit", "append"])
def test_somebody_who_meddles_with_the_text_loses_nothing_of_the_log(tmp_path, how):
    with Keeper(tmp_path) as keeper:
        keeper.save(lines=[(CLIENTS[0], n, f"line {n}") for n in range(1, 6)])
        (path,) = (tmp_path / "log").iterdir()
        text = path.read_bytes()
        if how == "rename":
            path.rename(path.with_suffix(".log.1"))
        elif how == "remove":
            path.unlink()
        else:
            path.write_bytes({"truncate": b"", "edit": text[:-3] + b"X\n", "append": text + b"mine\n"}[how])
        left = texts(tmp_path)
        keeper.save(lines=[(CLIENTS[0], 6, "after")])
        keeper.save(lines=[(CLIENTS[0], 7, "more")])
        entries = keeper.store.search(RUN)
        assert [entry.line.number for entry in entries] == list(range(1, 8))
        now = texts(tmp_path)
        assert {name: now[name] for name in left} == left, "foreign changes stay"
        (fresh,) = set(now) - set(left)
        assert [line.rpartition(b",")[2] for line in now[fresh].splitlines()] == [b"after", b"more"]
    with Keeper(tmp_path) as keeper:
        keeper.save(lines=[(CLIENTS[0], 8, "again")])
    assert texts(tmp_path)[fresh].endswith(b"again\n")


@pytest.mark.parametrize("left", [0, 1, 57, 200])
def test_text_that_a_crash_cut_short_is_completed(folders, tmp_path, left):
    state = tmp_path / "state"
    shutil.copytree(folders[0], state)
    (path,) = (state / "log").iterdir()
    text = path.read_bytes()
    path.write_bytes(text[:left] + bytes(100 if left == 57 else 0))
    Store(state, "home").close()
    assert path.read_bytes() == text


def test_a_model_that_is_not_what_was_published_is_refused_and_a_missing_one_waits_for_the_next(tmp_path):
    with keeper_of_all(tmp_path) as keeper:
        keeper.save(models=[make("policy", b"\x05" * 100_000, 8)])
    (path,) = (tmp_path / "models").iterdir()
    path.write_bytes(b"\x05" * 99_999 + b"\x06")
    with (
        Store(tmp_path) as store,
        pytest.raises(StateCorrupt, match="'policy' version 8 has another XXH3.*remove the"),
    ):
        store.models(RUN)
    path.unlink()
    with Keeper(tmp_path) as keeper:
        assert [model.topic for model in keeper.store.models(RUN)] == ["note"]
        assert keeper.store.versions() == {"policy": 8, "note": 3}
        keeper.save(models=[make("policy", b"\x07" * 100_000, 9)])
    with Store(tmp_path) as store:
        assert [model.version for model in store.models(RUN)] == [3, 9]
