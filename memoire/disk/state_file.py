"""Writer of the state file: checks the file when it is opened, and changes it in transactions, each with a new seal.

Not thread-safe: the store's writer thread owns it. Readers in further threads use a `DatabaseReader`.
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
    rename_stale_log,
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
    checked_fact,
    entry_of,
    fact_checksum,
    last_of_each,
    line_row,
    part_sum,
    segment_key,
)

SHORT_BYTES: Final = 64
"""Most bytes of a row's body that `save` returns when the row is removed or replaced."""
MAX_RECENT: Final = 8192
"""Most recently written rows whose checksums are kept in memory, for each of `accounts` and `table_rows`."""
MAX_TRIMMED_ROWS: Final = 5_000
"""Most old lines that one transaction removes: more would delay further groups that wait to be saved."""
_NO_CHANGES: Final[PartChanges] = MappingProxyType({})
_Former: TypeAlias = tuple[int, bytes | None]
_STATEMENTS: Final = {
    table: (
        # SQLite finds the length of a long body without reading the body.
        f"SELECT sum + part, CASE WHEN length(body) <= {SHORT_BYTES} THEN body END FROM {table} "  # noqa: S608
        "WHERE part = ? AND key = ?",
        f"INSERT INTO {table} ({PART_COLUMNS}) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",  # noqa: S608
        f"INSERT OR REPLACE INTO {table} ({PART_COLUMNS}) VALUES (?, ?, ?, ?)",  # noqa: S608
        f"DELETE FROM {table} WHERE part = ? AND key = ?",  # noqa: S608
    )
    for table in PARTS
}
"""Statements of each table that find a row, insert a new one, replace one, and delete one."""


