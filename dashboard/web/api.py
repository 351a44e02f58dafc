"""HTTP API of the dashboard: JSON under /api/, one stream, exports, /metrics and probes.

The types of the responses are in answers.py. msgspec encodes them; FastAPI only gets their descriptions, so that a page
of a thousand actors is cheap. Handlers that read run in threads; only the stream and the login run on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import random
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from math import isfinite
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

import msgspec
from fastapi import FastAPI, Header, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from memoire.dashboard.collect import nodes as logs
from memoire.dashboard.collect import opened as run_file
from memoire.dashboard.collect.answers import (
    ActorDetail,
    ActorPage,
    ActorRow,
    EpisodeRow,
    HeldSample,
    LearnerRow,
    NodeRow,
    Overview,
    TableRow,
)
from memoire.dashboard.collect.history import Curves, EventRow, RunInfo
from memoire.dashboard.collect.nodes import ActorSpread, ClusterDistribution, LogPage, NodeError, spread_of
from memoire.dashboard.collect.opened import Source
from memoire.dashboard.settings import Settings
from memoire.errors import MemoireError, ProtocolError
from memoire.limits import HELD_BYTES, MODEL_BYTES, Limits, wall_clock
from memoire.nodes import pages
from memoire.nodes.pages import Handler
from memoire.replay.sampling import USUAL
from memoire.tables import registry
from memoire.version import SOFTWARE, VERSION

from .access import (
    COOKIE,
    LOGIN_LIFETIME,
    AccessMiddleware,
    Logins,
    TooManyWrongTokens,
    error,
    is_by_tls,
    origin_of,
    too_many,
)
from .pages import MAX_LISTENERS, ListenerHub, TooManyListeners, add_pages

WRONG_TOKEN_DELAY = 0.5
"""Seconds before a login with a wrong token is answered."""
_DEFAULTS = {
    "table": {"storage": registry.DEFAULT, "capacity": 0, "byte_limit": None, "max_step": 0},
    "parameters": USUAL,
    "limits": replace(
        Limits(), held_bytes=HELD_BYTES, model_bytes=MODEL_BYTES, message_bytes=int(Limits().message_bytes)
    ),
    "dashboard": Settings.defaults(),
    "counted": {kind.name: kind.counted for kind in registry.known_kinds()},
}


MAX_ROWS = 1000
MAX_POINTS = 5000
MAX_NAMES = 256
YEAR_9999 = 253_402_300_799.0

Sort = Literal[
    "client", "name", "label", "host", "table", "home", "state", "first_seen", "last_seen", "episodes", "steps",
    "steps_per_second", "return_recent", "return_mean", "generated_bytes", "pushed_caches", "accepted_caches",
    "rejected_caches", "lost_caches", "skipped_caches", "received_bytes", "dropped_lines", "model_version", "model_lag",
]  # fmt: skip
Figure = Literal[
    "episodes", "steps", "steps_per_second", "return_recent", "return_mean", "generated_bytes", "pushed_caches",
    "accepted_caches", "rejected_caches", "lost_caches", "skipped_caches", "received_bytes", "dropped_lines",
    "model_lag",
]  # fmt: skip
State = Literal["active", "silent", "lost", "gone"]
Time = Annotated[float, Query(ge=0.0, le=YEAR_9999, allow_inf_nan=False, description="Seconds since 1970.")]
Text = Annotated[str, Query(max_length=256)]
Run = Annotated[str, Query(max_length=256, description="Name of a run; by default the current one.")]
Names = Annotated[list[str], Query(max_length=MAX_NAMES, description="Names of figures; by default all.")]
Limit = Annotated[int, Query(ge=1, le=MAX_ROWS)]
Offset = Annotated[int, Query(ge=0, le=1 << 31)]
Owner = Annotated[str, Query(pattern="^([0-9a-f]{32})?$", description="Id of the owner of the entry, in hex.")]
Number = Annotated[int, Query(ge=0, le=1 << 62, description="Number of an entry of its owner.")]
Client = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="Id of an actor in hex.")]


class ProblemAnswer(BaseModel):
    """Body of every error response."""

    error: str


class Token(BaseModel):
    """Body of a login request."""

    token: str = Field(max_length=1024)


class LoginState(BaseModel):
    """State of the login in a browser."""

    needs_token: bool
    is_let_in: bool
    software: str


def _streamed(name: str, media_type: str) -> type[StreamingResponse]:
    """Return a class of streaming responses with a media type."""
    return type(name, (StreamingResponse,), {"media_type": media_type})


CsvTable = _streamed("CsvTable", "text/csv")
EventFile = _streamed("EventFile", "application/octet-stream")
RunFile = _streamed("RunFile", "application/gzip")
Stream = _streamed("Stream", "text/event-stream")


class Api:
    """Handlers of the API, for one aggregator."""

    def __init__(self, aggregator: Source, hub: ListenerHub, gate: Logins, probes: Mapping[str, Handler]) -> None:
        self._aggregator, self._hub, self._gate, self._probes = aggregator, hub, gate, probes
        self._settings = aggregator.settings

    # --------------------------------------------------------------------------------------------------- the state

    def overview(self) -> Response:
        """Return the newest overview of the whole cluster."""
        return _json(self._overview())

    async def stream(self, request: Request, last_event_id: Annotated[str, Header(max_length=20)] = "") -> Response:
        """Stream each new overview as a server-sent event "overview", whose id is the `number` of the overview."""
        if self._hub.listeners >= MAX_LISTENERS:
            text = f"the stream already has {MAX_LISTENERS} listeners: poll /api/overview instead"
            raise HTTPException(http.HTTPStatus.SERVICE_UNAVAILABLE, text, {"Retry-After": "10"})
        last = int(last_event_id) if last_event_id.isascii() and last_event_id.isdigit() else None
        return Stream(self._frames(last, request.headers), headers={"X-Accel-Buffering": "no"})

    async def _frames(self, last: int | None, headers: Headers) -> AsyncIterator[bytes]:
        """Yield frames until the stream or the login ends."""
        with contextlib.suppress(TooManyListeners):
            async with contextlib.aclosing(self._hub.listen(last)) as frames:
                async for frame in frames:
                    if not self._gate.still_admits(headers):
                        return
                    yield frame

    def nodes(self, url: Text = "") -> Response:
        """Return every node, or the node with this address, with its last status."""
        rows, statuses = self._overview().nodes, self._aggregator.statuses()
        wanted = [row for row in rows if url in ("", row.url)]
        return _json([msgspec.to_builtins(row) | {"status": statuses.get(row.url, {})} for row in wanted])

    def learners(self) -> Response:
        """Return every learner that reported recently."""
        return _json(self._overview().learners)

    def settings(self, run: Run = "") -> Response:
        """Return schema, parameters and limits of every server, settings of the dashboard, and all defaults.

        Secrets are left out. For a named run, these are the last settings that its servers reported.
        """
        settings = {"servers": self._aggregator.node_settings(run), "dashboard": self._settings.visible_settings()}
        return _json(settings | {"defaults": _DEFAULTS})

    def sample(self, server: Text = "", table: Text = "", client: Owner = "", number: Number = 0) -> Response:
        """Return one held sample with the probability of a draw, without taking it.

        The sample is from one server or from any, and from the first table if none is named. With `server` and
        `client`, it is the sample of the entry with this number; `earlier` and `later` of the response lead through its
        episode. Each array has dtype, shape and bytes, so that clients can show frames as pictures. The response is
        null if no such sample of up to 4 MiB is held at this moment.
        """
        row = self._table(table)
        chosen = server_for_sample(row, server)
        named = {"client": client, "number": number} if client else {}
        try:
            sample = self._aggregator.ask_server(chosen, f"/sample?{urlencode({'table': row.name} | named)}")
        except NodeError as error:
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise
            return _json(None)
        return _json({"server": chosen, **sample})

    def distribution(self, table: Text = "") -> Response:
        """Return histograms of weights and ages in a table over all servers, and its effective size."""
        row = self._table(table)
        return _json(self._aggregator.distribution(row.name, row.facts))

    def _table(self, name: str) -> TableRow:
        """Return the table of this name, or the first table for ""."""
        tables = self._overview().tables
        table = next((each for each in tables if name in ("", each.name)), None)
        if table is None:
            text = f"there is no table {name!r}" if tables else "no server answers now, so no table is known"
            raise HTTPException(http.HTTPStatus.NOT_FOUND, text)
        return table

    # -------------------------------------------------------------------------------------------------- the actors

    def actors(
        self,
        sort: Sort = "client",
        order: Literal["up", "down"] = "up",
        state: State | None = None,
        text: Text = "",
        home: Text = "",
        table: Text = "",
        offset: Offset = 0,
        limit: Limit = 100,
    ) -> Response:
        """Return a page of the actors of the current run.

        `text` is searched in name, id, label and host. Actors without the figure `sort` come last. `label` sorts by
        name, if actors have names.
        """
        rows = self._aggregator.actors()
        chosen = [row for row in rows if _matches(row, state, text.lower(), home, table)]
        with_it = [row for row in chosen if getattr(row, sort) is not None]
        with_it.sort(key=lambda row: (_rank(row, sort), row.client), reverse=order == "down")
        chosen = with_it + [row for row in chosen if getattr(row, sort) is None]
        return _json(ActorPage(len(rows), len(chosen), chosen[offset : offset + limit]))

    def spread(self, figure: Figure = "steps_per_second", bins: Annotated[int, Query(ge=1, le=100)] = 24) -> Response:
        """Return a histogram of one figure over the actors of the current run that have not ended, to find outliers."""
        values = [getattr(row, figure) for row in self._aggregator.actors() if row.state != "gone"]
        return _json(spread_of(figure, [float(each) for each in values if each is not None and isfinite(each)], bins))

    def actor(self, client: Client) -> Response:
        """Return one actor with its account at each server, the report of its home, and its newest episodes."""
        actor = self._aggregator.actor(client)
        if actor is None:
            raise HTTPException(http.HTTPStatus.NOT_FOUND, f"no actor {client} is known in this run")
        return _json(actor)

    def episodes(self, client: Text = "", limit: Limit = 100) -> Response:
        """Return the newest closed episodes of the current run, of all actors or of one, newest first."""
        return _json(self._aggregator.episodes(client, limit))

    # --------------------------------------------------------------------------------------------------- the curves

    def names(self, run: Run = "") -> Response:
        """Return the names of all recorded figures of a run."""
        return _json(self._aggregator.history.names(run or self._overview().run))

    def curves(
        self,
        name: Names,
        run: Run = "",
        since: Time = 0.0,
        until: Time = YEAR_9999,
        points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 500,
    ) -> Response:
        """Return figures over time, with the steps of the run at each time.

        Each bucket has mean, minimum and maximum, so that spikes stay visible. `since` 0 is the beginning of the run.
        """
        return _json(self._aggregator.curves(run, name, since, until, points))

    def runs(self) -> Response:
        """Return every known run, newest last."""
        return _json(self._aggregator.runs())

    def events(self, run: Run = "") -> Response:
        """Return the events of a run, oldest first: it began; a node went away, came back or restarted."""
        return _json(self._aggregator.events(run))

    def csv(self, run: Run = "", name: Names = []) -> Response:  # noqa: B006  FastAPI copies defaults
        """Return figures of a run as a CSV table with all recorded points."""
        run, names = self._wanted(run, name)
        return _file(CsvTable, run_file.csv_of(self._aggregator.history, run, names), run, "csv")

    def tensorboard(self, run: Run = "", name: Names = []) -> Response:  # noqa: B006
        """Return figures of a run as an event file for TensorBoard."""
        run, names = self._wanted(run, name)
        events = run_file.events_of(self._aggregator.history, run, names)
        return _file(EventFile, events, run, "tfevents")

    def run_file(self, run: Run = "") -> Response:
        """Return all records of a run in one file, for `memoire dashboard --open FILE`."""
        name = run or self._overview().run
        row = next((each for each in self._aggregator.history.runs() if each.name == name), None)
        if row is None:
            raise HTTPException(http.HTTPStatus.NOT_FOUND, f"no run {name!r} is known here; /api/runs lists them")
        return _file(RunFile, run_file.export_pieces(self._aggregator.history, row, wall_clock()), name, "run.gz")

    def _wanted(self, run: str, names: list[str]) -> tuple[str, list[str]]:
        run = run or self._overview().run
        return run, names or self._aggregator.history.names(run)

    # ----------------------------------------------------------------------------------------------------- the logs

    def logs(
        self,
        text: Text = "",
        client: Annotated[str, Query(pattern="^([0-9a-f]{32})?$")] = "",
        label: Annotated[str, Query(pattern="^[0-9a-f]{0,8}$")] = "",
        since: Time | None = None,
        until: Time | None = None,
        run: Run = "",
        server: Text = "",
        cursor: Annotated[str, Query(max_length=65536, pattern=f"^{logs.CURSOR}$")] = "",
        direction: logs.Direction = "older",
        limit: Limit = 100,
    ) -> Response:
        """Return log lines of all servers, or of one, newest first.

        To follow the log, use direction=newer with `newer` of the last page as the cursor; to go back, use
        direction=older with its `older`. To see the lines around a line, use its server and the cursor "index@server",
        once in each direction.
        """
        times = {name: repr(time) for name, time in (("since", since), ("until", until)) if time is not None}
        texts = {"text": text, "client": client, "label": label, "run": run}
        wanted = times | {name: value for name, value in texts.items() if value}
        servers = list(self._aggregator.servers())
        if server and server not in servers:
            raise HTTPException(http.HTTPStatus.NOT_FOUND, f"there is no server {server!r}")
        asked, places = [server] if server else servers, logs.read_cursor(cursor)
        return _json(logs.search(self._aggregator.ask_servers, asked, wanted, places, direction, limit))

    # ---------------------------------------------------------------------------------------------------- access

    def session(self, request: Request) -> Response:
        """Return whether a token is needed, and whether the request is let in."""
        is_let_in = self._gate.still_admits(request.headers)
        return _json(LoginState(needs_token=not self._gate.is_open, is_let_in=is_let_in, software=SOFTWARE))

    async def login(self, request: Request, token: Token) -> Response:
        """Log in with the token; the response sets a cookie that scripts cannot read. Wrong tokens cause a delay."""
        if self._gate.is_open:
            raise HTTPException(http.HTTPStatus.FORBIDDEN, "no token is needed here")
        try:
            number = self._gate.log_in(token.token, origin_of(request.scope))
        except TooManyWrongTokens as many:
            return too_many(many)
        except ProtocolError as busy:
            raise HTTPException(http.HTTPStatus.SERVICE_UNAVAILABLE, busy.detail, {"Retry-After": "60"}) from busy
        if number is None:
            await asyncio.sleep(WRONG_TOKEN_DELAY)
            raise HTTPException(http.HTTPStatus.FORBIDDEN, "the token is wrong")
        answer = Response(status_code=http.HTTPStatus.NO_CONTENT)
        answer.set_cookie(COOKIE, number, max_age=int(LOGIN_LIFETIME), **self._cookie_marks(request))
        return answer

    def logout(self, request: Request) -> Response:
        """End the login of the request, and delete its cookie."""
        self._gate.log_out(request.headers)
        answer = Response(status_code=http.HTTPStatus.NO_CONTENT)
        answer.delete_cookie(COOKIE, **self._cookie_marks(request))
        return answer

    def _cookie_marks(self, request: Request) -> dict[str, Any]:
        is_safe = is_by_tls(request.url.scheme, request.headers)
        return {"path": self._settings.root_path or "/", "httponly": True, "samesite": "strict", "secure": is_safe}

    # --------------------------------------------------------------------------------------------------- for machines

    def metrics(self, request: Request) -> Response:
        """Return metrics of the cluster and of the dashboard, for Prometheus."""
        return self._probe("/metrics", request)

    def livez(self, request: Request) -> Response:
        """Return 200, or 503 if the dashboard needs a restart."""
        return self._probe("/livez", request)

    def readyz(self, request: Request) -> Response:
        """Return 200, or 503 while there is no overview yet."""
        return self._probe("/readyz", request)

    def _probe(self, path: str, request: Request) -> Response:
        page = self._probes[path](None, pages.PageRequest(path, headers=request.headers))
        return Response(page.body, page.status, headers={"Content-Type": page.kind})

    def _overview(self) -> Overview:
        overview = self._aggregator.newest
        if overview is None:
            text = "the dashboard has no overview yet: repeat the request in a second"
            raise HTTPException(http.HTTPStatus.SERVICE_UNAVAILABLE, text, {"Retry-After": "1"})
        return overview


def create_app(aggregator: Source, hub: ListenerHub, gate: Logins, probes: Mapping[str, Handler]) -> FastAPI:
    """Return the FastAPI application of a dashboard.

    Args:
        aggregator: Source of overviews; the caller starts it.
        hub: Listeners of the stream, to which the aggregator sends overviews.
        gate: Tokens and logins.
        probes: Handlers of health and metrics (`probe_pages`).
    """
    api = Api(aggregator, hub, gate, probes)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        hub.attach(asyncio.get_running_loop())
        yield

    app = FastAPI(
        title="memoire dashboard",
        version=VERSION,
        openapi_url="/api/openapi.json",
        docs_url=None,  # FastAPI's pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    refusals = _refusals({"model": ProblemAnswer})
    # Error responses are JSON even if the page is HTML.
    reference = {"$ref": f"#/components/schemas/{ProblemAnswer.__name__}"}
    plain = _refusals({"content": {"application/json": {"schema": reference}}})
    for path, handler, model in _routes(api):
        is_json = not (isinstance(model, type) and issubclass(model, Response))
        app.add_api_route(
            path,
            handler,
            response_model=model if is_json else None,
            response_class=JSONResponse if is_json else model,
            responses=refusals if is_json else plain,
        )
    app.add_api_route(
        "/api/login", api.login, methods=["POST"], status_code=204, response_model=None, responses=refusals
    )
    app.add_api_route(
        "/api/logout", api.logout, methods=["POST"], status_code=204, response_model=None, responses=refusals
    )
    add_pages(app, aggregator.settings.root_path)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(MemoireError, _wrong)
    app.add_exception_handler(NodeError, _away)
    app.add_middleware(AccessMiddleware, settings=aggregator.settings, gate=gate)
    return app


def server_for_sample(row: TableRow, server: str) -> str:
    """Return the server to ask for a sample: `server`, or for "" a random one in proportion to its samples."""
    if server not in ("", *row.facts):
        raise HTTPException(http.HTTPStatus.NOT_FOUND, f"there is no server {server!r} now that has this table")
    held = {name: int(facts["held_samples"]) for name, facts in row.facts.items() if server in ("", name)}
    return random.choices(list(held), [1 + samples for samples in held.values()])[0]


def _refusals(description: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    codes = (400, 401, 403, 404, 411, 413, 421, 422, 429, 502, 503)
    return {code: {"description": http.HTTPStatus(code).phrase, **description} for code in codes}


def _routes(api: Api) -> list[tuple[str, Any, Any]]:
    """Return path, handler and response type of each route."""
    return [
        ("/api/overview", api.overview, Overview),
        ("/api/stream", api.stream, Stream),
        ("/api/nodes", api.nodes, list[NodeRow]),
        ("/api/learners", api.learners, list[LearnerRow]),
        ("/api/settings", api.settings, dict[str, Any]),
        ("/api/sample", api.sample, HeldSample | None),
        ("/api/distribution", api.distribution, ClusterDistribution),
        ("/api/actors", api.actors, ActorPage),
        ("/api/actors/{client}", api.actor, ActorDetail),
        ("/api/spread", api.spread, ActorSpread),
        ("/api/episodes", api.episodes, list[EpisodeRow]),
        ("/api/figures", api.names, list[str]),
        ("/api/curves", api.curves, Curves),
        ("/api/runs", api.runs, list[RunInfo]),
        ("/api/events", api.events, list[EventRow]),
        ("/api/export.run", api.run_file, RunFile),
        ("/api/export.csv", api.csv, CsvTable),
        ("/api/export.tfevents", api.tensorboard, EventFile),
        ("/api/logs", api.logs, LogPage),
        ("/api/session", api.session, LoginState),
        ("/metrics", api.metrics, PlainTextResponse),
        ("/livez", api.livez, dict[str, Any]),
        ("/readyz", api.readyz, dict[str, Any]),
    ]


def _matches(row: ActorRow, state: str | None, text: str, home: str, table: str) -> bool:
    if state not in (None, row.state) or home not in ("", row.home) or table not in ("", row.table):
        return False
    return not text or any(text in each for each in (row.name.lower(), row.client, row.label, row.host.lower()))


def _rank(row: ActorRow, by: str) -> Any:
    """Return the sort key of an actor. For `label` it is the shown name, so that "actor-9" sorts before "actor-10"."""
    if by != "label":
        return getattr(row, by)
    texts = re.split(r"(\d+)", row.name or row.label)
    return [int(text) if at % 2 else text for at, text in enumerate(texts)]


def _json(value: Any, status: int = 200) -> Response:
    plain = value.model_dump() if isinstance(value, BaseModel) else value
    return Response(msgspec.json.encode(plain), status, media_type="application/json")


def _file(kind: type[StreamingResponse], body: Iterator[bytes], run: str, ending: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="memoire-{run_file.file_name(run) or "run"}.{ending}"'}
    return kind(body, headers=headers)


async def _refused(_: Request, raised: Exception) -> Response:
    assert isinstance(raised, HTTPException)
    return error(raised.status_code, str(raised.detail), dict(raised.headers or {}))


async def _invalid(_: Request, raised: Exception) -> Response:
    assert isinstance(raised, RequestValidationError)
    text = "; ".join(f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in raised.errors()[:5])
    return error(http.HTTPStatus.UNPROCESSABLE_ENTITY, text)


async def _wrong(_: Request, raised: Exception) -> Response:
    return error(http.HTTPStatus.BAD_REQUEST, str(raised))


async def _away(_: Request, raised: Exception) -> Response:
    assert isinstance(raised, NodeError)
    is_ours = raised.status in (http.HTTPStatus.BAD_REQUEST, http.HTTPStatus.NOT_FOUND)
    return error(raised.status if is_ours else http.HTTPStatus.BAD_GATEWAY, str(raised))
