"""A release of the chart on a real cluster, controlled through kubectl and helm alone, with any kubeconfig.

Environment: MEMOIRE_HELM is helm; MEMOIRE_HELM_VALUES a file with more values that a cluster may need (images of a
registry, a storage class, nodes); MEMOIRE_NAMESPACE the namespace that the tests create and delete.
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
from memoire.security import keys as keyfolder
from memoire.security import provision as key_writer
from memoire.security import roles as permissions
from memoire.wire.rows import ACCOUNT

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "deploy" / "helm" / "memoire"
VALUES = Path(__file__).with_name("values.yaml")
MORE_VALUES = os.environ.get("MEMOIRE_HELM_VALUES")
HELM = os.environ.get("MEMOIRE_HELM", "helm").split(":")[0]
NAMESPACE = os.environ.get("MEMOIRE_NAMESPACE", "memoire-test")
KEYS, TOKENS = "demo-keys", "demo-tokens"
"""Names of the Secrets in values.yaml."""
UNACKNOWLEDGED = re.compile(r"ends before (\d+) steps, (\d+) episodes and \d+ log lines were acknowledged")
"""Report of an actor whose home was away at its end for longer than the grace period of a Pod (docs/guarantees.md)."""
# The command fetches a page of a node or dashboard inside of the node's own container, which no NetworkPolicy blocks;
# the token stays in the container.
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


def run(*command, timeout=60.0, check=True, stdin=None):
    """Run a command and return its standard output; a failure shows all of its output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, input=stdin)
    assert done.returncode == 0 or not check, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def memoire(*words):
    """Run a command of memoire on this machine, and return its output."""
    return run(sys.executable, "-m", "memoire", *words)


def until(condition, seconds, what):
    """Return the result of `condition` as soon as it is true. Errors count as false, since a busy cluster may refuse to
    answer for a while.
    """
    began, last = time.monotonic(), None
    while time.monotonic() - began < seconds:
        try:
            if last := condition():
                return last
        except (AssertionError, OSError, subprocess.TimeoutExpired, KeyError, ValueError) as error:
            last = error
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds:g} s: {what}; last: {last}")


def at_once(call, values):
    """Return the results of a call for each value, in order, with all calls at the same time."""
    with concurrent.futures.ThreadPoolExecutor(max(1, len(values))) as threads:
        return list(threads.map(call, values))


def component_of(pod):
    return pod["metadata"]["labels"].get("app.kubernetes.io/component")


def is_ready(pod):
    conditions = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def await_more(counts):
    """Wait until each number that `counts` returns has grown."""
    before = counts()
    until(lambda: all(now > then for now, then in zip(counts(), before, strict=True)), 120.0, "more of each")


def missing():
    """Return the reason why no cluster can be tested, or "" if one is available."""
    for tool in ("kubectl", HELM):
        if shutil.which(tool) is None:
            return f"{tool} is not on PATH"
    try:
        run("kubectl", "get", "nodes", "--request-timeout=5s", timeout=20.0)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return f"no cluster answers: {str(error).strip().splitlines()[-1]}"
    return ""


