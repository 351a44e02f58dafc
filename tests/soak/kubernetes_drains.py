"""Does a cluster of Kubernetes go on through `kubectl drain` of each of its nodes, and are its budgets honoured?

A release on two nodes, with a server, a proxy and actors on each. Each node in turn is drained while actors play and the
learner learns, first of actors, then of all. While one server waits for its node (its volume is a folder there), the drain
of the other node has to be refused. A server and a proxy must be ready at every moment. At the end every actor's own
counts are compared with the servers'.
"""

import subprocess
import sys
import threading
import time

from _nodes import nodekit, trial
from kubekit import run, until

MINE = "app.kubernetes.io/instance=demo"
DRAIN = ("drain", "--ignore-daemonsets", "--delete-emptydir-data", "--force")


def play(made: nodekit.Trial) -> None:
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
    refused = subprocess.run(
        ["kubectl", *DRAIN, f"--pod-selector={MINE},app.kubernetes.io/component=server", "--timeout=6s", other],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    made.check(
        "disruption budget" in refused.stderr and refused.returncode != 0,
        f"the drain of the second server was not refused: {refused.stderr[-300:]}",
    )
    run("kubectl", "uncordon", other)
    run("kubectl", "uncordon", node)
    began = time.time()
    made.measure(f"{name} uncordoned: all servers ready", began, lambda: made.has("server", 2))
    until(lambda: all(made.has(c, n) for c, n in nodekit.COUNTS.items()), 120.0, "all ready")
    made.goes_on()
    made.note(f"{name} uncordoned: everything goes on", f"{time.time() - began:.1f} s")


if __name__ == "__main__":
    sys.exit(trial(play))
