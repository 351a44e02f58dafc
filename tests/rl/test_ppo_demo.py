"""`make demo-ppo` says by its exit status whether the goal was reached in time, with equal ranks and a killed collector."""

import pytest

from memoire.rl.demo.ppo import PpoDemo


class Run:
    """What the demo knows of a launched run."""

    class Actor:
        name = "actor-1"
        kills = 0

        def kill(self):
            self.kills += 1

    def __init__(self):
        self.actors = [self.Actor(), self.Actor()]


def demo_of(learners=1, *lines):
    demo, run = PpoDemo("CartPole-v1", learners, 0), Run()
    for line in lines:
        demo.hear(line)
        demo.look(run)
    return demo, run


HALF, GOAL = "  20 s    10,240 steps, return 240.1, kl 0.010", "  40 s    40,960 steps, return 475.3, kl 0.010"


def test_one_collector_is_killed_half_way_and_once(capsys):
    _, run = demo_of(
        1, "   1 s     2,048 steps, return -inf, kl 0.010", "   9 s     6,144 steps, return 237.0, kl 0.010"
    )
    assert [actor.kills for actor in run.actors] == [0, 0]
    _, run = demo_of(1, HALF, GOAL)
    assert [actor.kills for actor in run.actors] == [0, 1]
    assert "half way, at a return of 240.1: actor-1 is killed on purpose" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("learners", "lines", "status", "said"),
    [
        (1, [HALF, GOAL, "rank 0 has parameters ab12"], 0, "reached after"),
        (1, [HALF, "rank 0 has parameters ab12"], 1, "not reached within 120 s"),
        (1, [HALF, GOAL], 1, "reached after"),
        (
            2,
            [HALF, GOAL, "rank 0 has parameters ab12", "rank 1 has parameters ab12"],
            0,
            "2 ranks are equal bit by bit",
        ),
        (2, [HALF, GOAL, "rank 0 has parameters ab12", "rank 1 has parameters ab13"], 1, "2 ranks are not equal"),
        (2, [HALF, GOAL, "rank 0 has parameters ab12"], 1, "parameters of 1 ranks"),
    ],
)
def test_the_exit_status_says_how_it_went(capsys, learners, lines, status, said):
    demo, _ = demo_of(learners, *lines)
    assert demo.sum_up() == status
    assert said in capsys.readouterr().out


def test_a_goal_that_is_reached_too_late_is_not_reached():
    demo, _ = demo_of(1, HALF, GOAL, "rank 0 has parameters ab12")
    demo.reached_after = demo.task.seconds + 1.0
    assert demo.sum_up() == 1
