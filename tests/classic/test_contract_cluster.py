"""The classic server and client, row by row of docs/development/contract.md, over real sockets: scripts as the API page has them."""

import inspect
import multiprocessing
import re
import threading
import time
from collections import Counter
from datetime import datetime

import numpy as np
import pytest
import zmq

import memoire
from classic_help import DEADLINE, Cluster, check_content, in_thread, play, tcp, templates
from memoire import ReplayMemoryClient, ReplayMemoryServer
from memoire.classic.fields import FLAGS
from memoire.classic.memory import PROPERTIES
from memoire.errors import Closed, EndpointError, MemoireTimeout, NotEnoughSamples, ParameterError, SchemaError
from memoire.limits import Limits
from memoire.wire import containers
from memoire.wire import messages as wire
from memoire.wire.frames import encode, parse
from memoire.wire.parts import Part
from netkit import until

pytestmark = pytest.mark.slow


def arguments_of(function):
    return [
        each.name for each in inspect.signature(function).parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD
    ]


# ------------------------------------------------------------------------------------------------------- the surface


def test_server_methods_take_the_arguments_of_the_page_in_its_order():
    buffers = [f"{field}_buf" for field in ("state", "action", "reward", "prob", "value", "qvest", "info")]
    expected = {
        "__init__": [*buffers, "max_step", "pub_endpoint", "n_caches"],
        "set_logfile": ["logfile_path", "mode"],
        "rep_worker_main": ["endpoint", "mode"],
        "pull_worker_main": ["endpoint", "mode"],
        "rep_proxy_main": ["front_ep", "back_ep"],
        "pull_proxy_main": ["front_ep", "back_ep"],
        "get_batch": ["batch_size"],
        "pub_bytes": ["topic", "message"],
    }
    for name, arguments in expected.items():
        assert arguments_of(getattr(ReplayMemoryServer, name)) == ["self", *arguments], name


def test_client_methods_take_the_arguments_of_the_page_in_its_order():
    expected = {
        "__init__": ["sub_endpoint", "req_endpoint", "push_endpoint", "input_uuid"],
        "sync_sizes": ["max_step"],
        "update_counter": [],
        "push_cache": [],
        "write_log": ["log_message"],
        "sub_bytes": ["topic"],
    }
    for name, arguments in expected.items():
        assert arguments_of(getattr(ReplayMemoryClient, name)) == ["self", *arguments], name


def test_read_only_properties_cannot_be_assigned():
    with Cluster() as cluster:
        client = cluster.client()
        for thing, names in (
            (cluster.server, ("rem", "logfile", "total_episodes", "total_caches", "total_steps")),
            (client, ("rem",)),
        ):
            for name in names:
                with pytest.raises(AttributeError):
                    setattr(thing, name, None)


@pytest.mark.parametrize("n_caches", [0, -1, 2.5, True])
def test_n_caches_must_be_a_positive_whole_number(n_caches):
    with pytest.raises(ParameterError, match="n_caches"):
        ReplayMemoryServer(*templates(), 10, tcp(), n_caches)


def test_a_server_checks_its_templates():
    buffers = list(templates())
    buffers[2] = np.zeros((), np.float64)
    with pytest.raises(SchemaError, match="reward_buf"):
        ReplayMemoryServer(*buffers, 10, tcp(), 4)


def test_a_server_for_large_observations_is_refused_with_the_argument_that_it_needs():
    buffers = (np.zeros(2_000_000, np.uint8), *templates()[1:])
    with pytest.raises(ParameterError, match=r"^cache_size must be at most 67 .* argument of every server") as refused:
        ReplayMemoryServer(*buffers, 0, tcp(), 4)
    name, number = re.search(r"; (\w+)=(\d+) is an argument", str(refused.value)).groups()
    with ReplayMemoryServer(*buffers, 0, tcp(), 4, **{name: int(number)}) as server:
        assert server.rem.cache_size == 67


def test_a_taken_publish_endpoint_is_an_error_that_names_it():
    with Cluster() as cluster:
        with pytest.raises(EndpointError, match=re.escape(cluster.sub)):
            ReplayMemoryServer(*templates(), 10, cluster.sub, 4)


# --------------------------------------------------------------------------------------------------- a whole cluster


def act(sub, req, push, owner, episodes, done):
    """An actor of the page, in a process of its own: plays, counts, pushes, logs."""
    client = ReplayMemoryClient(sub, req, push, 0x0A000000 + owner, seed=owner)
    for _ in range(episodes):
        play(client, owner, length=10 + owner)
        client.update_counter()
        assert client.push_cache() == 0, client.push_failure
    client.write_log(f"actor {owner} is done")
    assert client.sub_bytes("end", timeout=DEADLINE) == "now"
    client.close()
    done.put(owner)


