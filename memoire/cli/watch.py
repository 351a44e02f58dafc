"""Commands that look at a cluster and change nothing: dashboard, top, logs, report, doctor, totals, prompts."""

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
    Commands,
    Options,
    ReadPages,
    add_keys,
    add_settings,
    all_of,
    endpoint_of,
    pages_of,
    said_of,
    tokens,
)

if TYPE_CHECKING:
    from memoire.accounting.merge import ClusterTotals

EXPECTED = ("expected_actors", "expected_servers", "expected_proxies", "expected_inference")
"""Settings of a dashboard that a terminal has, too."""
INCOMPLETE = 3
"""Exit status when a server did not answer."""


class Dashboard(Options):
    """Ask all nodes how they stand, once a second, and show it: totals, rates, actors, curves, log lines. It only
    reads, and never has to run: a cluster works the same without it.
    """

    nodes: Annotated[tuple[str, ...], Setting(place=True, several="*", show="NODE", group="shown", needed=True)] = ()
    """Where a node's pages are (its --http), such as http://server-0:8080; dns:NAME:PORT is every address of a name,
    such as a headless service; a tcp:// address, or a proxy alone, is asked for the pages of the servers behind it."""
    open: Annotated[str | None, Setting(show="FILE", group="shown", needed=True)] = None
    """Show this exported run in place of a cluster."""
    token_file: Annotated[str | None, Setting(show="FILE")] = None
    """A file with the token that people have to know, read again when it changes."""
    node_token_file: Annotated[str | None, Setting(show="FILE")] = None
    """A file with the token that the nodes ask for; the same."""
    probes: Annotated[str | None, Setting(show="HOST:PORT")] = None
    """Where /livez, /readyz and /metrics are answered to everybody, and nothing else (default: at --listen)."""
    allow_host: Annotated[tuple[str, ...], Setting(several="append", show="NAME")] = ()
    """A name for it; may be repeated."""


def add_dashboard(commands: Commands) -> None:
    """`memoire dashboard`."""
    commands.add("dashboard", "the whole cluster in a browser", _dashboard, Dashboard, add_keys, Settings)


@NotInstalled.explained("pip install 'memoire-rl[dashboard]'")
def _dashboard(given: argparse.Namespace) -> int:
    from memoire.dashboard.web.serve import serve

    return serve(
        Settings(
            nodes=tuple(pages_of(given.nodes, given.keys)),
            probes=given.probes,
            token=tokens(given.token_file),
            node_token=tokens(given.node_token_file),
            hosts=tuple(given.allow_host),
            open=given.open,
            **said_of(given, Settings),
        )
    )


class Top(Options):
    """Show totals with their rates, what holds the run up, tables, actors, learners and nodes, again and again until
    Ctrl-C: in place on a terminal where rich is installed, as plain lines elsewhere. Exit status: 0 every node
    answered; 1 nobody did; 3 with --once, some did not; 130 Ctrl-C.
    """

    once: Annotated[bool, Setting()] = False
    """Look once, print lines, and end."""
    every: Annotated[float, SECONDS] = 2.0
    """Between two looks."""
    actors: Annotated[int, NUMBER] = 5
    """Actors that are named."""


def add_top(commands: Commands) -> None:
    """`memoire top`."""
    top = commands.add("top", "the whole cluster on a terminal", _top, Top, ReadPages, add_keys)
    add_settings(top, Settings, *EXPECTED)


def _top(given: argparse.Namespace) -> int:
    from memoire.dashboard.terminal.top import top

    expected = {name: getattr(given, name) for name in EXPECTED}
    pages, token = pages_of(given.nodes, given.keys), tokens(given.token_file)
    return top(pages, node_token=token, **all_of(given, Top), **expected)


