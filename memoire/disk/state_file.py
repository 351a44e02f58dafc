"""The state file as its one writer has it: checked when it is opened, and changed in transactions that are sealed.

Not thread-safe: the store's writer thread owns it. Whoever reads beside it has a `DatabaseReader`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from memoire.accounting.packing import Packed
from memoire.accounting.runs import LogEntry
from memoire.errors import StateCorrupt, StateUnusable

from .database import (
    LINE_COLUMNS,
    LIVE,
    NONE,
    PART_COLUMNS,
    PARTS,
    SUMS,
    TABLES,
    Change,
    RowsChecksum,
    connect,
    is_damage,
    read_facts,
    read_head,
    read_parts,
    set_aside,
    write_facts,
    write_seal,
)
from .files import RESTORE, corrupt
from .records import (
    LAST,
    META,
    SEAL,
    SEGMENT,
    WORD,
    Fact,
    FactRow,
    LineRow,
    LogSegment,
    PartChanges,
    PartRow,
    StateContents,
    add_up,
    checked_fact,
    entry_of,
    last_of_each,
    line_row,
    part_sum,
    segment_key,
)

SHORT_BYTES: Final = 64
"""Bytes of a row's body that is handed back when the row goes."""
MAX_RECENT: Final = 8192
"""Of `accounts`, and of `table_rows`."""
MAX_TRIMMED_ROWS: Final = 5_000
"""Old lines that leave with one transaction: more would hold up those who wait for theirs."""
_NO_CHANGES: Final[PartChanges] = MappingProxyType({})
_Former: TypeAlias = tuple[int, bytes | None]
_STATEMENTS: Final = {
    table: (
        # SQLite does not read a long body to know its length.
        f"SELECT sum + part, CASE WHEN length(body) <= {SHORT_BYTES} THEN body END FROM {table} "  # noqa: S608
        "WHERE part = ? AND key = ?",
        f"INSERT INTO {table} ({PART_COLUMNS}) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",  # noqa: S608
        f"INSERT OR REPLACE INTO {table} ({PART_COLUMNS}) VALUES (?, ?, ?, ?)",  # noqa: S608
        f"DELETE FROM {table} WHERE part = ? AND key = ?",  # noqa: S608
    )
    for table in PARTS
}
"""Of such a table: what finds a row, puts a new one in, puts one in the place of another, and takes one out."""


