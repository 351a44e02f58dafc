"""HTTP server of a dashboard, in the process of `memoire dashboard` or on threads of another process.

The server also serves health and metrics of the dashboard itself, at its address or at a separate port. The metrics
include figures of the whole cluster, which no single node knows.
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
from memoire.nodes.pages import Handler, Page, PagedNode, PageRequest, as_json
from memoire.nodes.supervision import LauncherLine, print_line
from memoire.security.access import Tokens

from .access import Logins
from .api import create_app
from .pages import ListenerHub

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT = 5
"""Seconds that open requests may still take when the dashboard closes."""
REQUEST_TIMEOUT = 10.0
"""Seconds in which a connection has to send its first request; up to twice as long for later ones."""
START_TIMEOUT = 10.0
POLL_INTERVAL = 0.25


@dataclass(frozen=True, slots=True)
class WatchedNode:
    """State of a node for a scrape of the dashboard."""

    # fmt: off
    url: str
    name: str
    is_up: Annotated[bool, gauge("dashboard_node_up", "Up", "1 if the node answers, 0 if not.")]
    took: Annotated[float, gauge("dashboard_node_seconds", "Answer", "Seconds that the newest answer took.")]
    # fmt: on


@dataclass(frozen=True, slots=True)
class ScrapedDashboard(PageGuard):
    """Figures of a dashboard at the moment of a scrape."""

    # fmt: off
    listeners: Annotated[int, gauge("dashboard_listeners", "Listeners", "Programs that follow the stream.")]
    history_failed: Annotated[bool, gauge("dashboard_history_failed", "History failed", "1 while the history cannot be "
        "written, 0 otherwise.")]
    time: Annotated[float | None, gauge("dashboard_overview_timestamp_seconds", "Newest overview", "Time of the newest "
        "overview in seconds since 1970.")]
    nodes: Annotated[Sequence[WatchedNode], by("url name", "url name")]
    # fmt: on


def names() -> set[str]:
    """Return the names of all metrics in a scrape, except those of every Python process."""
    figures = (catalogue(ScrapedDashboard), catalogue(Overview, "cluster"))
    return {BUILD_INFO.full_name, *(sources[0].figure.full_name for each in figures for sources in each.values())}


class DashboardCollector(Collector):
    """Prometheus collector for the metrics of a dashboard and its cluster."""

    def __init__(self, aggregator: Source, hub: ListenerHub, gate: Logins) -> None:
        self._aggregator, self._hub, self._gate = aggregator, hub, gate

    def describe(self) -> Iterable[Metric]:
        """Return no descriptions, since the metrics depend on the cluster."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families with their current values."""
        overview, settings = self._aggregator.newest, self._aggregator.settings
        nodes: list[NodeRow] = [] if overview is None else overview.nodes
        yield build_info("dashboard")
        yield from families(
            ScrapedDashboard(
                open=[settings.listen] * settings.is_open,
                refused=self._gate.refused,
                listeners=self._hub.listeners,
                history_failed=bool(self._aggregator.problem),
                time=None if overview is None else overview.time,
                nodes=[WatchedNode(each.url, each.name, each.state != "down", each.took) for each in nodes],
            )
        )
        for name, sources in catalogue(Overview, "cluster").items():
            yield family(name, sources, overview)


def probe_pages(aggregator: Source, exposition: Exposition) -> Mapping[str, Handler]:
    """Return the handlers of /livez, /readyz and /metrics of a dashboard."""

    def index(node: PagedNode | None, request: PageRequest) -> Page:
        return as_json({"pages": sorted(pages)})

    def livez(node: PagedNode | None, request: PageRequest) -> Page:
        stuck = aggregator.liveness()
        return as_json({"alive": not stuck, "reasons": stuck}, 503 if stuck else 200)

    def readyz(node: PagedNode | None, request: PageRequest) -> Page:
        reasons = aggregator.readiness()
        return as_json({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    def metrics(node: PagedNode | None, request: PageRequest) -> Page:
        body, kind = exposition.text(request.headers.get("accept", ""))
        return Page(200, body, kind=kind)

    pages: dict[str, Handler] = {"/": index, "/livez": livez, "/readyz": readyz, "/metrics": metrics}
    return pages


class _TimedConnection(H11Protocol):
    """HTTP connection that is closed if no request arrives in time, so that idle ones do not use up file descriptors.

    The address of its peer is in scope["state"]["peer"], also behind a reverse proxy.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Note the peer and start the timer of a new connection."""
        super().connection_made(transport)
        self.app_state = self.app_state | {"peer": self.client[0] if self.client else ""}
        self._look_again(None)

    def _look_again(self, served: Any) -> None:
        self.loop.call_later(REQUEST_TIMEOUT, self._look, served)

    def _look(self, served: Any) -> None:
        """Close the connection if no request arrived since the last check, at which `served` was the newest request."""
        newest: Any = self.cycle  # None until the first request has arrived completely
        if newest is served and (newest is None or newest.response_complete):
            self.transport.close()
        elif not self.transport.is_closing():
            self._look_again(newest)


class _ServerWithoutSignals(uvicorn.Server):
    """uvicorn server that installs no signal handlers; the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for open requests, then abort connections that remain or that were accepted meanwhile."""
        await super().shutdown(sockets)
        for _ in range(3):  # each turn of the loop registers accepted connections and removes aborted ones
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)


class Dashboard(ClosingContext):
    """Dashboard that runs on its own threads until `close`.

    Raises:
        EndpointError: The address is in use or malformed.
        HistoryError: The file of the history cannot be used.
        RunFileError: The file to open does not contain a run.
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
        self.gate = Logins(Tokens.from_setting(settings.token))
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
            raise EndpointError(settings.listen, "serve HTTP at", "the HTTP server did not start; see its log")

    def _source(self, settings: Settings) -> Source:
        """Return the aggregator of a cluster, or a run from a file."""
        if settings.open is None:
            return Aggregator(settings, History(settings.history), self.hub.put)
        opened = OpenedRun(settings)
        self.hub.put(opened.newest)
        return opened

    @property
    def url(self) -> str:
        """Address of the dashboard, as seen from this machine."""
        host, port = self._listener.getsockname()[:2]
        named = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
        return f"http://{named}:{port}"

    @property
    def probes_url(self) -> str | None:
        """Address of the separate port for /livez, /readyz and /metrics; None if there is none."""
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
    """Run a dashboard until a signal ends it, and return the exit status."""
    with LauncherLine() as tether, Dashboard(settings) as dashboard:
        tether.ready(endpoint=dashboard.url, http=dashboard.url)
        if not tether.is_launched:
            print_line(f"memoire dashboard: {dashboard.url}")
            if dashboard.probes_url is not None:
                print_line(f"memoire dashboard: probes and metrics: {dashboard.probes_url}/readyz")
            print_line("Ctrl-C ends it.", sys.stderr)
        while tether.wait(POLL_INTERVAL):
            pass
    return 0
