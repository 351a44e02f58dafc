"""`make image`: the images that the chart asks for, and what a cluster needs to find them."""

import os
import re
import subprocess
import sys

import pytest

import image
from chartkit import ROOT, containers, pods, render


@pytest.fixture
def engine(tmp_path):
    """Runs `make image` with a docker that writes down what it is asked, and fails for images that are named."""
    (tmp_path / "docker").write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"open({str(tmp_path / 'asked')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "sys.exit(3 if os.environ.get('FAILS', 'none') in ' '.join(sys.argv) else 0)\n"
    )
    (tmp_path / "docker").chmod(0o755)

    def make(*words, **environment):
        path = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.run(
            ["make", "--no-print-directory", "image", f"PYTHON={sys.executable}", *words], cwd=ROOT, capture_output=True,
            text=True, timeout=60, env=os.environ | {"PATH": path} | environment,
        )  # fmt: skip

    return make, tmp_path / "asked"


def test_make_image_builds_what_the_chart_asks_for_and_says_how_a_cluster_gets_it(engine):
    make, asked = engine
    done = make()
    assert done.returncode == 0, done.stderr
    wanted = {one["image"] for _, spec, _ in pods(render()) for one in containers(spec)}
    lines = asked.read_text().splitlines()
    assert {line.split()[2] for line in lines} == wanted == {f"{name}:{image.version()}" for name in image.STAGES}
    assert [("--target demo" in line) for line in lines] == [False, True]
    names = " ".join(sorted(wanted, key=len))
    for words in (f"kind load docker-image {names}", "minikube image load", "k3s ctr images import", "--set image.registry=",
                  "helm install memoire deploy/helm/memoire --namespace rl --create-namespace"):  # fmt: skip
        assert words in done.stdout, words


def test_pages_name_the_images_that_make_image_builds():
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    said = set(re.findall(r"\bmemoire-demo:\S+", page))
    assert said == {f"memoire-demo:{image.version()}"}


def test_make_image_says_what_could_not_be_built(engine):
    make, _ = engine
    done = make(FAILS="memoire-demo")
    assert done.returncode != 0 and "could not build memoire-demo:" in done.stderr and "kind load" not in done.stdout
    missing = make("ENGINE=no-such-engine")
    assert missing.returncode != 0 and "there is no no-such-engine on PATH" in missing.stderr
