"""What comes back into a server: files of snapshots, by a call or at its begin."""

from __future__ import annotations

import logging
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

from .dispatch import Dispatcher
from .io_snapshots import MEMORY, ORDERED

_log = logging.getLogger(__name__)

_WITHOUT: Final = (
    "discard_mismatched=True (--discard-mismatched) starts without what does not fit, and does not keep the file."
)
_RESTORED: Final = "restored"  # the setting that names files that were restored once


class Restorer:
    """Puts what files hold into a server's tables. Thread-safe.

    Args:
        store: Its state folder; None if it has none.
        stays: Whether the folder's own file stays when it was read: a timer replaces it. Else it goes, so that a crash
            does not serve its samples again.
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
        stays: bool,
        keeps_generators: bool,
        clock: Callable[[], float],
    ) -> None:
        self._keeps_generators = keeps_generators
        self._dispatcher, self._store, self._limits, self._stays, self._clock = dispatcher, store, limits, stays, clock

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

    def load(self, discard_mismatched: bool) -> None:
        """At the server's begin: hold again what its former life held at its end, if it counted the same run.

        Args:
            discard_mismatched: Begin without what was made with other values than hold now.

        Raises:
            SnapshotMismatch: it was made with other values, and the file stays as it is.
            DataError: the file is of another form, or damaged at its beginning; likewise.
        """
        assert self._store is not None
        folder, dispatcher = self._store.folder, self._dispatcher
        for place in (folder, folder / ORDERED):
            if place.is_dir():
                remove_abandoned_in(place, ".snapshot")  # of a life that was killed while it wrote
        path = folder / MEMORY
        if not path.exists():
            return
        former = next((facts.name for facts in self._store.runs() if not facts.ended), None)
        if former == dispatcher.run_name:
            self._load(path, discard_mismatched)
        if not self._stays:
            path.unlink(missing_ok=True)

    def _load(self, path: Path, discard_mismatched: bool) -> None:
        name = self._dispatcher.name
        try:
            done = self.restore(
                [path], skip_damaged=True, stays=False, is_same=True, discard_mismatched=discard_mismatched
            )
        except SnapshotMismatch as error:
            raise SnapshotMismatch(error.path, error.problem, f"{error.advice} {_WITHOUT}") from error
        except DataError as error:
            if not discard_mismatched:
                raise DataError(error.path, f"{error.problem}. {_WITHOUT}") from error
            _log.warning("%s: what its former life held is not held again: %s", name, error)
        else:
            level = logging.WARNING if done.damaged or done.refused else logging.INFO
            _log.log(level, "%s: of its former life are held again: %s", name, done)
