"""What the scripts about nodes of a Kubernetes cluster share: a release of light actors and a learner, compared at the end."""

from collections.abc import Callable

import _kubernetes  # puts tests/kubernetes on the path
import nodekit


def trial(play: Callable[[nodekit.Trial], None], *commands: str, **values: dict[str, object]) -> int:
    """Install the release, let `play` do its worst, and compare what was counted; the exit status.

    Args:
        commands: Of kill, start, cut and join, those that it takes.
        values: The chart's, by component.
    """

    def all_of_it(made: nodekit.Trial) -> None:
        made.goes_on()
        play(made)
        made.finish()

    return _kubernetes.trial(all_of_it, lambda: nodekit.missing(*commands), lambda: nodekit.Trial(**values))
