"""`python -m` for launched processes: it looks for modules where the launcher found them.

    python -P memoire/nodes/bootstrap.py MODULE ARGUMENTS...

`python -m` itself looks in the working directory first of all, which may hold a folder of memoire's name: a checkout.
"""

import json
import os
import runpy
import sys

PATH = "MEMOIRE_PATH"
"""Environment variable with the launcher's `sys.path`, as JSON; taken out, so that children of this process do not see
it."""


def main() -> None:
    """Run the module that the first argument names as the program."""
    first = json.loads(os.environ.pop(PATH))
    sys.path[:] = first + [folder for folder in sys.path if folder not in first]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
