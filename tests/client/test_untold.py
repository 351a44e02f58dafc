"""Tests of a home that does not answer: the actor's reports, and the counts that the next client delivers."""

import logging
import os
import re

import msgspec
import pytest

from fake_store import Disk, MemoryStore
from memoire.client import reports as former_clients
from memoire.client.reports import RETRY_INTERVAL, FinalCounts, LateRequest, ReportPart, UnreportedClient
from memoire.errors import Closed, MemoireTimeout, Refused, StateUnusable
from memoire.limits import Limits
from memoire.wire import messages
from memoire.wire.frames import name_hash, tail_of
from netkit import CLIENT, QUICK, record, reply, until

RUN = "run"


def warnings_of(caplog, client):
    who = f"client {client.client_id.hex()[:8]}"
    return [record.getMessage() for record in caplog.records if who in record.getMessage()]


def words(caplog, client):
    """Name the known warnings about a client, in order."""
    known = {"has acknowledged nothing": "away", "is back;": "back", "were acknowledged": "end"}
    return [word for text in warnings_of(caplog, client) for part, word in known.items() if part in text]


@pytest.fixture
def soon(times):
    times(home_away=0.3, heartbeat=0.1)


@pytest.mark.slow
def test_an_actor_says_once_that_its_server_is_away_and_once_that_it_is_back(cluster, soon, caplog):
    server = cluster.server(name="home")
    client = cluster.client(server, limits=QUICK)
    record(client, episodes=1, length=10)
    client.update(100.0)
    server.close()
    record(client, episodes=2, length=10)
    client.log("a line")
    until(lambda: words(caplog, client) == ["away"])
    text = warnings_of(caplog, client)[0]
    assert re.search(
        r"server 'home' at tcp://\S+ has acknowledged nothing for \d{1,3} s\. The client keeps 20 steps, 2 episodes",
        text,
    )
    assert 0 <= int(re.search(r"nothing for (\d+) s", text)[1]) <= 200
    assert "nothing listens" in text or "memoire doctor" in text
    assert client.stats().untold_steps == 20
    cluster.restart(server)
    until(lambda: words(caplog, client) == ["away", "back"])
    client.update(100.0)
    assert client.stats().untold_steps == 0 and client.close(100.0)
    assert words(caplog, client) == ["away", "back"], "nothing is lost: nothing more is said"


@pytest.mark.slow
def test_an_actor_that_ends_while_nobody_answers_says_what_is_lost(cluster, caplog):
    server = cluster.server(name="home")
    client = cluster.client(server, limits=QUICK)
    record(client, episodes=3, length=10)
    client.update(100.0)
    server.close()
    record(client, episodes=2, length=10)
    client.log("a line")
    assert not client.close(0.2)
    (text,) = warnings_of(caplog, client)
    assert "ends before 20 steps, 2 episodes and 1 log lines were acknowledged: they are not counted" in text
    assert "server 'home', was last heard" in text
    assert not client.close(0.2) and words(caplog, client) == ["end"], "once"


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_what_an_actor_could_not_tell_is_told_by_the_next_one_with_its_folder_and_counts_once(
    cluster, tmp_path, caplog, times
):
    caplog.set_level(logging.INFO, logger="memoire")
    kept_at = {"state": tmp_path / "state"}
    server = cluster.server(name="home", run=RUN, **kept_at)
    log = tmp_path / "log"
    server.set_logfile(log)
    lost = []
    for number in range(times):
        client = cluster.client(server, limits=QUICK, state=tmp_path / "actor", input_uuid=number + 1)
        record(client, episodes=3, length=10)
        client.log("told")
        client.update(100.0)
        server.close()
        record(client, episodes=2, length=10)
        for line in range(700):
            client.log(f"kept {number} {line}")
        assert not client.close(0.1)
        lost.append(client)
        server = cluster.restart(server, **kept_at)
        server.set_logfile(log)
    assert "20 steps, 2 episodes and 700 log lines were acknowledged: they are in" in warnings_of(caplog, lost[-1])[0]
    again = cluster.client(server, limits=QUICK, state=tmp_path / "actor")
    assert again.close(100.0), "it waits for them, too"
    assert not list((tmp_path / "actor").iterdir())
    assert server.total_steps == 50 * times and server.total_episodes == 5 * times
    assert server.stats().totals.returns_count >= 2 * times
    server.close()
    text = log.read_text().splitlines()
    for number in range(times):
        kept = [line.split(",", 2)[2] for line in text if f",{number + 1:08x},kept" in line]
        assert kept == [f"kept {number} {line}" for line in range(700)]


