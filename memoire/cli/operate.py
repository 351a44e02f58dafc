"""Commands that prepare a cluster or change one that lives: schema, plan, keys, run, drain, snapshot."""

from __future__ import annotations

import argparse
from typing import Annotated

from memoire.arguments import BYTES, NUMBER, Setting
from memoire.errors import ParameterError

from .options import Commands, Options, add_keys, endpoint_of

ROLES = ("actor", "server", "learner", "reader", "proxy", "inference")
"""What a key may be for, as `memoire.security.keys` knows them; a test compares."""


class Secrets(Options):
    """Which Secrets of a cluster on Kubernetes are meant."""

    secrets: Annotated[str, Setting(show="NAME")] = ""
    """What the Secrets of keys begin with (default: none)."""
    tokens: Annotated[str, Setting(show="NAME")] = ""
    """The Secret of tokens (default: none)."""


class InCluster(Secrets):
    """Make the Secrets NAME-server, NAME-actor, ... and the Secret of tokens, through the API server of the cluster
    that this Pod runs in. What is there is kept. A Secret that is missing beside others is added, and the others
    learn of its key. The account needs get and patch of these Secrets, and create of Secrets in the namespace.
    """

    namespace: Annotated[str, Setting()] = ""
    """Of the Secrets (default: the Pod's own)."""
    timeout: Annotated[float, Setting()] = 60.0
    """Seconds for all of it."""
    api_server: Annotated[str, Setting(show="URL")] = ""
    """Another one, such as that of `kubectl proxy`: http://127.0.0.1:8001."""


class CheckSecrets(Secrets):
    """FOLDER has a folder for each role, with the own.pub of its Secret, and the folder tokens. Exit status: 0 all
    is well; 1 a Secret is missing, or cannot be used.
    """

    folder: Annotated[str, Setting(place=True)]
    """Where they are mounted."""
    require: Annotated[tuple[str, ...], Setting(several="append", show="ROLE", choices=("inference",))] = ()
    """A role whose Secret may be missing otherwise: inference."""


class Schema(Options):
    """Print what the steps of a Gymnasium environment are made of, as a server's --schema takes it, and
    server.schema of the Helm chart: for servers that have no Gymnasium.
    """


def add_schema_printer(commands: Commands) -> None:
    """`memoire schema`."""
    printer = commands.add("schema", "what an entry of an environment is, as JSON", _schema, Schema)
    which = printer.add_mutually_exclusive_group(required=True)
    which.add_argument("env", nargs="?", metavar="ENV", help="Gymnasium environment, such as CartPole-v1")
    which.add_argument("--env", dest="named", metavar="ENV", help="the same, as other commands have it")


def _schema(given: argparse.Namespace) -> int:
    from memoire.nodes.roles import schema_of

    print(schema_of(None, given.env or given.named).to_json())
    return 0


class Run(Options):
    """Count another run from now on, at every server behind the address: from zero, or where it ended. The former
    run stays readable; clients say the rest about it and go on in the new one.
    """

    name: Annotated[str, Setting(place=True)]
    """Of the run."""
    endpoint: Annotated[str, Setting(place=True)]
    """Of a server or proxy, such as tcp://proxy:5560."""
    finish: Annotated[bool, Setting()] = False
    """Declare this run over, too: actors end by themselves."""
    timeout: Annotated[float, Setting()] = 10.0
    """Seconds to wait for servers."""


def add_run(commands: Commands) -> None:
    """`memoire run`."""
    commands.add("run", "begin another run on a living cluster", _run, Run, add_keys)


def _run(given: argparse.Namespace) -> int:
    from memoire.reader.reader import Reader

    with Reader([endpoint_of(given.endpoint)], timeout=given.timeout, keys=given.keys) as reader:
        reader.begin_run(given.name, given.timeout)
        if given.finish:
            reader.finish(given.timeout)
        servers = ", ".join(reader.servers)
    print(f"memoire: run {given.name!r} is {'over' if given.finish else 'counted from now on'} at {servers}")
    return 0


