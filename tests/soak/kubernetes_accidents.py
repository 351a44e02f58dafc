"""Are counts exact when a volume fills, a server is killed for memory, servers go from three to one, and back again?

Actors push all the time. The servers' state is on small volumes in memory, which can be filled. A server with a full volume
acknowledges nothing and is not ready, and goes on when there is room. That server is then killed by the kernel (OOMKilled)
and starts again from its volume. An upgrade to one server drains two; a rollback makes them again. At the end every
actor's own counts are compared with the cluster's.
"""

import json
import sys

from _kubernetes import ACTORS_ONLY, Trial, kubekit, trial

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
        release.install(*ACTORS_ONLY, *SERVERS, "--set", "server.replicas=1", seconds=300)
        release.goes_on("an upgrade to one server")
        release.check(len(release.pods("server")) == 1, "more servers than one")
        release.note("one server of three left, by an upgrade")
        release.helm("rollback", release.name, "--wait", "--timeout", "300s", timeout=350.0)
        release.goes_on("a rollback to three servers")
        release.check(len(release.pods("server")) == 3, "not three servers")
        release.note("three servers again, by a rollback")
        release.end_actors(*ACTORS_ONLY, *SERVERS)
    for trouble in release.differences(words):
        release.check(False, trouble)
    release.note("actors, each counted exactly", len(words))
    release.note("steps", f"{release.totals()['steps']:,}")


def clients(release: Trial, pod: str) -> int:
    """How many clients a server has."""
    return int(release.status(pod)["stats"]["presence"]["active"])


def fill(release: Trial, pod: str) -> None:
    """Leave no room on a server's volume for a while."""
    release.kubectl("exec", pod, "--", "sh", "-c", FILL)
    reasons = kubekit.until(lambda: release.status(pod)["reasons"], 60.0, "a server that says that it is full")
    release.check("full" in str(reasons), f"a full volume is not said: {reasons}")
    release.note("a volume is full: the server says it, and is not ready")
    release.kubectl("exec", pod, "--", "rm", "/var/lib/memoire/fill")
    kubekit.until(lambda: release.status(pod)["ready"], 60.0, "a server with room")
    release.goes_on("room on the volume")
    release.note("room again: everything goes on")


def kill_for_memory(release: Trial, pod: str) -> None:
    """Have the kernel kill a server because its container takes too much."""
    release.kubectl("exec", pod, "--", "python3", "-c", TAKE, check=False)

    def is_back() -> bool:
        (status,) = json.loads(release.kubectl("get", "pod", pod, "-o", "json"))["status"]["containerStatuses"]
        return status["ready"] and status["lastState"].get("terminated", {}).get("reason") == "OOMKilled"

    kubekit.until(is_back, 120.0, "a server that was killed for memory and is ready again")
    release.goes_on("a server that was killed for memory")
    release.note("a server was killed for memory (OOMKilled): everything goes on")


if __name__ == "__main__":
    sys.exit(trial(play))
