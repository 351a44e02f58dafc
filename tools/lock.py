"""Lock files for the images: versions and hashes of packages, for every Python that memoire supports.

    python tools/lock.py              pin packages that are not pinned yet, or whose pinned version is no longer allowed
    python tools/lock.py --upgrade    pin the newest allowed version of every package

deploy/requirements has a file for each environment of the Dockerfile, which installs it with pip's --require-hashes. A
package has the same version in all files. `uv`, in an environment of its own, resolves the versions; only this step
needs the package index.
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
"""Python environment that uv is installed in."""
NOTICE = "tools/lock.py writes this file: `make lock` adds what is missing, `make lock LOCK_ARGS=--upgrade` renews all."
ENVIRONMENTS: Mapping[str, tuple[str, ...]] = {
    "actor": (),
    "all": ("lz4", "server", "dashboard"),
    "demo": ("server", "demo"),
}
"""Extras of memoire by environment."""
WHERE = "implementation_name == 'cpython' and sys_platform == 'linux'"
"""Marker of the images' platform, in uv's spelling; packages for other platforms are left out."""
APART = {"sbom": ["cyclonedx-bom>=7"]}
"""Requirements of the program that lists an environment's contents; no image has it."""
GROUPS = ("docs", "release")
"""Dependency groups of pyproject.toml with a file of their own; no image has them."""


def project() -> dict[str, Any]:
    """Return the contents of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements() -> Iterator[tuple[str, list[str]]]:
    """Yield name and requirements of each lock file."""
    settings = project()
    ours, extras = settings["project"]["dependencies"], settings["project"]["optional-dependencies"]
    for name, chosen in ENVIRONMENTS.items():
        wanted = [one for extra in chosen for one in extras[extra] if not one.startswith(settings["project"]["name"])]
        yield name, [*ours, *wanted]
    yield "build", settings["build-system"]["requires"]
    yield from APART.items()
    yield from ((name, settings["dependency-groups"][name]) for name in GROUPS)


def oldest() -> str:
    """Return the oldest Python version that memoire supports."""
    return str(project()["project"]["requires-python"]).removeprefix(">=")


def uv() -> Path:
    """Install uv if it is missing; return the program's path."""
    program = UV / "bin" / "uv"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", UV], check=True)
        pip = [UV / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv>=0.5"]
        subprocess.run(pip, check=True)
    return program


def pin(name: str, wanted: list[str], pinned: Path | None, *, upgrade: bool) -> None:
    """Write an environment's lock file; packages in `pinned`, another lock file, get the same version."""
    file = FOLDER / f"{name}.txt"
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "pyproject.toml"), Path(folder, "found.txt")
        source.write_text(
            f'[project]\nname = "{name}"\nversion = "0"\nrequires-python = ">={oldest()}"\n'
            f"dependencies = {json.dumps(wanted)}\n[tool.uv]\nenvironments = {json.dumps([WHERE])}\n",
            encoding="utf-8",
        )
        if file.exists() and not upgrade:
            output.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")  # uv leaves files as they are
        command: list[str | os.PathLike[str]] = [uv(), "pip", "compile", "--quiet", "--universal"]
        command += ["--generate-hashes", "--only-binary", ":all:"]
        command += ["--no-header", "--no-annotate", "--output-file", output, source]
        command += ["--constraint", pinned] if pinned else []
        subprocess.run(command, check=True, cwd=folder)  # uv looks for settings in the folder
        text = output.read_text(encoding="utf-8").replace(f" ; {WHERE}", "").replace(f" and {WHERE}", "")
        file.write_text(f"# {NOTICE}\n{text}", encoding="utf-8")


def main() -> int:
    """Write all lock files and return the exit status."""
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
