"""Which release this is, and what a node calls itself when it says HELLO or WELCOME.

Imported before all else: says so if a compiled module is missing, as in a checkout that was never built.

Python itself would speak of a circular import.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

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
