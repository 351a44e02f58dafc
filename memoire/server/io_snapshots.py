"""A server's snapshots: taken while it goes on, by a call, an order from far away or a timer.

    state/  memory.snapshot        what was held when the server was closed, or when the timer last took it
            snapshots/NAME.snapshot    what somebody ordered under that name

One is taken at a time. The server only ever waits for one cache or episode to be looked up, and for the bookkeeping of
a table of episodes to be copied, never for the disk.

What comes back into a server: files of snapshots, by a call or at its begin.

Snapshots that were ordered from far away: which one is being written, and how the others went. Pure.

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
"""Orders that are remembered, the newest. If an older one is asked for again, its snapshot is written again."""
MAX_TEXT: Final = 1000
"""Characters that tell why a snapshot could not be taken."""
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class SnapshotOrders:
    """The orders of one server, by their numbers. The owner locks."""

    def __init__(self) -> None:
        self._orders: OrderedDict[bytes, messages.Snapshot] = OrderedDict()

    def receive(self, body: messages.TakeSnapshot) -> tuple[messages.Snapshot, bool]:
        """How far an order is, and whether it is new and has to be carried out.

        Raises:
            ProtocolError: the name is malformed (code "parameters"), or another one is being written (code "busy").
        """
        if not _NAME.fullmatch(body.name):
            raise ProtocolError("parameters", f"{body.name!r} is no name: letters, digits, _, . and -, at most 100")
        known = self._orders.get(body.order)
        if known is not None:
            return known, False
        busy = next((order for order in self._orders.values() if order.state == "writing"), None)
        if busy is not None:
            raise ProtocolError("busy", f"snapshot {busy.name!r} is being written; order another one when it is")
        state = self._orders[body.order] = messages.Snapshot(name=body.name, state="writing")
        while len(self._orders) > MAX_ORDERS:
            self._orders.popitem(last=False)
        return state, True

    def finish(self, body: messages.TakeSnapshot, told: messages.Snapshot) -> None:
        """An order was carried out, or failed."""
        self._orders[body.order] = told


def failed(body: messages.TakeSnapshot, why: str) -> messages.Snapshot:
    """What is told of an order that could not be carried out."""
    return messages.Snapshot(name=body.name, state="failed", text=escape(why)[:MAX_TEXT])


_log = logging.getLogger(__name__)

MEMORY: Final = "memory.snapshot"
ORDERED: Final = "snapshots"
HELD: Final = "memory"
"""The setting that says of `MEMORY`: "saved", that a life has written it, or the id of the one that a life without a
timer holds again."""


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


_WITHOUT: Final = (
    "discard_mismatched=True (--discard-mismatched) starts with what is whole and fits; then the next snapshot takes "
    "the file's place."
)
NOTE_TIMEOUT: Final = 5.0
"""Seconds that a start waits for its note of the file that it holds again."""
_RESTORED: Final = "restored"  # the setting that names files that were restored once


class Archive:
    """The snapshots of one server: takes them, and puts back what files hold. Thread-safe.

    Args:
        store: Its state folder; None where it has none, and then nothing is ordered or timed.
        options: Of the server. With `state.snapshot_every` a timer replaces the folder's own file, and each start holds
            again what that has. Else only one life does, so that a crash does not serve its samples again. With a seed,
            a file that another server wrote does not change the generator of the draws.
        is_closing: Whether the server ends: what is being written is given up then.
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
        self._every = None if options.state is None else options.state.snapshot_every
        self._folder = None if store is None else store.folder
        self._is_closing, self._clock, self._at = is_closing, options.process.clock, at
        self._taking = threading.RLock()
        self._lock = threading.Lock()  # for all that follows
        self._orders = SnapshotOrders()
        self._timer: threading.Thread | None = None
        self.taken = 0
        """Snapshots that were written whole."""
        self.trouble = ""
        """Why the timer's last one was not; empty where it was."""
        self.missing: list[str] = []
        """What the server was begun without, a sentence each."""
        self._is_kept = self._has_noted = False
        """Whether `MEMORY` has what is not held here: it is put aside, not replaced. Whether `HELD` was set."""

    # ---------------------------------------------------------------------------------------------------- taking

    def take(self, path: Path, deadline: float | None = None) -> Snapshot:
        """Write all that the tables hold to a file, while everything goes on, or nothing; with a deadline as much as
        there is time for, also where the server ends.

        Raises:
            OSError: it cannot be written; a former file of this name is as it was.
            Closed, Refused: the server was closed, or another run began, meanwhile; likewise.
        """
        dispatcher, began = self._dispatcher, time.monotonic()
        with self._taking:
            with dispatcher.lock:
                run, finished, models = dispatcher.run_name, dispatcher.finished, dispatcher.models.versions()
                accounts = dispatcher.pages(dispatcher.runs.current)
            tables = tuple(dispatcher.tables)
            about = snapshots.about(
                tables, server=dispatcher.name, run=run, finished=finished, taken=self._clock(), models=models
            )
            is_late = False

            def go_on() -> bool:
                nonlocal is_late
                if deadline is None and self._is_closing.is_set():
                    raise Closed("this server")
                if dispatcher.run_name != run:
                    raise Refused(dispatcher.name, "run", f"another run than {run!r} began meanwhile; take it again")
                is_late = is_late or (deadline is not None and time.monotonic() > deadline)
                return not is_late

            records = snapshots.records(tables, run, finished, accounts, go_on)
            # Asked once more at the end: of pools that were closed meanwhile nothing more came.
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
        """Take one in the place of the folder's own file; that which must not go is in `ORDERED` then."""
        assert self._folder is not None
        path = self._folder / MEMORY
        with self._taking:
            if self._is_kept and path.exists():
                make_folder(self._folder / ORDERED)
                aside = self._folder / ORDERED / f"kept-{snapshots.heads([path])[path].id.hex()}.snapshot"
                path.replace(aside)
                _log.warning("%s: %s is %s from now on", self._dispatcher.name, path, aside)
            self._is_kept = False
            made = self.take(path, deadline)
        with self._dispatcher.lock:
            self._dispatcher.committer.add_setting(HELD, "saved")
        return made

    def save(self, deadline: float) -> None:
        """At the server's end: save what is held, as much of it as there is time for, and what draws go on from."""
        assert self._folder is not None
        path = self._folder / MEMORY
        try:
            made = self._replace(deadline)
        except (OSError, MemoireError) as error:
            _log.warning("%s: what is held was not saved: %s", path, error)
            return
        if not made.complete:
            saved = f"{made.caches} caches and {made.episodes} episodes"
            _log.warning("%s: only %s of those held were saved in time", self._dispatcher.name, saved)

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
                self._replace()
                self.trouble = ""
            except Closed:
                return
            except (OSError, MemoireError) as error:
                self.trouble = f"no snapshot could be written: {error}"
                _log.warning("%s: %s; the former one stays", self._dispatcher.name, self.trouble)
            except Exception:
                self.trouble = "no snapshot could be taken; the log says why"
                _log.exception("%s: no snapshot could be taken; the former one stays", self._dispatcher.name)

    # ----------------------------------------------------------------------------------------- orders from far away

    def order(self, header: MessageHeader, body: messages.TakeSnapshot, _: Any) -> Reply:
        """Begin what is ordered, or say how far it is: whoever ordered it asks until it is done."""
        if self._folder is None:
            raise ProtocolError("missing", "this server has no state folder (state_dir) to keep a snapshot in")
        with Held(self._lock):
            state, is_new = self._orders.receive(body)
        if is_new:
            threading.Thread(target=self._fulfil, args=(body,), name="memoire-snapshot", daemon=True).start()
        return Reply(state)

    def _fulfil(self, body: messages.TakeSnapshot) -> None:
        assert self._folder is not None
        folder = self._folder / ORDERED
        try:
            make_folder(folder)
            made = self.take(folder / f"{body.name}.snapshot")
            told = messages.Snapshot(
                name=body.name, state="done", path=made.path, bytes=made.bytes, seconds=made.seconds,
                caches=made.caches, samples=made.samples, episodes=made.episodes, entries=made.entries,
            )  # fmt: skip
        except (OSError, MemoireError) as error:
            told = failed(body, str(error))
        except Exception as error:
            _log.exception("%s: snapshot %r could not be taken", self._dispatcher.name, body.name)
            told = failed(body, f"{error!r}; the server's log says more")
        with Held(self._lock):
            self._orders.finish(body, told)

    # ----------------------------------------------------------------------------------------- putting back

    def restore(self, paths: Sequence[str | Path], *, once: bool = False, **options: Any) -> RestoreCounts:
        """Put what files hold into the tables; see `Server.restore`.

        Args:
            options: As of `snapshots.restore`.
        """
        heads = snapshots.heads(paths)
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
        self._remember(list(heads.values()), once)
        return done

    def _remember(self, heads: Sequence[snapshots.SavedHead], once: bool) -> None:
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

    def load(self) -> None:
        """At the server's begin: hold again what its former life held at its end, if that counted the same run.

        Raises:
            SnapshotMismatch: it was made with other values, and the file stays as it is.
            DataError: the file is of another form, or damaged; likewise.
        """
        assert self._store is not None and self._options.state is not None
        folder, discards = self._store.folder, self._options.state.discard_mismatched
        for place in (folder, folder / ORDERED):
            if place.is_dir():
                remove_abandoned_in(place, ".snapshot")  # of a life that was killed while it wrote
        path, known = folder / MEMORY, self._store.settings().get(HELD, "")
        if not path.exists():
            if known:
                self._miss(f"{path} is gone: what the former life held is not held again")
                self._note("")
            return
        try:
            head = snapshots.heads([path])[path]
            if head.about.run != self._dispatcher.run_name:
                self._is_kept = True
                self._miss(
                    f"{path} stays and is not held again: it is of run {head.about.run!r}, and this server counts "
                    f"{self._dispatcher.run_name!r}. Server.restore takes it"
                )
                return
            if known == head.id.hex() and self._every is None:
                self._miss(
                    f"{path} stays and is not held again: a former life did, and ended without a snapshot of its own. "
                    "Server.restore takes it; samples that were drawn since may be drawn once more"
                )
                return
            is_whole = self._load(path, skip_damaged=discards)
        except SnapshotMismatch as error:
            raise SnapshotMismatch(error.path, error.problem, f"{error.advice} {_WITHOUT}") from error
        except DataError as error:
            if not discards:
                raise DataError(error.path, f"{error.problem}. {_WITHOUT}") from error
            self._miss(f"what the former life held is not held again: {error}")
            return
        self._note("" if self._every is not None else head.id.hex())
        self._is_kept = not (is_whole or discards)

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
