"""Render the Helm chart, and walk what came out: what test_chart*.py stand on."""

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from httpkit import ask
from netkit import until

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "memoire"
CASES = [
    None,
    *sorted((CHART / "ci").glob("*-values.yaml")),
    *sorted((ROOT / "deploy" / "examples").glob("*.yaml")),
    *sorted((ROOT / "tests" / "kubernetes").glob("*.yaml")),
]
"""Values with which it is rendered: none, every kind of cluster, what the examples say, and what tests install."""
INSECURE = ("security.insecure=true", "server.env=CartPole-v1")
KUBERNETES = "1.34.0"


def helms():
    """Every helm there is: those that MEMOIRE_HELM names, with : between, or the one on PATH."""
    named = [path for path in os.environ.get("MEMOIRE_HELM", "").split(os.pathsep) if path]
    found = named or [path for path in [shutil.which("helm")] if path]
    return found or [None]


def run(helm, *arguments):
    """What helm says: its exit status, stdout and stderr."""
    if helm is None:
        pytest.skip("helm is not installed")
    done = subprocess.run([helm, *map(str, arguments)], capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


def _given(values, sets):
    """Options of helm for these values."""
    parts = [part for one in sets for part in ("--set-json" if "=[" in one or "={" in one else "--set", one)]
    return [*(["--values", values] if values else []), *parts]


@functools.cache
def text(*, helm=None, values=None, sets=(), chart=CHART, kubernetes=KUBERNETES, release="memoire"):
    """The chart as it is rendered; `values` is one of the CASES."""
    where = ("--namespace", "rl", "--kube-version", kubernetes)
    code, out, err = run(helm or helms()[0], "template", release, chart, *where, *_given(values, sets))
    assert code == 0, err
    return out


@functools.cache
def _objects(written):
    return [each for each in yaml.load_all(written, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if each]


def render(**how):
    """The objects of it. They are everybody's: look, and change nothing."""
    return _objects(text(**how))


def refusal(*sets, values=None):
    """What the chart says to values that it does not take."""
    where = ("--kube-version", KUBERNETES, *_given(values, sets))
    code, _, err = run(helms()[0], "template", "memoire", CHART, *where)
    assert code != 0, "it was taken"
    return err


def notes(tmp_path, *sets, values=None):
    """What Helm prints at the end of an installation."""
    shown = tmp_path / "memoire"
    shutil.rmtree(shown, ignore_errors=True)
    shutil.copytree(CHART, shown)
    written = (shown / "templates" / "NOTES.txt").read_text(encoding="utf-8")
    made = (
        '{"apiVersion": "v1", "kind": "Notes", "metadata": {"name": "notes"}, "text": {{ include "notes" . | toJson }}}'
    )
    template = '{{ define "notes" }}' + written + "{{ end }}" + made
    (shown / "templates" / "notes.yaml").write_text(template, encoding="utf-8")
    return of(_objects(text.__wrapped__(chart=shown, sets=sets, values=values)), "Notes")["text"]


def of(objects, kind, name=None):
    """The only object of a kind, or of a kind and name."""
    found = [each for each in objects if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    assert len(found) == 1, (kind, name, [each["metadata"]["name"] for each in found])
    return found[0]


def kinds(objects):
    return {(each["kind"], each["metadata"]["name"]) for each in objects}


def pods(objects):
    """The name and spec, and labels, of every Pod that would be made."""
    for each in objects:
        template = each if each["kind"] == "Pod" else each["spec"].get("template") if "spec" in each else None
        if template:
            yield f"{each['kind']}/{each['metadata']['name']}", template["spec"], template["metadata"]["labels"]


def containers(spec):
    return [*spec.get("initContainers", ()), *spec["containers"]]


def pod(kind, name, **how):
    """The spec of the Pods of a workload."""
    return of(render(**how), kind, f"memoire-{name}")["spec"]["template"]["spec"]


def container(name, **how):
    """A container by its name, among all Pods that are made."""
    (found,) = [one for _, spec, _ in pods(render(**how)) for one in containers(spec) if one["name"] == name]
    return found


def variables(container):
    """Its environment."""
    return {one["name"]: one.get("value") for one in container["env"]}


def told(**how):
    """What its nodes are told in their file."""
    return json.loads(of(render(**how), "ConfigMap", "memoire")["data"]["memoire.json"])


# ------------------------------------------------------------------------------------------------- NetworkPolicies


def halves(policies):
    """What each half of the policies of a component lets through by itself: {component: (ingress, egress)}, texts as
    "peer TCP/5560".
    """
    found = {}
    for each in policies:
        if each["kind"] == "NetworkPolicy":
            both = found.setdefault(each["metadata"]["labels"]["app.kubernetes.io/component"], (set(), set()))
            for place, (half, peers) in enumerate((("ingress", "from"), ("egress", "to"))):
                both[place].update(
                    f"{peer} {port['protocol']}/{port.get('port', 'any')}"
                    for rule in each["spec"].get(half, ())
                    for peer in map(_peer, rule.get(peers) or [{}])
                    for port in rule.get("ports", [{"protocol": "any"}])
                )
    return found


def _peer(said):
    """A peer in a word: the component of this release, the labels it is chosen by, its network, or anybody."""
    if not said:
        return "anybody"
    if "ipBlock" in said:
        return said["ipBlock"]["cidr"]
    (selector,) = said.values()
    labels = dict(selector["matchLabels"])
    component = labels.pop("app.kubernetes.io/component", "")
    own = {"app.kubernetes.io/name": "memoire", "app.kubernetes.io/instance": "memoire"}
    return component if component and labels == own else json.dumps(selector["matchLabels"])


PROGRAM = "docker-registry"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Registry:
    """A registry that runs.

    Args:
        port: Where it listens, on 127.0.0.1.
    """

    def __init__(self, port):
        self.address = f"127.0.0.1:{port}"
        self.web = f"http://{self.address}"

    def url(self, name):
        """What helm calls a chart here."""
        return f"oci://{self.address}/{name}"

    def manifest(self, name, version):
        """(digest, content) of a chart's manifest, as anybody reads it."""
        status, headers, body = ask(self.web, f"v2/{name}/manifests/{version}", headers={"Accept": MANIFEST})
        assert status == 200, body
        return headers["Docker-Content-Digest"], json.loads(body)

    def is_up(self):
        with contextlib.suppress(OSError):
            return ask(self.web, "v2/")[0] == 200
        return False


@contextlib.contextmanager
def registry(folder):
    """A registry that keeps everything in this folder; skips the test where there is no program for it."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        made = Registry(free.getsockname()[1])
    config = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}},
        "http": {"addr": made.address},
    }
    file = folder / "registry.json"
    file.write_text(json.dumps(config), encoding="utf-8")  # which is YAML, too
    with (folder / "registry.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen([PROGRAM, "serve", str(file)], stdout=log, stderr=subprocess.STDOUT)
        try:
            until(lambda: process.poll() is not None or made.is_up(), 30.0)
            assert process.poll() is None, (folder / "registry.log").read_text(encoding="utf-8")
            yield made
        finally:
            process.kill()
            process.wait()
