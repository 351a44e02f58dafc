"""The whole cluster on a terminal: what `memoire top` prints. It asks and merges as the dashboard does.

Names, hosts and reasons come from far away: they are escaped, and never taken for markup.

Its figures have the same words, units and digits as in the pages (`static/format.js`).
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
"""Exit status of one look when a node did not answer."""
FIRST_RATES = 2.5
"""Seconds between the two looks that rates are made of: ledgers are read every two seconds."""
PAGES = "the address of a node's pages (its --http), such as http://server-0:8080"


NONE = "-"
"""What is not known: never a zero."""
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_BRIEF = ("", "K", "M", "B", "T")


def count(value: float | None) -> str:
    """1,234,567."""
    return NONE if value is None else f"{_rounded(value):,}"


def figure(value: float | None) -> str:
    """3.14, 5,123 or 1.23M."""
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
    """1.23 MB, 12.3 MB, 123 MB."""
    if value is None:
        return NONE
    unit = 0
    while abs(value) >= 1000.0 and unit < len(_BYTES) - 1:
        value /= 1000.0
        unit += 1
    digits = max(0, 2 - int(math.log10(max(1.0, abs(value))))) if unit else 0
    return f"{_fixed(value, digits)} {_BYTES[unit]}"


def share(value: float | None) -> str:
    """93 %."""
    return NONE if value is None else f"{_exact(_rounded(value * 1000.0) / 10.0)} %"


def duration(seconds: float | None) -> str:
    """340 ms, 12 s, 4 min, 3.1 h, 2.4 days."""
    if seconds is None:
        return NONE
    if seconds < 1.0:
        return f"{_exact(_rounded(seconds * 10_000.0) / 10.0)} ms"
    if seconds < 90.0:
        return f"{_fixed(seconds, 1)} s" if seconds < 10.0 else f"{_rounded(seconds)} s"
    if seconds < 5400.0:
        return f"{_exact(_rounded(seconds / 6.0) / 10.0) if seconds < 600.0 else _rounded(seconds / 60.0)} min"
    return f"{_fixed(seconds / 3600.0, 1)} h" if seconds < 172_800.0 else f"{_fixed(seconds / 86_400.0, 1)} days"


def ago(time: float, now: float) -> str:
    """12 s ago, or "just now"."""
    return "just now" if now - time < 1.0 else f"{duration(now - time)} ago"


def _rounded(value: float) -> int:
    return math.floor(value + 0.5)


def _fixed(value: float, digits: int) -> str:
    """So many digits behind the point, halves away from zero."""
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def _exact(value: float) -> str:
    """Three digits that count, halves away from zero, without zeros behind them."""
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
    expected_inference: int = 0,
    say: Callable[[str], object] = print,
) -> int:
    """Show how a cluster stands, until Ctrl-C: in place on a terminal where rich is installed, as lines elsewhere.

    Args:
        nodes: Where nodes' pages are; "dns:NAME:PORT" is every address of a name.
        node_token: What they ask for.
        every: Seconds between two looks.
        once: Look once, and return.
        actors: How many of the busiest and of the silent are named.
        expected_actors, expected_servers, expected_proxies, expected_inference: How many there should be; 0: nobody
            knows.
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
        expected_inference=expected_inference,
    )
    watch = Aggregator(settings, History(None))
    try:
        asked_once(watch, nodes)
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


def asked_once(watch: Aggregator, nodes: Sequence[str]) -> None:
    """Look for the first time.

    Raises:
        EndpointError: nobody answers.
    """
    watch.look_up()
    first = watch.turn(TIMEOUT)
    if not any(node.state != "down" for node in first.nodes):
        raise _nobody(nodes, first)
    watch.actors()


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
        *_section(TABLES, seen.tables, seen.time),
        *_incomplete(seen),
        *_actors(seen, actors, most),
        *_section(LEARNERS, seen.learners, seen.time),
        *_section(INFERENCE, seen.inference, seen.time),
        *_section(NODES, seen.nodes, seen.time),
    ]


def access(row: NodeRow) -> str:
    """What a peer needs to come in."""
    if row.open:
        return "everybody"
    return NONE if row.keys is None else "keys" if row.keys else "this machine"


class Column(NamedTuple):
    """A column of a table: its title, and what it shows of a row at a time."""

    title: str
    show: Callable[[Any, float], str]


FORMATS: Final[Mapping[str, Callable[[Any], str]]] = {
    "bytes": bytes_of, "s": duration, "share": share, "count": count, "": figure,
}  # fmt: skip
"""How figures are written, by their units."""


def columns(kind: type, names: str, **shown: Callable[[Any], str]) -> list[Column]:
    """Columns of these fields, called and written as their figures say; `shown` has what other fields show of a row."""

    def column(name: str, show: Callable[[Any], str] | None) -> Column:
        title = figures_of(kind)[name].title.lower()
        return Column(title, lambda row, now: written(row, name, now)[1] if show is None else show(row))

    return [column(name, shown.get(name)) for name in names.split()]


def written(row: Any, name: str, now: float = 0.0) -> tuple[str, str]:
    """What a figure of a row is called, and its value as people read it."""
    kind: Any = type(row)
    found, value = figures_of(kind)[name], getattr(row, name)
    if found.unit == "ago":
        return found.title.lower(), ago(value, now)
    return found.title.lower(), value if isinstance(value, str) else FORMATS[found.unit](value)


def _held(name: str) -> Callable[[Any], str]:
    return lambda row: f"{count(getattr(row, name))} {registry.held_in(row.storage)}"


