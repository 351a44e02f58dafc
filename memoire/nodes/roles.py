"""Processes of servers, proxies and relays, as `memoire server`, `memoire proxy` and `memoire relay` run them.

Without a launcher, the process of a node prints its address and works until SIGINT or SIGTERM. A launched process (see
`launcher`) reports its address and its figures through its `LauncherLine`.

`order_snapshots`, `show` and `restore_snapshots` are the snapshot commands: order snapshots at all servers of a
cluster, print the content of a file, and restore files at a server's start.

`read_tables` reads a server's tables from JSON: `memoire server --tables` takes the name of a file, or its content.

    {
      "online": {"env": "CartPole-v1", "multi_step": 3, "parameters": {"priority_exponent": 0.7}},
      "demo":   {"schema": "demo.json", "byte_limit": "200MB"},
      "math":   {"schema": "answer.json", "storage": "prompts", "group": 8, "score": "variance", "lease": 300}
    }

Each table has a schema (its JSON form, or the name of a file in the same folder) or a Gymnasium environment from which
the schema is made, and any settings of `memoire.Table`. Fields of its parameters stand beside these settings, or
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
from memoire.security.keys import Keys, KeysLike
from memoire.server.server import Server
from memoire.server.settings import Endpoints, State
from memoire.tables import registry
from memoire.tables.base import ReceivesSums
from memoire.tables.table import Table, table_names, table_settings
from memoire.wire.messages import TRAIN

from .http import NodePages
from .pages import security
from .settings import NotASize, env_schema, size
from .supervision import LauncherLine, print_line

INCOMPLETE = 3
"""Exit status if a server has not written its snapshot, or a file is damaged."""


def order_snapshots(
    endpoint: str, name: str, *, timeout: float = 600.0, keys: KeysLike = None, say: Callable[[str], object] = print
) -> int:
    """Order a snapshot at every server behind an address, each in its own state folder. Return the exit status.

    Raises:
        MemoireTimeout: no server answers at an address on the way; no snapshot is ordered.
    """
    with Reader([endpoint], timeout=min(10.0, timeout), keys=keys) as reader:
        replies = reader.snapshot(name, timeout)
    failed = 0
    for server, answer in sorted(replies.items()):
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
    """Print the content of a snapshot file. Return the exit status.

    Raises:
        DataError: the file cannot be read, or is not a snapshot.
    """
    facts = snapshots.describe_file(path, check=check)
    if as_json:
        say(json.dumps(facts))
    else:
        timestamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["taken"]))
        say(f"{path}: server {facts['server']!r}, run {facts['run']!r}, taken at {timestamp}, {facts['bytes']} bytes")
        for table in facts["tables"]:
            say(_line(table))
        if not facts["complete"] and not facts["damage"]:
            say("The file is incomplete: the server ended while writing it.")
        if facts["damage"]:
            say(f"The file is damaged: {facts['damage']}.")
    return INCOMPLETE if facts["damage"] else 0


def _line(table: dict[str, Any]) -> str:
    if "caches" not in table:
        return f"  {table['name']}: {table['storage']}; the number of entries is not known"
    held = _held(table)
    has_unused = registry.has_capability(table["storage"], ReceivesSums)
    unused = f", {table['unused']} not drawn yet, of {table['clients']} clients" if has_unused else ""
    return f"  {table['name']}: {held}{unused}, {table['bytes']} bytes"


def parse_part(part: str | None) -> tuple[int, int]:
    """Return (rank, count) of "K/N", the K-th of N servers counted from 1; (0, 1) of None."""
    if part is None:
        return 0, 1
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", part)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ParameterError("--part", part, "K/N for the K-th of N servers, such as 1/3, 2/3 and 3/3")
    return int(match[1]) - 1, int(match[2])


def restore_snapshots(
    server: Server, paths: Sequence[str], part: str | None, *, configure: bool, skip_damaged: bool
) -> None:
    """Restore snapshot files into a server that starts, and report the result on standard error.

    Files that were restored into the server's state folder before are skipped.

    Raises:
        DataError, SnapshotMismatch: a file cannot be read, or does not fit.
        ParameterError: `part` is malformed.
    """
    done = server.restore(paths, part=parse_part(part), configure=configure, skip_damaged=skip_damaged, once=True)
    left_out = len(paths) - done.files
    known = f"; {left_out} of the files were restored here before" if left_out else ""
    print(f"memoire server: restored {done}{known}", file=sys.stderr, flush=True)


REPORT_INTERVAL = 0.25
"""Seconds between two reports of a launched node."""
POLL_INTERVAL = 0.02
"""Seconds between two checks of a launched proxy whether all its servers have answered."""
MEETING_TIMEOUT = 10.0
"""Seconds that a launched proxy waits for servers that have not answered yet; a server may be lost."""
CLOSE_TIMEOUT = 8.0
"""Default seconds that a server's process has at its end to send its last replies and write its snapshot."""
PROXY_KEYS = {"proxy": "proxy", "relay": "actor"}
"""Roles whose keys of a cluster's folder a proxy and a relay use: a relay acts for the actors behind it."""
RECENT = 100
"""Newest closed episodes that a server reports to its launcher."""


