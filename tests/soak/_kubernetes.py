"""What the scripts about a release on a Kubernetes of yours share: whether they can run here, and how it is told."""

import sys
import time
from collections.abc import Callable

from _kit import CANNOT, TESTS, end, say, table

sys.path.append(str(TESTS / "kubernetes"))

import kubekit  # noqa: E402

DENY = {
    "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "deny-all"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
}  # fmt: skip
"""Cuts off whatever no other policy allows."""
ACTORS_ONLY = ("--set", "learner.enabled=false")


class Trial(kubekit.Release):
    """A release in a namespace where everything is denied, and what is to be told of it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, object]] = []
        self.troubles: list[str] = []
        self._since = time.monotonic()

    def __enter__(self) -> "Trial":
        super().__enter__()
        self.apply(DENY)
        return self

    def note(self, what: str, value: object = None) -> None:
        """For the table; without a value, the seconds since the note before."""
        now = time.monotonic()
        shown = f"{now - self._since:.0f} s" if value is None else value
        self._since = now
        say(f"{what}: {shown}")
        self.rows.append((what, shown))

    def check(self, holds: bool, otherwise: str) -> None:
        """Remember a promise that did not hold."""
        if not holds:
            say(otherwise)
            self.troubles.append(otherwise)

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


def trial(play: Callable[[Trial], None], why_not: Callable[[], str] = str) -> int:
    """Do all of `play` with a release; the exit status.

    Args:
        why_not: What else is missing here, in words.
    """
    if why := kubekit.missing() or why_not():
        print(f"It cannot run here: {why}.")
        return CANNOT
    with Trial() as release:
        play(release)
    print(table(["on a cluster", ""], release.rows))
    return end(release.troubles)
