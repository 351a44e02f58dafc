"""Which tests a page names, and which there are."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def functions_of(file: str) -> frozenset[str]:
    """The names of a file's test functions, its classes' included."""
    path = next((ROOT / "tests").glob(f"*/{file}.py"), None)
    if path is None:
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def named_tests(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`(test_\w+)::(test_\w+)`", text)
