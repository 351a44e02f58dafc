"""The chart as an artifact: metadata of its package, and its way through an OCI registry."""

import base64
import hashlib
import re

import pytest
import yaml

from chartkit import CHART, ROOT, helms, of, registry, run, text


def about():
    return yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))


def pulled(written):
    """Return the images of all containers in a rendered text."""
    return set(re.findall(r"(?m)^ +image: (\S+)$", written))


def test_its_icon_is_the_dashboards_and_needs_no_address():
    head, _, content = about()["icon"].partition(",")
    assert head == "data:image/svg+xml;base64"
    assert base64.b64decode(content) == (ROOT / "memoire" / "dashboard" / "static" / "icon.svg").read_bytes()


def test_a_hub_is_told_what_an_installation_pulls_and_under_which_license():
    annotations = about()["annotations"]
    images = yaml.safe_load(annotations["artifacthub.io/images"])
    assert {one["image"] for one in images} == pulled(text())
    assert {one["name"] for one in images} == {one["image"].partition(":")[0] for one in images}
    assert f'license = "{annotations["artifacthub.io/license"]}"' in (ROOT / "pyproject.toml").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("helm", helms(), ids=str)
def test_a_registry_gives_back_the_chart_that_was_pushed(helm, tmp_path):
    if helm is None:
        pytest.skip("helm is not installed")
    with registry(tmp_path) as here:
        assert run(helm, "package", CHART, "--destination", tmp_path)[0] == 0
        (package,) = tmp_path.glob("memoire-*.tgz")
        version = package.stem.removeprefix("memoire-")
        code, out, err = run(helm, "push", package, here.url("charts"), "--plain-http")
        assert code == 0, out + err
        digest, manifest = here.manifest("charts/memoire", version)
        assert f"Digest: {digest}" in out + err
        (layer,) = manifest["layers"]
        assert layer["digest"] == "sha256:" + hashlib.sha256(package.read_bytes()).hexdigest()

        for name in (here.url("charts/memoire"), f"{here.url('charts/memoire')}@{digest}"):
            args = ("--plain-http", "--kube-version", "1.34.0", *(() if "@" in name else ("--version", version)))
            code, out, err = run(helm, "template", "memoire", name, *args)
            assert code == 0, err
            objects = [each for each in yaml.safe_load_all(out) if each]
            assert of(objects, "StatefulSet", "memoire-server")["spec"]["replicas"] == 1
            assert pulled(out) == pulled(text(helm=helm))