class Report:
    """Rows of a trial's table, and its broken promises."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rows = []
        self.troubles = []
        self._since = time.monotonic()

    def note(self, what, value=None):
        """Add a row to the table; its value is by default the seconds since the row before."""
        now = time.monotonic()
        shown = f"{now - self._since:.0f} s" if value is None else value
        self._since = now
        print(f"{what}: {shown}", file=sys.stderr, flush=True)
        self.rows.append((what, shown))

    def check(self, holds, otherwise):
        """Record a broken promise unless `holds` is true."""
        if not holds:
            print(otherwise, file=sys.stderr, flush=True)
            self.troubles.append(otherwise)


class Release:
    """A release in a namespace of its own, under restricted Pod Security. The end of the context deletes everything."""

    VALUES = VALUES
    """Values file of each installation."""

    def __init__(self, namespace=NAMESPACE, name="demo", helm=HELM):
        self.namespace, self.name, self.full, self._helm = namespace, name, f"{name}-memoire", helm
        self.folder = tempfile.TemporaryDirectory(prefix="memoire-keys-")
        self.keys = Path(self.folder.name) / "keys"
        """The cluster's folder of keys, as its operator has it. `apply_keys` copies the keys to Secrets."""
        self.applied = set()
        """Objects that `apply` created, which are no part of the chart."""

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
        """Update the Secrets of keys from the folder."""
        self.apply(memoire("keys", "export", str(self.keys), "--kubernetes", KEYS))

    def apply_tokens(self, dashboard, nodes):
        """Replace the tokens; a text of several lines has several valid tokens."""
        secret = {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": TOKENS}}
        self.apply(secret | {"stringData": {"dashboard": dashboard, "nodes": nodes}})

    def apply(self, *objects, namespace=None):
        """Create or change objects, given as dicts or YAML."""
        text = "\n---\n".join(each if isinstance(each, str) else json.dumps(each) for each in objects)
        names = run("kubectl", "-n", namespace or self.namespace, "apply", "-f", "-", "-o", "name", stdin=text)
        self.applied |= set(names.split())

    def install(self, *words, chart=CHART, seconds=150):
        """Install or change the release, and wait until everything is ready."""
        files = [word for path in (self.VALUES, MORE_VALUES) if path for word in ("-f", str(path))]
        limit = ("--wait", "--timeout", f"{seconds}s")
        self.helm("upgrade", "--install", self.name, str(chart), *files, *limit, *words, timeout=seconds + 50.0)

    def uninstall(self):
        """Uninstall the release, and fail unless only its servers' volumes are left, which must be kept."""
        self.helm("uninstall", self.name, "--wait", "--timeout", "100s")
        own = {"configmap/kube-root-ca.crt", "serviceaccount/default"} | self.applied
        kinds = "all,configmaps,secrets,serviceaccounts,networkpolicies,poddisruptionbudgets,persistentvolumeclaims,ingresses"
        volume = f"persistentvolumeclaim/state-{self.full}-server-"

        def left():
            return [name for name in self.kubectl("get", kinds, "-o", "name").split() if name not in own]

        until(lambda: all(name.startswith(volume) for name in left()), 90.0, "nothing left but volumes of servers")
        return left()

    def explain(self):
        """Print the Pods, events and logs that help to find the cause of a failure."""
        for words in (["get", "pods", "-o", "wide"], ["get", "events", "--sort-by=.lastTimestamp"]):
            print(self.kubectl(*words, check=False)[-6000:])
        for pod in self.pods():
            for option in ([], ["--previous"]):
                logs = self.kubectl("logs", pod, "--all-containers", "--tail=15", *option, check=False)
                if logs:
                    print(f"--- {pod} {' '.join(option)}\n{logs}")

    def of(self, component=None):
        """Return the Pods of a component, or all Pods, as dicts of the API server."""
        label = f"app.kubernetes.io/instance={self.name}"
        label += f",app.kubernetes.io/component={component}" if component else ""
        return json.loads(self.kubectl("get", "pods", "-l", label, "-o", "json"))["items"]

    def staying(self, component=None):
        """Return the Pods that are not about to end."""
        return [pod for pod in self.of(component) if "deletionTimestamp" not in pod["metadata"]]

    def pods(self, component=None):
        """Return the names of the Pods that are not about to end."""
        return [pod["metadata"]["name"] for pod in self.staying(component)]

    def is_gone(self, component):
        """Return True if no Pod of this component is left, not even one that is about to end."""
        return not self.of(component)

    def addresses(self):
        """Return {component: addresses of its Pods}."""
        addresses: dict[str, list[str]] = {}
        for pod in self.staying():
            if "podIP" in pod["status"]:
                addresses.setdefault(component_of(pod), []).append(pod["status"]["podIP"])
        return addresses

    @property
    def endpoint(self):
        """The address that clients connect to."""
        return f"tcp://{self.service('')}:5560"

    def service(self, component):
        """Return a Service's IP address, which needs no DNS."""
        name = f"{self.full}-{component}" if component else self.full
        return json.loads(self.kubectl("get", "service", name, "-o", "json"))["spec"]["clusterIP"]

    def are_ready(self, component, count):
        there = self.staying(component)
        return len(there) == count and all(map(is_ready, there))

    def await_ready(self, seconds=60.0, **counts):
        """Wait until exactly as many Pods of each of these components stay, and all are ready."""
        for component, count in counts.items():
            until(lambda component=component, count=count: self.are_ready(component, count), seconds, component)

    def page(self, pod, path, *, port=8080, token="nodes", container=None):
        chosen = ["-c", container] if container else []
        words = ["exec", pod, *chosen, "--", "python3", "-c", PAGE, str(port), path, token]
        return self.kubectl(*words, timeout=40.0)

    def status(self, pod):
        return json.loads(self.page(pod, "/status?most=1000"))

    def overview(self):
        return json.loads(self.page(f"deploy/{self.full}-dashboard", "/api/overview", port=8265, token="dashboard"))

    def servers(self):
        return at_once(self.status, self.pods("server"))

    def accounts(self):
        """Return {client: {"episodes", "steps", "pushed", "settled"}} of all servers, merged as the cluster's totals
        are.
        """
        merged = by_client(merge(*at_once(self.account_rows, self.pods("server"))))
        settled = merged["accepted_caches"] + merged["rejected_caches"] + merged["lost_caches"]
        counts = zip(merged["episodes"], merged["steps"], merged["pushed_caches"], settled, strict=True)
        each = [dict(zip(("episodes", "steps", "pushed", "settled"), map(int, row), strict=True)) for row in counts]
        return dict(zip([row.tobytes().hex() for row in merged["client"]], each, strict=True))

    def account_rows(self, pod):
        """Return all accounts of a server, also those that are not in its memory."""
        parts, after = [np.empty(0, ACCOUNT)], ""
        while len(parts) == 1 or after:
            reply = msgspec.msgpack.decode(base64.b64decode(self.page(pod, f"/accounts?after={after}")))
            parts.append(np.frombuffer(reply["rows"], ACCOUNT))
            after = reply.get("next", "")
        return np.concatenate(parts)

    def totals(self):
        """Return the cluster's totals by `memoire totals`, as an operator would."""
        addresses = [f"tcp://{pod}.{self.full}-server:5560" for pod in self.pods("server")]
        output = self.kubectl("exec", self.pods("server")[0], "--", "memoire", "totals", "--json", *addresses)
        return json.loads(output)["totals"]

    def _rows_of(self, client):
        """Return all accounts of a client on any server, each with its Pod."""
        me = np.frombuffer(bytes.fromhex(client), "<u8")
        tables = {pod: self.account_rows(pod) for pod in self.pods("server")}
        return [(pod, row) for pod, rows in tables.items() for row in rows[(rows["client"] == me).all(axis=1)]]

    def differences(self, words):
        """Return differences between the cluster's accounts and totals and the counts in its actors' last reports. An
        actor that ended before its home acknowledged everything reports the amount, which may be missing.
        """
        counted = {client: one for client, one in self.accounts().items() if one["steps"] or client in words}
        differences = [f"client {client} is counted and said no word" for client in counted.keys() - words.keys()]
        for client, report in words.items():
            has = counted.get(client, {"episodes": 0, "steps": 0, "pushed": 0, "settled": 0})
            did = {"episodes": report["episodes"], "steps": report["steps"]}
            did |= dict.fromkeys(("pushed", "settled"), report["caches"])
            if did == has:
                continue
            missing = [did[name] - has[name] for name in ("steps", "episodes")]
            fits = all(0 <= less <= most for less, most in zip(missing, report.get("unacked", (0, 0)), strict=True))
            # After an incomplete end, servers may lack the last caches, which count as neither accepted nor lost.
            if fits and "unacked" in report and has["settled"] <= has["pushed"] <= did["pushed"]:
                continue
            rows = self._rows_of(client)
            shown = ("home", "since", "flags", "pushed_caches", "received_caches", "lost_caches")
            listed = "; ".join(f"{pod}: " + ", ".join(f"{name} {row[name]}" for name in shown) for pod, row in rows)
            differences.append(f"client {client} did {did}, and {has} are counted: {listed}")
        steps, total = sum(one["steps"] for one in counted.values()), self.totals()["steps"]
        return differences + [f"the cluster's total is {total} steps, its accounts have {steps}"] * (steps != total)

    def kill(self, pod):
        """Kill a Pod without a grace period, like a crash; Kubernetes starts another one."""
        self.kubectl("delete", "pod", pod, "--force", "--grace-period=0", "--wait=false")

    @contextlib.contextmanager
    def last_words(self):
        """Follow the actors' logs, also those of later actors, and yield {client: counts}. The dict receives each
        actor's last line, and is complete when all actors have ended. "unacked" are steps and
        episodes without acknowledgement.
        """
        words, followed, over = {}, {}, threading.Event()

        def follow(process):
            with process:  # the thread closes the process, even if another process has replaced it
                report = {}
                for line in process.stdout:
                    if steps_and_episodes := UNACKNOWLEDGED.search(line):
                        report["unacked"] = tuple(map(int, steps_and_episodes.groups()))
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        report = json.loads(line)
                        words[report["client"]] = report

        def look():
            label = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component=actor"
            for pod in self.kubectl("get", "pods", "-l", label, "-o", "name", check=False).split():
                if pod not in followed or not followed[pod][1].is_alive():  # a new Pod, or a broken connection
                    command = ["kubectl", "-n", self.namespace, "logs", "-f", pod, "-c", "actor", "--tail=3"]
                    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                    followed[pod] = (process, threading.Thread(target=follow, args=(process,), daemon=True))
                    followed[pod][1].start()

        def watch():
            while not over.wait(1.0):
                with contextlib.suppress(subprocess.TimeoutExpired):  # a cluster that loses a node may be slow
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


HERE = Path(__file__).resolve().parent


class WithInference:
    """Mixin for a release with inference nodes."""

    def __enter__(self):
        super().__enter__()
        program = {"asked.py": (HERE / "asked.py").read_text(encoding="utf-8")}
        self.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "trial"}, "data": program})
        return self

    def install(self, *words, **options):
        super().install("-f", str(HERE / "inference.yaml"), *words, **options)

    @property
    def inference(self):
        """The address of the inference nodes for actors."""
        return f"tcp://{self.service('inference')}:5570"


