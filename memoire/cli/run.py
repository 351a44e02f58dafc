"""Commands that run nodes until somebody ends them: server, proxy and relay, up, demo.

`memoire launch`: a learner and actors of yours on this machine.
"""

import argparse
import time
from typing import TYPE_CHECKING, Annotated

import memoire
from memoire.arguments import NUMBER, SECONDS, Setting, declared
from memoire.errors import NotInstalled, ParameterError
from memoire.limits import Room
from memoire.nodes.settings import Counts, LaunchSettings, NodeSettings
from memoire.server.settings import State

from .options import (
    HERE,
    Board,
    Commands,
    NodeOptions,
    Options,
    Stored,
    add_keys,
    add_settings,
    all_of,
    check_endpoint,
    endpoint_of,
    page_options,
    said_of,
    storage,
)

if TYPE_CHECKING:
    from memoire.nodes.local import Nodes
    from memoire.tables.table import Table


class Launch(Options):
    """Run a learner and actors as child processes, and start each again that dies. Servers and a proxy run beside
    them with --env, --schema or --tables; else the learner is the server (MEMOIRE_LISTEN), or --endpoint says where
    one is. Programs find the address in $MEMOIRE_ENDPOINT, their number in $MEMOIRE_RANK (of $MEMOIRE_COUNT), a seed
    of their own in $MEMOIRE_SEED, and more (docs/guide.md). All of it ends when the learner ends. Exit status: 0 it
    did; 1 a program could not go on; 128 + n signal n came before.
    """

    learner: Annotated[str, Setting(place=True)]
    """A Python file or module, "-" for none; with arguments in quotes: "a.py --b 1"."""
    actor: Annotated[str, Setting(place=True)] = "-"
    """The same for actors (default: none)."""
    endpoint: Annotated[str | None, Setting(show="ADDRESS")] = None
    """Of a cluster that runs, such as tcp://proxy:5560."""
    run: Annotated[str | None, Setting()] = None
    """Name of the experiment, for the servers of --env, --schema or --tables."""
    state_dir: Annotated[str | None, Setting(show="FOLDER")] = None
    """Folder for the state of servers, or of the learner that is one (default: everything is in memory)."""


def add_launch(commands: Commands) -> None:
    """`memoire launch`."""
    about = "a learner and actors of yours on this machine"
    commands.add("launch", about, _launch, Launch, LaunchSettings, Stored, Counts, Board, add_keys)


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
    from memoire.nodes.roles import read_tables

    if given.tables is None:
        return None
    if given.set:
        raise ParameterError("--set", given.set, 'absent beside --tables: each table has "parameters" of its own')
    return read_tables(given.tables)


class ServerOptions(NodeOptions):
    """Run a server until SIGINT or SIGTERM. Caches come in on the next port, model notices go out on the one after
    it.
    """

    endpoint: Annotated[str, Setting()] = HERE
    """Address for requests; for other machines "tcp://*:5560", which takes --keys or --insecure."""
    run: Annotated[str | None, Setting()] = None
    """Name of the experiment (default: the one that the state folder counted last, or "default")."""
    name: Annotated[str | None, Setting()] = None
    """Name of this server, the same after a restart (default: host and port)."""
    inference: Annotated[tuple[str, ...], Setting(several="+", show="ADDRESS")] = ()
    """Of inference nodes that act for this server's clients, which are told; the host * is this server's."""
    close_timeout: Annotated[float, SECONDS] = 8.0
    """Time that it has to save its state and close its connections when it is told to end; three quarters of it are for
    what it holds."""
    restore: Annotated[tuple[str, ...], Setting(several="+", show="FILE")] = ()
    """Put these snapshots into the server at its start, once into each state folder; their parameters hold, unless
    --set says others."""
    part: Annotated[str | None, Setting(show="K/N")] = None
    """Take what belongs to the K-th of N servers that restore them."""
    skip_damaged: Annotated[bool, Setting()] = False
    """Restore what is whole of a damaged file."""


