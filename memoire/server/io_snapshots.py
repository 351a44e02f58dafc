"""A server's snapshots: taken while it goes on, by a call, an order from far away or a timer.

    state/  memory.snapshot        what was held when the server was closed, or when the timer last took it
            snapshots/NAME.snapshot    what somebody ordered under that name

One is taken at a time. The server only ever waits for one cache or episode to be looked up, and for the bookkeeping of
a table of episodes to be copied, never for the disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memoire._core import Held
from memoire.accounting.runs import StateStore
from memoire.errors import Closed, MemoireError, ProtocolError, Refused
from memoire.pool.desk import Reply
from memoire.storage import private_files, snapshot, snapshot_file
from memoire.wire import messages
from memoire.wire.frames import MessageHeader

from .dispatch import Dispatcher
from .orders import SnapshotOrders, failed

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
        dispatcher: Dispatcher,
        *,
        store: StateStore | None,
        every: float | None,
        is_closing: threading.Event,
        clock: Callable[[], float],
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        self._dispatcher, self._every = dispatcher, every
        self._folder = None if store is None else store.folder
        self._is_closing, self._clock, self._at = is_closing, clock, at
        self._taking = threading.RLock()
        self._lock = threading.Lock()  # for all that follows
        self._orders = SnapshotOrders()
        self._timer: threading.Thread | None = None
        self.taken = 0
        """Snapshots that were written whole."""
        self.trouble = ""
        """Why the timer's last one was not; empty where it was."""
        self.newest: Snapshot | None = None
        self.is_kept = False
        """Whether `MEMORY` has what is not held here: it is put aside, not replaced."""

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
        dispatcher, began = self._dispatcher, time.monotonic()
        with self._taking:
            with dispatcher.lock:
                run, finished, models = dispatcher.run_name, dispatcher.finished, dispatcher.models.versions()
                accounts = dispatcher.pages(dispatcher.runs.current)
            tables = tuple(dispatcher.tables)
            about = snapshot.about(
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

            records = snapshot.records(tables, run, finished, accounts, go_on)
            # Asked once more at the end: of pools that were closed meanwhile nothing more came.
            end = snapshot_file.write(path, about, records, at=self._at, is_complete=go_on)
            made = _snapshot(path, end, time.monotonic() - began)
            with Held(self._lock):
                self.taken += 1
                self.newest = made
            return made

    def _replace(self, deadline: float | None = None) -> Snapshot:
        """Take one in the place of the folder's own file; that which must not go is in `ORDERED` then."""
        assert self._folder is not None
        path = self._folder / MEMORY
        with self._taking:
            if self.is_kept and path.exists():
                private_files.make_folder(self._folder / ORDERED)
                aside = self._folder / ORDERED / f"kept-{snapshot.heads([path])[path].id.hex()}.snapshot"
                path.replace(aside)
                _log.warning("%s: %s is %s from now on", self._dispatcher.name, path, aside)
            self.is_kept = False
            made = self._take(path, deadline)
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
            private_files.make_folder(folder)
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


def _snapshot(path: Path, end: snapshot_file.EndRecord, seconds: float) -> Snapshot:
    def total(name: str) -> int:
        return sum(getattr(counts, name) for counts in end.tables)

    return Snapshot(
        path=str(path),
        bytes=path.stat().st_size,
        seconds=seconds,
        complete=end.complete,
        **{name: total(name) for name in ("caches", "samples", "unused", "episodes", "entries")},
    )
