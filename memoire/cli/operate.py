"""Commands that prepare a cluster or change a running one: schema, plan, keys, run, drain, snapshot."""

from __future__ import annotations

import argparse
from typing import Annotated

from memoire.arguments import BYTES, NUMBER, Setting
from memoire.errors import ParameterError

from .options import CommandOptions, Commands, add_keys, endpoint_of

ROLES = ("actor", "server", "learner", "reader", "proxy", "inference")
"""Roles of keys, the same as in `memoire.security.keys`; a test compares them."""


class Secrets(CommandOptions):
    """Names of the Secrets of a cluster on Kubernetes."""

    secrets: Annotated[str, Setting(show="NAME")] = ""
    """Prefix of the names of the Secrets with keys (default: none)."""
    tokens: Annotated[str, Setting(show="NAME")] = ""
    """Name of the Secret with tokens (default: none)."""


class CreateSecrets(Secrets):
    """Create the Secrets NAME-server, NAME-actor, ... and the Secret with tokens, through the API server of the cluster
    that this Pod runs in. Existing keys and tokens are kept. If one Secret with keys is missing, it is created, and its
    key is added to the other Secrets. The account needs get and patch of these Secrets, and create of Secrets in the
    namespace.
    """

    namespace: Annotated[str, Setting()] = ""
    """Namespace of the Secrets (default: the Pod's own)."""
    timeout: Annotated[float, Setting()] = 60.0
    """Seconds for all requests together."""
    api_server: Annotated[str, Setting(show="URL")] = ""
    """Another API server, such as that of `kubectl proxy`: http://127.0.0.1:8001."""


class CheckSecrets(Secrets):
    """Check mounted Secrets. FOLDER has a folder for each role, with the own.pub of its Secret, and the folder tokens.
    Exit status: 0 all is well; 1 a Secret is missing or cannot be used.
    """

    folder: Annotated[str, Setting(place=True)]
    """Folder in which the Secrets are mounted."""
    require: Annotated[tuple[str, ...], Setting(several="append", show="ROLE", choices=("inference",))] = ()
    """A role whose Secret must exist; without this option the Secret of inference may be missing."""


class SchemaCommand(CommandOptions):
    """Print the schema of a Gymnasium environment's steps as JSON, for a server's --schema and for server.schema of the
    Helm chart: such servers need no Gymnasium.
    """


def add_schema_printer(commands: Commands) -> None:
    """Add the command `memoire schema`."""
    printer = commands.add("schema", "print the schema of an environment as JSON", _schema, SchemaCommand)
    which = printer.add_mutually_exclusive_group(required=True)
    which.add_argument("env", nargs="?", metavar="ENV", help="Gymnasium environment, such as CartPole-v1")
    which.add_argument("--env", dest="named", metavar="ENV", help="the same, spelled as in other commands")


def _schema(args: argparse.Namespace) -> int:
    from memoire.nodes.roles import schema_of

    print(schema_of(None, args.env or args.named).to_json())
    return 0


class RunCommand(CommandOptions):
    """Begin another run at every server behind the address. A new run counts from zero; a former run continues from its
    counts. The current run stays readable; clients report the rest of its counts and go on in the new run.
    """

    name: Annotated[str, Setting(place=True)]
    """Name of the run to begin or continue."""
    endpoint: Annotated[str, Setting(place=True)]
    """Address of a server or proxy, such as tcp://proxy:5560."""
    finish: Annotated[bool, Setting()] = False
    """Also declare this run finished, so that its actors end."""
    timeout: Annotated[float, Setting()] = 10.0
    """Seconds to wait for servers."""


def add_run(commands: Commands) -> None:
    """Add the command `memoire run`."""
    commands.add("run", "begin another run on a running cluster", _run, RunCommand, add_keys)


def _run(args: argparse.Namespace) -> int:
    from memoire.reader.reader import Reader

    with Reader([endpoint_of(args.endpoint)], timeout=args.timeout, keys=args.keys) as reader:
        reader.begin_run(args.name, args.timeout)
        if args.finish:
            reader.finish(args.timeout)
        servers = ", ".join(reader.servers)
    print(f"memoire: run {args.name!r} is {'finished' if args.finish else 'the current run'} at {servers}")
    return 0