class Report(Options):
    """Give the figures of the whole cluster, those of the dashboard's curves, to another tool, until the run is
    finished or Ctrl-C. A run that begins meanwhile is a run of its own there. Other tools: memoire.loggers. Exit
    status: 0 every node answered; 1 nobody did; 3 some did not; 130 Ctrl-C.
    """

    to: Annotated[str, Setting(choices=("tensorboard", "trackio"), needed=True)]
    """The tool that gets them."""
    folder: Annotated[str, Setting(show="FOLDER")] = "runs"
    """With TensorBoard: where."""
    project: Annotated[str, Setting(show="NAME")] = "memoire"
    """Of Trackio."""
    every: Annotated[float, SECONDS] = 10.0
    """Between two looks."""
    only: Annotated[tuple[str, ...], Setting(several="append", show="PATTERN")] = ()
    """Only figures like this, such as 'sample_*'."""
    once: Annotated[bool, Setting()] = False
    """Look once, report, and end."""


def add_report(commands: Commands) -> None:
    """`memoire report`."""
    commands.add("report", "the cluster's figures to TensorBoard or Trackio", _report, Report, ReadPages, add_keys)


def _report(given: argparse.Namespace) -> int:
    from pathlib import Path

    from memoire.dashboard.terminal.log_tail import folder_name, report
    from memoire.loggers import Logger, TensorBoard, Trackio

    def open_logger(run: str) -> Logger:
        if given.to == "tensorboard":
            return TensorBoard(Path(given.folder) / folder_name(run))
        return Trackio(given.project, run)

    pages, token = pages_of(given.nodes, given.keys), tokens(given.token_file)
    return report(pages, open_logger, node_token=token, every=given.every, only=given.only, once=given.once)


class LineFilter(Options):
    """Which lines `memoire logs` prints."""

    text: Annotated[str, Setting()] = ""
    """Lines with this in them; A to Z in either case."""
    client: Annotated[str | None, Setting(show="ID")] = None
    """Lines of this actor, by its id in hex."""
    label: Annotated[str | None, Setting(show="HEX")] = None
    """Lines with this label, as it stands in them."""
    since: Annotated[str | None, Setting(show="TIME")] = None
    """Lines of this time and later: 2026-01-31T12:00:00 (UTC), or 10m (ago; s, m, h, d)."""
    until: Annotated[str | None, Setting(show="TIME")] = None
    """Lines before this time."""
    run: Annotated[str | None, Setting(show="NAME")] = None
    """Of this experiment (default: the one that is counted now)."""


class Logs(Options):
    """Print the lines that actors have logged, of all servers together, the oldest first: TIME,LABEL,TEXT, one line
    each, with control characters escaped. Exit status: 0 every node answered; 1 no server did; 3 some node did not,
    and its lines may be missing; 130 Ctrl-C.
    """

    last: Annotated[int | None, NUMBER] = None
    """Only the newest N (default: all; with --follow 10)."""
    follow: Annotated[bool, Setting(short="-f")] = False
    """Go on with lines that come later, until Ctrl-C."""
    every: Annotated[float, SECONDS] = 1.0
    """Between two looks."""
    timeout: Annotated[float, Setting()] = 5.0
    """Seconds for each node."""


def add_logs(commands: Commands) -> None:
    """`memoire logs`."""
    commands.add("logs", "the log lines of all servers", _logs, Logs, ReadPages, add_keys, LineFilter)


def _logs(given: argparse.Namespace) -> int:
    from memoire.dashboard.terminal.log_tail import tail, wanted_lines

    if given.last is not None and given.last < 1:
        raise ParameterError("--last", given.last, "a number of lines above 0")
    if given.follow and given.until is not None:
        raise ParameterError("--until", given.until, "left out with --follow, which has no end")
    pages, wanted = pages_of(given.nodes, given.keys), wanted_lines(**all_of(given, LineFilter))
    return tail(pages, wanted, token=tokens(given.token_file), **all_of(given, Logs))


class Doctor(Options):
    """Make a round trip to a server, proxy or relay, one step after the other, and say what to do about the first
    one that fails. Exit status: 0 all is well; 1 the address is none; 3 the name does not resolve; 4 nothing
    listens; 5 what listens is not memoire's request address; 6 it speaks another version of the protocol; 7 it does
    not answer; 8 it answers but gives no schema; 9 it refuses; 10 a cache did not come back (--roundtrip).
    """

    endpoint: Annotated[str, Setting(place=True)]
    """Such as tcp://proxy:5560 or ipc:///run/memoire/relay, or its page."""
    roundtrip: Annotated[bool, Setting()] = False
    """Push a small cache, too, into a table that no learner reads, and draw it back: no total has it."""
    inference: Annotated[bool, Setting()] = False
    """The address is an inference node's: ask it for one row of zeros."""
    timeout: Annotated[float, Setting()] = 5.0
    """Seconds for each step."""


