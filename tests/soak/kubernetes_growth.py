"""Do forty actors and three proxies, grown out of two and one while they play, all take part and stay exact?

Actors without relays, so that each one dials the proxies' Service itself; ten at a time, since all nodes of a trial may be
one machine. At the end every actor's own counts are compared with the servers'.
"""

import sys
import time
from collections import Counter

from _nodes import nodekit, trial
from kubekit import until

MANY = 40


def play(made: nodekit.Trial) -> None:
    began = time.time()
    for count in range(10, MANY + 1, 10):
        made.change(proxy={"replicas": 3}, actors={"replicas": count})
    made.measure(f"{MANY} actors and 3 proxies ready", began, lambda: made.has("actor", MANY) and made.has("proxy", 3))
    made.goes_on(240.0)
    made.note("all of them are told that they are counted, and the learner goes on", f"{time.time() - began:.1f} s")
    until(lambda: spread(made).total() == MANY, 60.0, "the servers have them all")
    for server, count in sorted(spread(made).items()):
        made.note(f"clients of {server}", count)
    began = time.time()
    made.change(proxy={"replicas": 1})
    made.goes_on(240.0)
    made.note("one proxy again: everything goes on", f"{time.time() - began:.1f} s")


def spread(made: nodekit.Trial) -> Counter[str]:
    """Active clients of each server."""
    return Counter({pod: made.status(pod)["stats"]["presence"].get("active", 0) for pod in made.pods("server")})


if __name__ == "__main__":
    light = {"replicas": 2, "relay": {"enabled": False}, "args": ["--rate=1"]}
    sys.exit(trial(play, actors=light, proxy={"replicas": 1}))
