"""Commands that show a cluster and change nothing: dashboard, top, logs, report, doctor, totals, prompts."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from memoire import extension
from memoire.arguments import NUMBER, SECONDS, Setting
from memoire.dashboard.settings import Settings
from memoire.errors import NotInstalled, ParameterError

from .options import (
    CommandOptions,
    Commands,
    NodePageOptions,
    add_keys,
    add_settings,
    all_of,
    changed_settings,
    endpoint_of,
    pages_of,
    tokens,
)

if TYPE_CHECKING:
    from memoire.accounting.merge import ClusterTotals

EXPECTED = ("expected_actors", "expected_servers", "expected_proxies", "expected_inference")
"""Settings of the dashboard that `memoire top` has, too."""
INCOMPLETE = 3
"""Exit status if a server did not answer."""


class DashboardCommand(CommandOptions):
    """Poll the status of all nodes once a second and show it in a browser: totals, rates, actors, curves, log lines.
    The dashboard only reads: a cluster works the same without it.
    """

    nodes: Annotated[tuple[str, ...], Setting(place=True, several="*", show="NODE", group="shown", needed=True)] = ()
    """Address of a node's pages (its --http), such as http://server-0:8080; dns:NAME:PORT stands for every address of a
    name, such as a headless service; a tcp:// address, or a single proxy, is asked for the pages of the servers behind
    it."""
    open: Annotated[str | None, Setting(show="FILE", group="shown", needed=True)] = None
    """Show this exported run instead of a cluster."""
    token_file: Annotated[str | None, Setting(show="FILE")] = None
    """A file with the token that users need, read again when it changes."""
    node_token_file: Annotated[str | None, Setting(show="FILE")] = None
    """A file with the token that the nodes ask for, read again when it changes."""
    probes: Annotated[str | None, Setting(show="HOST:PORT")] = None
    """Address that answers only /livez, /readyz and /metrics, without a token (default: that of --listen)."""
    allow_host: Annotated[tuple[str, ...], Setting(several="append", show="NAME")] = ()
    """A host name under which browsers reach the dashboard; may be repeated."""


def add_dashboard(commands: Commands) -> None:
    """Add the command `memoire dashboard`."""
    commands.add("dashboard", "show the whole cluster in a browser", _dashboard, DashboardCommand, add_keys, Settings)


@NotInstalled.explained("pip install 'memoire-rl[dashboard]'")
def _dashboard(args: argparse.Namespace) -> int:
    from memoire.dashboard.web.serve import serve

    return serve(
        Settings(
            nodes=tuple(pages_of(args.nodes, args.keys)),
            probes=args.probes,
            token=tokens(args.token_file),
            node_token=tokens(args.node_token_file),
            hosts=tuple(args.allow_host),
            open=args.open,
            **changed_settings(args, Settings),
        )
    )


class Top(CommandOptions):
    """Show totals with their rates, the bottleneck of the run, tables, actors, learners and nodes, repeatedly until
    Ctrl-C: in place on a terminal if rich is installed, otherwise as plain lines. Exit status: 0 every node answered;
    1 no node did; 3 with --once, some did not; 130 Ctrl-C.
    """

    once: Annotated[bool, Setting()] = False
    """Poll once, print lines, and exit."""
    every: Annotated[float, SECONDS] = 2.0
    """Time between two polls of the nodes."""
    actors: Annotated[int, NUMBER] = 5
    """Number of actors to list."""


def add_top(commands: Commands) -> None:
    """Add the command `memoire top`."""
    top = commands.add("top", "show the whole cluster on a terminal", _top, Top, NodePageOptions, add_keys)
    add_settings(top, Settings, *EXPECTED)


def _top(args: argparse.Namespace) -> int:
    from memoire.dashboard.terminal.top import top

    expected = {name: getattr(args, name) for name in EXPECTED}
    pages, token = pages_of(args.nodes, args.keys), tokens(args.token_file)
    return top(pages, node_token=token, **all_of(args, Top), **expected)


class Report(CommandOptions):
    """Send the figures of the whole cluster, those of the dashboard's curves, to another tool, until the run is
    finished or Ctrl-C. If the cluster begins another run, the tool gets another run, too. See memoire.loggers for other
    tools. Exit status: 0 every node answered; 1 no node did; 3 some did not; 130 Ctrl-C.
    """

    to: Annotated[str, Setting(choices=("tensorboard", "trackio"), needed=True)]
    """The tool that receives the figures."""
    folder: Annotated[str, Setting(show="FOLDER")] = "runs"
    """Folder in which TensorBoard's files are written."""
    project: Annotated[str, Setting(show="NAME")] = "memoire"
    """Name of the project in Trackio."""
    every: Annotated[float, SECONDS] = 10.0
    """Time between two polls of the nodes."""
    only: Annotated[tuple[str, ...], Setting(several="append", show="PATTERN")] = ()
    """Send only figures whose names match, such as 'sample_*'; may be repeated."""
    once: Annotated[bool, Setting()] = False
    """Poll once, report, and exit."""


