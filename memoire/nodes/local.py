"""Servers, proxies and a dashboard on this machine, and programs that learn and act: a run, as processes of a launcher.

`memoire up`, `demo` and `launch` and `python -m memoire.rl up` are uses of it. All processes are children of one
`Launcher`.

`memoire launch` runs a learner and actors of yours on this machine, with all that a run needs around them:

    memoire launch learner.py actor.py --actors 8

                     server and proxy of this run (--env, --schema, --tables)
    MEMOIRE_ENDPOINT  ──▶  or the learner itself, which then makes a Server at MEMOIRE_LISTEN
                     or a cluster elsewhere (--endpoint)

Programs hear by their environment where everything is, by the names that the Helm chart uses, too. They are started
again when they die. The run is over when the learner ends with status 0; without a learner, when all actors do.
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
from memoire.security.keys import Given, Keys

from .launcher import ONE_THREAD, READY_TIMEOUT, Child, Launcher
from .settings import Counts, LaunchSettings
from .supervision import ProcessOutput, is_file, note, say

DASHBOARD_NEEDS = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True)
class LocalCluster:
    """A running cluster: its processes, and the addresses that actors and learners connect to (any of them)."""

    servers: tuple[Child, ...]
    proxies: tuple[Child, ...]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The proxies' addresses; the server's where there is no proxy."""
        return tuple(str((child.facts or {})["endpoint"]) for child in self.proxies or self.servers)

    @property
    def pages(self) -> tuple[str, ...]:
        """Where the nodes' pages are."""
        return tuple(str((child.facts or {})["http"]) for child in (*self.servers, *self.proxies))


@dataclass(frozen=True, kw_only=True)
class Nodes(Counts):
    """Which servers and proxies to run on this machine.

    Raises:
        ParameterError: counts that make no cluster.
    """

    schema: Schema | None = None
    """Of the servers' only table; None where `tables` says what there is."""
    settings: Sequence[str] = ()
    """Parameters as "name=value", see `roles.read_parameters`."""
    tables: str | None = None
    """Path of a file with the tables of each server, see `roles.read_tables`."""
    host: str = "127.0.0.1"
    """Address to listen at; "*" is all of the machine's."""
    port: int = 0
    """Of the first proxy (or of the server, without a proxy); each further one takes the next three free ports
    (requests, caches, notices). 0 takes any free ones."""
    run: str | None = None
    cache_limit: int = 0
    """Caches that each server holds, 0 for no limit but bytes."""
    state_dir: str | None = None
    """Folder with a folder for the state of each server; None keeps everything in memory."""
    insecure: bool = False
    """Whether `host` may be an address that everybody reaches."""
    keys: Given = None
    """A cluster's keys folder, or of one process that may do everything; None is $MEMOIRE_KEYS, or no keys."""

    def __post_init__(self) -> None:
        check_counts(self.servers, self.proxies)
        for name in ("tables", "state_dir", "keys"):  # programs that are started later may be started elsewhere
            if isinstance(path := getattr(self, name), str | os.PathLike):
                object.__setattr__(self, name, _found_anywhere(os.fspath(path)))

    def server(self, number: int) -> tuple[str, ...]:
        """Module and arguments of a server, without its address."""
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
    """Start servers, then proxies in front of them, and wait until all are ready; None when asked to end meanwhile.

    Args:
        meanwhile: Called while servers start.

    Raises:
        StateUnusable: the state folder is no folder, and cannot be made.
        ChildDied: a process could not start; why is in the message.
    """
    _make_folder(nodes.state_dir)
    fronts = [
        f"tcp://{nodes.host}:{nodes.port + 3 * number if nodes.port else 0}" for number in range(max(nodes.proxies, 1))
    ]
    inner = ["tcp://127.0.0.1:0"] * nodes.servers if nodes.proxies else fronts
    made = [_node(launcher, f"server-{at}", each, nodes, nodes.server(at)) for at, each in enumerate(inner)]
    meanwhile()
    servers = _ready(launcher, made)
    if servers is None or not nodes.proxies:
        return None if servers is None else LocalCluster(servers, ())
    behind = ("memoire", "proxy", *with_keys(nodes.keys, "proxy"), *LocalCluster(servers, ()).endpoints)
    made = [_node(launcher, f"proxy-{at}", each, nodes, behind) for at, each in enumerate(fronts)]
    proxies = _ready(launcher, made)
    return None if proxies is None else LocalCluster(servers, proxies)


