"""Tests of a server with state on a fake disk: replies wait for the disk, and a restart continues from saved state."""

import pytest
import zmq

import statekit
from fake_store import Disk, MemoryStore
from memoire.errors import MemoireError, MemoireTimeout, ParameterError
from memoire.models.model import Model
from memoire.replay.parameters import Parameters
from memoire.wire import _bytes, messages
from memoire.wire.frames import encode, parse
from netkit import QUICK, record, until


class Durable:
    """A server on a fake disk that is killed and started again at the same addresses."""

    def __init__(self, cluster, store_by, folder):
        self.cluster, self.disk, self.stores = cluster, Disk(folder), []
        self.places = {}

        def opened(folder, name, default_name, limits, clock):
            self.stores.append(MemoryStore(self.disk, name or default_name))
            return self.stores[-1]

        store_by(opened)

    def start(self, **options):
        asked = {"name": "home", "state": "here"} | self.places | options
        server = self.cluster.server(**asked)
        self.places = {name: getattr(server, name) for name in ("endpoint", "push_endpoint", "pub_endpoint")}
        return server

    def saved(self, client, run="default"):
        """Return the client's account on disk, or None."""
        return self.stores[-1].accounts(run).find(client)

    def kill(self, server):
        """Kill a server, which saves and sends no more."""
        self.stores[-1].cut()
        server.close(0.0)


@pytest.fixture
def durable(cluster, store_by, tmp_path):
    return Durable(cluster, store_by, tmp_path)


def acknowledged(client):
    """Report all counts, and return True if the server acknowledges them soon."""
    try:
        client.update(timeout=0.2)
    except MemoireTimeout:
        return False
    return True


def test_a_reply_leaves_when_what_it_says_is_on_disk_and_not_before(cluster, durable):
    server = durable.start(limits=QUICK)
    client, reader = cluster.client(server, limits=QUICK), cluster.reader([server], limits=QUICK)
    assert server.stats().durable
    client.update()
    durable.disk.may_save.clear()
    client.on_episode(0, 20, 1.0)
    assert not acknowledged(client)
    assert server.total_episodes == 1, "it has heard of it"
    assert durable.saved(client.client_id) is None
    client.log("a line")
    assert reader.stats() and server.model("topic") is None  # the server serves requests that need no disk
    durable.disk.may_save.set()
    client.update()
    assert durable.saved(client.client_id).report.episodes == 1
    assert [entry.line.text for entry in durable.disk.lines["default"]] == ["a line"]


