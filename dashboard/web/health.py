"""The dashboard's own health and metrics, as pages: at its address, or at a port of their own."""

from __future__ import annotations

from collections.abc import Mapping

from memoire.dashboard.collect.opened import Source
from memoire.nodes.exposition import Exposition
from memoire.nodes.pages import Handler, Node, Page, PageRequest, as_json


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
