"""Does a cluster of Kubernetes lose or count anything twice when nodes are unplugged from the network and plugged in again?

A release on two nodes, with a server, a proxy and actors on each. Each node in turn is cut off under load: shortly, so
that nobody is replaced, and then for so long that Kubernetes gives its Pods up and starts others, while both sides go on:
those that were given up play and count until they are reached again. Pods have tolerations of five seconds. At the end
every actor's own counts are compared with the servers'.
"""

import sys
import time

from _nodes import nodekit, trial
from kubekit import until

SHORTLY = 12.0
"""Seconds: less than Kubernetes waits for a word from a node (20 to 50)."""


def play(made: nodekit.Trial) -> None:
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


if __name__ == "__main__":
    sys.exit(trial(play, "cut", "join"))
