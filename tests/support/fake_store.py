"""State store that keeps everything in memory, for tests of servers that save and restore.

A `Disk` outlives the stores on it, as a folder outlives its servers. Tests make a disk slow, full or broken.
"""

import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path

from memoire.accounting.packing import AccountPacker, NumberedTexts, StoredAccounts
from memoire.accounting.runs import FolderStats, SavedGroup
from memoire.disk.records import LAST, pack_accounts
from memoire.wire.frames import name_hash


class Disk:
    """Content of a fake disk: only groups that were saved as a whole."""

    def __init__(self, folder=None, epoch=0):
        self.lines, self.runs, self.models, self.texts = {}, {}, {}, {}
        self.accounts = {}  # bodies by run and key
        self.words = NumberedTexts()
        self.home = name_hash("home")
        self.epoch = epoch  # number of stores on this disk and the lost disk
        self.since = epoch + 1  # the state is complete from this epoch on
        self.saved = []  # groups
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)  # for files outside the database
        self.may_save = threading.Event()  # cleared: the disk is slow
        self.may_save.set()
        self.is_full = False  # the store reports a full disk as trouble
        self.error = None  # fails every save

    def save(self, group: SavedGroup):
        names = {run: run for run, _ in (*group.accounts, *group.inherited)}
        packing = AccountPacker(self.home, self.words)
        self.accounts |= pack_accounts(group, names, packing, lambda run, key: self.accounts.get((run, key)))
        for run, entry in group.lines:
            self.lines.setdefault(run, []).append(entry)
        for facts in group.runs:
            self.runs[facts.name] = facts
        for run, model in group.models:
            self.models.setdefault(run, {})[model.topic] = model
        self.texts.update(group.settings)
        self.saved.append(group)


class DiskReader:
    """Accounts of one run on a `Disk`: a `memoire.accounting.packing.PackedReader`."""

    def __init__(self, disk, run):
        self.disk, self.run = disk, run

    def body(self, key):
        return self.disk.accounts.get((self.run, key))

    def accounts_after(self, key, most, before=LAST):
        keys = sorted(other for run, other in list(self.disk.accounts) if run == self.run and key <= other < before)
        return [(other, self.disk.accounts[self.run, other]) for other in keys[:most]]

    def add_file_to_errors(self):
        return nullcontext()


class MemoryStore:
    """State store on a `Disk`: a `memoire.accounting.runs.StateStore`."""

    def __init__(self, disk, name="home"):
        self.disk, self.name, self.folder = disk, name, disk.folder
        self.restored, self.missing = 0, []
        disk.home = name_hash(name)
        disk.epoch += 1
        self.epoch, self.complete_since = disk.epoch, disk.since
        self.woken = threading.Event()
        self._stopping = False
        self._give_up = float("inf")
        self._thread = None
        self.is_cut = False  # kill -9: no more saves or reports

    def runs(self):
        return sorted(self.disk.runs.values(), key=lambda facts: facts.began)

    def accounts(self, run):
        return StoredAccounts(AccountPacker(self.disk.home, self.disk.words), DiskReader(self.disk, run))

    def line_count(self, run):
        return len(self.disk.lines.get(run, []))

    def search(self, run, wanted, *, most, newest_first):
        lines = self.disk.lines.get(run, [])
        return lines[::-1][:most] if newest_first else lines[:most]

    def models(self, run):
        return list(self.disk.models.get(run, {}).values())

    def versions(self):
        kept = [model for models in self.disk.models.values() for model in models.values()]
        return {topic: max(m.version for m in kept if m.topic == topic) for topic in {m.topic for m in kept}}

    def settings(self):
        return dict(self.disk.texts)

    def disk_space(self):
        return FolderStats(0, 1 << 30, 1 << 40, self.problem)

    @property
    def is_healthy(self):
        return not self.disk.is_full and self.disk.error is None

    @property
    def problem(self):
        return "" if self.is_healthy else str(self.disk.error or "the disk is full")

    def start(self, collect, done, failed, delayed):
        self._collect, self._done, self._failed, self._delayed = collect, done, failed, delayed
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wake(self):
        self.woken.set()

    def _run(self):
        while not self._stopping:
            self.woken.wait(0.2)
            self.woken.clear()
            if not self._save_all():
                return

    def _save_all(self):
        while (group := self._collect()) is not None:
            is_reported = False
            while self.disk.is_full or not self.disk.may_save.wait(0.05):
                if self.disk.is_full and not is_reported:
                    is_reported = True
                    self._delayed()
                time.sleep(0.01)
                if time.monotonic() > self._give_up:
                    return False
            if self.is_cut:
                return False
            if self.disk.error is not None:
                self._failed(self.disk.error)
                return False
            self.disk.save(group)
            self._done(group)
        return True

    def cut(self):
        """Save nothing from now on, as if the process had been killed."""
        self.is_cut = True

    def close(self, timeout):
        deadline = time.monotonic() + timeout
        self._stopping, self._give_up = True, deadline
        self.woken.set()
        if self._thread is None:
            return True
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive() and self._save_all()
