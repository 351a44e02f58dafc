"""Helpers for the scripts of this folder: paths, resources of a process, and printed results."""

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
"""Exit status of a script that cannot run on this machine; its standard output gives the reason."""

sys.path[1:1] = (str(TESTS / part) for part in ("", "support", "disk", "kubernetes"))  # the soak folder stays first


def run_named(trials: Mapping[str, Any]) -> None:
    """Run the trial that the command line names, with the options behind the name; end with its status."""
    if len(sys.argv) < 2 or sys.argv[1] not in names_in(Path(sys.argv[0])):
        sys.exit(f"name one of: {', '.join(names_in(Path(sys.argv[0])))}")
    sys.exit(trials[sys.argv.pop(1)]())


def names_in(path: Path) -> dict[str, str]:
    """Return the trials of a program with their texts: functions whose docstrings begin with a question."""
    functions = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    texts = {node.name: ast.get_docstring(node) or "" for node in functions}
    return {name: text for name, text in texts.items() if text.partition("\n")[0].endswith("?")}


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table, in which all columns but the first are aligned to the right."""
    lines = [list(map(str, head)), ["---", *["---:"] * (len(head) - 1)], *(list(map(str, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def memory(pid: int | str = "self") -> int:
    """Return the bytes of a process' resident memory."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int | str = "self") -> int:
    """Return the number of files and sockets that a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


@contextmanager
def folder() -> Iterator[Path]:
    """Yield a temporary folder, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="memoire-soak-") as name:
        yield Path(name)


def end(violations: Sequence[str]) -> int:
    """Print the violations; return the exit status."""
    for violation in violations:
        say(f"VIOLATED: {violation}")
    return 1 if violations else 0
