"""A dashboard as a process, or on threads of one: what `memoire dashboard` runs.

Its own health and metrics are pages: at its address, or at a port of their own. Prometheus reads the whole cluster's
figures there, which no single server knows, and the dashboard's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import uvicorn
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from uvicorn.protocols.http.h11_impl import H11Protocol

from memoire.arguments import ClosingContext
from memoire.dashboard.collect.aggregator import Aggregator
from memoire.dashboard.collect.answers import NodeRow, Overview
from memoire.dashboard.collect.history import History
from memoire.dashboard.collect.opened import OpenedRun, Source
from memoire.dashboard.settings import Settings
from memoire.errors import EndpointError
from memoire.figures import by, catalogue, gauge
from memoire.nodes.http import NodePages, listen
from memoire.nodes.metrics import BUILD_INFO, Exposition, PageGuard, build_info, families, family
from memoire.nodes.pages import Handler, Node, Page, PageRequest, as_json
from memoire.nodes.supervision import LauncherLine, say
from memoire.security.access import Tokens

from .access import Logins
from .api import create_app
from .pages import ListenerHub

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT = 5
"""Seconds that requests have to end once the dashboard is told to."""
REQUEST_TIMEOUT = 10.0
"""Seconds that a connection may take for a request; at most twice as long for a later one."""
START_TIMEOUT = 10.0
POLL_INTERVAL = 0.25


@dataclass(frozen=True, slots=True)
class WatchedNode:
    """A node as this dashboard asks it."""

    # fmt: off
    url: str
    name: str
    is_up: Annotated[bool, gauge("dashboard_node_up", "Up", "1 if the node answers, 0 if not.")]
    took: Annotated[float, gauge("dashboard_node_seconds", "Answer", "Seconds that its newest answer took.")]
    # fmt: on


@dataclass(frozen=True, slots=True)
class ScrapedDashboard(PageGuard):
    """A dashboard at the moment of a scrape."""

    # fmt: off
    listeners: Annotated[int, gauge("dashboard_listeners", "Listeners", "Programs that follow the stream.")]
    history_failed: Annotated[bool, gauge("dashboard_history_failed", "History failed", "1 while the history cannot be "
        "written, 0 otherwise.")]
    time: Annotated[float | None, gauge("dashboard_overview_timestamp_seconds", "Newest overview", "When the newest "
        "overview was made, in seconds since 1970.")]
    nodes: Annotated[Sequence[WatchedNode], by("url name", "url name")]
    # fmt: on


def names() -> set[str]:
    """What a scrape shows, without what every Python process has."""
    figures = (catalogue(ScrapedDashboard), catalogue(Overview, "cluster"))
    return {BUILD_INFO.full_name, *(sources[0].figure.full_name for each in figures for sources in each.values())}


class DashboardCollector(Collector):
    """The metrics of one dashboard."""

    def __init__(self, aggregator: Source, hub: ListenerHub, gate: Logins) -> None:
        self._aggregator, self._hub, self._gate = aggregator, hub, gate

    def describe(self) -> Iterable[Metric]:
        """Nothing: a scrape shows what there is."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families, with the values of this moment."""
        overview, settings = self._aggregator.newest, self._aggregator.settings
        nodes: list[NodeRow] = [] if overview is None else overview.nodes
        yield build_info("dashboard")
        yield from families(
            ScrapedDashboard(
                open=[settings.listen] * settings.is_open,
                refused=self._gate.refused,
                listeners=self._hub.listeners,
                history_failed=bool(self._aggregator.trouble),
                time=None if overview is None else overview.time,
                nodes=[WatchedNode(each.url, each.name, each.state != "down", each.took) for each in nodes],
            )
        )
        for name, sources in catalogue(Overview, "cluster").items():
            yield family(name, sources, overview)


