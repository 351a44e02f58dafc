"""Who gets in: a Pod that is nobody's, what it reaches, and keys that are replaced by changing Secrets while all runs."""

import base64
import concurrent.futures
import json
import secrets
import time
from pathlib import Path

from kubekit import KEYS, TOKENS, memoire, run, until

from memoire.security import keys as keyfolder
from memoire.security import provision as key_writer
from memoire.security import roles as permissions

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
request = urllib.request.Request(sys.argv[1])
if len(sys.argv) > 2:
    request.add_header("Authorization", "Bearer " + sys.argv[2])
try:
    print(urllib.request.urlopen(request, timeout=10).status)
except urllib.error.HTTPError as error:
    print(error.code)
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
        pod = {
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "nodeSelector": server.get("nodeSelector", {}),
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "visitor",
                    "image": server["containers"][0]["image"],
                    "imagePullPolicy": server["containers"][0]["imagePullPolicy"],
                    "command": ["sleep", "infinity"],
                    "securityContext": closed,
                    "volumeMounts": [{"name": each, "mountPath": f"/keys/{each}"} for each in mounts],
                }
            ],
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

    def gets(self, url, token=None):
        """Status of a page."""
        return int(self.python(GET, url, *([token] if token else [])))


def refused(release):
    """{reason: how often} of all servers and proxies."""
    pods, total = [*release.pods("server"), *release.pods("proxy")], {}
    with concurrent.futures.ThreadPoolExecutor(len(pods)) as threads:
        for status in threads.map(release.status, pods):
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

    with concurrent.futures.ThreadPoolExecutor(len(pods)) as threads:
        list(threads.map(wait, pods))


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
