"""Build of the aarch64 wheel with Debian's cross compiler, and its tests in qemu with an aarch64 Python.

Python, its headers and its libraries for aarch64 are Debian's packages, unpacked into build/release/arm64. The system's
own packages stay unchanged: this module gives apt separate lists and a separate state.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import release

FOLDER = release.WORK / "arm64"
SYSTEM, PACKAGES = FOLDER / "root", FOLDER / "packages"
DEBIAN = ("python3", "libpython3-dev", "libstdc++6")
"""Debian packages that are unpacked, together with their dependencies."""
NEEDED = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "gymnasium", "numpy")
"""Packages that the tests import, beside memoire and its dependencies."""
TESTS = ("tests/replay/test_ranks.py", "tests/replay/test_entry_values.py", "tests/wire/test_checksum.py",
         "tests/wire/test_cache.py", "tests/tables/test_pool.py")  # fmt: skip
"""Tests of each compiled module."""
PLATFORMS = ("manylinux_2_17_aarch64", "manylinux2014_aarch64", "manylinux_2_27_aarch64", "manylinux_2_28_aarch64")


def apt(*words: str) -> str:
    """Run apt-get for aarch64, with lists and state in `FOLDER`."""
    for name in ("lists/partial", "cache/archives/partial"):
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
    (FOLDER / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State::lists": FOLDER / "lists",
        "Dir::State::status": FOLDER / "status",
        "Dir::Cache": FOLDER / "cache",
        "APT::Sandbox::User": "root",
    }
    arguments = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return release.run([release.need("apt-get", "apt"), "-qq", *arguments, *words])


def system() -> Path:
    """Unpack Debian's Python for aarch64 if needed; return its folder."""
    done = FOLDER / "unpacked"
    if not done.exists():
        shutil.rmtree(SYSTEM, ignore_errors=True)
        apt("update")
        apt("install", "--yes", "--no-install-recommends", "--download-only", *DEBIAN)
        SYSTEM.mkdir(parents=True)
        for package in sorted((FOLDER / "cache" / "archives").glob("*.deb")):
            release.run(["dpkg-deb", "--extract", package, SYSTEM])
        done.touch()
    return SYSTEM


def python() -> Path:
    """Return the path of the aarch64 interpreter, whose name ends in its version."""
    (path,) = [path for path in (system() / "usr" / "bin").glob("python3.*") if path.name[8:].isdigit()]
    return path


def build(compiler: str) -> Path:
    """Build the aarch64 wheel with the cross compiler and return its path."""
    include = system() / "usr" / "include"
    return release.build_wheel(
        "aarch64",
        release.tools() / "python",
        CC=compiler,
        LDSHARED=f"{compiler} -shared",
        include=f"-I{include / python().name} -idirafter {include}",
        _PYTHON_HOST_PLATFORM="linux-aarch64",
    )


def install(wheel: Path) -> None:
    """Install the wheel and the packages that its tests import into `PACKAGES`."""
    shutil.rmtree(PACKAGES, ignore_errors=True)
    pip = [release.tools() / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--target", PACKAGES, "--only-binary", ":all:", "--implementation", "cp"]
    pip += ["--python-version", python().name.removeprefix("python")]
    release.run([*pip, *(word for name in PLATFORMS for word in ("--platform", name)), f"{wheel}[lz4]", *NEEDED])


def test(wheel: Path, emulator: str, tests: Sequence[str] = TESTS) -> str:
    """Run the core's tests in the emulator and return a line with pytest's summary."""
    install(wheel)
    command = [
        emulator,
        "-L",
        SYSTEM,
        python(),
        "-P",
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-x",
        "-o",
        "timeout=600",
    ]
    printed = release.run([*command, *tests], PYTHONPATH=str(PACKAGES), QEMU_LD_PREFIX=str(SYSTEM), CI="true")
    return f"by {Path(emulator).name}: {printed.strip().splitlines()[-1].strip('= ')}"