def test_a_script_of_the_page_runs_with_actors_in_processes_and_in_threads(tmp_path):
    episodes, actors = 6, 4
    with Cluster(cache_size=32, n_caches=100) as cluster:
        log = tmp_path / "actors.log"
        cluster.server.set_logfile(str(log), "w")
        spawn = multiprocessing.get_context("spawn")
        done = spawn.Queue()
        where = (cluster.sub, cluster.req, cluster.push)
        processes = [spawn.Process(target=act, args=(*where, k, episodes, done), daemon=True) for k in (1, 2)]
        threads = [threading.Thread(target=act, args=(*where, k, episodes, done), daemon=True) for k in (3, 4)]
        for each in processes + threads:
            each.start()
        cluster.held(episodes * actors)
        seen = set()
        for _ in range(6):
            batch = cluster.server.get_batch(96)
            check_content(batch)
            seen |= set(batch.prev.info[:, 0].tolist())
        assert seen == {1, 2, 3, 4}
        until(lambda: cluster.server.total_episodes == episodes * actors)
        cluster.server.pub_bytes("end", "now")
        assert sorted(done.get(timeout=DEADLINE) for _ in range(actors)) == [1, 2, 3, 4]
        for each in processes + threads:
            each.join(DEADLINE)
        assert cluster.server.total_steps == episodes * sum(10 + k for k in (1, 2, 3, 4))
        assert cluster.server.total_caches == episodes * actors
    lines = log.read_text().splitlines()
    assert sorted(line.split(",", 2)[1:] for line in lines) == [
        [f"0a00000{k}", f"actor {k} is done"] for k in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize("transport", ["tcp", "ipc", "inproc"])
def test_workers_take_any_transport_and_bind_by_themselves(transport, tmp_path):
    number = iter(range(9))
    make = {
        "tcp": tcp,
        "ipc": lambda: f"ipc://{tmp_path}/{next(number)}",
        "inproc": lambda: f"inproc://{tmp_path.name}{next(number)}",
    }[transport]
    sub, req, push = make(), make(), make()
    with ReplayMemoryServer(*templates(), 100, sub, 8) as server:
        with in_thread(server.rep_worker_main, req, "Bind"), in_thread(server.pull_worker_main, push, memoire.Bind):
            with ReplayMemoryClient(sub, req, push) as client:
                client.rem.cache_size = 16
                play(client, 1)
                client.update_counter()
                assert server.total_episodes == 1
                assert client.push_cache() == 0
                check_content(server.get_batch(16, timeout=DEADLINE))
            server.close()


@pytest.mark.parametrize("mode", ["bind", "BIND", "Connect", "", 0, None])
def test_another_mode_is_refused(mode):
    with Cluster() as cluster:
        for loop in (cluster.server.rep_worker_main, cluster.server.pull_worker_main):
            with pytest.raises(ParameterError, match=r"mode.*'Bind' or 'Conn'"):
                loop(tcp(), mode)


def test_a_mode_is_text_or_a_member_of_the_enum():
    assert memoire.Bind.value == "Bind"
    assert memoire.Conn.value == "Conn"


def test_a_bad_endpoint_is_refused_by_the_loop_that_was_given_it():
    with Cluster() as cluster:
        server = cluster.server
        for loop, arguments in (
            (server.rep_worker_main, ("nowhere", "Bind")),
            (server.pull_worker_main, (cluster.sub, "Bind")),
            (server.rep_proxy_main, (cluster.sub, "inproc://x")),
            (server.pull_proxy_main, ("inproc://y", "carrier://pigeon")),
        ):
            with pytest.raises(EndpointError):
                loop(*arguments)


def test_every_loop_ends_on_close_and_close_may_be_called_again():
    cluster = Cluster(workers=3)
    client = cluster.client()
    play(client, 1)
    client.update_counter()
    with cluster:
        assert all(thread.is_alive() for thread in cluster.threads)
        started = time.monotonic()
        cluster.server.close()
        for thread in cluster.threads:
            thread.join(DEADLINE)
        assert time.monotonic() - started < DEADLINE
        cluster.server.close()
        with pytest.raises(Closed):
            cluster.server.get_batch(1)


def test_loops_that_begin_while_the_server_closes_end_as_well():
    for _ in range(30):
        cluster = Cluster(workers=4)
        with cluster:
            pass


def test_a_loop_of_a_closed_server_returns_at_once():
    with Cluster() as cluster:
        cluster.server.close()
        assert cluster.server.rep_worker_main(tcp(), "Bind") is None
        assert cluster.server.pull_proxy_main(tcp(), "inproc://late") is None


# -------------------------------------------------------------------------------------------------- server's methods


def test_rem_of_a_server_has_templates_and_parameters_and_takes_no_entries():
    with Cluster(max_step=77) as cluster:
        rem = cluster.server.rem
        assert rem.max_step == 77
        assert rem.state_buf.shape == (4,)
        assert rem.num_episode() == 0
        with pytest.raises(memoire.MemoireError, match="ReplayMemoryClient"):
            rem.new_episode()
        with pytest.raises(ParameterError, match="multi_step"):
            rem.multi_step = 0
        rem.print_info()


def test_totals_are_exact_and_update_counter_returns_when_they_are():
    with Cluster() as cluster:
        clients = [cluster.client() for _ in range(3)]
        for count in range(1, 4):
            for k, client in enumerate(clients):
                play(client, k, length=5)
                client.update_counter()
                assert cluster.server.total_episodes == 3 * (count - 1) + k + 1
                assert cluster.server.total_steps == 5 * cluster.server.total_episodes
                client.update_counter()  # a second call counts nothing twice
                assert cluster.server.total_episodes == 3 * (count - 1) + k + 1


def test_a_closed_clients_counts_stay():
    with Cluster() as cluster:
        for _ in range(2):
            with ReplayMemoryClient(cluster.sub, cluster.req, cluster.push, 0x7F000001) as client:
                play(client, 1, length=3)
                client.update_counter()
        assert cluster.server.total_episodes == 2
        assert cluster.server.total_steps == 6


def test_n_caches_are_kept_and_the_oldest_give_way():
    with Cluster(n_caches=3, cache_size=4) as cluster:
        client = cluster.client()
        for k in range(6):
            client.sync_sizes(100)
            play(client, k)
            assert client.push_cache() == 0
            cluster.held(k + 1)
        batch = cluster.server.get_batch(12)
        assert set(batch.prev.info[:, 0].tolist()) == {3, 4, 5}
        with pytest.raises(NotEnoughSamples):
            cluster.server.get_batch(1)
        assert cluster.server.total_caches == 6


def test_of_several_clients_the_one_that_holds_most_gives_its_oldest_cache():
    with Cluster(n_caches=3, cache_size=4) as cluster:
        few, many = cluster.client(), cluster.client()
        for k, client in enumerate((few, many, many, many, many)):
            client.sync_sizes(100)
            play(client, k)
            assert client.push_cache() == 0
            cluster.held(k + 1)
        batch = cluster.server.get_batch(12)
        # The oldest cache is the only cache of its client: the server keeps this cache.
        assert set(batch.prev.info[:, 0].tolist()) == {0, 3, 4}


def test_a_batch_is_prev_next_weight_with_the_rest_as_attributes():
    with Cluster(cache_size=64, frame_stack=2, multi_step=3, discount_factor=0.5, importance_exponent=1.0) as cluster:
        client = cluster.client()
        play(client, 7, length=20)
        client.push_cache()
        batch = cluster.server.get_batch(32, timeout=DEADLINE)
        check_content(batch, steps=3, stack=2)
        prev, following, weight = batch
        assert (prev is batch.prev, following is batch.next, weight is batch.weight) == (True, True, True)
        assert prev._fields == ("state", "action", "reward", "prob", "value", "qvest", "info")
        t = prev.info[:, 1]
        np.testing.assert_allclose(batch.reward, t % 3 + 0.5 * ((t + 1) % 3) + 0.25 * ((t + 2) % 3))
        np.testing.assert_allclose(batch.discount, 0.125)
        assert (batch.steps == 3).all()
        np.testing.assert_allclose(batch.importance, weight.min() / weight, rtol=1e-4)
        assert (batch.age >= 0).all() and (batch.age < 60).all()
        assert len(batch.ids) == len(batch.model_version) == 32


def test_weights_of_a_batch_are_the_ones_of_the_clients_memory():
    with Cluster(cache_size=64, discount_factor=0.0, priority_exponent=0.5) as cluster:
        client = cluster.client()
        play(client, 1, length=10, episodic_weight_multiplier=2.0)
        client.push_cache()
        prev, _, weight = cluster.server.get_batch(64, timeout=DEADLINE)
        np.testing.assert_allclose(weight, 2.0 * np.abs(prev.reward - prev.value) ** 0.5, rtol=1e-5)
        np.testing.assert_allclose(prev.qvest, prev.reward)


def test_each_pushed_sample_comes_out_once():
    with Cluster(cache_size=50) as cluster:
        client = cluster.client()
        play(client, 1, length=400)
        for _ in range(4):
            client.push_cache()
        cluster.held(4)
        drawn = [cluster.server.get_batch(20) for _ in range(10)]
        for batch in drawn:
            check_content(batch)
        with pytest.raises(NotEnoughSamples):
            cluster.server.get_batch(1)


def test_batches_without_replacement_are_exactly_what_the_caches_held(monkeypatch):
    pushed, check = Counter(), containers.check

    def spy(*arguments, **options):
        held = check(*arguments, **options)
        pushed.update(np.frombuffer(held.part(Part.NUMBER), "<i8").tolist())
        return held

    monkeypatch.setattr(containers, "check", spy)
    with Cluster(cache_size=37, priority_exponent=0.0) as cluster:
        client = cluster.client()
        play(client, 1, length=50)
        for _ in range(5):
            assert client.push_cache() == 0
        cluster.held(5)
        batches = [cluster.server.get_batch(size) for size in (1, 64, 36, 37, 40, 7)]  # 185 in all
        with pytest.raises(NotEnoughSamples):
            cluster.server.get_batch(1)
    drawn = Counter(number for batch in batches for number in batch.prev.info[:, 1].tolist())
    assert drawn == pushed and max(pushed.values()) > 1  # an entry may be in a cache twice, and is then drawn twice


def test_a_batch_that_cannot_be_filled_takes_nothing():
    with Cluster(cache_size=10) as cluster:
        with pytest.raises(NotEnoughSamples, match=r"batch of 5.*0 are held in 0 caches"):
            cluster.server.get_batch(5)
        client = cluster.client()
        play(client, 1)
        client.push_cache()
        cluster.held(1)
        for _ in range(3):
            with pytest.raises(NotEnoughSamples, match=r"batch of 11.*10 are held in 1 caches") as error:
                cluster.server.get_batch(11)
        assert isinstance(error.value, RuntimeError)
        check_content(cluster.server.get_batch(10))


def test_reused_caches_serve_any_number_of_batches():
    with Cluster(cache_size=10, reuse_cache=True) as cluster:
        client = cluster.client()
        play(client, 1)
        client.push_cache()
        cluster.held(1)
        for _ in range(5):
            check_content(cluster.server.get_batch(8))


def test_get_batch_waits_as_long_as_it_is_told():
    with Cluster(cache_size=8) as cluster:
        with pytest.raises(NotEnoughSamples, match=r"after waiting \d+\.\d s"):
            cluster.server.get_batch(8, timeout=0.2)
        client = cluster.client()
        play(client, 1)
        with in_thread(cluster.server.get_batch, 8) as at_once:
            pass
        assert isinstance(at_once["problem"], NotEnoughSamples)
        with in_thread(lambda: cluster.server.get_batch(8, timeout=DEADLINE)) as outcome:
            client.push_cache()
        check_content(outcome["result"])


def test_closing_wakes_a_waiting_get_batch():
    with Cluster() as cluster:
        with in_thread(lambda: cluster.server.get_batch(8, timeout=DEADLINE)) as outcome:
            cluster.server.close()
        assert isinstance(outcome["problem"], Closed)


def test_out_fills_the_callers_arrays():
    with Cluster(cache_size=64) as cluster:
        client = cluster.client()
        play(client, 1, length=30)
        client.push_cache()
        first = cluster.server.get_batch(16, timeout=DEADLINE)
        state, weight = first.prev.state, first.weight
        before = weight.copy()
        second = cluster.server.get_batch(16, out=first)
        assert second is first
        assert second.prev.state is state
        assert second.weight is weight
        check_content(second)
        triple = tuple(np.empty_like(each) for each in first.prev), tuple(map(np.empty_like, first.next)), before
        third = cluster.server.get_batch(16, out=triple)
        assert third.prev.state is triple[0][0]
        check_content(third)
        with pytest.raises(ParameterError, match="out"):
            cluster.server.get_batch(4, out=first)


@pytest.mark.parametrize("batch_size", [0, -3, 1.5, "all"])
def test_the_batch_size_is_checked(batch_size):
    with Cluster() as cluster:
        with pytest.raises(ParameterError, match="batch_size"):
            cluster.server.get_batch(batch_size)


def test_switched_off_fields_do_not_travel_and_come_back_empty():
    with Cluster(cache_size=16, cache_flags=("prev_state", "prev_action", "next_state")) as cluster:
        client = cluster.client()
        play(client, 1)
        client.push_cache()
        prev, following, _ = cluster.server.get_batch(16, timeout=DEADLINE)
        assert [len(each) for each in (*prev, *following)] == [16, 16, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0]
        np.testing.assert_array_equal(following.state[..., 1], prev.state[..., 1] + 1)


def test_caches_of_different_sizes_make_one_batch():
    with Cluster(cache_size=8) as cluster:
        client = cluster.client()
        play(client, 1)
        client.push_cache()
        client.rem.cache_size = 24
        client.push_cache()
        cluster.held(2)
        check_content(cluster.server.get_batch(32))


# --------------------------------------------------------------------------------------------------------- log file

LINE = re.compile(r"^([^,]+),([0-9a-f]{8}),(.*)\n$", re.DOTALL)


def lines_of(path, count):
    """The lines of a log file, as soon as there are so many."""
    until(lambda: path.exists() and path.read_bytes().count(b"\n") >= count)
    with open(path, encoding="utf-8", newline="\n") as file:
        return list(file)


def test_log_lines_have_time_uuid_and_message_byte_for_byte(tmp_path):
    path = tmp_path / "log.csv"
    with Cluster() as cluster:
        assert cluster.server.logfile is None
        cluster.server.set_logfile(str(path), "w")
        assert cluster.server.logfile == str(path)
        client = cluster.client(0x00BEEF01)
        assert client.rem.uuid == 0x00BEEF01
        messages = ["plain", "with, commas, in it", "two\nlines\r\n", "ünïcode ✓", "", "esc \x1b[31m"]
        before = datetime.now().astimezone()
        for message in messages:
            client.write_log(message)
        client.update_counter()
        lines = lines_of(path, len(messages))
    found = [LINE.match(line).groups() for line in lines]
    assert [uuid for _, uuid, _ in found] == ["00beef01"] * len(messages)
    assert [message for *_, message in found][:2] == messages[:2]
    assert found[2][2] == r"two\nlines\r\n"
    assert found[3][2] == messages[3]
    assert found[4][2] == ""
    assert "\x1b" not in found[5][2]
    for time_text, _, _ in found:
        received = datetime.fromisoformat(time_text)
        assert received.utcoffset() is not None
        assert -1.0 < (received - before).total_seconds() < 60.0
    time_text, uuid, message = found[0]
    assert lines[0] == "%s,%08x,%s\n" % (time_text, client.rem.uuid, message)  # noqa: UP031 (the page's own format)


def test_log_modes_are_those_of_fopen_and_others_are_refused(tmp_path):
    path = tmp_path / "log"
    path.write_text("old\n")
    with Cluster() as cluster:
        for mode in ("r", "wx", "", "append", 1):
            with pytest.raises(ParameterError, match="mode"):
                cluster.server.set_logfile(str(path), mode)
        assert cluster.server.logfile is None
        assert path.read_text() == "old\n"
        with pytest.raises(OSError):
            cluster.server.set_logfile(str(tmp_path / "no" / "folder"), "w")
        cluster.server.set_logfile(path, "a")
        client = cluster.client()
        client.write_log("new")
        client.update_counter()
    assert [line.rpartition(",")[2] for line in path.read_text().splitlines()] == ["old", "new"]


def test_the_log_is_buffered_and_complete_after_close(tmp_path):
    path = tmp_path / "log"
    with Cluster() as cluster:
        cluster.server.set_logfile(path, "w")
        client = cluster.client()
        for k in range(2000):
            client.write_log(f"line {k}")
        client.update_counter()
    assert [line.rpartition(",")[2] for line in path.read_text().splitlines()] == [f"line {k}" for k in range(2000)]


def lines_now(path):
    return path.read_bytes().count(b"\n")


def test_the_log_is_written_through_a_buffer_that_a_timer_empties(tmp_path, monkeypatch, times):
    times(log_flush=3600.0)
    path = tmp_path / "log"
    with Cluster() as cluster:
        cluster.server.set_logfile(path, "w")
        client = cluster.client()
        for k in range(20):
            client.write_log(f"line {k}")
            client.update_counter()  # the server has the log line
            assert lines_now(path) == 0
    assert lines_now(path) == 20
    monkeypatch.undo()
    other = tmp_path / "other"
    with Cluster() as cluster:
        cluster.server.set_logfile(other, "w")
        client = cluster.client()
        for k in range(1, 3):  # each time again
            client.write_log(f"line {k}")
            until(lambda k=k: lines_now(other) == k)


def test_write_log_waits_for_room_once_and_then_drops_lines_at_once(monkeypatch):
    waits = []
    assert (Limits().log_lines, Limits().log_timeout) == (10_000, 1.0)  # thousands of lines, at most a second
    with Cluster() as cluster:
        client = cluster.client(limits=Limits(log_lines=50, log_timeout=0.05))
        cluster.server.close()
        kind = type(client.client._waiting)
        real = kind.condition.fget

        class Counted:
            def __init__(self, held):
                self.held = held

            def __enter__(self):
                self.held.__enter__()
                return self

            def __exit__(self, *error):
                return self.held.__exit__(*error)

            def wait(self, left=None):
                waits.append(left)
                return self.held.wait(left)

            def notify_all(self):
                self.held.notify_all()

        monkeypatch.setattr(kind, "condition", property(lambda monitor: Counted(real(monitor))))
        for k in range(50):
            client.write_log(f"line {k}")
        assert waits == [] and client.client.stats().waiting_lines == 50
        client.write_log("one too many")
        assert waits and all(0.0 < left <= 0.05 for left in waits)
        waits.clear()
        for k in range(100):
            client.write_log(f"more {k}")
        assert waits == []  # no line has left the client since
        client.write_log("as long as I say", timeout=0.02)
        assert waits and all(0.0 < left <= 0.02 for left in waits)
        stats = client.client.stats()
        assert (stats.waiting_lines, stats.dropped_lines) == (50, 102)


def test_write_log_does_not_wait_for_a_server_that_is_gone():
    with Cluster() as cluster:
        client = cluster.client()
        cluster.server.close()
        started = time.monotonic()
        for k in range(1000):
            client.write_log(f"line {k}")
        assert time.monotonic() - started < DEADLINE


# -------------------------------------------------------------------------------------------------- client's methods


def test_a_client_takes_sizes_and_every_parameter_from_the_server():
    changed = {
        "priority_exponent": 0.25,
        "importance_exponent": 0.75,
        "mix_lambda": 0.5,
        "frame_stack": 3,
        "multi_step": 2,
        "cache_size": 17,
        "max_episode": 5,
        "reuse_cache": True,
        "discount_factor": (0.5,),
        "reward_coeff": (2.0,),
        "cache_flags": tuple(name != "next_info" for name in FLAGS),
        "start": "repeat",
    }
    assert set(changed) == set(PROPERTIES)  # the test must cover each new property
    with Cluster(max_step=123, **changed) as cluster:
        client = cluster.client()
        assert client.rem.max_step == 123
        for field in ("state", "action", "reward", "prob", "value", "qvest", "info"):
            mine, theirs = (getattr(side.rem, f"{field}_buf") for side in (client, cluster.server))
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        for _ in range(2):
            for name, value in changed.items():
                assert getattr(client.rem, name) == value
            client.sync_sizes(50)
        assert client.rem.max_step == 50


def test_sync_sizes_starts_a_new_memory_and_totals_go_on():
    with Cluster() as cluster:
        client = cluster.client()
        rem = client.rem
        play(client, 1, length=4)
        cluster.server.rem.max_episode = 2
        client.sync_sizes(40)
        assert client.rem is rem
        assert (rem.num_episode(), rem.max_step, rem.max_episode) == (0, 40, 2)
        play(client, 1, length=6)
        client.update_counter()
        assert (cluster.server.total_episodes, cluster.server.total_steps) == (2, 10)
        with pytest.raises(ParameterError, match="max_step"):
            client.sync_sizes(0)


def test_a_server_without_max_step_leaves_the_size_to_the_client():
    with Cluster(max_step=0) as cluster:
        client = cluster.client()
        assert client.rem.max_step >= 1000  # entries that fit 256 MiB
        client.sync_sizes(30)
        assert client.rem.max_step == 30
        play(client, 1)
        assert client.rem.num_episode() == 1


def test_a_changed_parameter_reaches_clients_with_their_next_update():
    with Cluster() as cluster:
        client = cluster.client()
        play(client, 1)
        cluster.server.rem.multi_step = 4
        cluster.server.rem.priority_exponent = 0.0
        client.update_counter()
        until(lambda: client.rem.multi_step == 4)
        assert client.rem.num_episode() == 1
        assert client.rem.get_batch(64).prev.info[:, 1].max() <= 5


def test_calls_to_a_server_that_is_not_there_say_so_in_time():
    started = time.monotonic()
    with pytest.raises(MemoireTimeout, match=r"127\.0\.0\.1.*within 0\.3 s") as error:
        ReplayMemoryClient(tcp(), tcp(), tcp(), timeout=0.3)
    assert isinstance(error.value, TimeoutError)
    assert time.monotonic() - started < DEADLINE
    with Cluster() as cluster:
        client = cluster.client()
        cluster.server.close()
        for call in (lambda: client.update_counter(timeout=0.2), lambda: client.sync_sizes(10, timeout=0.2)):
            with pytest.raises(MemoireTimeout):
                call()


def test_push_cache_returns_0_or_minus_1_with_the_reason_beside_it():
    with Cluster() as cluster:
        client = cluster.client()
        assert client.push_cache() == -1
        assert "draw" in client.push_failure
        play(client, 1, length=1)  # an episode too short for a step
        assert client.push_cache() == -1
        play(client, 1)
        assert client.push_cache() == 0
        assert client.push_failure == ""
        client.close()
        assert client.push_cache() == -1
        assert "closed" in client.push_failure


def test_an_episode_is_drawn_from_when_it_is_closed_and_not_before():
    with Cluster(cache_size=8) as cluster:
        client = cluster.client()
        client.rem.new_episode()
        for t in range(5):
            state = np.array([1, t, 2 * t, 1], np.float32)
            client.rem.add_entry(state, 1000 + t, t % 3, 0.5, 0.25, np.array([1, t], np.int32), 1.0)
        assert client.push_cache() == -1
        client.rem.close_episode()
        assert client.push_cache() == 0
        check_content(cluster.server.get_batch(8, timeout=DEADLINE))


def test_a_full_window_ends_in_minus_1_after_its_timeout():
    with Cluster(cache_size=1000) as cluster:
        client = cluster.client()
        play(client, 1)
        cluster.server.close()  # nobody receives caches any more
        started = time.monotonic()
        pushed = 0
        while client.push_cache(timeout=0.2) == 0:
            pushed += 1
            assert pushed < 10_000
        assert client.push_failure
        assert time.monotonic() - started < DEADLINE


def test_caches_are_drawn_with_replacement_in_proportion_to_weight():
    stats = pytest.importorskip("scipy.stats")
    with Cluster(cache_size=5000, priority_exponent=0.0) as cluster:
        client = cluster.client(seed=5)
        client.rem.new_episode()
        weights = np.array([1, 2, 3, 4, 0, 6, 7, 8, 9])
        for t, weight in enumerate(weights):
            state = np.array([1, t, 2 * t, 1], np.float32)
            client.rem.add_entry(state, 1000 + t, t % 3, 0.5, 0.25, np.array([1, t], np.int32), float(weight))
        client.rem.close_episode()
        for _ in range(4):
            client.push_cache()
        cluster.held(4)
        batch = cluster.server.get_batch(20_000)
        check_content(batch)
        counts = np.bincount(batch.prev.info[:, 1], minlength=9)
        assert counts[4] == counts[8] == 0
        drawn = [0, 1, 2, 3, 5, 6, 7]
        expected = weights[drawn] / weights[drawn].sum() * 20_000
        assert stats.chisquare(counts[drawn], expected).pvalue > 1e-4


def test_only_what_was_drawn_travels_and_bytes_of_both_are_counted():
    with Cluster(cache_size=32) as cluster:
        client = cluster.client()
        for _ in range(5):
            play(client, 1, length=100)
        client.update_counter()
        assert client.push_cache() == 0
        cluster.held(1)
        client.update_counter()
        totals, sent = cluster.server.server.stats().totals, client.client.stats().pushed_bytes
        assert totals.generated_bytes == 500 * client.rem.entry_size
        assert 32 * client.rem.entry_size < totals.received_bytes == sent < totals.generated_bytes / 2


def test_input_uuid_may_be_an_address_and_two_clients_may_share_it():
    with Cluster() as cluster:
        first, second = cluster.client("10.1.2.3"), cluster.client(0x0A010203)
        assert first.rem.uuid == second.rem.uuid == 0x0A010203
        assert first.rem.client_id != second.rem.client_id
        assert cluster.client().rem.uuid != 0
        for client in (first, second):
            play(client, 1, length=5)
            client.update_counter()
        assert cluster.server.total_episodes == 2


# ------------------------------------------------------------------------------------------------ publish, subscribe


def test_messages_arrive_as_the_type_that_was_published():
    with Cluster() as cluster:
        client = cluster.client()
        for message in ("text", b"bytes", "", b"", b"\x00\xff", "\u2713"):
            cluster.server.pub_bytes("topic", message)
            received = client.sub_bytes("topic", timeout=DEADLINE)
            assert received == message
            assert type(received) is type(message)


def test_rem_publishes_as_the_server_does():
    with Cluster() as cluster:
        client = cluster.client()
        cluster.server.rem.pub_bytes("topic", "by rem")
        assert client.sub_bytes("topic", timeout=DEADLINE) == "by rem"


def test_a_late_comer_gets_the_newest_message():
    with Cluster() as cluster:
        for k in range(5):
            cluster.server.pub_bytes("topic", f"message {k}")
        assert cluster.client().sub_bytes("topic", timeout=DEADLINE) == "message 4"


def test_messages_of_a_topic_arrive_in_order():
    with Cluster() as cluster:
        client = cluster.client()
        cluster.server.pub_bytes("topic", "0")
        assert client.sub_bytes("topic", timeout=DEADLINE) == "0"
        for k in range(1, 100):
            cluster.server.pub_bytes("topic", str(k))
        received = [0]
        while received[-1] != 99:
            received.append(int(client.sub_bytes("topic", timeout=DEADLINE)))
        assert received == sorted(set(received))


def test_sub_bytes_ends_with_its_timeout_or_when_the_client_is_closed():
    with Cluster() as cluster:
        client = cluster.client()
        with pytest.raises(MemoireTimeout, match="topic"):
            client.sub_bytes("topic", timeout=0.1)
        with in_thread(client.sub_bytes, "topic") as outcome:
            client.close()
        assert isinstance(outcome["problem"], Closed)


def test_a_message_must_be_str_or_bytes():
    with Cluster() as cluster:
        for wrong in (17, None, ["text"]):
            with pytest.raises((ParameterError, TypeError), match=type(wrong).__name__):
                cluster.server.pub_bytes("topic", wrong)


# ------------------------------------------------------------------------------------------- the two sampling phases


def test_importance_makes_the_weighted_mean_that_of_all_entries():
    """At importance_exponent 1 the weighted mean over batches is the plain mean over all entries of both actors."""
    with Cluster(cache_size=4000, priority_exponent=0.0, importance_exponent=1.0) as cluster:
        few, many = cluster.client(seed=1), cluster.client(seed=2)
        play(few, 1, length=11, episodic_weight_multiplier=5.0)
        play(many, 2, length=41)
        for client in (few, many):
            for _ in range(2):
                assert client.push_cache() == 0
            client.update_counter()
        cluster.held(4)
        batch = cluster.server.get_batch(4000)
        truth = 40 / 50  # the second actor's share of drawable entries
        share = np.average(batch.prev.info[:, 0] == 2, weights=batch.importance)
        assert share == pytest.approx(truth, abs=0.05)


# ------------------------------------------------------------------------------------------------------ many actors

SMALL = memoire.Schema({"obs": (np.float32, (4,)), "reward": np.float32})


class Actors:
    """Many clients as a server sees them: each says hello and pushes caches, all over two sockets."""

    def __init__(self, server, count, context):
        memory = memoire.Memory(SMALL, 200, server.parameters, seed=1)
        memory.open()
        memory.extend(0, (np.zeros((100, 4), np.float32), np.ones(100, np.float32)))
        memory.close(terminated=True)
        self.payload = bytes(memoryview(containers.build(memory, 32, now=0.0)))
        self.requests, self.pushes = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
        for made, at in ((self.requests, server.endpoint), (self.pushes, server.push_endpoint)):
            made.linger, made.rcvtimeo, made.sndtimeo = 0, 60_000, 60_000
            made.connect(at)
        self.welcomes = {}
        for number in range(1, count + 1):
            self.requests.send_multipart([b"", *encode(wire.Hello(), client=number.to_bytes(16, "big"), sequence=1)])
        for _ in range(count):
            said = parse(self.requests.recv_multipart()[1:])
            assert isinstance(said.body, wire.Welcome), said.body
            self.welcomes[said.header.client] = said
        self.pushed = 0

    def push(self):
        """One cache of each."""
        self.pushed += 1
        for client, welcome in self.welcomes.items():
            body = wire.Cache(
                since=welcome.body.since, number=self.pushed, pushed_bytes=self.pushed * len(self.payload)
            )
            facts = {name: getattr(welcome.header, name) for name in ("run", "home", "table", "fingerprint")}
            self.pushes.send_multipart(encode(body, client=client, sequence=2, payload=self.payload, **facts))


def test_three_hundred_actors_and_ten_learners_share_a_server_whose_memory_stays_flat():
    actors, learners, limit = 300, 10, 400_000
    limits = Limits(connection_clients=actors)
    with (
        zmq.Context() as context,
        memoire.Server("tcp://127.0.0.1:0", SMALL, byte_limit=limit, limits=limits) as server,
    ):
        crowd = Actors(server, actors, context)
        for turn in range(1, 5):
            crowd.push()
            until(lambda turn=turn: server.total_caches == turn * actors)
            stats = server.stats()
            assert stats.held_bytes <= limit < turn * actors * len(crowd.payload)
            assert stats.totals.lost_caches == 0 and stats.refused == {}
        readers = [memoire.Reader([server.endpoint], seed=number) for number in range(learners)]
        seen = set()
        for reader in readers * 3:
            seen.update(reader.get_batch(16, DEADLINE)["ids"]["client"].ravel().tolist())
        assert len({row.learner for row in server.stats().learners}) == learners and len(seen) > 100
        for reader in readers:
            reader.close()
        crowd.requests.close(0)
        crowd.pushes.close(0)
