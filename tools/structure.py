"""Figures of the package's structure, held below ceilings.

    python tools/structure.py                   print the figures
    python tools/structure.py --check           fail if a figure is above a ceiling, and name the files that raised it;
                                                and if docs/development/structure.svg is out of date
    python tools/structure.py --record          lower the ceilings to the figures
    python tools/structure.py --beside COMMIT   print the figures of a commit and of this tree side by side
    python tools/structure.py --draw FILE       draw the packages and their imports

`structure.toml` holds the order of packages, the files of each kind of table, and the ceilings. `MEASURES` describes
each figure. If a figure has to rise, raise its ceiling by hand and give the reason in the commit.
"""

import argparse
import ast
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from structure_imports import (
    CYTHON,
    Graph,
    Modules,
    cycles_of,
    imported,
    layers_of,
    lines_of,
    longest_chain,
    name_below,
    packages_of,
    place,
    product_files,
    sources,
    tree_of,
)
from structure_kinds import Kinds, comparisons
from structure_picture import drawing

ROOT = Path(__file__).resolve().parent.parent
RULES = "tools/structure.toml"
PICTURE = "docs/development/structure.svg"
OTHER_PRODUCT = (".pyx", ".pxd", ".h", ".js", ".css", ".html")
"""Product code that is not Python. Stubs repeat a signature and are not counted."""
SMALL, LONG = 150, 600
"""Lines below which a module is small, and above which it is long."""
RUN_TIMEOUT, BUILD_TIMEOUT = 200.0, 600.0
"""Limits in seconds: of a run of actor and proxy, and of a build of the compiled modules."""

MEASURES = {
    "lines": "product lines: Python, Cython, C headers, JavaScript, CSS, HTML",
    "code_lines": "lines of Python without docstrings, comments, blank lines and imports",
    "modules": "Python modules",
    "lines_a_module": "lines of Python a module (no ceiling)",
    "small_modules": f"modules below {SMALL} lines that exactly one other imports, imports in functions included",
    "long_modules": f"Python modules above {LONG} lines",
    "longest_chain": "modules in the longest chain of imports, imports in functions included",
    "import_cycles": "groups of modules that import each other in a cycle, imports for types included",
    "upward_imports": "imports of a package that is later in the order",
    "modules_named_in_strings": "modules that another module names in a string",
    "cycles_with_named_modules": "groups of modules in a cycle, if a name in a string counts as an import",
    "packages": "packages: folders of memoire/; the files at its top count as one",
    "imports_between_packages": "pairs of packages of which one imports the other",
    "imports_between_packages_and_top_files": "the same pairs if each file at the top counts as a package",
    "layers": "packages in the longest chain of imports; each file at the top counts as a package",
    "forwarding_methods": "percentage of methods that only call another method with their own parameters",
    "kind_comparisons": "comparisons with a kind of table outside of its own files and the registry",
    "actor_modules": "modules that an actor has loaded after its first push, model and priority",
    "proxy_modules": "modules that the proxy of that actor has loaded at the same time",
    "test_lines": "lines of Python in tests/",
    "test_files": "files of Python in tests/",
    "benchmark_lines": "lines of Python in benchmarks/",
    "benchmark_files": "files of Python in benchmarks/",
}
"""Description of each figure, by its name."""
WITHOUT_CEILING = {"lines_a_module"}
OF_A_RUN = {"actor_modules", "proxy_modules"}


class RunFailed(Exception):
    """The run of an actor and a proxy failed."""


@dataclass(frozen=True)
class Rules:
    """The order of packages, the kinds of tables, and the ceilings."""

    order: Sequence[str] = ()
    """A package imports only packages before it."""
    kinds: Kinds = field(default_factory=Kinds)
    ceilings: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Rules":
        """Return the rules in a file such as structure.toml."""
        text = tomllib.loads(path.read_text(encoding="utf-8"))
        order = text["order"]
        packages = [name for key, names in order.items() if key != "for_users" for name in names]
        return cls(packages, Kinds(**text["kinds"]), text["ceilings"])


@dataclass
class Figure:
    """Value of a figure, and the share of each part in it."""

    value: float
    parts: Counter[str] = field(default_factory=Counter)
    """Share of the value by file, module, or pair of packages."""
    where: dict[str, str] = field(default_factory=dict)
    """Description of each part: a place in the code, or other modules."""


