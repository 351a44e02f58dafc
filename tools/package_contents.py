"""Checks of wheels, source archives and images: they contain only the expected files, and no secret.

    python tools/package_contents.py dist/*.whl dist/*.tar.gz memoire-image.tar

A wheel may contain the package and its metadata; a source archive, files that git tracks and metadata. Wheel and
archive may not contain text that looks like a key, a token or a password. The same holds for an image (as `docker save`
writes it): its environment, and all files that do not belong to the distribution. Exit status: 0 no fault; 1 at least
one fault.
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
"""Suffixes that files of the package may have."""
DESCRIPTION = ("METADATA", "WHEEL", "RECORD", "top_level.txt", "entry_points.txt", "licenses/LICENSE")
GENERATED = ("PKG-INFO", "setup.cfg", "memoire_rl.egg-info/")
"""Files that the build of a source archive adds to those that git tracks."""
SECRETS = {
    "a secret key of memoire": rb"-----BEGIN MEMOIRE SECRET KEY-----\s(?:[A-Za-z-]+: .*\s)+\s+[A-Za-z0-9+/]{43}=",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=]{20}",
    "a key of a cloud": rb"\bAKIA[0-9A-Z]{16}\b",
    "a token of a forge": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{40,}|glpat-[\w-]{20})\b",
    "a token of a package index": rb"\bpypi-AgEI[\w-]{40,}",
    "a password in an address": rb"\b[a-z][a-z0-9+.-]*://[^\s\x00-\x1f/:@\"'{}<>$]+:[^\s\x00-\x1f/:@\"'{}<>$]{6,}@[a-z]",
}
"""Pattern of each kind of secret, in bytes."""
NAMES = re.compile(
    r"(^|/)(own\.key|\.env|\.netrc|\.pypirc|id_[a-z0-9]+|[^/]+\.(pem|p12|pfx|kubeconfig|sqlite|db|log))$"
)
"""Names of files that hold secrets, or that a run leaves behind."""


DISTRIBUTION = ("usr/", "lib/", "bin/", "sbin/", "var/lib/dpkg/", "etc/ssl/certs/")
"""Folders with the files of the image's base. The folders are not checked: libraries contain keys for their own tests.
"""
AUTHORITIES = ("cacert.pem", ".log")
"""Endings of names that are no secrets in an image: certificates of authorities, and logs of package installers."""


class File(NamedTuple):
    """File in an archive; `is_plain` is False for links and devices."""

    name: str
    body: bytes
    is_plain: bool = True


def files_of(archive: Path) -> Iterator[File]:
    """Yield all files of a wheel or source archive; names in the latter do not include the top folder."""
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
    """Return messages about unexpected files and secrets. `known` are the files that git tracks; None for a wheel."""
    messages = []
    for file in files:
        if not file.is_plain:
            messages.append(f"{file.name} is no plain file")
        if (known is None and not _is_packaged(file.name)) or (known is not None and not _is_source(file.name, known)):
            messages.append(f"{file.name} does not belong here")
        if NAMES.search(file.name):
            messages.append(f"{file.name} has the name of a secret, or of a file that a run left behind")
        messages += [f"{file.name} holds {what}" for what, form in SECRETS.items() if _holds(file, form)]
    return messages


def faults_of_image(archive: Path) -> tuple[int, list[str]]:
    """Return the number of files checked in an image's layers, and messages about secrets."""
    files: list[File] = []
    with tarfile.open(archive) as opened:
        (manifest,) = json.load(_body(opened, "manifest.json"))
        settings = json.load(_body(opened, manifest["Config"]))["config"]
        files.append(File("(its settings)", json.dumps(settings).encode()))
        for layer in manifest["Layers"]:
            with tarfile.open(fileobj=_body(opened, layer)) as layer_tar:
                for member in layer_tar:
                    name = member.name.removeprefix("./")
                    if member.isfile() and not name.startswith(DISTRIBUTION):
                        files.append(File(name, _body(layer_tar, member).read()))
    messages = [f"{file.name} has the name of a secret" for file in files if _is_hidden(file.name)]
    messages += [f"{file.name} holds {what}" for file in files for what, form in SECRETS.items() if _holds(file, form)]
    return len(files), messages


def _is_hidden(name: str) -> bool:
    return bool(NAMES.search(name)) and not name.endswith(AUTHORITIES)


def _body(opened: tarfile.TarFile, member: str | tarfile.TarInfo) -> IO[bytes]:
    file = opened.extractfile(member)
    assert file is not None, member
    return file


def _holds(file: File, form: bytes) -> bool:
    return bool(re.search(form, file.body))


def _is_packaged(name: str) -> bool:
    path = PurePosixPath(name)
    if path.parts[0].endswith(".dist-info"):
        return "/".join(path.parts[1:]) in DESCRIPTION
    return path.parts[0] == "memoire" and path.suffix in ENDINGS


def _is_source(name: str, known: set[str]) -> bool:
    # memoire/dashboard is a link to dashboard: an archive holds the files under each of the two names.
    return name in known or name.removeprefix("memoire/") in known or name.startswith(GENERATED)


def tracked() -> set[str]:
    """Return the paths of all files that git tracks."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split("\0"))


def main(names: list[str]) -> int:
    """Check the archives, print their faults and return the exit status."""
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