class PlanCommand(CommandOptions):
    """Print the bytes, memory, cores and Pods that a load takes. Bytes follow from the schema and its parameters, cores
    from costs measured on two cores of an AMD EPYC (docs/operations.md). Nothing is started.
    """

    state: Annotated[str, Setting(show="SHAPE", group="stored")] = "84x84"
    """Shape of one frame, with :DTYPE if that is not uint8, such as 64:float32."""
    schema: Annotated[str | None, Setting(show="FILE", group="stored")] = None
    """JSON file that describes an entry, or the JSON itself."""
    env: Annotated[str | None, Setting(group="stored")] = None
    """A Gymnasium environment, such as CartPole-v1, whose observations, actions and rewards are stored."""
    set: Annotated[tuple[str, ...], Setting(several="append", show="NAME=VALUE")] = ()
    """A parameter, such as frame_stack=4, multi_step=3 or cache_size=256; may be repeated."""
    actors: Annotated[int, NUMBER] = 300
    """Number of actor processes in the cluster."""
    steps: Annotated[float, Setting(show="N")] = 50.0
    """Environment steps of each actor per second."""
    learners: Annotated[int, NUMBER] = 10
    """Number of learner processes in the cluster."""
    batches: Annotated[float, Setting(show="N")] = 10.0
    """Batches of each learner per second."""
    batch_size: Annotated[int, NUMBER] = 256
    """Number of samples in a batch."""
    capacity: Annotated[int, NUMBER] = 1_000_000
    """Stored steps: at each actor with caches, at all servers together with episodes."""
    compressed: Annotated[float, Setting(show="N")] = 1.0
    """Share of the frames' bytes that remains after `--set compression=lz4`, such as 0.05 for Atari."""
    network: Annotated[float, Setting(show="N")] = 10.0
    """Network speed of a server's or proxy's machine, in Gbit/s."""
    model_bytes: Annotated[int, BYTES] = 0
    """Size of a model, such as 20MB (default: 0)."""
    model_every: Annotated[float, Setting(show="N")] = 10.0
    """Seconds between two published models."""
    storage: Annotated[str, Setting(show="KIND")] = "caches"
    """Kind of table: caches or episodes."""
    embedded: Annotated[bool, Setting()] = False
    """Each learner process runs a server of its own."""


def add_plan(commands: Commands) -> None:
    """Add the command `memoire plan`."""
    commands.add("plan", "calculate how large a cluster has to be", "plan.show", PlanCommand)


class Drain(CommandOptions):
    """Send a server's clients to other servers, wait until they have moved, and copy the server's accounts to another
    server. Afterwards the server may be stopped: the cluster's totals stay the same. The command may be repeated.
    """

    server: Annotated[str, Setting(place=True)]
    """Own address of the server that leaves; with --keep, {n} stands for its number."""
    to: Annotated[tuple[str, ...], Setting(several="+", show="SERVER", group="stay", needed=True)] = ()
    """Addresses of servers that stay."""
    keep: Annotated[int | None, Setting(group="stay", needed=True)] = None
    """Drain each server numbered N or above to the servers below N."""
    timeout: Annotated[float, Setting()] = 60.0
    """Seconds for all steps together."""


def add_drain(commands: Commands) -> None:
    """Add the command `memoire drain`."""
    about = "remove a server from a cluster, and keep its counts"
    commands.add("drain", about, _drain, Drain, add_keys)


def _drain(args: argparse.Namespace) -> int:
    from .drain import drain, drain_above

    if args.keep is not None:
        drain_above(args.server, args.keep, timeout=args.timeout, keys=args.keys)
    else:
        stay = [endpoint_of(each) for each in args.to]
        drain(endpoint_of(args.server), stay, timeout=args.timeout, keys=args.keys)
    return 0


class SnapshotCommand(CommandOptions):
    """Make every server behind an address write its contents to its state folder (snapshots/NAME.snapshot) without a
    pause; or describe a snapshot file. `memoire server --restore` restores such files. Exit status: 0 all is well;
    1 no server was asked, or the file is not a snapshot; 3 a server did not write its file, or the file is damaged.
    """

    endpoint: Annotated[str | None, Setting(place=True)] = None
    """Address of a server or proxy, such as tcp://proxy:5560."""
    to: Annotated[str | None, Setting(show="NAME")] = None
    """Name of the files to write."""
    show: Annotated[str | None, Setting(show="FILE")] = None
    """Describe this snapshot file instead."""
    check: Annotated[bool, Setting()] = False
    """With --show: read the whole file and compare every checksum."""
    json: Annotated[bool, Setting()] = False
    """With --show: print one JSON object."""
    timeout: Annotated[float, Setting()] = 600.0
    """Seconds to wait until all files are written."""


