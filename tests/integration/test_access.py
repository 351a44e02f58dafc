"""Tests of access over TCP: with the right key, in the right role, for the key's own client ids, until revoked."""

import contextlib
import re
import socket
from collections import Counter

import numpy as np
import pytest
import zmq

from classic_help import templates
from memoire import ReplayMemoryServer
from memoire.cli import doctor
from memoire.client.client import connect
from memoire.errors import AuthError, KeyFileError, MemoireTimeout, Refused
from memoire.net import curve_server, sockets
from memoire.proxy.proxy import Proxy
from memoire.reader.reader import Reader
from memoire.security import keys as keypairs
from memoire.security import provision as key_writer
from memoire.security import roles
from memoire.security.keys import Keys
from memoire.server.server import Server
from memoire.server.settings import Process
from memoire.wire import messages, types
from memoire.wire.frames import encode, name_hash, parse
from netkit import QUICK, SCHEMA, KeepingContext, in_thread, ports_of, record, server_of, until
from tcpkit import CutWay, place


@pytest.fixture(autouse=True)
def quick_looks(times):
    """Read keys more often than once a second."""
    times(keys_reread=0.05, refused_pause=0.05, refused_max_pause=0.5, denied=0.5, second_key=120.0)


@pytest.fixture
def keys(tmp_path):
    key_writer.write_cluster(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def context():
    with KeepingContext() as keeping:
        yield keeping


@pytest.fixture
def server(keys, context):
    with Server("tcp://127.0.0.1:0", SCHEMA, keys=keys, process=Process(context=context), limits=QUICK) as node:
        yield node


def refused(node):
    return Counter(node.stats().security.refused)


def push(client):
    record(client)
    assert client.push_cache(100.0), client.push_reason


def another_key(keys, role="actor", name="other"):
    """Create a keys folder that no server has authorized."""
    folder = keys.parent / f"{role}-{name}"
    key_writer.write_one(folder, keypairs.make(role, name), (keys / "actor" / "server.pub").read_text())
    return folder


def raw(address, data, seconds=100.0):
    """Send bytes to a port, and return the port's reply until it hangs up."""
    heard = b""
    with socket.create_connection(place(address), seconds) as connection, contextlib.suppress(ConnectionResetError):
        connection.sendall(data)
        while more := connection.recv(4096):
            heard += more
    return heard


SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
STRANGERS = {
    "plain": SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32),
    "old": SIGNATURE + b"\x01\x05\x00\x00" + b"hello",
    "oldest": b"\x01\x00\x05\x00hell",
    "password": SIGNATURE + b"\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32),
    "web": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "ping": SIGNATURE + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\x07\x04PING\x00\x10",
    "half": SIGNATURE[:5],
}


def test_on_every_port_strangers_hear_nothing_and_are_counted(keys, context, times):
    times(handshake=1.0)  # the time limit for silent peers
    options = {"keys": keys, "context": context, "limits": QUICK}
    with (
        server_of("tcp://127.0.0.1:0", SCHEMA, **options) as server,
        Proxy("tcp://127.0.0.1:0", [server.endpoint], **options) as proxy,
    ):
        with connect(proxy.endpoint, timeout=100.0, **options) as actor:
            push(actor)
            until(lambda: server.total_caches == 1)
            before = [refused(node).total() for node in (server, proxy)]
            tried = [(at, name) for node in (server, proxy) for at in ports_of(node) for name in STRANGERS]
            waiting = [in_thread(raw, at, STRANGERS[name]) for at, name in tried]
            for (thread, box), (at, name) in zip(waiting, tried, strict=True):
                thread.join(100.0)
                # The stranger receives only a greeting, which asks for keys; messages of the stranger get no answer.
                assert len(box["value"]) <= 64, f"{name} heard {box['value']!r} at {at}"
            for node, count in zip((server, proxy), before, strict=True):
                until(lambda: refused(node).total() >= count + 3 * len(STRANGERS))  # noqa: B023
                assert node.stats().security.refused["plain"] >= 6
                assert node.stats().security.refused["silent"] + node.stats().security.refused["protocol"] >= 12
            push(actor)
            until(lambda: server.total_caches == 2)