class Plan(Options):
    """Print the bytes, memory, cores and Pods that a load takes: bytes follow from the schema and its parameters,
    cores from what things cost on two cores of an AMD EPYC (docs/scaling.md). Nothing is started.
    """

    state: Annotated[str, Setting(show="SHAPE", group="stored")] = "84x84"
    """Of one frame, with :DTYPE where it is not uint8, such as 64:float32."""
    schema: Annotated[str | None, Setting(show="FILE", group="stored")] = None
    """JSON file that describes an entry, or the JSON itself."""
    env: Annotated[str | None, Setting(group="stored")] = None
    """A Gymnasium environment, such as CartPole-v1, whose observations, actions and rewards are stored."""
    set: Annotated[tuple[str, ...], Setting(several="append", show="NAME=VALUE")] = ()
    """A parameter, such as frame_stack=4, multi_step=3 or cache_size=256; may be repeated."""
    actors: Annotated[int, NUMBER] = 300
    """Actor processes."""
    steps: Annotated[float, Setting(show="N")] = 50.0
    """Environment steps of each actor in a second."""
    learners: Annotated[int, NUMBER] = 10
    """Learners."""
    batches: Annotated[float, Setting(show="N")] = 10.0
    """Batches of each learner in a second."""
    batch_size: Annotated[int, NUMBER] = 256
    """Samples of a batch."""
    capacity: Annotated[int, NUMBER] = 1_000_000
    """Steps stored: at each actor with caches, at all servers with episodes."""
    compressed: Annotated[float, Setting(show="N")] = 1.0
    """What `--set compression=lz4` leaves of the frames' bytes: of Atari 0.05."""
    network: Annotated[float, Setting(show="N")] = 10.0
    """Speed of the network of a server's or proxy's node, in Gbit/s."""
    model_bytes: Annotated[int, BYTES] = 0
    """Size of a model, such as 20MB (default: 0)."""
    model_every: Annotated[float, Setting(show="N")] = 10.0
    """Seconds between two models."""
    storage: Annotated[str, Setting(show="KIND")] = "caches"
    """Caches or episodes."""
    embedded: Annotated[bool, Setting()] = False
    """Each learner has a server in its own process."""


def add_plan(commands: Commands) -> None:
    """`memoire plan`."""
    commands.add("plan", "how large a cluster has to be, on paper", "plan.show", Plan)


class Drain(Options):
    """Send a server's clients to other servers, wait until they are there, and copy what it has counted to one of
    these. Then it may be stopped: the cluster's totals stay as they are. May be done again.
    """

    server: Annotated[str, Setting(place=True)]
    """Own address of the server that leaves; with --keep, {n} stands for its number."""
    to: Annotated[tuple[str, ...], Setting(several="+", show="SERVER", group="stay", needed=True)] = ()
    """Addresses of servers that stay."""
    keep: Annotated[int | None, Setting(group="stay", needed=True)] = None
    """Drain each server numbered N or above, if there is one, to those below."""
    timeout: Annotated[float, Setting()] = 60.0
    """Seconds in all."""


def add_drain(commands: Commands) -> None:
    """`memoire drain`."""
    about = "take a server out of a cluster, with nothing it has counted lost"
    commands.add("drain", about, _drain, Drain, add_keys)


def _drain(given: argparse.Namespace) -> int:
    from .drain import drain, drain_above

    if given.keep is not None:
        drain_above(given.server, given.keep, timeout=given.timeout, keys=given.keys)
    else:
        stay = [endpoint_of(each) for each in given.to]
        drain(endpoint_of(given.server), stay, timeout=given.timeout, keys=given.keys)
    return 0


class Snapshot(Options):
    """Have every server behind an address write what it holds into its own state folder (snapshots/NAME.snapshot)
    while everything goes on; or say what a file holds. `memoire server --restore` takes such files. Exit status: 0
    all is well; 1 nothing was ordered, or that is no snapshot; 3 a server has not written its file, or the file is
    damaged.
    """

    endpoint: Annotated[str | None, Setting(place=True)] = None
    """Of a server or proxy, such as tcp://proxy:5560."""
    to: Annotated[str | None, Setting(show="NAME")] = None
    """Name of the files."""
    show: Annotated[str | None, Setting(show="FILE")] = None
    """Say what this file holds instead."""
    check: Annotated[bool, Setting()] = False
    """With --show: read it all and compare every checksum."""
    json: Annotated[bool, Setting()] = False
    """With --show: print one JSON object."""
    timeout: Annotated[float, Setting()] = 600.0
    """Seconds to wait for files."""