REACH = """
import concurrent.futures, json, socket, sys
def is_open(address):
    try:
        socket.create_connection(tuple(address), timeout=3).close()
    except OSError:
        return False
    return True
targets = json.loads(sys.argv[1])
with concurrent.futures.ThreadPoolExecutor(len(targets)) as pool:
    print(json.dumps(list(pool.map(is_open, targets))))
"""
CONNECT = """
import faulthandler
faulthandler.dump_traceback_later(100, exit=True)  # a hang shows its place
import memoire, sys
try:
    with memoire.connect(sys.argv[1], keys=sys.argv[2] if len(sys.argv) > 2 else None, timeout=10.0):
        print("welcome")
except Exception as error:
    print(type(error).__name__)
"""
PUBLISH = """
import memoire, sys
try:
    with memoire.Reader([sys.argv[1]], keys=sys.argv[2], timeout=10.0) as reader:
        reader.publish("policy", b"another one")
except Exception as error:
    print(type(error).__name__)
"""
ASK = """
import json, memoire, numpy, sys
inputs, outputs = {"obs": (numpy.float32, (4,))}, {"action": numpy.int64, "value": numpy.float32}
with memoire.RemotePolicy(sys.argv[1], inputs, outputs, timeout=20.0, keys=sys.argv[2]) as policy:
    pending = policy.ask({"obs": numpy.zeros((3, 4), numpy.float32)})
    print(json.dumps([pending.result()["action"].tolist(), pending.version]))
"""
GET = """
import sys, urllib.error, urllib.request
url, token, host = sys.argv[1:]
headers = ({"Authorization": "Bearer " + token} if token else {}) | ({"Host": host} if host else {})
try:
    print(urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print("no connection")
"""
CLIENT = {"memoire.io/client": "true"}
PORTS = (5560, 5561, 5562, 5570, 8080, 8081, 8265)
"""Ports of all services of memoire."""


