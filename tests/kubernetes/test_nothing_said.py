"""`helm install` of which nothing is said but where images are: keys, tokens, policies and a demo, and what stays of them."""

import base64
import json
import os
import time
from pathlib import Path

import pytest
from kubekit import NAMESPACE, Release, run, until

from memoire.security.permissions import ROLES

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(590)]
TAG = os.environ.get("MEMOIRE_PLAIN_TAG", "test")
"""Of both images."""


class Plain(Release):
    """A release without Secrets or values of its own, in a namespace that denies everything."""

    VALUES = Path(__file__).with_name("plain.yaml")

    def __enter__(self):
        run("kubectl", "delete", "namespace", self.namespace, "--ignore-not-found", timeout=120.0)
        run("kubectl", "create", "namespace", self.namespace)
        run("kubectl", "label", "namespace", self.namespace, "pod-security.kubernetes.io/enforce=restricted")
        self.apply(
            "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: deny-all}, "
            "spec: {podSelector: {}, policyTypes: [Ingress, Egress]}}"
        )
        self.applied |= {f"secret/{name}" for name in self.names}
        return self

    @property
    def names(self):
        """The Secrets that are made for it."""
        return [f"{self.full}-tokens", *(f"{self.full}-keys-{role}" for role in ROLES)]

    def secrets(self):
        """{name: data} of them."""
        found = json.loads(self.kubectl("get", "secrets", "-o", "json"))["items"]
        return {one["metadata"]["name"]: one["data"] for one in found if one["metadata"]["name"] in self.names}

    def leftovers(self):
        """What is left of the hook that made them."""
        kinds = "jobs,serviceaccounts,roles,rolebindings,networkpolicies"
        return [one for one in self.kubectl("get", kinds, "-o", "name").split() if one.endswith(f"{self.full}-keys")]


@pytest.fixture(scope="module")
def release():
    with Plain(f"{NAMESPACE}-plain", name="plain") as made:
        made.install("--set", f"image.tag={TAG}", seconds=240)
        yield made


def progress(release):
    (server,) = release.servers()
    return server["stats"]["totals"]["steps"], server["stats"]["samples"]


def test_it_lives_with_keys_tokens_and_policies_and_the_hook_is_gone(release):
    for component, count in (("server", 1), ("proxy", 1), ("dashboard", 1), ("learner", 1), ("actor", 2)):
        until(lambda component=component, count=count: release.are_ready(component, count), 60.0, component)
    assert set(release.secrets()) == set(release.names) and not release.leftovers()
    (server,) = release.servers()
    assert server["security"]["keys"] is True and not server["security"]["open"]
    until(lambda: min(progress(release)) > 2_000, 120.0, "steps that are counted, and samples that are drawn")
    overview = until(lambda: (seen := release.overview())["totals"]["steps"] > 0 and seen, 60.0, "the dashboard")
    assert {node["role"]: node["state"] for node in overview["nodes"]} == dict.fromkeys(
        ("server", "proxy", "learner"), "up"
    )
    release.helm("test", release.name, "--timeout", "100s")


def test_the_third_line_of_the_notes_prints_the_token_of_the_dashboard(release):
    lines = release.helm("get", "notes", release.name).removeprefix("NOTES:").strip().splitlines()
    assert lines[0].endswith(f"port-forward service/{release.full}-dashboard 8265:80")
    said = run("bash", "-c", lines[2])
    assert (
        said == base64.b64decode(release.secrets()[f"{release.full}-tokens"]["dashboard"]).decode() and len(said) == 48
    )


def test_upgrade_rollback_and_another_installation_have_the_same_keys_and_tokens(release):
    before = release.secrets()
    release.install("--set", f"image.tag={TAG},proxy.replicas=2", seconds=200)
    assert release.secrets() == before and not release.leftovers()
    release.helm("rollback", release.name, "1", "--wait", "--timeout", "150s")
    assert release.secrets() == before and not release.leftovers()
    assert not release.uninstall()
    assert release.secrets() == before
    release.install("--set", f"image.tag={TAG}", seconds=200)
    assert release.secrets() == before and not release.leftovers()
    until(lambda: min(progress(release)) > 500, 120.0, "steps and samples with the same keys")


def test_a_secret_that_somebody_deleted_is_there_again_and_the_others_stay(release):
    before = release.secrets()
    gone = f"{release.full}-keys-actor"
    release.kubectl("delete", "secret", gone)
    release.install("--set", f"image.tag={TAG}", seconds=200)
    now = release.secrets()
    assert now.keys() == before.keys() and now[gone]["own.key"] != before[gone]["own.key"]
    assert {name: data["own.key"] for name, data in now.items() if name not in (gone, f"{release.full}-tokens")} == {
        name: data["own.key"] for name, data in before.items() if name not in (gone, f"{release.full}-tokens")
    }
    release.kubectl("rollout", "restart", f"deployment/{release.full}-actor")
    release.kubectl("rollout", "status", f"deployment/{release.full}-actor", "--timeout=120s", timeout=130.0)
    steps = progress(release)[0]
    until(lambda: progress(release)[0] > steps + 500, 150.0, "steps of actors with another key")


def test_a_secret_that_was_given_and_is_missing_is_said_and_nothing_is_changed(release):
    began = time.monotonic()
    with pytest.raises(AssertionError, match="nobodys-keys-server") as caught:
        release.install("--set", f"image.tag={TAG},security.keys=nobodys-keys", seconds=150)
    assert "is not there" in str(caught.value) and time.monotonic() - began < 140.0
    assert release.are_ready("server", 1)
