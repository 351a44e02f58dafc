"""A server, proxy or relay as a process of its own: what `memoire server`, `memoire proxy` and `memoire relay` run.

Alone, such a process prints its address and works until SIGINT or SIGTERM; launched (see `launch`), it says where it is
through its tether, and reports how it fares.

Snapshots from the command line: ordered at every server of a cluster, looked into, and given to servers at their
start.

The tables of a server, read from JSON: what `memoire server --tables` is given, the name of a file or its content.

    {
      "online": {"env": "CartPole-v1", "multi_step": 3, "parameters": {"priority_exponent": 0.7}},
      "demo":   {"schema": "demo.json", "byte_limit": "200MB"},
      "math":   {"schema": "answer.json", "storage": "prompts", "group": 8, "score": "variance", "lease": 300}
    }

Each table has a schema (its JSON form, or the name of a file with it, beside this one) or the Gymnasium environment
that it is read off; and any of the settings of `memoire.Table`. Fields of its parameters are among these, or stand
together under "parameters".
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from memoire.arguments import mapping, refuse_unknown
from memoire.disk import snapshots
from memoire.errors import EndpointError, MemoireError, ParameterError, SchemaError
from memoire.limits import LIMITS, Limits
from memoire.net.process import raise_limit
from memoire.proxy.proxy import Proxy
from memoire.reader.reader import Reader
from memoire.replay.parameters import NAMES, Parameters
from memoire.replay.sampling import USUAL
from memoire.replay.schema import Schema
from memoire.security.access import Tokens
from memoire.security.keys import Given, Keys
from memoire.server.server import Server
from memoire.server.settings import Endpoints, State
from memoire.tables import registry
from memoire.tables.base import HearsSums
from memoire.tables.table import Table, table_names, table_settings
from memoire.wire.messages import TRAIN

from .http import NodePages
from .pages import security
from .settings import NotASize, env_schema, size
from .supervision import LauncherLine, say

INCOMPLETE = 3
"""Exit status when a server has not written its file, or a file is damaged."""


def order(
    endpoint: str, name: str, *, timeout: float = 600.0, keys: Given = None, say: Callable[[str], object] = print
) -> int:
    """Have every server behind this address write a snapshot into its own state folder; the exit status.

    Raises:
        MemoireTimeout: an address on the way leads to nobody, and nothing was ordered.
    """
    with Reader([endpoint], timeout=min(10.0, timeout), keys=keys) as reader:
        told = reader.snapshot(name, timeout)
    failed = 0
    for server, answer in sorted(told.items()):
        if isinstance(answer, MemoireError):
            failed += 1
            say(f"{server}: not written: {answer}")
            continue
        held = _held(msgspec.structs.asdict(answer))
        say(f"{server}: {answer.path}: {held}, {answer.bytes} bytes, {answer.seconds:.1f} s")
    return INCOMPLETE if failed else 0


def _held(counts: Mapping[str, int]) -> str:
    words = [f"{counts['episodes']} episodes of {counts['entries']} entries"] if counts["episodes"] else []
    words += [f"{counts['rows']} rows"] if counts.get("rows") else []
    if counts["caches"] or not words:
        words.insert(0, f"{counts['caches']} caches of {counts['samples']} samples")
    return " and ".join(words)


def show(path: str, *, check: bool = False, as_json: bool = False, say: Callable[[str], object] = print) -> int:
    """Print what a file holds; the exit status.

    Raises:
        DataError: it cannot be read, or is no snapshot.
    """
    found = snapshots.facts(path, check=check)
    if as_json:
        say(json.dumps(found))
    else:
        taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["taken"]))
        say(f"{path}: server {found['server']!r}, run {found['run']!r}, taken at {taken}, {found['bytes']} bytes")
        for table in found["tables"]:
            say(_line(table))
        if not found["complete"] and not found["damage"]:
            say("It is not complete: the server had to end while it was written.")
        if found["damage"]:
            say(f"It is damaged: {found['damage']}.")
    return INCOMPLETE if found["damage"] else 0


def _line(table: dict[str, Any]) -> str:
    if "caches" not in table:
        return f"  {table['name']}: {table['storage']}; how many is not known"
    held = _held(table)
    is_left = registry.offers(table["storage"], HearsSums)
    left = f", {table['unused']} not drawn yet, of {table['clients']} clients" if is_left else ""
    return f"  {table['name']}: {held}{left}, {table['bytes']} bytes"


def part_of(given: str | None) -> tuple[int, int]:
    """(rank, of) of "K/N": the K-th of N servers, counted from 1."""
    if given is None:
        return 0, 1
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", given)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ParameterError("--part", given, "K/N for the K-th of N servers, such as 1/3, 2/3 and 3/3")
    return int(found[1]) - 1, int(found[2])


def put_back(server: Server, paths: Sequence[str], part: str | None, *, configure: bool, skip_damaged: bool) -> None:
    """Put files into a server that starts; what came of it goes to standard error. Files that were restored into its
    state folder before are left out.

    Raises:
        DataError, SnapshotMismatch: a file cannot be read, or does not fit.
        ParameterError: the part is none.
    """
    done = server.restore(paths, part=part_of(part), configure=configure, skip_damaged=skip_damaged, once=True)
    left_out = len(paths) - done.files
    known = f"; {left_out} of the files were restored here before" if left_out else ""
    print(f"memoire server: restored {done}{known}", file=sys.stderr, flush=True)


REPORT_INTERVAL = 0.25
"""Seconds between two reports of a launched node."""
POLL_INTERVAL = 0.02
"""Seconds between two looks whether a launched proxy has met its servers."""
MEETING_TIMEOUT = 10.0
"""Seconds that a launched proxy waits for servers that it has not met: one of them may be gone for good."""
CLOSE_TIMEOUT = 8.0
"""Seconds that a server's process has to answer, save and say goodbye once it is told to end, unless told others."""
PROXY_KEYS = {"proxy": "proxy", "relay": "actor"}
"""Whose keys it takes of a cluster's folder: a relay is who is behind it."""
RECENT = 100
"""Newest closed episodes that a server reports."""


