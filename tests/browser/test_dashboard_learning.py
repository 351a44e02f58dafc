"""The pages of a run that learns on-policy: what the learner waits for, lag, inference nodes and start states."""

import contextlib
import threading
import types

import numpy as np
import pytest

import memoire
from memoire.nodes.http import NodePages
from netkit import until
from pageskit import DESKTOP, PHONE, browser, open_page, watch, window

pages_of_nodes = pytest.importorskip("memoire.nodes.pages")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")

__all__ = ["browser"]

SCHEMA = memoire.Schema({"obs": np.int64, "reward": np.float32})
TABLE = memoire.Table(SCHEMA, storage="rollouts", capacity=1000)
INPUTS, OUTPUTS = {"obs": (np.float32, (2,))}, {"action": np.float32}
FIGURES = {
    "policy_loss": -0.01, "value_loss": 0.5, "entropy": 0.6, "approx_kl": 0.003, "clip_fraction": 0.05, "grad_norm": 1.0,
    "explained_variance": 0.7, "test_return": 17.0, "lag_mean": 2.0, "lag_max": 3.0, "learner_steps": 30.0, "mine": 4.0,
}  # fmt: skip
HOSTILE = "<img src=x onerror=alert(1)>"
STARTS = {
    "name": HOSTILE,
    "kept": 3,
    "draws": 40,
    "best": 41.0,
    "first": 60.0,
    "lineage": [[60.0, 0], [52.0, 3], [41.0, 7]],
}


def act(columns, weights):
    if columns["obs"][0, 0] < 0:
        raise ValueError("a negative speed")
    return {"action": columns["obs"][:, 0]}


@pytest.fixture(scope="module")
def scene():
    """A server of rollouts whose newest model is 5, an actor with model 3, an inference node that failed once, and a node
    with start states.
    """
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        server = keep(memoire.Server("tcp://127.0.0.1:0", tables={"rollouts": TABLE}, name="home"))
        server.publish("policy", b"weights", version=5)
        client = keep(memoire.connect(server.endpoint, table="rollouts", name="actor-1"))
        client.push_episode({"obs": np.arange(30), "reward": np.ones(30, np.float32)}, model_version=3)
        client.scalars({"model_version": 3.0})
        client.update(100.0)
        until(lambda: server.table("rollouts").stats().held_samples == 30)
        server.table("rollouts").take(30, timeout=100.0)
        server.scalars(FIGURES)
        node = memoire.Inference("tcp://127.0.0.1:*", INPUTS, OUTPUTS, act, connect=server.endpoint, name="infer-1")
        stack.callback(node.close)
        node.wait_version(5, timeout=100.0)
        policy = keep(memoire.RemotePolicy([node.endpoint], INPUTS, OUTPUTS, timeout=100.0))
        with pytest.raises(memoire.errors.Refused):
            policy.act({"obs": np.full((4, 2), -1.0, np.float32)})
        archive = types.SimpleNamespace(
            stats=lambda: {"name": "agent-1", "starts": STARTS}, liveness=list, readiness=list
        )
        urls = [keep(NodePages("127.0.0.1:0", each)).url for each in (server, node, archive)]
        board = keep(watch(*urls))

        over = threading.Event()

        def act_on():
            while not over.wait(0.02):
                policy.act({"obs": np.ones((4, 2), np.float32)})

        acting = threading.Thread(target=act_on)
        acting.start()
        stack.callback(acting.join)
        stack.callback(over.set)

        def is_shown():
            newest = board.aggregator.newest
            return newest and newest.actor_lag and newest.starts and newest.inference and newest.inference[0].batch_rows

        until(is_shown)
        yield board


def test_the_pages_are_drawn_without_a_complaint_in_both_themes(browser, scene):
    expected = {
        "learning": "What does the learner wait for?", "lag": "Actors are 2 versions behind", "starts": "19 less than the first",
        "inference": "infer-1",
    }  # fmt: skip
    for theme, size in (("light", DESKTOP), ("dark", PHONE)):
        with window(browser, scene.url, size=size, color_scheme=theme) as page:
            for name, text in expected.items():
                open_page(page, scene.url, name)
                page.get_by_text(text).first.wait_for()
                page.wait_for_selector(".uplot canvas")
                assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], name
                found = axe.Axe().run(page).response["violations"]
                assert [f"{each['id']}: {node['html'][:200]}" for each in found for node in each["nodes"]] == [], name


def fact(card, name):
    return card.locator("dt", has_text=name).locator("xpath=following-sibling::dd[1]").inner_text()


def test_scalars_of_a_learner_are_in_plain_words_by_what_they_are_about(browser, scene):
    with window(browser, scene.url) as page:
        open_page(page, scene.url, "learning")
        page.locator("figure", has_text="Explained variance").wait_for()
        heads = page.locator("main h2").all_inner_texts()
        assert heads[-5:] == ["Episodes", "The policy", "The value function", "The optimizer", "Other figures"]
        titles = page.locator("main figure .title").all_inner_texts()
        shown = " ".join(titles)
        assert "Mine" in shown and "Test return" in shown
        assert not any(title.startswith(("Lag", "Learner steps")) for title in titles)  # other places show them
        page.get_by_role("button", name="KL divergence", exact=True).click()
        page.locator("#help").get_by_text("mean of (ratio − 1) − log ratio").wait_for()
        card = page.locator("section.card", has_text="What does the learner wait for?")
        assert fact(card, "Models behind") == "2, at most 2" and fact(card, "Entries taken") == "30"


def test_the_lag_of_actors_nodes_and_what_was_learned_from_is_shown(browser, scene):
    with window(browser, scene.url) as page:
        open_page(page, scene.url, "lag")
        acts = page.locator("section.card", has_text="How old are the models that act?")
        acts.get_by_text("Actors are 2 versions behind, at most 2").wait_for()
        assert fact(acts, "infer-1") == "version 5" and fact(acts, "Newest model of policy") == "version 5"
        learns = page.locator("section.card", has_text="How old is what is learned from?")
        assert "by models 2 versions behind, at most 2" in learns.inner_text()
        row = page.locator("tr", has_text="actor-1")
        row.wait_for()
        assert row.locator("td").all_inner_texts()[3:5] == ["version 3", "2"]


def test_an_inference_node_is_shown_with_its_refusals(browser, scene):
    with window(browser, scene.url) as page:
        open_page(page, scene.url, "inference")
        row = page.locator("tr", has_text="infer-1")
        row.wait_for()
        cells = row.locator("td").all_inner_texts()
        assert cells[:2] == ["infer-1", "5"]
        assert 3.5 < float(cells[4]) <= 4.5  # a batch may have been counted, and its rows not yet, as it was asked
        assert cells[-1] == "1 failed, 1 batches failed"
        for title in ("Rows", "Wait for a batch", "What makes batches due", "Time of slow answers"):
            page.locator("figure", has_text=title).first.wait_for()


def test_start_states_are_shown_with_the_lineage_of_the_best_and_names_stay_text(browser, scene):
    with window(browser, scene.url) as page:
        open_page(page, scene.url, "starts")
        card = page.locator("section.card", has_text=f"Start states {HOSTILE}")
        card.wait_for()
        assert fact(card, "Best cost") == "41" and fact(card, "Episodes started from them") == "40"
        rows = page.locator(".lineage tbody tr")
        rows.first.wait_for()
        told = [row.locator("td").all_inner_texts() for row in rows.all()]
        assert told == [["7", "41", "11"], ["3", "52", "8"], ["first", "60", "–"]]
        assert page.locator("img[src=x]").count() == 0
