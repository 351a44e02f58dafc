"""Servers and proxies on this machine: what `memoire up` runs, and what `memoire demo` plays on."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memoire.errors import ParameterError, StateUnusable
from memoire.replay.schema import Schema
from memoire.security.keyfolder import Given, Keys

from .launcher import Child, Launcher

DASHBOARD_NEEDS = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True)
class Local:
    """A running cluster: its processes, and the addresses that actors and learners connect to (any of them)."""

    servers: tuple[Child, ...]
    proxies: tuple[Child, ...]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The proxies' addresses; the server's where there is no proxy."""
        return tuple(str((child.facts or {})["endpoint"]) for child in self.proxies or self.servers)


def start(
    launcher: Launcher,
    schema: Schema | None,
    settings: Sequence[str] = (),
    *,
    tables: str | None = None,
    servers: int = 1,
    proxies: int = 1,
    host: str = "127.0.0.1",
    port: int = 0,
    run: str | None = None,
    cache_limit: int = 0,
    state_dir: str | None = None,
    insecure: bool = False,
    keys: Given = None,
) -> Local | None:
    """Start servers, then proxies in front of them, and wait until all are ready; None when asked to end meanwhile.

    Args:
        schema: Of the servers' only table; None where `tables` says what there is.
        settings: Parameters as "name=value", see `roles.read_parameters`.
        tables: Path of a file with the tables of each server, see `tablefile`.
        host: Address to listen at; "*" is all of the machine's.
        port: Of the first proxy (or of the server, without a proxy); each further one takes the next three free ports
            (requests, caches, notices). 0 takes any free ones.
        cache_limit: Caches that each server holds, 0 for no limit but bytes.
        state_dir: Folder with a folder for the state of each server; None keeps everything in memory.
        insecure: Whether `host` may be an address that everybody reaches.
        keys: A cluster's keys folder, or of one process that may do everything; None is $MEMOIRE_KEYS, or no keys.

    Raises:
        ParameterError: counts that make no cluster.
        StateUnusable: `state_dir` is no folder, and cannot be made.
        ChildDied: a process could not start; why is in the message.
    """
    check_counts(servers, proxies)
    if state_dir is not None:
        try:
            os.makedirs(state_dir, exist_ok=True)
        except OSError as error:
            advice = "Name a folder that is there or can be made (--state-dir)."
            raise StateUnusable(state_dir, error.strerror or str(error), advice) from error
    fronts = [f"tcp://{host}:{port + 3 * number if port else 0}" for number in range(max(proxies, 1))]
    local = [f"tcp://127.0.0.1:{0}"] * servers if proxies else fronts
    open_to_all = ("--insecure",) if insecure else ()
    made = [
        launcher.start(
            f"server-{number}",
            "memoire",
            "server",
            *("--endpoint", endpoint, *open_to_all),
            *(("--schema", schema.to_json()) if schema else ("--tables", _found_anywhere(str(tables)))),
            *("--name", f"server-{number}"),
            *with_keys(keys, "server"),
            *(() if run is None else ("--run", run)),
            *("--cache-limit", str(cache_limit)),
            *(() if state_dir is None else ("--state-dir", os.path.join(state_dir, f"server-{number}"))),
            *(part for setting in settings for part in ("--set", setting)),
        )
        for number, endpoint in enumerate(local)
    ]
    if not launcher.await_ready(made):
        return None
    launcher.supervise(made, where_it_was)
    behind = [str((child.facts or {})["endpoint"]) for child in made]
    front = [
        launcher.start(
            f"proxy-{number}",
            "memoire",
            "proxy",
            "--endpoint",
            endpoint,
            *open_to_all,
            *with_keys(keys, "proxy"),
            *behind,
        )
        for number, endpoint in enumerate(fronts if proxies else [])
    ]
    if not launcher.await_ready(front):
        return None
    launcher.supervise(front, where_it_was)
    return Local(tuple(made), tuple(front))


def where_it_was(facts: dict[str, Any]) -> tuple[str, ...]:
    """Flags with which a server or proxy that is started again has its former addresses: others know them."""
    ports = ",".join(str(endpoint).rpartition(":")[2] for endpoint in facts["beside"])
    pages = str(facts["http"]).partition("://")[2]
    return ("--endpoint", str(facts["endpoint"]), "--beside", ports, "--http", pages)


def with_keys(keys: Given, role: str) -> tuple[str, ...]:
    """The flag that gives a child its role's keys."""
    found = Keys.of(keys, role)
    return () if found is None else ("--keys", str(found.folder))


def show(launcher: Launcher, cluster: Local) -> Child | None:
    """Start a dashboard of the cluster on a free port of this machine; its address is the fact "http" once it is ready.

    None where what it needs (the extra [dashboard]) is not installed. The cluster goes on if it dies.
    """
    if any(importlib.util.find_spec(module) is None for module in DASHBOARD_NEEDS):
        return None
    nodes = [str((child.facts or {})["http"]) for child in (*cluster.servers, *cluster.proxies)]
    board = launcher.start("dashboard", "memoire", "dashboard", *nodes, "--listen", "127.0.0.1:0")
    board.may_die = True
    return board


def announce(board: Child | None) -> Child | None:
    """Print where the dashboard is, once it is there; what is left to be announced."""
    if board is None or board.facts is None:
        return board
    print(f"memoire: dashboard: {board.facts['http']}", flush=True)
    return None


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_counts(servers: int, proxies: int) -> None:
    """Refuse counts that make no cluster."""
    if servers < 1:
        raise ParameterError("--servers", servers, "at least 1")
    if proxies < 0 or (proxies == 0 and servers > 1):
        raise ParameterError("--proxies", proxies, "at least 1 where there are several servers, at least 0 otherwise")


def _found_anywhere(tables: str) -> str:
    """The path of a file with tables as from any folder; or the JSON that it is in place of one."""
    return tables if tables.lstrip().startswith("{") else os.path.abspath(tables)


def up(
    schema: Schema | None,
    settings: Sequence[str],
    *,
    tables: str | None = None,
    servers: int,
    proxies: int,
    host: str,
    port: int,
    run: str | None,
    state_dir: str | None = None,
    dashboard: bool = True,
    insecure: bool = False,
    keys: Given = None,
) -> int:
    """Run a cluster until SIGINT or SIGTERM; its exit status. Prints the addresses, then whatever a process prints.

    A process that dies is started again.
    """
    check_counts(servers, proxies)
    with Launcher(lambda name, line: _note(f"{name}: {line}"), say=lambda line: _note(f"memoire: {line}")) as launcher:
        cluster = start(
            launcher,
            schema,
            settings,
            tables=tables,
            servers=servers,
            proxies=proxies,
            host=host,
            port=port,
            run=run,
            state_dir=state_dir,
            insecure=insecure,
            keys=keys,
        )
        if cluster is None:
            return 0
        for endpoint in cluster.endpoints:
            print(f"memoire: actors and learners connect to {endpoint}", flush=True)
        for child in (*cluster.servers, *cluster.proxies):
            print(f"memoire: how {child.name} stands: {(child.facts or {})['http']}/status", flush=True)
        print("Ctrl-C ends the cluster.", file=sys.stderr, flush=True)
        board = show(launcher, cluster) if dashboard else None
        while launcher.pump(60.0):
            board = announce(board)
    return 0
