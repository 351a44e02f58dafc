"""Tests of `memoire doctor --roundtrip`: a cache goes to a server and back, and learners do not read it."""

import threading
import time
from unittest import mock

import numpy as np
import pytest

import memoire
from memoire.accounting.account import Totals
from memoire.cli import doctor
from memoire.errors import ParameterError
from memoire.limits import Limits
from memoire.tables.caches.pool import Pool
from memoire.tables.table import Table, Tables
from memoire.wire.frames import ROUNDTRIP
from netkit import DEADLINE, until

pytestmark = pytest.mark.slow

SCHEMA = {"obs": (np.float32, (4,)), "reward": np.float32}


def examine(endpoint, timeout=100.0):
    lines = []
    status = doctor.examine(endpoint, timeout=timeout, roundtrip=True, say=lines.append)
    return status, "\n".join(lines)


def test_a_cache_comes_back_through_a_proxy_and_meets_no_learner(cluster):
    servers = [cluster.server(schema=SCHEMA) for _ in range(2)]
    proxy = cluster.proxy(servers)
    status, output = examine(proxy.endpoint)
    assert status == doctor.WELL, output
    assert "a cache of 16 entries is at its home" in output
    assert "samples of the cache came back unchanged" in output
    assert all(server.stats().held_caches == 0 and server.tables == ("default",) for server in servers)
    stats = [server.stats() for server in servers]
    assert sum(each.probes for each in stats) == 1
    for each in stats:
        assert each.totals == Totals() and (each.guests, each.learners, each.samples) == (0, (), 0)
    assert not any(server.clients() for server in servers)
    assert "servers count this probe separately from the run's totals" in output


def test_a_round_trip_costs_no_place_of_a_new_client_and_is_forgotten(cluster):
    server = cluster.server(schema=SCHEMA, limits=Limits.of(new_clients=2, new_clients_rate=0.001, client_timeout=0.05))
    assert examine(server.endpoint)[0] == doctor.WELL
    assert server.stats().newcomers_left == 2
    dispatcher = server._dispatcher
    until(lambda: dispatcher.store_gone_accounts() or not len(dispatcher.probes))
    dispatcher.probes.check_invariants()
    assert server.stats().probes == 1 and not dispatcher.probes.guests


def test_a_round_trip_takes_a_state_folder_nothing(cluster, tmp_path):
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA, state=tmp_path / "state") as server:
        assert examine(server.endpoint)[0] == doctor.WELL
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA, state=tmp_path / "state") as server:
        assert server.stats().totals == Totals() and not server.clients()


def test_the_table_of_round_trips_keeps_no_log_lines(cluster):
    server = cluster.server(schema=SCHEMA)
    with memoire.connect(server.endpoint, table=ROUNDTRIP, timeout=DEADLINE) as client:
        client.log("hello")
        until(lambda: server.stats().refused.get("table"))
        assert not server.lines()


def test_several_go_there_and_back_at_once(cluster):
    server, statuses = cluster.server(schema=SCHEMA), []
    threads = [threading.Thread(target=lambda: statuses.append(examine(server.endpoint)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100.0)
    assert statuses == [doctor.WELL] * 4


def test_a_cache_that_is_refused_is_said_to_be(cluster, monkeypatch):
    server = cluster.server(schema=SCHEMA)
    refused = memoire.errors.ProtocolError("column", "not today")
    monkeypatch.setattr(Pool, "check", mock.Mock(side_effect=refused))
    status, output = examine(server.endpoint)
    assert status == doctor.STUCK
    assert "FAIL the cache did not arrive: column" in output


def test_a_cache_that_nobody_acknowledges_is_waited_for_until_the_deadline():
    client = mock.MagicMock(spec=memoire.Client)
    client.stats.return_value = mock.Mock(accepted_caches=0, rejected={})
    client.push_cache.return_value, client.push_reason = True, ""
    client.update.side_effect = lambda left: time.sleep(min(left, 0.01))
    with pytest.raises(doctor.StepFailed, match="no server acknowledged it within 0.1 s"):
        doctor._push(client, np.arange(3), 0.1)
    assert all(0.0 < call.args[0] <= 0.1 for call in client.update.call_args_list) and client.update.called


def test_another_cache_than_the_one_that_was_pushed_is_no_round_trip(cluster, monkeypatch):
    server, drawn = cluster.server(schema=SCHEMA), [(0, 17)]
    monkeypatch.setattr("memoire.cli.doctor._draw", lambda *_: drawn)
    status, output = examine(server.endpoint)
    assert status == doctor.STUCK
    assert "the drawn samples differ from the pushed entries" in output
    drawn.clear()
    status, output = examine(server.endpoint)
    assert "no draw within 100 s had samples of the cache" in output


def test_a_server_without_the_table_is_an_older_one(cluster, monkeypatch):
    server = cluster.server(schema=SCHEMA)
    monkeypatch.setattr("memoire.cli.doctor.ROUNDTRIP", "no such table")
    status, output = examine(server.endpoint)
    assert status == doctor.REFUSED
    assert "has no table 'no such table'" in output
    assert "older than this release" in output


def test_no_table_of_a_server_s_own_may_have_its_name():
    with pytest.raises(ParameterError, match="reserved for memoire doctor. Choose another name"):
        Tables({ROUNDTRIP: Table(SCHEMA)}, lambda name, table: Pool(table.schema))


def test_the_table_is_found_by_name_and_number_but_listed_nowhere():
    tables = Tables({"own": Table(SCHEMA)}, lambda name, table: Pool(table.schema))
    hidden = tables.named(ROUNDTRIP)
    assert tables.numbered(hidden.number) is hidden
    assert tables.name_of(hidden.number) == ROUNDTRIP
    assert (list(tables), tables.names, len(tables), ROUNDTRIP in tables) == ([tables.first], ("own",), 1, False)
