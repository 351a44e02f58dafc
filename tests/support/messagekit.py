"""Recorder of the texts that memoire raises, logs and prints, by place, in tests/messages.txt.

    make messages                                runs the tests with the recorder in each process, then writes the file
    python tests/support/messagekit.py --write   only adds what the folder MEMOIRE_MESSAGES has recorded
    python tests/support/messagekit.py           lists the places that have no recorded text

A place is a call in the source code that creates an error of memoire, writes a log line or prints. The texts of earlier
runs stay as long as their place exists, so that the file changes only if texts do. Numbers, ids, addresses and paths
are masked. A place without a recorded text has its source code, after "= ".
"""

import ast
import builtins
import contextlib
import json
import logging
import os
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = ROOT / "tests" / "messages.txt"
FOLDER = os.environ.get("MEMOIRE_MESSAGES", "")
LEVELS = ("info", "warning", "error", "exception", "critical")
MAX_TEXTS = 3
"""Texts that are kept of a place: some places write the texts of many callers."""
MAX_LENGTH = 400
MASKS = (
    (r"\b(?:tcp|ipc|inproc|https?)://[^\s'\",;)]+", "ADDRESS"),
    (r"(?<![\w.])/(?:[\w.@+-]+/)*[\w.@+-]+", "PATH"),
    (r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b", "ID"),
    (r"\b\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?", "N"),
    (r"\s+", " "),
)


@dataclass(frozen=True)
class Place:
    """Call in the source code that writes a text."""

    file: str
    function: str
    kind: str
    """Class of the error, or level of the log line, or "print"."""
    number: int
    """Position among the calls of this kind in the function, from 1."""
    lines: range
    source: str
    """Source code of the call."""

    @property
    def key(self) -> str:
        """Name of the place in the file, which does not depend on line numbers."""
        return f"{self.file} {self.function} {self.kind} {self.number}"


# ------------------------------------------------------------------------------------------------------ places


def trees() -> dict[str, ast.Module]:
    """Parse all Python files of the product."""
    paths = [path for folder in ("memoire", "dashboard") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def error_classes(parsed: dict[str, ast.Module]) -> set[str]:
    """Return the names of all classes below `MemoireError`."""
    classes = [node for tree in parsed.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {"MemoireError"}
    while more := {each.name for each in classes if {last_name(base) for base in each.bases} & names} - names:
        names |= more
    return names


def places() -> list[Place]:
    """Return every place in the source code."""
    parsed = trees()
    errors = error_classes(parsed)
    listed: list[Place] = []

    def kind_of(call: ast.Call) -> str:
        name = last_name(call.func)
        if isinstance(call.func, ast.Attribute) and name in LEVELS and last_name(call.func.value).endswith("log"):
            return name
        if isinstance(call.func, ast.Attribute) and name == "with_text":
            name = last_name(call.func.value)
        return name if name in errors or (name == "print" and isinstance(call.func, ast.Name)) else ""

    def visit(node: ast.AST, file: str, function: str, numbers: dict[tuple[str, str], int]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{function}.{child.name}".lstrip(".")
            if isinstance(child, ast.Call) and (kind := kind_of(child)):
                numbers[function, kind] += 1
                lines = range(child.lineno, (child.end_lineno or child.lineno) + 1)
                number, source = numbers[function, kind], ast.unparse(child)
                listed.append(Place(file, function or "module", kind, number, lines, source))
            visit(child, file, inner, numbers)

    for file, tree in parsed.items():
        visit(tree, file, "", defaultdict(int))
    return listed


# ------------------------------------------------------------------------------------------------------ recorder


def note(frame: FrameType | None, kind: str, text: str) -> None:
    """Append a text to the file of this process, if a function of the product wrote it."""
    while frame is not None and frame.f_code.co_filename.endswith(("/memoire/errors.py", "/messagekit.py")):
        frame = frame.f_back
    if frame is None:
        return
    _, middle, file = frame.f_code.co_filename.rpartition("/memoire/")
    if not middle and "/dashboard/" in frame.f_code.co_filename:
        file = frame.f_code.co_filename.rpartition("/dashboard/")[2]
        middle = "/dashboard/"
    if middle:
        file = f"{middle.strip('/')}/{file}".replace("memoire/dashboard/", "dashboard/", 1)
        row = {"file": file, "line": frame.f_lineno, "kind": kind, "text": text}
        with contextlib.suppress(OSError):  # a test may limit the size of files
            with open(os.path.join(FOLDER, f"{os.getpid()}.jsonl"), "a", encoding="utf-8", errors="replace") as lines:
                lines.write(json.dumps(row) + "\n")


class Recording(type):
    """Metaclass of `MemoireError` and all classes below: it records each error after its creation."""

    def __call__(cls, *facts: Any, **named: Any) -> Any:
        error = super().__call__(*facts, **named)
        if error.sentence is None:
            note(sys._getframe(1), cls.__name__, str(error))
        return error


class RecordingLoader(SourceFileLoader):
    """Loader of memoire.errors that gives its classes the metaclass `Recording`."""

    HEAD = "class MemoireError(Exception"

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text(encoding="utf-8")
        assert source.count(self.HEAD) == 1
        return compile(source.replace(self.HEAD, f"{self.HEAD}, metaclass=_Recording"), self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        module._Recording = Recording  # type: ignore[attr-defined]
        super().exec_module(module)
        create = module.MemoireError.with_text.__func__

        def with_text(cls: Any, text: str) -> Any:
            note(sys._getframe(1), cls.__name__, text)
            return create(cls, text)

        module.MemoireError.with_text = classmethod(with_text)

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """Find memoire.errors, and leave other modules to Python."""
        spec = PathFinder.find_spec(name, path) if name == "memoire.errors" else None
        if spec is not None and spec.origin is not None:
            spec.loader = RecordingLoader(name, spec.origin)
        return spec


def install() -> None:
    """Record the texts of this process, which has not imported memoire yet."""
    assert "memoire.errors" not in sys.modules
    sys.meta_path.insert(0, RecordingLoader)
    for level in LEVELS:
        write = getattr(logging.Logger, level)

        def log(
            self: logging.Logger, text: object, *args: Any, _write: Any = write, _level: str = level, **options: Any
        ) -> None:
            try:
                note(sys._getframe(1), _level, str(text) % args if args else str(text))
            except (TypeError, ValueError):
                pass  # logging itself reports it
            options["stacklevel"] = options.get("stacklevel", 1) + 1
            _write(self, text, *args, **options)

        setattr(logging.Logger, level, log)
    say = builtins.print

    def recording_print(*values: Any, **options: Any) -> None:
        note(sys._getframe(1), "print", " ".join(map(str, values)))
        say(*values, **options)

    builtins.print = recording_print


# ------------------------------------------------------------------------------------------------------ file


def masked(text: str) -> str:
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text)
    return text.strip()[:MAX_LENGTH]


def read() -> dict[str, list[str]]:
    """Read the texts of each place from the file."""
    texts: dict[str, list[str]] = {}
    key = ""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    for line in lines:
        if line.startswith("  "):
            texts[key].append(line.strip())
        elif line and not line.startswith("#"):
            key = line
            texts[key] = []
    return texts


def recorded() -> dict[str, set[str]]:
    """Return the texts that processes have appended in the folder, by place."""
    by_file: dict[str, list[Place]] = defaultdict(list)
    for place in places():
        by_file[place.file].append(place)
    texts: dict[str, set[str]] = defaultdict(set)
    for path in sorted(Path(FOLDER).glob("*.jsonl")) if FOLDER else ():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the process was killed while it wrote
            for place in by_file[row["file"]]:
                if place.kind == row["kind"] and row["line"] in place.lines:
                    texts[place.key].add(masked(row["text"]))
    return texts


def write() -> None:
    """Write the file: texts that were recorded now, and former texts of places that still exist."""
    former, texts = read(), recorded()
    lines = ["# Texts that memoire raises, logs and prints, by place: what `make messages` recorded.\n"]
    for place in sorted(places(), key=lambda place: place.key):
        all_texts = [*texts[place.key]] or [text for text in former.get(place.key, []) if not text.startswith("= ")]
        chosen = sorted(all_texts, key=lambda text: (len(text), text))[:MAX_TEXTS]
        chosen = chosen or [f"= {' '.join(place.source.split())}"[:MAX_LENGTH]]
        lines.append(f"{place.key}\n" + "".join(f"  {text}\n" for text in chosen))
    FILE.write_text("".join(lines), encoding="utf-8")


def silent() -> list[str]:
    """Return the places that have no recorded text in the file."""
    return [key for key, texts in read().items() if texts[0].startswith("= ")]


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
    missing = silent()
    print(*missing, f"{len(missing)} of {len(places())} places have no recorded text", sep="\n")
