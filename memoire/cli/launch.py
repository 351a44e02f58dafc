"""`memoire launch`: a learner and actors of yours on this machine."""

import argparse
from typing import TYPE_CHECKING

from memoire.errors import ParameterError

from .addresses import endpoint_of
from .options import Commands, add_counts, add_keys, add_no_dashboard, add_schema, add_state

if TYPE_CHECKING:
    from memoire.nodes.local_cluster import Nodes
    from memoire.pool.tables import Table


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
    launch.add_argument("--actors", type=int, default=1, metavar="N", help="actor processes (default: %(default)s)")
    launch.add_argument("--seed", type=int, default=0, metavar="S", help="that $MEMOIRE_SEED follows from")
    launch.add_argument("--endpoint", metavar="ADDRESS", help="of a cluster that runs, such as tcp://proxy:5560")
    add_schema(launch, is_required=False)
    add_counts(launch)
    launch.add_argument(
        "--port",
        type=int,
        default=5560,
        help="first of three ports of the cluster's address; 0 takes free ones (default: %(default)s)",
    )
    launch.add_argument("--run", help="name of the experiment, for the servers of --env, --schema or --tables")
    add_state(launch, "folder for the state of servers, or of the learner that is one")
    launch.add_argument("--logs", metavar="FOLDER", help="keep what each process prints in FOLDER/NAME.log, too")
    launch.add_argument("--quiet", action="store_true", help="do not show what they print")
    launch.add_argument(
        "--restarts",
        type=int,
        default=10,
        metavar="N",
        help="starts of a program that dies again and again, each time within a minute (default: %(default)s)",
    )
    launch.add_argument(
        "--finish-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="that actors have to end once the learner has (default: %(default)s)",
    )
    add_no_dashboard(launch)
    add_keys(launch)
    launch.set_defaults(command=_launch)


def _launch(given: argparse.Namespace) -> int:
    from memoire.nodes.launch import Options, launch, program

    return launch(
        Options(
            learner=program("LEARNER", given.learner),
            actor=program("ACTOR", given.actor),
            actors=given.actors,
            nodes=_nodes(given),
            endpoint=None if given.endpoint is None else endpoint_of(given.endpoint),
            port=given.port,
            seed=given.seed,
            env=given.env,
            keys=given.keys,
            state_dir=given.state_dir,
            logs=given.logs,
            restarts=given.restarts,
            finish_timeout=given.finish_timeout,
            dashboard=not given.no_dashboard,
            quiet=given.quiet,
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
    from memoire.nodes.local_cluster import Nodes

    roles.read_parameters(given.set)
    return Nodes(
        schema=None if tables_of(given) else roles.schema_of(given.schema, given.env),
        settings=given.set,
        tables=given.tables,
        servers=given.servers,
        proxies=given.proxies,
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
