"""Demos: texts of their progress and end, and computations of their learner."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import memoire
from memoire.rl.demo import demo, learner
from memoire.rl.demo.actor import Player
from memoire.rl.demo.qlearning import DoubleQ, LearningSettings, Network, act

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "demos" / "ppo.py"
PpoDemo = runpy.run_path(str(EXAMPLE))["PpoDemo"]

# --- Progress and summary of the demo


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


def progress_of(*reports: dict[str, Any], learner: Any = None, seconds: float = 4.0) -> demo.ClusterProgress:
    progress = demo.ClusterProgress(goal=195.0)
    progress.take(tuple(SimpleNamespace(reports=one) for one in reports), learner or {}, seconds)
    return progress


def counts(steps: int, episodes: int, caches: int) -> dict[str, int]:
    return {"steps": steps, "episodes": episodes, "caches": caches}


def test_the_newest_episodes_of_all_servers_are_taken_together() -> None:
    one = report([[float(number), 100.0, 9] for number in range(0, 40, 2)], {})
    other = report([[float(number), 300.0, 9] for number in range(1, 40, 2)], {})
    progress = progress_of(one, other)
    assert progress.mean_return == 200.0
    assert progress.is_reached
    assert not progress_of(one).is_reached
    assert not progress_of(report([[1.0, 500.0, 500]] * 19, {})).is_reached, "19 episodes are not 20"


def test_td_errors_are_added_up_over_servers_and_one_that_is_nowhere_is_found() -> None:
    fine, wrong = report([], {}), report([], {})
    wrong["feedback"] = {"clients": {"given": 8, "applied": 9}, "unknown": {"given": 2, "lost": 1}}
    progress = progress_of(fine, fine)
    assert (progress.feedback["given"], progress.feedback["applied"], progress.unbalanced) == (18, 10, "")
    assert dict(progress.figures())["TD errors"] == "18 given, 10 applied, 2 lost"
    assert demo.summary(progress)[1] == (
        "  TD errors: 18 given = 10 applied + 0 superseded + 2 gone + 2 stale + 2 lost + 2 waiting; checked 1 times"
    )
    progress = progress_of(fine, wrong)  # the demo checks owners one by one: the sums are right
    progress.take((SimpleNamespace(reports=fine),), {}, 5.0)
    assert progress.unbalanced.startswith("clients: ") and "'given': 8, 'applied': 9" in progress.unbalanced


def test_counts_that_do_not_add_up_are_found() -> None:
    clients = {"a": counts(5, 1, 2), "b": counts(7, 2, 3)}
    fine = progress_of(report([], clients, steps=12, episodes=3, accepted_caches=5))
    assert demo.differences(fine, {"a": counts(5, 1, 9), "b": counts(7, 2, 9)}) == []
    assert demo.differences(fine, {"a": counts(6, 1, 2)}) == ["actor a counted 6 steps, but the servers have 5"]
    assert demo.differences(fine, {"c": counts(0, 1, 2)}) == ["actor c counted 1 episodes, but the servers have 0"]
    wrong = progress_of(report([], {"a": counts(5, 1, 2)}, steps=6, episodes=1, accepted_caches=2))
    assert demo.differences(wrong, {}) == ["6 steps in all, but the clients have 5"]


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
    hint = "dashboard: http://127.0.0.1:1234 | Ctrl-C ends the demo"
    assert [place for place, line in enumerate(written) if line == hint] == [3, 6], "below those of 31 and 62 seconds"
    quiet: list[str] = []
    demo.Lines(quiet.append).show(progress_of(report([], {}), seconds=99.0))
    assert len(quiet) == 1, "without a dashboard there is nothing to say"


def test_a_terminal_gets_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    panel = demo.ProgressPanel("the title")
    progress = progress_of(report([], {}, steps=4000), learner=LEARNER)
    progress.dashboard, progress.solved_after = "http://127.0.0.1:1234", 7.04
    panel.show(progress)
    panel.close()
    output = capsys.readouterr().out
    assert output.rstrip().endswith("solved after 7.0 s | dashboard: http://127.0.0.1:1234 | Ctrl-C ends the demo")
    assert "the title" in output
    assert "learner waits" in output
    assert "50 %" in output


def test_a_line_has_every_figure_that_a_learner_reports():
    now = [10.0]
    meter = learner.LearnerMeter(lambda: now[0])
    for age, error, waited in [(1.0, 0.5, 0.25), (3.0, 1.5, 0.75)]:
        meter.add(age, error, waited, 64)
    now[0] = 14.0
    reading = meter.read_and_reset()
    assert reading == {
        "batches": 2, "samples": 128, "batch_rate": 0.5, "waiting": 0.25, "age": 2.0, "error": 1.0
    }  # fmt: skip
    figures = dict(progress_of(report([], {}), learner=reading | {"version": 3}).figures())
    assert [figures[name] for name in ("batches", "sample age", "learner waits", "model")] == [
        "2 (0/s)", "2.00 s", "25 %", "version 3"
    ]  # fmt: skip
    now[0] = 16.0
    assert meter.read_and_reset() == reading | {"batch_rate": 0.0, "waiting": 0.0, "age": 0.0, "error": 0.0}
    assert dict(progress_of({}).figures())["sample age"] == "-"


@pytest.mark.parametrize(("options", "goal"), [({}, 195.0), ({"goal": 30.0}, 30.0), ({"env": "Acrobot-v1"}, -100.0)])
def test_a_goal_is_the_one_that_was_given_or_the_demos_or_the_environments_own(options, goal):
    assert demo.Demo(demo.DemoOptions(**options)).progress.goal == goal


@pytest.mark.parametrize(
    ("own", "solved_after", "status", "words"),
    [(5, 3.0, 0, "sum to"), (6, 3.0, 1, "do not add up: actor a counted 6 steps"),
     (5, None, 1, "not solved: after 4.0 s the last 0 episodes returned nothing yet, and the goal is 195")],
)  # fmt: skip
def test_the_end_says_whether_goal_and_counts_are_right(capsys, monkeypatch, own, solved_after, status, words):
    monkeypatch.delenv("MAKELEVEL", raising=False)  # `make demo` sets MAKELEVEL
    run = demo.Demo(demo.DemoOptions(goal=195.0))
    run.progress = progress_of(report([], {"a": counts(5, 1, 2)}, steps=5, episodes=1, accepted_caches=2))
    run.own_counts = {"a": counts(own, 1, 2)}
    run.progress.solved_after, run.solved_return = solved_after, 200.0
    assert run._print_summary(True) == status
    output = capsys.readouterr().out
    assert words in output and output.endswith("memoire demo --keep\n")


def test_what_there_is_one_of_is_counted_as_one() -> None:
    assert [demo.count_with_noun(number, "proxy", "proxies") for number in (0, 1, 2)] == [
        "0 proxies",
        "1 proxy",
        "2 proxies",
    ]


# --- Exit status of `make demo-ppo`: goal reached in time, equal ranks, and a killed collector


def demo_of(learners, *lines):
    """Return the demo after these lines of its ranks, with a run of two collectors."""
    ppo_demo = PpoDemo("CartPole-v1", learners, 0)
    run = SimpleNamespace(actors=[SimpleNamespace(name="actor-1", kill=lambda: None)] * 2)
    for line in lines:
        ppo_demo.hear(line)
        ppo_demo.look(run)
    return ppo_demo


HALF, GOAL = "  20 s    10,240 steps, return 240.1, kl 0.010", "  40 s    40,960 steps, return 475.3, kl 0.010"
RANK = "rank {} has parameters ab{}"


@pytest.mark.parametrize(
    ("learners", "lines", "status", "text"),
    [
        (1, [HALF, GOAL, RANK.format(0, 12)], 0, "reached after"),
        (1, [HALF, RANK.format(0, 12)], 1, "not reached within 120 s"),
        (1, [HALF, GOAL], 1, "reached after"),
        (2, [HALF, GOAL, RANK.format(0, 12), RANK.format(1, 12)], 0, "2 ranks are equal bit by bit"),
        (2, [HALF, GOAL, RANK.format(0, 12), RANK.format(1, 13)], 1, "2 ranks are not equal"),
        (2, [HALF, GOAL, RANK.format(0, 12)], 1, "parameters of 1 ranks"),
    ],
)
def test_the_exit_status_says_how_it_went(capsys, learners, lines, status, text):
    assert demo_of(learners, *lines).sum_up() == status
    assert text in capsys.readouterr().out


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_the_gradient_is_what_small_changes_of_the_weights_do(widths: list[int], rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    network = Network(widths, seed)
    network.vector[...] = random.normal(size=network.vector.shape)
    observations = random.normal(size=(rows, widths[0])).astype(np.float32)
    slope = random.normal(size=(rows, widths[-1])).astype(np.float32)
    gradient = network.gradient(network.activations(observations), slope)

    def loss(vector: np.ndarray) -> tuple[float, list[np.ndarray]]:
        """Return the loss of the same network in float64, layer by layer, and the signs of its ReLUs."""
        output, start, signs = observations.astype(np.float64), 0, []
        for depth, (size, width) in enumerate(zip(widths[:-1], widths[1:], strict=True), start=1):
            weights = vector[start : start + size * width].reshape(size, width)
            output = output @ weights + vector[start + size * width : start + (size + 1) * width]
            if depth < len(widths) - 1:
                signs.append(output > 0)
                output = np.maximum(output, 0.0)
            start += (size + 1) * width
        return float((output * slope).sum()), signs

    np.testing.assert_allclose(network(observations), network.activations(observations)[-1])
    for place in range(len(network.vector)):
        step = np.zeros(len(network.vector))
        step[place] = 1e-6
        (above, one), (below, other) = loss(network.vector + step), loss(network.vector - step)
        if all((a == b).all() for a, b in zip(one, other, strict=True)):  # the networks have no kink in between
            assert gradient[place] == pytest.approx((above - below) / 2e-6, rel=1e-3, abs=1e-3)


def test_weights_travel_as_bytes_and_fit_only_the_same_sizes() -> None:
    one, other = Network((4, 8, 2), 1), Network((4, 8, 2), 2)
    other.load(one.to_bytes())
    np.testing.assert_array_equal(one.vector, other.vector)
    np.testing.assert_array_equal(one.layers[1][0], other.layers[1][0])
    before = other.vector.copy()
    with pytest.raises(ValueError, match="another environment"):
        other.load(Network((4, 9, 2)).to_bytes())
    np.testing.assert_array_equal(other.vector, before)


def test_actions_are_the_best_known_ones_but_for_a_share_of_random_ones() -> None:
    network, random = Network((3, 4), 0), np.random.default_rng(0)
    observations = random.normal(size=(4000, 3)).astype(np.float32)
    best = network(observations).argmax(axis=1)
    np.testing.assert_array_equal(act(network, observations, 0.0, random), best)
    assert (act(network, observations, 0.4, random) != best).mean() == pytest.approx(0.4 * 3 / 4, abs=0.04)


class Corridor(gymnasium.Env[np.ndarray, int]):
    """Four rooms in a row, which any action passes, with a reward of 1 in each; after the last one is the end, or the
    first room.

    With gamma 0.5, an end is worth nothing, so the rooms are worth 1.875, 1.75, 1.5 and 1. Without an end, each room is
    worth 2, however often the walk is truncated.
    """

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, has_end: bool) -> None:
        self.has_end, self.steps = has_end, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.room(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        is_end = self.has_end and self.steps == 4
        return self.room(), 1.0, is_end, not self.has_end and self.steps == 7, {}

    def room(self) -> np.ndarray:
        return np.eye(4, dtype=np.float32)[self.steps % 4]


SMALL = LearningSettings(hidden=(32,), rate=3e-3, minibatch_size=64, batch_size=64, reward_scale=1.0, decay=1500)


@pytest.mark.parametrize(("has_end", "values"), [(True, [1.875, 1.75, 1.5, 1.0]), (False, [2.0, 2.0, 2.0, 2.0])])
def test_an_end_is_worth_nothing_and_a_cut_changes_nothing(has_end: bool, values: list[float]) -> None:
    envs = SyncVectorEnv([lambda: Corridor(has_end)] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    buffer = memoire.Buffer(memoire.Schema.from_env(envs), capacity=2000, seed=0, multi_step=3, discount=0.5)
    player = Player(envs, buffer.writer(envs), Network((4, 2), 0), epsilon=1.0, seed=0)
    learner = DoubleQ(4, 2, settings=SMALL, seed=0)
    for step in range(1240):
        player.step()
        if step >= 40:
            batch = buffer.sample(64)
            batch.update_priorities(learner.learn(batch))
    envs.close()
    outputs = learner.network(np.eye(4, dtype=np.float32))
    np.testing.assert_allclose(outputs, np.repeat(np.array(values)[:, None], 2, axis=1), atol=0.06)
