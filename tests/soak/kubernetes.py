"""Trials of releases on a Kubernetes cluster of yours."""

import json
import os
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable

from _kit import CANNOT, ROOT, end, run_named, table

# isort: split

import kubekit
import nodekit
import yaml
from kubekit import WithInference, run, until

DENY = {
    "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "deny-all"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
}  # fmt: skip
"""Policy that cuts off all traffic that no other policy allows."""
ACTORS_ONLY = ("--set", "learner.enabled=false")


class Trial(kubekit.Report, kubekit.Release):
    """Release in a namespace where all traffic is denied, and its report."""

    def __enter__(self) -> "Trial":
        super().__enter__()
        self.apply(DENY)
        return self

    def steps(self) -> int:
        """Return the recorded steps in all servers' accounts."""
        return sum(one["steps"] for one in self.accounts().values())

    def goes_on(self, what: str) -> None:
        """Wait until actors have recorded more steps."""
        before = self.steps()
        until(lambda: self.steps() > before, 120.0, f"more steps after: {what}")

    def compare(self, words: dict[str, dict[str, object]]) -> None:
        for trouble in self.differences(words):
            self.check(False, trouble)
        self.note("actors, each counted exactly", len(words))

    def containers(self, pod: str) -> list[dict]:
        """Return the statuses of a Pod's containers from Kubernetes."""
        return json.loads(self.kubectl("get", "pod", pod, "-o", "json"))["status"]["containerStatuses"]

    def end_actors(self, *words: str) -> None:
        """Scale actors to zero, so that they report all and end."""
        self.install("--set", "actors.replicas=0", *words)
        until(lambda: not self.pods("actor"), 120.0, "no actor")


def trial(
    play: Callable[..., None], why_not: Callable[[], str] = str, make: Callable[[], kubekit.Release] = Trial
) -> int:
    """Run `play` with a release; return the exit status.

    Args:
        why_not: Returns what else is missing on this machine, in words, or "".
        make: Makes the release.
    """
    if why := kubekit.missing() or why_not():
        print(f"It cannot run here: {why}.")
        return CANNOT
    with make() as release:
        play(release)
    print(table(["on a cluster", ""], release.rows))
    return end(release.troubles)


def trial_of_nodes(play: Callable[[nodekit.Trial], None], *commands: str, **values: dict[str, object]) -> int:
    """Install the release, let `play` cause faults, and compare the counts; return the exit status.

    Args:
        commands: Commands that the trial needs, among kill, start, cut and join.
        values: Values of the chart, by component.
    """

    def all_of_it(release: nodekit.Trial) -> None:
        release.goes_on()
        play(release)
        release.finish()

    return trial(all_of_it, lambda: nodekit.missing(*commands), lambda: nodekit.Trial(**values))


VOLUME = "24Mi"
SERVERS = [
    *("--set", "server.replicas=3,server.persistence.enabled=false"),
    *("--set", "server.settings.state-dir=/var/lib/memoire/state"),
    "--set-json", f'server.extraVolumes=[{{"name":"small","emptyDir":{{"medium":"Memory","sizeLimit":"{VOLUME}"}}}}]',
    "--set-json", 'server.extraVolumeMounts=[{"name":"small","mountPath":"/var/lib/memoire"}]',
]  # fmt: skip
FILL = "cat /dev/zero > /var/lib/memoire/fill; true"
# A file without a name belongs to no process' own memory: the kernel kills the largest process, the server.
TAKE = "import os; file = os.memfd_create('fill')\nwhile True: os.write(file, bytes(1 << 20))"


def play(release: Trial) -> None:
    release.install(*ACTORS_ONLY, *SERVERS)
    release.note("installed, with three servers")
    with release.last_words() as words:
        release.goes_on("the installation")
        full = min(release.pods("server"), key=lambda pod: -clients(release, pod))
        release.check(clients(release, full) > 0, "no server has a client that would notice")
        fill(release, full)
        kill_for_memory(release, full)
        release.end_actors(*ACTORS_ONLY, *SERVERS)
    release.compare(words)
    release.note("steps", f"{release.totals()['steps']:,}")


def clients(release: Trial, pod: str) -> int:
    """Return the number of a server's clients."""
    return int(release.status(pod)["stats"]["presence"]["active"])


