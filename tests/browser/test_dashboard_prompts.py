"""The page of prompts: where they stand, who has them, what was dropped, what each rank of the trainer got."""

import contextlib

import numpy as np
import pytest

import memoire
from memoire.nodes.http import NodePages
from netkit import until
from pageskit import DESKTOP, PHONE, browser, open_page, watch, window

pytest.importorskip("memoire.dashboard.web.pages")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")

__all__ = ["browser"]

COLUMNS = {"tokens": (np.int32, (None,)), "reward": np.float32}


def answer(prompts, count, rewards=(0.0, 1.0), length=1):
    """Lease so many prompts and answer them; returns the leases."""
    leases = prompts.lease(count, timeout=100.0)
    for each in leases:
        tokens = np.zeros(length * (1 + each.index % 3), np.int32)
        prompts.answers(each, {i: {"tokens": tokens, "reward": rewards[i]} for i in each.missing})
    return leases


@pytest.fixture(scope="module")
def scene():
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
        until(lambda: board.aggregator.newest and board.aggregator.newest.prompts)
        yield board, worker.client_id.hex()


def fact(page, name):
    return page.locator("dt", has_text=name).locator("xpath=following-sibling::dd[1]").first.inner_text()


def test_the_page_says_where_prompts_stand_and_who_has_them(browser, scene):
    board, worker = scene
    expected = {
        "waiting": 14, "leased": 6, "answered": 0, "ready": 5, "drawn": 4, "committed": 8, "dropped": 3, "forgotten": 0,
    }  # fmt: skip
    for theme, size in (("light", DESKTOP), ("dark", PHONE)):
        with window(browser, board.url, size=size, color_scheme=theme) as page:
            open_page(page, board.url, "prompts")
            page.get_by_text("5 groups are ready to be drawn").wait_for()
            page.wait_for_selector(".uplot canvas")
            said = [each.split(" ") for each in page.locator(".states li").all_inner_texts()]
            assert {state: int(many) for state, many in said} == expected
            widths = {
                each.get_attribute("class"): float(each.get_attribute("width"))
                for each in page.locator(".states rect").all()
            }
            assert {name: round(width * 40 / 1000) for name, width in widths.items()} == {
                k: v for k, v in expected.items() if v
            }
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
            found = axe.Axe().run(page).response["violations"]
            assert [f"{each['id']}: {node['html'][:200]}" for each in found for node in each["nodes"]] == []
    with window(browser, board.url) as page:
        open_page(page, board.url, "prompts")
        page.get_by_text("Who holds prompts").first.wait_for()
        (row,) = page.locator("table", has_text="The oldest began").locator("tbody tr").all()
        cells = row.locator("td").all_inner_texts()
        assert cells[:2] == [worker[:8], "6"] and cells[-1] == "home"
        assert fact(page, "Groups without signal") == "3" and fact(page, "Workers with a lease") == "1"
        tokens = [
            row.locator("td").nth(1).inner_text()
            for row in page.locator("table", has_text="Of the mean").locator("tbody tr").all()
        ]
        assert len(tokens) == 2 and all(int(each.replace(",", "")) > 1000 for each in tokens)
        assert page.locator("table", has_text="Reason").locator("tbody tr").all_inner_texts() == ["no signal\t3"]
