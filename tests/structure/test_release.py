"""What a release promises: one version everywhere, types and their stubs in the package, no generated file in git."""

import re
import subprocess
import tomllib
from importlib import resources
from pathlib import Path

import memoire
from memoire.version import COMPILED

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
