"""Which tests a page names, and which there are."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@cache
def functions_of(file: str) -> frozenset[str]:
    """The names of a file's test functions, its classes' included."""
    path = ROOT / "tests" / f"{file}.py"
    if not path.exists():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def named_tests(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`(test_\w+)::(test_\w+)`", text)
