"""Local runs: servers, proxies, a dashboard, a learner and actors as child processes of one `Launcher`.

`memoire up`, `demo` and `launch` and `python -m memoire.rl up` use this module.

`memoire launch` runs a user's learner and actors, with all nodes that a run needs.

    memoire launch learner.py actor.py --actors 8

                     server and proxy of this run (--env, --schema, --tables)
    MEMOIRE_ENDPOINT  ──▶  or the learner itself, which then makes a Server at MEMOIRE_LISTEN
                     or a cluster elsewhere (--endpoint)

Programs read all addresses from environment variables; the Helm chart uses the same names. A program that dies is
restarted. The run is over when the learner ends with status 0; without a learner, when all actors do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memoire.arguments import check_settings
from memoire.errors import EndpointError, MemoireTimeout, ParameterError, StateUnusable
from memoire.replay.schema import Schema
from memoire.security.keys import Keys, KeysLike

from .launcher import ONE_THREAD, READY_TIMEOUT, Child, Launcher
from .settings import ClusterCounts, LaunchSettings
from .supervision import ProcessOutput, is_file, print_line, print_note

DASHBOARD_NEEDS = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True)
class LocalCluster:
    """Running cluster: its processes, and the addresses to which actors and learners connect (any address)."""

    servers: tuple[Child, ...]
    proxies: tuple[Child, ...]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Addresses of the proxies, or of the server of a cluster without a proxy."""
        return tuple(str((child.facts or {})["endpoint"]) for child in self.proxies or self.servers)

    @property
    def pages(self) -> tuple[str, ...]:
        """URLs of the HTTP pages of all nodes, servers first."""
        return tuple(str((child.facts or {})["http"]) for child in (*self.servers, *self.proxies))


@dataclass(frozen=True, kw_only=True)
class Nodes(ClusterCounts):
    """Settings of the servers and proxies of this machine.

    Raises:
        ParameterError: there is no server, or there are several servers without a proxy.
    """

    schema: Schema | None = None
    """Schema of the only table of each server; None if `tables` declares the tables."""
    settings: Sequence[str] = ()
    """Parameters as "name=value", see `roles.read_parameters`."""
    tables: str | None = None
    """Path of a file with the tables of each server, see `roles.read_tables`."""
    host: str = "127.0.0.1"
    """Address at which the nodes listen; "*" is all addresses of the machine."""
    port: int = 0
    """First port of the first proxy (or of the server, without a proxy); each further proxy takes the next three ports
    (requests, caches, notices). 0 takes any free ports."""
    run: str | None = None
    cache_limit: int = 0
    """Caches that each server holds at most; 0 limits only their bytes."""
    state_dir: str | None = None
    """Folder with a state folder for each server; None keeps everything in memory."""
    insecure: bool = False
    """True if `host` may be an address that other machines reach without keys."""
    keys: KeysLike = None
    """A cluster's keys folder, or the folder of one process that has all roles; None is $MEMOIRE_KEYS, or no keys."""

    def __post_init__(self) -> None:
        check_counts(self.servers, self.proxies)
        for name in ("tables", "state_dir", "keys"):  # programs that are started later may be started elsewhere
            if isinstance(path := getattr(self, name), str | os.PathLike):
                object.__setattr__(self, name, _absolute(os.fspath(path)))

    def server(self, number: int) -> tuple[str, ...]:
        """Return module and arguments of a server, without its address."""
        return (
            *("memoire", "server"),
            *(("--schema", self.schema.to_json()) if self.schema else ("--tables", str(self.tables))),
            *("--name", f"server-{number}"),
            *with_keys(self.keys, "server"),
            *(() if self.run is None else ("--run", self.run)),
            *("--cache-limit", str(self.cache_limit)),
            *(() if self.state_dir is None else ("--state-dir", os.path.join(self.state_dir, f"server-{number}"))),
            *(part for setting in self.settings for part in ("--set", setting)),
        )


