"""A release of the chart on a real cluster, seen through kubectl and helm alone: works from anywhere with a kubeconfig.

Environment: MEMOIRE_HELM is helm; MEMOIRE_HELM_VALUES a file with more values, as a cluster of yours may want them (images of
your registry, a storage class, nodes); MEMOIRE_NAMESPACE the namespace that is made, and gone at the end.
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "deploy" / "helm" / "memoire"
VALUES = Path(__file__).with_name("values.yaml")
MORE_VALUES = os.environ.get("MEMOIRE_HELM_VALUES")
HELM = os.environ.get("MEMOIRE_HELM", "helm").split(":")[0]
NAMESPACE = os.environ.get("MEMOIRE_NAMESPACE", "memoire-test")
KEYS, TOKENS = "demo-keys", "demo-tokens"
"""What values.yaml calls the Secrets."""
# One node's page, or the dashboard's, as from its own container: no NetworkPolicy is in the way, and no token leaves it.
PAGE = """
import os, pathlib, sys, urllib.request
port, path, token = sys.argv[1], sys.argv[2], pathlib.Path("/etc/memoire/tokens") / sys.argv[3]
request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
if token.exists():
    request.add_header("Authorization", "Bearer " + token.read_text().split()[0])
print(urllib.request.urlopen(request, timeout=10).read().decode())
"""


def run(*command, timeout=60.0, check=True, given=None):
    """Standard output; the test fails with all that was said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, input=given)
    assert done.returncode == 0 or not check, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def memoire(*words):
    """What a command of memoire printed, on this machine."""
    return run(sys.executable, "-m", "memoire", *words)


def until(condition, seconds, what):
    """What `condition` returns as soon as it is true; a cluster that is busy changing may refuse to answer for a while."""
    began, last = time.monotonic(), None
    while time.monotonic() - began < seconds:
        try:
            if last := condition():
                return last
        except (AssertionError, subprocess.TimeoutExpired, KeyError, ValueError) as error:
            last = error
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds:g} s: {what}; last: {last}")


