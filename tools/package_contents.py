"""What is in wheels, source archives and images: nothing but what belongs there, and no secret.

    python tools/package_contents.py dist/*.whl dist/*.tar.gz memoire-image.tar

A wheel has the package and what describes it; a source archive has files that git knows, and what describes it. Nothing
in either looks like a key, a token or a password; nor does anything in an image (as `docker save` writes it) that is
not the distribution's own, or in its environment. Exit status: 0 all is well; 1 something is there that should not be.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ENDINGS = {".py", ".pyi", ".so", ".typed", ".html", ".js", ".css", ".svg"}
"""What a file of the package may end with."""
DESCRIPTION = ("METADATA", "WHEEL", "RECORD", "top_level.txt", "entry_points.txt", "licenses/LICENSE")
MADE = ("PKG-INFO", "setup.cfg", "memoire_rl.egg-info/")
"""What building a source archive adds to the files that git knows."""
SECRETS = {
    "a secret key of memoire": rb"-----BEGIN MEMOIRE SECRET KEY-----\s(?:[A-Za-z-]+: .*\s)+\s+[A-Za-z0-9+/]{43}=",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=]{20}",
    "a key of a cloud": rb"\bAKIA[0-9A-Z]{16}\b",
    "a token of a forge": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{40,}|glpat-[\w-]{20})\b",
    "a token of a package index": rb"\bpypi-AgEI[\w-]{40,}",
    "a password in an address": rb"\b[a-z][a-z0-9+.-]*://[^\s\x00-\x1f/:@\"'{}<>$]+:[^\s\x00-\x1f/:@\"'{}<>$]{6,}@[a-z]",
}
"""What a secret looks like, in bytes."""
NAMES = re.compile(
    r"(^|/)(own\.key|\.env|\.netrc|\.pypirc|id_[a-z0-9]+|[^/]+\.(pem|p12|pfx|kubeconfig|sqlite|db|log))$"
)
"""Names of files that hold secrets, or what a run left behind."""


DISTRIBUTION = ("usr/", "lib/", "bin/", "sbin/", "var/lib/dpkg/", "etc/ssl/certs/")
"""Where the files of the image's base are, which are not looked at: libraries hold keys to test themselves with."""
AUTHORITIES = ("cacert.pem", ".log")
"""Names that are none of secrets, in an image: certificates of authorities, and what installing packages has logged."""


class File(NamedTuple):
    """One file of an archive; `is_plain` is false for links and devices."""

    name: str
    body: bytes
    is_plain: bool = True


def files_of(archive: Path) -> Iterator[File]:
    """All files of a wheel or source archive; of the latter without the folder that holds everything."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                if not info.is_dir():
                    yield File(info.filename, opened.read(info))
        return
    with tarfile.open(archive) as opened_tar:
        for member in opened_tar.getmembers():
            if not member.isdir():
                body = opened_tar.extractfile(member) if member.isfile() else None
                yield File(member.name.partition("/")[2], body.read() if body else b"", member.isfile())


def faults(files: Iterator[File], known: set[str] | None) -> list[str]:
    """What should not be there. `known` are the files that git knows; None is a wheel."""
    found = []
    for file in files:
        if not file.is_plain:
            found.append(f"{file.name} is no plain file")
        if (known is None and not _is_packaged(file.name)) or (known is not None and not _is_source(file.name, known)):
            found.append(f"{file.name} does not belong here")
        if NAMES.search(file.name):
            found.append(f"{file.name} has the name of a secret, or of what a run left behind")
        found += [f"{file.name} holds {what}" for what, form in SECRETS.items() if _holds(file, form)]
    return found


def faults_of_image(archive: Path) -> tuple[int, list[str]]:
    """How many files were looked at in the layers of an image, and what should not be there."""
    files: list[File] = []
    with tarfile.open(archive) as opened:
        (manifest,) = json.load(_body(opened, "manifest.json"))
        said = json.load(_body(opened, manifest["Config"]))["config"]
        files.append(File("(its settings)", json.dumps(said).encode()))
        for layer in manifest["Layers"]:
            with tarfile.open(fileobj=_body(opened, layer)) as layer_tar:
                for member in layer_tar:
                    name = member.name.removeprefix("./")
                    if member.isfile() and not name.startswith(DISTRIBUTION):
                        files.append(File(name, _body(layer_tar, member).read()))
    found = [f"{file.name} has the name of a secret" for file in files if _is_hidden(file.name)]
    found += [f"{file.name} holds {what}" for file in files for what, form in SECRETS.items() if _holds(file, form)]
    return len(files), found


def _is_hidden(name: str) -> bool:
    return bool(NAMES.search(name)) and not name.endswith(AUTHORITIES)


def _body(opened: tarfile.TarFile, member: str | tarfile.TarInfo) -> IO[bytes]:
    found = opened.extractfile(member)
    assert found is not None, member
    return found


def _holds(file: File, form: bytes) -> bool:
    return bool(re.search(form, file.body))


def _is_packaged(name: str) -> bool:
    path = PurePosixPath(name)
    if path.parts[0].endswith(".dist-info"):
        return "/".join(path.parts[1:]) in DESCRIPTION
    return path.parts[0] == "memoire" and path.suffix in ENDINGS


def _is_source(name: str, known: set[str]) -> bool:
    # memoire/dashboard is a link to dashboard: an archive holds the files under both names.
    return name in known or name.removeprefix("memoire/") in known or name.startswith(MADE)


def tracked() -> set[str]:
    """Files that git knows."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split("\0"))


def main(names: list[str]) -> int:
    """Look into these archives."""
    status = 0
    for name in names:
        if name.endswith(".tar"):
            count, wrong = faults_of_image(Path(name))
        else:
            files = list(files_of(Path(name)))
            count, wrong = len(files), faults(iter(files), None if name.endswith(".whl") else tracked())
        for fault in wrong:
            print(f"{name}: {fault}")
        status |= bool(wrong)
        print(f"{name}: {count} files, {len(wrong)} faults")
    return int(status or not names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