def add_server(commands: Commands) -> None:
    """`memoire server`."""
    kinds = ServerOptions, NodeSettings, Stored, Room, State, add_keys
    commands.add("server", "a replay server of its own", _server, *kinds, storage=storage)


class ProxyOptions(NodeOptions):
    """Run one stable address in front of several servers, until SIGINT or SIGTERM."""

    endpoint: Annotated[str, Setting()] = HERE
    """Address that clients connect to; for other machines "tcp://*:5560", which takes --keys or --insecure."""
    name: Annotated[str | None, Setting()] = None
    """Name that pages, logs and metrics show (default: a part of its id)."""
    servers: Annotated[tuple[str, ...], Setting(place=True, several="*", show="SERVER")] = ()
    """Address of a server, or of another proxy."""
    servers_file: Annotated[str | None, Setting(show="FILE")] = None
    """A file with one of these addresses on each line instead; read again when it changes: clients of servers that are
    taken off go to others."""


class RelayOptions(ProxyOptions):
    """Run a proxy on a Unix socket, for the processes of one pod, until SIGINT or SIGTERM."""

    endpoint: Annotated[str, Setting()] = "ipc:///run/memoire/relay"


def add_proxies(commands: Commands) -> None:
    """`memoire proxy` and `memoire relay`."""
    for role, kind, about in (
        ("proxy", ProxyOptions, "one stable address in front of several servers"),
        ("relay", RelayOptions, "a proxy on a Unix socket, for the processes of one pod"),
    ):
        commands.add(role, about, _proxy, kind, NodeSettings, add_keys).set_defaults(role=role)


class Up(Options):
    """Run servers and proxies as child processes and print the address that actors and learners connect to. Ctrl-C
    or SIGTERM ends all of them.
    """

    host: Annotated[str, Setting()] = "127.0.0.1"
    """Where to listen; "*" is every address, which takes --keys or --insecure."""
    port: Annotated[int, NUMBER] = 5560
    """First of three ports; 0 takes free ones."""
    run: Annotated[str | None, Setting()] = None
    """Name of the experiment (default: the one that the state folder counted last, or "default")."""
    state_dir: Annotated[str | None, Setting(show="FOLDER")] = None
    """Folder in which each server has one of its own; what was counted survives the cluster (default: everything is in
    memory)."""


def add_up(commands: Commands) -> None:
    """`memoire up`."""
    up = commands.add("up", "servers and proxies on this machine", _up, Up, Stored, Counts, Board, add_keys)
    add_settings(up, NodeSettings, "insecure")
    for group, _ in up.alternatives:
        group.required = True


class DemoOptions(Options):
    """Run servers, proxies, actors on a Gymnasium environment with discrete actions, a learner with a small NumPy
    network, and a dashboard, until the last 20 episodes return more than the goal. To look around, let it go on
    (--keep): whatever you kill comes back. Exit status: 0 reached, 1 not reached within the limit.
    """

    env: Annotated[str, Setting()] = "CartPole-v1"
    """A Gymnasium environment with discrete actions."""
    actors: Annotated[int, NUMBER] = 2
    """Actor processes."""
    num_envs: Annotated[int, NUMBER] = 4
    """Environments of each actor."""
    seed: Annotated[int, Setting(show="S")] = 0
    """Of environments and networks (default: 0)."""
    goal: Annotated[float | None, Setting()] = None
    """Mean return to reach (default: the environment's threshold; CartPole: 195)."""
    seconds: Annotated[float, Setting()] = 60.0
    """Give up after this time."""
    keep: Annotated[bool, Setting()] = False
    """Go on beyond goal and time, until Ctrl-C."""


def add_demo(commands: Commands) -> None:
    """`memoire demo`."""
    about = "a cluster that learns to balance a pole, on this machine"
    commands.add("demo", about, _demo, DemoOptions, Counts, Board, add_keys)


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
    said = all_of(given, DemoOptions) | all_of(given, Counts)
    status: int = demo.Demo(demo.Options(**said, dashboard=not given.no_dashboard, keys=given.keys), began).run()
    return status