def lines(root: Path) -> dict[str, Figure]:
    """Return the figures about lines and modules."""
    python = [path for path in sources(root) if path.suffix == ".py"]
    product = python + [path for path in product_files(root) if path.suffix in OTHER_PRODUCT]
    sizes = sum_figure((name_below(path, root), len(lines_of(path))) for path in product)
    modules = sum_figure((name_below(path, root), 1) for path in python)
    long = sum_figure((name_below(path, root), 1) for path in python if len(lines_of(path)) > LONG)
    mean = sum(sizes.parts[name] for name in modules.parts) / max(len(python), 1)
    return {
        "lines": sizes,
        "code_lines": sum_figure((name_below(path, root), code_lines(path)) for path in python),
        "modules": modules,
        "lines_a_module": Figure(round(mean, 1)),
        "long_modules": long,
    }


def sum_figure(parts: Iterable[tuple[str, int]]) -> Figure:
    """Return the figure that is the sum of parts."""
    counter: Counter[str] = Counter()
    for name, value in parts:
        counter[name] += value
    return Figure(counter.total(), counter)


def code_lines(path: Path) -> int:
    """Return the number of lines of a Python file that are no docstring, comment, blank line or import."""
    code = {at for at, line in enumerate(lines_of(path), 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.Expr) and is_docstring(node)):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def is_docstring(node: ast.Expr) -> bool:
    """Return True if a statement is a string: a docstring, also of a constant or field."""
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def graphs(root: Path, rules: Rules) -> dict[str, Figure]:
    """Return the figures about imports between modules."""
    modules = Modules.read(root)
    files = {name: name_below(path, root) for name, path in modules.files.items()}
    importers: Graph = defaultdict(set)
    for name, targets in modules.imports.items():
        for target in targets:
            importers[target].add(name)
    small = [
        name
        for name, path in modules.files.items()
        if modules.is_python(name) and not modules.is_entry(name)
        if len(importers[name]) == 1 and len(lines_of(path)) < SMALL
    ]
    chain = longest_chain(modules.imports, modules.is_python)
    both = {
        name: to | (set() if modules.is_entry(name) else modules.named[name]) for name, to in modules.imports.items()
    }
    return {
        "small_modules": Figure(
            len(small),
            Counter(files[name] for name in small),
            {files[name]: "imported by " + files[min(importers[name])] for name in small},
        ),
        "longest_chain": Figure(len(chain), Counter(files[name] for name in chain)),
        "import_cycles": cycle_figure(modules.all_imports, files),
        "modules_named_in_strings": sum_figure(
            (files[name], len(targets)) for name, targets in modules.named.items() if targets
        ),
        "cycles_with_named_modules": cycle_figure(both, files),
        **between(root, rules),
    }


def cycle_figure(graph: Graph, files: Mapping[str, str]) -> Figure:
    """Return the number of cycles; the parts are the files in the cycles."""
    cycles = cycles_of(graph)
    where = {files[name]: "with " + ", ".join(files[each] for each in group) for group in cycles for name in group}
    return Figure(len(cycles), Counter(dict.fromkeys(where, 1)), where)


def between(root: Path, rules: Rules) -> dict[str, Figure]:
    """Return the figures about packages."""
    packages, order = packages_of(root), {name: at for at, name in enumerate(rules.order)}
    one = {name: name if package.files else "top files" for name, package in packages.items()}
    pairs = {(name, target): where for name in packages for target, where in packages[name].imports.items()}
    joined = {(one[name], one[to]): where for (name, to), where in pairs.items() if one[name] != one[to]}
    upward = (
        (name_below(path, root), line)
        for path in sources(root)
        for line, (target, *_) in imported(path, root)
        if order.get(target, -1) > order.get(place(path, root)[0], len(order))
    )
    layers = layers_of(packages)
    return {
        "upward_imports": place_figure(upward),
        "packages": Figure(len(set(one.values())), Counter(dict.fromkeys(one.values(), 1))),
        "imports_between_packages": import_figure(joined),
        "imports_between_packages_and_top_files": import_figure(pairs),
        "layers": Figure(
            1 + max(layers.values(), default=-1), Counter({name: at for name, at in layers.items() if at})
        ),
    }


def import_figure(imports: Mapping[tuple[str, str], str]) -> Figure:
    """Return the number of pairs of packages, each with a place of an import."""
    where = {f"{name} -> {target}": at for (name, target), at in imports.items()}
    return Figure(len(where), Counter(dict.fromkeys(where, 1)), where)


def place_figure(places: Iterable[tuple[str, int]]) -> Figure:
    """Return the number of places, each a file and a line."""
    numbers_by_name: dict[str, list[str]] = defaultdict(list)
    for name, line in places:
        numbers_by_name[name].append(str(line))
    parts = sum_figure((name, len(numbers)) for name, numbers in numbers_by_name.items())
    parts.where = {name: "lines " + ", ".join(numbers) for name, numbers in numbers_by_name.items()}
    return parts


