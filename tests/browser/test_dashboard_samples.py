"""Pages about stored data: a sample with its frames as pictures, histograms, bands, columns and curves of actors."""

import contextlib

import numpy as np
import pytest

import memoire
from memoire.nodes.http import NodePages
from netkit import until
from pageskit import PHONE, check_drawn, complaints, open_page, watch, window

FRAMES = memoire.Schema(
    {
        "obs": memoire.Column(np.uint8, (12, 16), "state"),
        "camera": memoire.Column(np.uint8, (3, 10, 10), "state"),
        "speed": memoire.Column(np.float32, (20,)),
        "action": np.int32,
        "reward": memoire.Column(np.float32, (), "reward"),
    }
)
TABLES = {
    "frames": memoire.Table(FRAMES, frame_stack=4, sampler=memoire.Prioritized(0.6)),
    "episodes": memoire.Table(FRAMES, storage="episodes", capacity=500),
}
PIXEL = "([canvas, x, y]) => [...canvas.getContext('2d').getImageData(x, y, 1, 1).data]"


def play(client, episode):
    """Record an episode of 30 entries: row t % 12 of obs is bright at step t; the camera is ever brighter red."""
    memory = client.memory
    memory.open()
    for step in range(30):
        memory.add(0, entry(step), 1.0 + step, 1)
    memory.close(final_state=frames(30), terminated=True)
    client.on_entries(30)
    client.on_episode(0, 30, 30.0 + episode)


def entry(step):
    return *frames(step), np.full(20, step, np.float32), np.int32(step), np.float32(1.0)


def frames(step):
    obs, camera = np.zeros((12, 16), np.uint8), np.zeros((3, 10, 10), np.uint8)
    obs[step % 12] = 255
    camera[0] = 100 + step
    return obs, camera


@pytest.fixture(scope="module")
def scene():
    """A server with a table of caches and one of episodes, three actors, and its dashboard."""
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        server = keep(memoire.Server("tcp://127.0.0.1:0", tables=TABLES, name="home", run="r-1"))
        clients = [keep(memoire.connect(server.endpoint, table="frames", seed=n)) for n in range(3)]
        for number, client in enumerate(clients, 1):
            for episode in range(3 * number):
                play(client, episode)
            assert client.push_cache(100.0)
            client.update(100.0)
        with memoire.connect(server.endpoint, table="episodes", seed=9) as whole:
            columns = zip(*map(entry, range(30)), strict=True)
            arrays = dict(zip(FRAMES.entry_names, map(np.array, columns), strict=True))
            final = dict(zip(("obs", "camera"), frames(30), strict=True))
            whole.push_episode(arrays, final_state=final, terminated=True)
            whole.update(100.0)
            until(lambda: server.stats().tables["episodes"].held_samples == 30)
        board = keep(watch(keep(NodePages("127.0.0.1:0", server)).url))
        until(lambda: board.aggregator.newest and board.aggregator.newest.totals.episodes >= 18)
        yield server, clients, board


def test_a_sample_is_shown_with_its_frames_and_another_one_when_asked(browser, scene):
    with window(browser, scene[2].url, allowed=("willReadFrequently",)) as page:  # the test reads pixels often
        open_page(page, scene[2].url, "memory")
        strip = page.locator(".frames", has_text="obs").first.locator("canvas")
        strip.first.wait_for()
        assert strip.count() == 4 and page.get_by_text("4 frames of 16 × 12, the oldest first").first.is_visible()
        look = f"(canvas, row) => ({PIXEL})([canvas, 0, row])[0]"
        bright = [[canvas.evaluate(look, row) for row in range(12)] for canvas in strip.all()]
        rows = [values.index(255) for values in bright]
        assert all(values.count(255) == 1 for values in bright)
        assert [(row - rows[0]) % 12 for row in rows] == [0, 1, 2, 3]  # four consecutive steps
        colours = page.locator(".frames", has_text="camera").first.locator("canvas").first
        red, green, blue, opaque = colours.evaluate(f"canvas => ({PIXEL})([canvas, 5, 5])")
        assert 100 <= red <= 131 and (green, blue, opaque) == (0, 0, 255)
        page.get_by_text("chance at each draw").wait_for()
        seen = set()
        for _ in range(20):
            seen.add(strip.last.evaluate("each => each.toDataURL()"))
            page.get_by_role("button", name="Another sample").click()
            page.locator("button:has-text('Another sample'):enabled").wait_for()
        assert len(seen) > 1
        assert scene[0].stats().tables["frames"].samples == 0  # the page took no sample


