"""Commands that look at a cluster and change nothing: dashboard, top, logs, doctor, totals."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from memoire import extension
from memoire.dashboard.settings import Settings
from memoire.errors import NotInstalled, ParameterError

from .addresses import endpoint_of, pages_of
from .options import Commands, add_keys, add_nodes, add_probes, add_settings, said_of, tokens

if TYPE_CHECKING:
    from memoire.accounting.merge import ClusterTotals

EXPECTED = ("expected_actors", "expected_servers", "expected_proxies", "expected_inference")
"""Settings of a dashboard that a terminal has, too."""
INCOMPLETE = 3
"""Exit status when a server did not answer."""


def add_dashboard(commands: Commands) -> None:
    """`memoire dashboard`."""
    board = commands.add_parser(
        "dashboard",
        help="the whole cluster in a browser",
        description="Ask all nodes how they stand, once a second, and show it: totals, rates, actors, curves, log "
        "lines. It only reads, and never has to run: a cluster works the same without it.",
    )
    shown = board.add_mutually_exclusive_group(required=True)
    shown.add_argument(
        "nodes",
        nargs="*",
        default=[],
        metavar="NODE",
        help="where a node's pages are (its --http), such as http://server-0:8080; dns:NAME:PORT is every address of a "
        "name, such as a headless service; a tcp:// address, or a proxy alone, is asked for the pages of the servers "
        "behind it",
    )
    shown.add_argument("--open", metavar="FILE", help="show this exported run in place of a cluster")
    board.add_argument(
        "--token-file",
        metavar="FILE",
        help="a file with the token that people have to know, read again when it changes",
    )
    board.add_argument(
        "--node-token-file", metavar="FILE", help="a file with the token that the nodes ask for; the same"
    )
    add_keys(board)
    add_probes(board, "--listen")
    board.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name for it; may be repeated",
    )
    add_settings(board, Settings)
    board.set_defaults(command=_dashboard)


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


def add_top(commands: Commands) -> None:
    """`memoire top`."""
    top = commands.add_parser(
        "top",
        help="the whole cluster on a terminal",
        description="Show totals with their rates, what holds the run up, tables, actors, learners and nodes, again "
        "and again until Ctrl-C: in place on a terminal where rich is installed, as plain lines elsewhere. Exit "
        "status: 0 every node answered; 1 nobody did; 3 with --once, some did not; 130 Ctrl-C.",
    )
    add_nodes(top)
    add_keys(top)
    top.add_argument("--once", action="store_true", help="look once, print lines, and end")
    top.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="(default: %(default)s)")
    top.add_argument("--actors", type=int, default=5, metavar="N", help="actors that are named (default: %(default)s)")
    add_settings(top, Settings, *EXPECTED)
    top.set_defaults(command=_top)


def add_report(commands: Commands) -> None:
    """`memoire report`."""
    report = commands.add_parser(
        "report",
        help="the cluster's figures to TensorBoard or Trackio",
        description="Give the figures of the whole cluster, those of the dashboard's curves, to another tool, until "
        "the run is finished or Ctrl-C. A run that begins meanwhile is a run of its own there. Other tools: "
        "memoire.loggers. Exit status: 0 every node answered; 1 nobody did; 3 some did not; 130 Ctrl-C.",
    )
    add_nodes(report)
    add_keys(report)
    report.add_argument("--to", required=True, choices=("tensorboard", "trackio"), help="who gets them")
    report.add_argument("--folder", default="runs", metavar="FOLDER", help="TensorBoard: where (default: %(default)s)")
    report.add_argument("--project", default="memoire", metavar="NAME", help="of Trackio (default: %(default)s)")
    report.add_argument("--every", type=float, default=10.0, metavar="SECONDS", help="(default: %(default)s)")
    report.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only figures like this, such as 'sample_*'",
    )
    report.add_argument("--once", action="store_true", help="look once, report, and end")
    report.set_defaults(command=_report)


def _report(given: argparse.Namespace) -> int:
    from pathlib import Path

    from memoire.dashboard.terminal.log_tail import folder_name, report
    from memoire.loggers import Logger, TensorBoard, Trackio

    def open_logger(run: str) -> Logger:
        if given.to == "tensorboard":
            return TensorBoard(Path(given.folder) / folder_name(run))
        return Trackio(given.project, run)

    return report(
        pages_of(given.nodes, given.keys),
        open_logger,
        node_token=tokens(given.token_file),
        every=given.every,
        only=given.only,
        once=given.once,
    )


def add_logs(commands: Commands) -> None:
    """`memoire logs`."""
    logs = commands.add_parser(
        "logs",
        help="the log lines of all servers",
        description="Print the lines that actors have logged, of all servers together, the oldest first: "
        "TIME,LABEL,TEXT, one line each, with control characters escaped. Exit status: 0 every node answered; 1 no "
        "server did; 3 some node did not, and its lines may be missing; 130 Ctrl-C.",
    )
    add_nodes(logs)
    add_keys(logs)
    logs.add_argument("--text", default="", help="lines with this in them; A to Z in either case")
    logs.add_argument("--client", metavar="ID", help="lines of this actor, by its id in hex")
    logs.add_argument("--label", metavar="HEX", help="lines with this label, as it stands in them")
    moment = "2026-01-31T12:00:00 (UTC), or 10m (ago; s, m, h, d)"
    logs.add_argument("--since", metavar="TIME", help=f"lines of this time and later: {moment}")
    logs.add_argument("--until", metavar="TIME", help="lines before this time")
    logs.add_argument("--run", metavar="NAME", help="of this experiment (default: the one that is counted now)")
    logs.add_argument("--last", type=int, metavar="N", help="only the newest N (default: all; with --follow 10)")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with lines that come later, until Ctrl-C")
    logs.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks (%(default)s)")
    logs.add_argument("--timeout", type=float, default=5.0, help="seconds for each node (default: %(default)s)")
    logs.set_defaults(command=_logs)


def _top(given: argparse.Namespace) -> int:
    from memoire.dashboard.terminal.top import top

    return top(
        pages_of(given.nodes, given.keys),
        node_token=tokens(given.token_file),
        every=given.every,
        once=given.once,
        actors=given.actors,
        expected_actors=given.expected_actors,
        expected_servers=given.expected_servers,
        expected_proxies=given.expected_proxies,
        expected_inference=given.expected_inference,
    )


def _logs(given: argparse.Namespace) -> int:
    from memoire.dashboard.terminal.log_tail import tail, wanted_lines

    if given.last is not None and given.last < 1:
        raise ParameterError("--last", given.last, "a number of lines above 0")
    if given.follow and given.until is not None:
        raise ParameterError("--until", given.until, "left out with --follow, which has no end")
    names = ("text", "client", "label", "since", "until", "run")
    return tail(
        pages_of(given.nodes, given.keys),
        wanted_lines(**{name: getattr(given, name) for name in names}),
        token=tokens(given.token_file),
        follow=given.follow,
        last=given.last,
        every=given.every,
        timeout=given.timeout,
    )


def add_doctor(commands: Commands) -> None:
    """`memoire doctor`."""
    doctor = commands.add_parser(
        "doctor",
        help="find out why an address does not answer",
        description="Make a round trip to a server, proxy or relay, one step after the other, and say what to do about "
        "the first one that fails. Exit status: 0 all is well; 1 the address is none; 3 the name does not resolve; "
        "4 nothing listens; 5 what listens is not memoire's request address; 6 it speaks another version of the "
        "protocol; 7 it does not answer; 8 it answers but gives no schema; 9 it refuses; 10 a cache did not come back "
        "(--roundtrip).",
    )
    doctor.add_argument(
        "endpoint", metavar="ENDPOINT", help="such as tcp://proxy:5560 or ipc:///run/memoire/relay, or its page"
    )
    doctor.add_argument(
        "--roundtrip",
        action="store_true",
        help="push a small cache, too, into a table that no learner reads, and draw it back: no total has it",
    )
    doctor.add_argument(
        "--inference", action="store_true", help="the address is an inference node's: ask it for one row of zeros"
    )
    doctor.add_argument("--timeout", type=float, default=5.0, help="seconds for each step (default: %(default)s)")
    add_keys(doctor)
    doctor.set_defaults(command=_doctor)


def add_totals(commands: Commands) -> None:
    """`memoire totals`."""
    totals = commands.add_parser(
        "totals",
        help="what a cluster has counted",
        description="Print what all servers behind an address have counted for a run, each client once, wherever it "
        "was at home. Exit status: 0 every server answered; 1 nobody did; 3 some did not, and what they alone have "
        "counted is missing.",
    )
    totals.add_argument("--run", help="name of the experiment (default: the one that is counted now)")
    _add_asking(totals)
    totals.set_defaults(command=_totals)


def add_prompts(commands: Commands) -> None:
    """`memoire prompts`."""
    prompts = commands.add_parser(
        "prompts",
        help="how the prompts of a table stand",
        description="Print how many prompts of a table are in each state, added up over all servers behind an address, "
        "with leases, late answers and groups that were too old. Exit status: 0 every server answered; 1 one did not.",
    )
    prompts.add_argument("--table", help="name of the table (default: the first one)")
    _add_asking(prompts)
    prompts.set_defaults(command=_prompts)


def _add_asking(command: argparse.ArgumentParser) -> None:
    """What commands take that ask every server of a cluster."""
    command.add_argument(
        "endpoints", nargs="+", metavar="ENDPOINT", help="address of a proxy or its page, or of all servers"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument("--timeout", type=float, default=10.0, help="seconds to wait (default: %(default)s)")
    add_keys(command)


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


def _doctor(given: argparse.Namespace) -> int:
    from .doctor import examine, examine_inference

    endpoint = endpoint_of(given.endpoint)
    if given.inference:
        return examine_inference(endpoint, timeout=given.timeout, keys=given.keys)
    return examine(endpoint, timeout=given.timeout, roundtrip=given.roundtrip, keys=given.keys)


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
