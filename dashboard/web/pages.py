"""The pages' files: our own, and uPlot out of the installed package `youplot`, where it is the one we know."""

from __future__ import annotations

import hashlib
import html
import importlib.resources
import json
import logging
import re
from dataclasses import dataclass
from functools import cached_property
from importlib.resources.abc import Traversable

from fastapi import FastAPI, Request
from fastapi.responses import Response

from memoire.dashboard.collect.answers import terms

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
