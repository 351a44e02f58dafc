"""Builder of releases: makes all parts in dist/release and tests them. Publishes nothing.

    python tools/release.py                    every part
    python tools/release.py wheel archive      some of them, in this order
    python tools/release.py --list             the parts

Each part prints its result, or why this machine cannot make it. The workflow in .github/workflows/release.yml runs the
same parts and publishes them. Exit status: 1 if a part failed, else 0; a part that this machine cannot make is no
failure.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "dist" / "release"
WORK = ROOT / "build" / "release"
REQUIREMENTS = ROOT / "deploy" / "requirements"
TOOLS = ("build", "release", "sbom")
"""Lock files of deploy/requirements with the programs that make releases."""
FLAGS = "-Wall -O3 -fwrapv -DNDEBUG"
"""Compiler flags that replace Python's own: the same for each processor, without debug information."""
EXTRAS = "demo,lz4,server"
"""Extras that the part `trial` installs with memoire."""
PLATFORM = "manylinux_2_28"
"""Newest platform tag that a wheel may require: distributions since 2018."""
EXAMPLE = "examples/single_process.py"
Command = Sequence[str | os.PathLike[str]]


class NotHere(Exception):
    """Reason why this machine cannot make a part."""


class Failed(Exception):
    """Reason why a part failed."""


