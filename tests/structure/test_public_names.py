"""`import memoire` names everything and imports nothing: what is used is imported then."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import memoire

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