def probe_pages(aggregator: Source, exposition: Exposition) -> Mapping[str, Handler]:
    """/livez, /readyz and /metrics of a dashboard."""

    def index(node: Node | None, request: PageRequest) -> Page:
        return as_json({"pages": sorted(pages)})

    def livez(node: Node | None, request: PageRequest) -> Page:
        stuck = aggregator.liveness()
        return as_json({"alive": not stuck, "reasons": stuck}, 503 if stuck else 200)

    def readyz(node: Node | None, request: PageRequest) -> Page:
        reasons = aggregator.readiness()
        return as_json({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    def metrics(node: Node | None, request: PageRequest) -> Page:
        body, kind = exposition.text(request.headers.get("accept", ""))
        return Page(200, body, kind=kind)

    pages: dict[str, Handler] = {"/": index, "/livez": livez, "/readyz": readyz, "/metrics": metrics}
    return pages


class _TimedConnection(H11Protocol):
    """A connection that has to say what it wants soon, each time: silent ones would take all descriptors.

    Its requests know who is at its other end, also behind a reverse proxy: scope["state"]["peer"].
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody came."""
        super().connection_made(transport)
        self.app_state = self.app_state | {"peer": self.client[0] if self.client else ""}
        self._look_again(None)

    def _look_again(self, served: Any) -> None:
        self.loop.call_later(REQUEST_TIMEOUT, self._look, served)

    def _look(self, served: Any) -> None:
        """Hang up where nothing is asked, and nothing was since the last look; `served` is the request of then."""
        newest: Any = self.cycle  # None before the first request is there as a whole
        if newest is served and (newest is None or newest.response_complete):
            self.transport.close()
        elif not self.transport.is_closing():
            self._look_again(newest)


class _ServerWithoutSignals(uvicorn.Server):
    """Signals belong to whoever runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes none."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what goes on; whoever does not let go in time, or came at the last moment, is cut off."""
        await super().shutdown(sockets)
        for _ in range(3):  # turns of the loop: connections that were accepted come up, those that are cut off go
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)


class Dashboard(ClosingContext):
    """A dashboard on threads of its own, until `close`.

    Raises:
        EndpointError: its address is taken, or none.
        HistoryError: the file of the history cannot be used.
        RunFileError: the file to open holds no run.
    """

    def __init__(self, settings: Settings) -> None:
        self._is_closed = False
        self._listener: socket.socket = listen(settings.listen)
        self.hub = ListenerHub()
        try:
            self.aggregator = self._source(settings)
        except BaseException:
            self._listener.close()
            raise
        self.gate = Logins(Tokens.of(settings.token))
        pages = probe_pages(self.aggregator, Exposition(DashboardCollector(self.aggregator, self.hub, self.gate)))
        try:
            self._probes = NodePages(None, probes=settings.probes, pages=pages)
        except BaseException:
            self._listener.close()
            self.aggregator.history.close()
            raise
        self.app = create_app(self.aggregator, self.hub, self.gate, pages)
        config = uvicorn.Config(
            self.app,
            http=_TimedConnection,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=CLOSE_TIMEOUT,
            server_header=False,
            date_header=False,
        )
        self._server = _ServerWithoutSignals(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, name="memoire-dashboard-http", daemon=True
        )
        self.aggregator.start()
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._server.started:
            self.close()
            raise EndpointError(settings.listen, "serve HTTP at", "the server there did not start; its log says why")

    def _source(self, settings: Settings) -> Source:
        """A cluster that is watched, or a run out of a file."""
        if settings.open is None:
            return Aggregator(settings, History(settings.history), self.hub.put)
        opened = OpenedRun(settings)
        self.hub.put(opened.newest)
        return opened

    @property
    def url(self) -> str:
        """What to open, as from this machine."""
        host, port = self._listener.getsockname()[:2]
        named = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
        return f"http://{named}:{port}"

    @property
    def probes_url(self) -> str | None:
        """Where only /livez, /readyz and /metrics are, to everybody; None where they have no port of their own."""
        return self._probes.probes_url

    def close(self) -> None:
        """End all streams and threads, and write the history. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self.hub.close()  # streams would keep the server from ending
        self._server.should_exit = True
        self._thread.join(2 * CLOSE_TIMEOUT)
        self._probes.close()
        self.aggregator.close()
        self._listener.close()


def serve(settings: Settings) -> int:
    """Run a dashboard until it is told to end; its exit status."""
    with LauncherLine() as tether, Dashboard(settings) as dashboard:
        tether.ready(endpoint=dashboard.url, http=dashboard.url)
        if not tether.is_launched:
            say(f"memoire dashboard: {dashboard.url}")
            if dashboard.probes_url is not None:
                say(f"memoire dashboard: probes and metrics: {dashboard.probes_url}/readyz")
            say("Ctrl-C ends it.", sys.stderr)
        while tether.wait(POLL_INTERVAL):
            pass
    return 0
