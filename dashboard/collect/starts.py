"""Archives of start states, as the nodes that keep them say. Pure.

A node has them in its stats, one or a list of them under "starts":

    {"name": "circuits", "kept": 32, "draws": 510, "best": 41.0, "first": 60.0, "lineage": [[60.0, 0], [52.0, 810]]}

`best` and `first` are costs, the least is the best. `lineage` leads to the best: the cost of each state on the way that
is known, and how many steps it is from the first one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from .answers import StartsRow
from .node_state import NodeState

MAX_ARCHIVES = 64
"""Of the whole cluster."""
MAX_LINEAGE = 200
"""Newest ancestors of the best that are shown."""


def starts_of(nodes: Iterable[NodeState]) -> list[StartsRow]:
    """All archives of the nodes that answer. What is not as above is left out: it comes from a user's program."""
    found = []
    for node in nodes:
        told = node.stats.get("starts") if node.is_up else None
        for each in told if isinstance(told, list) else [told]:
            if isinstance(each, dict):
                found.append(_row(node, each))
    return found[:MAX_ARCHIVES]


def _row(node: NodeState, told: dict[str, Any]) -> StartsRow:
    name = node.name or node.url
    lineage: Any = told.get("lineage")
    steps = [(_number(each[0]), _number(each[1])) for each in (lineage if _is_list(lineage) else ()) if _is_pair(each)]
    return StartsRow(
        name=str(told.get("name") or name)[:256],
        node=name,
        kept=int(_number(told.get("kept")) or 0),
        draws=int(_number(told.get("draws")) or 0),
        best=_number(told.get("best")),
        first=_number(told.get("first")),
        lineage=[(cost, int(step)) for cost, step in steps if cost is not None and step is not None][-MAX_LINEAGE:],
    )


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _is_pair(value: Any) -> bool:
    return _is_list(value) and len(value) == 2


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]