def start(launcher: Launcher, nodes: Nodes, meanwhile: Callable[[], object] = lambda: None) -> LocalCluster | None:
    """Start servers, then proxies, and wait until all are ready. Return None if asked to end meanwhile.

    Args:
        meanwhile: Called while servers start.

    Raises:
        StateUnusable: the state folder is not a folder, or cannot be made.
        ChildDied: a process could not start; the message has its output.
    """
    _make_folder(nodes.state_dir)
    fronts = [
        f"tcp://{nodes.host}:{nodes.port + 3 * number if nodes.port else 0}" for number in range(max(nodes.proxies, 1))
    ]
    inner = ["tcp://127.0.0.1:0"] * nodes.servers if nodes.proxies else fronts
    children = [_node(launcher, f"server-{at}", each, nodes, nodes.server(at)) for at, each in enumerate(inner)]
    meanwhile()
    servers = _ready(launcher, children)
    if servers is None or not nodes.proxies:
        return None if servers is None else LocalCluster(servers, ())
    behind = ("memoire", "proxy", *with_keys(nodes.keys, "proxy"), *LocalCluster(servers, ()).endpoints)
    children = [_node(launcher, f"proxy-{at}", each, nodes, behind) for at, each in enumerate(fronts)]
    proxies = _ready(launcher, children)
    return None if proxies is None else LocalCluster(servers, proxies)


def _make_folder(state_dir: str | None) -> None:
    try:
        if state_dir is not None:
            os.makedirs(state_dir, exist_ok=True)
    except OSError as error:
        advice = "Name a folder that exists or can be made (--state-dir)."
        raise StateUnusable(str(state_dir), error.strerror or str(error), advice) from error


def _node(launcher: Launcher, name: str, endpoint: str, nodes: Nodes, command: tuple[str, ...]) -> Child:
    open_to_all = ("--insecure",) if nodes.insecure else ()
    return launcher.start(name, *command, "--endpoint", endpoint, *open_to_all)


def _ready(launcher: Launcher, children: list[Child]) -> tuple[Child, ...] | None:
    """Wait until the children are ready, and restart them after later deaths. Return None if asked to end meanwhile."""
    if not launcher.await_ready(children):
        return None
    launcher.supervise(children, _former_addresses)
    return tuple(children)


def _former_addresses(facts: dict[str, Any]) -> tuple[str, ...]:
    """Return flags that give a restarted server or proxy its former addresses, which other nodes use."""
    ports = ",".join(str(endpoint).rpartition(":")[2] for endpoint in facts["beside"])
    pages = str(facts["http"]).partition("://")[2]
    return ("--endpoint", str(facts["endpoint"]), "--beside", ports, "--http", pages)


def with_keys(keys: KeysLike, role: str) -> tuple[str, ...]:
    """Return the flag with the folder of the role's keys, or no flag without keys."""
    role_keys = Keys.from_setting(keys, role)
    return () if role_keys is None else ("--keys", str(role_keys.folder))


def start_dashboard(launcher: Launcher, pages: Sequence[str], history: str | None = None) -> Child | None:
    """Start a dashboard of these pages on a free port of this machine. Return None without the extra [dashboard].

    The fact "http" of the child is the dashboard's address once it is ready. A restarted dashboard has its former
    address, and its former curves if `history` names a file for them.
    """
    if any(importlib.util.find_spec(module) is None for module in DASHBOARD_NEEDS):
        return None
    history_flag = () if history is None else ("--history", history)
    board = launcher.start("dashboard", "memoire", "dashboard", *pages, "--listen", "127.0.0.1:0", *history_flag)
    board.may_die = True
    launcher.supervise([board], _former_dashboard_address)
    return board


def _former_dashboard_address(facts: dict[str, Any]) -> tuple[str, ...]:
    """Return flags that give a restarted dashboard its former address, which browsers have open."""
    return ("--listen", str(facts["http"]).partition("://")[2].rstrip("/"))


def check_counts(servers: int, proxies: int) -> None:
    """Raise ParameterError if there is no server, or if several servers have no proxy."""
    if servers < 1:
        raise ParameterError("--servers", servers, "at least 1")
    if proxies < 0 or (proxies == 0 and servers > 1):
        raise ParameterError("--proxies", proxies, "at least 1 if there are several servers, at least 0 otherwise")


def _absolute(path: str) -> str:
    """Return the absolute path, or `path` itself if it is the JSON of tables instead of a path."""
    return path if path.lstrip().startswith("{") else os.path.abspath(path)


IDLE_INTERVAL = 60.0
"""Seconds between two turns of a run that prints no figures."""