@pytest.mark.slow
def test_a_full_disk_is_said_to_the_client_as_such(cluster, tmp_path, store_by, caplog, soon):
    disk = Disk(tmp_path)
    store_by(lambda folder, name, default_name, limits, clock: MemoryStore(disk, default_name))
    server = cluster.server(state="here")
    client = cluster.client(server, limits=Limits.of(resend_after=0.05, resend_most=0.1, update_every=0.02))
    disk.is_full = True
    disk.may_save.clear()
    record(client)
    with pytest.raises(MemoireTimeout, match="says: the disk is full"):
        client.update(1.0)
    until(lambda: client.stats().trouble == "the disk is full")
    assert client.readiness() == [
        f"unacknowledged: The home of this client, server {server.name!r}, says: the disk is full"
    ]
    until(lambda: words(caplog, client) == ["away"])
    assert warnings_of(caplog, client)[0].endswith("says: the disk is full")
    disk.is_full = False
    disk.may_save.set()
    until(lambda: words(caplog, client) == ["away", "back"])
    client.update(100.0)
    assert client.stats().trouble == "" and client.readiness() == [] and server.total_steps == 20
    assert len(disk.saved) >= 1 and "disk" not in server.stats().refused


# --- The next client delivers the kept counts, message by message

HOME = name_hash("home")


def welcome(home_name="home"):
    return reply(messages.Welcome(schema="{}", home_name=home_name))


UPDATED = reply(messages.Updated())


@pytest.fixture
def teller(tmp_path):
    path = tmp_path / "untold.msgpack"
    path.touch()
    updates = [messages.Update(epoch=5, steps=10, caches=3, cache_bytes=99), messages.Update(epoch=5, steps=30)]
    parts = [ReportPart(run, tail_of(update)) for run, update in zip((7, 0), updates, strict=True)]
    return UnreportedClient(
        path,
        FinalCounts(client=CLIENT, label=9, table="default", home="home", steps=30, episodes=2, lines=1, parts=parts),
    )


def test_each_part_is_told_in_order_and_then_the_file_goes(teller, caplog):
    caplog.set_level(logging.INFO)
    hello = teller.begin()
    assert (hello.body.role, hello.body.label, hello.body.table) == ("actor", 9, "default")
    assert (hello.run, hello.home, teller.again_at) == (0, HOME, float("inf"))
    first = teller.receive_answer(welcome(), 1.0)
    assert first == LateRequest(messages.Update(epoch=5, steps=10, caches=3, cache_bytes=99), run=7)
    assert teller.receive_answer(UPDATED, 2.0) == LateRequest(messages.Update(epoch=5, steps=30))
    assert teller.path.exists() and not teller.is_done
    assert teller.receive_answer(UPDATED, 3.0) is None and teller.is_done
    assert not teller.path.exists() and "delivered 30 steps, 2 episodes and 1 log lines" in caplog.text


def test_another_home_is_told_nothing_of_caches(teller):
    teller.begin()
    assert teller.receive_answer(welcome("other"), 1.0).body == messages.Update(steps=10)


@pytest.mark.parametrize("code", ["busy", "client"])
def test_a_home_that_has_no_time_is_asked_again_from_the_beginning(teller, code):
    teller.begin()
    teller.receive_answer(welcome(), 1.0)
    teller.receive_answer(UPDATED, 2.0)
    assert teller.receive_answer(Refused("there", code, "later"), 3.0) is None
    assert (teller.again_at, teller.is_done) == (3.0 + RETRY_INTERVAL, False)
    assert isinstance(teller.begin().body, messages.Hello)
    assert teller.receive_answer(welcome(), 4.0).body.steps == 10


