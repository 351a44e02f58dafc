"""Record of called functions: each process appends JSON lines to its own file in the folder MEMOIRE_RECORD."""

import json
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

FOLDER = os.environ.get("MEMOIRE_RECORD", "")
TREE = os.environ.get("MEMOIRE_TREE", "") + "/"


def function_of(code: CodeType) -> str | None:
    """Return `file|qualified name` of a function of memoire or the dashboard, None for other functions."""
    if not code.co_filename.startswith(TREE) or code.co_name == "<module>":
        return None
    file = code.co_filename.removeprefix(TREE).replace("memoire/dashboard/", "dashboard/", 1)
    return f"{file}|{code.co_qualname}" if file.startswith(("memoire/", "dashboard/")) else None


def append(what: dict[str, Any]) -> None:
    with open(os.path.join(FOLDER, f"{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


def kernels_reached() -> list[int]:
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("memoire.")]
    return [number for module in ours if hasattr(module, "reached_mutants") for number in module.reached_mutants()]


def record_child(test: str) -> None:
    """Record a test's child process, which may be killed at any time: write each function at its first call."""
    seen: set[CodeType] = set()

    def called(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code not in seen:
            seen.add(code)
            name = function_of(code)
            if name:
                append({"test": test, "functions": [name], "kernels": kernels_reached()})

    threading.settrace(called)
    sys.settrace(called)
