"""The learners of a cluster: those in servers' processes, and those far away. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from .answers import LearnerRow
from .node_state import NodeState
from .rates import WINDOW


def learners_of(
    servers: Iterable[NodeState], now: float, gained: Callable[[str, float], tuple[float, float]]
) -> list[LearnerRow]:
    """Each learner once, as the server says that heard of it last.

    Args:
        now: Seconds since 1970.
        gained: How much a counter gained within so many seconds, and in how many, as of `Counters`.
    """
    found: dict[str, LearnerRow] = {}
    for node in servers:
        stats = node.stats
        if node.is_up and stats.get("batches"):
            name, own = embedded(node), {key: stats[key] for key in ("batches", "samples", "waited")}
            found[name] = _row(name, node.name, now, own, {}, gained)
        for each in stats.get("learners") or ():
            name, seen = each["learner"], each["last_seen"]
            if name not in found or seen > found[name].last_seen:
                found[name] = _row(
                    name, each["host"], seen, each["figures"], each["scalars"], gained, each.get("name", "")
                )
    return list(found.values())


def embedded(node: NodeState) -> str:
    """What the learner in a server's process is called."""
    return f"server:{node.name}"


def waited(learner: str) -> str:
    """The counter of the seconds that a learner waited."""
    return f"waited {learner}"


def _row(
    name: str,
    where: str,
    seen: float,
    figures: Mapping[str, float],
    scalars: dict[str, float],
    gained: Callable[[str, float], tuple[float, float]],
    given: str = "",
) -> LearnerRow:
    more, seconds = gained(waited(name), WINDOW)
    lag = figures.get("lag_mean"), figures.get("lag_max")
    return LearnerRow(
        learner=name,
        where=where,
        last_seen=seen,
        batches=figures.get("batches", 0.0),
        samples=figures.get("samples", 0.0),
        waited=float(figures.get("waited", 0.0)),
        waiting_share=min(1.0, max(0.0, more / seconds)) if seconds > 0.0 else None,
        scalars=scalars,
        name=given,
        lag=(lag[0], lag[1]) if lag[0] is not None and lag[1] is not None else None,
    )