def schema_of(schema: str | None, env: str | None, storage: str | None = None) -> Schema:
    """Return the schema in a JSON file, in the JSON text `schema` itself, or of a Gymnasium environment.

    Args:
        storage: Kind of the table; columns of some kinds have no roles.

    Raises:
        ParameterError: neither a schema nor an environment is given.
    """
    kind = registry.require_kind(storage or registry.DEFAULT)
    if schema is None and env is None:
        if not kind.has_columns:
            return kind.schema_from(None)
        raise ParameterError.with_text("Give the table's columns: --schema FILE, --env ID or --tables FILE.")
    if schema is None:
        return _of_environment(str(env))
    if schema.lstrip().startswith("{"):
        return kind.schema_class().from_json(schema)
    try:
        text = Path(schema).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SchemaError(f"cannot read the schema from {schema!r}: {reason}. Give a JSON file (--schema).") from error
    return kind.schema_class().from_json(text)


def _of_environment(env: str) -> Schema:
    try:
        return env_schema(env)
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        raise SchemaError(
            f"the schema of {env!r} (--env) needs Gymnasium, which is not installed here: pip install "
            f"'memoire-rl[demo]'. Images of servers do without Gymnasium: run `memoire schema {env}` on a machine "
            f"that has it, and give its output (--schema; in the Helm chart, server.schema)."
        ) from error


