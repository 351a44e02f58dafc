"""Curves in a real browser: returns, gaps, marks, comparison of runs, and a run that is opened from its file."""

import contextlib
import subprocess
import sys
import time

import msgspec
import pytest

from httpkit import ask
from memoire.dashboard.collect.history import EventRow, History
from memoire.nodes.http import NodePages
from netkit import record, until
from pageskit import complaints, one, open_page, watch, window

FORMER = {"home": {"tables": {"default": {"storage": "caches", "parameters": {"multi_step": 7}}}}}
LATER = {"home": {"tables": {"default": {"storage": "caches", "parameters": {"multi_step": 3}}}}}
AWAY = range(100, 160)
"""Seconds of a run without an observation."""


def seconds_of(history, name, began, seconds, level, settings, finished=False):
    """Add a run of so many seconds to a history. The run's two actors return about `level`, with a gap, and a model
    every tenth second.
    """
    for second in range(seconds):
        if second in AWAY:
            continue
        figures = {"return": level + second / 10, "steps": 50.0 * second, "nodes_up": 2.0, "model.policy": second // 10}
        figures |= {f"return_p{part}": level + part / 10 for part in (10, 25, 50, 75, 90)} | {"learner.loss": 0.5}
        history.add(name, began + second, {name: one(float(value)) for name, value in figures.items()})
    event = EventRow(began + 50.0, "node_down", "proxy-1", "proxy-1 does not answer.")
    history.add_event(name, event)
    history.keep_run(name, began, {})
    facts = {"totals": {"steps": 50 * seconds, "episodes": 9}, "finished": finished, "return_mean": float(level)}
    history.keep_run(name, began + seconds, facts)
    history.keep_document(name, "settings", msgspec.json.encode(settings))


@pytest.fixture(scope="module")
def board(shared_cluster, tmp_path_factory):
    """A dashboard that has observed a run for five minutes, and an earlier one."""
    path, now = str(tmp_path_factory.mktemp("history") / "history.db"), time.time()
    with History(path) as history:
        seconds_of(history, "r-1", now - 9_000.0, 300, 20, FORMER, finished=True)
        seconds_of(history, "r-2", now - 320.0, 300, 40, LATER)
    server = shared_cluster.server(name="home", run="r-2")
    record(client := shared_cluster.client(server), episodes=2, length=20)
    client.update(100.0)
    server.publish("policy", b"weights")
    with NodePages("127.0.0.1:0", server) as pages, watch(pages, steps=40, history=path, goal_return=60.0) as dashboard:
        until(lambda: dashboard.aggregator.newest.models)
        yield dashboard


def chart(page, title):
    return page.locator("figure.chart", has=page.get_by_text(title, exact=True))


def test_figures_and_marks_of_a_chart_are_there_for_those_who_do_not_see_it(browser, board):
    with window(browser, board.url) as page:
        open_page(page, board.url, "overview?over=time")
        page.wait_for_selector(".hero .uplot canvas")
        figure = chart(page, "Return of episodes")
        figure.get_by_text("Figures as a table").click()
        figure.get_by_text("proxy-1 does not answer.").wait_for()
        figure.get_by_text("Goal: 60").wait_for()
        assert figure.locator("tbody tr").count() > 20
        figure.locator(".plot").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        until(lambda: "median actor" in figure.get_by_role("status").inner_text())
        page.locator(".chart-tip:not([hidden])").wait_for()
        assert complaints(page) == []


def test_the_pointer_reads_a_value_and_a_line_goes_and_comes_by_its_button(browser, board):
    with window(browser, board.url) as page:
        open_page(page, board.url, "learning?over=time")
        page.wait_for_selector(".uplot canvas")
        over = page.locator(".wide-chart .u-over").bounding_box()
        page.mouse.move(over["x"] + over["width"] / 3, over["y"] + 40)
        page.locator(".chart-tip", has_text="median actor").wait_for()
        button = page.locator(".wide-chart .legend button")
        button.click()
        assert button.get_attribute("aria-pressed") == "false"
        button.click()
        assert button.get_attribute("aria-pressed") == "true"


def test_returns_are_drawn_over_steps_time_and_versions_and_the_address_says_so(browser, board):
    with window(browser, board.url) as page:
        open_page(page, board.url, "overview")
        for over in ("time", "version", "steps"):
            page.get_by_label("Over", exact=True).select_option(over)
            until(lambda over=over: f"over={over}" in page.url)
            page.wait_for_selector(".hero .uplot canvas")


def test_runs_lie_side_by_side_and_only_differing_settings_are_shown(browser, board):
    with window(browser, board.url) as page:
        open_page(page, board.url, "learning")
        page.get_by_text("Compare with").click()
        page.locator(".tools-of-chart label", has_text="r-1").click()
        page.locator(".wide-chart .legend button", has_text="r-1").wait_for()
        page.locator(".wide-chart .legend button", has_text="r-2").wait_for()
        open_page(page, board.url, "runs")
        for name in ("r-1", "r-2"):
            page.get_by_label(f"Compare {name}", exact=True).check()
        settings = page.get_by_role("region", name="Settings of both runs")
        row = settings.locator("tr", has_text="multi_step")
        row.wait_for()
        assert "7" in row.inner_text() and "tables.default.storage" not in settings.inner_text()  # the storage is equal
        page.get_by_role("button", name="Show equal settings, too").click()
        settings.locator("tr", has_text="tables.default.storage").wait_for()
        assert complaints(page) == []


def test_a_run_that_was_exported_is_opened_from_its_file(browser, board, tmp_path):
    with window(browser, board.url) as page:
        open_page(page, board.url, "runs")
        with page.expect_download() as download:
            page.get_by_label("r-1 as one file").click()
        path = tmp_path / "r-1.run.gz"
        download.value.save_as(path)
    command = [sys.executable, "-m", "memoire", "dashboard", "--open", str(path), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        with contextlib.ExitStack() as stack:
            stack.callback(process.kill)
            url = process.stdout.readline().split()[-1]
            page = stack.enter_context(window(browser, url, allowed=("404", "Failed to load resource")))
            page.goto(f"{url}/#/overview")
            page.wait_for_selector(".hero .uplot canvas")
            page.get_by_text("This is run r-1 from a file").wait_for()
            page.wait_for_selector("#live[data-state=recorded]")
            for name in ("learning", "runs", "live", "actors", "nodes", "settings", "memory", "logs"):
                page.goto(f"{url}/#/{name}")
                page.locator(f"nav [aria-current=page][data-page={name}]").wait_for(state="attached")
            assert ask(url, "api/sample")[0] == 404
            assert ask(url, "api/export.run")[0] == 200


SHAPES = """async (url) => {
  const {placesOn, columnsOf, together, ticksOf, smoothed, withGaps} = await import(url + "/static/curves.js");
  const answer = {time: [0, 1, 2, 10, 11], steps: [0, 5, 5, 50, null], away: [[3, 10]],
    mean: {"return": [1, null, 3, null, 5], dense: [1, null, 3, 4, 5], nodes_up: [1, 1, 1, 0, 1]},
    least: {"return": [1, null, 3, null, 5], dense: []}, greatest: {"return": [1, null, 3, null, 5], dense: [], "model.p": [1, 1, 2, 2, 3]}};
  const plain = (values) => values.map((value) => (value === undefined ? "goes on" : value));
  const source = (axis) => ({xs: placesOn(axis, answer, 0, "p"), time: answer.time, away: answer.away, columns: [columnsOf(answer, "return")[0]]});
  const over = (axis) => { const {x, columns} = together([source(axis)]); return [x, plain(columns[0])]; };
  return {
    sparse: plain(columnsOf(answer, "return")[0]), dense: plain(columnsOf(answer, "dense")[0]),
    time: over("time"), steps: over("steps"), version: over("version"),
    ticks: ticksOf(answer, "p", answer.time), smooth: plain(smoothed([1, 3, undefined, null, 10, 20], 2)), again: plain(columnsOf(answer, "dense", 9)[0]),
    gaps: withGaps(answer, [{name: "x", values: answer.mean.dense}]).map((each) => plain(each.map((one) => (one.values ? plain(one.values).join() : one)))),
    two: together([source("steps"), {...source("steps"), columns: [[9, 9, 9, 9, 9]]}]).columns.map(plain),
  };
}"""


def test_gaps_stay_gaps_and_lines_go_on_where_only_no_episode_ended(browser, board):
    with window(browser, board.url) as page:
        open_page(page, board.url, "overview")
        shapes = page.evaluate(SHAPES, board.url)
    assert shapes["sparse"] == [1, "goes on", 3, None, 5]  # no server answered at the fourth point
    assert shapes["dense"] == [1, None, 3, 4, 5]
    assert shapes["time"] == [[0, 1, 2, 6, 10, 11], [1, "goes on", 3, None, None, 5]]
    assert shapes["steps"] == [[0, 5, 27.5, 50], [1, 3, None, None]]
    assert shapes["version"] == [[1, 2, 3], [1, 3, 5]]
    assert shapes["ticks"] == [2, 11]
    assert shapes["smooth"] == [1, 2, "goes on", None, 10, 15]
    assert shapes["again"] == [1, None, 3, 4, 4.5]  # without an observation before the fourth, the mean starts again
    assert shapes["gaps"][0] == [0, 1, 2, 6, 10, 11] and shapes["gaps"][1] == ["1,,3,,4,5"]
    assert shapes["two"] == [[1, 3, None, None], [9, 9, None, 9]]


def test_an_empty_cluster_waits_and_shows_the_line_that_starts_an_actor(browser, shared_cluster):
    server = shared_cluster.server(name="quiet", run="r-3")
    with NodePages("127.0.0.1:0", server) as pages, watch(pages.url) as board, window(browser, board.url) as page:
        open_page(page, board.url, "overview")
        page.get_by_text("Ready, and waiting for the first actor").wait_for()
        assert f'memoire.connect("{server.endpoint}")' in page.locator(".start pre").inner_text()
        assert page.locator(".verdict.bad").count() == 0
        page.get_by_role("button", name="Copy").click()
        until(lambda: page.locator(".start button").inner_text() in ("Copied", "Selected"))
        assert complaints(page) == []
        record(client := shared_cluster.client(server), episodes=1, length=20)
        client.update(100.0)
        page.locator(".start").wait_for(state="detached")
