"""The file `committed`: how many transactions the database must have had, so that a log of SQLite's that was removed is
missed.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

from memoire.replay.replacement import replace_file
from memoire.wire import _bytes

from . import private_files

_FORM: Final = struct.Struct("<8sQQ")


class Witness:
    """The witness of a state folder. It is only read before `begin`, which makes it if it is not there.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._opened = folder / "committed", -1
        self.found: int | None = 0
        """Transactions that it said when it was opened: 0 where it was missing, None where it is damaged."""
        if not self._path.exists():
            return
        self._open()
        try:
            content = os.pread(self._opened, 100, 0)
        except BaseException:
            self.close()
            raise
        generation = _FORM.unpack(content)[1] if len(content) == _FORM.size else 0
        self.found = int(generation) if content == _testimony(generation) else None

    def _open(self) -> None:
        self._opened = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def begin(self, generation: int) -> None:
        """Write it whole: it may have been damaged, or missing."""
        if self._opened < 0:
            replace_file(self._path, _testimony(generation), mode=private_files.mode_in(self._path.parent))
            self._open()
        os.ftruncate(self._opened, _FORM.size)
        self.write(generation)

    def write(self, generation: int) -> None:
        """Testify to so many transactions."""
        # Never synced: after a power failure it may be behind the database, which is right, but never ahead of it.
        os.pwrite(self._opened, _testimony(generation), 0)

    def close(self) -> None:
        """Close the file; once is enough."""
        if self._opened >= 0:
            os.close(self._opened)
        self._opened = -1


def _testimony(generation: int) -> bytes:
    facts = struct.pack("<8sQ", b"memowits", generation)
    return facts + struct.pack("<Q", _bytes.checksum(facts))