def test_a_killed_server_goes_on_with_everything_it_acknowledged(cluster, durable):
    server = durable.start(limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    for number in range(5):
        record(client)
        client.log(f"line {number}")
        client.update()
        if number == 2:
            server.publish("topic", b"model")
            server.configure(cache_size=17)
            until(lambda: "default" in durable.disk.models)
        durable.kill(server)
        former, server = server, durable.start(limits=QUICK)
        assert server.total_episodes == number + 1 and server.total_steps == 20 * (number + 1)
        assert [entry.line.text for entry in server.lines()] == [f"line {n}" for n in range(number + 1)]
        assert server.stats().epoch > former.stats().epoch
    assert server.model("topic") == Model("topic", 1, b"model", False, server.model("topic").checksum)
    assert server.parameters.cache_size == 17
    client.log("last")
    client.update()
    assert [entry.index for entry in server.lines()] == [1, 2, 3, 4, 5, 6]
    assert server.publish("topic", b"next") == 2


def test_what_was_not_saved_when_the_server_was_killed_is_said_again(cluster, durable):
    server = durable.start(limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    client.update()
    durable.disk.may_save.clear()
    client.on_episode(0, 20, 1.0)
    client.log("once")
    assert not acknowledged(client)
    durable.kill(server)
    durable.disk.may_save.set()
    server = durable.start(limits=QUICK)
    assert server.lines() == []
    client.update()
    assert server.total_episodes == 1 and [entry.line.text for entry in server.lines()] == ["once"]


def test_a_run_that_is_over_stays_over_and_the_one_that_was_begun_goes_on(durable):
    server = durable.start(run="a")
    server.begin_run("b")
    server.finish()
    server.close()
    server = durable.start(run="a")
    assert (server.run, server.finished) == ("b", True)
    runs = [(facts.name, facts.finished, facts.ended > 0) for facts in server.runs()]
    assert runs == [("a", False, True), ("b", True, False)]
    server.resume()
    server.close()
    server = durable.start(run="c")  # the run is another than before
    assert (server.run, server.finished, [facts.name for facts in server.runs()]) == ("c", False, ["a", "b", "c"])
    assert [facts.ended > 0 for facts in server.runs()] == [True, True, False]
    server.begin_run("d")
    server.close()
    assert durable.start(run="c").run == "d", "what was asked for the last time is known, not what was at first"


def test_a_server_whose_disk_is_lost_acknowledges_nothing_and_says_so(cluster, durable):
    server = durable.start(limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    client.update()
    durable.disk.error = MemoireError("the disk is gone")
    record(client)
    assert not acknowledged(client)
    for call in (lambda: server.get_batch(1, timeout=100.0), lambda: server.publish("t", b""), server.resume):
        with pytest.raises(MemoireError, match="disk is gone"):
            call()
    assert not acknowledged(client)
    durable.disk.error = None
    server.close()
    server = durable.start(limits=QUICK)
    client.update()
    assert server.total_episodes == 1


def test_lines_reach_the_log_file_when_they_are_on_disk(cluster, durable, tmp_path):
    server = durable.start(limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    server.set_logfile(tmp_path / "log")
    durable.disk.may_save.clear()
    client.log("x")
    assert not acknowledged(client)
    server._io.lines.tick(float("inf"))
    assert (tmp_path / "log").read_text() == ""
    durable.disk.may_save.set()
    client.update()
    server.close()
    assert (tmp_path / "log").read_text().count(",x\n") == 1


def test_a_new_run_begins_at_zero_and_the_former_one_stays_readable(cluster, durable):
    server = durable.start(run="a", limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    record(client, episodes=3)
    client.log("of a")
    client.update()
    assert client.push_cache()
    until(lambda: server.total_caches == 1)
    server.publish("topic", b"1")
    server.begin_run("b")
    assert (server.total_episodes, server.total_caches, server.lines(), server.stats().held_caches) == (0, 0, [], 0)
    assert server.totals("a").episodes == 3 and [entry.line.text for entry in server.lines(run="a")] == ["of a"]
    assert server.model("topic") is None and server.publish("topic", b"2") == 2, "versions never go back"
    with pytest.raises(ParameterError, match="'a', 'b'"):
        server.totals("c")
    server.begin_run("a")
    assert server.total_episodes == 3 and server.run == "a"
    server.close()
    server = durable.start(run="a")
    assert server.totals("a").episodes == 3 and server.totals("b").episodes == 0


def test_a_model_is_nobodys_before_it_is_on_disk(cluster, durable):
    """A client with a model that is not on disk might hold a version that its server forgets, and receive an older one."""
    server = durable.start(limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    model = client.model("policy")
    assert server.publish("policy", b"one") == 1
    assert model.wait(100.0).value == b"one"
    durable.disk.may_save.clear()
    assert [server.publish("policy", bytes([number])) for number in range(2, 6)] == [2, 3, 4, 5]
    durable.kill(server)
    durable.disk.may_save.set()
    server = durable.start(limits=QUICK)
    client.update(100.0)
    assert (model.newest().version, server.model("policy").version) == (1, 1)
    assert server.publish("policy", b"two") == 2
    assert model.wait(10.0, after=1).value == b"two"


def test_held_caches_come_back_with_what_was_not_drawn_yet(cluster, durable):
    server = durable.start(snapshot_caches=True, limits=QUICK, parameters=Parameters(cache_size=64))
    clients = [cluster.client(server, limits=QUICK) for _ in range(2)]
    for client in clients:
        record(client)
        for _ in range(3):
            assert client.push_cache()
    until(lambda: server.total_caches == 6)
    first = server.get_batch(100)
    before = server.stats()
    server.close()
    server = durable.start(snapshot_caches=True, limits=QUICK, parameters=Parameters(cache_size=64))
    after = server.stats()
    assert (after.held_caches, after.unused_samples) == (6, 6 * 64 - 100) == (before.held_caches, before.unused_samples)
    assert after.totals.accepted_caches == 6, "they were accepted once"
    rest = server.get_batch(284)
    assert len(first.ids) + len(rest.ids) == 6 * 64 and server.stats().unused_samples == 0
    server.close()
    server = durable.start(snapshot_caches=True, limits=QUICK, parameters=Parameters(cache_size=64))
    assert server.stats().held_caches == 0, "what was drawn does not come back"


@pytest.mark.parametrize(
    "change", [{"run": "other"}, {"frame_stack": 2, "discard_mismatched": True}, {"snapshot_caches": False}]
)
def test_held_caches_come_back_to_the_run_and_parameters_that_they_were_made_for(cluster, durable, change, caplog):
    server = durable.start(snapshot_caches=True, limits=QUICK)
    client = cluster.client(server, limits=QUICK)
    record(client)
    assert client.push_cache()
    until(lambda: server.total_caches == 1)
    server.close()
    server = durable.start(**{"snapshot_caches": True} | change)
    assert server.stats().held_caches == int("snapshot_caches" in change)
    assert ("1 refused (parameters)" in caplog.text) == ("frame_stack" in change)


CONTROLS = {"parameters": {"parameters": {"cache_size": 7}}, "run": {"run": "next"}, "the end": {"finish": True}}


def promised():
    """Yield requests whose replies promise that data is on disk, in a possible order."""
    model = b"model"
    publish = messages.Publish(topic="t", size=len(model), checksum=_bytes.checksum(model), version=3)
    yield "UPDATE", messages.Update(episodes=1, steps=20), None
    yield "WELCOME of a client whose account is not saved", messages.Hello(), None
    yield "PUBLISHED", publish, model
    yield "PUBLISHED, to a resend", publish, model
    empty = messages.Publish(topic="u", size=0, checksum=_bytes.checksum(b""))
    yield "PUBLISHED of a model that has no bytes", empty, None
    yield "TAKEN of accounts", messages.Inherit(run_name="former", accounts=statekit.rows(5, 6)), None
    for what, change in CONTROLS.items():
        yield f"TAKEN of {what}", messages.Control(**change), None


def test_every_reply_that_promises_something_waits_for_the_disk(cluster, durable):
    server = durable.start()

    def ask(client, number, body, payload=None):
        asker = cluster.context.socket(zmq.DEALER)
        asker.linger, asker.rcvtimeo = 0, 60_000
        asker.connect(server.endpoint)
        asker.send_multipart([b"", *encode(body, client=client, sequence=number, payload=payload)])
        until(lambda: sum(sum(timing.counts) for timing in server.stats().requests.values()) >= number)
        return asker

    durable.disk.may_save.clear()
    before, held = len(durable.disk.saved), []
    for number, (what, body, payload) in enumerate(promised(), 1):
        client = b"m" * 16 if what.startswith(("UPDATE", "WELCOME")) else bytes([number]) * 16
        held.append((what, ask(client, number, body, payload)))
    last = ask(b"r" * 16, len(held) + 1, messages.Hello(role="reader"))
    last.recv_multipart()  # the last reply promises nothing
    for what, asker in held:
        assert not asker.poll(0), f"{what} left before the disk"
    assert len(durable.disk.saved) == before
    durable.disk.may_save.set()
    for what, asker in held:
        reply = parse(asker.recv_multipart()[1:]).body
        assert not isinstance(reply, messages.Refusal), f"{what}: {reply}"
    assert len(durable.disk.saved) > before and set(durable.disk.models["default"]) == {"t", "u"}
