"""Public names, their presence in a release, and extensions, which import only public names and can be left out."""

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import memoire
import structure_imports
from memoire import building, kinds, launching
from memoire.version import COMPILED, imports_of
from netkit import until

ROOT = Path(__file__).resolve().parents[2]
LAZY = (building, kinds, launching)
"""Modules for code that extends memoire."""
PACKAGE = Path(memoire.__file__).parent


@pytest.mark.parametrize("module", [memoire, *LAZY], ids=lambda module: str(module.__name__))
def test_names_imported_for_type_checkers_are_imported_when_they_are_used(module: Any) -> None:
    block = next(node for node in ast.parse(Path(module.__file__).read_text("utf-8")).body if isinstance(node, ast.If))
    imports = [(node.module, alias.name) for node in block.body for alias in node.names]  # type: ignore[attr-defined]
    assert imports and set(getattr(module, "__all__", ())) <= {name for _, name in imports}
    assert imports_of(module.__name__) == {name: home for home, name in imports}
    for home, name in imports:
        source = importlib.import_module(home)
        assert getattr(module, name) is (
            getattr(source, name) if hasattr(source, name) else sys.modules[f"{home}.{name}"]
        )
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name


def output_of(code: str, *arguments: str, **options: Any) -> Any:
    """Run code in a separate process and return the JSON that it prints."""
    command = [sys.executable, "-P", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, **options)
    return json.loads(done.stdout)


def test_unused_packages_are_not_imported() -> None:
    loaded = output_of("import memoire, sys, json; print(json.dumps(sorted(sys.modules)))")
    assert not {"numpy", "zmq", "msgspec", "memoire.server", "memoire.replay"} & set(loaded)


PACKAGES = ("torch", "tensordict", "stable_baselines3", "sb3_contrib", "transformers", "minari", "gymnasium")
"""Packages that some module needs beyond the client's requirements."""
WITHOUT_THEM = f"""
import importlib, json, sys

sys.modules.update(dict.fromkeys({PACKAGES}))  # as if they were not installed
from memoire.errors import NotInstalled

said = {{}}
for name in sys.argv[1:]:
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
        getattr(found, attribute) if attribute else None
    except NotInstalled as error:
        said[name] = str(error)
print(json.dumps(said))
"""


def test_a_module_without_its_package_names_the_command_to_install_it() -> None:
    commands = {
        "memoire.torch": "'memoire-rl[torch]'",
        "memoire.sb3": "'memoire-rl[sb3]'",
        "memoire.trl": "'memoire-rl[torch]' 'trl",
        "memoire.tq": "'memoire-rl[tq]'",
        "memoire.minari": "'memoire-rl[minari]'",
        "memoire.rl:SAC": "'memoire-rl[",
        "memoire.rl:RealTimeEnv": "'memoire-rl[rl]'",
        "memoire.tmrl.actor": "'memoire-rl[rl]'",
        "memoire.tmrl.custom": "'memoire-rl[rl]'",
        "memoire.tmrl.rtgym": "'memoire-rl[rl]'",
    }
    messages = output_of(WITHOUT_THEM, *commands)
    assert set(messages) == set(commands)
    for name, command in commands.items():
        assert f"pip install {command}" in messages[name], messages[name]


def test_the_package_carries_its_types() -> None:
    assert resources.files("memoire").joinpath("py.typed").is_file()
    for name in COMPILED:
        assert resources.files("memoire").joinpath(f"{name}.pyi").is_file()


def test_every_source_of_a_compiled_module_is_built_and_checked() -> None:
    sources = {
        path.relative_to(ROOT / "memoire").with_suffix("").as_posix() for path in (ROOT / "memoire").rglob("*.pyx")
    }
    assert set(COMPILED) == sources
    names = [f"memoire.{name.replace('/', '.')}" for name in COMPILED]
    assert all(f'"{name}"' in (ROOT / "setup.py").read_text(encoding="utf-8") for name in names)
    assert " ".join(names) in (ROOT / "Makefile").read_text(encoding="utf-8"), "their stubs are compared"


def test_no_generated_file_is_tracked() -> None:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in listing if name.endswith((".c", ".so", ".whl", ".pyc"))] == []


def test_every_extra_is_in_all() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    listed = re.search(r"\[(.*)\]", extras["all"][0])
    assert listed is not None
    assert set(listed[1].split(",")) == set(extras) - {"all"}


STANDS_ON = {"tmrl": ("rl",), "tq": ("keyed",), "trl": ("prompts",)}
"""Extensions on which another extension builds."""


def public_modules() -> set[str]:
    """Return the modules in the first table of docs/reference.md."""
    table = (ROOT / "docs" / "reference.md").read_text("utf-8").partition("| --- | --- |")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[1:] for name in re.findall(r"`([a-z0-9_.]+)`", row.split("|")[1])}