def schema_of(given: str | None, env: str | None, storage: str | None = None) -> Schema:
    """The schema in a JSON file, in `given` itself where that is JSON, or of a Gymnasium environment.

    Args:
        storage: Of its table: columns of some kinds have no roles.

    Raises:
        ParameterError: neither is given.
    """
    kind = registry.named(storage or registry.DEFAULT)
    if given is None and env is None:
        if not kind.has_columns:
            return kind.schema_from(None)
        raise ParameterError("--schema", None, "a file with what is stored; or give --env or --tables")
    if given is None:
        return _of_environment(str(env))
    if given.lstrip().startswith("{"):
        return kind.schema_class().from_json(given)
    try:
        text = Path(given).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SchemaError(f"cannot read the schema from {given!r}: {reason}. Give a JSON file (--schema).") from error
    return kind.schema_class().from_json(text)


def _of_environment(env: str) -> Schema:
    try:
        return env_schema(env)
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        raise SchemaError(
            f"the schema of {env!r} (--env) takes Gymnasium, which is not installed here: pip install "
            f"'memoire-rl[demo]'. Or, as images of servers do without it, run `memoire schema {env}` where it is, and "
            f"give what that prints (--schema; in the Helm chart, server.schema)."
        ) from error


def read_tables(path: str) -> dict[str, Table]:
    """The tables in this file, or in `path` itself where that is JSON, in their order.

    Raises:
        ParameterError: it cannot be read, or says something that is no table; names which.
    """
    is_content = path.lstrip().startswith("{")
    try:
        given = json.loads(path if is_content else Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError("--tables", path, f"a JSON file that can be read: {error}") from error
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or brackets as deep
        raise ParameterError("--tables", path, f"a JSON file: {error}") from error
    if not isinstance(given, dict) or not given:
        raise ParameterError("--tables", path, 'an object with a table under each name, such as {"online": {...}}')
    where, folder = ("--tables", Path()) if is_content else (f"--tables {path}", Path(path).parent)
    return {name: _table(f"{where}: {name}", settings, folder) for name, settings in given.items()}


def _table(where: str, settings: Any, folder: Path) -> Table:
    if not isinstance(settings, dict):
        raise ParameterError(where, settings, "an object with the settings of a table")
    known = table_settings(settings)
    refuse_unknown(where, settings, {"schema", "env", *known})
    try:
        has_columns = registry.named(settings.get("storage", registry.DEFAULT)).has_columns
    except (MemoireError, TypeError) as error:
        raise ParameterError(where, settings["storage"], f"the name of a kind of table as storage: {error}") from error
    if has_columns and ("schema" in settings) == ("env" in settings):
        raise ParameterError(where, sorted(settings), '"schema" or "env", one of both')
    try:
        if isinstance(settings.get("byte_limit"), str):
            settings = settings | {"byte_limit": size(settings["byte_limit"])}
        return Table(
            _schema(settings, folder) if has_columns or {"schema", "env"} & settings.keys() else None,
            parameters=parameters_from(settings.get("parameters", {})),
            **{name: value for name, value in settings.items() if name in known - {"parameters"}},
        )
    except (MemoireError, OSError, ValueError, TypeError) as error:
        raise ParameterError(where, "these settings", f"those of a table: {error}") from error


def _schema(settings: Mapping[str, Any], folder: Path) -> Schema:
    if "env" in settings:
        return env_schema(str(settings["env"]))
    given, kind = settings["schema"], registry.named(settings.get("storage", registry.DEFAULT)).schema_class()
    return kind.from_json(given if isinstance(given, dict) else (folder / given).read_text(encoding="utf-8-sig"))


def parameters_from(changes: Mapping[str, Any]) -> Parameters:
    """Parameters that differ from the defaults in these, as JSON has them: lists for tuples.

    Raises:
        ParameterError: there is none of this name, or not of this value.
    """
    plain = USUAL
    taken = {}
    for name, value in mapping("parameters", changes).items():
        is_vector = isinstance(getattr(plain, name, None), tuple)
        taken[name] = (tuple(value) if isinstance(value, list) else (value,)) if is_vector else value
    return plain.replace(**taken)


def read_parameters(settings: Sequence[str]) -> Parameters:
    """Parameters from "name=value" texts, values in JSON ("multi_step=3", "discount=[0.99]", "start=repeat")."""
    return parameters_from(_settings("--set", settings, NAMES, such_as="multi_step=3"))


def read_table(settings: Sequence[str], storage: str | None = None) -> dict[str, Any]:
    """Keywords of a table of this kind from such texts: its parameters, and settings of the kind such as "group=8"."""
    changes = _settings("--set", settings, table_names({"storage": storage}), such_as="multi_step=3")
    own = {name: changes.pop(name) for name in list(changes) if name not in NAMES}
    return own | ({"parameters": parameters_from(changes)} if changes else {})


def read_limits(settings: Sequence[str], **fixed: float) -> Limits:
    """Limits as `--limit NAME=VALUE` says them, with those that are fixed.

    Raises:
        ParameterError: a name is none of `Limits`, or a value does not fit.
    """
    changes = _settings("--limit", settings, LIMITS, such_as="new_clients=100000")
    return Limits.of(**{name: _limit(name, value) for name, value in changes.items()} | fixed)


def _limit(name: str, value: Any) -> Any:
    """The value of a limit: a number, or a size such as 1GiB."""
    if not isinstance(value, str):
        return value
    try:
        if LIMITS[name].setting.unit == "bytes":
            return size(value)
    except NotASize as error:
        raise ParameterError("--limit", f"{name}={value}", f"{error.expected}, behind the =") from error
    raise ParameterError("--limit", f"{name}={value}", "a number behind the =")


def _settings(option: str, settings: Sequence[str], known: Iterable[str], *, such_as: str) -> dict[str, Any]:
    """What "name=value" texts say, values in JSON, or texts where they are none."""
    changes: dict[str, Any] = {}
    for setting in settings:
        name, is_given, text = setting.partition("=")
        if not is_given:
            raise ParameterError(option, setting, f"NAME=VALUE, such as {such_as}")
        try:
            changes[name] = json.loads(text)
        except json.JSONDecodeError:
            changes[name] = text
    refuse_unknown(option, changes, known)
    return changes


def serve(
    endpoint: str,
    schema: Schema | None,
    settings: Sequence[str],
    *,
    tables: Mapping[str, Table] | None = None,
    run: str | None = None,
    name: str | None = None,
    room: Mapping[str, Any] | None = None,
    inference: Sequence[str] = (),
    state: State | None = None,
    restore: Sequence[str] = (),
    part: str | None = None,
    skip_damaged: bool = False,
    close_timeout: float = CLOSE_TIMEOUT,
    limits: Sequence[str] = (),
    http: str | None = None,
    http_token: Tokens | None = None,
    probes: str | None = None,
    beside: str | None = None,
    keys: Given = None,
) -> int:
    """Run a server until it is told to end; its exit status.

    Args:
        schema, settings, room: Of its only table; `room` as `limits.Room` declares it.
        tables: Several in their place.
        inference: Addresses of inference nodes that clients are told of.
        limits: Of the library, as `read_limits` takes them.
        beside: Ports for caches and for notices, "PORT,PORT", in place of the two after that of `endpoint`.
        close_timeout: Seconds that it has at its end; three quarters of what is left then are for a snapshot.

    Raises:
        StateError: the state folder cannot be used, or its disk failed.
        SnapshotMismatch, DataError: what is to be restored does not fit.
    """
    raise_limit()
    room = dict(room or {})
    held = {"held_bytes": room.pop("byte_limit")} if "byte_limit" in room else {}  # of all tables
    push, pub = _beside(endpoint, beside)
    part_of(part)  # a wrong one is said before anything is made
    with (
        LauncherLine(close_timeout + 2.0) as tether,
        NodePages(http, token=http_token, probes=probes) as pages,
        Server(
            Endpoints(endpoint, push=push, publish=pub),
            schema,
            tables=tables,
            run=run,
            name="" if tether.is_launched and name is None else name,  # it reads no environment: docs/settings.md
            inference=inference,
            state=state,
            limits=read_limits(limits, close_timeout=close_timeout, **held),
            keys=keys,
            **read_table(settings, room.get("storage")) | room,
        ) as server,
    ):
        if restore:
            put_back(server, restore, part, configure=not settings, skip_damaged=skip_damaged)
        _announce(tether, "server", server, pages)
        while tether.wait(REPORT_INTERVAL):
            if server.failure is not None:
                raise server.failure
            if tether.is_launched:
                tether.report(**_server_report(server))
        tether.report(**_server_report(server))
    return 0


class ServersFile:
    """A list of servers in a file: an address on each line, # begins a comment. Read again while the proxy runs."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._text: str | None = None

    def read(self) -> list[str] | None:
        """The addresses; None where nothing has changed since the last call, or the file cannot be read now.

        Raises:
            ParameterError: it cannot be read, the first time.
        """
        try:
            text = Path(self.path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            if self._text is None:
                raise ParameterError(
                    "--servers-file", self.path, f"a file with an address on each line: {error}"
                ) from error
            return None
        if text == self._text:
            return None
        self._text = text
        return [found for line in text.splitlines() if (found := line.partition("#")[0].strip())]

    def follow(self, proxy: Proxy) -> None:
        """Give a changed list to the proxy; a wrong one is said, and not taken."""
        servers = self.read()
        if servers is None:
            return
        try:
            proxy.set_servers(servers)
        except EndpointError as error:
            print(f"memoire: {self.path} is not taken: {error}", file=sys.stderr, flush=True)


def _beside(endpoint: str, ports: str | None) -> tuple[str | None, str | None]:
    """Addresses for caches and notices, where they are not the ones that follow from that for requests.

    Raises:
        ParameterError: these are not two ports, or the address has none.
    """
    if ports is None:
        return None, None
    host, found = endpoint.rpartition(":")[0], ports.split(",")
    are_ports = all(port.isascii() and port.isdigit() and int(port) < 1 << 16 for port in found)
    if len(found) != 2 or not are_ports or not endpoint.startswith("tcp://"):
        raise ParameterError("--beside", ports, "two ports such as 5561,5562, beside a tcp:// address (--endpoint)")
    return f"{host}:{found[0]}", f"{host}:{found[1]}"


def relay(
    endpoint: str,
    servers: Sequence[str],
    *,
    role: str = "proxy",
    name: str | None = None,
    http: str | None = None,
    http_token: Tokens | None = None,
    probes: str | None = None,
    servers_file: str | None = None,
    limits: Sequence[str] = (),
    beside: str | None = None,
    keys: Given = None,
) -> int:
    """Run a proxy, or the same as a relay, until it is told to end; its exit status."""
    listed = ServersFile(servers_file) if servers_file else None
    servers = servers if listed is None else listed.read() or []
    push, pub = _beside(endpoint, beside)
    raise_limit()
    with (
        LauncherLine() as tether,
        NodePages(http, token=http_token, probes=probes) as pages,
        Proxy(
            endpoint,
            servers,
            push_front=push,
            pub_front=pub,
            name=name,
            limits=read_limits(limits),
            keys=Keys.of(keys, PROXY_KEYS[role]),
        ) as proxy,
    ):
        pages.show(proxy)
        if tether.is_launched:
            _meet(proxy, tether)
        _announce(tether, role, proxy, pages)
        while tether.wait(REPORT_INTERVAL):
            if listed is not None:
                listed.follow(proxy)
            if tether.is_launched:
                stats = proxy.stats()
                tether.report(caches=stats.caches, lost=sum(back.lost_caches for back in stats.backs))
    return 0


def _meet(proxy: Proxy, tether: LauncherLine) -> None:
    """Wait until the proxy knows its servers: clients that come before the last one would all go to the others."""
    deadline = time.monotonic() + MEETING_TIMEOUT
    while not all(back.servers for back in proxy.stats().backs) and time.monotonic() < deadline:
        if not tether.wait(POLL_INTERVAL):
            return


def _announce(tether: LauncherLine, role: str, node: Server | Proxy, pages: NodePages) -> None:
    pages.show(node)
    tether.ready(endpoint=node.endpoint, beside=[node.push_endpoint, node.pub_endpoint], http=pages.url)
    if not tether.is_launched:
        say(f"memoire {role}: {node.endpoint}")
        if pages.url is not None:
            say(f"memoire {role}: how it stands: {pages.url}/status")
        if pages.probes_url is not None:
            say(f"memoire {role}: probes and metrics: {pages.probes_url}/readyz")
        say("Ctrl-C ends it.", sys.stderr)
    if found := security(node.stats(), pages.open).open:
        say(f"memoire {role}: open to everybody who reaches it: {', '.join(found)}", sys.stderr)


def _server_report(server: Server) -> dict[str, Any]:
    """What a launcher shows: totals, caches, and each client's counts and newest returns."""
    stats = server.stats()
    return {
        "totals": dataclasses.asdict(stats.totals),
        "held_caches": stats.held_caches,
        "held_bytes": stats.held_bytes,
        "overwritten_caches": stats.overwritten_caches,
        "refused": stats.refused,
        "feedback": {owner: dataclasses.asdict(counts) for owner, counts in stats.feedback_owners.items()},
        "accounts_folded": stats.accounts_folded,
        "clients": {
            client.client: {"episodes": client.episodes, "steps": client.steps, "caches": client.accepted_caches}
            for client in server.clients()
        },
        "recent": [
            [ended.time, ended.returned, ended.length] for _, ended in server.episodes(RECENT) if ended.kind == TRAIN
        ],
    }
