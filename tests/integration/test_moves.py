"""Tests of clients that change their home: merged totals equal their counts under any server list of the proxy."""

import threading

import pytest

from history.ports import block, held
from memoire.accounting import merge
from memoire.cli.drain import drain, drain_above
from memoire.errors import MemoireTimeout, ParameterError
from memoire.net.addresses import NameResolver
from memoire.nodes.roles import ServersFile
from memoire.wire import messages
from netkit import QUICK, Book, Load, record, until


def rows_of(*servers):
    return merge.merge(*(server.accounts().rows for server in servers))


def lines_of(*servers):
    return [(entry.client, entry.line.number) for server in servers for entry in server.lines(most=100_000)]


def push(client, caches):
    assert all(client.push_cache(100.0) for _ in range(caches))


def check_exact(load, servers):
    """Check that totals equal the clients' counts, that no line is doubled, and that every cache is accounted for."""
    logged = load.stop()
    until(lambda: not any(client.stats().in_flight_caches for client in load.clients))
    clients = [client.stats() for client in load.clients]
    totals = merge.totals_of(rows_of(*servers))
    assert totals.episodes == sum(stats.episodes for stats in clients)
    assert totals.steps == sum(stats.steps for stats in clients)
    assert totals.returns_count == totals.episodes
    lines = lines_of(*servers)
    assert sorted(lines) == sorted(set(lines))
    assert sum(server.stats().log_lines for server in servers) == sum(logged)  # servers show fewer lines
    for stats in clients:
        received = stats.accepted_caches + sum(stats.rejected.values())
        assert stats.pushed_caches == received + stats.lost_caches + stats.in_flight_caches
        assert stats.pushed_bytes == stats.received_bytes + stats.lost_bytes + stats.in_flight_bytes
    return totals


def test_clients_of_a_server_that_is_taken_off_the_list_go_elsewhere_and_nothing_is_counted_twice(cluster):
    servers = [cluster.server(name=name) for name in ("a", "b", "c")]
    urls = [server.endpoint for server in servers]
    proxy = cluster.proxy(urls[:2])
    load = Load([cluster.client(proxy, limits=QUICK, seed=seed) for seed in range(6)])
    until(lambda: all(client.stats().updates for client in load.clients))
    for wanted in ([urls[1], urls[2]], [urls[2]], [urls[2], urls[0]], urls):
        proxy.set_servers(wanted)
        names = {name for name, url in zip("abc", urls, strict=True) if url in wanted}
        until(lambda names=names: set(proxy.servers) == names)
        until(lambda names=names: all(client.home in names for client in load.clients))
    check_exact(load, servers)
    assert proxy.stats().faults == 0


def test_totals_name_the_servers_that_did_not_answer(cluster):
    servers = [cluster.server(name=name) for name in ("a", "b")]
    client = cluster.client(servers[1], limits=QUICK)
    record(client, episodes=2)
    client.update(100.0)
    reader = cluster.reader(servers)
    servers[0].close()
    totals = reader.totals(timeout=1.0)
    assert (totals.servers, totals.missing, totals.totals.episodes) == (("b",), ("a",), 2)
    assert not totals.is_complete
    servers[1].close()
    with pytest.raises(MemoireTimeout):
        reader.totals(timeout=0.5)
    with pytest.raises(ParameterError, match="one of a, b"):
        reader.ask({"nobody": messages.LedgerRequest()})


def drained(leaving, heirs, context, **options):
    lines = []
    copied = drain(leaving.endpoint, [heir.endpoint for heir in heirs], say=lines.append, context=context, **options)
    return copied, lines


def test_a_drained_server_gives_its_clients_and_its_accounts_away_under_load(cluster):
    servers = [cluster.server(name=name) for name in ("a", "b", "c")]
    proxy = cluster.proxy(servers)
    load = Load([cluster.client(proxy, limits=QUICK, seed=seed) for seed in range(6)])
    until(lambda: all(client.stats().updates for client in load.clients))
    there = sum(client.home == "a" for client in load.clients)
    copied, lines = drained(servers[0], servers[1:], cluster.context)
    assert {client.home for client in load.clients} <= {"b", "c"}
    assert copied == there and lines[0] == "a sends its clients to other servers" and "may be stopped" in lines[-1]
    newcomer = cluster.client(proxy)
    until(lambda: newcomer.home != "a")  # newcomers do not stay at the drained server
    reader = cluster.reader([proxy])
    totals = check_exact(load, servers)
    with_all = reader.totals()
    servers[0].close()
    proxy.set_servers([server.endpoint for server in servers[1:]])
    until(lambda: set(proxy.servers) == {"b", "c"})
    without = cluster.reader([proxy]).totals()
    assert without.missing == ()
    for report in (with_all, without):
        counted = (report.totals.episodes, report.totals.steps, report.totals.accepted_caches)
        assert counted == (totals.episodes, totals.steps, totals.accepted_caches)


