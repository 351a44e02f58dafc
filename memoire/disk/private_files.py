"""Files that hold what others may not read: made for their owner alone, and never through a link that somebody left.

The umask of most systems lets everybody read what a program makes, and a folder that was there before may let everybody
in. So each file of a state folder is made here, with a mode of its own:

    the folder                                         a file in it
    any                                                0600  the owner reads and writes
    setgid and writable for its group (2770, 2775)     0660  its group does, too

The second one is how people say that a folder belongs to a group, and what Kubernetes makes of a volume with an
`fsGroup`: a Pod that has another user and the same group goes on with its state. SQLite makes its other files with the
mode of the database.
"""

import contextlib
import os
import stat
from pathlib import Path

OWNER, GROUP = 0o600, 0o660
_SHARED = stat.S_ISGID | stat.S_IWGRP
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


def mode_in(folder: Path) -> int:
    """Mode of a file in this folder."""
    return GROUP if folder.stat().st_mode & _SHARED == _SHARED else OWNER


def create(path: Path) -> int:
    """Make a file and open it to be read and written. Raises FileExistsError: something is there, a link even."""
    mode = mode_in(path.parent)
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, mode)
    with contextlib.suppress(OSError):  # a file system without modes
        os.fchmod(opened, mode)  # the umask has taken some away
    return opened


def append(path: Path) -> int:
    """Open a file to be written to at its end, made where it is not there. Raises OSError: it is a link."""
    try:
        return os.open(path, os.O_RDWR | os.O_APPEND | _FLAGS)
    except FileNotFoundError:
        os.close(create(path))
        return os.open(path, os.O_RDWR | os.O_APPEND | _FLAGS)


def make_folder(folder: Path) -> None:
    """Make a folder for such files; one inside of a group's is the group's, too. One that is there stays as it is."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return
    if folder.absolute().parent.stat().st_mode & _SHARED == _SHARED:
        with contextlib.suppress(OSError):
            folder.chmod(0o770 | stat.S_ISGID)


def tighten(path: Path) -> None:
    """Take from others what a file that was made before lets them do. Links and other people's files stay."""
    with contextlib.suppress(OSError):
        facts = path.lstat()
        mode = stat.S_IMODE(facts.st_mode)
        wanted = mode & mode_in(path.parent)
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and wanted != mode:
            path.chmod(wanted)
