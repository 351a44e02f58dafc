"""A table of rollouts on the pages: what became of its entries adds up to what arrived."""

import contextlib

import numpy as np
import pytest

import memoire
from memoire.nodes.http import NodePages
from netkit import until
from pageskit import browser, open_page, watch, window

__all__ = ["browser"]

SCHEMA = memoire.Schema({"obs": np.int64, "reward": np.float32})
TABLE = memoire.Table(SCHEMA, storage="rollouts", capacity=80, on_full="oldest", max_model_lag=0)


@pytest.fixture(scope="module")
def scene():
    """A server of rollouts and its dashboard: of 128 entries 40 are overwritten, 16 too old and 30 taken."""
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        server = keep(memoire.Server("tcp://127.0.0.1:0", tables={"rollouts": TABLE}, name="home"))
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


def test_entries_that_were_taken_too_old_or_overwritten_are_said(browser, scene):
    stats, board = scene
    shown = {
        "fragments held": stats.held_caches,
        "entries held": stats.held_samples,
        "entries taken": 30,
        "entries too old": 16,
        "entries overwritten": 48,
        "fragments split": 1,
    }
    assert shown["entries held"] == 128 - 30 - 16 - 48
    with window(browser, board.url) as page:
        open_page(page, board.url, "memory")
        card = page.locator("section.card", has_text="Table rollouts")
        card.wait_for()
        for name, number in shown.items():
            row = card.locator("dt", has_text=name)
            assert row.locator("xpath=following-sibling::dd[1]").inner_text() == str(number), name
        assert not card.get_by_text("samples per insert").count()
        open_page(page, board.url, "overview")
        page.get_by_text(f"{stats.held_caches} fragments").wait_for()
