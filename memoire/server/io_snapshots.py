"""Snapshots of a server: taken while it runs, by a call, a remote order or a timer.

    state/  memory.snapshot        content of the tables at the last close, or at the timer's last snapshot
            snapshots/NAME.snapshot    snapshots that an operator ordered under that name

One snapshot is taken at a time. The server waits only for the lookup of one cache or episode, and for the copy of an
episode table's bookkeeping, never for the disk.

Restore: files of snapshots are read into the tables, by a call or at the start of the server.

Snapshot orders: state of the present order and results of former ones. Pure.

TAKE_SNAPSHOT order 7 ──▶ writing ──▶ ... asked again: writing ──▶ asked again: done, or failed
TAKE_SNAPSHOT order 8 ──▶ refused ("busy") while order 7 is being written
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memoire._core import Held
from memoire.accounting.merge import Rows
from memoire.accounting.runs import StateStore
from memoire.disk import snapshot_file, snapshots
from memoire.disk.files import make_folder
from memoire.disk.snapshot_file import SnapshotFile
from memoire.disk.snapshots import RestoreCounts, restore
from memoire.errors import (
    Closed,
    DataError,
    MemoireError,
    ParameterError,
    ProtocolError,
    Refused,
    SnapshotMismatch,
    escape,
)
from memoire.replay.files import remove_abandoned_in
from memoire.replay.parameters import Parameters
from memoire.tables.registry import Reply
from memoire.wire import messages
from memoire.wire.frames import MessageHeader

from .build import ServerOptions
from .dispatch import Dispatcher

MAX_ORDERS: Final = 64
"""Maximum remembered orders; the newest stay. If an older order is sent again, its snapshot is written again."""
MAX_TEXT: Final = 1000
"""Maximum characters of the reason why a snapshot failed."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class SnapshotOrders:
    """Orders of snapshots at one server, by number. The owner locks."""

    def __init__(self) -> None:
        self._orders: OrderedDict[bytes, messages.SnapshotReply] = OrderedDict()

    def receive(self, body: messages.TakeSnapshot) -> tuple[messages.SnapshotReply, bool]:
        """Return the state of an order, and True if the order is new and has to be carried out.

        Raises:
            ProtocolError: the name is malformed (code "parameters"), or another snapshot is being written ("busy").
        """
        if not _NAME.fullmatch(body.name):
            raise ProtocolError("parameters", f"name {body.name!r} is not 1 to 100 letters, digits, _, . and -")
        known = self._orders.get(body.order)
        if known is not None:
            return known, False
        busy = next((order for order in self._orders.values() if order.state == "writing"), None)
        if busy is not None:
            raise ProtocolError("busy", f"snapshot {busy.name!r} is being written; retry after it is done")
        state = self._orders[body.order] = messages.SnapshotReply(name=body.name, state="writing")
        while len(self._orders) > MAX_ORDERS:
            self._orders.popitem(last=False)
        return state, True

    def finish(self, body: messages.TakeSnapshot, result: messages.SnapshotReply) -> None:
        """Record the result of an order."""
        self._orders[body.order] = result


def failed_result(body: messages.TakeSnapshot, why: str) -> messages.SnapshotReply:
    """Return the result of a failed order."""
    return messages.SnapshotReply(name=body.name, state="failed", text=escape(why)[:MAX_TEXT])


_log = logging.getLogger(__name__)

MEMORY: Final = "memory.snapshot"
ORDERED: Final = "snapshots"
HELD: Final = "memory"
"""Setting about `MEMORY`: "saved" if a server has written the file, or the id of the snapshot that a server without a
timer has restored."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Snapshot file that was written, and counts of its content."""

    path: str
    bytes: int
    seconds: float
    """Seconds that the snapshot took."""
    caches: int
    samples: int
    unused: int
    """Samples in the file that were never drawn."""
    episodes: int
    entries: int
    complete: bool
    """True if the file has the tables' whole content; False if a closing server ran out of time."""