def forwarding_methods(root: Path) -> Figure:
    """Return the percentage of methods that only call another method with their own parameters."""
    methods, passing = 0, Figure(0.0)
    for path in sources(root):
        for holder in ast.walk(tree_of(path)):
            if isinstance(holder, ast.ClassDef):
                for node in holder.body:
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                        methods += 1
                        if only_forwards(node):
                            passing.parts[f"{name_below(path, root)} {holder.name}.{node.name}"] += 1
    passing.value = round(100 * passing.parts.total() / max(methods, 1), 2)
    return passing


def only_forwards(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True if a method is a single method call whose arguments are all its own parameters."""
    body = method.body[1:] if ast.get_docstring(method, clean=False) is not None else method.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    call = body[0].value
    if isinstance(call, ast.Await | ast.YieldFrom):
        call = call.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    parameters = {node.arg for node in ast.walk(method.args) if isinstance(node, ast.arg)}
    values = [*call.args, *(word.value for word in call.keywords)]
    values = [value.value if isinstance(value, ast.Starred) else value for value in values]
    return all(isinstance(value, ast.Name) and value.id in parameters for value in values)


def measure(root: Path, rules: Rules, *, runs: bool = True) -> dict[str, Figure]:
    """Return all figures of a checkout in the order of `MEASURES`; figures of a run only if `runs`."""
    figures = lines(root) | graphs(root, rules)
    figures["forwarding_methods"] = forwarding_methods(root)
    figures["kind_comparisons"] = place_figure(comparisons(root, rules.kinds))
    for folder in ("tests", "benchmarks"):
        files = sorted((root / folder).rglob("*.py"))
        figures[f"{folder[:-1]}_lines"] = sum_figure((name_below(path, root), len(lines_of(path))) for path in files)
        figures[f"{folder[:-1]}_files"] = sum_figure((name_below(path, root), 1) for path in files)
    if runs:
        figures |= {
            f"{role}_modules": sum_figure((name, 1) for name in names) for role, names in loaded_modules(root).items()
        }
    return {name: figures[name] for name in MEASURES if name in figures}


def loaded_modules(root: Path) -> dict[str, list[str]]:
    """Return the modules that an actor and a proxy load in a run of a checkout whose extensions are built."""
    command = [sys.executable, str(Path(__file__).with_name("structure_run.py"))]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT, check=False)
    if done.returncode:
        raise RunFailed(f"structure_run.py failed with memoire of {root}:\n{done.stderr}")
    modules: dict[str, list[str]] = json.loads(done.stdout)
    return modules


def git(root: Path, *arguments: str) -> bytes:
    """Return git's output; raise OSError or CalledProcessError if git fails."""
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=True, timeout=100).stdout


def measure_commit(commit: str, root: Path, rules: Rules, *, runs: bool = True) -> dict[str, Figure]:
    """Return the figures of a commit, by the commit's own rules if it has a rules file."""
    with tempfile.TemporaryDirectory(prefix="structure-") as folder:
        other = Path(folder).resolve()
        names = git(root, "ls-tree", "--name-only", commit).decode().split()
        wanted = {"memoire", "dashboard", "tests", "benchmarks", "deploy", "tools", "setup.py", "pyproject.toml"}
        archive = git(root, "archive", commit, *sorted(wanted.intersection(names)))
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(other, filter="data")
        if (other / RULES).exists():
            rules = Rules.read(other / RULES)
        try:
            if runs:
                build(other, root)
            return measure(other, rules, runs=runs)
        except (RunFailed, subprocess.SubprocessError) as error:
            print(f"{commit} cannot run here: {error}", file=sys.stderr)
            return measure(other, rules, runs=False)


def build(other: Path, root: Path) -> None:
    """Copy the compiled modules of `root` to `other` if their sources are the same, else build them."""

    def native(top: Path) -> dict[str, bytes]:
        files = [path for path in product_files(top) if path.suffix in (*CYTHON, ".h")]
        return {name_below(path, top): path.read_bytes() for path in files}

    if native(other) == native(root):
        for path in (root / "memoire").rglob("*.so"):
            shutil.copy(path, other / path.relative_to(root))
    else:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=other, capture_output=True, check=True, timeout=BUILD_TIMEOUT)


def rises(now: Figure, before: Figure | None) -> list[str]:
    """Return lines about the parts that rose since the former figure, the greatest rise first."""
    former = before.parts if before else Counter[str]()
    changes = sorted(
        ((now.parts[part] - former[part], part) for part in now.parts), key=lambda each: (-each[0], each[1])
    )
    return [
        f"{part}: {former[part]} -> {now.parts[part]}" + (f" ({now.where[part]})" if part in now.where else "")
        for rise, part in changes
        if rise > 0
    ]