def add_snapshot(commands: Commands) -> None:
    """Add the command `memoire snapshot`."""
    about = "save the contents of a cluster's servers, or describe a snapshot file"
    commands.add("snapshot", about, _snapshot, SnapshotCommand, add_keys)


def _snapshot(args: argparse.Namespace) -> int:
    from memoire.nodes import roles

    if args.show is not None and args.endpoint is None and args.to is None:
        return roles.show(args.show, check=args.check, as_json=args.json)
    if args.show is None and args.endpoint is not None and args.to is not None:
        return roles.order_snapshots(endpoint_of(args.endpoint), args.to, timeout=args.timeout, keys=args.keys)
    raise ParameterError.with_text("Give either ENDPOINT and --to NAME, to save a snapshot, or --show FILE alone.")


class KeysFolder(CommandOptions):
    """List the public keys of a keys folder."""

    folder: Annotated[str, Setting(place=True)]
    """Keys folder of a process or of a cluster."""


class NewKeys(CommandOptions):
    """Create the keys of a whole cluster, as folders or as Secrets in YAML; with --role, create one more key."""

    folder: Annotated[str | None, Setting(place=True)] = None
    """Folder to write the keys to."""
    role: Annotated[str | None, Setting(choices=ROLES)] = None
    """Create one keys folder, for this role."""
    name: Annotated[str, Setting()] = ""
    """Name of the key; a server treats keys of the same role and name as the same principal."""
    server: Annotated[str | None, Setting(show="FILE")] = None
    """With --role: a file with the public keys of the servers and proxies to connect to, or a keys folder."""
    kubernetes: Annotated[str | None, Setting(show="NAME")] = None
    """Print Secrets NAME-server, NAME-actor, ... as YAML instead."""


class ExportKeys(KeysFolder):
    """Print keys as Kubernetes Secrets in YAML, with their secret halves."""

    kubernetes: Annotated[str, Setting(show="NAME", needed=True)]
    """Prefix of the names of the Secrets: NAME-server, NAME-actor, ..."""


class AuthorizeKeys(CommandOptions):
    """Authorize keys at a server or proxy, or at all servers and proxies of a cluster."""

    folder: Annotated[str, Setting(place=True)]
    """Keys folder of a server or proxy, or of a cluster."""
    files: Annotated[tuple[str, ...], Setting(place=True, several="+", show="FILE")]
    """Files of public keys, or keys folders."""


class RevokeKeys(CommandOptions):
    """Revoke keys at a server or proxy, or at all servers and proxies of a cluster, and disconnect them."""

    folder: Annotated[str, Setting(place=True)]
    """Keys folder of a server or proxy, or of a cluster."""
    which: Annotated[tuple[str, ...], Setting(place=True, several="+", show="KEY")]
    """Fingerprint, or ROLE/NAME for all keys of that role and name."""


class KeyTool(CommandOptions):
    """Manage the keys by which processes authenticate each other. Each process has a keys folder; a cluster's folder
    has one for each role. Running processes notice changes within seconds.
    """


def add_key_tool(commands: Commands) -> None:
    """Add the command `memoire keys`."""
    tool = commands.add("keys", "create, authorize and revoke keys", None, KeyTool)
    actions = tool.add_subparsers(title="actions", required=True, metavar="ACTION")
    actions.add("new", "create the keys of a whole cluster, or one more with --role", "keys.new", NewKeys)
    actions.add("list", "list the public keys of a keys folder", "keys.show", KeysFolder)
    actions.add("export", "print keys as Kubernetes Secrets, with secret halves", "keys.export", ExportKeys)
    actions.add("authorize", "authorize keys", "keys.authorize", AuthorizeKeys)
    actions.add("revoke", "revoke keys and disconnect them", "keys.revoke", RevokeKeys)
    about = "in a Pod: create missing Secrets of keys and tokens"
    actions.add("in-cluster", about, "keys.make_in_cluster", CreateSecrets)
    about = "check that mounted Secrets of keys and tokens exist and can be used"
    actions.add("check", about, "keys.check", CheckSecrets)