def run(command: Command, *, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command and return its output; raise `Failed` with the output if the command fails."""
    words = " ".join(map(str, command))
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except OSError as error:
        raise Failed(f"{words} cannot be run: {error}") from error
    if done.returncode:
        raise Failed(f"{words}\n{done.stdout[-4000:]}\nended with {done.returncode}")
    return done.stdout


def need(program: str, package: str) -> str:
    """Return a program's path; raise `NotHere` with the package to install if the program is missing."""
    path = shutil.which(program)
    if path is None:
        raise NotHere(f"{program} is not installed (Debian, Ubuntu: apt-get install {package})")
    return path


def version() -> str:
    """Return the version of the package in this checkout."""
    text = (ROOT / "memoire" / "version.py").read_text(encoding="utf-8")
    (number,) = re.findall(r'^VERSION = "(.*)"', text, re.MULTILINE)
    return str(number)


def tools() -> Path:
    """Install the pinned release tools if needed; return the folder of their programs."""
    folder, stamp = WORK / "tools", WORK / "tools" / "pinned"
    files = [REQUIREMENTS / f"{name}.txt" for name in TOOLS]
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", folder])
        pip = [
            folder / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--require-hashes",
            "--only-binary",
            ":all:",
        ]
        for file in files:
            run([*pip, "-r", file])
        stamp.write_text(wanted, encoding="utf-8")
    return folder / "bin"


def numbers(root: Path = ROOT) -> dict[str, str]:
    """Return the version in each file that names one."""
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    chart = (root / "deploy" / "helm" / "memoire" / "Chart.yaml").read_text(encoding="utf-8")
    package = (root / "memoire" / "version.py").read_text(encoding="utf-8")
    return {
        "memoire/version.py": re.findall(r'(?m)^VERSION = "(.*)"', package)[0],
        "CHANGELOG.md": re.findall(r"(?m)^## (\S+)", changelog)[0],
        "Chart.yaml's appVersion": re.findall(r'(?m)^appVersion: "(.*)"$', chart)[0],
    }


def agreed(versions: Mapping[str, str]) -> str:
    """Return the version that all files name; raise `Failed` if the files differ."""
    if len(set(versions.values())) != 1:
        raise Failed(f"one version is needed everywhere, but the files differ: {dict(versions)}")
    return next(iter(versions.values()))


def check() -> str:
    """Check that all files name one version; report a changelog without a date and uncommitted changes."""
    reports = [f"version {agreed(numbers())}"]
    dirty = run(["git", "status", "--porcelain"]).strip()
    heading = re.findall(r"(?m)^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[0]
    if "unreleased" in heading:
        reports.append("the changelog still says unreleased: replace that with the date before a release")
    if dirty:
        reports.append(f"the checkout has uncommitted changes: {len(dirty.splitlines())} files")
    return "; ".join(reports)


def newest(changelog: str) -> str:
    """Return the newest section of a changelog, without its heading."""
    return changelog.partition("\n## ")[2].partition("\n## ")[0].partition("\n")[2].strip() + "\n"


def notes() -> str:
    """Write the changelog's newest section as the text of the release's page."""
    section = newest((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    (OUT / "notes.md").write_text(section, encoding="utf-8")
    return f"notes.md, {len(section.splitlines())} lines of the changelog"


def epoch() -> str:
    """Return the newest commit's time in Unix seconds, so that two builds of the commit give the same files."""
    return run(["git", "log", "-1", "--format=%ct"]).strip()


def archive() -> str:
    """Build the source archive and check its files."""
    setup = [tools() / "python", "setup.py", "--quiet", "sdist", "--dist-dir", OUT]
    run(setup, SOURCE_DATE_EPOCH=epoch())
    (path,) = OUT.glob("*.tar.gz")
    return f"{path.name}: {run([sys.executable, 'tools/package_contents.py', path]).strip().rpartition(': ')[2]}"


def build_wheel(machine: str, python: Path, *, include: str = "", **environment: str) -> Path:
    """Build a wheel for a kind of processor; `include` is the compiler option for the headers of that Python."""
    base = WORK / f"build-{machine}"
    shutil.rmtree(base, ignore_errors=True)
    for old in OUT.glob(f"*{machine}.whl"):
        old.unlink()
    command = [python, "setup.py", "--quiet", "build", "--build-base", base, "--force", "bdist_wheel"]
    named = ["--plat-name", f"{PLATFORM}_{machine}", "--dist-dir", OUT]
    run([*command, *named], SOURCE_DATE_EPOCH=epoch(), CFLAGS=f"{FLAGS} {include}", **environment)
    (path,) = OUT.glob(f"*{machine}.whl")
    return path


def oldest_platform(report: str) -> str:
    """Return the platform that auditwheel reports; raise `Failed` if it is newer than `PLATFORM`."""
    words = " ".join(report.split())
    match = re.search(r'platform tag: "manylinux_(\d+)_(\d+)_', words)
    allowed = tuple(map(int, PLATFORM.split("_")[1:]))
    if match is None or (int(match[1]), int(match[2])) > allowed:
        raise Failed(f"the wheel asks for more than {PLATFORM}; auditwheel reports: {words}")
    return f"manylinux_{match[1]}_{match[2]}"


def judged(wheel: Path) -> str:
    """Return a line about a wheel: the platform that it requires, and the check of its files."""
    platform = oldest_platform(run([tools() / "auditwheel", "show", wheel]))
    inside = run([sys.executable, "tools/package_contents.py", wheel]).strip().rpartition(": ")[2]
    return f"{wheel.name}: runs from {platform} on; {inside}"


def wheel() -> str:
    """Build the wheel for this machine's processor; it works with every Python from 3.11 on."""
    return judged(build_wheel(os.uname().machine, tools() / "python"))


def arm64() -> str:
    """Build the wheel for aarch64 with a cross compiler, and run the core's tests in qemu."""
    import release_arm64

    if os.uname().machine == "aarch64":
        raise NotHere("this machine is aarch64: the part `wheel` makes this wheel")
    path = release_arm64.build(need("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"))
    return f"{judged(path)}; {release_arm64.test(path, need('qemu-aarch64', 'qemu-user'))}"


def sbom() -> str:
    """Write the bill of materials of memoire and its dependencies, in CycloneDX format."""
    target = OUT / f"memoire-{version()}.cdx.json"
    command = ["cyclonedx-py", "requirements", "--output-reproducible", "--output-file", target]
    run([tools() / command[0], *command[1:], REQUIREMENTS / "all.txt"])
    return f"{target.name}: {target.read_text(encoding='utf-8').count('bom-ref')} components"


def image() -> str:
    """Build the images with docker, or with the program that $K8S names."""
    import image as images

    docker, builder = shutil.which(os.environ.get("ENGINE", "docker")), os.environ.get("K8S", "")
    if docker and subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0:
        for command in images.commands(docker, version()):
            run(command)
        return f"{', '.join(images.STAGES)} with the tag {version()}, by {docker}"
    if not os.access(builder, os.X_OK):
        raise NotHere("`docker info` failed, and $K8S does not name a program that builds images")
    archives = []
    for name, stage in images.STAGES.items():
        target = ["--target", stage] if stage else []
        printed = run([builder, "build", ROOT, f"localhost/{name}:{version()}", *target])
        archives.append(printed.strip().splitlines()[-1])
    inside = run([sys.executable, "tools/package_contents.py", *archives]).strip().replace("\n", "; ")
    return f"{len(archives)} images by {Path(builder).name}: {inside}"


def last_line(printed: str) -> str:
    """Return the last line of a program's output, which follows any warnings."""
    return printed.strip().splitlines()[-1]


def chart() -> str:
    """Package the chart, and run the test that pushes it to a local registry and installs it from there."""
    helms = (
        os.environ.get("MEMOIRE_HELM") or shutil.which("helm") or last_line(run([sys.executable, "tools/get_helm.py"]))
    )
    printed = run([helms.partition(os.pathsep)[0], "package", "deploy/helm/memoire", "--destination", OUT])
    need("docker-registry", "docker-registry")
    output = run([sys.executable, "-m", "pytest", "-m", "chart", "tests/chart/test_registry.py"], MEMOIRE_HELM=helms)
    return f"{Path(printed.split()[-1]).name}; registry: {output.strip().splitlines()[-1]}"


def sums(folder: Path = OUT) -> str:
    """Write SHA256SUMS of all files in the release folder."""
    files = sorted(file for file in folder.iterdir() if file.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    return f"SHA256SUMS of {len(files)} files"


def trial() -> str:
    """Install the wheel into an empty environment, without index and compiler, and use it there."""
    folder, wheels, empty = WORK / "trial", WORK / "wheels", WORK / "empty"
    shutil.rmtree(folder, ignore_errors=True)
    empty.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "venv", folder])
    python, (wheel,) = folder / "bin" / "python", OUT.glob(f"*{os.uname().machine}.whl")
    needed = f"{wheel}[{EXTRAS}]"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, "download", "--only-binary", ":all:", "--dest", wheels, needed])
    alone = {"PATH": str(folder / "bin"), "CC": "/nonexistent/cc", "PYTHONPATH": "", "PIP_CONFIG_FILE": os.devnull}
    run([*pip, "install", "--no-index", "--find-links", wheels, needed], cwd=empty, PIP_FIND_LINKS="", **alone)
    usage = run([folder / "bin" / "memoire", "--help"], cwd=empty, **alone)
    shown = run([python, ROOT / EXAMPLE], cwd=empty, **alone).strip().splitlines()[-1]
    place = run([python, "-c", "import memoire; print(memoire.__file__, memoire.__version__)"], cwd=empty, **alone)
    if str(folder) not in place or version() not in place or "usage: memoire" not in usage:
        raise Failed(f"the installed memoire is not the built one, or its command does not work: {place}")
    return f"installed without index and compiler; `memoire --help` works; {EXAMPLE} printed: {shown}"


PARTS: dict[str, Callable[[], str]] = {
    "check": check,
    "notes": notes,
    "archive": archive,
    "wheel": wheel,
    "arm64": arm64,
    "sbom": sbom,
    "chart": chart,
    "image": image,
    "sums": sums,
    "trial": trial,
}


def make(name: str, part: Callable[[], str]) -> NotHere | Failed | None:
    """Make a part and print its result; return the exception if the part is not made, else None."""
    try:
        print(f"{name:8} {part()}", flush=True)
    except NotHere as reason:
        print(f"{name:8} NOT MADE HERE: {reason}", flush=True)
        return reason
    except Failed as reason:
        print(f"{name:8} FAILED: {reason}", flush=True)
        return reason
    return None


def make_all(parts: Mapping[str, Callable[[], str]]) -> int:
    """Make all parts, even after one that failed; print which are missing and return the exit status."""
    results = {name: make(name, part) for name, part in parts.items()}
    left_out = {name: reason for name, reason in results.items() if isinstance(reason, NotHere)}
    failed = [name for name, reason in results.items() if isinstance(reason, Failed)]
    print(f"{len(results) - len(left_out) - len(failed)} of {len(results)} parts are made", flush=True)
    for name, reason in left_out.items():
        print(f"not made here: {name}, because {reason}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return int(bool(failed))


def main(arguments: list[str] | None = None) -> int:
    """Make the parts that the command line names and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--list", action="store_true", help="print what each part makes")
    args = parser.parse_args(arguments)
    if args.list:
        print(*(f"{name:8} {part.__doc__}" for name, part in PARTS.items()), sep="\n")
        return 0
    if not args.parts:
        shutil.rmtree(OUT, ignore_errors=True)  # a whole release has nothing of an earlier one
    OUT.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    return make_all({name: PARTS[name] for name in args.parts or PARTS})


if __name__ == "__main__":
    import release  # the module that release_arm64 imports: one class of each error

    sys.exit(release.main())
