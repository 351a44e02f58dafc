"""With a policy that denies everything: who reaches which port of a release, and does all that the cluster needs pass?

Pods of nobody's, which may send anything, try every port of every Pod: without the label of clients, with it, from another
namespace before and after `networkPolicy.clients` names it, and from one that `networkPolicy.monitoring` names. Then what the cluster
needs: actors record, `helm test`, a server is drained to another one, totals are asked for, and the dashboard sees every node.
"""

import json
import sys

from _kubernetes import ACTORS_ONLY, Trial, kubekit, trial
from accesskit import CLIENT, Visitor

NOBODY: dict[str, set[int]] = {"server": set(), "proxy": set(), "actor": set(), "dashboard": set()}
CLIENTS = {**NOBODY, "proxy": {5560, 5561, 5562}}
SCRAPERS = {component: {8081} for component in NOBODY}


def play(release: Trial) -> None:
    elsewhere = f"{release.namespace}-elsewhere"
    there = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": elsewhere}}}
    labelled = {**there, "podSelector": {"matchLabels": CLIENT}}
    own = {"podSelector": {"matchLabels": {"visitor": "browser"}}}
    kubekit.run("kubectl", "delete", "namespace", elsewhere, "--ignore-not-found", timeout=120.0)
    kubekit.run("kubectl", "create", "namespace", elsewhere)
    values = (*ACTORS_ONLY, "--set-json", f"networkPolicy.dashboard={json.dumps([own])}")
    try:
        release.install(*values)
        release.note("installed")
        with (
            Visitor(release, "stranger") as stranger,
            Visitor(release, "friend", CLIENT) as friend,
            Visitor(release, "browser") as browser,
            Visitor(release, "far", CLIENT, namespace=elsewhere) as far,
            Visitor(release, "other", namespace=elsewhere) as other,
        ):
            expect(release, "a Pod without the label", stranger, NOBODY)
            expect(release, "a Pod with the label", friend, CLIENTS)
            expect(release, "a Pod that `networkPolicy.dashboard` names", browser, {**NOBODY, "dashboard": {8265}})
            expect(release, "a Pod with the label, of another namespace", far, NOBODY)
            release.install(*values, "--set-json", f"networkPolicy.clients={json.dumps([labelled])}")
            expect(release, "the same, which `networkPolicy.clients` names", far, CLIENTS)
            expect(release, "one without the label there", other, NOBODY)
            release.install(*values, "--set-json", f"networkPolicy.monitoring={json.dumps([there])}")
            expect(release, "a Pod that `networkPolicy.monitoring` names", other, SCRAPERS)
        needs(release)
    finally:
        kubekit.run("kubectl", "delete", "namespace", elsewhere, "--wait=false", check=False)


def expect(release: Trial, who: str, visitor: Visitor, what: dict[str, set[int]]) -> None:
    """Look what somebody reaches, and compare it."""
    found = visitor.reaches()
    ports = sorted((component, port) for component, open_there in found.items() for port in open_there)
    release.note(f"{who} reaches", ", ".join(f"{component} {port}" for component, port in ports) or "nothing")
    release.check(found == what, f"{who} reaches {found}, and should reach {what}")


def needs(release: Trial) -> None:
    """What has to pass."""
    release.goes_on("policies")
    release.helm("test", release.name)
    release.note("helm test")
    seen = kubekit.until(
        lambda: (nodes := release.overview()["nodes"]) and {node["state"] for node in nodes} == {"up"} and nodes,
        60.0,
        "every node on the dashboard",
    )
    release.note("nodes that the dashboard sees", len(seen))
    with release.last_words() as words:
        release.end_actors(*ACTORS_ONLY)
    for trouble in release.differences(words):
        release.check(False, trouble)
    release.note("actors, each counted exactly", len(words))
    before = release.totals()
    first, second = (f"tcp://{pod}.{release.full}-server:5560" for pod in release.pods("server"))
    release.kubectl("exec", release.pods("server")[0], "--", "memoire", "drain", second, "--to", first, timeout=90.0)
    release.note("a server drained to another")
    release.check(release.totals() == before, f"totals were {before} before the drain, and are {release.totals()}")


if __name__ == "__main__":
    sys.exit(trial(play))