def fill(release: Trial, pod: str) -> None:
    """Leave no room on a server's volume for a while."""
    release.kubectl("exec", pod, "--", "sh", "-c", FILL)
    reasons = until(lambda: release.status(pod)["reasons"], 60.0, "a server that says that it is full")
    release.check("full" in str(reasons), f"a full volume is not said: {reasons}")
    release.note("a volume is full: the server says it, and is not ready")
    release.kubectl("exec", pod, "--", "rm", "/var/lib/memoire/fill")
    until(lambda: release.status(pod)["ready"], 60.0, "a server with room")
    release.goes_on("room on the volume")
    release.note("room again: everything goes on")


def kill_for_memory(release: Trial, pod: str) -> None:
    """Have the kernel kill a server because its container takes too much memory."""
    release.kubectl("exec", pod, "--", "python3", "-c", TAKE, check=False)

    def is_back() -> bool:
        (status,) = release.containers(pod)
        return status["ready"] and status["lastState"].get("terminated", {}).get("reason") == "OOMKilled"

    until(is_back, 120.0, "a server that was killed for memory and is ready again")
    release.goes_on("a server that was killed for memory")
    release.note("a server was killed for memory (OOMKilled): everything goes on")


def kubernetes_accidents() -> int:
    """Are counts exact when a volume fills, and when a server is killed for memory?

    Actors push all the time. The servers' state is on small volumes in memory, which can be filled. A server with a
    full volume acknowledges nothing and is not ready, and goes on when there is room. The kernel then kills that server
    (OOMKilled), which starts again from its volume. At the end every actor's own counts are compared with the
    cluster's.
    """
    return trial(play)


MANY = 12


def play_of_kubernetes_autoscaling(release: nodekit.Trial) -> None:
    until(lambda: metrics(release) is not None, 120.0, "the autoscaler has a figure")
    release.note("proxies with 2 actors", len(release.ready("proxy")))
    began = time.time()
    release.change(actors={"replicas": MANY})
    release.measure(f"{MANY} actors: a second proxy is ready", began, lambda: len(release.ready("proxy")) >= 2, 400.0)
    release.goes_on(180.0)
    until(lambda: len(release.ready("proxy")) >= 2, 60.0, "two proxies at least")
    release.note(f"proxies with {MANY} actors", len(release.ready("proxy")))
    began = time.time()
    release.change(actors={"replicas": 2})
    release.measure("2 actors: one proxy again", began, lambda: release.has("proxy", 1), 400.0)
    release.goes_on(180.0)


def metrics(release: nodekit.Trial) -> int | None:
    """Return the per cent of the requested CPU that the proxies use, as the autoscaler sees it."""
    path = f"/apis/autoscaling/v2/namespaces/{release.namespace}/horizontalpodautoscalers/{release.full}-proxy"
    for each in release.api.get(path)["status"].get("currentMetrics") or []:
        return each["resource"]["current"].get("averageUtilization")
    return None