def test_a_connection_that_ends_before_it_has_shown_a_key_is_counted_apart(server):
    socket.create_connection(place(server.endpoint)).close()
    until(lambda: (security := server.stats().security).hung_up or security.refused)
    assert server.stats().security.hung_up == 1 and not refused(server)


def test_a_wrong_key_is_told_apart_from_a_wrong_address(server, keys, context, times):
    times(second_key=0.05)
    with pytest.raises(
        AuthError, match=r"the key actor/other [0-9a-f]{16} .*is not authorized there.*memoire keys authorize"
    ):
        connect(server.endpoint, keys=another_key(keys), context=context, timeout=100.0)
    assert refused(server)["unknown"] >= 1
    with pytest.raises(AuthError, match="requires a key, and this process has none"):
        connect(server.endpoint, context=context, timeout=100.0)
    until(lambda: refused(server).get("plain"))
    key_writer.write_cluster(keys.parent / "elsewhere")
    with pytest.raises(AuthError, match=r"none of the keys in server.pub \([0-9a-f]{16}(, [0-9a-f]{16}){2}\)"):
        connect(server.endpoint, keys=keys.parent / "elsewhere", context=context, timeout=100.0)
    until(lambda: refused(server)["server_key"] >= 2)
    with (
        Server("tcp://127.0.0.1:0", SCHEMA, process=Process(context=context)) as careless,
        pytest.raises(AuthError, match="the node uses no keys, so its identity cannot be verified"),
    ):
        connect(careless.endpoint, keys=keys, context=context, timeout=100.0)
    with pytest.raises(AuthError, match="is not authorized there"):
        Reader([server.endpoint], keys=another_key(keys, "learner"), context=context, timeout=100.0)


def test_a_relay_that_is_not_let_in_says_why(server, keys, context, tmp_path, caplog):
    options = {"context": context, "limits": QUICK}

    def sent_away(node):
        with pytest.raises((Refused, MemoireTimeout)) as raised:  # MemoireTimeout comes before the first answer
            connect(node.endpoint, timeout=1.0, **options)
        return str(raised.value)

    folder = another_key(keys, "proxy")
    with (
        Proxy(f"ipc://{tmp_path}/relay", [server.endpoint], keys=folder, **options) as relay,
        Proxy(f"ipc://{tmp_path}/behind", [relay.endpoint], **options) as behind,
    ):
        why = r"denied: tcp://.* denied access: the key proxy/other [0-9a-f]{16} .*memoire keys auth"
        for node in (relay, behind):
            until(lambda: re.search(why, " ".join(node.readiness())))  # noqa: B023
            lines = []
            assert doctor.examine(node.endpoint, timeout=100.0, say=lines.append) == doctor.REFUSED
            assert re.search("FAIL its servers deny the proxy or relay access: tcp://.*proxy/other", lines[-2])
            until(lambda: re.search(r"\(denied\): tcp://.*proxy/other", sent_away(node)))  # noqa: B023
        warnings = [each.message for each in caplog.records if each.name == "memoire.net.channel"]
        assert "denied access" in warnings[0]
        key_writer.authorize(keys / "server", Keys(folder).own)
        with connect(behind.endpoint, timeout=100.0, **options) as actor:
            push(actor)
        until(lambda: relay.readiness() == behind.readiness() == [])


def test_a_process_without_the_right_files_does_not_begin(keys, context):
    (keys / "actor" / "server.pub").unlink()
    with pytest.raises(KeyFileError, match=r"has no server.pub to verify tcp://127.0.0.1:1"):
        connect("tcp://127.0.0.1:1", keys=keys, context=context)
    with pytest.raises(KeyFileError, match="has the key learner/learners, which may not listen"):
        Server("tcp://127.0.0.1:0", SCHEMA, keys=keys / "learner", process=Process(context=context))
    with pytest.raises(KeyFileError, match="which may not listen"):
        Proxy("tcp://127.0.0.1:0", ["tcp://127.0.0.1:1"], keys=keys / "actor", context=context)


