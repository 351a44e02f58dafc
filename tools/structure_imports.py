"""Files of the package and their imports: modules, packages, chains and cycles.

A package is a folder of memoire/, or a file at its top. Compiled modules are read by the imports and cimports of their
sources. `tools/structure.py` measures by these functions, and tests of imports use them.
"""

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ENTRY_FILES = {"__init__", "__main__"}
"""Stems of files that only re-export names for users."""
CYTHON = (".pyx", ".pxd")
STATEMENT = re.compile(r"^(?:from \S+ )?c?import (?:\([^)]*\)|.*)$", re.MULTILINE)
"""An import or cimport that begins a line of a Cython source, with all of its names."""

Graph = dict[str, set[str]]
"""Names that a name leads to, by name."""


def sources(root: Path) -> list[Path]:
    """Return the Python files and Cython sources of the package and the dashboard."""
    return [path for path in product_files(root) if path.suffix in (".py", *CYTHON)]


@functools.cache
def product_files(root: Path) -> list[Path]:
    """Return all files of the package and the dashboard that are not generated."""
    paths = [path for folder in ("memoire", "dashboard") for path in (root / folder).rglob("*.*")]
    return sorted(path for path in paths if path.is_file() and not is_through_a_link(path, root))


def is_through_a_link(path: Path, root: Path) -> bool:
    """Return True if a folder above a file is a link: memoire/dashboard links to the dashboard."""
    return any(parent.is_symlink() for parent in path.parents if parent != root and root in parent.parents)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file, for a Cython source only its imports and cimports. The result is cached."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in CYTHON:
        text = "\n".join(re.sub(r"\bcimport\b", "import", statement) for statement in STATEMENT.findall(text))
    return ast.parse(text, str(path))


@functools.cache
def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def name_below(path: Path, root: Path) -> str:
    """Return a file's name below the root."""
    return path.relative_to(root).as_posix()


def place(path: Path, root: Path) -> tuple[str, ...]:
    """Return the dotted place of a file below memoire: ("server",), ("cluster", "node"), ("dashboard", "api")."""
    parts = path.relative_to(root).with_suffix("").parts
    return parts[1:] if parts[0] == "memoire" else parts


