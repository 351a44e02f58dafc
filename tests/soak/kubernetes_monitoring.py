"""With a Prometheus operator: is every Pod scraped, are all rules loaded, and does an alert begin and end with its cause?

The chart's PodMonitor and PrometheusRule are all that is configured. Everything else is asked of the Prometheus that the operator
runs ($MEMOIRE_PROMETHEUS is its Service as NAMESPACE/NAME:PORT, by default monitoring/prometheus:9090): targets, rules, what
every panel of the boards shows, and alerts while the servers are away for longer than the rules bear with.
"""

import json
import os
import re
import sys
import urllib.parse

import yaml
from _kit import ROOT
from _kubernetes import ACTORS_ONLY, Trial, kubekit, trial

NAMESPACE, _, SERVICE = os.environ.get("MEMOIRE_PROMETHEUS", "monitoring/prometheus:9090").partition("/")
MONITORING = ROOT / "deploy" / "monitoring"
ALERTS = ("MemoireServerDown", "MemoireProxyBackDown")
"""That have to fire when no server is there, five minutes later."""


def ask(path: str, **query: str) -> dict:
    """What Prometheus answers."""
    address = f"/api/v1/namespaces/{NAMESPACE}/services/{SERVICE}/proxy/api/v1/{path}"
    said = kubekit.run("kubectl", "get", "--raw", f"{address}?{urllib.parse.urlencode(query)}", timeout=30.0)
    return json.loads(said)["data"]


def why_not() -> str:
    try:
        kubekit.run(
            "kubectl", "get", "crd", "podmonitors.monitoring.coreos.com", "prometheusrules.monitoring.coreos.com"
        )
        ask("query", query="up")
    except AssertionError as error:
        return f"there is no Prometheus of an operator at {NAMESPACE}/{SERVICE}: {str(error).strip().splitlines()[-1]}"
    return ""


def play(release: Trial) -> None:
    release.install(
        *ACTORS_ONLY, "--set", "monitoring.podMonitor.enabled=true,monitoring.prometheusRule.enabled=true",
        "--set", "monitoring.podMonitor.interval=5s,monitoring.podMonitor.scrapeTimeout=4s",
    )  # fmt: skip
    release.note("installed")
    scraped(release)
    loaded(release)
    answered(release)
    alarmed(release)


def scraped(release: Trial) -> None:
    """Every Pod is a target, and up; nothing else of the release is one."""
    pods = set(release.pods())

    def found() -> bool:
        series = ask("query", query=f'up{{namespace="{release.namespace}"}}')["result"]
        up = {(one["metric"]["pod"], one["metric"]["job"]) for one in series if one["value"][1] == "1"}
        is_right = {pod for pod, _ in up} == pods and len(series) == len(pods)
        return is_right and all(one["metric"]["release"] == release.name for one in series)

    kubekit.until(found, 120.0, f"every Pod a target that is up: {sorted(pods)}")
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

    kubekit.until(found, 120.0, f"all rules loaded, without errors: {expected}")
    release.note("all rules loaded and evaluated")
    release.note("rules", sum(count for _, count in expected))


def answered(release: Trial) -> None:
    """Every panel's query is one that Prometheus takes; how many have something to show, with actors and without a learner."""
    release.goes_on("monitoring")
    queries = [
        target["expr"]
        for file in sorted(MONITORING.glob("*.json"))
        for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]
        for target in panel.get("targets", ())
    ]
    chosen = {"$__rate_interval": "1m", "$namespace": release.namespace, "$release": release.name}
    empty = []
    for query in queries:
        asked = query
        for name, value in chosen.items():
            asked = asked.replace(name, value)
        asked = re.sub(r"\$\w+", ".*", asked)
        empty += [query] * (not ask("query", query=asked)["result"])
    release.note("queries of the boards, with something to show", f"{len(queries)}, {len(queries) - len(empty)}")
    for query in empty:
        print(f"nothing to show: {query}", file=sys.stderr)
    release.check(len(empty) <= len(queries) // 3, f"too little to show: {empty}")


def alarmed(release: Trial) -> None:
    """Alerts fire when servers are away, and end when they are back."""

    def firing() -> set[str]:
        query = f'ALERTS{{alertstate="firing", namespace="{release.namespace}", severity!="info"}}'
        return {one["metric"]["alertname"] for one in ask("query", query=query)["result"]}

    release.check(not firing(), f"alerts without a cause: {firing()}")
    release.kubectl("scale", f"statefulset/{release.full}-server", "--replicas=0")
    kubekit.until(lambda: set(ALERTS) <= firing(), 500.0, f"alerts: {', '.join(ALERTS)}")
    release.note(f"servers gone: {', '.join(ALERTS)} fired after")
    release.note("alerts then", ", ".join(sorted(firing())))
    release.kubectl("scale", f"statefulset/{release.full}-server", "--replicas=2")
    kubekit.until(lambda: not set(ALERTS) & firing(), 200.0, f"an end of {', '.join(ALERTS)}")
    release.note("servers back: both ended after")


if __name__ == "__main__":
    sys.exit(trial(play, why_not))
