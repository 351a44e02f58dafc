"""Things that one can hold in mind: sizes of the house, of files, classes and functions; docstrings that say shapes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import house
from house import tree_of

ROOT = Path(__file__).resolve().parents[2]
ROOMS, FLOORS, ARROWS = 37, 14, 230
CLASS_LINES, LONG_CLASSES = 400, 3  # the faces: Server, Client, Memory
METHODS, FACE_LINES, LONGER_METHODS = 25, 10, 8
"""A class may have more than METHODS methods if it is a face, whose methods have at most FACE_LINES lines of code; so many
methods of all faces are longer, and may only become fewer.
"""
FILE_LINES, LONG_FILES = 500, 8
PRIVATE_ACCESSES, PATCHES = 227, 46
"""How often tests reach into another object's private parts, and replace something for a while; they may only become
fewer.
"""
FUNCTION_LINES = {"median": 6, "nine in ten": 21}
OF_TUPLES = ("_asdict", "_replace", "_fields")
"""Public methods of named tuples."""
SHAPE = re.compile(r"\[[A-Z0-9*]|\bshape|\[\]")
"""How docstrings write shapes: `[B, *F]`, "shape (B,)", `[]`."""


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Where each class is, and its syntax tree."""
    for path in house.sources(ROOT):
        if path.suffix == ".py":
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ClassDef):
                    yield f"{path.relative_to(ROOT)}: {node.name}", node


def methods_of(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef) and not is_overload(each)]


def is_overload(node: ast.FunctionDef) -> bool:
    return any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)


def code_lines(node: ast.FunctionDef) -> int:
    """Lines of a function from its first statement on, without its docstring."""
    said = ast.get_docstring(node) is not None
    return node.end_lineno - node.body[said].lineno + 1 if len(node.body) > said else 0


def annotations(node: ast.FunctionDef) -> str:
    given = [each.annotation for each in (*node.args.args, *node.args.kwonlyargs) if each.annotation]
    return " ".join(ast.unparse(each) for each in (*given, *([node.returns] if node.returns else [])))


def test_the_house_can_be_overlooked() -> None:
    rooms = house.rooms_of(ROOT)
    assert len(rooms) <= ROOMS
    assert 1 + max(house.floors_of_rooms(rooms).values()) <= FLOORS
    assert sum(len(room.imports) for room in rooms.values()) <= ARROWS


def test_few_files_and_classes_are_long() -> None:
    sizes = house.sizes_of(ROOT)
    long_classes = sorted(name for name, size in sizes.classes.items() if size > CLASS_LINES)
    long_files = sorted(name for name, size in sizes.files.items() if size > FILE_LINES)
    assert len(long_classes) <= LONG_CLASSES, long_classes
    assert len(long_files) <= LONG_FILES, long_files


def test_functions_are_short() -> None:
    lines = sorted(house.sizes_of(ROOT).functions)
    assert lines[len(lines) // 2] <= FUNCTION_LINES["median"]
    assert lines[9 * len(lines) // 10] <= FUNCTION_LINES["nine in ten"]


def test_classes_with_many_methods_are_faces() -> None:
    many = {where: methods_of(node) for where, node in classes() if len(methods_of(node)) > METHODS}
    wrong = [
        f"{where}.{method.name}: {code_lines(method)} lines"
        for where, methods in many.items()
        for method in methods
        if method.name != "__init__" and code_lines(method) > FACE_LINES
    ]
    assert len(wrong) <= LONGER_METHODS, "\n".join(wrong)


@pytest.mark.slow
def test_tests_reach_into_few_private_parts() -> None:
    private, patches = 0, 0
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                private += ast.unparse(node.value) not in ("self", "cls", "os", "sys") and node.attr not in OF_TUPLES
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
                patches += ast.unparse(node.func.value) in ("monkeypatch", "patch")
    assert (private <= PRIVATE_ACCESSES, patches <= PATCHES) == (True, True), (private, patches)


def test_public_functions_that_take_or_give_arrays_say_their_shapes() -> None:
    wrong = []
    for path in house.sources(ROOT):
        if path.suffix == ".py":
            tree = tree_of(path)
            for holder in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
                if not getattr(holder, "name", "").startswith("_"):
                    where = f"{path.relative_to(ROOT)}: {getattr(holder, 'name', 'module')}"
                    wrong += [f"{where}.{name}" for name in without_shapes(holder)]
    assert not wrong, "\n".join(wrong)


def without_shapes(holder: ast.Module | ast.ClassDef) -> list[str]:
    """Public functions with arrays whose docstrings have no shape."""
    return [
        node.name
        for node in holder.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not is_overload(node)
        if re.search(r"NDArray|ndarray|ArrayLike", annotations(node))
        if not SHAPE.search(ast.get_docstring(node) or "")
    ]