def test_servers_numbered_above_those_that_stay_are_drained_to_these(cluster, resolve_by):
    port = cluster.ports.enter_context(held(3))
    known = {f"s-{number}.test": [f"127.0.0.1{number}"] for number in (0, 1, 3)}  # number 2 has never existed
    resolve_by(NameResolver(Book(**known), fresh=0.0))
    servers = {number: cluster.server(f"tcp://127.0.0.1{number}:{port}", name=f"s-{number}") for number in (0, 1, 3)}
    clients = [cluster.client(server, limits=QUICK) for server in servers.values()]
    for client in clients:
        record(client, episodes=2, length=10)
        client.close(100.0)
    lines, template = [], f"tcp://s-{{n}}.test:{port}"
    assert drain_above(template, 1, timeout=100.0, say=lines.append, context=cluster.context) == 2
    assert servers[0].totals().steps == 60 and servers[0].totals().clients == 3
    assert [line for line in lines if "sends" in line] == [f"s-{n} sends its clients to other servers" for n in (1, 3)]
    assert drain_above(template, 4, say=lines.append, context=cluster.context) == 0
    assert lines[-1] == "no server is numbered 4 or above: nothing is drained"


def test_which_servers_to_drain_has_to_be_said():
    for template in ("tcp://server:5560", "tcp://server:55{n}0"):
        with pytest.raises(ParameterError, match=r"an address with \{n\} in its host name"):
            drain_above(template, 1)
    with pytest.raises(ParameterError, match="--keep must be a whole number from 1"):
        drain_above("tcp://server-{n}:5560", 0)


def test_a_silent_name_server_ends_a_drain_before_anything_is_changed(times):
    silent = threading.Event()
    times(lookup=0.1)
    asked = NameResolver(lambda host: silent.wait(100.0) and [])
    with pytest.raises(MemoireTimeout, match="no address of s-1.test from the name server.*Nothing was drained"):
        drain_above("tcp://s-{n}.test:5560", 1, known=asked)
    silent.set()


def test_every_run_of_a_drained_server_is_kept_by_its_heir(cluster):
    old, heir = cluster.server(name="old", run="one"), cluster.server(name="heir", run="three")
    client = cluster.client(old, limits=QUICK)
    record(client, episodes=2)
    client.update(100.0)
    old.finish()
    old.begin_run("two")
    until(lambda: client.run == "two")
    record(client, episodes=3)
    client.close(100.0)
    assert drained(old, [heir], cluster.context)[0] == 2
    assert drained(old, [heir], cluster.context)[0] == 2  # a second drain doubles nothing
    reader = cluster.reader([heir])
    assert [reader.totals(run).totals.episodes for run in ("one", "two", "three")] == [2, 3, 0]
    assert reader.totals("one").finished and not reader.totals("two").finished
    assert reader.totals().run == "three" and set(reader.totals().runs) == {"one", "two", "three"}
    assert [heir.totals(run).episodes for run in ("one", "two")] == [2, 3]


def test_a_drain_says_which_clients_cannot_leave(cluster):
    server, other = cluster.server(name="one"), cluster.server(name="two")
    client = cluster.client(server, limits=QUICK)
    record(client)
    client.update(100.0)
    with pytest.raises(
        MemoireTimeout, match=f"1 clients have not left: {client.client_id.hex()[:8]}. Clients that know"
    ):
        drained(server, [other], cluster.context, timeout=3.0)
    assert client.home == "one"  # still served
    record(client)
    client.update(100.0)
    assert server.total_episodes == 2


def test_a_drain_needs_one_server_and_another(cluster):
    servers = [cluster.server(name=name) for name in ("a", "b")]
    proxy = cluster.proxy(servers)
    until(lambda: set(proxy.servers) == {"a", "b"})
    with pytest.raises(ParameterError, match="one server's own address .this one leads to a, b"):
        drained(proxy, servers, cluster.context)
    with pytest.raises(ParameterError, match="another server's address"):
        drained(servers[0], servers[:1], cluster.context)
    assert not any(server._dispatcher.is_draining for server in servers)


def test_a_finished_run_is_heard_of_by_clients_that_do_nothing(cluster, times):
    times(heartbeat=300.0)  # a pause longer than the test
    server = cluster.server(name="one")
    proxy = cluster.proxy([server])
    clients = [cluster.client(node) for node in (server, proxy)]
    until(lambda: all(client.stats().updates for client in clients))
    server.finish()
    until(lambda: all(client.finished for client in clients))


