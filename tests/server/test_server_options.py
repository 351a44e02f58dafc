"""What a server may be asked for, and what is made of it: no socket, no folder."""

import inspect
import re

import numpy as np
import pytest

from memoire.accounting.runs import RunFacts
from memoire.errors import ParameterError, WrongType
from memoire.limits import GiB, Limits, MiB, wall_clock
from memoire.models.model import make
from memoire.replay.parameters import Parameters
from memoire.replay.sampling import Prioritized
from memoire.server import build
from memoire.server.build import ServerOptions, check_bytes
from memoire.server.durability import Announcements
from memoire.server.io_addresses import limit_pushes
from memoire.server.server import Server
from memoire.tables.episodes.pool import EpisodePool
from memoire.tables.table import Table
from memoire.wire import messages
from memoire.wire.frames import DEFAULT_TABLE, table_number
from netkit import SCHEMA
from serverkit import server_options


def options(**changes):
    return server_options(**{"limits": Limits(held_bytes=1_000_000)} | changes)


def test_options_are_what_a_server_takes():
    fields = inspect.signature(ServerOptions).parameters
    assert list(fields) == list(inspect.signature(Server).parameters)


def test_a_schema_makes_one_table_of_the_options_that_shape_it():
    made = options(sampler=Prioritized(0.7), multi_step=3, storage="episodes", capacity=100, client_capacity=50)
    (table,) = made.settings.values()
    assert list(made.settings) == [DEFAULT_TABLE]
    assert (table.storage, table.capacity, table.client_capacity, table.parameters.multi_step) == (
        "episodes",
        100,
        50,
        3,
    )
    assert made.budgets == {DEFAULT_TABLE: 1_000_000}


def test_room_and_fields_of_parameters_are_the_tables():
    table = options(cache_limit=7, fields={"min_size": 9}).settings[DEFAULT_TABLE]
    assert (table.cache_limit, table.capacity, table.parameters.min_size) == (7, 0, 9)


