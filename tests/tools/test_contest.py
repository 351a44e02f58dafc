"""A contest's records decide what runs and what the page says: resumption, scores, quartiles, ratios, verdicts."""

import importlib.util
import json
import math
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    """The contest, its records and its page."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import contest
    from contestants import page, records

    return contest, records, page


def made(records, side="memoire", seed=0, curve=((3.0, 100, 1.0), (6.0, 200, 7.0), (9.0, 300, 5.0)), **facts):
    return records.Record("breakout", side, seed, 10.0, tuple(curve), facts)


def test_a_score_is_reached_by_the_first_network_that_returns_so_much(modules):
    _, records, _ = modules
    found = made(records)
    assert found.reached(6.0) == (6.0, 200) and found.reached(7.0) == (6.0, 200)
    assert found.counted(1.0) == (3.0, 100)


def test_a_run_that_never_gets_there_counts_its_limit_and_all_of_its_steps(modules):
    _, records, _ = modules
    assert made(records).reached(7.5) is None
    assert made(records).counted(7.5) == (10.0, 300)
    assert made(records, curve=()).counted(7.5) == (10.0, 0)


def test_a_contest_goes_on_with_what_has_no_record(modules, tmp_path):
    _, records, _ = modules
    kept = records.Records(tmp_path)
    sides = ["memoire", "sb3"]
    assert kept.missing("breakout", sides, 2) == [(0, "memoire"), (0, "sb3"), (1, "sb3"), (1, "memoire")]
    kept.keep(made(records, "sb3", 0))
    kept.keep(made(records, "memoire", 1))
    (tmp_path / "breakout" / "memoire-0.part").write_text("cut off")
    assert records.Records(tmp_path).missing("breakout", sides, 2) == [(0, "memoire"), (1, "sb3")]
    assert kept.missing("lander", ["sb3"], 1) == [(0, "sb3")]
    assert kept.missing("breakout", ["sb3"], 2, lambda found: found.limit > 10.0) == [(0, "sb3"), (1, "sb3")]


def test_the_page_says_which_limits_runs_had(modules):
    _, records, page = modules
    runs = [made(records), records.Record("breakout", "sb3", 0, 20.0, (), {})]
    assert page.limits(runs[:1]) == "10 s"
    assert page.limits(runs) == "20 s, or 10 s if it reached the score by then"


def test_a_record_is_read_as_it_was_written(modules, tmp_path):
    _, records, _ = modules
    kept = records.Records(tmp_path)
    kept.keep(made(records, updates=7))
    assert kept.all() == [made(records, updates=7)]


def test_a_new_record_takes_the_place_of_the_one_on_the_page(modules):
    _, records, _ = modules
    old, new = made(records, updates=1), made(records, updates=2)
    other = made(records, "sb3", 3)
    assert records.merged([old, other], [new]) == [new, other]


def test_ratios_are_taken_in_each_seed(modules):
    _, records, page = modules
    ours = [made(records, seed=seed, curve=[(2.0 + seed, 10, 9.0)]) for seed in range(3)]
    theirs = [made(records, "sb3", seed, [(4.0, 40, 9.0)]) for seed in (0, 2)]
    assert page.ratios(ours, theirs, 6.0) == [2.0, 1.0]
    assert page.ratios(ours, theirs, 6.0, 1) == [4.0, 4.0]


@pytest.mark.parametrize(
    ("waited", "verdicts", "agrees"),
    [
        (0.05, {"balanced": 3}, True),
        (0.05, {"learner_waits": 3, "balanced": 1}, False),
        (0.6, {"learner_waits": 3, "balanced": 1}, True),
        (0.6, {"balanced": 3}, False),
        (0.6, {}, False),
    ],
)
def test_the_verdict_agrees_with_how_long_the_learner_waited(modules, waited, verdicts, agrees):
    *_, page = modules
    assert page.agrees(waited, verdicts) is agrees


def test_the_page_warns_of_waiting_where_the_dashboard_does(modules):
    from memoire.dashboard.collect import verdict

    *_, page = modules
    assert page.MUCH_WAITING == verdict.MUCH_WAITING and "learner_waits" in verdict.CODES


def test_the_page_is_made_of_records_alone(modules, tmp_path):
    _, records, page = modules
    facts = {"machine": "a machine", "updates": 100, "shared": "torch 9"}
    waits = {"waited": 0.04, "shown": [0.03, 0.05], "verdicts": {"balanced": 4}}
    runs = [
        made(records, "memoire", 0, [(2.0, 100, 60.0), (6.0, 100, 60.0)], **facts, **waits),
        made(records, "memoire", 1, [(4.0, 300, 60.0), (6.0, 300, 60.0)], **facts, **waits),
        made(records, "sb3", 0, [(6.0, 150, 65.0)], **facts, version="3.1"),
        made(records, "sb3", 1, [(6.0, 170, 0.5)], **facts, version="3.1"),
    ]
    given = {}

    def keep(aims):
        given.update(aims)
        (tmp_path / "contest.json").write_text(json.dumps({"machine": "", "aims": {}, "rows": []}))

    page.write(tmp_path, runs, keep)
    text = (tmp_path / "contest.md").read_text()
    assert "| memoire | 2 of 2 | 3 (2 to 4) | 200 (150 to 250) | 60.0 (60.0 to 60.0) | 10 |  |" in text
    assert (
        "| 1 of 2 | 8 (7 to 9) | 160 (155 to 165) | 32.8 (16.6 to 48.9) | 10 | 2.75 (2.62 to 2.88) |" in text
        and "| Stable-Baselines3 3.1 |" in text
        and "torch 9" in text
    )
    assert "| 0 | 4.0% | 3.0% to 5.0% | `balanced` | yes |" in text
    assert given["contest-breakout-sb3"].middle == pytest.approx((3.0 + 2.5) / 2)
    assert (tmp_path / "contest-breakout.svg").exists()
    assert page.read(tmp_path) == sorted(runs, key=lambda each: each.key)
    assert page.read(tmp_path / "nowhere") == []


def test_the_return_later_is_the_mean_of_the_second_half_of_a_run(modules):
    _, records, _ = modules
    assert made(records).later_return() == 6.0  # of 7 at 6 s, and 5 at 9 s
    assert math.isnan(made(records, curve=()).later_return())


def test_rates_are_of_the_second_half_of_the_time_with_updates(modules):
    contest, records, _ = modules
    curve = [(1.0, 4000, 0), (6.0, 5000, 0), (7.0, 6000, 10), (8.0, 6100, 25), (9.0, 6200, 60), (10.0, 6400, 90)]
    assert made(records, curve=curve).rates() == (200.0, 30.0)  # of 8.5 s on
    for early in curve[:2], curve[:3], []:
        assert math.isnan(made(records, curve=early).rates()[1])
    assert contest.said(made(records, curve=curve), None) == "200 steps and 30.0 updates a second"
    assert "give it more --seconds" in contest.said(made(records, curve=curve[:2]), None)


def test_a_game_without_a_score_has_a_section_of_rates_and_no_aims(modules, tmp_path):
    _, records, page = modules
    facts = {"machine": "a machine", "shared": "torch 9", "packages": "ale-py 7", "memory": 300 << 20}
    runs = [
        records.Record(
            "pong", "memoire", 0, 10.0, ((2.0, 5000, 4), (5.0, 6000, 10), (7.0, 15_600, 90), (10.0, 30_000, 210)), facts
        ),
        records.Record("pong", "rllib", 0, 10.0, ((2.0, 5000, 1), (6.0, 6100, 30), (10.0, 6500, 110)), facts),
    ]
    assert page.aims(runs) == {}
    (tmp_path / "contest.json").write_text("{}")
    page.write(tmp_path, runs, lambda aims: None)
    text = (tmp_path / "contest.md").read_text()
    assert (
        "## Pong: rates" in text
        and "a machine, ale-py 7." in text
        and "room for 20,000 steps" in " ".join(text.split())
    )
    assert "| memoire | 4,800 (4,800 to 4,800) | 40.0 (40.0 to 40.0) |  | 300 | 20,000 |" in text
    assert "| RLlib | 100 (100 to 100) | 20.0 (20.0 to 20.0) | 2.00 (2.00 to 2.00) | 300 | 6,500 |" in text
    assert "mean return of 20 greedy episodes" not in (tmp_path / "contest-pong.svg").read_text()


def test_memory_is_that_of_a_process_and_of_all_that_come_from_it(modules, tmp_path):
    from contestants.records import memory_of

    for number, parent, kilobytes in ((7, 1, 100), (8, 7, 20), (9, 8, 3), (10, 1, 5000)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(f"{number} (a ) b) S {parent} 7 7 0")
        (tmp_path / str(number) / "smaps_rollup").write_text(
            f"head\nRss: 9999 kB\nPss:  {kilobytes} kB\nPss_Dirty: 1 kB\n"
        )
    (tmp_path / "11").mkdir()  # is gone by now
    assert memory_of(7, tmp_path) == 123 * 1024
    assert memory_of(12, tmp_path) == 0


@pytest.fixture
def tasks(monkeypatch):
    """What programs of sides are given."""
    monkeypatch.syspath_prepend(str(FOLDER / "contestants"))
    pytest.importorskip("gymnasium", reason="the programs of a contest play Gymnasium's environments")
    import tasks

    return tasks


def test_stacks_have_the_newest_frames_and_begin_anew_with_an_episode(tasks):
    import numpy as np

    stacks = np.array([[[1], [2], [3]], [[4], [5], [6]]])
    found = tasks.with_newest(stacks, np.array([[7], [8]]), np.array([False, True]))
    assert found.tolist() == [[[2], [3], [7]], [[8], [8], [8]]]
    assert stacks.tolist() == [[[1], [2], [3]], [[4], [5], [6]]]


def test_a_run_of_rates_writes_steps_and_updates_until_its_time_is_up(tasks, tmp_path):
    run = tasks.Run("pong", 0, 5.0, str(tmp_path), time.monotonic() - 4.0, {})
    assert run.goes_on(100, list, 7)
    assert run.goes_on(101, list, 8)  # not yet again
    run.began -= 6.0
    assert not run.goes_on(200, list, 9)
    assert not run.goes_on(300, list, 10)
    rows = list(json.loads((tmp_path / "curve.json").read_text()).values())
    assert [row[1:] for row in rows] == [[100, 7], [200, 9]] and 4.0 <= rows[0][0] < 10.0 <= rows[1][0]


def test_a_curve_holds_the_newest_network(modules):
    import numpy as np

    _, records, page = modules
    assert page.held(made(records), np.array([0.0, 3.0, 5.9, 6.0, 30.0])).tolist() == [1.0, 1.0, 1.0, 7.0, 5.0]
    assert page.held(made(records), np.array([0.0, 2.9, 3.0, 6.0]), 1).tolist() == [0, 0, 100, 200]


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
    assert "plain" not in contest.sides_of("pong_gpu", "")  # which learns nowhere else
    assert contest.sides_of("breakout", "plain,memoire") == ["memoire", "plain"]
    with pytest.raises(
        SystemExit, match="lander has no side uniform: --sides takes memoire, sb3, torchrl, rllib, inference"
    ):
        contest.sides_of("lander", "uniform")


FAKE = """
import json, os, sys, time
told = json.loads(os.environ["CONTEST"])
if told["options"]: sys.exit(told["options"]["status"])
open(os.path.join(told["folder"], "facts.json"), "w").write(json.dumps({"updates": told["seed"]}))
"""
PLAYER = """
import sys
open(sys.argv[2] + "/curve.json", "w").write('{"b": [2.0, 20, 1.5], "a": [1.0, 10, 0.5]}')
"""


@pytest.fixture
def fake(modules, tmp_path):
    """A contest of its own, whose sides are this Python with small programs."""
    found = importlib.util.spec_from_file_location("contest_of_programs", FOLDER / "contest.py")
    contest = importlib.util.module_from_spec(found)
    sys.modules[found.name] = contest
    found.loader.exec_module(contest)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sb3_side.py").write_text(FAKE)
    (programs / "evaluate.py").write_text(PLAYER)
    contest.PROGRAMS, contest.GRACE = programs, 0.2
    contest.python_of = lambda environment: Path(sys.executable)
    contest.versions = lambda python, names, paths: dict.fromkeys(names, "1")
    yield contest, programs, tmp_path / "runs"
    del sys.modules[found.name]


def test_a_run_is_a_program_and_an_evaluation_afterwards(fake):
    contest, _, folder = fake
    found = contest.run("breakout", "sb3", 4, 60.0, folder)
    assert found.curve == ((1.0, 10, 0.5), (2.0, 20, 1.5)) and found.limit == 60.0
    assert found.facts["updates"] == 4 and found.facts["version"] == "1"


def test_what_is_compared_by_rates_alone_is_not_evaluated(fake):
    contest, programs, folder = fake
    (programs / "evaluate.py").write_text("raise SystemExit('nobody asked')")
    (programs / "sb3_side.py").write_text(
        FAKE + "print(os.environ['PYTHONPATH'])\n"
        "open(os.path.join(told['folder'], 'curve.json'), 'w').write('{\"a\": [1.0, 10, 5]}')\n"
        "import threading; threading.Event().wait(0.5)"
    )
    contest.LOOK, contest.packages_of = 0.1, lambda name: [Path("/of", name)]
    found = contest.run("pong", "sb3", 4, 60.0, folder)
    assert found.curve == ((1.0, 10, 5),) and found.facts["memory"] > 1 << 20
    assert found.facts["packages"] == "ale-py 1, opencv-python-headless 1"
    assert (folder / "pong" / "sb3-4" / "log.txt").read_text().strip() == f"{programs}:/of/contest-ale"


def test_a_side_that_fails_says_so_and_leaves_no_record(fake):
    contest, programs, folder = fake
    (programs / "sb3_side.py").write_text("raise SystemExit('no such thing')")
    with pytest.raises(contest.PeerUnavailable, match=r"Stable-Baselines3: it ended with status 1[\s\S]*no such thing"):
        contest.run("breakout", "sb3", 0, 60.0, folder)


def test_a_side_that_does_not_end_is_killed(fake):
    contest, programs, folder = fake
    (programs / "sb3_side.py").write_text("import threading; threading.Event().wait()")
    with pytest.raises(contest.PeerUnavailable, match="status -9"):
        contest.run("breakout", "sb3", 0, 0.2, folder)
