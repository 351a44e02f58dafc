"""Overview of a cluster at one moment: sums, means and worst values of its nodes' answers. Without I/O.

The rows of inference nodes hold answered rows, latencies and model versions. The rows by kind of table hold figures
that only one kind has, such as the states of prompts, over all servers that answer.

Archives of start states come from the stats of nodes, which hold one archive or a list of archives under "starts":

    {"name": "circuits", "kept": 32, "draws": 510, "best": 41.0, "first": 60.0, "lineage": [[60.0, 0], [52.0, 810]]}

`best` and `first` are costs; the lowest cost is the best. `lineage` is the path to the best state: the cost of each
known state on the path, and the number of steps from the first state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from memoire.dashboard.settings import Settings
from memoire.figures import BOUNDS, summed_fields, total
from memoire.figures import figures_of as figures_of_class
from memoire.server.stats import FigureSpread, RecentEpisodes, TableStats
from memoire.tables import registry
from memoire.tables.base import DeliversOnce, ReceivesSums
from memoire.tables.inspection import SampleFreshness

from .answers import (
    InferenceRow,
    LearnerRow,
    Learning,
    NodeRow,
    Overview,
    OwnRow,
    RoleCount,
    StartsRow,
    TableRow,
)
from .counters import SHARES, Counters, NodeState, quantile
from .history import HistoryPoint
from .verdict import VerdictInputs

REASONS = ("full", "everyone", "wait")
"""Reasons for which a batch becomes due."""


MAX_ARCHIVES = 64
"""Largest number of archives that are shown, in the whole cluster."""
MAX_LINEAGE = 200
"""Newest ancestors of the best state that are shown."""


def starts_of(nodes: Iterable[NodeState]) -> list[StartsRow]:
    """Return the archives of all nodes that answer, without malformed ones, since they come from users' programs."""
    rows = []
    for node in nodes:
        starts = node.stats.get("starts") if node.is_up else None
        for archive in starts if isinstance(starts, list) else [starts]:
            if isinstance(archive, dict):
                rows.append(_start_row(node, archive))
    return rows[:MAX_ARCHIVES]


def _start_row(node: NodeState, archive: dict[str, Any]) -> StartsRow:
    name, lineage = node.name or node.url, archive.get("lineage")
    pairs = (each for each in lineage if _is_list(each) and len(each) == 2) if _is_list(lineage) else ()
    steps = ((_number(cost), _number(step)) for cost, step in pairs)
    return StartsRow(
        name=str(archive.get("name") or name)[:256],
        node=name,
        kept=int(_number(archive.get("kept")) or 0),
        draws=int(_number(archive.get("draws")) or 0),
        best=_number(archive.get("best")),
        first=_number(archive.get("first")),
        lineage=[(cost, int(step)) for cost, step in steps if cost is not None and step is not None][-MAX_LINEAGE:],
    )