def test_a_revoked_key_is_cut_off_also_where_it_is_only_listening(server, keys, context):
    folder = another_key(keys)
    key_writer.authorize(keys / "server", Keys(folder).own)
    until(lambda: server.keys.peer(Keys(folder).own.public))
    with (
        connect(server.endpoint, keys=keys, context=context, limits=QUICK) as staying,
        connect(server.endpoint, keys=folder, context=context, limits=QUICK) as leaving,
    ):
        for client in (staying, leaving):
            push(client)
            client.model("policy")
        server.publish("policy", b"1")
        for client in (staying, leaving):
            assert client.model("policy").wait(100.0).body == b"1"
        until(lambda: server.total_episodes == 2)  # a cache may arrive before the counts
        key_writer.revoke(keys / "server", "actor/other")
        until(lambda: leaving._io.channel.link.denied)
        server.publish("policy", b"2")
        until(lambda: staying.model("policy").newest().body == b"2")
        record(leaving)
        with pytest.raises(AuthError, match="is not authorized there"):
            leaving.update(1.0)
        assert leaving.model("policy").newest().body == b"1"
        assert server.total_episodes == 2 and refused(server)["revoked"] >= 3 and not server.stats().faults
        push(staying)
        until(lambda: server.total_caches == 3)
        key_writer.authorize(keys / "server", Keys(folder).own)  # after a new authorization, no work is lost
        until(lambda: server.total_episodes == 4)
        until(lambda: leaving.model("policy").newest().body == b"2")
        push(leaving)
        until(lambda: server.total_caches == 4)


def test_keys_are_replaced_while_everybody_works(server, keys, context):
    mine = Keys(keys, "actor")
    with (
        Proxy("tcp://127.0.0.1:0", [server.endpoint], keys=keys, context=context, limits=QUICK) as proxy,
        connect(proxy.endpoint, keys=mine, context=context, limits=QUICK) as actor,
    ):
        push(actor)
        for role in ("actor", "proxy"):  # the new key is authorized and used, the old key revoked
            former, new = Keys(keys / role).own, keypairs.make(role)
            for folder in (keys / "server", keys / "proxy"):
                key_writer.authorize(folder, new)
            until(lambda: all(node.keys.peer(new.public) for node in (server, proxy)))  # noqa: B023
            if role == "proxy":  # other roles know a proxy by the proxy's key
                for other in roles.ROLES:
                    with (keys / other / "server.pub").open("a") as known:
                        known.write(new.text())
                until(lambda: new.public in {key.public for key in mine.servers})  # noqa: B023
            (keys / role / "new").write_text(new.text(secret=True))
            (keys / role / "new").chmod(0o600)
            (keys / role / "new").replace(keys / role / "own.key")
            until(lambda: (mine if role == "actor" else proxy.keys).own == new)  # noqa: B023
            push(actor)
            for folder in (keys / "server", keys / "proxy"):
                key_writer.revoke(folder, former.fingerprint)
            push(actor)
        actor.update(100.0)
        assert server.total_episodes == 5 and server._dispatcher.ledger.find(actor.client_id).owner == "actor/actors"
        push(actor)  # the home server learns of caches that were on the way when connections ended
        until(lambda: server.total_caches + server.totals().lost_caches == 6)
        assert server.stats().faults == proxy.stats().faults == 0


def test_classic_classes_take_keys(keys, context):
    with ReplayMemoryServer(*templates(), 100, "tcp://127.0.0.1:0", 10, keys=keys, context=context) as server:
        assert server.server.keys.own.role == "server" and server.server.stats().security.keys


