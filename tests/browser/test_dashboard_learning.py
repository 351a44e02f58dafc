"""Pages about learning: scalars, lags, inference nodes, start states, prompts and rollouts."""

import contextlib
import threading
import types

import numpy as np
import pytest

import memoire
from memoire.nodes.http import NodePages
from netkit import until
from pageskit import BOTH, check_drawn, fact, open_page, watch, window

pages_of_nodes = pytest.importorskip("memoire.nodes.pages")


SCHEMA = memoire.Schema({"obs": np.int64, "reward": np.float32})
TABLE = memoire.Table(SCHEMA, storage="rollouts", capacity=1000)
INPUTS, OUTPUTS = {"obs": (np.float32, (2,))}, {"action": np.float32}
FIGURES = {
    "policy_loss": -0.01, "value_loss": 0.5, "entropy": 0.6, "approx_kl": 0.003, "clip_fraction": 0.05, "grad_norm": 1.0,
    "explained_variance": 0.7, "test_return": 17.0, "lag_mean": 2.0, "lag_max": 3.0, "learner_steps": 30.0, "mine": 4.0,
}  # fmt: skip
HOSTILE = "<img src=x onerror=alert(1)>"
LINEAGE = [[60.0, 0], [52.0, 3], [41.0, 7]]
STARTS = {"name": HOSTILE, "kept": 3, "draws": 40, "best": 41.0, "first": 60.0, "lineage": LINEAGE}


def act(columns, weights):
    if columns["obs"][0, 0] < 0:
        raise ValueError("a negative speed")
    return {"action": columns["obs"][:, 0]}


