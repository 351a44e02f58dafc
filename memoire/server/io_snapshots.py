"""A server's snapshots: taken while it goes on, by a call, an order from far away or a timer; and what comes back.

    state/  memory.snapshot        what was held when the server was closed, or when the timer last took it
            snapshots/NAME.snapshot    what somebody ordered under that name

One is taken at a time. The server only ever waits for one cache or episode to be looked up, never for the disk.
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

from memoire.accounting.merge import Rows
from memoire.accounting.runs import Keeper
from memoire.errors import Closed, MemoireError, ParameterError, ProtocolError, Refused
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.storage import private_files, snapshot, snapshot_file
from memoire.storage.restore import Restored, restore
from memoire.wire import messages
from memoire.wire.frames import Header

from .dispatch import Desk, Reply

_log = logging.getLogger(__name__)

MEMORY: Final = "memory.snapshot"
ORDERED: Final = "snapshots"
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MOST_ORDERS: Final = 64  # that are remembered
_RESTORED: Final = "restored"  # the setting that names them


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A file that was written, and what is in it."""

    path: str
    bytes: int
    seconds: float
    """That it took."""
    caches: int
    samples: int
    unused: int
    """Of these samples, those that were never drawn."""
    episodes: int
    entries: int
    complete: bool
    """Whether all is in it that was held: a server that has to end may not have had the time."""


