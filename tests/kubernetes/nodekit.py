"""Trials in which nodes of a cluster are lost, cut off, drained and crowded.

A release of light actors and a learner (played.py) runs on the nodes that $MEMOIRE_NODES names. The trial follows the
programs through the API server, and compares their counts with the servers' accounts at the end.

    MEMOIRE_NODES="node3 node4"                 nodes that may fail; the whole release is placed there
    MEMOIRE_NODE_KILL='... $NODE'               shell commands: end the node $NODE as a power cut would,
    MEMOIRE_NODE_START='... $NODE'              start it again,
    MEMOIRE_NODE_CUT='... $NODE'                unplug it from the network,
    MEMOIRE_NODE_JOIN='... $NODE'               plug it in again
"""

import contextlib
import json
import operator
import os
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

from kubekit import Release, Report, component_of, is_ready, run, until

HERE = Path(__file__).resolve().parent
LOST_AFTER = 5
"""Seconds that a Pod stays bound to a node that is not ready; few, for short trials."""
COUNTS = {"server": 2, "proxy": 2, "dashboard": 1, "learner": 1, "actor": 4}
"""Default number of Pods of each component."""


def missing(*commands):
    """Return the reason why a trial with these node commands (kill, start, cut, join) cannot run here, or ""."""
    if len(nodes()) < 2:
        return "MEMOIRE_NODES names no two nodes that a trial may have, such as 'node3 node4'"
    for command in commands:
        if f"MEMOIRE_NODE_{command.upper()}" not in os.environ:
            return f"MEMOIRE_NODE_{command.upper()} is not set: a command that does that to the node $NODE"
    return ""


def nodes():
    return os.environ.get("MEMOIRE_NODES", "").split()


def do(command, node):
    """Run the kill, start, cut or join command for a node."""
    shell_command = os.environ[f"MEMOIRE_NODE_{command.upper()}"]
    subprocess.run(
        shell_command, shell=True, check=True, env=os.environ | {"NODE": node}, stdout=subprocess.DEVNULL, timeout=300
    )


def heal():
    """Start and connect all nodes of the trial, and let them accept Pods."""
    ready = "{.status.conditions[?(@.type=='Ready')].status}"
    for node in nodes():
        for command in ("start", "join"):
            has_command = f"MEMOIRE_NODE_{command.upper()}" in os.environ
            if has_command and run("kubectl", "get", "node", node, "-o", f"jsonpath={ready}") != "True":
                do(command, node)
        run("kubectl", "uncordon", node)


def placed():
    """Return values that keep every component on the trial's nodes, and move it quickly from a lost one."""
    where = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": nodes()}]}]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": where}}}
    soon = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_AFTER}
    lost = [soon | {"key": f"node.kubernetes.io/{state}"} for state in ("not-ready", "unreachable")]
    components = ("server", "proxy", "dashboard", "learner", "actors")
    return {component: {"affinity": affinity, "tolerations": lost} for component in components}