class Visitor:
    """A Pod of the same image outside the release. The Pod may send anything; only the release's policies limit its connections.

    Args:
        mounts: Names of Secrets, each mounted at /keys/NAME.
        namespace: Namespace of the Pod, if not the release's.
    """

    def __init__(self, release, name, labels=None, *, mounts=(), namespace=None):
        self.release, self.name, self.namespace = release, name, namespace or release.namespace
        server = json.loads(release.kubectl("get", "pod", release.pods("server")[0], "-o", "json"))["spec"]
        closed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        same = {name: server["containers"][0][name] for name in ("image", "imagePullPolicy")}
        same["volumeMounts"] = [{"name": each, "mountPath": f"/keys/{each}"} for each in mounts]
        pod = {
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "nodeSelector": server.get("nodeSelector", {}),
            "terminationGracePeriodSeconds": 0,
            "containers": [same | {"name": "visitor", "command": ["sleep", "infinity"], "securityContext": closed}],
            "volumes": [{"name": each, "secret": {"secretName": each, "defaultMode": 0o440}} for each in mounts],
        }
        about = {"name": name, "labels": {"visitor": name, **(labels or {})}}
        sends = {"podSelector": {"matchLabels": {"visitor": name}}, "policyTypes": ["Egress"], "egress": [{}]}
        release.apply(
            {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": pod},
            {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": name}, "spec": sends},
            namespace=self.namespace,
        )
        self._kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=60s", timeout=70.0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._kubectl("delete", f"pod/{self.name}", f"networkpolicy/{self.name}", "--wait=false", check=False)

    def _kubectl(self, *words, **options):
        return run("kubectl", "-n", self.namespace, *words, **options)

    def do(self, *words, check=True):
        return self._kubectl("exec", self.name, "--", *words, check=check, timeout=150.0)

    def python(self, program, *words):
        """Run a program and return its output."""
        return self.do("python3", "-c", program, *words).strip()

    def reaches(self):
        """Return {component: ports that accept connections}; all Pods of a component must be alike."""
        there = self.release.addresses()
        tried = [(pod, port) for pods in there.values() for pod in pods for port in PORTS]
        is_open = dict(zip(tried, json.loads(self.python(REACH, json.dumps(tried))), strict=True))
        ports = {}
        for component, pods in there.items():
            if component != "test":
                each = [{port for port in PORTS if is_open[pod, port]} for pod in pods]
                assert all(one == each[0] for one in each), (component, each)
                ports[component] = each[0]
        return ports

    def publishes(self, keys):
        """Publish a model with these keys; return the name of the error, or "" without one."""
        return self.python(PUBLISH, self.release.endpoint, f"/keys/{keys}")

    def is_let_in(self, keys=None):
        """Return True if a client with these keys can connect to the cluster."""
        return self.python(CONNECT, self.release.endpoint, *([f"/keys/{keys}"] if keys else [])) == "welcome"

    def asks(self, address, keys):
        """Return (actions, version of the weights) of an inference node for three rows."""
        return json.loads(self.python(ASK, address, f"/keys/{keys}"))

    def gets(self, url, token="", host=""):
        """Return the status of a page as a text, or "no connection"."""
        return self.python(GET, url, token, host)


def refused(release):
    """Return {reason: refusals} of all servers and proxies together."""
    total = {}
    for status in at_once(release.status, [*release.pods("server"), *release.pods("proxy")]):
        for reason, count in status["security"]["refused"].items():
            total[reason] = total.get(reason, 0) + count
    return total


def is_refused(release, attempt, *reasons):
    """Wait until an attempt has failed and a server or proxy has counted the refusal. Raise if an attempt succeeds.

    Args:
        attempt: Returns True on success. Repeated, since an attempt that is lost on the way is not counted.
        reasons: Reasons that count.
    """

    def count():
        now = refused(release)
        return sum(now.get(reason, 0) for reason in reasons)

    before = count()

    def counted():
        if attempt():
            raise RuntimeError(f"an attempt succeeded that should be refused: {reasons}")
        return count() > before

    until(counted, 120.0, f"an attempt that is refused and counted: {reasons}")


def strangers_keys(release):
    """Create Secrets of unknown actors: one of another cluster, and one that has only the server's public key. Return
    their names.
    """
    release.apply(memoire("keys", "new", "--kubernetes", "other"))
    folder = str(Path(release.folder.name) / "stranger")
    memoire("keys", "new", folder, "--role", "actor", "--server", str(release.keys / "actor" / "server.pub"))
    release.apply(memoire("keys", "export", folder, "--kubernetes", "stranger"))
    return ["other-actor", "stranger-actor"]


def taken_up(release, folder, named):
    """Wait until every Pod has the present content of a Secret. An annotation makes kubelets update the Pod at once.

    Args:
        folder: Mount point in the Pods.
        named: {component: the Secret's name}.
    """
    items = json.loads(release.kubectl("get", "secrets", "-o", "json"))["items"]
    data = {each["metadata"]["name"]: each.get("data", {}) for each in items}
    pods = {pod: component for component in named for pod in release.pods(component)}
    release.kubectl("annotate", "pods", *pods, f"memoire.io/looked-at={time.time_ns()}", "--overwrite")
    show = f"cd {folder} && for each in *; do echo $each; base64 -w 0 $each; echo; done"

    def wait(pod):
        component = pods[pod]
        expected, container = data[named[component]], "relay" if component == "actor" else component

        def has_it():
            lines = release.kubectl("exec", pod, "-c", container, "--", "sh", "-c", show).split()
            there = dict(zip(lines[::2], lines[1::2], strict=True))
            return there and all(expected[each] == text for each, text in there.items())

        until(has_it, 150.0, f"{pod} has the new {named[component]}")

    at_once(wait, [*pods])


def spread(release):
    """Update the Secrets from the folder of keys, and wait until all Pods have them."""
    release.apply_keys()
    roles = [role for role in ("server", "proxy", "learner", "actor", "inference") if release.pods(role)]
    taken_up(release, "/etc/memoire/keys", {role: f"{KEYS}-{role}" for role in roles})


def replace_tokens(release):
    """Replace the tokens of dashboard and nodes, with a period in which both are valid. Return the dashboard's new and
    old ones.
    """
    former = json.loads(release.kubectl("get", "secret", TOKENS, "-o", "json"))["data"]
    old = {name: base64.b64decode(text).decode() for name, text in former.items()}
    new = {name: secrets.token_hex(24) for name in old}
    # Nodes must accept old and new token before the dashboard sends the new token, the first in the dashboard's file.
    for tokens in ({name: f"{old[name]}\n{new[name]}" for name in old}, new):
        release.apply_tokens(tokens["dashboard"], tokens["nodes"])
        taken_up(release, "/etc/memoire/tokens", dict.fromkeys(("server", "proxy", "dashboard"), TOKENS))
    return new["dashboard"], old["dashboard"]


def replace_key(release, role):
    """Replace the key of a role and revoke the old one, as docs/operations.md describes."""
    new = Path(release.folder.name) / f"new-{role}-{time.time_ns()}"
    own = release.keys / role
    former = keyfolder.Keys(own).own
    memoire("keys", "new", str(new), "--role", role)
    memoire("keys", "authorize", str(release.keys), str(new))
    if role in key_writer.ADMITTED:
        for other in permissions.ROLES:
            with (release.keys / other / "server.pub").open("a") as file:
                file.write((new / "own.pub").read_text())
    spread(release)
    for file in ("own.key", "own.pub"):
        (new / file).replace(own / file)
    spread(release)
    memoire("keys", "revoke", str(release.keys), former.fingerprint)
    for other in permissions.ROLES if role in key_writer.ADMITTED else ():
        dialled = [key for key in keyfolder.Keys(release.keys / other).servers if key.public != former.public]
        (release.keys / other / "server.pub").write_text("".join(key.text() for key in dialled))
    spread(release)
