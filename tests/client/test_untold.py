"""A home that does not answer: the actor says so once, says when it is back, and at its end says or keeps what is lost."""

import logging
import re

import pytest

from fake_store import Disk, MemoryStore
from memoire.client import reports as former_clients
from memoire.client.reports import ReportPart
from memoire.errors import MemoireTimeout, StateUnusable
from memoire.limits import Limits
from memoire.wire import messages
from memoire.wire.frames import name_hash, tail_of
from netkit import QUICK, record, until

pytestmark = pytest.mark.slow

RUN = "run"


def warnings_of(caplog, client):
    """What the log says of a client, in order."""
    who = f"client {client.client_id.hex()[:8]}"
    return [record.getMessage() for record in caplog.records if who in record.getMessage()]


def words(caplog, client):
    """Which of three things it said."""
    known = {"has acknowledged nothing": "away", "is back;": "back", "were acknowledged": "end"}
    return [word for text in warnings_of(caplog, client) for part, word in known.items() if part in text]


@pytest.fixture
def soon(times):
    times(home_away=0.3, heartbeat=0.1)


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
        r"server 'home' at tcp://\S+ has acknowledged nothing for \d{1,3} s\. 20 steps, 2 episodes and 1 log", text
    )
    assert 0 <= int(re.search(r"nothing for (\d+) s", text)[1]) <= 200
    assert "nothing listens" in text or "memoire doctor" in text
    assert client.stats().untold_steps == 20
    cluster.restart(server)
    until(lambda: words(caplog, client) == ["away", "back"])
    client.update(100.0)
    assert client.stats().untold_steps == 0 and client.close(100.0)
    assert words(caplog, client) == ["away", "back"], "nothing is lost: nothing more is said"


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


def test_an_actor_that_has_told_everything_ends_without_a_word(cluster, caplog):
    server = cluster.server()
    client = cluster.client(server, limits=QUICK)
    record(client)
    client.update(100.0)
    server.close()
    client.close(0.1)
    assert words(caplog, client) == []


def test_what_is_lost_after_the_end_of_a_run_is_no_warning(cluster, caplog):
    caplog.set_level(logging.INFO, logger="memoire.client.client")
    server = cluster.server()
    client = cluster.client(server, limits=QUICK)
    server.finish()
    until(lambda: client.finished)
    server.close()
    record(client)
    client.close(0.1)
    (text,) = [each for each in caplog.records if "were acknowledged" in each.getMessage()]
    assert text.levelno == logging.INFO


@pytest.mark.parametrize("times", [1, 2])
def test_what_an_actor_could_not_tell_is_told_by_the_next_one_with_its_folder_and_counts_once(
    cluster, tmp_path, caplog, times
):
    caplog.set_level(logging.INFO, logger="memoire")
    kept_at = {"state_dir": tmp_path / "state"}
    server = cluster.server(name="home", run=RUN, **kept_at)
    log = tmp_path / "log"
    server.set_logfile(log)
    lost = []
    for number in range(times):
        client = cluster.client(server, limits=QUICK, state_dir=tmp_path / "actor", input_uuid=number + 1)
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
    again = cluster.client(server, limits=QUICK, state_dir=tmp_path / "actor")
    assert again.close(100.0), "it waits for them, too"
    assert not list((tmp_path / "actor").iterdir())
    assert server.total_steps == 50 * times and server.total_episodes == 5 * times
    assert server.stats().totals.returns_count >= 2 * times
    server.close()
    text = log.read_text().splitlines()
    for number in range(times):
        kept = [line.split(",", 2)[2] for line in text if f",{number + 1:08x},kept" in line]
        assert kept == [f"kept {number} {line}" for line in range(700)]


def test_two_clients_may_tell_the_same_file(cluster, tmp_path):
    server = cluster.server(name="home", run=RUN)
    client = cluster.client(server, limits=QUICK, state_dir=tmp_path)
    server.close()
    record(client, episodes=2, length=10)
    client.close(0.1)
    server = cluster.server(server.endpoint, name="home", run=RUN)
    found = [cluster.client(server, limits=QUICK, state_dir=tmp_path) for _ in range(3)]
    assert all(each.close(100.0) for each in found)
    assert (server.total_steps, server.total_episodes) == (20, 2) and not list(tmp_path.iterdir())


def test_what_belongs_to_a_former_run_is_told_to_it(cluster, tmp_path):
    server = cluster.server(name="home", run="one", state_dir=tmp_path / "state")
    client = cluster.client(server, limits=QUICK, state_dir=tmp_path / "actor")
    record(client, episodes=1, length=10)
    client.update(100.0)
    server.close()
    record(client, episodes=2, length=10)
    client.close(0.1)
    server = cluster.server(server.endpoint, name="home", run="two", state_dir=tmp_path / "state")
    assert cluster.client(server, limits=QUICK, state_dir=tmp_path / "actor").close(100.0)
    assert (server.totals("one").steps, server.totals("two").steps) == (30, 0)


def test_what_nobody_will_ever_take_stays_and_is_named(cluster, tmp_path, caplog):
    server = cluster.server(name="home", run="one")
    client = cluster.client(server, limits=QUICK, state_dir=tmp_path)
    server.close()
    record(client)
    client.close(0.1)
    (path,) = tmp_path.iterdir()
    other = cluster.server(server.endpoint, name="home", run="two")  # has never heard of run one
    assert cluster.client(other, limits=QUICK, state_dir=tmp_path).close(100.0)
    assert path.exists() and "cannot be told, and stays" in caplog.text


def test_a_damaged_file_is_named_and_stays_and_the_client_works(cluster, tmp_path, caplog):
    server = cluster.server(name="home")
    path = tmp_path / f"untold-{'07' * 16}.msgpack"
    path.write_bytes(b"\x80")
    client = cluster.client(server, limits=QUICK, state_dir=tmp_path)
    record(client)
    assert client.close(100.0) and server.total_steps == 20
    assert path.exists() and f"{path} cannot be read, and is not told" in caplog.text


def test_a_folder_that_cannot_be_used_is_refused_at_once(cluster, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StateUnusable, match="Name a folder that this user may write"):
        cluster.client(cluster.server(), state_dir=tmp_path / "file")


def test_a_full_disk_is_said_to_the_client_as_such(cluster, tmp_path, store_by, caplog, soon):
    disk = Disk(tmp_path)
    store_by(lambda folder, name, default_name, limits, clock: MemoryStore(disk, default_name))
    server = cluster.server(state_dir="here")
    client = cluster.client(server, limits=Limits(resend_after=0.05, resend_most=0.1, update_every=0.02))
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


def test_what_is_longer_than_the_home_takes_stays_and_nobody_waits_for_it(cluster, caplog, tmp_path):
    lines = [messages.Line(number, 1.0, 0, "x" * 100) for number in range(1, 101)]
    update = messages.Update(lines=lines)
    part = ReportPart(name_hash(RUN), tail_of(update))
    facts = {"client": b"f" * 16, "label": 0, "table": "", "home": "home", "steps": 0, "episodes": 0, "lines": 100}
    path = former_clients.save(tmp_path, former_clients.FinalCounts(**facts, parts=[part]))
    server = cluster.server(name="home", run=RUN, limits=Limits(request_bytes=8000))
    client = cluster.client(server, limits=QUICK, state_dir=tmp_path)
    until(lambda: "cannot be told, and stays" in caplog.text)
    assert "8000 are taken (request_bytes)" in caplog.text and path.exists() and not server.lines()
    assert client.close(100.0)
