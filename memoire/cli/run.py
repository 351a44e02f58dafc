"""Commands that run nodes until somebody ends them: server, proxy and relay, up, demo.

`memoire launch`: a learner and actors of yours on this machine.
"""

import argparse
import time
from typing import TYPE_CHECKING

import memoire
from memoire.arguments import declared
from memoire.errors import NotInstalled, ParameterError
from memoire.limits import Room
from memoire.nodes.settings import Counts, LaunchSettings, NodeSettings
from memoire.server.settings import State

from .addresses import endpoint_of
from .options import (
    ELSEWHERE,
    HERE,
    RUN,
    Commands,
    add_keys,
    add_limits,
    add_no_dashboard,
    add_probes,
    add_schema,
    add_settings,
    add_state,
    check_endpoint,
    page_options,
    said_of,
    storage,
)

if TYPE_CHECKING:
    from memoire.nodes.local import Nodes
    from memoire.tables.table import Table


def add_launch(commands: Commands) -> None:
    """`memoire launch`."""
    launch = commands.add_parser(
        "launch",
        help="a learner and actors of yours on this machine",
        description="Run a learner and actors as child processes, and start each again that dies. Servers and a proxy "
        "run beside them with --env, --schema or --tables; else the learner is the server (MEMOIRE_LISTEN), or "
        "--endpoint says where one is. Programs find the address in $MEMOIRE_ENDPOINT, their number in $MEMOIRE_RANK "
        "(of $MEMOIRE_COUNT), a seed of their own in $MEMOIRE_SEED, and more (docs/guide.md). All of it ends when the "
        "learner ends. Exit status: 0 it did; 1 a program could not go on; 128 + n signal n came before.",
    )
    launch.add_argument(
        "learner", metavar="LEARNER", help='Python file or module, "-" for none; with arguments in quotes: "a.py --b 1"'
    )
    launch.add_argument("actor", metavar="ACTOR", nargs="?", default="-", help="the same for actors (default: none)")
    add_settings(launch, LaunchSettings)
    launch.add_argument("--endpoint", metavar="ADDRESS", help="of a cluster that runs, such as tcp://proxy:5560")
    add_schema(launch, is_required=False)
    add_settings(launch, Counts)
    launch.add_argument("--run", help="name of the experiment, for the servers of --env, --schema or --tables")
    add_state(launch, "folder for the state of servers, or of the learner that is one")
    add_no_dashboard(launch)
    add_keys(launch)
    launch.set_defaults(command=_launch)


def _launch(given: argparse.Namespace) -> int:
    from memoire.nodes.local import LaunchOptions, launch, program

    return launch(
        LaunchOptions(
            learner=program("LEARNER", given.learner),
            actor=program("ACTOR", given.actor),
            nodes=_nodes(given),
            endpoint=None if given.endpoint is None else endpoint_of(given.endpoint),
            env=given.env,
            keys=given.keys,
            state_dir=given.state_dir,
            dashboard=not given.no_dashboard,
            **said_of(given, LaunchSettings),
        )
    )


def _nodes(given: argparse.Namespace) -> "Nodes | None":
    """Servers and proxies, where --env, --schema or --tables says what they store."""
    if (given.schema, given.env, given.tables) == (None, None, None):
        if given.set:
            raise ParameterError("--set", given.set, "absent without --env, --schema or --tables")
        return None
    if given.endpoint is not None:
        raise ParameterError("--endpoint", given.endpoint, "absent beside --env, --schema and --tables")
    return nodes_of(given)


def nodes_of(given: argparse.Namespace, host: str = "127.0.0.1", *, insecure: bool = False) -> "Nodes":
    """Servers and proxies of this machine as the command line says them; what is wrong is said here, not by a child."""
    from memoire.nodes import roles
    from memoire.nodes.local import Nodes

    roles.read_parameters(given.set)
    return Nodes(
        schema=None if tables_of(given) else roles.schema_of(given.schema, given.env),
        settings=given.set,
        tables=given.tables,
        **said_of(given, Counts),
        host=host,
        port=given.port,
        run=given.run,
        state_dir=given.state_dir,
        insecure=insecure,
        keys=given.keys,
    )


def tables_of(given: argparse.Namespace) -> "dict[str, Table] | None":
    """Those of --tables."""
    from memoire.nodes.tables_file import read_tables

    if given.tables is None:
        return None
    if given.set:
        raise ParameterError("--set", given.set, 'absent beside --tables: each table has "parameters" of its own')
    return read_tables(given.tables)


def add_server(commands: Commands) -> None:
    """`memoire server`."""
    server = commands.add_parser(
        "server",
        help="a replay server of its own",
        description="Run a server until SIGINT or SIGTERM. Caches come in on the next port, model notices go out on "
        "the one after it.",
    )
    server.add_argument("--endpoint", default=HERE, help=f"address for requests (default: %(default)s){ELSEWHERE}")
    add_settings(server, NodeSettings)
    add_schema(server, is_required=False)  # with --storage keyed there is nothing to say
    server.add_argument("--run", help=RUN)
    server.add_argument("--name", help="name of this server, the same after a restart (default: host and port)")
    add_settings(server, Room, storage=storage)
    server.add_argument(
        "--inference",
        nargs="+",
        default=[],
        metavar="ADDRESS",
        help="of inference nodes that act for this server's clients, which are told; the host * is this server's",
    )
    add_probes(server, "--http")
    add_settings(server, State)
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
    add_keys(server)
    add_limits(server)
    server.set_defaults(command=_server)