def check(root: Path, rules: Rules, figures: Mapping[str, Figure]) -> list[str]:
    """Return lines about figures above their ceilings, each with the parts that rose since the ceiling was set."""
    names = [name for name, figure in figures.items() if figure.value > rules.ceilings.get(name, math.inf)]
    former: dict[str, dict[str, Figure]] = {}
    report = []
    for name in names:
        figure, before = figures[name], None
        report.append(f"{name}: {figure.value:,g}, and the ceiling is {rules.ceilings[name]:,g}: {MEASURES[name]}.")
        try:
            commit = git(root, "log", "-1", "--format=%h", f"-G^{name} =", "--", RULES).decode().strip()
            if commit not in former:
                former[commit] = measure_commit(commit, root, rules, runs=not OF_A_RUN.isdisjoint(names))
            before = former[commit].get(name)
            report.append(f"  Parts that rose since {commit}, which set the ceiling:")
        except (OSError, subprocess.SubprocessError, tarfile.TarError):
            report.append("  Its greatest parts, since git has no commit that set the ceiling:")
        report += [f"  {reason}" for reason in rises(figure, before)[:20]] or [
            f"  no part; it was {before.value:,g} then." if before else "  no part."
        ]
    if report:
        report.append(f"Lower the figures, or raise ceilings in {RULES} and give the reason in the commit.")
    return report


def record(path: Path, figures: Mapping[str, Figure], ceilings: Mapping[str, float]) -> list[str]:
    """Lower the ceilings in a file to the figures and add missing ones; return lines about the changes."""
    text, changed = path.read_text(encoding="utf-8"), []
    for name, figure in figures.items():
        former = ceilings.get(name, math.inf)
        if name not in WITHOUT_CEILING and figure.value < former:
            changed.append(f"{name}: {former:g} -> {figure.value:g}")
            line = f"{name} = {figure.value:.12g}"
            head, mark, tail = text.partition("[ceilings]\n")
            tail, count = re.subn(rf"^{name} = .*$", line, tail, flags=re.MULTILINE)
            text = head + mark + (tail if count else f"{tail}{line}\n")
    path.write_text(text, encoding="utf-8")
    return changed


def table(figures: Mapping[str, Figure], ceilings: Mapping[str, float]) -> str:
    """Return the figures beside their ceilings, as a table in Markdown."""
    rows = [f"| {text} | {value(figures, name)} | {ceilings.get(name, '')} |" for name, text in MEASURES.items()]
    return "\n".join(["| what | figure | ceiling |", "| --- | --: | --: |", *rows])


def comparison_table(commit: str, former: Mapping[str, Figure], figures: Mapping[str, Figure]) -> str:
    """Return two checkouts' figures side by side, as a table in Markdown."""
    rows = [f"| {text} | {value(former, name)} | {value(figures, name)} |" for name, text in MEASURES.items()]
    return "\n".join([f"| what | {commit} | now |", "| --- | --: | --: |", *rows])


def value(figures: Mapping[str, Figure], name: str) -> str:
    return f"{figures[name].value:,g}" if name in figures else "not measured"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure")
    parser.add_argument(
        "--no-run", action="store_true", help="leave out figures that need a run of an actor and a proxy"
    )
    parser.add_argument("--check", action="store_true", help="fail if a figure is above its ceiling")
    parser.add_argument("--record", action="store_true", help="lower the ceilings to the figures")
    parser.add_argument("--beside", metavar="COMMIT", help="print a commit's figures beside those of the checkout")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw the packages, layers and imports")
    parser.add_argument("--parts", metavar="MEASURE", choices=MEASURES, help="print the parts of a figure")
    args: Any = parser.parse_args(arguments)
    root: Path = args.root.resolve()
    rules = Rules.read(root / RULES if (root / RULES).exists() else ROOT / RULES)
    if args.draw:
        args.draw.write_text(drawing(root), encoding="utf-8")
        return 0
    figures = measure(root, rules, runs=not args.no_run)
    if args.check:
        report = check(root, rules, figures)
        if (root / PICTURE).exists() and (root / PICTURE).read_text(encoding="utf-8") != drawing(root):
            report.append(f"{PICTURE} is out of date: make structure")
        print("\n".join(report), file=sys.stderr)
        return 1 if report else 0
    if args.record:
        print(*record(root / RULES, figures, rules.ceilings), sep="\n")
    elif args.parts:
        print(*rises(figures[args.parts], None), sep="\n")
    elif args.beside:
        print(comparison_table(args.beside, measure_commit(args.beside, root, rules, runs=not args.no_run), figures))
    else:
        print(table(figures, rules.ceilings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