class StateFile:
    """Open state file of this process, which holds the folder's lock.

    Args:
        path: Path of an existing file: see `database.create`. Nothing is written before `open_for_writing`.
        counted: Transactions that the file must contain, from the commit counter; None if the counter is damaged.
        at: Called at named points, so that a test may end the process there.
        recent: Most recently written rows, of `accounts` and of `table_rows`, whose checksums are kept in memory.
    """

    def __init__(
        self,
        path: Path,
        counted: int | None,
        *,
        at: Callable[[str], None] = lambda point: None,
        recent: int = MAX_RECENT,
    ) -> None:
        self.path = path
        self._at, self._max_recent = at, recent
        self.seal = RowsChecksum()
        self.contents = StateContents(path)
        self._sums: dict[tuple[int, bytes], int] = {}  # checksum of each fact
        # Recently written rows in the form of the database: checksum with the row's number, and a short body.
        self._recent: dict[str, dict[tuple[int, bytes], _Former]] = {table: {} for table in PARTS}
        self._saved_words = 0
        self.was_backup = read_head(path)
        logs = [path.with_name(path.name + ending) for ending in ("-wal", "-shm")]
        self._logs = {log: log.read_bytes() if log.exists() else None for log in logs}
        # Read-only at first: closing a damaged file that is open for writing would empty its log for good. A log
        # beside a backup belongs to another file: "immutable" ignores the log.
        has_journal = path.with_name(path.name + "-journal").exists()
        self._connection = connect(path, "rw" if has_journal else "ro&immutable=1" if self.was_backup else "ro")
        try:
            self._load()
            self._check_counter(counted)
        except BaseException as error:
            self.close()
            if is_damage(error):
                raise corrupt(path, f"SQLite says {error}") from error
            raise

    # ------------------------------------------------------------------------------------------------ opening

    def _check_counter(self, counted: int | None) -> None:
        if self.was_backup:
            return
        if counted is None and not self.read_number(META, b"clean"):
            raise StateCorrupt(
                str(self.path.with_name("committed")),
                f"it has the number of transactions that {self.path.name} must contain, and cannot be read",
                f"Remove it to go on with the present contents of {self.path.name}. Or: {RESTORE}.",
            )
        missing = (counted or 0) - self.seal.generation
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
        # One sum of checksums and ids covers all lines, up to a million. Each line is checked when it is read.
        lines, low, high = self._connection.execute(
            "SELECT count(*), coalesce(sum((sum & 4294967295) + (id & 4294967295)), 0), "
            "coalesce(sum((sum >> 32) + (id >> 32)), 0) FROM lines"
        ).fetchone()
        lines_sum = (high << 32) + low & SUMS
        # A key of another type would break the order that searches of accounts rely on.
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
        """Check all facts, and load those that are kept in memory; returns the seal."""
        seal: RowsChecksum | None = None
        before = (-1, b"")
        for row in self._connection.execute("SELECT kind, key, body, sum FROM facts"):
            if before >= row[:2]:
                raise corrupt(self.path, "rows are out of order")  # a search by key would miss the rows
            before = row[:2]
            kind, key, body, check = checked_fact(row, self.path)
            if kind == SEAL:
                seal = RowsChecksum.unpack(body)
                continue
            self._sums[kind, key] = check
            self.contents.apply(kind, key, body)
        return seal

    def open_for_writing(self, generation: int) -> None:
        """Open the file for writing, with a write-ahead log, and each transaction synced.

        A backup becomes the state itself: its transactions are counted on from `generation`, that of the file which it
        replaces.
        """
        self._connection.close()
        self._logs.clear()
        if self.was_backup:
            rename_stale_log(self.path)
        self._connection = connect(self.path)
        if self.was_backup:
            times = (self.read_number(META, b"restored") + 1).to_bytes(8, "big")
            self.seal = self.seal._replace(generation=max(generation, self.seal.generation))
            self.save([(META, b"restored", times)], [], application=LIVE)
        mode = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StateUnusable(
                str(self.path.parent), f"SQLite's write-ahead log does not work there ({mode})", "Use a local disk."
            )
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("PRAGMA journal_size_limit = 67108864")

    # ------------------------------------------------------------------------------------------------ reading

    def rows(self, kind: int, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and bodies of the facts of a kind whose keys begin with `prefix`."""
        return read_facts(self._connection, self.path, kind, prefix)

    def find(self, kind: int, key: bytes) -> bytes | None:
        """Return the body of a fact; None if the fact has no row."""
        return next((body for other, body in self.rows(kind, key) if other == key), None)

    def read_number(self, kind: int, key: bytes) -> int:
        """Return the number in a fact's body; 0 if the fact has no row."""
        return int.from_bytes(self.find(kind, key) or b"", "big")

    def lines_of(self, segment: LogSegment) -> Iterator[LogEntry]:
        """Yield the lines of a segment, oldest first. Raises StateCorrupt if one is damaged."""
        query = f"SELECT {LINE_COLUMNS} FROM lines WHERE id BETWEEN ? AND ? ORDER BY id"  # noqa: S608
        try:
            for row in self._connection.execute(query, segment.ids):
                yield entry_of(row, self.path)
        except (sqlite3.DatabaseError, TypeError) as error:
            if is_damage(error):
                raise corrupt(self.path, f"SQLite says {error}") from error
            raise

    def account(self, run: int, key: bytes) -> bytes | None:
        """Return the packed body of an account; None if the account has no row."""
        rows = read_parts(self._connection, self.path, "accounts", run, key, 1, key + b"\0")
        return next((body for _, body in rows), None)

    def table_rows(
        self, kind: int, begin: bytes = b"", before: bytes = LAST, *, order: Literal["key", "body"] = "key"
    ) -> Iterator[Packed]:
        """Yield keys and bodies of the rows of a kind, checked, with keys from `begin` on and below `before`."""
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
        """Save changes in one transaction: facts, new lines (number of the run, entry), accounts (by number of the run
        and key) and rows of tables (by kind and key).

        The changes are on disk when this returns. Raises `sqlite3.Error` if nothing was saved.

        Returns:
            Short bodies (`SHORT_BYTES`) of the rows of tables that were removed or replaced.
        """
        words = self.contents.words
        if len(words) > self._saved_words:
            texts = enumerate(words.texts_after(self._saved_words), self._saved_words + 1)
            facts = [*facts, *((WORD, number.to_bytes(4, "big"), text.encode()) for number, text in texts)]
        changed = last_of_each(facts) if facts else []
        rows = [(kind, key, body, fact_checksum(kind, key, body)) for kind, key, body in changed if body is not None]
        removed = [(kind, key) for kind, key, body in changed if body is None]
        former = [self._sums[kind, key] for kind, key, _ in changed if (kind, key) in self._sums]
        new = [line_row(run, entry) for run, entry in lines]
        seal, former_rows = self.seal, list[bytes]()
        new_accounts, new_rows = list[PartRow](), list[PartRow]()

        def write() -> None:
            nonlocal seal
            if application:
                self._connection.execute(f"PRAGMA application_id = {application}")
            seal = seal.next(
                (former, [row[-1] for row in rows]),
                ((), [row[0] + row[-1] for row in new]),
                self._write_parts("accounts", accounts, new_accounts),
                self._write_parts("table_rows", table_rows, new_rows, former_rows),
            )
            self._write_all(rows, removed, new, seal)

        self._transact(write)
        self._apply(rows, removed)
        self._remember("accounts", accounts, new_accounts)
        self._remember("table_rows", table_rows, new_rows)
        self.seal = seal
        self._saved_words = len(words)
        self._at("after commit")
        return former_rows

    def _write_parts(
        self, table: str, changes: PartChanges, added: list[PartRow], short: list[bytes] | None = None
    ) -> Change:
        """Replace or delete rows; returns the checksums of removed and of added rows, each with the row's number.
        Appends added rows to `added`, and short bodies of removed rows to `short`.
        """
        if not changes:
            return NONE
        select, insert, replace, delete = _STATEMENTS[table]
        connection, recent = self._connection, self._recent[table]
        former, replaced, deleted = list[_Former](), list[PartRow](), list[tuple[int, bytes]]()
        for name, body in changes.items():
            known = recent.get(name)
            if body is None:
                deleted.append(name)
            else:
                row = *name, body, part_sum(*name, body)
                added.append(row)
                if known is None and connection.execute(insert, row).rowcount:
                    continue  # a new row replaces no row
                replaced.append(row)
            if known is not None or (known := connection.execute(select, name).fetchone()) is not None:
                former.append(known)
        if replaced:
            connection.executemany(replace, replaced)
        if deleted:
            connection.executemany(delete, deleted)
        if short is not None:
            short += [body for _, body in former if body is not None]
        return [check for check, _ in former], [row[0] + row[-1] for row in added]

    def _remember(self, table: str, changes: PartChanges, added: Iterable[PartRow]) -> None:
        """Keep checksums and short bodies of the added rows, after they are in the database."""
        if not changes:
            return
        recent = self._recent[table]
        for name in changes:
            recent.pop(name, None)
        for part, key, body, check in added:
            recent[part, key] = part + check, body if len(body) <= SHORT_BYTES else None
        while len(recent) > self._max_recent:
            del recent[next(iter(recent))]

    def _write_all(
        self, rows: Sequence[FactRow], removed: Sequence[tuple[int, bytes]], new: Sequence[LineRow], seal: RowsChecksum
    ) -> None:
        write_facts(self._connection, rows)
        if removed:
            self._connection.executemany("DELETE FROM facts WHERE kind = ? AND key = ?", removed)
        if new:
            self._connection.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, ?, ?)", new)
        write_seal(self._connection, seal)

    def _apply(self, rows: Iterable[FactRow], removed: Iterable[tuple[int, bytes]]) -> None:
        """Update the contents in memory, after the database has the new rows, and no longer the removed ones."""
        for kind, key in removed:
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
                pass  # the first error is the cause
            raise

    def trim(self, segment: LogSegment) -> bool:
        """Delete the oldest lines of a segment, `MAX_TRIMMED_ROWS` at most; True if no line of it is left.

        The segment's own row is deleted with its last lines.
        """
        lines = self._connection.execute(
            "SELECT id, sum FROM lines WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?", (*segment.ids, MAX_TRIMMED_ROWS)
        ).fetchall()
        is_over = len(lines) < MAX_TRIMMED_ROWS
        removed = [(SEGMENT, segment_key(segment))] if is_over else []
        seal = self.seal.next(
            ([self._sums[key] for key in removed], ()), ([number + check for number, check in lines], ())
        )

        def write() -> None:
            if lines:
                self._connection.execute("DELETE FROM lines WHERE id BETWEEN ? AND ?", (lines[0][0], lines[-1][0]))
            self._write_all((), removed, (), seal)

        self._transact(write)
        self.seal = seal
        self._apply((), removed)
        self._at("after commit")
        return is_over

    def checkpoint(self) -> None:
        """Write all changes into the file itself, and empty the write-ahead log."""
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close the file. Before `open_for_writing`, the write-ahead log and its index get their former contents back,
        since SQLite makes an empty log and a new index for reading.
        """
        self._connection.close()
        for path, content in self._logs.items():
            if content is None:
                path.unlink(missing_ok=True)
            elif path.read_bytes() != content:
                path.write_bytes(content)
