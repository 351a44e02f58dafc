"""What a server finds again of its former life."""

import json

import pytest

from fake_store import Disk
from memoire.accounting.runs import RunFacts
from memoire.errors import ParameterError, UnknownName
from memoire.server.durability import Committer
from memoire.server.handlers.control import made
from memoire.server.state import DEFAULT_RUN, recover, run_to_count
from memoire.tables.table import Table
from netkit import SCHEMA
from serverkit import NOW, PARAMETERS, Ends, save, state_of, store_of, tables_of

pytestmark = pytest.mark.usefixtures("without_io")


@pytest.fixture
def disk():
    return Disk()


def begin(disk, run=None, parameters=PARAMETERS):
    """A life of a server on a disk; everything until then is saved."""
    store = store_of(disk)
    committer = Committer(store)
    state = state_of(
        tables_of(default=Table(SCHEMA, parameters=parameters), other=Table(SCHEMA, parameters=PARAMETERS)),
        store=store,
        run=run_to_count(store, run, committer),
    )
    state.committer = committer
    recover(state, store)
    save(state, disk)
    return Ends(state)


def test_a_server_without_a_folder_counts_the_run_that_it_is_given():
    committer = Committer(None)
    assert run_to_count(None, None, committer) == DEFAULT_RUN and run_to_count(None, "a", committer) == "a"


def test_a_server_goes_on_with_the_run_that_it_counted_last(disk):
    assert begin(disk).state.run.name == DEFAULT_RUN
    ends = begin(disk)
    ends.control.begin_run("next", NOW + 1.0)
    save(ends.state, disk)
    assert begin(disk).state.run.name == "next"


def test_a_run_that_is_given_again_does_not_undo_one_that_began_since(disk):
    ends = begin(disk, "a")
    ends.control.begin_run("b", NOW + 1.0)
    save(ends.state, disk)
    assert begin(disk, "a").state.run.name == "b"
    assert begin(disk, "c").state.run.name == "c", "another one than was given then"
    assert [facts.name for facts in begin(disk, "c").state.runs.facts()] == ["a", "b", "c"]
    assert disk.runs["b"].ended == NOW


def test_a_folder_in_which_all_runs_have_ended_counts_the_one_that_is_given(disk):
    disk.runs["a"] = RunFacts("a", began=1.0, ended=2.0)
    disk.texts["run"] = "b"
    assert begin(disk).state.run.name == DEFAULT_RUN
    disk.runs.pop(DEFAULT_RUN)
    assert begin(disk, "b").state.run.name == "b"


def test_models_of_the_run_are_here_again_and_the_tables_hear_of_them(disk):
    ends = begin(disk)
    ends.models.publish(made("t", b"x", ends.state.limits), 4)
    save(ends.state, disk)
    again = begin(disk).state
    assert again.models.newest("t").body == b"x" and again.models.version("t") == 4
    assert begin(disk, "other").state.models.versions() == {}


def test_versions_go_on_after_a_restart_into_another_run(disk):
    ends = begin(disk, "a")
    ends.models.publish(made("t", b"x", ends.state.limits), 4)
    save(ends.state, disk)
    ends = begin(disk, "b")
    assert ends.models.publish(made("t", b"y", ends.state.limits)).version == 5
    save(ends.state, disk)
    ends = begin(disk, "a")
    assert ends.state.models.newest("t").body == b"x"
    assert ends.models.publish(made("t", b"z", ends.state.limits)).version == 6


def test_parameters_that_were_configured_hold_on(disk):
    ends = begin(disk)
    ends.control.configure(ends.state.tables["other"], {"cache_size": 4})
    save(ends.state, disk)
    tables = begin(disk).state.tables
    assert (tables["other"].parameters.cache_size, tables["other"].parameters_version) == (4, 2)
    assert (tables.first.parameters.cache_size, tables.first.parameters_version) == (8, 1)


def test_parameters_that_are_given_differently_replace_them(disk):
    ends = begin(disk)
    ends.control.configure(ends.state.tables.first, {"cache_size": 4})
    save(ends.state, disk)
    table = begin(disk, parameters=PARAMETERS.replace(cache_size=16)).state.tables.first
    assert (table.parameters.cache_size, table.parameters_version) == (16, 3)
    table = begin(disk, parameters=PARAMETERS.replace(cache_size=16)).state.tables.first
    assert (table.parameters.cache_size, table.parameters_version) == (16, 3)


@pytest.mark.parametrize("saved", ["", "[]", '{"given": {}}', '{"given": 1, "now": {}, "version": 1}', "[" * 100_000])
def test_parameters_that_are_none_are_refused(disk, saved):
    begin(disk)
    disk.texts["parameters"] = saved
    with pytest.raises(ParameterError, match="what a server saves of a table"):
        begin(disk)


@pytest.mark.parametrize("which", ["given", "now"])
def test_a_saved_setting_of_another_name_is_refused_by_name(disk, which):
    begin(disk)
    saved = json.loads(disk.texts["parameters"])
    saved[which]["size_of_caches"] = saved[which].pop("cache_size")
    disk.texts["parameters"] = text = json.dumps(saved)
    with pytest.raises(UnknownName, match="size_of_caches"):
        begin(disk)
    assert disk.texts["parameters"] == text


def test_parameters_of_a_schema_that_has_changed_are_refused(disk):
    begin(disk)
    saved = json.loads(disk.texts["parameters"])
    saved["now"]["cache_size"] = -1
    disk.texts["parameters"] = json.dumps(saved)
    with pytest.raises(ParameterError, match="cache_size"):
        begin(disk)
