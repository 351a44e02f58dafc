"""Figures of tools/structure.py for a small example package, and changes that raise each figure."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

import structure
from structure_kinds import Kinds

KINDS = Kinds(own={"heaps": ["memoire/pool/heaps.py"], "lists": ["memoire/pool/lists.py"]}, classes={"lists": ["Row"]})
RULES = structure.Rules(["words", "pool", "server", "client"], KINDS)
PACKAGE = {
    "memoire/__init__.py": '"""Words."""\n\nHOMES = {"Server": "memoire.server.server"}\n',
    "memoire/words.py": '"""Words."""\n\nimport os\n\n\ndef line():\n    """Words."""\n    # a comment\n    return os.sep\n',
    "memoire/pool/__init__.py": "",
    "memoire/pool/heaps.py": "class Heap:\n    def add(self, a):\n        return [a]\n\n    def is_one(self, storage):\n"
    '        return storage == "heaps"\n',
    "memoire/pool/lists.py": "from memoire.words import line\n\nclass List:\n    pass\n",
    "memoire/pool/_draw.pyx": "from memoire.words cimport line\ncdef int one = 1\n",
    "memoire/server/__init__.py": "",
    "memoire/server/server.py": "from typing import TYPE_CHECKING\n\nfrom memoire.pool import heaps, lists\n\n"
    "if TYPE_CHECKING:\n    from memoire.pool.lists import List\n\n\ndef start():\n    from . import state\n",
    "memoire/server/state.py": "from memoire.pool.lists import List\nfrom memoire.words import line\n",
    "dashboard/static/page.js": "const one = 1;\n",
    "deploy/helm/memoire/templates/one.yaml": "a: {{ .Values.storage }}\n",
    "tests/test_one.py": "def test(): pass\n",
    "benchmarks/one.py": "print()\n",
}
FIGURES = {
    "lines": 37, "code_lines": 12, "modules": 8, "lines_a_module": 4.2, "small_modules": 2, "long_modules": 0,
    "longest_chain": 4, "import_cycles": 0, "upward_imports": 0, "modules_named_in_strings": 1, "cycles_with_named_modules": 0, "packages": 3,
    "imports_between_packages": 3, "imports_between_packages_and_top_files": 3, "layers": 3, "forwarding_methods": 0.0, "kind_comparisons": 0, "test_lines": 1,
    "test_files": 1, "benchmark_lines": 1, "benchmark_files": 1,
}  # fmt: skip


def checkout(folder: Path, *changes: Mapping[str, str]) -> Path:
    """Write a checkout with the example package; each change appends text to its files."""
    files = dict(PACKAGE)
    for change in changes:
        for name, text in change.items():
            files[name] = files.get(name, "") + text
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def figures_of(folder: Path, *changes: Mapping[str, str]) -> dict[str, structure.Figure]:
    return structure.measure(checkout(folder, *changes), RULES, runs=False)


def test_every_figure_of_the_example_package_is_right(tmp_path: Path) -> None:
    assert {name: figure.value for name, figure in figures_of(tmp_path).items()} == FIGURES
    assert structure.MEASURES.keys() == FIGURES.keys() | structure.OF_A_RUN


LIST, SERVER, STATE = "memoire/pool/lists.py", "memoire/server/server.py", "memoire/server/state.py"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from memoire.{} import {}\n"


@pytest.mark.parametrize(
    ("measure", "change", "value", "part"),
    [
        ("lines", {LIST: "a = 1\n"}, 38, LIST),
        ("lines", {"dashboard/static/page.js": "\n"}, 38, "dashboard/static/page.js"),
        ("code_lines", {LIST: '"""Words.\n"""\n# a comment\n\nimport os\nfrom os import (\n    path,\n)\n'}, 12, None),
        ("modules", {"memoire/pool/other.py": ""}, 9, "memoire/pool/other.py"),
        ("small_modules", {LIST: "def later():\n    from memoire.pool import cut\n", "memoire/pool/cut.py": ""}, 3, "memoire/pool/cut.py"),
        ("small_modules", {SERVER: "from memoire.pool import cut\n", "memoire/pool/cut.py": "a = 1\n" * 150}, 2, None),
        ("long_modules", {LIST: "a = 1\n" * 597}, 1, LIST),
        ("long_modules", {LIST: "a = 1\n" * 596}, 0, None),
        ("longest_chain", {"memoire/words.py": FOR_TYPES.format("other", "a"), "memoire/other.py": ""}, 4, None),
        ("import_cycles", {LIST: FOR_TYPES.format("server.state", "line")}, 1, LIST),
        ("import_cycles", {"memoire/__init__.py": FOR_TYPES.format("server", "server"), STATE: "from memoire import HOMES\n"}, 0, None),
        ("upward_imports", {LIST: FOR_TYPES.format("server.state", "line")}, 1, LIST),
        ("cycles_with_named_modules", {STATE: "from memoire import HOMES\n"}, 0, None),
        ("packages", {"dashboard/api.py": ""}, 4, "dashboard"),
        ("forwarding_methods", {LIST: "    def at(self, a):\n        return self.c.at(b)\n"}, 0.0, None),
        ("forwarding_methods", {LIST: "    def at(self, a):\n        self.c.at(a)\n        return 1\n"}, 0.0, None),
        ("longest_chain", {"memoire/words.py": "def later():\n    import memoire.other\n", "memoire/other.py": ""}, 5, "memoire/other.py"),
        ("import_cycles", {LIST: "def later():\n    from memoire.server.state import line\n"}, 1, LIST),
        ("upward_imports", {LIST: "def later():\n    from memoire.server.state import line\n"}, 1, LIST),
        ("upward_imports", {"memoire/pool/_draw.pyx": "from memoire.server.state cimport line\n"}, 1, "memoire/pool/_draw.pyx"),
        ("modules_named_in_strings", {LIST: 'home = "memoire.server.state:line"\n'}, 2, LIST),
        ("modules_named_in_strings", {LIST: '"""memoire.server.state"""\nhome = "memoire.server.nowhere"\n'}, 1, None),
        ("cycles_with_named_modules", {LIST: 'home = "memoire.server.state:line"\n'}, 1, STATE),
        ("packages", {"memoire/client/client.py": ""}, 4, "client"),
        ("imports_between_packages", {"memoire/client/client.py": "import memoire.server.server\n"}, 4, "client -> server"),
        ("imports_between_packages", {"memoire/errors.py": "import memoire.words\n"}, 3, None),
        ("imports_between_packages_and_top_files", {"memoire/errors.py": "import memoire.words\n"}, 4, "errors -> words"),
        ("layers", {"memoire/client/client.py": "import memoire.server.server\n"}, 4, "client"),
        ("forwarding_methods", {LIST: '    def at(self, *a, b):\n        """Words."""\n        return self.c.at(*a, d=b)\n'}, 33.33, f"{LIST} List.at"),
        ("forwarding_methods", {LIST: "    def at(self, a):\n        return self.c.at(a, 1)\n"}, 0.0, None),
        ("test_lines", {"tests/deep/test_two.py": "\n\n"}, 3, "tests/deep/test_two.py"),
        ("test_files", {"tests/deep/test_two.py": ""}, 2, "tests/deep/test_two.py"),
        ("benchmark_lines", {"benchmarks/one.py": "\n"}, 2, "benchmarks/one.py"),
        ("benchmark_files", {"benchmarks/two.py": ""}, 2, "benchmarks/two.py"),
    ],
)  # fmt: skip
def test_a_planted_change_raises_its_figure_and_is_named(
    measure: str, change: dict[str, str], value: float, part: str | None, tmp_path: Path
) -> None:
    before, after = figures_of(tmp_path / "before")[measure], figures_of(tmp_path / "after", change)[measure]
    assert after.value == value
    if part is not None:
        assert before.value < value
        assert part in [reason.partition(":")[0] for reason in structure.rises(after, before)]


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        (STATE, 'a = table.storage == "lists"', 1),
        (STATE, 'a = "lists" != table.storage', 1),
        (STATE, 'a = table.storage in ("lists", "heaps")', 1),
        (STATE, 'held = table.storage\na = held == "lists"', 1),
        (STATE, 'match table.storage:\n    case "lists" | "heaps":\n        pass', 1),
        (STATE, "a = isinstance(pool, List)", 1),
        (STATE, "a = isinstance(pool, lists.List | int)", 1),
        (STATE, "a = isinstance(body, (int, messages.Row))", 1),
        (STATE, "a = type(pool) is List", 1),
        (STATE, "match pool:\n    case List():\n        pass", 1),
        (STATE, 'a = {"lists": 1, "heaps": 2}[name]', 1),
        (STATE, 'a = {"lists": 1, "other": 2}[table.storage]', 1),
        (STATE, "a = {lists.List: 1}", 1),
        (STATE, 'ask(table, ("lists",))', 1),
        (STATE, 'a = Literal["lists", "heaps"]', 1),
        (STATE, 'a = count == "lists"', 0),
        (STATE, 'match count:\n    case "lists":\n        pass', 0),
        (STATE, 'a = {"lists": 1}', 0),
        (STATE, 'a = {"lists": 1, "other": 2}', 0),
        (STATE, 'a = totals["lists"], ("lists", "other")', 0),
        (STATE, "a = isinstance(pool, Other)", 0),
        (LIST, 'a = storage == "lists", isinstance(a, List)', 0),
        (LIST, 'a = storage == "heaps"', 1),
        ("memoire/registry.py", 'a = storage == "heaps"', 0),
        ("dashboard/static/page.js", 'const a = row.storage === "lists" ? 1 : 2;', 1),
        ("dashboard/static/page.js", 'if ("lists" !== row.storage) {}', 1),
        ("dashboard/static/page.js", "switch (storage) { case 'lists': }", 1),
        ("dashboard/static/page.js", "const held = {lists: 'a', heaps: 'b'};", 1),
        ("dashboard/static/page.js", 'if (["lists", "heaps"].includes(storage)) {}', 1),
        ("dashboard/static/page.js", 'get("lists", {client}); const kind = a === "lists";', 0),
        ("deploy/helm/memoire/templates/one.yaml", 'b: {{ if eq .Values.storage "lists" }}1{{ end }}', 1),
        ("deploy/helm/memoire/templates/one.yaml", '{{- if has\n  $v.storage (list "lists") }}1{{ end }}', 1),
        ("deploy/helm/memoire/templates/one.yaml", '{{ if eq .Values.other "lists" }}1{{ end }}', 0),
        ("deploy/helm/memoire/templates/one.yaml", '{{ include "lists" . }}: {{ .Values.storage }}', 0),
    ],
)
def test_every_way_to_compare_with_a_kind_is_counted(name: str, text: str, count: int, tmp_path: Path) -> None:
    kinds = Kinds(KINDS.own, KINDS.classes, registry=["memoire/registry.py"])
    comparisons = list(structure.comparisons(checkout(tmp_path, {name: f"\n{text}\n"}), kinds))
    assert [file for file, _ in comparisons] == [name] * count


TOML = """
[order]
kernels = []
common = ["words"]
packages = ["pool", "server", "client"]