_WITHOUT: Final = (
    "To start with the undamaged content that fits, use discard_mismatched=True (--discard-mismatched); the next "
    "snapshot then replaces the file."
)
NOTE_TIMEOUT: Final = 5.0
"""Maximum seconds that a start waits for the save of its note about the restored file."""
_RESTORED: Final = "restored"  # setting with the ids of files restored with once=True


class Archive:
    """Archive of one server: takes and restores snapshots of its tables. Thread-safe.

    Args:
        store: The server's state folder; None allows no orders and no timer.
        options: Options of the server. With `state.snapshot_every` a timer replaces the folder's own file, and each
            start restores it. Without a timer only one start restores a file, so that samples are not served again
            after a crash. With a seed, another server's file does not change the generator of the draws.
        is_closing: Event that is set when the server closes; a snapshot in progress is then aborted.
        at: Called with the name of each point between two steps, so that a test can end the process there.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        store: StateStore | None,
        options: ServerOptions,
        is_closing: threading.Event,
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        self._dispatcher, self._store, self._options = dispatcher, store, options
        self._interval = None if options.state is None else options.state.snapshot_every
        self._folder = None if store is None else store.folder
        self._is_closing, self._clock, self._at = is_closing, options.process.clock, at
        self._take_lock = threading.RLock()
        self._lock = threading.Lock()  # guards the attributes below
        self._orders = SnapshotOrders()
        self._timer: threading.Thread | None = None
        self.taken = 0
        """Number of snapshots completed since the start."""
        self.trouble = ""
        """Reason why the timer's last snapshot failed; "" if it succeeded."""
        self.missing: list[str] = []
        """Data that the start did not restore, a sentence each."""
        self._is_kept = self._has_noted = False
        """Two flags: `MEMORY` has content that is not in the tables, and is moved, not replaced; `HELD` was set."""

    # ---------------------------------------------------------------------------------------------------- taking

    def take(self, path: Path, deadline: float | None = None) -> Snapshot:
        """Write the tables' content to a file while the server runs. With a deadline, write as much as the time allows,
        even if the server is closing.

        Raises:
            OSError: the file cannot be written; a former file of this name is unchanged.
            Closed, Refused: the server was closed, or another run began, meanwhile; likewise.
        """
        dispatcher, began = self._dispatcher, time.monotonic()
        with self._take_lock:
            with dispatcher.lock:
                run, finished, models = dispatcher.run_name, dispatcher.finished, dispatcher.models.versions()
                accounts = dispatcher.pages(dispatcher.runs.current)
            tables = tuple(dispatcher.tables)
            about = snapshots.read_header(
                tables, server=dispatcher.name, run=run, finished=finished, taken=self._clock(), models=models
            )
            is_late = False

            def go_on() -> bool:
                nonlocal is_late
                if deadline is None and self._is_closing.is_set():
                    raise Closed("this server")
                if dispatcher.run_name != run:
                    raise Refused(dispatcher.name, "run", f"another run than {run!r} began; take the snapshot again")
                is_late = is_late or (deadline is not None and time.monotonic() > deadline)
                return not is_late

            records = snapshots.records(tables, run, finished, accounts, go_on)
            # The server checks again at the end: pools that were closed meanwhile yielded nothing more.
            end = snapshot_file.write(path, about, records, at=self._at, is_complete=go_on)
            sums = {
                name: sum(getattr(counts, name) for counts in end.tables)
                for name in ("caches", "samples", "unused", "episodes", "entries")
            }
            size, took = path.stat().st_size, time.monotonic() - began
            with Held(self._lock):
                self.taken += 1
            return Snapshot(str(path), size, took, **sums, complete=end.complete)

    def _replace(self, deadline: float | None = None) -> Snapshot:
        """Take a snapshot in place of the folder's own file; move that file to `ORDERED` if it must stay."""
        assert self._folder is not None
        path = self._folder / MEMORY
        with self._take_lock:
            if self._is_kept and path.exists():
                make_folder(self._folder / ORDERED)
                aside = self._folder / ORDERED / f"kept-{snapshots.read_headers([path])[path].id.hex()}.snapshot"
                path.replace(aside)
                _log.warning("%s: %s was moved to %s", self._dispatcher.name, path, aside)
            self._is_kept = False
            snapshot = self.take(path, deadline)
        with self._dispatcher.lock:
            self._dispatcher.committer.add_setting(HELD, "saved")
        return snapshot

    def save(self, deadline: float) -> None:
        """Save the tables' content and the state of draws at the close, as much as fits before the deadline."""
        assert self._folder is not None
        path = self._folder / MEMORY
        try:
            snapshot = self._replace(deadline)
        except (OSError, MemoireError) as error:
            _log.warning("%s: the tables' content was not saved: %s", path, error)
            return
        if not snapshot.complete:
            saved = f"{snapshot.caches} caches and {snapshot.episodes} episodes"
            _log.warning("%s: only %s were saved before the deadline", self._dispatcher.name, saved)

    def start(self) -> None:
        """Start the timer, if `snapshot_every` is set."""
        if self._interval is None:
            return
        self._timer = threading.Thread(target=self._run, name="memoire-snapshots", daemon=True)
        self._timer.start()

    def _run(self) -> None:
        assert self._folder is not None and self._interval is not None
        while not self._is_closing.wait(self._interval):
            try:
                self._replace()
                self.trouble = ""
            except Closed:
                return
            except (OSError, MemoireError) as error:
                self.trouble = f"no snapshot could be written: {error}"
                _log.warning("%s: %s; the former snapshot stays", self._dispatcher.name, self.trouble)
            except Exception:
                self.trouble = "no snapshot could be taken; the log says why"
                _log.exception("%s: no snapshot could be taken; the former snapshot stays", self._dispatcher.name)

    # ----------------------------------------------------------------------------------------- remote orders

    def order_snapshot(self, header: MessageHeader, body: messages.TakeSnapshot, _: Any) -> Reply:
        """Begin an ordered snapshot, or return its state; the operator repeats the order until it is done."""
        if self._folder is None:
            raise ProtocolError("missing", "this server has no state folder (state_dir) to keep a snapshot in")
        with Held(self._lock):
            state, is_new = self._orders.receive(body)
        if is_new:
            threading.Thread(target=self._carry_out, args=(body,), name="memoire-snapshot", daemon=True).start()
        return Reply(state)

    def _carry_out(self, body: messages.TakeSnapshot) -> None:
        assert self._folder is not None
        folder = self._folder / ORDERED
        try:
            make_folder(folder)
            snapshot = self.take(folder / f"{body.name}.snapshot")
            result = messages.SnapshotReply(
                name=body.name, state="done", path=snapshot.path, bytes=snapshot.bytes, seconds=snapshot.seconds,
                caches=snapshot.caches, samples=snapshot.samples, episodes=snapshot.episodes, entries=snapshot.entries,
            )  # fmt: skip
        except (OSError, MemoireError) as error:
            result = failed_result(body, str(error))
        except Exception as error:
            _log.exception("%s: snapshot %r could not be taken", self._dispatcher.name, body.name)
            result = failed_result(body, f"{error!r}; the server's log says more")
        with Held(self._lock):
            self._orders.finish(body, result)

    # ----------------------------------------------------------------------------------------- restoring

    def restore(self, paths: Sequence[str | Path], *, once: bool = False, **options: Any) -> RestoreCounts:
        """Restore files into the tables; see `Server.restore`.

        Args:
            options: Further arguments of `snapshots.restore`.
        """
        heads = snapshots.read_headers(paths)
        wanted = [path for path, head in heads.items() if not (once and head.id in self._restored())]
        done = RestoreCounts()
        if wanted:
            done = restore(
                wanted,
                self._dispatcher.tables,
                keeps_generators=self._options.seed is not None,
                limits=self._options.limits,
                now=self._clock(),
                inherit=self._inherit,
                take_parameters=self._configure,
                **options,
            )
        self._record_restored(list(heads.values()), once)
        return done

    def _record_restored(self, heads: Sequence[snapshots.SavedHead], once: bool) -> None:
        """Continue the versions of the files' models; with `once`, record that the files were restored."""
        with self._dispatcher.lock:
            for head in heads:
                self._dispatcher.models.skip_versions(head.about.models)
            if once:
                known = self._restored() | {head.id for head in heads}
                self._dispatcher.committer.add_setting(_RESTORED, " ".join(sorted(each.hex() for each in known)))

    def _restored(self) -> set[bytes]:
        """Return ids of snapshots restored into this folder with once=True."""
        ids = "" if self._store is None else self._store.settings().get(_RESTORED, "")
        return set(map(bytes.fromhex, ids.split()))

    def _configure(self, table: str, parameters: Parameters) -> None:
        self._dispatcher.configure(self._dispatcher.tables[table], parameters.to_wire())

    def _inherit(self, run: str, finished: bool, rows: Rows) -> None:
        try:
            self._dispatcher.store_inherited(run, finished, rows)
        except ProtocolError as error:
            raise ParameterError("paths", run, f"files of a run that this server can keep: {error.detail}") from error

    def load(self) -> None:
        """Restore the tables' content of the last close, at the start of the server, if the run is the same.

        Raises:
            SnapshotMismatch: samples were made with other values; the file stays unchanged.
            DataError: the file is damaged or has another format; likewise.
        """
        assert self._store is not None and self._options.state is not None
        folder, discards = self._store.folder, self._options.state.discard_mismatched
        for place in (folder, folder / ORDERED):
            if place.is_dir():
                remove_abandoned_in(place, ".snapshot")  # drafts of a server that was killed during a write
        path, known = folder / MEMORY, self._store.settings().get(HELD, "")
        if not path.exists():
            if known:
                self._report_missing(f"{path} is gone: the tables' content at the last close is lost")
                self._save_note("")
            return
        try:
            head = snapshots.read_headers([path])[path]
            if head.about.run != self._dispatcher.run_name:
                self._is_kept = True
                self._report_missing(
                    f"{path} stays and was not restored: it is of run {head.about.run!r}, and this server counts "
                    f"{self._dispatcher.run_name!r}. Server.restore reads it"
                )
                return
            if known == head.id.hex() and self._interval is None:
                self._report_missing(
                    f"{path} stays and was not restored: a former start restored it, and ended without a snapshot of "
                    "its own. Server.restore reads it; samples that were drawn since may be drawn once more"
                )
                return
            is_whole = self._load(path, skip_damaged=discards)
        except SnapshotMismatch as error:
            raise SnapshotMismatch(error.path, error.problem, f"{error.advice} {_WITHOUT}") from error
        except DataError as error:
            if not discards:
                raise DataError(error.path, f"{error.problem}. {_WITHOUT.removesuffix('.')}") from error
            self._report_missing(f"the tables' content at the last close was not restored: {error}")
            return
        self._save_note("" if self._interval is not None else head.id.hex())
        self._is_kept = not (is_whole or discards)

    def _load(self, path: Path, *, skip_damaged: bool) -> bool:
        """Restore the file; return True if all of its content is restored."""
        with SnapshotFile(path) as file:
            damage = file.verify()
            if damage and not skip_damaged:
                raise DataError(str(path), f"has {damage}")
            is_complete = file.end is not None and file.end.complete
        done = self.restore([path], skip_damaged=True, stays=False, is_same=True, discard_mismatched=skip_damaged)
        if damage or done.damaged or done.refused:
            self._report_missing(f"{path}: restored {done}")
        elif not is_complete:
            self._report_missing(f"{path} is incomplete, since the close ran out of time: restored {done}")
        else:
            _log.info("%s: restored from the last snapshot: %s", self._dispatcher.name, done)
        return not (done.damaged or done.refused)

    def _report_missing(self, sentence: str) -> None:
        self.missing.append(sentence)
        _log.warning("%s: %s", self._dispatcher.name, sentence)

    def _save_note(self, held: str) -> None:
        self._has_noted = True
        with self._dispatcher.lock:
            self._dispatcher.committer.add_setting(HELD, held)

    def wait_noted(self) -> None:
        """Wait until the note about the restored file is on disk, so that the next start does not restore it again."""
        if not self._has_noted:
            return
        is_saved = threading.Event()
        with self._dispatcher.lock:
            self._dispatcher.committer.call_after_save(is_saved.set)
        is_saved.wait(NOTE_TIMEOUT)
