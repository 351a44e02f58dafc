"""Generator of the tables in docs/metrics.md and docs/dashboard.md, and of the boards' titles in deploy/monitoring.

The source is the declaration of each figure in the stats classes. Run it when they change, then `make chart`.
"""

import functools
import json
import pathlib
import re

from memoire.client.reports import ClientStats
from memoire.dashboard.collect.answers import Overview
from memoire.dashboard.web.serve import ScrapedDashboard
from memoire.figures import catalogue
from memoire.inference.batching import InferenceStats
from memoire.nodes.metrics import BUILD_INFO, ScrapedNode, by_table
from memoire.prompts.table import PromptStats
from memoire.proxy.proxy import ProxyStats
from memoire.reader.reader import ReaderStats
from memoire.rl.step_clock import TrainerStats, WorkerStats
from memoire.server.stats import ServerStats

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS, BOARDS = ROOT / "docs", ROOT / "deploy" / "monitoring"
UNITS = {"bytes": "bytes", "s": "s", "share": "percentunit"}
"""Grafana's names for units of memoire; any other unit is "short"."""
CHANGED = re.compile(r"rate\(|min\(|quantile\(| [-/] |count\(")
"""Parts of a query that turn a figure into another one."""
BEGIN, END = "<!-- Written by tools/metrics_docs.py. -->\n", "<!-- Until here. -->\n"
SECTIONS = {
    "": ("Every node", ScrapedNode),
    "server": ("Servers", ServerStats),
    "prompts": ("Servers with tables of prompts", by_table(PromptStats)),
    "proxy": ("Proxies and relays", ProxyStats),
    "actor": ("Actors", ClientStats),
    "learner": ("Learners far away", ReaderStats),
    "inference": ("Inference nodes", InferenceStats),
    "worker": ("Rollout workers, beside those of actors", WorkerStats),
    "trainer": ("Trainers, beside those of learners far away", TrainerStats),
}
"""Title of the section and stats class with the figures, by role or program."""


def rows(kind, of=""):
    """Yield the lines of a table of a class's metrics: name with labels, type, meaning."""
    yield "| metric (labels) | type | meaning |\n|---|---|---|\n"
    if kind in (ScrapedNode, Overview):
        yield f"| `{BUILD_INFO.full_name}` (version, python, libzmq, role, name) | gauge | {BUILD_INFO.help} |\n"
    for sources in catalogue(kind, of).values():
        figure, labels = sources[0].figure, ", ".join(sources[0].labels)
        name = f"`{figure.full_name}` ({labels})" if labels else f"`{figure.full_name}`"
        yield f"| {name} | {figure.kind} | {figure.help} |\n"


def tables():
    for title, kind in SECTIONS.values():
        yield f"\n## {title}\n\n"
        yield from rows(kind)
    yield "\n"


def of_dashboard():
    yield from rows(Overview, "cluster")
    yield from list(rows(ScrapedDashboard))[1:]


def page(text, written):
    before, _, after = text.partition(BEGIN)
    return before + BEGIN + "".join(written()) + END + after.partition(END)[2]


def board(text):
    """Return a Grafana board; each panel that shows one figure unchanged gets the figure's title and unit."""
    read = json.loads(text)
    kinds = [(kind, "") for _, kind in SECTIONS.values()] + [(Overview, "cluster")]
    known = {origins[0].figure.full_name: origins[0].figure for each in kinds for origins in catalogue(*each).values()}
    for panel in read["panels"]:
        queries = " ".join(target["expr"] for target in panel.get("targets", ()))
        figures = [known[name] for name in re.findall(r"\bmemoire_\w+", queries) if name in known]
        if len({figure.title for figure in figures}) == 1 and not CHANGED.search(queries):
            panel["title"] = figures[-1].title
            panel["fieldConfig"]["defaults"]["unit"] = UNITS.get(figures[-1].unit, "short")
    return json.dumps(read, indent=1) + "\n"


PAGES = {
    DOCS / "metrics.md": functools.partial(page, written=tables),
    DOCS / "dashboard.md": functools.partial(page, written=of_dashboard),
    BOARDS / "overview.json": board,
    BOARDS / "servers-and-proxies.json": board,
}
"""Files that are written, and the function that makes each new text from the old one."""


if __name__ == "__main__":
    for path, written in PAGES.items():
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
