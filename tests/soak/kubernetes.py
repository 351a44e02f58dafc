"""Releases on a Kubernetes of yours."""

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
"""Cuts off whatever no other policy allows."""
ACTORS_ONLY = ("--set", "learner.enabled=false")


class Trial(kubekit.Report, kubekit.Release):
    """A release in a namespace where everything is denied, and what is to be told of it."""

    def __enter__(self) -> "Trial":
        super().__enter__()
        self.apply(DENY)
        return self

    def steps(self) -> int:
        """Recorded, by all servers' accounts."""
        return sum(one["steps"] for one in self.accounts().values())

    def goes_on(self, what: str) -> None:
        """Wait until actors have recorded more."""
        before = self.steps()
        until(lambda: self.steps() > before, 120.0, f"more steps after: {what}")

    def compare(self, words: dict[str, dict[str, object]]) -> None:
        """Check that each actor's own counts are the cluster's."""
        for trouble in self.differences(words):
            self.check(False, trouble)
        self.note("actors, each counted exactly", len(words))

    def containers(self, pod: str) -> list[dict]:
        """What Kubernetes says of the containers of a Pod."""
        return json.loads(self.kubectl("get", "pod", pod, "-o", "json"))["status"]["containerStatuses"]

    def end_actors(self, *words: str) -> None:
        """Let actors tell all, and go."""
        self.install("--set", "actors.replicas=0", *words)
        until(lambda: not self.pods("actor"), 120.0, "no actor")


def trial(
    play: Callable[..., None], why_not: Callable[[], str] = str, make: Callable[[], kubekit.Release] = Trial
) -> int:
    """Do all of `play` with a release; the exit status.

    Args:
        why_not: What else is missing here, in words.
        make: The release.
    """
    if why := kubekit.missing() or why_not():
        print(f"It cannot run here: {why}.")
        return CANNOT
    with make() as release:
        play(release)
    print(table(["on a cluster", ""], release.rows))
    return end(release.troubles)


def trial_of_nodes(play: Callable[[nodekit.Trial], None], *commands: str, **values: dict[str, object]) -> int:
    """Install the release, let `play` do its worst, and compare what was counted; the exit status.

    Args:
        commands: Of kill, start, cut and join, those that it takes.
        values: The chart's, by component.
    """

    def all_of_it(made: nodekit.Trial) -> None:
        made.goes_on()
        play(made)
        made.finish()

    return trial(all_of_it, lambda: nodekit.missing(*commands), lambda: nodekit.Trial(**values))


VOLUME = "24Mi"
SERVERS = [
    *("--set", "server.replicas=3,server.persistence.enabled=false"),
    *("--set", "server.settings.state-dir=/var/lib/memoire/state"),
    "--set-json", f'server.extraVolumes=[{{"name":"small","emptyDir":{{"medium":"Memory","sizeLimit":"{VOLUME}"}}}}]',
    "--set-json", 'server.extraVolumeMounts=[{"name":"small","mountPath":"/var/lib/memoire"}]',
]  # fmt: skip
FILL = "cat /dev/zero > /var/lib/memoire/fill; true"
# A file without a name, which belongs to no process' own memory: the kernel kills the largest process, which is the server.
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
    """How many clients a server has."""
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
    """Have the kernel kill a server because its container takes too much."""
    release.kubectl("exec", pod, "--", "python3", "-c", TAKE, check=False)

    def is_back() -> bool:
        (status,) = release.containers(pod)
        return status["ready"] and status["lastState"].get("terminated", {}).get("reason") == "OOMKilled"

    until(is_back, 120.0, "a server that was killed for memory and is ready again")
    release.goes_on("a server that was killed for memory")
    release.note("a server was killed for memory (OOMKilled): everything goes on")


def kubernetes_accidents() -> int:
    """Are counts exact when a volume fills, and when a server is killed for memory?

    Actors push all the time. The servers' state is on small volumes in memory, which can be filled. A server with a full volume
    acknowledges nothing and is not ready, and goes on when there is room. That server is then killed by the kernel (OOMKilled)
    and starts again from its volume. At the end every actor's own counts are compared with the cluster's.
    """
    return trial(play)


MANY = 12


def play_of_kubernetes_autoscaling(made: nodekit.Trial) -> None:
    until(lambda: metrics(made) is not None, 120.0, "the autoscaler has a figure")
    made.note("proxies with 2 actors", len(made.ready("proxy")))
    began = time.time()
    made.change(actors={"replicas": MANY})
    made.measure(f"{MANY} actors: a second proxy is ready", began, lambda: len(made.ready("proxy")) >= 2, 400.0)
    made.goes_on(180.0)
    until(lambda: len(made.ready("proxy")) >= 2, 60.0, "two proxies at least")
    made.note(f"proxies with {MANY} actors", len(made.ready("proxy")))
    began = time.time()
    made.change(actors={"replicas": 2})
    made.measure("2 actors: one proxy again", began, lambda: made.has("proxy", 1), 400.0)
    made.goes_on(180.0)


