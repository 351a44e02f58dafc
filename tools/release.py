"""Make a release from beginning to end, into dist/release, and try what was made. Nothing is published.

    python tools/release.py                    every part
    python tools/release.py wheel archive      some of them, in this order
    python tools/release.py --list             the parts

Each part prints what it made, or why it cannot be made here. The workflow in .github/workflows/release.yml runs the
same parts, and publishes them. Exit status: 0 all is well, 1 a part failed; parts that cannot run here do not fail.
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
"""Files of deploy/requirements with what this program runs."""
FLAGS = "-Wall -O3 -fwrapv -DNDEBUG"
"""What is compiled with, in place of what Python was: the same for each processor, and without debug information."""
EXTRAS = "demo,lz4,server"
"""What is installed beside memoire where the release is tried."""
PLATFORM = "manylinux_2_28"
"""The newest platform that a wheel may ask for: distributions since 2018."""
EXAMPLE = "examples/single_process.py"
Command = Sequence[str | os.PathLike[str]]


class NotHere(Exception):
    """A part that this machine cannot make, and why."""


class Failed(Exception):
    """A part that is wrong, and why."""


def run(command: Command, *, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command; what it printed. A failure shows it."""
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
    """The path of a program."""
    found = shutil.which(program)
    if found is None:
        raise NotHere(f"there is no {program} (Debian, Ubuntu: apt-get install {package})")
    return found


