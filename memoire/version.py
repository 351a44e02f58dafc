"""Version of memoire, and a check that its extension modules are compiled.

`memoire` imports this module first. In a checkout that was never built, the check raises an error that says so; without
it, Python would report a circular import.
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
"""Extension modules that setup.py compiles, as paths in the folder of the package."""

FOLDER = Path(__file__).resolve().parent


def is_built(folder: Path) -> bool:
    """Return True if the folder has every extension module."""
    return all(PathFinder.find_spec(Path(name).name, [str((folder / name).parent)]) is not None for name in COMPILED)


if not is_built(FOLDER):
    others = (Path(path or ".").resolve() / "memoire" for path in sys.path)
    raise NotBuilt(str(FOLDER), next((str(each) for each in others if each != FOLDER and is_built(each)), None))


@functools.cache
def imports_of(module: str) -> dict[str, str]:
    """Map each name that a module imports under `if TYPE_CHECKING` to the module that defines it.

    The names come from the compiled code of the module, so that they are listed only once.
    """
    home, homes = "", {}
    loader: Any = sys.modules[module].__loader__
    steps = dis.get_instructions(loader.get_code(module))
    for step in itertools.dropwhile(lambda step: (step.opname, step.argval) != ("LOAD_NAME", "TYPE_CHECKING"), steps):
        if step.opname == "IMPORT_NAME":
            home = str(step.argval)
        elif step.opname == "IMPORT_FROM":
            homes[str(step.argval)] = home
    return homes