class StateFile:
    """An open state file, of which only this process knows the contents: the folder's lock says so.

    Args:
        path: Of the file, which must be there: see `database.create`. Nothing is written before `go_live`.
        witnessed: Transactions that it must have had; None where nobody knows any more.
        at: Called at named points, so that a test may end the process there.
        recent: Rows of `accounts`, and of `table_rows`, whose checksums are remembered: those that were written last.
    """

    def __init__(
        self,
        path: Path,
        witnessed: int | None,
        *,
        at: Callable[[str], None] = lambda point: None,
        recent: int = MAX_RECENT,
    ) -> None:
        self.path = path
        self._at, self._max_recent = at, recent
        self.seal = RowsChecksum()
        self.contents = StateContents(path)
        self._sums: dict[tuple[int, bytes], int] = {}  # checksum of each fact
        # Of rows that were written last, as they are in the database: checksum with the row's number, and a short body.
        self._recent: dict[str, dict[tuple[int, bytes], _Former]] = {table: {} for table in PARTS}
        self._saved_words = 0
        self.was_backup = read_head(path)
        logs = [path.with_name(path.name + ending) for ending in ("-wal", "-shm")]
        self._found = {beside: beside.read_bytes() if beside.exists() else None for beside in logs}
        # Read-only at first: whoever closes a damaged file that is open for writing would empty its log for good. A
        # log beside a backup belongs to another file: an immutable one has none.
        has_journal = path.with_name(path.name + "-journal").exists()
        self._connection = connect(path, "rw" if has_journal else "ro&immutable=1" if self.was_backup else "ro")
        try:
            self._load()
            self._check_witness(witnessed)
        except BaseException as error:
            self.close()
            if is_damage(error):
                raise corrupt(path, f"SQLite says {error}") from error
            raise

    # ------------------------------------------------------------------------------------------------ opening

    def _check_witness(self, witnessed: int | None) -> None:
        if self.was_backup:
            return
        if witnessed is None and not self.number(META, b"clean"):
            raise StateCorrupt(
                str(self.path.with_name("committed")),
                f"it says how many transactions {self.path.name} must have, and cannot be read",
                f"Remove it to go on with what {self.path.name} has. Or: {RESTORE}.",
            )
        missing = (witnessed or 0) - self.seal.generation
        if missing > 0:
            raise corrupt(
                self.path,
                f"its last {missing} transactions are missing (its write-ahead log state.db-wal was removed, cut or "
                f"damaged)",
            )

    def _load(self) -> None:
        damage = [row[0] for row in self._connection.execute("PRAGMA quick_check(3)")]
        if damage != ["ok"]:
            raise corrupt(self.path, "; ".join(damage))
        tables = self._connection.execute("SELECT sql FROM sqlite_master WHERE type = 'table'")
        if TABLES.symmetric_difference(sql for (sql,) in tables):
            raise corrupt(self.path, "the description of its tables has changed")
        seal = self._load_facts()
        facts = len(self._sums), sum(self._sums.values()) & SUMS
        # Of lines only what they add up to, with their ids: there may be a million. Each is checked when it is read.
        lines, low, high = self._connection.execute(
            "SELECT count(*), coalesce(sum((sum & 4294967295) + (id & 4294967295)), 0), "
            "coalesce(sum((sum >> 32) + (id >> 32)), 0) FROM lines"
        ).fetchone()
        lines_sum = (high << 32) + low & SUMS
        # A key of another type would be out of the order in which accounts are looked for.
        accounts, table_rows = (
            self._connection.execute(
                f"SELECT count(*), coalesce(sum(sum + part), 0) FROM {table} "  # noqa: S608
                "WHERE typeof(part) = 'integer' AND typeof(key) = 'blob' AND typeof(body) = 'blob'"
            ).fetchone()
            for table in PARTS
        )
        if seal is None or seal != RowsChecksum(seal.generation, *facts, lines, lines_sum, *accounts, *table_rows):
            raise corrupt(self.path, "rows are missing, or older than others")
        self.seal = seal
        self._saved_words = len(self.contents.words)

    def _load_facts(self) -> RowsChecksum | None:
        """Check all facts and keep what is asked for often; returns the seal."""
        seal: RowsChecksum | None = None
        before = (-1, b"")
        for row in self._connection.execute("SELECT kind, key, body, sum FROM facts"):
            if before >= row[:2]:
                raise corrupt(self.path, "rows are out of order")  # whoever looks for them would not find them
            before = row[:2]
            kind, key, body, check = checked_fact(row, self.path)
            if kind == SEAL:
                seal = RowsChecksum.unpack(body)
                continue
            self._sums[kind, key] = check
            self.contents.apply(kind, key, body)
        return seal

    def go_live(self, generation: int) -> None:
        """Write from now on through a write-ahead log, each transaction synced.

        A backup becomes the state itself: its transactions are counted on from `generation`, which is that of the file
        whose place it takes.
        """
        self._connection.close()
        self._found.clear()
        if self.was_backup:
            set_aside(self.path)
        self._connection = connect(self.path)
        if self.was_backup:
            times = (self.number(META, b"restored") + 1).to_bytes(8, "big")
            self.seal = self.seal._replace(generation=max(generation, self.seal.generation))
            self.save([(META, b"restored", times)], [], application=LIVE)
        mode = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StateUnusable(
                str(self.path.parent), f"its file system allows SQLite no write-ahead log ({mode})", "Use a local disk."
            )
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("PRAGMA journal_size_limit = 67108864")

    # ------------------------------------------------------------------------------------------------ reading

    def rows(self, kind: int, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys and bodies of a kind whose key begins so."""
        return read_facts(self._connection, self.path, kind, prefix)

    def find(self, kind: int, key: bytes) -> bytes | None:
        """One fact."""
        return next((body for found, body in self.rows(kind, key) if found == key), None)

    def number(self, kind: int, key: bytes) -> int:
        """One fact that is a number; 0 where there is none."""
        return int.from_bytes(self.find(kind, key) or b"", "big")

    def lines_of(self, segment: LogSegment) -> Iterator[LogEntry]:
        """The lines of a segment in their order."""
        query = f"SELECT {LINE_COLUMNS} FROM lines WHERE id BETWEEN ? AND ? ORDER BY id"  # noqa: S608
        try:
            for row in self._connection.execute(query, segment.ids):
                yield entry_of(row, self.path)
        except (sqlite3.DatabaseError, TypeError) as error:
            if is_damage(error):
                raise corrupt(self.path, f"SQLite says {error}") from error
            raise

    def account(self, run: int, key: bytes) -> bytes | None:
        """The body of an account, as its writer has it."""
        rows = read_parts(self._connection, self.path, "accounts", run, key, 1, key + b"\0")
        return next((body for _, body in rows), None)

    def table_rows(
        self, kind: int, begin: bytes = b"", before: bytes = LAST, *, order: Literal["key", "body"] = "key"
    ) -> Iterator[Packed]:
        """Keys and bodies of the rows of tables of a kind, checked: those from `begin` on, and below `before`."""
        return read_parts(self._connection, self.path, "table_rows", kind, begin, -1, before, order)

    # ------------------------------------------------------------------------------------------------ writing

    def save(
        self,
        facts: Sequence[Fact],
        lines: Sequence[tuple[int, LogEntry]],
        accounts: PartChanges = _NO_CHANGES,
        table_rows: PartChanges = _NO_CHANGES,
        *,
        application: int = 0,
    ) -> list[bytes]:
        """One transaction: facts, new lines (number of the run, entry), accounts (by number of the run and key) and
        rows of tables (by kind and key).

        On disk when it returns. Raises `sqlite3.Error`, and nothing was saved.

        Returns:
            The bodies of the rows of tables that have gone or were replaced, the short ones.
        """
        words = self.contents.words
        if len(words) > self._saved_words:
            texts = enumerate(words.after(self._saved_words), self._saved_words + 1)
            facts = [*facts, *((WORD, number.to_bytes(4, "big"), text.encode()) for number, text in texts)]
        changed = last_of_each(facts) if facts else []
        rows = [(kind, key, body, add_up(kind, key, body)) for kind, key, body in changed if body is not None]
        gone = [(kind, key) for kind, key, body in changed if body is None]
        former = [self._sums[kind, key] for kind, key, _ in changed if (kind, key) in self._sums]
        new = [line_row(run, entry) for run, entry in lines]
        seal, former_rows = self.seal, list[bytes]()
        accounts_come, rows_come = list[PartRow](), list[PartRow]()

        def write() -> None:
            nonlocal seal
            if application:
                self._connection.execute(f"PRAGMA application_id = {application}")
            seal = seal.next(
                (former, [row[-1] for row in rows]),
                ((), [row[0] + row[-1] for row in new]),
                self._write_parts("accounts", accounts, accounts_come),
                self._write_parts("table_rows", table_rows, rows_come, former_rows),
            )
            self._write_all(rows, gone, new, seal)

        self._transact(write)
        self._apply(rows, gone)
        self._remember("accounts", accounts, accounts_come)
        self._remember("table_rows", table_rows, rows_come)
        self.seal = seal
        self._saved_words = len(words)
        self._at("after commit")
        return former_rows

    def _write_parts(
        self, table: str, changes: PartChanges, come: list[PartRow], short: list[bytes] | None = None
    ) -> Change:
        """Replace these rows, or take them out; returns the checksums that have gone, and those that have come, each
        with the row's number. Puts the rows into `come`, and short bodies that have gone into `short`.
        """
        if not changes:
            return NONE
        select, insert, replace, delete = _STATEMENTS[table]
        connection, recent = self._connection, self._recent[table]
        found, replaced, gone = list[_Former](), list[PartRow](), list[tuple[int, bytes]]()
        for name, body in changes.items():
            known = recent.get(name)
            if body is None:
                gone.append(name)
            else:
                row = *name, body, part_sum(*name, body)
                come.append(row)
                if known is None and connection.execute(insert, row).rowcount:
                    continue  # it is new
                replaced.append(row)
            if known is not None or (known := connection.execute(select, name).fetchone()) is not None:
                found.append(known)
        if replaced:
            connection.executemany(replace, replaced)
        if gone:
            connection.executemany(delete, gone)
        if short is not None:
            short += [body for _, body in found if body is not None]
        return [check for check, _ in found], [row[0] + row[-1] for row in come]

    def _remember(self, table: str, changes: PartChanges, come: Iterable[PartRow]) -> None:
        """The database has these changes, with the rows that have come."""
        if not changes:
            return
        recent = self._recent[table]
        for name in changes:
            recent.pop(name, None)
        for part, key, body, check in come:
            recent[part, key] = part + check, body if len(body) <= SHORT_BYTES else None
        while len(recent) > self._max_recent:
            del recent[next(iter(recent))]

    def _write_all(
        self, rows: Sequence[FactRow], gone: Sequence[tuple[int, bytes]], new: Sequence[LineRow], seal: RowsChecksum
    ) -> None:
        write_facts(self._connection, rows)
        if gone:
            self._connection.executemany("DELETE FROM facts WHERE kind = ? AND key = ?", gone)
        if new:
            self._connection.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, ?, ?)", new)
        write_seal(self._connection, seal)

    def _apply(self, rows: Iterable[FactRow], gone: Iterable[tuple[int, bytes]]) -> None:
        """The database has these rows and has lost those."""
        for kind, key in gone:
            self._sums.pop((kind, key), None)
            self.contents.remove(kind, key)
        for kind, key, body, check in rows:
            self._sums[kind, key] = check
            self.contents.apply(kind, key, body)

    def _transact(self, write: Callable[[], None]) -> None:
        connection = self._connection
        self._at("before begin")
        connection.execute("BEGIN IMMEDIATE")
        try:
            write()
            self._at("before commit")
            connection.execute("COMMIT")
        except BaseException:
            for recent in self._recent.values():
                recent.clear()
            try:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            except sqlite3.Error:
                pass  # the first error says more
            raise

    def trim(self, segment: LogSegment) -> bool:
        """Take the oldest lines of a segment out, some of them at a time; True when it was the last of it.

        The segment's own row goes with its last lines.
        """
        found = self._connection.execute(
            "SELECT id, sum FROM lines WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?", (*segment.ids, MAX_TRIMMED_ROWS)
        ).fetchall()
        is_over = len(found) < MAX_TRIMMED_ROWS
        gone = [(SEGMENT, segment_key(segment))] if is_over else []
        seal = self.seal.next(
            ([self._sums[which] for which in gone], ()), ([number + check for number, check in found], ())
        )

        def write() -> None:
            if found:
                self._connection.execute("DELETE FROM lines WHERE id BETWEEN ? AND ?", (found[0][0], found[-1][0]))
            self._write_all((), gone, (), seal)

        self._transact(write)
        self.seal = seal
        self._apply((), gone)
        self._at("after commit")
        return is_over

    def checkpoint(self) -> None:
        """Bring everything into the file itself and empty the write-ahead log."""
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Let go of the file. Before `go_live` its log and the log's index become what they were: SQLite makes an empty
        log, and a new index, to read.
        """
        self._connection.close()
        for path, content in self._found.items():
            if content is None:
                path.unlink(missing_ok=True)
            elif path.read_bytes() != content:
                path.write_bytes(content)