def _is_list(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(value, list | tuple)


def _number(value: object) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None  # type: ignore[arg-type]


def kind_specific_figures(nodes: Iterable[NodeState]) -> dict[str, list[OwnRow]]:
    """Return the figures that only one kind of table has, by kind: a row for each table, added up over its servers."""
    kinds: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for node in nodes:
        for name, table in (node.stats.get("tables") or {}).items() if node.is_up else ():
            if table.get("own"):
                tables = kinds.setdefault(table.get("storage", ""), {})
                tables.setdefault(name, []).append(
                    {key: _with_server(each, node.name) for key, each in table["own"].items()}
                )
    return {
        storage: [OwnRow(name, len(parts), total(figures, parts)) for name, parts in tables.items()]
        for storage, tables in kinds.items()
        if (kind := registry.find(storage)) is not None and (figures := kind.own_figures()) is not None
    }


def _with_server(value: Any, server: str) -> Any:
    """Return a figure; add the server's name to each object if the figure is a list of objects."""
    is_listed = isinstance(value, list) and all(isinstance(each, Mapping) for each in value)
    return [{**each, "server": server} for each in value] if is_listed else value


def inference_of(
    nodes: Iterable[NodeState], newest: Mapping[str, int], awaited: Mapping[str, int]
) -> list[InferenceRow]:
    """Return a row for each inference node that answers.

    Args:
        newest: Newest version of each topic.
        awaited: Newest version of each topic some time ago, which every node should have by now.
    """
    return [_inference_row(node, newest, awaited) for node in nodes if node.role == "inference" and node.is_up]


def _inference_row(node: NodeState, newest: Mapping[str, int], awaited: Mapping[str, int]) -> InferenceRow:
    stats = node.stats
    topic, version = str(stats.get("topic") or ""), int(stats.get("version", 0))
    counts = [node.growth(f"answered {place}")[0] for place in range(len(BOUNDS) + 1)]
    batches = {reason: node.growth(f"batches {reason}")[0] for reason in REASONS}
    number, answered = sum(batches.values()), sum(counts)
    rows, seconds = node.growth("rows")
    return InferenceRow(
        name=node.name or node.url,
        url=node.url,
        version=version,
        behind=max(0, newest[topic] - version) if topic in newest else None,
        is_outdated=version < awaited.get(topic, 0),
        clients=int(stats.get("clients", 0)),
        queue_rows=int(stats.get("queue_rows", 0)),
        rows_per_second=rows / seconds if seconds else None,
        batch_rows=node.growth("batched_rows")[0] / number if number else None,
        batches={reason: part / number for reason, part in batches.items()} if number else {},
        wait=node.growth("waited")[0] / answered if answered else None,
        p50=quantile(counts, 0.5),
        p99=quantile(counts, 0.99),
        busy=node.growth("computed")[0] / seconds if seconds else None,
        refused={str(code): int(many) for code, many in (stats.get("refused") or {}).items() if many},
        refused_per_second=node.growth("refusals")[0] / seconds if seconds else 0.0,
        failures=int(stats.get("failures", 0)),
        weights_failures=int(stats.get("weights_failures", 0)),
        expired=int(stats.get("expired", 0)),
    )


def node_row(node: NodeState) -> NodeRow:
    """Return the overview's row for a node."""
    process, security = node.status.get("process") or {}, node.status.get("security") or {}
    reasons = [node.error] if node.error else [str(reason) for reason in node.status.get("reasons", ())]
    return NodeRow(
        name=node.name,
        url=node.url,
        role=node.role,
        state=node.state,
        since=node.since,
        reasons=reasons,
        software=str(node.status.get("software", "")),
        uptime=node.stats.get("uptime"),
        memory_bytes=process.get("memory_bytes"),
        descriptors=process.get("descriptors"),
        most_descriptors=process.get("most_descriptors"),
        faults=int(node.stats.get("faults", 0)),
        took=node.took,
        keys=None if not security else bool(security.get("keys")),
        open=tuple(str(address) for address in security.get("open") or ()),
        refused=sum(int(count) for count in (security.get("refused") or {}).values()),
        cpu=node.rate("cpu"),
        requests_per_second=node.rate("requests"),
        endpoint=reachable(str((node.status.get("endpoints") or {}).get("request", "")), node.url),
    )


def reachable(endpoint: str, url: str) -> str:
    """Return a node's address as other machines reach it: "any interface" becomes the host of the node's pages.

    tcp://0.0.0.0:5560, http://server-0:8080 -> tcp://server-0:5560
    """
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or host not in ("*", "0.0.0.0", "[::]"):  # noqa: S104
        return endpoint
    return f"tcp://{urlsplit(url).netloc.rpartition(':')[0]}:{port}"


def open_addresses(nodes: Iterable[NodeRow], settings: Settings) -> list[str]:
    """Return the addresses that are open to everyone, each after its node's name, with the dashboard's own address."""
    own = [f"dashboard http://{settings.listen}"] if settings.is_open else []
    return [*(f"{node.name or node.url} {address}" for node in nodes for address in node.open), *own]


def roles_of(nodes: Iterable[NodeRow], settings: Settings) -> list[RoleCount]:
    """Return the number of nodes that answer, and the expected number, for each role."""
    expected = {
        "server": settings.expected_servers,
        "proxy": settings.expected_proxies,
        "inference": settings.expected_inference,
    }
    up = Counter({role: 0 for role, number in expected.items() if number})
    up.update(node.role for node in nodes if node.role and node.state != "down")
    return [RoleCount(role, up[role], expected.get(role, 0), max(0, expected.get(role, 0) - up[role])) for role in up]


def tables_of(
    up: list[NodeState], learners: Iterable[LearnerRow] = (), counters: Counters | None = None
) -> list[TableRow]:
    """Return a row for each table, over all servers that answer."""
    counters = Counters() if counters is None else counters
    names = dict.fromkeys(name for node in up for name in node.stats.get("tables") or {})
    stats = {name: {node.name: (node.stats.get("tables") or {}).get(name) for node in up} for name in names}
    limits = {name: _max_model_lag(name, up) for name in names}
    lags = [each.lag for each in learners if each.lag is not None] if len(names) == 1 else []  # unknown tables
    return [_table_row(name, rows, counters, limits[name], lags) for name, rows in stats.items()]


def _max_model_lag(table: str, up: Iterable[NodeState]) -> int | None:
    """Return the parameter from the first server whose settings are known; None if no settings are known."""
    settings = ((node.settings.get("tables") or {}).get(table) or {} for node in up)
    return next((each["parameters"].get("max_model_lag") for each in settings if each.get("parameters")), None)


def _table_row(
    name: str,
    stats: Mapping[str, dict[str, Any] | None],
    counters: Counters,
    max_model_lag: int | None,
    learner_lags: list[tuple[float, float]],
) -> TableRow:
    rows = [row for row in stats.values() if row is not None]
    figures = summed_fields(TableStats, rows) | {"name": name}
    keys = ["held_caches" if registry.has_capability(row["storage"], ReceivesSums) else "held_samples" for row in rows]
    number = sum(row.get(key, 0) for row, key in zip(rows, keys, strict=True))
    limits = ((figures["held_bytes"], figures["byte_limit"]), (number, figures["capacity"]))
    storage = figures["storage"]
    kind, is_taken = registry.kind_or_default(storage), registry.has_capability(storage, DeliversOnce)
    fresh = [row["freshness"] for row in rows if row.get("freshness")]
    lags = learner_lags + [(each["lag_mean"], each["lag_max"]) for each in fresh if each.get("lag_mean") is not None]
    return TableRow(
        **figures,
        holds=registry.items_noun(storage),
        unit=kind.unit,
        room=kind.room,
        is_taken=is_taken,
        samples_per_insert=counters.ratio(name),
        full=max((held / limit for held, limit in limits if limit), default=None),
        facts={server: row for server, row in stats.items() if row is not None},
        lag_mean=max((mean for mean, _ in lags), default=None),
        lag_max=max((most for _, most in lags), default=None),
        max_model_lag=max_model_lag,
        stale_share=counters.stale_share(name) if is_taken else None,
    )


def models_of(up: Iterable[NodeState]) -> dict[str, int]:
    """Return the newest version of each topic."""
    return {topic: max(versions) for topic, versions in _by_name(up, "models").items()}


def _by_name(up: Iterable[NodeState], figure: str) -> dict[str, list[Any]]:
    """Return the values of all servers, by key, for a figure that is a mapping."""
    values: dict[str, list[Any]] = {}
    for node in up:
        for name, value in (node.stats.get(figure) or {}).items():
            values.setdefault(name, []).append(value)
    return values


def learning_of(up: list[NodeState], goal: float | None = None) -> Learning:
    """Combine returns and scalars of all servers that answer, weighted by their episodes or clients."""
    spreads = {name: total(FigureSpread, parts) for name, parts in _by_name(up, "scalars").items()}
    recent = [each for node in up if (each := node.stats.get("recent") or {}).get("count")]
    return Learning(
        **summed_fields(RecentEpisodes, recent),
        client_scalars={name: each.mean for name, each in spreads.items() if each.count},
        learner_scalars={name: values[-1] for name, values in _by_name(up, "learner_scalars").items()},
        goal=goal,
    )


def freshness_of(up: list[NodeState]) -> SampleFreshness:
    """Return the worst sample freshness that learners report, in the servers' processes and through readers."""
    reports = [table.get("freshness") for node in up for table in (node.stats.get("tables") or {}).values()]
    reports += [each["figures"] for node in up for each in node.stats.get("learners") or ()]
    return SampleFreshness(**summed_fields(SampleFreshness, [each for each in reports if each]))


def verdict_inputs(seen: Overview, up: list[NodeState], counters: Counters, settings: Settings) -> VerdictInputs:
    """Return the facts for the verdicts on an overview. `up` lists the servers that answer."""
    folders = {node.name: node.stats["folder"] for node in up if node.stats.get("folder")}
    early = {table.name: counters.early_ratio(table.name) for table in seen.tables}
    return VerdictInputs(
        seen=seen,
        settings=settings,
        servers_up=len(up),
        disk_used=max(
            (1.0 - each["free_bytes"] / each["disk_bytes"] for each in folders.values() if each["disk_bytes"]),
            default=None,
        ),
        disk_trouble=next(
            (f"Server {name}: {each['trouble']}" for name, each in folders.items() if each.get("trouble")), ""
        ),
        is_idle=counters.is_idle,
        is_still=counters.is_still,
        nothing_arrives=counters.nothing_arrives,
        rejected_share=counters.rejected_share,
        early_ratios={name: ratio for name, ratio in early.items() if ratio is not None},
        feedback=counters.feedback(sum(node.stats.get("actor_entries") or 0 for node in up)),
    )


def figures_of(overview: Overview) -> dict[str, HistoryPoint]:
    """Return the points that the history keeps of this moment, by the figure's name: see docs/dashboard.md."""
    totals, rates, actors = overview.totals, overview.rates, overview.actors
    figures: dict[str, float | None] = {
        "steps": totals.steps,
        "episodes": totals.episodes,
        "caches": totals.accepted_caches,
        "actors_active": actors.active,
        "actors_silent": actors.silent,
        "actors_lost": actors.lost,
        "learners": len(overview.learners),
        "skipped_caches": totals.skipped_caches,
        "rejected_caches": totals.rejected_caches,
        "lost_caches": totals.lost_caches,
        "generated_bytes": totals.generated_bytes,
        "received_bytes": totals.received_bytes,
        "request_p50": overview.latency.p50,
        "request_p99": overview.latency.p99,
        "nodes_up": sum(node.state != "down" for node in overview.nodes),
    }
    figures |= {name if name in SHARES else f"{name}_per_second": value for name, value in asdict(rates).items()}
    figures |= curves("sample_", overview.freshness)
    figures |= {f"client.{name}": value for name, value in overview.learning.client_scalars.items()}
    figures |= {f"learner.{name}": value for name, value in overview.learning.learner_scalars.items()}
    for table in overview.tables:
        figures |= curves(f"table.{table.name}.", table)
    for node in overview.inference:
        figures |= curves(f"inference.{node.name}.", node)
        figures |= {f"inference.{node.name}.batches_{reason}": part for reason, part in node.batches.items()}
    figures |= {f"starts.{archive.name}.best": archive.best for archive in overview.starts}
    for storage, rows in overview.own.items():
        for row in rows:
            figures |= curves(f"{storage}.{row.table}.", row.figures)
    if overview.actor_lag is not None:
        figures |= {"actor_lag_mean": overview.actor_lag.mean, "actor_lag_max": float(overview.actor_lag.max)}
    figures |= {f"model.{topic}": float(version) for topic, version in overview.models.items()}
    for each in (each for each in overview.nodes if each.state != "down"):
        figures |= curves(f"node.{each.name or each.url}.", each)
    return {
        name: HistoryPoint(float(value), float(value), float(value))
        for name, value in figures.items()
        if value is not None and math.isfinite(value)
    }


def curves(prefix: str, row: Any) -> dict[str, float | None]:
    """Return the row's figures that have a curve in the history, by prefixed name."""
    kind: Any = type(row)
    kept = (name for name, figure in figures_of_class(kind).items() if figure.curve)
    return {prefix + name: getattr(row, name) for name in kept}
