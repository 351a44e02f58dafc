"""Commands that run nodes until a signal ends them: server, proxy and relay, up, demo; `launch` runs user programs."""

import argparse
import time
from typing import TYPE_CHECKING, Annotated

import memoire
from memoire.arguments import NUMBER, SECONDS, Setting, declared
from memoire.errors import NotInstalled, ParameterError
from memoire.limits import Room
from memoire.nodes.settings import ClusterCounts, LaunchSettings, NodeSettings
from memoire.server.settings import State

from .options import (
    HERE,
    CommandOptions,
    Commands,
    DashboardOptions,
    NodeOptions,
    TableOptions,
    add_keys,
    add_settings,
    all_of,
    changed_settings,
    check_endpoint,
    endpoint_of,
    page_options,
    storage,
)

if TYPE_CHECKING:
    from memoire.nodes.local import Nodes
    from memoire.tables.table import Table


class Launch(CommandOptions):
    """Run a learner and actors as child processes, and restart each that dies. With --env, --schema or --tables,
    servers and a proxy run beside them; without these, the learner is the server (MEMOIRE_LISTEN), or --endpoint is the
    address of a server. Programs find the address in $MEMOIRE_ENDPOINT, their number in $MEMOIRE_RANK (of
    $MEMOIRE_COUNT), a seed of their own in $MEMOIRE_SEED, and more (docs/guide.md). All processes end when the learner
    ends. Exit status: 0 the learner ended; 1 a program could not go on; 128 + n signal n came before.
    """

    learner: Annotated[str, Setting(place=True)]
    """A Python file or module, or "-" for no learner; with arguments in quotes: "a.py --b 1"."""
    actor: Annotated[str, Setting(place=True)] = "-"
    """The same for actors (default: no actors)."""
    endpoint: Annotated[str | None, Setting(show="ADDRESS")] = None
    """Address of a running cluster, such as tcp://proxy:5560."""
    run: Annotated[str | None, Setting()] = None
    """Name of the experiment, for the servers of --env, --schema or --tables."""
    state_dir: Annotated[str | None, Setting(show="FOLDER")] = None
    """Folder for the state of servers, or of a learner that is the server (default: everything is in memory)."""


def add_launch(commands: Commands) -> None:
    """Add the command `memoire launch`."""
    about = "run your learner and actors on this machine"
    commands.add(
        "launch", about, _launch, Launch, LaunchSettings, TableOptions, ClusterCounts, DashboardOptions, add_keys
    )


def _launch(args: argparse.Namespace) -> int:
    from memoire.nodes.local import LaunchOptions, launch, program

    return launch(
        LaunchOptions(
            learner=program("LEARNER", args.learner),
            actor=program("ACTOR", args.actor),
            nodes=_nodes(args),
            endpoint=None if args.endpoint is None else endpoint_of(args.endpoint),
            env=args.env,
            keys=args.keys,
            state_dir=args.state_dir,
            dashboard=not args.no_dashboard,
            **changed_settings(args, LaunchSettings),
        )
    )


def _nodes(args: argparse.Namespace) -> "Nodes | None":
    if (args.schema, args.env, args.tables) == (None, None, None):
        if args.set:
            raise ParameterError.with_text("--set needs --env, --schema or --tables.")
        return None
    if args.endpoint is not None:
        raise ParameterError.with_text("--endpoint cannot be combined with --env, --schema or --tables.")
    return nodes_of(args)


def nodes_of(args: argparse.Namespace, host: str = "127.0.0.1", *, insecure: bool = False) -> "Nodes":
    """Return servers and proxies of this machine from the command line; raise errors before a child process starts."""
    from memoire.nodes import roles
    from memoire.nodes.local import Nodes

    roles.read_parameters(args.set)
    return Nodes(
        schema=None if tables_of(args) else roles.schema_of(args.schema, args.env),
        settings=args.set,
        tables=args.tables,
        **changed_settings(args, ClusterCounts),
        host=host,
        port=args.port,
        run=args.run,
        state_dir=args.state_dir,
        insecure=insecure,
        keys=args.keys,
    )