class Archive:
    """The snapshots of one server. Thread-safe.

    Args:
        store: Its state folder; None where it has none, and then nothing is ordered or timed.
        every: Seconds between two that the timer takes; None takes none.
        is_closing: Whether the server ends: what is being written is given up then.
        clock: Seconds since 1970.
        at: Called with the name of each point between two steps, so that a test can end the process there.
    """

    def __init__(
        self,
        desk: Desk,
        *,
        store: Keeper | None,
        limits: Limits,
        every: float | None,
        is_closing: threading.Event,
        clock: Callable[[], float],
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        self._desk, self._store, self._limits, self._every = desk, store, limits, every
        self._folder = None if store is None else store.folder
        self._is_closing, self._clock, self._at = is_closing, clock, at
        self._taking = threading.Lock()
        self._lock = threading.Lock()  # for all that follows
        self._orders: OrderedDict[bytes, messages.Snapshot] = OrderedDict()
        self._timer: threading.Thread | None = None
        self.taken = 0
        """Snapshots that were written whole."""
        self.trouble = ""
        """Why the timer's last one was not; empty where it was."""
        self.newest: Snapshot | None = None

    # ---------------------------------------------------------------------------------------------------- taking

    def take(self, path: str | Path) -> Snapshot:
        """Write all that the tables hold to a file, while everything goes on.

        Raises:
            OSError: it cannot be written; a former file of this name is as it was.
            Closed, Refused: the server was closed, or another run began, meanwhile; likewise.
        """
        return self._take(Path(path))

    def _take(self, path: Path, deadline: float | None = None) -> Snapshot:
        """All that is held, or nothing; with a deadline as much as there is time for, also where the server ends."""
        desk, began = self._desk, time.monotonic()
        with self._taking:
            with desk.lock:
                run, finished, models = desk.run_name, desk.finished, desk.models.versions()
                accounts = desk.pages(desk.runs.current)
            tables = tuple(desk.tables)
            about = snapshot.about(
                tables, server=desk.name, run=run, finished=finished, taken=self._clock(), models=models
            )
            is_late = False

            def go_on() -> bool:
                nonlocal is_late
                if deadline is None and self._is_closing.is_set():
                    raise Closed("this server")
                if desk.run_name != run:
                    raise Refused(desk.name, "run", f"another run than {run!r} began meanwhile; take it again")
                is_late = is_late or (deadline is not None and time.monotonic() > deadline)
                return not is_late

            records = snapshot.records(tables, run, finished, accounts, go_on)
            # Asked once more at the end: of pools that were closed meanwhile nothing more came.
            end = snapshot_file.write(path, about, records, at=self._at, is_complete=go_on)
            made = _snapshot(path, end, time.monotonic() - began)
            with self._lock:
                self.taken += 1
                self.newest = made
            return made

    def save(self, deadline: float) -> None:
        """At the server's end: save what is held, as much of it as there is time for; nothing where nothing is held."""
        assert self._folder is not None
        if not any(table.pool.stats().bytes for table in self._desk.tables):
            return
        path = self._folder / MEMORY
        try:
            made = self._take(path, deadline)
        except (OSError, Refused) as error:
            _log.warning("%s: what is held was not saved: %s", path, error)
            return
        if not made.complete:
            saved = f"{made.caches} caches and {made.episodes} episodes"
            _log.warning("%s: only %s of those held were saved in time", self._desk.name, saved)

    def start(self) -> None:
        """Have the timer take one every so often, if it was asked for."""
        if self._every is None:
            return
        self._timer = threading.Thread(target=self._run, name="memoire-snapshots", daemon=True)
        self._timer.start()

    def _run(self) -> None:
        assert self._folder is not None and self._every is not None
        while not self._is_closing.wait(self._every):
            try:
                self.take(self._folder / MEMORY)
                self.trouble = ""
            except Closed:
                return
            except (OSError, Refused) as error:
                self.trouble = f"no snapshot could be written: {error}"
                _log.warning("%s: %s; the former one stays", self._desk.name, self.trouble)
            except Exception:
                self.trouble = "no snapshot could be taken; the log says why"
                _log.exception("%s: no snapshot could be taken; the former one stays", self._desk.name)

    def join(self, timeout: float) -> None:
        """Wait until whoever takes one has noticed that the server ends."""
        if self._taking.acquire(timeout=max(0.0, timeout)):
            self._taking.release()

    # ----------------------------------------------------------------------------------------- orders from far away

    def order(self, header: Header, body: messages.TakeSnapshot, _: Any) -> Reply:
        """Begin what is ordered, or say how it stands: whoever ordered it asks until it is done."""
        if self._folder is None:
            raise ProtocolError("missing", "this server has no state folder (state_dir) to keep a snapshot in")
        if not _NAME.fullmatch(body.name):
            raise ProtocolError("parameters", f"{body.name!r} is no name: letters, digits, _, . and -, at most 100")
        with self._lock:
            known = self._orders.get(body.order)
            if known is not None:
                return Reply(known)
            busy = next((order for order in self._orders.values() if order.state == "writing"), None)
            if busy is not None:
                raise ProtocolError("busy", f"snapshot {busy.name!r} is being written; order another one when it is")
            state = self._orders[body.order] = messages.Snapshot(name=body.name, state="writing")
            while len(self._orders) > _MOST_ORDERS:
                self._orders.popitem(last=False)
        threading.Thread(target=self._fulfil, args=(body,), name="memoire-snapshot", daemon=True).start()
        return Reply(state)

    def _fulfil(self, body: messages.TakeSnapshot) -> None:
        assert self._folder is not None
        folder = self._folder / ORDERED
        try:
            private_files.make_folder(folder)
            made = self.take(folder / f"{body.name}.snapshot")
            told = messages.Snapshot(
                name=body.name, state="done", path=made.path, bytes=made.bytes, seconds=made.seconds,
                caches=made.caches, samples=made.samples, episodes=made.episodes, entries=made.entries,
            )  # fmt: skip
        except (OSError, MemoireError) as error:
            told = messages.Snapshot(name=body.name, state="failed", text=str(error)[:1000])
        except Exception as error:
            _log.exception("%s: snapshot %r could not be taken", self._desk.name, body.name)
            told = messages.Snapshot(
                name=body.name, state="failed", text=f"{error!r}; the server's log says more"[:1000]
            )
        with self._lock:
            self._orders[body.order] = told

    # ------------------------------------------------------------------------------------------------- coming back

    def restore(
        self,
        paths: Sequence[str | Path],
        *,
        part: tuple[int, int] = (0, 1),
        configure: bool = False,
        skip_damaged: bool = False,
        stays: bool = True,
        once: bool = False,
    ) -> Restored:
        """Put what files hold into the tables; see `Server.restore` and `storage.restore`."""
        heads = snapshot.heads(paths)
        wanted = [path for path, head in heads.items() if not (once and head.id in self._restored())]
        if configure and wanted:
            self._configure([heads[path].about for path in wanted])
        done = Restored()
        if wanted:
            done = restore(
                wanted,
                self._desk.tables,
                part=part,
                skip_damaged=skip_damaged,
                stays=stays,
                limits=self._limits,
                now=self._clock(),
                inherit=self._inherit,
            )
        with self._desk.lock:
            for head in heads.values():
                self._desk.models.go_on_from(head.about.models)
            if self._desk.journal is not None and once:
                known = self._restored() | {head.id for head in heads.values()}
                self._desk.journal.setting(_RESTORED, " ".join(sorted(each.hex() for each in known)))
        return done

    def _restored(self) -> set[bytes]:
        """Snapshots that were restored into this folder once."""
        return (
            set() if self._store is None else set(map(bytes.fromhex, self._store.settings().get(_RESTORED, "").split()))
        )

    def _configure(self, files: Sequence[snapshot_file.About]) -> None:
        """Take the parameters of the files' tables; of several files those that were configured last."""
        newest: dict[str, snapshot_file.TableAbout] = {}
        for told in (table for about in files for table in about.tables):
            if told.name not in newest or told.parameters_version > newest[told.name].parameters_version:
                newest[told.name] = told
        for table in self._desk.tables:
            if table.name in newest:
                fields = Parameters.from_wire(newest[table.name].parameters).to_wire()
                self._desk.configure(table, fields)

    def _inherit(self, run: str, finished: bool, rows: Rows) -> None:
        try:
            self._desk.inherit(run, finished, rows)
        except ProtocolError as error:
            raise ParameterError("paths", run, f"of a run that fits in here: {error.detail}") from error

    def load(self, run: str | None) -> None:
        """At the server's begin: hold again what its former life held at its end, if it was of the run that is counted.

        Without a timer the file goes, so that a crash does not serve its samples again.
        """
        assert self._folder is not None
        path, desk = self._folder / MEMORY, self._desk
        for half in [*self._folder.glob("*.snapshot.new"), *(self._folder / ORDERED).glob("*.snapshot.new")]:
            half.unlink(missing_ok=True)  # of a life that was killed while it wrote
        if not path.exists():
            return
        try:
            if run == desk.run_name:
                done = self.restore([path], skip_damaged=True, stays=False)
                level = logging.WARNING if done.damaged or done.refused else logging.INFO
                _log.log(level, "%s: of its former life are held again: %s", desk.name, done)
        except MemoireError as error:
            _log.warning("%s: what its former life held is not held again: %s", desk.name, error)
        if self._every is None:
            path.unlink(missing_ok=True)


def _snapshot(path: Path, end: snapshot_file.End, seconds: float) -> Snapshot:
    def total(name: str) -> int:
        return sum(getattr(counts, name) for counts in end.tables)

    return Snapshot(
        path=str(path),
        bytes=path.stat().st_size,
        seconds=seconds,
        complete=end.complete,
        **{name: total(name) for name in ("caches", "samples", "unused", "episodes", "entries")},
    )