class Sender:
    def __init__(self, context, server, folder):
        self.context, self.server, self.keys = context, server, Keys(folder)
        self.client, self.number = np.random.default_rng().bytes(16), 0
        self.sockets = []

    def open(self, kind, address):
        connection = self.context.socket(kind)
        connection.linger, connection.rcvtimeo, connection.sndtimeo = 0, 20_000, 20_000
        own = self.keys.own
        sockets.use_keys(connection, own.public, own.secret, self.server.keys.own.public)
        connection.connect(address)
        self.sockets.append(connection)
        return connection

    def ask(self, body, *, payload=None, client=None, extra=()):
        self.number += 1
        facts = {"run": name_hash(self.server.run), "home": name_hash(self.server.name)}
        sent = encode(body, client=client or self.client, sequence=self.number, payload=payload, **facts)
        connection = self.open(zmq.DEALER, self.server.endpoint)
        connection.send_multipart([*extra, b"", *sent])
        frames = connection.recv_multipart()
        return parse(frames[frames.index(b"") + 1 :]).body


BODIES = {
    types.HELLO: messages.Hello(role="doctor"),
    types.UPDATE: messages.Update(),
    types.FETCH: messages.Fetch(topic="policy"),
    types.PUBLISH: messages.Publish(topic="policy", size=0, checksum=0),
    types.SUMS: messages.Sums(),
    types.DRAW: messages.Draw(),
    types.CONTROL: messages.Control(finish=True),
    types.LEDGER: messages.LedgerRequest(),
    types.INHERIT: messages.Inherit(run_name="other"),
    types.TAKE_SNAPSHOT: messages.TakeSnapshot(name="x", order=bytes(16)),
}


def test_each_role_may_do_what_the_table_says(server, keys, context):
    for role in ("actor", "reader", "proxy", "inference", "learner"):
        sender = Sender(context, server, keys / role)
        for kind, body in BODIES.items():
            answer = sender.ask(body)
            is_refused = isinstance(answer, messages.Refusal) and answer.code == "role"
            assert is_refused == (role not in kind.sent_by), (role, kind.name, answer)
        answer = sender.ask(messages.Feedback(), payload=b"x")
        assert (isinstance(answer, messages.Refusal) and answer.code == "role") == (role != "learner")
    assert server.finished  # the learner finished the run
    server.resume()  # otherwise close waits until all clients know
    wrong = sum(role not in kind.sent_by for role in roles.ROLES for kind in BODIES)
    assert refused(server)["role"] == wrong + 4


def test_a_reader_cannot_push_and_an_actor_cannot_be_a_reader(server, keys, context):
    def counts():
        return refused(server).get("role", 0), server.stats().refused.get("schema", 0)

    for role, is_taken in (("reader", False), ("proxy", False), ("actor", True)):
        sender = Sender(context, server, keys / role)
        connection = sender.open(zmq.PUSH, server.push_endpoint)
        before = counts()
        connection.send_multipart(encode(messages.Cache(number=1), client=sender.client, sequence=1, payload=b"x" * 64))
        until(lambda: counts() != before)  # noqa: B023
        assert counts()[is_taken] > before[is_taken]
    with pytest.raises(Refused, match="'actors' is for an actor, but a reader used it"):
        Reader([server.endpoint], keys=keys / "actor", context=context, timeout=100.0)
    with pytest.raises(Refused, match="'readers' is for a reader, but an actor used it"):
        connect(server.endpoint, keys=keys / "reader", context=context, timeout=100.0)


def test_a_client_id_belongs_to_the_key_that_came_first_also_after_a_restart(keys, context, tmp_path):
    folder = another_key(keys)
    key_writer.authorize(keys / "server", Keys(folder).own)
    options = {"keys": keys, "context": context, "limits": QUICK, "state": tmp_path / "state", "name": "a"}
    with server_of("tcp://127.0.0.1:0", SCHEMA, **options) as server:
        mine, other = Sender(context, server, keys / "actor"), Sender(context, server, folder)
        assert isinstance(mine.ask(messages.Hello()), messages.Welcome)
        assert isinstance(mine.ask(messages.Update(episodes=1)), messages.Updated)
        answer = other.ask(messages.Update(episodes=1000), client=mine.client)
        assert answer.code == "owner" and "belongs to the key actor/actors, not to actor/other" in answer.text
        connection = other.open(zmq.PUSH, server.push_endpoint)
        connection.send_multipart(encode(messages.Cache(number=9), client=mine.client, sequence=9, payload=b"x" * 64))
        until(lambda: refused(server).get("owner", 0) == 2)
        assert server.total_episodes == 1
    with server_of("tcp://127.0.0.1:0", SCHEMA, **options) as server:
        mine.server = other.server = server
        assert other.ask(messages.Hello(), client=mine.client).code == "owner"
        assert isinstance(mine.ask(messages.Update(episodes=2)), messages.Updated) and server.total_episodes == 2