def test_tables_share_what_may_be_held():
    tables = {"own": Table(SCHEMA, byte_limit=400_000), "a": Table(SCHEMA), "b": Table(SCHEMA)}
    assert options(schema=None, tables=tables).budgets == {"own": 400_000, "a": 300_000, "b": 300_000}
    assert options(schema=None, tables=tables, byte_limit=600_000).budgets == {
        "own": 400_000,
        "a": 100_000,
        "b": 100_000,
    }


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"schema": None}, WrongType, "schema must be a memoire.Schema, or tables="),
        ({"tables": {"a": Table(SCHEMA)}}, ParameterError, "schema must be absent beside tables="),
        ({"schema": None, "tables": {"a": Table(SCHEMA)}, "capacity": 5}, ParameterError, "capacity must be absent"),
        ({"schema": None, "tables": [1]}, WrongType, "tables must be"),
        ({"schema": None, "tables": {"a": 1}}, WrongType, "a memoire.Table"),
        ({"storage": "episodes", "cache_limit": 5}, ParameterError, "cache_limit must be 0 where episodes"),
        ({"capacity": 5}, ParameterError, "capacity must be 0 where caches are stored.*client_capacity.*cache_limit"),
        (
            {"schema": None, "tables": {"a": Table(SCHEMA)}, "fields": {"min_size": 1}},
            ParameterError,
            "min_size must be absent",
        ),
        ({"seed": 1.5}, ParameterError, "seed must be a whole number"),
        ({"seed": 2**64 + 1}, ParameterError, "seed must be"),
        ({"byte_limit": 0}, ParameterError, "byte_limit must be"),
        ({"snapshot_caches": True}, ParameterError, "snapshot_caches must be left out without a state_dir"),
        ({"snapshot_every": 5.0}, ParameterError, "snapshot_every must be left out without a state_dir"),
        ({"snapshot_every": 0.0, "state_dir": "x"}, ParameterError, "snapshot_every must be seconds above 0"),
        ({"snapshot_every": 1e10, "state_dir": "x"}, ParameterError, "snapshot_every must be seconds above 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes, error, words):
    with pytest.raises(error, match=words):
        options(**changes)


@pytest.mark.parametrize(
    ("changes", "saves"),
    [({}, False), ({"snapshot_caches": True}, True), ({"snapshot_every": 5.0}, True)],
)
def test_what_is_held_is_saved_if_either_option_says_so(changes, saves):
    assert options(state_dir="x", **changes).saves_memory is saves


@pytest.mark.parametrize("seed", [None, 5, -5])
@pytest.mark.parametrize("storage", ["caches", "episodes"])
def test_tables_get_pools_of_their_storage_and_budget(storage, seed):
    tables = build.make_tables(options(storage=storage, seed=seed, limits=Limits(held_bytes=1 << 20)))
    assert isinstance(tables.first.pool, EpisodePool) is (storage == "episodes")
    assert tables.first.pool.byte_limit == 1 << 20


def test_tables_of_one_seed_draw_differently():
    tables = build.make_tables(options(schema=None, tables={"a": Table(SCHEMA), "b": Table(SCHEMA)}, seed=9))
    seeds = {table.name: int.from_bytes(table.pool.state()["random"], "little") for table in tables}
    assert seeds == {name: 9 ^ table_number(name) for name in ("a", "b")}


class Folder:
    """A state folder with nothing in it."""

    epoch, closed = 3, False

    def runs(self):
        return [RunFacts("saved")]

    def settings(self):
        return {}

    def wake(self):
        pass

    def close(self, timeout):
        self.closed = True


def test_a_server_without_a_state_folder_has_no_store(store_by):
    asked = []
    store_by(lambda *given: asked.append(given) or Folder())
    assert build.make_store(options(), "host") is None and asked == []
    made = options(state_dir="x", name="mine")
    assert isinstance(build.make_store(made, "host"), Folder)
    assert asked == [("x", "mine", "host", made.limits, wall_clock)]


def test_a_state_folder_goes_by_the_default_name_until_it_has_one(tmp_path):
    store = build.make_store(options(state_dir=tmp_path / "state"), "host")
    assert store.name == "host"
    store.close(1.0)


def desk_of(store=None, **changes):
    made = options(**changes)
    announcements, facts = Announcements(), {"name": "home", "epoch": 5, "endpoints": messages.Endpoints}
    dispatcher = build.make_dispatcher(
        made, build.make_tables(made), store, announcements, on_lines=lambda lines: None, **facts
    )
    return dispatcher, announcements


def test_a_desk_tells_what_is_published_and_that_a_run_is_over():
    dispatcher, announcements = desk_of(run="one")
    dispatcher.publish("policy", b"1")
    dispatcher.finish()
    assert (dispatcher.run_name, dispatcher.epoch) == ("one", 5)
    assert announcements.next_model().topic == "policy" and announcements.take_news()
    assert not announcements


def test_a_state_folder_is_closed_if_no_desk_can_be_made():
    folder = Folder()
    with pytest.raises(ParameterError, match="run"):
        desk_of(folder, run="\n", state_dir="x")
    assert folder.closed
    with pytest.raises(ParameterError, match="run"):
        desk_of(run="\n")


@pytest.mark.parametrize(
    ("changes", "name", "most"),
    [
        ({"storage": "caches"}, "cache_size", 67),
        ({"storage": "caches", "parameters": Parameters(sequence_length=8, sequence_overlap=4)}, "cache_size", 14),
        ({"storage": "caches", "limits": Limits(message_bytes=64 * MiB)}, "cache_size", 16),
        ({"storage": "caches", "byte_limit": 40_000_000}, "cache_size", 9),
        ({"storage": "rollouts", "fields": {"rollout_length": 200}, "byte_limit": 4 * GiB}, "rollout_length", 133),
    ],
)
def test_sizes_that_only_an_actor_would_find_too_large_for_a_message_are_refused_before_a_server_is_made(
    changes, name, most
):
    """The state has 2 MB; the number that the error names fits, and one more does not."""
    given = {"limits": Limits(), **changes, "schema": {"obs": (np.uint8, (2_000_000,)), "reward": np.float32}}
    parameters = given.pop("parameters", Parameters()).replace(**given.pop("fields", {}))
    with pytest.raises(
        ParameterError, match=rf"^{name} must be at most {most} \(.* bytes, and (message_bytes|byte_limit) "
    ):
        build.make_tables(options(**given, parameters=parameters))
    tables = build.make_tables(options(**given, parameters=parameters.replace(**{name: most})))
    with pytest.raises(ParameterError, match=f"^{name} must be at most {most}"):
        build.make_tables(options(**given, parameters=parameters.replace(**{name: most + 1})))
    if "byte_limit" not in given:
        with pytest.raises(ParameterError, match=f"^{name} must be at most {most}"):
            tables.first.check_parameters(parameters.replace(**{name: most + 1}))


def test_a_server_that_began_with_small_caches_refuses_a_cache_size_whose_pushes_it_would_not_take():
    """Of pushes with 1 kB, 64 may queue for a connection: ZeroMQ counts them, and not their bytes."""
    made = options(schema={"obs": (np.uint8, (100,)), "reward": np.float32}, parameters=Parameters(cache_size=4))
    tables = build.make_tables(made)
    table = tables.first
    limit_pushes(tables, made.limits.message_bytes)
    assert table.push_bytes == 2 * made.limits.message_bytes // 64
    with pytest.raises(ParameterError, match="^cache_size .* a push to this server .* that begins with ") as caught:
        table.check_parameters(table.parameters.replace(cache_size=1 << 20))
    fitting = int(re.search(r"at most (\d+)", str(caught.value))[1])
    table.check_parameters(table.parameters.replace(cache_size=fitting))
    larger = Parameters(cache_size=fitting + 1)
    build.make_tables(options(schema=table.schema, parameters=larger, byte_limit=1 << 30))


@pytest.mark.parametrize("storage", ["caches", "episodes", "rollouts"])
def test_a_single_entry_that_fits_no_message_is_refused_before_a_server_is_made(storage):
    schema = {"obs": (np.uint8, (2_000_000,)), "reward": np.float32}
    with pytest.raises(
        ParameterError, match=r"^message_bytes must be at least 400\d{4}, which one (entry|sample) takes"
    ):
        build.make_tables(options(storage=storage, schema=schema, limits=Limits(message_bytes=3_000_000)))


def test_the_memory_of_a_client_bounds_the_frames_of_its_caches():
    schema = {"obs": (np.uint8, (2_000_000,)), "reward": np.float32}
    build.make_tables(options(schema=schema, client_capacity=60, limits=Limits()))
    with pytest.raises(ParameterError, match="^cache_size must be at most"):
        build.make_tables(options(schema=schema, client_capacity=70, limits=Limits()))


@pytest.mark.parametrize("value", [None, 1, 1 << 40])
def test_a_number_of_bytes_is_whole_and_above_0_or_left_out(value):
    check_bytes("credit", value)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1"])
def test_any_other_number_of_bytes_is_refused_by_name(value):
    with pytest.raises(ParameterError, match="credit must be a whole number from 1"):
        check_bytes("credit", value)


def test_announcements_wake_who_tells_them_and_are_told_once():
    announcements, woken = Announcements(), []
    announcements.add_model(make("a", b"1", 1))  # nobody tells them yet
    announcements.wake = lambda: woken.append(bool(announcements))
    announcements.add_model(make("b", b"2", 1))
    announcements.add_news()
    assert woken == [True, True]
    assert [announcements.next_model().topic for _ in range(2)] == ["a", "b"]
    assert announcements.next_model() is None and announcements
    assert announcements.take_news() and not announcements.take_news() and not announcements
