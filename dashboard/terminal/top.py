"""Text of `memoire top`: the state of a whole cluster on a terminal.

The command polls and merges like the dashboard, and shows figures with the titles, units and digits of the pages
(`static/format.js`). Names, hosts and reasons come from other machines: they are escaped and never read as markup.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Final, NamedTuple

from memoire.dashboard.collect.aggregator import TIMEOUT, Aggregator
from memoire.dashboard.collect.answers import ActorRow, InferenceRow, LearnerRow, NodeRow, Overview, TableRow
from memoire.dashboard.collect.history import History
from memoire.dashboard.settings import Settings
from memoire.errors import EndpointError, escape
from memoire.figures import figures_of
from memoire.security.access import Tokens
from memoire.tables import registry

INCOMPLETE = 3
"""Exit status of `memoire top --once` if a node did not answer."""
FIRST_RATES = 2.5
"""Seconds between the first two polls, from which rates are computed; ledgers are read every two seconds."""
PAGES = "the address of a node's pages (its --http), such as http://server-0:8080"


NONE = "-"
"""Text of an unknown value, which is never shown as zero."""
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_BRIEF = ("", "K", "M", "B", "T")


def count(value: float | None) -> str:
    """Format a whole number, such as 1,234,567."""
    return NONE if value is None else f"{_rounded(value):,}"


def figure(value: float | None) -> str:
    """Format a number with three digits, such as 3.14, 5,123 or 1.23M."""
    if value is None or not math.isfinite(value):
        return NONE
    size = abs(value)
    if size != 0.0 and size < 1e-3:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits}e{int(power)}"
    if size >= 10_000.0:
        return _brief(value)
    return _exact(value) if size < 100.0 else count(value)


def bytes_of(value: float | None) -> str:
    """Format a number of bytes, such as 1.23 MB or 123 MB."""
    if value is None:
        return NONE
    unit = 0
    while abs(value) >= 1000.0 and unit < len(_BYTES) - 1:
        value /= 1000.0
        unit += 1
    digits = max(0, 2 - int(math.log10(max(1.0, abs(value))))) if unit else 0
    return f"{_fixed(value, digits)} {_BYTES[unit]}"


def share(value: float | None) -> str:
    """Format a share from 0 to 1 as a percentage, such as 93 %."""
    return NONE if value is None else f"{_exact(_rounded(value * 1000.0) / 10.0)} %"


def duration(seconds: float | None) -> str:
    """Format a duration in seconds, such as 340 ms, 12 s, 4 min, 3.1 h or 2.4 days."""
    if seconds is None:
        return NONE
    if seconds < 1.0:
        return f"{_exact(_rounded(seconds * 10_000.0) / 10.0)} ms"
    if seconds < 90.0:
        return f"{_fixed(seconds, 1)} s" if seconds < 10.0 else f"{_rounded(seconds)} s"
    if seconds < 5400.0:
        return f"{_exact(_rounded(seconds / 6.0) / 10.0) if seconds < 600.0 else _rounded(seconds / 60.0)} min"
    return f"{_fixed(seconds / 3600.0, 1)} h" if seconds < 172_800.0 else f"{_fixed(seconds / 86_400.0, 1)} days"


def format_ago(time: float, now: float) -> str:
    """Format a past time, such as "12 s ago" or "just now"."""
    return "just now" if now - time < 1.0 else f"{duration(now - time)} ago"


def _rounded(value: float) -> int:
    return math.floor(value + 0.5)


def _fixed(value: float, digits: int) -> str:
    """Format a number with `digits` decimals, rounding half away from zero."""
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def _exact(value: float) -> str:
    """Format a number with three significant digits, rounding half away from zero, without trailing zeros."""
    whole = Decimal(value)
    digits = whole.quantize(Decimal(1).scaleb(whole.adjusted() - 2), ROUND_HALF_UP) if whole else whole
    return f"{digits.normalize():,f}"


def _brief(value: float) -> str:
    unit = 0
    while abs(value) >= 999.5 and unit < len(_BRIEF) - 1:
        value /= 1000.0
        unit += 1
    return f"{_exact(value)}{_BRIEF[unit]}"


class StyledLine(NamedTuple):
    """Line of text with its style for terminals with colours."""

    text: str
    style: str = ""


def node_address(text: str) -> str:
    """Return the address of a node in the form of `Settings`, with "http://" in front if it is missing."""
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
    expected_inference: int = 0,
    say: Callable[[str], object] = print,
) -> int:
    """Show the state of a cluster until Ctrl-C: in place on a terminal if rich is installed, else as lines.

    Args:
        nodes: Addresses of the nodes' pages; "dns:NAME:PORT" means every address of a name.
        node_token: Token of the nodes.
        every: Seconds between two polls.
        once: Poll once, and return.
        actors: Number of the busiest and of the silent actors to show.
        expected_actors, expected_servers, expected_proxies, expected_inference: Expected numbers; 0 means no check.
        say: Called with each line.

    Returns:
        The exit status: 0, or with `once` 3 if a node did not answer.

    Raises:
        EndpointError: No node answers the first poll.
        ParameterError: The address of a node is malformed, or `every` is not above 0.
    """
    settings = Settings(
        nodes=tuple(map(node_address, nodes)),
        node_token=node_token,
        poll_every=every,
        expected_actors=expected_actors,
        expected_servers=expected_servers,
        expected_proxies=expected_proxies,
        expected_inference=expected_inference,
    )
    watch = Aggregator(settings, History(None))
    try:
        first_poll(watch, nodes)
        time.sleep(FIRST_RATES)
        watch.poll(every)  # the waiting share of a learner needs two polls
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


def first_poll(watch: Aggregator, nodes: Sequence[str]) -> None:
    """Poll the nodes for the first time.

    Raises:
        EndpointError: No node answers.
    """
    watch.resolve_names_periodically()
    first = watch.poll(TIMEOUT)
    if not any(node.state != "down" for node in first.nodes):
        raise _no_answer(nodes, first)
    watch.actors()


def _no_answer(nodes: Sequence[str], seen: Overview) -> EndpointError:
    reasons = "; ".join(escape(reason) for node in seen.nodes[:3] for reason in node.reasons)
    return EndpointError(" ".join(nodes), "ask", reasons or "the name has no address", PAGES)


def _print(watch: Aggregator, actors: int, say: Callable[[str], object]) -> int:
    seen = watch.poll(watch.settings.poll_every)
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
    """Show the state in place until Ctrl-C, which restores the former screen."""
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as screen:
        while True:
            seen = watch.poll(every)
            shown = lines(seen, watch.actors(), actors)
            text = Text("\n", no_wrap=True, overflow="ellipsis").join(Text(line.text, line.style) for line in shown)
            screen.update(text, refresh=True)
            time.sleep(every)


# --------------------------------------------------------------------------------------------------- output of top


def lines(seen: Overview, actors: Sequence[ActorRow], most: int = 5) -> list[StyledLine]:
    """Return an overview as lines, the most important first, with at most `most` busy and `most` silent actors."""
    return [
        *_head(seen),
        *_totals(seen),
        *_section(TABLES, seen.tables, seen.time),
        *_incomplete(seen),
        *_actors(seen, actors, most),
        *_section(LEARNERS, seen.learners, seen.time),
        *_section(INFERENCE, seen.inference, seen.time),
        *_section(NODES, seen.nodes, seen.time),
    ]


def access(row: NodeRow) -> str:
    """Return the access rule of a node: "everybody", "keys" or "this machine"."""
    if row.open:
        return "everybody"
    return NONE if row.keys is None else "keys" if row.keys else "this machine"


class TopColumn(NamedTuple):
    """Column of a table: its title, and a function from a row and the time to text."""

    title: str
    show: Callable[[Any, float], str]


FORMATS: Final[Mapping[str, Callable[[Any], str]]] = {
    "bytes": bytes_of, "s": duration, "share": share, "count": count, "": figure,
}  # fmt: skip
"""Formats of figures by their units."""


def columns(kind: type, names: str, **shown: Callable[[Any], str]) -> list[TopColumn]:
    """Return columns for fields, with the titles and units of their figures; `shown` overrides the text of a field."""

    def column(name: str, show: Callable[[Any], str] | None) -> TopColumn:
        title = figures_of(kind)[name].title.lower()
        return TopColumn(title, lambda row, now: titled(row, name, now)[1] if show is None else show(row))

    return [column(name, shown.get(name)) for name in names.split()]


def titled(row: Any, name: str, now: float = 0.0) -> tuple[str, str]:
    """Return the title of a figure in lower case, and its formatted value in a row."""
    kind: Any = type(row)
    declared, value = figures_of(kind)[name], getattr(row, name)
    if declared.unit == "ago":
        return declared.title.lower(), format_ago(value, now)
    return declared.title.lower(), value if isinstance(value, str) else FORMATS[declared.unit](value)


def _held(name: str) -> Callable[[Any], str]:
    return lambda row: f"{count(getattr(row, name))} {registry.items_noun(row.storage)}"


TABLES = [
    TopColumn("table", lambda row, now: row.name),
    TopColumn("storage", lambda row, now: row.storage),
    *columns(
        TableRow,
        "clients held_caches held_bytes full unused_samples samples overwritten_caches",
        held_caches=_held("held_caches"),
        full=lambda row: "no limit" if row.full is None else share(row.full),
        overwritten_caches=_held("overwritten_caches"),
    ),
    TopColumn("", lambda row, now: "; ".join(filter(None, (row.rate.draws_wait, row.rate.inserts_wait)))),
]
ACTORS = [
    TopColumn("actor", lambda row, now: row.name or row.label),
    *columns(
        ActorRow,
        "client host table home steps steps_per_second episodes return_recent accepted_caches skipped_caches",
        client=lambda row: row.client[:12],
    ),
]
LEARNERS = [
    TopColumn(
        "learner",
        lambda row, now: row.name or (row.learner if row.learner.startswith("server:") else row.learner[:8]),
    ),
    *columns(LearnerRow, "where batches samples waiting_share last_seen"),
]
INFERENCE = [
    TopColumn("inference node", lambda row, now: row.name),
    *columns(
        InferenceRow,
        "version clients rows_per_second batch_rows wait p50 p99 busy refused_per_second",
        version=lambda row: count(row.version) + (f" ({row.behind} behind)" if row.behind else ""),
    ),
]
STATES = {"down": "away", "unready": "not ready"}
NODES = [
    TopColumn("node", lambda row, now: row.name or row.url),
    *columns(
        NodeRow,
        "role state uptime cpu memory_bytes requests_per_second descriptors open refused took",
        role=lambda row: row.role or NONE,
        state=lambda row: STATES.get(row.state, row.state),
        open=access,
    ),
    TopColumn("", lambda row, now: "; ".join(row.reasons)),
]


def _head(seen: Overview) -> list[StyledLine]:
    state = "finished" if seen.finished else "not finished"
    where = "on disk" if seen.durable else "in memory"
    moment = datetime.fromtimestamp(seen.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    head = [StyledLine(f"run {escape(seen.run)!r} ({state}), {where}    {moment}", "bold")]
    styles = {"good": "green", "notice": "yellow", "bad": "bold red"}
    head += [StyledLine(f"{each.level}: {escape(each.text)}", styles[each.level]) for each in seen.verdicts]
    head += [StyledLine(f"open to everybody: {escape(', '.join(seen.open))}", "yellow")] if seen.open else []
    return head


def _totals(seen: Overview) -> list[StyledLine]:
    totals, rates, learning, fresh = seen.totals, seen.rates, seen.learning, seen.freshness
    drawn = figures_of(TableRow)["samples"].title.lower(), count(sum(table.samples for table in seen.tables))
    rows = [
        (*titled(totals, "steps"), figure(rates.steps)),
        (*titled(totals, "episodes"), figure(rates.episodes)),
        (*titled(totals, "accepted_caches"), figure(rates.caches)),
        (*drawn, figure(rates.samples)),
        (*titled(totals, "generated_bytes"), bytes_of(rates.generated_bytes)),
        (*titled(totals, "received_bytes"), bytes_of(rates.received_bytes)),
    ]
    facts = [titled(learning, name) for name in ("return_mean", "length_mean")]
    facts += [titled(fresh, name) for name in ("age_median", "lag_mean")]
    facts += [titled(rates, name) for name in ("waiting_share", "skipped_share")]
    lost = [titled(totals, f"{name}_caches") for name in ("rejected", "lost", "skipped")]
    return [
        StyledLine(""),
        *(
            StyledLine(f"{name:<14}{total:>16}{rate + '/s':>14}    {fact:<16}{value:>12}")
            for (name, total, rate), (fact, value) in zip(rows, facts, strict=True)
        ),
        *(StyledLine(f"caches {name}: {number}", "yellow") for name, number in lost if number != "0"),
    ]


def _incomplete(seen: Overview) -> list[StyledLine]:
    """Return a warning if a server does not answer, since the figures of tables leave it out."""
    away = [node.name or node.url for node in seen.nodes if node.role == "server" and node.state == "down"]
    if not away:
        return []
    verb, holder = ("does", "it holds") if len(away) == 1 else ("do", "they hold")
    text = f"incomplete: {', '.join(away)} {verb} not answer: the figures of tables leave out what {holder}"
    return [StyledLine(escape(text), "yellow")]


def _actors(seen: Overview, actors: Sequence[ActorRow], most: int) -> list[StyledLine]:
    counts = seen.actors
    parts = [f"{counts.active} active", f"{counts.silent} silent", f"{counts.lost} lost", f"{counts.gone} gone"]
    parts += [f"{counts.missing} of {counts.expected} missing"] if counts.expected else []
    busiest = sorted((row for row in actors if row.state == "active"), key=lambda row: -row.steps_per_second)
    silent = sorted((row for row in actors if row.state == "silent"), key=lambda row: -row.last_seen)
    shown = _section(ACTORS, busiest[:most], seen.time, f"actors: {', '.join(parts)}")
    for row in silent[:most]:
        who = f"{escape(row.name) or row.label} host {escape(row.host) or NONE} server {escape(row.home) or NONE}"
        shown.append(StyledLine(f"silent: {who}, last seen {format_ago(row.last_seen, seen.time)}", "yellow"))
    if len(silent) > most:
        shown.append(StyledLine(f"and {len(silent) - most} more are silent", "yellow"))
    return shown if busiest else [StyledLine(""), StyledLine(f"actors: {', '.join(parts)}", "bold"), *shown]


def _cells(columns: Sequence[TopColumn], row: Any, now: float) -> list[str]:
    """Return the cells of a row. A node that is away shows no figures, since its last ones are old."""
    if isinstance(row, NodeRow) and row.state == "down":
        names = row.name or row.url, row.role or NONE, STATES["down"]
        why = f"since {format_ago(row.since, now)}: {'; '.join(row.reasons)}"
        return [*names, *[NONE] * 5, access(row), NONE, NONE, why]
    return [column.show(row, now) for column in columns]


def _section(columns: Sequence[TopColumn], rows: Iterable[Any], now: float, title: str = "") -> list[StyledLine]:
    """Return a title and aligned columns below it, numbers to the right; no lines if there are no rows."""
    cells, heads = [_cells(columns, row, now) for row in rows], [column.title for column in columns]
    shown = [[escape(cell) or NONE for cell in row[:-1]] + [escape(row[-1])] for row in cells]
    if not shown:
        return []
    widths = [max(map(len, column)) for column in zip(heads, *shown, strict=True)]
    is_right = [all(_is_figure(row[place]) for row in shown) for place in range(len(heads))]

    def aligned(cells: Sequence[str]) -> str:
        placed = zip(cells, widths, is_right, strict=True)
        return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in placed).rstrip()

    title_line = [StyledLine(""), StyledLine(title, "bold")] if title else [StyledLine("")]
    body = [StyledLine(aligned(row), "red" if "away" in row[2:3] else "") for row in shown]
    return [*title_line, StyledLine(aligned(heads), "dim"), *body]


def _is_figure(cell: str) -> bool:
    return cell == NONE or cell == "no limit" or cell[:1].isdigit() or cell[:1] == "-"