def add_report(commands: Commands) -> None:
    """Add the command `memoire report`."""
    commands.add("report", "send figures to TensorBoard or Trackio", _report, Report, NodePageOptions, add_keys)


def _report(args: argparse.Namespace) -> int:
    from pathlib import Path

    from memoire.dashboard.terminal.log_tail import folder_name, report
    from memoire.loggers import Logger, TensorBoard, Trackio

    def open_logger(run: str) -> Logger:
        if args.to == "tensorboard":
            return TensorBoard(Path(args.folder) / folder_name(run))
        return Trackio(args.project, run)

    pages, token = pages_of(args.nodes, args.keys), tokens(args.token_file)
    return report(pages, open_logger, node_token=token, every=args.every, only=args.only, once=args.once)


class LineOptions(CommandOptions):
    """Filter of the lines that `memoire logs` prints."""

    text: Annotated[str, Setting()] = ""
    """Print lines that contain this text; A to Z match in either case."""
    client: Annotated[str | None, Setting(show="ID")] = None
    """Print lines of this actor, given by its id in hex."""
    label: Annotated[str | None, Setting(show="HEX")] = None
    """Print lines with this label, as the lines show it."""
    since: Annotated[str | None, Setting(show="TIME")] = None
    """Print lines of this time and later: 2026-01-31T12:00:00 (UTC), or 10m (ago; s, m, h, d)."""
    until: Annotated[str | None, Setting(show="TIME")] = None
    """Print lines before this time."""
    run: Annotated[str | None, Setting(show="NAME")] = None
    """Print lines of this run (default: the current run)."""


class Logs(CommandOptions):
    """Print the lines that actors have logged at all servers, the oldest first, as TIME,LABEL,TEXT with control
    characters escaped. Exit status: 0 every node answered; 1 no server did; 3 some node did not, and its lines may be
    missing; 130 Ctrl-C.
    """

    last: Annotated[int | None, NUMBER] = None
    """Print only the newest N lines (default: all; with --follow 10)."""
    follow: Annotated[bool, Setting(short="-f")] = False
    """Continue with new lines until Ctrl-C."""
    every: Annotated[float, SECONDS] = 1.0
    """Time between two polls of the nodes."""
    timeout: Annotated[float, Setting()] = 5.0
    """Seconds to wait for each node's answer."""


def add_logs(commands: Commands) -> None:
    """Add the command `memoire logs`."""
    commands.add("logs", "print the log lines of all servers", _logs, Logs, NodePageOptions, add_keys, LineOptions)


def _logs(args: argparse.Namespace) -> int:
    from memoire.dashboard.terminal.log_tail import tail, wanted_lines

    if args.last is not None and args.last < 1:
        raise ParameterError("--last", args.last, "a number of lines above 0")
    if args.follow and args.until is not None:
        raise ParameterError.with_text("--until cannot be combined with --follow.")
    pages, is_wanted = pages_of(args.nodes, args.keys), wanted_lines(**all_of(args, LineOptions))
    return tail(pages, is_wanted, token=tokens(args.token_file), **all_of(args, Logs))


