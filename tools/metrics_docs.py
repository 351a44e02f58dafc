"""Write the tables of metrics in docs/metrics.md and docs/dashboard.md, and titles of the boards of deploy/monitoring.

All follow from what the stats declare of their figures: run it when that changes, then `make chart`.
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
from memoire.rl.step_clock import TrainerStanding, WorkerStanding
from memoire.server.stats import ServerStats

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS, BOARDS = ROOT / "docs", ROOT / "deploy" / "monitoring"
UNITS = {"bytes": "bytes", "s": "s", "share": "percentunit"}
"""What Grafana calls our units; of others "short"."""
CHANGED = re.compile(r"rate\(|min\(|quantile\(| [-/] |count\(")
"""What makes another figure of one."""
BEGIN, END = "<!-- Written by tools/metrics_docs.py. -->\n", "<!-- Until here. -->\n"
SECTIONS = {
    "": ("Every node", ScrapedNode),
    "server": ("Servers", ServerStats),
    "prompts": ("Servers with tables of prompts", by_table(PromptStats)),
    "proxy": ("Proxies and relays", ProxyStats),
    "actor": ("Actors", ClientStats),
    "learner": ("Learners far away", ReaderStats),
    "inference": ("Inference nodes", InferenceStats),
    "worker": ("Rollout workers, beside those of actors", WorkerStanding),
    "trainer": ("Trainers, beside those of learners far away", TrainerStanding),
}
"""By role or program: the title of its section, and the stats that say its figures."""


def rows(kind, of=""):
    """A table of the metrics of a class: name, type, labels, meaning."""
    yield "| metric | type | label | meaning |\n|---|---|---|---|\n"
    if kind in (ScrapedNode, Overview):
        yield f"| `{BUILD_INFO.full_name}` | gauge | version, python, libzmq, role, name | {BUILD_INFO.help} |\n"
    for sources in catalogue(kind, of).values():
        figure, labels = sources[0].figure, ", ".join(sources[0].labels)
        yield f"| `{figure.full_name}` | {figure.kind} | {labels} | {figure.help} |\n"


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
    """A board of Grafana, in which each panel that shows one figure as it is has its title and unit."""
    read = json.loads(text)
    kinds = [(kind, "") for _, kind in SECTIONS.values()] + [(Overview, "cluster")]
    known = {found[0].figure.full_name: found[0].figure for each in kinds for found in catalogue(*each).values()}
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
"""What is written, and how it is made of what is there."""


if __name__ == "__main__":
    for path, written in PAGES.items():
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
