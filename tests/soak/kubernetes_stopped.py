"""Is a node that was stopped (SIGSTOP) restarted within three minutes, and does everything go on?

A server, a proxy and the dashboard are stopped at the same moment: each process is there, its port takes connections, and
nothing answers. The kubelet notices by /livez alone. Processes of a Pod see each other here, so that one can be stopped
from inside. At the end every actor's own counts are compared with the cluster's.
"""

import json
import sys
import time

from _kubernetes import ACTORS_ONLY, Trial, kubekit, trial

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


def play(release: Trial) -> None:
    release.install(*ACTORS_ONLY, *SHARED)
    release.note("installed")
    with release.last_words() as words:
        release.goes_on("the installation")
        pods = {each: release.pods(each)[0] for each in STOPPED}
        before = {each: restarts(release, pod) for each, pod in pods.items()}
        began = time.monotonic()
        for each, pod in pods.items():
            said = release.kubectl("exec", pod, "-c", each, "--", "python3", "-c", STOP, each)
            release.check(bool(said.strip()), f"no process of {pod} was stopped")
        took: dict[str, float] = {}

        def all_are_back() -> bool:
            for each, pod in pods.items():
                if each not in took and restarts(release, pod) > before[each] and is_ready(release, pod):
                    took[each] = time.monotonic() - began
            return len(took) == len(pods)

        kubekit.until(all_are_back, LIMIT + 60.0, "all are restarted and ready")
        for each, seconds in took.items():
            release.note(f"{each}: stopped until ready again", f"{seconds:.0f} s")
            release.check(seconds <= LIMIT, f"{each} took {seconds:.0f} s, more than {LIMIT:.0f} s")
        release.goes_on("the restarts")
        release.end_actors(*ACTORS_ONLY, *SHARED)
    for trouble in release.differences(words):
        release.check(False, trouble)
    release.note("actors, each counted exactly", len(words))


def restarts(release: Trial, pod: str) -> int:
    """How often containers of a Pod were restarted."""
    status = json.loads(release.kubectl("get", "pod", pod, "-o", "json"))["status"]
    return sum(each["restartCount"] for each in status["containerStatuses"])


def is_ready(release: Trial, pod: str) -> bool:
    status = json.loads(release.kubectl("get", "pod", pod, "-o", "json"))["status"]
    return any(each["type"] == "Ready" and each["status"] == "True" for each in status["conditions"])


if __name__ == "__main__":
    sys.exit(trial(play))
