"""Static files of the pages, and one stream of overviews for all open tabs.

The files are memoire's own, and uPlot from the installed package `youplot`, if it is a known version.

Each overview is encoded once, and all listeners receive the same bytes. A listener that is too slow loses the oldest
overviews; each overview is complete by itself. A listener that reconnects names the last overview that it has
(Last-Event-ID), and receives the newer ones, as far as they are kept.
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
"""Files of `youplot` by the paths under which the dashboard serves them."""
KNOWN = {
    "2d27e8ad3d228164525ce213f9dc716f39b4e3aee0cc773fb3491c96cf4921a2",  # uPlot 1.6.31
    "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 sums of the third-party files that the dashboard serves; it serves no other third-party files."""


MAX_LISTENERS = 200
MAX_KEPT_OVERVIEWS = 600
"""Number of overviews that are kept for listeners that reconnect; each is complete, so older ones are not needed."""
BEHIND = 16
"""Number of overviews that wait for a slow listener at most."""
KEEP_ALIVE_INTERVAL = 15.0
"""Seconds without an overview after which a comment is sent, so that no proxy closes the stream."""


@dataclass(frozen=True)
class StaticFile:
    """Content and type of a file for browsers."""

    body: bytes
    kind: str

    @cached_property
    def tag(self) -> str:
        """Entity tag (ETag) of the content, by which browsers reuse an unchanged file."""
        return f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'


def load() -> dict[str, StaticFile]:
    """Load all files into memory, by path under /static/; browsers can get no other files."""
    files = dict(_own(importlib.resources.files("memoire.dashboard") / "static", ""))
    files["terms.js"] = StaticFile(b"export const TERMS = " + terms_as_json() + b";\n", KINDS["js"])
    for path, name in VENDOR.items():
        files[path] = StaticFile(vendored(name), KINDS[path.rpartition(".")[2]])
    files["index.html"] = preloading(files)
    return files


def terms_as_json() -> bytes:
    """Return title, text, unit, formula and documentation page of each figure, by name, as JSON."""
    by_name = {}
    for name, each in terms():
        formula = each.formula.replace("-", "\N{MINUS SIGN}")
        by_name[name] = {
            "title": each.title,
            "text": each.help,
            "unit": each.unit,
            "formula": formula,
            "docs": each.docs,
        }
    return json.dumps(by_name, ensure_ascii=False).encode()


def preloading(files: dict[str, StaticFile]) -> StaticFile:
    """Return the page with preload links for all JavaScript modules, so that browsers fetch them at once."""
    page = files["index.html"]
    ours = sorted(path for path in files if path.endswith(".js") and path not in VENDOR)
    links = "".join(f'  <link rel="modulepreload" href="static/{path}">\n' for path in ours)
    return StaticFile(page.body.replace(b"</head>", links.encode() + b"</head>"), page.kind)


def _own(folder: Traversable, prefix: str) -> list[tuple[str, StaticFile]]:
    files: list[tuple[str, StaticFile]] = []
    for each in folder.iterdir():
        kind = KINDS.get(each.name.rpartition(".")[2])
        if each.is_dir():
            files += _own(each, f"{prefix}{each.name}/")
        elif kind is not None:
            files.append((prefix + each.name, StaticFile(each.read_bytes(), kind)))
    return files


def vendored(name: str) -> bytes:
    """Return a file of `youplot`, or b"" if it is missing or unknown; charts are then drawn more simply."""
    try:
        body = (importlib.resources.files("youplot") / "vendor" / name).read_bytes()
    except (ModuleNotFoundError, OSError):
        _log.info("charts are drawn without uPlot; install it with: pip install youplot")
        return b""
    if hashlib.sha256(body).hexdigest() in KNOWN:
        return body
    _log.warning("charts are drawn without uPlot: %s of the installed youplot has an unknown version", name)
    return b""


def add_pages(app: FastAPI, root_path: str) -> None:
    """Add the routes "/" and "/static/" to the app of a dashboard under `root_path`."""
    files = load()
    files["index.html"] = with_root_path(root_path, files["index.html"])

    def page(request: Request) -> Response:
        return _answer(request, files["index.html"])

    def static(request: Request, path: str) -> Response:
        return _answer(request, files[path]) if path in files else error(404, "there is no such file")

    app.add_api_route("/", page, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/static/{path:path}", static, methods=["GET", "HEAD"], include_in_schema=False)


def with_root_path(root_path: str, page: StaticFile) -> StaticFile:
    """Return the page with absolute addresses under `root_path`, since browsers treat "/memoire" and "/memoire/"
    differently.
    """
    if not root_path:
        return page  # relative addresses work behind a proxy that removes a path, if the address ends with a slash
    root = html.escape(root_path.rstrip("/")).encode()
    return StaticFile(re.sub(rb'(href|src)="(static/|api/|metrics)', rb'\1="' + root + rb"/\2", page.body), page.kind)


def _answer(request: Request, file: StaticFile) -> Response:
    headers = {"ETag": file.tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers | {"Content-Type": file.kind})


class TooManyListeners(Exception):
    """The stream already has the maximal number of listeners."""


class ListenerHub:
    """Listeners of the stream of overviews.

    `put` and `close` may be called from any thread; the rest belongs to the event loop.
    """

    def __init__(self) -> None:
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=MAX_KEPT_OVERVIEWS)
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def listeners(self) -> int:
        """Number of listeners."""
        return len(self._listeners)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop that sends to the listeners."""
        self._loop = loop

    def put(self, overview: Overview) -> None:
        """Send an overview to all listeners, and keep it for those that reconnect."""
        frame = b"id: %d\nevent: overview\ndata: %b\n\n" % (overview.number, msgspec.json.encode(overview))
        self._frames.append((overview.number, frame))
        if self._loop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._send, frame)
            except RuntimeError:
                pass  # the loop has just ended

    def close(self) -> None:
        """End all streams. May be called from any thread."""
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
        """Yield the frames for one listener, until it disconnects or `close` is called.

        Args:
            last: Number of the newest overview that the listener has; None if it has none.

        Raises:
            TooManyListeners: `MAX_LISTENERS` listeners are connected.
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
        """Return the frames after overview `last`, or only the newest if `last` is not kept any more."""
        kept = list(self._frames)
        known = any(number == last for number, _ in kept)
        return [frame for number, frame in kept if number > (last or 0)] if known else [f for _, f in kept[-1:]]
