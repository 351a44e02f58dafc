"""Render the Helm chart, and walk what came out: what test_chart*.py stand on."""

import contextlib
import functools
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "memoire"
FOLDERS = (ROOT / "deploy" / "examples", "*.yaml"), (ROOT / "tests" / "kubernetes", "*.yaml")
CASES = [path for folder, names in ((CHART / "ci", "*-values.yaml"), *FOLDERS) for path in sorted(folder.glob(names))]
"""Values with which it is rendered: every kind of cluster, what the examples say, and what is installed for tests."""
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


def flags(sets):
    """The options of helm that set these values."""
    return [part for one in sets for part in ("--set-json" if "=[" in one or "={" in one else "--set", one)]


@functools.cache
def text(*, helm=None, values=None, sets=(), chart=CHART, kubernetes=KUBERNETES, release="memoire"):
    """The chart as it is rendered; `values` is one of the CASES."""
    given = [*(["--values", values] if values else []), *flags(sets)]
    where = ["--namespace", "rl", "--kube-version", kubernetes]
    code, out, err = run(helm or helms()[0], "template", release, chart, *where, *given)
    assert code == 0, err
    return out


@functools.cache
def _objects(written):
    return [each for each in yaml.load_all(written, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if each]


def render(**how):
    """The objects of it. They are everybody's: look, and change nothing."""
    return _objects(text(**how))


def refusal(*sets):
    """What the chart says to values that it does not take."""
    code, _, err = run(helms()[0], "template", "memoire", CHART, "--kube-version", KUBERNETES, *flags(sets))
    assert code != 0, "it was taken"
    return err


NOTES = '{"apiVersion": "v1", "kind": "Notes", "metadata": {"name": "notes"}, "text": {{ include "notes" . | toJson }}}'


def notes(tmp_path, *sets):
    """What Helm prints at the end of an installation."""
    shown = tmp_path / "memoire"
    shutil.rmtree(shown, ignore_errors=True)
    shutil.copytree(CHART, shown)
    written = (shown / "templates" / "NOTES.txt").read_text(encoding="utf-8")
    made = '{{ define "notes" }}' + written + "{{ end }}" + NOTES
    (shown / "templates" / "notes.yaml").write_text(made, encoding="utf-8")
    return of(filter(None, yaml.safe_load_all(text.__wrapped__(chart=shown, sets=sets))), "Notes")["text"]


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


# ------------------------------------------------------------------------------------------------- NetworkPolicies


def _matches(selector, labels):
    assert set(selector) <= {"matchLabels"}, selector
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def _allows(rules, peers, labels, port):
    for rule in rules:
        ports = [each.get("port", port) for each in rule.get("ports", ())]
        if ports and port not in ports:
            continue
        among = rule.get(peers)
        if not among or any("podSelector" in peer and _matches(peer["podSelector"], labels) for peer in among):
            return True
    return False


def connects(policies, source, target, port):
    """Whether Pods with these labels may connect, in a namespace in which everything else is denied.

    `source` or `target` None is somebody outside, who has no labels and no policies.
    """
    here = [each["spec"] for each in policies if each["kind"] == "NetworkPolicy"]

    def passes(half, peers, pod, other):
        chosen = [each for each in here if pod is not None and _matches(each["podSelector"], pod)]
        return pod is None or any(_allows(each.get(half, ()), peers, other or {}, port) for each in chosen)

    return passes("egress", "to", source, target) and passes("ingress", "from", target, source)


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

    def url(self, name):
        """What helm calls a chart here."""
        return f"oci://{self.address}/{name}"

    def manifest(self, name, version):
        """(digest, content) of a chart's manifest, as anybody reads it."""
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=10.0)) as connection:
            connection.request("GET", f"/v2/{name}/manifests/{version}", headers={"Accept": MANIFEST})
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == 200, body
            return answer.headers["Docker-Content-Digest"], json.loads(body)

    def is_up(self):
        with contextlib.suppress(OSError), contextlib.closing(http.client.HTTPConnection(self.address)) as connection:
            connection.request("GET", "/v2/")
            return connection.getresponse().status == 200
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
            deadline = time.monotonic() + 30.0
            while not made.is_up():
                assert process.poll() is None, (folder / "registry.log").read_text(encoding="utf-8")
                assert time.monotonic() < deadline, "the registry did not start within 30 s"
                time.sleep(0.05)
            yield made
        finally:
            process.kill()
            process.wait()
