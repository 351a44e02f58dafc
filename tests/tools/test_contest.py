"""Records of a contest: they decide what runs and what the page says, as scores, quartiles and ratios."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import contest
    from contestants import page

    return contest, page


def record(page, side="memoire", seed=0, curve=((3.0, 100, 1.0), (6.0, 200, 7.0), (9.0, 300, 5.0)), **facts):
    return page.Record("breakout", side, seed, 10.0, tuple(curve), facts)


def test_a_contest_goes_on_with_what_has_no_record(modules, tmp_path):
    _, page = modules
    kept = page.Records(tmp_path)
    sides = ["memoire", "sb3"]
    assert kept.missing("breakout", sides, 2) == [(0, "memoire"), (0, "sb3"), (1, "sb3"), (1, "memoire")]
    kept.keep(record(page, "sb3", 0))
    kept.keep(record(page, "memoire", 1))
    (tmp_path / "breakout" / "memoire-0.part").write_text("cut off")
    assert page.Records(tmp_path).missing("breakout", sides, 2) == [(0, "memoire"), (1, "sb3")]
    assert kept.missing("lander", ["sb3"], 1) == [(0, "sb3")]
    assert kept.missing("breakout", ["sb3"], 2, lambda each: each.limit > 10.0) == [(0, "sb3"), (1, "sb3")]


def test_the_page_is_made_of_records_alone(modules, tmp_path):
    _, page = modules
    facts = {"machine": "a machine", "updates": 100, "shared": "torch 9"}
    runs = [
        record(page, "memoire", 0, [(2.0, 100, 60.0), (6.0, 100, 60.0)], **facts, waited=0.04),
        record(page, "memoire", 1, [(4.0, 300, 60.0), (6.0, 300, 60.0)], **facts, waited=0.04),
        record(page, "sb3", 0, [(6.0, 150, 65.0)], **facts, version="3.1"),
        record(page, "sb3", 1, [(6.0, 170, 0.5)], **facts, version="3.1"),
    ]
    kept_aims = {}

    def keep(aims):
        kept_aims.update(aims)
        (tmp_path / "contest.json").write_text(json.dumps({"machine": "", "aims": {}, "rows": []}))

    page.write(tmp_path, runs, keep)
    text = (tmp_path / "contest.md").read_text()
    assert "| memoire | 2 of 2 | 3 (2 to 4) | 200 (150 to 250) | 60.0 (60.0 to 60.0) | 10 |  |" in text
    assert (
        "| 1 of 2 | 8 (7 to 9) | 160 (155 to 165) | 32.8 (16.6 to 48.9) | 10 | 2.75 (2.62 to 2.88) |" in text
        and "| Stable-Baselines3 3.1 |" in text
        and "torch 9" in text
    )
    assert "Of its time, memoire's learner waited 4.0%, 4.0%: a share for each seed." in text
    assert kept_aims["contest-breakout-sb3"].middle == pytest.approx((3.0 + 2.5) / 2)
    assert (tmp_path / "contest-breakout.svg").exists()
    assert page.read(tmp_path) == sorted(runs, key=lambda each: each.key)
    assert page.read(tmp_path / "nowhere") == []


def test_every_side_has_its_programs_and_its_environment(modules):
    import tomllib

    contest, *_ = modules
    with (FOLDER / "peers" / "versions.toml").open("rb") as file:
        known = {side for row in tomllib.load(file).values() for side in row["sides"]} | {""}
    for game in contest.GAMES:
        sides = contest.sides_of(game, "")
        assert sides[:4] == ["memoire", "sb3", "torchrl", "rllib"], game
        assert {contest.GAMES[game].packages, *(contest.SIDES[side].environment for side in sides)} <= known
    assert contest.sides_of("pong", "") == ["memoire", "sb3", "torchrl", "rllib", "plain"]
    assert "plain" not in contest.sides_of("pong_gpu", "")  # pong_gpu has no plain side
    assert contest.sides_of("breakout", "plain,memoire") == ["memoire", "plain"]
    with pytest.raises(
        SystemExit, match="lander has no side uniform: --sides takes memoire, sb3, torchrl, rllib, inference"
    ):
        contest.sides_of("lander", "uniform")