class Release:
    """A release in a namespace of its own, under restricted Pod Security. Everything is gone at the end."""

    VALUES = VALUES
    """The file that each installation begins with."""

    def __init__(self, namespace=NAMESPACE, name="demo"):
        self.namespace, self.name, self.full = namespace, name, f"{name}-memoire"
        self.folder = tempfile.TemporaryDirectory(prefix="memoire-keys-")
        self.keys = Path(self.folder.name) / "keys"
        """The cluster's folder of keys, as whoever installs it has one; the Secrets follow it by `apply_keys`."""

    def kubectl(self, *words, **options):
        return run("kubectl", "-n", self.namespace, *words, **options)

    def helm(self, *words, timeout=200.0):
        return run(HELM, "-n", self.namespace, *words, timeout=timeout)

    def __enter__(self):
        run("kubectl", "delete", "namespace", self.namespace, "--ignore-not-found", timeout=120.0)
        run("kubectl", "create", "namespace", self.namespace)
        run("kubectl", "label", "namespace", self.namespace, "pod-security.kubernetes.io/enforce=restricted")
        memoire("keys", "new", str(self.keys))
        self.apply_keys()
        self.apply_tokens(*(secrets.token_hex(24) for _ in range(2)))
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            self.explain()
        run("kubectl", "delete", "namespace", self.namespace, timeout=120.0, check=False)
        self.folder.cleanup()

    def apply_keys(self):
        """Make the Secrets what the folder of keys is."""
        self.apply(memoire("keys", "export", str(self.keys), "--kubernetes", KEYS))

    def apply_tokens(self, dashboard, nodes):
        """Make these the tokens; several of one kind are given as lines."""
        said = {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": TOKENS}}
        self.apply(said | {"stringData": {"dashboard": dashboard, "nodes": nodes}})

    def apply(self, *objects, namespace=None):
        """Make these objects, given as maps or YAML, or change them."""
        text = "\n---\n".join(each if isinstance(each, str) else json.dumps(each) for each in objects)
        run("kubectl", "-n", namespace or self.namespace, "apply", "-f", "-", given=text)

    def install(self, *words, chart=CHART):
        """Install it, or change it; done when everything is ready."""
        files = [word for path in (self.VALUES, MORE_VALUES) if path for word in ("-f", str(path))]
        self.helm("upgrade", "--install", self.name, str(chart), *files, "--wait", "--timeout", "150s", *words)

    def explain(self):
        """What a person would look at next."""
        for words in (["get", "pods", "-o", "wide"], ["get", "events", "--sort-by=.lastTimestamp"]):
            print(self.kubectl(*words, check=False)[-6000:])
        for pod in self.pods():
            for option in ([], ["--previous"]):
                said = self.kubectl("logs", pod, "--all-containers", "--tail=15", *option, check=False)
                if said:
                    print(f"--- {pod} {' '.join(option)}\n{said}")

    # ------------------------------------------------------------------------------------------------- what is there

    def pods(self, component=None):
        """Names of the Pods that are not about to end."""
        label = f"app.kubernetes.io/instance={self.name}"
        label += f",app.kubernetes.io/component={component}" if component else ""
        found = json.loads(self.kubectl("get", "pods", "-l", label, "-o", "json"))["items"]
        return [pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def addresses(self, component):
        """Where the component's Pods are."""
        found = [json.loads(self.kubectl("get", "pod", pod, "-o", "json")) for pod in self.pods(component)]
        return [pod["status"]["podIP"] for pod in found]

    @property
    def endpoint(self):
        """What clients connect to."""
        return f"tcp://{self.full}.{self.namespace}.svc:5560"

    def are_ready(self, component, count):
        label = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        found = json.loads(self.kubectl("get", "pods", "-l", label, "-o", "json"))["items"]
        ready = [
            any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))
            for pod in found
            if "deletionTimestamp" not in pod["metadata"]
        ]
        return len(ready) == count and all(ready)

    def page(self, pod, path, *, port=8080, token="nodes", container=None):
        chosen = ["-c", container] if container else []
        words = ["exec", pod, *chosen, "--", "python3", "-c", PAGE, str(port), path, token]
        return self.kubectl(*words, timeout=40.0)

    def status(self, pod):
        return json.loads(self.page(pod, "/status?most=1000"))

    def overview(self):
        return json.loads(self.page(f"deploy/{self.full}-dashboard", "/api/overview", port=8265, token="dashboard"))

    def servers(self):
        return [self.status(pod) for pod in self.pods("server")]

    def accounts(self):
        """{client: {"episodes", "steps", "accepted", ...}} of all servers, merged as the cluster's totals are."""
        merged = {}
        for status in self.servers():
            for one in status["clients"]["rows"]:
                known = merged.setdefault(one["client"], {"episodes": 0, "steps": 0, "pushed": 0, "settled": 0})
                known["episodes"] = max(known["episodes"], one["episodes"])
                known["steps"] = max(known["steps"], one["steps"])
                known["pushed"] += one["pushed_caches"]
                known["settled"] += one["accepted_caches"] + sum(one["rejected"].values()) + one["lost_caches"]
        return merged

    # ---------------------------------------------------------------------------------------------- what is done to it

    def kill(self, pod):
        """End a Pod at once, as a crash would; Kubernetes makes another one."""
        self.kubectl("delete", "pod", pod, "--force", "--grace-period=0", "--wait=false")

    @contextlib.contextmanager
    def last_words(self, pods):
        """Follow the actors' logs until they have ended; {client: counts} of each one's last line is filled in."""
        words, threads = {}, []
        for pod in pods:
            command = ["kubectl", "-n", self.namespace, "logs", "-f", pod, "-c", "actor", "--tail=1"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

            def follow(process=process):
                for line in process.stdout:
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        said = json.loads(line)
                        words[said["client"]] = said

            threads.append((process, threading.Thread(target=follow, daemon=True)))
            threads[-1][1].start()
        try:
            yield words
            for _, thread in threads:
                thread.join(60.0)
        finally:
            for process, _ in threads:
                process.kill()
                process.communicate(timeout=10.0)
