"""What comes back into a server: files of snapshots, by a call or at its begin."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from memoire.accounting.merge import Rows
from memoire.accounting.runs import StateStore
from memoire.errors import DataError, ParameterError, ProtocolError, SnapshotMismatch
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.replay.replacement import remove_abandoned_in
from memoire.storage import snapshot
from memoire.storage.restore import RestoreCounts, restore
from memoire.storage.snapshot_file import SnapshotFile

from .dispatch import Dispatcher
from .io_snapshots import HELD, MEMORY, ORDERED

_log = logging.getLogger(__name__)

_WITHOUT: Final = (
    "discard_mismatched=True (--discard-mismatched) starts with what is whole and fits; then the next snapshot takes "
    "the file's place."
)
NOTE_TIMEOUT: Final = 5.0
"""Seconds that a start waits for its note of the file that it holds again."""
_RESTORED: Final = "restored"  # the setting that names files that were restored once


class Restorer:
    """Puts what files hold into a server's tables. Thread-safe.

    Args:
        store: Its state folder; None if it has none.
        is_timed: Whether a timer replaces the folder's own file: then each start holds again what that has. Else only
            one life does, so that a crash does not serve its samples again.
        keeps_generators: Whether a seed was given: then a file that another server wrote does not change the draws'
            generator.
        clock: Seconds since 1970.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        store: StateStore | None,
        *,
        limits: Limits,
        is_timed: bool,
        keeps_generators: bool,
        clock: Callable[[], float],
    ) -> None:
        self._keeps_generators = keeps_generators
        self._dispatcher, self._store, self._limits, self._clock = dispatcher, store, limits, clock
        self._is_timed, self._has_noted = is_timed, False
        self.missing: list[str] = []
        """What the server was begun without, a sentence each."""

    def restore(
        self,
        paths: Sequence[str | Path],
        *,
        part: tuple[int, int] = (0, 1),
        configure: bool = False,
        skip_damaged: bool = False,
        stays: bool = True,
        is_same: bool = False,
        once: bool = False,
        discard_mismatched: bool = False,
    ) -> RestoreCounts:
        """Put what files hold into the tables; see `Server.restore` and `snapshot.restore`."""
        heads = snapshot.heads(paths)
        wanted = [path for path, head in heads.items() if not (once and head.id in self._restored())]
        done = RestoreCounts()
        if wanted:
            done = restore(
                wanted,
                self._dispatcher.tables,
                part=part,
                skip_damaged=skip_damaged,
                stays=stays,
                is_same=is_same,
                keeps_generators=self._keeps_generators,
                configure=configure,
                discard_mismatched=discard_mismatched,
                limits=self._limits,
                now=self._clock(),
                inherit=self._inherit,
                take_parameters=self._configure,
            )
        self._remember(list(heads.values()), once)
        return done

    def _remember(self, heads: Sequence[snapshot.SavedHead], once: bool) -> None:
        """Go on from the versions of the files' models; of files that are restored once, note that they were."""
        with self._dispatcher.lock:
            for head in heads:
                self._dispatcher.models.go_on_from(head.about.models)
            if once:
                known = self._restored() | {head.id for head in heads}
                self._dispatcher.committer.add_setting(_RESTORED, " ".join(sorted(each.hex() for each in known)))

    def _restored(self) -> set[bytes]:
        """Snapshots that were restored into this folder once."""
        named = "" if self._store is None else self._store.settings().get(_RESTORED, "")
        return set(map(bytes.fromhex, named.split()))

    def _configure(self, table: str, parameters: Parameters) -> None:
        self._dispatcher.configure(self._dispatcher.tables[table], parameters.to_wire())

    def _inherit(self, run: str, finished: bool, rows: Rows) -> None:
        try:
            self._dispatcher.inherit(run, finished, rows)
        except ProtocolError as error:
            raise ParameterError("paths", run, f"of a run that fits in here: {error.detail}") from error

    def load(self, discard_mismatched: bool) -> bool:
        """At the server's begin: hold again what its former life held at its end, if that counted the same run.

        Args:
            discard_mismatched: Begin without what was made with other values than hold now, or is damaged.

        Returns:
            Whether the folder's file has something that is not held again, and that nobody discarded.

        Raises:
            SnapshotMismatch: it was made with other values, and the file stays as it is.
            DataError: the file is of another form, or damaged; likewise.
        """
        assert self._store is not None
        folder, dispatcher = self._store.folder, self._dispatcher
        for place in (folder, folder / ORDERED):
            if place.is_dir():
                remove_abandoned_in(place, ".snapshot")  # of a life that was killed while it wrote
        path, known = folder / MEMORY, self._store.settings().get(HELD, "")
        if not path.exists():
            if known:
                self._miss(f"{path} is gone: what the former life held is not held again")
                self._note("")
            return False
        try:
            head = snapshot.heads([path])[path]
            if head.about.run != dispatcher.run_name:
                self._miss(
                    f"{path} stays and is not held again: it is of run {head.about.run!r}, and this server counts "
                    f"{dispatcher.run_name!r}. Server.restore takes it"
                )
                return True
            if known == head.id.hex() and not self._is_timed:
                self._miss(
                    f"{path} stays and is not held again: a former life did, and ended without a snapshot of its own. "
                    "Server.restore takes it; samples that were drawn since may be drawn once more"
                )
                return False
            is_whole = self._load(path, skip_damaged=discard_mismatched)
        except SnapshotMismatch as error:
            raise SnapshotMismatch(error.path, error.problem, f"{error.advice} {_WITHOUT}") from error
        except DataError as error:
            if not discard_mismatched:
                raise DataError(error.path, f"{error.problem}. {_WITHOUT}") from error
            self._miss(f"what the former life held is not held again: {error}")
            return False
        self._note("" if self._is_timed else head.id.hex())
        return not (is_whole or discard_mismatched)

    def _load(self, path: Path, *, skip_damaged: bool) -> bool:
        """Hold again what is in the file; whether that is all of it."""
        with SnapshotFile(path) as file:
            damage = file.verify()
            if damage and not skip_damaged:
                raise DataError(str(path), f"has {damage}")
            is_complete = file.end is not None and file.end.complete
        done = self.restore([path], skip_damaged=True, stays=False, is_same=True, discard_mismatched=skip_damaged)
        if damage or done.damaged or done.refused:
            self._miss(f"of {path} are held again: {done}")
        elif not is_complete:
            self._miss(f"{path} was not finished in time: of what the former life held are held again: {done}")
        else:
            _log.info("%s: of its former life are held again: %s", self._dispatcher.name, done)
        return not (done.damaged or done.refused)

    def _miss(self, sentence: str) -> None:
        self.missing.append(sentence)
        _log.warning("%s: %s", self._dispatcher.name, sentence)

    def _note(self, held: str) -> None:
        self._has_noted = True
        with self._dispatcher.lock:
            self._dispatcher.committer.add_setting(HELD, held)

    def wait_noted(self) -> None:
        """Wait until it is on disk which file is held again: the next life does not do that once more."""
        if not self._has_noted:
            return
        is_saved = threading.Event()
        with self._dispatcher.lock:
            self._dispatcher.committer.after(is_saved.set)
        is_saved.wait(NOTE_TIMEOUT)
