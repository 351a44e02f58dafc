"""Tables of prompts over all servers that answer: where prompts stand, who has them, what ranks got. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from .answers import HolderRow, PromptsRow
from .node_state import NodeState

STATES: Final = ("waiting", "leased", "answered", "ready", "drawn", "committed", "dropped", "forgotten")
MAX_HOLDERS: Final = 32
"""Workers of each table that are shown."""
_SUMMED: Final = ("given", "workers", "expired", "late", "failed", "stale", "replayable", "tokens_drawn")


def prompts_of(nodes: Iterable[NodeState]) -> list[PromptsRow]:
    """Each table that stores prompts, added up over its servers."""
    tables: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for node in nodes:
        for name, table in (node.stats.get("tables") or {}).items() if node.is_up else ():
            if table.get("prompts"):
                tables.setdefault(name, []).append((node.name, table["prompts"]))
    return [_row(name, told) for name, told in tables.items()]


def _row(table: str, told: list[tuple[str, Mapping[str, Any]]]) -> PromptsRow:
    figures = [each for _, each in told]
    holders = [HolderRow(**each, server=server) for server, stats in told for each in stats.get("holders") or ()]
    ranks = max((len(each.get("rank_tokens") or ()) for each in figures), default=0)
    tokens = [0] * ranks
    reasons: Counter[str] = Counter()
    for each in figures:
        reasons.update(each.get("reasons") or {})
        for rank, count in enumerate(each.get("rank_tokens") or ()):
            tokens[rank] += count
    return PromptsRow(
        table=table,
        servers=len(told),
        states={state: sum(each[state] for each in figures) for state in STATES},
        oldest_lease=max(each["oldest_lease"] for each in figures),
        lag=max(each["lag"] for each in figures),
        reasons=dict(reasons),
        holders=sorted(holders, key=lambda each: (-each.leases, each.worker, each.server))[:MAX_HOLDERS],
        rank_tokens=tokens,
        **{name: sum(each[name] for each in figures) for name in _SUMMED},
    )
