"""Does an actor ever wait beyond its timeout while inference nodes are replaced under it?

Four actors, whose image has no framework, ask two inference nodes for every action, one row at a time, and give each answer
two seconds. The nodes follow the demo's learner, which learns from what these actors record. Meanwhile `kubectl rollout
restart` replaces all nodes, twice, with all keys and policies on; then one node is killed, and then both are scaled to one
and back. At the end every actor's own counts are the cluster's.
"""

import json
import sys

from _kubernetes import Trial, kubekit, trial
from inferencekit import WithInference

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
        kubekit.until(lambda: self.are_ready("inference", 2), 120.0, f"two nodes after: {what}")
        before = self.asked()
        kubekit.until(lambda: self.asked() > before + 200, 60.0, f"200 rows after: {what}")
        self.note(what)


def play(release: InferenceTrial) -> None:
    release.install(*ACTORS)
    release.answers_again("installed, and asked")
    with release.last_words() as words:
        kubekit.until(lambda: len(words) == 4, 60.0, "a word of each actor")
        nodes = f"deployment/{release.full}-inference"
        for number in ("first", "second"):
            release.kubectl("rollout", "restart", nodes)
            release.kubectl("rollout", "status", nodes, "--timeout=120s", timeout=130.0)
            release.answers_again(f"{number} rollout")
        release.kill(release.pods("inference")[0])
        release.answers_again("a node killed")
        release.kubectl("scale", nodes, "--replicas=1")
        kubekit.until(lambda: release.are_ready("inference", 1), 60.0, "one node")
        release.kubectl("scale", nodes, "--replicas=2")
        release.answers_again("to one node, and back to two")
        release.install(*ACTORS, "--set", "actors.replicas=0")
        kubekit.until(lambda: not release.pods("actor"), 90.0, "no actor")
    told(release, words)


def told(release: InferenceTrial, words: dict[str, dict[str, object]]) -> None:
    """What the actors have said, and whether the cluster has counted the same."""
    for client, said in words.items():
        where = f"client {client}: {json.dumps(said)}"
        release.check(not said["late"], f"an answer did not come in time: {where}")
        release.check(float(str(said["longest"])) < PATIENCE, f"an answer took too long: {where}")
    for trouble in release.differences(words):
        release.check(False, trouble)
    release.note("actors, each counted exactly", len(words))
    release.note("rows asked for", f"{sum(int(str(said['asked'])) for said in words.values()):,}")
    release.note("without an answer within 2 s", sum(int(str(said["late"])) for said in words.values()))
    release.note("the longest answer took", f"{max(float(str(said['longest'])) for said in words.values()):.2f} s")
    release.note("version of the network at the end", max(int(str(said["version"])) for said in words.values()))


if __name__ == "__main__":
    sys.exit(trial(play, make=InferenceTrial))