class LocalRun:
    """Nodes and dashboard of one run on this machine.

    Args:
        launcher: Parent of all processes of the run; ends them.
        nodes: Servers and proxies of the run; None starts none.
        dashboard: True starts a dashboard if the extra [dashboard] is installed.

    Attributes:
        cluster: The nodes, once they are ready.
        dashboard: Address of the dashboard, once the dashboard is ready.
    """

    def __init__(self, launcher: Launcher, nodes: Nodes | None, *, dashboard: bool = True) -> None:
        self.cluster: LocalCluster | None = None
        self.dashboard: str | None = None
        self._launcher, self._nodes, self._wants_dashboard = launcher, nodes, dashboard
        self._board: Child | None = None  # None until the dashboard prints its address

    def begin(self, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Start the nodes and wait until they are ready. Return False if this process is asked to end meanwhile.

        Args:
            meanwhile: Called while servers start.

        Raises:
            ChildDied: a node could not start.
        """
        if self._nodes is not None:
            self.cluster = start(self._launcher, self._nodes, meanwhile)
        return self.cluster is not None or self._nodes is None

    def show(self, pages: Sequence[str] = (), history: str | None = None) -> None:
        """Start a dashboard of the nodes and of these pages; `watch` prints its address once it is ready.

        Args:
            history: File that keeps the curves over a restart.
        """
        pages = (*(self.cluster.pages if self.cluster else ()), *pages)
        if self._wants_dashboard and pages:
            self._board = start_dashboard(self._launcher, pages, history)

    def watch(self, turn: Callable[[], bool] = lambda: True, every: float = IDLE_INTERVAL) -> None:
        """Keep everything running until `turn` returns False or this process is asked to end.

        Args:
            turn: Called every `every` seconds.

        Raises:
            ChildDied: a process died that cannot be restarted.
        """
        due = time.monotonic()
        while self._launcher.pump(max(0.0, due - time.monotonic())):
            self._announce()
            if time.monotonic() >= due:
                due = time.monotonic() + every
                if not turn():
                    return

    def finish(self, children: Sequence[Child], timeout: float) -> list[str]:
        """End a run in order: order the first child to finish; the other children learn of the end from the cluster.

        Returns:
            Names of the children that still run after `timeout` seconds.
        """
        self._launcher.forget_signal()  # a second signal ends the wait below
        self._launcher.abandon(self._launcher.children)
        children[0].send_order("finish")
        self._launcher.wait_for(children, timeout)
        return [child.name for child in children if child.status is None]

    def _announce(self) -> None:
        """Print the dashboard's address once it is ready."""
        if self._board is not None and self._board.facts is not None:
            self.dashboard = str(self._board.facts["http"])
            self._board = None
            print_line(f"memoire: dashboard: {self.dashboard}")


def run_cluster(nodes: Nodes, *, dashboard: bool = True) -> int:
    """Run a cluster until SIGINT or SIGTERM. Return the exit status.

    Prints the addresses, then the output of all processes. A process that dies is restarted.
    """
    with Launcher(lambda name, line: print_line(f"{name}: {line}", sys.stderr), say=print_note) as launcher:
        run = LocalRun(launcher, nodes, dashboard=dashboard)
        if run.begin() and run.cluster is not None:
            _announce_nodes(run.cluster)
            run.show()
            run.watch()
    return 0


def _announce_nodes(cluster: LocalCluster) -> None:
    for endpoint in cluster.endpoints:
        print_line(f"memoire: actors and learners connect to {endpoint}")
    for child, page in zip((*cluster.servers, *cluster.proxies), cluster.pages, strict=True):
        print_line(f"memoire: status of {child.name}: {page}/status")
    print_line("Ctrl-C ends the cluster.", sys.stderr)


TURN_INTERVAL = 0.2
"""Seconds between two checks of the programs."""
LISTEN_NOTE_DELAY = 10.0
"""Seconds of waiting for the learner's server after which a note is printed."""
NO_LEARNER = "-"
"""Word of the command line in place of a learner: the run has none."""
MAX_PORT = 65535
PORTS = 3
"""Consecutive ports that a server takes."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(LaunchSettings):
    """Options of `memoire launch`: programs, nodes, addresses and folders.

    Raises:
        ParameterError: a number is out of range, or a program is missing.
    """

    learner: tuple[str, ...] = ()
    """File or module, and arguments; empty without a learner."""
    actor: tuple[str, ...] = ()
    nodes: Nodes | None = None
    """Servers and proxies of this run; None makes the learner the server, unless `endpoint` names a cluster."""
    endpoint: str | None = None
    """Address of a cluster that runs elsewhere."""
    ports: int = PORTS
    """Consecutive ports that the learner takes: more than `PORTS` if it has an inference node, or ranks."""
    env: str | None = None
    keys: str | None = None
    state_dir: str | None = None
    dashboard: bool = True
    ready_timeout: float = READY_TIMEOUT
    """Seconds that a learner has to open its server."""

    def __post_init__(self) -> None:
        for name in ("state_dir", "logs", "keys"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, os.path.abspath(path))
        check_settings(self)
        if not self.learner and not self.actor:
            raise ParameterError.with_text("LEARNER is '-', which starts no learner: give an ACTOR.")
        if self.is_embedded and not self.learner:
            raise ParameterError.with_text(
                "LEARNER is '-', so no program creates a memoire.Server: give --env, --schema, --tables or --endpoint."
            )

    @property
    def is_embedded(self) -> bool:
        """True if the learner is the server."""
        return self.nodes is None and self.endpoint is None

    @property
    def names(self) -> list[str]:
        """Names of all programs: the learner, then the actors."""
        learner = ["learner"] if self.learner else []
        return learner + [f"actor-{rank}" for rank in range(self.actors if self.actor else 0)]


def program(what: str, text: str) -> tuple[str, ...]:
    """Split one text of the command line into a program and its arguments; return () for "-".

    Raises:
        ParameterError: the text is not a Python file, and not a module that can be imported here.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ParameterError.with_text(
            f"{what} {text!r} cannot be split into a program and arguments: {error}."
        ) from error
    if words == (NO_LEARNER,):
        return ()
    if not words or not (os.path.isfile(words[0]) if is_file(words[0]) else _is_module(words[0])):
        raise ParameterError(
            what, text, 'a Python file or a module, with its arguments in the same quotes: "a.py --b 1"'
        )
    return words


def _is_module(name: str) -> bool:
    """Return True if `python -m NAME` would find a module, also in the working directory."""
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    if os.path.exists(os.path.join(*name.split("."))) or os.path.isfile(os.path.join(*name.split(".")) + ".py"):
        return True
    with contextlib.suppress(ImportError):
        return importlib.util.find_spec(name) is not None
    return False


def launch(options: LaunchOptions) -> int:
    """Run a learner and actors until the run is over. Return 0, or 128 + n if signal n ended the run before.

    Raises:
        ChildDied: a process died that cannot be restarted.
        EndpointError: the ports are in use.
        MemoireTimeout: the learner did not open its address.
    """
    output = ProcessOutput(options.names, options.logs, None if options.quiet else sys.stdout)
    with output, Launcher(output, say=print_note) as launcher:
        launched = LaunchedRun(launcher, options)
        launched.run()
        return 0 if launched.is_over else 128 + (launcher.stop_signal or signal.SIGTERM)


class LaunchedRun(LocalRun):
    """Learner and actors, from the first start to the end of the run.

    Args:
        every_turn: Called every `TURN_INTERVAL` seconds while the programs run.

    Attributes:
        is_over: True once the learner has ended with status 0, or all actors have in a run without a learner.
        actors: Processes of the actors.
    """

    def __init__(
        self, launcher: Launcher, options: LaunchOptions, every_turn: Callable[[], None] = lambda: None
    ) -> None:
        self.is_over = False
        self.actors: list[Child] = []
        self._every_turn = every_turn
        super().__init__(launcher, options.nodes, dashboard=options.dashboard)
        self._options = options
        self._learner: Child | None = None
        self._endpoint = ""
        self._page = ""  # URL of the learner's pages

    def run(self) -> None:
        """Start all processes, keep them running until the run is over, and end them."""
        if not self.begin():
            return
        self._endpoint = self._choose_endpoint()
        print_note(f"MEMOIRE_ENDPOINT={self._endpoint}")
        self._start_learner()
        if self._options.is_embedded and not self._await_learner():
            return
        self._start_actors()
        self.show(self._learner_pages())
        self.watch(self._turn, TURN_INTERVAL)
        if self.is_over:
            self._finish()

    def _choose_endpoint(self) -> str:
        if self._options.endpoint is not None:
            return self._options.endpoint
        if self.cluster is not None:
            return self.cluster.endpoints[0]
        return f"tcp://127.0.0.1:{free_ports(self._options.port, self._options.ports)}"

    def _start_learner(self) -> None:
        if self._options.learner:
            self._learner = self._start("learner", "learner", 0, 1, self._options.learner)

    def _start_actors(self) -> None:
        count = self._options.actors if self._options.actor else 0
        for rank in range(count):
            self.actors.append(self._start(f"actor-{rank}", "actor", rank, count, self._options.actor))

    def _start(self, name: str, role: str, rank: int, count: int, words: Sequence[str]) -> Child:
        environment = self._environment(role, rank, count)
        child = self._launcher.start_program(name, words, environment)
        self._launcher.supervise([child], most=self._options.restarts)
        return child

    def _environment(self, role: str, rank: int, count: int) -> Mapping[str, str]:
        options = self._options
        variables = {
            "MEMOIRE_ENDPOINT": self._endpoint,
            "MEMOIRE_ROLE": role,
            "MEMOIRE_RANK": str(rank),
            "MEMOIRE_COUNT": str(count),
            "MEMOIRE_SEED": str(seed_of(options.seed, role, rank)),
            "MEMOIRE_HTTP": "127.0.0.1:0",
        }
        if role == "actor":  # a machine runs many actors
            variables |= {name: str(options.threads or os.environ.get(name, "1")) for name in ONE_THREAD}
        elif options.is_embedded:
            variables |= self._server_environment()
        optional = {"MEMOIRE_KEYS": options.keys, "MEMOIRE_ENV": options.env}
        return variables | {name: value for name, value in optional.items() if value is not None}

    def _server_environment(self) -> dict[str, str]:
        """Return the variables of a learner that is the server of its cluster."""
        page = f"127.0.0.1:{free_ports(0, 1)}"
        self._page = f"http://{page}"
        variables = {"MEMOIRE_LISTEN": self._endpoint, "MEMOIRE_NAME": "learner-0", "MEMOIRE_HTTP": page}
        return variables | ({} if self._options.state_dir is None else {"MEMOIRE_STATE_DIR": self._options.state_dir})

    def _await_learner(self) -> bool:
        """Wait until the learner listens. Return False if the run ends meanwhile."""
        place = self._endpoint.partition("://")[2]
        start_time, is_noted = time.monotonic(), False
        while (waited := time.monotonic() - start_time) < self._options.ready_timeout:
            if not self._launcher.pump(TURN_INTERVAL) or self._learner_is_done():
                return False
            if _is_open(place):
                return True
            if waited > LISTEN_NOTE_DELAY and not is_noted:
                is_noted = True
                print_note(f"actors wait until the learner listens at {self._endpoint} ($MEMOIRE_LISTEN)")
        advice = (
            'Make the server there, memoire.Server(os.environ["MEMOIRE_LISTEN"], ...), or have `memoire launch` run '
            "one: --env, --schema or --tables."
        )
        raise MemoireTimeout(f"server at {self._endpoint}", "the learner", self._options.ready_timeout, advice)

    def _learner_pages(self) -> list[str]:
        """Return the URL of the learner's pages in a list; [] if the learner is no server or opened no pages."""
        if not self._options.is_embedded or not self._options.dashboard:
            return []
        if _is_open(self._page.partition("://")[2]):
            return [self._page]
        print_note("no dashboard: the learner has no pages; open them with NodePages.from_environment(server)")
        return []

    def _learner_is_done(self) -> bool:
        self.is_over = self._learner is not None and self._learner.status == 0
        return self.is_over

    def _turn(self) -> bool:
        self._every_turn()
        if self._learner is not None:
            return not self._learner_is_done()
        self.is_over = all(actor.status == 0 for actor in self.actors)
        return not self.is_over

    def _finish(self) -> None:
        """Wait until the actors end by themselves: their clients report that the run is over."""
        if self._learner is not None and self.actors:
            print_note("the learner has ended; actors end now")
        self._launcher.abandon(self.actors)
        for actor in self.actors:
            actor.may_die = True
        has_ended = self._launcher.wait_for(self.actors, self._options.finish_timeout)
        if not has_ended and self._launcher.stop_signal is None:
            late = [actor.name for actor in self.actors if actor.status is None]
            print_note(
                f"{', '.join(late)} did not end within {self._options.finish_timeout:g} s; memoire ends them now"
            )


def seed_of(seed: int, role: str, rank: int) -> int:
    """Return a different seed for each process of a run."""
    return 1000 * seed + (rank + 1 if role == "actor" else 0)


def free_ports(first: int, count: int = PORTS) -> int:
    """Return the first of `count` consecutive free ports of this machine, from `first` on; 0 finds any.

    Raises:
        EndpointError: the ports from `first` on are in use.
    """
    reason = "no free ports were found"
    for candidate in [first] if first else _candidates():
        if candidate + count > MAX_PORT + 1:
            reason = f"the highest port is {MAX_PORT}"
            continue
        try:
            with contextlib.ExitStack() as stack:
                for port in range(candidate, candidate + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return candidate
        except OSError as error:
            reason = error.strerror or str(error)
    where = f"tcp://127.0.0.1:{first}"
    raise EndpointError(where, "listen at", reason, f"another --port (0 finds {count} consecutive free ports)")


def _candidates() -> Iterator[int]:
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
        yield port


def _is_open(place: str) -> bool:
    """Return True if HOST:PORT accepts a connection."""
    host, _, port = place.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 1.0):
            return True
    except OSError:
        return False