def version() -> str:
    """Of the package."""
    text = (ROOT / "memoire" / "version.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^VERSION = "(.*)"', text, re.MULTILINE)
    return str(found)


def tools() -> Path:
    """The folder of the programs that releases are made with, as they are pinned."""
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
    """The version, as each file that names it has it."""
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    chart = (root / "deploy" / "helm" / "memoire" / "Chart.yaml").read_text(encoding="utf-8")
    package = (root / "memoire" / "version.py").read_text(encoding="utf-8")
    return {
        "memoire/version.py": re.findall(r'(?m)^VERSION = "(.*)"', package)[0],
        "CHANGELOG.md": re.findall(r"(?m)^## (\S+)", changelog)[0],
        "Chart.yaml's appVersion": re.findall(r'(?m)^appVersion: "(.*)"$', chart)[0],
    }


def agreed(found: Mapping[str, str]) -> str:
    """The version that all of them name."""
    if len(set(found.values())) != 1:
        raise Failed(f"one version is needed everywhere, but there are {dict(found)}")
    return next(iter(found.values()))


def check() -> str:
    """One version everywhere; whether the changelog has its date, and the checkout no changes."""
    said = [f"version {agreed(numbers())}"]
    dirty = run(["git", "status", "--porcelain"]).strip()
    heading = re.findall(r"(?m)^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[0]
    if "unreleased" in heading:
        said.append("the changelog still says unreleased: write the date before a release")
    if dirty:
        said.append(f"the checkout has changes that no commit has: {len(dirty.splitlines())} files")
    return "; ".join(said)


def newest(changelog: str) -> str:
    """The newest section of a changelog, without its heading."""
    return changelog.partition("\n## ")[2].partition("\n## ")[0].partition("\n")[2].strip() + "\n"


def notes() -> str:
    """The release's section of the changelog, for its page."""
    section = newest((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    (OUT / "notes.md").write_text(section, encoding="utf-8")
    return f"notes.md, {len(section.splitlines())} lines of the changelog"


def epoch() -> str:
    """The time of the newest commit: two builds of it give the same files."""
    return run(["git", "log", "-1", "--format=%ct"]).strip()


def archive() -> str:
    """The source archive."""
    setup = [tools() / "python", "setup.py", "--quiet", "sdist", "--dist-dir", OUT]
    run(setup, SOURCE_DATE_EPOCH=epoch())
    (made,) = OUT.glob("*.tar.gz")
    return f"{made.name}: {run([sys.executable, 'tools/package_contents.py', made]).strip().rpartition(': ')[2]}"


def build_wheel(machine: str, python: Path, *, include: str = "", **environment: str) -> Path:
    """A wheel for a kind of processor; `include` says where the headers of its Python are."""
    base = WORK / f"build-{machine}"
    shutil.rmtree(base, ignore_errors=True)
    for old in OUT.glob(f"*{machine}.whl"):
        old.unlink()
    command = [python, "setup.py", "--quiet", "build", "--build-base", base, "--force", "bdist_wheel"]
    named = ["--plat-name", f"{PLATFORM}_{machine}", "--dist-dir", OUT]
    run([*command, *named], SOURCE_DATE_EPOCH=epoch(), CFLAGS=f"{FLAGS} {include}", **environment)
    (made,) = OUT.glob(f"*{machine}.whl")
    return made


def oldest_platform(said: str) -> str:
    """The oldest platform that a wheel runs on, as auditwheel says. Newer than ours is a failure."""
    words = " ".join(said.split())
    found = re.search(r'platform tag: "manylinux_(\d+)_(\d+)_', words)
    allowed = tuple(map(int, PLATFORM.split("_")[1:]))
    if found is None or (int(found[1]), int(found[2])) > allowed:
        raise Failed(f"the wheel asks for more than {PLATFORM}: {words}")
    return f"manylinux_{found[1]}_{found[2]}"


def judged(wheel: Path) -> str:
    """What a wheel asks for, and what is in it."""
    platform = oldest_platform(run([tools() / "auditwheel", "show", wheel]))
    inside = run([sys.executable, "tools/package_contents.py", wheel]).strip().rpartition(": ")[2]
    return f"{wheel.name}: runs from {platform} on; {inside}"


def wheel() -> str:
    """The wheel for this kind of processor: one for every Python from 3.11 on."""
    return judged(build_wheel(os.uname().machine, tools() / "python"))


def arm64() -> str:
    """The wheel for aarch64, from a cross compiler; then the core's tests, run by qemu."""
    import release_arm64

    if os.uname().machine == "aarch64":
        raise NotHere("this is aarch64: the part `wheel` makes it")
    made = release_arm64.build(need("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"))
    return f"{judged(made)}; {release_arm64.test(made, need('qemu-aarch64', 'qemu-user'))}"


def sbom() -> str:
    """What memoire brings into an environment, as CycloneDX."""
    target = OUT / f"memoire-{version()}.cdx.json"
    command = ["cyclonedx-py", "requirements", "--output-reproducible", "--output-file", target]
    run([tools() / command[0], *command[1:], REQUIREMENTS / "all.txt"])
    return f"{target.name}: {target.read_text(encoding='utf-8').count('bom-ref')} components"


def image() -> str:
    """The images, by docker or by the program that $K8S names."""
    import image as images

    docker, builder = shutil.which(os.environ.get("ENGINE", "docker")), os.environ.get("K8S", "")
    if docker and subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0:
        for command in images.commands(docker, version()):
            run(command)
        return f"{', '.join(images.STAGES)} with the tag {version()}, by {docker}"
    if not os.access(builder, os.X_OK):
        raise NotHere("no Docker engine answers `docker info`, and $K8S names no program that builds images")
    made = []
    for name, stage in images.STAGES.items():
        target = ["--target", stage] if stage else []
        printed = run([builder, "build", ROOT, f"localhost/{name}:{version()}", *target])
        made.append(printed.strip().splitlines()[-1])
    inside = run([sys.executable, "tools/package_contents.py", *made]).strip().replace("\n", "; ")
    return f"{len(made)} images by {Path(builder).name}: {inside}"


def last_line(printed: str) -> str:
    """The last line of what a program printed, behind its warnings."""
    return printed.strip().splitlines()[-1]


def chart() -> str:
    """The chart as an archive; its test pushes one like it to a registry on this machine, and installs from there."""
    helms = (
        os.environ.get("MEMOIRE_HELM") or shutil.which("helm") or last_line(run([sys.executable, "tools/get_helm.py"]))
    )
    printed = run([helms.partition(os.pathsep)[0], "package", "deploy/helm/memoire", "--destination", OUT])
    need("docker-registry", "docker-registry")
    said = run([sys.executable, "-m", "pytest", "-m", "chart", "tests/chart/test_registry.py"], MEMOIRE_HELM=helms)
    return f"{Path(printed.split()[-1]).name}; registry: {said.strip().splitlines()[-1]}"


def sums(folder: Path = OUT) -> str:
    """SHA256SUMS of everything that was made."""
    files = sorted(file for file in folder.iterdir() if file.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    return f"SHA256SUMS of {len(files)} files"


def trial() -> str:
    """Install the wheel from a folder into an empty environment without a compiler, and use it there."""
    folder, wheels, empty = WORK / "trial", WORK / "wheels", WORK / "empty"
    shutil.rmtree(folder, ignore_errors=True)
    empty.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "venv", folder])
    python, (made,) = folder / "bin" / "python", OUT.glob(f"*{os.uname().machine}.whl")
    needed = f"{made}[{EXTRAS}]"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run([*pip, "download", "--only-binary", ":all:", "--dest", wheels, needed])
    alone = {"PATH": str(folder / "bin"), "CC": "/nonexistent/cc", "PYTHONPATH": "", "PIP_CONFIG_FILE": os.devnull}
    run([*pip, "install", "--no-index", "--find-links", wheels, needed], cwd=empty, PIP_FIND_LINKS="", **alone)
    said = run([folder / "bin" / "memoire", "--help"], cwd=empty, **alone)
    shown = run([python, ROOT / EXAMPLE], cwd=empty, **alone).strip().splitlines()[-1]
    place = run([python, "-c", "import memoire; print(memoire.__file__, memoire.__version__)"], cwd=empty, **alone)
    if str(folder) not in place or version() not in place or "usage: memoire" not in said:
        raise Failed(f"what was installed is not what was made: {place}")
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
    """Make a part and print how it went; why it is not there, or None."""
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
    """Make parts, also behind one that fails, and say last which of them are not there; the exit status."""
    went = {name: make(name, part) for name, part in parts.items()}
    left_out = {name: reason for name, reason in went.items() if isinstance(reason, NotHere)}
    failed = [name for name, reason in went.items() if isinstance(reason, Failed)]
    print(f"{len(went) - len(left_out) - len(failed)} of {len(went)} parts are made", flush=True)
    for name, reason in left_out.items():
        print(f"not made here: {name}, because {reason}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return int(bool(failed))


def main(arguments: list[str] | None = None) -> int:
    """Make these parts; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--list", action="store_true", help="print what each part makes")
    given = parser.parse_args(arguments)
    if given.list:
        print(*(f"{name:8} {part.__doc__}" for name, part in PARTS.items()), sep="\n")
        return 0
    if not given.parts:
        shutil.rmtree(OUT, ignore_errors=True)  # a whole release has nothing of an earlier one
    OUT.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    return make_all({name: PARTS[name] for name in given.parts or PARTS})


if __name__ == "__main__":
    import release  # the module that release_arm64 imports: one class of each error

    sys.exit(release.main())