def test_a_server_that_a_proxy_has_not_met_is_missing_from_totals_and_keeps_a_run_from_beginning(cluster, times):
    times(proxy_hello=0.2, reader_hello=0.2)
    here = cluster.server(name="one", run="old")
    later = f"tcp://127.0.0.1:{block(3)}"
    inner = cluster.proxy([here.endpoint, later])
    outer = cluster.proxy([inner])
    until(lambda: outer.servers == ("one",))
    reader = cluster.reader([outer], timeout=100.0)
    until(lambda: reader.totals().missing == (later,))
    with pytest.raises(MemoireTimeout, match="nothing was changed") as caught:
        reader.begin_run("new", timeout=0.3)
    assert later in str(caught.value) and here.run == "old"
    there = cluster.server(later, name="two", run="old")
    reader.begin_run("new", timeout=100.0)
    assert (here.run, there.run) == ("new", "new")
    until(lambda: (totals := reader.totals()).servers == ("one", "two") and not totals.missing)


def test_a_list_in_a_file_is_followed_and_a_wrong_one_is_said(cluster, tmp_path, capsys):
    servers = [cluster.server(name=name) for name in ("a", "b")]
    path = tmp_path / "servers"
    path.write_text(f"# comment\n{servers[0].endpoint}  # the first\n\n")
    listed = ServersFile(str(path))
    assert listed.read() == [servers[0].endpoint]
    assert listed.read() is None  # nothing new
    proxy = cluster.proxy(servers[:1])
    path.write_text(servers[1].endpoint)
    listed.follow(proxy)
    until(lambda: proxy.servers == ("b",))
    path.write_text("nonsense")
    listed.follow(proxy)
    assert "is ignored" in capsys.readouterr().err
    path.unlink()
    listed.follow(proxy)  # the file may be replaced soon
    assert proxy.servers == ("b",)
    with pytest.raises(ParameterError, match="an address on each line"):
        ServersFile(str(path)).read()


def check_caches(server, client, pushed):
    """Check that the server's account of a gone client equals the client's own counts of caches."""
    until(lambda: server.accounts().rows["flags"].tolist() == [merge.GONE])
    (row,) = server.accounts().rows
    assert client.stats().pushed_caches == row["pushed_caches"] == pushed
    assert row["pushed_caches"] == row["accepted_caches"] + row["rejected_caches"] + row["lost_caches"]
    assert row["pushed_bytes"] == row["received_bytes"] + row["lost_bytes"]
    return row


def test_a_home_that_went_before_it_had_saved_anything_of_a_client_counts_all_its_caches(cluster, tmp_path):
    """In an upgrade, an actor and its home may begin and end at the same time."""
    server = cluster.server(name="one", state=tmp_path)
    client = cluster.client(server, limits=QUICK)  # the client has only sent HELLO
    server.close()
    record(client)
    push(client, 4)
    again = cluster.restart(server, state=tmp_path)
    client.update(100.0)
    push(client, 3)
    assert client.close(100.0)
    check_caches(again, client, 7)


def test_a_proxy_that_began_while_a_home_was_away_gives_its_clients_to_nobody_else(cluster, tmp_path, times):
    """If clients moved, their former home would never learn of the last caches that they pushed."""
    times(channel_renewed=0.2)  # the client sends HELLO again each time
    homes = [cluster.server(name=name, state=tmp_path / name) for name in ("a", "b")]
    proxy = cluster.proxy(homes)
    until(lambda: set(proxy.servers) == {"a", "b"})
    client = cluster.client(proxy, limits=QUICK)
    away, other = homes if client.home == "a" else homes[::-1]
    away.close()
    record(client)
    push(client, 4)
    proxy.close(0.0)
    proxy = cluster.proxy(homes, front=proxy.endpoint)
    until(lambda: proxy.servers == (other.name,))
    newcomer = cluster.client(proxy, limits=QUICK)
    assert newcomer.home == other.name  # the proxy no longer waits for the absent server
    resends = client.stats().resends
    until(lambda: client.home != away.name or client.stats().resends > resends + 8)
    back = cluster.restart(away, state=tmp_path / away.name)
    assert client.close(100.0) and client.home == back.name
    check_caches(back, client, 4)


def test_caches_that_a_proxy_took_along_are_lost_when_their_client_has_said_goodbye(cluster, tmp_path):
    """No later cache reveals the loss, since the client ends as soon as its home is back."""
    server = cluster.server(name="one", state=tmp_path)
    proxy = cluster.proxy([server])
    client = cluster.client(proxy, limits=QUICK)
    record(client)
    push(client, 3)
    until(lambda: server.total_caches == 3)
    server.close()
    push(client, 4)
    until(lambda: proxy.stats().backs[0].queued_bytes >= client.stats().in_flight_bytes > 0)
    proxy.close(0.0)
    cluster.proxy([server], front=proxy.endpoint)
    again = cluster.restart(server, state=tmp_path)
    assert client.close(100.0)
    row = check_caches(again, client, 7)
    assert (row["accepted_caches"], row["lost_caches"]) == (3, 4)
