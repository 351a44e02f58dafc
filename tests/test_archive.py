"""A server's snapshots end to end: taken under way, ordered from far away, on a timer; restored into another cluster."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from memoire import snapshot, wire
from memoire.archive import MEMORY
from memoire.cluster import snapshots
from memoire.errors import Closed, MemoireError, ParameterError, Refused, SnapshotMismatch
from memoire.parameters import Parameters
from memoire.snapshotfile import SnapshotFile
from netkit import QUICK, Cluster, record, until

SMALL = Parameters(cache_size=16)
HEADER = wire.Header(wire.Type.TAKE_SNAPSHOT, 0, b"c" * 16, 0, 0, 1, 0, 0, 0)


@pytest.fixture
def cluster():
    made = Cluster()
    yield made
    made.close()


def filled(cluster, clients=3, caches=4, **options):
    """A server that holds caches of several clients of unequal weights."""
    server = cluster.server(**{"limits": QUICK, "parameters": SMALL} | options)
    for number in range(clients):
        client = cluster.client(server, limits=QUICK, seed=number)
        record(client, episodes=number + 1, value=number + 1)
        for _ in range(caches):
            assert client.push_cache()
        client.update()
    until(lambda: server.total_caches == clients * caches)
    return server


def numbers(batch):
    return sorted(map(bytes, batch.ids))


def test_a_server_goes_on_where_another_one_was(cluster, tmp_path):
    server = filled(cluster)
    server.publish("policy", b"x")
    server.publish("policy", b"y")
    server.get_batch(20)
    made = server.snapshot(tmp_path / "a")
    assert (made.caches, made.unused, made.complete) == (server.stats().held_caches, 12 * 16 - 20, True)
    assert made.bytes == (tmp_path / "a").stat().st_size
    again = cluster.server(parameters=SMALL, limits=QUICK)
    done = again.restore([tmp_path / "a"])
    assert (done.unused, done.clients, done.accounts) == (made.unused, 3, 3)
    assert again.stats().unused_samples == server.stats().unused_samples
    mine, theirs = server.totals(), again.totals()
    assert (theirs.episodes, theirs.steps, theirs.accepted_caches) == (mine.episodes, mine.steps, mine.accepted_caches)
    assert numbers(again.get_batch(172)) == numbers(server.get_batch(172))
    assert again.publish("policy", b"z") == 3, "versions go back for nobody"


def test_three_servers_share_out_what_two_had(cluster, tmp_path):
    servers = [filled(cluster, clients=4) for _ in range(2)]
    for number, server in enumerate(servers):
        server.get_batch(10)
        server.snapshot(tmp_path / str(number))
    paths = [tmp_path / "0", tmp_path / "1"]
    others = [cluster.server(parameters=SMALL, limits=QUICK) for _ in range(3)]
    done = [other.restore(paths, part=(rank, 3)) for rank, other in enumerate(others)]
    assert sum(each.unused for each in done) == sum(server.stats().unused_samples for server in servers) == 492
    assert all(each.caches + each.elsewhere == sum(other.caches for other in done) for each in done)
    totals = [server.totals() for server in servers]
    with cluster.reader(others, limits=QUICK) as reader:
        assert reader.totals().totals.steps == sum(total.steps for total in totals)
        drawn = [reader.get_batch(41).ids for _ in range(12)]
    assert len(np.unique(np.concatenate(drawn))) <= 492
    until(lambda: sum(other.stats().unused_samples for other in others) == 0)


def test_a_snapshot_restores_into_another_run_without_its_totals(cluster, tmp_path):
    filled(cluster, run="one").snapshot(tmp_path / "a")
    again = cluster.server(parameters=SMALL, run="two")
    assert again.restore([tmp_path / "a"]).caches == 12
    assert (again.total_steps, again.totals("one").steps) == (0, 120)


def test_parameters_come_along_when_they_are_asked_for(cluster, tmp_path):
    stacked = SMALL.replace(frame_stack=2, importance_exponent=0.9)
    filled(cluster, parameters=stacked).snapshot(tmp_path / "a")
    again = cluster.server()
    with pytest.raises(SnapshotMismatch, match="frame_stack=2"):
        again.restore([tmp_path / "a"])
    assert again.restore([tmp_path / "a"], configure=True).caches == 12
    assert again.parameters == stacked
    again.get_batch(5)


def test_a_client_that_goes_on_is_counted_once(cluster, tmp_path):
    """It dials the server that has its memory now, and pushes there."""
    server = cluster.server(parameters=SMALL, limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    record(client)
    assert client.push_cache()
    client.update()
    until(lambda: server.total_caches == 1)
    server.snapshot(tmp_path / "a")
    place = {"endpoint": server.endpoint, "push_endpoint": server.push_endpoint, "pub_endpoint": server.pub_endpoint}
    server.close()
    again = cluster.server(parameters=SMALL, limits=QUICK, **place)
    again.restore([tmp_path / "a"])
    record(client)
    until(lambda: client.push_cache() and True)
    client.update(10.0)
    until(lambda: again.stats().held_caches >= 2)
    assert again.totals().steps == 40


def test_every_server_writes_what_is_ordered_behind_a_proxy(cluster, tmp_path, capsys):
    servers = [filled(cluster, state_dir=tmp_path / str(number), name=f"s{number}") for number in range(2)]
    proxy = cluster.proxy(servers)
    assert snapshots.order(proxy.endpoint, "nightly", timeout=20.0) == 0
    said = capsys.readouterr().out
    for number in range(2):
        path = tmp_path / str(number) / "snapshots" / "nightly.snapshot"
        assert f"s{number}: {path}: 12 caches of 192 samples" in said
        assert snapshots.show(str(path), check=True) == 0
    assert "  default: 12 caches of 192 samples, 192 not drawn yet, of 3 clients" in capsys.readouterr().out


def test_what_cannot_be_written_is_said_of_the_server_that_cannot(cluster, tmp_path):
    good, bad = cluster.server(state_dir=tmp_path / "s", name="good"), cluster.server(name="bad")
    with cluster.reader([good, bad], limits=QUICK) as reader:
        told = reader.snapshot("one")
        assert told["good"].state == "done" and "no state folder" in str(told["bad"])
        for wrong in ("", "../x", ".hidden", "a/b", "x" * 101):
            assert "is no name" in str(reader.snapshot(wrong)["good"]), wrong
        (tmp_path / "s" / "snapshots" / "dir.snapshot").mkdir()
        refused = reader.snapshot("dir")["good"]
        assert isinstance(refused, Refused) and refused.code == "failed"
        assert [path.name for path in (tmp_path / "s" / "snapshots").iterdir() if path.is_file()] == ["one.snapshot"]


def test_the_same_order_is_carried_out_once(cluster, tmp_path):
    server = cluster.server(state_dir=tmp_path)
    body = wire.TakeSnapshot(name="a", order=bytes(16))
    assert server._archive.order(HEADER, body, None).body.state == "writing"
    done = until(lambda: (told := server._archive.order(HEADER, body, None).body).state == "done" and told)
    assert server._archive.taken == 1 and done.path == str(tmp_path / "snapshots" / "a.snapshot")


def test_one_snapshot_is_ordered_at_a_time(cluster, tmp_path, monkeypatch):
    server = cluster.server(state_dir=tmp_path)
    go_on = threading.Event()
    monkeypatch.setattr(server._archive, "take", lambda path: go_on.wait(10.0) and 1 / 0)
    first = wire.TakeSnapshot(name="a", order=bytes(16))
    server._archive.order(HEADER, first, None)
    with pytest.raises(MemoireError, match="'a' is being written"):
        server._archive.order(HEADER, wire.TakeSnapshot(name="b", order=bytes([1] * 16)), None)
    go_on.set()
    failed = until(lambda: (told := server._archive.order(HEADER, first, None).body).state == "failed" and told)
    assert "ZeroDivisionError" in failed.text


def test_the_timer_keeps_what_a_killed_server_held(cluster, tmp_path):
    server = filled(cluster, state_dir=tmp_path, snapshot_every=0.05)
    until(lambda: (path := tmp_path / MEMORY).exists() and snapshot.facts(path)["tables"][0]["caches"] == 12)
    copy = tmp_path.parent / "killed"
    os.system(f"cp -r {tmp_path} {copy}")  # as a kill at this moment leaves it
    server.close()
    again = cluster.server(state_dir=copy, parameters=SMALL, snapshot_every=1000.0)
    assert again.stats().unused_samples == 192
    again.get_batch(100)
    again.close(5.0)
    third = cluster.server(state_dir=copy, parameters=SMALL, snapshot_every=1000.0)
    assert third.stats().unused_samples == 92


def test_settings_that_cannot_be_are_refused(cluster, tmp_path):
    with pytest.raises(ParameterError, match="snapshot_every"):
        cluster.server(snapshot_every=5.0)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ParameterError, match="snapshot_every"):
            cluster.server(snapshot_every=wrong, state_dir=tmp_path)
    for wrong in ("3", "0/3", "4/3", "1/0", "-1/3", "1/3/5"):
        with pytest.raises(ParameterError, match="--part"):
            snapshots.part_of(wrong)
    assert [snapshots.part_of(text) for text in (None, "1/1", "3/3")] == [(0, 1), (0, 1), (2, 3)]


def test_a_restart_restores_no_file_again(cluster, tmp_path, capsys):
    filled(cluster).snapshot(tmp_path / "a")
    first = cluster.server(state_dir=tmp_path / "s", parameters=SMALL)
    snapshots.restore(first, [str(tmp_path / "a")], None, configure=False, skip_damaged=False)
    first.publish("other", b"x")  # saved with the setting, or after it
    first.close()
    again = cluster.server(state_dir=tmp_path / "s", parameters=SMALL)
    snapshots.restore(again, [str(tmp_path / "a")], None, configure=False, skip_damaged=False)
    assert again.stats().held_caches == 0
    assert "restored nothing; 1 of the files were restored here before" in capsys.readouterr().err


def test_a_server_that_is_closed_gives_up_what_it_writes(cluster, tmp_path, monkeypatch):
    server = filled(cluster)
    before = (tmp_path / "a").write_bytes(b"former")
    asked = threading.Event()
    monkeypatch.setattr(server._archive, "_at", lambda point: asked.set() or time.sleep(0.02))
    box = []

    def take():
        try:
            server.snapshot(tmp_path / "a")
        except Closed as error:
            box.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    assert asked.wait(10.0)
    server.close()
    thread.join(10.0)
    assert box and before == 6 and (tmp_path / "a").read_bytes() == b"former"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


KILLED = """
    import sys, threading
    import numpy as np
    from memoire import Server, connect
    from netkit import QUICK, SCHEMA, record
    from memoire.parameters import Parameters
    with Server("tcp://127.0.0.1:0", SCHEMA, parameters=Parameters(cache_size=64), limits=QUICK) as server:
        client = connect(server.endpoint, limits=QUICK)
        record(client)
        threading.Thread(target=lambda: [client.push_cache() for _ in range(10**9)], daemon=True).start()
        for number in range(10**9):
            server.snapshot(sys.argv[1])
            print(number, flush=True)
"""


@pytest.mark.processes
def test_a_kill_under_load_leaves_a_whole_file(tmp_path):
    path, tests = tmp_path / "a", Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    for extra in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(path)], env=environment, stdout=subprocess.PIPE
        )
        with child:
            for _ in range(3 + extra):
                assert child.stdout.readline()
            child.send_signal(signal.SIGKILL)
        with SnapshotFile(path) as file:
            assert not file.verify() and file.end.complete