def add_snapshot(commands: Commands) -> None:
    """`memoire snapshot`."""
    about = "save what the servers of a cluster hold, or look into such a file"
    commands.add("snapshot", about, _snapshot, Snapshot, add_keys)


def _snapshot(given: argparse.Namespace) -> int:
    from memoire.nodes import roles

    if given.show is not None and given.endpoint is None and given.to is None:
        return roles.show(given.show, check=given.check, as_json=given.json)
    if given.show is None and given.endpoint is not None and given.to is not None:
        return roles.order(endpoint_of(given.endpoint), given.to, timeout=given.timeout, keys=given.keys)
    raise ParameterError("ENDPOINT", given.endpoint, "an address with --to NAME, or left out with --show FILE")


class KeysFolder(Options):
    """What is in a keys folder; no secret is shown."""

    folder: Annotated[str, Setting(place=True)]
    """Of a process, or of a cluster."""


class NewKeys(Options):
    """Make the keys of a whole cluster, as folders or as Secrets in YAML; or with --role one more."""

    folder: Annotated[str | None, Setting(place=True)] = None
    """Where to write them."""
    role: Annotated[str | None, Setting(choices=ROLES)] = None
    """Make one keys folder, for this role."""
    name: Annotated[str, Setting()] = ""
    """Of the key: keys of one role and name are the same to a server."""
    server: Annotated[str | None, Setting(show="FILE")] = None
    """With --role: public keys of what it dials, or a keys folder."""
    kubernetes: Annotated[str | None, Setting(show="NAME")] = None
    """Print Secrets NAME-server, NAME-actor, ... as YAML instead."""


class ExportKeys(KeysFolder):
    """Print keys as Kubernetes Secrets: secret keys, too."""

    kubernetes: Annotated[str, Setting(show="NAME", needed=True)]
    """Of the Secrets, which are called NAME-server and so on."""


class AuthorizeKeys(Options):
    """Let keys in."""

    folder: Annotated[str, Setting(place=True)]
    """Of a server or proxy, or of a cluster."""
    files: Annotated[tuple[str, ...], Setting(place=True, several="+", show="FILE")]
    """Public keys, or keys folders."""


class RevokeKeys(Options):
    """Let keys in no more, and cut them off."""

    folder: Annotated[str, Setting(place=True)]
    """Of a server or proxy, or of a cluster."""
    which: Annotated[tuple[str, ...], Setting(place=True, several="+", show="KEY")]
    """Fingerprint, or ROLE/NAME for all keys of that name."""


class KeyTool(Options):
    """Keys by which processes know each other, in folders: one for each process. A cluster's folder has one for each
    role below it. What is changed is noticed by processes that run, within seconds.
    """


def add_key_tool(commands: Commands) -> None:
    """`memoire keys`."""
    tool = commands.add("keys", "make keys, and say whose are let in", None, KeyTool)
    actions = tool.add_subparsers(title="actions", required=True, metavar="ACTION")
    actions.add("new", "new keys of a whole cluster, or with --role one more", "keys.new", NewKeys)
    actions.add("list", "what is in a keys folder; no secret is shown", "keys.show", KeysFolder)
    actions.add("export", "print them as Kubernetes Secrets: secret keys, too", "keys.export", ExportKeys)
    actions.add("authorize", "let keys in", "keys.authorize", AuthorizeKeys)
    actions.add("revoke", "let keys in no more, and cut them off", "keys.revoke", RevokeKeys)
    about = "in a Pod: make the Secrets of keys and tokens that are not there"
    actions.add("in-cluster", about, "keys.make_in_cluster", InCluster)
    about = "say whether mounted Secrets of keys and tokens are there and can be used"
    actions.add("check", about, "keys.check", CheckSecrets)