def kubernetes_autoscaling() -> int:
    """Do proxies scale out and back by their autoscaler while actors push, and is nothing lost or counted twice?

    A HorizontalPodAutoscaler on real CPU metrics, with one proxy at first and three at most. Actors start in such
    numbers that one proxy takes more CPU than it requested; then few remain. At the end every actor's own counts are
    compared with the servers'.
    """
    behavior = {
        "scaleUp": {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 2, "periodSeconds": 15}]},
        "scaleDown": {"stabilizationWindowSeconds": 15},
    }
    hpa = {"enabled": True, "minReplicas": 1, "maxReplicas": 3, "targetCPU": 80, "behavior": behavior}
    proxy = {"autoscaling": hpa, "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
    busy = {"replicas": 2, "relay": {"enabled": False}, "args": ["--rate=10"]}
    return trial_of_nodes(play_of_kubernetes_autoscaling, proxy=proxy, actors=busy)


MINE = "app.kubernetes.io/instance=demo"
DRAIN = ("drain", "--ignore-daemonsets", "--delete-emptydir-data", "--force")


def play_of_kubernetes_drains(release: nodekit.Trial) -> None:
    ended, fewest = threading.Event(), {"server": 2, "proxy": 2}

    def watch() -> None:
        while not ended.wait(0.5):
            for component, least in fewest.items():
                fewest[component] = min(least, len(release.ready(component)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for number, node in enumerate(nodekit.nodes(), 1):
            drain(release, node, f"node {number}")
    finally:
        ended.set()
        watcher.join()
    lost = [
        client for client, entry in release.words.items() if not entry.get("last") and client not in release.alive()
    ]
    release.check(not lost, f"{len(lost)} actors ended without a last word")
    for component, least in fewest.items():
        release.note(f"fewest of {component} that were ready", least)
        release.check(least >= 1, f"there was a moment without a {component} that was ready")


def drain(release: nodekit.Trial, node: str, name: str) -> None:
    kinds = release.on(node)
    release.note(f"{name} has on it", ", ".join(sorted(kinds)))
    (other,) = set(nodekit.nodes()[:2]) - {node}
    began = time.time()
    # Actors end first: an actor whose server is gone could not report its last counts, and would wait for this node.
    for mine in (f"{MINE},app.kubernetes.io/component=actor", MINE):
        run("kubectl", *DRAIN, f"--pod-selector={mine}", "--timeout=150s", node, timeout=180.0)
    release.note(f"{name}: drained", f"{time.time() - began:.1f} s")
    for component, count in nodekit.COUNTS.items():
        if component in kinds - {"server"}:
            until(lambda c=component, n=count: release.has(c, n), 120.0, f"{component} elsewhere")
    batches = release.batches()
    release.measure(f"{name} drained: learner takes batches", began, lambda: release.batches() > batches)
    if "learner" not in kinds:
        release.note(f"{name} drained: longest wait of the learner for a batch", f"{release.longest_wait(began):.1f} s")
    run("kubectl", "cordon", other)
    command = ["kubectl", *DRAIN, f"--pod-selector={MINE},app.kubernetes.io/component=server", "--timeout=6s", other]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    is_refused = "disruption budget" in refused.stderr and refused.returncode != 0
    release.check(is_refused, f"the drain of the second server was not refused: {refused.stderr[-300:]}")
    run("kubectl", "uncordon", other)
    run("kubectl", "uncordon", node)
    began = time.time()
    release.measure(f"{name} uncordoned: all servers ready", began, lambda: release.has("server", 2))
    until(lambda: all(release.has(c, n) for c, n in nodekit.COUNTS.items()), 120.0, "all ready")
    release.goes_on()
    release.note(f"{name} uncordoned: everything goes on", f"{time.time() - began:.1f} s")


def kubernetes_drains() -> int:
    """Does a cluster of Kubernetes go on through `kubectl drain` of each of its nodes, and are its budgets honoured?

    A release on two nodes, with a server, a proxy and actors on each. Each node in turn is drained while actors play and the
    learner learns, first of actors, then of all. While one server waits for its node (its volume is a folder there), the drain
    of the other node has to be refused. A server and a proxy must be ready at every moment. At the end every actor's own
    counts are compared with the servers'.
    """
    return trial_of_nodes(play_of_kubernetes_drains)


PATIENCE = 2.0
ACTORS = [
    *("--set", "inference.replicas=2,actors.replicas=4"),
    *("--set", "actors.image.repository=memoire,actors.relay.enabled=false"),
    *("--set-json", 'actors.command=["python3","/trial/asked.py","actor"]'),
    *("--set-json", f'actors.args=["--patience={PATIENCE:g}"]'),
    *("--set-json", 'actors.extraVolumes=[{"name":"trial","configMap":{"name":"trial"}}]'),
    *("--set-json", 'actors.extraVolumeMounts=[{"name":"trial","mountPath":"/trial"}]'),
]


class InferenceTrial(WithInference, Trial):
    """Release whose actors ask inference nodes, and counts of the nodes' requests."""

    def asked(self) -> int:
        """Return the number of rows that the running nodes were asked for."""
        return sum(self.status(pod)["stats"]["rows"] for pod in self.pods("inference"))

    def answers_again(self, what: str) -> None:
        """Wait until both nodes are ready and get requests."""
        until(lambda: self.are_ready("inference", 2), 120.0, f"two nodes after: {what}")
        before = self.asked()
        until(lambda: self.asked() > before + 200, 60.0, f"200 rows after: {what}")
        self.note(what)


def play_of_kubernetes_inference(release: InferenceTrial) -> None:
    release.install(*ACTORS)
    release.answers_again("installed, and asked")
    with release.last_words() as words:
        until(lambda: len(words) == 4, 60.0, "a word of each actor")
        nodes = f"deployment/{release.full}-inference"
        for number in ("first", "second"):
            release.kubectl("rollout", "restart", nodes)
            release.kubectl("rollout", "status", nodes, "--timeout=120s", timeout=130.0)
            release.answers_again(f"{number} rollout")
        release.kill(release.pods("inference")[0])
        release.answers_again("a node killed")
        release.kubectl("scale", nodes, "--replicas=1")
        until(lambda: release.are_ready("inference", 1), 60.0, "one node")
        release.kubectl("scale", nodes, "--replicas=2")
        release.answers_again("to one node, and back to two")
        release.install(*ACTORS, "--set", "actors.replicas=0")
        until(lambda: not release.pods("actor"), 90.0, "no actor")
    note_answers(release, words)


def note_answers(release: InferenceTrial, words: dict[str, dict[str, object]]) -> None:
    """Note the actors' figures of answers; check that answers came in time and that counts agree."""
    for client, entry in words.items():
        where = f"client {client}: {json.dumps(entry)}"
        release.check(not entry["late"], f"an answer did not come in time: {where}")
        release.check(float(str(entry["longest"])) < PATIENCE, f"an answer took too long: {where}")
    release.compare(words)
    release.note("rows asked for", f"{sum(int(str(entry['asked'])) for entry in words.values()):,}")
    release.note("without an answer within 2 s", sum(int(str(entry["late"])) for entry in words.values()))
    release.note("the longest answer took", f"{max(float(str(entry['longest'])) for entry in words.values()):.2f} s")
    release.note("version of the network at the end", max(int(str(entry["version"])) for entry in words.values()))


def kubernetes_inference() -> int:
    """Does an actor ever wait beyond its timeout while inference nodes are replaced under it?

    Four actors, whose image has no framework, ask two inference nodes for every action, one row at a time, and give each answer
    two seconds. The nodes follow the demo's learner, which learns from what these actors record. Meanwhile `kubectl rollout
    restart` replaces all nodes, twice, with all keys and policies on; then one node is killed, and then both are scaled to one
    and back. At the end every actor's own counts are the cluster's.
    """
    return trial(play_of_kubernetes_inference, make=InferenceTrial)


NAMESPACE, _, SERVICE = os.environ.get("MEMOIRE_PROMETHEUS", "monitoring/prometheus:9090").partition("/")
MONITORING = ROOT / "deploy" / "monitoring"
ALERTS = ("MemoireServerDown", "MemoireProxyBackDown")
"""Alerts that have to fire five minutes after the last server is gone."""


def ask(path: str, **query: str) -> dict:
    """Return the data of Prometheus' answer to a query."""
    address = f"/api/v1/namespaces/{NAMESPACE}/services/{SERVICE}/proxy/api/v1/{path}"
    answer = run("kubectl", "get", "--raw", f"{address}?{urllib.parse.urlencode(query)}", timeout=30.0)
    return json.loads(answer)["data"]


def why_not() -> str:
    try:
        kinds = ("podmonitors.monitoring.coreos.com", "prometheusrules.monitoring.coreos.com")
        run("kubectl", "get", "crd", *kinds)
        ask("query", query="up")
    except AssertionError as error:
        return f"there is no Prometheus of an operator at {NAMESPACE}/{SERVICE}: {str(error).strip().splitlines()[-1]}"
    return ""


def play_of_kubernetes_monitoring(release: Trial) -> None:
    release.install(
        *ACTORS_ONLY, "--set", "monitoring.podMonitor.enabled=true,monitoring.prometheusRule.enabled=true",
        "--set", "monitoring.podMonitor.interval=5s,monitoring.podMonitor.scrapeTimeout=4s",
    )  # fmt: skip
    release.note("installed")
    scraped(release)
    loaded(release)
    alarmed(release)


def scraped(release: Trial) -> None:
    """Check that the targets are exactly the release's Pods, and that each is up."""
    pods = set(release.pods())

    def are_targets() -> bool:
        series = ask("query", query=f'up{{namespace="{release.namespace}"}}')["result"]
        up = {(one["metric"]["pod"], one["metric"]["job"]) for one in series if one["value"][1] == "1"}
        is_right = {pod for pod, _ in up} == pods and len(series) == len(pods)
        return is_right and all(one["metric"]["release"] == release.name for one in series)

    until(are_targets, 120.0, f"every Pod a target that is up: {sorted(pods)}")
    release.note("every Pod a target that is up")
    release.note("Pods, targets", f"{len(pods)}, {len(pods)}")


def loaded(release: Trial) -> None:
    """Check that every group of memoire's rules is loaded and evaluated without an error."""
    ours = yaml.safe_load((MONITORING / "memoire.rules.yaml").read_text(encoding="utf-8"))["groups"]
    expected = {(group["name"], len(group["rules"])) for group in ours}

    def are_loaded() -> bool:
        groups = [group for group in ask("rules")["groups"] if release.namespace in group["file"]]
        health = {rule["health"] for group in groups for rule in group["rules"]}
        return {(group["name"], len(group["rules"])) for group in groups} == expected and health == {"ok"}

    until(are_loaded, 120.0, f"all rules loaded, without errors: {expected}")
    release.note("all rules loaded and evaluated")
    release.note("rules", sum(count for _, count in expected))


def alarmed(release: Trial) -> None:
    """Check that alerts fire when servers are gone, and end when servers are back."""

    def firing() -> set[str]:
        query = f'ALERTS{{alertstate="firing", namespace="{release.namespace}", severity!="info"}}'
        return {one["metric"]["alertname"] for one in ask("query", query=query)["result"]}

    release.check(not firing(), f"alerts without a cause: {firing()}")
    release.kubectl("scale", f"statefulset/{release.full}-server", "--replicas=0")
    until(lambda: set(ALERTS) <= firing(), 500.0, f"alerts: {', '.join(ALERTS)}")
    release.note(f"servers gone: {', '.join(ALERTS)} fired after")
    release.note("alerts then", ", ".join(sorted(firing())))
    release.kubectl("scale", f"statefulset/{release.full}-server", "--replicas=2")
    until(lambda: not set(ALERTS) & firing(), 200.0, f"an end of {', '.join(ALERTS)}")
    release.note("servers back: both ended after")


def kubernetes_monitoring() -> int:
    """Does a Prometheus operator scrape every Pod and load all rules, and does an alert begin and end with its cause?

    Only the chart's PodMonitor and PrometheusRule are configured. The trial asks the operator's Prometheus
    ($MEMOIRE_PROMETHEUS is its Service as NAMESPACE/NAME:PORT, by default monitoring/prometheus:9090) for targets,
    rules, and alerts, while the servers are away for longer than the rules tolerate.
    """
    return trial(play_of_kubernetes_monitoring, why_not)


SHORTLY = 12.0
"""Seconds, fewer than Kubernetes waits for a silent node (20 to 50)."""


def play_of_kubernetes_nodes_cut(release: nodekit.Trial) -> None:
    for number, node in enumerate(nodekit.nodes(), 1):
        if number > 1:
            release.spread()
        cut(release, node, f"node {number}", is_long=False)
        cut(release, node, f"node {number}", is_long=True)


def cut(release: nodekit.Trial, node: str, name: str, *, is_long: bool) -> None:
    """Cut a node off, shortly or until its Pods of Deployments run elsewhere, and join the node again."""
    how = "cut off for long" if is_long else f"cut off for {SHORTLY:.0f} s"
    kinds, aside = release.on(node), release.clients_on(node)
    release.note(f"{name} has on it", ", ".join(sorted(kinds)))
    before, batches = {client: release.words[client]["did"][0] for client in aside}, release.batches()
    began = time.time()
    nodekit.do("cut", node)
    if is_long:
        release.lost = node
        for component, count in nodekit.COUNTS.items():
            if component in kinds - {"server", "learner"}:
                release.measure(
                    f"{name} {how}: {component} replaced", began, lambda c=component, n=count: release.has(c, n)
                )
        if "learner" not in kinds:
            until(lambda: release.batches() > batches + 20, 60.0, "the learner goes on")
    else:
        while time.time() < began + SHORTLY:
            time.sleep(0.2)
    nodekit.do("join", node)
    release.lost, joined = "", time.time()
    until(lambda: all(release.has(c, n) for c, n in nodekit.COUNTS.items()), 180.0, "all ready")
    release.goes_on()
    release.note(f"{name} {how}: everything goes on after it is back", f"{time.time() - joined:.1f} s")
    if "learner" not in kinds:
        release.note(f"{name} {how}: longest wait of the learner for a batch", f"{release.longest_wait(began):.1f} s")
    if is_long:
        until(
            lambda: all(release.words[client].get("last") for client in aside),
            90.0,
            "those given up say their last words",
        )
        played = sum(release.words[client]["did"][0] - before[client] for client in aside)
        release.note(f"{name} {how}: episodes that its actors played meanwhile and had counted later", played)
        release.check(played > 0, f"the actors on {name} did not go on while it was cut off")


def kubernetes_nodes_cut() -> int:
    """Does a cluster lose or count anything twice when nodes are unplugged from the network and plugged in again?

    A release on two nodes, with a server, a proxy and actors on each. Each node in turn is cut off under load. The
    first time is too short for replacements. The second is so long that Kubernetes gives the node's Pods up and starts
    other Pods, while both sides go on: lost Pods play and count until the network reaches them again. Pods have
    tolerations of five seconds. At the end every actor's own counts are compared with the servers'.
    """
    return trial_of_nodes(play_of_kubernetes_nodes_cut, "cut", "join")


STOPPED = ("server", "proxy", "dashboard")
LIMIT = 180.0
SHARED = [word for each in STOPPED for word in ("--set", f"{each}.podSpecExtra.shareProcessNamespace=true")]
STOP = """
import os, pathlib, signal, sys
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    words = (folder / "cmdline").read_bytes().split(b"\\0")
    if sys.argv[1].encode() in words and int(folder.name) != os.getpid():
        os.kill(int(folder.name), signal.SIGSTOP)
        print(folder.name)
"""


def play_of_kubernetes_stopped(release: Trial) -> None:
    def restarts(pod: str) -> int:
        return sum(each["restartCount"] for each in release.containers(pod))

    release.install(*ACTORS_ONLY, *SHARED)
    release.note("installed")
    with release.last_words() as words:
        release.goes_on("the installation")
        pods = {each: release.pods(each)[0] for each in STOPPED}
        before = {each: restarts(pod) for each, pod in pods.items()}
        began = time.monotonic()
        for each, pod in pods.items():
            output = release.kubectl("exec", pod, "-c", each, "--", "python3", "-c", STOP, each)
            release.check(bool(output.strip()), f"no process of {pod} was stopped")
        took: dict[str, float] = {}

        def all_are_back() -> bool:
            for each, pod in pods.items():
                is_ready = all(one["ready"] for one in release.containers(pod))
                if each not in took and restarts(pod) > before[each] and is_ready:
                    took[each] = time.monotonic() - began
            return len(took) == len(pods)

        until(all_are_back, LIMIT + 60.0, "all are restarted and ready")
        for each, seconds in took.items():
            release.note(f"{each}: stopped until ready again", f"{seconds:.0f} s")
            release.check(seconds <= LIMIT, f"{each} took {seconds:.0f} s, more than {LIMIT:.0f} s")
        release.goes_on("the restarts")
        release.end_actors(*ACTORS_ONLY, *SHARED)
    release.compare(words)


def kubernetes_stopped() -> int:
    """Is a node that was stopped (SIGSTOP) restarted within three minutes, and does everything go on?

    A server, a proxy and the dashboard are stopped at the same moment: each process is there, its port takes
    connections, and nothing answers. The kubelet notices by /livez alone. Processes of a Pod see each other in this
    trial, so that a process can be stopped from inside. At the end every actor's own counts are compared with the
    cluster's.
    """
    return trial(play_of_kubernetes_stopped)


if __name__ == "__main__":
    run_named(globals())
