"""A real Prometheus scrapes every node of a cluster: all metrics of the catalogue arrive, none besides; rules are evaluated,
and every panel of the boards has an answer."""

import contextlib
import http.client
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request

import numpy as np
import pytest

import memoire
from history.ports import block
from memoire.nodes.http import NodePages
from monitoringkit import BOARDS, FOLDER, board, rules
from netkit import SCHEMA, entry, until

metrics = pytest.importorskip("memoire.nodes.metrics", reason="prometheus-client is not installed")
serving = pytest.importorskip("memoire.dashboard.web.serve", reason="fastapi is not installed")
Settings = pytest.importorskip("memoire.dashboard.settings").Settings
shown = pytest.importorskip("memoire.dashboard.web.metrics")

CONFIG = """
global: {{scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 500ms}}
rule_files: [{rules}]
scrape_configs:
{jobs}
"""
JOB = "  - {{job_name: memoire-{role}, static_configs: [{{targets: ['{target}'], labels: {labels}}}]}}"
LABELS = {"namespace": "rl", "release": "ant", "pod": "pod-0"}
PATIENCE = 100.0
SILENT = {"Refused messages"}
"""Panels that have nothing to show where all is well."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """One node of each role, with something in every figure, and the pages of each."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        folder = tmp_path_factory.mktemp("state")
        server = keep(memoire.Server("tcp://127.0.0.1:0", SCHEMA, name="home", run="r-1", seed=0, state_dir=folder))
        proxy = keep(memoire.Proxy("tcp://127.0.0.1:0", [server.endpoint]))
        client = keep(memoire.connect(proxy.endpoint, seed=0))
        reader = keep(memoire.Reader([server.endpoint], seed=0))
        server.publish("policy", b"weights")
        played(client, episodes=3, length=50, version=1)
        client.scalars({"loss": 1.5})
        server.scalars({"grad_norm": 2.0})
        assert client.push_cache(100.0) and client.push_cache(100.0)
        until(lambda: server.total_caches == 2)
        client.update(100.0)
        server.get_batch(32, timeout=100.0).update_priorities(np.ones(32))
        reader.get_batch(32)
        until(lambda: server.stats().learners)
        made = {"server": server, "proxy": proxy, "actor": client, "learner": reader}
        pages = {role: keep(NodePages("127.0.0.1:0", node)) for role, node in made.items()}
        watched = tuple(pages[role].url for role in ("server", "proxy"))
        pages["dashboard"] = keep(serving.Dashboard(Settings(nodes=watched, listen="127.0.0.1:0", poll_every=0.2)))
        pages["server-that-ends"] = keep(NodePages("127.0.0.1:0"))
        yield pages


def played(client, episodes, length, version):
    """Episodes of actions that a version of a model chose."""
    for _ in range(episodes):
        client.memory.open()
        for step in range(length):
            client.memory.add(0, entry(SCHEMA, step), model_version=version)
        client.memory.close(terminated=True)
        client.on_entries(length)
        client.on_episode(0, length, float(length))


