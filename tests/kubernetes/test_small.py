"""A small release without access control, installed from a registry by the second Helm in $MEMOIRE_HELM."""

import os
import subprocess

import pytest
from kubekit import CHART, HELM, NAMESPACE, Release, run, until

from chartkit import registry

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(420)]
OTHER = os.environ.get("MEMOIRE_HELM", "helm").split(":")[1:]
SMALL = (
    *("--set", "security.insecure=true,security.keys=,security.tokens="),
    *("--set", "server.replicas=1,server.persistence.enabled=false,proxy.replicas=1"),
    *("--set", "learner.enabled=false,actors.enabled=false"),
)


@pytest.mark.skipif(not OTHER, reason="MEMOIRE_HELM names no second helm")
def test_another_helm_installs_tests_changes_and_uninstalls_it(tmp_path):
    with Release(f"{NAMESPACE}-small", helm=OTHER[0]) as release:
        with registry(tmp_path) as here:
            run(OTHER[0], "package", str(CHART), "--destination", str(tmp_path))
            (package,) = tmp_path.glob("memoire-*.tgz")
            run(OTHER[0], "push", str(package), here.url("charts"), "--plain-http")
            release.install(*SMALL, "--plain-http", chart=here.url("charts/memoire"))
        release.helm("test", release.name, "--timeout", "100s")
        assert release.status(release.pods("server")[0])["security"]["keys"] is False
        release.install(*SMALL, "--set", "dashboard.enabled=false")
        assert "dashboard" not in release.addresses()
        release.helm("rollback", release.name, "1", "--wait", "--timeout", "100s")
        assert release.are_ready("dashboard", 1)
        release.uninstall()


def test_what_an_interrupted_installation_leaves_goes_when_it_is_uninstalled():
    with Release(f"{NAMESPACE}-cut") as release:

        def left():
            kinds = "serviceaccounts,roles,rolebindings,networkpolicies"
            return {each for each in release.kubectl("get", kinds, "-o", "name").split() if each.endswith("-keys")}

        command = [HELM, "-n", release.namespace, "install", release.name, str(CHART), "--set", "image.tag=none"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        job = f"job.batch/{release.full}-keys"
        until(lambda: job in release.kubectl("get", "jobs", "-o", "name").split(), 60.0, "the hook has begun")
        process.kill()
        process.wait(10.0)
        assert len(left()) == 4
        release.helm("uninstall", release.name, "--wait", "--timeout", "60s")
        until(lambda: not left(), 30.0, "nothing of the account that makes keys")
