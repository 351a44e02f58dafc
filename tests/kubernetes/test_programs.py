"""The learner and the actors that users begin theirs with, on a cluster: deploy/examples/your-programs.yaml.

The images are localhost/memoire-my-learner:test and localhost/memoire-my-actor:test, where nodes find them.
"""

import pytest
from kubekit import KEYS, NAMESPACE, ROOT, TOKENS, Release, until

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(420)]
WHERE = (
    *("--set", f"security.keys={KEYS},security.tokens={TOKENS},learner.persistence.whenDeleted=Delete"),
    *("--set", "image.repository=localhost/memoire,image.tag=test"),
    *("--set", "learner.image.repository=localhost/memoire-my-learner,learner.image.tag=test"),
    *("--set", "actors.image.repository=localhost/memoire-my-actor,actors.image.tag=test"),
)


class Programs(Release):
    """The release that the example is."""

    VALUES = ROOT / "deploy" / "examples" / "your-programs.yaml"


def test_a_learner_and_actors_of_yours_run_and_a_learner_that_is_killed_goes_on():
    with Programs(f"{NAMESPACE}-programs") as release:
        release.install(*WHERE)
        (learner,) = release.pods("learner")

        def steps_and_samples():
            stats = release.status(learner)["stats"]
            return stats["totals"]["steps"], stats["samples"]

        until(lambda: min(steps_and_samples()) > 5_000, 120.0, "steps that are counted, samples that are drawn")
        for pod in release.pods("actor"):
            status = release.status(pod)
            assert (status["role"], status["ready"]) == ("actor", True), status["reasons"]
            until(
                lambda pod=pod: "memoire_client_steps_total" in release.page(pod, "/metrics", port=8081),
                60.0,
                "metrics",
            )
        release.helm("test", release.name, "--timeout", "100s")

        before, uid = steps_and_samples()[0], release.kubectl("get", "pod", learner, "-o", "jsonpath={.metadata.uid}")
        release.kill(learner)
        until(
            lambda: uid not in release.kubectl("get", "pods", "-o", "jsonpath={.items[*].metadata.uid}"), 60.0, "gone"
        )
        until(lambda: release.are_ready("learner", 1), 120.0, "another learner")
        assert steps_and_samples()[0] >= before  # on its volume
        since = steps_and_samples()
        until(
            lambda: all(now > then for now, then in zip(steps_and_samples(), since, strict=True)), 120.0, "more of both"
        )
        assert not release.uninstall()