def add_proxies(commands: Commands) -> None:
    """`memoire proxy` and `memoire relay`."""
    for role, default, words in (
        ("proxy", HERE, "one stable address in front of several servers"),
        ("relay", "ipc:///run/memoire/relay", "a proxy on a Unix socket, for the processes of one pod"),
    ):
        one = commands.add_parser(role, help=words, description=f"Run {words}, until SIGINT or SIGTERM.")
        one.add_argument(
            "--endpoint", default=default, help=f"address that clients connect to (default: %(default)s){ELSEWHERE}"
        )
        add_settings(one, NodeSettings)
        one.add_argument("--name", help="name that pages, logs and metrics show (default: a part of its id)")
        add_probes(one, "--http")
        one.add_argument("servers", nargs="*", metavar="SERVER", help="address of a server, or of another proxy")
        one.add_argument(
            "--servers-file",
            metavar="FILE",
            help="a file with one of these addresses on each line instead; read again when it changes: clients of "
            "servers that are taken off go to others",
        )
        add_keys(one)
        add_limits(one)
        one.set_defaults(command=_proxy, role=role)


def add_up(commands: Commands) -> None:
    """`memoire up`."""
    up = commands.add_parser(
        "up",
        help="servers and proxies on this machine",
        description="Run servers and proxies as child processes and print the address that actors and learners connect "
        "to. Ctrl-C or SIGTERM ends all of them.",
    )
    add_schema(up)
    add_settings(up, Counts)
    up.add_argument(
        "--host",
        default="127.0.0.1",
        help='where to listen; "*" is every address, which takes --keys or --insecure (default: %(default)s)',
    )
    add_settings(up, NodeSettings, "insecure")
    up.add_argument(
        "--port", type=int, default=5560, help="first of three ports; 0 takes free ones (default: %(default)s)"
    )
    up.add_argument("--run", help=RUN)
    add_state(up, "folder in which each server has one of its own; what was counted survives the cluster")
    add_no_dashboard(up)
    add_keys(up)
    up.set_defaults(command=_up)


def add_demo(commands: Commands) -> None:
    """`memoire demo`."""
    demo = commands.add_parser(
        "demo",
        help="a cluster that learns to balance a pole, on this machine",
        description="Run servers, proxies, actors on a Gymnasium environment with discrete actions, a learner with a "
        "small NumPy network, and a dashboard, until the last 20 episodes return more than the goal. To look around, "
        "let it go on (--keep): whatever you kill comes back. Exit status: 0 reached, 1 not reached within the limit.",
    )
    demo.add_argument(
        "--env",
        default="CartPole-v1",
        metavar="ENV",
        help="Gymnasium environment with discrete actions (default: %(default)s)",
    )
    demo.add_argument("--actors", type=int, default=2, metavar="N", help="actor processes (default: %(default)s)")
    add_settings(demo, Counts)
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
    add_no_dashboard(demo)
    add_keys(demo)
    demo.set_defaults(command=_demo)


def _server(given: argparse.Namespace) -> int:
    pages = page_options(given)
    from memoire.net.sockets import use_io_threads
    from memoire.nodes import roles

    use_io_threads(given.io_threads)
    tables = tables_of(given)
    return roles.serve(
        given.endpoint,
        None if tables else roles.schema_of(given.schema, given.env, given.storage),
        given.set,
        tables=tables,
        run=given.run,
        name=given.name,
        room=said_of(given, Room),
        inference=given.inference,
        state=state_of(given),
        restore=given.restore,
        part=given.part,
        skip_damaged=given.skip_damaged,
        close_timeout=given.close_timeout,
        limits=given.limit,
        beside=given.beside,
        keys=given.keys,
        **pages,
    )


def state_of(given: argparse.Namespace) -> State | None:
    """The state folder, and what is kept there."""
    said = said_of(given, State)
    if said and "folder" not in said:
        name, value = next(iter(said.items()))
        flag = declared(State)[name].setting.flag or name.replace("_", "-")
        raise ParameterError(f"--{flag}", value, "left out without a --state-dir to keep it in")
    return State(**said) if said else None


def _proxy(given: argparse.Namespace) -> int:
    pages = page_options(given)
    from memoire.net.sockets import use_io_threads
    from memoire.nodes import roles

    use_io_threads(given.io_threads)
    if bool(given.servers) == bool(given.servers_file):
        raise ParameterError("SERVER", given.servers, "addresses of servers, or --servers-file, and not both")
    return roles.relay(
        given.endpoint,
        [endpoint_of(server) for server in given.servers or ()],
        role=given.role,
        name=given.name,
        servers_file=given.servers_file,
        limits=given.limit,
        beside=given.beside,
        keys=given.keys,
        **pages,
    )


def _up(given: argparse.Namespace) -> int:
    check_endpoint(given, "--host", f"tcp://{given.host}:{given.port}")
    from memoire.nodes.local import up

    return up(nodes_of(given, given.host, insecure=given.insecure), dashboard=not given.no_dashboard)


@NotInstalled.explained("pip install 'memoire-rl[demo]'")
def _demo(given: argparse.Namespace) -> int:
    began = time.monotonic()
    demo = memoire.extension("memoire.rl.demo.demo")
    options = demo.Options(
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
    status: int = demo.Demo(options, began).run()
    return status
