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
"""What values.yaml calls the Secrets."""
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


def at_once(call, given):
    """What a call returns for each of these, in order; all at the same time."""
    with concurrent.futures.ThreadPoolExecutor(max(1, len(given))) as threads:
        return list(threads.map(call, given))


def component_of(pod):
    return pod["metadata"]["labels"].get("app.kubernetes.io/component")


def is_ready(pod):
    conditions = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def await_more(counts):
    """Wait until each of the counts that this returns has grown."""
    before = counts()
    until(lambda: all(now > then for now, then in zip(counts(), before, strict=True)), 120.0, "more of each")


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

    def of(self, component=None):
        """Pods of a component, or of all, as the API server has them."""
        label = f"app.kubernetes.io/instance={self.name}"
        label += f",app.kubernetes.io/component={component}" if component else ""
        return json.loads(self.kubectl("get", "pods", "-l", label, "-o", "json"))["items"]

    def staying(self, component=None):
        """Those that are not about to end."""
        return [pod for pod in self.of(component) if "deletionTimestamp" not in pod["metadata"]]

    def pods(self, component=None):
        """Names of the Pods that are not about to end."""
        return [pod["metadata"]["name"] for pod in self.staying(component)]

    def is_gone(self, component):
        """Whether no Pod of this component is left, not even one that is about to end."""
        return not self.of(component)

    def addresses(self):
        """{component: [where each of its Pods is]}."""
        found: dict[str, list[str]] = {}
        for pod in self.staying():
            if "podIP" in pod["status"]:
                found.setdefault(component_of(pod), []).append(pod["status"]["podIP"])
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
        there = self.staying(component)
        return len(there) == count and all(map(is_ready, there))

    def await_ready(self, seconds=60.0, **counts):
        """Wait until as many Pods of each of these components are ready, and no others are meant to stay."""
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
        """{client: {"episodes", "steps", "pushed", "settled"}} of all servers, merged as the cluster's totals are."""
        found = by_client(merge(*at_once(self.account_rows, self.pods("server"))))
        settled = found["accepted_caches"] + found["rejected_caches"] + found["lost_caches"]
        counts = zip(found["episodes"], found["steps"], found["pushed_caches"], settled, strict=True)
        each = [dict(zip(("episodes", "steps", "pushed", "settled"), map(int, row), strict=True)) for row in counts]
        return dict(zip([row.tobytes().hex() for row in found["client"]], each, strict=True))

    def account_rows(self, pod):
        """Every account that a server has, those that are not in its memory included."""
        parts, after = [np.empty(0, ACCOUNT)], ""
        while len(parts) == 1 or after:
            told = msgspec.msgpack.decode(base64.b64decode(self.page(pod, f"/accounts?after={after}")))
            parts.append(np.frombuffer(told["rows"], ACCOUNT))
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

    def differences(self, words):
        """Where the cluster's accounts and totals are not what its actors have counted, by their last words. An actor that
        ended before its home had acknowledged all says how much: so much may be missing.
        """
        counted = {client: one for client, one in self.accounts().items() if one["steps"] or client in words}
        found = [f"client {client} is counted and said no word" for client in counted.keys() - words.keys()]
        for client, said in words.items():
            has = counted.get(client, {"episodes": 0, "steps": 0, "pushed": 0, "settled": 0})
            did = {"episodes": said["episodes"], "steps": said["steps"]}
            did |= dict.fromkeys(("pushed", "settled"), said["caches"])
            if did == has:
                continue
            missing = [did[name] - has[name] for name in ("steps", "episodes")]
            is_told = all(0 <= less <= most for less, most in zip(missing, said.get("untold", (0, 0)), strict=True))
            if is_told and "untold" in said and has["settled"] <= has["pushed"] <= did["pushed"]:  # it said no goodbye
                continue
            rows = self._rows_of(client)
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


HERE = Path(__file__).resolve().parent


class WithInference:
    """Put before a release: it has inference nodes, too."""

    def __enter__(self):
        super().__enter__()
        program = {"asked.py": (HERE / "asked.py").read_text(encoding="utf-8")}
        self.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "trial"}, "data": program})
        return self

    def install(self, *words, **options):
        super().install("-f", str(HERE / "inference.yaml"), *words, **options)

    @property
    def inference(self):
        """What actors ask."""
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
faulthandler.dump_traceback_later(100, exit=True)  # whoever hangs says where
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
"""On which anything of memoire listens."""


