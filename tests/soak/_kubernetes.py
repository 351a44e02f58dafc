"""What the scripts about a release on a Kubernetes of yours share: whether they can run here, and how it is told."""

import sys
from collections.abc import Callable

from _kit import CANNOT, TESTS, end, table

sys.path.append(str(TESTS / "kubernetes"))

import kubekit  # noqa: E402

DENY = {
    "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "deny-all"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
}  # fmt: skip
"""Cuts off whatever no other policy allows."""
ACTORS_ONLY = ("--set", "learner.enabled=false")


class Trial(kubekit.Report, kubekit.Release):
    """A release in a namespace where everything is denied, and what is to be told of it."""

    def __enter__(self) -> "Trial":
        super().__enter__()
        self.apply(DENY)
        return self

    def steps(self) -> int:
        """Recorded, by all servers' accounts."""
        return sum(one["steps"] for one in self.accounts().values())

    def goes_on(self, what: str) -> None:
        """Wait until actors have recorded more."""
        before = self.steps()
        kubekit.until(lambda: self.steps() > before, 120.0, f"more steps after: {what}")

    def end_actors(self, *words: str) -> None:
        """Let actors tell all, and go."""
        self.install("--set", "actors.replicas=0", *words)
        kubekit.until(lambda: not self.pods("actor"), 120.0, "no actor")


def trial(
    play: Callable[..., None], why_not: Callable[[], str] = str, make: Callable[[], kubekit.Release] = Trial
) -> int:
    """Do all of `play` with a release; the exit status.

    Args:
        why_not: What else is missing here, in words.
        make: The release.
    """
    if why := kubekit.missing() or why_not():
        print(f"It cannot run here: {why}.")
        return CANNOT
    with make() as release:
        play(release)
    print(table(["on a cluster", ""], release.rows))
    return end(release.troubles)