def not_public(extension: str) -> set[str]:
    """Return the names of memoire that an extension's files import, but that are neither its own nor public."""
    own = [f"memoire.{each}" for each in (extension, *STANDS_ON.get(extension, ()))]
    roots = [*own, *(public_modules() - {"memoire"})]
    private = set()
    folder = "memoire/" + extension.replace(".", "/")
    for path in structure_imports.sources(ROOT):
        name = path.relative_to(ROOT).as_posix()
        if name == f"{folder}.py" or name.startswith(f"{folder}/"):
            package = ("memoire", *structure_imports.place(path, ROOT)[:-1])
            for _, parts in structure_imports.imports(path, package):
                full = ".".join(parts)
                is_top = len(parts) == 2 and parts[1] in (*imports_of("memoire"), "__version__")
                if (
                    parts[0] == "memoire"
                    and not is_top
                    and not any(f"{full}.".startswith(f"{each}.") for each in roots)
                ):
                    private.add(full)
    return private


@pytest.mark.parametrize("extension", memoire.EXTENSIONS)
def test_an_extension_imports_only_public_names(extension: str) -> None:
    assert not_public(extension) == set()


WITHOUT = """
import json, sys
import memoire
from memoire.errors import NotInstalled

said = []
for name in sys.argv[1:]:
    try:
        memoire.Table(storage="keyed") if name == "storage keyed" else getattr(memoire, name)
    except NotInstalled as error:
        said.append(str(error))
print(json.dumps(said))
"""
NOT_EDITABLE = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "Editable" not in repr(each)]
"""
"""Python code that keeps a process from finding extensions in the folder of an editable installation."""
CORE = ("accounting", "client", "disk", "models", "reader", "server", "tables")
"""Folders of the core's tests, of which only files that name no extension run."""
OF_EXTENSIONS = re.compile(r"memoire[. ](import )?(keyed|prompts|Prompts)|classic_help|bytekit")


def core_files(folder: str) -> list[str]:
    """Return files of tests that run without the extensions."""
    paths = sorted((ROOT / "tests" / folder).glob("test_*.py"))
    return [str(path) for path in paths if not OF_EXTENSIONS.search(path.read_text("utf-8"))]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a process that finds memoire without its extensions."""
    folder = tmp_path_factory.mktemp("core")
    (folder / "memoire").mkdir()
    for path in PACKAGE.iterdir():
        if path.stem not in (*memoire.EXTENSIONS, "__pycache__"):
            (folder / "memoire" / path.name).symlink_to(path.resolve())
    (folder / "sitecustomize.py").write_text(NOT_EDITABLE)
    return os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("folder", CORE)
def test_the_core_s_tests_pass_without_the_extensions(folder: str, core: dict[str, str]) -> None:
    options = ["-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    command = [sys.executable, *options, *core_files(folder)]
    done = subprocess.run(command, env=core, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
def test_an_extension_that_is_left_out_is_named(core: dict[str, str]) -> None:
    names = [*memoire.EXTENSIONS, "ReplayMemory", "Prompts", "storage keyed"]
    messages = output_of(WITHOUT, *names, env=core)
    assert len(messages) == len(names) and all("which is not installed: pip install" in each for each in messages)
    demo = [sys.executable, "-P", "-m", "memoire", "demo"]
    done = subprocess.run(demo, env=core, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1 and "this needs memoire.rl, which is not installed" in done.stderr


EXAMPLE = re.compile(r"^Example:\n((?:    .*\n|\n)+)", re.MULTILINE)
PEERS = {"Prompts", "Proxy", "Reader", "RemotePolicy", "ReplayMemoryClient", "ReplayMemoryServer", "Server"}
"""Classes whose examples talk to other processes, or go on without an end: pages run the same calls."""


def public_classes() -> list[Any]:
    return [each for name in sorted(imports_of("memoire")) if isinstance(each := getattr(memoire, name), type)]


@pytest.mark.parametrize("kind", public_classes(), ids=lambda kind: str(kind.__name__))
def test_each_public_class_has_an_example_that_runs(kind: Any, tmp_path: Path) -> None:
    example = EXAMPLE.search(f"{inspect.getdoc(kind)}\n")
    assert example, f"{kind.__name__} has no example"
    code = compile(textwrap.dedent(example[1]), kind.__name__, "exec")
    if kind.__name__ in PEERS:
        return
    schema = memoire.Schema({"obs": (np.float32, (4,)), "action": np.int64, "reward": np.float32})
    buffer = memoire.Buffer(schema, 1000, seed=1)
    options = {"process": memoire.Process(tune=False)}
    with (
        memoire.Server("tcp://127.0.0.1:*", schema, **options) as server,
        memoire.Server("tcp://127.0.0.1:*", schema, storage="rollouts", rollout_length=8, **options) as taken,
        memoire.connect(taken.endpoint) as client,
    ):
        for writer in (buffer.writer(), client.writer()):
            for step in range(128 if kind is memoire.Rollouts else 20):
                writer.step(np.full(4, step), 0, 1.0, False, False, np.full(4, step + 1))
        names = {"buffer": buffer, "env": gymnasium.make("CartPole-v1"), "folder": tmp_path / "state", "schema": schema}
        names |= {"memoire": memoire, "np": np, "warnings": warnings}
        if kind is memoire.Rollouts:
            until(lambda: taken.stats().held_caches == 16)
        with warnings.catch_warnings():
            exec(code, names | {"server": server, "table": taken.table("default")})  # noqa: S102 - own examples