def read_tables(path: str) -> dict[str, Table]:
    """Return the tables in a file, or in the JSON text `path` itself, in their order.

    Raises:
        ParameterError: the file cannot be read, or a table in it has wrong settings; the error names the table.
    """
    is_content = path.lstrip().startswith("{")
    try:
        content = json.loads(path if is_content else Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError.with_text(f"--tables {path!r} cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:  # also for thousands of digits or nested brackets
        raise ParameterError.with_text(f"--tables {path!r} is not valid JSON: {error}.") from error
    if not isinstance(content, dict) or not content:
        raise ParameterError("--tables", path, 'an object with a table under each name, such as {"online": {...}}')
    where, folder = ("--tables", Path()) if is_content else (f"--tables {path}", Path(path).parent)
    return {name: _table(f"{where}: {name}", settings, folder) for name, settings in content.items()}


def _table(where: str, settings: Any, folder: Path) -> Table:
    if not isinstance(settings, dict):
        raise ParameterError(where, settings, "an object with the settings of a table")
    known = table_settings(settings)
    refuse_unknown(where, settings, {"schema", "env", *known})
    try:
        has_columns = registry.require_kind(settings.get("storage", registry.DEFAULT)).has_columns
    except (MemoireError, TypeError) as error:
        raise ParameterError.with_text(f"{where}: {error}") from error
    if has_columns and ("schema" in settings) == ("env" in settings):
        raise ParameterError.with_text(
            f'{where} must have either "schema" or "env", got {sorted(settings)}. Nothing was changed.'
        )
    try:
        if isinstance(settings.get("byte_limit"), str):
            settings = settings | {"byte_limit": size(settings["byte_limit"])}
        return Table(
            _schema(settings, folder) if has_columns or {"schema", "env"} & settings.keys() else None,
            parameters=parameters_from(settings.get("parameters", {})),
            **{name: value for name, value in settings.items() if name in known - {"parameters"}},
        )
    except (MemoireError, OSError, ValueError, TypeError) as error:
        raise ParameterError.with_text(f"{where} has invalid settings: {error}") from error


def _schema(settings: Mapping[str, Any], folder: Path) -> Schema:
    if "env" in settings:
        return env_schema(str(settings["env"]))
    schema, kind = settings["schema"], registry.require_kind(settings.get("storage", registry.DEFAULT)).schema_class()
    return kind.from_json(schema if isinstance(schema, dict) else (folder / schema).read_text(encoding="utf-8-sig"))


def parameters_from(changes: Mapping[str, Any]) -> Parameters:
    """Return the default parameters with these changes, in the types of JSON: lists for tuples.

    Raises:
        ParameterError: a name is unknown, or a value does not fit.
    """
    defaults = USUAL
    values: dict[str, Any] = {}
    for name, value in mapping("parameters", changes).items():
        is_vector = isinstance(getattr(defaults, name, None), tuple)
        values[name] = (tuple(value) if isinstance(value, list) else (value,)) if is_vector else value
    return defaults.replace(**values)


def read_parameters(settings: Sequence[str]) -> Parameters:
    """Return parameters from texts with values in JSON, such as "multi_step=3", "discount=[0.99]", "start=repeat"."""
    return parameters_from(_settings("--set", settings, NAMES, such_as="multi_step=3"))


def read_table(settings: Sequence[str], storage: str | None = None) -> dict[str, Any]:
    """Return a table's keywords from texts: parameters, and settings of its kind such as "group=8"."""
    changes = _settings("--set", settings, table_names({"storage": storage}), such_as="multi_step=3")
    kind_settings = {name: changes.pop(name) for name in list(changes) if name not in NAMES}
    return kind_settings | ({"parameters": parameters_from(changes)} if changes else {})


def read_limits(settings: Sequence[str], **fixed: float) -> Limits:
    """Return the limits of `--limit NAME=VALUE` texts, together with the fixed ones.

    Raises:
        ParameterError: a name is not a limit, or a value does not fit.
    """
    changes = _settings("--limit", settings, LIMITS, such_as="new_clients=100000")
    return Limits.of(**{name: _limit(name, value) for name, value in changes.items()} | fixed)


def _limit(name: str, value: Any) -> Any:
    """Return the value of a limit: a number, or the bytes of a size such as 1GiB."""
    if not isinstance(value, str):
        return value
    try:
        if LIMITS[name].setting.unit == "bytes":
            return size(value)
    except NotASize as error:
        raise ParameterError("--limit", f"{name}={value}", f"{error.expected}, after the =") from error
    raise ParameterError("--limit", f"{name}={value}", "a number after the =")


def _settings(option: str, settings: Sequence[str], known: Iterable[str], *, such_as: str) -> dict[str, Any]:
    """Return the values of "name=value" texts by name; a value that is not JSON stays text."""
    changes: dict[str, Any] = {}
    for setting in settings:
        name, has_value, text = setting.partition("=")
        if not has_value:
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
    keys: KeysLike = None,
) -> int:
    """Run a server until its process is asked to end. Return the exit status.

    Args:
        schema, settings, room: Arguments of the server's only table; `room` as `limits.Room` declares it.
        tables: Several tables in place of the only one.
        inference: Addresses of inference nodes that the server announces to clients.
        limits: Limits of the server, as `read_limits` takes them.
        beside: Ports for caches and notices, "PORT,PORT", in place of the two ports after the port of `endpoint`.
        close_timeout: Seconds that the server has at its end; a snapshot gets three quarters of the remaining ones.

    Raises:
        StateError: the state folder cannot be used, or its disk failed.
        SnapshotMismatch, DataError: a file to restore does not fit.
    """
    raise_limit()
    room = dict(room or {})
    held_limit = {"held_bytes": room.pop("byte_limit")} if "byte_limit" in room else {}  # the limit of all tables
    push, pub = _beside(endpoint, beside)
    parse_part(part)  # reject a malformed part before any table is made
    with (
        LauncherLine(close_timeout + 2.0) as line,
        NodePages(http, token=http_token, probes=probes) as pages,
        Server(
            Endpoints(endpoint, push=push, publish=pub),
            schema,
            tables=tables,
            run=run,
            name="" if line.is_launched and name is None else name,  # launched: ignore $MEMOIRE_NAME
            inference=inference,
            state=state,
            limits=read_limits(limits, close_timeout=close_timeout, **held_limit),
            keys=keys,
            **read_table(settings, room.get("storage")) | room,
        ) as server,
    ):
        if restore:
            restore_snapshots(server, restore, part, configure=not settings, skip_damaged=skip_damaged)
        _announce(line, "server", server, pages)
        while line.wait(REPORT_INTERVAL):
            if server.failure is not None:
                raise server.failure
            if line.is_launched:
                line.report(**_server_report(server))
        line.report(**_server_report(server))
    return 0


class ServersFile:
    """List of servers in a file: an address on each line, # starts a comment. Read again while the proxy runs."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._text: str | None = None

    def read(self) -> list[str] | None:
        """Return the addresses; None if they are unchanged since the last call, or if the file cannot be read now.

        Raises:
            ParameterError: the first read fails.
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
        return [address for line in text.splitlines() if (address := line.partition("#")[0].strip())]

    def follow(self, proxy: Proxy) -> None:
        """Apply a changed list to the proxy; report a wrong list and keep the former one."""
        servers = self.read()
        if servers is None:
            return
        try:
            proxy.set_servers(servers)
        except EndpointError as error:
            print(f"memoire: {self.path} is ignored: {error}", file=sys.stderr, flush=True)


def _beside(endpoint: str, ports: str | None) -> tuple[str | None, str | None]:
    """Return the addresses for caches and notices; None for those that follow from the address for requests.

    Raises:
        ParameterError: `ports` is not two ports, or the address has no port.
    """
    if ports is None:
        return None, None
    host, push_and_pub = endpoint.rpartition(":")[0], ports.split(",")
    are_ports = all(port.isascii() and port.isdigit() and int(port) < 1 << 16 for port in push_and_pub)
    if len(push_and_pub) != 2 or not are_ports or not endpoint.startswith("tcp://"):
        raise ParameterError("--beside", ports, "two ports such as 5561,5562, with a tcp:// address (--endpoint)")
    return f"{host}:{push_and_pub[0]}", f"{host}:{push_and_pub[1]}"


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
    keys: KeysLike = None,
) -> int:
    """Run a proxy, or a proxy in the role of a relay, until its process is asked to end. Return the exit status."""
    servers_list = ServersFile(servers_file) if servers_file else None
    servers = servers if servers_list is None else servers_list.read() or []
    push, pub = _beside(endpoint, beside)
    raise_limit()
    with (
        LauncherLine() as line,
        NodePages(http, token=http_token, probes=probes) as pages,
        Proxy(
            endpoint,
            servers,
            push_front=push,
            pub_front=pub,
            name=name,
            limits=read_limits(limits),
            keys=Keys.from_setting(keys, PROXY_KEYS[role]),
        ) as proxy,
    ):
        pages.show(proxy)
        if line.is_launched:
            _await_servers(proxy, line)
        _announce(line, role, proxy, pages)
        while line.wait(REPORT_INTERVAL):
            if servers_list is not None:
                servers_list.follow(proxy)
            if line.is_launched:
                stats = proxy.stats()
                line.report(caches=stats.caches, lost=sum(back.lost_caches for back in stats.backs))
    return 0