class Prometheus:
    """The real one, in a process of its own, that watches these pages."""

    def __init__(self, folder, pages):
        self.address = f"127.0.0.1:{block(1)}"
        targets = {role: urllib.parse.urlsplit(each.url).netloc for role, each in pages.items()}
        jobs = "\n".join(JOB.format(role=role, target=at, labels=json.dumps(LABELS)) for role, at in targets.items())
        config = folder / "prometheus.yaml"
        config.write_text(CONFIG.format(rules=FOLDER / "memoire.rules.yaml", jobs=jobs), encoding="utf-8")
        self.log = open(folder / "log", "wb")  # noqa: SIM115  closed with it
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address={self.address}", "--log.level=warn"]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, cwd=folder)

    def ask(self, path, **parameters):
        """What its API answers; None while it starts."""
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=100.0)) as connection:
            try:
                connection.request("GET", f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
            except ConnectionRefusedError:
                assert self.process.poll() is None, "it ended"
                return None
            response = connection.getresponse()
            if response.status == 503:
                return None
            answer = json.loads(response.read())
        assert answer["status"] == "success", (path, parameters, answer)
        return answer["data"]

    def up(self):
        """How many of its targets it has scraped without a fault."""
        found = self.ask("targets", state="active")
        return 0 if found is None else sum(each["health"] == "up" for each in found["activeTargets"])

    def metadata(self, role):
        """Names of the metrics that it was told of by a role, as the catalogue has them, with their types."""
        told = self.ask("targets/metadata", match_target=f'{{job="memoire-{role}"}}')
        ending = {each["metric"]: "_total" * (each["type"] == "counter") for each in told}
        types = {each["metric"]: each["type"] for each in told}
        return {name.removesuffix("_total") + ending[name]: types[name] for name in types if name.startswith("memoire")}

    def close(self):
        self.process.terminate()
        self.process.wait(100.0)
        self.log.close()


@pytest.fixture(scope="module")
def prometheus(nodes, tmp_path_factory):
    with contextlib.closing(Prometheus(tmp_path_factory.mktemp("prometheus"), nodes)) as made:
        until(lambda: made.up() == len(nodes), PATIENCE)
        until(lambda: all(rule["health"] != "unknown" for rule in rules_of(made)), PATIENCE)
        yield made


def rules_of(prometheus):
    return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("role", ["server", "proxy", "actor", "learner", "dashboard"])
def test_every_metric_of_the_catalogue_is_there_and_none_besides(prometheus, role):
    wanted = shown.names() if role == "dashboard" else metrics.names(role)
    found = until(lambda: prometheus.metadata(role), PATIENCE)
    assert set(found) == wanted
    kinds = {entry.full_name: entry.kind for entry in metrics.CATALOGUE.get(role, ())}
    assert {name: kind for name, kind in found.items() if name in kinds} == kinds


def test_every_rule_is_loaded_and_evaluated_without_a_fault(prometheus):
    found = rules_of(prometheus)
    assert sorted(rule["name"] for rule in found) == sorted(rule.get("alert", rule.get("record")) for rule in rules())
    assert [(rule["name"], rule.get("lastError")) for rule in found if rule["health"] != "ok"] == []
    assert [alert["labels"] for alert in prometheus.ask("alerts")["alerts"] if alert["state"] == "firing"] == []


def panels():
    return [
        pytest.param(file, panel, id=f"{file.partition('.')[0]}: {panel['title']}")
        for file in BOARDS
        for panel in board(file)["panels"]
        if panel.get("targets")
    ]


def asked(panel):
    """The queries of a panel, as Grafana sends them with all variables at All."""
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", "1m")
        yield re.sub(r"\$(namespace|release|pod)\b", ".*", query)


@pytest.mark.parametrize(("file", "panel"), panels())
def test_every_panel_of_the_boards_has_an_answer(prometheus, file, panel):
    assert all("$" not in query for query in asked(panel))
    answers = [prometheus.ask("query", query=query)["result"] for query in asked(panel)]
    if not any(answers) and panel["title"] not in SILENT:  # a rate takes two scrapes with something between them
        until(lambda: any(prometheus.ask("query", query=query)["result"] for query in asked(panel)), PATIENCE)


def test_variables_of_the_boards_find_what_is_there(prometheus):
    for file in BOARDS:
        for variable in board(file)["templating"]["list"]:
            if variable["type"] != "query":
                continue
            query = variable["query"] if isinstance(variable["query"], str) else variable["query"]["query"]
            matched, label = re.fullmatch(r"label_values\((.*), ?(\w+)\)", query).groups()
            matched = re.sub(r"\$(namespace|release)\b", ".*", matched)
            assert prometheus.ask(f"label/{label}/values", **{"match[]": matched}) == [LABELS[label]]


def test_a_server_that_ends_is_an_alert(prometheus, nodes):
    """Pending at once, and firing after the five minutes that the rule waits."""
    nodes["server-that-ends"].close()
    until(
        lambda: "MemoireServerDown" in {each["labels"]["alertname"] for each in prometheus.ask("alerts")["alerts"]},
        PATIENCE,
    )


def test_promtool_finds_nothing_wrong_with_what_the_dashboard_says(nodes):
    with urllib.request.urlopen(f"{nodes['dashboard'].url}/metrics", timeout=100.0) as answer:
        body = answer.read()
    done = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