class Doctor(CommandOptions):
    """Connect to a server, proxy or relay step by step, and explain the first step that fails. Exit status: 0 all is
    well; 1 the address is not valid; 3 the name does not resolve; 4 no process listens; 5 the process that listens is
    not memoire's, or this is not its request address; 6 it speaks another version of the protocol; 7 it does not
    answer; 8 it answers without a usable schema; 9 it denies access; 10 a cache did not come back (--roundtrip).
    """

    endpoint: Annotated[str, Setting(place=True)]
    """Address such as tcp://proxy:5560 or ipc:///run/memoire/relay, or that of the node's page."""
    roundtrip: Annotated[bool, Setting()] = False
    """Also push a small cache into a table that no learner reads, and draw it back; totals do not count it."""
    inference: Annotated[bool, Setting()] = False
    """The address is that of an inference node: ask the node to answer one row of zeros."""
    timeout: Annotated[float, Setting()] = 5.0
    """Seconds to wait in each step."""


def add_doctor(commands: Commands) -> None:
    """Add the command `memoire doctor`."""
    commands.add("doctor", "find out why an address does not answer", _doctor, Doctor, add_keys)


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import examine

    options = all_of(args, Doctor) | {"endpoint": endpoint_of(args.endpoint)}
    return examine(**options, keys=args.keys)


class ClusterQuery(CommandOptions):
    """Options of commands that ask every server of a cluster."""

    endpoints: Annotated[tuple[str, ...], Setting(place=True, several="+", show="ENDPOINT")]
    """Address of a proxy or of its page, or addresses of all servers."""
    json: Annotated[bool, Setting()] = False
    """Print one JSON object instead of text."""
    timeout: Annotated[float, Setting()] = 10.0
    """Seconds to wait for answers."""


class TotalsCommand(ClusterQuery):
    """Print a run's totals over all servers behind an address; each client counts once, whichever servers it used.
    Exit status: 0 every server answered; 1 no server did; 3 some did not, and counts that only they have are missing.
    """

    run: Annotated[str | None, Setting()] = None
    """Name of the experiment (default: the current run)."""


def add_totals(commands: Commands) -> None:
    """Add the command `memoire totals`."""
    commands.add("totals", "print the totals of a cluster", _totals, TotalsCommand, add_keys)


def _totals(args: argparse.Namespace) -> int:
    from memoire.reader.reader import Reader

    endpoints = [endpoint_of(each) for each in args.endpoints]
    with Reader(endpoints, timeout=args.timeout, keys=args.keys) as reader:
        totals = reader.totals(args.run, args.timeout)
    print(json.dumps(asdict(totals)) if args.json else "\n".join(lines_of_totals(totals)))
    return INCOMPLETE if totals.missing else 0


def lines_of_totals(totals: ClusterTotals) -> list[str]:
    """Return the totals as lines of text."""
    state = "finished" if totals.finished else "not finished"
    medium = "on disk" if totals.durable else "in memory"
    lines = [f"run {totals.run!r} ({state}), {medium} at {', '.join(totals.servers)}"]
    lines += [f"  {name.replace('_', ' '):<18}{value:>16,}" for name, value in asdict(totals.totals).items()]
    if len(totals.runs) > 1:
        lines.append(f"other runs: {', '.join(name for name in totals.runs if name != totals.run)}")
    for name in totals.missing:
        lines.append(f"{name} did not answer: counts that only {name} has are missing above")
    return lines


class PromptStates(ClusterQuery):
    """Print the number of a table's prompts in each state, the sum over all servers behind an address, with leases,
    late answers and stale groups. Exit status: 0 every server answered; 1 a server did not.
    """

    table: Annotated[str | None, Setting()] = None
    """Name of the table (default: the first one)."""


def add_prompts(commands: Commands) -> None:
    """Add the command `memoire prompts`."""
    commands.add("prompts", "count the prompts of a table in each state", _prompts, PromptStates, add_keys)


def _prompts(args: argparse.Namespace) -> int:
    calls = extension("memoire.prompts.calls")

    endpoints = [endpoint_of(each) for each in args.endpoints]
    with calls.Prompts(endpoints, args.table, timeout=args.timeout, keys=args.keys) as prompts:
        figures, name, servers = prompts.figures(), prompts.table, prompts.servers
    if args.json:
        print(json.dumps({"table": name, "servers": servers, **figures}))
        return 0
    states = (*calls.STATES, "forgotten")
    print(f"table {name!r} at {', '.join(servers)}: {figures['given']:,} prompts")
    for each in states:
        print(f"  {each:<18}{figures[each]:>16,}")
    print("of these, and since the servers started")
    for each in (each for each in figures if each not in states):
        print(f"  {each.replace('_', ' '):<18}{figures[each]:>16,}")
    return 0
