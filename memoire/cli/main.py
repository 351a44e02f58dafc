"""The command `memoire`: reads the command line, imports what it asks for, and explains what goes wrong.

Only argparse is needed to get here, and each command imports its own, so that `memoire doctor` works in an image that
has nothing but the client's three requirements.

Exit status: 0 it worked; 1 it did not (the demo did not reach its goal, the doctor found something wrong, an error
that is explained); 2 the command line is wrong; 128 + n it was ended by signal n before it was done.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence

import memoire
from memoire.errors import MemoireError

from . import in_cluster_arguments

if TYPE_CHECKING:
    from memoire.pool.tables import Table
    from memoire.security.tokens import Tokens

HERE = "tcp://127.0.0.1:5560"
ELSEWHERE = '; for other machines "tcp://*:5560", which takes --keys or --insecure'
ROLES = ("actor", "server", "learner", "reader", "proxy")
"""What a key may be for, as `memoire.security.permissions` knows them; a test compares."""
Command = Callable[[argparse.Namespace], int]
EXTRAS = {
    "gymnasium": "demo",
    "rich": "demo",
    "lz4": "lz4",
    "fastapi": "dashboard",
    "uvicorn": "dashboard",
    "prometheus_client": "server",
}
"""What installs a module that may be missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. `arguments` are the words after "memoire"; None takes the process' own."""
    from memoire.nodes import settings, supervision

    top, commands = parsers()
    try:
        words = sys.argv[1:] if arguments is None else arguments
        given = settings.parse(top, commands, words, {} if supervision.LINE in os.environ else os.environ)
        command: Command = given.command
        return command(given)
    except MemoireError as error:
        print(f"memoire: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"memoire: this needs {error.name}: pip install 'memoire-rl[{extra}]'", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 1


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    return parsers()[0]


def parsers() -> "tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]":
    """The whole command line, and each command's part of it."""
    from memoire.nodes import settings

    top = argparse.ArgumentParser(prog="memoire", description="A distributed prioritized replay memory.")
    top.add_argument("--version", action="version", version=f"memoire {memoire.__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run.add_server(commands)
    operate.add_schema_printer(commands)
    run.add_proxies(commands)
    run.add_up(commands)
    run.add_demo(commands)
    operate.add_run(commands)
    watch.add_dashboard(commands)
    watch.add_top(commands)
    watch.add_logs(commands)
    watch.add_doctor(commands)
    watch.add_totals(commands)
    operate.add_plan(commands)
    operate.add_drain(commands)
    operate.add_snapshot(commands)
    operate.add_key_tool(commands)
    for name in settings.COMMANDS:
        settings.add_to(commands.choices[name])
    return top, commands.choices


def _add_server(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    server = commands.add_parser(
        "server",
        help="a replay server of its own",
        description="Run a server until SIGINT or SIGTERM. Caches come in on the next port, model notices go out on "
        "the one after it.",
    )
    server.add_argument("--endpoint", default=HERE, help=f"address for requests (default: %(default)s){ELSEWHERE}")
    _add_beside(server)
    _add_insecure(server)
    _add_schema(server)
    server.add_argument("--run", help=RUN)
    server.add_argument("--name", help="name of this server, the same after a restart (default: host and port)")
    server.add_argument("--cache-limit", type=int, default=0, metavar="N", help="caches held; 0: limited by bytes only")
    server.add_argument("--storage", choices=("caches", "episodes"), help="what is stored (default: caches)")
    server.add_argument("--capacity", type=int, default=0, metavar="N", help="entries of episodes that are stored")
    _add_http(server)
    _add_state(server, "folder of this server's own, where totals, log lines, models and runs survive it")
    server.add_argument(
        "--snapshot-caches",
        action="store_true",
        help="keep what the server holds in the state folder over an orderly restart",
    )
    server.add_argument(
        "--snapshot-every",
        type=float,
        metavar="SECONDS",
        help="keep it there while the server goes on, too, so that one that is killed has again what it held then",
    )
    server.add_argument(
        "--close-timeout",
        type=float,
        default=8.0,
        metavar="SECONDS",
        help="time that it has to save its state and close its connections when it is told to end; three quarters of "
        "it are for what it holds (default: %(default)s)",
    )
    server.add_argument(
        "--restore",
        nargs="+",
        default=[],
        metavar="FILE",
        help="put these snapshots into the server at its start, once into each state folder; their parameters hold, "
        "unless --set says others",
    )
    server.add_argument("--part", metavar="K/N", help="take what belongs to the K-th of N servers that restore them")
    server.add_argument("--skip-damaged", action="store_true", help="restore what is whole of a damaged file")
    server.add_argument("--byte-limit", type=int, default=0, metavar="BYTES", help="bytes of caches held; 0: 1 GiB")
    _add_keys(server)
    _add_io_threads(server)
    _add_limits(server)
    server.set_defaults(command=_server)


def _add_schema_printer(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    printer = commands.add_parser(
        "schema",
        help="what an entry of an environment is, as JSON",
        description="Print what the steps of a Gymnasium environment are made of, as a server's --schema takes it, and "
        "server.schema of the Helm chart: for servers that have no Gymnasium.",
    )
    printer.add_argument("env", metavar="ENV", help="Gymnasium environment, such as CartPole-v1")
    printer.set_defaults(command=_schema)


def _add_proxies(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    for role, default, words in (
        ("proxy", HERE, "one stable address in front of several servers"),
        ("relay", "ipc:///run/memoire/relay", "a proxy on a Unix socket, for the processes of one pod"),
    ):
        one = commands.add_parser(role, help=words, description=f"Run {words}, until SIGINT or SIGTERM.")
        one.add_argument(
            "--endpoint", default=default, help=f"address that clients connect to (default: %(default)s){ELSEWHERE}"
        )
        _add_beside(one)
        _add_insecure(one)
        _add_http(one)
        one.add_argument("servers", nargs="*", metavar="SERVER", help="address of a server, or of another proxy")
        one.add_argument(
            "--servers-file",
            metavar="FILE",
            help="a file with one of these addresses on each line instead; read again when it changes: clients of "
            "servers that are taken off go to others",
        )
        _add_keys(one)
        _add_io_threads(one)
        _add_limits(one)
        one.set_defaults(command=_proxy, role=role)


def _add_up(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    up = commands.add_parser(
        "up",
        help="servers and proxies on this machine",
        description="Run servers and proxies as child processes and print the address that actors and learners connect "
        "to. Ctrl-C or SIGTERM ends all of them.",
    )
    _add_schema(up)
    _add_counts(up)
    up.add_argument(
        "--host",
        default="127.0.0.1",
        help='where to listen; "*" is every address, which takes --keys or --insecure (default: %(default)s)',
    )
    _add_insecure(up)
    up.add_argument(
        "--port", type=int, default=5560, help="first of three ports; 0 takes free ones (default: %(default)s)"
    )
    up.add_argument("--run", help=RUN)
    _add_state(up, "folder in which each server has one of its own; what was counted survives the cluster")
    _add_no_dashboard(up)
    _add_keys(up)
    up.set_defaults(command=_up)


def _add_no_dashboard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-dashboard",
        action="store_true",
        help="start none; otherwise there is one on a free port of this machine, where its extra is installed",
    )


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    demo = commands.add_parser(
        "demo",
        help="a cluster that learns to balance a pole, on this machine",
        description="Run servers, proxies, actors on a Gymnasium environment with discrete actions, and a learner with "
        "a small NumPy network, until the last 20 episodes return more than the goal. Exit status: 0 reached, 1 not "
        "reached within the limit.",
    )
    demo.add_argument("--env", default="CartPole-v1", help="Gymnasium environment (default: %(default)s)")
    demo.add_argument("--actors", type=int, default=2, metavar="N", help="actor processes (default: %(default)s)")
    _add_counts(demo)
    demo.add_argument(
        "--num-envs", type=int, default=4, metavar="N", help="environments of each actor (default: %(default)s)"
    )
    demo.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of environments and networks (default: %(default)s)"
    )
    demo.add_argument(
        "--goal", type=float, help="mean return to reach (default: the environment's threshold; CartPole: 195)"
    )
    demo.add_argument("--seconds", type=float, default=60.0, help="give up after this time (default: %(default)s)")
    demo.add_argument("--keep", action="store_true", help="go on beyond goal and time, until Ctrl-C")
    _add_no_dashboard(demo)
    _add_keys(demo)
    demo.set_defaults(command=_demo)


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = commands.add_parser(
        "run",
        help="begin another run on a living cluster",
        description="Count another run from now on, at every server behind the address: from zero, or where it ended. "
        "The former run stays readable; clients say the rest about it and go on in the new one.",
    )
    run.add_argument("name", metavar="NAME", help="of the run")
    run.add_argument("endpoint", metavar="ENDPOINT", help="of a server or proxy, such as tcp://proxy:5560")
    run.add_argument("--finish", action="store_true", help="declare this run over, too: actors end by themselves")
    run.add_argument("--timeout", type=float, default=10.0, help="seconds to wait for servers (default: %(default)s)")
    _add_keys(run)
    run.set_defaults(command=_run)


def _add_dashboard(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    board = commands.add_parser(
        "dashboard",
        help="the whole cluster in a browser",
        description="Ask all nodes how they stand, once a second, and show it: totals, rates, actors, curves, log "
        "lines. It only reads, and never has to run: a cluster works the same without it.",
    )
    board.add_argument(
        "nodes",
        nargs="+",
        metavar="NODE",
        help="where a node's pages are (its --http), such as http://server-0:8080; dns:NAME:PORT is every address of a "
        "name, such as a headless service",
    )
    board.add_argument(
        "--listen", default="127.0.0.1:8265", metavar="HOST:PORT", help="where to show it (default: %(default)s)"
    )
    board.add_argument("--history", metavar="FILE", help="keep the curves in this file (default: in memory)")
    board.add_argument(
        "--token-file",
        metavar="FILE",
        help="a file with the token that people have to know, read again when it changes",
    )
    board.add_argument(
        "--node-token-file", metavar="FILE", help="a file with the token that the nodes ask for; the same"
    )
    _add_probes(board, "--listen")
    board.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name for it; may be repeated",
    )
    board.add_argument("--insecure", action="store_true", help="serve other machines without a token")
    board.add_argument("--root-path", default="", metavar="PATH", help="path under which a reverse proxy shows it")
    board.add_argument(
        "--expected-actors", type=int, default=0, metavar="N", help="how many there should be (default: nobody knows)"
    )
    board.add_argument("--goal-steps", type=int, default=0, metavar="N", help="steps after which the run is done")
    board.add_argument("--goal-episodes", type=int, default=0, metavar="N", help="episodes after which the run is done")
    board.set_defaults(command=_dashboard)


def _dashboard(given: argparse.Namespace) -> int:
    from memoire.dashboard.settings import Settings
    from memoire.dashboard.web.serve import serve

    return serve(
        Settings(
            nodes=tuple(given.nodes),
            listen=given.listen,
            history=given.history,
            probes=given.probes,
            token=_tokens(given.token_file),
            node_token=_tokens(given.node_token_file),
            hosts=tuple(given.allow_host),
            insecure=given.insecure,
            root_path=given.root_path.rstrip("/"),
            expected_actors=given.expected_actors,
            goal_steps=given.goal_steps,
            goal_episodes=given.goal_episodes,
        )
    )


def _add_top(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    top = commands.add_parser(
        "top",
        help="the whole cluster on a terminal",
        description="Show totals with their rates, what holds the run up, tables, actors, learners and nodes, again "
        "and again until Ctrl-C: in place on a terminal where rich is installed, as plain lines elsewhere. Exit "
        "status: 0 every node answered; 1 nobody did; 3 with --once, some did not; 130 Ctrl-C.",
    )
    _add_nodes(top)
    top.add_argument("--once", action="store_true", help="look once, print lines, and end")
    top.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="(default: %(default)s)")
    top.add_argument("--actors", type=int, default=5, metavar="N", help="actors that are named (default: %(default)s)")
    top.add_argument("--expected-actors", type=int, default=0, metavar="N", help="how many there should be")
    top.set_defaults(command=_top)


def _add_logs(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    logs = commands.add_parser(
        "logs",
        help="the log lines of all servers",
        description="Print the lines that actors have logged, of all servers together, the oldest first: "
        "TIME,LABEL,TEXT, one line each, with control characters escaped. Exit status: 0 every node answered; 1 no "
        "server did; 3 some node did not, and its lines may be missing; 130 Ctrl-C.",
    )
    _add_nodes(logs)
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


def _add_nodes(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "nodes",
        nargs="+",
        metavar="NODE",
        help="where a node's pages are (its --http), such as server-0:8080; dns:NAME:PORT is every address of a name",
    )
    to.add_argument("--token-file", metavar="FILE", help="a file with the token that the nodes ask for")


def _top(given: argparse.Namespace) -> int:
    from memoire.dashboard.terminal.top import top

    return top(
        given.nodes,
        node_token=_tokens(given.token_file),
        every=given.every,
        once=given.once,
        actors=given.actors,
        expected=given.expected_actors,
    )


def _logs(given: argparse.Namespace) -> int:
    from memoire.dashboard.terminal.log_tail import tail, wanted_lines

    if given.last is not None and given.last < 1:
        raise ParameterError("--last", given.last, "a number of lines above 0")
    if given.follow and given.until is not None:
        raise ParameterError("--until", given.until, "left out with --follow, which has no end")
    names = ("text", "client", "label", "since", "until", "run")
    return tail(
        given.nodes,
        wanted_lines(**{name: getattr(given, name) for name in names}),
        token=_tokens(given.token_file),
        follow=given.follow,
        last=given.last,
        every=given.every,
        timeout=given.timeout,
    )


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    doctor = commands.add_parser(
        "doctor",
        help="find out why an address does not answer",
        description="Make a round trip to a server, proxy or relay, one step after the other, and say what to do about "
        "the first one that fails. Exit status: 0 all is well; 1 the address is none; 3 the name does not resolve; "
        "4 nothing listens; 5 what listens is not memoire's request address; 6 it speaks another version of the "
        "protocol; 7 it does not answer; 8 it answers but gives no schema; 9 it refuses; 10 a cache did not come back "
        "(--roundtrip).",
    )
    doctor.add_argument("endpoint", metavar="ENDPOINT", help="such as tcp://proxy:5560 or ipc:///run/memoire/relay")
    doctor.add_argument(
        "--roundtrip",
        action="store_true",
        help="push a small cache, too, into a table that no learner reads, and draw it back",
    )
    doctor.add_argument("--timeout", type=float, default=5.0, help="seconds for each step (default: %(default)s)")
    _add_keys(doctor)
    doctor.set_defaults(command=_doctor)


def _add_totals(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    totals = commands.add_parser(
        "totals",
        help="what a cluster has counted",
        description="Print what all servers behind an address have counted for a run, each client once, wherever it "
        "was at home. Exit status: 0 every server answered; 1 nobody did; 3 some did not, and what they alone have "
        "counted is missing.",
    )
    totals.add_argument("endpoints", nargs="+", metavar="ENDPOINT", help="addresses of a proxy, or of all servers")
    totals.add_argument("--run", help="name of the experiment (default: the one that is counted now)")
    totals.add_argument("--json", action="store_true", help="print one JSON object")
    totals.add_argument("--timeout", type=float, default=10.0, help="seconds to wait (default: %(default)s)")
    _add_keys(totals)
    totals.set_defaults(command=_totals)


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    plan = commands.add_parser(
        "plan",
        help="how large a cluster has to be, on paper",
        description="Print the bytes, memory, cores and Pods that a load takes: bytes follow from the schema and its "
        "parameters, cores from what things cost on two cores of an AMD EPYC (docs/scaling.md). Nothing is started.",
    )
    state = plan.add_mutually_exclusive_group()
    state.add_argument(
        "--state",
        default="84x84",
        metavar="SHAPE",
        help="of one frame, with :DTYPE where it is not uint8, such as 64:float32 (default: %(default)s)",
    )
    state.add_argument("--schema", metavar="FILE", help="JSON file that describes an entry, or the JSON itself")
    state.add_argument("--env", help="Gymnasium environment whose observations, actions and rewards are stored")
    plan.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter, such as frame_stack=4, multi_step=3 or cache_size=256; may be repeated",
    )
    numbers: tuple[tuple[str, type, float, str], ...] = (
        ("--actors", int, 300, "actor processes"),
        ("--steps", float, 50.0, "environment steps of each actor in a second"),
        ("--learners", int, 10, "learners"),
        ("--batches", float, 10.0, "batches of each learner in a second"),
        ("--batch-size", int, 256, "samples of a batch"),
        ("--capacity", int, 1_000_000, "steps stored: at each actor with caches, at all servers with episodes"),
        ("--compressed", float, 1.0, "what `--set compression=lz4` leaves of the frames' bytes: of Atari 0.05"),
        ("--network", float, 10.0, "Gbit/s of the network of a server's or proxy's node"),
        ("--model-bytes", float, 0.0, "bytes of a model"),
        ("--model-every", float, 10.0, "seconds between two models"),
    )
    for name, kind, default, words in numbers:
        plan.add_argument(name, type=kind, default=default, metavar="N", help=f"{words} (default: %(default)s)")
    plan.add_argument("--storage", choices=("caches", "episodes"), default="caches", help="(default: %(default)s)")
    plan.add_argument("--embedded", action="store_true", help="each learner has a server in its own process")
    plan.set_defaults(command=_plan)


def _add_drain(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    drain = commands.add_parser(
        "drain",
        help="take a server out of a cluster, with nothing it has counted lost",
        description="Send a server's clients to other servers, wait until they are there, and copy what it has counted "
        "to one of these. Then it may be stopped: the cluster's totals stay as they are. May be done again.",
    )
    drain.add_argument(
        "server", metavar="SERVER", help="own address of the server that leaves; with --keep, {n} stands for its number"
    )
    rest = drain.add_mutually_exclusive_group(required=True)
    rest.add_argument("--to", nargs="+", metavar="SERVER", help="addresses of servers that stay")
    rest.add_argument(
        "--keep", type=int, metavar="N", help="drain each server numbered N or above, if there is one, to those below"
    )
    drain.add_argument("--timeout", type=float, default=60.0, help="seconds in all (default: %(default)s)")
    _add_keys(drain)
    drain.set_defaults(command=_drain)


def _add_snapshot(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    one = commands.add_parser(
        "snapshot",
        help="save what the servers of a cluster hold, or look into such a file",
        description="Have every server behind an address write what it holds into its own state folder "
        "(snapshots/NAME.snapshot) while everything goes on; or say what a file holds. `memoire server --restore` "
        "takes such files. Exit status: 0 all is well; 1 nothing was ordered, or that is no snapshot; 3 a server has "
        "not written its file, or the file is damaged.",
    )
    one.add_argument("endpoint", nargs="?", metavar="ENDPOINT", help="of a server or proxy, such as tcp://proxy:5560")
    one.add_argument("--to", metavar="NAME", help="name of the files")
    one.add_argument("--show", metavar="FILE", help="say what this file holds instead")
    one.add_argument("--check", action="store_true", help="with --show: read it all and compare every checksum")
    one.add_argument("--json", action="store_true", help="with --show: print one JSON object")
    one.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for files (default: %(default)s)")
    _add_keys(one)
    one.set_defaults(command=_snapshot)


def _add_key_tool(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    tool = commands.add_parser(
        "keys",
        help="make keys, and say whose are let in",
        description="Keys by which processes know each other, in folders: one for each process. A cluster's folder has "
        "one for each role below it. What is changed is noticed by processes that run, within seconds.",
    )
    actions = tool.add_subparsers(title="actions", required=True, metavar="ACTION")
    made = actions.add_parser("new", help="new keys of a whole cluster, or with --role one more")
    made.add_argument("folder", nargs="?", metavar="FOLDER", help="where to write them")
    made.add_argument("--role", choices=ROLES, help="make one keys folder, for this role")
    made.add_argument("--name", default="", help="of the key: keys of one role and name are the same to a server")
    made.add_argument("--server", metavar="FILE", help="with --role: public keys of what it dials, or a keys folder")
    made.add_argument("--kubernetes", metavar="NAME", help="print Secrets NAME-server, NAME-actor, ... as YAML instead")
    made.set_defaults(command=_keys_new)
    shown = actions.add_parser("list", help="what is in a keys folder; no secret is shown")
    shown.add_argument("folder", metavar="FOLDER", help="of a process, or of a cluster")
    shown.set_defaults(command=_keys_list)
    printed = actions.add_parser("export", help="print them as Kubernetes Secrets: secret keys, too")
    printed.add_argument("folder", metavar="FOLDER", help="of a process, or of a cluster")
    printed.add_argument("--kubernetes", metavar="NAME", required=True, help="of the Secrets: NAME-server, ...")
    printed.set_defaults(command=_keys_export)
    let_in = actions.add_parser("authorize", help="let keys in")
    let_in.add_argument("folder", metavar="FOLDER", help="of a server or proxy, or of a cluster")
    let_in.add_argument("files", nargs="+", metavar="FILE", help="public keys, or keys folders")
    let_in.set_defaults(command=_keys_authorize)
    gone = actions.add_parser("revoke", help="let keys in no more, and cut them off")
    gone.add_argument("folder", metavar="FOLDER", help="of a server or proxy, or of a cluster")
    gone.add_argument("which", nargs="+", metavar="KEY", help="fingerprint, or ROLE/NAME for all keys of that name")
    gone.set_defaults(command=_keys_revoke)
    in_cluster_arguments.add_to(actions)


def _keys_new(given: argparse.Namespace) -> int:
    from . import keytool

    return keytool.new(given.folder, given.role, given.name, given.server, given.kubernetes)


def _keys_list(given: argparse.Namespace) -> int:
    from . import keytool

    return keytool.show(given.folder)


def _keys_export(given: argparse.Namespace) -> int:
    from . import keytool

    return keytool.export(given.folder, given.kubernetes)


def _keys_authorize(given: argparse.Namespace) -> int:
    from . import keytool

    return keytool.authorize(given.folder, given.files)


def _keys_revoke(given: argparse.Namespace) -> int:
    from . import keytool

    return keytool.revoke(given.folder, given.which)


def _add_keys(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--keys",
        metavar="FOLDER",
        default=os.environ.get("MEMOIRE_KEYS") or None,
        help="this process' keys folder, or a cluster's: see `memoire keys` (default: $MEMOIRE_KEYS; without it none)",
    )


def _add_limits(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a timeout or bound of the library, such as new_clients=100000; may be given again "
        "(docs/guarantees.md has all)",
    )


def _add_io_threads(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--io-threads",
        type=int,
        default=1,
        metavar="N",
        help="threads that move and encrypt bytes, each for connections of its own: more on more cores, where "
        "encryption bounds what comes in (default: %(default)s)",
    )


def _add_schema(to: argparse.ArgumentParser) -> None:
    source = to.add_mutually_exclusive_group(required=True)
    source.add_argument("--schema", metavar="FILE", help="JSON file that describes an entry, or the JSON itself")
    source.add_argument("--env", help="Gymnasium environment whose observations, actions and rewards are stored")
    source.add_argument(
        "--tables",
        metavar="FILE",
        help="JSON file with several named memories, or the JSON itself: "
        '{"online": {"schema": "online.json", "multi_step": 3}, ...}',
    )
    to.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of sampling, such as multi_step=3 or samples_per_insert=8; may be repeated",
    )


def _add_state(to: argparse.ArgumentParser, what: str) -> None:
    to.add_argument("--state-dir", metavar="FOLDER", help=f"{what} (default: everything is in memory)")


def _add_http(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--http",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help='where /livez, /readyz, /metrics and /status are answered; port 0 takes a free one, "off" opens none '
        "(default: %(default)s)",
    )
    to.add_argument(
        "--http-token-file",
        metavar="FILE",
        help="a file with the token that these pages ask for, but for /livez, /readyz and /metrics; read again when it "
        "changes, and may hold an old and a new one, a line each",
    )
    _add_probes(to, "--http")


def _add_beside(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--beside",
        metavar="PORT,PORT",
        help="ports for caches and for notices, 0 for any free one (default: the next two after that of --endpoint)",
    )


def _add_insecure(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond this machine without keys and tokens: "
        "anybody who can reach it may push, draw, read, and end the process",
    )


def _check_endpoint(given: argparse.Namespace, option: str, endpoint: str) -> None:
    """Refuse an address that would be open to everybody, unless somebody said so."""
    if given.keys is None and not given.insecure:
        exposure.refuse(option, endpoint, guard="keys (--keys)")


def _add_probes(to: argparse.ArgumentParser, main: str) -> None:
    to.add_argument(
        "--probes",
        metavar="HOST:PORT",
        help=f"where /livez, /readyz and /metrics are answered to everybody, and nothing else (default: at {main})",
    )


def _doors(given: argparse.Namespace) -> dict[str, Any]:
    """Where a node's pages are, and what they ask for; an address that is open to everybody is refused."""
    _check_endpoint(given, "--endpoint", given.endpoint)
    if given.insecure:
        warnings.simplefilter("ignore", InsecureWarning)  # what is open is said when it is known
    http, token = (None if given.http == "off" else str(given.http)), _tokens(given.http_token_file)
    if http is not None and ":" in http and token is None and not given.insecure:
        exposure.refuse("--http", http, guard="a token (--http-token-file; --probes has a port of its own)")
    return {"http": http, "http_token": token, "probes": given.probes}


def _tokens(path: str | None) -> "Tokens | None":
    """Those of a file; a wrong one is said now."""
    from memoire.security.tokens import Tokens

    return None if path is None else Tokens(path)


def _add_counts(to: argparse.ArgumentParser) -> None:
    to.add_argument("--servers", type=int, default=1, metavar="N", help="server processes (default: %(default)s)")
    to.add_argument("--proxies", type=int, default=1, metavar="N", help="proxy processes (default: %(default)s)")


def _server(given: argparse.Namespace) -> int:
    doors = _doors(given)
    use_io_threads(given.io_threads)
    from memoire.nodes import roles

    tables = _tables(given)
    return roles.serve(
        given.endpoint,
        None if tables else roles.schema_of(given.schema, given.env),
        given.set,
        tables=tables,
        run=given.run,
        name=given.name,
        cache_limit=given.cache_limit,
        storage=given.storage,
        capacity=given.capacity,
        byte_limit=given.byte_limit,
        state_dir=given.state_dir,
        snapshot_caches=given.snapshot_caches,
        snapshot_every=given.snapshot_every,
        restore=given.restore,
        part=given.part,
        skip_damaged=given.skip_damaged,
        close_timeout=given.close_timeout,
        limits=given.limit,
        beside=given.beside,
        keys=given.keys,
        **doors,
    )


def _tables(given: argparse.Namespace) -> "dict[str, Table] | None":
    """Those of --tables; a wrong one is said here, and not by a child."""
    from memoire.nodes.tables_file import read_tables

    if given.tables is None:
        return None
    if given.set:
        raise ParameterError("--set", given.set, 'absent beside --tables: each table has "parameters" of its own')
    return read_tables(given.tables)


def _proxy(given: argparse.Namespace) -> int:
    doors = _doors(given)
    use_io_threads(given.io_threads)
    from memoire.nodes import roles

    if bool(given.servers) == bool(given.servers_file):
        raise ParameterError("SERVER", given.servers, "addresses of servers, or --servers-file, and not both")
    return roles.relay(
        given.endpoint,
        given.servers,
        role=given.role,
        servers_file=given.servers_file,
        limits=given.limit,
        beside=given.beside,
        keys=given.keys,
        **doors,
    )


def _up(given: argparse.Namespace) -> int:
    _check_endpoint(given, "--host", f"tcp://{given.host}:{given.port}")
    from memoire.nodes import local_cluster, roles

    roles.read_parameters(given.set)  # a wrong one is said here, and not by a child
    return local_cluster.up(
        None if _tables(given) else roles.schema_of(given.schema, given.env),
        given.set,
        tables=given.tables,
        servers=given.servers,
        proxies=given.proxies,
        host=given.host,
        port=given.port,
        run=given.run,
        state_dir=given.state_dir,
        dashboard=not given.no_dashboard,
        insecure=given.insecure,
        keys=given.keys,
    )


def _demo(given: argparse.Namespace) -> int:
    began = time.monotonic()
    from memoire.rl.demo.demo import Demo, Options

    options = Options(
        env=given.env,
        actors=given.actors,
        servers=given.servers,
        proxies=given.proxies,
        num_envs=given.num_envs,
        seed=given.seed,
        keep=given.keep,
        seconds=given.seconds,
        goal=given.goal,
        dashboard=not given.no_dashboard,
        keys=given.keys,
    )
    return Demo(options, began).run()


def _run(given: argparse.Namespace) -> int:
    from memoire.reader.reader import Reader

    with Reader([given.endpoint], timeout=given.timeout, keys=given.keys) as reader:
        reader.begin_run(given.name, given.timeout)
        if given.finish:
            reader.finish(given.timeout)
        servers = ", ".join(reader.servers)
    print(f"memoire: run {given.name!r} is {'over' if given.finish else 'counted from now on'} at {servers}")
    return 0


def _doctor(given: argparse.Namespace) -> int:
    from .doctor import examine

    return examine(given.endpoint, timeout=given.timeout, roundtrip=given.roundtrip, keys=given.keys)


def _schema(given: argparse.Namespace) -> int:
    from memoire.nodes.roles import schema_of

    print(schema_of(None, given.env).to_json())
    return 0


def _totals(given: argparse.Namespace) -> int:
    from .totals import show

    return show(given.endpoints, given.run, timeout=given.timeout, keys=given.keys, as_json=given.json)


def _plan(given: argparse.Namespace) -> int:
    from memoire.nodes import roles

    from . import plan

    by_state = given.schema is None and given.env is None
    load = plan.Load(
        plan.schema_of_state(given.state) if by_state else roles.schema_of(given.schema, given.env),
        roles.read_parameters(given.set),
        actors=given.actors,
        steps=given.steps,
        learners=given.learners,
        batches=given.batches,
        batch_size=given.batch_size,
        storage=given.storage,
        capacity=given.capacity,
        compressed=given.compressed,
        embedded=given.embedded,
        network=given.network * 1e9 / 8,
        model_bytes=given.model_bytes,
        model_every=given.model_every,
    )
    for line in plan.lines(plan.plan(load)):
        print(line)
    return 0


def _snapshot(given: argparse.Namespace) -> int:
    from memoire.nodes import snapshots

    if given.show is not None and given.endpoint is None and given.to is None:
        return snapshots.show(given.show, check=given.check, as_json=given.json)
    if given.show is None and given.endpoint is not None and given.to is not None:
        return snapshots.order(given.endpoint, given.to, timeout=given.timeout, keys=given.keys)
    raise ParameterError("ENDPOINT", given.endpoint, "an address with --to NAME, or left out with --show FILE")


def _drain(given: argparse.Namespace) -> int:
    from .drain import drain, drain_above

    if given.keep is not None:
        drain_above(given.server, given.keep, timeout=given.timeout, keys=given.keys)
    else:
        drain(given.server, given.to, timeout=given.timeout, keys=given.keys)
    return 0
