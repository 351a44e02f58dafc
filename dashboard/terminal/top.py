"""The whole cluster on a terminal: what `memoire top` prints. It asks and merges as the dashboard does.

Names, hosts and reasons come from far away: they are escaped, and never taken for markup.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from memoire.accounting.logbook import escape
from memoire.dashboard.collect.aggregator import TIMEOUT, Aggregator
from memoire.dashboard.collect.answers import ActorRow, LearnerRow, NodeRow, Overview, TableRow
from memoire.dashboard.collect.history import History
from memoire.dashboard.settings import Settings
from memoire.errors import EndpointError
from memoire.security.tokens import Tokens

INCOMPLETE = 3
"""Exit status of one look when a node did not answer."""
FIRST_RATES = 2.5
"""Seconds between the two looks that rates are made of: ledgers are read every two seconds."""
PAGES = "the address of a node's pages (its --http), such as http://server-0:8080"


class StyledLine(NamedTuple):
    """A line, and how it is shown where there are colours."""

    text: str
    style: str = ""


def node_address(text: str) -> str:
    """The address of a node as `Settings` takes it: "http://" may be left out."""
    return text if "://" in text or text.startswith("dns:") else f"http://{text}"


def top(
    nodes: Sequence[str],
    *,
    node_token: Tokens | str | None = None,
    every: float = 2.0,
    once: bool = False,
    actors: int = 5,
    expected_actors: int = 0,
    expected_servers: int = 0,
    expected_proxies: int = 0,
    say: Callable[[str], object] = print,
) -> int:
    """Show how a cluster stands, until Ctrl-C: in place on a terminal where rich is installed, as lines elsewhere.

    Args:
        nodes: Where nodes' pages are; "dns:NAME:PORT" is every address of a name.
        node_token: What they ask for.
        every: Seconds between two looks.
        once: Look once, and return.
        actors: How many of the busiest and of the silent are named.
        expected_actors, expected_servers, expected_proxies: How many there should be; 0: nobody knows.
        say: Takes each line.

    Returns:
        The exit status: 0; with `once` 3 when some node did not answer.

    Raises:
        EndpointError: nobody answers, at the first look.
        ParameterError: a node's address is none, or `every` is not above 0.
    """
    settings = Settings(
        nodes=tuple(map(node_address, nodes)),
        node_token=node_token,
        poll_every=every,
        expected_actors=expected_actors,
        expected_servers=expected_servers,
        expected_proxies=expected_proxies,
    )
    watch = Aggregator(settings, History(None))
    try:
        watch.look_up()
        first = watch.turn(TIMEOUT)
        if not any(node.state != "down" for node in first.nodes):
            raise _nobody(nodes, first)
        watch.actors()
        time.sleep(FIRST_RATES)
        watch.turn(every)  # the share of its time that a learner waits is what it was at the look before
        if once:
            return _print(watch, actors, say)
        if say is print and sys.stdout.isatty() and _has_rich():
            _refresh(watch, every, actors)
        while True:
            _print(watch, actors, say)
            say("")
            time.sleep(every)
    finally:
        watch.close()


def _nobody(nodes: Sequence[str], seen: Overview) -> EndpointError:
    reasons = "; ".join(escape(reason) for node in seen.nodes[:3] for reason in node.reasons)
    return EndpointError(" ".join(nodes), "ask", reasons or "no such name was found", PAGES)


def _print(watch: Aggregator, actors: int, say: Callable[[str], object]) -> int:
    seen = watch.turn(watch.settings.poll_every)
    for line in lines(seen, watch.actors(), actors):
        say(line.text)
    if sys.stdout is not None:
        sys.stdout.flush()
    return INCOMPLETE if seen.missing else 0


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def _refresh(watch: Aggregator, every: float, actors: int) -> None:
    """Until Ctrl-C; what was there before comes back then."""
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as screen:
        while True:
            seen = watch.turn(every)
            shown = lines(seen, watch.actors(), actors)
            text = Text("\n", no_wrap=True, overflow="ellipsis").join(Text(line.text, line.style) for line in shown)
            screen.update(text, refresh=True)
            time.sleep(every)


# --------------------------------------------------------------------------------------------------- what is written


def lines(seen: Overview, actors: Sequence[ActorRow], most: int = 5) -> list[StyledLine]:
    """An overview as text, the most important first. `most` actors of each kind are named."""
    return [
        *_head(seen),
        *_totals(seen),
        *_section("tables", [_table(row) for row in seen.tables], _TABLES),
        *_actors(seen, actors, most),
        *_section("learners", [_learner(row, seen.time) for row in seen.learners], _LEARNERS),
        *_section("nodes", [_node(row) for row in seen.nodes], _NODES),
    ]


_TABLES = ("table", "storage", "clients", "held", "bytes", "fill", "surplus", "drawn", "overwritten", "")
_ACTORS = ("actor", "label", "host", "table", "home", "steps", "steps/s", "episodes", "return", "caches", "skipped")
_LEARNERS = ("learner", "where", "batches", "samples", "waits", "heard")
_NODES = ("node", "role", "state", "uptime", "memory", "files", "answer", "asks for", "")


def _head(seen: Overview) -> list[StyledLine]:
    state = "finished" if seen.finished else "not finished"
    where = "on disk" if seen.durable else "in memory"
    moment = datetime.fromtimestamp(seen.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    found = [StyledLine(f"run {escape(seen.run)!r} ({state}), {where}    {moment}", "bold")]
    styles = {"good": "green", "notice": "yellow", "bad": "bold red"}
    found += [StyledLine(f"{each.level}: {escape(each.text)}", styles[each.level]) for each in seen.verdicts]
    found += [StyledLine(f"open to everybody: {escape(', '.join(seen.open))}", "yellow")] if seen.open else []
    return found


def _totals(seen: Overview) -> list[StyledLine]:
    totals, rates, learning, fresh = seen.totals, seen.rates, seen.learning, seen.freshness
    rows = [
        ("steps", f"{totals.steps:,}", f"{rates.steps:,.0f}/s"),
        ("episodes", f"{totals.episodes:,}", f"{rates.episodes:,.1f}/s"),
        ("caches", f"{totals.accepted_caches:,}", f"{rates.caches:,.1f}/s"),
        ("samples", f"{sum(table.samples for table in seen.tables):,}", f"{rates.samples:,.0f}/s"),
        ("generated", _bytes(totals.generated_bytes), f"{_bytes(rates.generated_bytes)}/s"),
        ("received", _bytes(totals.received_bytes), f"{_bytes(rates.received_bytes)}/s"),
    ]
    facts = [
        ("return", _number(learning.return_mean)),
        ("length", _number(learning.length_mean)),
        ("sample age", _number(fresh.age_median, " s")),
        ("model lag", _number(fresh.lag_mean)),
        ("learner waits", _share(rates.waiting_share)),
        ("caches skipped", _share(rates.skipped_share)),
    ]
    lost = [("rejected", totals.rejected_caches), ("lost", totals.lost_caches), ("skipped", totals.skipped_caches)]
    return [
        StyledLine(""),
        *(
            StyledLine(f"{name:<10}{total:>16}{rate:>14}    {fact:<16}{value:>12}")
            for (name, total, rate), (fact, value) in zip(rows, facts, strict=True)
        ),
        *(StyledLine(f"caches {name}: {count:,}", "yellow") for name, count in lost if count),
    ]


def _table(row: TableRow) -> tuple[str, ...]:
    waits = [text for text in (row.draws_wait, row.inserts_wait) if text]
    return (
        row.name,
        row.storage,
        f"{row.clients:,}",
        f"{row.held_caches:,}",
        _bytes(row.held_bytes),
        _share(row.full),
        f"{row.unused_samples:,}",
        f"{row.samples:,}",
        f"{row.overwritten_caches:,}",
        "; ".join(waits),
    )


def _actors(seen: Overview, actors: Sequence[ActorRow], most: int) -> list[StyledLine]:
    counts = seen.actors
    said = [f"{counts.active} active", f"{counts.silent} silent", f"{counts.lost} lost", f"{counts.gone} gone"]
    said += [f"{counts.missing} of {counts.expected} missing"] if counts.expected else []
    busiest = sorted((row for row in actors if row.state == "active"), key=lambda row: -row.steps_per_second)
    silent = sorted((row for row in actors if row.state == "silent"), key=lambda row: -row.last_seen)
    found = _section(f"actors: {', '.join(said)}", [_actor(row) for row in busiest[:most]], _ACTORS)
    for row in silent[:most]:
        heard = _duration(seen.time - row.last_seen)
        where = f"host {escape(row.host) or '-'} home {escape(row.home) or '-'}"
        text = f"silent: {escape(row.name) or row.client} label {row.label} {where}"
        found.append(StyledLine(f"{text}, heard {heard} ago", "yellow"))
    if len(silent) > most:
        found.append(StyledLine(f"and {len(silent) - most} more are silent", "yellow"))
    return found if busiest else [StyledLine(""), StyledLine(f"actors: {', '.join(said)}", "bold"), *found]


def _actor(row: ActorRow) -> tuple[str, ...]:
    return (
        row.name or row.client[:12],
        row.label,
        row.host,
        row.table,
        row.home,
        f"{row.steps:,}",
        f"{row.steps_per_second:,.0f}",
        f"{row.episodes:,}",
        _number(row.return_mean),
        f"{row.accepted_caches:,}",
        f"{row.skipped_caches:,}",
    )


def _learner(row: LearnerRow, now: float) -> tuple[str, ...]:
    who = row.name or (row.learner if row.learner.startswith("server:") else row.learner[:12])
    heard = f"{_duration(max(0.0, now - row.last_seen))} ago"
    return who, row.where, f"{row.batches:,.0f}", f"{row.samples:,.0f}", _share(row.waiting_share), heard


def _node(row: NodeRow) -> tuple[str, ...]:
    return (
        row.name or row.url,
        row.role,
        row.state,
        "-" if row.uptime is None else _duration(row.uptime),
        "-" if row.memory_bytes is None else _bytes(row.memory_bytes),
        "-" if row.descriptors is None else f"{row.descriptors:,}",
        f"{1000 * row.took:.0f} ms",
        guarded_by(row),
        "; ".join(row.reasons),
    )


def guarded_by(row: NodeRow) -> str:
    """What those who come have to have."""
    if row.open:
        return "nothing"
    return "-" if row.keys is None else "keys" if row.keys else "this machine"


def _section(title: str, rows: Iterable[Sequence[str]], heads: Sequence[str]) -> list[StyledLine]:
    """A title and aligned columns below it: numbers to the right. Nothing where there are no rows."""
    shown = [[escape(cell) or "-" for cell in row[:-1]] + [escape(row[-1])] for row in rows]
    if not shown:
        return []
    widths = [max(map(len, column)) for column in zip(heads, *shown, strict=True)]
    is_right = [all(_is_figure(row[place]) for row in shown) for place in range(len(heads))]

    def aligned(cells: Sequence[str]) -> str:
        placed = zip(cells, widths, is_right, strict=True)
        return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in placed).rstrip()

    title_line = [StyledLine(""), StyledLine(title, "bold")] if title.startswith("actors") else [StyledLine("")]
    body = [StyledLine(aligned(row), "red" if "down" in row[2:3] else "") for row in shown]
    return [*title_line, StyledLine(aligned(heads), "dim"), *body]


def _is_figure(cell: str) -> bool:
    return cell == "-" or cell[:1].isdigit() or cell[:1] == "-"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024.0:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024.0
    return f"{count:,.1f} TiB"


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.2f}{unit}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
