"""A real Prometheus that scrapes every node of a cluster: exactly the metrics of the catalogue arrive, rules are
evaluated, and every panel of the boards has an answer.
"""

import contextlib
import json
import math
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request

import numpy as np
import pytest

import memoire
from history.ports import block
from httpkit import ask
from memoire.nodes.http import NodePages
from netkit import SCHEMA, entry, until
from pageskit import BOARDS, FOLDER, board, rules

pytest.importorskip("memoire.nodes.metrics", reason="prometheus-client is not installed")
serving = pytest.importorskip("memoire.dashboard.web.serve", reason="fastapi is not installed")
Settings = pytest.importorskip("memoire.dashboard.settings").Settings

CONFIG = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 500ms}}
rule_files: [{rules}]
scrape_configs:
{jobs}
"""
JOB = "  - {{job_name: {job}, static_configs: [{targets}]}}"
TARGET = "{{targets: ['{target}'], labels: {labels}}}"
PATIENCE = 100.0
LAYOUTS = ("near", "far")
"""Layouts, also used as releases: the learner in the server's process, or one that draws through a proxy and is not
scraped.
"""
PER_NODE = {"memoire:held_bytes:ratio"}
"""Recording rules of single nodes."""
SILENT = {"Refused messages", "Findings"}
"""Panels without data in a healthy cluster."""


def labels(release):
    return {"namespace": "rl", "release": release, "pod": "pod-0"}


class Life:
    """Actor and learner of one cluster, which run until the end of the test."""

    def __init__(self, layout, server, client, reader, policy):
        self.layout, self.server, self.client, self.reader, self.policy = layout, server, client, reader, policy
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, name=f"life-{layout}")

    def turn(self):
        """Record an episode, with its actions from an inference node, and draw a batch."""
        self.policy.ask({"obs": [0.5]}).result(PATIENCE)
        self.client.memory.open()
        for step in range(50):
            self.client.memory.add(0, entry(SCHEMA, step), model_version=1)
        self.client.memory.close(terminated=True)
        self.client.on_entries(50)
        self.client.on_episode(0, 50, 50.0)
        assert self.client.push_cache(PATIENCE)
        self.client.update(PATIENCE)
        learner = self.server if self.layout == "near" else self.reader
        learner.get_batch(32, timeout=PATIENCE).update_priorities(np.ones(32))

    def run(self):
        while not self.ended.wait(0.25):
            self.turn()

    def __enter__(self):
        self.turn()
        self.thread.start()

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join(PATIENCE)


def cluster_of(layout, keep, folder):
    """Return the pages of the nodes of a live cluster by role, with data for every figure."""
    many = memoire.Parameters(reuse_cache=True)
    server = keep(
        memoire.Server("tcp://127.0.0.1:0", SCHEMA, name="home", run="r-1", seed=0, state=folder, parameters=many)
    )
    proxy = keep(memoire.Proxy("tcp://127.0.0.1:0", [server.endpoint], name="front"))
    client = keep(memoire.connect(proxy.endpoint, seed=0, name="actor-0"))
    reader = keep(memoire.Reader([proxy.endpoint], seed=0, name="learner-0")) if layout == "far" else None
    rows = {"obs": np.float32}
    node = keep(memoire.Inference("tcp://127.0.0.1:*", rows, rows, lambda columns: columns, name="inference-0"))
    policy = keep(memoire.RemotePolicy(node.endpoint, rows, rows, timeout=PATIENCE))
    server.publish("policy", b"weights")
    client.scalars({"loss": 1.5})
    server.scalars({"grad_norm": 2.0})
    keep(Life(layout, server, client, reader, policy))
    nodes_by_role = {"server": server, "proxy": proxy, "actor": client, "inference": node}
    nodes_by_role |= {"learner": reader} if reader else {}
    pages = {role: keep(NodePages("127.0.0.1:0", node)) for role, node in nodes_by_role.items()}
    watched = tuple(pages[role].url for role in ("server", "proxy"))
    settings = {"nodes": watched, "listen": "127.0.0.1:0", "poll_every": 0.2, "expected_actors": 1}
    pages["dashboard"] = keep(serving.Dashboard(Settings(**settings, expected_servers=1, expected_proxies=1)))
    return pages


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Two clusters, one of each layout, by (release, role). The far learner's own page belongs to no release."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        pages = {}
        for layout in LAYOUTS:
            layout_pages = cluster_of(layout, keep, tmp_path_factory.mktemp("state"))
            pages |= {(layout, role): page for role, page in layout_pages.items()}
        pages["elsewhere", "learner"] = pages.pop(("far", "learner"))
        pages["elsewhere", "server-that-ends"] = keep(NodePages("127.0.0.1:0"))
        yield pages


def targets_of(pages, role):
    """Return the targets of one role for the configuration of Prometheus."""
    hosts = {release: urllib.parse.urlsplit(page.url).netloc for (release, each), page in pages.items() if each == role}
    return ", ".join(TARGET.format(target=at, labels=json.dumps(labels(release))) for release, at in hosts.items())


class Prometheus:
    """A real Prometheus, in a process of its own, that scrapes these pages."""

    def __init__(self, folder, pages):
        self.address = f"127.0.0.1:{block(1)}"
        roles = dict.fromkeys(role for _, role in pages)
        jobs = "\n".join(JOB.format(job=f"memoire-{role}", targets=targets_of(pages, role)) for role in roles)
        config = folder / "prometheus.yaml"
        config.write_text(CONFIG.format(rules=FOLDER / "memoire.rules.yaml", jobs=jobs), encoding="utf-8")
        self.log = open(folder / "log", "wb")  # noqa: SIM115  `close` closes the file
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address={self.address}", "--log.level=warn"]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, cwd=folder)

    def ask(self, path, **parameters):
        """Return the answer of its API; None while the process starts."""
        try:
            status, _, body = ask(f"http://{self.address}", f"api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        except ConnectionRefusedError:
            assert self.process.poll() is None, "it ended"
            return None
        if status == 503:
            return None
        answer = json.loads(body)
        assert answer["status"] == "success", (path, parameters, answer)
        return answer["data"]

    def up(self):
        """Return the number of targets that were scraped without a fault."""
        targets = self.ask("targets", state="active")
        return 0 if targets is None else sum(each["health"] == "up" for each in targets["activeTargets"])

    def close(self):
        self.process.terminate()
        self.process.wait(100.0)
        self.log.close()


@pytest.fixture(scope="module")
def prometheus(nodes, tmp_path_factory):
    with contextlib.closing(Prometheus(tmp_path_factory.mktemp("prometheus"), nodes)) as service:
        until(lambda: service.up() == len(nodes), PATIENCE)
        until(lambda: all(rule["health"] != "unknown" for rule in rules_of(service)), PATIENCE)
        yield service


def rules_of(prometheus):
    return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]


def test_every_rule_is_loaded_and_evaluated_without_a_fault(prometheus):
    loaded = rules_of(prometheus)
    assert sorted(rule["name"] for rule in loaded) == sorted(rule.get("alert", rule.get("record")) for rule in rules())
    assert [(rule["name"], rule.get("lastError")) for rule in loaded if rule["health"] != "ok"] == []
    assert [alert["labels"] for alert in prometheus.ask("alerts")["alerts"] if alert["state"] == "firing"] == []


def panels():
    return [
        pytest.param(file, panel, id=f"{file.partition('.')[0]}: {panel['title']}")
        for file in BOARDS
        for panel in board(file)["panels"]
        if panel.get("targets")
    ]


def asked(panel, release):
    """Yield (legend, query) of a panel as Grafana sends them for one release, with all other variables at All."""
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", "1m").replace("$release", release)
        yield target["legendFormat"], re.sub(r"\$(namespace|pod)\b", ".*", query)


def numbers(prometheus, query):
    """Return the numbers that a query answers now, without NaN."""
    values = [float(each["value"][1]) for each in prometheus.ask("query", query=query)["result"]]
    return [number for number in values if not math.isnan(number)]


@pytest.mark.parametrize("release", LAYOUTS)
@pytest.mark.parametrize(("file", "panel"), panels())
def test_every_query_of_every_panel_has_an_answer(prometheus, file, panel, release):
    for _, query in asked(panel, release):
        assert "$" not in query
        if panel["title"] in SILENT:
            until(lambda: numbers(prometheus, query) == [], PATIENCE)  # noqa: B023
        else:  # a rate takes two scrapes, and a ratio takes half a minute of the dashboard's figures
            assert until(lambda: numbers(prometheus, query), PATIENCE), query  # noqa: B023  asked at once


def test_the_overview_shows_what_the_dashboards_merged(prometheus, nodes):
    (panel,) = [each for each in board("overview.json")["panels"] if each["title"] == "Steps"]
    totals = {release: nodes[release, "dashboard"].aggregator for release in LAYOUTS}
    for release, aggregator in totals.items():
        (query,) = [query for _, query in asked(panel, release)]
        before = aggregator.newest.totals.steps
        shown = until(lambda: [each for each in numbers(prometheus, query) if each >= before], PATIENCE)  # noqa: B023
        assert shown[0] <= aggregator.newest.totals.steps


@pytest.mark.parametrize("release", LAYOUTS)
@pytest.mark.parametrize("record", sorted({rule["record"] for rule in rules() if "record" in rule} - PER_NODE))
def test_every_record_of_a_cluster_is_there_wherever_the_learner_is(prometheus, record, release):
    until(lambda: numbers(prometheus, f'{record}{{release="{release}"}}'), PATIENCE)


def test_variables_of_the_boards_find_what_is_there(prometheus):
    for file in BOARDS:
        for variable in board(file)["templating"]["list"]:
            if variable["type"] != "query":
                continue
            query = variable["query"] if isinstance(variable["query"], str) else variable["query"]["query"]
            matched, label = re.fullmatch(r"label_values\((.*), ?(\w+)\)", query).groups()
            matched = re.sub(r"\$(namespace|release)\b", ".*", matched)
            wanted = {"namespace": ["rl"], "release": ["elsewhere", "far", "near"], "pod": ["pod-0"]}
            assert prometheus.ask(f"label/{label}/values", **{"match[]": matched}) == wanted[label]


def test_a_server_that_ends_is_an_alert(prometheus, nodes):
    """The alert is pending at once, and fires after the five minutes of the rule."""
    nodes["elsewhere", "server-that-ends"].close()

    def named():
        return {each["labels"]["alertname"] for each in prometheus.ask("alerts")["alerts"]}

    until(lambda: "MemoireServerDown" in named(), PATIENCE)
