"""What a state folder says of its runs: which there were, their accounts and their log lines.

Everything is read beside the writer, from any thread; what is asked for often is in memory (`records.StateContents`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from memoire.accounting.kept_accounts import Packed, StoredAccounts
from memoire.accounting.logbook import LineFilter, LogEntry
from memoire.accounting.packing import AccountPacker
from memoire.accounting.unsaved_changes import RunFacts

from .database_reader import DatabaseReader
from .disk_errors import as_saved
from .records import LAST, SETTING, StateContents
from .search import condition


class StoredRuns:
    """The runs of an open state folder. Thread-safe.

    Args:
        path: Of the database.
        contents: As its writer keeps them.
        reader: Of the database.
        packing: How accounts are packed.
        check_open: Raises Closed once the folder is closed.
    """

    def __init__(
        self,
        path: Path,
        contents: StateContents,
        reader: DatabaseReader,
        packing: AccountPacker,
        check_open: Callable[[], None],
    ) -> None:
        self.path = path
        self._contents, self._reader, self._packing, self._check_open = contents, reader, packing, check_open

    def runs(self) -> list[RunFacts]:
        """All runs, in the order in which they began; the one that is counted has not ended."""
        numbers = self._contents.runs
        return sorted(dict(self._contents.facts_of).values(), key=lambda facts: numbers[facts.name])

    def settings(self) -> dict[str, str]:
        """Texts that were saved, by name."""
        with as_saved(self.path):
            self._check_open()
            return {key.decode(): body.decode() for key, body in self._reader.facts(SETTING)}

    def accounts(self, run: str) -> StoredAccounts:
        """The accounts of a run, of other servers too; each is read when it is asked for."""
        return StoredAccounts(self._packing, _RunReader(self, run))

    def packed_accounts(self, run: str, begin: bytes = b"", most: int = 1 << 62, before: bytes = LAST) -> list[Packed]:
        """At most so many accounts of a run as they are on disk, from the key `begin` on and below `before`."""
        self._check_open()
        number = self._contents.runs.get(run)
        return [] if number is None else self._reader.accounts(number, begin, most, before)

    def line_count(self, run: str) -> int:
        """Lines of a run that were ever taken: the index of the newest one."""
        number = self._contents.runs.get(run)
        return 0 if number is None else self._contents.counts.get(number, 0)

    def search(self, run: str, wanted: LineFilter, most: int, newest_first: bool) -> list[LogEntry]:
        """Log lines of a run, at most so many of those wanted; an unknown run has none.

        Raises:
            StateCorrupt: one of them is damaged; or any line is, if more than their index is wanted.
        """
        self._check_open()
        number = self._contents.runs.get(run)
        found = None if number is None else condition(number, wanted)
        if found is not None and wanted != LineFilter(after=wanted.after, before=wanted.before):
            self._reader.check_lines()
        return [] if found is None else self._reader.lines(*found, "DESC" if newest_first else "ASC", most)


class _RunReader:
    """Reads the accounts of one run, which may be one that is not saved yet."""

    def __init__(self, stored: StoredRuns, run: str) -> None:
        self._stored, self._run = stored, run

    def body(self, key: bytes) -> bytes | None:
        """Body of the account with this key."""
        return next((body for _, body in self.after(key, 1, key + b"\0")), None)

    def after(self, key: bytes, most: int, before: bytes = LAST) -> list[Packed]:
        """At most so many accounts from this key on, ascending, whose keys are below `before`."""
        return self._stored.packed_accounts(self._run, key, most, before)

    def reading(self) -> AbstractContextManager[None]:
        """Within it, what cannot have been saved is StateCorrupt."""
        return as_saved(self._stored.path)
