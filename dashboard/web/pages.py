"""What browsers get: the pages' files, and one stream for all tabs.

Files are our own, and uPlot out of the installed package `youplot`, where it is the one we know.

Each overview is put into words once, and the same bytes go to everybody who listens. Who is too slow loses the oldest:
the next overview says everything again. Who comes back says which one was the last that he has (Last-Event-ID), and
gets those since, as far as they are kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import importlib.resources
import json
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import cached_property
from importlib.resources.abc import Traversable

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from memoire.dashboard.collect.answers import Overview, terms

from .access import error

_log = logging.getLogger(__name__)

KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
VENDOR = {
    "vendor/uplot.js": "uplot.iife.min.js",
    "vendor/uplot.css": "uplot.min.css",
}
"""Under which path, and which file of `youplot`."""
KNOWN = {
    "2d27e8ad3d228164525ce213f9dc716f39b4e3aee0cc773fb3491c96cf4921a2",  # uPlot 1.6.31
    "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of the third-party files that are served: any other is not."""


MAX_LISTENERS = 200
MAX_KEPT_OVERVIEWS = 600
"""Newest overviews that are sent again to a listener that comes back; each is whole: older ones are not missed."""
BEHIND = 16
"""Overviews that wait for a listener."""
KEEP_ALIVE_INTERVAL = 15.0
"""Seconds of silence after which a comment is sent, so that nobody in between hangs up."""


@dataclass(frozen=True)
class StaticFile:
    """One file as browsers get it."""

    body: bytes
    kind: str

    @cached_property
    def tag(self) -> str:
        """Changes with the content: a browser asks each time, and is told that nothing has changed."""
        return f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'


def load() -> dict[str, StaticFile]:
    """Path under /static/ and file, all in memory: what is not in here cannot be asked for."""
    files = dict(_own(importlib.resources.files("memoire.dashboard") / "static", ""))
    files["terms.js"] = StaticFile(b"export const TERMS = " + terms_as_json() + b";\n", KINDS["js"])
    for path, name in VENDOR.items():
        files[path] = StaticFile(vendored(name), KINDS[path.rpartition(".")[2]])
    files["index.html"] = preloading(files)
    return files


def terms_as_json() -> bytes:
    """What figures mean, for pages, by name: title, text, unit, formula and the page of the documentation."""
    found = {}
    for name, each in terms():
        formula = each.formula.replace("-", "\N{MINUS SIGN}")
        found[name] = {"title": each.title, "text": each.help, "unit": each.unit, "formula": formula, "docs": each.docs}
    return json.dumps(found, ensure_ascii=False).encode()


def preloading(files: dict[str, StaticFile]) -> StaticFile:
    """The page, which also names all our modules: a browser asks for them at once, not after each other as one imports
    the next.
    """
    page = files["index.html"]
    ours = sorted(path for path in files if path.endswith(".js") and path not in VENDOR)
    links = "".join(f'  <link rel="modulepreload" href="static/{path}">\n' for path in ours)
    return StaticFile(page.body.replace(b"</head>", links.encode() + b"</head>"), page.kind)


def _own(folder: Traversable, prefix: str) -> list[tuple[str, StaticFile]]:
    found: list[tuple[str, StaticFile]] = []
    for each in folder.iterdir():
        kind = KINDS.get(each.name.rpartition(".")[2])
        if each.is_dir():
            found += _own(each, f"{prefix}{each.name}/")
        elif kind is not None:
            found.append((prefix + each.name, StaticFile(each.read_bytes(), kind)))
    return found


def vendored(name: str) -> bytes:
    """A file of `youplot`; nothing where it is missing or not one we know: charts are then drawn more plainly."""
    try:
        body = (importlib.resources.files("youplot") / "vendor" / name).read_bytes()
    except (ModuleNotFoundError, OSError):
        _log.info("charts are drawn without uPlot: pip install youplot brings it")
        return b""
    if hashlib.sha256(body).hexdigest() in KNOWN:
        return body
    _log.warning("charts are drawn without uPlot: %s of the installed youplot is not a version that is known", name)
    return b""


def add_pages(app: FastAPI, root_path: str) -> None:
    """Serve "/" and "/static/" of a dashboard that is shown under `root_path`."""
    files = load()
    files["index.html"] = under(root_path, files["index.html"])

    def page(request: Request) -> Response:
        return _answer(request, files["index.html"])

    def static(request: Request, path: str) -> Response:
        return _answer(request, files[path]) if path in files else error(404, "there is no such file")

    app.add_api_route("/", page, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/static/{path:path}", static, methods=["GET", "HEAD"], include_in_schema=False)


def under(root_path: str, page: StaticFile) -> StaticFile:
    """The page with addresses that hold wherever it is asked for: "/memoire" and "/memoire/" differ to a browser."""
    if not root_path:
        return page  # relative addresses hold behind a proxy that takes any path off, if it is asked for with its slash
    root = html.escape(root_path.rstrip("/")).encode()
    return StaticFile(re.sub(rb'(href|src)="(static/|api/|metrics)', rb'\1="' + root + rb"/\2", page.body), page.kind)


def _answer(request: Request, file: StaticFile) -> Response:
    headers = {"ETag": file.tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers | {"Content-Type": file.kind})


class TooManyListeners(Exception):
    """Too many listen already."""


class ListenerHub:
    """Everybody who listens. `put` may be called from any thread, the rest belongs to the loop."""

    def __init__(self) -> None:
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=MAX_KEPT_OVERVIEWS)
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def listeners(self) -> int:
        """How many listen."""
        return len(self._listeners)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send on this loop from now on."""
        self._loop = loop

    def put(self, overview: Overview) -> None:
        """Tell everybody."""
        frame = b"id: %d\nevent: overview\ndata: %b\n\n" % (overview.number, msgspec.json.encode(overview))
        self._frames.append((overview.number, frame))
        if self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._send, frame)
            except RuntimeError:
                pass  # the loop has just ended

    def close(self) -> None:
        """End all streams; from any thread."""
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._send, None)
            except RuntimeError:
                pass

    def _send(self, frame: bytes | None) -> None:
        for queue in self._listeners:
            while queue.qsize() >= BEHIND:
                queue.get_nowait()
            queue.put_nowait(frame)

    async def listen(self, last: int | None) -> AsyncGenerator[bytes, None]:
        """Frames for one listener, until he leaves or `close`.

        Args:
            last: Number of the newest overview that he has.

        Raises:
            Full: too many listen.
        """
        if len(self._listeners) >= MAX_LISTENERS:
            raise TooManyListeners
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            yield b"retry: 2000\n\n"
            for frame in self._since(last):
                yield frame
            while not self._closed:
                try:
                    wanted = await asyncio.wait_for(queue.get(), KEEP_ALIVE_INTERVAL)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if wanted is None:
                    return
                yield wanted
        finally:
            self._listeners.discard(queue)

    def _since(self, last: int | None) -> list[bytes]:
        """What he missed; the newest alone where nobody knows what he has."""
        kept = list(self._frames)
        known = last is not None and any(number == last for number, _ in kept)
        return [frame for number, frame in kept if number > (last or 0)] if known else [f for _, f in kept[-1:]]
