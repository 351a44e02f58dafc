"""What learners and operators decide, and whom it reaches."""

import numpy as np
import pytest

from fake_store import Disk
from memoire.errors import ParameterError, ProtocolError
from memoire.replay.parameters import Parameters
from memoire.tables.table import Table
from memoire.wire import messages
from netkit import SCHEMA
from serverkit import ME, NOW, YOU, Ends, ask, save, state_of, store_of, tables_of

pytestmark = pytest.mark.usefixtures("without_io")

BAND = Parameters(cache_size=8, samples_per_insert=1.0, samples_per_insert_tolerance=30.0, min_size=0)


@pytest.fixture
def ends():
    return Ends(state_of())


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def durable(disk):
    return Ends(state_of(store=store_of(disk)))


def control(ends, **facts):
    return ask(ends.control.control, messages.Control(**facts))


def test_parameters_change_for_everyone(ends):
    reply = control(ends, parameters={"cache_size": 4})
    assert (reply.body.parameters_version, reply.body.finished, reply.until_saved) == (2, False, True)
    assert ends.state.tables.first.parameters.cache_size == 4 and ends.news == [1]
    assert ends.state.tables["whole"].parameters_version == 1
    control(ends, parameters={"cache_size": 4})
    assert ends.state.tables.first.parameters_version == 2 and ends.news == [1], "they are the same"


@pytest.mark.parametrize("wrong", [{"parameters": {"cache_size": 0}}, {"parameters": {"none": 1}}, {"run": "\n"}])
def test_a_mistake_ends_an_order_and_what_comes_after_it_is_not_done(ends, wrong):
    with pytest.raises(ProtocolError) as caught:
        control(ends, **wrong, finish=True, drain=True)
    assert caught.value.code == "parameters" and ends.news == []
    assert (ends.state.run.finished, ends.state.leaving, ends.state.run.name) == (False, False, "run")


def test_one_order_may_say_all(ends):
    told = control(ends, parameters={"cache_size": 4}, run="next", finish=True, drain=True).body
    assert (told.parameters_version, told.finished, ends.state.run.name, ends.state.leaving) == (2, True, "next", True)
    assert not ends.state.runs.named("run").finished and len(ends.news) == 4


def test_the_end_of_a_run_is_said_once(ends, disk):
    ends.control.resume()
    assert ends.news == []
    ends.control.finish()
    ends.control.finish()
    assert ends.state.run.finished and ends.news == [1]
    ends.control.resume()
    assert not ends.state.run.finished and ends.news == [1, 1]


def test_everything_is_told_when_it_is_on_disk(durable, disk):
    durable.control.configure(durable.state.tables.first, {"cache_size": 4})
    durable.control.begin_run("next", NOW)
    durable.control.finish()
    assert durable.news == []
    save(durable.state, disk)
    assert durable.news == [1, 1, 1] and '"cache_size":4' in disk.texts["parameters"]
    assert {name: (facts.finished, facts.ended) for name, facts in disk.runs.items()} == {
        "run": (False, NOW),
        "next": (True, 0.0),
    }


def test_another_run_begins_with_nothing_of_the_former_one():
    ends = Ends(state_of(tables_of(default=Table(SCHEMA, parameters=BAND))))
    ends.hello()
    ends.update(steps=25, finished=True)
    ends.update(YOU, steps=1, finished=True)
    numbers = np.arange(3, dtype=np.int64)
    ends.feedback.apply([(ME, numbers, np.ones(3, np.float32)), (YOU, numbers, np.ones(3, np.float32))], NOW)
    cleared, ends.state.tables.first.pool.clear = [], lambda: cleared.append(1)
    ends.control.finish()
    ends.state.informed.add(ME)
    ends.control.begin_run("next", NOW + 5)
    former, limiter = ends.state.runs.named("run"), ends.state.tables.first.limiter
    assert (former.ended, former.finished, former.ledger.steps) == (NOW + 5, True, 26)
    assert (ends.state.run.began, ends.state.run.finished, ends.state.ledger.steps) == (NOW + 5, False, 0)
    assert cleared == [1] and ends.state.informed == set() and limiter.stats().surplus == 0.0
    assert ends.feedback.lost == 6 and former.ledger.totals().lost_feedback == 6
    assert ends.hello(bytes(15) + b"x").body.granted_steps == 30


def test_a_run_that_is_counted_already_does_not_begin_again(ends):
    ends.update(steps=3)
    ends.control.begin_run("run", NOW + 5)
    assert ends.news == [] and ends.state.run.ended == 0.0 and ends.state.ledger.steps == 3
    ends.control.begin_run("next", NOW)
    ends.control.begin_run("run", NOW)
    assert ends.state.ledger.steps == 3, "it goes on where it ended"
    for wrong in ("", 3, "x" * 257):
        with pytest.raises(ParameterError, match="run"):
            ends.control.begin_run(wrong, NOW)
