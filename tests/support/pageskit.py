"""Helpers for tests of the dashboard's pages: a browser's page without complaints, and a cluster to show."""

import contextlib
import functools
import json
import re
import runpy
import urllib.parse
from pathlib import Path
from types import SimpleNamespace

import pytest

from memoire.dashboard.collect.history import HistoryPoint
from memoire.dashboard.collect.verdict import VerdictInputs
from netkit import record, until

serving = pytest.importorskip("memoire.dashboard.web.serve", reason="fastapi is not installed")
Settings = pytest.importorskip("memoire.dashboard.settings").Settings

NAMES = (
    "overview", "live", "learning", "lag", "inference", "starts", "prompts", "runs", "memory", "actors", "nodes", "logs", "settings",
)  # fmt: skip
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
BOTH = (("light", DESKTOP), ("dark", PHONE))
"""Themes, each with a size of window."""
PATIENCE = 100_000
"""Milliseconds that a test waits for the content of a page."""


def watch(*nodes, steps=0, **options):
    """Return a dashboard of these nodes, or URLs, that has polled them and counted at least so many steps."""
    urls = tuple(getattr(node, "url", node) for node in nodes)
    board = serving.Dashboard(Settings(**{"nodes": urls, "listen": "127.0.0.1:0", "poll_every": 0.1} | options))
    until(lambda: board.aggregator.newest and board.aggregator.newest.totals.steps >= steps)
    return board


@contextlib.contextmanager
def window(browser, url, *, size=DESKTOP, allowed=(), **options):
    """Open a page that must neither complain nor send a request to another host."""
    wrong, ours = [], urllib.parse.urlsplit(url).netloc
    with contextlib.closing(browser.new_context(viewport=size, **options)) as context:
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(f"a dialog: {dialog.message}") or dialog.dismiss())
        page.on("request", lambda request: wrong.append(request.url) if not is_ours(request.url, ours) else None)
        page.set_default_timeout(PATIENCE)
        yield page
    assert [each for each in wrong if not any(part in each for part in allowed)] == []


def is_ours(url, ours):
    return url.startswith(("blob:", "data:")) or urllib.parse.urlsplit(url).netloc == ours


def open_page(page, url, name):
    page.goto(f"{url}/#/{name}")
    page.wait_for_selector("#live[data-state=live]")


def complaints(page):
    """Return the violations that axe reports on the page, in words."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    violations = axe.Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['help']}: {node['html'][:200]}" for each in violations for node in each["nodes"]]


def check_drawn(page, size, name):
    """Assert that a page is no wider than its window, and that axe reports no violation."""
    # A chart takes its width from its place a moment after the place has one.
    page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=size["width"])
    assert complaints(page) == [], name


def fact(where, name):
    """Return the text beside a name in a list of facts."""
    return where.locator("dt", has_text=name).locator("xpath=following-sibling::dd[1]").first.inner_text()


def tiles(page):
    """Return the totals that the overview shows: name in the API -> number."""
    figures = page.locator(".tile[data-figure]").evaluate_all(
        "all => all.map(each => [each.dataset.figure, each.querySelector('.value').textContent])"
    )
    return {name: int(re.sub(r"\D", "", value)) for name, value in figures if name in ("steps", "episodes", "caches")}


def three_actors(cluster, server, line):
    """Connect three clients: number n has n episodes of 20 steps, a scalar, a cache, and a line that ends `line`."""
    clients = [cluster.client(server, seed=n) for n in range(3)]
    for number, client in enumerate(clients, 1):
        record(client, episodes=number, length=20)
        client.scalars({"epsilon": number / 10})
        client.log(f"line of {number} {line}")
        assert client.push_cache(100.0)
        client.update(100.0)
    until(lambda: server.total_caches == 3)
    server.scalars({"loss": 0.5})
    server.get_batch(16, timeout=100.0)
    return clients


def one(value):
    return HistoryPoint(value, value, value)


ROOT = Path(__file__).resolve().parents[2]

FOLDER = ROOT / "deploy" / "monitoring"

BOARDS = {"overview.json": "memoire-overview", "servers-and-proxies.json": "memoire-nodes"}


@functools.cache
def rules():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    content = yaml.safe_load((FOLDER / "memoire.rules.yaml").read_text(encoding="utf-8"))
    return [rule for group in content["groups"] for rule in group["rules"]]


def board(file):
    return json.loads((FOLDER / file).read_text(encoding="utf-8"))


@functools.cache
def metric_kinds(role):
    """Map the metrics of a role's scrape ("": of every node) to their kinds, without those of any Python process."""
    from memoire.figures import catalogue  # noqa: PLC0415

    tool = runpy.run_path(str(ROOT / "tools" / "metrics_docs.py"))
    figures = [tool["BUILD_INFO"]]
    for each in dict.fromkeys(("", role)):
        figures += [sources[0].figure for sources in catalogue(tool["SECTIONS"][each][1]).values()]
    return {figure.full_name: figure.kind for figure in figures}


