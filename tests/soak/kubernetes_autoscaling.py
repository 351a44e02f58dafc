"""Do proxies scale out and back by their autoscaler while actors push, and is nothing lost or counted twice?

A HorizontalPodAutoscaler on real CPU metrics, with one proxy at first and three at most. Actors become so many that one
proxy takes more than it asked for, and few again. At the end every actor's own counts are compared with the servers'.
"""

import sys
import time

from _nodes import nodekit, trial
from kubekit import until

MANY = 12


def play(made: nodekit.Trial) -> None:
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


if __name__ == "__main__":
    behavior = {
        "scaleUp": {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 2, "periodSeconds": 15}]},
        "scaleDown": {"stabilizationWindowSeconds": 15},
    }
    hpa = {"enabled": True, "minReplicas": 1, "maxReplicas": 3, "targetCPU": 80, "behavior": behavior}
    proxy = {"autoscaling": hpa, "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
    busy = {"replicas": 2, "relay": {"enabled": False}, "args": ["--rate=10"]}
    sys.exit(trial(play, proxy=proxy, actors=busy))
