"""Which addresses other machines reach, what is said or refused of them, and newcomers by rate."""

import socket
import threading
import warnings

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

import memoire
import netkit
from history.ports import block
from memoire.cli.main import main, parser
from memoire.cli.options import page_options
from memoire.errors import InsecureWarning, MemoireTimeout, ParameterError, ProtocolError, Refused
from memoire.limits import Limits
from memoire.nodes.http import NodePages
from memoire.security import access as exposure
from memoire.security.provision import write_cluster
from memoire.security.roles import ConnectionClients, TokenBuckets
from memoire.wire import messages
from memoire.wire.frames import encode, name_hash, parse
from netkit import QUICK, until

# --- Which addresses other machines reach, and that everything that listens there for everybody says so or is refused

HERE = [
    "tcp://127.0.0.1:5560", "tcp://127.3.2.1:0", "tcp://localhost:5560", "tcp://LOCALHOST:1", "tcp://[::1]:5560",
    "tcp://[::ffff:127.0.0.1]:1", "ipc:///run/memoire", "ipc://@abstract", "inproc://memoire", "127.0.0.1:8080",
    "[::1]:8080", "localhost:0", "http://127.0.0.1:8080",
]  # fmt: skip
ELSEWHERE = [
    "tcp://*:5560", "tcp://0.0.0.0:5560", "tcp://[::]:5560", "tcp://10.0.0.1:1", "tcp://eth0:5560", "tcp://server-0:1",
    "tcp://localhost.evil.example:1", "tcp://127.0.0.1.evil.example:1", "tcp://[fe80::1%eth0]:1", "*:8080", ":8080",
    "http://0.0.0.0:8080", "tcp://:5560",
]  # fmt: skip


@pytest.mark.parametrize("address", HERE)
def test_an_address_of_this_machine_is_local(address):
    assert exposure.is_local(address)
    exposure.refuse("--listen", address, guard="a token")


@pytest.mark.parametrize("address", ELSEWHERE)
def test_an_address_that_others_reach_is_not(address):
    assert not exposure.is_local(address) and exposure.reachable([*HERE, address]) == [address]
    with pytest.raises(ParameterError, match=r"or a token, or --insecure: everybody may come"):
        exposure.refuse("--listen", address, guard="a token")


def test_a_warning_names_the_addresses_and_what_to_do():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exposure.warn("this server", HERE, guard="keys")
    with pytest.warns(InsecureWarning, match=r"this server listens at tcp://\*:1, tcp://\*:2 for everybody .* keys"):
        exposure.warn("this server", ["tcp://*:1", *HERE, "tcp://*:2"], guard="keys")


def test_a_server_that_is_open_warns_of_each_address_once():
    with pytest.warns(InsecureWarning) as said, memoire.Server("tcp://*:0", netkit.SCHEMA, name="wide") as server:
        assert server.add_pull_worker("tcp://*:0") in str(said[1].message)
        server.add_request_worker("tcp://127.0.0.1:0")
        bound = ", ".join([server.endpoint, server.push_endpoint, server.pub_endpoint])
        assert f"server 'wide' listens at {bound} for everybody" in str(said[0].message) and len(said) == 2
        assert "keys (keys=)" in str(said[0].message) and said[0].filename == __file__


def test_a_classic_server_that_is_open_warns_and_works():
    one, none = np.zeros(1, np.float32), np.float32(0)
    with pytest.warns(InsecureWarning, match="for everybody"):
        server = memoire.ReplayMemoryServer(one, one, one, none, one, one, one, 64, "tcp://*:0", 4)
    with pytest.warns(InsecureWarning, match="for everybody") as said:
        loop = threading.Thread(target=server.rep_worker_main, args=("tcp://*:0", "Bind"))
        loop.start()
        until(lambda: len(said))
    server.close()
    loop.join(100.0)


def is_taken(port):
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False