def test_only_a_proxy_may_say_for_whom_it_speaks(server, keys, context):
    forged = roles.passport_frame(roles.Peer("learner", "learners"))
    answer = Sender(context, server, keys / "proxy").ask(messages.Control(finish=True), extra=[forged, b"12345"])
    assert isinstance(answer, messages.Taken)
    for role in ("actor", "reader"):
        sender = Sender(context, server, keys / role)
        before = refused(server).get("passport", 0)
        with pytest.raises(zmq.Again):
            sender.open(zmq.DEALER, server.endpoint)
            sender.sockets[-1].rcvtimeo = 300
            sent = encode(messages.Control(finish=True), client=sender.client, sequence=1)
            sender.sockets[-1].send_multipart([forged, b"", *sent])
            until(lambda: refused(server).get("passport", 0) > before)  # noqa: B023
            sender.sockets[-1].recv_multipart()
    damaged = Sender(context, server, keys / "proxy")
    connection = damaged.open(zmq.DEALER, server.endpoint)
    connection.send_multipart([b"MEMP\x01\x09x", b"", *encode(messages.Hello(), client=damaged.client, sequence=1)])
    until(lambda: refused(server)["passport"] == 3)


def test_a_recorded_conversation_says_nothing_when_it_is_played_again(server, keys, context):
    recorded = []

    class Recorder(CutWay):
        def _read(self, connection):
            data = connection.recv(1 << 16, socket.MSG_PEEK)
            recorded.append((connection, data))
            super()._read(connection)

    way = Recorder(place(server.endpoint))
    try:
        sender = Sender(context, server, keys / "learner")
        connection = sender.open(zmq.DEALER, way.endpoint)
        connection.send_multipart([b"", *encode(messages.Control(run="second"), client=sender.client, sequence=1)])
        connection.recv_multipart()
    finally:
        way.close()
    dialler = recorded[0][0]
    server.begin_run("third")
    raw(server.endpoint, b"".join(data for end, data in recorded if end is dialler))
    until(lambda: refused(server).total() >= 1)
    assert server.run == "third"


def test_nobody_new_gets_in_while_nobody_decides(server, keys, context, monkeypatch):
    with connect(server.endpoint, keys=keys, context=context, limits=QUICK) as actor:
        push(actor)
        until(lambda: server.total_caches == 1)
        deciding = server._gate._authenticator
        monkeypatch.setattr(curve_server._Authenticator, "revive", lambda self: None)
        deciding.worker.stop(20.0)
        until(lambda: not deciding.worker.is_alive)
        with pytest.raises((MemoireTimeout, AuthError)):
            connect(server.endpoint, keys=keys, context=context, timeout=0.5)
        push(actor)  # an admitted client continues
        until(lambda: server.total_caches == 2)
        monkeypatch.undo()
        with connect(server.endpoint, keys=keys, context=context, timeout=100.0):
            pass


def test_the_doctor_tells_what_is_wrong_with_keys(server, keys, context, capsys):
    assert doctor.examine(server.endpoint, keys=keys / "actor", roundtrip=True, timeout=100.0) == doctor.WELL
    output = capsys.readouterr().out
    assert "keys: actor/actors" in output and "asks for a key" in output and "came back unchanged" in output
    with Server("tcp://127.0.0.1:0", SCHEMA, process=Process(context=context)) as careless:
        wrong = (server, None, "Connect with keys"), (careless, keys, "uses no keys")
        for node, own_keys, words in (*wrong, (server, another_key(keys), "the key actor/other")):
            assert doctor.examine(node.endpoint, keys=own_keys, timeout=2.0) == doctor.REFUSED
            assert words in capsys.readouterr().out
