"""Which release this is, and what a node calls itself when it says HELLO or WELCOME.

Imported before all else: says so if a compiled module is missing, as in a checkout that was never built.

Python itself would speak of a circular import.

`imports_of` finds the names that a module imports when they are used.
"""

import dis
import functools
import itertools
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from .errors import NotBuilt

VERSION = "0.1.0"
SOFTWARE = f"memoire {VERSION}"


COMPILED = ("_core", "net/_multipart", "wire/_bytes", "wire/_container", "tables/caches/_draw")
"""Modules that setup.py compiles, by their places in this folder."""

FOLDER = Path(__file__).resolve().parent


def is_built(folder: Path) -> bool:
    """Whether every compiled module is there."""
    return all(PathFinder.find_spec(Path(name).name, [str((folder / name).parent)]) is not None for name in COMPILED)


if not is_built(FOLDER):
    others = (Path(path or ".").resolve() / "memoire" for path in sys.path)
    raise NotBuilt(str(FOLDER), next((str(each) for each in others if each != FOLDER and is_built(each)), None))


@functools.cache
def imports_of(module: str) -> dict[str, str]:
    """The names that a module imports for type checkers alone (`if TYPE_CHECKING`), with those of the modules that have
    them, as its compiled code says: there is no other list.
    """
    home, found = "", {}
    loader: Any = sys.modules[module].__loader__
    steps = dis.get_instructions(loader.get_code(module))
    for step in itertools.dropwhile(lambda step: (step.opname, step.argval) != ("LOAD_NAME", "TYPE_CHECKING"), steps):
        if step.opname == "IMPORT_NAME":
            home = str(step.argval)
        elif step.opname == "IMPORT_FROM":
            found[str(step.argval)] = home
    return found
