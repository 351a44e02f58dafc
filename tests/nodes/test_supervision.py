"""When a process that died is started again, decided by the clock that is given."""

import pytest

from memoire.nodes.launcher import MAX_FAILED_STARTS, MAX_PAUSE, MIN_PAUSE, MIN_UPTIME, Restarts


def worked(seconds: float = 0.0) -> Restarts:
    made = Restarts()
    made.ready(0.0)
    made.ready(seconds)  # again changes nothing
    return made


def test_a_process_that_never_worked_is_not_started_again() -> None:
    made = Restarts()
    assert made.died(1.0) is None
    assert made.due is None
    assert not made.is_due(1e9)


def test_a_process_that_worked_is_started_again_after_a_pause() -> None:
    made = worked()
    assert made.died(10.0) == MIN_PAUSE
    assert not made.is_due(10.0 + MIN_PAUSE - 0.01)
    assert made.is_due(10.0 + MIN_PAUSE)
    made.started()
    assert not made.is_due(1e9)
    assert made.count == 1


def test_pauses_grow_up_to_a_bound_while_it_dies_soon_after_each_start() -> None:
    made, now, pauses = worked(), 0.0, []
    for _ in range(12):
        now += MIN_UPTIME / 2
        pauses.append(made.died(now))
        made.started()
        made.ready(now)
    assert pauses[:4] == [MIN_PAUSE * 2**number for number in range(4)]
    assert pauses[-1] == MAX_PAUSE == max(pause for pause in pauses if pause is not None)


@pytest.mark.parametrize(("seconds", "pause"), [(MIN_UPTIME, MIN_PAUSE), (MIN_UPTIME - 0.01, 2 * MIN_PAUSE)])
def test_a_while_of_work_makes_former_deaths_forgotten(seconds: float, pause: float) -> None:
    made = worked()
    made.died(0.0)
    made.started()
    made.ready(100.0)
    assert made.died(100.0 + seconds) == pause


def test_starts_that_come_to_nothing_give_a_process_up() -> None:
    made = worked()
    pauses = [made.died(float(number)) for number in range(MAX_FAILED_STARTS + 1)]  # the first one had worked
    assert None not in pauses[:-1]
    assert pauses[-1] is None


def test_only_failed_starts_in_a_row_count() -> None:
    made = worked()
    for number in range(3 * MAX_FAILED_STARTS):
        assert made.died(float(number)) is not None
        made.started()
        if number % 2:
            made.ready(float(number))


def test_a_process_that_was_killed_is_started_again_though_it_never_worked() -> None:
    made = Restarts()
    assert made.died(1.0, is_killed=True) == MIN_PAUSE
    assert made.died(2.0) is None, "it ended by itself then"


def test_a_process_that_dies_soon_after_each_start_is_given_up_at_its_limit() -> None:
    made = Restarts(most=3)
    pauses = []
    for number in range(4):
        made.ready(10.0 * number)
        pauses.append(made.died(10.0 * number + 1.0))
    assert pauses[-1] is None and None not in pauses[:-1]


def test_a_minute_of_work_gives_a_process_its_starts_back() -> None:
    made = Restarts(most=1)
    for number in range(5):
        made.ready(100.0 * number)
        assert made.died(100.0 * number + MIN_UPTIME) == MIN_PAUSE
