"""What the scripts of this folder share: where things are, what a process uses, and how a result is printed."""

import ast
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
TESTS = ROOT / "tests"
CANNOT = 77
"""Exit status of a script that cannot run here; why is on its standard output."""

sys.path[1:1] = (str(TESTS / part) for part in ("", "support", "disk", "kubernetes"))  # after this folder


def run_named(trials: Mapping[str, Any]) -> None:
    """Run the trial that the command line names, with the options behind the name; end with its status."""
    if len(sys.argv) < 2 or sys.argv[1] not in names_in(Path(sys.argv[0])):
        sys.exit(f"name one of: {', '.join(names_in(Path(sys.argv[0])))}")
    sys.exit(trials[sys.argv.pop(1)]())


def names_in(path: Path) -> dict[str, str]:
    """Trials of a program, and what is said of each: its functions whose docstrings begin with a question."""
    functions = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    said = {node.name: ast.get_docstring(node) or "" for node in functions}
    return {name: text for name, text in said.items() if text.partition("\n")[0].endswith("?")}


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
