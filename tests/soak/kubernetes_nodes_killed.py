"""Does a cluster of Kubernetes get over the loss of a node, and of the other one after it came back?

A release on two nodes, with a server, a proxy and actors on each; learner and dashboard are on one of them. Each node in
turn is ended as by a power cut, while actors play and the learner learns, and is started again. Pods have tolerations of
five seconds. A Pod of a StatefulSet stays bound to a node that may come back: the learner is let go by the taint
`node.kubernetes.io/out-of-service`, as a person would; a server, whose volume is a folder of the node, waits for it. At
the end every actor's own counts are compared with the servers'; of actors that were lost, what they were told is counted
must be, and no more than they had announced.
"""

import sys
import time

from _nodes import nodekit, trial
from kubekit import run, until


def play(made: nodekit.Trial) -> None:
    for number, node in enumerate(nodekit.nodes(), 1):
        if number > 1:
            made.spread()
        lose(made, node, f"node {number}")


def lose(made: nodekit.Trial, node: str, name: str) -> None:
    kinds = made.on(node)
    made.note(f"{name} has on it", ", ".join(sorted(kinds)))
    lost = made.clients_on(node)
    made.note(f"{name}: actors that are lost with it", len(lost))
    made.check(bool(lost), f"there was no actor on {name}")
    began = time.time()
    nodekit.do("kill", node)
    made.lost = node
    keeps_serving(made, name, began)
    for component, count in nodekit.COUNTS.items():
        if component in kinds - {"server", "learner"}:
            made.measure(f"{name} lost: {component} replaced", began, lambda c=component, n=count: made.has(c, n))
    if "learner" in kinds:
        run("kubectl", "taint", "node", node, nodekit.OUT_OF_SERVICE)
        tainted = time.time()
        made.measure(f"{name} declared out of service: learner replaced", tainted, lambda: made.has("learner", 1))
    batches = made.batches()
    made.measure(f"{name} lost: learner takes batches", began, lambda: made.batches() > batches + 5)
    if "learner" not in kinds:
        made.note(f"{name} lost: longest wait of the learner for a batch", f"{made.longest_wait(began):.1f} s")
    nodekit.do("start", node)
    made.lost, began = "", time.time()
    if "learner" in kinds:
        run("kubectl", "taint", "node", node, f"{nodekit.OUT_OF_SERVICE}-")
    made.measure(f"{name} back: all servers ready", began, lambda: made.has("server", 2), 180.0)
    until(lambda: all(made.has(c, n) for c, n in nodekit.COUNTS.items()), 120.0, "all ready")
    made.goes_on()
    made.note(f"{name} back: everything goes on", f"{time.time() - began:.1f} s")


def keeps_serving(made: nodekit.Trial, name: str, began: float) -> None:
    """Actors whose Pod and home were not on the node are told again and again that they are counted."""
    spared = made.untouched()
    made.note(f"{name} lost: actors that have neither Pod nor home there", len(spared))
    if spared:
        before = made.confirmed()
        until(lambda: all(made.confirmed()[each] > before[each] + 100 for each in spared), 90.0, "spared actors go on")
        silence = made.longest_silence(spared, began)
        made.note(f"{name} lost: longest that one of these waited for an answer", f"{silence:.1f} s")


if __name__ == "__main__":
    sys.exit(trial(play, "kill", "start"))