WELL = SimpleNamespace(
    nodes=2, nodes_down=(), unready=(), servers_up=1, finished=False, active=4, silent=0, idle=0, lost=0, gone=0,
    expected=0, steps_per_second=500.0, samples_per_second=2000.0, waiting_share=0.05, skipped_share=0.0,
    refused_per_second=0.0, disk_used=None, disk_trouble="", draws_wait=(), inserts_wait=(), is_idle=False,
    left_out=None, proxies_up=0, expected_servers=0, expected_proxies=0, expected_inference=0, is_still=False,
    nothing_arrives=False, rejected_share=0.0, ratios=(), early_ratios=(), sample_age=None, stale_after=float("inf"),
    outdated=0, inference=(), lags=(), stale=(), only_rollouts=False, feedback=None,
)  # fmt: skip
"""Facts about a cluster where all is well. `nodes` are up; ratios are (drawn, asked) of each table."""


def inputs_of(s):
    """Return the inputs of verdicts, for a cluster with these facts."""

    def table(name, drawn=None, asked=0.0, is_taken=s.only_rollouts, draws_wait="", inserts_wait="", **more):
        rate = SimpleNamespace(draws_wait=draws_wait, inserts_wait=inserts_wait)
        facts = {"max_model_lag": None, "lag_mean": None, "stale_share": None} | more
        return SimpleNamespace(name=name, samples_per_insert=drawn, samples_per_insert_target=asked, rate=rate,
                               is_taken=is_taken, **facts)  # fmt: skip

    early = {f"early {place}": ratio for place, ratio in enumerate(s.early_ratios)}
    tables = [table("t"), *(table(f"ratio {place}", *ratio) for place, ratio in enumerate(s.ratios))]
    tables += [table(name, None, asked) for name, (_, asked) in early.items()]
    tables += [table("lag", is_taken=True, lag_mean=value) for value in s.lags]
    tables += [table("stale", is_taken=True, stale_share=value, max_model_lag=1) for value in s.stale]
    tables += [table(name, draws_wait="few") for name in s.draws_wait]
    tables += [table(name, inserts_wait="full") for name in s.inserts_wait]
    states = ["up"] * s.nodes + ["down"] * len(s.nodes_down) + ["unready"] * len(s.unready)
    names = [*["n"] * s.nodes, *s.nodes_down, *s.unready]
    seen = SimpleNamespace(
        nodes=[SimpleNamespace(name=name, url="", state=state) for name, state in zip(names, states, strict=True)],
        finished=s.finished, actors=s, tables=tables, outdated=s.outdated, inference=s.inference,
        rates=SimpleNamespace(steps=s.steps_per_second, samples=s.samples_per_second, waiting_share=s.waiting_share,
                              skipped_share=s.skipped_share, refused=s.refused_per_second),
        freshness=SimpleNamespace(left_out=s.left_out, age_p90=s.sample_age),
        roles=[SimpleNamespace(role="proxy", up=s.proxies_up)],
    )  # fmt: skip
    same = ("servers_up", "disk_used", "disk_trouble", "is_idle", "is_still", "nothing_arrives", "rejected_share")
    return VerdictInputs(
        seen=seen, settings=s, early_ratios={name: drawn for name, (drawn, _) in early.items()}, feedback=s.feedback,
        **{name: getattr(s, name) for name in same},
    )  # fmt: skip


def well_but(**changes):
    """Return the inputs of verdicts, for a healthy cluster with these changes."""
    return inputs_of(SimpleNamespace(**vars(WELL) | changes))