def tables_of(args: argparse.Namespace) -> "dict[str, Table] | None":
    """Return the tables of --tables, or None without that option; raise ParameterError if --set is given, too."""
    from memoire.nodes.roles import read_tables

    if args.tables is None:
        return None
    if args.set:
        raise ParameterError.with_text(
            '--set cannot be combined with --tables: each table in that file has its own "parameters".'
        )
    return read_tables(args.tables)


class ServerCommand(NodeOptions):
    """Run a server until SIGINT or SIGTERM. The server receives caches on the next port, and sends model notices on the
    port after that.
    """

    endpoint: Annotated[str, Setting()] = HERE
    """Address for requests; for other machines "tcp://*:5560", which needs --keys or --insecure."""
    run: Annotated[str | None, Setting()] = None
    """Name of the experiment (default: the last run in the state folder, or "default")."""
    name: Annotated[str | None, Setting()] = None
    """Name of this server, the same after a restart (default: host and port)."""
    inference: Annotated[tuple[str, ...], Setting(several="+", show="ADDRESS")] = ()
    """Addresses of inference nodes, which the server tells its clients; the host * stands for this server's host."""
    close_timeout: Annotated[float, SECONDS] = 8.0
    """Time to save the state and close connections when the server ends; three quarters of the time are for saving
    entries."""
    restore: Annotated[tuple[str, ...], Setting(several="+", show="FILE")] = ()
    """Restore these snapshots when the server starts, once into each state folder, with their parameters unless --set
    gives other parameters."""
    part: Annotated[str | None, Setting(show="K/N")] = None
    """Restore the K-th of N parts, if N servers restore the same snapshots."""
    skip_damaged: Annotated[bool, Setting()] = False
    """Restore the undamaged records of a damaged file."""


def add_server(commands: Commands) -> None:
    """Add the command `memoire server`."""
    kinds = ServerCommand, NodeSettings, TableOptions, Room, State, add_keys
    commands.add("server", "run a replay server", _server, *kinds, storage=storage)


class ProxyOptions(NodeOptions):
    """Run one stable address in front of several servers, until SIGINT or SIGTERM."""

    endpoint: Annotated[str, Setting()] = HERE
    """Address that clients connect to; for other machines "tcp://*:5560", which needs --keys or --insecure."""
    name: Annotated[str | None, Setting()] = None
    """Name that pages, logs and metrics show (default: a part of the proxy's id)."""
    servers: Annotated[tuple[str, ...], Setting(place=True, several="*", show="SERVER")] = ()
    """Address of a server, or of another proxy."""
    servers_file: Annotated[str | None, Setting(show="FILE")] = None
    """A file with one such address on each line instead; read again when it changes: clients of removed servers move to
    other servers."""


class RelayOptions(ProxyOptions):
    """Run a proxy on a Unix socket, for the processes of one pod, until SIGINT or SIGTERM."""

    endpoint: Annotated[str, Setting()] = "ipc:///run/memoire/relay"


def add_proxies(commands: Commands) -> None:
    """Add the commands `memoire proxy` and `memoire relay`."""
    for role, kind, about in (
        ("proxy", ProxyOptions, "run one stable address in front of several servers"),
        ("relay", RelayOptions, "run a proxy on a Unix socket, for the processes of one pod"),
    ):
        commands.add(role, about, _proxy, kind, NodeSettings, add_keys).set_defaults(role=role)


class Up(CommandOptions):
    """Run servers and proxies as child processes and print the address that actors and learners connect to. Ctrl-C or
    SIGTERM ends all child processes.
    """

    host: Annotated[str, Setting()] = "127.0.0.1"
    """Host to listen at; "*" is every address, which needs --keys or --insecure."""
    port: Annotated[int, NUMBER] = 5560
    """First of three ports; 0 takes free ports."""
    run: Annotated[str | None, Setting()] = None
    """Name of the experiment (default: the last run in the state folder, or "default")."""
    state_dir: Annotated[str | None, Setting(show="FOLDER")] = None
    """Folder with a state folder for each server, so that counts survive a restart (default: everything is in
    memory)."""


