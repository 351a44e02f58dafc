"""Public names, and what a release has of them."""

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest

import memoire
from memoire.version import COMPILED

SOURCE = Path(memoire.__file__)


def for_type_checkers() -> dict[str, str]:
    """Names and their modules, as type checkers read them."""
    blocks = [node for node in ast.parse(SOURCE.read_text("utf-8")).body if isinstance(node, ast.If)]
    found = [node for node in blocks[0].body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module).removeprefix("memoire.") for node in found for alias in node.names}


def test_type_checkers_and_python_find_every_name_in_the_same_module() -> None:
    homes = {name: home.removeprefix("memoire.") for name, home in vars(memoire)["_HOMES"].items()}
    assert homes == for_type_checkers()
    assert set(memoire.__all__) <= set(homes)
    for name, home in homes.items():
        assert getattr(memoire, name) is getattr(importlib.import_module(f"memoire.{home}"), name)


def run(code: str) -> object:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    return json.loads(done.stdout)


def test_what_nobody_uses_is_not_imported() -> None:
    loaded = "import memoire, sys, json; print(json.dumps(sorted(sys.modules)))"
    assert not {"numpy", "zmq", "msgspec", "memoire.server", "memoire.replay"} & set(run(loaded))  # type: ignore[call-overload]


def test_an_actor_does_not_import_the_server() -> None:
    loaded = "import memoire, sys, json; memoire.connect; memoire.errors.Closed; print(json.dumps(sorted(sys.modules)))"
    packages = {name.split(".")[1] for name in run(loaded) if name.startswith("memoire.")}  # type: ignore[attr-defined]
    assert "client" in packages and not packages & {"server", "proxy", "reader"}


def test_a_name_that_there_is_none_of_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'memoire' has no attribute 'Buferr'"):
        getattr(memoire, "Buferr")  # noqa: B009  (which mypy would refuse)


PACKAGES = ("torch", "tensordict", "stable_baselines3", "sb3_contrib", "transformers", "minari", "gymnasium")
"""What a module may need beyond the client's requirements."""
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


def test_what_needs_a_package_that_is_not_installed_names_the_command() -> None:
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
    done = subprocess.run([sys.executable, "-c", WITHOUT_THEM, *commands], capture_output=True, check=True, text=True)
    said = json.loads(done.stdout)
    assert set(said) == set(commands)
    for name, command in commands.items():
        assert f"pip install {command}" in said[name], said[name]


ROOT = Path(__file__).resolve().parents[2]


def test_the_newest_heading_of_the_changelog_is_the_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == memoire.__version__


def test_the_package_carries_its_types() -> None:
    assert resources.files("memoire").joinpath("py.typed").is_file()
    for name in COMPILED:
        assert resources.files("memoire").joinpath(f"{name}.pyi").is_file()


def test_every_source_of_a_compiled_module_is_built_and_looked_for() -> None:
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
