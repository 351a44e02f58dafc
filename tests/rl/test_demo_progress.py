"""What the demo says of its progress and at its end."""

import dataclasses
from typing import Any

import pytest

from memoire.rl.demo import demo, learner


def report(recent: list[list[float]], clients: dict[str, dict[str, int]], **totals: int) -> dict[str, Any]:
    return {
        "totals": {"steps": 0, "episodes": 0, "accepted_caches": 0} | totals,
        "held_caches": 2,
        "feedback": {
            "clients": {"given": 8, "applied": 5, "superseded": 0, "gone": 1, "stale": 1, "lost": 0, "waiting": 1},
            "unknown": {"given": 1, "lost": 1},
        },
        "recent": recent,
        "clients": clients,
    }


@dataclasses.dataclass
class Said:
    reports: dict[str, Any]


def progress_of(
    *reports: dict[str, Any], learner: dict[str, Any] | None = None, seconds: float = 4.0
) -> demo.ClusterProgress:
    made = demo.ClusterProgress(goal=195.0)
    made.take(tuple(Said(one) for one in reports), learner or {}, seconds)  # type: ignore[arg-type]
    return made


def counts(steps: int, episodes: int, caches: int) -> dict[str, int]:
    return {"steps": steps, "episodes": episodes, "caches": caches}


def test_the_newest_episodes_of_all_servers_are_taken_together() -> None:
    one = report([[float(number), 100.0, 9] for number in range(0, 40, 2)], {})
    other = report([[float(number), 300.0, 9] for number in range(1, 40, 2)], {})
    made = progress_of(one, other)
    assert made.mean_return == 200.0
    assert made.is_reached
    assert not progress_of(one).is_reached
    assert not progress_of(report([[1.0, 500.0, 500]] * 19, {})).is_reached, "19 episodes are not 20"


def test_progress_before_anything_was_reported() -> None:
    made = progress_of({})
    assert (made.mean_return, made.is_reached) == (None, False)
    assert dict(made.figures())["learner waits"] == "-"
    assert demo.summary(made)[-1].split() == ["cluster", "0", "0", "0"]


def test_td_errors_are_added_up_over_servers_and_one_that_is_nowhere_is_found() -> None:
    fine, wrong = report([], {}), report([], {})
    wrong["feedback"] = {"clients": {"given": 8, "applied": 9}, "unknown": {"given": 2, "lost": 1}}
    made = progress_of(fine, fine)
    assert (made.feedback["given"], made.feedback["applied"], made.unbalanced) == (18, 10, "")
    assert dict(made.figures())["TD errors"] == "18 given, 10 applied, 2 lost"
    assert demo.summary(made)[1] == (
        "  TD errors: 18 given = 10 applied + 0 superseded + 2 gone + 2 stale + 2 lost + 2 waiting; looked at 1 times"
    )
    made = progress_of(fine, wrong)  # owners are looked at one by one: together these add up
    made.take((Said(fine),), {}, 5.0)  # type: ignore[arg-type]
    assert made.unbalanced.startswith("clients: ") and "'given': 8, 'applied': 9" in made.unbalanced


def test_counts_that_do_not_add_up_are_found() -> None:
    fine = progress_of(
        report([], {"a": counts(5, 1, 2), "b": counts(7, 2, 3)}, steps=12, episodes=3, accepted_caches=5)
    )
    assert demo.differences(fine, {"a": counts(5, 1, 9), "b": counts(7, 2, 9)}) == []
    assert demo.differences(fine, {"a": counts(6, 1, 2)}) == ["actor a made 6 steps, but the servers have 5"]
    assert demo.differences(fine, {"c": counts(0, 1, 2)}) == ["actor c made 1 episodes, but the servers have 0"]
    wrong = progress_of(report([], {"a": counts(5, 1, 2)}, steps=6, episodes=1, accepted_caches=2))
    assert demo.differences(wrong, {}) == ["6 steps in all, but the clients have 5"]


def test_a_client_that_moved_is_merged() -> None:
    tables = [{"a": counts(5, 1, 2)}, {"a": counts(9, 2, 3)}]
    assert demo.merged(tables) == {"a": counts(9, 2, 5)}


LEARNER = {"batches": 9, "batch_rate": 3.0, "age": 0.25, "waiting": 0.5, "version": 7}