class Visitor:
    """A Pod of the same image that is no part of the release. It may send anything; what it reaches is up to the others.

    Args:
        mounts: Names of Secrets, each mounted at /keys/NAME.
        namespace: Another one than the release's.
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
        """What a program printed."""
        return self.do("python3", "-c", program, *words).strip()

    def reaches(self):
        """{component: ports of its Pods that take its connections}; all Pods of one have to be alike."""
        there = self.release.addresses()
        tried = [(pod, port) for pods in there.values() for pod in pods for port in PORTS]
        is_open = dict(zip(tried, json.loads(self.python(REACH, json.dumps(tried))), strict=True))
        found = {}
        for component, pods in there.items():
            if component != "test":
                each = [{port for port in PORTS if is_open[pod, port]} for pod in pods]
                assert all(one == each[0] for one in each), (component, each)
                found[component] = each[0]
        return found

    def publishes(self, keys):
        """What came of publishing a model with these keys: the error's name, nothing if it was taken."""
        return self.python(PUBLISH, self.release.endpoint, f"/keys/{keys}")

    def is_let_in(self, keys=None):
        """Whether a client with these keys gets through to the cluster."""
        return self.python(CONNECT, self.release.endpoint, *([f"/keys/{keys}"] if keys else [])) == "welcome"

    def asks(self, address, keys):
        """(actions, version of the weights) that an inference node gives for three rows."""
        return json.loads(self.python(ASK, address, f"/keys/{keys}"))

    def gets(self, url, token="", host=""):
        """Status of a page as a text, or that there is no connection."""
        return self.python(GET, url, token, host)


def refused(release):
    """{reason: how often} of all servers and proxies."""
    total = {}
    for status in at_once(release.status, [*release.pods("server"), *release.pods("proxy")]):
        for reason, count in status["security"]["refused"].items():
            total[reason] = total.get(reason, 0) + count
    return total


def is_refused(release, attempt, *reasons):
    """Wait until what is tried has failed and is counted for one of these reasons; raises as soon as it does not fail.

    Args:
        attempt: Returns whether it went well. It is made again: one that comes to nothing on the way is not counted.
    """

    def count():
        now = refused(release)
        return sum(now.get(reason, 0) for reason in reasons)

    before = count()

    def counted():
        if attempt():
            raise RuntimeError(f"somebody was let in who should be refused: {reasons}")
        return count() > before

    until(counted, 120.0, f"somebody refused and counted: {reasons}")


def strangers_keys(release):
    """Secrets of actors that are nobody here: of another cluster, and one that knows only whom to dial."""
    release.apply(memoire("keys", "new", "--kubernetes", "other"))
    folder = str(Path(release.folder.name) / "stranger")
    memoire("keys", "new", folder, "--role", "actor", "--server", str(release.keys / "actor" / "server.pub"))
    release.apply(memoire("keys", "export", folder, "--kubernetes", "stranger"))
    return ["other-actor", "stranger-actor"]


def taken_up(release, folder, named):
    """Wait until every Pod has what is in a Secret now. Kubelets look at Secrets now and then, and at once where the Pod has
    changed: so it gets an annotation.

    Args:
        folder: Where Pods have it.
        named: {component: the Secret's name}.
    """
    found = json.loads(release.kubectl("get", "secrets", "-o", "json"))["items"]
    said = {each["metadata"]["name"]: each.get("data", {}) for each in found}
    pods = {pod: component for component in named for pod in release.pods(component)}
    release.kubectl("annotate", "pods", *pods, f"memoire.io/looked-at={time.time_ns()}", "--overwrite")
    show = f"cd {folder} && for each in *; do echo $each; base64 -w 0 $each; echo; done"

    def wait(pod):
        component = pods[pod]
        expected, container = said[named[component]], "relay" if component == "actor" else component

        def has_it():
            lines = release.kubectl("exec", pod, "-c", container, "--", "sh", "-c", show).split()
            there = dict(zip(lines[::2], lines[1::2], strict=True))
            return there and all(expected[each] == text for each, text in there.items())

        until(has_it, 150.0, f"{pod} has the new {named[component]}")

    at_once(wait, [*pods])


def spread(release):
    """Make the Secrets what the folder of keys is, and wait until all Pods have them."""
    release.apply_keys()
    roles = [role for role in ("server", "proxy", "learner", "actor", "inference") if release.pods(role)]
    taken_up(release, "/etc/memoire/keys", {role: f"{KEYS}-{role}" for role in roles})


def replace_tokens(release):
    """Other tokens for the dashboard and the nodes, both of which hold for a while; the new dashboard's."""
    former = json.loads(release.kubectl("get", "secret", TOKENS, "-o", "json"))["data"]
    old = {name: base64.b64decode(text).decode() for name, text in former.items()}
    new = {name: secrets.token_hex(24) for name in old}
    # Nodes know both before the dashboard asks them with the new one: it takes the first that it finds.
    for said in ({name: f"{old[name]}\n{new[name]}" for name in old}, new):
        release.apply_tokens(said["dashboard"], said["nodes"])
        taken_up(release, "/etc/memoire/tokens", dict.fromkeys(("server", "proxy", "dashboard"), TOKENS))
    return new["dashboard"], old["dashboard"]


def replace_key(release, role):
    """Give a role another key and take the old one away, as docs/operations.md says."""
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