def add_doctor(commands: Commands) -> None:
    """`memoire doctor`."""
    commands.add("doctor", "find out why an address does not answer", _doctor, Doctor, add_keys)


def _doctor(given: argparse.Namespace) -> int:
    from .doctor import examine

    said = all_of(given, Doctor) | {"endpoint": endpoint_of(given.endpoint)}
    return examine(**said, keys=given.keys)


class Asking(Options):
    """What commands take that ask every server of a cluster."""

    endpoints: Annotated[tuple[str, ...], Setting(place=True, several="+", show="ENDPOINT")]
    """Address of a proxy or its page, or of all servers."""
    json: Annotated[bool, Setting()] = False
    """Print one JSON object."""
    timeout: Annotated[float, Setting()] = 10.0
    """Seconds to wait."""


class Totals(Asking):
    """Print what all servers behind an address have counted for a run, each client once, wherever it was at home.
    Exit status: 0 every server answered; 1 nobody did; 3 some did not, and what they alone have counted is missing.
    """

    run: Annotated[str | None, Setting()] = None
    """Name of the experiment (default: the one that is counted now)."""


def add_totals(commands: Commands) -> None:
    """`memoire totals`."""
    commands.add("totals", "what a cluster has counted", _totals, Totals, add_keys)


def _totals(given: argparse.Namespace) -> int:
    """Print the merged totals of all servers."""
    from memoire.reader.reader import Reader

    endpoints = [endpoint_of(each) for each in given.endpoints]
    with Reader(endpoints, timeout=given.timeout, keys=given.keys) as reader:
        totals = reader.totals(given.run, given.timeout)
    print(json.dumps(asdict(totals)) if given.json else "\n".join(lines_of_totals(totals)))
    return INCOMPLETE if totals.missing else 0


def lines_of_totals(totals: ClusterTotals) -> list[str]:
    """The totals as text."""
    state = "finished" if totals.finished else "not finished"
    where = "on disk" if totals.durable else "in memory"
    shown = [f"run {totals.run!r} ({state}), {where} at {', '.join(totals.servers)}"]
    shown += [f"  {name.replace('_', ' '):<18}{value:>16,}" for name, value in asdict(totals.totals).items()]
    if len(totals.runs) > 1:
        shown.append(f"other runs: {', '.join(name for name in totals.runs if name != totals.run)}")
    for name in totals.missing:
        shown.append(f"{name} did not answer: what it alone has counted is missing above")
    return shown


class PromptStates(Asking):
    """Print how many prompts of a table are in each state, added up over all servers behind an address, with leases,
    late answers and groups that were too old. Exit status: 0 every server answered; 1 one did not.
    """

    table: Annotated[str | None, Setting()] = None
    """Name of the table (default: the first one)."""


def add_prompts(commands: Commands) -> None:
    """`memoire prompts`."""
    commands.add("prompts", "how the prompts of a table stand", _prompts, PromptStates, add_keys)


def _prompts(given: argparse.Namespace) -> int:
    """Print the states of all prompts of a table, added up over its servers."""
    calls = extension("memoire.prompts.calls")

    endpoints = [endpoint_of(each) for each in given.endpoints]
    with calls.Prompts(endpoints, given.table, timeout=given.timeout, keys=given.keys) as prompts:
        figures, name, servers = prompts.figures(), prompts.table, prompts.servers
    if given.json:
        print(json.dumps({"table": name, "servers": servers, **figures}))
        return 0
    states = (*calls.STATES, "forgotten")
    print(f"table {name!r} at {', '.join(servers)}: {figures['given']:,} prompts")
    for each in states:
        print(f"  {each:<18}{figures[each]:>16,}")
    print("of these, and since the servers began")
    for each in (each for each in figures if each not in states):
        print(f"  {each.replace('_', ' '):<18}{figures[each]:>16,}")
    return 0
