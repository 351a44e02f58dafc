"""Imported before all else: says so if a compiled module is missing, as in a checkout that was never built.

Python itself would speak of a circular import.
"""

from importlib.machinery import PathFinder
from pathlib import Path

from .errors import NotBuilt

COMPILED = ("_core", "net/_multipart", "wire/_bytes", "wire/_container", "pool/_draw")
"""Modules that setup.py compiles, by their places in this folder."""

FOLDER = Path(__file__).resolve().parent

if any(PathFinder.find_spec(Path(name).name, [str((FOLDER / name).parent)]) is None for name in COMPILED):
    raise NotBuilt(str(FOLDER))
