"""When a client says that its home is away, and that it is back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.client.session import AWAY_TIMEOUT, HomeWatch

pytestmark = pytest.mark.usefixtures("without_io")


@given(st.lists(st.tuples(st.floats(0.0, 8.0), st.booleans()), max_size=60))
def test_a_home_is_said_to_be_away_once_and_back_once(steps):
    watch, now, said, last = HomeWatch(0.0), 0.0, [], 0.0
    for seconds, is_heard in steps:
        now += seconds
        change = watch.look(now)
        assert (change == "away") == (now >= last + AWAY_TIMEOUT and said[-1:] != ["away"])
        said += [change] if change else []
        if is_heard:
            change = watch.acknowledged(now)
            assert (change == "back") == (said[-1:] == ["away"])
            said += [change] if change else []
            last = now
        assert watch.due == (float("inf") if said[-1:] == ["away"] else last + AWAY_TIMEOUT)
    assert said == ["away", "back"] * (len(said) // 2) + ["away"] * (len(said) % 2)