def test_short_lines_come_every_two_seconds() -> None:
    written: list[str] = []
    lines = demo.Lines(written.append)
    for seconds in (0.5, 1.0, 2.4, 2.6, 4.0, 4.7):
        lines.show(progress_of(report([], {}, steps=4000), learner=LEARNER, seconds=seconds))
    assert [line.split()[0] for line in written] == ["0.5", "2.6", "4.7"]
    assert all(len(line) <= 100 for line in written)
    for words in ("return     -", "episodes 0", "steps 4,000 (2,000/s)", "caches 0", "batches 3/s"):
        assert words in written[0]


def test_lines_say_again_where_the_dashboard_is() -> None:
    written: list[str] = []
    lines = demo.Lines(written.append)
    for seconds in (1.0, 29.0, 31.0, 45.0, 62.0):
        progress = progress_of(report([], {}), seconds=seconds)
        progress.dashboard = "http://127.0.0.1:1234"
        lines.show(progress)
    hints = [
        place for place, line in enumerate(written) if line == "dashboard: http://127.0.0.1:1234 | Ctrl-C ends the demo"
    ]
    assert hints == [3, 6], "below the lines of 31 and 62 seconds"
    quiet: list[str] = []
    demo.Lines(quiet.append).show(progress_of(report([], {}), seconds=99.0))
    assert len(quiet) == 1, "without a dashboard there is nothing to say"


def test_a_terminal_gets_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    panel = demo.ProgressPanel("the title")
    progress = progress_of(report([], {}, steps=4000), learner=LEARNER)
    progress.dashboard, progress.solved_after = "http://127.0.0.1:1234", 7.04
    panel.show(progress)
    panel.close()
    said = capsys.readouterr().out
    assert said.rstrip().endswith("solved after 7.0 s | dashboard: http://127.0.0.1:1234 | Ctrl-C ends the demo")
    assert "the title" in said
    assert "learner waits" in said
    assert "50 %" in said


def test_a_line_has_every_figure_that_a_learner_reports():
    now = [10.0]
    meter = learner.LearnerMeter(lambda: now[0])
    for age, error, waited in [(1.0, 0.5, 0.25), (3.0, 1.5, 0.75)]:
        meter.took(age, error, waited, 64)
    now[0] = 14.0
    reading = meter.reading()
    assert reading == {
        "batches": 2, "samples": 128, "batch_rate": 0.5, "waiting": 0.25, "age": 2.0, "error": 1.0
    }  # fmt: skip
    figures = dict(progress_of(report([], {}), learner=reading | {"version": 3}).figures())
    assert [figures[name] for name in ("batches", "sample age", "learner waits", "model")] == [
        "2 (0/s)", "2.00 s", "25 %", "version 3"
    ]  # fmt: skip
    now[0] = 16.0
    assert meter.reading() == reading | {"batch_rate": 0.0, "waiting": 0.0, "age": 0.0, "error": 0.0}
    assert dict(progress_of({}).figures())["sample age"] == "-"


@pytest.mark.parametrize(
    ("options", "goal"),
    [({}, 195.0), ({"goal": 30.0}, 30.0), ({"env": "Acrobot-v1"}, -100.0)],
)
def test_a_goal_is_the_one_that_was_given_or_the_demos_or_the_environments_own(options, goal):
    assert demo.Demo(demo.Options(**options)).progress.goal == goal


@pytest.mark.parametrize(("own", "status", "words"), [(5, 0, "sums to"), (6, 1, "do not add up: actor a made 6 steps")])
def test_the_end_says_whether_the_counts_add_up(capsys, monkeypatch, own, status, words):
    monkeypatch.delenv("MAKELEVEL", raising=False)  # make's own demo names make
    run = demo.Demo(demo.Options(goal=195.0))
    run.progress = progress_of(report([], {"a": counts(5, 1, 2)}, steps=5, episodes=1, accepted_caches=2))
    run.own_counts = {"a": counts(own, 1, 2)}
    run.progress.solved_after, run.solved_return = 3.0, 200.0
    assert run._sum_up(True) == status
    said = capsys.readouterr().out
    assert words in said and said.endswith("memoire demo --keep\n")


def test_what_there_is_one_of_is_counted_as_one() -> None:
    assert [demo.counted(number, "proxy", "proxies") for number in (0, 1, 2)] == ["0 proxies", "1 proxy", "2 proxies"]
