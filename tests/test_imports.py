"""The folder list is the architecture: imports point one way, few modules open sockets, and nothing is ever pickled."""

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "memoire"

# From the bottom to the top: a module may import from its own layer and from those above it in this table.
# A package stands for everything in it. `__init__` only names what users import, and is left out.
LAYERS: dict[str, set[str]] = {
    "words": {
        "built", "errors", "frozen", "checks", "clock", "suggestions", "addresses", "exposure", "limits", "version", "_core",
        "parameters", "guarded", "ragged", "schema",
    },
    "what decides": {
        "memory", "dataset", "sampling", "prioritized", "starts", "writer", "batch", "buffer", "groups", "cache", "pool", "wire",
        "episodes", "shipping",
        "calls", "ledger", "logbook", "models", "desk", "journal", "runs", "subscriptions", "accounts", "notices",
        "rate", "table", "mixed", "ahead", "figures", "glance", "learners", "throttle", "packed_accounts", "account_store", "home_watch",
    },
    "what touches the world": {"names", "ownfiles", "descriptors", "sockets", "links", "store", "statefile", "linelog", "snapshot", "snapshotfile", "archive", "security", "showing", "authenticator", "logfile", "worker", "channel", "lanes", "forwarding", "untold"},
    "ends of a wire": {"client", "server", "proxy", "reader", "handle"},
    "what people start": {"classic", "minari", "torch", "sb3", "cluster", "cli", "rl", "dashboard"},
}  # fmt: skip
RANK = {module: rank for rank, layer in enumerate(LAYERS.values()) for module in layer}

OPEN_SOCKETS = {
    "sockets",
    "links",
    "showing",
    "authenticator",
    "channel",
    "forwarding",
    "client",
    "server",
    "proxy",
    "reader",
}
USE_ITS_KEYS = {"security"}  # pairs of CURVE keys are made by ZeroMQ
DECIDES_WITHOUT = {
    "zmq",
    "socket",
    "asyncio",
    "subprocess",
    "multiprocessing",
    "sqlite3",
    "http",
    "urllib",
    "logging.handlers",
}
NEVER = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
THIN = {"numpy", "zmq", "msgspec"}  # all that an actor's image has to have
HEAVY = {"minari", "torch", "sb3", "cluster", "cli", "rl", "dashboard"}  # may need extras at import time


def sources() -> list[Path]:
    linked = [path for link in PACKAGE.iterdir() if link.is_symlink() for path in link.rglob("*.py")]
    return sorted({*PACKAGE.rglob("*.py"), *linked}) + sorted(PACKAGE.rglob("*.pyx"))


def module_of(path: Path) -> str:
    """memoire/server.py -> server, memoire/cluster/launch.py -> cluster, memoire/__init__.py -> __init__."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@functools.cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    """Line and full dotted name of everything that a file imports, wherever in the file."""
    return list(read_imports(path))


def read_imports(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".pyx":  # not Python, but its plain import lines are
        text = "\n".join(line if line.startswith(("import ", "from ")) else "" for line in text.splitlines())
        text = "\n".join("" if " cimport " in line else line for line in text.splitlines())
    package = ["memoire", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def ours(name: str) -> str | None:
    """memoire.server.Server -> server; None for what is not memoire's."""
    parts = name.split(".")
    return parts[1] if parts[0] == "memoire" and len(parts) > 1 else None


def is_within(name: str, roots: set[str]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def everywhere() -> Iterator[tuple[str, str, str]]:
    """Module, where, and name of each import in the package."""
    for path in sources():
        for line, name in imports_of(path):
            yield module_of(path), f"{path.relative_to(PACKAGE.parent)}:{line}", name


def test_each_module_has_its_place_in_a_layer() -> None:
    strangers = {module_of(path) for path in sources()} - set(RANK) - {"__init__", "__main__"}
    assert not strangers, f"say in LAYERS where {sorted(strangers)} belong"


def test_imports_point_one_way() -> None:
    wrong = [
        f"{where}: {module} imports {target} of a higher layer"
        for module, where, name in everywhere()
        if module in RANK and (target := ours(name)) in RANK and RANK[target] > RANK[module]
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_import_from_modules_and_not_from_the_front_door() -> None:
    """`from memoire import Buffer` inside the package would hide which way the import points."""
    top = LAYERS["what people start"] | {"__init__", "__main__"}
    wrong = [
        f"{where}: {name}"
        for module, where, name in everywhere()
        if module not in top and name.split(".")[0] == "memoire" and ours(name) not in RANK
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_in_circles() -> None:
    needs: dict[str, set[str]] = {}
    for module, _, name in everywhere():
        target = ours(name)
        if module in RANK and target in RANK and target != module:
            needs.setdefault(module, set()).add(target)
    while needs:
        free = {module for module in needs if not needs[module] & set(needs)}
        assert free, f"these import each other: {needs}"
        needs = {module: targets for module, targets in needs.items() if module not in free}


def test_few_modules_open_sockets() -> None:
    wrong = [
        f"{where}: {name}"
        for module, where, name in everywhere()
        if name.split(".")[0] == "zmq" and module not in OPEN_SOCKETS | USE_ITS_KEYS
    ]
    assert not wrong, "\n".join(wrong)


def test_what_decides_does_no_io() -> None:
    pure = LAYERS["words"] | LAYERS["what decides"]
    wrong = [
        f"{where}: {name}"
        for module, where, name in everywhere()
        if module in pure and is_within(name, DECIDES_WITHOUT)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_pickled() -> None:
    wrong = [f"{where}: {name}" for _, where, name in everywhere() if name.split(".")[0] in NEVER]
    assert not wrong, "\n".join(wrong)


def test_the_client_library_imports_only_what_it_declares() -> None:
    allowed = THIN | set(sys.stdlib_module_names) | {"memoire"}
    optional = {"lz4", "gymnasium"}  # imported where they are used, inside functions
    for path in sources():
        if module_of(path) in HEAVY:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.suffix == ".py" else ast.Module([], [])
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
    """What runs, or may run, when a module is imported: everything outside functions, but for `if TYPE_CHECKING`."""
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


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import memoire.server", "memoire.server"),
        ("from memoire import server", "memoire.server"),
        ("from .server import Server", "memoire.server.Server"),
        ("from . import server", "memoire.server"),
        ("def f():\n    from memoire.server import Server", "memoire.server.Server"),
    ],
)
def test_every_way_to_write_an_import_is_seen(
    line: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "memory.py").write_text(line)
    assert [found for _, found in imports_of(tmp_path / "memory.py")] == [name]
    assert ours(name) == "server"
