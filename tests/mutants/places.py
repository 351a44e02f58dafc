"""Places in the code for planted mistakes, and a draw of places that hardly changes when the code does."""

import ast
import bisect
import functools
import hashlib
import importlib.util
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
KERNELS = "kernels"
QUOTAS = {
    "memoire": 15, "memoire/replay": 40, "memoire/wire": 20, "memoire/tables": 25, "memoire/models": 15,
    "memoire/security": 20, "memoire/accounting": 20, "memoire/net": 30, "memoire/disk": 30, "memoire/reader": 20,
    "memoire/proxy": 15, "memoire/client": 25, "memoire/server": 25, "memoire/classic": 15, "memoire/nodes": 30,
    "memoire/rl/demo": 15, "memoire/cli": 20, "dashboard": 5, "dashboard/collect": 25, "dashboard/web": 20,
    "dashboard/terminal": 15, KERNELS: 35,
}  # fmt: skip
"""Number of places to draw in each folder, but for subfolders with their own number, and in the kernels."""
NEEDS = {
    "memoire/torch.py": "torch", "memoire/rl/networks.py": "torch", "memoire/rl/ppo.py": "torch",
    "memoire/rl/sac.py": "torch", "memoire/rl/learner.py": "torch", "memoire/tmrl/actor.py": "torch",
    "memoire/tmrl/custom.py": "torch", "memoire/trl.py": "trl", "memoire/sb3.py": "stable_baselines3",
}  # fmt: skip
"""Files whose tests need an optional package; without the package no place is drawn in them."""
KINDS = (
    "comparison", "arithmetic", "constant", "boolean", "return", "dropped statement", "swapped arguments", "default",
)  # fmt: skip
SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in", "and": "or", "or": "and",
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "&": "|", "|": "&", "<<": ">>", ">>": "<<",
}  # fmt: skip
"""Operator that a mistake writes in place of each operator."""
SYMMETRIC = {"min", "max", "isinstance", "maximum", "minimum", "array_equal", "cast", "getattr"}
"""Calls that stay equal, or become invalid, with swapped arguments."""