[kinds.own]
lists = ["memoire/pool/lists.py"]

[ceilings]
modules = 9
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with the example package, whose ceilings are its figures."""
    checkout(tmp_path, {structure.RULES: TOML})
    figures = structure.measure(tmp_path, RULES, runs=False)
    structure.record(tmp_path / structure.RULES, figures, {"modules": 9})
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "All"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    return tmp_path


def test_a_figure_above_its_ceiling_is_refused_with_the_file_that_raised_it(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = ["--root", str(repository), "--no-run", "--check"]
    assert structure.main(check) == 0
    (repository / "memoire" / "client").mkdir()
    (repository / "memoire" / "client" / "client.py").write_text("from memoire.pool.lists import List\n")
    structure.product_files.cache_clear()
    assert structure.main(check) == 1
    output = capsys.readouterr().err
    assert "modules: 9, and the ceiling is 8: Python modules." in output
    assert "  client -> pool: 0 -> 1 (memoire/client/client.py:1)" in output
    assert "  memoire/client/client.py: 0 -> 1" in output and "raise ceilings in tools/structure.toml" in output


@pytest.mark.slow
def test_an_actor_and_a_proxy_of_this_package_load_their_modules() -> None:
    loaded = structure.loaded_modules(structure.ROOT)
    assert "memoire.client.client" in loaded["actor"] and "memoire.proxy.proxy" in loaded["proxy"]
    assert "memoire.server.server" not in loaded["actor"] + loaded["proxy"]
