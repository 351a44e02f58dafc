"""Commands that prepare a cluster or change one that lives: schema, plan, keys, run, drain, snapshot."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from memoire.errors import ParameterError
from memoire.nodes.settings import size

from .addresses import endpoint_of
from .options import SCHEMA, Commands, add_env, add_keys

ROLES = ("actor", "server", "learner", "reader", "proxy", "inference")
"""What a key may be for, as `memoire.security.keys` knows them; a test compares."""


def add_keys_of_a_cluster(actions: Commands) -> None:
    """Add both to the actions of `memoire keys`."""
    made = actions.add_parser(
        "in-cluster",
        help="in a Pod: make the Secrets of keys and tokens that are not there",
        description="Make the Secrets NAME-server, NAME-actor, ... and the Secret of tokens, through the API server of "
        "the cluster that this Pod runs in. What is there is kept. A Secret that is missing beside others is "
        "added, and the others learn of its key. The account needs get and patch of these Secrets, and create of "
        "Secrets in the namespace.",
    )
    _add_names(made)
    made.add_argument("--namespace", default="", help="of the Secrets (default: the Pod's own)")
    made.add_argument("--timeout", type=float, default=60.0, help="seconds for all of it (default: %(default)s)")
    made.add_argument(
        "--api-server",
        metavar="URL",
        default="",
        help="another one, such as that of `kubectl proxy`: http://127.0.0.1:8001",
    )
    made.set_defaults(command=_make)
    looked = actions.add_parser(
        "check",
        help="say whether mounted Secrets of keys and tokens are there and can be used",
        description="FOLDER has a folder for each role, with the own.pub of its Secret, and the folder tokens. Exit "
        "status: 0 all is well; 1 a Secret is missing, or cannot be used.",
    )
    looked.add_argument("folder", metavar="FOLDER", type=Path, help="where they are mounted")
    _add_names(looked)
    looked.add_argument(
        "--require",
        metavar="ROLE",
        action="append",
        default=[],
        choices=["inference"],
        help="a role whose Secret may be missing otherwise: inference",
    )
    looked.set_defaults(command=_check)


def _add_names(to: argparse.ArgumentParser) -> None:
    to.add_argument("--secrets", metavar="NAME", default="", help="what the Secrets of keys begin with (default: none)")
    to.add_argument("--tokens", metavar="NAME", default="", help="the Secret of tokens (default: none)")


def _make(given: argparse.Namespace) -> int:
    from . import in_cluster

    account = in_cluster.account(given.api_server, given.namespace, os.environ)
    return in_cluster.make(given.secrets, given.tokens, in_cluster.ApiServer(account, given.timeout))


def _check(given: argparse.Namespace) -> int:
    from . import in_cluster

    return in_cluster.check(given.secrets, given.tokens, given.folder, frozenset(given.require))


def add_schema_printer(commands: Commands) -> None:
    """`memoire schema`."""
    printer = commands.add_parser(
        "schema",
        help="what an entry of an environment is, as JSON",
        description="Print what the steps of a Gymnasium environment are made of, as a server's --schema takes it, and "
        "server.schema of the Helm chart: for servers that have no Gymnasium.",
    )
    which = printer.add_mutually_exclusive_group(required=True)
    which.add_argument("env", nargs="?", metavar="ENV", help="Gymnasium environment, such as CartPole-v1")
    which.add_argument("--env", dest="named", metavar="ENV", help="the same, as other commands have it")
    printer.set_defaults(command=_schema)


def add_run(commands: Commands) -> None:
    """`memoire run`."""
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
    add_keys(run)
    run.set_defaults(command=_run)


def add_plan(commands: Commands) -> None:
    """`memoire plan`."""
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
    state.add_argument("--schema", metavar="FILE", help=SCHEMA)
    add_env(state)
    plan.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter, such as frame_stack=4, multi_step=3 or cache_size=256; may be repeated",
    )
    numbers: tuple[tuple[str, Callable[[str], float], float, str], ...] = (
        ("--actors", int, 300, "actor processes"),
        ("--steps", float, 50.0, "environment steps of each actor in a second"),
        ("--learners", int, 10, "learners"),
        ("--batches", float, 10.0, "batches of each learner in a second"),
        ("--batch-size", int, 256, "samples of a batch"),
        ("--capacity", int, 1_000_000, "steps stored: at each actor with caches, at all servers with episodes"),
        ("--compressed", float, 1.0, "what `--set compression=lz4` leaves of the frames' bytes: of Atari 0.05"),
        ("--network", float, 10.0, "Gbit/s of the network of a server's or proxy's node"),
        ("--model-bytes", size, 0, "size of a model, such as 20MB"),
        ("--model-every", float, 10.0, "seconds between two models"),
    )
    for name, kind, default, words in numbers:
        plan.add_argument(name, type=kind, default=default, metavar="N", help=f"{words} (default: %(default)s)")
    plan.add_argument("--storage", metavar="KIND", default="caches", help="caches or episodes (default: %(default)s)")
    plan.add_argument("--embedded", action="store_true", help="each learner has a server in its own process")
    plan.set_defaults(command=_plan)


def add_drain(commands: Commands) -> None:
    """`memoire drain`."""
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
    add_keys(drain)
    drain.set_defaults(command=_drain)


def add_snapshot(commands: Commands) -> None:
    """`memoire snapshot`."""
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
    add_keys(one)
    one.set_defaults(command=_snapshot)


def add_key_tool(commands: Commands) -> None:
    """`memoire keys`."""
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
    add_keys_of_a_cluster(actions)


def _keys_new(given: argparse.Namespace) -> int:
    from . import keys

    return keys.new(given.folder, given.role, given.name, given.server, given.kubernetes)


def _keys_list(given: argparse.Namespace) -> int:
    from . import keys

    return keys.show(given.folder)


def _keys_export(given: argparse.Namespace) -> int:
    from . import keys

    return keys.export(given.folder, given.kubernetes)


def _keys_authorize(given: argparse.Namespace) -> int:
    from . import keys

    return keys.authorize(given.folder, given.files)


def _keys_revoke(given: argparse.Namespace) -> int:
    from . import keys

    return keys.revoke(given.folder, given.which)


def _run(given: argparse.Namespace) -> int:
    from memoire.reader.reader import Reader

    with Reader([endpoint_of(given.endpoint)], timeout=given.timeout, keys=given.keys) as reader:
        reader.begin_run(given.name, given.timeout)
        if given.finish:
            reader.finish(given.timeout)
        servers = ", ".join(reader.servers)
    print(f"memoire: run {given.name!r} is {'over' if given.finish else 'counted from now on'} at {servers}")
    return 0


def _schema(given: argparse.Namespace) -> int:
    from memoire.nodes.roles import schema_of

    print(schema_of(None, given.env or given.named).to_json())
    return 0


def _plan(given: argparse.Namespace) -> int:
    from memoire.nodes import roles

    from . import plan

    by_state = given.schema is None and given.env is None
    load = plan.Workload(
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
    from memoire.nodes import roles

    if given.show is not None and given.endpoint is None and given.to is None:
        return roles.show(given.show, check=given.check, as_json=given.json)
    if given.show is None and given.endpoint is not None and given.to is not None:
        return roles.order(endpoint_of(given.endpoint), given.to, timeout=given.timeout, keys=given.keys)
    raise ParameterError("ENDPOINT", given.endpoint, "an address with --to NAME, or left out with --show FILE")


def _drain(given: argparse.Namespace) -> int:
    from .drain import drain, drain_above

    if given.keep is not None:
        drain_above(given.server, given.keep, timeout=given.timeout, keys=given.keys)
    else:
        stay = [endpoint_of(each) for each in given.to]
        drain(endpoint_of(given.server), stay, timeout=given.timeout, keys=given.keys)
    return 0
