"""What happens to a run and its nodes, as marks on its curves: a node goes away, comes back or begins again. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .answers import EventRow
from .node_state import NodeState

START_TOLERANCE = 2.0
"""Seconds by which a node's start, as its uptime says it, may differ between two looks at one life of it."""


@dataclass(slots=True)
class _WatchedNode:
    """One node as it was at the last look."""

    state: str
    since: float
    started: float | None
    """When its process began, seconds since 1970; None where nobody knows."""


class EventWatcher:
    """Finds what has changed since the last look. What it sees first has not happened: it was there before."""

    def __init__(self) -> None:
        self._nodes: dict[str, _WatchedNode] = {}
        self._run = ""
        self._finished = False

    def look(self, now: float, run: str, nodes: Iterable[NodeState], *, finished: bool) -> list[EventRow]:
        """The events since the last look, the oldest first."""
        known, self._nodes = self._nodes, {node.url: _as_seen(node) for node in nodes}
        events = self._run_events(now, run, finished)
        for node in nodes:
            before = known.get(node.url)
            if before is not None:
                events += _node_events(now, node.name or node.url, before, self._nodes[node.url])
            if node.state == "down" and before is not None:
                self._nodes[node.url].started = before.started
        return events

    def _run_events(self, now: float, run: str, finished: bool) -> list[EventRow]:
        has_begun = bool(run) and run != self._run
        has_ended = finished and not (self._finished and run == self._run)
        self._run, self._finished = run, finished
        found = [EventRow(now, "run_began", "", f"The dashboard saw run {run} first.")] if has_begun else []
        return [*found, EventRow(now, "run_finished", "", f"Run {run} was finished.")] if has_ended else found


def _as_seen(node: NodeState) -> _WatchedNode:
    uptime, time = node.stats.get("uptime"), node.status.get("time")
    started = float(time) - float(uptime) if uptime is not None and time is not None and node.is_up else None
    return _WatchedNode(node.state, node.since, started)


def _node_events(now: float, name: str, before: _WatchedNode, seen: _WatchedNode) -> list[EventRow]:
    if before.state != "down" and seen.state == "down":
        return [EventRow(now, "node_down", name, f"{name} does not answer.")]
    is_new = None not in (before.started, seen.started) and seen.started > before.started + START_TOLERANCE  # type: ignore[operator]
    if is_new:
        return [EventRow(now, "node_restarted", name, f"{name} started again.")]
    if before.state == "down" and seen.state != "down" and before.started is not None:
        return [EventRow(now, "node_back", name, f"{name} answers again, after {now - before.since:.0f} s.")]
    return []