def test_who_makes_the_warning_an_error_gets_no_open_server():
    port = block(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", InsecureWarning)
        with pytest.raises(InsecureWarning):
            memoire.Server(memoire.Endpoints(f"tcp://*:{port}", push="tcp://*:0", publish="tcp://*:0"), netkit.SCHEMA)
        with pytest.raises(InsecureWarning, match="may read how it stands"):
            NodePages("*:0")
    until(lambda: not is_taken(port))  # its address is free again


def test_what_only_this_machine_reaches_is_said_nothing_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with memoire.Server("tcp://127.0.0.1:0", netkit.SCHEMA) as server, NodePages("127.0.0.1:0", server):
            memoire.Proxy("inproc://front-that-is-here", [server.endpoint]).close()


SCHEMA = '{"columns": {}}'
COMMANDS = {
    "server": (["server", "--schema", SCHEMA, "--endpoint", "tcp://*:5560"], "--endpoint"),
    "proxy": (["proxy", "tcp://server:5560", "--endpoint", "tcp://0.0.0.0:5560"], "--endpoint"),
    "relay": (["relay", "tcp://server:5560", "--endpoint", "tcp://10.0.0.1:5560"], "--endpoint"),
    "up": (["up", "--schema", SCHEMA, "--host", "*"], "--host"),
    "server's pages": (["server", "--schema", SCHEMA, "--http", "*:8080"], "--http"),
    "proxy's pages": (["proxy", "tcp://server:5560", "--http", "0.0.0.0:8080"], "--http"),
    "dashboard": (["dashboard", "http://server:8080", "--listen", "*:8265"], "--listen"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_would_be_open_to_everybody_is_refused(command, capsys, monkeypatch):
    monkeypatch.delenv("MEMOIRE_KEYS", raising=False)
    words, option = COMMANDS[command]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert f"{option}" in said and "--insecure: everybody may come" in said


def test_what_nobody_chose_is_this_machine_only():
    for words in (["server", "--schema", SCHEMA], ["proxy", "tcp://a:1"], ["relay", "tcp://a:1"]):
        given = parser().parse_args(words)
        assert exposure.is_local(given.endpoint) and exposure.is_local(given.http) and given.probes is None
    assert exposure.is_local(f"tcp://{parser().parse_args(['up', '--schema', SCHEMA]).host}:1")
    assert exposure.is_local(parser().parse_args(["dashboard", "http://a:1"]).listen)


@pytest.mark.parametrize("place", ["file", "environment"])
def test_settings_that_would_be_open_to_everybody_are_refused_like_flags(place, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("MEMOIRE_KEYS", raising=False)
    words = ["proxy", "tcp://server:5560"]
    if place == "file":
        path = tmp_path / "memoire.toml"
        path.write_text('[proxy]\nendpoint = "tcp://*:5560"\n')
        words += ["--settings", str(path)]
    else:
        monkeypatch.setenv("MEMOIRE_ENDPOINT", "tcp://*:5560")
    assert main(words) == 1
    assert "--insecure: everybody may come" in capsys.readouterr().err


def test_keys_tokens_or_the_word_insecure_let_a_command_listen_for_others(tmp_path):
    write_cluster(tmp_path / "keys")
    (tmp_path / "token").write_text("a-token-that-is-long")
    wide = ["server", "--schema", SCHEMA, "--endpoint", "tcp://*:0", "--http", "*:0"]
    guarded = parser().parse_args(
        [*wide, "--keys", str(tmp_path / "keys"), "--http-token-file", str(tmp_path / "token")]
    )
    found = page_options(guarded)
    assert found["http"] == "*:0" and found["http_token"].first == "a-token-that-is-long"
    assert page_options(parser().parse_args([*wide, "--insecure"]))["http_token"] is None


# --- Newcomers by rate: so many at once, then so many a second, and whoever is known goes on; also over real connections

FEW = Limits.of(connection_clients=3, connection_clients_rate=0.5)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(-1.0, 3.0)), max_size=40))
def test_no_key_takes_more_than_its_burst_and_what_came_back_since(steps):
    buckets, now, taken, began = TokenBuckets(3, 0.5), 100.0, {"a": [], "b": []}, 100.0
    for key, seconds in steps:
        now += seconds
        if buckets.take(key, now):
            taken[key].append(now)
    for times in taken.values():
        latest = max([began, *times])
        assert len(times) <= 3 + 0.5 * (latest - began) + sum(max(0.0, -seconds) for _, seconds in steps) + 1e-6


def test_keys_are_bounded_and_the_one_that_took_nothing_for_longest_is_forgotten():
    buckets = TokenBuckets(1, 0.0, most=2)
    assert all(buckets.take(key, 0.0) for key in "abc")
    assert buckets.take("a", 0.0) and not buckets.take("c", 0.0)


def test_a_connection_brings_few_clients_and_those_it_brought_go_on():
    clients = ConnectionClients(2, 1.0)
    for client in (b"1", b"2", b"1"):
        clients.check(b"here", client, 0.0)
    with pytest.raises(ProtocolError, match=r"has brought 2 clients \(connection_clients\); 1 more may come a second"):
        clients.check(b"here", b"3", 0.0)
    clients.check(b"there", b"3", 0.0)
    clients.check(b"here", b"2", 0.0)
    clients.check(b"here", b"3", 1.0)


class Stranger:
    """One connection that speaks for any client."""

    def __init__(self, cluster, endpoint):
        self.socket = cluster.context.socket(zmq.DEALER)
        self.socket.linger, self.socket.rcvtimeo = 0, 30_000
        self.socket.connect(endpoint)

    def ask(self, client, body, number=1, home=0):
        self.socket.send_multipart([b"", *encode(body, client=client, sequence=number, home=home)])
        return parse(self.socket.recv_multipart()[1:]).body


@pytest.mark.parametrize("through", ["server", "proxy"])
def test_a_connection_that_makes_up_clients_is_stopped_where_it_ends(cluster, through):
    server = cluster.server(limits=FEW)
    node = server if through == "server" else cluster.proxy([server], limits=FEW)
    stranger, other = Stranger(cluster, node.endpoint), Stranger(cluster, node.endpoint)
    names = [bytes([number]) * 16 for number in range(1, 6)]
    said = [stranger.ask(name, messages.Hello(role="actor")) for name in names]
    assert [getattr(each, "code", "") for each in said] == ["", "", "", "busy", "busy"]
    assert "connection_clients" in said[-1].text
    home = name_hash(server.name)
    assert isinstance(stranger.ask(names[0], messages.Update(steps=1), 2, home), messages.Updated)
    assert isinstance(other.ask(names[4], messages.Hello(role="actor")), messages.Welcome)
    until(lambda: node.stats().refused.get("busy") == 2)
    other.socket.close()
    stranger.socket.close()


def test_a_client_that_comes_too_soon_says_so_or_gets_in_later(cluster):
    server = cluster.server(limits=Limits.of(new_clients=1, new_clients_rate=0.0, connection_clients=0))
    with pytest.raises(Refused, match="connection_clients") as refused:
        cluster.client(server, limits=QUICK, timeout=0.5)
    assert refused.value.code == "busy"


def test_steps_of_a_newcomer_that_has_to_wait_are_kept(cluster):
    server = cluster.server(limits=Limits.of(new_clients=1, new_clients_rate=0.0))
    first, second = (cluster.client(server, limits=QUICK) for _ in range(2))
    first.on_entries(5)
    first.update(100.0)
    second.on_entries(7)
    with pytest.raises(MemoireTimeout):
        second.update(0.3)
    assert server.total_steps == 5 and second.stats().steps == 7
    server._dispatcher.newcomers.burst = 10
    server._dispatcher.newcomers._buckets.clear()
    second.update(100.0)
    assert server.total_steps == 12
