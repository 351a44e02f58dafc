"""Comparisons with a kind of table: code outside of a kind's own files that asks for the kind.

In Python these are `==`, `!=`, `in`, `not in` and `match` between the name of a kind and an expression that holds one;
`isinstance`, `issubclass`, `type(x) is` and `match` with a class of a kind; and literals by kinds: lists of nothing but
names of kinds, and dictionaries whose keys are such names or classes. In pages (JavaScript) and chart templates these
are comparisons and literals with names of kinds.
"""

import ast
import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from structure_imports import name_below, product_files, sources, tree_of

TEMPLATES = "deploy/helm"
"""The folder whose folders named `templates` hold the chart's templates."""


@dataclass(frozen=True)
class Kinds:
    """Kinds of tables, with the files and classes that belong to each kind."""

    own: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Patterns of a kind's own files, by the kind's name."""
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Classes that belong to one kind, in files that serve several kinds."""
    registry: Sequence[str] = ()
    """Patterns of files that may name every kind."""
    pattern: str = r"\bstorage\b"
    """Regular expression for Python expressions that hold the name of a kind."""
    page_pattern: str = r"\bstorage\b"
    """Regular expression for such expressions in pages and chart templates."""


def comparisons(root: Path, kinds: Kinds) -> Iterator[tuple[str, int]]:
    """Yield file and line of each comparison of a checkout."""
    owners = owners_of(root, kinds)
    for path in product_files(root):
        name = name_below(path, root)
        if path.suffix not in (".py", ".js") or matches(name, kinds.registry):
            continue
        foreign = {kind for kind, own in kinds.own.items() if not matches(name, own)}
        if path.suffix == ".py":
            classes = {each for each, owning in owners.items() if owning <= foreign}
            yield from (
                (name, line) for line in FileComparisons(tree_of(path), foreign, classes, kinds.pattern).lines()
            )
        else:
            text = path.read_text(encoding="utf-8")
            yield from ((name, line) for line in in_page(text, foreign, kinds.page_pattern))
    for path in sorted((root / TEMPLATES).rglob("templates/**/*.*")):
        text = path.read_text(encoding="utf-8")
        yield from ((name_below(path, root), line) for line in in_template(text, kinds.own, kinds.page_pattern))


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def owners_of(root: Path, kinds: Kinds) -> dict[str, set[str]]:
    """Return the kinds that have a class of a name, by the class's name."""
    owners: dict[str, set[str]] = defaultdict(set)
    for kind, patterns in kinds.own.items():
        for path in sources(root):
            if matches(name_below(path, root), patterns):
                for node in tree_of(path).body:
                    if isinstance(node, ast.ClassDef):
                        owners[node.name].add(kind)
    for kind, names in kinds.classes.items():
        for name in names:
            owners[name].add(kind)
    return owners


class FileComparisons:
    """Comparisons with a kind of table in one Python file."""

    def __init__(self, tree: ast.Module, kinds: set[str], classes: set[str], pattern: str) -> None:
        self._nodes = list(ast.walk(tree))
        self._kinds, self._classes, self._pattern = kinds, classes, re.compile(pattern)
        self._holders = set[str]()
        for node in self._nodes:  # names that hold an expression of the kind
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Name | ast.Attribute)
                and self._holds_kind(node.value)
            ):
                self._holders |= {target.id for target in node.targets if isinstance(target, ast.Name)}

    def lines(self) -> list[int]:
        """Return the line of each comparison; a list inside a comparison does not count separately."""
        compared = [node for node in self._nodes if self._compares(node)]
        inside = {id(each) for node in compared for each in ast.walk(node) if each is not node}
        listed = [node for node in self._nodes if id(node) not in inside and self._lists_kinds(node)]
        return sorted(getattr(node, "lineno", 0) for node in compared + listed)

    def _compares(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            is_type = any(isinstance(side, ast.Call) and ast.unparse(side.func) == "type" for side in sides)
            by_name = any(map(self._names_kind, sides)) and any(map(self._holds_kind, sides))
            return by_name or (is_type and any(map(self._is_class, sides)))
        if isinstance(node, ast.Call):
            is_test = isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass")
            return is_test and any(map(self._is_class, node.args[1:]))
        if isinstance(node, ast.Match):
            patterns = [each for case in node.cases for each in ast.walk(case.pattern)]
            by_name = any(isinstance(each, ast.MatchValue) and self._names_kind(each.value) for each in patterns)
            by_class = any(isinstance(each, ast.MatchClass) and self._is_class(each.cls) for each in patterns)
            return (by_name and self._holds_kind(node.subject)) or by_class
        if isinstance(node, ast.Dict):
            keys = [key for key in node.keys if key is not None]
            return (len(keys) > 1 and all(map(self._names_kind, keys))) or any(map(self._is_class, keys))
        if isinstance(node, ast.Subscript):
            return (
                isinstance(node.value, ast.Dict)
                and self._holds_kind(node.slice)
                and any(map(self._names_kind, _keys(node.value)))
            )
        return False

    def _names_kind(self, node: ast.expr) -> bool:
        """Return True if an expression is the name of a kind, or a list that has one."""
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return any(map(self._names_kind, node.elts))
        return isinstance(node, ast.Constant) and node.value in self._kinds

    def _lists_kinds(self, node: ast.AST) -> bool:
        """Return True if a node is a list of only names of kinds."""
        return (
            isinstance(node, ast.Tuple | ast.List | ast.Set)
            and bool(node.elts)
            and all(map(self._names_kind, node.elts))
        )

    def _holds_kind(self, node: ast.expr) -> bool:
        """Return True if an expression holds the name of a table's kind."""
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return bool(self._pattern.search(ast.unparse(node)) or names & self._holders)

    def _is_class(self, node: ast.expr) -> bool:
        """Return True if an expression is a class of a kind, or several classes with one of a kind."""
        if isinstance(node, ast.BinOp):
            return self._is_class(node.left) or self._is_class(node.right)
        if isinstance(node, ast.Tuple):
            return any(map(self._is_class, node.elts))
        return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)) in self._classes


def _keys(node: ast.Dict) -> list[ast.expr]:
    return [key for key in node.keys if key is not None]


def in_page(text: str, kinds: Iterable[str], pattern: str) -> list[int]:
    """Return the lines of JavaScript that compare with the name of a kind, or have an object by kinds."""
    words = "|".join(sorted(kinds))
    name = f"[\"'`](?:{words})[\"'`]"
    key = rf"(?:{name}|\b(?:{words})\b)"
    patterns = (
        rf"(?:{pattern})\S*\s*[!=]==?\s*{name}",
        rf"{name}\s*[!=]==?\s*\S*(?:{pattern})",
        rf"\bcase\s+{name}\s*:",
        rf"\[\s*{name}(?:\s*,\s*{name})*\s*,?\s*\]",
        rf"\{{\s*{key}\s*:[^,{{}}]*,\s*{key}\s*:",
    )
    return sorted(_line(text, each) for pattern in patterns for each in re.finditer(pattern, text))


def in_template(text: str, kinds: Iterable[str], pattern: str) -> list[int]:
    """Return the lines of a chart's template whose actions compare with the name of a kind."""
    asks = re.compile(rf'\b(?:eq|ne|has|get|dict)\b(?=.*(?:{pattern})).*"(?:{"|".join(sorted(kinds))})"', re.DOTALL)
    return [_line(text, each) for each in re.finditer(r"\{\{.*?\}\}", text, re.DOTALL) if asks.search(each.group())]


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1