TABLES = [
    Column("table", lambda row, now: row.name),
    Column("storage", lambda row, now: row.storage),
    *columns(
        TableRow,
        "clients held_caches held_bytes full unused_samples samples overwritten_caches",
        held_caches=_held("held_caches"),
        full=lambda row: "no limit" if row.full is None else share(row.full),
        overwritten_caches=_held("overwritten_caches"),
    ),
    Column("", lambda row, now: "; ".join(filter(None, (row.rate.draws_wait, row.rate.inserts_wait)))),
]
ACTORS = [
    Column("actor", lambda row, now: row.name or row.label),
    *columns(
        ActorRow,
        "client host table home steps steps_per_second episodes return_recent accepted_caches skipped_caches",
        client=lambda row: row.client[:12],
    ),
]
LEARNERS = [
    Column(
        "learner",
        lambda row, now: row.name or (row.learner if row.learner.startswith("server:") else row.learner[:8]),
    ),
    *columns(LearnerRow, "where batches samples waiting_share last_seen"),
]
INFERENCE = [
    Column("inference node", lambda row, now: row.name),
    *columns(
        InferenceRow,
        "version clients rows_per_second batch_rows wait p50 p99 busy refused_per_second",
        version=lambda row: count(row.version) + (f" ({row.behind} behind)" if row.behind else ""),
    ),
]
STATES = {"down": "away", "unready": "not ready"}
NODES = [
    Column("node", lambda row, now: row.name or row.url),
    *columns(
        NodeRow,
        "role state uptime cpu memory_bytes requests_per_second descriptors open refused took",
        role=lambda row: row.role or NONE,
        state=lambda row: STATES.get(row.state, row.state),
        open=access,
    ),
    Column("", lambda row, now: "; ".join(row.reasons)),
]


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
    drawn = figures_of(TableRow)["samples"].title.lower(), count(sum(table.samples for table in seen.tables))
    rows = [
        (*written(totals, "steps"), figure(rates.steps)),
        (*written(totals, "episodes"), figure(rates.episodes)),
        (*written(totals, "accepted_caches"), figure(rates.caches)),
        (*drawn, figure(rates.samples)),
        (*written(totals, "generated_bytes"), bytes_of(rates.generated_bytes)),
        (*written(totals, "received_bytes"), bytes_of(rates.received_bytes)),
    ]
    facts = [written(learning, name) for name in ("return_mean", "length_mean")]
    facts += [written(fresh, name) for name in ("age_median", "lag_mean")]
    facts += [written(rates, name) for name in ("waiting_share", "skipped_share")]
    lost = [written(totals, f"{name}_caches") for name in ("rejected", "lost", "skipped")]
    return [
        StyledLine(""),
        *(
            StyledLine(f"{name:<14}{total:>16}{rate + '/s':>14}    {fact:<16}{value:>12}")
            for (name, total, rate), (fact, value) in zip(rows, facts, strict=True)
        ),
        *(StyledLine(f"caches {name}: {number}", "yellow") for name, number in lost if number != "0"),
    ]


def _incomplete(seen: Overview) -> list[StyledLine]:
    """Figures of tables are of the servers that answer: of half of a cluster they would look like all of it."""
    away = [node.name or node.url for node in seen.nodes if node.role == "server" and node.state == "down"]
    if not away:
        return []
    verb, holder = ("does", "it holds") if len(away) == 1 else ("do", "they hold")
    text = f"incomplete: {', '.join(away)} {verb} not answer: what {holder} is in no figure of the tables"
    return [StyledLine(escape(text), "yellow")]


def _actors(seen: Overview, actors: Sequence[ActorRow], most: int) -> list[StyledLine]:
    counts = seen.actors
    said = [f"{counts.active} active", f"{counts.silent} silent", f"{counts.lost} lost", f"{counts.gone} gone"]
    said += [f"{counts.missing} of {counts.expected} missing"] if counts.expected else []
    busiest = sorted((row for row in actors if row.state == "active"), key=lambda row: -row.steps_per_second)
    silent = sorted((row for row in actors if row.state == "silent"), key=lambda row: -row.last_seen)
    found = _section(ACTORS, busiest[:most], seen.time, f"actors: {', '.join(said)}")
    for row in silent[:most]:
        who = f"{escape(row.name) or row.label} host {escape(row.host) or NONE} server {escape(row.home) or NONE}"
        found.append(StyledLine(f"silent: {who}, last seen {ago(row.last_seen, seen.time)}", "yellow"))
    if len(silent) > most:
        found.append(StyledLine(f"and {len(silent) - most} more are silent", "yellow"))
    return found if busiest else [StyledLine(""), StyledLine(f"actors: {', '.join(said)}", "bold"), *found]


def _cells(columns: Sequence[Column], row: Any, now: float) -> list[str]:
    """What a row shows. A node that is away has no figures: what it said last is of before."""
    if isinstance(row, NodeRow) and row.state == "down":
        said = row.name or row.url, row.role or NONE, STATES["down"]
        why = f"since {ago(row.since, now)}: {'; '.join(row.reasons)}"
        return [*said, *[NONE] * 5, access(row), NONE, NONE, why]
    return [column.show(row, now) for column in columns]


def _section(columns: Sequence[Column], rows: Iterable[Any], now: float, title: str = "") -> list[StyledLine]:
    """A title and aligned columns below it: numbers to the right. Nothing where there are no rows."""
    told, heads = [_cells(columns, row, now) for row in rows], [column.title for column in columns]
    shown = [[escape(cell) or NONE for cell in row[:-1]] + [escape(row[-1])] for row in told]
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
