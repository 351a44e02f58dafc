"""Tests of a node's metrics: exactly those of the catalogue, right values, and text that promtool accepts."""

import contextlib
import re
import runpy
import shutil
import subprocess

import numpy as np
import pytest

import memoire
from httpkit import ask
from memoire.errors import NotEnoughSamples
from memoire.figures import Timings
from memoire.nodes.http import NodePages
from memoire.replay.batch import GatheredSamples
from memoire.server.stats import recent, summarize_values
from memoire.tables.inspection import FreshnessMonitor
from memoire.wire.messages import TEST, Ended
from netkit import SCHEMA, record, until
from pageskit import ROOT, metric_kinds

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
pytest.importorskip("memoire.nodes.metrics")

PROCESS = ("process_", "python_")


def scrape(pages, accept=None):
    """Return (content type, text) of /metrics."""
    status, headers, body = ask(pages, "/metrics", headers={"Accept": accept} if accept else {})
    assert status == 200
    return headers["Content-Type"], body.decode()


def values(text):
    """Return the value of each sample by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def named(text):
    """Return the names of memoire's families in HELP lines."""
    names = set(re.findall(r"^# HELP (\S+) ", text, re.M))
    return {name for name in names if not name.startswith(PROCESS)}


@pytest.fixture(scope="module")
def cluster():
    """Yield one node of each role with its pages, and a value in every figure."""
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        server = keep(memoire.Server("tcp://127.0.0.1:0", SCHEMA, name="home", run="r-1", seed=0))
        proxy = keep(memoire.Proxy("tcp://127.0.0.1:0", [server.endpoint]))
        client = keep(memoire.connect(server.endpoint, seed=0))
        reader = keep(memoire.Reader([server.endpoint], seed=0))
        record(client, episodes=3, length=50)
        client.scalars({"loss": 1.5})
        server.scalars({"grad_norm": 2.0})
        reader.scalars({"q": 3.0})
        server.publish("policy", b"weights")
        assert client.push_cache(100.0) and client.push_cache(100.0)
        until(lambda: server.total_caches == 2)
        client.update(100.0)
        server.get_batch(32, timeout=100.0).update_priorities(np.ones(32))
        reader.get_batch(32)
        until(lambda: server.stats().learners and server.stats().learner_scalars.get("q") == 3.0)
        rows = {"obs": np.float32}
        node = keep(memoire.Inference("tcp://127.0.0.1:0", rows, rows, lambda columns: columns))
        keep(memoire.RemotePolicy(node.endpoint, rows, rows, 100.0)).act({"obs": np.zeros(3, np.float32)})
        nodes = {"server": server, "proxy": proxy, "actor": client, "learner": reader, "inference": node}
        yield {role: (node, keep(NodePages("127.0.0.1:0", node))) for role, node in nodes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("role", ["server", "proxy", "actor", "learner", "inference"])
def test_a_scrape_has_every_metric_of_its_role_and_none_besides(cluster, role):
    kind, text = scrape(cluster[role][1])
    assert kind.startswith("text/plain")
    assert named(text) == set(metric_kinds(role))
    assert values(text)["memoire_ready",] == 1.0
    assert "process_resident_memory_bytes" in text  # a metric of every Python process


@pytest.mark.slow
def test_the_pages_of_an_inference_node_say_what_it_computed(cluster):
    _, pages = cluster["inference"]
    samples = values(scrape(pages)[1])
    assert samples["memoire_inference_rows_total",] == samples["memoire_inference_batch_rows_total",] == 3
    assert samples["memoire_inference_batches_total", ("reason", "everyone")] == 1
    assert samples["memoire_inference_batches_total", ("reason", "full")] == 0
    assert samples["memoire_inference_clients",] <= 1 and samples["memoire_inference_queue_rows",] == 0


def test_metrics_are_what_stats_say(cluster):
    server, pages = cluster["server"]
    with pytest.raises(NotEnoughSamples):
        server.get_batch(10_000)
    samples, stats = values(scrape(pages)[1]), server.stats()
    assert samples["memoire_episodes_total",] == 3 == stats.totals.episodes
    assert samples["memoire_steps_total",] == 150
    assert samples["memoire_caches_total",] == 2
    assert samples["memoire_clients", ("state", "active")] == 1
    assert samples["memoire_samples_total", ("table", "default")] == stats.tables["default"].samples > 32
    assert samples["memoire_missed_batches_total", ("table", "default")] == 1
    assert samples["memoire_held_bytes", ("table", "default")] == stats.held_bytes > 0
    assert samples["memoire_episode_return_mean",] == 50.0
    assert samples["memoire_client_scalar", ("name", "loss")] == 1.5
    assert samples["memoire_learner_scalar", ("name", "grad_norm")] == 2.0
    assert samples["memoire_learner_scalar", ("name", "q")] == 3.0
    assert samples["memoire_model_version", ("topic", "policy")] == 1
    assert samples["memoire_feedback_samples_total", ("outcome", "given")] == 32
    assert 0.0 <= samples["memoire_sample_age_median_seconds", ("table", "default")] < 60.0
    assert samples["memoire_refused_total", ("code", "schema")] == 0.0  # rate() needs a metric at 0


def test_a_scrape_is_openmetrics_where_that_is_asked_for(cluster):
    kind, text = scrape(cluster["proxy"][1], "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text") and text.endswith("# EOF\n")


def test_before_its_node_is_there_a_process_can_be_scraped(cluster):
    with NodePages("127.0.0.1:0") as pages:
        text = scrape(pages)[1]
        assert named(text) == set(metric_kinds(""))
        assert values(text)["memoire_ready",] == 0.0


def test_promtool_finds_nothing_wrong(cluster):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    for _, pages in cluster.values():
        text = scrape(pages)[1]
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_pages_and_boards_say_what_the_catalogue_says():
    tool = runpy.run_path(str(ROOT / "tools" / "metrics_docs.py"))
    for page, written in tool["PAGES"].items():
        text = page.read_text(encoding="utf-8")
        assert text == written(text), "run tools/metrics_docs.py"


@pytest.mark.parametrize("role", ["server", "proxy", "actor", "learner", "inference", "worker", "trainer"])
def test_names_are_those_of_prometheus(role):
    for name, kind in metric_kinds(role).items():
        assert re.fullmatch(r"memoire_[a-z][a-z0-9_]*", name)
        assert name.endswith("_total") == (kind == "counter") and not name.endswith(("_count", "_sum", "_bucket"))


def test_timings_count_each_duration_in_one_bucket():
    timings = Timings(["A", "B"])
    for seconds in (0.0, 0.0001, 0.00011, 2.5, 99.0):
        timings.record("A", seconds)
    timing = timings.durations()["A"]
    assert timing.count == 5 and timing.seconds == pytest.approx(101.50021)
    assert (timing.counts[0], timing.counts[1], timing.counts[-2], timing.counts[-1]) == (2, 1, 1, 1)
    assert timings.durations()["B"].count == 0


def batch_of(ages, versions):
    """Return a batch whose samples weigh twice their age."""
    count = len(ages)
    return GatheredSamples(
        prev={"obs": np.arange(2.0 * count).reshape(count, 1, 2)}, next={}, reward=np.zeros(count, np.float32),
        discount=np.zeros(count, np.float32), steps=np.ones(count, np.int32), weight=2 * ages.astype(np.float32),
        ids=np.arange(7, 7 + count), age=ages.astype(np.float32), model_version=np.array(versions),
    )  # fmt: skip


def test_a_look_at_a_batch_is_taken_now_and_then_only():
    looks = FreshnessMonitor()
    assert [looks.is_due(now) for now in (0.0, 0.1, 0.49, 0.5, 0.6)] == [True, False, False, True, False]
    looks.record_batch(batch_of(np.arange(11), [0, 3, 5] + [0] * 8), np.ones(11, np.float32), 0.25, newest=5)
    fresh = looks.newest
    assert (fresh.effective, fresh.ages, fresh.weights[-1]) == (1.0, (0.0, 1.0, 2.5, 5.0, 7.5, 9.0, 10.0), 20.0)
    assert (fresh.age_median, fresh.age_p90, fresh.age_max) == (5.0, 9.0, 10.0)
    assert (fresh.lag_mean, fresh.lag_max, fresh.left_out) == (1.0, 2.0, 0.25)  # version 0 is no model
    looks.record_batch(batch_of(np.ones(2), [0, 0]), np.array([1.0, 0.0], np.float32), 0.0, newest=5)
    assert looks.newest.lag_mean is None and looks.newest.effective == 0.5


def test_a_look_at_rollouts_that_were_taken_shows_ages_and_lags_of_entries_that_count_alike():
    looks = FreshnessMonitor()
    looks.record_rollouts(np.array([4.0, 2.0, 6.0], np.float32), np.array([0, 3, 5]), newest=5)
    fresh = looks.newest
    assert (fresh.age_median, fresh.age_max, fresh.lag_mean, fresh.lag_max) == (4.0, 6.0, 1.0, 2.0)
    assert (fresh.effective, fresh.left_out, fresh.weights) == (1.0, 0.0, (1.0,) * 7)


def test_recent_episodes_are_of_one_kind():
    ended = [Ended(number=n, time=0.0, length=1, returned=float(n), kind=n % 2) for n in range(1, 7)]
    assert (recent(ended).count, recent(ended).return_max) == (3, 6.0)
    assert (recent(ended, TEST).count, recent(ended, TEST).return_max) == (3, 5.0)


def test_a_spread_is_over_those_who_report_and_bounded_in_names():
    spreads = summarize_values([{"a": 1.0, "b": 5.0}, {"a": 3.0}], most=1)
    assert list(spreads) == ["a"]
    assert (spreads["a"].count, spreads["a"].mean, spreads["a"].least, spreads["a"].greatest) == (2, 2.0, 1.0, 3.0)