@dataclass(frozen=True)
class Place:
    """One planted mistake: `old` becomes `new` in a statement of a file."""

    file: str
    """Path relative to the root of the checkout."""
    function: str
    """Qualified name of the innermost function; empty for code that runs at import."""
    line: int
    kind: str
    old: str
    new: str
    start: int
    """First replaced byte of the file; `end` is behind the last."""
    end: int
    statement: str
    """First line of the statement."""
    number: int = 0
    """Number of equal mistakes before this mistake in the function."""

    @property
    def key(self) -> str:
        """Identifier that stays the same after changes elsewhere in the file."""
        return " | ".join(
            (self.file, self.function, self.statement, self.kind, f"{self.old} -> {self.new}", str(self.number))
        )

    def planted(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


def folder_of(file: str) -> str:
    """Return the key of QUOTAS that a file belongs to."""
    if file.endswith((".pyx", ".pxd")):
        return KERNELS
    return max((name for name in QUOTAS if file.startswith(f"{name}/")), key=len)


def python_files() -> list[str]:
    paths = [path for top in ("memoire", "dashboard") for path in (ROOT / top).rglob("*.py")]
    files = sorted(path.relative_to(ROOT).as_posix() for path in paths if "memoire/dashboard" not in path.as_posix())
    return [file for file in files if file not in NEEDS or importlib.util.find_spec(NEEDS[file])]


A, B = ast.Name("a"), ast.Name("b")


def sign_of(node: ast.expr) -> str:
    """Return the operator between A and B as source text."""
    return ast.unparse(node)[2:-2]


class Finder(ast.NodeVisitor):
    """Collector of the places of one Python file."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.found: list[Place] = []
        self._starts = [0]
        for line in source.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._names: list[str] = []
        self._functions: list[str] = []
        self._statement = ""

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _add(self, kind: str, start: int, end: int, new: str) -> None:
        old = " ".join(self.source[start:end].decode().split())
        function, line = ["", *self._functions][-1], bisect.bisect_right(self._starts, start)
        self.found.append(Place(self.file, function, line, kind, old, new, start, end, self._statement))

    def _between(self, kind: str, left: ast.AST, right: ast.AST, sign: str, equals: str = "") -> None:
        """Add a place for the operator between two operands."""
        if sign not in SWAPS:
            return
        old, (start, end) = sign + equals, (self._span(left)[1], self._span(right)[0])
        match = re.search(r"\s+".join(map(re.escape, old.split())), self.source[start:end].decode())
        if match and " ".join(match.group().split()) == old:
            self._add(kind, start + match.start(), start + match.end(), SWAPS[sign] + equals)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            former, self._statement = self._statement, self._text(node).partition("\n")[0].strip()
            super().visit(node)
            self._statement = former
        else:
            super().visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip messages, whose positions are wrong before Python 3.12."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._drop(node, node.target)
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test)
        if "TYPE_CHECKING" in test or "__name__" in test:
            return
        if isinstance(node.test, (ast.Name, ast.Attribute, ast.Call)):
            self._add("boolean", *self._span(node.test), f"not {self._text(node.test)}")
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        for child in node.body:
            self.visit(child)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if all(isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) for child in node.body):
            return  # no test calls a method of a protocol or an overload
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self._constant("default", default)
        self._names.append(node.name)
        self._functions.append(".".join(self._names))
        self._names.append("<locals>")
        for child in node.body:
            self.visit(child)
        del self._names[-2:]
        self._functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self._between("comparison", left, right, sign_of(ast.Compare(A, [operator], [B])))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        pair = (node.left, node.right)
        texts = any(isinstance(side, (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)) for side in pair) or any(
            isinstance(side, ast.Constant) and isinstance(side.value, (str, bytes)) for side in pair
        )
        if not texts:
            self._between("arithmetic", *pair, sign_of(ast.BinOp(A, node.op, B)))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._drop(node, node.target, always=True)
        self._between("arithmetic", node.target, node.value, sign_of(ast.BinOp(A, node.op, B)), "=")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between("boolean", left, right, sign_of(ast.BoolOp(node.op, [A, B])))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("boolean", *self._span(node), f"({self._text(node.operand)})")
        self.generic_visit(node)

    def _constant(self, kind: str, node: ast.AST) -> None:
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, bool):
            self._add("boolean" if kind == "constant" else kind, *self._span(node), str(not value))
        elif isinstance(value, int):
            self._add(kind, *self._span(node), str(value + 1))
        elif isinstance(value, float):
            self._add(kind, *self._span(node), repr(value * 2 or 1.0))

    def visit_Constant(self, node: ast.Constant) -> None:
        self._constant("constant", node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # `strict` of zip changes nothing if lengths are equal
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._add("return", *self._span(node.value), "None")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[:2]
        texts = [self._text(argument) for argument in first]
        plain = len(first) == 2 and not any(isinstance(argument, (ast.Starred, ast.JoinedStr)) for argument in first)
        if plain and texts[0] != texts[1] and name not in SYMMETRIC:
            start, end = self._span(first[0])[0], self._span(first[1])[1]
            self._add("swapped arguments", start, end, f"{texts[1]}, {texts[0]}")
        self.generic_visit(node)

    def _drop(self, node: ast.stmt, *targets: ast.AST, always: bool = False) -> None:
        """Add a place to drop a statement, but not for a plain name: every test would miss a name that is never set."""
        if always or any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets):
            self._add("dropped statement", *self._span(node), "pass")

    def visit_Assign(self, node: ast.Assign) -> None:
        if self._text(node).startswith("__"):
            return
        self._drop(node, *node.targets)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, (ast.Call, ast.Await)) and ".debug(" not in self._text(node):
            self._drop(node, always=True)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._drop(node, always=True)
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._drop(node, always=True)

    visit_Continue = visit_Break


def numbered(places: list[Place]) -> list[Place]:
    """Number equal places by their order in the function."""
    seen: dict[str, int] = defaultdict(int)
    result = []
    for place in places:
        result.append(Place(**{**vars(place), "number": seen[place.key]}))
        seen[place.key] += 1
    return result


def python_places(file: str) -> list[Place]:
    source = (ROOT / file).read_bytes()
    finder = Finder(file, source)
    finder.visit(ast.parse(source))
    return numbered(sorted(finder.found, key=lambda place: (place.start, place.end, place.kind)))


@functools.cache
def _source_and_tree(file: str) -> tuple[bytes, str]:
    source = (ROOT / file).read_bytes()
    return source, ast.dump(ast.parse(source))


def is_other_code(place: Place) -> bool:
    """Return True if the planted file is valid Python with another meaning than before."""
    source, tree = _source_and_tree(place.file)
    try:
        return ast.dump(ast.parse(place.planted(source))) != tree
    except (SyntaxError, ValueError):
        return False


def rank(seed: int, place: Place) -> bytes:
    """Return the place's rank for the seed, which no change elsewhere affects."""
    return hashlib.sha256(f"{seed} {place.key}".encode()).digest()


def in_turn(seed: int, places: list[Place]) -> Iterator[Place]:
    """Yield places of each kind in turn, in order of rank."""
    queues = {
        kind: sorted((p for p in places if p.kind == kind), key=lambda p: rank(seed, p), reverse=True) for kind in KINDS
    }
    while any(queues.values()):
        for queue in queues.values():
            if queue:
                yield queue.pop()


def draw(seed: int, places: list[Place], count: int, allowed: Callable[[Place], bool] = is_other_code) -> list[Place]:
    """Draw so many places, at most one in each statement."""
    taken: dict[tuple[str, str, str], Place] = {}
    for place in in_turn(seed, places):
        if len(taken) == count:
            break
        at = (place.file, place.function, place.statement)
        if at not in taken and allowed(place):
            taken[at] = place
    return list(taken.values())


def drawn(seed: int) -> list[Place]:
    """Draw the places in Python for one run, by each folder's quota."""
    by_folder: dict[str, list[Place]] = defaultdict(list)
    for file in python_files():
        by_folder[folder_of(file)] += python_places(file)
    return [place for folder in QUOTAS for place in draw(seed, by_folder[folder], QUOTAS[folder])]