def test_one_steps_through_the_episode_of_a_sample(browser, scene):
    with window(browser, scene[2].url) as page:
        open_page(page, scene[2].url, "memory?table=episodes")
        where = page.locator(".steps output")
        page.get_by_text("of 30 of its episode").wait_for()

        def step():
            return int(where.inner_text().split()[1])

        earlier, later = (page.get_by_role("button", name=name) for name in ("Earlier", "Later"))

        def click(button, after):
            button.click()
            until(lambda: step() == after)
            page.locator("button:has-text('Another sample'):enabled").wait_for()

        if step() == 30:  # the sample is random; a click moves the focus to which the keys go
            click(earlier, 29)
        while later.is_enabled():
            click(later, step() + 1)
        assert step() == 30 and later.is_disabled()  # after the 30th step comes the last state
        shown = page.locator("tr", has_text="action").locator("td").nth(2)
        assert shown.inner_text() == "29"
        page.keyboard.press("ArrowLeft")
        until(lambda: step() == 29)
        until(lambda: shown.inner_text() == "28")
        assert page.get_by_text("none yet").is_visible()
        name = scene[0].table("episodes")
        batch = name.get_batch(4096, timeout=100.0)  # each entry is in such a large batch
        name.update_priorities(batch.ids, np.full(4096, -0.25, np.float32))
        page.get_by_role("button", name="Earlier").click()
        until(lambda: step() == 28)
        page.get_by_text("0.25", exact=True).wait_for()


def test_what_a_table_holds_is_spread_and_another_table_is_in_the_address(browser, scene):
    with window(browser, scene[2].url, size=PHONE) as page:
        open_page(page, scene[2].url, "memory")
        page.get_by_role("img", name="Weights").wait_for()
        page.get_by_role("img", name="Ages").wait_for()
        assert page.get_by_text(
            "Weights of held samples, which actors drew in proportion to their weights."
        ).is_visible()
        page.get_by_label("Table", exact=True).select_option("episodes")
        page.get_by_text("Weights of stored entries. Draws are in proportion to weights.").wait_for()
        page.get_by_text("kept by home").wait_for()
        assert "table=episodes" in page.url
        check_drawn(page, PHONE, "memory")


def test_columns_of_the_actors_are_chosen_and_kept_in_the_address(browser, scene):
    with window(browser, scene[2].url) as page:
        open_page(page, scene[2].url, "actors?columns=label.steps.generated_bytes")
        heads = page.locator("thead th")
        until(lambda: heads.all_inner_texts() == ["Actor ▲", "Steps", "Recorded"] or heads.count() == 3)
        page.get_by_text("Columns").click()
        page.get_by_label("Return, whole run").check()
        until(lambda: heads.count() == 4)
        assert "columns=label.steps.return_mean.generated_bytes" in page.url
        page.get_by_role("button", name="Steps", exact=True).click()
        page.get_by_role("img", name="Steps of the actors").wait_for()
        assert complaints(page) == []


def test_an_actor_has_a_curve_of_its_own_episodes(browser, scene):
    with window(browser, scene[2].url) as page:
        open_page(page, scene[2].url, f"actors?id={scene[1][2].client_id.hex()}")
        returns = page.locator("figure", has_text="Return of its episodes")
        returns.locator(".uplot canvas").wait_for()
        returns.get_by_text("Figures as a table").click()
        cells = returns.locator("tbody td.number")
        until(lambda: cells.count() == 9)
        assert sorted(map(int, cells.all_inner_texts())) == list(range(30, 39))


def test_a_finding_leads_to_the_page_that_says_more(browser, scene):
    with window(browser, scene[2].url) as page:
        open_page(page, scene[2].url, "overview")
        link = page.locator(".verdict").get_by_role("link").first
        leads_to = link.get_attribute("href")
        link.click()
        until(lambda: leads_to and page.url.endswith(leads_to))
        open_page(page, scene[2].url, "learning")
        page.get_by_role("link", name="actors by mean return").click()
        page.get_by_role("img", name="Return, whole run of the actors").wait_for()
