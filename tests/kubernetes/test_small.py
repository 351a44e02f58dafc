"""A small release that is open to everybody, installed by the other Helm: $MEMOIRE_HELM names two (`helm:helm3`)."""

import os

import pytest
from kubekit import NAMESPACE, Release

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(420)]
OTHER = os.environ.get("MEMOIRE_HELM", "helm").split(":")[1:]
SMALL = (
    *("--set", "security.insecure=true,security.keys=,security.tokens="),
    *("--set", "server.replicas=1,server.persistence.enabled=false,proxy.replicas=1"),
    *("--set", "learner.enabled=false,actors.enabled=false"),
)


@pytest.mark.skipif(not OTHER, reason="MEMOIRE_HELM names no second helm")
def test_another_helm_installs_tests_changes_and_uninstalls_it():
    with Release(f"{NAMESPACE}-small", helm=OTHER[0]) as release:
        release.install(*SMALL)
        release.helm("test", release.name, "--timeout", "100s")
        assert release.status(release.pods("server")[0])["security"]["keys"] is False
        release.install(*SMALL, "--set", "dashboard.enabled=false")
        assert "dashboard" not in release.addresses()
        release.helm("rollback", release.name, "1", "--wait", "--timeout", "100s")
        assert release.are_ready("dashboard", 1)
        release.uninstall()
