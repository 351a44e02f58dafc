"""Rendering of the Helm chart, and lookups in the rendered objects, for test_chart*.py."""

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
"""Files of values to render: none, each kind of cluster, the examples of deploy, and those of the tests on Kubernetes.
"""
INSECURE = ("security.insecure=true", "server.env=CartPole-v1")
KUBERNETES = "1.34.0"


def helms():
    """Return paths of helm: those that MEMOIRE_HELM lists, or the one on PATH; [None] if helm is missing."""
    named = [path for path in os.environ.get("MEMOIRE_HELM", "").split(os.pathsep) if path]
    paths = named or [path for path in [shutil.which("helm")] if path]
    return paths or [None]


def run(helm, *arguments):
    """Run helm; return its exit status, stdout and stderr."""
    if helm is None:
        pytest.skip("helm is not installed")
    done = subprocess.run([helm, *map(str, arguments)], capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


def _value_options(values, sets):
    parts = [part for one in sets for part in ("--set-json" if "=[" in one or "={" in one else "--set", one)]
    return [*(["--values", values] if values else []), *parts]


@functools.cache
def text(*, helm=None, values=None, sets=(), chart=CHART, kubernetes=KUBERNETES, release="memoire"):
    """Render the chart as YAML text; `values` is one of the CASES."""
    options = ("--namespace", "rl", "--kube-version", kubernetes)
    code, out, err = run(helm or helms()[0], "template", release, chart, *options, *_value_options(values, sets))
    assert code == 0, err
    return out


@functools.cache
def _objects(written):
    return [each for each in yaml.load_all(written, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if each]


def render(**how):
    """Render the chart and return its objects. A cache shares them between tests: do not change them."""
    return _objects(text(**how))


def refusal(*sets, values=None):
    """Return helm's error for values that the chart refuses."""
    options = ("--kube-version", KUBERNETES, *_value_options(values, sets))
    code, _, err = run(helms()[0], "template", "memoire", CHART, *options)
    assert code != 0, "it was taken"
    return err


def notes(tmp_path, *sets, values=None):
    """Return the notes that Helm prints after an installation."""
    shown = tmp_path / "memoire"
    shutil.rmtree(shown, ignore_errors=True)
    shutil.copytree(CHART, shown)
    written = (shown / "templates" / "NOTES.txt").read_text(encoding="utf-8")
    notes_object = (
        '{"apiVersion": "v1", "kind": "Notes", "metadata": {"name": "notes"}, "text": {{ include "notes" . | toJson }}}'
    )
    template = '{{ define "notes" }}' + written + "{{ end }}" + notes_object
    (shown / "templates" / "notes.yaml").write_text(template, encoding="utf-8")
    return of(_objects(text.__wrapped__(chart=shown, sets=sets, values=values)), "Notes")["text"]


def of(objects, kind, name=None):
    """Return the only object of this kind and, if given, this name."""
    matches = [each for each in objects if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    assert len(matches) == 1, (kind, name, [each["metadata"]["name"] for each in matches])
    return matches[0]


def kinds(objects):
    return {(each["kind"], each["metadata"]["name"]) for each in objects}


def pods(objects):
    """Yield (name, spec, labels) of each Pod, also of Pods that a workload creates."""
    for each in objects:
        template = each if each["kind"] == "Pod" else each["spec"].get("template") if "spec" in each else None
        if template:
            yield f"{each['kind']}/{each['metadata']['name']}", template["spec"], template["metadata"]["labels"]


def containers(spec):
    return [*spec.get("initContainers", ()), *spec["containers"]]


def pod(kind, name, **how):
    return of(render(**how), kind, f"memoire-{name}")["spec"]["template"]["spec"]


def container(name, **how):
    (match,) = [one for _, spec, _ in pods(render(**how)) for one in containers(spec) if one["name"] == name]
    return match


def variables(container):
    """Return a container's environment: name -> value."""
    return {one["name"]: one.get("value") for one in container["env"]}


def told(**how):
    """Return the nodes' configuration file, parsed."""
    return json.loads(of(render(**how), "ConfigMap", "memoire")["data"]["memoire.json"])


def halves(policies):
    """Map each component to the traffic that its policies allow: (ingress, egress), texts as "peer TCP/5560"."""
    allowed = {}
    for each in policies:
        if each["kind"] == "NetworkPolicy":
            both = allowed.setdefault(each["metadata"]["labels"]["app.kubernetes.io/component"], (set(), set()))
            for place, (half, peers) in enumerate((("ingress", "from"), ("egress", "to"))):
                both[place].update(
                    f"{peer} {port['protocol']}/{port.get('port', 'any')}"
                    for rule in each["spec"].get(half, ())
                    for peer in map(_peer, rule.get(peers) or [{}])
                    for port in rule.get("ports", [{"protocol": "any"}])
                )
    return allowed


def _peer(peer):
    """Return a peer's name: its component of this release, its labels as JSON, its network, or "anybody"."""
    if not peer:
        return "anybody"
    if "ipBlock" in peer:
        return peer["ipBlock"]["cidr"]
    (selector,) = peer.values()
    labels = dict(selector["matchLabels"])
    component = labels.pop("app.kubernetes.io/component", "")
    own = {"app.kubernetes.io/name": "memoire", "app.kubernetes.io/instance": "memoire"}
    return component if component and labels == own else json.dumps(selector["matchLabels"])


PROGRAM = "docker-registry"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Registry:
    """OCI registry that listens at `port` on 127.0.0.1."""

    def __init__(self, port):
        self.address = f"127.0.0.1:{port}"
        self.web = f"http://{self.address}"

    def url(self, name):
        return f"oci://{self.address}/{name}"

    def manifest(self, name, version):
        """Read a chart's manifest without credentials; return (digest, content)."""
        status, headers, body = ask(self.web, f"v2/{name}/manifests/{version}", headers={"Accept": MANIFEST})
        assert status == 200, body
        return headers["Docker-Content-Digest"], json.loads(body)

    def is_up(self):
        with contextlib.suppress(OSError):
            return ask(self.web, "v2/")[0] == 200
        return False


@contextlib.contextmanager
def registry(folder):
    """Run a registry that stores everything in this folder; skip the test if its program is missing."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        server = Registry(free.getsockname()[1])
    config = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}},
        "http": {"addr": server.address},
    }
    file = folder / "registry.json"
    file.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML, too
    with (folder / "registry.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen([PROGRAM, "serve", str(file)], stdout=log, stderr=subprocess.STDOUT)
        try:
            until(lambda: process.poll() is not None or server.is_up(), 30.0)
            assert process.poll() is None, (folder / "registry.log").read_text(encoding="utf-8")
            yield server
        finally:
            process.kill()
            process.wait()