@pytest.fixture(scope="module")
def scene():
    """A server of rollouts with model 5, an actor with model 3, an inference node that failed once, and a node with
    start states.
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
        stats = {"name": "agent-1", "starts": STARTS}
        archive = types.SimpleNamespace(stats=lambda: stats, liveness=list, readiness=list)
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
    for theme, size in BOTH:
        with window(browser, scene.url, size=size, color_scheme=theme) as page:
            for name, text in expected.items():
                open_page(page, scene.url, name)
                page.get_by_text(text).first.wait_for()
                page.wait_for_selector(".uplot canvas")
                check_drawn(page, size, name)


def test_scalars_of_a_learner_are_in_plain_words_by_what_they_are_about(browser, scene):
    with window(browser, scene.url) as page:
        open_page(page, scene.url, "learning")
        page.locator("figure", has_text="Explained variance").wait_for()
        heads = page.locator("main h2").all_inner_texts()
        assert heads[-5:] == ["Episodes", "The policy", "The value function", "The optimizer", "Other figures"]
        titles = page.locator("main figure .title").all_inner_texts()
        shown = " ".join(titles)
        assert "Mine" in shown and "Test return" in shown
        assert not any(title.startswith(("Lag", "Learner steps")) for title in titles)  # other pages have these
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
        learns = page.locator("section.card", has_text="How old are the models of learned entries?")
        assert "are 2 versions behind, at most 2" in learns.inner_text()
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
        assert 3.5 < float(cells[4]) <= 4.5  # the node may have counted the batch, and not its rows
        assert cells[-1] == "1 failed, 1 batches failed"
        for title in ("Rows", "Wait for a batch", "Reasons that start batches", "Time of slow answers"):
            page.locator("figure", has_text=title).first.wait_for()


def test_start_states_are_shown_with_the_lineage_of_the_best_and_names_stay_text(browser, scene):
    with window(browser, scene.url) as page:
        open_page(page, scene.url, "starts")
        card = page.locator("section.card", has_text=f"Start states {HOSTILE}")
        card.wait_for()
        assert fact(card, "Best cost") == "41" and fact(card, "Episodes started from them") == "40"
        rows = page.locator(".lineage tbody tr")
        rows.first.wait_for()
        lineage = [row.locator("td").all_inner_texts() for row in rows.all()]
        assert lineage == [["7", "41", "11"], ["3", "52", "8"], ["first", "60", "–"]]
        assert page.locator("img[src=x]").count() == 0


pytest.importorskip("memoire.dashboard.web.pages")
COLUMNS = {"tokens": (np.int32, (None,)), "reward": np.float32}


def answer(prompts, count, rewards=(0.0, 1.0), length=1):
    """Lease so many prompts and answer them; return the leases."""
    leases = prompts.lease(count, timeout=100.0)
    for each in leases:
        tokens = np.zeros(length * (1 + each.index % 3), np.int32)
        prompts.answers(each, {i: {"tokens": tokens, "reward": rewards[i]} for i in each.missing})
    return leases


@pytest.fixture(scope="module")
def prompts_scene():
    """Forty prompts: 8 committed and 4 drawn by two ranks, 5 ready, 3 dropped without signal, 6 leased by one worker."""
    table = memoire.Table(COLUMNS, storage="prompts", group=2, score="variance", drop_dead=True)
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        server = keep(memoire.Server("tcp://127.0.0.1:0", tables={"math": table}, name="home"))
        ranks = [
            keep(memoire.Prompts(server.endpoint, "math", rank=(rank, 2), session="s", timeout=100.0))
            for rank in (0, 1)
        ]
        worker = keep(memoire.Prompts(server.endpoint, "math", timeout=100.0))
        worker.add(dict.fromkeys(range(40), "2+2="))
        answer(worker, 12, length=100)
        for step, groups in ((0, 8), (1, 4)):
            for each in ranks:
                each.draw(step, groups)
        ranks[0].commit(0)
        answer(worker, 5)
        answer(worker, 3, rewards=(1.0, 1.0))
        assert len(worker.lease(6)) == 6
        board = keep(watch(keep(NodePages("127.0.0.1:0", server)).url))
        until(lambda: board.aggregator.newest and board.aggregator.newest.own)
        yield board, worker.client_id.hex()


def test_the_page_says_where_prompts_stand_and_who_has_them(browser, prompts_scene):
    board, worker = prompts_scene
    expected = {
        "waiting": 14, "leased": 6, "answered": 0, "ready": 5, "drawn": 4, "committed": 8, "dropped": 3, "forgotten": 0,
    }  # fmt: skip
    for theme, size in BOTH:
        with window(browser, board.url, size=size, color_scheme=theme) as page:
            open_page(page, board.url, "prompts")
            page.get_by_text("5 groups are ready to be drawn").wait_for()
            page.wait_for_selector(".uplot canvas")
            states = [each.split(" ") for each in page.locator(".states li").all_inner_texts()]
            assert {state: int(many) for state, many in states} == expected
            parts = page.locator(".states rect").all()
            widths = {each.get_attribute("class"): float(each.get_attribute("width")) * 40 / 1000 for each in parts}
            assert {k: round(width) for k, width in widths.items()} == {k: v for k, v in expected.items() if v}
            check_drawn(page, size, "prompts")
    with window(browser, board.url) as page:
        open_page(page, board.url, "prompts")
        page.get_by_text("Lease holders").first.wait_for()
        (row,) = page.locator("table", has_text="Oldest lease began").locator("tbody tr").all()
        cells = row.locator("td").all_inner_texts()
        assert cells[:2] == [worker[:8], "6"] and cells[-1] == "home"
        assert fact(page, "Groups without signal") == "3" and fact(page, "Workers with a lease") == "1"
        rows = page.locator("table", has_text="Share of the mean").locator("tbody tr").all()
        tokens = [row.locator("td").nth(1).inner_text() for row in rows]
        assert len(tokens) == 2 and all(int(each.replace(",", "")) > 1000 for each in tokens)
        assert page.locator("table", has_text="Reason").locator("tbody tr").all_inner_texts() == ["no signal\t3"]


ROLLOUTS = memoire.Table(SCHEMA, storage="rollouts", capacity=80, on_full="drop_oldest", max_model_lag=0)


@pytest.fixture(scope="module")
def rollouts_scene():
    """A server of rollouts and its dashboard: of 128 entries, 48 are overwritten, 16 too old and 30 taken."""
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        server = keep(memoire.Server("tcp://127.0.0.1:0", tables={"rollouts": ROLLOUTS}, name="home"))
        table = server.table("rollouts")
        with memoire.connect(server.endpoint, table="rollouts") as client:
            for number in range(16):
                arrays = {"obs": np.arange(8), "reward": np.ones(8, np.float32)}
                client.push_episode(arrays, model_version=1 if number in (6, 7) else 2)
            client.update(100.0)
        until(lambda: table.stats().held_samples + table.stats().overwritten_samples == 128)
        for _ in range(2):
            server.publish("policy", b"weights")
        assert len(table.take(30, timeout=100.0)) == 30
        board = keep(watch(keep(NodePages("127.0.0.1:0", server)).url))
        until(lambda: (newest := board.aggregator.newest) and [each.samples for each in newest.tables] == [30])
        yield table.stats(), board


def test_entries_that_were_taken_too_old_or_overwritten_are_said(browser, rollouts_scene):
    stats, board = rollouts_scene
    shown = {
        "fragments held": stats.held_caches, "entries held": stats.held_samples, "entries taken": 30,
        "entries too old": 16, "entries overwritten": 48, "fragments split": 1,
    }  # fmt: skip
    assert shown["entries held"] == 128 - 30 - 16 - 48
    with window(browser, board.url) as page:
        open_page(page, board.url, "memory")
        card = page.locator("section.card", has_text="Table rollouts")
        card.wait_for()
        for name, number in shown.items():
            assert fact(card, name) == str(number), name
        assert not card.get_by_text("samples per insert").count()
        open_page(page, board.url, "overview")
        page.get_by_text(f"{stats.held_caches} fragments").wait_for()
