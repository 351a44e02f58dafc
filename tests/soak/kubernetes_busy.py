"""Do a hundred busy loops, for ten minutes, restart nothing?

A Pod on each node asks for a whole core and runs fifty endless loops, beside servers that ask for a twentieth of a core.
Everything is slow then. No container may be restarted meanwhile, and actors go on afterwards. At the end every
actor's own counts are compared with the cluster's.
"""

import json
import os
import sys
import time

from _kubernetes import Trial, kubekit, trial

LOOPS = 100
MINUTES = float(os.environ.get("MEMOIRE_BUSY_MINUTES", "10"))


def busy(release: Trial) -> int:
    """Make the Pods that waste time, one for each node; how many there are."""
    nodes = json.loads(kubekit.run("kubectl", "get", "nodes", "-o", "json"))["items"]
    server = json.loads(release.kubectl("get", "pod", release.pods("server")[0], "-o", "json"))["spec"]
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    share = -(-LOOPS // len(nodes))
    for number, node in enumerate(nodes):
        container = {
            "name": "busy", "image": server["containers"][0]["image"], "securityContext": context,
            "imagePullPolicy": "IfNotPresent", "resources": {"requests": {"cpu": "1"}},
            "command": ["sh", "-c", f"for i in $(seq {share}); do while :; do :; done & done; wait"],
        }  # fmt: skip
        pod = {
            "nodeName": node["metadata"]["name"], "terminationGracePeriodSeconds": 0, "containers": [container],
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        }  # fmt: skip
        about = {"name": f"busy-{number}", "labels": {"app": "busy"}}
        release.apply({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": pod})
    release.kubectl("wait", "pods", "-l", "app=busy", "--for=condition=Ready", "--timeout=60s", timeout=90.0)
    return len(nodes)


def restarts(release: Trial) -> dict[str, int]:
    """How often each container of the release was restarted, those that were are named."""
    found = {}
    label = f"app.kubernetes.io/instance={release.name}"
    for pod in json.loads(release.kubectl("get", "pods", "-l", label, "-o", "json"))["items"]:
        status = pod["status"]
        for each in (*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())):
            found[f"{pod['metadata']['name']}/{each['name']}"] = each["restartCount"]
    return found


def play(release: Trial) -> None:
    release.install()
    release.note("installed")
    with release.last_words() as words:
        release.goes_on("the installation")
        before, steps = restarts(release), release.steps()
        release.note("Pods of busy loops", busy(release))
        after, began = before, time.monotonic()
        # By the API server alone: a look from inside of a Pod takes minutes.
        while time.monotonic() < began + 60.0 * MINUTES:
            after = kubekit.until(lambda: restarts(release), 300.0, "an answer of the API server")
            time.sleep(10.0)
        release.kubectl("delete", "pods", "-l", "app=busy", "--wait=false")
        release.note(f"{MINUTES:g} minutes of {LOOPS} loops, until they were told to end")
        again = {name: count for name, count in after.items() if count > before.get(name, 0)}
        release.note("containers that were restarted", sum(again.values()))
        release.check(not again, f"restarted: {again}")
        release.goes_on("the loops")
        release.note("steps from before the loops until after them", f"{release.steps() - steps:,}")
        release.end_actors()
    for trouble in release.differences(words):
        release.check(False, trouble)
    release.note("actors, each counted exactly", len(words))


if __name__ == "__main__":
    sys.exit(trial(play))
