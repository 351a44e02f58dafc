"""A release of the chart on a real cluster, seen through kubectl and helm alone: works from anywhere with a kubeconfig.

Environment: MEMOIRE_HELM is helm; MEMOIRE_HELM_VALUES a file with more values, as a cluster of yours may want them (images of
your registry, a storage class, nodes); MEMOIRE_NAMESPACE the namespace that is made, and gone at the end.
"""

import base64
import concurrent.futures
import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from memoire.accounting.merge import by_client, merge
from memoire.wire.rows import ACCOUNT

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "deploy" / "helm" / "memoire"
VALUES = Path(__file__).with_name("values.yaml")
MORE_VALUES = os.environ.get("MEMOIRE_HELM_VALUES")
HELM = os.environ.get("MEMOIRE_HELM", "helm").split(":")[0]
NAMESPACE = os.environ.get("MEMOIRE_NAMESPACE", "memoire-test")
KEYS, TOKENS = "demo-keys", "demo-tokens"
"""What values.yaml calls the Secrets."""
ADDED = ("since", "ended_through", "applied", "stale", "lost_feedback")
"""Columns of accounts that servers of an earlier version do not tell: trials upgrade such servers."""
UNTOLD = re.compile(r"ends before (\d+) steps, (\d+) episodes and \d+ log lines were acknowledged")
"""What an actor says whose home was away at its end, for longer than a Pod has to end (docs/guarantees.md)."""
# One node's page, or the dashboard's, as from its own container: no NetworkPolicy is in the way, and no token leaves it.
PAGE = """
import os, pathlib, sys, urllib.request
port, path, token = sys.argv[1], sys.argv[2], pathlib.Path("/etc/memoire/tokens") / sys.argv[3]
request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
if token.exists():
    request.add_header("Authorization", "Bearer " + token.read_text().split()[0])
page = urllib.request.urlopen(request, timeout=10).read()
if path.startswith("/accounts"):  # packed
    import base64
    page = base64.b64encode(page)
print(page.decode())
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
        except (AssertionError, OSError, subprocess.TimeoutExpired, KeyError, ValueError) as error:
            last = error
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds:g} s: {what}; last: {last}")


def missing():
    """Why there is no cluster to try a release on; "" when there is one."""
    for tool in ("kubectl", HELM):
        if shutil.which(tool) is None:
            return f"{tool} is not on PATH"
    try:
        run("kubectl", "get", "nodes", "--request-timeout=5s", timeout=20.0)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return f"no cluster answers: {str(error).strip().splitlines()[-1]}"
    return ""


def accounts_of(told):
    """Rows of a page of accounts; those of an earlier version lack some columns, and have their epochs beside them."""
    if told["row_bytes"] == ACCOUNT.itemsize:
        return np.frombuffer(told["rows"], ACCOUNT)
    kept = [name for name in ACCOUNT.names if name not in ADDED]
    former = np.frombuffer(told["rows"], np.dtype([(name, ACCOUNT[name]) for name in kept]))
    rows = np.zeros(len(former), ACCOUNT)
    rows[kept] = former
    rows["since"] = np.frombuffer(told["since"], "<i8") if told["since"] else 0
    return rows


class Report:
    """What is to be told of a trial: rows of a table, and promises that did not hold."""

    def __init__(self, *given):
        super().__init__(*given)
        self.rows = []
        self.troubles = []
        self._since = time.monotonic()

    def note(self, what, value=None):
        """For the table; without a value, the seconds since the note before."""
        now = time.monotonic()
        shown = f"{now - self._since:.0f} s" if value is None else value
        self._since = now
        print(f"{what}: {shown}", file=sys.stderr, flush=True)
        self.rows.append((what, shown))

    def check(self, holds, otherwise):
        """Remember a promise that did not hold."""
        if not holds:
            print(otherwise, file=sys.stderr, flush=True)
            self.troubles.append(otherwise)


class Release:
    """A release in a namespace of its own, under restricted Pod Security. At the end everything goes."""

    VALUES = VALUES
    """The file that each installation begins with."""

    def __init__(self, namespace=NAMESPACE, name="demo", helm=HELM):
        self.namespace, self.name, self.full, self._helm = namespace, name, f"{name}-memoire", helm
        self.folder = tempfile.TemporaryDirectory(prefix="memoire-keys-")
        self.keys = Path(self.folder.name) / "keys"
        """The cluster's folder of keys, as whoever installs it has one; the Secrets follow it by `apply_keys`."""
        self.applied = set()
        """Objects that `apply` made: no part of what Helm installs."""

    def kubectl(self, *words, **options):
        return run("kubectl", "-n", self.namespace, *words, **options)

    def helm(self, *words, timeout=200.0):
        return run(self._helm, "-n", self.namespace, *words, timeout=timeout)

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
        run("kubectl", "delete", "namespace", self.namespace, "--wait=false", check=False)
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
        said = run("kubectl", "-n", namespace or self.namespace, "apply", "-f", "-", "-o", "name", given=text)
        self.applied |= set(said.split())

    def install(self, *words, chart=CHART, seconds=150):
        """Install it, or change it; done when everything is ready."""
        files = [word for path in (self.VALUES, MORE_VALUES) if path for word in ("-f", str(path))]
        limit = ("--wait", "--timeout", f"{seconds}s")
        self.helm("upgrade", "--install", self.name, str(chart), *files, *limit, *words, timeout=seconds + 50.0)

    def uninstall(self):
        """Take it away; fails unless nothing of it is left but its servers' volumes, which are to be kept."""
        self.helm("uninstall", self.name, "--wait", "--timeout", "100s")
        own = {"configmap/kube-root-ca.crt", "serviceaccount/default"} | self.applied
        kinds = "all,configmaps,secrets,serviceaccounts,networkpolicies,poddisruptionbudgets,persistentvolumeclaims,ingresses"
        volume = f"persistentvolumeclaim/state-{self.full}-server-"

        def left():
            return [name for name in self.kubectl("get", kinds, "-o", "name").split() if name not in own]

        until(lambda: all(name.startswith(volume) for name in left()), 90.0, "nothing left but volumes of servers")
        return left()

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

    def is_gone(self, component):
        """Whether no Pod of this component is left, not even one that is about to end."""
        label = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        return not self.kubectl("get", "pods", "-l", label, "-o", "name").strip()

    def addresses(self):
        """{component: [where each of its Pods is]}."""
        label = f"app.kubernetes.io/instance={self.name}"
        found: dict[str, list[str]] = {}
        for pod in json.loads(self.kubectl("get", "pods", "-l", label, "-o", "json"))["items"]:
            if "deletionTimestamp" not in pod["metadata"] and "podIP" in pod["status"]:
                component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
                found.setdefault(component, []).append(pod["status"]["podIP"])
        return found

    @property
    def endpoint(self):
        """What clients connect to."""
        return f"tcp://{self.service('')}:5560"

    def service(self, component):
        """A Service's own address, as a number: whether its name is found quickly is another question."""
        name = f"{self.full}-{component}" if component else self.full
        return json.loads(self.kubectl("get", "service", name, "-o", "json"))["spec"]["clusterIP"]

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
        pods = self.pods("server")
        with concurrent.futures.ThreadPoolExecutor(max(1, len(pods))) as threads:
            return list(threads.map(self.status, pods))

    def accounts(self):
        """{client: {"episodes", "steps", "pushed", "settled"}} of all servers, merged as the cluster's totals are."""
        pods = self.pods("server")
        with concurrent.futures.ThreadPoolExecutor(max(1, len(pods))) as threads:
            found = by_client(merge(*threads.map(self.account_rows, pods)))
        return {
            row["client"].tobytes().hex(): {
                "episodes": int(row["episodes"]),
                "steps": int(row["steps"]),
                "pushed": int(row["pushed_caches"]),
                "settled": int(row["accepted_caches"] + row["rejected_caches"] + row["lost_caches"]),
            }
            for row in found
        }

    def account_rows(self, pod):
        """Every account that a server has, those that are not in its memory included."""
        parts, after = [np.empty(0, ACCOUNT)], ""
        while len(parts) == 1 or after:
            told = msgspec.msgpack.decode(base64.b64decode(self.page(pod, f"/accounts?after={after}")))
            parts.append(accounts_of(told))
            after = told.get("next", "")
        return np.concatenate(parts)

    def totals(self):
        """What the cluster says that all of it has counted, asked as a person would."""
        addresses = [f"tcp://{pod}.{self.full}-server:5560" for pod in self.pods("server")]
        said = self.kubectl("exec", self.pods("server")[0], "--", "memoire", "totals", "--json", *addresses)
        return json.loads(said)["totals"]

    def _rows_of(self, client):
        """Every account that any server has of a client, by its Pod."""
        me = np.frombuffer(bytes.fromhex(client), "<u8")
        found = {pod: self.account_rows(pod) for pod in self.pods("server")}
        return [(pod, row) for pod, rows in found.items() for row in rows[(rows["client"] == me).all(axis=1)]]

    def differences(self, words, *, may_move=False):
        """Where the cluster's accounts and totals are not what its actors have counted, by their last words. An actor that
        ended before its home had acknowledged all says how much: so much may be missing.

        Args:
            may_move: Whether proxies give the clients of a server that is away to another one at once, as they did before
                they waited for a minute. Of what such a client pushed last, its former home may not have heard. It is
                marked "moved" in `words`.
        """
        counted = {client: one for client, one in self.accounts().items() if one["steps"] or client in words}
        found = [f"client {client} is counted and said no word" for client in counted.keys() - words.keys()]
        for client, said in words.items():
            has = counted.get(client, {"episodes": 0, "steps": 0, "pushed": 0, "settled": 0})
            did = {name: said[name] for name in ("episodes", "steps")} | dict.fromkeys(
                ("pushed", "settled"), said["caches"]
            )
            if did == has:
                continue
            missing = [did[name] - has[name] for name in ("steps", "episodes")]
            is_told = all(0 <= less <= most for less, most in zip(missing, said.get("untold", (0, 0)), strict=True))
            if is_told and "untold" in said and has["settled"] <= has["pushed"] <= did["pushed"]:  # it said no goodbye
                continue
            rows = self._rows_of(client)
            homes = {int(row["home"]) for _, row in rows}
            if may_move and is_told and len(homes) > 1 and has["settled"] <= has["pushed"] <= did["pushed"]:
                said["moved"] = True
                continue
            shown = ("home", "since", "flags", "pushed_caches", "received_caches", "lost_caches")
            listed = "; ".join(f"{pod}: " + ", ".join(f"{name} {row[name]}" for name in shown) for pod, row in rows)
            found.append(f"client {client} did {did}, and {has} are counted: {listed}")
        steps, told = sum(one["steps"] for one in counted.values()), self.totals()["steps"]
        return found + [f"the cluster's total is {told} steps, its accounts have {steps}"] * (steps != told)

    # ---------------------------------------------------------------------------------------------- what is done to it

    def kill(self, pod):
        """End a Pod at once, as a crash would; Kubernetes makes another one."""
        self.kubectl("delete", "pod", pod, "--force", "--grace-period=0", "--wait=false")

    @contextlib.contextmanager
    def last_words(self):
        """Follow the actors' logs, also of those that come later; {client: counts} is filled in with each one's last line,
        complete when all of them have ended. "untold" are steps and episodes that it could not tell.
        """
        words, followed, over = {}, {}, threading.Event()

        def follow(process):
            with process:  # closed and waited for by whoever reads it, also where another one takes its place
                said = {}
                for line in process.stdout:
                    if untold := UNTOLD.search(line):
                        said["untold"] = tuple(map(int, untold.groups()))
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        said = json.loads(line)
                        words[said["client"]] = said

        def look():
            label = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component=actor"
            for pod in self.kubectl("get", "pods", "-l", label, "-o", "name", check=False).split():
                if pod not in followed or not followed[pod][1].is_alive():  # not there yet, or the connection broke
                    command = ["kubectl", "-n", self.namespace, "logs", "-f", pod, "-c", "actor", "--tail=3"]
                    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                    followed[pod] = (process, threading.Thread(target=follow, args=(process,), daemon=True))
                    followed[pod][1].start()

        def watch():
            while not over.wait(1.0):
                with contextlib.suppress(subprocess.TimeoutExpired):  # a cluster that loses a node may be late
                    look()

        watcher = threading.Thread(target=watch, daemon=True)
        try:
            look()
            watcher.start()
            yield words
            over.set()
            watcher.join(60.0)
            for _, thread in list(followed.values()):
                thread.join(60.0)
        finally:
            over.set()
            for process, thread in list(followed.values()):
                process.kill()
                thread.join(10.0)