def _await_servers(proxy: Proxy, line: LauncherLine) -> None:
    """Wait until all servers have answered: clients that connect earlier would all go to the first servers."""
    deadline = time.monotonic() + MEETING_TIMEOUT
    while not all(back.servers for back in proxy.stats().backs) and time.monotonic() < deadline:
        if not line.wait(POLL_INTERVAL):
            return


def _announce(line: LauncherLine, role: str, node: Server | Proxy, pages: NodePages) -> None:
    pages.show(node)
    line.ready(endpoint=node.endpoint, beside=[node.push_endpoint, node.pub_endpoint], http=pages.url)
    if not line.is_launched:
        print_line(f"memoire {role}: {node.endpoint}")
        if pages.url is not None:
            print_line(f"memoire {role}: status: {pages.url}/status")
        if pages.probes_url is not None:
            print_line(f"memoire {role}: probes and metrics: {pages.probes_url}/readyz")
        print_line("Ctrl-C ends this process.", sys.stderr)
    if addresses := security(node.stats(), pages.exposed_url).open:
        print_line(f"memoire {role}: no keys or tokens are needed at: {', '.join(addresses)}", sys.stderr)


def _server_report(server: Server) -> dict[str, Any]:
    """Return the report to a launcher: totals, caches, and each client's counts and newest returns."""
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
