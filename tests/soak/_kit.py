"""What the scripts of this folder share: where things are, what a process uses, and how a result is printed."""

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TESTS = ROOT / "tests"
CANNOT = 77
"""Exit status of a script that cannot run here; why is on its standard output."""

sys.path[1:1] = [str(TESTS), str(TESTS / "support")]  # after this folder: the tests' helpers, and the package `history`


def say(*words: object) -> None:
    """Progress, for whoever watches."""
    print(*words, file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    lines = [list(map(str, head)), ["---", *["---:"] * (len(head) - 1)], *(list(map(str, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def memory(pid: int | str = "self") -> int:
    """Bytes of a process' resident memory now."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int | str = "self") -> int:
    """Files and sockets that a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int | str = "self") -> int:
    """Threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))


@contextmanager
def folder() -> Iterator[Path]:
    """A folder on a disk (not tmpfs, where it can be told) that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="memoire-soak-") as name:
        yield Path(name)


def end(violations: Sequence[str]) -> int:
    """The exit status; says what was violated."""
    for violation in violations:
        say(f"VIOLATED: {violation}")
    return 1 if violations else 0