def imports(path: Path, package: Sequence[str], *, for_types: bool = True) -> Iterator[tuple[int, list[str]]]:
    """Yield line and dotted name of each import in a file, at any depth.

    Args:
        path: The file.
        package: The package of the file, from which relative imports are resolved.
        for_types: True if imports below `if TYPE_CHECKING` count.
    """
    for node, is_for_types in import_statements(path):
        if is_for_types and not for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")) for alias in node.names)
        else:
            base = list(package[: len(package) + 1 - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            yield from ((node.lineno, [*base, alias.name]) for alias in node.names)


@functools.cache
def import_statements(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Return the imports of a file in the order of lines, each with True if it is below `if TYPE_CHECKING`."""
    statements: list[tuple[ast.Import | ast.ImportFrom, bool]] = []
    pending: list[tuple[ast.AST, bool]] = [(tree_of(path), False)]
    while pending:
        node, is_for_types = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            statements.append((node, is_for_types))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += [*((each, True) for each in node.body), *((each, is_for_types) for each in node.orelse)]
        elif not isinstance(node, ast.expr):
            pending += [(each, is_for_types) for each in ast.iter_child_nodes(node)]
    return sorted(statements, key=lambda each: each[0].lineno)


def imported(path: Path, root: Path, *, for_types: bool = True) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield line and dotted place below memoire of a file's imports of memoire, at any depth."""
    for line, name in imports(path, ("memoire", *place(path, root)[:-1]), for_types=for_types):
        if name[0] == "memoire" and len(name) > 1:
            yield line, tuple(name[1:])


def texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings of a file, without its docstrings."""
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    yield from (
        node
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    )


@dataclass
class Modules:
    """Modules of the package by dotted name, and the graphs of their imports."""

    files: dict[str, Path]
    """Python file or Cython source of each module."""
    imports: Graph
    """Modules that a module imports at run time, also in functions."""
    all_imports: Graph
    """Run-time imports plus imports for types; the latter are left out for entry files, which name everything."""
    named: Graph
    """Modules that a module names in a string, such as "memoire.torch" or "memoire.rl.realtime:RealTimeEnv"."""

    @classmethod
    def read(cls, root: Path) -> "Modules":
        """Return the modules of a checkout."""
        modules = cls({}, {}, {}, {})
        for path in sources(root):
            modules.files.setdefault(name_of(path, root), path)
        for graph in (modules.imports, modules.all_imports, modules.named):
            graph |= {name: set() for name in modules.files}
        for path in sources(root):
            name = name_of(path, root)
            running, written = modules._holders(path, root, False), modules._holders(path, root, True)
            modules.imports[name] |= running - {name}
            modules.all_imports[name] |= (running if path.stem in ENTRY_FILES else written) - {name}
            if path.suffix == ".py":
                words = {str(node.value).partition(":")[0] for node in texts(tree_of(path))}
                modules.named[name] = (words & modules.files.keys()) - {name, "memoire"}
        return modules

    def _holders(self, path: Path, root: Path, for_types: bool) -> set[str]:
        holders = {self.holder(target) for _, target in imported(path, root, for_types=for_types)}
        return {name for name in holders if name is not None}

    def holder(self, target: Sequence[str]) -> str | None:
        """Return the module that contains a dotted place below memoire, or None."""
        for length in range(len(target), -1, -1):
            if (name := ".".join(("memoire", *target[:length]))) in self.files:
                return name
        return None

    def is_python(self, name: str) -> bool:
        """Return True if a module is written in Python."""
        return self.files[name].suffix == ".py"

    def is_entry(self, name: str) -> bool:
        """Return True if a module only re-exports names for users."""
        return self.files[name].stem in ENTRY_FILES


def name_of(path: Path, root: Path) -> str:
    """Return a file's dotted name: memoire/server/__init__.py is memoire.server."""
    parts = ("memoire", *place(path, root))
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def groups_of(graph: Graph) -> list[list[str]]:
    """Return the strongly connected groups, each after all groups that it leads to (Tarjan, 1972)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in numbers:
                visit(target)
            if target in stack:
                lowest[name] = min(lowest[name], lowest[target])
        if lowest[name] == numbers[name]:
            start = stack.index(name)
            groups.append(sorted(stack[start:]))
            del stack[start:]

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 4 * len(graph))
    for name in sorted(graph):
        if name not in numbers:
            visit(name)
    sys.setrecursionlimit(limit)
    return groups


def cycles_of(graph: Graph) -> list[list[str]]:
    """Return the groups of names that lead to each other in a cycle."""
    return [group for group in groups_of(graph) if len(group) > 1]


def longest_chain(graph: Graph, counted: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Return the counted names of the longest chain; a cycle in the chain is included as a whole."""
    chains: dict[str, list[str]] = {}
    for group in groups_of(graph):
        below = [chains[target] for name in group for target in sorted(graph[name]) if target not in group]
        chain = [name for name in group if counted(name)] + max(below, key=len, default=[])
        chains |= dict.fromkeys(group, chain)
    return max(chains.values(), key=len, default=[])


@dataclass
class Package:
    """A folder of memoire/, or a file at its top."""

    name: str
    lines: int = 0
    files: set[str] = field(default_factory=set)
    """Names of the files and folders in it; empty for a file at the top."""
    imports: dict[str, str] = field(default_factory=dict)
    """File and line of an import, by the name of the imported package."""


def packages_of(root: Path) -> dict[str, Package]:
    """Return all packages by name."""
    packages: dict[str, Package] = {}
    for path in sources(root):
        name, *rest = place(path, root)
        if name not in ENTRY_FILES:
            package = packages.setdefault(name, Package(name))
            package.lines += len(lines_of(path))
            package.files |= set(rest[:1])
    for path in sources(root):
        name = place(path, root)[0]
        if name in packages:
            for line, (target, *_) in imported(path, root):
                if target in packages and target != name:
                    packages[name].imports.setdefault(target, f"{name_below(path, root)}:{line}")
    return packages


def layers_of(packages: Mapping[str, Package]) -> dict[str, int]:
    """Return the layer of each package, 0 for those that import no other; packages in a cycle have none."""
    layers: dict[str, int] = {}
    while ready := [name for name in packages if name not in layers and packages[name].imports.keys() <= layers.keys()]:
        layers |= {name: 1 + max((layers[at] for at in packages[name].imports), default=-1) for name in ready}
    return layers
