"""Inference nodes: how many rows they answer, how long that takes, and with which model. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memoire.accounting.timings import BOUNDS

from .answers import InferenceRow
from .counters import quantile
from .node_state import NodeState

REASONS = ("full", "everyone", "wait")
"""What makes a batch due."""


def inference_of(
    nodes: Iterable[NodeState], newest: Mapping[str, int], awaited: Mapping[str, int]
) -> list[InferenceRow]:
    """Each inference node that answers.

    Args:
        newest: Version of each topic.
        awaited: The same a while ago: what every node should have by now.
    """
    return [_row(node, newest, awaited) for node in nodes if node.role == "inference" and node.is_up]


def _row(node: NodeState, newest: Mapping[str, int], awaited: Mapping[str, int]) -> InferenceRow:
    stats = node.stats
    topic, version = str(stats.get("topic") or ""), int(stats.get("version", 0))
    counts = [node.gained(f"answered {place}")[0] for place in range(len(BOUNDS) + 1)]
    batches = {reason: node.gained(f"batches {reason}")[0] for reason in REASONS}
    number, answered = sum(batches.values()), sum(counts)
    rows, seconds = node.gained("rows")
    return InferenceRow(
        name=node.name or node.url,
        url=node.url,
        version=version,
        behind=max(0, newest[topic] - version) if topic in newest else None,
        is_outdated=version < awaited.get(topic, 0),
        clients=int(stats.get("clients", 0)),
        queue_rows=int(stats.get("queue_rows", 0)),
        rows_per_second=rows / seconds if seconds else None,
        batch_rows=node.gained("batched_rows")[0] / number if number else None,
        batches={reason: part / number for reason, part in batches.items()} if number else {},
        wait=node.gained("waited")[0] / answered if answered else None,
        p50=quantile(counts, 0.5),
        p99=quantile(counts, 0.99),
        busy=node.gained("computed")[0] / seconds if seconds else None,
        refused={str(code): int(many) for code, many in (stats.get("refused") or {}).items() if many},
        refused_per_second=node.gained("refusals")[0] / seconds if seconds else 0.0,
        failures=int(stats.get("failures", 0)),
        weights_failures=int(stats.get("weights_failures", 0)),
        expired=int(stats.get("expired", 0)),
    )
