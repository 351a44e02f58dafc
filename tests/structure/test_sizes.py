"""Figures about packages, counts of private accesses by tests, and docstrings that state shapes."""

import ast
import re
from pathlib import Path

import pytest

import structure
from structure_imports import sources, tree_of

ROOT = Path(__file__).resolve().parents[2]
PRIVATE_ACCESSES, PATCHES = 175, 36
"""Ceilings of tests' accesses to private names and of their patches; both may only fall."""
OF_TUPLES = ("_asdict", "_replace", "_fields")
"""Public methods of named tuples."""
SHAPE = re.compile(r"\[[A-Z0-9*]|\bshape|\[\]")
"""Forms of shapes in docstrings: `[B, *F]`, "shape (B,)", `[]`."""


def is_overload(node: ast.FunctionDef) -> bool:
    return any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)


def annotations(node: ast.FunctionDef) -> str:
    typed = [each.annotation for each in (*node.args.args, *node.args.kwonlyargs) if each.annotation]
    return " ".join(ast.unparse(each) for each in (*typed, *([node.returns] if node.returns else [])))


def test_figures_about_packages_are_not_above_their_ceilings() -> None:
    """`make lint-structure` checks all figures; this test checks those that take little time."""
    rules = structure.Rules.read(ROOT / structure.RULES)
    assert structure.check(ROOT, rules, structure.between(ROOT, rules)) == []


@pytest.mark.slow
def test_tests_use_few_private_names() -> None:
    private, patches = 0, 0
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                private += ast.unparse(node.value) not in ("self", "cls", "os", "sys") and node.attr not in OF_TUPLES
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
                patches += ast.unparse(node.func.value) in ("monkeypatch", "patch")
    assert (private <= PRIVATE_ACCESSES, patches <= PATCHES) == (True, True), (private, patches)


def test_public_functions_with_arrays_state_shapes() -> None:
    wrong = []
    for path in sources(ROOT):
        if path.suffix == ".py":
            tree = tree_of(path)
            for holder in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
                if not getattr(holder, "name", "").startswith("_"):
                    where = f"{path.relative_to(ROOT)}: {getattr(holder, 'name', 'module')}"
                    wrong += [f"{where}.{name}" for name in without_shapes(holder)]
    assert not wrong, "\n".join(wrong)


def without_shapes(holder: ast.Module | ast.ClassDef) -> list[str]:
    """Return public functions with arrays whose docstrings state no shape."""
    return [
        node.name
        for node in holder.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not is_overload(node)
        if re.search(r"NDArray|ndarray|ArrayLike", annotations(node))
        if not SHAPE.search(ast.get_docstring(node) or "")
    ]