def _make_folder(state_dir: str | None) -> None:
    try:
        if state_dir is not None:
            os.makedirs(state_dir, exist_ok=True)
    except OSError as error:
        advice = "Name a folder that is there or can be made (--state-dir)."
        raise StateUnusable(str(state_dir), error.strerror or str(error), advice) from error


def _node(launcher: Launcher, name: str, endpoint: str, nodes: Nodes, command: tuple[str, ...]) -> Child:
    open_to_all = ("--insecure",) if nodes.insecure else ()
    return launcher.start(name, *command, "--endpoint", endpoint, *open_to_all)


def _ready(launcher: Launcher, made: list[Child]) -> tuple[Child, ...] | None:
    """These, once they are ready, and started again from then on; None when asked to end meanwhile."""
    if not launcher.await_ready(made):
        return None
    launcher.supervise(made, where_it_was)
    return tuple(made)


def where_it_was(facts: dict[str, Any]) -> tuple[str, ...]:
    """Flags with which a server or proxy that is started again has its former addresses: others know them."""
    ports = ",".join(str(endpoint).rpartition(":")[2] for endpoint in facts["beside"])
    pages = str(facts["http"]).partition("://")[2]
    return ("--endpoint", str(facts["endpoint"]), "--beside", ports, "--http", pages)


def with_keys(keys: Given, role: str) -> tuple[str, ...]:
    """The flag that gives a child its role's keys."""
    found = Keys.of(keys, role)
    return () if found is None else ("--keys", str(found.folder))


def show(launcher: Launcher, pages: Sequence[str], history: str | None = None) -> Child | None:
    """Start a dashboard of these nodes' pages on a free port of this machine; its address is the fact "http" once it is
    ready. It is started again at that address when it dies, with its curves if `history` names a file for them.

    None where what it needs (the extra [dashboard]) is not installed. The cluster goes on without it.
    """
    if any(importlib.util.find_spec(module) is None for module in DASHBOARD_NEEDS):
        return None
    keeps = () if history is None else ("--history", history)
    board = launcher.start("dashboard", "memoire", "dashboard", *pages, "--listen", "127.0.0.1:0", *keeps)
    board.may_die = True
    launcher.supervise([board], where_it_showed)
    return board


def where_it_showed(facts: dict[str, Any]) -> tuple[str, ...]:
    """Flags with which a dashboard that is started again has its former address: a browser has it open."""
    return ("--listen", str(facts["http"]).partition("://")[2].rstrip("/"))


def check_counts(servers: int, proxies: int) -> None:
    """Refuse counts that make no cluster."""
    if servers < 1:
        raise ParameterError("--servers", servers, "at least 1")
    if proxies < 0 or (proxies == 0 and servers > 1):
        raise ParameterError("--proxies", proxies, "at least 1 where there are several servers, at least 0 otherwise")


def _found_anywhere(path: str) -> str:
    """A path as from any folder; or the JSON that tables are in place of one."""
    return path if path.lstrip().startswith("{") else os.path.abspath(path)


IDLE = 60.0
"""Seconds between two looks at a run that shows nothing."""