def add_up(commands: Commands) -> None:
    """Add the command `memoire up`."""
    up = commands.add(
        "up",
        "run servers and proxies on this machine",
        _up,
        Up,
        TableOptions,
        ClusterCounts,
        DashboardOptions,
        add_keys,
    )
    add_settings(up, NodeSettings, "insecure")
    for group, _ in up.alternatives:
        group.required = True


class DemoCommand(CommandOptions):
    """Run servers, proxies, actors on a Gymnasium environment with discrete actions, a learner with a small NumPy
    network, and a dashboard, until the last 20 episodes return more than the goal. With --keep the demo continues;
    processes that you kill are restarted. Exit status: 0 goal reached, 1 not reached within the time limit.
    """

    env: Annotated[str, Setting()] = "CartPole-v1"
    """A Gymnasium environment with discrete actions."""
    actors: Annotated[int, NUMBER] = 2
    """Number of actor processes to run."""
    num_envs: Annotated[int, NUMBER] = 4
    """Number of environments of each actor."""
    seed: Annotated[int, Setting(show="S")] = 0
    """Seed of environments and networks (default: 0)."""
    goal: Annotated[float | None, Setting()] = None
    """Mean return to reach (default: the environment's threshold; CartPole: 195)."""
    seconds: Annotated[float, Setting()] = 60.0
    """Time limit, after which the demo gives up."""
    keep: Annotated[bool, Setting()] = False
    """Continue after the goal or the time limit, until Ctrl-C."""


def add_demo(commands: Commands) -> None:
    """Add the command `memoire demo`."""
    about = "run a cluster that learns to balance a pole, on this machine"
    commands.add("demo", about, _demo, DemoCommand, ClusterCounts, DashboardOptions, add_keys)


def _server(args: argparse.Namespace) -> int:
    pages = page_options(args)
    from memoire.net.sockets import use_io_threads
    from memoire.nodes import roles

    use_io_threads(args.io_threads)
    tables = tables_of(args)
    return roles.serve(
        args.endpoint,
        None if tables else roles.schema_of(args.schema, args.env, args.storage),
        args.set,
        tables=tables,
        run=args.run,
        name=args.name,
        room=changed_settings(args, Room),
        inference=args.inference,
        state=state_of(args),
        restore=args.restore,
        part=args.part,
        skip_damaged=args.skip_damaged,
        close_timeout=args.close_timeout,
        limits=args.limit,
        beside=args.beside,
        keys=args.keys,
        **pages,
    )


def state_of(args: argparse.Namespace) -> State | None:
    """Return the state folder's settings, or None without --state-dir."""
    options = changed_settings(args, State)
    if options and "folder" not in options:
        name = next(iter(options))
        raise ParameterError.with_text(
            f"--{declared(State)[name].setting.flag or name.replace('_', '-')} needs --state-dir FOLDER."
        )
    return State(**options) if options else None


def _proxy(args: argparse.Namespace) -> int:
    pages = page_options(args)
    from memoire.net.sockets import use_io_threads
    from memoire.nodes import roles

    use_io_threads(args.io_threads)
    if bool(args.servers) == bool(args.servers_file):
        raise ParameterError.with_text("Give either addresses of servers (SERVER ...), or --servers-file FILE.")
    return roles.relay(
        args.endpoint,
        [endpoint_of(server) for server in args.servers or ()],
        role=args.role,
        name=args.name,
        servers_file=args.servers_file,
        limits=args.limit,
        beside=args.beside,
        keys=args.keys,
        **pages,
    )


def _up(args: argparse.Namespace) -> int:
    check_endpoint(args, "--host", f"tcp://{args.host}:{args.port}")
    from memoire.nodes.local import run_cluster

    return run_cluster(nodes_of(args, args.host, insecure=args.insecure), dashboard=not args.no_dashboard)


@NotInstalled.explained("pip install 'memoire-rl[demo]'")
def _demo(args: argparse.Namespace) -> int:
    began = time.monotonic()
    demo = memoire.extension("memoire.rl.demo.demo")
    options = all_of(args, DemoCommand) | all_of(args, ClusterCounts)
    status: int = demo.Demo(demo.DemoOptions(**options, dashboard=not args.no_dashboard, keys=args.keys), began).run()
    return status
