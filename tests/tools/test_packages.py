"""Packages and images without foreign files or secrets, and dependencies that are pinned and audited."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging import requirements, utils

import audit
import lock
import package_contents as contents
from memoire.security import keys as keypairs

ROOT = Path(__file__).resolve().parents[2]
GOOD = {
    "memoire/__init__.py": b"",
    "memoire/_core.abi3.so": b"\x7fELF tcp://127.0.0.1:5560g\0\0\0\0\0\1>@here",  # an address, and bytes without text
    "memoire/wire/_bytes.abi3.so": b"\x7fELF",
    "memoire/py.typed": b"",
    "memoire/dashboard/static/index.html": b"<html>",
    "memoire_rl-1.0.dist-info/METADATA": b"",
    "memoire_rl-1.0.dist-info/licenses/LICENSE": b"",
}
TOKEN = "ghp_" + 36 * "a"


def wheel(folder, files):
    path = folder / "memoire_rl-1.0-cp311-abi3-linux.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return path


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("memoire/_core.c", b"", "does not belong here"),
        ("memoire/_core.pyx", b"", "does not belong here"),
        ("memoire/wire/_bytes.pxd", b"", "does not belong here"),
        ("memoire/_kernels/native.h", b"", "does not belong here"),
        ("tests/wire/test_wire.py", b"", "does not belong here"),
        ("memoire/own.key", b"", "has the name of a secret"),
        ("memoire/state/state.db", b"", "a file that a run left behind"),
        ("memoire/settings.py", keypairs.make("actor").text(secret=True).encode(), "holds a secret key of memoire"),
        ("memoire/settings.py", b"-----BEGIN EC PRIVATE KEY-----\n" + 64 * b"A", "holds a private key"),
        ("memoire/settings.py", b"AKIA" + 16 * b"A", "holds a key of a cloud"),
        ("memoire/settings.py", TOKEN.encode(), "holds a token of a forge"),
        ("memoire/settings.py", b"https://somebody:" + b"secret123@registry.example", "holds a password in an address"),
    ],
)
def test_what_does_not_belong_into_a_wheel_is_named(tmp_path, capsys, name, body, words):
    assert contents.main([str(wheel(tmp_path, GOOD | {name: body}))]) == 1
    output = capsys.readouterr().out
    assert f"{name} " in output and words in output


def test_a_source_archive_has_what_git_knows_and_nothing_else(tmp_path):
    path = tmp_path / "memoire_rl-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("PKG-INFO", "README.md", "dashboard/web/api.py", "memoire/dashboard/web/api.py", "notes.txt"):
            info = tarfile.TarInfo(f"memoire_rl-1.0/{name}")
            archive.addfile(info, io.BytesIO())
        link = tarfile.TarInfo("memoire_rl-1.0/README.md")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    faults = contents.faults(contents.files_of(path), {"README.md", "dashboard/web/api.py"})
    assert faults == ["notes.txt does not belong here", "README.md is no plain file"]


def image(folder, files, environment=()):
    """Write an image of one layer as `docker save` does, and return its path."""

    def packed(name, entries, mode="w"):
        with tarfile.open(folder / name, mode) as archive:
            for each, body in entries.items():
                info = tarfile.TarInfo(each)
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))
        return folder / name

    layer = packed("layer", files).read_bytes()
    config = json.dumps({"config": {"Env": list(environment)}}).encode()
    manifest = json.dumps([{"Config": "c.json", "Layers": ["layer.tar"]}]).encode()
    return packed("image.tar", {"manifest.json": manifest, "c.json": config, "layer.tar": layer})


def test_an_image_holds_no_secret_beside_those_that_its_base_tests_itself_with(tmp_path, capsys):
    private = b"-----BEGIN PRIVATE KEY-----\n" + 64 * b"A"
    good = {"usr/lib/libgnutls.so": private, "opt/memoire/lib/certifi/cacert.pem": b"", "opt/memoire/x.py": b""}
    assert contents.main([str(image(tmp_path, good))]) == 0
    assert contents.main([str(image(tmp_path, good | {"opt/memoire/keys/own.key": private}, [f"A={TOKEN}"]))]) == 1
    output = capsys.readouterr().out
    assert "own.key has the name of a secret" in output and "own.key holds a private key" in output
    assert "(its settings) holds a token of a forge" in output and "libgnutls" not in output


def test_nothing_that_git_knows_holds_a_secret():
    try:
        names = contents.tracked() - {""}
    except (OSError, contents.subprocess.CalledProcessError):
        pytest.skip("this is no git checkout")
    here = Path(__file__).resolve().parents[2]
    files = [contents.File(name, (here / name).read_bytes()) for name in names if (here / name).is_file()]
    faults = contents.faults(iter(files), names)
    assert faults == []


def test_databases_that_cannot_be_asked_are_no_good_news():
    unknown = [{"name": name, "skip_reason": "not found"} for name in ("a", "b", "memoire-rl")]
    status, lines, left = audit.verdict({"osv": "no route", "pypi": {"dependencies": unknown}})
    assert (status, left) == (3, ["all 2 packages"]) and lines[0] == "osv could not be asked: no route"
    assert audit.verdict({"pip-audit": "it could not be installed"})[0] == 3


def pins(name):
    """Map each package in an environment's file to its versions, each with the number of its hashes."""
    packages, version = {}, None
    for line in (ROOT / "deploy" / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("--hash=sha256:"):
            version["hashes"] += 1
        elif not line.startswith("#"):
            package, _, rest = line.partition("==")
            version = {"version": rest.split()[0], "hashes": 0}
            packages.setdefault(package, []).append(version)
    return packages


@pytest.mark.parametrize("name", [name for name, _ in lock.requirements()])
def test_what_an_image_has_is_pinned_as_the_package_demands(name):
    wanted, pinned = dict(lock.requirements())[name], pins(name)
    assert wanted and all(version["hashes"] for versions in pinned.values() for version in versions)
    for each in map(requirements.Requirement, wanted):
        versions = pinned.get(utils.canonicalize_name(each.name), [])
        assert versions and all(version["version"] in each.specifier for version in versions), f"{each}: make lock"


def test_the_dockerfile_installs_nothing_that_is_not_pinned():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    installs = [
        line for line in text.splitlines() if "pip" in line and " install " in line and not line.startswith("#")
    ]
    assert len(installs) == 5
    assert all("--require-hashes" in line or "--no-deps" in line for line in installs)
