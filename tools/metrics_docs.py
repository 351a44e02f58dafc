"""Write the tables of metrics in docs/metrics.md and docs/dashboard.md, as the stats declare their figures.

Run it when these change.
"""

import pathlib

from memoire.client.stats import ClientStats
from memoire.dashboard.collect.answers import Overview
from memoire.dashboard.web.metrics import ScrapedDashboard
from memoire.figures import catalogue
from memoire.inference.batching import InferenceStats
from memoire.nodes.metrics import BUILD_INFO, ScrapedNode
from memoire.proxy.proxy import ProxyStats
from memoire.reader.reader import ReaderStats
from memoire.rl.step_clock import TrainerStanding, WorkerStanding
from memoire.server.stats import ServerStats

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
BEGIN, END = "<!-- Written by tools/metrics_docs.py. -->\n", "<!-- Until here. -->\n"
SECTIONS = {
    "": ("Every node", ScrapedNode),
    "server": ("Servers", ServerStats),
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


PAGES = {DOCS / "metrics.md": tables, DOCS / "dashboard.md": of_dashboard}


def page(text, written):
    before, _, after = text.partition(BEGIN)
    return before + BEGIN + "".join(written()) + END + after.partition(END)[2]


if __name__ == "__main__":
    for path, written in PAGES.items():
        path.write_text(page(path.read_text(encoding="utf-8"), written), encoding="utf-8")