def metrics(made: nodekit.Trial) -> int | None:
    """Per cent of the requested CPU that the proxies use, as the autoscaler sees it."""
    path = f"/apis/autoscaling/v2/namespaces/{made.namespace}/horizontalpodautoscalers/{made.full}-proxy"
    for each in made.api.get(path)["status"].get("currentMetrics") or []:
        return each["resource"]["current"].get("averageUtilization")
    return None


def kubernetes_autoscaling() -> int:
    """Do proxies scale out and back by their autoscaler while actors push, and is nothing lost or counted twice?

    A HorizontalPodAutoscaler on real CPU metrics, with one proxy at first and three at most. Actors become so many that one
    proxy takes more than it asked for, and few again. At the end every actor's own counts are compared with the servers'.
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


def play_of_kubernetes_drains(made: nodekit.Trial) -> None:
    ended, fewest = threading.Event(), {"server": 2, "proxy": 2}

    def watch() -> None:
        while not ended.wait(0.5):
            for component, least in fewest.items():
                fewest[component] = min(least, len(made.ready(component)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for number, node in enumerate(nodekit.nodes(), 1):
            drain(made, node, f"node {number}")
    finally:
        ended.set()
        watcher.join()
    lost = [client for client, said in made.words.items() if not said.get("last") and client not in made.alive()]
    made.check(not lost, f"{len(lost)} actors ended without a last word")
    for component, least in fewest.items():
        made.note(f"fewest of {component} that were ready", least)
        made.check(least >= 1, f"there was a moment without a {component} that was ready")


def drain(made: nodekit.Trial, node: str, name: str) -> None:
    kinds = made.on(node)
    made.note(f"{name} has on it", ", ".join(sorted(kinds)))
    (other,) = set(nodekit.nodes()[:2]) - {node}
    began = time.time()
    # Actors first: one whose server has gone, and waits for this node, could not tell what it did last.
    for mine in (f"{MINE},app.kubernetes.io/component=actor", MINE):
        run("kubectl", *DRAIN, f"--pod-selector={mine}", "--timeout=150s", node, timeout=180.0)
    made.note(f"{name}: drained", f"{time.time() - began:.1f} s")
    for component, count in nodekit.COUNTS.items():
        if component in kinds - {"server"}:
            until(lambda c=component, n=count: made.has(c, n), 120.0, f"{component} elsewhere")
    batches = made.batches()
    made.measure(f"{name} drained: learner takes batches", began, lambda: made.batches() > batches)
    if "learner" not in kinds:
        made.note(f"{name} drained: longest wait of the learner for a batch", f"{made.longest_wait(began):.1f} s")
    run("kubectl", "cordon", other)
    command = ["kubectl", *DRAIN, f"--pod-selector={MINE},app.kubernetes.io/component=server", "--timeout=6s", other]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    is_refused = "disruption budget" in refused.stderr and refused.returncode != 0
    made.check(is_refused, f"the drain of the second server was not refused: {refused.stderr[-300:]}")
    run("kubectl", "uncordon", other)
    run("kubectl", "uncordon", node)
    began = time.time()
    made.measure(f"{name} uncordoned: all servers ready", began, lambda: made.has("server", 2))
    until(lambda: all(made.has(c, n) for c, n in nodekit.COUNTS.items()), 120.0, "all ready")
    made.goes_on()
    made.note(f"{name} uncordoned: everything goes on", f"{time.time() - began:.1f} s")


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
    """A release whose actors ask nodes, and what its nodes have been asked."""

    def asked(self) -> int:
        """Rows that the nodes which are there were asked for."""
        return sum(self.status(pod)["stats"]["rows"] for pod in self.pods("inference"))

    def answers_again(self, what: str) -> None:
        """Wait until both nodes are ready, and asked."""
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
    told(release, words)


def told(release: InferenceTrial, words: dict[str, dict[str, object]]) -> None:
    """What the actors have said, and whether the cluster has counted the same."""
    for client, said in words.items():
        where = f"client {client}: {json.dumps(said)}"
        release.check(not said["late"], f"an answer did not come in time: {where}")
        release.check(float(str(said["longest"])) < PATIENCE, f"an answer took too long: {where}")
    release.compare(words)
    release.note("rows asked for", f"{sum(int(str(said['asked'])) for said in words.values()):,}")
    release.note("without an answer within 2 s", sum(int(str(said["late"])) for said in words.values()))
    release.note("the longest answer took", f"{max(float(str(said['longest'])) for said in words.values()):.2f} s")
    release.note("version of the network at the end", max(int(str(said["version"])) for said in words.values()))


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
"""That have to fire when no server is there, five minutes later."""


def ask(path: str, **query: str) -> dict:
    """What Prometheus answers."""
    address = f"/api/v1/namespaces/{NAMESPACE}/services/{SERVICE}/proxy/api/v1/{path}"
    said = run("kubectl", "get", "--raw", f"{address}?{urllib.parse.urlencode(query)}", timeout=30.0)
    return json.loads(said)["data"]


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
    """Every Pod is a target, and up; nothing else of the release is one."""
    pods = set(release.pods())

    def found() -> bool:
        series = ask("query", query=f'up{{namespace="{release.namespace}"}}')["result"]
        up = {(one["metric"]["pod"], one["metric"]["job"]) for one in series if one["value"][1] == "1"}
        is_right = {pod for pod, _ in up} == pods and len(series) == len(pods)
        return is_right and all(one["metric"]["release"] == release.name for one in series)

    until(found, 120.0, f"every Pod a target that is up: {sorted(pods)}")
    release.note("every Pod a target that is up")
    release.note("Pods, targets", f"{len(pods)}, {len(pods)}")


def loaded(release: Trial) -> None:
    """Every group of ours is there, evaluated without an error."""
    ours = yaml.safe_load((MONITORING / "memoire.rules.yaml").read_text(encoding="utf-8"))["groups"]
    expected = {(group["name"], len(group["rules"])) for group in ours}

    def found() -> bool:
        groups = [group for group in ask("rules")["groups"] if release.namespace in group["file"]]
        health = {rule["health"] for group in groups for rule in group["rules"]}
        return {(group["name"], len(group["rules"])) for group in groups} == expected and health == {"ok"}

    until(found, 120.0, f"all rules loaded, without errors: {expected}")
    release.note("all rules loaded and evaluated")
    release.note("rules", sum(count for _, count in expected))


def alarmed(release: Trial) -> None:
    """Alerts fire when servers are away, and end when they are back."""

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
    """With a Prometheus operator: is every Pod scraped, are all rules loaded, and does an alert begin and end with its cause?

    The chart's PodMonitor and PrometheusRule are all that is configured. Everything else is asked of the Prometheus that the operator
    runs ($MEMOIRE_PROMETHEUS is its Service as NAMESPACE/NAME:PORT, by default monitoring/prometheus:9090): targets, rules,
    and alerts while the servers are away for longer than the rules bear with.
    """
    return trial(play_of_kubernetes_monitoring, why_not)


SHORTLY = 12.0
"""Seconds: less than Kubernetes waits for a word from a node (20 to 50)."""


def play_of_kubernetes_nodes_cut(made: nodekit.Trial) -> None:
    for number, node in enumerate(nodekit.nodes(), 1):
        if number > 1:
            made.spread()
        cut(made, node, f"node {number}", is_long=False)
        cut(made, node, f"node {number}", is_long=True)


def cut(made: nodekit.Trial, node: str, name: str, *, is_long: bool) -> None:
    """Cut a node off; where it is for long, until its Pods of Deployments run elsewhere."""
    how = "cut off for long" if is_long else f"cut off for {SHORTLY:.0f} s"
    kinds, aside = made.on(node), made.clients_on(node)
    made.note(f"{name} has on it", ", ".join(sorted(kinds)))
    before, batches = {client: made.words[client]["did"][0] for client in aside}, made.batches()
    began = time.time()
    nodekit.do("cut", node)
    if is_long:
        made.lost = node
        for component, count in nodekit.COUNTS.items():
            if component in kinds - {"server", "learner"}:
                made.measure(f"{name} {how}: {component} replaced", began, lambda c=component, n=count: made.has(c, n))
        if "learner" not in kinds:
            until(lambda: made.batches() > batches + 20, 60.0, "the learner goes on")
    else:
        while time.time() < began + SHORTLY:
            time.sleep(0.2)
    nodekit.do("join", node)
    made.lost, joined = "", time.time()
    until(lambda: all(made.has(c, n) for c, n in nodekit.COUNTS.items()), 180.0, "all ready")
    made.goes_on()
    made.note(f"{name} {how}: everything goes on after it is back", f"{time.time() - joined:.1f} s")
    if "learner" not in kinds:
        made.note(f"{name} {how}: longest wait of the learner for a batch", f"{made.longest_wait(began):.1f} s")
    if is_long:
        until(
            lambda: all(made.words[client].get("last") for client in aside), 90.0, "those given up say their last words"
        )
        played = sum(made.words[client]["did"][0] - before[client] for client in aside)
        made.note(f"{name} {how}: episodes that its actors played meanwhile and had counted later", played)
        made.check(played > 0, f"the actors on {name} did not go on while it was cut off")


def kubernetes_nodes_cut() -> int:
    """Does a cluster of Kubernetes lose or count anything twice when nodes are unplugged from the network and plugged in again?

    A release on two nodes, with a server, a proxy and actors on each. Each node in turn is cut off under load: shortly, so
    that nobody is replaced, and then for so long that Kubernetes gives its Pods up and starts others, while both sides go on:
    those that were given up play and count until they are reached again. Pods have tolerations of five seconds. At the end
    every actor's own counts are compared with the servers'.
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
            said = release.kubectl("exec", pod, "-c", each, "--", "python3", "-c", STOP, each)
            release.check(bool(said.strip()), f"no process of {pod} was stopped")
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

    A server, a proxy and the dashboard are stopped at the same moment: each process is there, its port takes connections, and
    nothing answers. The kubelet notices by /livez alone. Processes of a Pod see each other here, so that one can be stopped
    from inside. At the end every actor's own counts are compared with the cluster's.
    """
    return trial(play_of_kubernetes_stopped)


if __name__ == "__main__":
    run_named(globals())
