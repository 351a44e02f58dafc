"""`python -m` for launched processes: it looks for modules where the launcher found them.

    python -P memoire/nodes/bootstrap.py MODULE ARGUMENTS...
    python -P memoire/nodes/bootstrap.py --program FILE.py|MODULE ARGUMENTS...

`python -m` itself looks in the working directory first of all, which may hold a folder of memoire's name: a checkout. A
program of a user's finds what `python FILE.py` and `python -m MODULE` find, and ends with its launcher.
"""

import importlib
import json
import os
import runpy
import sys

PATH = "MEMOIRE_PATH"
"""Environment variable with the launcher's `sys.path`, as JSON; taken out, so that children of this process do not see
it."""
PROGRAM = "--program"
"""What stands before a program that knows nothing of launchers."""


def main() -> None:
    """Run the module or program that the arguments name as the program."""
    first = json.loads(os.environ.pop(PATH))
    sys.path[:] = first + [folder for folder in sys.path if folder not in first]
    del sys.argv[0]
    if sys.argv[0] == PROGRAM:
        del sys.argv[0]
        _run_program()
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _run_program() -> None:
    importlib.import_module("memoire.nodes.supervision").guard()
    if is_file(sys.argv[0]):
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def is_file(program: str) -> bool:
    """Whether a program is named by its file, and not as a module."""
    return program.endswith(".py") or os.path.isfile(program)


if __name__ == "__main__":
    main()