class Api:
    """Access to the API server through `kubectl proxy`, which is cheaper than a kubectl for each request."""

    def __init__(self):
        self.process = subprocess.Popen(
            ["kubectl", "proxy", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.url = "http://" + self.process.stdout.readline().rpartition(" ")[2].strip()

    def open(self, path, timeout=10.0):
        return urllib.request.urlopen(self.url + path, timeout=timeout)

    def get(self, path, patience=60.0):
        """Return a JSON answer, with retries while the API server is too busy to answer."""
        deadline = time.monotonic() + patience
        while True:
            try:
                with self.open(path) as answer:
                    return json.load(answer)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise AssertionError(f"the API server does not tell {path}: {error}") from error
                time.sleep(0.5)

    def close(self):
        self.process.kill()
        self.process.communicate()


class Trial(Report, Release):
    """A release whose actors and learner are followed from beginning to end."""

    VALUES = HERE / "nodes.yaml"

    def __init__(self, **values):
        super().__init__()
        self.values = placed()
        """Values in addition to those of the file."""
        for component, changes in values.items():
            self.values[component].update(changes)
        self.api = Api()
        self.words = {}
        """The newest report of each client."""
        self.limits = {}
        """Most [episodes, steps] that each client may have done, by the reports that were read."""
        self.readers = defaultdict(list)
        """All reports of each reader."""
        self.lost = ""  # the node that is away now
        self._followed = {}
        self._ended = threading.Event()

    def __enter__(self):
        heal()
        self.end_programs()
        super().__enter__()
        self.kubectl("create", "configmap", "trial", f"--from-file={HERE / 'played.py'}")
        self.change()
        threading.Thread(target=self._follow_all, daemon=True).start()
        return self

    def __exit__(self, kind, *rest):
        self._ended.set()
        if kind is not None:
            heal()
            self.explain()
        self.end_programs()
        super().__exit__(None, *rest)
        self.api.close()

    def end_programs(self):
        """Kill the actors: those that can no longer deliver their counts would delay the end."""
        chosen = ("-l", "app.kubernetes.io/component=actor", "--force", "--grace-period=0")
        self.kubectl("delete", "deployment", f"{self.full}-actor", "--ignore-not-found", check=False)
        self.kubectl("delete", "pods", *chosen, check=False)

    def _follow_all(self):
        """Follow the logs of every Pod of actors and learners from its start. Runs in a thread."""
        while not self._ended.wait(0.5):
            try:
                pods = self.all_pods()
            except (AssertionError, ValueError):
                continue
            for pod in pods:
                uid, component = pod["metadata"]["uid"], component_of(pod)
                thread = self._followed.get(uid)
                if component in ("actor", "learner") and (thread is None or not thread.is_alive()):
                    states = pod["status"].get("containerStatuses") or [{"state": {}}]
                    if "waiting" in states[0]["state"] or not states[0]["state"]:
                        continue
                    again = "&sinceSeconds=60" if thread else ""
                    arguments = (pod["metadata"]["name"], component, again)
                    self._followed[uid] = threading.Thread(target=self._follow, args=arguments, daemon=True)
                    self._followed[uid].start()

    def _follow(self, pod, container, again):
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log?container={container}&follow=true{again}"
        with contextlib.suppress(OSError, ValueError), self.api.open(path, timeout=8.0) as lines:
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError, TypeError, KeyError):
                    self._hear(json.loads(line))

    def _hear(self, report):
        if "reader" in report:
            self.readers[report["reader"]].append(report)
            return
        client = report["client"]
        if "most" in report:
            self.limits[client] = max(self.limits.get(client, [0, 0]), report["most"])
        former = self.words.get(client)
        if former is None or report.get("last") or (report["did"] >= former["did"] and not former.get("last")):
            self.words[client] = report

    def all_pods(self):
        """Return all Pods of the release, as dicts of the API server."""
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector=app.kubernetes.io/instance%3D{self.name}"
        return self.api.get(path)["items"]

    def of(self, component=None):
        return [pod for pod in self.all_pods() if component in (None, component_of(pod))]

    def ready(self, component):
        """Return the names of Pods that are ready, not about to end, and not on a lost node."""
        there = [pod for pod in self.staying(component) if pod["spec"].get("nodeName") != self.lost]
        return [pod["metadata"]["name"] for pod in there if is_ready(pod)]

    def has(self, component, count):
        """Return True if exactly as many Pods of a component stay, and all are ready."""
        return len(self.ready(component)) == count == len(self.pods(component))

    def on(self, node):
        """Return the components that have a Pod on a node."""
        return {component_of(pod) for pod in self.all_pods() if pod["spec"].get("nodeName") == node}

    def batches(self):
        """Return the number of batches that learners took, by their reports."""
        return sum(lines[-1]["batches"] for lines in list(self.readers.values()))

    def longest_wait(self, since):
        """Return the longest wait of a learner for a batch in the reports since then, in seconds. Silence of a learner
        counts as a wait. `since` is in time.time().
        """
        heard = [line for lines in list(self.readers.values()) for line in lines if line["at"] >= since]
        times = sorted([since, time.time(), *(line["at"] for line in heard)])
        silent = max(later - earlier for earlier, later in zip(times, times[1:], strict=False))
        return max([silent - 1.0, *(line["longest"] for line in heard)])

    def change(self, **values):
        """Install the release or change values of components, and wait until everything is ready."""
        for component, changes in values.items():
            self.values.setdefault(component, {}).update(changes)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(self.values, file)
            file.flush()
            self.install("-f", file.name, seconds=400)

    def measure(self, what, began, condition, seconds=120.0):
        """Wait for a condition, and note the seconds since `began`, by time.time()."""
        until(condition, seconds, what)
        self.note(what, f"{time.time() - began:.1f} s")

    def clients_on(self, node):
        """Return the clients whose Pod is on a node and not about to end."""
        there = {pod["metadata"]["name"] for pod in self.of("actor") if pod["spec"].get("nodeName") == node}
        return {
            client for client, report in list(self.words.items()) if report["pod"] in there and not report.get("last")
        }

    def alive(self):
        """Return the clients whose Pod exists."""
        there = {pod["metadata"]["name"] for pod in self.of("actor")}
        return {client for client, report in list(self.words.items()) if report["pod"] in there}

    def spread(self):
        """Restart proxies and actors, one component after the other, so that both nodes have some again."""
        for component in ("proxy", "actor"):
            self.kubectl("rollout", "restart", f"deployment/{self.full}-{component}")
        for component in ("proxy", "actor"):
            self.kubectl("rollout", "status", f"deployment/{self.full}-{component}", timeout=240.0)
        until(lambda: all(self.has(*each) for each in COUNTS.items()), 120.0, "all ready")
        self.goes_on()

    def goes_on(self, seconds=120.0, what="everything goes on"):
        """Wait until as many clients as there are ready actors have more confirmed counts, and the learner has more
        batches.
        """
        before = {client: report["confirmed"][0] for client, report in list(self.words.items())}
        batches = self.batches()

        def all_do():
            now = list(self.words.items())
            more = [client for client, report in now if report["confirmed"][0] > before.get(client, 0)]
            return self.batches() > batches and len(more) >= len(self.ready("actor")) > 0

        until(all_do, seconds, what)

    def finish(self):
        """End the actors in order, and compare their reports with the servers' accounts."""
        self.change(actors={"replicas": 0})
        until(lambda: not self.of("actor"), 150.0, "no actor")
        until(self.settled, 60.0, "all settled")
        counted = self.accounts()
        last = [client for client, report in self.words.items() if report.get("last")]
        self.note("actors that ended in order, whose counts are equal", len(last))
        self.note("actors that were lost, whose counts are within bounds", len(self.words) - len(last))
        for client, report in self.words.items():
            self.compare(client[:8], report, counted.get(client))
        for client in counted.keys() - self.words.keys():
            # An actor that was lost before its first report was read: it counts nothing for NOTICE seconds after that
            # the first report.
            self.check(counted[client]["steps"] == 0, f"client {client[:8]} is counted and never said a word")
        total = self.totals()["steps"]
        summed = sum(each["steps"] for each in counted.values())
        self.check(total == summed, f"the cluster's total is {total} steps, its servers' accounts have {summed}")
        self.note("steps", f"{summed:,}")

    def settled(self):
        counted = self.accounts()
        ended = [counted[client] for client, report in self.words.items() if report.get("last")]
        return all(each["pushed"] == each["settled"] for each in ended)

    def compare(self, who, report, has):
        if has is None:
            otherwise = f"client {who} was told that {report['confirmed']} count, and has no account"
            self.check(report["confirmed"][0] == 0, otherwise)
            return
        counts = [has["episodes"], has["steps"]]
        if report.get("last"):
            self.check(counts == report["did"], f"client {who} did {report['did']}, and {counts} were counted")
            pushed = (report["caches"], has["pushed"], has["settled"])
            self.check(len(set(pushed)) == 1, f"client {who} pushed, was heard of, has settled caches: {pushed}")
        else:
            most = self.limits.get(report["client"], report["did"])
            well = all(map(operator.le, report["confirmed"], counts)) and all(map(operator.le, counts, most))
            self.check(
                well, f"client {who} was lost: {report['confirmed']} confirmed, {counts} counted, {most} at most"
            )
