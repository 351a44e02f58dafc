"""Order of packages: files at the top, imports in one direction, few modules with sockets."""

import ast
import functools
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import structure
import structure_imports
from structure_imports import ENTRY_FILES, place

ROOT = Path(__file__).resolve().parents[2]

RULES = tomllib.loads((ROOT / structure.RULES).read_text(encoding="utf-8"))["order"]
"""Order of packages: each imports only packages before it."""
KERNELS: list[str] = RULES["kernels"]
COMMON: list[str] = RULES["common"]
FOR_USERS: list[str] = RULES["for_users"]
"""Files at the top that users import by these paths."""
ORDER = {package: place for place, package in enumerate([*KERNELS, *COMMON, *RULES["packages"]])}

ENDS = {"client", "reader", "proxy", "server", "inference"}
"""Packages in which only the file with the package's name, and files that begin with `io`, wait and do I/O."""
IO = {
    "zmq",
    "socket",
    "time",
    "asyncio",
    "subprocess",
    "multiprocessing",
    "sqlite3",
    "http",
    "urllib",
    "logging.handlers",
}
PUBLIC_CLASSES = {
    "client/waiting": {"memoire.net"},
    "reader/calls": {"memoire.net", "socket", "time"},
    "server/table_handle": {"time"},
    "inference/node": {"memoire.net", "time"},
    "inference/policy": {"memoire.net", "time"},
}
"""Further files with I/O, which hold public classes, and the modules of I/O that they import."""
WITHOUT_IO = {"replay", "wire", "tables", "models", "accounting", "prompts", "keyed"}
"""Packages without sockets, files and processes, except in files named io; they may measure time."""
USE_ZMQ = {"net", "security", "models", *ENDS}  # pairs of CURVE keys are made by ZeroMQ
NEVER = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
THIN = {"numpy", "zmq", "msgspec"}  # modules that an actor's image must have
HEAVY = {
    "minari",
    "torch",
    "sb3",
    "nodes",
    "cli",
    "rl",
    "tmrl",
    "tq",
    "trl",
    "dashboard",
}  # modules that may need extras when imported


def sources() -> list[Path]:
    return structure_imports.sources(ROOT)


def package_of(path: Path) -> str:
    """Return a file's package: memoire/server/dispatch.py -> server, memoire/errors.py -> errors."""
    return place(path, ROOT)[0]


@functools.cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    """Return line and full dotted name of each import, anywhere in a file."""
    package = ["memoire", *place(path, ROOT)[:-1]]
    return [(line, ".".join(name)) for line, name in structure_imports.imports(path, package)]


def ours(name: str) -> str | None:
    """Return a name's package: memoire.server.server.Server -> server; None for names outside memoire."""
    parts = name.split(".")
    return parts[1] if parts[0] == "memoire" and len(parts) > 1 else None