@pytest.mark.parametrize("received", [UPDATED, welcome()])
def test_an_answer_to_something_else_is_no_answer(teller, received):
    teller.begin()
    if received is not UPDATED:
        teller.receive_answer(welcome(), 1.0)
    assert teller.receive_answer(received, 2.0) is None
    assert (teller.again_at, teller.is_done) == (2.0 + RETRY_INTERVAL, False)


def test_what_nobody_will_ever_take_stays_and_is_named(teller, caplog):
    teller.begin()
    assert teller.receive_answer(Refused("there", "run", "never heard of it"), 1.0) is None
    assert teller.is_done and teller.path.exists() and "cannot be delivered, and stays" in caplog.text


def test_the_rest_is_left_to_the_next_client_when_this_one_ends(teller, caplog):
    teller.begin()
    assert teller.receive_answer(Closed("this client"), 1.0) is None
    assert teller.is_done and teller.path.exists() and not caplog.records


def whole(**change):
    parts = [ReportPart(0, tail_of(messages.Update(steps=1)))]
    facts = {"label": 1, "table": "default", "home": "home", "steps": 5, "episodes": 2, "lines": 0, "parts": parts}
    return FinalCounts(**{"client": CLIENT} | facts | change)


def test_what_is_left_is_found_in_order_of_the_clients(tmp_path):
    kept = [whole(client=bytes([number]) * 16) for number in (2, 1)]
    texts = [former_clients.keep_final_report(tmp_path, untold) for untold in kept]
    assert "5 steps, 2 episodes and 0 log lines were acknowledged: they are in" in texts[0]
    assert [content for _, content in former_clients.read_reports(tmp_path)] == kept[::-1]
    assert former_clients.keep_final_report(None, kept[0]).endswith("they are not counted")
    assert former_clients.read_reports(tmp_path / "nowhere") == []


def test_a_folder_that_takes_nothing_is_named(tmp_path):
    text = former_clients.keep_final_report(tmp_path / "gone", whole())
    assert f"they are not counted, and could not be kept in {tmp_path / 'gone'}: " in text


DAMAGE = {
    "empty": b"",
    "none": b"\x80",
    "noise": b"\xff" * 30,
    "former form": msgspec.msgpack.encode(whole()),
    "tail": whole(parts=[ReportPart(0, b"\xc1")]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_stays(tmp_path, caplog, damage):
    path = former_clients.save(tmp_path, whole())
    if isinstance(DAMAGE[damage], bytes):
        path.write_bytes(DAMAGE[damage])
    else:
        former_clients.save(tmp_path, DAMAGE[damage])
    assert former_clients.read_reports(tmp_path) == [] and path.exists()
    assert f"{path} cannot be read, and its report is not delivered" in caplog.text


def test_a_file_that_is_larger_than_any_client_leaves_is_not_read(tmp_path, caplog):
    path = former_clients.save(tmp_path, whole())
    os.truncate(path, former_clients.MAX_BYTES + 1)  # sparse: the file takes no space
    assert (
        former_clients.read_reports(tmp_path) == []
        and f"the file is larger than {former_clients.MAX_BYTES} bytes" in caplog.text
    )


def test_a_file_that_another_client_has_told_meanwhile_is_no_loss(tmp_path, caplog):
    (tmp_path / f"untold-{'07' * 16}.msgpack").symlink_to(tmp_path / "nowhere")
    assert former_clients.read_reports(tmp_path) == [] and not caplog.records


def test_a_folder_is_made_or_refused(tmp_path, monkeypatch):
    assert former_clients.folder_at(tmp_path / "made").is_dir()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(StateUnusable, match="not writable"):
        former_clients.folder_at(tmp_path / "made")