class LocalRun:
    """What runs together, until somebody ends it.

    Args:
        launcher: Whose children all of it are; it ends them.
        nodes: Servers and proxies of this run; None has none of its own.
        dashboard: Whether to start one, where what it needs is installed.

    Attributes:
        cluster: The nodes, once they are ready.
        dashboard: Address of the dashboard, once it answers.
    """

    def __init__(self, launcher: Launcher, nodes: Nodes | None, *, dashboard: bool = True) -> None:
        self.cluster: LocalCluster | None = None
        self.dashboard: str | None = None
        self._launcher, self._nodes, self._wants_dashboard = launcher, nodes, dashboard
        self._board: Child | None = None  # until its address was printed

    def begin(self, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Start the nodes, and wait until they are ready; False when this process is asked to end meanwhile.

        Args:
            meanwhile: Called while servers start.

        Raises:
            ChildDied: one of them could not start.
        """
        if self._nodes is not None:
            self.cluster = start(self._launcher, self._nodes, meanwhile)
        return self.cluster is not None or self._nodes is None

    def show(self, pages: Sequence[str] = (), history: str | None = None) -> None:
        """Start the dashboard, of the nodes and of these pages; it is announced when it is ready.

        Args:
            history: File that keeps its curves over a restart.
        """
        pages = (*(self.cluster.pages if self.cluster else ()), *pages)
        if self._wants_dashboard and pages:
            self._board = show(self._launcher, pages, history)

    def watch(self, turn: Callable[[], bool] = lambda: True, every: float = IDLE) -> None:
        """Keep everything running until `turn`, called each `every` seconds, is False, or this process is asked to end.

        Raises:
            ChildDied: a process died, and it is of no use to start it again.
        """
        due = time.monotonic()
        while self._launcher.pump(max(0.0, due - time.monotonic())):
            self._announce()
            if time.monotonic() >= due:
                due = time.monotonic() + every
                if not turn():
                    return

    def finish(self, children: Sequence[Child], timeout: float) -> list[str]:
        """End a run in order: the first of these children is told to finish, and the others hear of that from the
        cluster. Returns the names of those that are still at work after `timeout` seconds.
        """
        self._launcher.forget_signal()  # a second one ends this, too
        self._launcher.abandon(self._launcher.children)
        children[0].order("finish")
        self._launcher.wait_for(children, timeout)
        return [child.name for child in children if child.status is None]

    def _announce(self) -> None:
        """Print where the dashboard is, once."""
        if self._board is not None and self._board.facts is not None:
            self.dashboard = str(self._board.facts["http"])
            self._board = None
            say(f"memoire: dashboard: {self.dashboard}")


def up(nodes: Nodes, *, dashboard: bool = True) -> int:
    """Run a cluster until SIGINT or SIGTERM; its exit status. Prints the addresses, then whatever a process prints.

    A process that dies is started again.
    """
    with Launcher(lambda name, line: say(f"{name}: {line}", sys.stderr), say=note) as launcher:
        run = LocalRun(launcher, nodes, dashboard=dashboard)
        if run.begin() and run.cluster is not None:
            _announce_nodes(run.cluster)
            run.show()
            run.watch()
    return 0


def _announce_nodes(cluster: LocalCluster) -> None:
    for endpoint in cluster.endpoints:
        say(f"memoire: actors and learners connect to {endpoint}")
    for child, page in zip((*cluster.servers, *cluster.proxies), cluster.pages, strict=True):
        say(f"memoire: how {child.name} stands: {page}/status")
    say("Ctrl-C ends the cluster.", sys.stderr)


TURN = 0.2
"""Seconds between two looks at the programs."""
"""Seconds that actors have to end by themselves once the learner has ended, unless told otherwise."""
LISTEN_NOTE_DELAY = 10.0
"""Seconds after which one is told that actors wait for the learner's server."""
NONE = "-"
"""In place of a learner: there is none here."""
MAX_PORT = 65535
PORTS = 3
"""Ports in a row that a server takes."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(LaunchSettings):
    """What to launch.

    Raises:
        ParameterError: a number or a program is none.
    """

    learner: tuple[str, ...] = ()
    """File or module, and arguments; empty: none."""
    actor: tuple[str, ...] = ()
    nodes: Nodes | None = None
    """Servers and proxies of this run; None: the learner is the server, unless `endpoint` says where one is."""
    endpoint: str | None = None
    """Of a cluster that runs elsewhere."""
    ports: int = PORTS
    """That it takes in a row: more if it has an inference node, or ranks."""
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
            raise ParameterError("LEARNER", NONE, "a program, or an ACTOR beside it")
        if self.embeds and not self.learner:
            expected = "a program that makes a memoire.Server, or --env, --schema, --tables or --endpoint beside it"
            raise ParameterError("LEARNER", NONE, expected)

    @property
    def embeds(self) -> bool:
        """Whether the learner is the server."""
        return self.nodes is None and self.endpoint is None

    @property
    def names(self) -> list[str]:
        """Of all programs."""
        learner = ["learner"] if self.learner else []
        return learner + [f"actor-{rank}" for rank in range(self.actors if self.actor else 0)]


def program(what: str, text: str) -> tuple[str, ...]:
    """A program and its arguments, as one text of the command line says them; empty for "-".

    Raises:
        ParameterError: it is no Python file, and no module that is found from here.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ParameterError(what, text, f"a program and its arguments: {error}") from error
    if words == (NONE,):
        return ()
    if not words or not (os.path.isfile(words[0]) if is_file(words[0]) else _is_module(words[0])):
        raise ParameterError(
            what, text, 'a Python file or a module, with its arguments in the same quotes: "a.py --b 1"'
        )
    return words


def _is_module(name: str) -> bool:
    """Whether `python -m NAME` would find a module, in the working directory too."""
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    if os.path.exists(os.path.join(*name.split("."))) or os.path.isfile(os.path.join(*name.split(".")) + ".py"):
        return True
    with contextlib.suppress(ImportError):
        return importlib.util.find_spec(name) is not None
    return False


def launch(options: LaunchOptions) -> int:
    """Run it until it is over; its exit status, 128 + n when signal n ended it before.

    Raises:
        ChildDied: a process died, and it is of no use to start it again.
        EndpointError: the ports are in use.
        MemoireTimeout: the learner did not open its address.
    """
    shown = ProcessOutput(options.names, options.logs, None if options.quiet else sys.stdout)
    with shown, Launcher(shown, say=note) as launcher:
        launched = LaunchedRun(launcher, options)
        launched.run()
        return 0 if launched.is_over else 128 + (launcher.stop_signal or signal.SIGTERM)


class LaunchedRun(LocalRun):
    """A learner and its actors, from the first start to the end of the run.

    Args:
        every_turn: Called again and again while they run.

    Attributes:
        is_over: The learner has ended with status 0, or all actors have where there is no learner.
        actors: Their processes.
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
        self._page = ""  # of the learner

    def run(self) -> None:
        """Start everything, keep it running, and end it."""
        if not self.begin():
            return
        self._endpoint = self._find_endpoint()
        note(f"MEMOIRE_ENDPOINT={self._endpoint}")
        self._start_learner()
        if self._options.embeds and not self._await_learner():
            return
        self._start_actors()
        self.show(self._learner_pages())
        self.watch(self._goes_on, TURN)
        if self.is_over:
            self._finish()

    def _find_endpoint(self) -> str:
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
        said = {
            "MEMOIRE_ENDPOINT": self._endpoint,
            "MEMOIRE_ROLE": role,
            "MEMOIRE_RANK": str(rank),
            "MEMOIRE_COUNT": str(count),
            "MEMOIRE_SEED": str(seed_of(options.seed, role, rank)),
            "MEMOIRE_HTTP": "127.0.0.1:0",
        }
        if role == "actor":  # one of many on the machine
            said |= {name: str(options.threads or os.environ.get(name, "1")) for name in ONE_THREAD}
        elif options.embeds:
            said |= self._as_server()
        optional = {"MEMOIRE_KEYS": options.keys, "MEMOIRE_ENV": options.env}
        return said | {name: value for name, value in optional.items() if value is not None}

    def _as_server(self) -> dict[str, str]:
        """What a learner is told that is the server of its cluster."""
        page = f"127.0.0.1:{free_ports(0, 1)}"
        self._page = f"http://{page}"
        said = {"MEMOIRE_LISTEN": self._endpoint, "MEMOIRE_NAME": "learner-0", "MEMOIRE_HTTP": page}
        return said | ({} if self._options.state_dir is None else {"MEMOIRE_STATE_DIR": self._options.state_dir})

    def _await_learner(self) -> bool:
        """Wait until the learner listens; whether to go on."""
        place = self._endpoint.partition("://")[2]
        began, is_noted = time.monotonic(), False
        while (waited := time.monotonic() - began) < self._options.ready_timeout:
            if not self._launcher.pump(TURN) or self._learner_is_done():
                return False
            if _is_open(place):
                return True
            if waited > LISTEN_NOTE_DELAY and not is_noted:
                is_noted = True
                note(f"actors wait until the learner listens at {self._endpoint} ($MEMOIRE_LISTEN)")
        advice = (
            'Make the server there, memoire.Server(os.environ["MEMOIRE_LISTEN"], ...), or have `memoire launch` run '
            "one: --env, --schema or --tables."
        )
        raise MemoireTimeout(f"server at {self._endpoint}", "the learner", self._options.ready_timeout, advice)

    def _learner_pages(self) -> list[str]:
        """Those of a learner that is the server, if it has opened any."""
        if not self._options.embeds or not self._options.dashboard:
            return []
        if _is_open(self._page.partition("://")[2]):
            return [self._page]
        note("there is no dashboard: the learner has no pages. NodePages.from_environment(server) opens them.")
        return []

    def _learner_is_done(self) -> bool:
        self.is_over = self._learner is not None and self._learner.status == 0
        return self.is_over

    def _goes_on(self) -> bool:
        self._every_turn()
        if self._learner is not None:
            return not self._learner_is_done()
        self.is_over = all(actor.status == 0 for actor in self.actors)
        return not self.is_over

    def _finish(self) -> None:
        """Let actors end by themselves: they hear that the run is over."""
        if self._learner is not None and self.actors:
            note("the learner has ended; actors end now")
        self._launcher.abandon(self.actors)
        for actor in self.actors:
            actor.may_die = True
        has_ended = self._launcher.wait_for(self.actors, self._options.finish_timeout)
        if not has_ended and self._launcher.stop_signal is None:
            late = [actor.name for actor in self.actors if actor.status is None]
            note(f"{', '.join(late)} did not end within {self._options.finish_timeout:g} s, and is ended now")


def seed_of(seed: int, role: str, rank: int) -> int:
    """A seed of its own for each process of a run."""
    return 1000 * seed + (rank + 1 if role == "actor" else 0)


def free_ports(first: int, count: int = PORTS) -> int:
    """The first of `count` ports in a row of this machine that nobody listens at; 0 finds some.

    Raises:
        EndpointError: the ones that are asked for are in use.
    """
    reason = "none is free"
    for candidate in [first] if first else _candidates():
        if candidate + count > MAX_PORT + 1:
            reason = f"ports end at {MAX_PORT}"
            continue
        try:
            with contextlib.ExitStack() as stack:
                for port in range(candidate, candidate + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return candidate
        except OSError as error:
            reason = error.strerror or str(error)
    where = f"tcp://127.0.0.1:{first}"
    raise EndpointError(where, "listen at", reason, f"another --port (0 finds {count} free ones in a row)")


def _candidates() -> Iterator[int]:
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = int(found.getsockname()[1])
        yield port


def _is_open(place: str) -> bool:
    """Whether somebody listens at HOST:PORT."""
    host, _, port = place.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 1.0):
            return True
    except OSError:
        return False