def is_within(name: str, roots: set[str]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def everywhere() -> Iterator[tuple[str, str, str]]:
    """Yield package, place, and name of each import in memoire."""
    for path in sources():
        for line, name in imports_of(path):
            yield package_of(path), f"{path.relative_to(ROOT)}:{line}", name


def test_a_file_at_the_top_is_imported_everywhere_or_is_a_path_for_users() -> None:
    files = {package_of(path) for path in sources() if len(place(path, ROOT)) == 1} - ENTRY_FILES
    folders = {package_of(path) for path in sources() if len(place(path, ROOT)) > 1}
    assert files == {*COMMON, *FOR_USERS}
    assert folders == {*KERNELS, *RULES["packages"]} - {*FOR_USERS}, f"add the folder to the order in {structure.RULES}"


def test_modules_import_from_modules_and_not_from_memoire_itself() -> None:
    """`from memoire import Buffer` inside the package would hide which package is imported."""
    top = HEAVY | {"classic", "keyed", "prompts", *FOR_USERS} | ENTRY_FILES
    wrong = [
        f"{where}: {name}"
        for package, where, name in everywhere()
        if package not in top and name.split(".")[0] == "memoire" and ours(name) not in ORDER
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_within_a_folder_are_relative() -> None:
    wrong = []
    for path in sources():
        own = ".".join(["memoire", *place(path, ROOT)[:-1]])
        if path.suffix == ".py" and path.stem not in ENTRY_FILES and "." in own:
            nodes = [node for node in ast.walk(structure_imports.tree_of(path)) if isinstance(node, ast.ImportFrom)]
            named = [(node.lineno, node.module or "") for node in nodes if not node.level]
            wrong += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in named if is_within(name, {own})]
    assert not wrong, "\n".join(wrong)


def test_few_packages_use_zeromq() -> None:
    wrong = [
        f"{where}: {name}"
        for package, where, name in everywhere()
        if name.split(".")[0] == "zmq" and package not in USE_ZMQ
    ]
    assert not wrong, "\n".join(wrong)


def test_only_io_files_and_public_classes_of_client_and_servers_do_io() -> None:
    io_modules: dict[str, set[str]] = {}
    for path in sources():
        package, *rest = place(path, ROOT)
        if package in ENDS and rest and rest[0] != package and not rest[0].startswith("io"):
            used = {root for _, name in imports_of(path) for root in {*IO, "memoire.net"} if is_within(name, {root})}
            if used:
                io_modules["/".join((package, *rest))] = used
    assert io_modules == PUBLIC_CLASSES


def test_packages_that_decide_do_no_io() -> None:
    wrong = [
        f"{where}: {name}"
        for package, where, name in everywhere()
        if package in WITHOUT_IO and not where.rpartition("/")[2].startswith("io.") and is_within(name, IO - {"time"})
    ]
    assert not wrong, "\n".join(wrong)


ASKED = {"time", "random", "secrets", "threading", "os", "socket"}
"""Modules of clocks, randomness, threads and properties of the machine."""
CLOCKS = {"monotonic", "time", "perf_counter", "monotonic_ns", "time_ns"}
"""Functions of `time` that read a clock."""


def kept_parts(tree: ast.Module) -> Iterator[str]:
    """Yield imports of clocks and randomness by name, and clocks that are neither defaults nor called."""
    nodes = list(ast.walk(tree))
    fine = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.arguments):
            fine |= {id(each) for each in (*node.defaults, *node.kw_defaults)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in ASKED and not node.level:
            yield f"{node.lineno}: from {node.module} import"
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in CLOCKS
            and id(node) not in fine
            and (isinstance(node.value, ast.Name) and node.value.id == "time")
        ):
            yield f"{node.lineno}: time.{node.attr} as a value"


def test_clocks_and_randomness_are_called_by_their_module_so_that_a_simulation_can_replace_them() -> None:
    """tests/simulation/installed.py replaces functions of these modules, and defaults of parameters."""
    trees = {path: structure_imports.tree_of(path) for path in sources() if path.suffix == ".py"}
    wrong = [f"{path.relative_to(ROOT)}:{part}" for path, tree in trees.items() for part in kept_parts(tree)]
    assert [each.partition(":")[0] for each in wrong] == ["memoire/limits.py"], "\n".join(wrong)


def test_nothing_is_pickled() -> None:
    wrong = [f"{where}: {name}" for _, where, name in everywhere() if name.split(".")[0] in NEVER]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_the_client_library_imports_only_what_it_declares() -> None:
    allowed = THIN | set(sys.stdlib_module_names) | {"memoire"}
    optional = {"lz4", "gymnasium", "torch"}  # functions import these packages where needed
    for path in sources():
        if package_of(path) in HEAVY:
            continue
        tree = structure_imports.tree_of(path) if path.suffix == ".py" else ast.Module([], [])
        at_import = {id(node) for node in top_level(tree)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Import | ast.ImportFrom) or getattr(node, "level", 0):
                continue
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            for root in (name.split(".")[0] for name in names):
                assert root in allowed or (root in optional and id(node) not in at_import), (
                    f"{path.name}:{node.lineno} imports {root}, which an actor's image need not have"
                )


def top_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes that may run when a module is imported: outside functions and `if TYPE_CHECKING`."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending.extend(node.orelse)
            continue
        yield node
        pending.extend(ast.iter_child_nodes(node))
