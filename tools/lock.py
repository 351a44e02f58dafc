"""Pin what the images install: versions and hashes, for every Python that the package takes.

    python tools/lock.py              whatever is not pinned yet, or no longer allowed
    python tools/lock.py --upgrade    everything anew

deploy/requirements has a file for each environment of the Dockerfile, which installs it by pip's --require-hashes. All
are of one resolution: a package has the same version in each of them. `uv`, in an environment of its own, finds the
versions; that takes the index, and nothing else does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "requirements"
UV = ROOT / "build" / "lock"
"""Environment of uv."""
SAID = "tools/lock.py writes this file: `make lock` adds what is missing, `make lock LOCK_ARGS=--upgrade` renews all."
ENVIRONMENTS: Mapping[str, tuple[str, ...]] = {
    "actor": (),
    "all": ("lz4", "server", "dashboard"),
    "demo": ("server", "demo"),
}
"""Extras of memoire in each."""
WHERE = "implementation_name == 'cpython' and sys_platform == 'linux'"
"""What images have, as uv writes it: what only others need is left out."""
APART = {"sbom": ["cyclonedx-bom>=7"]}
"""What lists the contents of an environment, and is in none of them."""
GROUPS = ("docs", "release")
"""Dependency groups of pyproject.toml that are installed apart: no image has them."""


def project() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements() -> Iterator[tuple[str, list[str]]]:
    """Each file's name, and what it has to have."""
    said = project()
    ours, extras = said["project"]["dependencies"], said["project"]["optional-dependencies"]
    for name, chosen in ENVIRONMENTS.items():
        wanted = [one for extra in chosen for one in extras[extra] if not one.startswith(said["project"]["name"])]
        yield name, [*ours, *wanted]
    yield "build", said["build-system"]["requires"]
    yield from APART.items()
    yield from ((name, said["dependency-groups"][name]) for name in GROUPS)


def oldest() -> str:
    """The first Python that the package takes."""
    return str(project()["project"]["requires-python"]).removeprefix(">=")


def uv() -> Path:
    """The program, installed where it is not."""
    program = UV / "bin" / "uv"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", UV], check=True)
        pip = [UV / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv>=0.5"]
        subprocess.run(pip, check=True)
    return program


def pin(name: str, wanted: list[str], pinned: Path | None, *, upgrade: bool) -> None:
    """Write an environment's file; what `pinned` has, another environment's, has its version here too."""
    file = FOLDER / f"{name}.txt"
    with tempfile.TemporaryDirectory() as folder:
        asked, found = Path(folder, "pyproject.toml"), Path(folder, "found.txt")
        asked.write_text(
            f'[project]\nname = "{name}"\nversion = "0"\nrequires-python = ">={oldest()}"\n'
            f"dependencies = {json.dumps(wanted)}\n[tool.uv]\nenvironments = {json.dumps([WHERE])}\n",
            encoding="utf-8",
        )
        if file.exists() and not upgrade:
            found.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")  # uv leaves these as they are
        command: list[str | os.PathLike[str]] = [uv(), "pip", "compile", "--quiet", "--universal"]
        command += ["--generate-hashes", "--only-binary", ":all:"]
        command += ["--no-header", "--no-annotate", "--output-file", found, asked]
        command += ["--constraint", pinned] if pinned else []
        subprocess.run(command, check=True, cwd=folder)  # where uv looks for its settings
        text = found.read_text(encoding="utf-8").replace(f" ; {WHERE}", "").replace(f" and {WHERE}", "")
        file.write_text(f"# {SAID}\n{text}", encoding="utf-8")


def main() -> int:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true")
    upgrade = parser.parse_args().upgrade
    FOLDER.mkdir(exist_ok=True)
    wanted = dict(requirements())
    pinned = None
    for name in sorted(wanted, key=lambda name: -len(ENVIRONMENTS.get(name, ()))):  # the largest decides
        pin(name, wanted[name], pinned, upgrade=upgrade)
        pinned = pinned or FOLDER / f"{name}.txt"
    return 0


if __name__ == "__main__":
    sys.exit(main())
