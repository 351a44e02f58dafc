"""State folders with one rewritten row and correct checksums: StateError, or a server that goes on.

1 byte   number of a row in the database; the rest is its new content
"""

import functools
import json
import shutil
import sqlite3
import tempfile
from pathlib import Path

from memoire.disk import database, records
from memoire.disk.database import SUMS, RowsChecksum
from memoire.disk.state_folder import Store
from memoire.errors import ParameterError, StateError
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.server.dispatch import Dispatcher
from memoire.tables.caches.pool import Pool
from memoire.tables.table import Table, Tables
from mutations import quiet
from netkit import SCHEMA
from statekit import CLIENTS, contents, keeper_of_all

REACHED = {"opened", "refused"}
IN_PLACE = 0.5
ACCOUNTS = -1
"""Number in place of a kind, for rows of the accounts' own table."""
WORDS = (b"../../../../tmp/x", b"\xc0", b"\xdf" + b"\x7f" * 4)
_PLACE = Path("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108
_FOLDER = tempfile.TemporaryDirectory(prefix="memoire-fuzz-", dir=_PLACE)
TEMPLATE, FOLDER = Path(_FOLDER.name) / "template", Path(_FOLDER.name) / "state"


@functools.cache
def _template() -> list[tuple[int, bytes, bytes]]:
    """Return kind, key and body of every row of a folder with contents of every kind; made once."""
    keeper = keeper_of_all(TEMPLATE)
    whole = Parameters().to_wire()
    parameters = json.dumps({"given": whole, "now": whole, "version": 3})
    keeper.save(settings={"parameters": parameters, "run": "ant/7", "restored": "00ff"})
    keeper.close()
    connection = sqlite3.connect(TEMPLATE / "state.db")
    rows = connection.execute("SELECT kind, key, body FROM facts WHERE kind != ?", (records.SEAL,)).fetchall()
    rows += connection.execute("SELECT ?, key, body FROM accounts", (ACCOUNTS,)).fetchall()
    connection.close()
    return rows


def seeds() -> list[bytes]:
    """Return every row unchanged, behind its number."""
    return [bytes([i]) + body for i, (_, _, body) in enumerate(_template())]


def _rewrite(place: int, body: bytes) -> None:
    kind, key, _ = _template()[place]
    rows = [(*row[:2], body) if row[:2] == (kind, key) else row for row in _template()]
    connection = sqlite3.connect(FOLDER / "state.db", isolation_level=None)
    try:
        if kind == ACCOUNTS:
            check = records.part_sum(1, key, body)
            connection.execute("UPDATE accounts SET body = ?, sum = ? WHERE key = ?", (body, check, key))
        else:
            check = records.fact_checksum(kind, key, body)
            connection.execute(
                "UPDATE facts SET body = ?, sum = ? WHERE kind = ? AND key = ?", (body, check, kind, key)
            )
        (packed,) = connection.execute("SELECT body FROM facts WHERE kind = ?", (records.SEAL,)).fetchone()
        seal = RowsChecksum.unpack(packed)
        total = sum(records.fact_checksum(*row) for row in rows if row[0] != ACCOUNTS) & SUMS
        accounts = connection.execute("SELECT sum(sum + part) FROM accounts").fetchone()[0]
        database.write_seal(connection, seal._replace(facts_sum=total, accounts_sum=accounts))
    finally:
        connection.close()


@quiet()
def one(data: bytes) -> str:
    """Open the folder, read all of it, and go on with it as a server does."""
    if not data:
        return "nothing"
    shutil.rmtree(FOLDER, ignore_errors=True)
    _template()
    shutil.copytree(TEMPLATE, FOLDER)
    before = set(Path(_FOLDER.name).iterdir())
    _rewrite(data[0] % len(_template()), data[1:])
    try:
        with Store(FOLDER, None, limits=Limits.of(log_bytes=100)) as store:
            for facts in store.runs():
                contents(store, facts.name)
            _go_on(store)
    except StateError as error:
        assert str(FOLDER) in str(error)
        return "refused"
    except ParameterError:
        return "other parameters"
    assert set(Path(_FOLDER.name).iterdir()) == before
    return "opened"


def _go_on(store: Store) -> None:
    tables = Tables({"default": Table(SCHEMA)}, lambda name, table: Pool(SCHEMA, Parameters(), seed=0))
    dispatcher = Dispatcher(
        tables=tables, run=None, name=store.name, limits=Limits(), store=store, clock=lambda: 1e9, epoch=0
    )
    for facts in dispatcher.runs.facts():
        run = dispatcher.runs.named(facts.name)
        assert run is not None
        for _ in dispatcher.pages(run):
            pass
        run.ledger.totals()
        for client in CLIENTS:
            run.ledger.find(client)
